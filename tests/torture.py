"""Faults on purpose: kills, full disks, damaged files, lost ranks, bad networks, wrong clocks, NaN, and a long run.

    python tests/torture.py                                  # every class; `make torture` runs it
    python tests/torture.py --only hub-faults disk-full --scale 0.2 --seed 7

Each class is a function that plants faults, draws their places and moments from the seed, and judges each by what the
user is left with:

    recovered   run again, the work ended with the bits of the run that nothing happened to
    refused     one message, no traceback, an exit code that says failure, and every file still as it was
    unharmed    the result is that of the undisturbed run: the fault hit nothing that is read

Anything else is SILENT (no message, or success with another result) or LOST (something finished is gone), and fails.
Processes are real and die of real signals; they are forked from one that has imported torch, to save seconds each.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import socket
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
from multiprocessing import resource_tracker
from pathlib import Path

import hub_server
import numpy as np
import torch
from conftest import ROOT, TINY, write_walk
from hub_server import Fault
from test_train import curve, same_bits
from test_train_sh import Pod, alive

import checkpoint
import cli
import runtime
import shards
import train_gpt2
from cli import UserError
from metrics import read_lines

FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["__main__", "torture", "torch._dynamo", "tyro", "fineweb", "hub", "convert"])


# ------------------------------------------------------------------------- processes


def child(script: str, argv: list[str], log: str, out: str, env: dict[str, str], prepare: Callable | None) -> None:
    """In the new process: what a shell does (streams, environment, arguments), the fault, then the script's main."""
    for path, streams in ((log, (1, 2)), (out, (1,))):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in streams:
            os.dup2(fd, stream)
    os.environ.update(env)
    os.chdir(Path(log).parent)
    sys.argv = [f"{script}.py", *argv]
    torch.set_num_threads(1)
    resource_tracker.register = resource_tracker.unregister = lambda *_: None  # it would mourn the killed at the end
    if prepare:
        prepare()
    cli.run_cli(importlib.import_module(script).main)


@dataclass
class Script:
    """A script of the project in a process of its own; what it says goes to a file."""

    process: multiprocessing.Process
    log: Path

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        return self.process.exitcode

    def send(self, number: int) -> bool:
        """Whether the signal found the process alive."""
        if here := self.process.is_alive():
            os.kill(self.process.pid, number)
        return here

    def kill_at(self, goal: int, count: Callable[[], int], later: float) -> bool:
        """SIGKILL when the count has come to the goal, and a moment later; whether it found the process alive."""
        while self.process.is_alive() and count() < goal:
            time.sleep(0.002)
        time.sleep(later)
        return self.send(signal.SIGKILL)

    def wait(self, seconds: float = 120) -> Script:
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            raise AssertionError(f"it hung for {seconds} seconds\n{self.said[-2000:]}")
        return self

    def until(self, words: str, seconds: float = 60) -> bool:
        """Wait until it has said that; False if it ended without."""
        end = time.monotonic() + seconds
        while words not in self.said:
            if not self.process.is_alive():
                return words in self.said
            assert time.monotonic() < end, f"{words!r} did not come\n{self.said[-2000:]}"
            time.sleep(0.005)
        return True


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

    def path(self, name: str) -> Path:
        """A path not used before."""
        self.count += 1
        return self.folder / f"{name}-{self.count}"

    def start(self, script: str, *argv, prepare: Callable | None = None, out: str = "", **env: str) -> Script:
        log = self.path("said")
        args = (script, [str(a) for a in argv], str(log), out or str(log), env, prepare)
        log.touch()
        process = FORK.Process(target=child, args=args)
        process.start()
        return Script(process, log)

    def run(self, script: str, *argv, **how) -> Script:
        return self.start(script, *argv, **how).wait()

    def ranks(self, n: int, *argv, **how) -> list[Script]:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
        where |= {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n)}
        return [self.start("train_gpt2", *argv, RANK=str(r), LOCAL_RANK=str(r), **where, **how) for r in range(n)]

    # what came of a fault

    def note(self, outcome: str, fault: str, n: int = 1, why: str = "") -> None:
        self.outcomes[outcome] += n
        if outcome in ("SILENT", "LOST"):
            self.failures.append(f"{outcome}: {fault}: {why}")

    def same(self, fault: str, equal: bool, n: int = 1, outcome: str = "recovered", why: object = "") -> None:
        """The result of a run that went on after `n` faults is that of the undisturbed one."""
        self.note(
            outcome if equal else "LOST", fault, n if equal else max(n, 1), f"the result differs {str(why)[-1500:]}"
        )

    def refused(
        self, fault: str, ended: Script, *says: str, kept: dict[Path, bytes] | None = None, last: bool = True
    ) -> bool:
        """One message that says these things, no traceback, failure as exit code, and what was there is still there.
        last=False: not counted yet if all that is so, because the run goes on and is judged by its end."""
        said, kept = ended.said, kept or {}
        lost = [p.name for p, data in kept.items() if not p.is_file() or p.read_bytes() != data]
        messages = len(re.findall(r"^(?:(?:system )?error: |rank \d+ (?:lost|could not))", said, re.MULTILINE))
        wrong = [f"exit code {ended.code}"] * (ended.code is None or ended.code <= 0)
        wrong += ["a traceback"] * ("Traceback" in said) + [f"{messages} messages"] * (messages != 1)
        wrong += [f"not a word of {s!r}" for s in says if s.lower() not in said.lower()]
        if lost:
            self.note("LOST", fault, why=f"{lost}\n{said[-1500:]}")
        elif wrong or last:
            self.note("SILENT" if wrong else "refused", fault, why=f"{wrong}\n{said[-1500:]}")
        return not lost and not wrong


