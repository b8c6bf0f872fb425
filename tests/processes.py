"""A script in a process of its own, forked from a server that has imported torch: 0.1 seconds instead of 3.

    script = start("train_gpt2.py", "quickstart", ..., log=path)    # returns at once
    script.wait_until(lambda: "val loss" in script.output)
    script.send(signal.SIGINT)
    assert script.wait().exit_code == 0, script.output

The process is a real one: it has its own streams, environment, folder and exit code, and it dies of real signals. What
the server has imported already is all that differs from a command that is typed.

    test process --asks--> fork server (has imported torch and the scripts) --forks--> script

The fixtures of conftest.py wrap what is here; tests of signals, ranks and faults use it directly. The last section is
about real torchrun processes, which are not forked.
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
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
from helpers import ROOT

from system.cli import run_cli

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


def run_in_child(
    script: str | Callable, argv: list[str], streams: list[str], folder: str, env: dict[str, str], prepare: Callable
) -> None:
    """In the new process: do what a shell does before a command (streams, folder, environment, arguments), then what
    `prepare` does, which may plant a fault, then run the script's main."""
    # Stream 0 is read from a file; streams 1 and 2 are appended to files. multiprocessing has given sys.stdin another
    # number, for an empty file: give it back stream 0.
    stdin_path, *output_paths = streams
    os.dup2(os.open(stdin_path, os.O_RDONLY), 0)
    for stream, path in enumerate(output_paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = (open(stream, "w", closefd=False) for stream in (1, 2))

    # Tests that are run in the background of a shell ignore Ctrl-C, and so would their processes.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    # The folder and the environment, in place of those of the server.
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)

    # The tests run side by side, so one thread must do. And Python's resource tracker must not warn, at its end, of
    # what a killed process has not closed.
    torch.set_num_threads(1)
    resource_tracker.register = resource_tracker.unregister = lambda *_: None

    # The script, as if its arguments had been typed, with the planted fault, if any.
    sys.argv = [str(script), *argv]
    prepare()
    run_cli(importlib.import_module(script).main if isinstance(script, str) else script)


@dataclass
class Script:
    """A script that has been started; its output goes to the file `log`."""

    process: multiprocessing.Process
    log: Path

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that killed it."""
        return self.process.exitcode

    def send(self, number: int) -> bool:
        """Send a signal; returns whether the process was still alive."""
        with suppress(ProcessLookupError):  # it ended between the two lines
            if self.process.is_alive():
                os.kill(self.process.pid, number)
                return True
        return False

    def wait(self, seconds: float = 120) -> Script:
        """Wait until it has ended. Kills it and fails the test if that takes longer than `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"it hung for {seconds} seconds\n{self.output[-4000:]}")
        return self

    def wait_until(self, condition: Callable[[], object]) -> bool:
        """Wait until a condition holds, or it has ended. Returns whether the condition holds."""
        wait_for(lambda: condition() or not self.process.is_alive())
        return bool(condition())


def do_nothing() -> None:
    """The `prepare` of a process in which no fault is planted."""


def start(script, *argv, log: Path, out=None, cwd=None, env=None, prepare=do_nothing, input=os.devnull) -> Script:
    """Start a script and return at once.

    Args:
        script: `train_gpt2` or `train_gpt2.py`, or a function of a module that can be imported.
        argv: its arguments, which are made strings.
        log: the file of both output streams or, with `out`, of stderr alone.
        out: the file of stdout, if it is to be another one.
        cwd: the folder it runs in; this process's by default.
        env: variables beside those of this process.
        prepare: a function of a module, called in the new process before the script.
        input: the file that it reads as stdin.
    """
    if isinstance(script, str):
        script = script.removesuffix(".py")
    streams = [str(input), str(out or log), str(log)]
    folder, variables = str(cwd or os.getcwd()), {**os.environ, **(env or {})}
    args = (script, [str(word) for word in argv], streams, folder, variables, prepare)
    process = forkserver_context().Process(target=run_in_child, args=args)
    process.start()
    return Script(process, log)


def start_ranks(n: int, script, *argv, log: Path, env=None, **how) -> list[Script]:
    """Start n ranks of one run, with the environment that torchrun gives them and a log file for each, which is named
    after `log`. `how` goes to `start`."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port()), "WORLD_SIZE": str(n), **(env or {})}
    started = []
    for rank in map(str, range(n)):
        path = log.with_name(f"{log.name}.{rank}")
        started.append(start(script, *argv, log=path, env={**common, "RANK": rank, "LOCAL_RANK": rank}, **how))
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
    command = [sys.executable, "-m", "torch.distributed.run", *args]
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
