"""Ranks: what they tell each other, how they find out that they differ, and how a run ends when one of them fails."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch

from system import cli, distributed
from system.cli import UserError
from system.distributed import weight_checksum

# ------------------------------------------------------------------------- real ranks


def talk() -> None:
    """The script of a rank: every collective once. Rank 1 comes late to the barrier."""
    with distributed.session("cpu") as rt:
        assert rt.gather({"rank": rt.rank}) == [{"rank": 0}, {"rank": 1}]
        assert rt.all_reduce(torch.tensor(1.0 + rt.rank)) == 3
        assert rt.any_rank(rt.rank == 1) and not rt.any_rank(False)
        received = torch.tensor(rt.rank)
        rt.broadcast(received, source=1)
        assert received == 1
        time.sleep(0.3 * rt.rank)
        came = time.time()
        rt.barrier()
        left = time.time()
        assert left >= max(rt.gather(came))
        cli.print0("all is well")


def test_two_ranks_talk(run_ranks):
    assert run_ranks(2, talk).count("all is well") == 1


def wait_for_each_other() -> None:
    """The script of a rank. Rank 1 leaves before the barrier, but stays alive for a while."""
    with distributed.session("cpu") as rt:
        if rt.rank == 1:
            time.sleep(1)
            sys.exit(1)
        distributed.SLOW_TIMEOUT = timedelta(milliseconds=200)
        rt.barrier()


def test_a_rank_that_misses_a_barrier_is_named(run_ranks):
    output = run_ranks(2, wait_for_each_other, fails=True)
    assert "Rank 1 failed" in output and "200 ms" in output


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"])
def test_tasks_without_torchrun_are_refused(monkeypatch, name):
    """Of two that are paid for, each would train alone. Ranks of torchrun are meant to be several."""
    monkeypatch.setenv(name, "1")
    with distributed.session("cpu"):
        pass
    monkeypatch.setenv(name, "2")
    with pytest.raises(UserError, match=r"torchrun.*slurm\.sbatch"), distributed.session("cpu"):
        pass
    monkeypatch.setenv("RANK", "0")
    with distributed.session("cpu"):
        pass


# ------------------------------------------------------------------------- ranks that differ


def compare_settings() -> None:
    """The script of a rank: all three are equal, then the last one is not."""
    settings = {"--seed": "1", "--val-every": "4"}
    with distributed.session("cpu") as rt:
        rt.check_equal(settings, "fix it")
        if rt.rank == 2:
            settings |= {"--val-every": "5", "--new": "6"}
        rt.check_equal(settings, "fix it")


def test_ranks_with_other_settings_are_refused_by_name(run_ranks):
    output, host = run_ranks(3, compare_settings, fails=True), os.uname().nodename
    assert output.count(f"--val-every is 4 on rank 0 ({host}), but 5 on rank 2 ({host})") == 3
    assert output.count("--new is None on rank 0") == 3 and "--seed" not in output


# ------------------------------------------------------------------------- weights

A_THIRD = torch.tensor(1 / 3)
CHANGES = {
    "one bit": lambda w: w[1, 2].copy_(torch.nextafter(w[1, 2], A_THIRD)),
    "a sign": lambda w: w.neg_(),
    "rows": lambda w: w.copy_(w.flip(0)),
    "columns": lambda w: w.copy_(w.flip(1)),
    "infinity": lambda w: w[0, 0].fill_(float("inf")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_checksum_changes_with_the_weights(change):
    torch.manual_seed(0)
    weights = [torch.randn(5, 7), torch.randn(3, 4)]
    before = weight_checksum(weights)
    assert weight_checksum([w.clone() for w in weights]) == before != weight_checksum(weights[::-1])

    CHANGES[change](weights[1])
    assert weight_checksum(weights) != before
