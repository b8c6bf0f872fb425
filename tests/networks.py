"""Tiny networks in which every part matters, for the tests of whatever computes or stores one."""

import dataclasses

import torch

from model import GPT, GPTConfig

SIZES = {"block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}


def make_network(config: GPTConfig | None = None, **changes) -> GPT:
    """A tiny network of this kind, from a fixed seed. Its weights are all random, biases and gains included, and large
    enough that no part may be left out and no greedy choice is a close call."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config or GPTConfig(vocab_size=50304), **(SIZES | changes))).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model
