"""Presets stand by the ancestors' numbers, flags parse, no field is dead, bad values get one message."""

import dataclasses
import functools
import re

import pytest
from helpers import ROOT

from model import GPTConfig
from system.cli import UserError
from system.units import parse_duration
from training.config import MAY_CHANGE, TrainConfig, config_drift
from training.presets import PRESETS, RENAMED, is_network_from_init, parse


def nothing_saved(path):
    raise AssertionError(path)


ANCESTORS = {  # what each preset must resolve to, and whose numbers these are
    "gpt2-124m": ("build-nanogpt, train_gpt2.py", """
        model.n_layer=12 model.n_head=12 model.n_embd=768 model.vocab_size=50304 model.block_size=1024
        model.tied_head=True total_batch_size=524288 sequence_length=1024 horizon=19073 max_lr=6e-4 min_lr=6e-5
        warmup_steps=715 schedule=cosine optimizer=adamw beta1=0.9 beta2=0.95 weight_decay=0.1 grad_clip=1.0
        val_every=250 hellaswag_every=250 save_every=5000 val_tokens=10485760"""),
    "gpt2-350m": ("GPT-2 medium, GPT-3 table 2.1", """
        model.n_layer=24 model.n_head=16 model.n_embd=1024 max_lr=3e-4 min_lr=3e-5 total_batch_size=524288"""),
    "gpt2-774m": ("GPT-2 large, GPT-3 table 2.1", """
        model.n_layer=36 model.n_head=20 model.n_embd=1280 max_lr=2.5e-4"""),
    "gpt2-1558m": ("GPT-2 XL, GPT-3 table 2.1", """
        model.n_layer=48 model.n_head=25 model.n_embd=1600 max_lr=2e-4"""),
    "llmc-124m": ("llm.c discussion 481", """
        total_batch_size=524288 max_lr=6e-4 min_lr=0 warmup_steps=700 weight_decay=0.1 recompute=False zero_stage=1
        val_every=250 save_every=5000 sample_every=20000 hellaswag_every=250 horizon=19645"""),
    "untied-124m": ("DDP-BASEMODEL-TRAIN", """
        model.tied_head=False total_batch_size=262144 horizon=38146 max_lr=6e-4 min_lr=6e-5 warmup_steps=700
        val_every=100 sample_every=1000 save_every=2000"""),
    "finetune": ("nanoGPT, finetune_shakespeare", """
        init_from=gpt2 total_batch_size=32768 sequence_length=1024 max_lr=3e-5"""),
    "overfit": ("DDP-BASEMODEL-TRAIN, its sanity run", "overfit_single_batch=True horizon=200"),
    "record8-124m": ("modded-nanogpt record 8", """
        model.n_layer=12 model.n_head=6 model.n_embd=768 model.head_size=128 model.bias=False model.tied_head=False
        model.norm=rmsnorm model.positions=rope model.activation=relu2 model.qk_norm=True
        model.zero_init_projections=True horizon=4578 total_batch_size=524288 warmup_steps=0 schedule=trapezoid
        cooldown_steps=1308 optimizer=muon muon_lr=0.02 muon_momentum=0.95 max_lr=0.002 embed_lr=0.3 weight_decay=0
        muon_weight_decay=0 grad_clip=0 min_lr=0 beta1=0.9 beta2=0.95 weights=bfloat16 zero_stage=1"""),
    "speedrun-124m": ("modded-nanogpt's simple trainer, result 36", """
        model.n_layer=12 model.n_head=6 model.n_embd=768 model.head_size=128 model.bias=True model.head_bias=True
        model.tied_head=False model.norm=rmsnorm_gain model.positions=half_rope model.activation=relu2
        model.qk_norm=True model.attention_scale=0.12 model.softcap=15 model.zero_init_projections=True horizon=3250
        total_batch_size=524288 warmup_steps=0 schedule=trapezoid cooldown=0.7 min_lr=0 optimizer=muon muon_lr=0.025
        muon_momentum=0.95 newton_schulz=exact muon_weight_decay=0.05 max_lr=0.004 embed_lr=0.7 vector_lr=0.015
        weight_decay=0.001 vector_weight_decay=0.001 beta1=0.8 beta2=0.95 grad_clip=0 weights=bfloat16"""),
}  # fmt: skip


