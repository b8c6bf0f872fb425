"""The optimizers of a run: which one updates which parameters, with which rate and weight decay.

    optimizers = build_optimizers(model, cfg, rt)     # [AdamW], or [AdamW, Muon]
    for optimizer in optimizers:
        optimizer.step()
    state = copy_state(optimizers[0], rt)             # for a checkpoint: whole, on rank 0
    load_state([optimizers[0]], [state])              # on any number of ranks

Called by training/step.py, the last two by lifecycle/start.py. The algorithms are torch's AdamW and training/muon.py;
training/zero.py shards them over the ranks. To add an optimizer: its name in Recipe.optimizer (training/config.py), and
its entry in OPTIMIZERS.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from model import GPT
from system.distributed import Runtime
from system.machine import copy_to_host
from training.config import Recipe, TrainConfig
from training.master_weights import add_master_weights, master_weight
from training.muon import Muon

# What a parameter is, which decides on its optimizer, rate and weight decay.
EMBEDDING = "embedding"  # the weight of an nn.Embedding; a tied head is one
BLOCK_MATRIX = "block matrix"  # two dimensions or more, in a block of the transformer
MATRIX = "matrix"  # two dimensions or more, elsewhere: an untied head
VECTOR = "vector"  # biases and gains
ROLES = (EMBEDDING, BLOCK_MATRIX, MATRIX, VECTOR)


class OptimizerFacts(NamedTuple):
    """What this program must know of an optimizer."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]  # besides the groups
    group_settings: Callable[[Recipe, str], dict[str, Any]]  # those of the group of a role, `peak_lr` among them
    takes: set[str]  # the roles of the parameters that it updates; AdamW updates the rest
    state_per_weight: int  # how many float32 numbers it keeps for each weight


def adamw_settings(cfg: Recipe, role: str) -> dict[str, Any]:
    """AdamW decays matrices but not vectors, as in other GPT-2 reproductions."""
    return {
        "peak_lr": cfg.max_lr * cfg.embed_lr_scale if role == EMBEDDING else cfg.max_lr,
        "weight_decay": 0.0 if role == VECTOR else cfg.weight_decay,
    }


OPTIMIZERS = {
    "adamw": OptimizerFacts(
        torch.optim.AdamW,
        {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True},  # fused: one kernel updates many parameters
        adamw_settings,
        takes=set(ROLES),
        state_per_weight=2,
    ),
    "muon": OptimizerFacts(
        Muon,
        {"momentum": 0.95},
        lambda cfg, role: {"peak_lr": cfg.muon_lr},
        takes={BLOCK_MATRIX},
        state_per_weight=1,
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
    # The order of the parameters, role by role, is part of the checkpoint format.
    groups: dict[str, list[dict[str, Any]]] = {}
    roles = find_roles(model)
    for role in ROLES:
        params = [master_weight(p) for p in roles if roles[p] == role]
        if params:
            name = cfg.optimizer if role in OPTIMIZERS[cfg.optimizer].takes else "adamw"
            groups.setdefault(name, []).append({"params": params, **OPTIMIZERS[name].group_settings(cfg, role)})
    return groups


def state_bytes(model: GPT, cfg: Recipe, shards: int = 1) -> int:
    """Bytes of the optimizers' state once the first step has created it. With several shards, about those of the
    largest one: a parameter is never divided, and GPT-2's embedding is a third of all weights."""
    total = 0
    for name, groups in parameter_groups(model, cfg).items():
        weights = [p.numel() for group in groups for p in group["params"]]
        in_shard = max(sum(weights) // shards, max(weights))
        total += 4 * OPTIMIZERS[name].state_per_weight * in_shard
    return total


def build_optimizers(model: GPT, cfg: TrainConfig, rt: Runtime) -> list[torch.optim.Optimizer]:
    """The run's optimizers. With --zero-stage 1 on several ranks, each rank keeps the state of its share only. With
    --weights bfloat16 the model is rounded to bfloat16, and they update float32 copies."""
    # float16 has a loss scale, which bfloat16 gradients would not go with.
    if cfg.weights == "bfloat16" and rt.dtype != torch.float16:
        add_master_weights(model)

    # Muon makes each of the matrices orthogonal that attention stacks in one weight.
    for block in model.transformer.h:
        weight = master_weight(block.attn.c_attn.weight)
        weight.matrix_rows = block.attn.matrix_rows  # type: ignore[attr-defined]  # a note of our own

    optimizers: list[torch.optim.Optimizer] = []
    for name, groups in parameter_groups(model, cfg).items():
        facts = OPTIMIZERS[name]
        arguments = {"lr": cfg.max_lr, **facts.arguments}  # the schedule sets every group's rate before each step
        if cfg.zero_stage == 1 and rt.world_size > 1:
            from training.zero import ShardedOptimizer

            optimizer: torch.optim.Optimizer = ShardedOptimizer(groups, facts.optimizer_class, rt, **arguments)
        else:
            optimizer = facts.optimizer_class(groups, **arguments)
        optimizers.append(optimizer)
    return optimizers


# ------------------------------------------------------------------------- the state, as a checkpoint has it


def copy_state(optimizer: torch.optim.Optimizer, rt: Runtime) -> dict[str, Any] | None:
    """A copy of an optimizer's whole state on rank 0, in host memory; None on the others. Every rank must call it."""
    # A sharded state is gathered, which makes the copy: a second one would be 12 GB for GPT-2 1558M.
    if hasattr(optimizer, "gather_state"):
        return optimizer.gather_state()
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

        # The groups of this run. Optimizer.state_dict is called on the class, because a sharded optimizer's own raises
        # an error.
        own_groups = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
        optimizer.load_state_dict({"state": state["state"], "param_groups": own_groups})
