"""What a run reports: metrics.jsonl, the console line, and trackers, which draw no point twice."""

import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from helpers import (
    CPU,
    ROOT,
    choices,
    delete_checkpoints_after,
    load_metrics,
    make_hellaswag_rows,
    parse_config,
    train_quickstart,
    write_jsonl,
)

from model import GPT, GPTConfig
from system.distributed import Runtime
from training import cards, metrics
from training.config import TrainConfig
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
    logger = make_logger(tmp_path, start_step=3)
    logger.write({"step": 3, "train_loss": 30.0})
    logger.close()

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


def test_what_is_not_a_row_is_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    hostile = ["[" * 100_000, "[1]", "7", '"step"', "{}", '{"step": true}', '{"step": -1}', '{"step": "1"}', "\0", ""]
    hostile += [f'{{"step": {"9" * 5000}}}', '{"step": 5, "train_lo']
    rows = ['{"step": 3}', f'{{"step": 4, "lr": {"9" * 30}}}']
    path.write_text("\n".join([rows[0], *hostile, rows[1]]))
    assert read_metrics(path) == [{"step": 3}, {"step": 4, "lr": pytest.approx(1e30)}]


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[1]"])
def test_a_config_that_is_none_is_empty(tmp_path, text):
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text(text)
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"total_batch_size": 8}')
    assert read_config(tmp_path) == {"total_batch_size": 8}


def test_reading_needs_no_torch():
    code = "import sys, training.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_refused_update_leaves_a_line_that_is_json(tmp_path):
    make_logger(tmp_path).write({"step": 0, "train_loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "train_loss": null, "grad_norm": null, "lr": 1.0}\n'


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "gather", lambda self, obj: [obj, obj])
    logger = make_logger(tmp_path, rt=replace(CPU, rank=1, world_size=2))
    logger.write({"step": 0})
    logger.close()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------- the console


@pytest.mark.parametrize("peak_is_known", [True, False])
def test_the_console_line_shows_loss_speed_time_and_cost(tmp_path, capsys, monkeypatch, peak_is_known):
    # A card that would need 0.4123 s for a step at its peak. On a CPU no peak is known, so there is no MFU.
    if peak_is_known:
        flops_per_second = GPT(SMALL).flops_per_token(1024) * 524288 / 0.4123
        monkeypatch.setattr(cards, "peak_flops", lambda device: flops_per_second)
    logger = make_logger(tmp_path)
    run = RunState(7209, "", step=6, measured={"step": 6})

    # The first step compiles: it says nothing about the time to go.
    logger.log_step(run, RESULT, lr=6e-4, seconds=60.0)
    assert "eta" not in capsys.readouterr().out

    # The second step of a run that has lasted an hour.
    run.advance()
    logger.last_print_time -= 1
    logger.start_time -= 3600
    logger.log_step(run, RESULT, lr=6e-4, seconds=1.0)
    mfu = "mfu: 41.2% | " if peak_is_known else ""
    assert capsys.readouterr().out == (
        "step     7/7209 | loss: 3.500000 | lr 6.0000e-04 | norm: 0.2500 | dt: 1000.00ms | tok/sec: 524,288 | "
        f"{mfu}eta: 2h00m | cost: $20.00\n"
    )

    # Fast steps: each is in metrics.jsonl, but the console gets a line a second at most.
    for _ in range(60):
        run.advance()
        logger.log_step(run, RESULT, lr=6e-4, seconds=1.0)
    assert capsys.readouterr().out == ""
    assert [line["step"] for line in load_metrics(tmp_path)] == list(range(6, 68))

    # The fifth step counts a tenth of the moving average.
    logger = make_logger(tmp_path)
    for seconds in (60.0, 2.0, 2.0, 3.0):
        logger.last_print_time -= 1
        logger.log_step(replace(run, step=7108), RESULT, lr=6e-4, seconds=seconds)
    assert "eta: 3m30s" in capsys.readouterr().out.splitlines()[-1]


# ------------------------------------------------------------------------- trackers


def test_every_tracker_has_a_class_of_its_own():
    names = choices(TrainConfig, "tracker")
    assert metrics.TRACKERS.keys() == set(names)
    assert len(set(metrics.TRACKERS.values())) == len(names)


def test_tensorboard_resumes_without_doubled_points(tiny_args, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(cards, "peak_flops", lambda device: 1e12)  # as on a card that is in the table
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(2))
    flags = ["--tracker", "tensorboard", "--sample-every", "4", "--model.vocab-size", "50304", "--hellaswag-every", "6"]
    flags += ["--hellaswag-data", rows, "--total-batch-size", "64", "--micro-batch-size", "2"]

    # As if killed at step 8: steps 3 to 7 come again.
    run = train_quickstart(tiny_args, tmp_path / "run", *flags, "--max-steps", "8")
    delete_checkpoints_after(run, 3)
    train_quickstart(tiny_args, run, *flags, "--resume", "auto")

    # Every curve has the points of metrics.jsonl, in one of the two groups that TensorBoard opens.
    events, lines = EventAccumulator(str(run / "tensorboard")).Reload(), load_metrics(run)
    keys = "train_loss grad_norm lr tokens_per_second step_ms mfu val_loss hellaswag_acc hellaswag_acc_norm"
    for key in keys.split():
        group = "loss" if key.endswith("_loss") else "run"
        drawn = [(event.step, pytest.approx(event.value)) for event in events.Scalars(f"{group}/{key}")]
        assert drawn, key
        assert drawn == [(line["step"], line[key]) for line in lines if key in line], key

    # Samples of each step once.
    samples = events.Tensors("samples/text_summary")
    assert [event.step for event in samples] == [4, 8, 12]
    assert b"sample 3: def " in samples[0].tensor_proto.string_val[0]


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


def test_wandb_gets_each_step_once(tmp_path, fake_wandb):
    # A run killed after step 5, then resumed from the checkpoint of step 4.
    for start_step, end_step in ((0, 6), (4, 9)):
        logger = make_logger(tmp_path, start_step, "wandb")
        for step in range(start_step, end_step):
            if step == 8:
                logger.log_text(step, "once upon a time")
            logger.write({"step": step, "train_loss": float(step), "mfu": None})
        logger.close()

    # One run to wandb.
    assert fake_wandb.starts[0]["id"] == fake_wandb.starts[1]["id"]
    assert fake_wandb.starts[1]["resume"] == "allow"
    points = [(step, values) for _, step, values in fake_wandb.points]
    assert points[:8] == [(step, {"train_loss": float(step)}) for step in range(8)]
    assert points[8:] == [(8, {"samples": "once upon a time"}), (8, {"train_loss": 8.0})]

    # A run that follows wandb only now sends all steps of this start; a new run is another one to wandb.
    (tmp_path / "wandb_id").unlink()
    make_logger(tmp_path, 7, "wandb").write({"step": 7, "lr": 1.0})
    assert fake_wandb.points[-1][1] == 7
    make_logger(tmp_path, tracker="wandb")
    assert len({start["id"] for start in fake_wandb.starts}) == 3


def test_wandb_takes_project_and_name_from_its_variables(tmp_path, fake_wandb, monkeypatch):
    make_logger(tmp_path / "run", 0, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    (tmp_path / "run" / "wandb_id").write_text("abcd")
    make_logger(tmp_path / "run", 5, "wandb")
    assert [(start["project"], start["name"]) for start in fake_wandb.starts] == [("gpt2", "run"), ("owt", "lion")]
    assert fake_wandb.starts[1]["id"] == "abcd"
