"""Properties that hold for any input: order of data, shard writer, config, schedules, manifest, durations."""

import dataclasses
import math
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fineweb
from model import GPTConfig
from system import cli, machine
from system.cli import UserError
from system.units import parse_duration
from tokens import shards, tokenizer
from tokens.documents import Chunk
from tokens.loader import DataOrder, Loader
from training import presets, schedule
from training.config import TrainConfig
from training.presets import PRESETS

# derandomize: the same examples every time, so that a suite that passed passes again
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("steady")

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)  # windows of the shards


# ------------------------------------------------------------------------- order of data


@given(SIZES, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.integers(1, 9), st.integers(0, 5))
def test_every_window_comes_once_an_epoch(sizes, seed, shuffle, together, epoch):
    n = sum(sizes)
    found = DataOrder(sizes, seed, shuffle, together).span(epoch * n, n)
    assert sorted(map(tuple, found.tolist())) == [(s, w) for s, size in enumerate(sizes) for w in range(size)]


@given(SIZES, st.integers(0, 2**63 - 1), st.integers(0, 300), st.integers(1, 4), st.data())
def test_a_step_is_a_function_of_seed_and_step_alone(sizes, seed, step, share, data):
    """Whatever the ranks, the micro-batch and what was read before, a step has the same windows in one order."""
    ranks, micro_steps = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.integers(1, 3))
    order = sizes, seed, data.draw(st.booleans()), data.draw(st.integers(1, 9))
    S = ranks * micro_steps * share
    loader = object.__new__(Loader)  # its files are not needed to know its order
    loader.order = DataOrder(*order)
    for other in data.draw(st.lists(st.integers(0, 300), max_size=3)):
        loader.step_sequences(other, S, share)
    alone = DataOrder(*order).span(step * S, S)
    parts = [loader.step_sequences(step, S, share, rank, ranks) for rank in range(ranks)]  # each (micro_steps, B, 2)
    together = np.stack(parts, axis=1).reshape(-1, 2)
    assert (together == alone).all()


# ------------------------------------------------------------------------- shard writer and manifest


class Letters:
    """An encoder for which a letter is a token: what fineweb.py asks of gigatoken, and quick."""

    def encode_batch(self, texts):
        ids = [np.frombuffer(t.encode(), np.uint8) for t in texts]
        result = type("Result", (), {})()
        result.layout = type("Layout", (), {})()
        result.layout.offsets = type("Buffer", (), {"data": np.cumsum([0, *map(len, ids)])})
        result.layout.content = type("Buffer", (), {"data": np.concatenate([*ids, np.zeros(0, np.uint8)])})
        return result


DOCUMENTS = st.lists(st.integers(0, 30).map(lambda n: "abcdefghijklmnopqrstuvwxyzabcd"[:n]), min_size=1, max_size=20)


FORM = st.sampled_from(["npy", "bin"])


@settings(max_examples=40)
@given(DOCUMENTS, st.integers(1, 50), st.integers(0, 300), st.integers(1, 5), FORM, st.data())
def test_shards_joined_are_the_documents(documents, size, limit, chunk, form, data):
    """For any documents, shard size, limit and cut into chunks; also after a stop at any shard."""
    source = {"name": "x", "subset": "", "column": "text", "revision": "r", "files": [{"path": "x", "bytes": 1}]}
    wish = shards.Manifest(source, form, size, limit or None)
    cuts = [documents[i : i + chunk] for i in range(0, len(documents), chunk)]
    chunks = [Chunk(texts, len(texts), 1.0) for texts in cuts]
    expected = [t for d in documents for t in (tokenizer.EOT, *d.encode())][: limit or None]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "bulk_encoder", Letters)
        patch.setattr(machine.os, "fsync", lambda fd: None)
        made = fineweb.write_shards(chunks, Path(folder), "x", wish, lambda *_: None)
        parts = [np.array(shards.read_shard(Path(folder, s.file))) for s in made.shards]
        assert np.concatenate(parts).tolist() == expected
        assert {len(p) for p in parts[:-1]} <= {size} and 1 <= len(parts[-1]) <= size
        assert [s.documents for s in made.shards] == [int((p == tokenizer.EOT).sum()) for p in parts]
        assert shards.read_manifest(folder) == made
        kept = data.draw(st.integers(0, len(made.shards)))
        again = dataclasses.replace(made, shards=made.shards[:kept])
        if kept < len(made.shards):
            assert fineweb.write_shards(chunks, Path(folder), "x", again, lambda *_: None) == made


NAME = st.from_regex(shards.SHARD_NAME, fullmatch=True).filter(lambda n: len(n.encode()) < 200)


