"""Documents: the texts of files, in small chunks however large a file is.

    for chunk in read_file(Path("a.parquet"), index=0, source={"column": "text"}):
        ...  # chunk.texts: a few megabytes of text, to be tokenized together

    file --- a reader, chosen by its suffix ---> cells --- to_text ---> texts --- make_chunks ---> chunks

Called by tokens/sources.py. READERS says which suffixes there are; the help, the messages and the tests follow from it.

The readers of parquet, jsonl and text are this project's own: `datasets` 5.2 takes 7.6 GB of memory for a row group of
4 GB of parquet (here 0.2), turns the text "2020-01-01" of JSON into a date, and makes a document of each line of text.
Every other format is read by `datasets`.
"""

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from system.cli import UserError, explain_errors, print0, require

CHUNK_BYTES = 8 << 20  # text tokenized together: enough for all cores, little compared to the shards in memory
PIECE_CHARACTERS = 1 << 16  # of a text file, tokenized as a unit; the pieces of a chunk go to different cores
PARQUET_BATCH_ROWS = 64  # few, because rows may be books
TEXT_TYPES = ("string", "large_string", "string_view")  # of arrow
SEPARATOR = "<|endoftext|>"  # as it is spelled in text files

# The point after a non-space character and before a space or newline. No GPT-2 token spans this point or depends on
# what comes before it, so the tokens of the two parts are those of the whole.
SAFE_CUT = re.compile(r"\S(?=[ \n])")


class Cell(NamedTuple):
    """What a reader yields: a document as the file has it, or a piece of one.

    place: where it stands in the file, for messages, such as "line 3".
    begins: whether it begins a document; otherwise it continues the document before it.
    """

    value: object
    place: str = ""
    begins: bool = True


class Chunk(NamedTuple):
    """Texts to tokenize together.

    begins: whether each text begins a document; the others continue the document before them.
    file: index of the file in its source.
    """

    texts: list[str]
    begins: list[bool]
    file: int


# A reader gets a file and the name of the column or field with the text.
Reader = Callable[[Path, str], Iterator[Cell]]


def read_file(path: Path, index: int, source: dict) -> Iterator[Chunk]:
    """Chunks of a file. Raises UserError if it cannot be read.

    index: of the file in its source.
    source: the manifest's, which says how to read: `column` has the text (parquet, csv, jsonl, json), `split_on` stands
    between the documents of a plain text file, `as_text` makes plain text of every file.
    """
    reader = choose_reader(path, source.get("as_text", False))
    if reader is read_text and "split_on" in source:
        reader = partial(read_separated_text, source["split_on"])
    with explain_errors(f"cannot read {path}", "repair it, or leave it out"):
        yield from make_chunks(reader(path, source["column"]), index)


def make_chunks(cells: Iterable[Cell], file: int) -> Iterator[Chunk]:
    """Collect the texts of a file until they make a chunk."""
    chunk = Chunk([], [], file)
    characters = 0
    for cell in cells:
        text = to_text(cell)
        chunk.texts.append(text)
        chunk.begins.append(cell.begins)
        characters += len(text)
        if characters >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk([], [], file)
            characters = 0
    if chunk.texts:
        yield chunk


def to_text(cell: Cell) -> str:
    """The text of a cell; null is an empty document. Raises UserError for what is not text."""
    text = cell.value
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{cell.place} is not text: {text!r:.80}; choose another column with --text-column")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can hold half of a surrogate pair, which is no character: replace it as tiktoken does.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# ------------------------------------------------------------------------- our own readers


def read_parquet(path: Path, column: str) -> Iterator[Cell]:
    """A cell per row. Memory use stays small, however large a row group is."""
    import pyarrow.parquet as pq

    # pre_buffer=False: do not read the column of an entire row group at once.
    table = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)
    types = {field.name: str(field.type) for field in table.schema_arrow}
    require(types.get(column) in TEXT_TYPES, explain_column(column, types))
    row = 0
    for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[column]):
        for value in batch.column(0).to_pylist():
            row += 1
            yield Cell(value, f"row {row}")


