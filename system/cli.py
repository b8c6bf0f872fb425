"""What every script of the project shares: user errors, exit codes, printing on rank 0, durations and prices.

A script ends with

    if __name__ == "__main__":
        cli.run_cli(main)

so that it has two endings beside success: an error that the user can fix is one message (UserError), anything else is
a crash with its traceback. Importing this module is cheap: nothing here needs torch.

The exit codes of every script, which train.sh and other programs may rely on:

    0       done; a training run that was stopped has been saved
    1       an error, described in one message, or a crash
    2       a flag that the script does not accept
    130     Ctrl-C
    141     the reader of the output has exited, as in `infer.py ... | head`

torchrun exits with 1 whatever the code of its ranks, so a training run also writes its status to a file: write_status.
"""

import atexit
import json
import math
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

# Checked on import, because other modules import fcntl and resource, which Windows does not have.
if os.name == "nt":
    sys.exit(
        "error: this project runs on Linux and macOS. On Windows, run it in the Windows Subsystem for Linux: "
        "run `wsl --install` in an administrator's terminal, then the same commands in Ubuntu's terminal"
    )


class UserError(Exception):
    """Something that the user can fix. The message gives the value, the rule and the command that fixes it."""


def require(condition: object, message: str) -> None:
    """Raise UserError(message) unless `condition` is true. Every setting, row and file of a user is checked with it."""
    if not condition:
        raise UserError(message)


@contextmanager
def explain_errors(problem: str, fix: str) -> Iterator[None]:
    """Turn whatever is raised in this block into a UserError with its words. For files that may come from anywhere: the
    libraries that read them raise a dozen kinds of errors for damaged ones."""
    try:
        yield
    except UserError as e:
        raise UserError(f"{problem}: {e}") from None
    except Exception as e:
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
    """Run a script's `main` and exit. A UserError, or a file that this user may not read or write, becomes one message
    and exit code 1, never a traceback."""
    set_omp_wait_policy()
    try:
        main()
    except (UserError, PermissionError) as e:
        fail("user_error", str(e), f"error: {e}")
    except SystemExit as e:
        # tyro has printed which flag is wrong.
        if e.code == 2:
            write_status("user_error", "a flag was not accepted")
        raise
    except KeyboardInterrupt:
        exit_process(130)  # 128 + SIGINT, as a shell reports it
    except BrokenPipeError:
        # Python would fail again at exit, when it flushes output that nobody reads.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        exit_process(141)  # 128 + SIGPIPE
    except Exception as e:
        fail("system_error", f"{type(e).__name__}: {e}", traceback.format_exc())
    exit_process(0)


def fail(status: str, reason: str, message: str) -> None:
    """Print why this process fails, leave it for the program that started it, and exit with 1."""
    # The status first: torchrun may end this rank as soon as another one has failed.
    write_status(status, reason)
    message = printable(message)
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)

    # torchrun prints the text of this file last, as the cause. The format is that of its ErrorHandler.
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        details = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(error_file, "w") as f:
            json.dump({"message": details}, f)
    exit_process(1)


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
    part = f"{path}.{env_rank()}.part"
    with suppress(OSError):
        with open(part, "w") as f:
            json.dump({"status": status, "reason": printable(reason)}, f)
        os.replace(part, path)


def exit_process(code: int) -> None:
    """Exit. A rank skips the interpreter's shutdown, where gloo has been seen to abort, or to wait forever for a dead
    rank."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


# ------------------------------------------------------------------------- printing


def printable(text: str) -> str:
    """External text with its terminal control codes (all but newline and tab) replaced, so that no file name, prompt or
    server can drive the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def env_rank() -> int:
    """This process's rank as set by torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def print0(*args: object) -> None:
    """Print on rank 0 only, without control codes, flushed at once. What cannot be written is lost: neither a log on a
    full disk nor a reader that is gone ends a run."""
    if env_rank() == 0:
        with suppress(OSError):
            print(printable(" ".join(map(str, args))), flush=True)


# ------------------------------------------------------------------------- units


def format_duration(seconds: float) -> str:
    """4d07h, 1h02m, 3m20s or 12s: the two largest units are enough to plan by."""
    s = int(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    if s >= 60:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s}s"


def parse_duration(text: str) -> float:
    """Seconds of "3h50m", "90m", "45s" or a plain number of seconds; infinity for "". Raises UserError."""
    if not text:
        return math.inf
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
        return float(text)

    # Each unit is optional, but the order is fixed: days, hours, minutes, seconds. A group is None for a missing unit.
    match = re.fullmatch("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in "dhms"), text)
    require(match, f"--time-limit {text!r} is not a duration; write it like 3h50m, 90m or 45s")
    seconds_per_unit = (86400, 3600, 60, 1)
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), seconds_per_unit, strict=True))


def format_cost(seconds: float, gpus: int, gpu_hour_usd: float) -> str:
    """$12.34: the price of `gpus` GPUs during `seconds`, where one costs `gpu_hour_usd` for an hour."""
    return f"${seconds / 3600 * gpus * gpu_hour_usd:.2f}"
