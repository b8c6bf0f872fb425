"""Schedules are the published curves, and every rate reaches its parameters."""

import dataclasses
import math

import pytest
import torch
from helpers import CPU

from model import GPT
from training import optim, schedule
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


def test_each_rate_of_the_speedrun_arrives():
    speedrun = PRESETS["speedrun-124m"]
    small = dataclasses.replace(speedrun.model, n_layer=2, n_head=2, n_embd=16, vocab_size=64)
    cfg = dataclasses.replace(speedrun, model=small)
    torch.manual_seed(0)
    named = dict(GPT(small).named_parameters())
    optimizers = optim.build_optimizers(named, cfg, CPU)

    assert schedule.set_learning_rates(optimizers, 0, 3250, cfg) == 0.004

    rate_of = {p: group["lr"] for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, p in named.items():
        expected = 0.004
        if ".wte." in name:
            expected = 0.7
        elif p.dim() < 2:
            expected = 0.015
        elif ".h." in name:
            expected = 0.025
        assert rate_of[p] == pytest.approx(expected), name
    assert optimizers[0].param_groups[0]["betas"] == (0.8, 0.95)
