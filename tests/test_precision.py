"""The precision of a run: chosen by measurement, the same on all ranks and after a resume, and always printed."""

import os
import time

import pytest
import torch
from helpers import CPU, choices, load_curve, train_quickstart

from system import machine
from system.cli import UserError
from system.distributed import Runtime
from training import checkpoint, sampling
from training.config import TrainConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = [BF16, FP32]
AMPERE, TURING = [BF16, FP16, FP32], [FP16, FP32]


def set_cpu(monkeypatch, supported, speedup=None):
    """Let this CPU support these precisions, and multiply bfloat16 `speedup` times as fast as float32."""

    def bfloat16_speedup(product):
        assert speedup is not None, "nothing should be measured"
        return speedup

    monkeypatch.setattr(machine, "supported_dtypes", lambda device: supported)
    monkeypatch.setattr(machine, "bfloat16_speedup", bfloat16_speedup)


class Gpu(Runtime):
    """A rank with a GPU, beside another rank whose precisions `other` are."""

    other: tuple = ()

    def gather(self, value):
        return [value, dict.fromkeys(type(self).other, float("inf"))]


def set_gpus(monkeypatch, own, other) -> Runtime:
    """The Runtime of a GPU with the precisions `own`, beside a rank with the precisions `other`."""
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: own)
    monkeypatch.setattr(Gpu, "other", tuple(other))
    return Gpu(torch.device("cuda", 0), FP32, world_size=2)


@pytest.mark.parametrize("speedup, chosen", [(0.5, FP32), (1.1, FP32), (1.3, BF16), (4.0, BF16)])
def test_a_cpu_takes_bfloat16_only_where_it_clearly_wins(monkeypatch, speedup, chosen):
    """0.5 is a Xeon with AVX512-BF16 and without AMX, 4 a Zen 5: their flags are the same."""
    set_cpu(monkeypatch, BOTH, speedup)

    dtype, reason = machine.choose_dtype(CPU)

    assert dtype == chosen
    assert f"{speedup:.1f} times" in reason


def test_what_needs_no_measurement_is_not_measured(monkeypatch):
    """A CPU that emulates bfloat16, and a precision that was asked for."""
    set_cpu(monkeypatch, [FP32])
    assert machine.choose_dtype(CPU)[0] == FP32

    set_cpu(monkeypatch, BOTH)
    assert machine.choose_dtype(CPU, "float16") == (FP16, "by --dtype")


@pytest.mark.parametrize("slow_tries", [1, 4])
def test_a_busy_machine_does_not_change_the_speedup(monkeypatch, slow_tries):
    """bfloat16 takes 1 ms, float32 2 ms. The first tries, cold or beside another program, take a second."""
    now = 0.0
    calls = {BF16: 0, FP32: 0}

    def make_linear(weight):
        def multiply(x):
            nonlocal now
            calls[x.dtype] += 1
            is_cold = calls[x.dtype] <= slow_tries
            now += 1.0 if is_cold else {BF16: 0.001, FP32: 0.002}[x.dtype]

        return multiply

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert machine.bfloat16_speedup(machine.Product(8, 8, 8, make_linear=make_linear)) == pytest.approx(2.0)


def test_the_speedup_of_this_cpu_is_a_ratio_of_times():
    assert 0.01 < machine.bfloat16_speedup(machine.Product(512, 64, 256)) < 100


def test_a_run_resumes_in_the_precision_it_began_in(monkeypatch, tiny_args, tmp_path, capsys):
    """Whatever is measured now. A flag changes it, and the run says so."""
    set_cpu(monkeypatch, BOTH, speedup=4.0)
    run = train_quickstart([*tiny_args, "--dtype", "auto"], tmp_path / "run", "--max-steps", "4")
    assert checkpoint.read_train_state(run)["dtype"] == "bfloat16"

    set_cpu(monkeypatch, BOTH, speedup=0.5)
    capsys.readouterr()
    train_quickstart([*tiny_args, "--dtype", "auto"], run, "--max-steps", "6", "--resume", "auto")
    assert "precision: bfloat16, as the run began" in capsys.readouterr().out

    train_quickstart(tiny_args, run, "--max-steps", "8", "--resume", "auto", "--dtype", "float32")
    assert "precision: float32, by --dtype; the run began in bfloat16" in capsys.readouterr().out
    assert checkpoint.read_train_state(run)["dtype"] == "float32"


