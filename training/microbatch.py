"""The micro-batch: how many sequences one forward pass of one rank takes. It is chosen by a rehearsal, which compiles
all that is compiled.

    B = choose_micro_batch_size(cfg, rt, loss, reserved_bytes, max_steps)
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from system import machine
from system.distributed import Runtime
from system.errors import UserError
from system.printing import print0
from training.config import TrainConfig
from training.loader import to_device
from training.loss import Loss
from training.schedule import common_batch

MAX_AUTO_SEQUENCES = 64

# The memory that `auto` leaves free beyond what a step takes, for NCCL's buffers, kernels that are loaded later,
# HellaSwag and fragmentation: at least this many bytes, and at least this fraction of the card.
MIN_BALLAST_BYTES = 2**30
BALLAST_FRACTION = 0.04

MEMORY_FIX = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model, or a larger card"

OUT_OF_MEMORY = "out of memory"


def choose_micro_batch_size(cfg: TrainConfig, rt: Runtime, loss: Loss, reserved_bytes: int, max_steps: int) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` the largest that fits, the same on all ranks.

    reserved_bytes: what the first update allocates on this rank, the optimizers' state. Raises UserError if the batch
    does not divide evenly, or if not even one sequence fits. Every rank must call it.
    """
    divisors = divisors_of_share(cfg, rt.world_size, max_steps)
    T = cfg.sequence_length
    if cfg.micro_batch_size != "auto":
        sizes = [cfg.micro_batch_size]
    elif rt.device.type == "cpu":
        # Running out of memory raises no useful error, so sizes cannot be tried. Take the largest whose activations in
        # the blocks, about 80 bytes per channel, stay under 3 GB.
        channels = T * cfg.model.n_layer * cfg.model.n_embd
        sizes = [next((B for B in divisors if B <= MAX_AUTO_SEQUENCES and B * channels <= 2**25), 1)]
    else:
        # More sequences at once are faster. Each try compiles, so each size is at most half of the one before.
        sizes = []
        for B in divisors:
            if B <= MAX_AUTO_SEQUENCES and (not sizes or 2 * B <= sizes[-1]):
                sizes.append(B)

    for B in sizes:
        ballast = reserved_bytes
        if cfg.micro_batch_size == "auto" and rt.device.type == "cuda":
            ballast += max(MIN_BALLAST_BYTES, int(BALLAST_FRACTION * torch.cuda.mem_get_info(rt.device)[1]))
        if rehearse(cfg, rt, loss, B, ballast):
            return B
    raise UserError(f"out of memory with {B} x {T} tokens at once; lower --micro-batch-size, or {MEMORY_FIX}")


def divisors_of_share(cfg: TrainConfig, world_size: int, max_steps: int) -> list[int]:
    """The sizes that a micro-batch may have, the largest first, which is all sequences that a rank takes in a step.
    Raises UserError if the step does not split evenly over the ranks, or a rank's share over its micro-batches."""
    sequences = common_batch(max_steps, cfg)  # in every step
    if sequences % world_size:
        nearest = max(1, round(sequences / world_size)) * world_size * cfg.sequence_length
        rule = f"is {sequences} sequences of {cfg.sequence_length}, which do not split evenly over {world_size} ranks"
        raise UserError(f"--total-batch-size {cfg.total_batch_size} {rule}; use --total-batch-size {nearest}")

    # A number that was asked for must divide a rank's share, so that all micro-batches have one size.
    share = sequences // world_size
    divisors = [d for d in range(share, 0, -1) if share % d == 0]
    B = cfg.micro_batch_size
    if B != "auto" and B not in divisors:
        nearest = min(divisors, key=lambda divisor: abs(divisor - B))
        rule = f"does not divide the {share} sequences that each of {world_size} ranks takes per step"
        raise UserError(f"--micro-batch-size {B} {rule}; use --micro-batch-size {nearest} (or auto)")
    return divisors


def rehearse(cfg: TrainConfig, rt: Runtime, loss: Loss, B: int, ballast: int) -> bool:
    """Whether micro-batches of B sequences fit in the memory of every rank. If the compiler fails on one, all ranks go
    on uncompiled. Every rank must call it.

    Found out in the first step, a lack of memory or of a compiler would look like a crash, which is restarted.
    """
    # On a CPU without the compiler, nothing can fail that is not a crash.
    if rt.device.type == "cpu" and not loss.compiles:
        return True

    problems = rt.gather(try_passes(cfg, rt, loss, B, ballast))
    failures = [problem for problem in problems if problem not in ("", OUT_OF_MEMORY)]
    if failures:
        loss.compiles = False
        print0(f"training without torch.compile, several times slower: {failures[0]}")
        problems = rt.gather(try_passes(cfg, rt, loss, B, ballast))
    return not any(problems)


def try_passes(cfg: TrainConfig, rt: Runtime, loss: Loss, B: int, ballast: int) -> str:
    """What keeps this rank from the passes of a step and of validation, beside `ballast` bytes for what is allocated
    later: nothing (""), OUT_OF_MEMORY, or what the compiler says. Leaves nothing behind but the compiled code, which
    training reuses. Makes no collective."""
    reserved = None
    problem = ""
    try:
        if rt.device.type == "cuda":
            reserved = torch.empty(ballast, dtype=torch.uint8, device=rt.device)
        run_passes(cfg, rt, loss, B)
    except Exception as e:
        if machine.is_out_of_memory(e):
            problem = OUT_OF_MEMORY
        elif loss.compiles:
            problem = describe_compiler_error(e)
        else:
            raise

    # Here the exception and its frames are freed, so all memory of this attempt can be released.
    loss.zero_grad(set_to_none=True)
    del reserved
    if rt.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return problem


def run_passes(cfg: TrainConfig, rt: Runtime, loss: Loss, B: int) -> None:
    """Forward and backward over two micro-batches of zeros: the second runs beside the gradients of the first, as it
    will beside DDP's buckets. Then the forward pass of validation, which is another graph."""
    for tokens in torch.zeros(2, B, cfg.sequence_length + 1, dtype=torch.uint16):
        x, y = to_device(tokens, rt.device)  # (B, T) each
        with rt.autocast():
            objective, _ = loss(x, y)
        objective.backward()
    if cfg.val_every:
        with torch.no_grad(), rt.autocast():
            loss(x, y)


def describe_compiler_error(error: Exception) -> str:
    """One line: what a compiler of C++ or C has called an error, else the beginning of what torch says."""
    lines = f"{type(error).__name__}: {error}".split("\n\nSet TORCH")[0].splitlines()
    errors = [line for line in lines if "error:" in line]
    return f"{' '.join(errors[:1] or lines[:2]):.200}"


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
