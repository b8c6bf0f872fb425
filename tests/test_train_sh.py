"""train.sh: start, log out, restart, stop, publish, remove the pod. Trainer, Hub, torchrun and the tools of the cloud
are small stand-ins on PATH; train.sh itself is the real one, copied beside them."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(
    shutil.which("setsid") is None or shutil.which("flock") is None, reason="needs util-linux"
)

TORCHRUN = """#!{python}
# Ranks in sessions of their own, as torchrun starts them; dies of SIGTERM; fails if a rank fails.
import os, pathlib, subprocess, sys
starts = pathlib.Path(sys.argv[3]).parent / "starts"
with open(starts, "a") as f:
    f.write(" ".join(sys.argv[4:]) + "\\n")
count = str(len(starts.read_text().splitlines()))
n = int(sys.argv[2].split("=")[1])
env = lambda r: {{**os.environ, "RANK": str(r), "START": count}}
ranks = [subprocess.Popen([sys.executable, *sys.argv[3:]], env=env(r), start_new_session=True) for r in range(n)]
sys.exit(any([r.wait() for r in ranks]))
"""

TRAINER = """
import os, pathlib, signal, sys, time
args, here = sys.argv[1:], pathlib.Path(__file__).parent
last = lambda flag: [b for a, b in zip(args, args[1:]) if a == flag][-1:]
resumed = [str(pathlib.Path(p).parent) for p in last("--resume") if p.endswith(".pt")]
preset = next((a for a in args[:1] if a[0] != "-"), "gpt2-124m")
out = pathlib.Path((last("--out-dir") or resumed or ["log/" + preset])[0])
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
    print("stopped by the time limit at step 10, all saved; resume with: ...", flush=True)
if deed.endswith("fail"):
    sys.exit(3)
while deed.endswith("hang"):
    time.sleep(0.05)
