"""The record of a run: metrics.jsonl survives a torn line and a restart, trackers draw no point twice; what made it."""

import json
import math
import struct
import subprocess
import sys
import types
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
from system import machine
from system.units import format_duration
from training.metrics import MetricsLogger, Throughput, read_metrics
from training.run_state import RunState
from training.step import Result

SMALL = GPTConfig(block_size=1024, vocab_size=64, n_layer=1, n_head=2, n_embd=16)


def step(folder, tracker="none", rt=CPU):
    """As much of a Step as a Record asks for."""
    cfg = replace(parse_config("gpt2-124m", "--out-dir", folder, "--gpu-hour-usd", "20"), tracker=tracker)
    return SimpleNamespace(cfg=cfg, rt=rt, model=GPT(SMALL))


def record(folder, start=0, tracker="none", rt=CPU):
    return MetricsLogger(step(folder, tracker, rt), RunState(19073, "", step=start))


def test_resumed_log_has_no_step_twice_and_forgives_a_torn_line(tmp_path):
    log = record(tmp_path)
    for at in range(5):
        log.write({"step": at, "train_loss": float(at)})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "train_lo')
    log = record(tmp_path, 3)
    log.write({"step": 3, "train_loss": 30.0})
    log.close()
    wanted = [{"step": at, "train_loss": loss} for at, loss in enumerate([0.0, 1.0, 2.0, 30.0])]
    assert read_metrics(tmp_path / "metrics.jsonl") == load_metrics(tmp_path) == wanted


