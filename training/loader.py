"""The order of data: which sequences each step reads, and their tokens on the device.

    data = Loader("data/fineweb-edu", "train", T=1024, vocab_size=50257, seed=1337, shuffle=True)
    for batch in data.batches(0, itertools.repeat(512), B=64, rt=rt):   # (micro_steps, B, T + 1) uint16

A shard is a one-dimensional array of token ids, cut into sequences of T inputs. The targets are the inputs shifted by
one token, so neighboring sequences share one token. Up to T tokens at the end of a shard are too few for another
sequence and stay unused.

    token      0       1       ...   T-1      T        T+1     ...   2T-1     2T     ...     n-1
    sequence 0 |---------- inputs -----------|                                               :
               :       |---------- targets -----------|                                      :
    sequence 1                                |---------- inputs ------------|               :
                                                       |---------- targets ----------|  unused

The order is a pure function of the seed and the position in the stream of sequences. The position is the number of
sequences that the earlier steps have read. The order does not depend on ranks, micro-batch size or restarts. The epochs
form one endless stream that has every sequence once per epoch. A step takes the next sequences of the stream and may
straddle two epochs, so no rank runs out of data and no sequence is dropped at the end of an epoch.

When shuffling, each epoch visits the shards in a new order, in groups of at most SHUFFLE_POOL_TOKENS tokens (or of one
larger shard), and the sequences of a group form one pool that is shuffled anew:

    epoch 0                                              epoch 1
    group                    group                       group
    shard 3 + shard 0        shard 2 + shard 1           shard 1 + shard 3    ...     shards in a new order
    [3:7 0:2 3:1 0:9 ...]    [1:4 1:0 2:8 1:5 ...]       [3:5 1:1 1:9 ...]    ...     shard:sequence in a new order
    |-- step 0 --|-- step 1 --|-- step 2 --|-- step 3 --|-- ...

A shard is read as a whole, front to back, when its group's turn comes. A full shard of FineWeb is a group of its own.
Small shards are mixed, so that a run that is shorter than an epoch still sees text from all of them.

Without shuffling, the order is build-nanogpt's: shard by shard, sequence by sequence. (build-nanogpt skips up to a
micro-batch of all ranks at the end of each shard. This loader does not.)

A shard that a manifest lists must match its sha256 when the loader reads it. A shard that was damaged on the disk ends
the run: the run does not train on it.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from system.distributed import Runtime
from system.errors import require
from tokens import shards
from tokens.prefetch import prefetch

SHUFFLE_POOL_TOKENS = 100_000_000  # tokens shuffled as one pool: a full shard, which is in memory anyway
# How many steps to read ahead: two seconds of training on 8 GPUs, time for a slow disk to read a shard.
PREFETCH_STEPS = 16


# Part of the key of a permutation: it orders the shards of an epoch, or the sequences of a group.
SHARDS, POOL = 0, 1


@lru_cache(maxsize=8)
def permutation(n: int, *key: int) -> np.ndarray:
    """A permutation of range(n), (n,) int64, that depends only on the 64-bit integers `key`.

    The permutation is the argsort of splitmix64 hashes (Steele et al. 2014, "Fast Splittable Pseudorandom Number
    Generators"). So no version of a library can change the order that a resumed run sees.
    """

    def mix(x: np.ndarray) -> np.ndarray:
        """splitmix64 of each uint64 in x. Unequal inputs always give unequal hashes."""
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):  # the arithmetic is modulo 2**64 on purpose
        # Fold the key into one 64-bit state.
        state = np.zeros(1, np.uint64)
        for k in key:
            state = mix(state ^ np.uint64(k % 2**64))

        # One hash per index; sorting the hashes permutes the indices.
        hashes = mix(state ^ mix(np.arange(n, dtype=np.uint64)))
        return np.argsort(hashes, kind="stable")


class DataOrder:
    """The endless stream of sequences: position -> (shard, sequence). See the picture in the module's docstring.

    To reach any position, only one group of shards is shuffled. The pool of a group has the sequences of its shards end
    to end. A permutation of the pool's indices is the order in which the sequences are read:

        pool index    0 1 2 3 ...  92 | 93 94 95 ... 220      of the group (shard 5, shard 2)
        shard               5         |        2
        sequence      0 1 2 3 ...  92 |  0  1  2 ... 127
        read as       220, 3, 95, ...                         (2, 127), (5, 3), (2, 2), ...

    sequences_per_shard: how many sequences each shard holds.
    shards_per_group: how many shards are shuffled as one pool; without `shuffle` each shard is a group of its own.
    """

    def __init__(self, sequences_per_shard: list[int], seed: int, shuffle: bool, shards_per_group: int = 1):
        self.sequences_per_shard = np.asarray(sequences_per_shard)
        self.sequences_per_epoch = int(self.sequences_per_shard.sum())

        self.seed = seed
        self.shuffle = shuffle
        self.shards_per_group = shards_per_group if shuffle else 1

    def span(self, start: int, count: int) -> np.ndarray:
        """(count, 2) int64 of (shard, sequence) for the stream positions start .. start + count - 1."""
        pieces = []
        end = start + count
        while start < end:
            epoch, group, position = self._find_group(start)
            sizes = self.sequences_per_shard[group]

            # Read the pool in this epoch's order until the pool or the span ends, (k,). The first shard names the
            # group. A shard comes once in an epoch, so no other group has that name.
            pool = self._permute(int(sizes.sum()), epoch, POOL, int(group[0]))
            indices = pool[position : position + (end - start)]

            # Which shard of the group holds each index, and where that shard begins in the pool: (k,) -> (k, 2)
            shard_ends = np.cumsum(sizes)
            member = np.searchsorted(shard_ends, indices, side="right")
            sequence = indices - (shard_ends - sizes)[member]
            pieces.append(np.stack([group[member], sequence], axis=1))
            start += len(indices)
        return np.concatenate(pieces)

    def _find_group(self, position: int) -> tuple[int, np.ndarray, int]:
        """The epoch and the group of shards, (shards_per_group,) or fewer, that hold a stream position, and the
        position within that group."""
        epoch, position_in_epoch = divmod(position, self.sequences_per_epoch)

        # The shards in this epoch's order, and the position after each one's last sequence.
        shard_order = self._permute(len(self.sequences_per_shard), epoch, SHARDS)
        shard_ends = np.cumsum(self.sequences_per_shard[shard_order])

        # The turn of the shard at this position; side="right" steps over shards without sequences.
        turn = int(np.searchsorted(shard_ends, position_in_epoch, side="right"))

        # The group that has this turn: groups begin at every multiple of shards_per_group.
        first_turn = turn - turn % self.shards_per_group
        group = shard_order[first_turn : first_turn + self.shards_per_group]
        group_start = int(shard_ends[first_turn] - self.sequences_per_shard[group[0]])
        return epoch, group, position_in_epoch - group_start

    def _permute(self, n: int, epoch: int, *what: int) -> np.ndarray:
        """range(n) in a random order, which depends on the epoch and on `what`; without `shuffle`, range(n) itself."""
        if self.shuffle:
            return permutation(n, self.seed, epoch, *what)
        return np.arange(n)


class Loader:
    """The sequences of one split ("train" or "val") of a folder of shards, each of T inputs and T targets.

    Raises UserError for a missing or empty folder, a bad shard, ids above the vocabulary or too little data.
    """

    def __init__(self, data_dir: str | Path, split: str, T: int, vocab_size: int, seed: int = 0, shuffle: bool = False):
        self.T = T
        self.vocab_size = vocab_size

        # No shard is read here: the headers have the numbers of tokens, and the manifest has the hashes.
        self.files = shards.find_shards(data_dir, split)
        self.data_id = shards.fingerprint(data_dir)
        largest = max(file.tokens for file in self.files)

        # A group has as many shards as would fit into one pool if all were as large as the largest.
        shards_per_group = max(1, min(SHUFFLE_POOL_TOKENS // largest, len(self.files)))
        # A sequence needs T + 1 tokens: its inputs, and the last one's target.
        sequences_per_shard = [(file.tokens - 1) // T for file in self.files]
        self.order = DataOrder(sequences_per_shard, seed, shuffle, shards_per_group)
        problem = f"the largest {split} shard in {data_dir} has {largest} tokens, fewer than a sequence of {T} + 1"
        fix = "use a smaller --sequence-length, more text or larger shards (fineweb.py --shard-size)"
        require(self.order.sequences_per_epoch, f"{problem}; {fix}")

        # Memory holds the tokens of as many shards as one group has.
        self._cached_shard = lru_cache(maxsize=self.order.shards_per_group)(self._read_shard)

    def fingerprint(self) -> str:
        """What a resumed run must find again: a hash of the folder's shards and, if they are shuffled in groups, the
        size of a group. The settings have the seed and --shuffle. Whoever changes the order of the data adds a
        version."""
        size = self.order.shards_per_group
        return self.data_id if size == 1 else f"{self.data_id}-{size}"

    def _read_shard(self, index: int) -> np.ndarray:
        """The tokens of a shard, (n,) uint16, read front to back. Raises UserError if the hash of the shard is not the
        manifest's, or if an id is above the vocabulary: on a GPU, such an id causes an error that names nothing."""
        file = self.files[index]
        tokens = shards.read_shard(file.path, file.sha256)
        shards.check_ids(tokens, file.path, self.vocab_size)
        return tokens

    def read(self, sequences: np.ndarray) -> np.ndarray:
        """The tokens (n, T + 1) uint16 of n sequences, given as (n, 2) pairs of (shard, sequence)."""
        tokens = np.empty((len(sequences), self.T + 1), np.uint16)

        # Shard by shard, in the order of their first use.
        for shard in dict.fromkeys(sequences[:, 0].tolist()):
            from_shard = np.flatnonzero(sequences[:, 0] == shard)  # (k,): which of the n come from this shard

            # Gather k slices of T + 1 tokens at once: (k, 1) starts + (T + 1,) offsets -> (k, T + 1).
            starts = sequences[from_shard, 1] * self.T
            tokens[from_shard] = self._cached_shard(shard)[starts[:, None] + np.arange(self.T + 1)]
        return tokens

    def step_sequences(self, start: int, count: int, B: int, rank: int, world_size: int) -> np.ndarray:
        """The (shard, sequence) pairs that `rank` reads in one step, (micro_steps, B, 2). The step has `count`
        sequences and begins at position `start` of the stream. As in build-nanogpt, micro-batch m of rank r is the
        step's (m * world_size + r)-th block of B sequences."""
        whole_step = self.order.span(start, count)
        # (count, 2) -> (micro_steps, world_size, B, 2) -> (micro_steps, B, 2)
        return whole_step.reshape(-1, world_size, B, 2)[:, rank]

    def batches(
        self, start: int, counts: Iterable[int], B: int, rt: Runtime, is_fixed: bool = False
    ) -> Iterator[Tensor]:
        """This rank's batches of the coming steps, (micro_steps, B, T + 1) uint16 each. start: the position in the
        stream of the first step. counts: how many sequences each step reads, over all ranks. is_fixed: every step reads
        what the first step of a run reads. A thread reads ahead, into pinned memory if training is on a GPU."""

        def read_batches() -> Iterator[Tensor]:
            position = start
            for count in counts:
                # (micro_steps, B, 2) -> (micro_steps * B, T + 1) -> (micro_steps, B, T + 1)
                pairs = self.step_sequences(0 if is_fixed else position, count, B, rt.rank, rt.world_size)
                tokens = self.read(pairs.reshape(-1, 2))
                batch = torch.from_numpy(tokens).view(-1, B, self.T + 1)
                position += count

                # A copy from pinned memory to the GPU does not wait for the training step.
                yield batch.pin_memory() if rt.device.type == "cuda" else batch

        return prefetch(read_batches(), PREFETCH_STEPS)


def to_device(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """(B, T + 1) uint16 -> inputs and targets, each (B, T) int64 on the device."""
    if device.type == "cuda":
        # Widen after the copy: two bytes per token cross the bus instead of eight.
        tokens = tokens.to(device, non_blocking=True)
    tokens = tokens.to(torch.int64).to(device)

    # The targets are the inputs shifted by one token: (B, T + 1) -> 2 x (B, T)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
