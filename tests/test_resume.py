"""Resuming gives the bits of a run that was never stopped. A run is never overwritten, and never continues silently
with other settings, other data or other weights."""

import itertools
from unittest.mock import Mock, patch

import pytest
from corpora import read_bytes
from helpers import (
    CPU,
    delete_checkpoints_after,
    load_curve,
    load_metrics,
    load_weights,
    parse_config,
    refused,
    run_main,
    same_bits,
    same_weights,
    write_model,
    write_slowly,
)

import train_gpt2
from checkpoints import checkpoint
from checkpoints.open_model import open_model
from checkpoints.run_folder import latest_step, model_path
from evaluation import evaluations
from lifecycle import open_run
from lifecycle.stop import StopRequest
from model import GPT, GPTConfig
from system import machine
from system.files import lock_folder
from training import step
from training.loader import Loader
from training.step import Trainer

# ------------------------------------------------------------------------- stopped and resumed

# Where a SIGTERM reaches one process after another, which is as it calls a function for the n-th time; and the step
# that it then saves. Each resumes from the one before. Of the 12 steps of the run, 0, 4, 8 and 12 are validated, in 16
# batches.
INTERRUPTIONS = [
    (evaluations, "to_device", 3, 0),  # in an evaluation, which ends after 8 batches
    (step, "to_device", 1, 1),  # in a step before its gradients
    (open_run, "open_data", 1, 2),
    (Trainer, "set_step", 2, 3),  # before the evaluations; the first call is in building the trainer
    (Trainer, "update", 2, 6),  # after the gradients: the next step looks
    (evaluations, "to_device", 19, 12),  # in the evaluation of the last step
]


