"""Mutated files for every reader of the project: each must end in success or UserError, in time, and run no code.

    python tests/faults/fuzz.py                            # 2,000 inputs
    python tests/faults/fuzz.py --count 20000 --seed 7
    python tests/faults/fuzz.py --only optim.pt --first 812 --count 1      # one input again

CASES lists what is fuzzed: a good file, and the function that reads it. Input number i of a case is the good file after
mutations that are drawn from the seed, the name of the case and i, so that it can be repeated alone. Inputs are read in
child processes, so that a crash of the interpreter itself is noticed, named and survived.
"""

from __future__ import annotations

import copy
import faulthandler
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

import corpora
import numpy as np
import processes
import torch
from helpers import CPU, make_shards, write_jsonl

import plots
from model import GPT, GPTConfig
from system.cli import UserError
from tokens import shards
from training import checkpoint, convert, hellaswag_eval, metrics
from training.config import TrainConfig
from training.metrics import RunState
from training.open_model import open_model
from training.presets import PRESETS
from training.step import TrainStep

SECONDS = 10  # for one input
EXTRA_MEMORY = 3 << 30  # bytes of address space a child may add: the machine refuses more to a file that asks for it
BATCH = 200  # inputs of one child
MAX_MESSAGE = 2000  # characters of an error message: a file must not fill the terminal

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
QUICK = replace(PRESETS["quickstart"], model=SMALL, sequence_length=16, compile=False, micro_batch_size=4)


class FuzzCase(NamedTuple):
    """What is fuzzed: `file` of the folder that `make` fills, by `read`, which is given the folder."""

    file: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]


# ------------------------------------------------------------------------- good files


DOCUMENTS = [f"document {i} of words, ünïcode 🙂 and\nlines " * (i % 5) for i in range(40)]


def make_npy_shards(folder: Path) -> None:
    make_shards(folder, size=300)


def make_bin_shard(folder: Path) -> None:
    shards.write_shard(folder / "toy_train_000001.bin", np.arange(300, dtype=np.uint16))


def make_run(folder: Path) -> None:
    """A run folder with a checkpoint of step 7, the metrics of its steps, and its config."""
    train_step = make_step()
    run = RunState(9, "0123", step=7, evaluated=True, best={"step": 7, "val_loss": 3.0})
    state = {**run.state_dict(), **train_step.state_dict(), "config": QUICK.to_dict(), "versions": {"torch": "2"}}
    model = checkpoint.model_file(train_step.model, 7, val_loss=3.0, preset="quickstart")
    checkpoint.write(folder / "model_00007.pt", model)
    checkpoint.write(folder / "optim_00007.pt", {"format": checkpoint.FORMAT, **state})

    (folder / "config.json").write_text(json.dumps({**QUICK.to_dict(), "world_size": 1}, indent=2))
    row = {"train_loss": 3.0, "lr": 1e-3, "mfu": None, "tokens_per_second": 1e4}
    write_jsonl(folder / "metrics.jsonl", [{"step": step, **row} for step in range(9)])


def make_rows(folder: Path) -> None:
    """HellaSwag rows, in rows.jsonl."""
    row = {
        "activity_label": "Cooking",
        "ctx_a": "A man [step] stirs.",
        "ctx_b": "he",
        "ctx": "A man stirs. he",
        "label": 2,
        "endings": ["eats it.", "sings [x].", "flies away.", "is a pot."],
    }
    write_jsonl(folder / "rows.jsonl", [{**row, "ind": i} for i in range(4)])