def files(folder: Path) -> dict[Path, bytes]:
    """Everything of a folder that was given its name; .lock, .part and the like belong to nobody yet."""
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith(".")}


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): data for p, data in files(folder).items()}


# ------------------------------------------------------------------------- a tiny run, and what it should give

FLAGS = "--device cpu --max-steps 40 --save-every 2 --val-every 10 --shuffle --resume auto".split()


def tiny_data(folder: Path) -> Path:
    """conftest's walk over 256 tokens with a manifest, so that hashes are checked."""
    write_walk(folder)
    known = []
    for p in shards.shard_files(folder):
        tokens = shards.read_shard(p)
        sha256 = hashlib.sha256(p.read_bytes()).hexdigest()
        known.append(shards.Shard(p.name, len(tokens), 0, sha256, {"file": 0, "token": 0}))
    source = {"name": "walk", "subset": "", "column": "text", "revision": "0", "files": []}
    shards.write_manifest(folder, shards.Manifest(source, "npy", 4097, complete=True, shards=known))
    return folder


class Run:
    """The same tiny run as often as one likes: `argv(folder)` starts it or goes on, `whole` is it undisturbed."""

    def __init__(self, t: Torture, *more: str, ranks: int = 1):
        self.t, self.ranks = t, ranks
        self.data = t.path("data")
        tiny_data(self.data)
        self.flags = ["quickstart", *TINY, "--data-dir", str(self.data), *FLAGS, *more]
        self.whole = t.path("whole")
        self.finish(self.whole)
        self.steps = checkpoint.latest_step(self.whole)

    def argv(self, folder: Path) -> list[str]:
        return [*self.flags, "--out-dir", str(folder)]

    def start(self, folder: Path, *more: str, **how) -> list[Script]:
        if self.ranks == 1:
            return [self.t.start("train_gpt2", *self.argv(folder), *more, **how)]
        return self.t.ranks(self.ranks, *self.argv(folder), *more, **how)

    def finish(self, folder: Path) -> None:
        for script in self.start(folder):
            assert script.wait().code == 0, script.said[-3000:]

    def equals_whole(self, folder: Path) -> bool:
        """Losses of every step, and the bits of every checkpoint that both kept."""
        both = set(checkpoint.complete_steps(folder)) & set(checkpoint.complete_steps(self.whole))
        pairs = [[checkpoint.load_weights(checkpoint.model_path(f, s))[0] for f in (folder, self.whole)] for s in both]
        return self.steps in both and curve(folder) == curve(self.whole) and all(same_bits(a, b) for a, b in pairs)

    def recovers(self, fault: str, folder: Path, n: int = 1, outcome: str = "recovered") -> None:
        """Gone on with, undisturbed now, the run ends with the bits of the whole one."""
        try:
            self.finish(folder)
            self.t.same(fault, self.equals_whole(folder), n, outcome)
        except AssertionError as e:
            self.t.note("LOST", fault, n, f"it does not go on: {e}")


# ------------------------------------------------------------------------- kills


def fineweb_kill(t: Torture) -> None:
    """SIGKILL at any moment of fineweb.py; run again, the shards are the same bytes."""
    for form in ("npy", "bin"):
        args = [*tiny_text(t), "--shard-size", "1500", "--format", form]
        whole, out, pending = t.path("whole"), t.path("out"), 0
        assert t.run("fineweb", *args, "--out", whole).code == 0
        for _ in t.times(24):
            out.mkdir(exist_ok=True)
            script, count = t.start("fineweb", *args, "--out", out), lambda out=out: len(shards.shard_files(out))
            pending += script.kill_at(t.rng.randint(count(), len(contents(whole))), count, t.rng.uniform(0, 0.03))
            if script.wait().code == 0:
                t.same(f"kills of fineweb.py, {form}", contents(out) == contents(whole), pending)
                t.kills, out, pending = t.kills + pending, t.path("out"), 0
        assert t.run("fineweb", *args, "--out", out).code == 0
        t.same(f"kills of fineweb.py, {form}", contents(out) == contents(whole), pending)
        t.kills += pending


