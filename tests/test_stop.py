"""Runs that are asked to stop, by signals of all kinds and at bad moments: they end soon, say why, and lose nothing."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from helpers import ROOT, load_metrics
from processes import rank_pids, start_torchrun, wait_for

from checkpoints.run_folder import latest_step
from lifecycle import stop
from lifecycle.stop import StopRequest


def test_a_time_limit_counts_from_the_first_start(monkeypatch):
    monkeypatch.setenv("TRAIN_START_TIME", str(int(time.time()) - 3600))
    assert [limit for limit in ("59m", "61m", "0", "") if StopRequest(limit).is_requested()] == ["59m"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_every_signal_that_announces_an_end_asks_for_a_stop(name):
    """Unless it was ignored before: under nohup a closed terminal is."""
    for handler in (signal.SIG_DFL, signal.SIG_IGN):
        request, before = StopRequest(), signal.signal(signal.Signals[name], handler)
        with request.handle_signals():
            os.kill(os.getpid(), signal.Signals[name])
        assert signal.signal(signal.Signals[name], before) == handler
        assert request.is_requested() == (handler == signal.SIG_DFL)


def test_programs_are_spared_and_the_run_is_not():
    """Here the main thread waits for its compiler, which Slurm sends the signal, too."""
    request = StopRequest()
    compiler = "import os; [os.kill(pid, 15) for pid in (os.getppid(), os.getpid())]"
    with request.handle_signals():
        with stop.spare_programs():
            assert subprocess.run([sys.executable, "-c", compiler]).returncode == 0
        wait_for(request.is_requested)  # the signal may be another thread's, which a busy machine runs later
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_signal_to_torchrun_and_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out, metrics = tmp_path / "out", tmp_path / "out/metrics.jsonl"
    flags = [*tiny_args, "--max-steps 100000 --save-every 0 --val-every 0 --out-dir", out]

    torchrun = start_torchrun("--standalone --nproc_per_node=2", ROOT / "train_gpt2.py", "quickstart", *flags)
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    for pid in [*rank_pids(torchrun.pid), torchrun.pid]:
        os.kill(pid, signal.SIGTERM)
    output = torchrun.communicate(timeout=60)[0]

    assert "stopped by" in output and latest_step(out) == len(load_metrics(out)), output[-3000:]


def print_and_signal():
    """A script that is sent two signals while it prints."""
    with StopRequest().handle_signals():
        threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGINT]).start()
        threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGTERM]).start()
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            print("words " * 999, flush=True)


def test_a_signal_may_come_twice_and_in_a_print(run_ranks):
    assert run_ranks(1, print_and_signal).count("stopping after this step") == 2
