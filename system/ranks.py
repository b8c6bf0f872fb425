"""The ranks: which of a run's processes this is, and how they agree.

World size 1 takes the same path as 8: the collectives are no-ops there.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from system import machine
from system.script import UserError, env_rank, fail, require


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its device, its precision, its rank."""

    device: torch.device
    dtype: torch.dtype  # of autocast; float32 means autocast is off; a training run's is settled by training/precision
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def uses_gloo(self) -> bool:
        return self.device.type != "cuda"

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

    def highest(self, value: int) -> int:
        """The largest `value` of all ranks. Every rank must call it."""
        if self.world_size == 1:
            return int(value)
        return int(self.all_reduce(torch.tensor(int(value), device=self.device), "max").item())

    def any(self, flag: object) -> bool:
        """Whether `flag` is set on any rank; all ranks get the same answer. Every rank must call it."""
        return self.highest(bool(flag)) > 0

    def barrier(self, hours: float) -> None:
        """Wait until every rank is here, for up to `hours`. Every rank must call it."""
        if self.world_size > 1:
            # by gloo: NCCL would end the run after its own timeout, whatever the ranks are waiting for
            dist.barrier(dist.new_group(timeout=timedelta(hours=hours), backend="gloo"))


@contextmanager
def session(
    device: str = "auto", dtype: str = "auto", deterministic: bool = False, timeout_minutes: float = 10
) -> Iterator[Runtime]:
    """Yield this process's Runtime; under torchrun join the process group (nccl on CUDA, gloo elsewhere) and
    leave it on every exit.

    deterministic: bit-identical results on a GPU, too. On a CPU this costs nothing measurable and is always on.
    timeout_minutes: how long a collective waits for a missing rank before the run stops instead of hanging.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs this, before CUDA starts
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # do not choose kernels by timing
    local_rank, world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dev = machine.pick_device(device, local_rank)
    rt = Runtime(dev, machine.pick_dtype(dtype, dev), env_rank(), local_rank, world_size)
    if deterministic or dev.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes new tensors twice
    if dev.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if world_size == 1:
        yield rt
        return
    if dev.type == "cpu":  # ranks share the cores: without this each would use all of them
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world_size))))
    join_group(rt, timedelta(minutes=timeout_minutes))
    try:
        preflight(rt)
        yield rt
    except RuntimeError as e:
        if not lost_a_rank(e):
            raise
        time.sleep(6)  # let the rank at fault report first: torchrun ends all as soon as one exits
        why = f"rank {rt.rank} lost another rank, whose message says why, or waited {timeout_minutes:g} minutes for it"
        fail(f"{why}; resume from the newest checkpoint with --resume auto ({str(e).strip()[:200]})")
    finally:
        leave_group(sys.exception(), rt)


def lost_a_rank(error: Exception) -> bool:
    """Whether an error only says that another rank is gone: gloo raises plain RuntimeErrors."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def join_group(rt: Runtime, patience: timedelta) -> None:
    """Join the process group that torchrun's environment describes; a roll call names ranks that do not come.
    `patience`: how long its collectives then wait for a rank."""
    missing = [v for v in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    require(not missing, f"WORLD_SIZE={rt.world_size} but {', '.join(missing)} not set; start with torchrun")
    one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == rt.world_size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not one_machine:
        why = "torchrun would share one store across restarts, where ranks find the addresses of dead ranks"
        mend = "run on every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and start again"
        raise UserError(f"{why}; {mend}")
    soon = timedelta(seconds=60) if rt.uses_gloo else patience  # gloo ranks meet in seconds or never
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=soon))
        if one_machine:
            # torchrun keeps one store across restarts, where ranks would find the addresses of dead ranks. The agents
            # of several machines count their restarts differently, so there each needs a store of its own.
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        roll_call(store, rt.rank, rt.world_size, soon)
        how = {"backend": "gloo"} if rt.uses_gloo else {"backend": "nccl", "device_id": rt.device}
        dist.init_process_group(timeout=soon, world_size=rt.world_size, rank=rt.rank, store=store, **how)
    except RuntimeError as e:  # a torchrun restart may fix it, so this is not a UserError
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SystemExit(f"rank {rt.rank} could not join the {rt.world_size} ranks at {where}: {e}") from None
    if rt.uses_gloo:
        dist.distributed_c10d._set_pg_timeout(patience)


def preflight(rt: Runtime) -> None:
    """Try the network with one collective, before any work is done."""
    total = rt.all_reduce(torch.ones(1, device=rt.device)).item()
    if total != rt.world_size:
        raise SystemExit(f"preflight on rank {rt.rank}: {total:.0f} of {rt.world_size} ranks responded")


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


def leave_group(error: BaseException | None, rt: Runtime) -> None:
    """Leave the process group. Teardown, too, can hang on a dead rank: then report and exit after a minute."""

    def give_up() -> None:
        print(f"error: {error}" if error else "the other ranks do not respond", file=sys.stderr, flush=True)
        os._exit(1)

    watchdog = threading.Timer(60, give_up)
    watchdog.daemon = True
    watchdog.start()
    if error and not rt.uses_gloo:  # destroying it would wait for ranks that may never arrive
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    watchdog.cancel()
