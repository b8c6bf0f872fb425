"""Ranks: how many there are is invisible, a run moves between their numbers, and one that fails or is lost is named."""

import dataclasses
import datetime
import json
import os
import shutil

import processes
import pytest
import torch
from helpers import (
    assert_curves_close,
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
from training import checkpoint, evaluator, optim, resume, schedule
from training.master_weights import MasterWeights
from training.run_state import RunState


def test_world_size_and_micro_batch_are_invisible(tiny_args, tmp_path, run_ranks):
    one = load_curve(train_quickstart(tiny_args, tmp_path / "one"))
    assert_curves_close(load_curve(train_quickstart(tiny_args, tmp_path / "micro", "--micro-batch-size", "2")), one)
    run_ranks(2, "train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "two")
    assert_curves_close(load_curve(tmp_path / "two"), one)


SPRINT = "--weights bfloat16 --optimizer normuon --model.value-tables 1 --model.no-tied-head".split()


@pytest.mark.parametrize("recipe", [[], SPRINT], ids=["plain", "sprint"])
def test_a_run_moves_between_world_sizes_and_zero_stages(tiny_args, tmp_path, run_ranks, recipe):
    """From 1 rank to 2, 4 and 2 again, ZeRO-1 on, off and on; a time limit ends all but the last after a step."""
    tiny_args = [*tiny_args, *recipe]
    one, moved = train_quickstart(tiny_args, tmp_path / "one"), tmp_path / "moved"
    shutil.copytree(one, moved)
    delete_checkpoints_after(moved, 3)
    flags = ["quickstart", *tiny_args, "--micro-batch-size", "2", "--out-dir", moved, "--resume", "auto"]
    for n, stage, limit, step in ((2, 1, "0.001", 4), (4, 0, "0.001", 5), (2, 1, "1h", 12)):
        said = run_ranks(n, "train_gpt2.py", *flags, "--zero-stage", stage, "--time-limit", limit)
        assert checkpoint.latest_step(moved) == step and ("stopped by the time limit" in said) == (step < 12)
    rounding = 3e-2 if recipe else 2e-4  # gradients are rounded, too
    assert_curves_close(load_curve(moved), load_curve(one), rounding)


def share():
    """In each rank: which share of the optimizer state it keeps, and that what is saved is what torch would save."""
    with distributed.session("cpu") as rt:
        for name in ("adamw", "muon", "normuon"):
            size = ["--model.n-layer", "8", "--model.n-embd", "32", "--model.vocab-size", "512"]
            cfg = parse_config(
                "quickstart", *size, "--optimizer", name, "--zero-stage", "1", "--muon-momentum-warmup", "2"
            )
            model = GPT(cfg.model)
            optimizers = optim.build(MasterWeights(model, cfg.weights == "bfloat16"), cfg, rt)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            schedule.set_learning_rates(optimizers, 1, 10, cfg)
            for o in optimizers:
                o.step()
                momentum = o.optim.param_groups[0].get("momentum", 0.9)  # AdamW has none
                assert momentum == pytest.approx(0.9), "ZeRO-1 kept the momentum from the optimizer inside"
            sizes = [[optim.state_size(o, p) for g in o.param_groups for p in g["params"]] for o in optimizers]
            held = [t for o in optimizers for s in o.optim.state.values() for t in s.values()]
            shares = rt.all_gather(torch.tensor([sum(t.numel() for t in held if t.dim()) / sum(map(sum, sizes))]))
            saved = optim.full_state(optimizers, rt)
            for i, o in enumerate(optimizers):
                o.consolidate_state_dict()  # torch's own way
                if rt.is_main:
                    wanted = o.state_dict()
                    assert saved[i]["param_groups"] == wanted["param_groups"]
                    assert saved[i]["state"].keys() == wanted["state"].keys()
                    assert all(same_bits(state, saved[i]["state"][k]) for k, state in wanted["state"].items())
            bound = 1 / rt.world_size + sum(map(max, sizes)) / sum(map(sum, sizes))
            cli.print0(json.dumps({"shares": [s.item() for s in shares], "bound": bound}))


@pytest.mark.parametrize("n", [2, 4])
def test_zero_divides_the_optimizer_state(run_ranks, n):
    """Together the ranks keep each element of state once. Whole parameters are dealt out, the largest first: so a rank
    has 1/N, or more where a parameter is itself a large part, as Adam's embedding is of what Muon leaves to Adam."""
    said = run_ranks(n, share)
    adamw, *muons = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    for found in (adamw, *muons):
        assert len(found["shares"]) == n and sum(found["shares"]) == pytest.approx(1)
        assert max(found["shares"]) <= found["bound"], found
    assert adamw["shares"] == pytest.approx([1 / n] * n, rel=0.05)


def test_every_feature_on_two_ranks(tiny_args, tmp_path, run_ranks):
    """Under a time limit: what one rank did alone would hang. 65 windows and 7 rows do not divide."""
    model = GPT(parse_config("quickstart", *tiny_args, "--model.vocab-size", "50304").model)
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    run = [*tiny_args, "--model.vocab-size", "50304", "--init-from", tmp_path / "model_00000.pt"]
    run += ["--val-tokens", "2080", "--hellaswag-every", "2", "--hellaswag-data", rows, "--sample-every", "2"]
    run += ["--zero-stage", "1", "--overfit-single-batch", "--skip-bad-steps", "1", "--max-steps", "4", "--keep", "1"]
    one, two = train_quickstart(run, tmp_path / "one"), tmp_path / "two"
    said = run_ranks(2, "train_gpt2.py", "quickstart", *run, "--out-dir", two)
    assert_curves_close(load_curve(two), load_curve(one))
    scores = [[line.get("hellaswag_acc") for line in load_metrics(run)] for run in (one, two)]
    assert scores[0] == scores[1]
    assert "sample 3:" in said and "hellaswag acc" in said


def test_eval_only_says_what_the_run_said_and_leaves_nothing(tiny_args, tmp_path, run_ranks, expect_failure):
    run = train_quickstart(
        tiny_args, tmp_path / "run", "--val-tokens", "1376"
    )  # 43 windows: even neither by 2 ranks nor by 4
    flags = ["quickstart", *tiny_args, "--val-tokens", "1376", "--init-from", run, "--eval-only"]
    before = sorted(tmp_path.rglob("*"))
    said = run_ranks(2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "other")
    assert f"{run} on 1,376 tokens" in said and f"val loss: {load_curve(run)[12][1]:.4f}" in said, said
    assert sorted(tmp_path.rglob("*")) == before
    expect_failure("train_gpt2.py", "quickstart", *tiny_args, "--eval-only", mentions=["--init-from gpt2"])


@pytest.mark.parametrize("n", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_compiled_run_ends_equals_eager_and_repeats_bit_for_bit(tiny_args, tmp_path, run_ranks, n):
    """Autocast to bfloat16, and compiled for the first time: the compiler's pools of threads, which never end, must not
    keep a rank alive. Other processes go on from step 3."""
    eager = train_quickstart(tiny_args, tmp_path / "eager", "--max-steps", "1")
    run = [a for a in tiny_args if a not in ("--no-compile", "--dtype", "float32")]
    run += ["--dtype", "bfloat16", "--recompute", "--zero-stage", "1", "--max-steps", "6", "--resume", "auto"]
    env, whole, parts = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, tmp_path / "whole", tmp_path / "parts"
    said = run_ranks(n, "train_gpt2.py", "quickstart", *run, "--out-dir", whole, env=env)
    assert "the first step compiles" in said and "done: 6 steps" in said
    shutil.copytree(whole, parts)
    delete_checkpoints_after(parts, 3)
    run_ranks(n, "train_gpt2.py", "quickstart", *run, "--out-dir", parts, env=env)
    assert load_curve(parts) == load_curve(whole)
    assert same_bits(load_weights(parts, 6), load_weights(whole, 6))
    assert load_curve(whole)[0][1] == pytest.approx(load_curve(eager)[0][1], rel=1e-3)


# ------------------------------------------------------------------------- what can be wrong with them


def test_an_error_on_one_rank_ends_the_other_and_is_said(tiny_args, tiny_data, tmp_path, run_ranks):
    path = tiny_data / "tiny_train_000001.npy"
    tokens = shards.read_shard(path).copy()
    tokens[200] = 300  # in window 6, which the second rank reads
    shards.write_shard(path, tokens)
    flags = ["quickstart", *tiny_args, "--no-shuffle", "--val-every", "0", "--out-dir", tmp_path / "out"]
    said = run_ranks(2, "train_gpt2.py", *flags, fails=True, prepare=shorten_sleeps)
    assert "tiny_train_000001.npy: token 200 is id 300" in said and "rank 0 lost another rank" in said


def out_of_memory_in_the_second_validation():
    """On rank 1, in its third batch of four; and short waits."""
    shorten_sleeps()
    real, calls = evaluator.to_device, []

    def later(*args):
        calls.append(1)
        if os.environ["RANK"] == "1" and len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*args)

    evaluator.to_device = later


def test_an_evaluation_that_fails_on_one_rank_loses_no_step(tiny_args, tmp_path, run_ranks):
    """The ranks agree on the failure and save, though no save was due; resumed, the run comes to the same bits."""
    flags = ["quickstart", *tiny_args, "--save-every", "100", "--val-every", "5", "--zero-stage", "1"]
    run_ranks(2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "whole")
    ranks = processes.start_ranks(
        2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "run", log=tmp_path / "said",
        prepare=out_of_memory_in_the_second_validation,
    )  # fmt: skip
    main, other = (rank.wait() for rank in ranks)
    assert main.exit_code == 1 and "failed on another rank; all before it is saved" in main.output
    assert "error: " not in main.output  # or train.sh would not start it again
    assert other.exit_code == 1 and "OutOfMemoryError: CUDA out of memory" in other.output
    assert checkpoint.complete_steps(tmp_path / "run") == [5]
    said = run_ranks(2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "run", "--resume", "auto")
    assert "going on without it" in said
    assert same_bits(load_weights(tmp_path / "run"), load_weights(tmp_path / "whole"))


def impatient():
    distributed.timedelta = lambda **_: datetime.timedelta(seconds=2)


def join():
    with distributed.session("cpu"):
        pass


def test_a_missing_rank_is_named(start_script):
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun's agent
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    rank = start_script(join, env=env, prepare=impatient).wait(20)
    assert rank.exit_code == 1 and "rank 0 could not join the 2 ranks" in rank.output
    assert "no sign of rank 1 for 2 seconds" in rank.output and "Traceback" not in rank.output


def test_ranks_without_torchrun_are_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2 but RANK, .* not set; start with torchrun"):
        with distributed.session("cpu"):
            pass


def test_machines_that_would_not_survive_a_restart_are_told_so_at_the_start(monkeypatch):
    known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        with distributed.session("cpu"):
            pass


def test_ranks_that_see_different_runs_are_told_so():
    def differ(change):
        other = torch.tensor([3, 12, 0xABC])
        return dataclasses.make_dataclass("Two", ["device", "gather"])(
            torch.device("cpu"), lambda t: [t, other + change]
        )

    saved, run = {"step": 3}, RunState(12, "abc")
    resume.check_ranks(differ(torch.tensor([0, 0, 0])), saved, run)
    for i, what in enumerate(("checkpoint", "max-steps", "data")):
        with pytest.raises(UserError, match=f"rank 1 and rank 0 differ in {what}.*same --out-dir"):
            resume.check_ranks(differ(torch.eye(3, dtype=torch.int64)[i]), saved, run)


def test_a_run_compares_its_ranks_before_it_trains(tiny_args, tmp_path, monkeypatch):
    def differ(rt, saved, run):
        raise UserError(f"{run.max_steps} steps, {saved}, {run.data_id == shards.fingerprint(tiny_args[-1]) + '-3'}")

    monkeypatch.setattr(resume, "check_ranks", differ)
    with pytest.raises(UserError, match="12 steps, None, True"):
        train_quickstart(tiny_args, tmp_path / "run")
    assert not (tmp_path / "run").exists()
