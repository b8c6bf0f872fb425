"""Text to shards: every document as tiktoken encodes it, and the same bytes whatever happens on the way."""

import itertools
import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import (
    ID_SUFFIXES,
    WRITERS,
    encode,
    read_bytes,
    read_tokens,
    run_fineweb,
    shared_encoder,
    write_documents,
    write_ids,
    write_token_file,
)
from helpers import make_documents

import fineweb
from system.cli import UserError
from system.files import lock_folder
from tokens import documents as readers
from tokens import shards
from tokens.shards import Manifest, Shard
from tokens.tokenizer import EOT


@pytest.fixture
def quick(monkeypatch):
    """Many runs in this process share one encoder, and do not wait for the disk."""
    monkeypatch.setattr(shards, "bulk_encoder", shared_encoder)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    return path


# ------------------------------------------------------------------------- the same tokens as tiktoken


@pytest.mark.parametrize("shard_format, limit", [("npy", 1_000_000), ("bin", 12_345)])
def test_the_shards_hold_the_documents(tmp_path, quick, monkeypatch, shard_format, limit):
    """Those of two files, in chunks and shards that are smaller than a file, up to the limit."""
    documents = [*make_documents(1), None, "last"]
    files = [write_documents(tmp_path / name, documents) for name in ("a b-1.parquet", "a b-2.jsonl")]
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2000)
    out = tmp_path / "out"

    flags = ("--shard-size", 5000, "--limit-tokens", limit, "--format", shard_format)
    run_fineweb("--source", *files, "--out", out, *flags)

    assert read_tokens(out) == encode(documents * 2)[:limit]
    names = [path.name for path in shards.shard_files(out)]
    assert names[:2] == [f"a-b_val_000000.{shard_format}", f"a-b_train_000001.{shard_format}"]


def test_stdlib_as_a_command(tmp_path, run_script):
    flags = ("--source", "stdlib", "--limit-tokens", "100000", "--out", "data")
    done = run_script("fineweb.py", *flags, cwd=tmp_path)

    tokens = read_tokens(tmp_path / "data")
    manifest = shards.read_manifest(tmp_path / "data")
    assert "100,000 tokens" in done.stdout and "--data-dir data" in done.stdout
    assert len(tokens) == 100_000 and len(manifest.shards) == 10
    run_fineweb("--verify", tmp_path / "data")

    # The files are the library's, without tests and packages, and shuffled.
    names = [file["path"] for file in manifest.source["files"]]
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    assert len(names) > 100 and names != sorted(names)
    documents = [(Path(os.__file__).parent / name).read_text(encoding="utf-8") for name in names[:100]]
    assert tokens == encode(documents)[:100_000]


@pytest.mark.parametrize("source_bytes, limit, shard_tokens", [
    (70_000, None, 3000),  # a 24th, 2,917
    (70_000, 12_000, 1000),  # a tenth of the limit, 1,200
    (10**12, None, 100_000_000),
    (None, None, 100_000_000),  # the Hub does not say
    (None, 12_000, 1000),
])  # fmt: skip
def test_default_shard_size(source_bytes, limit, shard_tokens):
    source = {"files": [{"bytes": source_bytes}, {"bytes": 0}]}
    assert fineweb.plan_manifest(fineweb.Args(limit_tokens=limit), source).shard_tokens == shard_tokens


# ------------------------------------------------------------------------- killed and run again


class Killed(BaseException):
    """Ends a run in this process as a kill would: nothing catches it."""


@contextmanager
def crash_at(write):
    """In the block, os.replace ends the run at its call number `write`. Every file is written by renaming it."""
    real_replace = os.replace
    numbers = itertools.count(1)

    def replace_or_crash(*args):
        if next(numbers) == write:
            raise Killed
        real_replace(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_or_crash)
        yield


@pytest.fixture
def ids_source(tmp_path):
    """Arguments for a source of token ids in every format that has them."""
    rows = [list(range(i, 50_000, 997)) for i in range(60)]
    files = [write_ids(tmp_path / "src" / f"a{suffix}", rows) for suffix in ID_SUFFIXES]
    return ["--shard-size", 1000, "--source", *files, "--ids-column", "tokens"]