@given(NAME | st.from_regex(shards.INSIDE, fullmatch=True))
def test_no_name_that_a_manifest_may_hold_leads_out_or_drives_a_terminal(name):
    assert Path("/x", name).resolve().is_relative_to("/x") and cli.printable(name) == name


# ------------------------------------------------------------------------- config and schedule


def values(hint):
    """Values of a field's type, the odd ones often among them."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if options := get_args(hint):
        return st.one_of(*map(values, options))
    whole, real = st.integers(-2, 2000) | st.integers(), st.floats(allow_infinity=False) | st.floats(0, 1)
    return {int: whole, float: real, bool: st.booleans(), str: st.text(max_size=8)}[hint]


def changes(cls):
    """Some fields of a dataclass, with values of their types."""
    hints = {name: values(hint) for name, hint in get_type_hints(cls).items() if name != "model"}
    names = st.lists(st.sampled_from(sorted(hints)), max_size=4, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: hints[name] for name in chosen}))


@settings(max_examples=200)
@given(st.sampled_from(sorted(PRESETS)), changes(TrainConfig))
def test_any_config_is_one_or_is_refused(preset, changed):
    """And one that is accepted survives its way through a checkpoint, and has a horizon and optimizer settings."""
    try:
        cfg = dataclasses.replace(PRESETS[preset], **changed)
    except UserError as e:
        assert str(e)
        with pytest.raises(UserError):
            TrainConfig.from_dict({**PRESETS[preset].to_dict(), **changed})
        return
    assert TrainConfig.from_dict(cfg.to_dict()) == cfg
    steps = cfg.total_steps(cfg.sequences_per_step)
    assert steps >= 1 and cfg.sequences_per_step >= 1
    for step in (0, 1, 10**6):
        assert 0 <= schedule.lr_factor(step, steps, cfg) <= 1


@settings(max_examples=100)
@given(changes(GPTConfig))
def test_any_network_is_one_or_is_refused(changed):
    try:
        assert GPTConfig(**changed).head_size >= 1
    except ValueError as e:
        assert str(e)


FIELDS = {f.name for f in dataclasses.fields(TrainConfig)} - {"preset", "model"}
FLAGS = st.lists(
    st.tuples(st.sampled_from(sorted(name.replace("_", "-") for name in FIELDS)),
              st.integers().map(str) | st.floats().map(str) | st.text(max_size=9)), max_size=3,
)  # fmt: skip


@settings(max_examples=25)
@given(FLAGS)
def test_any_flags_are_a_config_or_a_message(flags):
    words = [f"--{name}={value}" for name, value in flags]
    try:
        cfg = presets.parse(["quickstart", *words], lambda path: PRESETS["quickstart"].to_dict())
    except (UserError, SystemExit) as e:
        assert e.args != (0,)
    else:
        assert isinstance(cfg, TrainConfig)


LR = st.floats(1e-9, 1e3)


SHARE = st.floats(0, 1)


@given(LR, SHARE, st.integers(0, 50), st.integers(1, 200), st.sampled_from(["cosine", "trapezoid"]), SHARE)
def test_schedules_are_bounded_smooth_and_end_at_min_lr(max_lr, low, warmup, steps, schedule, cooldown):
    rates = {"max_lr": max_lr, "min_lr": low * max_lr, "warmup_steps": warmup, "cooldown": cooldown}
    cfg = dataclasses.replace(PRESETS["quickstart"], schedule=schedule, **rates)
    f, floor = [schedule.lr_factor(s, steps, cfg) for s in range(steps + 2)], cfg.min_lr / max_lr
    assert all(0 <= x <= 1 + 1e-12 for x in f) and all(x >= floor - 1e-12 for x in f[warmup:])
    risen = f[: min(warmup, steps + 2)]
    assert risen == sorted(risen) and len(set(risen)) == len(risen)
    if warmup <= steps:
        assert f[steps] == f[steps + 1] == pytest.approx(floor)
        rest = f[warmup : steps + 1]
        assert all(a >= b - 1e-12 for a, b in pairwise(rest))
        fall = steps - warmup if schedule == "cosine" else cooldown * steps
        jump = max((a - b for a, b in pairwise(rest)), default=0)
        assert jump <= (1 - floor) * min(1, math.pi / 2 / max(1, fall)) + 1e-9


@given(st.text(max_size=12) | st.from_regex(r"(\d{1,12}[dhms.]?){0,4}", fullmatch=True))
def test_a_duration_is_seconds_or_a_message(text):
    try:
        assert parse_duration(text) >= 0
    except UserError as e:
        assert "3h50m" in str(e)
