"""Runs that are killed, asked to stop, left without disk or without a rank: they end soon, say why, lose nothing."""

import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from test_nodes import agent, ranks_of, wait_for
from test_train import CPU, assert_close, curve, fit, same_bits, weights

import checkpoint
import cli
import evals
import runtime
import shards
import tokenizer
import train_gpt2
from cli import UserError
from config import parse
from model import GPT


def command_line(argv, log, largest_file):
    """train_gpt2.py with these arguments, in a process that has imported torch already."""
    with open(log, "ab") as f:
        os.dup2(f.fileno(), 1)
        os.dup2(f.fileno(), 2)
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["train_gpt2.py", *argv]
    torch.set_num_threads(1)
    cli.run_cli(train_gpt2.main)


@pytest.fixture(scope="module")
def start():
    """start(argv, log) -> Process, forked from a server that has imported torch: milliseconds instead of seconds."""
    with pytest.MonkeyPatch.context() as m:
        m.setenv("PYTHONPATH", str(ROOT))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pytest", "train_gpt2", "torch._inductor"])

        def run(argv, log, largest_file=0):
            process = context.Process(target=command_line, args=([str(a) for a in argv], log, largest_file))
            process.start()
            return process

        yield run


def last_step(out):
    """The last step in metrics.jsonl, -1 before there is one."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return json.loads(whole[-1])["step"] if whole else -1


def wait_until(condition, process, seconds=60):
    """Whether `condition` came true while the process lived; it must do one or the other soon."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if not process.is_alive():
            return False
        time.sleep(0.002)
    raise AssertionError("timed out")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ten_times_interrupted_equals_undisturbed_bit_for_bit(tiny_args, tmp_path, start, number):
    """At random moments and, every second time, in the middle of a save."""
    flags = ["quickstart", *tiny_args, "--max-steps", "150", "--save-every", "2", "--val-every", "3", "--device", "cpu"]
    whole, out, log = fit(flags[1:], tmp_path / "whole"), tmp_path / "out", tmp_path / "log"
    rng, caught = random.Random(int(number)), 0
    for i in range(10):
        process = start([*flags, "--out-dir", out, "--resume", "auto"], log)
        target = last_step(out) + rng.randint(1, 8)
        assert wait_until(lambda: last_step(out) >= target, process), log.read_text()  # noqa: B023
        if i % 2:
            assert wait_until(lambda: any(out.glob(".*.pt.part")), process)
        else:
            time.sleep(rng.uniform(0, 0.04))
        os.kill(process.pid, number)
        process.join(30)
        caught += process.exitcode == (0 if number == signal.SIGTERM else -number)
        assert last_step(out) < 150
    assert caught == 10, log.read_text()
    assert log.read_text().count("resume with: python train_gpt2.py") == (10 if number == signal.SIGTERM else 0)
    process = start([*flags, "--out-dir", out, "--resume", "auto"], log)
    process.join(60)
    assert process.exitcode == 0 and "Traceback" not in log.read_text(), log.read_text()
    assert not list(out.glob(".*.part"))  # what the kills left is gone
    assert curve(out) == curve(whole)
    assert same_bits(weights(out, 150), weights(whole, 150))


@pytest.mark.slow
def test_ranks_killed_ten_times_need_no_human(tiny_args, tmp_path, torchrun):
    """torchrun restarts the ranks each time one of them, at a random moment, is killed."""
    flags = [
        "quickstart",
        *tiny_args,
        "--max-steps",
        "400",
        "--save-every",
        "5",
        "--val-every",
        "7",
        "--resume",
        "auto",
    ]
    torchrun(2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "whole")
    out, rng, script = tmp_path / "out", random.Random(2), str(ROOT / "train_gpt2.py")
    process = agent("--standalone", "--nproc_per_node=2", "--max-restarts=10", script, *flags, "--out-dir", str(out))
    for _ in range(10):
        target = last_step(out) + rng.randint(1, 20)
        wait_for(lambda: last_step(out) >= target)  # noqa: B023
        time.sleep(rng.uniform(0, 0.2))
        os.kill(rng.choice(ranks_of(process.pid)), signal.SIGKILL)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said[-3000:]
    assert curve(out) == curve(tmp_path / "whole")
    assert same_bits(weights(out, 400), weights(tmp_path / "whole", 400))


