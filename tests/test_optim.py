"""Every parameter has one optimizer, schedules are the published curves, state moves between runs unchanged; and an
optimizer, a schedule or another choice that is not handled everywhere raises, with what to do."""

import copy
import dataclasses
import math
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from helpers import CPU, choices, with_unchecked

from model import GPT, GPTConfig
from system import machine
from training import muon, optim, schedule
from training.config import TrainConfig
from training.master_weights import MasterWeights
from training.presets import PRESETS
from training.step import TrainStep

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
BASE = dataclasses.replace(
    PRESETS["gpt2-124m"], model=SMALL, sequence_length=16, val_tokens=16, total_batch_size=32, compile=False
)

OPTIMIZER_NAMES = choices(TrainConfig, "optimizer")
SCHEDULES = choices(TrainConfig, "schedule")


def build(cfg):
    """A small model's weights, from a fixed seed, and the optimizers of this config."""
    torch.manual_seed(0)
    weights = MasterWeights(GPT(cfg.model), keep_float32_copy=cfg.weights == "bfloat16")
    return weights, optim.build_optimizers(weights.named, cfg, CPU)


def take_step(weights, optimizers, cfg, step):
    """One training step, of 10, on random tokens that depend on the step."""
    idx = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
    weights.model(idx, idx)[1].backward()
    weights.take_gradients()
    schedule.set_learning_rates(optimizers, step, 10, cfg)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    weights.copy_to_model()


def optimizer_of_each_parameter(cfg):
    """{name of a parameter: class of the optimizer that takes it}"""
    weights, optimizers = build(cfg)
    class_of = {p: type(optimizer) for optimizer in optimizers for p in optim.all_params(optimizer)}
    return {name: class_of[p] for name, p in weights.named.items()}


# ------------------------------------------------------------------------- which parameters


@pytest.mark.parametrize("tied_head", [True, False])
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_every_parameter_is_in_exactly_one_group(optimizer, tied_head):
    cfg = dataclasses.replace(BASE, optimizer=optimizer, model=dataclasses.replace(SMALL, tied_head=tied_head))
    model = GPT(cfg.model)
    groups_by_optimizer = optim.parameter_groups(dict(model.named_parameters()), cfg)
    found = [id(p) for groups in groups_by_optimizer.values() for group in groups for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters())


def test_muon_takes_the_matrices_of_the_blocks_and_nothing_else():
    cfg = dataclasses.replace(BASE, optimizer="muon")
    (group,) = optim.parameter_groups(dict(GPT(SMALL).named_parameters()), cfg)["muon"]
    shapes = {tuple(p.shape) for p in group["params"]}
    assert shapes == {(48, 16), (16, 16), (64, 16), (16, 64)} and len(group["params"]) == 4 * SMALL.n_layer


def test_weight_decay_is_of_matrices_only():
    groups = optim.parameter_groups(dict(GPT(SMALL).named_parameters()), BASE)["adamw"]
    for group in groups:
        assert all((p.dim() >= 2) == (group["weight_decay"] == 0.1) for p in group["params"])


# ------------------------------------------------------------------------- no optimizer is half added


def test_no_two_optimizers_train_every_parameter_alike():
    """One that is named in TrainConfig, but not handled in parameter_groups, would train as another."""
    seen = {}
    for name in OPTIMIZER_NAMES:
        classes = tuple(sorted(optimizer_of_each_parameter(dataclasses.replace(BASE, optimizer=name)).items(), key=str))
        fix = "give it parameters in parameter_groups, or a class of its own in OPTIMIZERS (training/optim.py)"
        assert classes not in seen, f"--optimizer {name} trains every parameter as {seen[classes]} does: {fix}"
        seen[classes] = name


