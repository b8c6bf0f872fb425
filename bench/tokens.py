"""How fast fineweb.py tokenizes, and in how much memory, against a build-nanogpt-style loop and gigatoken alone.

    python -m bench.tokens 'books-*.parquet'
    python -m bench.tokens 'books-*.parquet' --rounds 5 --enlarge 3
    python -m bench.tokens 'books-*.parquet' --only "row group" --gigabytes 4      # a large file of one row group

The methods take turns in separate processes; the table has medians of wall times:

    fineweb.py      the command, from its start to its end
    loop            what build-nanogpt does: a pool of processes (here one per core), tiktoken on one document at a
                    time, shards filled in the parent; but pyarrow reads the texts, not the `datasets` library
    encode_files    gigatoken's own function, which reads and tokenizes and writes nothing
    row group       fineweb.py on one parquet file whose text is one large row group, for its memory

"enlarged" is the same source --enlarge times over. From both sizes follows the steady rate, which leaves out the
start-up: the additional tokens divided by the additional time. The tokens of fineweb.py and of the loop must be equal.
"""

import glob
import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import tyro

from bench import turns
from system import cli
from tokens import shards, tokenizer

METHODS = ("fineweb.py", "fineweb.py, enlarged", "loop", "encode_files", "encode_files, enlarged")


@dataclass(frozen=True)
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Parquet files with a column `text` (or globs)."""
    rounds: int = 3
    enlarge: int = 3
    """The larger source, for the steady rate, repeats the files this many times."""
    gigabytes: float = 4
    """Text in the one row group."""
    shard_size: int = 10_000_000
    only: tuple[str, ...] = METHODS
    """Some of these, or "row group"."""
    child: str = ""
    """Set for the process that measures one method."""


# ------------------------------------------------------------------------- the methods


def tokenize(text: str) -> np.ndarray:
    """One document as build-nanogpt encodes it: EOT, then its tokens, as uint16 (n,)."""
    return np.array([tokenizer.EOT, *tokenizer.encoding().encode_ordinary(text)], dtype=np.uint16)


def run_loop(out: Path, shard_size: int, files: list[str]) -> None:
    """The loop to compare with: a pool, one document at a time, np.save."""
    from pyarrow import parquet

    # The texts of all files, one by one.
    batches = (batch for file in files for batch in parquet.ParquetFile(file).iter_batches(columns=["text"]))
    texts = (text for batch in batches for text in batch.column(0).to_pylist())

    # One array is filled again and again: `filled` tokens of shard number `index`.
    shard = np.empty(shard_size, np.uint16)
    filled = 0
    index = 0
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for tokens in pool.imap(tokenize, texts, chunksize=16):
            # As long as this document fills a shard: write it, and continue with the rest of the document.
            while filled + len(tokens) >= shard_size:
                count = shard_size - filled
                shard[filled:] = tokens[:count]
                np.save(out / f"loop_train_{index:06d}.npy", shard)
                tokens = tokens[count:]
                filled = 0
                index += 1

            # The rest of the document begins the next shard, or continues this one.
            shard[filled : filled + len(tokens)] = tokens
            filled += len(tokens)

    # The last shard is shorter.
    if filled:
        np.save(out / f"loop_train_{index:06d}.npy", shard[:filled])


def run_fineweb(*flags: str) -> int:
    """Run fineweb.py; returns its peak resident size in kB."""
    # Its output goes to stderr, as this process prints its result on stdout. wait4 also returns what the process used.
    process = subprocess.Popen([sys.executable, "fineweb.py", *flags], stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    cli.require(process.returncode == 0, f"fineweb.py ended with {process.returncode}")
    return usage.ru_maxrss


def write_one_row_group(files: list[str], gigabytes: float, out: str) -> None:
    """Write the files' texts, repeated up to a size, as one row group."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    # large_string: the column of one row group may be longer than the 2 GB that 32-bit offsets reach.
    text = pa.concat_tables([pq.read_table(f, columns=["text"]) for f in files])
    text = pa.table({"text": text["text"].cast(pa.large_string())})
    repeats = max(1, round(gigabytes * 1e9 / text.nbytes))
    pq.write_table(pa.concat_tables([text] * repeats), out, row_group_size=10**9)


