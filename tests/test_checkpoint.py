"""Checkpoints (checkpoints/checkpoint.py): complete or absent, the newest complete counts, a failed write loses
nothing.

Most tests write real files of a tiny model with `save`, damage or delete some of them, and ask what is left.
"""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from helpers import limit_file_size, refused, same_bits, write_model

from checkpoints import checkpoint
from checkpoints.open_model import open_and_describe, open_model
from checkpoints.run_folder import complete_steps, latest_step, optim_path
from evaluation import evaluations
from model import GPT, GPTConfig
from system.errors import UserError

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=1, n_head=2, n_embd=24)  # the default, 12 heads, would fit, too

# A network unlike GPT-2's: a checkpoint must also keep the fields that GPT-2 has no use for.
MODERN = replace(SMALL, tied_head=False, positions="rope", norm="rmsnorm", n_layer=2)


def save(folder, step, keep=0, writer=None, best=None):
    """Write a complete checkpoint of a small model, and wait for it."""
    writer = writer or checkpoint.CheckpointWriter(folder, keep)
    train_state = {"step": step, "max_steps": 10**6, "components": {"adamw": torch.ones(3)}}
    writer.save(step, checkpoint.model_file(GPT(SMALL), step), train_state, best)
    writer.finish()


# ------------------------------------------------------------------------- reading


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_what_was_saved_comes_back(tmp_path, config):
    """Also if training changes the weights while they are written."""
    model = GPT(config)
    saved = {name: weight.clone() for name, weight in model.state_dict().items()}
    writer = checkpoint.CheckpointWriter(tmp_path)
    writer.save(7, checkpoint.model_file(model, 7), {"step": 7, "components": {"adamw": torch.ones(3)}})
    with torch.no_grad():
        model.lm_head.weight.zero_()
    writer.finish()

    for path in (tmp_path, tmp_path / "model_00007.pt"):
        loaded = open_model(path)
        assert loaded.config == config and not loaded.training
        assert same_bits(loaded.state_dict(), saved)

    for path in (tmp_path, tmp_path / "model_00007.pt", tmp_path / "optim_00007.pt"):
        state = checkpoint.read_train_state(path)
        assert state["step"] == 7 and torch.equal(state["components"]["adamw"], torch.ones(3))
        assert state["model_file"] == tmp_path / "model_00007.pt"

    # A tied head is stored once.
    assert (tmp_path / "model_00007.pt").stat().st_size < model.num_params() * 4 + 20_000


def test_only_a_complete_step_counts(tmp_path, train):
    assert latest_step(tmp_path) is None and latest_step(tmp_path / "missing") is None
    for step in (1, 2, 99_999, 100_000):  # by number: model_100000.pt sorts before model_99999.pt
        save(tmp_path, step)
    assert latest_step(tmp_path) == 100_000

    # Killed between the two renames: only optim_*.pt is there. And the other way round, as pulled from the Hub.
    (tmp_path / "model_100000.pt").unlink()
    (tmp_path / "optim_99999.pt").unlink()
    assert latest_step(tmp_path) == 2
    assert checkpoint.read_train_state(tmp_path)["step"] == 2
    with refused(r"no optim_99999\.pt"):
        checkpoint.read_train_state(tmp_path / "model_99999.pt")

    # Cut off.
    complete = (tmp_path / "model_00002.pt").read_bytes()
    (tmp_path / "model_00002.pt").write_bytes(complete[: len(complete) // 2])
    assert latest_step(tmp_path) == 1 and open_and_describe(tmp_path)[1].endswith("step 1")

    # A run whose first save was killed between the renames begins anew.
    new = tmp_path / "new"
    new.mkdir()
    optim_path(new, 1).write_bytes(b"content")
    train(new, "--resume auto --max-steps 1")
    assert checkpoint.read_train_state(new)["step"] == 1


@pytest.mark.parametrize("change, named", [
    ({"n_embd": 32}, "do not fit"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"n_layer": 10**6}, "do not fit"),
    ({"n_head": None}, "n_head"),
    ({}, "wpe.* not finite"),
])  # fmt: skip
def test_weights_must_fit_their_config(tmp_path, change, named):
    """A setting that is None is left out."""
    content = checkpoint.model_file(GPT(SMALL), 1)
    config = {name: value for name, value in (content["config"] | change).items() if value is not None}
    if not change:
        content["model"]["transformer.wpe.weight"][0, 0] = torch.nan
    checkpoint.write(tmp_path / "model_00001.pt", content | {"config": config})
    with refused(rf"model_00001\.pt.*{named}"):
        open_model(tmp_path)


def test_pickled_code_is_refused_without_the_words_that_run_it(tmp_path):
    """With the command that imports the weights beside it."""
    path = tmp_path / "model_00001.pt"
    torch.save({"out": tmp_path}, path)
    with refused(f"hub.py import {path}") as error:
        checkpoint.load(path)
    assert "weights_only" not in str(error.value)  # torch's own words


def test_an_optimizer_file_of_another_layout_is_refused(tmp_path):
    torch.save({"format": 1, "step": 3, "optimizers": []}, tmp_path / "optim_00003.pt")
    write_model(tmp_path, GPT(SMALL), 3)
    with refused(r"optim_00003\.pt has the format 1 .*--init-from"):
        checkpoint.read_train_state(tmp_path)


# ------------------------------------------------------------------------- writing


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step, keep=2, best=2)
    assert complete_steps(tmp_path) == [2, 6, 7]
    assert len([*tmp_path.iterdir()]) == 2 * 3

    # Steps after the one that is saved stay: the run was resumed from an earlier one.
    save(tmp_path, 4, keep=1, best=2)
    assert complete_steps(tmp_path) == [2, 4, 6, 7]


