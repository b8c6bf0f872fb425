"""The rehearsal: the micro-batch that fits in memory, and a compiler that fails."""

import os
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import CPU, assert_curves_close, load_curve

from system.errors import UserError
from training import microbatch
from training.presets import PRESETS

GPU = replace(CPU, device=torch.device("cuda", 0))
UNCOMPILED = Mock(compiles=False)  # a forward pass


class Card:
    """A GPU of 80 GiB, whose memory takes micro-batches of up to 5 sequences."""

    limit = 5

    def __init__(self):
        self.tried = []  # micro-batches
        self.ballasts = []  # GiB that were allocated beside them

    def run_passes(self, cfg, rt, forward, B):
        self.tried.append(B)
        if self.limit < B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def allocate(self, size, dtype, device):
        self.ballasts.append(size / 2**30)
        return torch.zeros(1)

    def choose(self, sequences=512, rt=GPU, micro_batch_size="auto"):
        """The micro-batch for steps of `sequences`."""
        size = {"total_batch_size": 1024 * sequences, "micro_batch_size": micro_batch_size}
        return microbatch.choose_micro_batch_size(replace(PRESETS["gpt2-124m"], **size), rt, UNCOMPILED, 2**30, 10)


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(microbatch.gc, "collect", lambda: None)  # of all that the tests have imported: it takes long
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch, "empty", card.allocate)
    monkeypatch.setattr(microbatch, "run_passes", card.run_passes)
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
    assert card.choose(micro_batch_size=4) == 4 and card.ballasts == [1]
    with pytest.raises(UserError, match=r"8 x 1024 .*--micro-batch-size"):
        card.choose(micro_batch_size=8)


def test_auto_takes_what_fits_on_every_rank(card, monkeypatch):
    """On the other rank only one sequence fits; both try the same sizes."""
    others = iter([microbatch.OUT_OF_MEMORY, microbatch.OUT_OF_MEMORY, ""])
    monkeypatch.setattr(type(GPU), "gather", lambda rt, value: [value, next(others)])
    assert card.choose(12, replace(GPU, world_size=2)) == 1
    assert card.tried == [6, 3, 1]


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_a_size_that_surely_fits(preset, B):
    assert microbatch.choose_micro_batch_size(PRESETS[preset], CPU, UNCOMPILED, 0, 10) == B


def test_only_a_lack_of_memory_is_taken_for_one():
    with pytest.raises(UserError, match="--zero-stage 1"), microbatch.explain_out_of_memory(CPU):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    with pytest.raises(RuntimeError, match="assert"), microbatch.explain_out_of_memory(CPU):
        raise RuntimeError("device-side assert triggered")


# ------------------------------------------------------------------------- the compiler


def take_rank_1_its_compiler() -> None:
    """A `prepare` for ranks of which the second has no compiler, and the first needs none."""

    def backend(graph, inputs):
        if os.environ["RANK"] == "1":
            raise RuntimeError("C++ compile error\ng++: error: unrecognized command-line option")
        return graph.forward

    torch.compile = partial(torch.compile, backend=backend)


def test_a_compiler_that_fails_on_one_rank_is_left_out_on_all(tiny_args, tmp_path, one_run, run_ranks):
    """With one line, before the first step."""
    flags = [*tiny_args, "--compile", "--out-dir", tmp_path / "run"]
    output = run_ranks(2, "train_gpt2.py", "quickstart", *flags, prepare=take_rank_1_its_compiler)
    assert output.count("g++: error: unrecognized") == 1 and "Traceback" not in output
    assert_curves_close(load_curve(tmp_path / "run"), load_curve(one_run))
