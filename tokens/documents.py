"""Documents: the texts of parquet, jsonl, csv and plain text files, in small chunks however large a file is.

fineweb.py reads every source through read_files:

    for chunk in read_files([Path("a.parquet"), Path("b.txt.gz")], first_index=0, column="text"):
        ...  # chunk.texts: a few megabytes of text, to be tokenized together

The suffix of a file's name chooses its reader. Suffixes in READERS are parsed; suffixes in TEXT_SUFFIXES, and names
without a suffix, are plain text, one document per file; anything else is refused. A file of any format but parquet may
be compressed as a whole, with a suffix of COMPRESSIONS after the first one.

Files of a Hub dataset that no reader here takes are streamed by `datasets` (read_with_datasets). The readers are this
project's own because `datasets` 5.2 turns the text "2020-01-01" of JSON into a date, shifts the columns of a csv file
with one long row, and took 7.6 GB of memory for a row group of 4 GB of parquet (here 0.2).
"""

import bz2
import csv
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import BinaryIO, NamedTuple

from system.cli import UserError, print0, require

CHUNK_BYTES = 8 << 20  # text tokenized together: enough for all cores, little compared to the shards in memory
PIECE_CHARACTERS = 1 << 16  # of a text file, tokenized as a unit; the pieces of a chunk go to different cores
PARQUET_BATCH_ROWS = 4096  # at most; fewer if the rows are long
STREAMED_ROWS = 256  # of csv that `datasets` (through pandas) parses at a time
STREAMED_BYTES = 1 << 20  # of json and text that `datasets` parses at a time
SEPARATOR = "<|endoftext|>"  # as it is spelled in text files
MAX_NAMES_CHARACTERS = 500  # of an error message: columns or fields that the user can choose from

# The point after a non-space character and before a space or newline. No GPT-2 token spans this point or depends on
# what comes before it, so the tokens of the two parts are those of the whole.
SAFE_CUT = re.compile(r"\S(?=[ \n])")

# JSON as bytes: its white space, with the byte order mark that some editors write first; and what is needed to find the
# end of an object: brackets, and strings, of which group 1 is the closing quote (None if the string is cut off).
JSON_SPACE = b" \t\r\n\xef\xbb\xbf"
JSON_SPACES = tuple(bytes([byte]) for byte in JSON_SPACE)
JSON_STRUCTURE = re.compile(rb'"(?:[^"\\]++|\\.)*+(")?|[][{}]', re.DOTALL)


class Chunk(NamedTuple):
    """Texts to tokenize together: texts[:documents] each start a document; all later texts continue the last one that
    was begun, in this chunk or before:

        Chunk(["a", "b", "c"], documents=3)      three documents
        Chunk(["A lo", "ng t"], documents=1)     the first two pieces of a document
        Chunk(["ext."], documents=0)             its last piece
    """

    texts: list[str]
    documents: int
    source_bytes: float = 0  # about how many bytes of the source file these texts take up
    file_index: int = 0  # of the source's files


# A reader gets the decompressed file and the name of the column with the text, and yields its chunks, each of about
# CHUNK_BYTES of text. An error that the user can fix in the command is a UserError that says how; any other exception
# means that the file is bad.
Reader = Callable[[BinaryIO, str], Iterator[Chunk]]


# ------------------------------------------------------------------------- one reader per format


def read_text(file: BinaryIO, _column: str = "") -> Iterator[Chunk]:
    """A file of UTF-8 text is one document, in pieces that no token crosses: their tokens are those of the whole."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")  # newline="": line ends stay as they are
    documents = 1  # the first chunk starts the document, the others continue it
    pending = ""  # text after the last cut
    at_end = False
    while not at_end:
        block = text.read(CHUNK_BYTES)
        at_end = not block

        # Cut what was read into pieces; the rest waits for more text. A long text without spaces has no cut yet:
        # searching all of it again with every block would take quadratic time.
        searched = max(0, len(pending) - 1)
        pieces, pending = _cut_pieces(pending + block, searched)
        if at_end:
            pieces.append(pending)

        # Only the first chunk starts the document.
        if pieces:
            yield Chunk(pieces, documents)
            documents = 0


def read_separated_text(separator: str, file: BinaryIO, _column: str = "") -> Iterator[Chunk]:
    """A file of UTF-8 text with `separator` between its documents. Line breaks beside it belong to it; a document
    without text is left out."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    pending = ""  # text after the last separator, or what is left of it
    is_begun = False  # whether the beginning of the document in `pending` was yielded
    at_end = False
    while not at_end:
        block = text.read(CHUNK_BYTES)
        at_end = not block

        # What a separator follows has ended, as has everything at the end of the file.
        *ended, pending = (pending + block).split(separator)
        if at_end:
            ended.append(pending)

        # The rest of the document that was begun before.
        if ended and is_begun:
            rest = ended.pop(0).rstrip("\r\n")
            is_begun = False
            if rest:
                yield Chunk([rest], documents=0)

        # The documents that are here as a whole.
        whole = [document.strip("\r\n") for document in ended]
        whole = [document for document in whole if document]
        if whole:
            yield Chunk(whole, len(whole))

        # A document that is longer than a chunk. Its last characters may begin a separator, so they stay in `pending`.
        if not at_end and len(pending) > CHUNK_BYTES:
            if not is_begun:
                pending = pending.lstrip("\r\n")
            kept = len(pending) - len(separator)
            pieces, rest = _cut_pieces(pending[:kept], 0)
            pending = rest + pending[kept:]
            if pieces:
                yield Chunk(pieces, documents=0 if is_begun else 1)
                is_begun = True


