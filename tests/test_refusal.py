"""Refusals: a loss or gradient that is not finite, which names step, rank and data and loses nothing; bad input."""

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
    delete_checkpoints_after,
    load_curve,
    load_weights,
    parse_config,
    same_bits,
    train_quickstart,
)
from processes import shorten_sleeps
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import train_gpt2
from model import GPT
from system.cli import UserError
from tokens.loader import Loader
from training import checkpoint
from training.step import Forward, TrainStep
from training.stop import StopRequest

HALF = ["--dtype", "float16"]


@pytest.fixture
def poisoned(tmp_path):
    """A model with a weight that is not a number."""
    cfg = parse_config("quickstart", *TINY_FLAGS)
    model = GPT(cfg.model)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    return ["--init-from", str(tmp_path / "model_00000.pt")]


def test_non_finite_updates_are_refused(tiny_args, tmp_path, poisoned, run_ranks):
    with pytest.raises(UserError, match=r"step 0: loss nan.*rank 0.*tiny_train_0.*window.*refused"):
        train_quickstart(tiny_args, tmp_path / "a", *poisoned)
    with pytest.raises(UserError, match="step 2"):
        train_quickstart(tiny_args, tmp_path / "b", *poisoned, "--skip-bad-steps", "2")
    assert not list((tmp_path / "b").glob("model_00001.pt"))
    flags = ["quickstart", *tiny_args, *poisoned, "--skip-bad-steps", "1", "--out-dir", tmp_path / "c"]
    report = tmp_path / "error"  # torchrun's, which is the last that a user sees
    env = {"TORCHELASTIC_ERROR_FILE": str(report)}
    said = run_ranks(2, "train_gpt2.py", *flags, fails=True, prepare=shorten_sleeps, env=env)
    assert "step 0: loss nan" in said and "(1 of --skip-bad-steps 1)" in said
    assert "error: step 1: loss nan" in said and "the update was refused" in said
    told = str(ChildFailedError("train_gpt2.py", {0: ProcessFailure(0, 7, 1, str(report))}))
    assert "traceback : error: step 1: loss nan" in told and "To enable traceback" not in told


def test_a_refused_update_loses_no_step(tiny_args, tmp_path, monkeypatch):
    """All before it is saved, though no save is due; and the run goes on from there to the same bits."""
    whole, run, calls = train_quickstart(tiny_args, tmp_path / "whole"), tmp_path / "run", []

    def poisoned_once(self, *args, real=Forward.forward):
        logits, loss = real(self, *args)
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == 15:  # two micro-batches a step
                loss = loss * math.nan
        return logits, loss

    monkeypatch.setattr(Forward, "forward", poisoned_once)
    data = Loader(tiny_args[-1], "train", 32, 256, seed=1337, shuffle=True)
    shard, window = data.step_sequences(7, 8, 4)[0, 0]
    named = rf"starts at {data.paths[shard].name} window {window};"
    with pytest.raises(UserError, match=f"step 7: loss nan.*{named}.*saved.*--resume auto and --skip-bad-steps"):
        train_quickstart(tiny_args, run, "--save-every", "100")
    assert checkpoint.complete_steps(run) == [7]
    train_quickstart(tiny_args, run, "--save-every", "100", "--resume", "auto", "--skip-bad-steps", "5")
    assert same_bits(load_weights(run), load_weights(whole)) and load_curve(run) == load_curve(whole)


def test_the_rank_at_fault_is_named(tiny_args, tiny_data, capsys):
    """By its loss or, if all are finite, by its norm: one bad loss makes the norm bad on all."""
    cfg = parse_config("quickstart", *tiny_args, "--total-batch-size", "384", "--skip-bad-steps", "9")
    step, data = TrainStep(cfg, CPU, GPT(cfg.model)), Loader(tiny_data, "train", 32, 256)
    for losses, norms in (([5, 5, 5], [1, 1, math.inf]), ([5, 5, math.nan], [math.nan] * 3)):
        found = list(torch.tensor([losses, norms]).T)
        step.rt = SimpleNamespace(device=CPU.device, world_size=3, gather=lambda mine, found=found: found)
        step.refuse(7, StepResult(5.0, 1.0, finite=False, halt=False, local_loss=5.0), data)
        assert "on rank 2, whose data starts" in capsys.readouterr().out


def scaled(monkeypatch, init_scale):
    """A loss scale that starts high and soon tries to grow."""
    scaler = partial(torch.amp.GradScaler, init_scale=init_scale, growth_interval=4)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_skips_overflows_and_resumes_with_its_scale(tiny_args, tmp_path, monkeypatch, capsys, optimizer):
    scaled(monkeypatch, 2.0**30)
    flags = [*tiny_args, "--optimizer", optimizer, "--max-steps", "40", "--save-every", "1"]
    whole = train_quickstart(flags, tmp_path / "whole", *HALF)
    scales = [float(x) for x in re.findall(r"overflow at loss scale (\S+);", capsys.readouterr().out)]
    found = load_curve(whole)
    skipped = [step for step, (loss, _, norm) in found.items() if loss is not None and norm is None]
    assert len(scales) == len(skipped) < 30
    assert skipped[:3] == [0, 1, 2] and skipped[-1] > 10  # the scale grows and is cut again
    assert scales[:3] == pytest.approx([2.0**30, 2.0**29, 2.0**28], rel=1e-5)
    assert same_bits(load_weights(whole, 1), load_weights(whole, 2))  # a skipped step moved nothing
    assert found[39][0] < found[0][0] - 0.05
    for upto in (skipped[-1], skipped[-1] - 2):
        parts = tmp_path / f"from {upto}"
        shutil.copytree(whole, parts)
        delete_checkpoints_after(parts, upto)
        train_quickstart(flags, parts, "--resume", "auto", *HALF)
        assert load_curve(parts) == found and same_bits(load_weights(parts, 40), load_weights(whole, 40))
        assert checkpoint.read_train_state(parts)["scaler"] == checkpoint.read_train_state(whole)["scaler"]


def test_float16_tells_overflow_from_nan(tiny_args, tmp_path, monkeypatch, capsys, poisoned):
    scaled(monkeypatch, 8.0)
    with pytest.raises(UserError, match="step 0: loss nan"):
        train_quickstart(tiny_args, tmp_path / "loss", *poisoned, *HALF)

    def nan_gradients(*args, real=train_gpt2.make_model):
        model = real(*args)
        model.lm_head.weight.register_hook(lambda g: g * math.nan)
        return model

    monkeypatch.setattr(train_gpt2, "make_model", nan_gradients)
    with pytest.raises(UserError, match=r"step 4: loss 5\.\d+, gradient norm nan"):  # one more, as one is tolerated
        train_quickstart(tiny_args, tmp_path / "gradient", "--skip-bad-steps", "1", *HALF)
    said = capsys.readouterr().out
    assert said.count("overflow at loss scale") == 3 and "step 3: loss 5." in said


@pytest.mark.parametrize(
    "flags, says",
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
def test_bad_input_is_one_message(tiny_args, tmp_path, flags, says):
    with pytest.raises(UserError) as e:
        cfg = parse_config("quickstart", *tiny_args, "--out-dir", tmp_path / "x", *flags)
        rt = dataclasses.replace(CPU, device=train_gpt2.machine.choose_device(cfg.device))
        train_gpt2.train(cfg, rt, StopRequest())
    for s in says:
        assert s in str(e.value)
