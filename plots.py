"""The picture of one or more runs: loss, HellaSwag, learning rate, gradient norm, speed.

    python plots.py log/quickstart                       # writes log/quickstart/curves.png
    python plots.py log/gpt2-124m --reference            # with public runs of this recipe behind the curves
    python plots.py log/a log/b --out compare.png        # overlaid; without --out: curves.png in the current folder
    python plots.py log/a log/b --x tokens               # over the tokens read, for runs of different batch sizes

Reads metrics.jsonl and config.json of each run's folder, or else build-nanogpt's log.txt or what a console showed;
works while a run is still writing, and without torch or a display. plots.ipynb calls read_curves and draw.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

import system  # noqa: F401  # first

# isort: split
import numpy as np

from checkpoints import run_folder
from checkpoints.run_folder import describe_runs
from evaluation.reference import DATASETS, TOKENS_PER_STEP, Reference, find_reference
from system.errors import explain_errors, require
from system.printing import print0
from system.process import run_cli
from system.settings import ArgumentParser

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# The curves of a run, by metrics key: steps (or tokens) and values (2, N) float64, steps ascending.
Curves = dict[str, np.ndarray]

# What build-nanogpt's log.txt, its console, this project's and llm.c's main.log call our metrics.
LOG_KEYS = {
    "train": "train_loss", "val": "val_loss", "hella": "hellaswag_acc_norm",
    "loss": "train_loss", "validation loss": "val_loss", "HellaSwag accuracy": "hellaswag_acc_norm",
    "val loss": "val_loss", "acc_norm": "hellaswag_acc_norm",
    "trl": "train_loss", "tel": "val_loss", "eval": "hellaswag_acc_norm",
    "lr": "lr", "norm": "grad_norm", "tok/sec": "tokens_per_second",
}  # fmt: skip
X_AXES = {"step": 1, "tokens": TOKENS_PER_STEP}  # and how much of it one step of the public runs is
SUFFIXES = (".jsonl", ".txt", ".log")  # of the files that are read
STEP = re.compile(r"(?:step +|s:)?(\d+)(?:/\d+)? ")
# A score may stand behind its fraction: 3049/10042=0.3036
MEASURED = re.compile(rf"\b({'|'.join(LOG_KEYS)})[ :]+(?:\d+/\d+=)?(\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?)(?=\s)")

# OpenAI's GPT-2 124M, drawn as a horizontal line: its loss on FineWeb-Edu's val shard (from build-nanogpt's notebook),
# and its acc_norm in completion style. These metrics are measured at few steps, and so drawn as points.
OPENAI_124M = {"val_loss": 3.2924, "hellaswag_acc_norm": 0.2955}

# The panels, by metric: their title and the label of the y axis.
PANELS = {
    "val_loss": ("Loss: train (line) and val (points)", "cross-entropy (nats per token)"),
    "hellaswag_acc_norm": ("HellaSwag", "accuracy (acc_norm)"),
    "lr": ("Learning rate", "learning rate (peak: --max-lr)"),
    "grad_norm": ("Gradient norm before clipping", "global L2 norm"),
    "tokens_per_second": ("Speed", "tokens per second"),
}
# What else this program measures. Any other metric, as of an experiment, gets a panel of its own, or stands beside the
# loss if it is a val loss, such as val_loss_ema.
NOT_DRAWN = {"step_ms", "wait_ms", "mfu", "hellaswag_acc"}
DIVERGED = 5  # times the median curve: a run at a bad rate, but one that learns, is below
PARTS = 200  # of a long curve, which is also drawn by the median in each


# ------------------------------------------------------------------------- reading


def find_log(run: Path) -> Path | None:
    """The file that has the curves of a run, given by its folder or its log; None if there is none."""
    # train.sh and others name what a console showed by the time: the newest.
    candidates = [run / "metrics.jsonl", run / "log.txt", *sorted(run.glob("*.log"), reverse=True), run]
    return next((path for path in candidates if path.suffix in SUFFIXES and path.is_file()), None)


def read_curves(run: str | Path, x: str = "step") -> Curves:
    """Curves of a run, by its folder or its log: {key: steps and values (2, N) float64}, steps ascending, one value per
    step (the last); empty if there is no log. NaN is skipped, and so is a line that is cut off. x: step, or tokens for
    the tokens read before each step, which only a metrics.jsonl has.
    """
    path = find_log(Path(run))
    if path is None:
        return {}

    # Several lines may have the same step. If a key has several values, the last one counts.
    values_by_step: dict[str, dict[int, float]] = {}
    for row in run_folder.read_metrics(path) if path.suffix == ".jsonl" else read_log(path):
        if x not in row:
            continue
        step = row[x]
        for key, value in row.items():
            if key not in X_AXES and isinstance(value, int | float) and math.isfinite(value):
                values_by_step.setdefault(key, {})[step] = value
    return {key: np.array(sorted(values.items()), float).T for key, values in values_by_step.items()}


def read_log(path: Path) -> Iterator[dict[str, Any]]:
    """Rows as in metrics.jsonl, of a file with such lines:

    build-nanogpt    250 val 5.9012
    its console      validation loss: 5.9012
                     HellaSwag accuracy: 2545/10042=0.2534
                     step   250 | loss: 5.901234 | lr 2.1e-04 | norm: 0.7012 | dt: 802.85ms | tok/sec: 653032.59
    this console     step   250/19073 | val loss: 5.9012
    llm.c            s:250 tel:5.9012
    """
    of_next_step: dict[str, float] = {}  # build-nanogpt evaluates a step, then trains it, and prints its number last
    for line in re.findall(r".*\n", path.read_text(errors="replace")):  # without one that is still being written
        step = STEP.match(line)
        values = {LOG_KEYS[key]: float(value.replace(",", "")) for key, value in MEASURED.findall(line)}
        if step and values:
            yield {"step": int(step[1]), **of_next_step, **values}
            of_next_step = {}
        elif line.startswith(("validation loss:", "HellaSwag accuracy:")):
            of_next_step |= values


def choose_reference(folder: Path) -> Reference | None:
    """The public runs drawn behind a run: those of its preset, steps and tokens per step, if there are any. What it
    does not state, as the plain trainer its preset and the log of another trainer all three, is gpt2-124m's."""
    config = run_folder.read_config(folder)
    max_steps = config.get("resolved_max_steps", config.get("max_steps", 19_073))
    found = find_reference(
        config.get("preset", "gpt2-124m"), max_steps, config.get("total_batch_size", TOKENS_PER_STEP)
    )
    if not found:
        print0(f"{folder}: no public run has its preset, steps and tokens per step")
    return found


