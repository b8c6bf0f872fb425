"""The ranks of a run: which of its processes this is, and the collectives by which they agree.

    with distributed.session("auto") as rt:     # under torchrun: joins the process group, and leaves it on every exit
        total = rt.all_reduce(torch.ones(1, device=rt.device))

Every script that computes opens a session, and passes `rt` to whatever needs the device or the ranks. World size 1
takes the same path as 8: its collectives do nothing. Collectives are never rank-conditional: where a docstring says
that every rank must call something, a rank that did not would leave the others waiting.

Tensors travel by NCCL or gloo. What the ranks must know before and after training (who is here, with which settings and
data, who has failed) travels through torchrun's key-value store, which needs nothing but the address that they met at.
In the order of a run:

    roll call      every rank is here                                   a missing rank is named after a minute
    check_equal    settings, versions; then step, data, HellaSwag rows  differences are named, and every rank refuses
    barrier        wait for a download, or for the last checkpoint      for hours, if need be
    failure        the first rank that fails leaves its message         ranks that wait in the store stop, and repeat it
"""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

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
    store: dist.Store | None = None  # torchrun's key-value store, of this start alone; None for a single rank

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def uses_gloo(self) -> bool:
        """Whether collectives go through gloo, as on a CPU; on CUDA they go through NCCL."""
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
        # A single rank returns early: .item() would wait for the GPU, and evaluations call this before every batch.
        if self.world_size == 1:
            return value
        return int(self.all_reduce(torch.tensor(value, device=self.device), "max").item())

    def any_rank(self, flag: object) -> bool:
        """Whether `flag` is true on any rank; all ranks get the same answer. Every rank must call it."""
        return self.all_reduce_max(int(bool(flag))) > 0

    def barrier(self, hours: float) -> None:
        """Wait until every rank is here, for up to `hours`, or until one has failed. Every rank must call it."""
        # Through the store: an NCCL collective would end the run after its own timeout, whatever the ranks are waiting
        # for, and a gloo group made for barriers alone might fail to connect only when the run has just ended.
        exchange(self, "the barrier", "", hours * 3600)

    def gather_texts(self, topic: str, text: str) -> list[str]:
        """Every rank's `text`, in rank order. `topic` says in errors what the ranks were waiting for. Every rank must
        call it."""
        return exchange(self, topic, text, EXCHANGE_TIMEOUT_S)

    def check_equal(self, topic: str, facts: dict[str, str], fixes: dict[str, str]) -> None:
        """Raise UserError on every rank unless all have the same `facts`. The message names each fact that differs,
        which ranks have which value, and its fix: fixes[name] or else fixes[""]. Every rank must call it."""
        # Compare hashes first: the facts themselves are exchanged only if they differ.
        content = json.dumps(facts, sort_keys=True)
        digests = self.gather_texts(topic, hashlib.sha256(content.encode()).hexdigest())
        if len(set(digests)) == 1:
            return
        every_fact = [json.loads(text) for text in self.gather_texts(topic, content)]
        hosts = self.gather_texts(topic, socket.gethostname())
        raise UserError(describe_differences(every_fact, hosts, fixes))


@contextmanager
def session(
    device: str = "auto",
    dtype: str = "auto",
    deterministic: bool = False,
    timeout_minutes: float = 10,
    settings: dict[str, str] | None = None,
) -> Iterator[Runtime]:
    """Yield this process's Runtime. Under torchrun join the process group (NCCL on CUDA, gloo elsewhere) and leave it
    on every exit.

    device: auto, cpu, mps, cuda or, for a single process, cuda:N. Raises UserError if it is not available.
    dtype: `auto` takes the one that scores fastest on this device; a training run makes its own choice later.
    deterministic: bit-identical results on a GPU, too. On a CPU this costs nothing measurable and is always on.
    timeout_minutes: how long a collective waits for a missing rank before the run stops instead of hanging.
    settings: {flag: value} that must be equal on all ranks. Ranks that differ in their settings, their kind of device,
    or their version of torch or the code are refused before their first collective.
    """
    # Both must be set before CUDA starts: cuBLAS needs a fixed workspace, Inductor must not choose kernels by timing.
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")

    machine.use_expandable_segments()  # also before CUDA starts

    # Which process this is: torchrun sets these variables.
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))

    # Its device, of which every rank of a machine needs its own, and its precision.
    if ":" in device and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > 1:
        name = device.partition(":")[0]
        problem = f"--device {device} is one device, which ranks cannot share"
        raise UserError(f"{problem}; use --device {name}, which gives each rank a device of its own")
    dev = machine.choose_device(device, local_rank)
    if dtype == "auto":
        torch_dtype, _ = precision.choose_dtype(dev, precision.SCORING)
    else:
        torch_dtype = getattr(torch, dtype)
    rt = Runtime(dev, torch_dtype, env_rank(), local_rank, world_size)

    # torch's global switches: deterministic kernels, and the precision of float32 products on a GPU.
    if deterministic or dev.type == "cpu":
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that writes new tensors twice
    if dev.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32

    # A single process has no group to join; the Runtime's collectives return at once.
    if world_size == 1:
        yield rt
        return

    # Ranks on a CPU share its cores; without this each would use all of them.
    if dev.type == "cpu":
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks_here))

    # Join the other ranks. From here on, an error may be only a consequence of another rank's failure.
    rt = join_group(rt, timedelta(minutes=timeout_minutes), settings or {})
    try:
        check_network(rt)
        with failures_reported(rt):
            yield rt
    except RuntimeError as e:
        if not is_lost_rank_error(e):
            raise
        # Let the rank at fault report first, which may take it FAILURE_GRACE_S: torchrun ends all ranks as soon as one
        # exits.
        time.sleep(6)
        problem = f"rank {rt.rank} lost another rank (see its message) or waited {timeout_minutes:g} minutes for one"
        fail(f"{problem}; resume from the newest checkpoint with --resume auto ({str(e).strip()[:200]})")
    finally:
        leave_group(sys.exception(), rt)


