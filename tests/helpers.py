"""Shared by the tests: tiny data and tiny models on disk, tiny training runs, and how two runs are compared.

Everything here is a plain function or a constant that test files import; the fixtures are in conftest.py, and scripts
in processes of their own in processes.py. A test of training usually reads:

    run = train("run", "--max-steps 3")     # the fixture, which trains in this process
    assert load_curve(run)[3][1] < 5.5      # the validation loss of step 3
"""

import importlib
import itertools
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args, get_type_hints
from unittest import mock

import numpy as np
import pytest
import torch
from networks import make_network

import train_gpt2
from checkpoints import checkpoint
from checkpoints.open_model import open_model
from checkpoints.run_folder import complete_steps, model_path, optim_path
from lifecycle.command_line import parse
from lifecycle.stop import StopRequest
from system import process
from system.distributed import Runtime
from system.errors import UserError
from tokens import shards
from training.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
CPU = Runtime(torch.device("cpu"), torch.float32)  # one rank on the CPU: the runtime of the runs in this process

# Flags of a run that takes a second, for the shards of write_random_walk_shards: 12 steps of 8 sequences of 32 tokens.
TINY_FLAGS = """--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--sequence-length 32 --total-batch-size 256 --micro-batch-size 4 --max-steps 12 --warmup-steps 2 --val-every 4
--val-tokens 1024 --hellaswag-every 0 --sample-every 0 --save-every 3 --keep 0 --no-compile --dtype float32
--optimizer adamw --schedule cosine --max-lr 3e-3 --min-lr 3e-4""".split()

# What random HellaSwag rows are made of.
WORDS = "the a man woman dog runs sits on in grass water and then quickly slowly guitar ball river jumps".split()


# ------------------------------------------------------------------------- training runs, and what they left


def split_flags(words) -> list[str]:
    """The words of a command line. Several flags may be one text, "--keep 3 --seed 1"; paths and prompts stay whole."""
    found = []
    for word in map(str, words):
        found += word.split() if word.startswith("--") else [word]
    return found


def parse_config(*words) -> TrainConfig:
    """The config that a command line of these words stands for, as of split_flags."""
    return parse(split_flags(words))[0]


def train_quickstart(args, out, *more, stop=None) -> Path:
    """Train the preset quickstart with the flags `args` and `more` in this process, into the folder `out`; returns that
    folder. `stop` may hold a stop request, by which a test ends the run early."""
    torch.set_num_threads(1)  # the tests run side by side
    train_gpt2.open_and_train(parse_config("quickstart", *args, "--out-dir", out, *more), CPU, stop or StopRequest())
    return Path(out)


def run_main(script, *words) -> int:
    """The exit code of a script, whose main runs in this process. words: as of split_flags."""
    with mock.patch("sys.argv", split_flags([script, *words])):
        return process.run(importlib.import_module(script.removesuffix(".py")).main)


def refused(named):
    """The context in which the user is told what to fix, by a message in which this pattern is found."""
    return pytest.raises(UserError, match=named)


def write_slowly(seconds):
    """What checkpoint.write does, after a while."""
    write = checkpoint.write

    def wait_and_write(*args):
        time.sleep(seconds)
        write(*args)

    return wait_and_write


def err_in_update_5(change):
    """What AdamW.step does, with an error of the hardware in its fifth call: one weight of the embedding becomes
    change(weight)."""
    step, calls = torch.optim.AdamW.step, itertools.count(1)

    def step_with_an_error(optimizer):
        step(optimizer)
        if next(calls) == 5:
            embedding = optimizer.param_groups[0]["params"][0].data
            embedding[9, 9] = change(embedding[9, 9])

    return step_with_an_error


@contextmanager
def limit_file_size(size: int) -> Iterator[None]:
    """No file of this process grows beyond so many bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def choices(config_class, field) -> tuple:
    """The values that the Literal of a field allows: tests that go through all of them fail for one that is added
    there and not handled."""
    return get_args(get_type_hints(config_class)[field])


def read_json(path):
    """The content of a JSON file."""
    return json.loads(path.read_text())


def read_jsonl(path) -> list[dict]:
    """The lines of a file. It fails at one that is not JSON."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_table(text: str) -> list[list[str]]:
    """The cells of each row of a table, whose columns are divided by "|": what pytest.mark.parametrize takes."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip("\n").splitlines()]


def write_script(path: Path, text: str) -> None:
    """An executable file, in a folder that need not exist yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def load_metrics(run) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return read_jsonl(Path(run) / "metrics.jsonl")


def load_curve(run) -> dict[int, tuple]:
    """{step: (train_loss, val_loss, grad_norm)} of a run, None for what was not measured at that step."""
    lines = load_metrics(run)
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "a step appears twice"
    return {line["step"]: (line.get("train_loss"), line.get("val_loss"), line.get("grad_norm")) for line in lines}


