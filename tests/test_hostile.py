"""Hostile files: whatever a stranger's file holds, it is read right or refused in one short line, and runs no code.

FORMATS names a file of each format, and how it is read. Each is mutated, always in the same ways:

    HOSTILE_INPUTS=2000 python -m pytest tests/test_hostile.py     # more of them; the first ones are the same
"""

import io
import json
import math
import os
import pickle
import random
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from corpora import WRITERS, read_documents, write_documents
from faults import hub_server
from helpers import (
    CPU,
    TINY_FLAGS,
    make_hellaswag_rows,
    make_shards,
    parse_config,
    write_jsonl,
)

import hellaswag
import plots
from lifecycle import resume
from lifecycle.run import Run
from model import GPT, GPTConfig
from system.cli import UserError
from tokens import shards
from tokens.loader import Loader
from training import schedule
from training.step import Trainer
from weights import convert
from weights.open_model import open_model

INPUTS = int(os.environ.get("HOSTILE_INPUTS", 10))  # for each format
TEXTS = [f"document {i} of words, ünïcode 🙂 and\nlines " * (i % 5) for i in range(40)]


# ------------------------------------------------------------------------- good files, and what reads them


@pytest.fixture(scope="module")
def good(tmp_path_factory, one_run) -> Path:
    """A folder with a good file of each format."""
    root = tmp_path_factory.mktemp("good")
    for name in ("bin", "rows", "text", "hf", "old"):
        (root / name).mkdir()
    make_shards(root / "data", size=300)
    shards.write_shard(root / "bin/toy_train_000001.bin", np.arange(300))
    shutil.copytree(one_run, root / "run", ignore=shutil.ignore_patterns("*_0000[369].pt"))
    write_jsonl(root / "rows/rows.jsonl", make_hellaswag_rows(4))
    for suffix in WRITERS:
        write_documents(root / f"text/a{suffix}", TEXTS)

    model = GPT(GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16))
    convert.save_hf(model, root / "hf/safe")
    (root / "hf/safe/vocab.json").write_text('{"!": 0, "<|user|>": 50257}')
    shutil.copytree(root / "hf/safe", root / "parts/safe")
    (root / "parts/safe/model.safetensors").rename(root / "parts/safe/part.safetensors")
    (root / "parts/safe/model.safetensors.index.json").write_text('{"weight_map": {"x": "part.safetensors"}}')
    old = {"model": model.state_dict(), "model_args": {**vars(model.config), "dropout": 0.0}, "iter_num": 5}
    torch.save(old, root / "old/ckpt.pt")
    return root


def to_bytes(content: object) -> bytes:
    """Tensors and containers as bytes, to compare."""
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def read_model(path: Path) -> bytes:
    """Whatever opens a model also runs it."""
    if path.parent.name == "old":
        model, _ = convert.load_old(path)
    else:
        model = open_model(path if path.suffix == ".pt" else path.parent)
    with torch.no_grad():
        model(torch.zeros(1, 2, dtype=torch.int64))
    return to_bytes(model.state_dict())


def read_optim(path: Path) -> bytes:
    """As a run that resumes, up to its first update."""
    cfg = parse_config("quickstart", *TINY_FLAGS, "--out-dir", path.parent, "--resume", "auto")
    saved = resume.find_checkpoint(cfg)
    assert saved
    data = SimpleNamespace(order=SimpleNamespace(sequences_per_epoch=99), fingerprint=lambda: saved["data"])
    resume.check_drift(cfg, saved, data)
    model = open_model(saved["model_file"])
    trainer = Trainer(model, cfg, CPU)
    resume.load_state(saved, trainer)
    state = to_bytes(resume.train_state(Run(cfg, CPU, model, None, None, "", 0, 12), saved["step"], trainer))
    schedule.set_learning_rates(trainer.optimizers, saved["step"], 12, cfg)
    sum(p.sum() for p in model.parameters()).backward()
    trainer.update()
    return state


def read_data(path: Path) -> bytes:
    """As training reads it, and as fineweb.py --verify does."""
    loader = Loader(path.parent, "train", T=16, vocab_size=50257)
    loader.fingerprint()
    shards.verify(path.parent)
    return loader.read(loader.order.span(0, loader.order.sequences_per_epoch)).tobytes()