def test_the_tables_have_the_same_classes():
    fix = "every class in OPTIMIZERS needs its state in OPTIMIZER_STATE, and no other (training/optim.py)"
    assert set(optim.OPTIMIZERS.values()) == set(optim.OPTIMIZER_STATE), fix


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_the_state_of_every_optimizer_is_in_the_table_and_nothing_else_is(name):
    """A step adds no state to what the table has created, changes no shape, and uses each tensor: all begin as 0."""
    weights, optimizers = build(dataclasses.replace(BASE, optimizer=name))
    for p in weights.named.values():
        p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        for p in optim.all_params(optimizer):
            state = optimizer.state[p]
            shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
            fix = f"OPTIMIZER_STATE in training/optim.py must have what {type(optimizer).__name__} keeps: {shapes}"
            assert shapes == optim.state_shapes(type(optimizer), p), fix
            unused = [key for key, tensor in state.items() if not tensor.any()]
            assert not unused, f"{fix}, but a step leaves {unused} at 0"
            assert {tensor.dtype for tensor in state.values()} == {torch.float32}


TORCHS_OWN = [kind for kind in optim.OPTIMIZER_STATE if kind.__module__.startswith("torch.")]


@pytest.mark.parametrize("kind", TORCHS_OWN)
def test_the_table_has_the_state_that_torchs_optimizers_create_by_themselves(kind):
    """They create it in their first step, where it is missing."""
    p = torch.nn.Parameter(torch.ones(3, 4))
    p.grad = torch.ones_like(p)
    optimizer = kind([p])
    optimizer.step()
    found = {key: tuple(tensor.shape) for key, tensor in optimizer.state[p].items()}
    assert found == optim.state_shapes(kind, p)


