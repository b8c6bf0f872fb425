"""train.sh: start, log out, restart, stop, publish, remove the pod.

train.sh itself is the real one. The trainer, the Hub, torchrun and the tools of the cloud are the stand-ins of pod.py,
where the words of `plan` are explained: what each start of the trainer does.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time

import processes
import pytest
from faults import hub_server
from helpers import ROOT, train_quickstart
from pod import Pod, alive

from training import checkpoint
from training.config import TrainConfig
from training.stop import StopRequest

has_util_linux = shutil.which("setsid") and shutil.which("flock")
pytestmark = pytest.mark.skipif(not has_util_linux, reason="needs util-linux")


@pytest.fixture
def pod(tmp_path):
    with Pod(tmp_path) as pod:
        yield pod


# ------------------------------------------------------------------------- start


def test_a_start_says_how_to_follow_and_stop_it_and_runs_to_the_end(pod):
    done = pod.start("gpt2-124m", "--max-steps", "5")
    log = pod.wait_until_ended()

    assert "2 process(es)," in done.stdout and "resume:  the same command\n" in done.stdout
    assert pod.starts() == ["gpt2-124m --resume auto --max-steps 5"]
    assert "train.sh gpt2-124m --max-steps 5\n" in log  # the command as it was typed
    assert "--standalone --nproc_per_node=2" in log and "training finished" in log
    assert "this machine stays: REMOVE_POD is not 1" in log
    assert not pod.read("pushed") and not pod.read("removed")
    # every line of train.sh begins with the date
    assert all(line[:4].isdigit() for line in log.splitlines() if "train.sh:" in line)


@pytest.mark.parametrize(
    "args, env, processes, out",
    [
        (["overfit", "--device=cpu"], {}, 1, "log/overfit"),
        (["overfit", "--out-dir", "o p"], {"GPUS": "0"}, 1, "o p"),
        (["--out-dir=x", "--resume", "none"], {"NPROC": "3"}, 3, "x"),
        (["--resume", "y/model_00010.pt"], {}, 2, "y"),
    ],
)
def test_processes_and_run_folder_follow_from_the_arguments_and_the_gpus(pod, args, env, processes, out):
    output = pod.start(*args, plan="user-error", **env).stdout

    assert f"{processes} process(es)" in output and (" on the CPU" in output) == (processes == 1)
    assert f"--nproc_per_node={processes} " in pod.wait_until_ended(out)


def test_a_checkpoint_and_epochs_resume_from_the_newest_of_that_run(pod):
    """Also when the same command is given again, as the line `stop:` says: the run is past that checkpoint then, and
    --keep may have removed it."""
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    (run / "model_19072.pt").write_text("old weights")

    pod.start("model_19072.pt", "2", "--max-lr", "1e-4")
    pod.wait_until_ended("log/mine")
    assert (run / "model_19072.pt").read_text() == "old weights"
    (run / "model_19072.pt").unlink()
    pod.start("log/mine/model_19072.pt", "2")
    pod.wait_until_ended("log/mine")

    resume = f"--resume auto --resume {run} --epochs 2"
    assert pod.starts() == [f"{resume} --max-lr 1e-4", resume]


@pytest.mark.parametrize("runs, count", [([], 0), (["mine", "other"], 2)])
def test_a_checkpoint_given_by_its_name_alone_must_be_in_exactly_one_run(pod, runs, count):
    for name in runs:
        (pod.root / "log" / name).mkdir(parents=True)
        (pod.root / "log" / name / "model_19072.pt").touch()

    done = pod.start("model_19072.pt", "2", check=False)

    assert done.returncode == 1 and done.stderr.startswith(f"error: model_19072.pt: {count} such files")


def test_an_earlier_checkpoint_is_not_replaced_by_a_later_one(pod):
    """With --resume, or into another folder, the user wants that very checkpoint: the trainer sees what was typed."""
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    for name in ("model_00500.pt", "model_00900.pt"):
        (run / name).touch()

    pod.start("--resume", "log/mine/model_00500.pt")
    pod.wait_until_ended("log/mine")
    pod.start("log/mine/model_00500.pt", "2", "--out-dir", "fork")
    pod.wait_until_ended("fork")

    resumed_from = [start.split("--resume ")[-1] for start in pod.starts()]
    assert resumed_from == ["log/mine/model_00500.pt", f"{run}/model_00500.pt"]


def test_one_run_a_folder(pod):
    pod.start(plan="hang")
    pod.wait_for_ranks()
    second = pod.start(check=False)
    assert second.returncode == 1 and "already" in second.stderr and "train.sh stop " in second.stderr

    # Only train.sh dies: its torchrun still trains, so the folder is still in use.
    os.kill(pod.pid(), signal.SIGKILL)
    pod.wait(lambda: not alive(pod.pid()))
    third = pod.start(check=False)
    assert third.returncode == 1 and str(pod.pid("rank0")) in third.stderr
    assert len(pod.starts()) == 1


def test_a_file_system_without_flock_is_told_from_one_whose_lock_is_held(pod):
    """flock exits with 65 there, as on Lustre mounted without -o flock. The trainer's own lock works on it."""
    pod.add_tool("flock", '#!/bin/sh\necho "flock: 9: Function not implemented" >&2\nexit 65\n')
    first = pod.start(plan="hang")
    assert "has no flock" in first.stderr
    pod.wait_for_ranks()

    second = pod.start(check=False)

    assert second.returncode == 1 and "already has a run" in second.stderr and len(pod.starts()) == 1


