"""Checkpoints (training/checkpoint): complete or absent, the newest complete one counts, a failed write loses nothing.

Most tests write real files of a tiny model with `save`, damage or delete some of them, and ask what is left.
"""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import same_bits, train_quickstart, write_jsonl

from lifecycle.metrics import best_steps
from model import GPT, GPTConfig
from system.cli import UserError
from weights import checkpoint, names
from weights.open_model import open_and_describe, open_model

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=16)

# A network unlike GPT-2's: a checkpoint must also keep the fields that GPT-2 has no use for.
MODERN = dataclasses.replace(SMALL, tied_head=False, positions="rope", norm="rmsnorm", n_layer=2)


def save(folder: Path, step: int, model: GPT | None = None, keep: int = 0) -> GPT:
    """Write a complete checkpoint of `model` (default: a new small one) and wait for it; returns the model."""
    model = model or GPT(SMALL)
    state = {"step": step, "max_steps": 9, "config": {}, "data": ""}
    state["optimizers"] = [torch.ones(3)]
    writer = checkpoint.CheckpointWriter(folder, keep, best=partial(best_steps, folder))
    writer.save(step, checkpoint.model_file(model, step), state)
    writer.finish()
    return model


# ------------------------------------------------------------------------- reading


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_a_model_comes_back_as_it_was(tmp_path, config):
    saved = save(tmp_path, 7, GPT(config)).eval()
    idx = torch.arange(16)[None]

    for path in (tmp_path, tmp_path / "model_00007.pt"):
        loaded = open_model(path)

        assert loaded.config == config and not loaded.training
        assert same_bits(loaded.state_dict(), saved.state_dict())
        assert torch.equal(saved(idx)[0], loaded(idx)[0])
        assert (loaded.lm_head.weight is loaded.transformer.wte.weight) == config.tied_head


def test_the_train_state_comes_back(tmp_path):
    save(tmp_path, 7)

    for path in (tmp_path, tmp_path / "model_00007.pt", tmp_path / "optim_00007.pt"):
        state = checkpoint.read_train_state(path)

        assert state["step"] == 7 and torch.equal(state["optimizers"][0], torch.ones(3))
        assert state["model_file"] == tmp_path / "model_00007.pt"


@pytest.mark.parametrize("change", [{"max_steps": 10**400}, {"max_steps": 0}, {"step": -1}, {"data": None}], ids=str)
def test_a_train_state_of_another_kind_is_refused(tmp_path, change):
    """A step that is impossible, or an entry of another type."""
    save(tmp_path, 7)
    state = checkpoint.read_file(tmp_path / "optim_00007.pt")
    checkpoint.write(tmp_path / "optim_00007.pt", state | change)

    with pytest.raises(UserError, match=r"optim_00007.pt is not"):
        checkpoint.read_train_state(tmp_path)


def test_a_tied_head_is_stored_once(tmp_path):
    save(tmp_path, 1)

    weights_size = GPT(SMALL).num_params() * 4  # bytes of float32
    assert (tmp_path / "model_00001.pt").stat().st_size < weights_size + 20_000