def test_a_refused_update_leaves_a_line_that_is_json(tmp_path):
    log = record(tmp_path)
    log.write({"step": 0, "train_loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "train_loss": null, "grad_norm": null, "lr": 1.0}\n'


def test_other_ranks_write_nothing(tmp_path):
    log = record(tmp_path / "run", rt=replace(CPU, rank=1, world_size=2))
    log.write({"step": 0})
    log.close()
    assert not (tmp_path / "run").exists() and format_duration(93784) == "1d02h"


@pytest.mark.parametrize("known", [True, False])
def test_console_line(tmp_path, capsys, monkeypatch, known):
    if known:
        peak = GPT(SMALL).flops_per_token(1024) * 524288 / 0.4123
        monkeypatch.setattr(machine, "peak_flops", lambda device: peak)
    log = record(tmp_path)
    run = RunState(7208, "", step=7, measured={"step": 7})
    result = Result(3.5, 0.25, finite=True, halt=False, local_loss=3.5)
    log.pace.step(1.0)
    log.began -= 3600
    log.step(run, result, 6e-4, 1.0)
    line = capsys.readouterr().out
    assert ("mfu: 41.2% | " in line) == known and "tok/sec: 524,288 | " in line
    assert "| eta: 2h00m | cost: $20.00" in line and "step     7/7208 | loss: 3.500000" in line
    for _ in range(60):
        run.advance()
        log.step(run, result, 6e-4, 1.0)
    assert not capsys.readouterr().out  # a line a second at most
    assert [line["step"] for line in load_metrics(tmp_path)] == list(range(7, 68))


def test_time_to_go_follows_recent_steps_after_the_first(tmp_path):
    pace, eta = Throughput(step(tmp_path)), []
    for seconds in (60.0, 2.0, 2.0, 3.0):
        assert pace.step(seconds)["tokens_per_second"] == 524288 / seconds
        eta.append(pace.eta_s(100))
    assert math.isnan(eta[0]) and eta[1:] == pytest.approx([200, 200, 210])


# ------------------------------------------------------------------------- what made it


def test_config_json_names_the_code(tiny_args, tmp_path):
    made = json.loads((train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1") / "config.json").read_text())[
        "versions"
    ]
    assert made["torch"] == str(torch.__version__)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert head.returncode or made["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_code_that_differs_from_its_commit_is_kept_with_the_run(tiny_args, tmp_path, monkeypatch):
    """The code's own folder alone, though it lies in a larger clone; and not what an earlier start differed in."""
    clone, run = tmp_path / "clone", tmp_path / "run"
    git = ["git", "-C", clone, "-c", "user.name=x", "-c", "user.email=x"]
    (code := clone / "gpt2" / "system" / "machine.py").parent.mkdir(parents=True)
    for path in (code, clone / "private.txt"):
        path.write_text("as it was\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    for path in (code, clone / "private.txt"):
        path.write_text("an idea\n")
    machine.versions()  # of the real code: it is asked once per process
    monkeypatch.setattr(machine, "__file__", str(code))
    train_quickstart(tiny_args, run, "--max-steps", "1", "--save-every", "0")
    found = (run / "code_00000.diff").read_text()
    assert "+an idea\n" in found and "private" not in found
    for path in run.glob("*.pt"):
        path.unlink()
    code.write_text("as it was\n")
    train_quickstart(tiny_args, run, "--max-steps", "1")
    assert not (run / "code_00000.diff").exists()


# ------------------------------------------------------------------------- trackers


def test_tensorboard_has_every_curve_and_resumes_without_doubled_points(tiny_args, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(machine, "peak_flops", lambda device: 1e12)  # as on a card in the table
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(2))
    flags = ["--tracker", "tensorboard", "--sample-every", "4", "--model.vocab-size", "50304", "--hellaswag-every", "6"]
    flags += ["--hellaswag-data", rows, "--total-batch-size", "64", "--micro-batch-size", "2"]
    run = train_quickstart(tiny_args, tmp_path / "run", *flags, "--max-steps", "8")
    delete_checkpoints_after(run, 3)  # as if killed at step 8: 3 to 7 come again
    train_quickstart(tiny_args, run, *flags, "--resume", "auto")
    events, lines = EventAccumulator(str(run / "tensorboard")).Reload(), load_metrics(run)
    keys = "train_loss grad_norm lr tokens_per_second step_ms mfu val_loss hellaswag_acc hellaswag_acc_norm"
    for key in keys.split():
        tag = f"loss/{key}" if key.endswith("_loss") else f"run/{key}"  # TensorBoard opens two groups: these
        drawn = [(e.step, pytest.approx(e.value)) for e in events.Scalars(tag)]
        assert drawn == [(line["step"], line[key]) for line in lines if key in line] and drawn, key
    samples = events.Tensors("samples/text_summary")
    assert [e.step for e in samples] == [4, 8, 12] and b"sample 3: def " in samples[0].tensor_proto.string_val[0]
    parameters = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"max_lr" in parameters and b"model.n_layer" in parameters
    with pytest.raises(KeyError):  # columns that one run would dictate to all, alphabetically
        events.SummaryMetadata("_hparams_/experiment")
    assert [p.is_dir() for p in (run / "tensorboard").iterdir()] == [False, False]  # one run to TensorBoard, not four


def wandb_rows(path):
    """{step: its values} of a .wandb file: records of LevelDB's log format, in blocks of 32 kB, after a header."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, rows = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            row, whole = Record.FromString(whole).history, b""
            if row.item:
                rows[row.step.num] = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item}
    return rows


def test_wandb_offline_is_one_run_over_restarts(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "run").mkdir()
    for first, last in ((0, 6), (4, 9)):  # killed after step 5, resumed from the checkpoint of step 4
        log = record(tmp_path / "run", first, "wandb")
        for step in range(first, last):
            if step == 8:
                log.text(step, "once upon a time")
            log.write({"step": step, "train_loss": float(step), "mfu": None})
        log.close()
    wandb.teardown()  # its own process has written everything
    files = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({f.name for f in files}) == 1  # to wandb one run, named by its random id
    rows = [wandb_rows(f) for f in files]
    assert sorted(s for r in rows for s in r) == list(range(9))
    merged = rows[0] | rows[1]
    assert [merged[s]["train_loss"] for s in range(9)] == list(range(9)) and merged[8]["samples"] == "once upon a time"
    record(tmp_path / "run", tracker="wandb").close()  # a new run in an emptied folder is another one to wandb
    assert len({f.name for f in (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")}) == 2


def test_wandb_takes_project_and_name_from_its_variables(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **who: told.append(who)))
    (tmp_path / "run").mkdir()
    record(tmp_path / "run", 0, "wandb")
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    record(tmp_path / "run", 0, "wandb")
    monkeypatch.delenv("WANDB_PROJECT")  # resumed from another shell, it stays the same run
    record(tmp_path / "run", 5, "wandb")
    (tmp_path / "run" / "wandb_id").write_text("abcd")  # as older versions wrote it
    record(tmp_path / "run", 5, "wandb")
    named = [(who["project"], who["name"]) for who in told]
    assert named == [("gpt2", "run"), ("owt", "lion"), ("owt", "lion"), ("gpt2", "lion")]
    ids = [who["id"] for who in told]
    assert ids[0] != ids[1] == ids[2] and ids[3] == "abcd"
