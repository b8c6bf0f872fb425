"""The supervisor of a run: what train.sh, whose head explains the settings, starts.

    ./train.sh gpt2-124m

        launcher     judges settings, arguments, data and token; takes the lock of the run folder
           | forks
           +------>  supervisor     survives logout; its output is OUT/train-<time>.log
           |            runs torchrun train_gpt2.py, again after each crash, from the newest checkpoint
        shows the       pushes the weights, during the run and at its end
        log for 15 s    gives the machine back, if that loses nothing

    ./train.sh stop log/gpt2-124m      finds the supervisor of that folder by the lock, and asks it to stop

The trainer says how it has ended in OUT/status.json (write_status in system/cli.py). Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from system.cli import UserError, print0, require, run_cli
from weights.names import latest_step, model_path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable  # of the trainer and of hub.py

# Seconds.
SHOW_LOG_S = 15  # the start shows the log for so long
RESTART_DELAY_S = 10  # then a minute, then six minutes each: what is down, such as a volume, may come back
SILENCE_S = 7200  # a trainer that has written nothing for so long hangs, as in a read from a dead volume: it is killed
HANG_S = 1800  # a trainer that hangs does not see the time limit of BUDGET_USD: so much later it is ended
SAVE_S = 600  # a trainer that was asked to stop is killed after so long, as torchrun kills its ranks
EARLY_MISTAKE_S = 600  # after a mistake so soon after the start the machine stays: its user is probably still there
PUSH_RETRY_S = 3600  # the push at the end is tried for so long
PUSH_PAUSE_S = 60  # between two tries
PERIODIC_PUSH_S = 3600  # the longest push during a run
REMOVE_DELAY_S = 60  # before the machine is removed or stopped; `kill` prevents it
POLL_S = 0.1


def main() -> None:
    """Stop a run, or start one."""
    # Another process is found by the files that it has open.
    require(Path("/proc/self/fd").exists(), "train.sh needs Linux; elsewhere run python train_gpt2.py itself")
    args = sys.argv[1:]
    if args[:1] == ["stop"]:
        stop(args[1:])
    elif "-h" in args or "--help" in args:
        os.execv(PYTHON, [PYTHON, str(ROOT / "train_gpt2.py"), *args])
    else:
        start(args)


# ------------------------------------------------------------------------- settings and arguments


@dataclass(frozen=True)
class Settings:
    """The environment variables of train.sh, in lower case."""

    nproc: int  # 0: as many as the trainer names
    max_restarts: int
    gpu_hour_usd: float | None
    budget_usd: float | None
    push_to: str
    push_every: int  # 0: never
    remove_pod: bool
    persistent: bool
    shutdown_cmd: str
    stop_cmd: str


def read_settings() -> Settings:
    """Read the environment. Raises UserError if a setting is wrong, or needs another one."""
    settings = Settings(
        nproc=read_whole_number("NPROC", 0),
        max_restarts=read_whole_number("MAX_RESTARTS", 3),
        gpu_hour_usd=read_positive_number("GPU_HOUR_USD"),
        budget_usd=read_positive_number("BUDGET_USD"),
        push_to=os.environ.get("PUSH_TO", ""),
        push_every=read_whole_number("PUSH_EVERY", 0),
        remove_pod=read_switch("REMOVE_POD"),
        persistent=read_switch("PERSISTENT"),
        shutdown_cmd=os.environ.get("SHUTDOWN_CMD") or find_shutdown_command(),
        stop_cmd=os.environ.get("STOP_CMD", ""),
    )
    require(settings.push_to or not settings.push_every, "PUSH_EVERY needs PUSH_TO=OWNER/NAME")
    fix = "BUDGET_USD needs GPU_HOUR_USD, the price of one GPU for an hour"
    require(settings.gpu_hour_usd or not settings.budget_usd, fix)
    if settings.remove_pod:
        is_safe = settings.push_to or settings.persistent
        require(is_safe, "REMOVE_POD=1 would remove the only copy: set PUSH_TO or PERSISTENT=1")
        fix = "REMOVE_POD=1 needs SHUTDOWN_CMD, or runpodctl and RUNPOD_POD_ID as on a RunPod pod"
        require(settings.shutdown_cmd, fix)
    return settings


def read_whole_number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    require(text.isascii() and text.isdecimal(), f"{name}={text} must be a whole number")
    return int(text)


def read_positive_number(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    require(0 < value < math.inf, f"{name}={text} must be a positive number")
    return value


def read_switch(name: str) -> bool:
    text = os.environ.get(name) or "0"
    require(text in ("0", "1"), f"{name}={text} must be 0 or 1")
    return text == "1"


def find_shutdown_command() -> str:
    """The command that removes this machine, if it is a RunPod pod: each of those has runpodctl."""
    pod = os.environ.get("RUNPOD_POD_ID")
    if not pod or not shutil.which("runpodctl"):
        return ""
    # What follows || is the spelling of its version 1.
    return f"runpodctl pod delete {pod} || runpodctl remove pod {pod}"


def find_stop_command(out: Path, settings: Settings) -> str:
    """The command that stops this machine and keeps the run folder, if there is one. Raises UserError if PERSISTENT=1
    is not true."""
    pod = os.environ.get("RUNPOD_POD_ID")
    if not pod and not (settings.remove_pod and settings.persistent):
        return settings.stop_cmd
    df = subprocess.run(["df", "--output=fstype,target", out], stdout=subprocess.PIPE, check=True)
    kind, mounted_at = os.fsdecode(df.stdout).splitlines()[-1].split(maxsplit=1)

    is_lost = settings.remove_pod and settings.persistent and kind in ("overlay", "tmpfs")
    problem = f"PERSISTENT=1, but {out} is on this machine's own storage ({kind})"
    require(not is_lost, f"{problem}: put --out-dir on the volume")
    # Of a RunPod pod's disks, /workspace alone outlives a stop.
    if settings.stop_cmd or not pod or not mounted_at.startswith("/workspace"):
        return settings.stop_cmd
    return f"runpodctl pod stop {pod} || runpodctl stop pod {pod}"


def complete_arguments(args: list[str], settings: Settings) -> list[str]:
    """The trainer's arguments: [PRESET] [--flag value ...], or CHECKPOINT.pt [EPOCHS] [--flag value ...], with the
    flags that train.sh adds. Of a flag that is given twice, the last one counts."""
    preset: list[str] = []
    if args and args[0].endswith(".pt"):
        checkpoint, *args = args
        if args and args[0].isdecimal():
            args = ["--epochs", *args]
        args = ["--resume", str(find_run_of(checkpoint)), *args]
    elif args and not args[0].startswith("-"):
        preset, args = args[:1], args[1:]  # it must stay before all flags

    flags = [arg.partition("=")[0].replace("_", "-") for arg in args]
    is_limited = settings.budget_usd and "--time-limit" in flags
    require(not is_limited, "BUDGET_USD sets --time-limit: leave that flag out")
    price = ["--gpu-hour-usd", str(settings.gpu_hour_usd)] if settings.gpu_hour_usd else []
    return [*preset, "--resume", "auto", *price, *args]


def find_run_of(checkpoint: str) -> Path:
    """The run folder of a checkpoint, which stands for its run: the run may be past it by now. A file name alone is
    looked for below log/, too."""
    found = [Path(checkpoint)]
    if "/" not in checkpoint and not found[0].is_file():
        found = sorted(path for path in Path("log").rglob("*.pt") if path.name == checkpoint)
    listed = ", ".join(map(str, found))
    require(len(found) < 2, f"log/ has {len(found)} files named {checkpoint}: {listed}; give the path of one")
    run = found[0].resolve().parent if found else None
    if run and latest_step(run) is not None:
        return run

    # Name what can be continued: the newest checkpoint of each run.
    folders = sorted({path.parent for path in Path("log").rglob("*.pt")})
    steps = {folder: latest_step(folder) for folder in folders}
    newest = ", ".join(str(model_path(folder, step)) for folder, step in steps.items() if step is not None)
    problem = f"{checkpoint} is of no run that can be continued (model_*.pt with optim_*.pt)"
    fix = 'for weights alone, such as build-nanogpt\'s, see "A second epoch" in docs/recipes.md'
    raise UserError(f"{problem}; log/ has {newest or 'none'}; {fix}")


# ------------------------------------------------------------------------- in the foreground: start, stop


def start(args: list[str]) -> None:
    """Refuse what would fail hours later, start the supervisor, and show its log for a moment."""
    settings = read_settings()
    args = complete_arguments(args, settings)
    out, gpus = ask_trainer(args)
    if settings.push_to:
        checked = subprocess.run([PYTHON, ROOT / "hub.py", "check", settings.push_to])
        if checked.returncode != 0:
            sys.exit(1)  # it has said why
    lock = lock_run(out)
    stop_cmd = find_stop_command(out, settings)
    supervisor = Supervisor(settings, args, out, lock, settings.nproc or gpus, stop_cmd)

    # A train.log that is no link is the user's own. Some file systems have no links.
    log_path = out / f"train-{time.strftime('%Y%m%d-%H%M%S')}.log"
    link = out / "train.log"
    if link.is_symlink() or not link.exists():
        with suppress(OSError):
            link.unlink(missing_ok=True)
            link.symlink_to(log_path.name)

    # The supervisor is a fork of this process: it has the checked settings, and the lock.
    log_file = open(log_path, "ab")
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        detach(log_file.fileno())
        sys.exit(supervisor.supervise())
    lock.close()

    print0(f"started: {supervisor.nproc} process(es), run folder {out}, pid {pid}; this terminal may be closed")
    print0(f"follow:  tail -F {shlex.quote(str(link))}")
    stop_command = shlex.join([str(ROOT / "train.sh"), "stop", str(out)])
    print0(f"stop:    {stop_command}    # it saves; the same command resumes")
    require(show_log(log_path, pid) == 0, f"the run has failed: see {log_path}")


def ask_trainer(args: list[str]) -> tuple[Path, int]:
    """Let the trainer judge its arguments, the data and the GPU. Returns the run folder and the number of processes for
    this machine."""
    asked = subprocess.run([PYTHON, ROOT / "train_gpt2.py", *args, "--check"], stdout=subprocess.PIPE)
    answer = os.fsdecode(asked.stdout)
    if asked.returncode != 0:
        sys.exit(answer or 1)  # it has said why, perhaps there

    # The last two lines. The folder's name may have spaces at its ends.
    *_, out, gpus = ["", *answer.removesuffix("\n").split("\n")]
    require(out.startswith("/") and gpus.isdecimal(), f"train_gpt2.py says: {answer}")
    return Path(out), int(gpus)


def lock_run(out: Path) -> TextIO:
    """Take the lock of a run folder, which is made: one run a folder. The lock is held as long as any process has the
    file open that this returns. Raises UserError if somebody holds it."""
    stop_command = shlex.join(["./train.sh", "stop", str(out)])
    holders = ", ".join(map(str, find_holders(out)))
    require(not holders, f"{out} already has a run (process {holders}); stop it with: {stop_command}")

    # Another user, container or machine may hold it, too.
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "train.lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out} already has a run, of another user or machine; there: {stop_command}") from None
    except OSError:
        pass  # a file system without locks: there the trainer's own lock must do
    return lock


def find_runs() -> dict[int, Path]:
    """{process: run folder} of all runs on this machine, by the lock files that processes have open. Linux knows under
    which name such a file is now, so the run of a folder that was moved is found, and a number in a file cannot be that
    of another process."""
    runs = {}
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            target = Path(os.readlink(link).removesuffix(" (deleted)"))
            if target.name == "train.lock":
                runs[int(link.split("/")[2])] = target.parent
    return runs


def find_holders(out: Path) -> list[int]:
    """The processes of this machine that hold the lock of a run folder: the supervisor, and torchrun."""

    def is_out(folder: Path) -> bool:
        return folder == out or (folder.exists() and out.exists() and folder.samefile(out))

    return [pid for pid, folder in find_runs().items() if is_out(folder)]


def detach(log_file: int) -> None:
    """Survive a logout and a closed terminal: a session of its own, output to the log, no SIGHUP, also for the trainer,
    which inherits that."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)


