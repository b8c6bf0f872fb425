"""Shard formats and the manifest: what is written is read, and nothing else is accepted."""

import hashlib
import io
import json
import re
from dataclasses import asdict

import numpy as np
import pytest
from helpers import make_shards

from system.cli import UserError
from tokens import shards
from tokens.loader import Loader
from tokens.shards import MANIFEST

# ------------------------------------------------------------------------- one file


def make_npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def make_bin(tokens, *first_words):
    """As llm.c writes it: 256 int32, then uint16."""
    header = np.zeros(256, dtype=np.int32)
    header[: len(first_words)] = first_words
    return header.tobytes() + tokens.tobytes()


TOKENS = (np.arange(70_000) % 50257).astype(np.uint16)
NPY = make_npy(TOKENS)


@pytest.mark.parametrize("suffix, expected", [("npy", NPY), ("bin", make_bin(TOKENS, 20240520, 1, 70_000))])
def test_a_shard_is_numpys_or_llm_cs_file(tmp_path, suffix, expected):
    path = tmp_path / f"a_train_000001.{suffix}"

    sha256 = shards.write_shard(path, TOKENS.astype(np.int64))

    assert path.read_bytes() == expected and sha256 == hashlib.sha256(expected).hexdigest()
    read = shards.read_shard(path, sha256)
    assert read.dtype == np.uint16 and np.array_equal(read, TOKENS)
    assert shards.count_tokens(path) == 70_000


@pytest.mark.parametrize("name, content, value", [
    ("cut.npy", NPY[:-1], "cut.npy"),
    ("swapped.npy", make_npy(np.ones(10, ">u2")), ">u2"),
    ("square.npy", make_npy(np.ones((5, 2), np.uint16)), "(5, 2)"),
    ("none.npy", make_npy(np.ones(0, np.uint16)), "0 tokens"),
    ("pickled.npy", make_npy(np.array([{}])), "pickled.npy"),
    ("magic.bin", make_bin(TOKENS, 20240801, 1, 70_000), "20240801"),
    ("version.bin", make_bin(TOKENS, 20240520, 7, 70_000), "7"),
    ("more.bin", make_bin(TOKENS, 20240520, 1, 69_999), "69,999"),
    ("page.bin", b"<!doctype html>", "page.bin"),
])  # fmt: skip
def test_a_bad_shard_is_named(tmp_path, name, content, value):
    (tmp_path / name).write_bytes(content)
    for read in (shards.count_tokens, shards.read_shard):
        with pytest.raises(UserError, match=re.escape(str(tmp_path / name))) as error:
            read(tmp_path / name)
        assert value in str(error.value)


def test_the_shards_of_ddp_basemodel_train_are_read(tmp_path):
    (tmp_path / "x.bin").write_bytes(make_bin(TOKENS, 20250211, 1, 70_000))
    assert np.array_equal(shards.read_shard(tmp_path / "x.bin"), TOKENS)


def test_a_bit_that_flipped_is_found_by_the_hash(tmp_path):
    path = tmp_path / "x_train_000001.npy"
    sha256 = shards.write_shard(path, TOKENS)
    shards.write_shard(path, TOKENS ^ (np.arange(70_000) == 5))
    with pytest.raises(UserError, match=f"{path.name}.*{sha256}"):
        shards.read_shard(path, sha256)


# ------------------------------------------------------------------------- a folder


def test_find_shards_sorts_by_number_and_leaves_the_rest(tmp_path):
    for name in ("x_train_1000000.npy", "x_train_000009.npy", "x_train_999999.npy", "x_val_000000.npy"):
        shards.write_shard(tmp_path / name, TOKENS)
    for name in ("notes.txt", ".x_train_000011.npy.part", "train.bin", "x_test_000001.npy"):
        (tmp_path / name).touch()
    (tmp_path / "x_train_000012.npy").mkdir()

    train_names = [p.name for p in shards.find_shards(tmp_path, "train")]

    assert train_names == ["x_train_000009.npy", "x_train_999999.npy", "x_train_1000000.npy"]
    assert [p.name for p in shards.find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]


def test_a_folder_that_is_missing_or_misses_shards_is_named(tmp_path):
    folder = make_shards(tmp_path / "t", size=100)
    (folder / "toy_val_000000.npy").unlink()
    (tmp_path / "empty").mkdir()
    for name, named in (("t", "toy_val_000000"), ("empty", "train"), ("none", "--out")):
        with pytest.raises(UserError, match=f"{tmp_path}/{name}.*{named}"):
            shards.find_shards(tmp_path / name, "train")


