"""Resuming gives the bits of a run that was never stopped. A run is never overwritten, and never continues silently
with other settings, other data or other weights."""

import itertools
import json
import re
import threading
import time

import pytest
from corpora import read_bytes
from helpers import CPU, delete_checkpoints_after, load_curve, load_weights, parse_config, same_bits, train_quickstart

import train_gpt2
import training.step
from lifecycle import evaluator, resume
from lifecycle.stop import StopRequest
from model import GPT, GPTConfig
from system.cli import UserError
from system.files import lock_folder
from tokens.loader import Loader
from weights import checkpoint
from weights.names import latest_step, model_path
from weights.open_model import open_model

# ------------------------------------------------------------------------- stopped and resumed

# Where a SIGTERM reaches one process after another, which is as training calls a function for the n-th time; and the
# step at which that process then saves the run. Each resumes from the one before. Of the 12 steps of the run, 0, 4, 8
# and 12 are validated, in 8 batches.
INTERRUPTIONS = [
    # before the first step, which then is saved without its evaluation
    (resume, "open_data", 1, 0),
    # during an evaluation, then after it
    (evaluator, "to_device", 3, 0),
    (evaluator.Evaluator, "sample_text", 1, 0),
    # in a step before its update, in a step after its gradients: that step is done, and the next one looks
    (training.step, "to_device", 1, 0),
    (train_gpt2, "set_learning_rates", 2, 2),
    # in the last batch of an evaluation
    (evaluator, "to_device", 8, 4),
    # after the last step before an evaluation: the evaluation is the next to look, before its first batch
    (train_gpt2, "set_learning_rates", 4, 8),
    # in the evaluation of the last step: nothing but that is left
    (evaluator, "to_device", 10, 12),
]


def send_signal_at(patch, stop, owner, name, call) -> None:
    """Let `stop` receive a SIGTERM at a place of INTERRUPTIONS."""
    function, calls = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **kwargs):
        if next(calls) == call:
            stop.signal = "SIGTERM"
        return function(*args, **kwargs)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon --weights bfloat16"])
def test_an_interrupted_run_ends_with_the_same_bits(tiny_args, tmp_path, monkeypatch, flags):
    flags = [*tiny_args, *flags.split()]
    undisturbed, resumed = train_quickstart(flags, tmp_path / "undisturbed"), tmp_path / "resumed"

    for *place, saved_step in INTERRUPTIONS:
        stop = StopRequest()
        with monkeypatch.context() as patch:
            send_signal_at(patch, stop, *place)
            train_quickstart(flags, resumed, "--resume", "auto", stop=stop)
        assert stop.signal and latest_step(resumed) == saved_step, place
    train_quickstart(flags, resumed, "--resume", "auto")

    assert load_curve(resumed) == load_curve(undisturbed)
    assert same_bits(load_weights(resumed), load_weights(undisturbed))


def test_a_resumed_step_is_evaluated_again(tiny_args, tmp_path, one_run, monkeypatch):
    """A step is saved before its evaluations, which may never end."""
    flags, run = [*tiny_args, "--save-every", "4"], tmp_path / "run"
    validate, validations = evaluator.validate, []

    def killed_at_step_8(*args):
        validations.append(args)
        if len(validations) == 3:
            raise KeyboardInterrupt
        return validate(*args)

    # The process dies in the evaluation of step 8, after that step was saved.
    monkeypatch.setattr(evaluator, "validate", killed_at_step_8)
    with pytest.raises(KeyboardInterrupt):
        train_quickstart(flags, run)
    assert latest_step(run) == 8 and list(load_curve(run)) == list(range(8))

    # The evaluation is missing, so the resumed run makes it, and that of step 12.
    train_quickstart(flags, run, "--resume", "auto")
    assert load_curve(run) == load_curve(one_run) and len(validations) == 5

    # Resumed from step 8 once more, it is made again, to the same bits.
    delete_checkpoints_after(run, 8)
    train_quickstart(flags, run, "--resume", "auto")
    assert load_curve(run) == load_curve(one_run) and len(validations) == 7
    assert same_bits(load_weights(run), load_weights(one_run))


def test_a_trapezoid_is_extended_as_if_planned_so(tiny_args, tmp_path):
    flags = [*tiny_args, *"--schedule trapezoid --cooldown 0.25 --warmup-steps 2".split()]
    planned = train_quickstart(flags, tmp_path / "planned", "--max-steps", "20")
    extended = train_quickstart(flags, tmp_path / "extended", "--max-steps", "12")

    delete_checkpoints_after(extended, 6)  # before the rate began to fall
    train_quickstart(flags, extended, "--max-steps", "20", "--resume", "auto")

    assert load_curve(extended) == load_curve(planned)
    assert same_bits(load_weights(extended, 20), load_weights(planned, 20))


