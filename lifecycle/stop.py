"""Stop a run cleanly: a signal, --time-limit or --stop-off-track requests it, and all ranks end after the same step.

stop = StopRequest("3h50m")
with stop.handle_signals():
    ...
    stop.is_requested()     # sent to the other ranks with the loss of a step; train_gpt2.py saves, and exits with 0
"""

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from system.printing import env_rank, parse_duration

# How people, terminals and clusters ask a program to end. Slurm, LSF and PBS announce a limit with the last three.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)


class StopRequest:
    """Whether and why this rank was asked to stop: by a signal, by `request`, or because --time-limit is over, which
    counts from here or, over all restarts, from TRAIN_START_TIME in the environment (seconds since 1970). A limit of 0
    means no limit. Only a signal is urgent: it ends an evaluation, because the process may soon be killed."""

    def __init__(self, time_limit: str = ""):
        self.reason = ""  # the first one: a signal, the time limit, or what `request` was given
        self.is_urgent = False
        self.limit_s = parse_duration(time_limit) or math.inf
        self.start_time = float(os.environ.get("TRAIN_START_TIME", time.time()))

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.time() - self.start_time

    def request(self, reason: str) -> None:
        """Ask for a stop, of all ranks if one does."""
        self.reason = self.reason or reason

    def is_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        if self.elapsed_s() > self.limit_s:
            self.request("the time limit")
        return self.reason != ""

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Let STOP_SIGNALS ask for a stop inside this context: the run saves itself. One Ctrl-C may arrive twice: a
        terminal or Slurm signals the ranks directly, and torchrun forwards the same signal."""
        handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            if handlers[number] is not signal.SIG_IGN:  # SIGHUP under nohup, which torchrun passes on
                signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, _: Any) -> None:
        self.is_urgent = True
        self.request("Ctrl-C" if number == signal.SIGINT else f"signal {signal.Signals(number).name}")
        # Not by print, in whose middle the signal may have come: its buffer must be left alone.
        if env_rank() == 0:
            with suppress(OSError):
                os.write(2, b"\nstopping after this step, and saving; Ctrl-\\ ends the run at once, without saving\n")


@contextmanager
def spare_programs() -> Iterator[None]:
    """Let no program that is started inside this context get STOP_SIGNALS, which a terminal and Slurm send to all
    processes of a run. A compiler that is killed would be an error of the run (pytorch/pytorch#189290); or, killed when
    torch tries the processor's vector instructions, no error, but slower code from then on, which torch's cache keeps.

    A program inherits the blocked signals of the thread that starts it. This process gets its own at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