"""

HUB = """
import pathlib, sys
here = pathlib.Path(__file__).parent
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
        (root / "hub.py").write_text(HUB)
        (root / "push_fails").write_text("0")
        self.tool("torchrun", TORCHRUN.format(python=sys.executable))
        self.tool("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        self.tool("runpodctl", f'#!/bin/sh\necho "$@" >> {root}/removed\n')
        self.tool("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: a)'\necho 'GPU 1: NVIDIA H100 (UUID: b)'\n")
        drop = (
            "CUDA_VISIBLE_DEVICES",
            "PUSH_TO",
            "REMOVE_POD",
            "SHUTDOWN_CMD",
            "PERSISTENT",
            "BUDGET_USD",
            "RUNPOD_POD_ID",
        )
        self.env = {k: v for k, v in os.environ.items() if k not in drop}
        self.env |= {"PATH": f"{self.bin}:{os.environ['PATH']}", "RUNPOD_POD_ID": "pod7", "START_WAIT": "0"}
        self.env |= {"RESTART_DELAY": "0", "REMOVE_DELAY": "0"}

    def tool(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, *args, plan="ok", check=True, **env):
        (self.root / "plan").write_text(plan)
        command = ["bash", str(self.root / "train.sh"), *args]
        done = subprocess.run(
            command,
            cwd=self.root,
            env={**self.env, **env},
            text=True,
            capture_output=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
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

    def hanging(self, ranks=2):
        self.wait(lambda: all(self.pid(f"rank{r}") for r in range(ranks)))
        time.sleep(0.2)  # the handler of SIGTERM is set before; this is for slow writes of the file itself


def alive(pid):
    """Running, and not merely waiting to be reaped."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path)
    yield pod
    for path in tmp_path.rglob("*"):  # only what this test started, by the ids it wrote down
        if path.name in ("train.pid", "rank0", "rank1") and path.read_text().strip():
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_plain_start(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    assert "2 process(es)," in done.stdout and "tail -f" in done.stdout and "kill $(cat" in done.stdout
    log = pod.ended()
    assert pod.starts() == ["gpt2-124m --max-steps 5 --resume auto"]
    assert "--standalone --nproc_per_node=2" in log and "training finished" in log
    assert "this machine stays: REMOVE_POD is not 1" in log
    assert not pod.read("pushed") and not pod.read("removed")
    assert all(line[:4].isdigit() for line in log.splitlines() if "train.sh:" in line)  # dated


@pytest.mark.parametrize(
    "args, env, processes, out",
    [
        ([], {}, 2, "log/gpt2-124m"),
        (["--max-steps", "1"], {"CUDA_VISIBLE_DEVICES": "3"}, 1, "log/gpt2-124m"),
        (["overfit", "--device=cpu"], {}, 1, "log/overfit"),
        (["overfit", "--out-dir", "o p"], {"CUDA_VISIBLE_DEVICES": ""}, 1, "o p"),
        (["--out_dir=x", "--resume", "none"], {"NPROC": "1"}, 1, "x"),
        (["--resume", "y/model_00010.pt"], {}, 2, "y"),
    ],
)
def test_processes_and_run_folder(pod, args, env, processes, out):
    pod.start(*args, plan="usererror", **env)
    assert f"--nproc_per_node={processes} " in pod.ended(out)
    assert pod.starts()[0].count("--resume") == 1


def test_no_gpu_is_one_process(pod):
    pod.tool("nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert "1 process(es) on the CPU" in pod.start().stdout
    pod.ended()


def test_old_form(pod):
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    (run / "model_19072.pt").write_text("old weights")
    pod.start("model_19072.pt", "2", "--max-lr", "1e-4")
    pod.ended("log/mine")
    assert pod.starts() == [f"--resume {run}/model_19072.pt --epochs 2 --max-lr 1e-4"]
    assert (run / "model_19072.pt").read_text() == "old weights"
    (pod.root / "log" / "other").mkdir()
    (pod.root / "log" / "other" / "model_19072.pt").write_text("")
    for args, says in (
        (["model_19072.pt", "2"], "2 such files"),
        (["model_7.pt"], "0 such files"),
        (["log/mistyped/model_19072.pt"], "no checkpoint log/mistyped/model_19072.pt"),
        (["log/mine/model_19073.pt"], f"there: {run}/model_00010.pt {run}/model_19072.pt"),
        (["log/mine/model_19072.pt", "two"], "epochs two"),
    ):
        done = pod.start(*args, check=False)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and says in done.stderr


def test_the_old_form_again_goes_on_where_the_run_is_by_now(pod):
    """As the line `stop:` says; the trainer itself would refuse, because that checkpoint is no longer the newest, and
    --keep may have removed it."""
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    for step in (19_072, 9_000, 100_000):
        (run / f"model_{step:05d}.pt").write_text("")
        said = pod.start("log/mine/model_19072.pt", "2", "--out-dir", "log/mine").stdout  # the stand-in needs --out-dir
        assert ("past model_19072.pt: going on from model_100000.pt" in said) == (step == 100_000)
        pod.ended("log/mine")
    (run / "model_19072.pt").unlink()
    pod.start("log/mine/model_19072.pt", "2")
    pod.ended("log/mine")
    early, late = (f"--resume {run}/model_{step}.pt --epochs 2" for step in (19_072, 100_000))
    assert pod.starts() == [f"{early} --out-dir log/mine"] * 2 + [f"{late} --out-dir log/mine", late]


def test_an_earlier_checkpoint_is_not_replaced_by_a_later_one(pod):
    """To go back is not to go on: with --resume, or into another folder, the trainer sees what was typed."""
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    for name in ("model_00500.pt", "model_00900.pt"):
        (run / name).write_text("")
    pod.start("--resume", "log/mine/model_00500.pt")
    pod.ended("log/mine")
    pod.start("log/mine/model_00500.pt", "2", "--out-dir", "fork")
    pod.ended("fork")
    assert pod.starts() == [
        "--resume log/mine/model_00500.pt",
        f"--resume {run}/model_00500.pt --epochs 2 --out-dir fork",
    ]


def test_survives_the_death_of_the_shell_that_started_it(pod):
    """The launcher runs in a session of its own, which is killed as a logout does it, while it still shows the log."""
    (pod.root / "plan").write_text("hang")
    command = ["bash", str(pod.root / "train.sh")]
    shell = subprocess.Popen(
        command, cwd=pod.root, env={**pod.env, "START_WAIT": "60"}, start_new_session=True, stdout=subprocess.PIPE
    )
    pod.hanging()
    os.killpg(shell.pid, signal.SIGHUP)
    os.killpg(shell.pid, signal.SIGKILL)
    shell.wait()
    os.kill(pod.pid(), signal.SIGHUP)
    time.sleep(0.3)
    assert alive(pod.pid()) and alive(pod.pid("rank0")) and alive(pod.pid("rank1"))
    os.kill(pod.pid(), signal.SIGTERM)
    assert "training stopped" in pod.ended()


def test_stop_saves_and_keeps_everything_where_it_is(pod):
    pod.start(plan="hang", PUSH_TO="me/x", REMOVE_POD="1")
    pod.hanging()
    ranks = pod.pid("rank0"), pod.pid("rank1")
    os.kill(pod.pid(), signal.SIGTERM)
    log = pod.ended()
    assert "saved on SIGTERM" in log and "training stopped" in log and "this machine stays" in log
    assert not any(map(alive, ranks)) and not pod.read("pushed") and not pod.read("removed")
    assert len(pod.starts()) == 1  # a stop is not a failure


def test_one_run_a_folder(pod):
    pod.start(plan="hang")
    pod.hanging()
    second = pod.start(check=False)
    assert second.returncode == 1 and "already" in second.stderr and "train.pid" in second.stderr
    os.kill(pod.pid(), signal.SIGKILL)  # only train.sh dies: its torchrun still trains, so the folder is still taken
    pod.wait(lambda: not alive(pod.pid()))
    third = pod.start(check=False)
    assert third.returncode == 1 and str(pod.pid("rank0")) in third.stderr
    assert len(pod.starts()) == 1


def test_restarts_until_it_works(pod):
    pod.start("--resume", "elsewhere/model_00005.pt", "--out-dir", "o", plan="diskfail savefail ok")
    log = pod.ended("o")
    first, second, third = pod.starts()
    assert first == second == "--resume elsewhere/model_00005.pt --out-dir o"  # nothing of its own to go on from yet
    assert third == first + f" --resume {pod.root}/o"
    assert log.count("exit code") == 2 and "training finished" in log


def test_gives_up_after_max_restarts(pod):
    pod.start(plan="fail", MAX_RESTARTS="2")
    log = pod.ended()
    assert len(pod.starts()) == 3 and "restart 2 of 2" in log and "training failed: exit code" in log


def test_an_error_of_the_user_is_not_restarted_and_shown_at_once(pod):
    done = pod.start(plan="usererror", START_WAIT="20", check=False)
    assert done.returncode == 1 and "--max-lr -1 must be positive" in done.stdout and "ended at once" in done.stderr
    assert len(pod.starts()) == 1


@pytest.mark.parametrize(
    "words, says", [(["quikstart"], "did you mean 'quickstart'"), (["--max-step", "5"], "--max-steps")]
)
def test_what_the_trainer_would_refuse_is_refused_at_once(words, says, tmp_path):
    env = {**os.environ, "NPROC": "1"}
    done = subprocess.run(
        ["bash", str(ROOT / "train.sh"), *words], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())  # nothing was begun


def test_killed_torchrun_leaves_no_rank_behind(pod):
    pod.start(plan="hang ok")
    pod.hanging()
    ranks = pod.pid("rank0"), pod.pid("rank1")
    with open(f"/proc/{ranks[0]}/status") as f:
        torchrun = int(next(line for line in f if line.startswith("PPid:")).split()[1])
    os.kill(torchrun, signal.SIGKILL)
    log = pod.ended()
    assert not any(map(alive, ranks)) and "processes it left" in log and "training finished" in log
    assert pod.starts() == ["--resume auto"] * 2


# ---- publish and leave ----


def test_push_then_remove(pod):
    (pod.root / "push_fails").write_text("1")  # the network hiccups once
    pod.start(PUSH_TO="me/gpt2", REMOVE_POD="1")
    log = pod.ended()
    assert pod.read("pushed").splitlines() == [f"push-model {pod.root}/log/gpt2-124m me/gpt2"] * 2
    assert pod.read("removed") == "pod delete pod7\n"
    assert log.index("push to") < log.index("the weights are at me/gpt2") < log.index("running: runpodctl")


@pytest.mark.parametrize("plan", ["limit", "savefail"])
def test_a_run_that_is_not_over_is_pushed_with_what_resuming_needs(pod, plan):
    pod.start(plan=plan, PUSH_TO="me/gpt2", REMOVE_POD="1", MAX_RESTARTS="0")
    log = pod.ended()
    assert pod.read("pushed") == f"push-model {pod.root}/log/gpt2-124m me/gpt2 --with-optimizer\n"
    assert pod.read("removed") and "training finished" not in log


def test_new_checkpoints_are_pushed_while_training_goes_on(pod):
    pod.start(plan="savehang", PUSH_TO="me/mine", PUSH_EVERY="1")
    pod.wait(lambda: pod.read("pushed"))
    time.sleep(2.5)  # nothing new: nothing is pushed
    out = pod.root / "log/gpt2-124m"
    assert pod.read("pushed").splitlines() == [f"push-model {out} me/mine --with-optimizer"]
    for kind in ("optim", "model"):
        (out / f"{kind}_100000.pt").write_text("weights")
    pod.wait(lambda: len(pod.read("pushed").splitlines()) == 2)
    os.kill(pod.pid(), signal.SIGTERM)
    log = pod.ended()
    assert "pushing model_100000.pt to me/mine while training continues" in log and "Terminated" not in log
    time.sleep(2)
    assert len(pod.read("pushed").splitlines()) == 2  # asked to stop, it pushes nothing more


def test_the_only_copy_is_never_removed(pod):
    (pod.root / "push_fails").write_text("9")
    pod.start(PUSH_TO="me/gpt2", REMOVE_POD="1", PERSISTENT="1")
    log = pod.ended()
    assert "push failed" in log and "only copy" in log and not pod.read("removed")
    assert len(pod.read("pushed").splitlines()) == 3


@pytest.mark.parametrize(
    "plan, env, removed",
    [
        ("ok", {"PERSISTENT": "1"}, True),
        ("savefail", {"PUSH_TO": "me/x"}, True),  # pushed what there is
        ("savefail", {"PUSH_TO": "me/x", "KEEP_ON_FAILURE": "1"}, False),
        ("fail", {"PUSH_TO": "me/x"}, True),  # nothing to lose, and the clock ticks
    ],
)
def test_when_the_pod_goes(pod, plan, env, removed):
    pod.start(plan=plan, REMOVE_POD="1", MAX_RESTARTS="0", **env)
    log = pod.ended()
    assert bool(pod.read("removed")) == removed, log
    assert bool(pod.read("pushed")) == (plan == "savefail")


def test_shutdown_command_of_another_cloud_and_its_failure(pod):
    pod.start(REMOVE_POD="1", PERSISTENT="1", SHUTDOWN_CMD=f"echo off > {pod.root}/off; exit 4", RUNPOD_POD_ID="")
    log = pod.ended()
    assert pod.read("off") == "off\n" and not pod.read("removed") and "THAT FAILED (exit code 4)" in log


@pytest.mark.parametrize("words, gone", [("remove pod", True), ("terminate pod", False)])
def test_a_runpodctl_of_other_words(pod, words, gone):
    """Version 1 says `remove pod`, 2 `pod delete`; one that knows neither must not pass for success."""
    pod.tool("runpodctl", f'#!/bin/sh\n[ "$1 $2" = "{words}" ] || exit 1\necho "$@" > {pod.root}/removed\n')
    pod.start(REMOVE_POD="1", PERSISTENT="1")
    log = pod.ended()
    assert pod.read("removed") == ("remove pod pod7\n" if gone else "") and ("THAT FAILED" in log) != gone


def test_kill_in_the_last_seconds_keeps_the_pod(pod):
    pod.start(REMOVE_POD="1", PERSISTENT="1", REMOVE_DELAY="60")
    pod.wait(lambda: "removed in 60 seconds" in pod.log())
    os.kill(pod.pid(), signal.SIGTERM)
    assert "stays: asked to stop" in pod.ended() and not pod.read("removed")


def test_budget_becomes_a_time_limit(pod):
    pod.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", plan="fail ok")
    assert "7200 seconds" in pod.ended()  # two GPUs at 2.5 an hour
    limits = [int(s.rsplit(" ", 1)[1]) for s in pod.starts()]
    assert 7190 <= limits[1] <= limits[0] <= 7200
    assert all("--gpu-hour-usd 2.5 --time-limit" in s for s in pod.starts())
    pod.start("--time-limit", "3h50m", "--out-dir", "b")
    pod.ended("b")
    assert "--time-limit 3h50m" in pod.starts()[-1]


@pytest.mark.parametrize(
    "env, says",
    [
        ({"REMOVE_POD": "1"}, "only copy"),
        ({"REMOVE_POD": "1", "PERSISTENT": "1", "RUNPOD_POD_ID": ""}, "SHUTDOWN_CMD"),
        ({"PUSH_TO": "justaname"}, "owner/name"),
        ({"PUSH_EVERY": "3600"}, "needs PUSH_TO"),
        ({"PUSH_EVERY": "1h", "PUSH_TO": "me/x"}, "PUSH_EVERY=1h"),
        ({"BUDGET_USD": "5"}, "GPU_HOUR_USD"),
        ({"BUDGET_USD": "lots", "GPU_HOUR_USD": "1"}, "BUDGET_USD=lots"),
        ({"MAX_RESTARTS": "1.5"}, "MAX_RESTARTS=1.5"),
        ({"NPROC": "two"}, "NPROC=two"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(pod, env, says):
    done = pod.start(check=False, **env)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and says in done.stderr
    assert not pod.starts() and not (pod.root / "log").exists()


def test_help(pod):
    text = pod.start("--help").stdout
    for (
        name
    ) in "NPROC MAX_RESTARTS BUDGET_USD PUSH_TO REMOVE_POD SHUTDOWN_CMD PERSISTENT KEEP_ON_FAILURE START_WAIT".split():
        assert name in text
    assert "set -euo" not in text and not pod.starts()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / ".ci" / "run"], check=True)
