"""A pod for train.sh: the script is real; the trainer, the Hub, runpodctl, df and sleep are stand-ins.

    with Pod(tmp_path) as pod:
        pod.start(plan="crash finish")     # the first start crashes, the restart finishes
        assert "training finished" in pod.wait_until_ended()

The words of `plan` say what each start of the trainer does; the last word serves all later starts.
"""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress

from helpers import ROOT

# Stands in for Python, as far as train.sh calls it. $POD is the folder of the pod; OUT is $POD/run.
PYTHON = r"""#!/bin/bash
save() { for kind in optim model; do echo weights >"$OUT/${kind}_$1.pt"; done; }
status() { printf '{"status": "%s", "reason": "%s"}\n' "$1" "$2" >"$TRAIN_STATUS_FILE"; }
case $* in
-I*) exec REAL_PYTHON "$@" ;;
*--check) [[ ! -e $POD/refuse ]] || { echo "error: bad flag" >&2; exit 1; }
    echo "$POD/run"; echo 2 ;;
*hub.py\ check*) echo "${*:3}" >>"$POD/checked"; [[ ! -e $POD/no-token ]] ;;
*hub.py*) echo "${*:2}" >>"$POD/pushed"
    [[ ! -e $POD/hang ]] || exec /bin/sleep 60
    (($(wc -l <"$POD/pushed") > $(cat "$POD/push_fails"))) ;;
*) trap 'save 00042; status stopped "signal SIGTERM"; exit 1' TERM
    echo "${*:4}" >>"$POD/starts"
    read -ra plan <"$POD/plan"
    start=$(wc -l <"$POD/starts")
    action=${plan[start - 1]:-${plan[-1]}}
    [[ $action != save-* && $action != finish && $action != limit ]] || save 00010
    case $action in
    finish) status finished "" ;;
    limit) status stopped "the time limit" ;;
    nothing) ;;
    *hang) echo $$ >"$POD/trainer"; while :; do /bin/sleep 0.05; done ;;
    user-error) status user_error "--max-lr -1 must be positive"; exit 1 ;;
    *crash) exit 3 ;;
    esac ;;
esac
"""
RUNPODCTL = '#!/bin/sh\necho "$@" >> $POD/removed\n'


class Pod:
    """A folder with train.sh and a PATH of stand-ins. At the end no process of it is left."""

    def __init__(self, root):
        self.root = root
        self.run = root / "run"
        (root / "bin").mkdir()
        (root / "train.sh").write_text((ROOT / "train.sh").read_text())
        (root / "push_fails").write_text("0")
        self.add_tool("python", PYTHON.replace("REAL_PYTHON", os.sys.executable))
        self.add_tool("runpodctl", RUNPODCTL)
        self.add_tool("df", "#!/bin/sh\necho Type Mounted on\necho ext4 /\n")
        self.add_tool("sleep", '#!/bin/sh\necho "$1" >> $POD/slept\nexec /bin/sleep 0.02\n')
        self.env = {"PATH": f"{root}/bin:{os.environ['PATH']}", "POD": str(root), "RUNPOD_POD_ID": "pod7"}
        self.env |= {"START_WAIT": "0"}
        self.supervisor = 0  # its process id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in filter(None, (self.supervisor, self.read("trainer"))):
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def add_tool(self, name, text):
        """Put an executable script on the PATH."""
        (self.root / "bin" / name).write_text(text)
        (self.root / "bin" / name).chmod(0o755)

    def start(self, *args, plan="finish", check=True, **env):
        """Call train.sh with these arguments and settings; returns once the run is in the background."""
        (self.root / "plan").write_text(f"{plan}\n")
        command = ["bash", str(self.root / "train.sh"), *args]
        how = {"cwd": self.root, "env": {**self.env, **env}, "text": True, "timeout": 60}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **how)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        started = re.search(r", pid (\d+)", done.stdout)
        self.supervisor = int(started[1]) if started else self.supervisor
        return done

    def read(self, name):
        """The content of a file of the pod; "" if it does not exist."""
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def log(self):
        return "".join(path.read_text() for path in sorted(self.run.glob("train-*.log")))

    def wait(self, condition, seconds=20):
        """Wait until condition() is true; fail after so many seconds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited in vain\n{self.log()}"
            time.sleep(0.02)

    def wait_until_ended(self):
        """Wait until the supervisor has ended. Returns the log."""
        self.wait(lambda: not is_alive(self.supervisor))
        return self.log()

    def start_and_train(self, *args, plan="hang", **env):
        """Start a run that trains until it is stopped. Returns the trainer's process id."""
        self.start(*args, plan=plan, **env)
        self.wait(lambda: self.read("trainer").strip())
        return int(self.read("trainer"))


def is_alive(pid):
    """Whether the process runs. One that has ended and only waits for its parent (state Z) does not."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
