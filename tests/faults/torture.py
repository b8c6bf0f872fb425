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
from collections import Counter
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
from corpora import read_bytes
from helpers import TINY_FLAGS, load_curve, write_jsonl, write_random_walk_shards
from processes import Script, forkserver_context, start_ranks

from system.settings import ArgumentParser
from weights import checkpoint
from weights.run_folder import latest_step, model_path

TRAIN = ["train_gpt2", "quickstart", *TINY_FLAGS, "--device", "cpu", "--max-steps", "40", "--save-every", "2"]
TRAIN += ["--shuffle", "--resume", "auto"]
TOKENIZE = ["fineweb", "--shard-size", 1500, "--source"]


class Job:
    """A command that fills a folder and that, run again, fills what is missing."""

    def __init__(self, folder: Path, name: str, command: list):
        self.name, self.command, self.ranks = name, command, 2 if "2 ranks" in name else 1
        (folder / name).mkdir()
        self.out, self.log = folder / name / "out", folder / name / "log"
        start_time = time.monotonic()
        ended = self.run()
        assert ended.exit_code == 0, ended.output
        self.seconds = time.monotonic() - start_time
        self.bits = self.read_bits()

    def start(self, **how) -> list[Script]:
        """A process for each rank."""
        out = "--out-dir" if self.command[0] == "train_gpt2" else "--out"
        return start_ranks(self.ranks, *self.command, out, self.out, log=self.log, **how)

    def run(self, **how) -> Script:
        first, *_ = [rank.wait() for rank in self.start(**how)]
        return first

    def read_bits(self) -> dict:
        """The folder; of a run the weights and the optimizer state of the last step, and the losses of all."""
        if self.command[0] != "train_gpt2":
            return read_bytes(self.out)
        path, state = model_path(self.out, latest_step(self.out)), io.BytesIO()
        torch.save(checkpoint.read_train_state(path)["parts"], state)
        return {"losses": load_curve(self.out), path.name: path.read_bytes() + state.getvalue()}

    def kill(self, rng: random.Random) -> bool:
        """SIGKILL of the process, or of one or both ranks, at any moment, up to three times. Whether one hit."""
        hits = 0
        for _ in range(rng.randint(1, 3)):
            ranks = self.start()
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

    def fill_disk(self, rng: random.Random) -> bool:
        """As on a disk without room for a larger file: a write beyond some size of a file fails. Whether one did."""
        size = int(2 ** rng.uniform(13, 18.5))
        return self.run(prepare=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))).exit_code != 0


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places of the faults")
    parser.add_argument("--faults", type=int, default=100, help="how many, to each command in turn")
    args = parser.parse_args()

    forkserver_context()  # its own folder must outlive this one
    with tempfile.TemporaryDirectory(prefix="torture-") as tempfile.tempdir:
        folder = Path(tempfile.tempdir)
        train = [*TRAIN, "--data-dir", write_random_walk_shards(folder / "data")]
        rows = [{"text": f"line {i} of a walk, é" * (i % 60)} for i in range(150)]
        tokenize = [*TOKENIZE, write_jsonl(folder / "text.jsonl", rows)]
        commands = {
            "train": train,
            "train, muon, --keep 2": [*train, *"--optimizer muon --keep 2".split()],
            "train, 2 ranks": train,
            "train, 2 ranks, ZeRO-1": [*train, *"--zero-stage 1".split()],
            "fineweb, npy": tokenize,
            "fineweb, bin": [*tokenize, *"--format bin".split()],
        }
        jobs = [Job(folder, name, command) for name, command in commands.items()]

        counts: Counter = Counter()
        for number in range(args.faults):
            job, rng = jobs[number % len(jobs)], random.Random(f"{args.seed} {number}")
            shutil.rmtree(job.out, ignore_errors=True)
            fault = job.fill_disk if job.ranks == 1 and rng.random() < 0.25 else job.kill
            outcome = "recovered" if fault(rng) else "unhurt"
            ended = job.run()
            if ended.exit_code != 0 or job.read_bits() != job.bits:
                outcome = "LOST"
                print(f"fault {number}, {job.name}: exit code {ended.exit_code}\n{ended.output[-2000:]}", flush=True)
            counts[job.name, outcome] += 1

    for (name, outcome), count in sorted(counts.items()):
        print(f"{name:30} {outcome:10} {count}")
    sys.exit(any(outcome == "LOST" for _, outcome in counts))


if __name__ == "__main__":
    main()
