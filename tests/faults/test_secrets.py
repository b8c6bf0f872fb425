"""Tokens in the environment stay there: nothing that is written, printed or put on a command line contains one.

The tests plant two values that occur nowhere else, use every script with them, then search all files, all output and
the command lines of all processes.
"""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from helpers import ROOT, TINY_FLAGS

from faults import hub_server

# Each is written in two parts: a run stores the difference of edited files, such as this one, from their commit.
SECRETS = {"HF_TOKEN": "hf_" + "plantedTokenOfTheHub0", "WANDB_API_KEY": "b" * 20 + "plantedKeyOfWandb000"}
RUN_FLAGS = [*TINY_FLAGS, "--model.vocab-size", "50304", "--max-steps", "6", "--tracker", "tensorboard"]

# A stand-in for wandb: everything that a run gives it goes into a file.
FAKE_WANDB = """
import pathlib

class init:
    def __init__(self, **settings):
        self.file = open(pathlib.Path(settings["dir"], "logged"), "w", buffering=1)
        self.log(settings)
    def log(self, *args, **kwargs):
        print(args, kwargs, file=self.file)
    def finish(self):
        self.file.close()
"""


def contains_secret(data: bytes) -> bool:
    """Whether bytes contain a planted value, as plain text or in the encoding of Windows' and some binary files."""
    return any(secret.encode() in data or secret.encode("utf-16-le") in data for secret in SECRETS.values())


def find_leaks(*folders: Path) -> list[Path]:
    """Files, whatever they are, with a planted value in them or in their name."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if contains_secret(str(path).encode() + path.read_bytes())]


class CommandLineWatch(threading.Thread):
    """While it is open, collects the command lines of all processes with `mark` in their environment. Linux only."""

    def __init__(self, mark: str):
        super().__init__(daemon=True)
        self.mark = mark.encode()
        self.seen: set[bytes] = set()
        self.is_open = True

    def run(self):
        while self.is_open:
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    if self.mark in (process / "environ").read_bytes():
                        self.seen.add((process / "cmdline").read_bytes())
                except OSError:  # it has ended, or is another user's
                    continue
            time.sleep(0.02)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.is_open = False
        self.join()


def test_no_token_in_what_a_run_writes(tiny_data, tmp_path, run_in_fork):
    env = {**SECRETS, "HF_HOME": str(tmp_path / "hf-home")}
    folders = ("--data-dir", tiny_data, "--out-dir", tmp_path / "run")

    done = run_in_fork("train_gpt2.py", "quickstart", *RUN_FLAGS, *folders, env=env)

    # the run has written what could have leaked
    assert list((tmp_path / "run").glob("tensorboard/*")) and list((tmp_path / "run").glob("*.pt"))
    assert not find_leaks(tmp_path)
    assert not contains_secret((done.stdout + done.stderr).encode())


@pytest.mark.slow
def test_no_token_from_text_to_the_hub_and_back(tmp_path, run_script):
    """fineweb.py, push, pull, train.sh with its push at the end, and failures of each, with both tokens set."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes/wandb.py").write_text(FAKE_WANDB)
    outputs = []

    with (
        hub_server.start(tmp_path / "hub", token=SECRETS["HF_TOKEN"]) as hub,
        CommandLineWatch(f"WATCHED={tmp_path}") as watch,
    ):
        env = {**SECRETS, **hub.env(), "WATCHED": str(tmp_path), "PYTHONPATH": str(tmp_path / "fakes")}

        def run(*args, check=True):
            done = run_script(*args, check=check, env=env, cwd=work)
            outputs.append(done.stdout + done.stderr)
            return done

        # text to shards, to the Hub and back
        run("fineweb.py", "--source", ROOT / "model.py", ROOT / "hub.py", "--shard-size", 2000, "--out", "data")
        run("hub.py", "push-data", "data", "tester/tokens")
        run("hub.py", "pull-data", "tester/tokens", "pulled")

        # failures, one of them with an answer that quotes the token
        hub.faults += [hub_server.Fault("status", "/api/", code=500, message=f"no: {SECRETS['HF_TOKEN']}", times=9)]
        assert run("hub.py", "pull-data", "tester/tokens", "again", check=False).returncode == 1
        hub.faults.clear()
        assert run("hub.py", "push-data", "data", "somebody/else", check=False).returncode == 1

        # a background run that pushes its model at the end
        command = ["bash", str(ROOT / "train.sh"), "quickstart", *RUN_FLAGS, "--data-dir", str(work / "pulled")]
        command += ["--out-dir", str(work / "run"), "--device", "cpu", "--tracker", "wandb"]
        settings = {"START_WAIT": "0", "PUSH_TO": "tester/model", "RESTART_DELAY": "0", "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, cwd=work, env={**os.environ, **env, **settings}, capture_output=True, text=True)
        outputs.append(done.stdout + done.stderr)
        deadline = time.monotonic() + 240
        while (work / "run/train.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        log = "".join(path.read_text() for path in (work / "run").glob("train-*.log"))
        assert "the weights are at tester/model" in log, log + outputs[-1]

        # and its model back, to use
        run("hub.py", "pull-model", "tester/model", "model")
        run("hub.py", "export", "model", "hf")
        run("infer.py", "model", "def", "--max-new-tokens", "3")

    # everything that could have leaked was written
    assert list((tmp_path / "hub").rglob("README.md"))
    assert list(work.rglob("manifest.json")) and list(work.rglob("*.pt"))
    assert "train_loss" in (work / "run/logged").read_text()
    command_lines = b"\n".join(watch.seen)
    assert all(name in command_lines for name in (b"fineweb.py", b"hub.py", b"train_gpt2.py", b"train.sh"))

    # and nothing has leaked
    assert not find_leaks(tmp_path)
    assert not any(contains_secret(output.encode()) for output in outputs), outputs
    assert not any(contains_secret(line) for line in watch.seen)
