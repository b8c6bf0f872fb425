"""Optimizers: parameter groups, master weights, ZeRO-1 and learning-rate schedules."""

import math

import torch
from torch import nn

from system.distributed import Runtime
from training.config import TrainConfig

NORMUON_BETA2 = 0.95  # of results 8 to 10 of modded-nanogpt's track 3
NEWTON_SCHULZ_DTYPE = torch.bfloat16  # precise enough (Jordan 2024), and the fastest where Muon is worth its time
NEWTON_SCHULZ = {  # the polynomial of each iteration
    "fast": 5 * [(3.4445, -4.7750, 2.0315)],  # soon near 1, and never quite there (Jordan 2024)
    "exact": 12 * [(2.0, -1.5, 0.5)],  # converges; modded-nanogpt's simple trainer
}


def orthogonalized(X: torch.Tensor, iterations: list[tuple[float, float, float]]) -> torch.Tensor:
    """Each matrix of X (n, rows, columns) with its singular values brought to about 1, by Newton-Schulz iterations."""
    tall = X.size(-2) > X.size(-1)
    X = (X.mT if tall else X).to(NEWTON_SCHULZ_DTYPE)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-10)
    for a, b, c in iterations:
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def matrices(p: torch.Tensor) -> int:
    """How many matrices Muon sees in a parameter: one with three times as many rows as columns holds queries, keys and
    values."""
    return 3 if p.size(0) == 3 * p.size(1) else 1


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) as in modded-nanogpt: Nesterov momentum, orthogonalized, times sqrt(max(1, rows / columns)).

    Matrices of one shape are orthogonalized together, so that 12 layers launch no more kernels than one; queries, keys
    and values each alone. It keeps what torch.optim.Muon keeps, and loads its state; `step` overwrites the gradients.
    """

    def __init__(self, params: list[dict], lr: float, momentum: float, newton_schulz: str = "fast"):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "newton_schulz": newton_schulz}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            for p in params:
                if not self.state[p]:
                    names = OPTIMIZER_STATE[type(self)]
                    self.state[p].update({name: p.new_zeros(state_shape(name, p)) for name in names})
            updates, momentum = [p.grad for p in params], [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_lerp_(momentum, updates, 1 - group["momentum"])
            torch._foreach_lerp_(updates, momentum, group["momentum"])
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            stacks: dict[torch.Size, list[tuple[torch.Tensor, ...]]] = {}  # (weight, update, squares) by shape
            for p, update in zip(params, updates, strict=True):
                n = matrices(p)
                squares = self.state[p].get("squares", p)  # plain Muon has none, and looks at none
                for parts in zip(p.chunk(n), update.chunk(n), squares.chunk(n), strict=True):
                    stacks.setdefault(parts[0].shape, []).append(parts)
            for (rows, columns), parts in stacks.items():
                weights, updates, squares = zip(*parts, strict=True)
                change = orthogonalized(torch.stack(updates), NEWTON_SCHULZ[group["newton_schulz"]])
                change = self.finished(change.to(weights[0].dtype), squares)
                torch._foreach_add_(weights, change.unbind(), alpha=-group["lr"] * max(1, rows / columns) ** 0.5)

    def finished(self, change: torch.Tensor, squares: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return change


class NorMuon(Muon):
    """NorMuon (Li et al. 2025) as in modded-nanogpt: Muon, with each row of a change (of wide ones, column) divided by
    the root of its mean square, which `squares` averages over the steps, and with the norm the whole had before."""

    def finished(self, change: torch.Tensor, squares: tuple[torch.Tensor, ...]) -> torch.Tensor:
        norm, kept = change.norm(dim=(-2, -1), keepdim=True), torch.stack(squares)  # (n, 1, 1), (n, rows, 1)
        kept.lerp_(change.square().mean(-1 if kept.size(-1) == 1 else -2, keepdim=True), 1 - NORMUON_BETA2)
        torch._foreach_copy_(squares, kept.unbind())
        change = change * kept.clamp_min(1e-10).rsqrt()
        return change * (norm / change.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))


# tensors per parameter; ZeRO-1 saves no others: add those of a new optimizer, and their shapes below
OPTIMIZER_STATE = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
    NorMuon: ("momentum_buffer", "squares"),
}


def state_shape(name: str, p: torch.Tensor) -> tuple[int, ...]:
    """The shape of what an optimizer keeps of a parameter."""
    if name == "squares":
        return (p.size(0), 1) if p.size(0) >= p.size(1) else (1, p.size(1))
    return () if name == "step" else tuple(p.shape)


class Weights:
    """What the optimizers update: the model's parameters or, with --weights bfloat16, their float32 twins (master
    weights, Micikevicius et al. 2018), so small updates are not rounded away. Gradients then need half the bandwidth
    between ranks; checkpoints store the twins."""

    def __init__(self, model: nn.Module, cfg: TrainConfig):
        self.model, self.named = model, dict(model.named_parameters())  # a tied head appears once
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (the model's, its twin)
        if cfg.weights == "bfloat16":
            self.named = {name: nn.Parameter(p.detach().clone()) for name, p in self.named.items()}
            self.pairs = list(zip(model.parameters(), self.named.values(), strict=True))
            for p in model.parameters():
                p.data = p.data.bfloat16()

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """After a step, copy the twins, rounded, into the model."""
        if self.pairs:
            parameters, twins = zip(*self.pairs, strict=True)
            torch._foreach_copy_(parameters, twins)

    def take_gradients(self) -> list[nn.Parameter]:
        """Move the gradients from the model to the float32 parameters and return those."""
        for p, twin in self.pairs:
            twin.grad = None if p.grad is None else p.grad.float()  # None: the forward pass skips it
            p.grad = None
        return list(self.named.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict, in float32."""
        twins = dict(self.pairs)
        return {k: twins.get(p, p).detach() for k, p in self.model.state_dict(keep_vars=True).items()}


