"""Schedules are the published curves; test_golden.py has each rate."""

from dataclasses import replace

import pytest
from helpers import choices

from training import schedule
from training.config import TrainConfig
from training.presets import PRESETS

COSINE = PRESETS["gpt2-124m"]
TRAPEZOID = replace(COSINE, schedule="trapezoid", warmup_steps=0, cooldown=0.25, min_lr=0.0)


@pytest.mark.parametrize("cfg, total_steps, factors", [
    # build-nanogpt's: up to 1, then half a cosine down to a tenth.
    (COSINE, 19073, {0: 1 / 715, 714: 1, 715: 1, 9894: 0.55, 19073: 0.1, 19074: 0.1}),
    (replace(COSINE, warmup_steps=0.1, min_lr=0.0), 50, {0: 0.2, 4: 1, 5: 1, 50: 0}),
    (TRAPEZOID, 100, {0: 1, 75: 1, 88: 12 / 25, 100: 0}),
    (replace(TRAPEZOID, cooldown=0.0), 100, {99: 1, 100: 0}),
])  # fmt: skip
def test_schedules_are_the_published_curves(cfg, total_steps, factors):
    assert {step: schedule.lr_factor(step, total_steps, cfg) for step in factors} == pytest.approx(factors)


@pytest.mark.parametrize("name", choices(TrainConfig, "schedule"))
def test_a_warm_up_longer_than_the_run_still_ends_low(name):
    cfg = replace(COSINE, schedule=name, warmup_steps=60)
    factors = [schedule.lr_factor(step, 50, cfg) for step in range(51)]
    assert factors == pytest.approx([(step + 1) / 60 for step in range(50)] + [0.1])
