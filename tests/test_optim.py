"""Every parameter has one optimizer, and state moves between runs unchanged."""

import copy
import dataclasses
import itertools

import pytest
import torch
from helpers import CPU, choices, same_bits

from model import GPT, GPTConfig
from training import master_weights, optim, schedule
from training.config import TrainConfig
from training.presets import PRESETS

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
BASE = dataclasses.replace(
    PRESETS["gpt2-124m"], model=SMALL, sequence_length=16, val_tokens=16, total_batch_size=32, compile=False
)
OPTIMIZER_NAMES = choices(TrainConfig, "optimizer")


def build(cfg):
    """A small model, from a fixed seed, and the optimizers of this config."""
    torch.manual_seed(0)
    model = GPT(cfg.model)
    return model, optim.build_optimizers(model, cfg, CPU)


def update(model, optimizers):
    """As training/step.py does it."""
    master_weights.give_gradients(model)
    for optimizer in optimizers:
        optimizer.step()
    master_weights.take_weights(model)


def take_step(model, optimizers, cfg, step):
    """One training step, of 10, on random tokens that depend on the step."""
    idx = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
    model(idx, idx)[1].backward()
    schedule.set_learning_rates(optimizers, step, 10, cfg)
    update(model, optimizers)
    model.zero_grad()


EMBEDDING, MATRIX, VECTOR = (2.0, 0.1), (1.0, 0.1), (1.0, 0.0)  # rate and decay


@pytest.mark.parametrize("name, block_matrix, order", [
    ("adamw", MATRIX, [EMBEDDING, MATRIX, VECTOR]), ("muon", (5.0, None), [EMBEDDING, MATRIX, VECTOR, (5.0, None)]),
])  # fmt: skip
def test_each_role_has_its_own_rate_and_decay(name, block_matrix, order):
    """By what a parameter is, not by its name: a table in a block is an embedding, too."""
    cfg = dataclasses.replace(BASE, optimizer=name, embed_lr_scale=2.0, max_lr=1.0, muon_lr=5.0)
    model = GPT(dataclasses.replace(SMALL, tied_head=False))
    block = model.transformer.h[0]
    block.table = torch.nn.Embedding(64, 16)
    groups = itertools.chain(*optim.parameter_groups(model, cfg).values())
    found = {p: (group["peak_lr"], group.get("weight_decay")) for group in groups for p in group["params"]}

    assert found[model.transformer.wte.weight] == found[block.table.weight] == EMBEDDING
    assert found[block.ln_1.weight] == found[block.mlp.c_fc.bias] == VECTOR
    assert (found[model.lm_head.weight], found[block.attn.c_attn.weight]) == (MATRIX, block_matrix)
    assert found.keys() == set(model.parameters())
    assert list(dict.fromkeys(found.values())) == order  # in which checkpoints keep the state


# ------------------------------------------------------------------------- saving and loading state


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("dtype", choices(TrainConfig, "weights"))
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_a_copied_state_continues_bit_for_bit(optimizer, dtype, first_step):
    """Also that of step 0, which has no state yet; and whatever the run that it was copied from does meanwhile."""
    cfg = dataclasses.replace(BASE, optimizer=optimizer, weights=dtype)
    a, optimizers_a = build(cfg)
    for step in range(first_step):
        take_step(a, optimizers_a, cfg, step)
    saved = copy.deepcopy(master_weights.float32_state_dict(a))
    states = [optim.copy_state(optimizer, CPU) for optimizer in optimizers_a]
    for step in (1, 2):
        take_step(a, optimizers_a, cfg, step)

    b = GPT.from_state_dict(SMALL, saved)
    optimizers_b = optim.build_optimizers(b, cfg, CPU)
    optim.load_state(optimizers_b, states)
    for step in (1, 2):
        take_step(b, optimizers_b, cfg, step)

    assert same_bits(a.state_dict(), b.state_dict())
    assert same_bits(master_weights.float32_state_dict(a), master_weights.float32_state_dict(b))


def test_a_loaded_state_keeps_this_runs_settings():
    """State of other parameters is refused. torch would load it, and fail in the first step or, where shapes can be
    stretched, not at all."""
    model, optimizers = build(BASE)
    take_step(model, optimizers, BASE, step=0)
    state = optimizers[0].state_dict()
    _, others = build(dataclasses.replace(BASE, weight_decay=0.3))
    optim.load_state(others, [state])
    assert {group["weight_decay"] for group in others[0].param_groups} == {0.3, 0.0}

    with pytest.raises(ValueError):
        optim.load_state(optimizers, [state, state])
    state["state"][0] = state["state"][0] | {"exp_avg": torch.zeros(2, 16)}
    with pytest.raises(ValueError, match="parameter 0"):
        optim.load_state(optimizers, [state])


# ------------------------------------------------------------------------- master weights


def test_bfloat16_weights_keep_float32_masters():
    """Updates too small for bfloat16 add up in the master weights; the model has these, rounded; a tied head stays
    tied."""
    model, optimizers = build(dataclasses.replace(BASE, weights="bfloat16", weight_decay=0.0))
    before = master_weights.float32_state_dict(model)["transformer.h.0.attn.c_attn.weight"].clone()

    for group in optimizers[0].param_groups:
        group["lr"] = 1e-6
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        update(model, optimizers)

    state = master_weights.float32_state_dict(model)
    assert torch.allclose(before - state["transformer.h.0.attn.c_attn.weight"], torch.tensor(3e-6), atol=1e-8)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert same_bits(model.state_dict(), {name: tensor.bfloat16() for name, tensor in state.items()})
    assert model.lm_head.weight is model.transformer.wte.weight
