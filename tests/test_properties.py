"""Properties that hold for any input: order of data, schedules.

hypothesis draws the inputs. When a property fails it reports the smallest input that it found.
"""

import dataclasses
import os
from itertools import pairwise

import numpy as np
import pytest
from helpers import choices
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokens.loader import DataOrder, Loader
from training.config import TrainConfig
from training.presets import PRESETS
from training.schedule import lr_factor

# Other examples at each run; in continuous integration (CI) always the same, so that a suite that passed passes again.
is_ci = bool(os.environ.get("CI"))
settings.register_profile("ours", derandomize=is_ci, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ours")

# The schedules that a user may choose: a new one is tested as soon as TrainConfig names it.
SCHEDULES = choices(TrainConfig, "schedule")

# ------------------------------------------------------------------------- order of data

ORDERS = st.builds(
    DataOrder,
    sequences_per_shard=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    seed=st.integers(-(2**63), 2**63 - 1),
    shuffle=st.booleans(),
    shards_per_group=st.integers(1, 9),
)


@given(ORDERS, st.integers(0, 5))
def test_every_sequence_comes_once_an_epoch(order, epoch):
    n = order.sequences_per_epoch
    found = order.span(epoch * n, n)  # (n, 2): shard, sequence
    expected = [(shard, i) for shard, size in enumerate(order.sequences_per_shard) for i in range(size)]
    assert sorted(map(tuple, found.tolist())) == expected


FEW = st.integers(1, 4)


@given(ORDERS, st.integers(0, 300), FEW, FEW, FEW, st.integers(0, 300))
def test_a_step_is_a_function_of_seed_and_step_alone(order, step, B, ranks, micro_steps, other_step):
    """Whatever the ranks, the micro-batch and what was read before, a step has the same sequences in one order."""
    count = ranks * micro_steps * B
    loader = object.__new__(Loader)  # its files are not needed to know its order
    loader.order = order
    expected = order.span(step * count, count)

    # Another step is read in between, which must change nothing.
    loader.step_sequences(other_step, count, B)

    # Each rank has (micro_steps, B, 2). In the order of micro-steps, then ranks, they are the whole step.
    parts = [loader.step_sequences(step, count, B, rank, ranks) for rank in range(ranks)]
    assert (np.stack(parts, axis=1).reshape(-1, 2) == expected).all()


# ------------------------------------------------------------------------- schedule


FRACTIONS = st.floats(0, 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=60)
@given(st.floats(1e-9, 1e3), FRACTIONS, st.integers(0, 50), st.integers(1, 200), FRACTIONS)
def test_schedules_rise_then_fall_to_min_lr(schedule, max_lr, floor, warmup, total_steps, cooldown):
    rates = {"max_lr": max_lr, "min_lr": floor * max_lr, "warmup_steps": warmup, "cooldown": cooldown}
    cfg = dataclasses.replace(PRESETS["quickstart"], schedule=schedule, **rates)
    factors = [lr_factor(step, total_steps, cfg) for step in range(total_steps + 2)]
    floor = cfg.min_lr / max_lr  # as it is computed from what was rounded

    assert all(0 <= factor <= 1 + 1e-12 for factor in factors)
    assert all(a < b for a, b in pairwise(factors[: min(warmup, total_steps)]))
    assert all(a >= b - 1e-12 >= floor - 2e-12 for a, b in pairwise(factors[warmup : total_steps + 1]))
    assert factors[total_steps] == factors[total_steps + 1] == pytest.approx(floor)
