"""plots.py draws what a run measured, and reference.py tells a healthy run from a sick one."""

import json
import math
import random
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

import plots
from system.cli import UserError
from training import metrics
from training.reference import find_reference, read_references

REF = read_references()[0]
ROWS, expected, on_track = list(REF.step), REF.expected, REF.on_track


def healthy(step: float, run: str = "low") -> float:
    """Val loss of a public run, also between its evaluations; before the first one, where nothing is known, a guess."""
    if step < ROWS[1]:
        return 6.14 + 4.8 * math.exp(-step / 70) * (1 - step / ROWS[1])
    return float(np.interp(step, ROWS, getattr(REF, run)))


def write_run(folder, steps=300, every=50, hellaswag=True, batch=524_288, shift=0.0, keys=None):
    """A run folder with smooth curves; keys: only these."""
    noise, rows = random.Random(0), []
    for s in range(steps):
        row = {"step": s, "train_loss": healthy(s) + shift + noise.gauss(0, 0.03), "lr": 6e-4 * min(1, (s + 1) / 100)}
        row |= {"grad_norm": 0.3 + 5 * math.exp(-s / 50), "tokens_per_second": 5e4, "mfu": None}
        if s % every == 0:
            row |= {"val_loss": healthy(s) + shift}
            row |= {"hellaswag_acc_norm": 0.25 + s / steps / 20} if hellaswag else {}
        rows.append({k: v for k, v in row.items() if keys is None or k in ("step", *keys)})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "config.json").write_text(json.dumps({"preset": "quickstart", "total_batch_size": batch}))
    return folder


@pytest.fixture
def figure(monkeypatch, tmp_path):
    """figure(runs, reference=...) draws and returns the Figure that was saved."""
    from matplotlib.figure import Figure

    saved, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), save(self, *a, **k))[1])

    def make(runs, **kwargs):
        out = plots.draw(runs, tmp_path / "curves.png", **kwargs)
        assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
        return saved[-1]

    return make


def panel(fig, title):
    return next(ax for ax in fig.axes if ax.get_title() == title)


# ---- reading ----


def test_lines_of_a_step_merge_and_torn_lines_are_skipped(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "val_loss": 10.9}\n{"step": 0, "train_loss": 10.8, "lr": 1e-5, "mfu": null}\n'
        '{"step": 2, "train_loss": 9.0}\n{"step": 1, "train_l\n{"step": 1, "train_loss": NaN}\n'
        '[1, 2]\n{"no_step": 1}\n{"step": 2, "train_loss": 8.5}\n{"step": 3, "train_loss": 8'
    )
    metrics = plots.read_metrics(tmp_path)
    assert set(metrics) == {"val_loss", "train_loss", "lr"}
    steps, values = metrics["train_loss"]
    assert steps.tolist() == [0, 1, 2] and steps.dtype == np.int64
    assert values[0] == 10.8 and np.isnan(values[1]) and values[2] == 8.5  # the later line of a step counts


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "log.txt",
            "0 val 10.9500\n0 train 10.950123\n1 train 9.500000\n250 val 5.9000\n250 hella 0.2534\n251 train nan\n",
        ),
        (
            "main.log",
            "s:0 tel:10.9500\ns:0 trl:10.9501 lr:0.000001 norm:15.37\ns:1 trl:9.5000 lr:0.000002 norm:2.00\n"
            "s:250 tel:5.9000\ns:250 eval:0.2534\ns:251 trl:nan lr:0.000500 norm:nan\n",
        ),
    ],
)
def test_logs_of_build_nanogpt_and_llm_c_are_drawn(figure, tmp_path, name, text):
    (tmp_path / name).write_text(text + text.splitlines()[0] + "\n" + text.splitlines()[-1][:9])  # being written
    metrics = {key: [a.tolist() for a in curve] for key, curve in plots.read_metrics(tmp_path).items()}
    assert metrics["val_loss"] == [[0, 250], [10.95, 5.9]] and metrics["hellaswag_acc_norm"] == [[250], [0.2534]]
    steps, losses = metrics["train_loss"]
    assert steps == [0, 1, 251] and losses[1] == 9.5 and np.isnan(losses[2])
    if name == "main.log":
        assert metrics["lr"] == [[0, 1, 251], [1e-6, 2e-6, 5e-4]] and metrics["grad_norm"][1][:2] == [15.37, 2.0]
    panel(figure([tmp_path]), "HellaSwag")


