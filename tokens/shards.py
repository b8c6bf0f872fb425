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
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from system.cli import UserError, require
from system.files import atomic_write
from tokens.documents import Chunk
from tokens.prefetch import prefetch
from tokens.tokenizer import EOT, bulk_encoder

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb
MANIFEST = "manifest.json"
# NAME_train_000001.npy: name, split, index. The name has no slash, so it stays in its folder.
SHARD_NAME = re.compile(
    r"(?P<name>[^/\\\x00-\x1f\x7f-\x9f]+?)_(?P<split>train|val)(_(?P<index>[0-9]{1,18}))?\.(npy|bin)"
)
# A path that stays inside its folder: not absolute, without ".." and without control characters or backslashes.
RELATIVE_PATH = re.compile(r"(?!/)(?!(.*/)?\.\.(/|$))[^\0-\x1f\x7f-\x9f\\]+")
SHA256 = re.compile("[0-9a-f]{64}")
REPAIR_FOLDER = "run the command that made or pulled the folder again"
REPAIR = f"remove it, and {REPAIR_FOLDER}"
BIN_MAGIC, BIN_VERSION = 20240520, 1  # llm.c: dataloader.h
BIN_HEADER_WORDS = 256  # of int32
MAX_HEADER_BYTES = 1 << 16  # more than numpy accepts, whatever length a header states


# ------------------------------------------------------------------------- which files


def shard_files(data_dir: str | Path) -> list[Path]:
    """Every file in the folder that is named like a shard, in order. Raises UserError if there is no folder."""
    data_dir = Path(data_dir)
    fix = f"python fineweb.py --source WHAT --out {data_dir} makes one (--help lists what)"
    require(data_dir.is_dir(), f"{data_dir} is not a folder of shards; {fix}")
    paths = [p for p in data_dir.iterdir() if SHARD_NAME.fullmatch(p.name) and p.is_file()]

    # By number, as x_train_1000000 comes after x_train_999999.
    def sort_key(path: Path) -> tuple[str, int, str]:
        match = SHARD_NAME.fullmatch(path.name)
        return match["name"], int(match["index"] or 0), path.name

    return sorted(paths, key=sort_key)


def find_shards(data_dir: str | Path, split: str) -> list[Path]:
    """Paths of the shards of `split` ("train" or "val"), in order. Raises UserError if there are none, or if a shard in
    the manifest is missing."""
    paths = shard_files(data_dir)
    manifest = read_manifest(data_dir)
    for shard in manifest.shards if manifest else []:
        is_there = Path(data_dir, shard.file).is_file()
        require(is_there, f"{data_dir} has no {shard.file}, which {MANIFEST} lists; {REPAIR_FOLDER}")
    paths = [path for path in paths if SHARD_NAME.fullmatch(path.name)["split"] == split]
    fix = "name a folder that fineweb.py has made"
    require(paths, f"{data_dir} has no {split} shard, NAME_{split}_000001.npy or .bin; {fix}")
    return paths


# ------------------------------------------------------------------------- one file


def parse_npy_header(head: bytes) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) that numpy's header states. It is parsed as literals."""
    header = io.BytesIO(head)
    version = np.lib.format.read_magic(header)
    require(version == (1, 0), f"its version is {version}, not the one that numpy writes")
    shape, _, dtype = np.lib.format.read_array_header_1_0(header)
    is_token_array = dtype == np.dtype("<u2") and len(shape) == 1
    require(is_token_array, f"it holds {dtype} of shape {shape}, not uint16 with one dimension")
    return header.tell(), int(shape[0])


def make_npy_header(tokens: np.ndarray) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    return header.getvalue()


def parse_bin_header(head: bytes) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) that llm.c's header states."""
    words = np.frombuffer(head[: 4 * BIN_HEADER_WORDS], dtype="<i4")
    found = words[:2].tolist()
    require(found == [BIN_MAGIC, BIN_VERSION], f"its first words are {found}, not {[BIN_MAGIC, BIN_VERSION]}")
    return 4 * BIN_HEADER_WORDS, int(words[2])


def make_bin_header(tokens: np.ndarray) -> bytes:
    words = np.zeros(BIN_HEADER_WORDS, dtype="<i4")
    words[:3] = BIN_MAGIC, BIN_VERSION, len(tokens)
    return words.tobytes()


FORMATS = {".npy": (parse_npy_header, make_npy_header), ".bin": (parse_bin_header, make_bin_header)}


