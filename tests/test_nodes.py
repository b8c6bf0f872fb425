"""Ranks that die and machines that meet: torchrun restarts, two torchruns on loopback, resume after the loss of one."""

import os
import re
import signal
import sys
import threading

import pytest
from helpers import ROOT, assert_curves_close, load_curve, load_weights, same_bits, train_quickstart
from processes import find_free_port, rank_pids, start_torchrun, wait_for

from training import checkpoint

SCRIPT = str(ROOT / "train_gpt2.py")
LAST_STEP = 60
RUN_FLAGS = ["--max-steps", str(LAST_STEP), "--save-every", "10", "--val-every", "40", "--resume", "auto"]

# The variable that docs/clouds.md has people export on each of several machines.
EXPORTED_NAME, EXPORTED_VALUE = re.search(
    r"export (TORCH_\w+)=(\w+)", (ROOT / "docs" / "clouds.md").read_text()
).groups()

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")


def start_machine(port, arguments, restarts=0, script=SCRIPT):
    """Start the torchrun of one of two machines, which meet at `port` of this one and run a rank each."""
    flags = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    flags += [f"--max-restarts={restarts}", "--rdzv-conf=join_timeout=60", "--local-addr=127.0.0.1"]
    return start_torchrun(*flags, str(script), *arguments, **{EXPORTED_NAME: EXPORTED_VALUE})


def kill_last_rank_of(torchrun, run_dir):
    """SIGKILL a rank of this torchrun once the run has saved a few times."""
    wait_for(lambda: (checkpoint.latest_step(run_dir) or 0) >= 20)
    os.kill(rank_pids(torchrun.pid)[-1], signal.SIGKILL)


def assert_restarted_and_equal(torchruns, run_dir, undisturbed):
    """The torchruns end with success, after a restart of the ranks, and the run has the bits of the undisturbed one."""
    output = "".join(torchrun.communicate(timeout=120)[0] for torchrun in torchruns)
    assert not any(torchrun.returncode for torchrun in torchruns), output[-3000:]
    assert output.count("torch ") >= 2, "it was not restarted"
    assert load_curve(run_dir) == load_curve(undisturbed)
    assert same_bits(load_weights(run_dir, LAST_STEP), load_weights(undisturbed, LAST_STEP))


@linux_only
@pytest.mark.slow  # as `torchrun-kill` in tests/faults/torture.py, with more kills
def test_torchrun_restarts_a_killed_rank_and_the_bits_are_the_same(tiny_args, tmp_path, run_ranks):
    arguments = ["quickstart", *tiny_args, *RUN_FLAGS, "--out-dir"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run_ranks(2, "train_gpt2.py", *arguments, undisturbed)

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=3", SCRIPT, *arguments, str(killed))
    kill_last_rank_of(torchrun, killed)

    assert_restarted_and_equal([torchrun], killed, undisturbed)


def test_two_machines_equal_one(tiny_args, tmp_path):
    one = train_quickstart(tiny_args, tmp_path / "one")

    arguments = ["quickstart", *tiny_args, "--out-dir", str(tmp_path / "two"), "--resume", "auto"]
    port = find_free_port()
    machines = [start_machine(port, arguments) for _ in range(2)]
    outputs = [machine.communicate(timeout=120)[0] for machine in machines]

    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_curves_close(load_curve(tmp_path / "two"), load_curve(one))


@pytest.mark.slow
@linux_only
def test_a_rank_killed_on_one_of_two_machines_is_restarted_and_the_bits_are_the_same(tiny_args, tmp_path, run_ranks):
    """The ranks of the first machine start later: those of the second could find what the dead ones have left."""
    arguments = ["quickstart", *tiny_args, *RUN_FLAGS, "--out-dir"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run_ranks(2, "train_gpt2.py", *arguments, undisturbed)
    late_script = tmp_path / "late.py"
    command = f"[sys.executable, {SCRIPT!r}, *sys.argv[1:]]"
    late_script.write_text(f"import os, sys, time\ntime.sleep(2)\nos.execv(sys.executable, {command})")

    port = find_free_port()
    late_machine = start_machine(port, [*arguments, str(killed)], restarts=1, script=late_script)
    machine = start_machine(port, [*arguments, str(killed)], restarts=1)
    kill_last_rank_of(machine, killed)

    assert_restarted_and_equal([late_machine, machine], killed, undisturbed)


@pytest.mark.slow
def test_a_machine_that_dies_and_comes_back(tiny_args, tmp_path):
    """Its torchrun and its rank are killed. Whatever supervises the machines (train.sh, Slurm's requeue) starts a
    torchrun again that ended badly, also the survivor's; the run resumes from its newest checkpoint."""
    steps = ["--max-steps", "400", "--save-every", "10", "--val-every", "0"]
    arguments = ["quickstart", *tiny_args, *steps, "--out-dir", str(tmp_path / "run"), "--resume", "auto"]
    port = find_free_port()
    ended = []  # (exit code, end of the output) of each torchrun

    def supervise(torchrun):
        for _ in range(5):
            output = torchrun.communicate()[0]
            ended.append((torchrun.returncode, output[-300:]))
            if torchrun.returncode == 0:
                return
            torchrun = start_machine(port, arguments, restarts=1)

    machines = [start_machine(port, arguments, restarts=1) for _ in range(2)]
    supervisors = [threading.Thread(target=supervise, args=(machine,), daemon=True) for machine in machines]
    for supervisor in supervisors:
        supervisor.start()

    wait_for(lambda: (checkpoint.latest_step(tmp_path / "run") or 0) >= 20, 120)
    for pid in [*rank_pids(machines[1].pid), machines[1].pid]:
        os.kill(pid, signal.SIGKILL)
    for supervisor in supervisors:
        supervisor.join(400)

    assert [exit_code for exit_code, _ in ended].count(0) == 2, ended
    assert list(load_curve(tmp_path / "run")) == list(range(401))
