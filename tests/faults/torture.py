"""Faults on purpose: kills, full disks, damaged files, lost ranks, bad networks, wrong clocks, NaN, and a long run.

    python tests/faults/torture.py                           # every class; `make torture` runs it
    python tests/faults/torture.py --only hub-faults disk-full --scale 0.2 --seed 7

Each class is a function that plants faults, draws their places and moments from the seed, and judges each by what the
user is left with:

    recovered   run again, the work ended with the bits of the run that nothing happened to
    refused     one message, no traceback, an exit code that says failure, and every file still as it was
    unharmed    the result is that of the undisturbed run: the fault hit nothing that is read

Anything else is SILENT (no message, or success with another result) or LOST (something finished is gone), and fails.
Processes are real and die of real signals (see processes.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import numpy as np
import processes
import torch
from helpers import TINY_FLAGS, load_curve, load_weights, same_bits, write_random_walk_shards
from pod import Pod, alive
from processes import Script, rank_pids, shorten_sleeps, start_torchrun
from torch.utils._pytree import tree_flatten

from faults import hub_server
from faults.hub_server import Fault
from system import distributed
from system.cli import UserError
from tokens import shards
from training import checkpoint
from training.metrics_file import read_metrics
from training.open_model import open_model
from training.step import Step


@dataclass
class Torture:
    """A class of faults at work: its folder, its random choices, and what came of each fault."""

    folder: Path
    seed: int = 0
    scale: float = 1.0
    outcomes: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    figures: list[str] = field(default_factory=list)
    kills: int = 0  # signals that ended a live process
    count: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)

    def times(self, n: int) -> range:
        return range(max(1, round(n * self.scale)))

    def some(self, items: list) -> list:
        """All of them, or at a smaller scale a random part."""
        return self.rng.sample(items, min(len(items), max(1, round(len(items) * self.scale))))

    def path(self, name: str, folder: Path | None = None) -> Path:
        """A path not used before."""
        self.count += 1
        return (folder or self.folder) / f"{name}-{self.count}"

    # what came of a fault

    def note(self, outcome: str, fault: str, n: int = 1, why: object = "") -> None:
        self.outcomes[outcome] += n
        if outcome in ("SILENT", "LOST"):
            self.failures.append(f"{outcome}: {fault}: {str(why)[-1500:]}")

    def same(self, fault: str, equal: bool, n: int = 1, outcome: str = "recovered", why: object = "") -> None:
        """Whether the result of what went on after `n` faults is that of the undisturbed run."""
        self.note(outcome if equal else "LOST", fault, n if equal else max(n, 1), why)

    def refused(self, fault: str, ended: Script, *says: str, last: bool = True) -> bool:
        """One message that says these things, no traceback, failure as exit code. last=False: not counted yet if all
        that is so, because the run goes on and is judged by its end."""
        said = ended.output
        messages = len(re.findall(r"^(?:(?:system )?error: |rank \d+ (?:lost|could not))", said, re.MULTILINE))
        wrong = [f"not a word of {s!r}" for s in says if s.lower() not in said.lower()]
        if ended.exit_code <= 0 or messages != 1 or "Traceback" in said:
            wrong.append(f"exit code {ended.exit_code}, {messages} messages, {said.count('Traceback')} tracebacks")
        if wrong or last:
            self.note("SILENT" if wrong else "refused", fault, why=f"{said[-1200:]}\n{wrong}")
        return not wrong


def files(folder: Path, only: str = "*") -> dict[Path, bytes]:
    """What has been given its name (.lock, .incoming, .part belong to nobody yet) and is not the Hub's page."""
    found = [p for p in sorted(folder.rglob(only)) if p.is_file() and p.name != "README.md"]
    return {p: p.read_bytes() for p in found if "/." not in f"/{p.relative_to(folder)}"}


# ------------------------------------------------------------------------- works, and what they should give