def test_adamw_with_state_from_the_table_makes_the_same_bits_as_torch_alone():
    weights, (optimizer,) = build(BASE)
    groups = copy.deepcopy(optim.parameter_groups(weights.named, BASE)["adamw"])
    reference = torch.optim.AdamW(groups, lr=BASE.max_lr, betas=(BASE.beta1, BASE.beta2), eps=BASE.adam_eps, fused=True)
    for step in range(3):
        torch.manual_seed(step)
        for p, q in zip(optim.all_params(optimizer), optim.all_params(reference), strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    assert all(map(torch.equal, optim.all_params(optimizer), optim.all_params(reference)))


def test_a_choice_that_is_named_but_not_handled_raises_when_the_step_is_built():
    """TrainConfig refuses names that are not in its Literals, so these are set behind its back."""
    for field, value, place in (
        ("optimizer", "unknown", "add a case to parameter_groups in training/optim.py"),
        ("weights", "unknown", "add a case to TrainStep in training/step.py"),
        ("schedule", "unknown", "add a case to choose_decay in training/schedule.py"),
        ("zero_stage", 9, "add a case to build_optimizers in training/optim.py"),
    ):
        cfg = with_unchecked(BASE, **{field: value})
        with pytest.raises(ValueError, match=f"{value}.*{place}"):
            TrainStep(cfg, CPU, GPT(SMALL))
    with pytest.raises(ValueError, match=r"new.*add it to NEWTON_SCHULZ_ITERATIONS in training/muon.py"):
        TrainStep(with_unchecked(BASE, optimizer="muon", newton_schulz="new"), CPU, GPT(SMALL))


def test_an_optimizer_without_its_class_or_its_settings_raises_when_it_is_built(monkeypatch):
    groups = {"unknown": [{"params": [torch.nn.Parameter(torch.ones(2))], "weight_decay": 0.0, "peak_lr": 1.0}]}
    monkeypatch.setattr(optim, "parameter_groups", lambda named, cfg: groups)
    with pytest.raises(ValueError, match=r"'unknown': add a case to optimizer_settings in training/optim.py"):
        optim.build_optimizers({}, BASE, CPU)
    monkeypatch.setattr(optim, "optimizer_settings", lambda name, cfg: {})
    with pytest.raises(ValueError, match=r"'unknown': add it to OPTIMIZERS in training/optim.py"):
        optim.build_optimizers({}, BASE, CPU)


class Sign(torch.optim.Optimizer):
    """A contributor's optimizer. Its state has another shape than the parameter."""

    def __init__(self, params, lr, **settings):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in optim.all_params(self):
            self.state[p]["mean"] += p.grad.flatten()[:3]
            p -= 1e-3 * p.grad.sign()


@pytest.mark.parametrize("zero_stage", choices(TrainConfig, "zero_stage"))
def test_an_optimizer_without_its_state_in_the_table_raises_when_it_is_built(monkeypatch, zero_stage):
    """It once failed at the first save, which in speedrun-124m is the last step, and only with --zero-stage 1."""
    monkeypatch.setitem(optim.OPTIMIZERS, "adamw", Sign)
    cfg, rt = dataclasses.replace(BASE, zero_stage=zero_stage), dataclasses.replace(CPU, world_size=2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # for torch's ZeRO-1
    try:
        with pytest.raises(ValueError, match=r"add to OPTIMIZER_STATE in training/optim.py what Sign keeps"):
            optim.build_optimizers(dict(GPT(SMALL).named_parameters()), cfg, rt)
    finally:
        dist.destroy_process_group()


def test_an_optimizer_of_ones_own_resumes_and_is_not_taken_for_another(monkeypatch):
    weights, adamw = build(BASE)
    monkeypatch.setitem(optim.OPTIMIZERS, "adamw", Sign)
    monkeypatch.setitem(optim.OPTIMIZER_STATE, Sign, {"mean": lambda p: (3,)})
    original, resumed = (optim.build_optimizers(weights.named, BASE, CPU) for _ in range(2))
    take_step(weights, original, BASE, step=0)

    saved = copy.deepcopy(optim.full_state(original, CPU))
    optim.load_state(resumed, saved)

    assert all(torch.equal(original[0].state[p]["mean"], resumed[0].state[p]["mean"]) for p in weights.named.values())
    assert any(original[0].state[p]["mean"].any() for p in weights.named.values())
    with pytest.raises(ValueError, match="keeps mean of parameter 0, unlike AdamW"):
        optim.load_state(adamw, saved)


# ------------------------------------------------------------------------- learning rates


def test_the_cosine_is_build_nanogpts():
    lr = lambda step: BASE.max_lr * schedule.lr_factor(step, 19073, BASE)
    assert lr(0) == pytest.approx(6e-4 / 715)
    assert lr(714) == pytest.approx(6e-4) and lr(715) == pytest.approx(6e-4)
    middle = 715 + (19073 - 715) / 2
    assert lr(middle) == pytest.approx((6e-4 + 6e-5) / 2)
    assert lr(3000) == pytest.approx(6e-5 + 0.5 * (1 + math.cos(math.pi * 2285 / 18358)) * 5.4e-4)
    assert lr(19073) == pytest.approx(6e-5)


def test_the_trapezoid_is_constant_and_then_falls_linearly():
    cfg = dataclasses.replace(BASE, schedule="trapezoid", warmup_steps=10, cooldown=0.25, min_lr=0.0)
    factors = [schedule.lr_factor(step, 100, cfg) for step in range(101)]
    assert factors[9] == 1 and factors[10:76] == [1] * 66
    assert factors[100] == 0 and factors[88] == pytest.approx(12 / 25)
    assert all(a >= b for a, b in pairwise(factors[10:]))


def curve_of(name):
    """The factors of a schedule over 100 steps, 10 of them warm-up, down to a tenth of the peak."""
    cfg = dataclasses.replace(BASE, schedule=name, warmup_steps=10, cooldown=0.25, max_lr=1.0, min_lr=0.1)
    return tuple(schedule.lr_factor(step, 100, cfg) for step in range(101))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_warms_up_to_the_peak_and_ends_at_the_floor(name):
    factors = curve_of(name)
    assert all(0 <= factor <= 1 for factor in factors) and max(factors) == 1
    assert factors[:10] == tuple((step + 1) / 10 for step in range(10))
    assert factors[10] == 1  # the decay begins at the peak, without a jump
    assert factors[100] == pytest.approx(0.1) and factors[99] < 0.2  # nearly there in the last step that is made


@pytest.mark.parametrize("name", SCHEDULES)
def test_past_its_end_a_schedule_stays_at_the_floor(name):
    """Also where a resume with fewer steps makes the warm-up longer than the run."""
    cfg = dataclasses.replace(BASE, schedule=name, warmup_steps=715, max_lr=1.0, min_lr=0.1)
    assert schedule.lr_factor(99, 100, cfg) == pytest.approx(100 / 715)
    assert [schedule.lr_factor(step, 100, cfg) for step in (100, 101, 300, 1000)] == [0.1] * 4


def test_a_drop_from_the_peak_is_described_and_nothing_else():
    cfg = dataclasses.replace(BASE, schedule="trapezoid", warmup_steps=300, cooldown=1.0, max_lr=1.0, min_lr=0.0)
    assert [round(schedule.lr_factor(step, 1000, cfg), 3) for step in (299, 300, 301)] == [1.0, 0.7, 0.699]
    expected = "--warmup-steps 300 and --cooldown 1.0 of 1000 steps overlap: the rate drops from its peak to 0.70 of it"
    assert schedule.describe_drop(cfg, 1000).startswith(expected)

    for changes in ({"cooldown": 0.7}, {"warmup_steps": 0}, {"warmup_steps": 2000}, {"schedule": "cosine"}):
        assert schedule.describe_drop(dataclasses.replace(cfg, **changes), 1000) == ""


def test_no_two_schedules_have_the_same_curve():
    curves = {curve_of(name): name for name in SCHEDULES}
    fix = "give each schedule a function of its own in choose_decay (training/schedule.py)"
    assert sorted(curves.values()) == sorted(SCHEDULES), f"only {sorted(curves.values())} differ: {fix}"


def test_each_rate_of_the_speedrun_reaches_its_parameters():
    speedrun = PRESETS["speedrun-124m"]
    small = dataclasses.replace(speedrun.model, n_layer=2, n_head=2, n_embd=16, vocab_size=64)
    cfg = dataclasses.replace(speedrun, model=small)
    weights, optimizers = build(cfg)

    assert schedule.set_learning_rates(optimizers, 0, 3250, cfg) == 0.004

    rate_of = {p: group["lr"] for o in optimizers for group in o.param_groups for p in group["params"]}
    for name, p in weights.named.items():
        if ".wte." in name:
            expected = 0.7
        elif p.dim() < 2:
            expected = 0.015
        elif ".h." in name:
            expected = 0.025
        else:
            expected = 0.004
        assert rate_of[p] == pytest.approx(expected), name
    assert optimizers[0].param_groups[0]["betas"] == (0.8, 0.95)


# ------------------------------------------------------------------------- saving and loading state


@pytest.mark.parametrize("dtype", choices(TrainConfig, "weights"))
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_state_that_is_saved_and_loaded_continues_bit_for_bit(optimizer, dtype):
    cfg = dataclasses.replace(BASE, optimizer=optimizer, weights=dtype)
    a, optimizers_a = build(cfg)
    take_step(a, optimizers_a, cfg, step=0)

    # Another run begins with what the first one saved.
    saved = {name: tensor.clone() for name, tensor in a.state_dict().items()}
    b = MasterWeights(GPT.from_state_dict(SMALL, saved), keep_float32_copy=dtype == "bfloat16")
    optimizers_b = optim.build_optimizers(b.named, cfg, CPU)
    optim.load_state(optimizers_b, copy.deepcopy(optim.full_state(optimizers_a, CPU)))

    for step in (1, 2):
        take_step(a, optimizers_a, cfg, step)
        take_step(b, optimizers_b, cfg, step)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert all(torch.equal(tensor, b.state_dict()[name]) for name, tensor in a.state_dict().items())


def test_a_checkpoint_without_state_continues_as_from_the_first_step():
    """Up to November 2026 a checkpoint of step 0 held no state, because nothing had created it yet."""
    weights, optimizers = build(BASE)
    saved = optim.full_state(optimizers, CPU)
    saved[0]["state"] = {}
    optim.load_state(optimizers, saved)
    for p in weights.named.values():
        assert {key: tuple(t.shape) for key, t in optimizers[0].state[p].items()} == optim.state_shapes(
            torch.optim.AdamW, p
        )
    take_step(weights, optimizers, BASE, step=0)


def test_state_of_other_parameters_is_refused():
    """torch would load it, and fail in the first step or, where shapes can be stretched, not at all."""
    weights, optimizers = build(BASE)
    take_step(weights, optimizers, BASE, step=0)
    (state,) = optim.full_state(optimizers, CPU)
    with pytest.raises(ValueError, match="it has 2 optimizers, but this config has 1"):
        optim.load_state(optimizers, [state, state])
    state["state"][0] = state["state"][0] | {"exp_avg": torch.zeros(1, 16)}
    with pytest.raises(ValueError, match="parameter 0 does not fit its shape"):
        optim.load_state(optimizers, [state])


# ------------------------------------------------------------------------- master weights


def test_bfloat16_weights_keep_float32_master_weights():
    """Updates too small for bfloat16 add up in the master weights; the model has these, rounded; a tied head stays
    tied."""
    cfg = dataclasses.replace(BASE, weights="bfloat16", weight_decay=0.0)
    weights, optimizers = build(cfg)
    model = weights.model
    before = weights.state_dict()["transformer.h.0.attn.c_attn.weight"].clone()

    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        weights.take_gradients()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 1e-6
            optimizer.step()
        weights.copy_to_model()

    state = weights.state_dict()
    assert torch.allclose(before - state["transformer.h.0.attn.c_attn.weight"], torch.tensor(3e-6), atol=1e-8)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert state.keys() == model.state_dict().keys()
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(torch.equal(tensor, state[name].bfloat16()) for name, tensor in model.state_dict().items())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_every_choice_of_weights_gives_the_model_another_precision():
    dtype_of = {}
    for name in choices(TrainConfig, "weights"):
        train_step = TrainStep(dataclasses.replace(BASE, weights=name), CPU, GPT(SMALL))
        (dtype_of[name],) = {p.dtype for p in train_step.model.parameters()}
    assert dtype_of == {name: getattr(torch, name) for name in choices(TrainConfig, "weights")}


# ------------------------------------------------------------------------- every optimizer does as it is told


def weights_after_three_steps(cfg):
    """{name: weight}, for settings of which none is 0 or the default of a class."""
    weights, optimizers = build(cfg)
    for step in range(3):
        take_step(weights, optimizers, cfg, step)
    return {name: p.detach().clone() for name, p in weights.named.items()}


OWN_SETTINGS = {"max_lr": 1e-2, "min_lr": 1e-3, "muon_lr": 1e-2, "warmup_steps": 1}


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_optimizer_takes_its_rate_and_its_weight_decay_from_the_group(name):
    cfg = dataclasses.replace(BASE, optimizer=name, **OWN_SETTINGS)
    before = {n: p.detach().clone() for n, p in build(cfg)[0].named.items()}
    without_rate = weights_after_three_steps(dataclasses.replace(cfg, max_lr=0.0, min_lr=0.0, muon_lr=0.0))
    assert all(torch.equal(without_rate[n], before[n]) for n in before), "it does not use the group's lr"

    decay = {"weight_decay": 0.5, "vector_weight_decay": 0.5, "muon_weight_decay": 0.5}
    no_decay = {field: 0.0 for field in decay}
    decayed = weights_after_three_steps(dataclasses.replace(cfg, **decay))
    plain = weights_after_three_steps(dataclasses.replace(cfg, **no_decay))
    # Decay acts on what is not zero: biases are zero at first.
    unchanged = [n for n in before if before[n].any() and torch.equal(decayed[n], plain[n])]
    assert not unchanged, f"it does not use the group's weight_decay: {unchanged[:3]}"


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_setting_of_an_optimizer_changes_what_it_does(name, monkeypatch):
    cfg = dataclasses.replace(BASE, optimizer=name, **OWN_SETTINGS)
    settings = optim.optimizer_settings(name, cfg)
    plain = weights_after_three_steps(cfg)
    real = optim.optimizer_settings
    for key, value in settings.items():
        if isinstance(value, bool):  # such as AdamW's `fused`, which is another way to the same result
            continue
        match value:
            case tuple():
                others = [tuple(0.5 if i == j else v for j, v in enumerate(value)) for i in range(len(value))]
            case str():
                others = [choice for choice in choices(TrainConfig, key) if choice != value]
            case _:
                others = [0.5]
        for other in others:
            changed = lambda n, c, other=other, key=key: real(n, c) | ({key: other} if n == name else {})
            with monkeypatch.context() as patch:
                patch.setattr(optim, "optimizer_settings", changed)
                result = weights_after_three_steps(cfg)
            assert any(not torch.equal(result[n], plain[n]) for n in plain), f"{name} ignores {key}={other}"


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_every_optimizer_leaves_a_parameter_without_a_gradient_as_it_is(name):
    cfg = dataclasses.replace(BASE, optimizer=name)
    weights, optimizers = build(cfg)
    before = {n: p.detach().clone() for n, p in weights.named.items()}
    for optimizer in optimizers:
        optimizer.step()
    assert all(torch.equal(p, before[n]) for n, p in weights.named.items())


def test_a_weight_that_the_forward_pass_skips_stays_as_it_is():
    """As where a record drops the first attention layer; with float32 weights torch's optimizers see to it."""
    weights, optimizers = build(dataclasses.replace(BASE, weights="bfloat16"))
    before = {name: tensor.clone() for name, tensor in weights.state_dict().items()}
    for name, p in weights.model.named_parameters():
        p.grad = None if ".h.0.attn" in name else torch.ones_like(p)
    weights.take_gradients()
    optimizers[0].step()
    weights.copy_to_model()
    for name, tensor in weights.state_dict().items():
        assert torch.equal(tensor, before[name]) == (".h.0.attn" in name), name


@pytest.mark.parametrize("weights", choices(TrainConfig, "weights"))
def test_a_step_with_a_weight_that_the_forward_pass_skips_is_rehearsed(weights):
    cfg = dataclasses.replace(BASE, weights=weights)
    train_step = TrainStep(cfg, CPU, GPT(SMALL))
    train_step.model.transformer.h[0].attn.forward = lambda x, *_: torch.zeros_like(x)
    before = {name: tensor.clone() for name, tensor in train_step.weights.state_dict().items()}

    train_step.rehearse(2, False)

    assert all(torch.equal(tensor, before[name]) for name, tensor in train_step.weights.state_dict().items())


# ------------------------------------------------------------------------- Muon

# Parameters by the names that the network gives them. The first has queries, keys and values; the first MLP's is as
# tall as those, but is one matrix.
MATRICES = {
    "transformer.h.0.attn.c_attn.weight": (48, 16),
    "transformer.h.0.mlp.c_fc.weight": (48, 16),
    "transformer.h.1.mlp.c_fc.weight": (64, 16),
    "transformer.h.2.mlp.c_fc.weight": (64, 16),
    "transformer.h.0.mlp.c_proj.weight": (16, 64),
    "transformer.h.0.attn.c_proj.weight": (16, 16),
}


def split_matrices(name, tensor):
    """The matrices that are in a parameter, or in its gradient or its momentum."""
    return tensor.chunk(3 if name.endswith("attn.c_attn.weight") else 1)


def test_muon_is_torchs_for_each_matrix(monkeypatch):
    """Matrices of one shape together; queries, keys and values each alone, though they share a parameter; a parameter
    of an MLP as one, though it is three times as tall as wide. And state that torch's Muon saved is loaded."""
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: True)  # torch's Muon takes bfloat16 on any machine
    torch.manual_seed(0)
    settings = {"lr": 0.02, "momentum": 0.9}

    # This project's Muon takes the parameters as they are, torch's each matrix as a parameter of its own.
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in MATRICES.items()}
    for name, p in parameters.items():
        muon.mark_matrices(name, p)
    split = [matrix for name, p in parameters.items() for matrix in split_matrices(name, p.detach().clone())]
    matrices = [torch.nn.Parameter(matrix) for matrix in split]
    optimizer = muon.Muon([{"params": list(parameters.values()), "weight_decay": 0.1}], **settings)
    optim.create_state(optimizer)
    reference = torch.optim.Muon([{"params": matrices, "weight_decay": 0.1}], **settings)

    for step in range(4):
        for p in parameters.values():
            p.grad = torch.randn(p.shape)
        gradients = [g.clone() for name, p in parameters.items() for g in split_matrices(name, p.grad)]
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        reference.step()
        found = [matrix for name, p in parameters.items() for matrix in split_matrices(name, p.detach())]
        for a, b in zip(found, matrices, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=2e-4, rtol=0)  # lr times the rounding of bfloat16

        # Half-way this project's Muon continues from torch's state, the parts of queries, keys and values put together.
        if step == 1:
            state = reference.state_dict()
            q, k, v, *rest = [tensors["momentum_buffer"] for tensors in state["state"].values()]
            buffers = [torch.cat((q, k, v)), *rest]
            state["state"] = {i: {"momentum_buffer": buffer.clone()} for i, buffer in enumerate(buffers)}
            state["param_groups"][0]["params"] = list(range(len(buffers)))
            optimizer = muon.Muon([{"params": list(parameters.values()), "weight_decay": 0.1}], **settings)
            optim.load_state([optimizer], [state])