# ------------------------------------------------------------------------- the commands that a start prints


def read_commands(pod, *start, cwd=None, env=None):
    """Start a run with the words of a shell, which trains until it is stopped. Returns the commands after "follow:",
    "stop:" and "resume:" in its output."""
    (pod.root / "plan").write_text("hang")
    how = {"cwd": cwd or pod.root, "env": {**pod.env, **(env or {})}, "text": True, "timeout": 60}
    output = subprocess.check_output(start, stdin=subprocess.DEVNULL, **how)
    lines = [line.partition(":") for line in output.splitlines()]
    return {name: command.strip() for name, _, command in lines if name in ("follow", "stop", "resume")}


@pytest.mark.parametrize("command", [["./train.sh"], ["bash", "train.sh"], ["bash", "../train.sh"]])
def test_the_printed_commands_work_when_pasted(pod, command):
    """However train.sh was called, with blanks in names, and in another folder, as after the next log-in."""
    folder = pod.root / "my work" if ".." in command[-1] else pod.root
    folder.mkdir(exist_ok=True)
    out = str((folder / "two runs/a").relative_to(pod.root))
    printed = read_commands(pod, *command, "gpt2-124m", "--out-dir", "two runs/a", cwd=folder)
    pod.wait_for_ranks(out)

    def paste(words):
        return subprocess.run(["bash", "-c", words], cwd="/", env=pod.env, capture_output=True, text=True)

    follow = paste(f"timeout 1 {printed['follow']}")
    assert follow.stdout.startswith("20") and "start 1:" in follow.stdout and not follow.stderr
    stopped = paste(printed["stop"])
    assert stopped.returncode == 0, stopped.stderr
    assert "training stopped" in pod.wait_until_ended(out)

    # `stop` names the log, and the command that moves the run: it calls this project's hub.py
    told = stopped.stdout
    follow = paste(f"timeout 1 {told[told.index('tail -F') :].splitlines()[0]}")
    assert "training stopped" in follow.stdout and not follow.stderr
    push = told[told.index("stopped: ") + len("stopped: ") : told.index("; on the next")]
    assert paste(push.replace("OWNER/NAME", "me/x")).returncode == 0
    assert pod.read("pushed") == f"push-model {shlex.split(push)[3]} me/x --with-optimizer\n"
    assert shlex.split(push)[3] == str(pod.root / out)
    # the next machine pulls, in the project's folder, what the same start command resumes
    pull = told[told.index("pull-model") : told.index(", then the same start command")]
    assert shlex.split(pull) == ["pull-model", "OWNER/NAME", out]


