"""Shards: the token formats (`.npy` and llm.c's `.bin`) and the manifest that describes a folder of them.

A shard is a 1-D array of little-endian uint16 token ids. Files are named NAME_{train|val}_INDEX.npy or .bin, like
build-nanogpt's edufineweb_train_000001.npy and kjj0's fineweb_train_000001.bin. Every header is checked against the
file's size before memory is allocated, and nothing is ever unpickled.
"""

import hashlib
import io
import json
import re
import shlex
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from system.cli import UserError, print0, require
from system.files import atomic_write
from tokens.tokenizer import EOT

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb
MANIFEST = "manifest.json"
SHARD_NAME = re.compile(
    r"(?P<stem>(?P<name>[^/\\\x00-\x1f\x7f-\x9f]+?)_(?P<split>train|val)(_(?P<index>[0-9]{1,18}))?)\.(npy|bin)"
)
INSIDE = re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\0-\x1f\x7f-\x9f\\]+")  # a relative path that stays inside its folder
BIN_MAGIC, BIN_VERSION, BIN_HEADER = 20240520, 1, 256  # llm.c: dataloader.h; the header is int32 words
CHUNK = 1 << 24  # tokens checked at a time, so that checking a shard needs little memory


# ------------------------------------------------------------------------- which files


def shard_files(data_dir: str | Path) -> list[Path]:
    """Every file in the folder that is named like a shard, in order. Raises UserError if there is no folder."""
    data_dir = Path(data_dir)
    require(not data_dir.is_file(), f"{data_dir} is a file, but a folder of shards is needed; use {data_dir.parent}")
    require(data_dir.is_dir(), f"data folder {data_dir} does not exist; make it with: {_make(data_dir)}")
    found = [(m, p) for p in data_dir.iterdir() if (m := SHARD_NAME.fullmatch(p.name)) and p.is_file()]
    return [p for m, p in sorted(found, key=lambda f: (f[0]["name"], int(f[0]["index"] or 0), f[1].name))]


def find_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of the shards of `split` ("train" or "val"), in order. Raises UserError if there are none."""
    found = [p for p in shard_files(data_dir) if SHARD_NAME.fullmatch(p.name)["split"] == split]
    rule = f"named like NAME_{split}_000001.npy or .bin"
    require(found, f"data folder {data_dir} has no {split} shard ({rule}); make it with: {_make(data_dir)}")
    for a, b in pairwise(found):
        require(a.stem != b.stem, f"{data_dir} has {a.stem} both as .npy and as .bin; move one of them elsewhere")
    return found


def _make(data_dir: str | Path) -> str:
    """The command that makes a folder of shards, judging by its name."""
    name = Path(data_dir).name
    source = name if name in ("fineweb-edu", "fineweb", "stdlib") else "FILE..."
    return f"python fineweb.py --source {source} --out {shlex.quote(str(data_dir))}"


def adoption(data_dir: str | Path) -> str:
    """What to do with shards that have no manifest."""
    return f"for shards of another program: python fineweb.py --adopt {shlex.quote(str(data_dir))}"


# ------------------------------------------------------------------------- one file


def _layout(path: Path) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) of a complete, well-formed shard. Raises UserError."""
    rule = "a shard is a uint16 .npy with one dimension, or an llm.c .bin. Move it away and make it again"
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            if path.suffix == ".npy":
                head = io.BytesIO(f.read(1 << 16))  # more than numpy accepts of a header, whatever length it states
                version = np.lib.format.read_magic(head)[0]  # 1, as numpy writes for such arrays, or 2
                read = np.lib.format.read_array_header_1_0 if version == 1 else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(head)  # literals only: nothing is unpickled
                uint16 = dtype == np.dtype("<u2") and len(shape) == 1
                require(uint16, f"it holds {dtype} of shape {shape}, not uint16 with one dimension"[:300])
                offset, count = head.tell(), int(shape[0])
            else:
                words = np.frombuffer(f.read(4 * BIN_HEADER), dtype="<i4")
                llm_c = len(words) == BIN_HEADER and words[:2].tolist() == [BIN_MAGIC, BIN_VERSION]
                require(llm_c, f"its first words are {words[:2].tolist()}, not {[BIN_MAGIC, BIN_VERSION]}")
                offset, count = words.nbytes, int(words[2])
        whole = count > 0 and size == offset + 2 * count
        require(whole, f"its header promises {count:,} tokens ({offset + 2 * count:,} bytes) but it has {size:,} bytes")
    except OSError as e:
        raise UserError(f"cannot read shard {path}: {e.strerror}") from None
    except Exception as e:  # numpy raises a dozen kinds for headers that are damaged
        why = str(e) if isinstance(e, UserError) else f"its header is unreadable ({type(e).__name__}: {e!s:.300})"
        raise UserError(f"{path} is not a usable shard: {why}; {rule}: {_make(path.parent)}") from None
    return offset, count


