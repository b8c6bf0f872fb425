"""Presets stand by the ancestors' numbers, flags parse, no field is dead, bad values get one message."""

import dataclasses
import re

import pytest
from conftest import ROOT

from config import PRESETS, TrainConfig, drift, parse, parse_duration
from model import GPTConfig
from runtime import UserError


def nothing_saved(path):
    raise AssertionError(path)


def test_gpt2_124m_is_build_nanogpt():
    c = PRESETS["gpt2-124m"]
    m = c.model
    assert (m.n_layer, m.n_head, m.n_embd, m.block_size, m.vocab_size, m.tied_head) == (12, 12, 768, 1024, 50304, True)
    assert (c.total_batch_size, c.sequence_length, c.steps_per_epoch, c.horizon(0)) == (2**19, 1024, 19073, 19073)
    assert (c.max_lr, c.min_lr, c.warmup_steps, c.weight_decay, c.grad_clip) == (
        6e-4,
        pytest.approx(6e-5),
        715,
        0.1,
        1.0,
    )
    assert (c.beta1, c.beta2, c.schedule, c.optimizer) == (0.9, 0.95, "cosine", "adamw")
    assert (c.val_every, c.hellaswag_every, c.save_every, c.val_tokens) == (250, 250, 5000, 20 * 8 * 64 * 1024)


@pytest.mark.parametrize(
    "name, n_layer, n_head, n_embd, max_lr",
    [("gpt2-350m", 24, 16, 1024, 3e-4), ("gpt2-774m", 36, 20, 1280, 2.5e-4), ("gpt2-1558m", 48, 25, 1600, 2e-4)],
)
def test_larger_sizes(name, n_layer, n_head, n_embd, max_lr):
    c = PRESETS[name]
    assert (c.model.n_layer, c.model.n_head, c.model.n_embd, c.max_lr) == (n_layer, n_head, n_embd, max_lr)


def test_untied_124m():
    c = PRESETS["untied-124m"]
    assert (c.model.tied_head, c.total_batch_size, c.horizon(0), c.warmup_steps) == (False, 262_144, 38_146, 700)
    assert c.min_lr == pytest.approx(0.1 * c.max_lr)
    assert (c.val_every, c.sample_every, c.save_every) == (100, 1000, 2000)


def test_llmc_124m():
    c = PRESETS["llmc-124m"]
    assert (c.total_batch_size, c.max_lr, c.min_lr, c.warmup_steps, c.weight_decay) == (524_288, 6e-4, 0.0, 700, 0.1)
    assert (c.recompute, c.zero_stage, c.val_every, c.save_every, c.sample_every) == (True, 1, 250, 5000, 20_000)
    assert c.hellaswag_every and c.horizon(10_300_000_000 // 1024) == 19_645  # no fixed length: an epoch of the data


def test_speedrun_124m_is_record_8():
    c = PRESETS["speedrun-124m"]
    m = c.model
    assert (m.head_size, m.n_layer, m.n_embd, m.bias, m.tied_head) == (128, 12, 768, False, False)
    assert (m.norm, m.positions, m.activation, m.qk_norm) == ("rmsnorm", "rope", "relu2", True)
    assert (c.max_steps, c.total_batch_size, c.warmup_steps) == (4578, 524_288, 0)
    assert (c.optimizer, c.muon_lr, c.muon_momentum, c.max_lr) == ("muon", 0.02, 0.95, 0.002)
    assert c.max_lr * c.embed_lr_scale == pytest.approx(0.3)
    assert c.cooldown * c.max_steps == pytest.approx(1308) and c.min_lr == 0


def test_every_preset_names_itself_and_survives_a_round_trip():
    for name, c in PRESETS.items():
        assert c.preset == name and str(c.run_dir) == f"log/{name}"
        assert TrainConfig.from_dict(c.to_dict()) == c


def test_parse_flags():
    c = parse("quickstart --model.n-layer 2 --no-shuffle --micro-batch-size auto --max-lr=0.001".split(), nothing_saved)
    assert (c.model.n_layer, c.shuffle, c.micro_batch_size, c.max_lr) == (2, False, "auto", 0.001)
    assert c.model.n_embd == PRESETS["quickstart"].model.n_embd and c.preset == "quickstart"
    assert parse([], nothing_saved) == PRESETS["gpt2-124m"]


def test_resume_path_brings_its_config():
    saved = dataclasses.replace(PRESETS["quickstart"], seed=7, out_dir="elsewhere").to_dict()
    c = parse(["--resume", "log/q/model_00100.pt", "--epochs", "2"], lambda path: saved)
    assert (c.preset, c.seed, c.epochs, str(c.run_dir)) == ("quickstart", 7, 2, "log/q")


def test_horizon():
    c = dataclasses.replace(PRESETS["gpt2-124m"], epochs=2)
    assert c.horizon(10**9) == 2 * 19073
    assert dataclasses.replace(c, steps_per_epoch=0).horizon(1000) == 2 * 1000 // 512
    assert dataclasses.replace(c, max_steps=5).horizon(1000) == 5


@pytest.mark.parametrize("text, seconds", [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("1d", 86400), ("7.5", 7.5)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "change, says",
    [
        ({"total_batch_size": 1000}, ["1000", "--total-batch-size 1024"]),
        ({"sequence_length": 2048}, ["2048", "block-size"]),
        ({"min_lr": 1.0}, ["--min-lr 1.0"]),
        ({"time_limit": "soon"}, ["soon", "3h50m"]),
        ({"epochs": 0}, ["--epochs 0"]),
        ({"save_every": -1}, ["--save-every -1"]),
        ({"micro_batch_size": 0}, ["--micro-batch-size 0"]),
        ({"model": GPTConfig(n_head=7)}, ["--model.n-head 7"]),
    ],
)
def test_bad_values_say_value_and_rule(change, says):
    with pytest.raises(UserError) as e:
        dataclasses.replace(PRESETS["gpt2-124m"], **change)
    for s in says:
        assert s in str(e.value)


def test_unknown_preset_and_flag(fails):
    fails("train_gpt2.py", "gpt2-125m", says=["gpt2-125m", "did you mean 'gpt2-124m'"])
    fails("train_gpt2.py", "quickstart", "--max-stepz", "3", says=["--max-stepz", "--max-steps"])


def test_drift_names_fields():
    old = PRESETS["quickstart"]
    new = dataclasses.replace(old, seed=2, val_every=7)
    harmless, refused = drift(old, new)
    assert harmless == ["val_every: 50 -> 7"] and refused == ["seed: 1337 -> 2"]


@pytest.mark.parametrize("cls", [TrainConfig, GPTConfig])
def test_no_dead_knob(cls):
    sources = {p.name: p.read_text() for p in ROOT.glob("*.py")}
    for f in dataclasses.fields(cls):
        read = re.compile(rf"(cfg|c|config|self|self\.config|old|new)\.{f.name}\b")
        assert any(read.search(text) for text in sources.values()), f"{f.name} is read nowhere"
