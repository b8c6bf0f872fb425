"""Faults on purpose, one at a time: kills, full disks, losses that are not finite, files left behind; each judged by
the bits that are left.

    python tests/faults/torture.py --seed 97 --faults 200     # `make torture` runs it

Processes are real and die of real signals, at moments that are drawn from the seed. After each fault the same command
is run again to its end. Files that are damaged are in test_hostile.py. What came of the fault:

    recovered   the end has the bits of a run that nothing happened to
    refused     the same, after one `error:` line
    unhurt      the fault hit nothing that was needed: it came too late
    SILENT      success, but with other bits; or a failure that says nothing
    LOST        the work cannot be finished, or something complete is gone

SILENT and LOST are failures: they are printed, and the exit code is 1.
"""

from __future__ import annotations

import io
import itertools
import math
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
from corpora import read_bytes
from helpers import TINY_FLAGS, load_curve, write_jsonl, write_random_walk_shards
from processes import Script, forkserver_context, start, start_ranks

from system.cli import ArgumentParser
from weights import checkpoint
from weights.names import complete_steps, model_path, optim_path

LAST_STEP = 40
RUN_FLAGS = ["--device", "cpu", "--max-steps", str(LAST_STEP), "--save-every", "2", "--shuffle", "--resume", "auto"]
OUTCOMES = ("recovered", "refused", "unhurt", "SILENT", "LOST")


# ------------------------------------------------------------------------- what is tortured


