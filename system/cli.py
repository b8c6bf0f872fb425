"""What every script of the project shares: user errors, exit codes, printing on rank 0, durations and prices.

A script ends with

    if __name__ == "__main__":
        cli.run_cli(main)

so that it has two endings beside success: an error that the user can fix is one message (UserError), anything else is
a crash with its traceback. A crash that needs no traceback is one message, too (TransientError). Importing this module
is cheap: nothing here needs torch.

The exit codes of every script, which train.sh and other programs may rely on:

    0       done; a training run that was stopped has been saved
    1       an error, described in one message, or a crash
    2       a flag that the script does not accept
    130     Ctrl-C
    141     the reader of the output has exited, as in `infer.py ... | head`

torchrun exits with 1 whatever the code of its ranks, so a training run also writes its status to a file: write_status.
"""

import argparse
import atexit
import errno
import json
import math
import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TextIO


class UserError(Exception):
    """Something that the user can fix. The message gives the value, the rule and the command that fixes it."""


class UsageError(UserError):
    """A word of the command line that is not accepted."""


class TransientError(UserError):
    """Something that may not come again: one message, too, but a program that restarts crashes restarts this."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it stands, and a default beside each flag."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with three differences: a word that it does not accept is one line (UsageError, exit code 2), a flag
    may be spelled with underscores, and is never abbreviated."""

    def __init__(self, description: str | None = None, **options: Any):
        options = {"formatter_class": HelpFormatter, "allow_abbrev": False, **options}
        super().__init__(description=description, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see -h")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        # --max_lr=a_b -> --max-lr=a_b
        words = [re.sub(r"^--[\w.-]+", lambda match: match[0].replace("_", "-"), word) for word in words]
        return super().parse_known_args(words, namespace)


def require(condition: object, message: str) -> None:
    """Raise UserError(message) unless `condition` is true. Every setting, row and file of a user is checked with it."""
    if not condition:
        raise UserError(message)


# What a disk, a network volume or the machine may have for a while: the same command may succeed later.
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM}


@contextmanager
def explain_errors(problem: str, fix: str) -> Iterator[None]:
    """Turn whatever is raised in this block into a UserError with its words, unless it is not the fault of a file. For
    files that may come from anywhere: the libraries that read them raise a dozen kinds of errors for damaged ones."""
    try:
        yield
    except Exception as e:
        is_of_system = isinstance(e, OSError) and e.errno in TRANSIENT_ERRORS
        if is_of_system or isinstance(e, MemoryError) or "CUDA error" in str(e):
            raise  # the run ends as a crash, and is restarted
        reason = str(e)
        if not isinstance(e, UserError):
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise UserError(f"{problem} ({reason}); {fix}") from None


# ------------------------------------------------------------------------- start and end of a process


def set_omp_wait_policy() -> None:
    """Let torch's CPU threads sleep while they wait for each other, unless the user has set OMP_WAIT_POLICY. OpenMP
    reads its environment once, so this must run before torch is imported.

    Threads that spin instead are at best 1.7 times as fast for the short waits of sampling with GPT-2 124M on 2 idle
    cores, and no faster in training. As soon as another process wants a core, such as a browser or a second rank, they
    are several times slower in both.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main` and exit. What the user can fix, a UserError or a path that may not be used, becomes one
    message, never a traceback."""
    set_omp_wait_policy()
    is_alone = threading.active_count() == 1  # the kernel of a notebook has other threads, and goes on after this
    code = run(main)

    # With ranks, or threads that this script has left, skip the interpreter's shutdown: there a thread that tokenizes
    # or reads aborts the process, and gloo has been seen to abort, or to wait forever for a dead rank.
    has_left_threads = is_alone and threading.active_count() > 1
    if has_left_threads or env_number("WORLD_SIZE", 1) > 1:
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def run(main: Callable[[], object]) -> int:
    """Run `main`, report an error, and return the exit code."""
    try:
        main()
        return 0
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it
    except BrokenPipeError:
        # Python would fail again at exit, when it flushes output that nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # 128 + SIGPIPE
    except Exception as e:
        return report(e)


