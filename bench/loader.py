"""How long the loader takes for a step of 524,288 tokens, for its first batch, and where a new shard begins.

    python -m bench.loader                        # shards of random tokens in a temporary folder (2 GB)
    python -m bench.loader --data-dir data/books  # your own

Each order is measured in processes of its own, in turns; the table has medians.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
import tyro

from bench import turns
from system import cli
from system.distributed import Runtime
from tokens import shards
from tokens.loader import Loader

SEQUENCES, B, T = 512, 64, 1024  # of a step, of a micro-batch; tokens of a sequence: as in gpt2-124m
FAR_STEP = 10**6 + 7  # more than any run has: resuming there must cost no more than at step 0


@dataclass(frozen=True)
class Args:
    data_dir: Path | None = None
    """A folder of shards; default: a temporary one with --shards shards of --shard-tokens random tokens each."""
    shards: int = 10
    shard_tokens: int = 100_000_000
    steps: int = 250
    """Steps to time, one after the other; the slowest of them is the one that reads a new shard."""
    rounds: int = 1
    child: str = ""
    """Set for the process that measures one order."""


def measure_order(args: Args) -> None:
    """In a process of its own: measure the order args.child, and print the result as JSON."""
    rt = Runtime(torch.device("cpu"), torch.float32)
    shuffle = args.child == "shuffled"

    def open_loader() -> Loader:
        return Loader(args.data_dir, "train", T=T, vocab_size=50257, seed=1, shuffle=shuffle)

    def read_step(data: Loader, step: int) -> None:
        # (micro_steps, B, 2) pairs of (shard, sequence) -> (SEQUENCES, 2)
        data.read(data.step_sequences(step, SEQUENCES, B).reshape(-1, 2))

    # From nothing to the first batch: headers, a shard, the prefetch thread.
    first_seconds = turns.measure_seconds(lambda: next(open_loader().batches(0, SEQUENCES, B, rt)), rt)

    # Step by step, without the prefetch thread, which would hide the time: the slowest step reads a new shard.
    data = open_loader()
    step_ms = []
    for step in range(args.steps):
        step_ms.append(1e3 * turns.measure_seconds(functools.partial(read_step, data, step), rt))

    # What resuming costs: the first batch of a step that is far from the start.
    seek_seconds = turns.measure_seconds(lambda: next(data.batches(FAR_STEP, SEQUENCES, B, rt)), rt)

    # Times in ms, but "first" and "seek" in seconds.
    result = {"ms": median(step_ms), "worst": max(step_ms), "first": first_seconds, "seek": seek_seconds}
    print(json.dumps(result))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return measure_order(args)

    # Measure both orders, on the folder of --data-dir or on one of random tokens: the same ones in every shard.
    with tempfile.TemporaryDirectory() as folder:
        if not args.data_dir:
            tokens = np.random.default_rng(0).integers(0, 50257, args.shard_tokens).astype(np.uint16)
            for i in range(args.shards):
                shards.write_shard(Path(folder) / f"random_train_{i:06d}.npy", tokens)
        data_flag = ("--data-dir", str(args.data_dir or folder))
        results = turns.measure_in_turns("bench.loader", ("shuffled", "in order"), args.rounds, *data_flag)

    # The table: medians over the rounds.
    print("| order | first batch s | step ms, median | worst (a new shard) | seek to step 1,000,007 s |")
    print("|---|---|---|---|---|")
    for order, runs in results.items():
        first, ms, worst, seek = (median(run[key] for run in runs) for key in ("first", "ms", "worst", "seek"))
        print(f"| {order} | {first:.3f} | {ms:.2f} | {worst:.1f} | {seek:.3f} |")


if __name__ == "__main__":
    cli.run_cli(main)
