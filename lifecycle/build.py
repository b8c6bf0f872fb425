"""Builds the trainer on this machine: the model on its device, the optimizers, the compiled loss, DDP.

trainer = build_trainer(run.model, run.cfg, run.rt, run.max_steps, saved)
"""

from typing import Any

import torch
from torch import nn

from lifecycle.microbatch import MEMORY_FIX, choose_micro_batch_size
from model import GPT
from system import machine
from system.distributed import Runtime
from system.printing import print0
from training.config import TrainConfig
from training.head import Loss
from training.optim import build_optimizers
from training.schedule import at
from training.step import State, Trainer


def build_trainer(
    model: GPT, cfg: TrainConfig, rt: Runtime, max_steps: int, saved: dict[str, Any] | None = None
) -> Trainer:
    """The trainer of a run of max_steps. model: with its first weights. saved: the train state to continue from, which
    State.copy returned. Raises UserError if the train state does not match this code, if not even one sequence fits in
    memory, or if a batch does not divide evenly over the ranks. Every rank must call this."""
    with machine.explain_out_of_memory(MEMORY_FIX):
        # [ranks] All begin with rank 0's weights, because random weights may differ by rounding between processors.
        model.recompute = cfg.recompute
        model.to(rt.device).train()
        for p in model.parameters():
            rt.broadcast(p.detach(), source=0)

        # Everything that a checkpoint has. An experiment adds a component here.
        weights = make_weights(model, cfg, rt)
        optimizers = build_optimizers(model, weights, cfg, rt)
        # [safety] A GPU without bfloat16 trains in float16, with a loss scale. In other precisions the scaler
        # does nothing.
        scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
        state = State(weights, {**optimizers, "loss_scale": scaler}, rt)
        if saved:
            state.load(saved)

        # The trainer, at the first step of this start.
        loss = make_loss(model, cfg, rt)
        now = at(state.step, cfg, max_steps)
        all_optimizers = [named.optimizer for named in optimizers.values()]
        trainer = Trainer(model, state, all_optimizers, loss, ddp_loss=loss, B=1, cfg=cfg, rt=rt, now=now)
        trainer.set_step(now)

        # [memory] A micro-batch that fits. choose_micro_batch_size tries the passes of a step. DDP comes afterwards: a
        # rank that ran out of memory inside DDP would leave the other ranks waiting in a collective.
        trainer.B = choose_micro_batch_size(trainer, max_steps, has_state=saved is not None)
        trainer.ddp_loss = wrap_in_ddp(loss, rt)

    # Each step allocates the same large tensors again, which on a CPU costs time. The rehearsal comes before: what the
    # compiler allocates would split the freed memory, and the tensors of the first step would need more.
    if rt.device.type == "cpu":
        machine.keep_freed_memory()

    micro_steps = now.sequences // rt.world_size // trainer.B
    batch = f"{rt.world_size} x {micro_steps} x {trainer.B} x {cfg.sequence_length}"
    print0(f"batch      {batch} tokens (ranks x micro-steps x sequences x T)")
    return trainer


def make_weights(model: GPT, cfg: TrainConfig, rt: Runtime) -> dict[str, torch.Tensor]:
    """The float32 weights by name. Normally these are the parameters. With --param-dtype bfloat16 they are copies, and
    the parameters become bfloat16: small updates are then not rounded away, and gradients need half the bandwidth
    between ranks (Micikevicius et al. 2018)."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    # float16 needs a loss scale, which does not work with bfloat16 gradients.
    if cfg.param_dtype == "bfloat16" and rt.dtype == torch.float16:
        print0("--param-dtype bfloat16 needs a GPU with bfloat16: here parameters stay in float32, with a loss scale")
    elif cfg.param_dtype == "bfloat16":
        if rt.dtype == torch.float32:
            print0("--param-dtype bfloat16: matrix products are in bfloat16, too, despite the precision above")
        for name, p in model.named_parameters():
            weights[name] = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
            p.data = p.data.bfloat16()
    return weights


def make_loss(model: GPT, cfg: TrainConfig, rt: Runtime) -> Loss:
    """The loss of training and validation, compiled if it can be. HellaSwag, samples and checkpoints use the model
    itself."""
    if not (cfg.compile and machine.can_compile(rt.device)):
        return Loss(model, compiles=False)

    # Graphs are made for each size that --micro-batch-size auto tries, for validation, and for each value of the step
    # that a block depends on. Past the limit, torch goes on without the compiler: on a GPU, that is an error.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = rt.device.type == "cuda"
    # optimize_ddp would split the graphs at the buckets of DDP.
    torch._dynamo.config.optimize_ddp = False
    print0("compiling: up to two minutes the first time, seconds again; --no-compile starts at once, and trains slower")
    return Loss(model, compiles=True)


def wrap_in_ddp(loss: Loss, rt: Runtime) -> nn.Module:
    """With several ranks, wrap the loss in DDP, which averages the gradients over the ranks. The gradients become views
    into DDP's buckets."""
    if rt.world_size == 1:
        return loss

    # DDP reduces gradients in buckets. If a gradient is None when a backward pass begins, it gets a tensor of its own
    # beside its place in the bucket: 4 bytes more per parameter while micro-batches accumulate. So each parameter that
    # trains gets a gradient of zeros. DDP moves the zeros into the bucket, where the gradient stays from then on. The
    # zeros are expanded from one number, so they take no memory.
    for p in loss.parameters():
        if p.requires_grad:
            p.grad = p.new_zeros(()).expand_as(p)

    # All ranks have the same weights already.
    device_ids = [rt.device.index] if rt.device.type == "cuda" else None
    ddp = nn.parallel.DistributedDataParallel(loss, device_ids, gradient_as_bucket_view=True, init_sync=False)
    # In each step, DDP would send all buffers, and so RoPE's table, which never changes. Buffers that training changes
    # are in the state dict. (torch 2.13 has renamed the switch, and warns of the old argument.)
    changes = any(name in loss.state_dict() for name, _ in loss.named_buffers())
    ddp.forward_sync_buffers = ddp.broadcast_buffers = changes
    return ddp
