"""What a run will do and cost, before it starts: how a step splits into micro-batches, memory, time, money."""

import gc
import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

import torch

import runtime
import shards
from cli import UserError, print0
from config import TrainConfig
from files import whole_file
from loader import Loader
from metrics import duration
from model import GPT
from runtime import Runtime


class Pace:
    """How fast a run is: step time, tokens per second, MFU (None if the card's peak is unknown), time to go."""

    def __init__(self, cfg: TrainConfig, rt: Runtime, model: GPT):
        self.tokens, self.flops = cfg.total_batch_size, model.flops_per_token(cfg.sequence_length)
        self.peak = (runtime.peak_flops(rt.device) or 0) * rt.world_size
        self.steps, self.smooth_s = 0, 0.0

    def step(self, seconds: float) -> dict[str, Any]:
        self.smooth_s = seconds if self.steps < 3 else 0.9 * self.smooth_s + 0.1 * seconds  # the first ones compile
        self.steps += 1
        rate = self.tokens / seconds
        mfu = rate * self.flops / self.peak if self.peak else None
        return {"step_ms": seconds * 1e3, "tokens_per_second": rate, "mfu": mfu}

    def eta_s(self, steps: int) -> float:
        """Seconds that `steps` more will take; NaN after the first step, which is not representative."""
        return self.smooth_s * steps if self.steps > 1 else math.nan


def micro_batch_size(cfg: TrainConfig, rt: Runtime, model: GPT, forward: torch.nn.Module) -> int:
    """Sequences per forward pass. auto: the largest divisor of a rank's share (at most 64) whose forward and backward
    fit in memory with the optimizer state; tried on the device, and all ranks use the smallest result of any."""
    S, W = cfg.sequences_per_step, rt.world_size
    if S % W:
        why = f"{S} sequences of {cfg.sequence_length}, which do not split evenly over {W} ranks"
        mend = f"use --total-batch-size {max(1, round(S / W)) * W * cfg.sequence_length}"
        raise UserError(f"--total-batch-size {cfg.total_batch_size} is {why}; {mend}")
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
        # running out of main memory raises no useful error: keep the logits, perhaps held twice, near half a GB
        return next((b for b in choices if b * cfg.sequence_length * cfg.model.vocab_size <= 2**27), 1)
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
    if not B:
        why = f"out of memory with {choices[-1]} sequence(s) of {cfg.sequence_length} tokens per rank"
        mend = "use --recompute, --zero-stage 1 (on several GPUs), a smaller --sequence-length or model"
        raise UserError(f"{why}; {mend}")
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


def describe(
    cfg: TrainConfig, rt: Runtime, model: GPT, data: Loader | None, max_steps: int, start: int, B: int
) -> None:
    """Print the facts of the run."""
    T, tokens = cfg.sequence_length, max_steps * cfg.total_batch_size
    epochs = tokens / (data.order.per_epoch * T) if data else 0.0
    where = f"{rt.world_size} x {runtime.device_name(rt.device)}, {str(rt.dtype).removeprefix('torch.')}"
    print0(f"{cfg.preset}: {model.num_params():,} parameters on {where}, torch {torch.__version__}, seed {cfg.seed}")
    found = f"{len(data.paths)} train shards, {sum(data.tokens):,} tokens" if data else "not there yet"
    print0(f"data {cfg.data_dir}: {found}")
    split = f"{rt.world_size} x {cfg.sequences_per_step // rt.world_size // B} x {B} x {T}"
    step = f"{cfg.total_batch_size:,} tokens (ranks x micro-steps x sequences x T: {split})"
    total = f"{tokens:,} tokens" + (f", {epochs:.2f} epochs of this data" if data else "")
    print0(f"steps {start} to {max_steps} of {step}; {total}")
    if data and data.manifest is None:
        print0(f"warning: no {shards.MANIFEST} with these shards: headers, sizes and ids are checked, hashes are not")
    elif data and not data.manifest.complete:
        print0(f"warning: {cfg.data_dir} is unfinished: finish it first (fineweb.py); no run resumes on other data")
    if cfg.warmup_steps >= max_steps:
        print0(f"warning: --warmup-steps {cfg.warmup_steps} of {max_steps} steps: the rate never reaches its peak")
    if cfg.weights == "bfloat16" and rt.device.type == "cpu" and not runtime.cpu_has_bfloat16():
        print0("warning: --weights bfloat16 on a CPU without bfloat16 is many times slower than --weights float32")
    # Muennighoff et al. 2023: up to 4 epochs are nearly as good as new data
    if epochs > 4.5 and not cfg.overfit_single_batch:
        print0(f"warning: {epochs:.0f} passes over the same data, and those past 4 add little; --max-steps limits them")


