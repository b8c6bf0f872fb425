"""Faults on purpose: kills, full disks, damaged files, lost ranks, bad networks, wrong clocks, NaN, and a long run.

    python tests/faults/torture.py                           # every class; `make torture` runs it
    python tests/faults/torture.py --only hub-faults disk-full --scale 0.2 --seed 7

Each class is a function that injects faults, draws their places and moments from the seed, and judges each fault by
what the user is left with:

    recovered   run again, the work ended with the bits of an undisturbed run
    refused     one message, no traceback, an exit code that says failure, and every file still as it was
    unharmed    the result is that of an undisturbed run: the fault hit nothing that is read

Anything else is SILENT (no message, or success with another result) or LOST (something complete is gone), and fails.
Processes are real and die of real signals (see processes.py).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import json
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
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]

import numpy as np
import processes
import torch
from helpers import TINY_FLAGS, load_curve, load_weights, same_bits, write_random_walk_shards
from pod import Pod
from processes import Script, rank_pids, shorten_sleeps, start_torchrun
from torch.utils._pytree import tree_flatten

from faults import hub_server, io_faults
from faults.hub_server import Fault
from system import distributed
from system.cli import UserError
from tokens import shards
from training import checkpoint
from training.metrics import read_metrics
from training.open_model import open_model
from training.step import TrainStep


@dataclass
class Torture:
    """One run of a class of faults: its folder, its random choices, and what came of each fault."""

    folder: Path
    seed: int = 0
    scale: float = 1.0  # the share of the faults to inject
    outcomes: Counter = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)  # a description of each SILENT or LOST fault
    figures: list[str] = field(default_factory=list)  # measurements to print
    kills: int = 0  # signals that ended a live process
    path_count: int = 0

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.folder.mkdir(parents=True, exist_ok=True)

    def scaled_range(self, n: int) -> range:
        """n repetitions, or at a smaller scale that share of them, at least one."""
        return range(max(1, round(n * self.scale)))

    def scaled_sample(self, items: list) -> list:
        """All items in random order, or at a smaller scale a random part, at least one."""
        return self.rng.sample(items, min(len(items), max(1, round(len(items) * self.scale))))

    def new_path(self, name: str, folder: Path | None = None) -> Path:
        """A path not used before."""
        self.path_count += 1
        return (folder or self.folder) / f"{name}-{self.path_count}"

    # what came of a fault

    def record(self, outcome: str, fault: str, n: int = 1, details: object = "") -> None:
        """Count `n` faults with this outcome; SILENT and LOST are failures, printed with their details."""
        self.outcomes[outcome] += n
        if outcome in ("SILENT", "LOST"):
            self.failures.append(f"{outcome}: {fault}: {str(details)[-1500:]}")

    def record_result(
        self, fault: str, is_same: bool, n: int = 1, outcome: str = "recovered", details: object = ""
    ) -> None:
        """Count `n` faults, after which the result is that of the undisturbed run (`outcome`) or is not (LOST, at least
        once)."""
        if is_same:
            self.record(outcome, fault, n, details)
        else:
            self.record("LOST", fault, max(n, 1), details)

    def check_refusal(self, fault: str, ended: Script, *mentions: str, is_final: bool = True) -> bool:
        """Whether a script ended with one message that mentions these words, no traceback, and failure as exit code.
        is_final=False: do not count a proper refusal yet, because the run is resumed and judged by its end."""
        output = ended.output
        problems = [f"does not mention {words!r}" for words in mentions if words.lower() not in output.lower()]
        messages = len(re.findall(r"^(?:(?:system )?error: |rank \d+ (?:lost|could not))", output, re.MULTILINE))
        if ended.exit_code <= 0 or messages != 1 or "Traceback" in output:
            tracebacks = output.count("Traceback")
            problems.append(f"exit code {ended.exit_code}, {messages} messages, {tracebacks} tracebacks")
        if problems or is_final:
            self.record("SILENT" if problems else "refused", fault, details=f"{output[-1200:]}\n{problems}")
        return not problems


def read_files(folder: Path, pattern: str = "*") -> dict[Path, bytes]:
    """The contents of all complete files. Not of temporary ones (.lock, .incoming, .part), nor of the Hub's page."""
    found = [p for p in sorted(folder.rglob(pattern)) if p.is_file() and p.name != "README.md"]
    return {p: p.read_bytes() for p in found if "/." not in f"/{p.relative_to(folder)}"}


# ------------------------------------------------------------------------- jobs, and the results they should have


