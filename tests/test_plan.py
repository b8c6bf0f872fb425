"""The plan before a run: the micro-batch that fits, steps, data, disk, time and money; --dry-run leaves no files."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, choices, parse_config, train_quickstart

import train_gpt2
from model import GPT
from system.cli import UserError
from system.distributed import Runtime
from tokens import shards
from training import microbatch, optim, plan, step
from training.config import TrainConfig
from training.run_state import RunState
from training.step import TrainStep


class LimitedForward(torch.nn.Module):
    """The forward pass of a model, on a GPU whose memory takes up to `limit` sequences. It stands in for DDP's, too."""

    def __init__(self, model, limit):
        super().__init__()
        self.model = model
        self.limit = limit
        self.tried = []  # sequences of each call

    def forward(self, idx, targets):
        self.tried.append(len(idx))
        _, loss = self.model(idx, targets)
        if len(idx) > self.limit:
            loss.backward()  # the backward pass has begun when memory runs out
            raise torch.OutOfMemoryError("CUDA out of memory")
        return None, loss


class RuntimeWithSmallerRank(Runtime):
    """One of two ranks; on the other one only two sequences fit."""

    def all_reduce(self, tensor, op="sum"):
        assert op == "min"
        return tensor.clamp(max=2)


def test_auto_tries_divisors_of_at_most_half_the_one_before():
    assert microbatch.halving_candidates(60) == [60, 30, 15, 6, 3, 1]
    assert microbatch.halving_candidates(512) == [64, 32, 16, 8, 4, 2, 1]


