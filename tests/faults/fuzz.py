"""Mutated files for every reader, seeded: each must end in success or UserError, in time, and run no code of the file.

    python tests/faults/fuzz.py                            # 2,000 inputs
    python tests/faults/fuzz.py --count 20000 --seed 7
    python tests/faults/fuzz.py --only optim.pt --first 812 --count 1      # one input again

Inputs are read in processes of their own, so that a crash of the interpreter itself is noticed, named and survived.
"""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import numpy as np
import processes
import torch
from helpers import CPU, make_shards, write_parquet

import plots
from model import GPT, GPTConfig
from system.cli import UserError
from tokens import documents, shards
from training import checkpoint, convert, hellaswag_eval, metrics_file, resume
from training.config import TrainConfig
from training.open_model import open_model
from training.presets import PRESETS
from training.step import TrainStep

SECONDS = 10  # for one input
ROOM = 3 << 30  # bytes of address space a child may add: a file that asks for more is refused by the machine
BATCH = 200  # inputs of one child
SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
QUICK = replace(PRESETS["quickstart"], model=SMALL, sequence_length=16, compile=False, micro_batch_size=4)

# ------------------------------------------------------------------------- the readers, and a good file for each


ROW = {"activity_label": "Cooking", "ctx_a": "A man [step] stirs.", "ctx_b": "he", "ctx": "A man stirs. he", "label": 2}
TEXTS = [f"document {i} of words, ünïcode 🙂 and\nlines " * (i % 5) for i in range(40)]


def lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_npy(folder: Path) -> None:
    make_shards(folder, size=300)


def make_bin(folder: Path) -> None:
    shards.write_shard(folder / "toy_train_000001.bin", np.arange(300, dtype=np.uint16))


def read_shard(folder: Path) -> None:
    for path in shards.shard_files(folder):
        shards.check_ids(shards.read_shard(path), path)


def read_texts(folder: Path) -> None:
    for chunk in documents.read_files(sorted(folder.iterdir()), 0, "text"):
        assert all(isinstance(t, str) for t in chunk.texts)
        "".join(chunk.texts).encode()


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


def stepped(saved: dict | None = None) -> Step:
    """A step made, as of a run that resumes from what was saved."""
    step = TrainStep(QUICK, CPU, tiny())
    if saved:
        TrainConfig.from_dict(saved["config"])
        step.restore(saved)
        step.set_learning_rates(saved["step"], saved["max_steps"])
    sum(p.sum() for p in step.model.parameters()).backward()
    step.update()
    return step


def make_run(folder: Path) -> None:
    step, run = stepped(), resume.Run(9, "0123", step=7, evaluated=True)
    run.best = {"step": 7, "val_loss": 3.0}
    state = {**run.state(), **step.state(), "config": QUICK.to_dict(), "versions": {"torch": "2"}}
    checkpoint.write(folder / "model_00007.pt", checkpoint.model_file(step.model, 7, val_loss=3.0, preset="quickstart"))
    checkpoint.write(folder / "optim_00007.pt", {"format": checkpoint.FORMAT, **state})
    (folder / "config.json").write_text(json.dumps({**QUICK.to_dict(), "world_size": 1}, indent=2))
    row = {"train_loss": 3.0, "lr": 1e-3, "mfu": None, "tokens_per_second": 1e4}
    lines(folder / "metrics.jsonl", [{"step": s, **row} for s in range(9)])


def use(model: GPT) -> None:
    """What every script does with a model that it was given: a forward pass."""
    with torch.no_grad():
        model(torch.zeros(1, min(4, model.config.block_size), dtype=torch.int64))


def read_record(folder: Path) -> None:
    """metrics.jsonl and config.json as the plots and the log of a resumed run read them."""
    metrics_file.tokens_per_step(folder)
    [json.dumps(row) for row in metrics_file.read_metrics(folder / "metrics.jsonl")]
    plots.read_curves(folder)


