"""The plan of a run: what it will do and cost, printed before it starts.

    print_plan(train_step, data, run); check_disk(train_step, run); write_config(train_step, run)
    seconds = print_estimate(train_step, run.max_steps)      # --dry-run: measures a step

Called by train_gpt2.py. training/predict.py predicts the same for other cards.
"""

import json
import math
import os
import shlex
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

from system import machine
from system.cli import format_cost, format_duration, print0, require
from system.distributed import Runtime
from system.files import atomic_write, free_bytes
from system.machine import dtype_name
from tokens import shards
from tokens.loader import Loader
from training import optim, schedule
from training.config import TrainConfig
from training.metrics import Throughput
from training.run_state import RunState
from training.step import TrainStep

BACKGROUND_FROM_S = 3600  # longer runs are suggested with train.sh
GOOD_PASSES = 4  # over the same data, without a warning


def print_plan(train_step: TrainStep, data: Loader | None, run: RunState) -> None:
    """Print the facts of the run, and warn of what is likely a mistake. Every rank must call it."""
    cfg, rt, model = train_step.cfg, train_step.rt, train_step.model
    T, B = cfg.sequence_length, train_step.micro_batch_size

    # The network and where it is trained.
    names = Counter(rt.gather(machine.device_name(rt.device)))
    devices = " + ".join(f"{count} x {name}" for name, count in names.items())
    print0(
        f"{cfg.preset}: {model.num_params():,} parameters on {devices}, {dtype_name(rt.dtype)}, "
        f"torch {torch.__version__}, seed {cfg.seed}"
    )

    # The data.
    total_tokens = run.max_steps * cfg.total_batch_size
    if data:
        print0(f"data {cfg.data_dir}: {len(data.paths)} train shards, {sum(data.tokens):,} tokens")
    else:
        print0(f"data {cfg.data_dir}: this folder does not exist yet")

    # The steps, and how each is split.
    micro_steps = cfg.sequences_per_step // rt.world_size // B
    split = f"{rt.world_size} x {micro_steps} x {B} x {T}"
    per_step = f"{cfg.total_batch_size:,} tokens (ranks x micro-steps x sequences x T: {split})"
    epochs = total_tokens / (data.order.sequences_per_epoch * T) if data else None
    total = f"{total_tokens:,} tokens" + (f", {epochs:.2f} epochs of this data" if data else "")
    print0(f"steps {run.step} to {run.max_steps} of {per_step}; {total}")

    # The optimizer: two runs that differ only in this look the same in all other lines.
    optimizer = f"{cfg.optimizer} {cfg.max_lr:g}"
    if cfg.optimizer == "muon":
        optimizer = f"muon {cfg.muon_lr:g} for the blocks' matrices, adamw {cfg.max_lr:g} for the rest"
    print0(f"optimizer {optimizer}; {cfg.schedule} schedule, {cfg.warmup_steps} warm-up steps")

    # Warnings: data that nobody has checked or finished, a rate that never peaks, a precision that is emulated.
    if data and data.manifest is None:
        print0(f"warning: no {shards.MANIFEST} with these shards: headers, sizes and ids are checked, hashes are not")
    elif data and not data.manifest.complete:
        fix = "finish it first (fineweb.py), because a run cannot resume when its data have changed"
        print0(f"warning: {cfg.data_dir} is unfinished: {fix}")
    if cfg.warmup_steps >= run.max_steps:
        print0(f"warning: --warmup-steps {cfg.warmup_steps} of {run.max_steps} steps: the rate never reaches its peak")
    drop = schedule.describe_drop(cfg, run.max_steps)
    if drop:
        print0(f"warning: {drop}")
    emulates_bfloat16 = torch.bfloat16 not in machine.supported_dtypes(rt.device)
    if cfg.weights == "bfloat16" and rt.device.type == "cpu" and emulates_bfloat16:
        print0("warning: --weights bfloat16 on a CPU without bfloat16 is many times slower than --weights float32")
    # Up to four passes over the data are nearly as good as new data (Muennighoff et al. 2023). Passes that --epochs
    # asks for are the user's choice; a remainder of a batch may add a little to them.
    if epochs and epochs > max(GOOD_PASSES, 1.05 * cfg.epochs) and not cfg.overfit_single_batch:
        problem = f"{total_tokens:,} tokens are {epochs:.1f} passes over this data"
        problem += f"; up to {GOOD_PASSES} are nearly as good as new data"
        fix = "get more (fineweb.py; hub.py pull-data without --limit-shards), or lower --max-steps"
        print0(f"warning: {problem}; {fix}")


