"""Read documents from parquet, jsonl and plain text files in small chunks, however large a file is."""

import json
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cli import UserError

CHUNK = 8 << 20  # bytes of text tokenized together: enough for all cores, little compared to the shards in memory
PIECE = 1 << 16  # characters of a text file tokenized as a unit; the pieces of a chunk go to different cores
CUT = re.compile(r"\S(?=[ \n])")  # no GPT-2 token spans this point or looks back past it: cutting keeps the ids


class Chunk(NamedTuple):
    """Texts to tokenize together. The first `documents` of them each start a document; the others continue one."""

    texts: list[str]
    documents: int
    size: float  # bytes of the source file that these take up
    file: int = 0  # index in the source


def read_text(path: Path, _column: str = "") -> Iterator[Chunk]:
    """One document, in pieces that no token crosses."""
    begins, rest, block = 1, "", " "
    with open(path, encoding="utf-8", newline="") as file:
        while block:
            block = file.read(CHUNK)
            searched = max(0, len(rest) - 1)  # already searched: text without spaces is not rescanned
            rest, start, pieces = rest + block, 0, []
            while cut := CUT.search(rest, max(start + PIECE, searched)):
                pieces.append(rest[start : cut.end()])
                start = cut.end()
            rest = rest[start:]
            if not block:  # the end of the file
                pieces.append(rest)
            if pieces:
                yield Chunk(pieces, begins, sum(map(len, pieces)))
                begins = 0


def read_jsonl(path: Path, field: str) -> Iterator[Chunk]:
    """One document per line; null is an empty document, and blank lines are skipped."""
    number = 0
    with open(path, "rb") as file:
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
            yield Chunk(texts, len(texts), sum(map(len, lines)))


def read_parquet(path: Path, column: str) -> Iterator[Chunk]:
    """One document per row; null is an empty document. Memory use stays small, however large a row group is."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)  # avoids reading a row group's column whole
    kind = str(file.schema_arrow.field(column).type) if column in file.schema_arrow.names else "missing"
    if kind not in ("string", "large_string", "string_view"):
        names = ", ".join(file.schema_arrow.names)
        raise ValueError(f"its column {column!r} is {kind}, not text; choose one with --text-column: {names}")
    rows, size = max(1, file.metadata.num_rows), path.stat().st_size
    groups = [file.metadata.row_group(i) for i in range(file.num_row_groups)]
    widest = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1)
    for batch in file.iter_batches(max(1, min(4096, int(CHUNK / max(1, widest)))), columns=[column]):
        texts = [text or "" for text in batch.column(0).to_pylist()]
        yield Chunk(texts, len(texts), size * len(texts) / rows)


READERS = {".parquet": read_parquet, ".jsonl": read_jsonl, ".ndjson": read_jsonl, ".json": read_jsonl}


def read(paths: Iterable[Path], first: int, column: str, used: Callable[[Path], None]) -> Iterator[Chunk]:
    """Chunks of the files in turn, the first of which has index `first`. Calls `used(path)` after reading a file."""
    for index, path in enumerate(paths, first):
        try:
            if path.suffix in (".bin", ".npy"):  # whose bytes may happen to be UTF-8: those of nanoGPT's characters are
                raise ValueError("it holds tokens, not text; a folder of shards goes straight to --data-dir")
            chunks = READERS.get(path.suffix, read_text)(path, column)
            yield from (chunk._replace(file=index) for chunk in chunks if chunk.texts)
        except (OSError, ValueError, NotImplementedError, MemoryError) as e:  # the last two: pyarrow, odd headers
            mend = "--source takes parquet, jsonl or UTF-8 text; convert it or leave it out"
            raise UserError(f"cannot read {path}: {e}; {mend}") from None
        used(path)


def ahead(items: Iterable, steps: int, join: bool = False) -> Iterator:
    """The same items, produced by a separate thread at most `steps` ahead of the caller. join: closing the iterator
    waits for the thread (one still reading when the process exits may abort it)."""
    room, made, closed = threading.Semaphore(steps - 1), queue.SimpleQueue(), threading.Event()
    end = object()

    def work() -> None:
        try:
            for item in items:
                made.put((item, None))
                room.acquire()
                if closed.is_set():
                    return
            made.put((end, None))
        except BaseException as e:
            made.put((end, e))

    thread = threading.Thread(target=work, daemon=True)  # daemon: a download must not outlive Ctrl-C
    thread.start()
    try:
        while (got := made.get())[0] is not end:
            room.release()
            yield got[0]
        if got[1] is not None:
            raise got[1]
    finally:
        closed.set()
        room.release()
        if join:
            thread.join()
