"""The order of data is a pure function of (seed, step); every window comes once an epoch; nothing else moves it."""

import resource
from itertools import islice

import numpy as np
import pytest
import torch

from system.cli import UserError
from system.distributed import Runtime
from tokens import loader, shards
from tokens.loader import DataOrder, Loader, permutation, to_device

GOLDEN = [0, 7, 5, 6, 3, 1, 2, 4]  # of permutation(8, 1337, 0)
CPU = Runtime(torch.device("cpu"), torch.float32)


def make(folder, **kwargs):
    return Loader(folder, "train", **{"T": 32, "vocab_size": 256, "seed": 5, "shuffle": True, **kwargs})


def test_no_shuffle_is_build_nanogpts_order_token_for_token(tiny_data):
    """A shard read with a moving position, B * T * ranks further each micro-step, as that project's loader does."""
    data, B, T, W = make(tiny_data, shuffle=False), 2, 32, 2
    tokens = np.load(tiny_data / "tiny_train_000001.npy")
    for rank in range(W):
        position = B * T * rank
        for step in range(5):
            batch = data.read(data.step_sequences(step, 8, B, rank, W).reshape(-1, 2)).reshape(2, B, T + 1)
            x, y = to_device(torch.from_numpy(batch.reshape(-1, T + 1)), torch.device("cpu"))
            for m in range(2):
                buf = torch.from_numpy(tokens[position : position + B * T + 1].astype(np.int64))
                assert torch.equal(x.view(2, B, T)[m], buf[:-1].view(B, T))
                assert torch.equal(y.view(2, B, T)[m], buf[1:].view(B, T))
                position += B * T * W


def test_order_depends_on_seed_and_epoch_only(tiny_data):
    a, n = make(tiny_data).order, make(tiny_data).order.sequences_per_epoch
    assert (a.span(0, n) == make(tiny_data).order.span(0, n)).all()
    assert (a.span(0, n) != make(tiny_data, seed=6).order.span(0, n)).any()
    assert (a.span(0, n) != a.span(n, n)).any(), "a second epoch reshuffles"
    assert (make(tiny_data, shuffle=False).order.span(0, n) == make(tiny_data, shuffle=False).order.span(n, n)).all()


def test_small_shards_are_mixed_and_full_ones_visited_one_after_the_other(tiny_data, monkeypatch):
    def visited(pool):
        monkeypatch.setattr(loader, "SHUFFLE_POOL_TOKENS", pool)
        order = make(tiny_data).order
        return order.span(0, order.sequences_per_epoch)[:, 0]

    assert (np.diff(visited(4097)) != 0).sum() == 2
    two_groups = visited(2 * 4097)
    assert (two_groups[:-1] != two_groups[1:]).sum() > 10 and len(set(two_groups[-40:])) == 1
    share = np.bincount(visited(10**8)[:90]) / np.array([93, 128, 46])  # of each shard, in the first third of an epoch
    assert share.min() > 0.2 and share.max() < 0.5


def test_fingerprint_tells_how_many_shards_are_mixed(tiny_data, monkeypatch):
    plain = shards.fingerprint(tiny_data)
    assert make(tiny_data).fingerprint() == f"{plain}-3" and make(tiny_data, shuffle=False).fingerprint() == plain
    monkeypatch.setattr(loader, "SHUFFLE_POOL_TOKENS", 4097)  # as if the shards were full
    assert make(tiny_data).fingerprint() == plain


def test_seek_to_any_step_is_immediate():
    order = DataOrder([97_656] * 1000, seed=1, shuffle=True)  # FineWeb-sized: 100 billion tokens
    assert order.span(512 * 19_073 * 9, 512).shape == (512, 2)
    assert permutation.cache_info().maxsize <= 8  # 8 MB


def test_permutation_never_changes():
    assert sorted(permutation(1000, 3, 1)) == list(range(1000))
    assert permutation(8, 1337, 0).tolist() == GOLDEN, "runs that are resumed would see other data"


def test_order_of_mixed_shards_never_changes(tiny_data):
    assert make(tiny_data).order.span(0, 4).tolist() == [[1, 49], [2, 31], [0, 57], [0, 63]]


def test_batches_ahead_equal_batches_asked_for(tiny_data):
    data = make(tiny_data)
    for step, batch in enumerate(islice(data.batches(3, 8, 4, CPU), 40)):
        windows = data.step_sequences(3 + step, 8, 4)
        assert batch.shape == (2, 4, 33) and batch.dtype == torch.uint16
        assert (batch.numpy() == data.read(windows.reshape(-1, 2)).reshape(2, 4, 33)).all()
    one, two = islice(data.batches(3, 8, 4, CPU, fixed=True), 2)
    assert torch.equal(one, two) and torch.equal(one, next(data.batches(0, 8, 4, CPU)))  # wherever it resumes


def test_widening_keeps_ids_above_int16():
    x, y = to_device(torch.tensor([[50256, 65535, 0]], dtype=torch.uint16), torch.device("cpu"))
    assert x.tolist() == [[50256, 65535]] and y.tolist() == [[65535, 0]]


def test_id_above_vocabulary_is_named(tiny_data):
    tokens = shards.read_shard(tiny_data / "tiny_train_000003.npy")
    tokens[700] = 256
    shards.write_shard(tiny_data / "tiny_train_000003.npy", tokens)
    data = make(tiny_data)
    with pytest.raises(UserError, match=r"tiny_train_000003.*700 is id 256.*size, 256"):
        for _ in islice(data.batches(0, 8, 4, CPU), data.order.sequences_per_epoch // 8 + 1):
            pass


def test_a_shard_that_changes_is_not_trained_on(tiny_data):
    """Its tokens or, if the manifest tells its hash, any byte."""
    path = tiny_data / "tiny_train_000002.npy"
    tokens = shards.read_shard(path)
    known = shards.Shard(path.name, len(tokens), 1, shards.write_shard(path, tokens), {"file": 0, "token": 1})
    source = {"name": "x", "subset": "", "column": "text", "revision": "1", "files": []}
    shards.write_manifest(tiny_data, shards.Manifest(source, "npy", 100, shards=[known]))
    data = make(tiny_data, shuffle=False)  # holds one shard
    data.read(np.array([[1, 0], [0, 0]]))  # the second takes the place of the first in memory
    shards.write_shard(path, tokens ^ (np.arange(len(tokens)) == 5))
    with pytest.raises(UserError, match=r"000002\.npy has sha256"):
        data.read(np.array([[1, 0]]))
    shards.write_shard(tiny_data / "tiny_train_000003.npy", tokens)
    with pytest.raises(UserError, match=r"had 1,500 tokens when the run began and now has 4,097"):
        data.read(np.array([[2, 0]]))


def test_too_little_data(tiny_data):
    with pytest.raises(UserError, match="less than one sequence"):
        make(tiny_data, T=8192)


def test_memory_stays_flat_over_many_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SHUFFLE_POOL_TOKENS", 4_000_000)
    for i in range(30):
        shards.write_shard(tmp_path / f"x_train_{i:06d}.npy", np.full(2_000_000, i, np.uint16))
    data = make(tmp_path, T=1000)

    def peak_mb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    batches = data.batches(0, 500, 100, CPU)
    for _ in islice(batches, 20):
        pass
    before = peak_mb()
    for _ in islice(batches, 100):  # 25 more shards of 4 MB
        pass
    assert peak_mb() - before < 20
