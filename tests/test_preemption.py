"""Runs that are asked to stop, by signals of all kinds and at bad moments: they end soon, say why, and lose nothing."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
from helpers import (
    CPU,
    ROOT,
    assert_curves_close,
    load_curve,
    make_hellaswag_rows,
    parse_config,
    train_quickstart,
    write_jsonl,
)
from processes import rank_pids, start_torchrun, wait_for
from torch.distributed.launcher.api import LaunchConfig

from model import GPT
from tokens import shards, tokenizer
from training import checkpoint, stop
from training.evaluator import Evaluator
from training.metrics import read_metrics
from training.step import TrainStep
from training.stop import StopRequest

# How every run that was stopped tells its user to resume.
HOW_TO_RESUME = "checkpoint saved. To resume, run the same command with --resume auto"


def last_step(out) -> int:
    """The last step in metrics.jsonl, -1 before there is one."""
    return max([-1, *(line["step"] for line in read_metrics(out / "metrics.jsonl"))])


@pytest.fixture
def long_validation(tiny_data) -> list[str]:
    """Flags for a validation that takes many seconds."""
    shards.write_shard(tiny_data / "tiny_val_000000.npy", np.arange(4_000_000, dtype=np.uint16) % 256)
    return ["--val-tokens", "4000000"]


def test_a_signal_to_one_rank_ends_an_evaluation_on_all(tiny_args, tmp_path, long_validation, new_log_path):
    """Soon, with exit code 0 and nothing half logged; resumed, on one rank, the evaluation is made."""
    out = tmp_path / "out"
    flags = ["quickstart", *tiny_args, *long_validation, "--out-dir", out]

    # metrics.jsonl is created just before the first evaluation.
    first, second = processes.start_ranks(2, "train_gpt2.py", *flags, log=new_log_path())
    assert first.wait_until((out / "metrics.jsonl").exists)
    time.sleep(0.5)
    assert second.send(signal.SIGTERM)

    assert second.wait(10).exit_code == 0
    assert f"another rank's signal at step 0; {HOW_TO_RESUME}" in first.wait_for_success().output
    assert last_step(out) == -1
    assert not checkpoint.read_train_state(out)["evaluated"]
    train_quickstart(tiny_args, out, "--resume", "auto")
    assert_curves_close(load_curve(out), load_curve(train_quickstart(tiny_args, tmp_path / "undisturbed")))


def test_a_signal_to_torchrun_and_to_its_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0"]
    script = [str(ROOT / "train_gpt2.py"), *run, "--out-dir", str(out)]

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", *script)
    wait_for(lambda: last_step(out) >= 5)
    for pid in [*rank_pids(torchrun.pid), torchrun.pid]:
        os.kill(pid, signal.SIGTERM)
    output = torchrun.communicate(timeout=60)[0]

    # Rank 0 may learn of it from rank 1 before its own signal comes.
    assert re.search("stopped by (signal SIGTERM|.*another rank's signal)", output), output[-3000:]
    assert checkpoint.latest_step(out) > last_step(out), output[-3000:]


# ------------------------------------------------------------------------- the time that torchrun gives

# A run whose checkpoint takes about six seconds to write.
SLOW_DISK = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from system import cli
from training import checkpoint
import train_gpt2

write = checkpoint.write

def write_slowly(path, content):
    time.sleep(3)
    write(path, content)

checkpoint.write = write_slowly
cli.run_cli(train_gpt2.main)
"""


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s, saved", [(2, False), (60, True)])
def test_torchrun_kills_a_save_that_takes_longer_than_its_timeout(tiny_args, tmp_path, timeout_s, saved):
    """SIGTERM to torchrun alone, which then waits for its ranks for so many seconds."""
    out, script = tmp_path / "out", tmp_path / "slow.py"
    script.write_text(SLOW_DISK)
    flags = [*tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0", "--out-dir", str(out)]
    env = {stop.TORCHRUN_TIMEOUT: str(timeout_s)}

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", str(script), "quickstart", *flags, **env)
    wait_for(lambda: last_step(out) >= 5)
    torchrun.send_signal(signal.SIGTERM)
    output = torchrun.communicate(timeout=90)[0]

    assert (checkpoint.latest_step(out) is not None) == saved, output[-3000:]
    assert (HOW_TO_RESUME in output) == saved


def test_every_way_to_start_torchrun_gives_the_ranks_time_to_save(monkeypatch):
    for path in ("README.md", "docs/two-machines.md", "train.sh", "cloud/slurm.sbatch", "cloud/Dockerfile"):
        assert f"{stop.TORCHRUN_TIMEOUT}=" in (ROOT / path).read_text(), path

    # torchrun reads that variable, and no other.
    if "shutdown_timeout" not in LaunchConfig.__dataclass_fields__:
        pytest.skip(f"torch {torch.__version__} always waits 30 seconds")
    monkeypatch.setenv(stop.TORCHRUN_TIMEOUT, "600")
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 600


def test_a_save_that_takes_as_long_as_torchrun_waits_is_warned_of_once(tmp_path, monkeypatch, capsys):
    def save_twice():
        with checkpoint.CheckpointWriter(tmp_path, report_seconds=StopRequest().check_save_time) as writer:
            for step in (1, 2):
                writer.save(step, {"model": {}}, {})
                writer.wait()
        return capsys.readouterr().out

    # No warning without torchrun, which would end the save, or if torchrun waits long enough.
    assert save_twice() == ""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert save_twice() == ""

    monkeypatch.setenv(stop.TORCHRUN_TIMEOUT, "0")
    assert save_twice().count(f"Before the next start: export {stop.TORCHRUN_TIMEOUT}=600") == 1


# ------------------------------------------------------------------------- a second signal


def print_without_end() -> None:
    """A script that prints for as many seconds as its argument says, and takes signals as training does."""
    end = time.monotonic() + float(sys.argv[1])
    with StopRequest().handle_signals():
        while time.monotonic() < end:
            print("words " * 999, flush=True)
            time.sleep(0.005)  # so that reading it all takes little time


@pytest.mark.parametrize("seconds_between, exit_code", [(0, 0), (2.5, -signal.SIGTERM)])
def test_a_second_signal_kills_unless_it_is_the_same_again(tmp_path, start_script, seconds_between, exit_code):
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


# ------------------------------------------------------------------------- at bad moments


def test_a_signal_ends_hellaswag(tiny_args, tmp_path, start_script):
    out, rows = tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4000))
    flags = ["quickstart", *tiny_args, "--model.vocab-size", "50304", "--out-dir", out]

    # HellaSwag follows validation, whose result is printed.
    script = start_script("train_gpt2.py", *flags, "--hellaswag-every", "4", "--hellaswag-data", rows)
    assert script.wait_until("val loss"), script.output
    time.sleep(0.2)
    script.send(signal.SIGINT)

    assert script.wait(10).exit_code == 0
    assert "SIGINT" in script.output
    assert "hellaswag acc" not in script.output
    train_state = checkpoint.read_train_state(out)
    assert train_state["record"] == {"step": 0}
    assert not train_state["evaluated"]


