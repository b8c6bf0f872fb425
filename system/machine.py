"""The machine a script runs on: its device, its precision, its memory, the versions of its software.

device = choose_device("auto")      # cuda:0, mps or cpu
print(device_name(device))                        # "NVIDIA H100 80GB HBM3" or "cpu (2 threads)"
"""

import ctypes
import functools
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import glob
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.nn.functional import linear
from torch.utils._pytree import tree_flatten, tree_map_only

from system.errors import UserError, require
from system.facts import NOTED, Fact, Facts
from system.printing import env_number

ROOT = Path(__file__).parent.parent

# ------------------------------------------------------------------------- device

# Files that this machine has if it has an NVIDIA GPU. The second is the driver's under the Windows Subsystem for Linux.
NVIDIA_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/nvidia-smi")

# For a torch that was built for CPUs, for a newer driver or for newer cards.
CUDA_FIX = (
    "start no more ranks than there are GPUs; or install a torch for the CUDA that `nvidia-smi` names: make clean "
    "install TORCH_BUILD=cu126 (CUDA 12, older cards) or TORCH_BUILD= (CUDA 13); to use the CPU: --device cpu"
)


def choose_device(name: str = "auto") -> torch.device:
    """The device of that name: cpu, mps, cuda, cuda:N, or auto, which is cuda where there is an NVIDIA GPU, else mps on
    a Mac that has it. A rank gets the GPU of its LOCAL_RANK. Raises UserError if there is no such device, or if torch
    cannot use a GPU that is there: the run would take days on the CPU while the GPU is billed."""
    match = re.fullmatch("auto|cpu|mps|cuda(?::([0-9]+))?", name)
    if match is None:
        raise UserError(f"--device {name} must be auto, cpu, mps, cuda or, as in cuda:1, one GPU")

    # No process group sends tensors of mps. Before torch 2.14, M1 and M2 get products wrong that sum over more than
    # 32,768 numbers, as the gradient of GPT-2's head does, without a word (pytorch#177116, #183535).
    has_mps = torch.backends.mps.is_available() and torch.__version__ >= "2.14" and env_number("WORLD_SIZE", 1) == 1
    require(name != "mps" or has_mps, "--device mps is for one process, on a Mac, with torch 2.14; use --device cpu")

    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    has_gpu = torch.cuda.is_available() or (not is_hidden and any(glob(pattern) for pattern in NVIDIA_FILES))
    if name == "auto" and not has_gpu:
        name = "mps" if has_mps else "cpu"
    if name in ("cpu", "mps"):
        return torch.device(name)

    device = torch.device("cuda", int(match[1] or env_number("LOCAL_RANK", 0)))
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e:  # the latter if torch was built for CPUs
        if is_out_of_memory(e):  # a card that another program has filled: a restart may succeed
            raise
        reason = str(e).split("\n")[0]
        problem = f"--device {name}: torch {torch.__version__} cannot use {device} ({reason})"
        raise UserError(f"{problem}; {CUDA_FIX}") from None
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device type and CPU thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def can_compile(device: torch.device) -> bool:
    """Whether torch.compile is for this device. Its kernels for mps have been wrong without a word (pytorch#170360)."""
    return device.type != "mps"


# ------------------------------------------------------------------------- precision

MIN_BFLOAT16_SPEEDUP = 1.25  # on a CPU: below this, casting to bfloat16 and back costs as much as it saves


