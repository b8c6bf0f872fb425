"""plots.py draws what a run measured, also from the logs of other trainers and from broken files."""

import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, write_jsonl

import plots
from lifecycle.reference import read_references
from system.cli import UserError

REFERENCE = read_references()[0]  # gpt2-124m's


KEYS = ("val_loss", "train_loss", "lr", "grad_norm", "tokens_per_second", "hellaswag_acc_norm")


def write_run(folder, steps=300, shift=0.0, keys=KEYS, **config):
    """A run folder with smooth curves of these keys: evaluated every 50 steps, losses higher by `shift`."""
    rows = []
    for step in range(steps):
        loss = 3.5 + 7 * math.exp(-step / 300) + shift
        row = {"train_loss": loss, "lr": 6e-4, "grad_norm": 0.3 + 5 * math.exp(-step / 50), "tokens_per_second": 5e4}
        if step % 50 == 0:
            row |= {"val_loss": loss, "hellaswag_acc_norm": 0.25 + step / steps / 20}
        rows.append({"step": step, **{key: row[key] for key in keys if key in row}})
    folder.mkdir(parents=True)
    write_jsonl(folder / "metrics.jsonl", rows)
    (folder / "config.json").write_text(json.dumps({"preset": "quickstart", "total_batch_size": 524_288, **config}))
    return folder


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """figure(runs, reference=...) draws with plots.draw and returns the matplotlib Figure instead of the image. The
    image, which takes most of the time, is left to test_command_line."""
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: saved.append(figure))

    def draw(*runs, **kwargs):
        plots.draw(runs, tmp_path / "curves.png", **kwargs)
        return saved[-1]

    return draw


def find_panel(figure, title):
    """The axes of a figure that have this title."""
    return next(ax for ax in figure.axes if ax.get_title() == title)


def legend_texts(figure, title="Loss"):
    return [text.get_text() for text in find_panel(figure, title).get_legend().get_texts()]


def run_labels(figure):
    """The entries of the legend of the runs, or the title that one run is."""
    if not figure.legends:
        return [figure.get_suptitle()]
    return [text.get_text() for text in figure.legends[0].get_texts()]


# ------------------------------------------------------------------------- reading


def test_lines_of_a_step_merge_if_they_are_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val_loss": 10.9}\n{"step": 0, "train_loss": 10.8, "lr": 1e-5, "mfu": null}\n'
        '{"step": 2, "train_loss": 9.0}\n{"step": 1, "train_l\n{"step": 1, "train_loss": NaN}\n'
        '[1, 2]\n{"no_step": 1}\n{"step": 2, "train_loss": 8.5}\n{"step": 3, "train_loss": 8'
    )
    curves = plots.read_curves(tmp_path)
    assert set(curves) == {"val_loss", "train_loss", "lr"}
    steps, values = curves["train_loss"]
    assert steps.tolist() == [0, 1, 2] and steps.dtype == np.int64
    assert values[0] == 10.8 and np.isnan(values[1]) and values[2] == 8.5  # the later line of a step counts


