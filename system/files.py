"""Files that are complete or absent, and folders that one process at a time may write to."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from system.cli import UserError, require


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` once all of it is on disk. An error leaves nothing behind.

    The order is the protocol: write to a temporary name, sync the content, rename, sync the folder. A kill or a power
    cut at any moment leaves either the old file, or none, or the complete new one.
    """
    # A hidden name in the same folder: renaming across file systems would not be atomic.
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
    # The new name, too, must survive a power cut.
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder`, which is created if missing, for this process. If another process holds the lock, wait for it
    (`wait`) or raise UserError. The lock ends with the process, however the process ends. A folder that was created
    here is removed again if an error leaves it empty."""
    import filelock

    is_new = not folder.exists()
    lock = filelock.FileLock(folder / ".lock")

    # Take the lock at once if it is free.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    # Somebody else holds it: for a download that is worth waiting for, a second run in one folder is a mistake.
    except filelock.Timeout:
        require(wait, f"{folder} is in use by another process; wait for it or choose another folder")
        print(f"{folder} is in use by another process: waiting for it", flush=True)
        lock.acquire()
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}; choose another folder") from None

    try:
        yield
    except BaseException:
        # A mistyped --out-dir should not leave an empty folder. A process that waits here would lose its lock file.
        if is_new and not wait and [p.name for p in folder.iterdir()] == [".lock"]:
            (folder / ".lock").unlink()
            folder.rmdir()
        raise
    finally:
        lock.release()
