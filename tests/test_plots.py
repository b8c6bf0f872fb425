"""plots.py draws what a run measured, also from the logs of other trainers and from broken files."""

import json
import math

import nbclient
import nbformat
import pytest
from helpers import ROOT, read_table, refused, run_main, write_jsonl

import plots
from evaluation.reference import read_references

KEYS = ("val_loss", "train_loss", "lr", "grad_norm", "tokens_per_second", "hellaswag_acc_norm")
OTHER_KEYS = ("val_loss_ema", "val_bpb_ema", "penalty", "step_ms")


def loss_at(step):
    return 3.5 + 7 * math.exp(-step / 300)


def write_run(folder, steps=300, keys=KEYS, factor=1, tokens_per_step=524_288, **config):
    """A run folder with smooth curves of these keys, evaluated every 50 steps; all of them times a factor."""
    rows = []
    for step in range(steps):
        row = {"train_loss": loss_at(step), "lr": 6e-4, "grad_norm": 0.3, "tokens_per_second": 5e4}
        if step % 50 == 0:
            row |= {"val_loss": loss_at(step), "hellaswag_acc_norm": 0.25 + step / steps / 20}
            row |= dict.fromkeys(OTHER_KEYS, 4.0)
        measured = {key: factor * row[key] for key in keys if key in row}
        rows.append({"step": step, "tokens": step * tokens_per_step, **measured})
    folder.mkdir(parents=True)
    write_jsonl(folder / "metrics.jsonl", rows)
    config = {"preset": "quickstart", "total_batch_size": tokens_per_step, **config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """draw(*runs, reference=...) -> {the first word of a panel's title: its axes}, and the figure's legend. Nothing is
    saved, which takes most of the time."""
    saved = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, file, **_: saved.append(figure))

    def draw(*runs, **kwargs):
        plots.draw(runs, tmp_path / "curves.png", **kwargs)
        return {ax.get_title().split(maxsplit=1)[0].strip(":"): ax for ax in saved[-1].axes}, saved[-1].legends[0]

    return draw


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
    assert steps.tolist() == [0, 2] and values.tolist() == [10.8, 8.5]  # the later line of a step counts


# The same steps as each program logs them, and how many metrics it has. build-nanogpt's console evaluates a step before
# it trains the step and prints its number.
LOGS = {
    "log.txt": (3, """0 val 10.9500
0 train 10.950100
1 train 9.500000
250 val 5.9000
250 hella 0.2534
250 train 5.850000
"""),
    "theirs.log": (6, """using device: cuda
validation loss: 10.9500
step     0 | loss: 10.950100 | lr 1.0000e-06 | norm: 15.3700 | dt: 176.61ms | tok/sec: 297788.00
step     1 | loss: 9.500000 | lr 2.0000e-06 | norm: 2.0000 | dt: 802.85ms | tok/sec: 653033.00
validation loss: 5.9000
HellaSwag accuracy: 2545/10042=0.2534
rank 0 sample 0: val 3 of them
1 ) How do I
step   250 | loss: 5.850000 | lr 3.0000e-06 | norm: 1.0000 | dt: 802.85ms | tok/sec: 653033.00
validation loss: 5.0000
"""),
    "ours.log": (6, """using device: cuda
step     0/19073 | val loss: 10.9500 | bits per byte: 3.5112
step     0/19073 | loss: 10.950100 | lr 1.0000e-06 | norm: 15.3700 | dt: 176.61ms | tok/sec: 297,788
step 1: val 5.310, reference 5.209 to 5.385: on track
3 norms
step     1/19073 | loss: 9.500000 | lr 2.0000e-06 | norm: 2.0000 | dt: 802.85ms | tok/sec: 653,033 | eta: 4h
step   250/19073 | val loss: 5.9000 | bits per byte: 1.9130
step   250/19073 | hellaswag acc 0.25 acc_norm 0.2534 n 9
step   250/19073 | loss: 5.850000 | lr 3.0000e-06 | norm: 1.0000 | dt: 802.85ms | tok/sec: 653,033 | eta: 4h
"""),
    "main.log": (5, """s:0 tel:10.9500
s:0 trl:10.9501 lr:0.000001 norm:15.37
s:1 trl:9.5000 lr:0.000002 norm:2.00
s:250 tel:5.9000
s:250 eval:0.2534
s:250 trl:5.8500 lr:0.000003 norm:1.00
"""),
}  # fmt: skip
# What they measure: the metric | the steps | the values.
MEASURED = """
train_loss         | 0 1 250 | 10.9501 9.5 5.85
val_loss           | 0 250   | 10.95 5.9
hellaswag_acc_norm | 250     | 0.2534
lr                 | 0 1 250 | 1e-6 2e-6 3e-6
grad_norm          | 0 1 250 | 15.37 2.0 1.0
tokens_per_second  | 0 1 250 | 297788 653033 653033
"""