def is_lost_rank_error(error: Exception) -> bool:
    """Whether an error only says that another rank is gone. gloo's errors are RuntimeErrors whose message has its
    name."""
    return isinstance(error, LostRank | dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def join_group(rt: Runtime, timeout: timedelta, settings: dict[str, str]) -> Runtime:
    """Join the process group that torchrun's environment describes, and return the Runtime with its store. A roll call
    names the ranks that are missing; ranks with different `settings` are refused.

    `timeout`: how long the group's collectives wait for a rank. Raises UserError, or SystemExit for what a restart by
    torchrun may fix."""
    # What torchrun sets, and a user who starts ranks by hand may forget.
    missing = [v for v in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if v not in os.environ]
    require(not missing, f"WORLD_SIZE={rt.world_size} but {', '.join(missing)} not set; start with torchrun")

    # torchrun keeps one key-value store across its restarts, where ranks would find the addresses of dead ranks. On one
    # machine a prefix for each restart is enough. The agents of several machines count their restarts differently, so
    # there every restart needs a store of its own, which an environment variable asks for.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and not is_on_one_machine(rt):
        raise UserError(
            "torchrun would share one store across restarts, in which ranks find the addresses of dead ranks; "
            "to start again, first run on every machine: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        )

    # How long to wait for each other here: gloo ranks meet in seconds or never; NCCL on many machines may need longer.
    join_timeout = timedelta(seconds=60) if rt.uses_gloo else timeout
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    problem = f"rank {rt.rank} could not join the {rt.world_size} ranks at {address}"
    hint = ""
    try:
        # Meet in the store: are all ranks here, and were they started alike?
        rt = replace(rt, store=open_store(rt, join_timeout))
        roll_call(rt, join_timeout)
        check_start(rt, settings)

        # From here on the ranks need more than the store: they must reach each other.
        hint = network_hint(rt)
        backend = {"backend": "gloo"} if rt.uses_gloo else {"backend": "nccl", "device_id": rt.device}
        dist.init_process_group(timeout=join_timeout, world_size=rt.world_size, rank=rt.rank, store=rt.store, **backend)
    except RuntimeError as e:  # a torchrun restart may fix it, so this is not a UserError
        raise SystemExit(f"{problem}: {e}{hint}") from None

    # From here on gloo waits for a rank as long as was asked for.
    if rt.uses_gloo:
        dist.distributed_c10d._set_pg_timeout(timeout)
    return rt


def network_hint(rt: Runtime) -> str:
    """What to do if all ranks have answered the roll call but cannot connect to each other."""
    # gloo listens on the address to which the machine's host name resolves. Debian maps that name to 127.0.1.1 in
    # /etc/hosts, an address that no other machine can reach.
    variable = "GLOO_SOCKET_IFNAME" if rt.uses_gloo else "NCCL_SOCKET_IFNAME"
    name = socket.gethostname()
    try:
        address = f" ({socket.gethostbyname(name)})"
    except OSError:
        address = ""
    return (
        f". All ranks have reported, but they cannot connect to each other: the host name {name}{address} may resolve "
        f"to an address that other machines cannot reach. Find the network interface that connects the machines with "
        f"`ip -brief address`, and name it on every machine: export {variable}=eth0"
    )


def check_start(rt: Runtime, settings: dict[str, str]) -> None:
    """Raise UserError on every rank unless all were started alike, before a collective could hang or average two
    different models. Every rank must call it."""
    facts = {
        "the kind of device": rt.device.type,
        "torch": str(torch.__version__),
        "the code (a hash)": machine.code_version(),
        **settings,
    }
    fixes = {
        "": "start every machine with the same command",
        "the kind of device": "add the same --device on every machine, or install a torch that finds the GPUs",
        "torch": "install the same torch on every machine: make install",
        "the code (a hash)": "check out the same commit on every machine; git status shows what is changed there",
    }
    rt.check_equal("the settings", facts, fixes)


def check_network(rt: Runtime) -> None:
    """Try the network with one collective, before any work is done. Every rank must call it."""
    responded = rt.all_reduce(torch.ones(1, device=rt.device)).item()
    if responded != rt.world_size:
        raise SystemExit(f"network check on rank {rt.rank}: {responded:.0f} of {rt.world_size} ranks responded")


def roll_call(rt: Runtime, timeout: timedelta) -> None:
    """Wait until every rank has called this. Raises LostRank with the names of the missing ranks, or the error of a
    rank that failed before it called this."""
    # Each rank leaves its name in the store, then waits for the names of all.
    names = [f"rank {r}" for r in range(rt.world_size)]
    rt.store.set(names[rt.rank], "here")
    wait_for_keys(rt, names, "the start", timeout.total_seconds())


def report_early_failure(error: Exception) -> None:
    """Put the error of a rank that fails before it joins the group, such as a bad flag, into the store, where the other
    ranks look for it. Does nothing without torchrun, or if the store does not answer."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "MASTER_ADDR" not in os.environ:
        return
    # A failure of the store must not hide the error that is being reported.
    with suppress(Exception):
        rt = Runtime(torch.device("cpu"), torch.float32, env_rank(), world_size=int(os.environ["WORLD_SIZE"]))
        report_failure(replace(rt, store=open_store(rt, timedelta(seconds=FAILURE_GRACE_S))), error)


def open_store(rt: Runtime, timeout: timedelta) -> dist.Store:
    """torchrun's key-value store, for this start alone: keys get a prefix where restarts share the store."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    if is_on_one_machine(rt):
        return dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return store


def is_on_one_machine(rt: Runtime) -> bool:
    """Whether all ranks of the run are on this machine, by torchrun's count."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == rt.world_size


# ------------------------------------------------------------------------- through the store

# How long the ranks wait for each other in an exchange of texts. Some exchanges come after each rank has read its
# checkpoint, which takes minutes from a slow network volume.
EXCHANGE_TIMEOUT_S = 1800
# How long a failing rank that may host the store stays, so that the other ranks can read the reason.
FAILURE_GRACE_S = 5
# The key of the message that the first failing rank leaves.
FAILURE = "failure"


class LostRank(RuntimeError):
    """Another rank has failed, or has not arrived in time."""


def exchange(rt: Runtime, topic: str, text: str, timeout_s: float) -> list[str]:
    """Every rank's `text`, in rank order, through the store. Raises UserError if another rank has failed with one, and
    LostRank if another rank has failed otherwise or has not arrived in time. Every rank must call it.

        rank 0    set its text | wait for all texts | read | wait until all have read |
        rank 1    set its text | wait for all texts | read |
    """
    if rt.world_size == 1:
        return [text]
    store = rt.store

    # Set this rank's text, and wait for those of all. Each rank numbers its exchanges, so that no key is used twice.
    number = store.add(f"exchanges of rank {rt.rank}", 1)
    keys = [f"exchange {number}: {topic}: rank {r}" for r in range(rt.world_size)]
    store.set(keys[rt.rank], text)
    wait_for_keys(rt, keys, topic, timeout_s)
    texts = [value.decode() for value in store.multi_get(keys)]

    # The store may live in the process of rank 0, which must not end before all have read.
    read_keys = [f"{key} has read" for key in keys]
    store.set(read_keys[rt.rank], "")
    if rt.rank == 0:
        wait_for_keys(rt, read_keys, topic, timeout_s)
    return texts


def wait_for_keys(rt: Runtime, keys: list[str], topic: str, timeout_s: float) -> None:
    """Wait until every rank has set its key, for up to `timeout_s`. Raises UserError or LostRank, as exchange does."""
    # Poll, less and less often: a blocking wait would not notice a rank that fails meanwhile.
    end = time.monotonic() + timeout_s
    pause_s = 0.001
    while not rt.store.check(keys):
        if rt.store.check([FAILURE]):
            raise_failure(rt)
        if time.monotonic() > end:
            absent = ", ".join(f"rank {r}" for r, key in enumerate(keys) if not rt.store.check([key]))
            raise LostRank(f"{absent:.300} did not reach {topic} within {timeout_s:.0f} seconds")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.5)


@contextmanager
def failures_reported(rt: Runtime) -> Iterator[None]:
    """Leave the message of an error that ends this block in the store, where ranks that wait for this one find it."""
    try:
        yield
    except Exception as e:
        # Do not report a lost rank: the others notice it themselves, and if it hosts the store and hangs, every call of
        # the store would hang as well. The store may also be gone with its host.
        if not is_lost_rank_error(e):
            with suppress(RuntimeError):
                report_failure(rt, e)
        raise


def report_failure(rt: Runtime, error: Exception) -> None:
    """Leave this rank's error in the store, unless another rank has left one. Rank 0, which may host the store, stays
    for up to FAILURE_GRACE_S, until every rank knows of the failure."""
    # The message, and a note that this rank does not need to be told.
    if not rt.store.check([FAILURE]):
        failure = {"rank": rt.rank, "host": socket.gethostname(), "message": str(error)}
        rt.store.set(FAILURE, json.dumps(failure | {"is_user_error": isinstance(error, UserError)}))
    rt.store.set(knows_key(rt.rank), "")

    # Rank 0 waits until the others have read it. In training they are in a collective and do not look into the store,
    # so the wait has a limit.
    if rt.rank == 0:
        keys = [knows_key(rank) for rank in range(rt.world_size)]
        end = time.monotonic() + FAILURE_GRACE_S
        while not rt.store.check(keys) and time.monotonic() < end:
            time.sleep(0.05)


def knows_key(rank: int) -> str:
    """The key that a rank sets once it knows of the failure."""
    return f"rank {rank} knows of the failure"


def raise_failure(rt: Runtime) -> NoReturn:
    """Raise the error that another rank has left in the store."""
    # What the user can fix stays a UserError; anything else is the loss of a rank.
    failure = json.loads(rt.store.get(FAILURE))
    rt.store.set(knows_key(rt.rank), "")
    message = f"rank {failure['rank']} on {failure['host']}: {failure['message']}"
    raise UserError(message) if failure["is_user_error"] else LostRank(message)


def describe_differences(every_fact: list[dict[str, str]], hosts: list[str], fixes: dict[str, str]) -> str:
    """Which facts differ between the ranks, who has which value, and how to fix each.

    every_fact: the facts of each rank, in rank order. hosts: the name of each rank's machine.
    """
    names = list(dict.fromkeys(name for facts in every_fact for name in facts))
    differences, needed_fixes = [], []
    for name in names:
        # The ranks by their value, in the order in which the values appear.
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(every_fact):
            ranks_by_value.setdefault(facts.get(name, "none"), []).append(rank)
        if len(ranks_by_value) == 1:
            continue

        # One sentence for this name, and its fix.
        values = [f"{value} on {describe_ranks(ranks, hosts)}" for value, ranks in ranks_by_value.items()]
        differences.append(f"{name} is {', but '.join(values)}")
        needed_fixes.append(fixes.get(name, fixes[""]))
    fix = "; ".join(dict.fromkeys(needed_fixes))
    return f"the ranks of this run differ, so nothing was started: {'; '.join(differences)}. To fix it, {fix}"


def describe_ranks(ranks: list[int], hosts: list[str]) -> str:
    """Some of the ranks and their machines: "rank 3 (host b)", "ranks 0-7 (host a)" or "ranks 0, 2 (hosts a, b)"."""
    are_consecutive = len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1))
    numbers = f"{ranks[0]}-{ranks[-1]}" if are_consecutive else ", ".join(map(str, ranks))
    machines = list(dict.fromkeys(hosts[rank] for rank in ranks))
    plural_ranks = "s" if len(ranks) > 1 else ""
    plural_hosts = "s" if len(machines) > 1 else ""
    return f"rank{plural_ranks} {numbers} (host{plural_hosts} {', '.join(machines):.200})"


# ------------------------------------------------------------------------- leaving the group


def leave_group(error: BaseException | None, rt: Runtime) -> None:
    """Leave the process group. Teardown can hang on a dead rank, too: after a minute, report and exit."""

    def give_up() -> None:
        print(f"error: {error}" if error else "the other ranks do not respond", file=sys.stderr, flush=True)
        os._exit(1)

    # A thread that ends the process, unless it is cancelled in time.
    watchdog = threading.Timer(60, give_up)
    watchdog.daemon = True
    watchdog.start()

    # Leave, and cancel the thread.
    if error and not rt.uses_gloo:
        # After an error, destroying an NCCL group would wait for ranks that may never arrive.
        dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
    watchdog.cancel()
