"""Tokens in the environment stay there: nothing that is written, printed or put on a command line holds one."""

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from helpers import ROOT, TINY_FLAGS

from faults import hub_server

# in two parts, for a run also stores the difference of edited files, such as this one, from their commit
SECRETS = {"HF_TOKEN": "hf_" + "plantedTokenOfTheHub0", "WANDB_API_KEY": "b" * 20 + "plantedKeyOfWandb000"}
RUN = [*TINY_FLAGS, "--model.vocab-size", "50304", "--max-steps", "6", "--tracker", "tensorboard"]
WANDB = """
import pathlib

class init:  # what it is told lands in a file
    def __init__(self, **told):
        self.file = open(pathlib.Path(told["dir"], "told"), "w", buffering=1)
        self.log(told)
    def log(self, *args, **kwargs):
        print(args, kwargs, file=self.file)
    def finish(self):
        self.file.close()
"""


def holds_a_secret(data: bytes) -> bool:
    return any(s.encode() in data or s.encode("utf-16-le") in data for s in SECRETS.values())


def leaks(*folders: Path) -> list[Path]:
    """Files, whatever they are, that hold a planted value or are named by one."""
    files = [p for folder in folders for p in folder.rglob("*") if p.is_file()]
    assert files
    return [p for p in files if holds_a_secret(str(p).encode() + p.read_bytes())]


class Watch(threading.Thread):
    """Collects the command lines of all processes that come from this one, while it is open."""

    def __init__(self, mark: str):
        super().__init__(daemon=True)
        self.mark, self.seen, self.open = mark.encode(), set(), True

    def run(self):
        while self.open:
            for path in Path("/proc").glob("[0-9]*"):
                try:
                    if self.mark in (path / "environ").read_bytes():
                        self.seen.add((path / "cmdline").read_bytes())
                except OSError:
                    continue
            time.sleep(0.02)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.open = False
        self.join()


def test_no_token_in_what_a_run_writes(tiny_data, tmp_path, run_script):
    env = {**SECRETS, "HF_HOME": str(tmp_path / "hf-home")}
    out = ("--data-dir", tiny_data, "--out-dir", tmp_path / "r")
    done = run_script("train_gpt2.py", "quickstart", *RUN, *out, env=env)
    assert list((tmp_path / "r").glob("tensorboard/*")) and list((tmp_path / "r").glob("*.pt"))
    assert not leaks(tmp_path) and not holds_a_secret((done.stdout + done.stderr).encode())


@pytest.mark.slow
def test_no_token_from_text_to_the_hub_and_back(tmp_path, run_script):
    """fineweb.py, push, pull, train.sh with its push at the end, and failures of each, with both tokens set."""
    work, said = tmp_path / "work", []
    work.mkdir()
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes/wandb.py").write_text(WANDB)
    with hub_server.start(tmp_path / "hub", token=SECRETS["HF_TOKEN"]) as hub, Watch(f"WATCHED={tmp_path}") as watch:
        env = {**SECRETS, **hub.env(), "WATCHED": str(tmp_path), "PYTHONPATH": str(tmp_path / "fakes")}

        def call(*args, check=True, **more):
            done = run_script(*args, check=check, env={**env, **more}, cwd=work)
            said.append(done.stdout + done.stderr)
            return done

        call("fineweb.py", "--source", ROOT / "model.py", ROOT / "hub.py", "--shard-size", 2000, "--out", "data")
        call("hub.py", "push-data", "data", "tester/tokens")
        call("hub.py", "pull-data", "tester/tokens", "pulled")
        hub.faults += [hub_server.Fault("status", "/api/", code=500, message=f"no: {SECRETS['HF_TOKEN']}", times=9)]
        assert call("hub.py", "pull-data", "tester/tokens", "again", check=False).returncode == 1
        hub.faults.clear()
        assert call("hub.py", "push-data", "data", "somebody/else", check=False).returncode == 1
        command = ["bash", str(ROOT / "train.sh"), "quickstart", *RUN, "--data-dir", str(work / "pulled")]
        command += ["--out-dir", str(work / "run"), "--device", "cpu", "--tracker", "wandb"]
        settings = {"START_WAIT": "0", "PUSH_TO": "tester/model", "RESTART_DELAY": "0", "OMP_NUM_THREADS": "2"}
        done = subprocess.run(command, cwd=work, env={**os.environ, **env, **settings}, capture_output=True, text=True)
        said.append(done.stdout + done.stderr)
        deadline = time.monotonic() + 240
        while (work / "run/train.pid").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        log = "".join(p.read_text() for p in (work / "run").glob("train-*.log"))
        assert "the weights are at tester/model" in log, log + said[-1]
        call("hub.py", "pull-model", "tester/model", "model")
        call("hub.py", "export", "model", "hf")
        call("infer.py", "model", "def", "--max-new-tokens", "3")
    assert list((tmp_path / "hub").rglob("README.md"))
    assert list(work.rglob("manifest.json")) and list(work.rglob("*.pt"))
    assert "train_loss" in (work / "run/told").read_text()
    assert not leaks(tmp_path)
    assert not holds_a_secret("".join(said).encode()), [s for s in said if holds_a_secret(s.encode())]
    scripts = b"\n".join(watch.seen)
    assert all(name in scripts for name in (b"fineweb.py", b"hub.py", b"train_gpt2.py", b"train.sh"))
    assert not any(map(holds_a_secret, watch.seen))
