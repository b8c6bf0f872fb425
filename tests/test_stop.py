"""Runs that are asked to stop, by signals of all kinds and at bad moments: they end soon, say why, and lose nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from helpers import ROOT, load_metrics, make_hellaswag_rows, train_quickstart, write_jsonl
from processes import rank_pids, start_torchrun, wait_for

from lifecycle import stop
from lifecycle.metrics import read_metrics
from lifecycle.stop import StopRequest
from weights.names import latest_step


def count_lines(path) -> int:
    """Complete lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("limit, is_over", [("0.0001", True), ("1h", False), ("0", False), ("", False)])
def test_a_time_limit_of_zero_is_none(limit, is_over):
    """And every start does at least one step."""
    request = StopRequest(limit)
    time.sleep(0.001)
    assert not request.is_requested()

    request.first_step_is_done = True
    assert request.is_requested() == is_over


@pytest.mark.parametrize("before, noted", [(signal.SIG_DFL, "SIGHUP"), (signal.SIG_IGN, None)], ids=["plain", "nohup"])
def test_a_closed_terminal_asks_for_a_stop(before, noted):
    """Unless it is ignored: under nohup training goes on."""
    request, own = StopRequest(), signal.signal(signal.SIGHUP, before)
    try:
        with request.handle_signals():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, own)
    assert request.signal == noted


def test_a_signal_is_noted_at_once_and_spares_the_compiler():
    """Here the main thread waits for its compiler, which a terminal sends the signal, too."""
    request = StopRequest()
    compiler = "import os, time; [os.kill(pid, 2) for pid in (os.getppid(), os.getpid())]; time.sleep(0.2)"
    with request.handle_signals():
        done = subprocess.run([sys.executable, "-c", compiler])
        assert (request.signal, done.returncode) == ("SIGINT", 0)


def signal_rank_1_in(module, name) -> None:
    """A `prepare` for ranks of which the second gets a SIGTERM whenever it calls this function."""
    function = getattr(sys.modules[module], name)

    def signalled(*args):
        if os.environ["RANK"] == "1":
            print(f"a call of {name}", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)  # a thread notes it
        return function(*args)

    setattr(sys.modules[module], name, signalled)


PLACES = [
    "lifecycle.resume open_data", "lifecycle.evaluator to_device", "hellaswag batch_losses", "training.step to_device",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_signal_to_one_rank_ends_all_before_a_step(tiny_args, tmp_path, run_ranks, place):
    """At the start, in an evaluation, before an update: with exit code 0 and nothing half logged. Resumed, on one rank,
    the evaluation is made."""
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(40))
    flags = ["--model.vocab-size", "50304", "--model.n-embd", "8", "--hellaswag-every", "4", "--hellaswag-data", rows]
    flags, run = [*tiny_args, *flags, "--max-steps", "1"], tmp_path / "run"

    prepare = partial(signal_rank_1_in, *place.split())
    output = run_ranks(2, "train_gpt2.py", "quickstart", *flags, "--out-dir", run, prepare=prepare)

    assert "another rank" in output and output.count("a call of") == 1  # and no second batch
    assert not any("train_loss" in line for line in read_metrics(run / "metrics.jsonl"))
    train_quickstart(flags, run, "--resume", "auto")
    assert [line.keys() >= {"val_loss", "hellaswag_acc"} for line in load_metrics(run)] == [True, True]


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
            time.sleep(0.005)  # so that reading it all takes little time


@pytest.mark.parametrize("seconds_between, exit_code", [(0, 0), (0.6, 128 + signal.SIGTERM)])
def test_a_second_signal_kills_unless_it_is_passed_on(tmp_path, start_script, seconds_between, exit_code):
    """Within a short time, the second may be the first one passed on by torchrun. The first comes while a print waits
    for its reader."""
    os.mkfifo(tmp_path / "pipe")
    script = start_script(print_without_end, 1.5 + 9 * seconds_between, out=tmp_path / "pipe")
    with open(tmp_path / "pipe", "rb") as pipe:
        # Nobody reads until the pipe is full and the print waits.
        pipe.readline()
        time.sleep(0.3)
        script.send(signal.SIGINT)

        # Now somebody reads, and the second signal comes.
        reader = threading.Thread(target=pipe.read)
        reader.start()
        time.sleep(seconds_between)
        script.send(signal.SIGTERM)

        assert script.wait().exit_code == exit_code
        reader.join()
