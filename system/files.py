"""Files that are complete or absent, and a folder that one process at a time writes to.

    with atomic_write(path) as f:
        f.write(data)
    with lock_folder(out):
        ...

Called wherever the project writes a file that must not be lost: checkpoints, shards, manifests. Nothing here tries
again: the same command, run again, is the way back from a disk that has failed.
"""

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, SoftFileLock, Timeout

from system.cli import TransientError, UserError, require


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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to storage."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        # Some network file systems cannot sync a folder; they send names to their server at once.
        if e.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder`, which is created if missing, for this process. Raises UserError if another process
    holds the lock. The lock, on the file .lock, ends with the process, however the process ends.

    Where the file system has no flock, as on some Lustre mounts, the file itself is the lock, and names its process:
    filelock takes over that of a process of this machine that has died.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} is not a folder, and cannot be made one; choose another") from None
    except Timeout:
        fix = "wait for it or choose another folder"
        if isinstance(lock, SoftFileLock):
            fix += f", or remove {folder}/.lock if that process is gone"
        # A run that was killed while it waited for a disk may hold the lock a little longer: a restart may succeed.
        raise TransientError(f"{folder} is in use by another process; {fix}") from None
    try:
        yield
    except UserError:
        # A start that was refused leaves no empty folder, which would look like a run.
        if folder in made and folder.is_dir() and os.listdir(folder) == [".lock"]:
            (folder / ".lock").unlink()
            for path in made:
                with suppress(OSError):  # something else is in it
                    path.rmdir()
        raise
    finally:
        lock.release()


def refuse_placeholder(path: str | Path) -> None:
    """Raise UserError if a file only stands in the place of the one that its name says: the pointer that Git LFS or
    git-annex leaves where the content was not fetched, or a web page that was saved instead of it. To be called
    wherever a file of a user's is opened."""
    with open(path, "rb") as f:
        first = f.read(1024).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    is_lfs = first.startswith(b"version https://git-lfs.github.com/spec/")
    require(not is_lfs, f"{path} is a pointer of Git LFS, not the file; in its repository run: git lfs pull")
    is_annex = re.match(rb"(\.\./)*(\.git)?/annex/objects/", first)
    require(not is_annex, f"{path} is a pointer of git-annex, not the file; in its repository run: git annex get")
    page = rb"(<\?xml.*?\?>|<!--.*?-->|\s)*(<!doctype html|<html|<error>)"
    is_page = re.match(page, first, re.DOTALL)
    fix = "download it again, from the address of the file itself (on the Hub /resolve/, not /blob/)"
    require(not is_page, f"{path} is a saved web page, not the file; {fix}")


def free_bytes(folder: Path) -> int:
    """Bytes that can be written to an existing folder. A rented network volume shows the terabytes of a whole cluster:
    there the environment variable DISK_GB gives the size that was bought, of which the volume's files are taken off."""
    free = shutil.disk_usage(folder).free
    bought_gb = os.environ.get("DISK_GB")
    if not bought_gb:
        return free
    is_number = bought_gb.replace(".", "", 1).isdecimal()
    require(is_number, f"DISK_GB={bought_gb} must be a number, the size of the volume you bought, as in DISK_GB=60")

    # The volume that the folder is on, and the kilobytes of its files: hard links once, other volumes not.
    volume = folder.resolve()
    while not volume.is_mount():
        volume = volume.parent
    du = subprocess.run(["du", "-skx", volume], capture_output=True, text=True)
    used = 1024 * int(du.stdout.split()[0])
    return min(free, int(float(bought_gb) * 1e9) - used)