def _cut_pieces(text: str, searched: int) -> tuple[list[str], str]:
    """Pieces of at least PIECE_CHARACTERS, each up to a SAFE_CUT, and the rest of the text. The first `searched`
    characters were searched before, without a usable cut."""
    pieces = []
    start = 0
    while True:
        # The first cut after enough characters.
        cut = SAFE_CUT.search(text, max(start + PIECE_CHARACTERS, searched))
        if cut is None:
            return pieces, text[start:]
        pieces.append(text[start : cut.end()])
        start = cut.end()


def read_json(file: BinaryIO, field: str) -> Iterator[Chunk]:
    """One document per line, an object with text in `field`; null is an empty document, and blank lines are skipped. A
    file that begins with a bracket is one array of such objects, over however many lines."""
    if file.peek(1).lstrip(JSON_SPACE).startswith(b"["):
        yield from _read_json_array(file, field)
        return

    # Otherwise parse line by line. Lines are read a chunk at a time, so a file of any size needs little memory.
    line_number = 0
    lines = file.readlines(CHUNK_BYTES)
    while lines:
        texts = []
        for line in lines:
            line_number += 1
            if not line.isspace():
                texts.append(_parse_object(line, field, f"line {line_number}"))
        yield Chunk(texts, len(texts))
        lines = file.readlines(CHUNK_BYTES)


def _parse_object(source: bytes, field: str, place: str) -> str:
    """The text in `field` of a JSON object. Raises ValueError, or UserError if another field can be chosen; both errors
    name the place."""
    row = None
    try:
        row = json.loads(source)
        text = row[field] or ""
        # JSON can hold half of a surrogate pair, which is no character: replace it as tiktoken does.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # If this is an object with other fields, --text-column may choose one of them.
        problem = f"{place} is not an object with text in {field!r}"
        if not isinstance(row, dict) or not row:
            raise ValueError(problem) from None
        fields = format_names(row)
        raise UserError(f"{problem}; choose a field with --text-column: {fields}") from None


def _read_json_array(file: BinaryIO, field: str) -> Iterator[Chunk]:
    """The documents of a file that is one array of objects. Only a chunk of it is in memory; here it ends within the
    third object:

        [ {"text": "a"} , {"text": "b"} , {"te
        |----------- parsed ----------||-----|
                                       pending: parsed with the next block
    """
    number = 0  # of the objects parsed so far
    expected = b"["  # what stands before the next object
    pending = b""  # read, and not yet parsed
    at_end = False
    while not at_end:
        # Read at least as much as is pending, so that a long object is not searched again for every block.
        block = file.read(max(CHUNK_BYTES, len(pending)))
        at_end = not block
        pending += block

        # Parse the objects that end in what has been read, one after the other.
        texts = []
        position = 0
        while True:
            # Stop at the bracket that closes the array, or if nothing is left.
            start = _skip_space(pending, position)
            is_closed = number > 0 and pending[start : start + 1] == b"]"
            if is_closed or start == len(pending):
                break

            # The bracket that opens the array, or the comma between two objects.
            if pending[start : start + 1] != expected:
                raise ValueError(f"in its array, {expected.decode()!r} is missing before object {number + 1}")
            start = _skip_space(pending, start + 1)

            # Where the object ends. Stop if it does not end here, or if the array is empty.
            is_empty = number == 0 and pending[start : start + 1] == b"]"
            end = None if is_empty else _find_object_end(pending, start)
            if end is None:
                break

            # Parse the object. `position` moves only now: a comma whose object is cut off is read again with it.
            number += 1
            texts.append(_parse_object(pending[start:end], field, f"object {number}"))
            expected = b","
            position = end

        if texts:
            yield Chunk(texts, len(texts))
        pending = pending[position:]

    # After the last object only the closing bracket may be left; an array without objects is [].
    ending = b"".join(pending.split())
    if ending.lstrip(JSON_SPACE) not in ((b"]",) if number else (b"[]",)):
        raise ValueError(f"its array is cut off or damaged after object {number}")


