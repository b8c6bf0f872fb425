"""The picture of one or more runs: loss, learning rate, gradient norm, HellaSwag, speed.

    python plots.py log/quickstart                       # writes log/quickstart/curves.png
    python plots.py log/gpt2-124m --reference            # with public runs of this recipe behind the curves
    python plots.py log/a log/b --out compare.png        # overlaid; without --out: curves.png in the current folder
    python plots.py --reference                          # the public runs alone: public-runs.png
    python plots.py log/quickstart --tensorboard         # the same curves as log/quickstart/tensorboard

Reads OUT/metrics.jsonl and OUT/config.json of each run, or else build-nanogpt's log.txt or llm.c's main.log; works
while a run is still writing, without a display, and without importing torch. If the runs have different numbers of
tokens per step, the x axis counts tokens. plots.ipynb calls read_curves and draw; docs/ has the picture of the public
runs.
"""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro

from system.cli import UserError, print0, printable, require, run_cli
from system.files import atomic_write
from training import metrics
from training.reference import (
    DATASETS,
    TOKENS_PER_STEP,
    Reference,
    difference_in_data,
    difference_in_start,
    find_reference,
    find_shard_name,
    read_references,
)

# The curves of a run, by metrics key: (steps (N,) int64, values (N,) float64), steps ascending.
Curves = dict[str, tuple[np.ndarray, np.ndarray]]

# Figures of OpenAI's models, drawn as horizontal lines.
OPENAI_HELLASWAG = {"OpenAI GPT-2 124M": 0.2955, "OpenAI GPT-2 1558M": 0.4893}  # acc_norm, completion style
OPENAI_VAL_LOSS = 3.2924  # OpenAI's 124M on FineWeb-Edu's val shard, from build-nanogpt's notebook

# Logs that a run folder may have: this project's, build-nanogpt's and llm.c's. The first one that exists is read.
METRICS_FILE = "metrics.jsonl"
LOG_FILES = (METRICS_FILE, "log.txt", "main.log")
# What build-nanogpt (first line) and llm.c (second line) call our metrics.
OTHER_LOG_KEYS = {
    "train": "train_loss", "val": "val_loss", "hella": "hellaswag_acc_norm",
    "trl": "train_loss", "tel": "val_loss", "eval": "hellaswag_acc_norm", "lr": "lr", "norm": "grad_norm",
}  # fmt: skip

# The panels by title: the metrics of which a panel shows at least one, and the label of its y axis.
PANELS = {
    "Loss": (("val_loss", "train_loss"), "cross-entropy (nats per token)"),
    "HellaSwag": (("hellaswag_acc_norm",), "accuracy (acc_norm)"),
    "Learning rate": (("lr",), "learning rate"),
    "Gradient norm before clipping": (("grad_norm",), "global L2 norm (log scale)"),
    "Speed": (("tokens_per_second",), "tokens per second"),
}
PANEL_ROWS = [["Loss"], ["HellaSwag"], ["Learning rate", "Gradient norm before clipping", "Speed"]]
COLUMNS = 6  # of the grid: divides by 1, 2 and 3 panels in a row

# One color for each run, and grey for what belongs to no run.
COLORS = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2"]
GREY = "#777777"
# Validation is measured at few steps, so its points are marked.
VAL_STYLE = {"marker": "o", "ms": 3.5, "mfc": "white", "ls": "--", "lw": 1.1}


