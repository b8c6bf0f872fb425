"""Properties that hold for any input: order of data, schedules.

hypothesis draws the inputs. When a property fails it reports the smallest input that it found.
"""

import dataclasses
import inspect
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

# A value for every argument of DataOrder; one that is added needs its own here.
ORDER_VALUES = {
    "sequences_per_shard": st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "shuffle": st.booleans(),
    "shards_per_group": st.integers(1, 9),
}
ORDERS = st.fixed_dictionaries({name: ORDER_VALUES[name] for name in inspect.signature(DataOrder).parameters})


@given(ORDERS, st.integers(0, 5))
def test_every_sequence_comes_once_an_epoch(order, epoch):
    sizes = order["sequences_per_shard"]
    n = sum(sizes)
    found = DataOrder(**order).span(epoch * n, n)  # (n, 2): shard, sequence
    expected = [(shard, sequence) for shard, size in enumerate(sizes) for sequence in range(size)]
    assert sorted(map(tuple, found.tolist())) == expected


@given(ORDERS, st.integers(0, 300), st.integers(1, 4), st.data())
def test_a_step_is_a_function_of_seed_and_step_alone(order, step, B, data):
    """Whatever the ranks, the micro-batch and what was read before, a step has the same sequences in one order."""
    ranks = data.draw(st.sampled_from([1, 2, 3, 4]))
    micro_steps = data.draw(st.integers(1, 3))
    sequences_per_step = ranks * micro_steps * B
    loader = object.__new__(Loader)  # its files are not needed to know its order
    loader.order = DataOrder(**order)

    # Other steps are read first, which must change nothing.
    for other_step in data.draw(st.lists(st.integers(0, 300), max_size=3)):
        loader.step_sequences(other_step, sequences_per_step, B)

    # Each rank has (micro_steps, B, 2). In the order of micro-steps, then ranks, they are the whole step.
    parts = [loader.step_sequences(step, sequences_per_step, B, rank, ranks) for rank in range(ranks)]
    of_all_ranks = np.stack(parts, axis=1).reshape(-1, 2)  # (sequences_per_step, 2)
    of_one_reader = DataOrder(**order).span(step * sequences_per_step, sequences_per_step)
    assert (of_all_ranks == of_one_reader).all()


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
