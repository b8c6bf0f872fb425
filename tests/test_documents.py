"""The readers of documents: the same texts whatever the format, the compression and the size of chunks."""

import codecs
import json
from pathlib import Path

import numpy as np
import pytest
from corpora import SUFFIXES, encode, read_documents, shared_encoder, write_documents, write_token_file
from helpers import refused

import fineweb
from tokens import documents, shards
from tokens.tokenizer import EOT

WORDS = " ".join(f"wörd{i},\r\n  'and' 🙂" for i in range(80)) + " \u3000\u2003 \x1c \x85 tail \r\n\r\n  end"
DOCUMENTS = ["first", WORDS, 'a "quoted", one\nof two lines <|endof', "é" * 1100, "x", "日本\r\n語" * 90, "text|> last"]


@pytest.fixture
def tokens_of(monkeypatch):
    """The stream of the tokens of some files."""
    monkeypatch.setattr(fineweb, "bulk_encoder", shared_encoder)

    def encode_files(*paths):
        chunks = documents.read_chunks(paths, 0, "text")
        return [i for ids, _ in fineweb.tokenize(chunks) for i in ids.tolist()]

    return encode_files


@pytest.mark.parametrize("piece_characters, chunk_bytes", [(1, 1), (7, 999), (1 << 16, 999)])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_reader_depends_on_where_chunks_end(tmp_path, monkeypatch, tokens_of, suffix, chunk_bytes, piece_characters):
    """The tokens are those of the whole documents, although each text is tokenized alone."""
    paths = [write_documents(tmp_path / f"{i}{suffix}", DOCUMENTS) for i in range(2)]
    monkeypatch.setattr(documents, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", piece_characters)
    assert tokens_of(*paths) == encode(DOCUMENTS * 2)

    # A chunk ends with the text that fills it.
    chunks = list(documents.read_chunks(paths, 7, "text"))
    sizes = [[len(text) for text, _, _ in chunk] for chunk in chunks]
    assert all(sum(size[:-1]) < chunk_bytes for size in sizes)
    assert {file for chunk in chunks for _, _, file in chunk} == {7, 8}


# ------------------------------------------------------------------------- what is no text


@pytest.mark.parametrize("suffix", [suffix for suffix in SUFFIXES if suffix != ".txt"])
def test_a_file_that_is_cut_is_named(tmp_path, suffix):
    path = write_documents(tmp_path / f"a{suffix}", DOCUMENTS)
    path.write_bytes(path.read_bytes()[:-20])
    with refused(path.name):
        read_documents(path)


@pytest.mark.parametrize("name, content, named", [
    ("a.txt", "café".encode("latin-1"), "utf-8"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 0}', "line 2"),
    ("a.jsonl", b'{"text": "a"}\n\n{"text": "caf\xe9"}', "line 3"),
    ("a.jsonl", b'[{"text": "a"}]', "line 1"),
    ("a.jsonl", b'{"body": "a"}', "'text' but body"),
    ("a.jsonl", b'{"text": [{"role": "user", "content": "Hello"}]}', "'role': 'user'.*jsonl"),
    ("a.parquet", [7, 2], "int64"),
    ("a.parquet", [b"one", b"caf\xe9"], "row 2"),
    ("a.bin", [300, 50257], r"token 1 is id 50257.*--model\.vocab-size"),
    ("a.bin", range(65), "input.txt"),
    ("a.bin.gz", b"", ".bin.gz"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, name, content, named):
    path = tmp_path / name
    write = {".parquet": write_documents, ".bin": write_token_file}.get(path.suffix, Path.write_bytes)
    write(path, content)
    with refused(f"{path}.*{named}"):
        read_documents(path)


def test_an_error_of_a_reader_itself_is_not_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "cut_pieces", lambda file: len(None))
    with pytest.raises(TypeError):
        read_documents(write_documents(tmp_path / "a.txt", DOCUMENTS))


# ------------------------------------------------------------------------- tables


def test_lines_of_json_arrive_as_they_stand(tmp_path):
    texts = ["2020-01-01", "NA", "  two\nlines ", "\u2028 and \x85", " "]
    lines = [json.dumps({"body": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes(codecs.BOM_UTF8 + "\n\n".join(lines).encode())
    assert read_documents(tmp_path / "a.jsonl", column="body") == texts


# ------------------------------------------------------------------------- text


@pytest.mark.parametrize("text, expected", [
    ("\r\n one \r\n", ["\r\n one \r\n"]),
    ("\ufeffone\r\n", ["one\r\n"]),
    ("", [""]),
    ("\n\none\r\n\r\n<|endoftext|>\n\n two<|endoftext|><|endoftext|>\n<|endoftext|>\n\n", ["one", " two"]),
    ("<|endoftext|>one\n\ntwo\n\nthree\n<|endoftext|>four", ["one\n\ntwo\n\nthree", "four"]),
])  # fmt: skip
@pytest.mark.parametrize("piece_characters", [1, 7, 1 << 16])
def test_the_text_between_separators_is_one_document(tmp_path, monkeypatch, text, expected, piece_characters):
    """However small the pieces are: a separator may lie in two of the blocks that are read, a document in many."""
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", piece_characters)
    (tmp_path / "a.txt").write_bytes(text.encode())
    assert read_documents(tmp_path / "a.txt") == expected


def test_a_long_text_is_cut_at_any_line_end(tmp_path, monkeypatch):
    """So that it is tokenized by all cores, in little memory."""
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 100)
    for line_end in ("\n", "\r\n", " "):
        (tmp_path / "a.txt").write_bytes(f"日本語の文章{line_end}".encode() * 500)
        (chunk,) = documents.read_chunks([tmp_path / "a.txt"], 0, "text")
        assert max(len(text) for text, _, _ in chunk) < 200


# ------------------------------------------------------------------------- token ids


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize("ids, expected", [
    ([262, 7, EOT, 8, 9, 10, EOT], [EOT, 262, 7, EOT, 8, 9, 10]),
    ([EOT, 262, 7, 8], [EOT, 262, 7, 8]),
])  # fmt: skip
def test_the_tokens_of_nanogpt_are_those_of_its_documents(tmp_path, monkeypatch, tokens_of, ids, expected, block):
    """It ends each document with EOT, and writes one document without any. Wherever a block begins."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", block)
    assert tokens_of(write_token_file(tmp_path / "train.bin", ids)) == expected


@pytest.mark.parametrize("suffix", shards.FORMATS)
def test_shards_are_a_source_as_they_stand(tmp_path, monkeypatch, tokens_of, suffix):
    """Also a document that runs over two of them; in .bin they are told apart from nanoGPT's by their first number."""
    monkeypatch.setattr(documents, "CHUNK_BYTES", 999)
    stream = np.arange(10_000)
    stream[[2000, 4999, 5000]] = EOT, EOT, 7
    paths = [tmp_path / f"x_train_{i}{suffix}" for i in range(2)]
    for path, ids in zip(paths, np.split(stream, 2), strict=True):
        shards.write_shard(path, ids)
    if suffix == ".bin":  # the second one is DDP-BASEMODEL-TRAIN's
        paths[1].write_bytes(np.int32(20250211).tobytes() + paths[1].read_bytes()[4:])
    assert tokens_of(*paths) == stream.tolist()
