"""What training refuses: updates that are not finite, which are reported with step, rank and data and lose nothing; and
bad input, with one message."""

import dataclasses
import math
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CPU,
    TINY_FLAGS,
    choices,
    delete_checkpoints_after,
    load_curve,
    load_weights,
    parse_config,
    same_bits,
    train_quickstart,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import train_gpt2
from model import GPT
from system import machine
from system.cli import UserError, run_cli
from tokens.loader import Loader
from training import checkpoint
from training.config import TrainConfig
from training.step import Forward, StepResult, TrainStep
from training.stop import StopRequest


@pytest.fixture
def poisoned(tmp_path) -> list[str]:
    """Flags of a run that begins with a weight that is not a number, so that every loss is NaN."""
    model = GPT(parse_config("quickstart", *TINY_FLAGS).model)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = math.nan
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    return ["--init-from", str(tmp_path / "model_00000.pt")]


# ------------------------------------------------------------------------- a loss or gradient that is not finite


def test_updates_that_are_not_finite_are_refused(tiny_args, tmp_path, poisoned):
    with pytest.raises(UserError, match=r"step 0: loss nan.*rank 0.*tiny_train_0.*sequence.*refused"):
        train_quickstart(tiny_args, tmp_path / "none", *poisoned)

    # With two to skip, the third is refused, and nothing is saved as if it had been made.
    with pytest.raises(UserError, match="step 2"):
        train_quickstart(tiny_args, tmp_path / "two", *poisoned, "--skip-bad-steps", "2")
    assert not list((tmp_path / "two").glob("model_00001.pt"))


def test_two_ranks_refuse_together_and_torchrun_shows_why(tiny_args, tmp_path, poisoned, run_ranks):
    flags = ["quickstart", *tiny_args, *poisoned, "--skip-bad-steps", "1", "--out-dir", tmp_path / "run"]
    error_file = tmp_path / "error"

    env = {"TORCHELASTIC_ERROR_FILE": str(error_file)}
    output = run_ranks(2, "train_gpt2.py", *flags, fails=True, env=env)

    assert "step 0: loss nan" in output
    assert "(1 of --skip-bad-steps 1)" in output
    assert "error: step 1: loss nan" in output
    assert "the update was refused" in output

    assert "traceback : error: step 1: loss nan" in torchrun_report(error_file)


def torchrun_report(error_file) -> str:
    """What torchrun prints last after a rank has failed. It is made of the rank's error file."""
    report = str(ChildFailedError("train_gpt2.py", {0: ProcessFailure(0, 7, 1, str(error_file))}))
    assert "To enable traceback" not in report and "error_file: <N/A>" not in report
    return report


def test_torchrun_repeats_the_traceback_of_a_crash(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error"))

    with pytest.raises(SystemExit):
        run_cli(lambda: 1 / 0)

    report = torchrun_report(tmp_path / "error")
    assert "Traceback (most recent call last)" in report and "ZeroDivisionError: division by zero" in report


def test_a_refused_update_loses_no_step(tiny_args, tmp_path, monkeypatch):
    """All before it is saved, though no save is due; and the run resumes from there to the same bits."""
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    forward, micro_steps = Forward.forward, []

    # The loss of step 7 is NaN once: a step has two micro-steps, so it begins with the 15th.
    def poisoned_once(self, *args):
        logits, loss = forward(self, *args)
        if torch.is_grad_enabled():  # validation does not count
            micro_steps.append(1)
            if len(micro_steps) == 15:
                loss = loss * math.nan
        return logits, loss

    monkeypatch.setattr(Forward, "forward", poisoned_once)
    data = Loader(tiny_args[-1], "train", 32, 256, seed=1337, shuffle=True)
    shard, sequence = data.step_sequences(7, 8, 4)[0, 0]
    place = rf"starts at {data.paths[shard].name} sequence {sequence};"
    with pytest.raises(UserError, match=f"step 7: loss nan.*{place}.*saved.*--resume auto --skip-bad-steps"):
        train_quickstart(tiny_args, run, "--save-every", "100")
    assert checkpoint.complete_steps(run) == [7]

    train_quickstart(tiny_args, run, "--save-every", "100", "--resume", "auto", "--skip-bad-steps", "5")
    assert same_bits(load_weights(run), load_weights(undisturbed))
    assert load_curve(run) == load_curve(undisturbed)


@pytest.mark.parametrize(
    "losses, norms",
    [([5, 5, 5], [1, 1, math.inf]), ([5, 5, math.nan], [math.nan, math.nan, math.nan])],
    ids=["by its norm", "by its loss"],
)
def test_the_rank_at_fault_is_named(tiny_args, tiny_data, capsys, losses, norms):
    """By its loss or, if all losses are finite, by its norm: one bad loss makes the norm bad on all three ranks."""
    cfg = parse_config("quickstart", *tiny_args, "--total-batch-size", "384", "--skip-bad-steps", "9")
    train_step, data = TrainStep(cfg, CPU, GPT(cfg.model)), Loader(tiny_data, "train", 32, 256)
    for p in train_step.model.parameters():
        p.grad = torch.zeros_like(p)  # as DDP leaves them
    per_rank = list(torch.tensor([losses, norms]).T)
    train_step.rt = SimpleNamespace(device=CPU.device, world_size=3, all_gather=lambda local: per_rank)

    result = StepResult(loss=5.0, norm=1.0, is_finite=False, stop_requested=False, local_loss=5.0)
    train_step.refuse_update(7, result, data)

    assert "on rank 2, whose data starts" in capsys.readouterr().out


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


def test_float16_refuses_a_loss_that_is_nan(tiny_args, tmp_path, monkeypatch, poisoned):
    """A loss is never scaled, so this is no overflow."""
    set_initial_loss_scale(monkeypatch, 8.0)

    with pytest.raises(UserError, match="step 0: loss nan"):
        train_quickstart(tiny_args, tmp_path / "loss", *poisoned, *FLOAT16)


def test_float16_refuses_gradients_that_stay_nan_at_the_smallest_scale(tiny_args, tmp_path, monkeypatch, capsys):
    set_initial_loss_scale(monkeypatch, 8.0)
    build_train_step = train_gpt2.build_train_step

    def with_nan_gradients(*args, **kwargs):
        train_step = build_train_step(*args, **kwargs)
        train_step.model.lm_head.weight.register_hook(lambda gradient: gradient * math.nan)
        return train_step

    monkeypatch.setattr(train_gpt2, "build_train_step", with_nan_gradients)

    # The scale halves three times, from 8 to 1; then one step is skipped, and one more is refused.
    with pytest.raises(UserError, match=r"step 4: loss 5\.\d+, gradient norm nan"):
        train_quickstart(tiny_args, tmp_path / "gradient", "--skip-bad-steps", "1", *FLOAT16)
    output = capsys.readouterr().out
    assert output.count("overflow at loss scale") == 3
    assert "step 3: loss 5." in output


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
