"""Groups hold every parameter once, schedules are the published curves, state moves between optimizers unharmed."""

import copy
import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from model import GPT, GPTConfig
from system.distributed import Runtime
from training import muon, optim, schedule
from training.master_weights import MasterWeights
from training.presets import PRESETS

CPU = Runtime(torch.device("cpu"), torch.float32)
SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
BASE = dataclasses.replace(PRESETS["gpt2-124m"], model=SMALL, sequence_length=16, val_tokens=16)


@pytest.mark.parametrize("kind", ["adamw", "muon", "normuon"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_in_exactly_one_group(kind, tied):
    cfg = dataclasses.replace(BASE, optimizer=kind, model=dataclasses.replace(SMALL, tied_head=tied))
    model = GPT(cfg.model)
    groups = optim.parameter_groups(dict(model.named_parameters()), cfg)
    ids = [id(p) for gs in groups.values() for g in gs for p in g["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    if kind != "adamw":
        assert {tuple(p.shape) for p in groups["muon"][0]["params"]} == {(48, 16), (16, 16), (64, 16), (16, 64)}


def test_weight_decay_touches_matrices_only():
    for group in optim.parameter_groups(dict(GPT(SMALL).named_parameters()), BASE)["adamw"]:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])


def test_cosine_is_build_nanogpts():
    lr = lambda step: BASE.max_lr * schedule.lr_factor(step, 19073, BASE)
    assert lr(0) == pytest.approx(6e-4 / 715)
    assert lr(714) == pytest.approx(6e-4) and lr(715) == pytest.approx(6e-4)
    middle = 715 + (19073 - 715) / 2
    assert lr(middle) == pytest.approx((6e-4 + 6e-5) / 2)
    assert lr(3000) == pytest.approx(6e-5 + 0.5 * (1 + math.cos(math.pi * 2285 / 18358)) * 5.4e-4)
    assert lr(19073) == pytest.approx(6e-5)


def test_trapezoid():
    cfg = dataclasses.replace(BASE, schedule="trapezoid", warmup_steps=10, cooldown=0.25, min_lr=0.0)
    factor = [schedule.lr_factor(s, 100, cfg) for s in range(101)]
    assert factor[9] == 1 and factor[10:76] == [1] * 66
    assert factor[100] == 0 and factor[88] == pytest.approx(12 / 25)
    assert all(a >= b for a, b in pairwise(factor[10:]))


def test_each_rate_of_the_speedrun_reaches_its_parameters():
    cfg = PRESETS["speedrun-124m"]
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, n_layer=2, n_head=2, n_embd=16, vocab_size=64))
    weights = MasterWeights(GPT(cfg.model), cfg.weights == "bfloat16")
    optimizers = optim.build_optimizers(weights.named, cfg, CPU)
    assert schedule.set_learning_rates(optimizers, 0, 3250, cfg) == 0.004
    rates = {p: g["lr"] for o in optimizers for g in o.param_groups for p in g["params"]}
    for name, p in weights.named.items():
        of_blocks = 0.025 if ".h." in name else 0.004
        wanted = 0.7 if ".wte." in name else of_blocks if p.dim() == 2 else 0.015
        assert rates[p] == pytest.approx(wanted), name
    assert optimizers[0].param_groups[0]["betas"] == (0.8, 0.95)


def test_muons_momentum_warms_up():
    cfg = dataclasses.replace(BASE, optimizer="muon", muon_momentum_warmup=300)
    optimizers = optim.build(MasterWeights(GPT(SMALL), cfg.weights == "bfloat16"), cfg, CPU)
    for step, momentum in ((0, 0.85), (150, 0.9), (300, 0.95), (2000, 0.95)):
        schedule.set_learning_rates(optimizers, step, 3000, cfg)
        assert optimizers[1].param_groups[0]["momentum"] == pytest.approx(momentum)


