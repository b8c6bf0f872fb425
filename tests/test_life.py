"""Lives of a run, with every real part: from one machine to another through the Hub, and on a rented pod to its end.
Only the Hub and runpodctl are stand-ins."""

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
from helpers import (
    ROOT,
    TINY_FLAGS,
    assert_curves_close,
    load_curve,
    load_weights,
    make_shards,
    same_bits,
    train_quickstart,
)
from processes import rank_pids, wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import checkpoint
from training.metrics import tensorboard_tag

GPT2_TOKENS = ["--model.vocab-size", "50304"]  # the vocabulary of make_shards, for the tiny network
LAST_STEP = 100


@pytest.mark.slow
def test_a_run_moves_to_another_machine_through_the_hub(run_script, tmp_path):
    """Push tokens, train from hf://, push the run, pull it elsewhere, resume it, sample."""
    first_machine, second_machine = tmp_path / "first", tmp_path / "second"
    first_machine.mkdir()
    second_machine.mkdir()
    make_shards(first_machine / "toy")
    train = ["train_gpt2.py", "quickstart", *TINY_FLAGS, *GPT2_TOKENS, "--data-dir", "hf://tester/toy"]

    with hub_server.start(tmp_path / "hub") as server:

        def run_on(machine, *args):
            return run_script(*args, env=server.env(), cwd=machine)

        run_on(first_machine, "hub.py", "push-data", "toy", "tester/toy")
        run_on(first_machine, *train, "--max-steps", "6", "--out-dir", "log/run")
        assert (first_machine / "data" / "tester--toy" / "manifest.json").is_file()
        run_on(first_machine, "hub.py", "push-model", "log/run", "tester/run", "--with-optimizer")

        run_on(second_machine, "hub.py", "pull-model", "tester/run", "pulled")
        run_on(second_machine, *train, "--max-steps", "9", "--out-dir", "pulled", "--resume", "auto")

    assert checkpoint.latest_step(second_machine / "pulled") == 9
    sample = run_script("infer.py", second_machine / "pulled", "x = ", "--max-new-tokens", "3", cwd=second_machine)
    assert sample.stdout.startswith("x = ")


