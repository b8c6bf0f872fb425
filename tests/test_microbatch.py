"""The micro-batch that fits in memory."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, parse_config

import training.step
from model import GPT
from system.cli import UserError
from training import master_weights, microbatch, schedule
from training.presets import PRESETS
from training.step import Trainer

GPU = replace(CPU, device=torch.device("cuda", 0))


class Card:
    """A GPU of 80 GiB, whose memory takes micro-batches of up to `limit` sequences."""

    def __init__(self):
        self.limit = 5
        self.tried = []  # micro-batches
        self.ballasts = []  # GiB that were allocated beside them

    def run_passes(self, rt, forward, B, T):
        self.tried.append(B)
        if self.limit < B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def allocate(self, size, dtype, device):
        self.ballasts.append(size / 2**30)
        return torch.zeros(1)

    def choose(self, sequences, rt=GPU):
        """What `auto` takes for `sequences` of a step."""
        cfg = replace(PRESETS["gpt2-124m"], total_batch_size=1024 * sequences)
        return microbatch.choose_micro_batch_size(cfg, rt, torch.nn.Module(), 2**30)


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(torch, "empty", card.allocate)
    monkeypatch.setattr(microbatch, "run_passes", card.run_passes)
    monkeypatch.setattr(microbatch.gc, "collect", lambda: None)  # of all that the tests have imported: it takes long
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 80 * 2**30))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    return card


@pytest.mark.parametrize("sequences, tried", [(60, [60, 30, 15, 6, 3]), (512, [64, 32, 16, 8, 4])])
def test_auto_halves_until_a_size_fits(card, sequences, tried):
    assert card.choose(sequences) == tried[-1]
    assert card.tried == tried

    card.limit = 0
    with pytest.raises(UserError, match="--recompute"):
        card.choose(sequences)


def test_the_ballast_covers_later_allocations(card, monkeypatch):
    """The gibibyte that training allocates later, and 4 percent of the card, but at least one gibibyte."""
    card.choose(1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 8 * 2**30))
    card.choose(1)
    assert card.ballasts == pytest.approx([1 + 0.04 * 80, 1 + 1])


def test_a_size_that_was_asked_for_is_tried_before_training(card):
    """Without a ballast for what may come: the user knows."""
    cfg = replace(PRESETS["gpt2-124m"], micro_batch_size=4)
    assert microbatch.choose_micro_batch_size(cfg, GPU, torch.nn.Module(), 2**30) == 4
    assert card.tried == [4] and card.ballasts == [1]
    with pytest.raises(UserError, match="--micro-batch-size 8; lower it"):
        microbatch.choose_micro_batch_size(replace(cfg, micro_batch_size=8), GPU, torch.nn.Module(), 2**30)


def test_auto_takes_what_fits_on_every_rank(card, monkeypatch):
    """On the other rank only one sequence fits; both try the same sizes."""
    others = iter([True, False])
    monkeypatch.setattr(type(GPU), "any_rank", lambda rt, flag: flag or next(others))
    assert card.choose(12, replace(GPU, world_size=2)) == 1
    assert card.tried == [6, 3, 1]


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_a_size_that_surely_fits(preset, B):
    assert microbatch.choose_micro_batch_size(PRESETS[preset], CPU, None, 0) == B


def test_only_a_lack_of_memory_is_taken_for_one():
    with pytest.raises(UserError, match="--zero-stage 1"), microbatch.explain_out_of_memory(CPU):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    with pytest.raises(RuntimeError, match="assert"), microbatch.explain_out_of_memory(CPU):
        raise RuntimeError("device-side assert triggered")


def test_the_passes_leave_no_trace(tiny_args, monkeypatch):
    """The bits of a run are those of one that tried no size, also where a try runs out of memory."""
    cfg = parse_config("quickstart", *tiny_args, "--optimizer", "muon", "--weights", "bfloat16")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**30))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    batch = torch.randint(256, (2, 4, 33), generator=torch.Generator().manual_seed(1)).to(torch.uint16)

    def train(tries):
        torch.manual_seed(0)
        model = GPT(cfg.model)
        trainer = Trainer(model, cfg, CPU)
        if tries:
            assert microbatch.fits_in_memory(CPU, trainer.forward, 4, 32, 0)
            assert all(p.grad is None for p in model.parameters())
        for number in range(2):
            trainer.compute_gradients(batch)
            schedule.set_learning_rates(trainer.optimizers, number, 12, cfg)
            trainer.update()
            trainer.finish_step()
        return master_weights.float32_state_dict(model)

    plain, tried = train(False), train(True)
    assert all(torch.equal(plain[name], tried[name]) for name in plain)


def let_rank_1_refuse_every_size() -> None:
    """A `prepare` for two ranks that try sizes as on a GPU, of which rank 1 has no memory for the ballast."""

    def choose(cfg, rt, forward, state_bytes):
        for B in (4, 2, 1):
            if rt.is_main:
                microbatch.run_passes(rt, forward, B, cfg.sequence_length)
            if not rt.any_rank(not rt.is_main):
                return B
        raise UserError("no size fits")

    training.step.choose_micro_batch_size = choose


def test_a_rank_without_memory_stops_both_at_once(tiny_args, tmp_path, run_ranks):
    """The passes enter no collective: one rank once waited ten minutes for the other inside DDP."""
    flags = ["quickstart", *tiny_args, "--out-dir", tmp_path / "run"]
    output = run_ranks(2, "train_gpt2.py", *flags, prepare=let_rank_1_refuse_every_size, fails=True)
    assert "no size fits" in output