def send_signal_at(patch, stop, owner, name, call):
    """Let `stop` receive a SIGTERM at a place of INTERRUPTIONS."""
    function, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **kwargs):
        if next(calls) == call:
            stop.is_urgent = True
            stop.request("signal SIGTERM")
        return function(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon --param-dtype bfloat16"])
def test_an_interrupted_run_ends_with_the_same_bits(train, tmp_path, monkeypatch, flags):
    flags += " --micro-batch-size 2"
    undisturbed, resumed = train("undisturbed", flags), tmp_path / "resumed"

    for *place, saved_step in INTERRUPTIONS:
        stop = StopRequest()
        with monkeypatch.context() as patch:
            send_signal_at(patch, stop, *place)
            train(resumed, flags, "--resume auto", stop=stop)
        assert stop.is_requested() and latest_step(resumed) == saved_step, place
    train(resumed, flags, "--resume auto")

    assert load_curve(resumed) == load_curve(undisturbed)
    assert same_weights(resumed, undisturbed)


def test_a_resumed_step_is_evaluated_again(train, tmp_path, one_run, monkeypatch):
    """A step is saved before its evaluations, which may never end; a crash waits for the write."""
    run = tmp_path / "run"
    monkeypatch.setattr(checkpoint, "write", write_slowly(0.05))
    validate = Mock(side_effect=[{"val_loss": 5.5}, {"val_loss": 5.5}, KeyboardInterrupt])  # of steps 0, 4 and 8
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(evaluations, "validate", validate)
        train(run, "--save-every 4")
    assert latest_step(run) == 8 and list(load_curve(run)) == list(range(8))

    train(run, "--save-every 4 --resume auto")
    assert [load_curve(run)[step] for step in (8, 12)] == [load_curve(one_run)[step] for step in (8, 12)]
    assert same_weights(run, one_run)


def test_a_trapezoid_is_extended_as_if_planned_so(train):
    """With the scores of step 6, which is evaluated only because it was the last."""
    flags = "--schedule trapezoid --cooldown 0.25 --val-every 5"
    planned = train("planned", flags, "--max-steps 10")
    run = train("run", flags, "--max-steps 6 --cooldown 0")
    scored = load_curve(run)[6]

    train(run, flags, "--max-steps 10 --resume auto --allow-drift")

    assert load_curve(run)[6][1] == scored[1] is not None
    assert load_curve(run)[10] == load_curve(planned)[10]
    assert same_weights(run, planned, 10)


# ------------------------------------------------------------------------- a run is never overwritten


@pytest.fixture
def refuses(train, trained_run):
    """refuses("--resume none", names="...") -> trained_run's command with these flags fails with that message, and
    nothing in the folder has changed."""

    def check(*flags, names):
        before = read_bytes(trained_run)
        with refused(names):
            train(trained_run, *flags)
        assert read_bytes(trained_run) == before

    return check


def test_a_run_is_never_overwritten(train, trained_run, refuses):
    """Not by a new run, nor by one that resumes from an earlier step or from another run."""
    before = read_bytes(trained_run)
    fork = train("fork", "--resume", trained_run / "model_00006.pt")
    for resume in ("none", trained_run / "model_00006.pt", fork / "model_00012.pt"):
        refuses("--resume", resume, "--max-steps 14", names="--resume auto.*--out-dir")

    # A complete run has nothing to resume, and no end to change. Another folder may continue an earlier step, or the
    # last one.
    for steps in (12, 11):
        train(trained_run, "--resume auto --max-steps", steps)
    assert read_bytes(trained_run) == before
    copy = train("copy", "--resume", fork / "model_00012.pt")
    for run in (fork, copy):
        assert same_weights(run, trained_run)


def test_a_second_process_of_a_run_is_refused(tiny_args, trained_run, capsys):
    flags = [*tiny_args, "--resume auto --max-steps 13 --out-dir", trained_run]
    with lock_folder(trained_run):
        assert run_main("train_gpt2.py", "quickstart", *flags) == 1
    assert str(trained_run) in capsys.readouterr().err and latest_step(trained_run) == 12


def test_a_newer_step_without_its_optimizer_is_trained_again(train, trained_run):
    weights = load_weights(trained_run)
    (trained_run / "optim_00012.pt").unlink()
    train(trained_run, "--resume auto")
    assert same_bits(load_weights(trained_run), weights)


@pytest.mark.parametrize("name, content", [("model", b"cut"), ("optim", b"cut"), ("optim", None)])
def test_weights_without_a_complete_step_are_never_overwritten(trained_run, refuses, name, content):
    """Damaged ones, and those of a folder pulled without --with-optimizer: the run would start again in their place."""
    for older in (3, 6, 9):
        model_path(trained_run, older).unlink()
    path = trained_run / f"{name}_00012.pt"
    path.unlink()
    if content:
        path.write_bytes(content)
    for resume in ("none", "auto"):
        refuses("--resume", resume, names=r"model_00012.pt.*--init-from")


def test_metrics_without_a_checkpoint_are_kept(train, trained_run):
    """A run killed before its first save, or whose checkpoints were deleted: the same command starts it again."""
    curve = (trained_run / "metrics.jsonl").read_text()
    delete_checkpoints_after(trained_run, -1)

    train(trained_run, "--resume auto")

    (kept,) = trained_run.glob("metrics_old_*.jsonl")
    assert kept.read_text() == curve


# ------------------------------------------------------------------------- what has changed (and test_bad_input.py)


def test_another_batch_goes_on_after_what_was_read(train, trained_run):
    """Not after its own number of steps: here 6 steps have read 8 sequences each, and the later ones read 16."""
    flags = "--total-batch-size 512 --allow-drift"
    with patch.object(Loader, "step_sequences", autospec=True, side_effect=Loader.step_sequences) as read:
        run = train("b", flags, "--resume", trained_run / "model_00006.pt")
        assert [call.args[1:3] for call in read.call_args_list[:2]] == [(48, 16), (64, 16)]
        assert checkpoint.read_train_state(run)["sequences"] == 6 * 8 + 6 * 16

        read.reset_mock()
        train(run, flags, "--max-steps 14 --resume auto")
    assert read.call_args_list[0].args[1:3] == (144, 16)
    assert [row["tokens"] for row in load_metrics(run)] == list(range(48 * 32, 176 * 32 + 1, 512))


def test_other_data_are_refused(tiny_data, refuses):
    (tiny_data / "tiny_train_000003.npy").unlink()
    refuses("--resume auto --max-steps 14", names="training data: ")


def test_weights_of_another_run_are_refused(trained_run, refuses):
    write_model(trained_run, GPT(GPTConfig(n_layer=1, n_embd=12)), 12)
    refuses("--resume auto --max-steps 14", names="different networks")


def test_what_changes_is_accepted_and_printed(train, trained_run, monkeypatch, capsys):
    """A setting that shapes the result, with --allow-drift, one that shapes nothing, and the software."""
    monkeypatch.setattr(machine, "versions", lambda: {"torch": "9.9"})
    flags = "--max-steps 13 --val-every 5 --seed 1 --allow-drift --resume"
    train("fork", flags, trained_run / "model_00012.pt")
    output = capsys.readouterr().out
    # Of 12 steps the last rate is --min-lr. Of 13 it is 3e-4 + 27e-4 * (1 + cos(pi 10/11)) / 2.
    assert "learning rate of step 12: 0.0003 -> 0.000355" in output
    assert "seed: 1337 -> 1" in output and "--val-every: 4 -> 5" in output and "-> 9.9" in output


# ------------------------------------------------------------------------- from other weights


def test_a_run_keeps_the_weights_that_it_began_from(train, trained_run, capsys):
    """A run from random weights, and other weights that exist."""
    train(trained_run, "--resume auto --max-steps 13 --init-from", trained_run / "model_00003.pt")
    assert "resumed from" in capsys.readouterr().out
    assert checkpoint.read_train_state(trained_run)["config"]["init_from"] == "scratch"


def write_weights(folder, **network):
    """Write weights of step 7 into a folder; returns the GPTConfig of their network."""
    config = GPTConfig(block_size=32, vocab_size=320, n_head=2, n_embd=32, **network)
    write_model(folder, GPT(config), 7)
    return config


def test_weights_bring_their_vocabulary(train, tmp_path):
    """As OpenAI's, of 50,257 tokens, into presets of 50,304. All else is as the --model flags have it."""
    network = write_weights(tmp_path, n_layer=2)
    run = train("run", "--init-from", tmp_path, "--max-steps 1")
    assert open_model(run).config == network


def test_without_flags_weights_bring_their_network(tiny_data, tmp_path):
    """Whatever the preset's: here another shape. Start, resume by the same command, resume by the checkpoint alone. The
    run remembers where they came from: else it would be judged by the public runs of its preset."""
    network = write_weights(tmp_path, n_layer=3, positions="rope", norm="rmsnorm")
    run, begin = tmp_path / "run", ["finetune", "--init-from", tmp_path, "--data-dir", tiny_data]
    more = "--sequence-length 32 --total-batch-size 256 --sample-every 0 --no-compile --out-dir"

    for words in (
        [*begin, "--max-steps 2"],
        [*begin, "--max-steps 4 --resume auto"],
        ["--max-steps 5 --resume", run / "model_00004.pt"],
    ):
        train_gpt2.open_and_train(parse_config(*words, more, run), CPU, StopRequest())

    assert open_model(run).config == network and list(load_curve(run)) == list(range(6))
    assert checkpoint.read_train_state(run)["config"]["init_from"] == str(tmp_path)