@pytest.mark.parametrize("name", LOGS)
def test_logs_and_consoles_are_read(tmp_path, name):
    # A line that was written twice, and one that is still being written.
    count, text = LOGS[name]
    lines = text.splitlines()
    (tmp_path / name).write_text(f"{text}{lines[0]}\n{lines[-1][:19]}")
    for path in (tmp_path, tmp_path / name):
        found = plots.read_curves(path)
        assert len(found) == count
        for key, *curve in read_table(MEASURED):
            if key in found:
                assert found.pop(key).tolist() == [[float(number) for number in cell.split()] for cell in curve]
        assert not found


# ------------------------------------------------------------------------- drawing


def test_one_run(draw, tmp_path):
    run = write_run(tmp_path / "run")
    panels, legend = draw(run)
    ends = f"train {loss_at(299):.3f}, val {loss_at(250):.3f} at step 250, HellaSwag 0.2917 at step 250, step 299"
    assert [text.get_text() for text in legend.get_texts()] == [f"{run}: {ends}"]

    # Every step and the medians of the train loss are lines, the val loss is points alone.
    is_joined = {len(line.get_xdata()): line.get_linestyle() != "None" for line in panels["Loss"].lines}
    assert is_joined == {300: True, plots.PARTS: True, 6: False}


def test_runs_of_different_batch_sizes_are_drawn_over_tokens(draw, tmp_path, capsys):
    """A short run is drawn as it is, also its first losses. A log does not have the tokens."""
    runs = [write_run(tmp_path / str(tokens), 80, tokens_per_step=tokens) for tokens in (1000, 3000)]
    (tmp_path / "log.txt").write_text(LOGS["log.txt"][1])
    panels, legend = draw(*runs, tmp_path, x="tokens")
    assert {line.get_xdata()[-1] for line in panels["Learning"].lines} == {79_000, 237_000}
    assert panels["Loss"].get_xlabel() == "tokens" and panels["Loss"].get_ylim()[1] > loss_at(0)
    assert [text.get_text().rpartition(", ")[2] for text in legend.get_texts()] == ["tokens 79,000", "tokens 237,000"]
    assert f"no measured tokens in {tmp_path};" in capsys.readouterr().out


def test_what_an_experiment_measures_is_drawn(draw, tmp_path):
    """A val loss beside the loss, anything else in a panel of its own."""
    panels, _ = draw(write_run(tmp_path / "run", keys=(*KEYS, *OTHER_KEYS)))
    assert list(panels) == ["Loss", "HellaSwag", "Learning", "Gradient", "Speed", "penalty"]
    assert [text.get_text() for text in panels["Loss"].get_legend().get_texts()] == ["val_loss_ema"]
    assert {len(line.get_xdata()) for line in panels["penalty"].lines} == {6}


def test_a_spike_does_not_squash_the_rest(draw, tmp_path):
    """Nor do the first steps of a long run, nor a step that compiles."""
    run = write_run(tmp_path / "run", steps=3000)
    with open(run / "metrics.jsonl", "a") as f:
        f.write('{"step": 1500, "train_loss": 1000}\n{"step": 0, "tokens_per_second": 9}\n')
    panels, _ = draw(run)
    low, high = panels["Loss"].get_ylim()
    assert 3 < low < 3.5 and 4 < high < 9
    assert panels["Speed"].get_ylim() == pytest.approx((-3000, 53_000))

    # A short run is drawn as it is, also its first losses.
    panels, _ = draw(write_run(tmp_path / "short", 80))
    low, high = panels["Loss"].get_ylim()
    assert low < loss_at(79) and loss_at(0) + 0.05 < high < 12
    assert panels["HellaSwag"].get_ylim()[1] > plots.OPENAI_124M["hellaswag_acc_norm"]
    assert draw(run, tmp_path / "short")[0]["Loss"].get_ylim()[1] < 9


