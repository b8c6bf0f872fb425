"""One optimizer step: when its gradients are reduced, which updates are refused, and the loss scale of float16."""

import itertools
import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from helpers import CPU, delete_checkpoints_after, load_curve, load_weights, parse_config, same_bits, train_quickstart

import train_gpt2
from model import GPT
from system.cli import TransientError, UserError
from training.step import Trainer
from weights import checkpoint
from weights.names import complete_steps, latest_step


def test_gradients_are_reduced_once_a_step(tiny_args):
    """DDP reduces in the backward pass of the last of three micro-batches only. Their losses are averaged."""
    reduced = []

    class Forward:
        """In place of DDP's module, which reads require_backward_grad_sync."""

        def __call__(self, x, y):
            reduced.append(self.require_backward_grad_sync)
            return torch.ones((), requires_grad=True) * len(reduced)

    cfg = parse_config("quickstart", *tiny_args)
    batch = torch.zeros(3, 2, 33, dtype=torch.uint16)  # (micro_steps, B, T + 1)
    trainer = Trainer(GPT(cfg.model), cfg, CPU)
    trainer.ddp_forward = Forward()
    loss, _ = trainer.compute_gradients(batch)

    assert reduced == [False, False, True] and loss == pytest.approx(2)


# ------------------------------------------------------------------------- a loss or gradient that is not finite


def poison(at=lambda micro_step: True) -> None:
    """From now on, let the loss of these micro-steps of training be NaN; 0 is the first one."""
    forward, micro_steps = torch.nn.Embedding.forward, itertools.count()

    def poisoned_forward(self, ids):
        embedded = forward(self, ids)
        is_training = torch.is_grad_enabled() and self.num_embeddings == 256  # the positions are embedded, too
        return embedded * math.nan if is_training and at(next(micro_steps)) else embedded

    torch.nn.Embedding.forward = poisoned_forward


@pytest.fixture
def unpoisoned(monkeypatch) -> None:
    """Undoes `poison` after the test."""
    monkeypatch.setattr(torch.nn.Embedding, "forward", torch.nn.Embedding.forward)


def test_bad_steps_are_skipped_as_often_as_asked(tiny_args, tmp_path, unpoisoned):
    """The next one is refused, and nothing is saved as if it had been made."""
    poison()
    with pytest.raises(UserError, match="step 2: loss nan"):
        train_quickstart(tiny_args, tmp_path / "run", "--skip-bad-steps", "2", "--save-every", "1")
    assert same_bits(load_weights(tmp_path / "run", 1), load_weights(tmp_path / "run", 2))
    assert latest_step(tmp_path / "run") == 2


def test_two_ranks_refuse_together(tiny_args, tmp_path, run_ranks):
    status = tmp_path / "status"
    flags = ["quickstart", *tiny_args, "--skip-bad-steps", "1", "--out-dir", tmp_path / "run"]

    output = run_ranks(2, "train_gpt2.py", *flags, fails=True, prepare=poison, env={"TRAIN_STATUS_FILE": str(status)})

    assert "step 0: loss nan" in output and "(bad step 1; --skip-bad-steps allows 1)" in output
    assert "error: step 1: loss nan" in output
    assert json.loads(status.read_text())["status"] == "system_error"  # train.sh restarts it: it may be a glitch


def test_a_refused_update_loses_no_step(tiny_args, tmp_path, one_run, unpoisoned):
    """All before it is saved, though no save is due; and the run resumes from there to the same bits."""
    run = tmp_path / "run"
    poison(at=lambda micro_step: micro_step == 14)  # a step has two micro-steps
    with pytest.raises(UserError, match="step 7: loss nan"):
        train_quickstart(tiny_args, run, "--save-every", "100")
    assert complete_steps(run) == [7]

    train_quickstart(tiny_args, run, "--save-every", "100", "--resume", "auto", "--skip-bad-steps", "5")
    assert same_bits(load_weights(run), load_weights(one_run))
    assert load_curve(run) == load_curve(one_run)


