"""The benchmarks still run, and print their tables. At their smallest: the figures in them mean nothing."""

import shlex

import pytest
from helpers import make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

# A network and a step that take a fraction of a second.
SMALL = (
    "--optimizer=adamw --micro-batch-size=4 --sequence-length=32 --total-batch-size=256 --model.vocab-size=50304 "
    "--model.n-layer=1 --model.n-head=2 --model.n-embd=32 --model.block-size=32"
)
# Each module of bench/ with its arguments, and what its output then has: the row or the word of a result.
BENCHES = {
    "attention": ("--device cpu --batch 1 --sequence-length 64 --width 64 --rounds 1 --repeats 1", "| math |"),
    "checkpoint": ("overfit --rounds 1 --dir {tmp}", "the stall"),
    "generate": ("--device cpu --dtype float32 --rounds 1 --new-tokens 2 --samples 1 --only ours", "| ours |"),
    "hellaswag": ("--device cpu --dtype float32 --data {tmp}/rows.jsonl --limit 2 --rounds 1", "| one at a time |"),
    "head": ("--rows 64 --columns 256 --width 32 --rounds 1 --repeats 1", "| ours compiled |"),
    "loader": ("--shards 1 --shard-tokens 600000 --steps 1", "|"),
    "recipes": (
        "--data-dir {tmp}/data --steps 2 --seeds 1 --recipes adamw --out {tmp} --report {tmp}/r",
        "| adamw |",
    ),
    "resume": ("quickstart --data-dir {tmp}/data --steps 4 --ways dtype=float32 -- " + SMALL, "float32"),
    "tokens": ("{tmp}/a.parquet --rounds 1 --enlarge 2 --only fineweb.py loop", "fineweb.py"),
    "train": ("quickstart --data-dir {tmp}/data --steps 1 --rounds 1 --only ours -- " + SMALL, "| ours |"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_runs(name, run_in_fork, tmp_path):
    arguments, expected = BENCHES[name]
    make_shards(tmp_path / "data", size=200_000)
    write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4))
    write_parquet(tmp_path / "a.parquet", make_documents(1))
    output = run_in_fork(f"bench.{name}", *shlex.split(arguments.format(tmp=tmp_path)), timeout=600).stdout
    assert expected in output, output