def test_a_run_that_diverged_does_not_squash_the_others(draw, tmp_path):
    """A run that only learns worse is seen, and so is one that is faster. Each has a colour of its own."""
    good, worse, diverged = (write_run(tmp_path / str(factor), factor=factor) for factor in (1, 2, 1000))
    for runs, factor in (((good, worse, diverged), 2), ((good, diverged), 1)):
        panels, legend = draw(*runs, good)  # the same folder twice is one run
        assert factor * loss_at(15) < panels["Loss"].get_ylim()[1] < factor * 11
        assert panels["Gradient"].get_ylim()[1] < 1
        assert panels["Speed"].get_ylim()[1] > 5e7
        colours = [line.get_color() for line in legend.get_lines()]
        assert len(colours) == len(set(colours)) == len(runs)
        for ax in panels.values():
            assert {line.get_color() for line in ax.lines if len(line.get_xdata()) > 2} == set(colours)


# A preset | the steps of a run | how many public runs are drawn behind it | over what.
RECIPES = """
gpt2-124m    | 19073 | 1 | step
record8-124m | 4578  | 1 | tokens
record8-124m | 99    | 0 | step
"""


@pytest.mark.parametrize("preset, steps, drawn, x", read_table(RECIPES))
def test_the_public_runs_of_the_recipe_are_drawn_with_their_margin(draw, tmp_path, capsys, preset, steps, drawn, x):
    reference = next(found for found in read_references() if found.preset == preset)
    recipe = {"preset": preset, "resolved_max_steps": int(steps)}
    run = write_run(tmp_path / "run", 2001, ("val_loss", "hellaswag_acc_norm"), **recipe)
    assert not draw(run)[0]["Loss"].collections
    panels, _ = draw(run, reference=True, x=x)
    assert (f"{run}: no public run" in capsys.readouterr().out) == (drawn == "0")
    assert len(panels["HellaSwag"].collections) == len(panels["Loss"].collections) == int(drawn)
    for band in panels["Loss"].collections:
        vertices = band.get_paths()[0].vertices  # (N, 2): x, loss
        losses = vertices[vertices[:, 0] == (1000 if x == "step" else 524_288_000), 1]
        assert (losses.min(), losses.max()) == reference.expected_range(1000)
        assert vertices[:, 0].max() <= panels["Loss"].get_xlim()[1]


def test_a_log_is_named_and_nothing_else_is_read(draw, tmp_path, capsys):
    """Of several logs in a folder the last by its name is drawn. A checkpoint is no text."""
    for name in ("train-1.log", "train-2.log", "model.pt"):
        (tmp_path / name).write_text(LOGS["ours.log"][1])
    _, legend = draw(tmp_path, tmp_path / "model.pt")
    assert [text.get_text().partition(": ")[0] for text in legend.get_texts()] == [str(tmp_path / "train-2.log")]
    assert "model.pt; plots.py reads .jsonl, .txt, .log" in capsys.readouterr().out


def test_the_image_is_where_and_as_its_name_says(tmp_path, monkeypatch, capsys):
    """Of several runs it is in the current folder. What is no run, as some of log/*, is skipped."""
    a, b = (write_run(tmp_path / name, 3, ["lr"]) for name in "ab")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/metrics.jsonl").write_text('{"step": 0}\n{"st')
    monkeypatch.chdir(tmp_path)
    for words in (["a", "b", "begun"], ["a", "--out", "deep/er.svg"], ["a/metrics.jsonl"]):
        assert run_main("plots.py", *words) == 0
    assert (tmp_path / "curves.png").is_file() and (a / "curves.png").is_file()
    assert "<svg" in (tmp_path / "deep/er.svg").read_text()
    assert "skipped: no measured step in begun" in capsys.readouterr().out
    with refused(r"er\.foo .*png, .*svg"):
        plots.draw([a], "er.foo")
    with refused(f"begun; {tmp_path} has the runs .*{b}"):
        plots.draw([tmp_path / "begun"], "none.png")


# ------------------------------------------------------------------------- the notebook


def test_the_notebook_runs(tmp_path, monkeypatch):
    """It shows a picture of the runs in log/ and then the public runs, as it does in the file that is committed."""
    write_run(tmp_path / "log" / "quickstart", 3, ["lr"])
    (tmp_path / "log" / "gpt2-124m").mkdir()  # of a start that was refused
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "plots.ipynb", as_version=4)
    committed = count_pictures(notebook)
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    assert count_pictures(notebook) == committed == [1, 0, 1]
    assert (tmp_path / "curves.png").exists()


def count_pictures(notebook):
    """In the outputs of each cell of code."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sum("image/png" in output.get("data", {}) for output in cell.outputs) for cell in cells]
