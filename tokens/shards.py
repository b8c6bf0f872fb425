"""Shards: the token formats (`.npy` and llm.c's `.bin`) and the manifest that describes a folder of them.

fineweb.py writes shards, tokens/loader.py reads them, hub.py pushes and pulls them.

    write_shard("data/x/x_train_000001.npy", tokens)            # (n,) uint16; returns the file's sha256
    tokens = read_shard("data/x/x_train_000001.npy", sha256)
    problems = verify("data/x")                                 # every byte of a folder

A shard is a 1-D array of little-endian uint16 token ids behind a header:

    .npy    numpy's header: type and shape         | id 0 | id 1 | ...
    .bin    256 int32: magic, version, n, 0, 0 ... | id 0 | id 1 | ...

Files are named NAME_{train|val}_INDEX.npy or .bin, like build-nanogpt's edufineweb_train_000001.npy and kjj0's
fineweb_train_000001.bin. Every header is checked against the file's size, and nothing is ever unpickled.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from system.cli import UserError, explain_errors, require, suggest_path
from system.files import atomic_write, refuse_placeholder
from tokens import documents, sources
from tokens.documents import Chunk
from tokens.tokenizer import EOT, bulk_encoder

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb
MANIFEST = "manifest.json"
# NAME_train_000001.npy: name, split, index. The name has no slash, so it stays in its folder.
SHARD_NAME = re.compile(
    r"(?P<name>[^/\\\x00-\x1f\x7f-\x9f]+?)_(?P<split>train|val)(_(?P<index>[0-9]{1,18}))?\.(npy|bin)"
)
SHA256 = re.compile("[0-9a-f]{64}")
REPAIR_FOLDER = "run the command that made or pulled the folder again"
REPAIR = f"remove it, and {REPAIR_FOLDER}"
BIN_MAGIC, BIN_VERSION = documents.LLMC_SHARD, 1  # llm.c: dataloader.h
BIN_HEADER_WORDS = 256  # of int32


# ------------------------------------------------------------------------- which files


def shard_files(data_dir: str | Path) -> list[Path]:
    """Every file in the folder that is named like a shard, in order. Raises UserError if there is no folder."""
    data_dir = Path(data_dir)
    is_known = data_dir.name in [*sources.INSTALLED, *sources.HUB_DATASETS]
    source = data_dir.name if is_known else "FILES"
    fix = f"this makes one: python fineweb.py --source {source} --out {shlex.quote(str(data_dir))}"
    if data_dir.name in sources.HUB_DATASETS:
        ready_made = sources.HUB_DATASETS[data_dir.name].ready_made
        if ready_made:
            fix += f"; this pulls a ready-made one: python hub.py pull-data {ready_made} {shlex.quote(str(data_dir))}"
        fix += "; a full-size run needs 60 GB of disk (a first run without: make quickstart)"
    if data_dir.is_file():
        out = shlex.quote(f"data/{data_dir.stem}")
        fix = f"this makes one of that file: python fineweb.py --source {shlex.quote(str(data_dir))} --out {out}"
    root = Path(__file__).parent.parent
    if not data_dir.is_absolute() and (root / data_dir).is_dir():
        fix = f"there is one in this project: cd {shlex.quote(str(root))}"
    if not data_dir.is_dir():
        beside = [path for path in data_dir.parent.glob("*") if path.is_dir()]
        raise UserError(f"{data_dir.absolute()} is not a folder of shards; {suggest_path(data_dir, beside)}{fix}")

    # By number, as x_train_1000000 comes after x_train_999999.
    numbered = []
    for path in data_dir.iterdir():
        match = SHARD_NAME.fullmatch(path.name)
        if match and path.is_file():
            numbered.append((match["name"], int(match["index"] or 0), path.name))
    return [data_dir / file for _, _, file in sorted(numbered)]


def listed_shards(data_dir: str | Path) -> list[Path]:
    """The shards that a folder consists of, in order: those of its manifest, or without one every file that is named
    like a shard. Raises UserError if one of them is missing."""
    paths = shard_files(data_dir)
    if not read_manifest(data_dir):
        return paths
    listed = read_hashes(data_dir).keys()
    missing = sorted(listed - {path.name for path in paths})
    require(
        not missing,
        f"{Path(data_dir).absolute()} has no {', '.join(missing[:3])}, which {MANIFEST} lists; {REPAIR_FOLDER}",
    )
    return [path for path in paths if path.name in listed]


def find_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of the shards of `split` ("train" or "val"), in order. Raises UserError if there are none, or if a shard in
    the manifest is missing."""
    matches = [SHARD_NAME.fullmatch(path.name) for path in listed_shards(data_dir)]
    paths = [Path(data_dir) / match[0] for match in matches if match and match["split"] == split]
    fix = "a small source needs a smaller --shard-size of fineweb.py, in another folder"
    manifest = read_manifest(data_dir)
    if manifest and not manifest.complete:
        fix = "fineweb.py has not finished it: run the same command again"
    token_file = Path(data_dir) / "train.bin"
    is_text = any(path.suffix in [*documents.DATA_SUFFIXES, ".txt"] for path in Path(data_dir).iterdir())
    if not matches and not manifest and (is_text or token_file.is_file()):
        # Another folder, also if the texts are in data/.
        source, out = f"{data_dir}/*", shlex.quote(f"data/{Path(data_dir).absolute().name}-tokens")
        what = "texts"
        if token_file.is_file():
            source, what = str(token_file), "train.bin of nanoGPT (val is the first of them)"
        fix = f"this makes shards of the {what} there: python fineweb.py --source {shlex.quote(source)} --out {out}"
    require(paths, f"{Path(data_dir).absolute()} has no {split} shard, NAME_{split}_000001.npy or .bin; {fix}")
    return paths


