"""Files that are written whole or not at all, and folders that only one process may hold at a time."""

import os
from contextlib import contextmanager
from pathlib import Path

from cli import UserError


@contextmanager
def whole_file(path: Path):
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
def locked(folder: Path, wait: bool = False):
    """Lock `folder` (created if missing) for this process; if another process holds it, wait or raise UserError. The
    lock ends with the process, however that ends. A folder created here is removed if an error leaves it empty."""
    import fcntl

    new = not wait and not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+")
    except OSError as e:
        raise UserError(f"cannot write to {folder}: {e.strerror}; choose another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            used = f"{folder} is in use by process {lock.read().strip()}"
            if not wait:
                raise UserError(f"{used}; wait for it or choose another folder") from None
            print(f"{used}: waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        try:
            yield
        except BaseException:
            if new and [p.name for p in folder.iterdir()] == [".lock"]:
                (folder / ".lock").unlink()
                folder.rmdir()
            raise
