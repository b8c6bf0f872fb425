"""The picture of one or more runs: loss, learning rate, gradient norm, HellaSwag, speed.

    python plots.py log/quickstart                       # writes log/quickstart/curves.png
    python plots.py log/gpt2-124m --reference            # with public runs of this recipe behind the curves
    python plots.py log/a log/b --out compare.png        # overlaid; without --out: curves.png in the current folder
    python plots.py log/quickstart --tensorboard         # the same curves as log/quickstart/tensorboard

Reads metrics.jsonl and config.json of each run's folder, or else build-nanogpt's log.txt, llm.c's main.log, or what a
console showed; works while a run is still writing, without a display, and without importing torch. plots.ipynb calls
read_curves and draw.
"""

import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from system.cli import (  # before all packages: it says what this Python lacks
    explain_errors,
    print0,
    printable,
    require,
    run_cli,
)

# isort: split
import numpy as np
import tyro

from lifecycle import metrics
from lifecycle.reference import DATASETS, Reference, find_reference, read_references
from system.files import atomic_write
from system.usage import optional
from weights.names import describe_nearby, describe_runs

# The curves of a run, by metrics key: (steps (N,) int64, values (N,) float64), steps ascending.
Curves = dict[str, tuple[np.ndarray, np.ndarray]]

# OpenAI's GPT-2 124M, drawn as a horizontal line: its loss on FineWeb-Edu's val shard (from build-nanogpt's notebook),
# and its acc_norm in completion style.
OPENAI_124M = {"Loss": 3.2924, "HellaSwag": 0.2955}

# What other logs call our metrics: log.txt of build-nanogpt, main.log of llm.c, modded-nanogpt, and consoles.
OTHER_LOG_KEYS = {
    "train": "train_loss", "val": "val_loss", "hella": "hellaswag_acc_norm",
    "trl": "train_loss", "tel": "val_loss", "eval": "hellaswag_acc_norm",
    "train_loss": "train_loss", "val_loss": "val_loss",
    "acc_norm": "hellaswag_acc_norm",
    "loss": "train_loss", "lr": "lr", "norm": "grad_norm", "tok/sec": "tokens_per_second",
}  # fmt: skip
NUMBER = r"(\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?|nan|inf)(?=\s)"
# build-nanogpt's console prints these lines before that of their step.
EVALUATION_LINES = {
    "val_loss": rf"validation loss: {NUMBER}",
    "hellaswag_acc_norm": rf"HellaSwag accuracy: \d+/\d+={NUMBER}",
}

COLUMNS = 6  # of the grid: divides by 1, 2 and 3 panels in a row
GREY = "#777777"  # of what belongs to no run
# Measured at few steps, so the points are marked. No line joins those of the val loss: beside a train loss that falls
# steeply between two of them, it would show a gap that is not there.
EVALUATIONS: dict[str, dict[str, Any]] = {
    "val_loss": {"marker": "o", "ms": 4.5, "mfc": "white", "ls": "none", "zorder": 3},
    "hellaswag_acc_norm": {"marker": "o", "ms": 3.5, "mfc": "white", "ls": "--", "lw": 1.1, "zorder": 3},
}
SMOOTHED_FROM = 200  # steps; the curves of shorter runs are drawn as they are
FAINT_STYLE: dict[str, Any] = {"alpha": 0.3, "lw": 0.7, "zorder": 1}
BOLD_WIDTH = 1.6  # of the last run, which lies on top
WIDEST = 2.8  # of the first of several runs, so that it can be seen behind another with the same curve
# What the legend calls the last values of a run.
LAST_VALUES = {"train_loss": "train", "val_loss": "val", "hellaswag_acc_norm": "HellaSwag"}


class PlottedRun(NamedTuple):
    """A run as it is drawn in every panel."""

    name: str
    color: Any
    width: float  # of its bold lines, in points
    curves: Curves


# ------------------------------------------------------------------------- reading