@pytest.mark.parametrize(
    "typed, resumed",
    [
        ("model_00500.pt 2 --max-lr 1e-4", "--resume log/mine --epochs 2 --max-lr 1e-4"),
        ("log/mine/model_00500.pt 2 --out-dir fork", "--resume log/mine --epochs 2 --out-dir fork --resume fork"),
        ("--resume log/mine/model_00500.pt", "--resume log/mine/model_00500.pt --resume log/mine"),
        ("overfit --resume none", "overfit --resume none --resume log/overfit"),
    ],
)
def test_a_start_from_a_checkpoint_names_the_command_that_resumes_it(pod, typed, resumed):
    """The same command would begin at that checkpoint again, which the trainer refuses."""
    run = pod.root / "log" / "mine"
    run.mkdir(parents=True)
    (run / "model_00500.pt").touch()

    done = pod.start(*typed.split(), plan="finish")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("resume:")]
    command, _, note = line.removeprefix("resume:").partition("#")
    words = [word.removeprefix(f"{pod.root}/") for word in shlex.split(command)]
    assert words == ["train.sh", *resumed.split()] and note == " with the same variables"


@pytest.fixture
def run_with_old_log(pod):
    """A run folder with the log of an earlier start."""
    run = pod.root / "log" / "gpt2-124m"
    run.mkdir(parents=True)
    (run / "train-20200101-000000.log").write_text("the old start\n")
    return run


def test_the_newest_log_has_one_name_from_start_to_start(pod, run_with_old_log):
    (run_with_old_log / "train.log").symlink_to("train-20200101-000000.log")

    done = pod.start()
    pod.wait_until_ended()

    assert f"tail -F {run_with_old_log}/train.log\n" in done.stdout
    old, new = sorted(run_with_old_log.glob("train-*.log"))
    assert os.readlink(run_with_old_log / "train.log") == new.name and "training finished" in new.read_text()
    assert old.read_text() == "the old start\n"
    assert not list(run_with_old_log.glob("*.part*"))


@pytest.mark.parametrize("obstacle", ["no symbolic links", "a file of the user's own"])
def test_without_such_a_name_the_log_itself_is_followed(pod, run_with_old_log, obstacle):
    if obstacle == "no symbolic links":
        pod.add_tool("ln", "#!/bin/sh\necho 'ln: Operation not permitted' >&2\nexit 1\n")
    else:
        (run_with_old_log / "train.log").write_text("from nohup\n")

    done = pod.start()
    pod.wait_until_ended()

    _, new = sorted(run_with_old_log.glob("train-*.log"))
    assert f"tail -F {new}\n" in done.stdout and not done.stderr
    assert pod.read("log/gpt2-124m/train.log") == ("" if obstacle == "no symbolic links" else "from nohup\n")


# ------------------------------------------------------------------------- logout and stop


def test_stop_stops_this_run_and_nobody_else(pod):
    started = pod.start(plan="save-hang")
    pod.wait_for_ranks()
    assert f"train.sh stop {pod.root}/log/gpt2-124m " in started.stdout
    stopped = pod.start("stop", "log/gpt2-124m")
    assert "asked to stop" in stopped.stdout and "training stopped" in pod.wait_until_ended()

    # After a reboot the number is another process's, or nobody's.
    with subprocess.Popen(["sleep", "60"]) as other:
        for pid in (other.pid, 2**22 + 1, "x"):
            (pod.root / "log/gpt2-124m/train.pid").write_text(f"{pid}\n")
            refused = pod.start("stop", "log/gpt2-124m", check=False)
            assert refused.returncode == 1 and "is not this run's" in refused.stderr
        assert other.poll() is None
        other.kill()
    (pod.root / "log/gpt2-124m/train.pid").unlink()

    # The last lines say how to move the run; a second stop, that it has stopped.
    assert "push-model" in stopped.stdout and "--with-optimizer" in stopped.stdout
    for status, words in (("stopped", "stopped already"), ("finished", "has finished")):
        (pod.root / "log/gpt2-124m/status.json").write_text(json.dumps({"status": status}))
        again = pod.start("stop", "log/gpt2-124m")
        assert f"nothing to stop: the run in {pod.root}/log/gpt2-124m has" in again.stdout and words in again.stdout

    for arguments in ([], ["log/none"]):
        assert pod.start("stop", *arguments, check=False).returncode == 1


