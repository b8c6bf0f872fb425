"""The command line of train_gpt2.py: its preset, its flags, and the flags of other trainers, answered by name.

    cfg = parse(["quickstart", "--max-steps", "400"], read_saved_config)
    explain_foreign_flags(["--max_iters=100"])      # ["--max_iters is --max-steps here"]

tyro makes the flags from TrainConfig (training/config.py), and checks them.
"""

import inspect
import re
import shutil
import textwrap
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import tyro
from tyro import _docstrings

from lifecycle.metrics import check_wandb
from model import GPTConfig
from system.cli import UsageError, env_rank, suggest
from system.usage import explain_usage
from training.config import HELLASWAG_DATA, Mark, Recipe, TrainConfig, flag, flatten, has_mark
from training.presets import OTHER_TRAINERS, PRESETS, describe_presets

# The head of the help.
USAGE = """
usage: python train_gpt2.py [PRESET] [--flag value ...]

  python train_gpt2.py quickstart                                     # minutes on a CPU
  python train_gpt2.py gpt2-124m --card 8xH100 --gpu-hour-usd 2.5     # predicts hours and dollars
  python train_gpt2.py --resume log/quickstart                        # continues a run
  torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m    # eight GPUs
""".strip("\n")

# What others call the recipes of presets: transformers its sizes, nanoGPT its files.
OTHER_NAMES = {
    "gpt2": "gpt2-124m",
    "gpt2-medium": "gpt2-350m",
    "gpt2-large": "gpt2-774m",
    "gpt2-xl": "gpt2-1558m",
    "train_gpt2": "gpt2-124m",
    "finetune_shakespeare": "finetune",
    "train_shakespeare_char": "quickstart",
}


def parse(argv: list[str], read_saved_config: Callable[[str], dict]) -> TrainConfig:
    """[PRESET] [--flag value ...] -> TrainConfig. Raises UserError (for a bad flag UsageError), or SystemExit after
    the help that was asked for.

    `--resume PATH` without a preset starts from the config saved there, which read_saved_config(PATH) returns, so only
    changes need flags.
    """
    # A first word that is not a flag is a preset.
    flags = argv
    preset = "gpt2-124m"
    has_preset = bool(argv) and not argv[0].startswith("-")
    if has_preset:
        preset, *flags = argv
    if preset not in PRESETS:
        other_name = Path(preset).stem  # of config/train_gpt2.py
        meant = f"did you mean {OTHER_NAMES[other_name]}? " if other_name in OTHER_NAMES else suggest(preset, PRESETS)
        problem = f"no preset {preset!r}"
        if preset.endswith(".py"):
            problem = f"{preset}: there are no config files here, but presets and flags (in a shell script)"
        meant = meant.strip() or f"presets: {', '.join(PRESETS)}; {OTHER_TRAINERS}"
        raise UsageError("; ".join([problem, meant, *explain_foreign_flags(flags)]))
    defaults = PRESETS[preset]

    # Three flags decide on the defaults of the others, so they are read first; tyro reports one without a value.
    early_parser = ArgumentParser(add_help=False, allow_abbrev=False)
    early_parser.add_argument("--resume", nargs="?", default="none", const="none")
    early_parser.add_argument("--epochs", nargs="?")
    early_parser.add_argument("--max-steps", "--max_steps", nargs="?")
    early, _ = early_parser.parse_known_args(flags)
    if early.resume not in ("none", "auto"):
        # A run continues in its own folder.
        path = Path(early.resume)
        meant = suggest(early.resume, ["none", "auto"])
        if meant and not path.exists():
            raise UsageError(f"--resume {early.resume}: {meant.strip()}")
        run_dir = path if path.is_dir() else path.parent
        if not has_preset:
            defaults = inherit_settings(TrainConfig.from_dict(read_saved_config(early.resume)))
        defaults = replace(defaults, out_dir=str(run_dir))
    if early.epochs and not early.max_steps:
        defaults = replace(defaults, max_steps=0)

    if "-h" in flags or "--help" in flags:
        if env_rank() == 0:
            print(describe_flags(defaults))
        raise SystemExit(0)
    try:
        with explain_usage(OTHER_TRAINERS):
            cfg = tyro.cli(
                TrainConfig,
                default=defaults,
                args=flags,
                console_outputs=env_rank() == 0,
            )
    except UsageError as e:
        # torchrun ends rank 0, which reports the flag, as soon as another rank exits.
        if env_rank() > 0:
            time.sleep(3)
        foreign = explain_foreign_flags(flags)
        raise UsageError("; ".join(foreign)) if foreign else e from None
    if cfg.tracker == "wandb":
        check_wandb()
    return cfg


