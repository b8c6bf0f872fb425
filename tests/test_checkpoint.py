"""Checkpoints (training/checkpoint): complete or absent, the newest complete one counts, a failed write loses nothing.

Most tests write real files of a tiny model with `save`, damage or delete some of them, and ask what is left.
"""

import dataclasses
import json
import re
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import same_bits

from model import GPT, GPTConfig
from system.cli import UserError
from training import checkpoint
from training.open_model import open_model

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=16)

# A network unlike GPT-2's: a checkpoint must also keep the fields that GPT-2 has no use for.
MODERN = dataclasses.replace(
    SMALL, tied_head=False, positions="half_rope", norm="rmsnorm_gain", head_bias=True, n_layer=2
)


def save(folder: Path, step: int, model: GPT | None = None, keep: int = 0) -> GPT:
    """Write a complete checkpoint of `model` (default: a new small one) and wait for it; returns the model."""
    model = model or GPT(SMALL)
    state = {
        "step": step,
        "max_steps": 9,
        "config": {},
        "data": "",
        "record": {},
        "evaluated": False,
        "optimizers": [torch.ones(3)],
    }
    with checkpoint.CheckpointWriter(folder, keep) as writer:
        writer.save(step, checkpoint.model_file(model, step), state)
        writer.wait()
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


@pytest.mark.parametrize("key", checkpoint.TRAIN_STATE_TYPES)
def test_a_train_state_without_a_key_is_refused(tmp_path, key):
    save(tmp_path, 7)
    state = checkpoint.read_file(tmp_path / "optim_00007.pt")
    del state[key]
    checkpoint.write(tmp_path / "optim_00007.pt", state)

    with pytest.raises(UserError, match=r"is not the train state of a run; .*--init-from"):
        checkpoint.read_train_state(tmp_path)


@pytest.mark.parametrize("change", [{"max_steps": 10**400}, {"max_steps": 0}, {"step": -1}])
def test_an_impossible_step_is_refused(tmp_path, change):
    save(tmp_path, 7)
    state = checkpoint.read_file(tmp_path / "optim_00007.pt")
    checkpoint.write(tmp_path / "optim_00007.pt", state | change)

    with pytest.raises(UserError, match="is not the train state of a run"):
        checkpoint.read_train_state(tmp_path)


def test_a_tied_head_is_stored_once(tmp_path):
    save(tmp_path, 1)

    weights_size = GPT(SMALL).num_params() * 4  # bytes of float32
    assert (tmp_path / "model_00001.pt").stat().st_size < weights_size + 20_000


