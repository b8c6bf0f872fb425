"""The readers of documents: the same texts whatever the format, the compression and the size of chunks."""

import gzip
import json
import os
import re
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpora import (
    ID_SUFFIXES,
    WRITERS,
    encode,
    read_documents,
    shared_encoder,
    write_documents,
    write_ids,
    write_token_file,
)
from helpers import make_documents

from system.cli import UserError
from tokens import documents as readers
from tokens import shards
from tokens.documents import COMPRESSIONS, read_file
from tokens.tokenizer import EOT

SEPARATOR = "<|endoftext|>"
STORIES = ["Once upon a time.\n\nThe end.", "A word <|endof", "text|> is not one", "", "x " * 40 + "end", "日本 <|end"]


def test_every_reader_is_tested():
    """By the tests that go through WRITERS; all suffixes of plain text have one format. Files of ids have their own."""
    untested = readers.FORMATS.keys() - WRITERS.keys() - {".bin"}
    assert all(readers.FORMATS[suffix] is readers.TEXT for suffix in untested)


@pytest.mark.parametrize("piece_characters", [1, 50])
@pytest.mark.parametrize("chunk_bytes", [1, 999])
@pytest.mark.parametrize("suffix", WRITERS)
def test_no_reader_depends_on_where_chunks_end(tmp_path, monkeypatch, suffix, chunk_bytes, piece_characters):
    # Short documents, and some that are longer than a chunk, with and without spaces and line ends.
    words = " ".join(f"wörd{i},\n  'and' 🙂" for i in range(80)) + " \u3000\u2003 \x1c \x85 tail \r\n\r\n  end\n\n\n"
    documents = ["first", "", words, 'a "quoted", one\nof two lines', "é" * 1100, "x", words[::-1], "last one"]
    path = write_documents(tmp_path / f"a{suffix}", documents)
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", piece_characters)

    chunks = list(read_file(path, 7, {"column": "text"}))

    # The tokens are those of the whole documents, although each text is tokenized alone.
    ids = np.concatenate([shards.encode(shared_encoder(), chunk) for chunk in chunks]).tolist()
    assert ids == encode(["".join(documents)] if readers.FORMATS[suffix] is readers.TEXT else documents)
    assert all(chunk.file == 7 for chunk in chunks)

    # A chunk ends with the text that fills it.
    assert all(sum(map(len, chunk.texts[:-1])) < chunk_bytes for chunk in chunks)
    assert all(sum(map(len, chunk.texts)) >= chunk_bytes for chunk in chunks[:-1])


def test_jsonl_fields_blank_lines_and_half_surrogates(tmp_path):
    documents = [*make_documents(3), "", "half \ud83d surrogate \ude00"]
    lines = [json.dumps({"n": 1, "body": document}) for document in documents]
    lines[3:3] = ["", '{"body": null}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")

    read = read_documents(tmp_path / "a.jsonl", "body")

    documents[-1] = "half \ufffd surrogate \ufffd"
    assert read == [*documents[:3], "", *documents[3:]]


def test_csv_gives_every_text_as_it_stands(tmp_path):
    """Words that pandas takes for nothing, for numbers or for dates; a name that is a glob pattern."""
    odd_texts = ["NA", "null", "1.0", "007", "2020-01-01", 'a "quoted", one', "two\nlines\r\nor three\r", " x ", ""]
    assert read_documents(write_documents(tmp_path / "a[1].csv", odd_texts)) == odd_texts

    as_excel_writes_it = b"\xef\xbb\xbftext,n\r\nwith a mark,1\r\n\r\nlast,2\r\n"  # with a byte order mark
    (tmp_path / "b.csv").write_bytes(as_excel_writes_it)
    assert read_documents(tmp_path / "b.csv") == ["with a mark", "last"]


def test_json_that_is_one_array(tmp_path):
    rows = [{"n": [[1], {"a": "]"}], "text": text} for text in ("one", "2020-01-01", None)]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    assert read_documents(tmp_path / "a.json") == ["one", "2020-01-01", ""]


@pytest.mark.parametrize(
    "name", [*(f"a.txt{compression}" for compression in COMPRESSIONS), "a.csv.zst", "a.jsonl.bz2", "a.json.gz"]
)
def test_compressed_files(tmp_path, name):
    path = tmp_path / name
    documents = [f"{i} {document}" for i, document in enumerate(make_documents(9))]
    plain = write_documents(path.with_suffix(""), documents)
    with pa.output_stream(str(path)) as file:  # compressed as the suffix says
        file.write(plain.read_bytes())

    assert read_documents(path) == read_documents(plain)

    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=re.escape(path.name)):
        read_documents(path)