def inherit_settings(saved: TrainConfig) -> TrainConfig:
    """The settings of the run of a checkpoint, but for those of one start only."""
    of_one_start: dict[str, Any] = {
        field.name: field.default for field in fields(saved) if has_mark(field.name, Mark.PER_START)
    }
    rows = saved.hellaswag_data or HELLASWAG_DATA  # in older checkpoints "" is the default
    return replace(saved, **of_one_start, hellaswag_data=rows)


# ------------------------------------------------------------------------- the help

# A comment that stands alone, which heads a group of settings; or a setting that has a flag.
HEADING_OR_FIELD = re.compile(r"\n\n    # ([^.\n]+)[^\n]*(?:\n    #[^\n]*)*(?=\n\n)|\n    (\w+): (?!Suppress)")
FLAG_WIDTH = 34


def describe_flags(defaults: TrainConfig) -> str:
    """-h: what can be typed, with the values of a preset, in the groups and with the comments of training/config.py."""
    groups: dict[str, list[str]] = {}
    for config_class in (Recipe, TrainConfig, GPTConfig):
        is_network = config_class is GPTConfig
        values, prefix, group = (defaults.model, "model.", "The network itself") if is_network else (defaults, "", "")
        types = get_type_hints(config_class)
        for heading, name in HEADING_OR_FIELD.findall(inspect.getsource(config_class)):
            if not is_network:
                group = heading or group
            if name and name != "model":
                comment = " ".join(str(_docstrings.get_field_docstring(config_class, name, ())).split())
                if get_origin(types[name]) is Literal:
                    comment += f" ({', '.join(map(str, get_args(types[name])))})"
                groups.setdefault(group, []).append(describe_flag(prefix + name, getattr(values, name), comment))
    flags = "\n\n".join("\n".join([group, *lines]) for group, lines in groups.items())
    values_of = f"The flags, with the values of {defaults.preset} (PRESET -h has those of PRESET):"
    return f"{USAGE}\n\n{describe_presets()}\n\n{values_of}\n\n{flags}"


