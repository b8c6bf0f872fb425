"""The presets, most of them recipes of other projects, and the command line that starts from one of them.

    cfg = parse(["quickstart", "--max-steps", "50", "--model.n-layer", "2"], read_saved_config)

Called by train_gpt2.py with sys.argv. To add a preset, add an entry to PRESETS and follow docs/changing.md.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import tyro

from model import GPTConfig
from system.cli import UserError, env_rank, print0
from training.config import TrainConfig
from training.help import OTHER_TRAINERS, help_text, switches


def _gpt2(name: str, n_layer: int, n_head: int, n_embd: int, max_lr: float) -> TrainConfig:
    """A GPT-2 size (Radford et al. 2019) with the learning rate that GPT-3 (Brown et al. 2020, table 2.1) gives a model
    of that size."""
    model = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=50304)
    return TrainConfig(preset=name, model=model, max_lr=max_lr, min_lr=round(max_lr / 10, 9), steps_per_epoch=19_073)


# Small enough for a laptop; the vocabulary is GPT-2's, so the embedding has most of the parameters.
_small = GPTConfig(block_size=256, vocab_size=50304, n_layer=4, n_head=4, n_embd=128)

# fmt: off
# modded-nanogpt's record 8 (checkpoint 8, November 2024), here with bfloat16 weights.
_record8 = TrainConfig(
    preset="record8-124m",
    model=GPTConfig(
        vocab_size=50304, n_head=6, bias=False, tied_head=False, positions="rope", norm="rmsnorm", activation="relu2",
        qk_norm=True, zero_init_projections=True,
    ),
    data_dir="data/fineweb", max_steps=4578, val_every=125, save_every=500,
    optimizer="muon", muon_lr=0.02, zero_stage=1,  # the record also splits Muon's work across ranks
    max_lr=0.002, embed_lr_scale=150.0,  # the head's rate, and the embedding's multiple of it
    schedule="trapezoid", warmup_steps=0, cooldown=1308 / 4578, min_lr=0.0,
    weight_decay=0.0, grad_clip=0.0, weights="bfloat16",
)

# modded-nanogpt's simple trainer (its track 3), result 36: docs/reference-implementations.md
_speedrun = replace(
    _record8,
    preset="speedrun-124m",
    model=replace(
        _record8.model, bias=True, head_bias=True, positions="half_rope", norm="rmsnorm_gain",
        attention_scale=0.12, softcap=15.0,
    ),
    max_steps=3250, cooldown=0.7, muon_lr=0.025, muon_weight_decay=0.05, newton_schulz="exact",
    max_lr=0.004, embed_lr_scale=175.0, vector_lr_scale=3.75, weight_decay=0.001, vector_weight_decay=0.001,
    beta1=0.8, adam_eps=1e-10 / 524_288,  # the original sums the gradients of a step's tokens; here they are averaged
)

def _by_name(*configs: TrainConfig) -> dict[str, TrainConfig]:
    """{preset name: config}. Raises ValueError if two have one name, as after a replace() without preset=."""
    table: dict[str, TrainConfig] = {}
    for cfg in configs:
        if cfg.preset in table:
            raise ValueError(f"two presets are called {cfg.preset!r}: give the new one its own preset=")
        table[cfg.preset] = cfg
    return table


PRESETS = _by_name(
    # build-nanogpt's recipe: FineWeb-Edu, AdamW, a cosine; larger sizes with the papers' rates.
    _gpt2("gpt2-124m", 12, 12, 768, 6e-4),
    _gpt2("gpt2-350m", 24, 16, 1024, 3e-4),
    _gpt2("gpt2-774m", 36, 20, 1280, 2.5e-4),
    _gpt2("gpt2-1558m", 48, 25, 1600, 2e-4),
    # DDP-BASEMODEL-TRAIN: an untied head, and half as many tokens per step. The rest of the network is GPT-2's, not
    # its own: docs/reference-implementations.md
    TrainConfig(
        preset="untied-124m",
        model=GPTConfig(vocab_size=50304, tied_head=False),
        total_batch_size=262_144, steps_per_epoch=38_146, warmup_steps=700,
        val_every=100, sample_every=1000, save_every=2000,
    ),
    # llm.c's run on FineWeb (its discussion 481).
    TrainConfig(
        preset="llmc-124m",
        data_dir="data/fineweb",
        warmup_steps=700, min_lr=0.0,
        zero_stage=1,
        sample_every=20_000,
    ),
    _record8,
    _speedrun,
    # Fine-tune OpenAI's GPT-2 on your own text. Rate and batch are nanoGPT's (finetune_shakespeare). Every evaluated
    # step is saved, because the best checkpoint matters, and the best is seldom the last.
    TrainConfig(
        preset="finetune",
        data_dir="data/my", init_from="gpt2",
        total_batch_size=32_768, epochs=2, warmup_steps=5, max_lr=3e-5, min_lr=3e-6,
        val_every=25, val_tokens=131_072, hellaswag_every=0, sample_every=50, sample_prompt="@val",
        save_every=25, keep=1,
    ),
    # A check that the network learns at all: the loss on one batch, repeated, must collapse.
    TrainConfig(
        preset="overfit",
        model=_small, data_dir="data/stdlib", overfit_single_batch=True,
        sequence_length=128, total_batch_size=512, max_steps=200,
        warmup_steps=10, max_lr=3e-3, min_lr=3e-4, weight_decay=0.0,
        val_every=0, hellaswag_every=0, sample_every=0, save_every=0,
    ),
    # Tuned to the lowest loss within two minutes on two slow cores (bench/RESULTS.md).
    TrainConfig(
        preset="quickstart",
        model=_small, data_dir="data/stdlib",
        sequence_length=256, total_batch_size=4096, max_steps=80,
        optimizer="muon", muon_lr=0.02, max_lr=0.01, min_lr=0.0, warmup_steps=5, schedule="trapezoid", cooldown=0.5,
        val_every=40, val_tokens=65_536, hellaswag_every=0, save_every=40, keep=2,
        sample_every=80, sample_prompt="def ",
    ),
)
# fmt: on


def is_network_from_init(cfg: TrainConfig) -> bool:
    """Whether --init-from determines the network: it is given, and no --model flag asks for another one."""
    return cfg.init_from != "scratch" and cfg.preset in PRESETS and cfg.model == PRESETS[cfg.preset].model


# ------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class EarlyFlags:
    """Flags that determine the defaults of the others, so they are read first."""

    resume: str = "none"
    epochs: int | None = None
    max_steps: int | None = None


def parse(argv: list[str], read_saved_config: Callable[[str], dict]) -> TrainConfig:
    """[PRESET] [--flag value ...] -> TrainConfig. Raises UserError, or SystemExit after tyro's message for a bad flag
    or the help that was asked for.

    `--resume PATH` without a preset starts from the config saved there, which read_saved_config(PATH) returns, so only
    changes need flags.
    """
    # A first word that is not a flag is a preset.
    preset = None
    flags = argv
    if argv and not argv[0].startswith("-"):
        preset = argv[0]
        flags = argv[1:]
    if preset is not None and preset not in PRESETS:
        similar = difflib.get_close_matches(preset, PRESETS, 1)
        hint = f"; did you mean {similar[0]!r}?" if similar else "."
        raise UserError(f"no preset {preset!r}{hint} Presets: {', '.join(PRESETS)}; {OTHER_TRAINERS}")

    # The defaults: a preset's, or those of the run to resume.
    early, _ = tyro.cli(EarlyFlags, args=flags, return_unknown_args=True, add_help=False)
    if preset is None and early.resume not in ("none", "auto"):
        path = Path(early.resume)
        run_dir = path if path.is_dir() else path.parent
        defaults = replace(TrainConfig.from_dict(read_saved_config(early.resume)), out_dir=str(run_dir))
    else:
        defaults = PRESETS[preset or "gpt2-124m"]

    # --epochs without --max-steps overrides the preset's number of steps.
    if early.epochs is not None and early.max_steps is None:
        defaults = replace(defaults, max_steps=0)

    # -h asks for help only if no value follows: in llm.c, `-h 1` turns HellaSwag on.
    wants_long_help = "--help" in flags
    wants_short_help = False
    if "-h" in flags:
        words_after = flags[flags.index("-h") + 1 :]
        wants_short_help = not words_after or words_after[0].startswith("-")
    if wants_long_help or wants_short_help:
        print0(help_text(defaults, wants_long_help, list(PRESETS)))
        raise SystemExit(0)

    # Parse the flags over the defaults.
    refuse_values_of_switches(flags)
    try:
        cfg = tyro.cli(TrainConfig, default=defaults, args=flags, prog="train_gpt2.py [PRESET]", add_help=False)
    except SystemExit:  # an unknown flag is often one of another trainer
        if env_rank() == 0:
            print(OTHER_TRAINERS, file=sys.stderr, flush=True)
        raise

    # find_spec also finds a mere folder named wandb, which has no origin.
    if cfg.tracker == "wandb" and getattr(find_spec("wandb"), "origin", None) is None:
        raise UserError("--tracker wandb needs its package: .venv/bin/pip install wandb")
    return cfg


def refuse_values_of_switches(flags: list[str]) -> None:
    """Raise UserError for a switch that is given a value, as in `--compile=False` of nanoGPT or `--compile 0`."""
    # Each word with the one after it.
    for word, following in pairwise([*flags, "--"]):
        name, equals, value = word.partition("=")
        switch = name.replace("_", "-")
        if switch not in switches():
            continue

        # The value is after the equals sign, or the next word if that is no flag.
        typed = word
        if not equals:
            if following.startswith("-"):
                continue
            value = following
            typed = f"{word} {following}"

        # Suggest what was probably meant: --compile=False turns it off, --no-compile=False turns it on.
        on, off = switches()[switch]
        meant = switch
        if value.lower() in ("0", "false", "no", "off"):
            meant = off if switch == on else on
        raise UserError(f"{typed}: a switch takes no value; write {meant}; {OTHER_TRAINERS}")