def _skip_space(source: bytes, start: int) -> int:
    """The first position from `start` on that is no white space."""
    while source[start : start + 1] in JSON_SPACES:
        start += 1
    return start


def _find_object_end(source: bytes, start: int) -> int | None:
    """The position after the JSON value that begins at `start` with a bracket, or None if it does not end in `source`.
    Raises ValueError if no bracket is there."""
    if start < len(source) and source[start : start + 1] not in (b"{", b"["):
        raise ValueError(f"{source[start : start + 20]!r} in its array is not an object")
    # Count the open brackets, without those inside of strings.
    depth = 0
    for match in JSON_STRUCTURE.finditer(source, start):
        match match[0][:1]:
            case b"{" | b"[":
                depth += 1
            case b"}" | b"]":
                depth -= 1
                if depth == 0:
                    return match.end()
            case _:  # a string: group 1 is its closing quote
                if match[1] is None:
                    return None
    return None


def read_csv(file: BinaryIO, column: str) -> Iterator[Chunk]:
    """One document per row after the first, which names the columns. Raises ValueError for a row of another length."""
    csv.field_size_limit(sys.maxsize)  # Python's own limit of 128 kB is shorter than a book
    rows = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), strict=True)

    # The header tells in which column the text is.
    names = next(rows, [])
    fix = f"choose one with --text-column: {format_names(names)}"
    require(column in names, f"its column {column!r} is missing; {fix}")
    column_index = names.index(column)

    # Collect rows until they make a chunk.
    texts = []
    characters = 0
    for row in rows:
        if not row:  # a blank line
            continue
        # A quote that is never closed, or a comma too many, would shift the columns.
        if len(row) != len(names):
            raise ValueError(f"line {rows.line_num} has {len(row)} fields, but the first line has {len(names)}")

        texts.append(row[column_index])
        characters += len(row[column_index])
        if characters > CHUNK_BYTES:
            yield Chunk(texts, len(texts))
            texts = []
            characters = 0
    yield Chunk(texts, len(texts))


def read_parquet(file: BinaryIO, column: str) -> Iterator[Chunk]:
    """One document per row; null is an empty document. Memory use stays small, however large a row group is."""
    import pyarrow.parquet as pq

    # Open the file by its name: a read from a Python file object that is under way at exit would block the exit.
    # pre_buffer=False: do not read the column of an entire row group at once.
    table = pq.ParquetFile(file.name, buffer_size=1 << 20, pre_buffer=False)
    _check_column(column, table.schema_arrow)

    # Rows per batch: as many as would make a chunk if all rows were as long as in the row group with the longest ones.
    groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
    longest_row_bytes = max((g.total_byte_size / max(1, g.num_rows) for g in groups), default=1)
    chunk_rows = int(CHUNK_BYTES / max(1, longest_row_bytes))
    batch_rows = max(1, min(PARQUET_BATCH_ROWS, chunk_rows))

    # Count every row as an equal share of the file, because pyarrow does not tell its position in the file.
    bytes_per_row = os.fstat(file.fileno()).st_size / max(1, table.metadata.num_rows)
    for batch in table.iter_batches(batch_rows, columns=[column]):
        texts = [text or "" for text in batch.column(0).to_pylist()]
        yield Chunk(texts, len(texts), bytes_per_row * len(texts))


def _check_column(name: str, schema) -> None:
    """Raise UserError unless column `name` of an arrow schema holds text."""
    # A number or a list would otherwise fail later, in the tokenizer, with an error that names no column.
    found = str(schema.field(name).type) if name in schema.names else "missing"
    is_text = found in ("string", "large_string", "string_view")
    fix = f"choose one with --text-column: {format_names(schema.names)}"
    require(is_text, f"its column {name!r} is {found}, not text; {fix}")


