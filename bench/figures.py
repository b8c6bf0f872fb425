"""Draws two of README's pictures into docs/: what quickstart learns, and what a run of gpt2-124m should look like.

    python -m bench.figures                     # trains quickstart twice, unless log/figures* is there

The third, docs/parity.png, is drawn by `python -m bench parity --plot`.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import plots
from lifecycle.reference import read_references
from system.cli import run_cli

BLUE, RED, GREY = "#08306b", "#c0392b", "#777777"
# Where the samples stand in the picture, by the step of their checkpoint: step, loss. The curve is below them.
SAMPLES = {10: (6.5, 8.0), 20: (23, 7.2), 80: (49, 6.5)}
# A public run of gpt2-124m's recipe that went wrong, and cost $61: its val losses, by step.
# https://debtirthasaha.github.io/blog/2026/gpt2-124m/
WRONG_RUN = {250: 6.43, 500: 5.824, 1000: 4.8817, 5000: 3.83, 10_000: 3.5895, 19_072: 3.3969}


@dataclass(frozen=True)
class Args:
    run: Path = Path("log/figures")
    """Folder of the run of quickstart, with the checkpoints of all the steps that have a sample."""
    longer: Path = Path("log/figures-longer")
    """Folder of a run of quickstart over more steps."""
    docs: Path = Path("docs")
    """Where the pictures go."""


def new_axes() -> Any:
    """Axes of a picture as wide as a README."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(8.4, 4), layout="constrained").subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def sample(run: Path, step: int) -> str:
    """The first lines that infer.py prints for the checkpoint of this step."""
    command = ["infer.py", str(run / f"model_{step:05}.pt"), "ROMEO:", "--temperature", "0.8", "--seed", "2"]
    text = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:5])


def draw_quickstart(run: Path, longer: Path, path: Path) -> None:
    """The losses, step by step, with samples of a few steps, and one of a longer run."""
    curves = plots.read_curves(run)
    axes = new_axes()
    axes.plot(*curves["train_loss"], color=BLUE, lw=1.5, label="train")
    axes.plot(*curves["val_loss"], "o", color=BLUE, mfc="white", ms=5, label="val")
    val_losses = dict(zip(*curves["val_loss"], strict=True))
    box = {"fc": "white", "ec": GREY, "lw": 0.5, "boxstyle": "round,pad=0.4"}
    how: dict[str, Any] = {"fontsize": 7.5, "family": "monospace", "va": "bottom", "bbox": box}
    for step, place in SAMPLES.items():
        axes.annotate(
            f"after {step} steps:\n\n{sample(run, step)}", (step, val_losses[step]), place,
            arrowprops={"arrowstyle": "-", "color": GREY, "shrinkB": 5}, **how,
        )  # fmt: skip
    steps, losses = plots.read_curves(longer)["val_loss"]
    last = f"{steps[-1]:.0f} steps, not in this picture (val loss {losses[-1]:.2f}):"
    how["bbox"] = box | {"ls": "--"}
    axes.text(42, 9.4, f"after {last}\n\n{sample(longer, int(steps[-1]))}", **how)
    axes.text(80.8, val_losses[80], f"{val_losses[80]:.2f}", fontsize=9, color=BLUE, va="center")
    axes.text(1.5, 10.95, "random guessing: ln 50,304 = 10.83", fontsize=8)
    axes.set_title("make quickstart: 80 steps on a CPU", fontsize=11)
    axes.set(xlabel="step", ylabel="loss (nats per token)", xlim=(-0.5, 84), ylim=(4.6, 11.6))
    axes.legend(loc="lower left", frameon=False)
    axes.figure.savefig(path, dpi=200)


def draw_expected(path: Path) -> None:
    """The val losses of the public runs of gpt2-124m, and of one that went wrong."""
    reference = read_references()[0]
    after_start = reference.step > 0
    steps = reference.step[after_start]
    ranges = np.array([reference.expected_range(step) for step in steps])  # (N, 2)
    wrong = np.array(list(WRONG_RUN.items()))  # (N, 2)
    axes = new_axes()
    axes.fill_between(steps, ranges[:, 0], ranges[:, 1], color=BLUE, alpha=0.25, lw=0)
    axes.plot(steps, reference.low[after_start], color=BLUE, lw=1)
    axes.plot(steps, reference.high[after_start], color=BLUE, lw=1)
    axes.plot(wrong[:, 0], wrong[:, 1], "o--", color=RED, ms=5, lw=0.8)
    axes.axhline(plots.OPENAI_124M["Loss"], color=GREY, ls=":")

    # The lines are named where they are.
    openai = f"OpenAI's GPT-2 124M, trained on other text: {plots.OPENAI_124M['Loss']:.2f}"
    axes.text(265, 3.36, openai, color=GREY, fontsize=9)
    axes.text(540, 4.3, "two public runs\nof this recipe;\nshaded: on track", color=BLUE, fontsize=9, ha="right")
    axes.text(1150, 5.0, "a third run, for $61, ended too high", color=RED, fontsize=9)
    arrow = {"arrowstyle": "->", "color": RED, "shrinkB": 5}
    place = {"fontsize": 9, "va": "center", "color": RED}
    axes.annotate("step 250, 1.3% of the run: off track", (250, WRONG_RUN[250]), (420, 6.6), arrowprops=arrow, **place)
    for loss, color in ((reference.low[-1], BLUE), (WRONG_RUN[19_072], RED)):
        axes.text(20_500, loss, f"{loss:.2f}", color=color, fontsize=9, va="center")

    axes.set_title("A run that ended at 3.40 was too high at step 250 already (logs of other people)", fontsize=11)
    axes.set(xscale="log", xlabel="step (log scale)", ylabel="val loss (nats per token)", ylim=(2.9, 6.8))
    axes.set_xlim(225, 26_000)
    axes.set_xticks([250, 500, 1000, 2000, 5000, 10_000, 19_072])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("")
    axes.figure.savefig(path, dpi=200)


def main() -> None:
    args = tyro.cli(Args, description=__doc__, prog="python -m bench.figures")
    for run, steps, save_every in ((args.run, 80, 10), (args.longer, 400, 400)):
        if not run.exists():
            flags = f"quickstart --max-steps {steps} --save-every {save_every} --keep 0 --out-dir {run}"
            subprocess.run([sys.executable, "train_gpt2.py", *flags.split()], check=True)
    draw_quickstart(args.run, args.longer, args.docs / "quickstart.png")
    draw_expected(args.docs / "expected.png")


if __name__ == "__main__":
    run_cli(main)