def test_queries_keys_and_values_are_known_by_name_not_by_shape():
    rows_of = {}
    for name, shape in MATRICES.items():
        p = torch.nn.Parameter(torch.zeros(shape))
        muon.mark_matrices(name, p)
        rows_of[name] = p.matrix_rows
    assert rows_of.pop("transformer.h.0.attn.c_attn.weight") == (16, 16, 16)
    assert rows_of == {name: (MATRICES[name][0],) for name in rows_of}


def test_every_matrix_of_the_network_is_known_to_muon():
    """A new one must be added to mark_matrices: of queries, keys and values in another layout it cannot tell."""
    for name, p in GPT(SMALL).named_parameters():
        if ".h." in name and p.dim() == 2:
            muon.mark_matrices(name, p)
            assert sum(p.matrix_rows) == p.size(0)


@pytest.mark.parametrize("name, shape, message", [
    # Grouped queries: two heads of queries share one of keys and values.
    ("transformer.h.0.attn.c_attn.weight", (32, 16), "32 rows, not 16 for each of queries, keys and values"),
    ("transformer.h.0.attn.c_kv.weight", (32, 16), "which matrices are in transformer.h.0.attn.c_kv.weight"),
])  # fmt: skip
def test_matrices_in_an_unknown_layout_are_refused(name, shape, message):
    with pytest.raises(ValueError, match=f"{message}.*mark_matrices in training/muon.py"):
        muon.mark_matrices(name, torch.nn.Parameter(torch.zeros(shape)))


