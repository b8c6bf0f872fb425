"""train.sh: start, log out, restart, stop, publish, give the machine back.

pod.py has stand-ins for what it calls. The last test has every real part but the Hub and runpodctl.
"""

import fcntl
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
from helpers import ROOT, TINY_FLAGS, make_hellaswag_rows, make_shards, read_table, write_jsonl, write_script
from pod import Pod, is_alive
from processes import rank_pids, wait_for

from checkpoints.run_folder import latest_step
from training.config import HELLASWAG_DATA

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@pytest.fixture
def pod(tmp_path):
    pod = Pod(tmp_path / "model_1 [a]")  # a name is neither split, nor taken for a pattern
    yield pod
    pod.kill()


@pytest.fixture
def rented(pod):
    """A pod of eight GPUs whose end is to push, and then to remove it."""
    pod.env |= {"PUSH_TO": "me/x", "REMOVE_POD": "1", "GPU_HOUR_USD": "2.5", "NPROC": "8"}
    return pod


def read_settings(text):
    """{"NAME": "VALUE", ...} of "NAME=VALUE ..."."""
    return dict(word.split("=", 1) for word in shlex.split(text))


def count_starts(pod):
    return len(pod.read("starts").splitlines())


# ------------------------------------------------------------------------- start


# The words of a command | what the trainer is given, whose last word is the run folder that train.sh looks at. --keep
# may have deleted a checkpoint that is named; its run is still there, whose three epochs have seven steps. The folder
# "own" has a checkpoint already.
COMMANDS = """
                                             | --resume auto --out-dir log/gpt2-124m
record8-124m --max-steps 5                   | record8-124m --max-steps 5 --resume auto --out-dir log/record8-124m
--max_steps 5 --x=--out-dir                  | --max_steps 5 --x=--out-dir --resume auto --out-dir log/gpt2-124m
record8-124m --out_dir=x/y --resume auto     | record8-124m --out_dir=x/y --resume auto --out-dir x/y
--out-dir a --out-dir b                      | --out-dir a --out-dir b --resume auto --out-dir b
--resume log/old                             | --resume log/old --out-dir log/old
--resume=log/old/model_00007.pt              | --resume=log/old/model_00007.pt --out-dir log/old
--resume log/old/model_00007.pt --out-dir new| --resume log/old/model_00007.pt --out-dir new --out-dir new
model_00007.pt 6 --keep 9                    | --resume log/old --epochs 6 --max-steps 14 --keep 9 --out-dir log/old
log/old/model_00001.pt 6                     | --resume log/old --epochs 6 --max-steps 14 --out-dir log/old
model_00007.pt --out-dir own                 | --resume log/old --out-dir own --out-dir own --resume own
"""


@pytest.mark.parametrize("words, given", read_table(COMMANDS))
def test_the_trainer_writes_where_train_sh_looks(pod, words, given):
    pod.add_checkpoint("log/old", 7)
    pod.add_checkpoint("own", 8)
    pod.root.joinpath("log/old/config.json").write_text('{"resolved_max_steps": 7, "epochs": 3}')
    done = pod.call(*words.split())
    pod.wait_until_ended()
    # With a host name that did not resolve, torchrun had not started after 400 seconds; with --local-addr after 21.
    assert "--standalone --nproc_per_node=2 --local-addr=127.0.0.1 " in pod.read("starts")
    assert pod.read("starts").endswith(f"train_gpt2.py {given}\n")
    folder = given.split()[-1]
    assert pod.root.joinpath(folder, "model_00010.pt").exists() and f"pid {pod.supervisor}" in done.stdout
    assert "training finished" in pod.read(f"{folder}/train.log") and not pod.read("pushed") + pod.read("removed")


# What is refused at once: arguments | settings | a word of the message.
REFUSED = """
model_00001.pt 2       |                                          | log/b/model_00001.pt
model_00007.pt 2       |                                          | model_00007.pt
nowhere/model_00001.pt |                                          | nowhere
log/a/model_00001.pt 2 |                                          | log/a/config.json
                       | PUSH_EVERY=60                            | PUSH_TO
                       | PUSH_TO=me/x NO_TOKEN=1                  |
                       | REMOVE_POD=1                             | PERSISTENT=1
                       | REMOVE_POD=1 PERSISTENT=1 RUNPOD_POD_ID= | SHUTDOWN_CMD
                       | REMOVE_POD=1 PERSISTENT=1 DISK=overlay   | PERSISTENT=1
stop                   |                                          | log/gpt2-124m
stop log/a             |                                          | log/a
"""


