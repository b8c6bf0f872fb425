"""Datasets of the Hugging Face Hub: parquet files below a path, and splits that `datasets` streams. The Hub is a
stand-in on loopback, and the Xet storage is a folder."""

import csv
import gzip
import json
import shutil
import signal
import threading
import time
from dataclasses import replace

import pytest
from corpora import encode, read_bytes, read_tokens, run_fineweb, write_documents
from faults import hub_server
from faults.hub_server import Fault
from helpers import make_documents

from system.cli import UserError
from tokens import documents as readers
from tokens import shards

SAMPLE = ("--source", "owner/web", "--subset", "sample/")

# Two configurations, three splits. Only the card says which files are whose; the order of the patterns is not by name.
CARD = """---
configs:
- config_name: english
  data_files:
  - split: train
    path: [part-b/*.parquet, part-a/*.parquet]
  - split: validation
    path: held-out/one.parquet
- config_name: french
  data_files:
  - split: train
    path: fr/*.parquet
---
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, of this process too, with owner/web: five parquet files under sample/, which hold hub.documents, and
    CARD's files."""
    import datasets.config
    from huggingface_hub import constants

    with hub_server.start(tmp_path / "hub") as server:
        # The libraries read their environment at import, which takes seconds: set what they have read.
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        home = tmp_path / "hf-home"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        template = f"{server.url}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        monkeypatch.setattr(datasets.config, "HUB_DATASETS_URL", template)
        for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
            monkeypatch.setattr(datasets.config, name, home / name)

        server.repos = tmp_path / "hub" / "datasets" / "owner"
        repo = server.repos / "web"
        server.documents = []
        for i in range(5):
            documents = make_documents(20 + i, 30)
            write_documents(repo / "sample" / f"{i:03d}_00000.parquet", documents)
            server.documents += documents
        for name in ("part-a/0", "part-a/1", "part-b/0", "held-out/one", "fr/0", "fr-old/0"):
            write_documents(repo / f"{name}.parquet", [name])
        (repo / "README.md").write_text(CARD)
        yield server


class DownloadWatcher:
    """Counts the most parquet files that a folder holds at a time, in a thread of its own."""

    def __init__(self, folder):
        self.folder = folder
        self.most = 0
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def watch(self):
        while not self.stopped.is_set():
            self.most = max(self.most, len(list(self.folder.glob("*.parquet"))))
            time.sleep(0.001)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stopped.set()
        self.thread.join()


# ------------------------------------------------------------------------- parquet files below a path


def test_hub_files_are_downloaded_ahead_by_one_and_deleted(tmp_path, hub, capsys):
    out = tmp_path / "out"
    args = (*SAMPLE, "--shard-size", 20_000, "--out")
    hub.faults.append(Fault("drop", "resolve", times=1))

    # A dropped connection is retried, and at most two files are on the disk at a time.
    with DownloadWatcher(out / ".source" / "sample") as watcher:
        run_fineweb(*args, out)
    assert read_tokens(out) == encode(hub.documents)
    assert 1 <= watcher.most <= 2 and not (out / ".source").exists()
    source = shards.read_manifest(out).source
    assert len(source["revision"]) == 40 and len(source["files"]) == 5

    # A finished folder asks the Hub nothing.
    before = read_bytes(out)
    requests = len(hub.log)
    run_fineweb(*args, out)
    assert "nothing left" in capsys.readouterr().out
    assert read_bytes(out) == before and len(hub.log) == requests

    # A removed shard is downloaded and made again.
    (out / "web_train_000002.npy").unlink()
    run_fineweb(*args, out)
    assert read_bytes(out) == before


def test_a_killed_download_is_resumed_at_the_same_revision(tmp_path, hub, start_script):
    out = tmp_path / "out"
    args = (*SAMPLE, "--shard-size", 2_000, "--out", out)
    script = start_script("fineweb.py", *args, env=hub.env())
    assert script.wait_until((out / "web_train_000003.npy").exists), script.output
    assert script.send(signal.SIGKILL)
    script.wait()
    incomplete = out / ".source" / ".cache" / "huggingface" / "download" / "x.0a1b.incomplete"
    incomplete.parent.mkdir(parents=True, exist_ok=True)
    incomplete.write_bytes(b"partial")
    revision = shards.read_manifest(out).source["revision"]

    # The rest comes by the name of that revision, whatever is the newest, and what the kill left is removed.
    hub.log.clear()
    run_fineweb(*args)
    assert read_tokens(out) == encode(hub.documents)
    assert not incomplete.exists()
    downloads = [path for method, path, *_ in hub.log if method == "GET" and "resolve" in path]
    assert downloads and all(revision in path for path in downloads)


def test_fineweb_is_a_folder_of_parquet_in_order(tmp_path, hub):
    names = [f"sample/10BT/{i:03d}_00000.parquet" for i in range(12)]
    repo = hub.repos.parent / "HuggingFaceFW" / "fineweb-edu"
    for name in reversed(names):
        write_documents(repo / name, [name])
    write_documents(repo / "sample" / "10BT" / "notes.jsonl", ["not this"])

    run_fineweb("--source", "fineweb-edu", "--limit-tokens", "50", "--out", tmp_path / "out")

    # The manifest of FineWeb has the fields that it always had.
    source = shards.read_manifest(tmp_path / "out").source
    assert list(source) == ["name", "subset", "revision", "files", "column"] and source["subset"] == "sample/10BT/"
    assert [file["path"] for file in source["files"]] == names
    assert read_tokens(tmp_path / "out") == encode(names)[:50]


