"""What several tests use: tiny data, tiny models, tiny runs and how they are compared."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import train_gpt2
from model import GPT, GPTConfig
from system.distributed import Runtime
from tokens import shards
from training import checkpoint
from training.open_model import open_model
from training.presets import parse
from training.stop import Stop

ROOT = Path(__file__).resolve().parent.parent
SHARDS = 3
WORDS = "the a man woman dog runs sits on in grass water and then quickly slowly guitar ball river jumps".split()

CPU = Runtime(torch.device("cpu"), torch.float32)


def config(*words):
    """What these words of a command come to, as a run with a checkpoint to resume from would read them."""
    return parse([str(word) for word in words], lambda path: checkpoint.read_train_state(path)["config"])


def fit(args, out, *more, rt=CPU, stop=None):
    """Train quickstart in this process; returns the run folder."""
    torch.set_num_threads(1)
    train_gpt2.train(config("quickstart", *args, "--out-dir", out, *more), rt, stop or Stop())
    return Path(out)


def metrics(run):
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def curve(run):
    """{step: (train_loss, val_loss, grad_norm)} of a run."""
    lines = metrics(run)
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "a step appears twice"
    return {line["step"]: (line.get("train_loss"), line.get("val_loss"), line.get("grad_norm")) for line in lines}


def weights(run, step=12):
    """The weights that a run saved at a step."""
    return open_model(checkpoint.model_path(run, step)).state_dict()


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_close(a, b, rel=2e-4):
    """Two curves are the same to rounding."""
    assert a.keys() == b.keys()
    for step in a:
        for x, y in zip(a[step], b[step], strict=True):
            same = x is y if None in (x, y) else x == pytest.approx(y, rel=rel)
            assert same, f"step {step}: {a[step]} and {b[step]}"


def keep_steps(run, upto):
    """Make a run look as if it had been lost after its checkpoint of step `upto`."""
    for step in checkpoint.complete_steps(run):
        if step > upto:
            checkpoint.model_path(run, step).unlink()
            checkpoint.optim_path(run, step).unlink()


def write_walk(folder: Path) -> Path:
    """A folder of shards over a vocabulary of 256 with something to learn: three train shards, one val."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for index, size in enumerate([2100, 3001, 4097, 1500]):
        walk = (np.cumsum(rng.integers(1, 4, size)) % 256).astype(np.uint16)
        shards.write_shard(folder / f"tiny_{'val' if index == 0 else 'train'}_{index:06d}.npy", walk)
    return folder


def write_model(folder: Path, block_size: int, n_embd: int) -> Path:
    """A run folder with one tiny model of GPT-2's tokens, whose choices are not close calls."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=50304, n_layer=2, n_head=2, n_embd=n_embd))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    folder.mkdir()
    checkpoint.write(folder / "model_00007.pt", checkpoint.model_file(model, 7))
    return folder


# Flags of a run that takes a second, over the shards of write_walk.
TINY = """--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--sequence-length 32 --total-batch-size 256 --micro-batch-size 4 --max-steps 12 --warmup-steps 2 --val-every 4
--val-tokens 1024 --hellaswag-every 0 --sample-every 0 --save-every 3 --keep 0 --no-compile --dtype float32
--optimizer adamw --schedule cosine --max-lr 3e-3 --min-lr 3e-4""".split()


def make_shards(folder: Path, seed: int = 0, size: int = 20_000) -> Path:
    """A folder of SHARDS shards with the manifest that fineweb.py would write."""
    folder.mkdir(exist_ok=True)
    rng, made = np.random.default_rng(seed), []
    for i in range(SHARDS):
        tokens = rng.integers(0, 50256, size).astype(np.uint16)
        tokens[0] = 50256
        name = f"toy_{'train' if i else 'val'}_{i:06d}.npy"
        sha256 = shards.write_shard(folder / name, tokens)
        end = {"file": 0, "token": i}
        made.append(shards.Shard(name, len(tokens), int((tokens == 50256).sum()), sha256, end))
    source = {"name": "toy", "subset": "", "column": "text", "revision": "1"}
    source["files"] = [{"path": "toy.txt", "bytes": 1}]
    shards.write_manifest(folder, shards.Manifest(source, "npy", size, complete=True, shards=made))
    return folder


def story(seed, n=40):
    """Documents with some of everything."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(TRICKY[:14], rng.integers(0, 9))) for _ in range(n)] + TRICKY


def parquet(path, documents, **kwargs):
    """A file of documents, as FineWeb has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"id": list(range(len(documents))), "text": pa.array(documents, pa.string())})
    pq.write_table(table, path, **kwargs)
    return path


TRICKY = [
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


def make_rows(n: int, seed: int = 0) -> list[dict]:
    """Rows as HellaSwag's, of random words."""
    g = torch.Generator().manual_seed(seed)

    def words(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=g))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (count,), generator=g))

    def row(i: int) -> dict:
        a, b = words(1, 30), words(1, 4)
        endings = [words(1, 25) + "." for _ in range(4)]
        ctx = {"ctx": f"{a}. {b}", "ctx_a": f"{a}.", "ctx_b": b}
        return {**ctx, "activity_label": "x", "endings": endings, "label": i % 4}

    return [row(i) for i in range(n)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path
