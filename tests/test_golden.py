"""What small fixed runs and small fixed shards gave when tests/golden.json was made, and must still give.

Every preset at a toy size, every optimizer and every schedule, for a few steps; every format of shards. This adds the
lines that are missing; where a change of these numbers is meant, delete their lines first, and look at the differences:

    PYTHONPATH=. python tests/test_golden.py
"""

import hashlib
import json
import tempfile
from pathlib import Path

import pytest
import torch
from corpora import run_fineweb
from helpers import (
    CPU,
    ROOT,
    TINY_FLAGS,
    TRICKY_TEXTS,
    choices,
    load_metrics,
    parse_config,
    read_json,
    write_jsonl,
    write_random_walk_shards,
)

import train_gpt2
from lifecycle.stop import StopRequest
from tokens import shards
from training import muon
from training.config import TrainConfig
from training.presets import PRESETS

GOLDEN = ROOT / "tests" / "golden.json"

# A preset at a size of its own, and without what a CPU of another kind rounds otherwise; its rate is high at once.
TOY = """--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--init-from scratch --sequence-length 32 --total-batch-size 256 --micro-batch-size 4 --max-steps 4 --warmup-steps 1
--val-tokens 1024 --val-every 2 --hellaswag-every 0 --no-compile --dtype float32 --param-dtype float32"""

RUNS = {f"preset {name}": [name, TOY] for name in PRESETS}
for field in ("optimizer", "schedule"):
    for value in choices(TrainConfig, field):
        flags = f"--max-steps 5 --cooldown 0.5 --{field} {value}"
        RUNS[f"{field} {value}"] = ["quickstart", *TINY_FLAGS, flags]


def measure_run(name, folder):
    """The losses, gradient norms and rates of a run of RUNS, step by step where they were measured."""
    torch.set_num_threads(1)
    data = write_random_walk_shards(folder / "data")
    cfg = parse_config(*RUNS[name], "--data-dir", data, "--out-dir", folder / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "NEWTON_SCHULZ_DTYPE", torch.float32)
        train_gpt2.open_and_train(cfg, CPU, StopRequest())
    lines = load_metrics(folder / "run")
    keys = ("train_loss", "val_loss", "grad_norm", "lr")
    return {key: [float(f"{line[key]:.6g}") for line in lines if key in line] for key in keys}


def hash_shards(shard_format, folder):
    """{name: sha256} of each shard of a few texts."""
    source = write_jsonl(folder / "golden.jsonl", [{"text": text} for text in TRICKY_TEXTS])
    out = folder / "golden"
    run_fineweb("--shard-size 2000 --format", shard_format, "--source", source, "--out", out)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards.shard_files(out)}


# The cases of the table, and what measures one of them.
MEASURES = dict.fromkeys(RUNS, measure_run) | dict.fromkeys(("npy", "bin"), hash_shards)


@pytest.mark.parametrize("name", MEASURES)
def test_golden_numbers_and_bytes(tmp_path, name):
    golden = read_json(GOLDEN).get(name)
    assert golden is not None, "to add its line: PYTHONPATH=. python tests/test_golden.py"

    found = MEASURES[name](name, tmp_path)

    assert found.keys() == golden.keys()
    for key, expected in golden.items():
        # CPUs round differently; bytes are equal. AdamW divides a gradient by its size, so one that is mostly rounding
        # moves its weight as far as any other: errors of 8 * 2**-24 change the norms of the preset overfit by 8e-5.
        rel = 3e-4 if key == "grad_norm" else 1e-4
        assert found[key] == (expected if isinstance(expected, str) else pytest.approx(expected, rel=rel)), key


def make_table(known):
    """Write golden.json, a line for each case; those that are `known` stay as they are."""
    lines = []
    for name, measure in MEASURES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = known.get(name) or measure(name, Path(folder))
        lines.append(f"{json.dumps(name)}: {json.dumps(found)}")
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    make_table(read_json(GOLDEN))
