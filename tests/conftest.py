"""Fixtures shared by the tests: where the project is, how a script is run, and the optional folder of real data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts set it; the tests run side by side
# The tests are of the CPU, whatever the machine has besides; test_cuda.py alone gives the GPUs back.
GPUS = {"CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]} if "CUDA_VISIBLE_DEVICES" in os.environ else {}
os.environ["CUDA_VISIBLE_DEVICES"] = ""

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


LONG = [f"test_{name}" for name in "train preemption torture hub life nodes readme fineweb hellaswag fake_cuda".split()]


def pytest_collection_modifyitems(items):
    """The longest files first, so that the two workers end together."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture
def shared_data() -> Path:
    """Real text and real HellaSwag rows, where a checkout has them beside it; tests that need them skip elsewhere."""
    path = ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip("no ../shared/data beside this checkout")
    return path


@pytest.fixture
def run_script():
    """run_script("infer.py", "--help", env={...}) -> CompletedProcess; returncode is checked unless check=False."""

    def run(*args, check=True, env=None, timeout=120, cwd=None, input=None):
        done = subprocess.run(
            [sys.executable, *[str(a) for a in (ROOT / args[0], *args[1:])]],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=cwd,
            input=input,
            env={**os.environ, "OMP_NUM_THREADS": "2", **(env or {})},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{args} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done

    return run


@pytest.fixture
def fails(run_script):
    """fails("hub.py", ..., says=["value", "rule"]): one clear message on stderr, exit code not 0, no traceback."""

    def check(*args, says=(), **kwargs):
        done = run_script(*args, check=False, **kwargs)
        text = done.stdout + done.stderr
        assert done.returncode != 0, text
        assert "Traceback" not in text, text
        for s in says:
            assert s.lower() in text.lower(), f"{s!r} not in: {text}"
        return done

    return check


@pytest.fixture
def tiny_data(tmp_path) -> Path:
    return write_walk(tmp_path / "tiny")


def write_walk(folder: Path) -> Path:
    """A folder of shards over a vocabulary of 256 with something to learn: three train shards, one val."""
    import numpy as np

    import shards

    folder.mkdir()
    rng = np.random.default_rng(0)
    for index, size in enumerate([2100, 3001, 4097, 1500]):
        walk = (np.cumsum(rng.integers(1, 4, size)) % 256).astype(np.uint16)
        shards.write_shard(folder / f"tiny_{'val' if index == 0 else 'train'}_{index:06d}.npy", walk)
    return folder


def write_model(folder: Path, block_size: int, n_embd: int) -> Path:
    """A run folder with one tiny model of GPT-2's tokens, whose choices are not close calls."""
    import torch

    import checkpoint
    from model import GPT, GPTConfig

    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=block_size, vocab_size=50304, n_layer=2, n_head=2, n_embd=n_embd))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    folder.mkdir()
    checkpoint.write(folder / "model_00007.pt", checkpoint.model_file(model, 7))
    return folder


TINY = """--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--sequence-length 32 --total-batch-size 256 --micro-batch-size 4 --max-steps 12 --warmup-steps 2 --val-every 4
--val-tokens 1024 --hellaswag-every 0 --sample-every 0 --save-every 3 --keep 0 --no-compile --dtype float32""".split()


@pytest.fixture
def tiny_args(tiny_data) -> list[str]:
    """Flags of a run that takes a second: 12 steps of 8 sequences of 32 tokens."""
    return [*TINY, "--data-dir", str(tiny_data)]


@pytest.fixture
def torchrun():
    """torchrun(2, "train_gpt2.py", ...): N gloo ranks on this machine, under a timeout so that a hang is a failure."""

    def run(ranks, *args, check=True, timeout=180, launch=("--standalone",)):
        command = [sys.executable, "-m", "torch.distributed.run", *launch, f"--nproc_per_node={ranks}"]
        done = subprocess.run(
            [*command, *[str(a) for a in (ROOT / args[0], *args[1:])]],
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{args} exited {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        return done

    return run
