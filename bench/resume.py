"""Does a run end with the same bits if it is repeated, and if it is killed and resumed?

    python -m bench.resume quickstart --data-dir data/stdlib                     # minutes on a CPU
    python -m bench.resume gpt2-124m --data-dir data/fineweb-edu -- --total-batch-size 65536     # on a GPU

Three runs of the same command are made for each way to run it:

    undisturbed   step 0 ------------------------------------------------> last step
    repeated      step 0 ------------------------------------------------> last step
    killed        step 0 ----------> checkpoint at half --X  resumed ----> last step

X is SIGKILL, right after the checkpoint is complete, wherever the next step is by then. The table says how many weights
of the final checkpoints differ from the undisturbed run's, and by how much at most. A way is a set of flags of
train_gpt2.py: a dtype, with and without --deterministic or --recompute, or whatever else --ways names.
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
from training import metrics
from training.checkpoint import model_path
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
    """Run a command to its end, or kill it with SIGKILL once the file `kill_at` exists. Returns what it printed. Raises
    UserError if it fails, or if it ends before it could be killed."""
    with tempfile.TemporaryFile("w+") as output:
        # Poll until the command has ended, and kill it as soon as the file is there.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if kill_at and kill_at.exists():
                process.kill()
            time.sleep(0.002)  # a tiny model's next checkpoint may be 30 ms away
        output.seek(0)
        text = output.read()

    # A process that a signal ended has a negative exit code.
    was_killed = process.returncode < 0
    is_as_expected = was_killed if kill_at else process.returncode == 0
    cli.require(is_as_expected, f"{' '.join(command)} ended with exit code {process.returncode}: {text[-1500:]}")
    return text


def describe_difference(a: Path, b: Path) -> str:
    """How the weights of two checkpoints differ: "same bits", or a share of the weights and the largest difference."""
    # |p - q| for every weight of every parameter.
    pairs = zip(open_model(a).parameters(), open_model(b).parameters(), strict=True)
    differences = [(p - q).detach().abs() for p, q in pairs]

    # How many weights differ, which part of all that is, and by how much at most.
    differing = sum(int((d != 0).sum()) for d in differences)
    if differing == 0:
        return "same bits"
    total = sum(d.numel() for d in differences)
    largest = max(d.max().item() for d in differences)
    return f"{differing / total:.1%} differ, by {largest:.1e}"


def measure_way(args: Args, way: str, folder: Path) -> str:
    """Make the three runs of one way in `folder`; returns its row of the table."""
    # The checkpoint at which the third run is killed, and the folders of the three.
    half = args.steps // 2
    undisturbed, repeated, killed = (folder / name for name in ("undisturbed", "repeated", "killed"))

    # The command of all three. It evaluates and samples nothing.
    command = [sys.executable, "train_gpt2.py", args.preset, "--data-dir", args.data_dir]
    command += f"--max-steps {args.steps} --save-every {half} --val-every 0 --sample-every 0".split()
    command += ["--hellaswag-every", "0", *args.flags]
    command += [f"--{flag}" for flag in way.split() if flag != "default"]

    # The runs. The killed one must say that it continues at the checkpoint, or it has proved nothing.
    run([*command, "--out-dir", str(undisturbed)])
    run([*command, "--out-dir", str(repeated)])
    run([*command, "--out-dir", str(killed)], kill_at=model_path(killed, half))
    output = run([*command, "--out-dir", str(killed), "--resume", "auto"])
    cli.require(f"steps {half} to {args.steps}" in output, f"it did not resume at step {half}: {output[-500:]}")

    # How far apart they ended. The first steps compile, so they are not timed.
    final = model_path(undisturbed, args.steps)
    repeated_differs = describe_difference(final, model_path(repeated, args.steps))
    resumed_differs = describe_difference(final, model_path(killed, args.steps))
    rows = metrics.read_metrics(undisturbed / "metrics.jsonl")
    ms = statistics.median(row["step_ms"] for row in rows[2:] if "step_ms" in row)
    loss = [row["train_loss"] for row in rows if "train_loss" in row][-1]
    return f"| {way} | {repeated_differs} | {resumed_differs} | {ms:,.0f} | {loss:.6f} |"


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    device = machine.device_name(machine.choose_device())
    print(f"{args.preset} {' '.join(args.flags)}, {args.steps} steps, on {device}, torch {torch.__version__}")

    # One row a way; the checkpoints of each are deleted before the next one starts.
    print("| way | done twice | killed and resumed | step ms | loss at the end |\n|---|---|---|---|---|")
    for way in args.ways:
        with tempfile.TemporaryDirectory() as folder:
            print(measure_way(args, way, Path(folder)), flush=True)


if __name__ == "__main__":
    cli.run_cli(main)