def test_presets_resolve_to_their_ancestors_numbers():
    """Printed, too: pytest -s -k ancestors shows every preset's resolved values."""
    for name, (ancestor, wanted) in ANCESTORS.items():
        c = PRESETS[name]
        derived = {"horizon": c.total_steps(10_300_000_000 // 1024), "embed_lr": round(c.max_lr * c.embed_lr_scale, 9)}
        derived["vector_lr"] = round(c.max_lr * c.vector_lr_scale, 9)
        derived["cooldown_steps"] = round(c.cooldown * c.max_steps)
        print(f"\n{name}, after {ancestor}:")
        for key, want in (pair.split("=") for pair in wanted.split()):
            value = derived[key] if key in derived else functools.reduce(getattr, key.split("."), c)
            print(f"  {key} {value}")
            same = value == pytest.approx(float(want)) if isinstance(value, float) else str(value) == want
            assert same, f"{name}: {key} is {value}, {ancestor} has {want}"
    assert set(PRESETS) - set(ANCESTORS) == {"quickstart", "sprint-124m"}  # they are our own


def test_the_sprint_is_the_speedrun_with_three_more_parts():
    speedrun, sprint = (PRESETS[name].to_dict() for name in ("speedrun-124m", "sprint-124m"))
    assert sprint.pop("model") == speedrun.pop("model") | {"value_tables": 3}
    more = {"preset": "sprint-124m", "optimizer": "normuon", "muon_momentum_warmup": 300, "max_steps": 2900}
    assert sprint == speedrun | more


def test_every_preset_names_itself_and_survives_a_round_trip():
    for name, c in PRESETS.items():
        assert c.preset == name and str(c.run_dir) == f"log/{name}"
        assert TrainConfig.from_dict(c.to_dict()) == c


def test_parse_flags():
    switches = ["--compile=False", "--model.head_bias=0", "--recompute=1", "--epochs=1"]  # as others write them
    c = parse(["speedrun-124m", *switches], nothing_saved)
    assert (c.compile, c.model.head_bias, c.recompute) == (False, False, True)
    c = parse("quickstart --model.n-layer 2 --no-shuffle --micro-batch-size auto --max-lr=0.001".split(), nothing_saved)
    assert (c.model.n_layer, c.shuffle, c.micro_batch_size, c.max_lr) == (2, False, "auto", 0.001)
    assert c.model.n_embd == PRESETS["quickstart"].model.n_embd and c.preset == "quickstart"
    assert parse([], nothing_saved) == PRESETS["gpt2-124m"]


def test_names_from_elsewhere_are_answered_with_ours():
    """Commands as nanoGPT's and DDP-BASEMODEL-TRAIN's READMEs have them; every flag in an answer is one of ours."""
    nanogpt = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1
        --block_size=64 --batch_size=12 --n_layer=4 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"""
    ddp = """--num_iterations=38146 --sequence_length=1024 --batch_size=16 --compile=1 --tensorcores=1 --flash=1
        --input_train_bin=a/*_train_*.bin --output_dir=./outdir --learning_rate=6e-4 --learning_rate_decay_frac=0.1
        --warmup_iters=700 --val_loss_every=100 --save_every_niter=2000 --wandb_log_iters=1 --wandb_project_id=g"""
    same = {"--device=cpu", "--compile=False", "--sequence_length=1024", "--compile=1"}
    for line in (nanogpt, ddp, "gpt2-xl --learning-rate 1e-3 --init_from=resume"):
        with pytest.raises(UserError) as e:
            parse(line.split(), nothing_saved)
        old = [word for word in line.split() if word not in same and word != "1e-3"]
        assert [answer.split(": ")[0].strip() for answer in str(e.value).splitlines()[1:]] == old
    fields = {f"--{f.name.replace('_', '-')}" for f in dataclasses.fields(TrainConfig)}
    assert set(re.findall(r"--[a-z-]+\b(?!\.)", RENAMED)) <= fields
    c = parse("untied-124m --compile=0 --overfit_single_batch=1 --model.tied-head=true --zero_stage=1".split(), None)
    assert (c.compile, c.overfit_single_batch, c.model.tied_head, c.zero_stage) == (False, True, True, 1)


def test_the_last_resume_counts_and_brings_its_config_and_folder(tmp_path):
    """train.sh adds one when it restarts; --keep may have removed the file that the first one names."""
    seen, saved = [], dataclasses.replace(PRESETS["quickstart"], seed=7, out_dir="elsewhere").to_dict()
    read = lambda path: (seen.append(path), saved)[1]
    words = ["--resume", "log/q/model_00100.pt", "--epochs", "2"]
    c = parse(words, read)
    assert (c.preset, c.seed, c.epochs, str(c.run_dir)) == ("quickstart", 7, 2, "log/q")
    assert parse([*words, f"--resume={tmp_path}"], read).run_dir == tmp_path
    assert parse([*words, "--resume", "auto"], read).resume == "auto" and seen == [
        "log/q/model_00100.pt",
        str(tmp_path),
    ]


def test_horizon():
    c = dataclasses.replace(PRESETS["gpt2-124m"], epochs=2)
    assert c.total_steps(10**9) == 2 * 19073
    assert dataclasses.replace(c, steps_per_epoch=0).total_steps(1000) == 2 * 1000 // 512
    assert dataclasses.replace(c, max_steps=5).total_steps(1000) == 5


@pytest.mark.parametrize("text, seconds", [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("1d", 86400), ("7.5", 7.5)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "change, says",
    [
        ({"total_batch_size": 1000}, ["1000", "--total-batch-size 1024"]),
        ({"sequence_length": 2048}, ["--sequence-length 2048", "--model.block-size 2048"]),
        ({"min_lr": 1.0}, ["--min-lr 1.0"]),
        ({"time_limit": "soon"}, ["soon", "3h50m"]),
        ({"epochs": 0}, ["--epochs 0"]),
        ({"save_every": -1}, ["--save-every -1"]),
        ({"micro_batch_size": 0}, ["--micro-batch-size 0"]),
    ],
)
def test_bad_values_say_value_and_rule(change, says):
    with pytest.raises(UserError) as e:
        dataclasses.replace(PRESETS["gpt2-124m"], **change)
    for s in says:
        assert s in str(e.value)


def test_a_network_that_cannot_be_says_value_and_rule(expect_failure):
    with pytest.raises(ValueError, match="n_head 7 does not divide n_embd 768"):
        GPTConfig(n_head=7)
    expect_failure("train_gpt2.py", "--model.n-head", "7", mentions=["n_head 7 does not divide n_embd 768"])


def test_unknown_preset_and_flag(expect_failure):
    expect_failure("train_gpt2.py", "gpt2-125m", mentions=["gpt2-125m", "did you mean 'gpt2-124m'"])
    expect_failure("train_gpt2.py", "quickstart", "--max-stepz", "3", mentions=["--max-stepz", "--max-steps"])
    with pytest.raises(SystemExit):
        parse("--max-steps 5 quickstart".split(), nothing_saved)  # a preset comes first
    assert parse(["--out-dir", "quickstart"], nothing_saved).out_dir == "quickstart"


def test_a_missing_tracker_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("training.presets.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        parse(["quickstart", "--tracker", "wandb"], nothing_saved)


def test_drift_names_fields():
    old = PRESETS["quickstart"]
    new = dataclasses.replace(old, seed=2, val_every=7)
    harmless, refused = config_drift(old, new)
    assert harmless == ["val_every: 40 -> 7"] and refused == ["seed: 1337 -> 2"]
    assert MAY_CHANGE < {f.name for f in dataclasses.fields(TrainConfig)}


@pytest.mark.parametrize("cls", [TrainConfig, GPTConfig])
def test_no_dead_knob(cls):
    wings = [ROOT, ROOT / "system", ROOT / "tokens", ROOT / "training"]
    sources = {p: p.read_text() for wing in wings for p in wing.glob("*.py")}
    for f in dataclasses.fields(cls):
        read = re.compile(rf"(cfg|c|config|self|self\.config|old|new)\.{f.name}\b")
        assert any(read.search(text) for text in sources.values()), f"{f.name} is read nowhere"


def test_epochs_count_where_they_are_given():
    """Though the preset, or the checkpoint, has a number of steps."""
    for words in (["--epochs", "2"], ["--epochs=2"], ["--resume", "a/model_00001.pt", "--epochs", "2"]):
        preset = [] if "--resume" in words else ["quickstart"]
        cfg = parse([*preset, *words], lambda path: PRESETS["quickstart"].to_dict())
        assert cfg.total_steps(1000) == 2 * 1000 // cfg.sequences_per_step
    assert parse(["quickstart", "--epochs", "2", "--max-steps", "7"], None).total_steps(1000) == 7
    with pytest.raises(UserError, match="less than one step"):
        PRESETS["gpt2-124m"].__class__(epochs=3).total_steps(100)


def test_the_network_is_that_of_init_from_unless_a_flag_says_otherwise():
    assert is_network_from_init(PRESETS["finetune"]) and not is_network_from_init(PRESETS["gpt2-124m"])
    assert not is_network_from_init(parse(["finetune", "--model.n-layer", "3"], nothing_saved))
    later = dataclasses.replace(PRESETS["finetune"], preset="of a later version")  # as a checkpoint may say
    assert not is_network_from_init(later)
