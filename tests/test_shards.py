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


def toy(folder, n=3, suffix="npy", size=1000):
    """A folder of n shards with a manifest, each of three documents."""
    folder.mkdir()
    rng, made = np.random.default_rng(0), []
    for i in range(n):
        tokens = rng.integers(0, EOT, size).astype(np.uint16)
        tokens[[0, 10, 500]] = EOT
        name = f"toy_{'train' if i else 'val'}_{i:06d}.{suffix}"
        sha256 = shards.write_shard(folder / name, tokens)
        made.append(Shard(name, size, 3, sha256, {"file": 0, "token": size * (i + 1)}))
    shards.write_manifest(folder, Manifest(SOURCE, suffix, size, complete=True, shards=made))
    return folder


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_round_trip(tmp_path, suffix):
    tokens = np.arange(70_000) % 50257
    path = tmp_path / f"x_train_000001.{suffix}"
    sha = shards.write_shard(path, tokens)
    read = shards.read_shard(path)
    assert read.dtype == np.uint16
    assert np.array_equal(read, tokens) and shards.count_tokens(path) == 70_000
    assert sha == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no temporary file stays


def test_formats_are_what_others_write(tmp_path):
    """numpy.load reads ours; numpy.save's and llm.c's files are read."""
    tokens = np.arange(500, dtype=np.uint16)
    shards.write_shard(tmp_path / "a_train_000001.npy", tokens)
    assert np.array_equal(np.load(tmp_path / "a_train_000001.npy"), tokens)
    np.save(tmp_path / "edufineweb_train_000002.npy", tokens)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, 500
    (tmp_path / "fineweb_train_000003.bin").write_bytes(header.tobytes() + tokens.tobytes())
    shards.write_shard(tmp_path / "b.bin", tokens)
    assert (tmp_path / "b.bin").read_bytes() == (tmp_path / "fineweb_train_000003.bin").read_bytes()
    for path in shards.find_shards(tmp_path, "train"):
        assert np.array_equal(shards.read_shard(path), tokens)


def test_find_shards_sorts_by_index_and_leaves_the_rest(tmp_path):
    names = ["x_train_000010.npy", "x_train_000009.npy", "x_train_1000000.npy", "x_val_000000.npy"]
    for name in [*names, "notes.txt", ".x_train_000011.npy.part", "train.bin", "x_test_000001.npy"]:
        (tmp_path / name).touch()
    (tmp_path / "x_train_000012.npy").mkdir()
    found = [p.name for p in shards.find_shards(tmp_path, "train")]
    assert found == ["x_train_000009.npy", "x_train_000010.npy", "x_train_1000000.npy"]
    assert [p.name for p in shards.find_shards(str(tmp_path), "val")] == ["x_val_000000.npy"]


def test_find_shards_says_what_is_missing(tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=rf"{folder}.*python fineweb.py .*--out"):
            shards.find_shards(folder, "train")
    shards.write_shard(tmp_path / "x_train_000001.npy", np.ones(5))
    with pytest.raises(UserError, match="no val shard"):
        shards.find_shards(tmp_path, "val")
    shards.write_shard(tmp_path / "x_train_000001.bin", np.ones(5))
    with pytest.raises(UserError, match=r"as \.npy and as \.bin"):
        shards.find_shards(tmp_path, "train")
    (tmp_path / "x_train.bin").touch()  # llm.c's --input_bin names a file
    with pytest.raises(UserError, match=r"x_train\.bin is a file, but a folder of shards"):
        shards.find_shards(tmp_path / "x_train.bin", "train")


def save(path, array, **kwargs):
    np.save(path, array, **kwargs)
    return path


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a shard was unpickled",))


def bad_shards(folder):
    """(path, words of the message) of files that are no shards."""
    good = save(folder / "good.npy", np.arange(100, dtype=np.uint16)).read_bytes()
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 100

    def put(name, data):
        (folder / name).write_bytes(data)
        return folder / name

    def words(*values):
        changed = header.copy()
        changed[: len(values)] = values
        return changed.tobytes() + bytes(200)

    yield put("cut.npy", good[:-1]), "promises 100 tokens"
    yield put("head.npy", good[:40]), "header"
    yield put("huge.npy", good.replace(b"(100,)", b"(10**9,)")), "header"
    yield put("vast.npy", good.replace(b"(100,), }   ", b"(10000000,),}")), "promises 10,000,000"
    yield put("pickle.npy", pickle.dumps(Bomb())), "header"
    yield save(folder / "object.npy", np.array([Bomb()], dtype=object)), "object"
    yield save(folder / "float.npy", np.ones(10, np.float32)), "float32"
    yield save(folder / "swapped.npy", np.ones(10, ">u2")), ">u2"
    yield save(folder / "square.npy", np.ones((5, 2), np.uint16)), "one dimension"
    yield save(folder / "none.npy", np.ones(0, np.uint16)), "0 tokens"
    yield put("magic.bin", words(20240801, 7)), "first words are [20240801, 7]"
    yield put("cut.bin", words()[:-2]), "promises 100 tokens"
    yield put("count.bin", words(20240520, 1, 2**31 - 1)), "promises 2,147,483,647"
    yield put("short.bin", header.tobytes()[:1000]), "first words"


def test_every_bad_shard_is_named(tmp_path):
    for path, words in bad_shards(tmp_path):
        for use in (shards.count_tokens, shards.read_shard):
            with pytest.raises(UserError) as e:
                use(path)
            assert str(path) in str(e.value) and words in str(e.value), (path.name, str(e.value))
    with pytest.raises(UserError, match="No such file"):
        shards.read_shard(tmp_path / "absent.npy")