@pytest.mark.parametrize("words, settings, named", read_table(REFUSED))
def test_what_would_fail_later_is_refused_by_name(pod, words, settings, named):
    for folder in ("log/a", "log/b"):
        pod.add_checkpoint(folder, 1)
    done = pod.call(*words.split(), check=False, **read_settings(settings))
    assert done.returncode == 1 and named in done.stderr
    assert not pod.read("starts") and not (pod.root / "nowhere").exists() and not pod.started


@pytest.mark.parametrize("words", [["-h"], ["gpt2-124m", "--help"]])
def test_help_starts_nothing(pod, words):
    assert "MAX_RESTARTS" in pod.call(*words).stdout and not (pod.root / "log").exists()


# ------------------------------------------------------------------------- one supervisor, logout, stop


def test_one_run_a_folder_whatever_dies(pod):
    pod.add_checkpoint("my run", 10)
    trainer = pod.start_and_train(PUSH_TO="me/x", PUSH_EVERY="0.1", HUB_DOES="echo $$ >push; exec /bin/sleep 60")
    wait_for(lambda: pod.read("push").strip())

    # Its terminal has ended: what is signalled there does not reach it, and a last SIGHUP is ignored.
    assert os.getsid(pod.supervisor) == os.getsid(trainer) == pod.supervisor
    for pid in (pod.supervisor, trainer):
        os.kill(pid, signal.SIGHUP)
    time.sleep(0.2)  # the time in which they would die
    done = pod.start(check=False)
    assert done.returncode == 1 and str(pod.supervisor) in done.stderr and count_starts(pod) == 1 and is_alive(trainer)

    # A trainer that has lost its supervisor saves and stops. The same command starts again, whatever is still pushed.
    os.kill(pod.supervisor, signal.SIGKILL)
    wait_for(lambda: not is_alive(trainer))
    assert (pod.run / "model_00042.pt").exists() and is_alive(int(pod.read("push")))
    pod.start()
    pod.wait_until_ended()
    assert count_starts(pod) == 2


def test_a_stop_saves_and_keeps_the_machine(rented):
    """Also a second one, which ranks take as the order to die."""
    rented.env["ON_TERM"] = "until [[ -e go ]]; do /bin/sleep 0.02; done"
    trainer = rented.start_and_train()
    for _ in range(3):
        rented.call("stop", "my run")
    (rented.root / "go").touch()
    log = rented.wait_until_ended()

    assert (rented.run / "model_00042.pt").exists() and not is_alive(trainer)
    assert rented.read("signals") == "x\n"
    assert count_starts(rented) == 1  # a stop is no failure
    assert not rented.read("pushed") and not rented.read("removed")
    assert "training stopped" in log


# Where train.sh runs | what its trainer does | the signal that comes | train.sh's exit code.
JOBS = """
process 1    | hang         | SIGTERM | 0
SLURM_JOB_ID | hang         | SIGUSR1 | 0
PBS_JOBID    | hang         | SIGUSR2 | 0
LSB_JOBID    | hang         | SIGXCPU | 0
PBS_JOBID    | crash finish |         | 0
process 1    | user-error   |         | 1
"""


@pytest.mark.parametrize("place, plan, name, exit_code", read_table(JOBS))
def test_a_batch_job_lasts_as_long_as_its_run(pod, place, plan, name, exit_code):
    """In the foreground, as also process 1 of a container does. It passes on a signal, and the run's exit code."""
    command = pod.command("--out-dir", pod.run.name)
    if place == "process 1":
        unshare = ("unshare", "--pid", "--fork")
        command = [*unshare, *command]
        if subprocess.run([*unshare, "true"], capture_output=True).returncode:
            pytest.skip("needs the right to make a process namespace")
    env = {**pod.env, place: "7", "PLAN": plan}
    job = subprocess.Popen(command, cwd=pod.root, env=env, stdout=subprocess.PIPE, text=True)
    if name:
        wait_for(lambda: pod.read("trainer").strip())
        assert job.poll() is None
        os.kill(rank_pids(job.pid)[0] if place == "process 1" else job.pid, signal.Signals[name])
    output, _ = job.communicate(timeout=60)
    assert str(job.returncode) == exit_code and "train.sh: training " in output
    assert any(pod.run.glob("model_*.pt")) == (exit_code == "0")


