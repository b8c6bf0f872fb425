"""Shards: the token formats (`.npy` and llm.c's `.bin`) and the manifest that describes a folder of them.

tokens/shard_writer.py writes shards, tokens/loader.py reads them, tokens/hub_data.py pushes and pulls them.

    write_shard("data/x/x_train_000001.npy", tokens)            # (n,) uint16; returns the file's sha256
    tokens = read_shard("data/x/x_train_000001.npy", sha256)
    problems = verify("data/x")                                 # every byte of a folder

A shard is a 1-D array of little-endian uint16 token ids behind a header:

    .npy    numpy's header: type and shape         | id 0 | id 1 | ...
    .bin    256 int32: magic, version, n, 0, 0 ... | id 0 | id 1 | ...

Files are named NAME_{train|val}_INDEX.npy or .bin, like build-nanogpt's edufineweb_train_000001.npy and kjj0's
fineweb_train_000001.bin. Every header is checked against the file's size before memory is allocated, and nothing is
ever unpickled.
"""

import hashlib
import io
import json
import re
import shlex
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from system.cli import UserError, require
from system.files import atomic_write
from tokens.tokenizer import EOT

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb
MANIFEST = "manifest.json"
# NAME_train_000001.npy: name, split, index. The name has no slash, so it stays in its folder.
SHARD_NAME = re.compile(
    r"(?P<stem>(?P<name>[^/\\\x00-\x1f\x7f-\x9f]+?)_(?P<split>train|val)(_(?P<index>[0-9]{1,18}))?)\.(npy|bin)"
)
# What to do about a damaged shard, after "remove it": both commands make or pull only what is missing.
REPAIR = "and run the command that made or pulled the folder again"
# A path that stays inside its folder: not absolute, without ".." and without control characters or backslashes.
RELATIVE_PATH = re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\0-\x1f\x7f-\x9f\\]+")
SHA256 = re.compile("[0-9a-f]{64}")
BIN_MAGIC, BIN_VERSION = 20240520, 1  # llm.c: dataloader.h
BIN_HEADER_WORDS = 256  # of int32
MAX_NPY_HEADER_BYTES = 1 << 16  # more than numpy accepts, whatever length a header states
CHECKED_TOKENS = 1 << 24  # tokens checked at a time, so that checking a shard needs little memory


# ------------------------------------------------------------------------- which files


def shard_files(data_dir: str | Path) -> list[Path]:
    """Every file in the folder that is named like a shard, in order. Raises UserError if there is no folder."""
    # The mistakes that are most likely: a path to one shard, and a folder that is yet to be made.
    data_dir = Path(data_dir)
    require(not data_dir.is_file(), f"{data_dir} is a file, but a folder of shards is needed; use {data_dir.parent}")
    require(data_dir.is_dir(), f"data folder {data_dir} does not exist; make it with: {_make_command(data_dir)}")

    # Other files, such as notes or the manifest, are left alone.
    paths = [p for p in data_dir.iterdir() if SHARD_NAME.fullmatch(p.name) and p.is_file()]

    # By number, as x_train_1000000 comes after x_train_999999.
    def sort_key(path: Path) -> tuple[str, int, str]:
        match = SHARD_NAME.fullmatch(path.name)
        return match["name"], int(match["index"] or 0), path.name

    return sorted(paths, key=sort_key)