def describe_flag(name: str, value: Any, comment: str) -> str:
    """A flag with its value, and what it means, in lines as wide as the terminal."""
    if isinstance(value, bool):
        section, _, last = flag(name).removeprefix("--").rpartition(".")
        text = f"--{section + '.' if section else ''}[no-]{last}"
        comment += f" ({'on' if value else 'off'})"
    else:
        shown = f'"{value}"' if " " in str(value) else str(value)
        text = f"{flag(name)} {shown or 'TEXT'}"
    width = min(120, max(80, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(comment, width - FLAG_WIDTH, break_on_hyphens=False)
    if len(text) > FLAG_WIDTH - 4:
        lines = ["", *lines]
    return "\n".join(f"  {left:<{FLAG_WIDTH - 2}}{line}" for left, line in zip_longest([text], lines, fillvalue=""))


# ------------------------------------------------------------------------- the flags of other trainers

# The flags of nanoGPT, llm.c and DDP-BASEMODEL-TRAIN, and what they are here; docs/coming-from.md says more.
FOREIGN_FLAGS = {
    "--max_iters": "--max-steps",
    "--num_iterations": "--max-steps",
    "--batch_size": "--micro-batch-size (and --total-batch-size, in tokens, is the batch of a step)",
    "--block_size": "--sequence-length, for a small network with --model.block-size,",
    "--gradient_accumulation_steps": "not needed here, as it follows from --total-batch-size",
    "--learning_rate": "--max-lr (with quickstart, which trains with Muon, also --optimizer adamw --schedule cosine)",
    "--lr": "--max-lr",
    "--learning_rate_decay_frac": "--min-lr, a rate,",
    "--decay_lr": "--schedule, which ends at --max-steps; at a constant rate with trapezoid --cooldown 0,",
    "--lr_decay_iters": "not needed here, as --schedule ends at --max-steps",
    "--warmup_iters": "--warmup-steps",
    "--beta1": "a setting of the presets (training/presets.py)",
    "--beta2": "fixed at 0.95",
    "--dropout": "there is no dropout here; leave it out, and watch the val loss",
    "--eval_interval": "--val-every",
    "--val_loss_every": "--val-every",
    "--eval_iters": "--val-tokens, in tokens,",
    "--log_interval": "not needed here, as every step is logged",
    "--always_save_checkpoint": "--save-every",
    "--save_every_niter": "--save-every",
    "--backend": "not needed here: NCCL on GPUs, gloo on CPUs",
    "--dataset": "--data-dir",
    "--input_bin": "--data-dir",
    "--input_train_bin": "--data-dir",
    "--input_val_bin": "--data-dir",
    "--output_dir": "--out-dir",
    "--n_layer": "--model.n-layer",
    "--n_head": "--model.n-head",
    "--n_embd": "--model.n-embd",
    "--bias": "--model.bias or --model.no-bias",
    "--wandb_log": "--tracker wandb",
    "--wandb_project": "WANDB_PROJECT, a variable of the environment,",
    "--wandb_project_id": "WANDB_PROJECT, a variable of the environment,",
    "--wandb_run_name": "WANDB_NAME, a variable of the environment,",
    "-b": "--micro-batch-size",
    "-c": "--weight-decay",
    "-d": "--total-batch-size",
    "-e": "a preset (llmc-124m, gpt2-350m, ...) as the first word",
    "-i": "--data-dir",
    "-j": "--data-dir",
    "-l": "--max-lr",
    "-n": "--save-every",
    "-o": "--out-dir",
    "-q": "--min-lr, a rate,",
    "-r": "--recompute",
    "-s": "--sample-every",
    "-t": "--sequence-length",
    "-u": "--warmup-steps",
    "-v": "--val-every",
    "-x": "--max-steps",
    "-y": "--resume auto",
    "-z": "--zero-stage",
}


def explain_foreign_flags(words: list[str]) -> list[str]:
    """What the flags of other trainers on a command line are here, a sentence each."""
    sentences = []
    long_names = [name for name in FOREIGN_FLAGS if name.startswith("--")]
    known = {flag(name) for name in flatten(TrainConfig()) if name != "beta1"}  # which has no flag
    switches = [flag(name) for name, value in vars(TrainConfig()).items() if isinstance(value, bool)]
    for word in words:
        name, equals, value = word.partition("=")
        switch = name.replace("_", "-")
        foreign = name if name in FOREIGN_FLAGS else name.replace("-", "_").replace("__", "--", 1)
        if name.startswith("--") and foreign not in FOREIGN_FLAGS and not get_close_matches(switch, known, cutoff=0.7):
            foreign = next(iter(get_close_matches(foreign, long_names, n=1, cutoff=0.8)), "")  # a mistyped one
        if foreign in FOREIGN_FLAGS and switch not in known:
            here = FOREIGN_FLAGS[foreign]
            sentences.append(f"{name} is {here} here" if here.startswith("-") else f"{name}: {here}")
        elif equals and switch in switches:
            is_on = value.lower() not in ("false", "0", "no", "off")
            here = switch if is_on else f"--no-{switch.removeprefix('--')}"
            sentences.append(f"{word} is {here} here: switches take no value")
    return sentences
