"""Spikes are noticed, quiet curves are not; metrics.jsonl survives a torn line and a restart."""

import json
import math
import random

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


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", 0, "none", {}, main=False)
    log.write({"step": 0})
    log.close()
    assert not (tmp_path / "run").exists() and json.dumps(duration(93784)) == '"1d02h"'
