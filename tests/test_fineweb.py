"""Text to shards: every document as tiktoken encodes it, and the same bytes whatever happens on the way."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import processes
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tyro
from faults import hub_server
from helpers import ROOT, make_documents, write_jsonl, write_parquet

import fineweb
from system.cli import UserError
from system.files import lock_folder
from tokens import documents as readers
from tokens import shard_writer, shards, sources, tokenizer
from tokens.documents import COMPRESSIONS, READERS, TEXT_SUFFIXES, TOKEN_SUFFIXES
from tokens.prefetch import prefetch

# ------------------------------------------------------------------------- helpers


def run_fineweb(*args):
    """fineweb.py's main in this process; raises UserError if it fails."""
    previous_argv = sys.argv
    sys.argv = ["fineweb.py", *map(str, args)]
    try:
        fineweb.main()
    finally:
        sys.argv = previous_argv


def read_folder(folder):
    """All tokens of a folder, val first, and its manifest, which must be complete and describe them."""
    assert shards.verify(folder) == []
    manifest = shards.read_manifest(folder)
    sizes = [shard.tokens for shard in manifest.shards]
    assert all(size == manifest.shard_tokens for size in sizes[:-1]) and manifest.complete
    return np.concatenate([shards.read_shard(folder / shard.file) for shard in manifest.shards]), manifest


def read_tokens(folder):
    """All tokens of a folder as a list, val first."""
    return read_folder(folder)[0].tolist()


def encode_with_tiktoken(documents):
    """The ids that shards of these documents must hold: EOT before each one, None as an empty document."""
    encoding = tokenizer.encoding()
    return [i for text in documents for i in (tokenizer.EOT, *encoding.encode_ordinary(text or ""))]


def read_bytes(folder):
    """The bytes of every file of a folder by name, without the lock file."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and p.name != ".lock"}


def without_partial_files(files):
    """The files of read_bytes without what a killed process may leave behind."""
    return {name: data for name, data in files.items() if not name.endswith(".part")}


def write_documents_jsonl(path, documents, field="text"):
    """A jsonl file with one document per line."""
    return write_jsonl(path, [{field: document} for document in documents])


def write_csv(path, documents):
    """A csv file with the columns n and text."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("n", "text"), *enumerate(documents)])


def write_text(path, documents):
    """A plain text file, which is one document."""
    assert len(documents) == 1
    path.write_bytes(documents[0].encode())


def open_zst(path, mode):
    """As gzip.open for the other compressions."""
    return pa.CompressedOutputStream(str(path), "zstd")


WRITERS = {  # suffix of READERS: what writes such a file
    ".parquet": write_parquet,
    ".jsonl": write_documents_jsonl,
    ".ndjson": write_documents_jsonl,
    ".csv": write_csv,
    ".json": write_documents_jsonl,
}
COMPRESSORS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": open_zst}


def write_documents(path, documents):
    """A file of documents in the format that its suffix names, one of READERS."""
    assert path.suffix in WRITERS, f"add a writer for {path.suffix} to WRITERS in tests/test_fineweb.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](path, documents)
    return path


@pytest.fixture(scope="module")
def shared_encoder():
    return tokenizer.bulk_encoder()


@pytest.fixture
def quick(monkeypatch, shared_encoder):
    """Many runs in this process share one encoder, and do not wait for the disk."""
    monkeypatch.setattr(shard_writer, "bulk_encoder", lambda: shared_encoder)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# ------------------------------------------------------------------------- the same tokens as tiktoken


@pytest.mark.parametrize("shard_format", ["npy", "bin"])
def test_parquet_document_by_document(tmp_path, shard_format):
    documents = [*make_documents(1), None, "last"]
    write_parquet(tmp_path / "a b.parquet", documents, row_group_size=7)
    out = tmp_path / "out"

    run_fineweb("--source", tmp_path / "a b.parquet", "--out", out, "--shard-size", 5000, "--format", shard_format)

    tokens, manifest = read_folder(out)
    assert tokens.tolist() == encode_with_tiktoken(documents)
    assert manifest.shards[0].file == f"a-b_val_000000.{shard_format}"
    assert "_train_000001." in manifest.shards[1].file
    assert sum(shard.documents for shard in manifest.shards) == len(documents)
    assert len(shards.find_shards(out, "train")) == len(manifest.shards) - 1


@pytest.mark.parametrize("text_type", [pa.large_string(), pa.string_view()], ids=str)
def test_parquet_of_every_text_type(tmp_path, text_type):
    documents = make_documents(2)
    table = pa.table({"text": pa.array(documents, text_type)})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=True)

    run_fineweb("--source", tmp_path / "a.parquet", "--out", tmp_path / "out")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents)


def test_an_empty_parquet_file_adds_nothing(tmp_path):
    documents = make_documents(2)
    write_parquet(tmp_path / "empty.parquet", [])
    write_parquet(tmp_path / "a.parquet", documents)

    run_fineweb("--source", tmp_path / "empty.parquet", tmp_path / "a.parquet", "--out", tmp_path / "out")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents)


def test_jsonl_fields_blank_lines_and_half_surrogates(tmp_path):
    documents = [*make_documents(3), "", "half \ud83d surrogate \ude00"]
    lines = [json.dumps({"n": 1, "body": document}) for document in documents]
    lines.insert(3, "")
    lines.append(json.dumps({"body": None}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")

    run_fineweb("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", "--text-column", "body")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken([*documents, ""])


@pytest.mark.parametrize("chunk_bytes", [1, 7, 100, 1 << 23])
@pytest.mark.parametrize("indent", [None, 2])
def test_json_that_is_one_array(tmp_path, monkeypatch, chunk_bytes, indent):
    """As many datasets of the Hub are, over however many lines, and however it is cut."""
    documents = ["one", "", 'brackets ]}[{ and "quotes"', "a \\ at the end \\", "half \ud83d", "é" * 99, *ODD_TEXTS]
    rows = [{"n": [[1], {"a": "]"}], "text": document} for document in documents]
    rows.append({"text": None})
    source = json.dumps(rows, indent=indent, ensure_ascii=indent is None)
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf \n" + source.encode("utf-8", "surrogatepass") + b"\n\n")
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)

    chunks = list(readers.read_files([path], 0, "text"))

    texts = [text for chunk in chunks for text in chunk.texts]
    assert texts == [document.replace("\ud83d", "\ufffd") for document in documents] + [""]
    assert all(chunk.documents == len(chunk.texts) for chunk in chunks)
    assert len(chunks) > 5 or chunk_bytes > 7
    path.write_text(" [ ] ")
    assert list(readers.read_files([path], 0, "text")) == []


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 23])
@pytest.mark.parametrize(
    "source, message",
    [
        ('[{"text": "a"}, {"text": "b"}', "cut off or damaged after object 2"),
        ('[{"text": "a"}, {"text": "b', "cut off or damaged after object 1"),
        ('[{"text": "a"},', "cut off or damaged after object 1"),
        ('[{"text": "a"},]', "is not an object|damaged after object 1"),
        ('[{"text": "a"}] {"text": "b"}', "cut off or damaged after object 1"),
        ('[{"text": "a"} {"text": "b"}]', "',' is missing before object 2"),
        ('["a"]', "is not an object"),
        ("[", "cut off or damaged after object 0"),
        ('[{"text": "a"}, {"text": 3}]', "object 2 is not an object with text in 'text'; choose .*: text$"),
        ('[{"text": "a"}, {"text" 3}]', "object 2 is not an object with text in 'text'; convert"),
    ],
)
def test_a_damaged_array_is_refused(tmp_path, monkeypatch, source, message, chunk_bytes):
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
    (tmp_path / "a.json").write_text(source)

    with pytest.raises(UserError, match=message):
        list(readers.read_files([tmp_path / "a.json"], 0, "text"))


