"""The ranks of a run: which of its processes this is, and the collectives by which they agree.

    with distributed.session("auto") as rt:     # under torchrun: joins the process group
        total = rt.all_reduce(torch.ones(1, device=rt.device))

World size 1 takes the same path as 8: its collectives do nothing. Collectives are never rank-conditional: where a
docstring says that every rank must call something, a rank that did not would leave the others waiting.

There are two process groups:

    group      made of                    sends                          and waits for
    default    NCCL on CUDA, else gloo    tensors: gradients, losses     ten minutes
    slow       gloo                       objects, around the reading    two hours
                                          and writing of checkpoints

A rank that fails exits, and torchrun ends the others: its report names the first one, with its message.
"""

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from system import machine
from system.errors import TransientError, UserError, require
from system.facts import START, Fact, Facts, compare
from system.printing import env_number, env_rank, progress_bar

# How long ranks wait for each other's objects: reading a checkpoint from a slow network volume takes minutes.
SLOW_TIMEOUT = timedelta(hours=2)

# After so many batches of an evaluation the ranks ask each other for signals. Asking makes a GPU wait for its CPU.
BATCHES_BETWEEN_CHECKS = 8


class Stopped(Exception):
    """A signal has ended an evaluation."""


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its device, its precision, its rank."""

    device: torch.device
    dtype: torch.dtype  # of autocast; float32 means no autocast
    rank: int = 0  # among all processes
    world_size: int = 1
    slow_group: dist.ProcessGroup | None = None  # None for a single rank
    is_signalled: Callable[[], bool] = lambda: False  # whether a signal asks this process to end soon

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def autocast(self) -> torch.autocast:
        """The context in which the model's forward pass runs."""
        # Autocast to float32 would be slower than none.
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so a clock read afterwards is accurate."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks: with several, on the device, and in place if it is there. Every rank must
        call it."""
        if self.world_size > 1:
            tensor = tensor.to(self.device)
            dist.all_reduce(tensor)
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` (same shape on all ranks) with rank `source`'s. Every rank must call it."""
        if self.world_size > 1:
            dist.broadcast(tensor, source)

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

    def each_batch(self, batches: Iterable, name: str) -> Iterator:
        """The batches of an evaluation, with a bar of progress. Raises Stopped on all ranks soon after one of them has
        got a signal. Every rank must iterate over equally many items."""
        for i, batch in enumerate(progress_bar(batches, name)):
            if i % BATCHES_BETWEEN_CHECKS == 0 and self.all_reduce(torch.tensor(float(self.is_signalled()))).item():
                raise Stopped
            yield batch


def check_ranks(rt: Runtime, facts: Facts, fix: str, error: type[UserError] = UserError) -> None:
    """Raise an error on every rank unless all ranks have equal facts. The error names the facts that differ from rank
    0's: "--seed is 3 on rank 0 (host a), but 5 on rank 1 (host b)". Every rank must call this."""
    reports = rt.gather((socket.gethostname(), facts))
    host_0, facts_0 = reports[0]
    differences = []
    for rank, (host, facts_of_rank) in enumerate(reports):
        for name, (value_0, value) in compare(facts_0, facts_of_rank).items():
            differences.append(f"{name} is {value_0} on rank 0 ({host_0}), but {value} on rank {rank} ({host})")
    if differences:
        raise error(f"the ranks of this run differ: {'; '.join(differences)}; {fix}")


