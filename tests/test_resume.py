"""Resuming: the bits of a run never stopped; a run is never overwritten, nor gone on with other settings or data."""

import pytest
from helpers import delete_checkpoints_after, load_curve, load_weights, same_bits, train_quickstart

from system.cli import UserError
from tokens import shards
from tokens.loader import Loader
from training import checkpoint, evaluator
from training.step import TrainStep
from training.stop import StopRequest


class After(StopRequest):
    """A signal that the loop meets when it looks for the nth time, in an evaluation or after a step."""

    def __init__(self, n):
        self.n = n
        super().__init__()

    @property
    def signal(self):
        self.n -= 1
        return "SIGTERM" if self.n < 0 else None

    @signal.setter
    def signal(self, name):
        pass


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon", "--optimizer muon --weights bfloat16"])
def test_interrupted_and_resumed_equals_undisturbed_bit_for_bit(tiny_args, tmp_path, flags):
    flags = [*flags.split(), "--max-steps", "20", "--shuffle"]
    whole = train_quickstart(tiny_args, tmp_path / "whole", *flags)
    parts = tmp_path / "parts"
    for n in (5, 18, 1, 8, 16, 3):
        train_quickstart(tiny_args, parts, "--resume", "auto", *flags, stop=After(n))
    train_quickstart(tiny_args, parts, "--resume", "auto", *flags)
    assert load_curve(parts) == load_curve(whole)
    assert same_bits(load_weights(parts, 20), load_weights(whole, 20))


def test_a_stop_is_saved_under_its_own_step(tiny_args, tmp_path, monkeypatch):
    """The signal comes while step 5 trains: that update is made, step 6 is saved, and nothing is done twice."""
    whole, out, stop, steps = train_quickstart(tiny_args, tmp_path / "whole"), tmp_path / "out", StopRequest(), []

    def gradients(self, batch, asked, real=TrainStep.compute_gradients):
        steps.append(len(steps))
        if len(steps) == 6:
            stop.signal = "SIGTERM"
        return real(self, batch, stop.asked())

    monkeypatch.setattr(TrainStep, "compute_gradients", gradients)
    train_quickstart(tiny_args, out, stop=stop)
    assert steps == list(range(6)) == list(load_curve(out)) and checkpoint.latest_step(out) == 6
    stop.signal = None
    train_quickstart(tiny_args, out, "--resume", "auto")
    assert (
        len(steps) == 12 and load_curve(out) == load_curve(whole) and same_bits(load_weights(out), load_weights(whole))
    )


def test_what_was_saved_is_evaluated_once_whether_before_or_after(tiny_args, tmp_path, monkeypatch, capsys):
    """A save comes before the evaluations of its step, which may fail: then the resumed run makes them."""
    whole, out, calls = train_quickstart(tiny_args, tmp_path / "whole", "--save-every", "4"), tmp_path / "out", []

    def fails_at_8(*args, real=evaluator.validate):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as m:
        m.setattr(evaluator, "validate", fails_at_8)
        with pytest.raises(KeyboardInterrupt):
            train_quickstart(tiny_args, out, "--save-every", "4")
    assert checkpoint.latest_step(out) == 8 and list(load_curve(out)) == list(range(8))
    capsys.readouterr()
    train_quickstart(tiny_args, out, "--save-every", "4", "--resume", "auto")
    assert "    8/12 | val loss" in capsys.readouterr().out
    assert load_curve(out) == load_curve(whole)
    delete_checkpoints_after(out, 8)
    train_quickstart(
        tiny_args, out, "--save-every", "4", "--resume", "auto"
    )  # metrics.jsonl says that step 8 was evaluated
    assert "    8/12 | val loss" not in capsys.readouterr().out
    assert load_curve(out) == load_curve(whole) and same_bits(load_weights(out), load_weights(whole))


def test_a_trapezoid_is_extended_as_if_it_had_been_planned_so(tiny_args, tmp_path):
    flags = "--schedule trapezoid --cooldown 0.25 --warmup-steps 2".split()
    planned = train_quickstart(tiny_args, tmp_path / "planned", *flags, "--max-steps", "20")
    extended = train_quickstart(tiny_args, tmp_path / "extended", *flags, "--max-steps", "12")
    delete_checkpoints_after(extended, 6)  # before the rate began to fall
    train_quickstart(tiny_args, extended, *flags, "--max-steps", "20", "--resume", "auto")
    assert load_curve(extended) == load_curve(planned)
    assert same_bits(load_weights(extended, 20), load_weights(planned, 20))


def test_time_limit(tiny_args, tmp_path, capsys):
    run = train_quickstart(tiny_args, tmp_path / "run", "--time-limit", "0.0001", stop=StopRequest("0.0001"))
    said = capsys.readouterr().out
    assert checkpoint.latest_step(run) == 1 and "the time limit" in said and "same command and --resume auto" in said


