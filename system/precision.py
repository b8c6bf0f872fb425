"""The one place that chooses a precision: bfloat16, float16 or float32, for a device and a kind of work.

    dtype, reason = choose_dtype(device, Workload(rows=512, width=768, columns=3072))

Training asks with its own shapes and lets the ranks agree (training/precision.py); scoring and generation ask for one
device. On a GPU the answer follows from the hardware. A CPU is measured, because its flags do not tell: a Xeon with
AVX512-BF16 but without AMX multiplies bfloat16 more slowly than float32, a Zen 5 four times as fast.

    GPU, Ampere and later           bfloat16
    GPU before Ampere               float16
    CPU with bfloat16 in hardware   bfloat16 if it multiplies enough faster than float32, which is measured
    any other CPU, Apple's GPUs     float32
"""

import functools
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

PREFERRED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear_with(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """The function that multiplies rows by a weight matrix (columns, width), as training does."""
    return functools.partial(torch.nn.functional.linear, weight=weight)


class Workload(NamedTuple):
    """The matrix product that takes most of the time, (rows, width) @ (width, columns), and how many times as fast as
    float32 bfloat16 must be on a CPU to be worth taking."""

    rows: int
    width: int
    columns: int
    min_speedup: float = 1.25  # below this, casting to bfloat16 and back costs as much as the products save
    make_multiply: Callable[[Tensor], Callable[[Tensor], Tensor]] = linear_with


SCORING = Workload(rows=512, width=768, columns=3072)  # HellaSwag: many rows at once, as in training


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16); emulated is slower than float32."""
    # Only Linux lists the CPU's features in a file; elsewhere float32 is used.
    try:
        with open("/proc/cpuinfo") as f:
            flags = f.read()
    except OSError:
        return False
    return any(re.search(rf"\b{flag}\b", flags) for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """What the device multiplies in hardware, the preferred first. float16 needs a loss scale in training, so it is
    preferred only on GPUs that lack bfloat16."""
    # Ampere (sm_80) brought bfloat16.
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return [torch.bfloat16, torch.float16, torch.float32]
        return [torch.float16, torch.float32]

    # A CPU may have it. Apple's GPUs are used in float32.
    if device.type == "cpu" and cpu_has_bfloat16():
        return [torch.bfloat16, torch.float32]
    return [torch.float32]


@functools.cache
def bfloat16_speedup(rows: int, width: int, columns: int, make_multiply: Callable = linear_with) -> float:
    """How many times as fast this CPU multiplies (rows, width) by (width, columns) in bfloat16 as in float32. Measured
    in some tens of milliseconds."""
    # The same product in both precisions: (rows, width) @ (width, columns).
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(rows, width, dtype=dtype)
        multiply = make_multiply(torch.ones(columns, width, dtype=dtype))

        # Up to four tries, the first of which warms up; a slow CPU gets fewer.
        times = []
        while len(times) < 4 and sum(times) < 0.1:
            start = time.perf_counter()
            multiply(x)
            times.append(time.perf_counter() - start)

        # The fastest try: whatever else the machine does can only make a try slower.
        seconds[dtype] = min(times)
    return seconds[torch.float32] / seconds[torch.bfloat16]


def choose_dtype(
    device: torch.device,
    workload: Workload,
    available: Sequence[torch.dtype] | None = None,
    agree: Callable[[float], float] = lambda speedup: speedup,
) -> tuple[torch.dtype, str]:
    """The fastest precision for `workload` on `device`, and the reason.

    available: what may be chosen, the preferred first; default: what the device supports. A run on unlike GPUs gives
    what all of them support.
    agree: turns the speedup that was measured here into the one that decides, such as the smallest of all ranks.
    """
    # A GPU multiplies fastest in the first precision that it supports.
    own = supported_dtypes(device)
    available = own if available is None else available
    if device.type == "cuda":
        if list(available) == own:
            return available[0], "which this GPU multiplies fastest"
        return available[0], "which every GPU of this run has"

    # A CPU has a choice only if it has bfloat16 in hardware.
    if torch.bfloat16 not in available:
        return torch.float32, "as this hardware has no faster precision"

    # Measure whether bfloat16 is enough faster.
    rows, width, columns, min_speedup, make_multiply = workload
    speedup = agree(bfloat16_speedup(rows, width, columns, make_multiply))
    dtype = torch.bfloat16 if speedup >= min_speedup else torch.float32
    return dtype, f"as bfloat16 multiplies {speedup:.1f} times as fast as float32 here"