# ------------------------------------------------------------------------- one file


def map_bin(path: Path) -> np.memmap:
    """The tokens of llm.c's format, as np.load maps those of numpy's."""
    header = np.fromfile(path, "<i4", BIN_HEADER_WORDS)
    first_words, expected = header[:2].tolist(), [BIN_MAGIC, BIN_VERSION]
    source = shlex.quote(str(path))
    fix = f"{REPAIR}; or, if it has nanoGPT's tokens, without a header: python fineweb.py --source {source}"
    require(first_words == expected, f"its first words are {first_words}, not {expected}; {fix}")
    return np.memmap(path, "<u2", "r", header.nbytes, int(header[2]))


def write_bin(file: BinaryIO, tokens: np.ndarray) -> None:
    header = np.zeros(BIN_HEADER_WORDS, "<i4")
    header[:3] = BIN_MAGIC, BIN_VERSION, len(tokens)
    file.write(header.data)
    file.write(tokens.data)


# How a format is mapped, and how it is written.
FORMATS: dict[str, tuple[Callable[[Path], np.memmap], Callable[[BinaryIO, np.ndarray], None]]] = {
    ".npy": (partial(np.load, mmap_mode="r"), np.save),
    ".bin": (map_bin, write_bin),
}


def map_shard(path: Path) -> np.memmap:
    """The tokens (n,) of a shard, of which only the header is read. Raises UserError unless the file is complete."""
    refuse_placeholder(path)
    with explain_errors(f"{path} is not a shard, a uint16 .npy with one dimension or an llm.c .bin", REPAIR):
        map_tokens, _ = FORMATS[path.suffix]
        tokens = map_tokens(path)
        require(tokens.dtype == "<u2" and tokens.ndim == 1, f"it holds {tokens.dtype} of shape {tokens.shape}")
        size = path.stat().st_size
        promise = f"its header promises {len(tokens):,} tokens but it has {size:,} bytes"
        require(len(tokens) and size == tokens.offset + tokens.nbytes, promise)
    return tokens


def count_tokens(path: str | Path) -> int:
    """Number of tokens in a shard, from its header, checked against the file's size. Raises UserError."""
    return len(map_shard(Path(path)))


def read_shard(path: str | Path, sha256: str | None = None) -> np.ndarray:
    """All tokens of a shard, (n_tokens,) uint16, read-only. Raises UserError if the shard is incomplete or its sha256
    is not the one given.

    Not memory-mapped: a mapped file that is truncated, or whose volume fails, ends the process with SIGBUS.
    """
    path = Path(path)
    offset = map_shard(path).offset
    data = path.read_bytes()
    # A bit that flipped on disk leaves the size as it was: only the hash can tell.
    if sha256:
        actual = hashlib.sha256(data).hexdigest()
        require(actual == sha256, f"{path} has sha256 {actual}, but {MANIFEST} says {sha256}: it is damaged; {REPAIR}")
    return np.frombuffer(data, "<u2", offset=offset)