def test_a_signal_ends_sampling(tiny_args):
    cfg = parse_config("quickstart", *tiny_args, "--model.vocab-size", "50304")
    train_step, data = TrainStep(cfg, CPU, GPT(cfg.model)), SimpleNamespace(paths=[Path("x")])
    stop_requested = iter([False, False, False, True])

    text = Evaluator(train_step, data, val_data=None).sample_text(lambda: next(stop_requested))

    # Each sample has the prompt and three tokens, which, encoded again, may be up to nine.
    encode = tokenizer.encoding().encode_ordinary
    samples = [line.split(": ", 1)[1] for line in text.splitlines()]
    assert len(samples) == 4
    assert all(len(encode(sample)) <= len(encode(cfg.sample_prompt)) + 9 for sample in samples)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the compiler through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_compiles_saves_the_run(tiny_args, tmp_path, number):
    """Terminals and batch systems send it to the whole group of processes, the C++ compiler included."""
    flags = [word for word in tiny_args if word != "--no-compile"]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), "quickstart", *flags, "--out-dir", str(tmp_path / "out")]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, process_group=0)

    def is_compiling_a_kernel() -> bool:
        # A kernel's file ends in .main.cpp. Headers and probes are compiled, too; that these fail would do no harm.
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                process_group = (folder / "stat").read_text().rsplit(")", 1)[1].split()[2]
                if process_group == str(process.pid) and b".main.cpp" in (folder / "cmdline").read_bytes():
                    return True
        return False

    wait_for(is_compiling_a_kernel)
    os.killpg(process.pid, number)
    output = process.communicate(timeout=120)[0]

    assert process.returncode == 0, output
    assert HOW_TO_RESUME in output
    assert "Traceback" not in output
    assert checkpoint.latest_step(tmp_path / "out") == 0
