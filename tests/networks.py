"""Tiny networks in which every part matters, and the one table of them, which all tests of networks go through.

The cache, the formulas, recompute, HellaSwag, the optimizers, exports: each computes or stores every network of the
table. A field that is added to GPTConfig is in the table, and so in all of these tests, as soon as it is there.
"""

from dataclasses import Field, fields, replace
from typing import get_args

import torch

from model import GPT, GPTConfig
from training.presets import PRESETS

# Three layers have one that is neither the first nor the last; four heads have two groups of two.
SIZES = {"block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 32}
GPT2 = GPTConfig(vocab_size=50304)  # with rows that only pad the vocabulary, as the presets have them


def other_values(field: Field) -> list:
    """The other choices of a setting or, if it has no named choices, one other value."""
    if field.type is bool:
        return [not field.default]
    choices = [choice for choice in get_args(field.type) if choice != field.default]
    return choices or [2 if field.type is int else 0.1]  # not 1: a window of one is a special case


# Those of the presets and of an import, then GPT-2 with each setting changed alone.
NETWORKS = {
    "gpt2": GPT2,
    "untied": PRESETS["untied-124m"].model,
    "nanogpt": replace(GPT2, bias=False, activation="gelu_erf"),
    "record8": PRESETS["record8-124m"].model,
    "record8 tied": replace(PRESETS["record8-124m"].model, tied_head=True),
}
for _field in fields(GPTConfig):
    if _field.name not in {*SIZES, "vocab_size"}:
        for _value in other_values(_field):
            NETWORKS[f"gpt2 {_field.name}={_value}"] = replace(GPT2, **{_field.name: _value})


def make_network(config: GPTConfig = GPT2, **changes) -> GPT:
    """A tiny network of this kind, from a fixed seed. Its weights are all random, biases and gains included, and large
    enough that no part may be left out and no greedy choice is a close call."""
    torch.manual_seed(0)
    model = GPT(replace(config, **(SIZES | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model
