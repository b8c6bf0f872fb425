"""A pod for train.sh. The script is real; the trainer, the Hub, torchrun and the tools of the cloud are stand-ins.

    with Pod(tmp_path) as pod:
        pod.start("--max-steps", "5", plan="crash finish")   # the first start crashes, the restart finishes
        assert "training finished" in pod.wait_until_ended()

Used by test_train_sh.py, test_billing.py and faults/torture.py.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

from helpers import ROOT

# `python -m torch.distributed.run` starts the stand-in for torchrun; every other call is the real Python.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m torch.distributed.run") shift 2; exec "{python}" "{root}/torchrun.py" "$@" ;;
*) exec "{python}" "$@" ;;
esac
"""

TORCHRUN = """
# Starts each rank in a session of its own, as torchrun does; dies of SIGTERM; fails if a rank fails.
import os, pathlib, subprocess, sys

# the call is: torchrun.py --standalone --nproc_per_node=N train_gpt2.py ARGUMENTS
processes, script, arguments = int(sys.argv[2].split("=")[1]), sys.argv[3], sys.argv[4:]

# record the arguments of this start, for Pod.starts
starts = pathlib.Path(script).parent / "starts"
with open(starts, "a") as f:
    f.write(" ".join(arguments) + "\\n")
start_number = str(len(starts.read_text().splitlines()))

ranks = []
for rank in range(processes):
    env = {**os.environ, "RANK": str(rank), "START": start_number}
    ranks.append(subprocess.Popen([sys.executable, script, *arguments], env=env, start_new_session=True))
exit_codes = [rank.wait() for rank in ranks]
sys.exit(any(exit_codes))
"""

# The part of the real parser that these tests use, without importing torch; and a torch that only counts GPUs.
PRESETS = """
import argparse, pathlib
def parse(argv, read_saved):
    preset = argv[0] if argv and argv[0][0] != "-" else ""
    flags = argparse.ArgumentParser(argument_default="")
    for name in ("resume", "out-dir", "device", "time-limit"):
        flags.add_argument("--" + name)
    cfg = flags.parse_known_args(argv)[0]
    resumed = pathlib.Path(cfg.resume)
    folder = resumed if resumed.is_dir() else resumed.parent
    saved = "" if preset or cfg.resume in ("auto", "none") else folder
    cfg.data_dir = "hf://me/tokens"
    cfg.run_dir = pathlib.Path(cfg.out_dir or saved or "log/" + (preset or "gpt2-124m"))
    return cfg
"""
TORCH = "import os\nclass cuda:\n    device_count = lambda: int(os.environ.get('GPUS', 2))\n"
# The check of the GPU; the file bad_gpu says that torch cannot use it.
MACHINE = """
import pathlib
from system.cli import UserError
def refuse_unusable_gpu(name):
    if name != "cpu" and (pathlib.Path(__file__).parents[1] / "bad_gpu").exists():
        raise UserError("torch is built without CUDA")
"""

TRAINER = """
# Does what the plan says for this start: one word for the 1st, the 2nd, ... start; the last word serves all later ones.
#   finish                 save, finish
#   limit                  save, stop because of the time limit
#   hang, save-hang        (save,) train until SIGTERM
#   crash, save-crash      (save,) end with an exit code that is not 0 and without a status, as a killed process does
#   user-error             every rank fails with an error that the user must fix
#   one-rank-user-error    rank 1 does; rank 0 fails afterwards with a system error
#   system-error           every rank fails with an error that may pass
# How it ended is written by the real system.cli, as the real trainer does.
import os, pathlib, signal, sys, time
from system.cli import write_status
here, out = pathlib.Path(__file__).parent, pathlib.Path(os.environ["TRAIN_RUN_DIR"])
rank = int(os.environ["RANK"])

def save(step):
    for kind in ("optim", "model"):
        (out / f"{kind}_{step}.pt").write_text("weights")

def save_and_stop(*_):
    if rank == 0:
        save("00042")
        print("saved on SIGTERM", flush=True)
        write_status("stopped", "signal SIGTERM")
    sys.exit(0)

def user_error():
    print("error: --max-lr -1 must be positive", file=sys.stderr)
    write_status("user_error", "--max-lr -1 must be positive")
    sys.exit(1)

signal.signal(signal.SIGTERM, save_and_stop)
plan = (here / "plan").read_text().split()
action = plan[min(int(os.environ["START"]), len(plan)) - 1]
(out / f"rank{rank}.part").write_text(str(os.getpid()))
os.replace(out / f"rank{rank}.part", out / f"rank{rank}")

if rank == 0 and action in ("finish", "limit", "save-hang", "save-crash"):
    save("00010")
match action:
    case "finish":
        if rank == 0:
            write_status("finished")
    case "limit":
        if rank == 0:
            write_status("stopped", "the time limit")
    case "hang" | "save-hang":
        while True:
            time.sleep(0.05)
    case "crash" | "save-crash":
        sys.exit(3)
    case "user-error":
        user_error()
    case "one-rank-user-error":
        if rank == 1:
            user_error()
        while not pathlib.Path(os.environ["TRAIN_STATUS_FILE"]).exists():
            time.sleep(0.01)
        write_status("system_error", "Input/output error")
        sys.exit(1)
    case "system-error":
        write_status("system_error", "Input/output error")
        sys.exit(1)
    case _:
        raise ValueError(action)
"""