def make_rows(folder: Path) -> None:
    row = {**ROW, "endings": ["eats it.", "sings [x].", "flies away.", "is a pot."]}
    lines(folder / "rows.jsonl", [{**row, "ind": i} for i in range(4)])


def read_rows(folder: Path) -> None:
    hellaswag_eval.load_examples(folder / "rows.jsonl")


def make_hf(folder: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_positions=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)).save_pretrained(folder)


def make_hf_bin(folder: Path) -> None:
    from safetensors.torch import load_file

    make_hf(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_old(folder: Path) -> None:
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": True, "vocab_size": 64, "dropout": 0.0}
    saved = {"model": tiny().state_dict(), "model_args": args, "iter_num": 5, "config": {"device": "cpu"}}
    torch.save(saved, folder / "old.pt")


class Reader(NamedTuple):
    """What is fuzzed: `file` of the folder that `make` fills, by `read`, which is given the folder."""

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]


def load_hf(folder: Path) -> None:
    use(convert.load_hf(folder))


READERS = {
    "shard.npy": Reader("toy_train_000001.npy", make_npy, read_shard),
    "shard.bin": Reader("toy_train_000001.bin", make_bin, read_shard),
    "manifest.json": Reader("manifest.json", make_npy, lambda d: (shards.verify(d), shards.fingerprint(d))),
    "documents.parquet": Reader(
        "a.parquet", lambda d: write_parquet(d / "a.parquet", TEXTS, row_group_size=16), read_texts
    ),
    "documents.jsonl": Reader("a.jsonl", lambda d: lines(d / "a.jsonl", [{"text": t} for t in TEXTS]), read_texts),
    "documents.txt": Reader("a.txt", lambda d: (d / "a.txt").write_text("".join(TEXTS)), read_texts),
    "model.pt": Reader("model_00007.pt", make_run, lambda d: use(open_model(d / "model_00007.pt"))),
    "optim.pt": Reader(
        "optim_00007.pt", make_run, lambda d: stepped(checkpoint.read_train_state(d / "model_00007.pt"))
    ),
    "metrics.jsonl": Reader("metrics.jsonl", make_run, read_record),
    "run config.json": Reader("config.json", make_run, read_record),
    "hellaswag.jsonl": Reader("rows.jsonl", make_rows, read_rows),
    "hf config.json": Reader("config.json", make_hf, load_hf),
    "model.safetensors": Reader("model.safetensors", make_hf, load_hf),
    "pytorch_model.bin": Reader("pytorch_model.bin", make_hf_bin, load_hf),
    "import old.pt": Reader("old.pt", make_old, lambda d: use(convert.load_old(d / "old.pt")[0])),
}

# ------------------------------------------------------------------------- mutations

NUMBERS = [-1, 0, 1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64, 10**30]
WORDS = ["", "\x1b[2J", "x" * 999, "../x", "\ud800", "٣", "²", "nan", "0", "$a$", "\0", "a/b", "[" * 999]
NUMERIC = [1.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 10**400, True, False]


def harm(rng: random.Random, out: bytearray, at: int) -> None:
    """A small one at a place: to a bit, a byte or a number, or a cut, an insertion, a repetition."""
    n, size = rng.choice([1, 2, 4, 8, 64, 999]), rng.choice("BHIQ")
    digits = list(re.finditer(rb"\d+", bytes(out[:4000])))
    word = struct.pack(rng.choice("<>") + size, rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(size)))
    byte = rng.choice([0, 1, 127, 128, 255, 10, 34, 91, 123, rng.randrange(256)])
    span, new = rng.choice([
        ((at, at + 1), bytes(b ^ 1 << rng.randrange(8) for b in out[at : at + 1])),
        ((at, at + 1), bytes([byte])), ((at, at + len(word)), word), ((at, at + len(word)), word),
        ((at, at + n), b""), ((at, at), rng.randbytes(n)), ((at, at), bytes(out[at : at + n])),
        ((at, len(out) if rng.random() < 0.3 else at), b""),
        (rng.choice(digits).span() if digits else (at, at), str(rng.choice(NUMBERS)).encode()),
    ])  # fmt: skip
    out[slice(*span)] = new