def read_with_datasets(builder: str, settings: dict, file: BinaryIO, column: str) -> Iterator[Chunk]:
    """One document per row of a file that only `datasets` reads; null is an empty document.

    builder: one of DATASETS_BUILDERS, by which `datasets` names its readers.
    settings: those of its configuration that the dataset's card sets, such as {"sep": "\\t"}.
    """
    # Both may come from a manifest that anyone has written, and a builder such as pandas would unpickle the file.
    require(builder in DATASETS_BUILDERS, f"its reader {builder!r} is not one of {', '.join(DATASETS_BUILDERS)}")
    match builder:
        case "csv":
            # Keep the text as it is: pandas would read NA as a missing value and 007 as a number. By default it would
            # parse 10,000 rows at a time, however long.
            as_text = {"keep_default_na": False, **settings, "converters": {column: str}}
            settings = {**as_text, "chunksize": STREAMED_ROWS}
        case "json" | "text":
            settings = {**settings, "chunksize": STREAMED_BYTES}

    # Stream the file, so that little of it is in memory. `datasets` takes the path for a glob pattern.
    datasets = import_datasets()
    path = glob.escape(os.path.abspath(file.name))
    with tempfile.TemporaryDirectory() as cache:
        loaded = datasets.load_dataset_builder(builder, data_files={"train": path}, cache_dir=cache, **settings)
        rows = loaded.as_streaming_dataset("train")

        # How many bytes of the file a text takes up is not known: count one per character, but in all no more than the
        # file has. The last chunk gets what is left.
        unread_bytes = os.fstat(file.fileno()).st_size
        texts = []
        characters = 0
        for row in rows:
            # The text of this row, which must be text.
            names = format_names(row)
            require(column in row, f"its column {column!r} is missing; choose one with --text-column: {names}")
            text = "" if row[column] is None else row[column]
            fix = f"choose one with --text-column: {names}"
            require(isinstance(text, str), f"its column {column!r} is {type(text).__name__}, not text; {fix}")

            # Collect texts until they make a chunk.
            texts.append(text)
            characters += len(text)
            if characters > CHUNK_BYTES:
                source_bytes = min(characters, unread_bytes)
                yield Chunk(texts, len(texts), source_bytes)
                unread_bytes -= source_bytes
                texts = []
                characters = 0
        yield Chunk(texts, len(texts), unread_bytes)


def import_datasets() -> ModuleType:
    """The package `datasets`, without its progress bars and warnings, and without the request by which it counts
    downloads, which would wait for seconds on a machine without a network."""
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def format_names(names: Iterable[str]) -> str:
    """The columns or fields of a file for an error message, which a hostile file must not make long."""
    listed = ", ".join(names)
    return listed if len(listed) <= MAX_NAMES_CHARACTERS else listed[:MAX_NAMES_CHARACTERS] + "..."


# ------------------------------------------------------------------------- which reader for which file

# In order of preference: of a Hub dataset with several formats below a path, the first one here is read. The suffix
# .json comes last, as datasets have metadata in .json files beside their data.
READERS: dict[str, Reader] = {
    ".parquet": read_parquet,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".csv": read_csv,
    ".json": read_json,
}

# Builders of `datasets` whose rows have text. The others read images and other media, or pickles, which can run code.
DATASETS_BUILDERS = ("parquet", "json", "csv", "arrow", "text", "webdataset")

# Prose and source code: formats whose every character is meant to be learned. Markup and data formats (html, xml, yaml,
# tsv, ...) are left out on purpose: tokenized as they are, they would train a model on tags and separators in silence.
TEXT_SUFFIXES = (
    ".txt .text .md .markdown .rst .adoc .org .tex "
    ".py .pyi .c .h .cc .cpp .hpp .cu .cuh .rs .go .java .kt .scala .swift .cs .js .mjs .jsx .ts .tsx .rb .php .pl "
    ".lua .r .jl .hs .ml .ex .erl .clj .lisp .scm .el .f90 .zig .dart .sh .bash .sql"
).split()
TOKEN_SUFFIXES = (".bin", ".npy")  # never text, although nanoGPT's files of character tokens are valid UTF-8
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


