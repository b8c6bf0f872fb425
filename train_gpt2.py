"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m/model_19073.pt --epochs 2      # resume from a checkpoint
"""

import math
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import cli

cli.thread_waits()  # before torch is imported
import torch
from torch import Tensor, nn

import checkpoint
import convert
import files
import hellaswag
import hub
import optim
import plan
import resume
import runtime
from cli import UserError, print0
from config import TrainConfig, model_from_init, parse
from evals import Evals, due, samples, val_windows, validate
from loader import Loader, to_device
from metrics import RunLog
from model import GPT
from runtime import Runtime


def train(cfg: TrainConfig, rt: Runtime, stop: dict[str, Any]) -> None:
    """One run from its first (or resumed) step to its last. Setting stop["signal"] from a handler ends it cleanly."""
    stopper = resume.Stopper(stop, cfg.time_limit, rt)

    # ---- data, and the checkpoint to resume from
    data_dir = local_data(cfg, rt)
    data = train_loader(cfg, data_dir)
    val_data = Loader(data_dir, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    max_steps = cfg.horizon(data.order.per_epoch)
    data_id = data.fingerprint()
    saved = resume.find(cfg, data_id, max_steps)
    resume.check_ranks(rt, saved, data_id, max_steps)
    run = resume.RunState.of(saved, cfg.run_dir)
    start = run.step
    if start > max_steps or (start == max_steps and run.evaluated):
        return print0(resume.nothing_left(cfg, start))

    # ---- model, optimizers, compiler, ranks
    torch.manual_seed(cfg.seed)
    model = make_model(cfg, rt, saved)
    cfg = replace(cfg, model=model.config)  # --init-from may have replaced it
    weights = optim.Weights(model, cfg)
    optimizers = optim.build(weights, cfg, rt)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
    forward = compiled(model, cfg, rt)
    ddp_model = distributed(forward, rt)
    B = plan.micro_batch_size(cfg, rt, model, ddp_model)
    if saved:
        resume.restore(saved, optimizers, scaler, rt)

    # ---- what the run prints, measures and writes
    plan.describe(cfg, rt, model, data, max_steps, start, B)
    plan.write_config(cfg, rt, max_steps, start)
    evals = Evals(cfg, rt, model, forward, data, val_data, B, max_steps)
    log = RunLog(cfg.run_dir, start, cfg.tracker, cfg.to_dict(), rt.is_main)
    writer = checkpoint.Writer(cfg.run_dir, cfg.keep)
    batches = data.batches(start, cfg.sequences_per_step, B, rt, fixed=cfg.overfit_single_batch)
    pace = plan.Pace(cfg, rt, model)
    skipped = 0  # steps refused because of a non-finite loss or gradient

    def save() -> None:
        val_loss = run.record.get("val_loss")
        if val_loss is not None and (run.best is None or val_loss < run.best["val_loss"]):
            run.best = {"step": run.step, "val_loss": val_loss}
        state = resume.train_state(cfg, rt, run, optimizers, scaler, data_id, max_steps)
        if rt.is_main:
            file = checkpoint.model_file(model, run.step, val_loss=val_loss, preset=cfg.preset)
            file["model"] = weights.state_dict()
            log.flush()
            writer.save(run.step, file, state, run.best["step"] if run.best else None)

    try:
        halt = rt.any(stop["signal"])
        for step in range(start, max_steps + 1):
            last = step == max_steps
            if halt:
                raise resume.Stopped
            # evaluate, checkpoint, sample; a resumed run skips these if its checkpoint says they are done
            if not run.evaluated:
                run.record |= evals.measure(step, partial(stopper.check, timed=step > start))
                run.evaluated = True
                if step and (last or due(cfg.save_every, step, last)):
                    save()
                if rt.is_main and step and due(evals.sample_every, step, last):
                    log.text(step, samples(model, cfg, rt, stopper.asked))
            if last:
                break
            # accumulate, clip
            batch = next(batches)
            t0 = time.perf_counter()
            local_loss = accumulate(ddp_model, batch, rt, scaler)
            norm = optim.clip(weights, optimizers, scaler, cfg.grad_clip)
            # all ranks agree on the mean loss, whether to stop and whether a norm is bad: one wait for the device
            mine = [local_loss / rt.world_size, norm.new_full((), stopper.asked()), (~norm.isfinite()).float()]
            loss, halt, bad_norm = rt.all_reduce(torch.stack(mine)).tolist()
            norm = norm.item()
            # set lr, step
            lr = optim.set_schedule(optimizers, step, max_steps, cfg)
            writer.copied()  # a save may still be copying the weights
            if math.isfinite(loss) and not bad_norm:
                optim.step(optimizers, weights, scaler)
            elif math.isfinite(loss) and scaler.get_scale() > 1:
                scale = scaler.get_scale()
                print0(f"step {step}: float16 overflow at loss scale {scale:g}; step skipped, scale halved")
            else:
                skipped += 1
                resume.refuse(cfg, rt, step, local_loss.item(), norm, skipped, data, B, save, writer)
            optim.finish(optimizers, scaler)
            # log; on a GPU the update is still running, and its time counts toward the next step
            run.record |= {"train_loss": loss, "lr": lr, "grad_norm": norm} | pace.step(time.perf_counter() - t0)
            log.write(run.record)
            log.console(run.record, max_steps, pace.eta_s(max_steps - step - 1), cfg.gpu_hour_usd * rt.world_size)
            run = resume.RunState(step + 1, {"step": step + 1}, run.best)
        log.write(run.record)
        ending = resume.done(cfg, run, stopper.seconds())
    except resume.Stopped:
        save()
        ending = f"stopped by {stopper.why()} at step {step}, all saved; resume with: {resume.command(cfg, step)}"
    log.close()
    writer.wait()
    rt.barrier(hours=2)  # a rank that exits, or times out here, would end the one that is still writing
    print0(ending)


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: the plan and its cost; needs no data if the preset fixes the number of steps."""
    needs_data = not (cfg.max_steps or cfg.steps_per_epoch)
    data = train_loader(cfg, cfg.data_dir) if needs_data or Path(cfg.data_dir).is_dir() else None
    max_steps = cfg.horizon(data.order.per_epoch if data else 0)
    model = make_model(cfg, rt, None)
    cfg = replace(cfg, model=model.config)
    weights = optim.Weights(model, cfg)
    optimizers = optim.build(weights, cfg, rt)
    forward = compiled(model, cfg, rt)
    B = plan.micro_batch_size(cfg, rt, model, forward)
    plan.describe(cfg, rt, model, data, max_steps, 0, B)
    scaler = torch.amp.GradScaler(rt.device.type, enabled=False)
    run = partial(accumulate, forward, rt=rt, scaler=scaler)

    def update() -> None:
        optim.clip(weights, optimizers, scaler, cfg.grad_clip)
        optim.step(optimizers, weights, scaler)
        optim.finish(optimizers, scaler)

    plan.estimate(cfg, rt, model, run, update, max_steps, B)


