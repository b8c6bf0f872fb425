"""The micro-batch: how many sequences one forward pass of one rank takes.

    B = choose_micro_batch_size(cfg, rt, forward)

Called by training/step.py; training/predict.py uses the same rules for cards that are not here.
"""

import gc
import re

import torch

from system.cli import UserError, require
from system.distributed import Runtime
from training.config import TrainConfig

MAX_AUTO_SEQUENCES = 64


def choose_micro_batch_size(cfg: TrainConfig, rt: Runtime, forward: torch.nn.Module) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` the largest that fits, the same on all ranks.

    `forward` is called with idx, targets (B, T) and returns (None, loss). Raises UserError if the batch does not divide
    evenly, or if not even one sequence fits. Every rank must call it.
    """
    # A number that was asked for is only checked.
    if cfg.micro_batch_size != "auto":
        return check_micro_batch_size(cfg, rt.world_size, cfg.micro_batch_size)

    # On a GPU, try: the largest first, because more sequences at once are faster.
    share = sequences_per_rank(cfg, rt.world_size)
    if rt.device.type == "cuda":
        return largest_that_fits(forward, cfg, rt, halving_candidates(share))

    # Running out of main memory raises no useful error, so there is nothing to try out. The largest divisor is taken
    # whose activations in the blocks, some 80 bytes a channel, stay under 3 GB.
    channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
    return next((B for B in divisors(share) if B <= MAX_AUTO_SEQUENCES and B * channels <= 2**25), 1)


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


def largest_that_fits(forward: torch.nn.Module, cfg: TrainConfig, rt: Runtime, candidates: list[int]) -> int:
    """The first of the descending `candidates` that fits on every rank. Raises UserError if none does. Every rank must
    call it."""
    # A rank with less memory, or with a smaller card, decides for all.
    largest_here = next((B for B in candidates if fits_in_memory(forward, cfg, rt, B)), 0)
    largest = int(rt.all_reduce(torch.tensor(float(largest_here), device=rt.device), "min").item())
    problem = f"out of memory with {candidates[-1]} sequence(s) of {cfg.sequence_length} tokens per rank"
    fix = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model"
    require(largest, f"{problem}; {fix}")
    return largest


def fits_in_memory(forward: torch.nn.Module, cfg: TrainConfig, rt: Runtime, B: int) -> bool:
    """Whether forward and backward passes of B sequences fit on this rank's GPU, beside the weights and the optimizer
    state, which are there already. Leaves nothing behind but the compiled code, which training reuses."""
    idx, targets = torch.zeros(2, B, cfg.sequence_length, dtype=torch.int64, device=rt.device)  # (B, T) each
    loss = None
    forward.require_backward_grad_sync = False  # DDP: another rank may fail in this backward pass
    try:
        # The second pass runs with the first's gradients in memory, as all micro-steps but the first do.
        for _ in range(2):
            with rt.autocast():
                _, loss = forward(idx, targets)
            loss.backward()
        fits = True
    except RuntimeError as e:
        # While compiling, or in the backward thread, it is not always an OutOfMemoryError.
        if not re.search("out of memory|OutOfMemory|ALLOC_FAILED", f"{type(e).__name__} {e}"):
            raise
        fits = False

    # The exception and its frames are gone here, so all memory of the try can be released.
    del idx, targets, loss
    forward.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    if rt.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return fits
