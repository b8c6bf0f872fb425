"""Runs that are killed, asked to stop, or left without disk: they end soon, say why, lose nothing."""

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

from model import GPT
from tokens import shards, tokenizer
from training import checkpoint
from training.evaluator import Evaluator
from training.metrics_file import read_metrics
from training.step import TrainStep
from training.stop import StopRequest

GO_ON = "the same command and --resume auto"


def last_step(out):
    """The last step in metrics.jsonl, -1 before there is one."""
    return max([-1, *(line["step"] for line in read_metrics(out / "metrics.jsonl"))])


@pytest.fixture
def long_validation(tiny_data):
    """Flags for one that takes many seconds."""
    shards.write_shard(tiny_data / "tiny_val_000000.npy", np.arange(4_000_000, dtype=np.uint16) % 256)
    return ["--val-tokens", "4000000"]


def test_a_signal_to_one_rank_ends_an_evaluation_on_all(tiny_args, tmp_path, long_validation, new_log_path):
    """Soon, with exit code 0 and nothing half logged; resumed, on one rank, the evaluation is made."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, *long_validation, "--out-dir", out]
    first, second = processes.start_ranks(2, "train_gpt2.py", *run, log=new_log_path())
    assert first.wait_until((out / "metrics.jsonl").exists)
    time.sleep(0.5)
    assert second.send(signal.SIGTERM)
    assert second.wait(10).exit_code == 0
    assert f"another rank's signal at step 0, all saved; go on: {GO_ON}" in first.wait_for_success().output
    assert last_step(out) == -1 and not checkpoint.read_train_state(out)["evaluated"]
    train_quickstart(tiny_args, out, "--resume", "auto")
    assert_curves_close(load_curve(out), load_curve(train_quickstart(tiny_args, tmp_path / "whole")))


def test_a_signal_to_torchrun_and_to_its_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0"]
    process = start_torchrun(
        "--standalone", "--nproc_per_node=2", str(ROOT / "train_gpt2.py"), *run, "--out-dir", str(out)
    )
    wait_for(lambda: last_step(out) >= 5)
    for pid in [*rank_pids(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    # rank 0 may learn of it from rank 1 before its own signal comes
    assert re.search("stopped by (signal SIGTERM|.*another rank's signal)", said), said[-3000:]
    assert checkpoint.latest_step(out) > last_step(out), said[-3000:]


def talk():
    """Print without end, but for the seconds that the command line says."""
    end = time.monotonic() + float(sys.argv[1])
    with StopRequest().signals():
        while time.monotonic() < end:
            print("words " * 999, flush=True)


@pytest.mark.parametrize("seconds", [0, 2.5])
def test_a_second_signal_kills_unless_it_is_the_same_again(tmp_path, start_script, seconds):
    """The first comes while a print waits for its reader: the handler then runs inside that print."""
    os.mkfifo(tmp_path / "pipe")
    script = start_script(talk, 2 + 3 * seconds, out=tmp_path / "pipe")
    with open(tmp_path / "pipe", "rb") as pipe:
        pipe.readline()
        time.sleep(0.3)  # until the pipe is full
        script.send(signal.SIGINT)
        reader = threading.Thread(target=pipe.read)
        reader.start()
        time.sleep(seconds)
        script.send(signal.SIGTERM)
        assert script.wait().exit_code == (-signal.SIGTERM if seconds else 0)
        reader.join()


def test_a_signal_ends_hellaswag(tiny_args, tmp_path, start_script):
    out, rows = tmp_path / "out", write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4000))
    run = ["quickstart", *tiny_args, "--model.vocab-size", "50304", "--out-dir", out]
    script = start_script("train_gpt2.py", *run, "--hellaswag-every", "4", "--hellaswag-data", rows)
    assert script.wait_until("val loss"), script.output
    time.sleep(0.2)
    script.send(signal.SIGINT)
    assert script.wait(10).exit_code == 0 and "SIGINT" in script.output and "hellaswag acc" not in script.output
    saved = checkpoint.read_train_state(out)
    assert saved["record"] == {"step": 0} and not saved["evaluated"]


def test_a_signal_ends_sampling(tiny_args):
    cfg, polls = parse_config("quickstart", *tiny_args, "--model.vocab-size", "50304"), iter([False] * 3 + [True])
    data = SimpleNamespace(paths=[Path("x")])
    said = Evaluator(TrainStep(cfg, CPU, GPT(cfg.model)), data, None).samples(lambda: next(polls))
    encode = tokenizer.encoding().encode_ordinary
    assert all(len(encode(s.split(": ", 1)[1])) <= len(encode(cfg.sample_prompt)) + 9 for s in said.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the compiler through /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_compiles(tiny_args, tmp_path, number):
    """Terminals and batch systems send it to the whole group of processes, the C++ compiler included."""
    args = [a for a in tiny_args if a != "--no-compile"]
    command = [sys.executable, str(ROOT / "train_gpt2.py"), "quickstart", *args, "--out-dir", str(tmp_path / "out")]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=env, process_group=0)

    def compiling():  # a kernel: that a header or a probe fails would do no harm
        for p in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = (p / "stat").read_text().rsplit(")", 1)[1].split()[2] == str(process.pid)
                if ours and b".main.cpp" in (p / "cmdline").read_bytes():
                    return True

    wait_for(compiling)
    os.killpg(process.pid, number)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and GO_ON in said, said
    assert "Traceback" not in said and checkpoint.latest_step(tmp_path / "out") == 0
