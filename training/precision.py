"""The precision of a training run: one that every rank's device has, and the same one after a resume.

    rt = agree_on_dtype(cfg, rt, saved)     # prints "precision: bfloat16, ..."

Called by train_gpt2.py before it builds the model; hellaswag.py lets its ranks agree by choose_common_dtype.
system/precision.py knows what a device supports.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from model import GPTConfig
from system import precision
from system.cli import print0, require
from system.distributed import Runtime
from system.units import dtype_name
from training.config import TrainConfig


def agree_on_dtype(
    cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None = None, network: GPTConfig | None = None
) -> Runtime:
    """The Runtime with the precision that all ranks use: the one asked for by --dtype, else the one the run began with
    (`saved` is its train state), else the fastest that all ranks have. Prints which and why. `network`: what
    will run, if that is not cfg.model.

    All ranks must agree, because gradients of different precisions or loss scales must not be averaged. Every rank must
    call it. Raises UserError if a GPU lacks what was asked for.
    """
    # Every rank takes part in this, whatever it is asked for.
    common = common_dtypes(rt)

    # The precision of the run so far. Versions before November 2026 saved no dtype and used the preferred one.
    began_in = None
    if saved:
        began_in = saved.get("dtype", dtype_name(precision.supported_dtypes(rt.device)[0]))

    # The flag takes precedence, then the precision of the run so far, then the fastest one.
    if cfg.dtype != "auto":
        dtype, reason = getattr(torch, cfg.dtype), "by --dtype"
        if rt.device.type == "cuda":
            fix = f"use --dtype {dtype_name(common[0])}, or leave it out"
            require(dtype in common, f"--dtype {cfg.dtype}: not every GPU of this run has it; {fix}")
    elif began_in in map(dtype_name, common):
        dtype, reason = getattr(torch, began_in), "as the run began"
    else:
        network = network or cfg.model
        workload = precision.Workload(rows=1024, width=network.n_embd, columns=min(network.vocab_size, 4096))
        dtype, reason = choose_common_dtype(rt, common, workload)

    # Print the choice, and what it changes.
    print0(f"precision: {dtype_name(dtype)}, {reason}")
    if began_in and began_in != dtype_name(dtype):
        print0(
            f"resume: the run began in {began_in} and continues in {dtype_name(dtype)}: losses may differ by rounding"
        )
    if dtype == torch.float16 and cfg.weights == "bfloat16":
        print0("--weights bfloat16 needs a GPU with bfloat16: here weights stay in float32, with a float16 loss scale")
    return replace(rt, dtype=dtype)


def choose_common_dtype(
    rt: Runtime, common: list[torch.dtype], workload: precision.Workload
) -> tuple[torch.dtype, str]:
    """Of the `common_dtypes` the fastest for `workload`, and the reason; the same on all ranks. Every rank must call
    it."""
    # A CPU measures how much faster bfloat16 is. The slowest rank decides, because all wait for it.
    return precision.choose_dtype(
        rt.device,
        workload,
        available=common,
        agree=lambda speedup: rt.all_reduce(torch.tensor(speedup, device=rt.device), "min").item(),
    )


def common_dtypes(rt: Runtime) -> list[torch.dtype]:
    """The precisions that the devices of all ranks multiply in hardware, the preferred one first. Every rank must call
    it."""
    # Each rank reports which precisions it has. The common ones are those that all ranks have.
    own = precision.supported_dtypes(rt.device)
    flags = torch.tensor([float(dtype in own) for dtype in precision.PREFERRED_DTYPES], device=rt.device)  # (3,)
    on_all_ranks = torch.stack(rt.all_gather(flags)).bool().all(dim=0)  # (ranks, 3) -> (3,)
    return [dtype for dtype, common in zip(precision.PREFERRED_DTYPES, on_all_ranks.tolist(), strict=True) if common]
