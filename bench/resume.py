"""Which runs end with the same bits: one repeated, and one killed with SIGKILL and resumed, against one undisturbed.

    python bench/resume.py quickstart --data-dir data/stdlib                     # minutes on a CPU
    python bench/resume.py gpt2-124m --data-dir data/fineweb-edu -- --total-batch-size 65536     # on a GPU

For each way (dtype, with and without --deterministic, recompute, and whatever else --ways names, as flags of
train_gpt2.py) it prints how many weights differ in the final checkpoints and by how much at most. The kill comes
right after the first checkpoint, wherever the next step is by then.
"""

import os
import signal
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
import cli  # noqa: E402

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
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.002)  # a tiny model's next checkpoint may be 30 ms away
        said.seek(0)
        text = said.read()
    if process.returncode != (-signal.SIGKILL if kill_at else 0):
        raise cli.UserError(f"{' '.join(command)} ended with {process.returncode}: {text[-1500:]}")
    return text


def difference(a: Path, b: Path) -> str:
    """How the weights of two checkpoints differ."""
    import checkpoint

    one, two = (checkpoint.load_weights(path)[0] for path in (a, b))
    apart = [(one[name] - two[name]).abs() for name in one]
    count = sum(int((d != 0).sum()) for d in apart)
    total = sum(d.numel() for d in apart)
    return "same bits" if not count else f"{count / total:.1%} differ, by {max(d.max().item() for d in apart):.1e}"


def main() -> None:
    import torch

    import metrics
    import runtime

    args = tyro.cli(Args, description=__doc__)
    device = runtime.device_name(runtime.pick_device())
    half, last = args.steps // 2, f"model_{args.steps:05d}.pt"
    print(f"{args.preset} {' '.join(args.flags)}, {args.steps} steps, on {device}, torch {torch.__version__}")
    print("| way | done twice | killed and resumed | step ms | loss at the end |\n|---|---|---|---|---|")
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            base = [sys.executable, str(ROOT / "train_gpt2.py"), args.preset, "--data-dir", args.data_dir]
            base += ["--max-steps", str(args.steps), "--save-every", str(half), "--hellaswag-every", "0"]
            base += ["--val-every", "0", "--sample-every", "0", *args.flags]
            base += [*(f"--{word}" for word in way.split() if word != "default"), "--out-dir"]
            whole, twice, killed = (Path(folder, name) for name in ("whole", "twice", "killed"))
            run([*base, str(whole)])
            run([*base, str(twice)])
            run([*base, str(killed)], kill_at=killed / f"model_{half:05d}.pt")
            resumed = run([*base, str(killed), "--resume", "auto"])
            if f"steps {half} to {args.steps}" not in resumed:
                raise cli.UserError(f"it did not resume at step {half}: {resumed[-500:]}")
            lines = metrics.read_lines(whole / "metrics.jsonl")
            ms = statistics.median(line["step_ms"] for line in lines[2:] if "step_ms" in line)
            loss = next(line["train_loss"] for line in reversed(lines) if "train_loss" in line)
            print(f"| {way} | {difference(whole / last, twice / last)} | "
                  f"{difference(whole / last, killed / last)} | {ms:,.0f} | {loss:.6f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
