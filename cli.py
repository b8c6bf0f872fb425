"""How a script starts and ends: the errors a user can fix, printing on rank 0, exit codes, how threads wait.

Importing it is cheap: nothing here needs torch.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

WRITER = "checkpoint"  # name of the thread that a process waits for before it exits


class UserError(Exception):
    """Something the user can fix. The message gives the value, the rule and the command that fixes it."""


def thread_waits(brief: bool = False, load: str = "/proc/loadavg") -> None:
    """Choose how torch's CPU threads wait for each other, unless OMP_WAIT_POLICY is set; before torch is imported.

    They sleep: training is no slower alone, and three times faster (measured on 2 cores) when another process wants a
    core, be it a browser or a second rank. brief: expect many short waits, as in generating single tokens; spinning
    briefly is then 1.4 times faster on an idle machine, and 4 times slower on a busy one.
    """
    if "OMP_WAIT_POLICY" in os.environ:
        return
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        with open(load) as f:
            others = int(f.read().split()[3].split("/")[0]) - 1  # running threads, except this one
    except (OSError, ValueError, IndexError):  # not Linux
        return
    if brief and others <= (os.cpu_count() or 1) / 4:
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")


def run_cli(main: Callable[[], object], brief_waits: bool = False) -> None:
    """Run a script's main: a UserError ends it with one message and exit code 1, never a traceback."""
    thread_waits(brief_waits)
    try:
        main()
        end(0)
    except UserError as e:
        if env_rank() > 0:  # most errors hit all ranks: let rank 0 report it and torchrun end the others
            time.sleep(3)
        fail(f"error: {e}")
    except KeyboardInterrupt:
        end(130)
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # drop what can no longer be written
        if isinstance(e, BrokenPipeError):  # `infer.py ... | head`: the reader exited, which is not our failure
            end(141)
        # a full disk, a network volume that failed briefly: it may pass, so train.sh tries again
        fail(f"system error: {e}; fix that, then run the command again (training: with --resume auto)")


def fail(why: str) -> None:
    """Exit with a message; under torchrun also put it in torchrun's error report, which is printed last."""
    print(why := printable(why), file=sys.stderr, flush=True)
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # the format of torch.distributed.elastic's ErrorHandler
        told = {"message": why, "extraInfo": {"py_callstack": why, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(report, "w") as f:
            json.dump({"message": told}, f)
    end(1)


def end(code: int) -> None:
    """Exit. A rank finishes the checkpoint it is writing, then skips interpreter shutdown, where gloo has been
    seen to abort, or to wait forever for a dead rank."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    for thread in threading.enumerate():
        if thread.name == WRITER:  # no others: the pools of torch's compiler never end
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def printable(text: str) -> str:
    """External text with terminal control codes (all but newline and tab) replaced, so it cannot drive the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def env_rank() -> int:
    """This process's rank, as set by torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def print0(*args: object) -> None:
    """Print on rank 0 only, flushed at once; file names and external text cannot drive the terminal."""
    if env_rank() == 0:
        print(printable(" ".join(map(str, args))), flush=True)
