"""The environment, read once: device, dtype, ranks, clocks, peak FLOP/s.

Every other file asks this one instead of the machine. It imports torch: cli.thread_waits must come before.
"""

import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from glob import glob

import torch
import torch.distributed as dist

from cli import UserError, env_rank, fail
from cli import print0 as print0  # re-exported: readers look for it here, too


@dataclass(frozen=True)
class Runtime:
    """Where this process runs. World size 1 takes the same path as 8: the collectives below are no-ops there."""

    device: torch.device
    dtype: torch.dtype  # of autocast; float32 means autocast is off
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self):
        """Context in which the model's forward runs."""
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so a clock read afterwards is accurate."""
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).synchronize()

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce `tensor` in place over all ranks (op: sum, max or min) and return it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `tensor` (same shape on all), in rank order. Every rank must call it."""
        if self.world_size == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor)
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` (same shape on all ranks) with rank `source`'s. Every rank must call it."""
        if self.world_size > 1:
            dist.broadcast(tensor, source)

    def any(self, flag: object) -> bool:
        """Whether `flag` is set on any rank; all ranks get the same answer. Every rank must call it."""
        if self.world_size == 1:
            return bool(flag)
        return bool(self.all_reduce(torch.tensor(float(bool(flag)), device=self.device), "max").item())

    def barrier(self, hours: float) -> None:
        """Wait until every rank is here, for up to `hours`. Every rank must call it."""
        if self.world_size > 1:
            # by gloo: NCCL would end the run after its own timeout, whatever the ranks are waiting for
            dist.barrier(dist.new_group(timeout=timedelta(hours=hours), backend="gloo"))

    def peak_memory(self) -> int:
        """Peak bytes on the device (CUDA), or the peak resident bytes of this process elsewhere."""
        import resource

        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


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
    mps = torch.backends.mps.is_available() and torch.__version__ >= (2, 14)
    usable = ["cuda"] * torch.cuda.is_available() + ["mps"] * mps + ["cpu"]
    if name in ("auto", "cuda") and (why := unusable_gpu()):
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's NVIDIA GPU ({why}); `nvidia-smi` shows the newest "
            "CUDA that the driver supports: with .venv/bin/pip install a torch built for that or older or, if the "
            "machine's own Python has one, run make clean install SYSTEM_TORCH=1; or use a machine with a newer "
            "driver. To use the CPU: export CUDA_VISIBLE_DEVICES="
        )
    kind, _, number = (usable[0] if name == "auto" else name).partition(":")
    if kind not in usable:
        raise UserError(f"device {name!r} is not available here (available: {', '.join(usable)}); use --device auto")
    if kind == "cuda":
        index = int(number or local_rank)
        if index >= (count := torch.cuda.device_count()):
            why = f"rank {env_rank()} needs cuda:{index} but this machine has {count} GPUs"
            raise UserError(f"{why}; use --nproc_per_node={count}")
        built = [int(a[3:]) for a in torch.cuda.get_arch_list() if a[:3] == "sm_" and a[3:].isdigit()]
        major, minor = torch.cuda.get_device_capability(index)
        if built and 10 * major + minor < min(built):
            why = f"torch {torch.__version__} has no code for a {torch.cuda.get_device_name(index)}, sm_{major}{minor}"
            mend = "with .venv/bin/pip install one that has (for a V100, torch 2.11 to 2.14 for CUDA 12.6)"
            raise UserError(f"{why}; {mend} or, if the machine's Python has one: make clean install SYSTEM_TORCH=1")
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device(kind)


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware (AVX512-BF16, AMX, Arm BF16); emulated is slower than float32."""
    try:
        with open("/proc/cpuinfo") as f:
            flags = f.read()
    except OSError:
        return False
    return any(re.search(rf"\b{flag}\b", flags) for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware has it (sm80+, CPUs as above), float16 on older CUDA, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return torch.bfloat16 if device.type == "cpu" and cpu_has_bfloat16() else torch.float32


def keep_memory() -> None:
    """Let glibc's malloc keep large blocks between steps instead of mapping fresh pages: a quickstart step is
    about a fifth shorter, for a sixth to a half more memory."""
    import ctypes

    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-4, 0)  # M_MMAP_MAX
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def git(*words: str) -> str:
    """What git says of this folder; an empty string if it is no clone."""
    command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *words]
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


@contextmanager
def session(device: str = "auto", dtype: str = "auto", deterministic: bool = False, timeout_minutes: float = 10):
    """Yield this process's Runtime; under torchrun join the process group (nccl on CUDA, gloo elsewhere) and
    leave it on every exit. A roll call names missing ranks, and a preflight all-reduce tries the network, before any
    work is done.

    deterministic: bit-identical results on a GPU, too. On a CPU this costs nothing measurable and is always on.
    timeout_minutes: how long a collective waits for a missing rank before the run stops instead of hanging.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this, before CUDA starts
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # do not choose kernels by timing
    local_rank, world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dev = pick_device(device, local_rank)
    rt = Runtime(dev, pick_dtype(dtype, dev), env_rank(), local_rank, world_size)
    if deterministic or dev.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes new tensors twice
    if dev.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if world_size == 1:
        yield rt
        return
    missing = [v for v in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    if missing:
        raise UserError(f"WORLD_SIZE={world_size} but {', '.join(missing)} not set; start with torchrun")
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == world_size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not one_machine:
        why = "torchrun would share one store across restarts, where ranks find the addresses of dead ranks"
        mend = "run on every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and start again"
        raise UserError(f"{why}; {mend}")
    if dev.type == "cpu":  # ranks share the cores: without this each would use all of them
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    gloo = dev.type != "cuda"
    backend, device_id = ("gloo", None) if gloo else ("nccl", dev)
    patience = timedelta(minutes=timeout_minutes)
    soon = timedelta(seconds=60) if gloo else patience  # gloo ranks meet in seconds or never
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=soon))
        if one_machine:
            # torchrun keeps one store across restarts, where ranks would find the addresses of dead ranks. The agents
            # of several machines count their restarts differently, so there each needs a store of its own.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        roll_call(store, rt.rank, world_size, soon)
        dist.init_process_group(
            backend, timeout=soon, world_size=world_size, rank=rt.rank, store=store, device_id=device_id
        )
    except RuntimeError as e:  # a torchrun restart may fix it, so this is not a UserError
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SystemExit(f"rank {rt.rank} could not join the {world_size} ranks at {where}: {e}") from None
    if gloo:
        dist.distributed_c10d._set_pg_timeout(patience)
    try:
        total = rt.all_reduce(torch.ones(1, device=dev)).item()
        if total != world_size:
            raise SystemExit(f"preflight on rank {rt.rank}: {total:.0f} of {world_size} ranks responded")
        yield rt
    except RuntimeError as e:  # gloo raises plain ones
        if not isinstance(e, dist.DistError) and "gloo" not in str(e):
            raise
        time.sleep(6)  # let the rank at fault report first: torchrun ends all as soon as one exits
        why = f"rank {rt.rank} lost another rank, whose message says why, or waited {timeout_minutes:g} minutes for it"
        fail(f"{why}; resume from the newest checkpoint with --resume auto ({str(e).strip()[:200]})")
    finally:
        leave_group(sys.exception(), gloo)


def roll_call(store: dist.Store, rank: int, world_size: int, patience: timedelta) -> None:
    """Wait until every rank has been here. Raises RuntimeError with the names of those that have not."""
    names = [f"rank {r}" for r in range(world_size)]
    store.set(names[rank], "here")
    try:
        store.wait(names, patience)
    except RuntimeError:
        if absent := [name for name in names if not store.check([name])]:
            who = f"{', '.join(absent):.300}"
            raise RuntimeError(f"no sign of {who} for {patience.total_seconds():.0f} seconds") from None


def leave_group(error: BaseException | None, gloo: bool) -> None:
    """Leave the process group. Teardown, too, can hang on a dead rank: then report and exit after a minute."""

    def give_up() -> None:
        print(f"error: {error}" if error else "the other ranks do not respond", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = threading.Timer(60, give_up)
    watchdog.daemon = True
    watchdog.start()
    if error and not gloo:  # destroying it would wait for ranks that may never arrive
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    watchdog.cancel()


# Dense bfloat16 (float16 before Ampere) peak in FLOP/s, vendor data sheets, no sparsity. Longest match wins.
PEAK_FLOPS = {
    "B300": 2250e12, "GB300": 2500e12, "B200": 2250e12, "GB200": 2500e12, "H200": 989e12, "GH200": 989e12,
    "H200 NVL": 835e12, "H100": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H800": 989e12, "H800 PCIe": 756e12,
    "A100": 312e12, "A800": 312e12, "A40": 149.7e12, "A30": 165e12, "A10G": 70e12, "A10": 125e12, "L40S": 362e12,
    "L40": 181e12, "L4": 121e12, "T4": 65e12, "V100": 125e12, "V100-PCIE": 112e12, "A6000": 154.8e12,
    "RTX 6000 Ada": 364e12, "RTX 3090": 71e12, "RTX 4090": 165.2e12, "RTX 5090": 209.5e12, "RTX 2080 Ti": 56.9e12,
}  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """Peak dense FLOP/s of the card at training precision (see PEAK_FLOPS), or None if not known: MFU is then
    "unknown". A 3090 Ti, a laptop 4090 and a MIG slice of an A100 do not match the cards in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    other = r"(?! (Ti|D|SUPER|Laptop|Max-Q)\b)(?!.*\bMIG\b)"
    hits = [k for k in PEAK_FLOPS if re.search(rf"\b{re.escape(k)}\b{other}", name)]
    return PEAK_FLOPS[max(hits, key=len)] if hits else None
