"""The optimizers of a run: what updates each parameter, at which peak rate, with which weight decay.

    optimizers = build_optimizers(model, weights, cfg, rt)      # {"adamw": ..., "muon": ...}
    for optimizer in optimizers.values():
        optimizer.step()

`choose_update` is the one place that decides. The algorithms are torch's AdamW and training/muon.py. To add an
optimizer: its name in Recipe.optimizer (training/config.py), its entry in OPTIMIZERS, its lines in choose_update.
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT, StackedLinear
from system.distributed import Runtime
from system.errors import UserError
from training.config import Recipe, TrainConfig
from training.muon import Muon


@dataclass(frozen=True)
class Update:
    """What updates a parameter. Parameters with equal updates form a group of their optimizer, whose settings are
    these; the schedule multiplies peak_lr."""

    optimizer: str  # its name in OPTIMIZERS
    peak_lr: float
    weight_decay: float
    matrix_rows: tuple[int, ...] = ()  # of the matrices that the parameter stacks; () if it is one


class Optimizer(NamedTuple):
    """What this program must know of an optimizer."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]  # besides the groups
    state_per_weight: int  # how many float32 numbers it keeps for each weight


OPTIMIZERS = {
    # fused: one kernel updates many parameters
    "adamw": Optimizer(torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}, state_per_weight=2),
    "muon": Optimizer(Muon, {"momentum": 0.95}, state_per_weight=1),
}


def choose_update(name: str, p: Tensor, module: nn.Module, cfg: Recipe) -> Update:
    """What updates the parameter `p` of `module`, which the model knows by this name. A tied head is the embedding.
    Raises UserError where no line knows the optimizer."""
    is_embedding = isinstance(module, nn.Embedding)
    peak_lr = cfg.max_lr * cfg.embed_lr_scale if is_embedding else cfg.max_lr
    # Decay pulls a weight toward zero unless the loss holds it. Vectors, which are biases and gains, do not decay.
    by_adamw = Update("adamw", peak_lr, cfg.weight_decay if p.dim() >= 2 else 0.0)

    if cfg.optimizer == "adamw":
        return by_adamw
    if cfg.optimizer == "muon":
        # Muon is for the matrices between two spaces of channels, which linear layers have: not for an untied head.
        if not isinstance(module, nn.Linear) or name == "lm_head.weight" or p.dim() != 2:
            return by_adamw
        rows = module.matrix_rows if isinstance(module, StackedLinear) else ()
        return Update("muon", cfg.muon_lr, weight_decay=0.0, matrix_rows=rows)
    raise UserError(f"no line of choose_update says what updates {name} with --optimizer {cfg.optimizer}")


def choose_updates(model: GPT, cfg: Recipe) -> dict[str, Update]:
    """{name: what updates it} of each parameter that is trained, a tied one once."""
    updates = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            module = model.get_submodule(name.rpartition(".")[0])
            updates[name] = choose_update(name, p, module, cfg)
    return updates


def state_bytes(model: GPT, cfg: Recipe, shards: int = 1) -> int:
    """Bytes of the optimizers' state once the first step has created it. With several shards, about those of the
    largest one: a parameter is never divided, and GPT-2's embedding is a third of all weights."""
    sizes: dict[str, list[int]] = {}
    for name, update in choose_updates(model, cfg).items():
        sizes.setdefault(update.optimizer, []).append(model.get_parameter(name).numel())
    total = 0
    for optimizer, numbers in sizes.items():
        in_shard = max(sum(numbers) // shards, max(numbers))
        total += 4 * OPTIMIZERS[optimizer].state_per_weight * in_shard
    return total


def is_sharded(cfg: TrainConfig, rt: Runtime) -> bool:
    """Whether each rank keeps its share of the optimizers' state (ZeRO-1, Rajbhandari et al. 2020)."""
    return cfg.zero_stage == 1 and rt.world_size > 1


def build_optimizers(
    model: GPT, weights: dict[str, Tensor], cfg: TrainConfig, rt: Runtime
) -> dict[str, torch.optim.Optimizer]:
    """The run's optimizers by their names, over its float32 weights. With --zero-stage 1 on several ranks, each rank
    keeps the state of its share only."""
    weights_by_update: dict[str, dict[Update, list[Tensor]]] = {}
    for name, update in choose_updates(model, cfg).items():
        weights_by_update.setdefault(update.optimizer, {}).setdefault(update, []).append(weights[name])

    optimizers: dict[str, torch.optim.Optimizer] = {}
    for optimizer, own in weights_by_update.items():
        optimizer_class, arguments, _ = OPTIMIZERS[optimizer]
        own_groups = [{"params": tensors, **asdict(update)} for update, tensors in own.items()]
        arguments = {"lr": cfg.max_lr, **arguments}  # the schedule sets every group's rate before each step
        if is_sharded(cfg, rt):
            from torch.distributed.optim import ZeroRedundancyOptimizer  # which takes more than a second

            # A bucket: one broadcast per rank instead of one per parameter. The update takes a quarter of the time.
            arguments |= {"optimizer_class": optimizer_class, "parameters_as_bucket_view": True}
            optimizers[optimizer] = ZeroRedundancyOptimizer(own_groups, **arguments)
        else:
            optimizers[optimizer] = optimizer_class(own_groups, **arguments)
    return optimizers
