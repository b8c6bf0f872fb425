"""Disks that fail for a moment or for good, and locks on folders, also where the file system has no flock."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from faults import io_faults
from helpers import make_hellaswag_rows, write_jsonl

from system import files
from system.cli import UserError
from system.files import AppendFile, LockHolder, explain_write_error, lock_folder, retry_io, write_file
from tokens import shards
from training import checkpoint, hellaswag_eval

ALWAYS = 10**6


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The seconds of every time.sleep, which returns at once."""
    made = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.fixture
def plant(pauses):
    """io_faults.plant, removed after the test."""
    yield io_faults.plant
    io_faults.remove()


# ------------------------------------------------------------------------- errors that may pass


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_error_that_passes_is_retried_with_one_warning(plant, pauses, tmp_path, capsys, code):
    path = tmp_path / "file"
    path.write_text("content")
    plant("file", "open", code, times=3)

    assert retry_io(path.read_text, path) == "content"

    error_output = capsys.readouterr().err
    assert pauses == [1, 2, 4]
    assert error_output.count(f"warning: {path}: {os.strerror(code)}; trying again for 60 seconds\n") == 1
    assert "accessible again" in error_output and error_output.count("\n") == 2


def test_an_error_that_lasts_is_raised_with_the_path_after_a_minute(plant, pauses, tmp_path):
    plant("file", "open", errno.EIO, times=ALWAYS)

    with pytest.raises(OSError, match=r"Input/output error, in 7 tries.*: '.*file'") as error:
        retry_io((tmp_path / "file").read_text, tmp_path / "file")

    assert error.value.errno == errno.EIO and sum(pauses) == 60


def test_what_only_the_user_can_change_is_not_retried(plant, pauses, tmp_path):
    plant("file", "open", errno.EACCES, times=ALWAYS)

    with pytest.raises(PermissionError):
        retry_io((tmp_path / "file").read_text, tmp_path / "file")

    assert pauses == []


@pytest.mark.parametrize("operation", ["open", "write", "sync", "rename"])
def test_a_file_is_written_from_its_beginning_again(plant, pauses, tmp_path, operation):
    path = tmp_path / "file"
    plant("file", operation, errno.EIO, times=2)

    write_file(path, lambda f: f.write(b"all of it"))

    assert path.read_bytes() == b"all of it" and pauses
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("operation", ["write", "sync", "open"])
def test_a_file_that_grows_has_every_line_once(plant, tmp_path, operation):
    """Also after an error that has come with half a line written, and after a sync that failed, when the lines before
    it may be lost."""
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    file = AppendFile(path)
    plant("log", operation, errno.EIO, times=2, skip=2)
    file.sync()  # opens it with the planted faults
    lines = [b"before\n"]
    for i in range(8):
        file.append(b"line %d\n" % i)
        lines.append(b"line %d\n" % i)
        if i % 3 == 2:
            file.sync()
        with io_faults.real_open(path, "rb") as f:
            assert f.read() == b"".join(lines)
    file.close()


def test_an_error_of_the_disk_is_not_taken_for_the_end_of_a_shard(plant, pauses, tmp_path):
    path = tmp_path / "x_train_000001.npy"
    tokens = np.arange(5000, dtype=np.uint16)
    sha256 = shards.write_shard(path, tokens)
    plant("x_train", "read", errno.EIO, times=1, skip=1)  # the header is read, then the tokens

    assert np.array_equal(shards.read_shard(path, sha256), tokens)
    assert pauses == [1]

    plant("x_train", "read", errno.EIO, times=ALWAYS, skip=1)
    with pytest.raises(OSError, match="Input/output error"):
        shards.read_shard(path, sha256)


def test_hellaswag_rows_are_read_again(plant, pauses, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3))
    plant("rows.jsonl", "read", errno.ETIMEDOUT, times=1)

    assert len(hellaswag_eval.load_examples(path)) == 3 and pauses == [1]


def write_step(folder, step):
    """A complete checkpoint of almost nothing."""
    for path in (checkpoint.optim_path(folder, step), checkpoint.model_path(folder, step)):
        checkpoint.write(path, {"format": checkpoint.FORMAT, "weight": torch.zeros(1000)})


