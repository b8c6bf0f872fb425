"""Documents: the texts of parquet, jsonl, csv, arrow and plain text files, in small chunks however large a file is.

The readers are ours: `datasets` 5.2 turns the text "2020-01-01" of JSON into a date, shifts the columns of a csv file
with one long row, and took 7.6 GB of memory for a row group of 4 GB of parquet (here 0.2).
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from system.cli import UserError, require

CHUNK = 8 << 20  # bytes of text tokenized together: enough for all cores, little compared to the shards in memory
PIECE = 1 << 16  # characters of a text file tokenized as a unit; the pieces of a chunk go to different cores
CUT = re.compile(r"\S(?=[ \n])")  # no GPT-2 token spans this point or looks back past it: cutting keeps the ids


class Chunk(NamedTuple):
    """Texts to tokenize together. The first `documents` of them each start a document; the others continue one."""

    texts: list[str]
    documents: int
    size: float = 0  # about how many bytes of the source file these take up
    file: int = 0  # index in the source


def read_text(file: BinaryIO, _column: str = "") -> Iterator[Chunk]:
    """One document, in pieces that no token crosses."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    documents, rest, block = 1, "", " "
    while block:
        block = text.read(CHUNK)
        searched = max(0, len(rest) - 1)  # already searched: text without spaces is not rescanned
        rest, start, pieces = rest + block, 0, []
        while cut := CUT.search(rest, max(start + PIECE, searched)):
            pieces.append(rest[start : cut.end()])
            start = cut.end()
        rest = rest[start:]
        if not block:  # the end of the file
            pieces.append(rest)
        if pieces:
            yield Chunk(pieces, documents)
            documents = 0


def read_json(file: BinaryIO, field: str) -> Iterator[Chunk]:
    """One document per line; null is an empty document, and blank lines are skipped."""
    number = 0
    while lines := file.readlines(CHUNK):
        texts = []
        for line in lines:
            number += 1
            if line.isspace():
                continue
            try:  # a lone surrogate, possible only in JSON, is replaced as in tiktoken
                text = json.loads(line)[field] or ""
                texts.append(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise ValueError(f"line {number} is not an object with text in {field!r} (--text-column)") from None
        yield Chunk(texts, len(texts))


def read_csv(file: BinaryIO, column: str) -> Iterator[Chunk]:
    """One document per row after the first, which names the columns."""
    csv.field_size_limit(sys.maxsize)
    rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)
    names = next(rows, [])
    require(column in names, f"its column {column!r} is missing; choose one with --text-column: {', '.join(names)}")
    at, texts, size = names.index(column), [], 0
    for row in filter(None, rows):
        require(len(row) == len(names), f"line {rows.line_num} has {len(row)} fields and the first {len(names)}")
        texts.append(row[at])
        size += len(row[at])
        if size > CHUNK:
            yield Chunk(texts, len(texts))
            texts, size = [], 0
    yield Chunk(texts, len(texts))


def rows(column, size: float) -> Chunk:
    """One document per row of an arrow array; null is an empty document."""
    return Chunk([text or "" for text in column.to_pylist()], len(column), size)


def check_column(name: str, schema) -> None:
    """Raise UserError unless column `name` of an arrow schema is text."""
    found = str(schema.field(name).type) if name in schema.names else "missing"
    mend = f"choose one with --text-column: {', '.join(schema.names)}"
    require(found in ("string", "large_string", "string_view"), f"its column {name!r} is {found}, not text; {mend}")


def read_parquet(file: BinaryIO, column: str) -> Iterator[Chunk]:
    """Memory use stays small, however large a row group is."""
    import pyarrow.parquet as pq

    # By name, as a read from a Python file that is under way when the process exits would keep it from exiting.
    # Without pre_buffer, a row group's column is not read whole.
    table = pq.ParquetFile(file.name, buffer_size=1 << 20, pre_buffer=False)
    check_column(column, table.schema_arrow)
    size = os.fstat(file.fileno()).st_size / max(1, table.metadata.num_rows)
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    widest = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1)
    for batch in table.iter_batches(max(1, min(4096, int(CHUNK / max(1, widest)))), columns=[column]):
        yield rows(batch.column(0), size * len(batch))


def read_arrow(file: BinaryIO, column: str) -> Iterator[Chunk]:
    """Either of arrow's formats: the stream that `datasets` writes, or the file with a footer."""
    from pyarrow import OSFile, ipc

    streamed = file.peek(6)[:6] != b"ARROW1"
    table = ipc.open_stream(OSFile(file.name)) if streamed else ipc.open_file(OSFile(file.name))
    check_column(column, table.schema)
    for batch in table if streamed else map(table.get_batch, range(table.num_record_batches)):
        batch.validate(full=True)  # wrong offsets could crash the process
        for start in range(0, len(batch), 512):
            part = batch.slice(start, 512)
            yield rows(part[column], part.nbytes)


READERS = {".parquet": read_parquet, ".jsonl": read_json, ".ndjson": read_json, ".csv": read_csv}
READERS |= {".arrow": read_arrow, ".json": read_json}  # last, as a folder of arrow files has .json files beside them
UNPACK = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": None}


def opened(path: Path, packed: str) -> tuple[BinaryIO, BinaryIO]:
    """A file, whose position tells how much has been read, and what it holds, decompressed."""
    if packed == ".zst":
        import pyarrow

        file = pyarrow.OSFile(str(path))
        return file, io.BufferedReader(pyarrow.CompressedInputStream(file, "zstd"))
    file = open(path, "rb")
    return file, UNPACK[packed](file) if packed else file


def suffixes(name: str) -> tuple[str, str]:
    """The suffix that names the format of a file and that of its compression, each perhaps empty."""
    path = Path(name)
    return (Path(path.stem).suffix, path.suffix) if path.suffix in UNPACK else (path.suffix, "")


def read(paths: Iterable[Path], first: int, column: str, used: Callable[[Path], None]) -> Iterator[Chunk]:
    """Chunks of the files in turn, the first of which has index `first`. Calls `used(path)` after reading a file."""
    for index, path in enumerate(paths, first):
        try:
            form, packed = suffixes(path.name)
            tokens = form in (".bin", ".npy")  # whose bytes may happen to be UTF-8: nanoGPT's characters are
            require(not tokens, "it holds tokens, not text; a folder of shards goes straight to --data-dir")
            file, held = opened(path, packed)
            with file:
                done = 0
                for chunk in READERS.get(form, read_text)(held, column):
                    if chunk.texts:
                        yield chunk._replace(file=index, size=chunk.size or file.tell() - done)
                        done = file.tell()
        except Exception as e:  # every library has errors of its own for a file that is not what it should be
            raise UserError(f"cannot read {path}: {e}; convert it or leave it out") from e
        used(path)
