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

import cli
import config
import fineweb
import optim
import runtime
import shards
import tokenizer
from cli import UserError
from config import PRESETS, TrainConfig
from documents import Chunk
from loader import Loader, Order
from model import GPTConfig

# derandomize: the same examples every time, so that a suite that passed passes again
settings.register_profile("steady", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("steady")

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)  # windows of the shards


# ------------------------------------------------------------------------- order of data


@given(SIZES, st.integers(-(2**63), 2**63 - 1), st.booleans(), st.integers(1, 9), st.integers(0, 5))
def test_every_window_comes_once_an_epoch(sizes, seed, shuffle, together, epoch):
    n = sum(sizes)
    found = Order(sizes, seed, shuffle, together).span(epoch * n, n)
    assert sorted(map(tuple, found.tolist())) == [(s, w) for s, size in enumerate(sizes) for w in range(size)]


@given(SIZES, st.integers(0, 2**63 - 1), st.integers(0, 300), st.integers(1, 4), st.data())
def test_a_step_is_a_function_of_seed_and_step_alone(sizes, seed, step, share, data):
    """Whatever the ranks, the micro-batch and what was read before, a step has the same windows in one order."""
    ranks, micro_steps = data.draw(st.sampled_from([1, 2, 3, 4])), data.draw(st.integers(1, 3))
    order = sizes, seed, data.draw(st.booleans()), data.draw(st.integers(1, 9))
    S = ranks * micro_steps * share
    loader = object.__new__(Loader)  # its files are not needed to know its order
    loader.order = Order(*order)
    for other in data.draw(st.lists(st.integers(0, 300), max_size=3)):
        loader.step_windows(other, S, share)
    alone = Order(*order).span(step * S, S)
    parts = [loader.step_windows(step, S, share, rank, ranks) for rank in range(ranks)]  # each (micro_steps, B, 2)
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


@settings(max_examples=40)
@given(
    DOCUMENTS, st.integers(1, 50), st.integers(0, 300), st.integers(1, 5), st.sampled_from(["npy", "bin"]), st.data()
)
def test_shards_joined_are_the_documents(documents, size, limit, chunk, form, data):
    """For any documents, shard size, limit and cut into chunks; also after a stop at any shard."""
    source = {"name": "x", "subset": "", "column": "text", "revision": "r", "files": [{"path": "x", "bytes": 1}]}
    wish = shards.Manifest(source, form, size, limit or None)
    chunks = [
        Chunk(documents[i : i + chunk], len(documents[i : i + chunk]), 1.0) for i in range(0, len(documents), chunk)
    ]
    expected = [t for d in documents for t in (tokenizer.EOT, *d.encode())][: limit or None]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(fineweb, "bulk_encoder", Letters)
        patch.setattr(runtime.os, "fsync", lambda fd: None)
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


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAME = st.from_regex(shards.SHARD_NAME, fullmatch=True).filter(lambda n: len(n.encode()) < 200)
COUNT = st.integers(0, 2**53 - 1)
SHARD = st.builds(
    shards.Shard, NAME, st.integers(1, 2**53 - 1), COUNT, st.from_regex("[0-9a-f]{64}", fullmatch=True),
    st.fixed_dictionaries({"file": COUNT, "token": COUNT}),
)  # fmt: skip
PATHS = st.from_regex(shards.INSIDE, fullmatch=True)
SOURCE = st.fixed_dictionaries(
    {key: TEXT for key in ("name", "subset", "column", "revision")}
    | {"files": st.lists(st.fixed_dictionaries({"path": PATHS, "bytes": COUNT}), max_size=3)}
)
MANIFEST = st.builds(
    shards.Manifest, SOURCE, st.sampled_from(["npy", "bin"]), st.integers(1, 2**53 - 1),
    st.none() | st.integers(1, 2**53 - 1), st.booleans(), st.lists(SHARD, max_size=3, unique_by=lambda s: s.file),
)  # fmt: skip


