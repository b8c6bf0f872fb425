"""A pod of stand-ins for train.sh: trainer, Hub, torchrun and the tools of the cloud are small scripts."""

import os
import shutil
import signal
import subprocess
import sys
import time

from helpers import ROOT

PYTHON = """#!/bin/sh
case "$1 $2" in
"-m torch.distributed.run") shift 2; exec "{python}" "{root}/torchrun.py" "$@" ;;
*) exec "{python}" "$@" ;;
esac
"""

TORCHRUN = """
# Ranks in sessions of their own, as torchrun starts them; dies of SIGTERM; fails if a rank fails.
import os, pathlib, subprocess, sys
starts = pathlib.Path(sys.argv[3]).parent / "starts"
with open(starts, "a") as f:
    f.write(" ".join(sys.argv[4:]) + "\\n")
count = str(len(starts.read_text().splitlines()))
n = int(sys.argv[2].split("=")[1])
env = lambda r: {**os.environ, "RANK": str(r), "START": count}
ranks = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=env(r), start_new_session=True) for r in range(n)]
sys.exit(any([r.wait() for r in ranks]))
"""

# the part of the real parser that these tests use, without torch; and a torch that only counts GPUs
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

TRAINER = """
import os, pathlib, signal, sys, time
here, out = pathlib.Path(__file__).parent, pathlib.Path(os.environ["TRAIN_RUN_DIR"])
rank0 = os.environ["RANK"] == "0"
def save(name):
    for kind in ("optim", "model"):
        (out / f"{kind}_{name}.pt").write_text("weights")
def stop(*_):
    if rank0:
        save("00042")
        print("saved on SIGTERM", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
plan = (here / "plan").read_text().split()  # what the 1st, 2nd, ... start does; the last one again and again
deed = plan[min(int(os.environ["START"]), len(plan)) - 1]
(out / f"rank{os.environ['RANK']}").write_text(str(os.getpid()))
if deed == "usererror":
    print("error: --max-lr -1 must be positive", file=sys.stderr)
    sys.exit(1)
if deed == "diskfail":
    print("system error: [Errno 5] Input/output error; fix that, then run the command again", file=sys.stderr)
if deed in ("savefail", "savehang", "ok", "limit") and rank0:
    save("00010")
if deed == "limit" and rank0:
    print("stopped by the time limit at step 10, all saved; go on with ...", flush=True)
if deed.endswith("fail"):
    sys.exit(3)
while deed.endswith("hang"):
    time.sleep(0.05)
"""

HUB = """
import pathlib, sys
here = pathlib.Path(__file__).parent
if sys.argv[1] == "check":
    (here / "checked").write_text(" ".join(sys.argv[2:]))
    sys.exit()
with open(here / "pushed", "a") as f:
    f.write(" ".join(sys.argv[1:]) + "\\n")
tries = len((here / "pushed").read_text().splitlines())
sys.exit(tries <= int((here / "push_fails").read_text()))
"""


class Pod:
    """A folder with train.sh, its stand-ins and a PATH that holds them; remembers what ran so that all of it ends."""

    def __init__(self, root):
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir()
        shutil.copy(ROOT / "train.sh", root)
        (root / "train_gpt2.py").write_text(TRAINER)
        (root / "torchrun.py").write_text(TORCHRUN)
        (root / "hub.py").write_text(HUB)
        (root / "push_fails").write_text("0")
        (root / "torch.py").write_text(TORCH)
        for name in ("system", "tokens", "training"):
            (root / name).mkdir()
        (root / "tokens" / "shards.py").touch()
        (root / "system" / "script.py").symlink_to(ROOT / "system" / "script.py")
        (root / "training" / "presets.py").write_text(PRESETS)
        (root / "training" / "checkpoint.py").touch()
        self.tool("python", PYTHON.format(python=sys.executable, root=root))
        self.tool("runpodctl", f'#!/bin/sh\necho "$@" >> {root}/removed\n')
        drop = "PUSH_TO PUSH PUSH_PUBLIC REMOVE_POD SHUTDOWN_CMD PERSISTENT BUDGET_USD GPU_HOUR_USD".split()
        self.env = {k: v for k, v in os.environ.items() if k not in drop}
        self.env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "RUNPOD_POD_ID": "pod7", "START_WAIT": "0"}
        self.env |= {"RESTART_DELAY": "0", "REMOVE_DELAY": "0"}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """End what is left, by the ids that it wrote down."""
        for name in ("train.pid", "rank0", "rank1"):
            for path in self.root.rglob(name):
                if (pid := path.read_text().strip()) and alive(int(pid)):
                    os.kill(int(pid), signal.SIGKILL)

    def real_parser(self):
        """In place of the stand-in: it needs two seconds."""
        (self.root / "torch.py").unlink()
        for name in ("model.py", "system", "tokens", "training"):
            shutil.rmtree(self.root / name, ignore_errors=True)
            (self.root / name).symlink_to(ROOT / name)

    def tool(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *args, plan="ok", check=True, **env):
        (self.root / "plan").write_text(plan)
        command, how = (
            ["bash", str(self.root / "train.sh"), *args],
            {"text": True, "capture_output": True, "timeout": 30},
        )
        done = subprocess.run(command, cwd=self.root, env={**self.env, **env}, stdin=subprocess.DEVNULL, **how)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def read(self, name):
        return (self.root / name).read_text() if (self.root / name).exists() else ""

    def starts(self):
        return self.read("starts").splitlines()

    def log(self, out="log/gpt2-124m"):
        return "".join(p.read_text() for p in sorted((self.root / out).glob("train-*.log")))

    def pid(self, name="train.pid", out="log/gpt2-124m"):
        return int(self.read(f"{out}/{name}") or 0)

    def wait(self, condition, seconds=20):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited in vain\n{self.log()}"
            time.sleep(0.03)

    def ended(self, out="log/gpt2-124m"):
        """Wait until train.sh has taken its last decision; the whole log."""
        self.wait(lambda: "training " in self.log(out) and not (self.root / out / "train.pid").exists())
        return self.log(out)

    def hanging(self, out="log/gpt2-124m"):
        """Wait for both ranks; their process ids, and that of their torchrun."""
        self.wait(lambda: self.pid("rank0", out) and self.pid("rank1", out))
        time.sleep(0.2)  # the handler of SIGTERM is set before; this is for slow writes of the file itself
        with open(f"/proc/{self.pid('rank0', out)}/status") as f:
            torchrun = int(next(line for line in f if line.startswith("PPid:")).split()[1])
        return self.pid("rank0", out), self.pid("rank1", out), torchrun


def alive(pid):
    """Running, and not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
