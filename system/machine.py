"""The machine: its device, the precision it multiplies fast, its compiler, its peak, the versions it runs.

It imports torch: script.thread_waits must come before.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from contextlib import suppress
from glob import glob
from typing import NamedTuple

import torch

from system.script import UserError, env_rank, require


def unusable_gpu(devices: str = "/dev/nvidia[0-9]*") -> str:
    """Why a torch built for CUDA cannot use this machine's GPU; an empty string if nothing is wrong."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if torch.version.cuda is None or hidden or not glob(devices) or torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except Exception as e:
        return str(e).strip().split("\n")[0]
    return "it finds none"


def pick_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """`auto` tries cuda, then mps, then cpu; a name is checked against what is available. Raises UserError,
    also if a GPU is present but unusable. mps counts from torch 2.14 on: before, M1 and M2 get a gradient wrong that
    sums over more than 32,768 tokens or vocabulary entries, such as that of GPT-2's head (pytorch#177116)."""
    usable = ["cpu"]
    if torch.backends.mps.is_available() and torch.__version__ >= (2, 14):
        usable.insert(0, "mps")
    if torch.cuda.is_available():
        usable.insert(0, "cuda")
    if name in ("auto", "cuda") and (why := unusable_gpu()):
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's NVIDIA GPU ({why}); `nvidia-smi` shows the newest "
            "CUDA that the driver supports: with .venv/bin/pip install a torch built for that or older or, if the "
            "machine's own Python has one, run make clean install SYSTEM_TORCH=1; or use a machine with a newer "
            "driver. To use the CPU: export CUDA_VISIBLE_DEVICES="
        )
    kind, _, number = (usable[0] if name == "auto" else name).partition(":")
    require(
        kind in usable, f"device {name!r} is not available here (available: {', '.join(usable)}); use --device auto"
    )
    if kind == "cuda":
        return pick_gpu(int(number or local_rank))
    return torch.device(kind)


