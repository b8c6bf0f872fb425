"""Stop a run cleanly: a signal or --time-limit requests it, and all ranks agree on the step.

    stop = StopRequest("3h50m")
    with stop.handle_signals():
        ...
        stop.check(rt)      # raises Stopped on all ranks at the same place

Called by train_gpt2.py, which saves the run and exits with code 0. `check` is for evaluations; between two steps the
request travels with the loss, in the collective of training/step.py.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from typing import Any

import torch

from system.cli import env_rank, parse_duration, print0
from system.distributed import Runtime

SECOND_SIGNAL_AFTER_S = 2.0

# How many seconds torchrun waits between the signal that it passes on to its ranks and the SIGKILL that ends them. A
# rank inherits the variable from torchrun. torchrun of torch 2.11 ignores the variable and always waits 30 seconds.
TORCHRUN_TIMEOUT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


def torchrun_timeout_s() -> float:
    """How long torchrun lets this rank live after a signal; infinity for a process that torchrun has not started."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return math.inf
    try:
        return float(os.environ.get(TORCHRUN_TIMEOUT, "30"))
    except ValueError:
        return 30.0


class Vote(IntEnum):
    """A rank's vote on how to continue. The highest vote of all ranks wins."""

    CONTINUE = 0
    STOP = 1
    EVALUATION_FAILED = 2


class Stopped(Exception):
    """All ranks have agreed to stop."""


class EvaluationFailedElsewhere(Exception):
    """An evaluation has failed on another rank, which prints the reason."""


class StopRequest:
    """Whether and why this rank was asked to stop: by a signal, or because --time-limit, counted from here, is over. A
    limit of 0 means no limit."""

    def __init__(self, time_limit: str = ""):
        self.has_warned = False  # that a save takes too long
        self.signal: str | None = None  # the name of the first signal that came
        self.limit_s = parse_duration(time_limit) or math.inf
        self.start_time = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start_time

    def is_over_time(self) -> bool:
        return self.elapsed_s() > self.limit_s

    def is_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self.signal is not None or self.is_over_time()

    def check(self, rt: Runtime, timed: bool = True) -> None:
        """Raise Stopped on all ranks if any was asked to stop, or EvaluationFailedElsewhere if one has reported a
        failed evaluation in place of this call. Every rank must call it, equally often. timed=False ignores
        --time-limit, as in the first evaluation, so that every start does at least one step."""
        requested = self.is_requested() if timed else self.signal is not None

        # After this collective all ranks have the same result, and act alike.
        match agree(rt, Vote.STOP if requested else Vote.CONTINUE):
            case Vote.STOP:
                raise Stopped
            case Vote.EVALUATION_FAILED:
                raise EvaluationFailedElsewhere

    def check_save_time(self, seconds: float) -> None:
        """Warn once if a save takes so long that torchrun would kill the ranks in the middle of one."""
        # After a signal a step is finished first, and ZeRO-1 gathers its state: leave half of the time for that.
        timeout_s = torchrun_timeout_s()
        if seconds < timeout_s / 2 or self.has_warned:
            return
        self.has_warned = True
        print0(
            f"warning: saving took {seconds:.0f} s, and torchrun kills the ranks {timeout_s:.0f} s after Ctrl-C or "
            f"SIGTERM. Before the next start: export {TORCHRUN_TIMEOUT}=600 (needs torch 2.13); until then stop "
            "the run by signalling its ranks, not torchrun, or with --time-limit"
        )

    def reason(self) -> str:
        # A rank that was not asked itself was stopped by the vote of another.
        if self.signal:
            return f"signal {self.signal}"
        return "the time limit" if self.is_over_time() else "the time limit or another rank's signal"

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT ask for a stop inside this context. The first one is noted, and the run saves itself
        at the end of the step. A later one ends the process as usual, without saving.

        Two things make this more than signal.signal():

        - A terminal or Slurm signals the ranks directly, and torchrun then forwards the same signal. So one Ctrl-C may
          arrive twice, and a second signal must not end the process within the first two seconds.
        - The compilers that torch.compile starts would die of a Ctrl-C meant for the run. Processes inherit the signal
          mask of the thread that starts them, so this thread blocks both signals. A thread that does nothing else
          leaves them unblocked: the kernel delivers them there, and Python runs the handler in the main thread.
        """
        handled = (signal.SIGTERM, signal.SIGINT)

        # Two seconds after the first signal: from now on a signal kills the process. Set through the C library, because
        # Python sets handlers in its main thread only, which may be waiting in a collective.
        def restore_default_action() -> None:
            for number in handled:
                ctypes.CDLL(None).signal(int(number), None)

        timer = threading.Timer(SECOND_SIGNAL_AFTER_S, restore_default_action)
        timer.daemon = True

        # When a signal comes: note the first one and tell the user. os.write, because print is not reentrant, and the
        # signal may have interrupted a call of it.
        def handler(number: int, frame: Any) -> None:
            if self.signal is not None:
                return
            self.signal = signal.Signals(number).name
            timer.start()
            message = f"{self.signal}: saves and stops within two steps; a second signal, at least"
            message += f" {SECOND_SIGNAL_AFTER_S:g} seconds later, stops without saving\n"
            if env_rank() == 0:
                with suppress(OSError):
                    os.write(1, message.encode())

        # Install the handler, start the thread that receives the signals, and block the signals in this thread.
        previous = {number: signal.signal(number, handler) for number in handled}
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, handled)
        try:
            yield
        finally:
            timer.cancel()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
            for number, previous_handler in previous.items():
                signal.signal(number, previous_handler)


def agree(rt: Runtime, vote: Vote) -> Vote:
    """The highest vote of all ranks. Every rank must call it."""
    return Vote(int(rt.all_reduce(torch.tensor(int(vote), device=rt.device), "max")))


def report_failed_evaluation(rt: Runtime) -> None:
    """Tell the other ranks, which wait in StopRequest.check or will, that this rank's evaluation has failed."""
    agree(rt, Vote.EVALUATION_FAILED)
