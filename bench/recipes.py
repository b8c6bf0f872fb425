"""Recipes against each other: the same shape, data order and tokens; val loss against tokens and against seconds.

    python bench/recipes.py --data-dir data/books --seeds 1 2 3                      # CPU-sized ladder
    python bench/recipes.py --data-dir data/books --size 124m --seeds 1 --steps 120  # GPU-sized

Each recipe is a preset with the flags of RECIPES on top; runs go through train_gpt2.py and resume if interrupted. The
table says what each recipe reaches, and the share of tokens and of seconds after which it passes the AdamW baseline's
final loss (linear between evaluations). The curves go to bench/recipes-SIZE.csv and .png.
"""

import csv
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from runtime import UserError, run_cli  # noqa: E402

SIZES = {  # flags that every recipe shares
    "cpu": "--model.block-size 128 --model.n-layer 4 --model.n-embd 128 --sequence-length 128 --total-batch-size 4096 "
    "--micro-batch-size 32 --val-tokens 131072",
    "124m": "--total-batch-size 524288 --val-tokens 2097152",
}
RECIPES = {  # preset, flags
    "adamw": ("gpt2-124m", "--schedule cosine"),
    "record8": ("speedrun-124m", ""),
}
CPU_FLAGS = {
    "adamw": "--model.n-head 2 --max-lr 3e-3 --min-lr 3e-4 --warmup-steps 20",
    "record8": "--model.n-head 1",
}


@dataclass(frozen=True)
class Args:
    data_dir: str
    size: str = "cpu"
    steps: int = 200
    seeds: tuple[int, ...] = (1, 2, 3)
    recipes: tuple[str, ...] = tuple(RECIPES)
    extra: tuple[str, ...] = ()
    """More recipes: "name=preset --flag value ..."."""
    out: Path = Path("log/recipes")
    """Run folders; finished runs are not run again."""


def train(args: Args, name: str, recipe: tuple[str, str], seed: int) -> list[dict]:
    """The val lines of one run: {"step", "tokens", "seconds", "val_loss"}."""
    preset, flags = recipe
    out = args.out / f"{args.size}-{name}-{seed}"
    every = max(1, args.steps // 20)
    command = [sys.executable, str(ROOT / "train_gpt2.py"), preset, *SIZES[args.size].split(), *flags.split()]
    command += f"--data-dir {args.data_dir} --out-dir {out} --seed {seed} --max-steps {args.steps}".split()
    command += f"--val-every {every} --hellaswag-every 0 --sample-every 0 --save-every 0 --resume auto".split()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(command)}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    usual = statistics.median(line["step_ms"] for line in lines if "step_ms" in line)  # so that compiling is left out
    batch = json.loads((out / "config.json").read_text())["total_batch_size"]
    return [
        {"step": r["step"], "tokens": r["step"] * batch, "seconds": r["step"] * usual / 1e3, "val_loss": r["val_loss"]}
        for r in lines
        if "val_loss" in r
    ]


def when(curve: list[dict], target: float, axis: str) -> float:
    """Where a curve first passes `target`, linear between evaluations; infinity if it never does."""
    for a, b in pairwise(curve):
        if b["val_loss"] <= target:
            share = (a["val_loss"] - target) / (a["val_loss"] - b["val_loss"])
            return a[axis] + share * (b[axis] - a[axis])
    return float("inf")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    small = CPU_FLAGS if args.size == "cpu" else {}
    recipes = {n: (RECIPES[n][0], f"{small.get(n, '')} {RECIPES[n][1]}") for n in args.recipes}
    for text in args.extra:
        name, _, rest = text.partition("=")
        preset, _, flags = rest.partition(" ")
        base = small.get("record8" if preset.startswith("speedrun") else "adamw", "")
        recipes[name] = (preset, f"{base} {flags}")
    curves: dict[str, list[list[dict]]] = {name: [] for name in recipes}
    for seed in args.seeds:  # interleaved: a slow hour of the machine is everybody's
        for name, recipe in recipes.items():
            curves[name].append(train(args, name, recipe, seed))
            print(f"{name} seed {seed}: {curves[name][-1][-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    baseline = next(iter(recipes))
    goal = statistics.mean(c[-1]["val_loss"] for c in curves[baseline])
    full = {axis: statistics.mean(c[-1][axis] for c in curves[baseline]) for axis in ("tokens", "seconds")}
    print(f"| recipe | val loss | spread | s | to {goal:.4f}: tokens | seconds |\n|---|---|---|---|---|---|")
    for name, runs in curves.items():
        final = [c[-1]["val_loss"] for c in runs]
        shares = {axis: statistics.mean(when(c, goal, axis) for c in runs) / full[axis] for axis in full}
        spread = f"{min(final):.4f} to {max(final):.4f}"
        seconds = statistics.mean(c[-1]["seconds"] for c in runs)
        print(f"| {name} | {statistics.mean(final):.4f} | {spread} | {seconds:.0f} | {shares['tokens']:.2f}x | "
              f"{shares['seconds']:.2f}x |")  # fmt: skip
    target = ROOT / "bench" / f"recipes-{args.size}"
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
    panels[0].set_ylabel("val loss (nats a token)")
    panels[0].legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    run_cli(main)