def make_hf(folder: Path) -> None:
    """A tiny GPT-2 as transformers saves it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(n_positions=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)).save_pretrained(folder)


def make_hf_bin(folder: Path) -> None:
    """The same with pickled weights, as transformers saved them before safetensors."""
    from safetensors.torch import load_file

    make_hf(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_old(folder: Path) -> None:
    """A nanoGPT checkpoint."""
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": True, "vocab_size": 64, "dropout": 0.0}
    content = {"model": make_model().state_dict(), "model_args": args, "iter_num": 5, "config": {"device": "cpu"}}
    torch.save(content, folder / "old.pt")


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL)


# ------------------------------------------------------------------------- the readers


def read_shards(folder: Path) -> None:
    for path in shards.shard_files(folder):
        shards.check_ids(shards.read_shard(path), path)


def read_manifest(folder: Path) -> None:
    shards.verify(folder)
    shards.fingerprint(folder)


def read_documents(folder: Path) -> None:
    for path in folder.iterdir():
        for text in corpora.read_documents(path):
            text.encode()  # a lone surrogate would fail later, in the tokenizer


def run_model(model: GPT) -> None:
    """What every script does with a model that it was given: a forward pass."""
    with torch.no_grad():
        model(torch.zeros(1, min(4, model.config.block_size), dtype=torch.int64))


def make_step(saved: dict | None = None) -> TrainStep:
    """A training step after one update, as in a run that resumes from `saved`, if given."""
    train_step = TrainStep(QUICK, CPU, make_model())
    if saved:
        TrainConfig.from_dict(saved["config"])
        train_step.load_state_dict(saved)
        train_step.set_learning_rates(saved["step"], saved["max_steps"])
    sum(p.sum() for p in train_step.model.parameters()).backward()
    train_step.update()
    return train_step


def read_run_figures(folder: Path) -> None:
    """metrics.jsonl and config.json as the plots and the log of a resumed run read them."""
    for row in metrics.read_metrics(folder / "metrics.jsonl"):
        json.dumps(row)
    plots.read_curves(folder)


# ------------------------------------------------------------------------- what is fuzzed

CASES = {
    "shard.npy": FuzzCase("toy_train_000001.npy", make_npy_shards, read_shards),
    "shard.bin": FuzzCase("toy_train_000001.bin", make_bin_shard, read_shards),
    "manifest.json": FuzzCase("manifest.json", make_npy_shards, read_manifest),
    "model.pt": FuzzCase("model_00007.pt", make_run, lambda d: run_model(open_model(d / "model_00007.pt"))),
    "optim.pt": FuzzCase(
        "optim_00007.pt", make_run, lambda d: make_step(checkpoint.read_train_state(d / "model_00007.pt"))
    ),
    "metrics.jsonl": FuzzCase("metrics.jsonl", make_run, read_run_figures),
    "run config.json": FuzzCase("config.json", make_run, read_run_figures),
    "hellaswag.jsonl": FuzzCase("rows.jsonl", make_rows, lambda d: hellaswag_eval.load_examples(d / "rows.jsonl")),
    "hf config.json": FuzzCase("config.json", make_hf, lambda d: run_model(convert.load_hf(d))),
    "model.safetensors": FuzzCase("model.safetensors", make_hf, lambda d: run_model(convert.load_hf(d))),
    "pytorch_model.bin": FuzzCase("pytorch_model.bin", make_hf_bin, lambda d: run_model(convert.load_hf(d))),
    "import old.pt": FuzzCase("old.pt", make_old, lambda d: run_model(convert.load_old(d / "old.pt")[0])),
}


def document_case(suffix: str) -> FuzzCase:
    """The case of one reader of documents."""
    name = f"a{suffix}"
    return FuzzCase(name, lambda folder: corpora.write_documents(folder / name, DOCUMENTS), read_documents)


# Every reader of documents is fuzzed.
CASES |= {f"documents{suffix}": document_case(suffix) for suffix in corpora.WRITERS}

# ------------------------------------------------------------------------- mutations of bytes

NUMBERS = [-1, 0, 1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64, 10**30]
WORDS = ["", "\x1b[2J", "x" * 999, "../x", "\ud800", "٣", "²", "nan", "0", "$a$", "\0", "a/b", "[" * 999]
NUMERIC = [1.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 10**400, True, False]


def mutate_at(rng: random.Random, data: bytearray, at: int) -> None:
    """Change `data` in one place: a bit, a byte or a number, or a cut, an insertion, a repetition."""
    length = rng.choice([1, 2, 4, 8, 64, 999])
    size = rng.choice("BHIQ")
    decimals = list(re.finditer(rb"\d+", bytes(data[:4000])))
    number = struct.pack(rng.choice("<>") + size, rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(size)))
    byte = rng.choice([0, 1, 127, 128, 255, 10, 34, 91, 123, rng.randrange(256)])

    # (the span that is replaced, what replaces it)
    flip_bit = ((at, at + 1), bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1]))
    set_byte = ((at, at + 1), bytes([byte]))
    set_number = ((at, at + len(number)), number)
    delete = ((at, at + length), b"")
    insert = ((at, at), rng.randbytes(length))
    repeat = ((at, at), bytes(data[at : at + length]))
    truncate = ((at, len(data) if rng.random() < 0.3 else at), b"")
    change_decimal = (rng.choice(decimals).span() if decimals else (at, at), str(rng.choice(NUMBERS)).encode())

    # Numbers twice: a header with another size or count is where readers go wrong.
    mutations = [flip_bit, set_byte, set_number, set_number, delete, insert, repeat, truncate, change_decimal]
    span, new = rng.choice(mutations)
    data[slice(*span)] = new


def mutate_bytes(rng: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """A few mutations that begin between the bytes `low` and `high`."""
    out = bytearray(data)
    end = len(data) if high is None else min(high, len(data))
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        mutate_at(rng, out, rng.randrange(low, max(low + 1, end)))
    return bytes(out)


def mutate_ends(rng: random.Random, data: bytes) -> bytes:
    """Mutations of the first or the last bytes, where formats keep their headers and directories."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, data, 0, 200)
    return mutate_bytes(rng, data, max(0, len(data) - 600))


