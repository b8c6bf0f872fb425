"""The optimizers of a run: which parameters each updates, which state it keeps, and how the state is saved and loaded.

    optimizers = build_optimizers(master_weights.named, cfg, rt)     # [AdamW], or [AdamW, Muon]

Called by training/step.py. The algorithms are torch's AdamW and training/muon.py; ZeRO-1 is torch's. To add an
optimizer: its name in TrainConfig.optimizer, its parameters in parameter_groups, its class in OPTIMIZERS, its settings
in optimizer_settings, its state in OPTIMIZER_STATE. If one of them is missing, an error says so before the first step.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from system.distributed import Runtime
from training.config import TrainConfig
from training.muon import Muon, mark_matrices

# ------------------------------------------------------------------------- the tables


def scalar_shape(p: Tensor) -> tuple[int, ...]:
    """The shape of a state that is one number for each parameter."""
    return ()


def parameter_shape(p: Tensor) -> tuple[int, ...]:
    """The shape of a state that is one number for each element of a parameter."""
    return tuple(p.shape)


# The class of each optimizer that parameter_groups names.
OPTIMIZERS = {"adamw": torch.optim.AdamW, "muon": Muon}

# The float32 tensors that each class keeps for each parameter, with their shapes. All of the state is created from this
# table, so checkpoints, ZeRO-1, the disk check, the search for a micro-batch and predictions agree on it.
OPTIMIZER_STATE: dict[type, dict[str, Callable[[Tensor], tuple[int, ...]]]] = {
    torch.optim.AdamW: {"step": scalar_shape, "exp_avg": parameter_shape, "exp_avg_sq": parameter_shape},
    Muon: {"momentum_buffer": parameter_shape},
}


# ------------------------------------------------------------------------- which parameters


def parameter_groups(named: dict[str, nn.Parameter], cfg: TrainConfig) -> dict[str, list[dict[str, Any]]]:
    """Every parameter in exactly one group, by the optimizer that takes it, as {"adamw": [...], "muon": [...]}.

    named: the parameters by their names in the model, each once. AdamW decays matrices but not vectors (biases, gains),
    as in other GPT-2 reproductions. With --optimizer muon the matrices of the blocks go to Muon and the rest stays with
    AdamW. The schedule multiplies each group's `peak_lr`.
    """
    # Muon takes the matrices of the blocks, such as "transformer.h.3.mlp.c_fc.weight"; the optimizer called
    # rest_optimizer takes all other parameters.
    match cfg.optimizer:
        case "adamw":
            rest_optimizer = "adamw"
            muon_names = []
        case "muon":
            rest_optimizer = "adamw"
            muon_names = [name for name, p in named.items() if p.dim() == 2 and ".h." in name]
        case _:
            fix = "add a case to parameter_groups in training/optim.py"
            raise ValueError(f"no parameters for optimizer {cfg.optimizer!r}: {fix}")

    # The rest: embeddings by name, other matrices (an untied head, or all of them), vectors.
    rest = [name for name in named if name not in muon_names]
    embeddings = [name for name in rest if name.split(".")[1] in ("wte", "wpe")]
    matrices = [name for name in rest if name not in embeddings and named[name].dim() >= 2]
    vectors = [name for name in rest if named[name].dim() < 2]
    assert sorted(muon_names + embeddings + matrices + vectors) == sorted(named), "a parameter is in no group or in two"

    # Muon must know that queries, keys and values are three matrices in one parameter.
    for name in muon_names:
        mark_matrices(name, named[name])

    # A list of one group, as torch's optimizers take it; empty if no parameter is in it.
    def group(names: list[str], weight_decay: float, peak_lr: float) -> list[dict[str, Any]]:
        if not names:
            return []
        return [{"params": [named[name] for name in names], "weight_decay": weight_decay, "peak_lr": peak_lr}]

    # The order of the groups and of the parameters in them is part of the checkpoint format.
    groups = {
        rest_optimizer: [
            *group(embeddings, cfg.weight_decay, cfg.max_lr * cfg.embed_lr_scale),
            *group(matrices, cfg.weight_decay, cfg.max_lr),
            *group(vectors, cfg.vector_weight_decay, cfg.max_lr * cfg.vector_lr_scale),
        ],
        "muon": group(muon_names, cfg.muon_weight_decay, cfg.muon_lr),
    }

    # Leave out an optimizer without parameters. If that is --optimizer itself, this function does not handle it yet.
    groups = {name: param_groups for name, param_groups in groups.items() if param_groups}
    if cfg.optimizer not in groups:
        raise ValueError(f"no parameters for optimizer {cfg.optimizer!r}: change parameter_groups in training/optim.py")
    return groups


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of an optimizer that parameter_groups names. Raises ValueError if it is not in OPTIMIZERS."""
    if name not in OPTIMIZERS:
        raise ValueError(f"no class for optimizer {name!r}: add it to OPTIMIZERS in training/optim.py")
    return OPTIMIZERS[name]


