"""Files that are complete or absent, a lock on a folder, also where the file system has no flock, and room on disks."""

import errno
import fcntl
import os
import resource
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

from system.cli import UserError
from system.files import atomic_write, free_bytes, lock_folder


def fail(*_):
    """In place of a call of the system, on a disk that is full or a file system without locks."""
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("operation", ["write", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, operation):
    path = tmp_path / "file"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError):
        if operation == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))  # no file grows beyond two bytes
        else:
            patch.setattr(os, operation, fail)
        try:
            with atomic_write(path) as f:
                f.write(b"new")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]

    with atomic_write(path) as f:
        f.write(b"new")
    assert path.read_text() == "new"


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_replace(*paths):
        calls.append("rename")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    with atomic_write(tmp_path / "file") as f:
        f.write(b"x")

    assert calls == [".file.part", "rename", tmp_path.name]


def test_a_file_system_that_cannot_sync_folders_is_written_to(monkeypatch, tmp_path):
    fsync = os.fsync

    def fsync_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files)
    with atomic_write(tmp_path / "file") as f:
        f.write(b"x")

    assert (tmp_path / "file").read_bytes() == b"x"


# ------------------------------------------------------------------------- locks

# Holds the lock of the folder argv[1] until it is killed; with argv[2] "soft" as if the file system had no flock.
HOLDER = """
import errno, fcntl, sys, time
from pathlib import Path
from system.files import lock_folder
def fail(*_):
    raise OSError(errno.ENOSYS, "no flock here")
if sys.argv[2] == "soft":
    fcntl.flock = fail
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("kind", ["flock", "soft"])
def test_a_folder_belongs_to_one_process_until_it_is_killed(tmp_path, monkeypatch, kind):
    if kind == "soft":
        monkeypatch.setattr(fcntl, "flock", fail)
    folder = tmp_path / "run"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", HOLDER, str(folder), kind]
    holder = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"

    with pytest.raises(UserError, match="run is in use by another process") as refused, lock_folder(folder):
        pytest.fail("two processes in one folder")
    assert ("remove" in str(refused.value)) == (kind == "soft")

    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lock_folder(folder):
        pass


def test_an_error_leaves_no_empty_folder(tmp_path):
    """As of a mistyped --out-dir. What was written stays."""
    (tmp_path / "old").mkdir()
    for name in ("typo", "old", "used"):
        with pytest.raises(UserError), lock_folder(tmp_path / name):
            if name == "used":
                (tmp_path / name / "file").touch()
            raise UserError

    assert sorted(os.listdir(tmp_path)) == ["old", "used"]


def test_a_folder_that_cannot_be_made_is_one_message(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to"), lock_folder(tmp_path / "file" / "run"):
        pass


# ------------------------------------------------------------------------- room


def test_the_size_that_was_bought_counts_less_the_files_of_the_volume(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.is_mount", lambda path: path == tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "shard").write_bytes(os.urandom(3_000_000))
    os.link(folder / "shard", tmp_path / "second name")  # counts once

    monkeypatch.delenv("DISK_GB", raising=False)
    on_disk = free_bytes(folder)
    assert on_disk > 3_000_000

    monkeypatch.setenv("DISK_GB", "0.005")
    assert 1_800_000 < free_bytes(folder) <= 2_000_000

    # A volume cannot have more room than its file system.
    monkeypatch.setenv("DISK_GB", "1000000")
    assert free_bytes(folder) == pytest.approx(on_disk, rel=0.5)

    monkeypatch.setenv("DISK_GB", "60GB")
    with pytest.raises(UserError, match="DISK_GB=60GB must be a number"):
        free_bytes(folder)
