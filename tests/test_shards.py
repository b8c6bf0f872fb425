"""Shard formats and the manifest: what is written is read, and nothing else is accepted."""

import hashlib
import io
import json
import re
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
from corpora import write_documents
from helpers import make_shards

from system.cli import UserError
from tokens import shards
from tokens.documents import Chunk
from tokens.shards import Manifest

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
    read = shards.read_shard(path)
    assert read.dtype == np.uint16 and np.array_equal(read, TOKENS)
    assert shards.count_tokens(path) == 70_000


@pytest.mark.parametrize("name, content, value", [
    ("cut.npy", NPY[:-1], "file size"),
    ("float.npy", make_npy(np.ones(10, np.float32)), "float32"),
    ("swapped.npy", make_npy(np.ones(10, ">u2")), ">u2"),
    ("square.npy", make_npy(np.ones((5, 2), np.uint16)), "(5, 2)"),
    ("none.npy", make_npy(np.ones(0, np.uint16)), "0 tokens"),
    ("magic.bin", make_bin(TOKENS, 20240801, 1, 70_000), "20240801"),
    ("version.bin", make_bin(TOKENS, 20240520, 7, 70_000), "7"),
    ("more.bin", make_bin(TOKENS, 20240520, 1, 69_999), "69,999"),
    ("pointer.npy", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    ("page.bin", b"<!doctype html>", "web page"),
])  # fmt: skip
def test_a_bad_shard_is_named(tmp_path, name, content, value):
    (tmp_path / name).write_bytes(content)
    for read in (shards.count_tokens, shards.read_shard):
        with pytest.raises(UserError, match=re.escape(str(tmp_path / name))) as error:
            read(tmp_path / name)
        assert value in str(error.value)


def test_an_id_above_uint16_is_not_written(tmp_path):
    shards.write_shard(tmp_path / "x_train_000001.npy", np.array([0, 65535]))
    for ids in ([1, 65536], [-1, 1]):
        with pytest.raises(AssertionError):
            shards.write_shard(tmp_path / "x_train_000001.npy", np.array(ids))


def test_find_shards_sorts_and_leaves_the_rest(tmp_path):
    names = ["x_train_1000000.npy", "x_train_000009.npy", "x_train_999999.npy", "x_val_000000.npy"]
    for name in [*names, "notes.txt", ".x_train_000011.npy.part", "train.bin", "x_test_000001.npy"]:
        (tmp_path / name).touch()
    (tmp_path / "x_train_000012.npy").mkdir()

    train_names = [p.name for p in shards.find_shards(tmp_path, "train")]

    assert train_names == ["x_train_000009.npy", "x_train_999999.npy", "x_train_1000000.npy"]
    assert [p.name for p in shards.find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]


def test_a_missing_shard_is_named(tmp_path):
    folder = make_shards(tmp_path / "t", size=100)
    (folder / "toy_val_000000.npy").unlink()
    with pytest.raises(UserError, match="toy_val_000000"):
        shards.find_shards(folder, "train")


@pytest.mark.parametrize("name, command", [
    ("stdlib", "--source stdlib --out data/stdlib"),
    ("fineweb", "--source fineweb --out data/fineweb"),
    ("my own", "--out 'data/my own'"),
])  # fmt: skip
def test_a_missing_folder_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        shards.find_shards(f"data/{name}", "train")
    assert command in str(error.value) and str(tmp_path / "data" / name) in str(error.value)


def test_a_folder_is_what_its_manifest_says(tmp_path):
    folder = make_shards(tmp_path / "t", size=100)
    names = [path.name for path in shards.find_shards(folder, "train")]
    before = shards.fingerprint(folder)

    shutil.copy(folder / "toy_val_000000.npy", folder / "toy_train_000009.npy")

    assert [path.name for path in shards.find_shards(folder, "train")] == names
    assert shards.fingerprint(folder) == before


def test_reading_stops_at_the_limit():
    chunks = iter([Chunk(["a b c"], [True], 0)] * 9)  # of 4 tokens, with EOT
    list(shards.fill_shards(chunks, Manifest({}, "npy", 4, limit_tokens=8)))
    assert len(list(chunks)) == 6


# ------------------------------------------------------------------------- the manifest


def hostile_manifests(good):
    """Yields texts of manifests that must be refused: `good` with one harm each, or no manifest at all."""
    yield from ("", "[]", "{}")
    for key, value in (("extra", 1), ("version", 2), ("tokenizer", "gpt4"), ("format", "pt")):
        yield json.dumps({**good, key: value})

    # Names that lead elsewhere; hashes that are none.
    for key, values in {
        "file": ["../x_train_000001.npy", "/x_train_000001.npy", "a\\x_train_000001.npy", "manifest.json", "", None, 3,
                 "x_train_000001.npy\n", "x\0_train_000001.npy"],
        "sha256": ["", "0" * 63, "g" * 64, None, "A" * 64],
    }.items():  # fmt: skip
        for value in values:
            yield json.dumps({**good, "shards": [{**good["shards"][0], key: value}]})


def test_hostile_manifests_are_refused(tmp_path):
    folder = make_shards(tmp_path / "t", size=1000)
    path = folder / "manifest.json"
    good = asdict(shards.read_manifest(folder))
    for content in hostile_manifests(good):
        path.write_text(content)
        with pytest.raises(UserError, match=str(path)):
            shards.read_manifest(folder)
            pytest.fail(f"accepted: {content[:300]}")


# ------------------------------------------------------------------------- checking a folder


@pytest.mark.parametrize("harm, name", [
    (lambda first, second: first.write_bytes(first.read_bytes()[:-2] + b"ab"), "toy"),
    (lambda first, second: first.write_bytes(first.read_bytes()[:-2]), "toy"),
    (lambda first, second: first.unlink(), "toy"),
    (lambda first, second: second.rename(first), "toy"),
    (lambda first, second: shutil.copy(first, first.with_name("other_train_000001.npy")), "other"),
], ids=["changed", "cut", "missing", "swapped", "one too many"])  # fmt: skip
def test_verify_names_every_harm(tmp_path, harm, name):
    folder = make_shards(tmp_path / "t", size=1000)
    assert shards.verify(folder) == []

    harm(*shards.find_shards(folder, "train"))

    assert any(str(folder / f"{name}_train_000001.npy") in problem for problem in shards.verify(folder))


def test_verify_checks_ids_and_completeness(tmp_path):
    folder = make_shards(tmp_path / "t", size=1000)
    manifest = shards.read_manifest(folder)
    shards.write_manifest(folder, replace(manifest, complete=False))
    assert len(shards.verify(folder)) == 1

    # Without a manifest, an id above the vocabulary.
    (folder / "manifest.json").unlink()
    assert shards.verify(folder) == []
    shards.write_shard(folder / manifest.shards[0].file, np.array([50256, 50257]))
    (problem,) = shards.verify(folder)
    assert "token 1 is id 50257" in problem and "remove it" in problem


def test_a_shard_is_not_blamed_for_a_network_that_is_too_small():
    with pytest.raises(UserError, match=r"token 1 is id 300.*--model\.vocab-size") as e:
        shards.check_ids(np.array([7, 300]), "a.npy", 256)
    assert "remove" not in str(e.value)


def test_fingerprint_changes_with_the_data_only(tmp_path):
    folder = make_shards(tmp_path / "t", size=1000)
    original = shards.fingerprint(folder)

    # Not with other files, or with another name of the folder.
    (folder / "notes.txt").write_text("x")
    assert original == shards.fingerprint(folder) == shards.fingerprint(make_shards(tmp_path / "again", size=1000))

    # But with the manifest's hashes, the number of tokens and the names.
    fingerprints = {original, shards.fingerprint(make_shards(tmp_path / "other", seed=1, size=1000))}
    (folder / "manifest.json").unlink()
    fingerprints.add(shards.fingerprint(folder))
    shards.write_shard(folder / "toy_train_000002.npy", np.ones(999))
    fingerprints.add(shards.fingerprint(folder))
    (folder / "toy_train_000002.npy").rename(folder / "toy_train_000003.npy")
    fingerprints.add(shards.fingerprint(folder))
    assert len(fingerprints) == 5


@pytest.mark.parametrize("given, named", [("my", "'my/*' --out data/my-tokens"), ("my/a.txt", "my/a.txt --out data/a")])
def test_texts_in_place_of_shards_are_answered_with_the_command(tmp_path, monkeypatch, given, named):
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path / "my/a.txt", ["words"])
    with pytest.raises(UserError) as error:
        shards.find_shards(given, "train")
    assert f"--source {named}" in str(error.value)
