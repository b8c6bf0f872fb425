"""Evaluations that fail: each is reported with its rank, its reason and a way to turn it off, and training continues on
all ranks as if nothing had happened."""

import os
import weakref

import pytest
import torch
from helpers import load_curve, load_metrics, load_weights, same_bits, train_quickstart

from system.cli import UserError
from training import checkpoint, evaluator, hellaswag_eval
from training.stop import StopRequest


def without_validation_of(curve, *steps) -> dict:
    """A curve, as of load_curve, as it is if the validation of these steps has failed."""
    return {step: (loss, None if step in steps else val, norm) for step, (loss, val, norm) in curve.items()}


def fail_in_batch_3_of_step_4(monkeypatch, error, do_first=lambda tensors: None) -> None:
    """Let a run's second validation, which is that of step 4, raise `error` in its third of eight batches. `do_first`
    is called before that, with the batch."""
    to_device, batches = evaluator.to_device, []

    def failing(*args):
        batches.append(args)
        tensors = to_device(*args)
        if len(batches) == 8 + 3:
            do_first(tensors)
            raise error
        return tensors

    monkeypatch.setattr(evaluator, "to_device", failing)


@pytest.mark.parametrize(
    "error, reason",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (UserError("token 3 is id 300"), "UserError: token 3 is id 300"),
    ],
)
def test_training_continues_after_a_failed_validation(tiny_args, tmp_path, monkeypatch, capsys, error, reason):
    undisturbed = train_quickstart(tiny_args, tmp_path / "undisturbed")
    fail_in_batch_3_of_step_4(monkeypatch, error)
    capsys.readouterr()

    run = train_quickstart(tiny_args, tmp_path / "run")

    output = capsys.readouterr().out
    warning = f"warning: validation failed at step 4 on rank 0 ({reason}). Training continues; to turn validation off"
    assert output.count(" failed at step ") == output.count(warning) == 1
    assert "resume with --val-every 0" in output
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 4)
    assert same_bits(load_weights(run), load_weights(undisturbed))


def test_training_continues_after_a_failed_hellaswag(tiny_args, tmp_path, monkeypatch, capsys):
    """It fails at a step whose checkpoint is due, after a validation that does not fail: both are kept."""
    undisturbed = train_quickstart(tiny_args, tmp_path / "undisturbed", "--val-every", "6")
    capsys.readouterr()
    # Any rows will do: scoring them is not tried here. The second of three times it fails.
    rows = [hellaswag_eval.Example([1], [[2], [3], [4], [5]], 0)]
    scores = iter([{"acc": 0.25, "acc_norm": 0.5}, torch.OutOfMemoryError("CUDA out of memory"), {"acc": 1.0}])

    def evaluate(*args, **kwargs):
        score = next(scores)
        if isinstance(score, Exception):
            raise score
        return {"acc_norm": 0.5, **score}

    monkeypatch.setattr(hellaswag_eval, "available_examples", lambda *args: rows)
    monkeypatch.setattr(hellaswag_eval, "evaluate", evaluate)
    monkeypatch.setattr(hellaswag_eval, "summary_line", lambda score: f"hellaswag {score}")

    run = train_quickstart(tiny_args, tmp_path / "run", "--val-every", "6", "--hellaswag-every", "6")

    warning = "warning: HellaSwag failed at step 6 on rank 0 (OutOfMemoryError: CUDA out of memory). Training continues"
    output = capsys.readouterr().out
    assert output.count(warning) == 1
    assert "resume with --hellaswag-every 0" in output
    lines = load_metrics(run)
    assert {line["step"]: line["hellaswag_acc"] for line in lines if "hellaswag_acc" in line} == {0: 0.25, 12: 1.0}
    assert 6 in checkpoint.complete_steps(run)
    assert load_curve(run) == load_curve(undisturbed)


def test_a_failed_evaluation_releases_its_memory_at_once(tiny_args, tmp_path, monkeypatch):
    """Training needs the memory that the failed pass held, and an exception keeps what its frames refer to."""
    tensors_of_the_pass, alive_when_reported = [], []

    def remember(tensors):
        tensors_of_the_pass.extend(weakref.ref(tensor) for tensor in tensors)

    def report(rt):
        alive_when_reported.extend(reference() is not None for reference in tensors_of_the_pass)

    fail_in_batch_3_of_step_4(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), remember)
    monkeypatch.setattr(evaluator, "report_failed_evaluation", report)

    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "5")

    assert alive_when_reported == [False, False]


def test_a_signal_during_a_failing_evaluation_still_stops_the_run(tiny_args, tmp_path, monkeypatch):
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    stop = StopRequest()

    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError("CUDA out of memory")
        fail_in_batch_3_of_step_4(patch, error, lambda tensors: setattr(stop, "signal", "SIGTERM"))
        train_quickstart(tiny_args, run, stop=stop)
    assert checkpoint.latest_step(run) == 5  # the next step asks, and is completed

    train_quickstart(tiny_args, run, "--resume", "auto")
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 4)
    assert same_bits(load_weights(run), load_weights(undisturbed))


# Which rank of two fails in which of its four batches, for each validation of a run: {(validation, rank): batch}.
FAILURES = {
    (1, 0): 2, (1, 1): 2,  # both at once
    (2, 1): 3,  # one, while the other continues to its next check
    (3, 0): 2,  # one, while the other is asked to stop: STOP_AT
}  # fmt: skip

# In which validation which rank is asked to stop, and before which batch: where the other rank's failure is found.
STOP_AT = {(3, 1): 3}


def plant_failures() -> None:
    """A `prepare` for ranks whose validations fail and stop as FAILURES and STOP_AT say."""
    rank = int(os.environ["RANK"])
    validate, to_device, check = evaluator.validate, evaluator.to_device, StopRequest.check
    validation = batch = checks = 0

    def counted_validate(*args):
        nonlocal validation, batch, checks
        validation, batch, checks = validation + 1, 0, 0
        return validate(*args)

    def failing_to_device(*args):
        nonlocal batch
        batch += 1
        if FAILURES.get((validation, rank)) == batch:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to_device(*args)

    def interrupted_check(stop, *args, **kwargs):
        nonlocal checks
        checks += 1
        if STOP_AT.get((validation, rank)) == checks:
            stop.signal = "SIGTERM"
        return check(stop, *args, **kwargs)

    evaluator.validate, evaluator.to_device = counted_validate, failing_to_device
    StopRequest.check = interrupted_check


def test_both_ranks_continue_after_an_evaluation_that_failed_on_one_or_all(tiny_args, tmp_path, run_ranks):
    flags = ["train_gpt2.py", "quickstart", *tiny_args, "--zero-stage", "1", "--out-dir"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    run_ranks(2, *flags, undisturbed)

    output = run_ranks(2, *flags, run, prepare=plant_failures)

    # Each rank that fails reports it: nobody else knows the reason.
    failed = "validation failed at step {} on rank {} (OutOfMemoryError: CUDA out of memory)"
    for step, rank, count in ((0, 0, 1), (0, 1, 1), (4, 0, 0), (4, 1, 1), (8, 0, 1), (8, 1, 0)):
        assert output.count(failed.format(step, rank)) == count, output

    # The signal of rank 1 is met in the step after the failure.
    assert "stopped by the time limit or another rank's signal at step 9; checkpoint saved" in output
    assert checkpoint.latest_step(run) == 9

    # Neither the failures nor the stop have changed a bit.
    run_ranks(2, *flags, run, "--resume", "auto")
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 0, 4, 8)
    assert same_bits(load_weights(run), load_weights(undisturbed))