HUB = """
# Writes the arguments of each call to a file: `checked` for `hub.py check`, else `pushed`. What a push does:
#   the first pushes fail, as many as the file push_fails says
#   until the time in the file hub_back, every push fails
#   while the file token exists, a push needs the same token in HF_TOKEN or else in $HF_HOME/token
#   while the file hub_hangs exists, a push does not end
import os, pathlib, subprocess, sys, time
here = pathlib.Path(__file__).parent

def planned_sizes(cfg):
    return 500_000_000, 1_000_000_000, 4

def push():
    with open(here / "pushed", "a") as f:
        f.write(" ".join(sys.argv[1:]) + "\\n")
    while (here / "hub_hangs").exists():
        time.sleep(0.05)
    if (here / "token").exists():
        saved = pathlib.Path(os.environ["HF_HOME"]) / "token"
        token = os.environ.get("HF_TOKEN") or saved.read_text()
        if token != (here / "token").read_text():
            print("error: the token is refused", file=sys.stderr)
            sys.exit(77)
    now = int(subprocess.run(["date", "+%s"], capture_output=True, text=True).stdout)
    if now < int((here / "hub_back").read_text()):
        sys.exit("error: cannot reach the Hub")
    tries = len((here / "pushed").read_text().splitlines())
    sys.exit(tries <= int((here / "push_fails").read_text()))

if __name__ == "__main__":
    if sys.argv[1] == "check":
        (here / "checked").write_text(" ".join(sys.argv[2:]))
    else:
        push()
"""

# A clock that only `sleep` and a push that hangs move: they take no time, and `date` shows what they would have taken.
CLOCK = {
    "date": """#!/bin/sh
exec /bin/date -d "@$(cat {root}/clock)" "$@"
""",
    "sleep": """#!/bin/sh
now=$(cat {root}/clock)
printf %d "$((now + ${{1%%.*}}))" > {root}/clock.new && mv {root}/clock.new {root}/clock
exec /bin/sleep 0.01
""",
    # timeout --foreground --kill-after=30 SECONDS COMMAND...
    "timeout": """#!/bin/sh
[ "$1" = --foreground ] || exec /usr/bin/timeout "$@"
if [ -e {root}/hub_hangs ]; then
    sleep "$3"
    shift 3
    exec /usr/bin/timeout --foreground 0.3 "$@"
fi
exec /usr/bin/timeout "$@"
""",
}
START_OF_CLOCK = 1_800_000_000

# Variables of train.sh that this machine may have set.
TRAIN_SH_VARIABLES = "PUSH_TO PUSH PUSH_PUBLIC PUSH_OPTIMIZER PUSH_EVERY PUSH_RETRY_HOURS PUSH_TIMEOUT".split()
TRAIN_SH_VARIABLES += "REMOVE_POD SHUTDOWN_CMD STOP_CMD PERSISTENT KEEP_ON_FAILURE BUDGET_USD GPU_HOUR_USD".split()
TRAIN_SH_VARIABLES += "HF_TOKEN HF_TOKEN_PATH".split()


