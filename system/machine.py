"""The machine a script runs on: its device, its precision, its memory, its compiler, the versions of its software.

    device = choose_device("auto", local_rank=0)      # cuda:0, mps or cpu
    print(device_name(device))                        # "NVIDIA H100 80GB HBM3" or "cpu (2 threads)"
    missing = missing_compiler(device)                # "", or what torch.compile needs: "C++ compiler (g++)"

Called by system/distributed.py at the start of every process, by training for its plan and its memory, and by scripts.
Importing this imports torch, so cli.set_omp_wait_policy must have run before.
"""

import ctypes
import functools
import logging
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils._pytree import tree_map_only

from system.cli import UserError, env_rank, require

ROOT = Path(__file__).parent.parent

# Replaces a torch built for CUDA 13 by one that runs with the driver of any CUDA 12 (see install.sh).
OLDER_DRIVER_COMMAND = "make clean install TORCH_BUILD=cu126"

# Replaces a torch built without CUDA, on any machine.
CUDA_TORCH_COMMAND = "make clean install TORCH_BUILD="

# ------------------------------------------------------------------------- device

# Files that this machine has if it has an NVIDIA GPU. The second is the driver's under the Windows Subsystem for Linux.
# install.sh looks for the same files to choose between torch with CUDA and torch for CPUs.
NVIDIA_FILES = ("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/nvidia-smi")

# The driver of AMD's GPUs, and for each of them a file with the bytes of its memory.
AMD_DRIVER = "/dev/kfd"
AMD_MEMORY_FILES = "/sys/class/drm/card*/device/mem_info_vram_total"
MIN_AMD_MEMORY = 7e9  # the GPU inside a laptop's processor has less


def has_amd_gpu() -> bool:
    """Whether this machine has an AMD GPU of its own, with its driver."""
    memory = [int(Path(path).read_text()) for path in glob(AMD_MEMORY_FILES)]
    return os.path.exists(AMD_DRIVER) and max(memory, default=0) >= MIN_AMD_MEMORY


def refuse_unusable_gpu(kind: str) -> None:
    """Raise UserError if torch cannot use this machine's GPU, unless the device `kind` is another one, such as cpu.
    Without this error, the run would take days on the CPU while the GPU is billed."""
    # Nothing is wrong if another device is asked for, if the GPUs are hidden on purpose, or if they work.
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if kind not in ("auto", "cuda") or is_hidden or torch.cuda.is_available():
        return
    use_the_cpu = "To use the CPU: --device cpu, or export CUDA_VISIBLE_DEVICES="
    if has_amd_gpu():
        problem = f"this machine has an AMD GPU, which torch {torch.__version__} cannot use"
        fix = "install a torch built for ROCm (pytorch.org/get-started), with which this project has not been tried"
        raise UserError(f"{problem}; {fix}. {use_the_cpu}")
    if not any(glob(pattern) for pattern in NVIDIA_FILES):
        return

    # torch was built for CPUs. `make install` chooses this build on a machine without a GPU, such as one on which a
    # network volume is prepared. Only a new .venv replaces it, because its version satisfies the pinned one.
    if torch.version.cuda is None:
        raise UserError(
            f"this machine has an NVIDIA GPU, but torch {torch.__version__} is built without CUDA; to install torch "
            f"with CUDA: {CUDA_TORCH_COMMAND}. {use_the_cpu}"
        )

    # torch was built with CUDA and cannot start it: its error has the reason, such as a driver that is too old ("found
    # version 12040" is CUDA 12.4).
    try:
        torch.cuda.init()
        reason = "it finds none"
    except Exception as e:
        reason = str(e).strip().split("\n")[0]
    raise UserError(
        f"torch {torch.__version__} cannot use this machine's NVIDIA GPU ({reason}); `nvidia-smi` shows the newest "
        f"CUDA that the driver supports. If that is CUDA 12: {OLDER_DRIVER_COMMAND}; if the machine's own Python "
        f"has a torch for it: make clean install SYSTEM_TORCH=1; or use a machine with a newer driver. {use_the_cpu}"
    )


