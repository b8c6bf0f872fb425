"""Text to shards: every document as tiktoken encodes it, and the same bytes whatever happens on the way."""

import bz2
import csv
import gzip
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults import hub_server
from helpers import ROOT, make_documents, write_parquet

import fineweb
from system.cli import UserError
from system.files import lock_folder
from tokens import documents as reading
from tokens import shard_writer, shards, tokenizer
from tokens.prefetch import prefetch


def make(*args):
    """fineweb.py in this process."""
    before, sys.argv = sys.argv, ["fineweb.py", *map(str, args)]
    try:
        fineweb.main()
    finally:
        sys.argv = before


def stream(folder):
    """All tokens of a folder, val first, and the manifest, which must describe them."""
    assert shards.verify(folder) == []
    manifest = shards.read_manifest(folder)
    sizes = [s.tokens for s in manifest.shards]
    assert all(n == manifest.shard_tokens for n in sizes[:-1]) and manifest.complete
    return np.concatenate([shards.read_shard(folder / s.file) for s in manifest.shards]), manifest


def expected(documents):
    enc = tokenizer.encoding()
    return [i for text in documents for i in (tokenizer.EOT, *enc.encode_ordinary(text or ""))]


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}


# ------------------------------------------------------------------------- the same tokens as tiktoken


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_parquet_document_by_document(tmp_path, suffix):
    documents = [*make_documents(1), None, "last"]
    write_parquet(tmp_path / "a b.parquet", documents, row_group_size=7)
    out = tmp_path / "out"
    make("--source", tmp_path / "a b.parquet", "--out", out, "--shard-size", 5000, "--format", suffix)
    tokens, manifest = stream(out)
    assert tokens.tolist() == expected(documents)
    assert manifest.shards[0].file == f"a-b_val_000000.{suffix}" and "_train_000001." in manifest.shards[1].file
    assert sum(s.documents for s in manifest.shards) == len(documents)
    assert len(shards.find_shards(out, "train")) == len(manifest.shards) - 1


def test_parquet_types_and_odd_shapes(tmp_path):
    documents = make_documents(2)
    for kind in (pa.large_string(), pa.string_view()):
        pq.write_table(pa.table({"text": pa.array(documents, kind)}), tmp_path / "a.parquet", store_schema=True)
        out = tmp_path / str(kind)
        make("--source", tmp_path / "a.parquet", "--out", out)
        assert stream(out)[0].tolist() == expected(documents)
    write_parquet(tmp_path / "empty.parquet", [])
    make("--source", tmp_path / "empty.parquet", tmp_path / "a.parquet", "--out", tmp_path / "o")
    assert stream(tmp_path / "o")[0].tolist() == expected(documents)


def test_jsonl_fields_blank_lines_and_half_surrogates(tmp_path):
    documents = [*make_documents(3), "", "half \ud83d surrogate \ude00"]
    lines = [json.dumps({"n": 1, "body": d}) for d in documents]
    lines.insert(3, "")
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, json.dumps({"body": None})]) + "\n\n")
    make("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--text-column", "body")
    assert stream(tmp_path / "out")[0].tolist() == expected([*documents, ""])


def write_csv(path, documents):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("n", "text"), *enumerate(documents)])


def write_arrow(path, documents, new):
    table = pa.table({"n": range(len(documents)), "text": pa.array(documents, pa.string())})
    with new(str(path), table.schema) as file:
        file.write_table(table, max_chunksize=7)


def test_csv_gives_every_text_as_it_stands(tmp_path):
    """Commas, quotes and line ends in texts; words that other readers take for nothing, for numbers or for dates."""
    documents = [
        *make_documents(7),
        "NA",
        "null",
        "1.0",
        "2020-01-01",
        'a "quoted", one',
        "two\nlines\r\nor three\r",
        " x ",
    ]
    write_csv(tmp_path / "a.csv", documents)
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbftext,n\r\nwith a mark,1\r\n\r\nlast,2\r\n")  # as Excel writes it
    make("--source", tmp_path / "*.csv", "--out", tmp_path / "out")
    assert stream(tmp_path / "out")[0].tolist() == expected([*documents, "with a mark", "last"])


def test_arrow_in_both_of_its_formats(tmp_path):
    documents = [*make_documents(8), None]
    write_arrow(tmp_path / "a.arrow", documents, pa.ipc.new_stream)  # as `datasets` writes it
    write_arrow(tmp_path / "b.arrow", documents, pa.ipc.new_file)
    make("--source", tmp_path / "*.arrow", "--out", tmp_path / "out")
    assert stream(tmp_path / "out")[0].tolist() == expected(documents * 2)