# ------------------------------------------------------------------------- measuring


def peak_rss_kb() -> int:
    """Peak resident size in kB of this process or of a child, whichever is larger."""
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure_method(args: Args) -> None:
    """In a process of its own: measure the method args.child, and print the result as JSON."""
    import gigatoken

    # "loop" or "fineweb.py, enlarged"; the files that the patterns name.
    method, _, enlarged = args.child.partition(", ")
    files = [os.path.abspath(f) for pattern in args.files for f in sorted(glob.glob(pattern)) or [pattern]]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        out.mkdir()

        # The source: links to the files, named in order; for an enlarged source several to each file. Or one large row
        # group.
        sources = []
        for i, file in enumerate(files * (args.enlarge if enlarged else 1)):
            sources.append(f"{folder}/{i:04d}.parquet")
            os.symlink(file, sources[-1])
        if method == "row group":
            sources = [f"{folder}/large.parquet"]
            # Write it in a process of its own: a process starts with the peak of the one that forks it, so the memory
            # that is needed here would count as fineweb.py's.
            writer_args = (files, args.gigabytes, sources[0])
            writer = multiprocessing.get_context("spawn").Process(target=write_one_row_group, args=writer_args)
            writer.start()
            writer.join()

        # The loop and encode_files find the vocabulary loaded; fineweb.py loads it itself, within its time.
        encoder = tokenizer.bulk_encoder()
        start = time.perf_counter()
        match method:
            case "loop":
                run_loop(out, args.shard_size, sources)
                peak = peak_rss_kb()
            case "encode_files":
                encoder.encode_files(gigatoken.ParquetFileSource(sources, "text"))
                peak = peak_rss_kb()
            case "fineweb.py" | "row group":
                peak = run_fineweb("--source", *sources, "--out", str(out), "--shard-size", str(args.shard_size))
            case _:
                raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)} or row group")
        seconds = time.perf_counter() - start

        # The tokens that were written, and their hash, by which the methods are compared.
        digest = hashlib.sha256()
        tokens = 0
        for path in shards.shard_files(out):
            ids = shards.read_shard(path)
            tokens += len(ids)
            digest.update(ids)
        result = {"ms": 1e3 * seconds, "gb": peak / 1e6, "tokens": tokens, "sha256": digest.hexdigest()}
        print(json.dumps(result))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return measure_method(args)
    results = turns.measure_in_turns("bench.tokens", args.only, args.rounds)

    # Speed counts only if the tokens are the same.
    if "loop" in results and "fineweb.py" in results:
        hashes = {results[name][0]["sha256"] for name in ("loop", "fineweb.py")}
        cli.require(len(hashes) == 1, "fineweb.py and the loop produce different tokens")

    # Medians of seconds, and how many tokens there were. encode_files writes none: it has the number of fineweb.py.
    seconds = {name: median(run["ms"] for run in runs) / 1e3 for name, runs in results.items()}
    tokens = {name: runs[0]["tokens"] for name, runs in results.items()}
    for name in tokens:
        if not tokens[name]:
            tokens[name] = tokens.get(name.replace("encode_files", "fineweb.py"), 0)

    # The table: one row a method, and one row for each steady rate.
    print(f"{os.cpu_count()} cores\n| | tokens | seconds | M tokens/s | peak resident GB |\n|---|---|---|---|---|")
    for name, runs in results.items():
        rate = tokens[name] / seconds[name] / 1e6
        peak = max(run["gb"] for run in runs)
        print(f"| {name} | {tokens[name]:,} | {seconds[name]:.2f} | {rate:.1f} | {peak:.2f} |")
    for name in ("fineweb.py", "encode_files"):
        enlarged = f"{name}, enlarged"
        if name in results and enlarged in results:
            rate = (tokens[enlarged] - tokens[name]) / (seconds[enlarged] - seconds[name]) / 1e6
            print(f"| {name}, steady | | | {rate:.1f} | |")


if __name__ == "__main__":
    cli.run_cli(main)