def test_a_weight_that_is_not_a_number_is_not_saved(tiny_args, tmp_path, one_run, monkeypatch):
    """As an error of the hardware makes one: the run ends so that it is restarted, from the step before."""
    step, calls = torch.optim.AdamW.step, itertools.count(1)

    def step_with_an_error(optimizer):
        step(optimizer)
        if next(calls) == 5:
            optimizer.param_groups[0]["params"][0].data[9, 9] = math.nan  # the embedding

    monkeypatch.setattr(torch.optim.AdamW, "step", step_with_an_error)
    with pytest.raises(TransientError, match="not finite"):
        train_quickstart(tiny_args, tmp_path / "run")
    assert complete_steps(tmp_path / "run") == [3]

    monkeypatch.undo()
    train_quickstart(tiny_args, tmp_path / "run", "--resume", "auto")
    assert same_bits(load_weights(tmp_path / "run"), load_weights(one_run))


def test_a_refused_update_pushes_no_checkpoint_out(tiny_args, tmp_path, unpoisoned):
    """Its weights may be the cause, and the ones before them the way back."""
    poison(at=lambda micro_step: micro_step >= 14)
    with pytest.raises(UserError, match="step 7: loss nan"):
        train_quickstart(tiny_args, tmp_path / "run", "--save-every", "3", "--keep", "1", "--val-every", "0")
    assert complete_steps(tmp_path / "run")[-2:] == [6, 7]


# ------------------------------------------------------------------------- float16 and its loss scale

# As record8-124m on a GPU before Ampere: AdamW and Muon, and weights that then stay in float32.
FLOAT16 = "--dtype float16 --weights bfloat16 --optimizer muon".split()


def set_initial_loss_scale(monkeypatch, init_scale) -> None:
    """Let the loss scale start here, and try to double after every four good steps instead of 2,000."""
    scaler = partial(torch.amp.GradScaler, init_scale=init_scale, growth_interval=4)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


def test_float16_skips_overflows_and_resumes(tiny_args, tmp_path, monkeypatch, capsys):
    set_initial_loss_scale(monkeypatch, 2.0**30)
    flags = [*tiny_args, *FLOAT16, "--max-steps", "20", "--save-every", "1"]
    undisturbed = train_quickstart(flags, tmp_path / "undisturbed")

    # Each overflow is printed with its scale, which it halves, and is logged with a norm that is null.
    scales = [float(x) for x in re.findall(r"overflow at loss scale (\S+);", capsys.readouterr().out)]
    curve = load_curve(undisturbed)
    skipped = [step for step, (loss, _, norm) in curve.items() if loss is not None and norm is None]
    assert len(scales) == len(skipped)
    assert scales[:3] == pytest.approx([2.0**30, 2.0**29, 2.0**28], rel=1e-5)

    # The first steps overflow, and later ones again when the scale has grown. These move nothing; the others learn.
    assert skipped[:3] == [0, 1, 2] and skipped[-1] > 10
    assert same_bits(load_weights(undisturbed, 1), load_weights(undisturbed, 2))
    assert curve[19][0] < curve[0][0] - 0.05

    # Resumed before a skipped step, the scale continues where it was.
    resumed = shutil.copytree(undisturbed, tmp_path / "resumed")
    delete_checkpoints_after(resumed, skipped[-1] - 2)
    train_quickstart(flags, resumed, "--resume", "auto")
    assert load_curve(resumed) == curve
    assert same_bits(load_weights(resumed, 20), load_weights(undisturbed, 20))
    scaler, expected = (checkpoint.read_train_state(run)["scaler"] for run in (resumed, undisturbed))
    assert scaler == expected


def test_float16_refuses_a_loss_that_is_nan(tiny_args, tmp_path, monkeypatch, unpoisoned):
    """A loss is never scaled, so this is no overflow."""
    poison()
    set_initial_loss_scale(monkeypatch, 8.0)

    with pytest.raises(UserError, match=r"step 0: loss nan.*--dtype float32"):
        train_quickstart(tiny_args, tmp_path / "loss", *FLOAT16)


def test_float16_refuses_gradients_that_stay_nan(tiny_args, tmp_path, monkeypatch, capsys):
    set_initial_loss_scale(monkeypatch, 8.0)

    def trainer_with_nan_gradients(model, *args):
        model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
        return Trainer(model, *args)

    monkeypatch.setattr(train_gpt2, "Trainer", trainer_with_nan_gradients)

    # The scale halves three times, from 8 to 1; then one step is skipped, and one more is refused.
    with pytest.raises(UserError, match=r"step 4: loss 5\.\d+, gradient norm nan"):
        train_quickstart(tiny_args, tmp_path / "gradient", "--skip-bad-steps", "1", *FLOAT16)
    assert capsys.readouterr().out.count("overflow at loss scale") == 3