@pytest.mark.parametrize("content, name, value", [
    ("café ".encode("latin-1") * 9, "a.txt", "UTF-8"),
    (b"n,text\n1,a\n2,b,c\n", "a.csv", "line 3"),
    (b'n,text\n1,"a\n', "a.csv", ""),
    (b"n,body\n1,a\n", "a.csv", "n, body"),
    (b'[{"text": "a"}, {"text": "b', "a.json", ""),
    (b'[{"text": 3}]', "a.json", "row 1"),
    (b'{"text": 0}', "a.jsonl", "line 1"),
    (b"<br>", "a.xml", "--as-text"),
    (b"text\nIt was late, he said.\n", "a.csv", "line 2"),
    (b'n,text\n1,"two\nlines"\n2\n', "a.csv", "line 4"),
    (b'text\n"a"b\n', "a.csv", "line 2"),
    (b"text,text\na,b\n", "a.csv", "--text-column"),
    (b'[{"text": "He said \\"hi\\""}, {"text": 3}]', "a.json", "row 2"),
    (b'{"text": "a"}\n{"text": 3}', "a.json", "line 2"),
    (b'{"text": "a"}\n{"text": "caf\xe9"}', "a.jsonl", "line 2"),
    (b'{"text": "a"}\n["b"]', "a.jsonl", "line 2"),
    (b'{"body": "a"}\n', "part-00000", ".jsonl"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a.parquet", "git lfs pull"),
    ("wörld".encode("utf-16"), "a.txt", "UTF-16"),
    ("world".encode("utf-16-le"), "a.csv", "UTF-16"),
])  # fmt: skip
def test_a_bad_file_is_refused_in_one_line(tmp_path, content, name, value):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_documents(tmp_path / name)
    message = str(error.value)
    assert str(tmp_path / name) in message and value in message
    assert len(message) < 800 and "\n" not in message


# ------------------------------------------------------------------------- many documents in a text file


@pytest.fixture
def stories(tmp_path):
    """A file laid out like TinyStories': each separator on a line of its own, the last one at the end."""
    path = tmp_path / "TinyStories.txt"
    path.write_text("".join(f"{story}\n{SEPARATOR}\n" for story in STORIES))
    return path


@pytest.mark.parametrize("block", [1, 7, 40, 1 << 20])
def test_the_text_between_separators_is_one_document(stories, monkeypatch, block):
    """However small the blocks are in which the file is read: a separator may lie in two, a document in many."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", block)
    assert read_documents(stories, split_on=SEPARATOR) == [story for story in STORIES if story]


def test_an_unsplit_separator_is_warned_of_once(stories, capsys):
    assert read_documents(stories) == [stories.read_text()]
    output = capsys.readouterr().out
    assert output.count("--split-on") == output.count(str(stories)) == 1


def test_any_suffix_is_text_if_the_user_says_so(tmp_path):
    for name in ("a.tex", "a.jsonl"):
        (tmp_path / name).write_text('{"text": 0}')
        assert read_documents(tmp_path / name, as_text=True) == ['{"text": 0}']


def test_a_separator_anywhere_is_warned_of_and_so_is_one_that_never_comes(tmp_path, monkeypatch, capsys):
    path = write_documents(tmp_path / "a.txt", ["word " * 99, SEPARATOR, "end"])
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 20)
    read_documents(path)
    assert "--split-on" in capsys.readouterr().out

    assert len(read_documents(path, split_on="\\n")) == 1
    assert "\\n" in capsys.readouterr().out


@pytest.mark.parametrize("values", [
    pa.array(["one", None, "è"]).dictionary_encode(),
    pa.array([b"one", None, "è".encode()]),
    pa.array(["one", None, "è"], pa.string_view()),
])  # fmt: skip
def test_every_type_of_parquet_that_is_text(tmp_path, values):
    pq.write_table(pa.table({"text": values}), tmp_path / "a.parquet")
    assert read_documents(tmp_path / "a.parquet") == ["one", "", "è"]


@pytest.mark.parametrize("values, named", [
    (pa.array([["one"]]), "row 1.*one"),
    (pa.array([7, 2]), "row 1.*7"),
    (pa.array([b"one", b"caf\xe9"]), "row 2"),
])  # fmt: skip
def test_what_is_no_text_in_parquet(tmp_path, values, named):
    pq.write_table(pa.table({"id": list(range(len(values))), "text": values}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=named):
        read_documents(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", [".parquet", ".txt.gz", ".csv"])
def test_a_file_name_need_not_be_utf8(tmp_path, suffix):
    plain = write_documents(tmp_path / Path(f"a{suffix}").stem, ["one"]) if "gz" in suffix else None
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9" + suffix.encode()))
    if plain:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        os.rename(write_documents(tmp_path / f"a{suffix}", ["one"]), path)
    assert read_documents(path) == ["one"]


def test_a_zstd_window_that_is_too_large_is_named(tmp_path):
    # A frame with a window of 2 GB and one raw block: magic number, flags, window, block header, text.
    frame = struct.pack("<IBBI", 0xFD2FB528, 0, (31 - 10) << 3, 4 << 3 | 1)[:-1] + b"text"
    (tmp_path / "a.txt.zst").write_bytes(frame)
    with pytest.raises(UserError, match="window"):
        read_documents(tmp_path / "a.txt.zst")


def test_an_array_larger_than_a_gigabyte_is_warned_of(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readers, "LARGE_JSON_BYTES", 10)
    (tmp_path / "a.json").write_text('[{"text": "one"}]')
    assert read_documents(tmp_path / "a.json") == ["one"]
    assert str(tmp_path / "a.json") in capsys.readouterr().out


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n".encode())
    assert read_documents(tmp_path / "a.txt") == ["one\r\n"]


# ------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("suffix", ID_SUFFIXES)
def test_the_ids_of_rows_with_one_eot_before_each(tmp_path, monkeypatch, suffix):
    """EOT at a row's ends is not doubled; null and an empty list are empty documents."""
    rows = [[1, 2], [EOT, 3, EOT, 4, EOT], None, [], [EOT], [50255, 0]]
    path = write_ids(tmp_path / f"a{suffix}", rows)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 3)

    chunks = list(read_file(path, 0, {"ids_column": "tokens"}))

    ids = np.concatenate([shards.encode(None, chunk) for chunk in chunks])
    assert ids.tolist() == [EOT, 1, 2, EOT, 3, EOT, 4, EOT, EOT, EOT, EOT, 50255, 0] and ids.dtype == np.uint16
    assert len(chunks) > 1


