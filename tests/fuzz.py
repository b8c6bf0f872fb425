"""Mutated files for every reader, seeded: each must end in success or UserError, in time, in the memory it deserves.

    python tests/fuzz.py                            # 2,000 inputs
    python tests/fuzz.py --count 20000 --seed 7
    python tests/fuzz.py --only optim.pt --first 812 --count 1      # one input again; kept in /tmp/fuzz-case

Inputs are read in forked children, so that a crash of the interpreter itself is noticed, named and survived.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

import checkpoint
import convert
import documents
import hellaswag
import hub
import metrics
import optim
import plots
import resume
import shards
from cli import UserError
from config import PRESETS, TrainConfig
from model import GPT, GPTConfig
from runtime import Runtime

SECONDS = 10  # for one input
SLACK = 200 << 20  # bytes an input may add to this process besides FACTOR times its size (a library's first use, say)
FACTOR = 20
ROOM = 3 << 30  # bytes of address space a child may add: to ask for more than a file justifies fails here
BATCH = 200  # inputs of one child
CASE = Path("/tmp/fuzz-case")
RT = Runtime(torch.device("cpu"), torch.float32)
SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)

# ------------------------------------------------------------------------- the readers, and a good file for each


@dataclass(frozen=True)
class Reader:
    """What is fuzzed: `file` of the folder that `make` fills, by `read`, which is given the folder."""

    file: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]


def make_shards(folder: Path) -> None:
    made, source = [], {"name": "toy", "subset": "", "column": "text", "revision": "r"}
    for i, split in enumerate(("val", "train")):
        tokens = np.arange(300, dtype=np.uint16)
        tokens[[0, 100]] = 50256
        sha256 = shards.write_shard(folder / f"toy_{split}_00000{i}.npy", tokens)
        made.append(shards.Shard(f"toy_{split}_00000{i}.npy", 300, 2, sha256, {"file": 0, "token": 300 * i + 300}))
    source["files"] = [{"path": "a/b.txt", "bytes": 9}]
    shards.write_manifest(folder, shards.Manifest(source, "npy", 300, complete=True, shards=made))


def make_bin(folder: Path) -> None:
    shards.write_shard(folder / "toy_train_000001.bin", np.arange(300, dtype=np.uint16))


def read_shard(folder: Path) -> None:
    for path in shards.shard_files(folder):
        shards.check_ids(shards.read_shard(path), path)


def read_shards(folder: Path) -> None:
    shards.verify(folder)
    shards.fingerprint(folder)


def text_rows(n: int = 40) -> list[str]:
    return [f"document {i} of words, ünïcode 🙂 and\nlines " * (i % 5) for i in range(n)]


def make_parquet(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"text": text_rows(), "id": list(range(40))})
    pq.write_table(table, folder / "a.parquet", row_group_size=16, compression="snappy")


def read_documents(folder: Path) -> None:
    for chunk in documents.read(sorted(folder.iterdir()), 0, "text", lambda path: None):
        assert all(isinstance(t, str) for t in chunk.texts)
        "".join(chunk.texts).encode()


def tiny(seed: int = 0, config: GPTConfig = SMALL) -> GPT:
    torch.manual_seed(seed)
    return GPT(config)


def make_run(folder: Path) -> None:
    model = tiny()
    optimizers = optim.build(optim.Weights(model, PRESETS["quickstart"]), PRESETS["quickstart"], RT)
    sum(p.sum() for p in model.parameters()).backward()
    optimizers[0].step()
    state = {"step": 7, "max_steps": 9, "optimizers": optim.full_state(optimizers, RT), "rng": [torch.get_rng_state()]}
    state |= {"scaler": {}, "config": PRESETS["quickstart"].to_dict(), "data": "0123", "versions": {"torch": "2"}}
    state |= {"record": {"step": 7}, "best": {"step": 7, "val_loss": 3.0}, "evaluated": True}
    checkpoint.write(folder / "model_00007.pt", checkpoint.model_file(model, 7, val_loss=3.0, preset="quickstart"))
    checkpoint.write(folder / "optim_00007.pt", {"format": checkpoint.FORMAT, **state})
    (folder / "config.json").write_text(json.dumps({**PRESETS["quickstart"].to_dict(), "world_size": 1}, indent=2))
    rows = [{"step": s, "train_loss": 3.0, "lr": 1e-3, "mfu": None, "tokens_per_second": 1e4} for s in range(9)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


def use(model: GPT) -> None:
    """What every script does with a model that it was given: a forward pass."""
    with torch.no_grad():
        model(torch.zeros(1, min(4, model.config.block_size), dtype=torch.int64))


def read_optim(folder: Path) -> None:
    saved, model = resume.read(folder / "model_00007.pt"), tiny()
    cfg = TrainConfig.from_dict(saved["config"])
    optimizers = optim.build(optim.Weights(model, cfg), cfg, RT)
    resume.restore(saved, optimizers, torch.amp.GradScaler("cpu", enabled=False), RT)
    optim.set_schedule(optimizers, saved["step"], saved["max_steps"], cfg)
    sum(p.sum() for p in model.parameters()).backward()
    [optimizer.step() for optimizer in optimizers]


def read_record(folder: Path) -> None:
    """metrics.jsonl and config.json as the plots, the log of a resumed run and the model card read them."""
    plots.step_unit([folder])
    hub.load(folder / "model_00007.pt")
    [json.dumps(row) for row in metrics.read_lines(folder / "metrics.jsonl")]
    plots.read_metrics(folder)


def make_rows(folder: Path) -> None:
    row = {"activity_label": "Cooking", "ctx_a": "A man [step] stirs.", "ctx_b": "he", "ctx": "A man stirs. he"}
    row |= {"endings": ["eats it.", "sings [x].", "flies away.", "is a pot."], "label": 2}
    (folder / "rows.jsonl").write_text("".join(json.dumps({**row, "ind": i}) + "\n" for i in range(4)))


def read_rows(folder: Path) -> None:
    for style in ("completion", "lm-eval"):
        hellaswag.load_examples(folder / "rows.jsonl", style=style)


def make_hf(folder: Path) -> None:
    from safetensors.torch import save_file

    state = {k: v for k, v in tiny().state_dict().items() if k != "lm_head.weight"}
    state = {k: (v.t() if k.endswith(convert.CONV1D) else v).contiguous() for k, v in state.items()}
    save_file(state, folder / "model.safetensors")
    sizes = zip(convert.SIZES, (16, 64, 2, 2, 16), strict=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **dict(sizes), "auto_map": {"A": "x.py"}}))


def make_hf_bin(folder: Path) -> None:
    from safetensors.torch import load_file

    make_hf(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def make_old(folder: Path) -> None:
    args = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16, "bias": True, "vocab_size": 64, "dropout": 0.0}
    saved = {"model": tiny().state_dict(), "model_args": args, "iter_num": 5, "config": {"device": "cpu"}}
    torch.save(saved, folder / "old.pt")


def read_old(folder: Path) -> None:
    import shutil

    shutil.rmtree(folder / "out", ignore_errors=True)
    convert.import_old(folder / "old.pt", folder / "out")
    use(checkpoint.load_model(folder / "out"))


READERS = {
    "shard.npy": Reader("toy_train_000001.npy", make_shards, read_shard),
    "shard.bin": Reader("toy_train_000001.bin", make_bin, read_shard),
    "manifest.json": Reader("manifest.json", make_shards, read_shards),
    "documents.parquet": Reader("a.parquet", make_parquet, read_documents),
    "documents.jsonl": Reader(
        "a.jsonl",
        lambda d: (d / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in text_rows())) and None,
        read_documents,
    ),
    "documents.txt": Reader("a.txt", lambda d: (d / "a.txt").write_text("".join(text_rows())) and None, read_documents),
    "model.pt": Reader("model_00007.pt", make_run, lambda d: use(checkpoint.load_model(d / "model_00007.pt"))),
    "optim.pt": Reader("optim_00007.pt", make_run, read_optim),
    "metrics.jsonl": Reader("metrics.jsonl", make_run, read_record),
    "run config.json": Reader("config.json", make_run, read_record),
    "hellaswag.jsonl": Reader("rows.jsonl", make_rows, read_rows),
    "hf config.json": Reader("config.json", make_hf, lambda d: use(convert.load_hf(d))),
    "model.safetensors": Reader("model.safetensors", make_hf, lambda d: use(convert.load_hf(d))),
    "pytorch_model.bin": Reader("pytorch_model.bin", make_hf_bin, lambda d: use(convert.load_hf(d))),
    "import old.pt": Reader("old.pt", make_old, read_old),
}

# ------------------------------------------------------------------------- mutations

NUMBERS = [-1, 0, 1, 2, 255, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64, 10**30]
WORDS = ["", "\x1b[2J", "x" * 999, "../x", "\ud800", "٣", "²", "nan", "0", "$a$", "\0", "a/b", "[" * 999]
NUMERIC = [1.5, -0.0, 1e308, float("inf"), float("-inf"), float("nan"), 10**400, True, False]


def number_bytes(rng: random.Random) -> bytes:
    size = rng.choice("bhiq")
    return struct.pack(f"{rng.choice('<>')}{size.upper()}", rng.choice(NUMBERS) % 2 ** (8 * struct.calcsize(size)))


def flip(rng: random.Random, data: bytes, low: int = 0, high: int | None = None) -> bytes:
    """A few small harms to the bytes low .. high: bits, bytes, numbers, cuts, insertions, repetitions."""
    out, end = bytearray(data), len(data) if high is None else min(high, len(data))
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(low, max(low + 1, end))
        n = rng.choice([1, 2, 4, 8, 64, 999])
        kind = rng.randrange(8)
        if kind == 0 and out:
            out[at % len(out)] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at % len(out)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 10, 34, 91, 123, rng.randrange(256)])
        elif kind in (2, 3):
            new = number_bytes(rng)
            out[at : at + len(new)] = new
        elif kind == 4:
            del out[at : at + n]
        elif kind == 5:
            out[at:at] = rng.randbytes(n)
        elif kind == 6:
            out[at:at] = out[at : at + n]
        elif rng.random() < 0.3:
            del out[at:]
        digits = list(re.finditer(rb"\d+", bytes(out[:4000])))
        if kind == 7 and digits:
            d = rng.choice(digits)
            out[d.start() : d.end()] = str(rng.choice(NUMBERS)).encode()
    return bytes(out)


def ends(rng: random.Random, data: bytes) -> bytes:
    """Harm to the first or the last bytes, where formats keep their headers and directories."""
    return flip(rng, data, 0, 200) if rng.random() < 0.5 else flip(rng, data, max(0, len(data) - 600))


def hostile(rng: random.Random) -> object:
    """A value that nobody expects, of the kinds that JSON knows."""
    deep: object = 1
    for _ in range(rng.choice([3, 300])):
        deep = [deep]
    return rng.choice(
        [rng.choice(NUMBERS), rng.choice(WORDS), rng.choice(NUMERIC), None, [], {}, deep, ["x"], {"a": 1}]
    )


def odd_tensor(rng: random.Random) -> object:
    t = torch.zeros(16)
    return rng.choice([
        lambda: t[:1].expand(2**20, 2**16), lambda: t[:1].half().expand(2**20, 2**16), lambda: t.to(torch.int8),
        lambda: t.to(torch.complex64), lambda: t[0], lambda: t.view(2, 2, 2, 2), lambda: t[:0], lambda: t.bool(),
        lambda: torch.eye(16).to_sparse(), lambda: torch.empty(2**40, device="meta"), lambda: t.to(torch.bfloat16),
        lambda: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8), lambda: torch.full((64, 16), float("nan")),
        lambda: torch.eye(16).to_sparse_csr(), lambda: torch.nn.Parameter(t), lambda: bytearray(9), lambda: {1, 2},
        lambda: torch.Size([1]), lambda: torch.float16, lambda: t.to(torch.float64),
    ])()  # fmt: skip


def change_tree(rng: random.Random, tree: object, new: Callable[[random.Random], object]) -> object:
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
            tree[key] = change_tree(rng, tree[key], new)
        return tree
    return new(rng)


def change_json(rng: random.Random, data: bytes) -> bytes:
    """A line of JSON lines, or all of a JSON text, with other values; now and then nested or written out of bounds."""
    lines = data.splitlines() if data.count(b"}\n{") or data.count(b"\n") < 2 else [data]
    at = rng.randrange(len(lines))
    for _ in range(rng.choice([1, 1, 3])):
        lines[at] = json.dumps(
            change_tree(rng, json.loads(lines[at]), hostile), ensure_ascii=rng.random() < 0.9
        ).encode(errors="surrogatepass")
    text = b"\n".join(lines) + b"\n"
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
            tree = change_tree(rng, tree, rng.choice([hostile, odd_tensor]))
        out = io.BytesIO()
        torch.save(tree, out)
        return out.getvalue()
    out, compress = io.BytesIO(), rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compress) as new:
        for info in old.infolist():
            part = old.read(info)
            if info.filename.endswith("/data.pkl"):
                part = (
                    rng.choice([bomb, bomb, lambda r, p: flip(r, p)])(rng, part)
                    if rng.random() < 0.4
                    else flip(rng, part)
                )
            elif rng.random() < 0.02:
                part = rng.choice([b"", part[:-1], part * 2, bytes(1 << 22)])
            if rng.random() > 0.01:
                new.writestr(info.filename, part)
    return out.getvalue()


def bomb(rng: random.Random, pickled: bytes) -> bytes:
    """A pickle that weights_only allows and that asks for memory: of a storage, a bytearray, a tensor, a loop."""
    n = rng.choice(NUMBERS[6:14])
    if rng.random() < 0.5 and (sizes := [m for m in re.finditer(rb"(?s)(K.|M..|J....)(?=[Qt])", pickled)]):
        m = rng.choice(sizes)
        return pickled[: m.start()] + b"\x8a\x08" + struct.pack("<q", n) + pickled[m.end() :]
    what = rng.choice(
        [b"builtins\nbytearray", b"torch\nTensor", b"torch\nFloatTensor", b"torch\nSize", b"builtins\nset"]
    )
    return b"\x80\x02c" + what + b"\n\x8a\x08" + struct.pack("<q", n) + b"\x85R."


def change_safetensors(rng: random.Random, data: bytes) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.6:
        header = change_json(rng, header).strip()
    else:
        header = flip(rng, header)
    stated = len(header) if rng.random() < 0.9 else rng.choice(NUMBERS) % 2**64
    return stated.to_bytes(8, "little") + header + body


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    inner = {"json": change_json, "jsonl": change_json, "pt": change_torch, "bin": change_torch}
    inner["safetensors"] = change_safetensors
    kind = inner.get(name.rpartition(".")[2])
    kind = ends if kind is None or name == "shard.bin" else kind
    return rng.choice([kind, kind, ends, flip])(rng, data)


# ------------------------------------------------------------------------- running them


class Hang(BaseException):
    pass


def on_alarm(*_) -> None:
    raise Hang


def attempt(reader: Reader, folder: Path, size: int) -> str:
    """How one input ends: "read", "refused", or what must not be."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.alarm(SECONDS)
    try:
        reader.read(folder)
        end = "read"
    except UserError as e:
        end = "refused"
        if len(str(e)) > 2000:
            end = f"a message of {len(str(e)):,} characters: {str(e)[:200]}"
    except Hang:
        end = "hang: " + "".join(traceback.format_exc().splitlines(True)[-8:])
    except BaseException as e:
        end = f"{type(e).__name__}: " + "".join(traceback.format_exc().splitlines(True)[-7:])
    finally:
        signal.alarm(0)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    return f"{more >> 20} MB of memory for a file of {size:,} bytes" if more > SLACK + FACTOR * size else end