def test_a_volume_that_fails_does_not_make_a_run_forget_its_checkpoints(plant, pauses, tmp_path):
    """They would seem incomplete, and --resume auto would start anew."""
    write_step(tmp_path, 3)

    plant("model_00003", "open", errno.EIO, times=1)
    assert checkpoint.latest_step(tmp_path) == 3

    plant("model_00003", "read", errno.EIO, times=ALWAYS)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.latest_step(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        checkpoint.read_file(checkpoint.model_path(tmp_path, 3))


@pytest.mark.parametrize("operation", ["write", "sync", "rename"])
def test_a_checkpoint_is_written_again_or_ends_as_an_error_of_the_system(plant, pauses, tmp_path, capsys, operation):
    content = {"format": checkpoint.FORMAT, "weight": torch.ones(1000)}
    with checkpoint.CheckpointWriter(tmp_path) as writer:
        plant("optim_00001", operation, errno.EIO, times=1)
        writer.save(1, {"model": {"w": torch.ones(9)}}, content)
        writer.wait()
        assert checkpoint.latest_step(tmp_path) == 1 and pauses == [1]

        plant("optim_00002", operation, errno.EIO, times=ALWAYS)
        writer.save(2, {"model": {"w": torch.ones(9)}}, content)
        with pytest.raises(OSError, match="Input/output error"):  # which is no UserError
            writer.wait()
        assert checkpoint.latest_step(tmp_path) == 1
        assert "the next save tries again" in capsys.readouterr().out


@pytest.mark.parametrize("code, words", [(errno.ENOSPC, "No space left"), (errno.EDQUOT, "Disk quota exceeded")])
def test_the_error_of_a_full_disk_or_quota_names_the_space_that_is_needed(plant, pauses, tmp_path, code, words):
    with checkpoint.CheckpointWriter(tmp_path) as writer:
        plant("optim_00001", "write", code, times=ALWAYS)
        writer.save(1, {"model": {"w": torch.ones(9)}}, {"w": torch.ones(50_000)})
        with pytest.raises(UserError, match=rf"{words}.*\(0\.2 MB needed, [\d.]+ [GM]B free") as error:
            writer.wait()

    assert pauses == []
    assert ("not counting the quota" in str(error.value)) == (code == errno.EDQUOT)


def test_free_space_is_that_of_the_nearest_folder_and_other_errors_are_left_as_they_are(tmp_path):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    assert "B free)" in explain_write_error(full, tmp_path / "a" / "b" / "c")
    assert explain_write_error(PermissionError(errno.EACCES, "Permission denied"), tmp_path, 5) == "Permission denied"


def test_a_file_system_that_cannot_sync_folders_is_written_to(monkeypatch, tmp_path):
    fsync = os.fsync

    def fsync_files(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_files)
    write_file(tmp_path / "file", lambda f: f.write(b"x"))

    assert (tmp_path / "file").read_bytes() == b"x"


# ------------------------------------------------------------------------- locks

IN_USE = "in use by another process"


@pytest.fixture(params=[errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def no_flock(request, monkeypatch):
    """A file system without flock, such as Lustre mounted without -o flock."""
    monkeypatch.setattr(fcntl, "flock", io_faults.without_flock(request.param))


def hold(folder, **changes):
    """Leave the marker of a process that holds the lock of a folder without flock, or was killed while it did."""
    folder.mkdir(exist_ok=True)
    holder = replace(LockHolder.of_this_process(), **changes)
    (folder / ".lock.held").write_text(json.dumps(asdict(holder)))
    return holder


def add_squeue(folder, monkeypatch, script):
    """Put a stand-in for Slurm's squeue on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "squeue").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_refusal_names_the_process_that_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    who = rf"process {os.getpid()} of Slurm job 77 on {socket.gethostname()}, since 20\d\d-"

    with lock_folder(tmp_path / "run"), pytest.raises(UserError, match=rf"{IN_USE} \({who}.*choose another folder"):
        with lock_folder(tmp_path / "run"):
            pytest.fail("two processes in one folder")

    # Given back, it names nobody.
    assert (tmp_path / "run" / ".lock").read_bytes() == b""


def test_a_folder_is_locked_without_flock(no_flock, tmp_path):
    folder = tmp_path / "run"

    with lock_folder(folder), pytest.raises(UserError, match=rf"{IN_USE} \(process {os.getpid()} .*has no flock"):
        with lock_folder(folder):
            pytest.fail("two processes in one folder")
    with lock_folder(folder):  # the first has given it back
        assert (folder / ".lock.held").exists()

    with pytest.raises(ZeroDivisionError), lock_folder(tmp_path / "new"):
        raise ZeroDivisionError
    assert not (tmp_path / "new").exists()  # nothing is left behind


def test_without_flock_the_lock_of_a_killed_process_is_taken_over(no_flock, tmp_path, capsys):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    boot = LockHolder.of_this_process().boot
    parent = os.getppid()

    for changes in (
        {"pid": ended.pid, "started": "1"},  # killed
        {"pid": parent, "started": "1"},  # its number now belongs to another process
        {"boot": "another " + boot.split()[1]},  # the machine was rebooted
    ):
        hold(tmp_path / "run", **changes)
        with lock_folder(tmp_path / "run"):
            pass
        assert "no longer runs: taking over its lock" in capsys.readouterr().err

    # One that runs keeps it.
    hold(tmp_path / "run", pid=parent, started=files.process_start(parent))
    with pytest.raises(UserError, match=IN_USE), lock_folder(tmp_path / "run"):
        pass


def test_without_flock_a_requeued_job_takes_its_lock_from_another_node(no_flock, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    hold(tmp_path / "run", host="node7", job_restarts=0)

    # The same start of the job: the process may run.
    with pytest.raises(UserError, match=r"on node7.*if that process no longer runs, remove .*\.lock\.held"):
        with lock_folder(tmp_path / "run"):
            pass

    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock_folder(tmp_path / "run"):
        assert files.read_holder(tmp_path / "run" / ".lock.held").job_restarts == 1


@pytest.mark.parametrize("squeue, is_taken", [
    ("echo RUNNING", False),
    ("echo COMPLETING", False),
    ("echo PENDING", True),  # requeued, and waiting: it has no processes
    ("true", True),  # ended
    ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),  # ended long ago
    ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", False),
    ("", True),
])  # fmt: skip
def test_without_flock_slurm_knows_whether_the_holders_job_is_gone(tmp_path, monkeypatch, squeue, is_taken):
    monkeypatch.setattr(fcntl, "flock", io_faults.without_flock(errno.ENOSYS))
    add_squeue(tmp_path / "bin", monkeypatch, f'[ "$*" = "--noheader --jobs 55 --format %T" ] || exit 9\n{squeue}')
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    hold(tmp_path / "run", host="node7", job="55")

    if is_taken:
        with lock_folder(tmp_path / "run"):
            pass
    else:
        with pytest.raises(UserError, match=f"{IN_USE}.*Slurm job 55"), lock_folder(tmp_path / "run"):
            pass


def test_a_flock_that_is_local_to_a_node_does_not_let_two_jobs_in(tmp_path, monkeypatch):
    """As on Lustre mounted with -o localflock: flock succeeds, but Slurm says that the holder's job runs."""
    add_squeue(tmp_path / "bin", monkeypatch, "echo RUNNING")
    (tmp_path / "run").mkdir()
    holder = replace(LockHolder.of_this_process(), host="node7", job="55")
    (tmp_path / "run" / ".lock").write_text(json.dumps(asdict(holder)))

    with pytest.raises(UserError, match=f"{IN_USE}.*Slurm job 55"), lock_folder(tmp_path / "run"):
        pass

    # That job has ended: only its name is left in the lock file.
    add_squeue(tmp_path / "bin", monkeypatch, "true")
    with lock_folder(tmp_path / "run"):
        pass


def test_a_lock_is_waited_for_no_longer_than_stated(no_flock, tmp_path, monkeypatch, capsys):
    hold(tmp_path / "data", host="node7")
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(files, "MAX_LOCK_PAUSE", 600)  # fewer looks
    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with pytest.raises(UserError, match=f"still {IN_USE}.*node7.*24 hours are over"):
        with lock_folder(tmp_path / "data", wait=True):
            pytest.fail("it is held")

    assert "waiting for it, at most 24 hours" in capsys.readouterr().out
    assert 24 * 3600 <= now <= 24 * 3600 + 600

    # Removed, as the message says, it is free.
    (tmp_path / "data" / ".lock.held").unlink()
    with lock_folder(tmp_path / "data", wait=True):
        pass


def test_an_empty_marker_keeps_other_processes_out(no_flock, tmp_path):
    """Its process may be about to write into it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock.held").touch()

    with pytest.raises(UserError, match=rf"{IN_USE}.*remove .*\.lock\.held"), lock_folder(tmp_path / "run"):
        pass


def test_a_process_that_dies_while_it_takes_the_lock_leaves_no_empty_marker(no_flock, tmp_path, monkeypatch):
    def die(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "write_holder", die)
    (tmp_path / "run").mkdir()
    with pytest.raises(KeyboardInterrupt):
        files.FolderLock(tmp_path / "run").try_acquire()
    assert not (tmp_path / "run" / ".lock.held").exists()


def test_a_file_system_without_flock_and_hard_links_has_locks_too(no_flock, tmp_path, monkeypatch):
    def link(*paths):
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", link)
    (tmp_path / "run").mkdir()
    first, second = files.FolderLock(tmp_path / "run"), files.FolderLock(tmp_path / "run")
    assert first.try_acquire() and not second.try_acquire()
    assert files.read_holder(tmp_path / "run" / ".lock.held").pid == os.getpid()
    first.release()
    assert second.try_acquire()
    assert {p.name for p in (tmp_path / "run").iterdir()} == {".lock", ".lock.held"}


def test_only_one_of_two_processes_takes_over_a_lock(no_flock, tmp_path, monkeypatch):
    """The other one has judged the old marker, and finds a new one in its place."""
    folder = tmp_path / "run"
    hold(folder, pid=2**22, started="1")
    rename = os.rename
    second = files.FolderLock(folder)

    def rename_after_the_first(*paths):
        monkeypatch.setattr(os, "rename", rename)
        assert files.FolderLock(folder).try_acquire()
        rename(*paths)

    monkeypatch.setattr(os, "rename", rename_after_the_first)
    assert not second.try_acquire()
    assert files.read_holder(folder / ".lock.held").pid == os.getpid()
