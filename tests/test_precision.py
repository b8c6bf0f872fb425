"""The precision of a run: chosen by measurement, the same on all ranks and after a resume, and never without a word."""

import dataclasses
import os

import pytest
import torch
from helpers import CPU, load_curve, load_weights, parse_config, same_bits, train_quickstart

from system import precision as device_precision
from system.cli import UserError
from system.distributed import Runtime
from system.units import dtype_name
from training import checkpoint, evaluator, hellaswag_eval, precision, sampling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CARD = Runtime(torch.device("cuda", 0), FP32)
BOTH = [BF16, FP32]


def has(monkeypatch, *per_rank):
    """What precision.supported_dtypes says: of this rank and, by a collective that is made up, of the others."""
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: per_rank[0])
    rows = [torch.tensor([float(dtype in found) for dtype in device_precision.PREFERRED_DTYPES]) for found in per_rank]
    stack = torch.stack
    monkeypatch.setattr(torch, "tensor", lambda values, device=None, real=torch.tensor: real(values))
    monkeypatch.setattr(precision.torch, "stack", lambda _: stack(rows))


@pytest.mark.parametrize("gain, chosen", [(0.5, FP32), (1.1, FP32), (1.3, BF16), (4.0, BF16)])
def test_a_cpu_takes_bfloat16_only_where_it_clearly_wins(monkeypatch, tiny_args, capsys, gain, chosen):
    """0.5 is a Xeon with AVX512-BF16 and without AMX, 4 a Zen 5: their flags are the same."""
    monkeypatch.setattr(device_precision, "bfloat16_speedup", lambda *shape: gain)
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: BOTH)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, CPU).dtype == chosen
    said = capsys.readouterr().out
    assert f"precision: {dtype_name(chosen)}" in said and f"{gain:.1f} times as fast as float32 here" in said
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: [FP32])
    assert precision.agree_on_dtype(cfg, CPU).dtype == FP32  # emulated bfloat16 is not even tried


def test_the_measurement_is_of_this_machine_and_short():
    gain = device_precision.bfloat16_speedup(512, 64, 256)
    assert 0.01 < gain < 100 and gain == device_precision.bfloat16_speedup(512, 64, 256)


def test_a_run_resumes_in_the_precision_it_began_in(monkeypatch, tiny_args, tmp_path, capsys):
    """Whatever the stopwatch says now; a flag changes it, and the run says so."""
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: BOTH)
    monkeypatch.setattr(device_precision, "bfloat16_speedup", lambda *shape: 4.0)
    run = train_quickstart([*tiny_args, "--dtype", "auto"], tmp_path / "run", "--max-steps", "4")
    assert checkpoint.read_train_state(run)["dtype"] == "bfloat16"
    monkeypatch.setattr(device_precision, "bfloat16_speedup", lambda *shape: 0.5)
    capsys.readouterr()
    train_quickstart([*tiny_args, "--dtype", "auto"], run, "--max-steps", "6", "--resume", "auto")
    assert "precision: bfloat16, as the run began" in capsys.readouterr().out
    train_quickstart(tiny_args, run, "--max-steps", "8", "--resume", "auto", "--dtype", "float32")
    assert "the run began in bfloat16 and continues in float32" in capsys.readouterr().out
    assert checkpoint.read_train_state(run)["dtype"] == "float32"


def test_a_run_of_a_version_that_did_not_save_its_precision_keeps_what_that_version_chose(monkeypatch, tiny_args):
    monkeypatch.setattr(device_precision, "supported_dtypes", lambda device: BOTH)
    monkeypatch.setattr(device_precision, "bfloat16_speedup", lambda *shape: 0.5)
    cfg = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    assert precision.agree_on_dtype(cfg, CPU, {"step": 3}).dtype == BF16


def test_cards_of_different_kinds_agree_on_what_all_have(monkeypatch, tiny_args, capsys):
    """A 2080 Ti beside a 3090: the 3090 alone would take bfloat16, and the other scales its gradients by 65,536."""
    ampere, turing = [BF16, FP16, FP32], [FP16, FP32]
    auto = parse_config("quickstart", *tiny_args, "--dtype", "auto")
    for mine, other in ((ampere, turing), (turing, ampere)):
        with monkeypatch.context() as m:
            has(m, mine, other)
            assert precision.agree_on_dtype(auto, CARD).dtype == FP16
            with pytest.raises(UserError, match="not every GPU of this run has it; use --dtype float16"):
                precision.agree_on_dtype(dataclasses.replace(auto, dtype="bfloat16"), CARD)
    with monkeypatch.context() as m:
        has(m, ampere, ampere)
        assert precision.agree_on_dtype(auto, CARD).dtype == BF16
    assert "which every GPU of this run has" in capsys.readouterr().out


