"""Ranks: how many there are does not show in the result, a run moves between their numbers, and one that differs ends
all of them. test_distributed.py and test_cli.py have one that fails."""

import copy
import itertools
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    CPU,
    assert_curves_close,
    delete_checkpoints_after,
    err_in_update_5,
    load_curve,
    load_metrics,
    make_hellaswag_rows,
    parse_config,
    same_bits,
    same_weights,
    write_jsonl,
    write_model,
    write_slowly,
)

import train_gpt2
from checkpoints import checkpoint
from checkpoints.run_folder import complete_steps, latest_step, model_path
from lifecycle import open_run
from lifecycle.build import build_trainer
from lifecycle.stop import StopRequest
from model import GPT, Block
from system import distributed
from system.distributed import Runtime
from system.facts import compare
from training import optim
from training.step import Trainer

# ------------------------------------------------------------------------- the same result


def test_a_run_moves_between_numbers_of_ranks(train_ranks, one_run, trained_run, monkeypatch):
    """From 1 rank to 2 and 4, ZeRO-1 on and off; a time limit ends the second part after a step, which it validates."""
    monkeypatch.setenv("TRAIN_START_TIME", "0")
    delete_checkpoints_after(trained_run, 3)
    flags = "--micro-batch-size 2 --resume auto"
    train_ranks(2, trained_run, flags, "--zero-stage 1 --time-limit 1s")
    assert latest_step(trained_run) == 4
    assert load_metrics(trained_run)[4]["val_loss"] == pytest.approx(load_curve(one_run)[4][1], rel=2e-4)
    train_ranks(4, trained_run, flags)
    assert_curves_close(trained_run, one_run)


def test_every_feature_works_on_two_ranks(train, train_ranks, tiny_config, tmp_path):
    """What one rank did alone would hang. 9 sequences of validation and 7 rows of HellaSwag do not divide evenly. Muon
    and AdamW are sharded, and have bfloat16 weights, which round the gradients of each rank, too."""
    size = "--model.vocab-size 50304 --model.n-embd 8"
    weights = write_model(tmp_path, GPT(tiny_config(size).model))
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    flags = [size, "--init-from", weights, "--hellaswag-data", rows]
    flags += ["--val-tokens 288 --hellaswag-every 2 --sample-every 2 --zero-stage 1 --overfit-single-batch"]
    flags += ["--max-steps 2 --save-every 1 --keep 1 --param-dtype bfloat16 --optimizer muon"]

    one, two = train("one", *flags), tmp_path / "two"
    output = train_ranks(2, two, *flags)

    assert_curves_close(two, one, 3e-2)
    one_row, two_row = (load_metrics(run)[2] for run in (one, two))
    assert one_row["hellaswag_acc"] == two_row["hellaswag_acc"]
    assert output.count("sample 3 of ") == 1


def test_eval_only_prints_what_the_run_printed(one_run, tmp_path, run_ranks):
    """On its own data. And leaves nothing behind. 32 sequences do not divide evenly by 3 sequences a batch."""
    before = sorted(tmp_path.rglob("*"))
    flags = "--eval-only --micro-batch-size 3 --out-dir"
    output = run_ranks(2, "train_gpt2.py", "--resume", one_run, flags, tmp_path / "other")

    assert f"{one_run} on {one_run.parent}" in output
    printed = float(re.search(r"val loss: ([\d.]+)", output)[1])
    assert printed == pytest.approx(load_curve(one_run)[12][1], abs=6e-5), output  # half a digit, and rounding
    assert sorted(tmp_path.rglob("*")) == before


# ------------------------------------------------------------------------- stopped and resumed


def signal_rank_1_in(module, name):
    """A `prepare` for ranks of which the second gets a SIGTERM when it first calls this function. They write slowly,
    and print, when their training ends, which checkpoint there is."""
    function, calls = getattr(sys.modules[module], name), itertools.count()
    open_and_train = train_gpt2.open_and_train

    def signalled(*args):
        if os.environ["RANK"] == "1" and next(calls) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args)

    def train_and_print(cfg, *args):
        ending = open_and_train(cfg, *args)
        print("newest checkpoint:", latest_step(cfg.run_dir))
        return ending

    setattr(sys.modules[module], name, signalled)
    checkpoint.write = write_slowly(0.2)
    train_gpt2.open_and_train = train_and_print


def test_a_signal_to_one_rank_ends_all_and_changes_no_bit(train_ranks, tmp_path):
    """With exit code 0, soon in an evaluation, of which nothing is written, and after the step in progress. Muon, which
    has AdamW beside it, with float32 copies of bfloat16 weights, and all of it sharded."""
    flags = "--optimizer muon --param-dtype bfloat16 --zero-stage 1 --model.no-tied-head --max-steps 4 --val-every 2"
    flags += " --micro-batch-size 1 --resume auto"
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_ranks(2, whole, flags)

    for step, place in (0, ["evaluation.evaluations", "to_device"]), (1, ["training.step", "to_device"]):
        output = train_ranks(2, run, flags, prepare=partial(signal_rank_1_in, *place))
        assert "another rank" in output
        # No rank ends before the last checkpoint, because torchrun ends all of them soon after the first.
        assert output.count(f"newest checkpoint: {step}") == 2
        assert (run / "metrics.jsonl").exists() == (step > 0)
    train_ranks(2, run, flags)

    assert load_curve(run) == load_curve(whole)
    assert same_weights(run, whole, 4)