def test_a_hostile_listing_leads_nowhere(tmp_path, hub):
    name = "sample/../../../x.parquet"
    hub.extra_tree.append({"type": "file", "path": name, "rfilename": name, "size": 1, "oid": "0" * 40})
    run_fineweb(*SAMPLE, "--out", tmp_path / "out", "--limit-tokens", "9")
    assert all(".." not in file["path"] for file in shards.read_manifest(tmp_path / "out").source["files"])


# ------------------------------------------------------------------------- splits that `datasets` streams


@pytest.mark.parametrize("flags, documents", [
    (("--subset", "english"), ["part-b/0", "part-a/0", "part-a/1"]),
    (("--subset", "english", "--split", "validation"), ["held-out/one"]),
    (("--subset", "fr/"), ["fr/0"]),
])  # fmt: skip
def test_the_card_says_which_files_a_split_has(tmp_path, hub, capsys, flags, documents):
    command = ("--source", "owner/web", *flags, "--out", tmp_path / "out")
    run_fineweb(*command)
    assert read_tokens(tmp_path / "out") == encode(documents)

    # A finished folder asks the Hub nothing; another choice needs another folder.
    requests = len(hub.log)
    run_fineweb(*command)
    assert "nothing left" in capsys.readouterr().out and len(hub.log) == requests
    with pytest.raises(UserError, match="was made with subset"):
        run_fineweb("--source", "owner/web", "--subset", "part-a/", "--out", tmp_path / "out")


@pytest.mark.parametrize("flags, message", [
    ((), r"english.*french"),
    (("--subset", "german"), r"german.*english.*french"),
    (("--subset", "french", "--split", "test"), "no split 'test'.*--split: train"),
    (("--subset", "fr/", "--split", "test"), "--split test.*path"),
    (("--subset", "nowhere/"), "owner/web.*nowhere"),
])  # fmt: skip
def test_a_choice_that_the_page_does_not_offer_is_refused(tmp_path, hub, flags, message):
    with pytest.raises(UserError, match=message):
        run_fineweb("--source", "owner/web", *flags, "--out", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*_*"))


def test_hostile_datasets_are_refused_and_run_no_code(tmp_path, hub):
    marker = tmp_path / "marker"
    (tmp_path / "text.txt").write_text("text")
    write_documents(hub.repos / "script" / "x" / "a.parquet", ["text"])
    (hub.repos / "script" / "script.py").write_text(f"open({str(marker)!r}, 'w')")
    elsewhere = f"---\nconfigs:\n- config_name: x\n  data_files: {tmp_path / 'text.txt'}\n---\n"
    for name, card in (("elsewhere", elsewhere), ("broken", "---\nconfigs: 3\n---\n")):
        write_documents(hub.repos / name / "a.parquet", ["text"])
        (hub.repos / name / "README.md").write_text(card)
    (hub.repos / "tables").mkdir()
    (hub.repos / "tables" / "a.h5").write_bytes(b"hdf5")

    for name, message in (
        ("script", "scripts are no longer supported"),
        ("elsewhere", "don't belong"),
        ("broken", "owner/broken"),
        ("tables", "the format of owner/tables is hdf5"),
        ("none", "owner/none"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run_fineweb("--source", f"owner/{name}", "--out", tmp_path / "out")
        assert len(str(error.value)) < 800
    assert not marker.exists() and not list((tmp_path / "out").glob("*_*"))


def write_csvs(repo, documents):
    repo.mkdir()
    for i in range(3):
        with open(repo / f"train-{i}.csv", "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("n", "text"), *enumerate(documents[i::3])])


def write_jsonl_gz(repo, documents):
    repo.mkdir()
    for i in range(3):
        with gzip.open(repo / f"train-{i}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in documents[i::3])


def write_parquets(repo, documents):
    for i in range(3):
        write_documents(repo / "data" / f"train-{i}-of-3.parquet", documents[i::3])
        write_documents(repo / "data" / f"test-{i}-of-3.parquet", ["never trained on"])


def write_texts(repo, documents):
    repo.mkdir()
    for i in range(3):
        (repo / f"train-{i}.txt").write_bytes("\n".join(documents[i::3]).encode())


@pytest.mark.parametrize("write", [write_csvs, write_jsonl_gz, write_parquets, write_texts])
def test_a_streamed_split_is_resumed_with_the_same_bytes(tmp_path, hub, monkeypatch, write):
    # Arrange: chunks and shards that are much smaller than the files.
    words = ["NA", "007", "2020-01-01", 'a "quoted", one', "two\nlines"]
    documents = [*words, *(f"document {i} is not long\n" * 9 for i in range(30))]
    write(hub.repos / "mine", documents)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 900)
    command = ("--source", "owner/mine", "--shard-size", "250", "--out")
    expected = tmp_path / "expected"

    run_fineweb(*command, expected)

    parts = [documents[i::3] for i in range(3)]
    if write is write_texts:
        parts = [["\n".join(part)] for part in parts]
    assert read_tokens(expected) == encode([document for part in parts for document in part])

    manifest = shards.read_manifest(expected)
    assert len(manifest.shards) > 5
    for kept in (1, len(manifest.shards) // 2, len(manifest.shards) - 1):
        out = tmp_path / f"{kept}-kept"
        out.mkdir()
        for shard in manifest.shards[:kept]:
            shutil.copy(expected / shard.file, out)
        shards.write_manifest(out, replace(manifest, shards=manifest.shards[:kept], complete=False))
        run_fineweb(*command, out)
        assert read_bytes(out) == read_bytes(expected)


# ------------------------------------------------------------------------- no Hub


def test_a_hub_out_of_reach_is_reported_soon(tmp_path, expect_failure):
    start = time.time()
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    expect_failure("fineweb.py", env=away, cwd=tmp_path, mentions=["127.0.0.1:9"])
    assert time.time() - start < 15
