"""The micro-batch: how many sequences one forward pass of one rank takes.

    B = choose_micro_batch_size(cfg, rt, rehearse)

    with explain_out_of_memory(cfg, rt, B):
        ... a step ...                          # out of memory: one error, and the next start takes at most half

Called by training/step.py. training/predict.py uses the same rules to predict runs on other cards.
"""

import gc
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any

import torch

from system import machine
from system.cli import UserError, print0, require
from system.distributed import Runtime
from system.files import atomic_write
from system.machine import dtype_name
from training.config import TrainConfig

MAX_AUTO_SEQUENCES = 64

# The memory that `auto` leaves free beyond what a whole step takes, for NCCL's buffers, kernels that are loaded later,
# HellaSwag and fragmentation: at least this many bytes, and at least this fraction of the card.
MIN_BALLAST_BYTES = 2**30
BALLAST_FRACTION = 0.04

# A start that ran out of memory with `auto` writes this file to the run folder; it limits the next starts.
LIMIT_FILE = "micro_batch_limit.json"
# Besides the network, these settings decide how much memory a sequence takes. A limit applies only as long as the
# network, these settings, the card, the precision and the number of ranks are the same as when it was found.
LIMIT_SETTINGS = ("sequence_length", "optimizer", "weights", "compile", "recompute", "zero_stage")

MEMORY_FIX = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model"


