"""Ranks that die and machines that meet: torchrun restarts, two agents on loopback, resume on the other side."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from conftest import ROOT
from test_train import assert_close, curve, fit, same_bits, weights

import checkpoint

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
# what README.md has people export on each of several machines
EXPORT = re.search(r"export (TORCH_\w+)=(\w+)", (ROOT / "README.md").read_text())


def ranks_of(agent: int) -> list[int]:
    """Process ids of the ranks that a torchrun agent started."""
    with open(f"/proc/{agent}/task/{agent}/children") as f:
        return [int(p) for p in f.read().split()]


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("timed out")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def agent(*args, **env):
    command = [sys.executable, "-m", "torch.distributed.run", *args]
    return subprocess.Popen(command, env={**ENV, **env}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_a_killed_rank_costs_no_human_and_no_bits(tiny_args, tmp_path, torchrun):
    run = [
        "quickstart",
        *tiny_args,
        "--max-steps",
        "120",
        "--save-every",
        "10",
        "--val-every",
        "40",
        "--resume",
        "auto",
    ]
    torchrun(2, "train_gpt2.py", *run, "--out-dir", tmp_path / "whole")
    out = tmp_path / "killed"
    script = str(ROOT / "train_gpt2.py")
    process = agent("--standalone", "--nproc_per_node=2", "--max-restarts=3", script, *run, "--out-dir", str(out))
    wait_for(lambda: (checkpoint.latest_step(out) or 0) >= 20)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said[-3000:]
    assert said.count("torch ") >= 2, "it was not restarted"
    assert curve(out) == curve(tmp_path / "whole")
    assert same_bits(weights(out, 120), weights(tmp_path / "whole", 120))


def two_machines(run, port, restarts=0, script=ROOT / "train_gpt2.py"):
    """A function that starts the torchrun of one of two machines, which meet at `port`."""
    meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    meet += [f"--max-restarts={restarts}", "--rdzv-conf=join_timeout=60", "--local-addr=127.0.0.1"]
    return lambda: agent(*meet, str(script), *run, **{EXPORT[1]: EXPORT[2]})


def test_two_machines_equal_one(tiny_args, tmp_path):
    one = fit(tiny_args, tmp_path / "one")
    run = ["quickstart", *tiny_args, "--out-dir", str(tmp_path / "two"), "--resume", "auto"]
    start = two_machines(run, free_port())
    machines = [start(), start()]
    said = [m.communicate(timeout=120)[0] for m in machines]
    assert [m.returncode for m in machines] == [0, 0], said
    assert_close(curve(tmp_path / "two"), curve(one))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")
def test_a_rank_killed_on_one_of_two_machines_costs_no_human_and_no_bits(tiny_args, tmp_path):
    """The first machine's ranks are the later ones: those of the other could find what the dead have left."""
    steps = ["--max-steps", "120", "--save-every", "10", "--val-every", "40"]
    run = ["quickstart", *tiny_args, *steps, "--resume", "auto"]
    undisturbed = two_machines([*run, "--out-dir", str(tmp_path / "whole")], free_port())
    assert [m.wait(120) for m in (undisturbed(), undisturbed())] == [0, 0]
    out = tmp_path / "killed"
    late, words = tmp_path / "late.py", f"[sys.executable, {str(ROOT / 'train_gpt2.py')!r}, *sys.argv[1:]]"
    late.write_text(f"import os, sys, time\ntime.sleep(2)\nos.execv(sys.executable, {words})")
    meet = partial(two_machines, [*run, "--out-dir", str(out)], free_port(), restarts=1)
    machines = [meet(script=late)(), meet()()]
    wait_for(lambda: (checkpoint.latest_step(out) or 0) >= 20)
    os.kill(ranks_of(machines[1].pid)[0], signal.SIGKILL)
    said = [m.communicate(timeout=120)[0] for m in machines]
    assert [m.returncode for m in machines] == [0, 0], said
    assert "".join(said).count("torch ") >= 2, "they were not restarted"
    assert curve(out) == curve(tmp_path / "whole")
    assert same_bits(weights(out, 120), weights(tmp_path / "whole", 120))


@pytest.mark.slow
def test_a_machine_that_dies_and_comes_back(tiny_args, tmp_path):
    """Its agent and its rank are killed. Whatever supervises the machines (train.sh, Slurm's requeue) starts an agent
    again when it ended badly, the survivor's too; the run goes on from its newest checkpoint."""
    steps = ["--max-steps", "400", "--save-every", "10", "--val-every", "0"]
    run = ["quickstart", *tiny_args, *steps, "--out-dir", str(tmp_path / "run"), "--resume", "auto"]
    start = two_machines(run, free_port(), restarts=1)
    ended = []

    def supervise(first):
        process = first
        for _ in range(5):
            said = process.communicate()[0]
            ended.append((process.returncode, said[-300:]))
            if process.returncode == 0:
                return
            process = start()

    machines = [start(), start()]
    supervisors = [threading.Thread(target=supervise, args=(m,), daemon=True) for m in machines]
    for s in supervisors:
        s.start()
    wait_for(lambda: (checkpoint.latest_step(tmp_path / "run") or 0) >= 20, 120)
    for pid in [*ranks_of(machines[1].pid), machines[1].pid]:
        os.kill(pid, signal.SIGKILL)
    for s in supervisors:
        s.join(400)
    assert [code for code, _ in ended].count(0) == 2, ended
    assert list(curve(tmp_path / "run")) == list(range(401))