@pytest.mark.parametrize("kind", ["adamw", "muon", "normuon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_round_trip_continues_bit_for_bit(kind, dtype):
    cfg = dataclasses.replace(BASE, optimizer=kind, weights=dtype)

    def step(weights, optimizers, seed):
        idx = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(seed))
        weights.model(idx, idx)[1].backward()
        weights.take_gradients()
        schedule.set_learning_rates(optimizers, seed, 10, cfg)
        for o in optimizers:
            o.step()
            o.zero_grad()
        weights.copy_to_model()

    torch.manual_seed(0)
    a = MasterWeights(GPT(SMALL), cfg.weights == "bfloat16")
    oa = optim.build_optimizers(a.named, cfg, CPU)
    step(a, oa, 0)
    saved = {k: v.clone() for k, v in a.state_dict().items()}
    b = MasterWeights(GPT.from_state_dict(SMALL, saved), cfg.weights == "bfloat16")
    ob = optim.build_optimizers(b.named, cfg, CPU)
    optim.load_state(ob, copy.deepcopy(optim.full_state(oa, CPU)))
    for s in (1, 2):
        step(a, oa, s)
        step(b, ob, s)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


def test_state_of_other_parameters_is_refused():
    """torch would load it, and fail in the first step or, where shapes can be stretched, not at all."""
    model = GPT(SMALL)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))[1].backward()
    optimizers = optim.build(optim.Weights(model, BASE), BASE, CPU)
    optimizers[0].step()
    (state,) = optim.full_state(optimizers, CPU)
    with pytest.raises(ValueError, match="it has 2 optimizers, but this config has 1"):
        optim.load_state(optimizers, [state, state])
    state["state"][0] = state["state"][0] | {"exp_avg": torch.zeros(1, 16)}
    with pytest.raises(ValueError, match="parameter 0 does not fit its shape"):
        optim.load_state(optimizers, [state])


def test_bfloat16_weights_keep_float32_twins():
    """Updates too small for bfloat16 add up in the twins; the model is the twins, rounded; a tied head stays tied."""
    cfg = dataclasses.replace(BASE, weights="bfloat16", weight_decay=0.0)
    model = GPT(SMALL)
    weights = MasterWeights(model, cfg.weights == "bfloat16")
    optimizers = optim.build_optimizers(weights.named, cfg, CPU)
    before = weights.state_dict()["transformer.h.0.attn.c_attn.weight"].clone()
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weights.take_gradients()
        for o in optimizers:
            for g in o.param_groups:
                g["lr"] = 1e-6
            o.step()
        weights.copy_to_model()
    state = weights.state_dict()
    assert torch.allclose(before - state["transformer.h.0.attn.c_attn.weight"], torch.tensor(3e-6), atol=1e-8)
    assert all(v.dtype == torch.float32 for v in state.values()) and state.keys() == model.state_dict().keys()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(v, state[k].bfloat16()) for k, v in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_weight_that_the_forward_pass_skips_stays_as_it_is():
    """As where a record drops the first attention layer; with float32 weights torch's optimizers see to it."""
    weights = optim.Weights(model := GPT(SMALL), cfg := dataclasses.replace(BASE, weights="bfloat16"))
    optimizers = optim.build_optimizers(weights.named, cfg, CPU)
    before = {k: v.clone() for k, v in weights.state_dict().items()}
    for name, p in model.named_parameters():
        p.grad = None if ".h.0.attn" in name else torch.ones_like(p)
    weights.take_gradients()
    optimizers[0].step()
    weights.copy_to_model()
    assert all(torch.equal(v, before[k]) == (".h.0.attn" in k) for k, v in weights.state_dict().items())


