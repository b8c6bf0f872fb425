"""Shards: their formats, and the manifest that describes a folder of them.

    path = Path("data/x/x_train_000001.npy")
    sha256 = write_shard(path, tokens)                            # (n,) uint16
    tokens = read_shard(path, sha256)
    manifest = read_manifest("data/x")                            # None for the shards of other programs
    files = list_shards("data/x")                                 # path, split, tokens and sha256 of each

A shard is a 1-D array of little-endian uint16 token ids behind a header:

    .npy    numpy's header: type and shape         | id 0 | id 1 | ...
    .bin    256 int32: magic, version, n, 0, 0 ... | id 0 | id 1 | ...

FORMATS is the table of these. Files are named NAME_{train|val}_INDEX and a suffix of that table, like build-nanogpt's
edufineweb_train_000001.npy and kjj0's fineweb_train_000001.bin. Every header is checked against the file's size, and
nothing is ever unpickled.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import BinaryIO, NamedTuple

import numpy as np

from system.errors import UserError, explain_errors, require
from system.files import atomic_write
from tokens.tokenizer import EOT

MANIFEST = "manifest.json"
VERSION = 2  # of the manifest: whoever changes which tokens a source gives raises it
SHA256 = re.compile("[0-9a-f]{64}")
REPAIR = "run the command that made or pulled the folder again"
# Repositories of the Hub with the shards of a folder that presets read by default.
READY_MADE = {"fineweb-edu": "kjj0/finewebedu10B-gpt2", "fineweb": "kjj0/fineweb10B-gpt2"}
# The first word of llm.c's shards (dataloader.h), and of DDP-BASEMODEL-TRAIN's (data_common.py), otherwise the same.
BIN_MAGICS = (20240520, 20250211)
BIN_VERSION = 1
BIN_HEADER_WORDS = 256  # of int32


# ------------------------------------------------------------------------- formats


def map_npy(path: Path) -> np.memmap:
    """Unlike np.load, which also opens a zip of arrays."""
    return np.lib.format.open_memmap(path, "r")


def map_bin(path: Path) -> np.memmap:
    header = np.fromfile(path, "<u4", BIN_HEADER_WORDS)
    magic, version, n = header[:3].tolist()
    known = " or ".join(map(str, BIN_MAGICS))
    problem = f"its first words are {magic} and {version}, not {known} and {BIN_VERSION}"
    require(magic in BIN_MAGICS and version == BIN_VERSION, problem)
    return np.memmap(path, "<u2", "r", header.nbytes, n)


def write_bin(file: BinaryIO, tokens: np.ndarray) -> None:
    header = np.zeros(BIN_HEADER_WORDS, "<i4")
    header[:3] = BIN_MAGICS[0], BIN_VERSION, len(tokens)
    file.write(header.data)
    file.write(tokens.data)


class Format(NamedTuple):
    """One way to store ids, little-endian uint16, behind a header or none.

    map: returns the ids (n,) of a file, of which it reads the header. Raises UserError or ValueError for other files.
    write: writes ids (n,) to an open file.
    """

    map: Callable[[Path], np.memmap]
    write: Callable[[BinaryIO, np.ndarray], None]


# {suffix: format}. The names of files, what a folder holds, --format and messages follow from this table.
FORMATS = {".npy": Format(map_npy, np.save), ".bin": Format(map_bin, write_bin)}
SUFFIXES = " or ".join(FORMATS)
# NAME_train_000001.npy: name, split, index. The name has no slash, so it stays in its folder.
SHARD_NAME = re.compile(
    r"(?P<name>[^/\\\x00-\x1f\x7f-\x9f]+?)_(?P<split>train|val)(_(?P<index>[0-9]{1,18}))?"
    f"({'|'.join(map(re.escape, FORMATS))})"
)


# ------------------------------------------------------------------------- one file


def map_shard(path: Path) -> np.memmap:
    """The tokens (n,) of a shard, of which only the header is read. Raises UserError unless the file is complete."""
    problem = f"{path} is not a shard of uint16 in one dimension"
    with explain_errors(problem, f"remove it, and {REPAIR}", ValueError, TokenError):  # of numpy, for its header
        tokens = FORMATS[path.suffix.lower()].map(path)
        require(tokens.dtype == "<u2" and tokens.ndim == 1, f"it holds {tokens.dtype} of shape {tokens.shape}")
        size = path.stat().st_size
        promise = f"its header promises {len(tokens):,} tokens but it has {size:,} bytes"
        require(len(tokens) and size == tokens.offset + tokens.nbytes, promise)
    return tokens


def read_shard(path: Path, sha256: str | None = None) -> np.ndarray:
    """All tokens of a shard, (n_tokens,) uint16, read-only. Raises UserError if the shard is incomplete or its sha256
    is not the one given.

    Not memory-mapped: a mapped file that is truncated, or whose volume fails, ends the process with SIGBUS.
    """
    offset = map_shard(path).offset
    data = path.read_bytes()
    # A bit that flipped on disk leaves the size as it was: only the hash can tell.
    if sha256:
        actual = hashlib.sha256(data).hexdigest()
        require(actual == sha256, f"{path} is damaged, by its sha256 in {MANIFEST}; remove it, and {REPAIR}")
    return np.frombuffer(data, "<u2", offset=offset)


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write (n,) token ids in the format of the suffix, all or nothing; returns the sha256 of the file. Raises
    UserError for ids that uint16 does not hold."""
    check_ids(tokens, path, 2**16)
    write = FORMATS[path.suffix].write
    with atomic_write(path) as f:
        write(f, tokens.astype("<u2", copy=False))
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def check_ids(tokens: np.ndarray, path: str | Path, vocab_size: int = EOT + 1) -> None:
    """Raise UserError naming shard, position and id if an id in `tokens` (n,) is not below vocab_size."""
    if tokens.max(initial=0) >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        rule = f"not below --model.vocab-size {vocab_size}; GPT-2's are 0 to {EOT}"
        raise UserError(f"{path}: token {position:,} is id {tokens[position]}, {rule}")