# ------------------------------------------------------------------------- drawing


def draw_curve(ax: Axes, key: str, curve: np.ndarray, color: str) -> None:
    """Draw one curve (2, N). One with many values is drawn faintly and, over it, by the median in each of PARTS equal
    parts, which a spike does not move."""
    if key.startswith(tuple(OPENAI_124M)):
        # No line joins the points: beside a train loss that falls steeply between two of them, it would show a gap that
        # is not there.
        marker, label = ("o", None) if key in OPENAI_124M else ("^", key)
        ax.plot(*curve, marker, color=color, ms=4, mfc="white", zorder=3, label=label)
        return
    if curve.shape[1] >= PARTS:
        ax.plot(*curve, color=color, lw=0.7, alpha=0.3, zorder=1)
        curve = np.array([np.median(part, 1) for part in np.array_split(curve, PARTS, 1)]).T
    ax.plot(*curve, color=color, lw=1.6)


def draw_public_runs(ax: Axes, key: str, reference: Reference, x: str) -> None:
    """The range of the public runs as far as the x axis goes: of losses the healthy one, with its margin."""
    seen = (reference.step > 0) & (reference.step * X_AXES[x] <= ax.get_xlim()[1])
    steps, low, high = reference.step[seen], reference.hellaswag_low[seen], reference.hellaswag_high[seen]
    if key == "val_loss":
        low, high = np.array([reference.expected_range(step) for step in steps]).reshape(-1, 2).T
    label = f"{reference.preset}, {reference.max_steps:,} steps on {DATASETS[reference.preset]}: public runs"
    label = f"{label} ({reference.runs})"
    ax.fill_between(steps * X_AXES[x], low, high, fc="grey", ec="black", alpha=0.4, lw=0.8, label=label)


