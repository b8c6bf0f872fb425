"""The weights that the optimizers update: the model's own, or float32 master weights of a bfloat16 model.

    master_weights = MasterWeights(model, keep_float32_copy=True)
    ... backward ...; master_weights.take_gradients(); optimizer.step(); master_weights.copy_to_model()

Called by training/step.py. With --weights bfloat16, a step goes around:

    model, bfloat16 weights  --- backward --->        bfloat16 gradients
              ^                                               |
        copy_to_model                                  take_gradients
              |                                               v
    master weights, float32  <--- optimizer.step ---  float32 gradients
"""

import torch
from torch import Tensor, nn


class MasterWeights:
    """Float32 weights by name, each parameter once (a tied head is the embedding).

    With `keep_float32_copy` the model's parameters and gradients become bfloat16, and float32 copies are updated in
    their place (master weights, Micikevicius et al. 2018): small updates are not rounded away, and gradients need half
    the bandwidth between ranks. Checkpoints store the float32 weights.
    """

    def __init__(self, model: nn.Module, keep_float32_copy: bool):
        # The parameters to update, by name. Without a copy, these are the model's own.
        self.model = model
        self.named: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (the model's bfloat16 parameter, its float32 copy)

        # With a copy, the names stand for the copies, and the model's parameters are rounded to bfloat16 in place.
        if keep_float32_copy:
            self.named = {name: nn.Parameter(p.detach().clone()) for name, p in self.named.items()}
            self.pairs = list(zip(model.parameters(), self.named.values(), strict=True))
            for p in model.parameters():
                p.data = p.data.bfloat16()

    def take_gradients(self, keep: bool = False) -> list[nn.Parameter]:
        """Move the gradients from the model to the float32 weights, or copy them with `keep`, and return these
        weights. Without a float32 copy the gradients are there already."""
        for p, master in self.pairs:
            # A parameter that the forward pass skips has no gradient.
            master.grad = None if p.grad is None else p.grad.float()
            if not keep:
                p.grad = None
        return list(self.named.values())

    def drop_gradients(self) -> None:
        """Free the gradients of the float32 copies; those of the model stay as they are."""
        for _, master in self.pairs:
            master.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """After an update, copy the float32 weights, rounded to bfloat16, into the model."""
        if self.pairs:
            parameters, masters = zip(*self.pairs, strict=True)
            torch._foreach_copy_(parameters, masters)

    def state_dict(self) -> dict[str, Tensor]:
        """The model's state dict, in float32."""
        # A tied head has two names and one parameter. keep_vars returns the parameters themselves, so that master_of
        # finds their float32 copies.
        master_of = dict(self.pairs)
        state = self.model.state_dict(keep_vars=True)
        return {name: master_of.get(p, p).detach() for name, p in state.items()}
