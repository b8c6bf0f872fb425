"""The plan before a run: steps, data, disk, time and money; what --dry-run measures and --card predicts."""

import re
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import CPU, choices, parse_config, read_json, read_table, refused, run_main, write_jsonl

from lifecycle import plan
from lifecycle.build import build_trainer
from model import GPT
from system import machine
from system.cards import find_cards
from system.distributed import Runtime
from training.config import TrainConfig
from training.presets import PRESETS
from training.schedule import at


def test_config_json_has_the_settings_and_the_software(one_run):
    saved = read_json(one_run / "config.json")
    settings = {field.name: saved[field.name] for field in fields(TrainConfig)}
    assert TrainConfig.from_dict(settings, settings).max_steps == saved["resolved_max_steps"] == 12
    assert saved["versions"] == machine.versions() and saved["versions"]["torch"] == str(torch.__version__)


# ------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("optimizer", choices(TrainConfig, "optimizer"))
def test_a_checkpoint_is_no_larger_than_assumed(train, tiny_config, optimizer):
    run = train("run", "--max-steps 1 --optimizer", optimizer)
    size = sum(path.stat().st_size for path in run.glob("*_00001.pt"))
    cfg = tiny_config("--optimizer", optimizer)
    trainer = build_trainer(GPT(cfg.model), cfg, CPU, 1)
    assumed = trainer.state.num_bytes() + plan.optim.state_bytes(trainer.model, cfg)
    assert assumed < size < 1.25 * assumed  # beside the tensors, a tiny model has many names


# --save-every | --keep | the step | how many checkpoints are there | how many are to come in a run of 12 steps.
SAVES = """
5 | 0 | 0 | 0 | 3
5 | 0 | 6 | 1 | 2
1 | 2 | 0 | 0 | 4
0 | 0 | 0 | 0 | 1
1 | 2 | 6 | 3 | 1
1 | 1 | 6 | 5 | 1
"""


@pytest.mark.parametrize("row", read_table(SAVES))
def test_the_disk_must_hold_what_is_saved(tiny_config, tmp_path, monkeypatch, row):
    save_every, keep, step, there, saves = map(int, row)
    disk = SimpleNamespace()
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: disk)
    monkeypatch.setattr(plan, "complete_steps", lambda run_dir: range(there))
    cfg = tiny_config("--save-every", save_every, "--keep", keep, "--out-dir", tmp_path)
    monkeypatch.setattr(plan.optim, "state_bytes", lambda model, cfg: 600)
    trainer = SimpleNamespace(model=None, state=SimpleNamespace(step=step, num_bytes=lambda: 400))
    disk.free = saves * 1000
    plan.check_disk(cfg, trainer, 12)
    disk.free -= 1
    with refused(rf"^{saves} "):
        plan.check_disk(cfg, trainer, 12)


def test_a_full_disk_is_refused_before_the_first_step(train, monkeypatch):
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    with refused("4 checkpoints"):
        train("run")


# ------------------------------------------------------------------------- the result


# The losses of steps 0, 6 and 12, of which the first is not saved | what is said behind the last weights.
RESULTS = """
9.0 3.25 4.0 | ; .*model_00006.pt has a lower val loss, 3.2500
2.5 3.25 3.0 |
             |
"""


@pytest.mark.parametrize("losses, said", read_table(RESULTS))
def test_the_end_names_better_weights_that_are_there(trained_run, capsys, losses, said):
    rows = [{"step": 6 * i, "val_loss": float(loss)} for i, loss in enumerate(losses.split())]
    write_jsonl(trained_run / "metrics.jsonl", rows)
    plan.print_result(parse_config("quickstart", "--out-dir", trained_run), 0, 12, 60.0)
    assert re.search(f"in 1m00s: {trained_run}/model_00012.pt{said}\n", capsys.readouterr().out)


# ------------------------------------------------------------------------- --dry-run