def draw_panel(ax: Axes, keys: list[str], runs: list[Curves], references: list[Reference], x: str) -> None:
    """One panel: the curves of all runs, and beside them the figures of others."""
    all_steps = [steps for curves in runs for steps, _ in curves.values()]
    last_step = max(int(steps[-1]) for steps in all_steps)
    is_long = max(map(len, all_steps)) > PARTS
    drawn = []
    for i, curves in enumerate(runs):
        for key in keys:
            if key in curves:
                draw_curve(ax, key, curves[key], f"C{i % 10}")
                drawn.append(curves[key])

    # The y axis shows all but the highest spikes, of a long run the highs of its beginning, and a loss or norm that has
    # diverged beside others, which would squash the rest. All but losses and scores are compared by their distance
    # from 0.
    key = keys[-1]
    start = max(steps[-1] for steps, _ in drawn) // 20 if is_long else 0
    highs = [np.quantile(values[steps >= start], 0.995) for steps, values in drawn if steps[-1] >= start]
    limit = DIVERGED * median_low(highs) if key in ("val_loss", "grad_norm") else math.inf
    high = max(high for high in highs if high <= limit)
    low = min(values.min() for _, values in drawn) if key in OPENAI_124M else 0
    ax.set_xlim(0, max(1, last_step) * 1.01)
    if key in OPENAI_124M:
        for reference in references:
            draw_public_runs(ax, key, reference, x)
        # With a loss on other data, a line would mean nothing.
        if references or key == "hellaswag_acc_norm":
            level = OPENAI_124M[key]
            ax.axhline(level, color="grey", ls=":", lw=1.2, label=f"OpenAI GPT-2 124M: {level}")
            high = max(high, level)
    margin = max(0.06 * (high - low), 1e-3 * high)
    ax.set_ylim(low - margin, high + margin)
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=9)
    title, y_label = PANELS.get(key, (key, ""))
    ax.set(title=title, xlabel=x, ylabel=y_label)
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.yaxis.set_major_formatter("{x:,.10g}")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[str | Path], out: str | Path, reference: bool = False, x: str = "step") -> Path:
    """Draw runs into one image.

    Args:
        runs: their folders, or logs. What is no run, as some of log/*, is left out, with a message.
        out: the image, whose suffix sets the format.
        reference: draw the public runs of their recipes (evaluation/reference.py) behind them.
        x: what the x axis shows, step or tokens.

    Returns the image's path. Raises UserError if there is nothing to draw.
    """
    from matplotlib.figure import Figure  # pyplot's would need a display
    from matplotlib.lines import Line2D

    words = {"train_loss": "train", "val_loss": "val", "hellaswag_acc_norm": "HellaSwag"}
    drawn: list[Curves] = []
    lines: list[Line2D] = []
    found: list[Reference | None] = []
    for name in dict.fromkeys(map(str, runs)):
        curves = read_curves(name, x)
        if not curves:
            print0(f"skipped: no measured {x} in {name}; plots.py reads {', '.join(SUFFIXES)}")
            continue
        # A folder without metrics.jsonl may have several logs.
        log = find_log(Path(name))
        label = name if log == Path(name) / "metrics.jsonl" else log
        # Its last values: "log/quickstart: train 6.024, val 10.81 at step 0, step 36".
        last_step = max(steps[-1] for steps, _ in curves.values())
        ends = []
        for key, word in words.items():
            if key in curves:
                step, value = curves[key][:, -1]
                where = "" if key == "train_loss" or step == last_step else f" at {x} {step:,.0f}"
                ends.append(f"{word} {value:#.4g}{where}")
        label = f"{label}: {', '.join([*ends, f'{x} {last_step:,.0f}'])}"
        print0(label)
        lines.append(Line2D([], [], color=f"C{len(lines) % 10}", lw=2.4, label=label))
        drawn.append(curves)
        if reference:
            found.append(choose_reference(folder_of(Path(name))))
    problem = f"no measured {x} in {', '.join(map(str, runs))}"
    require(drawn, f"{problem}; {describe_runs(Path(runs[0]).parent, 'metrics.jsonl')}")

    # The metrics of each panel, the one that it is named after last: those of PANELS, then what else was measured.
    measured = set().union(*drawn)
    losses = sorted(key for key in measured if key == "train_loss" or key.startswith("val_loss_"))
    others = sorted(key for key in measured - {*PANELS, *NOT_DRAWN, *losses} if not key.startswith("val_bpb"))
    panels = [[*losses, key] if key == "val_loss" else [key] for key in [*PANELS, *others]]
    panels = [keys for keys in panels if measured.intersection(keys)]

    references = [*dict.fromkeys(filter(None, found))]  # each once
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(14, 4.4 * rows + 0.6), dpi=110, layout="constrained")
    for number, keys in enumerate(panels, 1):
        draw_panel(figure.add_subplot(rows, 2, number), keys, drawn, references, x)

    figure.legend(handles=lines, loc="outside upper center", frameon=False)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with explain_errors(f"cannot write the image {out}", "choose another --out", ValueError):
        figure.savefig(out, format=out.suffix[1:])
    return out


def folder_of(run: Path) -> Path:
    """Where the picture of a run belongs: in its folder, or beside its log."""
    return run if run.is_dir() else run.parent


# ------------------------------------------------------------------------- command line


def main() -> None:
    """Draw the curves of the runs that the command line names."""
    parser = ArgumentParser(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or logs; several are overlaid")
    parser.add_argument("--reference", action="store_true", help="draw public runs of the same recipe behind them")
    parser.add_argument("--x", choices=X_AXES, default="step", help="tokens: compare runs of different batch sizes")
    parser.add_argument("--out", type=Path, help="the image; default: curves.png in the run's folder, or here")
    args = parser.parse_args()

    # The picture of one run belongs to its folder; one of several runs belongs to none of theirs.
    folder = folder_of(args.runs[0]) if len(args.runs) == 1 else Path()
    print0(f"wrote {draw(args.runs, args.out or folder / 'curves.png', args.reference, args.x)}")


if __name__ == "__main__":
    run_cli(main)
