"""What training refuses: updates that are not finite, which lose nothing; and bad input, with one message."""

import dataclasses
import itertools
import json
import math
import re
import shutil
from functools import partial

import pytest
import torch
from helpers import (
    CPU,
    choices,
    delete_checkpoints_after,
    load_curve,
    load_weights,
    parse_config,
    same_bits,
    train_quickstart,
)

import train_gpt2
from system import machine
from system.cli import UserError
from training import checkpoint
from training.config import TrainConfig
from training.step import TrainStep
from training.stop import StopRequest


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


# ------------------------------------------------------------------------- a loss or gradient that is not finite


def test_updates_that_are_not_finite_are_refused(tiny_args, tmp_path, unpoisoned):
    poison()
    with pytest.raises(UserError, match="step 0: loss nan"):
        train_quickstart(tiny_args, tmp_path / "none")

    # With two to skip, the third is refused, and nothing is saved as if it had been made.
    with pytest.raises(UserError, match="step 2"):
        train_quickstart(tiny_args, tmp_path / "two", "--skip-bad-steps", "2")
    assert not (tmp_path / "two" / "model_00001.pt").exists()


def test_two_ranks_refuse_together(tiny_args, tmp_path, run_ranks):
    status = tmp_path / "status"
    flags = ["quickstart", *tiny_args, "--skip-bad-steps", "1", "--out-dir", tmp_path / "run"]

    output = run_ranks(2, "train_gpt2.py", *flags, fails=True, prepare=poison, env={"TRAIN_STATUS_FILE": str(status)})

    assert "step 0: loss nan" in output and "(number 1 of --skip-bad-steps 1)" in output
    assert "error: step 1: loss nan" in output
    assert json.loads(status.read_text())["status"] == "user_error"


def test_a_refused_update_loses_no_step(tiny_args, tmp_path, unpoisoned):
    """All before it is saved, though no save is due; and the run resumes from there to the same bits."""
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    poison(at=lambda micro_step: micro_step == 14)  # a step has two micro-steps
    with pytest.raises(UserError, match="step 7: loss nan"):
        train_quickstart(tiny_args, run, "--save-every", "100")
    assert checkpoint.complete_steps(run) == [7]

    train_quickstart(tiny_args, run, "--save-every", "100", "--resume", "auto", "--skip-bad-steps", "5")
    assert same_bits(load_weights(run), load_weights(undisturbed))
    assert load_curve(run) == load_curve(undisturbed)


# ------------------------------------------------------------------------- float16 and its loss scale

FLOAT16 = ["--dtype", "float16"]


def set_initial_loss_scale(monkeypatch, init_scale) -> None:
    """Let the loss scale start here, and try to double after every four good steps instead of 2,000."""
    scaler = partial(torch.amp.GradScaler, init_scale=init_scale, growth_interval=4)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_float16_skips_overflows_and_resumes_with_its_scale(tiny_args, tmp_path, monkeypatch, capsys, optimizer):
    set_initial_loss_scale(monkeypatch, 2.0**30)
    flags = [*tiny_args, *FLOAT16, "--optimizer", optimizer, "--max-steps", "40", "--save-every", "1"]
    undisturbed = train_quickstart(flags, tmp_path / "undisturbed")

    # Each overflow is printed with its scale, which it halves, and is logged with a norm that is null.
    scales = [float(x) for x in re.findall(r"overflow at loss scale (\S+);", capsys.readouterr().out)]
    curve = load_curve(undisturbed)
    skipped = [step for step, (loss, _, norm) in curve.items() if loss is not None and norm is None]
    assert len(scales) == len(skipped) < 30
    assert scales[:3] == pytest.approx([2.0**30, 2.0**29, 2.0**28], rel=1e-5)

    # The first steps overflow, and later ones again when the scale has grown.
    assert skipped[:3] == [0, 1, 2]
    assert skipped[-1] > 10

    # A skipped step moves nothing; the others learn.
    assert same_bits(load_weights(undisturbed, 1), load_weights(undisturbed, 2))
    assert curve[39][0] < curve[0][0] - 0.05

    # Resumed at a skipped step and before it, the scale continues where it was.
    for last_step in (skipped[-1], skipped[-1] - 2):
        resumed = tmp_path / f"from {last_step}"
        shutil.copytree(undisturbed, resumed)
        delete_checkpoints_after(resumed, last_step)
        train_quickstart(flags, resumed, "--resume", "auto")
        assert load_curve(resumed) == curve
        assert same_bits(load_weights(resumed, 40), load_weights(undisturbed, 40))
        scaler, expected = (checkpoint.read_train_state(run)["scaler"] for run in (resumed, undisturbed))
        assert scaler == expected


def test_float16_refuses_a_loss_that_is_nan(tiny_args, tmp_path, monkeypatch, unpoisoned):
    """A loss is never scaled, so this is no overflow."""
    poison()
    set_initial_loss_scale(monkeypatch, 8.0)

    with pytest.raises(UserError, match="step 0: loss nan"):
        train_quickstart(tiny_args, tmp_path / "loss", *FLOAT16)


def test_float16_refuses_gradients_that_stay_nan_at_the_smallest_scale(tiny_args, tmp_path, monkeypatch, capsys):
    set_initial_loss_scale(monkeypatch, 8.0)
    init = TrainStep.__init__

    def with_nan_gradients(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)

    monkeypatch.setattr(TrainStep, "__init__", with_nan_gradients)

    # The scale halves three times, from 8 to 1; then one step is skipped, and one more is refused.
    with pytest.raises(UserError, match=r"step 4: loss 5\.\d+, gradient norm nan"):
        train_quickstart(tiny_args, tmp_path / "gradient", "--skip-bad-steps", "1", *FLOAT16)
    assert capsys.readouterr().out.count("overflow at loss scale") == 3


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_bfloat16_weights_train_on_a_gpu_that_has_only_float16(tiny_args, tmp_path, capsys, optimizer):
    """As record8-124m and speedrun-124m on a Turing GPU: one line says what is done instead. It resumes, too."""
    flags = [*tiny_args, "--weights", "bfloat16", "--dtype", "float16", "--optimizer", optimizer]
    run = train_quickstart(flags, tmp_path / "run", "--max-steps", "3")
    assert capsys.readouterr().out.count("here weights stay in float32") == 1

    train_quickstart(flags, run, "--max-steps", "5", "--resume", "auto")
    assert list(load_curve(run)) == list(range(6))
    assert load_curve(run)[5][1] < 6


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, mentions",
    [
        (["--micro-batch-size", "3"], ["--micro-batch-size 3", "use --micro-batch-size"]),
        (["--data-dir", "nowhere"], ["nowhere", "python fineweb.py"]),
        (["--resume", "log/none/model_00001.pt"], ["no checkpoint log/none/model_00001.pt"]),
        (["--init-from", "nowhere.pt"], ["nowhere.pt"]),
        (["--device", "cuda"], ["cuda", "--device auto"]),
        (["--hellaswag-every", "5", "--hellaswag-data", "none.jsonl"], ["none.jsonl", "python hellaswag.py"]),
        (["--model.vocab-size", "100"], ["vocabulary size, 100"]),
    ],
)
def test_bad_input_is_one_message(tiny_args, tmp_path, flags, mentions):
    with pytest.raises(UserError) as error:
        cfg = parse_config("quickstart", *tiny_args, "--out-dir", tmp_path / "run", *flags)
        rt = dataclasses.replace(CPU, device=machine.choose_device(cfg.device))
        train_gpt2.train(cfg, rt, StopRequest())

    for words in mentions:
        assert words in str(error.value)
