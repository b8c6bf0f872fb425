"""The plan before a run: steps, data, disk, time and money; what --dry-run measures and --card predicts."""

import json
import statistics
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, ROOT, choices, parse_config, train_quickstart

import train_gpt2
from model import GPT
from system.cli import UserError
from system.distributed import Runtime
from tokens import shards
from tokens.loader import Loader
from training import optim, plan
from training.cards import find_cards
from training.config import TrainConfig
from training.metrics import RunState
from training.presets import PRESETS


@pytest.mark.parametrize("complete, steps, warnings", [(True, 3, 0), (False, 3, 1), (True, 2, 1)])
def test_the_plan_warns_of_likely_mistakes(
    tiny_args, tiny_data, capsys, monkeypatch, complete, steps, warnings
):  # fmt: skip
    """Of data that are not complete, and of a rate that never peaks. It names the cards of every rank."""
    source = {"name": "x", "subset": "", "column": "text", "revision": "1", "files": []}
    shards.write_manifest(tiny_data, shards.Manifest(source, "npy", 100, complete=complete))
    monkeypatch.setattr(Runtime, "gather", lambda self, name: ["RTX 2080 Ti", "RTX 3090", "RTX 2080 Ti"])
    cfg = parse_config("quickstart", *tiny_args, "--warmup-steps", 2)
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=GPT(cfg.model), micro_batch_size=4)

    plan.print_plan(train_step, Loader(cfg.data_dir, "train", 32, 256), RunState(steps, ""))

    out = capsys.readouterr().out
    assert out.count("warning") == warnings
    assert "2 x RTX 2080 Ti + 1 x RTX 3090" in out
    assert "1 x 2 x 4 x 32" in out and f"{steps * 8 / 267:.2f} epochs" in out


def test_config_json_has_the_settings_and_the_code(one_run):
    saved = json.loads((one_run / "config.json").read_text())
    assert TrainConfig.from_dict(saved).max_steps == saved["resolved_max_steps"] == 12
    assert saved["versions"]["torch"] == str(torch.__version__)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    is_a_clone = head.returncode == 0
    assert not is_a_clone or saved["versions"]["commit"].removesuffix("-dirty") == head.stdout.strip()


# ------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_a_checkpoint_is_no_larger_than_assumed(tiny_args, tmp_path, optimizer):
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1", "--optimizer", optimizer)
    size = sum(path.stat().st_size for path in run.glob("*_00001.pt"))
    cfg = parse_config("quickstart", *tiny_args, "--optimizer", optimizer)
    model = GPT(cfg.model)
    assumed = 4 * model.num_params() + optim.state_bytes(dict(model.named_parameters()), cfg)
    assert assumed < size < 1.25 * assumed  # beside the tensors, a tiny model has many names


@pytest.mark.parametrize("save_every, keep, step, saves", [
    (5, 0, 0, 3), (5, 0, 6, 2), (5, 1, 0, 3), (1, 2, 0, 4), (0, 0, 0, 1),
])  # fmt: skip
def test_the_disk_must_hold_what_is_saved(tiny_args, tmp_path, monkeypatch, save_every, keep, step, saves):
    cfg = parse_config("quickstart", *tiny_args, "--save-every", save_every, "--keep", keep, "--out-dir", tmp_path)
    model = GPT(cfg.model)
    named = dict(model.named_parameters())
    train_step = SimpleNamespace(cfg=cfg, model=model, weights=SimpleNamespace(named=named))
    needed = saves * (4 * model.num_params() + optim.state_bytes(named, cfg))

    monkeypatch.setattr(plan, "free_bytes", lambda folder: needed)
    plan.check_disk(train_step, RunState(12, "", step=step))

    monkeypatch.setattr(plan, "free_bytes", lambda folder: needed - 1)
    with pytest.raises(UserError, match=rf"^{saves} "):
        plan.check_disk(train_step, RunState(12, "", step=step))


