"""Sources of text for the tests of fineweb.py: files of every format, and what shards of them must hold."""

from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import split_flags, write_jsonl

import fineweb
from tokens import shards, tokenizer
from tokens.documents import read_chunks

# The tests of readers go through all of them, alone and compressed.
SUFFIXES = [".parquet", ".jsonl", ".txt", ".jsonl.gz", ".jsonl.zst", ".txt.gz", ".txt.zst"]


def write_documents(path: Path, documents: list) -> Path:
    """A file of documents in the format that its suffixes name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"n": range(len(documents)), "text": documents}), path, row_group_size=3)
    elif path.suffix == ".jsonl":
        write_jsonl(path, [{"n": 1, "text": text} for text in documents])
    elif path.suffix == ".txt":
        path.write_bytes("<|endoftext|>".join(documents).encode())
    else:
        plain = write_documents(path.with_suffix(""), documents)
        with pa.output_stream(str(path)) as file:  # compressed as the suffix says
            file.write(plain.read_bytes())
        plain.unlink()
    return path


def write_token_file(path: Path, ids: list[int]) -> Path:
    """A file of token ids, as nanoGPT's prepare.py writes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids, "<u2").tofile(path)
    return path


def read_documents(*paths: Path, column: str = "text") -> list[str]:
    """The documents of files, put together from the pieces in their chunks."""
    documents = []
    for chunk in read_chunks(paths, 0, column):
        for text, begins, _ in chunk:
            if begins:
                documents.append(text)
            else:
                documents[-1] += text
    return documents


def run_fineweb(*args) -> None:
    """fineweb.py's main in this process; raises UserError if it fails. args: as of helpers.split_flags."""
    with mock.patch("sys.argv", split_flags(["fineweb.py", *args])):
        fineweb.main()


# Making one takes a tenth of a second: monkeypatch.setattr(fineweb, "bulk_encoder", shared_encoder).
shared_encoder = cache(tokenizer.bulk_encoder)


def encode(documents) -> list[int]:
    """The ids that shards of these documents must hold: EOT before each one."""
    encoding = tokenizer.encoding()
    return [i for text in documents for i in (tokenizer.EOT, *encoding.encode_ordinary(text))]


def read_tokens(folder: Path) -> list[int]:
    """All tokens of a folder, val first. Its manifest must be complete and describe them; the last shard of a split may
    be shorter."""
    manifest = shards.read_manifest(folder)
    sizes = [shard.tokens for shard in manifest.shards]
    last = {shard.file.split("_")[-2]: number for number, shard in enumerate(manifest.shards)}
    assert all(size == manifest.shard_tokens for i, size in enumerate(sizes) if i not in last.values())
    assert manifest.complete
    tokens = np.concatenate([shards.read_shard(folder / shard.file, shard.sha256) for shard in manifest.shards])
    assert len(tokens) == sum(sizes)
    assert sum(shard.documents for shard in manifest.shards) == (tokens == tokenizer.EOT).sum()
    return tokens.tolist()


def read_bytes(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder by name, without the lock and what a killed process may leave behind."""
    paths = [p for p in folder.iterdir() if p.is_file() and p.name != ".lock" and p.suffix != ".part"]
    return {p.name: p.read_bytes() for p in paths}