def dtype_name(dtype: object) -> str:
    """bfloat16 for torch.bfloat16, as flags and checkpoints spell it."""
    return str(dtype).removeprefix("torch.")


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """What the device multiplies in hardware, the preferred first. float16 needs a loss scale in training, so it is
    preferred only on GPUs that lack bfloat16, those before Ampere (sm_80)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return [torch.bfloat16, torch.float16, torch.float32]
    if device.type == "cuda":
        return [torch.float16, torch.float32]
    # A CPU's flags avx512_bf16, amx_bf16 and, of Arm, bf16: emulated, bfloat16 is slower than float32. Only Linux lists
    # them in a file.
    cpuinfo = Path("/proc/cpuinfo")
    if device.type == "cpu" and cpuinfo.exists() and "bf16" in cpuinfo.read_text():
        return [torch.bfloat16, torch.float32]
    return [torch.float32]


def bfloat16_speedup() -> float:
    """How many times as fast this CPU multiplies large matrices in bfloat16 as in float32. A CPU's flags do not tell: a
    Xeon with AVX512-BF16 but without AMX is slower in bfloat16, a Zen 5 four times as fast."""
    # Both in turn, because the machine may be busy for a while; the fastest of each, because a busy machine only slows,
    # as does the first call.
    fastest = {torch.float32: math.inf, torch.bfloat16: math.inf}  # seconds
    for _ in range(6):
        for dtype in fastest:
            x, weight = torch.ones(512, 768, dtype=dtype), torch.ones(3072, 768, dtype=dtype)
            start = time.perf_counter()
            linear(x, weight)
            fastest[dtype] = min(fastest[dtype], time.perf_counter() - start)
    return fastest[torch.float32] / fastest[torch.bfloat16]


# ------------------------------------------------------------------------- memory


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory ran out: the compiler, cuBLAS and a CPU do not raise OutOfMemoryError."""
    words = ("out of memory", "OutOfMemory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in f"{type(error).__name__} {error}" for word in words)


@contextmanager
def explain_out_of_memory(fix: str) -> Iterator[None]:
    """Turn an out-of-memory error, which the same command would meet again, into one line that says what to do."""
    try:
        yield
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(f"out of memory: {e!s:.200}; {fix}") from None


def keep_freed_memory() -> None:
    """Let glibc's malloc keep large blocks between steps instead of mapping fresh pages: a quickstart step on a CPU is
    about a fifth shorter, for a sixth to a half more memory. See mallopt(3)."""
    # By default, malloc maps a large block on its own and returns it to the system when it is freed; each fresh page
    # then costs a page fault and is filled with zeros. Map no block on its own, and return no freed memory.
    with suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments instead of adding new ones, unless the user has configured it: the
    sizes of evaluations differ from those of training, and freed segments that fit nothing would pile up. The
    allocator reads its environment when CUDA starts, so this must run before."""
    # Under the Windows Subsystem for Linux CUDA fails with them (pytorch#192330).
    is_wsl = "microsoft" in platform.release().lower()
    is_configured = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if not is_wsl and not is_configured:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def peak_memory(device: torch.device) -> int:
    """Peak bytes on the device or, on a CPU, the peak resident bytes of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()  # of now, which is nearly the peak: what is freed is kept
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_to_host(tree: Any) -> Any:
    """Copy nested containers, with every tensor in host memory. Entries that share storage, such as a tied head and its
    embedding, also share it in the copy and in the file."""
    tensors = [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor)]
    # Pinned memory takes the full speed of the bus. torch rounds each tensor in it up to a power of two, and keeps the
    # memory for the next save, so it is for what fits into an eighth of the host.
    is_on_gpu = any(t.is_cuda for t in tensors)
    pin = is_on_gpu and sum(2 ** (t.nbytes - 1).bit_length() for t in tensors) < host_memory() / 8
    copies = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            host = torch.empty_like(tensor, device="cpu", pin_memory=pin and tensor.is_cuda, requires_grad=False)
            copies[key] = host.copy_(tensor.detach(), non_blocking=True)  # detached: it must not keep a graph alive
        return copies[key]

    copied = tree_map_only(torch.Tensor, copy, tree)
    if is_on_gpu:
        torch.cuda.synchronize()
    return copied


def host_memory() -> int:
    """Bytes of this machine's memory or, in a container, of its limit."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or "max"
            sizes.append(int(Path(path).read_text()))
    return min(sizes)


# ------------------------------------------------------------------------- versions


@functools.cache
def versions() -> dict[str, str]:
    """The versions behind a run: torch, Python and, in a clone, the commit, with "-dirty" and a checksum of the changes
    if files differ from it."""
    numbers = {"torch": str(torch.__version__), "python": platform.python_version()}

    def ask_git(*words: str) -> bytes:
        return subprocess.check_output(["git", *words], cwd=ROOT, stderr=subprocess.DEVNULL, timeout=60).strip()

    with suppress(OSError, subprocess.SubprocessError):  # no git, or no clone
        numbers["commit"] = ask_git("describe", "--always", "--dirty", "--abbrev=40").decode()
        changes = ask_git("diff", "HEAD")
        if changes:
            numbers["commit"] += f"-{crc32(changes):08x}"
    return numbers


def version_facts() -> Facts:
    """The versions as facts: other software rounds otherwise, so a resumed run prints what has changed."""
    return {name: Fact(version, NOTED) for name, version in versions().items()}
