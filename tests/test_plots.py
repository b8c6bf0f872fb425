"""plots.py draws what a run measured, also from the logs of other trainers and from broken files."""

import json
import math
import random
import struct
import sys

import numpy as np
import pytest
from helpers import ROOT

import plots
from system.cli import UserError
from training.reference import read_references

REFERENCE = read_references()[0]  # gpt2-124m's


def write_run(folder, steps=300, hellaswag=True, batch=524_288, shift=0.0, keys=None, **config):
    """A run folder with smooth curves: evaluated every 50 steps, losses higher by `shift`, only these `keys`."""
    noise = random.Random(0)
    rows = []
    for step in range(steps):
        loss = 3.5 + 7 * math.exp(-step / 300) + shift
        row = {"step": step, "train_loss": loss + noise.gauss(0, 0.03), "lr": 6e-4 * min(1, (step + 1) / 100)}
        row |= {"grad_norm": 0.3 + 5 * math.exp(-step / 50), "tokens_per_second": 5e4, "mfu": None}
        if step % 50 == 0:
            row |= {"val_loss": loss}
            row |= {"hellaswag_acc_norm": 0.25 + step / steps / 20} if hellaswag else {}
        rows.append({k: v for k, v in row.items() if keys is None or k in ("step", *keys)})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"preset": "quickstart", "total_batch_size": batch, **config}))
    return folder


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """figure(runs, reference=...) draws with plots.draw and returns the matplotlib Figure instead of the image. The
    figure is laid out but not rasterized, which would be most of the time; test_command_line looks at real images."""
    from matplotlib.figure import Figure

    saved = []

    def save(self, file, **kwargs):
        saved.append(self)
        self.draw_without_rendering()
        file.write(b"image")

    monkeypatch.setattr(Figure, "savefig", save)

    def draw(*runs, **kwargs):
        assert plots.draw(runs, tmp_path / "curves.png", **kwargs).read_bytes() == b"image"
        return saved[-1]

    return draw


def find_panel(figure, title):
    """The axes of a figure that have this title."""
    return next(ax for ax in figure.axes if ax.get_title() == title)


def legend_texts(figure, title="Loss"):
    return [text.get_text() for text in find_panel(figure, title).get_legend().get_texts()]


# ------------------------------------------------------------------------- reading


def test_lines_of_a_step_merge_and_torn_lines_are_skipped(tmp_path):
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


OTHER_LOGS = {
    "log.txt": "0 val 10.9500\n0 train 10.950123\n1 train 9.500000\n250 val 5.9000\n250 hella 0.2534\n251 train nan\n",
    "main.log": """\
s:0 tel:10.9500
s:0 trl:10.9501 lr:0.000001 norm:15.37
s:1 trl:9.5000 lr:0.000002 norm:2.00
s:250 tel:5.9000
s:250 eval:0.2534
s:251 trl:nan lr:0.000500 norm:nan
""",
}


@pytest.mark.parametrize("name, text", OTHER_LOGS.items())
def test_logs_of_build_nanogpt_and_llm_c_are_drawn(figure, tmp_path, name, text):
    # A line that was written twice, and one that is still being written.
    first, last = text.splitlines()[0], text.splitlines()[-1]
    (tmp_path / name).write_text(f"{text}{first}\n{last[:9]}")
    curves = {key: [array.tolist() for array in curve] for key, curve in plots.read_curves(tmp_path).items()}
    assert curves["val_loss"] == [[0, 250], [10.95, 5.9]] and curves["hellaswag_acc_norm"] == [[250], [0.2534]]
    steps, losses = curves["train_loss"]
    assert steps == [0, 1, 251] and losses[1] == 9.5 and np.isnan(losses[2])
    if name == "main.log":
        assert curves["lr"] == [[0, 1, 251], [1e-6, 2e-6, 5e-4]] and curves["grad_norm"][1][:2] == [15.37, 2.0]
    assert find_panel(figure(tmp_path, reference=True), "Loss").get_xlabel() == "step"


