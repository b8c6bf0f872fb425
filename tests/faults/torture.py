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
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
from corpora import read_bytes
from helpers import TINY_FLAGS, load_curve, write_jsonl, write_random_walk_shards
from processes import forkserver_context, start_ranks

from checkpoints import checkpoint
from checkpoints.run_folder import latest_step, model_path
from system.settings import ArgumentParser

TRAIN = "--device cpu --max-steps 40 --save-every 2 --shuffle --resume auto"


class Job:
    """A command that fills a folder and that, run again, fills what is missing. Its last word is the folder's flag."""

    def __init__(self, folder, ranks, *command):
        folder.mkdir()
        self.name, self.ranks, self.command = folder.name, ranks, command
        self.out, self.log = folder / "out", folder / "log"
        start_time = time.monotonic()
        ended = self.run()
        assert ended.exit_code == 0, ended.output
        self.seconds = time.monotonic() - start_time
        self.bits = self.read_bits()

    def start(self, **how):
        """A process for each rank."""
        return start_ranks(self.ranks, *self.command, self.out, log=self.log, **how)

    def run(self, **how):
        """The first rank, once all have ended."""
        first, *_ = [rank.wait() for rank in self.start(**how)]
        return first

    def read_bits(self):
        """The folder; of a run the weights and the optimizer state of the last step, and the losses of all."""
        if self.command[0] != "train_gpt2":
            return read_bytes(self.out)
        path, state = model_path(self.out, latest_step(self.out)), io.BytesIO()
        torch.save(checkpoint.read_train_state(path)["components"], state)
        return load_curve(self.out), path.name, path.read_bytes(), state.getvalue()

    def kill(self, rng):
        """SIGKILL of the process, or of one or both ranks, at any moment, up to three times. Whether one hit."""
        hits = 0
        for _ in range(rng.randint(1, 3)):
            ranks = self.start()
            time.sleep(rng.uniform(0, 1.1) * self.seconds)
            chosen = rng.sample(ranks, rng.randint(1, len(ranks)))
            hits += any(rank.exit_code is None for rank in chosen)
            for rank in chosen:
                rank.process.kill()
            # As torchrun does: the ranks that are left are asked to end, then killed.
            for rank in ranks:
                rank.process.terminate()
            for rank in ranks:
                rank.process.join(3)
                rank.process.kill()
                rank.process.join()
        return hits > 0

    def fill_disk(self, rng):
        """As on a disk without room for a larger file: a write beyond some size of a file fails. Whether one did."""
        size = int(2 ** rng.uniform(13, 18.5))
        return self.run(prepare=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))).exit_code != 0


def main():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places of the faults")
    parser.add_argument("--faults", type=int, default=100, help="how many, to each command in turn")
    args = parser.parse_args()

    forkserver_context()  # its own folder must outlive this one
    with tempfile.TemporaryDirectory(prefix="torture-") as tempfile.tempdir:
        folder = Path(tempfile.tempdir)
        data = write_random_walk_shards(folder / "data")
        train = ["train_gpt2", "quickstart", *TINY_FLAGS, "--data-dir", data, TRAIN]
        rows = [{"text": f"line {i} of a walk, é" * (i % 60)} for i in range(150)]
        tokenize = ["fineweb", "--shard-size 1500 --source", write_jsonl(folder / "text.jsonl", rows)]
        jobs = [
            Job(folder / "train", 1, *train, "--out-dir"),
            Job(folder / "train, muon, --keep 2", 1, *train, "--optimizer muon --keep 2 --out-dir"),
            Job(folder / "train, 2 ranks", 2, *train, "--out-dir"),
            Job(folder / "train, 2 ranks, ZeRO-1", 2, *train, "--zero-stage 1 --out-dir"),
            Job(folder / "fineweb, npy", 1, *tokenize, "--out"),
            Job(folder / "fineweb, bin", 1, *tokenize, "--format bin --out"),
        ]

        is_lost = False
        for number in range(args.faults):
            job, rng = jobs[number % len(jobs)], random.Random(f"{args.seed} {number}")
            shutil.rmtree(job.out, ignore_errors=True)
            fault = job.fill_disk if job.ranks == 1 and rng.random() < 0.25 else job.kill
            outcome = "recovered" if fault(rng) else "unhurt"
            ended = job.run()
            if ended.exit_code != 0 or job.read_bits() != job.bits:
                is_lost = True
                outcome = f"LOST, exit code {ended.exit_code}\n{ended.output[-2000:]}"
            print(f"fault {number}, {job.name}: {outcome}", flush=True)
    sys.exit(is_lost)


if __name__ == "__main__":
    main()