def test_a_dry_run_counts_all_micro_steps(tiny_config, monkeypatch, capsys):
    """Of 8 sequences, two at a time on each of two ranks, on a clock by which a micro-step takes a second, and what
    comes once a step a second, too."""
    seconds = []  # one entry for each second that has passed
    trainer = Mock(B=2, compute_gradients=seconds.extend, update=lambda: seconds.append(1))
    monkeypatch.setattr(plan.time, "perf_counter", lambda: len(seconds))
    monkeypatch.setattr(plan, "build_trainer", lambda *args: trainer)
    monkeypatch.setattr(Runtime, "gather", lambda self, value: [value, value])
    plan.dry_run(tiny_config("--gpu-hour-usd 600"), replace(CPU, world_size=2))
    out = capsys.readouterr().out
    assert f"3,000 ms: {256 / 3:.0f} tokens/s, MFU unknown" in out  # two micro-steps, and the rest
    assert f"${600 * 2 * 12 * 3 / 3600:.2f}" in out


def test_a_dry_run_on_two_ranks_prints_one_plan(train_ranks, tmp_path):
    """It needs no data, and leaves nothing behind."""
    out = train_ranks(2, "run", "--data-dir nowhere --dry-run")
    assert "ranks: 2, micro-steps: 1, sequences: 4, each of 32 " in out and out.count("12 steps take") == 1
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_a_resume_counts_what_is_left(tiny_args, trained_run, capsys):
    flags = [*tiny_args, "--resume auto --max-steps 20 --out-dir", trained_run]
    plan.dry_run(parse_config("quickstart", *flags), CPU)
    out = capsys.readouterr().out
    assert "12 to 20, each of" in out and "\n8 steps take" in out


# ------------------------------------------------------------------------- --card

# The same work as that of published runs, with the cards and the published milliseconds of a step.
VIDEO = replace(PRESETS["gpt2-124m"], total_batch_size=16_384)
PUBLISHED = PRESETS | {
    "eager": replace(PRESETS["gpt2-124m"], compile=False),
    "video": VIDEO,
    "xl": replace(PRESETS["gpt2-1558m"], total_batch_size=2**20),
}
# 621k tokens/s a B200 and 128k an L40S: modded-nanogpt's track 3, 20260501_muonsq and 20260504_muloco_normuonh.
FITTED = """
record8-124m | H200      | 1071
video        | A100-80GB | 90
eager        | H100      | 1574
record8-124m | 8xB200    | 105.5
record8-124m | 4xL40S    | 1024
"""
# docs/running.md has these as a table, with their sources.
CHECKED = """
llmc-124m    | 8xH100      | 138
record8-124m | 8xH100      | 142
record8-124m | 8xH100      | 155
record8-124m | 8xH200      | 144
eager        | 2xH100      | 793
xl           | 8xH100      | 2700
llmc-124m    | 8xA100      | 300
record8-124m | 4xA100      | 649
eager        | 8xA100      | 477
record8-124m | A100        | 2359
untied-124m  | 2xA100-40GB | 755
gpt2-124m    | 2x4090      | 2372
"""


def step_s(cfg, text):
    return plan.predict_step_s(cfg, find_cards(text), at(0, cfg, 100))


def errors_of(table):
    """By which part of it each published time is missed."""
    return [abs(step_s(PUBLISHED[name], cards) * 1e3 / float(ms) - 1) for name, cards, ms in read_table(table)]


def test_published_runs_are_within_the_stated_error():
    errors = errors_of(CHECKED)
    assert sum(error < 0.15 for error in errors) == 9 and max(errors) < 0.25
    assert max(errors_of(FITTED)) < 0.02


def test_the_time_follows_cards_and_settings():
    """Unlike cards are as fast as two of the slower: a 2080 Ti beside a 3090, in either order."""
    assert step_s(replace(VIDEO, recompute=True), "H100") == pytest.approx(step_s(VIDEO, "H100") * 4 / 3)
    mixed, reversed, slower, faster = (step_s(VIDEO, c) for c in ("2080Ti+3090", "3090+2080Ti", "2x2080Ti", "2x3090"))
    assert mixed == reversed == slower > faster


# Of unlike cards the one with the least memory decides.
FITS = """
gpt2-1558m | 4090        | 0 | 24.9 of 24 GB per card; they do not fit
gpt2-1558m | 8x4090      | 1 | 14.0 of 24 GB per card; they fit
gpt2-124m  | 3090+2080Ti | 0 | 2.0 of 11 GB per card; they fit
"""


