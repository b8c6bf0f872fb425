"""The command line of train_gpt2.py: a preset, flags that change it, and what to do with the result.

    cfg, mode, card = parse(["quickstart", "--max-steps", "400"])   # mode: train, dry-run or eval-only
    cfg, mode, card = parse(["gpt2-124m", "--card", "8xH100"])      # card: what to predict the run for, or ""

The flags follow from the fields of TrainConfig (training/config.py).
"""

import argparse
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checkpoints.checkpoint import read_train_state
from checkpoints.run_folder import latest_step
from system.errors import UsageError, explain_errors, require
from system.printing import env_rank
from system.settings import ArgumentParser, add_flags, change
from training.config import TrainConfig
from training.presets import DESCRIPTIONS, PRESETS

USAGE = """%(prog)s [PRESET] [--flag value ...]

  python train_gpt2.py quickstart                                     # minutes on a CPU
  python train_gpt2.py gpt2-124m --card 8xH100 --gpu-hour-usd 2.5     # predicts hours and dollars
  python train_gpt2.py --resume log/quickstart                        # continues a run
  torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m    # eight GPUs"""


def make_parser(cfg: TrainConfig) -> ArgumentParser:
    """The flags, with the values of `cfg` in their help. It returns what was typed, and nothing else."""
    presets = "\n".join(f"  {name:<14} {description}" for name, description in DESCRIPTIONS.items())
    parser = ArgumentParser(
        f"Presets:\n{presets}\n\nThe values below are those of {cfg.preset}; PRESET -h has those of PRESET.",
        usage=USAGE,
        argument_default=argparse.SUPPRESS,
        add_help=False,
    )
    parser.add_argument("preset", nargs="?", metavar="PRESET", help="its settings; gpt2-124m without one")
    parser.add_argument("-h", "--help", action="store_true", help="print this")

    group = parser.add_argument_group("Instead of training").add_mutually_exclusive_group()
    help = "print the plan with measured speed, memory, time and cost"
    group.add_argument("--dry-run", dest="mode", action="store_const", const="dry-run", help=help)
    help = "measure the weights of --resume or --init-from as a run does, and print it"
    group.add_argument("--eval-only", dest="mode", action="store_const", const="eval-only", help=help)
    group.add_argument("--card", metavar="CARDS", help="predict the run on these cards, e.g. 8xH100 or 2080Ti+3090")
    add_flags(parser, cfg)
    return parser


def parse(argv: list[str]) -> tuple[TrainConfig, str, str]:
    """[PRESET] [--flag value ...] -> the settings, and what to do with them. Raises UserError (for a bad flag
    UsageError), or SystemExit after the help that was asked for.

    `--resume` without a preset starts from the settings of the run that it finds, so only changes need flags.
    """
    typed = vars(make_parser(PRESETS["gpt2-124m"]).parse_args(argv))
    asks_for_help = typed.pop("help", False)
    mode, card = typed.pop("mode", "train"), typed.pop("card", "")
    preset = typed.pop("preset", None)
    if preset and preset not in PRESETS:
        raise UsageError(f"no preset {preset!r}; there are {', '.join(PRESETS)}")
    cfg = PRESETS[preset or "gpt2-124m"]

    # A run continues in its own folder and, without a preset, with its own settings.
    resume = typed.get("resume", "none")
    path = Path(typed.get("out_dir") or cfg.run_dir) if resume == "auto" else Path(resume)
    has_run = resume != "none" and (resume != "auto" or latest_step(path) is not None)
    if has_run and not preset:
        saved = read_train_state(path)
        cfg = TrainConfig.from_dict(saved["config"], saved["defaults"])
        per_start: dict[str, Any] = {f.name: f.default for f in fields(cfg) if f.metadata.get("per_start")}
        cfg = replace(cfg, **per_start)
    if has_run:
        cfg = replace(cfg, out_dir=str(path if path.is_dir() else path.parent))
    if "epochs" in typed and "max_steps" not in typed:
        cfg = replace(cfg, max_steps=0)
    cfg = change(cfg, typed)

    if asks_for_help:
        make_parser(cfg).print_help()
        raise SystemExit(0)
    if cfg.tracker == "wandb" and env_rank() == 0:
        check_wandb()
    return cfg, mode, card


def check_wandb() -> None:
    """Raise UserError unless wandb is installed, and has a key or is offline. On a terminal, wandb asks for the key."""
    require(find_spec("wandb"), "--tracker wandb: its package is not installed; run: pip install wandb")
    import wandb

    with explain_errors("--tracker wandb", "set WANDB_API_KEY, or WANDB_MODE=offline", wandb.errors.Error):
        wandb.login(verify=False)  # a network that is down for a while must not end a run