# The same steps as each program logs them.
OTHER_LOGS = {
    "log.txt": "0 val 10.9500\n0 train 10.950123\n1 train 9.500000\n250 val 5.9000\n250 hella 0.2534\n251 train nan\n",
    "main.log": "s:0 tel:10.9500\ns:0 trl:10.9501 lr:0.000001 norm:15.37\ns:1 trl:9.5000 lr:0.000002 norm:2.00\n"
    "s:250 tel:5.9000\ns:250 eval:0.2534\ns:251 trl:nan lr:0.000500 norm:nan\n",
    # What build-nanogpt prints, after torchrun's warnings; two ranks write their samples into each other's lines.
    "2024-11-19-00-10-45.log": "W1119 00:10:50 967 torch/distributed/run.py:793] \nusing device: cuda\n"
    "validation loss: 10.9500\n"
    "step     0 | loss: 10.950100 | lr 1.0000e-06 | norm: 15.3700 | dt: 1760.61ms | tok/sec: 297788.49\n"
    "step     1 | loss: 9.500000 | lr 2.0000e-06 | norm: 2.0000 | dt: 802.85ms | tok/sec: 653032.59\n"
    "validation loss: 5.9000\nHellaSwag accuracy: 2545/10042=0.2534\n"
    "rank 1 sample 0: Hello, a model, step 3 | loss: 1.0rank 0 sample 1: Hello\n3 norms\n"
    "step   250 | loss: 5.950000 | lr 5.0000e-04 | norm: 0.7000 | dt: 19807.22ms | tok/sec: 26469.54\n"
    "step   251 | loss: nan | lr 5.0000e-04 | norm: nan | dt: 802.85ms | tok/sec: 653032.59\n",
    "ours.log": "step     0/19073 | val loss: 10.9500 | bits per byte: 3.5112\n"
    "step     0/19073 | loss: 10.950100 | lr 1.0000e-06 | norm: 15.3700 | dt: 176.61ms | tok/sec: 297,788\n"
    "step 1: val 5.310, reference 5.209 to 5.385: on track\n"
    "step     1/19073 | loss: 9.500000 | lr 2.0000e-06 | norm: 2.0000 | dt: 802.85ms | tok/sec: 653,033 | eta: 4h\n"
    "step   250/19073 | val loss: 5.9000 | bits per byte: 1.9130\n"
    "step   250/19073 | hellaswag acc 0.25 acc_norm 0.2534 n 9\n",
    "modded.log": "import torch\nstep:0/4578 val_loss:10.9500 train_time:241ms step_avg:nanms\n"
    "step:0/4578 train_loss:10.9501 train_time:355ms\nstep:1/4578 train_loss:9.5000 t:1ms\n"
    "step:250/4578 val_loss:5.9000 train_time:35500ms step_avg:142.00ms\n",
}


@pytest.mark.parametrize("name", OTHER_LOGS)
@pytest.mark.parametrize("as_folder", [True, False])
def test_logs_of_other_programs_are_read(tmp_path, name, as_folder):
    # A line that was written twice, and one that is still being written.
    first, last = OTHER_LOGS[name].splitlines()[0], OTHER_LOGS[name].splitlines()[-1]
    (tmp_path / name).write_text(f"{OTHER_LOGS[name]}{first}\n{last[:19]}")

    read = plots.read_curves(tmp_path if as_folder else tmp_path / name)

    curves = {key: [array.tolist() for array in curve] for key, curve in read.items()}
    steps, losses = curves["train_loss"]
    assert steps[:2] == [0, 1] and losses[:2] == pytest.approx([10.95, 9.5], abs=1e-3)
    assert curves["val_loss"] == [[0, 250], [10.95, 5.9]]
    if name != "modded.log":
        assert curves["hellaswag_acc_norm"] == [[250], [0.2534]]
    if name in ("log.txt", "main.log", "2024-11-19-00-10-45.log"):
        assert steps[-1] == 251 and np.isnan(losses[-1])
    if "lr" in curves:
        assert curves["lr"][1][:2] == [1e-6, 2e-6] and curves["grad_norm"][1][:2] == [15.37, 2.0]
    if "tokens_per_second" in curves:
        assert curves["tokens_per_second"][1][:2] == pytest.approx([297_788, 653_033], abs=1)


def test_the_newest_console_of_a_folder_is_read(tmp_path):
    for name, loss in (("2024-11-18-23-00-00.log", 4), ("2024-11-19-00-10-45.log", 3)):
        (tmp_path / name).write_text(f"step     0 | loss: {loss}.0 | norm: 1.0 | dt: 802.85ms\n")
    assert plots.read_curves(tmp_path)["train_loss"][1].tolist() == [3]


