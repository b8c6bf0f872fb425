"""lifecycle/reference.py tells a healthy run from a sick one."""

import math
from pathlib import Path

import pytest

from lifecycle.reference import DATASETS, find_reference, read_references
from training.presets import PRESETS

REFERENCE = read_references()[0]  # gpt2-124m's
judge = REFERENCE.judge


def test_a_reference_accepts_its_runs_and_none_broken():
    for reference in read_references():
        for step, low, high in zip(reference.step, reference.low, reference.high, strict=True):
            for loss in (low - 0.012, low, high, high + 0.012):  # another seed
                assert reference.judge(step, loss)[0]
            # 0.3 nats too high is noticed once the steep part, and the loose step 0, are over.
            if step > 0 and reference.expected_range(step)[1] <= 5:
                assert not reference.judge(step, high + 0.3)[0]
        # In the second half 0.1 is, too: attention that sees a little of the future, or a rate a little too high.
        for step in reference.step[len(reference.step) // 2 :]:
            low, high = reference.expected_range(step)
            assert high - low < 0.1
        assert not reference.judge(reference.step[-1], 2.0)[0]
        assert reference.judge(reference.step[-1] + 1, 3.0) is None


def test_a_public_run_that_went_wrong_is_off_track_at_its_first_evaluation():
    """It had the recipe of gpt2-124m, and cost $61: https://debtirthasaha.github.io/blog/2026/gpt2-124m/"""
    for step, loss in {250: 6.43, 500: 5.824, 1000: 4.8817, 5000: 3.83, 10_000: 3.5895, 19_072: 3.3969}.items():
        assert not judge(step, loss)[0]


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
    for recipe in ((preset, steps // 3, 524_288), (preset, steps, 262_144), ("x", steps, 524_288)):
        assert find_reference(*recipe) is None


def test_the_line_has_the_loss_and_the_range():
    assert REFERENCE.expected_range(500) == pytest.approx((5.181, 5.413), abs=1e-3)
    is_on_track, sentence = judge(500, 5.31)
    assert is_on_track and all(value in sentence for value in ("500", "5.310", "5.181", "5.413"))
    for step, loss in ((500, 5.9), (500, math.nan), (0, 11.8)):
        assert not judge(step, loss)[0]
    assert judge(100, 8.0) is judge(-1, 8.0) is None
