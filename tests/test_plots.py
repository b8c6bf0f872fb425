"""plots.py draws what a run measured, and reference.py tells a healthy run from a sick one."""

import csv
import json
import math
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

import plots
from system.cli import UserError
from training import metrics
from training.presets import PRESETS
from training.reference import DATASETS, find_reference, read_references

REFERENCE = read_references()[0]  # gpt2-124m's
STEPS = list(REFERENCE.step)  # at which the public runs were evaluated
expected_range, judge = REFERENCE.expected_range, REFERENCE.judge


def healthy_loss(step: float, run: str = "low") -> float:
    """Val loss of a public run, also between its evaluations; before the first one, where nothing is known, a guess."""
    if step < STEPS[1]:
        return 6.14 + 4.8 * math.exp(-step / 70) * (1 - step / STEPS[1])
    return float(np.interp(step, STEPS, getattr(REFERENCE, run)))


def write_run(folder, steps=300, every=50, hellaswag=True, batch=524_288, shift=0.0, keys=None):
    """A run folder with smooth curves: validation every `every` steps, losses higher by `shift`, only these `keys`."""
    noise = random.Random(0)
    rows = []
    for step in range(steps):
        loss = healthy_loss(step) + shift
        row = {"step": step, "train_loss": loss + noise.gauss(0, 0.03), "lr": 6e-4 * min(1, (step + 1) / 100)}
        row |= {"grad_norm": 0.3 + 5 * math.exp(-step / 50), "tokens_per_second": 5e4, "mfu": None}
        if step % every == 0:
            row |= {"val_loss": loss}
            row |= {"hellaswag_acc_norm": 0.25 + step / steps / 20} if hellaswag else {}
        rows.append({k: v for k, v in row.items() if keys is None or k in ("step", *keys)})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.json").write_text(json.dumps({"preset": "quickstart", "total_batch_size": batch}))
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

    def draw(runs, **kwargs):
        out = plots.draw(runs, tmp_path / "curves.png", **kwargs)
        assert out.read_bytes() == b"image"
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".part")] == []
        return saved[-1]

    return draw


def find_panel(figure, title):
    """The axes of a figure that have this title."""
    return next(ax for ax in figure.axes if ax.get_title() == title)


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


BUILD_NANOGPT_LOG = """\
0 val 10.9500
0 train 10.950123
1 train 9.500000
250 val 5.9000
250 hella 0.2534
251 train nan
"""
LLM_C_LOG = """\
s:0 tel:10.9500
s:0 trl:10.9501 lr:0.000001 norm:15.37
s:1 trl:9.5000 lr:0.000002 norm:2.00
s:250 tel:5.9000
s:250 eval:0.2534
s:251 trl:nan lr:0.000500 norm:nan
"""


@pytest.mark.parametrize("name, text", {"log.txt": BUILD_NANOGPT_LOG, "main.log": LLM_C_LOG}.items())
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
    find_panel(figure([tmp_path]), "HellaSwag")


def test_a_finished_run_becomes_tensorboard_curves(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = write_run(tmp_path / "run", steps=60)
    plots.main((run,), tensorboard=True)
    assert f"tensorboard --logdir {run}" in capsys.readouterr().out and not (run / "curves.png").exists()
    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    for key, (steps, values) in plots.read_curves(run).items():
        points = events.Scalars(metrics.tensorboard_tag(key))  # as --tracker tensorboard has them
        assert [p.step for p in points] == steps.tolist()
        assert [p.value for p in points] == pytest.approx(values.tolist())
    with pytest.raises(UserError, match="already exists"):
        plots.write_tensorboard(run)


def test_nothing_to_read_is_one_clear_error(tmp_path):
    def assert_refused(*runs, out="curves.png", match):
        with pytest.raises(UserError, match=match):
            plots.draw(runs, tmp_path / out)

    assert_refused(tmp_path / "no", match=r"no/metrics\.jsonl.*train_gpt2\.py quickstart")
    assert_refused(match="no run folder")
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    assert_refused(tmp_path, match=r"metrics\.jsonl has no measured step")
    assert_refused(write_run(tmp_path / "run", steps=3), out="c.docx", match=r"c\.docx.*--out")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "metrics.jsonl").write_text('{"step": 0, "temperature": 1}\n')
    assert_refused(tmp_path / "odd", match="nothing to draw")


