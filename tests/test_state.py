"""What a kill must not lose is saved and loaded by name; what is missing or unknown is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from helpers import CPU, choices, refused, same_bits
from test_optim import BASE, OPTIMIZER_NAMES, SMALL, build, take_step

from model import GPT
from training import optim
from training.config import TrainConfig


@pytest.fixture
def trainer():
    """A small one, after a step."""
    trainer = build(BASE)
    take_step(trainer, 0)
    return trainer


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("dtype", choices(TrainConfig, "param_dtype"))
@pytest.mark.parametrize("optimizer", OPTIMIZER_NAMES)
def test_a_copied_state_continues_bit_for_bit(optimizer, dtype, first_step):
    """Also that of step 0, which has no state yet; and whatever the run that it was copied from does meanwhile."""
    cfg = replace(BASE, optimizer=optimizer, param_dtype=dtype)
    a = build(cfg)
    for step in range(first_step):
        take_step(a, step)
    weights, saved = copy.deepcopy(a.state_dict()), a.state.copy()
    for step in (1, 2):
        take_step(a, step)

    b = build(cfg, GPT.from_state_dict(SMALL, weights), saved)
    assert b.state.step == first_step
    for step in (1, 2):
        take_step(b, step)

    assert same_bits(a.model.state_dict(), b.model.state_dict()) and same_bits(a.state.weights, b.state.weights)


def test_the_state_of_an_optimizer_is_by_name_and_may_hold_anything(trainer):
    """Numbers, lists, and tensors of any shape and type, as SOAP's and Shampoo's; sharded, too. Two parameters of one
    shape that change their order keep their moments."""
    name, eye = "transformer.wpe.weight", torch.eye(3, dtype=torch.bfloat16)
    trainer.optimizers[0].state[trainer.state.weights[name]] |= {"bases": [eye, None], "count": 7}
    saved = trainer.state.copy()
    moments = saved["components"]["adamw"]
    assert moments.keys() == trainer.state.weights.keys()

    saved["components"]["adamw"] = dict(reversed(moments.items()))
    loaded = build(BASE, saved=saved).state.copy()["components"]["adamw"]
    for found in (loaded, optim.gather(moments, CPU)):
        basis, nothing = found[name].pop("bases")
        assert nothing is None and basis.dtype == eye.dtype and torch.equal(basis, eye)
        assert found[name].pop("count") == 7
        assert all(torch.equal(found[name]["exp_avg"], moments[name]["exp_avg"]) for name in moments)


def test_a_component_that_is_missing_or_unknown_is_refused():
    trainer, other = build(BASE), build(BASE)
    trainer.state.components["average"] = torch.nn.Linear(1, 1)  # an experiment adds it
    for a, b in (trainer, other), (other, trainer):
        with refused("average"):
            a.state.load(b.state.copy())
    assert "average" in trainer.state.tensors_to_compare()
    assert trainer.state.num_bytes() == other.state.num_bytes() + 8


def test_state_of_other_parameters_is_refused(trainer):
    saved = trainer.state.copy()
    moments = saved["components"]["adamw"]
    name = "transformer.h.0.mlp.c_fc.weight"
    for wrong in (
        moments | {"other": moments[name]},
        {other: moments[other] for other in moments if other != name},
    ):
        with refused(f"adamw.*({name}|other)"):
            trainer.state.load(saved | {"components": saved["components"] | {"adamw": wrong}})