def tiny_text(t: Torture) -> list[str]:
    """--source of some documents, the same every time."""
    path, rng = t.folder / "text.jsonl", np.random.default_rng(0)
    words = ["walk", " the", " line", "\n", " 12", "é", "  ", " and", "_x", "."]
    texts = ["".join(rng.choice(words, 400)) for _ in range(150)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return ["--source", str(path)]


def train_kill(t: Torture) -> None:
    """SIGKILL at any moment of a run, saves included; resumed, it ends with the bits of the run never killed."""
    for more in ([], ["--optimizer", "muon", "--keep", "2"], ["--no-shuffle", "--save-every", "1", "--keep", "1"]):
        run = Run(t, *more)
        out, pending = t.path("out"), 0
        for _ in t.times(20):
            script, goal = run.start(out)[0], t.rng.randint(checkpoint.latest_step(out) or 0, run.steps)
            pending += script.kill_at(goal, lambda out=out: lines(out / "metrics.jsonl"), t.rng.uniform(0, 0.03))
            if script.wait().code == 0:
                t.same(f"kills of train_gpt2.py {more}", run.equals_whole(out), pending)
                t.kills, out, pending = t.kills + pending, t.path("out"), 0
        run.recovers(f"kills of train_gpt2.py {more}", out, pending)
        t.kills += pending


def rank_kill(t: Torture) -> None:
    """SIGKILL of one of two ranks: the other ends with a message; the run goes on with the same bits."""
    for more in ([], ["--zero-stage", "1"]):
        run = Run(t, *more, "--max-steps", "80", ranks=2)
        out, pending = t.path("out"), 0
        for _ in t.times(8):
            pair = run.start(out)
            victim = t.rng.randrange(2)
            begun = pair[0].until("loss")
            time.sleep(t.rng.uniform(0, 0.5))
            if begun and pair[victim].send(signal.SIGKILL):
                pair[victim].wait()
                survivor = pair[1 - victim].wait(30)
                if survivor.code == 0:  # it had done its last step
                    t.note("unharmed", "rank killed at the end")
                elif t.refused(
                    f"rank {victim} killed {more}", survivor, "lost another rank", "--resume auto", last=False
                ):
                    pending += 1
                t.kills += 1
            if [s.wait().code for s in pair] == [0, 0] or checkpoint.latest_step(out) == run.steps:
                run.recovers(f"ranks killed {more}", out, pending)
                out, pending = t.path("out"), 0
        run.recovers(f"ranks killed {more}", out, pending)


def torchrun_kill(t: Torture) -> None:
    """torchrun restarts the ranks when one is killed: no human, no bits."""
    run = Run(t, "--max-steps", "400", "--save-every", "10", ranks=2)
    out, n = t.path("out"), len(t.times(6))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [f"--max-restarts={n}", str(ROOT / "train_gpt2.py"), *run.argv(out)]
    log = t.path("said")
    with open(log, "w") as f:
        agent = subprocess.Popen(command, stdout=f, stderr=f, env={**os.environ, "OMP_NUM_THREADS": "1"})
    killed = 0
    while agent.poll() is None:
        step = (killed + 1) * run.steps // (n + 1)
        if killed < n and (checkpoint.latest_step(out) or 0) >= step:
            with open(f"/proc/{agent.pid}/task/{agent.pid}/children") as f:
                ranks = [int(p) for p in f.read().split()]
            if len(ranks) == 2:
                os.kill(t.rng.choice(ranks), signal.SIGKILL)
                killed += 1
                time.sleep(1)
        time.sleep(0.05)
    equal = agent.returncode == 0 and run.equals_whole(out)
    t.same("ranks killed under torchrun", equal, killed, why=log.read_text())
    t.kills += killed


def hub_kill(t: Torture) -> None:
    """SIGKILL at any moment of a push or a pull; the same command goes on and ends with every hash right."""
    data, run = t.path("data"), Run(t)
    assert t.run("fineweb", *tiny_text(t), "--shard-size", "9000", "--out", data).code == 0
    with hub_server.start(t.path("hub") / "root") as hub:

        def killed(words: list, done: Callable[[], bool], n: int) -> None:
            began = time.monotonic()
            script, pending = t.run("hub", *words, **hub.env()), 0
            assert script.code == 0, script.said
            seconds = time.monotonic() - began
            for _ in t.times(n):
                target = words[-1]
                if isinstance(target, Path):
                    shutil.rmtree(target, ignore_errors=True)
                else:
                    shutil.rmtree(next(hub.root.glob(f"*/{target}")), ignore_errors=True)
                script = t.start("hub", *words, **hub.env())
                time.sleep(t.rng.uniform(0.2, 1.0) * seconds)
                pending = script.send(signal.SIGKILL)
                script.wait()
                whole = t.run("hub", *words, **hub.env())
                equal = whole.code == 0 and done()
                t.same(f"{words[0]} killed", equal, outcome="recovered" if pending else "unharmed", why=whole.said)
                t.kills += pending

        def is_there(kind: str, names: dict[str, bytes]) -> bool:
            found = contents(hub.root / kind)
            return all(found.get(n) == d for n, d in names.items())

        model = {n: d for n, d in contents(run.whole).items() if n.endswith(f"{run.steps:05d}.pt")}
        killed(["push-data", data, "tester/toy"], lambda: is_there("datasets/tester/toy", contents(data)), 6)
        out = t.path("pulled")
        killed(["pull-data", "tester/toy", out], lambda: contents(out) == contents(data), 6)
        words = ["push-model", "--with-optimizer", run.whole, "tester/run"]
        killed(words, lambda: is_there("models/tester/run", model), 5)
        back = t.path("pulled")
        killed(["pull-model", "tester/run", back], lambda: model.items() <= contents(back).items(), 5)


@contextmanager
def pod(t: Torture) -> Iterator[Pod]:
    """train.sh with stand-ins for what it starts; whatever is left of it is ended."""
    root = t.path("pod")
    root.mkdir()
    pod = Pod(root)
    try:
        yield pod
    finally:
        for name in ("train.pid", "rank0", "rank1"):
            for path in root.rglob(name):
                if (pid := path.read_text().strip()) and alive(int(pid)):
                    os.kill(int(pid), signal.SIGKILL)


def train_sh_kill(t: Torture) -> None:
    """SIGKILL of a rank, of torchrun or of train.sh: restarted by itself or by the same command, with no rank left over
    and every checkpoint kept."""
    for what in t.some(["rank0", "rank1", "torchrun", "train.sh"] * 4):
        with pod(t) as p:
            p.start("--out-dir", "o", plan="hang savefail ok", PUSH_TO="me/x")
            p.wait(lambda p=p: all(p.pid(f"rank{r}", "o") for r in range(2)))
            time.sleep(t.rng.uniform(0.1, 0.4))
            ranks = [p.pid(f"rank{r}", "o") for r in range(2)]
            with open(f"/proc/{ranks[0]}/status") as f:
                torchrun = int(next(line for line in f if line.startswith("PPid:")).split()[1])
            pid = {"rank0": ranks[0], "rank1": ranks[1], "torchrun": torchrun, "train.sh": p.pid(out="o")}[what]
            os.kill(pid, signal.SIGKILL)
            t.kills += 1
            good, others = True, [rank for rank in ranks if rank != pid]
            if what == "train.sh":  # nobody watches now: the ranks go on, and a second run is refused while they live
                p.wait(lambda pid=pid: not alive(pid))
                again = p.start("--out-dir", "o", check=False, plan="savefail ok")
                good = again.returncode == 1 and str(ranks[0]) in again.stderr
            if what != "torchrun":  # a real torchrun ends the other rank; with train.sh dead its owner does
                for rank in others:
                    os.kill(rank, signal.SIGTERM)
            if what == "train.sh":
                p.wait(lambda others=others: not any(map(alive, others)))
                p.wait(lambda p=p: p.start("--out-dir", "o", check=False, PUSH_TO="me/x").returncode == 0)
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
    args, whole = [*tiny_text(t), "--shard-size", "9000"], t.path("whole")
    assert t.run("fineweb", *args, "--out", whole).code == 0
    run = Run(t, "--save-every", "5")

    def tokens(fault: str, out: Path, room: Callable[[], None], **how) -> None:
        script = t.run("fineweb", *args, "--out", out, **how)
        if script.code == 0:
            return t.same(fault, contents(out) == contents(whole), outcome="unharmed")
        before, good = files(out), t.refused(fault, script, str(out), last=False)
        room()
        again = t.run("fineweb", *args, "--out", out)
        if good:
            kept = all(p.read_bytes() == d for p, d in before.items() if p.suffix == ".npy")
            t.same(fault, again.code == 0 and kept and contents(out) == contents(whole), why=again.said)

    def training(fault: str, out: Path, room: Callable[[], None], **how) -> None:
        script = run.start(out, **how)[0].wait()
        if script.code == 0:
            return t.same(fault, run.equals_whole(out), outcome="unharmed")
        before, good = checkpoint.complete_steps(out), t.refused(fault, script, last=False)
        room()
        if good:
            run.recovers(fault, out)
            t.same(fault, set(before) <= set(checkpoint.complete_steps(out)), 0, why="a checkpoint is gone")

    nothing = lambda: None
    for size in t.some([300, 500, 1000, 2000, 2300, 2600, 3000, 8192, 18000, 18100]):
        tokens(f"fineweb.py, files up to {size} bytes", t.path("out"), nothing, prepare=partial(at_most, size))
    for size in t.some([1200, 700, 2500, 4000, 6000, 10_000, 50_000, 140_000, 150_000, 200_000, 280_000, 300_000]):
        training(f"train_gpt2.py, files up to {size} bytes", t.path("out"), nothing, prepare=partial(at_most, size))
    for kb in t.some([4, 8, 30, 50, 80, 100, 150, 200]):
        with small_disk(t, kb) as disk:
            if disk:
                tokens(f"fineweb.py on a disk of {kb} kB", disk[0] / "out", disk[1])
    for kb in t.some([4, 12, 100, 180, 300, 440, 450, 500, 900, 1400, 1800, 2500]):
        with small_disk(t, kb) as disk:
            if disk:
                training(f"train_gpt2.py on a disk of {kb} kB", disk[0] / "out", disk[1])


def log_full(t: Torture) -> None:
    """Nothing more can be printed: /dev/full as standard output, and train.sh on a full disk."""
    run, args = Run(t), [*tiny_text(t), "--shard-size", "9000"]
    whole = t.path("whole")
    assert t.run("fineweb", *args, "--out", whole).code == 0
    for _ in t.times(3):
        out, data = t.path("out"), t.path("data")
        script = run.start(out, out="/dev/full")[0].wait()
        if t.refused("train_gpt2.py, nowhere to print", script, "No space left", last=False):
            run.recovers("train_gpt2.py, nowhere to print", out)
        script = t.run("fineweb", *args, "--out", data, out="/dev/full")
        t.refused("fineweb.py, nowhere to print", script, "No space left")
        t.run("fineweb", *args, "--out", data)
        t.same("fineweb.py, nowhere to print", contents(data) == contents(whole), 0)
        script = t.run("hub", "export", run.whole, t.path("hf"), out="/dev/full")
        t.refused("hub.py, nowhere to print", script, "No space left")
    for _ in t.times(2):
        with small_disk(t, 64) as disk, pod(t) as p:
            if not disk:
                continue
            fill_up(disk[0] / "fill")
            done = p.start("--out-dir", str(disk[0]), check=False)
            wrong = done.returncode != 1 or "is the disk full" not in done.stderr or p.starts()
            t.note("SILENT" if wrong else "refused", "train.sh, full disk before it starts", why=done.stderr)
            (disk[0] / "fill").unlink()
            p.start("--out-dir", str(disk[0]), plan="hang savefail", MAX_RESTARTS="1")
            p.wait(lambda p=p, disk=disk: all(p.pid(f"rank{r}", disk[0]) for r in range(2)))
            fill_up(disk[0] / "fill")
            ranks = [p.pid(f"rank{r}", disk[0]) for r in range(2)]
            watcher = p.pid(out=disk[0])
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
            p.wait(lambda watcher=watcher: not alive(watcher))
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
    """A folder that may not be written to, and a file where the folder should be."""
    run = Run(t)
    data, text = run.data, tiny_text(t)
    with hub_server.start(t.path("hub") / "root") as hub:
        repo = hub.root / "datasets/tester/toy"
        shutil.copytree(data, repo)
        for kind in t.some(["folder", "file"] * 2):
            denied = "Permission denied"
            for script, argv, why in (
                ("train_gpt2", lambda out: run.argv(out), denied),
                ("fineweb", lambda out: [*text, "--out", out], denied),
                ("hub", lambda out: ["pull-data", "tester/toy", out], denied),
                ("hub", lambda out: ["export", run.whole, out], "not an empty folder"),  # which it sees first
            ):
                out = t.path("out")
                if kind == "file":
                    out.write_text("something of mine")
                    ended = t.run(script, *argv(out), **hub.env())
                else:
                    out.mkdir()
                    (out / "mine").write_text("something of mine")
                    out.chmod(0o555)
                    ended = t.run(script, *argv(out), prepare=drop_root, **hub.env())
                mine = out if kind == "file" else out / "mine"
                words = why if kind == "folder" else ""
                t.refused(f"{script}, read-only {kind}", ended, str(out), words, kept={mine: b"something of mine"})


# ------------------------------------------------------------------------- damaged files


def flip(data: bytes, rng: random.Random) -> bytes:
    """One random bit the other way."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def shard_damage(t: Torture) -> None:
    """A shard truncated, a bit flipped, swapped for another, removed: found by fineweb.py --verify, and by training as
    soon as it reads the shard, also when that happens under the running process. Mended, the run goes on."""
    folder = t.path("data")
    assert t.run("fineweb", *tiny_text(t), "--shard-size", "9000", "--out", folder).code == 0
    paths = shards.shard_files(folder)
    whole = {p: p.read_bytes() for p in paths}

    def harm(kind: str, path: Path, among: list[Path]) -> None:
        data = path.read_bytes()
        if kind == "removed":
            path.unlink()
        elif kind == "swapped":
            other = t.rng.choice([p for p in among if p.read_bytes() != data])
            path.with_suffix(".new").write_bytes(other.read_bytes())
            os.replace(path.with_suffix(".new"), path)
        elif kind == "flipped":
            path.write_bytes(flip(data, t.rng))
        else:
            os.truncate(path, len(data) * t.rng.randrange(10) // 10)  # in place: under whoever has it open

    for kind in t.some(["truncated"] * 20 + ["flipped"] * 40 + ["swapped"] * 5 + ["removed"] * 5):
        path = t.rng.choice(paths)
        harm(kind, path, paths)
        found = shards.verify(folder)
        t.note("refused" if any(path.name in w for w in found) else "SILENT", f"{kind} {path.name}", why=str(found))
        path.write_bytes(whole[path])
    runs = [Run(t, "--max-steps", "120", "--save-every", "10", more) for more in ("--shuffle", "--no-shuffle")]
    for kind in t.some(["truncated", "flipped", "swapped", "removed"] * 5):
        run, out = t.rng.choice(runs), t.path("out")
        path = t.rng.choice(paths := shards.find_shards(run.data, "train"))
        whole, fault = path.read_bytes(), f"{kind} {path.name} under a running process"
        script = run.start(out)[0]
        script.until(f"step    {t.rng.randrange(1, 4)}0/120 | val")
        harm(kind, path, paths)
        good = script.wait().code == 0 or t.refused(fault, script, path.name, last=False)
        path.write_bytes(whole)
        if script.code == 0:  # it had read it for the last time
            t.same(fault, run.equals_whole(out), outcome="unharmed")
        elif good:
            run.recovers(fault, out)


def checkpoint_damage(t: Torture) -> None:
    """A checkpoint cut at every tenth of its length, or with one bit flipped: refused, or the same tensors. With the
    newest one cut, --resume auto goes on from the one before and ends with the same bits."""
    run = Run(t, "--max-steps", "12")
    names = [checkpoint.model_path(run.whole, run.steps), run.whole / f"optim_{run.steps:05d}.pt"]
    read = dict(zip(names, (lambda p: checkpoint.load_model(p).state_dict(), checkpoint.read_train_state), strict=True))
    for path in names:
        data, good = path.read_bytes(), read[path](path)
        cuts = [("cut", data[: len(data) * tenth // 10]) for tenth in range(10)] + [("cut", data[:-1])]
        for kind, bad in t.some(cuts + [("flipped", flip(data, t.rng)) for _ in range(60)]):
            path.write_bytes(bad)
            try:
                t.same(f"{kind} {path.name}", equal(read[path](path), good), outcome="unharmed")
            except UserError as e:
                passed_over = kind == "flipped" or run.steps not in checkpoint.complete_steps(run.whole)
                ok = path.name in str(e) and passed_over
                t.note("refused" if ok else "SILENT", f"{kind} {path.name}", why=str(e))
            except Exception as e:
                t.note("SILENT", f"{kind} {path.name}", why=repr(e))
        path.write_bytes(data)
    for kind in t.some(["cut"] * 5 + ["flipped"] * 5):
        out = t.path("out")
        shutil.copytree(run.whole, out)
        path = out / t.rng.choice(names).name
        data = path.read_bytes()
        if kind == "cut":
            path.write_bytes(data[: t.rng.randrange(len(data))])
            run.recovers(f"{kind} {path.name}, newest", out)
        else:
            path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :])
            script = run.start(out, "--max-steps", "14")[0].wait()  # at 12 there is nothing to do, and nothing is read
            t.refused(f"{kind} {path.name}, newest", script, path.name, "--resume auto uses the previous one")


def equal(a: object, b: object) -> bool:
    """Nested containers with the same tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(equal, a, b))
    return a == b


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
    run, args, whole = Run(t), [*tiny_text(t), "--shard-size", "9000"], t.path("whole")
    assert t.run("fineweb", *args, "--out", whole).code == 0
    with hub_server.start(t.path("hub") / "root") as hub:
        shutil.copytree(whole, hub.root / "datasets/tester/toy")
        for seconds in t.some([0, 0.001, 1, 3600, 1e6]):
            how, what = {"prepare": partial(backwards, seconds)}, f"clock back by {seconds} s a look"
            out, data, pulled = t.path("out"), t.path("data"), t.path("pulled")
            script = t.run("fineweb", *args, "--out", data, **how)
            good = script.code == 0 and contents(data) == contents(whole)
            t.same(f"fineweb.py, {what}", good, outcome="unharmed", why=script.said)
            script = run.start(out, **how)[0].wait()
            t.same(f"train_gpt2.py, {what}", run.equals_whole(out), outcome="unharmed", why=script.said)
            script = t.run("hub", "pull-data", "tester/toy", pulled, **how, **hub.env())
            t.same(f"hub.py, {what}", contents(pulled) == contents(whole), outcome="unharmed", why=script.said)
    for _ in t.times(3):
        with pod(t) as p:  # every `date` is an hour before the last, and so is the time of each file written
            p.tool("date", f'#!/bin/sh\necho x >> {p.root}/n\nexec /bin/date -d "-$(wc -l < {p.root}/n) hours" "$@"\n')
            past = "os.utime(out / f'{kind}_{name}.pt', (1e9, 1e9))"
            trainer = p.root / "train_gpt2.py"
            trainer.write_text(trainer.read_text().replace('.write_text("weights")', f'.write_text("weights"); {past}'))
            p.start("--resume", "elsewhere/model_00005.pt", "--out-dir", "o", plan="fail savefail ok")
            log = p.ended("o")
            good = [s.endswith(f"--resume {p.root}/o") for s in p.starts()] == [False, False, True]
            t.same("train.sh, clock backwards", good and "training finished" in log, outcome="unharmed", why=log)


