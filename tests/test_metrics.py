"""What a run reports: metrics.jsonl, the console line, and trackers, which draw no point twice."""

import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import CPU, limit_file_size, load_metrics, parse_config

from lifecycle import metrics
from lifecycle.metrics import MetricsLogger
from lifecycle.open_run import Run
from model import GPT, GPTConfig
from training.schedule import at

SMALL = GPTConfig(block_size=1024, vocab_size=64, n_layer=1, n_head=2, n_embd=16)


def make_logger(folder, start_step=0, tracker="none"):
    """The logger of a run that starts or resumes at a step: gpt2-124m at $20 an hour, but with a small model."""
    folder.mkdir(exist_ok=True)
    cfg = parse_config("gpt2-124m", "--out-dir", folder, "--gpu-hour-usd 20")
    cfg = replace(cfg, tracker=tracker)  # not by its flag, which wants the tracker's package
    return MetricsLogger(Run(cfg, CPU, GPT(SMALL), None, [], {}, start_step, 7209))


# ------------------------------------------------------------------------- the console


def test_a_step_is_logged_with_speed_time_and_cost(tmp_path, capsys, monkeypatch):
    # A card that would need 0.4123 s for a step at its peak.
    flops_per_second = GPT(SMALL).flops_per_token(1024) * 524288 / 0.4123
    monkeypatch.setattr(metrics, "total_peak_flops", lambda rt: flops_per_second)
    logger = make_logger(tmp_path, start_step=3600)
    row = {"step": 3601, "train_loss": 3.5, "lr": 6e-4, "grad_norm": 0.25}

    # The first step compiles: it says nothing about the time to go.
    logger.log_step(at(3600, logger.run.cfg, 7209), row | {"step": 3600}, seconds=60.0, waited_s=0.0)
    assert "eta" not in capsys.readouterr().out

    # The second step of a run that has lasted an hour, 1.25 s after the first.
    logger.start_time -= 3600
    logger.first_step_time -= 1.25
    logger.log_step(at(3601, logger.run.cfg, 7209), row.copy(), seconds=1.0, waited_s=0.25)
    printed = capsys.readouterr().out
    values = "3601/7209 3.500000 6.0000e-04 0.2500 1000.00ms 524,288 41.2% 250ms 1h15m $20.00".split()
    assert [value for value in values if value not in printed] == []
    speed = {"step_ms": 1000.0, "wait_ms": 250.0, "tokens_per_second": 524288.0, "mfu": pytest.approx(0.4123)}
    assert load_metrics(tmp_path)[1] == row | speed


def test_a_full_disk_delays_lines_but_not_the_run(tmp_path):
    """More lines than a buffer holds, and a piece of a line, which would spoil the next one, too."""
    logger = make_logger(tmp_path)
    logger.write({"step": 0})
    with limit_file_size(logger.path.stat().st_size + 5):
        for step in range(1, 1000):
            logger.write({"step": step})
    logger.flush()  # as before a checkpoint
    assert load_metrics(tmp_path) == [{"step": step} for step in range(1000)]


# ------------------------------------------------------------------------- trackers


def log_steps(folder, tracker, start_step, end_step):
    """What a run logs that starts or resumes at a step, and ends before another: samples at step 4."""
    logger = make_logger(folder, start_step, tracker)
    for step in range(start_step, end_step):
        texts = {"samples": "once upon a time"} if step == 4 else {}
        logger.write({"step": step, "train_loss": float(step), "mfu": None} | texts)


def test_tensorboard_draws_each_point_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Killed after step 4 was saved, and resumed from the checkpoint of step 3: steps 3 and 4 come again.
    log_steps(tmp_path, "tensorboard", 0, 5)
    log_steps(tmp_path, "tensorboard", 3, 6)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["loss/train_loss"]
    assert [(event.step, event.value) for event in events.Scalars("loss/train_loss")] == [(i, i) for i in range(6)]
    sample = events.Tensors("samples/text_summary")[-1]
    assert sample.step == 4 and b"once upon a time" in sample.tensor_proto.string_val[0]


def test_wandb_gets_each_point_once(tmp_path, monkeypatch):
    starts, points = [], {}

    def log(values, step):
        if step >= max(points, default=0):  # wandb drops what is older than its newest step
            points.setdefault(step, {}).update(values)

    wandb = SimpleNamespace(init=lambda **settings: starts.append(settings) or SimpleNamespace(log=log))
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    # Killed after step 4, and resumed from the checkpoint of step 3: wandb cannot withdraw points.
    log_steps(tmp_path / "run", "wandb", 0, 5)
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    log_steps(tmp_path / "run", "wandb", 3, 6)

    # One run to wandb, under the user's names.
    assert starts[0]["id"] == starts[1]["id"] and starts[1]["resume"] == "allow"
    assert [(start["project"], start["name"]) for start in starts] == [("gpt2", "run"), ("owt", "lion")]
    assert points.pop(4) == {"samples": "once upon a time", "train_loss": 4.0}
    assert points == {step: {"train_loss": float(step)} for step in (0, 1, 2, 3, 5)}

    # A new run in the folder is another one to wandb.
    make_logger(tmp_path / "run", tracker="wandb")
    assert starts[2]["id"] != starts[1]["id"]

    # And a copy of the folder.
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    make_logger(tmp_path / "copy", start_step=3, tracker="wandb")
    assert starts[3]["id"] != starts[2]["id"]
