"""From chunks of text to full shards on disk. Called by fineweb.py.

    manifest = write_shards(chunks, Path("data/books"), "books", manifest, report)

The tokens of all documents form one stream, which is cut into shards of equal size; documents run over shards:

    documents   EOT first... EOT second................ EOT third.....
    chunks      [          chunk          ][           chunk          ]
    shards      [    val    ][   train 1   ][   train 2   ][ the rest ]

Tokenizing and writing overlap: while a shard and the manifest that lists it are written, a thread fills the next one.

    tokenize    | shard 0 | shard 1 | shard 2 | ...
    write                 | shard 0, manifest | shard 1, manifest | ...
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokens import shards
from tokens.documents import Chunk
from tokens.prefetch import prefetch
from tokens.shards import Manifest, Shard
from tokens.tokenizer import EOT, bulk_encoder


class FilledShard(NamedTuple):
    """Tokens that are ready to be written as a shard."""

    tokens: np.ndarray  # (n,) uint16
    documents: int  # how many start in it
    end: dict[str, int]  # the manifest's: file index and position of the token after the last one


def encode(encoder, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """The ids (n,) uint16 of a chunk with EOT before each document, and the positions (documents,) of these EOTs.

    encoder: tokenizer.bulk_encoder().
    """
    tokens = encoder.encode_batch(chunk.texts).layout

    # The ids of all texts lie end to end, and `offsets` tells where each text begins. Every EOT that is inserted moves
    # the starts after it by one:
    #
    #     before    a a a b b c c c c        text_starts      0 3 5
    #     after     E a a a E b b E c c c c  their EOTs       0 4 7
    offsets = np.asarray(tokens.offsets.data[: len(chunk.texts)])
    text_starts = offsets[np.array(chunk.begins)]
    ids = np.insert(np.asarray(tokens.content.data, np.uint16), text_starts, EOT)
    return ids, text_starts + np.arange(len(text_starts))


def fill_shards(chunks: Iterable[Chunk], manifest: Manifest, report: Callable[[int], None]) -> Iterator[FilledShard]:
    """Tokenize chunks into the shards after those of the manifest, up to its limit_tokens."""
    encoder = bulk_encoder()
    done = sum(shard.tokens for shard in manifest.shards)
    limit = manifest.limit_tokens or sys.maxsize
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # tokens that shards hold already
    size = min(manifest.shard_tokens, limit)
    buffer = np.empty(size, np.uint16)
    filled = 0
    documents = 0
    end = {}
    file = None  # of the latest chunk
    position = 0  # its tokens so far

    for chunk in chunks:
        if done >= limit:
            break
        if chunk.file != file:
            file = chunk.file
            position = 0
        ids, document_starts = encode(encoder, chunk)
        taken = min(skip, len(ids))
        skip -= taken
        while taken < len(ids) and done < limit:
            # As much as the chunk has, as fits into this shard, and as the limit allows.
            count = min(len(ids) - taken, size - filled, limit - done)
            buffer[filled : filled + count] = ids[taken : taken + count]
            first, last = np.searchsorted(document_starts, (taken, taken + count))
            documents += int(last - first)
            filled += count
            done += count
            taken += count
            end = {"file": file, "token": position + taken}
            if filled == size:
                yield FilledShard(buffer, documents, end)
                buffer = np.empty(size, np.uint16)  # the last one may still be written
                filled = 0
                documents = 0
        position += len(ids)
        report(done)

    # The rest of the stream makes a last, shorter shard.
    if filled:
        yield FilledShard(buffer[:filled], documents, end)


def write_shards(
    chunks: Iterable[Chunk], out: Path, name: str, manifest: Manifest, report: Callable[[int], None]
) -> Manifest:
    """Tokenize chunks into shards NAME_val_000000, NAME_train_000001, ... in the folder `out`.

    chunks: begin with the file in which the last shard of `manifest` ends.
    manifest: of the shards that exist; new ones are appended, up to its limit_tokens.
    report: is called after each chunk with the number of tokens so far.
    Returns the manifest with the new shards. Raises OSError if a shard cannot be written.
    """
    for filled in prefetch(fill_shards(chunks, manifest, report), 1):
        # The shard comes first: what a manifest lists is always complete. After a crash in between, no manifest lists
        # the shard, and it is written again.
        index = len(manifest.shards)
        split = "train" if index else "val"
        path = out / f"{name}_{split}_{index:06d}.{manifest.format}"
        sha256 = shards.write_shard(path, filled.tokens)
        shard = Shard(path.name, len(filled.tokens), filled.documents, sha256, filled.end)
        manifest = replace(manifest, shards=[*manifest.shards, shard])
        shards.write_manifest(out, manifest)
    return manifest