def hasty() -> None:
    """The waits between tries, shortened."""
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(min(seconds, 0.01))


def hub_faults(t: Torture) -> None:
    """A Hub that drops connections, answers 429 or 500, sends wrong bytes or a web page, once or always: every hash is
    right in the end, or there is a message; and when the Hub is well again, the same command ends the work."""
    data, run = t.path("data"), Run(t, "--max-steps", "4")
    assert t.run("fineweb", *tiny_text(t), "--shard-size", "9000", "--out", data).code == 0
    model = {n: d for n, d in contents(run.whole).items() if n == f"model_{run.steps:05d}.pt"}
    kinds = [("drop", 0), ("status", 429), ("status", 500), ("status", 503), ("corrupt", 0), ("html", 0)]
    pull = ["/api/datasets/tester/toy/revision", "/tree/", "manifest.json", "train_000001.npy", "/resolve/"]
    push = ["whoami", "repos/create", "/tree/", "preupload", "objects/batch", "/lfs/", "/commit/"]
    cases = [("pull-data", p, k, n) for p in pull for k in kinds for n in (1, 10**6)]
    cases += [("push-data", p, k, n) for p in push for k in kinds for n in (1, 10**6)]
    cases += [("pull-model", p, k, n) for p in ("/resolve/", "model_0") for k in kinds for n in (1, 10**6)]
    for verb, path, (kind, code), times in t.some(cases)[: len(t.times(90))]:
        with hub_server.start(t.path("hub") / "root") as hub:
            out, there = t.path("out"), hub.root / "datasets/tester/toy"
            if verb == "pull-data":
                shutil.copytree(data, there)
                words, done = ["tester/toy", out], lambda out=out: contents(out) == contents(data)
            elif verb == "pull-model":
                shutil.copytree(run.whole, hub.root / "models/tester/run")
                words, done = ["tester/run", out], lambda out=out: model.items() <= contents(out).items()
            else:
                words, done = [data, "tester/toy"], lambda d=there: contents(data).items() <= contents(d).items()
            method = "PUT" if path == "/lfs/" else None
            hub.faults.append(Fault(kind, path, times, code or 500, method))
            fault = f"{verb}, {kind} {code or ''} at {path} {'once' if times == 1 else 'always'}"
            script = t.run("hub", verb, *words, prepare=hasty, **hub.env())
            hit = hub.faults[0].times < times
            if script.code == 0:
                t.same(fault, done(), outcome="recovered" if hit else "unharmed", why=script.said)
            elif t.refused(fault, script, last=False):
                hub.faults.clear()
                script = t.run("hub", verb, *words, prepare=hasty, **hub.env())
                t.same(fault, script.code == 0 and done(), outcome="recovered", why=script.said)
            if hub.token in script.said:
                t.note("LOST", fault, why="the token was printed")


