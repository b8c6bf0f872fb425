"""What every script of the project shares: user errors, exit codes, printing on rank 0.

A script ends with

    if __name__ == "__main__":
        cli.run_cli(main)

so that an error the user can fix is one message instead of a traceback. Importing this module is cheap: nothing here
needs torch.

The exit codes of every script, which train.sh and other programs may rely on:

    0       done; a training run that was stopped has been saved
    1       an error, described in one message
    2       a flag that the script does not accept
    77      the Hub refuses the token, or there is none (CredentialsError)
    130     Ctrl-C
    141     the reader of the output has exited, as in `infer.py ... | head`

torchrun exits with 1 whatever the code of its ranks, so a training run also writes its status to a file: write_status.
"""

import atexit
import io
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path

OTHER_TRAINERS = "docs/coming-from.md translates the flags and presets of nanoGPT, llm.c and other trainers"


class RetryableError(Exception):
    """An error that may not recur when the same command runs again: train.sh and Slurm restart the run after it. The
    message says what happened and what the next start does differently."""


# Checked on import, because other modules import fcntl and resource, which Windows does not have.
if os.name == "nt":
    sys.exit(
        "error: this project runs on Linux and macOS. On Windows, run it in the Windows Subsystem for Linux: "
        "run `wsl --install` in an administrator's terminal, then the same commands in Ubuntu's terminal"
    )


class UserError(Exception):
    """Something that the user can fix. The message gives the value, the rule and the command that fixes it."""

    exit_code = 1


class CredentialsError(UserError):
    """The Hub refuses the user's token, or there is none: with another token the same command may succeed."""

    exit_code = 77  # EX_NOPERM of sysexits.h


def require(condition: object, message: str) -> None:
    """Raise UserError(message) unless `condition` is true. Every setting, row and file of a user is checked with it."""
    if not condition:
        raise UserError(message)


# ------------------------------------------------------------------------- start and end of a process


def set_omp_wait_policy(many_short_waits: bool = False, load: str = "/proc/loadavg") -> None:
    """Choose how torch's CPU threads wait for each other, unless the user has set OMP_WAIT_POLICY. OpenMP reads its
    environment once, so this must run before torch is imported.

    The threads sleep. Training alone is no slower that way, and three times as fast (measured on 2 cores) when another
    process wants a core, such as a browser or a second rank. Generating single tokens waits very often and briefly:
    for that, `many_short_waits` lets the threads spin for a moment first, which is 1.4 times as fast on an idle machine
    and 4 times as slow on a busy one.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"

    # /proc/loadavg reads like "0.20 0.18 0.12 2/80 11206": the fourth field is running threads / all threads.
    try:
        with open(load) as f:
            running_threads = int(f.read().split()[3].split("/")[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return
    other_threads = running_threads - 1
    machine_is_idle = other_threads <= (os.cpu_count() or 1) / 4
    if many_short_waits and machine_is_idle:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def run_cli(main: Callable[[], object], many_short_waits: bool = False) -> None:
    """Run a script's `main` and exit. A UserError becomes one message and its exit code, never a traceback.

    The outcome is also written to the file that TRAIN_STATUS_FILE names (see write_status), where train.sh and
    cloud/slurm.sbatch read it.
    """
    set_omp_wait_policy(many_short_waits)
    try:
        main()
        exit_process(0)
    except UserError as e:
        # Every rank writes the status at once: torchrun may end this one as soon as another one fails.
        write_status("user_error", str(e))
        leave_report_to_local_rank_0()
        fail(f"error: {e}", e.exit_code)
    except RetryableError as e:
        write_status("system_error", str(e))
        leave_report_to_local_rank_0()
        fail(f"error: {e}")
    except SystemExit as e:
        # tyro has reported the bad flag. An unknown flag is often one of another trainer.
        if e.code == 2 and env_rank() == 0:
            print(OTHER_TRAINERS, file=sys.stderr, flush=True)
        raise
    except KeyboardInterrupt:
        exit_process(130)  # 128 + SIGINT, as a shell reports it
    except OSError as e:
        # Python would fail again at exit, when it flushes output that can no longer be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # `infer.py ... | head`: the reader has exited, which is not a failure of this script.
        if isinstance(e, BrokenPipeError):
            exit_process(141)  # 128 + SIGPIPE
        # A failing network volume (system/files.py has retried for a minute) may recover, and a full disk may get room
        # for the log again, so train.sh restarts the run after this error.
        write_status("system_error", str(e))
        fail(f"system error: {e}; fix that, then run the command again (training: with --resume auto)")
    except Exception:
        # A bug or a crash: Python prints the traceback, and torchrun repeats it in its report.
        write_torchrun_report(printable(traceback.format_exc()))
        raise


@contextmanager
def flags_reported_once() -> Iterator[None]:
    """Around the parsing of flags. tyro answers a bad flag on stderr and exits with code 2; under torchrun every rank
    would do that, and torchrun's own report, which comes last, would not say why. There the answer is raised as a
    UserError, which run_cli reports once."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        yield
        return
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            yield
    except SystemExit as e:
        if e.code != 2:
            raise
        colors = r"\x1b\[[0-9;]*m"
        answer = re.sub(colors, "", printed.getvalue()).strip()
        raise UserError(f"a flag was not accepted\n{answer}\n{OTHER_TRAINERS}") from None
    sys.stderr.write(printed.getvalue())


