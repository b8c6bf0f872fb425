"""The micro-batch: the largest that fits on every rank, found without changing the run."""

import copy
import dataclasses
import gc
import os

import pytest
import torch
from helpers import CPU, choices, load_curve, parse_config, train_quickstart
from torch.utils._pytree import tree_flatten

from model import GPT
from system import distributed, machine
from system.cli import UserError
from system.distributed import Runtime
from training import microbatch, optim, step
from training.config import TrainConfig
from training.step import TrainStep


class LimitedCard:
    """Stands in for TrainStep.rehearse, on a GPU whose memory takes micro-batches of up to `limit` sequences."""

    def __init__(self, limit, message="CUDA out of memory. Tried to allocate 2 GiB"):
        self.limit = limit
        self.message = message
        self.tried = []  # (sequences, with the other ranks)

    def rehearse(self, B, with_other_ranks):
        self.tried.append((B, with_other_ranks))
        if self.limit < B:
            raise torch.OutOfMemoryError(self.message)


class RuntimeWithSmallerRank(Runtime):
    """One of two ranks; on the other one only two sequences fit: of the sizes 6, 3 and 1 the last."""

    other_lacks_memory = (True, True, False)

    def any_rank(self, flag):
        first, *later = self.other_lacks_memory
        object.__setattr__(self, "other_lacks_memory", later)
        return flag or first


def test_auto_tries_divisors_of_at_most_half_the_one_before():
    assert microbatch.halving_candidates(60) == [60, 30, 15, 6, 3, 1]
    assert microbatch.halving_candidates(512) == [64, 32, 16, 8, 4, 2, 1]


def test_auto_takes_the_first_micro_batch_that_fits(tiny_args):
    """It is tried without the other ranks, then with them."""
    card = LimitedCard(limit=5)
    cfg = parse_config("quickstart", *tiny_args)
    assert microbatch.largest_that_fits(card.rehearse, cfg, CPU, [60, 6, 3, 1]) == 3
    assert card.tried == [(60, False), (6, False), (3, False), (3, True)]


def test_auto_takes_what_fits_on_every_rank(tiny_args):
    """And every rank tries the same sizes, so that what it takes was tried on every rank."""
    card = LimitedCard(limit=5)
    rt = RuntimeWithSmallerRank(CPU.device, CPU.dtype)
    assert microbatch.largest_that_fits(card.rehearse, parse_config("quickstart", *tiny_args), rt, [6, 3, 1]) == 1
    assert card.tried == [(6, False), (3, False), (1, False), (1, True)]


