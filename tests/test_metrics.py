"""Spikes are noticed, quiet curves are not; metrics.jsonl survives a torn line and a restart."""

import json
import math
import random
import struct
import sys
import types

import pytest
import torch

import runtime
from metrics import Outliers, RunLog, duration, read_lines


def records(n, spike_at=None):
    rng = random.Random(0)
    for step in range(n):
        loss = 3 + 7 * math.exp(-step / 40) + rng.gauss(0, 0.05)
        yield {"step": step, "train_loss": loss + (2 if step == spike_at else 0), "grad_norm": 0.5 + rng.random() / 10}


def test_a_spike_is_named_and_ordinary_noise_is_not():
    quiet, loud = Outliers(), Outliers()
    assert [line for r in records(1000) for line in quiet.check(r)] == []
    said = [line for r in records(1000, spike_at=700) for line in loud.check(r)]
    assert len(said) == 1 and "step 700: train_loss 4.9986" in said[0]


def test_a_nan_does_not_blind_it():
    o = Outliers()
    for r in records(1000):
        o.check(r)
    o.check({"step": 1000, "train_loss": math.nan, "grad_norm": math.inf})
    assert o.check({"step": 1001, "train_loss": 9.0, "grad_norm": 0.5})


def test_resumed_log_has_no_step_twice_and_forgives_a_torn_line(tmp_path):
    log = RunLog(tmp_path, 0, "none", {})
    for step in range(5):
        log.write({"step": step, "train_loss": float(step)})
    log.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 5, "train_lo')
    log = RunLog(tmp_path, 3, "none", {})
    log.write({"step": 3, "train_loss": 30.0})
    log.close()
    assert read_lines(tmp_path / "metrics.jsonl") == [
        {"step": s, "train_loss": x} for s, x in enumerate([0.0, 1.0, 2.0, 30.0])
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_refused_update_leaves_a_line_that_is_json(tmp_path):
    log = RunLog(tmp_path, 0, "none", {})
    log.write({"step": 0, "train_loss": math.nan, "grad_norm": math.inf, "lr": 1.0})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0, "train_loss": null, "grad_norm": null, "lr": 1.0}\n'


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", 0, "none", {}, main=False)
    log.write({"step": 0})
    log.close()
    assert not (tmp_path / "run").exists() and json.dumps(duration(93784)) == '"1d02h"'


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
        log = RunLog(tmp_path / "run", first, "wandb", {"max_lr": 0.1})
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
    log = RunLog(tmp_path / "run", 0, "wandb", {})  # a new run in an emptied folder is another one to wandb
    log.close()
    assert len({f.name for f in (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")}) == 2


def test_wandb_takes_project_and_name_from_its_variables(tmp_path, monkeypatch):
    told = []
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **who: told.append(who)))
    (tmp_path / "run").mkdir()
    RunLog(tmp_path / "run", 0, "wandb", {})
    monkeypatch.setenv("WANDB_PROJECT", "owt")
    monkeypatch.setenv("WANDB_NAME", "lion")
    RunLog(tmp_path / "run", 0, "wandb", {})
    monkeypatch.delenv("WANDB_PROJECT")  # resumed from another shell, it stays the same run
    RunLog(tmp_path / "run", 5, "wandb", {})
    (tmp_path / "run" / "wandb_id").write_text("abcd")  # as older versions wrote it
    RunLog(tmp_path / "run", 5, "wandb", {})
    assert [(who["project"], who["name"]) for who in told] == [
        *(("gpt2", "run"), ("owt", "lion"), ("owt", "lion"), ("gpt2", "lion"))
    ]
    ids = [who["id"] for who in told]
    assert ids[0] != ids[1] == ids[2] and ids[3] == "abcd"


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H800", 989e12),
        ("NVIDIA H800 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA L4", 121e12),
        ("Tesla T4", 65e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-32GB", 112e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 2080 Ti", 56.9e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H20", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peak_of_a_card_is_the_data_sheets_or_unknown(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert runtime.peak_flops(torch.device("cuda", 0)) == peak
    assert runtime.peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize("mfu, says", [(0.4123, "mfu: 41.2%"), (None, "mfu: unknown")])
def test_console_line(tmp_path, capsys, mfu, says):
    log = RunLog(tmp_path, 0, "none", {})
    record = {"train_loss": 3.5, "lr": 6e-4, "grad_norm": 0.25, "step_ms": 1000.0, "tokens_per_second": 524288.0}
    log._began -= 3600
    log.console({"step": 7, **record, "mfu": mfu}, 19073, 7200.0, 20.0)
    line = capsys.readouterr().out
    assert f"{says} | eta: 2h00m | cost: $20.00" in line and "step     7/19073 | loss: 3.500000" in line
    for step in range(60):
        log.console({**record, "step": step, "train_loss": 3.5 + step % 2 / 100, "mfu": mfu}, 19073, 7200.0, 20.0)
    log.console({**record, "step": 60, "train_loss": 9.0, "mfu": mfu}, 19073, 7200.0, 20.0)
    said = capsys.readouterr().out.splitlines()  # a line a second at most, but no outlier goes unsaid
    assert len(said) == 1 and said[0].startswith("outlier: step 60: train_loss 9.0000 is ")
