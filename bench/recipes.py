"""Which recipe needs the fewest tokens, and the fewest seconds, to a loss?

    python -m bench.recipes --data-dir data/books                                        # CPU-sized ladder, 3 seeds
    python -m bench.recipes --data-dir data/books --share 1 --recipes adamw --extra "bfloat16=adamw --weights bfloat16"
    python -m bench.recipes --data-dir data/books --size 124m --steps 120 --seeds 1      # GPU-sized

All recipes train at the same shape, on the same tokens in the same order, and are compared by validation loss. The
first one, the baseline, runs --steps, the others --share of them, each with its own full schedule. The table has the
final losses, and after which share of the baseline's tokens and seconds each recipe reaches the baseline's final loss,
where curves are taken to be linear between evaluations.

Runs go through train_gpt2.py. Finished ones are kept in --out and not run again. The curves go to
bench/recipes-SIZE.csv and .png, or to what --report names.

The CPU size keeps the --vocab most frequent tokens of the data and merges all others into one of them: with GPT-2's
50,257 tokens a small model would learn little more than its head.
"""

import csv
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from system.cli import require, run_cli
from tokens import shards
from tokens.tokenizer import EOT
from training import metrics

# Flags that every recipe gets, by size.
SIZES = {
    "cpu": "--model.block-size 128 --model.n-layer 4 --model.n-embd 128 --sequence-length 128 --total-batch-size 4096 "
    "--micro-batch-size 32 --val-tokens 262144",
    "124m": "--total-batch-size 131072 --val-tokens 2097152",
}

# {size: {recipe: (preset, flags)}}
RECIPES = {
    "cpu": {
        "adamw": ("gpt2-124m", "--model.n-head 2 --max-lr 3e-3 --min-lr 3e-4 --warmup-steps 30"),
        "record8": ("record8-124m", "--model.n-head 1"),
        "speedrun": ("speedrun-124m", "--model.n-head 1"),
    },
    "124m": {
        "adamw": ("gpt2-124m", "--max-lr 1e-3 --min-lr 1e-4 --warmup-steps 48"),
        "record8": ("record8-124m", ""),
        "speedrun": ("speedrun-124m", ""),
    },
}

# The speedrun with one ingredient undone, most of them as record 8 has it: what is each worth?
WITHOUT_INGREDIENT = {
    "no-fast-embedding": "--max-lr 0.002 --embed-lr-scale 150",
    "no-beta1": "--beta1 0.9",
    "no-half-rope": "--model.positions rope",
    "no-exact-newton-schulz": "--newton-schulz fast",
    "no-decay": "--weight-decay 0 --vector-weight-decay 0 --muon-weight-decay 0",
    "no-bfloat16-weights": "--weights float32",
}

Recipe = tuple[str, str]  # preset, flags
Curve = list[dict[str, float]]  # of one run, one a validation: step, tokens, seconds, val_loss


@dataclass(frozen=True)
class Args:
    data_dir: Path
    size: Literal["cpu", "124m"] = "cpu"
    steps: int = 600
    """Steps of the first recipe."""
    share: float = 0.5
    """The fraction of --steps that the other recipes run."""
    seeds: tuple[int, ...] = (1, 2, 3)
    recipes: tuple[str, ...] = tuple(RECIPES["cpu"])
    extra: tuple[str, ...] = ()
    """More recipes: "name=recipe --flag value ..."."""
    vocab: int = 8192
    """How many tokens the vocabulary of the CPU size has."""
    out: Path = Path("log/recipes")
    """Folder of the runs, where finished ones are found again."""
    report: str = ""
    """Name of the .csv and .png in bench/, or a path; default recipes-SIZE."""


# ------------------------------------------------------------------------- data and recipes


def merge_rare_tokens(data_dir: Path, out: Path, vocab: int) -> Path:
    """Write shards like data_dir's in which its `vocab` - 1 most frequent tokens are numbered from 0 by their frequency
    and all others are the token `vocab` - 1. Returns their folder; what is there already is not written again."""
    # One shard for each shard of data_dir, with its name.
    paths = [path for split in ("train", "val") for path in shards.find_shards(data_dir, split)]
    folder = out / f"{data_dir.name}-{vocab}"
    if all((folder / path.name).exists() for path in paths):
        return folder
    folder.mkdir(parents=True, exist_ok=True)

    # How often each token occurs, (EOT + 1,), and the table old id -> new id, (EOT + 1,).
    counts = sum(np.bincount(shards.read_shard(path), minlength=EOT + 1) for path in paths)
    frequent = np.argsort(-counts, kind="stable")[: vocab - 1]
    new_ids = np.full(EOT + 1, vocab - 1, np.uint16)
    new_ids[frequent] = np.arange(vocab - 1)

    # Translate every shard.
    share = counts[frequent].sum() / counts.sum()
    print(f"{share:.1%} of the tokens are among the {vocab - 1} that are kept", file=sys.stderr)
    for path in paths:
        shards.write_shard(folder / path.name, new_ids[shards.read_shard(path)])
    return folder


