"""The micro-batch: how many sequences one forward pass of one rank takes. A rehearsal of the passes chooses it, and
compiles everything that the run compiles.

    trainer.B = choose_micro_batch_size(trainer, max_steps, has_state=False)
"""

import gc
import sys

import torch

from system import machine
from system.errors import UserError, require
from system.printing import print0
from training.config import TrainConfig
from training.loader import to_device
from training.optim import state_bytes, uses_zero
from training.schedule import common_batch
from training.step import Trainer

MAX_AUTO_SEQUENCES = 64

MEMORY_FIX = (
    "lower --micro-batch-size, or use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or "
    "model, or a larger card"
)

COMPILER_FIX = (
    f"it needs a C compiler and Python's headers: sudo apt-get install gcc python3.{sys.version_info.minor}-dev; "
    "--no-compile goes on without, and takes 1.45 times as long"
)

OUT_OF_MEMORY = "out of memory"


def choose_micro_batch_size(trainer: Trainer, max_steps: int, has_state: bool) -> int:
    """Sequences per forward pass: the number asked for, or with `auto` a large one that fits, the same on all ranks.

    has_state: whether the optimizers have their state already, as in a resumed run; the first update of a new run
    allocates it. Raises UserError if the batch does not divide evenly, or if not even one sequence fits. Every rank
    must call this.
    """
    cfg, rt = trainer.cfg, trainer.rt
    shards = rt.world_size if uses_zero(cfg, rt) else 1
    reserved_bytes = 0 if has_state else state_bytes(trainer.model, cfg, shards)
    sizes = divisors_of_share(cfg, rt.world_size, max_steps)
    asked = cfg.micro_batch_size
    limit, ballast = MAX_AUTO_SEQUENCES, reserved_bytes
    if asked != "auto":
        sizes, limit = [asked], asked
    elif rt.device.type == "cuda":
        # Leave 4% of the card free, but at least a gibibyte: for NCCL's buffers, kernels that are loaded later,
        # HellaSwag and fragmentation. The smallest card decides.
        card_bytes = min(rt.gather(torch.cuda.mem_get_info(rt.device)[1]))
        ballast += max(2**30, card_bytes // 25)
        # Each try compiles, which takes a minute. So no size is tried that cannot fit.
        sizes = [B for B in sizes if B == 1 or ballast + estimate_bytes(trainer, B, card_bytes) <= card_bytes]
    else:
        # Without a GPU, running out of memory raises no useful error. So the activations in the blocks, about 80 bytes
        # per channel, stay under 3 GB.
        limit = min(limit, 2**25 // (cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd))

    # More sequences at once are faster. After a size that does not fit, the next one is at most half as large.
    for B in sizes:
        if B <= limit or B == 1:
            if rehearse(trainer, B, ballast):
                return B
            limit = B // 2
    tokens = f"{B} x {cfg.sequence_length} tokens"
    raise UserError(f"out of memory with {tokens} at once; {MEMORY_FIX}")


def estimate_bytes(trainer: Trainer, B: int, card_bytes: int) -> int:
    """The memory that the passes of a compiled step take on a GPU of `card_bytes`, with micro-batches of B sequences:
    weights, gradients, a chunk of the logits (training/head.py), and what the blocks keep for the backward pass."""
    # A block keeps 34.4 bytes per channel in gpt2-124m, and 36.1 in record8-124m, by an offline compile; with
    # --recompute at least 2, for its input.
    cfg = trainer.cfg
    kept = B * cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd * (2 if cfg.recompute else 37)
    return 8 * trainer.model.num_params() + card_bytes // 24 + kept


def divisors_of_share(cfg: TrainConfig, world_size: int, max_steps: int) -> list[int]:
    """The sizes that a micro-batch may have, the largest first. The largest is all sequences of a rank in one step.
    Raises UserError if a step does not split evenly over the ranks, or a rank's share over its micro-batches."""
    sequences = common_batch(cfg, max_steps)  # in every step
    if sequences % world_size:
        nearest = max(1, round(sequences / world_size)) * world_size * cfg.sequence_length
        rule = f"is {sequences} sequences of {cfg.sequence_length}, which do not split evenly over {world_size} ranks"
        raise UserError(f"--total-batch-size {cfg.total_batch_size} {rule}; use --total-batch-size {nearest}")

    # --micro-batch-size must divide a rank's share, so that all micro-batches have the same size.
    share = sequences // world_size
    divisors = [d for d in range(share, 0, -1) if share % d == 0]
    B = cfg.micro_batch_size
    if B != "auto" and B not in divisors:
        nearest = min(divisors, key=lambda divisor: abs(divisor - B))
        rule = f"does not divide the {share} sequences that each of {world_size} ranks takes per step"
        raise UserError(f"--micro-batch-size {B} {rule}; use --micro-batch-size {nearest} (or auto)")
    return divisors


def rehearse(trainer: Trainer, B: int, ballast: int) -> bool:
    """Whether micro-batches of B sequences fit in the memory of every rank. If the compiler fails on one rank, all
    ranks train without it. On GPUs that is a UserError instead, because every hour of the run would cost more. Every
    rank must call this.

    Without a rehearsal, the first step would find out that memory or a compiler is missing. That would look like a
    crash, and train.sh would restart the run.
    """
    # On a CPU without the compiler, there is nothing to rehearse.
    rt, loss = trainer.rt, trainer.loss
    if rt.device.type == "cpu" and not loss.compiles:
        return True

    problems = rt.gather(try_passes(trainer, B, ballast))
    failures = [problem for problem in problems if problem not in ("", OUT_OF_MEMORY)]
    if failures:
        # If the passes fail without the compiler, too, as on a broken card, this raises the error.
        loss.compiles = False
        fits = rehearse(trainer, B, ballast)
        require(rt.device.type != "cuda", f"torch.compile fails ({failures[0]}); {COMPILER_FIX}")
        print0(f"training without torch.compile, which is slower: {failures[0]}")
        return fits
    return not any(problems)


def try_passes(trainer: Trainer, B: int, ballast: int) -> str:
    """Run the passes of a step and of validation on this rank, with `ballast` bytes allocated for what comes later.
    Returns "" if they succeed, OUT_OF_MEMORY, or the compiler's error. Only the compiled code remains, which training
    reuses. This calls no collective."""
    rt, loss = trainer.rt, trainer.loss
    reserved = None
    problem = ""
    try:
        reserved = torch.empty(ballast, dtype=torch.uint8, device=rt.device)
        run_passes(trainer, B)
    except Exception as e:
        if machine.is_out_of_memory(e):
            problem = OUT_OF_MEMORY
        elif loss.compiles:
            # The line that a C or C++ compiler calls an error, or else the first lines of torch's message.
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


def run_passes(trainer: Trainer, B: int) -> None:
    """Forward and backward over two micro-batches of zeros: the second runs beside the gradients of the first, as it
    will beside DDP's buckets. Then the forward pass of validation, which is another graph."""
    cfg, rt, loss = trainer.cfg, trainer.rt, trainer.loss
    for tokens in torch.zeros(2, B, cfg.sequence_length + 1, dtype=torch.uint16):
        x, y = to_device(tokens, rt.device)  # (B, T) each
        with rt.autocast():
            objective, _ = loss(x, y)
        objective.backward()
    if cfg.val_every:
        with torch.no_grad(), rt.autocast():
            loss(x, y)