def child(name: str, numbers: range, seed: int, good: Path, pipe: int) -> None:
    """Read the inputs `numbers` of a reader; a line for each goes into the pipe before it is read, and one after it."""
    reader, out = READERS[name], os.fdopen(pipe, "w", buffering=1)
    signal.signal(signal.SIGALRM, on_alarm)
    sys.stdout = sys.stderr = open(os.devnull, "w")
    os.dup2(sys.stderr.fileno(), 2)
    vm = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (vm + ROOM, vm + ROOM))
    original = (good / reader.file).read_bytes()
    for i in numbers:
        data = mutate(random.Random(f"{seed} {name} {i}"), name, original)
        (good / reader.file).write_bytes(data)
        out.write(json.dumps([i, None]) + "\n")
        out.write(json.dumps([i, attempt(reader, good, len(data))]) + "\n")
    (good / reader.file).write_bytes(original)


def fuzz(name: str, numbers: range, seed: int, folder: Path) -> Iterator[tuple[int, str]]:
    """(number, how it ended) of every input, each batch in a forked child."""
    good, start = folder / "good", numbers.start
    good.mkdir()
    READERS[name].make(good)
    original = (good / READERS[name].file).read_bytes()
    while start < numbers.stop:
        (good / READERS[name].file).write_bytes(original)  # a child that crashed left its input there
        batch, (r, w) = range(start, min(start + BATCH, numbers.stop)), os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.close(r)
                child(name, batch, seed, good, w)
                status = 0
            finally:
                os._exit(status)
        os.close(w)
        with os.fdopen(r) as lines:
            for i, end in map(json.loads, lines):
                last, done = i, end
                if end is not None:
                    yield i, end
        status = os.waitpid(pid, 0)[1]
        if done is None:
            yield last, f"the interpreter died: wait status {status}"
        start = last + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="inputs over all readers")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=READERS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # a thread pool would not survive the fork
    names, bad, total = [args.only] if args.only else list(READERS), [], Counter()
    for n, name in enumerate(names):
        count = args.count // len(names) + (n < args.count % len(names))
        began, ends_, numbers = time.monotonic(), Counter(), range(args.first, args.first + count)
        with tempfile.TemporaryDirectory() as folder:
            for i, end in fuzz(name, numbers, args.seed, Path(folder)):
                ends_[end if end in ("read", "refused") else "bad"] += 1
                if end not in ("read", "refused"):
                    bad.append(f"{name} input {i}: {end}")
            if args.count == 1:
                original = (Path(folder) / "good" / READERS[name].file).read_bytes()
                CASE.write_bytes(mutate(random.Random(f"{args.seed} {name} {args.first}"), name, original))
        total += ends_
        seconds = time.monotonic() - began
        print(f"{name:18} {count:6} inputs: {ends_['read']:5} read, {ends_['refused']:5} refused, "
              f"{ends_['bad']:3} bad, {seconds:.1f} s", flush=True)  # fmt: skip
    print("\n".join(bad))
    print(f"{sum(total.values())} mutated inputs: {total['read']} read, {total['refused']} refused, {total['bad']} bad")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