def test_csv_gives_every_text_as_it_stands(tmp_path):
    """Commas, quotes and line ends in texts; words that other readers take for nothing, for numbers or for dates."""
    odd_texts = ["NA", "null", "1.0", "2020-01-01", 'a "quoted", one', "two\nlines\r\nor three\r", " x "]
    documents = [*make_documents(7), *odd_texts]
    write_csv(tmp_path / "a.csv", documents)
    as_excel_writes_it = b"\xef\xbb\xbftext,n\r\nwith a mark,1\r\n\r\nlast,2\r\n"  # with a byte order mark
    (tmp_path / "b.csv").write_bytes(as_excel_writes_it)

    run_fineweb("--source", tmp_path / "*.csv", "--out", tmp_path / "out")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken([*documents, "with a mark", "last"])


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_files(tmp_path, quick, suffix):
    # Arrange: a file of every format but parquet, whose files are compressed inside, and a text file; all compressed.
    documents = make_documents(9)
    source = tmp_path / "src"
    formats = [name for name in READERS if name != ".parquet"]
    for name in formats:
        write_documents(source / f"a{name}", documents)
    write_text(source / "c.txt", ["\n".join(documents)])
    for path in list(source.iterdir()):
        with COMPRESSORS[suffix](f"{path}{suffix}", "wb") as file:
            file.write(path.read_bytes())
        path.unlink()
    size = ("--shard-size", 5000)  # of tokens: by default a part of the source's bytes, here hardly any

    # All of their documents are there, in shards named after the folder.
    run_fineweb("--source", source / "*", "--out", tmp_path / "out", *size)
    tokens, manifest = read_folder(tmp_path / "out")
    assert tokens.tolist() == encode_with_tiktoken([*documents * len(formats), "\n".join(documents)])
    assert manifest.shards[0].file.startswith("src_val")

    # A single file names the shards, without its suffixes.
    run_fineweb("--source", source / f"a.csv{suffix}", "--out", tmp_path / "named", *size)
    assert (tmp_path / "named" / "a_val_000000.npy").exists()

    # A file that was cut is refused.
    for name in formats:
        cut = source / f"a{name}{suffix}"
        cut.write_bytes(cut.read_bytes()[:-20])
        with pytest.raises(UserError, match=rf"cannot read .*a\{name}\{suffix}"):
            run_fineweb("--source", cut, "--out", tmp_path / f"cut{name}", *size)


@pytest.mark.parametrize(
    "piece, block", [(1, 900), (3, 1000), (50, 333), (readers.PIECE_CHARACTERS, readers.CHUNK_BYTES)]
)
def test_text_file_is_one_document_however_it_is_cut(tmp_path, monkeypatch, piece, block):
    """Pieces and blocks of a few characters: the tokens are still those of the uncut text."""
    text = "\n".join(document[:300] for document in make_documents(4))
    text += " \u3000\u2003 \x1c \x85 tail \r\n\r\n  end\n\n\n"
    write_text(tmp_path / "a.txt", [text])
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", piece)
    monkeypatch.setattr(readers, "CHUNK_BYTES", block)

    with open(tmp_path / "a.txt", "rb") as file:
        chunks = list(readers.read_text(file))

    assert "".join(piece for chunk in chunks for piece in chunk.texts) == text
    assert sum(chunk.documents for chunk in chunks) == 1 and chunks[0].documents == 1
    encoder = tokenizer.bulk_encoder()
    ids = np.concatenate([shard_writer.encode(encoder, chunk)[0] for chunk in chunks])
    assert ids.tolist() == encode_with_tiktoken([text])


@pytest.mark.parametrize("chunk_bytes, shard_size", [(1, 3000), (2000, 2999), (1 << 23, 10**8)])
def test_the_size_of_chunks_and_shards_does_not_change_the_tokens(
    tmp_path, quick, monkeypatch, chunk_bytes, shard_size
):
    documents = make_documents(5)
    write_parquet(tmp_path / "a.parquet", documents, row_group_size=11)
    write_documents_jsonl(tmp_path / "b.jsonl", documents)
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)

    files = (tmp_path / "a.parquet", tmp_path / "b.jsonl")
    run_fineweb("--source", *files, "--out", tmp_path / "out", "--shard-size", shard_size)

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents * 2)


@pytest.mark.parametrize("piece_characters", [1, 50])
@pytest.mark.parametrize("chunk_bytes", [1, 40, 999])
@pytest.mark.parametrize("suffix", READERS)
def test_no_reader_depends_on_where_chunks_end(
    tmp_path, monkeypatch, shared_encoder, suffix, chunk_bytes, piece_characters
):
    # Arrange: short documents, and some that are longer than a chunk, with and without spaces and line ends.
    words = " ".join(f"wörd{i},\n  'and' 🙂" for i in range(80))
    documents = ["first", "", words, 'a "quoted", one\nof two lines', "é" * 1100, "x", words[::-1], "last one"]
    assert max(map(len, documents)) > 999
    path = write_documents(tmp_path / f"a{suffix}", documents)
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", piece_characters)

    # Act
    chunks = readers.read_files([path], 0, "text")
    encoded = list(shard_writer.encode_chunks(shared_encoder, chunks, skip=0))

    # Assert
    ids = np.concatenate([chunk.ids for chunk in encoded]).tolist()
    rule = "yield it as one text, or cut it with _cut_pieces and count only its first piece in Chunk.documents"
    assert ids == encode_with_tiktoken(documents), f"{suffix}: a document breaks where a chunk ends: {rule}"
    assert sum(len(chunk.document_starts) for chunk in encoded) == len(documents)


@pytest.mark.parametrize("suffix", READERS)
def test_no_reader_holds_a_whole_file(tmp_path, monkeypatch, suffix):
    # Arrange: a file of many chunks, whose documents are small and differ, so that parquet cannot store them as one.
    chunk_bytes = 20_000
    documents = [f"document {i} " * 40 for i in range(1000)]
    path = write_documents(tmp_path / f"a{suffix}", documents)
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)

    chunks = list(readers.read_files([path], 0, "text"))

    # A chunk holds little text, and for each chunk little of the file is read.
    rule = f"the reader of {suffix} must yield a chunk for about every CHUNK_BYTES that it reads"
    text_sizes = [sum(map(len, chunk.texts)) for chunk in chunks]
    assert sum(text_sizes) == sum(map(len, documents)) > 20 * chunk_bytes
    assert max(text_sizes) < 3 * chunk_bytes, rule
    assert max(chunk.source_bytes for chunk in chunks) < 5 * chunk_bytes, rule


def test_a_chunk_that_starts_more_documents_than_it_has_texts_raises(shared_encoder):
    with pytest.raises(AssertionError, match="a chunk of 1 texts starts 2 documents"):
        shard_writer.encode(shared_encoder, readers.Chunk(["one"], documents=2))


@pytest.mark.parametrize("limit", [1, 99, 100, 101, 2000])
def test_limit_tokens_is_exact(tmp_path, quick, limit):
    documents = make_documents(6)
    path = write_parquet(tmp_path / "a.parquet", documents)

    run_fineweb("--source", path, "--out", tmp_path / "out", "--shard-size", 100, "--limit-tokens", limit)

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents)[:limit]


@pytest.mark.parametrize("repeats", [2, 30, 5000])
def test_default_shard_size_leaves_val_and_train(tmp_path, quick, repeats):
    write_text(tmp_path / "a.txt", ["To be, or not to be. " * repeats])

    run_fineweb("--source", tmp_path / "a.txt", "--out", tmp_path / "out")

    sizes = [shard.tokens for shard in read_folder(tmp_path / "out")[1].shards]
    assert len(sizes) >= 3
    assert len(str(sizes[0]).rstrip("0")) == 1, "the size is rounded to one digit"


