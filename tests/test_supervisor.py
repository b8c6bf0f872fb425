"""The supervisor behind train.sh: start, log out, restart, stop, publish, give the machine back.

The supervisor is the real one, in the background; pod.py has stand-ins for what it calls. The last test has every real
part but the Hub and runpodctl.
"""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import hub_server
from helpers import ROOT, TINY_FLAGS, assert_curves_close, load_curve, make_shards, train_quickstart
from pod import Pod, is_alive
from processes import rank_pids, wait_for

from cloud import supervisor
from weights.names import latest_step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


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


# ------------------------------------------------------------------------- train.sh itself


@pytest.fixture
def checkout(tmp_path):
    """A folder with train.sh, and a Python that prints how it was called."""
    folder = tmp_path / "first last"
    (folder / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "train.sh", folder)
    (folder / "bin" / "python").write_text('#!/bin/sh\nprintf "[%s]" "$PYTHONPATH" "$@"\n')
    (folder / "bin" / "python").chmod(0o755)
    return folder


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_train_sh_starts_the_supervisor(checkout, tmp_path, shell):
    (tmp_path / "link.sh").symlink_to(checkout / "train.sh")
    env = {"PATH": f"{checkout}/bin:{os.environ['PATH']}", "PYTHONPATH": "mine"}
    command = [shell, tmp_path / "link.sh", "quickstart", "--sample-prompt", "a  -h b "]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    words = [f"{checkout}:mine", "-P", "-m", "cloud.supervisor", "quickstart", "--sample-prompt", "a  -h b "]
    assert done.stdout == "".join(f"[{word}]" for word in words)