def split_suffixes(name: str) -> tuple[str, str]:
    """The suffix that names the format of a file and that of its compression, as written, each perhaps empty."""
    path = Path(name)
    if path.suffix.lower() in COMPRESSIONS:
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def choose_reader(path: Path) -> Reader:
    """The reader for a file, judging by its name alone. Raises UserError for a suffix that no reader takes."""
    # Data formats are parsed; files of text, and those without a suffix, are read as they are.
    suffix = split_suffixes(path.name)[0].lower()
    if suffix in READERS:
        return READERS[suffix]
    if suffix in ("", *TEXT_SUFFIXES):
        return read_text

    # Reading any other format as text would be a mistake: say which formats are known, and what to do.
    is_tokens = suffix in TOKEN_SUFFIXES
    require(not is_tokens, f"cannot read {path}: it holds tokens, not text; a folder of shards goes to --data-dir")
    text_rule = f"as plain text {', '.join(TEXT_SUFFIXES)} and names without a suffix"
    compressed = f"all but parquet may be compressed as {', '.join(COMPRESSIONS)}"
    known = f"this program reads {', '.join(READERS)}, and {text_rule}; {compressed}"
    fix = "convert it to .jsonl, an object with a text per line; or, if it is plain text, rename it to end in .txt"
    raise UserError(f"cannot read {path}: the suffix {suffix} is unknown ({known}); {fix}")


def open_compressed(path: Path, compression: str) -> tuple[BinaryIO, BinaryIO]:
    """Two views of a file: as it is on disk, whose position tells how much has been read, and decompressed. The caller
    closes the first. `compression`: one of COMPRESSIONS, or "" for none."""
    # Python's standard library has no zstd before 3.14; pyarrow, which reads parquet, has it.
    if compression == ".zst":
        import pyarrow

        on_disk = pyarrow.OSFile(str(path))
        return on_disk, io.BufferedReader(pyarrow.CompressedInputStream(on_disk, "zstd"))

    on_disk = open(path, "rb")
    match compression:
        case "":
            return on_disk, on_disk
        case ".gz":
            return on_disk, gzip.open(on_disk)
        case ".bz2":
            return on_disk, bz2.open(on_disk)
        case ".xz":
            return on_disk, lzma.open(on_disk)
        case _:
            raise ValueError(f"compression {compression!r} is not one of {', '.join(COMPRESSIONS)}")


def read_files(
    paths: Iterable[Path],
    first_index: int,
    column: str,
    on_file_read: Callable[[Path], None] = lambda path: None,
    datasets_reader: dict | None = None,
    split_on: str | None = None,
) -> Iterator[Chunk]:
    """Chunks of the files in turn. Raises UserError for a file that cannot be read.

    first_index: the index in the source of the first of `paths`, which may be those that are left to read.
    column: the column (parquet, csv) or field (jsonl) with the text.
    on_file_read: is called with each path after the last chunk of that file.
    datasets_reader: arguments of read_with_datasets, for a source whose files no reader here takes.
    split_on: what stands between the documents of a plain text file; None: such a file is one document.
    """
    for file_index, path in enumerate(paths, first_index):
        # Choose the reader by the file's name, so that an unknown format is refused before the file is opened.
        # `datasets` decompresses by itself.
        if datasets_reader:
            reader = partial(read_with_datasets, datasets_reader["builder"], datasets_reader["settings"])
            compression = ""
        else:
            reader = choose_reader(path)
            compression = split_suffixes(path.name)[1].lower()

        # With --split-on a plain text file has many documents; without it, look for separators, to warn of them.
        check_separator = reader is read_text and not split_on
        if reader is read_text and split_on:
            reader = partial(read_separated_text, split_on)

        # Read the file, a chunk at a time.
        try:
            on_disk, content = open_compressed(path, compression)
            with on_disk:
                position = 0
                for chunk in reader(content, column):
                    if not chunk.texts:
                        continue

                    # Text files with many documents often have GPT-2's separator between them, spelled out.
                    if check_separator and any(SEPARATOR in text for text in chunk.texts):
                        check_separator = False  # one warning per file
                        fix = f"if it stands between documents, add --split-on '{SEPARATOR}' and choose another --out"
                        print0(f"warning: {path} has {SEPARATOR} in it, which is read as text; {fix}")

                    # How much of the file the chunk takes up: what the reader says, or else how far the file was read.
                    source_bytes = chunk.source_bytes or on_disk.tell() - position
                    yield chunk._replace(file_index=file_index, source_bytes=source_bytes)
                    position = on_disk.tell()
        except UserError as e:  # says what to do
            raise UserError(f"cannot read {path}: {e}") from e
        except Exception as e:  # every library raises errors of its own for a damaged file
            raise UserError(f"cannot read {path}: {e}; convert it or leave it out") from e

        # The caller has asked for more than this file's last chunk, so a downloaded file may be deleted.
        on_file_read(path)