def evaluate(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: val loss and HellaSwag of the weights named by --init-from, as a run reports them."""
    if cfg.init_from == "scratch":
        raise UserError("--eval-only needs trained weights: add --init-from gpt2, a run folder or a model_*.pt")
    model = convert.open_model(cfg.init_from).to(rt.device)
    cfg = replace(cfg, model=model.config, sequence_length=min(cfg.sequence_length, model.config.block_size))
    data = Loader(local_data(cfg, rt), "val", cfg.sequence_length, cfg.model.vocab_size)
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size  # not compiled: compiling would cost more time
    loss = validate(model, data, cfg, rt, B)
    tokens = val_windows(data, cfg) * data.T
    print0(f"{cfg.init_from} on {tokens:,} tokens of {data.paths[0]} | val loss: {loss:.4f}")
    if cfg.hellaswag_every or cfg.hellaswag_data:
        examples = hellaswag.examples_at_hand(cfg.hellaswag_data, cfg.model)
        if examples:
            print0(hellaswag.summary_line(hellaswag.evaluate(model, examples, rt.device, rt)))


def train_loader(cfg: TrainConfig, data_dir: str | Path) -> Loader:
    return Loader(data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)


def accumulate(forward: nn.Module, batch: Tensor, rt: Runtime, scaler: torch.amp.GradScaler) -> Tensor:
    """Forward and backward over the micro-batches (micro_steps, B, T + 1). Gradients of the mean loss over all ranks
    are reduced once, in the last backward. Returns this rank's mean loss, on the device."""
    total = torch.zeros((), device=rt.device)
    for i, tokens in enumerate(batch):
        x, y = to_device(tokens, rt.device)
        forward.require_backward_grad_sync = i == len(batch) - 1  # DDP's switch; unused without DDP
        with rt.autocast():
            _, loss = forward(x, y)
        scaler.scale(loss / len(batch)).backward()
        total += loss.detach() / len(batch)
    return total


def local_data(cfg: TrainConfig, rt: Runtime) -> Path:
    """The shard folder; hf://OWNER/NAME is pulled and verified first (by one rank per machine)."""
    if not cfg.data_dir.startswith("hf://"):
        return Path(cfg.data_dir)
    repo = cfg.data_dir.removeprefix("hf://")
    folder = Path("data") / repo.replace("/", "--")
    if rt.local_rank == 0:
        hub.pull_data(repo, folder)
    rt.barrier(hours=24)
    return folder


def make_model(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None) -> GPT:
    """The model on its device: from the checkpoint, from --init-from, or random from the seed."""
    if saved:
        model = checkpoint.load_model(saved["model_file"])
        print0(f"resumed from {saved['model_file']}")
    elif cfg.init_from == "scratch":
        model = GPT(cfg.model)
    else:
        model = convert.open_model(cfg.init_from)
        print0(f"weights of {cfg.init_from}")
    found, asked = vars(model.config), vars(cfg.model)
    other = [f"{k} is {found[k]}, not {asked[k]}" for k in found if found[k] != asked[k] and k != "vocab_size"]
    if other and not model_from_init(cfg):
        raise UserError(f"in --init-from {cfg.init_from}, {', '.join(other)}; drop the --model flags")
    T, limit = cfg.sequence_length, model.config.block_size
    if T > limit:
        raise UserError(f"--sequence-length {T} is too long for {cfg.init_from}; use --sequence-length {limit}")
    model.recompute = cfg.recompute
    return model.to(rt.device).train()


class Compiled(nn.Module):
    """A GPT compiled block by block: all blocks share one graph, and the head with the loss is another."""

    def __init__(self, model: GPT):
        super().__init__()
        self.model = model  # DDP finds the parameters here; the plain list below registers none
        self.blocks = [torch.compile(block, dynamic=False) for block in model.transformer.h]
        self.loss = torch.compile(model.loss, dynamic=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        return None, self.loss(self.model.hidden(idx, blocks=self.blocks), targets)


def compiled(model: GPT, cfg: TrainConfig, rt: Runtime) -> nn.Module:
    """The model as training and validation call it; HellaSwag, sampling and checkpoints use the model itself."""
    if rt.device.type == "cpu":
        runtime.keep_memory()
    if not cfg.compile or rt.device.type == "mps":
        return model
    if missing := runtime.missing_compiler(rt.device):
        print0(f"no {missing}: training without torch.compile, several times slower")
        return model
    torch._dynamo.config.recompile_limit = 16  # --micro-batch-size auto may try seven sizes; validation adds a graph
    print0("the first step compiles, which takes a while; --no-compile starts at once but then trains slower")
    if rt.device.type == "cuda" and rt.world_size == 1:
        return torch.compile(model, dynamic=False)  # one graph can fuse across blocks
    # With several ranks Dynamo would split that graph at DDP's buckets and compile each piece separately; on a CPU one
    # graph is no faster. Block by block the first step comes sooner, and gradients are reduced just as early.
    torch._dynamo.config.optimize_ddp = False
    return Compiled(model)


def distributed(forward: nn.Module, rt: Runtime) -> nn.Module:
    """Wrap in DDP, which averages gradients over the ranks; the gradients are views into its buckets."""
    if rt.world_size == 1:
        return forward
    DDP = nn.parallel.DistributedDataParallel
    ids = [rt.device.index] if rt.device.type == "cuda" else None
    renamed = "forward_sync_buffers" in signature(DDP).parameters  # by torch 2.13
    no_sync = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DDP(forward, device_ids=ids, gradient_as_bucket_view=True, **no_sync)


def main() -> None:
    cfg = parse(sys.argv[1:], lambda path: resume.read(path)["config"])
    session = runtime.session(cfg.device, cfg.dtype, cfg.deterministic)
    if cfg.dry_run or cfg.eval_only:  # nothing to save: Ctrl-C just ends it
        with session as rt:
            return dry_run(cfg, rt) if cfg.dry_run else evaluate(cfg, rt)
    with resume.signals() as stop, session as rt:
        with files.locked(cfg.run_dir) if rt.is_main else nullcontext():
            train(cfg, rt, stop)


if __name__ == "__main__":
    cli.run_cli(main)