def test_a_finished_run_becomes_tensorboard_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "main.log").write_text(OTHER_LOGS["main.log"])
    plots.main((tmp_path,), tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    points = events.Scalars("loss/val_loss")  # the tag of --tracker tensorboard
    assert [(p.step, round(p.value, 4)) for p in points] == [(0, 10.95), (250, 5.9)]
    assert "run/grad_norm" in events.Tags()["scalars"] and not (tmp_path / "curves.png").exists()
    with pytest.raises(UserError, match="tensorboard already exists"):
        plots.main((tmp_path,), tensorboard=True)


def test_a_run_that_diverged_is_drawn(figure, tmp_path):
    """Whatever is left of its numbers, in the first step or in all."""
    for name, first in (("some", 1.5), ("none", math.nan)):
        rows = [{"step": i, **dict.fromkeys(KEYS, value)} for i, value in enumerate([first, 1e308, math.inf, math.nan])]
        run = write_run(tmp_path / name, total_batch_size="edited")
        figure(write_jsonl(run / "metrics.jsonl", rows).parent, reference=True).draw_without_rendering()


# ------------------------------------------------------------------------- drawing


def test_one_run(figure, tmp_path):
    fig = figure(write_run(tmp_path / "run"))
    titles = [ax.get_title() for ax in fig.axes]
    assert titles == ["Loss", "HellaSwag", "Learning rate", "Gradient norm before clipping", "Speed"]
    for ax in fig.axes:
        assert ax.get_ylabel() and ax.get_xlabel() == "step"
        assert ax.get_xlim()[1] == pytest.approx(299 * 1.01)
    val_loss, *last_train_losses = [3.5 + 7 * math.exp(-step / 300) for step in (250, 296, 297, 298, 299)]
    train_loss = np.mean(last_train_losses[1:3])  # the end of the bold line
    evaluations = f"val {val_loss:.3f} at step 250, HellaSwag 0.2917 at step 250"
    assert run_labels(fig) == [f"run: train (smoothed) {train_loss:.3f}, {evaluations}, step 299"]
    assert legend_texts(fig) == ["train, each step", "train, smoothed over 7 steps", "val"]
    assert any("GPT-2 124M: 0.2955" in text for text in legend_texts(fig, "HellaSwag"))
    assert not any("1558M" in text for text in legend_texts(fig, "HellaSwag"))  # it would flatten the curve
    assert find_panel(fig, "Gradient norm before clipping").get_yscale() == "log"


def test_a_short_run_is_drawn_as_it_is(figure, tmp_path):
    fig = figure(write_run(tmp_path / "run", 80))
    last_loss = 3.5 + 7 * math.exp(-79 / 300)
    assert run_labels(fig)[0].startswith(f"run: train {last_loss:.3f}, val 9.425 at step 50, ")
    assert legend_texts(fig) == ["train", "val"]
    # The losses of all steps are a line, those of val points alone.
    styles = {len(line.get_xdata()): line.get_linestyle() for line in find_panel(fig, "Loss").lines}
    assert styles == {80: "-", 2: "None"}


def test_a_spike_does_not_squash_the_rest(figure, tmp_path):
    run = write_run(tmp_path / "run", steps=3000)
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 1500, "train_loss": 1000}\n')
    loss = find_panel(figure(run), "Loss")
    low, high = loss.get_ylim()
    assert 3 < low < 3.5 and 4 < high < 9
    assert sorted(max(line.get_ydata()) > 11 for line in loss.lines) == [False, False, True]  # only the faint line


def test_the_first_losses_of_a_short_run_are_in_the_picture(figure, tmp_path):
    rows = [{"step": step, "train_loss": 6 + 5 * 0.5**step} for step in range(80)]
    (tmp_path / "run").mkdir()
    low, high = find_panel(figure(write_jsonl(tmp_path / "run" / "metrics.jsonl", rows).parent), "Loss").get_ylim()
    assert 5 < low < 6 and 10 < high < 12