# ------------------------------------------------------------------------- the manifest


@dataclass(frozen=True)
class SourceFile:
    path: str
    bytes: int


@dataclass(frozen=True)
class Source:
    """The text of a folder. `name`: of a dataset on the Hub, or "files", "stdlib" or "shakespeare". `subset` and
    `split`: of a dataset, as after these flags. `revision`: the Hub's, or a hash that changes with the files. `column`:
    the column of tables that has the text. `val_files`: how many of the files are the validation split, which are the
    first ones; if none is, the first shard is the validation split."""

    name: str
    subset: str = ""
    revision: str = ""
    files: list[SourceFile] = field(default_factory=list)
    column: str = ""
    split: str | None = None
    val_files: int = 0


@dataclass(frozen=True)
class Shard:
    """One finished shard. `documents`: how many start in it. `end`: the index of the source file of its last token, and
    the tokens used of that file by then."""

    file: str
    tokens: int
    documents: int
    sha256: str
    end: dict[str, int]


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds and where it comes from. `complete`: no shard is missing."""

    source: Source
    format: str
    shard_tokens: int
    limit_tokens: int | None = None
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    tokenizer: str = "gpt2"
    version: int = VERSION


def write_manifest(data_dir: Path, manifest: Manifest) -> None:
    """Write the manifest of a folder, all or nothing."""
    with atomic_write(data_dir / MANIFEST) as f:
        # Not indented: that takes a second for the names of 50,000 files, at each shard.
        f.write(json.dumps(manifest, default=vars).encode() + b"\n")


def read_manifest(data_dir: str | Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none. Raises UserError if it is malformed, or if a path in it leads
    out of the folder: it may have been downloaded from anyone."""
    path = Path(data_dir) / MANIFEST
    if not path.exists():
        return None
    problem, fix = f"{path} is not a manifest of this program", "move it away, or get the folder again"
    # A missing or unknown field is an error of the dataclass.
    with explain_errors(problem, fix, ValueError, KeyError, TypeError):
        raw = json.loads(path.read_bytes())
        require((raw["version"], raw["tokenizer"]) == (VERSION, "gpt2"), "its version or tokenizer is another one")
        files = [SourceFile(**file) for file in raw["source"]["files"]]
        source = Source(**{**raw["source"], "files": files})
        manifest = Manifest(**{**raw, "source": source, "shards": [Shard(**shard) for shard in raw["shards"]]})
        for shard in manifest.shards:
            require(SHA256.fullmatch(shard.sha256) and SHARD_NAME.fullmatch(shard.file), "a shard is malformed")
    return manifest