class PlottedRun(NamedTuple):
    """A run as it is drawn in every panel."""

    name: str
    color: str
    curves: Curves
    step_size: int = 1  # how much of the x axis a step is: 1, or its tokens

    def points(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """x and y of a curve, each (N,)."""
        steps, values = self.curves[key]
        return steps * self.step_size, values


# ------------------------------------------------------------------------- reading


def read_curves(run_dir: str | Path) -> Curves:
    """Curves of a run: {key: (steps (N,) int64, values (N,) float64)}, steps ascending, one value per step (the last).
    A line cut off by a crash, or still being written, is skipped. Raises UserError if there is nothing to read."""
    # The log that is there, line by line.
    found = [path for name in LOG_FILES if (path := Path(run_dir) / name).is_file()]
    fix = "give the --out-dir of a run, or start one: python train_gpt2.py quickstart"
    require(found, f"no {Path(run_dir) / METRICS_FILE}; {fix}")
    path = found[0]
    rows = metrics.read_metrics(path) if path.name == METRICS_FILE else read_other_log(path)

    # Several lines may have the same step: merge them. If a key has several values, the last one counts.
    values_by_step: dict[str, dict[int, float]] = {}
    for row in rows:
        for key, value in row.items():
            if key != "step" and isinstance(value, int | float):
                values_by_step.setdefault(key, {})[row["step"]] = float(value)
    fix = "wait for the first one, or check the end of the run's log"
    require(values_by_step, f"{path} has no measured step yet; {fix}")

    # Arrays, in the order of the steps.
    curves = {}
    for key, values in values_by_step.items():
        steps = sorted(values)
        curves[key] = (np.array(steps), np.array([values[step] for step in steps]))
    return curves


def read_other_log(path: Path) -> Iterator[dict[str, float]]:
    """Rows as in metrics.jsonl of a log of build-nanogpt ("250 val 5.9012") or llm.c ("s:250 trl:5.90 lr:0.0002")."""
    # Both begin a line with the step; what follows are names and numbers, with a space or a colon between them.
    for line in path.read_text(errors="replace").splitlines(keepends=True):
        step = re.match(r"(?:s:)?(\d{1,18}) ", line)
        is_complete = line.endswith("\n")  # otherwise the line is still being written
        if step and is_complete:
            measured = re.findall(r"\b([a-z]+)[ :](\d+\.\d+|nan|inf)(?=\s)", line)
            values = {OTHER_LOG_KEYS[key]: float(value) for key, value in measured if key in OTHER_LOG_KEYS}
            yield {"step": int(step[1]), **values}


def write_tensorboard(run_dir: Path) -> Path:
    """Write the curves of a run that had no --tracker to RUN_DIR/tensorboard, and return that folder. Raises
    UserError if the folder exists."""
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard would draw the points of a second file over those of the first.
    out = run_dir / "tensorboard"
    curves = read_curves(run_dir)
    require(not out.exists(), f"{out} already exists; to see it: tensorboard --logdir {shlex.quote(str(run_dir))}")

    # The same tags as those of a run with --tracker tensorboard.
    with SummaryWriter(str(out)) as writer:
        for key, (steps, values) in curves.items():
            for step, value in zip(steps.tolist(), values.tolist(), strict=True):
                writer.add_scalar(metrics.tensorboard_tag(key), value, step)
    return out


# ------------------------------------------------------------------------- drawing one panel


def moving_median(values: np.ndarray, window: int) -> np.ndarray:
    """Median of the `window` (odd) points around each point, fewer at the ends: a spike or a NaN leaves no trace.
    (N,) -> (N,)."""
    # NaNs count for nothing: infinities, and what lies before the first point and after the last one, become NaN.
    finite = np.where(np.isfinite(values), values, np.nan)
    padded = np.pad(finite, window // 2, constant_values=np.nan)  # (N + window - 1,)
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)  # (N, window)
    with warnings.catch_warnings(action="ignore"):  # a window of only NaNs stays NaN
        return np.nanmedian(windows, axis=1)


def plot_noisy_curve(ax, run: PlottedRun, key: str) -> None:
    """Draw a curve with a value at every step faintly and, over it, its moving median over a fortieth of the run."""
    x, values = run.points(key)
    # The learning rate has no noise, so its median is of one point: itself.
    window = 1 if key == "lr" else 2 * (len(values) // 80) + 1
    ax.plot(x, values, color=run.color, alpha=0.2, lw=0.7, zorder=1)
    ax.plot(x, moving_median(values, window), color=run.color, lw=1.6)


def fit_y_axis(ax) -> None:
    """Fit y to the curves, except for the highs of the first steps and rare spikes, which would squash the rest."""
    # The range of all curves of the panel.
    low, high = np.inf, -np.inf
    for line in ax.lines:
        x, y = np.asarray(line.get_data(), float)
        # The highest value is taken after the first twentieth of the steps, without the highest 0.5% of the points.
        late = y[np.isfinite(y) & (x >= 0.05 * x.max(initial=0))]
        if len(late):
            low = min(low, np.nanmin(y))
            high = max(high, np.quantile(late, 0.995))

    # A little room above and below, also around a curve that is constant. Without any finite value, leave y as it is.
    if low <= high:
        padding = max(0.06 * (high - low), 0.01 * abs(high), 1e-9)
        ax.set_ylim(low - padding, high + padding)


def draw_loss(ax, runs: list[PlottedRun], references: list[Reference], reference_step_size: int) -> None:
    """The panel of train and validation losses, with a legend for the whole picture."""
    # The curves, and a legend entry for each run with its last loss.
    for run in runs:
        if "train_loss" in run.curves:
            plot_noisy_curve(ax, run, "train_loss")
        if "val_loss" in run.curves:
            ax.plot(*run.points("val_loss"), color=run.color, zorder=3, **VAL_STYLE)
        ax.plot([], [], color=run.color, lw=4, label=f"{run.name}: {describe_last_loss(run.curves)}")
    fit_y_axis(ax)

    # Legend entries that explain the styles of the lines.
    ax.plot([], [], color=GREY, lw=1.6, label="train (moving median)")
    ax.plot([], [], color=GREY, label="validation", **VAL_STYLE)

    # The range of healthy losses, as far as the runs have come.
    for reference in references:
        steps = [step for step in reference.step if 0 < step * reference_step_size <= ax.get_xlim()[1]]
        if steps:
            low, high = zip(*map(reference.expected_range, steps), strict=True)
            runs_of = "1 public run of" if reference.runs == 1 else f"{reference.runs} public runs of"
            label = f"{runs_of} {reference.preset}, {reference.max_steps:,} steps, with a margin"
            x = np.array(steps) * reference_step_size
            ax.fill_between(x, low, high, fc=GREY, ec="black", alpha=0.4, lw=0.8, zorder=1.5, label=label)
            ax.set_ylim(bottom=min(ax.get_ylim()[0], *low))

    # OpenAI's loss was measured on the data of gpt2-124m. Draw it as a line once the runs come near it.
    is_same_data = any(reference.preset == "gpt2-124m" for reference in references)
    if is_same_data and ax.get_ylim()[0] < OPENAI_VAL_LOSS:
        label = f"OpenAI GPT-2 124M on FineWeb-Edu: {OPENAI_VAL_LOSS}"
        ax.axhline(OPENAI_VAL_LOSS, color=GREY, ls=":", lw=1.2, label=label)
    ax.legend(loc="upper right", fontsize=9)


def describe_last_loss(curves: Curves) -> str:
    """The last validation loss, or else train loss, of a run, such as "val 3.077, 1.234 bits per byte, at step 80"."""
    # "val 3.077"
    kind = "val" if "val_loss" in curves else "train"
    steps, losses = curves[f"{kind}_loss"]
    text = f"{kind} {losses[-1]:.3f}"

    # Bits per byte, if they were measured at the same step.
    if kind == "val" and "val_bpb" in curves and curves["val_bpb"][0][-1] == steps[-1]:
        text += f", {curves['val_bpb'][1][-1]:.3f} bits per byte,"
    return f"{text} at step {steps[-1]:,}"


def draw_hellaswag(ax, runs: list[PlottedRun], references: list[Reference], reference_step_size: int) -> None:
    """The panel of HellaSwag's acc_norm, with OpenAI's models as lines that the runs come near."""
    # The runs, and the best accuracy of any of them.
    best = 0.25  # of guessing among four endings
    for run in runs:
        x, accuracy = run.points("hellaswag_acc_norm")
        ax.plot(x, accuracy, color=run.color, lw=1.6, marker="o", ms=2.5)
        best = max(best, *accuracy)

    # OpenAI's models, with their names at the left end of the lines.
    for name, accuracy in OPENAI_HELLASWAG.items():
        if best > accuracy - 0.05:  # a line far above every run would flatten them
            draw_openai_hellaswag(ax, name)
    fit_y_axis(ax)

    # The accuracies of the public runs. They come last, so that a longer band does not change the range of y.
    for reference in references:
        if reference.hellaswag:
            low, high = zip(*reference.hellaswag, strict=True)
            x = np.array(reference.step) * reference_step_size
            ax.fill_between(x, low, high, color=GREY, alpha=0.4, lw=0, zorder=0)


def draw_openai_hellaswag(ax, name: str) -> None:
    """A horizontal line at the accuracy of one of OpenAI's models, with its name."""
    accuracy = OPENAI_HELLASWAG[name]
    ax.axhline(accuracy, color=GREY, ls=":", lw=1.2)
    text = f"{name}: {accuracy}"
    ax.annotate(text, (0.01, accuracy), (0, 3), ax.get_yaxis_transform(), "offset points", fontsize=8.5)


def draw_curve(ax, runs: list[PlottedRun], key: str) -> None:
    """The panel of any other metric."""
    for run in runs:
        plot_noisy_curve(ax, run, key)

    # Gradient norms are compared by their ratios; a learning rate or a speed by its distance from 0.
    if key == "grad_norm":
        ax.set_yscale("log", subs=[2, 5])  # shows both a tenfold spike and the quiet rest
        ax.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    else:
        fit_y_axis(ax)
        ax.set_ylim(bottom=0)
    if key == "tokens_per_second":
        ax.yaxis.set_major_formatter("{x:,.0f}")


# ------------------------------------------------------------------------- the whole picture


def choose_reference(run_dir: Path, run: PlottedRun) -> Reference | None:
    """The public runs drawn behind a run: those of its preset, steps and tokens per step, or else gpt2-124m's with a
    warning. None, with the reason printed, for a run that began from trained weights or trains on other data: by the
    same rule, a run prints no verdict."""
    # A log of another trainer has no config.
    config = metrics.read_config(run_dir)
    if not config:
        return read_references()[0]

    # The public runs of this recipe, or else of gpt2-124m.
    known = find_reference(config.get("preset"), config.get("resolved_max_steps"), config.get("total_batch_size"))
    reference = known or read_references()[0]

    # Behind a run with another beginning or other data, their losses would mislead.
    reason = difference_in_start(config.get("init_from", "scratch"))
    reason = reason or difference_in_data(reference.preset, find_shard_name(config.get("data_dir")))
    if reason:
        print0(f"no public runs are drawn behind {run.name}: {reason}")
        return None
    if not known:
        print0(f"warning: no public run has the preset, steps and tokens per step of {run.name}: gpt2-124m's are shown")
    return reference


def draw(run_dirs: Sequence[str | Path], out: str | Path, reference: bool = False) -> Path:
    """Draw runs into one image.

    Args:
        run_dirs: their folders; the same folder twice is one run. None with `reference`: the public runs alone.
        out: the image; its suffix sets the format.
        reference: draw the public runs of their recipes (training/reference.py) behind them.

    Returns `out`. Raises UserError if there is nothing to draw, or no image of this format can be written.
    """
    from matplotlib.figure import Figure

    # The runs, and the public runs behind them.
    if reference and not run_dirs:
        return draw_public_runs(Path(out))
    dirs = list(dict.fromkeys(Path(d).resolve() for d in run_dirs))
    require(dirs, "no run folder given; give one or more: python plots.py log/quickstart")
    runs = []
    for index, folder in enumerate(dirs):
        name = printable("/".join(folder.parts[-2:]))
        runs.append(PlottedRun(name, COLORS[index % len(COLORS)], read_curves(folder)))
    references = []
    if reference:
        chosen = dict.fromkeys(map(choose_reference, dirs, runs))  # each once, in the order of the runs
        references = [public_runs for public_runs in chosen if public_runs is not None]

    # The x axis of every panel: steps or, if the runs have steps of different sizes, tokens. Logs of other trainers do
    # not state the size.
    tokens_per_step = [metrics.tokens_per_step(folder) for folder in dirs]
    sizes = {*tokens_per_step, *(TOKENS_PER_STEP for _ in references)}
    over_tokens = len(sizes) > 1 and None not in sizes
    reference_step_size = 1
    x_label = "step"
    if over_tokens:
        x_label = "tokens"
        reference_step_size = TOKENS_PER_STEP
        runs = [run._replace(step_size=size) for run, size in zip(runs, tokens_per_step, strict=True)]
    elif len(sizes) == 1 and None not in sizes:
        x_label = f"step ({sizes.pop():,} tokens each)"
    # Where the longest run ends: the x axes of all panels do, too.
    last_x = max(steps[-1] * run.step_size for run in runs for steps, _ in run.curves.values())

    # The panels for which at least one run has data.
    runs_by_panel = {
        title: [run for run in runs if any(key in run.curves for key in keys)] for title, (keys, _) in PANELS.items()
    }
    require(any(runs_by_panel.values()), f"{dirs[0]}/metrics.jsonl has nothing to draw, such as train_loss")

    # The grid: rows without data are left out, and the panels of a row share its columns evenly.
    rows = [[title for title in row if runs_by_panel[title]] for row in PANEL_ROWS]
    grid = [np.repeat(row, COLUMNS // len(row)) for row in rows if row]
    heights = [5.2 if "Loss" in row else 3.4 for row in grid]  # inches
    figure = Figure(figsize=(12, sum(heights) + 0.4), dpi=110, layout="constrained")  # pyplot's would need a display

    # The panels.
    for title, ax in figure.subplot_mosaic(grid, height_ratios=heights).items():
        (key, *_), y_label = PANELS[title]
        ax.set_xlim(0, max(1, last_x) * 1.01)
        if title == "Loss":
            draw_loss(ax, runs_by_panel[title], references, reference_step_size)
        elif title == "HellaSwag":
            draw_hellaswag(ax, runs_by_panel[title], references, reference_step_size)
        else:
            draw_curve(ax, runs_by_panel[title], key)
        ax.set(title=title, xlabel=x_label, ylabel=y_label)
        format_axes(ax, is_wide=[title] in PANEL_ROWS, over_tokens=over_tokens)

    out = Path(out)
    save_figure(figure, out)
    return out


def draw_public_runs(out: Path) -> Path:
    """Draw the public runs of all presets (training/reference.csv) over tokens: the curves that a run of the preset
    should follow. Returns `out`. Raises UserError if no image of this format can be written."""
    from matplotlib.figure import Figure

    references = read_references()
    figure = Figure(figsize=(12, 5.6), dpi=110, layout="constrained")
    loss_ax, hellaswag_ax = figure.subplots(1, 2, width_ratios=(2, 1))

    # Val loss: the range of the runs, and its middle as a line. A second epoch has the color of the
    # first, and dashes.
    presets = list(dict.fromkeys(reference.preset for reference in references))
    for reference in references:
        color = COLORS[presets.index(reference.preset)]
        tokens = np.array(reference.step) * TOKENS_PER_STEP  # (evaluations,)
        low, high = np.array(reference.low), np.array(reference.high)
        style = "--" if reference.step[0] > 0 else "-"
        runs = "1 run" if reference.runs == 1 else f"{reference.runs} runs"
        label = f"{reference.preset}, {reference.max_steps:,} steps on {DATASETS[reference.preset]} ({runs})"
        last = f"{low[-1]:.3f}" if reference.runs == 1 else f"{low[-1]:.3f} to {high[-1]:.3f}"
        loss_ax.fill_between(tokens, low, high, color=color, alpha=0.3, lw=0)
        loss_ax.plot(tokens, (low + high) / 2, color=color, ls=style, lw=1.6, label=f"{label}: {last}")

        # HellaSwag, where it was published.
        if reference.hellaswag:
            accuracy = np.array(reference.hellaswag)  # (evaluations, 2)
            hellaswag_ax.plot(tokens, accuracy.mean(axis=1), color=color, ls=style, lw=1.6)

    # The first steps, from 11 down, would flatten the rest.
    loss_ax.set_ylim(2.95, 4.5)
    loss_ax.legend(loc="upper right", fontsize=9)
    loss_ax.set(title="Val loss of public runs", ylabel=PANELS["Loss"][1])
    draw_openai_hellaswag(hellaswag_ax, "OpenAI GPT-2 124M")
    hellaswag_ax.set(title="HellaSwag", ylabel=PANELS["HellaSwag"][1])
    for ax in (loss_ax, hellaswag_ax):
        ax.set(xlabel="tokens", xlim=(0, None))
        format_axes(ax, is_wide=ax is loss_ax, over_tokens=True)

    save_figure(figure, out)
    return out


def format_axes(ax, is_wide: bool, over_tokens: bool) -> None:
    """Round numbers of steps (10,000) or tokens (2.5B), more of them in a panel that has a row of its own; a faint
    grid; no frame at the top and the right."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(8 if is_wide else 5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(format_tokens if over_tokens else "{x:,.0f}")
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def format_tokens(tokens: float, position: int | None = None) -> str:
    """2.5B, 500M or 20k; matplotlib also passes the position of the tick."""
    for unit, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(tokens) >= unit:
            return f"{tokens / unit:g}{letter}"
    return f"{tokens:g}"


def save_figure(figure, out: Path) -> None:
    """Write the image, complete or not at all. Raises UserError for a format that matplotlib does not know."""
    # The suffix names the format; matplotlib raises ValueError for one that it cannot write.
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(out) as f:
            figure.savefig(f, format=out.suffix[1:] or "png")
    except ValueError as e:
        raise UserError(f"cannot write the image {out}: {e}; choose another, such as --out curves.png") from None


# ------------------------------------------------------------------------- command line


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
        reference: draw the band of public runs of the same recipe behind the curves of a run from scratch; without run
            folders, the public runs alone.
        out: the image; default: RUN_DIR/curves.png for one run, curves.png here for several.
        tensorboard: draw nothing, but write RUN_DIR/tensorboard of each.
    """
    if tensorboard:
        for folder in run_dirs:
            print0(f"wrote {write_tensorboard(folder)}; to see it: tensorboard --logdir {shlex.quote(str(folder))}")
        return

    # The picture of one run belongs to its folder; one of several runs belongs to none of theirs.
    default_folder = run_dirs[0] if len(run_dirs) == 1 else Path()
    default_name = "curves.png" if run_dirs else "public-runs.png"
    print0(f"wrote {draw(run_dirs, out or default_folder / default_name, reference)}")


if __name__ == "__main__":
    run_cli(lambda: tyro.cli(main, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