def test_a_loss_that_goes_to_zero_is_on_a_log_scale(figure, tmp_path):
    losses = [*(10 * 0.5**i for i in range(20)), 0.0, 1e-6]
    rows = [{"step": i, "train_loss": loss} for i, loss in enumerate(losses)]
    (tmp_path / "run").mkdir()
    loss = find_panel(figure(write_jsonl(tmp_path / "run" / "metrics.jsonl", rows).parent), "Loss")
    loss.figure.draw_without_rendering()
    assert loss.get_yscale() == "log" and loss.get_ylim()[0] <= 1e-6 and loss.get_ylim()[1] >= 10
    assert {"0.01", "1"} <= {label.get_text() for label in loss.get_yticklabels()}


def test_speed_is_drawn_from_zero(figure, tmp_path):
    """Whatever the first step took, which compiles, and a step in the middle, which waits for a disk."""
    for steps in (1, 10, 80, 5000):
        rows = [{"step": i, "tokens_per_second": 50_000 + i % 3} for i in range(steps)]
        rows[0]["tokens_per_second"] = rows[-steps // 2]["tokens_per_second"] = 300
        (tmp_path / str(steps)).mkdir()
        speed = find_panel(figure(write_jsonl(tmp_path / str(steps) / "metrics.jsonl", rows).parent), "Speed")
        low, high = speed.get_ylim()
        assert low == 0 and (steps == 1 or 50_000 < high < 60_000)


def test_a_curve_is_smoothed_by_the_middle_half_of_the_steps_around():
    noisy = np.array([5, 1, 2, np.nan, 3, 900, 4])
    assert plots.smooth(np.arange(7), noisy, 2)[1].tolist() == [5, 2, 2.5, 2.5, 3.5, 4, 4]
    assert plots.smooth(np.arange(7), noisy, 3)[1].tolist() == [5, 2, 2.5, 3.5, 3, 3.5, 4]
    # With a step missing, as in a log of every second step.
    assert plots.smooth(np.arange(7) * 2, noisy, 2)[1].tolist() == [5, 2, 1.5, 2.5, 451.5, 4, 452]


def test_a_long_run_is_drawn_by_its_extremes():
    values = np.sin(np.arange(100_000))
    values[[500, 70_001]] = [-9, 99]
    values[50_000:50_040] = np.nan
    steps, drawn = plots.extremes(np.arange(100_000), values)
    assert len(steps) == len(drawn) == 4000 and (np.diff(steps) >= 0).all()
    assert np.isfinite(drawn).all()  # there are numbers beside the NaNs
    assert drawn.min() == -9 and steps[drawn.argmin()] == 500
    assert drawn.max() == 99 and abs(steps[drawn.argmax()] - 70_001) < 50
    steps, drawn = plots.smooth(np.arange(100_000), values, 1250)
    assert len(steps) == 1000 and steps[-1] == 99_999 and np.abs(drawn).max() < 0.1


def test_runs_of_different_lengths_are_smoothed_alike(figure, tmp_path):
    """The same losses in both, as far as the short run goes."""
    rng = np.random.default_rng(0)
    losses = rng.normal(4, 1, 4000)
    for name, steps in (("long", 4000), ("short", 400)):
        rows = [{"step": step, "train_loss": losses[step]} for step in range(steps)]
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "metrics.jsonl", rows)
    loss = find_panel(figure(tmp_path / "long", tmp_path / "short"), "Loss")
    long, short = [line.get_data() for line in loss.lines if line.get_lw() > 1]
    inside = long[0] < 400 - 50
    expected = np.interp(long[0][inside], *short)
    assert np.abs(long[1][inside] - expected).max() < 0.1


def test_the_ends_of_several_losses_have_a_scale_of_their_own(figure, tmp_path):
    long, other, short = (write_run(tmp_path / name, steps) for name, steps in (("a", 300), ("b", 280), ("c", 100)))
    end = find_panel(figure(long, other), plots.LOSS_END)
    assert end.get_xlim()[0] == pytest.approx(2 / 3 * 299) and end.get_ylim()[1] < 8 < 3.5 + 7 * math.exp(-100 / 300)
    assert all(ax.get_title() != plots.LOSS_END for ax in figure(long, short).axes)


