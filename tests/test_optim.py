"""Every parameter has one update."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from helpers import CPU, choices, refused, same_bits

from lifecycle.build import build_trainer
from model import GPT, GPTConfig
from training import optim
from training.config import TrainConfig
from training.optim import Update
from training.presets import PRESETS
from training.schedule import at

SMALL = GPTConfig(block_size=16, vocab_size=64, n_layer=2, n_head=2, n_embd=16)
BASE = dataclasses.replace(
    PRESETS["gpt2-124m"], model=SMALL, sequence_length=16, val_tokens=16, total_batch_size=32, compile=False
)
OPTIMIZER_NAMES = choices(TrainConfig, "optimizer")


def build(cfg, model=None, saved=None):
    """A trainer of this config on a small model, from a fixed seed or given."""
    torch.manual_seed(0)
    return build_trainer(model or GPT(cfg.model), cfg, CPU, 10, saved)


def take_step(trainer, step):
    """One training step, of 10, on random tokens that depend on the step."""
    tokens = torch.randint(0, 64, (1, 2, 17), generator=torch.Generator().manual_seed(step)).to(torch.uint16)
    trainer.set_step(at(step, trainer.cfg, 10))
    trainer.compute_gradients(tokens)
    trainer.update()
    trainer.finish_step()
    trainer.state.step += 1


@pytest.mark.parametrize("name, in_block", [
    ("adamw", Update("adamw", 1.0, 0.1)), ("muon", Update("muon", 5.0, 0.0)),
])  # fmt: skip
def test_each_parameter_has_one_update(name, in_block):
    """By what a parameter is: a table in a block is an embedding, too, and no parameter without a layer is Muon's."""
    cfg = dataclasses.replace(BASE, optimizer=name, embed_lr_scale=2.0, max_lr=1.0, muon_lr=5.0)
    model = GPT(dataclasses.replace(SMALL, tied_head=False))
    model.transformer.h[0].table = torch.nn.Embedding(64, 16)
    model.own_table = torch.nn.Parameter(torch.zeros(64, 16))
    found = optim.choose_updates(model, cfg)

    embedding, vector = Update("adamw", 2.0, 0.1), Update("adamw", 1.0, 0.0)
    assert found["transformer.wte.weight"] == found["transformer.h.0.table.weight"] == embedding
    assert found["transformer.h.0.ln_1.weight"] == found["transformer.h.0.mlp.c_fc.bias"] == vector
    assert found["lm_head.weight"] == found["own_table"] == Update("adamw", 1.0, 0.1)
    assert found["transformer.h.0.mlp.c_fc.weight"] == in_block
    stacked = dataclasses.replace(in_block, matrix_rows=(16, 16, 16) if name == "muon" else ())
    assert found["transformer.h.0.attn.c_attn.weight"] == stacked
    assert found.keys() == dict(model.named_parameters()).keys()


def test_every_optimizer_is_chosen_for_something_and_no_other_is():
    for name in OPTIMIZER_NAMES:
        updates = optim.choose_updates(GPT(SMALL), dataclasses.replace(BASE, optimizer=name)).values()
        assert name in {update.optimizer for update in updates} <= optim.ALGORITHMS.keys()
    cfg = SimpleNamespace(**vars(BASE) | {"optimizer": "unheard-of"})
    with refused("unheard-of"):
        optim.choose_updates(GPT(SMALL), cfg)


# ------------------------------------------------------------------------- bfloat16 parameters


def test_bfloat16_parameters_keep_float32_weights():
    """Updates too small for bfloat16 add up in the weights; the model has these, rounded; a tied head stays tied."""
    small_steps = {"max_lr": 1e-6, "min_lr": 1e-6, "warmup_steps": 0, "weight_decay": 0.0}
    trainer = build(dataclasses.replace(BASE, param_dtype="bfloat16", **small_steps))
    name, model = "transformer.h.0.attn.c_attn.weight", trainer.model
    before = trainer.state.weights[name].clone()
    for _ in range(3):
        take_step(trainer, 0)  # the gradient stays nearly the same, and so does Adam's update, which is the rate

    state = trainer.state_dict()
    assert all(weight.grad is None for weight in trainer.state.weights.values())  # they would be memory
    assert torch.allclose((before - state[name]).abs().median(), torch.tensor(3e-6), rtol=0.1)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert same_bits(model.state_dict(), {name: tensor.bfloat16() for name, tensor in state.items()})
    assert model.lm_head.weight is model.transformer.wte.weight
