"""How long the loader takes for a step of 524,288 tokens, for its first batch, and where a new shard begins.

python -m bench.loader                        # shards of random tokens in a temporary folder (2 GB)
python -m bench.loader --data-dir data/books  # your own
"""

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


@dataclass(frozen=True)
class Args:
    data_dir: Path | None = None
    shards: int = 10
    shard_tokens: int = 100_000_000
    steps: int = 250
    rounds: int = 1
    child: str = ""
    """Set for the process that measures one order."""


def child(args: Args) -> None:
    rt = Runtime(torch.device("cpu"), torch.float32)

    def open_loader() -> Loader:
        return Loader(args.data_dir, "train", T=1024, vocab_size=50257, seed=1, shuffle=args.child == "shuffled")

    first = turns.seconds(lambda: next(open_loader().batches(0, 512, 64, rt)), rt)
    data, times = open_loader(), []
    for step in range(args.steps):
        times.append(1e3 * turns.seconds(lambda: data.read(data.step_sequences(step, 512, 64).reshape(-1, 2)), rt))  # noqa: B023
    seek = turns.seconds(lambda: next(data.batches(10**6 + 7, 512, 64, rt)), rt)
    print(json.dumps({"ms": median(times), "worst": max(times), "first": first, "seek": seek}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    with tempfile.TemporaryDirectory() as folder:
        if not args.data_dir:
            tokens = np.random.default_rng(0).integers(0, 50257, args.shard_tokens).astype(np.uint16)
            for i in range(args.shards):
                shards.write_shard(Path(folder) / f"random_train_{i:06d}.npy", tokens)
        where = ("--data-dir", str(args.data_dir or folder))
        found = turns.in_turns("bench.loader", ("shuffled", "in order"), args.rounds, *where)
    print("| order | first batch s | step ms, median | worst (a new shard) | seek to step 1,000,007 s |")
    print("|---|---|---|---|---|")
    for order, runs in found.items():
        first, ms, worst, seek = (median(run[key] for run in runs) for key in ("first", "ms", "worst", "seek"))
        print(f"| {order} | {first:.3f} | {ms:.2f} | {worst:.1f} | {seek:.3f} |")


if __name__ == "__main__":
    cli.run_cli(main)
