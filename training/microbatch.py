"""The micro-batch: how many sequences one forward pass of one rank takes. It is chosen by a rehearsal, which compiles
all that is compiled.

    B = choose_micro_batch_size(cfg, rt, loss, reserved_bytes, max_steps)
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from system import machine
from system.distributed import Runtime
from system.errors import UserError, require
from system.printing import print0
from training.config import TrainConfig
from training.loader import to_device
from training.loss import Loss
from training.schedule import common_batch

MAX_AUTO_SEQUENCES = 64

MEMORY_FIX = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model, or a larger card"

COMPILER_FIX = (
    f"it needs a C compiler and Python's headers: sudo apt-get install gcc python3.{sys.version_info.minor}-dev; "
    "--no-compile goes on without, and takes 1.45 times as long"
)

OUT_OF_MEMORY = "out of memory"


def choose_micro_batch_size(cfg: TrainConfig, rt: Runtime, loss: Loss, reserved_bytes: int, max_steps: int) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` the largest that fits, the same on all ranks.

    reserved_bytes: what the first update allocates on this rank, the optimizers' state. Raises UserError if the batch
    does not divide evenly, or if not even one sequence fits. Every rank must call it.
    """
    sizes = divisors_of_share(cfg, rt.world_size, max_steps)
    asked = cfg.micro_batch_size
    channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
    limit, ballast = MAX_AUTO_SEQUENCES, reserved_bytes
    if asked != "auto":
        sizes, limit = [asked], asked
    elif rt.device.type == "cuda":
        # Leave memory free beyond what a step takes, for NCCL's buffers, kernels that are loaded later, HellaSwag and
        # fragmentation: 4% of the card, but at least a gibibyte. The smallest card decides.
        card_bytes = min(rt.gather(torch.cuda.mem_get_info(rt.device)[1]))
        ballast += max(2**30, card_bytes // 25)
        # A try compiles, which takes a minute: none is of a size whose activations alone do not fit. Compiled, in
        # bfloat16, the backward pass needs 34 bytes per channel; with --recompute the input of each block, at least 2.
        limit = min(limit, (card_bytes - ballast) // (channels * (2 if cfg.recompute else 34)))
    else:
        # Running out of memory raises no useful error. The activations in the blocks, here about 80 bytes per channel,
        # stay under 3 GB.
        limit = min(limit, 2**25 // channels)

    # More sequences at once are faster. Each size that is tried is at most half of the one before.
    for B in sizes:
        if B <= limit or B == 1:
            if rehearse(cfg, rt, loss, B, ballast):
                return B
            limit = B // 2
    tokens = f"{B} x {cfg.sequence_length} tokens"
    raise UserError(f"out of memory with {tokens} at once; lower --micro-batch-size, or {MEMORY_FIX}")


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
    on uncompiled; on GPUs that is a UserError, because every hour of the run would cost more. Every rank must call it.

    Found out in the first step, a lack of memory or of a compiler would look like a crash, which is restarted.
    """
    # On a CPU without the compiler, nothing can fail that is not a crash.
    if rt.device.type == "cpu" and not loss.compiles:
        return True

    problems = rt.gather(try_passes(cfg, rt, loss, B, ballast))
    failures = [problem for problem in problems if problem not in ("", OUT_OF_MEMORY)]
    if failures:
        # What fails without the compiler, too, such as the card, is raised here.
        loss.compiles = False
        fits = rehearse(cfg, rt, loss, B, ballast)
        require(rt.device.type != "cuda", f"torch.compile fails ({failures[0]}); {COMPILER_FIX}")
        print0(f"training without torch.compile, several times slower: {failures[0]}")
        return fits
    return not any(problems)


def try_passes(cfg: TrainConfig, rt: Runtime, loss: Loss, B: int, ballast: int) -> str:
    """What keeps this rank from the passes of a step and of validation, beside `ballast` bytes for what is allocated
    later: nothing (""), OUT_OF_MEMORY, or what the compiler says. Leaves nothing behind but the compiled code, which
    training reuses. Makes no collective."""
    reserved = None
    problem = ""
    try:
        reserved = torch.empty(ballast, dtype=torch.uint8, device=rt.device)
        run_passes(cfg, rt, loss, B)
    except Exception as e:
        if machine.is_out_of_memory(e):
            problem = OUT_OF_MEMORY
        elif loss.compiles:
            # What a compiler of C++ or C has called an error, else the beginning of what torch says.
            lines = f"{type(e).__name__}: {e}".splitlines()
            errors = [line for line in lines if "error:" in line]
            problem = f"{' '.join(errors[:1] or lines[:2]):.200}"
        else:
            raise

    # Here the exception and its frames are freed, so all memory of this attempt can be released.
    loss.zero_grad()
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


@contextmanager
def explain_out_of_memory(rt: Runtime) -> Iterator[None]:
    """Turn an error that would come again with the same settings into one line that says what to do."""
    try:
        yield
    except RuntimeError as e:
        if not machine.is_out_of_memory(e):
            raise
        problem = f"out of memory on rank {rt.rank}: {e!s:.160}"
        raise UserError(f"{problem}; lower --micro-batch-size, or {MEMORY_FIX}") from None