ZST = lambda path, mode: pa.CompressedOutputStream(str(path), "zstd")
PACK = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open, "zst": ZST}


@pytest.mark.parametrize("suffix", PACK)
def test_compressed_files(tmp_path, suffix):
    documents, src = make_documents(9), tmp_path / "src"
    src.mkdir()
    write_csv(src / "a.csv", documents)
    (src / "b.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    (src / "c.txt").write_bytes("\n".join(documents).encode())
    for path in list(src.iterdir()):
        with PACK[suffix](f"{path}.{suffix}", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    size = ("--shard-size", 5000)  # of tokens: by default a part of the source's bytes, here hardly any
    make("--source", src / "*", "--out", tmp_path / "out", *size)
    tokens, manifest = stream(tmp_path / "out")
    assert tokens.tolist() == expected([*documents * 2, "\n".join(documents)])
    assert manifest.shards[0].file.startswith("src_val")
    whole = (src / f"b.jsonl.{suffix}").read_bytes()
    (src / f"b.jsonl.{suffix}").write_bytes(whole[:-20])
    with pytest.raises(UserError, match=rf"cannot read .*b\.jsonl\.{suffix}"):
        make("--source", src / "b*", "--out", tmp_path / "cut", *size)
    make("--source", src / "a*", "--out", tmp_path / "named", *size)
    assert (tmp_path / "named" / "a_val_000000.npy").exists()


def test_text_file_is_one_document_however_it_is_cut(tmp_path, monkeypatch):
    """Pieces and blocks of a few characters: the tokens are still those of the whole."""
    text = "\n".join(t[:300] for t in make_documents(4)) + " \u3000\u2003 \x1c \x85 tail \r\n\r\n  end\n\n\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    for piece, block in ((1, 900), (3, 1000), (50, 333), (1 << 16, 1 << 23)):
        monkeypatch.setattr(reading, "PIECE_CHARACTERS", piece)
        monkeypatch.setattr(reading, "CHUNK_BYTES", block)
        chunks = list(reading.read_text(open(tmp_path / "a.txt", "rb")))
        assert "".join(t for c in chunks for t in c.texts) == text
        assert sum(c.documents for c in chunks) == 1 and chunks[0].documents == 1
        encoder = tokenizer.bulk_encoder()
        ids = np.concatenate([shard_writer.encode(encoder, c)[0] for c in chunks])
        assert ids.tolist() == expected([text]), (piece, block)


def test_chunks_do_not_show(tmp_path, quick, monkeypatch):
    """Small chunks and shards or large ones: the same stream."""
    documents = make_documents(5)
    path = write_parquet(tmp_path / "a.parquet", documents, row_group_size=11)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    for i, (chunk, size) in enumerate(((1, 3000), (2000, 2999), (1 << 23, 10**8))):
        monkeypatch.setattr(reading, "CHUNK_BYTES", chunk)
        make("--source", path, tmp_path / "b.jsonl", "--out", tmp_path / str(i), "--shard-size", size)
        assert stream(tmp_path / str(i))[0].tolist() == expected(documents * 2)


def test_limit_tokens_is_exact(tmp_path, quick):
    path = write_parquet(tmp_path / "a.parquet", make_documents(6))
    for limit in (1, 99, 100, 101, 2000):
        out = tmp_path / str(limit)
        make("--source", path, "--out", out, "--shard-size", 100, "--limit-tokens", limit)
        assert stream(out)[0].tolist() == expected(make_documents(6))[:limit]


def test_default_shard_size_leaves_val_and_train(tmp_path, quick):
    for n in (2, 30, 5000):
        (tmp_path / f"{n}.txt").write_text("To be, or not to be. " * n)
        make("--source", tmp_path / f"{n}.txt", "--out", tmp_path / str(n))
        sizes = [s.tokens for s in stream(tmp_path / str(n))[1].shards]
        assert len(sizes) >= 3 and len(str(sizes[0]).rstrip("0")) == 1


def test_stdlib_as_a_command(tmp_path, run_script):
    done = run_script("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path, timeout=60)
    tokens, manifest = stream(tmp_path / "data")
    assert (
        f"{len(tokens):,} tokens" in done.stdout
        and "train_gpt2.py quickstart --data-dir data --out-dir log/data --sample-prompt ''" in done.stdout
    )
    assert len(tokens) > 3e6 and len(manifest.shards) > 4
    names = [f["path"] for f in manifest.source["files"]]
    assert not [n for n in names if "test" in n.split("/") or "site-packages" in n]
    assert names != sorted(names)  # shuffled
    library, enc = Path(os.__file__).parent, tokenizer.encoding()
    document = [tokenizer.EOT, *enc.encode_ordinary((library / names[0]).read_text(encoding="utf-8"))]
    assert tokens[: len(document)].tolist() == document
    again = run_script("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path)
    assert "nothing left to do" in again.stdout
    assert "every shard is intact" in run_script("fineweb.py", "--verify", "data", cwd=tmp_path).stdout


def test_real_text(tmp_path, shared_data):
    """A million tokens of real books, document by document."""
    books = shared_data / "books-00.parquet"
    make("--source", shared_data / "books-0*.parquet", "--out", tmp_path, "--limit-tokens", 1_000_000)
    tokens, manifest = stream(tmp_path)
    texts = next(pq.ParquetFile(books).iter_batches(2000, columns=["text"])).column(0).to_pylist()
    ids = expected(texts)
    assert len(ids) > 1_000_000 and tokens.tolist() == ids[:1_000_000]
    assert len(manifest.source["files"]) == 4 and manifest.shard_tokens == 100_000


# ------------------------------------------------------------------------- killed and run again


class Killed(BaseException):
    pass


@pytest.fixture
def quick(monkeypatch):
    """Many runs in this process share one encoder, and do not wait for the disk."""
    encoder = tokenizer.bulk_encoder()
    monkeypatch.setattr(shard_writer, "bulk_encoder", lambda: encoder)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def mixed(tmp_path):
    """Arguments for a source of every kind, whose documents run over shards and whose shards run over files."""
    files = [
        write_parquet(tmp_path / "src" / f"p{i}.parquet", make_documents(i, 20), row_group_size=9) for i in range(2)
    ]
    (tmp_path / "src" / "j.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in make_documents(9, 20)))
    (tmp_path / "src" / "t.txt").write_text("\n".join(make_documents(10, 20)))
    (tmp_path / "src" / "u.txt").write_text("short")
    write_csv(tmp_path / "src" / "v.csv", make_documents(11, 5))
    return ["--source", *files, *sorted((tmp_path / "src").glob("*.[jtc]*")), "--shard-size", 20_000]


def test_a_crash_at_every_write_changes_nothing(tmp_path, mixed, quick, monkeypatch):
    make(*mixed, "--out", tmp_path / "whole")
    whole, replace, calls = contents(tmp_path / "whole"), os.replace, 0

    def dying(*args):
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise Killed
        replace(*args)
        if calls == at:
            raise Killed

    writes = 2 * (len(shards.read_manifest(tmp_path / "whole").shards) + 1)  # shards, manifests, the first and last one
    assert writes > 8
    for at in range(1, writes + 1):
        for after in (False, True):
            out, calls = tmp_path / f"{at}{after}", 0
            monkeypatch.setattr(os, "replace", dying)
            with pytest.raises(Killed):
                make(*mixed, "--out", out)
            monkeypatch.setattr(os, "replace", replace)
            make(*mixed, "--out", out)
            assert {k: v for k, v in contents(out).items() if not k.endswith(".part")} == whole, (at, after)
            shutil.rmtree(out)


def start(*args, **kwargs):
    command = [sys.executable, str(ROOT / "fineweb.py"), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs)


def wait_for(done, process):
    while not done():
        if process.poll() is not None:
            return False
        time.sleep(0.001)
    return True


def test_sigkill_and_sigint_then_again_is_byte_identical(tmp_path):
    args = ("--source", "stdlib", "--shard-size", 200_000)
    make(*args, "--out", tmp_path / "whole")
    whole, out, hits = contents(tmp_path / "whole"), tmp_path / "out", 0
    for index, sign in ((2, signal.SIGKILL), (14, signal.SIGINT)):
        process = start(*args, "--out", out)
        name = f"stdlib_{'train' if index else 'val'}_{index:06d}.npy"
        hits += wait_for((out / name).exists, process)
        process.send_signal(sign)
        output = process.communicate()[0]
        assert "Traceback" not in output, output
        assert set(contents(out)) - {n for n in contents(out) if n.endswith(".part")} <= set(whole)
    assert hits == 2  # the kills came while it worked
    make(*args, "--out", out)
    assert contents(out) == whole


def test_two_runs_on_one_folder(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    with lock_folder(tmp_path / "out"), pytest.raises(UserError, match="in use by another process"):
        make("--source", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert contents(tmp_path / "out") == {}


def test_other_parameters_are_refused_by_name(tmp_path):
    for n in "ab":
        (tmp_path / f"{n}.txt").write_text(f"{n} text " * 100)
    base = {"--source": tmp_path / "a.txt", "--shard-size": 50, "--limit-tokens": 150, "--format": "npy"}

    def run(**changes):
        args = {**base, **{f"--{k.replace('_', '-')}": v for k, v in changes.items()}}
        make(*[x for pair in args.items() for x in pair], "--out", tmp_path / "out")

    run()
    before = contents(tmp_path / "out")
    run()
    for change, words in (
        ({"source": tmp_path / "b.txt"}, "name a, not b"),
        ({"shard_size": 60}, "shard_tokens 50, not 60"),
        ({"limit_tokens": 160}, "limit_tokens 150, not 160"),
        ({"format": "bin"}, "format npy, not bin"),
        ({"text_column": "body"}, "column text, not body"),
    ):
        with pytest.raises(UserError, match=words):
            run(**change)
    (tmp_path / "a.txt").write_text("x text " * 100)  # same name and size
    with pytest.raises(UserError, match="was made with revision"):
        run()
    assert contents(tmp_path / "out") == before


def test_a_mended_command_may_use_the_folder_of_one_that_failed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "some text of several tokens"}\n')
    with pytest.raises(UserError, match="--text-column"):
        make("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out")
    make("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--text-column", "body", "--shard-size", 3)
    assert stream(tmp_path / "out")[0].tolist() == expected(["some text of several tokens"])


def test_files_of_others_are_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 100)
    out = tmp_path / "out"
    out.mkdir()
    theirs = out / "a_train_000001.npy"
    theirs.write_bytes(b"theirs")
    with pytest.raises(UserError, match="not written by this command"):
        make("--source", tmp_path / "a.txt", "--out", out)
    theirs.rename(out / "notes.txt")
    make("--source", tmp_path / "a.txt", "--out", out)
    assert (out / "notes.txt").read_bytes() == b"theirs"
    (out / "a_train_000001.npy").write_bytes(b"damaged")
    with pytest.raises(UserError, match="000001"):
        make("--source", tmp_path / "a.txt", "--out", out)


def test_a_removed_shard_comes_back_with_the_same_bytes(tmp_path, mixed, quick, monkeypatch):
    out = tmp_path / "out"
    make(*mixed, "--out", out)
    whole, files = contents(out), shards.shard_files(out)
    for gone in (files[:1], [files[0], files[2]], files[-1:]):
        for path in gone:
            path.unlink()
        with monkeypatch.context() as m:
            m.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Killed))
            with pytest.raises(Killed):
                make(*mixed, "--out", out)
        make(*mixed, "--out", out)
        assert contents(out) == whole
    files[1].write_bytes(files[1].read_bytes()[:-2])
    with pytest.raises(UserError, match="Move it away and make it again"):
        make(*mixed, "--out", out)
    files[1].unlink()
    manifest = shards.read_manifest(out)
    wrong = [replace(s, sha256="0" * 64) if s.file == files[1].name else s for s in manifest.shards]
    shards.write_manifest(out, replace(manifest, shards=wrong))
    with pytest.raises(UserError, match="the source has changed"):  # the source gives other bytes than it did
        make(*mixed, "--out", out)
    assert not files[1].exists()


def test_shards_are_called_what_the_files_are_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for names, called in {
        ("books-00.txt", "books-01.txt"): "books",
        ("alpha.txt", "apple.txt"): "texts",
        ("one day.txt",): "one-day",
        ("2024.txt",): "texts",
    }.items():
        for folder in ("texts", "data"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        (tmp_path / "texts").mkdir()
        for name in names:
            (tmp_path / "texts" / name).write_text("some text " * 100)
        make("--source", "texts/*.txt", "--shard-size", 100)
        assert {p.name.split("_")[0] for p in shards.shard_files(tmp_path / "data" / called)} == {called}


def test_ahead_is_ahead_by_its_steps_and_no_more():
    made = []

    def items():
        for i in range(9):
            made.append(i)
            yield i
        raise OSError("the end")

    def settled(n):
        time.sleep(0.05)
        return made == list(range(n))

    for steps in (1, 3):
        made.clear()
        got = prefetch(items(), steps)
        assert next(got) == 0 and settled(1 + steps)
        assert next(got) == 1 and settled(2 + steps)
        with pytest.raises(OSError, match="the end"):
            list(got)
    assert list(prefetch([], 2)) == []


# ------------------------------------------------------------------------- bad input


def test_bad_sources_are_refused(tmp_path, quick):
    write_parquet(tmp_path / "good.parquet", ["x"])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 9)
    (tmp_path / "train.bin").write_bytes(b"\x27\0\x0b\0" * 9)  # nanoGPT's tokens of characters: valid UTF-8
    (tmp_path / "none.jsonl").write_text("\n\n")
    (tmp_path / "long.csv").write_text("n,text\n1,a\n2,b,c\n")
    (tmp_path / "open.csv").write_text('n,text\n1,"a\n')
    (tmp_path / "cut.arrow").write_bytes(b"ARROW1\0\0" * 20)
    (tmp_path / "dir").mkdir()
    for args, words in (
        ([tmp_path / "missing.txt"], r"missing\.txt.*stdlib"),
        ([tmp_path / "no*.csv"], r"no\*\.csv"),
        ([tmp_path / "dir"], "not a readable file"),
        (["stdlib", tmp_path / "good.parquet"], "--source stdlib"),
        ([tmp_path / "good.parquet", "--text-column", "id"], "'id' is int64.*id, text"),
        ([tmp_path / "good.parquet", "--text-column", "body"], "'body' is missing"),
        ([tmp_path / "cut.parquet"], r"cannot read .*cut\.parquet"),
        ([tmp_path / "bad.jsonl"], r"bad\.jsonl: line 2 .*'text'"),
        ([tmp_path / "broken.jsonl"], "line 2 .*'text'"),
        ([tmp_path / "latin.txt"], r"latin\.txt.*utf-8"),
        ([tmp_path / "train.bin"], r"train\.bin: it holds tokens.*--data-dir"),
        ([tmp_path / "none.jsonl"], "holds no documents"),
        ([tmp_path / "long.csv"], r"long\.csv: line 3 has 3 fields and the first 2"),
        ([tmp_path / "open.csv"], r"open\.csv: unexpected end"),
        ([tmp_path / "long.csv", "--text-column", "body"], "'body' is missing.*n, text"),
        ([tmp_path / "cut.arrow"], r"cannot read .*cut\.arrow"),
        ([tmp_path / "good.parquet", "--shard-size", 0], "--shard-size"),
        ([tmp_path / "good.parquet", "--limit-tokens", -5], "--limit-tokens"),
        ([], "--source"),
    ):
        out = tmp_path / "out"
        with pytest.raises(UserError, match=words):
            make("--source", *args, "--out", out)
        assert not list(out.glob("*_*")), args
        shutil.rmtree(out, ignore_errors=True)


def test_no_room_says_how_much(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, 10**9))
    with pytest.raises(UserError, match=r"about 4\.0 GB .* 1\.0 GB free"):
        make("--source", tmp_path / "a.txt", "--out", tmp_path / "out", "--limit-tokens", 2 * 10**9)


def test_commands_fail_with_one_message(tmp_path, expect_failure, run_script):
    expect_failure("fineweb.py", "--source", tmp_path / "none.txt", mentions=["none.txt", "stdlib"], cwd=tmp_path)
    expect_failure("fineweb.py", "--verify", tmp_path / "none", mentions=["does not exist", "python fineweb.py"])
    expect_failure("fineweb.py", "--sauce", "x", mentions=["--sauce"])
    (tmp_path / "file").write_text("x")
    expect_failure("fineweb.py", "--source", "stdlib", "--out", tmp_path / "file" / "sub", mentions=["cannot write to"])
    began = time.time()
    run_script("fineweb.py", "--help")
    assert time.time() - began < 3  # well under a second on an idle machine
    assert not list(tmp_path.glob("*/*"))


# ------------------------------------------------------------------------- from the Hub


@pytest.fixture
def hub(tmp_path):
    """A Hub with a dataset of five parquet files under sample/, one beside it, and its documents."""
    with hub_server.start(tmp_path / "hub") as server:
        repo, documents = tmp_path / "hub" / "datasets" / "owner" / "web", []
        for i in range(5):
            documents.append(make_documents(20 + i, 30))
            write_parquet(repo / "sample" / f"{i:03d}_00000.parquet", documents[-1])
        write_parquet(repo / "other" / "x.parquet", ["not this"])
        (repo / "README.md").write_text("a dataset")
        server.documents = [d for part in documents for d in part]
        yield server


def test_hub_downloads_ahead_and_deletes(tmp_path, hub, run_script):
    out, most, done = tmp_path / "out", 0, threading.Event()

    def watch():
        nonlocal most
        while not done.is_set():
            most = max(most, len(list((out / ".source").glob("sample/*.parquet"))))
            time.sleep(0.001)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    args = ["fineweb.py", "--source", "owner/web", "--subset", "sample/", "--out", out, "--shard-size", 20_000]
    hub.faults.append(hub_server.Fault("drop", "resolve", times=1))
    run_script(*args, env=hub.env())
    done.set()
    watcher.join()
    tokens, manifest = stream(out)
    assert tokens.tolist() == expected(hub.documents)
    assert 1 <= most <= 2 and not (out / ".source").exists()
    assert len(manifest.source["revision"]) == 40 and len(manifest.source["files"]) == 5
    before, asked = contents(out), len(hub.log)
    assert "nothing left" in run_script(*args, env=hub.env()).stdout
    assert contents(out) == before and len(hub.log) == asked  # a finished folder asks the Hub nothing
    (out / "web_train_000002.npy").unlink()
    assert "making it again" in run_script(*args, env=hub.env()).stdout
    assert contents(out) == before
    kept = tmp_path / "kept"
    run_script(*args[:5], "--out", kept, "--shard-size", 20_000, "--keep-source", env=hub.env())
    assert len(list((kept / ".source").glob("sample/*.parquet"))) == 5
    assert contents(kept) == before


def test_hub_datasets_of_other_formats(tmp_path, hub, run_in_fork):
    """Without parquet, jsonl is taken, also compressed; without that, csv. One format, not all that are there."""
    repo = tmp_path / "hub" / "datasets" / "owner" / "lines"
    (repo / "data").mkdir(parents=True)
    write_csv(repo / "scores.csv", ["not this"])
    for i in range(2):
        with gzip.open(repo / "data" / f"{i}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": d}) + "\n" for d in make_documents(30 + i, 5))
    for subset, documents in (("", make_documents(30, 5) + make_documents(31, 5)), ("scores", ["not this"])):
        out = tmp_path / f"out{subset}"
        run_in_fork("fineweb.py", "--source", "owner/lines", "--subset", subset, "--out", out, env=hub.env())
        assert stream(out)[0].tolist() == expected(documents)
        assert not (out / ".source").exists()


