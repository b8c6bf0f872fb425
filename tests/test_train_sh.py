"""train.sh: start, log out, restart, stop, publish, give the machine back.

The script is the real one; pod.py has stand-ins for what it calls. The last test has every real part but the Hub and
runpodctl.
"""

import json
import os
import re
import shlex
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

from weights import checkpoint

has_util_linux = shutil.which("setsid") and shutil.which("flock")
pytestmark = pytest.mark.skipif(not has_util_linux, reason="needs util-linux")


@pytest.fixture
def pod(tmp_path):
    with Pod(tmp_path / "model_1[a]") as pod:  # a folder is not taken for a checkpoint, nor its name for a pattern
        yield pod


@pytest.fixture
def rented(pod):
    """A pod of two GPUs whose end is to push, and then to remove it."""
    pod.env |= {"PUSH_TO": "me/x", "REMOVE_POD": "1", "GPU_HOUR_USD": "2.5"}
    return pod


def read_table(text):
    """[([argument, ...], {setting: value}, the rest of the line)] of lines "ARGUMENT SETTING=VALUE ... | rest"."""
    rows = []
    for line in text.strip().splitlines():
        words, _, rest = line.partition("|")
        settings = dict(re.findall(r"^([A-Z_]+)=(.*)", "\n".join(shlex.split(words)), re.MULTILINE))
        rows.append(([w for w in shlex.split(words) if w.partition("=")[0] not in settings], settings, rest.strip()))
    return rows


# ------------------------------------------------------------------------- start