@contextmanager
def session(device: str = "auto", facts: Facts | None = None) -> Iterator[Runtime]:
    """Yield this process's Runtime, in float32 until a precision is chosen. Under torchrun join the other ranks, and
    leave them at the end.

    device: auto, cpu, cuda or, for a single process, mps or cuda:N. Raises UserError if the device is not available, or
    unless all ranks have equal `facts`, the same kind of device, and the same versions of torch and the code.
    """
    # srun and mpirun start N tasks, each of which would train alone, while N are paid for.
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"):
        tasks = os.environ.get(name, "1")
        fix = "start each machine's ranks by torchrun, as cloud/slurm.sbatch does"
        require(tasks == "1" or "RANK" in os.environ, f"{name} is {tasks}, but tasks are no ranks of one run; {fix}")

    machine.use_expandable_segments()  # before CUDA starts
    rt = Runtime(machine.choose_device(device), torch.float32)
    is_cuda = rt.device.type == "cuda"
    if is_cuda:
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    elif rt.device.type == "cpu":
        # Bit-identical results; on a CPU they cost nothing measurable.
        torch.use_deterministic_algorithms(True)
        # A debugging aid that writes new tensors twice.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # not in torch's stubs

    world_size = env_number("WORLD_SIZE", 1)
    if world_size == 1:
        yield rt
        return

    # The ranks meet at the address that torchrun's environment gives.
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10), device_id=rt.device if is_cuda else None)
    slow_group = dist.new_group(backend="gloo", timeout=SLOW_TIMEOUT)
    rt = replace(rt, rank=env_rank(), world_size=world_size, slow_group=slow_group)
    facts = {"the kind of device": Fact(rt.device.type, START), **machine.version_facts(), **(facts or {})}
    check_ranks(rt, facts, "start every machine with the same command, code and software")
    yield rt

    # Not after an error: the ranks that are left would wait for the one that is gone. It ends (system/process.py).
    dist.destroy_process_group()


def choose_precision(rt: Runtime, dtype_flag: str = "auto", saved_dtype: str | None = None) -> Runtime:
    """The Runtime `rt` with the precision that all ranks use: the one of --dtype, else the one that a resumed run was
    saved in, else the fastest that every rank has.

    All ranks must agree, because gradients of different precisions must not be averaged. Raises UserError if a GPU
    lacks the one of --dtype. Every rank must call it.
    """
    # What every rank has, the preferred first: of one kind of device, the rank that has the fewest has no others. A CPU
    # computes in anything, if slowly.
    names = [machine.dtype_name(dtype) for dtype in machine.supported_dtypes(rt.device)]
    usable = min(rt.gather(names), key=len)

    chosen = usable[0]
    if dtype_flag != "auto":
        is_usable = dtype_flag in usable or rt.device.type == "cpu"
        require(is_usable, f"--dtype {dtype_flag}: not every GPU of this run has it; use --dtype {chosen}")
        chosen = dtype_flag
    elif saved_dtype in usable:
        chosen = saved_dtype
    elif rt.device.type == "cpu" and chosen == "bfloat16":
        # The slowest of the CPUs decides.
        if min(rt.gather(machine.bfloat16_speedup())) < machine.MIN_BFLOAT16_SPEEDUP:
            chosen = "float32"
    if dtype_flag == "float32":
        torch.set_float32_matmul_precision("highest")  # without TF32
    return replace(rt, dtype=getattr(torch, chosen))


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that changes with any bit of these tensors, and if two of their elements change places. It is computed
    where they are."""
    found = []
    for t in tensors:
        bits = t.detach().contiguous().view(-1).view(torch.int32 if t.element_size() >= 4 else torch.uint8)
        # The sum of all elements, each times its number, a part at a time, which takes little memory. Integers wrap
        # around, and are exact.
        for part in bits.split(2**22):
            found.append(int((part * torch.arange(1, len(part) + 1, device=part.device)).sum()))
    return crc32(repr(found).encode())


def check_tensors_agree(rt: Runtime, named: dict[str, list[Tensor]], step: int) -> None:
    """Raise TransientError on every rank unless all have the same tensors under these names. Every rank must call it.

    DDP averages gradients, but never compares the weights: if these differ, the ranks train different models, of which
    only rank 0's would be saved.
    """
    # A single rank has nothing to compare with.
    if rt.world_size > 1:
        fix = "--resume auto continues from the newest checkpoint; if it comes again, test the memory of that card"
        facts = {
            f"the checksum of {name} at step {step}": Fact(str(checksum(tensors)), START)
            for name, tensors in named.items()
        }
        check_ranks(rt, facts, fix, TransientError)
