"""Resuming a run: it ends with the bits of a run that was never stopped, also if an earlier version began it. A run is
never overwritten, and never continues silently with other settings or other data."""

import itertools
import json

import pytest
from helpers import delete_checkpoints_after, load_curve, load_weights, same_bits, train_quickstart

from system.cli import UserError
from training import checkpoint, evaluator
from training.step import TrainStep
from training.stop import StopRequest


def run_files(run) -> dict:
    """The content of every file of a run folder but the lock."""
    return {path: path.read_bytes() for path in run.iterdir() if path.name != ".lock"}


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


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon", "--optimizer muon --weights bfloat16"])
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


def test_a_signal_during_a_step_completes_it(tiny_args, tmp_path, monkeypatch):
    """The signal comes while step 5 trains: that update is made, step 6 is saved, and nothing is done twice."""
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    stop, trained_steps = StopRequest(), []
    compute_gradients = TrainStep.compute_gradients

    def interrupted(train_step, batch, stop_requested):
        trained_steps.append(len(trained_steps))
        if len(trained_steps) == 6:
            stop.signal = "SIGTERM"
        # asked anew: the loop asked just before the signal came
        return compute_gradients(train_step, batch, stop.is_requested())

    monkeypatch.setattr(TrainStep, "compute_gradients", interrupted)
    train_quickstart(tiny_args, run, stop=stop)
    assert trained_steps == list(range(6))
    assert list(load_curve(run)) == list(range(6))
    assert checkpoint.latest_step(run) == 6

    stop.signal = None
    train_quickstart(tiny_args, run, "--resume", "auto")
    assert len(trained_steps) == 12
    assert load_curve(run) == load_curve(undisturbed)
    assert same_bits(load_weights(run), load_weights(undisturbed))


def test_a_saved_step_is_evaluated_exactly_once(tiny_args, tmp_path, monkeypatch, capsys):
    """A step is saved before its evaluations, which may never end: then the resumed run makes them, and only then."""
    flags = [*tiny_args, "--save-every", "4"]
    undisturbed, run = train_quickstart(flags, tmp_path / "undisturbed"), tmp_path / "run"
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
    capsys.readouterr()
    train_quickstart(flags, run, "--resume", "auto")
    assert "    8/12 | val loss" in capsys.readouterr().out
    assert load_curve(run) == load_curve(undisturbed)

    # Resumed from step 8 once more, metrics.jsonl says that it was made.
    delete_checkpoints_after(run, 8)
    train_quickstart(flags, run, "--resume", "auto")
    assert "    8/12 | val loss" not in capsys.readouterr().out
    assert load_curve(run) == load_curve(undisturbed)
    assert same_bits(load_weights(run), load_weights(undisturbed))


def test_a_trapezoid_is_extended_as_if_planned_so(tiny_args, tmp_path):
    flags = [*tiny_args, *"--schedule trapezoid --cooldown 0.25 --warmup-steps 2".split()]
    planned = train_quickstart(flags, tmp_path / "planned", "--max-steps", "20")
    extended = train_quickstart(flags, tmp_path / "extended", "--max-steps", "12")

    delete_checkpoints_after(extended, 6)  # before the rate began to fall
    train_quickstart(flags, extended, "--max-steps", "20", "--resume", "auto")

    assert load_curve(extended) == load_curve(planned)
    assert same_bits(load_weights(extended, 20), load_weights(planned, 20))


def test_a_time_limit_saves_after_at_least_one_step(tiny_args, tmp_path):
    run = train_quickstart(tiny_args, tmp_path / "run", "--time-limit", "0.0001", stop=StopRequest("0.0001"))

    assert checkpoint.latest_step(run) == 1


def test_a_time_limit_of_zero_is_none(tiny_args, tmp_path):
    run = train_quickstart(tiny_args, tmp_path / "run", "--time-limit", "0", stop=StopRequest("0"))

    assert checkpoint.latest_step(run) == 12


# ------------------------------------------------------------------------- what is refused, and what is kept


def test_a_run_is_never_overwritten(tiny_args, tmp_path):
    run = train_quickstart(tiny_args, tmp_path / "run")
    curve = load_curve(run)

    # Not by a new run, nor by one that resumes from an earlier step.
    with pytest.raises(UserError, match="--resume auto"):
        train_quickstart(tiny_args, run)
    with pytest.raises(UserError, match=r"never overwritten; continue it with --resume .*model_00012.pt"):
        train_quickstart(tiny_args, run, "--resume", run / "model_00006.pt")

    # A complete run has nothing to resume.
    train_quickstart(tiny_args, run, "--resume", "auto")
    assert load_curve(run) == curve

    # Nor by another run, whatever its step.
    other = train_quickstart(tiny_args, tmp_path / "other", "--max-steps", "3")
    with pytest.raises(UserError, match="never overwritten"):
        train_quickstart(tiny_args, other, "--resume", run / "model_00012.pt", "--max-steps", "14")

    # In another folder, an earlier step may be continued.
    fork = train_quickstart(tiny_args, tmp_path / "fork", "--resume", run / "model_00006.pt")
    assert same_bits(load_weights(fork), load_weights(run))


