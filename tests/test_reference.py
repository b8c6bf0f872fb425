"""training/reference.py tells a healthy run from a sick one."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from training.presets import PRESETS
from training.reference import DATASETS, find_reference, read_references

REFERENCE = read_references()[0]  # gpt2-124m's
STEPS = REFERENCE.step.astype(int).tolist()  # at which the public runs were evaluated
judge = REFERENCE.judge


def healthy_loss(step: float, run: str = "low") -> float:
    """Val loss of a public run, also between its evaluations."""
    return float(np.interp(step, STEPS, getattr(REFERENCE, run)))


def judge_curve(loss_at, steps=STEPS) -> list[bool]:
    """Whether a run with the val losses loss_at(step) is on track, at each of the steps where the reference answers."""
    lines = [judge(step, loss_at(step)) for step in steps]
    return [line.endswith("on track") for line in lines if line]


def read_csv(path):
    with open(path) as f:
        return list(csv.DictReader(f))


def test_the_references_are_the_shared_figures(shared_data):
    # gpt2-124m: two runs, a and b, with val losses and HellaSwag.
    for key, low, high in (
        ("val_loss", REFERENCE.low, REFERENCE.high),
        ("hellaswag", REFERENCE.hellaswag_low, REFERENCE.hellaswag_high),
    ):
        pairs = [(float(row[f"{key}_a"]), float(row[f"{key}_b"])) for row in read_csv(shared_data / EDU)]
        assert np.sort(pairs).T.tolist() == [low.tolist(), high.tolist()]

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


EDU = "fineweb_edu_10b_reference.csv"


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
    assert (second_epoch.low[-1], second_epoch.hellaswag_low[-1]) == (3.0167, 0.3172)
    for step in (0, 5000, 19_073, 19_249, 38_147):
        assert second_epoch.judge(step, 3.1) is None
    low, high = second_epoch.expected_range(20_000)
    assert 0.0499 < high - low < 0.08


@pytest.mark.parametrize("preset, steps", [("gpt2-124m", 38_146), ("llmc-124m", 19_700), ("record8-124m", 4578)])
def test_no_verdict_on_another_recipe(preset, steps):
    assert Path(PRESETS[preset].data_dir).name == DATASETS[preset]
    assert find_reference(preset, steps, 524_288).preset == preset
    for recipe in ((preset, steps // 3, 524_288), (preset, steps, 262_144), (["x"], "x", 524_288)):
        assert find_reference(*recipe) is None


@pytest.mark.parametrize("factor", [0.1, 0.3, 0.5])
def test_a_learning_rate_that_is_too_low_is_off_track(factor):
    """Early loss follows the sum of the learning rates so far, so a rate too low is a run that lags behind itself."""
    rates_so_far = np.cumsum([min(1, (step + 1) / 715) for step in range(STEPS[-1] + 1)])

    def lagging_loss(step):
        same_progress = np.searchsorted(rates_so_far, factor * rates_so_far[step])
        # Before the first evaluation that one's loss stands in: the true one would be higher still.
        return healthy_loss(max(STEPS[1], same_progress))

    assert not any(judge_curve(lagging_loss, STEPS[2:21]))  # at every evaluation from step 500 to 5,000


def test_other_sicknesses_are_off_track():
    def bump(step):
        return 0.8 * math.exp(-(((step - 900) / 300) ** 2))

    # A rate that is too high: the loss sticks on the plateau of token frequencies, or goes up and comes back slowly,
    # or stays a little too high to the end.
    assert not any(judge_curve(lambda step: max(healthy_loss(step), 7.2), STEPS[1:]))
    assert not all(judge_curve(lambda step: healthy_loss(step) + bump(step), STEPS[1:8]))
    assert not any(judge_curve(lambda step: healthy_loss(step) + 0.05, STEPS[6:]))
    # Attention that sees the future, or a little of it, or only its own token.
    assert not any(judge_curve(lambda step: 10.9 * math.exp(-step / 150), STEPS[1:]))
    assert not any(judge_curve(lambda step: healthy_loss(step) - 0.05, STEPS[6:]))
    assert not any(judge_curve(lambda step: max(healthy_loss(step), 5.6), STEPS[2:]))


def test_the_line_a_run_prints():
    low, high = REFERENCE.expected_range(500)
    assert judge(500, 5.31) == f"step 500: val 5.310, reference {low:.3f} to {high:.3f}: on track"
    for step, loss in ((500, 5.9), (500, math.nan), (500, math.inf), (0, 11.8)):
        assert "off track" in judge(step, loss)
    assert judge(100, 8.0) is None and judge(STEPS[-1] + 1, 3.0) is None and judge(-1, 3.0) is None