def test_stdlib_as_a_command(tmp_path, run_script, run_in_fork):
    done = run_script("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path, timeout=60)

    # The output tells how much there is and how to train on it.
    tokens, manifest = read_folder(tmp_path / "data")
    assert f"{len(tokens):,} tokens" in done.stdout
    assert "train_gpt2.py quickstart --data-dir data --out-dir log/data --sample-prompt @val" in done.stdout
    assert len(tokens) > 3e6 and len(manifest.shards) > 4

    # The files are the library's, without tests and packages, and shuffled.
    names = [file["path"] for file in manifest.source["files"]]
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    assert names != sorted(names)
    first_file = (Path(os.__file__).parent / names[0]).read_text(encoding="utf-8")
    document = encode_with_tiktoken([first_file])
    assert tokens[: len(document)].tolist() == document

    # The same command finds nothing to do, and the folder is intact.
    again = run_in_fork("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path)
    assert "nothing left to do" in again.stdout
    assert "every shard is intact" in run_in_fork("fineweb.py", "--verify", "data", cwd=tmp_path).stdout


def test_a_million_tokens_of_real_books(tmp_path, shared_data):
    source = shared_data / "books-0*.parquet"
    run_fineweb("--source", source, "--out", tmp_path, "--limit-tokens", 1_000_000)

    first_rows = next(pq.ParquetFile(shared_data / "books-00.parquet").iter_batches(2000, columns=["text"]))
    ids = encode_with_tiktoken(first_rows.column(0).to_pylist())
    assert len(ids) > 1_000_000
    tokens, manifest = read_folder(tmp_path)
    assert tokens.tolist() == ids[:1_000_000]
    assert len(manifest.source["files"]) == 4 and manifest.shard_tokens == 100_000


# ------------------------------------------------------------------------- which reader for which file


@pytest.mark.parametrize("suffix", READERS)
def test_every_suffix_of_READERS_is_parsed(tmp_path, quick, suffix):
    documents = ["one", "two, with a comma", 'and "three"']
    path = write_documents(tmp_path / f"a{suffix}", documents)

    run_fineweb("--source", path, "--out", tmp_path / "out")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents)


def test_every_suffix_of_READERS_has_a_writer_here_and_no_other_does():
    missing = READERS.keys() - WRITERS.keys()
    assert not missing, f"add a writer for {missing} to WRITERS in tests/test_fineweb.py"
    unread = WRITERS.keys() - READERS.keys()
    assert not unread, f"nothing reads {unread}: remove it from WRITERS in tests/test_fineweb.py"


def test_the_order_of_READERS_is_the_preference_for_hub_datasets():
    suffixes = list(READERS)
    assert suffixes[0] == ".parquet", "parquet is what most datasets have, and what the Hub converts others to"
    assert suffixes[-1] == ".json", "add new suffixes before .json, as datasets have metadata in .json files"


@pytest.mark.parametrize("suffix", READERS)
def test_every_suffix_of_READERS_is_in_the_help_and_in_docs_data(capsys, suffix):
    with pytest.raises(SystemExit):
        run_fineweb("--help")
    options = capsys.readouterr().out.split("show this help message", 1)[1]  # below the description, which has examples
    source_help = options[options.index("--source") : options.index("--out")]
    page = (ROOT / "docs" / "data.md").read_text()

    name = suffix.removeprefix(".")
    assert name in re.findall(r"\w+", source_help), f"add {name} to the help of --source in fineweb.py"
    assert name in re.findall(r"\w+", page), f"add {name} to docs/data.md"


@pytest.mark.parametrize("suffix", ["", *TEXT_SUFFIXES, ".TXT", ".R"])
def test_every_suffix_of_TEXT_SUFFIXES_and_none_is_plain_text(suffix):
    assert readers.choose_reader(Path(f"a{suffix}")) is readers.read_text


def test_plain_text_is_not_parsed(tmp_path, quick):
    text = '{"text": "in a text file"}\n'
    write_text(tmp_path / "a.py", [text])

    run_fineweb("--source", tmp_path / "a.py", "--out", tmp_path / "out")

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken([text])


def test_a_suffix_in_capitals_is_the_same_suffix(tmp_path, quick):
    documents = ["one", "two"]
    write_documents_jsonl(tmp_path / "a.jsonl", documents)
    with gzip.open(tmp_path / "A.JSONL.GZ", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())

    run_fineweb("--source", tmp_path / "A.JSONL.GZ", "--out", tmp_path / "out", "--shard-size", 5)

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(documents)
    assert (tmp_path / "out" / "A_val_000000.npy").exists()


UNKNOWN_SUFFIXES = ".tsv .xml .yaml .html .arrow .feather .orc .avro .xlsx .pdf .zip .tar.gz .dat .md5".split()


@pytest.mark.parametrize("suffix", UNKNOWN_SUFFIXES)
def test_any_other_suffix_is_refused_before_anything_is_made(tmp_path, quick, suffix):
    write_text(tmp_path / "a.txt", ["good text"])
    write_text(tmp_path / f"b{suffix}", ["n\ttext\n1\tvalid UTF-8\n"])

    with pytest.raises(UserError) as error:
        run_fineweb("--source", tmp_path / "a.txt", tmp_path / f"b{suffix}", "--out", tmp_path / "out")

    message = str(error.value)
    assert f"b{suffix}: the suffix {suffix.removesuffix('.gz')} is unknown" in message
    for known in (*READERS, *TEXT_SUFFIXES, *COMPRESSIONS):
        assert known in message
    assert "convert it to .jsonl" in message and "rename it to end in .txt" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", TOKEN_SUFFIXES)
def test_tokens_are_not_taken_for_text(tmp_path, suffix):
    (tmp_path / f"train{suffix}").write_bytes(b"\x27\0\x0b\0" * 9)  # nanoGPT's tokens of characters: valid UTF-8

    with pytest.raises(UserError, match=rf"train\{suffix}: it holds tokens.*--data-dir"):
        run_fineweb("--source", tmp_path / f"train{suffix}", "--out", tmp_path / "out")


def test_no_suffix_has_two_readers():
    kinds = [*READERS, *TEXT_SUFFIXES, *TOKEN_SUFFIXES, *COMPRESSIONS]
    assert len(kinds) == len(set(kinds)) and all(suffix == suffix.lower() for suffix in kinds)


def test_a_compression_that_nothing_opens_raises(tmp_path, monkeypatch):
    write_text(tmp_path / "a.txt.lz4", ["text"])
    monkeypatch.setattr(readers, "COMPRESSIONS", (*COMPRESSIONS, ".lz4"))

    with pytest.raises(UserError, match=r"compression '\.lz4' is not one of"):
        run_fineweb("--source", tmp_path / "a.txt.lz4", "--out", tmp_path / "out")


# ------------------------------------------------------------------------- killed and run again


class Killed(BaseException):
    """Ends a run in this process as a kill would: nothing catches it."""


@pytest.fixture
def mixed_source(tmp_path):
    """Arguments for a source of every kind, whose documents run over shards and whose shards run over files."""
    folder = tmp_path / "src"
    files = [
        write_parquet(folder / "p0.parquet", make_documents(0, 20), row_group_size=9),
        write_parquet(folder / "p1.parquet", make_documents(1, 20), row_group_size=9),
    ]
    write_text(folder / "t.txt", ["\n".join(make_documents(10, 20))])
    write_text(folder / "u.txt", ["short"])
    files += [folder / "t.txt", folder / "u.txt"]
    other_formats = [suffix for suffix in READERS if suffix != ".parquet"]
    for i, suffix in enumerate(other_formats):
        files.append(write_documents(folder / f"v{suffix}", make_documents(11 + i, 5)))
    return ["--source", *files, "--shard-size", 20_000]


def crash_at(write, after_rename):
    """An os.replace that crashes before or after its call number `write`."""
    real_replace = os.replace
    calls = 0

    def replace_or_crash(*args):
        nonlocal calls
        calls += 1
        if calls == write and not after_rename:
            raise Killed
        real_replace(*args)
        if calls == write:
            raise Killed

    return replace_or_crash


@pytest.mark.parametrize("suffix", READERS)
def test_every_format_is_resumed_in_the_middle_of_a_file(tmp_path, quick, monkeypatch, suffix):
    # Arrange: the folder of a run without a crash, in chunks and shards that are much smaller than the file.
    path = write_documents(tmp_path / f"a{suffix}", make_documents(12, 10))
    monkeypatch.setattr(readers, "CHUNK_BYTES", 999)
    args = ("--source", path, "--shard-size", 2000)
    run_fineweb(*args, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")

    # Every run crashes before it renames its fourth file, the second new shard or its manifest, until little is left.
    crashes = 0
    finished = False
    while not finished:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash_at(4, after_rename=False))
            try:
                run_fineweb(*args, "--out", tmp_path / "out")
                finished = True
            except Killed:
                crashes += 1
        assert crashes < len(expected), "a run adds no shard to those of the run before"

    # Its shards are those of the run without a crash.
    assert crashes >= 3
    rule = f"the reader of {suffix} must yield the same documents again when it is called again"
    assert without_partial_files(read_bytes(tmp_path / "out")) == expected, rule


def test_a_crash_at_every_write_changes_nothing(tmp_path, mixed_source, quick, monkeypatch):
    # Arrange: the folder of a run without a crash. A file is written by renaming it, so renames are counted: one per
    # shard and per manifest, the first and the last manifest included.
    run_fineweb(*mixed_source, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")
    writes = 2 * (len(shards.read_manifest(tmp_path / "expected").shards) + 1)
    assert writes > 8

    for write in range(1, writes + 1):
        for after_rename in (False, True):
            out = tmp_path / f"{write}{after_rename}"

            # The run crashes, and the same command then finishes the folder.
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", crash_at(write, after_rename))
                with pytest.raises(Killed):
                    run_fineweb(*mixed_source, "--out", out)
            run_fineweb(*mixed_source, "--out", out)

            assert without_partial_files(read_bytes(out)) == expected, (write, after_rename)
            shutil.rmtree(out)


def test_sigkill_and_sigint_then_again_is_byte_identical(tmp_path, start_script):
    args = ("--source", "stdlib", "--limit-tokens", 1_000_000, "--shard-size", 50_000)
    run_fineweb(*args, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")
    out = tmp_path / "out"

    # Killed once early and once late, each time when a certain shard appears: while it works.
    for index, signal_number in ((2, signal.SIGKILL), (14, signal.SIGINT)):
        script = start_script("fineweb.py", *args, "--out", out)
        assert script.wait_until((out / f"stdlib_train_{index:06d}.npy").exists), script.output
        assert script.send(signal_number)
        assert "Traceback" not in script.wait().output, script.output
        assert without_partial_files(read_bytes(out)).keys() <= expected.keys()

    run_fineweb(*args, "--out", out)
    assert read_bytes(out) == expected


def test_two_runs_on_one_folder(tmp_path):
    write_text(tmp_path / "a.txt", ["some text"])

    with lock_folder(tmp_path / "out"), pytest.raises(UserError, match="in use by another process"):
        run_fineweb("--source", tmp_path / "a.txt", "--out", tmp_path / "out")

    assert read_bytes(tmp_path / "out") == {}


def test_other_parameters_are_refused_by_name(tmp_path):
    write_text(tmp_path / "a.txt", ["a text " * 100])
    write_text(tmp_path / "b.txt", ["b text " * 100])

    def run(**changes):
        flags = {"source": tmp_path / "a.txt", "shard_size": 50, "limit_tokens": 150, "format": "npy", **changes}
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
        run_fineweb(*words, "--out", tmp_path / "out")

    # The same parameters twice are accepted.
    run()
    before = read_bytes(tmp_path / "out")
    run()

    for change, message in (
        ({"source": tmp_path / "b.txt"}, "name a, not b"),
        ({"shard_size": 60}, "shard_tokens 50, not 60"),
        ({"limit_tokens": 160}, "limit_tokens 150, not 160"),
        ({"format": "bin"}, "format npy, not bin"),
        ({"text_column": "body"}, "column text, not body"),
    ):
        with pytest.raises(UserError, match=message):
            run(**change)

    # A file of the same name and size with other content is another revision.
    write_text(tmp_path / "a.txt", ["x text " * 100])
    with pytest.raises(UserError, match="was made with revision"):
        run()
    assert read_bytes(tmp_path / "out") == before


def test_a_corrected_command_may_use_the_folder_of_one_that_failed(tmp_path):
    document = "some text of several tokens"
    write_documents_jsonl(tmp_path / "a.jsonl", [document], field="body")
    with pytest.raises(UserError, match="--text-column"):
        run_fineweb("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out")

    flags = ("--text-column", "body", "--shard-size", 3)
    run_fineweb("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", *flags)

    assert read_tokens(tmp_path / "out") == encode_with_tiktoken([document])


def test_files_of_others_are_left_alone(tmp_path):
    write_text(tmp_path / "a.txt", ["some text " * 100])
    out = tmp_path / "out"
    out.mkdir()
    foreign = out / "a_train_000001.npy"
    foreign.write_bytes(b"foreign")

    # A shard that no manifest lists is not overwritten; the message says how shards of another program are kept.
    with pytest.raises(UserError, match=rf"not written by this command.*fineweb\.py --verify {out}"):
        run_fineweb("--source", tmp_path / "a.txt", "--out", out)

    # A file of another name is no obstacle.
    foreign.rename(out / "notes.txt")
    run_fineweb("--source", tmp_path / "a.txt", "--out", out)
    assert (out / "notes.txt").read_bytes() == b"foreign"

    # A shard of its own that was damaged is named.
    (out / "a_train_000001.npy").write_bytes(b"damaged")
    with pytest.raises(UserError, match="000001"):
        run_fineweb("--source", tmp_path / "a.txt", "--out", out)


def test_a_removed_shard_comes_back_with_the_same_bytes(tmp_path, mixed_source, quick, monkeypatch):
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    expected = read_bytes(out)
    files = shards.shard_files(out)

    def crash(*args):
        raise Killed

    # The first, some, or the last shard; also after a crash while it is made again.
    for removed in (files[:1], [files[0], files[2]], files[-1:]):
        for path in removed:
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash)
            with pytest.raises(Killed):
                run_fineweb(*mixed_source, "--out", out)
        run_fineweb(*mixed_source, "--out", out)
        assert read_bytes(out) == expected
        assert not (out / ".remake").exists()


def test_a_copy_of_an_unfinished_folder_is_resumed(tmp_path, mixed_source, quick, monkeypatch):
    """As a notebook leaves it in a mounted Drive: shards, then the manifest, copied while they were written."""
    # Arrange: a run that was cut off, and a copy of its folder.
    run_fineweb(*mixed_source, "--out", tmp_path / "expected")
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", crash_at(12, after_rename=False))
        run_fineweb(*mixed_source, "--out", tmp_path / "notebook")
    drive = tmp_path / "drive"
    shutil.copytree(tmp_path / "notebook", drive, ignore=shutil.ignore_patterns(".*"))

    # The copy has a part of a file, and lacks a shard that was written between the copies of shards and manifest.
    (drive / "src_train_000009.npy.part").write_bytes(b"part")
    listed = shards.read_manifest(drive).shards
    assert len(listed) > 3
    (drive / listed[-1].file).unlink()

    # Act: on another disk, and in the Drive itself.
    shutil.copytree(drive, tmp_path / "next-notebook")
    for out in (tmp_path / "next-notebook", drive):
        run_fineweb(*mixed_source, "--out", out)
        assert without_partial_files(read_bytes(out)) == read_bytes(tmp_path / "expected")


@pytest.mark.slow
def test_the_notebook_cell_that_keeps_tokens_in_a_drive(tmp_path):
    """The cell of docs/data.md: cut off, its disk lost, and run again. The Drive is a folder."""
    # Arrange: the cell, with a source that needs no network and with short sleeps.
    page = (ROOT / "docs" / "data.md").read_text()
    lines = re.search(r"^    %%bash\n((?:    .*\n)+)", page, re.M)[1]
    drive = tmp_path / "drive" / "fineweb-edu"
    fineweb_here = f"{sys.executable} {ROOT}/fineweb.py --source stdlib --out data/fineweb-edu --shard-size 200000"
    cell = lines.replace("/content/drive/MyDrive", str(drive.parent)).replace("sleep 600", "sleep 0.1")
    cell = cell.replace("python fineweb.py", fineweb_here)

    # Act: the first notebook is lost when some shards are in the Drive; the second one ends.
    (tmp_path / "first").mkdir()
    notebook = subprocess.Popen(["bash", "-c", cell], cwd=tmp_path / "first", start_new_session=True)
    while len(list(drive.glob("*.npy"))) < 3 or not (drive / "manifest.json").exists():
        assert notebook.poll() is None
        time.sleep(0.01)
    os.killpg(notebook.pid, signal.SIGKILL)
    notebook.wait()
    assert not shards.read_manifest(drive).complete
    (tmp_path / "second").mkdir()
    subprocess.run(["bash", "-c", cell], cwd=tmp_path / "second", check=False)

    # Assert
    run_fineweb("--source", "stdlib", "--out", tmp_path / "expected", "--shard-size", "200000")
    for folder in (drive, tmp_path / "second" / "data" / "fineweb-edu"):
        assert without_partial_files(read_bytes(folder)) == read_bytes(tmp_path / "expected")


def test_a_shard_that_was_cut_must_be_removed_first(tmp_path, mixed_source, quick):
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    path = shards.shard_files(out)[1]
    path.write_bytes(path.read_bytes()[:-2])

    with pytest.raises(UserError, match="Remove it, and run the command that made or pulled the folder again"):
        run_fineweb(*mixed_source, "--out", out)


def test_a_shard_is_not_replaced_by_one_with_other_bytes(tmp_path, mixed_source, quick):
    # Arrange: the manifest promises another hash, as if the source gave other text than it did.
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    path = shards.shard_files(out)[1]
    path.unlink()
    manifest = shards.read_manifest(out)
    entries = [replace(s, sha256="0" * 64) if s.file == path.name else s for s in manifest.shards]
    shards.write_manifest(out, replace(manifest, shards=entries))

    with pytest.raises(UserError, match="the source has changed"):
        run_fineweb(*mixed_source, "--out", out)

    assert not path.exists()


@pytest.mark.parametrize(
    "file_names, shard_name",
    [
        (("books-00.txt", "books-01.txt"), "books"),
        (("alpha.txt", "apple.txt"), "texts"),
        (("one day.txt",), "one-day"),
        (("2024.txt",), "texts"),
    ],
)
def test_shards_are_called_what_the_files_are_called(tmp_path, monkeypatch, quick, file_names, shard_name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in file_names:
        write_text(tmp_path / "texts" / name, ["some text " * 100])

    run_fineweb("--source", "texts/*.txt", "--shard-size", 100)

    names = {path.name.split("_")[0] for path in shards.shard_files(tmp_path / "data" / shard_name)}
    assert names == {shard_name}


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_runs_ahead_by_its_depth_and_no_more(depth):
    produced = []

    def items():
        for i in range(9):
            produced.append(i)
            yield i
        raise OSError("the end")

    def produced_after_a_while():
        time.sleep(0.05)  # the thread has come to rest
        return len(produced)

    fetched = prefetch(items(), depth)
    assert next(fetched) == 0 and produced_after_a_while() == 1 + depth
    assert next(fetched) == 1 and produced_after_a_while() == 2 + depth

    # The others come in order, and then the error of the thread.
    for i in range(2, 9):
        assert next(fetched) == i
    with pytest.raises(OSError, match="the end"):
        next(fetched)


def test_prefetch_of_nothing_ends():
    assert list(prefetch([], 2)) == []


# ------------------------------------------------------------------------- --verify


def write_foreign_shards(folder, suffix="npy"):
    """Shards as build-nanogpt and llm.c write them: without a manifest, the last one shorter."""
    folder.mkdir()
    for name, size in (("web_val_000000", 900), ("web_train_000001", 900), ("web_train_000002", 70)):
        shards.write_shard(folder / f"{name}.{suffix}", np.array([tokenizer.EOT, *range(size - 1)]))
    return folder


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_verify_writes_the_manifest_that_is_missing_and_says_so(tmp_path, capsys, suffix):
    folder = write_foreign_shards(tmp_path / "web", suffix)
    before = read_bytes(folder)

    run_fineweb("--verify", folder)

    # The manifest is new, the shards are as they were.
    assert "wrote manifest.json: 1,870 tokens, 3 documents, 3 shards in" in capsys.readouterr().out
    after = read_bytes(folder)
    assert after.keys() - before.keys() == {"manifest.json"} and after.items() >= before.items()

    # From now on it is used, and stays as it is.
    run_fineweb("--verify", folder)
    assert "every shard is intact" in capsys.readouterr().out
    assert read_bytes(folder) == after
    path = folder / f"web_train_000001.{suffix}"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"(?s)000001.*has sha256.*1 problem"):
        run_fineweb("--verify", folder)
    assert (folder / "manifest.json").read_bytes() == after["manifest.json"]


def test_the_command_that_verify_prints_repairs_the_folder(tmp_path, quick, monkeypatch):
    # Arrange: a folder of this Python's library, here three files. One shard is cut, one is gone, one is foreign.
    for name, words in (("a", "alpha "), ("b", "beta "), ("c", "gamma ")):
        (tmp_path / f"{name}.py").write_text(words * 300)
    library = {path: path.name for path in sorted(tmp_path.glob("*.py"))}
    monkeypatch.setattr(sources, "find_library_files", lambda: library)
    out = tmp_path / "my data"
    run_fineweb("--source", "stdlib", "--out", out, "--shard-size", 200, "--format", "bin", "--limit-tokens", 700)
    made = read_bytes(out)
    cut, gone, *_ = sorted(name for name in made if "train" in name)
    (out / cut).write_bytes(made[cut][:-2])
    (out / gone).unlink()
    (out / "mine_train_000001.bin").write_bytes(b"precious")

    # Act: run what is printed, in a shell but for fineweb.py.
    with pytest.raises(UserError) as error:
        run_fineweb("--verify", out)
    *in_shell, python = re.search(r"To repair it:\n  (.*)", str(error.value))[1].split(" && ")
    subprocess.run(["bash", "-c", " && ".join(in_shell)], check=True)
    program, script, *words = shlex.split(python)
    assert (program, script) == ("python", "fineweb.py")
    run_fineweb(*words)

    # Assert: every shard is as it was, and the foreign one still exists.
    run_fineweb("--verify", out)
    assert read_bytes(out) == made
    assert (out / "not-in-manifest.json" / "mine_train_000001.bin").read_bytes() == b"precious"


@pytest.mark.parametrize("flags", [
    "--source fineweb-edu-100bt",
    "--source HuggingFaceFW/fineweb-edu --subset sample/100BT/",
    "--source OWNER/NAME --subset en --split test --format bin --text-column content --limit-tokens 5000",
    "--source OWNER/NAME --split-on '<|endoftext|>'",
])  # fmt: skip
def test_the_command_that_made_a_folder_follows_from_its_manifest(tmp_path, flags):
    # Arrange: the manifest that a command with these flags begins.
    def plan(words):
        args = tyro.cli(fineweb.Args, args=words)
        name, _ = sources.choose_source(args.source)
        repo, default_subset = sources.HUB_DATASETS.get(args.source[0], (args.source[0], ""))
        source = {"name": repo, "subset": args.subset or default_subset, "revision": "1", "files": [{"bytes": 10**9}]}
        if "/" not in source["subset"]:
            source["split"] = args.split or "train"
        return name, fineweb.plan_manifest(args, source)

    name, made = plan(shlex.split(flags))
    made = replace(made, shards=[shards.Shard(f"{name}_val_000000.npy", 1, 1, "0" * 64, {})])

    # Act
    command = fineweb.make_command(tmp_path, made)

    # Assert: the command continues that folder.
    again_name, planned = plan(shlex.split(command)[2:])
    assert again_name == name
    assert fineweb.load_or_start(tmp_path, name, planned, made) is made


def test_the_repair_of_the_users_own_files_names_what_to_remove(tmp_path, mixed_source, quick):
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    path = shards.shard_files(out)[1]
    path.write_bytes(path.read_bytes()[:-2])

    with pytest.raises(UserError, match=rf"To repair it:\n  rm {path}\nRun the command that made the folder"):
        run_fineweb("--verify", out)


def test_verify_writes_no_manifest_for_bad_shards(tmp_path):
    folder = write_foreign_shards(tmp_path / "web")
    (folder / "web_train_000001.npy").write_bytes(b"junk")
    shards.write_shard(folder / "web_train_000002.npy", np.array([7, 50257]))

    with pytest.raises(UserError, match=r"(?s)000001.*not a usable shard.*000002.*id 50257"):
        run_fineweb("--verify", folder)

    assert not (folder / "manifest.json").exists()


def test_verify_says_that_a_folder_cannot_be_written_to(tmp_path, monkeypatch):
    folder = write_foreign_shards(tmp_path / "web")

    def refuse(data_dir, manifest):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shards, "write_manifest", refuse)
    with pytest.raises(UserError, match=r"no manifest\.json, and it cannot be written: Read-only file system"):
        run_fineweb("--verify", folder)


# ------------------------------------------------------------------------- bad input


def test_bad_sources_are_refused(tmp_path, quick):
    write_parquet(tmp_path / "good.parquet", ["x"])
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "good.parquet").read_bytes()[:-9])
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"text": 3}\n')
    (tmp_path / "bare.jsonl").write_text("{}\n")
    (tmp_path / "broken.jsonl").write_text('{"text": "x"}\n{"text": \n')
    (tmp_path / "latin.txt").write_bytes("caf\xe9 ".encode("latin-1") * 9)
    (tmp_path / "none.jsonl").write_text("\n\n")
    (tmp_path / "long.csv").write_text("n,text\n1,a\n2,b,c\n")
    (tmp_path / "open.csv").write_text('n,text\n1,"a\n')
    (tmp_path / "dir").mkdir()
    for args, message in (
        ([tmp_path / "missing.txt"], r"missing\.txt.*stdlib"),
        ([tmp_path / "no*.csv"], r"no\*\.csv"),
        ([tmp_path / "dir"], "not a readable file"),
        (["stdlib", tmp_path / "good.parquet"], "--source stdlib"),
        ([tmp_path / "good.parquet", "--text-column", "id"], "'id' is int64.*id, text$"),
        ([tmp_path / "good.parquet", "--text-column", "body"], "'body' is missing"),
        ([tmp_path / "cut.parquet"], r"cannot read .*cut\.parquet"),
        ([tmp_path / "bad.jsonl"], r"bad\.jsonl: line 2 .*'text'; choose a field with --text-column: text$"),
        (
            [tmp_path / "bad.jsonl", "--text-column", "body"],
            "line 1 .*'body'; choose a field with --text-column: text$",
        ),
        ([tmp_path / "bare.jsonl"], "line 1 .*'text'; convert it or leave it out$"),
        ([tmp_path / "broken.jsonl"], "line 2 .*'text'; convert it or leave it out$"),
        ([tmp_path / "latin.txt"], r"latin\.txt.*utf-8"),
        ([tmp_path / "none.jsonl"], "holds no documents"),
        ([tmp_path / "long.csv"], r"long\.csv: line 3 has 3 fields, but the first line has 2; convert"),
        ([tmp_path / "open.csv"], r"open\.csv: unexpected end"),
        ([tmp_path / "long.csv", "--text-column", "body"], "'body' is missing.*n, text$"),
        ([tmp_path / "good.parquet", "--shard-size", 0], "--shard-size"),
        ([tmp_path / "good.parquet", "--limit-tokens", -5], "--limit-tokens"),
        ([], "--source"),
    ):
        out = tmp_path / "out"
        with pytest.raises(UserError, match=message):
            run_fineweb("--source", *args, "--out", out)
        assert not list(out.glob("*_*")), args
        shutil.rmtree(out, ignore_errors=True)


