"""Building what trains, in steps whose order matters. training/step.py then steps.

trainer = build_trainer(model, cfg, rt, max_steps, saved)
"""

from typing import Any

import torch

from model import GPT
from system.distributed import Runtime
from system.printing import print0
from training.config import TrainConfig
from training.loss import check_gradients, make_loss, wrap_in_ddp
from training.microbatch import choose_micro_batch_size, explain_out_of_memory
from training.optim import build_optimizers, is_sharded, state_bytes
from training.schedule import sequences_at
from training.state import NamedOptimizer, State
from training.step import Trainer


def build_trainer(
    model: GPT, cfg: TrainConfig, rt: Runtime, max_steps: int, saved: dict[str, Any] | None = None
) -> Trainer:
    """The trainer of a run of max_steps, with its first weights in `model`. saved: the train state to continue from, as
    of State.copy. Raises UserError if that is of another program, if not even one sequence fits in memory, or if a
    batch does not divide evenly over the ranks. Every rank must call it."""
    with explain_out_of_memory(rt):
        model.recompute = cfg.recompute
        move_to_device(model, rt)
        check_gradients(model)

        # What a checkpoint has: the float32 weights, and the parts, which an experiment may add to.
        weights = make_weights(model, cfg, rt)
        optimizers = build_optimizers(model, weights, cfg, rt)
        parts: dict[str, Any] = {}
        for name, optimizer in optimizers.items():
            parts[name] = NamedOptimizer(optimizer, weights, rt, is_sharded(cfg, rt))
        # [safety] A GPU without bfloat16 trains in float16, with a loss scale. In other precisions it does nothing.
        parts["loss_scale"] = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
        state = State(weights, parts, rt, state_bytes(model, cfg))
        if saved:
            state.load(saved)

        # [memory] [speed] The head in chunks, and compiled blocks. The micro-batch is chosen before DDP comes: a rank
        # that runs out of memory inside DDP would leave the others waiting in a collective.
        loss = make_loss(model, cfg, rt)
        to_come = 0 if saved else state_bytes(model, cfg, rt.world_size if is_sharded(cfg, rt) else 1)
        B = choose_micro_batch_size(cfg, rt, loss, to_come, max_steps)
        ddp_loss = wrap_in_ddp(loss, rt)

    micro_steps = sequences_at(state.step, cfg) // rt.world_size // B
    split = f"{rt.world_size} x {micro_steps} x {B} x {cfg.sequence_length}"
    print0(f"batch      {split} tokens (ranks x micro-steps x sequences x T)")
    return Trainer(model, state, optimizers, loss, ddp_loss, B, cfg, rt)


def move_to_device(model: GPT, rt: Runtime) -> None:
    """[ranks] All begin with rank 0's weights: random ones may differ by rounding between processors."""
    model.to(rt.device).train()
    for p in model.parameters():
        rt.broadcast(p.detach(), source=0)


def make_weights(model: GPT, cfg: TrainConfig, rt: Runtime) -> dict[str, torch.Tensor]:
    """The float32 weights by name: the parameters themselves. With --param-dtype bfloat16, copies of them, and the
    parameters become bfloat16: so small updates are not rounded away, and gradients need half the bandwidth between
    ranks (Micikevicius et al. 2018)."""
    weights: dict[str, torch.Tensor] = dict(model.named_parameters())
    # float16 has a loss scale, which bfloat16 gradients would not go with.
    if cfg.param_dtype == "bfloat16" and rt.dtype == torch.float16:
        print0("--param-dtype bfloat16 needs a GPU with bfloat16: here parameters stay in float32, with a loss scale")
    elif cfg.param_dtype == "bfloat16":
        if rt.dtype == torch.float32:
            print0("--param-dtype bfloat16: matrix products are in bfloat16, too, whatever the precision above")
        for name, p in model.named_parameters():
            weights[name] = torch.nn.Parameter(p.detach().clone(), p.requires_grad)
            p.data = p.data.bfloat16()
    return weights
