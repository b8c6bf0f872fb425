"""From chunks of text to full shards on disk. Called by fineweb.py.

    manifest = write_shards(read_files(paths, 0, "text"), Path("data/books"), "books", manifest, report)

The tokens of all documents form one stream, which is cut into shards of equal size; documents run over shards:

    documents   EOT first... EOT second................ EOT third.....
    chunks      [          chunk          ][           chunk          ]
    shards      [    val    ][   train 1   ][   train 2   ][ the rest ]

Tokenizing and writing overlap: while a thread writes a shard and the manifest that lists it, the next shard fills.

    tokenize    | shard 0 | shard 1 | shard 2 | ...
    write                 | shard 0, manifest | shard 1, manifest | ...
"""

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokens import shards
from tokens.documents import Chunk
from tokens.shards import Manifest, Shard
from tokens.tokenizer import EOT, bulk_encoder


class EncodedChunk(NamedTuple):
    """The tokens of a chunk, and where they come from."""

    ids: np.ndarray  # (n,) uint16, with EOT before each document
    document_starts: np.ndarray  # positions of these EOTs in ids, ascending
    file_index: int
    file_position: int  # tokens of the file before the first of `ids`
    source_bytes: float


class FilledShard(NamedTuple):
    """Tokens that are ready to be written as a shard."""

    tokens: np.ndarray  # (n,) uint16, a view of the buffer: valid until the shard after the next one begins to fill
    documents: int  # how many start in it
    end: dict[str, int]  # the manifest's: file index and position of the token after the last one


class ShardBuffer:
    """Collects the tokens of chunks and yields a shard whenever one is full, up to `limit` tokens in all.

    Two arrays take turns, so that a full shard can be written while the next one fills:

        filling    |#### filled ####|..............|    tokens of the next shard
        spare      |###############################|    the last full shard, which may still be written
    """

    def __init__(self, shard_tokens: int, limit: int):
        # What fills shards, and when to stop.
        self.shard_tokens = shard_tokens
        self.remaining = limit  # tokens until the limit

        # The two arrays that take turns.
        capacity = min(shard_tokens, limit)
        self.filling = np.empty(capacity, np.uint16)
        self.spare = np.empty(capacity, np.uint16)

        # What `filling` holds so far.
        self.filled = 0  # tokens in `filling`
        self.documents = 0  # of them, how many start a document
        self.end = {}  # of the latest token

    def add(self, chunk: EncodedChunk) -> Iterator[FilledShard]:
        """Take the tokens of a chunk up to the limit, and yield each shard that they fill."""
        start = 0
        while start < len(chunk.ids) and self.remaining:
            # Copy as much as the chunk has, as fits into this shard, and as the limit allows.
            count = min(len(chunk.ids) - start, self.shard_tokens - self.filled, self.remaining)
            stop = start + count
            self.filling[self.filled : self.filled + count] = chunk.ids[start:stop]
            self.filled += count
            self.remaining -= count

            # The documents whose first token was copied, and where in the source the copy ends.
            first, last = np.searchsorted(chunk.document_starts, (start, stop))
            self.documents += int(last - first)
            self.end = {"file": chunk.file_index, "token": chunk.file_position + stop}

            if self.filled == self.shard_tokens:
                yield self.finish_shard()
            start = stop

    def finish_shard(self) -> FilledShard:
        """The shard of what has been collected, full or not; the other array fills from now on."""
        # A view, not a copy: the array is not touched while the shard is written.
        shard = FilledShard(self.filling[: self.filled], self.documents, self.end)
        self.filling, self.spare = self.spare, self.filling
        self.filled = 0
        self.documents = 0
        return shard