def test_a_full_disk_is_reported_before_the_work(tmp_path, monkeypatch):
    write_text(tmp_path / "a.txt", ["x"])
    one_gigabyte_free = shutil._ntuple_diskusage(10**12, 10**12, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: one_gigabyte_free)

    with pytest.raises(UserError, match=r"about 4\.0 GB .* 1\.0 GB free"):
        run_fineweb("--source", tmp_path / "a.txt", "--out", tmp_path / "out", "--limit-tokens", 2 * 10**9)


def test_commands_fail_with_one_message(tmp_path, expect_failure):
    expect_failure("fineweb.py", "--source", tmp_path / "none.txt", mentions=["none.txt", "stdlib"], cwd=tmp_path)
    expect_failure("fineweb.py", "--verify", tmp_path / "none", mentions=["does not exist", "python fineweb.py"])
    expect_failure("fineweb.py", "--sauce", "x", mentions=["--sauce"])

    (tmp_path / "file").write_text("x")
    inside_a_file = tmp_path / "file" / "sub"
    expect_failure("fineweb.py", "--source", "stdlib", "--out", inside_a_file, mentions=["cannot write to"])

    assert not list(tmp_path.glob("*/*"))


def test_help_is_quick(run_script):
    start = time.time()
    run_script("fineweb.py", "--help")
    assert time.time() - start < 3  # well under a second on an idle machine


