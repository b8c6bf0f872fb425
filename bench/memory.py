"""Peak resident memory and disk use of fineweb.py on one large parquet file with a single row group.

python bench/memory.py 'books-*.parquet' --gigabytes 4
"""

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Args:
    files: tyro.conf.Positional[tuple[str, ...]]
    gigabytes: float = 4.0


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    make = "import sys, pyarrow as pa, pyarrow.parquet as pq\n"
    make += "text = pa.concat_tables([pq.read_table(f, columns=['text']) for f in sys.argv[3:]])\n"
    make += "n = max(1, round(float(sys.argv[2]) * 1e9 / text.nbytes))\n"
    make += "text = pa.table({'text': text['text'].cast(pa.large_string())})\n"
    make += "pq.write_table(pa.concat_tables([text] * n), sys.argv[1], row_group_size=10**9)\n"
    paths = [p for pattern in args.files for p in sorted(glob(pattern))]
    with tempfile.TemporaryDirectory() as folder:
        big, out = Path(folder) / "big.parquet", Path(folder) / "out"
        subprocess.run([sys.executable, "-c", make, str(big), str(args.gigabytes), *paths], check=True)
        began = time.perf_counter()
        command = [sys.executable, str(ROOT / "fineweb.py"), "--source", str(big), "--out", str(out)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        peak = disk = 0.0
        while process.poll() is None:  # VmHWM is the process's own high-water mark
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max([peak, *(int(line.split()[1]) * 1e3 for line in status.splitlines() if "VmHWM" in line)])
                disk = max(disk, sum(p.stat().st_size for p in out.rglob("*") if p.is_file()))
            except (OSError, ValueError):
                pass
            time.sleep(0.1)
        seconds = time.perf_counter() - began
        print(process.stdout.read().splitlines()[0])
        size = f"{big.stat().st_size / 1e9:.2f} GB of parquet, {args.gigabytes:g} GB of text, one row group"
        print(f"{size}: {seconds:.1f} s")
        shards = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
        print(f"peak resident {peak / 1e9:.2f} GB; peak disk beyond the shards {(disk - shards) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
