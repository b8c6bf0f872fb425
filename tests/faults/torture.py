"""Kills and full disks on purpose, one at a time, each judged by the bits that are left.

    python tests/faults/torture.py --seed 97 --faults 200     # `make torture` runs it

Processes are real and die of real signals, at moments that are drawn from the seed. After each fault the same command
is run again to its end, which must have the bits of a run that nothing happened to. What came of the fault:

    recovered   it hit, and the end has these bits
    unhurt      it came too late
    LOST        the end has other bits, or the command fails: the exit code of this script is 1
"""

import io
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
from corpora import read_bytes
from helpers import TINY_FLAGS, load_curve, write_jsonl, write_random_walk_shards
from processes import Script, forkserver_context, start_ranks

from system.cli import ArgumentParser
from weights import checkpoint
from weights.names import complete_steps, model_path

RUN_FLAGS = ["--device", "cpu", "--max-steps", "40", "--save-every", "2", "--shuffle", "--resume", "auto"]


class Job:
    """A command that fills a folder and that, run again, fills what is missing."""

    def __init__(self, script: str, *flags, read_bits=read_bytes, ranks: int = 1):
        self.script, self.flags, self.read_bits, self.ranks = script, flags, read_bits, ranks
        self.folder = Path(tempfile.mkdtemp())
        start_time = time.monotonic()
        ended = self.run(self.folder / "out")
        assert ended.exit_code == 0, ended.output
        self.seconds = time.monotonic() - start_time
        self.bits = read_bits(self.folder / "out")

    def start(self, out: Path, **how) -> list[Script]:
        """A process for each rank."""
        log = self.folder / f"log-{time.monotonic_ns()}"
        return start_ranks(self.ranks, self.script, *self.flags, out, log=log, **how)

    def run(self, out: Path, **how) -> Script:
        first, *_ = [rank.wait() for rank in self.start(out, **how)]
        return first

    def kill(self, out: Path, rng: random.Random) -> bool:
        """SIGKILL of the process, or of one or both ranks, at any moment, up to three times. Whether one hit."""
        hits = 0
        for _ in range(rng.randint(1, 3)):
            ranks = self.start(out)
            time.sleep(rng.uniform(0, 1.1) * self.seconds)
            hit = any([rank.send(signal.SIGKILL) for rank in rng.sample(ranks, rng.randint(1, len(ranks)))])
            hits += hit
            # As torchrun does: the ranks that are left are asked to end, then killed.
            for number in (signal.SIGTERM, signal.SIGKILL):
                for rank in ranks:
                    if hit:
                        rank.send(number)
                    rank.process.join(3 if hit else 120)
        return hits > 0

    def fill_disk(self, out: Path, rng: random.Random) -> bool:
        """As on a disk without room for a larger file: a write beyond some size of a file fails. Whether one did."""
        size = int(2 ** rng.uniform(13, 18.5))
        return self.run(out, prepare=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))).exit_code != 0


def read_run(out: Path) -> dict:
    """The weights and the optimizer state of the last step, and the losses of all."""
    found = {"losses": load_curve(out)}
    for step in complete_steps(out)[-1:]:
        state = io.BytesIO()
        torch.save(checkpoint.read_train_state(model_path(out, step))["optimizers"], state)
        found[step] = model_path(out, step).read_bytes() + state.getvalue()
    return found


def make_jobs() -> dict[str, Job]:
    """{what is done: the command}. fineweb.py reads documents that are the same every time."""
    data = write_random_walk_shards(Path(tempfile.mkdtemp()) / "data")
    rows = [{"text": f"line {i} of a walk, é" * (i % 60)} for i in range(150)]
    text = write_jsonl(Path(tempfile.mkdtemp()) / "text.jsonl", rows)

    def train(*more, ranks=1):
        flags = [*TINY_FLAGS, *RUN_FLAGS, *more, "--data-dir", data, "--out-dir"]
        return Job("train_gpt2", "quickstart", *flags, read_bits=read_run, ranks=ranks)

    return {
        "train": train(),
        "train, muon, --keep 2": train("--optimizer", "muon", "--keep", "2"),
        "train, 2 ranks": train(ranks=2),
        "train, 2 ranks, ZeRO-1": train("--zero-stage", "1", ranks=2),
        "fineweb, npy": Job("fineweb", "--source", text, "--shard-size", 1500, "--format", "npy", "--out"),
        "fineweb, bin": Job("fineweb", "--source", text, "--shard-size", 1500, "--format", "bin", "--out"),
    }


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places of the faults")
    parser.add_argument("--faults", type=int, default=100, help="how many, to each command in turn")
    args = parser.parse_args()

    counts: dict[str, Counter] = defaultdict(Counter)
    forkserver_context()  # its own folder must outlive this one
    with tempfile.TemporaryDirectory(prefix="torture-") as tempfile.tempdir:
        jobs = make_jobs()
        for number in range(args.faults):
            name = list(jobs)[number % len(jobs)]
            job, rng = jobs[name], random.Random(f"{args.seed} {number}")
            out = job.folder / "out"
            shutil.rmtree(out, ignore_errors=True)
            fault = job.fill_disk if job.ranks == 1 and rng.random() < 0.25 else job.kill
            outcome = "recovered" if fault(out, rng) else "unhurt"
            ended = job.run(out)
            if ended.exit_code != 0 or job.read_bits(out) != job.bits:
                outcome = "LOST"
                print(
                    f"fault {number}, {name}: {outcome}, exit code {ended.exit_code}\n{ended.output[-2000:]}",
                    flush=True,
                )
            counts[name][outcome] += 1

    for name, found in counts.items():
        print(f"{name:30}", dict(found))
    sys.exit(any(found["LOST"] for found in counts.values()))


if __name__ == "__main__":
    main()
