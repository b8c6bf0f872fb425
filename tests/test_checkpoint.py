"""Whole or absent, newest complete wins, a failed write costs nothing."""

import dataclasses
import zipfile

import pytest
import torch

from model import GPT, GPTConfig
from system.cli import UserError
from training import checkpoint
from training.open_model import open_model

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=16)


def save(folder, step, model=None, keep=0, best=None):
    model = model or GPT(SMALL)
    state = {"max_steps": 9, "config": {}, "data": "", "record": {}, "rng": [], "optimizers": []}
    with checkpoint.CheckpointWriter(folder, keep) as writer:
        writer.save(step, checkpoint.model_file(model, step), {"step": step, "x": torch.ones(3), **state}, best)
        writer.wait()
    return model


OTHER = {"positions": "half_rope", "norm": "rmsnorm_gain", "head_bias": True, "value_tables": 1, "n_layer": 2}
OTHER = dataclasses.replace(SMALL, tied_head=False, **OTHER)


@pytest.mark.parametrize("config", [SMALL, OTHER])
def test_round_trip(tmp_path, config):
    model = save(tmp_path, 7, GPT(config))
    for path in (tmp_path, tmp_path / "model_00007.pt"):
        again = open_model(path)
        assert again.config == config and not again.training
        assert again.state_dict().keys() == model.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
        idx = torch.arange(16)[None]
        assert torch.equal(model.eval()(idx)[0], again(idx)[0])
        assert (again.lm_head.weight is again.transformer.wte.weight) == config.tied_head
    assert checkpoint.read_train_state(tmp_path)["step"] == 7


def test_a_tied_head_is_stored_once(tmp_path):
    save(tmp_path, 1)
    tied = GPT(SMALL).num_params() * 4
    assert (tmp_path / "model_00001.pt").stat().st_size < tied + 20_000


def test_only_a_complete_step_counts(tmp_path):
    assert checkpoint.latest_step(tmp_path) is None and checkpoint.latest_step(tmp_path / "missing") is None
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "optim_00003.pt").unlink()
    assert checkpoint.latest_step(tmp_path) == 2
    whole = (tmp_path / "model_00002.pt").read_bytes()
    for tenth in range(10):
        (tmp_path / "model_00002.pt").write_bytes(whole[: len(whole) * tenth // 10])
        assert checkpoint.latest_step(tmp_path) == 1
        with pytest.raises(UserError, match="damaged or truncated"):
            open_model(tmp_path / "model_00002.pt")
    assert open_model(tmp_path).config == SMALL


def test_the_newest_of_models_alone_is_found_by_number(tmp_path):
    for step in (99_999, 100_000):
        save(tmp_path, step)
        (tmp_path / f"optim_{step:05d}.pt").unlink()
    assert checkpoint.load(tmp_path)[1]["step"] == 100_000


def test_retention_keeps_newest_and_best(tmp_path):
    for step in range(1, 7):
        save(tmp_path, step, keep=2, best=2 if step >= 2 else None)
    assert checkpoint.complete_steps(tmp_path) == [2, 5, 6] and len(list(tmp_path.iterdir())) == 6


def test_a_failed_write_leaves_the_earlier_checkpoint_and_says_so(tmp_path, monkeypatch):
    save(tmp_path, 1)
    real = torch.save

    def full_disk(content, f):
        real({"half": torch.zeros(10)}, f)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UserError, match=r"No space left.*Newest complete step there: 1"):
        save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model_00001.pt", "optim_00001.pt"]
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(3, checkpoint.model_file(GPT(SMALL), 3), {"step": 3})
    with pytest.raises(UserError, match="No space left"):
        writer.wait()
    monkeypatch.setattr(torch, "save", real)  # somebody has freed space
    writer.save(4, checkpoint.model_file(GPT(SMALL), 4), {"step": 4})
    writer.wait()
    assert checkpoint.complete_steps(tmp_path) == [1, 4]


def test_training_may_change_what_is_being_written(tmp_path):
    model = GPT(SMALL)
    before = model.lm_head.weight.detach().clone()
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(1, checkpoint.model_file(model, 1), {"step": 1})
    with torch.no_grad():
        model.lm_head.weight.zero_()
    writer.wait()
    assert torch.equal(open_model(tmp_path).lm_head.weight, before)


def test_foreign_and_missing_files_are_named(tmp_path):
    def refused(says, path=tmp_path / "model_00001.pt"):
        with pytest.raises(UserError, match=says):
            open_model(path)

    def changed(**config):
        saved = checkpoint.model_file(GPT(SMALL), 1)
        saved["config"] |= config
        checkpoint.write(tmp_path / "model_00001.pt", saved)

    refused("no checkpoint")
    refused("no complete checkpoint", tmp_path)
    torch.save({"model": {"w": torch.ones(2)}, "config": {}}, tmp_path / "model_00001.pt")
    refused(r"hub\.py import")
    with zipfile.ZipFile(tmp_path / "model_00001.pt", "w") as z:
        z.writestr("hello", "not a checkpoint")
    refused("cannot read")
    changed(n_embd=32)
    refused("do not fit")
    changed(attention="sigmoid")  # someone's change to model.py, with weights of the same shapes
    refused(r"unknown setting attention.*the model\.py it was made with")


def test_resume_needs_both_files(tmp_path):
    save(tmp_path, 4)
    (tmp_path / "optim_00004.pt").unlink()
    with pytest.raises(UserError, match=r"optim_00004\.pt.*--init-from"):
        checkpoint.read_train_state(tmp_path / "model_00004.pt")