@pytest.mark.parametrize("host, is_running", [(os.uname().nodename, False), ("elsewhere", True)])
def test_a_stop_touches_no_other_process(pod, host, is_running):
    """Of a run that has ended; then of one of another machine, whose lock a network volume shows here, too."""
    pod.run.mkdir()
    with subprocess.Popen(["/bin/sleep", "60"]) as other, open(pod.run / "train.lock", "w") as lock:
        print(other.pid, "on", host, file=lock, flush=True)
        if is_running:
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = pod.call("stop", "my run", check=False)
        assert done.returncode == 1 and other.poll() is None
        other.kill()


# ------------------------------------------------------------------------- failures, restarts, time


# What the starts of the trainer do | how many there are | the exit code. A run that gets on is counted anew.
STARTS = """
slow-crash                                          | 3 | 1
user-error finish                                   | 1 | 1
limit finish                                        | 1 | 0
crash save-again save-again save-again crash finish | 6 | 0
"""


@pytest.mark.parametrize("plan, starts, exit_code", read_table(STARTS))
def test_crashes_are_restarted_and_nothing_else(pod, plan, starts, exit_code):
    """The time limit counts over restarts, from the time that each start gets (tests/test_stop.py). The start shows how
    it has failed, and nothing that an earlier one has left."""
    pod.run.mkdir()
    (pod.run / "status.json").write_text('{"status": "user_error"}')
    (pod.run / "train.log").write_text("from an earlier start\n")
    pod.seconds["show_log_s"] = "20"
    done = pod.start(PLAN=plan, MAX_RESTARTS="2", check=False)
    assert "earlier" in pod.wait_until_ended()
    times = pod.read("times").split()
    assert [str(len(times)), str(done.returncode)] == [starts, exit_code]
    assert len(set(times)) == 1 and 0 <= time.time() - int(times[0]) < 60
    assert "train.sh: training " in done.stdout and "earlier" not in done.stdout


@pytest.mark.parametrize("plan", ["crash save-crash finish", "cut save-crash finish"])
def test_a_restart_resumes_the_runs_own_checkpoint(pod, plan):
    """Not before it has one: the first save may end between its two files. A file of the user's is none."""
    pod.run.mkdir()
    (pod.run / "model_best.pt").touch()
    pod.start("--resume", "elsewhere/model-5", PLAN=plan)
    pod.wait_until_ended()
    first, second, third = pod.read("starts").splitlines()
    assert first == second
    assert third == f"{first} --resume my run"


# ------------------------------------------------------------------------- push, and give the machine back


def test_a_push_that_fails_is_tried_again(rented):
    """And nothing else is pushed any more, or it would replace what was pushed."""
    rented.seconds["push_pause_s"] = "0.3"
    rented.start(HUB_DOES="(($(grep -c best <pushed) > 2))", PUSH_EVERY="0.2")
    rented.wait_until_ended()
    assert rented.read("pushed").splitlines()[-3:] == ["push-model my run me/x --with-optimizer --steps best"] * 3
    assert rented.read("removed") == "pod delete pod7\n"


# How a run ends | what else matters | the command that ends the bill. While the weights are on this machine alone,
# nothing removes it.
ENDINGS = """
finish     |                               | pod delete pod7
finish     | REMOVE_POD=0                  |
finish     | HUB_DOES=false                |
finish     | HUB_DOES='exec /bin/sleep 60' |
finish     | HUB_DOES=false PERSISTENT=1   | pod delete pod7
finish     | PUSH_TO= PERSISTENT=1         | pod delete pod7
limit      |                               | pod delete pod7
save-crash |                               | pod delete pod7
save-crash | HUB_DOES=false                |
crash      | HUB_DOES=false                | pod delete pod7
cut        | HUB_DOES=false                | pod delete pod7
unmount    | HUB_DOES=false                |
user-error |                               |
user-error | LATE=1                        | pod delete pod7
"""


@pytest.mark.parametrize("plan, settings, removed", read_table(ENDINGS))
def test_the_only_copy_of_the_weights_is_never_removed(rented, plan, settings, removed):
    if "HUB_DOES" in settings:
        rented.seconds |= {"push_retry_s": "0", "push_try_s": "0.3"}
    if "LATE" in settings:
        rented.seconds["early_mistake_s"] = "-1"
    rented.start(check=False, PLAN=plan, MAX_RESTARTS="0", **read_settings(settings))
    rented.wait_until_ended()
    assert rented.read("removed").strip() == removed
    assert plan not in ("crash", "cut") or not rented.read("pushed")