def write_config(cfg: TrainConfig, rt: Runtime, max_steps: int, start: int) -> None:
    """OUT/config.json: the resolved config and the code version behind the run, for people and plots. Code that differs
    from its commit goes to OUT/code_{start:05d}.diff."""
    if rt.is_main:
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        resolved = {"out_dir": str(cfg.run_dir), "resolved_max_steps": max_steps, "world_size": rt.world_size}
        text = json.dumps({**cfg.to_dict(), **resolved, "versions": runtime.versions()}, indent=2) + "\n"
        with whole_file(cfg.run_dir / "config.json") as f:
            f.write(text.encode())
        changes = cfg.run_dir / f"code_{start:05d}.diff"
        changes.unlink(missing_ok=True)  # of an earlier start from this step
        if diff := runtime.git("diff", "--no-ext-diff", "--no-color", "HEAD", "--", "."):
            changes.write_text(diff)


def estimate(
    cfg: TrainConfig, rt: Runtime, model: GPT, run: Callable[[torch.Tensor], torch.Tensor],
    update: Callable[[], None], steps: int, B: int,
) -> None:  # fmt: skip
    """--dry-run: memory, step time as measured here, ETA and dollars. `run` does forward and backward of (n, B, T + 1)
    tokens, and compiles on its first call; `update` does the optimizer's part."""

    def seconds(work: Callable[[], object]) -> float:
        rt.synchronize()
        t0 = time.perf_counter()
        work()
        rt.synchronize()
        return time.perf_counter() - t0

    batch = torch.zeros(2, B, cfg.sequence_length + 1, dtype=torch.uint16)
    timed = [(seconds(lambda: run(batch)), seconds(update)) for _ in range(4)]  # in turns: an update takes gradients
    run_s, update_s = map(min, zip(*timed, strict=True))
    peak = rt.peak_memory()
    reduce_s = 0.0
    if rt.world_size > 1:
        gradients = torch.zeros(model.num_params(), dtype=model.lm_head.weight.dtype, device=rt.device)
        reduce_s = min(seconds(lambda: rt.all_reduce(gradients)) for _ in range(4))
    micro_steps = cfg.sequences_per_step // rt.world_size // B
    step_s = run_s / len(batch) * micro_steps + update_s + reduce_s
    hours = steps * step_s / 3600
    speed = Pace(cfg, rt, model).step(step_s)
    mfu = f"{speed['mfu']:.1%}" if speed["mfu"] else "unknown"
    usd = f"${hours * cfg.gpu_hour_usd * rt.world_size:.2f}" if cfg.gpu_hour_usd else "price: --gpu-hour-usd"
    print0(
        f"dry run: peak memory per rank {peak / 2**30:.1f} GiB, with gradients and optimizer state\n"
        f"step {step_s * 1e3:,.0f} ms ({micro_steps} micro-steps, plus {update_s * 1e3:,.0f} ms to update"
        + (f" and {reduce_s * 1e3:,.0f} ms to reduce gradients, less what overlaps" if reduce_s else "")
        + f"): {speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu}; excluding evaluation\n"
        f"{steps} steps take {duration(hours * 3600)}; {usd}"
    )