def find_log(run: Path) -> Path | None:
    """The file with what a run measured: in its folder, or `run` itself; None if there is none."""
    consoles = sorted(run.glob("*.log"), reverse=True)  # train.sh and others name them by the time: the newest first
    candidates = [run / "metrics.jsonl", run / "log.txt", run / "main.log", *consoles, run]
    for path in candidates:
        if path.is_file() and path.suffix in (".jsonl", ".txt", ".log"):
            return path
    return None


def read_curves(run: str | Path) -> Curves:
    """Curves of a run, by its folder or its log: {key: (steps (N,) int64, values (N,) float64)}, steps ascending, one
    value per step (the last); empty if there is no log. A line cut off by a crash, or still being written, is skipped.
    """
    path = find_log(Path(run))
    if path is None:
        return {}
    read = metrics.read_metrics if path.suffix == ".jsonl" else read_other_log

    # Several lines may have the same step. If a key has several values, the last one counts.
    values_by_step: dict[str, dict[int, float]] = {}
    for row in read(path):
        for key, value in row.items():
            # matplotlib cannot scale larger numbers.
            if key != "step" and isinstance(value, int | float) and not abs(value) >= 1e30:
                values_by_step.setdefault(key, {})[row["step"]] = float(value)

    curves = {}
    for key, values in values_by_step.items():
        steps = sorted(values)
        curves[key] = (np.array(steps), np.array([values[step] for step in steps]))
    return curves


def read_other_log(path: Path) -> Iterator[dict[str, Any]]:
    """Rows as in metrics.jsonl of another program's log, or of what it printed:

    build-nanogpt    250 val 5.9012
    its console      step   250 | loss: 5.901234 | lr 2.1e-04 | norm: 0.7012 | dt: 802.85ms | tok/sec: 653032.59
    llm.c            s:250 trl:5.90 lr:0.0002
    modded-nanogpt   step:250/4578 val_loss:5.9012 train_time:35500ms
    """
    before_step = {}
    with open(path, errors="replace") as f:
        for line in f:
            if not line.endswith("\n"):  # still being written
                return
            for key, pattern in EVALUATION_LINES.items():
                evaluation = re.match(pattern, line)
                if evaluation:
                    before_step[key] = float(evaluation[1])

            # A line begins with the step; what follows are names and numbers, with spaces or a colon between them.
            line = line.replace("val loss", "val_loss")  # of this project's console
            step = re.match(r"(?:s:|step[: ]\s*)?(\d{1,18})(?:/\d+)? ", line)
            if step:
                measured = re.findall(rf"\b([a-z_/]+)[ :]+{NUMBER}", line)
                values = {OTHER_LOG_KEYS[k]: float(v.replace(",", "")) for k, v in measured if k in OTHER_LOG_KEYS}
                if values:  # not in a line of a sample that begins with a number
                    yield {"step": int(step[1]), **before_step, **values}
                    before_step = {}


def read_runs(paths: Sequence[str | Path]) -> dict[Path, Curves]:
    """The curves of each of these runs, once. What is no run, as some of log/*, is left out, with a message. Raises
    UserError if nothing is left."""
    require(paths, "give the folder of a run: python plots.py log/quickstart")
    curves_by_run, others, fix = {}, [], ""
    for path in map(Path, paths):
        fix = describe_runs(path, "metrics.jsonl") or describe_nearby(path, "metrics.jsonl")
        require(path.exists(), f"there is no {path}; {fix}")
        curves = read_curves(path)
        if curves:
            curves_by_run[path.resolve()] = curves
        else:
            others.append(str(path))
    problem = f"no measured step in {', '.join(others)}"
    require(curves_by_run, f"{problem}; {fix}")
    if others:
        print0(f"skipped: {problem}")
    return curves_by_run


def folder_of(run: Path) -> Path:
    """Where the picture of a run belongs: in its folder, or beside its log."""
    return run if run.is_dir() else run.parent