def count_tokens(path: str | Path) -> int:
    """Number of tokens in a shard, from its header, checked against the file's size. Raises UserError."""
    return _layout(Path(path))[1]


def read_shard(path: str | Path, sha256: str | None = None) -> np.ndarray:
    """A whole shard as (n_tokens,) uint16, not memory-mapped: truncating a mapped file would crash the process.
    Raises UserError if the shard is incomplete or its sha256 is not the one given."""
    offset, count = _layout(Path(path))
    try:
        data = np.fromfile(path, np.uint8, offset + 2 * count)
    except OSError as e:
        raise UserError(f"cannot read shard {path}: {e.strerror}") from None
    require(len(data) == offset + 2 * count, f"{path} was cut to {len(data):,} bytes while being read; make it again")
    if sha256:
        found = hashlib.sha256(data).hexdigest()
        mend = "it is damaged or replaced; remove it and run the command that made or pulled the folder again"
        require(found == sha256, f"{path} has sha256 {found}, but {MANIFEST} says {sha256}: {mend}")
    return data[offset:].view("<u2")


def write_shard(path: str | Path, tokens: np.ndarray) -> str:
    """Write (n,) token ids as .npy or .bin, by suffix, all or nothing; returns the sha256 of the file."""
    path, tokens = Path(path), np.ascontiguousarray(tokens)
    assert tokens.ndim == 1 and len(tokens) and path.suffix in (".npy", ".bin"), (path, tokens.shape)
    assert tokens.dtype == np.uint16 or 0 <= tokens.min() <= tokens.max() <= 0xFFFF, "an id does not fit in uint16"
    tokens = tokens.astype("<u2", copy=False)
    if path.suffix == ".npy":
        head = io.BytesIO()
        np.lib.format.write_array_header_1_0(head, np.lib.format.header_data_from_array_1_0(tokens))
        head = head.getvalue()
    else:
        head = np.array([BIN_MAGIC, BIN_VERSION, len(tokens)] + [0] * (BIN_HEADER - 3), dtype="<i4").tobytes()
    with atomic_write(path) as f:
        f.write(head)
        f.write(tokens.data)
    digest = hashlib.sha256(head)
    digest.update(tokens.data)
    return digest.hexdigest()


def check_ids(tokens: np.ndarray, path: str | Path, vocab_size: int = EOT + 1) -> None:
    """Raise UserError naming shard, position and id if an id in `tokens` (n,) is not below vocab_size."""
    for start in range(0, len(tokens), CHUNK):
        part = tokens[start : start + CHUNK]
        if part.max() >= vocab_size:
            at = int(np.argmax(part >= vocab_size))
            rule = f"ids must be below the vocabulary size, {vocab_size}"
            raise UserError(f"{path}: token {start + at:,} is id {part[at]}, but {rule}; make it again or move it away")


# ------------------------------------------------------------------------- the manifest


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
    """What a folder of shards holds and where it comes from; no timestamps, so that the same work gives the same bytes.
    `source`: name, subset, column, revision, files [{path, bytes}]."""

    source: dict
    format: str
    shard_tokens: int
    limit_tokens: int | None = None
    complete: bool = False
    shards: list[Shard] = field(default_factory=list)
    tokenizer: str = "gpt2"
    version: int = 1


def write_manifest(data_dir: str | Path, manifest: Manifest) -> None:
    with atomic_write(Path(data_dir) / MANIFEST) as f:
        f.write(json.dumps(asdict(manifest), indent=1).encode() + b"\n")


