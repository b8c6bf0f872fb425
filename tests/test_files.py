"""Locks on folders. test_fineweb.py has one that is held; test_checkpoint.py has files that are complete or absent."""

import errno
import os
import signal
from unittest.mock import Mock

from system.files import lock_folder


def test_a_lock_ends_with_its_process(tmp_path):
    child = os.fork()
    if child == 0:
        with lock_folder(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with lock_folder(tmp_path):
        pass


def test_a_disk_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    with lock_folder(tmp_path):
        assert str(tmp_path) in capsys.readouterr().out
