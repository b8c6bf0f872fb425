"""The plan before a run: the micro-batch that fits, steps, data, time and money; --dry-run leaves nothing."""

import dataclasses
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, parse_config, train_quickstart

import train_gpt2
from model import GPT
from system.cli import UserError
from system.distributed import Runtime
from tokens import shards
from training import microbatch, optim, plan
from training.master_weights import MasterWeights
from training.run_state import RunState


def test_micro_batch_auto_halves_until_it_fits_on_every_rank(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    model, tried = GPT(cfg.model), []

    def forward(x, y, room=5):
        tried.append(len(x))
        out = model(x, y)
        if len(x) > room:  # part of the backward's work is done by then
            out[1].backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    class Smaller(Runtime):  # another rank has less room
        def all_reduce(self, tensor, op="sum"):
            assert op == "min"
            return tensor.clamp(max=2)

    rng = torch.get_rng_state()
    choices = [60, 30, 20, 15, 12, 10, 6, 5, 4, 3, 2, 1]
    assert microbatch.probe(model, forward, cfg, CPU, choices) == 3
    assert tried == [60, 30, 15, 6, 3, 3]  # a second micro-step, for which the gradients of the first are in memory
    assert all(p.grad is None for p in model.parameters()) and torch.equal(rng, torch.get_rng_state())
    assert microbatch.probe(model, forward, cfg, Smaller(CPU.device, CPU.dtype), choices) == 2
    with pytest.raises(UserError, match="--recompute"):
        microbatch.probe(model, partial(forward, room=0), cfg, CPU, choices)
    with pytest.raises(UserError, match=r"8 sequences of 32, which do not split evenly over 3 ranks; use .* 288"):
        microbatch.choose_micro_batch_size(cfg, dataclasses.replace(CPU, world_size=3), model, model)


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_what_its_memory_surely_has(preset, B):
    assert microbatch.micro_batch_size(parse_config(preset), CPU, None, None) == B


def test_only_a_lack_of_memory_is_taken_for_one(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    model = GPT(cfg.model)

    def fits(error):
        def forward(x, y):
            raise RuntimeError(error)

        return microbatch.fits_in_memory(model, forward, cfg, CPU, 1)

    assert not fits("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert not fits("No valid triton configs. OutOfMemoryError: ...")
    with pytest.raises(RuntimeError, match="device-side assert"):
        fits("device-side assert triggered")
    moments = []
    with pytest.MonkeyPatch.context() as m:  # what the first step will allocate is there while it is tried out
        m.setattr(torch, "empty", lambda n, device: moments.append(n))
        microbatch.fits_in_memory(model, model, cfg, CPU, 2)
    (adamw,) = optim.build(MasterWeights(model, cfg.weights == "bfloat16"), cfg, CPU)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))[1].backward()
    adamw.step()
    assert moments == [sum(t.numel() for s in adamw.state.values() for t in s.values() if t.dim())]


@pytest.mark.parametrize("there", [True, False])
def test_dry_run_plans_and_leaves_nothing(tiny_args, tmp_path, capsys, there):
    args = ["quickstart", *tiny_args, "--out-dir", tmp_path / "run", "--dry-run", "--gpu-hour-usd", "2.5"]
    train_gpt2.dry_run(parse_config(*args, *([] if there else ["--data-dir", "nowhere"])), CPU)
    out = capsys.readouterr().out
    assert "tokens/s" in out and "$" in out and "12 steps take" in out
    assert not (tmp_path / "run").exists()


def test_dry_run_on_two_ranks(tiny_args, tmp_path, run_ranks):
    out = tmp_path / "run"
    said = run_ranks(2, "train_gpt2.py", "quickstart", *tiny_args, "--dry-run", "--out-dir", out)
    assert "2 x 1 x 4 x 32" in said and said.count("12 steps take") == 1 and not out.exists()


def test_a_plan_says_what_would_be_in_vain(tiny_args, capsys):
    cfg = parse_config("quickstart", *tiny_args)
    data, step = train_gpt2.train_loader(cfg, cfg.data_dir), SimpleNamespace(cfg=cfg, rt=CPU, model=GPT(cfg.model), B=4)
    # of 8 sequences each; an epoch has 267, and a preset may need more than was pulled, as with --limit-shards
    for steps, epochs, many in ((12, 1, False), (33, 1, False), (50, 1, True), (50, 2, False), (200, 1, True)):
        step.cfg = dataclasses.replace(cfg, epochs=epochs)
        plan.describe(step, data, RunState(steps, ""))
        said = capsys.readouterr().out
        assert f"{steps * 8 / 267:.2f} epochs of this data" in said
        assert ("passes over this data" in said and "hub.py pull-data without --limit-shards" in said) == many
    step.cfg = dataclasses.replace(cfg, overfit_single_batch=True)
    plan.describe(step, data, RunState(200, ""))
    assert "passes" not in capsys.readouterr().out


def test_data_that_is_not_finished_is_not_trained_on_in_silence(tiny_args, tiny_data, capsys):
    source = {"name": "x", "subset": "", "column": "text", "revision": "1", "files": []}
    for complete in (True, False):
        shards.write_manifest(tiny_data, shards.Manifest(source, "npy", 100, complete=complete))
        train_gpt2.dry_run(parse_config("quickstart", *tiny_args, "--dry-run"), CPU)
        assert ("tiny is unfinished" in capsys.readouterr().out) != complete


@pytest.mark.parametrize("flags, saves", [("--save-every 5", 3), ("--save-every 5 --keep 1", 3), ("--save-every 0", 1)])
def test_a_disk_too_small_for_the_checkpoints_is_said_before_the_first_step(
    tiny_args, tmp_path, monkeypatch, flags, saves
):
    """By what the files turn out to be."""
    run = train_quickstart([*tiny_args, *flags.split()], tmp_path / "run")
    each = sum(p.stat().st_size for p in run.glob("*_00012.pt"))
    args = [*tiny_args, *flags.split()]
    for room, enough in ((saves * each, True), (saves * each * 0.8, False)):
        monkeypatch.setattr(plan.shutil, "disk_usage", lambda path, room=room: SimpleNamespace(free=room))
        if enough:
            train_quickstart(args, tmp_path / "fits")
        else:
            with pytest.raises(UserError, match=rf"^{saves} checkpoints of .* do not fit.*use --keep 2"):
                train_quickstart(args, tmp_path / "small")
            assert not list((tmp_path / "small").glob("*.pt"))
