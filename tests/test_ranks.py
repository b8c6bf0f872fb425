"""Ranks: how many there are does not show in the result, a run moves between their numbers, and an error names the rank
that failed or is lost."""

import itertools
import json
import os
import re
import shutil
import time
from dataclasses import replace
from functools import partial

import numpy as np
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
from processes import run_in_threads

import train_gpt2
from model import GPT
from system.cli import UserError
from tokens import shards
from training import checkpoint, plan, resume
from training.config import TrainConfig
from training.metrics import RunState
from training.step import TrainStep


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


def train_and_print_state() -> None:
    """The script of a rank: a run, after which each rank prints how many numbers its optimizers keep. A parameter's
    state has its shape; AdamW's counters of steps have none."""
    optimizers = []
    init = torch.optim.Optimizer.__init__

    def record(self, *args, **kwargs):
        optimizers.append(self)
        init(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = record
    train_gpt2.main()

    # A sharding optimizer has no state of its own, or shows that of the one inside, which is in the list as well.
    kept = {id(t): t.numel() for o in optimizers for state in o.state.values() for t in state.values() if t.dim()}
    print(json.dumps({"numbers": sum(kept.values())}))


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_zero_divides_the_optimizer_state(tiny_args, tmp_path, run_ranks, optimizer):
    """Together the ranks keep each number once. Whole parameters are dealt out, so a rank has half, or more where a
    parameter is itself a large part."""
    flags = ["quickstart", *tiny_args, "--optimizer", optimizer, "--max-steps", "1", "--val-every", "0"]

    def numbers_by_rank(world_size, *more):
        out = tmp_path / f"{world_size} ranks"
        output = run_ranks(world_size, train_and_print_state, *flags, *more, "--out-dir", out)
        return [json.loads(line)["numbers"] for line in output.splitlines() if line.startswith("{")]

    (total,) = numbers_by_rank(1)
    shares = numbers_by_rank(2, "--zero-stage", "1")
    assert len(shares) == 2 and sum(shares) == total > 0
    assert max(shares) < 0.75 * total


# ------------------------------------------------------------------------- everything on two ranks


def test_every_feature_works_on_two_ranks(tiny_args, tmp_path, run_ranks):
    """What one rank did alone would hang. 65 sequences of validation and 7 rows of HellaSwag do not divide evenly."""
    model = GPT(parse_config("quickstart", *tiny_args, "--model.vocab-size", "50304").model)
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    flags = [*tiny_args, "--model.vocab-size", "50304", "--init-from", tmp_path / "model_00000.pt"]
    flags += ["--val-tokens", "2080", "--hellaswag-every", "2", "--hellaswag-data", rows, "--sample-every", "2"]
    flags += ["--zero-stage", "1", "--overfit-single-batch", "--skip-bad-steps", "1"]
    flags += ["--max-steps", "2", "--save-every", "1", "--keep", "1"]

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


def compile_without_kernels() -> None:
    """A `prepare` for ranks whose torch.compile traces and differentiates a block, and runs that with torch's own
    kernels: nearly all of the time goes into compiling new ones."""
    torch.compile = partial(torch.compile, backend="aot_eager")


def test_a_compiled_run_ends_and_equals_eager(tiny_args, tmp_path, run_ranks):
    """As the slow test below, as small as it can be: one rank, one block, two steps, no validation, no new kernels,
    which test_head.py compiles."""
    short = ["--model.n-layer", "1", "--max-steps", "2", "--val-every", "0", "--save-every", "0"]
    eager = train_quickstart(tiny_args, tmp_path / "eager", *short)

    flags = [word for word in tiny_args if word not in ("--no-compile", "--dtype", "float32")]
    command = ["train_gpt2.py", "quickstart", *flags, *short, "--dtype", "bfloat16", "--out-dir", tmp_path / "run"]
    output = run_ranks(1, *command, prepare=compile_without_kernels)

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
    output = run_ranks(2, "train_gpt2.py", *flags, fails=True)

    assert "error: " in output and "tiny_train_000001.npy: token 200 is id 300" in output


# ------------------------------------------------------------------------- a rank that fails


def fill_the_disk_of_rank_0() -> None:
    """A `prepare` for ranks of which the first has no room for checkpoints."""
    plan.free_bytes = lambda folder: 10


def test_what_fails_on_one_rank_before_training_ends_all_at_once(tiny_args, tmp_path, run_ranks):
    """With the message of that rank, and a status that no crash of the others hides."""
    status = tmp_path / "status.json"
    flags = [*tiny_args, "--out-dir", tmp_path / "run"]
    start = time.monotonic()

    how = {"prepare": fill_the_disk_of_rank_0, "env": {"TRAIN_STATUS_FILE": str(status)}}
    output = run_ranks(2, "train_gpt2.py", "quickstart", *flags, fails=True, **how)

    assert re.search("error: .* do not fit on the disk", output), output
    assert json.loads(status.read_text())["status"] == "user_error"
    assert time.monotonic() - start < 20


# ------------------------------------------------------------------------- ranks that differ


def test_ranks_that_found_other_files_are_refused_by_name(tiny_args, tiny_data, tmp_path):
    """On two machines: another checkpoint, another length of the run, other shards, other HellaSwag rows."""
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    flags = [*tiny_args, "--hellaswag-every", "4", "--hellaswag-data"]
    fewer_rows = write_jsonl(tmp_path / "fewer.jsonl", make_hellaswag_rows(6))
    shutil.copytree(tiny_data, tmp_path / "copy")
    shutil.copytree(tiny_data, tmp_path / "other")
    shards.write_shard(tmp_path / "other" / "tiny_train_000001.npy", np.arange(50, dtype=np.uint16))

    def compare(*flags_of_ranks, steps=(None, None)):
        # tyro cannot parse in two threads at once.
        configs = [parse_config("quickstart", *flags) for flags in flags_of_ranks]

        def check(rt):
            cfg = configs[rt.rank]
            step = steps[rt.rank]
            data = train_gpt2.open_data(cfg)[0]
            run = RunState(cfg.total_steps(data.order.sequences_per_epoch), data.fingerprint())
            resume.check_ranks_agree(cfg, rt, step and {"step": step}, run, data)

        return run_in_threads(check, check)

    same = [*flags, rows]
    assert compare(same, [*same, "--data-dir", tmp_path / "copy"]) == [None, None]
    for results, message in (
        (compare(same, same, steps=(3, None)), "the checkpoint to resume from is step 3 on rank 0"),
        (compare(same, same, steps=(3, 6)), "but step 6 on rank 1"),
        (compare(same, [*same, "--max-steps", "13"]), "the number of steps is 12 on rank 0"),
        (compare(same, [*same, "--data-dir", tmp_path / "other"]), "the data is "),
        (compare(same, [*flags, fewer_rows]), "the HellaSwag file is"),
        (compare(same, [*flags, tmp_path / "missing"]), "but none on rank 1"),
    ):
        assert all(isinstance(result, UserError) and message in str(result) for result in results), (message, results)


def change_the_seed_of_rank_1() -> None:
    """A `prepare` for ranks of which the second was started with another --seed."""
    if os.environ["RANK"] == "1":
        parse = train_gpt2.parse
        train_gpt2.parse = lambda *args: replace(parse(*args), seed=7)


def test_a_run_compares_its_ranks_before_it_trains(tiny_args, tmp_path, run_ranks):
    """Averaged over two seeds, the run would end with success: nothing else notices."""
    status = tmp_path / "status.json"
    flags = [*tiny_args, "--out-dir", tmp_path / "run"]
    how = {"fails": True, "prepare": change_the_seed_of_rank_1, "env": {"TRAIN_STATUS_FILE": str(status)}}
    output = run_ranks(2, "train_gpt2.py", "quickstart", *flags, **how)

    assert "--seed is 1337 on rank 0" in output
    assert json.loads(status.read_text())["status"] == "user_error"  # which nothing restarts
    assert not (tmp_path / "run").exists()


def change_a_weight_of_rank_1() -> None:
    """A `prepare` for ranks of which the second computes one number wrongly, by one bit, in its fifth update."""
    if os.environ["RANK"] == "0":
        return
    update, calls = TrainStep.update, itertools.count(1)

    def update_with_an_error(train_step):
        update(train_step)
        if next(calls) == 5:
            weight = train_step.weights.named["transformer.wte.weight"].data
            weight[9, 9] = torch.nextafter(weight[9, 9], torch.tensor(1.0))

    TrainStep.update = update_with_an_error


def test_ranks_that_drift_apart_end_the_run_and_the_newest_checkpoint_stays(tiny_args, tmp_path, run_ranks):
    run, status = tmp_path / "run", tmp_path / "status.json"
    command = [2, "train_gpt2.py", "quickstart", *tiny_args, "--out-dir", run, "--resume", "auto"]

    env = {"TRAIN_STATUS_FILE": str(status)}
    output = run_ranks(*command, prepare=change_a_weight_of_rank_1, fails=True, env=env)

    # The ranks agreed at step 3, and not at step 6.
    assert re.search(r"weights.* 1 \(", output), output
    assert json.loads(status.read_text())["status"] == "user_error"  # unlike cards would drift apart again
    assert checkpoint.complete_steps(run) == [3]

    # The same command continues from there.
    run_ranks(*command)
    assert_curves_close(load_curve(run), load_curve(train_quickstart(tiny_args, tmp_path / "undisturbed")))