def test_the_best_is_one_of_those_that_are_saved(train, monkeypatch):
    """Not step 2, whose val loss is the lowest."""
    losses = iter([9.0, 1.0, 3.0, 4.0, 5.0, 6.0, 7.0])  # of steps 0, 2, ..., 12
    monkeypatch.setattr(evaluations, "validate", lambda *args: {"val_loss": next(losses)})
    assert complete_steps(train("run", "--val-every 2 --save-every 4 --keep 1")) == [4, 12]


def test_the_last_model_of_a_finished_run_stays_when_the_run_goes_on(train):
    flags = "--keep 1 --save-every 1 --val-every 0 --max-steps"
    train("run", flags, 2)
    run = train("run", "--resume auto", flags, 5)
    assert sorted(path.name for path in run.glob("*.pt")) == ["model_00002.pt", "model_00005.pt", "optim_00005.pt"]


def test_what_a_killed_save_has_left_goes_with_the_next(tmp_path):
    for name in ("optim_best.pt", ".model_00003.pt.part"):
        (tmp_path / name).write_bytes(b"content")
    save(tmp_path, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"model_00004.pt", "optim_00004.pt", "optim_best.pt"}


@pytest.fixture
def disk_calls(monkeypatch):
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
    assert disk_calls == [
        *["sync .optim_00005.pt.part", "rename to optim_00005.pt", f"sync {tmp_path.name}"],
        *["sync .model_00005.pt.part", "rename to model_00005.pt", f"sync {tmp_path.name}"],
        *["delete model_00004.pt", "delete optim_00004.pt"],
    ]


def test_metrics_are_on_disk_before_their_checkpoint(train, disk_calls):
    """A resumed run writes the lines after its checkpoint again, but not those before."""
    train("run", "--max-steps 1")
    assert disk_calls.index("sync metrics.jsonl") < disk_calls.index("sync .optim_00001.pt.part")


def test_a_failed_write_loses_nothing(tmp_path):
    """Its cause is raised, not what torch makes of it. With the next save the same writer recovers."""
    save(tmp_path / "run", 1)
    writer = checkpoint.CheckpointWriter(tmp_path / "run")
    with limit_file_size(10_000), refused(r"(?s)step 2 \(OSError: \[Errno 27\]"):
        save(tmp_path / "run", 2, writer=writer)
    with limit_file_size(10_000), pytest.raises(OSError, match="Errno 27"):
        checkpoint.write(tmp_path / "large", {"weight": torch.zeros(10**5)})
    assert complete_steps(tmp_path / "run") == [1] and not list((tmp_path / "run").glob(".*"))

    # Somebody has moved the folder away.
    (tmp_path / "run").rename(tmp_path / "moved")
    save(tmp_path / "run", 4, writer=writer)
    assert complete_steps(tmp_path / "run") == [4]


@pytest.mark.parametrize("number, failures, error, writes", [
    (28, 1, None, 3),  # by the save at the end of the run: the weights are still in memory
    (28, 9, OSError, 2),  # the run has failed, and is restarted
    (27, 9, UserError, 1),  # that can never succeed ends the run at once
])  # fmt: skip
def test_a_save_that_fails_is_tried_again(train, tmp_path, monkeypatch, number, failures, error, writes):
    write = Mock(wraps=checkpoint.write, side_effect=[OSError(number, "planted")] * failures + [DEFAULT] * 2)
    monkeypatch.setattr(checkpoint, "write", write)
    flags = "--save-every 1 --max-steps 100" if number == 27 else "--max-steps 1"
    with pytest.raises(error, match="planted") if error else nullcontext():
        train("run", flags)
    assert write.call_count == writes and complete_steps(tmp_path / "run") == ([] if error else [1])