def test_a_finished_run_becomes_tensorboard_curves(tmp_path, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write_run(tmp_path / "run", steps=60)
    plots.main((run,), tensorboard=True)
    assert f"tensorboard --logdir {run}" in capsys.readouterr().out and not (run / "curves.png").exists()
    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    for key, (steps, values) in plots.read_metrics(run).items():
        points = events.Scalars(metrics.tensorboard_tag(key))  # as --tracker tensorboard has them
        assert [p.step for p in points] == steps.tolist()
        assert [p.value for p in points] == pytest.approx(values.tolist())
    with pytest.raises(UserError, match="is there already"):
        plots.to_tensorboard(run)


def test_nothing_to_read_is_said_plainly(tmp_path):
    def refused(*runs, out="curves.png", says):
        with pytest.raises(UserError, match=says):
            plots.draw(runs, tmp_path / out)

    refused(tmp_path / "no", says=r"no/metrics\.jsonl.*train_gpt2\.py quickstart")
    refused(says="no run folder")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    refused(tmp_path, says=r"metrics\.jsonl has no measured step")
    refused(write_run(tmp_path / "run", steps=3), out="c.docx", says=r"c\.docx.*--out")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 0, "temperature": 1}\n')
    refused(tmp_path / "odd", says="nothing to draw")


# ---- drawing ----


def test_one_run(figure, tmp_path):
    fig = figure([write_run(tmp_path / "run")])
    titles = [ax.get_title() for ax in fig.axes]
    assert titles == ["Loss", "HellaSwag", "Learning rate", "Gradient norm before clipping", "Speed"]
    for ax in fig.axes:
        assert ax.get_ylabel() and ax.get_xlabel() == "step (524,288 tokens each)"
        assert ax.get_xlim()[1] == pytest.approx(299 * 1.01)
    loss = panel(fig, "Loss")
    assert 6 < loss.get_ylim()[1] < 10.5 and loss.get_ylim()[0] > 5  # step 0, at 10.9, does not squash the rest
    assert "/run: val 6.1" in loss.get_legend().get_texts()[0].get_text()
    texts = " ".join(t.get_text() for t in panel(fig, "HellaSwag").texts)
    assert "GPT-2 124M: 0.2955" in texts and "1558M" not in texts  # far above this run, it would flatten the curve
    assert panel(fig, "Gradient norm before clipping").get_yscale() == "log"


def test_several_runs_share_colours_and_names_tell_them_apart(figure, tmp_path):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a", hellaswag=False, shift=1, batch=4096)]
    fig = figure([*runs, runs[0]])  # the same folder twice is one run
    labels = [t.get_text() for t in panel(fig, "Loss").get_legend().get_texts()]
    assert labels[0].startswith("x/a: ") and labels[1].startswith("y/a: ") and len(labels) == 4
    colors = [{line.get_color() for line in ax.lines} - {plots.GREY} for ax in fig.axes]
    assert colors[0] == colors[2] == colors[3] == set(plots.COLORS[:2])
    assert colors[1] == {plots.COLORS[0]}  # only one run has HellaSwag, and it keeps its colour
    assert panel(fig, "Loss").get_xlabel() == "step"  # their steps are of different size


@pytest.mark.parametrize("keys", [("train_loss",), ("val_loss",), ("lr", "grad_norm"), ("hellaswag_acc_norm",)])
def test_panels_without_data_are_left_out(figure, tmp_path, keys):
    fig = figure([write_run(tmp_path / "run", steps=60, keys=keys)])
    assert len(fig.axes) == (1 if keys[0].endswith("_loss") else len(keys))


def test_a_single_point_and_nan_are_drawn(figure, tmp_path):
    figure([write_run(tmp_path / "one", steps=1)], reference=True)
    bad = write_run(tmp_path / "nan", steps=40)
    (bad / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "train_loss": NaN}}\n' for s in range(40)))
    figure([bad])