def test_only_a_complete_step_counts(tmp_path):
    assert checkpoint.latest_step(tmp_path) is None
    assert checkpoint.latest_step(tmp_path / "missing") is None

    # the newest step has no optimizer file
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "optim_00003.pt").unlink()
    assert checkpoint.latest_step(tmp_path) == 2

    # the model of the step before it is cut off, anywhere
    complete = (tmp_path / "model_00002.pt").read_bytes()
    for tenth in range(10):
        (tmp_path / "model_00002.pt").write_bytes(complete[: len(complete) * tenth // 10])
        assert checkpoint.latest_step(tmp_path) == 1
        with pytest.raises(UserError, match="damaged or truncated"):
            open_model(tmp_path / "model_00002.pt")
    assert open_model(tmp_path).config == SMALL


def test_the_newest_model_is_found_by_number(tmp_path):
    """Not by name: model_100000.pt sorts before model_99999.pt."""
    for step in (99_999, 100_000):
        save(tmp_path, step)
        (tmp_path / f"optim_{step:05d}.pt").unlink()

    _, facts = checkpoint.load(tmp_path)

    assert facts["step"] == 100_000


def test_resuming_needs_both_files(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "optim_00004.pt").unlink()

    with pytest.raises(UserError, match=r"optim_00004\.pt.*--init-from"):
        checkpoint.read_train_state(tmp_path / "model_00004.pt")


def test_missing_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "model_00001.pt"

    def assert_refused(message, name=path):
        with pytest.raises(UserError, match=message):
            open_model(name)

    assert_refused("no checkpoint")
    assert_refused("no complete checkpoint", tmp_path)

    # another program's checkpoint: the message names the command that converts it
    torch.save({"model": {"w": torch.ones(2)}, "config": {}}, path)
    assert_refused(r"hub\.py import")

    # a zip archive of something else
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("hello", "not a checkpoint")
    assert_refused("cannot read")


def test_weights_must_fit_their_config(tmp_path):
    def save_with_config(**changes):
        content = checkpoint.model_file(GPT(SMALL), 1)
        content["config"] |= changes
        checkpoint.write(tmp_path / "model_00001.pt", content)

    # another shape
    save_with_config(n_embd=32)
    with pytest.raises(UserError, match="do not fit"):
        open_model(tmp_path)

    # a setting of somebody's own model.py, whose weights have the same shapes
    save_with_config(attention="sigmoid")
    with pytest.raises(UserError, match=r"unknown setting attention.*the model\.py it was made with"):
        open_model(tmp_path)


# ------------------------------------------------------------------------- writing


def test_the_newest_and_the_best_are_kept(tmp_path):
    """By the metrics of the run; step 1 was better, but is not complete."""
    losses = {1: 1.0, 2: 2.0, 3: 4.0, 5: 3.0}
    rows = [json.dumps({"step": step, "val_loss": loss}) for step, loss in losses.items()]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    for step in range(2, 7):
        save(tmp_path, step, keep=2)

    assert checkpoint.complete_steps(tmp_path) == [2, 5, 6]
    assert len(list(tmp_path.glob("*.pt"))) == 6


def test_the_optimizer_is_written_before_the_model(tmp_path, monkeypatch):
    """A model file says that its step is complete, so it must be the last one."""
    written = []
    monkeypatch.setattr(checkpoint, "write", lambda path, content: written.append(path.name))

    save(tmp_path, 5)

    assert written == ["optim_00005.pt", "model_00005.pt"]


def test_a_save_deletes_what_a_killed_write_left(tmp_path):
    (tmp_path / ".model_00004.pt.part").write_bytes(b"half")

    save(tmp_path, 5)

    assert sorted(p.name for p in tmp_path.iterdir()) == ["model_00005.pt", "optim_00005.pt"]


def test_a_failed_write_loses_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real_save = torch.save

    def save_to_a_full_disk(content, f):
        real_save({"half": torch.zeros(10)}, f)
        raise OSError(28, "No space left on device")

    # the disk is full
    monkeypatch.setattr(torch, "save", save_to_a_full_disk)
    with pytest.raises(UserError, match=r"No space left.*newest complete step: 1"):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model_00001.pt", "optim_00001.pt"]

    # it is still full at the next save of a run, which reports it when it waits
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(3, checkpoint.model_file(GPT(SMALL), 3), {"step": 3})
    with pytest.raises(UserError, match="No space left"):
        writer.wait()
    assert writer.has_failed()

    # somebody has freed space: the same writer recovers
    monkeypatch.setattr(torch, "save", real_save)
    writer.save(4, checkpoint.model_file(GPT(SMALL), 4), {"step": 4})
    writer.wait()
    assert not writer.has_failed()
    assert checkpoint.complete_steps(tmp_path) == [1, 4]


def test_weights_that_are_not_finite_replace_nothing(tmp_path):
    save(tmp_path, 1)
    model = GPT(SMALL)
    with torch.no_grad():
        model.transformer.wpe.weight[0, 0] = torch.nan

    with pytest.raises(UserError) as error:
        save(tmp_path, 2, model, keep=1)

    # the fix is of this problem: a disk that is not full needs no space
    assert re.search(r"not finite.*wpe.*: 1", str(error.value))
    assert checkpoint.complete_steps(tmp_path) == [1]


def test_training_may_change_what_is_being_written(tmp_path):
    model = GPT(SMALL)
    before = model.lm_head.weight.detach().clone()
    writer = checkpoint.CheckpointWriter(tmp_path)

    writer.save(1, checkpoint.model_file(model, 1), {"step": 1})
    with torch.no_grad():
        model.lm_head.weight.zero_()
    writer.wait()

    assert torch.equal(open_model(tmp_path).lm_head.weight, before)
