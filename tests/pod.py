"""A pod for train.sh: the script is real; the trainer, the Hub, runpodctl, df and sleep are stand-ins.

    with Pod(tmp_path) as pod:
        pod.start(PLAN="crash finish")     # the first start of the trainer crashes, the restart finishes
        assert "training finished" in pod.wait_until_ended()

The words of PLAN say what each start of the trainer does; the last word serves all later starts. HUB_DOES is what a
push does, as a command of bash; DISK is what df tells of the run folder. The files starts, pushed and removed have the
arguments of the trainer, of pushes and of runpodctl.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from helpers import ROOT
from processes import wait_for

# Stands in for Python, as far as train.sh calls it. $POD is the folder of the pod; OUT is $POD/run.
PYTHON = r"""#!/bin/bash
save() { touch "$OUT/optim_$1.pt" "$OUT/model_$1.pt"; }
status() { printf '{"status": "%s", "reason": "%s"}\n' "$1" "$2" >"$TRAIN_STATUS_FILE"; }
[[ $1 != -I ]] || exec "$REAL_PYTHON" -S "$@"
[[ $* != *--help* ]] || exec printf 'usage\nflags\n'
[[ $* != *--check ]] || { printf '%s\n' "$POD/run" 2; exec test ! -e "$POD/refuse"; }
case $* in
*hub.py\ check*) [[ ! -e $POD/no-token ]] ;;
*hub.py*) echo "${*:2}" >>"$POD/pushed"; eval "${HUB_DOES:-true}" ;;
*)  echo "${*:4}" >>"$POD/starts"
    trap 'save 00042; status stopped "signal SIGTERM"; exit 1' TERM
    plan=(${PLAN:-finish})
    start=$(wc -l <"$POD/starts")
    case ${plan[start - 1]:-${plan[-1]}} in
    finish) save 00010; status finished "" ;;
    limit) save 00010; status stopped "the time limit" ;;
    hang) echo $$ >"$POD/trainer"; while :; do /bin/sleep 0.05; done ;;
    user-error) status user_error "--max-lr -1 must be positive"; exit 1 ;;
    save-crash) save 00010; exit 3 ;;
    crash) exit 3 ;;
    esac ;;
esac
"""


class Pod:
    """A folder with train.sh and a PATH of stand-ins."""

    def __init__(self, root: Path):
        self.root, self.run = root, root / "run"
        (root / "bin").mkdir(parents=True)
        shutil.copy(ROOT / "train.sh", root)
        self.add_tool("python", PYTHON)
        self.add_tool("runpodctl", '#!/bin/sh\necho "$@" >> $POD/removed\n')
        self.add_tool("df", "#!/bin/sh\necho Type Mounted on\necho ${DISK:-ext4 /}\n")
        self.add_tool("sleep", '#!/bin/sh\necho "$1" >> $POD/slept\nexec /bin/sleep 0.05\n')
        self.env = {"PATH": f"{root}/bin:{os.environ['PATH']}", "POD": str(root), "REAL_PYTHON": sys.executable}
        self.env |= {"RUNPOD_POD_ID": "pod7", "START_WAIT": "0"}
        self.supervisor = 0  # its process id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """No process is left: the supervisor leads the group of all that it has started."""
        if self.supervisor:
            with suppress(ProcessLookupError):
                os.killpg(self.supervisor, signal.SIGKILL)

    def add_tool(self, name: str, script: str) -> None:
        """Put an executable script on the PATH."""
        (self.root / "bin" / name).write_text(script)
        (self.root / "bin" / name).chmod(0o755)

    def start(self, *args: object, check=True, **env: str) -> subprocess.CompletedProcess:
        """Call train.sh with these arguments and settings; returns once the run is in the background."""
        how = {"cwd": self.root, "env": {**self.env, **env}, "text": True, "timeout": 60}
        done = subprocess.run(
            ["bash", "train.sh", *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True, **how
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        started = re.search(r", pid (\d+)", done.stdout)
        self.supervisor = int(started[1]) if started else self.supervisor
        return done

    def start_and_train(self, *args: object, **env: str) -> int:
        """Start a run that trains until it is stopped. Returns the trainer's process id."""
        self.start(*args, **{"PLAN": "hang", **env})
        wait_for(lambda: self.read("trainer").strip())
        return int(self.read("trainer"))

    def read(self, name: str) -> str:
        """The content of a file of the pod; "" if it does not exist."""
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def wait_until_ended(self) -> str:
        """Wait until the supervisor has ended. Returns the log."""
        wait_for(lambda: not is_alive(self.supervisor))
        return "".join(path.read_text() for path in sorted(self.run.glob("train-*.log")))


def is_alive(pid: int) -> bool:
    """Whether the process runs. One that has ended and only waits for its parent (state Z) does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