@pytest.mark.parametrize("own, other, chosen", [
    (AMPERE, TURING, FP16), (TURING, AMPERE, FP16), (AMPERE, AMPERE, BF16), (TURING, TURING, FP16),
])  # fmt: skip
def test_gpus_of_different_kinds_agree_on_what_all_have(monkeypatch, own, other, chosen):
    """A 2080 Ti beside a 3090: the 3090 alone would take bfloat16, and the other scales its gradients by 65,536."""
    rt = set_gpus(monkeypatch, own, other)

    assert machine.choose_dtype(rt)[0] == chosen
    assert machine.choose_dtype(rt, "float32")[0] == FP32
    assert machine.choose_dtype(rt, began_in="bfloat16")[0] == chosen


@pytest.mark.parametrize("own, other", [(AMPERE, TURING), (TURING, AMPERE)])
def test_a_precision_that_a_gpu_lacks_is_refused(monkeypatch, own, other):
    rt = set_gpus(monkeypatch, own, other)
    with pytest.raises(UserError, match=r"--dtype bfloat16.*use --dtype float16"):
        machine.choose_dtype(rt, "bfloat16")


def only_rank_1_lacks_bfloat16():
    """Runs in each rank's process before the script."""
    machine.supported_dtypes = lambda device: [FP32] if os.environ["RANK"] == "1" else BOTH
    machine.bfloat16_speedup = lambda product: 4.0


def test_ranks_that_report_different_capabilities_train_in_one_precision(tiny_args, tmp_path, run_ranks):
    """Real ranks: together they end with the curve of a run in the precision that both have."""
    one_rank = train_quickstart(tiny_args, tmp_path / "one_rank")
    flags = ["quickstart", *tiny_args, "--dtype", "auto", "--out-dir", tmp_path / "two_ranks"]

    out = run_ranks(2, "train_gpt2.py", *flags, prepare=only_rank_1_lacks_bfloat16)

    assert "precision: float32" in out
    assert load_curve(tmp_path / "two_ranks")[11][0] == pytest.approx(load_curve(one_rank)[11][0], rel=2e-4)


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_bfloat16_weights_train_on_a_gpu_that_has_only_float16(tiny_args, tmp_path, capsys, optimizer):
    """As record8-124m and speedrun-124m on a Turing GPU: one line says what is done instead. It resumes, too."""
    flags = [*tiny_args, "--weights", "bfloat16", "--dtype", "float16", "--optimizer", optimizer]
    run = train_quickstart(flags, tmp_path / "run", "--max-steps", "3")
    assert capsys.readouterr().out.count("here weights stay in float32, with a float16 loss scale") == 1

    train_quickstart(flags, run, "--max-steps", "5", "--resume", "auto")
    assert list(load_curve(run)) == list(range(6))
    assert load_curve(run)[5][1] < 6


def test_samples_that_fail_do_not_end_the_run(tiny_args, tmp_path, monkeypatch, capsys):
    """Only one rank samples: if it ended, the others would wait for it."""

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(sampling, "stream", out_of_memory)
    flags = ["--model.vocab-size", "50304", "--sample-every", "1", "--max-steps", "2", "--val-every", "0"]
    run = train_quickstart([*tiny_args, *flags], tmp_path / "run")
    assert capsys.readouterr().out.count("no samples: OutOfMemoryError: CUDA out of memory") == 2
    assert checkpoint.latest_step(run) == 2