def write_tensorboard(run: Path, curves: Curves) -> Path:
    """Write the curves of a run that had no --tracker to RUN_DIR/tensorboard, and return that folder. Raises
    UserError if the folder exists."""
    from torch.utils.tensorboard import SummaryWriter

    # TensorBoard would draw the points of a second file over those of the first.
    out = folder_of(run) / "tensorboard"
    require(not out.exists(), f"{out} already exists")
    with SummaryWriter(str(out)) as writer:
        for key, (steps, values) in curves.items():
            for step, value in zip(steps, values, strict=True):
                writer.add_scalar(key, value, step)
    return out


def choose_reference(run: Path) -> Reference | None:
    """The public runs drawn behind a run: those of its preset, steps and tokens per step, if there are any. The log of
    another trainer states none of these: it gets gpt2-124m's."""
    config = metrics.read_config(run)
    if not config:
        return read_references()[0]
    # The plain trainer has one recipe, gpt2-124m's.
    max_steps = config.get("resolved_max_steps", config.get("max_steps", 0))
    found = find_reference(config.get("preset", "gpt2-124m"), max_steps, config.get("total_batch_size", 0))
    if not found:
        print0(f"{run}: no public run has its preset, steps and tokens per step")
    return found


# ------------------------------------------------------------------------- drawing


