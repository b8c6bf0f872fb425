"""The optimizers of a run: which one updates which parameters, master weights, ZeRO-1, and the state of a checkpoint.

    optimizers = build_optimizers(model, cfg, rt)     # [AdamW], or [AdamW, Muon]
    for optimizer in optimizers:
        optimizer.step()

Called by train_gpt2.py. The algorithms are torch's AdamW and training/muon.py. To add an optimizer: its name in
Recipe.optimizer (training/config.py), and its entry in OPTIMIZERS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from model import GPT
from system.distributed import Runtime
from system.machine import copy_to_host
from training.config import Recipe, TrainConfig
from training.muon import Muon

# ------------------------------------------------------------------------- which optimizer updates which parameters

# What a parameter is, which decides on its optimizer, rate and weight decay.
EMBEDDING = "embedding"  # the weight of an nn.Embedding; a tied head is one
BLOCK_MATRIX = "block matrix"  # two dimensions, in a block of the transformer
MATRIX = "matrix"  # two dimensions, elsewhere: an untied head
VECTOR = "vector"  # biases and gains
ROLES = (EMBEDDING, BLOCK_MATRIX, MATRIX, VECTOR)


class OptimizerFacts(NamedTuple):
    """What this program must know of an optimizer."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: Callable[[Recipe], dict[str, Any]]  # besides the groups
    takes: set[str]  # the roles of the parameters that it updates; AdamW updates the rest
    state_per_weight: int  # how many float32 numbers it keeps for each weight
    # (peak rate, weight decay) of its parameters; without it, those of AdamW for the same role
    rate_and_decay: Callable[[Recipe], tuple[float, float]] | None = None


OPTIMIZERS = {
    # fused: one kernel updates many parameters.
    "adamw": OptimizerFacts(
        torch.optim.AdamW,
        lambda cfg: {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.adam_eps, "fused": True},
        set(ROLES),
        state_per_weight=2,
    ),
    "muon": OptimizerFacts(
        Muon,
        lambda cfg: {"momentum": cfg.muon_momentum, "newton_schulz": cfg.newton_schulz},
        {BLOCK_MATRIX},
        state_per_weight=1,
        rate_and_decay=lambda cfg: (cfg.muon_lr, cfg.muon_weight_decay),
    ),
}


def find_roles(model: GPT) -> dict[nn.Parameter, str]:
    """The role of each parameter, by the module that owns it and its dimensions; each parameter once."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    in_blocks = set(model.transformer.h.parameters())
    roles = {}
    for p in model.parameters():
        if p in embeddings:
            roles[p] = EMBEDDING
        elif p.dim() < 2:
            roles[p] = VECTOR
        elif p in in_blocks:
            roles[p] = BLOCK_MATRIX
        else:
            roles[p] = MATRIX
    return roles


def parameter_groups(model: GPT, cfg: Recipe) -> dict[str, list[dict[str, Any]]]:
    """Every parameter in exactly one group, by the optimizer that updates it, as {"adamw": [...], "muon": [...]}. The
    schedule multiplies each group's `peak_lr`."""
    # AdamW decays matrices but not vectors, as in other GPT-2 reproductions.
    weight_decay = dict.fromkeys(ROLES, cfg.weight_decay) | {VECTOR: cfg.vector_weight_decay}
    peak_lr = dict.fromkeys(ROLES, cfg.max_lr)
    peak_lr[EMBEDDING] *= cfg.embed_lr_scale
    peak_lr[VECTOR] *= cfg.vector_lr_scale
    chosen = OPTIMIZERS[cfg.optimizer]
    if chosen.rate_and_decay:
        for role in chosen.takes:
            peak_lr[role], weight_decay[role] = chosen.rate_and_decay(cfg)

    # The order of the parameters, role by role, is part of the checkpoint format.
    groups: dict[str, list[dict[str, Any]]] = {}
    roles = find_roles(model)
    for role in ROLES:
        params = [master_weight(p) for p in roles if roles[p] == role]
        if params:
            name = cfg.optimizer if role in chosen.takes else "adamw"
            group = {"params": params, "weight_decay": weight_decay[role], "peak_lr": peak_lr[role]}
            groups.setdefault(name, []).append(group)
    return groups


def state_bytes(model: GPT, cfg: Recipe) -> int:
    """Bytes of the optimizers' state once the first step has created it, all ranks together."""
    total = 0
    for name, groups in parameter_groups(model, cfg).items():
        weights = sum(p.numel() for group in groups for p in group["params"])
        total += 4 * weights * OPTIMIZERS[name].state_per_weight
    return total


def build_optimizers(model: GPT, cfg: TrainConfig, rt: Runtime) -> list[torch.optim.Optimizer]:
    """The run's optimizers. With --zero-stage 1 on several ranks, each rank keeps the state of its share only. With
    --weights bfloat16 the model is rounded to bfloat16, and they update float32 copies."""
    # float16 has a loss scale, which bfloat16 gradients would not go with.
    if cfg.weights == "bfloat16" and rt.dtype != torch.float16:
        add_master_weights(model)

    optimizers: list[torch.optim.Optimizer] = []
    for name, groups in parameter_groups(model, cfg).items():
        facts = OPTIMIZERS[name]
        arguments = {"lr": cfg.max_lr, **facts.arguments(cfg)}  # the schedule sets every group's rate before each step
        if cfg.zero_stage == 1 and rt.world_size > 1:
            optimizer: torch.optim.Optimizer = ShardedOptimizer(groups, facts.optimizer_class, rt, **arguments)
        else:
            optimizer = facts.optimizer_class(groups, **arguments)
        update_through_master_weights(optimizer, model)
        optimizers.append(optimizer)
    return optimizers


