"""The head in chunks has GPT's loss and gradients, to rounding, and never holds more than one chunk of logits."""

import dataclasses
import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_curves_close, load_curve, train_quickstart
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, GPTConfig
from training import head
from training.step import Forward

SMALL = GPTConfig(block_size=128, vocab_size=320, n_layer=1, n_head=2, n_embd=32)
OPTIONS = {
    "tied": {},
    "untied": {"tied_head": False, "norm": "rmsnorm", "positions": "rope"},
    "softcap": {"softcap": 3.0},
    "bias": {"tied_head": False, "head_bias": True},
}
B, T = 17, 128  # rows for four chunks, the last one shorter
NUM_CHUNKS = 4


def make(**options):
    """A small model with these options, ids and targets (B, T), all from a fixed seed."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(SMALL, **options))
    with torch.no_grad():
        for p in model.parameters():  # wide enough that every part matters
            p.add_(torch.randn_like(p) * 0.1)
    idx, targets = torch.randint(320, (2, B, T))
    return model, idx, targets


def loss_and_gradients(model, forward, idx, targets, precision=None, scale=1.0):
    """The loss of `forward` and the gradients of `scale` times that loss by name, under autocast to `precision`."""
    model.zero_grad()
    with torch.autocast("cpu", precision) if precision else nullcontext():
        loss = forward(idx, targets)
    if isinstance(loss, tuple):  # GPT's own: (None, loss)
        loss = loss[1]
    (loss * scale).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ignored", [0, 2])
def test_loss_and_gradients_are_those_of_all_logits(options, ignored):
    model, idx, targets = make(**OPTIONS[options])
    targets[B - ignored :] = -100  # as validation pads its last batch
    in_chunks = Forward(model, compiles=False)

    expected_loss, expected = loss_and_gradients(model, model, idx, targets, scale=0.25)
    loss, found = loss_and_gradients(model, in_chunks, idx, targets, scale=0.25)
    with torch.no_grad():
        loss_without_gradients = in_chunks(idx, targets).item()

    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert loss_without_gradients == pytest.approx(expected_loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7 + 1e-5 * gradient.abs().max().item())


def test_a_vocabulary_is_padded_on_a_gpu_alone_and_only_where_its_rows_are_not_aligned():
    assert head.padded_columns(50257, "cuda") == 50304
    assert head.padded_columns(50304, "cuda") == 50304
    assert head.padded_columns(50257, "cpu") == 50257


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_padding_the_vocabulary_changes_neither_loss_nor_gradients(options, precision, monkeypatch):
    """As on a GPU, with a vocabulary of 320 that becomes 384."""
    model, idx, targets = make(**OPTIONS[options])
    in_chunks = Forward(model, compiles=False)
    loss, gradients = loss_and_gradients(model, in_chunks, idx, targets, precision)
    gradients = {name: gradient.clone() for name, gradient in gradients.items()}
    asked = []

    def pad(columns, device_type):
        asked.append(columns)
        return 384

    monkeypatch.setattr(head, "padded_columns", pad)
    padded_loss, padded_gradients = loss_and_gradients(model, in_chunks, idx, targets, precision)

    assert asked == [320]
    assert padded_loss == pytest.approx(loss, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            padded_gradients[name], gradient, rtol=1e-4, atol=1e-7 + 1e-5 * gradient.abs().max().item()
        )


@pytest.mark.parametrize("precision, weights, scale", [
    (torch.bfloat16, torch.float32, 1.0), (torch.bfloat16, torch.bfloat16, 1.0),
    (torch.float16, torch.float32, 2.0**16),
])  # fmt: skip
def test_half_precision_is_as_near_to_float32_as_with_all_logits(precision, weights, scale):
    # The gradient of the tied embedding in float32.
    model, idx, targets = make()
    _, exact_gradients = loss_and_gradients(model, model, idx, targets)
    exact = exact_gradients["transformer.wte.weight"]

    # Its relative error in half precision: with all logits, and in chunks.
    for p in model.parameters():
        p.data = p.data.to(weights)
    errors = []
    for forward in (model, Forward(model, compiles=False)):
        _, gradients = loss_and_gradients(model, forward, idx, targets, precision, scale)
        found = gradients["transformer.wte.weight"]
        assert found.dtype == weights
        errors.append(((found.float() / scale - exact).norm() / exact.norm()).item())
    with_all_logits, in_chunks = errors
    assert in_chunks <= 1.2 * with_all_logits + 1e-4


def test_the_compiled_loss_of_a_chunk_is_the_same():
    model, idx, targets = make(softcap=3.0, tied_head=False, head_bias=True)
    x = model.hidden(idx).detach().requires_grad_()  # (B, T, C)
    found = []
    for chunk_loss in (head.chunk_loss, torch.compile(head.chunk_loss, dynamic=False)):
        loss = head.mean_loss(model, x, targets, chunk_loss)
        found.append((loss, *torch.autograd.grad(loss, (x, model.lm_head.weight))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


class LargestResult(TorchDispatchMode):
    """While it is entered, every operation of torch passes through here: `numel` becomes the size of the largest tensor
    that any of them returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("backward", [True, False])
def test_no_tensor_is_larger_than_one_chunk_of_logits(backward):
    model, _, targets = make()
    with torch.set_grad_enabled(backward), LargestResult() as largest:
        x = torch.zeros(B, T, 32, requires_grad=backward)
        loss = head.mean_loss(model, x, targets)
        if backward:
            loss.backward()
    rows = math.ceil(B * T / NUM_CHUNKS)
    assert largest.numel == rows * SMALL.vocab_size


def test_a_run_in_chunks_has_the_losses_of_a_run_with_all_logits(tiny_args, tmp_path, monkeypatch):
    flags = [*tiny_args, "--max-steps", "50", "--save-every", "0"]
    asked = []

    def three_chunks(rows, device_type):
        asked.append(rows)
        return 3

    monkeypatch.setattr(head, "num_chunks", three_chunks)
    in_chunks = load_curve(train_quickstart(flags, tmp_path / "in_chunks"))
    assert set(asked) == {4 * 32}  # every micro-batch of the run took the chunks

    def loss_of_all_logits(model, x, targets, chunk_loss):
        return F.cross_entropy(model.logits(x).flatten(0, 1).float(), targets.flatten())

    monkeypatch.setattr(head, "mean_loss", loss_of_all_logits)
    asked.clear()
    with_all_logits = load_curve(train_quickstart(flags, tmp_path / "with_all_logits"))
    assert not asked
    assert_curves_close(in_chunks, with_all_logits)
