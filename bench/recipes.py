"""Compare recipes at the same shape, data order and tokens: val loss against tokens and against seconds.

    python -m bench.recipes --data-dir data/books                                        # CPU-sized ladder, 3 seeds
    python -m bench.recipes --data-dir data/books --recipes adamw sprint no-normuon      # the effect of one ingredient
    python -m bench.recipes --data-dir data/books --size 124m --steps 120 --seeds 1      # GPU-sized

The first recipe runs --steps, the others --share of them, each with its own full schedule. The table shows each final
loss, and after which share of the first recipe's tokens and seconds each reaches the first one's (linear between
evaluations). Runs go through train_gpt2.py; finished ones are kept in --out and not run again. The curves go to
bench/recipes-SIZE.csv and .png, or to the --report name. The CPU size keeps the most frequent tokens of the data and
merges all others into one, --vocab in all: with GPT-2's 50,257 a small model would do little but learn its head.
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
from training import metrics_file

SIZES = {  # flags shared by every recipe
    "cpu": "--model.block-size 128 --model.n-layer 4 --model.n-embd 128 --sequence-length 128 --total-batch-size 4096 "
    "--micro-batch-size 32 --val-tokens 262144",
    "124m": "--total-batch-size 131072 --val-tokens 2097152",
}
RECIPES = {  # preset, flags
    "cpu": {
        "adamw": ("gpt2-124m", "--model.n-head 2 --max-lr 3e-3 --min-lr 3e-4 --warmup-steps 30"),
        "record8": ("record8-124m", "--model.n-head 1"),
        "speedrun": ("speedrun-124m", "--model.n-head 1"),
        "sprint": ("sprint-124m", "--model.n-head 1 --model.value-tables 2 --muon-momentum-warmup 24"),
    },
    "124m": {
        "adamw": ("gpt2-124m", "--max-lr 1e-3 --min-lr 1e-4 --warmup-steps 48"),
        "record8": ("record8-124m", ""),
        "speedrun": ("speedrun-124m", ""),
        "sprint": ("sprint-124m", "--muon-momentum-warmup 20"),
    },
}
WITHOUT = {  # the sprint with one ingredient as in the speedrun or, the others, in record 8
    "no-normuon": "--optimizer muon",
    "no-value-tables": "--model.value-tables 0",
    "no-momentum-warmup": "--muon-momentum-warmup 0",
    "no-fast-embedding": "--max-lr 0.002 --embed-lr-scale 150",
    "no-beta1": "--beta1 0.9",
    "no-half-rope": "--model.positions rope",
    "no-exact-newton-schulz": "--newton-schulz fast",
    "no-decay": "--weight-decay 0 --vector-weight-decay 0 --muon-weight-decay 0",
    "no-bfloat16-weights": "--weights float32",
}


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
    out: Path = Path("log/recipes")
    report: str = ""
    """Name of the .csv and .png in bench/, or a path; default recipes-SIZE."""


def fewer_words(data_dir: Path, out: Path, vocab: int) -> Path:
    """Shards like data_dir's, with its `vocab` - 1 most frequent tokens renumbered and one token for all others."""
    paths = [p for split in ("train", "val") for p in shards.find_shards(data_dir, split)]
    folder = out / f"{data_dir.name}-{vocab}"
    if not all((folder / p.name).exists() for p in paths):
        folder.mkdir(parents=True, exist_ok=True)
        counts = sum(np.bincount(shards.read_shard(p), minlength=EOT + 1) for p in paths)
        table = np.full(EOT + 1, vocab - 1, np.uint16)
        frequent = np.argsort(-counts, kind="stable")[: vocab - 1]
        table[frequent] = np.arange(vocab - 1)
        print(f"{counts[frequent].sum() / counts.sum():.1%} of the tokens are among the {vocab - 1}", file=sys.stderr)
        for p in paths:
            shards.write_shard(folder / p.name, table[shards.read_shard(p)])
    return folder


