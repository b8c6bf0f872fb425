"""Draw the curves of one or more runs: loss, learning rate, gradient norm, HellaSwag, speed.

    python plots.py log/quickstart                       # writes log/quickstart/curves.png
    python plots.py log/gpt2-124m --reference            # with two public FineWeb-Edu runs of this recipe behind it
    python plots.py log/a log/b --out compare.png        # overlaid; without --out: curves.png in the current folder

Reads OUT/metrics.jsonl and OUT/config.json of each run; works while a run is still writing, and without a display.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace as Run  # name, color, metrics
from typing import TYPE_CHECKING, Annotated

import numpy as np
import tyro

import metrics
from cli import UserError, print0, printable, run_cli
from files import whole_file
from reference import TOKENS, expected, read_reference

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOSS, NORM = ("train_loss", "val_loss"), ("grad_norm",)
OPENAI_HELLASWAG = {"OpenAI GPT-2 124M": 0.2955, "OpenAI GPT-2 1558M": 0.4893}  # acc_norm, completion style
OPENAI_VAL_LOSS = 3.2924  # OpenAI's 124M on FineWeb-Edu's val shard, from build-nanogpt's notebook
COLORS, GREY = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"], "#777777"
VAL_STYLE = {"marker": "o", "ms": 3.5, "mfc": "white", "ls": "--", "lw": 1.1}


def read_metrics(run_dir: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves of a run: {key: (steps (N,) int64, values (N,) float64)}, steps ascending, one value per step (the last).

    Lines of the same step are merged. A line cut off by a crash, or still being written, is skipped. Raises UserError
    if there is nothing to read.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"no {path}; give the --out-dir of a run, or start one: python train_gpt2.py quickstart")
    curves: dict[str, dict[int, float]] = {}
    for row in metrics.read_lines(path):
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                curves.setdefault(key, {})[row["step"]] = float(value)
    if not curves:
        raise UserError(f"{path} has no measured step yet; wait for the first one, or check the end of the run's log")
    return {k: (np.array(sorted(c)), np.array([c[s] for s in sorted(c)])) for k, c in curves.items()}


def step_unit(run_dirs: Sequence[Path]) -> str:
    """Label of the x axis, with the tokens per step if the configs of all runs agree on it."""
    sizes = {metrics.tokens_per_step(d) for d in run_dirs}
    return f"step ({sizes.pop():,} tokens each)" if len(sizes) == 1 and None not in sizes else "step"


def run_names(run_dirs: Sequence[Path]) -> list[str]:
    """Shortest path suffixes that tell the runs apart: log/a, old/a -> log/a, old/a; log/a, log/b -> a, b."""
    parts = [p.parts for p in run_dirs]
    depth = next(n for n in range(1, max(map(len, parts)) + 1) if len({p[-n:] for p in parts}) == len(parts))
    return ["/".join(p[-depth:]) for p in parts]


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Moving median over `window` (odd) points, shorter at the ends: a spike or a NaN leaves no trace. (N,) -> (N,)."""
    padded = np.pad(np.where(np.isfinite(values), values, np.nan), window // 2, constant_values=np.nan)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):  # a window of only NaNs stays NaN
        return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def plot_noisy(ax: Axes, run: Run, key: str) -> None:
    """Draw a curve with a value at every step faintly, and over it its moving median over a fortieth of the run."""
    steps, values = run.metrics[key]
    window = max(5, len(values) // 40) | 1 if len(values) >= 20 and key != "lr" else 1
    ax.plot(steps, values, color=run.color, alpha=0.2, lw=0.7, zorder=1)
    ax.plot(steps, smooth(values, window), color=run.color, lw=1.6)


def fit_y(ax: Axes) -> None:
    """Fit y to the curves, except for the highs of the first steps and rare spikes, which would squash the rest."""
    low, high = np.inf, -np.inf
    for x, y in (np.asarray(line.get_data(), float) for line in ax.lines):
        late = y[np.isfinite(y) & (x >= 0.05 * x.max(initial=0))]
        if len(late):
            low, high = min(low, np.nanmin(y)), max(high, np.quantile(late, 0.995))
    if np.isfinite(low):
        room = 0.06 * abs(high - low) or 0.1 * abs(high) or 1.0
        ax.set_ylim(low - room, max(low, high) + room)


def draw_loss(ax: Axes, runs: list[Run], keys: Sequence[str], reference: bool) -> None:
    for run in runs:
        if "train_loss" in run.metrics:
            plot_noisy(ax, run, "train_loss")
        if "val_loss" in run.metrics:
            ax.plot(*run.metrics["val_loss"], color=run.color, zorder=3, **VAL_STYLE)
        key = next(k for k in ("val_loss", "train_loss") if k in run.metrics)
        step, loss = (column[-1] for column in run.metrics[key])
        ax.plot([], [], color=run.color, lw=4, label=f"{run.name}: {key.split('_')[0]} {loss:.3f} at step {step:,}")
    fit_y(ax)
    ax.plot([], [], color=GREY, lw=1.6, label="train (moving median)")
    ax.plot([], [], color=GREY, label="validation", **VAL_STYLE)
    steps = [s for s in read_reference()["step"] if 0 < s <= ax.get_xlim()[1]]
    if reference and steps:
        low, high = zip(*map(expected, steps), strict=True)
        label = "on track: two public FineWeb-Edu 10B runs of GPT-2 124M, with a margin"
        ax.fill_between(steps, low, high, fc=GREY, ec="black", alpha=0.4, lw=0.8, zorder=1.5, label=label)
        ax.set_ylim(bottom=min(ax.get_ylim()[0], *low))
    if reference and ax.get_ylim()[0] < OPENAI_VAL_LOSS:
        label = f"OpenAI GPT-2 124M on FineWeb-Edu: {OPENAI_VAL_LOSS}"
        ax.axhline(OPENAI_VAL_LOSS, color=GREY, ls=":", lw=1.2, label=label)
    ax.legend(loc="upper right", fontsize=9)


def draw_hellaswag(ax: Axes, runs: list[Run], keys: Sequence[str], reference: bool) -> None:
    for run in runs:
        ax.plot(*run.metrics[keys[0]], color=run.color, lw=1.6, marker="o", ms=2.5)
    fit_y(ax)
    bottom, top = ax.get_ylim()
    lowest = min(OPENAI_HELLASWAG.values())
    top = max(top, lowest + 0.01, *(y + 0.01 for y in OPENAI_HELLASWAG.values() if y < top + 0.05))
    ax.set_ylim(min(bottom, lowest - 0.01), top)
    if reference:
        steps, *both = (read_reference()[k] for k in ("step", "hellaswag_a", "hellaswag_b"))
        ax.fill_between(steps, list(map(min, *both)), list(map(max, *both)), color=GREY, alpha=0.4, lw=0, zorder=0)
    for name, y in OPENAI_HELLASWAG.items():  # one far above every run is only named: its line would flatten them
        at, lift, text = (y, 3, f"{name}: {y}") if y < top else (top, -10, f"{name}: {y}, above this range")
        ax.axhline(at, color=GREY, ls=":", lw=1.2 * (at == y))
        ax.annotate(text, (0.01, at), (0, lift), ax.get_yaxis_transform(), "offset points", fontsize=8.5)


def draw_curve(ax: Axes, runs: list[Run], keys: Sequence[str], reference: bool) -> None:
    for run in runs:
        plot_noisy(ax, run, keys[0])
    if keys == NORM:  # shows both a tenfold spike and the quiet rest
        from matplotlib.ticker import LogLocator

        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_minor_formatter("")
    else:
        fit_y(ax)
        ax.set_ylim(0, 1.05 * ax.get_ylim()[1])


PANELS = {  # by what a panel shows: how to draw it, its title, its y axis
    LOSS: (draw_loss, "Loss", "cross-entropy (nats per token)"),
    ("lr",): (draw_curve, "Learning rate", "learning rate"),
    NORM: (draw_curve, "Gradient norm before clipping", "global L2 norm (log scale)"),
    ("hellaswag_acc_norm",): (draw_hellaswag, "HellaSwag", "accuracy (acc_norm)"),
    ("tokens_per_second",): (draw_curve, "Speed", "tokens per second"),
}


def draw(run_dirs: Sequence[str | Path], out: str | Path, reference: bool = False) -> Path:
    """Draw `run_dirs` into the image `out` (its suffix sets the format) and return its path.

    One panel per measured quantity, one color per run. reference: draw the band of the two public FineWeb-Edu 10B runs
    (reference.py) behind them, as far as the runs' own steps reach. Raises UserError.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not (dirs := list(dict.fromkeys(Path(d).resolve() for d in run_dirs))):
        raise UserError("no run folder given; give one or more: python plots.py log/quickstart")
    for d in dirs if reference else ():
        if (size := metrics.tokens_per_step(d)) not in (None, TOKENS):
            print0(f"warning: the reference runs had {TOKENS:,} tokens per step, but {d.name} has {size:,}")
    named = zip(dirs, map(printable, run_names(dirs)), strict=True)
    runs = [Run(name=n, color=COLORS[i % len(COLORS)], metrics=read_metrics(d)) for i, (d, n) in enumerate(named)]
    if not (panels := [keys for keys in PANELS if any(k in r.metrics for r in runs for k in keys)]):
        raise UserError(f"{dirs[0]}/metrics.jsonl has nothing to draw; it needs one of {', '.join(sum(PANELS, ()))}")
    wide = int(panels[0] == LOSS)  # the loss gets its own row
    columns = 3 if len(panels) - wide == 3 else 2
    heights = [5.2] * wide + [3.4] * -(-(len(panels) - wide) // columns)
    figure = Figure(figsize=(12, sum(heights) + 0.4), dpi=110, layout="constrained")  # pyplot's would need a display
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    last = max(steps[-1] for r in runs for steps, _ in r.metrics.values())
    for i, keys in enumerate(panels):
        ax = figure.add_subplot(grid[0, :] if i < wide else grid[wide + (i - wide) // columns, (i - wide) % columns])
        ax.set_xlim(0, max(1, last) * 1.01)
        function, title, y_label = PANELS[keys]
        function(ax, [r for r in runs if any(k in r.metrics for k in keys)], keys, reference)
        ax.set(title=title, xlabel=step_unit(dirs), ylabel=y_label)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        if ax.get_ylim()[1] > 0.01:  # below that, as for learning rates, the default power of ten reads better
            ax.yaxis.set_major_formatter("{x:,.0f}" if ax.get_ylim()[1] > 1000 else "{x:g}")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    try:
        (out := Path(out)).parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as f:
            figure.savefig(f, format=out.suffix[1:] or "png")
    except (OSError, ValueError) as e:  # ValueError: the suffix is not an image format
        raise UserError(f"cannot write the image {out}: {e}; choose another, such as --out curves.png") from None
    return out


def main(run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional], reference: bool = False, out: Path | None = None):
    """Draw the curves of runs.

    Args:
        run_dirs: run folders (--out-dir of train_gpt2.py); several are overlaid.
        reference: draw the band of two public FineWeb-Edu 10B runs of GPT-2 124M behind the curves.
        out: the image; default: RUN_DIR/curves.png for one run, curves.png here for several.
    """
    print0(f"wrote {draw(run_dirs, out or Path(*run_dirs[: len(run_dirs) == 1], 'curves.png'), reference)}")


if __name__ == "__main__":
    run_cli(lambda: tyro.cli(main, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