class Job:
    """A script that fills a folder, and that can be run again in the same folder to continue.

    script            a script of the project, without ".py"
    arguments         arguments(folder) are the script's arguments
    reference_folder  the result of an undisturbed run, to compare with; by default that of one made here
    pattern           the files that make up the result
    parent            where new folders are made; by default the folder of `t`
    ranks             number of processes
    start_options     passed to processes.start
    """

    def __init__(
        self,
        t: Torture,
        script: str,
        arguments: Callable[[Path], list],
        reference_folder: Path | None = None,
        *,
        pattern: str = "*",
        parent: Path | None = None,
        ranks: int = 1,
        **start_options,
    ):
        self.t = t
        self.script = script
        self.arguments = arguments
        self.pattern = pattern
        self.parent = parent
        self.ranks = ranks
        self.start_options = start_options

        # One undisturbed run, which also tells how long a run takes.
        folder = self.new_folder()
        self.reference_folder = reference_folder or folder
        start_time = time.monotonic()
        self.run_to_end(folder)
        self.seconds = time.monotonic() - start_time

    def new_folder(self) -> Path:
        """The path of a new result."""
        return self.t.new_path("out", self.parent)

    def start(self, folder: Path, *more: object, **options) -> list[Script]:
        """Start the script, or one process a rank, with more arguments and options of processes.start."""
        options = {"log": self.t.new_path("output"), "cwd": self.t.folder, **self.start_options, **options}
        arguments = [*self.arguments(folder), *more]
        if self.ranks > 1:
            return processes.start_ranks(self.ranks, self.script, *arguments, **options)
        return [processes.start(self.script, *arguments, **options)]

    def run(self, folder: Path, *more: object, **options) -> Script:
        """Start the script and wait for its end (of several ranks: that of rank 0)."""
        return self.start(folder, *more, **options)[0].wait()

    def run_to_end(self, folder: Path) -> None:
        """Run the script undisturbed, with success."""
        for script in self.start(folder):
            script.wait_for_success()

    def contents(self, folder: Path) -> dict[str, bytes]:
        """{path in the folder: content} of the result."""
        return {str(p.relative_to(folder)): data for p, data in read_files(folder, self.pattern).items()}

    def equals_reference(self, folder: Path) -> bool:
        """Whether the result is that of the undisturbed run."""
        return self.contents(folder) == self.contents(self.reference_folder)

    def progress(self, folder: Path) -> int:
        """A number that grows while the script runs."""
        return len(list(folder.glob("*")))

    def check_recovery(self, fault: str, folder: Path, n: int = 1, outcome: str = "recovered") -> None:
        """Run the script again, undisturbed now, and judge `n` faults by whether the result is the reference."""
        try:
            self.run_to_end(folder)
            self.t.record_result(fault, self.equals_reference(folder), n, outcome, "the result differs")
        except AssertionError as e:
            self.t.record("LOST", fault, max(n, 1), f"it cannot be continued: {e}")

    def judge(
        self,
        fault: str,
        ended: Script,
        folder: Path,
        *mentions: str,
        fix: Callable[[], object] = processes.do_nothing,
        outcome: str = "unharmed",
    ) -> None:
        """Judge a fault after the script has ended. After a success (`outcome`), the result must be the reference.
        After a failure, the script must have refused with one message that mentions these words; then `fix` removes the
        cause, the same command must end the work, and no complete file may be gone."""
        if ended.exit_code == 0:
            self.t.record_result(fault, self.equals_reference(folder), 1, outcome, ended.output)
            return
        complete = {p for p in read_files(folder) if p.suffix in (".npy", ".pt")}
        is_refused = self.t.check_refusal(fault, ended, *mentions, is_final=False)
        fix()
        if is_refused:
            self.check_recovery(fault, folder)
            gone = complete - read_files(folder).keys()
            self.t.record_result(fault, not gone, 0, details=f"{gone} is gone")

    def kill_repeatedly(self, times: int) -> None:
        """SIGKILL at random moments, over and over in one folder. Whenever the script reaches its end, its result must
        be the reference, and a new folder is begun."""
        fault = f"kills of {self.script} {self.arguments(Path())}"
        folder = self.new_folder()
        pending_kills = 0  # kills in this folder that are not judged yet
        for _ in self.t.scaled_range(times):
            script = self.start(folder)[0]

            # The moment: some progress, which hub.py does not show, and a random time after that.
            if self.script == "hub":
                goal = 0
                delay = self.t.rng.uniform(0.2, 1.0) * self.seconds
            else:
                done = self.progress(folder)
                goal = self.t.rng.randint(done, max(self.progress(self.reference_folder), done))
                delay = self.t.rng.uniform(0, 0.03)
            was_alive = script.kill_at(goal, partial(self.progress, folder), delay)
            pending_kills += was_alive
            self.t.kills += was_alive

            if script.wait().exit_code == 0:
                self.t.record_result(fault, self.equals_reference(folder), pending_kills)
                folder = self.new_folder()
                pending_kills = 0
        self.check_recovery(fault, folder, pending_kills)


RUN_FLAGS = "--device cpu --max-steps 40 --save-every 2 --val-every 10 --shuffle --resume auto".split()


def make_tiny_data(folder: Path) -> Path:
    """The random walk over 256 tokens, with a manifest, so that hashes are checked."""
    write_random_walk_shards(folder)
    entries = []
    for path in shards.shard_files(folder):
        tokens = shards.read_shard(path)
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        entries.append(shards.Shard(path.name, len(tokens), 0, sha256, {"file": 0, "token": 0}))
    source = {"name": "walk", "subset": "", "column": "text", "revision": "0", "files": []}
    shards.write_manifest(folder, shards.Manifest(source, "npy", 4097, complete=True, shards=entries))
    return folder


class TrainingJob(Job):
    """The same tiny run, with more flags. Its result is the reference if it has the same losses, and the same bits in
    every checkpoint that both kept."""

    def __init__(self, t: Torture, *more: str, ranks: int = 1):
        self.data = make_tiny_data(t.new_path("data"))
        flags = ["quickstart", *TINY_FLAGS, "--data-dir", str(self.data), *RUN_FLAGS, *more, "--out-dir"]
        super().__init__(t, "train_gpt2", lambda folder: [*flags, str(folder)], ranks=ranks)
        self.last_step = checkpoint.latest_step(self.reference_folder)

    def progress(self, folder: Path) -> int:
        path = folder / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.is_file() else 0

    def equals_reference(self, folder: Path) -> bool:
        reference = self.reference_folder
        in_both = set(checkpoint.complete_steps(folder)) & set(checkpoint.complete_steps(reference))
        equal_weights = all(same_bits(load_weights(folder, step), load_weights(reference, step)) for step in in_both)
        return self.last_step in in_both and load_curve(folder) == load_curve(reference) and equal_weights


def make_tokens_job(t: Torture, shard_size: int = 9000, shard_format: str = "npy") -> Job:
    """fineweb.py, making shards of some documents that are the same every time."""
    path = t.folder / "text.jsonl"
    rng = np.random.default_rng(0)
    words = ["walk", " the", " line", "\n", " 12", "é", "  ", " and", "_x", "."]
    texts = ["".join(rng.choice(words, 400)) for _ in range(150)]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    flags = ["--source", path, "--shard-size", shard_size, "--format", shard_format, "--out"]
    return Job(t, "fineweb", lambda folder: [*flags, folder])


