"""How fast fineweb.py tokenizes, beside build-nanogpt's fineweb.py, and in how much memory.

    python -m bench tokens 'books-*.parquet'

All run as commands, in turns, on the same parquet files, and must write the same tokens. build-nanogpt's is edited in
three places: it reads these files instead of the Hub's, has one process per core instead of one per two, and gets its
vocabulary from this project's package instead of a download. The row `ids` is fineweb.py --ids-column, on parquet files
of the same documents as lists of token ids, which are made before.
"""

import glob
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro

from bench import peers, turns
from system.cli import require

WAYS = ("fineweb.py", "ids", "build-nanogpt")
EDITS = {
    r'load_dataset\("HuggingFaceFW/fineweb-edu", name=remote_name,': 'load_dataset("parquet", data_files={files},',
    r"os\.cpu_count\(\)//2": "os.cpu_count()",
    r'tiktoken\.get_encoding\("gpt2"\)': "tokenizer.encoding()",
    r"import tiktoken": "from tokens import tokenizer",
    r"int\(1e8\)": "{shard_size}",
}


@dataclass(frozen=True)
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    """Parquet files with a column `text` (or globs)."""
    peers: Path = peers.DEFAULT_FOLDER
    """Folder with a clone of build-nanogpt; if it is missing, it is fetched."""
    rounds: int = 3
    shard_size: int = 10_000_000
    only: tuple[str, ...] = WAYS


def write_ids(files: list[str], folder: str) -> list[str]:
    """Parquet files of the same documents as lists of token ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from tokens import tokenizer

    encoder = tokenizer.bulk_encoder()
    written = []
    for i, file in enumerate(files):
        written.append(f"{folder}/{i:04d}.parquet")
        schema = pa.schema({"tokens": pa.list_(pa.uint16())})
        with pq.ParquetWriter(written[-1], schema) as writer:
            for batch in pq.ParquetFile(file).iter_batches(1000, columns=["text"]):
                texts = [text or "" for text in batch.column(0).to_pylist()]
                rows = encoder.encode_batch(texts).tolist()
                writer.write_table(pa.table({"tokens": rows}, schema))
    return written


def measure(args: Args, files: list[str], files_of_ids: list[str], source: str, way: str) -> dict:
    """In a process of its own: tokenize the files in one way. Time and memory are those of the command."""
    import numpy as np

    root = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        if way != "build-nanogpt":
            out = Path(folder, "out")
            command = [sys.executable, "fineweb.py", "--out", str(out), "--shard-size", str(args.shard_size)]
            if way == "ids":
                command += ["--ids-column", "tokens", "--source", *files_of_ids]
            else:
                command += ["--source", *files]
        else:
            out = Path(folder, "edu_fineweb10B")
            script = Path(folder, "fineweb.py")
            for pattern, replacement in EDITS.items():
                replacement = replacement.replace("{files}", repr(files)).replace("{shard_size}", str(args.shard_size))
                source, count = re.subn(pattern, replacement, source)
                require(count, f"build-nanogpt's fineweb.py has no {pattern!r}: is it another version?")
            script.write_text(source)
            command = [sys.executable, str(script)]

        # Its output goes to stderr. wait4 returns what the process and its children used.
        env = os.environ | {"PYTHONPATH": root, "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=sys.stderr, env=env)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        code = os.waitstatus_to_exitcode(status)
        require(code == 0, f"{way} ended with {code}")

        # The tokens in the order of the shards' numbers, and their hash.
        digest, tokens = hashlib.sha256(), 0
        for path in sorted(out.glob("*.npy"), key=lambda path: path.stem.split("_")[-1]):
            ids = np.load(path)
            tokens += len(ids)
            digest.update(ids)
    return {"ms": 1e3 * seconds, "gb": usage.ru_maxrss / 1e6, "tokens": tokens, "sha256": digest.hexdigest()}


def main(argv: list[str]) -> None:
    args = tyro.cli(Args, args=argv, description=__doc__, prog="python -m bench tokens")
    files = [os.path.abspath(file) for pattern in args.files for file in sorted(glob.glob(pattern)) or [pattern]]
    missing = [file for file in files if not os.path.isfile(file)]
    require(not missing, f"no file {', '.join(missing)}")
    source = peers.read(args.peers, "build-nanogpt", "fineweb.py") if "build-nanogpt" in args.only else ""
    with tempfile.TemporaryDirectory() as folder:
        files_of_ids = turns.run_apart(write_ids, files, folder) if "ids" in args.only else []
        results = turns.take_turns(partial(measure, args, files, files_of_ids, source), args.only, args.rounds)
    hashes = {runs[0]["sha256"] for runs in results.values()}
    require(len(hashes) == 1, f"the tokens differ: {', '.join(results)}")

    first_ms = turns.median_of(next(iter(results.values())))
    rows = {}
    for way, runs in results.items():
        ms = turns.median_of(runs)
        rate = runs[0]["tokens"] / ms / 1e3
        gb = max(run["gb"] for run in runs)
        rows[way] = [f"{ms / 1e3:.2f}", f"{rate:.1f}", f"{ms / first_ms:.2f}x", f"{gb:.2f}"]
    tokens = next(iter(results.values()))[0]["tokens"]
    columns = "seconds, whole process | M tokens/s | ours is | peak GB of a process"
    turns.print_table(columns, rows, f"{tokens:,} tokens, the same in all rows")