def impatient(minutes: float) -> None:
    runtime.session = partial(runtime.session, timeout_minutes=minutes)


def hung_rank(t: Torture) -> None:
    """One of two ranks stops answering (SIGSTOP): the other ends by itself when the collective's patience, here three
    seconds, is over, and says so; the run goes on from its newest checkpoint with the same bits."""
    run = Run(t, "--max-steps", "200", "--save-every", "20", ranks=2)
    for _ in t.times(4):
        out, victim = t.path("out"), t.rng.randrange(2)
        pair = run.start(out, prepare=partial(impatient, 0.05))
        pair[0].until("loss")
        time.sleep(t.rng.uniform(0, 0.3))
        pair[victim].send(signal.SIGSTOP)
        began = time.monotonic()
        survivor = pair[1 - victim].wait(30)
        took = time.monotonic() - began
        pair[victim].send(signal.SIGKILL)
        pair[victim].wait()
        if t.refused(f"rank {victim} hung", survivor, "waited 0.05 minutes", "--resume auto", last=False) and took < 15:
            run.recovers(f"rank {victim} hung", out)
        elif took >= 15:
            t.note("SILENT", f"rank {victim} hung", why=f"the other waited {took:.0f} s")


def poison(where: str, step: int, rank: int, value: float) -> None:
    """From `step` on, in the memory of one rank, something is not finite: a gradient, the loss of a batch, or a weight
    after its update."""
    honest, calls = train_gpt2.accumulate, [-1]

    def accumulate(forward, batch, rt, scaler):
        calls[0] += 1
        now = calls[0] >= step and rt.rank == rank
        weights = list(forward.parameters())
        loss = honest(forward, batch, rt, scaler)
        with torch.no_grad():
            if now and where == "gradient":
                weights[3].grad.view(-1)[5] = value
            elif now and where == "batch":
                loss = loss * value
        return loss

    def clip(parameters, *args, honest=torch.nn.utils.clip_grad_norm_):
        weights = list(parameters)
        norm = honest(weights, *args)
        if where == "weight" and calls[0] >= step:  # every rank has the same weights, and so the same damage
            with torch.no_grad():
                weights[2].view(-1)[7] = value
        return norm

    train_gpt2.accumulate, torch.nn.utils.clip_grad_norm_ = accumulate, clip