class Job:
    """A command that fills a folder and that, run again, fills what is missing.

    bits: reads a folder, as {what: bits}. After a fault they must be bits of the undisturbed run, and those of `needed`
    must be there; by default all.
    """

    def __init__(self, script: str, flags: list, bits: Callable[[Path], dict], ranks: int = 1):
        self.script, self.flags, self.bits, self.ranks = script, flags, bits, ranks
        self.folder = Path(tempfile.mkdtemp())
        self.undisturbed = self.folder / "undisturbed" / "out"  # shards are named after their folder
        start_time = time.monotonic()
        ended = self.run(self.undisturbed)
        assert ended.exit_code == 0, ended.output
        self.seconds = time.monotonic() - start_time
        self.reference = bits(self.undisturbed)
        self.needed = self.reference.keys()

    def new_folder(self) -> Path:
        """Where the next result goes, in place of the one before."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        return self.folder / "out"

    def start(self, out: Path, **how) -> list[Script]:
        """One process, or one for each rank."""
        how["log"] = self.folder / f"log-{time.monotonic_ns()}"
        if self.ranks > 1:
            return start_ranks(self.ranks, self.script, *self.flags, out, **how)
        return [start(self.script, *self.flags, out, **how)]

    def run(self, out: Path, **how) -> Script:
        first, *_ = [rank.wait() for rank in self.start(out, **how)]
        return first

    def is_done(self, out: Path) -> bool:
        found = self.bits(out)
        return self.needed <= found.keys() and found.items() <= self.reference.items()

    def finish(self, out: Path, outcome: str) -> str:
        """Run the command to its end. Returns `outcome` if that succeeds, with the right bits."""
        ended = self.run(out)
        if ended.exit_code == 0 and self.is_done(out):
            return outcome
        return f"LOST: exit code {ended.exit_code}\n{ended.output[-2000:]}"

    def judge(self, out: Path, ended: Script) -> str:
        """What came of a fault, by how the command has ended."""
        if ended.exit_code == 0:
            return "unhurt" if self.is_done(out) else f"SILENT: other bits\n{ended.output[-2000:]}"

        # One message for what the user can fix, else the traceback of a crash.
        messages = ended.output.count("error: ")
        has_crashed = "Traceback" in ended.output
        if messages != 1 and not has_crashed:
            return f"SILENT: {messages} messages\n{ended.output[-2000:]}"
        return self.finish(out, "recovered" if has_crashed else "refused")


def training_job(*more: str, ranks: int = 1) -> Job:
    data = write_random_walk_shards(Path(tempfile.mkdtemp()) / "data")
    flags = ["quickstart", *TINY_FLAGS, *RUN_FLAGS, *more, "--data-dir", data, "--out-dir"]
    return Job("train_gpt2", flags, read_run, ranks)


def read_run(out: Path) -> dict:
    """The weights and the optimizer state of each complete step that --save-every names, and the losses of all."""
    found = {}
    if (out / "metrics.jsonl").exists():
        found["losses"] = str(load_curve(out)).encode()
    for step in complete_steps(out):
        if step % 2:  # of a run that was stopped there
            continue
        path = model_path(out, step)
        state = io.BytesIO()
        torch.save(checkpoint.read_train_state(path)["optimizers"], state)
        found[step] = path.read_bytes() + state.getvalue()
    return found


def tokens_job(shard_format: str) -> Job:
    """fineweb.py over documents that are the same every time."""
    rows = [{"text": f"line {i} of a walk, é" * (i % 60)} for i in range(150)]
    text = write_jsonl(Path(tempfile.mkdtemp()) / "text.jsonl", rows)
    return Job("fineweb", ["--source", text, "--shard-size", 1500, "--format", shard_format, "--out"], read_bytes)


# ------------------------------------------------------------------------- kills


def kill(job: Job, rng: random.Random) -> str:
    """SIGKILL of the process, or of one or both ranks, at any moment, up to three times in one folder."""
    out = job.new_folder()
    kills = 0
    for _ in range(rng.randint(1, 3)):
        ranks = job.start(out)
        time.sleep(rng.uniform(0, 1.1) * job.seconds)
        hits = [rank.send(signal.SIGKILL) for rank in rng.sample(ranks, rng.randint(1, len(ranks)))]
        kills += sum(hits)

        # As torchrun does: the ranks that are left are asked to end, then killed.
        time.sleep(rng.choice([0, 0.5]) * (job.ranks - 1))
        for number in (signal.SIGTERM, signal.SIGKILL):
            for rank in ranks:
                if any(hits):
                    rank.send(number)
                rank.process.join(3 if any(hits) else 120)
    return job.finish(out, "recovered" if kills else "unhurt")


# ------------------------------------------------------------------------- full disks


def fill_disk(job: Job, rng: random.Random) -> str:
    """As on a disk without room for a larger file: a write beyond some size of a file fails."""
    out = job.new_folder()
    size = int(2 ** rng.uniform(13, 18.5))
    return job.judge(out, job.run(out, prepare=partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))))


# ------------------------------------------------------------------------- what goes wrong in a run


def poison(micro_step: int) -> None:
    """From now on, let the loss of this micro-step of training be NaN."""
    forward, micro_steps = torch.nn.Embedding.forward, itertools.count()

    def poisoned_forward(self, ids):
        embedded = forward(self, ids)
        is_training = torch.is_grad_enabled() and self.num_embeddings == 256  # the positions are embedded, too
        return embedded * math.nan if is_training and next(micro_steps) == micro_step else embedded

    torch.nn.Embedding.forward = poisoned_forward


def refuse(job: Job, rng: random.Random) -> str:
    """A loss that is not finite, at any step: the run ends with a message, and goes on from there."""
    out = job.new_folder()
    return job.judge(out, job.run(out, prepare=partial(poison, rng.randrange(2 * LAST_STEP))))


def leave_orphan(job: Job, rng: random.Random) -> str:
    """An optimizer file whose model file was never written, as a kill between the two leaves it."""
    out = job.new_folder()
    out.mkdir()
    step = 2 * rng.randint(1, LAST_STEP // 2)
    shutil.copy(optim_path(job.undisturbed, step), out)
    return job.finish(out, "recovered")


# ------------------------------------------------------------------------- all of it


def make_faults() -> dict[str, Callable[[random.Random], str]]:
    """{kind of fault: what injects one}."""
    npy = tokens_job("npy")
    plain = training_job()
    # The undisturbed run keeps all checkpoints, to compare with whichever are left.
    muon = training_job("--optimizer", "muon")
    muon.flags[-1:-1] = ["--keep", "2"]
    muon.needed = {"losses", LAST_STEP}
    return {
        "train killed": partial(kill, plain),
        "train killed, muon, --keep 2": partial(kill, muon),
        "2 ranks killed": partial(kill, training_job(ranks=2)),
        "2 ranks killed, ZeRO-1": partial(kill, training_job("--zero-stage", "1", ranks=2)),
        "fineweb killed, npy": partial(kill, npy),
        "fineweb killed, bin": partial(kill, tokens_job("bin")),
        "disk full, train": partial(fill_disk, muon),
        "loss not finite": partial(refuse, plain),
        "orphan left": partial(leave_orphan, plain),
        "disk full, fineweb": partial(fill_disk, npy),
    }


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and places of the faults")
    parser.add_argument("--faults", type=int, default=100, help="how many, of each kind in turn")
    args = parser.parse_args()
    seed, faults = args.seed, args.faults

    counts = defaultdict(Counter)
    forkserver_context()  # its own folder must outlive this one
    with tempfile.TemporaryDirectory(prefix="torture-") as tempfile.tempdir:
        inject = make_faults()
        for number in range(faults):
            kind = list(inject)[number % len(inject)]
            try:
                outcome = inject[kind](random.Random(f"{seed} {number}"))
            except AssertionError as e:
                outcome = f"LOST: it hangs\n{e}"
            word, _, details = outcome.partition(":")
            counts[kind][word] += 1
            if details:
                print(f"fault {number}, {kind}: {outcome}", flush=True)

    print(f"{'fault':30}" + "".join(f"{word:>10}" for word in OUTCOMES))
    for kind, found in counts.items():
        print(f"{kind:30}" + "".join(f"{found[word]:10}" for word in OUTCOMES))
    bad = sum(found["SILENT"] + found["LOST"] for found in counts.values())
    print(f"{faults} faults, seed {seed}: {bad} silent or lost")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