def test_a_finished_run_becomes_tensorboard_curves(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "main.log").write_text(OTHER_LOGS["main.log"])
    plots.main((tmp_path,), tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"scalars": 0}).Reload()
    points = events.Scalars("loss/val_loss")  # the tag of --tracker tensorboard
    assert [(p.step, round(p.value, 4)) for p in points] == [(0, 10.95), (250, 5.9)]
    assert "run/grad_norm" in events.Tags()["scalars"] and not (tmp_path / "curves.png").exists()
    with pytest.raises(UserError, match="already exists"):
        plots.write_tensorboard(tmp_path)


def test_nothing_to_draw_is_one_clear_error(tmp_path):
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "metrics.jsonl").write_text('{"step": 0')
    whole = write_run(tmp_path / "run", steps=3)
    odd = write_run(tmp_path / "odd", steps=3, keys=["temperature"])
    for runs, out, words in (
        ([tmp_path / "no"], "c.png", "no metrics.jsonl in .*no;"),
        ([], "c.png", "no run"),
        ([tmp_path / "torn"], "c.png", "no run"),
        ([odd], "c.png", "no run"),
        ([whole], "c.docx", r"c\.docx"),
    ):
        with pytest.raises(UserError, match=words):
            plots.draw(runs, tmp_path / out)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "NaN", "-Infinity", "0", "true", "null", "9" * 400, '"x"', "[1]"])
def test_hostile_metrics_and_configs_do_no_harm(figure, tmp_path, value):
    keys = ["val_loss", "train_loss", "lr", "grad_norm", "tokens_per_second", "hellaswag_acc_norm"]
    names = ("one", "two")
    for name, steps in zip(names, ((0, 1, 2), (0, 10**18 - 1)), strict=True):
        rows = [{"step": step, **dict.fromkeys(keys, 1.5)} for step in steps]
        lines = [json.dumps(row) + "\n" for row in rows]
        lines[-1] = lines[-1].replace("1.5", value)
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
        config = {name: "VALUE" for name in ("preset", "resolved_max_steps", "total_batch_size", "init_from")}
        (tmp_path / name / "config.json").write_text(json.dumps(config).replace('"VALUE"', value))
    for runs in ((tmp_path / "one",), (tmp_path / "one", tmp_path / "two")):
        figure(*runs, reference=True)


# ------------------------------------------------------------------------- drawing


def test_one_run(figure, tmp_path):
    fig = figure(write_run(tmp_path / "run"))
    titles = [ax.get_title() for ax in fig.axes]
    assert titles == ["Loss", "HellaSwag", "Learning rate", "Gradient norm before clipping", "Speed"]
    for ax in fig.axes:
        assert ax.get_ylabel() and ax.get_xlabel() == "step"
        assert ax.get_xlim()[1] == pytest.approx(299 * 1.01)
    assert any("/run val_loss: 6.542 at step 250" in text for text in legend_texts(fig))
    assert any("GPT-2 124M: 0.2955" in text for text in legend_texts(fig, "HellaSwag"))
    assert not any("1558M" in text for text in legend_texts(fig, "HellaSwag"))  # it would flatten the curve
    assert find_panel(fig, "Gradient norm before clipping").get_yscale() == "log"


def test_a_spike_and_the_first_steps_do_not_squash_the_rest(figure, tmp_path):
    run = write_run(tmp_path / "run", steps=3000)
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 1500, "train_loss": 1000}\n')
    low, high = find_panel(figure(run), "Loss").get_ylim()
    assert 3 < low < 3.5 and 4 < high < 9


def test_runs_of_unlike_steps_are_drawn_over_tokens(figure, tmp_path):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a", hellaswag=False, shift=1, batch=4096)]
    fig = figure(*runs, runs[0])  # the same folder twice is one run
    labels = legend_texts(fig)
    assert labels[0].startswith("x/a ") and labels[2].startswith("y/a ") and len(labels) == 4
    colors = [{line.get_color() for line in ax.lines} - {plots.GREY} for ax in fig.axes]
    assert colors[0] == colors[2] == colors[3] == {"C0", "C1"}
    assert colors[1] == {"C0"}  # only one run has HellaSwag, and it keeps its colour
    loss = find_panel(fig, "Loss")
    assert loss.get_xlabel() == "million tokens"
    ends = {max(line.get_xdata()) for line in loss.lines if len(line.get_xdata()) == 300}
    assert ends == {299 * 4096 / 1e6, 299 * 524_288 / 1e6}