def test_curves_are_drawn_without_importing_torch(tmp_path):
    """Neither `import plots` nor `python plots.py RUN --reference` imports torch, which would take seconds."""
    run = write_run(tmp_path / "run", steps=60)
    program = (
        "import runpy, sys\n"
        "import plots\n"
        "assert 'torch' not in sys.modules, 'import plots'\n"
        f"sys.argv = ['plots.py', {str(run)!r}, '--reference']\n"
        f"runpy.run_path({str(ROOT / 'plots.py')!r}, run_name='__main__')\n"
    )
    # run_cli ends the process itself, so the list of modules is printed by a hook at its end.
    program = "import atexit\n@atexit.register\ndef report(): print('torch' in sys.modules)\n" + program
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (run / "curves.png").is_file() and done.stdout.splitlines()[-1] == "False", done.stdout


# ------------------------------------------------------------------------- drawing


def test_one_run(figure, tmp_path):
    fig = figure([write_run(tmp_path / "run")])
    titles = [ax.get_title() for ax in fig.axes]
    assert titles == ["Loss", "HellaSwag", "Learning rate", "Gradient norm before clipping", "Speed"]
    for ax in fig.axes:
        assert ax.get_ylabel() and ax.get_xlabel() == "step (524,288 tokens each)"
        assert ax.get_xlim()[1] == pytest.approx(299 * 1.01)
    loss = find_panel(fig, "Loss")
    assert 6 < loss.get_ylim()[1] < 10.5 and loss.get_ylim()[0] > 5  # step 0, at 10.9, does not squash the rest
    assert "/run: val 6.1" in loss.get_legend().get_texts()[0].get_text()
    texts = " ".join(t.get_text() for t in find_panel(fig, "HellaSwag").texts)
    assert "GPT-2 124M: 0.2955" in texts and "1558M" not in texts  # far above this run, it would flatten the curve
    assert find_panel(fig, "Gradient norm before clipping").get_yscale() == "log"


def test_several_runs_share_colours_and_names_tell_them_apart(figure, tmp_path):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a", hellaswag=False, shift=1, batch=4096)]
    fig = figure([*runs, runs[0]])  # the same folder twice is one run
    labels = [t.get_text() for t in find_panel(fig, "Loss").get_legend().get_texts()]
    assert labels[0].startswith("x/a: ") and labels[1].startswith("y/a: ") and len(labels) == 4
    colors = [{line.get_color() for line in ax.lines} - {plots.GREY} for ax in fig.axes]
    assert colors[0] == colors[2] == colors[3] == set(plots.COLORS[:2])
    assert colors[1] == {plots.COLORS[0]}  # only one run has HellaSwag, and it keeps its colour
    # Their steps are of different size, so one has come 128 times as far as the other.
    loss = find_panel(fig, "Loss")
    assert loss.get_xlabel() == "tokens"
    ends = [max(line.get_xdata()) for line in loss.lines if len(line.get_xdata()) == 300]
    assert sorted(set(ends)) == [299 * 4096, 299 * 524_288]
    assert loss.get_xlim()[1] == pytest.approx(299 * 524_288 * 1.01)


@pytest.mark.parametrize("keys", [("train_loss",), ("val_loss",), ("lr", "grad_norm"), ("hellaswag_acc_norm",)])
def test_panels_without_data_are_left_out(figure, tmp_path, keys):
    fig = figure([write_run(tmp_path / "run", steps=60, keys=keys)])
    assert len(fig.axes) == (1 if keys[0].endswith("_loss") else len(keys))


def test_a_single_point_and_nan_are_drawn(figure, tmp_path):
    figure([write_run(tmp_path / "one", steps=1)], reference=True)
    bad = write_run(tmp_path / "nan", steps=40)
    (bad / "metrics.jsonl").write_text("".join(f'{{"step": {s}, "train_loss": NaN}}\n' for s in range(40)))
    figure([bad])


def test_the_reference_band_is_what_judge_accepts_and_ends_with_the_run(figure, tmp_path):
    run = write_run(tmp_path / "run", steps=1001)
    without_band, with_band = figure([run]), figure([run], reference=True)
    assert len(find_panel(without_band, "Loss").collections) == 0
    for title in ("Loss", "HellaSwag"):
        assert len(find_panel(with_band, title).collections) == 1
    vertices = find_panel(with_band, "Loss").collections[0].get_paths()[0].vertices  # (N, 2): step, loss
    for step in (500, 1000):
        losses = vertices[vertices[:, 0] == step, 1]
        assert (losses.min(), losses.max()) == expected_range(step)
    assert vertices[:, 0].max() == 1000


