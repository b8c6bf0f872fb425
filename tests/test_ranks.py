"""Ranks: how many there are does not show in the result, a run moves between their numbers, and an error names the rank
that failed or is lost."""

import datetime
import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    assert_curves_close,
    choices,
    delete_checkpoints_after,
    load_curve,
    load_metrics,
    load_weights,
    make_hellaswag_rows,
    parse_config,
    same_bits,
    train_quickstart,
    write_jsonl,
)
from processes import shorten_sleeps

from model import GPT
from system import cli, distributed
from system.cli import UserError
from tokens import shards
from training import checkpoint, optim, resume, schedule
from training.config import TrainConfig
from training.master_weights import MasterWeights
from training.run_state import RunState


def test_world_size_and_micro_batch_do_not_change_the_curve(tiny_args, tmp_path, run_ranks):
    one = load_curve(train_quickstart(tiny_args, tmp_path / "one"))

    small_batches = load_curve(train_quickstart(tiny_args, tmp_path / "small", "--micro-batch-size", "2"))
    run_ranks(2, "train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "two")

    assert_curves_close(small_batches, one)
    assert_curves_close(load_curve(tmp_path / "two"), one)


# Muon, bfloat16 weights and an untied head: two optimizers, both sharded, and float32 master weights.
RECORD = "--weights bfloat16 --optimizer muon --model.no-tied-head".split()


@pytest.mark.parametrize("recipe, rounding", [([], 2e-4), (RECORD, 3e-2)], ids=["adamw", "muon"])
def test_a_run_moves_between_world_sizes_and_zero_stages(tiny_args, tmp_path, run_ranks, recipe, rounding):
    """From 1 rank to 2, 4 and 2 again, ZeRO-1 on, off and on; a time limit ends all but the last after a step.
    `rounding`: bfloat16 rounds the gradients, too, of which each rank has another part."""
    flags = [*tiny_args, *recipe]
    one, moved = train_quickstart(flags, tmp_path / "one"), tmp_path / "moved"
    shutil.copytree(one, moved)
    delete_checkpoints_after(moved, 3)

    command = ["train_gpt2.py", "quickstart", *flags, "--micro-batch-size", "2", "--out-dir", moved, "--resume", "auto"]
    for world_size, zero_stage, time_limit, saved_step in ((2, 1, "0.001", 4), (4, 0, "0.001", 5), (2, 1, "1h", 12)):
        output = run_ranks(world_size, *command, "--zero-stage", zero_stage, "--time-limit", time_limit)
        assert checkpoint.latest_step(moved) == saved_step
        assert ("stopped by the time limit" in output) == (saved_step < 12)

    assert_curves_close(load_curve(moved), load_curve(one), rounding)


# ------------------------------------------------------------------------- ZeRO-1


def print_shares_of_optimizer_state() -> None:
    """The script of a rank: for each optimizer, rank 0 prints which share of its state each rank keeps, as a line of
    JSON. On the way it compares what is saved with what torch's own consolidate_state_dict returns."""
    with distributed.session("cpu") as rt:
        for name in choices(TrainConfig, "optimizer"):
            # A model of random gradients, and one update of it.
            size = ["--model.n-layer", "8", "--model.n-embd", "32", "--model.vocab-size", "512"]
            cfg = parse_config("quickstart", *size, "--optimizer", name, "--zero-stage", "1")
            model = GPT(cfg.model)
            optimizers = optim.build_optimizers(MasterWeights(model, keep_float32_copy=False).named, cfg, rt)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            schedule.set_learning_rates(optimizers, step=1, total_steps=10, cfg=cfg)
            for optimizer in optimizers:
                optimizer.step()

            # How many numbers of state this rank has, of how many: those in the shape of a parameter, without AdamW's
            # counters of steps.
            held, sizes = 0, []
            for optimizer in optimizers:
                inner = optim.unwrap(optimizer)
                held += sum(t.numel() for state in inner.state.values() for t in state.values() if t.dim())
                shapes = [optim.state_shapes(type(inner), p).values() for p in optim.all_params(optimizer)]
                sizes.append([sum(math.prod(shape) for shape in found if shape) for found in shapes])
            total = sum(map(sum, sizes))
            shares = rt.all_gather(torch.tensor([held / total]))

            # What is saved is what torch would save.
            saved = optim.full_state(optimizers, rt)
            for i, optimizer in enumerate(optimizers):
                optimizer.consolidate_state_dict()
                if rt.is_main:
                    expected = optimizer.state_dict()
                    assert saved[i]["param_groups"] == expected["param_groups"]
                    assert saved[i]["state"].keys() == expected["state"].keys()
                    assert all(same_bits(state, saved[i]["state"][k]) for k, state in expected["state"].items())

            # Dealing out whole parameters, a rank has at most 1/N and one parameter more of each optimizer.
            bound = 1 / rt.world_size + sum(map(max, sizes)) / total
            cli.print0(json.dumps({"shares": [share.item() for share in shares], "bound": bound}))


def test_zero_divides_the_optimizer_state(run_ranks):
    """Together the ranks keep each element of state once. Whole parameters are dealt out, the largest first: so a rank
    has 1/N, or more where a parameter is itself a large part, as Adam's embedding is of what Muon leaves to Adam."""
    output = run_ranks(4, print_shares_of_optimizer_state)

    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    by_optimizer = dict(zip(choices(TrainConfig, "optimizer"), lines, strict=True))
    for found in by_optimizer.values():
        assert len(found["shares"]) == 4
        assert sum(found["shares"]) == pytest.approx(1)
        assert max(found["shares"]) <= found["bound"], found
    assert by_optimizer["adamw"]["shares"] == pytest.approx([1 / 4] * 4, rel=0.05)


# ------------------------------------------------------------------------- everything on two ranks


def test_every_feature_works_on_two_ranks(tiny_args, tmp_path, run_ranks):
    """What one rank did alone would hang. 65 sequences of validation and 7 rows of HellaSwag do not divide evenly."""
    model = GPT(parse_config("quickstart", *tiny_args, "--model.vocab-size", "50304").model)
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    flags = [*tiny_args, "--model.vocab-size", "50304", "--init-from", tmp_path / "model_00000.pt"]
    flags += ["--val-tokens", "2080", "--hellaswag-every", "2", "--hellaswag-data", rows, "--sample-every", "2"]
    flags += ["--zero-stage", "1", "--overfit-single-batch", "--skip-bad-steps", "1", "--max-steps", "4", "--keep", "1"]

    one = train_quickstart(flags, tmp_path / "one")
    output = run_ranks(2, "train_gpt2.py", "quickstart", *flags, "--out-dir", tmp_path / "two")

    assert_curves_close(load_curve(tmp_path / "two"), load_curve(one))
    one_scores, two_scores = ([m.get("hellaswag_acc") for m in load_metrics(tmp_path / run)] for run in ("one", "two"))
    assert one_scores == two_scores and one_scores[0] is not None
    assert "sample 3:" in output
    assert "hellaswag acc" in output


def test_eval_only_prints_what_the_run_printed_and_leaves_nothing(tiny_args, tmp_path, run_ranks, expect_failure):
    # 43 sequences, which divide evenly neither by 2 ranks nor by 4 sequences a batch.
    flags = [*tiny_args, "--val-tokens", "1376"]
    run = train_quickstart(flags, tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))

    command = ["train_gpt2.py", "quickstart", *flags, "--init-from", run, "--eval-only"]
    output = run_ranks(2, *command, "--out-dir", tmp_path / "other")

    assert f"{run} on 1,376 tokens" in output, output
    assert f"val loss: {load_curve(run)[12][1]:.4f}" in output, output
    assert sorted(tmp_path.rglob("*")) == before
    expect_failure("train_gpt2.py", "quickstart", *tiny_args, "--eval-only", mentions=["--init-from gpt2"])


