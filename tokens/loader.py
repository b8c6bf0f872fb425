"""Which sequences each step reads, and their tokens on the device.

The order is a pure function of (seed, step), independent of ranks, micro-batch size and restarts. A shard of n tokens
holds (n - 1) // T windows of T inputs (and T targets, shifted by one); up to T tokens after the last whole window are
not used. The epochs form one endless stream that has every window once per epoch; each step takes the next
`sequences_per_step` windows and may straddle two epochs, so no rank runs dry and nothing in between is dropped.

When shuffling, each epoch visits the shards in a new order, in groups of at most POOL tokens, and the windows of each
in a new order; a shard is read once, whole and front to back, when its group's turn comes. A shard of FineWeb is a
group of its own; small shards are mixed, so a run of less than an epoch sees all of a small corpus, not a few shards.
Otherwise the order is build-nanogpt's: shard by shard, window by window (build-nanogpt skips up to one step's worth of
windows at the end of each shard; here they are used).

A shard listed in a manifest must match its sha256 when read: damage on disk ends the run instead of being trained on.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from system.cli import require
from system.distributed import Runtime
from tokens import shards
from tokens.prefetch import prefetch

POOL = 100_000_000  # tokens that are shuffled together: one full shard, as much as is in memory anyway


@lru_cache(maxsize=8)
def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), fixed forever by the 64-bit integers `key`: the argsort of splitmix64 hashes (Steele
    et al. 2014)."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for k in key:
            state = mix(state ^ np.uint64(k % 2**64))
        return np.argsort(mix(state ^ mix(np.arange(n, dtype=np.uint64))), kind="stable")


class Order:
    """The stream of windows: position -> (shard, window). Reaching any position costs O(windows of a group of shards).

    windows: of each shard. together: shards in a group, when shuffling."""

    def __init__(self, windows: list[int], seed: int, shuffle: bool, together: int = 1):
        self.windows, self.seed, self.shuffle = np.asarray(windows), seed, shuffle
        self.together = together if shuffle else 1
        self.per_epoch = int(self.windows.sum())

    def _permuted(self, n: int, *key: int) -> np.ndarray:
        return permutation(n, self.seed, *key) if self.shuffle else np.arange(n)

    def _in_one_group(self, position: int, most: int) -> np.ndarray:
        """(n, 2) of (shard, window) from a stream position on, n <= most, none beyond the group of shards it is in."""
        epoch, in_epoch = divmod(position, self.per_epoch)
        visit = self._permuted(len(self.windows), epoch, 0)  # the shards in this epoch's order
        ends = np.cumsum(self.windows[visit])
        first = int(np.searchsorted(ends, in_epoch, side="right"))  # where in `visit` the shard of this position is
        first -= first % self.together  # where its group begins
        group = visit[first : first + self.together]
        in_group = in_epoch - int(ends[first] - self.windows[group[0]])
        ends = np.cumsum(self.windows[group])
        mixed = self._permuted(int(ends[-1]), epoch, 1, int(group[0]))[in_group : in_group + most]
        member = np.searchsorted(ends, mixed, side="right")  # which shard of the group each is in
        begins = ends - self.windows[group]
        return np.stack([group[member], mixed - begins[member]], axis=1)

    def span(self, start: int, count: int) -> np.ndarray:
        """(count, 2) int64 of (shard, window) for the stream positions start .. start + count - 1."""
        pieces, end = [], start + count
        while start < end:
            pieces.append(self._in_one_group(start, end - start))
            start += len(pieces[-1])
        return np.concatenate(pieces)


class Loader:
    """Token windows of one split of a shard folder.

    Raises UserError for a missing or empty folder, a bad shard, ids above the vocabulary or too little data.
    """

    def __init__(self, data_dir: str | Path, split: str, T: int, vocab_size: int, seed: int = 0, shuffle: bool = False):
        self.data_dir, self.T, self.vocab_size = data_dir, T, vocab_size
        self.paths = shards.find_shards(data_dir, split)
        self.tokens = [shards.count_tokens(p) for p in self.paths]
        self.manifest = shards.read_manifest(data_dir)
        self.sha256 = {s.file: s.sha256 for s in self.manifest.shards} if self.manifest else {}
        together = max(1, min(POOL // max(self.tokens), len(self.paths)))
        self.order = Order([max(0, n - 1) // T for n in self.tokens], seed, shuffle, together)
        why = f"the {split} shards in {data_dir} hold {sum(self.tokens)} tokens, less than one sequence of {T} + 1"
        require(self.order.per_epoch, f"{why}; use a smaller --sequence-length or more data (python fineweb.py --help)")
        # at most one group, and the shard that is being read
        self._shard = lru_cache(maxsize=self.order.together)(self._read_shard)

    def fingerprint(self) -> str:
        """What a resumed run must find again: a hash of the folder's shards and, if several are mixed, how many."""
        mixed = f"-{self.order.together}" if self.order.together > 1 else ""
        return shards.fingerprint(self.data_dir) + mixed

    def _read_shard(self, i: int) -> np.ndarray:
        """Tokens of shard i, read whole and front to back."""
        path = self.paths[i]
        tokens = shards.read_shard(path, self.sha256.get(path.name))
        began, now = self.tokens[i], len(tokens)
        require(now == began, f"{path} had {began:,} tokens when the run began and now has {now:,}")
        return tokens

    def read(self, windows: np.ndarray) -> np.ndarray:
        """(n, T + 1) uint16 for (n, 2) of (shard, window). Raises UserError for an id above the vocabulary."""
        out = np.empty((len(windows), self.T + 1), np.uint16)
        for shard in dict.fromkeys(windows[:, 0].tolist()):
            rows = np.flatnonzero(windows[:, 0] == shard)
            starts = windows[rows, 1] * self.T
            out[rows] = self._shard(shard)[starts[:, None] + np.arange(self.T + 1)]
            if out[rows].max() >= self.vocab_size:
                shards.check_ids(self._shard(shard), self.paths[shard], self.vocab_size)  # raises, naming the place
        return out

    def step_windows(self, step: int, sequences: int, B: int, rank: int = 0, world_size: int = 1) -> np.ndarray:
        """The (shard, window) pairs that `rank` reads at `step`, (micro_steps, B, 2). As in build-nanogpt, micro-batch
        m of rank r is the step's (m * world_size + r)-th run of B sequences."""
        return self.order.span(step * sequences, sequences).reshape(-1, world_size, B, 2)[:, rank]

    def batches(self, first_step: int, sequences: int, B: int, rt: Runtime, fixed: bool = False) -> Iterator[Tensor]:
        """Endless (micro_steps, B, T + 1) batches of uint16 tokens, one per step from `first_step` (fixed=True repeats
        step 0), read ahead by a thread, into pinned memory if training on a GPU."""

        def in_turn() -> Iterator[Tensor]:
            for step in itertools.repeat(0) if fixed else itertools.count(first_step):
                windows = self.step_windows(step, sequences, B, rt.rank, rt.world_size)
                batch = torch.from_numpy(self.read(windows.reshape(-1, 2))).view(-1, B, self.T + 1)
                yield batch.pin_memory() if rt.device.type == "cuda" else batch

        return prefetch(in_turn(), 16, join=True)  # steps: two seconds on 8 GPUs, time for a slow disk to read a shard


def to_device(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T + 1) uint16 -> inputs and targets (B, T) int64 on the device; only two bytes per token cross the bus."""
    # on mps the copy may still be reading when the tokens have been freed (pytorch#189690)
    tokens = tokens.to(device, non_blocking=device.type == "cuda").to(torch.int64)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
