"""The ranks of a run: which of its processes this is, and the collectives by which they agree.

    with distributed.session("auto") as rt:     # under torchrun: joins the process group, and leaves it on every exit
        total = rt.all_reduce(torch.ones(1, device=rt.device))

World size 1 takes the same path as 8: its collectives do nothing. Collectives are never rank-conditional: where a
docstring says that every rank must call something, a rank that did not would leave the others waiting.
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
from torch import Tensor

from system import machine, precision
from system.cli import UserError, env_rank, fail, require


@dataclass(frozen=True)
class Runtime:
    """Where this process runs: its device, its precision, its rank."""

    device: torch.device
    dtype: torch.dtype  # of autocast; float32 means no autocast. training/precision.py chooses that of a training run
    rank: int = 0  # among all processes
    local_rank: int = 0  # among those of this machine
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def uses_gloo(self) -> bool:
        return self.device.type != "cuda"

    def autocast(self):
        """The context in which the model's forward pass runs."""
        # Autocast to float32 would be slower than none.
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype)

    def synchronize(self) -> None:
        """Wait until the device has finished its queued work, so a clock read afterwards is accurate."""
        if self.device.type in ("cuda", "mps"):
            getattr(torch, self.device.type).synchronize()

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` in place over all ranks (op: sum, max or min) and return it. Every rank must call it."""
        if self.world_size > 1:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op.upper()))
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's `tensor` (same shape on all), in rank order. Every rank must call it."""
        # dist.all_gather fills tensors of the same shape, one for each rank.
        if self.world_size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        dist.all_gather(gathered, tensor)
        return gathered

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Fill `tensor` (same shape on all ranks) with rank `source`'s. Every rank must call it."""
        if self.world_size > 1:
            dist.broadcast(tensor, source)

    def all_reduce_max(self, value: int) -> int:
        """The largest `value` of all ranks. Every rank must call it."""
        # One rank must not wait for its GPU here: evaluations ask before every batch.
        if self.world_size == 1:
            return value
        return int(self.all_reduce(torch.tensor(value, device=self.device), "max").item())

    def any_rank(self, flag: object) -> bool:
        """Whether `flag` is true on any rank; all ranks get the same answer. Every rank must call it."""
        return self.all_reduce_max(int(bool(flag))) > 0

    def barrier(self, hours: float) -> None:
        """Wait until every rank is here, for up to `hours`. Every rank must call it."""
        if self.world_size > 1:
            # By gloo: NCCL would end the run after its own timeout, whatever the ranks are waiting for
            dist.barrier(dist.new_group(timeout=timedelta(hours=hours), backend="gloo"))


@contextmanager
def session(
    device: str = "auto", dtype: str = "auto", deterministic: bool = False, timeout_minutes: float = 10
) -> Iterator[Runtime]:
    """Yield this process's Runtime. Under torchrun join the process group (NCCL on CUDA, gloo elsewhere) and leave it
    on every exit.

    dtype: `auto` takes the one that scores fastest on this device; a training run makes its own choice later.
    deterministic: bit-identical results on a GPU, too. On a CPU this costs nothing measurable and is always on.
    timeout_minutes: how long a collective waits for a missing rank before the run stops instead of hanging.
    """
    # Both must be set before CUDA starts: cuBLAS needs a fixed workspace, Inductor must not choose kernels by timing.
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

    # Which process this is, on which device, in which precision.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    dev = machine.choose_device(device, local_rank)
    if dtype == "auto":
        torch_dtype, _ = precision.choose_dtype(dev, precision.SCORING)
    else:
        torch_dtype = getattr(torch, dtype)
    rt = Runtime(dev, torch_dtype, env_rank(), local_rank, world_size)

    # torch's global switches.
    if deterministic or dev.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes new tensors twice
    if dev.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32
    if world_size == 1:
        yield rt
        return

    # Ranks on a CPU share the cores; without this each would use all of them.
    if dev.type == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))

    # Join the others. From here on an error may only be the echo of another rank's.
    join_group(rt, timedelta(minutes=timeout_minutes))
    try:
        check_network(rt)
        yield rt
    except RuntimeError as e:
        if not is_lost_rank_error(e):
            raise
        # Let the rank at fault report first: torchrun ends all ranks as soon as one exits.
        time.sleep(6)
        problem = f"rank {rt.rank} lost another rank, whose message says why, or waited {timeout_minutes:g} minutes"
        fail(f"{problem}; resume from the newest checkpoint with --resume auto ({str(e).strip()[:200]})")
    finally:
        leave_group(sys.exception(), rt)


def is_lost_rank_error(error: Exception) -> bool:
    """Whether an error only says that another rank is gone. gloo raises plain RuntimeErrors that name it."""
    return isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error))


def join_group(rt: Runtime, timeout: timedelta) -> None:
    """Join the process group that torchrun's environment describes. A roll call names the ranks that do not come.
    `timeout`: how long the group's collectives then wait for a rank. Raises UserError, or SystemExit for what a restart
    by torchrun may fix."""
    missing = [v for v in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    require(not missing, f"WORLD_SIZE={rt.world_size} but {', '.join(missing)} not set; start with torchrun")

    # torchrun keeps one key-value store across its restarts, where ranks would find the addresses of dead ranks. On one
    # machine a prefix for each restart is enough. The agents of several machines count their restarts differently, so
    # there every restart needs a store of its own, which an environment variable asks for.
    on_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == rt.world_size
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not on_one_machine:
        raise UserError(
            "torchrun would share one store across restarts, where ranks find the addresses of dead ranks; "
            "run on every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, and start again"
        )

    # gloo ranks meet in seconds or never; NCCL on many machines may need longer.
    join_timeout = timedelta(seconds=60) if rt.uses_gloo else timeout
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=join_timeout))
        if on_one_machine:
            store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        roll_call(store, rt.rank, rt.world_size, join_timeout)
        backend = {"backend": "gloo"} if rt.uses_gloo else {"backend": "nccl", "device_id": rt.device}
        dist.init_process_group(timeout=join_timeout, world_size=rt.world_size, rank=rt.rank, store=store, **backend)
    except RuntimeError as e:  # a torchrun restart may fix it, so this is not a UserError
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SystemExit(f"rank {rt.rank} could not join the {rt.world_size} ranks at {address}: {e}") from None
    if rt.uses_gloo:
        dist.distributed_c10d._set_pg_timeout(timeout)


def check_network(rt: Runtime) -> None:
    """Try the network with one collective, before any work is done. Every rank must call it."""
    responded = rt.all_reduce(torch.ones(1, device=rt.device)).item()
    if responded != rt.world_size:
        raise SystemExit(f"network check on rank {rt.rank}: {responded:.0f} of {rt.world_size} ranks responded")


def roll_call(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Wait until every rank has called this. Raises RuntimeError with the names of those that have not."""
    # Each rank leaves its name in the store, then waits for the names of all.
    names = [f"rank {r}" for r in range(world_size)]
    store.set(names[rank], "here")
    try:
        store.wait(names, timeout)
    except RuntimeError:
        absent = ", ".join(name for name in names if not store.check([name]))
        if absent:
            raise RuntimeError(f"no sign of {absent:.300} for {timeout.total_seconds():.0f} seconds") from None


def leave_group(error: BaseException | None, rt: Runtime) -> None:
    """Leave the process group. Teardown can hang on a dead rank, too: after a minute, report and exit."""

    def give_up() -> None:
        print(f"error: {error}" if error else "the other ranks do not respond", file=sys.stderr, flush=True)
        os._exit(1)

    # A thread that ends the process, unless it is cancelled in time.
    watchdog = threading.Timer(60, give_up)
    watchdog.daemon = True
    watchdog.start()
    if error and not rt.uses_gloo:
        # After an error, destroying an NCCL group would wait for ranks that may never arrive.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    watchdog.cancel()