def find_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of the shards of `split` ("train" or "val"), in order. Raises UserError if there are none."""
    # Those of one split.
    paths = [p for p in shard_files(data_dir) if SHARD_NAME.fullmatch(p.name)["split"] == split]
    rule = f"named like NAME_{split}_000001.npy or .bin"
    require(paths, f"data folder {data_dir} has no {split} shard ({rule}); make it with: {_make_command(data_dir)}")

    # The same shard in both formats would be trained on twice.
    for a, b in pairwise(paths):
        require(a.stem != b.stem, f"{data_dir} has {a.stem} both as .npy and as .bin; move one of them elsewhere")
    return paths


def _make_command(data_dir: str | Path) -> str:
    """The command that makes a folder of shards, judging by its name."""
    name = Path(data_dir).name
    source = name if name in ("fineweb-edu", "fineweb", "stdlib") else "FILE..."
    return f"python fineweb.py --source {source} --out {shlex.quote(str(data_dir))}"


# ------------------------------------------------------------------------- one file


def _read_header(path: Path) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) of a complete, well-formed shard. Raises UserError."""

    def read() -> tuple[int, int, int]:
        """The file's size, and what its header states."""
        size = path.stat().st_size
        with open(path, "rb") as f:
            match path.suffix:
                case ".npy":
                    return size, *_read_npy_header(f)
                case ".bin":
                    return size, *_read_bin_header(f)
                case _:
                    raise ValueError(f"suffix {path.suffix!r} is neither .npy nor .bin")

    try:
        size, offset, count = read()

        # A file that was cut, or whose header is damaged, has another size: no memory is allocated for it.
        expected_size = offset + 2 * count
        is_complete = count > 0 and size == expected_size
        promise = f"{count:,} tokens ({expected_size:,} bytes)"
        require(is_complete, f"its header promises {promise} but it has {size:,} bytes")

    except (FileNotFoundError, PermissionError, IsADirectoryError) as e:
        raise UserError(f"cannot read shard {path}: {e.strerror}") from None
    except OSError:  # the disk's fault, not the file's
        raise
    except Exception as e:  # numpy raises a dozen kinds for headers that are damaged
        problem = str(e) if isinstance(e, UserError) else f"its header is unreadable ({type(e).__name__}: {e!s:.300})"
        rule = "a shard is a uint16 .npy with one dimension, or an llm.c .bin"
        fix = f"Remove it, {REPAIR}, such as: {_make_command(path.parent)}"
        raise UserError(f"{path} is not a usable shard: {problem}; {rule}. {fix}") from None
    return offset, count


def _read_npy_header(f: BinaryIO) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) that numpy's header states. The header is parsed as literals,
    so nothing is unpickled."""
    # The header says how long it is. A damaged length cannot make numpy read more than this.
    header = io.BytesIO(f.read(MAX_NPY_HEADER_BYTES))
    major_version = np.lib.format.read_magic(header)[0]

    # numpy writes version 1 for such arrays; others may write 2.
    if major_version == 1:
        shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(header)

    # Other dtypes and shapes are arrays, but not of tokens.
    is_token_array = dtype == np.dtype("<u2") and len(shape) == 1
    require(is_token_array, f"it holds {dtype} of shape {shape}, not uint16 with one dimension"[:300])
    return header.tell(), int(shape[0])


def _read_bin_header(f: BinaryIO) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) that llm.c's header states."""
    # magic, version, number of tokens, zeros; a file that ends within the header has fewer words
    words = np.frombuffer(f.read(4 * BIN_HEADER_WORDS), dtype="<i4")
    first_words = words[:2].tolist()
    is_llm_c = len(words) == BIN_HEADER_WORDS and first_words == [BIN_MAGIC, BIN_VERSION]
    require(is_llm_c, f"its first words are {first_words}, not {[BIN_MAGIC, BIN_VERSION]}")
    return words.nbytes, int(words[2])


def count_tokens(path: str | Path) -> int:
    """Number of tokens in a shard, from its header, checked against the file's size. Raises UserError."""
    return _read_header(Path(path))[1]