# ------------------------------------------------------------------------- a folder


class ShardFile(NamedTuple):
    """A shard of a folder. sha256: None without a manifest."""

    path: Path
    split: str
    tokens: int
    sha256: str | None


def shard_files(data_dir: str | Path) -> list[Path]:
    """Every file in the folder that is named like a shard, in order. Raises UserError if there is no folder, or if one
    of them has a suffix that is not in FORMATS."""
    data_dir = Path(data_dir)
    folder = shlex.quote(str(data_dir))
    make = f"python fineweb.py --source SOURCE --out {folder}"
    pull = f"python hub.py pull-data {READY_MADE.get(data_dir.name, 'OWNER/NAME')} {folder}"
    require(data_dir.is_dir(), f"{data_dir.absolute()} is not a folder of shards; make it: {make}; or pull it: {pull}")
    # By number, as x_train_1000000 comes after x_train_999999.
    numbered = []
    for path in filter(Path.is_file, data_dir.iterdir()):
        match = SHARD_NAME.fullmatch(path.name)
        if match:
            numbered.append((match["name"], int(match["index"] or 0), path))
        # If such a file were left out, nothing would say that the data are fewer. A hidden one is unfinished.
        elif re.fullmatch(r"[^.].*_(train|val)_[0-9]+\..+", path.name):
            raise UserError(f"{path} is named like a shard, but only {SUFFIXES} are read; convert it or move it away")
    return [path for _, _, path in sorted(numbered)]


def list_shards(data_dir: str | Path) -> list[ShardFile]:
    """The shards that a folder consists of, in order: those of its manifest, or without one every file that is named
    like a shard. Raises UserError if there is no folder, if one of them is missing or bad, or if the manifest does not
    list one."""
    found = shard_files(data_dir)
    listed: dict[Path, str | None] = dict.fromkeys(found)
    manifest = read_manifest(data_dir)
    if manifest:
        listed = {Path(data_dir) / shard.file: shard.sha256 for shard in manifest.shards}
    for path in found:
        require(path in listed, f"{path} is not in {MANIFEST}; {REPAIR}, or move the file away")
    files = []
    for path, sha256 in listed.items():
        match = SHARD_NAME.fullmatch(path.name)
        assert match
        files.append(ShardFile(path, match["split"], len(map_shard(path)), sha256))
    return files


def find_shards(data_dir: str | Path, split: str) -> list[ShardFile]:
    """The shards of `split` ("train" or "val") in a folder, in order. Raises UserError as list_shards does, or if there
    are none."""
    files = [file for file in list_shards(data_dir) if file.split == split]
    folder = Path(data_dir).absolute()
    require(files, f"{folder} has no {split} shard, NAME_{split}_000001{SUFFIXES}; run fineweb.py until it ends")
    return files


def fingerprint(data_dir: str | Path) -> str:
    """Short hash of the shards of a folder: names, token counts and, from a manifest, sha256s."""
    rows = [(file.path.name, file.tokens, file.sha256) for file in list_shards(data_dir)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
