"""The command line of train_gpt2.py: its preset, its flags, and the flags of other trainers, answered by name.

    cfg = parse(["quickstart", "--max-steps", "400"], read_saved_config)
    explain_foreign_flags(["--max_iters=100"])      # ["--max_iters is --max-steps here"]

tyro makes the flags from TrainConfig (training/config.py), and checks them.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import tyro

from lifecycle.metrics import check_wandb
from system.cli import UsageError, env_rank, suggest
from system.usage import explain_usage
from training.config import HELLASWAG_DATA, Mark, TrainConfig, flag, flatten, has_mark
from training.presets import OTHER_TRAINERS, PRESETS, describe_presets

# The head of the help.
EXAMPLES = """
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
    known = f"presets: {', '.join(PRESETS)}; {OTHER_TRAINERS}"
    other_name = Path(preset).stem  # of config/train_gpt2.py
    meant = f"did you mean {OTHER_NAMES[other_name]}? " if other_name in OTHER_NAMES else suggest(preset, PRESETS)
    if preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; {meant.strip() or known}")
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
        run_dir = path if path.is_dir() else path.parent
        if not has_preset:
            defaults = inherit_settings(TrainConfig.from_dict(read_saved_config(early.resume)))
        defaults = replace(defaults, out_dir=str(run_dir))
    if early.epochs and not early.max_steps:
        defaults = replace(defaults, max_steps=0)

    values = f"Below, the flags with the values of {defaults.preset}; a period of 0 steps turns an action off."
    description = f"{EXAMPLES}\n\n{describe_presets()}\n\n{values}"
    try:
        with explain_usage(OTHER_TRAINERS):
            cfg = tyro.cli(
                TrainConfig,
                default=defaults,
                args=flags,
                prog="train_gpt2.py [PRESET]",
                description=description,
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


# ------------------------------------------------------------------------- the flags of other trainers

# The flags of nanoGPT, llm.c and DDP-BASEMODEL-TRAIN, and what they are here; docs/coming-from.md says more.
FOREIGN_FLAGS = {
    "--max_iters": "--max-steps",
    "--num_iterations": "--max-steps",
    "--batch_size": "--micro-batch-size (and --total-batch-size, in tokens, is the batch of a step)",
    "--block_size": "--sequence-length, for a small network with --model.block-size,",
    "--gradient_accumulation_steps": "not needed (it follows from --total-batch-size)",
    "--learning_rate": "--max-lr",
    "--learning_rate_decay_frac": "--min-lr, a rate,",
    "--decay_lr": "not needed (--schedule ends at --max-steps)",
    "--lr_decay_iters": "not needed (--schedule ends at --max-steps)",
    "--warmup_iters": "--warmup-steps",
    "--beta1": "a setting of the presets (training/presets.py)",
    "--beta2": "fixed at 0.95",
    "--dropout": "not needed (there is no dropout)",
    "--eval_interval": "--val-every",
    "--val_loss_every": "--val-every",
    "--eval_iters": "--val-tokens, in tokens,",
    "--log_interval": "not needed (every step is logged)",
    "--always_save_checkpoint": "--save-every",
    "--save_every_niter": "--save-every",
    "--backend": "not needed (NCCL on GPUs, gloo on CPUs)",
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
    known = {flag(name) for name in flatten(TrainConfig()) if name != "beta1"}  # which has no flag
    switches = [flag(name) for name, value in vars(TrainConfig()).items() if isinstance(value, bool)]
    for word in words:
        name, equals, value = word.partition("=")
        switch = name.replace("_", "-")
        foreign = name if name in FOREIGN_FLAGS else name.replace("-", "_").replace("__", "--")
        if foreign in FOREIGN_FLAGS and switch not in known:
            sentences.append(f"{name} is {FOREIGN_FLAGS[foreign]} here")
        elif equals and switch in switches:
            is_on = value.lower() not in ("false", "0", "no", "off")
            here = switch if is_on else f"--no-{switch.removeprefix('--')}"
            sentences.append(f"{word} is {here} here: switches take no value")
    return sentences