def read_shard(path: str | Path, sha256: str | None = None) -> np.ndarray:
    """All tokens of a shard, (n_tokens,) uint16. Raises UserError if the shard is incomplete or its sha256 is not the
    one given, and OSError if the disk cannot be read for a minute.

    Not memory-mapped: a mapped file that is truncated, or whose volume fails, ends the process with SIGBUS.
    """
    # The header says how many bytes follow.
    offset, count = _read_header(Path(path))
    size = offset + 2 * count

    # Read header and tokens into one buffer, so that the hash covers exactly the bytes that are used. Allocate it only
    # once, also if the read is retried, because touching its pages is most of the cost.
    buffer = np.empty(size, np.uint8)
    read_bytes = _read_into(path, buffer)

    # Between the header and the tokens, the file may have been replaced by a shorter one.
    data = buffer[:read_bytes]
    require(len(data) == size, f"{path} was cut to {len(data):,} bytes while being read; remove it, {REPAIR}")

    # A bit that flipped on disk leaves the size as it was: only the hash can tell.
    if sha256:
        actual = hashlib.sha256(data).hexdigest()
        fix = f"it is damaged or replaced; remove it, {REPAIR}"
        require(actual == sha256, f"{path} has sha256 {actual}, but {MANIFEST} says {sha256}: {fix}")
    return data[offset:].view("<u2")  # (2 * n,) bytes -> (n,) ids


def _read_into(path: str | Path, buffer: np.ndarray) -> int:
    """Fill `buffer`, (n,) uint8, from the beginning of a file; returns how many bytes the file had for it. np.fromfile
    would mistake a disk error for the end of the file."""
    filled = 0
    with open(path, "rb", buffering=0) as f:
        while filled < len(buffer):
            # One read returns at most 2 GB.
            count = f.readinto(memoryview(buffer)[filled:])
            if not count:
                break
            filled += count
    return filled


def write_shard(path: str | Path, tokens: np.ndarray) -> str:
    """Write (n,) token ids as .npy or .bin, by suffix, all or nothing; returns the sha256 of the file."""
    # (n,) ids as they lie in the file; an id that does not fit would silently become another token.
    path = Path(path)
    tokens = np.ascontiguousarray(tokens)
    assert tokens.ndim == 1 and len(tokens), (path, tokens.shape)
    assert tokens.dtype == np.uint16 or 0 <= tokens.min() <= tokens.max() <= 0xFFFF, "an id does not fit in uint16"
    tokens = tokens.astype("<u2", copy=False)

    # The header of the format.
    match path.suffix:
        case ".npy":
            buffer = io.BytesIO()
            np.lib.format.write_array_header_1_0(buffer, np.lib.format.header_data_from_array_1_0(tokens))
            header = buffer.getvalue()
        case ".bin":
            words = np.zeros(BIN_HEADER_WORDS, dtype="<i4")
            words[:3] = BIN_MAGIC, BIN_VERSION, len(tokens)
            header = words.tobytes()
        case _:
            raise ValueError(f"{path}: a shard's suffix is .npy or .bin")

    # Write and hash from memory: the file is not read again.
    with atomic_write(path) as f:
        f.write(header)
        f.write(tokens.data)
    digest = hashlib.sha256(header)
    digest.update(tokens.data)
    return digest.hexdigest()


def check_ids(tokens: np.ndarray, path: str | Path, vocab_size: int = EOT + 1) -> None:
    """Raise UserError naming shard, position and id if an id in `tokens` (n,) is not below vocab_size."""
    for start in range(0, len(tokens), CHECKED_TOKENS):
        # Most parts are good, which their largest id tells.
        part = tokens[start : start + CHECKED_TOKENS]
        if part.max() < vocab_size:
            continue

        # Report the first id that is too large, with its position in the shard.
        position = int(np.argmax(part >= vocab_size))
        rule = f"ids must be below the vocabulary size, {vocab_size}"
        problem = f"token {start + position:,} is id {part[position]}, but {rule}"
        raise UserError(f"{path}: {problem}; remove it, {REPAIR}")


