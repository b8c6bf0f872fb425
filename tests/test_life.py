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

TOY = [*TINY_FLAGS, "--model.vocab-size", "50304"]  # GPT-2's tokens


@pytest.mark.slow
def test_a_run_moves_to_another_machine_through_the_hub(run_script, tmp_path):
    """Push tokens, train from hf://, push the run, pull it, go on, sample."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    tiny = [*TOY, "--data-dir", "hf://tester/toy"]
    with hub_server.start(tmp_path / "hub") as server:

        def run(where, *args):
            return run_script(*args, env=server.env(), cwd=where)

        make_shards(here / "toy")
        run(here, "hub.py", "push-data", "toy", "tester/toy")
        run(here, "train_gpt2.py", "quickstart", *tiny, "--max-steps", "6", "--out-dir", "log/run")
        assert (here / "data" / "tester--toy" / "manifest.json").is_file()
        run(here, "hub.py", "push-model", "log/run", "tester/run", "--with-optimizer")
        run(there, "hub.py", "pull-model", "tester/run", "pulled")
        run(there, "train_gpt2.py", "quickstart", *tiny, "--max-steps", "9", "--out-dir", "pulled", "--resume", "auto")
    assert checkpoint.latest_step(there / "pulled") == 9
    said = run_script("infer.py", there / "pulled", "x = ", "--max-new-tokens", "3", cwd=there)
    assert said.stdout.startswith("x = ")


@pytest.mark.skipif(shutil.which("setsid") is None or shutil.which("flock") is None, reason="needs util-linux")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pod_from_rent_to_removal(ranks, tmp_path):
    """Start, log out, follow, be preempted, start again, lose a rank, finish, publish, remove the pod; sample."""
    pod, home, steps = tmp_path / "pod", tmp_path / "home", 100
    run, tools = pod / "log" / "quickstart", tmp_path / "bin"
    for folder in (pod, home, tools):
        folder.mkdir()
    make_shards(pod / "toy")
    settings = [*TOY, "--total-batch-size", "64", "--micro-batch-size", "1", "--max-steps", str(steps)]
    settings += ["--val-every", "40", "--val-tokens", "256", "--save-every", "5", "--keep", "1", "--sample-every", "50"]
    train = ["quickstart", *settings, "--data-dir", "toy", "--tracker", "tensorboard"]
    with hub_server.start(tmp_path / "hub") as server:
        # the pod goes only if its last checkpoint is on the Hub: what is there at that moment is written down
        published = server.root / "models" / "tester" / "life"
        (tools / "runpodctl").write_text(f'#!/bin/sh\n(echo "$@"; ls {published}) >> {tmp_path}/removed\n')
        (tools / "runpodctl").chmod(0o755)
        env = {"PATH": f"{tools}:{os.environ['PATH']}", "HOME": str(pod), "OMP_NUM_THREADS": "1", "NPROC": str(ranks)}
        env |= {"PUSH_TO": "tester/life", "REMOVE_POD": "1", "RUNPOD_POD_ID": "pod7", "GPU_HOUR_USD": "2.5"}
        env |= {"RESTART_DELAY": "0", "REMOVE_DELAY": "0", "START_WAIT": "60", **server.env()}
        command = ["bash", str(ROOT / "train.sh"), *train]

        def log():
            return "".join(p.read_text() for p in sorted(run.glob("train-*.log")))

        def newest():
            return checkpoint.latest_step(run) or 0

        try:
            # start in a shell of its own, read what it prints, log out: its whole session dies
            how, told = {"cwd": pod, "text": True, "stdout": subprocess.PIPE}, {}
            shell = subprocess.Popen(command, env=env, start_new_session=True, **how)
            for line in shell.stdout:
                told |= dict(re.findall(r"^(follow|stop): +(.*)", line))
                if "train.sh: start 1" in line:
                    break
            os.killpg(shell.pid, signal.SIGHUP)
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            # follow it, by the printed command, from another log-in
            follow = ["timeout", "240", *shlex.split(told["follow"])]
            tail = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
            assert any("| loss:" in line and "eta" in line and "cost: $" in line for line in tail.stdout)
            tail.kill()
            tail.wait()
            # preempted: SIGTERM, by the printed command; it saves and ends, and the machine stays
            wait_for(lambda: newest() >= 10, 240)
            subprocess.run(told["stop"].split("#")[0], shell=True, check=True)
            wait_for(lambda: not (run / "train.pid").exists(), 240)
            stopped = newest()
            assert 10 <= stopped < steps and "training stopped" in log() and not (tmp_path / "removed").exists()
            # the same command goes on; a rank that is killed costs no human
            time.sleep(1)  # logs are named by the second
            subprocess.run(command, env={**env, "START_WAIT": "0"}, check=True, timeout=120, **how)
            wait_for(lambda: newest() >= stopped + 10, 240)
            torchrun = rank_pids(int((run / "train.pid").read_text()))[0]
            os.kill(rank_pids(torchrun)[-1], signal.SIGKILL)
            wait_for(lambda: not (run / "train.pid").exists(), 240)
        finally:
            if (run / "train.pid").exists():
                subprocess.run(["kill", (run / "train.pid").read_text().strip()])
        said = log()
        assert f"steps {stopped} to {steps}" in said and "restart 1 of 3" in said, said
        assert said.index("training finished") < said.index("the weights are at tester/life") < said.index("runpodctl")
        removed = (tmp_path / "removed").read_text().split()
        assert removed[:3] == ["pod", "delete", "pod7"] and f"model_{steps:05d}.pt" in removed, removed
        # on another machine, which knows nothing but the Hub
        empty = {"PATH": os.environ["PATH"], "HOME": str(home), **server.env(), "HF_HOME": str(home / "hf")}

        def at_home(*args):
            command = [sys.executable, ROOT / args[0], *args[1:]]
            done = subprocess.run(command, cwd=home, env=empty, capture_output=True, text=True, timeout=180)
            assert done.returncode == 0, done.stderr
            return done.stdout

        at_home("hub.py", "pull-model", "tester/life", "life")
        assert at_home("infer.py", "life", "x = ", "--max-new-tokens", "3").startswith("x = ")
    # no step was lost or done twice, in the record and in TensorBoard, and the weights are those of a quiet run
    assert list(load_curve(run)) == list(range(steps + 1))
    events = EventAccumulator(str(run / "tensorboard"), {"scalars": 0}).Reload()
    assert [e.step for e in events.Scalars("train_loss")] == list(range(steps))
    assert [e.step for e in events.Tensors("samples/text_summary")] == [50, 100]
    quiet = train_quickstart([*settings, "--data-dir", str(pod / "toy")], tmp_path / "quiet")
    if ranks == 1:
        assert load_curve(run) == load_curve(quiet) and same_bits(
            load_weights(home / "life", steps), load_weights(quiet, steps)
        )
    assert_curves_close(load_curve(run), load_curve(quiet))