def encode(encoder, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """The ids (n,) uint16 of a chunk with EOT before each document, and the positions (documents,) of these EOTs.

    encoder: tokenizer.bulk_encoder().
    """
    counts = f"a chunk of {len(chunk.texts)} texts starts {chunk.documents} documents"
    assert chunk.documents <= len(chunk.texts), f"{counts}: correct the reader in tokens/documents.py"
    tokens = encoder.encode_batch(chunk.texts).layout

    # The ids of all texts lie end to end, and `offsets` tells where each text begins. Every EOT that is inserted moves
    # the starts after it by one:
    #
    #     before    a a a b b c c c c        text_starts      0 3 5
    #     after     E a a a E b b E c c c c  their EOTs       0 4 7
    text_starts = np.asarray(tokens.offsets.data[: chunk.documents])
    ids = np.insert(np.asarray(tokens.content.data, np.uint16), text_starts, EOT)
    return ids, text_starts + np.arange(len(text_starts))


def encode_chunks(encoder, chunks: Iterable[Chunk], skip: int) -> Iterator[EncodedChunk]:
    """Tokenize chunks in turn, without the first `skip` tokens: those of the first file that shards hold already."""
    file_index = 0
    file_position = 0  # tokens of the current file in earlier chunks
    for chunk in chunks:
        # Positions count from the start of each file.
        if chunk.file_index != file_index:
            file_index = chunk.file_index
            file_position = 0
        ids, starts = encode(encoder, chunk)

        # Leave out what is still to be skipped: a part of this chunk, nothing, or all of it.
        skipped = min(skip, len(ids))
        skip -= skipped
        starts = starts[starts >= skipped] - skipped
        yield EncodedChunk(ids[skipped:], starts, file_index, file_position + skipped, chunk.source_bytes)
        file_position += len(ids)


def next_shard_path(out: Path, name: str, manifest: Manifest) -> Path:
    """The file of the shard after those in the manifest. The first shard is the val split, all others are train."""
    index = len(manifest.shards)
    split = "val" if index == 0 else "train"
    return out / f"{name}_{split}_{index:06d}.{manifest.format}"


def append_shard(out: Path, name: str, manifest: Manifest, filled: FilledShard) -> Manifest:
    """Write a shard, then the manifest that lists it, which is returned. After a crash in between, no manifest lists
    the shard, and it is written again."""
    # The shard comes first: what a manifest lists is always complete.
    path = next_shard_path(out, name, manifest)
    sha256 = shards.write_shard(path, filled.tokens)
    shard = Shard(path.name, len(filled.tokens), filled.documents, sha256, filled.end)

    # From here on, a resumed run continues after this shard.
    manifest = replace(manifest, shards=[*manifest.shards, shard])
    shards.write_manifest(out, manifest)
    return manifest


def write_shards(
    chunks: Iterable[Chunk], out: Path, name: str, manifest: Manifest, report: Callable[[float, int], None]
) -> Manifest:
    """Tokenize chunks into shards NAME_val_000000, NAME_train_000001, ... in the folder `out`.

    chunks: begin with the file in which the last shard of `manifest` ends.
    manifest: of the shards that exist; new ones are appended, up to its limit_tokens.
    report: is called after each chunk with its size in the source in bytes and the number of tokens so far.
    Returns the manifest with the new shards. Raises OSError if a shard cannot be written.
    """
    encoder = bulk_encoder()

    # Continue after the shards that exist: the token where the last one ends is the first to be kept.
    tokens_before = sum(shard.tokens for shard in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0
    limit = manifest.limit_tokens or sys.maxsize  # None: no limit
    new_tokens_limit = max(0, limit - tokens_before)
    buffer = ShardBuffer(manifest.shard_tokens, new_tokens_limit)

    # A shard is written in the background while the next one fills. Waiting for the previous manifest before the next
    # write begins also guarantees that the array which fills next is no longer being written.
    with ThreadPoolExecutor(1) as writer:
        latest_manifest = writer.submit(lambda: manifest)

        # No chunk is tokenized once the limit is reached.
        chunks_within_limit = itertools.takewhile(lambda chunk: buffer.remaining, chunks)
        for chunk in encode_chunks(encoder, chunks_within_limit, skip):
            for filled in buffer.add(chunk):
                latest_manifest = writer.submit(append_shard, out, name, latest_manifest.result(), filled)
            report(chunk.source_bytes, tokens_before + new_tokens_limit - buffer.remaining)
        manifest = latest_manifest.result()

    # The rest of the stream makes a last, shorter shard.
    if buffer.filled:
        manifest = append_shard(out, name, manifest, buffer.finish_shard())
    return manifest