def parse_header(path: Path, head: bytes, size: int) -> tuple[int, int]:
    """(byte offset of the first token, number of tokens) of a complete shard of `size` bytes. Raises UserError."""
    try:
        parse, _ = FORMATS[path.suffix]
        offset, count = parse(head)
        expected = offset + 2 * count
        promise = f"its header promises {count:,} tokens ({expected:,} bytes) but it has {size:,} bytes"
        require(count > 0 and size == expected, promise)
    except Exception as e:  # numpy raises a dozen kinds for headers that are damaged
        rule = "a shard is a uint16 .npy with one dimension, or an llm.c .bin"
        raise UserError(f"{path} is not a shard: {str(e)[:300]} ({rule}); {REPAIR}") from None
    return offset, count


def count_tokens(path: str | Path) -> int:
    """Number of tokens in a shard, from its header, checked against the file's size. Raises UserError."""
    path = Path(path)
    with open(path, "rb") as f:
        head = f.read(MAX_HEADER_BYTES)
    return parse_header(path, head, path.stat().st_size)[1]


def read_shard(path: str | Path, sha256: str | None = None) -> np.ndarray:
    """All tokens of a shard, (n_tokens,) uint16, read-only. Raises UserError if the shard is incomplete or its sha256
    is not the one given.

    Not memory-mapped: a mapped file that is truncated, or whose volume fails, ends the process with SIGBUS.
    """
    path = Path(path)
    data = path.read_bytes()
    offset, _ = parse_header(path, data[:MAX_HEADER_BYTES], len(data))
    # A bit that flipped on disk leaves the size as it was: only the hash can tell.
    if sha256:
        actual = hashlib.sha256(data).hexdigest()
        require(actual == sha256, f"{path} has sha256 {actual}, but {MANIFEST} says {sha256}: it is damaged; {REPAIR}")
    return np.frombuffer(data, "<u2", offset=offset)


def write_shard(path: str | Path, tokens: np.ndarray) -> str:
    """Write (n,) token ids as .npy or .bin, by suffix, all or nothing; returns the sha256 of the file."""
    path = Path(path)
    tokens = np.ascontiguousarray(tokens)
    assert tokens.ndim == 1 and 0 <= tokens.min() <= tokens.max() <= 0xFFFF, "an id does not fit in uint16"
    tokens = tokens.astype("<u2", copy=False)

    # Write and hash from memory: the file is not read again.
    _, make_header = FORMATS[path.suffix]
    header = make_header(tokens)
    with atomic_write(path) as f:
        f.write(header)
        f.write(tokens.data)
    digest = hashlib.sha256(header)
    digest.update(tokens.data)
    return digest.hexdigest()


def check_ids(tokens: np.ndarray, path: str | Path, vocab_size: int = EOT + 1) -> None:
    """Raise UserError naming shard, position and id if an id in `tokens` (n,) is not below vocab_size."""
    if tokens.max() >= vocab_size:
        position = int(np.argmax(tokens >= vocab_size))
        rule = f"ids must be below the vocabulary size, {vocab_size}"
        raise UserError(f"{path}: token {position:,} is id {tokens[position]}, but {rule}; {REPAIR}")


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
    `source`: name, subset, column, revision, files [{path, bytes}]; of a configuration of a Hub dataset also split."""

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
    content = path.read_bytes()
    try:
        # A missing or unknown field is an error of the dataclass.
        raw = json.loads(content)
        manifest = Manifest(**{**raw, "shards": [Shard(**shard) for shard in raw["shards"]]})
        check_manifest(manifest)
    except Exception as e:  # of many kinds for content that is not a manifest
        problem = f"{path} is not a manifest of this program ({type(e).__name__}: {str(e)[:300]})"
        raise UserError(f"{problem}; move it away, or get the folder again") from None
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise UserError, or another error for fields of the wrong type, unless every field that is used is usable."""
    is_known = manifest.version == 1 and manifest.tokenizer == "gpt2" and f".{manifest.format}" in FORMATS
    require(is_known, "only version 1, tokenizer gpt2 and the formats npy and bin are supported")
    names = [shard.file for shard in manifest.shards]
    require(len(set(names)) == len(names), "a shard is listed twice")
    for shard in manifest.shards:
        require(SHA256.fullmatch(shard.sha256) and SHARD_NAME.fullmatch(shard.file), "a shard is malformed")
    for file in manifest.source["files"]:
        require(RELATIVE_PATH.fullmatch(file["path"]), "the path of a source file leads out of the folder")
    for key in ("name", "subset", "column", "revision"):
        require(isinstance(manifest.source[key], str), f"{key} of the source is not text")