def rows(path, n):
    """HellaSwag rows of random words."""
    rng = random.Random(0)
    words = lambda k: " ".join(rng.choice(["the", "cat", "ball", "runs", "then", "slowly"]) for _ in range(k))
    made = [{"ctx": words(9), "endings": [words(4) for _ in range(4)], "label": i % 4} for i in range(n)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture
def long_evaluation(tiny_data, tmp_path):
    """Flags for a validation or a HellaSwag evaluation that takes many seconds."""
    shards.write_shard(tiny_data / "tiny_val_000000.npy", np.arange(4_000_000, dtype=np.uint16) % 256)
    return {
        "val": ["--val-tokens", "4000000"],
        "hellaswag": ["--hellaswag-every", "4", "--hellaswag-data", str(rows(tmp_path / "rows.jsonl", 4000))],
    }


def test_a_signal_to_one_rank_ends_an_evaluation_on_all(tiny_args, tmp_path, long_evaluation):
    """Soon, with exit code 0 and nothing half logged; resumed, on one rank, the evaluation is made."""
    out, script = tmp_path / "out", str(ROOT / "train_gpt2.py")
    run = ["quickstart", *tiny_args, *long_evaluation["val"], "--out-dir", str(out)]
    process = agent("--standalone", "--nproc_per_node=2", script, *run)
    wait_for(lambda: (out / "metrics.jsonl").exists())
    time.sleep(0.5)
    os.kill(ranks_of(process.pid)[1], signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "another rank's signal at step 0, all saved; resume with: torchrun --standalone --nproc_per_node=2" in said
    assert last_step(out) == -1 and not checkpoint.read_train_state(out)["evaluated"]
    fit(tiny_args, out, "--resume", "auto")
    assert_close(curve(out), curve(fit(tiny_args, tmp_path / "whole")))


def test_a_signal_to_torchrun_and_to_its_ranks_loses_nothing(tiny_args, tmp_path):
    """As Slurm sends it, and a terminal: torchrun passes it on to ranks that have it already."""
    out = tmp_path / "out"
    run = ["quickstart", *tiny_args, "--max-steps", "100000", "--save-every", "0", "--val-every", "0"]
    process = agent("--standalone", "--nproc_per_node=2", str(ROOT / "train_gpt2.py"), *run, "--out-dir", str(out))
    wait_for(lambda: last_step(out) >= 5)
    for pid in [*ranks_of(process.pid), process.pid]:
        os.kill(pid, signal.SIGTERM)
    said = process.communicate(timeout=60)[0]
    assert "stopped by signal SIGTERM" in said and checkpoint.latest_step(out) > last_step(out), said[-3000:]


@pytest.mark.parametrize("seconds", [0, 3])
def test_a_second_signal_kills_unless_it_is_the_same_again(seconds):
    """The first comes while a print waits for its reader: the handler then runs inside that print."""
    code = """import resume, time
end = time.time() + 5
with resume.signals():
    while time.time() < end:
        print("words " * 999, flush=True)"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    process.stdout.readline()
    time.sleep(0.5)  # until the pipe is full
    process.send_signal(signal.SIGINT)
    reader = threading.Thread(target=process.stdout.read)
    reader.start()
    time.sleep(seconds)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    reader.join()
    assert process.returncode == (-signal.SIGTERM if seconds else 0)


def test_a_signal_ends_hellaswag(tiny_args, tmp_path, long_evaluation, start):
    out, log = tmp_path / "out", tmp_path / "log"
    run = ["quickstart", *tiny_args, "--model.vocab-size", "50304", "--out-dir", out]
    process = start([*run, *long_evaluation["hellaswag"]], log)
    assert wait_until(lambda: log.exists() and "val loss" in log.read_text(), process), log.read_text()
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    process.join(10)
    assert process.exitcode == 0 and "SIGINT" in log.read_text() and "hellaswag acc" not in log.read_text()
    assert checkpoint.read_train_state(out)["record"] == {"step": 0}


def test_a_signal_ends_sampling(tiny_args, tmp_path):
    cfg, polls = parse(["quickstart", *tiny_args, "--model.vocab-size", "50304"], None), iter([False] * 3 + [True])
    said = evals.samples(GPT(cfg.model), cfg, CPU, lambda: next(polls))
    prompt = len(tokenizer.encoding().encode_ordinary(cfg.sample_prompt))
    assert all(len(tokenizer.encoding().encode_ordinary(s.split(": ", 1)[1])) <= prompt + 9 for s in said.splitlines())


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
    assert process.returncode == 0 and "all saved; resume with" in said, said
    assert "Traceback" not in said and checkpoint.latest_step(tmp_path / "out") == 0


def test_a_full_disk_costs_one_checkpoint(tiny_args, tmp_path, start):
    whole, out, log = fit(tiny_args, tmp_path / "whole"), tmp_path / "out", tmp_path / "log"
    fit(tiny_args, out, "--max-steps", "3")
    again = ["quickstart", *tiny_args, "--out-dir", out, "--resume", "auto", "--allow-drift"]
    process = start([*again, "--save-every", "0"], log, largest_file=200_000)  # the optimizer's state needs more
    process.join(60)
    said = log.read_text()
    assert process.exitcode == 1 and "Traceback" not in said, said
    assert said.count("error: ") == 1 and "File too large" in said and "Newest complete step there: 3" in said
    assert sorted(p.name for p in out.glob("*.pt")) == ["model_00003.pt", "optim_00003.pt"]
    fit(tiny_args, out, "--resume", "auto")
    assert curve(out)[11] == curve(whole)[11] and same_bits(weights(out), weights(whole))


def test_an_error_on_one_rank_ends_the_other_and_is_said(tiny_args, tiny_data, tmp_path, torchrun):
    path = tiny_data / "tiny_train_000001.npy"
    tokens = np.array(shards.read_shard(path))
    tokens[200] = 300  # in window 6, which the second rank reads
    shards.write_shard(path, tokens)
    flags = ["quickstart", *tiny_args, "--no-shuffle", "--val-every", "0", "--out-dir", tmp_path / "out"]
    done = torchrun(2, "train_gpt2.py", *flags, check=False, timeout=60)
    assert done.returncode and "tiny_train_000001.npy: token 200 is id 300" in done.stderr, done.stderr
    assert "]: Traceback" not in done.stderr


def test_a_missing_rank_is_named(tmp_path, torchrun):
    (tmp_path / "late.py").write_text(f"""
import datetime, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import runtime
runtime.timedelta = lambda **_: datetime.timedelta(seconds=2)
if os.environ["RANK"] == "1":
    time.sleep(60)
with runtime.session("cpu"):
    pass
""")
    done = torchrun(2, tmp_path / "late.py", check=False, timeout=50)
    assert done.returncode and "rank 0 could not join the 2 ranks" in done.stderr, done.stderr
    assert "no sign of rank 1 for 2 seconds" in done.stderr and "]: Traceback" not in done.stderr


def test_ranks_without_torchrun_are_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"WORLD_SIZE=2 but RANK, .* not set; start with torchrun"):
        with runtime.session("cpu"):
            pass


def test_machines_that_would_not_survive_a_restart_are_told_so_at_the_start(monkeypatch):
    known = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    known |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in known.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        with runtime.session("cpu"):
            pass


def test_every_feature_on_two_ranks(tiny_args, tmp_path, torchrun):
    """Under the fixture's timeout: what one rank did alone would hang. 65 windows and 7 rows do not divide."""
    model = GPT(parse(["quickstart", *tiny_args, "--model.vocab-size", "50304"], None).model)
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    run = [
        *tiny_args,
        "--model.vocab-size",
        "50304",
        "--init-from",
        tmp_path / "model_00000.pt",
        "--val-tokens",
        "2080",
    ]
    run += ["--hellaswag-every", "2", "--hellaswag-data", rows(tmp_path / "rows.jsonl", 7), "--sample-every", "2"]
    run += ["--zero-stage", "1", "--overfit-single-batch", "--skip-bad-steps", "1", "--max-steps", "4", "--keep", "1"]
    run = [str(a) for a in run]
    one, two = fit(run, tmp_path / "one"), tmp_path / "two"
    first = torchrun(2, "train_gpt2.py", "quickstart", *run, "--out-dir", two).stdout
    assert_close(curve(two), curve(one))
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (one, two)]
    assert [r.get("hellaswag_acc") for r in lines[0]] == [r.get("hellaswag_acc") for r in lines[1]]
    assert "sample 3:" in first and "hellaswag acc" in first


def test_a_compiled_run_on_two_ranks_ends(tiny_args, tmp_path, torchrun, monkeypatch):
    """Compiled for the first time: the compiler's pools of threads, which never end, must not keep a rank alive."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = [a for a in tiny_args if a != "--no-compile"]
    run += ["--max-steps", "2", "--micro-batch-size", "2", "--recompute", "--zero-stage", "1"]
    said = torchrun(2, "train_gpt2.py", "quickstart", *run, "--out-dir", tmp_path / "two", timeout=150).stdout
    assert "the first step compiles" in said and "done: 2 steps" in said
    assert_close(curve(tmp_path / "two"), curve(fit([*run, "--no-compile"], tmp_path / "one")))
