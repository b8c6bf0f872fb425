"""Fixtures shared by the tests: where the project is, how a script is run, and the optional folder of real data."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts set it; the tests run side by side
# The tests are of the CPU, whatever the machine has besides; test_cuda.py alone gives the GPUs back.
GPUS = {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]} if "CUDA_VISIBLE_DEVICES" in os.environ else {}
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import processes
import pytest
from helpers import ROOT, TINY, write_walk


@pytest.fixture
def shared_data() -> Path:
    """Real text and real HellaSwag rows, where a checkout has them beside it; tests that need them skip elsewhere."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return path


@pytest.fixture
def gpus() -> dict[str, str]:
    """The environment variable that gives this process's children the GPUs back, if the machine's user had set it."""
    return GPUS


def checked(done: subprocess.CompletedProcess, check: bool) -> subprocess.CompletedProcess:
    if check and done.returncode != 0:
        raise AssertionError(f"{done.args} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done


@pytest.fixture
def run_script():
    """run_script("infer.py", "--help", env={...}) -> CompletedProcess of a command as a user types it, which takes
    seconds: for once a script. returncode is checked unless check=False."""

    def run(*args, check=True, env=None, timeout=120, cwd=None, input=None):
        command = [sys.executable, *map(str, (ROOT / args[0], *args[1:]))]
        env = {**os.environ, "OMP_NUM_THREADS": "2", **(env or {})}
        how = {"capture_output": True, "text": True, "timeout": timeout, "cwd": cwd, "input": input}
        return checked(subprocess.run(command, env=env, **how), check)

    return run


@pytest.fixture
def log(tmp_path_factory):
    """log() -> a file not used before, outside of what a test looks at."""
    folder = tmp_path_factory.mktemp("said")
    numbers = itertools.count()
    return lambda: folder / f"said-{next(numbers)}"


@pytest.fixture
def call(log):
    """As run_script, with the same arguments, in a fork (see processes.py): a tenth of a second and more."""

    def run(script, *args, check=True, env=None, timeout=120, cwd=None, input=None):
        out, err, words = log(), log(), log()
        words.write_text(input or "")
        ended = processes.start(script, *args, log=err, out=out, env=env, cwd=cwd, input=words).wait(timeout)
        said = [path.read_text(errors="replace") for path in (out, err)]
        return checked(subprocess.CompletedProcess([script, *args], ended.code, *said), check)

    return run


@pytest.fixture
def fails(call):
    """fails("hub.py", ..., says=["value", "rule"]): one clear message on stderr, exit code not 0, no traceback."""

    def check(*args, says=(), **kwargs):
        done = call(*args, check=False, **kwargs)
        text = done.stdout + done.stderr
        assert done.returncode != 0 and "Traceback" not in text, text
        assert [s for s in says if s.lower() not in text.lower()] == [], text
        return done

    return check


@pytest.fixture
def start(log):
    """start("train_gpt2.py", ...) -> processes.Script."""
    return lambda *args, **how: processes.start(*args, **{"log": log(), **how})


@pytest.fixture
def run_ranks(log):
    """run_ranks(2, "train_gpt2.py", ...) -> what N gloo ranks on this machine said; see processes.run_ranks."""
    return lambda *args, **how: processes.run_ranks(*args, log=log(), **how)


@pytest.fixture
def tiny_data(tmp_path) -> Path:
    return write_walk(tmp_path / "tiny")


@pytest.fixture
def tiny_args(tiny_data) -> list[str]:
    """Flags of a run that takes a second: 12 steps of 8 sequences of 32 tokens."""
    return [*TINY, "--data-dir", str(tiny_data)]
