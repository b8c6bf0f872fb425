"""The weights that a run updates, the optimizers that do it, and how their state is saved and loaded.

    weights = MasterWeights(model, keep_float32_copy=False)
    optimizers = build_optimizers(weights.named, cfg, rt)     # [AdamW], or [AdamW, Muon]

Called by training/step.py. The algorithms are torch's AdamW and training/muon.py. To add an optimizer: its name in
TrainConfig.optimizer, its class in OPTIMIZERS, its parameters in parameter_groups.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from system.distributed import Runtime
from system.machine import copy_to_host
from training.config import TrainConfig
from training.muon import Muon, mark_matrices

# ------------------------------------------------------------------------- the weights to update


class MasterWeights:
    """Float32 weights by name, each parameter once (a tied head is the embedding).

    With `keep_float32_copy` the model's parameters and gradients become bfloat16, and float32 copies are updated in
    their place (master weights, Micikevicius et al. 2018): small updates are not rounded away, and gradients need half
    the bandwidth between ranks. Checkpoints store the float32 weights. A step then goes around:

        model, bfloat16 weights  --- backward --->        bfloat16 gradients
                  ^                                               |
            copy_to_model                                  take_gradients
                  |                                               v
        master weights, float32  <--- optimizer.step ---  float32 gradients
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


# ------------------------------------------------------------------------- which optimizer updates which


class Kind(NamedTuple):
    """An optimizer's class, its arguments besides the groups, and how many float32 numbers it keeps for each weight."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Callable[[TrainConfig], dict[str, Any]]
    state_per_weight: int


OPTIMIZERS = {
    # fused: one kernel updates many parameters.
    "adamw": Kind(
        torch.optim.AdamW, lambda cfg: {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.adam_eps, "fused": True}, 2
    ),
    "muon": Kind(Muon, lambda cfg: {"momentum": cfg.muon_momentum, "newton_schulz": cfg.newton_schulz}, 1),
}


def parameter_groups(named: dict[str, nn.Parameter], cfg: TrainConfig) -> dict[str, list[dict[str, Any]]]:
    """Every parameter in exactly one group, by the optimizer that takes it, as {"adamw": [...], "muon": [...]}.

    named: the parameters by their names in the model, each once. AdamW decays matrices but not vectors (biases, gains),
    as in other GPT-2 reproductions. With --optimizer muon the matrices of the blocks go to Muon and the rest stays with
    AdamW. The schedule multiplies each group's `peak_lr`.
    """
    # Muon takes the matrices of the blocks, such as "transformer.h.3.mlp.c_fc.weight". Of the rest, embeddings and
    # vectors may have rates of their own.
    blocks, embeddings, matrices, vectors = [], [], [], []
    for name, p in named.items():
        if cfg.optimizer == "muon" and p.dim() == 2 and ".h." in name:
            mark_matrices(name, p)
            blocks.append(p)
        elif name.split(".")[1] in ("wte", "wpe"):
            embeddings.append(p)
        elif p.dim() >= 2:
            matrices.append(p)
        else:
            vectors.append(p)

    # The order of the groups and of the parameters in them is part of the checkpoint format.
    def group(params: list[nn.Parameter], weight_decay: float, peak_lr: float) -> dict[str, Any]:
        return {"params": params, "weight_decay": weight_decay, "peak_lr": peak_lr}

    groups = {
        "adamw": [
            group(embeddings, cfg.weight_decay, cfg.max_lr * cfg.embed_lr_scale),
            group(matrices, cfg.weight_decay, cfg.max_lr),
            group(vectors, cfg.vector_weight_decay, cfg.max_lr * cfg.vector_lr_scale),
        ],
        "muon": [group(blocks, cfg.muon_weight_decay, cfg.muon_lr)],
    }
    filled = {name: [g for g in groups_of_one if g["params"]] for name, groups_of_one in groups.items()}
    return {name: groups_of_one for name, groups_of_one in filled.items() if groups_of_one}


def build_optimizers(named: dict[str, nn.Parameter], cfg: TrainConfig, rt: Runtime) -> list[torch.optim.Optimizer]:
    """The run's optimizers. With --zero-stage 1 on several ranks, each rank keeps the state of its share only."""
    optimizers = []
    for name, groups in parameter_groups(named, cfg).items():
        kind = OPTIMIZERS[name]
        arguments = {"lr": cfg.max_lr, **kind.arguments(cfg)}  # the schedule sets every group's rate before each step
        if cfg.zero_stage == 1 and rt.world_size > 1:
            optimizers.append(ShardedOptimizer(groups, kind.optimizer_class, rt, **arguments))
        else:
            optimizers.append(kind.optimizer_class(groups, **arguments))
    return optimizers