def test_a_model_that_does_not_fit_at_all_is_told_what_helps(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    with pytest.raises(UserError, match=r"out of memory with 1 sequence\(s\) of 32 tokens per rank; use --recompute"):
        microbatch.largest_that_fits(LimitedCard(limit=0).rehearse, cfg, CPU, [6, 3, 1])


def test_auto_leaves_a_gibibyte_or_4_percent_of_the_card_free(tiny_args, monkeypatch):
    GiB = 2**30
    assert [microbatch.ballast_bytes(GiB * size) / GiB for size in (8, 24, 80)] == [1, 1, pytest.approx(3.2)]
    assert microbatch.ballast_bytes(0) == 0  # no card

    # It is in memory while a size is tried, and not after that.
    held = []
    monkeypatch.setattr(microbatch, "ballast_bytes", lambda card_bytes: 123_457)

    def count_ballasts(*_):
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
        held.append(sum(t.numel() == 123_457 for t in tensors))

    microbatch.fits_in_memory(count_ballasts, CPU, 4)
    count_ballasts()
    assert held == [1, 0]


def test_a_batch_that_does_not_split_over_the_ranks_is_refused(tiny_args):
    cfg = parse_config("quickstart", *tiny_args)
    three_ranks = dataclasses.replace(CPU, world_size=3)
    with pytest.raises(UserError, match=r"8 sequences of 32, which do not split evenly over 3 ranks; use .* 288"):
        microbatch.choose_micro_batch_size(cfg, three_ranks, None)


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused(tiny_args):
    cfg = parse_config("quickstart", *tiny_args, "--micro-batch-size", "3")
    with pytest.raises(UserError, match=r"--micro-batch-size 3 does not divide the 8 sequences .* use .*-size 4"):
        microbatch.choose_micro_batch_size(cfg, CPU, None)


@pytest.mark.parametrize("preset, B", [("quickstart", 16), ("gpt2-124m", 2), ("gpt2-1558m", 1)])
def test_a_cpu_takes_a_micro_batch_that_surely_fits(preset, B):
    assert microbatch.choose_micro_batch_size(parse_config(preset), CPU, rehearse=None) == B


def test_only_a_lack_of_memory_is_taken_for_one():
    for message in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "No valid triton configs. OutOfMemoryError: ...",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ...",
    ):
        assert microbatch.is_out_of_memory(RuntimeError(message))
    assert not microbatch.is_out_of_memory(OSError("out of memory"))

    def fail(*_):
        raise RuntimeError("device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        microbatch.fits_in_memory(fail, CPU, 1)


def test_segments_can_grow_unless_the_user_has_configured_the_allocator(monkeypatch):
    """Set before CUDA starts, which choose_device may do; both names are torch's."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")

    def start(cuda, **env):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        seen = []
        monkeypatch.setattr(machine, "choose_device", lambda *_: seen.append({n: os.environ.get(n) for n in names}))
        with pytest.raises(AttributeError), distributed.session(dtype="float32"):  # there is no device
            pass
        return seen

    assert start("13.0") == [{names[0]: "expandable_segments:True", names[1]: None}]
    assert start(None) == [{names[0]: None, names[1]: None}]
    for name in names:
        assert start("13.0", **{name: "x"}) == [dict.fromkeys(names) | {name: "x"}]


# ------------------------------------------------------------------------- the rehearsal of a step


@pytest.mark.parametrize("flags", ["", "--optimizer muon --weights bfloat16 --dtype bfloat16", "--dtype float16"])
@pytest.mark.parametrize("memory_runs_out", [False, True])
def test_a_rehearsal_changes_nothing(tiny_args, flags, memory_runs_out, monkeypatch):
    """Not the weights, the optimizer state, the learning rates, the loss scale, the gradients or the random state: the
    bits of a run that was rehearsed are those of one that was not."""
    cfg = parse_config("quickstart", *tiny_args, *flags.split())
    rt = dataclasses.replace(CPU, dtype=getattr(torch, cfg.dtype))
    batch = torch.randint(256, (2, 4, 33), generator=torch.Generator().manual_seed(1)).to(torch.uint16)

    def train(rehearses):
        torch.manual_seed(0)
        train_step = TrainStep(cfg, rt, GPT(cfg.model))
        before = copy.deepcopy((train_step.state_dict(), train_step.weights.state_dict(), torch.get_rng_state()))
        if rehearses:
            rehearse(train_step)
            after = (train_step.state_dict(), train_step.weights.state_dict(), torch.get_rng_state())
            assert_same(before, after)
            assert all(p.grad is None for p in train_step.model.parameters())
        for number in range(2):
            result = train_step.compute_gradients(batch)
            train_step.set_learning_rates(number, 12)
            train_step.update() if result.is_finite else train_step._finish_step()
        return train_step.state_dict(), train_step.weights.state_dict()

    def rehearse(train_step):
        for with_other_ranks in (False, True):
            train_step.rehearse(4, with_other_ranks)
        if memory_runs_out:
            with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
                patched.setattr(train_step.weights, "take_gradients", lambda keep: raise_out_of_memory())
                train_step.rehearse(4, False)

    assert_same(train(rehearses=False), train(rehearses=True))


def raise_out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def assert_same(a, b):
    """Two trees of containers have equal leaves; tensors have the same bits."""
    a_leaves, a_shape = tree_flatten(a)
    b_leaves, b_shape = tree_flatten(b)
    assert a_shape == b_shape
    for x, y in zip(a_leaves, b_leaves, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


def test_a_rehearsal_does_all_of_a_step(tiny_args, monkeypatch):
    """Two micro-steps, as far as the run has two, and the update; a limit of memory is found in each part."""
    train_step = TrainStep(
        parse_config("quickstart", *tiny_args), CPU, GPT(parse_config("quickstart", *tiny_args).model)
    )
    calls = []
    forward, step_adamw = train_step.ddp_forward.forward, torch.optim.AdamW.step
    train_step.ddp_forward.forward = lambda x, y: calls.append(len(x)) or forward(x, y)
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: calls.append("update") or step_adamw(self))

    train_step.rehearse(8, False)
    train_step.rehearse(2, False)
    assert calls == [8, "update", 2, 2, "update"]


# ------------------------------------------------------------------------- out of memory, in spite of all


def test_out_of_memory_with_a_given_size_names_the_flag_to_type(tiny_args, tmp_path):
    cfg = parse_config("quickstart", *tiny_args, "--out-dir", tmp_path / "run")
    message = (
        r"out of memory on rank 0 \(cpu .*micro-batch of 4 sequences of 32 tokens \(CUDA out .*use --micro-batch-size 2"
    )
    with pytest.raises(UserError, match=message), microbatch.explain_out_of_memory(cfg, CPU, 4):
        raise_out_of_memory()
    with pytest.raises(UserError, match="use --recompute"), microbatch.explain_out_of_memory(cfg, CPU, 1):
        raise_out_of_memory()
    with pytest.raises(RuntimeError, match="another"), microbatch.explain_out_of_memory(cfg, CPU, 1):
        raise RuntimeError("another error")
    assert not (tmp_path / "run").exists()


def test_out_of_memory_with_auto_is_remembered_for_the_same_conditions(tiny_args, tmp_path, capsys):
    auto = ["--micro-batch-size", "auto", "--out-dir", tmp_path / "run"]
    cfg = parse_config("quickstart", *tiny_args, *auto)
    assert microbatch.choose_micro_batch_size(cfg, CPU, None) == 8
    with pytest.raises(RuntimeError, match="the next start takes at most 4: run the same command with --resume auto"):
        with microbatch.explain_out_of_memory(cfg, CPU, 8):
            raise_out_of_memory()

    # The next start takes half, and says why. Then again half; one sequence cannot be halved.
    assert microbatch.choose_micro_batch_size(cfg, CPU, None) == 4
    assert "at most 4 sequences, because an earlier start ran out of memory with more" in capsys.readouterr().out
    with pytest.raises(RuntimeError), microbatch.explain_out_of_memory(cfg, CPU, 4):
        raise_out_of_memory()
    assert microbatch.choose_micro_batch_size(cfg, CPU, None) == 2
    with pytest.raises(UserError, match="use --recompute"), microbatch.explain_out_of_memory(cfg, CPU, 1):
        raise_out_of_memory()

    # With less to hold, another network or another precision, the limit says nothing; nor does a damaged file.
    for flags in (["--recompute"], ["--model.n-layer", 1]):
        changed = parse_config("quickstart", *tiny_args, *auto, *flags)
        assert microbatch.choose_micro_batch_size(changed, CPU, None) == 8
    assert microbatch.find_limit(cfg, dataclasses.replace(CPU, dtype=torch.bfloat16)) == microbatch.MAX_AUTO_SEQUENCES
    (tmp_path / "run" / microbatch.LIMIT_FILE).write_text("[]")
    assert microbatch.choose_micro_batch_size(cfg, CPU, None) == 8


def test_a_run_that_runs_out_of_memory_resumes_with_half(tiny_args, tmp_path, monkeypatch):
    """At step 5, in the forward pass of 8 sequences: the next start resumes from step 3 and ends as any run does."""
    flags = [*tiny_args, "--micro-batch-size", "auto", "--resume", "auto"]
    forward, calls = step.Forward.forward, []  # the sequences of each forward pass of training

    def limited_forward(self, x, y, *more):
        if torch.is_grad_enabled():
            calls.append(len(x))
            if calls == [8] * 6:
                raise_out_of_memory()
        return forward(self, x, y, *more)

    monkeypatch.setattr(step.Forward, "forward", limited_forward)
    with pytest.raises(RuntimeError, match=r"micro-batch of 8 .* at most 4"):
        train_quickstart(flags, tmp_path / "run")
    first_start, calls[:] = list(calls), []
    train_quickstart(flags, tmp_path / "run")

    assert first_start == [8] * 6 and calls == [4] * 2 * 9
    assert load_curve(tmp_path / "run").keys() == set(range(13))


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_the_optimizer_state_is_in_memory_while_the_micro_batch_is_tried(tiny_args, monkeypatch, optimizer):
    """All of it, as large as after a step, so that the first step needs no more memory than was tried out."""
    cfg = parse_config("quickstart", *tiny_args, "--optimizer", optimizer)
    built = []  # the optimizers, known here before TrainStep has them
    numbers_while_tried = []

    def build_optimizers(*args, real=optim.build_optimizers):
        built.extend(real(*args))
        return built

    def choose_micro_batch_size(cfg, rt, rehearse):
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
