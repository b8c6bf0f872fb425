"""evaluation/reference.py tells a healthy run from a sick one."""

import math
from pathlib import Path

import pytest

from evaluation import verdict
from evaluation.reference import DATASETS, find_reference, read_references
from training.presets import PRESETS
from training.schedule import at

REFERENCE = read_references()[0]  # gpt2-124m's


def test_a_reference_accepts_its_runs_and_none_broken():
    for reference in read_references():
        for step, lowest, highest in zip(reference.step, reference.low, reference.high, strict=True):
            low, high = reference.expected_range(step)
            assert low <= lowest - 0.012 and highest + 0.012 <= high  # another seed
            # 0.3 nats too high is noticed once the steep part, and the loose step 0, are over.
            assert step == 0 or high > 5 or high < highest + 0.3
        # In the second half 0.1 is, too: attention that sees a little of the future, or a rate a little too high.
        for step in reference.step[len(reference.step) // 2 :]:
            low, high = reference.expected_range(step)
            assert high - low < 0.1 and low > 2
        assert reference.expected_range(reference.step[-1] + 1) is None


@pytest.mark.parametrize("preset, steps", [
    ("gpt2-124m", 19_073), ("gpt2-124m", 38_146), ("llmc-124m", 19_700), ("record8-124m", 4578),
])  # fmt: skip
def test_a_reference_is_of_the_same_recipe(preset, steps):
    """The second epoch of gpt2-124m has one of its own, from the step on at which it begins."""
    assert Path(PRESETS[preset].data_dir).name == DATASETS[preset]
    found = find_reference(preset, steps, 524_288)
    assert found.preset == preset and found.max_steps == pytest.approx(steps, rel=0.02)
    assert (found.expected_range(19_072) is None) == (steps == 38_146 or preset == "record8-124m")
    for recipe in ((preset, steps // 3, 524_288), (preset, steps, 262_144), ("x", steps, 524_288)):
        assert find_reference(*recipe) is None


@pytest.mark.parametrize("step, loss, said", [
    (500, 5.31, "on track"), (500, 5.1, "off track, 0.081 too low"), (500, math.nan, "off"), (0, 11.8, "off"),
])  # fmt: skip
def test_a_verdict_has_the_loss_and_the_range(monkeypatch, capsys, step, loss, said):
    cfg = PRESETS["gpt2-124m"]
    monkeypatch.setattr(verdict, "choose_reference", lambda cfg, max_steps: REFERENCE)
    assert not verdict.Verdict(cfg, 19_073).is_lost(at(step, cfg, 19_073), {"val_loss": loss})
    low, high = REFERENCE.expected_range(step)
    assert f"{step}: val {loss:.3f}, reference {low:.3f} to {high:.3f}: {said}" in capsys.readouterr().out
    assert REFERENCE.expected_range(100) is REFERENCE.expected_range(-1) is None
    assert REFERENCE.expected_range(500) == pytest.approx((5.181, 5.413), abs=1e-3)