def read_manifest(data_dir: str | Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none. Raises UserError if it is malformed, or if a path in it, which
    may be a stranger's, leads out of the folder."""
    path = Path(data_dir) / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
        manifest = Manifest(**{**raw, "shards": [Shard(**s) for s in raw["shards"]]})
        source, names = manifest.source, [s.file for s in manifest.shards]
        known = manifest.version == 1 and manifest.tokenizer == "gpt2" and manifest.format in ("npy", "bin")
        require(known, "version 1, tokenizer gpt2 and format npy or bin are known")
        require(all(SHARD_NAME.fullmatch(n) for n in names) and len(set(names)) == len(names), "names of shards")
        require(all(INSIDE.fullmatch(f["path"]) for f in source["files"]), "paths of the source's files")
        require(all(isinstance(source[k], str) for k in ("name", "subset", "column", "revision")), "source")
        require(all(re.fullmatch("[0-9a-f]{64}", s.sha256) for s in manifest.shards), "sha256")
    except FileNotFoundError:
        return None
    except Exception as e:
        why = f"{path} is not a manifest of this program ({type(e).__name__}: {e!s:.300})"
        raise UserError(f"{why}; move it away, or get the folder again") from None
    return manifest


def fingerprint(data_dir: str | Path) -> str:
    """Short hash of a folder's contents: names, token counts and, from any manifest, sha256s. Reads only headers."""
    manifest = read_manifest(data_dir)
    known = {s.file: s.sha256 for s in manifest.shards} if manifest else {}
    rows = [(p.name, count_tokens(p), known.get(p.name)) for p in shard_files(data_dir)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def inspect(path: Path, first: bool, sha256: str | None = None) -> tuple[int, int]:
    """(tokens, documents) of a shard, of which every byte is read. Raises UserError for what is wrong with it: header,
    size, ids, a given sha256 or, of the first, that it does not begin with a document (a later one may not)."""
    tokens = read_shard(path, sha256)
    check_ids(tokens, path)
    require(not first or tokens[0] == EOT, f"{path} begins with id {tokens[0]}, not with {EOT}, a document's start")
    return len(tokens), sum(int((tokens[i : i + CHUNK] == EOT).sum()) for i in range(0, len(tokens), CHUNK))


def adopt(data_dir: Path) -> Manifest:
    """Write the manifest of shards that others made, as they are; of their source nothing is known. Raises UserError,
    also if there is one already."""
    files = shard_files(data_dir)
    require(files, f"data folder {data_dir} has no shard (named like NAME_train_000001.npy or .bin)")
    there = f"{data_dir} has a {MANIFEST} already; check it with: python fineweb.py --verify {data_dir}"
    require(read_manifest(data_dir) is None, there)
    formats = {path.suffix[1:] for path in files}
    require(len(formats) == 1, f"{data_dir} has .npy and .bin shards; move one kind elsewhere")
    made = []
    for path in files:
        tokens, documents = inspect(path, first=not made)
        with open(path, "rb") as f:
            made.append(Shard(path.name, tokens, documents, hashlib.file_digest(f, "sha256").hexdigest(), end={}))
    source = {"name": "an unknown source", "subset": "", "column": "", "revision": "", "files": []}
    manifest = Manifest(source, formats.pop(), max(s.tokens for s in made), complete=True, shards=made)
    write_manifest(data_dir, manifest)
    return manifest


def verify(data_dir: str | Path) -> list[str]:
    """What is wrong with the shards of a folder, one sentence each; empty if nothing is. Reads every byte.

    Checked: header and size; ids below the vocabulary size; with a manifest, also missing and unknown shards, sha256,
    and one EOT per document, the very first token among them (a later shard may begin within a document). Raises
    UserError if there is no folder or no shard.
    """
    manifest, files = read_manifest(data_dir), {p.name: p for p in shard_files(data_dir)}
    known = {s.file: s for s in manifest.shards} if manifest else {}
    wrong = [f"{name}: missing" for name in known if name not in files]
    if manifest is None:
        require(files, f"data folder {data_dir} has no shard; make it with: {_make(data_dir)}")
        print0(f"warning: {data_dir} has no {MANIFEST}: checking headers, sizes and ids only; {adoption(data_dir)}")
    else:
        wrong += [f"{name}: not in {MANIFEST}" for name in files if name not in known]
        wrong += [] if manifest.complete else [f"{MANIFEST}: not finished; run the same fineweb.py command again"]
    for name, path in files.items():
        try:
            shard = known.get(name)
            found = inspect(path, name == next(iter(known or files)), shard and shard.sha256)
            if shard:
                stated = (shard.tokens, shard.documents)
                require(found == stated, f"(tokens, documents) are {found}, but {MANIFEST} says {stated}")
        except UserError as e:
            wrong.append(f"{name}: {e}")
    return wrong