def test_survives_the_death_of_the_shell_that_started_it(pod):
    """The shell runs in a session of its own, which is killed as a logout does it, while it still shows the log."""
    (pod.root / "plan").write_text("hang")
    shell = subprocess.Popen(
        ["bash", str(pod.root / "train.sh")],
        cwd=pod.root,
        env={**pod.env, "START_WAIT": "60"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    ranks = pod.wait_for_ranks()

    for number in (signal.SIGHUP, signal.SIGKILL):
        os.killpg(shell.pid, number)
    shell.wait()
    os.kill(pod.pid(), signal.SIGHUP)
    time.sleep(0.3)  # the time in which it would die
    assert alive(pod.pid()) and all(map(alive, ranks))

    os.kill(pod.pid(), signal.SIGTERM)
    assert "training stopped" in pod.wait_until_ended()


def test_stop_saves_and_keeps_everything_where_it_is(pod):
    pod.start(plan="hang", PUSH_TO="me/x", REMOVE_POD="1")
    ranks = pod.wait_for_ranks()

    os.kill(pod.pid(), signal.SIGTERM)
    log = pod.wait_until_ended()

    assert "saved on SIGTERM" in log and "training stopped" in log and "this machine stays" in log
    assert not any(map(alive, ranks)) and not pod.read("pushed") and not pod.read("removed")
    assert len(pod.starts()) == 1  # a stop is not a failure


# ------------------------------------------------------------------------- failures and restarts


def test_restarts_until_it_works(pod):
    pod.start("--resume", "elsewhere/model_00005.pt", "--out-dir", "o", plan="system-error save-crash finish")
    log = pod.wait_until_ended("o")

    first, second, third = pod.starts()
    # after the first failure the run has no checkpoint of its own, after the second it has
    assert first == second and first.endswith("--resume elsewhere/model_00005.pt --out-dir o")
    assert third == first + f" --resume {pod.root}/o"
    assert log.count("exit code") == 2 and "training finished" in log


def test_gives_up_after_max_restarts(pod):
    pod.start(plan="crash", MAX_RESTARTS="2")
    log = pod.wait_until_ended()

    assert len(pod.starts()) == 3 and "restart 2 of 2" in log and "training failed: exit code" in log


def test_an_error_of_the_user_is_not_restarted_and_shown_at_once(pod):
    done = pod.start(plan="user-error", START_WAIT="20", check=False)

    assert done.returncode == 1 and "--max-lr -1 must be positive" in done.stdout
    assert len(pod.starts()) == 1
    # torchrun prints a traceback after the error: the last line of the terminal, and of the training, repeats it
    where, error = done.stderr.splitlines()
    assert "ended at once" in where and error == "error: --max-lr -1 must be positive"
    assert "training failed: --max-lr -1 must be positive\n" in pod.wait_until_ended()


def test_an_error_of_the_user_on_one_rank_outranks_the_system_error_of_another(pod):
    pod.start(plan="one-rank-user-error finish")

    assert "training failed: --max-lr -1 must be positive" in pod.wait_until_ended()
    assert len(pod.starts()) == 1


def test_the_status_of_an_earlier_start_is_not_taken_for_that_of_a_crash(pod):
    pod.start(plan="user-error", START_WAIT="20", check=False)
    assert "user_error" in pod.read("log/gpt2-124m/status.json")
    (pod.root / "starts").unlink()  # the plan begins again

    # a trainer that crashes writes no status, so that of the earlier start would still be there
    pod.start(plan="crash finish")
    assert "training finished" in pod.wait_until_ended()
    assert len(pod.starts()) == 2


REFUSED = {
    "quikstart": "did you mean 'quickstart'",
    "--resume no/model_00005.pt": "no checkpoint no/model_00005.pt",
    "overfit": "data folder data/stdlib does not exist",
}


@pytest.mark.parametrize("arguments, message", REFUSED.items())
def test_what_the_trainer_would_refuse_is_refused_before_the_start(arguments, message, tmp_path):
    command = ["bash", str(ROOT / "train.sh"), *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr
    assert not any(tmp_path.iterdir())  # nothing was begun


def test_a_gpu_that_torch_cannot_use_is_refused_before_the_start(pod):
    (pod.root / "bad_gpu").touch()
    done = pod.start("overfit", check=False)
    assert done.returncode == 1 and done.stderr == "error: torch is built without CUDA\n"
    assert not pod.starts() and not (pod.root / "log").exists()

    pod.start("overfit", "--device", "cpu")
    assert "training finished" in pod.wait_until_ended("log/overfit")


def test_flags_are_read_as_the_trainer_reads_them(pod):
    """With the trainer's own parser: other spellings of a flag, and the settings that a checkpoint has saved."""
    pod.use_real_parser()
    data = ["--data-dir", "hf://me/tokens"]

    output = pod.start("overfit", *data, "--out_dir=x", "--device", "cpu", plan="user-error").stdout
    assert f"1 process(es) on the CPU, run folder {pod.root}/x" in output
    pod.wait_until_ended("x")

    # a checkpoint whose saved settings name another folder and a time limit
    saved = TrainConfig(out_dir="elsewhere", data_dir=data[1], time_limit="3h50m").to_dict()
    state = {"format": 1, "step": 5, "max_steps": 9, "optimizers": [], "scaler": {}, "config": saved, "data": ""}
    state |= {"record": {}, "best": None, "evaluated": False, "rng": []}
    checkpoint.write(pod.root / "x" / "model_00005.pt", {"format": 1})
    checkpoint.write(pod.root / "x" / "optim_00005.pt", state)

    # a budget replaces the saved time limit
    budget = {"BUDGET_USD": "1", "GPU_HOUR_USD": "1"}
    output = pod.start("x/model_00005.pt", "2", plan="user-error", **budget).stdout
    assert f"run folder {pod.root}/x," in output
    pod.wait_until_ended("x")


@pytest.fixture
def start_with_real_hub(pod):
    """start_with_real_hub(read_only, ...) -> what a start prints whose token may write, or may not, with the real
    hub.py."""
    pod.use_real_hub()

    def start(read_only, **how):
        data = ["--data-dir", "hf://me/tokens", "--save-every", "5", "--keep", "2"]
        with hub_server.start(pod.root / "hub") as hub:
            hub.read_only = read_only
            return pod.start("overfit", *data, check=False, **hub.env(), PUSH_TO="tester/x", **how)

    return start


def test_a_repository_that_cannot_be_pushed_to_is_refused_before_the_start(pod, start_with_real_hub):
    done = start_with_real_hub(read_only=True)

    assert done.returncode == 1 and "403" in done.stderr and "write, to push" in done.stderr
    assert not pod.starts() and not (pod.root / "log").exists()


@pytest.mark.slow  # in `make test`: test_hub.py has the message, and a test below what train.sh asks hub.py
def test_a_start_says_how_much_will_be_stored_at_the_hub(pod, start_with_real_hub):
    done = start_with_real_hub(read_only=False, PUSH_EVERY="60", plan="user-error")

    assert done.returncode == 0 and "at most 0.2 GB in tester/x" in done.stdout
    pod.wait_until_ended("log/overfit")


def test_killed_torchrun_leaves_no_rank_behind(pod):
    pod.start(plan="hang finish")
    *ranks, torchrun = pod.wait_for_ranks()

    os.kill(torchrun, signal.SIGKILL)
    log = pod.wait_until_ended()

    assert not any(map(alive, ranks)) and "processes that torchrun left" in log and "training finished" in log
    assert pod.starts() == ["--resume auto"] * 2


# ------------------------------------------------------------------------- the status file of the real trainer


@pytest.fixture
def read_status(tmp_path, monkeypatch):
    """A function that returns (status, reason) of the trainer's last run; the trainer is asked to write them."""
    path = tmp_path / "status.json"
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(path))

    def read():
        status = json.loads(path.read_text())
        assert status.keys() == {"status", "reason"}
        return status["status"], status["reason"]

    return read


def test_the_trainer_reports_the_end_of_a_run(read_status, tiny_args, tmp_path):
    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "2")
    assert read_status() == ("finished", "")

    # there is nothing left to do
    (tmp_path / "status.json").unlink()
    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "2", "--resume", "auto")
    assert read_status() == ("finished", "")


