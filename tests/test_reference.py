"""evaluation/reference.py tells a healthy run from a sick one."""

import math
from pathlib import Path

import pytest

from evaluation.reference import DATASETS, find_reference, read_references
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


@pytest.mark.parametrize("preset, steps", [
    ("gpt2-124m", 19_073), ("gpt2-124m", 38_146), ("llmc-124m", 19_700), ("record8-124m", 4578),
])  # fmt: skip
def test_a_reference_is_of_the_same_recipe(preset, steps):
    """The second epoch of gpt2-124m has one of its own, from the step on at which it begins."""
    assert Path(PRESETS[preset].data_dir).name == DATASETS[preset]
    found = find_reference(preset, steps, 524_288)
    assert found.preset == preset and found.max_steps == pytest.approx(steps, rel=0.02)
    assert (found.judge(19_072, 3.1) is None) == (steps == 38_146 or preset == "record8-124m")
    for recipe in ((preset, steps // 3, 524_288), (preset, steps, 262_144), ("x", steps, 524_288)):
        assert find_reference(*recipe) is None


@pytest.mark.parametrize("step, loss, is_healthy", [
    (500, 5.31, True), (500, math.nan, False), (0, 11.8, False),
])  # fmt: skip
def test_a_verdict_has_the_loss_and_the_range(step, loss, is_healthy):
    is_on_track, sentence = judge(step, loss)
    low, high = REFERENCE.expected_range(step)
    assert is_on_track == is_healthy and f"{step}: val {loss:.3f}, reference {low:.3f} to {high:.3f}" in sentence
    assert judge(100, 8.0) is judge(-1, 8.0) is None
    assert REFERENCE.expected_range(500) == pytest.approx((5.181, 5.413), abs=1e-3)
