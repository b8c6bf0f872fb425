"""The plan of a run: what it will do, take and cost, printed before it starts; and its result, at the end.

print_plan(cfg, rt, model, data, now, max_steps)
check_disk(cfg, trainer, max_steps)
print_result(cfg, first_step, step, seconds)
dry_run(cfg, rt)                                # --dry-run: measures a step on this machine
evaluate_weights(cfg, rt)                       # --eval-only
print0(predict(cfg, "8xH100"))                  # --card 8xH100: needs no GPU and no data, and takes a second
"""

import json
import math
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch

from checkpoints.checkpoint import read_train_state
from checkpoints.open_model import open_model
from checkpoints.run_folder import complete_steps, describe_best, model_path
from evaluation.evaluations import list_facts, make_list, measure, open_list
from lifecycle.build import build_trainer
from lifecycle.microbatch import divisors_of_share
from lifecycle.open_run import find_checkpoint, open_data, open_first_weights
from model import GPT
from system import distributed, machine
from system.cards import MIN_WIDTH, Card, find_cards, total_peak_flops
from system.distributed import Runtime, check_ranks
from system.errors import require
from system.files import atomic_write
from system.printing import format_cost, format_duration, print0
from tokens.shards import read_manifest
from training import optim
from training.config import TrainConfig
from training.loader import Loader
from training.presets import PRESETS, is_network_from_init
from training.schedule import Step, at, count_steps
from training.step import Trainer

# Bytes of a float32 weight and its gradient, or of both in bfloat16 beside a float32 master weight.
WEIGHT_AND_GRADIENT_BYTES = 8

# The part of the compiled program's speed that an uncompiled one reaches, as build-nanogpt's on an H100.
EAGER_SPEED = 0.69

# The tokens of a step of the published run with the fewest, the lecture's. Smaller steps leave a GPU idle.
MIN_TOKENS = 16_384

# How fast the state of a run is copied from a GPU; assumed, not measured.
COPY_BYTES_PER_S = 2e10

# Up to so many epochs repeated data are nearly as good as new ones (Muennighoff et al. 2023, arXiv 2305.16264).
MAX_EPOCHS = 4


def print_plan(cfg: TrainConfig, rt: Runtime, model: GPT, data: Loader | None, now: Step, max_steps: int) -> None:
    """Print what the run from step `now` on will do, and warn of what is likely a mistake. Every rank must call
    this."""
    devices = describe_devices(rt.gather(machine.device_name(rt.device)))
    print0(f"run        {cfg.preset}, in {cfg.run_dir}")
    print0(f"network    {model.num_params():,} parameters, a context of {cfg.model.block_size}; seed {cfg.seed}")
    print0(f"machine    {devices}, {machine.dtype_name(rt.dtype)}, torch {torch.__version__}")
    print0(f"steps      {now.number:,} to {max_steps:,}, each of {now.sequences * cfg.sequence_length:,} tokens")
    if cfg.warmup_steps > max_steps:
        print0(f"warning: --warmup-steps {cfg.warmup_steps} of {max_steps} steps: the rate never reaches its peak")
    if data is None:
        print0(f"data       {cfg.data_dir}: this folder does not exist yet")
        return
    epoch_tokens = data.order.sequences_per_epoch * data.T  # of whole sequences
    epochs = at(max_steps, cfg, max_steps).sequences_before * data.T / epoch_tokens
    print0(f"data       {cfg.data_dir}: {epoch_tokens:,} tokens in {len(data.files)} shards, read {epochs:.2f} times")
    is_presets_length = cfg.preset in PRESETS and cfg.max_steps == PRESETS[cfg.preset].max_steps
    if epochs > MAX_EPOCHS and not cfg.overfit_single_batch:
        print0(f"warning: more than {MAX_EPOCHS} times teaches little; to read them less often: --max-steps")
    elif epochs > 1.05 and cfg.max_steps and is_presets_length:
        problem = f"one epoch of this data has {max_steps / epochs:,.0f} steps, but {cfg.preset} takes {max_steps:,}"
        print0(f"warning: {problem}; use more shards, or --epochs 1")
    manifest = read_manifest(cfg.data_dir)
    if manifest and not manifest.complete:
        print0(f"warning: {cfg.data_dir} is unfinished: run fineweb.py again first; no run resumes on other data")