# ------------------------------------------------------------------------- mutations of what a format holds


def hostile_value(rng: random.Random) -> object:
    """A value that nobody expects, of the kinds that JSON knows."""
    deep: object = 1
    for _ in range(rng.choice([3, 300])):
        deep = [deep]
    kinds = [rng.choice(NUMBERS), rng.choice(WORDS), rng.choice(NUMERIC), None, [], {}, deep, ["x"], {"a": 1}]
    return rng.choice(kinds)


def odd_tensor(rng: random.Random) -> object:
    """A tensor of another type, shape or layout than a weight has, or something else that a checkpoint may hold."""
    t = torch.zeros(16)
    return rng.choice([
        lambda: t.to(torch.int8), lambda: t.to(torch.complex64), lambda: t[0], lambda: t.view(2, 2, 2, 2),
        lambda: t[:0], lambda: torch.eye(16).to_sparse(), lambda: t.to(torch.bfloat16), lambda: t.bool(),
        lambda: t.to(torch.float64), lambda: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8),
        lambda: torch.eye(64, 16) * math.nan,
        lambda: torch.eye(16).to_sparse_csr(), lambda: torch.nn.Parameter(t), lambda: bytearray(9), lambda: {1, 2},
        lambda: torch.Size([1]), lambda: torch.float16,
    ])()  # fmt: skip


