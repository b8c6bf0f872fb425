"""Which runs end with the same bits: one repeated, and one killed with SIGKILL and resumed, against one undisturbed.

    python -m bench.resume quickstart --data-dir data/stdlib                     # minutes on a CPU
    python -m bench.resume gpt2-124m --data-dir data/fineweb-edu -- --total-batch-size 65536     # on a GPU

For each way (dtype, with and without --deterministic, recompute, and whatever else --ways names, as flags of
train_gpt2.py) it prints how many weights differ in the final checkpoints and by how much at most. The kill comes
right after the first checkpoint, wherever the next step is by then.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from system import cli, machine
from training import metrics_file
from training.open_model import open_model

WAYS = ("default", "deterministic", "deterministic recompute", "dtype=float16", "dtype=float16 deterministic")


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "quickstart"
    flags: tyro.conf.Positional[tuple[str, ...]] = ()
    """More flags of train_gpt2.py, after --."""
    data_dir: str = "data/stdlib"
    steps: int = 12
    ways: tuple[str, ...] = WAYS
    """Flags of each way, without leading hyphens: --ways default "deterministic recompute" dtype=float32."""


def run(command: list[str], kill_at: Path | None = None) -> str:
    """Run to the end, or kill with SIGKILL once `kill_at` exists. Returns what it printed."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if kill_at and kill_at.exists():
                process.kill()
            time.sleep(0.002)  # a tiny model's next checkpoint may be 30 ms away
        said.seek(0)
        text = said.read()
    killed = process.returncode < 0
    as_meant = killed if kill_at else process.returncode == 0
    cli.require(as_meant, f"{' '.join(command)} ended with {process.returncode}: {text[-1500:]}")
    return text


def difference(a: Path, b: Path) -> str:
    """How the weights of two checkpoints differ."""
    pairs = zip(open_model(a).parameters(), open_model(b).parameters(), strict=True)
    apart = [(p - q).detach().abs() for p, q in pairs]
    count, total = sum(int((d != 0).sum()) for d in apart), sum(d.numel() for d in apart)
    if count == 0:
        return "same bits"
    return f"{count / total:.1%} differ, by {max(d.max().item() for d in apart):.1e}"


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    device = machine.device_name(machine.choose_device())
    half, last = args.steps // 2, f"model_{args.steps:05d}.pt"
    print(f"{args.preset} {' '.join(args.flags)}, {args.steps} steps, on {device}, torch {torch.__version__}")
    print("| way | done twice | killed and resumed | step ms | loss at the end |\n|---|---|---|---|---|")
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            base = [sys.executable, "train_gpt2.py", args.preset, "--data-dir", args.data_dir]
            base += f"--max-steps {args.steps} --save-every {half} --val-every 0 --sample-every 0".split()
            base += ["--hellaswag-every", "0", *args.flags]
            base += [*(f"--{word}" for word in way.split() if word != "default"), "--out-dir"]
            whole, twice, killed = (Path(folder, name) for name in ("whole", "twice", "killed"))
            run([*base, str(whole)])
            run([*base, str(twice)])
            run([*base, str(killed)], kill_at=killed / f"model_{half:05d}.pt")
            resumed = run([*base, str(killed), "--resume", "auto"])
            cli.require(f"steps {half} to {args.steps}" in resumed, f"it did not resume at {half}: {resumed[-500:]}")
            lines = metrics_file.read_metrics(whole / "metrics.jsonl")
            ms = statistics.median(line["step_ms"] for line in lines[2:] if "step_ms" in line)
            loss = [line["train_loss"] for line in lines if "train_loss" in line][-1]
            print(f"| {way} | {difference(whole / last, twice / last)} | "
                  f"{difference(whole / last, killed / last)} | {ms:,.0f} | {loss:.6f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