FORMATS = {
    "run/model_00012.pt": read_model,
    "run/optim_00012.pt": read_optim,
    "data/toy_train_000001.npy": read_data,
    "data/manifest.json": read_data,
    "bin/toy_train_000001.bin": read_data,
    "run/metrics.jsonl": lambda path: plots.read_curves(path.parent),
    "run/config.json": lambda path: plots.read_curves(path.parent),
    "rows/rows.jsonl": hellaswag.load_examples,
    **{f"text/a{suffix}": read_documents for suffix in WRITERS},
    "hf/safe/config.json": read_model,
    "hf/safe/model.safetensors": read_model,
    "hf/safe/vocab.json": read_model,
    "parts/safe/model.safetensors.index.json": read_model,
    "old/ckpt.pt": read_model,
}
# Formats in which each byte counts: CRC and sha256 find whatever has changed.
CHECKED = ("run/model_00012.pt", "run/optim_00012.pt", "data/toy_train_000001.npy")


def read_or_refuse(name: str, path: Path) -> object:
    """What a file holds, or None if it is refused as it should be."""
    try:
        return FORMATS[name](path)
    except UserError as e:
        message = str(e).replace(str(path.parent.parent), "")
        assert "\n" not in message and len(message) <= 600, message


# ------------------------------------------------------------------------- mutations

DEEP = json.loads("[" * 300 + "]" * 300)
ODD_VALUES = [-1, 0, 1, 2**31, 2**63, 10**400, 1.5, 1e308, math.inf, math.nan, None, True, [], {}, ["x"], DEEP]
ODD_VALUES += ["", "x" * 999, "../x", "\x1b[2J", "\ud800", "\0", "a\nb"]
ODD_TENSORS = [torch.Tensor.char, torch.Tensor.cfloat, torch.Tensor.to_sparse, torch.atleast_3d, torch.isnan]
LONG = [b"[" * 100_000, b"9" * 5000, b"1e999", b'"' + b"a" * 300_000 + b'"']


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, overwritten, inserted, or cut, often near the ends, where headers are."""
    size = len(data)
    at = rng.choice([rng.randrange(size), rng.randrange(min(size, 200)), size - 1 - rng.randrange(min(size, 600))])
    length = rng.choice([1, 2, 8, 64])
    flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in data[at : at + length])
    new = rng.choice([flipped, flipped, rng.randbytes(length), bytes(length), b"\xff" * length, b"", *LONG])
    end = rng.choice([at, at + length, at + length, at + length, size])
    return data[:at] + new + data[end:]


def mutate_tree(rng: random.Random, tree: object) -> object:
    """A copy of nested containers, in which a value or a key is another one, gone or doubled."""
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.15:
        if isinstance(tree, torch.Tensor) and rng.random() < 0.8:
            return rng.choice(ODD_TENSORS)(tree)
        return rng.choice(ODD_VALUES)
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    key, value = items.pop(rng.randrange(len(items)))
    others = [[], [(key, value)] * 2, [(rng.choice(["", "x", 3, None]), value)], [(key, mutate_tree(rng, value))]]
    items += rng.choices(others, [1, 1, 1, 9])[0]
    return dict(items) if isinstance(tree, dict) else [value for _, value in items]


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Another value in a JSON text, or in a line of JSON lines."""
    lines = data.splitlines() if data.startswith(b'{"') else [data]
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(mutate_tree(rng, json.loads(lines[at]))).encode()
    if rng.random() < 0.2:
        lines[at] = re.sub(rb"\d+", lambda _: rng.choice(LONG), lines[at], count=1)
    return b"\n".join(lines) + b"\n"