def test_a_full_disk_is_refused_before_the_first_step(tiny_args, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match="4 checkpoints"):
        train_quickstart(tiny_args, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.pt"))


# ------------------------------------------------------------------------- --dry-run


def test_a_dry_run_needs_no_data(tiny_args, tmp_path, capsys):
    flags = ["--data-dir", "nowhere", "--out-dir", tmp_path / "run", "--dry-run"]
    train_gpt2.dry_run(parse_config("quickstart", *tiny_args, *flags), CPU)
    assert "12 steps take" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks, micro_steps", [(1, 4), (2, 2)])
def test_a_dry_run_counts_all_micro_steps(tiny_args, monkeypatch, capsys, ranks, micro_steps):
    """Of 8 sequences, two at a time, on a clock by which each call takes a second."""
    ticks = iter(range(1000))
    monkeypatch.setattr(plan.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(Runtime, "gather", lambda self, value: ranks * [value])
    cfg = parse_config("quickstart", *tiny_args, "--gpu-hour-usd", "600")
    calls = []
    train_step = SimpleNamespace(
        cfg=cfg, rt=replace(CPU, world_size=ranks), model=GPT(cfg.model), micro_batch_size=2,
        compute_gradients=lambda batch: calls.append(batch.shape), update=lambda: calls.append("update"),
    )  # fmt: skip
    plan.dry_run(train_step, RunState(12, ""))
    assert set(calls) == {(1, 2, 33), "update"}
    step_s = micro_steps + 1
    out = capsys.readouterr().out
    assert f"{step_s},000 ms: {256 / step_s:.0f} tokens/s, MFU unknown" in out
    assert f"${600 * ranks * 12 * step_s / 3600:.2f}" in out


def test_a_dry_run_on_two_ranks_prints_one_plan(tiny_args, tmp_path, run_ranks):
    run_dir = tmp_path / "run"
    out = run_ranks(2, "train_gpt2.py", "quickstart", *tiny_args, "--dry-run", "--out-dir", run_dir)
    assert "2 x 1 x 4 x 32" in out and out.count("12 steps take") == 1
    assert not run_dir.exists()


# ------------------------------------------------------------------------- --card

# The same work as that of published runs, with the cards and the published milliseconds of a step.
EAGER = replace(PRESETS["gpt2-124m"], compile=False)
VIDEO = replace(PRESETS["gpt2-124m"], total_batch_size=16_384)
XL = replace(PRESETS["gpt2-1558m"], total_batch_size=2**20)
RECORD8, SPEEDRUN = PRESETS["record8-124m"], PRESETS["speedrun-124m"]
LONGER = replace(RECORD8, model=replace(RECORD8.model, block_size=2048), sequence_length=2048)
FITTED = [(SPEEDRUN, "H200", 1071), (VIDEO, "A100-80GB", 90), (EAGER, "H100", 1574)]
CHECKED = [
    (PRESETS["llmc-124m"], "8xH100", 138), (RECORD8, "8xH100", 142), (SPEEDRUN, "8xH200", 144),
    (SPEEDRUN, "8xH100", 155), (EAGER, "2xH100", 755), (EAGER, "8xA100-40GB", 566), (RECORD8, "A100-80GB", 2359),
    (RECORD8, "8xA100-80GB", 262), (PRESETS["untied-124m"], "2xA100-40GB", 755), (PRESETS["llmc-124m"], "8xA100", 300),
    (XL, "8xH100", 2700), (LONGER, "A100-80GB", 2689), (PRESETS["gpt2-124m"], "2x4090", 2372),
]  # fmt: skip


def step_s(cfg, text, **changes):
    return plan.predict_step_s(replace(cfg, **changes), find_cards(text))


def test_published_runs_are_within_the_stated_error():
    errors = [abs(step_s(cfg, cards) * 1e3 / ms - 1) for cfg, cards, ms in CHECKED]
    assert errors[0] < 0.15  # llm.c's
    assert statistics.median(errors) < 0.15 and max(errors) < 0.40
    for cfg, cards, ms in FITTED:
        assert step_s(cfg, cards) * 1e3 == pytest.approx(ms, rel=0.02)


def test_the_time_follows_cards_and_settings():
    cfg = PRESETS["gpt2-124m"]
    one = step_s(cfg, "H100")
    assert step_s(cfg, "8xH100") == pytest.approx(one / 8)
    assert step_s(cfg, "H100", recompute=True) == pytest.approx(one * 4 / 3)
    assert step_s(cfg, "H100", compile=False) > 1.3 * one
    # Unlike cards are as fast as two of the slower: a 2080 Ti beside a 3090, in either order.
    assert step_s(cfg, "2080Ti+3090") == step_s(cfg, "3090+2080Ti") == step_s(cfg, "2x2080Ti") > step_s(cfg, "2x3090")


@pytest.mark.parametrize("preset, cards, zero_stage, verdict", [
    ("gpt2-1558m", "4090", 0, "24.9 of 24 GB per card; they do not fit"),
    ("gpt2-1558m", "8x4090", 1, "14.0 of 24 GB per card; they fit"),
    ("gpt2-124m", "3090+2080Ti", 0, "2.0 of 11 GB per card; they fit"),  # the card with the least memory decides
])  # fmt: skip
def test_a_prediction_says_whether_a_run_fits(preset, cards, zero_stage, verdict):
    cfg = replace(PRESETS[preset], dry_run=True, card=cards, zero_stage=zero_stage)
    assert verdict in plan.predict(cfg)


def test_a_prediction_needs_no_data(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", "train_gpt2.py gpt2-124m --dry-run --card 2xA100-80GB --gpu-hour-usd 1.5".split())
    train_gpt2.main()
    out = capsys.readouterr().out
    hours = 19_073 * step_s(PRESETS["gpt2-124m"], "2xA100-80GB") / 3600
    assert f"19073 steps take 7h36m; ${2 * 1.5 * hours:.2f}" in out
    assert "124,475,904 parameters on 2 x A100" in out and "MFU 50.0%" in out
    assert not list(tmp_path.iterdir())
