"""The picture of one or more runs: loss, learning rate, gradient norm, HellaSwag, speed.

    python plots.py log/quickstart                       # writes log/quickstart/curves.png
    python plots.py log/gpt2-124m --reference            # with public runs of this recipe behind it
    python plots.py log/a log/b --out compare.png        # overlaid; without --out: curves.png in the current folder
    python plots.py log/quickstart --tensorboard         # the same curves as log/quickstart/tensorboard

Reads OUT/metrics.jsonl and OUT/config.json of each run, or else build-nanogpt's log.txt or llm.c's main.log; works
while a run is still writing, and without a display.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from system.cli import UserError, print0, printable, require, run_cli
from system.files import atomic_write
from training import metrics_file, trackers
from training.reference import Reference, find_reference, read_references

OPENAI_HELLASWAG = {"OpenAI GPT-2 124M": 0.2955, "OpenAI GPT-2 1558M": 0.4893}  # acc_norm, completion style
OPENAI_VAL_LOSS = 3.2924  # OpenAI's 124M on FineWeb-Edu's val shard, from build-nanogpt's notebook
LOGS = ("metrics.jsonl", "log.txt", "main.log")  # ours, build-nanogpt's, llm.c's
THEIRS = {  # our name of what these call ...
    "train": "train_loss", "val": "val_loss", "hella": "hellaswag_acc_norm",
    "trl": "train_loss", "tel": "val_loss", "eval": "hellaswag_acc_norm", "lr": "lr", "norm": "grad_norm",
}  # fmt: skip
COLORS, GREY = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"], "#777777"
PANELS = {  # by title: the metrics of which it shows at least one, and its y axis
    "Loss": (("val_loss", "train_loss"), "cross-entropy (nats per token)"),
    "HellaSwag": (("hellaswag_acc_norm",), "accuracy (acc_norm)"),
    "Learning rate": (("lr",), "learning rate"),
    "Gradient norm before clipping": (("grad_norm",), "global L2 norm (log scale)"),
    "Speed": (("tokens_per_second",), "tokens per second"),
}
ROWS = [["Loss"], ["HellaSwag"], ["Learning rate", "Gradient norm before clipping", "Speed"]]
VAL_STYLE = {"marker": "o", "ms": 3.5, "mfc": "white", "ls": "--", "lw": 1.1}


class Run(NamedTuple):
    name: str
    color: str
    metrics: dict[str, tuple[np.ndarray, np.ndarray]]  # as from read_metrics


def read_metrics(run_dir: str | Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves of a run: {key: (steps (N,) int64, values (N,) float64)}, steps ascending, one value per step (the last).
    A line cut off by a crash, or still being written, is skipped. Raises UserError if there is nothing to read."""
    found = [path for name in LOGS if (path := Path(run_dir) / name).is_file()]
    mend = "give the --out-dir of a run, or start one: python train_gpt2.py quickstart"
    require(found, f"no {Path(run_dir) / LOGS[0]}; {mend}")
    path = found[0]
    curves: dict[str, dict[int, float]] = {}
    for row in metrics_file.read_metrics(path) if path.name == LOGS[0] else read_log(path):
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                curves.setdefault(key, {})[row["step"]] = float(value)
    require(curves, f"{path} has no measured step yet; wait for the first one, or check the end of the run's log")
    return {k: (np.array(sorted(c)), np.array([c[s] for s in sorted(c)])) for k, c in curves.items()}


def read_log(path: Path) -> Iterator[dict[str, float]]:
    """Rows as in metrics.jsonl of a log of build-nanogpt ("250 val 5.9012") or llm.c ("s:250 trl:5.90 lr:0.0002")."""
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        step = re.match(r"(?:s:)?(\d{1,18}) ", line)
        if step and line.endswith("\n"):  # else it is still being written
            measured = re.findall(r"\b([a-z]+)[ :](\d+\.\d+|nan|inf)(?=\s)", line)
            yield {"step": int(step[1])} | {THEIRS[key]: float(value) for key, value in measured if key in THEIRS}


