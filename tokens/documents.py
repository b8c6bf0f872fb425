"""Documents: the texts of files, in small chunks however large a file is.

    for chunk in read_chunks([Path("a.parquet"), Path("b.txt")], first_file=0, column="text"):
        ...  # a few megabytes of text, to be tokenized together

    file --- a reader, chosen by its suffix ---> documents, or pieces of them --- read_chunks ---> chunks

READERS says which suffixes there are, and how each is read.

The readers are this project's own, over pyarrow's parquet and Python's json: what a file says arrives as it stands, or
its row is named. (`datasets` 5.2 turns the text "2020-01-01" of JSON into a date, texts into JSON if a row beside them
is none, and takes 7.6 GB of memory for a row group of 4 GB of parquet; here it takes 0.2.)
"""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from system.errors import UserError, explain_errors, require
from system.printing import print0
from tokens.shards import BIN_MAGICS, FORMATS, check_ids, map_shard
from tokens.tokenizer import EOT

CHUNK_BYTES = 8 << 20  # text tokenized together: enough for all cores, little compared to the shards in memory
BUFFER_BYTES = 8 << 20  # of an open file
PIECE_CHARACTERS = 1 << 16  # of a text file, tokenized as a unit; the pieces of a chunk go to different cores
PARQUET_BATCH_ROWS = 64  # few, because rows may be books
SEPARATOR = "<|endoftext|>"  # as it is spelled in text files

# The point after a non-space character and before a space or line break. No GPT-2 token spans this point or depends on
# what comes before it, so the tokens of the two parts are those of the whole.
SAFE_CUT = re.compile(r"\S(?=[ \r\n])")

# A reader yields a document or a piece of one, which is a str or the ids (n,) uint16 of a file of tokens, or None for a
# row of a table without text; and whether that begins a document, or continues the document before it.
Piece = tuple[Any, bool]


# Texts, or arrays of ids, to tokenize together, each with whether it begins a document, and the index of its file.
Chunk = list[tuple[Any, bool, int]]


def read_chunks(paths: Iterable[Path], first_file: int, column: str) -> Iterator[Chunk]:
    """Yield chunks, each of which may hold several files. Raises UserError if a file cannot be read. Rows without text
    are no documents; this prints at the end how many there are.

    first_file: the index of the first file in its source.
    column: the column of tables that has the text.
    """
    import pyarrow as pa

    chunk: Chunk = []
    size = empty_rows = 0
    for file, path in enumerate(paths, first_file):
        # These kinds are never an error of this program, so they may come from anywhere in this block.
        with explain_errors(f"cannot read {path}", "repair it, or leave it out", pa.ArrowException, UnicodeDecodeError):
            for text, begins in find_reader(path)(path, column):
                if text is None:
                    empty_rows += 1
                    continue
                chunk.append((text, begins, file))
                size += len(text)
                if size >= CHUNK_BYTES:
                    yield chunk
                    chunk, size = [], 0
    if chunk:
        yield chunk
    if empty_rows:
        print0(f"rows without text, left out: {empty_rows:,}")


# ------------------------------------------------------------------------- tables


def explain_column(column: str, names: Iterable[str]) -> str:
    return f"it has no column {column!r} but {', '.join(names) or 'none'}; use --text-column, or see docs/data.md"


def explain_content(column: str, content: str) -> str:
    """The message for a column of other things than text, such as the messages of chats."""
    return f"its column {column!r} holds no text but {content:.80}; write its texts to a .jsonl, with a field 'text'"