def test_a_compiled_run_ends_and_equals_eager(tiny_args, tmp_path, run_ranks):
    """As the slow test below, as small as it can be: one rank, one block, two steps, no validation."""
    short = ["--model.n-layer", "1", "--max-steps", "2", "--val-every", "0", "--save-every", "0"]
    eager = train_quickstart(tiny_args, tmp_path / "eager", *short)

    flags = [word for word in tiny_args if word not in ("--no-compile", "--dtype", "float32")]
    command = ["train_gpt2.py", "quickstart", *flags, *short, "--dtype", "bfloat16", "--out-dir", tmp_path / "run"]
    output = run_ranks(1, *command, env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})

    assert "the first step compiles" in output
    assert "done: 2 steps" in output
    assert load_curve(tmp_path / "run")[1][0] == pytest.approx(load_curve(eager)[1][0], rel=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 1])
def test_a_compiled_run_ends_and_equals_eager_and_repeats_bit_for_bit(tiny_args, tmp_path, run_ranks, world_size):
    """Autocast to bfloat16, and compiled for the first time: the compiler's pools of threads, which never end, must not
    keep a rank alive. Other processes resume from step 2."""
    eager = train_quickstart(tiny_args, tmp_path / "eager", "--model.n-layer", "1", "--max-steps", "1")
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"

    # One block, few steps: compiling is what takes the time. The slow variant also recomputes.
    flags = [word for word in tiny_args if word not in ("--no-compile", "--dtype", "float32")]
    flags += ["--dtype", "bfloat16", "--zero-stage", "1", "--resume", "auto"]
    flags += ["--model.n-layer", "1", "--max-steps", "4", "--save-every", "2"]
    if world_size == 1:
        flags += ["--recompute"]
    command = [world_size, "train_gpt2.py", "quickstart", *flags, "--out-dir"]
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    output = run_ranks(*command, undisturbed, env=env)
    assert "the first step compiles" in output
    assert "done: 4 steps" in output

    shutil.copytree(undisturbed, resumed)
    delete_checkpoints_after(resumed, 2)
    run_ranks(*command, resumed, env=env)

    assert load_curve(resumed) == load_curve(undisturbed)
    assert same_bits(load_weights(resumed, 4), load_weights(undisturbed, 4))
    assert load_curve(undisturbed)[0][1] == pytest.approx(load_curve(eager)[0][1], rel=1e-3)