@settings(max_examples=30)
@given(MANIFEST)
def test_manifest_round_trip_and_no_name_in_it_leads_out(manifest):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime.os, "fsync", lambda fd: None)
        shards.write_manifest(folder, manifest)
        first = Path(folder, shards.MANIFEST).read_bytes()
        assert shards.read_manifest(folder) == manifest
        shards.write_manifest(folder, shards.read_manifest(folder))
        assert Path(folder, shards.MANIFEST).read_bytes() == first
        for name in [s.file for s in manifest.shards] + [f["path"] for f in manifest.source["files"]]:
            inside = Path(folder, "x", name).resolve()
            assert inside.is_relative_to(Path(folder, "x").resolve()) and cli.printable(name) == name


# ------------------------------------------------------------------------- config and schedule


def values(hint):
    """Values of a field's type, the odd ones often among them, and now and then one of another type."""
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if options := get_args(hint):
        return st.one_of(*map(values, options))
    if hint is GPTConfig:
        return st.builds(GPTConfig, **{n: values(h) for n, h in get_type_hints(GPTConfig).items()})
    small = st.integers(-2, 2000)
    return {
        int: small | st.integers(), float: st.floats() | st.floats(0, 1) | small, bool: st.booleans(),
        str: st.text(max_size=8),
    }[hint]  # fmt: skip


ODD = st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2) | st.binary()
HINTS = {name: values(hint) for name, hint in get_type_hints(TrainConfig).items()}
CHANGES = st.lists(st.sampled_from(sorted(HINTS)), max_size=4, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({n: HINTS[n] | (ODD if n != "model" else HINTS[n]) for n in names})
)


@settings(max_examples=250)
@given(st.sampled_from(sorted(PRESETS)), CHANGES)
def test_any_config_is_one_or_is_refused(preset, changes):
    """And one that is accepted survives its way through a checkpoint, and has a horizon and optimizer settings."""
    try:
        cfg = dataclasses.replace(PRESETS[preset], **changes)
    except UserError as e:
        assert str(e)
        with pytest.raises(UserError):
            TrainConfig.from_dict({**PRESETS[preset].to_dict(), **changes})
        return
    assert TrainConfig.from_dict(cfg.to_dict()) == cfg
    assert cfg.horizon(10**6) >= 0 and cfg.sequences_per_step >= 1
    for step in (0, 1, 10**6):
        assert 0 <= optim.lr_factor(step, cfg.horizon(10**6), cfg) <= 1


FLAGS = st.lists(
    st.tuples(st.sampled_from(sorted(n.replace("_", "-") for n in HINTS if n not in ("preset", "model"))),
              st.integers().map(str) | st.floats().map(str) | st.text(max_size=9)), max_size=3,
)  # fmt: skip


@settings(max_examples=25)
@given(FLAGS)
def test_any_flags_are_a_config_or_a_message(flags):
    words = [f"--{name}={value}" for name, value in flags]
    try:
        cfg = config.parse(["quickstart", *words], lambda path: PRESETS["quickstart"].to_dict())
    except (UserError, SystemExit) as e:
        assert e.args != (0,)
    else:
        assert isinstance(cfg, TrainConfig)


LR = st.floats(1e-9, 1e3)


@given(LR, st.floats(0, 1), st.integers(0, 50), st.integers(1, 200), st.sampled_from(["cosine", "trapezoid"]),
       st.floats(0, 1))  # fmt: skip
def test_schedules_are_bounded_smooth_and_end_at_min_lr(max_lr, low, warmup, steps, schedule, cooldown):
    cfg = dataclasses.replace(
        PRESETS["quickstart"], max_lr=max_lr, min_lr=low * max_lr, warmup_steps=warmup, schedule=schedule,
        cooldown=cooldown,
    )  # fmt: skip
    f, floor = [optim.lr_factor(s, steps, cfg) for s in range(steps + 2)], cfg.min_lr / max_lr
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
        assert config.parse_duration(text) >= 0
    except UserError as e:
        assert "3h50m" in str(e)


@given(*[st.integers(0, 10**6)] * 4)
def test_durations_add_up(d, h, m, s):
    assert config.parse_duration(f"{d}d{h}h{m}m{s}s") == 86400 * d + 3600 * h + 60 * m + s