def test_a_run_with_half_the_tokens_a_step_is_drawn_over_tokens_with_the_public_runs(figure, tmp_path):
    """As untied-124m: its step 2,000 has seen as many tokens as step 1,000 of a public run."""
    run = write_run(tmp_path / "run", steps=2001, batch=262_144)

    fig = figure([run], reference=True)

    loss = find_panel(fig, "Loss")
    vertices = loss.collections[0].get_paths()[0].vertices  # (N, 2): tokens, loss
    losses = vertices[vertices[:, 0] == 1000 * 524_288, 1]
    assert (losses.min(), losses.max()) == expected_range(1000)
    assert vertices[:, 0].max() == 1000 * 524_288
    assert {ax.get_xlabel() for ax in fig.axes} == {"tokens"}
    assert loss.xaxis.get_major_formatter()(2.5e8, 1) == "250M"
    assert loss.xaxis.get_major_formatter()(1.5e9, 1) == "1.5B"


def test_the_last_loss_has_bits_per_byte_if_both_were_measured_at_that_step(tmp_path):
    run = write_run(tmp_path / "run", steps=101)
    without_bits = (run / "metrics.jsonl").read_text()
    for step, expected in ((50, "val 6.830 at step 100"), (100, "val 6.830, 1.234 bits per byte, at step 100")):
        (run / "metrics.jsonl").write_text(f'{without_bits}{{"step": {step}, "val_bpb": 1.2345}}\n')
        assert plots.describe_last_loss(plots.read_curves(run)) == expected


@pytest.mark.parametrize(
    "preset, steps, is_known", [("gpt2-124m", 19_073, True), ("record8-124m", 4578, True), ("record8-124m", 99, False)]
)
def test_a_run_has_the_public_runs_of_its_recipe_behind_it(figure, tmp_path, capsys, preset, steps, is_known):
    run = write_run(tmp_path / "run", steps=1001)
    config = {"preset": preset, "total_batch_size": 524_288, "resolved_max_steps": steps}
    (run / "config.json").write_text(json.dumps(config))
    legend = find_panel(figure([run], reference=True), "Loss").get_legend()
    (label,) = [text.get_text() for text in legend.get_texts() if "with a margin" in text.get_text()]
    assert (preset if is_known else "gpt2-124m") in label
    assert ("no public run has the preset" in capsys.readouterr().out) != is_known


@pytest.mark.parametrize("settings, shard, reason", [
    ({"init_from": "gpt2"}, "", "--init-from gpt2 does not begin from scratch"),
    ({"init_from": "log/gpt2-124m/model_19073.pt"}, "", "does not begin from scratch"),
    ({"init_from": "scratch"}, "books_train_000001.npy", "are on fineweb-edu, not on books_train_000001.npy"),
    ({"init_from": "scratch"}, "edufineweb_train_000001.npy", ""),
    ({"init_from": "scratch", "data_dir": "\0"}, "", ""),
])  # fmt: skip
def test_a_run_that_gets_no_verdict_has_no_public_runs_behind_it(figure, tmp_path, capsys, settings, shard, reason):
    run = write_run(tmp_path / "run", steps=1001)
    config = {"preset": "gpt2-124m", "total_batch_size": 524_288, "resolved_max_steps": 19_073}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / (shard or "notes.txt")).touch()
    (run / "config.json").write_text(json.dumps({**config, "data_dir": str(tmp_path / "data"), **settings}))

    fig = figure([run], reference=True)

    bands = [len(find_panel(fig, title).collections) for title in ("Loss", "HellaSwag")]
    assert bands == ([0, 0] if reason else [1, 1])
    printed = capsys.readouterr().out
    assert ("no public runs are drawn behind" in printed and reason in printed) if reason else printed == ""


def test_without_a_run_the_public_runs_of_every_preset_are_drawn(figure):
    fig = figure([], reference=True)
    lines = [line for line in find_panel(fig, "Val loss of public runs").lines if len(line.get_xdata()) > 2]
    assert len(lines) == len(read_references())
    for line, reference in zip(lines, read_references(), strict=True):
        assert line.get_label().startswith(f"{reference.preset}, {reference.max_steps:,} steps")
        assert line.get_xdata()[-1] == reference.step[-1] * 524_288
        assert reference.low[-1] <= line.get_ydata()[-1] <= reference.high[-1]
    # A curve for each reference with HellaSwag, and OpenAI's horizontal line.
    hellaswag = find_panel(fig, "HellaSwag").lines
    assert len(hellaswag) == 1 + sum(bool(reference.hellaswag) for reference in read_references())


