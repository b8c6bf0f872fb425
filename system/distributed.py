"""The ranks of a run: which of its processes this is, and the collectives by which they agree.

    with distributed.session("auto") as rt:     # under torchrun: joins the process group
        total = rt.all_reduce(torch.ones(1, device=rt.device))

train_gpt2.py and hellaswag.py open a session, and pass `rt` to whatever needs the device or the ranks. World size 1
takes the same path as 8: its collectives do nothing. Collectives are never rank-conditional: where a docstring says
that every rank must call something, a rank that did not would leave the others waiting.

There are two process groups:

    group      made of                    sends                          and waits for
    default    NCCL on CUDA, else gloo    tensors: gradients, losses     ten minutes
    slow       gloo                       objects, around the reading    two hours
                                          and writing of checkpoints

A rank that fails exits, and torchrun ends the others: its report names the first one, with its message.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from system import machine
from system.cli import TransientError, env_number, env_rank, require

# How long ranks wait for each other's tensors, and for each other's objects: reading a checkpoint from a slow network
# volume takes minutes.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
SLOW_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its device, its precision, its rank."""

    device: torch.device
    dtype: torch.dtype  # of autocast; float32 means no autocast
    rank: int = 0  # among all processes
    world_size: int = 1
    slow_group: dist.ProcessGroup | None = None  # None for a single rank
    dtype_reason: str = ""  # why this precision

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def precision(self) -> str:
        """bfloat16 (the fastest that it has)"""
        return f"{machine.dtype_name(self.dtype)} ({self.dtype_reason})"

    def autocast(self) -> torch.autocast:
        """The context in which the model's forward pass runs."""
        # Autocast to float32 would be slower than none.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so a clock read afterwards is accurate."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` in place over all ranks and return it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` (same shape on all ranks) with rank `source`'s. Every rank must call it."""
        if self.world_size > 1:
            dist.broadcast(tensor, source)

    def any_rank(self, flag: object) -> bool:
        """Whether `flag` is true on any rank; all ranks get the same answer. Every rank must call it."""
        # A single rank returns early: .item() would wait for the GPU, and evaluations call this before every batch.
        if self.world_size == 1:
            return bool(flag)
        return self.all_reduce(torch.tensor(int(bool(flag)), device=self.device)).item() > 0

    def barrier(self) -> None:
        """Wait for up to SLOW_TIMEOUT until every rank is here; the error names those that are not. Every rank must
        call it."""
        if self.world_size > 1:
            dist.monitored_barrier(self.slow_group, timeout=SLOW_TIMEOUT)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, which can be pickled, in rank order. Every rank must call it."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.slow_group)
        return values

    def check_equal(self, facts: dict[str, str], fix: str) -> None:
        """Raise UserError on every rank unless all have the same `facts`. Every rank must call it."""
        differences = self.find_differences(facts)
        require(not differences, f"the ranks of this run differ: {differences}; {fix}")

    def find_differences(self, facts: dict[str, str]) -> str:
        """Which of `facts` differ from rank 0's: "--seed is 3 on rank 0 (host a), but 5 on rank 1 (host b)". Empty if
        none does. Every rank must call it."""
        hosts = self.gather(socket.gethostname())
        facts_of_ranks = self.gather(facts)
        differences = []
        for rank in range(1, self.world_size):
            for name in facts_of_ranks[0] | facts_of_ranks[rank]:
                value_0, value = facts_of_ranks[0].get(name), facts_of_ranks[rank].get(name)
                if value != value_0:
                    on_rank = f"rank {rank} ({hosts[rank]})"
                    differences.append(f"{name} is {value_0} on rank 0 ({hosts[0]}), but {value} on {on_rank}")
        return "; ".join(differences)


