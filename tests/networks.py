"""Tiny networks in which every part matters, for the tests of whatever computes or stores a network."""

import dataclasses
from typing import get_args

import torch

from model import GPT, GPTConfig

SIZES = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
OTHER_SIZES = {"block_size": 24, "vocab_size": 50257, "n_layer": 3, "n_head": 4, "n_embd": 48}


def make_network(config: GPTConfig | None = None, **changes) -> GPT:
    """A tiny network of this kind, from a fixed seed. Its weights are all random, biases and gains included, and large
    enough that no part may be left out and no greedy choice is a close call."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config or GPTConfig(vocab_size=50304), **(SIZES | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def list_changes() -> list[dict]:
    """Of each setting of a network every other choice or, if it has no named choices, one other value. A new field of
    GPTConfig is tested as soon as it is there."""
    changes = []
    for field in dataclasses.fields(GPTConfig):
        values = [choice for choice in get_args(field.type) if choice != field.default]
        if not values:
            values = [not field.default if field.type is bool else OTHER_SIZES.get(field.name, field.type(1))]
        changes += [{field.name: value} for value in values]
    return changes