def test_a_run_that_goes_on_keeps_the_scores_of_its_end(tiny_args, tmp_path):
    """At step 6, which is evaluated only because it is the last; and if the run is stopped before its next step."""
    flags = [*tiny_args, "--schedule", "trapezoid", "--cooldown", "0"]
    run = train_quickstart(flags, tmp_path / "run", "--max-steps", "6")
    curve = load_curve(run)

    stopped = StopRequest()
    stopped.signal = "SIGTERM"
    train_quickstart(flags, run, "--max-steps", "9", "--resume", "auto", stop=stopped)
    assert load_curve(run) == curve

    train_quickstart(flags, run, "--max-steps", "9", "--resume", "auto")
    loss, val_loss, _ = load_curve(run)[6]
    assert loss is not None and val_loss == curve[6][1] is not None


def test_a_run_keeps_the_weights_that_it_began_from(tiny_args, trained_run, capsys):
    """A run from random weights, and other weights that exist."""
    flags = ["--resume", "auto", "--max-steps", "13", "--init-from", trained_run / "model_00003.pt"]
    train_quickstart(tiny_args, trained_run, *flags)
    assert "model_00003.pt is not used" in capsys.readouterr().out
    assert checkpoint.read_train_state(trained_run)["config"]["init_from"] == "scratch"


def test_a_time_limit_saves_after_at_least_one_step(tiny_args, tmp_path):
    run = train_quickstart(tiny_args, tmp_path / "run", stop=StopRequest("0.0001"))
    assert latest_step(run) == 1


# ------------------------------------------------------------------------- what is refused, and what is kept


def test_a_run_is_never_overwritten(tiny_args, tmp_path, trained_run):
    """Not by a new run, nor by one that resumes from an earlier step or from another run."""
    before = read_bytes(trained_run)
    fork = train_quickstart(tiny_args, tmp_path / "fork", "--resume", trained_run / "model_00006.pt")

    for start, fix in (
        ("none", "--resume auto"),
        (trained_run / "model_00006.pt", r"--resume .*run/model_00012\.pt"),
        (fork / "model_00012.pt", f"to continue the run in {fork}, add --out-dir {fork}"),
    ):
        with pytest.raises(UserError, match=fix):
            train_quickstart(tiny_args, trained_run, "--resume", start, "--max-steps", "14")
    # A complete run has nothing to resume.
    train_quickstart(tiny_args, trained_run, "--resume", "auto")

    assert read_bytes(trained_run) == before
    assert same_bits(load_weights(fork), load_weights(trained_run))  # another folder may continue an earlier step

    # Or the last one, which is then saved there, too.
    copy = train_quickstart(tiny_args, tmp_path / "copy", "--resume", fork / "model_00012.pt")
    assert same_bits(load_weights(copy), load_weights(trained_run))


def test_a_second_process_of_a_run_is_refused(tiny_args, trained_run, expect_failure):
    flags = ["quickstart", *tiny_args, "--out-dir", trained_run, "--resume", "auto", "--max-steps", "13"]
    with lock_folder(trained_run):
        expect_failure("train_gpt2.py", *flags, mentions=[str(trained_run)])
        expect_failure("train_gpt2.py", *flags, "--check", mentions=["in use"])  # before train.sh restarts anything
    assert latest_step(trained_run) == 12


def test_a_newer_step_that_is_damaged_is_named_by_a_fork(tiny_args, trained_run, tmp_path, capsys):
    """In the run's own folder it is refused, because it would be overwritten."""
    model_path(trained_run, 12).write_bytes(b"PK")
    with pytest.raises(UserError, match="is damaged"):
        train_quickstart(tiny_args, trained_run, "--resume", trained_run)
    capsys.readouterr()
    train_quickstart(tiny_args, tmp_path / "fork", "--resume", trained_run)
    assert f"not from {model_path(trained_run, 12)}, which is damaged" in capsys.readouterr().out


def test_a_newer_step_without_its_optimizer_is_named(tiny_args, trained_run, capsys):
    """Its steps are trained again, to the same bits."""
    weights = load_weights(trained_run)
    (trained_run / "optim_00012.pt").unlink()
    train_quickstart(tiny_args, trained_run, "--resume", "auto")
    assert f"not from {trained_run}/model_00012.pt" in capsys.readouterr().out
    assert same_bits(load_weights(trained_run), weights)


