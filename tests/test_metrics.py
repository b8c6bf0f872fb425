"""What a run leaves of itself: metrics.jsonl, which survives a torn line and a restart; the console line; the code that
made it; and trackers, which draw no point twice."""

import json
import math
import struct
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CPU,
    ROOT,
    delete_checkpoints_after,
    load_metrics,
    make_hellaswag_rows,
    parse_config,
    train_quickstart,
    write_jsonl,
)

from model import GPT, GPTConfig
from system import cards, machine
from system.cli import format_duration
from system.distributed import Runtime
from training.metrics import MetricsLogger, Throughput
from training.metrics_file import read_metrics
from training.run_state import RunState
from training.step import StepResult

SMALL = GPTConfig(block_size=1024, vocab_size=64, n_layer=1, n_head=2, n_embd=16)


def fake_train_step(folder, tracker="none", rt=CPU) -> SimpleNamespace:
    """As much of a TrainStep as metrics need: those of gpt2-124m, at $20 an hour, but with a small model."""
    cfg = parse_config("gpt2-124m", "--out-dir", folder, "--gpu-hour-usd", "20")
    # Not by its flag, which wants the tracker's package.
    return SimpleNamespace(cfg=replace(cfg, tracker=tracker), rt=rt, model=GPT(SMALL))


def make_logger(folder, start_step=0, tracker="none", rt=CPU) -> MetricsLogger:
    """The logger of a run in `folder` that starts or resumes at a step."""
    return MetricsLogger(fake_train_step(folder, tracker, rt), RunState(19073, "", step=start_step))


# ------------------------------------------------------------------------- metrics.jsonl and the console


def test_a_resumed_log_has_no_step_twice_and_forgives_a_torn_line(tmp_path):
    # A run that was killed while it wrote step 5.
    logger = make_logger(tmp_path)
    for step in range(5):
        logger.write({"step": step, "train_loss": float(step)})
    logger.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "train_lo')

    # It resumes at step 3.
    logger = make_logger(tmp_path, start_step=3)
    logger.write({"step": 3, "train_loss": 30.0})
    logger.close()

    expected = [{"step": step, "train_loss": loss} for step, loss in enumerate([0.0, 1.0, 2.0, 30.0])]
    assert read_metrics(tmp_path / "metrics.jsonl") == expected
    assert load_metrics(tmp_path) == expected


