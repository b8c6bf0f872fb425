"""The micro-batch: how many sequences one forward pass of one rank takes.

    B = choose_micro_batch_size(cfg, rt, forward, reserved_bytes)

Called by train_gpt2.py.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from system import machine
from system.cli import UserError, require
from system.distributed import Runtime
from tokens.loader import to_device
from training.config import TrainConfig
from training.forward import Forward

MAX_AUTO_SEQUENCES = 64

# The memory that `auto` leaves free beyond what a step takes, for NCCL's buffers, kernels that are loaded later,
# HellaSwag and fragmentation: at least this many bytes, and at least this fraction of the card.
MIN_BALLAST_BYTES = 2**30
BALLAST_FRACTION = 0.04

MEMORY_FIX = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model, or a larger card"


def choose_micro_batch_size(cfg: TrainConfig, rt: Runtime, forward: Forward, reserved_bytes: int) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` the largest that fits, the same on all ranks.

    reserved_bytes: what the first update allocates on this rank, the optimizers' state. Raises UserError if the batch
    does not divide evenly, or if not even one sequence fits. Every rank must call it.
    """
    divisors = divisors_of_share(cfg, rt.world_size)
    T = cfg.sequence_length
    if cfg.micro_batch_size != "auto":
        # Found out in the first step, a lack of memory would look like a crash, which is restarted.
        B = cfg.micro_batch_size
        fits = rt.device.type != "cuda" or fits_in_memory(rt, forward, B, T, reserved_bytes)
        require(not rt.any_rank(not fits), f"out of memory with --micro-batch-size {B}; lower it, or {MEMORY_FIX}")
        return B

    # On a CPU, running out of memory raises no useful error, so sizes cannot be tried. Take the largest whose
    # activations in the blocks, about 80 bytes per channel, stay under 3 GB.
    if rt.device.type != "cuda":
        channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
        return next((B for B in divisors if B <= MAX_AUTO_SEQUENCES and B * channels <= 2**25), 1)

    # On a GPU, more sequences at once are faster. Each try compiles, so each size is at most half of the one before.
    # All ranks try the same size at the same time; the rank with the least memory decides for all.
    last_tried = 2 * MAX_AUTO_SEQUENCES
    for B in divisors:
        if 2 * B > last_tried:
            continue
        last_tried = B
        headroom = max(MIN_BALLAST_BYTES, int(BALLAST_FRACTION * torch.cuda.mem_get_info(rt.device)[1]))
        if not rt.any_rank(not fits_in_memory(rt, forward, B, T, reserved_bytes + headroom)):
            return B
    raise UserError(f"out of memory with one sequence of {T} tokens per rank; {MEMORY_FIX}")


def divisors_of_share(cfg: TrainConfig, world_size: int) -> list[int]:
    """The sizes that a micro-batch may have, the largest first, which is all sequences that a rank takes in a step.
    Raises UserError if the step does not split evenly over the ranks, or a rank's share over its micro-batches."""
    sequences = cfg.sequences_per_step
    nearest = max(1, round(sequences / world_size)) * world_size * cfg.sequence_length
    rule = f"is {sequences} sequences of {cfg.sequence_length}, which do not split evenly over {world_size} ranks"
    fix = f"use --total-batch-size {nearest}"
    require(sequences % world_size == 0, f"--total-batch-size {cfg.total_batch_size} {rule}; {fix}")

    # A number that was asked for must divide a rank's share, so that all micro-batches have one size.
    share = sequences // world_size
    divisors = [d for d in range(share, 0, -1) if share % d == 0]
    B = cfg.micro_batch_size
    if B != "auto" and B not in divisors:
        nearest = min(divisors, key=lambda divisor: abs(divisor - B))
        rule = f"does not divide the {share} sequences that each of {world_size} ranks takes per step"
        steps = f"--total-batch-size {B * world_size * cfg.sequence_length}, for steps of this size"
        raise UserError(f"--micro-batch-size {B} {rule}; use --micro-batch-size {nearest} (or auto), or {steps}")
    return divisors


def fits_in_memory(rt: Runtime, forward: Forward, B: int, T: int, reserved_bytes: int) -> bool:
    """Whether micro-batches of B sequences of T tokens fit in the memory of this GPU, beside `reserved_bytes` for what
    is allocated later. Leaves nothing behind but the compiled code, which training reuses. Makes no collective."""
    ballast = None
    try:
        ballast = torch.empty(reserved_bytes, dtype=torch.uint8, device=rt.device)
        run_passes(rt, forward, B, T)
        fits = True
    except RuntimeError as e:
        if not machine.is_out_of_memory(e):
            raise
        fits = False

    # Here the exception and its frames are freed, so all memory of this attempt can be released.
    forward.zero_grad(set_to_none=True)
    del ballast
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return fits


def run_passes(rt: Runtime, forward: Forward, B: int, T: int) -> None:
    """Forward and backward over two micro-batches of zeros: the second runs beside the gradients of the first, as it
    will beside DDP's buckets."""
    for tokens in torch.zeros(2, B, T + 1, dtype=torch.uint16):
        x, y = to_device(tokens, rt.device)  # (B, T) each
        with rt.autocast():
            loss = forward(x, y)
        loss.backward()


@contextmanager
def explain_out_of_memory(rt: Runtime) -> Iterator[None]:
    """Turn an error that would come again with the same settings into one line that says what to do."""
    try:
        yield
    except RuntimeError as e:
        if not machine.is_out_of_memory(e):
            raise
        where = f"rank {rt.rank} ({machine.device_name(rt.device)})"
        reason = f"{str(e).strip().splitlines()[0]:.160}"
        raise UserError(f"out of memory on {where}: {reason}; lower --micro-batch-size, or {MEMORY_FIX}") from None
