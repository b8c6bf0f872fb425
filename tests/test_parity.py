"""bench/parity.py finds the same curve in a program that does the same, and no longer after a planted error."""

import pytest
from helpers import make_shards

from bench import parity
from system.cli import UserError

STAND_IN = """
import glob
import numpy as np
import torch
from torch.nn import functional as F
from model import GPT, GPTConfig

torch.manual_seed(7)
model = GPT(GPTConfig(block_size=16, vocab_size=50304, n_layer=12, n_head=2, n_embd=768)).cuda()
decay = [p for p in model.parameters() if p.dim() == 2]
rest = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
windows = [np.load(f).astype(np.int64) for f in sorted(glob.glob("edu_fineweb10B/*train*"))]
windows = [torch.from_numpy(w[i : i + 17]) for w in windows for i in range(0, len(w) - 16, 16)]
for step in range(1000):
    for group in optimizer.param_groups:
        group["lr"] = 6e-4 * min(1, (step + 1) / 2)
    for _ in range(2):
        rows = torch.stack([windows.pop(0) for _ in range(2)])
        logits, _ = model(rows[:, :-1])
        (F.cross_entropy(logits.reshape(-1, 50304), rows[:, 1:].reshape(-1)) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    sizes = {"T": 16, "BATCH": 4, "MICRO": 2, "LAYERS": 2, "WIDTH": 32, "VOCAB": 512}
    for name, value in sizes.items():
        monkeypatch.setattr(parity, name, value)
    (tmp_path / "train.py").write_text(STAND_IN)
    data = make_shards(tmp_path / "data")
    edits = {r"\.cuda\(\)": "", "50304": "512", "n_layer=12": "n_layer=2", "n_embd=768": "n_embd=32"}
    flags = "gpt2-124m --model.block-size 16 --model.n-head 2 --warmup-steps 2 --min-lr 6e-4"

    def check(plant="", **more):
        peer = parity.Peer("train.py", edits | more, flags, {}, {})
        parity.compare(peer, parity.Args("build-nanogpt", tmp_path, data, 10, plant=plant))

    return check


def test_a_program_that_does_the_same_has_the_same_curve(check, capsys):
    check()
    assert "10 steps, loss 6.2" in capsys.readouterr().out


@pytest.mark.parametrize("plant", ["target", "decay", "rate"])
def test_a_planted_error_is_found(check, plant):
    with pytest.raises(UserError, match="not the same curve"):
        check(plant)


def test_an_edit_that_finds_nothing_is_an_error(check):
    with pytest.raises(UserError, match="has no 'n_layer=24'"):
        check(**{"n_layer=24": "n_layer=2"})