def test_a_refused_update_leaves_a_line_that_is_json(tmp_path):
    logger = make_logger(tmp_path)

    logger.write({"step": 0, "train_loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    logger.close()

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "train_loss": null, "grad_norm": null, "lr": 1.0}\n'


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(Runtime, "gather", lambda self, value: [value, value])
    logger = make_logger(tmp_path / "run", rt=replace(CPU, rank=1, world_size=2))

    logger.write({"step": 0})
    logger.close()

    assert not (tmp_path / "run").exists()


def test_a_duration_of_more_than_a_day_shows_days_and_hours():
    assert format_duration(93784) == "1d02h"


@pytest.mark.parametrize("peak_is_known", [True, False])
def test_the_console_line_shows_loss_speed_time_to_go_and_cost(tmp_path, capsys, monkeypatch, peak_is_known):
    # A card that would need 0.4123 s for a step at its peak. On a CPU no peak is known, so there is no MFU.
    if peak_is_known:
        flops_per_second = GPT(SMALL).flops_per_token(1024) * 524288 / 0.4123
        monkeypatch.setattr(cards, "peak_flops", lambda device: flops_per_second)
    logger = make_logger(tmp_path)
    run = RunState(7208, "", step=7, measured={"step": 7})
    result = StepResult(loss=3.5, norm=0.25, is_finite=True, stop_requested=False, local_loss=3.5)

    # The second step of a run that has lasted an hour.
    logger.throughput.update(1.0)
    logger.start_time -= 3600
    logger.log_step(run, result, lr=6e-4, seconds=1.0)

    line = capsys.readouterr().out
    assert "step     7/7208 | loss: 3.500000" in line
    assert "tok/sec: 524,288 | " in line
    assert ("mfu: 41.2% | " in line) == peak_is_known
    assert "| eta: 2h00m | cost: $20.00" in line

    # Fast steps: each is in metrics.jsonl, but the console gets a line a second at most.
    for _ in range(60):
        run.advance()
        logger.log_step(run, result, lr=6e-4, seconds=1.0)
    assert capsys.readouterr().out == ""
    assert [line["step"] for line in load_metrics(tmp_path)] == list(range(7, 68))


@pytest.mark.parametrize("peak_of_rank_1, mfu", [(3.0, 0.25), (0.0, None)])
def test_mfu_is_the_share_of_what_all_cards_reach_together(tmp_path, monkeypatch, peak_of_rank_1, mfu):
    """Rank 1's card is three times as fast as rank 0's, or has no data sheet."""
    flops_per_second = GPT(SMALL).flops_per_token(1024) * 524288
    monkeypatch.setattr(cards, "peak_flops", lambda device: flops_per_second)
    other = peak_of_rank_1 * flops_per_second
    monkeypatch.setattr(Runtime, "gather", lambda self, value: [value, other])
    assert Throughput(fake_train_step(tmp_path, rt=replace(CPU, world_size=2))).update(1.0)["mfu"] == mfu


def test_the_time_to_go_follows_recent_steps_after_the_first(tmp_path):
    throughput, etas = Throughput(fake_train_step(tmp_path)), []

    for seconds in (60.0, 2.0, 2.0, 3.0):
        assert throughput.update(seconds)["tokens_per_second"] == 524288 / seconds
        etas.append(throughput.eta_s(100))

    # The first step compiles. The last counts a tenth of the moving average.
    assert math.isnan(etas[0])
    assert etas[1:] == pytest.approx([200, 200, 210])


# ------------------------------------------------------------------------- what made it


def test_config_json_names_the_code(tiny_args, tmp_path):
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1")

    versions = json.loads((run / "config.json").read_text())["versions"]
    assert versions["torch"] == str(torch.__version__)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    is_a_clone = head.returncode == 0
    assert not is_a_clone or versions["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_code_that_differs_from_its_commit_is_kept_with_the_run(tiny_args, tmp_path, monkeypatch):
    """The code's own folder alone, though it lies in a larger clone; and not what an earlier start differed in."""
    # A clone whose folder gpt2 has the code, and which has another file beside that. Both differ from their commit.
    clone, run = tmp_path / "clone", tmp_path / "run"
    code, private = clone / "gpt2" / "system" / "machine.py", clone / "private.txt"
    code.parent.mkdir(parents=True)
    for path in (code, private):
        path.write_text("as it was\n")
    git = ["git", "-C", clone, "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    for path in (code, private):
        path.write_text("an idea\n")
    machine.versions()  # of the real code: the answer is kept for the life of this process
    monkeypatch.setattr(machine, "__file__", str(code))

    # The difference is kept.
    train_quickstart(tiny_args, run, "--max-steps", "1", "--save-every", "0")
    kept = (run / "code_00000.diff").read_text()
    assert "+an idea\n" in kept
    assert "private" not in kept

    # Started again with the code of its commit, the run has none.
    for path in run.glob("*.pt"):
        path.unlink()
    code.write_text("as it was\n")
    train_quickstart(tiny_args, run, "--max-steps", "1")
    assert not (run / "code_00000.diff").exists()


# ------------------------------------------------------------------------- trackers


def test_tensorboard_has_every_curve_and_resumes_without_doubled_points(tiny_args, tmp_path, monkeypatch):
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
    keys = "train_loss grad_norm lr tokens_per_second step_ms mfu val_loss val_bpb hellaswag_acc hellaswag_acc_norm"
    for key in keys.split():
        group = "loss" if key.endswith(("_loss", "_bpb")) else "run"
        drawn = [(event.step, pytest.approx(event.value)) for event in events.Scalars(f"{group}/{key}")]
        assert drawn, key
        assert drawn == [(line["step"], line[key]) for line in lines if key in line], key

    # Samples of each step once.
    samples = events.Tensors("samples/text_summary")
    assert [event.step for event in samples] == [4, 8, 12]
    assert b"sample 3: def " in samples[0].tensor_proto.string_val[0]

    # The settings, without a list of columns that one run would dictate to all, alphabetically.
    settings = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"max_lr" in settings
    assert b"model.n_layer" in settings
    with pytest.raises(KeyError):
        events.SummaryMetadata("_hparams_/experiment")

    # Two starts, no folder in the folder: one run to TensorBoard, not four.
    assert [path.is_dir() for path in (run / "tensorboard").iterdir()] == [False, False]


def read_wandb_file(path) -> dict[int, dict]:
    """{step: its values} of a .wandb file: records in the log format of LevelDB, after a header of 7 bytes.

    The file is divided into blocks of 32 kB. A record is one part, or several that lie in as many blocks; each part has
    a header of 7 bytes: checksum (4), size (2), kind (1: a complete record, 2: first part, 3: middle, 4: last part).
    A part's header does not cross the end of a block: what is left there is padding.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    block_size, header_size = 32768, 7
    data, position = path.read_bytes(), header_size
    record, values_of_step = b"", {}
    while position + header_size <= len(data):
        left_in_block = block_size - position % block_size
        if left_in_block < header_size:
            position += left_in_block
            continue
        size, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + header_size : position + header_size + size]
        position += header_size + size
        if kind in (1, 4):
            history = Record.FromString(record).history
            record = b""
            if history.item:
                values = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
                values_of_step[history.step.num] = values
    return values_of_step


def test_wandb_offline_is_one_run_over_restarts(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    # A run killed after step 5, then resumed from the checkpoint of step 4.
    for start_step, end_step in ((0, 6), (4, 9)):
        logger = make_logger(run_dir, start_step, "wandb")
        for step in range(start_step, end_step):
            if step == 8:
                logger.log_text(step, "once upon a time")
            logger.write({"step": step, "train_loss": float(step), "mfu": None})
        logger.close()
    wandb.teardown()  # waits for wandb's own process, which writes the files

    # A file for each start, both of one run to wandb, which knows it by its random id, the file's name.
    def wandb_files():
        return list((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))

    files = wandb_files()
    assert len(files) == 2
    assert len({path.name for path in files}) == 1

    # Together they have each step once.
    first, second = (read_wandb_file(path) for path in files)
    assert sorted([*first, *second]) == list(range(9))
    values_of_step = first | second
    assert [values_of_step[step]["train_loss"] for step in range(9)] == list(range(9))
    assert values_of_step[8]["samples"] == "once upon a time"

    # A new run in an emptied folder is another one to wandb.
    make_logger(run_dir, tracker="wandb").close()
    assert len({path.name for path in wandb_files()}) == 2


def test_wandb_takes_project_and_name_from_its_variables(tmp_path, monkeypatch):
    init_calls = []
    fake_wandb = SimpleNamespace(init=lambda **arguments: init_calls.append(arguments))
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb)
    run_dir = tmp_path / "run"
    run_dir.mkdir()

    # Without the variables, and with them.
    make_logger(run_dir, 0, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    make_logger(run_dir, 0, "wandb")

    # Resumed from another shell, it stays the same run; also if its id file is of an older version, without a project.
    monkeypatch.delenv("WANDB_PROJECT")
    make_logger(run_dir, 5, "wandb")
    (run_dir / "wandb_id").write_text("abcd")
    make_logger(run_dir, 5, "wandb")

    names = [(call["project"], call["name"]) for call in init_calls]
    assert names == [("gpt2", "run"), ("owt", "lion"), ("owt", "lion"), ("gpt2", "lion")]
    ids = [call["id"] for call in init_calls]
    assert ids[0] != ids[1] == ids[2]
    assert ids[3] == "abcd"