def choose_device(name: str = "auto", local_rank: int = 0, local_world_size: int = 1) -> torch.device:
    """The device of that name: auto, cpu, mps, cuda or, for one process a machine, cuda:N. `auto` tries cuda, then mps,
    then cpu. A rank gets the GPU of its `local_rank`. Raises UserError if the device is not available, or if a GPU is
    present but unusable.

    mps is used from torch 2.14 on. Before that, M1 and M2 compute wrong gradients where these sum over more than 32,768
    tokens or vocabulary entries, as that of GPT-2's head does (pytorch#177116).
    """
    is_device = re.fullmatch("auto|cpu|mps|cuda(:[0-9]{1,3})?", name)
    require(is_device, f"--device {name} must be auto, cpu, mps, cuda or, as in cuda:1, one GPU; use --device auto")
    kind, _, number = name.partition(":")
    problem = f"--device {name} would put all {local_world_size} ranks of this machine on one GPU"
    require(not number or local_world_size == 1, f"{problem}; use --device cuda")

    # The usable kinds, the fastest first.
    usable = ["cpu"]
    if torch.backends.mps.is_available() and torch.__version__ >= "2.14":
        usable.insert(0, "mps")
    if torch.cuda.is_available():
        usable.insert(0, "cuda")
    refuse_unusable_gpu(kind)
    if kind == "auto":
        kind = usable[0]
    available = ", ".join(usable)
    require(kind in usable, f"device {kind!r} is not available here (available: {available}); use --device auto")

    if kind != "cuda":
        # A torch built for CUDA would warn "No CUDA runtime is found" when the first step compiles on the CPU.
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
        return torch.device(kind)
    index = int(number) if number else local_rank
    count = torch.cuda.device_count()
    problem = f"rank {env_rank()} needs cuda:{index} but this machine has {count} GPUs"
    require(index < count, f"{problem}; use --nproc_per_node={count}")
    torch.cuda.set_device(index)
    device = torch.device("cuda", index)
    try:
        torch.zeros(1, device=device)
    except RuntimeError as e:
        if "no kernel image" not in str(e):  # such as a card that another program has filled: a restart may succeed
            raise
        fix = f"for a card older than Turing: {OLDER_DRIVER_COMMAND}"
        raise UserError(f"torch {torch.__version__} cannot use the {device_name(device)} ({e!s:.99}); {fix}") from None
    return device


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device type and CPU thread count."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


# ------------------------------------------------------------------------- precision


MIN_BFLOAT16_SPEEDUP = 1.25  # on a CPU: below this, casting to bfloat16 and back costs as much as it saves


def dtype_name(dtype: object) -> str:
    """bfloat16 for torch.bfloat16, as flags and checkpoints spell it."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; emulated, it is slower than float32."""
    # The flags avx512_bf16, amx_bf16 and, of Arm, bf16. Only Linux lists them in a file; elsewhere float32 is used.
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "bf16" in cpuinfo.read_text()


def supported_dtypes(device: torch.device) -> list[torch.dtype]:
    """What the device multiplies in hardware, the preferred first. float16 needs a loss scale in training, so it is
    preferred only on GPUs that lack bfloat16, those before Ampere (sm_80)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return [torch.bfloat16, torch.float16, torch.float32]
    if device.type == "cuda":
        return [torch.float16, torch.float32]
    if device.type == "cpu" and cpu_has_bfloat16():
        return [torch.bfloat16, torch.float32]
    return [torch.float32]  # Apple's GPUs, too


def bfloat16_speedup() -> float:
    """How many times as fast this CPU multiplies large matrices in bfloat16 as in float32. A CPU's flags do not tell: a
    Xeon with AVX512-BF16 but without AMX is slower in bfloat16, a Zen 5 four times as fast."""
    multiply = {}
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(512, 768, dtype=dtype)
        weight = torch.ones(3072, 768, dtype=dtype)
        multiply[dtype] = partial(linear, x, weight)
        multiply[dtype]()  # warms up

    # Both in turn, because the machine may be busy for a while; the fastest of each, because a busy machine only slows.
    fastest = {torch.float32: math.inf, torch.bfloat16: math.inf}  # seconds
    for _ in range(5):
        for dtype in fastest:
            start = time.perf_counter()
            multiply[dtype]()
            fastest[dtype] = min(fastest[dtype], time.perf_counter() - start)
    return fastest[torch.float32] / fastest[torch.bfloat16]


# ------------------------------------------------------------------------- memory


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that memory ran out: the compiler, cuBLAS and a CPU do not raise OutOfMemoryError."""
    words = ("out of memory", "OutOfMemory", "ALLOC_FAILED", "can't allocate memory")
    return any(word in f"{type(error).__name__} {error}" for word in words)


