"""The real scripts on a fake CUDA card: tensors have a device, a dtype and a shape, but no values. It needs no GPU.

    python tests/faults/fake_cuda.py                      # every case: minutes
    python tests/faults/fake_cuda.py fault llmc-124m      # those with one of these words in their name

A fake card is two things. A small C++ library (fake_cuda_guard.cpp) registers a CUDA device with a torch that was built
without CUDA, so that autograd accepts tensors of device cuda:0. PyTorch's FakeTensorMode then makes tensors that know
their device, dtype and shape, checks each operation on them, and computes nothing.

    train_gpt2.py, hellaswag.py, infer.py      the real scripts, unchanged
    FakeCard (FakeTensorMode)                  checks devices, dtypes and shapes; invents what item() returns
    torch.cuda, torch.Generator, ...           replaced where the real ones ask a driver
    fake_cuda_guard.cpp                        the card that autograd sees

What a card refuses fails here: CPU tensors that meet CUDA tensors, a generator of the other device, two dtypes in one
attention; and so does a tensor left on the card in a checkpoint.

Values are invented (ITEM_VALUES), so no result means anything. Kernels, torch.compile, several ranks, memory and time
are not tried at all. All of torch is patched, so this needs a process of its own; torch must be a build without CUDA,
and g++ is needed. tests/faults/test_fake_cuda.py runs it.
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
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT), str(HERE.parent)]
TEMPORARY_FOLDER = tempfile.TemporaryDirectory(prefix="fake-cuda-")
TMP = Path(TEMPORARY_FOLDER.name)


# ---- the card, which must be there before torch looks for one: it looks once, when it is imported

GUARD_SOURCE = HERE / "fake_cuda_guard.cpp"


def load_guard() -> None:
    """Load the library of fake_cuda_guard.cpp, and compile it if this version of it is not in the cache yet."""
    library_name = f"fake-card-{version('torch')}-{zlib.crc32(GUARD_SOURCE.read_bytes()):08x}.so"
    library = ROOT / ".cache" / library_name
    if not library.exists():
        compile_guard(library)
    ctypes.CDLL(library)


def compile_guard(library: Path) -> None:
    """Compile fake_cuda_guard.cpp against the torch that is installed, which takes some ten seconds."""
    library.parent.mkdir(exist_ok=True)
    torch_folder = Path(find_spec("torch").origin).parent
    command = ["g++", "-shared", "-fPIC", "-std=c++20", GUARD_SOURCE, "-o", TMP / "card.so"]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    command += [f"-Wl,-rpath,{torch_folder}/lib"]
    subprocess.run(command, check=True)

    # Complete or absent: another process may compile it at the same time. TMP may be on another disk.
    part = library.with_suffix(f".{os.getpid()}")
    part.write_bytes((TMP / "card.so").read_bytes())
    part.rename(library)


load_guard()

import torch
from helpers import write_random_walk_shards
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves, tree_map_with_path

import hellaswag
import infer
import train_gpt2
from training import checkpoint, optim, step

# What item() returns for a fake tensor, which has no value: a finite loss of 0, a true flag. Integers count the right
# answers of HellaSwag, which must not be more than its rows.
ITEM_VALUES = {torch.float32: 0.0, torch.float64: 1.0, torch.bool: True}
INTEGER_ITEM_VALUE = 1


class FakeCard(fake_tensor.FakeTensorMode):
    """Makes tensors without values. To FakeTensorMode it adds values for item(), which the scripts need to go on, and a
    check that it lacks."""

    avoid_device_init = True  # no operation is tried on the card to learn what it returns

    def dispatch(self, func, types, args=(), kwargs=None):
        # Operations that take lists of tensors: FakeTensorMode does not ask whether all are on one device.
        if "_fused_" in func.name() or "_foreach_" in func.name():
            leaves = tree_leaves((args, kwargs))
            devices = {x.device.type for x in leaves if isinstance(x, torch.Tensor)}
            if len(devices) > 1:
                raise RuntimeError(f"tensors of {func} on {devices}")

        # item(), tolist() of one element, and tests of a condition end here.
        is_item = func is torch.ops.aten._local_scalar_dense.default
        if is_item and isinstance(args[0], fake_tensor.FakeTensor):
            return ITEM_VALUES.get(args[0].dtype, INTEGER_ITEM_VALUE)
        return super().dispatch(func, types, args, kwargs)


FAKE_CARD = FakeCard(allow_non_fake_inputs=True)


# ---- torch's functions that need a driver, or values

# What torch.cuda's functions return. They only check that their arguments fit the real function's.
CUDA_RETURN_VALUES = {
    "is_available": True,
    "is_bf16_supported": True,
    "device_count": 1,
    "get_device_capability": (9, 0),
    "get_device_name": "NVIDIA H200",
    "max_memory_allocated": 0,
    "mem_get_info": (2**30, 80 * 2**30),
    **dict.fromkeys(("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"), mock.DEFAULT),
}


class FakeGenerator:
    """torch.Generator of a device, which would ask the driver for one."""

    def __init__(self, device: torch.device | str = "cpu"):
        self.device = torch.device(device)

    def manual_seed(self, seed: int) -> FakeGenerator:
        return self


def fake_multinomial(
    probs: torch.Tensor, n: int, *, generator: FakeGenerator, original: Callable = torch.multinomial
) -> torch.Tensor:
    """torch.multinomial, which refuses a generator of another device. Fake tensors need none."""
    if generator.device.type != probs.device.type:
        raise RuntimeError(f"Expected a {probs.device.type!r} generator but found {generator.device.type!r}")
    return original(probs, n)


def fake_swap_tensors(old: torch.Tensor, new: torch.Tensor) -> None:
    """Make `old` what `new` is, for Module.to. torch's own refuses tensors that have weak references, as fake ones."""
    old.data = new.data
    old.fake_device = new.fake_device