def only_rank_1_lacks_bfloat16():
    device_precision.supported_dtypes = lambda device: [FP32] if os.environ["RANK"] == "1" else BOTH
    device_precision.bfloat16_speedup = lambda *shape: 4.0


def test_ranks_that_report_different_capabilities_train_in_one_precision(tiny_args, tmp_path, run_ranks):
    """Real ranks: together they end with the curve of a run in the precision that both have."""
    one = train_quickstart(tiny_args, tmp_path / "one")
    flags = ["quickstart", *tiny_args, "--dtype", "auto", "--out-dir", tmp_path / "two"]
    said = run_ranks(2, "train_gpt2.py", *flags, prepare=only_rank_1_lacks_bfloat16)
    assert "precision: float32" in said
    assert load_curve(tmp_path / "two")[11][0] == pytest.approx(load_curve(one)[11][0], rel=2e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "normuon"])
def test_bfloat16_weights_train_on_a_card_that_has_only_float16(tiny_args, tmp_path, capsys, optimizer):
    """As record8-124m and speedrun-124m on a Turing card: after one line, with what it has; also resumed."""
    flags = [*tiny_args, "--weights", "bfloat16", "--dtype", "float16", "--optimizer", optimizer]
    run = train_quickstart(flags, tmp_path / "run", "--max-steps", "3")
    assert capsys.readouterr().out.count("here the weights stay in float32, with a float16 loss scale") == 1
    train_quickstart(flags, run, "--max-steps", "5", "--resume", "auto")
    assert list(load_curve(run)) == list(range(6)) and load_curve(run)[5][1] < 6


def out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_an_evaluation_that_fails_loses_no_step_and_does_not_fail_twice(tiny_args, tmp_path, monkeypatch):
    """Though no save was due; the run goes on without that evaluation, and to the same bits."""
    whole, run = train_quickstart(tiny_args, tmp_path / "whole"), tmp_path / "run"
    flags, calls = [*tiny_args, "--save-every", "100", "--val-every", "5"], []

    def later(*args, real=evaluator.validate):
        calls.append(1)
        return out_of_memory() if len(calls) == 2 else real(*args)

    monkeypatch.setattr(evaluator, "validate", later)
    with pytest.raises(torch.OutOfMemoryError):
        train_quickstart(flags, run)
    assert checkpoint.complete_steps(run) == [5]
    train_quickstart(flags, run, "--resume", "auto")
    assert "step 5: OutOfMemoryError" in (run / "failed_evaluation").read_text()
    assert same_bits(load_weights(run), load_weights(whole))
    assert [step for step, (_, val, _) in load_curve(run).items() if val is not None] == [0, 10, 12]


def test_samples_that_fail_do_not_end_the_run(tiny_args, tmp_path, monkeypatch, capsys):
    """Only one rank samples: if it ended, the others would wait for it."""
    monkeypatch.setattr(sampling, "stream", out_of_memory)
    run = train_quickstart([*tiny_args, "--model.vocab-size", "50304", "--sample-every", "5"], tmp_path / "run")
    assert capsys.readouterr().out.count("no samples: OutOfMemoryError: CUDA out of memory") == 3
    assert checkpoint.latest_step(run) == 12


def test_a_saved_step_survives_its_evaluation(tiny_args, tmp_path, monkeypatch):
    """HellaSwag runs out of memory at a step whose checkpoint is due: it is there."""
    row = hellaswag_eval.Example([1], [[2], [3], [4], [5]], 0)
    monkeypatch.setattr(hellaswag_eval, "available_examples", lambda *args: [row])
    real, calls = hellaswag_eval.evaluate, []

    def later(*args, **kwargs):
        calls.append(1)
        return real(*args, **kwargs) if len(calls) == 1 else out_of_memory()

    monkeypatch.setattr(hellaswag_eval, "evaluate", later)
    monkeypatch.setattr(hellaswag_eval, "score", lambda *args, **kwargs: torch.zeros(1, 4))
    with pytest.raises(torch.OutOfMemoryError):
        train_quickstart(tiny_args, tmp_path / "run", "--hellaswag-every", "6")
    assert checkpoint.latest_step(tmp_path / "run") == 6
