"""Ranks, and other scripts in a process of their own, forked from a server that has imported torch: 0.1 seconds instead
of 3.

    output = run_ranks(2, "train_gpt2.py", "quickstart", ..., log=path)
    script = start(sleep_forever, log=path)                         # a function; returns at once
    script.process.kill()
    assert script.wait().exit_code == -9, script.output

The process is a real one: it has its own streams, environment and exit code, and it dies of real signals. What the
server has imported already is all that differs from a command that is typed.

    test process --asks--> fork server (has imported torch and the scripts) --forks--> script

The last section is about real torchrun processes, which are not forked.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
from helpers import ROOT, split_flags

from system.process import run_cli

# The server imports these once; a fork of it starts with all of them.
PRELOAD = "__main__ helpers train_gpt2 torch._dynamo fineweb hub hellaswag infer plots matplotlib.pyplot".split()


@cache
def forkserver_context() -> multiprocessing.context.ForkServerContext:
    """The server of this test process, started at the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # The server does not know sys.path: it finds the project and the tests by PYTHONPATH.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        forkserver.ensure_running()
    return context


def run_in_child(script, argv, log, env, prepare):
    """In the new process of `start`: do what a shell does before a command, then what `prepare` does, which may plant a
    fault, then run the script's main."""
    for stream, path in ((1, log), (2, f"{log}.err")):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    # Tests that are run in the background of a shell ignore Ctrl-C, and so would their processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # The tests run side by side, so one thread must do. And Python's resource tracker must not warn, at its end, of
    # what a killed process has not closed.
    torch.set_num_threads(1)
    resource_tracker.register = resource_tracker.unregister = lambda *_: None

    # The script, as if its arguments had been typed, with the planted fault, if any.
    sys.argv = [str(script), *argv]
    if prepare:
        prepare()
    run_cli(importlib.import_module(script.removesuffix(".py")).main if isinstance(script, str) else script)


@dataclass
class Script:
    """A script that has been started; what it prints goes to the file `log`, and its errors to one beside that."""

    process: multiprocessing.Process
    log: Path

    @property
    def output(self) -> str:
        """What it has printed so far, on stdout, then on stderr."""
        paths = (self.log, self.log.with_name(f"{self.log.name}.err"))
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self.process.exitcode

    def wait(self, seconds: float = 120) -> Script:
        """Wait until it has ended. Kills it and fails the test if that takes longer than `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"it hung for {seconds} seconds\n{self.output[-4000:]}")
        return self


def start(script, *argv, log: Path, env=None, prepare=None) -> Script:
    """Start a script, a file or a function, and return at once. argv: as of helpers.split_flags. env: variables beside
    those of this process. prepare: a function of a module, called in the new process before the script."""
    args = (script, split_flags(argv), str(log), {**os.environ, **(env or {})}, prepare)
    process = forkserver_context().Process(target=run_in_child, args=args)
    process.start()
    return Script(process, log)


def start_ranks(n: int, script, *argv, log: Path, env=None, **how) -> list[Script]:
    """Start n ranks of one run, with the environment that torchrun gives them and a log file for each, which is named
    after `log`. `how` goes to `start`."""
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{find_free_port()}", "WORLD_SIZE": f"{n}", **(env or {})}
    started = []
    for rank in range(n):
        own = {**env, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        started.append(start(script, *argv, log=log.with_name(f"{log.name}.{rank}"), env=own, **how))
    return started


def run_ranks(n: int, script, *argv, fails: bool = False, **how) -> str:
    """The output of n ranks, joined, once all have ended: each with exit code 0 or, with `fails`, each with a positive
    one. A negative one is that of a signal, which no rank should die of."""
    ended = [rank.wait() for rank in start_ranks(n, script, *argv, **how)]
    output = "".join(rank.output for rank in ended)
    codes = [rank.exit_code for rank in ended]
    assert all(code > 0 for code in codes) if fails else not any(codes), f"exit codes {codes}\n{output[-6000:]}"
    return output


# ------------------------------------------------------------------------- a real torchrun


def start_torchrun(*args, stdout=subprocess.PIPE, **env) -> subprocess.Popen:
    """Start torchrun with these arguments, and these variables beside those of this process."""
    command = [sys.executable, "-m", "torch.distributed.run", *split_flags(args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=subprocess.STDOUT, text=True)


def rank_pids(torchrun_pid: int) -> list[int]:
    """Process ids of the ranks that a torchrun started (Linux only: reads /proc)."""
    with open(f"/proc/{torchrun_pid}/task/{torchrun_pid}/children") as f:
        return [int(pid) for pid in f.read().split()]


def wait_for(condition: Callable[[], object], seconds=90) -> None:
    """Wait until a condition holds; fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("timed out")


def find_free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