def write_shard(path: str | Path, tokens: np.ndarray) -> str:
    """Write (n,) token ids as .npy or .bin, by suffix, all or nothing; returns the sha256 of the file."""
    path = Path(path)
    assert 0 <= tokens.min() <= tokens.max() <= 0xFFFF, "an id does not fit in uint16"
    _, write = FORMATS[path.suffix]
    with atomic_write(path) as f:
        write(f, tokens.astype("<u2", copy=False))
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def check_ids(tokens: np.ndarray, path: str | Path, vocab_size: int = EOT + 1) -> None:
    """Raise UserError naming shard, position and id if an id in `tokens` (n,) is not below vocab_size."""
    if tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        rule = f"ids must be below the vocabulary size, {vocab_size}"
        # The shard is right, and the network too small for it.
        fix = REPAIR if tokens[position] > EOT else f"GPT-2's tokens need --model.vocab-size {EOT + 1} or more"
        raise UserError(f"{path}: token {position:,} is id {tokens[position]}, but {rule}; {fix}")


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
    `source`: name, subset, revision, files [{path, bytes}], column; of a configuration of a Hub dataset also split;
    with the flags of these names also split_on and as_text; in place of column, ids_column or token_files if it held
    token ids."""

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
    with atomic_write(Path(data_dir) / MANIFEST) as f:
        f.write(json.dumps(asdict(manifest), indent=1).encode() + b"\n")


def read_manifest(data_dir: str | Path) -> Manifest | None:
    """The manifest of a folder, or None if it has none. Raises UserError if it is malformed, or if a path in it leads
    out of the folder: it may have been downloaded from anyone."""
    path = Path(data_dir) / MANIFEST
    if not path.exists():
        return None
    refuse_placeholder(path)
    content = path.read_bytes()
    with explain_errors(f"{path} is not a manifest of this program", "move it away, or get the folder again"):
        # A missing or unknown field is an error of the dataclass.
        raw = json.loads(content)
        manifest = Manifest(**{**raw, "shards": [Shard(**shard) for shard in raw["shards"]]})
        is_known = manifest.version == 1 and manifest.tokenizer == "gpt2" and f".{manifest.format}" in FORMATS
        require(is_known, "only version 1, tokenizer gpt2 and the formats npy and bin are supported")
        for shard in manifest.shards:
            require(SHA256.fullmatch(shard.sha256) and SHARD_NAME.fullmatch(shard.file), "a shard is malformed")
    return manifest


def read_hashes(data_dir: str | Path) -> dict[str, str]:
    """{file: sha256} of the shards in a folder's manifest; empty without a manifest."""
    manifest = read_manifest(data_dir)
    return {shard.file: shard.sha256 for shard in manifest.shards} if manifest else {}