def test_weights_alone_are_never_overwritten(tiny_args, trained_run):
    """A folder pulled without --with-optimizer, or whose optimizer files were cut off: the preset's own folder."""
    optimizer_files = list(trained_run.glob("optim_*.pt"))

    for damage, start in itertools.product(["cut", "missing"], ["none", "auto"]):
        for path in optimizer_files:
            path.write_bytes(b"cut")
            if damage == "missing":
                path.unlink()
        before = read_bytes(trained_run)
        with pytest.raises(UserError, match=r"--init-from .*model_00012.pt"):
            train_quickstart(tiny_args, trained_run, "--resume", start)
        assert read_bytes(trained_run) == before


def test_a_damaged_checkpoint_is_named_and_not_overwritten(tiny_args, trained_run):
    """Neither beside complete steps nor alone: the run would start again in its place."""
    for last, fix in ((9, "resume from step 9"), (-1, "start again")):
        delete_checkpoints_after(trained_run, last)
        (trained_run / "model_00012.pt").write_bytes(b"cut")
        before = read_bytes(trained_run)
        with pytest.raises(UserError, match=rf"model_00012.pt is damaged \(3 bytes\).*{fix}"):
            train_quickstart(tiny_args, trained_run, "--resume", "auto")
        assert read_bytes(trained_run) == before


def test_an_error_between_two_updates_loses_no_step(tiny_args, tiny_data, tmp_path, one_run):
    """A shard that is damaged while the run reads it: all updates before are saved, and the run goes on from there."""
    flags, run = [*tiny_args, "--save-every", "0", "--no-shuffle"], tmp_path / "run"
    path = tiny_data / "tiny_train_000002.npy"
    content = path.read_bytes()
    read, whole = Loader._read_shard, train_quickstart(flags, tmp_path / "whole")

    def read_damaged(loader, index):
        if loader.paths[index] == path:
            path.write_bytes(content[:-100])
        return read(loader, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "_read_shard", read_damaged)
        with pytest.raises(UserError, match=r"tiny_train_000002\.npy"):
            train_quickstart(flags, run)
    assert latest_step(run) > 0

    path.write_bytes(content)
    train_quickstart(flags, run, "--resume", "auto")
    assert load_curve(run) == load_curve(whole)
    assert same_bits(load_weights(run), load_weights(whole))


def test_a_disk_that_hangs_does_not_keep_a_run_from_stopping(tiny_args, tiny_data, tmp_path, monkeypatch):
    """As a network volume does: the shard is a pipe to which nobody writes. What was done until then is saved."""
    hangs, stop = threading.Event(), StopRequest()
    read = Loader.read

    def read_or_hang(loader, sequences):
        if loader.paths[0].name.startswith("tiny_train") and hangs.is_set():
            stop.signal = "SIGTERM"
            time.sleep(60)
        return read(loader, sequences)

    def advance(*args):
        hangs.set()
        return set_learning_rates(*args)

    set_learning_rates = train_gpt2.set_learning_rates
    monkeypatch.setattr(Loader, "read", read_or_hang)
    monkeypatch.setattr(train_gpt2, "set_learning_rates", advance)
    monkeypatch.setattr("tokens.loader.PREFETCH_STEPS", 1)
    monkeypatch.setattr("tokens.prefetch.JOIN_SECONDS", 0.1)

    train_quickstart(tiny_args, tmp_path / "run", "--save-every", "0", "--max-steps", "1000", stop=stop)

    assert 0 < latest_step(tmp_path / "run") < 10


def test_another_batch_size_says_where_the_data_continue(tiny_args, trained_run, capsys):
    flags = ["--resume", "auto", "--max-steps", "13", "--total-batch-size", "128", "--allow-drift"]
    train_quickstart(tiny_args, trained_run, *flags)
    assert "at sequence 48, not at 96" in capsys.readouterr().out


def test_a_refusal_names_the_flags_that_restore(tiny_args, trained_run):
    with pytest.raises(UserError, match=r"--allow-drift; to restore them: --shuffle --max-lr 0.003 "):
        train_quickstart(tiny_args, trained_run, "--resume", "auto", "--max-lr", "1", "--no-shuffle")