def show_log(log_path: Path, pid: int) -> int:
    """Print the log for a moment, or until the supervisor has ended. Returns its exit code, or 0 while it runs."""
    deadline = time.monotonic() + SHOW_LOG_S
    with open(log_path, "rb") as log_file:
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            sys.stdout.buffer.write(log_file.read())
            sys.stdout.flush()
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= deadline:
                return 0
            time.sleep(POLL_S)


def stop(folders: list[str]) -> None:
    """Ask the runs of these folders to save and stop. Raises UserError if one of them has none."""
    require(folders, "give the run folder, as in ./train.sh stop log/gpt2-124m")
    problems = []
    for folder in folders:
        out = Path(folder).resolve()
        holders = find_holders(out)
        if not holders:
            problems.append(explain_absence(out))
            continue

        # The supervisor leads its session. If it was killed, its torchrun may still train.
        supervisors = [pid for pid in holders if leads_session(pid)]
        for pid in holders:
            if pid in supervisors:
                send(pid, signal.SIGTERM)
            elif not supervisors:
                signal_ranks(pid, signal.SIGTERM)
        pids = ", ".join(map(str, supervisors or holders))
        print0(f"process {pids} saves and stops: tail -F {shlex.quote(str(out / 'train.log'))}")
    require(not problems, "; ".join(problems))


