"""Files that are complete or absent, a lock on a folder, and room on disks."""

import errno
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from system.cli import UserError
from system.files import atomic_write, free_bytes, lock_folder, refuse_placeholder


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


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_file_has_the_mode_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_file(tmp_path / "file", b"x")
        with lock_folder(tmp_path / "locked"):
            paths = [tmp_path / "file", tmp_path / "locked/.lock"]
            assert [path.stat().st_mode & 0o777 for path in paths] == [0o666 & ~umask] * 2
    finally:
        os.umask(before)


def test_the_content_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    calls = []
    replace = os.replace

    def record_fsync(descriptor):
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append((path.name, path.stat().st_size) if path.is_file() else path)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("rename") or replace(*paths))
    write_file(tmp_path / "file", b"all")
    assert calls == [(".file.part", 3), "rename", tmp_path]


@pytest.mark.parametrize("number, is_fatal", [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_folder_that_cannot_be_synced(monkeypatch, tmp_path, number, is_fatal):
    """Some network file systems cannot; a disk that fails is an error."""

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError) if is_fatal else nullcontext():
        write_file(tmp_path / "file", b"x")
    assert (tmp_path / "file").read_bytes() == b"x"


# ------------------------------------------------------------------------- what stands in a file's place

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize("content, fix", [
    (LFS_POINTER, "git lfs pull"),
    (b"/annex/objects/SHA256E-s9--00.txt\n", "git annex get"),
    (b"\n<!DOCTYPE html>\n<html><head>", "/resolve/"),
    (b"\xef\xbb\xbf<HTML lang='en'>", "/resolve/"),
    (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code>', "/resolve/"),
])  # fmt: skip
def test_a_placeholder_is_refused_with_its_fix(tmp_path, content, fix):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=fix) as error:
        refuse_placeholder(tmp_path / "a.txt")
    assert str(tmp_path / "a.txt") in str(error.value)


@pytest.mark.parametrize(
    "content", [b"", b"version 2", b"PK\x03\x04", b"In <html> we write.", b"<p>One</p>", b"\xff" * 9]
)
def test_other_files_are_no_placeholders(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    refuse_placeholder(tmp_path / "a.txt")


# ------------------------------------------------------------------------- locks


def hold_lock() -> None:
    """A script that holds the lock of the folder argv[1] until it is killed."""
    with lock_folder(Path(sys.argv[1])):
        print("locked", flush=True)
        time.sleep(600)


def test_a_folder_is_one_process_until_it_is_killed(tmp_path, start_script):
    folder = tmp_path / "run"
    holder = start_script(hold_lock, folder)
    holder.wait_until("locked")

    with pytest.raises(UserError, match=str(folder)), lock_folder(folder):
        pytest.fail("two processes in one folder")

    holder.send(signal.SIGKILL)
    holder.wait()
    with lock_folder(folder):
        pass


@pytest.mark.parametrize("is_new, writes, stays", [(True, False, False), (True, True, True), (False, False, True)])
def test_a_folder_that_was_made_for_nothing_goes(tmp_path, is_new, writes, stays):
    """As that of a run that is refused because its data are missing."""
    folder = tmp_path / "run"
    if not is_new:
        folder.mkdir()
    with pytest.raises(UserError, match="refused"), lock_folder(folder):
        if writes:
            (folder / "config.json").write_text("{}")
        raise UserError("refused")
    assert folder.exists() == stays
    with lock_folder(folder):
        pass


# ------------------------------------------------------------------------- room


def test_the_size_bought_counts_less_the_volumes_files(tmp_path, monkeypatch):
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
