"""One optimizer step: the gradients of a batch, clipped, and the update; and the state that must survive a kill.

trainer.set_step(now)                           # now: schedule.at(...); sets what depends on the step
loss, norm = trainer.compute_gradients(batch)   # batch: (micro_steps, B, T + 1), this rank's tokens
trainer.update()                                # or not, if the gradients are not finite
trainer.finish_step()

saved = trainer.state.copy()                    # call it on every rank; rank 0 gets copies in host memory
trainer.state.load(saved)                       # on any number of ranks, with any --zero-stage
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from model import GPT
from system.distributed import Runtime
from system.errors import explain_errors, require
from system.machine import copy_to_host
from training.config import TrainConfig
from training.head import Loss
from training.loader import to_device
from training.optim import NamedOptimizer
from training.schedule import Step

# ------------------------------------------------------------------------- what must survive a kill


@dataclass(eq=False)
class State:
    """What a checkpoint holds: the float32 weights, which model_*.pt has, and everything else that a resumed run needs
    to continue exactly.

    A component has torch's two methods state_dict and load_state_dict, which every rank calls. Every component is saved
    and, if its saved state is not empty, loaded, and compared between ranks unless it is sharded. A checkpoint must
    have the same components as the program that resumes from it.
    """

    # The parameters of the model or, if those are bfloat16, the weights that they are rounded from.
    weights: dict[str, Tensor]
    components: dict[str, Any]  # each optimizer, the loss scale, and what an experiment adds
    rt: Runtime
    step: int = 0  # how many steps are done
    sequences: int = 0  # how many sequences of the data those steps have read

    def copy(self) -> dict[str, Any]:
        """All but the weights, as copies in host memory. Only rank 0 has the components. Every rank must call this."""
        components = {}
        for name, component in self.components.items():
            state = component.state_dict()
            if self.rt.is_main:
                # A sharded state is a copy already. Another copy would be 12 GB for GPT-2 1558M.
                components[name] = state if is_sharded(component) else copy_to_host(state)
        return {"step": self.step, "sequences": self.sequences, "components": components}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `copy` returned. Raises UserError if the components are different, or do not fit."""
        step, components = saved["step"], saved["components"]
        fix = "use the code that wrote it, or start a new run from its weights with --init-from"
        different = ", ".join(sorted(self.components.keys() ^ components.keys()))
        problem = f"the checkpoint of step {step} and this program have different components"
        require(not different, f"{problem}: {different}; {fix}")
        for name, component in self.components.items():
            # An optimizer has an empty state before its first step, and so has a loss scale that is not in use.
            if components[name]:
                with explain_errors(f"the state of {name} at step {step} does not fit this run", fix, ValueError):
                    component.load_state_dict(components[name])
        self.step, self.sequences = step, saved["sequences"]

    def tensors_to_compare(self) -> dict[str, list[Tensor]]:
        """{name: tensors} of everything that must be equal on all ranks. The shards of an optimizer differ."""
        whole = {name: part.state_dict() for name, part in self.components.items() if not is_sharded(part)}
        return {"weights": [*self.weights.values()]} | {name: tensors_of(state) for name, state in whole.items()}

    def num_bytes(self) -> int:
        """Bytes of the tensors in a checkpoint, without those of the optimizers."""
        others = [part.state_dict() for part in self.components.values() if not isinstance(part, NamedOptimizer)]
        return sum(t.nbytes for t in [*self.weights.values(), *tensors_of(others)])