def fingerprint(data_dir: str | Path) -> str:
    """Short hash of a folder's contents: names, token counts and, from a manifest, sha256s. Reads only headers."""
    hashes = read_hashes(data_dir)
    rows = [(path.name, count_tokens(path), hashes.get(path.name)) for path in listed_shards(data_dir)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def verify(data_dir: str | Path) -> list[str]:
    """What is wrong with the shards of a folder, one sentence each; empty if they are intact. Reads every byte: header,
    size, ids and, with a manifest, which shards there are and their sha256. Raises UserError if there is no shard."""
    manifest = read_manifest(data_dir)
    paths = {path.name: path for path in shard_files(data_dir)}
    require(paths or manifest, f"{data_dir} has no shard")
    hashes = read_hashes(data_dir)
    problems = [f"{Path(data_dir) / name} is missing" for name in hashes if name not in paths]
    if manifest and not manifest.complete:
        problems.append(f"{MANIFEST} is not finished; run the same fineweb.py command again")
    for name, path in paths.items():
        try:
            require(name in hashes or not manifest, f"{path} is not in {MANIFEST}; move it away")
            check_ids(read_shard(path, hashes.get(name)), path)
        except UserError as e:
            problems.append(str(e))
    return problems


# ------------------------------------------------------------------------- from text to shards

# The tokens of all documents form one stream, which is cut into shards of equal size; documents run over shards:
#
#     documents   EOT first... EOT second................ EOT third.....
#     chunks      [          chunk          ][           chunk          ]
#     shards      [    val    ][   train 1   ][   train 2   ][ the rest ]
#
# Tokenizing and writing overlap: while a shard and the manifest that lists it are written, a thread fills the next one.
#
#     tokenize    | shard 0 | shard 1 | shard 2 | ...
#     write                 | shard 0, manifest | shard 1, manifest | ...


def encode(encoder, chunk: Chunk) -> np.ndarray:
    """The ids (n,) uint16 of a chunk, with EOT before each document. encoder: tokenizer.bulk_encoder(); None if the
    chunk holds ids."""
    # The ids of all texts lie end to end, and `offsets` tells where each text begins:
    #
    #     ids        a a a b b c c c c          offsets 0 3 5; b continues the document of a
    #     with EOT   E a a a b b E c c c c
    if encoder:
        encoded = encoder.encode_batch(chunk.texts).layout
        ids = np.asarray(encoded.content.data, np.uint16)
        offsets = np.asarray(encoded.offsets.data[: len(chunk.texts)])
    else:
        ids = np.concatenate(chunk.texts)
        offsets = np.cumsum([0, *map(len, chunk.texts[:-1])])
    return np.insert(ids, offsets[np.array(chunk.begins)], EOT)


def unread_ids(chunks: Iterable[Chunk], manifest: Manifest) -> Iterator[tuple[np.ndarray, int, int]]:
    """The part of the stream that no shard of the manifest has yet, up to its limit_tokens, chunk by chunk: the ids
    (n,) uint16, their file, and how many ids of that file come before them."""
    encoder = None if documents.holds_ids(manifest.source) else bulk_encoder()
    left = (manifest.limit_tokens or sys.maxsize) - sum(shard.tokens for shard in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # ids of the first file that shards have
    file, position = -1, 0
    for chunk in chunks:
        if left <= 0:
            return
        if chunk.file != file:
            file, position = chunk.file, 0
        ids = encode(encoder, chunk)
        skipped = min(skip, len(ids))
        unread = ids[skipped : skipped + left]
        yield unread, file, position + skipped
        position += len(ids)
        skip -= skipped
        left -= len(unread)


def fill_shards(chunks: Iterable[Chunk], manifest: Manifest) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """The shards after those of the manifest: the tokens (n,) uint16 of each, and its `end` in the source."""
    shard = np.empty(manifest.shard_tokens, np.uint16)
    filled = 0
    file = position = 0
    for ids, file, position in unread_ids(chunks, manifest):
        while len(ids):
            # What fits into this shard, and the rest.
            part, ids = np.split(ids, [len(shard) - filled])
            shard[filled : filled + len(part)] = part
            filled += len(part)
            position += len(part)
            if filled == len(shard):
                yield shard, {"file": file, "token": position}
                shard = np.empty_like(shard)  # the last one may still be written
                filled = 0

    # The rest of the stream makes a last, shorter shard.
    if filled:
        yield shard[:filled], {"file": file, "token": position}


def add_shard(out: Path, name: str, manifest: Manifest, tokens: np.ndarray, end: dict[str, int]) -> Manifest:
    """Write the next shard, NAME_val_000000 or NAME_train_000001, ..., and the manifest, which is returned with it."""
    # The shard comes first: what a manifest lists is always complete. After a crash in between, no manifest lists the
    # shard, and it is written again.
    index = len(manifest.shards)
    split = "train" if index else "val"
    path = out / f"{name}_{split}_{index:06d}.{manifest.format}"
    sha256 = write_shard(path, tokens)
    documents = int(np.count_nonzero(tokens == EOT))  # no text is encoded as EOT, and in ids it separates documents
    shard = Shard(path.name, len(tokens), documents, sha256, end)
    manifest = replace(manifest, shards=[*manifest.shards, shard])
    write_manifest(out, manifest)
    return manifest
