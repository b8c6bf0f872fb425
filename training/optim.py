"""The optimizers of a run: which one updates each parameter, at which peak rate, with which weight decay.

    optimizers = build_optimizers(model, weights, cfg, rt)      # {"adamw": NamedOptimizer, "muon": NamedOptimizer}
    for named in optimizers.values():
        named.optimizer.step()

`choose_update` decides for every parameter. The algorithms are torch's AdamW and training/muon.py. To add an algorithm,
add its name to Recipe.optimizer (training/config.py), an entry to ALGORITHMS and a line to choose_update.
"""

import copy
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from model import GPT, StackedLinear
from system.distributed import Runtime
from system.errors import UserError
from training.config import Recipe, TrainConfig
from training.muon import Muon

# ------------------------------------------------------------------------- which optimizer updates a parameter


@dataclass(frozen=True)
class Update:
    """Which optimizer updates a parameter, with which settings. Parameters with equal updates form a group of their
    optimizer, and these fields are the settings of the group. Trainer.set_step multiplies peak_lr by the factor of the
    schedule."""

    optimizer: str  # its name in ALGORITHMS
    peak_lr: float
    weight_decay: float
    matrix_rows: tuple[int, ...] = ()  # the rows of each matrix, if the parameter stacks several (StackedLinear)


class Algorithm(NamedTuple):
    """What this program must know about a class of optimizers."""

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]  # besides the groups
    state_per_weight: int  # how many float32 numbers the optimizer keeps for each weight


ALGORITHMS = {
    # fused: one kernel updates many parameters
    "adamw": Algorithm(torch.optim.AdamW, {"betas": (0.9, 0.95), "eps": 1e-8, "fused": True}, state_per_weight=2),
    "muon": Algorithm(Muon, {"momentum": 0.95}, state_per_weight=1),
}


def choose_update(name: str, p: Tensor, module: nn.Module, cfg: Recipe) -> Update:
    """What updates the parameter `p` of `module`. name: the name of the parameter in the model. A tied head is the
    embedding. Raises UserError if no line below covers the optimizer."""
    is_embedding = isinstance(module, nn.Embedding)
    peak_lr = cfg.max_lr * cfg.embed_lr_scale if is_embedding else cfg.max_lr
    # Weight decay pulls a weight toward zero. Vectors, which are biases and gains, do not decay.
    by_adamw = Update("adamw", peak_lr, cfg.weight_decay if p.dim() >= 2 else 0.0)

    if cfg.optimizer == "adamw":
        return by_adamw
    if cfg.optimizer == "muon":
        # Muon is for matrices that map channels to channels. Those are the weights of linear layers, except the head's.
        if not isinstance(module, nn.Linear) or name == "lm_head.weight" or p.dim() != 2:
            return by_adamw
        rows = module.matrix_rows if isinstance(module, StackedLinear) else ()
        return Update("muon", cfg.muon_lr, weight_decay=0.0, matrix_rows=rows)
    raise UserError(f"no line of choose_update says what updates {name} with --optimizer {cfg.optimizer}")


def choose_updates(model: GPT, cfg: Recipe) -> dict[str, Update]:
    """{name: update} of each parameter that trains. A tied parameter appears once."""
    updates = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            module = model.get_submodule(name.rpartition(".")[0])
            updates[name] = choose_update(name, p, module, cfg)
    return updates