# ------------------------------------------------------------------------- what can be wrong with them


def test_an_error_on_one_rank_ends_the_other_and_is_printed(tiny_args, tiny_data, tmp_path, run_ranks):
    # A token that is not in the vocabulary, in sequence 6, which the second rank reads.
    path = tiny_data / "tiny_train_000001.npy"
    tokens = shards.read_shard(path).copy()
    tokens[200] = 300
    shards.write_shard(path, tokens)

    flags = ["quickstart", *tiny_args, "--no-shuffle", "--val-every", "0", "--out-dir", tmp_path / "out"]
    output = run_ranks(2, "train_gpt2.py", *flags, fails=True, prepare=shorten_sleeps)

    assert "tiny_train_000001.npy: token 200 is id 300" in output
    assert "rank 0 lost another rank" in output


def shorten_timeouts() -> None:
    """A `prepare` for a rank that waits two seconds for the others, instead of a minute."""
    distributed.timedelta = lambda **_: datetime.timedelta(seconds=2)


def join_the_group() -> None:
    """The script of a rank that joins the group of ranks and leaves it."""
    with distributed.session("cpu"):
        pass


def test_a_missing_rank_is_named(start_script):
    # The store of torchrun's agent, where only rank 0 of two will report.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}

    rank = start_script(join_the_group, env=env, prepare=shorten_timeouts).wait(20)

    assert rank.exit_code == 1
    assert "rank 0 could not join the 2 ranks" in rank.output
    assert "no sign of rank 1 for 2 seconds" in rank.output
    assert "Traceback" not in rank.output


def test_ranks_started_without_torchrun_name_the_missing_variables(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(UserError, match=r"WORLD_SIZE=2 but RANK, .* not set; start with torchrun"):
        join_the_group()


def test_machines_that_would_not_survive_a_restart_are_refused_at_the_start(monkeypatch):
    """One of two machines: LOCAL_WORLD_SIZE is smaller than WORLD_SIZE."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(UserError, match="every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join_the_group()


def test_ranks_that_see_different_runs_are_refused():
    # Rank 0's run: 12 steps, data of fingerprint abc, resumed at step 3. The other sees [step, max-steps, data].
    saved, run = {"step": 3}, RunState(12, "abc")

    def compare_with(other):
        rt = SimpleNamespace(device=torch.device("cpu"), all_gather=lambda own: [own, torch.tensor(other)])
        resume.check_ranks_agree(rt, saved, run)

    compare_with([3, 12, 0xABC])
    for other, name in (([4, 12, 0xABC], "checkpoint"), ([3, 13, 0xABC], "max-steps"), ([3, 12, 0xABD], "data")):
        with pytest.raises(UserError, match=f"rank 1 and rank 0 differ in {name}.*same --out-dir"):
            compare_with(other)


def test_a_run_compares_its_ranks_before_it_trains(tiny_args, tmp_path, monkeypatch):
    def refuse(rt, saved, run):
        has_fingerprint = run.data_id == shards.fingerprint(tiny_args[-1]) + "-3"
        raise UserError(f"{run.max_steps} steps, {saved}, {has_fingerprint}")

    monkeypatch.setattr(resume, "check_ranks_agree", refuse)

    with pytest.raises(UserError, match="12 steps, None, True"):
        train_quickstart(tiny_args, tmp_path / "run")
    assert not (tmp_path / "run").exists()