@pytest.fixture
def token_files_source(tmp_path):
    """Arguments for two files of tokens."""
    paths = [tmp_path / "src" / name for name in ("a.bin", "b.bin")]
    files = [write_token_file(path, [*range(i, 50_000, 97), EOT] * 20) for i, path in enumerate(paths)]
    return ["--shard-size", 2000, "--source", *files]


@pytest.fixture
def mixed_source(tmp_path):
    """Arguments for a source of every kind, whose documents run over shards and whose shards run over files."""
    files = [write_documents(tmp_path / "src" / f"v{s}", make_documents(sum(s.encode()), 9)) for s in WRITERS]
    files.append(write_documents(tmp_path / "src" / "w.parquet", make_documents(1, 20)))
    return ["--source", *files, "--shard-size", 8000]


@pytest.mark.parametrize("first, last", [([], [EOT]), ([], []), ([EOT], []), ([EOT, EOT], [EOT, EOT])])
def test_nanogpts_validation_split_stays_one(tmp_path, capsys, first, last):
    """Both files named, in any order, or train.bin alone."""
    ids = {"train.bin": [*range(0, 50_000, 97), EOT] * 3, "val.bin": [*first, *range(5, 50_000, 197), *last]}
    train, val = [write_token_file(tmp_path / "nano" / name, content) for name, content in ids.items()]
    for number, sources in enumerate([(train,), (train, val), (val, train)]):
        out = tmp_path / f"out{number}"
        run_fineweb("--source", *sources, "--out", out)
        assert "val.bin is the validation split" in capsys.readouterr().out
        val_shard, *rest = shards.shard_files(out)
        assert val_shard.name.endswith("val_000000.npy")
        # In a shard, <|endoftext|> begins a document.
        assert shards.read_shard(val_shard).tolist() == [EOT, *range(5, 50_000, 197)]
        assert np.concatenate([shards.read_shard(path) for path in rest]).tolist() == [EOT, *ids["train.bin"][:-1]]

    other = write_token_file(tmp_path / "nano" / "other.bin", ids["train.bin"])
    for sources, message in (((val, other), "would be trained on"), ((train, "--shard-size", 100), "leave it out")):
        with pytest.raises(UserError, match=message):
            run_fineweb("--source", *sources, "--out", tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("source", ["mixed_source", "ids_source", "token_files_source"])
def test_a_crash_at_every_write_changes_nothing(tmp_path, request, source, quick, monkeypatch):
    """Also in the middle of a file of each format."""
    arguments = request.getfixturevalue(source)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 999)
    run_fineweb(*arguments, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")
    writes = 2 * len(expected)  # each shard and its manifest, and the manifest at the beginning and at the end
    assert writes > 8

    for write in range(1, writes + 1):
        out = tmp_path / f"{write}"
        with crash_at(write), pytest.raises(Killed):
            run_fineweb(*arguments, "--out", out)
        run_fineweb(*arguments, "--out", out)
        assert read_bytes(out) == expected, write
        shutil.rmtree(out)


def pause_at_the_third_shard():
    """In the process to be killed: let os.replace not return once the shard with number 2 is there."""
    real_replace = os.replace

    def replace_and_pause(part, path):
        real_replace(part, path)
        if path.stem.endswith("000002"):
            time.sleep(100)

    os.replace = replace_and_pause


def test_sigkill_and_sigint_then_again(tmp_path, quick, text_file, start_script):
    args = ("--source", text_file, "--shard-size", 30)
    run_fineweb(*args, "--out", tmp_path / "expected")
    out = tmp_path / "out"

    for signal_number in (signal.SIGKILL, signal.SIGINT):
        script = start_script("fineweb.py", *args, "--out", out, prepare=pause_at_the_third_shard)
        assert script.wait_until((out / "a_train_000002.npy").exists), script.output
        assert script.send(signal_number)
        output = script.wait().output
        assert "Traceback" not in output
        assert signal_number == signal.SIGKILL or f"resumes at the shard in progress, in {out}" in output
        (out / "a_train_000002.npy").unlink()  # it is in no manifest yet

    run_fineweb(*args, "--out", out)
    assert read_bytes(out) == read_bytes(tmp_path / "expected")


@pytest.mark.parametrize("index, damage", [
    (0, lambda path: path.unlink()),
    (1, lambda path: path.write_bytes(path.read_bytes()[:-2])),
    (-1, lambda path: shards.write_shard(path, np.arange(9))),
], ids=["missing", "cut", "shorter"])  # fmt: skip
def test_a_damaged_shard_is_made_again(tmp_path, mixed_source, quick, index, damage):
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    expected = read_bytes(out)
    damage(shards.shard_files(out)[index])

    # The first attempt to make it again crashes.
    with crash_at(3), pytest.raises(Killed):
        run_fineweb(*mixed_source, "--out", out)
    run_fineweb(*mixed_source, "--out", out)

    assert read_bytes(out) == expected


# ------------------------------------------------------------------------- the folder


def test_two_runs_on_one_folder(tmp_path, text_file):
    with lock_folder(tmp_path / "out"), pytest.raises(UserError, match=str(tmp_path / "out")):
        run_fineweb("--source", text_file, "--out", tmp_path / "out")
    assert read_bytes(tmp_path / "out") == {}


def test_other_parameters_are_refused_by_name(tmp_path, quick, text_file):
    flags = ("--source", text_file, "--shard-size", 50, "--limit-tokens", 150, "--out", tmp_path / "out")
    run_fineweb(*flags)
    before = read_bytes(tmp_path / "out")
    run_fineweb(*flags)  # the same parameters twice are accepted

    other_file = shutil.copy(text_file, tmp_path / "b.txt")
    for flag, value, message in (
        ("--source", other_file, "whose names begin with a, not b"),
        ("--shard-size", 60, "--shard-size 50, not 60"),
        ("--limit-tokens", 160, "--limit-tokens 150, not 160"),
        ("--format", "bin", "--format npy, not bin"),
        ("--split-on", "x", "without --split-on;"),
        ("--as-text", None, "without --as-text;"),
    ):
        with pytest.raises(UserError, match=message):
            run_fineweb(*flags, flag, *([value] if value else []))

    # A file of the same name and size with other content is another revision.
    text_file.write_text("else text " * 100)
    with pytest.raises(UserError, match="from other files"):
        run_fineweb(*flags)
    assert read_bytes(tmp_path / "out") == before


@pytest.mark.parametrize("flag, value", [
    ("--out", ""), ("--verify", ""), ("--source", ""),
    ("--shard-size", "1.5"), ("--limit-tokens", "0"), ("--limit-tokens", "inf"), ("--limit-tokens", "nan"),
])  # fmt: skip
def test_a_value_that_means_nothing_is_refused(tmp_path, text_file, monkeypatch, flag, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=flag):
        run_fineweb("--source", text_file, flag, value)
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_limit_may_be_written_with_an_exponent(tmp_path, quick, text_file):
    run_fineweb("--source", text_file, "--limit-tokens", "1e2", "--out", tmp_path / "out")
    assert len(read_tokens(tmp_path / "out")) == 100 and shards.read_manifest(tmp_path / "out").limit_tokens == 100


def test_ids_are_the_tokens_and_the_manifest_says_so(tmp_path, ids_source):
    out = tmp_path / "out"
    run_fineweb(*ids_source, "--out", out)
    tokens = read_tokens(out)
    assert tokens[:4] == [EOT, 0, 997, 1994] and tokens.count(EOT) == 60 * len(ID_SUFFIXES)
    source = shards.read_manifest(out).source
    assert source["ids_column"] == "tokens" and "column" not in source

    # The same files as text are other data.
    with pytest.raises(UserError, match="tokens"):
        run_fineweb(*ids_source[:-2], "--out", out)


def test_flags_that_would_do_nothing_are_refused(tmp_path, text_file):
    with_columns = write_documents(tmp_path / "b.csv", ["one"])
    for source, flag in ((text_file, "--text-column"), (with_columns, "--split-on"), (text_file, "--subset"),
                         (with_columns, "--ids-column"), (text_file, "--ids-column")):  # fmt: skip
        with pytest.raises(UserError, match=flag):
            run_fineweb("--source", source, flag, "x", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, content", [("a.txt", b""), ("a.jsonl", b'{"text": null}\n{"text": ""}\n'), ("a.jsonl", b"\n")]
)
def test_a_source_without_text_is_refused(tmp_path, quick, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"no text in {name}"):
        run_fineweb("--source", tmp_path / name, "--out", tmp_path / "out")

    # The folder takes another source.
    (tmp_path / name).write_text('{"text": "some words"}')
    run_fineweb("--source", tmp_path / name, "--out", tmp_path / "out")
    assert read_tokens(tmp_path / "out")


def test_files_of_others_are_left_alone(tmp_path, quick, text_file):
    """Under the names of this command's shards, or beside them."""
    out = tmp_path / "out"
    out.mkdir()
    for foreign in (out / "a_train_000001.npy", out / "b_train_000001.npy"):
        foreign.write_bytes(b"foreign")
        with pytest.raises(UserError, match=str(foreign)):
            run_fineweb("--source", text_file, "--out", out)
        assert foreign.read_bytes() == b"foreign"

        # Without it the folder is filled.
        foreign.unlink()
        run_fineweb("--source", text_file, "--out", out)


@pytest.mark.parametrize("limit, subset, downloads, needed", [
    (1000, "", True, 2 * (1000 - 400) + 3000 + 2000),  # tokens of two bytes, and two files
    (None, "", False, 2 * (3000 - 400)),  # a token for two bytes of the source
    (None, "sample/10BT/", False, 2 * (10**10 - 400)),
])  # fmt: skip
def test_the_disk_space_that_is_needed(tmp_path, monkeypatch, limit, subset, downloads, needed):
    source = {"subset": subset, "files": [{"bytes": n} for n in (1000, 3000, 2000)]}
    manifest = Manifest(source, "npy", 400, limit, shards=[Shard("x", 400, 1, "", {})])

    tokens = fineweb.expect_tokens(manifest)
    monkeypatch.setattr("fineweb.free_bytes", lambda folder: needed)
    fineweb.check_disk_space(tmp_path, manifest, downloads, tokens)
    monkeypatch.setattr("fineweb.free_bytes", lambda folder: needed - 1)
    with pytest.raises(UserError):
        fineweb.check_disk_space(tmp_path, manifest, downloads, tokens)


def test_parquet_says_about_how_many_tokens_it_has(tmp_path, ids_source):
    path = write_documents(tmp_path / "a.parquet", make_documents(1))
    manifest = Manifest({"subset": "", "column": "text"}, "npy", 400)
    assert fineweb.expect_tokens(manifest, [path]) == pytest.approx(len(encode(make_documents(1))), rel=0.5)
    assert fineweb.expect_tokens(manifest, [path, tmp_path / "b.txt"]) is None

    # Of ids exactly.
    manifest = replace(manifest, source={"subset": "", "ids_column": "tokens"})
    assert fineweb.expect_tokens(manifest, [ids_source[3]]) == sum(1 + len(range(i, 50_000, 997)) for i in range(60))


@pytest.mark.parametrize("source, flags, preset", [
    ("stdlib", (), "quickstart"),
    ("stdlib", ("--format", "bin"), "quickstart"),
    ("my.txt", (), "finetune"),
    ("my.txt", ("--format", "bin"), "llmc-124m"),
    ("fineweb-edu", (), "gpt2-124m"),
])  # fmt: skip
def test_the_next_command_names_the_preset(source, flags, preset):
    args = fineweb.Args(source=(source,), format=flags[1] if flags else "npy")
    command = fineweb.choose_preset(args, is_local=source not in fineweb.sources.HUB_DATASETS)
    assert command.split()[0] == preset