@contextmanager
def open_hub(t: Torture, *names: str) -> Iterator[tuple[hub_server.Hub, dict[str, Job]]]:
    """A Hub that holds shards and a run; yields it with the jobs that are named: `fineweb`, which makes these shards,
    `train_gpt2`, which makes that run, or verbs of hub.py."""
    with hub_server.start(t.new_path("hub") / "root") as hub:
        # what the Hub holds
        tokens_job = make_tokens_job(t)
        training_job = TrainingJob(t)
        data = tokens_job.reference_folder
        run = training_job.reference_folder
        last_file = f"{training_job.last_step:05d}.pt"
        hub_data = hub.root / "datasets" / "tester"
        hub_models = hub.root / "models" / "tester"
        shutil.copytree(data, hub_data / "toy")
        shutil.copytree(run, hub_models / "run")

        def make_job(name: str) -> Job:
            hub_job = partial(Job, t, "hub", env=hub.env())
            match name:
                case "fineweb":
                    return tokens_job
                case "train_gpt2":
                    return training_job
                case "pull-data":
                    return hub_job(lambda out: ["pull-data", "tester/toy", out], data)
                case "push-data":
                    return hub_job(lambda out: ["push-data", data, f"tester/{out.name}"], data, parent=hub_data)
                case "pull-model":
                    return hub_job(lambda out: ["pull-model", "tester/run", out], run, pattern=f"model_{last_file}")
                case "push-model":
                    push = ["push-model", "--with-optimizer", run]
                    arguments = lambda out: [*push, f"tester/{out.name}"]
                    return hub_job(arguments, run, pattern=f"*_{last_file}", parent=hub_models)
                case "export":
                    return hub_job(lambda out: ["export", run, out])
                case _:
                    raise ValueError(name)

        yield hub, {name: make_job(name) for name in names}


# ------------------------------------------------------------------------- kills


def fineweb_kill(t: Torture) -> None:
    """SIGKILL at any moment of fineweb.py; run again, the shards are the same bytes."""
    for shard_format in ("npy", "bin"):
        make_tokens_job(t, 1500, shard_format).kill_repeatedly(24)


def train_kill(t: Torture) -> None:
    """SIGKILL at any moment of a run, saves included; resumed, it ends with the bits of the run never killed."""
    for more in ([], ["--optimizer", "muon", "--keep", "2"], ["--no-shuffle", "--save-every", "1", "--keep", "1"]):
        TrainingJob(t, *more).kill_repeatedly(20)


def hub_kill(t: Torture) -> None:
    """SIGKILL at any moment of a push or a pull; the same command continues and ends with every hash right."""
    with open_hub(t, "push-data", "pull-data", "push-model", "pull-model") as (_, jobs):
        for job in jobs.values():
            job.kill_repeatedly(6)


def signal_one_rank(job: TrainingJob, number: int, times: int, *mentions: str, **options) -> None:
    """Send this signal to one of two ranks at a random moment. The other rank must soon end with a message, and the run
    must resume to the same bits."""
    t = job.t
    for _ in t.scaled_range(times):
        # the signal, while the run trains
        folder = job.new_folder()
        victim = t.rng.randrange(2)
        pair = job.start(folder, **options)
        pair[0].wait_until("loss")
        time.sleep(t.rng.uniform(0, 0.4))
        was_alive = pair[victim].send(number)
        signal_time = time.monotonic()

        # the other rank ends by itself; a victim that is only stopped is killed afterwards
        survivor = pair[1 - victim].wait(30)
        waited = time.monotonic() - signal_time
        pair[victim].send(signal.SIGKILL)
        pair[victim].wait()

        fault = f"{signal.Signals(number).name} to rank {victim}"
        t.kills += was_alive
        if was_alive and waited >= 15:
            t.record("SILENT", fault, details=f"the other rank waited {waited:.0f} s")
        elif survivor.exit_code == 0:  # it had done its last step
            job.check_recovery(fault, folder, outcome="unharmed")
        else:
            job.judge(fault, survivor, folder, *mentions, "--resume auto")


def rank_kill(t: Torture) -> None:
    """SIGKILL of one of two ranks: the other ends with a message; the run resumes to the same bits."""
    for more in ([], ["--zero-stage", "1"]):
        job = TrainingJob(t, *more, "--max-steps", "80", ranks=2)
        signal_one_rank(job, signal.SIGKILL, 8, "lost another rank", prepare=shorten_sleeps)


def set_collective_timeout(minutes: float) -> None:
    """In a process that is about to train: how long a collective waits for the other ranks."""
    distributed.session = partial(distributed.session, timeout_minutes=minutes)


def hung_rank(t: Torture) -> None:
    """One of two ranks stops answering: the other ends by itself when the timeout of the collectives, here three
    seconds, is over, and says so; the run resumes from its newest checkpoint to the same bits."""
    job = TrainingJob(t, "--max-steps", "200", "--save-every", "20", ranks=2)
    prepare = partial(set_collective_timeout, 0.05)
    signal_one_rank(job, signal.SIGSTOP, 4, "waited 0.05 minutes", prepare=prepare)


def torchrun_kill(t: Torture) -> None:
    """torchrun restarts the ranks when one is killed, without human help, and the result has the same bits."""
    job = TrainingJob(t, "--max-steps", "400", "--save-every", "10", ranks=2)
    folder = job.new_folder()
    log = t.new_path("output")
    max_kills = len(t.scaled_range(6))
    script = str(processes.ROOT / "train_gpt2.py")
    command = ["--standalone", "--nproc_per_node=2", f"--max-restarts={max_kills}", script, *job.arguments(folder)]
    with open(log, "w") as f:
        torchrun = start_torchrun(*command, stdout=f)

    # kill a rank each time that another part of the run is saved
    killed = 0
    while torchrun.poll() is None:
        next_kill_step = (killed + 1) * job.last_step // (max_kills + 1)
        if killed < max_kills and (checkpoint.latest_step(folder) or 0) >= next_kill_step:
            pids = rank_pids(torchrun.pid)
            if len(pids) == 2:
                os.kill(t.rng.choice(pids), signal.SIGKILL)
                killed += 1
                time.sleep(1)
        time.sleep(0.05)

    is_same = torchrun.returncode == 0 and job.equals_reference(folder)
    t.record_result("ranks killed under torchrun", is_same, killed, details=log.read_text())
    t.kills += killed