def storage_address(tensor: fake_tensor.FakeTensor) -> int:
    """A number for the storage of a tensor, in place of data_ptr: checkpoint.copy_to_host asks which tensors share."""
    return tensor.untyped_storage()._cdata


def replace_torch_functions() -> None:
    """Put the functions above in the place of torch's."""
    for name, value in CUDA_RETURN_VALUES.items():
        setattr(torch.cuda, name, mock.create_autospec(getattr(torch.cuda, name), return_value=value))
    torch.Generator = FakeGenerator
    torch.multinomial = fake_multinomial
    torch.utils.swap_tensors = fake_swap_tensors
    torch.Tensor.pin_memory = lambda tensor: tensor
    fake_tensor.FakeTensor.data_ptr = storage_address


# ---- the project's functions that need values


def write_zeros(path: Path, content: dict, original: Callable = checkpoint.write) -> None:
    """checkpoint.write, of zeros: fake tensors have nothing to be written. Fails if a tensor is still on the card."""

    def to_zeros(key_path: tuple, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        assert value.device.type == "cpu", f"{path.name}: {key_path} is still on {value.device}"
        return torch.zeros(value.shape, dtype=value.dtype)

    original(path, tree_map_with_path(to_zeros, content))


def save_and_wait(
    writer: checkpoint.CheckpointWriter, *args: Any, original: Callable = checkpoint.CheckpointWriter.save
) -> None:
    """CheckpointWriter.save, which waits for its thread: two threads cannot use a fake mode at once."""
    original(writer, *args)
    writer.thread.join()


replace_torch_functions()
checkpoint.write = write_zeros
checkpoint.CheckpointWriter.save = save_and_wait


# ---- the cases: presets, each in several precisions

# Presets of which each has parts that the others do not.
PRESETS = ("gpt2-124m", "untied-124m", "llmc-124m", "speedrun-124m", "record8-124m")

# --dtype and the flags that go with it, by the name of the case.
PRECISIONS = {
    "bfloat16": ("bfloat16",),
    "float16": ("float16", "--weights", "float32"),
    "float32": ("float32",),
    "bfloat16-weights": ("bfloat16", "--weights", "bfloat16"),
    "bfloat16-weights-in-float32": ("float32", "--weights", "bfloat16"),
    "recompute": ("bfloat16", "--recompute"),
}

# Tiny data, a tiny model, and every feature of training at its second step at the latest. Most of the time goes into
# sampled tokens and scored rows, so the context is short and the rows are few.
SHARDS, ROWS = write_random_walk_shards(TMP / "tiny"), TMP / "rows.jsonl"
ROWS.write_text((json.dumps({"ctx": "once upon a", "endings": list("wxyz"), "label": 0}) + "\n") * 2)
TINY_FLAGS = f"""--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 16 --sequence-length 16
--total-batch-size 128 --micro-batch-size 4 --max-steps 2 --warmup-steps 1 --val-tokens 500 --val-every 1
--hellaswag-every 2 --hellaswag-data {ROWS} --sample-every 2 --no-compile --device cuda --data-dir {SHARDS}""".split()


def run_script(script: ModuleType, *args: object) -> None:
    """Run a script's main with these arguments, on the fake card."""
    with mock.patch.object(sys, "argv", [script.__file__, *map(str, args)]), FAKE_CARD:
        script.main()


def train_and_use(preset: str, dtype: str, *flags: str) -> None:
    """A model's life: train, resume from the checkpoint, evaluate, score on HellaSwag, sample."""
    with tempfile.TemporaryDirectory(dir=TMP) as out:
        train = (train_gpt2, preset, *TINY_FLAGS, "--dtype", dtype, *flags)
        run_script(*train, "--out-dir", out)
        run_script(*train, "--out-dir", out, "--max-steps", 3, "--resume", "auto")
        run_script(*train, "--init-from", out, "--eval-only")

        on_card = ("--device", "cuda", "--dtype", dtype)
        run_script(hellaswag, "--model", out, "--data", ROWS, "--per-example", TMP / "scores.jsonl", *on_card)
        # More tokens than the context holds, so that it slides; then several samples, with another way to choose.
        run_script(infer, out, "Hello", "--max-new-tokens", 20, *on_card)
        run_script(infer, out, "Hello", "--max-new-tokens", 4, "--num-samples", 3, "--top-p", 0.9, *on_card)


def plan(preset: str) -> None:
    """--dry-run, which tries what micro-batch fits."""
    run_script(train_gpt2, preset, *TINY_FLAGS, "--micro-batch-size", "auto", "--dry-run")


# ---- planted faults, which must be noticed


def expect_failure(message: str, planted_fault: AbstractContextManager) -> None:
    """Fail unless, with the fault, training and using a model ends with an error that has this message."""
    try:
        with planted_fault:
            train_and_use("gpt2-124m", "bfloat16")
    except Exception as e:
        assert message in str(e), f"it failed, but not with {message!r}: {e}"
    else:
        raise AssertionError("it was not noticed")


def replace_function(owner: Any, name: str, make_replacement: Callable[[Callable], Callable]) -> AbstractContextManager:
    """A context in which owner.name is what `make_replacement` makes of the original."""
    return mock.patch.object(owner, name, make_replacement(getattr(owner, name)))


def keep_targets_on_host(to_device: Callable) -> Callable:
    """A to_device that moves the inputs and leaves the targets."""

    def to_device_but_targets(tokens, device):
        x, _ = to_device(tokens, device)
        _, y = to_device(tokens, torch.device("cpu"))
        return x, y

    return to_device_but_targets


def keep_moments_on_host(load_state: Callable) -> Callable:
    """A load_state that leaves AdamW's first moments on the CPU."""

    def load_state_but_moments(optimizers, states):
        load_state(optimizers, states)
        for state in optimizers[0].state.values():
            state["exp_avg"] = state["exp_avg"].cpu()

    return load_state_but_moments


def keep_checkpoint_on_card(copy_to_host: Callable) -> Callable:
    """A copy_to_host that copies nothing."""
    return lambda tree, copies: tree


def run_out_of_memory(forward: Callable) -> Callable:
    """A forward pass that finds no memory when gradients are wanted."""

    def limited_forward(self, *args):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, *args)

    return limited_forward