def not_finite(t: Torture) -> None:
    """NaN or infinity in a gradient, a batch's loss, a weight: refused before it can be saved, the step named, earlier
    checkpoints as they were; without the fault the run goes on with the same bits."""
    one, two = Run(t, "--save-every", "1"), Run(t, "--save-every", "1", ranks=2)
    for where in t.some(["gradient", "batch", "weight"] * 8):
        run = t.rng.choice([one, one, two])
        out, step, rank = t.path("out"), t.rng.randrange(2, 30), t.rng.randrange(run.ranks)
        value = t.rng.choice([float("nan"), float("inf"), float("-inf")])
        pair = run.start(out, prepare=partial(poison, where, step, rank, value))
        ended = [s.wait() for s in pair]
        fault = f"{value} in a {where} of rank {rank} of {run.ranks} at step {step}"
        saved = checkpoint.complete_steps(out)
        finite = all(
            w.isfinite().all()
            for s in saved
            for w in checkpoint.load_weights(checkpoint.model_path(out, s))[0].values()
        )
        if not finite or max(saved, default=0) not in (step, step + 1):
            t.note("LOST", fault, why=f"saved {saved}, finite {finite} {ended[0].said[-1500:]}")
        elif t.refused(fault, ended[0], "not finite" if where == "weight" else f"step {step}", last=False):
            run.recovers(fault, out)
    for value in t.some([float("nan"), float("inf")]):  # in the weights that a new run begins with
        weights, rest = checkpoint.load_weights(one.whole)
        name = t.rng.choice(sorted(weights))
        weights[name].view(-1)[0] = value
        folder = t.path("bad")
        folder.mkdir()
        checkpoint.write(folder / "model_00000.pt", {"model": weights, **rest})
        out = t.path("out")
        script = t.run("train_gpt2", *one.argv(out), "--init-from", folder / "model_00000.pt")
        t.refused(f"{value} in {name}", script, "step 0", "refused")
        assert not checkpoint.complete_steps(out)