# ------------------------------------------------------------------------- from the Hub


@pytest.fixture
def hub(tmp_path):
    """A Hub with a dataset of five parquet files under sample/, which hold hub.documents, and one beside them."""
    with hub_server.start(tmp_path / "hub") as server:
        repo = tmp_path / "hub" / "datasets" / "owner" / "web"
        server.documents = []
        for i in range(5):
            documents = make_documents(20 + i, 30)
            write_parquet(repo / "sample" / f"{i:03d}_00000.parquet", documents)
            server.documents += documents
        write_parquet(repo / "other" / "x.parquet", ["not this"])
        (repo / "README.md").write_text("a dataset")
        yield server


HUB_SOURCE = ("--source", "owner/web", "--subset", "sample/")


@pytest.fixture
def use_hub(tmp_path, monkeypatch):
    """use_hub(server): from now on that is the Hub of this process, for huggingface_hub and `datasets`."""
    import datasets.config
    from huggingface_hub import constants

    def use(server):
        # Both read their environment at import, which takes seconds, once for all tests: set what they have read.
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        home = tmp_path / "hf-home"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(
            datasets.config, "HUB_DATASETS_URL", f"{server.url}/datasets/{{repo_id}}/resolve/{{revision}}/{{path}}"
        )
        for name in ("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "DOWNLOADED_DATASETS_PATH", "EXTRACTED_DATASETS_PATH"):
            monkeypatch.setattr(datasets.config, name, home / name)

    return use


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


def test_hub_files_are_downloaded_ahead_by_one_and_deleted(tmp_path, hub, use_hub, capsys):
    use_hub(hub)
    out = tmp_path / "out"
    args = (*HUB_SOURCE, "--shard-size", 20_000, "--out")
    hub.faults.append(hub_server.Fault("drop", "resolve", times=1))

    # A dropped connection is retried, and at most two files are on the disk at a time.
    with DownloadWatcher(out / ".source" / "sample") as watcher:
        run_fineweb(*args, out)
    tokens, manifest = read_folder(out)
    assert tokens.tolist() == encode_with_tiktoken(hub.documents)
    assert 1 <= watcher.most <= 2 and not (out / ".source").exists()
    assert len(manifest.source["revision"]) == 40 and len(manifest.source["files"]) == 5

    # A finished folder asks the Hub nothing.
    before = read_bytes(out)
    requests = len(hub.log)
    run_fineweb(*args, out)
    assert "nothing left" in capsys.readouterr().out
    assert read_bytes(out) == before and len(hub.log) == requests

    # A removed shard is downloaded and made again.
    (out / "web_train_000002.npy").unlink()
    run_fineweb(*args, out)
    assert "making it again" in capsys.readouterr().out
    assert read_bytes(out) == before

    # With --keep-source the downloads stay; the shards are the same.
    kept = tmp_path / "kept"
    run_fineweb(*args, kept, "--keep-source")
    assert len(list((kept / ".source").glob("sample/*.parquet"))) == 5
    assert read_bytes(kept) == before


def test_hub_datasets_of_other_formats(tmp_path, card_hub, run_commands):
    """Without parquet, jsonl is taken, also compressed; without that, csv. One format, not all that are there."""
    repo = tmp_path / "hub" / "datasets" / "owner" / "lines"
    (repo / "data").mkdir(parents=True)
    write_csv(repo / "scores.csv", ["not this"])
    for i in range(2):
        with gzip.open(repo / "data" / f"{i}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps({"text": document}) + "\n" for document in make_documents(30 + i, 5))

    cases = {"": make_documents(30, 5) + make_documents(31, 5), "scores": ["not this"]}
    run_commands(
        [("--source", "owner/lines", "--subset", subset, "--out", tmp_path / f"out{subset}") for subset in cases]
    )

    for subset, documents in cases.items():
        assert read_tokens(tmp_path / f"out{subset}") == encode_with_tiktoken(documents)
        assert not (tmp_path / f"out{subset}" / ".source").exists()


def test_hub_killed_and_run_again(tmp_path, hub, use_hub, start_script):
    out = tmp_path / "out"
    args = (*HUB_SOURCE, "--shard-size", 5_000, "--out", out)

    # Killed while the first file is downloaded, and while shards are written.
    for name in (".source", "web_train_000006.npy"):
        script = start_script("fineweb.py", *args, env=hub.env())
        assert script.wait_until((out / name).exists), script.output
        assert script.send(signal.SIGKILL)
        script.wait()

    use_hub(hub)
    run_fineweb(*args)
    assert read_tokens(out) == encode_with_tiktoken(hub.documents)


def test_a_hub_out_of_reach_is_reported_soon(tmp_path, expect_failure):
    start = time.time()
    away = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    expect_failure("fineweb.py", env=away, cwd=tmp_path, mentions=["fineweb-edu", "127.0.0.1:9", "--source stdlib"])
    assert time.time() - start < 15


def test_a_hub_without_the_dataset_is_reported(tmp_path, hub, expect_failure):
    def expect(source, mentions, **env):
        expect_failure("fineweb.py", *source, "--out", tmp_path / "out", env={**hub.env(), **env}, mentions=mentions)

    expect(["--source", "owner/none"], ["owner/none", "auth login"])
    expect(["--source", "owner/web", "--subset", "nowhere/"], ["owner/web", "--subset"])
    expect(["--source", "owner/web"], ["offline", "stdlib"], HF_HUB_OFFLINE="1")

    # A proxy's page in place of the API's answer.
    hub.faults.append(hub_server.Fault("html", "/api/datasets"))
    expect(["--source", "owner/web"], ["owner/web"])


def test_a_hostile_listing_leads_nowhere(tmp_path, hub, use_hub):
    use_hub(hub)
    hub.extra_tree.append({"type": "file", "path": "sample/../../../x.parquet", "size": 1, "oid": "0" * 40})

    run_fineweb(*HUB_SOURCE, "--out", tmp_path / "out", "--limit-tokens", "9")

    assert all(".." not in file["path"] for file in shards.read_manifest(tmp_path / "out").source["files"])


# ------------------------------------------------------------------------- as the page of a dataset defines it


def write_repo(tmp_path, name, files, card=""):
    """A dataset on the Hub: {path: documents} in the formats of WRITERS, and a card that begins with this YAML."""
    repo = tmp_path / "hub" / "datasets" / "owner" / name
    for path, documents in files.items():
        write_documents(repo / path, documents)
    if card:
        (repo / "README.md").write_text(f"---\n{card}---\n# A dataset\n")
    return repo


# Two configurations, three splits. Only the card says which files are whose; the order of the patterns is not by name.
CARD = """
configs:
- config_name: english
  data_files:
  - split: train
    path: [part-b/*.parquet, part-a/*.parquet]
  - split: validation
    path: held-out/one.parquet
  - split: test
    path: held-out/two.parquet
- config_name: french
  data_files:
  - split: train
    path: fr/*.parquet
"""
CARD_FILES = {
    "part-a/0.parquet": ["a zero"],
    "part-a/1.parquet": ["a one"],
    "part-b/0.parquet": ["b zero"],
    "held-out/one.parquet": ["validation"],
    "held-out/two.parquet": ["test"],
    "fr/0.parquet": ["du texte"],
    "fr-old/0.parquet": ["vieux"],
}


@pytest.fixture
def card_hub(tmp_path):
    """A Hub with owner/card, whose card is CARD."""
    with hub_server.start(tmp_path / "hub") as server:
        write_repo(tmp_path, "card", CARD_FILES, CARD)
        yield server


@pytest.fixture
def run_commands(card_hub, use_hub):
    """run_commands([flags of fineweb.py, ...]) -> what each command printed, its error included, with card_hub as the
    Hub."""
    use_hub(card_hub)

    def run(commands):
        outputs = []
        for arguments in commands:
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                try:
                    run_fineweb(*arguments)
                except UserError as error:
                    print(f"error: {error}")
            outputs.append(output.getvalue())
        return outputs

    return run


def test_the_card_of_a_dataset_says_which_files_a_split_has(tmp_path, card_hub, run_commands):
    # (flags, documents, configuration and split in the manifest); a path has no configuration.
    cases = [
        (("--subset", "english"), ["b zero", "a zero", "a one"], ("english", "train")),
        (("--subset", "english", "--split", "validation"), ["validation"], ("english", "validation")),
        (("--subset", "french"), ["du texte"], ("french", "train")),
        (("--subset", "fr/"), ["du texte"], (None, None)),
        (("--subset", "fr"), ["vieux", "du texte"], (None, None)),
    ]
    commands = [("--source", "owner/card", "--out", tmp_path / str(i), *cases[i][0]) for i in range(len(cases))]

    other_split = (*commands[0], "--split", "test")
    other_subset = (*commands[0][:-1], "part-a/")

    outputs = run_commands([*commands, other_split, other_subset])

    for i, (flags, documents, choice) in enumerate(cases):
        tokens, manifest = read_folder(tmp_path / str(i))
        assert tokens.tolist() == encode_with_tiktoken(documents)
        source = manifest.source
        assert (source.get("config"), source.get("split")) == choice
        assert source["subset"] == flags[1] and len(source["revision"]) == 40 and "reader" not in source

    # Another choice needs another folder.
    assert "made with split train, not test" in outputs[-2]
    assert "made with subset english, not part-a/" in outputs[-1]

    # A finished folder asks the Hub nothing, and keeps its bytes.
    before = read_bytes(tmp_path / "0")
    requests = len(card_hub.log)
    assert "nothing left" in run_commands(commands[:1])[0]
    assert read_bytes(tmp_path / "0") == before and len(card_hub.log) == requests


def test_a_choice_that_the_page_does_not_offer_is_an_error_that_lists_what_it_does(tmp_path, run_commands):
    # Arrange: datasets with a script in place of a card, with files elsewhere, and with a card that is none.
    marker = tmp_path / "marker"
    script = write_repo(tmp_path, "script", {"x/a.parquet": ["text"]}) / "script.py"
    script.write_text(f"open({str(marker)!r}, 'w')")
    (tmp_path / "text.txt").write_text("text")
    elsewhere = f"configs:\n- config_name: x\n  data_files: {tmp_path / 'text.txt'}\n"
    write_repo(tmp_path, "elsewhere", {"a.parquet": ["text"]}, elsewhere)
    write_repo(tmp_path, "broken", {"a.parquet": ["text"]}, "configs: 3\n")
    write_repo(tmp_path, "tables", {})
    (tmp_path / "hub/datasets/owner/tables").mkdir(parents=True)
    (tmp_path / "hub/datasets/owner/tables/a.h5").write_bytes(b"hdf5")
    cases = [
        ("owner/card", (), ["several configurations", "--subset: english, french"]),
        ("owner/card", ("--subset", "german"), ["'german'", "--subset: english, french"]),
        ("owner/card", ("--subset", "french", "--split", "test"), ["no split 'test'", "--split: train"]),
        ("owner/card", ("--subset", "fr/", "--split", "test"), ["--split test", "path"]),
        (tmp_path / "text.txt", ("--split", "test"), ["OWNER/NAME", "leave them out"]),
        ("owner/script", (), ["scripts are no longer supported", "--subset FOLDER/"]),
        ("owner/elsewhere", (), ["owner/elsewhere", "Data files don't belong"]),
        ("owner/broken", (), ["owner/broken", "--subset FOLDER/"]),
        ("owner/tables", (), ["the format of owner/tables is hdf5", ".parquet", "webdataset"]),
    ]
    out = tmp_path / "out"

    outputs = run_commands([("--source", source, *flags, "--out", out) for source, flags, _ in cases])

    for (source, flags, mentions), output in zip(cases, outputs, strict=True):
        missing = [words for words in mentions if words not in output]
        assert output.startswith("error: ") and missing == [], (source, flags, output)
    assert not marker.exists() and not list(out.glob("*_*"))


def test_without_a_card_the_names_of_files_tell_the_splits(tmp_path, run_commands):
    documents = make_documents(40, 9)[:9]
    files = {f"data/train-0000{i}-of-00003.parquet": documents[3 * i : 3 * i + 3] for i in range(3)}
    files["data/validation-00000-of-00001.parquet"] = ["held out"]
    files["data/test-00000-of-00001.parquet"] = ["never trained on"]
    repo = write_repo(tmp_path, "bare", files)
    train = ("--source", "owner/bare", "--out", tmp_path / "train", "--shard-size", "40")
    validation = ("--source", "owner/bare", "--split", "validation", "--out", tmp_path / "validation")

    run_commands([train, validation])

    assert read_tokens(tmp_path / "train") == encode_with_tiktoken(documents)
    assert read_tokens(tmp_path / "validation") == encode_with_tiktoken(["held out"])

    # A folder of an older version took every file, and its manifest has no split: it is resumed with its own files.
    manifest = shards.read_manifest(tmp_path / "train")
    source = {key: value for key, value in manifest.source.items() if key not in ("config", "split")}
    test_file = "data/test-00000-of-00001.parquet"
    source["files"].append({"path": test_file, "bytes": (repo / test_file).stat().st_size})
    kept = [shard for shard in manifest.shards if shard.tokens == manifest.shard_tokens]
    shards.write_manifest(tmp_path / "train", replace(manifest, source=source, shards=kept, complete=False))
    run_commands([train])
    assert read_tokens(tmp_path / "train") == encode_with_tiktoken([*documents, "never trained on"])


def test_fineweb_is_the_same_files_in_the_same_order_by_path_and_by_configuration(tmp_path, run_commands):
    # Arrange: a repository like FineWeb's, whose configuration sample-10BT is the folder sample/10BT.
    names = [f"sample/10BT/{i:03d}_00000.parquet" for i in range(12)]
    card = "configs:\n- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n"
    repo = write_repo(tmp_path, "fineweb-edu", {name: [name] for name in reversed(names)}, card)
    repo.parent.rename(repo.parent.with_name("HuggingFaceFW"))
    limit = ("--limit-tokens", "50", "--out")

    run_commands(
        [
            ("--source", "fineweb-edu", *limit, tmp_path / "path"),
            ("--source", "HuggingFaceFW/fineweb-edu", "--subset", "sample-10BT", *limit, tmp_path / "config"),
        ]
    )

    # The manifest of FineWeb has the fields that it always had.
    by_path, by_config = (shards.read_manifest(tmp_path / name).source for name in ("path", "config"))
    assert list(by_path) == ["name", "subset", "revision", "files", "column"] and by_path["subset"] == "sample/10BT/"
    assert [file["path"] for file in by_path["files"]] == names
    assert by_config["files"] == by_path["files"] and by_config["config"] == "sample-10BT"
    assert read_tokens(tmp_path / "path") == read_tokens(tmp_path / "config") == encode_with_tiktoken(names)[:50]


# ------------------------------------------------------------------------- formats that `datasets` reads


def write_arrow(path, documents):
    """As `datasets` saves to disk, in record batches of seven rows."""
    table = pa.table({"text": documents})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=7)


def write_tsv(path, documents):
    """With tabs between the columns n and text."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t").writerows([("n", "text"), *enumerate(documents)])


def write_tar(path, documents):
    """A tar of one .text file per document, as webdataset names them."""
    with tarfile.open(path, "w") as archive:
        for i, document in enumerate(documents):
            info = tarfile.TarInfo(f"{i:06d}.text")
            info.size = len(document.encode())
            archive.addfile(info, io.BytesIO(document.encode()))


def write_zip(path, documents):
    """A zip with a jsonl file in it."""
    write_documents_jsonl(path.with_suffix(".jsonl"), documents)
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(path.with_suffix(".jsonl"), "inside.jsonl")
    path.with_suffix(".jsonl").unlink()


STREAMED = {  # suffix: what writes it, the builder of `datasets` that reads it, its settings
    ".arrow": (write_arrow, "arrow", {}),
    ".tsv": (write_tsv, "csv", {"sep": "\t"}),
    ".tar": (write_tar, "webdataset", {}),
    ".zip": (write_zip, "json", {}),
}
# Words that pandas takes for nothing, for numbers or for dates.
ODD_TEXTS = ["NA", "null", "1.0", "007", "2020-01-01", 'a "quoted", one', "two\nlines", " x "]


def stream(suffix, path):
    """The chunks of a file of STREAMED, one by one."""
    _, builder, settings = STREAMED[suffix]
    return readers.read_files([path], 0, "text", datasets_reader={"builder": builder, "settings": settings})


@pytest.mark.parametrize("suffix", STREAMED)
def test_formats_that_datasets_streams(tmp_path, monkeypatch, suffix):
    """Texts are unchanged and come in small chunks, which are the same when the file is read again."""
    chunk_bytes = 2000
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
    documents = [*ODD_TEXTS[2:4], *(f"document {i} " * 9 for i in range(300)), *(ODD_TEXTS if suffix != ".zip" else [])]
    path = tmp_path / f"a [b]{suffix}"
    STREAMED[suffix][0](path, documents)

    chunks = list(stream(suffix, path))

    assert [text for chunk in chunks for text in chunk.texts] == documents
    assert max(sum(map(len, chunk.texts)) for chunk in chunks) < 2 * chunk_bytes
    assert sum(chunk.source_bytes for chunk in chunks) == path.stat().st_size
    assert list(stream(suffix, path)) == chunks


def read_small_and_large():
    """In its own process: the highest memory in bytes after a file of STREAMED, argv[1], and after a larger one."""
    peaks = []
    for path in map(Path, sys.argv[1:]):
        for _ in stream(path.suffix, path):
            pass
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    print(json.dumps(peaks))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", STREAMED)
def test_streaming_a_large_file_takes_little_memory(tmp_path, new_log_path, suffix):
    paths = []
    for size in (1_000_000, 120_000_000):
        # Long documents of different words, a few thousand of them.
        document = " ".join(f"word{i}" for i in range(3000))
        documents = [f"{i} {document[i % 99 :]}" for i in range(size // len(document))]
        paths.append(tmp_path / f"{size}{suffix}")
        STREAMED[suffix][0](paths[-1], documents)
    log, out = new_log_path(), new_log_path()

    processes.start(read_small_and_large, *paths, log=log, out=out).wait_for_success()

    small, large = json.loads(out.read_text())
    assert large - small < 80_000_000, "two thirds of the file"


def test_a_streamed_file_that_cannot_be_read_ends_in_one_message(tmp_path):
    write_tsv(tmp_path / "a.tsv", ["text"])
    reader = {"builder": "csv", "settings": {"sep": "\t"}}

    def expect(message, column="text", reader=reader, path=tmp_path / "a.tsv"):
        with pytest.raises(UserError, match=message):
            list(readers.read_files([path], 0, column, datasets_reader=reader))

    expect("'body' is missing.*--text-column: n, text", column="body")
    (tmp_path / "bad.arrow").write_bytes(b"not arrow" * 9)
    arrow = {"builder": "arrow", "settings": {}}
    expect(r"cannot read .*bad\.arrow.*leave it out", reader=arrow, path=tmp_path / "bad.arrow")
    write_arrow(tmp_path / "numbers.arrow", [1, 2])
    expect("'text' is int, not text", reader=arrow, path=tmp_path / "numbers.arrow")

    # A manifest of anybody names no builder that runs code.
    expect("'pandas' is not one of", reader={"builder": "pandas", "settings": {}})


def test_a_streamed_dataset_is_resumed_with_the_same_bytes(tmp_path, run_commands):
    # Arrange: two files of tab-separated values, which only the streaming mode of `datasets` reads.
    documents = make_documents(50, 30)[:30]
    repo = write_repo(tmp_path, "tabs", {})
    repo.mkdir(parents=True)
    for i in range(2):
        write_tsv(repo / f"train-{i}.tsv", documents[15 * i : 15 * i + 15])
    command = ("--source", "owner/tabs", "--shard-size", "500", "--out")
    expected = tmp_path / "expected"
    run_commands([(*command, expected)])
    tokens, manifest = read_folder(expected)
    assert tokens.tolist() == encode_with_tiktoken(documents)
    assert manifest.source["reader"] == {"builder": "csv", "settings": {"sep": "\t"}}

    # Act: resume after the first shard and, in the second file, before the last one.
    assert manifest.shards[0].end["file"] == 0 and manifest.shards[-2].end["file"] == 1
    outs = []
    for kept in (manifest.shards[:1], manifest.shards[:-1]):
        out = tmp_path / f"{len(kept)}-kept"
        out.mkdir()
        for shard in kept:
            shutil.copy(expected / shard.file, out)
        shards.write_manifest(out, replace(manifest, shards=kept, complete=False))
        outs.append(out)
    run_commands([(*command, out) for out in outs])

    for out in outs:
        assert read_bytes(out) == read_bytes(expected)