def test_a_run_has_one_colour(figure, tmp_path):
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", 300, 1, KEYS[:-1])]
    fig = figure(*runs, runs[0])  # the same folder twice is one run
    colors = [[line.get_color() for line in fig.legends[0].get_lines()]]
    for ax in fig.axes:
        drawn = [line.get_color() for line in ax.lines if len(line.get_xdata()) > 2]
        if ax.get_title() != plots.LOSS_END:
            colors.append(list(dict.fromkeys(drawn)))
    assert len(colors[0]) == 2 and colors[0] == colors[1] == colors[3] == colors[4]
    assert colors[2] == colors[0][:1]  # only one run has HellaSwag, and it keeps its colour


@pytest.mark.parametrize("paths, names", [
    (["log/quickstart"], ["quickstart"]),
    (["log/a", "log/b"], ["a", "b"]),
    (["m1/log/quickstart", "m2/log/quickstart", "m2/log/b"], ["m1/log/quickstart", "m2/log/quickstart", "b"]),
    (["a", "old/a", "old/old/a"], ["work/a", "work/old/a", "old/old/a"]),
    (["_old", "a$b_{", r"x$\frac$z", "%d #1"], ["_old", "a$b_{", r"x$\frac$z", "%d #1"]),
])  # fmt: skip
def test_names_tell_runs_apart(figure, tmp_path, paths, names):
    """As they are: no name is a formula, or hidden from the legend."""
    fig = figure(*(write_run(tmp_path / "work" / path, 3, keys=["lr"]) for path in paths))
    assert run_labels(fig) == [f"{name}: step 2" for name in names]
    fig.draw_without_rendering()


def test_a_name_that_the_font_lacks_is_a_number(figure, tmp_path, capsys):
    fig = figure(*(write_run(tmp_path / name, 3, keys=["lr"]) for name in ("训练", "été", "실험", "a\x07", "b\udcff")))
    assert run_labels(fig) == [f"{name}: step 2" for name in ("run 1", "été", "run 3", "a\ufffd", "b?")]
    out = capsys.readouterr().out
    assert out.count("warning: ") == 1 and "run 1 is 训练, run 3 is 실험" in out


def test_twenty_runs_leave_the_panels_their_size(figure, tmp_path):
    runs = [write_run(tmp_path / f"a-rather-long-name-of-a-run-{i}", 60) for i in range(20)]
    heights, colors = [], []
    for some in (runs[:2], runs):
        fig = figure(*some)
        fig.draw_without_rendering()
        heights.append([ax.get_position().height * fig.get_figheight() for ax in fig.axes])
        colors.append({line.get_color() for line in fig.legends[0].get_lines()})
    assert heights[1] == pytest.approx(heights[0], rel=0.1)
    assert len(colors[1]) == 20


def test_the_reference_band_is_what_judge_accepts(figure, tmp_path):
    recipe = {"preset": "gpt2-124m", "resolved_max_steps": 19_073}
    run = write_run(tmp_path / "run", 2001, keys=("val_loss", "hellaswag_acc_norm"), **recipe)
    assert len(find_panel(figure(run), "Loss").collections) == 0
    fig = figure(run, reference=True)
    for title in ("Loss", "HellaSwag"):
        assert len(find_panel(fig, title).collections) == 1
    (band,) = find_panel(fig, "Loss").collections
    vertices = band.get_paths()[0].vertices  # (N, 2): x, loss
    losses = vertices[vertices[:, 0] == 1000, 1]
    assert (losses.min(), losses.max()) == REFERENCE.expected_range(1000)
    assert vertices[:, 0].max() <= find_panel(fig, "Loss").get_xlim()[1]