def two_runs(t: Torture) -> None:
    """A second process on the same folder: refused by name, or it waits its turn; the first notices nothing."""
    args, whole = [*tiny_text(t), "--shard-size", "300"], t.path("whole")
    assert t.run("fineweb", *args, "--out", whole).code == 0
    run = Run(t, "--max-steps", "150", "--save-every", "10")
    for _ in t.times(3):
        out, data, pulled = t.path("out"), t.path("data"), t.path("pulled")
        first = run.start(out)[0]
        first.until("loss")
        time.sleep(t.rng.uniform(0, 0.2))
        second = run.start(out)[0].wait()
        if "is complete" in second.said:
            t.note("unharmed", "second train_gpt2.py, too late")
        else:
            t.refused("second train_gpt2.py", second, "in use by process")
        first.wait()
        t.same("first train_gpt2.py", run.equals_whole(out), 0)
        first = t.start("fineweb", *args, "--out", data)
        while not (data / ".lock").exists():
            time.sleep(0.005)
        second = t.run("fineweb", *args, "--out", data)
        if "nothing left" in second.said:
            t.note("unharmed", "second fineweb.py, too late")
        else:
            t.refused("second fineweb.py", second, "in use by process")
        first.wait()
        t.same("first fineweb.py", contents(data) == contents(whole), 0)
        with hub_server.start(t.path("hub") / "root") as hub:
            shutil.copytree(run.data, hub.root / "datasets/tester/toy")
            both = [t.start("hub", "pull-data", "tester/toy", pulled, **hub.env()) for _ in range(2)]
            good = [s.wait().code for s in both] == [0, 0] and contents(pulled) == contents(run.data)
            t.same("two pulls into one folder", good, outcome="unharmed", why=both[0].said + both[1].said)


