"""The real scripts on fake CUDA tensors, which have a device, a dtype and a shape, and no values: no GPU is needed.

    python tests/faults/fake_cuda.py                      # every case: minutes
    python tests/faults/fake_cuda.py fault llmc-124m      # those with one of these words in their name

What a card refuses fails here: CPU tensors that meet CUDA tensors, a generator of the other device, two dtypes in one
attention; and so does a tensor left on the card in a checkpoint.

Values are invented (VALUES), so no result means anything. Kernels, torch.compile, several ranks, memory and time are
not tried at all. All of torch is patched, for a process of its own; it must be a build without CUDA, and g++ is needed.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent)]
FOLDER = tempfile.TemporaryDirectory(prefix="fake-cuda-")
TMP = Path(FOLDER.name)

# The card must be there before torch looks for one, which it does once. To compile it takes 10 s, for once.
SOURCE = HERE / "fake_cuda_guard.cpp"
CARD = ROOT / ".cache" / f"fake-card-{version('torch')}-{zlib.crc32(SOURCE.read_bytes()):08x}.so"
if not CARD.exists():
    CARD.parent.mkdir(exist_ok=True)
    there = Path(find_spec("torch").origin).parent
    build = ["g++", "-shared", "-fPIC", "-std=c++20", SOURCE, "-o", TMP / "card.so", f"-I{there}/include"]
    build += [f"-L{there}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{there}/lib"]
    subprocess.run(build, check=True)
    part = CARD.with_suffix(f".{os.getpid()}")
    part.write_bytes((TMP / "card.so").read_bytes())
    part.rename(CARD)
ctypes.CDLL(CARD)

import torch
from helpers import write_random_walk_shards
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map_with_path

import hellaswag
import infer
import train_gpt2
from training import checkpoint, optim, step

VALUES = {torch.float32: 0.0, torch.float64: 1.0, torch.bool: True}  # what item() says; of integers it is 5


class Mode(fake_tensor.FakeTensorMode):
    """Makes tensors without values, and adds what this mode does not check."""

    avoid_device_init = True  # nothing is tried on the card itself

    def dispatch(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        kinds = {x.device.type for x in leaves if isinstance(x, torch.Tensor)}
        item = func is torch.ops.aten._local_scalar_dense.default
        # of these, which take lists, FakeTensorMode does not ask whether they meet on one device
        if len(kinds) > 1 and ("_fused_" in func.name() or "_foreach_" in func.name()):
            raise RuntimeError(f"tensors of {func} on {kinds}")
        if item and isinstance(args[0], fake_tensor.FakeTensor):
            return VALUES.get(args[0].dtype, 5)
        return super().dispatch(func, types, args, kwargs)


MODE = Mode(allow_non_fake_inputs=True)


# ---- stand-ins for what needs a driver


def set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    assert (state.device.type, state.dtype, state.numel()) == ("cpu", torch.uint8, 16), state


class Generator:
    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    def manual_seed(self, seed: int) -> Generator:
        return self


def multinomial(probs: torch.Tensor, n: int, *, generator: Generator, real=torch.multinomial) -> torch.Tensor:
    if generator.device.type != probs.device.type:
        raise RuntimeError(f"Expected a {probs.device.type!r} generator but found {generator.device.type!r}")
    return real(probs, n)


def swap_tensors(old: torch.Tensor, new: torch.Tensor) -> None:
    """For Module.to: torch's own swaps no tensor that has weak references, and fake ones have."""
    old.data, old.fake_device = new.data, new.fake_device


ANSWERS = {  # what torch.cuda's functions answer; the others only see to it that their arguments are right
    "is_available": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_name": "NVIDIA H200",
    "max_memory_allocated": 0,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), mock.DEFAULT),
}
for name, answer in ANSWERS.items():
    setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name), return_value=answer))
torch.cuda.set_rng_state = set_rng_state
torch.Generator, torch.multinomial, torch.utils.swap_tensors = Generator, multinomial, swap_tensors
torch.Tensor.pin_memory = lambda self: self
fake_tensor.FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata  # checkpoint.copy_to_host uses it


def write(path: Path, content: dict, real=checkpoint.write) -> None:
    """checkpoint.write, of zeros: fake tensors have nothing to be written."""

    def zeros(at, x):
        if not isinstance(x, torch.Tensor):
            return x
        assert x.device.type == "cpu", f"{path.name}: {at} is still on {x.device}"
        return torch.zeros(x.shape, dtype=x.dtype)

    real(path, tree_map_with_path(zeros, content))


def save(self: checkpoint.CheckpointWriter, *args, real=checkpoint.CheckpointWriter.save) -> None:
    real(self, *args)
    self.thread.join()  # a fake mode is not for two threads at once


checkpoint.write, checkpoint.CheckpointWriter.save = write, save


# ---- cases

