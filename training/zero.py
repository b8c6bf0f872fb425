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
    """An optimizer of which each rank keeps only the state of its share of the parameters. gather_state and
    load_state_dict are those of the whole optimizer, for any number of ranks."""

    def __init__(self, groups: list[dict], optimizer_class: type, rt: Runtime, **arguments: Any):
        self.rt = rt
        # One broadcast per rank instead of one per parameter: the update takes a quarter of the time.
        super().__init__(groups, optimizer_class, parameters_as_bucket_view=True, **arguments)

        # `self` has all parameters and no state; this rank's optimizer has its share of both.
        part = self.optim

        # All parameters of a small group may belong to other ranks. The optimizer never sees an empty group, which the
        # foreach kernels of torch refuse.

        def hide_empty_groups(*_: Any) -> None:
            self.all_groups = part.param_groups
            part.param_groups = [group for group in part.param_groups if group["params"]]

        def show_all_groups(*_: Any) -> None:
            part.param_groups = self.all_groups

        part.register_step_pre_hook(hide_empty_groups)
        part.register_step_post_hook(show_all_groups)

    def gather_state(self) -> dict[str, Any] | None:
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

        # What every rank has: for each of its parameters the names and shapes of the state. A single number, such as a
        # count of steps, which may be on the CPU, comes along; NCCL sends tensors of GPUs alone.
        facts = {
            i: {name: t.cpu() if t.numel() == 1 else tuple(t.shape) for name, t in state.items()}
            for i, state in own.items()
        }
        for owner, facts_there in enumerate(self.rt.gather(facts)):
            for i, facts_of_one in facts_there.items():
                full["state"][i] = {}
                for name, fact in facts_of_one.items():
                    if isinstance(fact, torch.Tensor):
                        full["state"][i][name] = fact.clone()
                        continue
                    tensor = own[i][name] if i in own else torch.empty(fact, device=params[i].device)
                    self.rt.broadcast(tensor, owner)
                    if self.rt.is_main:
                        full["state"][i][name] = tensor.to("cpu", copy=True)
        full["state"] = dict(sorted(full["state"].items()))
        return full if self.rt.is_main else None

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a whole state; keep this rank's share."""
        super().load_state_dict(state)

        # torch leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133). Others keep there what
        # is a single number.
        for group in self.optim.param_groups:
            for p in group["params"]:
                for name, tensor in self.optim.state[p].items():
                    if tensor.numel() > 1 or group.get("fused"):
                        self.optim.state[p][name] = tensor.to(p.device)

        # It also keeps the whole state in `self.state`, of which nothing is used; no method drops it.
        self.state.clear()