def read_parquet(path: Path, column: str) -> Iterator[Piece]:
    """A document per row, or None. Memory use stays small, however large a row group is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # pre_buffer=False: do not read the column of an entire row group at once.
    table = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    schema = table.schema_arrow
    require(column in schema.names, explain_column(column, schema.names))
    row = 0
    for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[column]):
        # As bytes, so that a row that is not UTF-8 can be named.
        try:
            values = batch.column(0).cast(pa.large_binary()).to_pylist()
        except pa.ArrowNotImplementedError as e:
            raise UserError(explain_content(column, str(schema.field(column).type))) from e
        for value in values:
            row += 1
            try:
                text = value.decode() if value else None
            except UnicodeDecodeError as e:
                raise UserError(f"row {row} is not UTF-8: {value[:80]!r}; convert it") from e
            yield text, True


def read_jsonl(path: Path, column: str) -> Iterator[Piece]:
    """A document per line, an object with a field of the column's name, or None. Blank lines are skipped."""
    with open_binary(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            with explain_errors(f"line {number} is no JSON object: {line[:80]!r}", "correct it", ValueError, TypeError):
                row = dict(json.loads(line))
            require(column in row, f"line {number}: {explain_column(column, row)}")
            text = row[column]
            require(isinstance(text, str | None), f"line {number}: {explain_content(column, repr(text))}")
            yield text or None, True


# ------------------------------------------------------------------------- text


def open_binary(path: Path) -> io.BufferedReader:
    """The bytes of a file, which pyarrow decompresses if the last suffix says so."""
    import pyarrow as pa

    return io.BufferedReader(pa.input_stream(str(path)), BUFFER_BYTES)


def read_text(path: Path, _column: str) -> Iterator[Piece]:
    """UTF-8 text, with its line ends as they are and without a byte order mark: one document, or several with SEPARATOR
    between them. Line breaks beside a separator belong to it, and without text beside it there is no document."""
    begins = True
    with open_binary(path) as binary:
        # If the file is separated, line breaks at its start are no text.
        is_separated = SEPARATOR.encode() in binary.peek()
        for piece in cut_pieces(io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")):
            # No cut divides a separator, which has no space in it.
            is_separated = is_separated or SEPARATOR in piece
            for number, text in enumerate(piece.split(SEPARATOR)):
                begins = begins or number > 0
                if is_separated:  # a piece ends in a line break only at the end of the file
                    text = text.strip("\r\n") if begins else text.rstrip("\r\n")
                if text or not is_separated:
                    yield text, begins
                    begins = False


def cut_pieces(file: io.TextIOWrapper) -> Iterator[str]:
    """The pieces of a text, at least one, that no token crosses: their tokens are those of the whole. The last piece
    may be empty."""
    pending = ""  # text after the last cut
    while block := file.read(PIECE_CHARACTERS):
        cut = SAFE_CUT.search(block)
        if cut:
            yield pending + block[: cut.end()]
            pending = block[cut.end() :]
        else:  # a long text without spaces
            pending += block
    yield pending


# ------------------------------------------------------------------------- files of token ids


def read_ids(path: Path, _column: str) -> Iterator[Piece]:
    """The ids of a shard as they stand: EOT before each document is among them. A .bin without the first number of a
    shard has GPT-2's ids as nanoGPT's prepare.py writes them: uint16 without a header, with EOT after each document.

        file      a a a EOT b b EOT
        stream    EOT a a a EOT b b
    """
    is_shard = path.suffix.lower() != ".bin" or np.isin(np.fromfile(path, "<i4", 1), BIN_MAGICS).any()
    ids: np.ndarray = map_shard(path) if is_shard else np.memmap(path, "<u2", "r")
    if not is_shard:
        # Ids of characters or bytes are all below 256, GPT-2's are not: " the" is 262.
        is_gpt2s = ids[:CHUNK_BYTES].max() > 255
        require(is_gpt2s, "its ids are not GPT-2's; give its text instead, such as nanoGPT's input.txt")
        if ids[-1] == EOT:
            ids = ids[:-1]
    for start in range(0, len(ids), CHUNK_BYTES):
        block = np.array(ids[start : start + CHUNK_BYTES])
        check_ids(block, path)
        yield block, not is_shard and start == 0 and ids[0] != EOT


# ------------------------------------------------------------------------- how each suffix is read

# Also compressed. Markup and data formats (html, xml, csv) are not read: as plain text they would train a model on tags
# and separators.
STREAM_READERS = {".jsonl": read_jsonl, ".txt": read_text, ".md": read_text, ".py": read_text}
READERS: dict[str, Callable[[Path, str], Iterator[Piece]]] = {
    ".parquet": read_parquet,
    **{suffix + compression: read for suffix, read in STREAM_READERS.items() for compression in ("", ".gz", ".zst")},
    **dict.fromkeys(FORMATS, read_ids),
}


def find_reader(path: Path) -> Callable[[Path, str], Iterator[Piece]]:
    """How a file is read, judging by its name alone. Raises UserError for a suffix that has no reader."""
    name = path.name.lower()
    for suffix, read in READERS.items():
        if name.endswith(suffix):
            return read
    raise UserError(f"cannot read {path}: its suffix is not one of {' '.join(READERS)}; convert it to .jsonl or .txt")
