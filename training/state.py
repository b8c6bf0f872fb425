"""What a kill must not lose: the state of a run, by names.

    state.step, state.sequences     how many steps are done, and how many sequences they have read
    state.weights                   {name: float32 weight}, which model_*.pt has
    state.parts                     {name: part}: each optimizer, the loss scale, and whatever else an experiment adds

    saved = state.copy()            # every rank; in host memory, on rank 0
    state.load(saved)               # on any number of ranks, with any --zero-stage

A part has the two methods of torch, state_dict and load_state_dict; every rank calls them. What is in state.parts is
saved, loaded, compared between ranks and counted as memory. A checkpoint must have the same parts as the program.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from model import GPT
from system.distributed import Runtime
from system.errors import explain_errors, require
from system.machine import copy_to_host

Moments = dict[str, dict[str, Any]]  # {parameter: {moment: tensor, number or containers of these}}, of an optimizer


class NamedOptimizer:
    """The state of an optimizer as a part: {parameter name: {moment: tensor}}, each tensor in its own dtype, whatever
    the number of ranks. The settings of its groups are no state: they follow from the settings of the run."""

    def __init__(self, optimizer: torch.optim.Optimizer, weights: dict[str, Tensor], rt: Runtime, is_sharded: bool):
        self.rt, self.is_sharded = rt, is_sharded
        self.local: Any = optimizer.optim if is_sharded else optimizer  # type: ignore[attr-defined]  # this rank's share
        names = {weight: name for name, weight in weights.items()}
        self.weights = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
        self.own = {names[p]: p for group in self.local.param_groups for p in group["params"]}

    def state_dict(self) -> Moments:
        """The tensors themselves or, of shards, copies of all in host memory on rank 0. Every rank must call it."""
        own = {name: dict(self.local.state[p]) for name, p in self.own.items() if p in self.local.state}
        return gather(own, self.rt) if self.is_sharded else own

    def load_state_dict(self, state: Moments) -> None:
        """Load copies of this rank's share. Raises ValueError if the state is not of these parameters."""
        if state.keys() != self.weights.keys():
            raise ValueError(f"it is of other parameters: {', '.join(sorted(state.keys() ^ self.weights.keys()))}")
        for name, p in self.own.items():
            self.local.state[p] = tree_map_only(Tensor, lambda t: t.to(self.rt.device, copy=True), state[name])


def gather(own: Moments, rt: Runtime) -> Moments:
    """The moments of all ranks, each of which has its `own`: copies in host memory on rank 0, {} on the others.

    torch's public way, consolidate_state_dict and then state_dict, sends pickles and unpacks them byte by byte, at 16
    MB/s: minutes for a large model. Here each owner broadcasts its tensors, one at a time. Every rank must call it.
    """
    everything: Moments = {}
    own_leaves = tree_leaves(own)
    # Of the tensors of others each rank knows shape and dtype, of all else the value.
    for owner, facts in enumerate(rt.gather(tree_map_only(Tensor, lambda t: t.to("meta"), own))):
        leaves, structure = tree_flatten(facts)
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


class State:
    """See the module's docstring. weights: the parameters of the model or, if these are bfloat16, what they are rounded
    from. optimizer_bytes: of all ranks together, once the first step has created the optimizers' state."""

    def __init__(self, weights: dict[str, Tensor], parts: dict[str, Any], rt: Runtime, optimizer_bytes: int):
        self.weights, self.parts, self.rt, self.optimizer_bytes = weights, parts, rt, optimizer_bytes
        self.step = self.sequences = 0

    def copy(self) -> dict[str, Any]:
        """All but the weights, as copies in host memory; the parts are rank 0's alone. Every rank must call it."""
        parts = {}
        for name, part in self.parts.items():
            state = part.state_dict()
            if self.rt.is_main:
                # What was gathered is a copy: a second one would be 12 GB for GPT-2 1558M.
                parts[name] = state if is_gathered(part) else copy_to_host(state)
        return {"step": self.step, "sequences": self.sequences, "parts": parts}

    def load(self, saved: dict[str, Any]) -> None:
        """Load what `copy` has returned. Raises UserError if the parts are others, or do not fit."""
        step, parts = saved["step"], saved["parts"]
        fix = "use the code that wrote it, or start a new run from its weights with --init-from"
        different = ", ".join(sorted(self.parts.keys() ^ parts.keys()))
        require(not different, f"only the checkpoint of step {step} or only this program has {different}; {fix}")
        for name, part in self.parts.items():
            # Empty is the state of an optimizer before its first step, and of a loss scale that is not in use.
            if parts[name]:
                with explain_errors(f"the state of {name} at step {step} does not fit this run", fix, ValueError):
                    part.load_state_dict(parts[name])
        self.step, self.sequences = step, saved["sequences"]

    def compared(self) -> dict[str, list[Tensor]]:
        """{name: tensors} of what must be equal on all ranks: all but the shards of optimizers."""
        whole = {name: part.state_dict() for name, part in self.parts.items() if not is_gathered(part)}
        return {"weights": [*self.weights.values()]} | {name: tensors_of(state) for name, state in whole.items()}

    def num_bytes(self) -> int:
        """Of a checkpoint."""
        others = [part.state_dict() for part in self.parts.values() if not isinstance(part, NamedOptimizer)]
        return self.optimizer_bytes + sum(t.nbytes for t in [*self.weights.values(), *tensors_of(others)])


def is_gathered(part: Any) -> bool:
    """Whether each rank has its own share of this part."""
    return isinstance(part, NamedOptimizer) and part.is_sharded


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


# ------------------------------------------------------------------------- weights and the model


def to_state_dict(model: GPT, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's state dict with these weights: a tied head is under both of its names. Buffers are the model's."""
    own = {p: weights[name] for name, p in model.named_parameters()}
    return {name: own.get(t, t).detach() for name, t in model.state_dict(keep_vars=True).items()}


def rounded_pairs(model: GPT, weights: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of the model, each with the weight that it is a rounded or another copy of."""
    return [(p, weights[name]) for name, p in model.named_parameters() if p is not weights[name]]


@torch.no_grad()
def copy_weights(model: GPT, weights: dict[str, Tensor]) -> None:
    """Let the model compute with these weights, rounded to its own precision. They are copied into its parameters,
    which with ZeRO-1 are views of larger tensors."""
    pairs = rounded_pairs(model, weights)
    if pairs:
        torch._foreach_copy_([p for p, _ in pairs], [weight for _, weight in pairs])