def make_pod(t: Torture) -> Pod:
    """train.sh with stand-ins for what it starts."""
    root = t.new_path("pod")
    root.mkdir()
    return Pod(root)


def train_sh_kill(t: Torture) -> None:
    """SIGKILL of the trainer or of train.sh: training is restarted by train.sh or by the same command, no second run
    starts meanwhile, and every checkpoint is kept."""
    for victim in t.scaled_sample(["trainer", "train.sh"] * 8):
        with make_pod(t) as pod:
            trainer = pod.start_and_train(plan="hang save-crash finish", PUSH_TO="me/x", RESTART_DELAY="0")
            time.sleep(t.rng.uniform(0, 0.3))
            os.kill(trainer if victim == "trainer" else pod.supervisor, signal.SIGKILL)
            t.kills += 1

            # Without train.sh the trainer trains on, and a second run in the folder is refused while it lives.
            second_refused = True
            if victim == "train.sh":
                second_refused = pod.start(check=False, plan="save-crash finish").returncode == 1
                os.kill(trainer, signal.SIGKILL)
                pod.wait(lambda: pod.start(check=False, plan="finish", PUSH_TO="me/x").returncode == 0)

            log = pod.wait_until_ended()
            finished = "training finished" in log and "the weights are at me/x" in log
            kept = bool(pod.read("run/model_00010.pt"))
            t.record_result(f"{victim} killed", second_refused and finished and kept, details=log)


def keep_race(t: Torture) -> None:
    """Pushes while the run saves every step and keeps one: each brings a complete step, or ends with a message."""
    job = TrainingJob(t, "--max-steps", "200", "--save-every", "1")
    with hub_server.start(t.new_path("hub") / "root") as hub:
        for _ in t.scaled_range(2):
            folder = job.new_folder()
            repo = f"tester/{folder.name}"
            trainer = job.start(folder, "--keep", "1")[0]
            trainer.wait_until(lambda: checkpoint.latest_step(folder))  # noqa: B023

            # Push again and again until the run ends.
            while trainer.process.is_alive():
                push = ["push-model", folder, repo, "--with-optimizer", "--temporary"]
                ended = processes.start("hub", *push, log=t.new_path("output"), env=hub.env()).wait()
                fault = f"push while step {checkpoint.latest_step(folder)} is saved"
                if ended.exit_code != 0:
                    t.check_refusal(fault, ended, "larger --keep")
                    continue

                # One step is there, complete, with the weights that the run had at that step.
                pushed = hub.root / "models" / repo
                steps = checkpoint.complete_steps(pushed)
                is_same = False
                if len(steps) == 1 and len(list(pushed.glob("*.pt"))) == 2:
                    expected = load_weights(job.reference_folder, steps[0])
                    is_same = same_bits(load_weights(pushed, steps[0]), expected)
                t.record_result(fault, is_same, outcome="unharmed", details=f"{steps} {ended.output}")

            # The run notices nothing, and no temporary copy is left.
            left = list(folder.glob(".pushing-*"))
            t.record_result("pushes beside a run", trainer.wait().exit_code == 0 and not left, 0, details=left)


# ------------------------------------------------------------------------- disks


