"""Sources of text for the tests of fineweb.py: files of every format, and what shards of them must hold."""

import csv
import gzip
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from helpers import write_jsonl

import fineweb
from tokens import shards, tokenizer
from tokens.documents import read_file, suffixes_with


def write_parquet(path: Path, column: str, cells: Any) -> None:
    pq.write_table(pa.table({"n": range(len(cells)), column: cells}), path, row_group_size=3)


def write_rows(path: Path, column: str, cells: list) -> None:
    write_jsonl(path, [{column: cell} for cell in cells])


def write_csv(path: Path, column: str, cells: list) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("n", column), *enumerate(cells)])


def write_text(path: Path, column: str, cells: list) -> None:
    path.write_bytes("".join(cells).encode())


# Suffix: what writes such a file, with a cell for each document in the column. The tests of texts go through all of
# them, and the tests of token ids through ID_SUFFIXES.
WRITERS = {
    ".parquet": write_parquet,
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), write_rows),
    ".csv": write_csv,
    ".txt": write_text,
}
ID_SUFFIXES = suffixes_with("ids_column")


def write_documents(path: Path, documents: list) -> Path:
    """A file of documents in the format that its suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](path, "text", documents)
    return path


def write_ids(path: Path, rows: Any) -> Path:
    """A file with a list of token ids, or whatever a row holds, in the column `tokens`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS[path.suffix](path, "tokens", rows)
    return path


def write_token_file(path: Path, ids: list[int]) -> Path:
    """A file of token ids, as nanoGPT's prepare.py writes them, compressed if its name ends in .gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = np.array(ids, "<u2").tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def read_documents(path: Path, column: str = "text", **source) -> list[str]:
    """The documents of a file, put together from the pieces in its chunks. source: as of read_file."""
    documents = []
    for chunk in read_file(path, 0, {"column": column, **source}):
        for text, begins in zip(chunk.texts, chunk.begins, strict=True):
            if begins:
                documents.append(text)
            else:
                documents[-1] += text
    return documents


def run_fineweb(*args) -> None:
    """fineweb.py's main in this process; raises UserError if it fails."""
    with mock.patch("sys.argv", ["fineweb.py", *map(str, args)]):
        fineweb.main()


# Making one takes a tenth of a second: monkeypatch.setattr(shards, "bulk_encoder", shared_encoder).
shared_encoder = cache(tokenizer.bulk_encoder)


def encode(documents) -> list[int]:
    """The ids that shards of these documents must hold: EOT before each one, None as an empty document."""
    encoding = tokenizer.encoding()
    return [i for text in documents for i in (tokenizer.EOT, *encoding.encode_ordinary(text or ""))]


def read_tokens(folder: Path) -> list[int]:
    """All tokens of a folder, val first. Its manifest must be complete and describe them."""
    assert shards.verify(folder) == []
    manifest = shards.read_manifest(folder)
    sizes = [shard.tokens for shard in manifest.shards]
    assert all(size == manifest.shard_tokens for size in sizes[:-1]) and manifest.complete
    tokens = np.concatenate([shards.read_shard(folder / shard.file) for shard in manifest.shards])
    assert sum(shard.documents for shard in manifest.shards) == (tokens == tokenizer.EOT).sum()
    return tokens.tolist()


def read_bytes(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of a folder by name, without the lock and what a killed process may leave behind."""
    paths = [p for p in folder.iterdir() if p.is_file() and p.name != ".lock" and p.suffix != ".part"]
    return {p.name: p.read_bytes() for p in paths}
