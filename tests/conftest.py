"""Fixtures shared by the tests: tiny data, and the ways to run a script of the project.

Ways to run a script, besides calling its functions or helpers.run_main:

    run_ranks(2, "train_gpt2.py", "quickstart")  forked processes, which are the ranks of one run
    run_script("infer.py", "--help")             a new interpreter, as a user types it: seconds for the imports alone
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

# The tests are of the CPU, whatever the machine has besides; test_cuda.py alone gives the GPUs back.
GPUS = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import system  # noqa: F401  # first

# isort: split
import processes
import pytest
from helpers import ROOT, TINY_FLAGS, parse_config, train_quickstart, write_random_walk_shards

TEST_SECONDS = 360  # the slowest takes 30 on two quiet cores, and 200 on slow and busy ones


@pytest.fixture(scope="session", autouse=True)
def offline():
    """Nothing here needs the network: in this process and its forks, Python connects to this machine alone."""
    connect = socket.socket.connect

    def connect_here(self, address):
        is_here = isinstance(address, str | bytes) or address[0] in ("127.0.0.1", "::1", "localhost")
        assert is_here, f"a test wants to connect to {address}"
        return connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", connect_here)
        yield


@pytest.fixture(autouse=True)
def time_limit(request):
    """A test that hangs fails."""
    if request.node.get_closest_marker("slow"):
        yield
        return

    def fail(*_):
        raise TimeoutError(f"{request.node.name} takes more than {TEST_SECONDS} seconds")

    signal.signal(signal.SIGALRM, fail)
    signal.alarm(TEST_SECONDS)
    yield
    signal.alarm(0)


# ------------------------------------------------------------------------- data


@pytest.fixture
def tiny_data(tmp_path) -> Path:
    """A folder of small shards with something to learn; see helpers.write_random_walk_shards."""
    return write_random_walk_shards(tmp_path / "tiny")


@pytest.fixture
def tiny_args(tiny_data) -> list[str]:
    """Flags of a run over tiny_data that takes a second: 12 steps of 8 sequences of 32 tokens."""
    return [*TINY_FLAGS, "--data-dir", str(tiny_data)]


@pytest.fixture
def tiny_config(tiny_args):
    """tiny_config("--seed 1") -> the config of a run of tiny_args with these flags."""
    return partial(parse_config, "quickstart", *tiny_args)


@pytest.fixture
def train(tiny_args, tmp_path):
    """train("run", "--max-steps 3") -> tmp_path / "run", the folder of a run of tiny_args with these flags; see
    helpers.train_quickstart."""
    return lambda out, *flags, **how: train_quickstart(tiny_args, tmp_path / out, *flags, **how)


@pytest.fixture(scope="session")
def one_run(tmp_path_factory) -> Path:
    """The finished run of tiny_args, saved at steps 3, 6, 9 and 12: trained once, to be read but not changed."""
    folder = tmp_path_factory.mktemp("one")
    data = write_random_walk_shards(folder / "tiny")
    return train_quickstart([*TINY_FLAGS, "--data-dir", str(data)], folder / "run")


@pytest.fixture
def trained_run(one_run, tmp_path) -> Path:
    """A copy of one_run in tmp_path / "run", to be continued, pushed or damaged."""
    return shutil.copytree(one_run, tmp_path / "run")


@pytest.fixture
def gpus() -> str:
    """The GPUs that this process's children may have: those that the machine's user had set, or the first."""
    return GPUS


# ------------------------------------------------------------------------- running scripts


@pytest.fixture
def run_script():
    """run_script("infer.py", "--help") -> CompletedProcess of a command as a user types it, in a new interpreter. That
    takes seconds, so one test of each script does it."""

    def run(script, *args, cwd=None):
        command = [sys.executable, ROOT / script, *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd)
        assert done.returncode == 0, f"{args} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done

    return run


@pytest.fixture
def run_ranks(tmp_path_factory):
    """run_ranks(2, "train_gpt2.py", ...) -> the output of all gloo ranks of one run; see processes.run_ranks. Their
    logs are outside of tmp_path, whose content tests compare."""
    return lambda *args, **how: processes.run_ranks(*args, log=tmp_path_factory.mktemp("output") / "log", **how)


@pytest.fixture
def train_ranks(run_ranks, tiny_args, tmp_path):
    """train_ranks(2, "run", "--max-steps 3") -> the output of two ranks that train as the fixture `train` does."""
    command = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir"]
    return lambda n, out, *flags, **how: run_ranks(n, *command, tmp_path / out, *flags, **how)