def explain_absence(out: Path) -> str:
    """Why no process of this machine holds the lock of a run folder."""
    with suppress(OSError):
        pid = (out / "train.pid").read_text().strip()
        return f"process {pid} (of {out}/train.pid) was killed, or it is on another machine: nothing was stopped"
    status, _ = read_status(out)
    others = sorted({str(folder) for folder in find_runs().values()})
    where = f"; here train: {', '.join(others)}" if others else ""
    return f"nothing runs in {out} (status: {status or '-'}){where}"


def signal_ranks(torchrun: int, number: int) -> None:
    """Send a signal to the ranks of a torchrun, or to torchrun if it has none yet. Ranks that were asked themselves
    save, and torchrun ends without a word; asked in their place, it would print a traceback of its own."""
    ranks = []
    with suppress(OSError):
        children = map(int, Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split())
        ranks = [pid for pid in children if leads_session(pid)]  # torchrun gives each rank a session
    for pid in ranks or [torchrun]:
        send(pid, number)


def leads_session(pid: int) -> bool:
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def read_status(out: Path) -> tuple[str, str]:
    """How the trainer ended and why, as ("stopped", "signal SIGTERM"); empty if it crashed."""
    try:
        status = json.loads((out / "status.json").read_text())
        return status["status"], status["reason"]
    except (OSError, ValueError, TypeError, KeyError):
        return "", ""