def test_command_line(run_script, tmp_path, monkeypatch):
    """Also without a screen and with a matplotlib backend that cannot work here."""
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    env = {"MPLBACKEND": "TkAgg", "DISPLAY": ""}
    assert "curves.png" in run_script("plots.py", a, "--reference", cwd=tmp_path, env=env).stdout
    image = (a / "curves.png").read_bytes()
    width, height = struct.unpack(">II", image[16:24])  # of a PNG's header
    assert image[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 800
    monkeypatch.chdir(tmp_path)
    plots.main((a, b))
    assert (tmp_path / "curves.png").stat().st_size > 20_000
    plots.main((a,), out=Path("deep/er.svg"))
    assert "<svg" in (tmp_path / "deep" / "er.svg").read_text()


# ------------------------------------------------------------------------- the notebook


def assert_shows_curves(cells):
    """The cells' outputs have the picture, the numbers and the steps to a loss."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join("".join(output.get("text", "")) for output in outputs)
    assert "val_loss" in text and "at step" in text


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
    nbformat.validate(notebook)
    for cell in notebook.cells:  # so that what is found below has been made here
        if cell.cell_type == "code":
            cell.outputs = []
    folder = {"metadata": {"path": str(tmp_path)}}
    executed = nbclient.NotebookClient(notebook, timeout=60, kernel_name="here", resources=folder).execute()
    assert_shows_curves(executed.cells)


# ------------------------------------------------------------------------- on track or off track


def judge_curve(loss_at, steps=STEPS) -> list[bool]:
    """Whether a run with the val losses loss_at(step) is on track, at each of the steps where the reference answers."""
    lines = [judge(step, loss_at(step)) for step in steps]
    return [line.endswith("on track") for line in lines if line]


def read_csv(path):
    with open(path) as f:
        return list(csv.DictReader(f))


def test_the_references_are_the_shared_figures(shared_data):
    # gpt2-124m: two runs, a and b, with val losses and HellaSwag.
    rows = read_csv(shared_data / "fineweb_edu_10b_reference.csv")
    val_losses = zip(REFERENCE.low, REFERENCE.high, strict=True)
    for pairs, key in ((val_losses, "val_loss"), (REFERENCE.hellaswag, "hellaswag")):
        assert [sorted((float(row[f"{key}_a"]), float(row[f"{key}_b"]))) for row in rows] == list(map(list, pairs))

    # The speedruns: any number of runs of the same name.
    rows = read_csv(shared_data / "reference_speedruns.csv")
    for name, max_steps in (("llmc", 19_560), ("record8", 4578), ("simple-muon-36", 3250)):
        (reference,) = [reference for reference in read_references() if reference.max_steps == max_steps]
        losses = {}
        for row in rows:
            if row["run"] == name:
                losses.setdefault(int(row["step"]), []).append(float(row["val_loss"]))
        assert reference.step[-1] == max(losses)
        for step, low, high in zip(reference.step, reference.low, reference.high, strict=True):
            assert (min(losses[step]), max(losses[step]), len(losses[step])) == (low, high, reference.runs)


def test_every_reference_accepts_its_own_runs_and_no_broken_one():
    for reference in read_references():
        for step, low, high in zip(reference.step, reference.low, reference.high, strict=True):
            for loss in (low - 0.012, low, high, high + 0.012):  # another seed
                assert reference.judge(step, loss).endswith("on track")
            # 0.3 nats too high is noticed once the steep part, and the loose step 0, are over.
            if step > 0 and reference.expected_range(step)[1] <= 5:
                assert not reference.judge(step, high + 0.3).endswith("on track")
        last_step = reference.step[-1]
        assert "too low" in reference.judge(last_step, 2.0)
        assert reference.judge(last_step + 1, 3.0) is None


def test_the_second_epoch_has_a_reference_of_its_own():
    """The public run's: 3.017 nats and 0.317 at its end, and nothing to compare with before it began."""
    second_epoch = find_reference("gpt2-124m", 38_146, 524_288)
    assert (second_epoch.low[-1], second_epoch.hellaswag[-1]) == (3.0167, (0.3172, 0.3172))
    assert len(second_epoch.hellaswag) == len(second_epoch.step)
    for step in (0, 5000, 19_073, 19_249, 38_147):
        assert second_epoch.judge(step, 3.1) is None
    # The curve is flat, so the noise of its evaluations does not widen the range.
    for step in range(19_250, 38_146, 50):
        low, high = second_epoch.expected_range(step)
        assert 0.0499 < high - low < 0.08


def test_every_reference_is_of_the_data_that_its_preset_trains_on():
    for reference in read_references():
        assert Path(PRESETS[reference.preset].data_dir).name == DATASETS[reference.preset]


@pytest.mark.parametrize(
    "preset, steps, shard",
    [
        ("gpt2-124m", 19_073, "edufineweb_train_000001.npy"),
        ("gpt2-124m", 38_146, "fineweb-edu_train_000001.npy"),
        ("llmc-124m", 19_700, "fineweb_train_000001.bin"),  # as many as there are in this sample
        ("record8-124m", 4578, "fineweb_train_000001.npy"),
    ],
)
def test_no_verdict_on_other_data_steps_or_batches(preset, steps, shard):
    assert find_reference(preset, steps, 524_288, shard).preset == preset
    other_shard = "fineweb_train_000001.npy" if "edu" in shard else "fineweb-edu_train_000001.npy"
    assert find_reference(preset, steps, 524_288, other_shard) is None
    assert find_reference(preset, steps, 524_288, "books_train_000001.npy") is None
    assert find_reference(preset, steps // 3, 524_288, shard) is None
    assert find_reference(preset, steps, 262_144, shard) is None


@pytest.mark.parametrize("run", ["low", "high"])
@pytest.mark.parametrize("offset", [-0.012, 0, 0.012])  # another seed, or another sample of the validation shard
def test_the_public_runs_are_on_track(run, offset):
    verdicts = judge_curve(lambda step: healthy_loss(step, run) + offset)
    assert len(verdicts) == len(STEPS) and all(verdicts)


@pytest.mark.parametrize("factor", [0.1, 0.3, 0.5])
def test_a_learning_rate_that_is_too_low_is_off_track(factor):
    """Early loss follows the sum of the learning rates so far, so a rate too low is a run that lags behind itself."""
    rates_so_far = np.cumsum([min(1, (step + 1) / 715) for step in range(STEPS[-1] + 1)])

    def lagging_loss(step):
        same_progress = np.searchsorted(rates_so_far, factor * rates_so_far[step])
        # Before the first evaluation that one's loss stands in: the true one would be higher still.
        return healthy_loss(max(STEPS[1], same_progress))

    assert not any(judge_curve(lagging_loss, STEPS[2:21]))  # at every evaluation from step 500 to 5,000


def test_a_learning_rate_that_is_too_high_is_off_track():
    # The loss sticks on the plateau of token frequencies ...
    assert not any(judge_curve(lambda step: max(healthy_loss(step), 7.2), STEPS[1:]))
    # ... or goes up around step 900 and comes back slowly ...
    bump = lambda step: 0.8 * math.exp(-(((step - 900) / 300) ** 2))
    assert not all(judge_curve(lambda step: healthy_loss(step) + bump(step), STEPS[1:8]))
    # ... or stays a little too high to the end.
    assert not any(judge_curve(lambda step: healthy_loss(step) + 0.05, STEPS[6:]))


def test_attention_that_sees_the_future_is_off_track():
    # Far too good from the first evaluation on; also when only a little leaks.
    assert not any(judge_curve(lambda step: 10.9 * math.exp(-step / 150), STEPS[1:]))
    assert not any(judge_curve(lambda step: healthy_loss(step) - 0.25, STEPS[1:]))
    assert not any(judge_curve(lambda step: healthy_loss(step) - 0.05, STEPS[6:]))
    assert "too low" in judge(5000, 2.0) and "future" in judge(5000, 2.0)


def test_attention_that_sees_only_its_own_token_is_off_track():
    loss_of_token_pairs = 5.6  # what single tokens tell about the next one, and no more
    assert not any(judge_curve(lambda step: max(healthy_loss(step), loss_of_token_pairs), STEPS[2:]))


def test_the_line_a_run_prints():
    low, high = expected_range(500)
    assert judge(500, 5.31) == f"step 500: val 5.310, reference {low:.3f} to {high:.3f}: on track"
    assert low < REFERENCE.low[2] <= REFERENCE.high[2] < high
    assert "off track, " in judge(500, 5.9) and "--max-lr" in judge(500, 5.9)
    assert "off track" in judge(500, math.nan) and "off track" in judge(500, math.inf)
    assert "off track" in judge(0, 11.8)  # weights that start too large
    assert judge(100, 8.0) is None and judge(STEPS[-1] + 1, 3.0) is None and judge(-1, 3.0) is None
