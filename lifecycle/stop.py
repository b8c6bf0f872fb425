"""Stop a run cleanly: a signal, --time-limit or --stop-off-track requests it, and all ranks agree on the step.

    stop = StopRequest("3h50m")
    with stop.handle_signals():
        ...
        stop.check(rt)      # raises Stopped on all ranks at the same place

Called by train_gpt2.py, which saves the run and exits with code 0. A run stops in one of three places:

    between two batches of an evaluation      stop.check          all ranks ask each other
    within a step, before its gradients       stop.check_alone    only if there is a single rank
    after the gradients of a step             the loop            the request travels with the loss
"""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from system.cli import parse_duration, print0
from system.distributed import Runtime

# A terminal or Slurm signals the ranks directly, and torchrun forwards the same signal: one Ctrl-C may arrive twice.
SECOND_SIGNAL_AFTER_S = 2.0


class Stopped(Exception):
    """All ranks have agreed to stop: it leaves the loop."""


class StopRequest:
    """Whether and why this rank was asked to stop: by a signal, by `request`, or because --time-limit, counted from
    here, is over. A limit of 0 means no limit."""

    def __init__(self, time_limit: str = ""):
        self.signal: str | None = None  # the name of the first signal that came
        self.signal_time = 0.0
        self.requested = ""  # the reason that `request` was given
        self.limit_s = parse_duration(time_limit) or math.inf
        self.first_step_is_done = False  # before, the limit does not count: every start does at least one step
        self.is_agreed = False  # whether the ranks have stopped
        self.start_time = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_time

    def request(self, reason: str) -> None:
        """Ask for a stop, of all ranks if one does."""
        self.requested = reason

    def is_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None or self.requested != "" or self._is_over_limit()

    def _is_over_limit(self) -> bool:
        return self.first_step_is_done and self.elapsed_s() > self.limit_s

    def raise_stopped(self) -> NoReturn:
        """Raise Stopped. Every rank must call it."""
        self.is_agreed = True
        raise Stopped

    def check(self, rt: Runtime) -> None:
        """Raise Stopped on all ranks if any was asked to stop. Every rank must call it, equally often."""
        if rt.any_rank(self.is_requested()):
            self.raise_stopped()

    def check_alone(self, rt: Runtime) -> None:
        """Raise Stopped if this rank was asked to stop and is the only one, so that no other would wait for it. May be
        called anywhere between two updates."""
        if rt.world_size == 1 and self.is_requested():
            self.raise_stopped()

    def reason(self) -> str:
        """Ctrl-C, signal SIGTERM, the time limit, or what `request` was given; a rank that was not asked itself was
        stopped by another."""
        if self.signal == "SIGINT":
            return "Ctrl-C"
        if self.signal:
            return f"signal {self.signal}"
        if self.requested:
            return self.requested
        return "the time limit" if self._is_over_limit() else "another rank"

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Let SIGTERM, SIGINT and SIGHUP ask for a stop inside this context. The first one is noted, and the run saves
        itself. One that comes later ends the process as usual, without saving.

        A thread answers at once, whatever the main thread waits for. Programs that are started here do not get the
        signals: a terminal and torchrun send them to the compiler, too, whose end would be an error of the run
        (pytorch/pytorch#189290).
        """
        # SIGHUP: the terminal is gone, and torchrun passes that on even under nohup.
        numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)

        # Python writes the number of each signal to a pipe, from which the thread reads it. The thread begins before
        # the signals are blocked: what begins later, programs and threads, inherits that.
        pipe_end, wakeup_fd = os.pipe()
        os.set_blocking(wakeup_fd, False)
        thread = threading.Thread(target=self._note_signals, args=[pipe_end], daemon=True)
        thread.start()
        handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        previous_fd = signal.set_wakeup_fd(wakeup_fd)
        previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            signal.set_wakeup_fd(previous_fd)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(wakeup_fd)
            thread.join()

    def _note_signals(self, pipe_end: int) -> None:
        """Read the numbers of signals from a pipe until its other end is closed."""
        while number := os.read(pipe_end, 1):
            if self.signal is None:
                self.signal_time = time.monotonic()
                self.signal = signal.Signals(number[0]).name
                again = "Ctrl-C again" if self.signal == "SIGINT" else "another signal"
                print0(f"\nstopping after this step, and saving; {again} ends the run at once, without saving")
                if not self.first_step_is_done:
                    print0("the first step has not ended yet; if it compiles, that may take two minutes")
            elif time.monotonic() > self.signal_time + SECOND_SIGNAL_AFTER_S:
                print0("ended without saving; --resume auto continues from the newest checkpoint, if there is one")
                os._exit(128 + number[0])  # as a shell reports the signal
        os.close(pipe_end)