def test_muon_is_torchs_for_each_matrix():
    """Equal shapes together, queries, keys and values apart; and state that torch's Muon saved is taken up."""
    torch.manual_seed(0)
    shapes = {"qkv": (48, 16), "tall": (64, 16), "tall too": (64, 16), "wide": (16, 64), "square": (16, 16)}
    ours = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    parts = [t for name, p in ours.items() for t in p.detach().clone().chunk(3 if name == "qkv" else 1)]
    theirs = [torch.nn.Parameter(t) for t in parts]
    settings = {"lr": 0.02, "momentum": 0.9}
    mine = muon.Muon([{"params": list(ours.values()), "weight_decay": 0.1}], **settings)
    torchs = torch.muon.Muon([{"params": theirs, "weight_decay": 0.1}], **settings)
    for step in range(4):
        for p in ours.values():
            p.grad = torch.randn(p.shape)
        grads = [g.clone() for name, p in ours.items() for g in p.grad.chunk(3 if name == "qkv" else 1)]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        mine.step()
        torchs.step()
        found = [t for name, p in ours.items() for t in p.detach().chunk(3 if name == "qkv" else 1)]
        for a, b in zip(found, theirs, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=2e-4, rtol=0)  # lr times the rounding of bfloat16
        if step == 1:
            state = torchs.state_dict()
            buffers = [s["momentum_buffer"] for s in state["state"].values()]
            buffers = [torch.cat(buffers[:3]), *buffers[3:]]
            state["state"] = {i: {"momentum_buffer": b.clone()} for i, b in enumerate(buffers)}
            state["param_groups"][0]["params"] = list(range(len(buffers)))
            mine = muon.Muon([{"params": list(ours.values()), "weight_decay": 0.1}], **settings)
            optim.load_state([mine], [state])


def test_normuon_evens_out_the_rows_and_keeps_the_norm():
    """Against its definition, one matrix at a time; queries, keys and values apart, columns where they are more."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((48, 16), (64, 16), (64, 16), (16, 64))]
    plain = [torch.nn.Parameter(p.detach().clone()) for p in params]
    normuon, muon = (kind(ps, lr=1.0, momentum=0.9) for kind, ps in ((optim.NorMuon, params), (muon.Muon, plain)))
    squares = {}
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for p, q in zip(params, plain, strict=True):
            p.grad = torch.randn(p.shape) * torch.rand(p.size(0), 1)
            q.grad, q.data = p.grad.clone(), p.detach().clone()
        normuon.step()
        muon.step()
        for i, (p, q, old) in enumerate(zip(params, plain, before, strict=True)):
            for part in range(n := 3 if p.size(0) == 48 else 1):
                change, wanted = ((old - t.detach()).chunk(n)[part] for t in (p, q))
                dim = 1 if change.size(0) >= change.size(1) else 0
                kept = squares.get((i, part), 0) * 0.95 + wanted.square().mean(dim, keepdim=True) * 0.05
                squares[i, part] = kept
                scaled = wanted / kept.sqrt()
                torch.testing.assert_close(change, scaled * wanted.norm() / scaled.norm(), atol=1e-4, rtol=1e-3)


class Sign(torch.optim.Optimizer):
    """An optimizer that OPTIMIZER_STATE does not list; its state has another shape than the parameter."""

    def __init__(self, params, lr, **settings):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in [p for g in self.param_groups for p in g["params"]]:
            self.state[p]["mean"] = self.state[p].get("mean", 0) + p.grad.flatten()[:3]
            p -= 1e-3 * p.grad.sign()


def test_an_optimizer_of_ones_own(monkeypatch):
    """It resumes, is not taken for another one, and ZeRO-1, which could not save it, says so before the first step
    (it once failed at the first save, which in speedrun-124m is the last step)."""
    weights = optim.Weights(GPT(SMALL), BASE)
    adamw = optim.build_optimizers(weights.named, BASE, CPU)
    monkeypatch.setattr(torch.optim, "AdamW", Sign)
    ours, again = (optim.build_optimizers(weights.named, BASE, CPU) for _ in range(2))
    idx = torch.zeros((2, 16), dtype=torch.int64)
    weights.model(idx, idx)[1].backward()
    ours[0].step()
    optim.load_state(again, copy.deepcopy(optim.full_state(ours, CPU)))
    assert all(torch.equal(ours[0].state[p]["mean"], again[0].state[p]["mean"]) for p in weights.named.values())
    with pytest.raises(ValueError, match="keeps mean of parameter 0, unlike AdamW"):
        optim.load_state(adamw, optim.full_state(ours, CPU))
    cfg, two = dataclasses.replace(BASE, zero_stage=1), dataclasses.replace(CPU, world_size=2)
    with pytest.raises(AssertionError, match="OPTIMIZER_STATE what Sign keeps"):
        optim.build_optimizers(weights.named, cfg, two)