# ------------------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class Shard:
    """One finished shard. `documents`: how many start in it. `end`: the index of the source file of its last token, and
    the tokens used of that file by then; unknown, and so empty, for shards of another program."""

    file: str
    tokens: int
    documents: int
    sha256: str
    end: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds and where it comes from; no timestamps, so that the same work gives the same bytes.
    `source`: name, subset, column, revision, files [{path, bytes}]; of a configuration of a Hub dataset also config,
    split and, if `datasets` streams its files, reader {builder, settings}."""

    source: dict
    format: str
    shard_tokens: int
    limit_tokens: int | None = None
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    tokenizer: str = "gpt2"
    version: int = 1


def write_manifest(data_dir: str | Path, manifest: Manifest) -> None:
    """Write the manifest of a folder, all or nothing."""
    content = json.dumps(asdict(manifest), indent=1).encode() + b"\n"
    with atomic_write(Path(data_dir) / MANIFEST) as f:
        f.write(content)


def read_manifest(data_dir: str | Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none. Raises UserError if it is malformed, or if a path in it leads
    out of the folder: it may have been downloaded from anyone."""
    path = Path(data_dir) / MANIFEST
    try:
        # A missing or unknown field is an error of the dataclass.
        raw = json.loads(path.read_bytes())
        manifest = Manifest(**{**raw, "shards": [Shard(**shard) for shard in raw["shards"]]})
        _check_manifest(manifest)
    except FileNotFoundError:
        return None
    except OSError:
        raise
    except Exception as e:  # json, dataclass and checks raise errors of many kinds for content that is not a manifest
        problem = f"{path} is not a manifest of this program ({type(e).__name__}: {e!s:.300})"
        raise UserError(f"{problem}; move it away, or get the folder again") from None
    return manifest


def _check_manifest(manifest: Manifest) -> None:
    """Raise UserError, or another error for fields of the wrong type, unless every field that is used is usable."""
    # What this version can read.
    is_known = manifest.version == 1 and manifest.tokenizer == "gpt2" and manifest.format in ("npy", "bin")
    require(is_known, "only version 1, tokenizer gpt2 and the formats npy and bin are supported")

    # Names and paths that are opened or created must stay in the folder.
    names = [shard.file for shard in manifest.shards]
    require(all(SHARD_NAME.fullmatch(name) for name in names), "the name of a shard is malformed")
    require(len(set(names)) == len(names), "a shard is listed twice")
    source = manifest.source
    paths_stay_inside = all(RELATIVE_PATH.fullmatch(file["path"]) for file in source["files"])
    require(paths_stay_inside, "the path of a source file is malformed or leads out of the folder")

    # Fields that messages, cards and comparisons use.
    has_texts = all(isinstance(source[key], str) for key in ("name", "subset", "column", "revision"))
    require(has_texts, "name, subset, column and revision of the source must be text")
    require(all(SHA256.fullmatch(shard.sha256) for shard in manifest.shards), "the sha256 of a shard is malformed")
    reader = source.get("reader", {"builder": "", "settings": {}})
    is_reader = isinstance(reader["builder"], str) and isinstance(reader["settings"], dict)
    require(is_reader, "the reader of the source is malformed")


