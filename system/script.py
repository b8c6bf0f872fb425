"""A script: its errors and exit codes, what it prints on which rank, the files it writes whole, the folders it locks.

Importing this is cheap: nothing here needs torch.
"""

import atexit
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


class UserError(Exception):
    """Something the user can fix. The message gives the value, the rule and the command that fixes it."""


def require(holds: object, message: str) -> None:
    """Raise UserError(message) unless `holds`: how every setting, row and file of a user is checked."""
    if not holds:
        raise UserError(message)


# ------------------------------------------------------------------------- start and end


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
    why = printable(why)
    print(why, file=sys.stderr, flush=True)
    report = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if report:  # the format of torch.distributed.elastic's ErrorHandler
        told = {"message": why, "extraInfo": {"py_callstack": why, "timestamp": str(int(time.time()))}}
        with suppress(OSError), open(report, "w") as f:
            json.dump({"message": told}, f)
    end(1)


def end(code: int) -> None:
    """Exit. A rank skips interpreter shutdown, where gloo has been seen to abort, or to wait forever for a dead
    rank."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


# ------------------------------------------------------------------------- printing


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


# ------------------------------------------------------------------------- files and folders


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that is renamed to `path` once all of it is on disk; an error leaves nothing behind."""
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)  # a partial file is of no use, and it may be what filled the disk
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # so that the new name, too, survives a power cut
    os.close(folder)


@contextmanager
def locked(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder` (created if missing) for this process; if another process holds it, wait or raise UserError. The
    lock ends with the process, however that ends. A folder created here is removed if an error leaves it empty."""
    import filelock

    new = not folder.exists()
    lock = filelock.FileLock(folder / ".lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        require(wait, f"{folder} is in use by another process; wait for it or choose another folder")
        print(f"{folder} is in use by another process: waiting for it", flush=True)
        lock.acquire()
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}; choose another folder") from None
    try:
        yield
    except BaseException:
        if new and not wait and [p.name for p in folder.iterdir()] == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()
        raise
    finally:
        lock.release()
