"""What huggingface_hub does below our pulls: Xet storage, mirrors, and downloads that were killed.

The Hub is a stand-in; the Xet storage is a folder, which hf_xet itself writes and reads (an address local://...): only
the network protocol of that storage is not the real one.
"""

import ast
import errno
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from faults import hub_server
from faults.hub_server import Fault
from helpers import make_shards

from system.cli import UserError
from system.hub_client import HubUnavailable, explain_failure, open_hub
from tokens import hub_data, shards

UPLOAD = """
import pathlib, sys
from faults.hub_server import Hub
hub = Hub(pathlib.Path(sys.argv[1]), "")
hub.store_in_xet(pathlib.Path(sys.argv[2]))
print(hub.xet_hashes)
"""


@pytest.fixture
def hub(tmp_path):
    """A stand-in for the Hub that has the shards of tmp_path/data as the dataset tester/toy."""
    data = make_shards(tmp_path / "data")
    shutil.copytree(data, tmp_path / "hub" / "datasets" / "tester" / "toy")
    with hub_server.start(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def pull(hub, tmp_path, run_in_fork):
    """pull(folder) -> the ended `hub.py pull-data tester/toy FOLDER`; fails=True: with one message."""

    def run(folder, fails=False, **env):
        env = {**hub.env(), "HF_XET_CACHE": str(tmp_path / "xet-cache"), **env}
        done = run_in_fork("hub.py", "pull-data", "tester/toy", folder, env=env, check=not fails)
        if fails:
            assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
            assert len(re.findall("^error: ", done.stderr, re.M)) == 1
        return done

    return run


def same_files(a: Path, b: Path) -> bool:
    """Whether two folders have the same files, apart from their locks."""
    read = [{p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"} for folder in (a, b)]
    return read[0] == read[1]


@pytest.fixture
def xet(hub, tmp_path):
    """The folder that is the Xet storage, with the large files of the dataset. hf_xet starts threads, so what fills it
    is a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "HF_XET_CACHE": str(tmp_path / "xet-cache")}
    command = [sys.executable, "-c", UPLOAD, hub.root, hub.root / "datasets" / "tester" / "toy"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    hub.xet_hashes = ast.literal_eval(done.stdout)
    assert len(hub.xet_hashes) == 3
    return tmp_path / "xet-storage"


def test_a_file_in_xet_storage_is_pulled_from_there(hub, xet, pull, tmp_path):
    pull(tmp_path / "out", HF_HUB_DISABLE_XET="0")

    assert same_files(tmp_path / "out", tmp_path / "data")
    assert hub.count("GET", "xet-read-token") and not hub.count("GET", ".npy")


@pytest.mark.slow  # hf_xet tries again for some seconds
def test_a_file_that_xet_storage_has_lost_ends_in_one_message(xet, pull, tmp_path):
    xet.rename(tmp_path / "gone")
    pull(tmp_path / "out", fails=True, HF_HUB_DISABLE_XET="0")
    assert not list((tmp_path / "out").glob("*.npy"))

    # The same command ends the work once the storage is back.
    shutil.rmtree(xet, ignore_errors=True)
    (tmp_path / "gone").rename(xet)
    pull(tmp_path / "out", HF_HUB_DISABLE_XET="0")
    assert same_files(tmp_path / "out", tmp_path / "data")


def test_a_mirror_serves_the_files_that_the_hub_has_in_xet_storage(hub, pull, tmp_path):
    """It passes on the address of the storage, which is another host that its user may not reach."""
    hub.xet_hashes = {shard.sha256: "0" * 64 for shard in shards.read_manifest(tmp_path / "data").shards}

    pull(tmp_path / "out")

    assert same_files(tmp_path / "out", tmp_path / "data") and not hub.count("GET", "xet-read-token")


@pytest.mark.parametrize("endpoint, uses_xet", [
    ("https://huggingface.co", True), ("https://mirror.example", False), ("http://127.0.0.1:9", False),
])  # fmt: skip
def test_only_the_hub_itself_uses_xet(monkeypatch, endpoint, uses_xet):
    from huggingface_hub import constants
    from huggingface_hub.utils._runtime import is_xet_available

    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with open_hub("tester/toy"):
        assert is_xet_available() == uses_xet


def test_what_a_killed_pull_left_is_removed_and_what_it_completed_is_kept(hub, pull, tmp_path):
    out = tmp_path / "out"
    bookkeeping = out / ".incoming" / ".cache" / "huggingface" / "download"

    # The second of the three files does not arrive. What a kill in its middle leaves is made by hand, as the name of a
    # partial file is random; without flock, the library's lock stays, too.
    hub.faults.append(Fault("status", "train_000001.npy", times=10**6, code=404))
    pull(out, fails=True)
    (bookkeeping / "x.0a1b2c3d.incomplete").write_bytes(bytes(10**6))
    (bookkeeping / "toy_train_000001.npy.lock").write_text("1\nanother-host\n")
    completed = [p.name for p in (out / ".incoming").glob("*.npy")]

    # The next pull removes it, also one that fails again.
    pull(out, fails=True)
    assert not list(bookkeeping.rglob("*.incomplete"))

    hub.faults.clear()
    hub.log.clear()
    pull(out)
    assert same_files(out, tmp_path / "data")
    assert completed and not any(hub.count("GET", name) for name in completed)


@pytest.mark.parametrize("status, may_pass", [(0, True), (429, True), (503, True), (401, False), (404, False)])
def test_an_outage_of_the_hub_is_distinguished_from_what_the_user_must_change(status, may_pass):
    import httpx2

    error = httpx2.ConnectError("no route")
    if status:
        error = ValueError("an answer")
        error.response = httpx2.Response(status)

    with pytest.raises(UserError) as raised, open_hub("tester/toy"):
        raise error

    assert isinstance(raised.value, HubUnavailable) == may_pass


def test_a_disk_that_fails_is_no_fault_of_the_hub():
    with pytest.raises(OSError, match="Input/output error"), open_hub("tester/toy"):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_restart_while_the_hub_is_away_trains_on_what_was_pulled(tmp_path, monkeypatch, capsys):
    def pull_data(repo, folder):
        raise HubUnavailable("cannot reach the Hub")

    monkeypatch.setattr(hub_data, "pull_data", pull_data)
    data = make_shards(tmp_path / "data")

    assert hub_data.pull_for_training("tester/toy", data) == data
    assert "warning: cannot reach the Hub" in capsys.readouterr().out

    # A pull that was not finished has no manifest.
    (data / "manifest.json").unlink()
    with pytest.raises(HubUnavailable):
        hub_data.pull_for_training("tester/toy", data)


def test_a_name_that_does_not_resolve_is_distinguished_from_offline_mode():
    from httpx2 import ConnectError
    from huggingface_hub.errors import OfflineModeIsEnabled

    error = ConnectError("[Errno -2] Name or service not known")
    error.__cause__ = socket.gaierror(-2, "Name or service not known")
    message = explain_failure(error, "gpt2")
    assert "could not be resolved; check the network" in message and "HF_ENDPOINT" in message
    assert "HF_HUB_OFFLINE" not in message

    assert "unset HF_HUB_OFFLINE" in explain_failure(OfflineModeIsEnabled("offline"), "gpt2")