def to_tensorboard(run_dir: Path) -> Path:
    """Write the curves of a run that went without --tracker to RUN_DIR/tensorboard. Raises UserError."""
    from torch.utils.tensorboard import SummaryWriter

    out, curves = run_dir / "tensorboard", read_metrics(run_dir)
    require(not out.exists(), f"{out} is there already; to see it: tensorboard --logdir {run_dir}")
    with SummaryWriter(str(out)) as writer:
        for key, (steps, values) in curves.items():
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                writer.add_scalar(trackers.tensorboard_tag(key), value, step)
    return out


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Moving median over `window` (odd) points, shorter at the ends: a spike or a NaN leaves no trace. (N,) -> (N,)."""
    padded = np.pad(np.where(np.isfinite(values), values, np.nan), window // 2, constant_values=np.nan)
    with warnings.catch_warnings(action="ignore"):  # a window of only NaNs stays NaN
        return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)


def plot_noisy(ax, run: Run, key: str) -> None:
    """Draw a curve with a value at every step faintly and, over it, its moving median over a fortieth of the run."""
    steps, values = run.metrics[key]
    window = 1 if key == "lr" else 2 * (len(values) // 80) + 1
    ax.plot(steps, values, color=run.color, alpha=0.2, lw=0.7, zorder=1)
    ax.plot(steps, smooth(values, window), color=run.color, lw=1.6)


def fit_y(ax) -> None:
    """Fit y to the curves, except for the highs of the first steps and rare spikes, which would squash the rest."""
    low, high = np.inf, -np.inf
    for line in ax.lines:
        x, y = np.asarray(line.get_data(), float)
        late = y[np.isfinite(y) & (x >= 0.05 * x.max(initial=0))]
        if len(late):
            low, high = min(low, np.nanmin(y)), max(high, np.quantile(late, 0.995))
    if low <= high:
        room = max(0.06 * (high - low), 0.01 * abs(high), 1e-9)
        ax.set_ylim(low - room, high + room)


def draw_loss(ax, runs: list[Run], references: list[Reference]) -> None:
    for run in runs:
        if "train_loss" in run.metrics:
            plot_noisy(ax, run, "train_loss")
        if "val_loss" in run.metrics:
            ax.plot(*run.metrics["val_loss"], color=run.color, zorder=3, **VAL_STYLE)
        kind = "val" if "val_loss" in run.metrics else "train"
        steps, losses = run.metrics[f"{kind}_loss"]
        ax.plot([], [], color=run.color, lw=4, label=f"{run.name}: {kind} {losses[-1]:.3f} at step {steps[-1]:,}")
    fit_y(ax)
    ax.plot([], [], color=GREY, lw=1.6, label="train (moving median)")
    ax.plot([], [], color=GREY, label="validation", **VAL_STYLE)
    for known in references:
        if steps := [s for s in known.step if 0 < s <= ax.get_xlim()[1]]:
            low, high = zip(*map(known.expected, steps), strict=True)
            label = f"on track: {known.runs} public run(s) of {known.preset}'s recipe, with a margin"
            ax.fill_between(steps, low, high, fc=GREY, ec="black", alpha=0.4, lw=0.8, zorder=1.5, label=label)
            ax.set_ylim(bottom=min(ax.get_ylim()[0], *low))
    if any(known.preset == "gpt2-124m" for known in references) and ax.get_ylim()[0] < OPENAI_VAL_LOSS:
        label = f"OpenAI GPT-2 124M on FineWeb-Edu: {OPENAI_VAL_LOSS}"
        ax.axhline(OPENAI_VAL_LOSS, color=GREY, ls=":", lw=1.2, label=label)
    ax.legend(loc="upper right", fontsize=9)


def draw_hellaswag(ax, runs: list[Run], references: list[Reference]) -> None:
    best = 0.25  # by chance
    for run in runs:
        steps, accuracy = run.metrics["hellaswag_acc_norm"]
        ax.plot(steps, accuracy, color=run.color, lw=1.6, marker="o", ms=2.5)
        best = max(best, *accuracy)
    for name, y in OPENAI_HELLASWAG.items():
        if best > y - 0.05:  # a line far above every run would flatten them
            ax.axhline(y, color=GREY, ls=":", lw=1.2)
            ax.annotate(f"{name}: {y}", (0.01, y), (0, 3), ax.get_yaxis_transform(), "offset points", fontsize=8.5)
    fit_y(ax)
    for known in references:
        if known.hellaswag:
            low, high = zip(*known.hellaswag, strict=True)
            ax.fill_between(known.step, low, high, color=GREY, alpha=0.4, lw=0, zorder=0)


def draw_curve(ax, runs: list[Run], key: str) -> None:
    for run in runs:
        plot_noisy(ax, run, key)
    if key == "grad_norm":
        ax.set_yscale("log", subs=[2, 5])  # shows both a tenfold spike and the quiet rest
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    else:
        fit_y(ax)
        ax.set_ylim(bottom=0)
    if key == "tokens_per_second":
        ax.yaxis.set_major_formatter("{x:,.0f}")


def compared(folder: Path, run: Run) -> Reference:
    """The public runs that go behind a run: those of gpt2-124m where none has its preset, steps and tokens a step."""
    c = metrics_file.read_config(folder)
    known = find_reference(c.get("preset"), c.get("resolved_max_steps"), c.get("total_batch_size"))
    if c and not known:
        print0(f"warning: no public run has the preset, steps and tokens per step of {run.name}: gpt2-124m's are shown")
    return known or read_references()[0]


def draw(run_dirs: Sequence[str | Path], out: str | Path, reference: bool = False) -> Path:
    """Draw `run_dirs` into the image `out` (its suffix sets the format), on demand with the public runs of their
    recipes (training/reference.py) behind them. Raises UserError."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    dirs = list(dict.fromkeys(Path(d).resolve() for d in run_dirs))
    require(dirs, "no run folder given; give one or more: python plots.py log/quickstart")
    runs = [
        Run(printable("/".join(d.parts[-2:])), COLORS[i % len(COLORS)], read_metrics(d)) for i, d in enumerate(dirs)
    ]
    sizes = [metrics_file.tokens_per_step(d) for d in dirs]
    references = list(dict.fromkeys(map(compared, dirs, runs))) if reference else []
    x_label = f"step ({sizes[0]:,} tokens each)" if sizes[0] and len(set(sizes)) == 1 else "step"
    shown = {title: [r for r in runs if any(key in r.metrics for key in keys)] for title, (keys, _) in PANELS.items()}
    require(any(shown.values()), f"{dirs[0]}/metrics.jsonl has nothing to draw, such as train_loss")
    rows = [[title for title in row if shown[title]] for row in ROWS]
    rows = [np.repeat(row, 6 // len(row)) for row in rows if row]  # the panels of a row share six columns
    heights = [5.2 if "Loss" in row else 3.4 for row in rows]  # inches
    figure = Figure(figsize=(12, sum(heights) + 0.4), dpi=110, layout="constrained")  # pyplot's would need a display
    last = max(steps[-1] for run in runs for steps, _ in run.metrics.values())
    for title, ax in figure.subplot_mosaic(rows, height_ratios=heights).items():
        (key, *_), y_label = PANELS[title]
        ticks = 8 if [title] in ROWS else 5
        ax.set_xlim(0, max(1, last) * 1.01)
        if title == "Loss":
            draw_loss(ax, shown[title], references)
        elif title == "HellaSwag":
            draw_hellaswag(ax, shown[title], references)
        else:
            draw_curve(ax, shown[title], key)
        ax.set(title=title, xlabel=x_label, ylabel=y_label)
        ax.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, steps=[1, 2, 2.5, 5, 10]))
        ax.xaxis.set_major_formatter("{x:,.0f}")
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(out) as f:
            figure.savefig(f, format=out.suffix[1:] or "png")
    except ValueError as e:
        raise UserError(f"cannot write the image {out}: {e}; choose another, such as --out curves.png") from None
    return out


def main(
    run_dirs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    reference: bool = False,
    out: Path | None = None,
    tensorboard: bool = False,
):
    """Draw the curves of runs.

    Args:
        run_dirs: run folders (--out-dir of train_gpt2.py, or a log folder of build-nanogpt or llm.c); several are
            overlaid.
        reference: draw the band of public runs of the same recipe behind the curves.
        out: the image; default: RUN_DIR/curves.png for one run, curves.png here for several.
        tensorboard: draw nothing, but write RUN_DIR/tensorboard of each.
    """
    if tensorboard:
        for folder in run_dirs:
            print0(f"wrote {to_tensorboard(folder)}; to see it: tensorboard --logdir {folder}")
        return
    folder = run_dirs[0] if len(run_dirs) == 1 else Path()
    print0(f"wrote {draw(run_dirs, out or folder / 'curves.png', reference)}")


if __name__ == "__main__":
    run_cli(lambda: tyro.cli(main, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
