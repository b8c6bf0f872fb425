"""train.sh: start, log out, restart, stop, publish, remove the pod. Trainer, Hub, torchrun and the tools of the cloud
are small stand-ins; train.sh itself is the real one, copied beside them."""

import os
import shutil
import signal
import subprocess
import time

import pytest
from faults import hub_server
from helpers import ROOT
from pod import Pod, alive

from training import checkpoint
from training.config import TrainConfig

there = shutil.which("setsid") and shutil.which("flock")
pytestmark = pytest.mark.skipif(not there, reason="needs util-linux")


@pytest.fixture
def pod(tmp_path):
    with Pod(tmp_path) as pod:
        yield pod


def test_plain_start(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    assert "2 process(es)," in done.stdout and "tail -f" in done.stdout and "kill $(cat" in done.stdout
    log = pod.ended()
    assert pod.starts() == ["gpt2-124m --resume auto --max-steps 5"]
    assert "train.sh gpt2-124m --max-steps 5\n" in log  # what was typed
    assert "--standalone --nproc_per_node=2" in log and "training finished" in log
    assert "this machine stays: REMOVE_POD is not 1" in log
    assert not pod.read("pushed") and not pod.read("removed")
    assert all(line[:4].isdigit() for line in log.splitlines() if "train.sh:" in line)  # dated


@pytest.mark.parametrize(
    "args, env, processes, out",
    [
        (["overfit", "--device=cpu"], {}, 1, "log/overfit"),
        (["overfit", "--out-dir", "o p"], {"GPUS": "0"}, 1, "o p"),
        (["--out-dir=x", "--resume", "none"], {"NPROC": "3"}, 3, "x"),
        (["--resume", "y/model_00010.pt"], {}, 2, "y"),
    ],
)
def test_processes_and_run_folder(pod, args, env, processes, out):
    said = pod.start(*args, plan="usererror", **env).stdout
    assert f"{processes} process(es)" in said and (" on the CPU" in said) == (processes == 1)
    assert f"--nproc_per_node={processes} " in pod.ended(out)


def test_a_checkpoint_and_epochs_go_on_from_the_newest_of_that_run(pod):
    """Also when given again, as the line `stop:` says: the run is past that checkpoint then, and --keep may have
    removed it."""
    (run := pod.root / "log" / "mine").mkdir(parents=True)
    (run / "model_19072.pt").write_text("old weights")
    pod.start("model_19072.pt", "2", "--max-lr", "1e-4")
    pod.ended("log/mine")
    assert (run / "model_19072.pt").read_text() == "old weights"
    (run / "model_19072.pt").unlink()
    pod.start("log/mine/model_19072.pt", "2")
    pod.ended("log/mine")
    again = f"--resume auto --resume {run} --epochs 2"
    assert pod.starts() == [f"{again} --max-lr 1e-4", again]


@pytest.mark.parametrize("there, count", [([], 0), (["mine", "other"], 2)])
def test_a_checkpoint_by_its_name_alone_is_looked_for(pod, there, count):
    for name in there:
        (pod.root / "log" / name).mkdir(parents=True)
        (pod.root / "log" / name / "model_19072.pt").touch()
    done = pod.start("model_19072.pt", "2", check=False)
    assert done.returncode == 1 and done.stderr.startswith(f"error: model_19072.pt: {count} such files")


def test_an_earlier_checkpoint_is_not_replaced_by_a_later_one(pod):
    """To go back is not to go on: with --resume, or into another folder, the trainer sees what was typed."""
    (run := pod.root / "log" / "mine").mkdir(parents=True)
    for name in ("model_00500.pt", "model_00900.pt"):
        (run / name).touch()
    pod.start("--resume", "log/mine/model_00500.pt")
    pod.ended("log/mine")
    pod.start("log/mine/model_00500.pt", "2", "--out-dir", "fork")
    pod.ended("fork")
    seen = [start.split("--resume ")[-1] for start in pod.starts()]
    assert seen == ["log/mine/model_00500.pt", f"{run}/model_00500.pt"]


def test_survives_the_death_of_the_shell_that_started_it(pod):
    """The launcher runs in a session of its own, which is killed as a logout does it, while it still shows the log."""
    (pod.root / "plan").write_text("hang")
    command = ["bash", str(pod.root / "train.sh")]
    how = {"cwd": pod.root, "env": {**pod.env, "START_WAIT": "60"}, "stdout": subprocess.PIPE}
    shell = subprocess.Popen(command, start_new_session=True, **how)
    ranks = pod.hanging()
    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(shell.pid, number)
    shell.wait()
    os.kill(pod.pid(), signal.SIGHUP)
    time.sleep(0.3)
    assert alive(pod.pid()) and all(map(alive, ranks))
    os.kill(pod.pid(), signal.SIGTERM)
    assert "training stopped" in pod.ended()


def test_stop_saves_and_keeps_everything_where_it_is(pod):
    pod.start(plan="hang", PUSH_TO="me/x", REMOVE_POD="1")
    ranks = pod.hanging()
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
    assert first == second and first.endswith("--resume elsewhere/model_00005.pt --out-dir o")  # nothing of its own yet
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


REFUSED = {
    "quikstart": "did you mean 'quickstart'",
    "--resume no/model_00005.pt": "no checkpoint no/model_00005.pt",
    "overfit": "data folder data/stdlib does not exist",
}


@pytest.mark.parametrize("words, says", REFUSED.items())
def test_what_the_trainer_would_refuse_is_refused_at_once(words, says, tmp_path):
    command = ["bash", str(ROOT / "train.sh"), *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1 and says in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())  # nothing was begun


def test_flags_are_read_as_the_trainer_reads_them(pod):
    """With its own parser: other spellings of a flag, and the settings that a checkpoint has saved."""
    pod.real_parser()
    tokens = ["--data-dir", "hf://me/tokens"]
    said = pod.start("overfit", *tokens, "--out_dir=x", "--device", "cpu", plan="usererror").stdout
    assert f"1 process(es) on the CPU, run folder {pod.root}/x" in said
    pod.ended("x")
    saved = TrainConfig(out_dir="elsewhere", data_dir=tokens[1], time_limit="3h50m").to_dict()
    state = {"step": 5, "max_steps": 9, "optimizers": [], "rng": [], "scaler": {}, "config": saved, "data": ""}
    checkpoint.write(pod.root / "x" / "model_00005.pt", {"format": 1})
    more = {"format": 1, "record": {}, "best": None, "evaluated": False}
    checkpoint.write(pod.root / "x" / "optim_00005.pt", state | more)
    budget = {"BUDGET_USD": "1", "GPU_HOUR_USD": "1"}  # which takes the place of the time limit of another start
    assert f"run folder {pod.root}/x," in pod.start("x/model_00005.pt", "2", plan="usererror", **budget).stdout
    pod.ended("x")


def test_what_would_fail_at_the_end_is_refused_at_once(pod):
    """With the real hub.py: a repository that all can read, a token that may not write."""
    (pod.root / "hub.py").unlink()
    (pod.root / "hub.py").symlink_to(ROOT / "hub.py")
    with hub_server.start(pod.root / "hub") as hub:
        (pod.root / "hub" / "models" / "tester" / "x").mkdir(parents=True)  # made beforehand, and public

        def start(**env):
            return pod.start(check=False, **hub.env(), PUSH_TO="tester/x", **env)

        assert "PUSH_PUBLIC=1" in start().stderr
        hub.read_only = True
        done = start(PUSH_PUBLIC="1")
        assert done.returncode == 1 and "403" in done.stderr and "write, to push" in done.stderr
        assert not pod.starts() and not (pod.root / "log").exists()
        hub.read_only = False
        assert start(PUSH_PUBLIC="1", plan="usererror").returncode == 0
        pod.ended()


def test_killed_torchrun_leaves_no_rank_behind(pod):
    pod.start(plan="hang ok")
    *ranks, torchrun = pod.hanging()
    os.kill(torchrun, signal.SIGKILL)
    log = pod.ended()
    assert not any(map(alive, ranks)) and "processes it left" in log and "training finished" in log
    assert pod.starts() == ["--resume auto"] * 2


# ---- publish and leave ----


def test_push_then_remove(pod):
    (pod.root / "push_fails").write_text("1")  # the network hiccups once
    pod.start(PUSH_TO="me/gpt2", REMOVE_POD="1")
    log = pod.ended()
    assert pod.read("pushed").splitlines() == [f"push-model {pod.root}/log/gpt2-124m me/gpt2 --steps newest"] * 2
    assert pod.read("removed") == "pod delete pod7\n"
    assert log.index("push to") < log.index("the weights are at me/gpt2") < log.index("running: runpodctl")


@pytest.mark.parametrize("plan", ["limit", "savefail"])
def test_a_run_that_is_not_over_is_pushed_with_what_resuming_needs(pod, plan):
    which = {"PUSH_TO": "me/gpt2", "PUSH": "best", "PUSH_PUBLIC": "1"}
    pod.start(plan=plan, **which, REMOVE_POD="1", MAX_RESTARTS="0")
    log = pod.ended()
    assert pod.read("pushed") == f"push-model {pod.root}/log/gpt2-124m me/gpt2 --public --steps best --with-optimizer\n"
    assert pod.read("checked") == "me/gpt2 --public"
    assert pod.read("removed") and "training finished" not in log


def test_new_checkpoints_are_pushed_while_training_goes_on(pod):
    pod.start(plan="savehang", PUSH_TO="me/mine", PUSH_EVERY="1")
    pod.wait(lambda: pod.read("pushed"))
    time.sleep(1.5)  # nothing new: nothing is pushed
    out = pod.root / "log/gpt2-124m"
    assert pod.read("pushed").splitlines() == [f"push-model {out} me/mine --with-optimizer"]
    for kind in ("optim", "model"):
        (out / f"{kind}_100000.pt").write_text("weights")
    pod.wait(lambda: len(pod.read("pushed").splitlines()) == 2)
    os.kill(pod.pid(), signal.SIGTERM)
    log = pod.ended()
    assert "pushing model_100000.pt to me/mine while training continues" in log and "Terminated" not in log
    time.sleep(1.2)
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
        ("ok", {"PERSISTENT": "1"}, True),  # of a failure what there is was pushed, in the test before
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
    assert all(s.startswith("--resume auto --gpu-hour-usd 2.5 --time-limit ") for s in pod.starts())
    both = pod.start("--time-limit=3h50m", check=False, BUDGET_USD="10", GPU_HOUR_USD="2.5")
    assert both.returncode == 1 and "leave out --time-limit 3h50m" in both.stderr
    pod.start("--time-limit", "3h50m", "--out-dir", "b")
    pod.ended("b")
    assert pod.starts()[-1] == "--resume auto --time-limit 3h50m --out-dir b"


@pytest.mark.parametrize(
    "env, says",
    [
        ({"REMOVE_POD": "1"}, "only copy"),
        ({"REMOVE_POD": "1", "PERSISTENT": "1", "RUNPOD_POD_ID": ""}, "SHUTDOWN_CMD"),
        ({"PUSH_TO": "justaname"}, "owner/name"),
        ({"PUSH_EVERY": "3600"}, "needs PUSH_TO"),
        ({"PUSH_PUBLIC": "1"}, "needs PUSH_TO"),
        ({"PUSH": "last", "PUSH_TO": "me/x"}, "newest, best or all"),
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
    names = "NPROC MAX_RESTARTS BUDGET_USD PUSH_TO REMOVE_POD SHUTDOWN_CMD PERSISTENT KEEP_ON_FAILURE START_WAIT"
    assert all(name in text for name in names.split())
    assert "set -euo" not in text and not pod.starts()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / "cloud" / "slurm.sbatch", ROOT / ".ci" / "run"], check=True)