@pytest.mark.parametrize("preset, cards, zero_stage, verdict", read_table(FITS))
def test_a_prediction_says_whether_a_run_fits(preset, cards, zero_stage, verdict):
    assert verdict in plan.predict(replace(PRESETS[preset], zero_stage=int(zero_stage)), cards)


@pytest.mark.parametrize("cards, said", [("H100", "12 published runs"), ("2xH100", "much longer")])
def test_a_prediction_is_not_vouched_for_where_no_run_was_as_small(cards, said):
    assert said in plan.predict(VIDEO, cards)


def test_a_prediction_needs_no_data(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run_main("train_gpt2.py", "gpt2-124m", "--card 2xA100-80GB --gpu-hour-usd 1.5") == 0
    out = capsys.readouterr().out
    # 524,288 tokens of 0.86 GFLOP on two cards of 312 TFLOP/s, of which half is reached: 1.436 s a step.
    assert "19,073 steps take 7h37m, $22.83" in out
    assert "124,475,904 parameters on 2 x A100" in out and "MFU 50.0%" in out
    assert not list(tmp_path.iterdir())


def test_the_price_has_what_is_done_between_steps():
    """Each at 0, 250, ..., 19,000 and 19,073; at 100,000 tokens a second in training, and three times that forward."""
    seconds = {
        "val_every": 78 * 10_485_760 / 300_000,
        "hellaswag_every": 78 * 1_830_000 / 0.69 / 300_000,
        "sample_every": 77 * 48 * 0.01,  # not at step 0
        "save_every": 78 * 1.5e9 / 2e10,
    }
    facts = (int(1.5e9), 0, 19_073, 1e5)
    nothing, everything = (replace(PRESETS["gpt2-124m"], **dict.fromkeys(seconds, every)) for every in (0, 250))
    for name, expected in seconds.items():
        assert plan.predict_pauses_s(replace(nothing, **{name: 250}), *facts) == pytest.approx(expected, rel=1e-6), name
    assert plan.predict_pauses_s(everything, *facts) == pytest.approx(sum(seconds.values()), rel=1e-6)

    # And the line adds up.
    everything = replace(everything, gpu_hour_usd=100.0)
    lines = plan.predict(everything, "H100").splitlines()
    dollars = [float(text) for line in lines[3:5] for text in re.findall(r"\$([\d.]+)", line)]
    assert dollars[0] + dollars[1] == pytest.approx(dollars[2], abs=0.02) and dollars[1] > 10


def test_a_prediction_counts_the_data_that_are_there(tiny_data):
    cfg = parse_config("finetune", "--sequence-length 32 --total-batch-size 256 --data-dir", tiny_data)
    # Of 3,001, 4,097 and 1,500 tokens: 93 + 128 + 46 sequences an epoch, in four epochs 133 times 8.
    assert "\n133 steps take" in plan.predict(cfg, "H100")
    with refused("nowhere"):
        plan.predict(replace(cfg, data_dir="nowhere"), "H100")


@pytest.mark.parametrize("steps, warns", [(133, False), (134, True)])
def test_data_that_are_read_too_often_are_a_warning(tiny_config, capsys, steps, warns):
    """More than four times."""
    cfg = tiny_config()
    data = plan.open_data(cfg)
    plan.print_plan(cfg, CPU, GPT(cfg.model), data, at(0, cfg, steps), steps)
    assert ("warning" in capsys.readouterr().out) == warns


@pytest.mark.parametrize("part, warns", [(2, True), (1.02, False)])
def test_data_with_fewer_steps_than_the_preset_are_a_warning(capsys, part, warns):
    """19,560 steps of 512 sequences."""
    cfg = parse_config("llmc-124m", "--data-dir nowhere")
    data = SimpleNamespace(order=SimpleNamespace(sequences_per_epoch=round(19_560 * 512 / part)), T=1024, files=[])
    plan.print_plan(cfg, CPU, GPT.without_memory(cfg.model), data, at(0, cfg, 19_560), 19_560)
    assert ("has 9,780 steps" in capsys.readouterr().out) == warns