@pytest.mark.parametrize("has_bfloat16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_muon_iterates_in_bfloat16_only_where_the_hardware_has_it(has_bfloat16, dtype, monkeypatch):
    """A T4 and older CPUs emulate it, more slowly than they multiply float32."""
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if has_bfloat16 else (7, 5))

    on_a_cpu = muon.orthogonalize(torch.randn(1, 16, 64), muon.NEWTON_SCHULZ_ITERATIONS["fast"])

    assert on_a_cpu.dtype == dtype
    assert muon.newton_schulz_dtype(torch.device("cuda", 0)) == dtype


def test_every_choice_of_iterations_makes_a_matrix_orthogonal_in_its_own_way():
    names = choices(TrainConfig, "newton_schulz")
    assert set(names) == set(muon.NEWTON_SCHULZ_ITERATIONS), "NEWTON_SCHULZ_ITERATIONS in training/muon.py"
    X = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(0))
    singular_values = {}
    for name in names:
        result = muon.orthogonalize(X, muon.NEWTON_SCHULZ_ITERATIONS[name])
        singular_values[name] = torch.linalg.svdvals(result[0].float())
        assert 0.6 < singular_values[name].min() and singular_values[name].max() < 1.3, name
    assert (singular_values["exact"] - 1).abs().max() < 0.02
    assert len({tuple(values.tolist()) for values in singular_values.values()}) == len(names)
