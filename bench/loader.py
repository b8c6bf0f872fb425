"""How long the loader takes for a step of 524,288 tokens, for its first batch, and where a new shard begins.

python bench/loader.py               # shards of random tokens in a temporary folder (2 GB)
python bench/loader.py data/books    # your own
"""

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Args:
    data_dir: tyro.conf.Positional[Path | None] = None
    shards: int = 10
    shard_tokens: int = 100_000_000
    steps: int = 250


def measure(folder: Path, steps: int) -> None:
    import torch

    from loader import Loader
    from runtime import Runtime

    rt = Runtime(torch.device("cpu"), torch.float32)
    for shuffle in (True, False):
        began = time.perf_counter()
        data = Loader(folder, "train", T=1024, vocab_size=50257, seed=1, shuffle=shuffle)
        next(data.batches(0, 512, 64, rt))
        first = time.perf_counter() - began
        times = []
        for step in range(1, steps + 1):
            t0 = time.perf_counter()
            data.read(data.step_windows(step, 512, 64).reshape(-1, 2))
            times.append(1e3 * (time.perf_counter() - t0))
        seek = time.perf_counter()
        next(islice(data.batches(10**6 + 7, 512, 64, rt), 1))
        seek = time.perf_counter() - seek
        order = "shuffled" if shuffle else "in order"
        worst = max(times)
        print(f"| {order} | {first:.3f} | {statistics.median(times):.2f} | {worst:.1f} | {seek:.3f} |")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    print("| order | first batch s | step ms, median | worst (a new shard) | seek to step 1,000,007 s |")
    print("|---|---|---|---|---|")
    if args.data_dir:
        return measure(args.data_dir, args.steps)
    import shards

    with tempfile.TemporaryDirectory() as folder:
        tokens = np.random.default_rng(0).integers(0, 50257, args.shard_tokens).astype(np.uint16)
        for i in range(args.shards):
            shards.write_shard(Path(folder) / f"random_train_{i:06d}.npy", tokens)
        measure(Path(folder), args.steps)


if __name__ == "__main__":
    main()