def state_bytes(model: GPT, cfg: Recipe, num_shards: int = 1) -> int:
    """Bytes of the optimizers' state after the first step. With several shards, an estimate for the largest one: a
    parameter is never split, and the embedding of GPT-2 124M has a third of all weights."""
    sizes: dict[str, list[int]] = {}
    for name, update in choose_updates(model, cfg).items():
        sizes.setdefault(update.optimizer, []).append(model.get_parameter(name).numel())
    total = 0
    for optimizer, numbers in sizes.items():
        weights_in_shard = max(sum(numbers) // num_shards, max(numbers))
        total += 4 * ALGORITHMS[optimizer].state_per_weight * weights_in_shard
    return total


# ------------------------------------------------------------------------- building


def uses_zero(cfg: TrainConfig, rt: Runtime) -> bool:
    """Whether each rank keeps only its share of the optimizers' state (ZeRO-1, Rajbhandari et al. 2020)."""
    return cfg.zero_stage == 1 and rt.world_size > 1


def build_optimizers(
    model: GPT, weights: dict[str, Tensor], cfg: TrainConfig, rt: Runtime
) -> dict[str, "NamedOptimizer"]:
    """The run's optimizers by name. They update the float32 `weights`."""
    weights_by_update: dict[str, dict[Update, list[Tensor]]] = {}
    for name, update in choose_updates(model, cfg).items():
        weights_by_update.setdefault(update.optimizer, {}).setdefault(update, []).append(weights[name])

    optimizers: dict[str, NamedOptimizer] = {}
    for name, groups_by_update in weights_by_update.items():
        optimizer_class, arguments, _ = ALGORITHMS[name]
        groups = [{"params": tensors, **asdict(update)} for update, tensors in groups_by_update.items()]
        arguments = {"lr": cfg.max_lr, **arguments}  # Trainer.set_step sets the rate of every group
        optimizer: torch.optim.Optimizer
        if uses_zero(cfg, rt):
            from torch.distributed.optim import ZeroRedundancyOptimizer  # here, because the import takes over a second

            # A bucket: one broadcast per rank instead of one per parameter, which makes the update four times as fast.
            arguments |= {"optimizer_class": optimizer_class, "parameters_as_bucket_view": True}
            optimizer = ZeroRedundancyOptimizer(groups, **arguments)
        else:
            optimizer = optimizer_class(groups, **arguments)
        optimizers[name] = NamedOptimizer(optimizer, weights, rt, uses_zero(cfg, rt))
    return optimizers


# ------------------------------------------------------------------------- the state, by names of parameters

Moments = dict[str, dict[str, Any]]  # {parameter name: {name in the optimizer's state: tensor, number or containers}}
GROUP = "group"  # the key in a parameter's Moments of the group values that the optimizer has changed


class NamedOptimizer:
    """An optimizer whose state has the names of the parameters, so the state fits any number of ranks and any order of
    the parameters. The settings of the groups are not part of the state, because they follow from the settings of the
    run. Values that the optimizer itself changes in a group, such as a counter of steps, are part of the state."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], rt: Runtime, is_sharded: bool):
        self.optimizer, self.rt, self.is_sharded = optimizer, rt, is_sharded
        self.local: Any = optimizer.optim if is_sharded else optimizer  # type: ignore[attr-defined]  # this rank's share
        names = {weight: name for name, weight in weights.items()}
        self.own = {names[p]: p for group in self.local.param_groups for p in group["params"]}
        self.group_of = {names[p]: group for group in optimizer.param_groups for p in group["params"]}
        self.initial_values = {name: copy_values(group) for name, group in self.group_of.items()}

    def state_dict(self) -> Moments:
        """Unsharded: the tensors themselves. Sharded: on rank 0 copies of all tensors in host memory, {} on the other
        ranks. Every rank must call this."""
        own = {}
        for name, p in self.own.items():
            moments = dict(self.local.state.get(p, {}))
            changed = self.changed_values(name)
            if changed:
                moments[GROUP] = changed
            if moments:
                own[name] = moments
        return gather(own, self.rt) if self.is_sharded else own

    def changed_values(self, name: str) -> dict[str, Any]:
        """What the optimizer has changed in the group of this parameter. The rate is left out: the schedule sets it."""
        first, now = self.initial_values[name], copy_values(self.group_of[name])
        return {key: value for key, value in now.items() if key != "lr" and not is_equal(value, first.get(key))}

    def load_state_dict(self, state: Moments) -> None:
        """Load copies of this rank's share. Raises ValueError if the state has other parameters."""
        different = ", ".join(sorted(state.keys() ^ self.group_of.keys()))
        if different:
            raise ValueError(f"it has other parameters: {different}")
        for name, moments in state.items():
            # ZeroRedundancyOptimizer copies its own groups to this rank's share before each step, so load its own.
            self.group_of[name].update(copy.deepcopy(self.initial_values[name] | moments.get(GROUP, {})))
            if name in self.own:
                tensors = {key: value for key, value in moments.items() if key != GROUP}
                copied = tree_map_only(Tensor, lambda t: t.to(self.rt.device, copy=True), tensors)
                self.local.state[self.own[name]] = copied


def copy_values(group: dict[str, Any]) -> dict[str, Any]:
    """Copies of the settings of a parameter group."""
    return copy.deepcopy({key: value for key, value in group.items() if key != "params"})


def is_equal(a: Any, b: Any) -> bool:
    """Whether two values of a parameter group are equal: tensors, or plain values."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and a == b


def gather(own: Moments, rt: Runtime) -> Moments:
    """Each rank passes its own moments. Rank 0 gets copies of the moments of all ranks in host memory, the other ranks
    get {}. Every rank must call this.

    torch's public way, consolidate_state_dict and then state_dict, sends pickles and unpacks them byte by byte, at 16
    MB/s: minutes for a large model. Here each owner broadcasts its tensors, one at a time.
    """
    everything: Moments = {}
    own_leaves = tree_leaves(own)
    # Each rank first learns the values of all leaves that are no tensors, and the shape and dtype of all tensors.
    for owner, moments in enumerate(rt.gather(tree_map_only(Tensor, lambda t: t.to("meta"), own))):
        leaves, structure = tree_flatten(moments)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                # On the device, because NCCL sends nothing else.
                tensor = torch.empty_like(leaf, device=rt.device)
                if owner == rt.rank:
                    tensor.copy_(own_leaves[i])
                rt.broadcast(tensor, owner)
                leaves[i] = tensor.to("cpu", copy=True) if rt.is_main else None
        everything |= tree_unflatten(leaves, structure)
    return everything if rt.is_main else {}
