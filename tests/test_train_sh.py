"""train.sh: start, log out, restart, stop, publish, give the machine back.

The script is the real one; pod.py has stand-ins for what it calls. The last test has every real part but the Hub and
runpodctl.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from faults import hub_server
from helpers import ROOT, TINY_FLAGS, assert_curves_close, load_curve, make_shards, train_quickstart
from pod import Pod, is_alive
from processes import rank_pids, wait_for

from training import checkpoint

has_util_linux = shutil.which("setsid") and shutil.which("flock")
pytestmark = pytest.mark.skipif(not has_util_linux, reason="needs util-linux")


@pytest.fixture
def pod(tmp_path):
    with Pod(tmp_path) as pod:
        yield pod


@pytest.fixture
def rented(pod):
    """A pod of two GPUs whose end is to push, and then to remove it."""
    pod.env |= {"PUSH_TO": "me/x", "REMOVE_POD": "1", "GPU_HOUR_USD": "2.5"}
    return pod


# ------------------------------------------------------------------------- start


def test_start_says_how_to_follow_and_stop_and_runs_to_the_end(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    log = pod.wait_until_ended()

    assert "started: 2 process(es)" in done.stdout
    assert "--nproc_per_node=2 " in pod.read("starts")
    assert pod.read("starts").endswith("train_gpt2.py gpt2-124m --resume auto --max-steps 5\n")
    assert "training finished" in log
    assert not pod.read("pushed") and not pod.read("removed")
    follow = re.search("follow: +(.*)", done.stdout)[1]
    assert (
        "training finished" in subprocess.run(f"timeout 1 {follow}", shell=True, capture_output=True, text=True).stdout
    )


def test_users_own_train_log_and_older_logs_are_kept(pod):
    pod.run.mkdir()
    (pod.run / "train.log").write_text("from nohup")
    (pod.run / "train-20200101-000000.log").write_text("old")
    pod.start()
    pod.wait_until_ended()
    assert (pod.run / "train.log").read_text() == "from nohup"
    assert (pod.run / "train-20200101-000000.log").read_text() == "old"


def test_checkpoint_and_epochs_continue_its_run(pod):
    folder = pod.root / "log" / "mine"
    folder.mkdir(parents=True)
    (folder / "model_19072.pt").touch()

    pod.start("model_19072.pt", "2", "--max-lr", "1e-4")
    pod.wait_until_ended()
    (folder / "model_19072.pt").unlink()  # --keep may delete it; its run is still there
    pod.start("log/mine/model_19072.pt", "2")
    pod.wait_until_ended()

    first, second = pod.read("starts").splitlines()
    assert first.endswith(f"--resume auto --resume {folder} --epochs 2 --max-lr 1e-4")
    assert second.endswith(f"--resume {folder} --epochs 2")


@pytest.mark.parametrize("runs", [[], ["mine", "other"]])
def test_checkpoint_without_a_folder_must_be_in_one_run(pod, runs):
    for name in runs:
        (pod.root / "log" / name).mkdir(parents=True)
        (pod.root / "log" / name / "model_19072.pt").touch()
    done = pod.start("model_19072.pt", "2", check=False)
    assert done.returncode == 1 and f"{len(runs)} files" in done.stderr


@pytest.mark.parametrize("obstacle", ["refuse", "no-token"])
def test_nothing_is_begun_if_trainer_or_hub_refuses(pod, obstacle):
    (pod.root / obstacle).touch()
    done = pod.start(check=False, PUSH_TO="me/x")
    assert done.returncode == 1
    assert not pod.read("starts") and not pod.run.exists()


def test_trainer_answers_what_train_sh_asks(run_in_fork, tiny_args, tmp_path):
    ask = ["train_gpt2.py", "quickstart", *tiny_args, "--device", "cpu", "--out-dir", "x y", "--check"]
    assert run_in_fork(*ask, cwd=tmp_path).stdout.splitlines()[-2:] == [f"{tmp_path}/x y", "1"]
    done = run_in_fork(*ask[:-1], "--data-dir", "none", "--check", check=False, cwd=tmp_path)
    assert done.returncode == 1 and "none" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


REFUSED = """REMOVE_POD=1|only copy   REMOVE_POD=1,PERSISTENT=1,RUNPOD_POD_ID=|SHUTDOWN_CMD   PUSH_EVERY=60|PUSH_TO
PUSH=best|PUSH_TO   PUSH=last,PUSH_TO=a/b|newest   PUSH_EVERY=1h|PUSH_EVERY=1h   BUDGET_USD=5|GPU_HOUR_USD
BUDGET_USD=lots,GPU_HOUR_USD=1|lots   GPU_HOUR_USD=0|GPU_HOUR_USD=0   MAX_RESTARTS=1.5|1.5   NPROC=two|two
REMOVE_POD=yes|0 or 1   PERSISTENT=true|0 or 1   KEEP_ON_FAILURE=on|0 or 1   PUSH_RETRY_HOURS=all|all"""


@pytest.mark.parametrize("case", re.split(r"   |\n", REFUSED))
def test_bad_setting_is_refused_before_the_start(pod, case):
    settings, mentions = case.split("|")
    done = pod.start(check=False, **dict(word.split("=") for word in settings.split(",")))
    assert done.returncode == 1 and done.stderr.startswith("error: ") and mentions in done.stderr
    assert not pod.run.exists()


def test_help_explains_every_setting(pod):
    text = pod.start("--help").stdout
    settings = re.findall(r"^([A-Z_]+)=\$\{\1:-", (ROOT / "train.sh").read_text(), re.M)
    assert len(settings) == 18 and all(f"\n{name}=" in text for name in settings)
    assert "DISK_GB" in text and "set -euo" not in text and not pod.read("starts")


# ------------------------------------------------------------------------- one supervisor, logout, stop


def test_second_supervisor_is_refused_while_anything_of_the_first_lives(pod):
    trainer = pod.start_and_train()
    assert pod.start(check=False).returncode == 1

    # Only the supervisor dies: its trainer still trains.
    os.kill(pod.supervisor, signal.SIGKILL)
    pod.wait(lambda: not is_alive(pod.supervisor))
    done = pod.start(check=False)
    assert done.returncode == 1 and "already has a run" in done.stderr
    assert is_alive(trainer) and len(pod.read("starts").splitlines()) == 1


def test_file_system_without_locks_is_no_second_supervisor(pod):
    pod.add_tool("flock", "#!/bin/sh\nexit 65\n")
    pod.start()
    assert "training finished" in pod.wait_until_ended()


def test_run_survives_the_death_of_its_shell(pod):
    (pod.root / "plan").write_text("hang\n")
    how = {"cwd": pod.root, "env": {**pod.env, "START_WAIT": "60"}, "stdout": subprocess.DEVNULL}
    shell = subprocess.Popen(["bash", "train.sh"], start_new_session=True, **how)
    pod.wait(lambda: pod.read("trainer").strip())
    pod.supervisor = int(pod.read("run/train.pid"))

    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(shell.pid, number)
    shell.wait()
    os.kill(pod.supervisor, signal.SIGHUP)
    time.sleep(0.2)  # the time in which it would die
    assert is_alive(pod.supervisor) and is_alive(int(pod.read("trainer")))

    os.kill(pod.supervisor, signal.SIGTERM)
    assert "training stopped" in pod.wait_until_ended()


def test_stop_saves_and_keeps_the_machine(rented):
    trainer = rented.start_and_train()
    rented.start("stop", "run", plan="hang")
    log = rented.wait_until_ended()

    assert rented.read("run/model_00042.pt") and not is_alive(trainer)
    assert "training stopped" in log and "this machine stays" in log
    assert len(rented.read("starts").splitlines()) == 1  # a stop is no failure
    assert not rented.read("pushed") and not rented.read("removed")


def test_second_stop_does_not_kill_the_save(pod):
    """Ranks take a second signal as the order to die."""
    save_slowly = "trap 'echo x >>$POD/signals; /bin/sleep 0.5; save 00042; status stopped x; exit 1' TERM"
    pod.add_tool("python", re.sub("trap .* TERM", save_slowly, pod.read("bin/python")))
    pod.start_and_train()
    for _ in range(3):
        pod.start("stop", "run", plan="hang")
        time.sleep(0.05)
    pod.wait_until_ended()
    assert pod.read("run/model_00042.pt") and pod.read("signals") == "x\n"


def test_stop_touches_no_other_process(pod):
    assert pod.start("stop", "run", check=False).returncode == 1
    pod.run.mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (pod.run / "train.pid").write_text(f"{other.pid}\n")
        done = pod.start("stop", "run", check=False)
        assert done.returncode == 1 and "nothing was stopped" in done.stderr
        assert other.poll() is None
        other.kill()
    (pod.run / "train.pid").unlink()


# ------------------------------------------------------------------------- failures, restarts, budget


def test_crash_is_restarted_from_the_runs_own_checkpoint(pod):
    pod.start("--resume", "elsewhere/model_00005.pt", plan="crash save-crash finish")
    assert "training finished" in pod.wait_until_ended()

    first, second, third = pod.read("starts").splitlines()
    assert first == second  # it had no checkpoint of its own yet
    assert third == f"{first} --resume {pod.run}"


def test_restarts_end_after_max_restarts(pod):
    pod.start(plan="crash", MAX_RESTARTS="2")
    assert "training failed: exit code 3" in pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 3


def test_user_error_is_not_restarted_and_shown_at_once(pod):
    done = pod.start(plan="user-error finish", START_WAIT="20", check=False)
    assert done.returncode == 1 and "training failed: --max-lr -1 must be positive" in done.stdout
    pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 1

    # The status that it has left is not taken for that of a crash.
    (pod.root / "starts").unlink()
    pod.start(plan="crash finish")
    pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 2


def test_mode_that_does_not_train_is_not_restarted(pod):
    pod.start("--eval-only", plan="nothing")
    assert "training finished" in pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 1


def test_trainer_writes_the_status_that_train_sh_reads(run_in_fork, tiny_args, tmp_path):
    env = {"TRAIN_STATUS_FILE": str(tmp_path / "status.json")}
    train = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run", "--max-steps", "2"]

    def status(*flags):
        run_in_fork(*train, *flags, env=env, check=False)
        return json.loads((tmp_path / "status.json").read_text())["status"]

    assert status("--max-lr", "-1") == "user_error"
    assert status() == "finished"
    assert status() == "user_error"  # a run is never overwritten


def test_budget_is_the_time_limit_of_all_starts(pod):
    pod.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", plan="crash finish")
    pod.wait_until_ended()
    limits = [int(start.rsplit("--time-limit ", 1)[1]) for start in pod.read("starts").splitlines()]
    assert 7190 <= limits[1] <= limits[0] <= 7200  # seconds of two GPUs for ten dollars
    assert "--gpu-hour-usd 2.5" in pod.read("starts")

    done = pod.start("--time-limit=3h50m", check=False, BUDGET_USD="10", GPU_HOUR_USD="2.5")
    assert done.returncode == 1 and "--time-limit" in done.stderr


# ------------------------------------------------------------------------- push, and give the machine back


def test_finished_run_is_pushed_with_retries_then_the_pod_removed(rented):
    (rented.root / "push_fails").write_text("2")
    rented.start()
    log = rented.wait_until_ended()

    assert rented.read("checked") == "me/x\n"
    assert rented.read("pushed") == f"push-model {rented.run} me/x --steps newest\n" * 3
    assert rented.read("removed") == "pod delete pod7\n"
    assert log.index("that push failed") < log.index("the weights are at me/x") < log.rindex("pod delete")


@pytest.mark.parametrize(
    "plan, env, flags",
    [
        ("limit", {"PUSH": "best", "PUSH_PUBLIC": "1"}, "--public --steps best --with-optimizer"),
        ("save-crash", {}, "--steps newest --with-optimizer"),
        ("finish", {"PUSH_OPTIMIZER": "1"}, "--steps newest --with-optimizer"),
    ],
)
def test_run_that_may_be_resumed_is_pushed_with_its_optimizer(rented, plan, env, flags):
    rented.start(plan=plan, MAX_RESTARTS="0", **env)
    rented.wait_until_ended()
    assert rented.read("pushed") == f"push-model {rented.run} me/x {flags}\n"
    assert rented.read("removed") == "pod delete pod7\n"


OVER_SOON = {"PUSH_RETRY_HOURS": "0.0002"}  # less than a second


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_only_copy_of_the_weights_is_never_removed(rented, fault):
    if fault == "hangs":
        (rented.root / "hang").touch()
    (rented.root / "push_fails").write_text("1000000")
    rented.start(**OVER_SOON)
    log = rented.wait_until_ended()
    assert rented.read("pushed") and not rented.read("removed")
    assert "it costs $5.00 an hour until you remove it: runpodctl pod delete pod7" in log.splitlines()[-1]


@pytest.mark.parametrize(
    "mounted_at, env, removed",
    [
        ("/workspace", {}, "pod stop pod7\n"),  # a disk that outlives a stop
        ("/mnt", {"STOP_CMD": "echo off > $POD/removed"}, "off\n"),
        ("/workspace", {"PERSISTENT": "1"}, "pod delete pod7\n"),
        ("/workspace", {"KEEP_ON_FAILURE": "1"}, ""),
    ],
)
def test_failed_push_stops_the_machine_or_removes_it_if_the_disk_stays(rented, mounted_at, env, removed):
    rented.add_tool("df", f"#!/bin/sh\necho Type Mounted on\necho nfs4 {mounted_at}\n")
    (rented.root / "push_fails").write_text("1000000")
    rented.start(plan="save-crash", MAX_RESTARTS="0", **OVER_SOON, **env)
    rented.wait_until_ended()
    assert rented.read("removed") == removed


def test_machine_without_weights_is_removed(rented):
    rented.start(plan="crash", MAX_RESTARTS="0")
    rented.wait_until_ended()
    assert rented.read("removed") and not rented.read("pushed")


def test_folder_that_cannot_be_listed_may_have_weights(rented):
    rented.add_tool("ls", "#!/bin/sh\nexit 2\n")
    (rented.root / "push_fails").write_text("1000000")
    rented.start(**OVER_SOON)
    rented.wait_until_ended()
    assert not rented.read("removed")


@pytest.mark.parametrize("kind", ["overlay", "tmpfs"])
def test_persistent_is_refused_on_the_machines_own_storage(rented, kind):
    rented.add_tool("df", f"#!/bin/sh\necho Type Mounted on\necho {kind} /\n")
    done = rented.start(check=False, PERSISTENT="1")
    assert done.returncode == 1 and kind in done.stderr and not rented.read("starts")


def test_new_checkpoints_are_pushed_while_training_continues(pod):
    pod.start_and_train(plan="save-hang", PUSH_TO="me/x", PUSH_EVERY="7")
    push = f"push-model {pod.run} me/x --with-optimizer --temporary\n"
    pod.wait(lambda: pod.read("pushed") == push)
    slept = len(pod.read("slept"))
    pod.wait(lambda: len(pod.read("slept")) > slept + 8)
    assert pod.read("pushed") == push  # the same checkpoint is pushed once

    for kind in ("optim", "model"):
        (pod.run / f"{kind}_100000.pt").touch()
    pod.wait(lambda: pod.read("pushed") == 2 * push)

    # After a stop nothing looks for checkpoints any more.
    os.kill(pod.supervisor, signal.SIGTERM)
    pod.wait_until_ended()
    slept = pod.read("slept")
    time.sleep(0.2)
    assert pod.read("slept") == slept and pod.read("pushed") == 2 * push


@pytest.mark.parametrize("moment", ["push", "delay"])
def test_kill_at_the_end_keeps_the_machine(rented, moment):
    rented.add_tool("sleep", "#!/bin/sh\nexec /bin/sleep 60\n")
    (rented.root / "push_fails").write_text("0" if moment == "delay" else "1000000")
    rented.start()
    rented.wait(lambda: "in 60 seconds" in rented.log() or "next try" in rented.log())
    os.kill(rented.supervisor, signal.SIGTERM)
    assert "this machine stays" in rented.wait_until_ended() and not rented.read("removed")


@pytest.mark.parametrize("known, removed", [("remove pod", "remove pod pod7\n"), ("terminate pod", "")])
def test_runpodctl_of_another_version_or_without_the_command(rented, known, removed):
    rented.add_tool("runpodctl", f'#!/bin/sh\n[ "$1 $2" = "{known}" ] || exit 1\necho "$@" > $POD/removed\n')
    rented.start()
    log = rented.wait_until_ended()
    assert rented.read("removed") == removed
    assert ("IT FAILED" in log) == (not removed)


def test_log_begins_with_the_end_and_its_price(pod):
    pod.start(plan="user-error", GPU_HOUR_USD="2.5", NPROC="8")
    first = pod.wait_until_ended().splitlines()[0]
    assert "STAYS; it costs $20.00 an hour until you remove it: runpodctl pod delete pod7" in first


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_the_scripts():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / "cloud" / "slurm.sbatch", ROOT / ".ci" / "run"], check=True)


# ------------------------------------------------------------------------- with every real part


@pytest.mark.slow
def test_pod_from_rent_to_removal(tmp_path):
    """Start, log out, stop, start again, lose a rank, finish, publish, remove the pod; sample at home."""
    pod, home = tmp_path / "pod", tmp_path / "home"
    pod.mkdir()
    home.mkdir()
    (tmp_path / "bin").mkdir()
    run, last_step = pod / "log" / "quickstart", 60
    make_shards(pod / "toy")
    flags = [*TINY_FLAGS, "--model.vocab-size", "50304", "--total-batch-size", "64", "--micro-batch-size", "1"]
    flags += ["--max-steps", str(last_step), "--val-every", "20", "--val-tokens", "256", "--save-every", "5"]

    with hub_server.start(tmp_path / "hub") as server:
        # runpodctl writes down what the Hub has when it is called.
        published = server.root / "models" / "tester" / "life"
        runpodctl = tmp_path / "bin" / "runpodctl"
        runpodctl.write_text(f'#!/bin/sh\n(echo "$@"; ls {published}) >> {tmp_path}/removed\n')
        runpodctl.chmod(0o755)
        path = f"{tmp_path}/bin:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": str(pod), "OMP_NUM_THREADS": "1"}
        env |= {"NPROC": "2", "PUSH_TO": "tester/life", "REMOVE_POD": "1", "RUNPOD_POD_ID": "pod7"}
        env |= {"RESTART_DELAY": "0", "REMOVE_DELAY": "0", "START_WAIT": "0", **server.env()}

        def start():
            command = ["bash", str(ROOT / "train.sh"), "quickstart", *flags, "--data-dir", "toy"]
            how = {"cwd": pod, "env": env, "text": True, "start_new_session": True, "timeout": 120}
            return subprocess.run(command, check=True, stdout=subprocess.PIPE, **how).stdout

        def log():
            return "".join(path.read_text() for path in sorted(run.glob("train-*.log")))

        def newest_step():
            return checkpoint.latest_step(run) or 0

        # Start; stop by the printed command. It saves, and the machine stays.
        printed = start()
        wait_for(lambda: newest_step() >= 10, 240)
        subprocess.run(re.search("stop: +(.*)", printed)[1], shell=True, check=True, cwd="/")
        wait_for(lambda: not (run / "train.pid").exists(), 240)
        stopped_at = newest_step()
        assert 10 <= stopped_at < last_step
        assert "training stopped" in log() and not (tmp_path / "removed").exists()

        # The same command resumes; a rank that is killed is restarted without human help.
        start()
        wait_for(lambda: newest_step() >= stopped_at + 10, 240)
        torchrun = rank_pids(int((run / "train.pid").read_text()))[0]
        os.kill(rank_pids(torchrun)[-1], signal.SIGKILL)
        wait_for((tmp_path / "removed").exists, 240)

        # The pod was removed after the last checkpoint was published.
        assert "failure 1" in log() and "training finished" in log(), log()
        removed = (tmp_path / "removed").read_text().split()
        assert removed[:3] == ["pod", "delete", "pod7"] and f"model_{last_step:05d}.pt" in removed

        # Another machine knows nothing but the Hub.
        home_env = {"PATH": os.environ["PATH"], "HOME": str(home), **server.env(), "HF_HOME": str(home / "hf")}

        def run_at_home(script, *args):
            command = [sys.executable, str(ROOT / script), *args]
            return subprocess.check_output(command, cwd=home, env=home_env, text=True, timeout=180)

        run_at_home("hub.py", "pull-model", "tester/life", "life")
        assert run_at_home("infer.py", "life", "x = ", "--max-new-tokens", "3").startswith("x = ")

    # The losses and weights are those of an undisturbed run.
    undisturbed = train_quickstart([*flags, "--data-dir", str(pod / "toy")], tmp_path / "undisturbed")
    assert_curves_close(load_curve(run), load_curve(undisturbed))
