"""The micro-batch: how many sequences one forward pass of one rank takes.

    B = choose_micro_batch_size(cfg, rt, rehearse)

    with explain_out_of_memory(cfg, rt, B):
        ... a step ...                          # out of memory: one error, and the next start takes at most half

Called by training/step.py; training/predict.py uses the same rules for cards that are not here.
"""

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from system import machine
from system.cli import RetryableError, UserError, print0, require
from system.distributed import Runtime
from system.files import atomic_write
from system.units import dtype_name
from training.config import TrainConfig

MAX_AUTO_SEQUENCES = 64

# What `auto` leaves free, besides what a whole step takes: for NCCL's buffers, for kernels that are loaded later, for
# HellaSwag and for fragmentation. At least so much, and at least this fraction of the card.
MIN_BALLAST_BYTES = 2**30
BALLAST_FRACTION = 0.04

# Written to the run folder by a start that ran out of memory with `auto`; the next starts take at most so many.
LIMIT_FILE = "micro_batch_limit.json"
# The settings that decide, besides the network, how much memory a sequence takes: a limit applies only while these, the
# card, the precision and the number of ranks are those that it was found with.
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

    # Larger ones than an earlier start could hold are not tried again.
    share = sequences_per_rank(cfg, rt.world_size)
    limit = find_limit(cfg, rt)

    # On a GPU, try: the largest first, because more sequences at once are faster.
    if rt.device.type == "cuda":
        return largest_that_fits(rehearse, cfg, rt, [B for B in halving_candidates(share) if B <= limit])

    # Running out of main memory raises no useful error, so there is nothing to try out. The largest divisor is taken
    # whose activations in the blocks, some 80 bytes a channel, stay under 3 GB.
    channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
    return next((B for B in divisors(share) if B <= limit and B * channels <= 2**25), 1)


def sequences_per_rank(cfg: TrainConfig, world_size: int) -> int:
    """Sequences of a step that each rank takes. Raises UserError if they do not split evenly."""
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
    # The message offers the nearest number that would do.
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

        # It fits. Now a step with the other ranks: what the collectives need is taken here, not in the first step.
        with explain_out_of_memory(cfg, rt, B):
            rehearse(B, True)
        release_memory(rt.device)
        return B
    problem = f"out of memory with {candidates[-1]} sequence(s) of {cfg.sequence_length} tokens per rank"
    raise UserError(f"{problem}; {MEMORY_FIX}")


def fits_in_memory(rehearse: Callable[[int, bool], None], rt: Runtime, B: int) -> bool:
    """Whether this rank's GPU holds a step with micro-batches of B sequences, beside the weights and the optimizer
    state, which are there already, and a ballast. Leaves nothing behind but the compiled code, which training
    reuses."""
    # Without the other ranks: one of them may run out of memory in the middle, and this one would wait for it.
    ballast = None
    try:
        ballast = torch.empty(ballast_bytes(machine.total_memory(rt.device)), dtype=torch.uint8, device=rt.device)
        rehearse(B, False)
        fits = True
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        fits = False

    # The exception and its frames are gone here, so all memory of the try can be released.
    del ballast
    release_memory(rt.device)
    return fits


def ballast_bytes(card_bytes: int) -> int:
    """What is held back on a card with so much memory while micro-batches are tried; nothing without a card (0)."""
    return max(MIN_BALLAST_BYTES, int(BALLAST_FRACTION * card_bytes)) if card_bytes else 0


def release_memory(device: torch.device) -> None:
    """Give memory that no tensor uses back to the device, where NCCL and other libraries find it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# ------------------------------------------------------------------------- out of memory, in spite of all


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out. While compiling, in the backward thread, in cuBLAS or on a CPU, it is
    not always an OutOfMemoryError."""
    words = "out of memory|OutOfMemory|ALLOC_FAILED|can't allocate memory"
    return isinstance(error, RuntimeError) and bool(re.search(words, f"{type(error).__name__} {error}"))


@contextmanager
def explain_out_of_memory(cfg: TrainConfig, rt: Runtime, B: int) -> Iterator[None]:
    """Turn a lack of memory, with micro-batches of B sequences, into one message that says what to do.

    With --micro-batch-size auto it is a RetryableError, after which train.sh starts again: the run folder then has a
    limit, and the new start takes at most half. A number that was asked for would fail again: that is a UserError.
    """
    try:
        yield
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        where = f"rank {rt.rank} ({machine.device_name(rt.device)})"
        problem = f"out of memory on {where} with a micro-batch of {B} sequences of {cfg.sequence_length} tokens"
        detail = f"{str(e).strip().splitlines()[0]:.160}"
        fix, next_start_fits = lower_micro_batch(cfg, rt, B)
        error = RetryableError if next_start_fits else UserError
        raise error(f"{problem} ({detail}); {fix}") from None


def lower_micro_batch(cfg: TrainConfig, rt: Runtime, B: int) -> tuple[str, bool]:
    """What to do after micro-batches of B sequences ran out of memory, and whether the next start does it by itself:
    with `auto` it takes at most half, because that is noted in the run folder."""
    # The next smaller size that divides the step, at most half.
    half = next((d for d in divisors(sequences_per_rank(cfg, rt.world_size)) if 2 * d <= B), 0)
    if not half:
        return MEMORY_FIX, False
    if cfg.micro_batch_size != "auto":
        return f"use --micro-batch-size {half}, and --resume auto", False
    remember_limit(cfg, rt, half)
    return f"the next start takes at most {half}: run the same command with --resume auto", True


def limit_conditions(cfg: TrainConfig, rt: Runtime) -> dict[str, Any]:
    """What a limit was found with, and must be the same for it to apply."""
    conditions = {"card": machine.device_name(rt.device), "world_size": rt.world_size, "dtype": dtype_name(rt.dtype)}
    return conditions | {name: getattr(cfg, name) for name in LIMIT_SETTINGS}


def remember_limit(cfg: TrainConfig, rt: Runtime, sequences: int) -> None:
    """Note in the run folder that more than so many sequences ran out of memory on this rank."""
    content = limit_conditions(cfg, rt) | {"sequences": sequences}
    # The lack of memory is the error to report, not a disk that is full as well.
    with suppress(OSError):
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        with atomic_write(cfg.run_dir / LIMIT_FILE) as f:
            f.write((json.dumps(content, indent=2) + "\n").encode())


def find_limit(cfg: TrainConfig, rt: Runtime) -> int:
    """The most sequences that `auto` may take: MAX_AUTO_SEQUENCES, or what an earlier start has left in the run folder.
    Every rank must call it."""
    # A file that cannot be read, or was written under other conditions, says nothing.
    path = cfg.run_dir / LIMIT_FILE
    own_limit = MAX_AUTO_SEQUENCES
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(path.read_text())
        if limit_conditions(cfg, rt).items() <= content.items():
            own_limit = min(own_limit, max(1, int(content["sequences"])))

    # The machine of the rank that ran out of memory may be the only one that has the file.
    limit = -rt.all_reduce_max(-own_limit)
    if limit < MAX_AUTO_SEQUENCES:
        print0(
            f"micro-batch: at most {limit} sequences, because an earlier start ran out of memory with more; "
            f"to try larger ones again: rm {path}"
        )
    return limit