def parameter_groups(named: dict[str, nn.Parameter], cfg: TrainConfig) -> dict[str, list[dict]]:
    """Every parameter in exactly one group, by optimizer: {"adamw": [...], "muon": [...]} (only those in use).

    By default AdamW decays matrices but not vectors (biases, gains), as in other GPT-2 reproductions. With --optimizer
    muon or normuon the blocks' matrices go to that and the rest stay with Adam. The schedule multiplies `peak_lr`.
    """
    muon = [n for n, p in named.items() if cfg.optimizer != "adamw" and p.dim() == 2 and ".h." in n]
    embeddings = [n for n in named if n not in muon and n.split(".")[1] in ("wte", "wpe", "vte")]
    decay = [n for n, p in named.items() if n not in muon and n not in embeddings and p.dim() >= 2]
    rest = [n for n, p in named.items() if p.dim() < 2]
    assert sorted(muon + embeddings + decay + rest) == sorted(named), "a parameter is in no group or in two"

    def group(names: list[str], **settings) -> list[dict]:
        return [{"params": [named[n] for n in names], **settings}] if names else []

    groups = {
        "adamw": [
            *group(embeddings, weight_decay=cfg.weight_decay, peak_lr=cfg.max_lr * cfg.embed_lr_scale),
            *group(decay, weight_decay=cfg.weight_decay, peak_lr=cfg.max_lr),
            *group(rest, weight_decay=cfg.vector_weight_decay, peak_lr=cfg.max_lr * cfg.vector_lr_scale),
        ],
        "muon": group(muon, weight_decay=cfg.muon_weight_decay, peak_lr=cfg.muon_lr),
    }
    return {k: v for k, v in groups.items() if v}


def build(weights: Weights, cfg: TrainConfig, rt: Runtime) -> list[torch.optim.Optimizer]:
    """The run's optimizers. With zero_stage 1 each rank keeps optimizer state only for its share of the parameters
    (ZeRO, Rajbhandari et al. 2020), using torch's ZeroRedundancyOptimizer."""
    muon = {"momentum": cfg.muon_momentum, "newton_schulz": cfg.newton_schulz}
    kinds = {
        "adamw": (torch.optim.AdamW, {"betas": (cfg.beta1, cfg.beta2), "eps": cfg.adam_eps, "fused": True}),
        "muon": (NorMuon if cfg.optimizer == "normuon" else Muon, muon),
    }
    optimizers = []
    for name, groups in parameter_groups(weights.named, cfg).items():
        cls, settings = kinds[name]
        if cfg.zero_stage == 1 and rt.world_size > 1:
            assert cls in OPTIMIZER_STATE, f"add to OPTIMIZER_STATE what {cls.__name__} keeps: ZeRO-1 saves no more"
            from torch.distributed.optim import ZeroRedundancyOptimizer

            zero = {"parameters_as_bucket_view": True}  # one broadcast per rank instead of one per parameter
            optimizers.append(ZeroRedundancyOptimizer(groups, cls, lr=cfg.max_lr, **zero, **settings))
        else:
            optimizers.append(cls(groups, lr=cfg.max_lr, **settings))
    return optimizers


def lr_factor(step: int, max_steps: int, cfg: TrainConfig) -> float:
    """Fraction of the peak learning rate at `step`, from 1 down to min_lr / max_lr.

    cosine: linear warm-up, then half a cosine over the rest of max_steps. trapezoid (Hägele et al. 2024): linear
    warm-up, constant, then linear decay over the last `cooldown` fraction of max_steps. No checkpoint keeps a rate: a
    resumed run's follows from its own flags and max_steps, and resume.tell_rate says where that makes it jump.
    """
    floor = cfg.min_lr / cfg.max_lr if cfg.max_lr else 0.0
    if step < cfg.warmup_steps:
        return (step + 1) / cfg.warmup_steps
    if step >= max_steps:
        return floor
    if cfg.schedule == "cosine":
        progress = (step - cfg.warmup_steps) / (max_steps - cfg.warmup_steps)
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    left = (max_steps - step) / max(1.0, cfg.cooldown * max_steps)
    return floor + (1 - floor) * min(1.0, left)