def test_reference_band(figure, tmp_path):
    run = write_run(tmp_path / "run", steps=1001)
    without, with_band = figure([run]), figure([run], reference=True)
    assert len(panel(without, "Loss").collections) == 0
    for title in ("Loss", "HellaSwag"):
        assert len(panel(with_band, title).collections) == 1
    path = panel(with_band, "Loss").collections[0].get_paths()[0].vertices
    for row in (500, 1000):  # the band is what on_track accepts, and goes no further than the run
        heights = path[path[:, 0] == row, 1]
        assert (heights.min(), heights.max()) == expected(row)
    assert path[:, 0].max() == 1000


def test_each_run_has_the_public_runs_of_its_recipe_behind_it(figure, tmp_path, capsys):
    ours = write_run(tmp_path / "run", steps=1001)
    for preset, steps, known in (
        ("gpt2-124m", 19_073, True),
        ("record8-124m", 4578, True),
        ("record8-124m", 99, False),
    ):
        config = {"preset": preset, "total_batch_size": 524_288, "resolved_max_steps": steps}
        (ours / "config.json").write_text(json.dumps(config))
        legend = panel(figure([ours], reference=True), "Loss").get_legend()
        (label,) = [t.get_text() for t in legend.get_texts() if "on track" in t.get_text()]
        assert (preset in label) == known or preset == "gpt2-124m"
        assert ("no public run has the preset" in capsys.readouterr().out) != known


def test_command_line(run_script, tmp_path, monkeypatch):
    """Also without a screen and with a matplotlib backend that cannot work here."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    env = {"MPLBACKEND": "TkAgg", "DISPLAY": ""}
    assert "curves.png" in run_script("plots.py", a, "--reference", cwd=tmp_path, env=env).stdout
    width, height = struct.unpack(">II", (a / "curves.png").read_bytes()[16:24])
    assert width > 1000 and height > 800
    monkeypatch.chdir(tmp_path)
    plots.main((a, b))
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    plots.main((a,), out=Path("deep/er.svg"))
    assert "<svg" in (tmp_path / "deep" / "er.svg").read_text()


def shows(notebook):
    """The picture, the numbers and the steps to a loss stand in the notebook's outputs."""
    outputs = [o for c in notebook.cells for o in c.get("outputs", [])]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    text = "".join(o.get("text", "") for o in outputs)
    assert "val_loss" in text and "at step" in text


def test_notebook_runs(tmp_path, monkeypatch):
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
    nbformat.validate(notebook)
    shows(notebook)  # as committed: a reader of the repository sees curves
    assert (ROOT / "plots.ipynb").stat().st_size < 100_000 and "/home" not in (ROOT / "plots.ipynb").read_text()
    place = {"metadata": {"path": str(tmp_path)}}
    done = nbclient.NotebookClient(notebook, timeout=60, kernel_name="here", resources=place).execute()
    shows(done)


# ---- on track? ----


def judge(curve, steps=ROWS) -> list[bool]:
    """on track? at each of the steps where the reference has an answer."""
    lines = [on_track(s, curve(s)) for s in steps]
    return [line.endswith("on track") for line in lines if line]


def test_the_references_are_the_shared_figures(shared_data):
    import csv

    rows = list(csv.DictReader(open(shared_data / "fineweb_edu_10b_reference.csv")))
    for ours, key in ((zip(REF.low, REF.high, strict=True), "val_loss"), (REF.hellaswag, "hellaswag")):
        assert [sorted((float(r[f"{key}_a"]), float(r[f"{key}_b"]))) for r in rows] == list(map(list, ours))
    rows = list(csv.DictReader(open(shared_data / "reference_speedruns.csv")))
    for name, steps in (("llmc", 19_560), ("record8", 4578), ("simple-muon-36", 3250)):
        (ref,) = [ref for ref in read_references() if ref.max_steps == steps]
        theirs = {}
        for row in rows:
            if row["run"] == name:
                theirs.setdefault(int(row["step"]), []).append(float(row["val_loss"]))
        assert ref.step[-1] == max(theirs)
        for step, low, high in zip(ref.step, ref.low, ref.high, strict=True):
            assert (min(theirs[step]), max(theirs[step]), len(theirs[step])) == (low, high, ref.runs)