@contextmanager
def session(device: str = "auto", settings: dict[str, str] | None = None) -> Iterator[Runtime]:
    """Yield this process's Runtime, in float32 until a precision is chosen. Under torchrun join the other ranks, and
    leave them at the end.

    device: auto, cpu, cuda or, for a single process, cuda:N. Raises UserError if it is not available.
    settings: {flag: value} that must be equal on all ranks. Ranks that differ in their settings, their kind of device,
    or their version of torch or the code are refused.
    """
    # srun and mpirun start N tasks, each of which would train alone, while N are paid for.
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        tasks = os.environ.get(name, "1")
        problem = f"{name} is {tasks}, but these tasks are no ranks of one run; start each machine's by torchrun"
        require(tasks == "1" or "RANK" in os.environ, f"{problem}, as cloud/slurm.sbatch does")

    machine.use_expandable_segments()  # before CUDA starts
    rt = Runtime(machine.choose_device(device, env_number("LOCAL_RANK")), torch.float32)
    if rt.device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    else:
        # Bit-identical results; on a CPU they cost nothing measurable.
        torch.use_deterministic_algorithms(True)
        # A debugging aid that writes new tensors twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's stubs

    if env_number("WORLD_SIZE") == 1:
        yield rt
        return

    # The ranks meet at the address that torchrun's environment gives.
    is_cuda = rt.device.type == "cuda"
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=rt.device if is_cuda else None)
    slow_group = dist.new_group(backend="gloo", timeout=SLOW_TIMEOUT)
    rt = replace(rt, rank=env_rank(), world_size=env_number("WORLD_SIZE"), slow_group=slow_group)
    facts = {"the kind of device": rt.device.type, **machine.versions(), **(settings or {})}
    rt.check_equal(facts, "start every machine with the same command, code and software")
    yield rt

    # Not after an error: the ranks that are left would wait for the one that is gone. Its process ends (system/cli.py).
    dist.destroy_process_group()


def choose_precision(rt: Runtime, dtype_flag: str = "auto", saved_dtype: str | None = None) -> Runtime:
    """The Runtime `rt` with the precision that all ranks use: the one of --dtype, else the one that a resumed run was
    saved in, else the fastest that every rank has.

    All ranks must agree, because gradients of different precisions must not be averaged. Raises UserError if a GPU
    lacks the one of --dtype. Every rank must call it.
    """
    # What every rank has, the preferred first. A CPU computes in anything, if slowly.
    names_of_ranks = rt.gather([machine.dtype_name(dtype) for dtype in machine.supported_dtypes(rt.device)])
    usable: list[str] = [name for name in names_of_ranks[0] if all(name in names for names in names_of_ranks)]

    if dtype_flag != "auto":
        is_usable = dtype_flag in usable or rt.device.type != "cuda"
        fix = f"use --dtype {usable[0]}, or leave it out"
        require(is_usable, f"--dtype {dtype_flag}: not every GPU of this run has it; {fix}")
        chosen, reason = dtype_flag, "by --dtype"
    elif saved_dtype in usable:
        chosen, reason = saved_dtype, "in which the run began"
    elif rt.device.type == "cpu" and usable[0] == "bfloat16":
        # The slowest of the CPUs decides.
        speedup = min(rt.gather(machine.bfloat16_speedup()))
        chosen = "bfloat16" if speedup >= machine.MIN_BFLOAT16_SPEEDUP else "float32"
        reason = f"bfloat16 is {speedup:.1f} times as fast as float32 here"
    else:
        chosen, reason = usable[0], "the fastest that it has"
    if dtype_flag == "float32":
        torch.set_float32_matmul_precision("highest")  # without TF32
    return replace(rt, dtype=getattr(torch, chosen), dtype_reason=reason)


def weight_checksum(parameters: Iterable[Tensor]) -> str:
    """A text that changes with any bit of these weights."""
    crc = 0
    for p in parameters:
        crc = crc32(p.detach().cpu().contiguous().view(torch.uint8).numpy().data, crc)
    return str(crc)


def check_weights_agree(rt: Runtime, parameters: Iterable[Tensor], step: int) -> None:
    """Raise TransientError on every rank unless all have the same weights. Every rank must call it.

    DDP averages gradients, but never compares the weights: if these differ, the ranks train different models, of which
    only rank 0's would be saved.
    """
    # A single rank has nothing to compare with.
    if rt.world_size > 1:
        differences = rt.find_differences({"the checksum of the weights": weight_checksum(parameters)})
        if differences:
            fix = "--resume auto continues from the newest checkpoint; if it comes again, test the memory of that card"
            raise TransientError(f"step {step}: the ranks have different weights: {differences}; {fix}")
