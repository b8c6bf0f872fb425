"""The micro-batch: how many sequences one forward pass takes."""

import gc
import math
import re

import torch

from model import GPT
from system.cli import UserError, require
from system.distributed import Runtime
from training.config import TrainConfig


def micro_batch_size(cfg: TrainConfig, rt: Runtime, model: GPT, forward: torch.nn.Module) -> int:
    """Sequences per forward pass. auto: the largest divisor of a rank's share (at most 64) whose forward and backward
    fit in memory with the optimizer state; tried on the device, and all ranks use the smallest result of any."""
    S, W = cfg.sequences_per_step, rt.world_size
    why = f"{S} sequences of {cfg.sequence_length}, which do not split evenly over {W} ranks"
    mend = f"use --total-batch-size {max(1, round(S / W)) * W * cfg.sequence_length}"
    require(S % W == 0, f"--total-batch-size {cfg.total_batch_size} is {why}; {mend}")
    share, B = S // W, cfg.micro_batch_size
    fits = [b for b in range(1, share + 1) if share % b == 0]
    if B in fits:
        return B
    if B != "auto":
        near = min(fits, key=lambda b: abs(b - B))
        rule = f"does not divide the {share} sequences that each of {W} ranks takes per step"
        raise UserError(f"--micro-batch-size {B} {rule}; use --micro-batch-size {near} (or auto)")
    choices = [b for b in reversed(fits) if b <= 64]
    if rt.device.type != "cuda":
        # running out of main memory raises no useful error: hold the blocks, some 80 bytes a channel, under 3 GB
        channels = cfg.sequence_length * cfg.model.n_layer * cfg.model.n_embd
        return next((b for b in choices if b * channels <= 2**25), 1)
    return probe(model, forward, cfg, rt, choices)


def probe(model: GPT, forward: torch.nn.Module, cfg: TrainConfig, rt: Runtime, choices: list[int]) -> int:
    """The largest micro-batch of the descending `choices` that fits on every rank; each try at least halves it,
    because each try compiles. Raises UserError if none fits."""
    B, tried = 0, math.inf
    for b in choices:
        if 2 * b <= tried:
            tried = b
            if fits_in_memory(model, forward, cfg, rt, b):
                B = b
                break
    B = int(rt.all_reduce(torch.tensor(float(B), device=rt.device), "min").item())
    why = f"out of memory with {choices[-1]} sequence(s) of {cfg.sequence_length} tokens per rank"
    require(B, f"{why}; use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model")
    return B


def fits_in_memory(model: GPT, forward: torch.nn.Module, cfg: TrainConfig, rt: Runtime, B: int) -> bool:
    """Whether micro-steps of B sequences fit, with room for AdamW's two moments, which the first step will allocate.
    Leaves nothing behind but the compiled code of `forward`, which training reuses."""
    idx, targets = torch.zeros(2, B, cfg.sequence_length, dtype=torch.int64, device=rt.device)
    moments = loss = None
    forward.require_backward_grad_sync = False  # another rank may fail in this backward
    try:
        moments = torch.empty(2 * model.num_params(), device=rt.device)
        for _ in range(2):  # the second runs with the first's gradients in memory
            with rt.autocast():
                _, loss = forward(idx, targets)
            loss.backward()
        fits = True
    except RuntimeError as e:  # while compiling, or in the backward thread, not always an OutOfMemoryError
        if not re.search("out of memory|OutOfMemory|ALLOC_FAILED", f"{type(e).__name__} {e}"):
            raise
        fits = False
    del idx, targets, moments, loss  # the exception's frames are gone, too: the cache can be released
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.empty_cache()
    if rt.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return fits