def test_the_python_of_the_project_comes_first(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / "bin" / "python").rename(checkout / ".venv" / "bin" / "python")
    done = subprocess.run(["./train.sh", "stop"], cwd=checkout, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[cloud.supervisor][stop]")


def test_help_has_every_setting():
    done = subprocess.run([ROOT / "train.sh", "-h"], capture_output=True, text=True, check=True)
    shown = re.findall(r"^  ([A-Z_]+) ", done.stdout, re.MULTILINE)
    assert sorted(shown) == sorted(name.upper() for name in supervisor.Settings.__dataclass_fields__)
    assert done.stdout.startswith("Train in the background")


def test_a_checkout_on_windows_keeps_the_line_ends(tmp_path):
    scripts = ["train.sh", "Makefile", "slurm.sbatch"]
    for path in (ROOT / ".gitattributes", ROOT / "train.sh", ROOT / "Makefile", ROOT / "cloud" / "slurm.sbatch"):
        shutil.copy(path, tmp_path)
    git = ["git", "-C", tmp_path, "-c", "core.autocrlf=true"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    for name in scripts:
        (tmp_path / name).unlink()
    subprocess.run([*git, "checkout", "-q", "--", *scripts], check=True)
    assert not any(b"\r" in (tmp_path / name).read_bytes() for name in scripts)


def test_the_supervisor_starts_without_torch():
    program = "import sys, cloud.supervisor; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_the_scripts():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / "cloud" / "slurm.sbatch", ROOT / ".ci" / "run"], check=True)


# ------------------------------------------------------------------------- start


def test_the_same_command_starts_and_resumes(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    pod.wait_until_ended()

    assert f"pid {pod.supervisor}" in done.stdout and pod.read("run/train.log")
    # With a host name that did not resolve, torchrun had not started after 400 seconds; with --local-addr after 21.
    assert "--standalone --nproc_per_node=2 --local-addr=127.0.0.1 " in pod.read("starts")
    assert pod.read("starts").endswith("train_gpt2.py gpt2-124m --resume auto --max-steps 5\n")
    assert not pod.read("pushed") and not pod.read("removed")


def test_a_checkpoint_and_epochs_continue_its_run(pod):
    folder = pod.root / "log" / "mine"
    pod.add_checkpoint(folder, 19072)
    pod.start("model_19072.pt", "2", "--max-lr", "1e-4")
    pod.wait_until_ended()
    (folder / "model_19072.pt").unlink()  # --keep may delete it; its run is still there
    pod.add_checkpoint(folder, 19080)
    pod.start("log/mine/model_19072.pt", "2")
    pod.wait_until_ended()

    first, second = pod.read("starts").splitlines()
    assert first.endswith(f"--resume auto --resume {folder} --epochs 2 --max-lr 1e-4")
    assert second.endswith(f"--resume {folder} --epochs 2")


@pytest.mark.parametrize("name", ["model_19072.pt", "old/model_19072.pt", "log/old/model_19072.pt"])
def test_a_checkpoint_of_no_run_names_those_that_there_are(pod, name):
    """A run ends at another step than build-nanogpt's, whose file has no optimizer."""
    pod.add_checkpoint(pod.root / "log" / "mine", 19000)
    pod.add_checkpoint(pod.root / "log" / "mine", 19073)
    pod.add_checkpoint(pod.root / "log" / "old", 19072, ["model"])
    error = pod.start(name, "2", check=False).stderr
    assert error.startswith("error: ") and "log/mine/model_19073.pt" in error and "docs/recipes.md" in error
    assert "19000" not in error and not pod.read("starts")


@pytest.mark.parametrize("obstacle", ["refuse", "no-token", "log/a/model_1.pt log/b/model_1.pt"])
def test_nothing_is_begun_where_it_would_fail(pod, obstacle):
    """The trainer refuses; the Hub refuses; the name of a checkpoint is that of two."""
    for name in obstacle.split():
        (pod.root / name).parent.mkdir(parents=True, exist_ok=True)
        (pod.root / name).touch()
    words = ["model_1.pt"] if "model" in obstacle else []
    done = pod.start(*words, check=False, PUSH_TO="me/x")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert not pod.read("starts") and not pod.run.exists()


def test_help_is_shown_and_starts_nothing(pod):
    assert pod.start("gpt2-124m", "--help").stdout == "usage\nflags\n"
    assert not pod.read("starts") and not pod.run.exists()


@pytest.mark.parametrize("prompt", ["use ls -h or du", "--help me", " --time-limit 3h ", "a\nb"])
def test_an_argument_is_no_command_line(pod, prompt):
    pod.start("quickstart", "--sample-prompt", prompt, BUDGET_USD="9", GPU_HOUR_USD="2")
    pod.wait_until_ended()
    assert f"--sample-prompt {prompt} --time-limit" in pod.read("starts")


def test_the_trainer_answers_what_the_supervisor_asks(run_in_fork, tiny_args, tmp_path):
    command = ["train_gpt2.py", "quickstart", *tiny_args, "--device", "cpu", "--out-dir", "x y ", "--max-steps=2"]
    asked = run_in_fork(*command, "--check", cwd=tmp_path)
    assert asked.stdout.splitlines()[-2:] == [f"{tmp_path}/x y ", "1"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]

    run_in_fork(*command, cwd=tmp_path, env={"TRAIN_STATUS_FILE": "status.json"})
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "finished"


REFUSED = """
BUDGET_USD=9 GPU_HOUR_USD=2 --time-limit=3h   | --time-limit
BUDGET_USD=9 GPU_HOUR_USD=2 --time_limit=3h   | --time-limit
BUDGET_USD=9 GPU_HOUR_USD=2 --time-limit 3h   | --time-limit
BUDGET_USD=9 GPU_HOUR_USD=2 --time_limit 3h   | --time-limit
BUDGET_USD=5                                  | GPU_HOUR_USD
BUDGET_USD=lots GPU_HOUR_USD=1                | BUDGET_USD=lots
BUDGET_USD=inf GPU_HOUR_USD=1                 | BUDGET_USD=inf
GPU_HOUR_USD=0                                | GPU_HOUR_USD=0
GPU_HOUR_USD=nan                              | GPU_HOUR_USD=nan
MAX_RESTARTS=1.5                              | MAX_RESTARTS=1.5
NPROC=-1                                      | NPROC=-1
PUSH_EVERY=60                                 | PUSH_TO
REMOVE_POD=yes                                | REMOVE_POD=yes
REMOVE_POD=1                                  | REMOVE_POD=1
REMOVE_POD=1 PERSISTENT=1 RUNPOD_POD_ID=      | SHUTDOWN_CMD
REMOVE_POD=1 PERSISTENT=1 DISK='overlay /'    | overlay
"""


@pytest.mark.parametrize("arguments, settings, named", read_table(REFUSED))
def test_a_bad_setting_is_refused_by_name(pod, arguments, settings, named):
    done = pod.start(*arguments, check=False, **settings)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and named in done.stderr
    assert done.stderr.count("\n") == 1 and not pod.read("starts")


ROOTS = [("/home/me/gpt2", True), ("/mnt/c/Users/First Last/gpt2", False), ("/home/me/it's/gpt2", False)]


@pytest.mark.parametrize("root, has_cache", ROOTS)
def test_compiled_code_stays_where_torch_can_compile(monkeypatch, root, has_cache):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert ("TORCHINDUCTOR_CACHE_DIR" in supervisor.trainer_env(Path(root))) == has_cache
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert supervisor.trainer_env(Path("/home/me/gpt2"))["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


# ------------------------------------------------------------------------- one supervisor, logout, stop


def test_a_second_supervisor_is_refused(pod):
    trainer = pod.start_and_train()
    first = pod.supervisor
    assert str(first) in pod.start(check=False).stderr

    # Only the supervisor dies: its trainer still trains. Both commands name it, and stop ends it.
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: not is_alive(first))
    refused = pod.start(check=False)
    assert refused.returncode == 1 and str(trainer) in refused.stderr
    assert is_alive(trainer) and len(pod.read("starts").splitlines()) == 1
    assert str(trainer) in pod.start("stop", "run").stdout
    wait_for(lambda: not is_alive(trainer))
    assert (pod.run / "model_00042.pt").exists()  # it has saved

    # The same command starts again.
    pod.start()
    pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 2


def test_a_push_during_the_run_does_not_hold_the_folder(pod):
    """All but the push dies, as when a machine runs out of memory."""
    pod.add_checkpoint(pod.run, 10)
    trainer = pod.start_and_train(PUSH_TO="me/x", PUSH_EVERY="1", HUB_DOES="echo $$ >$POD/push; exec /bin/sleep 60")
    wait_for(lambda: pod.read("push").strip())
    for pid in (pod.supervisor, trainer):
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda pid=pid: not is_alive(pid))

    assert is_alive(int(pod.read("push")))
    pod.start()
    os.kill(int(pod.read("push")), signal.SIGKILL)
    pod.wait_until_ended()
    assert len(pod.read("starts").splitlines()) == 2


def test_a_disk_without_locks_is_no_second_supervisor(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(supervisor.fcntl, "flock", no_locks)
    with supervisor.lock_run(tmp_path / "run"):
        assert supervisor.find_holders(tmp_path / "run") == [os.getpid()]


def test_a_run_survives_the_death_of_its_shell(pod):
    pod.constants["SHOW_LOG_S"] = 60
    env = {**pod.env, "PLAN": "hang"}
    shell = subprocess.Popen(pod.command(), cwd=pod.root, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    wait_for(lambda: pod.read("trainer").strip())
    pod.supervisor = int(pod.read("run/train.pid"))

    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(shell.pid, number)
    shell.wait()
    os.kill(pod.supervisor, signal.SIGHUP)
    os.kill(int(pod.read("trainer")), signal.SIGHUP)
    time.sleep(0.2)  # the time in which they would die
    assert is_alive(pod.supervisor) and is_alive(int(pod.read("trainer")))


def test_a_stop_saves_and_keeps_the_machine(rented):
    """Also a second one, which ranks take as the order to die."""
    wait = "until [[ -e $POD/go ]]; do /bin/sleep 0.02; done"
    save_slowly = f"trap 'echo x >>$POD/signals; {wait}; save 00042; status stopped x; exit 1' TERM"
    rented.add_tool("python", re.sub("(?m)^trap .* TERM", save_slowly, rented.read("bin/python")))
    trainer = rented.start_and_train()
    for _ in range(3):
        rented.start("stop", "run")
    (rented.root / "go").touch()
    log = rented.wait_until_ended()

    assert (rented.run / "model_00042.pt").exists() and not is_alive(trainer)
    assert rented.read("signals") == "x\n"
    assert len(rented.read("starts").splitlines()) == 1  # a stop is no failure
    assert not rented.read("pushed") and not rented.read("removed")
    assert "training stopped" in log and not (rented.run / "train.pid").exists()


def test_a_stop_asks_the_ranks_themselves(pod):
    """torchrun, asked in their place, ends in a traceback. Ranks lead sessions; another child of torchrun is none."""
    pod.start_and_train(PLAN="ranks")
    wait_for(lambda: len(pod.read("trainer").split()) == 3)
    pids = [int(pid) for pid in pod.read("trainer").split()]
    ranks = [pid for pid in pids if os.getsid(pid) == pid]
    pod.start("stop", "run")
    log = pod.wait_until_ended()

    assert "Traceback" not in log and "training stopped" in log
    assert len(ranks) == 2 and [pid for pid in pids if is_alive(pid)] == [pid for pid in pids if pid not in ranks]


def test_a_trainer_that_does_not_stop_is_killed(pod):
    pod.constants["SAVE_S"] = 0.2
    pod.add_tool("python", re.sub("(?m)^trap .* TERM", "trap '' TERM", pod.read("bin/python")))
    trainer = pod.start_and_train()
    pod.start("stop", "run")
    assert "training stopped" in pod.wait_until_ended()
    assert not is_alive(trainer)


def test_stop_takes_several_folders(pod, tmp_path):
    with Pod(tmp_path / "b") as other:
        pod.start_and_train()
        other.start_and_train()
        done = pod.start("stop", "run", "nothing", other.run, check=False)
        assert done.returncode == 1 and "nothing" in done.stderr
        for stopped in (pod, other):
            assert "training stopped" in stopped.wait_until_ended()


def test_a_stop_touches_no_other_process(pod):
    assert pod.start("stop", "run", check=False).returncode == 1
    assert pod.start("stop", check=False).returncode == 1
    pod.run.mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as other:
        (pod.run / "train.pid").write_text(f"{other.pid}\n")
        done = pod.start("stop", "run", check=False)
        assert done.returncode == 1 and str(other.pid) in done.stderr
        assert other.poll() is None
        other.kill()


def test_a_run_whose_folder_was_moved_can_be_stopped(pod):
    pod.start_and_train()
    new = pod.root / "new place"
    pod.run.rename(new)
    pod.run.mkdir()  # as a trainer that saves makes it again
    refused = pod.start("stop", "run", check=False)
    assert refused.returncode == 1 and str(new) in refused.stderr
    (pod.root / "OUT").write_text(str(new))
    assert str(pod.supervisor) in pod.start(check=False).stderr  # no second run in it
    pod.start("stop", "new place")
    wait_for(lambda: not is_alive(pod.supervisor))
    (log,) = new.glob("train-*.log")
    assert "training stopped" in log.read_text()


def test_a_run_whose_folder_was_deleted_can_be_stopped(pod):
    pod.start_and_train()
    shutil.rmtree(pod.run)
    pod.run.mkdir()
    assert str(pod.supervisor) in pod.start(check=False).stderr  # no second run beside it
    pod.start("stop", "run")
    wait_for(lambda: not is_alive(pod.supervisor))


# ------------------------------------------------------------------------- failures, restarts, budget


# What the starts of the trainer do, how many there are, and the exit code. "nothing" leaves no status: a full disk.
STARTS = [("crash", 3, 1), ("user-error finish", 1, 1), ("limit finish", 1, 0), ("nothing", 1, 0)]


@pytest.mark.parametrize("plan, starts, exit_code", STARTS)
def test_crashes_are_restarted_and_nothing_else(pod, plan, starts, exit_code):
    pod.constants["SHOW_LOG_S"] = 20
    done = pod.start(PLAN=plan, MAX_RESTARTS="2", check=False)
    pod.wait_until_ended()
    assert (len(pod.read("starts").splitlines()), done.returncode) == (starts, exit_code)


def test_a_restart_resumes_the_runs_own_checkpoint(pod):
    """A file of the user's that sorts after all steps is none."""
    pod.run.mkdir()
    (pod.run / "model_best.pt").write_bytes(pod.root.joinpath("checkpoint").read_bytes())
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
    pod.constants["RESTART_DELAY_S"] = 1.1
    pod.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", PLAN="crash finish")
    pod.wait_until_ended()
    limits = [int(start.rsplit("--time-limit ", 1)[1]) for start in pod.read("starts").splitlines()]
    assert 7190 <= limits[1] < limits[0] <= 7200  # seconds of two GPUs for ten dollars
    assert "--gpu-hour-usd 2.5" in pod.read("starts")


def test_the_budget_ends_a_trainer_that_hangs(rented):
    """Half an hour past the budget, here at once. Nothing is restarted once the budget is over."""
    rented.constants["HANG_S"] = 0
    rented.start(BUDGET_USD="0.0001", GPU_HOUR_USD="2.5", PLAN="hang")
    assert "ended early" in rented.wait_until_ended()
    assert rented.read("removed") == "pod delete pod7\n"

    rented.start(BUDGET_USD="0.0001", GPU_HOUR_USD="2.5", PLAN="crash", check=False)
    rented.wait_until_ended()
    assert len(rented.read("starts").splitlines()) == 2


def test_the_budget_does_not_follow_the_clock(monkeypatch):
    run = supervisor.Supervisor(supervisor.read_settings(), [], Path("run"), None, 2, "")
    monkeypatch.setattr(time, "time", lambda: 1e12)
    assert run.elapsed_s() < 600


# ------------------------------------------------------------------------- push, and give the machine back


def test_a_push_that_fails_is_tried_again(rented):
    """And nothing else is pushed any more, or it would replace what was pushed."""
    rented.start(HUB_DOES="(($(wc -l <$POD/pushed) > 2))", PUSH_EVERY="1")
    rented.wait_until_ended()
    assert rented.read("pushed").splitlines() == [f"push-model {rented.run} me/x --steps best --with-optimizer"] * 3
    assert rented.read("removed") == "pod delete pod7\n"


@pytest.mark.parametrize("plan", ["limit", "save-crash", "finish"])
def test_what_is_pushed_can_be_trained_further(rented, plan):
    rented.start(PLAN=plan, MAX_RESTARTS="0")
    rented.wait_until_ended()
    assert rented.read("pushed") == f"push-model {rented.run} me/x --steps best --with-optimizer\n"


def test_weights_alone_are_pushed_alone(rented):
    rented.add_checkpoint(rented.run, 7, ["model"])
    rented.start(PLAN="crash", MAX_RESTARTS="0")
    rented.wait_until_ended()
    assert rented.read("pushed") == f"push-model {rented.run} me/x --steps best\n"


# How a run ends, whether a push succeeds, and what else matters | the command that ends the bill. While the weights are
# on this machine alone, nothing removes it; STOP_CMD, which keeps its disk, may stop it.
ENDINGS = """
finish                                                             | pod delete pod7
finish REMOVE_POD=0                                                |
finish HUB_DOES=false                                              |
finish HUB_DOES='exec /bin/sleep 60'                               |
finish HUB_DOES=false DISK='nfs4 /workspace'                       | pod stop pod7
finish HUB_DOES=false DISK='nfs4 /workspace/my volume'             | pod stop pod7
finish HUB_DOES=false STOP_CMD='echo off >$POD/removed'            | off
finish HUB_DOES=false PERSISTENT=1                                 | pod delete pod7
finish PUSH_TO= PERSISTENT=1                                       | pod delete pod7
limit                                                              | pod delete pod7
save-crash                                                         | pod delete pod7
save-crash HUB_DOES=false                                          |
crash HUB_DOES=false                                               | pod delete pod7
unmount HUB_DOES=false                                             |
user-error                                                         |
user-error EARLY_MISTAKE_S=0                                       | pod delete pod7
finish SHUTDOWN_CMD='if [ -e $POD/tried ]; then echo twice >$POD/removed; else touch $POD/tried; exit 1; fi' | twice
"""


@pytest.mark.parametrize("plan, settings, removed", read_table(ENDINGS))
def test_the_only_copy_of_the_weights_is_never_removed(rented, plan, settings, removed):
    rented.constants["PUSH_RETRY_S"] = 0.5 if "HUB_DOES" in settings else 30
    if "EARLY_MISTAKE_S" in settings:
        rented.constants["EARLY_MISTAKE_S"] = float(settings.pop("EARLY_MISTAKE_S"))
    rented.start(check=False, PLAN=plan[0], MAX_RESTARTS="0", **settings)
    wait_for(lambda: not is_alive(rented.supervisor))
    assert rented.read("removed").strip() == removed
    assert plan != ["crash"] or not rented.read("pushed")


def test_a_fault_of_the_supervisor_gives_the_machine_back(rented):
    rented.constants["trainer_env"] = None  # it calls that
    rented.start(check=False)
    assert "TypeError" in rented.wait_until_ended()
    assert rented.read("removed") == "pod delete pod7\n"


@pytest.mark.parametrize("name", ["r ", " r", "a  b"])
def test_a_folder_with_spaces_is_that_folder(tmp_path, name):
    """A name that is not read as it stands is that of an empty folder, with no weights to lose."""
    with Pod(tmp_path / "pod", run=name) as rented:
        rented.start(PUSH_TO="me/x", REMOVE_POD="1")
        assert "the weights are at me/x" in rented.wait_until_ended()
        assert rented.read("pushed") == f"push-model {rented.run} me/x --steps best --with-optimizer\n"
        assert rented.read("removed") == "pod delete pod7\n"
        assert [path.name for path in rented.root.glob("*r*") if path.is_dir() and path.name != name] == []


@pytest.mark.parametrize("hub", ["false", "true"])
def test_a_kill_at_the_end_keeps_the_machine(rented, hub):
    """While it waits to push again, or to remove the machine."""
    rented.constants |= {"PUSH_PAUSE_S": 60, "REMOVE_DELAY_S": 60}
    rented.start(HUB_DOES=hub)
    wait_for(lambda: "in 60 seconds" in rented.log())
    os.kill(rented.supervisor, signal.SIGTERM)
    rented.wait_until_ended()
    assert not rented.read("removed")


def test_checkpoints_are_pushed_while_it_trains(pod):
    pod.add_checkpoint(pod.run, 10)
    (pod.run / "model_best.pt").touch()  # the user's own
    pod.start_and_train(PUSH_TO="me/x", PUSH_EVERY="1")
    push = f"push-model {pod.run} me/x --with-optimizer --temporary\n"
    wait_for(lambda: pod.read("pushed") == push)
    time.sleep(1.5)
    assert pod.read("pushed") == push  # the same checkpoint is pushed once

    pod.add_checkpoint(pod.run, 100000)
    wait_for(lambda: pod.read("pushed") == 2 * push)


@pytest.mark.parametrize("known, removed", [("remove pod", "remove pod pod7\n"), ("terminate pod", "")])
def test_another_version_of_runpodctl(rented, known, removed):
    rented.add_tool("runpodctl", f'#!/bin/sh\n[ "$1 $2" = "{known}" ] || exit 1\necho "$@" > "$POD/removed"\n')
    rented.start()
    last_line = rented.wait_until_ended().splitlines()[-1]
    assert rented.read("removed") == removed
    assert ("$5.00" in last_line) == (not removed)


def test_the_log_begins_and_ends_with_the_price(pod):
    pod.run.mkdir()
    (pod.run / "train.log").write_text("from nohup")
    pod.constants["SHOW_LOG_S"] = 20
    done = pod.start(PLAN="user-error", GPU_HOUR_USD="2.5", NPROC="8", check=False)
    first, *_, last = pod.wait_until_ended().splitlines()
    for line in (first, last):
        assert "$20.00" in line and "runpodctl pod delete pod7" in line
    assert "--max-lr -1" in done.stdout  # the start shows the error
    assert pod.read("run/train.log") == "from nohup"  # the user's own


# ------------------------------------------------------------------------- with every real part


def test_a_trainer_that_says_nothing_is_killed_and_restarted(pod):
    """As one that reads from a volume which is gone."""
    pod.constants |= {"SILENCE_S": 0.5}
    pod.start_and_train(PLAN="hang finish")
    log = pod.wait_until_ended()
    assert "the trainer hangs" in log and "failure 1" in log and "training finished" in log


def test_a_push_that_fails_hides_no_trainer_that_hangs(pod):
    pod.constants |= {"SILENCE_S": 3, "PUSH_RETRY_S": 0.1, "PUSH_PAUSE_S": 0.02}
    pod.add_checkpoint(pod.run, 10)
    pod.start_and_train(PLAN="hang finish", PUSH_TO="me/x", PUSH_EVERY="1", HUB_DOES="echo no; false")
    assert "the trainer hangs" in pod.wait_until_ended()
    assert pod.read("run/push.log").startswith("no\n")


def test_the_error_of_a_rank_is_the_last_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit('error: --max-lr -1')")
    command = [sys.executable, "-m", "cloud.torchrun", "--standalone", "--local-addr=127.0.0.1", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "error: --max-lr -1" in done.stderr and "Traceback" not in done.stderr and "=====" not in done.stderr


@pytest.mark.slow
def test_pod_from_rent_to_removal(tmp_path):
    """Start, log out, stop, start again, lose a rank, finish, publish, remove the pod."""
    pod = tmp_path / "pod"
    pod.mkdir()
    (tmp_path / "bin").mkdir()
    run, last_step = pod / "log" / "quickstart", 150
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
        env |= server.env()

        def start():
            """Returns what the start has printed when its terminal is closed."""
            command = ["bash", str(ROOT / "train.sh"), "quickstart", *flags, "--data-dir", "toy"]
            printed = tmp_path / "printed"
            with open(printed, "w") as f:
                shell = subprocess.Popen(command, cwd=pod, env=env, stdout=f, start_new_session=True)
            wait_for(lambda: "stop: " in printed.read_text(), 120)
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            return printed.read_text()

        def log():
            return "".join(path.read_text() for path in sorted(run.glob("train-*.log")))

        def newest_step():
            return latest_step(run) or 0

        # Start; stop by the printed command. It saves, and the machine stays.
        printed = start()
        wait_for(lambda: newest_step() >= 10, 240)
        subprocess.run(re.search("stop: +(.*)", printed)[1], shell=True, check=True, cwd="/")
        wait_for(lambda: not (run / "train.pid").exists(), 240)
        stopped_at = newest_step()
        assert 10 <= stopped_at < last_step
        assert "training stopped" in log() and "Traceback" not in log()
        assert not (tmp_path / "removed").exists()

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