def test_the_trainer_reports_why_it_was_stopped(read_status, tiny_args, tmp_path):
    """cloud/slurm.sbatch looks for these reasons."""
    stop = StopRequest("1s")
    stop.start_time -= 2
    train_quickstart(tiny_args, tmp_path / "limit", stop=stop)
    assert read_status() == ("stopped", "the time limit")

    stop = StopRequest()
    stop.signal = "SIGTERM"
    train_quickstart(tiny_args, tmp_path / "signal", stop=stop)
    assert read_status() == ("stopped", "signal SIGTERM")


def test_the_trainer_tells_errors_of_the_user_from_those_that_may_pass(read_status, tiny_args, tmp_path, run_in_fork):
    train = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run"]

    run_in_fork(*train, "--max-lr", "-1", check=False)
    status, reason = read_status()
    assert status == "user_error" and "-1" in reason

    # its output goes to a disk that is full
    (tmp_path / "status.json").unlink()
    done = processes.start(*train, log=tmp_path / "output", out="/dev/full").wait()
    status, reason = read_status()
    assert done.exit_code == 1 and status == "system_error" and "No space left" in reason


# ------------------------------------------------------------------------- publish, and remove the machine


def test_push_then_remove(pod):
    pod.use_simulated_clock()
    (pod.root / "push_fails").write_text("1")  # the first push fails
    pod.start(PUSH_TO="me/gpt2", REMOVE_POD="1")
    log = pod.wait_until_ended()

    assert pod.read("pushed").splitlines() == [f"push-model {pod.root}/log/gpt2-124m me/gpt2 --steps newest"] * 2
    assert pod.read("removed") == "pod delete pod7\n"
    assert log.index("push to") < log.index("the weights are at me/gpt2") < log.index("running: runpodctl")
    assert "tried again for 12 hours" in log and "hf auth login" not in log  # it did not fail because of the token


