"""Runs that are asked to stop, by signals of all kinds and at bad moments: they end soon, say why, and lose nothing."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import processes
import pytest
from helpers import (
    ROOT,
    assert_curves_close,
    load_curve,
    make_hellaswag_rows,
    train_quickstart,
    write_jsonl,
)
from processes import rank_pids, start_torchrun, wait_for
from torch.distributed.launcher.api import LaunchConfig

from tokens import shards
from training import checkpoint
from training.stop import StopRequest


def count_lines(path) -> int:
    """Complete lines of a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_signal_to_one_rank_ends_an_evaluation_on_all(tiny_data, tiny_args, tmp_path, new_log_path):
    """Soon, with exit code 0 and nothing half logged; resumed, on one rank, the evaluation is made."""
    # A validation of many seconds.
    shards.write_shard(tiny_data / "tiny_val_000000.npy", np.arange(4_000_000, dtype=np.uint16) % 256)
    out = tmp_path / "out"
    flags = ["quickstart", *tiny_args, "--val-tokens", "4000000", "--out-dir", out]

    # metrics.jsonl is created just before the first evaluation.
    first, second = processes.start_ranks(2, "train_gpt2.py", *flags, log=new_log_path())
    assert first.wait_until((out / "metrics.jsonl").exists)
    time.sleep(0.5)
    assert second.send(signal.SIGTERM)

    assert second.wait(10).exit_code == 0
    assert "another rank" in first.wait_for_success().output
    assert count_lines(out / "metrics.jsonl") == 0
    assert not checkpoint.read_train_state(out)["evaluated"]
    train_quickstart(tiny_args, out, "--resume", "auto")
    assert_curves_close(load_curve(out), load_curve(train_quickstart(tiny_args, tmp_path / "undisturbed")))


def test_signal_to_torchrun_and_to_its_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0"]
    script = [str(ROOT / "train_gpt2.py"), *run, "--out-dir", str(out)]

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", *script)
    wait_for(lambda: count_lines(out / "metrics.jsonl") >= 5)
    for pid in [*rank_pids(torchrun.pid), torchrun.pid]:
        os.kill(pid, signal.SIGTERM)
    output = torchrun.communicate(timeout=60)[0]

    assert "stopped by" in output, output[-3000:]
    assert checkpoint.latest_step(out) >= count_lines(out / "metrics.jsonl"), output[-3000:]


def test_every_way_to_start_torchrun_gives_the_ranks_time_to_save(monkeypatch):
    for path in ("README.md", "docs/clusters.md", "train.sh", "cloud/slurm.sbatch", "cloud/Dockerfile"):
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in (ROOT / path).read_text(), path

    # torchrun reads that variable; that of torch 2.11 always waits 30 seconds.
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        pytest.skip("this torch does not know it")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 600


def print_without_end() -> None:
    """A script that prints for as many seconds as its argument says, and takes signals as training does."""
    end = time.monotonic() + float(sys.argv[1])
    with StopRequest().handle_signals():
        while time.monotonic() < end:
            print("words " * 999, flush=True)
            time.sleep(0.005)  # so that reading it all takes little time


@pytest.mark.parametrize("seconds_between, exit_code", [(0, 0), (2.5, -signal.SIGTERM)])
def test_second_signal_kills_unless_it_is_the_same_again(tmp_path, start_script, seconds_between, exit_code):
    """Within two seconds, the second may be the first one passed on by torchrun. The first comes while a print waits
    for its reader: the handler then runs inside that print."""
    os.mkfifo(tmp_path / "pipe")
    script = start_script(print_without_end, 2 + 3 * seconds_between, out=tmp_path / "pipe")
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


def test_signal_ends_hellaswag(tiny_args, tmp_path, start_script):
    out, rows = tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4000))
    flags = ["quickstart", *tiny_args, "--model.vocab-size", "50304", "--out-dir", out]

    # HellaSwag follows validation, whose result is printed.
    script = start_script("train_gpt2.py", *flags, "--hellaswag-every", "4", "--hellaswag-data", rows)
    assert script.wait_until("val loss"), script.output
    time.sleep(0.2)
    script.send(signal.SIGINT)

    assert script.wait(10).exit_code == 0
    assert "SIGINT" in script.output and "hellaswag acc" not in script.output
    assert not checkpoint.read_train_state(out)["evaluated"]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the compiler through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_it_compiles_saves_the_run(tiny_args, tmp_path, number):
    """To the process itself, as train.sh's torchrun sends it."""
    flags = [word for word in tiny_args if word != "--no-compile"]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), "quickstart", *flags, "--out-dir", str(tmp_path / "out")]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, process_group=0)

    def is_compiling_a_kernel() -> bool:
        # A kernel's file ends in .main.cpp. Headers and probes are compiled, too.
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                process_group = (folder / "stat").read_text().rsplit(")", 1)[1].split()[2]
                if process_group == str(process.pid) and b".main.cpp" in (folder / "cmdline").read_bytes():
                    return True
        return False

    wait_for(is_compiling_a_kernel, 300)
    process.send_signal(number)
    output = process.communicate(timeout=300)[0]

    assert process.returncode == 0 and "Traceback" not in output, output
    assert checkpoint.latest_step(tmp_path / "out") == 0