def describe_devices(names: list[str]) -> str:
    """2 x RTX 2080 Ti + 1 x RTX 3090, of the devices of all ranks."""
    return " + ".join(f"{count} x {name}" for name, count in Counter(names).items())


def check_disk(cfg: TrainConfig, trainer: Trainer, max_steps: int) -> None:
    """Raise UserError, before a step is paid for, if the disk has no room for the checkpoints that are still to come
    after the trainer's step. For rank 0."""
    # A run always saves at its end. --save-every adds saves; --keep deletes all but these, the best, and the one that
    # is being written. A resumed run has some of them already.
    saves = math.ceil(max_steps / cfg.save_every) - trainer.state.step // cfg.save_every if cfg.save_every else 1
    if cfg.keep:
        saves = min(saves, max(1, cfg.keep + 2 - len(complete_steps(cfg.run_dir))))

    cfg.run_dir.mkdir(parents=True, exist_ok=True)
    # The first step creates the optimizers' state.
    size = trainer.state.num_bytes() + optim.state_bytes(trainer.model, cfg)
    free = shutil.disk_usage(cfg.run_dir).free
    problem = f"{saves} checkpoints of {size / 1e9:.2f} GB do not fit on the disk of {cfg.run_dir}"
    fix = "use --keep 1, a larger --save-every or another --out-dir"
    require(saves * size <= free, f"{problem}, {free / 1e9:.1f} GB free; {fix}")


def write_config(cfg: TrainConfig, rt: Runtime, max_steps: int) -> None:
    """Write OUT/config.json, on rank 0: the resolved settings and the versions behind the run, for people and plots."""
    content = cfg.to_dict() | {
        "out_dir": str(cfg.run_dir),
        "resolved_max_steps": max_steps,
        "world_size": rt.world_size,
        "versions": machine.versions(),
    }
    with atomic_write(cfg.run_dir / "config.json") as f:
        f.write(json.dumps(content, indent=2).encode() + b"\n")


def print_result(cfg: TrainConfig, first_step: int, step: int, seconds: float) -> None:
    """Print how a run has finished, where its weights are, and which earlier ones are better. For rank 0."""
    weights = f"{model_path(cfg.run_dir, step)}{describe_best(cfg.run_dir)}"
    print0(f"done: steps {first_step} to {step} in {format_duration(seconds)}: {weights}")