def fingerprint(data_dir: str | Path) -> str:
    """Short hash of a folder's contents: names, token counts and, from a manifest, sha256s. Reads only headers."""
    manifest = read_manifest(data_dir)
    sha256_by_file = {shard.file: shard.sha256 for shard in manifest.shards} if manifest else {}
    rows = [(path.name, count_tokens(path), sha256_by_file.get(path.name)) for path in shard_files(data_dir)]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def verify(data_dir: str | Path) -> list[str]:
    """What is wrong with the shards of a folder, one sentence each; empty if they are intact. Reads every byte: header,
    size, ids and, with a manifest, which shards there are and their sha256. Raises UserError if there is no shard."""
    manifest = read_manifest(data_dir)
    paths = {path.name: path for path in shard_files(data_dir)}
    require(paths or manifest, f"{data_dir} has no shard")
    listed = {shard.file: shard for shard in manifest.shards} if manifest else {}
    problems = [f"{Path(data_dir) / name} is missing" for name in listed if name not in paths]
    if manifest and not manifest.complete:
        problems.append(f"{MANIFEST} is not finished; run the same fineweb.py command again")
    for name, path in paths.items():
        shard = listed.get(name)
        try:
            require(shard or not manifest, f"{path} is not in {MANIFEST}; move it away")
            tokens = read_shard(path, shard and shard.sha256)
            check_ids(tokens, path)
            stated = shard.tokens if shard else len(tokens)
            require(len(tokens) == stated, f"{path} has {len(tokens)} tokens, but {MANIFEST} says {stated}")
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
    """The ids (n,) uint16 of a chunk, with EOT before each document. encoder: tokenizer.bulk_encoder()."""
    # The ids of all texts lie end to end, and `offsets` tells where each text begins:
    #
    #     ids        a a a b b c c c c          offsets 0 3 5; b continues the document of a
    #     with EOT   E a a a b b E c c c c
    encoded = encoder.encode_batch(chunk.texts).layout
    offsets = np.asarray(encoded.offsets.data[: len(chunk.texts)])
    return np.insert(np.asarray(encoded.content.data, np.uint16), offsets[np.array(chunk.begins)], EOT)


def fill_shards(
    chunks: Iterable[Chunk], manifest: Manifest, report: Callable[[int], None]
) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """The shards after those of the manifest, up to its limit_tokens: the tokens (n,) uint16 and the `end` of each."""
    encoder = bulk_encoder()
    done = sum(shard.tokens for shard in manifest.shards)
    limit = manifest.limit_tokens or sys.maxsize
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # tokens of the first file that shards have
    shard = np.empty(min(manifest.shard_tokens, limit), np.uint16)
    filled = 0
    end = {"file": -1, "token": 0}  # how far the stream has been cut

    for chunk in chunks:
        if done >= limit:
            break
        ids = encode(encoder, chunk)
        if chunk.file != end["file"]:
            end = {"file": chunk.file, "token": 0}
        skipped = min(skip, len(ids))
        skip -= skipped
        end["token"] += skipped
        ids = ids[skipped : skipped + limit - done]
        while len(ids):
            # What fits into this shard, and the rest.
            part, ids = np.split(ids, [len(shard) - filled])
            shard[filled : filled + len(part)] = part
            filled += len(part)
            done += len(part)
            end["token"] += len(part)
            if filled == len(shard):
                yield shard, dict(end)
                shard = np.empty_like(shard)  # the last one may still be written
                filled = 0
        report(done)

    # The rest of the stream makes a last, shorter shard.
    if filled:
        yield shard[:filled], end


def write_shards(
    chunks: Iterable[Chunk], out: Path, name: str, manifest: Manifest, report: Callable[[int], None]
) -> Manifest:
    """Tokenize chunks into shards NAME_val_000000, NAME_train_000001, ... in the folder `out`.

    chunks: begin with the file in which the last shard of `manifest` ends.
    manifest: of the shards that exist; new ones are appended, up to its limit_tokens.
    report: is called after each chunk with the number of tokens so far.
    Returns the manifest with the new shards. Raises OSError if a shard cannot be written.
    """
    for tokens, end in prefetch(fill_shards(chunks, manifest, report), 1):
        # The shard comes first: what a manifest lists is always complete. After a crash in between, no manifest lists
        # the shard, and it is written again.
        index = len(manifest.shards)
        split = "train" if index else "val"
        path = out / f"{name}_{split}_{index:06d}.{manifest.format}"
        sha256 = write_shard(path, tokens)
        documents = int(np.count_nonzero(tokens == EOT))  # no text is encoded as EOT
        shard = Shard(path.name, len(tokens), documents, sha256, end)
        manifest = replace(manifest, shards=[*manifest.shards, shard])
        write_manifest(out, manifest)
    return manifest