class Pod:
    """A folder with train.sh, its stand-ins, and a PATH that finds them. At the end it kills every process that the
    stand-ins wrote down."""

    def __init__(self, root):
        self.root = root
        self.bin = root / "bin"
        self.bin.mkdir()

        # the project: train.sh is real, and so is system/cli.py
        shutil.copy(ROOT / "train.sh", root)
        for name in ("system", "tokens", "training"):
            (root / name).mkdir()
        (root / "system" / "cli.py").symlink_to(ROOT / "system" / "cli.py")
        (root / "train_gpt2.py").write_text(TRAINER)
        (root / "torchrun.py").write_text(TORCHRUN)
        (root / "hub.py").write_text(HUB)
        (root / "push_fails").write_text("0")
        (root / "hub_back").write_text("0")
        (root / "torch.py").write_text(TORCH)
        (root / "tokens" / "shards.py").touch()
        (root / "system" / "machine.py").write_text(MACHINE)
        (root / "training" / "presets.py").write_text(PRESETS)
        (root / "training" / "checkpoint.py").touch()

        # the machine
        self.add_tool("python", PYTHON.format(python=sys.executable, root=root))
        self.add_tool("runpodctl", f'#!/bin/sh\necho "$@" >> {root}/removed\n')
        self.env = {k: v for k, v in os.environ.items() if k not in TRAIN_SH_VARIABLES}
        self.env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "RUNPOD_POD_ID": "pod7"}
        self.env |= {"START_WAIT": "0", "RESTART_DELAY": "0", "REMOVE_DELAY": "0", "HF_HOME": str(root / "hf-home")}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in ("train.pid", "rank0", "rank1"):
            for path in self.root.rglob(name):
                pid = path.read_text().strip()
                if pid and alive(int(pid)):
                    os.kill(int(pid), signal.SIGKILL)

    def use_real_parser(self):
        """Replace the stand-in of the parser by the real one, which takes seconds to import torch."""
        (self.root / "torch.py").unlink()
        for name in ("model.py", "system", "tokens", "training"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).symlink_to(ROOT / name)

    def use_real_hub(self):
        """Replace the stand-in of hub.py by the real one, which needs the real parser, too."""
        self.use_real_parser()
        (self.root / "hub.py").unlink()
        (self.root / "hub.py").symlink_to(ROOT / "hub.py")

    def use_simulated_clock(self):
        """From now on, pauses take no time; clock() tells how long they would have taken."""
        (self.root / "clock").write_text(str(START_OF_CLOCK))
        for name, text in CLOCK.items():
            self.add_tool(name, text.format(root=self.root))

    def clock(self):
        """The seconds that the simulated clock has gone so far."""
        return int(self.read("clock")) - START_OF_CLOCK

    def add_tool(self, name, text):
        """Put an executable script on the PATH."""
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *args, plan="finish", check=True, **env):
        """Call ./train.sh with these arguments and environment variables; returns once it runs in the background."""
        (self.root / "plan").write_text(plan)
        done = subprocess.run(
            ["bash", str(self.root / "train.sh"), *args],
            cwd=self.root,
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            text=True,
            capture_output=True,
            timeout=120,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def read(self, name):
        """The content of a file of the pod, "" if it does not exist."""
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def starts(self):
        """The trainer's arguments, of one start after the other."""
        return self.read("starts").splitlines()

    def log(self, out="log/gpt2-124m"):
        """The logs of train.sh in this run folder, in order of time."""
        return "".join(p.read_text() for p in sorted((self.root / out).glob("train-*.log")))

    def pid(self, name="train.pid", out="log/gpt2-124m"):
        """The process id in a file of the run folder: train.pid, rank0 or rank1. 0 without that file."""
        return int(self.read(f"{out}/{name}") or 0)

    def wait(self, condition, seconds=20):
        """Wait until condition() is true; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain\n{self.log()}"
            time.sleep(0.02)

    def wait_until_ended(self, out="log/gpt2-124m", seconds=20):
        """Wait until train.sh has made its last decision. Returns the log."""
        self.wait(lambda: "training " in self.log(out) and not (self.root / out / "train.pid").exists(), seconds)
        return self.log(out)

    def wait_for_ranks(self, out="log/gpt2-124m"):
        """Wait until both ranks train. Returns the process ids of rank 0, rank 1 and their torchrun."""
        # a rank writes its file after it has set its signal handler
        self.wait(lambda: self.pid("rank0", out) and self.pid("rank1", out))
        with open(f"/proc/{self.pid('rank0', out)}/status") as f:
            parent_line = next(line for line in f if line.startswith("PPid:"))
        return self.pid("rank0", out), self.pid("rank1", out), int(parent_line.split()[1])


HOUR = 3600  # seconds
NEVER = 10**9
GPU_PRICE = 8 * 2.5  # dollars an hour of the whole machine


class RentedPod(Pod):
    """A RunPod pod of eight GPUs with a simulated clock, and a bill. Its run folder does not outlive it."""

    def __init__(self, root):
        super().__init__(root)
        self.use_simulated_clock()
        self.env |= {"PUSH_TO": "me/gpt2", "REMOVE_POD": "1", "GPU_HOUR_USD": "2.5", "NPROC": "8"}
        self.add_tool("runpodctl", f'#!/bin/sh\necho "$(date +%s) $@" >> {root}/removed\n')
        self.set_mount("/")

    def set_mount(self, mounted_at):
        """Where the disk of the run folder is mounted."""
        self.add_tool("df", f'#!/bin/sh\necho "Mounted on"; echo {mounted_at}\n')

    def hub_is_away(self, seconds):
        """Every push fails for so long, from the start on."""
        (self.root / "hub_back").write_text(str(START_OF_CLOCK + seconds))

    def ending(self):
        """What became of the machine (removed, stopped, stays), and the dollars that were billed for it since the
        start; training takes no time. A machine that stays is billed on."""
        words = self.read("removed").split()
        if not words:
            return "stays", self.clock() / HOUR * GPU_PRICE
        seconds = int(words[0]) - START_OF_CLOCK
        return {"delete": "removed", "stop": "stopped"}[words[2]], seconds / HOUR * GPU_PRICE

    def pushes(self):
        """How often a push was tried."""
        return len(self.read("pushed").splitlines())


def alive(pid):
    """Whether the process runs. One that has ended and only waits for its parent (state Z) does not."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            state = f.read().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