def muon_momentum(step: int, cfg: TrainConfig) -> float:
    """Muon's momentum at `step`; in a warm-up it rises from 0.85 (modded-nanogpt since record 9)."""
    if step >= cfg.muon_momentum_warmup:
        return cfg.muon_momentum
    return 0.85 + (cfg.muon_momentum - 0.85) * step / cfg.muon_momentum_warmup


def set_rates(optimizers: list[torch.optim.Optimizer], step: int, max_steps: int, cfg: TrainConfig) -> float:
    """Set every group's learning rate, and Muon's momentum, for `step`; return the rate for a peak of max_lr."""
    factor = lr_factor(step, max_steps, cfg)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
            if "momentum" in group:
                group["momentum"] = muon_momentum(step, cfg)
    return cfg.max_lr * factor


def state_size(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> int:
    """Numbers that an optimizer will keep for one of its parameters, on one rank or another."""
    names = OPTIMIZER_STATE.get(type(getattr(optimizer, "optim", optimizer)), ())
    return sum(math.prod(state_shape(name, p)) for name in names if name != "step")


def full_state(optimizers: list[torch.optim.Optimizer], rt: Runtime) -> list[dict] | None:
    """Complete optimizer state dicts, sharded or not, on rank 0 (None elsewhere). Every rank must call it."""
    states = [gathered(o, rt) if hasattr(o, "consolidate_state_dict") else o.state_dict() for o in optimizers]
    return states if rt.is_main else None


def gathered(optimizer: torch.optim.Optimizer, rt: Runtime) -> dict:
    """A ZeroRedundancyOptimizer's state dict, complete on rank 0, where parts from other ranks are in host memory. Its
    own consolidate_state_dict sends pickles and unpacks them byte by byte, at 16 MB/s: minutes for a large model."""
    whole = torch.optim.Optimizer.state_dict(optimizer)  # everything but the state of the parameters
    local = optimizer.optim.state  # of this rank's share
    params = [p for g in optimizer.param_groups for p in g["params"]]
    names = OPTIMIZER_STATE[type(optimizer.optim)]
    here = torch.tensor([bool(local.get(p)) for p in params], device=rt.device, dtype=torch.int32)
    held = torch.stack(rt.all_gather(here), dim=1).tolist()  # for each parameter, 1 at the rank that has its state
    for i, p in enumerate(params):
        if not any(held[i]):  # no step taken yet
            continue
        owner = held[i].index(1)
        if owner == rt.rank:
            state = dict(local[p])
        else:
            state = {name: p.new_empty(state_shape(name, p)) for name in names}
        for name in names:
            rt.broadcast(state[name], owner)
            if owner != rt.rank:
                state[name] = state[name].cpu() if rt.is_main else None
        whole["state"][i] = state
    return whole


def load_state(optimizers: list[torch.optim.Optimizer], states: list[dict]) -> None:
    """Load what full_state returned, for any zero_stage and world size; settings stay those of the current config.
    Raises ValueError, among others, if the state is not of these parameters."""
    if len(optimizers) != len(states):
        raise ValueError(f"it has {len(states)} optimizers, but this config has {len(optimizers)}")
    for optimizer, state in zip(optimizers, states, strict=True):
        params = [p for g in optimizer.param_groups for p in g["params"]]
        kind = type(getattr(optimizer, "optim", optimizer))
        for i, saved in state["state"].items() if kind in OPTIMIZER_STATE else ():
            if saved.keys() != set(OPTIMIZER_STATE[kind]):
                raise ValueError(f"it keeps {', '.join(saved)} of parameter {i}, unlike {kind.__name__}")
            if any(t.numel() != 1 and t.shape != state_shape(name, params[i]) for name, t in saved.items()):
                raise ValueError(f"the state of parameter {i} does not fit its shape {list(params[i].shape)}")
        ours = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        optimizer.load_state_dict(state)
        if hasattr(optimizer, "optim"):
            # ZeRO leaves on the CPU what fused AdamW needs on the device (pytorch/pytorch#124133), and keeps a 2nd copy
            for p, moments in optimizer.optim.state.items():
                moments.update({k: v.to(p.device) for k, v in moments.items()})
            optimizer.state.clear()
        for group, settings in zip(optimizer.param_groups, ours, strict=True):
            group.update(settings)