def test_hub_killed_and_run_again(tmp_path, hub):
    env = {**os.environ, **hub.env()}
    args = ("--source", "owner/web", "--subset", "sample/", "--shard-size", 5_000, "--out", tmp_path / "out")
    for name in (".source", "web_train_000006.npy"):
        process = start(*args, env=env)
        wait_for((tmp_path / "out" / name).exists, process)
        process.kill()
        process.communicate()
    assert start(*args, env=env).wait() == 0
    assert stream(tmp_path / "out")[0].tolist() == expected(hub.documents)


def test_hub_out_of_reach_or_without_the_dataset(tmp_path, hub, expect_failure):
    began = time.time()
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    expect_failure("fineweb.py", env=away, cwd=tmp_path, mentions=["fineweb-edu", "127.0.0.1:9", "--source stdlib"])
    assert time.time() - began < 15
    none = ["--source", "owner/none", "--out", tmp_path / "a"]
    expect_failure("fineweb.py", *none, env=hub.env(), mentions=["owner/none", "auth login"])
    wrong = ["--source", "owner/web", "--subset", "nowhere/", "--out", tmp_path / "b"]
    expect_failure("fineweb.py", *wrong, env=hub.env(), mentions=["owner/web", "--subset"])
    offline = {**hub.env(), "HF_HUB_OFFLINE": "1"}
    expect_failure(
        "fineweb.py", "--source", "owner/web", "--out", tmp_path / "c", env=offline, mentions=["offline", "stdlib"]
    )
    hub.extra_tree.append({"type": "file", "path": "sample/../../../x.parquet", "size": 1, "oid": "0" * 40})
    run = ["--source", "owner/web", "--subset", "sample/", "--out", tmp_path / "e", "--limit-tokens", "9"]
    assert start(*run, env={**os.environ, **hub.env()}).wait() == 0  # a hostile listing leads nowhere
    assert all(".." not in f["path"] for f in shards.read_manifest(tmp_path / "e").source["files"])
    hub.faults.append(hub_server.Fault("html", "/api/datasets"))
    expect_failure(
        "fineweb.py", "--source", "owner/web", "--out", tmp_path / "d", env=hub.env(), mentions=["owner/web"]
    )