@pytest.mark.parametrize("plan", ["limit", "save-crash"])
def test_a_run_that_is_not_over_is_pushed_with_what_resuming_needs(pod, plan):
    push = {"PUSH_TO": "me/gpt2", "PUSH": "best", "PUSH_PUBLIC": "1"}
    pod.start(plan=plan, **push, REMOVE_POD="1", MAX_RESTARTS="0")
    log = pod.wait_until_ended()

    assert pod.read("pushed") == f"push-model {pod.root}/log/gpt2-124m me/gpt2 --public --steps best --with-optimizer\n"
    sizes = "--model-bytes 500000000 --optimizer-bytes 1000000000 --saves 4 --steps best"
    assert pod.read("checked") == f"me/gpt2 --public {sizes}"
    assert pod.read("removed") and "training finished" not in log
    assert len(pod.starts()) == 1


def test_new_checkpoints_are_pushed_while_training_continues(pod):
    # a sleep that is short and leaves a line: between two lines of the pusher's sleep it has looked for new checkpoints
    pod.add_tool("sleep", f'#!/bin/sh\necho "$1" >> {pod.root}/sleeps\nexec /bin/sleep 0.05\n')

    def looks():
        return pod.read("sleeps").splitlines().count("7")

    def wait_for_looks(count):
        before = looks()
        pod.wait(lambda: looks() >= before + count)

    # the first checkpoint is pushed once
    pod.start(plan="save-hang", PUSH_TO="me/mine", PUSH_EVERY="7")
    pod.wait(lambda: pod.read("pushed"))
    wait_for_looks(4)
    out = pod.root / "log/gpt2-124m"
    assert pod.read("pushed").splitlines() == [f"push-model {out} me/mine --with-optimizer --temporary"]

    # a new one is pushed, too
    for kind in ("optim", "model"):
        (out / f"{kind}_100000.pt").write_text("weights")
    pod.wait(lambda: len(pod.read("pushed").splitlines()) == 2)

    # when asked to stop, it pushes nothing more, and no pusher is left
    os.kill(pod.pid(), signal.SIGTERM)
    log = pod.wait_until_ended()
    assert "pushing model_100000.pt to me/mine while training continues" in log and "Terminated" not in log
    looks_at_end = looks()
    time.sleep(0.3)
    assert looks() == looks_at_end and len(pod.read("pushed").splitlines()) == 2