PRESETS = ("gpt2-124m", "untied-124m", "llmc-124m", "speedrun-124m", "sprint-124m", "record8-124m")
WAYS = {  # --dtype and other flags
    "bfloat16": ("bfloat16",),
    "float16": ("float16", "--weights", "float32"),
    "float32": ("float32",),
    "small:bfloat16": ("bfloat16", "--weights", "bfloat16"),
    "small:float32": ("float32", "--weights", "bfloat16"),
    "recompute": ("bfloat16", "--recompute"),
}
DATA, ROWS = write_random_walk_shards(TMP / "tiny"), TMP / "rows.jsonl"
ROWS.write_text((json.dumps({"ctx": "once upon a", "endings": list("wxyz"), "label": 0}) + "\n") * 9)
TINY = f"""--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --sequence-length 32
--total-batch-size 256 --micro-batch-size 4 --max-steps 2 --warmup-steps 1 --val-tokens 1000 --val-every 1
--hellaswag-every 2 --hellaswag-data {ROWS} --sample-every 2 --no-compile --device cuda --data-dir {DATA}""".split()


def tiny(preset: str) -> list[str]:
    return [preset, *TINY, *(["--model.value-tables", "1"] if preset == "sprint-124m" else [])]


def run(script, *args: object) -> None:
    with mock.patch.object(sys, "argv", [script.__file__, *map(str, args)]), MODE:
        script.main()


def lives(preset: str, dtype: str, *flags: str) -> None:
    """Train, go on from the checkpoint, evaluate, score and sample."""
    with tempfile.TemporaryDirectory(dir=TMP) as out:
        train = (train_gpt2, *tiny(preset), "--dtype", dtype, *flags)
        run(*train, "--out-dir", out)
        run(*train, "--out-dir", out, "--max-steps", 3, "--resume", "auto")
        run(*train, "--init-from", out, "--eval-only")
        on_card = ("--device", "cuda", "--dtype", dtype)
        run(hellaswag, "--model", out, "--data", ROWS, "--per-example", TMP / "scores.jsonl", *on_card)
        run(infer, out, "Hello", "--max-new-tokens", 40, *on_card)  # beyond the context: it slides
        run(infer, out, "Hello", "--max-new-tokens", 4, "--num-samples", 3, "--top-p", 0.9, *on_card)


def plans(preset: str) -> None:
    """--dry-run, which tries what micro-batch fits."""
    with mock.patch.dict(VALUES, {torch.float32: 2.0}):  # the micro-batch that all ranks agree on
        run(train_gpt2, *tiny(preset), "--micro-batch-size", "auto", "--dry-run")


def caught(says: str, planted) -> None:
    """With the fault that `planted` plants, it all ends with this message."""
    try:
        with planted:
            lives("gpt2-124m", "bfloat16")
    except Exception as e:
        assert says in str(e), f"it failed, but not with {says!r}: {e}"
    else:
        raise AssertionError("it was not noticed")


def wrapped(owner, name: str, wrap: Callable):
    return mock.patch.object(owner, name, wrap(getattr(owner, name)))


def targets_on_host(real):
    return lambda tokens, device: (real(tokens, device)[0], real(tokens, torch.device("cpu"))[1])


def moments_on_host(real):
    def load_state(optimizers, states):
        real(optimizers, states)
        for state in optimizers[0].state.values():
            state["exp_avg"] = state["exp_avg"].cpu()

    return load_state


FAULTS = {  # what is planted, and what then has to be said
    "targets": (wrapped(step, "to_device", targets_on_host), "devices"),
    "checkpoint": (wrapped(checkpoint, "to_host", lambda real: lambda tree, memo: tree), "is still on cuda:0"),
    "moments": (wrapped(optim, "load_state", moments_on_host), "_fused_adamw_"),
    "loss": (mock.patch.dict(VALUES, {torch.float32: math.nan}), "the update was refused"),
}
CASES = {f"{preset}:{way}": partial(lives, preset, *flags) for preset in PRESETS for way, flags in WAYS.items()}
CASES |= {f"{preset}:plan": partial(plans, preset) for preset in PRESETS}
CASES |= {f"fault:{name}": partial(caught, says, planted) for name, (planted, says) in FAULTS.items()}


def main(words: list[str]) -> int:
    chosen, bad = [name for name in CASES if not words or any(word in name for word in words)], []
    for name in chosen:
        print(f"\n==== {name}", flush=True)
        try:
            CASES[name]()
        except Exception:
            bad.append(name)
            traceback.print_exc(file=sys.stdout)
    print(f"\ntorch {torch.__version__}: {len(chosen)} cases, {len(bad)} failed {' '.join(bad)}", flush=True)
    return 0 if chosen and not bad else 1


if __name__ == "__main__":
    failed = main(sys.argv[1:])
    FOLDER.cleanup()
    os._exit(failed)  # the card's thread of autograd does not end by itself
