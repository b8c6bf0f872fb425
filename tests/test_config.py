"""Presets have the numbers of the recipes that they reproduce; flags parse; a value that is not valid is refused; the
settings that may change on resume or between ranks are told from the others; every choice is handled somewhere."""

import dataclasses
import functools
import importlib
import re

import pytest
import tyro
from helpers import ROOT, choices, fields_with_choices

from model import GPTConfig
from system.cli import UserError
from training.config import RULES, TrainConfig, config_drift, settings_by_flag
from training.presets import PRESETS, is_network_from_init, parse

QUICKSTART = PRESETS["quickstart"]


def read_nothing(path):
    """For `parse`: the flags name no checkpoint, so reading one is an error."""
    raise AssertionError(path)


def parse_words(words: str) -> TrainConfig:
    return parse(words.split(), read_nothing)


# ------------------------------------------------------------------------- presets

# {preset: (whose numbers these are, what the preset must resolve to)}. Names are fields of TrainConfig, except for
# total_steps, embed_lr, vector_lr and cooldown_steps, which follow from several fields.
RECIPES = {
    "gpt2-124m": ("build-nanogpt, train_gpt2.py", """
        model.n_layer=12 model.n_head=12 model.n_embd=768 model.vocab_size=50304 model.block_size=1024
        model.tied_head=True total_batch_size=524288 sequence_length=1024 total_steps=19073 max_lr=6e-4 min_lr=6e-5
        warmup_steps=715 schedule=cosine optimizer=adamw beta1=0.9 beta2=0.95 weight_decay=0.1 grad_clip=1.0
        val_every=250 hellaswag_every=250 save_every=5000 val_tokens=10485760"""),
    "gpt2-350m": ("GPT-2 medium, GPT-3 table 2.1", """
        model.n_layer=24 model.n_head=16 model.n_embd=1024 max_lr=3e-4 min_lr=3e-5 total_batch_size=524288
        total_steps=19073 schedule=cosine optimizer=adamw weight_decay=0.1 grad_clip=1.0 warmup_steps=715"""),
    "gpt2-774m": ("GPT-2 large, GPT-3 table 2.1", """
        model.n_layer=36 model.n_head=20 model.n_embd=1280 max_lr=2.5e-4 min_lr=2.5e-5 total_batch_size=524288
        total_steps=19073 schedule=cosine optimizer=adamw weight_decay=0.1 grad_clip=1.0 warmup_steps=715"""),
    "gpt2-1558m": ("GPT-2 XL, GPT-3 table 2.1", """
        model.n_layer=48 model.n_head=25 model.n_embd=1600 max_lr=2e-4 min_lr=2e-5 total_batch_size=524288
        total_steps=19073 schedule=cosine optimizer=adamw weight_decay=0.1 grad_clip=1.0 warmup_steps=715"""),
    "llmc-124m": ("llm.c discussion 481", """
        total_batch_size=524288 max_lr=6e-4 min_lr=0 warmup_steps=700 weight_decay=0.1 recompute=False zero_stage=1
        val_every=250 save_every=5000 sample_every=20000 hellaswag_every=250 total_steps=19645 schedule=cosine
        optimizer=adamw"""),
    "untied-124m": ("DDP-BASEMODEL-TRAIN", """
        model.tied_head=False total_batch_size=262144 total_steps=38146 max_lr=6e-4 min_lr=6e-5 warmup_steps=700
        val_every=100 sample_every=1000 save_every=2000 schedule=cosine optimizer=adamw"""),
    "finetune": ("nanoGPT, finetune_shakespeare", """
        init_from=gpt2 total_batch_size=32768 sequence_length=1024 max_lr=3e-5 optimizer=adamw schedule=cosine
        epochs=2"""),
    "overfit": ("DDP-BASEMODEL-TRAIN, its sanity run", """
        overfit_single_batch=True total_steps=200 total_batch_size=512 schedule=cosine optimizer=adamw max_lr=3e-3"""),
    "record8-124m": ("modded-nanogpt record 8", """
        model.n_layer=12 model.n_head=6 model.n_embd=768 model.head_size=128 model.bias=False model.tied_head=False
        model.norm=rmsnorm model.positions=rope model.activation=relu2 model.qk_norm=True
        model.zero_init_projections=True total_steps=4578 total_batch_size=524288 warmup_steps=0
        schedule=trapezoid cooldown_steps=1308 optimizer=muon muon_lr=0.02 muon_momentum=0.95 max_lr=0.002
        embed_lr=0.3 weight_decay=0 muon_weight_decay=0 grad_clip=0 min_lr=0 beta1=0.9 beta2=0.95 weights=bfloat16
        zero_stage=1"""),
    "speedrun-124m": ("modded-nanogpt's simple trainer, result 36", """
        model.n_layer=12 model.n_head=6 model.n_embd=768 model.head_size=128 model.bias=True model.head_bias=True
        model.tied_head=False model.norm=rmsnorm_gain model.positions=half_rope model.activation=relu2
        model.qk_norm=True model.attention_scale=0.12 model.softcap=15 model.zero_init_projections=True
        total_steps=3250 total_batch_size=524288 warmup_steps=0 schedule=trapezoid cooldown=0.7 min_lr=0 optimizer=muon
        muon_lr=0.025 muon_momentum=0.95 newton_schulz=exact muon_weight_decay=0.05 max_lr=0.004 embed_lr=0.7
        vector_lr=0.015
        weight_decay=0.001 vector_weight_decay=0.001 beta1=0.8 beta2=0.95 grad_clip=0 weights=bfloat16"""),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_presets_have_the_numbers_of_their_recipes(name):
    """Printed, too: pytest -s -k recipes shows every preset's resolved values."""
    cfg = PRESETS[name]
    derived = {
        "total_steps": cfg.total_steps(10_300_000_000 // 1024),
        "embed_lr": round(cfg.max_lr * cfg.embed_lr_scale, 9),
        "vector_lr": round(cfg.max_lr * cfg.vector_lr_scale, 9),
        "cooldown_steps": round(cfg.cooldown * cfg.max_steps),
    }
    source, pairs = RECIPES[name]
    stated = dict(pair.split("=") for pair in pairs.split())
    print(f"\n{name}, after {source}:")
    for field, expected in stated.items():
        value = derived[field] if field in derived else functools.reduce(getattr, field.split("."), cfg)
        print(f"  {field} {value}")
        same = value == pytest.approx(float(expected)) if isinstance(value, float) else str(value) == expected
        assert same, f"{name}: {field} is {value}, {source} has {expected}"

    # An entry that states nothing would check nothing.
    assert {"total_batch_size", "schedule", "optimizer", "max_lr"} <= stated.keys()
    assert {"total_steps", "epochs"} & stated.keys()


def test_every_preset_has_a_recipe_and_its_own_name():
    """Two presets of one name, as after a replace() without preset=, would leave one of the recipes without."""
    assert set(PRESETS) - {"quickstart"} == set(RECIPES)
    for name, cfg in PRESETS.items():
        assert cfg.preset == name and str(cfg.run_dir) == f"log/{name}"
        assert TrainConfig.from_dict(cfg.to_dict()) == cfg


# ------------------------------------------------------------------------- the command line


def test_flags_override_the_preset():
    """With hyphens or underscores; a switch by its name."""
    cfg = parse_words(
        "quickstart --model.n-layer 2 --no-shuffle --micro-batch-size auto --max-lr=0.001 --warmup_steps=9"
    )

    model = dataclasses.replace(QUICKSTART.model, n_layer=2)
    assert cfg == dataclasses.replace(QUICKSTART, model=model, shuffle=False, max_lr=0.001, warmup_steps=9)
    assert parse_words("") == PRESETS["gpt2-124m"]
    assert parse_words("--out-dir quickstart").out_dir == "quickstart"


def test_an_unknown_preset_is_refused_with_the_presets():
    with pytest.raises(UserError) as e:
        parse_words("gpt2-xl --max-steps 3")
    assert all(word in str(e.value) for word in ["'gpt2-xl'", *PRESETS, "docs/coming-from.md"])
    assert (ROOT / "docs" / "coming-from.md").is_file()


@pytest.mark.parametrize("flags, named", [
    ("--max-lrr 3", ["--max-lrr", "--max-lr", "coming-from"]), ("--compile=0", ["0"]),
    ("--max-steps 5 overfit", ["overfit"]), ("--schedule linear", ["linear", "trapezoid"]),
    ("--seed x", ["--seed", "x"]), ("--resume", ["--resume"]), ("--model.n-head 7", ["n_head 7"]),
])  # fmt: skip
def test_a_bad_flag_ends_with_exit_code_2_and_is_named(flags, named, capsys):
    with pytest.raises(SystemExit) as e:
        parse_words(f"quickstart {flags}")

    output = capsys.readouterr()
    assert e.value.code == 2
    assert all(word in output.out + output.err for word in named)


def test_a_bad_flag_is_reported_by_rank_0_alone(capsys, monkeypatch):
    """The others wait, because torchrun ends all ranks when the first one exits."""
    waited = []
    monkeypatch.setattr("training.presets.time.sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as e:
        parse_words("quickstart --max-lrr 3")
    output = capsys.readouterr()
    assert e.value.code == 2 and output.out + output.err == "" and waited


@pytest.mark.parametrize("script", ["train_gpt2", "fineweb", "hellaswag", "infer"])
def test_help_explains_every_flag(script):
    module = importlib.import_module(script)
    config_class = TrainConfig if script == "train_gpt2" else module.Args
    with pytest.warns(DeprecationWarning):
        flags = tyro.extras.get_parser(config_class)._actions
    assert [flag.option_strings for flag in flags if re.match(r"\(|$", flag.help or "")] == []


def test_help_shows_the_values_of_the_preset(capsys):
    for words in ("quickstart -h", "quickstart --help"):
        with pytest.raises(SystemExit) as e:
            parse_words(words)
        text = capsys.readouterr().out
        assert e.value.code == 0
        assert "(default: 80)" in text and "trapezoid" in text and "speedrun-124m" in text


def test_resume_brings_the_saved_config_and_its_folder():
    saved = dataclasses.replace(QUICKSTART, seed=7, out_dir="elsewhere").to_dict()
    cfg = parse(["--resume", "log/q/model_00100.pt", "--epochs", "2"], lambda path: saved)
    assert (cfg.preset, cfg.seed, cfg.epochs, str(cfg.run_dir)) == ("quickstart", 7, 2, "log/q")


def test_the_last_resume_counts(tmp_path):
    """train.sh adds one when it restarts; --keep may have removed the file that the first one names."""
    paths_read = []

    def read_saved_config(path):
        paths_read.append(path)
        return QUICKSTART.to_dict()

    words = ["--resume", "log/q/model_00100.pt"]
    assert parse([*words, f"--resume={tmp_path}"], read_saved_config).run_dir == tmp_path
    assert parse([*words, "--resume", "auto"], read_saved_config).resume == "auto"
    assert paths_read == [str(tmp_path)]


def test_a_missing_tracker_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("training.presets.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        parse_words("quickstart --tracker wandb")


def test_init_from_decides_on_the_network_unless_a_flag_does():
    assert is_network_from_init(PRESETS["finetune"])
    assert not is_network_from_init(PRESETS["gpt2-124m"])
    assert not is_network_from_init(parse_words("finetune --model.n-layer 3"))
    later = dataclasses.replace(PRESETS["finetune"], preset="of a later version")  # as a checkpoint may say
    assert not is_network_from_init(later)


# ------------------------------------------------------------------------- the number of steps


def test_steps_follow_from_max_steps_epochs_or_the_data():
    cfg = dataclasses.replace(PRESETS["gpt2-124m"], epochs=2)
    assert cfg.total_steps(10**9) == 2 * 19073
    assert dataclasses.replace(cfg, steps_per_epoch=0).total_steps(1000) == 2 * 1000 // 512
    assert dataclasses.replace(cfg, max_steps=5).total_steps(1000) == 5
    with pytest.raises(UserError, match="less than one step"):
        TrainConfig(epochs=3).total_steps(100)


@pytest.mark.parametrize("words", [
    "quickstart --epochs 2", "quickstart --epochs=2", "--resume a/model_00001.pt --epochs 2",
])  # fmt: skip
def test_epochs_override_the_steps_of_preset_or_checkpoint(words):
    cfg = parse(words.split(), lambda path: QUICKSTART.to_dict())
    assert cfg.total_steps(1000) == 2 * 1000 // cfg.sequences_per_step


@pytest.mark.parametrize("flag", ["--max-steps 7", "--max_steps=7"])
def test_max_steps_override_epochs(flag):
    assert parse_words(f"quickstart --epochs 2 {flag}").total_steps(1000) == 7


# ------------------------------------------------------------------------- values


@pytest.mark.parametrize("change, words", [
    ({"total_batch_size": 1000}, ["1000", "--total-batch-size 1024"]),
    ({"sequence_length": 2048}, ["--sequence-length 2048", "--model.block-size 1024"]),
    ({"sequence_length": 0}, ["--sequence-length 0"]), ({"micro_batch_size": 0}, ["--micro-batch-size 0"]),
    ({"val_tokens": 1023}, ["--val-tokens 1023", "1024"]), ({"epochs": 0}, ["--epochs 0"]),
    ({"min_lr": 1.0}, ["--min-lr 1.0", "--max-lr"]), ({"save_every": -1}, ["--save-every -1"]),
    ({"beta2": 1.5}, ["--beta2 1.5"]), ({"max_lr": float("nan")}, ["--max-lr nan"]),
    ({"time_limit": "soon"}, ["soon", "3h50m"]), ({"card": "H100"}, ["--card H100", "--dry-run"]),
    ({"optimizer": "new"}, ["optimizer", "new", *choices(TrainConfig, "optimizer")]),
    ({"max_steps": "7"}, ["max_steps", "'7'", "int"]), ({"data_dir": 5}, ["data_dir", "5", "str"]),
    ({"micro_batch_size": 2.0}, ["micro_batch_size", "2.0", "auto"]),
])  # fmt: skip
def test_a_bad_value_is_refused_with_its_name_and_the_rule(change, words):
    with pytest.raises(UserError) as e:
        dataclasses.replace(PRESETS["gpt2-124m"], **change)
    assert all(word in str(e.value) for word in words), e.value
    assert "\n" not in str(e.value)

    # A checkpoint may hold it, too.
    with pytest.raises(UserError, match="saved in the checkpoint"):
        TrainConfig.from_dict(PRESETS["gpt2-124m"].to_dict() | change)


# Where the alternatives of a setting are told apart: a dict from name to function.
TABLES = {
    "optimizer": "training.optim.OPTIMIZERS",
    "schedule": "training.schedule.DECAYS",
    "newton_schulz": "training.muon.NEWTON_SCHULZ_ITERATIONS",
    "tracker": "training.metrics.TRACKERS",
    "positions": "model.POSITIONS",
    "norm": "model.NORMS",
    "activation": "model.ACTIVATIONS",
    "dtype": "torch.__dict__",
    "weights": "torch.__dict__",
}


@pytest.mark.parametrize("name", TABLES)
def test_every_choice_has_its_entry(name):
    config_class = GPTConfig if name in GPTConfig.__dataclass_fields__ else TrainConfig
    module, _, table = TABLES[name].rpartition(".")
    entries = getattr(importlib.import_module(module), table)
    assert set(choices(config_class, name)) - {"auto"} <= entries.keys()


def test_every_setting_with_choices_has_a_table():
    names = [*fields_with_choices(TrainConfig), *fields_with_choices(GPTConfig)]
    assert set(names) - {"zero_stage"} == set(TABLES)


@pytest.mark.parametrize("config_class", [TrainConfig, GPTConfig])
def test_every_field_is_read_somewhere(config_class):
    folders = [ROOT, ROOT / "system", ROOT / "tokens", ROOT / "training"]
    source = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    for field in dataclasses.fields(config_class):
        assert re.search(rf"(cfg|c|config|self|old|new)\.{field.name}\b", source), f"{field.name} is read nowhere"


# ------------------------------------------------------------------------- resume and ranks


def test_drift_tells_what_may_change_from_what_may_not():
    model = dataclasses.replace(QUICKSTART.model, n_layer=5)
    new = dataclasses.replace(QUICKSTART, seed=2, val_every=7, data_dir="x", model=model)
    harmless, refused = config_drift(QUICKSTART, new)
    assert sorted(harmless) == ["data_dir: data/stdlib -> x", "val_every: 40 -> 7"]
    assert refused == ["model.n_layer: 4 -> 5", "seed: 1337 -> 2"]


def test_ranks_share_all_settings_but_local_ones():
    """Another folder, another time limit may be local to a machine."""
    local = "--data-dir a --out-dir b --hellaswag-data c --resume auto --device cpu --time-limit 1h --gpu-hour-usd 2"
    shared = settings_by_flag(QUICKSTART)
    assert settings_by_flag(parse_words(f"quickstart {local} --sample-prompt x --tracker tensorboard")) == shared

    other = settings_by_flag(parse_words("quickstart --val-every 5 --model.n-layer 3 --init-from gpt2"))
    assert {flag for flag in shared if other[flag] != shared[flag]} == {"--val-every", "--model.n-layer", "--init-from"}


def test_kinds_are_spelled_right():
    """A kind that nothing knows would be treated as one that shapes the result."""
    assert {rule.kind for rule in RULES.values()} == {"recipe", "noise", "free", "local"}
    assert RULES.keys() == TrainConfig.__dataclass_fields__.keys()


def test_a_config_of_another_version_loads_if_it_means_the_same():
    saved = QUICKSTART.to_dict() | {"of_an_older_version": 1}
    del saved["zero_stage"]
    assert TrainConfig.from_dict(saved) == QUICKSTART
    with pytest.raises(UserError, match="optimizer 'normuon'"):
        TrainConfig.from_dict(saved | {"optimizer": "normuon"})
    with pytest.raises(UserError, match="value_tables=3"):
        TrainConfig.from_dict(saved | {"model": saved["model"] | {"value_tables": 3}})


@pytest.mark.parametrize("saved", [None, [], "x", {"model": 3}, {"model": {"n_layer": "x"}}, {"max_lr": 10**5000}])
def test_a_hostile_config_is_refused_in_one_line(saved):
    with pytest.raises(UserError) as e:
        TrainConfig.from_dict(saved)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400