def test_weights_alone_are_never_overwritten(tiny_args, tmp_path):
    """A folder pulled without --with-optimizer, or whose only optimizer file was cut off: the preset's own folder."""
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "3")
    optim_path = checkpoint.optim_path(run, 3)
    refusal = r"model_00003.pt has no complete optim_.*--init-from .*model_00003.pt"

    def assert_refused_and_untouched():
        before = run_files(run)
        for flags in ([], ["--resume", "auto"]):
            with pytest.raises(UserError, match=refusal):
                train_quickstart(tiny_args, run, *flags)
        assert run_files(run) == before

    optim_path.write_bytes(b"cut")
    assert_refused_and_untouched()
    optim_path.unlink()
    assert_refused_and_untouched()

    # The message's fix works.
    train_quickstart(tiny_args, tmp_path / "on", "--init-from", run / "model_00003.pt", "--max-steps", "1")


def test_drift_is_refused_by_name_or_accepted(tiny_args, tiny_data, tmp_path, capsys):
    run = train_quickstart(tiny_args, tmp_path / "run")
    longer = ["--resume", "auto", "--max-steps", "13"]

    # A setting that shapes the result: refused, unless --allow-drift accepts it.
    with pytest.raises(UserError, match=r"seed: 1337 -> 1.*--allow-drift"):
        train_quickstart(tiny_args, run, *longer, "--seed", "1")
    flags = ["--resume", run / "model_00012.pt", "--max-steps", "13", "--seed", "1", "--allow-drift"]
    train_quickstart(tiny_args, tmp_path / "fork", *flags)
    assert "seed: 1337 -> 1" in capsys.readouterr().out

    # A setting that does not: printed. So is what becomes of the learning rate.
    train_quickstart(tiny_args, run, *longer, "--val-every", "5")
    output = capsys.readouterr().out
    assert "val_every: 4 -> 5" in output
    assert "learning rate at step 12 moves from" in output

    # The network cannot change at all.
    longer = ["--resume", "auto", "--max-steps", "14"]
    with pytest.raises(UserError, match=r"model.n_head: 2 -> 4. Restore them; its network cannot change"):
        train_quickstart(tiny_args, run, *longer, "--model.n-head", "4", "--allow-drift")

    # Nor can its vocabulary: config.json and the checkpoints would name a network that is not the one in them.
    with pytest.raises(UserError, match=r"model.vocab_size: 256 -> 512. Restore them; its network cannot change"):
        train_quickstart(tiny_args, run, *longer, "--model.vocab-size", "512", "--allow-drift")

    # Nor do the data change unnoticed.
    (tiny_data / "tiny_train_000003.npy").unlink()
    with pytest.raises(UserError, match=r"data: the shards in .* are not those"):
        train_quickstart(tiny_args, run, *longer)


def test_a_resumed_run_remembers_its_init_from(tiny_args, tmp_path):
    """Taken for a run from scratch, it would be judged by the public runs of its preset."""
    first = train_quickstart(tiny_args, tmp_path / "first", "--max-steps", "1")
    run = train_quickstart(tiny_args, tmp_path / "run", "--init-from", first, "--max-steps", "1")
    train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "2")

    assert json.loads((run / "config.json").read_text())["init_from"] == str(first)
    assert checkpoint.read_train_state(run)["config"]["init_from"] == str(first)


def test_the_best_of_the_saved_steps_is_kept(tiny_args, tmp_path, monkeypatch):
    """As in fine-tuning: val loss falls, then rises; its lowest point has no checkpoint, the next lowest has. Also if
    the run is killed and resumed after the evaluation."""
    val_losses = iter([5.0, 1.0, 2.0, 3.0, 4.0, 3.0, 3.5])  # of steps 0, 2, 4 ... 12; saved are 4, 8 and 12
    monkeypatch.setattr(evaluator, "validate", lambda *args: next(val_losses))
    flags = [*tiny_args, "--val-every", "2", "--save-every", "4", "--keep", "1"]
    compute_gradients = TrainStep.compute_gradients

    def killed_at_step_5(train_step, *args):
        if next(steps) == 5:
            raise KeyboardInterrupt
        return compute_gradients(train_step, *args)

    steps = itertools.count()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(TrainStep, "compute_gradients", killed_at_step_5)
        train_quickstart(flags, tmp_path / "run")
    run = train_quickstart(flags, tmp_path / "run", "--resume", "auto")
    assert checkpoint.complete_steps(run) == [4, 12]


def test_metrics_without_a_checkpoint_are_kept(tiny_args, tmp_path):
    """A run killed before its first save, or whose checkpoints were deleted: the same command starts it again."""
    run = train_quickstart(tiny_args, tmp_path / "run")
    curve = (run / "metrics.jsonl").read_text()
    delete_checkpoints_after(run, -1)

    train_quickstart(tiny_args, run, "--resume", "auto")

    (kept,) = run.glob("metrics_old_*.jsonl")
    assert kept.read_text() == curve


def test_an_error_leaves_no_empty_run_folder(tiny_args, tmp_path, run_in_fork):
    out = tmp_path / "a" / "run"
    command = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", out, "--data-dir", tmp_path / "nope"]

    assert run_in_fork(*command, check=False).returncode == 1
    assert not out.exists()

    # A folder that was there stays.
    out.mkdir()
    (out / "notes").write_text("mine")
    assert run_in_fork(*command, check=False).returncode == 1
    assert (out / "notes").read_text() == "mine"