def pick_gpu(index: int) -> torch.device:
    """The GPU of that number, made current. Raises UserError if there is none."""
    count = torch.cuda.device_count()
    why = f"rank {env_rank()} needs cuda:{index} but this machine has {count} GPUs"
    require(index < count, f"{why}; use --nproc_per_node={count}")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16); emulated is slower than float32."""
    try:
        with open("/proc/cpuinfo") as f:
            flags = f.read()
    except OSError:
        return False
    return any(re.search(rf"\b{flag}\b", flags) for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def precisions(device: torch.device) -> list[torch.dtype]:
    """What the device multiplies in hardware, the preferred first: bfloat16 (sm80+, CPUs as above), float16 (CUDA, with
    a loss scale), float32."""
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return [torch.bfloat16, torch.float16, torch.float32]
        return [torch.float16, torch.float32]
    if device.type == "cpu" and cpu_has_bfloat16():
        return [torch.bfloat16, torch.float32]
    return [torch.float32]


CLEAR_GAIN = 1.25  # below this, casting to bfloat16 and back costs a CPU as much as its products save


def plain(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """What multiplies rows by a weight matrix, as training does."""
    return functools.partial(torch.nn.functional.linear, weight=weight)


@functools.cache
def bfloat16_gain(rows: int, width: int, columns: int, product: Callable = plain) -> float:
    """How many times as fast this CPU multiplies (rows, width) by (width, columns) in bfloat16 as in float32, measured
    in some tens of milliseconds: its flags do not tell, a Xeon with AVX512-BF16 and no AMX is slower in it."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x, w = torch.ones(rows, width, dtype=dtype), torch.ones(columns, width, dtype=dtype)
        multiply, times = product(w), []
        while len(times) < 4 and sum(times) < 0.1:  # the first warms up
            began = time.perf_counter()
            multiply(x)
            times.append(time.perf_counter() - began)
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: the fastest for products of many rows: on a GPU what it has, on a CPU by measurement."""
    if name != "auto":
        return getattr(torch, name)
    best = precisions(device)[0]
    if device.type == "cpu" and best == torch.bfloat16 and bfloat16_gain(512, 768, 3072) < CLEAR_GAIN:
        return torch.float32
    return best


def keep_memory() -> None:
    """Let glibc's malloc keep large blocks between steps instead of mapping fresh pages: a quickstart step is
    about a fifth shorter, for a sixth to a half more memory."""
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def peak_memory(device: torch.device) -> int:
    """Peak bytes on the device (CUDA), or the peak resident bytes of this process elsewhere."""
    import resource

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def git(*words: str) -> str:
    """What git says of the project's folder; an empty string if it is no clone."""
    command = ["git", "-C", os.path.dirname(os.path.dirname(os.path.abspath(__file__))), *words]
    with suppress(OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    return ""


@functools.cache
def versions() -> dict[str, str]:
    """The versions behind a run: torch, Python and, in a clone, the commit, with "-dirty" if files differ from it."""
    known = {"torch": str(torch.__version__), "python": platform.python_version()}
    commit = git("describe", "--always", "--dirty", "--abbrev=40").strip()
    return {**known, "commit": commit} if commit else known


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks to build its code, or an empty string. On the CPU it writes C++, for a GPU Triton's
    launchers are C; both include Python's headers."""
    names, compiler = ("CXX", "g++", "clang++"), "C++ compiler (g++)"
    if device.type != "cpu":
        names, compiler = ("CC", "gcc", "clang"), "C compiler (gcc)"
    if not any(shutil.which(os.environ.get(n, n)) for n in names):
        return compiler
    there = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
    return "" if there else "Python.h (python3-dev)"


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device type and CPU thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


class Card(NamedTuple):
    """A card's data sheet. Real programs reach a part of each figure: training/predict.py."""

    tflops: float  # dense bfloat16 (float16 before Ampere), no sparsity
    gb: int = 0  # memory
    tb_s: float = 0.0  # bandwidth of the memory
    link_gb_s: int = 0  # to the other cards, per direction: NVLink, or PCIe where the card has or needs no NVLink


# Vendor data sheets. Names as the driver spells them: the longest match wins (peak_flops). Cards sold with two sizes of
# memory have a name for each, which --card takes.
CARDS = {
    "B300": Card(2250, 288, 8.0, 900), "GB300": Card(2500, 288, 8.0, 900), "B200": Card(2250, 180, 8.0, 900),
    "GB200": Card(2500, 186, 8.0, 900), "H200": Card(989, 141, 4.8, 450), "GH200": Card(989, 96, 4.0, 450),
    "H200 NVL": Card(835, 141, 4.8, 450), "H100": Card(989, 80, 3.35, 450), "H100 PCIe": Card(756, 80, 2.0, 64),
    "H100 NVL": Card(835, 94, 3.9, 300), "H800": Card(989, 80, 3.35, 200), "H800 PCIe": Card(756, 80, 2.0, 64),
    "A100": Card(312), "A100-40GB": Card(312, 40, 1.555, 300), "A100-80GB": Card(312, 80, 2.039, 300),
    "A800": Card(312, 80, 2.039, 200), "A40": Card(149.7, 48, 0.696, 32), "A30": Card(165, 24, 0.933, 32),
    "A10G": Card(70, 24, 0.6, 32), "A10": Card(125, 24, 0.6, 32), "L40S": Card(362, 48, 0.864, 32),
    "L40": Card(181, 48, 0.864, 32), "L4": Card(121, 24, 0.3, 32), "T4": Card(65, 16, 0.32, 16),
    "V100": Card(125, 16, 0.9, 150), "V100-PCIE": Card(112, 16, 0.9, 16), "A6000": Card(154.8, 48, 0.768, 32),
    "RTX 6000 Ada": Card(364, 48, 0.96, 32), "RTX 3090": Card(71, 24, 0.936, 32),
    "RTX 4090": Card(165.2, 24, 1.008, 32), "RTX 5090": Card(209.5, 32, 1.792, 64),
    "RTX 2080 Ti": Card(56.9, 11, 0.616, 16),
}  # fmt: skip
BEFORE_AMPERE = ("T4", "V100", "V100-PCIE", "RTX 2080 Ti")  # no bfloat16
PEAK_FLOPS = {name: card.tflops * 1e12 for name, card in CARDS.items()}


def peak_flops(device: torch.device) -> float | None:
    """Peak dense FLOP/s of the card at training precision (see PEAK_FLOPS), or None if not known: MFU is then
    "unknown". A 3090 Ti, a laptop 4090 and a MIG slice of an A100 do not match the cards in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    other = r"(?! (Ti|D|SUPER|Laptop|Max-Q)\b)(?!.*\bMIG\b)"
    hits = [k for k in PEAK_FLOPS if re.search(rf"\b{re.escape(k)}\b{other}", name)]
    return PEAK_FLOPS[max(hits, key=len)] if hits else None
