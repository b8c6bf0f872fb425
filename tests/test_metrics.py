"""What a run reports: metrics.jsonl, the console line, and trackers, which draw no point twice."""

import math
import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import CPU, load_metrics, parse_config

from model import GPT, GPTConfig
from system.distributed import Runtime
from training import cards, metrics
from training.metrics import MetricsLogger, RunState, read_config, read_metrics
from training.step import StepResult

SMALL = GPTConfig(block_size=1024, vocab_size=64, n_layer=1, n_head=2, n_embd=16)
RESULT = StepResult(loss=3.5, norm=0.25, is_finite=True, stop_requested=False)


def make_logger(folder, start_step=0, tracker="none", rt=CPU) -> MetricsLogger:
    """The logger of a run that starts or resumes at a step: gpt2-124m at $20 an hour, but with a small model."""
    folder.mkdir(exist_ok=True)
    cfg = parse_config("gpt2-124m", "--out-dir", folder, "--gpu-hour-usd", "20")
    # Not by its flag, which wants the tracker's package.
    train_step = SimpleNamespace(cfg=replace(cfg, tracker=tracker), rt=rt, model=GPT(SMALL))
    return MetricsLogger(train_step, RunState(19073, "", step=start_step))


# ------------------------------------------------------------------------- metrics.jsonl


