"""bench/parity.py: a reference that does the same has the same curve, and a planted error gives another one."""

import math
from typing import get_args

import pytest
from helpers import make_shards, refused

from bench import parity
from bench.programs import Reference, Size

# A reference in a page: this project's network, trained by a loop of its own, at GPT-2's size until it is edited.
SOURCE = """
import glob
import numpy as np
import torch
from torch.nn import functional as F
from model import GPT, GPTConfig

torch.manual_seed(7)
model = GPT(GPTConfig(block_size=16, vocab_size=50304, n_layer=12, n_head=2, n_embd=768)).cuda()

# AdamW: matrices decay, vectors do not.
groups = [{"params": [p], "weight_decay": 0.1 if p.dim() == 2 else 0.0} for p in model.parameters()]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))

# Sequences of 16 inputs, shard by shard.
tokens_by_shard = [np.load(f).astype(np.int64) for f in sorted(glob.glob("edu_fineweb10B/*train*"))]
sequences = [torch.from_numpy(tokens[i : i + 17]) for tokens in tokens_by_shard for i in range(0, len(tokens) - 16, 16)]

for step in range(1000):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1, (step + 1) / 2)
    for _ in range(2):
        batch = torch.stack([sequences.pop(0) for _ in range(2)])
        logits, _ = model(batch[:, :-1])
        (F.cross_entropy(logits.reshape(-1, 50304), batch[:, 1:].reshape(-1)) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
REFERENCE = Reference(
    paths=("train.py",),
    edits={r"\.cuda\(\)": "", "50304": "512", "n_layer=12": "n_layer=2", "n_embd=768": "n_embd=32"},
    flags="gpt2-124m --model.block-size 16 --model.n-head 2 --warmup-steps 2 --min-lr 6e-4",
    weight_names={},
    size=Size(T=16, sequences=4, B=2, n_layer=2, n_embd=32, vocab_size=512),
)


@pytest.mark.slow  # five processes, each with torch
def test_the_same_agrees_and_planted_errors_do_not(tmp_path):
    plants = get_args(parity.PlantedError)

    found = parity.compare(REFERENCE, SOURCE, make_shards(tmp_path / "data"), 10, plants)

    assert len(found.curve) == 10 and found.curve[0].loss == pytest.approx(6.24, abs=0.1)
    assert parity.is_same(found.curve, found.expected, REFERENCE.limit)
    for plant in plants:
        assert not parity.is_same(found.planted[plant], found.expected, REFERENCE.limit), plant

    parity.draw({"build-nanogpt": found}, tmp_path / "plots" / "parity.png")
    assert (tmp_path / "plots" / "parity.png").is_file()


def test_an_edit_that_finds_nothing_is_an_error():
    with refused("50304"):
        parity.edit(REFERENCE, "nothing.cuda()", steps=10)


@pytest.mark.parametrize("record", [(4.1, 1.0), (4.0, 1.1), (math.nan, 1.0), (4.0, math.nan)])
def test_curves_that_differ_in_a_step_are_not_the_same(record):
    same, other = parity.StepRecord(4.0, 1.0), parity.StepRecord(*record)
    assert parity.is_same([same, same], [same, same], limit=1e-3)
    for curve in ([same, other], [other, same]):
        assert not parity.is_same(curve, [same, same], limit=1e-3)
