"""A script in a process of its own, forked from a server that has imported torch: 0.1 seconds instead of 3.

The process is a real one: it has its own streams, environment, folder and exit code, and it dies of real signals. What
the server has imported already is all that differs from a command that is typed.
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

import torch
from helpers import ROOT

from system.cli import run_cli

PRELOAD = "__main__ helpers train_gpt2 torch._dynamo tyro fineweb hub hellaswag infer plots matplotlib.pyplot".split()


@cache
def server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"  # the server does not know sys.path
    forkserver.ensure_running()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before
    return context


def child(
    script: str | Callable, argv: list[str], streams: list[str], folder: str, env: dict[str, str], prepare: Callable
) -> None:
    """In the new process: what a shell does (streams, folder, environment, arguments), the fault, the script's main."""
    for stream, path in enumerate(streams):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND if stream else os.O_RDONLY), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    resource_tracker.register = resource_tracker.unregister = lambda *_: None  # it would mourn the killed at the end
    prepare()
    sys.argv = [str(script), *argv]
    run_cli(importlib.import_module(script).main if isinstance(script, str) else script)


@dataclass
class Script:
    """A script at work; what it says goes to a file."""

    process: multiprocessing.Process
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def send(self, number: int) -> bool:
        """Whether the signal found the process alive."""
        with suppress(ProcessLookupError):  # it has gone since
            if self.process.is_alive():
                os.kill(self.process.pid, number)
                return True
        return False

    def kill_at(self, goal: int, count: Callable[[], int], later: float) -> bool:
        """SIGKILL when the count has come to the goal, and a moment later; whether it found the process alive."""
        while self.process.is_alive() and count() < goal:
            time.sleep(0.002)
        time.sleep(later)
        return self.send(signal.SIGKILL)

    def wait(self, seconds: float = 120) -> Script:
        """Wait for its end, which must come."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"it hung for {seconds} seconds\n{self.said[-4000:]}")
        return self

    def ended_well(self) -> Script:
        """Wait for its end with exit code 0."""
        assert self.wait().code == 0, f"exit code {self.code}\n{self.said[-4000:]}"
        return self

    def until(self, what: str | Callable[[], object], seconds: float = 60) -> bool:
        """Wait until it has said that, or that is so; False if it ended without."""
        come = what if callable(what) else lambda: what in self.said
        end = time.monotonic() + seconds
        while not come():
            if not self.process.is_alive():
                return bool(come())
            assert time.monotonic() < end, f"{what!r} did not come\n{self.said[-4000:]}"
            time.sleep(0.002)
        return True


def nothing() -> None:
    pass


def hasty() -> None:
    """To prepare a process with: the waits between tries, or for a rank that reports first, are short."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.01))


def start(
    script: str | Callable,
    *argv: object,
    log: Path,
    out: object = None,
    cwd: object = None,
    env: dict[str, str] | None = None,
    prepare: Callable[[], None] = nothing,
    input: object = os.devnull,
) -> Script:
    """Start a script, `train_gpt2` or `train_gpt2.py`, or a function of a module that can be imported. `log`: the file
    of both output streams or, with `out`, of errors alone. `env`: variables beside those of this process."""
    if isinstance(script, str):
        script = script.removesuffix(".py")
    streams = [str(input), str(out or log), str(log)]
    folder, variables = str(cwd or os.getcwd()), {**os.environ, **(env or {})}
    process = server().Process(target=child, args=(script, list(map(str, argv)), streams, folder, variables, prepare))
    process.start()
    return Script(process, log)


def ranks(n: int, script: str | Callable, *argv: object, log: Path, env: dict[str, str] | None = None, **how):
    """Start n ranks, as torchrun does, with a log for each."""
    known = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    known |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), **(env or {})}
    started = []
    for rank in map(str, range(n)):
        path = log.with_name(f"{log.name}.{rank}")
        started.append(start(script, *argv, log=path, env={**known, "RANK": rank, "LOCAL_RANK": rank}, **how))
    return started


def run_ranks(n: int, script: str | Callable, *argv: object, fails: bool = False, **how) -> str:
    """What n ranks have said, once all have ended: well or, if this `fails`, each with a failure and no traceback."""
    them = [rank.wait() for rank in ranks(n, script, *argv, **how)]
    said = "".join(rank.said for rank in them)
    codes = [rank.code for rank in them]
    good = all(code > 0 for code in codes) and "Traceback" not in said if fails else not any(codes)
    assert good, f"exit codes {codes}\n{said[-6000:]}"
    return said


# ------------------------------------------------------------------------- a real torchrun


def agent(*args, stdout=subprocess.PIPE, **env):
    """A torchrun with these arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    return subprocess.Popen(command, env=env, stdout=stdout, stderr=subprocess.STDOUT, text=True)


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that a torchrun agent started."""
    with open(f"/proc/{agent}/task/{agent}/children") as f:
        return [int(p) for p in f.read().split()]


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("timed out")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