class Work:
    """What a script makes of a folder, as often as one likes: `words(folder)` are its arguments, which start it or go
    on, `whole` is the folder that nothing happened to, `only` what counts of it."""

    def __init__(self, t: Torture, script: str, words: Callable[[Path], list], whole: Path | None = None, **how):
        self.t, self.script, self.words = t, script, words
        self.ranks, self.only, self.place = how.pop("ranks", 1), how.pop("only", "*"), how.pop("place", None)
        self.how, first = how, self.out()
        self.whole, began = whole or first, time.monotonic()
        self.finish(first)
        self.seconds = time.monotonic() - began

    def out(self) -> Path:
        return self.t.path("out", self.place)

    def start(self, folder: Path, *more: object, **how) -> list[Script]:
        how = {"log": self.t.path("said"), "cwd": self.t.folder, **self.how, **how}
        words = [*self.words(folder), *more]
        if self.ranks > 1:
            return processes.start_ranks(self.ranks, self.script, *words, **how)
        return [processes.start(self.script, *words, **how)]

    def run(self, folder: Path, *more: object, **how) -> Script:
        return self.start(folder, *more, **how)[0].wait()

    def finish(self, out: Path) -> None:
        for script in self.start(out):
            script.wait_for_success()

    def contents(self, folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): data for p, data in files(folder, self.only).items()}

    def equals_whole(self, out: Path) -> bool:
        return self.contents(out) == self.contents(self.whole)

    def progress(self, out: Path) -> int:
        return len(list(out.glob("*")))

    def recovers(self, fault: str, out: Path, n: int = 1, outcome: str = "recovered") -> None:
        """Gone on with, undisturbed now, it ends with the bits of the whole one."""
        try:
            self.finish(out)
            self.t.same(fault, self.equals_whole(out), n, outcome, "the result differs")
        except AssertionError as e:
            self.t.note("LOST", fault, max(n, 1), f"it does not go on: {e}")

    def judge(self, fault: str, ended: Script, out: Path, *says: str, **how) -> None:
        """Success has the result of the whole one. A refusal is one message that says these things and, when all is
        well again (`mend`), the same command ends the work."""
        if ended.exit_code == 0:
            return self.t.same(fault, self.equals_whole(out), 1, how.get("outcome", "unharmed"), ended.output)
        finished = {p for p in files(out) if p.suffix in (".npy", ".pt")}
        good = self.t.refused(fault, ended, *says, last=False)
        how.get("mend", processes.do_nothing)()
        if good:
            self.recovers(fault, out)
            self.t.same(fault, not (gone := finished - files(out).keys()), 0, why=f"{gone} is gone")

    def killed(self, times: int) -> None:
        """SIGKILL at random moments, over and over in one folder; whenever it is through, the bits are right."""
        fault, out, pending = f"kills of {self.script} {self.words(Path())}", self.out(), 0
        for _ in self.t.times(times):
            script = self.start(out)[0]
            if self.script == "hub":
                goal, later = 0, self.t.rng.uniform(0.2, 1.0) * self.seconds
            else:
                goal = self.t.rng.randint(self.progress(out), max(self.progress(self.whole), self.progress(out)))
                later = self.t.rng.uniform(0, 0.03)
            hit = script.kill_at(goal, partial(self.progress, out), later)
            pending, self.t.kills = pending + hit, self.t.kills + hit
            if script.wait().exit_code == 0:
                self.t.same(fault, self.equals_whole(out), pending)
                out, pending = self.out(), 0
        self.recovers(fault, out, pending)


FLAGS = "--device cpu --max-steps 40 --save-every 2 --val-every 10 --shuffle --resume auto".split()


def tiny_data(folder: Path) -> Path:
    """The walk over 256 tokens with a manifest, so that hashes are checked."""
    write_random_walk_shards(folder)
    known = []
    for p in shards.shard_files(folder):
        tokens = shards.read_shard(p)
        sha256 = hashlib.sha256(p.read_bytes()).hexdigest()
        known.append(shards.Shard(p.name, len(tokens), 0, sha256, {"file": 0, "token": 0}))
    source = {"name": "walk", "subset": "", "column": "text", "revision": "0", "files": []}
    shards.write_manifest(folder, shards.Manifest(source, "npy", 4097, complete=True, shards=known))
    return folder


class Training(Work):
    """The same tiny run: to be whole is to have its losses, and the bits of every checkpoint that both kept."""

    def __init__(self, t: Torture, *more: str, ranks: int = 1):
        self.data = tiny_data(t.path("data"))
        flags = ["quickstart", *TINY_FLAGS, "--data-dir", str(self.data), *FLAGS, *more, "--out-dir"]
        super().__init__(t, "train_gpt2", lambda out: [*flags, str(out)], ranks=ranks)
        self.steps = checkpoint.latest_step(self.whole)

    def progress(self, out: Path) -> int:
        path = out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def equals_whole(self, out: Path) -> bool:
        both = set(checkpoint.complete_steps(out)) & set(checkpoint.complete_steps(self.whole))
        bits = all(same_bits(load_weights(out, step), load_weights(self.whole, step)) for step in both)
        return self.steps in both and load_curve(out) == load_curve(self.whole) and bits


