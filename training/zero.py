"""ZeRO-1: each rank keeps the optimizer's state of its share of the parameters (Rajbhandari et al. 2020).

    optimizer = ShardedOptimizer(groups, torch.optim.AdamW, rt, lr=6e-4)
    state = optimizer.gather_state()        # whole, on rank 0
    optimizer.load_state_dict(state)        # on any number of ranks

Called by training/optim.py for --zero-stage 1. What it imports takes more than a second, so it is imported when needed.
"""

from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from system.distributed import Runtime


class ShardedOptimizer(ZeroRedundancyOptimizer):
    """An optimizer of which each rank keeps only the state of its share of the parameters: `self` has all parameters
    and no state, `self.optim` has this rank's share of both. gather_state and load_state_dict are those of the whole
    optimizer, for any number of ranks."""

    def __init__(self, groups: list[dict], optimizer_class: type, rt: Runtime, **arguments: Any):
        self.rt = rt
        # One broadcast per rank instead of one per parameter: the update takes a quarter of the time.
        super().__init__(groups, optimizer_class, parameters_as_bucket_view=True, **arguments)
        self.params = [p for group in self.param_groups for p in group["params"]]  # as the whole state numbers them

    def gather_state(self) -> dict[str, Any] | None:
        """A copy of the whole state on rank 0, in host memory; None on the others. Every rank must call it.

        torch's public way, consolidate_state_dict and then state_dict, sends pickles and unpacks them byte by byte, at
        16 MB/s: minutes for a large model. Here each owner broadcasts its tensors, one at a time.
        """
        own = {i: self.optim.state[p] for i, p in enumerate(self.params) if p in self.optim.state}

        # What every rank has: for each of its parameters the names and shapes of the state. A single number, such as a
        # count of steps, which may be on the CPU, comes along; NCCL sends tensors of GPUs alone.
        facts = {
            i: {name: t.cpu() if t.numel() == 1 else tuple(t.shape) for name, t in state.items()}
            for i, state in own.items()
        }
        states: dict[int, dict] = {}
        for owner, facts_there in enumerate(self.rt.gather(facts)):
            for i, facts_of_one in facts_there.items():
                states[i] = {}
                for name, fact in facts_of_one.items():
                    if isinstance(fact, torch.Tensor):
                        states[i][name] = fact.clone()
                        continue
                    tensor = own[i][name] if i in own else torch.empty(fact, device=self.params[i].device)
                    self.rt.broadcast(tensor, owner)
                    if self.rt.is_main:
                        states[i][name] = tensor.to("cpu", copy=True)

        # The groups are those of the whole optimizer. ZeroRedundancyOptimizer's own state_dict raises an error unless
        # consolidate_state_dict has run.
        groups = torch.optim.Optimizer.state_dict(self)["param_groups"]
        return {"state": dict(sorted(states.items())), "param_groups": groups} if self.rt.is_main else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state; keep this rank's share, with the groups as they are. Not by ZeroRedundancyOptimizer,
        which leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133)."""
        numbers = {p: i for i, p in enumerate(self.params)}
        own = [numbers[p] for group in self.optim.param_groups for p in group["params"]]
        own_state = {place: state["state"][i] for place, i in enumerate(own) if i in state["state"]}
        self.optim.load_state_dict({"state": own_state, "param_groups": self.optim.state_dict()["param_groups"]})
