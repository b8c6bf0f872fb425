"""Errors of a disk on demand, in the process that calls `plant`.

    plant("metrics.jsonl", "write", errno.ENOSPC)     # every write to that file fails, half of it written
    remove()                                          # every call succeeds again

The calls of Python's own files and of the os module fail; torch's C++ code, which maps checkpoints, is not reached.
"""

import builtins
import errno
import io
import os

real_open, real_fsync, real_replace = builtins.open, os.fsync, os.replace


def plant(path_part: str, operation: str, code: int, skip: int = 0) -> None:
    """From now on, of one operation (write, sync, rename) on the files whose path has this part, `skip` calls succeed,
    and all later ones fail with the error `code`."""
    calls = 0

    def check(path: object, called: str) -> None:
        nonlocal calls
        if called == operation and path_part in str(path):
            calls += 1
            if calls > skip:
                raise OSError(code, os.strerror(code), str(path))

    class FaultyFile(io.FileIO):
        def write(self, data):
            try:
                check(self.name, "write")
            except OSError:
                super().write(memoryview(data).cast("B")[: len(data) // 2])
                raise
            return super().write(data)

    def open_file(file, mode="r", buffering=-1, *args, **more):
        if path_part not in str(file) or "b" not in mode or "r" in mode:
            return real_open(file, mode, buffering, *args, **more)
        raw = FaultyFile(file, mode.replace("b", ""))
        return raw if buffering == 0 else io.BufferedWriter(raw)

    def fsync(descriptor):
        check(os.readlink(f"/proc/self/fd/{descriptor}"), "sync")
        return real_fsync(descriptor)

    def replace(source, target, **kwargs):
        check(target, "rename")
        return real_replace(source, target, **kwargs)

    builtins.open = io.open = open_file
    os.fsync, os.replace = fsync, replace


def remove() -> None:
    """Let every call succeed again."""
    builtins.open = io.open = real_open
    os.fsync, os.replace = real_fsync, real_replace


def without_flock(*_: object) -> None:
    """A stand-in for fcntl.flock on a file system that does not have it."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
