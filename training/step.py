"""One optimizer step: the gradients of a batch, clipped, and the update.

    loss, norm = trainer.compute_gradients(batch)   # batch: (micro_steps, B, T + 1), this rank's tokens
    set_learning_rates(trainer.optimizers, step, max_steps, cfg)
    trainer.update()                                # or not, if the gradients are not finite
    trainer.finish_step()

training/build.py builds the trainer.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT
from system.distributed import Runtime
from training.config import TrainConfig
from training.loader import to_device
from training.loss import Loss
from training.state import State, copy_weights, rounded_pairs


@dataclass(frozen=True, eq=False)
class Trainer:
    """A model on this rank's device, with all that updates it."""

    model: GPT
    state: State  # what a kill must not lose: the float32 weights, the optimizers' state, ...
    optimizers: dict[str, torch.optim.Optimizer]
    loss: Loss  # (x, y) -> (what is minimized, mean cross-entropy); validation calls it
    ddp_loss: nn.Module  # the same for training: its gradients are averaged over the ranks
    B: int  # the micro-batch: sequences in a forward pass
    cfg: TrainConfig
    rt: Runtime

    @property
    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by name, which the optimizers update."""
        return self.state.weights

    @property
    def scaler(self) -> Any:
        """The loss scale of float16; in other precisions it does nothing."""
        return self.state.parts["loss_scale"]

    @contextmanager
    def using(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Let the model compute with these weights inside the block, such as an average, and with its own after it: in
        eval mode, for what acts in training only, as dropout."""
        own = None
        if weights is not self.weights:
            own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            copy_weights(self.model, weights)
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()
            if own:
                copy_weights(self.model, own)

    def compute_gradients(self, batch: Tensor) -> tuple[float, float]:
        """Forward and backward over the micro-batches of a step, then clip the global norm to --grad-clip.

        batch: (micro_steps, B, T + 1) uint16, this rank's tokens. The gradients are those of the mean over all ranks of
        what is minimized. Every rank must call this. Returns

            loss    mean cross-entropy over this rank's sequences of the step, in nats per token
            norm    L2 norm of the gradients of all parameters, before clipping; the same on all ranks
        """
        local_loss = torch.zeros((), device=self.rt.device)
        for i, tokens in enumerate(batch):
            # Inputs and targets: (B, T + 1) -> 2 x (B, T)
            x, y = to_device(tokens, self.rt.device)

            # DDP averages the gradients in the last backward pass. Without DDP the attribute has no effect.
            self.ddp_loss.require_backward_grad_sync = i == len(batch) - 1  # type: ignore[assignment]
            with self.rt.autocast():
                objective, loss = self.ddp_loss(x, y)

            # The micro-batches are of equal size, so the mean of their means is the mean over the step. The loss scale
            # of float16 keeps small gradients from becoming zero.
            self.scaler.scale(objective / len(batch)).backward()
            local_loss += loss / len(batch)

        # Undo the loss scale, and clip. The norm is that of all gradients together, in float32 also if these are
        # bfloat16.
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        gradients = [p.grad.float() for p in self.model.parameters() if p.grad is not None]
        total_norm = nn.utils.get_total_norm(gradients)
        if self.cfg.grad_clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.grad_clip, total_norm)
        return local_loss.item(), total_norm.item()

    def update(self) -> None:
        """Step all optimizers; not to be called unless the norm is finite. GradScaler.step would decide that for each
        optimizer alone, and half of the weights would move. Every rank must call it."""
        # [memory] bfloat16 gradients become float32 ones of the weights; the parameters are then rounded from these.
        rounded = rounded_pairs(self.model, self.weights)
        for p, weight in rounded:
            weight.grad = None if p.grad is None else p.grad.float()
        for optimizer in self.optimizers.values():
            optimizer.step()
        copy_weights(self.model, self.weights)
        for _, weight in rounded:
            weight.grad = None

    def finish_step(self) -> None:
        """Free the gradients, and adapt the loss scale, whether there was an update or not."""
        # After an overflow this halves the loss scale; otherwise it doubles the scale now and then.
        self.scaler.update()

        # [memory] DDP's gradients live in its buckets and are set to zero there. Without DDP they are freed.
        self.model.zero_grad(set_to_none=self.rt.world_size == 1)