def limit_file_size(size: int) -> None:
    """In a process that is about to start: no file grows beyond this, as on a full disk. The write fails, the process
    lives. What the process prints goes to a file, too, and must fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextmanager
def mount_small_disk(t: Torture, kilobytes: int) -> Iterator[tuple[Path, Callable[[], None]] | None]:
    """Yield a disk of that size, and a function that enlarges it; None if this user may not mount one."""
    folder = t.new_path("disk")
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        yield None
        return
    try:
        yield folder, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(t: Torture) -> None:
    """A disk that fills up (a tmpfs, if this user may mount one) or a limit on the size of a file, while shards,
    manifests, checkpoints and metrics are written: a message, and with free space the same command ends the work."""
    tokens_job = make_tokens_job(t)
    training_job = TrainingJob(t, "--save-every", "5")

    # a limit on each file, in bytes
    tokens_sizes = [300, 500, 1000, 2000, 2300, 2600, 3000, 8192, 18000, 18100]
    training_sizes = [1200, 700, 2500, 4000, 6000, 10_000, 50_000, 140_000, 150_000, 200_000, 280_000, 300_000]
    for job, sizes in ((tokens_job, tokens_sizes), (training_job, training_sizes)):
        for size in t.scaled_sample(sizes):
            folder = job.new_folder()
            script = job.run(folder, prepare=partial(limit_file_size, size))
            job.judge(f"{job.script}, files up to {size} bytes", script, folder)

    # a full disk, in kilobytes
    tokens_sizes = [4, 8, 30, 50, 80, 100, 150, 200]
    training_sizes = [4, 12, 100, 180, 300, 440, 450, 500, 900, 1400, 1800, 2500]
    for job, sizes in ((tokens_job, tokens_sizes), (training_job, training_sizes)):
        for kilobytes in t.scaled_sample(sizes):
            with mount_small_disk(t, kilobytes) as disk:
                if disk:
                    disk_folder, enlarge = disk
                    script = job.run(disk_folder / "out")
                    fault = f"{job.script} on a disk of {kilobytes} kB"
                    job.judge(fault, script, disk_folder / "out", fix=enlarge)


def fail_io(path_part: str, operation: str, code: int, times: int, skip: int) -> None:
    """In a process that is about to start: an operation on some of its files fails (see io_faults.py), and the pauses
    before the next try are short."""
    shorten_sleeps()
    io_faults.plant(path_part, operation, code, times, skip)


def io_error(t: Torture) -> None:
    """A network volume answers EIO, ESTALE or ETIMEDOUT, twice or from some moment on, while shards, manifests,
    checkpoints and metrics are written, and shards and texts read: the script tries again in place, or ends with an
    error of the system, after which the same command ends the work."""
    twice = 2
    always = 10**6
    tokens_job = make_tokens_job(t)
    training_job = TrainingJob(t, "--save-every", "5")
    written = ("open", "write", "sync", "rename")
    places = [(tokens_job, name, operation) for name in ("_train_", "manifest.json") for operation in written]
    places += [(tokens_job, "text.jsonl", operation) for operation in ("open", "read")]
    places += [(training_job, name, op) for name in ("model_", "optim_", "config.json") for op in written]
    places += [(training_job, "metrics.jsonl", operation) for operation in ("open", "write", "sync", "rename")]
    places += [(training_job, "tiny_", operation) for operation in ("open", "read")]
    cases = [(*place, times) for place in places for times in (twice, always)]
    for job, name, operation, times in t.scaled_sample(cases):
        code = t.rng.choice([errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
        skip = t.rng.randrange(4)
        folder = job.new_folder()
        script = job.run(folder, prepare=partial(fail_io, name, operation, code, times, skip))

        # The fault was hit if the script has printed it. An error that lasts must not end as a success that skipped
        # what was to be written.
        is_hit = os.strerror(code) in script.output
        outcome = "recovered" if is_hit else "unharmed"
        often = "twice" if times == twice else "for ever"
        fault = f"{job.script}, {errno.errorcode[code]} at {operation} of {name} after {skip} good ones, {often}"
        job.judge(fault, script, folder, "system error: ", outcome=outcome)


def remove_flock(host: str) -> None:
    """In a process that is about to start: it is on another machine, and the file system has no flock."""
    fcntl.flock = io_faults.without_flock(errno.ENOSYS)
    socket.gethostname = lambda: host


def lock_without_flock(t: Torture) -> None:
    """Where the file system has no flock, a second run in a folder is refused by name; the lock that a killed one has
    left is taken over by the next start on its machine, and by Slurm's next start of its job on another one; any other
    process ends with a message that names the file to remove. The work then ends with the same bits."""
    jobs = [TrainingJob(t, "--max-steps", "150", "--save-every", "10"), make_tokens_job(t, 300)]
    first_env = {"SLURM_JOB_ID": "7"}
    on_node_a = partial(remove_flock, "node-a")
    on_node_b = partial(remove_flock, "node-b")
    for kind in t.scaled_sample(["second", "same node", "requeued", "elsewhere"] * 4):
        # A first process, which has written its marker and works.
        job = t.rng.choice(jobs)
        folder = job.new_folder()
        marker = folder / ".lock.held"
        first = job.start(folder, prepare=on_node_a, env=first_env)[0]
        first.wait_until(marker.exists)
        time.sleep(t.rng.uniform(0, 0.2))
        fault = f"{job.script} without flock, {kind}"

        # A second process while the first one lives.
        if kind == "second":
            second = job.run(folder, prepare=on_node_b)
            if second.exit_code == 0:  # it came too late
                t.record("unharmed", fault)
            else:
                t.check_refusal(fault, second, "in use by another process", "node-a", "Slurm job 7", str(marker))
            is_same = first.wait().exit_code == 0 and job.equals_reference(folder)
            t.record_result(fault, is_same, 0, details=first.output)
            continue

        # The first one is killed, unless it has ended; then the same command starts, there or elsewhere.
        t.kills += first.send(signal.SIGKILL)
        first.wait()
        match kind:
            case "same node":
                ended = job.run(folder, prepare=on_node_a)
            case "requeued":
                ended = job.run(folder, prepare=on_node_b, env={**first_env, "SLURM_RESTART_COUNT": "1"})
            case "elsewhere":
                ended = job.run(folder, prepare=on_node_b)
                if marker.exists():
                    t.check_refusal(fault, ended, "node-a", f"remove {marker}", is_final=False)
                    marker.unlink()
                    ended = job.run(folder, prepare=on_node_b)
            case _:
                raise ValueError(kind)
        is_same = ended.exit_code == 0 and job.equals_reference(folder) and not marker.exists()
        t.record_result(fault, is_same, details=ended.output)


def log_full(t: Torture) -> None:
    """Nothing more can be printed: /dev/full as standard output, and train.sh on a full disk."""
    with open_hub(t, "train_gpt2", "fineweb", "export") as (_, jobs):
        for job in list(jobs.values()) * len(t.scaled_range(3)):
            fault = f"{job.script}, nowhere to print"
            folder = job.new_folder()
            script = job.run(folder, out="/dev/full")
            if job is jobs["export"]:  # it does not write a second time into the folder
                t.check_refusal(fault, script, "No space left")
                t.record_result(fault, job.equals_reference(folder), 0)
            else:
                job.judge(fault, script, folder, "No space left")

    for _ in t.scaled_range(2):
        with mount_small_disk(t, 64) as disk, make_pod(t) as pod:
            if not disk:
                continue
            disk_folder, _ = disk
            pod.run.symlink_to(disk_folder)

            # Full while it trains, when the trainer dies: train.sh still restarts it, and ends as usual.
            trainer = pod.start_and_train(plan="hang save-crash", MAX_RESTARTS="1", RESTART_DELAY="0", REMOVE_POD="1",
                                          PERSISTENT="1")  # fmt: skip
            fill_disk(disk_folder / "fill")
            os.kill(trainer, signal.SIGKILL)
            pod.wait_until_ended()
            recovered = len(pod.read("starts").splitlines()) == 2 and "delete pod7" in pod.read("removed")
            fault = "train.sh, its log's disk fills"
            t.record("recovered" if recovered else "LOST", fault, details=pod.log())


def fill_disk(path: Path) -> None:
    """Write until the disk is full."""
    with open(path, "wb", buffering=0) as f, suppress(OSError):
        while f.write(bytes(4096)):
            pass


def drop_root_privilege() -> None:
    """In a process that is about to start: root may write anywhere, so give up the capability that allows it
    (CAP_DAC_OVERRIDE, bit 1 of what capset(2) takes)."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    data = bytearray(24)
    words = (ctypes.c_uint32 * 6).from_buffer(data)
    if libc.capget(header, words) == 0:
        words[0] &= ~2
        assert libc.capset(header, words) == 0, os.strerror(ctypes.get_errno())