def test_every_reference_accepts_its_own_runs_and_no_broken_one():
    for ref in read_references():
        for step, low, high in zip(ref.step, ref.low, ref.high, strict=True):
            assert all(ref.on_track(step, v).endswith("on track") for v in (low - 0.012, low, high, high + 0.012))
            assert step == 0 or not ref.on_track(step, high + 0.3).endswith("on track") or ref.expected(step)[1] > 5
        assert "too low" in ref.on_track(ref.step[-1], 2.0) and ref.on_track(ref.step[-1] + 1, 3.0) is None
    assert find_reference("gpt2-124m", 38_146, 524_288).on_track(38_146, 3.0).endswith("on track")


def test_no_verdict_on_other_data_steps_or_batches():
    for preset, steps, shard in (
        ("gpt2-124m", 19_073, "edufineweb_train_000001.npy"),
        ("gpt2-124m", 38_146, "fineweb-edu_train_000001.npy"),
        ("llmc-124m", 19_700, "fineweb_train_000001.bin"),  # as many as there are in this sample
        ("record8-124m", 4578, "fineweb_train_000001.npy"),
    ):
        assert find_reference(preset, steps, 524_288, shard).preset == preset
        other = "fineweb_train_000001.npy" if "edu" in shard else "fineweb-edu_train_000001.npy"
        assert find_reference(preset, steps, 524_288, other) is None
        assert find_reference(preset, steps, 524_288, "books_train_000001.npy") is None
        assert find_reference(preset, steps // 3, 524_288, shard) is None
        assert find_reference(preset, steps, 262_144, shard) is None


@pytest.mark.parametrize("run", ["low", "high"])
def test_the_public_runs_are_on_track(run):
    for offset in (-0.012, 0, 0.012):  # another seed, or another sample of the validation shard
        assert all(judge(lambda s: healthy(s, run) + offset))  # noqa: B023
    assert len(judge(lambda s: healthy(s, run))) == len(ROWS)


def test_a_wrong_learning_rate_is_off_track():
    """Early loss follows the sum of the learning rates so far, so a rate too low is a run that lags behind itself.
    Where it lags at before the first evaluation, that one's loss stands in: the true one would be higher still."""
    total = np.cumsum([min(1, (s + 1) / 715) for s in range(ROWS[-1] + 1)])
    for factor in (0.1, 0.3, 0.5):
        lagging = {s: healthy(max(ROWS[1], np.searchsorted(total, factor * total[s]))) for s in ROWS}
        assert not any(judge(lagging.get, ROWS[2:21])), factor  # at every evaluation from step 500 to 5,000
    # too high: the loss sticks on the plateau of token frequencies, or goes up and comes back slowly
    assert not any(judge(lambda s: max(healthy(s), 7.2), ROWS[1:]))
    assert not all(judge(lambda s: healthy(s) + 0.8 * math.exp(-(((s - 900) / 300) ** 2)), ROWS[1:8]))
    assert not any(judge(lambda s: healthy(s) + 0.05, ROWS[6:]))  # and what it never makes good


def test_a_broken_mask_is_off_track():
    # sees the future: far too good, from the first evaluation on; also when only a little leaks
    assert not any(judge(lambda s: 10.9 * math.exp(-s / 150), ROWS[1:]))
    assert not any(judge(lambda s: healthy(s) - 0.25, ROWS[1:]))
    assert not any(judge(lambda s: healthy(s) - 0.05, ROWS[6:]))
    assert "too low" in on_track(5000, 2.0) and "future" in on_track(5000, 2.0)
    # sees nothing but itself: what single tokens tell about the next one, and no more
    assert not any(judge(lambda s: max(healthy(s), 5.6), ROWS[2:]))


def test_the_line_a_run_prints():
    low, high = expected(500)
    assert on_track(500, 5.31) == f"step 500: val 5.310, reference {low:.3f} to {high:.3f}: on track"
    assert low < REF.low[2] <= REF.high[2] < high
    assert "off track, " in on_track(500, 5.9) and "--max-lr" in on_track(500, 5.9)
    assert "off track" in on_track(500, math.nan) and "off track" in on_track(500, math.inf)
    assert "off track" in on_track(0, 11.8)  # weights that start too large
    assert on_track(100, 8.0) is None and on_track(ROWS[-1] + 1, 3.0) is None and on_track(-1, 3.0) is None
