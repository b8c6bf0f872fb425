"""Ranks: what they tell each other, how they find out that they differ, and how a run ends when one of them fails."""

import os
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
from helpers import refused

from system import distributed, printing
from system.distributed import check_ranks, checksum
from system.errors import TransientError
from system.facts import START, Fact


def talk():
    """The script of a rank: every collective once. Rank 1 comes late to the first barrier, and not to the second."""
    host, facts = os.uname().nodename, {"--seed": Fact("1", START), "--val-every": Fact("4", START)}
    with distributed.session("cpu", facts) as rt:
        with patch("torch.distributed.all_gather_object", wraps=torch.distributed.all_gather_object) as gather:
            assert rt.gather({"rank": rt.rank}) == [{"rank": 0}, {"rank": 1}]
        assert gather.call_args.kwargs["group"] is rt.slow_group  # which waits for slow disks
        assert rt.all_reduce(torch.tensor(1.0 + rt.rank)) == 3
        received = torch.tensor(rt.rank)
        rt.broadcast(received, source=1)
        assert received == 1

        # Both say what differs.
        if rt.rank == 1:
            facts |= {"--val-every": Fact("5", START), "--new": Fact("6", START)}
        named = rf"differ: --val-every is 4 on rank 0 \({host}\), but 5 on rank 1 .*--new is none on .*fix it"
        with refused(named):
            check_ranks(rt, facts, "fix it")
        with pytest.raises(TransientError):
            distributed.check_tensors_agree(rt, {"weights": [torch.tensor([rt.rank])]}, 5)

        time.sleep(0.3 * rt.rank)
        came = time.time()
        rt.barrier()
        left = time.time()
        assert left >= max(rt.gather(came))
        printing.print0("all is well")

        distributed.SLOW_TIMEOUT = timedelta(milliseconds=200)
        if rt.rank == 1:
            time.sleep(1)  # it is still alive
            sys.exit(1)
        rt.barrier()


def test_two_ranks_talk(run_ranks):
    output = run_ranks(2, talk, fails=True)
    assert output.count("all is well") == 1
    assert "Rank 1 failed" in output and "200 ms" in output


@pytest.mark.parametrize("variables, is_refused", [
    ({"SLURM_NTASKS": "1"}, False), ({"SLURM_NTASKS": "2"}, True), ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
    ({"SLURM_NTASKS": "2", "RANK": "0"}, False),
])  # fmt: skip
def test_tasks_without_torchrun_are_refused(variables, is_refused):
    """Of two that are paid for, each would train alone. Ranks of torchrun are meant to be several."""
    refusal = refused("torchrun") if is_refused else nullcontext()
    with patch.dict(os.environ, variables), refusal, distributed.session("cpu"):
        pass


def test_a_checksum_changes_with_any_bit():
    weights = [torch.ones(5, 7), torch.zeros(3, 4)]
    before = checksum(weights)
    assert checksum([w.clone() for w in weights]) == before != checksum(weights[::-1])
    weights[1][1, 2] = 1e-45
    assert checksum(weights) != before
