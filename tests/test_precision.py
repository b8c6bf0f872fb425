"""The precision of a run: chosen by measurement, the same on all ranks and after a resume, and always printed."""

import os

import pytest
import torch
from helpers import CPU, choices, load_curve, parse_config, train_quickstart

import train_gpt2
from system import precision as device_precision
from system.cli import UserError
from system.distributed import Runtime
from system.units import dtype_name
from training import checkpoint, precision, sampling
from training.config import TrainConfig
from training.evaluator import Validation

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = [BF16, FP32]


def set_cpu(monkeypatch, supported, speedup=None):
    """Let this CPU support these precisions, and multiply bfloat16 `speedup` times as fast as float32."""

    def bfloat16_speedup(*shape):
        assert speedup is not None, "nothing should be measured"
        return speedup

    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: supported)
    monkeypatch.setattr(device_precision, "bfloat16_speedup", bfloat16_speedup)


class RuntimeOfGPUs(Runtime):
    """A rank whose all_gather returns, besides its own flags, those of a rank with other precisions. On a machine
    without GPUs it also has no tensors there: set_gpus puts them on the CPU."""

    others: list[torch.Tensor]

    def all_gather(self, tensor):
        return [tensor, *self.others]


def set_gpus(monkeypatch, own, other) -> Runtime:
    """The Runtime of a GPU with the precisions `own`, beside a rank with the precisions `other`."""
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: own)
    monkeypatch.setattr(torch, "tensor", lambda values, device=None, real=torch.tensor: real(values))
    rt = RuntimeOfGPUs(torch.device("cuda", 0), FP32)
    flags = torch.tensor([float(dtype in other) for dtype in device_precision.PREFERRED_DTYPES])
    object.__setattr__(rt, "others", [flags])  # a Runtime is frozen
    return rt


@pytest.mark.parametrize("speedup, chosen", [(0.5, FP32), (1.1, FP32), (1.3, BF16), (4.0, BF16)])
def test_a_cpu_takes_bfloat16_only_where_it_clearly_wins(monkeypatch, tiny_args, capsys, speedup, chosen):
    """0.5 is a Xeon with AVX512-BF16 and without AMX, 4 a Zen 5: their flags are the same."""
    set_cpu(monkeypatch, BOTH, speedup)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, CPU).dtype == chosen
    out = capsys.readouterr().out
    assert f"precision: {dtype_name(chosen)}" in out
    assert f"{speedup:.1f} times as fast as float32 here" in out


def test_emulated_bfloat16_is_not_even_measured(monkeypatch, tiny_args):
    set_cpu(monkeypatch, [FP32])
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, CPU).dtype == FP32


def test_the_speedup_is_measured_once():
    speedup = device_precision.bfloat16_speedup(512, 64, 256)
    assert 0.01 < speedup < 100
    assert speedup == device_precision.bfloat16_speedup(512, 64, 256)  # to the digit: two measurements would differ


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
    assert "the run began in bfloat16 and continues in float32" in capsys.readouterr().out
    assert checkpoint.read_train_state(run)["dtype"] == "float32"


def test_a_run_of_a_version_that_did_not_save_its_precision_keeps_what_that_version_chose(monkeypatch, tiny_args):
    set_cpu(monkeypatch, BOTH, speedup=0.5)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, CPU, {"step": 3}).dtype == BF16


AMPERE, TURING = [BF16, FP16, FP32], [FP16, FP32]


@pytest.mark.parametrize("own, other, chosen", [
    (AMPERE, TURING, FP16), (TURING, AMPERE, FP16), (AMPERE, AMPERE, BF16), (TURING, TURING, FP16),
])  # fmt: skip
def test_gpus_of_different_kinds_agree_on_what_all_have(monkeypatch, tiny_args, own, other, chosen):
    """A 2080 Ti beside a 3090: the 3090 alone would take bfloat16, and the other scales its gradients by 65,536."""
    rt = set_gpus(monkeypatch, own, other)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, rt).dtype == chosen


def test_eval_only_scores_in_what_all_gpus_have(monkeypatch, tiny_args, tmp_path):
    rt = set_gpus(monkeypatch, AMPERE, TURING)
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1")
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto", "--init-from", run, "--eval-only")
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)  # there is no GPU
    monkeypatch.setattr(type(rt), "check_equal", lambda *_: None)
    seen = []

    def validate(forward, val_data, cfg, rt, B):
        seen.append(rt.dtype)
        return Validation(1.0, 1.0)

    monkeypatch.setattr(train_gpt2, "validate", validate)
    train_gpt2.evaluate(cfg, rt)
    assert seen == [FP16]


def test_the_reason_for_a_precision_is_printed(monkeypatch, tiny_args, capsys):
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    precision.agree_on_dtype(cfg, set_gpus(monkeypatch, AMPERE, TURING))
    assert "precision: float16, which every GPU of this run has" in capsys.readouterr().out
    precision.agree_on_dtype(cfg, set_gpus(monkeypatch, AMPERE, AMPERE))
    assert "precision: bfloat16, which this GPU multiplies fastest" in capsys.readouterr().out


@pytest.mark.parametrize("own, other", [(AMPERE, TURING), (TURING, AMPERE)])
def test_a_precision_that_a_gpu_lacks_is_refused(monkeypatch, tiny_args, own, other):
    rt = set_gpus(monkeypatch, own, other)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "bfloat16")
    with pytest.raises(UserError, match="not every GPU of this run has it; use --dtype float16"):
        precision.agree_on_dtype(cfg, rt)


def only_rank_1_lacks_bfloat16():
    """Runs in each rank's process before the script."""
    device_precision.supported_dtypes = lambda device: [FP32] if os.environ["RANK"] == "1" else BOTH
    device_precision.bfloat16_speedup = lambda *shape: 4.0


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
