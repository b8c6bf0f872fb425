"""How fast fineweb.py tokenizes, against a build-nanogpt-style loop and gigatoken alone, in the same run.

    python bench/tokens.py 'books-*.parquet'
    python bench/tokens.py 'books-*.parquet' --repeats 5 --enlarge 3

Whole-process wall times, interleaved, medians. The loop is what build-nanogpt does: a pool of processes (here one per
core), tiktoken on one document at a time, shards filled in the parent; but it reads texts with pyarrow, not with the
`datasets` library. The steady rate leaves out the start-up: the additional tokens of a source enlarged --enlarge times,
divided by the additional time.
"""

import glob
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True)
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Parquet files with a column `text` (or globs)."""
    repeats: int = 3
    """Runs of each; the table shows their medians."""
    enlarge: int = 3
    """The larger source, for the steady rate, repeats the files this many times."""
    shard_size: int = 10_000_000
    """Tokens per shard, for both."""


def tokenize(text: str):
    """One document as build-nanogpt encodes it: EOT, then its tokens, as uint16 (n,)."""
    import numpy as np

    import tokenizer

    return np.array([tokenizer.EOT, *tokenizer.encoding().encode_ordinary(text)], dtype=np.uint16)


def loop(out: Path, shard_size: int, files: list[str]) -> None:
    """The loop to compare with: a pool, one document at a time, np.save."""
    import multiprocessing

    import numpy as np
    from pyarrow import parquet

    batches = (batch for file in files for batch in parquet.ParquetFile(file).iter_batches(columns=["text"]))
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    shard, filled, index = np.empty(shard_size, np.uint16), 0, 0
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for tokens in pool.imap(tokenize, texts, chunksize=16):
            while filled + len(tokens) >= shard_size:
                take = shard_size - filled
                shard[filled:] = tokens[:take]
                np.save(out / f"loop_{index:06d}.npy", shard)
                tokens, filled, index = tokens[take:], 0, index + 1
            shard[filled : filled + len(tokens)] = tokens
            filled += len(tokens)
    if filled:
        np.save(out / f"loop_{index:06d}.npy", shard[:filled])


def alone(files: list[str]) -> None:
    """gigatoken from files to ids in memory; prints the seconds that call takes."""
    import gigatoken

    import tokenizer

    encoder, began = tokenizer.bulk_encoder(), time.time()
    encoder.encode_files(gigatoken.ParquetFileSource(files, "text"))
    print(json.dumps(time.time() - began))


def timed(*command) -> tuple[float, float, str]:
    """(wall seconds, peak resident GB of the largest of its processes, last line of output) of a command."""
    began = time.time()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.time() - began
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        sys.exit(f"{command} failed:\n{text[-3000:]}")
    return seconds, usage.ru_maxrss / 1e6, text.strip().rpartition("\n")[2]


def main() -> None:
    import numpy as np

    import shards

    args = tyro.cli(Args, description=__doc__)
    files = [os.path.abspath(f) for pattern in args.files for f in sorted(glob.glob(pattern)) or [pattern]]
    results: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch, large = Path(folder), []
        for i, file in enumerate(files * args.enlarge):
            large.append(str(scratch / f"{i:04d}.parquet"))
            os.symlink(file, large[-1])

        def note(name: str, seconds: float, gigabytes: float) -> None:
            results.setdefault(name, []).append((seconds, gigabytes))
            print(f"  {name}: {seconds:.2f} s, {gigabytes:.2f} GB", flush=True)

        for turn in range(args.repeats):
            print(f"round {turn + 1} of {args.repeats}", flush=True)
            for name, sources in (("fineweb.py", files), ("fineweb.py, enlarged", large)):
                out = scratch / f"{name} {turn}"
                ours = timed(ROOT / "fineweb.py", "--source", *sources, "--out", out, "--shard-size", args.shard_size)
                note(name, *ours[:2])
            theirs = scratch / f"loop {turn}"
            theirs.mkdir()
            note("build-nanogpt-style loop", *timed(__file__, "--loop", theirs, args.shard_size, *files)[:2])
            for name, sources in (("encode_files", files), ("encode_files, enlarged", large)):
                _, gigabytes, seconds = timed(__file__, "--alone", *sources)
                note(name, float(seconds), gigabytes)
            if turn == 0:
                made = scratch / "fineweb.py 0"
                a = np.concatenate([shards.read_shard(made / s.file) for s in shards.read_manifest(made).shards])
                b = np.concatenate([np.load(p) for p in sorted(theirs.glob("*.npy"))])
                assert np.array_equal(a, b), "the two produce different tokens"
                tokens = len(a)
            subprocess.run(["rm", "-rf", *map(str, scratch.glob("fineweb.py *")), str(theirs)], check=True)

    wall = {name: statistics.median(t for t, _ in runs) for name, runs in results.items()}
    memory = {name: max(m for _, m in runs) for name, runs in results.items()}
    print(
        f"\n{tokens:,} tokens, identical from both; {os.cpu_count()} cores; median of {args.repeats}, largest memory\n"
    )
    print("| | seconds | M tokens/s | peak resident GB |\n|---|---|---|---|")
    for name in ("fineweb.py", "build-nanogpt-style loop", "encode_files"):
        print(f"| {name} | {wall[name]:.2f} | {tokens / wall[name] / 1e6:.1f} | {memory[name]:.2f} |")
    more = tokens * (args.enlarge - 1) / 1e6
    rate = {name: more / (wall[f"{name}, enlarged"] - wall[name]) for name in ("fineweb.py", "encode_files")}
    for name in rate:
        print(f"| {name}, steady | | {rate[name]:.1f} | {memory[f'{name}, enlarged']:.2f} |")
    print(
        f"\nfineweb.py is {wall['build-nanogpt-style loop'] / wall['fineweb.py']:.1f} times as fast as the loop",
        end="; ",
    )
    print(f"steady, it reaches {rate['fineweb.py'] / rate['encode_files']:.0%} of the rate of encode_files alone")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--loop"]:
        loop(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1:2] == ["--alone"]:
        alone(sys.argv[2:])
    else:
        main()
