"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m/model_19073.pt --epochs 2      # go on from a checkpoint
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

import cli
import runtime

cli.thread_waits()  # before torch is imported
import torch

import checkpoint
import files
import hellaswag
import optim
import plan
import reference
import resume
import shards
import tokenizer
from cli import UserError, print0
from config import TrainConfig, adopts, parse, parse_duration
from loader import Loader, to_device
from metrics import RunLog, duration
from model import GPT
from runtime import Runtime


def train(cfg: TrainConfig, rt: Runtime, stop: dict[str, Any]) -> None:
    """One run from its first (or resumed) step to its last. A handler that sets stop["signal"] ends it cleanly."""
    data_dir = local_data(cfg, rt)
    data = train_loader(cfg, data_dir)
    val_data = Loader(data_dir, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    max_steps = cfg.horizon(data.order.per_epoch)
    data_id = shards.fingerprint(data_dir)
    saved = resume.find(cfg, data_id, max_steps)
    start = saved["step"] if saved else 0
    if saved and (start > max_steps or (start == max_steps and saved["evaluated"])):
        further = f"--max-steps {2 * start}" if cfg.max_steps else f"--epochs {cfg.epochs + 1}"
        return print0(f"{cfg.run_dir} is complete at step {start}; go on with --resume auto {further}, for example")

    torch.manual_seed(cfg.seed)
    model = make_model(cfg, rt, saved)
    cfg = replace(cfg, model=model.config)  # which --init-from may have brought, with a vocabulary that is not padded
    weights = optim.Weights(model, cfg)
    optimizers = optim.build(weights, cfg, rt)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
    forward = compiled(model, cfg, rt)
    trained = distributed(forward, rt)
    B = plan.micro_batch_size(cfg, rt, model, trained)
    if saved:
        resume.restore(saved, optimizers, scaler, rt)
    plan.describe(cfg, rt, model, data, max_steps, start, B)
    plan.record(cfg, rt, max_steps)
    examples = hellaswag.examples_at_hand(cfg.hellaswag_data, cfg.model) if cfg.hellaswag_every else []
    sample_every = cfg.sample_every if cfg.model.vocab_size >= tokenizer.VOCAB_SIZE else 0
    if cfg.sample_every and not sample_every:
        print0(f"samples are off: the model has {cfg.model.vocab_size} tokens, fewer than GPT-2's")
    log = RunLog(cfg.run_dir, start, cfg.tracker, cfg.to_dict(), rt.is_main)
    writer = checkpoint.Writer(cfg.run_dir, cfg.keep)
    batches = data.batches(start, cfg.sequences_per_step, B, rt, fixed=cfg.overfit_single_batch)
    record, best, done = (saved["record"], saved["best"], saved["evaluated"]) if saved else ({"step": 0}, None, False)
    step_s, skipped, peak = 0.0, 0, runtime.peak_flops(rt.device)
    began, limit = time.monotonic(), parse_duration(cfg.time_limit)

    def save(step: int, evaluated: bool) -> None:
        nonlocal best  # of the steps that are saved: one that is not cannot be kept
        if (loss := record.get("val_loss")) is not None and (best is None or loss < best["val_loss"]):
            best = {"step": step, "val_loss": loss}
        state = resume.train_state(cfg, rt, step, optimizers, scaler, data_id, max_steps)
        if rt.is_main:
            file = checkpoint.model_file(model, step, val_loss=record.get("val_loss"), preset=cfg.preset)
            state |= {"record": record, "best": best, "evaluated": evaluated}
            log.flush()
            writer.save(step, file | {"model": weights.state_dict()}, state, best and best["step"])

    def asked() -> bool:
        return bool(stop["signal"]) or time.monotonic() - began > limit

    def check() -> None:
        """Stop if a rank was asked to. Time spares the first evaluation, or a short limit would let no step happen."""
        if rt.any(asked() if step > start else stop["signal"]):
            raise resume.Stopped

    try:
        halt = rt.any(stop["signal"])
        for step in range(start, max_steps + 1):
            if halt:
                raise resume.Stopped
            last = step == max_steps
            # evaluate, checkpoint, sample: what a checkpoint carries as done is not done again
            if not done and due(cfg.val_every, step, last):
                record["val_loss"] = validate(forward, val_data, cfg, rt, B, check)
                print0(f"step {step:5d}/{max_steps} | val loss: {record['val_loss']:.4f}")
                if cfg.preset == "gpt2-124m" and "edu" in data.paths[0].name:
                    if line := reference.on_track(step, record["val_loss"]):
                        print0(line)
            if not done and examples and due(cfg.hellaswag_every, step, last):
                found = hellaswag.evaluate(model, examples, rt.device, rt, check)
                record |= {"hellaswag_acc": found["acc"], "hellaswag_acc_norm": found["acc_norm"]}
                print0(f"step {step:5d}/{max_steps} | {hellaswag.in_words(found)}")
            if not done and step and (last or due(cfg.save_every, step, last)):
                save(step, evaluated=True)
            if not done and step and due(sample_every, step, last) and rt.is_main:
                log.text(step, samples(model, cfg, rt, asked))
            if last:
                break
            done = False
            # accumulate
            batch = next(batches)
            t0 = time.perf_counter()
            mine = accumulate(trained, batch, rt, scaler)
            # clip, agree, set lr, step
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(weights.gradients(), cfg.grad_clip or math.inf)
            # all ranks learn the mean loss, and whether one of them has to stop or has a norm that is not finite
            flags = torch.full((2,), float(asked()), device=rt.device)
            flags[1] = ~norm.isfinite()
            loss, halt, bad = rt.all_reduce(torch.cat([mine[None] / rt.world_size, flags])).tolist()
            norm = norm.item()
            lr = optim.set_schedule(optimizers, step, max_steps, cfg)
            writer.copied()  # what is being saved changes now
            if math.isfinite(loss) and not bad:
                for optimizer in optimizers:
                    scaler.step(optimizer)
                weights.publish()
            elif math.isfinite(loss) and scaler.get_scale() > 1:
                print0(
                    f"step {step}: float16 gradients overflow at loss scale {scaler.get_scale():g}; skipped, it halves"
                )
            else:
                skipped += 1
                resume.refuse(cfg, rt, step, mine.item(), norm, skipped, data, B, writer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            # log; on a GPU the update itself is still under way, and is on the next step's clock
            step_ms = (time.perf_counter() - t0) * 1e3
            rate = cfg.total_batch_size / step_ms * 1e3
            mfu = rate * model.flops_per_token(cfg.sequence_length) / (peak * rt.world_size) if peak else None
            record.update(train_loss=loss, lr=lr, grad_norm=norm, step_ms=step_ms, tokens_per_second=rate, mfu=mfu)
            log.write(record)
            step_s = step_ms / 1e3 if step - start < 3 else 0.9 * step_s + 0.1 * step_ms / 1e3  # the first ones compile
            eta_s = step_s * (max_steps - step - 1) if step > start else math.nan
            log.console(record, max_steps, eta_s, cfg.gpu_hour_usd * rt.world_size)
            record = {"step": step + 1}
        log.write(record)
        took = duration(time.monotonic() - began)
        said = f"done: {max_steps} steps in {took}; {checkpoint.model_path(cfg.run_dir, max_steps)}"
        if best and best["step"] < max_steps:
            said += f"\nbest val loss {best['val_loss']:.4f}: {checkpoint.model_path(cfg.run_dir, best['step'])}"
    except resume.Stopped:
        record = record if done else {"step": step}  # half an evaluation is none
        save(step, evaluated=done)
        why = "the time limit" if time.monotonic() - began > limit else "the time limit or another rank's signal"
        why = f"signal {stop['signal']}" if stop["signal"] else why
        said = f"stopped by {why} at step {step}, all saved; go on with: {resume.command(cfg, step)}"
    log.close()
    writer.wait()
    rt.barrier()  # a rank that leaves may end the others, which may still be writing
    print0(said)


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: the plan and its price; needs no data where the preset fixes the number of steps."""
    fixed = cfg.max_steps or cfg.steps_per_epoch
    data = None if fixed and not Path(cfg.data_dir).is_dir() else train_loader(cfg, Path(cfg.data_dir))
    model = make_model(cfg, rt, None)
    cfg = replace(cfg, model=model.config)
    weights = optim.Weights(model, cfg)
    optimizers = optim.build(weights, cfg, rt)
    forward = compiled(model, cfg, rt)
    B, max_steps = plan.micro_batch_size(cfg, rt, model, forward), cfg.horizon(data.order.per_epoch if data else 0)
    plan.describe(cfg, rt, model, data, max_steps, 0, B)
    run = partial(accumulate, forward, rt=rt, scaler=torch.amp.GradScaler(rt.device.type, enabled=False))

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights.gradients(), cfg.grad_clip or math.inf)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        weights.publish()

    plan.estimate(cfg, rt, model, run, update, max_steps, B)


def evaluate(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: val loss and HellaSwag of the weights that --init-from names, as a run reports them."""
    if cfg.init_from == "scratch":
        raise UserError("--eval-only wants trained weights: add --init-from gpt2, a run folder or a model_*.pt")
    import convert

    model = convert.open_model(cfg.init_from).to(rt.device)
    cfg = replace(cfg, model=model.config, sequence_length=min(cfg.sequence_length, model.config.block_size))
    data = Loader(local_data(cfg, rt), "val", cfg.sequence_length, cfg.model.vocab_size)
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size  # not compiled: once is too short for that
    loss, tokens = validate(model, data, cfg, rt, B, lambda: None), val_windows(data, cfg) * data.T
    print0(f"{cfg.init_from} on {tokens:,} tokens of {data.paths[0]} | val loss: {loss:.4f}")
    wanted = cfg.hellaswag_every or cfg.hellaswag_data
    if wanted and (examples := hellaswag.examples_at_hand(cfg.hellaswag_data, cfg.model)):
        print0(hellaswag.in_words(hellaswag.evaluate(model, examples, rt.device, rt)))


def train_loader(cfg: TrainConfig, data_dir: str | Path) -> Loader:
    return Loader(data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)


def due(every: int, step: int, last: bool) -> bool:
    """Whether something with period `every` (0: never) comes at `step`; the last step has everything that is on."""
    return every > 0 and (step % every == 0 or last)


def accumulate(
    forward: torch.nn.Module, batch: torch.Tensor, rt: Runtime, scaler: torch.amp.GradScaler
) -> torch.Tensor:
    """Forward and backward over the micro-batches (micro_steps, B, T + 1); gradients are those of the mean loss over
    all ranks, which are reduced once, in the last backward. Returns this rank's mean loss, on the device."""
    total = torch.zeros((), device=rt.device)
    for i, tokens in enumerate(batch):
        x, y = to_device(tokens, rt.device)
        forward.require_backward_grad_sync = i == len(batch) - 1  # DDP's switch; without DDP nobody reads it
        with rt.autocast():
            _, loss = forward(x, y)
        scaler.scale(loss / len(batch)).backward()
        total += loss.detach() / len(batch)
    return total


def val_windows(data: Loader, cfg: TrainConfig) -> int:
    """How many sequences of the val split are evaluated."""
    return min(cfg.val_tokens // data.T, data.order.per_epoch)


@torch.no_grad()
def validate(
    forward: torch.nn.Module, data: Loader, cfg: TrainConfig, rt: Runtime, B: int, check: Callable[[], None]
) -> float:
    """Mean cross-entropy (nats a token) over the first val_tokens of the val split, whatever the ranks and B. Batches
    keep one shape, so that nothing is compiled twice: rows beyond the end are padding that the loss ignores. `check` is
    called before each of them, equally often on all ranks."""
    count, stride = val_windows(data, cfg), B * rt.world_size
    windows = data.order.span(0, count)
    total = torch.zeros(2, device=rt.device, dtype=torch.float32 if rt.device.type == "mps" else torch.float64)
    for i in range(0, count, stride):
        check()
        rows = data.read(windows[i : i + stride][rt.rank :: rt.world_size])
        if not len(rows):
            continue
        tokens = np.zeros((B, data.T + 1), np.uint16)
        tokens[: len(rows)] = rows
        x, y = to_device(torch.from_numpy(tokens), rt.device)
        y[len(rows) :] = -100  # cross_entropy's ignore_index
        with rt.autocast():
            _, loss = forward(x, y)
        total += torch.stack([loss.to(total.dtype) * len(rows), total.new_tensor(len(rows))])
    loss_sum, n = rt.all_reduce(total).tolist()
    return loss_sum / n


@torch.no_grad()
def samples(
    model: GPT, cfg: TrainConfig, rt: Runtime, asked: Callable[[], bool], count: int = 4, tokens: int = 48
) -> str:
    """Continuations of the sample prompt, one a line group, as far as they have come when this rank is asked to stop;
    their own generator leaves training's randomness alone."""
    enc = tokenizer.encoding()
    prompt = enc.encode_ordinary(cfg.sample_prompt)[-cfg.model.block_size :] or [tokenizer.EOT]
    idx = torch.tensor([prompt] * count, device=rt.device)
    new = model.stream(idx, tokens, generator=torch.Generator(rt.device).manual_seed(cfg.seed))
    with rt.autocast():
        out = torch.stack([*idx.T, *takewhile(lambda _: not asked(), new)], dim=1)
    return "\n".join(f"sample {i}: {cli.printable(enc.decode(row))}" for i, row in enumerate(out.tolist()))


def local_data(cfg: TrainConfig, rt: Runtime) -> Path:
    """The shard folder; hf://OWNER/NAME is pulled and verified first (by one rank of each machine)."""
    repo = cfg.data_dir.removeprefix("hf://")
    if repo == cfg.data_dir:
        return Path(cfg.data_dir)
    folder = Path("data") / repo.replace("/", "--")
    if rt.local_rank == 0:
        import hub

        hub.pull_data(repo, folder)
    rt.barrier(hours=24)
    return folder


def make_model(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None) -> GPT:
    """The model on its device: from the checkpoint, from --init-from, or random from the seed."""
    if saved:
        where = cfg.run_dir if cfg.resume == "auto" else Path(cfg.resume)
        where = where if where.is_dir() else where.parent
        model = checkpoint.load_model(checkpoint.model_path(where, saved["step"]))
        print0(f"resumed from {checkpoint.model_path(where, saved['step'])}")
    elif cfg.init_from == "scratch":
        model = GPT(cfg.model)
    else:
        import convert

        model = convert.open_model(cfg.init_from)
        print0(f"weights of {cfg.init_from}")
    there, asked = vars(replace(model.config, vocab_size=cfg.model.vocab_size)), vars(cfg.model)
    if there != asked and not adopts(cfg):
        other = ", ".join(f"{k} is {there[k]}, not {asked[k]}" for k in there if there[k] != asked[k])
        raise UserError(f"of --init-from {cfg.init_from} {other}; leave the --model flags out")
    if (T := cfg.sequence_length) > (limit := model.config.block_size):
        raise UserError(f"--sequence-length {T} is beyond what {cfg.init_from} reads; add --sequence-length {limit}")
    model.recompute = cfg.recompute
    return model.to(rt.device).train()


class Compiled(torch.nn.Module):
    """A GPT compiled block by block: all blocks share one graph, and the head with the loss is another."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model  # DDP takes its parameters from here; the list below is no place for modules
        self.blocks = [torch.compile(block, dynamic=False) for block in model.transformer.h]
        self.loss = torch.compile(model.loss, dynamic=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, self.loss(self.model.hidden(idx, blocks=self.blocks), targets)


def compiled(model: GPT, cfg: TrainConfig, rt: Runtime) -> torch.nn.Module:
    """The model as training and validation call it. HellaSwag, sampling and checkpoints use the model itself and never
    meet the compiler."""
    if rt.device.type == "cpu":
        runtime.keep_memory()
    if not cfg.compile or rt.device.type == "mps":
        return model
    if missing := runtime.missing_compiler(rt.device):
        print0(f"no {missing}: training without torch.compile, several times slower")
        return model
    torch._dynamo.config.recompile_limit = 16  # --micro-batch-size auto may try seven sizes, and validation is a graph
    print0("the first step compiles, which takes a while; --no-compile starts at once and is slower from then on")
    if rt.device.type == "cuda" and rt.world_size == 1:
        return torch.compile(model, dynamic=False)  # one graph can fuse across blocks
    # Between ranks Dynamo would cut that graph up, a piece for each of DDP's buckets, and compile each piece by itself;
    # on a CPU one graph is no faster. Block by block the first step comes sooner, and gradients travel as early.
    torch._dynamo.config.optimize_ddp = False
    return Compiled(model)


def distributed(forward: torch.nn.Module, rt: Runtime) -> torch.nn.Module:
    """Gradients averaged over the ranks by DDP, into buckets that the gradients themselves are views of."""
    if rt.world_size == 1:
        return forward
    DDP, ids = torch.nn.parallel.DistributedDataParallel, [rt.device.index] if rt.device.type == "cuda" else None
    # torch 2.13 has another name
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in signature(DDP).parameters else "broadcast_buffers"
    return DDP(forward, device_ids=ids, gradient_as_bucket_view=True, **{buffers: False})


def main() -> None:
    cfg = parse(sys.argv[1:], lambda path: resume.read(path)["config"])
    only = dry_run if cfg.dry_run else evaluate if cfg.eval_only else None  # nothing to save: Ctrl-C just ends it
    signals = nullcontext() if only else resume.signals()
    with signals as stop, runtime.session(cfg.device, cfg.dtype, cfg.deterministic) as rt:
        if only:
            return only(cfg, rt)
        with files.locked(cfg.run_dir) if rt.is_main else nullcontext():
            train(cfg, rt, stop)


if __name__ == "__main__":
    cli.run_cli(main)