def check_disk(train_step: TrainStep, run: RunState) -> None:
    """Raise UserError, before anything is paid for, if the disk has no room for the checkpoints that are still to come:
    the weights in float32 and the state of the optimizers."""
    # How many checkpoints, and how large: float32 numbers of four bytes each.
    cfg = train_step.cfg
    saves = remaining_saves(cfg, run)
    state_numel = sum(
        optim.state_numel(type(optim.unwrap(optimizer)), optim.all_params(optimizer))
        for optimizer in train_step.optimizers
    )
    bytes_per_save = 4 * (train_step.model.num_params() + state_numel)

    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    free = free_bytes(cfg.run_dir)
    problem = f"{saves} checkpoints of {bytes_per_save / 1e9:.2f} GB do not fit on the disk of {cfg.run_dir}"
    fix = "use --keep 2, a larger --save-every or another --out-dir"
    require(saves * bytes_per_save <= free, f"{problem}, {free / 1e9:.1f} GB free; {fix}")


def remaining_saves(cfg: TrainConfig, run: RunState) -> int:
    """How many checkpoints will be on the disk at the same time, of those that this run is still to write."""
    # A run always saves at its end. --save-every adds saves, --keep deletes old ones.
    saves = 1
    if cfg.save_every:
        saves = math.ceil(run.max_steps / cfg.save_every) - run.step // cfg.save_every
    if cfg.keep:
        saves = min(saves, cfg.keep + 2)  # besides those kept: the best, and the one that is being written
    return saves


def write_config(train_step: TrainStep, run: RunState) -> None:
    """Write OUT/config.json: the resolved config and the code version behind the run, for people and plots. Code that
    differs from its commit goes to OUT/code_{start_step:05d}.diff."""
    cfg = train_step.cfg
    if not train_step.rt.is_main:
        return

    # The resolved settings, and the facts that are known only now.
    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    content = {
        **cfg.to_dict(),
        "out_dir": str(cfg.run_dir),
        "resolved_max_steps": run.max_steps,
        "world_size": train_step.rt.world_size,
        "versions": machine.versions(),
    }
    text = json.dumps(content, indent=2) + "\n"
    with atomic_write(cfg.run_dir / "config.json") as f:
        f.write(text.encode())

    # Replace the diff that an earlier start from the same step may have left.
    diff_path = cfg.run_dir / f"code_{run.start_step:05d}.diff"
    diff_path.unlink(missing_ok=True)

    # git prints nothing where the code is that of the commit, or is no clone.
    diff = machine.git("diff", "--no-ext-diff", "--no-color", "HEAD", "--", ".")
    if diff:
        diff_path.write_text(diff)


def print_estimate(train_step: TrainStep, max_steps: int) -> float:
    """--dry-run: print memory, step time as measured here, ETA and dollars. It trains on zeros, and saves nothing.
    Returns the seconds that all steps take."""
    cfg, rt, B = train_step.cfg, train_step.rt, train_step.micro_batch_size

    # Work on a GPU is queued: wait for it on both sides of the clock.
    def measure_s(work: Callable[[], object]) -> float:
        rt.synchronize()
        start_time = time.perf_counter()
        work()
        rt.synchronize()
        return time.perf_counter() - start_time

    # Time two micro-steps, an update, and one micro-step; the first round compiles, the fastest of each counts.
    one, two = (torch.zeros(n, B, cfg.sequence_length + 1, dtype=torch.uint16) for n in (1, 2))
    rounds = []
    for _ in range(4):
        two_s = measure_s(lambda: train_step.compute_gradients(two))
        update_s = measure_s(train_step.update)
        one_s = measure_s(lambda: train_step.compute_gradients(one))
        train_step.update()
        rounds.append((two_s, update_s, one_s))
    two_s, update_s, one_s = (min(times) for times in zip(*rounds, strict=True))

    # The difference is the time of one more micro-step. Both times include the reduction over the ranks, done once.
    micro_steps = cfg.sequences_per_step // rt.world_size // B
    micro_s = two_s - one_s if two_s > one_s else two_s / 2
    step_s = one_s + (micro_steps - 1) * micro_s + update_s
    total_s = max_steps * step_s

    # Report the estimate in the units of a run's log lines.
    speed = Throughput(train_step).update(step_s)
    mfu = f"{speed['mfu']:.1%}" if speed["mfu"] else "unknown"
    peak_gib = machine.peak_memory(rt.device) / 2**30
    print0(f"dry run: peak memory per rank {peak_gib:.1f} GiB, with gradients and optimizer state")
    print0(
        f"step {step_s * 1e3:,.0f} ms ({micro_steps} micro-steps of {micro_s * 1e3:,.0f} ms, {update_s * 1e3:,.0f} ms "
        f"to update): {speed['tokens_per_second']:,.0f} tokens/s, MFU {mfu}; excluding evaluation"
    )
    cost = format_cost(total_s, rt.world_size, cfg.gpu_hour_usd)
    print0(f"{max_steps} steps take {format_duration(total_s)}; {cost}")
    return total_s