def check_shares():
    """The script of a rank: after a step, the ranks together keep each number of the optimizers' state once."""
    cfg = parse_config("quickstart", *sys.argv[1:])
    with distributed.session("cpu") as rt:
        model = GPT(cfg.model)
        trainer = build_trainer(model, cfg, rt, 1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        trainer.update()
        own = [moments for name in ("adamw", "muon") for moments in trainer.state.components[name].local.state.values()]
        shares = rt.gather(sum(t.nbytes for moments in own for t in moments.values() if t.dim()))
        # Whole parameters are dealt out, so a rank has more than half where one is itself a large part.
        assert sum(shares) == optim.state_bytes(model, cfg)
        assert max(shares) <= 1.1 * optim.state_bytes(model, cfg, num_shards=2) < 0.75 * sum(shares)


def test_zero_divides_the_optimizer_state(tiny_args, run_ranks):
    run_ranks(2, check_shares, *tiny_args, "--optimizer muon --zero-stage 1")


@dataclass(frozen=True)
class LoneRank(Runtime):
    """One of two ranks, without the other. Rank 0 comes first, and takes the other's values to be its own. Rank 1 gets
    those of rank 0, and must call the same collectives: it ends at the first call that rank 0 has not made there."""

    calls: list = field(default_factory=list)  # of rank 0: the collective with its caller, and the value

    def exchange(self, name, value):
        """The value of rank 0 for this call."""
        call = f"{name} in {sys._getframe(2).f_code.co_name}"
        if self.rank == 0:
            self.calls.append((call, copy.deepcopy(value)))
            return value
        expected, value_of_0 = self.calls.pop(0) if self.calls else ("nothing more", None)
        assert call == expected
        return value_of_0

    def all_reduce(self, tensor):
        return self.exchange("all_reduce", tensor) + tensor

    def gather(self, value):
        return [self.exchange("gather", value), value]

    def broadcast(self, tensor, source):
        self.exchange("broadcast", None)

    def barrier(self):
        self.exchange("barrier", None)


def test_all_ranks_call_the_same_collectives(tiny_config, tmp_path, monkeypatch):
    """A rank that decided alone to save, to evaluate or to stop would leave the others waiting."""
    monkeypatch.setattr("lifecycle.build.wrap_in_ddp", lambda loss, rt: loss)
    monkeypatch.setattr(Trainer, "update", lambda trainer: None)  # the ranks have different gradients
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    size = "--model.vocab-size 50304 --model.n-embd 8"
    flags = [size, "--max-steps 5 --save-every 2 --keep 1 --hellaswag-every 4 --sample-every 4 --hellaswag-data", rows]
    cfg, rank_0 = tiny_config(*flags, "--out-dir", tmp_path / "run"), LoneRank(CPU.device, CPU.dtype, world_size=2)

    train_gpt2.open_and_train(cfg, rank_0, StopRequest())
    assert len(rank_0.calls) > 20
    (tmp_path / "run").rename(tmp_path / "run of rank 0")
    train_gpt2.open_and_train(cfg, replace(rank_0, rank=1), StopRequest())
    assert rank_0.calls == []


# ------------------------------------------------------------------------- ranks that differ


def test_what_ranks_must_share_is_compared(tiny_config, tiny_data, trained_run, tmp_path, monkeypatch):
    """Two machines may have another checkpoint, network or shards. Other cards round otherwise."""
    other = shutil.copytree(tiny_data, tmp_path / "other")
    (other / "tiny_train_000001.npy").unlink()
    check_ranks = Mock(side_effect=InterruptedError)
    monkeypatch.setattr(open_run, "check_ranks", check_ranks)

    def describe(*words, step=3):
        cfg = tiny_config("--out-dir new", *words)
        with pytest.raises(InterruptedError):
            open_run.open_run(replace(cfg, resume=str(model_path(trained_run, step))), CPU)
        return check_ranks.call_args.args[1]

    facts = describe()
    assert describe() == facts
    data = ["--data-dir", "the checksum of the training data", "the checksum of the validation data"]
    for found, names in (
        (describe(step=6), ["--resume", "the step to start from"]),
        (describe("--model.n-head 4"), ["--model.n-head"]),
        (describe("--data-dir", other), data),
        (describe("--data-dir", shutil.copytree(tiny_data, tmp_path / "copy")), data[:1]),
        (describe("--zero-stage 1"), ["--zero-stage", "the card"]),
    ):
        assert sorted(compare(facts, found)) == names


def test_rank_0_says_whether_the_last_step_is_evaluated(one_run, monkeypatch):
    """A rank on another machine, without its metrics, that evaluated the saved step again would wait for the others."""
    run, _ = open_run.open_run(parse_config("--resume", one_run), CPU)
    assert run.is_complete()
    monkeypatch.setattr(Runtime, "gather", lambda rt, value: [False, value])
    assert not run.is_complete()


def change_the_seed_of_rank_1():
    """A `prepare` for ranks of which the second was started with another --seed."""
    if os.environ["RANK"] == "1":
        sys.argv += ["--seed", "7"]


def test_a_run_compares_its_ranks_before_it_trains(train_ranks, tmp_path):
    """Averaged over two seeds, the run would end with success: nothing else notices."""
    output = train_ranks(2, "run", prepare=change_the_seed_of_rank_1, fails=True)

    assert "--seed is 1337 on rank 0" in output
    assert not (tmp_path / "run/metrics.jsonl").exists()


def change_weights_of_rank_1():
    """A `prepare` for ranks of which the second draws other random numbers, as another processor may, and computes one
    number wrongly, by one bit, in its fifth update."""
    if os.environ["RANK"] == "0":
        return
    manual_seed = torch.manual_seed
    torch.manual_seed = lambda seed: manual_seed(seed + 1)
    torch.optim.AdamW.step = err_in_update_5(lambda weight: torch.nextafter(weight, torch.tensor(1.0)))


def test_ranks_that_drift_apart_end_the_run(train_ranks, tmp_path, one_run):
    """All begin with the weights of the first."""
    run = tmp_path / "run"
    output = train_ranks(2, run, prepare=change_weights_of_rank_1, fails=True)

    # The ranks agreed at step 3, and not at the next evaluation or save.
    assert re.search(r"weights.* 1 \(", output), output
    assert complete_steps(run) == [3]

    # The same command continues from there.
    train_ranks(2, run, "--resume auto")
    assert_curves_close(run, one_run)


def change_the_network():
    """A `prepare` for ranks of a fork: the first block is frozen, and each block has dropout and a running mean."""
    init, forward = Block.__init__, Block.forward

    def init_with_buffer(block, config, layer):
        init(block, config, layer)
        block.requires_grad_(layer > 0)
        block.register_buffer("running_mean", torch.zeros(config.n_embd))

    def forward_with_dropout(block, x, *args):
        x = F.dropout(forward(block, x, *args), 0.1, block.training)
        if block.training:
            block.running_mean.lerp_(x.detach().mean((0, 1)), 0.5)
        return x + 0.1 * block.running_mean

    Block.__init__, Block.forward = init_with_buffer, forward_with_dropout


def test_a_fork_with_frozen_parameters_dropout_and_buffers_resumes_to_the_same_bits(train_ranks, tiny_config, tmp_path):
    cfg = tiny_config()
    torch.manual_seed(cfg.seed)
    before = GPT(cfg.model).state_dict()
    train_ranks(2, "run", "--max-steps 6", prepare=change_the_network)
    last = model_path(tmp_path / "run", 6)
    expected = checkpoint.read_file(last)["model"]
    unchanged = {name for name in before if torch.equal(before[name], expected[name])}
    assert unchanged == {name for name in before if name.startswith("transformer.h.0.")}

    delete_checkpoints_after(tmp_path / "run", 3)
    train_ranks(2, "run", "--max-steps 6 --resume auto", prepare=change_the_network)
    assert same_bits(checkpoint.read_file(last)["model"], expected)
    assert expected["transformer.h.1.running_mean"].any()


class CountingAdamW(torch.optim.AdamW):
    """An optimizer that counts its steps in its groups, in a number and in a tensor, as schedule-free optimizers and
    Prodigy do, and whose rate depends on the counts."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["estimate"] = group.get("estimate", torch.zeros(())) + 0.5
            group["lr"] /= group["k"] * group["estimate"].item()
        super().step()


def count_steps_in_groups():
    """A `prepare` for ranks of a fork with CountingAdamW."""
    optim.ALGORITHMS["adamw"] = optim.ALGORITHMS["adamw"]._replace(optimizer_class=CountingAdamW)


@pytest.mark.parametrize("zero", ["--zero-stage 0", "--zero-stage 1"])
def test_what_an_optimizer_counts_in_its_groups_is_resumed(train_ranks, tmp_path, zero):
    flags = f"--max-steps 6 {zero}"
    train_ranks(2, "run", flags, prepare=count_steps_in_groups)
    expected = load_curve(tmp_path / "run")
    delete_checkpoints_after(tmp_path / "run", 3)
    train_ranks(2, "run", flags, "--resume auto", prepare=count_steps_in_groups)
    assert load_curve(tmp_path / "run") == expected
    moments = checkpoint.read_train_state(tmp_path / "run")["components"]["adamw"]
    for entry in moments.values():
        assert entry["group"] == {"k": 6, "estimate": torch.tensor(3.0)}  # and no setting