# ------------------------------------------------------------------------- a long run


def long_run(t: Torture) -> None:
    """3,000 steps with validation, samples and saves: memory, open files and step time of the last third against the
    middle third."""
    data, out, steps = tiny_data(t.path("data")), t.path("out"), len(t.times(3000))
    every = "--val-every 20 --sample-every 50 --sample-prompt a --save-every 25 --keep 2 --tracker tensorboard"
    flags = ["quickstart", *TINY, "--data-dir", data, "--out-dir", out, *every.split(), "--max-steps", steps]
    script, seen = t.start("train_gpt2", *flags), []
    metrics, proc = out / "metrics.jsonl", Path(f"/proc/{script.process.pid}")
    while script.process.is_alive():
        with suppress(OSError, TypeError):  # not begun, or just ended
            step, user, system = metrics.read_bytes().count(b"\n"), *(proc / "stat").read_text().split()[13:15]
            size = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1]) / 1024
            cpu_ms = (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")
            seen.append((step, size, len(list((proc / "fd").iterdir())), cpu_ms))
        time.sleep(0.1)
    assert script.wait().code == 0, script.said
    took = {line["step"]: line["step_ms"] for line in read_lines(metrics) if "step_ms" in line}

    def third(n: int) -> tuple[float, int, float, float]:
        span = range(n * steps // 3, (n + 1) * steps // 3)
        at, sizes, handles, cpu = zip(*(s for s in seen if s[0] in span), strict=True)
        ms = statistics.median(took[step] for step in span)
        return statistics.median(sizes), max(handles), ms, (cpu[-1] - cpu[0]) / (at[-1] - at[0])

    middle, last = third(1), third(2)
    t.figures.append(
        f"{steps} steps, middle third and last third: resident memory {middle[0]:.1f} and {last[0]:.1f} MB, at most "
        f"{middle[1]} and {last[1]} open files, {middle[2]:.2f} and {last[2]:.2f} ms a step (median), all in all "
        f"{middle[3]:.2f} and {last[3]:.2f} ms of CPU a step"
    )
    flat = last[0] < 1.03 * middle[0] and last[1] <= middle[1] + 2 and last[3] < 1.25 * middle[3]  # others slow a clock
    t.same("long run", flat and len(checkpoint.complete_steps(out)) <= 3, outcome="unharmed", why=t.figures)


CLASSES = {
    f.__name__.replace("_", "-"): f
    for f in (
        fineweb_kill,
        train_kill,
        rank_kill,
        torchrun_kill,
        hub_kill,
        train_sh_kill,
        disk_full,
        log_full,
        read_only,
        shard_damage,
        checkpoint_damage,
        clock,
        hub_faults,
        hung_rank,
        not_finite,
        two_runs,
        long_run,
    )
}


def main(only: tuple[str, ...] = (), scale: float = 1.0, seed: int = 0) -> None:
    """Run the classes of faults named (all of them, where none is) and print what came of them.

    only: names of classes. scale: share of the faults. seed: of their moments and places.
    """
    if unknown := set(only) - CLASSES.keys():
        raise SystemExit(f"error: no class {', '.join(unknown)}; there are {', '.join(CLASSES)}")
    done: dict[str, Torture] = {}
    print(
        f"{'class':18} {'faults':>6} {'recovered':>9} {'refused':>7} {'unharmed':>8} {'bad':>4} {'kills':>5} {'s':>5}"
    )
    for name in only or CLASSES:
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            t, began = Torture(Path(folder) / name, seed, scale), time.monotonic()
            try:
                CLASSES[name](t)
            except Exception as e:
                t.note("SILENT", name, why=f"the class did not come to its end: {e!r}"[:2000])
            done[name] = t
        o, took = t.outcomes, time.monotonic() - began
        bad = o["SILENT"] + o["LOST"]
        print(
            f"{name:18} {sum(o.values()):6} {o['recovered']:9} {o['refused']:7} {o['unharmed']:8} {bad:4} "
            f"{t.kills:5} {took:5.0f}",
            flush=True,
        )
        for line in [*t.figures, *t.failures]:
            print(f"    {line}", flush=True)
    total = sum((t.outcomes for t in done.values()), Counter())
    print(
        f"torture: {sum(total.values())} faults injected ({sum(t.kills for t in done.values())} kills), "
        f"{total['SILENT']} silent, {total['LOST']} lost"
    )
    sys.exit(bool(total["SILENT"] + total["LOST"]))


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