def choose_micro_batch_size(cfg: TrainConfig, rt: Runtime, rehearse: Callable[[int, bool], None]) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` the largest that fits, the same on all ranks.

    `rehearse(B, with_other_ranks)` does a whole step with micro-batches of B sequences and undoes it; without the other
    ranks it calls no collective. Raises UserError if the batch does not divide evenly, or if not even one sequence
    fits. Every rank must call it.
    """
    # A number that was asked for is only checked.
    if cfg.micro_batch_size != "auto":
        return check_micro_batch_size(cfg, rt.world_size, cfg.micro_batch_size)

    # Do not try again a size with which an earlier start ran out of memory.
    share = sequences_per_rank(cfg, rt.world_size)
    limit = find_limit(cfg, rt)

    # On a GPU, try sizes, the largest first: more sequences at once are faster.
    if rt.device.type == "cuda":
        return largest_that_fits(rehearse, cfg, rt, [B for B in halving_candidates(share) if B <= limit])

    # Elsewhere, running out of memory raises no useful error, so sizes cannot be tried. Take the largest divisor whose
    # activations in the blocks, about 80 bytes per channel, stay under 3 GB.
    channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
    return next((B for B in divisors(share) if B <= limit and B * channels <= 2**25), 1)


def sequences_per_rank(cfg: TrainConfig, world_size: int) -> int:
    """Sequences of a step that each rank takes. Raises UserError if they do not split evenly."""
    # The error suggests the nearest batch that splits.
    sequences = cfg.sequences_per_step
    if sequences % world_size != 0:
        nearest = max(1, round(sequences / world_size)) * world_size * cfg.sequence_length
        problem = (
            f"is {sequences} sequences of {cfg.sequence_length}, which do not split evenly over {world_size} ranks"
        )
        raise UserError(f"--total-batch-size {cfg.total_batch_size} {problem}; use --total-batch-size {nearest}")
    return sequences // world_size


def check_micro_batch_size(cfg: TrainConfig, world_size: int, B: int) -> int:
    """Return B if it divides a rank's share of the step, so that all micro-batches have one size. Raises UserError."""
    # The error suggests the nearest number that divides the share.
    share = sequences_per_rank(cfg, world_size)
    nearest = min(divisors(share), key=lambda divisor: abs(divisor - B))
    rule = f"does not divide the {share} sequences that each of {world_size} ranks takes per step"
    require(B == nearest, f"--micro-batch-size {B} {rule}; use --micro-batch-size {nearest} (or auto)")
    return B


def divisors(n: int) -> list[int]:
    """The divisors of n, the largest first."""
    return [d for d in range(n, 0, -1) if n % d == 0]


def halving_candidates(share: int) -> list[int]:
    """The micro-batches that `auto` tries, the largest first: divisors of a rank's share, each at most half of the one
    before, because each try compiles."""
    candidates: list[int] = []
    for B in divisors(share):
        if B <= MAX_AUTO_SEQUENCES and (not candidates or 2 * B <= candidates[-1]):
            candidates.append(B)
    return candidates


def largest_that_fits(
    rehearse: Callable[[int, bool], None], cfg: TrainConfig, rt: Runtime, candidates: list[int]
) -> int:
    """The first of the descending `candidates` that fits on every rank. Raises UserError if none does. Every rank must
    call it."""
    for B in candidates:
        # All ranks try the same size at the same time. The rank with the least memory decides for all.
        fits_here = fits_in_memory(rehearse, rt, B)
        if rt.any_rank(not fits_here):
            continue

        # It fits. Do a step with the other ranks, so that the collectives take their memory now, not in the first step.
        with explain_out_of_memory(cfg, rt, B):
            rehearse(B, True)
        release_memory(rt.device)
        return B
    problem = f"out of memory with {candidates[-1]} sequence(s) of {cfg.sequence_length} tokens per rank"
    raise UserError(f"{problem}; {MEMORY_FIX}")


def fits_in_memory(rehearse: Callable[[int, bool], None], rt: Runtime, B: int) -> bool:
    """Whether a step with micro-batches of B sequences fits in the memory of this rank's GPU, beside a ballast and the
    weights and optimizer state, which are allocated already. Leaves nothing behind but the compiled code, which
    training reuses."""
    # Without collectives: if another rank ran out of memory in the middle of the step, this one would wait for it.
    ballast = None
    try:
        ballast = torch.empty(ballast_bytes(machine.total_memory(rt.device)), dtype=torch.uint8, device=rt.device)
        rehearse(B, False)
        fits = True
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        fits = False

    # Here the exception and its frames are freed, so all memory of this attempt can be released.
    del ballast
    release_memory(rt.device)
    return fits


def ballast_bytes(card_bytes: int) -> int:
    """The size of the ballast on a card with this much memory; 0 without a card."""
    return max(MIN_BALLAST_BYTES, int(BALLAST_FRACTION * card_bytes)) if card_bytes else 0


def release_memory(device: torch.device) -> None:
    """Return unused memory to the device, so that NCCL and other libraries can allocate it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------- running out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out. It is not always an OutOfMemoryError: the compiler, the backward
    thread, cuBLAS and a CPU may raise another one."""
    words = "out of memory|OutOfMemory|ALLOC_FAILED|can't allocate memory"
    return isinstance(error, RuntimeError) and bool(re.search(words, f"{type(error).__name__} {error}"))


@contextmanager
def explain_out_of_memory(cfg: TrainConfig, rt: Runtime, B: int) -> Iterator[None]:
    """Turn an out-of-memory error with micro-batches of B sequences into one message that says what to do.

    With --micro-batch-size auto it is a crash, after which train.sh starts the run again: a limit in the run
    folder makes the new start take at most half. A number given by the user would fail again, so that is a UserError.
    """
    # The caller's block is a step, or an evaluation. Other errors pass.
    try:
        yield
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise

        # What happened, on which rank, with which sizes; of torch's message the first line, which has the bytes.
        where = f"rank {rt.rank} ({machine.device_name(rt.device)})"
        problem = f"out of memory on {where} with a micro-batch of {B} sequences of {cfg.sequence_length} tokens"
        detail = f"{str(e).strip().splitlines()[0]:.160}"

        # What to do, and whether a restart does it.
        fix, next_start_fits = lower_micro_batch(cfg, rt, B)
        error = RuntimeError if next_start_fits else UserError
        raise error(f"{problem} ({detail}); {fix}") from None


def lower_micro_batch(cfg: TrainConfig, rt: Runtime, B: int) -> tuple[str, bool]:
    """What to do after micro-batches of B sequences ran out of memory, and whether the next start does it by itself:
    with `auto` it takes at most half, because this function stores that limit in the run folder."""
    # The largest size that is at most half of B and divides the rank's share.
    half = next((d for d in divisors(sequences_per_rank(cfg, rt.world_size)) if 2 * d <= B), 0)

    # A single sequence cannot be halved. A number that the user gave is not changed. For `auto`, store the limit.
    if not half:
        return MEMORY_FIX, False
    if cfg.micro_batch_size != "auto":
        return f"use --micro-batch-size {half}, and --resume auto", False
    remember_limit(cfg, rt, half)
    return f"the next start takes at most {half}: run the same command with --resume auto", True


def limit_conditions(cfg: TrainConfig, rt: Runtime) -> dict[str, Any]:
    """The conditions under which a limit is found. It applies only while all of them are the same."""
    conditions = {
        "card": machine.device_name(rt.device),
        "world_size": rt.world_size,
        "dtype": dtype_name(rt.dtype),
        "model": asdict(cfg.model),
    }
    return conditions | {name: getattr(cfg, name) for name in LIMIT_SETTINGS}


def remember_limit(cfg: TrainConfig, rt: Runtime, sequences: int) -> None:
    """Store in the run folder that micro-batches of more than `sequences` ran out of memory on this rank."""
    content = limit_conditions(cfg, rt) | {"sequences": sequences}
    # The error to report is the one about memory, even if the disk is full as well.
    with suppress(OSError):
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        with atomic_write(cfg.run_dir / LIMIT_FILE) as f:
            f.write((json.dumps(content, indent=2) + "\n").encode())


def find_limit(cfg: TrainConfig, rt: Runtime) -> int:
    """The most sequences that `auto` may take: MAX_AUTO_SEQUENCES, or the limit that an earlier start has stored in
    the run folder. Every rank must call it."""
    # Ignore a file that cannot be read, or that was written under other conditions.
    path = cfg.run_dir / LIMIT_FILE
    own_limit = MAX_AUTO_SEQUENCES
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        if limit_conditions(cfg, rt).items() <= content.items():
            own_limit = min(own_limit, max(1, int(content["sequences"])))

    # Only the machine of the rank that ran out of memory may have the file, so take the minimum over the ranks.
    limit = int(rt.all_reduce(torch.tensor(own_limit, device=rt.device), "min"))
    if limit < MAX_AUTO_SEQUENCES:
        print0(
            f"micro-batch: at most {limit} sequences, because an earlier start ran out of memory with more; "
            f"to try larger ones again: rm {shlex.quote(str(path))}"
        )
    return limit
