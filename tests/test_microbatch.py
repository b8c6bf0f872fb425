"""The micro-batch that fits in memory."""

import dataclasses
import time

import pytest
import torch
from helpers import CPU, parse_config

from model import GPT
from system.cli import UserError
from training import microbatch
from training.step import TrainStep

FAKE_GPU = dataclasses.replace(CPU, device=torch.device("cuda", 0))


@pytest.fixture
def card(monkeypatch):
    """A GPU whose memory takes micro-batches of up to `card.limit` sequences; card.tried has the sizes."""

    class Card:
        limit, tried = 5, []

        def run_passes(self, B):
            self.tried.append(B)
            if self.limit < B:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 2**30))
    monkeypatch.setattr(microbatch, "MIN_BALLAST_BYTES", 100)
    monkeypatch.setattr(microbatch, "BALLAST_FRACTION", 0)
    real_empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, device=None, **how: real_empty(*args, **how))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    card = Card()
    card.tried = []
    return card


def choose(card, sequences, any_rank=bool):
    """What `auto` takes for a rank's share of `sequences`. any_rank: whether a rank, this one or another, says yes."""
    cfg = parse_config("gpt2-124m", "--total-batch-size", 1024 * sequences)
    rt = FAKE_GPU
    object.__setattr__(rt, "any_rank", any_rank)
    try:
        return microbatch.choose_micro_batch_size(cfg, rt, 0, card.run_passes)
    finally:
        object.__delattr__(rt, "any_rank")


def test_auto_halves_until_a_size_fits(card):
    assert choose(card, 60) == 3
    assert card.tried == [60, 30, 15, 6, 3]
    card.tried.clear()
    assert choose(card, 512) == 4
    assert card.tried == [64, 32, 16, 8, 4]


def test_auto_takes_what_fits_on_every_rank(card):
    """On the other rank only one sequence fits; both try the same sizes."""
    others = iter([True, False])
    assert choose(card, 6, any_rank=lambda flag: flag or next(others)) == 1
    assert card.tried == [6, 3, 1]


def test_a_model_that_does_not_fit_is_refused(card):
    card.limit = 0
    with pytest.raises(UserError, match="--recompute"):
        choose(card, 6)


def test_the_ballast_covers_later_allocations(monkeypatch):
    """What training allocates later, and a gibibyte or 4 percent of the card; it is freed after each try."""
    sizes = []

    def remember(*shape, **how):
        sizes.append(shape[0])
        return torch.zeros(1)

    monkeypatch.setattr(torch, "empty", remember)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for total_gib in (8, 80):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, total=total_gib: (0, total * 2**30))
        assert microbatch.fits_in_memory(CPU.device, 1000, lambda: None)
    assert sizes == [2**30 + 1000, int(0.04 * 80 * 2**30) + 1000]


@pytest.mark.parametrize("flags, ranks, value", [
    (["--micro-batch-size", "3"], 1, "--micro-batch-size 4"),
    ([], 3, "--total-batch-size 288"),
])  # fmt: skip
def test_sizes_that_do_not_divide_are_refused(tiny_args, flags, ranks, value):
    cfg = parse_config("quickstart", *tiny_args, *flags)
    rt = dataclasses.replace(CPU, world_size=ranks)
    with pytest.raises(UserError, match=value):
        microbatch.choose_micro_batch_size(cfg, rt, 0, lambda B: None)


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_a_size_that_surely_fits(preset, B):
    assert microbatch.choose_micro_batch_size(parse_config(preset), CPU, 0, lambda B: None) == B


def test_only_a_lack_of_memory_is_taken_for_one():
    for message in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "No valid triton configs. OutOfMemoryError: ...",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
    ):
        with pytest.raises(UserError, match="--zero-stage 1"), microbatch.explain_out_of_memory(CPU):
            raise RuntimeError(message)
    with pytest.raises(RuntimeError, match="assert"), microbatch.explain_out_of_memory(CPU):
        raise RuntimeError("device-side assert triggered")


def test_the_passes_leave_no_trace(tiny_args):
    """The bits of a run are those of one that tried no size, also where a try runs out of memory."""
    cfg = parse_config("quickstart", *tiny_args, "--optimizer", "muon", "--weights", "bfloat16")
    batch = torch.randint(256, (2, 4, 33), generator=torch.Generator().manual_seed(1)).to(torch.uint16)

    def train(tries):
        torch.manual_seed(0)
        train_step = TrainStep(cfg, CPU, GPT(cfg.model))
        if tries:
            train_step._run_passes(4)
            assert all(p.grad is None for p in train_step.model.parameters())
        for number in range(2):
            train_step.compute_gradients(batch)
            train_step.set_learning_rates(number, 12)
            train_step.update()
        return train_step.weights.state_dict()

    plain, tried = train(False), train(True)
    assert all(torch.equal(plain[name], tried[name]) for name in plain)


def refuse_on_rank_1() -> None:
    """A `prepare` for two ranks that search for a size, of which rank 1 has no memory for the ballast."""
    import os

    def fits(run_passes):
        if os.environ["RANK"] == "0":
            run_passes()
        return os.environ["RANK"] == "0"

    def choose_as_on_a_gpu(cfg, rt, reserved_bytes, run_passes):
        for B in (8, 4, 2, 1):
            if not rt.any_rank(not fits(lambda B=B: run_passes(B))):
                return B
        raise UserError("no size fits")

    from training import step

    step.choose_micro_batch_size = choose_as_on_a_gpu


def test_a_rank_without_memory_stops_both_at_once(tiny_args, tmp_path, run_ranks):
    """The search enters no collective but its vote: it once waited ten minutes for the other rank inside DDP."""
    start = time.monotonic()
    output = run_ranks(
        2,
        "train_gpt2.py",
        "quickstart",
        *tiny_args,
        "--out-dir",
        tmp_path / "run",
        prepare=refuse_on_rank_1,
        fails=True,
    )
    assert "no size fits" in output
    assert time.monotonic() - start < 300
