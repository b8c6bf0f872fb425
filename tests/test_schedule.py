"""Schedules are the published curves; test_golden.py has each rate."""

import dataclasses
import math
from itertools import pairwise

import pytest
from helpers import choices

from training import schedule
from training.config import TrainConfig
from training.presets import PRESETS

BASE = PRESETS["gpt2-124m"]


def test_the_cosine_is_build_nanogpts():
    def lr(step):
        return BASE.max_lr * schedule.lr_factor(step, 19073, BASE)

    assert lr(0) == pytest.approx(6e-4 / 715)
    assert lr(714) == pytest.approx(6e-4) and lr(715) == pytest.approx(6e-4)
    assert lr(715 + (19073 - 715) / 2) == pytest.approx((6e-4 + 6e-5) / 2)
    assert lr(3000) == pytest.approx(6e-5 + 0.5 * (1 + math.cos(math.pi * 2285 / 18358)) * 5.4e-4)
    assert lr(19073) == pytest.approx(6e-5)


def test_the_trapezoid_is_flat_then_linear():
    cfg = dataclasses.replace(BASE, schedule="trapezoid", warmup_steps=10, cooldown=0.25, min_lr=0.0)
    factors = [schedule.lr_factor(step, 100, cfg) for step in range(101)]
    assert factors[9] == 1 and factors[10:76] == [1] * 66
    assert factors[100] == 0 and factors[88] == pytest.approx(12 / 25)


@pytest.mark.parametrize("name", choices(TrainConfig, "schedule"))
@pytest.mark.parametrize("warmup, cooldown", [(0, 0.0), (5, 0.5), (20, 1.0), (60, 0.2)])
def test_schedules_rise_then_fall_to_min_lr(name, warmup, cooldown):
    cfg = dataclasses.replace(BASE, schedule=name, warmup_steps=warmup, cooldown=cooldown)
    factors = [schedule.lr_factor(step, 50, cfg) for step in range(52)]
    assert all(a < b for a, b in pairwise(factors[: min(warmup, 50)]))
    assert all(1 + 1e-12 >= a >= b - 1e-12 >= 0.1 - 2e-12 for a, b in pairwise(factors[warmup:51]))
    assert factors[50] == factors[51] == pytest.approx(0.1)
