"""Files that are complete or absent, and a folder that one process at a time writes to.

    with atomic_write(path) as f:
        f.write(data)
    with lock_folder(out):
        ...
    rows = read_table(path)     # [{"card": "H100", "tflops": "989", ...}, ...]

Nothing here tries again: the same command, run again, is the way back from a disk that has failed.
"""

import csv
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from system.errors import TransientError
from system.printing import print0


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` once all of it is on disk. An error leaves nothing behind.

    The order is the protocol. A kill or a power cut at any moment leaves either the old file, or none, or the complete
    new one:

                 write .path.part | sync its content | rename to path | sync the folder
        path     the old file, or none ..............| the new file ...................
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
        # A partial file is of no use, and it may be what filled the disk. The first error is the one to report.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise

    # The new name, too, must survive a power cut.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is created if missing, for this process. Raises TransientError if another process holds the
    lock: one that was killed while it waited for a disk may hold it a little longer. The lock, on the file .lock, ends
    with the process, however the process ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TransientError(f"{folder} is in use by another process; wait for it or choose another") from None
        except OSError as e:  # a disk without locks, as some network disks are
            print0(f"warning: {folder} cannot be locked ({e}): let no other process write there")
        yield


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a .csv by the names of its columns, without the lines that begin with #."""
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))
