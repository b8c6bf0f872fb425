"""Ranks that die and machines that meet: torchrun restarts, two agents on loopback, resume on the other side."""

import os
import re
import signal
import sys
import threading
from functools import partial

import pytest
from helpers import ROOT, assert_curves_close, load_curve, load_weights, same_bits, train_quickstart
from processes import find_free_port, rank_pids, start_torchrun, wait_for

from training import checkpoint

# what docs/clouds.md has people export on each of several machines
EXPORT = re.search(r"export (TORCH_\w+)=(\w+)", (ROOT / "docs" / "clouds.md").read_text())


STEPS = ["--max-steps", "60", "--save-every", "10", "--val-every", "40", "--resume", "auto", "--out-dir"]
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")


def lose_a_rank(agents, out, whole):
    """Kill the last rank of the last torchrun; all ends as if it had lived."""
    wait_for(lambda: (checkpoint.latest_step(out) or 0) >= 20)
    os.kill(rank_pids(agents[-1].pid)[-1], signal.SIGKILL)
    said = "".join(process.communicate(timeout=120)[0] for process in agents)
    assert not any(process.returncode for process in agents), said[-3000:]
    assert said.count("torch ") >= 2, "it was not restarted"
    assert load_curve(out) == load_curve(whole) and same_bits(load_weights(out, 60), load_weights(whole, 60))


@linux
def test_a_killed_rank_costs_no_human_and_no_bits(tiny_args, tmp_path, run_ranks):
    run, whole, out = ["quickstart", *tiny_args, *STEPS], tmp_path / "whole", tmp_path / "killed"
    run_ranks(2, "train_gpt2.py", *run, whole)
    script = str(ROOT / "train_gpt2.py")
    lose_a_rank(
        [start_torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=3", script, *run, str(out))], out, whole
    )


def two_machines(run, port, restarts=0, script=ROOT / "train_gpt2.py"):
    """A function that starts the torchrun of one of two machines, which meet at `port`."""
    meet = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    meet += [f"--max-restarts={restarts}", "--rdzv-conf=join_timeout=60", "--local-addr=127.0.0.1"]
    return lambda: start_torchrun(*meet, str(script), *run, **{EXPORT[1]: EXPORT[2]})


def test_two_machines_equal_one(tiny_args, tmp_path):
    one = train_quickstart(tiny_args, tmp_path / "one")
    run = ["quickstart", *tiny_args, "--out-dir", str(tmp_path / "two"), "--resume", "auto"]
    start = two_machines(run, find_free_port())
    machines = [start(), start()]
    said = [m.communicate(timeout=120)[0] for m in machines]
    assert [m.returncode for m in machines] == [0, 0], said
    assert_curves_close(load_curve(tmp_path / "two"), load_curve(one))


@pytest.mark.slow
@linux
def test_a_rank_killed_on_one_of_two_machines_costs_no_human_and_no_bits(tiny_args, tmp_path, run_ranks):
    """The first machine's ranks are the later ones: those of the other could find what the dead have left."""
    run, whole, out = ["quickstart", *tiny_args, *STEPS], tmp_path / "whole", tmp_path / "killed"
    run_ranks(2, "train_gpt2.py", *run, whole)
    late, words = tmp_path / "late.py", f"[sys.executable, {str(ROOT / 'train_gpt2.py')!r}, *sys.argv[1:]]"
    late.write_text(f"import os, sys, time\ntime.sleep(2)\nos.execv(sys.executable, {words})")
    meet = partial(two_machines, [*run, str(out)], find_free_port(), restarts=1)
    lose_a_rank([meet(script=late)(), meet()()], out, whole)


@pytest.mark.slow
def test_a_machine_that_dies_and_comes_back(tiny_args, tmp_path):
    """Its agent and its rank are killed. Whatever supervises the machines (train.sh, Slurm's requeue) starts an agent
    again when it ended badly, the survivor's too; the run goes on from its newest checkpoint."""
    steps = ["--max-steps", "400", "--save-every", "10", "--val-every", "0"]
    run = ["quickstart", *tiny_args, *steps, "--out-dir", str(tmp_path / "run"), "--resume", "auto"]
    start = two_machines(run, find_free_port(), restarts=1)
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
    for pid in [*rank_pids(machines[1].pid), machines[1].pid]:
        os.kill(pid, signal.SIGKILL)
    for s in supervisors:
        s.join(400)
    assert [code for code, _ in ended].count(0) == 2, ended
    assert list(load_curve(tmp_path / "run")) == list(range(401))