def flip(rng: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """A few harms to the bytes low .. high."""
    out, end = bytearray(data), len(data) if high is None else min(high, len(data))
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        harm(rng, out, rng.randrange(low, max(low + 1, end)))
    return bytes(out)


def ends(rng: random.Random, data: bytes) -> bytes:
    """Harm to the first or the last bytes, where formats keep their headers and directories."""
    return flip(rng, data, 0, 200) if rng.random() < 0.5 else flip(rng, data, max(0, len(data) - 600))


def hostile(rng: random.Random) -> object:
    """A value that nobody expects, of the kinds that JSON knows."""
    deep: object = 1
    for _ in range(rng.choice([3, 300])):
        deep = [deep]
    kinds = [rng.choice(NUMBERS), rng.choice(WORDS), rng.choice(NUMERIC), None, [], {}, deep, ["x"], {"a": 1}]
    return rng.choice(kinds)


def odd_tensor(rng: random.Random) -> object:
    t = torch.zeros(16)
    return rng.choice([
        lambda: t.to(torch.int8), lambda: t.to(torch.complex64), lambda: t[0], lambda: t.view(2, 2, 2, 2),
        lambda: t[:0], lambda: torch.eye(16).to_sparse(), lambda: t.to(torch.bfloat16), lambda: t.bool(),
        lambda: t.to(torch.float64), lambda: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
        lambda: torch.eye(64, 16) * math.nan,
        lambda: torch.eye(16).to_sparse_csr(), lambda: torch.nn.Parameter(t), lambda: bytearray(9), lambda: {1, 2},
        lambda: torch.Size([1]), lambda: torch.float16,
    ])()  # fmt: skip


def change_tree(rng: random.Random, tree: object) -> object:
    """A copy of nested containers in which some values, or keys, are others, gone or doubled."""
    tree = copy.copy(tree)
    if isinstance(tree, dict | list) and len(tree) and rng.random() < 0.85:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        kind = rng.randrange(12)
        if kind == 0:
            del tree[key]
        elif kind == 1 and isinstance(tree, dict):
            tree[rng.choice([*WORDS, 3, None, key.upper() if isinstance(key, str) else 4])] = tree.pop(key)
        elif kind == 2 and isinstance(tree, list):
            tree.append(tree[key])
        else:
            tree[key] = change_tree(rng, tree[key])
        return tree
    return odd_tensor(rng) if isinstance(tree, torch.Tensor) and rng.random() < 0.8 else hostile(rng)


def change_json(rng: random.Random, data: bytes) -> bytes:
    """A line of JSON lines, or all of a JSON text, with other values; now and then nested or written out of bounds."""
    rows = data.splitlines() if data.count(b"}\n{") or data.count(b"\n") < 2 else [data]
    at = rng.randrange(len(rows))
    for _ in range(rng.choice([1, 1, 3])):
        tree = change_tree(rng, json.loads(rows[at]))
        rows[at] = json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    text = b"\n".join(rows) + b"\n"
    wild = [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"1e999", b"-" + b"9" * 400, b'"' + b"a" * 300_000 + b'"']
    if rng.random() < 0.15 and (found := list(re.finditer(rb"\d+", text))):
        d = rng.choice(found)
        text = text[: d.start()] + rng.choice(wild) + text[d.end() :]
    return text


def change_torch(rng: random.Random, data: bytes) -> bytes:
    """A torch file whose zip is sound but whose pickle, or what it holds, is not."""
    if rng.random() < 0.5:  # other objects, pickled well
        tree = torch.load(io.BytesIO(data), weights_only=True)
        for _ in range(rng.choice([1, 1, 3])):
            tree = change_tree(rng, tree)
        out = io.BytesIO()
        torch.save(tree, out)
        return out.getvalue()
    out, compress = io.BytesIO(), rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compress) as new:
        for info in old.infolist():
            part = old.read(info)
            if info.filename.endswith("/data.pkl"):
                part = flip(rng, part)
            elif rng.random() < 0.02:
                part = rng.choice([b"", part[:-1], part * 2, bytes(1 << 22)])
            if rng.random() > 0.01:
                new.writestr(info.filename, part)
    return out.getvalue()


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    header = change_json(rng, header).strip() if rng.random() < 0.6 else flip(rng, header)
    stated = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    return stated.to_bytes(8, "little") + header + body