@pytest.mark.parametrize("steps, is_drawn", [(4578, True), (99, False)])
def test_a_run_has_the_public_runs_of_its_recipe(figure, tmp_path, capsys, steps, is_drawn):
    run = write_run(tmp_path / "run", steps=1001, preset="record8-124m", resolved_max_steps=steps)
    labels = [text for text in legend_texts(figure(run, reference=True)) if "public runs" in text]
    assert [label.split(",")[0] for label in labels] == is_drawn * ["record8-124m"]
    assert (str(run) in capsys.readouterr().out) != is_drawn


def test_command_line(run_script, tmp_path):
    """Without a screen or LaTeX, with a matplotlib that is set up for both, and without torch, which takes seconds."""
    run = write_run(tmp_path / "a$1$")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\naxes.formatter.use_mathtext: True\n")
    env = {"MPLBACKEND": "nonsense", "MATPLOTLIBRC": str(tmp_path), "DISPLAY": "", "PYTHONPROFILEIMPORTTIME": "1"}
    done = run_script("plots.py", run, "--reference", cwd=tmp_path, env=env)
    assert "curves.png" in done.stdout and "matplotlib" in done.stderr and "| torch\n" not in done.stderr
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_image_is_where_and_as_its_name_says(tmp_path, monkeypatch):
    a, b = (write_run(tmp_path / name, 3, keys=["lr"]) for name in "ab")
    monkeypatch.chdir(tmp_path)
    plots.main((a, b))  # of several runs
    assert (tmp_path / "curves.png").is_file()
    plots.main((a,), out=tmp_path / "deep" / "er.svg")
    assert "<svg" in (tmp_path / "deep" / "er.svg").read_text()
    plots.main((a / "metrics.jsonl",))
    plots.main((a, b), out=tmp_path / "deep")
    assert (a / "curves.png").is_file() and (tmp_path / "deep" / "curves.png").is_file()


@pytest.mark.parametrize("name", ["pipe", "curves.xyz", "a/metrics.jsonl/x.png", "n" * 300])
def test_an_image_that_cannot_be_written_is_an_error(tmp_path, name):
    """A pipe stands for all that is no file: root could replace /dev/null."""
    run = write_run(tmp_path / "a", 3, keys=["lr"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=name.split("/")[-1]):
        plots.main((run,), out=tmp_path / name)
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 2


def test_what_is_no_run_is_skipped(tmp_path, monkeypatch, capsys):
    """As of log/*: a picture, the lock of a start that was refused, and a run that has not measured anything yet."""
    run = write_run(tmp_path / "run", 3, keys=["lr"])
    others = [tmp_path / name for name in ("locked", "begun", "curves.png")]
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").touch()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "metrics.jsonl").write_text('{"step": 0}\n{"st')
    (tmp_path / "curves.png").write_bytes(b"\x89PNG\r\n")
    plots.main((run, *others), out=tmp_path / "new.png")
    out = capsys.readouterr().out
    assert (tmp_path / "new.png").is_file() and all(str(path) in out for path in others)
    for nothing, advice in ((others, f"{run}"), ([], "python plots.py log/quickstart")):
        with pytest.raises(UserError, match=re.escape(advice)):
            plots.main(tuple(nothing), out=tmp_path / "none.png")


# ------------------------------------------------------------------------- the notebook


def test_the_notebook_runs(tmp_path, monkeypatch):
    """Its cells as one program, which shows a picture of the runs in log/ and two figures of the public runs."""
    shown = []
    monkeypatch.setattr("matplotlib.pyplot.show", lambda: shown.append("figure"))
    display = SimpleNamespace(Image=lambda path, width: path, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    write_run(tmp_path / "log" / "quickstart", 3, keys=["lr"])
    (tmp_path / "log" / "gpt2-124m").mkdir()  # of a start that was refused
    monkeypatch.chdir(tmp_path)
    cells = json.loads((ROOT / "plots.ipynb").read_text())["cells"]
    exec("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), {})
    assert shown == [Path("curves.png"), "figure", "figure"]
