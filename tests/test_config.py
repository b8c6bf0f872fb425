"""Presets have the numbers of the recipes that they reproduce; flags parse; every field is read somewhere; a value that
is not valid gets one message; and configs that older versions saved load, or are refused with one message."""

import dataclasses
import functools
import importlib
import re

import pytest
import torch
from helpers import ROOT, choices, fields_with_choices, load_weights, same_bits, train_quickstart

from model import GPTConfig
from system.cli import UserError, parse_duration, run_cli
from training import checkpoint, presets
from training.config import MAY_CHANGE, TrainConfig, config_drift
from training.help import GROUPS, OTHER_TRAINERS, field_help, flag_name, switches
from training.presets import PRESETS, is_network_from_init, parse


def nothing_saved(path):
    """For `parse`: the flags name no checkpoint, so reading one is an error."""
    raise AssertionError(path)


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
def test_presets_resolve_to_the_numbers_of_their_recipes(name):
    """Printed, too: pytest -s -k recipes shows every preset's resolved values."""
    # What follows from several fields, under the names that RECIPES has for it.
    cfg = PRESETS[name]
    derived = {
        "total_steps": cfg.total_steps(10_300_000_000 // 1024),
        "embed_lr": round(cfg.max_lr * cfg.embed_lr_scale, 9),
        "vector_lr": round(cfg.max_lr * cfg.vector_lr_scale, 9),
        "cooldown_steps": round(cfg.cooldown * cfg.max_steps),
    }
    source, pairs = RECIPES[name]
    print(f"\n{name}, after {source}:")
    for pair in pairs.split():
        # The preset's value: a field of the config, or of its network, as model.n_layer.
        field, expected = pair.split("=")
        if field in derived:
            value = derived[field]
        else:
            value = functools.reduce(getattr, field.split("."), cfg)
        print(f"  {field} {value}")

        # Floats are equal to rounding, everything else as it is printed.
        if isinstance(value, float):
            is_same = value == pytest.approx(float(expected))
        else:
            is_same = str(value) == expected
        assert is_same, f"{name}: {field} is {value}, {source} has {expected}"


def test_every_preset_but_our_own_has_a_recipe():
    own = {"quickstart"}
    fix = "add to RECIPES whose numbers the new preset has or, if they are this project's own, its name to `own`"
    assert set(PRESETS) - own == set(RECIPES), fix


def test_every_recipe_states_what_shapes_a_result_most():
    """An entry that states nothing would check nothing."""
    for name, (_, pairs) in RECIPES.items():
        stated = {pair.split("=")[0] for pair in pairs.split()}
        missing = {"total_batch_size", "schedule", "optimizer", "max_lr"} - stated
        assert not missing, f"RECIPES[{name!r}] does not state {missing}"
        assert stated & {"total_steps", "epochs"}, f"RECIPES[{name!r}] does not state how long it trains"


def test_two_presets_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two presets are called 'quickstart': give the new one its own preset="):
        presets._by_name(PRESETS["quickstart"], dataclasses.replace(PRESETS["quickstart"], max_steps=9))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_names_itself_and_survives_a_round_trip(name):
    cfg = PRESETS[name]
    assert cfg.preset == name and str(cfg.run_dir) == f"log/{name}"
    assert TrainConfig.from_dict(cfg.to_dict()) == cfg


# ------------------------------------------------------------------------- the command line


def test_flags_override_the_preset():
    words = "quickstart --model.n-layer 2 --no-shuffle --micro-batch-size auto --max-lr=0.001 --warmup_steps=9"
    cfg = parse(words.split(), nothing_saved)
    model = dataclasses.replace(PRESETS["quickstart"].model, n_layer=2)
    changes = {"shuffle": False, "micro_batch_size": "auto", "max_lr": 0.001, "warmup_steps": 9}
    assert cfg == dataclasses.replace(PRESETS["quickstart"], model=model, **changes)


def test_without_a_preset_it_is_gpt2_124m():
    assert parse([], nothing_saved) == PRESETS["gpt2-124m"]


def test_a_preset_comes_before_the_flags():
    with pytest.raises(SystemExit):
        parse("--max-steps 5 quickstart".split(), nothing_saved)
    assert parse(["--out-dir", "quickstart"], nothing_saved).out_dir == "quickstart"


COMING_FROM = OTHER_TRAINERS  # names docs/coming-from.md


@pytest.mark.parametrize("name", ["gpt2-xl", "config/train_shakespeare_char.py", "sprint-124m", "quickstar"])
def test_an_unknown_preset_is_answered_with_the_presets_and_the_page_of_names(name):
    """gpt2-xl is nanoGPT's name, as are paths of configs."""
    with pytest.raises(UserError) as e:
        parse([name, "--max-steps", "3"], nothing_saved)
    message = str(e.value)
    assert message.startswith(f"no preset {name!r}") and message.endswith(COMING_FROM)
    assert all(preset in message for preset in PRESETS)


@pytest.mark.parametrize("flags, named", [
    ("--max_iters=2000", "--max_iters=2000"), ("--learning-rate 1e-3", "--learning-rate"),  # nanoGPT's
    ("-h 1", "-h, 1"), ("-b 32 -t 1024 -h 1 -n 5000", "-b, 32, -t, 1024, -h, 1, -n, 5000"),  # llm.c's: no question
])  # fmt: skip
def test_an_unknown_flag_is_answered_with_the_page_of_names(flags, named, capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # run_cli would set it for good
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: parse(["quickstart", *flags.split()], nothing_saved))
    answer = capsys.readouterr().err
    assert e.value.code == 2
    assert f"Unrecognized options: {named}" in " ".join(answer.replace("│", "").split())
    assert answer.endswith(f"{COMING_FROM}\n") and answer.count(COMING_FROM) == 1
    assert (ROOT / "docs" / "coming-from.md").is_file()


@pytest.mark.parametrize("flags, meant", [
    ("--compile=False", "--no-compile"),  # nanoGPT's
    ("--compile 0", "--no-compile"), ("--overfit_single_batch=1", "--overfit-single-batch"),  # DDP-BASEMODEL-TRAIN's
    ("--no-compile=True", "--no-compile"), ("--model.no_bias False", "--model.bias"),
])  # fmt: skip
def test_a_switch_with_a_value_is_answered_with_the_switch_that_was_meant(flags, meant):
    with pytest.raises(UserError) as e:
        parse(["quickstart", *flags.split(), "--max-steps", "3"], nothing_saved)
    assert str(e.value) == f"{flags}: a switch takes no value; write {meant}; {COMING_FROM}"


# ------------------------------------------------------------------------- the help


def read_help(capsys, *words) -> str:
    with pytest.raises(SystemExit) as e:
        parse([*words], nothing_saved)
    assert e.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_flag_of_every_field_once_in_a_group(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    names = [name for group in GROUPS.values() for name in group.replace("|", " ").split()]

    # Every field has a place, and only one.
    config_fields = {f.name for f in dataclasses.fields(TrainConfig)} - {"preset", "model"}
    network_fields = {f"model.{f.name}" for f in dataclasses.fields(GPTConfig)}
    fix = "give every field of a config a place in GROUPS of training/help.py"
    assert sorted(names) == sorted(config_fields | network_fields), fix

    # The help has the flag of every field, and both forms of every switch, which are tyro's.
    text = read_help(capsys, "quickstart", "--help")
    flags = set(re.findall(r"--[a-z][a-z0-9.-]*", text))
    expected = {flag_name(name) for name in names} | set(switches())
    assert expected <= flags, expected - flags
    for forms in zip(*set(switches().values()), strict=True):
        parse(["quickstart", "--init-from", "gpt2", *forms], nothing_saved)


@pytest.mark.parametrize("config_class", [TrainConfig, GPTConfig])
def test_every_setting_is_explained_and_its_choices_are_listed(capsys, monkeypatch, config_class):
    monkeypatch.setenv("COLUMNS", "100")
    explained = {name for name, text in field_help(config_class).items() if text}
    assert explained >= {f.name for f in dataclasses.fields(config_class)} - {"preset", "model"}

    text = " ".join(read_help(capsys, "quickstart", "--help").split())
    for name in fields_with_choices(config_class):
        assert f"({', '.join(map(str, choices(config_class, name)))})" in text


def test_the_help_of_a_field_is_found_on_any_of_its_lines(tmp_path, monkeypatch):
    source = """import dataclasses
@dataclasses.dataclass
class Config:
    short: int = 1  # beside it
    long: int = (
        2  # on an inner line
    )
    below: int = 3
    'in a string'
    none: int = 4
"""
    (tmp_path / "some_config.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    config_class = importlib.import_module("some_config").Config
    texts = {"short": "beside it", "long": "on an inner line", "below": "in a string", "none": ""}
    assert field_help(config_class) == texts


def test_the_help_shows_the_values_of_the_preset_or_of_the_run_to_resume(capsys):
    assert "--max-steps 80 " in read_help(capsys, "quickstart", "--help")
    assert "--schedule trapezoid " in read_help(capsys, "quickstart", "-h")
    assert "--max-lr 0.0006 " in read_help(capsys, "-h")
    assert "--max-lr 0.0006 " in read_help(capsys, "-h", "--seed", "7")


def test_the_short_help_is_one_screen_and_says_where_the_rest_is(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = read_help(capsys, "gpt2-124m", "-h")
    assert len(text.splitlines()) <= 55
    assert max(map(len, text.splitlines())) <= 100
    assert "all flags: python train_gpt2.py gpt2-124m --help" in text
    assert COMING_FROM in text
    assert all(preset in text for preset in PRESETS)


def test_an_unknown_preset_ends_the_script_with_one_message(capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with pytest.raises(SystemExit) as e:
        run_cli(lambda: parse(["gpt2-125m"], nothing_saved))
    (message,) = capsys.readouterr().err.splitlines()
    assert e.value.code == 1
    assert message.startswith("error: no preset 'gpt2-125m'; did you mean 'gpt2-124m'?")
    assert message.endswith(COMING_FROM)


def test_resume_brings_the_saved_config_and_its_folder():
    saved = dataclasses.replace(PRESETS["quickstart"], seed=7, out_dir="elsewhere").to_dict()
    cfg = parse(["--resume", "log/q/model_00100.pt", "--epochs", "2"], lambda path: saved)
    assert (cfg.preset, cfg.seed, cfg.epochs, str(cfg.run_dir)) == ("quickstart", 7, 2, "log/q")


def test_the_last_resume_counts(tmp_path):
    """train.sh adds one when it restarts; --keep may have removed the file that the first one names."""
    paths_read = []

    def read_saved_config(path):
        paths_read.append(path)
        return PRESETS["quickstart"].to_dict()

    words = ["--resume", "log/q/model_00100.pt"]
    assert parse([*words, f"--resume={tmp_path}"], read_saved_config).run_dir == tmp_path
    assert parse([*words, "--resume", "auto"], read_saved_config).resume == "auto"
    assert paths_read == [str(tmp_path)]


def test_a_missing_tracker_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr("training.presets.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install wandb"):
        parse(["quickstart", "--tracker", "wandb"], nothing_saved)


def test_the_network_is_that_of_init_from_unless_a_flag_says_otherwise():
    assert is_network_from_init(PRESETS["finetune"])
    assert not is_network_from_init(PRESETS["gpt2-124m"])
    assert not is_network_from_init(parse(["finetune", "--model.n-layer", "3"], nothing_saved))
    later = dataclasses.replace(PRESETS["finetune"], preset="of a later version")  # as a checkpoint may say
    assert not is_network_from_init(later)


# ------------------------------------------------------------------------- the number of steps


def test_the_number_of_steps_follows_from_max_steps_or_epochs_or_the_data():
    cfg = dataclasses.replace(PRESETS["gpt2-124m"], epochs=2)
    assert cfg.total_steps(10**9) == 2 * 19073
    assert dataclasses.replace(cfg, steps_per_epoch=0).total_steps(1000) == 2 * 1000 // 512
    assert dataclasses.replace(cfg, max_steps=5).total_steps(1000) == 5
    with pytest.raises(UserError, match="less than one step"):
        TrainConfig(epochs=3).total_steps(100)


@pytest.mark.parametrize("words", [
    "quickstart --epochs 2", "quickstart --epochs=2", "--resume a/model_00001.pt --epochs 2",
])  # fmt: skip
def test_epochs_override_the_number_of_steps_of_the_preset_or_checkpoint(words):
    cfg = parse(words.split(), lambda path: PRESETS["quickstart"].to_dict())
    assert cfg.total_steps(1000) == 2 * 1000 // cfg.sequences_per_step


def test_max_steps_overrides_epochs():
    assert parse(["quickstart", "--epochs", "2", "--max-steps", "7"], nothing_saved).total_steps(1000) == 7


# ------------------------------------------------------------------------- values


@pytest.mark.parametrize("text, seconds", [("3h50m", 13800), ("90m", 5400), ("45s", 45), ("1d", 86400), ("7.5", 7.5)])
def test_a_duration_is_a_number_of_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "change, words",
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
def test_a_bad_value_is_refused_with_the_value_and_the_rule(change, words):
    with pytest.raises(UserError) as e:
        dataclasses.replace(PRESETS["gpt2-124m"], **change)
    assert all(word in str(e.value) for word in words), e.value


@pytest.mark.parametrize("field", ["optimizer", "schedule", "weights", "tracker", "newton_schulz", "dtype"])
def test_a_value_that_is_no_choice_is_refused_with_the_choices(field):
    listed = ", ".join(choices(TrainConfig, field))
    with pytest.raises(ValueError, match=f"{field} 'new' must be one of {listed}"):
        dataclasses.replace(PRESETS["gpt2-124m"], **{field: "new"})


def test_an_impossible_network_is_refused_with_the_value_and_the_rule(expect_failure):
    with pytest.raises(ValueError, match="n_head 7 does not divide n_embd 768"):
        GPTConfig(n_head=7)
    expect_failure("train_gpt2.py", "--model.n-head", "7", mentions=["n_head 7 does not divide n_embd 768"])


@pytest.mark.parametrize("config_class", [TrainConfig, GPTConfig])
def test_every_field_is_read_somewhere(config_class):
    folders = [ROOT, ROOT / "system", ROOT / "tokens", ROOT / "training"]
    sources = [path.read_text() for folder in folders for path in folder.glob("*.py")]
    for field in dataclasses.fields(config_class):
        read = re.compile(rf"(cfg|c|config|self|self\.config|old|new)\.{field.name}\b")
        assert any(read.search(source) for source in sources), f"{field.name} is read nowhere"


# ------------------------------------------------------------------------- configs of checkpoints


def test_drift_names_the_fields_that_changed():
    old = PRESETS["quickstart"]
    new = dataclasses.replace(old, seed=2, val_every=7)
    harmless, refused = config_drift(old, new)
    assert harmless == ["val_every: 40 -> 7"] and refused == ["seed: 1337 -> 2"]
    assert MAY_CHANGE < {f.name for f in dataclasses.fields(TrainConfig)}


def saved_by_an_older_version(**changes):
    """The config of a checkpoint of a version that had settings which are gone, turned off unless `changes` say
    otherwise."""
    config = PRESETS["quickstart"].to_dict()
    config["model"]["value_tables"] = changes.pop("value_tables", 0)
    return config | {"muon_momentum_warmup": 0} | changes


def test_a_config_of_an_older_version_loads_if_what_is_gone_was_off():
    assert TrainConfig.from_dict(saved_by_an_older_version()) == PRESETS["quickstart"]


@pytest.mark.parametrize("change, reason", [
    ({"value_tables": 3}, "unknown setting value_tables=3: use the version that saved it"),
    ({"muon_momentum_warmup": 300}, "muon_momentum_warmup no longer exists: use the version that saved it"),
    ({"optimizer": "normuon"}, f"optimizer 'normuon' must be one of {', '.join(choices(TrainConfig, 'optimizer'))}"),
])  # fmt: skip
def test_a_config_of_an_older_version_is_refused_if_it_used_what_is_gone(change, reason):
    with pytest.raises(UserError) as e:
        TrainConfig.from_dict(saved_by_an_older_version(**change))
    assert str(e.value) == f"the config saved in the checkpoint is not valid here: {reason}"


def test_a_checkpoint_of_an_older_version_resumes_to_the_same_bits(tiny_args, tmp_path):
    """It has settings that are gone, turned off, and random states, which nothing draws from."""
    uninterrupted = train_quickstart(tiny_args, tmp_path / "uninterrupted", "--max-steps", "6")

    # A run that ended at step 3, whose train state looks as an older version would have saved it.
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "6")
    for step in (4, 5, 6):
        checkpoint.model_path(run, step).unlink(missing_ok=True)
        checkpoint.optim_path(run, step).unlink(missing_ok=True)
    path = checkpoint.optim_path(run, 3)
    state = torch.load(path, weights_only=True)
    state["config"]["model"]["value_tables"] = 0
    state["config"]["muon_momentum_warmup"] = 0
    state["rng"] = [{"cpu": torch.get_rng_state()}]
    checkpoint.write(path, state)

    train_quickstart(tiny_args, run, "--max-steps", "6", "--resume", "auto")

    assert same_bits(load_weights(run, 6), load_weights(uninterrupted, 6))
