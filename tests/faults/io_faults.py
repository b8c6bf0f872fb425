"""Errors of a disk or network volume on demand, in the process that calls `plant`.

    plant("metrics.jsonl", "write", errno.EIO, times=1)     # the next write to that file fails once, half of it written

The calls of Python's own files and of the os module fail; torch's C++ code, which maps checkpoints, is not reached.
"""

import builtins
import io
import os
from collections.abc import Callable

OPERATIONS = ("open", "read", "write", "sync", "rename")

real_open, real_os_open, real_fsync, real_replace = builtins.open, os.open, os.fsync, os.replace


def plant(path_part: str, operation: str, code: int, times: int, skip: int = 0) -> None:
    """From now on, of one operation on the files whose path has this part, `skip` calls succeed, and the next `times`
    fail with the error `code`. A write that fails has written half of its bytes."""
    assert operation in OPERATIONS, operation
    calls = 0

    def check(path: object, called: str) -> None:
        nonlocal calls
        if called == operation and path_part in str(path):
            calls += 1
            if skip < calls <= skip + times:
                raise OSError(code, os.strerror(code), str(path))

    class FaultyFile(io.FileIO):
        def readinto(self, buffer):
            check(self.name, "read")
            return super().readinto(buffer)

        def read(self, size=-1):
            check(self.name, "read")
            return super().read(size)

        def readall(self):
            check(self.name, "read")
            return super().readall()

        def write(self, data):
            try:
                check(self.name, "write")
            except OSError:
                super().write(memoryview(data).cast("B")[: len(data) // 2])
                raise
            return super().write(data)

    def open_file(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, **more):
        if path_part not in str(file):
            return real_open(file, mode, buffering, encoding, errors, newline, **more)
        check(file, "open")
        raw = FaultyFile(file, mode.replace("b", "").replace("t", ""))
        if buffering == 0:
            return raw
        binary = (io.BufferedReader if raw.readable() else io.BufferedWriter)(raw)
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding, errors, newline)

    def os_open(path, *args, **kwargs):
        check(path, "open")
        return real_os_open(path, *args, **kwargs)

    def fsync(descriptor):
        check(os.readlink(f"/proc/self/fd/{descriptor}"), "sync")
        return real_fsync(descriptor)

    def replace(source, target, **kwargs):
        check(target, "rename")
        return real_replace(source, target, **kwargs)

    builtins.open = io.open = open_file
    os.open, os.fsync, os.replace = os_open, fsync, replace


def remove() -> None:
    """Let every call succeed again."""
    builtins.open = io.open = real_open
    os.open, os.fsync, os.replace = real_os_open, real_fsync, real_replace


def without_flock(code: int) -> Callable:
    """A stand-in for fcntl.flock on a file system that does not have it."""

    def flock(*_):
        raise OSError(code, os.strerror(code))

    return flock