def load_weights(run, step=12) -> dict[str, torch.Tensor]:
    """The weights that a run saved at a step."""
    return open_model(model_path(run, step)).state_dict()


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts have the same keys and, for each key, equal tensors."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def same_weights(a, b, step=12) -> bool:
    """Whether two runs saved the same bits at a step."""
    return same_bits(load_weights(a, step), load_weights(b, step))


def assert_curves_close(a, b, rel=2e-4) -> None:
    """Two runs have measured the same at the same steps, and the values differ by rounding only."""
    # (steps, 4): NaN, which equals NaN here, stands for what was not measured at a step.
    a, b = (np.array([(step, *values) for step, values in load_curve(run).items()], float) for run in (a, b))
    np.testing.assert_allclose(a, b, rtol=rel)


def delete_checkpoints_after(run, last) -> None:
    """Delete the checkpoints later than step `last`, as if the run had been lost soon after it."""
    for step in complete_steps(run):
        if step > last:
            model_path(run, step).unlink()
            optim_path(run, step).unlink()


# ------------------------------------------------------------------------- token shards and models


def write_random_walk_shards(folder: Path) -> Path:
    """A folder of shards over a vocabulary of 256 with something to learn: three train shards, one val. Each token is
    the one before plus 1, 2 or 3, so the best possible loss is log 3."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index, size in enumerate([2100, 3001, 4097, 1500]):
        walk = (np.cumsum(rng.integers(1, 4, size)) % 256).astype(np.uint16)
        shards.write_shard(folder / f"tiny_{'val' if index == 0 else 'train'}_{index:06d}.npy", walk)
    return folder


def make_shards(folder: Path, seed: int = 0, size: int = 20_000) -> Path:
    """A folder of three shards of `size` random GPT-2 tokens each, with the manifest that fineweb.py would write."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    entries = []
    for i, split in enumerate(("val", "train", "train")):
        tokens = rng.integers(0, 50256, size)
        tokens[0] = 50256  # each shard is one document
        name = f"toy_{split}_{i:06d}.npy"
        sha256 = shards.write_shard(folder / name, tokens.astype(np.uint16))
        entries.append(shards.Shard(name, size, 1, sha256, {"file": 0, "token": i}))
    source = shards.Source("toy", column="text", revision="1", files=[shards.SourceFile("toy.txt", 1)])
    shards.write_manifest(folder, shards.Manifest(source, "npy", size, complete=True, shards=entries))
    return folder


def write_model(folder: Path, model, step=1) -> Path:
    """The file of a model in this folder."""
    path = model_path(folder, step)
    checkpoint.write(path, checkpoint.model_file(model, step))
    return path


def write_tiny_model(folder: Path, block_size: int, n_embd: int) -> Path:
    """A run folder with one tiny model of GPT-2's vocabulary. Its weights are random, and large enough that its choices
    are not close calls, which rounding could turn."""
    folder.mkdir()
    write_model(folder, make_network(block_size=block_size, n_layer=2, n_head=2, n_embd=n_embd), 7)
    return folder


# ------------------------------------------------------------------------- texts to tokenize

# What tokenizers, readers of files and terminals have stumbled over: whitespace, special tokens, contractions, scripts,
# control characters, long runs of one character.
TRICKY_TEXTS = [
    "",
    " ",
    "\n\n\n",
    "hello world",
    "<|endoftext|>",
    "a<|endoftext|> b",
    "I'll we've don't it's THEY'RE 'twas '",
    "  two  spaces \t tab \r\n line \x0b\x0c\x1c\x85\u00a0\u2028\u3000 end ",
    "naïve café — “quotes” … ½ ² ⅷ ٣ १२३",
    "e\u0301 combining, \u200d\u200b joiners, 👩‍👩‍👧‍👦 🇫🇷 \U0001f600",
    "日本語の文章と한국어 ไทย العربية עברית",
    "\x00\x01\x7f\ufeff\ufffd",
    "x" * 5000,
    "word " * 3000,
    "1234567890" * 100,
    "!?" * 700,
    " \n" * 500,
    "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n",
]


def make_documents(seed, n=40) -> list[str]:
    """n documents of random tricky pieces, then each tricky text as a document of its own."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(TRICKY_TEXTS[:14], rng.integers(0, 9))) for _ in range(n)] + TRICKY_TEXTS


# ------------------------------------------------------------------------- HellaSwag rows


def make_hellaswag_rows(n: int, seed: int = 0) -> list[dict]:
    """n rows like HellaSwag's, of random words, in contexts and endings of different lengths."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(n):
        context, *endings = [" ".join(rng.choice(WORDS, rng.integers(1, 30))) for _ in range(5)]
        rows.append({"ctx": context, "endings": endings, "label": i % 4})
    return rows


def write_jsonl(path, rows) -> Path:
    """A file with a line of JSON for each row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