@pytest.mark.parametrize("hub", ["false", "true"])
def test_a_kill_at_the_end_keeps_the_machine(rented, hub):
    """While it waits to push again, or to remove the machine. The log begins and ends with the price."""
    rented.seconds |= {"push_pause_s": "60", "remove_delay_s": "60"}
    rented.start(HUB_DOES=hub)
    wait_for(lambda: rented.read("pushed") if hub == "false" else "in 60 seconds" in rented.read("my run/train.log"))
    os.kill(rented.supervisor, signal.SIGTERM)
    first_line, *_, last_line = rented.wait_until_ended().splitlines()
    for line in (first_line, last_line):
        assert "$20.00" in line and "runpodctl pod delete pod7" in line
    assert not rented.read("removed")


def test_a_public_repository_is_pushed_to_if_asked(pod):
    """The check before the start writes its words to the file checked."""
    pod.start(PUSH_TO="me/x", PUSH_PUBLIC="1")
    pod.wait_until_ended()
    assert pod.read("checked") == "check me/x --public\n"
    assert pod.read("pushed") == "push-model my run me/x --public --with-optimizer --steps best\n"


def test_checkpoints_are_pushed_while_it_trains(pod):
    pod.add_checkpoint("my run", 99999)
    (pod.run / "model_best.pt").touch()  # the user's own
    pod.start_and_train(PUSH_TO="me/x", PUSH_EVERY="0.1")
    wait_for(lambda: pod.read("pushed"))
    time.sleep(0.4)
    pod.add_checkpoint("my run", 100000)
    push = "push-model my run me/x --with-optimizer\n"
    assert pod.read("pushed") == push  # the same checkpoint is pushed once
    wait_for(lambda: pod.read("pushed") == 2 * push)


@pytest.mark.parametrize("known, removed", [("remove pod", "remove pod pod7\n"), ("terminate pod", "")])
def test_another_version_of_runpodctl(rented, known, removed):
    """Also one that fails at first: the command that ends the bill is tried again."""
    script = f'#!/bin/sh\necho x >>tries\n[ $(wc -l <tries) -gt 2 ] && [ "$1 $2" = "{known}" ] || exit 1\n'
    write_script(rented.root / "bin/runpodctl", f'{script}echo "$@" > "$POD/removed"\n')
    rented.start()
    last_line = rented.wait_until_ended().splitlines()[-1]
    assert rented.read("removed") == removed
    assert ("$20.00" in last_line) == (not removed)


PREPARED = """\
hub.py check HF_USER/MODEL
-m torch.distributed.run --standalone --nproc_per_node=2 train_gpt2.py gpt2-124m --dry-run \
--gpu-hour-usd 2.5 --time-limit 8h --stop-off-track
hellaswag.py
hub.py pull-data kjj0/finewebedu10B-gpt2 data/fineweb-edu
"""


def test_the_lines_of_the_weekend_prepare_a_machine_and_start(pod):
    """Those of docs/running.md. The first try ends at the tokens, and the second goes on there: what is done already is
    not done again."""
    project, lines = pod.root / "project", (ROOT / "docs/running.md").read_text()
    lines = "".join(re.findall(r"^    (export .*\n|make gpt2-124m .*\n)", lines, re.MULTILINE)[:3])
    pod.call("--help")  # writes train.sh
    shutil.copy(ROOT / "Makefile", project)
    for name in ("requirements.txt", "constraints.txt", ".venv/.installed"):
        (project / name).touch()

    def type_lines(nvidia="/dev/nvidia0", **settings):
        env = {**pod.env, "NPROC": "2", "MAKEFLAGS": f" -- NVIDIA={nvidia}", **settings}
        return subprocess.run(["bash", "-ec", lines], cwd=project, env=env, capture_output=True, text=True)

    for lacking in {"nvidia": ""}, {"FREE": "20000000"}:
        assert type_lines(**lacking).returncode and not pod.read("prepared")
    failed = type_lines(PREPARING="[[ $* != *pull-data* ]]")
    assert failed.returncode and "fineweb.py --source fineweb-edu" in failed.stdout and not pod.read("starts")
    assert pod.read("prepared") == PREPARED

    (project / "log/gpt2-124m").mkdir(parents=True)
    (project / "log/gpt2-124m/config.json").touch()
    (project / "data/fineweb-edu").mkdir(parents=True)
    for _ in range(2):
        done = type_lines(PLAN="finish")
        assert done.returncode == 0, done.stdout + done.stderr
        pod.started.append(int(re.search(r", pid (\d+)", done.stdout)[1]))
        wait_for(lambda: not is_alive(pod.supervisor))
    again = [line.split()[1] for line in pod.read("prepared").splitlines()[4:] if line.startswith("hub.py")]
    assert again == ["check", "pull-data", "check", "check", "check"]
    assert "gpt2-124m --time-limit 8h --stop-off-track --resume auto" in pod.read("starts")
    assert pod.read("removed").split() == ["pod", "delete", "pod7"] * 2