def extremes(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and the highest value of each of 2,000 stretches of a curve: a picture cannot show more, and a million
    points would take minutes. (N,), (N,) -> (4000,), (4000,), or the curve itself if it is no longer than that."""
    if len(steps) <= 4000:
        return steps, values
    starts = np.linspace(0, len(steps), 2000, endpoint=False).astype(int)
    # fmin and fmax leave out NaN where there is a number.
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return steps[starts].repeat(2), np.stack([low, high], axis=1).ravel()


def smooth(steps: np.ndarray, values: np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the middle half of the values at most `reach` steps away, at each step or at 1,000 of them: smoother
    than a median, and as there a spike or a NaN leaves no trace. The first steps reach back only to the first one, and
    as far ahead: the curve begins at its value. (N,), (N,) -> (n,), (n,)."""
    centers = steps[np.unique(np.linspace(0, len(steps) - 1, 1000).astype(int))]
    reaches = np.minimum(reach, centers - steps[0])
    firsts = np.searchsorted(steps, centers - reaches)
    ends = np.searchsorted(steps, centers + reaches, side="right")
    means = []
    for first, end in zip(firsts, ends, strict=True):
        near = values[first:end]
        near = np.sort(near[~np.isnan(near)])
        cut = (len(near) + 1) // 4  # on each side; of three, the median is left
        means.append(near[cut : len(near) - cut].mean() if len(near) else np.nan)
    return centers, np.array(means)


def plot_curve(ax, run: PlottedRun, key: str, reach: int) -> None:
    """Draw a curve; one with a value at every step faintly and, over it, smoothed. reach: see `smooth`; 0: the curve
    alone."""
    steps, values = run.curves[key]
    if key in EVALUATIONS:
        # Of several runs, the markers of the first stand out behind the others, as its line does.
        ax.plot(steps, values, color=run.color, **EVALUATIONS[key] | {"ms": 2 + 1.5 * run.width})
    elif key == "lr" or reach == 0:  # a learning rate has no noise
        ax.plot(*extremes(steps, values), color=run.color, lw=run.width)
    else:
        ax.plot(*extremes(steps, values), color=run.color, **FAINT_STYLE)
        ax.plot(*smooth(steps, values, reach), color=run.color, lw=run.width)


def drawn_points(lines: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of all points of these lines that are numbers, (N,) each."""
    x, y = np.hstack([np.asarray(line.get_data(), float) for line in lines])
    is_number = np.isfinite(y)
    return x[is_number], y[is_number]


def fit_to_curves(ax) -> None:
    """Fit y to the curves, except for the highest 0.5% of the points and, of a long run, the highs of the first
    twentieth of its steps, which would squash the rest."""
    x, y = drawn_points(ax.lines)
    last_step = ax.get_xlim()[1]
    late = y[x >= 0.05 * last_step] if last_step > 200 else y
    if len(late):
        low, high = y.min(), np.quantile(late, 0.995)
        padding = max(0.06 * (high - low), 0.01 * abs(high), 1e-9)  # also around a curve that is constant
        ax.set_ylim(low - padding, high + padding)


def fit_loss(ax) -> None:
    """Losses that all go to 0 are on a log scale, where one sees how far they have come."""
    lowest: dict[Any, float] = {}
    for line in ax.lines:
        _, y = drawn_points([line])
        positive = y[y > 0]
        if len(positive):
            color = line.get_color()
            lowest[color] = min(lowest.get(color, math.inf), positive.min())
    if lowest and max(lowest.values()) < 0.1:
        use_log_scale(ax)
    else:
        fit_to_curves(ax)


def fit_from_zero(ax) -> None:
    """A rate is compared by its distance from 0."""
    fit_to_curves(ax)
    ax.set_ylim(bottom=0)


def fit_speed(ax) -> None:
    """A rate, too, in large numbers."""
    fit_from_zero(ax)
    ax.yaxis.set_major_formatter("{x:,.10g}")


def use_log_scale(ax) -> None:
    """A log scale shows both a tenfold spike and the quiet rest."""
    _, y = drawn_points(ax.lines)
    ax.set_yscale("log", subs=[2, 5])
    ax.yaxis.set_major_formatter("{x:g}")
    if len(y) and y.max() < 1000 * y.min():  # with more powers of ten, their own labels are enough
        ax.yaxis.set_minor_formatter("{x:g}")
        ax.set_ylim(y[y > 0].min() / 1.2, y.max() * 1.2)
    else:
        ax.yaxis.set_minor_formatter("")


NORM = "Gradient norm before clipping"
LOSS_END = "Loss, last third"  # beside the losses of several runs, which differ there by little


class Panel(NamedTuple):
    """A panel of the figure. It is drawn if a run has one of its metrics."""

    title: str
    y_label: str
    metrics: tuple[str, ...]
    fit: Callable[[Any], None]  # sets the y axis of the axes with all curves in them
    is_wide: bool = False  # in a row of its own, with a legend


PANELS = [
    Panel("Loss", "cross-entropy (nats per token)", ("val_loss", "train_loss"), fit_loss, is_wide=True),
    Panel("HellaSwag", "accuracy (acc_norm)", ("hellaswag_acc_norm",), fit_to_curves, is_wide=True),
    Panel("Learning rate", "learning rate (peak: --max-lr)", ("lr",), fit_from_zero),
    Panel(NORM, "global L2 norm (log scale)", ("grad_norm",), use_log_scale),
    Panel("Speed", "tokens per second", ("tokens_per_second",), fit_speed),
]


def draw_reference(ax, title: str, reference: Reference) -> None:
    """The range of the public runs as far as the x axis goes: of losses the healthy one, with its margin."""
    visible = (reference.step > 0) & (reference.step <= ax.get_xlim()[1])
    steps = reference.step[visible]
    if title == "Loss":
        low, high = np.array([reference.expected_range(step) for step in steps]).reshape(-1, 2).T
    else:
        low, high = reference.hellaswag_low[visible], reference.hellaswag_high[visible]
    data = DATASETS[reference.preset]
    label = f"{reference.preset}, {reference.max_steps:,} steps on {data}: public runs ({reference.runs})"
    ax.fill_between(steps, low, high, fc=GREY, ec="black", alpha=0.4, lw=0.8, zorder=1.5, label=label)
    bottom, top = ax.get_ylim()
    ax.set_ylim(np.nanmin([bottom, *low]), np.nanmax([top, *high]))


def style_lines(keys: set[str], color: Any, reach: int) -> list[Any]:
    """Entries of the legend for lines and markers. `keys`: the metrics of the panel that were measured."""
    from matplotlib.lines import Line2D

    lines = []
    if "train_loss" in keys and reach == 0:
        lines.append(Line2D([], [], color=color, label="train", lw=BOLD_WIDTH))
    elif "train_loss" in keys:
        lines.append(Line2D([], [], color=color, label="train, each step", **FAINT_STYLE))
        lines.append(Line2D([], [], color=color, label=f"train, smoothed over {2 * reach + 1:,} steps", lw=BOLD_WIDTH))
    if "val_loss" in keys:
        lines.append(Line2D([], [], color=color, label="val", **EVALUATIONS["val_loss"]))
    return lines


def style_axes(ax, title: str, ticks: int) -> None:
    """What all panels have in common. ticks: of the steps, where 1,000,000 takes room."""
    ax.set(title=title, xlabel="step")
    ax.xaxis.set_major_formatter("{x:,.10g}")
    ax.locator_params(axis="x", nbins=ticks)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def draw_panel(ax, panel: Panel, runs: list[PlottedRun], references: list[Reference], reach: int) -> None:
    """The curves of one panel, and the figures of others beside them."""
    drawn = set()
    for run in runs:
        for key in panel.metrics:
            if key in run.curves:
                plot_curve(ax, run, key, reach)
                drawn.add(key)
    panel.fit(ax)

    if panel.title in OPENAI_124M:
        for reference in references:
            draw_reference(ax, panel.title, reference)
        # With a loss on other data, a line would mean nothing.
        if references or panel.title == "HellaSwag":
            level = OPENAI_124M[panel.title]
            ax.axhline(level, color=GREY, ls=":", lw=1.2, label=f"OpenAI GPT-2 124M: {level}")
            ax.set_ylim(top=max(ax.get_ylim()[1], level * 1.01))
    if panel.is_wide:
        others, _ = ax.get_legend_handles_labels()
        color = runs[0].color if len(runs) == 1 else "black"
        ax.legend(handles=style_lines(drawn, color, reach) + others, fontsize=9)
    style_axes(ax, panel.title, ticks=9 if panel.is_wide else 4)
    ax.set_ylabel(panel.y_label)
    if ax.get_yscale() == "log" and "log" not in panel.y_label:
        ax.set_ylabel(f"{panel.y_label}, log scale")


def draw_loss_end(ax, runs: list[PlottedRun], last_step: int, reach: int) -> None:
    """The losses of the last third of the steps, on a scale of their own."""
    for run in runs:
        for key in {"val_loss", "train_loss"} & run.curves.keys():
            plot_curve(ax, run, key, reach)
    x, y = drawn_points([line for line in ax.lines if line.get_alpha() is None])  # not the faint ones
    y = y[x >= 2 / 3 * last_step]
    if len(y):
        padding = max(0.05 * (y.max() - y.min()), 1e-3)
        ax.set_ylim(y.min() - padding, y.max() + padding)
    ax.set_xlim(2 / 3 * last_step, 1.01 * last_step)
    style_axes(ax, LOSS_END, ticks=4)


def describe_run(run: PlottedRun, reach: int) -> str:
    """The name of a run and the ends of its lines, as they are drawn: "quickstart: train 5.537, val 5.601, step 80"."""
    ends = []
    last_step = max(steps[-1] for steps, _ in run.curves.values())
    for key, word in LAST_VALUES.items():
        if key in run.curves:
            steps, values = run.curves[key]
            if key not in EVALUATIONS and reach:
                steps, values = smooth(steps, values, reach)
                word += " (smoothed)"
            is_earlier = key in EVALUATIONS and steps[-1] < last_step - 1
            ends.append(f"{word} {values[-1]:#.4g}" + (f" at step {steps[-1]:,}" if is_earlier else ""))
    return f"{run.name}: {', '.join([*ends, f'step {last_step:,}'])}"


def run_colors(count: int) -> list[Any]:
    """Ten colors that are easy to tell apart, or as many as needed of a rainbow."""
    from matplotlib import colormaps

    if count <= 10:
        return [colormaps["tab10"](i) for i in range(count)]
    return [colormaps["turbo"](i / (count - 1)) for i in range(count)]


def shortest_names(runs: list[Path]) -> list[str]:
    """For each path as much of its end as no other path has: "a" and "b" of log/a and log/b, "m1/log/a" and "m2/log/a"
    of the same run of two machines."""
    names = []
    for run in runs:
        length = 1
        while sum(other.parts[-length:] == run.parts[-length:] for other in runs) > 1:
            length += 1
        # What no terminal could print: control codes, and bytes that are not UTF-8.
        name = "/".join(run.parts[-length:]).encode(errors="replace").decode()
        names.append(printable(name))
    return names


def drawable_names(figure, names: list[str]) -> list[str]:
    """The names; a number for each that has characters which matplotlib's font lacks, as DejaVu lacks Chinese ones."""
    drawable, numbered = [], []
    for number, name in enumerate(names, start=1):
        with warnings.catch_warnings(record=True) as missing_glyphs:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            text = figure.text(0, 0, name)
            text.get_window_extent()
            text.remove()
        if missing_glyphs:
            numbered.append(f"run {number} is {name}")
            name = f"run {number}"
        drawable.append(name)
    if numbered:
        fix = "font.family in a matplotlibrc names another"
        print0(f"warning: the font of the picture lacks characters of these names ({fix}): {', '.join(numbered)}")
    return drawable


def arrange(panels: list[Panel], has_loss_end: bool) -> list[list[str]]:
    """The titles of the panels by row and column: a row for each wide panel and one for the rest, which share its
    COLUMNS evenly. has_loss_end: beside the loss, its end takes a third of the row."""
    rows = [[panel.title] for panel in panels if panel.is_wide]
    if has_loss_end and rows[0] == ["Loss"]:
        rows[0] = ["Loss", "Loss", LOSS_END]
    narrow = [panel.title for panel in panels if not panel.is_wide]
    if narrow:
        rows.append(narrow)
    return [np.repeat(row, COLUMNS // len(row)).tolist() for row in rows]


def draw(runs: Sequence[str | Path], out: str | Path, reference: bool = False) -> Path:
    """Draw runs into one image.

    Args:
        runs: their folders, or logs; the same twice is one run.
        out: the image, whose suffix sets the format, or its folder.
        reference: draw the public runs of their recipes (lifecycle/reference.py) behind them.

    Returns the image's path. Raises UserError if there is nothing to draw, or the image cannot be written.
    """
    import matplotlib

    fix = "choose another, such as --out curves.png"
    # Names are no formulas, whatever they contain; so no other text is one, and none needs LaTeX.
    no_formulas: dict[Any, Any] = {"text.usetex": False, "text.parse_math": False, "axes.formatter.use_mathtext": False}
    with matplotlib.rc_context(no_formulas):
        figure = draw_figure(read_runs(runs), reference)
        with explain_errors(f"cannot write the image {out}", fix):
            out = Path(out)
            if out.is_dir():
                out = out / "curves.png"
            # The image replaces what is there: /dev/null, too, for root.
            require(out.is_file() or not out.exists(), f"it is not a file; {fix}")
            out.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(out) as f:
                figure.savefig(f, format=out.suffix[1:] or "png")
    return out


def draw_figure(curves_by_run: dict[Path, Curves], reference: bool):
    """The Figure of these runs."""
    from matplotlib.figure import Figure  # pyplot's would need a display
    from matplotlib.lines import Line2D

    measured = {key for curves in curves_by_run.values() for key in curves}
    panels = [panel for panel in PANELS if measured.intersection(panel.metrics)]
    require(panels, f"nothing of what was measured has a panel here: {', '.join(sorted(measured))}")
    last_steps = [max(int(steps[-1]) for steps, _ in curves.values()) for curves in curves_by_run.values()]
    last_step = max(last_steps)
    at_end = [step for step in last_steps if step > max(10, 2 / 3 * last_step)]
    grid: list[Any] = arrange(panels, has_loss_end=len(at_end) > 1)
    heights = [5.2 if "Loss" in row else 3.4 for row in grid]  # inches
    figure = Figure(layout="constrained", dpi=110)

    # How many steps to each side smoothing covers: runs of different lengths are smoothed alike.
    reach = last_step // 80 if last_step > SMOOTHED_FROM else 0

    references = []
    if reference:
        found = dict.fromkeys(choose_reference(path) for path in curves_by_run)
        references = [reference for reference in found if reference]
    names = drawable_names(figure, shortest_names(list(curves_by_run)))
    widths = np.linspace(WIDEST, BOLD_WIDTH, len(names)) if len(names) > 1 else [BOLD_WIDTH]
    looks = zip(names, run_colors(len(names)), widths, curves_by_run.values(), strict=True)
    runs = [PlottedRun(*look) for look in looks]

    axes = figure.subplot_mosaic(grid, height_ratios=heights)
    for panel in panels:
        axes[panel.title].set_xlim(0, max(1, last_step) * 1.01)
        draw_panel(axes[panel.title], panel, runs, references, reach)
    if LOSS_END in axes:
        draw_loss_end(axes[LOSS_END], runs, last_step, reach)

    clips = {metrics.read_config(folder_of(path)).get("grad_clip") for path in curves_by_run}
    if NORM in axes and len(clips) == 1 and (clip := clips.pop()):
        axes[NORM].axhline(clip, color=GREY, ls=":", lw=1.2, label=f"--grad-clip {clip:g}")
        axes[NORM].legend(fontsize=9)

    # The run as a title, or one legend of the runs, above the panels, for which the figure grows.
    labels = [describe_run(run, reach) for run in runs]
    print0("\n".join(labels))
    if len(runs) == 1:
        figure.suptitle(labels[0])
        figure.set_size_inches(12, sum(heights) + 0.5)
        return figure
    lines = [Line2D([], [], color=run.color, lw=1.5 * run.width) for run in runs]
    columns = 2 if max(map(len, labels)) < 80 else 1
    figure.legend(lines, labels, fontsize=9, ncols=columns, loc="outside upper center", frameon=False)
    rows = math.ceil(len(runs) / columns)
    figure.set_size_inches(12, sum(heights) + 0.5 + 0.2 * rows)
    return figure


# ------------------------------------------------------------------------- command line


def main(
    runs: Annotated[tyro.conf.Positional[tuple[Path, ...]], optional("RUN [RUN ...]")],
    reference: bool = False,
    out: Annotated[Path | None, optional("IMAGE")] = None,
    tensorboard: bool = False,
):
    """Draw the curves of runs.

    Args:
        runs: run folders (--out-dir of train_gpt2.py, or a log folder of build-nanogpt or llm.c), or logs, also what a
            console showed; several are overlaid.
        reference: draw the band of public runs of the same recipe behind the curves of a run from scratch.
        out: the image; default: RUN_DIR/curves.png for one run, curves.png here for several.
        tensorboard: draw nothing, but write RUN_DIR/tensorboard of each.
    """
    # The image goes to a file. matplotlib refuses to be imported with a backend that it does not know.
    os.environ["MPLBACKEND"] = "agg"
    if tensorboard:
        for run, curves in read_runs(runs).items():
            folder = write_tensorboard(run, curves)
            print0(f"wrote {folder}; to see it: tensorboard --logdir {folder.parent}")
        return

    # The picture of one run belongs to its folder; one of several runs belongs to none of theirs.
    folder = folder_of(runs[0]) if len(runs) == 1 else Path()
    print0(f"wrote {draw(runs, out or folder / 'curves.png', reference)}")


if __name__ == "__main__":
    run_cli(lambda: tyro.cli(main, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)))