def known_recipes(args: Args) -> dict[str, Recipe]:
    """Every recipe that can be named: those of this size, the speedrun without an ingredient, and --extra's."""
    known = dict(RECIPES[args.size])
    preset, flags = known["speedrun"]
    known |= {name: (preset, f"{flags} {change}") for name, change in WITHOUT_INGREDIENT.items()}

    # "name=recipe --flag value": a known recipe with more flags, of which the last one counts.
    for text in args.extra:
        name, _, definition = text.partition("=")
        base, _, more_flags = definition.partition(" ")
        require(base in known, f'--extra "{text}" is based on {base!r}; choose from {", ".join(known)}')
        preset, flags = known[base]
        known[name] = (preset, f"{flags} {more_flags}")
    return known


# ------------------------------------------------------------------------- training


def train(args: Args, shared_flags: str, name: str, recipe: Recipe, steps: int, seed: int) -> Curve:
    """Train one recipe with one seed, unless --out has that run. Raises UserError if the run fails."""
    # The command: flags of the size, of all recipes, of this one, of this run; nothing runs beside training and
    # validation. --resume auto continues an interrupted run and leaves a finished one alone.
    preset, flags = recipe
    out = args.out / f"{args.size}-{name}-{steps}-{seed}"
    val_every = max(1, args.steps // 20)
    command = [sys.executable, "train_gpt2.py", preset, *SIZES[args.size].split(), *shared_flags.split()]
    command += [*flags.split(), "--out-dir", str(out), *f"--seed {seed} --max-steps {steps}".split()]
    command += f"--val-every {val_every} --hellaswag-every 0 --sample-every 0 --save-every 0 --resume auto".split()
    process = subprocess.run(command, capture_output=True, text=True)
    problem = f"{' '.join(command)} failed:\n{process.stdout[-500:]}{process.stderr[-1500:]}"
    require(process.returncode == 0, problem)

    # Seconds are steps times the median step: the first one compiles, and evaluations are not training.
    rows = metrics.read_metrics(out / "metrics.jsonl")
    step_s = statistics.median(row["step_ms"] for row in rows if "step_ms" in row) / 1e3
    tokens_per_step = json.loads((out / "config.json").read_text())["total_batch_size"]
    return [
        {
            "step": row["step"],
            "tokens": row["step"] * tokens_per_step,
            "seconds": row["step"] * step_s,
            "val_loss": row["val_loss"],
        }
        for row in rows
        if "val_loss" in row
    ]


def train_all(args: Args, names: list[str], known: dict[str, Recipe]) -> dict[str, list[Curve]]:
    """Train every recipe with every seed. Returns {recipe: a curve per seed}; the first of `names` is the baseline."""
    # Which tokens, and how many there are: see the end of the module's docstring.
    match args.size:
        case "cpu":
            data_dir = merge_rare_tokens(args.data_dir, args.out, args.vocab)
            vocab_size = args.vocab
        case "124m":
            data_dir = args.data_dir
            vocab_size = 50304
        case _:
            raise ValueError(f"no size {args.size!r}: add a case here")
    shared_flags = f"--data-dir {data_dir} --model.vocab-size {vocab_size}"

    curves: dict[str, list[Curve]] = {name: [] for name in names}
    # Recipe by recipe within each seed, so that a slow hour of the machine affects all of them.
    for seed in args.seeds:
        for name in names:
            steps = args.steps if name == names[0] else round(args.share * args.steps)
            curve = train(args, shared_flags, name, known[name], steps, seed)
            curves[name].append(curve)
            print(f"{name} seed {seed}: {curve[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    return curves


# ------------------------------------------------------------------------- comparing


def first_reaches(curve: Curve, target: float, axis: str) -> float:
    """Where on an axis ("tokens" or "seconds") a curve first reaches the loss `target`, linear between evaluations;
    infinity if it never does."""
    for before, after in pairwise(curve):
        if after["val_loss"] <= target:
            fraction = (before["val_loss"] - target) / (before["val_loss"] - after["val_loss"])
            return before[axis] + fraction * (after[axis] - before[axis])
    return float("inf")


def mean_final_loss(curves_of_recipe: list[Curve]) -> float:
    """The val loss at the end of a recipe's runs, averaged over its seeds."""
    return statistics.mean(curve[-1]["val_loss"] for curve in curves_of_recipe)


def print_table(curves: dict[str, list[Curve]], baseline: str) -> None:
    """One row a recipe. Its shares of the baseline's tokens and seconds are means over the seeds."""
    # The loss to reach, and what the baseline takes to get there.
    goal = mean_final_loss(curves[baseline])
    axes = ("tokens", "seconds")
    baseline_needs = {axis: statistics.mean(curve[-1][axis] for curve in curves[baseline]) for axis in axes}
    print(f"| recipe | val loss | spread | s | to {goal:.4f}: tokens | seconds |\n|---|---|---|---|---|---|")

    for name, runs in curves.items():
        # What part of the baseline's tokens and seconds this recipe needs to reach that loss.
        shares = {}
        for axis in axes:
            needs = statistics.mean(first_reaches(curve, goal, axis) for curve in runs)
            # By definition the baseline needs all of its tokens, although some of its seeds end above the mean loss.
            shares[axis] = 1.0 if name == baseline else needs / baseline_needs[axis]

        # The row: the final losses, and the seconds of a whole run.
        final = [curve[-1]["val_loss"] for curve in runs]
        spread = f"{min(final):.4f} to {max(final):.4f}"
        seconds = statistics.mean(curve[-1]["seconds"] for curve in runs)
        needs_text = f"{shares['tokens']:.2f}x | {shares['seconds']:.2f}x"
        print(f"| {name} | {statistics.mean(final):.4f} | {spread} | {seconds:.0f} | {needs_text} |")


def write_curves(path: Path, curves: dict[str, list[Curve]], seeds: tuple[int, ...]) -> None:
    """All curves as a csv file, one line a validation."""
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, ["recipe", "seed", "step", "tokens", "seconds", "val_loss"])
        writer.writeheader()
        for name, runs in curves.items():
            for seed, curve in zip(seeds, runs, strict=True):
                for point in curve:
                    rounded = {key: round(value, 4) for key, value in point.items()}
                    writer.writerow({"recipe": name, "seed": seed, **rounded})


def draw(curves: dict[str, list[Curve]], goal: float, path: Path) -> None:
    """Draw the mean val loss of each recipe, with the band of its seeds, against tokens and against seconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, panel in zip(("tokens", "seconds"), panels, strict=True):
        for name, runs in curves.items():
            # All seeds validate at the same steps, but not after the same seconds, so x is a mean as well:
            # (seeds, points) -> (points, seeds)
            points = list(zip(*runs, strict=True))
            x = [statistics.mean(point[axis] for point in seeds) for seeds in points]
            losses = [[point["val_loss"] for point in seeds] for seeds in points]

            # The mean as a line; a band from the lowest to the highest seed.
            (line,) = panel.plot(x, [statistics.mean(values) for values in losses], label=name)
            low = [min(values) for values in losses]
            high = [max(values) for values in losses]
            panel.fill_between(x, low, high, color=line.get_color(), alpha=0.2)
        # The loss to reach. The steep beginning of the curves is cut off.
        panel.axhline(goal, color="gray", linewidth=0.8, linestyle="--")
        panel.set(xlabel=f"{axis} of training", ylim=(None, goal + 2), title=f"against {axis}")
    panels[0].set_ylabel("val loss (nats per token)")
    panels[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)

    # Which recipes to train; the first is the baseline.
    known = known_recipes(args)
    names = [*args.recipes, *(text.partition("=")[0] for text in args.extra)]
    unknown = set(names) - set(known)
    require(not unknown, f"no recipe {', '.join(unknown)}; choose from {', '.join(known)}")

    # Train them, compare them, and keep their curves.
    curves = train_all(args, names, known)
    print_table(curves, baseline=names[0])
    report = Path("bench") / (args.report or f"recipes-{args.size}")
    write_curves(report.with_suffix(".csv"), curves, args.seeds)
    draw(curves, mean_final_loss(curves[names[0]]), report.with_suffix(".png"))


if __name__ == "__main__":
    run_cli(main)