# ------------------------------------------------------------------------- without training


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: print the plan, then memory, step time as measured here, ETA and dollars. Needs no data if the preset
    fixes the number of steps. Nothing is saved. Every rank must call it."""
    model = open_first_weights(cfg)
    cfg = replace(cfg, model=model.config)
    has_data = Path(cfg.data_dir).is_dir() or not cfg.max_steps
    data = open_data(cfg) if has_data else None
    max_steps = count_steps(cfg, data.order.sequences_per_epoch if data else 0)
    rt = distributed.choose_precision(rt, cfg.dtype)
    saved = find_checkpoint(cfg) if cfg.resume != "none" else None
    now = at(saved["step"] if saved else 0, cfg, max_steps)
    print_plan(cfg, rt, model, data, now, max_steps)
    trainer = build_trainer(model, cfg, rt, max_steps)
    trainer.set_step(now)
    B, T = trainer.B, cfg.sequence_length

    # Steps of one and of two micro-steps, as a whole one may take minutes. What the second adds is a micro-step; the
    # rest comes once a step: the ranks' average, clipping and the update. The first compiles; the fastest counts.
    print0(f"measuring steps of one and two micro-steps of {B} x {T} random tokens; on a CPU that may take minutes")
    batch = torch.randint(min(cfg.model.vocab_size, 2**16), (2, B, T + 1)).to(torch.uint16)
    seconds = {1: math.inf, 2: math.inf}
    for count in (1, 2, 1, 2, 1, 2):
        start_time = time.perf_counter()
        trainer.compute_gradients(batch[:count])
        trainer.update()
        trainer.finish_step()
        rt.synchronize()  # work on a GPU is queued
        seconds[count] = min(seconds[count], time.perf_counter() - start_time)

    micro_steps = now.sequences // rt.world_size // B
    micro_s = min(seconds[1], seconds[2] - seconds[1])  # noise may make the difference too large
    step_s = seconds[1] + (micro_steps - 1) * micro_s
    peak_gb = machine.peak_memory(rt.device) / 2**30
    print0(f"dry run: peak memory per rank {peak_gb:.1f} GiB; {micro_steps} micro-steps of {micro_s * 1e3:,.0f} ms")
    print0(describe_speed(cfg, model, step_s, now, max_steps, rt.world_size, total_peak_flops(rt)))


def evaluate_weights(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: print what a run would measure of the weights that --resume or --init-from names. Every rank must
    call this.

    For OpenAI's 124M (--init-from gpt2) expect a val loss of about 3.29 on FineWeb-Edu, and 0.2955 in HellaSwag
    (acc_norm). Raises UserError without weights or data."""
    weights = {"none": cfg.init_from, "auto": str(cfg.run_dir)}.get(cfg.resume, cfg.resume)
    require(weights != "scratch", "--eval-only needs trained weights: add --resume log/RUN, or --init-from gpt2")
    # A resumed run would measure the weights at the step of the checkpoint. Other weights are taken to be final ones.
    step = max_steps = 1
    if cfg.resume != "none":
        saved = read_train_state(weights)
        step, max_steps = saved["step"], saved["max_steps"]
    model = open_model(weights)

    # In sequences no longer than the model's context. Not compiled: compiling would take longer than it saves.
    T = min(cfg.sequence_length, model.config.block_size)
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
    batch = B * rt.world_size * T
    cfg = replace(cfg, model=model.config, sequence_length=T, total_batch_size=batch, micro_batch_size=B, compile=False)
    rt = distributed.choose_precision(rt, cfg.dtype)
    evaluations = open_list(cfg)
    require(evaluations, "--eval-only: all evaluations are off; use --val-every 1")
    check_ranks(rt, list_facts(evaluations), "give every machine the same files")
    trainer = build_trainer(model, cfg, rt, max_steps)
    trainer.set_step(at(step, cfg, max_steps))
    measure(evaluations, trainer, f"{weights} on {cfg.data_dir}, in {machine.dtype_name(rt.dtype)}")


def predict(cfg: TrainConfig, card: str) -> str:
    """--card: what the run would take on other cards. Raises UserError for unknown cards, a batch that they cannot
    share, a network that is too small or only known from its weights, float32, and steps that depend on the data.

    step time = tokens * FLOPs per token / (GPUs * peak FLOP/s of the slowest * the MFU that it reaches)
    """
    is_known = not is_network_from_init(cfg) or cfg.init_from == PRESETS[cfg.preset].init_from
    require(is_known, f"--card does not open --init-from {cfg.init_from}; say --model.n-layer, --model.n-embd")
    cards = find_cards(card)
    model = GPT.without_memory(cfg.model)
    fix = "measure it there: --dry-run"
    require(cfg.model.n_embd >= MIN_WIDTH, f"--card does not predict networks as small as {cfg.preset}'s; {fix}")
    require(cfg.dtype != "float32", f"--card does not predict --dtype float32; {fix}")

    # Without --max-steps, the length of the run depends on the data.
    max_steps = cfg.max_steps or count_steps(cfg, open_data(cfg).order.sequences_per_epoch)
    divisors_of_share(cfg, len(cards), max_steps)  # what a run on these cards would refuse

    optimizer_bytes = optim.state_bytes(model, cfg, len(cards) if cfg.zero_stage else 1)
    needed_gb = (WEIGHT_AND_GRADIENT_BYTES * model.num_params() + optimizer_bytes) / 1e9
    gb = min(card.gb for card in cards)
    verdict = "fit, beside activations" if needed_gb < gb else "do not fit: use a larger card"
    peak_flops = 1e12 * sum(card.tflops for card in cards)
    now = at(0, cfg, max_steps)
    step_s = predict_step_s(cfg, cards, now)
    speed = describe_speed(cfg, model, step_s, now, max_steps, len(cards), peak_flops)
    evidence = "of 12 published runs, 9 are within 15%, all within 25% (docs/running.md)"
    if cfg.total_batch_size < MIN_TOKENS * len(cards):
        evidence = f"steps may take much longer: no published run has fewer than {MIN_TOKENS:,} tokens a step on a GPU"
    devices = describe_devices([card.name for card in cards])
    return (
        f"{cfg.preset}: {model.num_params():,} parameters on {devices}; predicted, nothing was run\n"
        f"weights, gradients and optimizer state: {needed_gb:.1f} of {gb} GB per card; they {verdict}\n"
        f"{speed}\n"
        f"{evidence}; to measure, use --dry-run on that machine"
    )


