"""A pod for train.sh: the supervisor is the real one; torchrun, the trainer, hub.py, runpodctl and df are stand-ins.

    with Pod(tmp_path) as pod:
        pod.start(PLAN="crash finish")     # the first start of the trainer crashes, the restart finishes
        assert "training finished" in pod.wait_until_ended()

The words of PLAN say what each start of the trainer does; the last word serves all later starts. HUB_DOES is what a
push does, as a command of bash; DISK is what df tells of the run folder. The files starts, pushed and removed have the
arguments of the trainer, of pushes and of runpodctl.
"""

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

from helpers import ROOT
from processes import wait_for

# Stands in for Python, as far as the supervisor calls it. $POD is the folder of the pod, $POD/OUT names the run folder.
PYTHON = r"""#!/bin/bash
OUT=$(cat "$POD/OUT"; echo x); OUT=${OUT%x}
save() { cp "$POD/checkpoint" "$OUT/optim_$1.pt"; cp "$POD/checkpoint" "$OUT/model_$1.pt"; }
status() { printf '{"status": "%s", "reason": "%s"}\n' "$1" "$2" >"$TRAIN_STATUS_FILE"; }
hang() { echo $$ >>"$POD/trainer"; exec {never}<>"$POD/never"; for _ in {1..2000}; do read -rt 0.05 -u $never; done; }
trap 'save 00042; status stopped "signal SIGTERM"; exit 1' TERM
[[ $1 != rank ]] || { for fd in {3..20}; do eval "exec $fd>&-"; done; hang; } # torchrun hands on no open file
[[ ${!#} != --help ]] || exec printf 'usage\nflags\n'
[[ ${!#} != --check ]] || { printf 'a note\n%s\n2\n' "$OUT"; exec test ! -e "$POD/refuse"; }
case $* in
*hub.py\ check*) [[ ! -e $POD/no-token ]] ;;
*hub.py*) echo "${*:2}" >>"$POD/pushed"; eval "${HUB_DOES:-true}" ;;
*)  echo "${*:3}" >>"$POD/starts"
    plan=(${PLAN:-finish})
    start=$(wc -l <"$POD/starts")
    case ${plan[start - 1]:-${plan[-1]}} in
    finish) save 00010; status finished "" ;;
    limit) save 00010; status stopped "the time limit" ;;
    hang) hang ;;
    ranks) trap 'echo Traceback; exit 1' TERM; "$0" rank & setsid "$0" rank & a=$!; setsid "$0" rank & wait $a $! ;;
    unmount) mv "$OUT" "$OUT.gone" ;;
    user-error) status user_error "--max-lr -1 must be positive"; exit 1 ;;
    save-crash) save 00010; exit 3 ;;
    crash) exit 3 ;;
    esac ;;
esac
"""

# Starts the supervisor as train.sh does, with the stand-in for Python and other waits.
LAUNCH = """
import json, sys
from cloud import supervisor
from system.cli import run_cli
vars(supervisor).update(json.loads(sys.argv.pop(1)))
run_cli(supervisor.main)
"""


class Pod:
    """A folder in which train.sh is called, and a PATH of stand-ins."""

    def __init__(self, root: Path, run: str = "run"):
        self.root, self.run = root, root / run
        (root / "bin").mkdir(parents=True)
        (root / "OUT").write_text(str(self.run))
        os.mkfifo(root / "never")
        with zipfile.ZipFile(root / "checkpoint", "w") as archive:
            archive.writestr("weights", "")
        self.add_tool("python", PYTHON)
        self.add_tool("runpodctl", '#!/bin/sh\necho "$@" >> "$POD/removed"\n')
        self.add_tool("df", "#!/bin/sh\necho Type Mounted on\necho ${DISK:-ext4 /}\n")
        self.env = {"PATH": f"{root}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "POD": str(root)}
        self.env |= {"RUNPOD_POD_ID": "pod7"}
        # The supervisor's constants, those of time in seconds.
        self.constants = {"PYTHON": f"{root}/bin/python", "POLL_S": 0.02, "SHOW_LOG_S": 0, "RESTART_DELAY_S": 0.02}
        self.constants |= {"PUSH_RETRY_S": 30, "PUSH_PAUSE_S": 0.02, "REMOVE_DELAY_S": 0.02}
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

    def add_checkpoint(self, folder: Path, step: int, kinds=("optim", "model")) -> None:
        """Put a complete checkpoint of some step into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for kind in kinds:
            (folder / f"{kind}_{step:05d}.pt").write_bytes((self.root / "checkpoint").read_bytes())

    def command(self, *args: object) -> list[str]:
        """What train.sh runs."""
        return [sys.executable, "-c", LAUNCH, json.dumps(self.constants), *map(str, args)]

    def start(self, *args: object, check=True, **env: str) -> subprocess.CompletedProcess:
        """Call train.sh with these arguments and settings; returns once the run is in the background."""
        how = {"cwd": self.root, "env": {**self.env, **env}, "text": True, "timeout": 60}
        done = subprocess.run(self.command(*args), stdin=subprocess.DEVNULL, capture_output=True, **how)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        started = re.search(r", pid (\d+)", done.stdout)
        self.supervisor = int(started[1]) if started else self.supervisor
        return done

    def start_and_train(self, *args: object, **env: str) -> int:
        """Start a run that trains until it is stopped. Returns the trainer's process id."""
        self.start(*args, **{"PLAN": "hang", **env})
        wait_for(lambda: self.read("trainer").strip())
        return int(self.read("trainer").split()[-1])

    def read(self, name: str) -> str:
        """The content of a file of the pod; "" if it does not exist."""
        path = self.root / name
        return path.read_text() if path.exists() else ""

    def log(self) -> str:
        """The logs of all starts."""
        return "".join(path.read_text() for path in sorted(self.run.glob("train-*.log")))

    def wait_until_ended(self) -> str:
        """Wait until the supervisor has ended. Returns the log."""
        wait_for(lambda: not is_alive(self.supervisor))
        return self.log()


def is_alive(pid: int) -> bool:
    """Whether the process runs. One that has ended and only waits for its parent (state Z) does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