INNER = {"json": change_json, "jsonl": change_json, "pt": change_torch, "safetensors": change_safetensors}
INNER |= {"pytorch_model.bin": change_torch}


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    kind = INNER.get(name) or INNER.get(name.rpartition(".")[2], ends)
    return rng.choice([kind, kind, ends, flip])(rng, data)


# ------------------------------------------------------------------------- running them


def on_alarm(*_) -> None:
    raise KeyboardInterrupt(f"it took more than {SECONDS} s")


def attempt(reader: Reader, folder: Path) -> str:
    """How one input ends: "read", "refused", or what must not be."""
    signal.alarm(SECONDS)
    try:
        reader.read(folder)
        return "read"
    except UserError as e:
        return "refused" if len(str(e)) <= 2000 else f"a message of {len(str(e)):,} characters: {str(e)[:200]}"
    except BaseException as e:
        if isinstance(e, MemoryError) or "can't allocate memory" in str(e):
            return "refused"  # by the machine
        return "".join(traceback.format_exc().splitlines(True)[-8:])
    finally:
        signal.alarm(0)


def child() -> None:
    """Read some inputs of a reader; a line for each goes into a file before it is read, and one after it."""
    name, first, last, seed, good, told = sys.argv[1:]
    file = Path(good) / READERS[name].file
    original = file.read_bytes()
    signal.signal(signal.SIGALRM, on_alarm)
    vm = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (vm + ROOM, vm + ROOM))
    with open(told, "w", buffering=1) as out:
        for i in range(int(first), int(last)):
            file.write_bytes(mutate(random.Random(f"{seed} {name} {i}"), name, original))
            out.write(json.dumps([i, None]) + "\n")
            out.write(json.dumps([i, attempt(READERS[name], file.parent)]) + "\n")


def fuzz(name: str, numbers: range, seed: int, folder: Path) -> Iterator[tuple[int, str]]:
    """(number, how it ended) of every input, each batch in a process of its own."""
    (good := folder / "good").mkdir()
    READERS[name].make(good)
    file, start, told = good / READERS[name].file, numbers.start, folder / "told"
    original = file.read_bytes()
    while start < numbers.stop:
        file.write_bytes(original)  # a child leaves its last input there
        words = name, start, min(start + BATCH, numbers.stop), seed, good, told
        script = processes.start(child, *words, log=folder / "said").wait(3600)
        found = dict(json.loads(line) for line in told.read_text().splitlines())
        yield from ((i, end or f"the interpreter died: exit code {script.exit_code}") for i, end in found.items())
        start = max(found) + 1


def main(count: int = 2000, first: int = 0, seed: int = 0, only: str = "") -> None:
    """Read `count` inputs over all readers, or one reader's, from number `first` on."""
    names, bad, total = [only] if only else list(READERS), [], Counter()
    for n, name in enumerate(names):
        share = count // len(names) + (n < count % len(names))
        began, found = time.monotonic(), Counter()
        with tempfile.TemporaryDirectory() as folder:
            for i, end in fuzz(name, range(first, first + share), seed, Path(folder)):
                found[end if end in ("read", "refused") else "bad"] += 1
                if end not in ("read", "refused"):
                    bad.append(f"{name} input {i}: {end}")
        total += found
        print(f"{name:18} {share:6} inputs: {found['read']:5} read, {found['refused']:5} refused, "
              f"{found['bad']:3} bad, {time.monotonic() - began:.1f} s", flush=True)  # fmt: skip
    print("\n".join(bad))
    print(f"{total.total()} mutated inputs: {total['read']} read, {total['refused']} refused, {total['bad']} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