def optimizer_settings(name: str, cfg: TrainConfig) -> dict[str, Any]:
    """What the class of an optimizer is constructed with, besides the groups and their learning rates. Raises
    ValueError for a name without a case."""
    match name:
        case "adamw":
            # fused: one kernel updates many parameters.
            return {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.adam_eps, "fused": True}
        case "muon":
            return {"momentum": cfg.muon_momentum, "newton_schulz": cfg.newton_schulz}
        case _:
            fix = "add a case to optimizer_settings in training/optim.py"
            raise ValueError(f"no settings for optimizer {name!r}: {fix}")


def build_optimizers(named: dict[str, nn.Parameter], cfg: TrainConfig, rt: Runtime) -> list[torch.optim.Optimizer]:
    """The run's optimizers, with their state. With --zero-stage 1 each rank keeps only the state of its share of the
    parameters (ZeRO, Rajbhandari et al. 2020), by torch's ZeroRedundancyOptimizer. Raises ValueError, with what to add,
    for a choice that this module does not handle."""
    # ZeRO-1 has nothing to share on one rank.
    match cfg.zero_stage:
        case 0:
            is_sharded = False
        case 1:
            is_sharded = rt.world_size > 1
        case _:
            raise ValueError(f"no ZeRO stage {cfg.zero_stage}: add a case to build_optimizers in training/optim.py")

    # One optimizer for each name in the groups. `lr` is only a start: the schedule sets every group's before each step.
    optimizers = []
    for name, groups in parameter_groups(named, cfg).items():
        settings = optimizer_settings(name, cfg)
        if is_sharded:
            from torch.distributed.optim import ZeroRedundancyOptimizer

            optimizer = ZeroRedundancyOptimizer(
                groups,
                optimizer_class(name),
                lr=cfg.max_lr,
                # One broadcast per rank instead of one per parameter: the update takes a quarter of the time.
                parameters_as_bucket_view=True,
                **settings,
            )
        else:
            optimizer = optimizer_class(name)(groups, lr=cfg.max_lr, **settings)
        create_state(optimizer)
        optimizers.append(optimizer)
    return optimizers


