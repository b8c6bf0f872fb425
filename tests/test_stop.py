"""Runs that are asked to stop, by signals of all kinds and at bad moments: they end soon, say why, and lose nothing."""

import itertools
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers import ROOT, load_curve, load_weights, make_hellaswag_rows, same_bits, write_jsonl
from processes import rank_pids, start_torchrun, wait_for

from lifecycle import stop
from lifecycle.stop import StopRequest
from weights.names import latest_step


def count_lines(path) -> int:
    """Complete lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("limit, is_over", [("0.0001", True), ("1h", False), ("0", False), ("", False)])
def test_a_time_limit_of_zero_is_none(limit, is_over):
    request = StopRequest(limit)
    time.sleep(0.001)
    assert request.is_requested() == is_over


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"])
def test_every_signal_that_announces_an_end_asks_for_a_stop(name):
    request = StopRequest()
    with request.handle_signals():
        os.kill(os.getpid(), getattr(signal, name))
    assert request.is_requested() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_under_nohup_a_closed_terminal_is_ignored():
    request, before = StopRequest(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with request.handle_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, before)
    assert not request.is_requested()


def test_programs_are_spared_and_the_run_is_not():
    """Here the main thread waits for its compiler, which a terminal sends the signal, too."""
    request = StopRequest()
    compiler = "import os; [os.kill(pid, 2) for pid in (os.getppid(), os.getpid())]"
    with request.handle_signals():
        with stop.spare_programs():
            done = subprocess.run([sys.executable, "-c", compiler])
            assert request.is_requested() and done.returncode == 0
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])


def signal_rank_1_in(module, name) -> None:
    """A `prepare` for ranks of which the second gets a SIGTERM when it first calls this function."""
    function, calls = getattr(sys.modules[module], name), itertools.count()

    def signalled(*args):
        if os.environ["RANK"] == "1" and next(calls) == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return function(*args)

    setattr(sys.modules[module], name, signalled)


@pytest.mark.parametrize("place", [
    "lifecycle.resume open_data", "lifecycle.evaluator to_device", "training.step to_device",
])  # fmt: skip
def test_a_signal_to_one_rank_ends_all_after_a_step(tiny_args, tmp_path, run_ranks, place):
    """With exit code 0. Resumed, on two ranks, the run ends with the bits of one that was never stopped."""
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(40))
    flags = ["--model.vocab-size", "50304", "--model.n-embd", "8", "--hellaswag-every", "4", "--hellaswag-data", rows]
    command = [2, "train_gpt2.py", "quickstart", *tiny_args, *flags, "--max-steps", "2", "--out-dir"]
    output = run_ranks(*command, tmp_path / "run", prepare=partial(signal_rank_1_in, *place.split()))
    assert "another rank" in output and latest_step(tmp_path / "run") == 1

    run_ranks(*command, tmp_path / "run", "--resume", "auto")
    run_ranks(*command, tmp_path / "whole")
    assert load_curve(tmp_path / "run") == load_curve(tmp_path / "whole")
    assert same_bits(load_weights(tmp_path / "run", 2), load_weights(tmp_path / "whole", 2))


def test_signal_to_torchrun_and_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0"]
    script = [str(ROOT / "train_gpt2.py"), *run, "--out-dir", str(out)]

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", *script)
    wait_for(lambda: count_lines(out / "metrics.jsonl") >= 2)
    for pid in [*rank_pids(torchrun.pid), torchrun.pid]:
        os.kill(pid, signal.SIGTERM)
    output = torchrun.communicate(timeout=60)[0]

    assert "stopped by" in output, output[-3000:]
    assert latest_step(out) >= count_lines(out / "metrics.jsonl"), output[-3000:]


def print_without_end() -> None:
    """A script that prints for as many seconds as its argument says, and takes signals as training does."""
    stop.SECOND_SIGNAL_AFTER_S = 0.3
    end = time.monotonic() + float(sys.argv[1])
    with StopRequest().handle_signals():
        while time.monotonic() < end:
            print("words " * 999, flush=True)


@pytest.mark.parametrize("seconds_between, exit_code", [(0, 0), (0.6, 128 + signal.SIGTERM)])
def test_a_second_signal_kills_unless_it_is_passed_on(tmp_path, start_script, seconds_between, exit_code):
    """Within a short time, the second may be the first one passed on by torchrun. The first comes in a print."""
    script = start_script(print_without_end, 1.5 + 9 * seconds_between, out=tmp_path / "out")
    script.wait_until(lambda: count_lines(tmp_path / "out"))
    script.send(signal.SIGINT)
    time.sleep(seconds_between)
    script.send(signal.SIGTERM)
    assert script.wait().exit_code == exit_code, script.output