@pytest.mark.parametrize("suffix", ID_SUFFIXES)
@pytest.mark.parametrize("row, named", [
    ([1, 70_000], "70000"),
    ([EOT + 1], "50257"),
    ([-1], "-1"),
    ([[1], [2, 3]], "[1]"),
    ([1, None], ""),
    ([1.0], "1."),
    ([True], "True"),
    ("1 2", "1 2"),
    (7, "7"),
])  # fmt: skip
def test_a_row_that_is_no_list_of_ids_is_named(tmp_path, monkeypatch, suffix, row, named):
    monkeypatch.setattr(readers, "PARQUET_BATCH_ROWS", 1)
    path = write_ids(tmp_path / f"a{suffix}", [None, row])
    with pytest.raises(UserError, match=f"(row|line) 2 .*{re.escape(named)}") as error:
        list(read_file(path, 0, {"ids_column": "tokens"}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ID_SUFFIXES)
def test_ids_read_as_text_are_refused_in_one_line(tmp_path, suffix):
    path = write_ids(tmp_path / f"a{suffix}", [list(range(99))])
    with pytest.raises(UserError, match=r"1 is not text.*--ids-column") as error:
        read_documents(path, "tokens")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [pa.list_(pa.uint16()), pa.large_list(pa.int32()), pa.list_(pa.int64(), 2)])
def test_every_type_of_list_in_parquet(tmp_path, kind):
    path = write_ids(tmp_path / "a.parquet", pa.array([[1, 50255], None], kind))
    (chunk,) = read_file(path, 0, {"ids_column": "tokens"})
    assert shards.encode(None, chunk).tolist() == [EOT, 1, 50255, EOT]


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_the_tokens_of_nanogpt_are_those_of_its_documents(tmp_path, monkeypatch, block, suffix):
    """It ends each document with EOT, and writes one document without any. Wherever a block begins."""
    for ids in ([262, 7, EOT, 8, 9, 10, EOT, EOT, 11, EOT], [262, 7, 8]):
        path = write_token_file(tmp_path / f"train.bin{suffix}", ids)
        monkeypatch.setattr(readers, "CHUNK_BYTES", block)
        chunks = list(read_file(path, 0, {"token_files": True}))
        found = np.concatenate([shards.encode(None, chunk) for chunk in chunks]).tolist()
        assert found == ([EOT, 262, 7, EOT, 8, 9, 10, EOT, 11] if EOT in ids else [EOT, 262, 7, 8])


@pytest.mark.parametrize("ids, named", [
    ([50258, 300], "50258"), (list(range(65)), "characters"), ([readers.LLMC_SHARD % 2**16, 308, 1], "shard"),
])  # fmt: skip
def test_a_file_of_other_tokens_is_refused(tmp_path, ids, named):
    path = write_token_file(tmp_path / "train.bin", ids)
    with pytest.raises(UserError, match=f"train.bin.*{named}"):
        list(read_file(path, 0, {"token_files": True}))


def test_a_binary_file_is_no_text_in_another_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"abcdefgh\xff\0\1" * 99)
    with pytest.raises(UserError, match="no text") as e:
        read_documents(tmp_path / "a.txt")
    assert "iconv" not in str(e.value)


def test_an_integer_of_any_size_is_no_id(tmp_path):
    with pytest.raises(UserError, match="line 1"):
        list(read_file(write_ids(tmp_path / "a.jsonl", [[2**70]]), 0, {"ids_column": "tokens"}))