def report(error: Exception) -> int:
    """Print why this process fails, and leave it for the program that started it. Returns the exit code."""
    message, status = traceback.format_exc(), "system_error"
    if isinstance(error, UserError | PermissionError | NotADirectoryError | IsADirectoryError):
        message = f"error: {error}"
        if not isinstance(error, TransientError):
            status = "user_error"

    # The status first: torchrun ends this rank as soon as another one has failed.
    write_status(status, f"{type(error).__name__}: {error}")
    with suppress(OSError):  # stderr may be a log on a full disk
        print(printable(message), file=sys.stderr, flush=True)
    return 2 if isinstance(error, UsageError) else 1


def write_status(status: str, reason: str = "") -> None:
    """Record how a run ended in the JSON file named by the environment variable TRAIN_STATUS_FILE, if it is set.

    `status` is finished, stopped (saved, to be resumed), user_error (the same command would fail again) or
    system_error, or there is no file: then a restart may succeed. Programs that start a run read this file.
    """
    path = os.environ.get("TRAIN_STATUS_FILE")
    # The error of one rank makes others fail: the crash of these must not hide it.
    if not path or (status == "system_error" and os.path.exists(path)):
        return
    # A disk that is full or gone is often the error being reported: then there is no status.
    with suppress(OSError), open(path, "w") as f:
        json.dump({"status": status, "reason": reason}, f)


# ------------------------------------------------------------------------- which process this is


def env_number(name: str, default: int) -> int:
    """RANK, LOCAL_RANK or WORLD_SIZE, which torchrun sets for each process of a run, or what holds without torchrun."""
    return int(os.environ.get(name, default))


def env_rank() -> int:
    """This process's rank as set by torchrun; 0 without torchrun."""
    return env_number("RANK", 0)


# ------------------------------------------------------------------------- printing


def printable(text: str) -> str:
    """External text with its terminal control codes (all but newline and tab) replaced, so that no file name, prompt or
    server can drive the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def print0(*args: object, file: TextIO | None = None) -> None:
    """Print on rank 0 only, without control codes, flushed at once. What cannot be written is lost: neither a log on a
    full disk nor a reader that is gone nor a character that a terminal lacks ends a run."""
    if env_rank() == 0:
        with suppress(OSError, UnicodeError):
            print(printable(" ".join(map(str, args))), file=file, flush=True)


def progress_bar(items: Iterable, name: str) -> Iterable:
    """The items, with a bar of progress on rank 0's terminal."""
    from tqdm import tqdm

    # None: not where stderr is a file
    return tqdm(items, name, disable=True if env_rank() else None, delay=0.2, leave=False)


# ------------------------------------------------------------------------- units


def format_duration(seconds: float) -> str:
    """4d07h, 1h02m, 3m20s or 12s: the two largest units are enough to plan by."""
    if seconds >= 86400:
        hours = round(seconds / 3600)
        return f"{hours // 24}d{hours % 24:02d}h"
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60}h{minutes % 60:02d}m"
    s = int(seconds)
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


def parse_duration(text: str) -> float:
    """Seconds of "3h50m", "90m", "45s" or a plain number of seconds; infinity for "". Raises UserError."""
    if not text:
        return math.inf

    # Each unit is optional, but the order is fixed: days, hours, minutes, seconds.
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s?)?", text)
    if match is None:
        raise UserError(f"--time-limit {text!r} is not a duration; write it like 3h50m, 90m or 45s")
    d, h, m, s = (int(count or 0) for count in match.groups())
    return ((d * 24 + h) * 60 + m) * 60 + s


def format_cost(seconds: float, gpus: int, gpu_hour_usd: float) -> str:
    """$12.34: the price of `gpus` GPUs during `seconds`, where one costs `gpu_hour_usd` for an hour."""
    return f"${seconds / 3600 * gpus * gpu_hour_usd:.2f}"
