"""The order of data is a pure function of (seed, step); every sequence comes once an epoch; nothing else changes it.

That --no-shuffle is the order of the plain trainer, and so build-nanogpt's, is in test_plain.py."""

import weakref
from itertools import islice, repeat

import numpy as np
import pytest
import torch
from helpers import CPU, refused

from tokens import shards
from training import loader
from training.loader import DataOrder, Loader, permutation, to_device

LARGEST_TINY_SHARD = 4097  # tokens


def open_loader(folder, **kwargs):
    """A Loader over the train shards of a folder: sequences of 32 tokens, shuffled, unless kwargs say otherwise."""
    return Loader(folder, "train", **{"T": 32, "vocab_size": 256, "seed": 5, "shuffle": True, **kwargs})


# ------------------------------------------------------------------------- order


@pytest.mark.parametrize("pool_tokens, shards_per_group", [
    (LARGEST_TINY_SHARD - 1, 1),
    (2 * LARGEST_TINY_SHARD - 1, 1),
    (2 * LARGEST_TINY_SHARD, 2),
    (100_000_000, 3),
])  # fmt: skip
def test_groups_of_shards_fill_the_pool(tiny_data, monkeypatch, pool_tokens, shards_per_group):
    """A run that resumes must find the same groups."""
    monkeypatch.setattr(loader, "SHUFFLE_POOL_TOKENS", pool_tokens)
    suffix = f"-{shards_per_group}" if shards_per_group > 1 else ""
    assert open_loader(tiny_data).fingerprint() == shards.fingerprint(tiny_data) + suffix


ORDERS = [
    DataOrder(sizes, seed, shuffle, shards_per_group)
    for sizes in ([9], [3, 0, 5, 2, 4], [0, 7, 1, 40])
    for seed in (0, -3, 2**63 - 1)
    for shuffle, shards_per_group in ((False, 1), (True, 1), (True, 2), (True, 9))
]


@pytest.mark.parametrize("order", ORDERS)
def test_every_sequence_comes_once_an_epoch(order):
    """And a step has the same sequences, in one order, whatever the ranks and the micro-batch."""
    expected = [(shard, i) for shard, size in enumerate(order.sequences_per_shard) for i in range(size)]
    for epoch in (0, 1, 4):
        n = order.sequences_per_epoch
        assert sorted(map(tuple, order.span(epoch * n, n).tolist())) == expected

    data = object.__new__(Loader)  # its files are not needed to know its order
    data.order = order
    for step, ranks, B in ((0, 1, 12), (7, 2, 3), (7, 3, 1), (23, 4, 3), (23, 2, 2)):
        # (ranks, micro_steps, B, 2): in the order of micro-steps, then ranks, they are the whole step.
        parts = [data.step_sequences(step * 12, 12, B, rank, ranks) for rank in range(ranks)]
        assert (np.stack(parts, axis=1).reshape(-1, 2) == order.span(step * 12, 12)).all()


def test_the_order_never_changes(tiny_data):
    """Runs that are resumed would see other data."""
    assert permutation(8, 1337, 0).tolist() == [0, 7, 5, 6, 3, 1, 2, 4]
    # shard:sequence of two epochs, the second one by one, in groups of two shards: 0 and 2, 4 and 1, which is empty, 3
    order = DataOrder([3, 0, 5, 2, 4], seed=7, shuffle=True, shards_per_group=2)
    expected = "0:0 2:4 0:1 2:2 2:0 0:2 2:3 2:1 4:1 4:3 4:0 4:2 3:0 3:1 "
    expected += "2:2 2:4 2:0 2:3 2:1 4:0 4:2 3:1 4:1 3:0 4:3 0:0 0:1 0:2"
    found = [*order.span(0, 14), *(order.span(i, 1)[0] for i in range(14, 28))]
    assert [f"{shard}:{sequence}" for shard, sequence in found] == expected.split()
    assert open_loader(tiny_data).order.span(0, 4).tolist() == [[1, 49], [2, 31], [0, 57], [0, 63]]


# ------------------------------------------------------------------------- batches


def test_batches_begin_at_any_step_or_repeat_the_first(tiny_data):
    data = open_loader(tiny_data)
    batches = list(islice(data.batches(0, repeat(16), 4, CPU), 20))
    assert batches[3].shape == (4, 4, 33) and batches[3].dtype == torch.uint16
    for batch, later in zip(batches[3:], data.batches(3 * 16, repeat(16), 4, CPU), strict=False):
        assert torch.equal(batch, later)
    for batch in islice(data.batches(3 * 16, repeat(16), 4, CPU, is_fixed=True), 2):
        assert torch.equal(batch, batches[0])


def test_widening_keeps_ids_above_int16():
    x, y = to_device(torch.tensor([[50256, 65535, 0]], dtype=torch.uint16), CPU.device)
    assert x.tolist() == [[50256, 65535]] and y.tolist() == [[65535, 0]]


def test_memory_holds_the_shards_of_one_group(tiny_data, monkeypatch):
    monkeypatch.setattr(loader, "SHUFFLE_POOL_TOKENS", 2 * LARGEST_TINY_SHARD)
    data = open_loader(tiny_data)
    was_read = []

    def remember(path, sha256):
        tokens = np.fromfile(path, np.uint16, offset=128)  # 128 bytes of header
        was_read.append(weakref.ref(tokens))
        return tokens

    monkeypatch.setattr(shards, "read_shard", remember)
    for sequence in data.order.span(0, data.order.sequences_per_epoch):
        data.read(sequence[None])
        assert sum(tokens() is not None for tokens in was_read) <= 2
    assert len(was_read) == 3


# ------------------------------------------------------------------------- bad data


def test_id_above_vocabulary_is_named(tiny_data):
    data = open_loader(tiny_data, vocab_size=255)
    with refused(r"tiny_train_00000\d.*id 255"):
        data.read(data.order.span(0, data.order.sequences_per_epoch))


def test_a_sequence_needs_one_token_more(tiny_data):
    assert open_loader(tiny_data, T=LARGEST_TINY_SHARD - 1).order.sequences_per_epoch == 1
    with refused(f"{LARGEST_TINY_SHARD} . 1"):
        open_loader(tiny_data, T=LARGEST_TINY_SHARD)