def mutate_tree(rng: random.Random, tree: object) -> object:
    """A copy of nested containers in which some values, or keys, are others, gone or doubled."""
    tree = copy.copy(tree)

    # A leaf, or now and then a container, becomes something else.
    is_container = isinstance(tree, dict | list) and len(tree) > 0
    if not is_container or rng.random() >= 0.85:
        if isinstance(tree, torch.Tensor) and rng.random() < 0.8:
            return odd_tensor(rng)
        return hostile_value(rng)

    # One entry of a container is deleted, renamed or doubled, or mutated itself.
    if isinstance(tree, dict):
        key = rng.choice(list(tree))
    else:
        key = rng.randrange(len(tree))
    kind = rng.randrange(12)
    if kind == 0:
        del tree[key]
    elif kind == 1 and isinstance(tree, dict):
        similar_key = key.upper() if isinstance(key, str) else 4
        tree[rng.choice([*WORDS, 3, None, similar_key])] = tree.pop(key)
    elif kind == 2 and isinstance(tree, list):
        tree.append(tree[key])
    else:
        tree[key] = mutate_tree(rng, tree[key])
    return tree


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """A line of JSON lines, or all of a JSON text, with other values; now and then nested or written out of bounds."""
    # JSON lines, or one JSON text over several lines: mutate the values of one row, a few times.
    is_jsonl = data.count(b"}\n{") > 0 or data.count(b"\n") < 2
    rows = data.splitlines() if is_jsonl else [data]
    at = rng.randrange(len(rows))
    for _ in range(rng.choice([1, 1, 3])):
        tree = mutate_tree(rng, json.loads(rows[at]))
        rows[at] = json.dumps(tree, ensure_ascii=rng.random() < 0.9).encode(errors="surrogatepass")
    text = b"\n".join(rows) + b"\n"

    # Values that json.dumps would not write: nesting without end, numbers without end.
    wild = [b"[" * 100_000, b'{"a":' * 50_000, b"9" * 5000, b"1e999", b"-" + b"9" * 400, b'"' + b"a" * 300_000 + b'"']
    decimals = list(re.finditer(rb"\d+", text))
    if rng.random() < 0.15 and decimals:
        decimal = rng.choice(decimals)
        text = text[: decimal.start()] + rng.choice(wild) + text[decimal.end() :]
    return text


def mutate_torch(rng: random.Random, data: bytes) -> bytes:
    """A torch file whose zip archive is sound but whose pickle, or what the pickle holds, is not."""
    # Other objects, pickled well.
    if rng.random() < 0.5:
        tree = torch.load(io.BytesIO(data), weights_only=True)
        for _ in range(rng.choice([1, 1, 3])):
            tree = mutate_tree(rng, tree)
        out = io.BytesIO()
        torch.save(tree, out)
        return out.getvalue()

    # A new archive in which the pickle is mutated, and now and then a tensor's bytes are cut, doubled or missing.
    out = io.BytesIO()
    compression = rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for info in old.infolist():
            part = old.read(info)
            if info.filename.endswith("/data.pkl"):
                part = mutate_bytes(rng, part)
            elif rng.random() < 0.02:
                part = rng.choice([b"", part[:-1], part * 2, bytes(1 << 22)])
            if rng.random() > 0.01:
                new.writestr(info.filename, part)
    return out.getvalue()


