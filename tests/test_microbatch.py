"""The rehearsal: the micro-batch that fits in memory, and a compiler that fails."""

import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock, patch

import pytest
import torch
from helpers import CPU, assert_curves_close, refused
from networks import make_network
from torch._dynamo.exc import FailOnRecompileLimitHit

from lifecycle import microbatch
from lifecycle.build import make_loss
from system.errors import UserError
from system.machine import explain_out_of_memory
from training.presets import PRESETS

GPU, MAC = (replace(CPU, device=torch.device(name)) for name in ("cuda:0", "mps"))
UNCOMPILED = Mock(compiles=False)  # a forward pass


def choose(cfg, rt, loss=UNCOMPILED):
    """The micro-batch of a trainer of a new run with these settings, whose optimizers will take a gibibyte."""
    with patch.object(microbatch, "state_bytes", lambda *args: 2**30):
        trainer = Mock(cfg=cfg, rt=rt, loss=loss, **{"model.num_params.return_value": 124_475_904})
        return microbatch.choose_micro_batch_size(trainer, 10, has_state=False)


class Card:
    """A GPU of 80 GiB, whose memory takes micro-batches of up to 5 sequences."""

    limit, gib = 5, 80

    def __init__(self):
        self.tried = []  # micro-batches
        self.ballasts = []  # GiB that were allocated beside them

    def run_passes(self, trainer, B):
        self.tried.append(B)
        if self.limit < B:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def allocate(self, size, dtype, device):
        self.ballasts.append(size / 2**30)
        return torch.zeros(1)

    def choose(self, sequences=512, rt=GPU, loss=UNCOMPILED, **settings):
        """The micro-batch for steps of `sequences`."""
        cfg = replace(PRESETS["gpt2-124m"], total_batch_size=1024 * sequences, **settings)
        return choose(cfg, rt, loss)


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(microbatch.gc, "collect", lambda: None)  # of all that the tests have imported: it takes long
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, card.gib * 2**30))
    monkeypatch.setattr(torch, "empty", card.allocate)
    monkeypatch.setattr(microbatch, "run_passes", card.run_passes)
    return card


@pytest.mark.parametrize("gib, settings, tried", [
    (80, {}, [64, 32, 16, 8, 4]), (80, {"sequences": 60}, [60, 30, 15, 6, 3]), (24, {}, [32, 16, 8, 4]),
    (11, {}, [16, 8, 4]), (11, {"recompute": True}, [64, 32, 16, 8, 4]), (2, {}, [1]),
])  # fmt: skip
def test_auto_halves_until_a_size_fits(card, gib, settings, tried):
    """From the first one whose activations may fit, because each try compiles."""
    card.gib = gib
    assert card.choose(**settings) == tried[-1]
    assert card.tried == tried

    card.limit = 0
    with refused("--recompute"):
        card.choose(**settings)


def test_the_ballast_covers_later_allocations(card):
    """The gibibyte that training allocates later, and 4 percent of the card, but at least one gibibyte."""
    for card.gib in 80, 8:
        card.choose(1)
    assert card.ballasts == pytest.approx([1 + 0.04 * 80, 1 + 1])


def test_a_size_that_was_asked_for_is_tried_before_training(card):
    """Without a ballast for what may come: the user knows."""
    assert card.choose(micro_batch_size=4) == 4 and card.ballasts == [1]
    with refused(r"8 x 1024 .*--micro-batch-size"):
        card.choose(micro_batch_size=8)


def test_auto_takes_what_fits_on_every_rank(card, monkeypatch):
    """On the other rank only one sequence fits; both try the same sizes."""
    others = iter([2**36, microbatch.OUT_OF_MEMORY, microbatch.OUT_OF_MEMORY, ""])
    monkeypatch.setattr(type(GPU), "gather", lambda rt, value: [value, next(others)])
    assert card.choose(12, replace(GPU, world_size=2)) == 1
    assert card.tried == [6, 3, 1]


@pytest.mark.parametrize("preset, B", [("quickstart", 4), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_and_a_mac_take_a_size_that_surely_fits(card, preset, B):
    card.limit = 16
    for rt in CPU, MAC:
        assert choose(PRESETS[preset], rt) == B


def test_only_a_lack_of_memory_is_taken_for_one():
    with refused("--zero-stage 1"), explain_out_of_memory(microbatch.MEMORY_FIX):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    with pytest.raises(RuntimeError, match="assert"), explain_out_of_memory(microbatch.MEMORY_FIX):
        raise RuntimeError("device-side assert triggered")


# ------------------------------------------------------------------------- the compiler


@pytest.mark.parametrize("is_compilers, error", [(True, UserError), (False, RuntimeError)])
def test_a_compiler_that_fails_on_a_gpu_is_an_error(monkeypatch, card, is_compilers, error):
    """Of the user, who may go on without; what fails without the compiler, too, is a crash."""

    def run_passes(trainer, B):
        if trainer.loss.compiles or not is_compilers:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(microbatch, "run_passes", run_passes)
    with pytest.raises(error, match="Failed to find C compiler") as found:
        card.choose(loss=Mock(compiles=True))
    assert is_compilers == all(word in str(found.value) for word in ("gcc python3.", "--no-compile"))


@pytest.mark.parametrize("rt", [GPU, CPU])
def test_more_graphs_than_the_limit_are_an_error_on_a_gpu(rt):
    """On a CPU, torch goes on without the compiler."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False, optimize_ddp=True):
        make_loss(make_network(), PRESETS["gpt2-124m"], rt)
        double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)  # a graph for each size
        for size in range(64):
            double(torch.ones(size))
        with pytest.raises(FailOnRecompileLimitHit) if rt is GPU else nullcontext():
            assert double(torch.ones(64)).sum() == 128


def take_rank_1_its_compiler():
    """A `prepare` for ranks of which the second has no compiler, and the first needs none."""

    def backend(graph, inputs, **options):
        if os.environ["RANK"] == "1":
            raise RuntimeError("C++ compile error\ng++: error: unrecognized command-line option")
        return graph.forward

    torch.compile = partial(torch.compile, backend=backend)


def test_a_compiler_that_fails_on_one_rank_is_left_out_on_all(train_ranks, tmp_path, one_run):
    """With one line, before the first step."""
    output = train_ranks(2, "run", "--compile", prepare=take_rank_1_its_compiler)
    assert output.count("g++: error: unrecognized") == 1 and "Traceback" not in output
    assert_curves_close(tmp_path / "run", one_run)