def test_only_a_complete_step_counts(tmp_path):
    assert names.latest_step(tmp_path) is None
    assert names.latest_step(tmp_path / "missing") is None

    # the newest step has no optimizer file
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "optim_00003.pt").unlink()
    assert names.latest_step(tmp_path) == 2

    # the model of the step before it is cut off, anywhere
    complete = (tmp_path / "model_00002.pt").read_bytes()
    for tenth in range(10):
        (tmp_path / "model_00002.pt").write_bytes(complete[: len(complete) * tenth // 10])
        assert names.latest_step(tmp_path) == 1
        with pytest.raises(UserError, match="damaged or truncated"):
            open_model(tmp_path / "model_00002.pt")
    assert open_model(tmp_path).config == SMALL


def test_a_damaged_checkpoint_that_is_passed_over_is_named(tmp_path, capsys):
    """In the description, which infer.py prints on stderr: stdout has the text alone."""
    save(tmp_path, 1)
    capsys.readouterr()
    (tmp_path / "model_00002.pt").write_bytes(b"PK")
    _, description = open_and_describe(tmp_path)
    assert "model_00001.pt" in description and "model_00002.pt is damaged" in description
    assert capsys.readouterr().out == ""


def test_the_newest_model_is_found_by_number(tmp_path):
    """Not by name: model_100000.pt sorts before model_99999.pt."""
    for step in (99_999, 100_000):
        save(tmp_path, step)
        (tmp_path / f"optim_{step:05d}.pt").unlink()

    _, facts = checkpoint.load(tmp_path)

    assert facts["step"] == 100_000


@pytest.mark.parametrize("change", [{"n_embd": 32}, {"n_layer": 10**6}, {"attention": "sigmoid"}], ids=str)
def test_weights_must_fit_their_config(tmp_path, change):
    """Not: of another shape, too few, with a setting of somebody's own model.py, or in another precision."""
    content = checkpoint.model_file(GPT(SMALL), 1)
    checkpoint.write(tmp_path / "model_00001.pt", content | {"config": content["config"] | change})

    with pytest.raises(UserError, match=r"model_00001\.pt.*(do not fit|attention)"):
        open_model(tmp_path)

    checkpoint.write(tmp_path / "model_00001.pt", checkpoint.model_file(GPT(SMALL).half(), 1))
    with pytest.raises(UserError, match="float32"):
        open_model(tmp_path)


# ------------------------------------------------------------------------- writing


def test_the_newest_and_the_best_are_kept(tmp_path):
    """By the metrics of the run; step 1 was better, but was killed while it was written."""
    (tmp_path / ".model_00001.pt.part").write_bytes(b"half")
    losses = {1: 1.0, 2: 2.0, 3: 4.0, 4: None, 5: 3.0, 6: None}
    rows = [json.dumps({"step": step, "val_loss": loss}) for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    for step in range(2, 7):
        save(tmp_path, step, keep=2)

    assert names.complete_steps(tmp_path) == [2, 5, 6]
    assert not names.is_complete(tmp_path / "model_00099.pt")  # --keep has deleted it since it was listed
    assert len(list(tmp_path.iterdir())) == 6 + 1  # and the metrics


def test_what_cannot_be_compared_is_not_deleted(tmp_path):
    """Step 1 has no line, as if metrics.jsonl had not been copied; step 2 was measured on other data; step 3 is worse
    than step 4."""
    rows = [
        {"step": 2, "val_loss": 1.0, "val_set": "other"},
        {"step": 3, "val_loss": 4.0},
        {"step": 4, "val_loss": 3.0},
    ]
    write_jsonl(tmp_path / "metrics.jsonl", [*rows, {"step": 5}, {"step": 6}])
    for step in range(1, 7):
        save(tmp_path, step, keep=1)

    assert names.complete_steps(tmp_path) == [1, 2, 4, 6]


def test_leftovers_of_a_save_go_before_the_next(tmp_path, monkeypatch):
    """An optimizer file whose model file could not be written, or whose run was killed before. One that is older than a
    complete step may be somebody's own."""
    save(tmp_path, 2)
    (tmp_path / "optim_00001.pt").write_bytes(b"kept")
    (tmp_path / "optim_00003.pt").write_bytes(b"of a run that was killed")
    save(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.glob("optim_*.pt")) == [
        "optim_00001.pt", "optim_00002.pt", "optim_00004.pt",
    ]  # fmt: skip


def test_a_folder_that_was_moved_away_is_made_again(tmp_path):
    save(tmp_path / "log/run", 3)
    assert names.latest_step(tmp_path / "log/run") == 3


@pytest.fixture
def disk_calls(monkeypatch) -> list[str]:
    """What is synced, renamed and deleted from here on, in order."""
    calls = []

    def record(owner, name, describe):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(describe(*args)), function(*args))[1])

    record(os, "fsync", lambda descriptor: f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
    record(os, "replace", lambda old, new: f"rename to {new.name}")
    record(Path, "unlink", lambda path: f"delete {path.name}")
    return calls


def test_a_power_cut_at_any_moment_leaves_a_checkpoint(tmp_path, disk_calls):
    """A step is complete once its model is there, so the optimizer comes first, and goes last. Before each name, its
    content is on the disk, and before the next one the name."""
    save(tmp_path, 4)
    disk_calls.clear()

    save(tmp_path, 5, keep=1)

    names = f"sync {tmp_path.name}"
    assert disk_calls == [
        *["sync .optim_00005.pt.part", "rename to optim_00005.pt", names],
        *["sync .model_00005.pt.part", "rename to model_00005.pt", names],
        *["delete model_00004.pt", "delete optim_00004.pt"],
    ]


def test_metrics_are_on_disk_before_their_checkpoint(tiny_args, tmp_path, disk_calls):
    """A resumed run writes the lines after its checkpoint again, but not those before."""
    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1")
    assert disk_calls.index("sync metrics.jsonl") < disk_calls.index("sync .optim_00001.pt.part")


def test_a_failed_write_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real_save = torch.save

    def save_to_a_full_disk(content, f):
        real_save({"half": torch.zeros(10)}, f)
        raise OSError(28, "No space left on device")

    # the disk is full
    monkeypatch.setattr(torch, "save", save_to_a_full_disk)
    with pytest.raises(OSError, match=r"(?s)No space left.*newest complete step: 1"):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model_00001.pt", "optim_00001.pt"]

    # it is still full at the next save of a run, which reports it when it waits
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(3, checkpoint.model_file(GPT(SMALL), 3), {"step": 3})
    with pytest.raises(OSError, match="No space left"):
        writer.finish()

    # somebody has freed space: the same writer recovers
    monkeypatch.setattr(torch, "save", real_save)
    writer.save(4, checkpoint.model_file(GPT(SMALL), 4), {"step": 4})
    writer.finish()
    assert names.complete_steps(tmp_path) == [1, 4]


def test_a_run_without_its_last_checkpoint_has_failed(tiny_args, tmp_path, monkeypatch):
    def fail(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", fail)
    with pytest.raises(OSError, match=r"(?s)No space left.*newest complete step: None"):
        train_quickstart([*tiny_args, "--max-steps", "1"], tmp_path / "run")


def test_a_last_write_that_fails_once_is_tried_again(tiny_args, tmp_path, monkeypatch):
    """By the save at the end of the run: the weights are still in memory."""
    write, calls = checkpoint.write, []

    def fail_once(path, content):
        calls.append(path)
        if len(calls) == 1:
            raise OSError(5, "Input/output error")
        write(path, content)

    monkeypatch.setattr(checkpoint, "write", fail_once)
    run = train_quickstart([*tiny_args, "--max-steps", "1"], tmp_path / "run")
    assert names.complete_steps(run) == [1]


def test_an_error_of_the_disk_is_not_blamed_on_the_file(one_run, monkeypatch):
    """It may be gone at the next start, and what it says of the file is not true."""

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(OSError, match="Input/output"):
        checkpoint.read_train_state(one_run)


def test_weights_that_are_not_finite_replace_nothing(tmp_path):
    save(tmp_path, 1)
    model = GPT(SMALL)
    with torch.no_grad():
        model.transformer.wpe.weight[0, 0] = torch.nan

    with pytest.raises(UserError, match=r"(?s)wpe.*: 1"):
        save(tmp_path, 2, model, keep=1)

    assert names.complete_steps(tmp_path) == [1]


def test_training_may_change_what_is_being_written(tmp_path):
    model = GPT(SMALL)
    before = model.lm_head.weight.detach().clone()
    writer = checkpoint.CheckpointWriter(tmp_path)

    writer.save(1, checkpoint.model_file(model, 1), {"step": 1})
    with torch.no_grad():
        model.lm_head.weight.zero_()
    writer.finish()

    assert torch.equal(open_model(tmp_path).lm_head.weight, before)
