"""Shard formats and the manifest: what is written is read, and nothing else is accepted."""

import hashlib
import json
import pickle
import re
from dataclasses import asdict, replace

import numpy as np
import pytest

from system.cli import UserError
from tokens import shards
from tokens.shards import Manifest, Shard
from tokens.tokenizer import EOT

SOURCE = {"name": "toy", "subset": "", "column": "text", "revision": "r", "files": [{"path": "a/b.txt", "bytes": 9}]}


def write_toy_folder(folder, n=3, suffix="npy", size=1000):
    """A folder of n shards of random tokens with a manifest, each shard of three documents."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    entries = []
    for i in range(n):
        tokens = rng.integers(0, EOT, size).astype(np.uint16)
        tokens[[0, 10, 500]] = EOT
        name = f"toy_{'train' if i else 'val'}_{i:06d}.{suffix}"
        sha256 = shards.write_shard(folder / name, tokens)
        entries.append(Shard(name, size, 3, sha256, {"file": 0, "token": size * (i + 1)}))
    shards.write_manifest(folder, Manifest(SOURCE, suffix, size, complete=True, shards=entries))
    return folder


# ------------------------------------------------------------------------- one file


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_what_is_written_is_read(tmp_path, suffix):
    tokens = np.arange(70_000) % 50257
    path = tmp_path / f"x_train_000001.{suffix}"

    sha256 = shards.write_shard(path, tokens)

    read = shards.read_shard(path)
    assert read.dtype == np.uint16 and np.array_equal(read, tokens)
    assert shards.count_tokens(path) == 70_000
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == [path.name], "no temporary file stays"


def test_npy_is_numpys_format(tmp_path):
    tokens = np.arange(500, dtype=np.uint16)
    shards.write_shard(tmp_path / "a_train_000001.npy", tokens)
    np.save(tmp_path / "edufineweb_train_000002.npy", tokens)

    assert np.array_equal(np.load(tmp_path / "a_train_000001.npy"), tokens)
    assert np.array_equal(shards.read_shard(tmp_path / "edufineweb_train_000002.npy"), tokens)


def test_bin_is_llm_cs_format(tmp_path):
    tokens = np.arange(500, dtype=np.uint16)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 500
    as_llm_c_writes_it = header.tobytes() + tokens.tobytes()
    (tmp_path / "fineweb_train_000003.bin").write_bytes(as_llm_c_writes_it)
    shards.write_shard(tmp_path / "a_train_000001.bin", tokens)

    assert (tmp_path / "a_train_000001.bin").read_bytes() == as_llm_c_writes_it
    assert np.array_equal(shards.read_shard(tmp_path / "fineweb_train_000003.bin"), tokens)


def test_find_shards_sorts_by_index_and_leaves_the_rest(tmp_path):
    names = ["x_train_000010.npy", "x_train_000009.npy", "x_train_1000000.npy", "x_val_000000.npy"]
    for name in [*names, "notes.txt", ".x_train_000011.npy.part", "train.bin", "x_test_000001.npy"]:
        (tmp_path / name).touch()
    (tmp_path / "x_train_000012.npy").mkdir()

    train_names = [p.name for p in shards.find_shards(tmp_path, "train")]

    assert train_names == ["x_train_000009.npy", "x_train_000010.npy", "x_train_1000000.npy"]
    assert [p.name for p in shards.find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]


class FailsWhenUnpickled:
    def __reduce__(self):
        return (pytest.fail, ("a shard was unpickled",))


def write_bad_shards(folder):
    """Yields (path, words of the message) of files that are no shards."""

    def save(name, array):
        np.save(folder / name, array)
        return folder / name

    def put(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    def bin_file(*first_words):
        """A .bin of 100 tokens whose header begins with other words."""
        changed = header.copy()
        changed[: len(first_words)] = first_words
        return changed.tobytes() + bytes(200)

    good = save("good.npy", np.arange(100, dtype=np.uint16)).read_bytes()
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 100

    yield put("cut.npy", good[:-1]), "promises 100 tokens"
    yield put("head.npy", good[:40]), ""
    yield put("huge.npy", good.replace(b"(100,)", b"(10**9,)")), ""
    yield put("vast.npy", good.replace(b"(100,), }   ", b"(10000000,),}")), "promises 10,000,000"
    yield put("pickle.npy", pickle.dumps(FailsWhenUnpickled())), ""
    yield save("object.npy", np.array([FailsWhenUnpickled()], dtype=object)), "object"
    yield save("float.npy", np.ones(10, np.float32)), "float32"
    yield save("swapped.npy", np.ones(10, ">u2")), ">u2"
    yield save("square.npy", np.ones((5, 2), np.uint16)), "one dimension"
    yield save("none.npy", np.ones(0, np.uint16)), "0 tokens"
    yield put("magic.bin", bin_file(20240801, 7)), "first words are [20240801, 7]"
    yield put("cut.bin", bin_file()[:-2]), "promises 100 tokens"
    yield put("count.bin", bin_file(20240520, 1, 2**31 - 1)), "promises 2,147,483,647"
    yield put("short.bin", header.tobytes()[:1000]), "1,000 bytes"


def test_every_bad_shard_is_named(tmp_path):
    for path, words in write_bad_shards(tmp_path):
        for read in (shards.count_tokens, shards.read_shard):
            with pytest.raises(UserError) as error:
                read(path)
            message = str(error.value)
            assert str(path) in message and words in message, (path.name, message)


def test_check_ids_names_the_place():
    tokens = np.zeros(1000, np.uint16)
    shards.check_ids(tokens, "x.npy", 50257)

    tokens[[437, 900]] = 50257, 60000

    with pytest.raises(UserError, match=r"x\.npy: token 437 is id 50257"):
        shards.check_ids(tokens, "x.npy", 50257)
    shards.check_ids(tokens, "x.npy", 65536)


def test_write_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "x_train_000001.npy"
    shards.write_shard(path, np.arange(10))
    before = path.read_bytes()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError):
        shards.write_shard(path, np.arange(2000))

    assert path.read_bytes() == before


def test_an_id_above_uint16_is_not_written(tmp_path):
    with pytest.raises(AssertionError):
        shards.write_shard(tmp_path / "x_train_000001.npy", np.array([1, 65536]))


# ------------------------------------------------------------------------- the manifest


def test_manifest_round_trip_is_exact(tmp_path):
    folder = write_toy_folder(tmp_path / "t")
    before = (folder / "manifest.json").read_bytes()

    manifest = shards.read_manifest(folder)
    shards.write_manifest(folder, manifest)

    assert (folder / "manifest.json").read_bytes() == before
    assert manifest.source == SOURCE and [shard.tokens for shard in manifest.shards] == [1000] * 3


def test_a_folder_without_manifest_has_none(tmp_path):
    assert shards.read_manifest(tmp_path) is None


def hostile_manifests(good):
    """Yields texts of manifests that must be refused: `good` with one harm each, or no manifest at all."""
    # Not an object, or none that fits a manifest.
    yield from ("", "{", "[]", "null", '"x"', "[" * 100_000, "9" * 5000, "{}")

    # A field that is missing, unknown or has a value that this program does not know.
    for key in ("source", "format", "shard_tokens", "shards"):
        yield json.dumps({k: v for k, v in good.items() if k != key})
    yield json.dumps({**good, "extra": 1})
    for key, value in (("version", 2), ("tokenizer", "gpt4"), ("format", "pt"), ("format", None), ("source", [])):
        yield json.dumps({**good, key: value})

    # A shard twice; names that lead elsewhere; hashes that are none.
    yield json.dumps({**good, "shards": good["shards"] + good["shards"][:1]})
    for key, values in {
        "file": ["../x_train_000001.npy", "/x_train_000001.npy", "a\\x_train_000001.npy", "manifest.json", "", None, 3,
                 "x_train_000001.npy\n", "x\0_train_000001.npy"],
        "sha256": ["", "0" * 63, "g" * 64, None, "A" * 64],
    }.items():  # fmt: skip
        for value in values:
            yield json.dumps({**good, "shards": [{**good["shards"][0], key: value}]})

    # Source files that lead elsewhere.
    for path in ("../a", "/etc/passwd", "a/../../b", "..", "", "a\\b", "a\0b", None, 7):
        yield json.dumps({**good, "source": {**SOURCE, "files": [{"path": path, "bytes": 1}]}})
    for files in (None, "x", [1], [{}]):
        yield json.dumps({**good, "source": {**SOURCE, "files": files}})


def test_hostile_manifests_are_refused(tmp_path):
    folder = write_toy_folder(tmp_path / "t")
    good = asdict(shards.read_manifest(folder))
    for text in hostile_manifests(good):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="manifest"):
            shards.read_manifest(folder)
            pytest.fail(f"accepted: {text[:300]}")
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")  # not UTF-8
    with pytest.raises(UserError):
        shards.read_manifest(folder)


# ------------------------------------------------------------------------- checking a folder


def test_a_folder_without_shards_is_refused_by_name(tmp_path):
    (tmp_path / "x_train.bin").touch()  # llm.c's --input_bin names a file
    for folder in (tmp_path, tmp_path / "none", tmp_path / "x_train.bin"):
        with pytest.raises(UserError, match=rf"{folder}.*python fineweb.py"):
            shards.find_shards(folder, "val")
    (tmp_path / "x_train.bin").unlink()
    with pytest.raises(UserError, match="no shard"):
        shards.verify(tmp_path)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_verify_names_every_harm(tmp_path, suffix):
    folder = write_toy_folder(tmp_path / "t", n=6, suffix=suffix)
    assert shards.verify(folder) == []
    path = {i: folder / f"toy_{'train' if i else 'val'}_{i:06d}.{suffix}" for i in range(6)}

    # One bit flipped, one shard truncated, two swapped, one missing, one too many.
    data = bytearray(path[1].read_bytes())
    data[-7] ^= 1
    path[1].write_bytes(data)
    path[2].write_bytes(path[2].read_bytes()[:-2])
    three = path[3].read_bytes()
    path[3].write_bytes(path[4].read_bytes())
    path[4].write_bytes(three)
    path[5].unlink()
    shards.write_shard(folder / f"other_train_000001.{suffix}", np.arange(10))

    problems = {re.search(r"(000\d+|other)", p)[1]: p for p in shards.verify(folder)}

    kinds = {"000001": "sha256", "000002": "promises", "000003": "sha256", "000004": "sha256", "000005": "missing"}
    assert problems.keys() == {*kinds, "other"}
    assert all(kind in problems[number] for number, kind in kinds.items())


def test_verify_checks_ids_and_completeness(tmp_path):
    folder = write_toy_folder(tmp_path / "t")
    manifest = shards.read_manifest(folder)
    shards.write_manifest(folder, replace(manifest, complete=False))
    assert "not finished" in shards.verify(folder)[0]

    # A manifest that lies about the number of tokens; an id above the vocabulary behind a right hash.
    first = replace(manifest.shards[0], tokens=999)
    shards.write_manifest(folder, replace(manifest, shards=[first, *manifest.shards[1:]]))
    assert "1000 tokens" in shards.verify(folder)[0]
    shards.write_shard(folder / manifest.shards[0].file, np.array([50256, 50257]))
    (folder / "manifest.json").unlink()
    assert len(shards.verify(folder)) == 1 and "token 1 is id 50257" in shards.verify(folder)[0]
    assert not (folder / "manifest.json").exists()


def test_fingerprint_changes_with_the_data_only(tmp_path):
    folder = write_toy_folder(tmp_path / "t")
    original = shards.fingerprint(folder)

    # Not with other files, or with another name of the folder.
    (folder / "notes.txt").write_text("x")
    assert shards.fingerprint(folder) == original
    assert shards.fingerprint(write_toy_folder(tmp_path / "again")) == original

    # But with the format, the number of shards, the manifest's hashes and the number of tokens.
    fingerprints = {original}
    fingerprints.add(shards.fingerprint(write_toy_folder(tmp_path / "bin", suffix="bin")))
    fingerprints.add(shards.fingerprint(write_toy_folder(tmp_path / "n", n=4)))
    (folder / "manifest.json").unlink()
    fingerprints.add(shards.fingerprint(folder))
    shards.write_shard(folder / "toy_train_000002.npy", np.ones(999))
    fingerprints.add(shards.fingerprint(folder))
    assert len(fingerprints) == 5
