"""Files that are complete or absent, and a lock on a folder."""

import errno
import os
import signal
import time

import pytest

from system.errors import TransientError
from system.files import atomic_write, lock_folder


def fail(*_):
    """In place of a call of the system, on a disk that is full."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_file(path, content):
    with atomic_write(path) as f:
        f.write(content)


@pytest.mark.parametrize("operation", ["fsync", "replace"])
def test_a_failed_write_leaves_only_the_old_file(tmp_path, operation):
    path = tmp_path / "file"
    write_file(path, b"old")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        patch.setattr(os, operation, fail)
        write_file(path, b"new")

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


# ------------------------------------------------------------------------- locks


def test_a_folder_is_one_process_until_it_is_killed(tmp_path):
    folder, (ready, locked) = tmp_path / "run", os.pipe()
    child = os.fork()
    if child == 0:
        with lock_folder(folder):
            os.write(locked, b"!")
            time.sleep(60)
            os._exit(1)
    os.read(ready, 1)

    try:
        with pytest.raises(TransientError, match=str(folder)), lock_folder(folder):
            pytest.fail("two processes in one folder")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with lock_folder(folder):
        pass


def test_a_disk_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", fail)
    with lock_folder(tmp_path):
        assert str(tmp_path) in capsys.readouterr().out