def test_check_ids_names_the_place(monkeypatch):
    monkeypatch.setattr(shards, "CHECKED_TOKENS", 100)
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

    def crash(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(OSError):
        shards.write_shard(path, np.arange(2000))
    assert path.read_bytes() == before
    with pytest.raises(AssertionError):
        shards.write_shard(path, np.array([1, 65536]))


def test_manifest_round_trip_is_exact(tmp_path):
    folder = toy(tmp_path / "t")
    manifest = shards.read_manifest(folder)
    before = (folder / "manifest.json").read_bytes()
    shards.write_manifest(folder, manifest)
    assert (folder / "manifest.json").read_bytes() == before
    assert manifest.source == SOURCE and [s.tokens for s in manifest.shards] == [1000] * 3
    assert shards.read_manifest(tmp_path) is None


def hostile(good):
    """Texts of manifests that must be refused."""
    yield from ("", "{", "[]", "null", '"x"', "[" * 100_000, "9" * 5000, "{}")
    for key in ("source", "format", "shard_tokens", "shards"):
        yield json.dumps({k: v for k, v in good.items() if k != key})
    yield json.dumps({**good, "extra": 1})
    for key, value in (("version", 2), ("tokenizer", "gpt4"), ("format", "pt"), ("format", None), ("source", [])):
        yield json.dumps({**good, key: value})
    yield json.dumps({**good, "shards": good["shards"] + good["shards"][:1]})
    for key, values in {
        "file": ["../x_train_000001.npy", "/x_train_000001.npy", "a\\x_train_000001.npy", "manifest.json", "", None, 3,
                 "x_train_000001.npy\n", "x\0_train_000001.npy"],
        "sha256": ["", "0" * 63, "g" * 64, None, "A" * 64],
    }.items():  # fmt: skip
        for value in values:
            yield json.dumps({**good, "shards": [{**good["shards"][0], key: value}]})
    for path in ("../a", "/etc/passwd", "a/../../b", "..", "", "a\\b", "a\0b", None, 7):
        yield json.dumps({**good, "source": {**SOURCE, "files": [{"path": path, "bytes": 1}]}})
    for files in (None, "x", [1], [{}]):
        yield json.dumps({**good, "source": {**SOURCE, "files": files}})


def test_hostile_manifests_are_refused(tmp_path):
    folder = toy(tmp_path / "t")
    good = asdict(shards.read_manifest(folder))
    for text in hostile(good):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(UserError, match="manifest"):
            shards.read_manifest(folder)
            pytest.fail(f"accepted: {text[:300]}")
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError):
        shards.read_manifest(folder)


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_verify_names_every_harm(tmp_path, suffix):
    folder = toy(tmp_path / "t", n=6, suffix=suffix)
    assert shards.verify(folder) == []
    path = {i: folder / f"toy_{'train' if i else 'val'}_{i:06d}.{suffix}" for i in range(6)}
    data = bytearray(path[1].read_bytes())
    data[-7] ^= 1  # one bit
    path[1].write_bytes(data)
    path[2].write_bytes(path[2].read_bytes()[:-2])  # truncated
    three, four = path[3].read_bytes(), path[4].read_bytes()
    path[3].write_bytes(four), path[4].write_bytes(three)  # swapped
    path[5].unlink()  # missing
    shards.write_shard(folder / f"other_train_000001.{suffix}", np.arange(10))  # extra
    wrong = shards.verify(folder)
    words = r"(?:toy_train_)?(000\d+|other).*?(sha256|promises|missing|not in)"
    harms = [("000001", "sha256"), ("000002", "promises"), ("000003", "sha256"), ("000004", "sha256")]
    harms += [("000005", "missing"), ("other", "not in")]
    assert sorted(re.match(words, w).groups() for w in wrong) == harms, wrong


def test_verify_checks_ids_document_starts_and_completeness(tmp_path):
    folder = toy(tmp_path / "t")
    val = folder / "toy_val_000000.npy"
    tokens = shards.read_shard(val)
    manifest = shards.read_manifest(folder)

    def rewrite(**changes):
        sha = shards.write_shard(val, tokens)
        first = replace(manifest.shards[0], sha256=sha)
        shards.write_manifest(folder, replace(manifest, shards=[first, *manifest.shards[1:]], **changes))
        return shards.verify(folder)

    assert rewrite() == []
    assert "not finished" in rewrite(complete=False)[0]
    tokens[10] = 5  # one document start less
    assert "(1000, 2), but manifest.json says (1000, 3)" in rewrite()[0]
    tokens[0] = 5
    assert any("begins with id 5" in w for w in rewrite())
    tokens[3] = 50257
    assert any("token 3 is id 50257" in w for w in rewrite())


def test_verify_without_manifest_warns_and_checks_what_it_can(tmp_path, capsys):
    folder = toy(tmp_path / "t")
    (folder / "manifest.json").unlink()
    assert shards.verify(folder) == []
    assert "no manifest.json" in capsys.readouterr().out
    (folder / "toy_train_000001.npy").write_bytes(b"junk")
    assert len(shards.verify(folder)) == 1
    with pytest.raises(UserError, match="no shard"):
        shards.verify(tmp_path)


def test_fingerprint_changes_with_the_data_only(tmp_path):
    folder = toy(tmp_path / "t")
    first = shards.fingerprint(folder)
    (folder / "notes.txt").write_text("x")
    assert shards.fingerprint(folder) == shards.fingerprint(toy(tmp_path / "again")) == first
    others = toy(tmp_path / "bin", suffix="bin"), toy(tmp_path / "n", n=4)
    seen = {first, *map(shards.fingerprint, others)}
    (folder / "manifest.json").unlink()
    seen.add(shards.fingerprint(folder))
    shards.write_shard(folder / "toy_train_000002.npy", np.ones(999))
    seen.add(shards.fingerprint(folder))
    assert len(seen) == 5
