"""Master weights: with --weights bfloat16 the model's parameters and gradients are bfloat16, and the optimizers update
float32 copies of them (Micikevicius et al. 2018). So small updates are not rounded away, and gradients need half the
bandwidth between ranks. Checkpoints store the float32 copies.

    model, bfloat16 weights  --- backward --->        bfloat16 gradients
              ^                                               |
          take_weights                                  give_gradients
              |                                               v
    master weights, float32  <--- optimizer.step ---  float32 gradients

With --weights float32 there are none, and these functions do nothing. Called by training/step.py and training/optim.py;
lifecycle/save.py asks for the float32 weights.
"""

import torch
from torch import Tensor, nn

from model import GPT


def add_master_weights(model: GPT) -> None:
    """Give every parameter a float32 copy, as its attribute `master`, and round the parameter itself to bfloat16."""
    for p in model.parameters():
        p.master = nn.Parameter(p.detach().clone())  # type: ignore[attr-defined]  # a note of our own
        p.data = p.data.bfloat16()


def master_weight(p: Tensor) -> Tensor:
    """What an optimizer updates for a parameter of the model: its float32 copy or, without one, the parameter."""
    return getattr(p, "master", p)


def give_gradients(model: GPT) -> None:
    """Before the optimizers step: the gradients of the model, in float32, become those of the master weights."""
    for p in model.parameters():
        master = master_weight(p)
        if master is not p:
            # A parameter that the forward pass skips has no gradient.
            master.grad = None if p.grad is None else p.grad.float()


@torch.no_grad()
def take_weights(model: GPT) -> None:
    """After the optimizers have stepped: the model's weights are the master weights, rounded."""
    parameters: list[Tensor] = [p for p in model.parameters() if master_weight(p) is not p]
    masters = [master_weight(p) for p in parameters]
    if parameters:
        torch._foreach_copy_(parameters, masters)
    for master in masters:
        master.grad = None


def float32_state_dict(model: GPT) -> dict[str, Tensor]:
    """The model's state dict, in float32."""
    # keep_vars returns the parameters themselves, so that their copies are found.
    state = model.state_dict(keep_vars=True)
    return {name: master_weight(p).detach() for name, p in state.items()}