def test_drift_is_refused_by_name_or_accepted(tiny_args, tiny_data, trained_run, tmp_path, capsys):
    flags = ["--resume", "auto", "--max-steps", "13"]

    # A setting that shapes the result: refused, unless --allow-drift accepts it.
    with pytest.raises(UserError, match=r"seed: 1337 -> 1.*--allow-drift"):
        train_quickstart(tiny_args, trained_run, *flags, "--seed", "1")
    flags = ["--resume", trained_run / "model_00012.pt", "--max-steps", "13", "--seed", "1", "--allow-drift"]
    train_quickstart(tiny_args, tmp_path / "fork", *flags)

    # A flag left out may not end the run early. A run that is complete has no end to change.
    with pytest.raises(UserError, match="max_steps: 12 -> 11"):
        train_quickstart(tiny_args, tmp_path / "b", "--resume", trained_run / "model_00006.pt", "--max-steps", "11")
    capsys.readouterr()
    train_quickstart(tiny_args, trained_run, "--resume", "auto", "--max-steps", "11")
    output = capsys.readouterr().out
    assert "complete at step 12" in output and "learning rate" not in output

    # The network cannot change at all, nor its vocabulary: the checkpoints would name a network that is not theirs.
    for flag, change in (("--model.n-head 4", "n_head: 2 -> 4"), ("--model.vocab-size 512", "vocab_size: 256 -> 512")):
        with pytest.raises(UserError, match=f"model.{change}"):
            train_quickstart(tiny_args, trained_run, *flags, *flag.split(), "--allow-drift")

    # A setting that does not shape the result is accepted and printed. So is what becomes of the learning rate.
    capsys.readouterr()
    train_quickstart(tiny_args, trained_run, *flags, "--val-every", "5")
    output = capsys.readouterr().out
    assert "--val-every 4 -> 5" in output
    assert re.search(r"step 12 .* 3\.000e-04 to 3\.5", output)  # from the end of 12 steps to almost that of 13

    # Nor do the data change unnoticed.
    (tiny_data / "tiny_train_000003.npy").unlink()
    with pytest.raises(UserError, match=f"data: .*{tiny_data}"):
        train_quickstart(tiny_args, trained_run, "--resume", "auto", "--max-steps", "14")


def test_metrics_without_a_checkpoint_are_kept(tiny_args, trained_run):
    """A run killed before its first save, or whose checkpoints were deleted: the same command starts it again."""
    curve = (trained_run / "metrics.jsonl").read_text()
    delete_checkpoints_after(trained_run, -1)

    train_quickstart(tiny_args, trained_run, "--resume", "auto")

    (kept,) = trained_run.glob("metrics_old_*.jsonl")
    assert kept.read_text() == curve


# ------------------------------------------------------------------------- from other weights


def test_weights_bring_their_vocabulary(tiny_args, tmp_path):
    """As OpenAI's, of 50,257 tokens, into presets of 50,304. All else is as the --model flags have it, or refused. A
    resumed run remembers where they came from: else it would be judged by the public runs of its preset."""
    network = GPTConfig(block_size=32, vocab_size=320, n_layer=2, n_head=2, n_embd=32)
    checkpoint.write(tmp_path / "model_00007.pt", checkpoint.model_file(GPT(network), 7))
    flags, begin = [*tiny_args, "--model.vocab-size", "384"], ["--init-from", tmp_path]

    run = train_quickstart(flags, tmp_path / "run", *begin, "--max-steps", "3")
    train_quickstart(flags, run, "--max-steps", "5", "--resume", "auto")

    assert open_model(run).config == network
    assert json.loads((run / "config.json").read_text())["init_from"] == str(tmp_path)
    assert checkpoint.read_train_state(run)["config"]["init_from"] == str(tmp_path)
    assert list(load_curve(run)) == list(range(6))
    with pytest.raises(UserError, match="n_layer is 2, not 3"):
        train_quickstart(flags, tmp_path / "other", *begin, "--model.n-layer", "3")


def test_without_flags_weights_bring_their_network(tiny_data, tmp_path):
    """Whatever the preset's: here another shape, and options of the speedrun."""
    network = GPTConfig(block_size=32, vocab_size=320, n_layer=3, n_head=2, n_embd=32, positions="rope", norm="rmsnorm")
    checkpoint.write(tmp_path / "model_00007.pt", checkpoint.model_file(GPT(network), 7))
    begin = ["finetune", "--init-from", tmp_path, "--data-dir", tiny_data, "--sequence-length", 32, "--no-compile"]

    def tune(*words):
        more = ["--total-batch-size", 256, "--sample-every", 0, "--out-dir", tmp_path / "run"]
        train_gpt2.train(parse_config(*words, *more), CPU, StopRequest())

    # Start, resume by the same command, resume by the checkpoint alone.
    tune(*begin, "--max-steps", 2)
    tune(*begin, "--max-steps", 4, "--resume", "auto")
    tune("--max-steps", 5, "--resume", tmp_path / "run" / "model_00004.pt")

    assert open_model(tmp_path / "run").config == network
    assert list(load_curve(tmp_path / "run")) == list(range(6))