def test_the_same_command_starts_and_resumes(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    pod.wait_until_ended()

    assert f"pid {pod.supervisor}" in done.stdout and pod.read("run/train.log")
    assert "--nproc_per_node=2 " in pod.read("starts")
    assert pod.read("starts").endswith("train_gpt2.py gpt2-124m --resume auto --max-steps 5\n")
    assert not pod.read("pushed") and not pod.read("removed")


def test_a_checkpoint_and_epochs_continue_its_run(pod):
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


@pytest.mark.parametrize("obstacle", ["refuse", "no-token", "log/a/model_1.pt log/b/model_1.pt"])
def test_nothing_is_begun_where_it_would_fail(pod, obstacle):
    """The trainer refuses; the Hub refuses; the name of a checkpoint is that of two."""
    for name in obstacle.split():
        (pod.root / name).parent.mkdir(parents=True, exist_ok=True)
        (pod.root / name).touch()
    words = ["model_1.pt"] if "model" in obstacle else []
    assert pod.start(*words, check=False, PUSH_TO="me/x").returncode == 1
    assert not pod.read("starts") and not pod.run.exists()


def test_help_is_shown_and_starts_nothing(pod):
    assert pod.start("gpt2-124m", "--help").stdout == "usage\nflags\n"
    assert not pod.read("starts") and not pod.run.exists()


def test_the_trainer_answers_what_train_sh_asks(run_in_fork, tiny_args, tmp_path):
    command = ["train_gpt2.py", "quickstart", *tiny_args, "--device", "cpu", "--out-dir", "x y", "--max-steps=2"]
    asked = run_in_fork(*command, "--check", cwd=tmp_path)
    assert asked.stdout.splitlines()[-2:] == [f"{tmp_path}/x y", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    run_in_fork(*command, cwd=tmp_path, env={"TRAIN_STATUS_FILE": "status.json"})
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


REFUSED = """
BUDGET_USD=9 GPU_HOUR_USD=2 --time-limit=3h   | --time-limit
BUDGET_USD=5                                  | GPU_HOUR_USD
BUDGET_USD=lots GPU_HOUR_USD=1                | BUDGET_USD=lots
GPU_HOUR_USD=0                                | GPU_HOUR_USD=0
MAX_RESTARTS=1.5                              | MAX_RESTARTS=1.5
PUSH_EVERY=60                                 | PUSH_TO
PUSH=last PUSH_TO=a/b                         | PUSH=last
REMOVE_POD=yes                                | REMOVE_POD=yes
REMOVE_POD=1                                  | REMOVE_POD=1
REMOVE_POD=1 PERSISTENT=1 RUNPOD_POD_ID=      | SHUTDOWN_CMD
REMOVE_POD=1 PERSISTENT=1 DISK='overlay /'    | overlay
"""


@pytest.mark.parametrize("arguments, settings, named", read_table(REFUSED))
def test_a_bad_setting_is_refused_by_name(pod, arguments, settings, named):
    done = pod.start(*arguments, check=False, **settings)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and named in done.stderr
    assert not pod.read("starts")


# ------------------------------------------------------------------------- one supervisor, logout, stop


def test_a_second_supervisor_is_refused(pod):
    trainer = pod.start_and_train()
    assert pod.start(check=False).returncode == 1

    # Only the supervisor dies: its trainer still trains.
    os.kill(pod.supervisor, signal.SIGKILL)
    wait_for(lambda: not is_alive(pod.supervisor))
    assert pod.start(check=False).returncode == 1
    assert is_alive(trainer) and len(pod.read("starts").splitlines()) == 1

    # All of it dies, as when a machine is lost: the same command starts again, once what they started has ended, too.
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: pod.start(check=False).returncode == 0)
    pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 2


def test_a_disk_without_locks_is_no_second_supervisor(pod):
    pod.add_tool("flock", "#!/bin/sh\nexit 65\n")
    pod.start()
    pod.wait_until_ended()
    assert pod.read("starts")


def test_a_run_survives_the_death_of_its_shell(pod):
    env = {**pod.env, "PLAN": "hang", "START_WAIT": "60"}
    shell = subprocess.Popen(["bash", "train.sh"], cwd=pod.root, env=env, start_new_session=True)
    wait_for(lambda: pod.read("trainer").strip())
    pod.supervisor = int(pod.read("run/train.pid"))

    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(shell.pid, number)
    shell.wait()
    os.kill(pod.supervisor, signal.SIGHUP)
    time.sleep(0.2)  # the time in which it would die
    assert is_alive(pod.supervisor) and is_alive(int(pod.read("trainer")))


def test_a_stop_saves_and_keeps_the_machine(rented):
    """Also a second one, which ranks take as the order to die."""
    save_slowly = "trap 'echo x >>$POD/signals; /bin/sleep 0.5; save 00042; status stopped x; exit 1' TERM"
    rented.add_tool("python", re.sub("trap .* TERM", save_slowly, rented.read("bin/python")))
    trainer = rented.start_and_train()
    for _ in range(3):
        rented.start("stop", "run")
        time.sleep(0.05)
    rented.wait_until_ended()

    assert (rented.run / "model_00042.pt").exists() and not is_alive(trainer)
    assert rented.read("signals") == "x\n"
    assert len(rented.read("starts").splitlines()) == 1  # a stop is no failure
    assert not rented.read("pushed") and not rented.read("removed")
    assert "kill:" not in rented.read("run/train.log")  # of a process that has ended, whose number may be another's


def test_a_stop_touches_no_other_process(pod):
    assert pod.start("stop", "run", check=False).returncode == 1
    pod.run.mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (pod.run / "train.pid").write_text(f"{other.pid}\n")
        assert pod.start("stop", "run", check=False).returncode == 1
        assert other.poll() is None
        other.kill()


# ------------------------------------------------------------------------- failures, restarts, budget


# What the starts of the trainer do, how many there are, and the exit code. "nothing" leaves no status: a full disk.
STARTS = [("crash", 3, 1), ("user-error finish", 1, 1), ("limit finish", 1, 0), ("nothing", 1, 0)]


@pytest.mark.parametrize("plan, starts, exit_code", STARTS)
def test_crashes_are_restarted_and_nothing_else(pod, plan, starts, exit_code):
    done = pod.start(PLAN=plan, MAX_RESTARTS="2", START_WAIT="20", check=False)
    pod.wait_until_ended()
    assert (len(pod.read("starts").splitlines()), done.returncode) == (starts, exit_code)


def test_a_restart_resumes_the_runs_own_checkpoint(pod):
    pod.start("--resume", "elsewhere/model_00005.pt", PLAN="crash save-crash finish")
    pod.wait_until_ended()
    first, second, third = pod.read("starts").splitlines()
    assert first == second  # it had no checkpoint of its own yet
    assert third == f"{first} --resume {pod.run}"


def test_the_status_of_an_earlier_start_does_not_count(pod):
    for _ in range(2):
        pod.start(PLAN="user-error crash finish", check=False)
        pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 3


def test_the_budget_is_the_time_limit_of_all_starts(pod):
    pod.add_tool("sleep", "#!/bin/sh\nexec /bin/sleep 1.1\n")  # before the restart
    pod.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", PLAN="crash finish")
    pod.wait_until_ended()
    limits = [int(start.rsplit("--time-limit ", 1)[1]) for start in pod.read("starts").splitlines()]
    assert 7190 <= limits[1] < limits[0] <= 7200  # seconds of two GPUs for ten dollars
    assert "--gpu-hour-usd 2.5" in pod.read("starts")


def test_the_budget_ends_a_trainer_that_hangs(rented):
    """Half an hour past the budget, here at once. Nothing is restarted once the budget is over."""
    shorter = '#!/bin/bash\n[[ $4 != 9000 ]] || set -- "${@:1:3}" 0.3 "${@:5}"\nexec /usr/bin/timeout "$@"\n'
    rented.add_tool("timeout", shorter)
    rented.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", PLAN="hang")
    assert "ended early" in rented.wait_until_ended()
    assert rented.read("removed") == "pod delete pod7\n"

    rented.start(BUDGET_USD="0.0001", GPU_HOUR_USD="2.5", PLAN="crash", check=False)
    rented.wait_until_ended()
    assert len(rented.read("starts").splitlines()) == 2


# ------------------------------------------------------------------------- push, and give the machine back


def test_a_push_that_fails_is_tried_again(rented):
    """And nothing else is pushed any more, or it would replace what was pushed."""
    rented.start(HUB_DOES="[[ $* == *--steps* ]] && (($(grep -c steps $POD/pushed) > 2))", PUSH_EVERY="7")
    rented.wait_until_ended()
    assert rented.read("pushed").splitlines()[-3:] == [f"push-model {rented.run} me/x --steps newest"] * 3
    assert rented.read("removed") == "pod delete pod7\n"


@pytest.mark.parametrize(
    "plan, env, flags",
    [
        ("limit", {"PUSH": "best", "PUSH_PUBLIC": "1"}, "--public --steps best --with-optimizer"),
        ("save-crash", {}, "--steps newest --with-optimizer"),
        ("finish", {"PUSH_OPTIMIZER": "1"}, "--steps newest --with-optimizer"),
    ],
)
def test_what_may_be_resumed_is_pushed_whole(rented, plan, env, flags):
    rented.start(PLAN=plan, MAX_RESTARTS="0", **env)
    rented.wait_until_ended()
    assert rented.read("pushed") == f"push-model {rented.run} me/x {flags}\n"


# How a run ends, whether a push succeeds, and what else matters | the command that ends the bill. While the weights are
# on this machine alone, nothing removes it; STOP_CMD, which keeps its disk, may stop it.
ENDINGS = """
finish                                                             | pod delete pod7
finish REMOVE_POD=0                                                |
finish HUB_DOES=false                                              |
finish HUB_DOES='exec /bin/sleep 60'                               |
finish HUB_DOES=false DISK='nfs4 /workspace'                       | pod stop pod7
finish HUB_DOES=false STOP_CMD='echo off >$POD/removed'            | off
finish HUB_DOES=false PERSISTENT=1                                 | pod delete pod7
finish PUSH_TO= PERSISTENT=1                                       | pod delete pod7
limit                                                              | pod delete pod7
save-crash                                                         | pod delete pod7
save-crash KEEP_ON_FAILURE=1                                       |
save-crash HUB_DOES=false                                          |
save-crash HUB_DOES=false DISK='nfs4 /workspace' KEEP_ON_FAILURE=1 |
crash HUB_DOES=false                                               | pod delete pod7
user-error                                                         |
user-error SECONDS=700                                             | pod delete pod7
finish SHUTDOWN_CMD='if [ -e $POD/tried ]; then echo twice >$POD/removed; else touch $POD/tried; exit 1; fi' | twice
"""


@pytest.mark.parametrize("plan, settings, removed", read_table(ENDINGS))
def test_the_only_copy_of_the_weights_is_never_removed(rented, plan, settings, removed):
    if "HUB_DOES" in settings:
        settings = {**settings, "PUSH_RETRY_HOURS": "0.0002"}  # less than a second
    rented.start(check=False, PLAN=plan[0], MAX_RESTARTS="0", **settings)
    rented.wait_until_ended()
    assert rented.read("removed").strip() == removed
    assert plan != ["crash"] or not rented.read("pushed")


def test_an_unlistable_folder_may_have_weights(rented):
    rented.add_tool("ls", "#!/bin/sh\nexit 2\n")
    rented.start(HUB_DOES="false", PUSH_RETRY_HOURS="0.0002")
    rented.wait_until_ended()
    assert not rented.read("removed")


@pytest.mark.parametrize("hub", ["false", "true"])
def test_a_kill_at_the_end_keeps_the_machine(rented, hub):
    """While it waits to push again, or to remove the machine."""
    rented.add_tool("sleep", "#!/bin/sh\necho >$POD/slept\nexec /bin/sleep 60\n")
    rented.start(HUB_DOES=hub)
    wait_for(lambda: rented.read("slept"))
    os.kill(rented.supervisor, signal.SIGTERM)
    rented.wait_until_ended()
    assert not rented.read("removed")


def test_checkpoints_are_pushed_while_it_trains(pod):
    pod.run.mkdir()
    for kind in ("optim", "model"):
        (pod.run / f"{kind}_00010.pt").touch()
    pod.start_and_train(PUSH_TO="me/x", PUSH_EVERY="7")
    push = f"push-model {pod.run} me/x --with-optimizer --temporary\n"
    wait_for(lambda: pod.read("pushed") == push)
    slept = len(pod.read("slept"))
    wait_for(lambda: len(pod.read("slept")) > slept + 8)
    assert pod.read("pushed") == push  # the same checkpoint is pushed once

    for kind in ("optim", "model"):
        (pod.run / f"{kind}_100000.pt").touch()
    wait_for(lambda: pod.read("pushed") == 2 * push)


@pytest.mark.parametrize("known, removed", [("remove pod", "remove pod pod7\n"), ("terminate pod", "")])
def test_another_version_of_runpodctl(rented, known, removed):
    rented.add_tool("runpodctl", f'#!/bin/sh\n[ "$1 $2" = "{known}" ] || exit 1\necho "$@" > $POD/removed\n')
    rented.start()
    last_line = rented.wait_until_ended().splitlines()[-1]
    assert rented.read("removed") == removed
    assert ("$5.00" in last_line) == (not removed)


def test_the_log_begins_and_ends_with_the_price(pod):
    pod.run.mkdir()
    (pod.run / "train.log").write_text("from nohup")
    done = pod.start(PLAN="user-error", GPU_HOUR_USD="2.5", NPROC="8", START_WAIT="20", check=False)
    first, *_, last = pod.wait_until_ended().splitlines()
    for line in (first, last):
        assert "$20.00" in line and "runpodctl pod delete pod7" in line
    assert "--max-lr -1" in done.stdout  # the start shows the error
    assert pod.read("run/train.log") == "from nohup"  # the user's own


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_the_scripts():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / "cloud" / "slurm.sbatch", ROOT / ".ci" / "run"], check=True)


# ------------------------------------------------------------------------- with every real part


@pytest.mark.slow
def test_pod_from_rent_to_removal(tmp_path):
    """Start, log out, stop, start again, lose a rank, finish, publish, remove the pod."""
    pod = tmp_path / "pod"
    pod.mkdir()
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
        removed = tmp_path / "removed"
        wait_for(lambda: removed.exists() and f"model_{last_step:05d}.pt" in removed.read_text().split(), 240)

        # The pod was removed after the last checkpoint was published.
        assert "failure 1" in log() and "training finished" in log(), log()
        assert removed.read_text().split()[:3] == ["pod", "delete", "pod7"]

    # The losses are those of an undisturbed run.
    undisturbed = train_quickstart([*flags, "--data-dir", str(pod / "toy")], tmp_path / "undisturbed")
    assert_curves_close(load_curve(run), load_curve(undisturbed))