def test_a_run_is_never_overwritten(tiny_args, tmp_path, capsys):
    run = train_quickstart(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match="--resume auto"):
        train_quickstart(tiny_args, run)
    with pytest.raises(UserError, match=r"never overwritten; continue it with --resume .*model_00012.pt"):
        train_quickstart(tiny_args, run, "--resume", run / "model_00006.pt")
    before = load_curve(run)
    train_quickstart(tiny_args, run, "--resume", "auto")
    assert "is complete" in capsys.readouterr().out and load_curve(run) == before
    fork = train_quickstart(tiny_args, tmp_path / "fork", "--resume", run / "model_00006.pt")
    assert same_bits(load_weights(fork), load_weights(run))


def test_weights_without_their_optimizer_are_never_overwritten(tiny_args, tmp_path):
    """A folder pulled without --with-optimizer, or whose only optimizer was cut: the preset's own run folder."""
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "3")
    (run / "optim_00003.pt").write_bytes(b"cut")
    for _ in range(2):
        before = {p: p.read_bytes() for p in run.iterdir() if p.name != ".lock"}
        for flags in ([], ["--resume", "auto"]):
            with pytest.raises(UserError, match=r"model_00003.pt has no whole optim_.*--init-from .*model_00003.pt"):
                train_quickstart(tiny_args, run, *flags)
        assert {p: p.read_bytes() for p in run.iterdir() if p.name != ".lock"} == before
        (run / "optim_00003.pt").unlink(missing_ok=True)
    train_quickstart(tiny_args, tmp_path / "on", "--init-from", run / "model_00003.pt", "--max-steps", "1")


def test_drift_is_refused_by_name_or_accepted(tiny_args, tiny_data, tmp_path, capsys):
    run = train_quickstart(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match=r"seed: 1337 -> 1.*--allow-drift"):
        train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "13", "--seed", "1")
    flags = ["--resume", run / "model_00012.pt", "--max-steps", "13", "--seed", "1", "--allow-drift"]
    train_quickstart(tiny_args, tmp_path / "fork", *flags)
    assert "by --allow-drift: seed: 1337 -> 1" in capsys.readouterr().out
    train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "13", "--val-every", "5")
    out = capsys.readouterr().out
    assert "val_every: 4 -> 5" in out and "learning rate at step 12 moves from" in out
    with pytest.raises(UserError, match=r"model.n_head: 2 -> 4. Restore them; its network cannot change"):
        train_quickstart(
            tiny_args, run, "--resume", "auto", "--max-steps", "14", "--model.n-head", "4", "--allow-drift"
        )
    (tiny_data / "tiny_train_000003.npy").unlink()
    with pytest.raises(UserError, match=r"data: the shards in .* are not those"):
        train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "14")


def test_an_older_run_over_small_shards_is_told_that_their_order_is_another(tiny_args, tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(Loader, "fingerprint", lambda data: shards.fingerprint(data.data_dir))
        run = train_quickstart(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match=r"data: the shards in .* would now be mixed in another way.*--allow-drift"):
        train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "14")
    train_quickstart(tiny_args, run, "--resume", "auto", "--max-steps", "14", "--allow-drift")


def test_the_best_of_the_saved_steps_is_kept(tiny_args, tmp_path, monkeypatch, capsys):
    """As in fine-tuning: val loss falls, then rises; its lowest point has no checkpoint, the next lowest has."""
    said = iter([5.0, 1.0, 2.0, 3.0, 4.0, 3.0, 3.5])
    monkeypatch.setattr(evaluator, "validate", lambda *args: next(said))
    run = train_quickstart(tiny_args, tmp_path / "run", "--val-every", "2", "--save-every", "4", "--keep", "1")
    assert checkpoint.complete_steps(run) == [4, 12]
    monkeypatch.setattr(
        evaluator, "validate", lambda *args: 9.0
    )  # never better than step 4, which the fork does not have
    fork = train_quickstart(tiny_args, tmp_path / "fork", "--resume", run / "model_00012.pt", "--max-steps", "14")
    assert "fork/model_00004" not in capsys.readouterr().out and checkpoint.complete_steps(fork) == [14]


def test_an_error_leaves_no_empty_run_folder(tiny_args, tmp_path, run_in_fork):
    out = tmp_path / "a" / "run"
    args = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", out, "--data-dir", tmp_path / "nope"]
    assert run_in_fork(*args, check=False).returncode == 1 and not out.exists()
    out.mkdir()
    (out / "notes").write_text("mine")
    assert run_in_fork(*args, check=False).returncode == 1 and (out / "notes").read_text() == "mine"