def read_only(t: Torture) -> None:
    """A folder that may not be written to, and a file in the folder's place: nothing is touched."""
    users_content = b"something of mine"
    with open_hub(t, "train_gpt2", "fineweb", "pull-data", "export") as (_, jobs):
        for job in t.scaled_sample(list(jobs.values()) * 4):
            kind = t.rng.choice(["folder", "file"])
            out = job.new_folder()
            if kind == "file":
                users_file = out
                users_file.write_bytes(users_content)
                mentioned = ""
                ended = job.run(out)
            else:
                users_file = out / "mine"
                out.mkdir()
                users_file.write_bytes(users_content)
                out.chmod(0o555)
                # export first sees that the folder is not empty
                mentioned = "not an empty folder" if job is jobs["export"] else "Permission denied"
                ended = job.run(out, prepare=drop_root_privilege)

            fault = f"{job.script}, read-only {kind}"
            t.check_refusal(fault, ended, str(out), mentioned)
            t.record_result(fault, users_file.is_file() and users_file.read_bytes() == users_content, 0)


# ------------------------------------------------------------------------- damaged files


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    """The data with one random bit flipped."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def damage_shard(t: Torture, kind: str, path: Path, paths: list[Path]) -> None:
    """Damage the shard at `path` in one of four ways; a swapped one gets the content of another of `paths`."""
    data = path.read_bytes()
    match kind:
        case "truncated":
            os.truncate(path, len(data) * t.rng.randrange(10) // 10)  # in place: under whoever has it open
        case "flipped":
            path.write_bytes(flip_bit(data, t.rng))
        case "removed":
            path.unlink()
        case "swapped":
            other = t.rng.choice([p for p in paths if p.read_bytes() != data])
            path.with_suffix(".new").write_bytes(other.read_bytes())
            path.with_suffix(".new").replace(path)
        case _:
            raise ValueError(kind)


def shard_damage(t: Torture) -> None:
    """A shard truncated, with a bit flipped, swapped for another, or removed: found by fineweb.py --verify, and by
    training as soon as it reads the shard, also if that happens under the running process. With the shard restored, the
    run continues."""
    # --verify
    folder = make_tokens_job(t).reference_folder
    paths = shards.shard_files(folder)
    for kind in t.scaled_sample(["truncated"] * 20 + ["flipped"] * 40 + ["swapped"] * 5 + ["removed"] * 5):
        path = t.rng.choice(paths)
        undamaged = path.read_bytes()
        damage_shard(t, kind, path, paths)
        problems = shards.verify(folder)
        is_found = any(path.name in problem for problem in problems)
        t.record("refused" if is_found else "SILENT", f"{kind} {path.name}", details=problems)
        path.write_bytes(undamaged)

    # while a run trains on it
    jobs = [TrainingJob(t, "--max-steps", "120", "--save-every", "10", flag) for flag in ("--shuffle", "--no-shuffle")]
    for kind in t.scaled_sample(["truncated", "flipped", "swapped", "removed"] * 5):
        job = t.rng.choice(jobs)
        paths = shards.find_shards(job.data, "train")
        path = t.rng.choice(paths)
        undamaged = path.read_bytes()
        out = job.new_folder()
        script = job.start(out)[0]
        script.wait_until(f"step    {t.rng.randrange(1, 4)}0/120 | val")
        damage_shard(t, kind, path, paths)
        script.wait()  # it succeeds if it had read the shard for the last time
        path.write_bytes(undamaged)
        job.judge(f"{kind} {path.name} under a running process", script, out, path.name)


def checkpoint_damage(t: Torture) -> None:
    """A checkpoint cut at every tenth of its length, or with one bit flipped: refused, or the same tensors. With the
    newest one cut, --resume auto continues from the one before and ends with the same bits."""
    job = TrainingJob(t, "--max-steps", "12")
    model_path = checkpoint.model_path(job.reference_folder, job.last_step)
    optim_path = checkpoint.optim_path(job.reference_folder, job.last_step)

    # reading a damaged file
    readers = {model_path: lambda p: open_model(p).state_dict(), optim_path: checkpoint.read_train_state}
    for path, read in readers.items():
        undamaged = path.read_bytes()
        content = read(path)
        cut = [("cut", undamaged[: len(undamaged) * tenth // 10]) for tenth in range(10)] + [("cut", undamaged[:-1])]
        flipped = [("flipped", flip_bit(undamaged, t.rng)) for _ in range(60)]
        for kind, damaged in t.scaled_sample(cut + flipped):
            fault = f"{kind} {path.name}"
            path.write_bytes(damaged)
            try:
                t.record_result(fault, equal_containers(read(path), content), outcome="unharmed")
            except UserError as e:
                # the error names the file, and --resume auto does not take a file that is cut
                skipped_if_cut = kind == "flipped" or job.last_step not in checkpoint.complete_steps(path.parent)
                is_refused = path.name in str(e) and skipped_if_cut
                t.record("refused" if is_refused else "SILENT", fault, details=e)
        path.write_bytes(undamaged)

    # resuming from a run whose newest checkpoint is damaged
    for kind in t.scaled_sample(["cut"] * 5 + ["flipped"] * 5):
        out = job.new_folder()
        shutil.copytree(job.reference_folder, out)
        path = out / t.rng.choice([model_path, optim_path]).name
        data = path.read_bytes()
        fault = f"{kind} {path.name}, newest"
        if kind == "cut":
            path.write_bytes(data[: t.rng.randrange(len(data))])
            job.check_recovery(fault, out)
        else:
            # in the middle of the file there is no padding; more steps, because at step 12 nothing is read
            middle = len(data) // 2
            path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
            script = job.run(out, "--max-steps", "14")
            t.check_refusal(fault, script, path.name, "--resume auto uses the previous one")


def equal_containers(a: object, b: object) -> bool:
    """Whether two nested containers have the same structure, equal values and equal tensors."""
    leaves_a, structure_a = tree_flatten(a)
    leaves_b, structure_b = tree_flatten(b)
    if structure_a != structure_b:
        return False
    for x, y in zip(leaves_a, leaves_b, strict=True):
        if isinstance(x, torch.Tensor):
            if x.dtype != y.dtype or not torch.equal(x, y):
                return False
        elif x != y:
            return False
    return True


# ------------------------------------------------------------------------- clocks, networks, ranks, numbers


def turn_clock_back(seconds: float) -> None:
    """In a process that is about to start: the wall clock loses so many seconds a call (0: it stands still), as when a
    machine corrects its clock."""
    now = time.time()

    def clock() -> float:
        nonlocal now
        now -= seconds
        return now

    time.time = clock


def clock(t: Torture) -> None:
    """A wall clock that stands still or runs backwards changes nothing that is made."""
    with open_hub(t, "fineweb", "train_gpt2", "pull-data") as (_, jobs):
        for seconds in t.scaled_sample([0, 0.001, 1, 3600, 1e6]):
            for job in jobs.values():
                out = job.new_folder()
                script = job.run(out, prepare=partial(turn_clock_back, seconds))
                is_same = script.exit_code == 0 and job.equals_reference(out)
                fault = f"{job.script}, clock back by {seconds} s a look"
                t.record_result(fault, is_same, outcome="unharmed", details=script.output)


def hub_faults(t: Torture) -> None:
    """A Hub that drops connections, answers 429 or 500, sends wrong bytes or a web page, once or always: every hash is
    right in the end, or there is a message; and when the Hub is well again, the same command ends the work."""
    kinds = [("drop", 0), ("status", 429), ("status", 500), ("status", 503), ("corrupt", 0), ("html", 0)]
    paths = {
        "pull-data": ["/api/datasets/tester/toy/revision", "/tree/", "manifest.json", "train_000001.npy", "/resolve/"],
        "push-data": ["whoami", "repos/create", "/tree/", "preupload", "objects/batch", "/lfs/", "/commit/"],
        "pull-model": ["/resolve/", "model_0"],
    }
    once = 1
    always = 10**6
    cases = [
        (verb, path, kind, code, times)
        for verb, paths_of_verb in paths.items()
        for path in paths_of_verb
        for kind, code in kinds
        for times in (once, always)
    ]
    with open_hub(t, *paths) as (hub, jobs):
        for verb, path, kind, code, times in t.scaled_sample(cases)[: len(t.scaled_range(90))]:
            # /lfs/ is where files are uploaded to
            planted = Fault(kind, path, times, code or 500, "PUT" if path == "/lfs/" else None)
            hub.faults[:] = [planted]
            job = jobs[verb]
            out = job.new_folder()
            script = job.run(out, prepare=shorten_sleeps)

            fault = f"{verb}, {kind} {code or ''} at {path} {'once' if times == once else 'always'}"
            was_hit = planted.times < times
            outcome = "recovered" if was_hit else "unharmed"
            job.judge(fault, script, out, fix=hub.faults.clear, outcome=outcome)
            if hub.token in script.output:
                t.record("LOST", fault, details="the token was printed")


def poison(where: str, first_step: int, rank: int, value: float) -> None:
    """In a process that is about to train: from `first_step` on, `value` is in a gradient of one rank, or in a weight
    of every rank, as all have the same weights and so the same damage."""
    original_compute = TrainStep.compute_gradients
    original_clip = torch.nn.utils.clip_grad_norm_
    step = -1
    is_victim = False  # whether this is the rank, and the step has come

    def compute_gradients(self, *args):
        nonlocal step, is_victim
        step += 1
        is_victim = step >= first_step and self.rt.rank == rank
        return original_compute(self, *args)

    @torch.no_grad()
    def clip(parameters, *args):
        parameters = list(parameters)
        if where == "gradient" and is_victim:
            parameters[3].grad.view(-1)[5] = value
        norm = original_clip(parameters, *args)
        if where == "weight" and step >= first_step:
            parameters[2].view(-1)[7] = value
        return norm

    TrainStep.compute_gradients = compute_gradients
    torch.nn.utils.clip_grad_norm_ = clip


def not_finite(t: Torture) -> None:
    """NaN or infinity in a gradient or a weight: refused before it can be saved, the step named, earlier
    checkpoints as they were; without the fault the run resumes to the same bits."""
    one_rank = TrainingJob(t, "--save-every", "1", ranks=1)
    two_ranks = TrainingJob(t, "--save-every", "1", ranks=2)
    for where in t.scaled_sample(["gradient", "weight"] * 12):
        job = t.rng.choice([one_rank, one_rank, two_ranks])
        value = t.rng.choice([float("nan"), float("inf"), float("-inf")])
        out = job.new_folder()
        step = t.rng.randrange(2, 30)
        rank = t.rng.randrange(job.ranks)
        ended = [script.wait() for script in job.start(out, prepare=partial(poison, where, step, rank, value))]

        fault = f"{value} in a {where} of rank {rank} of {job.ranks} at step {step}"
        saved = checkpoint.complete_steps(out)
        all_finite = all(w.isfinite().all() for s in saved for w in load_weights(out, s).values())
        mentioned = "not finite" if where == "weight" else f"step {step}"
        if not all_finite or max(saved, default=0) not in (step, step + 1):
            t.record("LOST", fault, details=f"saved {saved}, finite {all_finite} {ended[0].output[-1200:]}")
        elif t.check_refusal(fault, ended[0], mentioned, is_final=False):
            job.check_recovery(fault, out)

    # in the weights that a new run starts with
    for value in t.scaled_sample([float("nan"), float("inf")]):
        model = open_model(one_rank.reference_folder)
        name, weight = t.rng.choice(sorted(model.named_parameters()))
        with torch.no_grad():
            weight.view(-1)[0] = value
        path = t.new_path("bad") / "model_00000.pt"
        path.parent.mkdir()
        checkpoint.write(path, checkpoint.model_file(model, 0))

        out = one_rank.new_folder()
        t.check_refusal(f"{value} in {name}", one_rank.run(out, "--init-from", path), "step 0", "refused")
        assert not checkpoint.complete_steps(out)


def two_runs(t: Torture) -> None:
    """A second process on the same folder: refused by name, or it waits its turn; the first notices nothing."""
    training_job = TrainingJob(t, "--max-steps", "150", "--save-every", "10")
    tokens_job = make_tokens_job(t, 300)
    with open_hub(t, "pull-data") as (_, hub_jobs):
        pull_job = hub_jobs["pull-data"]
        for job in [training_job, tokens_job, pull_job] * len(t.scaled_range(3)):
            out = job.new_folder()
            first = job.start(out)[0]
            if job is not pull_job:
                first.wait_until((out / ".lock").exists)
            time.sleep(t.rng.uniform(0, 0.2))
            second = job.run(out)

            fault = f"second {job.script}"
            if second.exit_code == 0:  # it came too late, or it waited
                t.record("unharmed", fault)
            else:
                t.check_refusal(fault, second, "in use by another process")
            is_same = first.wait().exit_code == 0 and job.equals_reference(out)
            t.record_result(fault, is_same, 0, details=first.output)


# ------------------------------------------------------------------------- a long run


def long_run(t: Torture) -> None:
    """3,000 steps with validation, samples and saves: memory, open files and step time of the last third against the
    middle third."""
    data = make_tiny_data(t.new_path("data"))
    out = t.new_path("out")
    steps = len(t.scaled_range(3000))
    periods = "--val-every 20 --sample-every 50 --sample-prompt a --save-every 25 --keep 2 --tracker tensorboard"
    flags = ["quickstart", *TINY_FLAGS, "--data-dir", data, "--out-dir", out, *periods.split(), "--max-steps", steps]
    script = processes.start("train_gpt2", *flags, log=t.new_path("output"), cwd=t.folder)

    # ten times a second: (step, resident memory in MB, number of open files, CPU time so far in ms)
    metrics = out / "metrics.jsonl"
    proc = Path(f"/proc/{script.process.pid}")
    readings = []
    while script.process.is_alive():
        with suppress(OSError, TypeError):  # not begun, or just ended
            step = metrics.read_bytes().count(b"\n")
            user, system = (proc / "stat").read_text().split()[13:15]
            memory_mb = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1]) / 1024
            cpu_ms = (int(user) + int(system)) * 1000 / os.sysconf("SC_CLK_TCK")
            readings.append((step, memory_mb, len(list((proc / "fd").iterdir())), cpu_ms))
        time.sleep(0.1)
    assert script.wait().exit_code == 0, script.output
    step_ms = {line["step"]: line["step_ms"] for line in read_metrics(metrics) if "step_ms" in line}

    def measure_third(n: int) -> tuple[float, int, float]:
        """Median memory in MB, most open files, and CPU ms a step of the nth third of the run."""
        span = range(n * steps // 3, (n + 1) * steps // 3)
        at, memory_mb, open_files, cpu_ms = zip(*(r for r in readings if r[0] in span), strict=True)
        cpu_ms_per_step = (cpu_ms[-1] - cpu_ms[0]) / (at[-1] - at[0])
        t.figures.append(
            f"{('first', 'middle', 'last')[n]} third: resident memory {statistics.median(memory_mb):.1f} MB, "
            f"at most {max(open_files)} open files, {statistics.median(step_ms[s] for s in span):.2f} ms a step "
            f"(median), {cpu_ms_per_step:.2f} ms of CPU"
        )
        return statistics.median(memory_mb), max(open_files), cpu_ms_per_step

    # CPU time is compared, not time: other processes slow down the wall clock's.
    middle_mb, middle_files, middle_cpu_ms = measure_third(1)
    last_mb, last_files, last_cpu_ms = measure_third(2)
    memory_is_flat = last_mb < 1.03 * middle_mb
    files_are_flat = last_files <= middle_files + 2
    time_is_flat = last_cpu_ms < 1.25 * middle_cpu_ms
    few_checkpoints = len(checkpoint.complete_steps(out)) <= 3
    is_flat = memory_is_flat and files_are_flat and time_is_flat and few_checkpoints
    t.record_result("long run", is_flat, outcome="unharmed", details=t.figures)


CLASSES = {
    f.__name__.replace("_", "-"): f
    for f in (
        fineweb_kill, train_kill, rank_kill, torchrun_kill, hub_kill, train_sh_kill, keep_race, disk_full,
        io_error, lock_without_flock, log_full, read_only,
        shard_damage, checkpoint_damage, clock, hub_faults, hung_rank, not_finite, two_runs, long_run,
    )
}  # fmt: skip


def main(only: tuple[str, ...] = (), scale: float = 1.0, seed: int = 0) -> None:
    """Run the classes of faults that are named (all, if none is) and print what came of them.

    only: names of classes. scale: share of the faults. seed: of their moments and places.
    """
    unknown = set(only) - CLASSES.keys()
    if unknown:
        raise SystemExit(f"error: no class {', '.join(unknown)}; there are {', '.join(CLASSES)}")

    total = Counter()
    kills = 0
    print("class              faults recovered refused unharmed  bad kills     s")
    for name in only or CLASSES:
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            t = Torture(Path(folder) / name, seed, scale)
            start_time = time.monotonic()
            try:
                CLASSES[name](t)
            except Exception as e:
                t.record("SILENT", name, details=f"the class did not come to its end: {e!r}"[:2000])
        seconds = time.monotonic() - start_time

        # one line of the table, then its figures and failures
        o = t.outcomes
        total += o
        kills += t.kills
        bad = o["SILENT"] + o["LOST"]
        counts = f"{o.total():6} {o['recovered']:9} {o['refused']:7} {o['unharmed']:8} {bad:4} {t.kills:5}"
        print(f"{name:18} {counts} {seconds:5.0f}", flush=True)
        for line in [*t.figures, *t.failures]:
            print(f"    {line}", flush=True)

    silent, lost = total["SILENT"], total["LOST"]
    print(f"torture: {total.total()} faults injected ({kills} kills), {silent} silent, {lost} lost")
    sys.exit(1 if silent or lost else 0)


if __name__ == "__main__":
    import tyro

    tyro.cli(main, description=__doc__)