class RentedPod:
    """A folder as that of a pod, on which train.sh is started with everything that publishes the run and removes the
    pod. `removed` is the file that the stand-in of runpodctl writes."""

    def __init__(self, folder, ranks, train_arguments, server):
        self.folder = folder
        self.run = folder / "log" / "quickstart"
        self.removed = folder.parent / "removed"
        self.command = ["bash", str(ROOT / "train.sh"), *train_arguments]

        # The pod may be removed only if its last checkpoint is on the Hub: runpodctl writes down what is there.
        tools = folder.parent / "bin"
        tools.mkdir()
        published = server.root / "models" / "tester" / "life"
        (tools / "runpodctl").write_text(f'#!/bin/sh\n(echo "$@"; ls {published}) >> {self.removed}\n')
        (tools / "runpodctl").chmod(0o755)

        self.env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        self.env |= {"NPROC": str(ranks), "PUSH_TO": "tester/life", "REMOVE_POD": "1", "RUNPOD_POD_ID": "pod7"}
        self.env |= {"GPU_HOUR_USD": "2.5", "RESTART_DELAY": "0", "REMOVE_DELAY": "0", **server.env()}

    def start_in_shell_and_log_out(self):
        """Start the run from a shell of its own and kill the shell's whole session, as a logout does it, once training
        has started. Returns the commands that train.sh printed: {"follow": ..., "stop": ...}."""
        shell = subprocess.Popen(
            self.command,
            env={**self.env, "START_WAIT": "60"},
            cwd=self.folder,
            text=True,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        printed = {}
        for line in shell.stdout:
            printed |= dict(re.findall(r"^(follow|stop): +(.*)", line))
            if "train.sh: start 1" in line:
                break
        os.killpg(shell.pid, signal.SIGHUP)
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        return printed

    def start_again(self):
        """The same command, from a shell that returns at once."""
        log_count = len(self.logs())
        wait_for(lambda: f"train-{time.strftime('%Y%m%d-%H%M%S')}.log" not in self.logs())  # named by the second
        subprocess.run(
            self.command,
            env={**self.env, "START_WAIT": "0"},
            cwd=self.folder,
            check=True,
            timeout=120,
            stdout=subprocess.PIPE,
        )
        assert len(self.logs()) == log_count + 1

    def logs(self):
        return [path.name for path in sorted(self.run.glob("train-*.log"))]

    def log(self):
        return "".join((self.run / name).read_text() for name in self.logs())

    def newest_step(self):
        return checkpoint.latest_step(self.run) or 0

    def train_sh_pid(self):
        return int((self.run / "train.pid").read_text())

    def wait_until_ended(self):
        wait_for(lambda: not (self.run / "train.pid").exists(), 240)

    def kill(self):
        """End what is left of a test that failed."""
        if (self.run / "train.pid").exists():
            os.kill(self.train_sh_pid(), signal.SIGTERM)


@pytest.mark.skipif(shutil.which("setsid") is None or shutil.which("flock") is None, reason="needs util-linux")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pod_from_rent_to_removal(ranks, tmp_path):
    """Start, log out, follow, be preempted, start again, lose a rank, finish, publish, remove the pod; sample."""
    folder, home = tmp_path / "pod", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    make_shards(folder / "toy")
    flags = [*TINY_FLAGS, *GPT2_TOKENS, "--total-batch-size", "64", "--micro-batch-size", "1"]
    flags += ["--max-steps", str(LAST_STEP), "--val-every", "40", "--val-tokens", "256", "--save-every", "5"]
    flags += ["--keep", "1", "--sample-every", "50"]
    train_arguments = ["quickstart", *flags, "--data-dir", "toy", "--tracker", "tensorboard"]

    with hub_server.start(tmp_path / "hub") as server:
        pod = RentedPod(folder, ranks, train_arguments, server)
        try:
            # start it and log out; follow it from another log-in, by the printed command
            printed = pod.start_in_shell_and_log_out()
            follow = ["timeout", "240", *shlex.split(printed["follow"])]
            tail = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
            assert any("| loss:" in line and "eta" in line and "cost: $" in line for line in tail.stdout)
            tail.kill()
            tail.wait()

            # preempted: SIGTERM, by the printed command; it saves and ends, and the machine stays
            wait_for(lambda: pod.newest_step() >= 10, 240)
            subprocess.run(printed["stop"].split("#")[0], shell=True, check=True)
            pod.wait_until_ended()
            stopped_at = pod.newest_step()
            assert 10 <= stopped_at < LAST_STEP
            assert "training stopped" in pod.log() and not pod.removed.exists()

            # the same command resumes; a rank that is killed is restarted without human help
            pod.start_again()
            wait_for(lambda: pod.newest_step() >= stopped_at + 10, 240)
            torchrun_pid = rank_pids(pod.train_sh_pid())[0]
            os.kill(rank_pids(torchrun_pid)[-1], signal.SIGKILL)
            pod.wait_until_ended()
        finally:
            pod.kill()

        # it has resumed, restarted, finished, published and removed the pod, in this order
        log = pod.log()
        assert f"steps {stopped_at} to {LAST_STEP}" in log and "restart 1 of 3" in log, log
        events = ("training finished", "the weights are at tester/life", "running: runpodctl")
        places = [log.index(event) for event in events]
        assert places == sorted(places)
        removed = pod.removed.read_text().split()
        assert removed[:3] == ["pod", "delete", "pod7"] and f"model_{LAST_STEP:05d}.pt" in removed, removed

        # sample on another machine, which knows nothing but the Hub
        home_env = {"PATH": os.environ["PATH"], "HOME": str(home), **server.env(), "HF_HOME": str(home / "hf")}

        def run_at_home(*args):
            command = [sys.executable, ROOT / args[0], *args[1:]]
            done = subprocess.run(command, cwd=home, env=home_env, capture_output=True, text=True, timeout=180)
            assert done.returncode == 0, done.stderr
            return done.stdout

        run_at_home("hub.py", "pull-model", "tester/life", "life")
        assert run_at_home("infer.py", "life", "x = ", "--max-new-tokens", "3").startswith("x = ")

    # no step was lost or done twice, in metrics.jsonl and in TensorBoard
    assert list(load_curve(pod.run)) == list(range(LAST_STEP + 1))
    events = EventAccumulator(str(pod.run / "tensorboard"), {"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars(tensorboard_tag("train_loss"))] == list(range(LAST_STEP))
    assert [e.step for e in events.Tensors("samples/text_summary")] == [50, 100]

    # the losses and weights are those of an undisturbed run; on one rank, to the bit
    undisturbed = train_quickstart([*flags, "--data-dir", str(folder / "toy")], tmp_path / "undisturbed")
    assert_curves_close(load_curve(pod.run), load_curve(undisturbed))
    if ranks == 1:
        assert load_curve(pod.run) == load_curve(undisturbed)
        assert same_bits(load_weights(home / "life", LAST_STEP), load_weights(undisturbed, LAST_STEP))
