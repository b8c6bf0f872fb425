"""Presets have the numbers of the recipes that they reproduce; flags parse; a value that is not valid is refused; ranks
share all settings but local ones; every choice is handled somewhere. test_resume.py has what may change on a resume."""

import functools
import math
import shlex
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints
from unittest.mock import Mock

import pytest
import torch
from helpers import refused

from lifecycle import command_line
from lifecycle.command_line import parse
from lifecycle.metrics import TRACKERS
from model import ACTIVATIONS, NORMS, GPTConfig
from training import optim
from training.config import TrainConfig, flag
from training.presets import DESCRIPTIONS, PRESETS
from training.schedule import DECAYS, count_steps

GPT2, QUICKSTART = PRESETS["gpt2-124m"], PRESETS["quickstart"]


@pytest.fixture(autouse=True)
def saved(monkeypatch):
    """What every checkpoint has for its config, and the defaults of its version, to be changed by a test."""
    content = {
        "config": replace(QUICKSTART, seed=7, out_dir="elsewhere").to_dict(),
        "defaults": TrainConfig().to_dict(),
    }
    monkeypatch.setattr(command_line, "read_train_state", lambda path: content)
    return content


def parse_words(words):
    """The settings that a command line stands for."""
    return parse(shlex.split(words))[0]


# ------------------------------------------------------------------------- presets

# What the larger sizes have in common with build-nanogpt's.
LARGER = "total_batch_size=524288 total_steps=19073 schedule=cosine optimizer=adamw weight_decay=0.1 grad_clip=1.0"