def read_jsonl(path: Path, field: str) -> Iterator[Cell]:
    """A cell per line, an object with `field`; blank lines are skipped."""
    with open_decompressed(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            problem = f"line {number} is not an object with {field!r}: {line[:80]!r}"
            with explain_errors(problem, "choose another field with --text-column"):
                value = json.loads(line)[field]
            yield Cell(value, f"line {number}")


def read_text(path: Path, _column: str) -> Iterator[Cell]:
    """A file of UTF-8 text is one document, in pieces that no token crosses: their tokens are those of the whole."""
    pending = ""  # text after the last cut
    begins = True
    with open_text(path) as file:
        while block := file.read(PIECE_CHARACTERS):
            if begins and SEPARATOR in block:
                fix = f"if it stands between documents, add --split-on '{SEPARATOR}' and choose another --out"
                print0(f"warning: {path} has {SEPARATOR} in it, which is read as text; {fix}")
            cut = SAFE_CUT.search(block)
            if not cut:  # a long text without spaces
                pending += block
                continue
            yield Cell(pending + block[: cut.end()], begins=begins)
            pending = block[cut.end() :]
            begins = False
    yield Cell(pending, begins=begins)


def read_separated_text(separator: str, path: Path, _column: str) -> Iterator[Cell]:
    """A file of UTF-8 text with `separator` between its documents. Line breaks beside it belong to it; a document
    without text is left out. The longest document has to fit into memory."""
    pending = ""  # text after the last separator
    with open_text(path) as file:
        while block := file.read(CHUNK_BYTES):
            *ended, pending = (pending + block).split(separator)
            for document in ended:
                document = document.strip("\r\n")
                if document:
                    yield Cell(document)
    document = pending.strip("\r\n")
    if document:
        yield Cell(document)


def open_text(path: Path) -> io.TextIOWrapper:
    """A file of UTF-8 text, with its line ends as they are, without a byte order mark."""
    return io.TextIOWrapper(open_decompressed(path), encoding="utf-8-sig", newline="")


def open_decompressed(path: Path) -> io.BufferedReader:
    """A file of bytes, decompressed if its last suffix says so."""
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path)), 1 << 20)


def explain_column(name: str, names: Iterable[str]) -> str:
    return f"its column {name!r} is missing or not text; choose one with --text-column: {', '.join(names)}"


# ------------------------------------------------------------------------- formats that `datasets` reads


def read_with_datasets(builder_name: str, path: Path, column: str) -> Iterator[Cell]:
    """A cell per row of a local file."""
    pattern = glob.escape(os.path.abspath(path))
    builder = import_datasets().load_dataset_builder(builder_name, data_files={"train": pattern})
    return read_rows(stream_rows(builder, "train", column), column)


def stream_rows(builder, split: str, column: str):
    """The rows of a split as an IterableDataset of `datasets`, with the text in `column` as it stands."""
    if builder.name == "csv":
        # pandas would read NA as a missing value, 007 as a number, and the first column of a long row as an index.
        vars(builder.config).update(keep_default_na=False, converters={column: str}, index_col=False)
    if builder.name == "text":
        builder.config.sample_by = "document"  # not each line
    return builder.as_streaming_dataset(split)


def read_rows(rows: Iterable[dict], column: str) -> Iterator[Cell]:
    """A cell per row."""
    for number, row in enumerate(rows, 1):
        require(column in row, explain_column(column, row))
        yield Cell(row[column], f"row {number}")


def import_datasets() -> ModuleType:
    """The package `datasets`, without its progress bars and warnings, and without the request by which it counts
    downloads, which would wait for seconds on a machine without a network."""
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


# ------------------------------------------------------------------------- which reader for which file

# Formats whose every character is meant to be learned; --as-text adds others. Markup and data formats (html, xml, yaml)
# are not read unasked: tokenized as they are, they would train a model on tags and separators in silence.
TEXT_SUFFIXES = (".txt", ".md", ".py", "")
READERS: dict[str, Reader] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".ndjson": read_jsonl,
    ".csv": partial(read_with_datasets, "csv"),
    ".json": partial(read_with_datasets, "json"),
    **dict.fromkeys(TEXT_SUFFIXES, read_text),
}
COMPRESSIONS = (".gz", ".bz2", ".zst")  # of a whole file, after the suffix of its format


def split_suffixes(path: Path) -> tuple[str, str]:
    """The suffix that names the format of a file and that of its compression, as written, each perhaps empty."""
    if path.suffix in COMPRESSIONS:
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def choose_reader(path: Path, as_text: bool = False) -> Reader:
    """The reader for a file, judging by its name alone. Raises UserError for a suffix that no reader takes."""
    if as_text:
        return read_text
    suffix = split_suffixes(path)[0].lower()
    known = f"{' '.join(READERS)} and, after these, {' '.join(COMPRESSIONS)}"
    fix = "convert it to .jsonl, an object with a text per line; or, if it is plain text, add --as-text"
    require(suffix in READERS, f"cannot read {path}: its suffix {suffix} is not one of {known}; {fix}")
    return READERS[suffix]