@pytest.mark.parametrize(
    "plan, env, removed",
    [
        ("finish", {"PERSISTENT": "1"}, True),
        ("save-crash", {"PUSH_TO": "me/x", "KEEP_ON_FAILURE": "1"}, False),
        ("crash", {"PUSH_TO": "me/x"}, True),  # there are no weights to lose
    ],
)
def test_when_the_pod_is_removed(pod, plan, env, removed):
    pod.start(plan=plan, REMOVE_POD="1", MAX_RESTARTS="0", **env)
    log = pod.wait_until_ended()

    assert bool(pod.read("removed")) == removed, log
    assert bool(pod.read("pushed")) == (plan == "save-crash")


@pytest.mark.parametrize("kind, is_suspect", [("overlay", True), ("tmpfs", True), ("nfs4", False)])
def test_a_start_with_persistent_says_on_which_file_system_the_run_folder_is(pod, kind, is_suspect):
    pod.add_tool("df", f'#!/bin/sh\necho Heading\n[ "$1" = --output=target ] && echo /mnt/x || echo {kind}\n')
    done = pod.start(PERSISTENT="1")
    assert f"you say that {pod.root}/log/gpt2-124m outlives this machine; it is on {kind} at /mnt/x" in done.stdout
    assert (f"warning: {kind} is usually" in done.stdout) == is_suspect
    pod.wait_until_ended()


def test_a_finished_run_is_pushed_with_its_optimizer_state_on_request(pod):
    pod.start(PUSH_TO="me/gpt2", PUSH_OPTIMIZER="1")
    pod.wait_until_ended()
    assert pod.read("pushed").endswith("--steps newest --with-optimizer\n")


def test_shutdown_command_of_another_cloud_and_its_failure(pod):
    pod.start(REMOVE_POD="1", PERSISTENT="1", SHUTDOWN_CMD=f"echo off > {pod.root}/off; exit 4", RUNPOD_POD_ID="")
    log = pod.wait_until_ended()

    assert pod.read("off") == "off\n" and not pod.read("removed") and "THAT FAILED (exit code 4)" in log


@pytest.mark.parametrize("known_command, removed", [("remove pod", True), ("terminate pod", False)])
def test_a_runpodctl_with_other_commands(pod, known_command, removed):
    """Version 1 has `remove pod`, version 2 `pod delete`. One that knows neither must not pass for success."""
    pod.add_tool("runpodctl", f'#!/bin/sh\n[ "$1 $2" = "{known_command}" ] || exit 1\necho "$@" > {pod.root}/removed\n')
    pod.start(REMOVE_POD="1", PERSISTENT="1")
    log = pod.wait_until_ended()

    assert pod.read("removed") == ("remove pod pod7\n" if removed else "")
    assert ("THAT FAILED" in log) != removed


def test_kill_in_the_last_seconds_keeps_the_pod(pod):
    pod.start(REMOVE_POD="1", PERSISTENT="1", REMOVE_DELAY="60")
    pod.wait(lambda: "removed in 60 seconds" in pod.log())

    os.kill(pod.pid(), signal.SIGTERM)

    assert "stays: asked to stop" in pod.wait_until_ended() and not pod.read("removed")