def fingerprint(data_dir: str | Path, with_hashes: bool = True) -> str:
    """Short hash of a folder's contents: names, token counts and, from a manifest, sha256s. Reads only headers.
    with_hashes=False: as if the folder had no manifest."""
    # Without a manifest, names and sizes are all that is cheap to know.
    manifest = read_manifest(data_dir) if with_hashes else None
    sha256_by_file = {shard.file: shard.sha256 for shard in manifest.shards} if manifest else {}
    rows = [(path.name, count_tokens(path), sha256_by_file.get(path.name)) for path in shard_files(data_dir)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------- checking a folder


def check_shard(path: Path, is_first: bool, sha256: str | None = None) -> tuple[int, int]:
    """(tokens, documents) of a shard, of which every byte is read. Raises UserError for what is wrong with it: header,
    size, ids, a given sha256 or, of a folder's first shard, that it does not begin with a document (a later one may
    begin within one)."""
    # Check the bytes, then the ids, then the first token.
    tokens = read_shard(path, sha256)
    check_ids(tokens, path)
    begins_document = tokens[0] == EOT
    require(begins_document or not is_first, f"{path} begins with id {tokens[0]}, not with {EOT}, a document's start")

    # Count in parts: a comparison of the whole shard would take half as much memory again.
    documents = 0
    for start in range(0, len(tokens), CHECKED_TOKENS):
        documents += int((tokens[start : start + CHECKED_TOKENS] == EOT).sum())
    return len(tokens), documents


def create_manifest(data_dir: str | Path) -> Manifest:
    """Check the shards of another program (header, size and ids of each), write the manifest that they lack, and return
    it. It says nothing about their source, which is unknown.

    Raises UserError, and writes nothing, if there is a manifest already, if there is no shard or one is bad, and if the
    shards are of both formats.
    """
    # The folder must be one set of shards without a manifest.
    data_dir = Path(data_dir)
    _refuse_existing_manifest(data_dir)
    paths = shard_files(data_dir)
    require(paths, f"data folder {data_dir} has no shard (named like NAME_train_000001.npy or .bin)")
    formats = {path.suffix.removeprefix(".") for path in paths}
    require(len(formats) == 1, f"{data_dir} has .npy and .bin shards; move one kind elsewhere")

    # Check every shard, and report all problems at once: a folder may take minutes to read.
    entries = []
    problems = []
    for path in paths:
        try:
            tokens, documents = check_shard(path, is_first=path == paths[0])
        except UserError as e:
            problems.append(str(e))
            continue
        sha256 = _hash_file(path)
        entries.append(Shard(path.name, tokens, documents, sha256, end={}))
    require(not problems, "\n".join(problems))

    # Reading took minutes, and another process may have written one in the meantime.
    _refuse_existing_manifest(data_dir)

    # The largest shard stands for their common size; the last one of a folder is smaller.
    source = {"name": "an unknown source", "subset": "", "column": "", "revision": "", "files": []}
    shard_tokens = max(shard.tokens for shard in entries)
    manifest = Manifest(source, formats.pop(), shard_tokens, complete=True, shards=entries)
    write_manifest(data_dir, manifest)
    return manifest


def _hash_file(path: Path) -> str:
    """The sha256 of a file."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _refuse_existing_manifest(data_dir: Path) -> None:
    """Raise UserError if a folder has a manifest, which says more about its shards than a new one could."""
    fix = f"check it with: python fineweb.py --verify {shlex.quote(str(data_dir))}"
    require(read_manifest(data_dir) is None, f"{data_dir} has a {MANIFEST} already; {fix}")


def verify(data_dir: str | Path) -> list[str]:
    """The problems that find_problems finds, one sentence each."""
    return [f"{name}: {problem}" for name, problem in find_problems(data_dir)]


def find_problems(data_dir: str | Path) -> list[tuple[str, str]]:
    """(file, problem) of everything that is wrong with the shards of a folder; empty if they are intact. Reads every
    byte.

    Checked: header and size; ids below the vocabulary size; the first shard begins with a document. With a manifest,
    also: missing and unknown shards, sha256, and the number of tokens and documents. Raises UserError if there is no
    folder or no shard.
    """
    manifest = read_manifest(data_dir)
    paths = {path.name: path for path in shard_files(data_dir)}
    problems = []

    # The manifest and the folder must list the same files.
    expected = {}
    if manifest is None:
        require(paths, f"data folder {data_dir} has no shard; make it with: {_make_command(data_dir)}")
    else:
        expected = {shard.file: shard for shard in manifest.shards}
        problems += [(name, "missing") for name in expected if name not in paths]
        problems += [(name, f"not in {MANIFEST}") for name in paths if name not in expected]
        if not manifest.complete:
            problems.append((MANIFEST, "not finished; run the same fineweb.py command again"))

    # Every file must match its entry in the manifest or, without one, be a good shard.
    first_name = next(iter(expected or paths), None)
    for name, path in paths.items():
        shard = expected.get(name)
        try:
            counts = check_shard(path, name == first_name, shard.sha256 if shard else None)
            if shard:
                stated = (shard.tokens, shard.documents)
                require(counts == stated, f"(tokens, documents) are {counts}, but {MANIFEST} says {stated}")
        except UserError as e:
            problems.append((name, str(e)))
    return problems