def test_a_mistake_is_logged_without_torchruns_traceback(tmp_path):
    """With the real torchrun and trainer."""
    command = ["bash", ROOT / "train.sh", "quickstart", "--data-dir", "nowhere"]
    env = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "NPROC": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    output = done.stdout + done.stderr
    assert done.returncode == 1 and output.count(f"error: {tmp_path}/nowhere is not") == 1 and "Traceback" not in output


@pytest.mark.slow
def test_pod_from_rent_to_removal(tmp_path):
    """By one command: fetch the tokens, start, log out, stop, start again, lose a rank, finish, publish, remove the
    pod."""
    pod, removed = tmp_path / "pod", tmp_path / "removed"
    pod.mkdir()
    for path in ROOT.iterdir():
        if path.name not in ("data", "log") and not path.name.startswith("."):
            (pod / path.name).symlink_to(path)
    (pod / ".venv").symlink_to(sys.prefix)
    (pod / HELLASWAG_DATA).parent.mkdir(parents=True)
    write_jsonl(pod / HELLASWAG_DATA, make_hellaswag_rows(4))
    run, last_step = pod / "log" / "gpt2-124m", 80
    flags = f"""--model.vocab-size 50304 --total-batch-size 64 --micro-batch-size 1 --max-steps {last_step}
    --val-every 20 --val-tokens 256 --save-every 5""".split()
    settings = ["NVIDIA=/dev/nvidia0", "NEEDS_GB=0", f"TRAIN_ARGS={shlex.join([*TINY_FLAGS, *flags])}"]
    command = ["make", "-o", ".venv/.installed", "gpt2-124m", *settings]

    def start():
        """Returns the command that stops the run, which is printed before the terminal is closed."""
        how = {"cwd": pod, "env": env, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, start_new_session=True, **how) as shell:
            printed = next(line for line in shell.stdout if line.startswith("stop:"))
            os.killpg(shell.pid, signal.SIGKILL)
        return printed.removeprefix("stop:")

    def supervisor():
        return int((run / "train.lock").read_text().split()[0])

    with hub_server.start(tmp_path / "hub") as server:
        make_shards(server.root / "datasets/kjj0/finewebedu10B-gpt2")
        # It writes down what the Hub has when it is called.
        shutdown = f"ls {server.root}/models/tester/life >> {removed}"
        env = {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}", "HOME": str(pod), **server.env()}
        env |= {"OMP_NUM_THREADS": "1", "NPROC": "2"}
        env |= {"PUSH_TO": "tester/life", "REMOVE_POD": "1", "SHUTDOWN_CMD": shutdown}

        # Start; stop by the printed command. It saves, and the machine stays.
        stop = start()
        wait_for(lambda: (latest_step(run) or 0) >= 10, 240)
        subprocess.run(stop, shell=True, check=True, cwd="/")
        wait_for(lambda: not is_alive(supervisor()), 240)
        stopped_at = latest_step(run)
        assert 10 <= stopped_at < last_step and not removed.exists()

        # The same command resumes; a rank that is killed is restarted without human help.
        start()
        wait_for(lambda: latest_step(run) >= stopped_at + 10, 240)
        torchrun = rank_pids(supervisor())[0]
        os.kill(rank_pids(torchrun)[-1], signal.SIGKILL)

        # The pod was removed after the last checkpoint was published.
        wait_for(lambda: removed.exists() and f"model_{last_step:05d}.pt" in removed.read_text().split(), 240)
        log = (run / "train.log").read_text()
        assert "failure 1" in log and "training finished" in log, log