@pytest.mark.parametrize("keys", [("train_loss",), ("val_loss",), ("lr", "grad_norm"), ("hellaswag_acc_norm",)])
def test_panels_without_data_are_left_out(figure, tmp_path, keys):
    fig = figure(write_run(tmp_path / "run", steps=60, keys=keys))
    assert len(fig.axes) == (1 if keys[0].endswith("_loss") else len(keys))


@pytest.mark.parametrize("batch, scale", [(524_288, 1), (262_144, 524_288 / 1e6)])
def test_the_reference_band_is_what_judge_accepts(figure, tmp_path, batch, scale):
    """Over steps, or over tokens for a run such as untied-124m's, whose step 2,000 is the public runs' step 1,000."""
    run = write_run(tmp_path / "run", steps=2001, batch=batch)
    assert len(find_panel(figure(run), "Loss").collections) == 0
    fig = figure(run, reference=True)
    for title in ("Loss", "HellaSwag"):
        assert len(find_panel(fig, title).collections) == 1
    (band,) = find_panel(fig, "Loss").collections
    vertices = band.get_paths()[0].vertices  # (N, 2): x, loss
    losses = vertices[np.isclose(vertices[:, 0], 1000 * scale), 1]
    assert (losses.min(), losses.max()) == REFERENCE.expected_range(1000)
    assert vertices[:, 0].max() <= find_panel(fig, "Loss").get_xlim()[1]


@pytest.mark.parametrize(
    "preset, steps, is_known", [("gpt2-124m", 19_073, True), ("record8-124m", 4578, True), ("record8-124m", 99, False)]
)
def test_a_run_has_the_public_runs_of_its_recipe(figure, tmp_path, capsys, preset, steps, is_known):
    run = write_run(tmp_path / "run", steps=1001, preset=preset, resolved_max_steps=steps)
    (label,) = [text for text in legend_texts(figure(run, reference=True)) if "public runs" in text]
    assert label.startswith(preset if is_known else "gpt2-124m")
    assert ("no public run has the preset" in capsys.readouterr().out) != is_known


def test_command_line(run_script, tmp_path, monkeypatch):
    """Without a screen, with a matplotlib backend that cannot work here, and without torch, which takes seconds."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    env = {"MPLBACKEND": "TkAgg", "DISPLAY": "", "PYTHONPROFILEIMPORTTIME": "1"}
    done = run_script("plots.py", a, "--reference", cwd=tmp_path, env=env)
    assert "curves.png" in done.stdout and "matplotlib" in done.stderr and "| torch\n" not in done.stderr
    image = (a / "curves.png").read_bytes()
    width, height = struct.unpack(">II", image[16:24])  # of a PNG's header
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 800
    monkeypatch.chdir(tmp_path)
    plots.main((a, b))
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    plots.main((a,), out=tmp_path / "deep" / "er.svg")
    assert "<svg" in (tmp_path / "deep" / "er.svg").read_text()


# ------------------------------------------------------------------------- the notebook


def assert_shows_curves(cells):
    """The cells' outputs have the curves and the final losses of the public runs."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert "3.072" in "".join("".join(output.get("text", "")) for output in outputs)


def test_the_committed_notebook_shows_curves():
    """A reader of the repository sees them without running it, and sees nothing of the machine that ran it."""
    text = (ROOT / "plots.ipynb").read_text()
    assert_shows_curves(json.loads(text)["cells"])
    assert len(text) < 100_000 and "/home" not in text


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """In the interpreter that runs the tests, whatever kernels this machine has registered."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    kernel = tmp_path / "jupyter" / "kernels" / "here"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_run(tmp_path / "log" / "quickstart")
    notebook = nbformat.read(ROOT / "plots.ipynb", as_version=4)
    for cell in notebook.cells:  # so that what is found below has been made here
        if cell.cell_type == "code":
            cell.outputs = []
    folder = {"metadata": {"path": str(tmp_path)}}
    executed = nbclient.NotebookClient(notebook, timeout=60, kernel_name="here", resources=folder).execute()
    assert_shows_curves(executed.cells)