def tokens(t: Torture, size: int = 9000, form: str = "npy") -> Work:
    """Shards of some documents, the same every time."""
    path, rng = t.folder / "text.jsonl", np.random.default_rng(0)
    words = ["walk", " the", " line", "\n", " 12", "é", "  ", " and", "_x", "."]
    texts = ["".join(rng.choice(words, 400)) for _ in range(150)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    args = ["--source", path, "--shard-size", size, "--format", form, "--out"]
    return Work(t, "fineweb", lambda out: [*args, out])


@contextmanager
def a_hub(t: Torture, *names: str) -> Iterator[tuple[hub_server.Hub, dict[str, Work]]]:
    """A Hub with the tokens of `fineweb` and the run of `train_gpt2`; the works named, these two or verbs of hub.py."""
    with hub_server.start(t.path("hub") / "root") as hub:
        known = {"fineweb": tokens(t), "train_gpt2": Training(t)}
        data, run = (work.whole for work in known.values())
        name, theirs = (
            f"{known['train_gpt2'].steps:05d}.pt",
            [hub.root / f"{kind}/tester" for kind in ("datasets", "models")],
        )
        shutil.copytree(data, theirs[0] / "toy")
        shutil.copytree(run, theirs[1] / "run")
        verbs = {  # what follows them, the whole, and where and what it is
            "pull-data": (lambda out: ["tester/toy", out], data, None, "*"),
            "push-data": (lambda out: [data, f"tester/{out.name}"], data, theirs[0], "*"),
            "pull-model": (lambda out: ["tester/run", out], run, None, f"model_{name}"),
            "push-model": (lambda out: ["--with-optimizer", run, f"tester/{out.name}"], run, theirs[1], f"*_{name}"),
            "export": (lambda out: [run, out], None, None, "*"),
        }

        def work(verb: str) -> Work:
            more, whole, place, only = verbs[verb]
            return Work(t, "hub", lambda out: [verb, *more(out)], whole, only=only, place=place, env=hub.env())

        yield hub, {name: known.get(name) or work(name) for name in names}


# ------------------------------------------------------------------------- kills


def fineweb_kill(t: Torture) -> None:
    """SIGKILL at any moment of fineweb.py; run again, the shards are the same bytes."""
    for form in ("npy", "bin"):
        tokens(t, 1500, form).killed(24)


def train_kill(t: Torture) -> None:
    """SIGKILL at any moment of a run, saves included; resumed, it ends with the bits of the run never killed."""
    for more in ([], ["--optimizer", "muon", "--keep", "2"], ["--no-shuffle", "--save-every", "1", "--keep", "1"]):
        Training(t, *more).killed(20)


def hub_kill(t: Torture) -> None:
    """SIGKILL at any moment of a push or a pull; the same command goes on and ends with every hash right."""
    with a_hub(t, "push-data", "pull-data", "push-model", "pull-model") as (_, works):
        for work in works.values():
            work.killed(6)


def lose_rank(run: Training, number: int, times: int, *says: str, **how) -> None:
    """This signal to one of two ranks at a random moment: the other soon ends with a message, the run goes on with the
    same bits."""
    t = run.t
    for _ in t.times(times):
        out, victim = run.out(), t.rng.randrange(2)
        pair = run.start(out, **how)
        pair[0].wait_until("loss")
        time.sleep(t.rng.uniform(0, 0.4))
        hit, began = pair[victim].send(number), time.monotonic()
        survivor = pair[1 - victim].wait(30)
        took = time.monotonic() - began
        pair[victim].send(signal.SIGKILL)
        pair[victim].wait()
        fault = f"{signal.Signals(number).name} to rank {victim}"
        t.kills += hit
        if hit and took >= 15:
            t.note("SILENT", fault, why=f"the other waited {took:.0f} s")
        elif survivor.exit_code == 0:  # it had done its last step
            run.recovers(fault, out, outcome="unharmed")
        else:
            run.judge(fault, survivor, out, *says, "--resume auto")


def rank_kill(t: Torture) -> None:
    """SIGKILL of one of two ranks: the other ends with a message; the run goes on with the same bits."""
    for more in ([], ["--zero-stage", "1"]):
        run = Training(t, *more, "--max-steps", "80", ranks=2)
        lose_rank(run, signal.SIGKILL, 8, "lost another rank", prepare=shorten_sleeps)


def impatient(minutes: float) -> None:
    distributed.session = partial(distributed.session, timeout_minutes=minutes)


def hung_rank(t: Torture) -> None:
    """One of two ranks stops answering: the other ends by itself when the collective's patience, here three seconds, is
    over, and says so; the run goes on from its newest checkpoint with the same bits."""
    run = Training(t, "--max-steps", "200", "--save-every", "20", ranks=2)
    lose_rank(run, signal.SIGSTOP, 4, "waited 0.05 minutes", prepare=partial(impatient, 0.05))


def torchrun_kill(t: Torture) -> None:
    """torchrun restarts the ranks when one is killed: no human, no bits."""
    run = Training(t, "--max-steps", "400", "--save-every", "10", ranks=2)
    out, n, log, killed = run.out(), len(t.times(6)), t.path("said"), 0
    command = ["--standalone", "--nproc_per_node=2", f"--max-restarts={n}", str(processes.ROOT / "train_gpt2.py")]
    with open(log, "w") as f:
        torchrun = start_torchrun(*command, *run.words(out), stdout=f)
    while torchrun.poll() is None:
        due = killed < n and (checkpoint.latest_step(out) or 0) >= (killed + 1) * run.steps // (n + 1)
        if due and len(pids := rank_pids(torchrun.pid)) == 2:
            os.kill(t.rng.choice(pids), signal.SIGKILL)
            killed += 1
            time.sleep(1)
        time.sleep(0.05)
    equal = torchrun.returncode == 0 and run.equals_whole(out)
    t.same("ranks killed under torchrun", equal, killed, why=log.read_text())
    t.kills += killed


def a_pod(t: Torture) -> Pod:
    """train.sh with stand-ins for what it starts."""
    (root := t.path("pod")).mkdir()
    return Pod(root)


def train_sh_kill(t: Torture) -> None:
    """SIGKILL of a rank, of torchrun or of train.sh: restarted by itself or by the same command, with no rank left over
    and every checkpoint kept."""
    for what in t.some(["rank0", "rank1", "torchrun", "train.sh"] * 4):
        with a_pod(t) as p:
            p.start("--out-dir", "o", plan="hang savefail ok", PUSH_TO="me/x")
            time.sleep(t.rng.uniform(0, 0.3))
            *ranks, torchrun = p.hanging("o")
            pid = {"rank0": ranks[0], "rank1": ranks[1], "torchrun": torchrun, "train.sh": p.pid(out="o")}[what]
            os.kill(pid, signal.SIGKILL)
            t.kills += 1
            good = True
            if what == "train.sh":  # nobody watches now: the ranks go on, and a second run is refused while they live
                p.wait(lambda: not alive(pid))  # noqa: B023
                again = p.start("--out-dir", "o", check=False, plan="savefail ok")
                good = again.returncode == 1 and str(ranks[0]) in again.stderr
            if what != "torchrun":  # a real torchrun ends the other rank; with train.sh dead its owner does
                for rank in ranks:
                    if rank != pid:
                        os.kill(rank, signal.SIGTERM)
            if what == "train.sh":
                p.wait(lambda: not any(map(alive, ranks)))  # noqa: B023
                p.wait(lambda: p.start("--out-dir", "o", check=False, PUSH_TO="me/x").returncode == 0)
            log = p.ended("o")
            good = good and "training finished" in log and "the weights are at me/x" in log
            t.same(f"{what} killed", good and not any(map(alive, ranks)) and bool(p.read("o/model_00010.pt")), why=log)


# ------------------------------------------------------------------------- disks


def at_most(size: int) -> None:
    """No file grows beyond this, as on a disk that is full: the write fails, the process lives. What the process says
    goes to a file, too, and must fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextmanager
def small_disk(t: Torture, kilobytes: int) -> Iterator[tuple[Path, Callable[[], None]]]:
    """A disk of that size, and how to enlarge it; None where this user may not mount one."""
    folder = t.path("disk")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        yield None
        return
    try:
        yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(t: Torture) -> None:
    """A disk that fills up (a tmpfs where root may mount one) or a limit on the size of a file, while shards,
    manifests, checkpoints and metrics are written: a message, and with room the same command ends the work."""
    works = tokens(t), Training(t, "--save-every", "5")
    small = [300, 500, 1000, 2000, 2300, 2600, 3000, 8192, 18000, 18100]
    large = [1200, 700, 2500, 4000, 6000, 10_000, 50_000, 140_000, 150_000, 200_000, 280_000, 300_000]
    for work, sizes in zip(works, (small, large), strict=True):
        for size in t.some(sizes):
            script = work.run(out := work.out(), prepare=partial(at_most, size))
            work.judge(f"{work.script}, files up to {size} bytes", script, out)
    small, large = [4, 8, 30, 50, 80, 100, 150, 200], [4, 12, 100, 180, 300, 440, 450, 500, 900, 1400, 1800, 2500]
    for work, sizes in zip(works, (small, large), strict=True):
        for kb in t.some(sizes):
            with small_disk(t, kb) as disk:
                if disk:
                    script = work.run(out := disk[0] / "out")
                    work.judge(f"{work.script} on a disk of {kb} kB", script, out, mend=disk[1])


def log_full(t: Torture) -> None:
    """Nothing more can be printed: /dev/full as standard output, and train.sh on a full disk."""
    with a_hub(t, "train_gpt2", "fineweb", "export") as (_, works):
        for work in list(works.values()) * len(t.times(3)):
            fault, script = f"{work.script}, nowhere to print", work.run(out := work.out(), out="/dev/full")
            if work is works["export"]:  # which writes no second time into the folder
                t.refused(fault, script, "No space left")
                t.same(fault, work.equals_whole(out), 0)
            else:
                work.judge(fault, script, out, "No space left")
    for _ in t.times(2):
        with small_disk(t, 64) as disk, a_pod(t) as p:
            if not disk:
                continue
            fill_up(disk[0] / "fill")
            done = p.start("--out-dir", str(disk[0]), check=False)
            wrong = done.returncode != 1 or "is the disk full" not in done.stderr or p.starts()
            t.note("SILENT" if wrong else "refused", "train.sh, full disk before it starts", why=done.stderr)
            (disk[0] / "fill").unlink()
            p.start("--out-dir", str(disk[0]), plan="hang savefail", MAX_RESTARTS="1")
            *ranks, _ = p.hanging(disk[0])
            fill_up(disk[0] / "fill")
            watcher = p.pid(out=disk[0])
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            p.wait(lambda: not alive(watcher))  # noqa: B023
            done = len(p.starts()) == 2 and not any(map(alive, ranks))  # it went on, and ended as it always does
            t.note("recovered" if done else "LOST", "train.sh, its log's disk fills", why=p.log(disk[0]))


def fill_up(path: Path) -> None:
    """Write until the disk takes no more."""
    with open(path, "wb", buffering=0) as f, suppress(OSError):
        while f.write(bytes(4096)):
            pass


def drop_root() -> None:
    """Root may write anywhere: give up the capability that says so (CAP_DAC_OVERRIDE, bit 1 of capset(2))."""
    libc, version, data = ctypes.CDLL(None, use_errno=True), struct.pack("Ii", 0x20080522, 0), bytearray(24)
    words = (ctypes.c_uint32 * 6).from_buffer(data)
    if libc.capget(version, words) == 0:
        words[0] &= ~2
        assert libc.capset(version, words) == 0, os.strerror(ctypes.get_errno())


def read_only(t: Torture) -> None:
    """A folder that may not be written to, and a file where the folder should be: nothing is touched."""
    mine = b"something of mine"
    with a_hub(t, "train_gpt2", "fineweb", "pull-data", "export") as (_, works):
        for work in t.some(list(works.values()) * 4):
            kind, out = t.rng.choice(["folder", "file"]), work.out()
            if kind == "file":
                out.write_bytes(mine)
                ended, says, kept = work.run(out), "", out
            else:
                out.mkdir()
                (kept := out / "mine").write_bytes(mine)
                out.chmod(0o555)
                ended = work.run(out, prepare=drop_root)
                says = "not an empty folder" if work is works["export"] else "Permission denied"  # what it sees first
            t.refused(f"{work.script}, read-only {kind}", ended, str(out), says)
            t.same(f"{work.script}, read-only {kind}", kept.is_file() and kept.read_bytes() == mine, 0)


# ------------------------------------------------------------------------- damaged files


def flip(data: bytes, rng: random.Random) -> bytes:
    """One random bit the other way."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def shard_damage(t: Torture) -> None:
    """A shard truncated, a bit flipped, swapped for another, removed: found by fineweb.py --verify, and by training as
    soon as it reads the shard, also when that happens under the running process. Mended, the run goes on."""

    def harm(kind: str, path: Path, among: list[Path]) -> None:
        data = path.read_bytes()
        if kind == "truncated":
            os.truncate(path, len(data) * t.rng.randrange(10) // 10)  # in place: under whoever has it open
        elif kind == "flipped":
            path.write_bytes(flip(data, t.rng))
        elif kind == "removed":
            path.unlink()
        else:
            other = t.rng.choice([p for p in among if p.read_bytes() != data])
            path.with_suffix(".new").write_bytes(other.read_bytes())
            path.with_suffix(".new").replace(path)

    paths = shards.shard_files(folder := tokens(t).whole)
    for kind in t.some(["truncated"] * 20 + ["flipped"] * 40 + ["swapped"] * 5 + ["removed"] * 5):
        whole = (path := t.rng.choice(paths)).read_bytes()
        harm(kind, path, paths)
        found = shards.verify(folder)
        t.note("refused" if any(path.name in w for w in found) else "SILENT", f"{kind} {path.name}", why=found)
        path.write_bytes(whole)
    runs = [Training(t, "--max-steps", "120", "--save-every", "10", more) for more in ("--shuffle", "--no-shuffle")]
    for kind in t.some(["truncated", "flipped", "swapped", "removed"] * 5):
        run = t.rng.choice(runs)
        path, out = t.rng.choice(paths := shards.find_shards(run.data, "train")), run.out()
        whole = path.read_bytes()
        script = run.start(out)[0]
        script.wait_until(f"step    {t.rng.randrange(1, 4)}0/120 | val")
        harm(kind, path, paths)
        script.wait()  # well, where it had read the shard for the last time
        path.write_bytes(whole)
        run.judge(f"{kind} {path.name} under a running process", script, out, path.name)


def checkpoint_damage(t: Torture) -> None:
    """A checkpoint cut at every tenth of its length, or with one bit flipped: refused, or the same tensors. With the
    newest one cut, --resume auto goes on from the one before and ends with the same bits."""
    run = Training(t, "--max-steps", "12")
    names = [checkpoint.model_path(run.whole, run.steps), checkpoint.optim_path(run.whole, run.steps)]
    read = dict(zip(names, (lambda p: open_model(p).state_dict(), checkpoint.read_train_state), strict=True))
    for path in names:
        data, good = path.read_bytes(), read[path](path)
        cuts = [("cut", data[: len(data) * tenth // 10]) for tenth in range(10)] + [("cut", data[:-1])]
        for kind, bad in t.some(cuts + [("flipped", flip(data, t.rng)) for _ in range(60)]):
            path.write_bytes(bad)
            try:
                t.same(f"{kind} {path.name}", equal(read[path](path), good), outcome="unharmed")
            except UserError as e:
                passed_over = kind == "flipped" or run.steps not in checkpoint.complete_steps(run.whole)
                t.note("refused" if path.name in str(e) and passed_over else "SILENT", f"{kind} {path.name}", why=e)
        path.write_bytes(data)
    for kind in t.some(["cut"] * 5 + ["flipped"] * 5):
        shutil.copytree(run.whole, out := run.out())
        path = out / t.rng.choice(names).name
        data, fault = path.read_bytes(), f"{kind} {path.name}, newest"
        if kind == "cut":
            path.write_bytes(data[: t.rng.randrange(len(data))])
            run.recovers(fault, out)
        else:  # in the middle, where no padding is
            path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :])
            script = run.run(out, "--max-steps", "14")  # at 12 there is nothing to do, and nothing is read
            t.refused(fault, script, path.name, "--resume auto uses the previous one")


def equal(a: object, b: object) -> bool:
    """Nested containers with the same tensors."""
    (ours, form), (theirs, other) = tree_flatten(a), tree_flatten(b)
    same = (x.dtype == y.dtype and torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
            for x, y in zip(ours, theirs, strict=False))  # fmt: skip
    return form == other and all(same)


# ------------------------------------------------------------------------- clocks, networks, ranks, numbers


def backwards(seconds: float) -> None:
    """The wall clock loses so many seconds a call (0: it stands still), as when a machine corrects its clock."""
    now = [time.time()]

    def clock() -> float:
        now[0] -= seconds
        return now[0]

    time.time = clock


def clock(t: Torture) -> None:
    """A wall clock that stands still or runs backwards changes nothing that is made."""
    with a_hub(t, "fineweb", "train_gpt2", "pull-data") as (_, works):
        for seconds in t.some([0, 0.001, 1, 3600, 1e6]):
            for work in works.values():
                script = work.run(out := work.out(), prepare=partial(backwards, seconds))
                good = script.exit_code == 0 and work.equals_whole(out)
                t.same(f"{work.script}, clock back by {seconds} s a look", good, outcome="unharmed", why=script.output)
    for _ in t.times(3):
        with a_pod(t) as p:  # every `date` is an hour before the last, and so is the time of each file written
            p.tool("date", f'#!/bin/sh\necho x >> {p.root}/n\nexec /bin/date -d "-$(wc -l < {p.root}/n) hours" "$@"\n')
            past = "os.utime(out / f'{kind}_{name}.pt', (1e9, 1e9))"
            trainer = p.root / "train_gpt2.py"
            trainer.write_text(trainer.read_text().replace('.write_text("weights")', f'.write_text("weights"); {past}'))
            p.start("--resume", "elsewhere/model_00005.pt", "--out-dir", "o", plan="fail savefail ok")
            log = p.ended("o")
            good = [s.endswith(f"--resume {p.root}/o") for s in p.starts()] == [False, False, True]
            t.same("train.sh, clock backwards", good and "training finished" in log, outcome="unharmed", why=log)


def hub_faults(t: Torture) -> None:
    """A Hub that drops connections, answers 429 or 500, sends wrong bytes or a web page, once or always: every hash is
    right in the end, or there is a message; and when the Hub is well again, the same command ends the work."""
    kinds = [("drop", 0), ("status", 429), ("status", 500), ("status", 503), ("corrupt", 0), ("html", 0)]
    places = {
        "pull-data": ["/api/datasets/tester/toy/revision", "/tree/", "manifest.json", "train_000001.npy", "/resolve/"],
        "push-data": ["whoami", "repos/create", "/tree/", "preupload", "objects/batch", "/lfs/", "/commit/"],
        "pull-model": ["/resolve/", "model_0"],
    }
    cases = [(verb, p, k, n) for verb, ps in places.items() for p in ps for k in kinds for n in (1, 10**6)]
    with a_hub(t, *places) as (hub, works):
        for verb, path, (kind, code), times in t.some(cases)[: len(t.times(90))]:
            work, planted = works[verb], Fault(kind, path, times, code or 500, "PUT" if path == "/lfs/" else None)
            hub.faults[:] = [planted]
            script = work.run(out := work.out(), prepare=shorten_sleeps)
            fault = f"{verb}, {kind} {code or ''} at {path} {'once' if times == 1 else 'always'}"
            outcome = "recovered" if planted.times < times else "unharmed"
            work.judge(fault, script, out, mend=hub.faults.clear, outcome=outcome)
            if hub.token in script.output:
                t.note("LOST", fault, why="the token was printed")


def poison(where: str, step: int, rank: int, value: float) -> None:
    """From `step` on, in the memory of one rank, something is not finite: a gradient, or a weight before its update."""
    at, here = -1, False

    def gradients(self, *args, honest=Step.gradients):
        nonlocal at, here
        at += 1
        here = at >= step and self.rt.rank == rank
        return honest(self, *args)

    @torch.no_grad()
    def clip(parameters, *args, honest=torch.nn.utils.clip_grad_norm_):
        parameters = list(parameters)
        if where == "gradient" and here:
            parameters[3].grad.view(-1)[5] = value
        norm = honest(parameters, *args)
        if where == "weight" and at >= step:  # every rank has the same weights, and so the same damage
            parameters[2].view(-1)[7] = value
        return norm

    Step.gradients, torch.nn.utils.clip_grad_norm_ = gradients, clip


def not_finite(t: Torture) -> None:
    """NaN or infinity in a gradient or a weight: refused before it can be saved, the step named, earlier
    checkpoints as they were; without the fault the run goes on with the same bits."""
    one, two = (Training(t, "--save-every", "1", ranks=n) for n in (1, 2))
    for where in t.some(["gradient", "weight"] * 12):
        run, value = t.rng.choice([one, one, two]), t.rng.choice([float("nan"), float("inf"), float("-inf")])
        out, step, rank = run.out(), t.rng.randrange(2, 30), t.rng.randrange(run.ranks)
        ended = [s.wait() for s in run.start(out, prepare=partial(poison, where, step, rank, value))]
        fault = f"{value} in a {where} of rank {rank} of {run.ranks} at step {step}"
        saved = checkpoint.complete_steps(out)
        finite = all(w.isfinite().all() for s in saved for w in load_weights(out, s).values())
        if not finite or max(saved, default=0) not in (step, step + 1):
            t.note("LOST", fault, why=f"saved {saved}, finite {finite} {ended[0].output[-1200:]}")
        elif t.refused(fault, ended[0], "not finite" if where == "weight" else f"step {step}", last=False):
            run.recovers(fault, out)
    for value in t.some([float("nan"), float("inf")]):  # in the weights that a new run begins with
        model, folder, out = open_model(one.whole), t.path("bad"), one.out()
        name, weight = t.rng.choice(sorted(model.named_parameters()))
        with torch.no_grad():
            weight.view(-1)[0] = value
        folder.mkdir()
        checkpoint.write(folder / "model_00000.pt", checkpoint.model_file(model, 0))
        t.refused(f"{value} in {name}", one.run(out, "--init-from", folder / "model_00000.pt"), "step 0", "refused")
        assert not checkpoint.complete_steps(out)


def two_runs(t: Torture) -> None:
    """A second process on the same folder: refused by name, or it waits its turn; the first notices nothing."""
    works = Training(t, "--max-steps", "150", "--save-every", "10"), tokens(t, 300)
    with a_hub(t, "pull-data") as (_, pull):
        for work in [*works, pull["pull-data"]] * len(t.times(3)):
            out = work.out()
            first = work.start(out)[0]
            if work in works:
                first.wait_until((out / ".lock").exists)
            time.sleep(t.rng.uniform(0, 0.2))
            second, fault = work.run(out), f"second {work.script}"
            if second.exit_code == 0:  # too late, or it waited
                t.note("unharmed", fault)
            else:
                t.refused(fault, second, "in use by another process")
            t.same(fault, first.wait().exit_code == 0 and work.equals_whole(out), 0, why=first.output)


# ------------------------------------------------------------------------- a long run


def long_run(t: Torture) -> None:
    """3,000 steps with validation, samples and saves: memory, open files and step time of the last third against the
    middle third."""
    data, out, steps = tiny_data(t.path("data")), t.path("out"), len(t.times(3000))
    every = "--val-every 20 --sample-every 50 --sample-prompt a --save-every 25 --keep 2 --tracker tensorboard"
    flags = ["quickstart", *TINY_FLAGS, "--data-dir", data, "--out-dir", out, *every.split(), "--max-steps", steps]
    script, seen = processes.start("train_gpt2", *flags, log=t.path("said"), cwd=t.folder), []
    metrics, proc = out / "metrics.jsonl", Path(f"/proc/{script.process.pid}")
    while script.process.is_alive():
        with suppress(OSError, TypeError):  # not begun, or just ended
            step, user, system = metrics.read_bytes().count(b"\n"), *(proc / "stat").read_text().split()[13:15]
            size = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1]) / 1024
            cpu_ms = (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")
            seen.append((step, size, len(list((proc / "fd").iterdir())), cpu_ms))
        time.sleep(0.1)
    assert script.wait().exit_code == 0, script.output
    took = {line["step"]: line["step_ms"] for line in read_metrics(metrics) if "step_ms" in line}

    def third(n: int) -> tuple[float, int, float, float]:
        span = range(n * steps // 3, (n + 1) * steps // 3)
        at, sizes, handles, cpu = zip(*(s for s in seen if s[0] in span), strict=True)
        ms = statistics.median(took[step] for step in span)
        say = "{} third: resident memory {:.1f} MB, at most {} open files, {:.2f} ms a step (median), {:.2f} ms of CPU"
        found = statistics.median(sizes), max(handles), ms, (cpu[-1] - cpu[0]) / (at[-1] - at[0])
        t.figures.append(say.format(("first", "middle", "last")[n], *found))
        return found

    middle, last = third(1), third(2)
    flat = last[0] < 1.03 * middle[0] and last[1] <= middle[1] + 2 and last[3] < 1.25 * middle[3]  # others slow a clock
    t.same("long run", flat and len(checkpoint.complete_steps(out)) <= 3, outcome="unharmed", why=t.figures)


CLASSES = {
    f.__name__.replace("_", "-"): f
    for f in (
        fineweb_kill, train_kill, rank_kill, torchrun_kill, hub_kill, train_sh_kill, disk_full, log_full, read_only,
        shard_damage, checkpoint_damage, clock, hub_faults, hung_rank, not_finite, two_runs, long_run,
    )
}  # fmt: skip


def main(only: tuple[str, ...] = (), scale: float = 1.0, seed: int = 0) -> None:
    """Run the classes of faults named (all of them, where none is) and print what came of them.

    only: names of classes. scale: share of the faults. seed: of their moments and places.
    """
    if unknown := set(only) - CLASSES.keys():
        raise SystemExit(f"error: no class {', '.join(unknown)}; there are {', '.join(CLASSES)}")
    total, kills = Counter(), 0
    print("class              faults recovered refused unharmed  bad kills     s")
    for name in only or CLASSES:
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            t, began = Torture(Path(folder) / name, seed, scale), time.monotonic()
            try:
                CLASSES[name](t)
            except Exception as e:
                t.note("SILENT", name, why=f"the class did not come to its end: {e!r}"[:2000])
        o, took = t.outcomes, time.monotonic() - began
        total, kills = total + o, kills + t.kills
        print(f"{name:18} {o.total():6} {o['recovered']:9} {o['refused']:7} {o['unharmed']:8} "
              f"{o['SILENT'] + o['LOST']:4} {t.kills:5} {took:5.0f}", flush=True)  # fmt: skip
        for line in [*t.figures, *t.failures]:
            print(f"    {line}", flush=True)
    bad = total["SILENT"], total["LOST"]
    print(f"torture: {total.total()} faults injected ({kills} kills), {bad[0]} silent, {bad[1]} lost")
    sys.exit(any(bad))


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
