"""One optimizer step: when its gradients are reduced, which updates are refused, and the loss scale of float16."""

import itertools
import math
from functools import partial

import pytest
import torch
from helpers import (
    CPU,
    delete_checkpoints_after,
    err_in_update_5,
    load_curve,
    load_weights,
    same_bits,
    same_weights,
)

from checkpoints import checkpoint
from checkpoints.run_folder import complete_steps, optim_path
from lifecycle.build import build_trainer
from model import GPT
from system.errors import TransientError
from training.step import Trainer


def test_gradients_are_reduced_once_a_step(tiny_config):
    """DDP reduces in the backward pass of the last of three micro-batches only. Their losses are averaged."""
    cfg, losses, reduced = tiny_config(), [], []
    trainer = build_trainer(GPT(cfg.model), cfg, CPU, 12)

    def forward(x, y):
        reduced.append(forward.require_backward_grad_sync)  # which DDP's module reads
        objective, loss = trainer.loss(x, y)
        losses.append(loss.item())
        return objective, loss

    trainer.ddp_loss = forward
    batch = torch.randint(256, (3, 2, 33)).to(torch.uint16)  # (micro_steps, B, T + 1)
    loss, _ = trainer.compute_gradients(batch)
    assert reduced == [False, False, True] and loss == pytest.approx(sum(losses) / 3)


@pytest.mark.parametrize("flag, passes", [("--no-recompute", 1), ("--recompute", 2)])
def test_recompute_runs_a_block_again_in_the_backward_pass(tiny_config, flag, passes):
    cfg, inputs = tiny_config(flag), []
    trainer = build_trainer(GPT(cfg.model), cfg, CPU, 12)
    trainer.model.transformer.h[0].register_forward_pre_hook(lambda block, args: inputs.append(args[0]))
    trainer.compute_gradients(torch.zeros(1, 2, 33, dtype=torch.uint16))
    assert len(inputs) == passes


# ------------------------------------------------------------------------- a loss or gradient that is not finite


def poison(monkeypatch, at=lambda micro_step: True):
    """From now on, let the loss of these micro-steps of training be NaN; 0 is the first one."""
    forward, micro_steps = torch.nn.Embedding.forward, itertools.count()

    def poisoned_forward(self, ids):
        embedded = forward(self, ids)
        is_training = torch.is_grad_enabled() and self.num_embeddings == 256  # the positions are embedded, too
        return embedded * math.nan if is_training and at(next(micro_steps)) else embedded

    monkeypatch.setattr(torch.nn.Embedding, "forward", poisoned_forward)


def report_a_bad_norm_on_rank_1():
    """From step 2 on, rank 1 alone reads a norm that is not finite, as from a faulty card."""
    compute_gradients, steps = Trainer.compute_gradients, itertools.count()

    def faulty_compute_gradients(trainer, batch):
        loss, norm = compute_gradients(trainer, batch)
        is_bad = next(steps) >= 2 and trainer.rt.rank == 1
        return loss, math.inf if is_bad else norm

    Trainer.compute_gradients = faulty_compute_gradients


def test_all_ranks_refuse_what_one_of_them_finds_not_finite(train_ranks, tmp_path):
    """All of them save that step and refuse its update, and none waits for the others."""
    output = train_ranks(2, "run", fails=True, prepare=report_a_bad_norm_on_rank_1)
    assert output.count("step 2: loss 5.") == output.count("not finite on 1 ranks") == 2
    assert complete_steps(tmp_path / "run")[-1] == 2


def test_a_refused_update_loses_no_step_and_no_checkpoint(train, tmp_path, one_run, monkeypatch):
    """All before it is saved, though no save is due; every earlier checkpoint stays, because the weights may be the
    cause; and the run, which train.sh restarts after a TransientError, ends with the same bits."""
    flags, run = "--keep 1 --val-every 0", tmp_path / "run"
    poison(monkeypatch, at=lambda micro_step: micro_step == 14)  # two a step
    with pytest.raises(TransientError, match="step 7: loss nan"):
        train(run, flags)
    assert complete_steps(run)[-2:] == [6, 7]

    assert same_weights(train(run, flags, "--resume auto"), one_run)


def test_a_weight_that_is_not_a_number_is_not_saved(train, tmp_path, one_run, monkeypatch):
    """The run ends so that it is restarted, from the step before."""
    monkeypatch.setattr(torch.optim.AdamW, "step", err_in_update_5(lambda weight: math.nan))
    with pytest.raises(TransientError, match="not finite"):
        train("run")
    assert complete_steps(tmp_path / "run") == [3]

    monkeypatch.undo()
    assert same_weights(train("run", "--resume auto"), one_run)


# ------------------------------------------------------------------------- float16 and its loss scale


@pytest.fixture
def train_in_float16(train, monkeypatch):
    """train_in_float16("--max-steps 3") -> a run whose loss scale begins at 8, and tries to double after every four
    good steps instead of 2,000. As record8-124m on a GPU before Ampere it has AdamW and Muon, and weights that then
    stay in float32."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=8.0, growth_interval=4))
    return partial(train, "run", "--dtype float16 --param-dtype bfloat16 --optimizer muon --save-every 1")


def multiply_gradient(monkeypatch, name, factor, at=lambda backward: True):
    """Multiply the gradient of the parameter `name` of every model by a factor, after these of its backward passes."""
    to, backwards = GPT.to, itertools.count()

    def multiply(p):
        if at(next(backwards)):
            p.grad *= factor

    def to_with_hook(model, *args):
        model.get_parameter(name).register_post_accumulate_grad_hook(multiply)
        return to(model, *args)

    monkeypatch.setattr(GPT, "to", to_with_hook)


# AdamW's, and Muon's.
@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.h.0.mlp.c_proj.weight"])
def test_an_overflow_skips_the_step_of_both_optimizers(train_in_float16, monkeypatch, name):
    """Though the gradients of one of them are finite. The scale halves; resumed before that, the bits are the same."""
    # Two a step.
    multiply_gradient(monkeypatch, name, math.inf, at=lambda backward: backward == 4)
    run = train_in_float16()
    curve, weights = load_curve(run), load_weights(run)
    assert [step for step, (loss, _, norm) in curve.items() if loss is not None and norm is None] == [2]
    assert same_bits(load_weights(run, 2), load_weights(run, 3))
    states = [checkpoint.read_train_state(optim_path(run, step)) for step in (2, 3, 7)]
    assert [state["components"]["loss_scale"]["scale"] for state in states] == [8, 4, 8]
    assert curve[11][0] < curve[0][0] - 0.05

    delete_checkpoints_after(run, 1)
    monkeypatch.undo()
    multiply_gradient(monkeypatch, name, math.inf, at=lambda backward: backward == 2)
    train_in_float16("--resume auto")
    assert load_curve(run) == curve and same_bits(load_weights(run), weights)


@pytest.mark.parametrize("spoil, named", [
    # A loss is never scaled, so this is no overflow. For gradients, the scale halves three times, from 8 to 1.
    (poison, r"step 0: loss nan.*--dtype float32"),
    (partial(multiply_gradient, name="lm_head.weight", factor=math.nan), r"step 3: loss 5\.\d+, gradient norm nan"),
])  # fmt: skip
def test_float16_refuses_what_stays_nan(train_in_float16, monkeypatch, spoil, named):
    spoil(monkeypatch)
    with pytest.raises(TransientError, match=named):
        train_in_float16()
