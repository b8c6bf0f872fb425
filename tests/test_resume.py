"""Resuming a run: it ends with the bits of a run that was never stopped. A run is never overwritten, and never continues
silently with other settings, other data or other weights."""

import itertools
import json
import shutil

import pytest
from helpers import (
    CPU,
    delete_checkpoints_after,
    load_curve,
    load_weights,
    parse_config,
    same_bits,
    train_quickstart,
)

import train_gpt2
from model import GPT, GPTConfig
from system.cli import UserError
from training import checkpoint, convert, evaluator
from training.open_model import open_model
from training.step import TrainStep
from training.stop import StopRequest

# ------------------------------------------------------------------------- stopped and resumed

# Where a SIGTERM reaches one process after another, and the step at which that process then saves the run. Each resumes
# from the one before. A place is a function that training calls, how often it is called first, and when the signal
# comes: before that call or after it. The run has 12 steps, and its steps 0, 4, 8 and 12 are validated in 8 batches.
INTERRUPTIONS = [
    # before the first step, which then is saved without its evaluation
    ("at the start", None, 0),
    # during an evaluation, then after it: then one step follows
    ("before", (evaluator, "to_device", 3), 0),
    ("after", (evaluator, "validate", 1), 1),
    # after the ranks have agreed on step 2: step 3 is the next to look, and step 4 the next to be saved
    ("before", (TrainStep, "set_learning_rates", 2), 4),
    # in the last batch of an evaluation
    ("before", (evaluator, "to_device", 8), 4),
    # after the last step before an evaluation: the evaluation is the next to look, before its first batch
    ("before", (TrainStep, "set_learning_rates", 4), 8),
    # in the evaluation of the last step: nothing but that is left
    ("before", (evaluator, "to_device", 10), 12),
]


def send_signal_at(monkeypatch, stop, timing, place) -> None:
    """Let `stop` have received a SIGTERM at a place of INTERRUPTIONS."""
    if place is None:
        stop.signal = "SIGTERM"
        return
    owner, name, call = place
    original = getattr(owner, name)
    calls = []

    def interrupted(*args, **kwargs):
        calls.append(name)
        if timing == "before" and len(calls) == call:
            stop.signal = "SIGTERM"
        result = original(*args, **kwargs)
        if timing == "after" and len(calls) == call:
            stop.signal = "SIGTERM"
        return result

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon --weights bfloat16"])
def test_an_interrupted_run_ends_with_the_same_bits(tiny_args, tmp_path, monkeypatch, flags):
    flags = [*tiny_args, *flags.split(), "--shuffle"]
    undisturbed = train_quickstart(flags, tmp_path / "undisturbed")
    resumed = tmp_path / "resumed"

    for timing, place, saved_step in INTERRUPTIONS:
        stop = StopRequest()
        with monkeypatch.context() as patch:
            send_signal_at(patch, stop, timing, place)
            train_quickstart(flags, resumed, "--resume", "auto", stop=stop)
        assert stop.signal and checkpoint.latest_step(resumed) == saved_step, (timing, place)
    train_quickstart(flags, resumed, "--resume", "auto")

    assert load_curve(resumed) == load_curve(undisturbed)
    assert same_bits(load_weights(resumed), load_weights(undisturbed))


def test_a_saved_step_is_evaluated_exactly_once(tiny_args, tmp_path, one_run, monkeypatch):
    """A step is saved before its evaluations, which may never end: then the resumed run makes them, and only then."""
    flags, run = [*tiny_args, "--save-every", "4"], tmp_path / "run"
    validate, validations = evaluator.validate, []

    def killed_at_step_8(*args):
        validations.append(args)
        if len(validations) == 3:
            raise KeyboardInterrupt
        return validate(*args)

    # The process dies in the evaluation of step 8, after that step was saved.
    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "validate", killed_at_step_8)
        with pytest.raises(KeyboardInterrupt):
            train_quickstart(flags, run)
    assert checkpoint.latest_step(run) == 8
    assert list(load_curve(run)) == list(range(8))

    # The evaluation is missing, so the resumed run makes it.
    train_quickstart(flags, run, "--resume", "auto")
    assert load_curve(run) == load_curve(one_run)

    # Resumed from step 8 once more, metrics.jsonl says that it was made.
    delete_checkpoints_after(run, 8)
    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "validate", lambda *args: validations.append(args) or validate(*args))
        validations.clear()
        train_quickstart(flags, run, "--resume", "auto")
    assert len(validations) == 1  # of step 12
    assert load_curve(run) == load_curve(one_run)
    assert same_bits(load_weights(run), load_weights(one_run))


def test_a_trapezoid_is_extended_as_if_planned_so(tiny_args, tmp_path):
    flags = [*tiny_args, *"--schedule trapezoid --cooldown 0.25 --warmup-steps 2".split()]
    planned = train_quickstart(flags, tmp_path / "planned", "--max-steps", "20")
    extended = train_quickstart(flags, tmp_path / "extended", "--max-steps", "12")

    delete_checkpoints_after(extended, 6)  # before the rate began to fall
    train_quickstart(flags, extended, "--max-steps", "20", "--resume", "auto")

    assert load_curve(extended) == load_curve(planned)
    assert same_bits(load_weights(extended, 20), load_weights(planned, 20))


# ------------------------------------------------------------------------- what is refused, and what is kept


def test_a_run_is_never_overwritten(tiny_args, tmp_path, trained_run):
    """Not by a new run, nor by one that resumes from an earlier step or from another run."""
    before = read_files(trained_run)
    fork = train_quickstart(tiny_args, tmp_path / "fork", "--resume", trained_run / "model_00006.pt")
    resumed_steps = ["model_00006.pt", fork / "model_00012.pt"]

    for resume in ("none", *(trained_run / path for path in resumed_steps)):
        with pytest.raises(UserError, match=r"--resume (auto|.*run/model_00012.pt)"):
            train_quickstart(tiny_args, trained_run, "--resume", resume, "--max-steps", "14")
    # A complete run has nothing to resume.
    train_quickstart(tiny_args, trained_run, "--resume", "auto")

    assert read_files(trained_run) == before
    assert same_bits(load_weights(fork), load_weights(trained_run))  # another folder may continue an earlier step


