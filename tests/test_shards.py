"""Shard formats and the manifest: what is written is read, and nothing else is accepted."""

import hashlib
import io
import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from helpers import make_shards, read_table, refused

from tokens import shards
from tokens.shards import FORMATS, MANIFEST

# ------------------------------------------------------------------------- one file


def make_npy(array, save=np.save):
    file = io.BytesIO()
    save(file, array)
    return file.getvalue()


def make_bin(*first_words):
    """TOKENS as llm.c writes them: 256 int32, then uint16."""
    header = np.zeros(256, np.int32)
    header[: len(first_words)] = first_words
    return header.tobytes() + TOKENS.tobytes()


TOKENS = (np.arange(70_000) % 50257).astype(np.uint16)
NPY = make_npy(TOKENS)
KNOWN = {".npy": NPY, ".bin": make_bin(20240520, 1, 70_000)}  # as numpy and llm.c write them
OTHERS = {".bin": make_bin(20250211, 1, 70_000)}  # of DDP-BASEMODEL-TRAIN, one of whose names has no number


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_reads_what_it_writes(tmp_path, suffix):
    path = tmp_path / f"a_train_000001{suffix}"
    sha256 = shards.write_shard(path, TOKENS.astype(np.int64))
    content = path.read_bytes()
    assert content == KNOWN.get(suffix, content) and sha256 == hashlib.sha256(content).hexdigest()
    other = tmp_path / f"tiny_val{suffix}"
    other.write_bytes(OTHERS.get(suffix, content))
    for split, file in ("train", path), ("val", other):
        read = shards.read_shard(file)
        assert read.dtype == np.uint16 and np.array_equal(read, TOKENS)
        assert shards.find_shards(tmp_path, split) == [(file, split, len(TOKENS), None)]


@pytest.mark.parametrize("name, content, value", [
    ("cut.npy", NPY[:-1], ""),
    ("swapped.npy", make_npy(np.ones(10, ">u2")), ">u2"),
    ("square.npy", make_npy(np.ones((5, 2), np.uint16)), "(5, 2)"),
    ("none.npy", make_npy(np.ones(0, np.uint16)), "0 tokens"),
    ("pickled.npy", make_npy(np.array([{}])), ""),
    ("zip.npy", make_npy(TOKENS, np.savez), "magic"),
    ("header.npy", NPY.replace(b"}", b"("), ""),
    ("magic.bin", make_bin(20240801, 1, 70_000), "20240801"),
    ("version.bin", make_bin(20240520, 7, 70_000), "7"),
    ("more.bin", make_bin(20240520, 1, 69_999), "69,999"),
    ("page.bin", b"<!doctype html>", ""),
])  # fmt: skip
def test_a_bad_shard_is_named(tmp_path, name, content, value):
    path = tmp_path / name
    path.write_bytes(content)
    with refused(f"{path}.*{re.escape(value)}"):
        shards.read_shard(path)


# ------------------------------------------------------------------------- a folder


def test_shards_are_sorted_by_number_and_other_files_left_out(tmp_path):
    names = ["x_train_000009.npy", "x_train_999999.npy", "x_train_1000000.npy"]
    for name in ("x_val_000000.npy", *reversed(names)):
        shards.write_shard(tmp_path / name, TOKENS)
    for name in (".x_train_000011.npy.part", "train.bin", "x_test_000001.npy"):
        (tmp_path / name).touch()
    (tmp_path / "x_train_000012.npy").mkdir()
    assert [file.path.name for file in shards.find_shards(tmp_path, "train")] == names
    assert [file.path.name for file in shards.find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]


# A file that is added | files that are taken away | what is named: a shard that would be left out, because it is not in
# the manifest or has the suffix of no format; or one that is missing.
CHANGES = r"""
toy_train_000001.bin    | none     | toy_train_000001.bin.*manifest.json
toy_train_000003.npy.gz | none     | toy_train_000003.npy.gz.*\.npy or \.bin
notes.txt               | toy_val* | toy_val_000000
notes.txt               | *        | train
"""


@pytest.mark.parametrize("added, removed, named", read_table(CHANGES))
def test_a_folder_that_has_not_just_its_shards_is_named(tmp_path, added, removed, named):
    folder = make_shards(tmp_path / "t", size=100)
    (folder / added).touch()
    for path in folder.glob(removed):
        path.unlink()
    with refused(f"{folder}.*{named}"):
        shards.find_shards(folder, "train")


def test_fingerprint_changes_with_the_data_only(tmp_path):
    """With the manifest's hashes or, without it, the number of tokens and the names."""
    folder = make_shards(tmp_path / "t", size=1000)
    (folder / "notes.txt").write_text("x")
    fingerprints = [shards.fingerprint(folder)]
    assert fingerprints == ["18f058491460aa30"], "runs that are resumed would be told that their data have changed"

    shard = folder / "toy_train_000002.npy"
    for change in (
        lambda: make_shards(folder, seed=1, size=1000),
        (folder / MANIFEST).unlink,
        lambda: shards.write_shard(shard, np.ones(999)),
        lambda: shard.rename(folder / "toy_train_000003.npy"),
    ):
        change()
        fingerprints.append(shards.fingerprint(folder))
    assert len(set(fingerprints)) == 5


def test_ids_that_uint16_does_not_hold_are_not_written(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    with refused("id 70000"):
        shards.write_shard(path, np.array([70_000]))
    assert not path.exists()


# ------------------------------------------------------------------------- the manifest


# What is changed, in the manifest or in its first shard: names that lead elsewhere, hashes that are none.
HOSTILE = r"""
manifest | {"extra": 1}
manifest | {"version": 3}
manifest | {"source": {}}
manifest | {"source": {"name": "x", "files": [{}]}}
manifest | {"shards": [null]}
manifest | {"tokenizer": "gpt4"}
shard    | {"file": "../x_train_000001.npy"}
shard    | {"file": "a\\x_train_000001.npy"}
shard    | {"file": "manifest.json"}
shard    | {"file": null}
shard    | {"file": "x_train_000001.npy\n"}
shard    | {"file": "\u001bx_train_000001.npy"}
shard    | {"sha256": "000000000000000000000000000000000000000000000000000000000000000"}
shard    | {"sha256": "gggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggg"}
shard    | {"sha256": null}
"""


@pytest.mark.parametrize("of, change", read_table(HOSTILE))
def test_hostile_manifests_are_refused(tmp_path, of, change):
    folder = make_shards(tmp_path / "t", size=1000)
    manifest = asdict(shards.read_manifest(folder))
    harmed = manifest if of == "manifest" else manifest["shards"][0]
    harmed |= json.loads(change)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with refused(MANIFEST):
        shards.read_manifest(folder)