def mutate_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file (8 bytes with the header's length, a JSON header, tensors) with another header or length."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    header = mutate_json(rng, header).strip() if rng.random() < 0.6 else mutate_bytes(rng, header)
    stated_size = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    return stated_size.to_bytes(8, "little") + header + body


# By the suffix of a case's name: mutations that know the format.
FORMAT_MUTATIONS = {
    "json": mutate_json,
    "jsonl": mutate_json,
    "ndjson": mutate_json,
    "pt": mutate_torch,
    "safetensors": mutate_safetensors,
}


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """One input of the case `name`: half of them by mutations that know the format, the others by those of bytes."""
    if name == "pytorch_model.bin":  # a torch file; shard.bin is not
        mutate_format = mutate_torch
    else:
        mutate_format = FORMAT_MUTATIONS.get(name.rpartition(".")[2], mutate_ends)
    return rng.choice([mutate_format, mutate_format, mutate_ends, mutate_bytes])(rng, data)


# ------------------------------------------------------------------------- reading them


def on_alarm(*_) -> None:
    raise KeyboardInterrupt(f"it took more than {SECONDS} s")


def read_input(case: FuzzCase, folder: Path) -> str:
    """How reading one input ends: "read", "refused", or a description of what must not happen."""
    # The alarm interrupts Python code. Code of a library may never return to Python: then its process is ended later.
    signal.alarm(SECONDS)
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)
    try:
        case.read(folder)
        return "read"
    except UserError as e:
        message = str(e)
        if len(message) > MAX_MESSAGE:
            return f"a message of {len(message):,} characters: {message[:200]}"
        return "refused"
    except BaseException as e:
        if isinstance(e, MemoryError) or "can't allocate memory" in str(e):
            return "refused"  # by the machine
        return "".join(traceback.format_exc().splitlines(True)[-8:])
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def run_child() -> None:
    """In a child process: read some inputs of a case. For each, a line goes into the file `results` before it is read,
    and one after it, so that the parent knows the input at which the interpreter died."""
    name, first, last, seed, good, results = sys.argv[1:]
    case = CASES[name]
    file = Path(good) / case.file
    original = file.read_bytes()

    # Limits: time for one input, and memory beyond what the process has now.
    signal.signal(signal.SIGALRM, on_alarm)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, used + EXTRA_MEMORY))

    with open(results, "w", buffering=1) as out:
        for i in range(int(first), int(last)):
            file.write_bytes(mutate(random.Random(f"{seed} {name} {i}"), name, original))
            out.write(json.dumps([i, None]) + "\n")
            out.write(json.dumps([i, read_input(case, file.parent)]) + "\n")

    # A thread that a reader has left behind must not keep the process from ending.
    faulthandler.dump_traceback_later(3 * SECONDS, exit=True)


def fuzz(name: str, numbers: range, seed: int, folder: Path) -> Iterator[tuple[int, str]]:
    """(number, how it ended) of every input of a case, each batch in a process of its own."""
    good = folder / "good"
    good.mkdir()
    case = CASES[name]
    case.make(good)
    file = good / case.file
    original = file.read_bytes()
    results = folder / "results"

    start = numbers.start
    while start < numbers.stop:
        file.write_bytes(original)  # a child leaves its last input there
        results.write_text("")
        args = name, start, min(start + BATCH, numbers.stop), seed, good, results
        child = processes.start(run_child, *args, log=folder / "output").wait(3600)

        # The later of the two lines of an input counts; one without a second line killed the process. If all have one,
        # the process failed after the last of them.
        ended = dict(json.loads(line) for line in results.read_text().splitlines())
        if not ended:
            raise RuntimeError(f"no input of {name} from {start} on was read: {child.output[-MAX_MESSAGE:]}")
        if child.exit_code:
            ended[max(ended)] = f"the interpreter died: exit code {child.exit_code}\n{child.output[-MAX_MESSAGE:]}"
        yield from ended.items()
        start = max(ended) + 1


def main(count: int = 2000, first: int = 0, seed: int = 0, only: str = "") -> None:
    """Read `count` inputs over all cases, or of one case (`only`), from number `first` on."""
    names = [only] if only else list(CASES)
    bad: list[str] = []
    total: Counter[str] = Counter()
    for n, name in enumerate(names):
        # An equal share of the inputs; the first cases get one more each if the count does not divide evenly.
        share = count // len(names)
        if n < count % len(names):
            share += 1

        # Read them, and count how they end.
        began = time.monotonic()
        counts: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            for i, end in fuzz(name, range(first, first + share), seed, Path(folder)):
                if end in ("read", "refused"):
                    counts[end] += 1
                else:
                    counts["bad"] += 1
                    bad.append(f"{name} input {i}: {end}")
        total += counts

        # One line a case.
        print(
            f"{name:18} {share:6} inputs: {counts['read']:5} read, {counts['refused']:5} refused, "
            f"{counts['bad']:3} bad, {time.monotonic() - began:.1f} s",
            flush=True,
        )
    print("\n".join(bad))
    print(f"{total.total()} mutated inputs: {total['read']} read, {total['refused']} refused, {total['bad']} bad")
    sys.exit(bool(bad))


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