# The fault that is planted, and the message that then must come.
FAULTS = {
    "targets": (replace_function(step, "to_device", keep_targets_on_host), "devices"),
    "checkpoint": (replace_function(checkpoint, "copy_to_host", keep_checkpoint_on_card), "is still on cuda:0"),
    "moments": (replace_function(optim, "load_state", keep_moments_on_host), "_fused_adamw_"),
    "memory": (replace_function(step.Forward, "forward", run_out_of_memory), "(NVIDIA H200) with a micro-batch of 4"),
    "loss": (mock.patch.dict(ITEM_VALUES, {torch.float32: math.nan}), "the update was refused"),
}


# ---- the command line

CASES: dict[str, Callable[[], None]] = {
    **{f"{preset}:{name}": partial(train_and_use, preset, *flags)
       for preset in PRESETS for name, flags in PRECISIONS.items()},
    **{f"{preset}:plan": partial(plan, preset) for preset in PRESETS},
    **{f"fault:{name}": partial(expect_failure, message, fault) for name, (fault, message) in FAULTS.items()},
}  # fmt: skip


def main(words: list[str]) -> int:
    """Run the cases whose name has one of these words, or all. Returns the exit code: 0 if all are as they must be."""
    chosen = [name for name in CASES if not words or any(word in name for word in words)]
    failed = []
    for name in chosen:
        print(f"\n==== {name}", flush=True)
        try:
            CASES[name]()
        except Exception:
            failed.append(name)
            traceback.print_exc(file=sys.stdout)
    print(f"\ntorch {torch.__version__}: {len(chosen)} cases, {len(failed)} failed {' '.join(failed)}", flush=True)
    return 0 if chosen and not failed else 1


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    TEMPORARY_FOLDER.cleanup()
    os._exit(exit_code)  # autograd's thread of the card does not end by itself