# {preset: what it must resolve to}. Names are fields of TrainConfig, except for total_steps, embed_lr and others
# that follow from several.
RECIPES = {
    # build-nanogpt, train_gpt2.py
    "gpt2-124m": """
        model.n_layer=12 model.n_head=12 model.n_embd=768 model.vocab_size=50304 model.block_size=1024
        model.tied_head=True total_batch_size=524288 sequence_length=1024 total_steps=19073 max_lr=6e-4 min_lr=6e-5
        warmup_steps=715 schedule=cosine optimizer=adamw betas=(0.9,0.95) weight_decay=0.1 grad_clip=1.0
        val_every=250 hellaswag_every=250 save_every=250 keep=2 val_tokens=10485760""",
    # GPT-2 medium, large and XL with the rates of GPT-3's table 2.1
    "gpt2-350m": f"{LARGER} model.n_layer=24 model.n_head=16 model.n_embd=1024 max_lr=3e-4 min_lr=3e-5",
    "gpt2-774m": f"{LARGER} model.n_layer=36 model.n_head=20 model.n_embd=1280 max_lr=2.5e-4 min_lr=2.5e-5",
    "gpt2-1558m": f"{LARGER} model.n_layer=48 model.n_head=25 model.n_embd=1600 max_lr=2e-4 min_lr=2e-5",
    # llm.c discussion 481
    "llmc-124m": """
        total_batch_size=524288 max_lr=6e-4 min_lr=0 warmup_steps=700 weight_decay=0.1 recompute=False zero_stage=1
        val_every=250 save_every=250 sample_every=20000 hellaswag_every=250 total_steps=19560 schedule=cosine
        optimizer=adamw""",
    # DDP-BASEMODEL-TRAIN
    "untied-124m": """
        model.tied_head=False total_batch_size=262144 total_steps=38146 max_lr=6e-4 min_lr=6e-5 warmup_steps=700
        val_every=100 sample_every=1000 save_every=2000 schedule=cosine optimizer=adamw""",
    # nanoGPT, finetune_shakespeare, which begins from gpt2-xl, and keeps its rate constant
    "finetune": "sequence_length=1024 max_lr=3e-5 optimizer=adamw",
    # DDP-BASEMODEL-TRAIN, its sanity run
    "overfit": """
        overfit_single_batch=True total_steps=200 total_batch_size=512 schedule=cosine optimizer=adamw max_lr=3e-3""",
    # modded-nanogpt record 8
    "record8-124m": """
        model.n_layer=12 model.n_head=6 model.n_embd=768 model.head_size=128 model.bias=False model.tied_head=False
        model.norm=rmsnorm model.embedding_norm=True model.init_std=0.0 model.positions=rope model.qk_norm=True
        model.activation=relu2
        model.zero_init_projections=True total_steps=4578 total_batch_size=524288 warmup_steps=0
        schedule=trapezoid cooldown_steps=1308 optimizer=muon muon_lr=0.02 muon_momentum=0.95 max_lr=0.002
        embed_lr=0.3 weight_decay=0 grad_clip=0 min_lr=0 betas=(0.9,0.95) param_dtype=bfloat16
        zero_stage=1""",
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_presets_have_the_numbers_of_their_recipes(name):
    cfg = PRESETS[name]
    derived = {
        "total_steps": count_steps(cfg, 10_300_000_000 // 1024),
        "embed_lr": round(cfg.max_lr * cfg.embed_lr_scale, 9),
        "cooldown_steps": round(cfg.cooldown * cfg.max_steps),
        "betas": str(optim.ALGORITHMS["adamw"].arguments["betas"]).replace(" ", ""),
        "muon_momentum": optim.ALGORITHMS["muon"].arguments["momentum"],
    }
    for pair in RECIPES[name].split():
        field, expected = pair.split("=")
        value = derived[field] if field in derived else functools.reduce(getattr, field.split("."), cfg)
        same = value == pytest.approx(float(expected)) if isinstance(value, float) else str(value) == expected
        assert same, f"{name}: {field} is {value}, the recipe has {expected}"


def test_every_preset_has_a_recipe_and_its_own_name():
    """Two presets of one name, as after a replace() without preset=, would leave one of the recipes without."""
    assert set(PRESETS) - {"quickstart"} == set(RECIPES)
    for name, cfg in PRESETS.items():
        assert cfg.preset == name and str(cfg.run_dir) == f"log/{name}"
        assert TrainConfig.from_dict(cfg.to_dict(), TrainConfig().to_dict()) == cfg


# ------------------------------------------------------------------------- the command line


def test_flags_override_the_preset():
    """With hyphens or underscores; a switch by its name; the last one counts."""
    cfg = parse_words(
        "quickstart --model.n-layer 2 --model.no-bias --no-shuffle --micro-batch-size auto --max-lr=0.001 --keep 3 "
        "--warmup_steps=9 --keep 4 --zero-stage 1 --sample-prompt 'a b' --model.positions rope"
    )

    model = replace(QUICKSTART.model, n_layer=2, bias=False, positions="rope")
    network = {"model": model, "shuffle": False, "max_lr": 0.001, "keep": 4, "warmup_steps": 9, "zero_stage": 1}
    assert cfg == replace(QUICKSTART, **network, sample_prompt="a b")
    flags = f"--micro-batch-size 3 --out-dir quickstart --max-steps 1e4 --seed {2**63 - 1}"
    words = {"micro_batch_size": 3, "out_dir": "quickstart", "max_steps": 10_000, "seed": 2**63 - 1}
    assert parse_words(flags) == replace(GPT2, **words)


def test_the_help_has_every_flag_with_its_value_and_sentence(capsys):
    """But for those that only presets set; also those of the network."""
    with pytest.raises(SystemExit) as ending:
        parse_words("quickstart --max-steps 7 -h")
    assert not ending.value.code
    text = "".join(capsys.readouterr().out.split())  # without the places where lines break
    about = {field.name: field.metadata for field in fields(TrainConfig) if field.name != "model"}
    about |= {f"model.{field.name}": field.metadata for field in fields(GPTConfig)}
    for name, metadata in about.items():
        is_shown = flag(name) in text and metadata["help"].replace(" ", "") in text
        assert is_shown == metadata.get("has_flag", True), name
    assert about["max_steps"]["help"].replace(" ", "") + "(7)" in text and "(off)" in text
    assert set(PRESETS) == {name for name in DESCRIPTIONS if name in text}


def test_resume_brings_the_saved_config_and_its_folder(tmp_path, monkeypatch):
    cfg = parse_words("--resume log/q/model_00100.pt --epochs 2")
    assert (cfg.preset, cfg.seed, cfg.epochs, str(cfg.run_dir)) == ("quickstart", 7, 2, "log/q")
    assert parse_words("quickstart --resume log/q/model_00100.pt").seed == QUICKSTART.seed
    assert parse_words("--resume log/q --out-dir log/other").out_dir == "log/other"

    # train.sh adds one when it restarts, and the last one counts.
    assert parse_words(f"--resume log/q/model_00100.pt --resume={tmp_path}").run_dir == tmp_path
    assert parse_words("--resume log/q/model_00100.pt --resume auto") == replace(GPT2, resume="auto")

    # auto, too, where it finds a run; a preset that is typed counts.
    monkeypatch.setattr(command_line, "latest_step", {Path("log/q"): 100}.get)
    assert parse_words("--resume auto --out-dir log/q").seed == 7
    assert parse_words("quickstart --resume auto --out-dir log/q").seed == QUICKSTART.seed
    assert parse_words("--resume auto --out-dir log/new") == replace(GPT2, resume="auto", out_dir="log/new")


def test_a_tracker_that_is_not_installed_or_has_no_key_is_refused(monkeypatch):
    """Of rank 0 alone, which uses it."""
    monkeypatch.setattr(command_line, "find_spec", {"wandb": None}.get)
    with refused("pip install wandb"):
        parse_words("--tracker wandb")
    login = Mock(side_effect=LookupError("no key"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login, errors=SimpleNamespace(Error=LookupError)))
    monkeypatch.setattr(command_line, "find_spec", {"wandb": "installed"}.get)
    with refused("no key.*WANDB_API_KEY"):
        parse_words("--tracker wandb")
    monkeypatch.setenv("RANK", "1")
    assert parse_words("--tracker wandb").tracker == "wandb"


@pytest.mark.parametrize("words, steps", [
    ("gpt2-124m --epochs 2 --total-batch-size 1024", 2000), ("llmc-124m --epochs 20", 20 * 1000 // 512),
    ("llmc-124m", 19560), ("quickstart", 160), ("quickstart --epochs=2", 2 * 1000 // 4),
    ("--resume a/model_00001.pt --epochs 2", 500),
    ("quickstart --epochs 2 --max_steps=7", 7), ("quickstart --max-steps 7 --epochs 2", 7),
])  # fmt: skip
def test_steps_follow_from_max_steps_epochs_or_data(words, steps):
    """Of 1,000 sequences an epoch."""
    assert count_steps(parse_words(words), 1000) == steps


def test_too_few_steps_are_refused_with_what_suits_the_text():
    """Of 19 sequences an epoch, four a step: four epochs are 19 steps. A smaller batch makes more of them."""
    for words, sequences, fix in (
        ("finetune", 19, "--total-batch-size 1024$"),
        ("gpt2-124m --epochs 1", 1000, "--total-batch-size 25600$"),
        ("finetune", 4, "--max-steps 40$"),
    ):
        with refused(fix):
            count_steps(parse_words(words), sequences)
    assert count_steps(parse_words("finetune --total-batch-size 1024"), 19) == 76
    assert count_steps(parse_words("finetune"), 20) == 20


# ------------------------------------------------------------------------- values


# Each at the end of its range.
EXTREME = {
    "total_batch_size": 2048, "micro_batch_size": 1, "val_tokens": 1024, "min_lr": 6e-4, "save_every": 0, "cooldown": 1,
    "seed": 2**63 - 1, "time_limit": "3h50m",
}  # fmt: skip


def test_a_value_out_of_its_range_is_refused():
    """Also one that a checkpoint holds; test_bad_input.py has those of a command line."""
    replace(GPT2, **EXTREME)
    for bad, named in ({"max_lr": math.nan}, "--max-lr nan"), ({"optimizer": "new"}, "muon"):
        with refused(named):
            TrainConfig.from_dict(GPT2.to_dict() | bad, GPT2.to_dict())


# Where the alternatives of a setting are told apart: a dict from name to function.
TABLES = {
    "optimizer": optim.ALGORITHMS,
    "schedule": DECAYS,
    "tracker": TRACKERS,
    "norm": NORMS,
    "activation": ACTIVATIONS,
    "dtype": vars(torch),
    "param_dtype": vars(torch),
}


@pytest.mark.parametrize("config_class", [TrainConfig, GPTConfig])
def test_every_choice_has_its_entry(config_class):
    for name, hint in get_type_hints(config_class).items():
        if get_origin(hint) is Literal and name not in ("zero_stage", "positions"):
            assert set(get_args(hint)) - {"auto"} <= TABLES[name].keys()


# ------------------------------------------------------------------------- resume and ranks


def test_the_config_of_another_version_keeps_its_meaning(saved):
    """Settings that this version does not know had the defaults of theirs, which may be anything; newer settings are
    absent."""
    config, defaults = saved["config"], saved["defaults"]
    for part, off in ((config, {"beta3": 0.9, "card": ""}), (config["model"], {"softcap": 15.0, "head_bias": True})):
        part |= off
        (defaults if part is config else defaults["model"]).update(off)
    config |= {"allow_drift": True, "time_limit": "1h", "compile": False, "keep": 7}  # the first three are of one start
    del config["zero_stage"]
    assert parse_words("--resume log/q") == replace(QUICKSTART, seed=7, keep=7, out_dir="log", resume="log/q")

    for part, name in ((config["model"], "softcap"), (config, "beta3"), (config, "new")):
        with refused(name):
            before = part.get(name)
            part[name] = 0.0 if before else 3
            parse_words("--resume log/q")
        part[name] = before


def test_in_a_model_of_before_there_were_defaults_false_is_off():
    older = {"n_head": 4, "softcap": 0.0, "head_bias": False}
    assert GPTConfig.from_dict(older) == GPTConfig(n_head=4)
    with pytest.raises(ValueError, match="softcap"):
        GPTConfig.from_dict(older | {"softcap": 15.0})


def test_rmsnorm_of_an_older_model_is_of_the_embedding_too():
    older = {"n_head": 4, "norm": "rmsnorm"}
    assert GPTConfig.from_dict(older).embedding_norm and not GPTConfig.from_dict({"n_head": 4}).embedding_norm