def next_command(words: list[str], rt: Runtime, seconds: float) -> str:
    """The last line of --dry-run: the command that trains, where all steps take so many seconds. `words` are the
    arguments of the dry run."""
    # Several machines need a command on each.
    if spans_machines(rt):
        return "next: the same command on every machine, without --dry-run"

    # A run of hours should survive the end of the session: train.sh runs it in the background, on every GPU.
    flags = without_dry_run(words)
    if seconds < BACKGROUND_FROM_S:
        return f"next: {start_command(rt)} {flags}".rstrip()
    where = "in the background" if rt.device.type == "cuda" else "on a machine with GPUs"
    return f"next, {where}: ./train.sh {flags}".rstrip()


def how_to_resume(argv: list[str], cfg: TrainConfig, rt: Runtime) -> str:
    """How to resume a run that was stopped. `argv` is sys.argv: for a run that a user started by hand, the command to
    paste is added."""
    # train.sh resumes its own runs, and a run on several machines needs a command on each.
    flag = resume_flag(argv, cfg)
    text = f"run the same command with {flag}"
    is_by_hand = Path(argv[0]).name == "train_gpt2.py" and "TRAIN_STATUS_FILE" not in os.environ
    if not is_by_hand or spans_machines(rt):
        return text

    # The words as they were typed, except for the checkpoint that this run itself was resumed from.
    words = []
    for previous, word in pairwise(["", *argv[1:]]):
        if word.partition("=")[0] != "--resume" and previous != "--resume":
            words.append(word)
    return f"{text}: {' '.join([start_command(rt), *map(shlex.quote, words), flag])}"


def resume_flag(argv: list[str], cfg: TrainConfig) -> str:
    """The flag that resumes this run when it is added to the command in `argv`."""
    # --resume auto needs the preset and the run folder. A command that names a checkpoint and no preset has both from
    # that checkpoint; the run's own checkpoints have them, too.
    has_preset = len(argv) > 1 and not argv[1].startswith("-")
    if cfg.resume in ("none", "auto") or has_preset:
        return "--resume auto"
    return f"--resume {shlex.quote(str(cfg.run_dir))}"


def start_command(rt: Runtime) -> str:
    """What starts the ranks of this run, if all are on this machine."""
    # One rank needs no torchrun.
    program = "python" if rt.world_size == 1 else f"torchrun --standalone --nproc_per_node={rt.world_size}"
    return f"{program} train_gpt2.py"


def spans_machines(rt: Runtime) -> bool:
    """Whether the run has ranks on other machines."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < rt.world_size


def without_dry_run(words: list[str]) -> str:
    """The arguments of a dry run, to paste, without what only a dry run takes: --dry-run, and --card with its value."""
    # A flag is --card=8xH100 or --card 8xH100, with hyphens or underscores.
    kept = []
    for previous, word in pairwise(["", *words]):
        name = word.partition("=")[0].replace("_", "-")
        if name not in ("--dry-run", "--card") and previous != "--card":
            kept.append(word)
    return shlex.join(kept)