def test_a_resumed_log_has_no_step_twice(tmp_path):
    # A run that was killed while it wrote step 5.
    logger = make_logger(tmp_path)
    for step in range(5):
        logger.write({"step": step, "train_loss": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "train_lo')

    # It resumes at step 3.
    make_logger(tmp_path, start_step=3).write({"step": 3, "train_loss": 30.0})

    expected = [{"step": step, "train_loss": loss} for step, loss in enumerate([0.0, 1.0, 2.0, 30.0])]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected
    assert load_metrics(tmp_path) == expected


def test_a_written_line_survives_a_kill(tmp_path):
    """Of the process, at once: nothing of it waits in a buffer."""
    child = os.fork()
    if child == 0:
        make_logger(tmp_path).write({"step": 0, "train_loss": 1.0})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert load_metrics(tmp_path) == [{"step": 0, "train_loss": 1.0}]


def test_flushed_lines_are_on_the_disk(tmp_path, monkeypatch):
    """Before the checkpoint, as a run that resumes from it needs them after a power cut."""
    logger = make_logger(tmp_path)
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    logger.flush()
    assert synced == [logger.file.fileno()]


def test_what_is_not_a_row_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    hostile = ["[" * 100_000, "[1]", "7", '"step"', "{}", '{"step": true}', '{"step": -1}', '{"step": "1"}', "\0", ""]
    hostile += [f'{{"step": {"9" * 5000}}}', '{"step": 5, "train_lo']
    rows = ['{"step": 3}', f'{{"step": 4, "lr": {"9" * 30}}}']
    path.write_text("\n".join([rows[0], *hostile, rows[1]]))
    assert read_metrics(path) == [{"step": 3}, {"step": 4, "lr": pytest.approx(1e30)}]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[1]"])
def test_a_config_that_cannot_be_read_is_empty(tmp_path, text):
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"total_batch_size": 8}')
    assert read_config(tmp_path) == {"total_batch_size": 8}


def test_what_is_not_finite_is_logged_as_null(tmp_path):
    make_logger(tmp_path).write({"step": 0, "train_loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "train_loss": null, "grad_norm": null, "lr": 1.0}\n'


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "gather", lambda self, obj: [obj, obj])
    logger = make_logger(tmp_path, rt=replace(CPU, rank=1, world_size=2))
    logger.write({"step": 0})
    logger.log_text(1, "")
    logger.close()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------- the console


def test_a_step_is_logged_with_speed_time_and_cost(tmp_path, capsys, monkeypatch):
    # A card that would need 0.4123 s for a step at its peak.
    flops_per_second = GPT(SMALL).flops_per_token(1024) * 524288 / 0.4123
    monkeypatch.setattr(cards, "peak_flops", lambda device: flops_per_second)
    logger = make_logger(tmp_path)
    run = RunState(7209, "", step=6, measured={"step": 6, "val_loss": 4.0})

    # The first step compiles: it says nothing about the time to go.
    logger.log_step(run, RESULT, lr=6e-4, seconds=60.0)
    assert "eta" not in capsys.readouterr().out

    # The second step of a run that has lasted an hour.
    run.advance()
    logger.last_print_time -= 1
    logger.start_time -= 3600
    logger.log_step(run, RESULT, lr=6e-4, seconds=1.0)
    printed = capsys.readouterr().out
    for value in ("7/7209", "3.500000", "6.0000e-04", "0.2500", "1000.00ms", "524,288", "41.2%", "2h00m", "$20.00"):
        assert value in printed
    first, second = load_metrics(tmp_path)
    assert first["step"] == 6 and first["val_loss"] == 4.0
    values = {"step": 7, "train_loss": 3.5, "lr": 6e-4, "grad_norm": 0.25, "step_ms": 1000.0}
    assert second == values | {"tokens_per_second": 524288.0, "mfu": pytest.approx(0.4123)}


def test_the_console_has_a_line_a_second(tmp_path, capsys):
    logger, run = make_logger(tmp_path), RunState(63, "")
    for _ in range(63):
        logger.log_step(run, RESULT, lr=6e-4, seconds=1.0)
        run.advance()
    # The first and the last are always shown; where no peak is known there is no MFU.
    first, last = capsys.readouterr().out.splitlines()
    assert "0/63" in first and "62/63" in last and "mfu" not in last
    assert [line["step"] for line in load_metrics(tmp_path)] == list(range(63))


def test_the_time_to_go_follows_a_moving_average(tmp_path, capsys):
    """The fourth step counts a tenth of it, the steps before, which compile, nothing."""
    logger = make_logger(tmp_path)
    for seconds in (60.0, 9.0, 2.0, 3.0):
        logger.last_print_time -= 1
        logger.log_step(RunState(7209, "", step=7108, measured={"step": 7108}), RESULT, lr=6e-4, seconds=seconds)
    assert "eta: 3m30s" in capsys.readouterr().out.splitlines()[-1]


# ------------------------------------------------------------------------- trackers


def log_steps(folder, tracker, start_step, end_step) -> MetricsLogger:
    """What a run logs that starts or resumes at a step, and ends before another: a val loss and samples at steps 4
    and 8."""
    logger = make_logger(folder, start_step, tracker)
    for step in range(start_step, end_step):
        evaluated = {}
        if step in (4, 8):
            logger.log_text(step, f"once upon a time {step}")
            evaluated = {"val_loss": 5.0 + step}
        logger.write({"step": step, **evaluated, "train_loss": float(step), "mfu": None})
    return logger


def test_tensorboard_draws_each_point_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Killed after step 4 was saved, and resumed from the checkpoint of step 3: steps 3 and 4 come again.
    killed = log_steps(tmp_path, "tensorboard", 0, 5)
    killed.flush()
    log_steps(tmp_path, "tensorboard", 3, 9).close()

    # TensorBoard opens two groups, of which one has the losses; it knows of the others.
    assert metrics.tensorboard_tag("lr") == "run/lr"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    drawn = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert drawn == {
        "loss/train_loss": [(step, step) for step in range(9)],
        "loss/val_loss": [(4, 9.0), (8, 13.0)],
    }
    samples = events.Tensors("samples/text_summary")
    assert [event.step for event in samples] == [4, 8]
    assert b"once upon a time 8" in samples[1].tensor_proto.string_val[0]


@pytest.fixture
def fake_wandb(monkeypatch):
    """In place of the package wandb: what it was started with, and each (run id, step, values) that it was sent."""
    calls = SimpleNamespace(starts=[], points=[])

    def init(id, **settings):
        calls.starts.append({"id": id, **settings})

        def log(values, step):
            calls.points.append((id, step, values))

        return SimpleNamespace(log=log, finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    return calls


def test_wandb_gets_each_point_once(tmp_path, fake_wandb):
    # Killed after step 4, and resumed from the checkpoint of step 3: wandb cannot withdraw points.
    log_steps(tmp_path, "wandb", 0, 5)
    log_steps(tmp_path, "wandb", 3, 9)

    # One run to wandb.
    assert fake_wandb.starts[0]["id"] == fake_wandb.starts[1]["id"]
    assert fake_wandb.starts[1]["resume"] == "allow"
    samples = [(step, values["samples"]) for _, step, values in fake_wandb.points if "samples" in values]
    assert samples == [(4, "once upon a time 4"), (8, "once upon a time 8")]
    rows = [{"step": step, **values} for _, step, values in fake_wandb.points if "samples" not in values]
    assert rows == [{k: v for k, v in row.items() if v is not None} for row in load_metrics(tmp_path)]

    # A run that follows wandb only now sends all steps of this start; a new run is another one to wandb.
    (tmp_path / "wandb_id").unlink()
    make_logger(tmp_path, 7, "wandb").write({"step": 7, "lr": 1.0})
    assert fake_wandb.points[-1][1] == 7
    make_logger(tmp_path, tracker="wandb")
    assert len({start["id"] for start in fake_wandb.starts}) == 3


def test_wandb_has_the_users_project_and_name(tmp_path, fake_wandb, monkeypatch):
    make_logger(tmp_path / "run", 0, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    make_logger(tmp_path / "run", 5, "wandb")
    assert [(start["project"], start["name"]) for start in fake_wandb.starts] == [("gpt2", "run"), ("owt", "lion")]
