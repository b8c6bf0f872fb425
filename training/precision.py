"""The precision of a run: one that every rank's device has, chosen by measurement, and the same again on resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from system import machine
from system.ranks import Runtime
from system.script import print0, require
from training.config import TrainConfig

ALL = (torch.bfloat16, torch.float16, torch.float32)  # in the order of preference


def settle(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None = None) -> Runtime:
    """The Runtime with the precision that all ranks use: the one asked for, else the one the run began with (`saved` is
    its train state), else the fastest that all of them have. Says which and why. Gradients of different precisions or
    loss scales must not be averaged. Raises UserError if a rank lacks what was asked for."""
    common = common_precisions(rt)
    began = None
    if saved:  # versions before this entry took the first
        began = saved.get("dtype", name(machine.precisions(rt.device)[0]))
    if cfg.dtype != "auto":
        dtype, why = getattr(torch, cfg.dtype), "by --dtype"
        if rt.device.type == "cuda":
            mend = f"use --dtype {name(common[0])}, or leave it out"
            require(dtype in common, f"--dtype {cfg.dtype}: not every GPU of this run has it; {mend}")
    elif began in map(name, common):
        dtype, why = getattr(torch, began), "as the run began"
    else:
        dtype, why = fastest(cfg, rt, common)
    print0(f"precision: {name(dtype)}, {why}")
    if began and began != name(dtype):
        print0(f"resume: the run began in {began} and goes on in {name(dtype)}: its losses may differ by rounding")
    if dtype == torch.float16 and cfg.weights == "bfloat16":
        print0(
            "--weights bfloat16 needs a GPU that has it: here the weights stay in float32, with a float16 loss scale"
        )
    return replace(rt, dtype=dtype)


def common_precisions(rt: Runtime) -> list[torch.dtype]:
    """What every rank's device multiplies in hardware, the preferred first. Every rank must call it."""
    mine = machine.precisions(rt.device)
    has = torch.stack(rt.gather(torch.tensor([float(dtype in mine) for dtype in ALL], device=rt.device)))
    return [dtype for dtype, everywhere in zip(ALL, has.bool().all(0).tolist(), strict=True) if everywhere]


def fastest(cfg: TrainConfig, rt: Runtime, common: list[torch.dtype]) -> tuple[torch.dtype, str]:
    """The fastest precision that all ranks have, and why it is."""
    if rt.device.type == "cuda":
        if common != machine.precisions(rt.device):
            return common[0], "which every GPU of this run has"
        return common[0], "which this GPU multiplies fastest"
    if torch.bfloat16 not in common:
        return torch.float32, "as no faster precision is in this hardware"
    gain = machine.bfloat16_gain(1024, cfg.model.n_embd, min(cfg.model.vocab_size, 4096))
    gain = rt.all_reduce(torch.tensor(gain, device=rt.device), "min").item()
    dtype = torch.bfloat16 if gain >= machine.CLEAR_GAIN else torch.float32
    return dtype, f"as bfloat16 multiplies {gain:.1f} times as fast as float32 here"


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
