"""The benches still run, and print their tables. At their smallest: the figures in them mean nothing."""

import shlex
import subprocess
import sys

import pytest
from helpers import ROOT, make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

# The arguments of each bench, without what needs a peer, and the rows of its table.
SMALL = "--micro-batch-size 4 --sequence-length 32 --total-batch-size 256 --no-compile"
SMALL += " --model.n-layer 1 --model.n-head 2 --model.n-embd 32 --model.block-size 32"
RUNS = {
    "train": (f"--rounds 1 --only ours plain -- {SMALL} --data-dir {{tmp}}/data", "ours plain"),
    "tokens": ("{tmp}/a.parquet --rounds 1 --only ours", "ours"),
    "samples": ("--rounds 1", "ours transformers loop"),
    "hellaswag": ("--rounds 1 --data {tmp}/rows.jsonl --limit 2", "ours loop"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_bench_runs(name, tmp_path):
    make_shards(tmp_path / "data", size=200_000)
    write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4))
    write_parquet(tmp_path / "a.parquet", make_documents(1))
    arguments, rows = RUNS[name]

    words = shlex.split(arguments.format(tmp=tmp_path))
    command = [sys.executable, "-m", "bench.speed", name, *words]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=600)

    _, _, table = output.partition("|---|")
    assert [line.split(" | ")[0] for line in table.splitlines()[1:]] == [f"| {row}" for row in rows.split()], output
