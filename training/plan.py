"""The plan: what a run will do and cost, said before it starts."""

import json
import shutil
import time
from collections.abc import Callable

import torch

from system import machine, precision
from system.cli import print0, require
from system.files import atomic_write
from system.units import format_duration
from tokens import shards
from tokens.loader import Loader
from training import optim
from training.metrics import Pace
from training.resume import Run
from training.step import Step


def describe(step: Step, data: Loader | None, run: Run) -> None:
    """Print the facts of the run."""
    cfg, rt, model, T = step.cfg, step.rt, step.model, step.cfg.sequence_length
    where = f"{rt.world_size} x {machine.device_name(rt.device)}, {str(rt.dtype).removeprefix('torch.')}"
    print0(f"{cfg.preset}: {model.num_params():,} parameters on {where}, torch {torch.__version__}, seed {cfg.seed}")
    tokens = run.max_steps * cfg.total_batch_size
    found, total = "not there yet", f"{tokens:,} tokens"
    if data:
        epochs = tokens / (data.order.per_epoch * T)
        found = f"{len(data.paths)} train shards, {sum(data.tokens):,} tokens"
        total += f", {epochs:.2f} epochs of this data"
    print0(f"data {cfg.data_dir}: {found}")
    split = f"{rt.world_size} x {cfg.sequences_per_step // rt.world_size // step.B} x {step.B} x {T}"
    each = f"{cfg.total_batch_size:,} tokens (ranks x micro-steps x sequences x T: {split})"
    print0(f"steps {run.step} to {run.max_steps} of {each}; {total}")
    if data and data.manifest is None:
        print0(f"warning: no {shards.MANIFEST} with these shards: headers, sizes and ids are checked, hashes are not")
    elif data and not data.manifest.complete:
        print0(f"warning: {cfg.data_dir} is unfinished: finish it first (fineweb.py); no run resumes on other data")
    if cfg.warmup_steps >= run.max_steps:
        print0(f"warning: --warmup-steps {cfg.warmup_steps} of {run.max_steps} steps: the rate never reaches its peak")
    if (
        cfg.weights == "bfloat16"
        and rt.device.type == "cpu"
        and torch.bfloat16 not in precision.supported_dtypes(rt.device)
    ):
        print0("warning: --weights bfloat16 on a CPU without bfloat16 is many times slower than --weights float32")
    # Muennighoff et al. 2023, on repeated data
    if data and epochs > 1.05 * cfg.epochs and not cfg.overfit_single_batch:
        why = f"{tokens:,} tokens are {epochs:.1f} passes over this data; up to 4 are nearly as good as new data"
        print0(f"warning: {why}; get more (fineweb.py; hub.py pull-data without --limit-shards), or lower --max-steps")


def check_disk(step: Step, run: Run) -> None:
    """Raise UserError, before anything is paid for, if the disk has no room for the checkpoints that are still to come:
    the weights in float32 and what the optimizers keep."""
    cfg = step.cfg
    saves = 1
    if cfg.save_every:
        saves = -(-run.max_steps // cfg.save_every) - run.step // cfg.save_every
    if cfg.keep:
        saves = min(saves, cfg.keep + 2)  # the best, and the one that is being written
    kept = (optim.state_size(o, p) for o in step.optimizers for group in o.param_groups for p in group["params"])
    each = 4 * (step.model.num_params() + sum(kept))
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cfg.run_dir).free
    why = (
        f"{saves} checkpoints of {each / 1e9:.2f} GB do not fit on the disk of {cfg.run_dir}, {free / 1e9:.1f} GB free"
    )
    require(saves * each <= free, f"{why}; use --keep 2, a larger --save-every or another --out-dir")


def write_config(step: Step, run: Run) -> None:
    """OUT/config.json: the resolved config and the code version behind the run, for people and plots. Code that differs
    from its commit goes to OUT/code_{start:05d}.diff."""
    cfg = step.cfg
    if step.rt.is_main:
        cfg.run_dir.mkdir(parents=True, exist_ok=True)
        more = {"out_dir": str(cfg.run_dir), "resolved_max_steps": run.max_steps, "world_size": step.rt.world_size}
        text = json.dumps({**cfg.to_dict(), **more, "versions": machine.versions()}, indent=2) + "\n"
        with atomic_write(cfg.run_dir / "config.json") as f:
            f.write(text.encode())
        changes = cfg.run_dir / f"code_{run.start:05d}.diff"
        changes.unlink(missing_ok=True)  # of an earlier start from this step
        if diff := machine.git("diff", "--no-ext-diff", "--no-color", "HEAD", "--", "."):
            changes.write_text(diff)


def estimate(step: Step, max_steps: int) -> None:
    """--dry-run: memory, step time as measured here, ETA and dollars."""
    cfg, rt = step.cfg, step.rt

    def seconds(work: Callable[[], object]) -> float:
        rt.synchronize()
        t0 = time.perf_counter()
        work()
        rt.synchronize()
        return time.perf_counter() - t0

    one, two = (torch.zeros(n, step.B, cfg.sequence_length + 1, dtype=torch.uint16) for n in (1, 2))
    timed = []
    for _ in range(4):  # the first compiles
        timed.append([seconds(lambda: step.gradients(two)), seconds(step.update), seconds(lambda: step.gradients(one))])
        step.update()
    two_s, update_s, one_s = (min(times) for times in zip(*timed, strict=True))
    peak = machine.peak_memory(rt.device)
    micro_steps = cfg.sequences_per_step // rt.world_size // step.B
    # a micro-step more costs the difference; what the ranks spend on reducing gradients comes once, and is in both
    micro_s = two_s - one_s if two_s > one_s else two_s / 2
    step_s = one_s + (micro_steps - 1) * micro_s + update_s
    hours = max_steps * step_s / 3600
    speed = Pace(step).step(step_s)
    mfu = f"{speed['mfu']:.1%}" if speed["mfu"] else "unknown"
    usd = f"${hours * cfg.gpu_hour_usd * rt.world_size:.2f}" if cfg.gpu_hour_usd else "price: --gpu-hour-usd"
    print0(f"dry run: peak memory per rank {peak / 2**30:.1f} GiB, with gradients and optimizer state")
    print0(
        f"step {step_s * 1e3:,.0f} ms ({micro_steps} micro-steps of {micro_s * 1e3:,.0f} ms, {update_s * 1e3:,.0f} ms "
        f"to update): {speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu}; "
        "excluding evaluation"
    )
    print0(f"{max_steps} steps take {format_duration(hours * 3600)}; {usd}")
