"""bench/parity.py: a reference that does the same has the same curve, and a planted error gives another one."""

import pytest
import torch
from helpers import make_shards

from bench import parity
from system.cli import UserError

# A reference in a page: this project's network, trained by a loop of its own, at GPT-2's size until it is edited.
REFERENCE_SCRIPT = """
import glob
import numpy as np
import torch
from torch.nn import functional as F
from model import GPT, GPTConfig

torch.manual_seed(7)
model = GPT(GPTConfig(block_size=16, vocab_size=50304, n_layer=12, n_head=2, n_embd=768)).cuda()

# AdamW: matrices decay, vectors do not.
matrices = [p for p in model.parameters() if p.dim() == 2]
vectors = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
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
EDITS = {r"\.cuda\(\)": "", "50304": "512", "n_layer=12": "n_layer=2", "n_embd=768": "n_embd=32"}
FLAGS = "gpt2-124m --model.block-size 16 --model.n-head 2 --warmup-steps 2 --min-lr 6e-4"
SIZES = {
    "T": 16,
    "SEQUENCES_PER_STEP": 4,
    "MICRO_BATCH_SIZE": 2,
    "TOKENS_PER_STEP": 64,
    "N_LAYER": 2,
    "N_EMBD": 32,
    "VOCAB_SIZE": 512,
}


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """compare(plant, more_edits, as_written, plot_dir): ten steps of the script above beside those of this project."""
    for name, value in SIZES.items():
        monkeypatch.setattr(parity, name, value)
    (tmp_path / "train.py").write_text(REFERENCE_SCRIPT)
    data = make_shards(tmp_path / "data")

    def compare(plant="", more_edits=None, as_written=False, plot_dir=None):
        reference = parity.Reference("train.py", EDITS | (more_edits or {}), FLAGS, weight_names={}, float32_edits={})
        parity.compare(reference, parity.Args("build-nanogpt", tmp_path, data, 10, as_written, plant, plot_dir))

    return compare


def test_a_program_that_does_the_same_has_the_same_curve(compare, capsys):
    compare()
    assert "10 steps, its loss goes from 6.2" in capsys.readouterr().out


@pytest.mark.parametrize("planted_error", ["target", "decay", "rate"])
def test_a_planted_error_is_found(compare, planted_error):
    with pytest.raises(UserError, match="not the same curve"):
        compare(planted_error)


def test_an_edit_that_finds_nothing_is_an_error(compare):
    with pytest.raises(UserError, match="has no 'n_layer=24'"):
        compare(more_edits={"n_layer=24": "n_layer=2"})


def test_a_run_leaves_the_weights_that_it_starts_from_as_they_are(compare, monkeypatch):
    """With --as-written, several runs start from the same weights."""
    run_this_project = parity.run_this_project

    def run_and_check(flags, rt, data_dir, state, planted_error):
        before = {name: w.clone() for name, w in state.items()}
        curve = run_this_project(flags, rt, data_dir, state, planted_error)
        assert all(torch.equal(state[name], before[name]) for name in before)
        return curve

    monkeypatch.setattr(parity, "run_this_project", run_and_check)
    compare()


def test_modules_are_part_of_the_edited_program(tmp_path):
    (tmp_path / "parts.py").write_text("n_layer = 12\nnorm = 'rmsnorm'\n")
    (tmp_path / "train.py").write_text("from parts import n_layer, norm\nfound = (n_layer, norm)\n")
    reference = parity.Reference(
        "train.py",
        edits={"from parts import .*": "", "n_layer = 12": "n_layer = 2"},
        flags="",
        weight_names={},
        float32_edits={},
        network_edits={"rmsnorm": "layernorm"},
        modules=("parts.py",),
    )
    scope = {}
    exec(parity.edit_script(reference, tmp_path, steps=10, use_float32=True), scope)
    assert scope["found"] == (2, "layernorm")


def test_comparisons_are_saved_and_drawn_also_if_the_curves_differ(compare, tmp_path):
    plots = tmp_path / "plots"
    compare(plot_dir=plots)
    first_picture = (plots / "parity.png").read_bytes()
    with pytest.raises(UserError, match="not the same curve"):
        compare("target", plot_dir=plots)

    # Both are saved, and the second one has changed the picture.
    same, planted = parity.load_comparisons(plots)
    assert (same.plant, planted.plant) == ("", "target")
    assert same.preset == "gpt2-124m" and len(same.curve) == len(same.limits) == 10
    assert same.expected == planted.expected and same.curve != planted.curve
    assert first_picture.startswith(b"\x89PNG") and (plots / "parity.png").read_bytes() != first_picture


# The network of the reference in bfloat16, its loss in float32.
IN_BFLOAT16 = {
    r"( +)(logits, _ = model.*)": r'\1with torch.autocast("cpu", torch.bfloat16):\n\1    \2',
    r"logits\.reshape": "logits.float().reshape",
}


def test_in_bfloat16_the_same_program_passes(compare, capsys):
    compare(more_edits=IN_BFLOAT16, as_written=True)
    assert "largest difference in loss" in capsys.readouterr().out


def test_in_bfloat16_a_planted_error_is_found(compare):
    # In ten steps this network hardly learns: there, a rate that is 1% off is less than rounding.
    with pytest.raises(UserError, match="not the same curve"):
        compare("target", more_edits=IN_BFLOAT16, as_written=True)


def curve_that_grows(by: float, steps: int = 12) -> parity.Curve:
    """A curve whose distance from a flat one starts at `by` and doubles in every step."""
    return [parity.StepRecord(loss=4 + by * 2**step, norm=1.0) for step in range(steps)]


def test_steps_that_rounding_decides_are_not_compared():
    copies = [curve_that_grows(0), curve_that_grows(1e-4), curve_that_grows(-0.5e-4)]
    limits = parity.rounding_limits(copies)
    # The copies are 1.5e-4 * 2^step apart, so 9.6e-3 in step 6 and more than 1e-2 after it.
    expected = [parity.ROUNDING_FACTOR * 1.5e-4 * 2**step for step in range(7)]
    assert [limit.loss for limit in limits] == pytest.approx(expected)


def test_copies_that_come_apart_at_once_are_an_error():
    with pytest.raises(UserError, match="within 3 steps: compare in float32"):
        parity.rounding_limits([curve_that_grows(0), curve_that_grows(2e-3)])
