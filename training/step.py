"""One optimizer step: the gradients of a batch, clipped, and the update.

    trainer = Trainer(model, cfg, rt)
    loss, norm = trainer.compute_gradients(batch)   # batch: (micro_steps, B, T + 1), this rank's tokens
    set_learning_rates(trainer.optimizers, step, max_steps, cfg)
    trainer.update()                                # or not, if the gradients are not finite
    trainer.finish_step()

train_gpt2.py's loop calls it, and so do --dry-run and bench/parity.py. The validation of lifecycle/evaluator.py uses
its forward pass.
"""

import torch
from torch import Tensor, nn

from model import GPT
from system.distributed import Runtime
from system.printing import print0
from training import master_weights, optim
from training.config import TrainConfig
from training.loader import to_device
from training.loss import make_forward, wrap_in_ddp
from training.microbatch import choose_micro_batch_size, explain_out_of_memory


class Trainer:
    """A model on this rank's device, with all that updates it:

    model         the network; with --weights bfloat16 its weights are rounded copies of the optimizers'
    forward       the forward pass of validation: (x, y) -> the mean loss
    ddp_forward   the same for training: its gradients are averaged over the ranks
    optimizers    one or two
    scaler        the loss scale of float16; in other precisions it does nothing
    B             the micro-batch: sequences in a forward pass
    """

    def __init__(self, model: GPT, cfg: TrainConfig, rt: Runtime):
        """Raises UserError if not even one sequence fits in memory, or if the batch does not divide evenly over the
        ranks. Every rank must make one."""
        self.model, self.cfg, self.rt = model, cfg, rt
        with explain_out_of_memory(rt):
            # [ranks] All begin with rank 0's weights: random ones may differ by rounding between processors.
            model.recompute = cfg.recompute
            model.to(rt.device).train()
            for p in model.parameters():
                rt.broadcast(p.detach(), source=0)

            # [safety] A GPU without bfloat16 trains float32 weights in float16, with a loss scale.
            is_float16 = rt.dtype == torch.float16
            self.scaler = torch.amp.GradScaler(rt.device.type, enabled=is_float16)
            if is_float16 and cfg.weights == "bfloat16":
                print0("--weights bfloat16 needs a GPU with bfloat16: here weights stay in float32, with a loss scale")
            if rt.dtype == torch.float32 and cfg.weights == "bfloat16":
                print0("--weights bfloat16: the matrix products are in bfloat16, too, whatever the precision above")
            # [memory] With --weights bfloat16 these update float32 copies of the model's weights.
            self.optimizers = optim.build_optimizers(model, cfg, rt)

            # [memory] [speed] The head in chunks, and compiled blocks. The micro-batch is chosen before DDP comes: a
            # rank that runs out of memory inside DDP would leave the others waiting in a collective.
            self.forward = make_forward(model, cfg, rt)
            shards = rt.world_size if cfg.zero_stage == 1 else 1
            self.B = choose_micro_batch_size(cfg, rt, self.forward, optim.state_bytes(model, cfg, shards))
            micro_steps = cfg.sequences_per_step // rt.world_size // self.B
            split = f"{rt.world_size} x {micro_steps} x {self.B} x {cfg.sequence_length}"
            print0(f"batch      {split} tokens (ranks x micro-steps x sequences x T)")
            self.ddp_forward = wrap_in_ddp(self.forward, rt)

    def compute_gradients(self, batch: Tensor) -> tuple[float, float]:
        """Forward and backward over the micro-batches of a step, then clip the global norm to --grad-clip.

        batch: (micro_steps, B, T + 1) uint16, this rank's tokens. The gradients are those of the mean loss over all
        ranks. Every rank must call this. Returns

            loss    mean over this rank's sequences of the step, in nats per token
            norm    L2 norm of the gradients of all parameters, before clipping; the same on all ranks
        """
        local_loss = torch.zeros((), device=self.rt.device)
        for i, tokens in enumerate(batch):
            # Inputs and targets: (B, T + 1) -> 2 x (B, T)
            x, y = to_device(tokens, self.rt.device)

            # DDP averages the gradients in the last backward pass. Without DDP the attribute has no effect.
            self.ddp_forward.require_backward_grad_sync = i == len(batch) - 1  # type: ignore[assignment]
            with self.rt.autocast():
                loss = self.ddp_forward(x, y)

            # The micro-batches are of equal size, so the mean of their means is the mean over the step. The loss scale
            # of float16 keeps small gradients from becoming zero.
            self.scaler.scale(loss / len(batch)).backward()
            local_loss += loss.detach() / len(batch)

        # Undo the loss scale, and clip. The norm is that of all gradients together, in float32 also if these are
        # bfloat16.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        gradients = [p.grad.float() for p in self.model.parameters() if p.grad is not None]
        total_norm = nn.utils.get_total_norm(gradients)
        if self.cfg.grad_clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.grad_clip, total_norm)
        return local_loss.item(), total_norm.item()

    def update(self) -> None:
        """Step all optimizers; not to be called unless the norm is finite. GradScaler.step would decide that for each
        optimizer alone, and half of the weights would move. Every rank must call it."""
        master_weights.give_gradients(self.model)
        for optimizer in self.optimizers:
            optimizer.step()
        master_weights.take_weights(self.model)

    def finish_step(self) -> None:
        """Free the gradients, and adapt the loss scale, whether there was an update or not."""
        # After an overflow this halves the loss scale; otherwise it doubles the scale now and then.
        self.scaler.update()

        # [memory] DDP's gradients live in its buckets and are set to zero there. Without DDP they are freed.
        self.model.zero_grad(set_to_none=self.rt.world_size == 1)