def test_auto_takes_the_first_micro_batch_that_fits(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    forward = LimitedForward(GPT(cfg.model), limit=5)
    random_state = torch.get_rng_state()

    assert microbatch.largest_that_fits(forward, cfg, CPU, [60, 30, 15, 6, 3, 1]) == 3

    # The one that fits runs twice: a second micro-step has the gradients of the first in memory.
    assert forward.tried == [60, 30, 15, 6, 3, 3]
    assert all(p.grad is None for p in forward.parameters())
    assert torch.equal(random_state, torch.get_rng_state())


def test_auto_takes_what_fits_on_every_rank(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    forward = LimitedForward(GPT(cfg.model), limit=5)
    rt = RuntimeWithSmallerRank(CPU.device, CPU.dtype)
    assert microbatch.largest_that_fits(forward, cfg, rt, [6, 3, 1]) == 2


def test_a_model_that_does_not_fit_at_all_is_told_what_helps(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    forward = LimitedForward(GPT(cfg.model), limit=0)
    with pytest.raises(UserError, match=r"out of memory with 1 sequence\(s\) of 32 tokens per rank; use --recompute"):
        microbatch.largest_that_fits(forward, cfg, CPU, [6, 3, 1])


def test_a_batch_that_does_not_split_over_the_ranks_is_refused(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    three_ranks = dataclasses.replace(CPU, world_size=3)
    with pytest.raises(UserError, match=r"8 sequences of 32, which do not split evenly over 3 ranks; use .* 288"):
        microbatch.choose_micro_batch_size(cfg, three_ranks, GPT(cfg.model))


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused(tiny_args):
    cfg = parse_config("quickstart", *tiny_args, "--micro-batch-size", "3")
    with pytest.raises(UserError, match=r"--micro-batch-size 3 does not divide the 8 sequences .* use .*-size 4"):
        microbatch.choose_micro_batch_size(cfg, CPU, GPT(cfg.model))


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_a_micro_batch_that_surely_fits(preset, B):
    assert microbatch.choose_micro_batch_size(parse_config(preset), CPU, forward=None) == B


class FailingForward(torch.nn.Module):
    def __init__(self, message):
        super().__init__()
        self.message = message

    def forward(self, idx, targets):
        raise RuntimeError(self.message)


def test_only_a_lack_of_memory_is_taken_for_one(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    for message in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "No valid triton configs. OutOfMemoryError: ...",
    ):
        assert not microbatch.fits_in_memory(FailingForward(message), cfg, CPU, 1)
    with pytest.raises(RuntimeError, match="device-side assert"):
        microbatch.fits_in_memory(FailingForward("device-side assert triggered"), cfg, CPU, 1)


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_the_optimizer_state_is_in_memory_while_the_micro_batch_is_tried(tiny_args, monkeypatch, optimizer):
    """All of it, as large as after a step, so that the first step needs no more memory than was tried out."""
    cfg = parse_config("quickstart", *tiny_args, "--optimizer", optimizer)
    built = []  # the optimizers, known here before TrainStep has them
    numbers_while_tried = []

    def build_optimizers(*args, real=optim.build_optimizers):
        built.extend(real(*args))
        return built

    def choose_micro_batch_size(cfg, rt, forward):
        numbers_while_tried.append(count_numbers(built))
        return 4

    def count_numbers(optimizers):
        return sum(t.numel() for o in optimizers for tensors in o.state.values() for t in tensors.values())

    monkeypatch.setattr(optim, "build_optimizers", build_optimizers)
    monkeypatch.setattr(step, "choose_micro_batch_size", choose_micro_batch_size)
    train_step = TrainStep(cfg, CPU, GPT(cfg.model))
    train_step.compute_gradients(torch.zeros(2, 4, cfg.sequence_length + 1, dtype=torch.uint16))
    train_step.update()

    assert numbers_while_tried == [count_numbers(train_step.optimizers)]
    assert numbers_while_tried[0] >= train_step.model.num_params()


@pytest.mark.parametrize("data_flags", [[], ["--data-dir", "nowhere"]], ids=["with data", "without data"])
def test_a_dry_run_prints_the_plan_and_leaves_no_files(tiny_args, tmp_path, capsys, data_flags):
    flags = [*tiny_args, *data_flags, "--out-dir", tmp_path / "run", "--dry-run", "--gpu-hour-usd", "2.5"]
    train_gpt2.dry_run(parse_config("quickstart", *flags), CPU)
    out = capsys.readouterr().out
    assert "tokens/s" in out and "$" in out and "12 steps take" in out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_on_two_ranks_prints_one_plan(tiny_args, tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    out = run_ranks(2, "train_gpt2.py", "quickstart", *tiny_args, "--dry-run", "--out-dir", run_dir)
    assert "2 x 1 x 4 x 32" in out and out.count("12 steps take") == 1
    assert not run_dir.exists()


def print_plan_of(cfg, steps):
    """Print the plan of a run of so many steps, with as much of a TrainStep as the plan reads."""
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=GPT(cfg.model), micro_batch_size=4)
    plan.print_plan(train_step, train_gpt2.train_loader(cfg, cfg.data_dir), RunState(steps, ""))


@pytest.mark.parametrize("steps, epochs, warns", [
    (12, 1, False), (33, 1, False), (50, 1, True), (50, 2, False), (200, 1, True),
])  # fmt: skip
def test_more_passes_over_the_data_than_asked_for_are_warned_of(tiny_args, capsys, steps, epochs, warns):
    """A step has 8 sequences, the data 267. A preset may need more data than was pulled, as with --limit-shards."""
    print_plan_of(parse_config("quickstart", *tiny_args, "--epochs", epochs), steps)
    out = capsys.readouterr().out
    assert f"{steps * 8 / 267:.2f} epochs of this data" in out
    assert ("passes over this data" in out) == warns
    assert ("hub.py pull-data without --limit-shards" in out) == warns


def test_many_passes_over_a_single_batch_are_not_warned_of(tiny_args, capsys):
    print_plan_of(parse_config("quickstart", *tiny_args, "--overfit-single-batch"), 200)
    assert "passes over this data" not in capsys.readouterr().out


@pytest.mark.parametrize("complete", [True, False])
def test_unfinished_data_are_warned_of(tiny_args, tiny_data, capsys, complete):
    source = {"name": "x", "subset": "", "column": "text", "revision": "1", "files": []}
    shards.write_manifest(tiny_data, shards.Manifest(source, "npy", 100, complete=complete))
    train_gpt2.dry_run(parse_config("quickstart", *tiny_args, "--dry-run"), CPU)
    assert ("tiny is unfinished" in capsys.readouterr().out) != complete


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
@pytest.mark.parametrize("flags, saves", [("--save-every 5", 3), ("--save-every 5 --keep 1", 3), ("--save-every 0", 1)])
def test_a_disk_too_small_for_the_checkpoints_is_refused_before_the_first_step(
    tiny_args, tmp_path, monkeypatch, flags, saves, optimizer
):
    """The size that is predicted is compared with that of the files of a run."""
    flags = [*tiny_args, *flags.split(), "--optimizer", optimizer]
    run = train_quickstart(flags, tmp_path / "run")
    bytes_per_save = sum(path.stat().st_size for path in run.glob("*_00012.pt"))

    def set_free_bytes(free):
        monkeypatch.setattr("system.disk.shutil.disk_usage", lambda path: SimpleNamespace(free=free))

    set_free_bytes(saves * bytes_per_save)
    train_quickstart(flags, tmp_path / "fits")

    set_free_bytes(saves * bytes_per_save * 0.8)
    with pytest.raises(UserError, match=rf"^{saves} checkpoints of .* do not fit.*use --keep 2"):
        train_quickstart(flags, tmp_path / "does_not_fit")
    assert not list((tmp_path / "does_not_fit").glob("*.pt"))
