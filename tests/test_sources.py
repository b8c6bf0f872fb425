"""Sources: which files and names --source means, and datasets of the Hugging Face Hub, which is a stand-in on loopback:
files below a path, and files of a split, which `datasets` lists."""

import os
import shutil
import time

import numpy as np
import pytest
from corpora import encode, read_bytes, read_tokens, run_fineweb, write_documents
from faults import hub_server
from helpers import make_documents, read_table, refused

from tokens import documents as readers
from tokens import shards
from tokens.sources import find_files, identify, is_on_hub

# Two configurations, three splits. Only the card says which files are whose; the order of the patterns is not by name.
CARD = """---
configs:
- config_name: english
  data_files:
  - {split: train, path: [part-b/*.parquet, part-a/*.parquet]}
  - {split: validation, path: held-out/one.parquet}
- config_name: french
  data_files:
  - {split: train, path: fr/*.parquet}
---
"""


def test_a_name_with_a_slash_is_a_dataset_or_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_on_hub("owner/web-1.5") and not is_on_hub("my/texts.txt") and not is_on_hub("my/web/1")
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "web-1.5").touch()
    assert not is_on_hub("owner/web-1.5")


def test_patterns_name_files_in_order_and_each_once(tmp_path, monkeypatch):
    """However many links and patterns lead to it; another file of its name and content counts."""
    monkeypatch.chdir(tmp_path)
    for name in ("c/2023/b[1].txt", "c/2023/a.txt", "c/2024/a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "c/latest").symlink_to("2024")
    (tmp_path / "c/2024/loop").symlink_to("../2024")
    files, _ = find_files(["c/2023/b[1].txt", "c/*/*.txt", "c/**", str(tmp_path / "c/2024/a.txt")])
    names = ["c/2023/b[1].txt", "c/2023/a.txt", "c/2024/a.txt"]
    assert [path.resolve() for path in files] == [tmp_path / name for name in names]
    assert list(files.values()) == ["b[1].txt", "a.txt", "a.txt"]


def test_data_are_identified_by_their_manifest_or_first_words(tmp_path):
    """Those of a manifest count, whatever the tokens: a mixture may begin as FineWeb does."""
    text = "The Independent Jane\nFor all the love, romance and scandal in Jane Austen"
    for words, name in ((text, "fineweb-edu"), (text[:15], None)):
        shards.write_shard(tmp_path / "x_val_000000.npy", np.array(encode([words, "more"])))
        assert identify(tmp_path) == name
    for source, name in (("files", None), ("HuggingFaceFW/fineweb", "fineweb")):
        shards.write_manifest(tmp_path, shards.Manifest(shards.Source(source), "npy", 100))
        assert identify(tmp_path) == name


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub, of this process too, with owner/web: five parquet files under sample/, which hold hub.documents, and
    CARD's files."""
    import datasets.config

    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with hub_server.start(tmp_path / "hub") as server:
        server.connect(monkeypatch)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE"):
            monkeypatch.setattr(datasets.config, name, tmp_path / "hf-home" / name)

        server.repos = tmp_path / "hub" / "datasets" / "owner"
        server.documents = []
        for i in range(5):
            documents = make_documents(20 + i, 30)
            write_documents(server.repos / "web" / "sample" / f"{i:03d}_00000.parquet", documents)
            server.documents += filter(None, documents)  # the others are no documents
        for name in ("part-a/0", "part-a/1", "part-b/0", "held-out/one", "fr/0"):
            write_documents(server.repos / "web" / f"{name}.parquet", [name])
        (server.repos / "web" / "README.md").write_text(CARD)
        yield server


# ------------------------------------------------------------------------- parquet files below a path


def test_files_are_downloaded_and_deleted_one_by_one(tmp_path, hub, monkeypatch):
    out = tmp_path / "out"
    command = ("--source owner/web --subset sample/ --shard-size 20000 --out", out)
    on_disk = []

    def read_and_count_files(path, column):
        yield from readers.read_parquet(path, column)
        time.sleep(0 if on_disk else 0.3)  # once: as many files arrive as may
        on_disk.append({path.name for path in (out / ".source").rglob("*.parquet")})

    monkeypatch.setitem(readers.READERS, ".parquet", read_and_count_files)

    # While one file is read, at most one more is on the disk.
    run_fineweb(*command)
    assert read_tokens(out) == encode(hub.documents)
    assert len(on_disk) == 5 and max(map(len, on_disk)) <= 2 and not (out / ".source").exists()
    source = shards.read_manifest(out).source
    assert all(file.bytes > 0 for file in source.files)

    # A removed shard is made again, from the second of the five files on, in which it begins: of the same revision,
    # and whatever a kill has left.
    before = read_bytes(out)
    (out / "out_train_000002.npy").unlink()
    for left in ("sample/001_00000.parquet", ".cache/huggingface/download/random-name.parquet"):
        (out / ".source" / left).parent.mkdir(parents=True)
        (out / ".source" / left).write_bytes(b"partial")
    hub.log.clear()
    run_fineweb(*command)
    assert read_bytes(out) == before and len(on_disk) == 9 and "random-name.parquet" not in on_disk[5]
    assert hub.log and all(source.revision in path for _, path in hub.log if "/api/" not in path)


@pytest.mark.parametrize("source, repo, subset, limit", [
    ("fineweb-edu", "HuggingFaceFW/fineweb-edu", "sample/10BT/", None),
    ("climbmix", "karpathy/climbmix-400b-shuffle", "", 10**10),
])  # fmt: skip
def test_a_dataset_with_a_name_is_a_folder_of_parquet_in_order(tmp_path, hub, source, repo, subset, limit):
    names = [f"{subset}{i:03d}_00000.parquet" for i in range(12)]
    for name in reversed(names):
        write_documents(hub.repos.parent / repo / name, [name])
    write_documents(hub.repos.parent / repo / subset / "notes.jsonl", ["not this"])
    hub.add_hostile_file(f"{subset}../../../x.parquet")

    out = tmp_path / "out"
    run_fineweb("--source", source, "--shard-size 9 --out", out)

    manifest = shards.read_manifest(out)
    assert (manifest.source.name, manifest.source.subset, manifest.limit_tokens) == (repo, subset, limit)
    assert [file.path for file in manifest.source.files] == names
    assert read_tokens(out) == encode(names)


# ------------------------------------------------------------------------- files of a split


# Flags | the documents of the files. Without a card their names decide.
SPLITS = """
--subset english                    | held-out/one part-b/0 part-a/0 part-a/1
--subset english --split validation | held-out/one
--source owner/mine                 | train-0 train-1
"""


@pytest.mark.parametrize("flags, documents", read_table(SPLITS))
def test_the_card_says_which_files_a_split_has(tmp_path, hub, flags, documents):
    for name in ("train-0", "test-0", "train-1"):
        write_documents(hub.repos / "mine" / f"{name}.jsonl.gz", [name])
    out = tmp_path / "out"
    command = ("--shard-size 3 --out", out, "--source", "owner/web")
    run_fineweb(*command, flags)
    assert read_tokens(out) == encode(documents.split())

    # A finished folder asks the Hub nothing.
    requests = len(hub.log)
    run_fineweb(*command, flags)
    assert len(hub.log) == requests


# What is chosen otherwise | what the message names.
OTHER_CHOICES = """
--source owner/copy  | name owner/web, not owner/copy
--subset french      | subset english, not french
--split validation   | split train, not validation
--text-column body   | column text, not body
"""


@pytest.mark.parametrize("change, named", read_table(OTHER_CHOICES))
def test_another_choice_of_a_dataset_needs_another_folder(tmp_path, hub, change, named):
    command = ("--source owner/web --subset english --shard-size 3 --out", tmp_path / "out")
    run_fineweb(*command)
    before = read_bytes(tmp_path / "out")
    shutil.copytree(hub.repos / "web", hub.repos / "copy")
    with refused(named):
        run_fineweb(*command, change)
    assert read_bytes(tmp_path / "out") == before


# What follows --source | what the message names.
NOT_OFFERED = r"""
owner/web --subset french --split test | test.*train
owner/web --subset fr/ --split test    | --split test.*fr/
owner/pictures                         | a\.png
owner/script                           | owner/script
owner/elsewhere                        | owner/elsewhere
"""


@pytest.mark.parametrize("words, named", read_table(NOT_OFFERED))
def test_a_choice_that_is_not_offered_is_refused_and_runs_no_code(tmp_path, hub, words, named):
    write_documents(hub.repos / "pictures/a.txt", ["one"]).rename(hub.repos / "pictures/a.png")
    write_documents(hub.repos / "script/x/a.parquet", ["text"])
    (hub.repos / "script/script.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    write_documents(hub.repos / "elsewhere/a.parquet", ["text"])
    card = f"configs:\n- config_name: x\n  data_files: {write_documents(tmp_path / 'text.txt', ['text'])}"
    (hub.repos / "elsewhere/README.md").write_text(f"---\n{card}\n---\n")

    with refused(named):
        run_fineweb(f"--source {words} --out", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "marker").exists()