def keep_freed_memory() -> None:
    """Let glibc's malloc keep large blocks between steps instead of mapping fresh pages: a quickstart step on a CPU is
    about a fifth shorter, for a sixth to a half more memory. See mallopt(3)."""
    # By default, malloc maps a large block on its own and returns it to the system when it is freed; each fresh page
    # then costs a page fault and is filled with zeros. Map no block on its own, and return no freed memory.
    with suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def use_expandable_segments() -> None:
    """Let torch's CUDA allocator grow its segments instead of adding new ones, unless the user has configured it: the
    sizes of evaluations differ from those of training, and freed segments that fit nothing would pile up. The
    allocator reads its environment when CUDA starts, so this must run before."""
    # Under the Windows Subsystem for Linux CUDA fails with them (pytorch#192330).
    is_configured = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys()
    if torch.version.cuda and not is_wsl() and not is_configured:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def is_wsl() -> bool:
    """Whether this is the Windows Subsystem for Linux."""
    return "microsoft" in platform.release().lower()


def peak_memory(device: torch.device) -> int:
    """Peak bytes on the device (CUDA), or the peak resident bytes of this process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def copy_to_host(tree: Any) -> Any:
    """Copy nested containers, with every tensor in host memory. Entries that share storage, such as a tied head and its
    embedding, also share it in the copy and in the file."""
    copies = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tensor.shape, tensor.device)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)  # detached: it must not keep a graph alive
        return copies[key]

    return tree_map_only(torch.Tensor, copy, tree)


# ------------------------------------------------------------------------- compiler and versions


def missing_compiler(device: torch.device) -> str:
    """What torch.compile lacks to build its code, or an empty string. On the CPU it writes C++, for a GPU Triton's
    launchers are C; both include Python's headers, and load what they have built from a folder of temporary files."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (7, 0):
        return "support for GPUs before Volta in Triton"

    # Which compiler is needed, and whether one is on PATH. An environment variable may name it, as in CXX=clang++.
    if device.type == "cpu":
        names, compiler = ("CXX", "g++", "clang++"), "C++ compiler (g++)"
    else:
        names, compiler = ("CC", "gcc", "clang"), "C compiler (gcc)"
    if not any(shutil.which(os.environ.get(name, name)) for name in names):
        return compiler

    # The headers come with the interpreter or, on Debian, in a package of their own.
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "Python.h (python3-dev)"

    # A folder that is mounted noexec.
    build_dir = os.path.abspath(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir())
    existing = build_dir
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    if os.statvfs(existing).f_flag & getattr(os, "ST_NOEXEC", 0):  # not on macOS
        return f"folder for compiled code that is not mounted noexec, as {build_dir} is (TORCHINDUCTOR_CACHE_DIR)"

    # torch 2.13 gives the linker paths without quotes (_inductor/cpp_builder.py).
    for path in (torch.__path__[0], str(sysconfig.get_config_var("LIBDIR")), build_dir):
        if device.type == "cpu" and " " in path:
            return f"path without spaces for the compiler, unlike {path}"
    return ""


@functools.cache
def versions() -> dict[str, str]:
    """The versions behind a run: torch, Python and, in a clone, the commit, with "-dirty" if files differ from it."""
    numbers = {"torch": str(torch.__version__), "python": platform.python_version()}
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    with suppress(OSError, subprocess.SubprocessError):  # no git, or no clone
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        numbers["commit"] = done.stdout.strip()
    return numbers