def test_budget_becomes_a_time_limit(pod):
    pod.start(BUDGET_USD="10", GPU_HOUR_USD="2.5", plan="crash finish")
    assert "7200 seconds" in pod.wait_until_ended()  # two GPUs at 2.5 an hour
    limits = [int(start.rsplit(" ", 1)[1]) for start in pod.starts()]
    assert 7190 <= limits[1] <= limits[0] <= 7200
    assert all(start.startswith("--resume auto --gpu-hour-usd 2.5 --time-limit ") for start in pod.starts())

    # both a budget and a time limit
    both = pod.start("--time-limit=3h50m", check=False, BUDGET_USD="10", GPU_HOUR_USD="2.5")
    assert both.returncode == 1 and "leave out --time-limit 3h50m" in both.stderr

    # a time limit alone
    pod.start("--time-limit", "3h50m", "--out-dir", "b")
    pod.wait_until_ended("b")
    assert pod.starts()[-1] == "--resume auto --time-limit 3h50m --out-dir b"


# ------------------------------------------------------------------------- settings and help


@pytest.mark.parametrize(
    "env, message",
    [
        ({"REMOVE_POD": "1"}, "only copy"),
        ({"REMOVE_POD": "1", "PERSISTENT": "1", "RUNPOD_POD_ID": ""}, "SHUTDOWN_CMD"),
        ({"PUSH_TO": "justaname"}, "owner/name"),
        ({"PUSH_EVERY": "3600"}, "needs PUSH_TO"),
        ({"PUSH_PUBLIC": "1"}, "needs PUSH_TO"),
        ({"PUSH_RETRY_HOURS": "2"}, "needs PUSH_TO"),
        ({"PUSH_RETRY_HOURS": "all", "PUSH_TO": "me/x"}, "PUSH_RETRY_HOURS=all"),
        ({"PUSH": "last", "PUSH_TO": "me/x"}, "newest, best or all"),
        ({"PUSH_EVERY": "1h", "PUSH_TO": "me/x"}, "PUSH_EVERY=1h"),
        ({"BUDGET_USD": "5"}, "GPU_HOUR_USD"),
        ({"BUDGET_USD": "lots", "GPU_HOUR_USD": "1"}, "BUDGET_USD=lots"),
        ({"MAX_RESTARTS": "1.5"}, "MAX_RESTARTS=1.5"),
        ({"NPROC": "two"}, "NPROC=two"),
        ({"REMOVE_POD": "yes"}, "REMOVE_POD=yes: must be 0 or 1"),
        ({"PERSISTENT": "true"}, "PERSISTENT=true: must be 0 or 1"),
        ({"PUSH_PUBLIC": "no", "PUSH_TO": "me/x"}, "PUSH_PUBLIC=no: must be 0 or 1"),
        ({"PUSH_OPTIMIZER": "2", "PUSH_TO": "me/x"}, "PUSH_OPTIMIZER=2: must be 0 or 1"),
        ({"KEEP_ON_FAILURE": "on"}, "KEEP_ON_FAILURE=on: must be 0 or 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(pod, env, message):
    done = pod.start(check=False, **env)

    assert done.returncode == 1 and done.stderr.startswith("error: ") and message in done.stderr
    assert not pod.starts() and not (pod.root / "log").exists()


def test_help_explains_every_variable(pod):
    text = pod.start("--help").stdout

    names = "NPROC START_WAIT MAX_RESTARTS RESTART_DELAY BUDGET_USD GPU_HOUR_USD PUSH_TO PUSH PUSH_PUBLIC PUSH_EVERY"
    names += " REMOVE_POD SHUTDOWN_CMD STOP_CMD PERSISTENT REMOVE_DELAY KEEP_ON_FAILURE PUSH_RETRY_HOURS PUSH_TIMEOUT"
    assert all(name in text for name in [*names.split(), "DISK_GB", "PUSH_OPTIMIZER"])
    assert "set -euo" not in text and not pod.starts()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_the_scripts():
    subprocess.run(["shellcheck", ROOT / "train.sh", ROOT / "cloud" / "slurm.sbatch", ROOT / ".ci" / "run"], check=True)
