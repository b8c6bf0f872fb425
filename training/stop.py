"""Stopping: the signals and the time limit that end a run, which all its ranks then agree on."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from system.cli import env_rank
from system.distributed import Runtime
from system.units import parse_duration

FAILED = 2  # what a rank whose evaluation failed answers where the others check whether to stop, 0 or 1


class FailedElsewhere(Exception):
    """Another rank has failed, and says why."""


def failed(rt: Runtime) -> None:
    """Tell the ranks that wait in Stop.check, or will."""
    rt.all_reduce_max(FAILED)


class Stopped(Exception):
    """All ranks have agreed to stop."""


class Stop:
    """Whether and why to stop: a signal (its name, once one has come), or --time-limit, counted from here."""

    def __init__(self, time_limit: str = ""):
        self.signal: str | None = None
        self.limit, self.began = parse_duration(time_limit), time.monotonic()

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None or self.seconds() > self.limit

    def check(self, rt: Runtime, timed: bool = True) -> None:
        """Raise Stopped on all ranks if any was asked to stop, FailedElsewhere if one said `failed` in place of this.
        timed=False ignores --time-limit, as in the first evaluation, so at least one step runs."""
        found = rt.all_reduce_max(int(bool(self.asked() if timed else self.signal)))
        if found == FAILED:
            raise FailedElsewhere
        if found:
            raise Stopped

    def why(self) -> str:
        if self.signal:
            return f"signal {self.signal}"
        return "the time limit" if self.seconds() > self.limit else "the time limit or another rank's signal"

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT ask to stop, which a collective shares with all ranks; a later signal kills as usual, but
        not at once: torchrun passes on what a terminal or Slurm has sent to its ranks already. A helper thread receives
        the signals while this one blocks them: compilers started here inherit the mask and survive Ctrl-C."""

        def kill_as_usual() -> None:
            for s in before:  # by the C library: Python sets handlers in its main thread only, perhaps in a collective
                ctypes.CDLL(None).signal(int(s), None)

        kill_from_now = threading.Timer(2, kill_as_usual)  # seconds
        kill_from_now.daemon = True

        def handler(number: int, frame: Any) -> None:
            if self.signal is not None:
                return
            self.signal = signal.Signals(number).name
            kill_from_now.start()
            words = f"{self.signal}: saving the run, then stopping; a second signal stops without saving\n"
            if env_rank() == 0:
                with suppress(OSError):  # not print: the signal may have interrupted one, which cannot be reentered
                    os.write(1, words.encode())

        before = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, before)
        try:
            yield
        finally:
            kill_from_now.cancel()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
            for s, h in before.items():
                signal.signal(s, h)
