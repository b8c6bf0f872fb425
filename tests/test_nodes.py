"""Two machines: two torchruns that meet on this one's loopback, with a rank each."""

import os
import signal

import pytest
from helpers import ROOT, assert_curves_close, load_curve, same_weights
from processes import find_free_port, rank_pids, start_torchrun, wait_for

from checkpoints.run_folder import latest_step

pytestmark = pytest.mark.slow
LAST_STEP = 60
RUN_FLAGS = f"--max-steps {LAST_STEP} --save-every 10 --val-every 40 --resume auto"


def start_machines(tiny_args, out):
    """The torchruns of two machines."""
    flags = "--nnodes=2 --nproc_per_node=1 --max-restarts=2 --rdzv-backend=c10d --local-addr=127.0.0.1"
    flags += f" --rdzv-endpoint=127.0.0.1:{find_free_port()}"
    command = [flags, ROOT / "train_gpt2.py", "quickstart", *tiny_args, RUN_FLAGS, "--out-dir", out]
    # What docs/running.md has people export on each machine.
    return [start_torchrun(*command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for _ in range(2)]


def wait_for_ends(machines):
    """What they have printed; fails the test if one has failed."""
    output = "".join(machine.communicate(timeout=180)[0] for machine in machines)
    assert not any(machine.returncode for machine in machines), output
    return output


def test_a_killed_rank_is_restarted_on_both_machines(train, tiny_args, tmp_path):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    wait_for_ends(start_machines(tiny_args, undisturbed))
    one = train("one", RUN_FLAGS)
    assert_curves_close(undisturbed, one)

    machines = start_machines(tiny_args, killed)
    wait_for(lambda: (latest_step(killed) or 0) >= 20)
    os.kill(rank_pids(machines[1].pid)[-1], signal.SIGKILL)

    assert "resumed from" in wait_for_ends(machines), "it was not restarted"
    assert load_curve(killed) == load_curve(undisturbed)
    assert same_weights(killed, undisturbed, LAST_STEP)