# ------------------------------------------------------------------------- master weights

# With --weights bfloat16 the model's parameters and gradients are bfloat16, and the optimizers update float32 copies
# (master weights, Micikevicius et al. 2018): small updates are not rounded away, and gradients need half the bandwidth
# between ranks. Checkpoints store the float32 weights. The loop sees nothing of it: hooks run before and after each
# `optimizer.step()`.
#
#     model, bfloat16 weights  --- backward --->        bfloat16 gradients
#               ^                                               |
#           after the step                               before the step
#               |                                               v
#     master weights, float32  <--- optimizer.step ---  float32 gradients


def add_master_weights(model: GPT) -> None:
    """Give every parameter a float32 copy, as its attribute `master`, and round the parameter itself to bfloat16."""
    for p in model.parameters():
        master = nn.Parameter(p.detach().clone())
        master.__dict__.update(p.__dict__)  # what the network says about its parameter, such as `matrix_rows`
        p.master = master  # type: ignore[attr-defined]  # a note of our own
        p.data = p.data.bfloat16()


def master_weight(p: Tensor) -> Tensor:
    """What an optimizer updates for a parameter of the model: its float32 copy or, without one, the parameter."""
    return getattr(p, "master", p)


def update_through_master_weights(optimizer: torch.optim.Optimizer, model: GPT) -> None:
    """Let every step of an optimizer take the model's gradients, and bring its new weights back into the model."""
    own = {p for group in optimizer.param_groups for p in group["params"]}
    parameters: list[Tensor] = [p for p in model.parameters() if master_weight(p) is not p and master_weight(p) in own]
    masters = [master_weight(p) for p in parameters]
    if not parameters:
        return

    def before_step(*_: Any) -> None:
        for p, master in zip(parameters, masters, strict=True):
            # A parameter that the forward pass skips has no gradient.
            master.grad = None if p.grad is None else p.grad.float()

    @torch.no_grad()
    def after_step(*_: Any) -> None:
        torch._foreach_copy_(parameters, masters)
        for master in masters:
            master.grad = None

    optimizer.register_step_pre_hook(before_step)
    optimizer.register_step_post_hook(after_step)


def float32_state_dict(model: GPT) -> dict[str, Tensor]:
    """The model's state dict, in float32."""
    # keep_vars returns the parameters themselves, so that their copies are found.
    state = model.state_dict(keep_vars=True)
    return {name: master_weight(p).detach() for name, p in state.items()}


# ------------------------------------------------------------------------- ZeRO-1, and the state of a checkpoint


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer of which each rank keeps only the state of its share of the parameters (ZeRO-1, Rajbhandari et al.
    2020). state_dict and load_state_dict are those of the whole optimizer, for any number of ranks."""

    def __init__(self, groups: list[dict], optimizer_class: type, rt: Runtime, **arguments: Any):
        self.rt = rt
        # One broadcast per rank instead of one per parameter: the update takes a quarter of the time.
        super().__init__(groups, optimizer_class, parameters_as_bucket_view=True, **arguments)

        # A small group may be on other ranks altogether. The optimizer never sees an empty one, which the foreach
        # kernels of torch refuse.
        part = self.optim  # torch's name for this rank's part

        def hide_empty_groups(*_: Any) -> None:
            self.all_groups = part.param_groups
            part.param_groups = [group for group in part.param_groups if group["params"]]

        def show_all_groups(*_: Any) -> None:
            part.param_groups = self.all_groups

        part.register_step_pre_hook(hide_empty_groups)
        part.register_step_post_hook(show_all_groups)

    def state_dict(self) -> dict[str, Any] | None:  # type: ignore[override]  # torch's raises an error instead
        """A copy of the whole state on rank 0, in host memory; None on the others. Every rank must call it.

        torch's public way, consolidate_state_dict and then state_dict, sends pickles and unpacks them byte by byte, at
        16 MB/s: minutes for a large model. Here each owner broadcasts its tensors, one at a time.
        """
        # The state_dict of this rank's part counts parameters within that part, so states are looked up by parameter.
        params = [p for group in self.param_groups for p in group["params"]]
        own = {i: self.optim.state[p] for i, p in enumerate(params) if p in self.optim.state}

        # The groups, with all ranks' parameters in the order in which an optimizer that is not sharded has them.
        # ZeroRedundancyOptimizer's own state_dict raises an error unless consolidate_state_dict has run.
        full = torch.optim.Optimizer.state_dict(self)

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

        # torch leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133).
        for p, tensors in self.optim.state.items():
            tensors.update({name: tensor.to(p.device) for name, tensor in tensors.items()})

        # It also keeps the whole state in `self.state`, of which nothing is used; no method drops it.
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

        # The tensors are mapped from the checkpoint's file, which could not be deleted while they are in use.
        if params and params[0].device.type == "cpu":
            state = {"state": copy_to_host(state["state"])}

        # The groups of this run. Optimizer.state_dict is called on the class, because a sharded optimizer's own
        # gathers the states of all ranks.
        own_groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": own_groups})