# ------------------------------------------------------------------------- in the background


def log(message: str) -> None:
    """Write a decision to the log. A disk that is full must not end the supervisor."""
    # Not print, which a signal may interrupt, and whose handler logs, too.
    with suppress(OSError):
        line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} train.sh: {message}\n"
        os.write(1, line.encode(errors="replace"))


class Supervisor:
    """Trains, pushes, gives the machine back."""

    def __init__(self, settings: Settings, args: list[str], out: Path, lock: TextIO, nproc: int, stop_cmd: str):
        """args: of the trainer. out: the run folder. lock: of that folder. nproc: how many processes train. stop_cmd:
        the command that stops this machine and keeps its disk; may be empty."""
        self.settings = settings
        self.args = args
        self.out = out
        self.lock = lock
        self.nproc = nproc
        self.stop_cmd = stop_cmd
        self.start_time = time.monotonic()
        self.stop_requested = False  # whether SIGTERM or SIGINT has come
        self.failed_early = False  # by a mistake of the user, soon after the start
        push_to = settings.push_to or "OWNER/NAME"
        self.push_command = [PYTHON, str(ROOT / "hub.py"), "push-model", str(out), push_to]

        # The seconds of training that the budget pays for.
        self.budget_s = math.inf
        if settings.budget_usd and settings.gpu_hour_usd:
            self.budget_s = settings.budget_usd / (nproc * settings.gpu_hour_usd) * 3600

    def supervise(self) -> int:
        """The life of a run. Returns the exit code: 1 if training has failed."""
        with suppress(OSError):
            (self.out / "train.pid").write_text(f"{os.getpid()}\n")
        signal.signal(signal.SIGTERM, self.ask_to_stop)
        signal.signal(signal.SIGINT, self.ask_to_stop)
        self.log_what_comes_at_the_end()

        training_ended = threading.Event()
        pusher = threading.Thread(target=self.push_periodically, args=[training_ended])
        if self.settings.push_every:
            pusher.start()
        try:
            outcome = self.train()
        except Exception:  # whatever it is, the machine must be given back
            log(traceback.format_exc())
            outcome = "failed: train.sh itself, see above"
        training_ended.set()
        log(f"training {outcome}")
        if self.settings.push_every:
            pusher.join()

        try:
            is_safe = self.secure_weights()
        except Exception:
            log(traceback.format_exc())
            is_safe = False
        self.give_back(is_safe)
        with suppress(OSError):
            (self.out / "train.pid").unlink()
        return int(outcome.startswith("failed"))

    def ask_to_stop(self, *_: object) -> None:
        """Handle a signal: whatever runs is ended where it is waited for. Another signal changes nothing: ranks would
        take a second one as the order to die."""
        if not self.stop_requested:
            self.stop_requested = True
            log("asked to stop")

    def elapsed_s(self) -> float:
        return time.monotonic() - self.start_time

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a request to stop."""
        deadline = time.monotonic() + seconds
        while not self.stop_requested and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def wait(self, process: subprocess.Popen, seconds: float, silence_s: float = math.inf) -> bool:
        """Wait until a process has ended, `seconds` are over, a stop is requested, or the log has not grown for
        silence_s: only then return True."""
        deadline = time.monotonic() + seconds
        log_size, log_grew_at = 0, time.monotonic()
        while process.poll() is None and not self.stop_requested and time.monotonic() < deadline:
            with suppress(OSError):
                # The log is this process's output. On a full disk it cannot grow.
                size, is_full = os.fstat(1).st_size, os.fstatvfs(1).f_bavail == 0
                if size != log_size or is_full:
                    log_size, log_grew_at = size, time.monotonic()
            if time.monotonic() - log_grew_at >= silence_s:
                return True
            time.sleep(POLL_S)
        return False

    def newest_step(self) -> int | None:
        """The newest complete step of the run; None if there is none, or the disk does not answer."""
        try:
            return latest_step(self.out)
        except OSError:
            return None

    # ---- training

    def train(self) -> str:
        """Run the trainer until it finishes, is stopped, has an error of the user's, or has failed too often. Returns
        how that ended: "finished", "stopped", "ended early: ..." or "failed: ..."."""
        first_step = self.newest_step()
        failures = 0
        while not self.stop_requested:
            # A restart resumes from this run's own checkpoint, whatever the command names, with what is left of the
            # budget.
            flags = []
            if self.newest_step() not in (None, first_step):
                flags += ["--resume", str(self.out)]
            last_start = self.newest_step()
            left_s = max(1, self.budget_s - self.elapsed_s())  # 0 would be no limit
            if left_s < math.inf:
                flags += ["--time-limit", str(int(left_s))]
            command = ["train_gpt2.py", *self.args, *flags]
            log(f"start {failures + 1}: {self.nproc} process(es), {shlex.join(command)}")
            exit_code = self.run_trainer([*self.args, *flags], left_s + HANG_S)

            status, reason = read_status(self.out)
            if self.stop_requested:
                break
            if status == "finished" or (not status and exit_code == 0):
                return "finished"
            if status == "stopped":
                return f"ended early: {reason}"
            if status == "user_error":
                self.failed_early = self.elapsed_s() < EARLY_MISTAKE_S
                return f"failed: {reason}"

            # A run that gets on may fail again and again, in the days that it takes.
            if self.newest_step() != last_start:
                failures = 0
            failures += 1
            log(f"failure {failures}, exit code {exit_code}; MAX_RESTARTS is {self.settings.max_restarts}")
            pause_s = RESTART_DELAY_S * 6 ** min(failures - 1, 2)
            if failures > self.settings.max_restarts or self.elapsed_s() + pause_s > self.budget_s - 1:
                return f"failed: exit code {exit_code}, no restart"
            self.pause(pause_s)
        return "stopped"

    def run_trainer(self, args: list[str], seconds: float) -> int:
        """Start the trainer, and wait for it. Returns its exit code."""
        with suppress(OSError):
            (self.out / "status.json").unlink(missing_ok=True)

        # --local-addr: where a machine's own name does not resolve, torchrun would wait for more than six minutes.
        command = [PYTHON, "-m", "cloud.torchrun", "--standalone", f"--nproc_per_node={self.nproc}"]
        command += ["--local-addr=127.0.0.1", str(ROOT / "train_gpt2.py"), *args]
        # The trainer inherits the lock: if this process is killed, the folder is in use until torchrun has ended, too.
        # Nothing else inherits it: a push that hangs must not keep anybody from starting the run again.
        env = {**os.environ, **trainer_env(), "TRAIN_STATUS_FILE": str(self.out / "status.json")}
        trainer = subprocess.Popen(command, env=env, pass_fds=[self.lock.fileno()])

        is_hanging = self.wait(trainer, seconds, SILENCE_S)
        if is_hanging:
            log(f"no word for {SILENCE_S / 3600:g} hours: the trainer hangs, and is killed")
        elif trainer.poll() is None:
            signal_ranks(trainer.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                trainer.wait(float(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
        if trainer.poll() is None:
            signal_ranks(trainer.pid, signal.SIGKILL)
            trainer.kill()
        return trainer.wait()

    # ---- pushing

    def push_periodically(self, training_ended: threading.Event) -> None:
        """Push each new complete checkpoint while training continues. The next one replaces it (--temporary)."""
        pushed = tried = None
        while not training_ended.wait(self.settings.push_every):
            step = self.newest_step()
            if step in (None, pushed):
                continue
            # Once a step, and the rest elsewhere: whether the trainer hangs is seen by a log that does not grow.
            if step != tried:
                log(f"pushing step {step} to {self.settings.push_to}, again until it succeeds: push.log")
            tried = step
            with open(self.out / "push.log", "ab") as push_log:
                command = ["nice", *self.push_command, "--with-optimizer", "--temporary"]
                push = subprocess.Popen(command, stdout=push_log, stderr=push_log)
            deadline = time.monotonic() + PERIODIC_PUSH_S
            while push.poll() is None:
                if training_ended.wait(POLL_S) or time.monotonic() >= deadline:
                    push.kill()
                    push.wait()
            if push.returncode == 0:
                pushed = step

    def push_at_end(self) -> bool:
        """Push until that succeeds, PUSH_RETRY_S are over, or somebody asks to stop. Returns whether it has succeeded.
        The best checkpoint, and the newest one with its optimizer state, if there is one: the run may be continued
        elsewhere."""
        flags = ["--steps", "best"] + ([] if self.newest_step() is None else ["--with-optimizer"])
        deadline = time.monotonic() + PUSH_RETRY_S
        while True:
            log(f"push to {self.settings.push_to}")
            push = subprocess.Popen([*self.push_command, *flags])
            # A transfer may hang for ever (huggingface_hub issue 3871), so a try gets half of the time.
            self.wait(push, min(PUSH_RETRY_S / 2, deadline - time.monotonic()))
            if push.poll() is None:
                push.kill()
            if push.wait() == 0:
                return True
            if self.stop_requested or time.monotonic() >= deadline:
                return False
            log(f"that push failed; next try in {PUSH_PAUSE_S} seconds")
            self.pause(PUSH_PAUSE_S)

    # ---- the end

    def describe_cost(self) -> str:
        """What this machine costs if it stays, unless it seems to be the user's own."""
        command, price = self.settings.shutdown_cmd, self.settings.gpu_hour_usd
        if not command and not price:
            return ""
        cost = f"${self.nproc * price:.2f} an hour" if price else "what your provider charges"
        return f"; it costs {cost} until you remove it: {command or 'on the page of your provider'}"

    def log_what_comes_at_the_end(self) -> None:
        """The first line of the log."""
        push = ""
        if self.settings.push_to:
            push = f"push to {self.settings.push_to}, for at most {PUSH_RETRY_S / 3600:g} hour; "
        stays = f"this machine STAYS{self.describe_cost()}"
        if self.settings.remove_pod:
            log(f"at the end: {push}this machine is removed if the weights are safe, else: {self.stop_cmd or stays}")
        else:
            log(f"at the end: {push}{stays}")

    def secure_weights(self) -> bool:
        """Push the weights. Returns whether nothing is lost if this machine is removed."""
        try:
            has_weights = any(name.startswith("model_") and name.endswith(".pt") for name in os.listdir(self.out))
        except OSError:
            has_weights = True  # it may have

        safe = ""
        if not has_weights:
            safe = "there are no weights to lose"
        elif self.settings.push_to and not self.stop_requested and self.push_at_end():
            safe = f"the weights are at {self.settings.push_to}"
        elif self.settings.persistent:
            safe = "the weights are on persistent storage"
        log(safe or f"the weights are on this machine alone; to push them: {shlex.join(self.push_command)}")
        return safe != ""

    def give_back(self, is_safe: bool) -> None:
        """Run the command that ends the bill, unless the user wants to keep the machine. The one that stops it keeps
        its disk."""
        command = ""
        if self.settings.remove_pod and not self.stop_requested and not self.failed_early:
            command = self.settings.shutdown_cmd if is_safe else self.stop_cmd
        for _ in range(5 if command else 0):
            prevent = f"to prevent it: kill {os.getpid()}"
            log(f"in {REMOVE_DELAY_S} seconds this machine runs: {command}    # {prevent}")
            self.pause(REMOVE_DELAY_S)
            if self.stop_requested:
                log("that was prevented")
                break
            if subprocess.run(["bash", "-c", command]).returncode == 0:
                return
            log("that FAILED")
        log(f"this machine stays{self.describe_cost()}")


def trainer_env(root: Path = ROOT) -> dict[str, str]:
    """What the trainer's environment has beside this one's, unless the user has set it."""
    # After a signal torchrun gives its ranks this many seconds to save, then kills them; its default is 30.
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_S)}
    # Compiled code stays in the project's folder, which may be on a network volume: the next pod then has it, too.
    # But torch cannot compile in a folder whose name a shell would split: it puts the name on a command line as it is.
    if shlex.quote(str(root)) == str(root):
        env["TORCHINDUCTOR_CACHE_DIR"] = str(root / ".cache")
    return {name: os.environ.get(name) or value for name, value in env.items()}


if __name__ == "__main__":
    run_cli(main)