def is_sharded(component: Any) -> bool:
    """Whether each rank has only its share of a component (ZeRO-1)."""
    return isinstance(component, NamedOptimizer) and component.is_sharded


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested containers, and the numbers as tensors."""
    return [torch.as_tensor(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor | int | float)]


# ------------------------------------------------------------------------- a step


@dataclass(eq=False)
class Trainer:
    """A model on this rank's device, with everything that updates it."""

    model: GPT
    state: State
    optimizers: list[torch.optim.Optimizer]
    loss: Loss  # (x, y) -> (what is minimized, mean cross-entropy); validation calls it
    ddp_loss: nn.Module  # the same for training: DDP averages its gradients over the ranks
    B: int  # the micro-batch: sequences in a forward pass
    cfg: TrainConfig
    rt: Runtime
    now: Step  # the step of the last call of set_step

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scale of float16. In other precisions the loss scale does nothing."""
        return self.state.components["loss_scale"]

    def set_step(self, now: Step) -> None:
        """Set everything that depends on the step: here the learning rate of every parameter group. The loop calls this
        before it saves, evaluates or trains, so that all three see the same step."""
        self.now = now
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * now.lr_factor

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside the `with` statement, the model is in eval mode, in which dropout, for example, does nothing."""
        self.model.eval()
        try:
            yield
        finally:
            self.model.train()

    def compute_gradients(self, batch: Tensor) -> tuple[float, float]:
        """Forward and backward over the micro-batches of a step, then clip the global norm to --grad-clip.

        batch: (micro_steps, B, T + 1) uint16, this rank's tokens. The gradients are those of the mean objective over
        all ranks. On one rank, raises UserError if a parameter that should train has no gradient; DDP refuses such a
        parameter by itself. Every rank must call this. Returns

            loss    mean cross-entropy over this rank's sequences of the step, in nats per token
            norm    L2 norm of the gradients of all parameters, before clipping; the same on all ranks
        """
        # The random numbers of dropout, for example, follow from the seed, the step and the rank, so a resumed run
        # draws the same ones.
        torch.manual_seed(self.cfg.seed + self.now.number * self.rt.world_size + self.rt.rank)

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

        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

        # An optimizer skips a parameter without a gradient, and nobody would notice.
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        untrained = ", ".join(name for name, p in trained.items() if p.grad is None)
        require(not untrained, f"no gradient for {untrained}: use it in the network, or call its requires_grad_(False)")

        # Clip. The norm is that of all gradients together, in float32 even if the gradients are bfloat16.
        total_norm = nn.utils.get_total_norm([p.grad.float() for p in trained.values() if p.grad is not None])
        if self.cfg.grad_clip:
            nn.utils.clip_grads_with_norm_(self.model.parameters(), self.cfg.grad_clip, total_norm)
        return local_loss.item(), total_norm.item()

    def update(self) -> None:
        """Step all optimizers. Call this only if the norm is finite. GradScaler.step is not used, because it decides
        for each optimizer alone, and could update only some of the weights. Every rank must call this."""
        # [memory] bfloat16 gradients become float32 gradients of the weights. After the update, the parameters are the
        # rounded weights.
        rounded = self.rounded_parameters()
        for p, weight in rounded:
            weight.grad = None if p.grad is None else p.grad.float()
        for optimizer in self.optimizers:
            optimizer.step()
        self.round_parameters()
        for _, weight in rounded:
            weight.grad = None

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Copy the float32 weights into the bfloat16 parameters, if there are any. Call this whenever the weights have
        changed."""
        rounded = self.rounded_parameters()
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [weight for _, weight in rounded])

    def rounded_parameters(self) -> list[tuple[Tensor, Tensor]]:
        """The pairs (bfloat16 parameter, float32 weight) of --param-dtype bfloat16; in float32 there are none."""
        weights = self.state.weights
        return [(p, weights[name]) for name, p in self.model.named_parameters() if p is not weights[name]]

    def finish_step(self) -> None:
        """Clear the gradients and adapt the loss scale, whether there was an update or not."""
        # After an overflow this halves the loss scale. Otherwise it doubles the scale now and then.
        self.scaler.update()

        # [memory] DDP's gradients live in its buckets and are set to zero there. Without DDP they are freed.
        self.model.zero_grad(set_to_none=self.rt.world_size == 1)

    def state_dict(self) -> dict[str, Tensor]:
        """The state dict of the model with the float32 weights, as model_*.pt holds it. A tied head appears under
        both names. Buffers come from the model."""
        weight_of = {p: self.state.weights[name] for name, p in self.model.named_parameters()}
        tensors = self.model.state_dict(keep_vars=True)
        return {name: weight_of.get(tensor, tensor).detach() for name, tensor in tensors.items()}
