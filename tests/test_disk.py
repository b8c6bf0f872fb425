"""The room for checkpoints and shards where a volume has a quota: system/disk.py, and those that use it."""

import os
import shutil

import pytest
from helpers import train_quickstart

import fineweb
from system.cli import UserError
from system.disk import free_space, used_bytes


def write_mounts(tmp_path, kind):
    """A list of mounts in which tmp_path is a volume of this type."""
    path = tmp_path / "mounts"
    path.write_text(f"overlay / overlay rw 0 0\nvolume {tmp_path} {kind} rw 0 0\n")
    return str(path)


@pytest.mark.parametrize("kind, is_shared", [("nfs4", True), ("fuse.mfs", True), ("lustre", True), ("ext4", False)])
def test_the_plan_says_that_a_quota_of_a_shared_volume_cannot_be_seen(tmp_path, monkeypatch, kind, is_shared):
    monkeypatch.delenv("DISK_GB", raising=False)
    (tmp_path / "log").mkdir()

    space = free_space(tmp_path / "log", write_mounts(tmp_path, kind))

    assert space.free > 0
    assert (f"{tmp_path} ({kind})" in space.note and "DISK_GB=60" in space.note) == is_shared


def test_the_size_that_was_bought_counts_less_the_files_of_the_volume(tmp_path, monkeypatch):
    mounts = write_mounts(tmp_path, "nfs")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard").write_bytes(os.urandom(3_000_000))
    os.link(tmp_path / "data" / "shard", tmp_path / "second name")  # counts once
    assert 3_000_000 <= used_bytes(tmp_path) < 3_200_000

    monkeypatch.setenv("DISK_GB", "0.005")
    space = free_space(tmp_path / "data", mounts)
    assert 1_800_000 < space.free <= 2_000_000 and "DISK_GB=0.005" in space.note

    # a volume cannot have more room than its file system
    monkeypatch.setenv("DISK_GB", "1000000")
    assert free_space(tmp_path / "data", mounts).free <= shutil.disk_usage(tmp_path).total  # free changes any time

    monkeypatch.setenv("DISK_GB", "60GB")
    with pytest.raises(UserError, match="DISK_GB=60GB must be a number"):
        free_space(tmp_path, mounts)


def test_a_run_whose_checkpoints_exceed_what_was_bought_is_refused(tiny_args, tmp_path, monkeypatch):
    # the volume of this test is whatever tmp_path is on: it surely has more than a byte of files
    monkeypatch.setattr("system.disk.find_mount", lambda folder, _: (tmp_path, "nfs"))
    monkeypatch.setenv("DISK_GB", "0.0001")

    with pytest.raises(UserError, match="do not fit on the disk of"):
        train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "2")


def test_shards_that_exceed_what_was_bought_are_refused(tmp_path, monkeypatch, capsys):
    manifest = fineweb.Manifest({"subset": "", "files": [{"bytes": 3_000_000}]}, "npy", 100_000)
    monkeypatch.setattr("system.disk.find_mount", lambda folder, _: (tmp_path, "nfs"))

    monkeypatch.setenv("DISK_GB", "0.002")
    with pytest.raises(UserError, match=r"its disk has only 0\.0 GB free; choose another --out or lower"):
        fineweb.check_disk_space(tmp_path, manifest, downloads=False)

    # The quota of a volume cannot be seen.
    monkeypatch.delenv("DISK_GB")
    capsys.readouterr()
    fineweb.check_disk_space(tmp_path, manifest, downloads=False)
    assert f"{tmp_path} (nfs) shows" in capsys.readouterr().out