def train(args: Args, shared: str, name: str, recipe: tuple[str, str], steps: int, seed: int) -> list[dict]:
    """The val lines of one run: {"step", "tokens", "seconds", "val_loss"}."""
    preset, flags = recipe
    out = args.out / f"{args.size}-{name}-{steps}-{seed}"
    command = [sys.executable, "train_gpt2.py", preset, *SIZES[args.size].split(), *shared.split()]
    command += [*flags.split(), "--out-dir", str(out), *f"--seed {seed} --max-steps {steps}".split()]
    command += f"--val-every {max(1, args.steps // 20)} --hellaswag-every 0 --sample-every 0 --save-every 0".split()
    done = subprocess.run([*command, "--resume", "auto"], capture_output=True, text=True)
    require(done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    lines = metrics_file.read_metrics(out / "metrics.jsonl")
    usual = statistics.median(line["step_ms"] for line in lines if "step_ms" in line)  # leaves out compiling
    batch = json.loads((out / "config.json").read_text())["total_batch_size"]
    return [
        {"step": r["step"], "tokens": r["step"] * batch, "seconds": r["step"] * usual / 1e3, "val_loss": r["val_loss"]}
        for r in lines
        if "val_loss" in r
    ]


def when(curve: list[dict], target: float, axis: str) -> float:
    """Where a curve first reaches `target`, linear between evaluations; infinity if it never does."""
    for a, b in pairwise(curve):
        if b["val_loss"] <= target:
            share = (a["val_loss"] - target) / (a["val_loss"] - b["val_loss"])
            return a[axis] + share * (b[axis] - a[axis])
    return float("inf")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    known = dict(RECIPES[args.size])
    preset, flags = known["sprint"]
    known |= {name: (preset, f"{flags} {undo}") for name, undo in WITHOUT.items()}
    for text in args.extra:
        name, _, rest = text.partition("=")
        base, _, more = rest.partition(" ")
        known[name] = (known[base][0], f"{known[base][1]} {more}")
    names = [*args.recipes, *(text.partition("=")[0] for text in args.extra)]
    unknown = set(names) - set(known)
    require(not unknown, f"no recipe {', '.join(unknown)}; choose from {', '.join(known)}")
    data = fewer_words(args.data_dir, args.out, args.vocab) if args.size == "cpu" else args.data_dir
    shared = f"--data-dir {data} --model.vocab-size {args.vocab if args.size == 'cpu' else 50304}"
    curves: dict[str, list[list[dict]]] = {name: [] for name in names}
    for seed in args.seeds:  # interleaved: a slow hour of the machine affects all recipes
        for name in names:
            steps = args.steps if name == names[0] else round(args.share * args.steps)
            curves[name].append(train(args, shared, name, known[name], steps, seed))
            print(f"{name} seed {seed}: {curves[name][-1][-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    baseline = names[0]
    goal = statistics.mean(c[-1]["val_loss"] for c in curves[baseline])
    full = {axis: statistics.mean(c[-1][axis] for c in curves[baseline]) for axis in ("tokens", "seconds")}
    print(f"| recipe | val loss | spread | s | to {goal:.4f}: tokens | seconds |\n|---|---|---|---|---|---|")
    for name, runs in curves.items():
        final = [c[-1]["val_loss"] for c in runs]
        shares = {axis: statistics.mean(when(c, goal, axis) for c in runs) / full[axis] for axis in full}
        shares = dict.fromkeys(full, 1.0) if name == baseline else shares  # its seeds end on both sides of their mean
        spread = f"{min(final):.4f} to {max(final):.4f}"
        seconds = statistics.mean(c[-1]["seconds"] for c in runs)
        print(f"| {name} | {statistics.mean(final):.4f} | {spread} | {seconds:.0f} | {shares['tokens']:.2f}x | "
              f"{shares['seconds']:.2f}x |")  # fmt: skip
    target = Path("bench") / (args.report or f"recipes-{args.size}")
    with open(target.with_suffix(".csv"), "w", newline="") as f:
        writer = csv.DictWriter(f, ["recipe", "seed", "step", "tokens", "seconds", "val_loss"])
        writer.writeheader()
        for name, runs in curves.items():
            for seed, curve in zip(args.seeds, runs, strict=True):
                writer.writerows(
                    {"recipe": name, "seed": seed, **{k: round(v, 4) for k, v in r.items()}} for r in curve
                )
    draw(curves, goal, target.with_suffix(".png"))


def draw(curves: dict[str, list[list[dict]]], goal: float, path: Path) -> None:
    """Mean val loss of each recipe against tokens and seconds, with the band of its seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    for axis, panel in zip(("tokens", "seconds"), panels, strict=True):
        for name, runs in curves.items():
            x = [statistics.mean(c[i][axis] for c in runs) for i in range(len(runs[0]))]
            y = [[c[i]["val_loss"] for c in runs] for i in range(len(runs[0]))]
            (line,) = panel.plot(x, [statistics.mean(v) for v in y], label=name)
            panel.fill_between(x, [min(v) for v in y], [max(v) for v in y], color=line.get_color(), alpha=0.2)
        panel.axhline(goal, color="gray", linewidth=0.8, linestyle="--")
        panel.set(xlabel=f"{axis} of training", ylim=(None, goal + 2), title=f"against {axis}")
    panels[0].set_ylabel("val loss (nats per token)")
    panels[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_cli(main)