def unwrap(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The inner optimizer of a ZeroRedundancyOptimizer, which holds this rank's share; any other optimizer itself."""
    return getattr(optimizer, "optim", optimizer)


def all_params(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in the order that state dicts number them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def all_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The groups of an optimizer and, with ZeRO-1, those of the inner one."""
    inner = unwrap(optimizer)
    return optimizer.param_groups + (inner.param_groups if inner is not optimizer else [])


# ------------------------------------------------------------------------- state


def state_shapes(optimizer_type: type, p: Tensor) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the state that an optimizer of this class keeps for a parameter. Raises ValueError for a class
    that is not in the table."""
    if optimizer_type not in OPTIMIZER_STATE:
        raise ValueError(
            f"add to OPTIMIZER_STATE in training/optim.py what {optimizer_type.__name__} keeps for a parameter"
        )
    return {name: shape(p) for name, shape in OPTIMIZER_STATE[optimizer_type].items()}


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state of this rank's parameters, as zeros, where it is missing."""
    # torch's optimizers would create the state in their first step. Created here, it takes its memory before the size
    # of the micro-batch is chosen, and a checkpoint of step 0 has it, too.
    inner = unwrap(optimizer)
    for p in all_params(inner):
        if not inner.state[p]:
            shapes = state_shapes(type(inner), p)
            inner.state[p] = {name: torch.zeros(s, device=p.device) for name, s in shapes.items()}


def reset_state(optimizers: list[torch.optim.Optimizer]) -> None:
    """Set the state of this rank's parameters back to what create_state made: zeros."""
    for optimizer in optimizers:
        for tensors in unwrap(optimizer).state.values():
            for tensor in tensors.values():
                tensor.zero_()


def state_numel(optimizer_type: type, params: Iterable[Tensor]) -> int:
    """Numbers (float32) that an optimizer of this class keeps for these parameters, all ranks together."""
    return sum(math.prod(shape) for p in params for shape in state_shapes(optimizer_type, p).values())


def full_state(optimizers: list[torch.optim.Optimizer], rt: Runtime) -> list[dict] | None:
    """Complete optimizer state dicts, sharded or not, on rank 0 (None elsewhere). Every rank must call it."""
    # Sharded state is gathered by all ranks together; unsharded state is identical on every rank.
    states = []
    for optimizer in optimizers:
        is_sharded = unwrap(optimizer) is not optimizer
        states.append(gather_sharded_state(optimizer, rt) if is_sharded else optimizer.state_dict())
    return states if rt.is_main else None


def gather_sharded_state(optimizer: torch.optim.Optimizer, rt: Runtime) -> dict:
    """The state dict of a ZeroRedundancyOptimizer, complete on rank 0, where the parts of other ranks are in host
    memory. Every rank must call it.

    Its own consolidate_state_dict sends pickles and unpacks them byte by byte, at 16 MB/s: minutes for a large model.
    """
    # The groups and their settings, without the state of the parameters.
    full = torch.optim.Optimizer.state_dict(optimizer)
    inner = unwrap(optimizer)
    params = all_params(optimizer)

    # Which rank has the state of which parameter. Each rank knows its own: (parameters,) of 0 and 1. Stacked they are
    # (ranks, parameters), with one 1 in each column, whose row is the owner.
    is_mine = torch.tensor([p in inner.state for p in params], device=rt.device, dtype=torch.int32)
    owners = torch.stack(rt.all_gather(is_mine)).argmax(dim=0).tolist()

    # Each owner broadcasts its state, one tensor at a time. Rank 0 keeps a copy in host memory, the others keep
    # nothing. State dicts number the parameters in this order.
    for i, (p, owner) in enumerate(zip(params, owners, strict=True)):
        shapes = state_shapes(type(inner), p)
        if owner == rt.rank:
            state = dict(inner.state[p])
        else:
            state = {name: p.new_empty(shape) for name, shape in shapes.items()}
        for name in shapes:
            rt.broadcast(state[name], owner)
            if owner != rt.rank:
                state[name] = state[name].cpu() if rt.is_main else None
        full["state"][i] = state
    return full


def load_state(optimizers: list[torch.optim.Optimizer], states: list[dict]) -> None:
    """Load what full_state returned, for any --zero-stage and number of ranks. Settings such as weight decay stay those
    of the current config. Raises ValueError, among others, if the state is not of these parameters."""
    if len(optimizers) != len(states):
        raise ValueError(f"it has {len(states)} optimizers, but this config has {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        check_state(optimizer, state)

        # Load it. A state dict also holds the settings of the run that saved it; this run's own are put back below.
        own_settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer.load_state_dict(state)

        # ZeroRedundancyOptimizer leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133), and
        # keeps a second copy of it.
        inner = unwrap(optimizer)
        if inner is not optimizer:
            for p, tensors in inner.state.items():
                tensors.update({name: tensor.to(p.device) for name, tensor in tensors.items()})
            optimizer.state.clear()

        # Put back this run's settings.
        for group, settings in zip(optimizer.param_groups, own_settings, strict=True):
            group.update(settings)

        # Before November 2026, checkpoints of step 0 had no state.
        create_state(optimizer)


def check_state(optimizer: torch.optim.Optimizer, state: dict) -> None:
    """Raise ValueError unless a state dict has what this optimizer keeps, in the shapes of its parameters."""
    params = all_params(optimizer)
    optimizer_type = type(unwrap(optimizer))

    # All parameters or, before the first step of an earlier version, none. torch would accept any subset.
    missing = set(range(len(params))) - state["state"].keys()
    if state["state"] and missing:
        raise ValueError(f"it has no state for parameter {min(missing)}")

    # Each parameter's tensors have the names and shapes that the table says.
    for i, tensors in state["state"].items():
        shapes = state_shapes(optimizer_type, params[i])
        if tensors.keys() != shapes.keys():
            raise ValueError(f"it keeps {', '.join(tensors)} of parameter {i}, unlike {optimizer_type.__name__}")
        # A scalar may have been saved with one dimension or none.
        if any(t.numel() != 1 and t.shape != shapes[name] for name, t in tensors.items()):
            raise ValueError(f"the state of parameter {i} does not fit its shape {list(params[i].shape)}")