def test_a_folder_is_what_its_manifest_says(tmp_path, capsys):
    """Other shards are left out, and named."""
    folder = make_shards(tmp_path / "t", size=100)
    names = [path.name for path in shards.find_shards(folder, "train")]
    assert capsys.readouterr().out == ""
    for name in ("toy_train_000009.npy", "toy_train_000001.bin"):
        shards.write_shard(folder / name, TOKENS)
    assert [path.name for path in shards.find_shards(folder, "train")] == names
    output = capsys.readouterr().out
    assert "toy_train_000009.npy" in output and "toy_train_000001.bin" in output


def test_two_formats_of_one_split_are_not_mixed(tmp_path):
    for name in ("toy_train_000001.npy", "toy_train_000001.bin", "toy_val_000000.bin"):
        shards.write_shard(tmp_path / name, TOKENS)
    with pytest.raises(UserError, match=r"toy_train_000001\.\w+.*toy_train_000001\.\w+"):
        shards.find_shards(tmp_path, "train")
    assert len(shards.find_shards(tmp_path, "val")) == 1


def test_fingerprint_changes_with_the_data_only(tmp_path):
    def fingerprint(folder):
        return shards.fingerprint(shards.list_shards(folder))

    folder = make_shards(tmp_path / "t", size=1000)
    assert fingerprint(folder) == "18f058491460aa30", "runs that are resumed would be told that their data have changed"

    # Not with other files, or with another name of the folder.
    (folder / "notes.txt").write_text("x")
    assert fingerprint(folder) == fingerprint(make_shards(tmp_path / "again", size=1000))

    # But with the manifest's hashes, the number of tokens and the names.
    fingerprints = {fingerprint(folder), fingerprint(make_shards(tmp_path / "other", seed=1, size=1000))}
    (folder / MANIFEST).unlink()
    fingerprints.add(fingerprint(folder))
    shards.write_shard(folder / "toy_train_000002.npy", np.ones(999))
    fingerprints.add(fingerprint(folder))
    (folder / "toy_train_000002.npy").rename(folder / "toy_train_000003.npy")
    fingerprints.add(fingerprint(folder))
    assert len(fingerprints) == 5


def test_an_id_above_the_vocabulary_is_named():
    with pytest.raises(UserError, match=r"a.npy: token 1 is id 300.*--model\.vocab-size"):
        shards.check_ids(np.array([7, 300]), "a.npy", 256)


# ------------------------------------------------------------------------- the manifest


@pytest.mark.parametrize("of, key, values", [
    ("manifest", "extra", [1]),
    ("manifest", "version", [3]),
    ("manifest", "tokenizer", ["gpt4"]),
    # Names that lead elsewhere; hashes that are none.
    ("shard", "file", ["../x_train_000001.npy", "/x_train_000001.npy", "a\\x_train_000001.npy", "manifest.json", None,
                       "x_train_000001.npy\n", "x\0_train_000001.npy", "\x1bx_train_000001.npy"]),
    ("shard", "sha256", ["", "0" * 63, "g" * 64, "A" * 64, None]),
])  # fmt: skip
def test_hostile_manifests_are_refused(tmp_path, of, key, values):
    folder = make_shards(tmp_path / "t", size=1000)
    manifest = asdict(shards.read_manifest(folder))
    harmed = manifest if of == "manifest" else manifest["shards"][0]
    for value in values:
        harmed[key] = value
        (folder / MANIFEST).write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=MANIFEST):
            shards.read_manifest(folder)
            pytest.fail(f"accepted: {value}")


@pytest.mark.parametrize("options", [{}, {"split_on": "x", "as_text": True}, {"ids_column": "ids"}, {"plays": True}])
def test_folders_of_the_first_version_still_train(tmp_path, options):
    folder = make_shards(tmp_path / "t", size=1000)
    fingerprint = Loader(folder, "train", 32, 50257).fingerprint()
    now = shards.read_manifest(folder)
    then = asdict(now) | {"version": 1}
    del then["source"]["split"]
    then["source"] |= options
    (folder / MANIFEST).write_text(json.dumps(then))
    assert Loader(folder, "train", 32, 50257).fingerprint() == fingerprint
    assert shards.read_manifest(folder).source == now.source