def predict_step_s(cfg: TrainConfig, cards: list[Card], now: Step) -> float:
    """Seconds of a step on these GPUs. They share the step evenly, and wait for the slowest one. The backward pass is
    assumed to hide what they send each other."""
    tokens = now.sequences * cfg.sequence_length
    flops = tokens * GPT.without_memory(cfg.model).flops_per_token(cfg.sequence_length)
    slowest = min(card.tflops * card.mfu for card in cards)
    seconds = flops / (len(cards) * 1e12 * slowest)
    if cfg.recompute:
        seconds *= 4 / 3  # one more forward pass, of the three that a step takes
    return seconds if cfg.compile else seconds / EAGER_SPEED


def predict_pauses_s(cfg: TrainConfig, state_bytes: int, step: int, max_steps: int, tokens_per_second: float) -> float:
    """Seconds from `step` on in which a run does not train: its evaluations, and its saves, until their copy of
    state_bytes is in host memory. A token without gradients takes a third of a token of training."""
    steps = [at(number, cfg, max_steps) for number in range(step, max_steps + 1)]
    pauses_s = sum(now.is_due(cfg.save_every) for now in steps) * state_bytes / COPY_BYTES_PER_S
    for evaluation in make_list(cfg):
        count = sum(evaluation.is_due(now) for now in steps)
        pauses_s += count * (evaluation.tokens / 3 / tokens_per_second + evaluation.seconds)
    return pauses_s


def describe_speed(
    cfg: TrainConfig,
    model: GPT,
    step_s: float,
    now: Step,
    max_steps: int,
    gpus: int,
    peak_flops: float | None,
) -> str:
    """The speed, length and price of a run from step `now` on, which takes `step_s` seconds. peak_flops: of all GPUs,
    if known."""
    sequences_per_second = now.sequences / step_s
    tokens_per_second = sequences_per_second * cfg.sequence_length
    mfu = "unknown"
    if peak_flops:
        mfu = f"{tokens_per_second * model.flops_per_token(cfg.sequence_length) / peak_flops:.1%}"
    steps_s = (at(max_steps, cfg, max_steps).sequences_before - now.sequences_before) / sequences_per_second
    state_bytes = 4 * model.num_params() + optim.state_bytes(model, cfg)  # the weights are in float32
    pauses_s = predict_pauses_s(cfg, state_bytes, now.number, max_steps, tokens_per_second)

    def describe(seconds: float) -> str:
        cost = f", {format_cost(seconds, gpus, cfg.gpu_hour_usd)}" if cfg.gpu_hour_usd else ""
        return f"{format_duration(seconds)}{cost}"

    return (
        f"step {step_s * 1e3:,.0f} ms: {tokens_per_second:,.0f} tokens/s, MFU {mfu}\n"
        f"{max_steps - now.number:,} steps take {describe(steps_s)}\n"
        f"evaluations, samples and saves take about {describe(pauses_s)}: in all {describe(steps_s + pauses_s)}"
    )