def state_bytes(named: dict[str, nn.Parameter], cfg: TrainConfig) -> int:
    """Bytes of the optimizers' state once the first step has created it, all ranks together."""
    total = 0
    for name, groups in parameter_groups(named, cfg).items():
        weights = sum(p.numel() for group in groups for p in group["params"])
        total += 4 * weights * OPTIMIZERS[name].state_per_weight
    return total


# ------------------------------------------------------------------------- ZeRO-1, and the state of a checkpoint


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer of which each rank keeps only the state of its share of the parameters (ZeRO-1, Rajbhandari et al.
    2020). state_dict and load_state_dict are those of the whole optimizer, for any number of ranks."""

    def __init__(self, groups: list[dict], optimizer_class: type, rt: Runtime, **arguments: Any):
        self.rt = rt
        # One broadcast per rank instead of one per parameter: the update takes a quarter of the time.
        super().__init__(groups, optimizer_class, parameters_as_bucket_view=True, **arguments)

    def state_dict(self) -> dict[str, Any] | None:
        """A copy of the whole state on rank 0, in host memory; None on the others. Every rank must call it.

        torch's consolidate_state_dict sends pickles and unpacks them byte by byte, at 16 MB/s: minutes for a large
        model. Here each owner broadcasts its tensors, one at a time.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        own = {i: self.optim.state[p] for i, p in enumerate(params) if p in self.optim.state}
        full = torch.optim.Optimizer.state_dict(self)  # the groups; each rank's part of the state is added below

        # What every rank has: for each of its parameters the names and shapes of the state.
        shapes = {i: {name: tuple(t.shape) for name, t in state.items()} for i, state in own.items()}
        for owner, shapes_there in enumerate(self.rt.gather(shapes)):
            for i, shapes_of_one in shapes_there.items():
                full["state"][i] = {}
                for name, shape in shapes_of_one.items():
                    tensor = own[i][name] if i in own else torch.empty(shape, device=params[i].device)
                    self.rt.broadcast(tensor, owner)
                    if self.rt.is_main:
                        full["state"][i][name] = tensor.to("cpu", copy=True)
        full["state"] = dict(sorted(full["state"].items()))
        return full if self.rt.is_main else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state; keep this rank's share."""
        super().load_state_dict(state)

        # torch leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133), and keeps a copy.
        for p, tensors in self.optim.state.items():
            tensors.update({name: tensor.to(p.device) for name, tensor in tensors.items()})
        self.state.clear()


def copy_state(optimizer: torch.optim.Optimizer, rt: Runtime) -> dict[str, Any] | None:
    """A copy of an optimizer's whole state on rank 0, in host memory; None on the others. Every rank must call it."""
    # A sharded state is gathered, which makes the copy: a second one would be 12 GB for GPT-2 1558M.
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    return copy_to_host(optimizer.state_dict()) if rt.is_main else None


def load_state(optimizers: list[torch.optim.Optimizer], states: list[dict]) -> None:
    """Load the state dicts of these optimizers, from any --zero-stage and number of ranks. Settings such as weight
    decay stay those of this run. Raises ValueError, among others, if the state is not of these parameters."""
    for optimizer, state in zip(optimizers, states, strict=True):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for i, tensors in state["state"].items():
            # AdamW's step count is a single number; all else has the shape of its parameter.
            if any(t.numel() != 1 and t.shape != params[i].shape for t in tensors.values()):
                raise ValueError(f"the state of parameter {i} does not fit its shape {list(params[i].shape)}")
        own_groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": own_groups})
