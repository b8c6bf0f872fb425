"""A pod for train.sh, which is the real one with shorter waits; torchrun, the trainer, hub.py, runpodctl and df are
stand-ins.

    pod = Pod(tmp_path)
    pod.start(PLAN="crash finish")         # the first start of the trainer crashes, the restart finishes
    assert "training finished" in pod.wait_until_ended()
    pod.kill()                             # what is left of it

The words of PLAN say what each start of the trainer does; the last word serves all later starts. HUB_DOES is what a
push does, as a command of bash; DISK is what df says of the run folder. The files starts, checked, pushed and removed
have the arguments of the trainer, of the check before it, of pushes and of runpodctl.
"""

import os
import re
import subprocess
from pathlib import Path

from helpers import ROOT, write_script
from processes import wait_for

# Stands in for Python, as far as train.sh calls it. $POD is the folder of the pod; the status file is in the run's.
PYTHON = r"""#!/bin/bash
OUT=${TRAIN_STATUS_FILE%/status.json}
save() { touch "$OUT/optim_$1.pt"; [[ ${2-} == cut ]] || touch "$OUT/model_$1.pt"; }
status() { printf '{"status": "%s", "reason": "%s"}\n' "$1" "$2" >"$TRAIN_STATUS_FILE"; }
hang() { echo $$ >>"$POD/trainer"; while :; do read -rt 0.02 <>"$POD/never"; done; }
trap 'echo x >>"$POD/signals"; eval "$ON_TERM"; save 00042; status stopped "signal SIGTERM"; exit 1' TERM
case $* in
*device_count*) echo 2 ;;
*max_steps*config.json) exec python3 "$@" ;;
*hub.py\ check*) echo "${@:2}" >>"$POD/checked"; echo "hub.py ${@:2}" >>"$POD/prepared"; [[ -z ${NO_TOKEN-} ]] ;;
*hub.py\ pull-data* | *hellaswag.py* | *--dry-run*) echo "$@" >>"$POD/prepared"; eval "${PREPARING:-true}" ;;
*hub.py*) echo "${@:2}" >>"$POD/pushed"; eval "${HUB_DOES:-true}" ;;
*)  echo "${@:3}" >>"$POD/starts"
    echo "$TRAIN_START_TIME" >>"$POD/times"
    plan=(${PLAN:-finish})
    start=$(wc -l <"$POD/starts")
    case ${plan[start - 1]:-${plan[-1]}} in
    finish) save 00010; status finished "" ;;
    limit) save 00010; status stopped "the time limit" ;;
    hang) hang ;;
    unmount) mv "$OUT" "$OUT.gone" ;;
    user-error) status user_error "--max-lr -1 must be positive"; exit 1 ;;
    save-crash) save 00010; exit 3 ;;
    save-again) save 000$((10 + start)); exit 3 ;;
    cut) save 00010 cut; kill -9 $$ ;;
    slow-crash) /bin/sleep 1.1; exit 3 ;;
    crash) exit 3 ;;
    esac ;;
esac
"""


class Pod:
    """A folder in which train.sh is called, and a PATH of stand-ins. Its runs go to the folder `run`, whose name must
    not be split."""

    def __init__(self, root):
        self.root, self.run = root, root / "my run"
        self.seconds = {"restart_delay_s": "0", "remove_delay_s": "0.01", "push_pause_s": "0.01", "show_log_s": "0.01"}
        write_script(root / "project/.venv/bin/python", PYTHON)
        write_script(root / "bin/runpodctl", '#!/bin/sh\necho "$@" >> "$POD/removed"\n')
        write_script(root / "bin/df", "#!/bin/sh\necho Type\necho ${DISK:-ext4} 99 9 ${FREE:-90000000}\n")
        os.mkfifo(root / "never")
        self.env = {"PATH": f"{root}/bin:{os.environ['PATH']}", "POD": str(root), "RUNPOD_POD_ID": "pod7"}
        self.started = []  # the supervisors, which lead sessions

    def kill(self):
        """End the sessions that train.sh has begun."""
        for pid in self.started:
            subprocess.run(["pkill", "-KILL", "-s", str(pid)])

    def add_checkpoint(self, folder, step):
        """Put a checkpoint of some step into a folder of the pod."""
        (self.root / folder).mkdir(parents=True, exist_ok=True)
        (self.root / folder / f"model_{step:05d}.pt").touch()

    def command(self, *args):
        """The command line of train.sh, in whose text the pod's waits take the place of the usual ones."""
        script = (ROOT / "train.sh").read_text()
        for name, value in self.seconds.items():
            script, count = re.subn(rf"(?m)^{name}=[^#\n]*", f"{name}={value} ", script)
            assert count == 1, name
        write_script(self.root / "project/train.sh", script)
        return [f"{self.root}/project/train.sh", *map(str, args)]

    def call(self, *args, check=True, **env):
        """Call train.sh with exactly these arguments; returns the finished process, whose run is in the background."""
        how = {"cwd": self.root, "env": {**self.env, **env}, "text": True, "timeout": 60}
        done = subprocess.run(self.command(*args), stdin=subprocess.DEVNULL, capture_output=True, **how)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        self.started += map(int, re.findall(r", pid (\d+)", done.stdout))
        return done

    def start(self, *args, **settings):
        """Start a run, into the pod's own folder."""
        return self.call(*args, "--out-dir", self.run.name, **settings)

    @property
    def supervisor(self):
        """The process id of the newest supervisor."""
        return self.started[-1]

    def start_and_train(self, *args, **env):
        """Start a run that trains until it is stopped. Returns the trainer's process id."""
        self.start(*args, **{"PLAN": "hang", **env})
        wait_for(lambda: self.read("trainer").strip())
        return int(self.read("trainer").split()[-1])

    def read(self, name):
        """The content of a file of the pod; "" if it does not exist."""
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def wait_until_ended(self):
        """Wait until the supervisor has ended. Returns the log of the pod's run."""
        wait_for(lambda: not is_alive(self.supervisor))
        return self.read(f"{self.run.name}/train.log")


def is_alive(pid):
    """Whether the process runs. One that has ended and only waits for its parent (state Z) does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