def leave_report_to_local_rank_0() -> None:
    """Give the first rank of this machine time to report an error that most ranks raise; torchrun then ends the others.

    Waiting for global rank 0 does not work if it runs on another machine: the torchrun there exits with it, which ends
    the torchrun here before any rank of this machine has reported the error."""
    if int(os.environ.get("LOCAL_RANK", 0)) > 0:
        time.sleep(3)


def write_status(status: str, reason: str = "") -> None:
    """Record how a run ended in the JSON file named by the environment variable TRAIN_STATUS_FILE, if it is set.

    `status` is finished, stopped (saved, to be resumed), user_error (the same command would fail again) or system_error
    (a restart may succeed). Programs that start a run read this file, because torchrun exits with 1 for every failure.
    """
    path = os.environ.get("TRAIN_STATUS_FILE")
    if not path:
        return
    part = Path(f"{path}.{env_rank()}.part")
    # A disk that is full or gone is often the error being reported: then the caller finds no status and restarts.
    with suppress(OSError):
        # Ranks may fail for different reasons. If one of them must be fixed by the user, a restart is of no use.
        if status == "system_error" and _read_status(path) == "user_error":
            return
        part.write_text(json.dumps({"status": status, "reason": printable(reason)}) + "\n")
        os.replace(part, path)


def _read_status(path: str) -> str:
    """The status in a file that write_status wrote; "" if there is none that can be read."""
    try:
        return json.loads(Path(path).read_text())["status"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def fail(message: str, exit_code: int = 1) -> None:
    """Print a message to stderr and exit. Under torchrun the message also goes into torchrun's report."""
    message = printable(message)
    print(message, file=sys.stderr, flush=True)
    write_torchrun_report(message)
    exit_process(exit_code)


def write_torchrun_report(text: str) -> None:
    """Give torchrun, if it has started this process, the text that it prints last, as the root cause of the failure. It
    is read from a file in the format of torch.distributed.elastic's ErrorHandler."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    with suppress(OSError), open(path, "w") as f:
        json.dump({"message": details}, f)


def exit_process(code: int) -> None:
    """Exit. A rank skips the interpreter's shutdown, where gloo has been seen to abort, or to wait forever for a dead
    rank."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    atexit._run_exitfuncs()
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
    """Print on rank 0 only, without control codes, flushed at once."""
    if env_rank() == 0:
        print(printable(" ".join(map(str, args))), flush=True)