def mutate_content(rng: random.Random, path: str, data: bytes) -> bytes:
    """A sound file that holds something else."""
    if path.endswith((".json", ".jsonl")):
        return mutate_json(rng, data)
    if path.endswith(".pt"):
        return to_bytes(mutate_tree(rng, torch.load(io.BytesIO(data), weights_only=True)))
    if path.endswith(".safetensors"):
        # 8 bytes with the length of a JSON header, the header, tensors.
        end = 8 + int.from_bytes(data[:8], "little")
        header = mutate_json(rng, data[8:end])
        return len(header).to_bytes(8, "little") + header + data[end:]
    return mutate_bytes(rng, data)


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutated_file_is_read_right_or_refused(good, tmp_path, name):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    path = tmp_path / name
    data = path.read_bytes()
    content = read_or_refuse(name, path)

    for number in range(INPUTS):
        print("input", number)  # pytest shows it if the test fails
        rng = random.Random(f"{name} {number}")
        is_damage = rng.random() < 0.5
        path.write_bytes(mutate_bytes(rng, data) if is_damage else mutate_content(rng, name, data))
        found = read_or_refuse(name, path)
        if is_damage and name in CHECKED:
            assert found in (None, content)


# ------------------------------------------------------------------------- code


class Bomb:
    """Pickled, it makes a folder when it is loaded."""

    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def bomb(tmp_path):
    """A Bomb that is shown to work. The test fails at its end if it has gone off."""
    mark = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Bomb(mark)))
    mark.rmdir()
    yield Bomb(mark)
    assert not mark.exists(), "pickled code was run"


@pytest.mark.parametrize("name", FORMATS)
def test_a_pickle_in_place_of_any_file_is_not_run(good, bomb, tmp_path, name):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, np.array([bomb] * 9, dtype=object), allow_pickle=True)
    torch.save({"format": 1, "model": {"transformer.wte.weight": bomb}, "step": 2, "config": bomb}, archive)

    # torch's files have protocol 2, Python's own default is newer.
    for data in (pickle.dumps(bomb, 2), pickle.dumps(bomb, 5), array.getvalue(), archive.getvalue()):
        (tmp_path / name).write_bytes(data)
        read_or_refuse(name, tmp_path / name)


def test_a_pickle_in_a_checkpoint_runs_in_no_script(good, one_run, bomb, expect_failure, tmp_path):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    run, path, new = tmp_path / "run", tmp_path / "run/model_00012.pt", tmp_path / "new"
    torch.save({**torch.load(path, weights_only=True), "config": bomb}, path)

    train = ("train_gpt2.py", "quickstart", *TINY_FLAGS, "--data-dir", one_run.parent / "tiny")
    for command in (
        ("infer.py", path, "Hi"),
        ("hellaswag.py", "--model", run, "--data", tmp_path / "rows/rows.jsonl"),
        ("hub.py", "export", path, new),
        ("hub.py", "import", path, new),
        (*train, "--out-dir", new, "--init-from", path),
        (*train, "--out-dir", run, "--resume", "auto"),
    ):
        expect_failure(*command, mentions=[path.name])


def test_modules_beside_the_weights_are_never_imported(good, bomb, tmp_path, monkeypatch):
    """Whatever config.json names; and transformers, which follows such names, is never given it."""
    folder = shutil.copytree(good / "hf/safe", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.X"}}
    config |= {"trust_remote_code": True, "attn_implementation": "evil/kernel", "custom_generate": "evil/generate"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "model.py", "__init__.py"):
        (folder / name).write_text(f"import os\nos.mkdir({bomb.mark!r})\n")
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail

    assert open_model(folder).config.n_embd == 16


def test_a_pull_fetches_no_code_and_no_odd_names(bomb, run_in_fork, tmp_path):
    remote = tmp_path / "hub/models/evil/model"
    (remote / "sub").mkdir(parents=True)
    names = ("modeling_x.py", "x.pkl", ".bashrc", "sub/model_00002.pt", "model_00003.pt\x9b2J.pt")
    for name in ("model_00001.pt", *names):
        (remote / name).write_bytes(pickle.dumps(bomb))

    with hub_server.start(tmp_path / "hub") as server:
        run_in_fork("hub.py", "pull-model", "evil/model", tmp_path / "out", env=server.env())

    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_file()] == ["model_00001.pt"]
    with pytest.raises(UserError):
        open_model(tmp_path / "out")
