"""The head in chunks has GPT's loss and gradients, to rounding, and never holds more than one chunk of logits."""

import math

import pytest
import torch
from networks import make_network
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.loss import Forward, add_product_, cast_head, mean_loss

B, T, V = 17, 128, 320  # rows for five chunks, the last one shorter
NUM_CHUNKS = 5


def make_batch(**options):
    """A small model with these options, ids and targets (B, T), all from a fixed seed."""
    model = make_network(block_size=T, vocab_size=V, n_layer=1, **options)
    return model, *torch.randint(V, (2, B, T))


def loss_and_gradients(model, forward, idx, targets, precision=torch.float32, scale=1.0):
    """The loss of `forward` and the gradients of `scale` times that loss by name, under autocast to `precision`."""
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = forward(idx, targets)[1] if forward is model else forward(idx, targets)
    (loss * scale).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("options, ignored", [({}, 0), ({"tied_head": False, "norm": "rmsnorm"}, 2)])
def test_loss_and_gradients_are_those_of_all_logits(options, ignored):
    model, idx, targets = make_batch(**options)
    targets[B - ignored :] = -100  # as validation pads its last batch
    in_chunks = Forward(model, compiles=False)

    expected_loss, expected = loss_and_gradients(model, model, idx, targets, scale=0.25)
    loss, gradients = loss_and_gradients(model, in_chunks, idx, targets, scale=0.25)
    with torch.no_grad():
        assert [loss, in_chunks(idx, targets).item()] == pytest.approx([expected_loss] * 2, rel=1e-6)
    for name, gradient in expected.items():
        tolerance = 1e-7 + 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("precision, weights, scale", [
    (torch.bfloat16, torch.float32, 1.0), (torch.bfloat16, torch.bfloat16, 1.0),
    (torch.float16, torch.float32, 2.0**16),
])  # fmt: skip
def test_half_precision_is_as_near_as_with_all_logits(precision, weights, scale, monkeypatch):
    # Many chunks: the sum over them must be in float32.
    monkeypatch.setattr("training.loss.choose_chunk_rows", lambda *args: B * T // 64)
    # The gradient of the tied embedding in float32.
    model, idx, targets = make_batch()
    _, exact_gradients = loss_and_gradients(model, model, idx, targets)
    exact = exact_gradients["transformer.wte.weight"]

    # Its relative error in half precision: with all logits, and in chunks.
    model.to(weights)
    errors = []
    for forward in (model, Forward(model, compiles=False)):
        _, gradients = loss_and_gradients(model, forward, idx, targets, precision, scale)
        found = gradients["transformer.wte.weight"]
        assert found.dtype == weights
        errors.append(((found.float() / scale - exact).norm() / exact.norm()).item())
    with_all_logits, in_chunks = errors
    assert in_chunks <= 1.2 * with_all_logits + 1e-4


def test_a_sum_beyond_the_largest_float16_is_exact():
    total = torch.ones(1, 1)
    add_product_(total, torch.full((1, 4096), 8.0).half(), torch.full((4096, 1), 8.0).half())
    assert total.item() == 1 + 4096 * 64


class LargestResult(TorchDispatchMode):
    """While it is entered, every operation of torch passes through here: `numel` becomes the size of the largest tensor
    that any of them returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)), 0)
        return out


def test_no_tensor_is_larger_than_one_chunk_of_logits():
    model, idx, targets = make_batch(n_embd=16)  # the MLP's hidden layer is smaller than a chunk
    with LargestResult() as largest:
        Forward(model, compiles=False)(idx, targets).backward()
    assert largest.numel == math.ceil(B * T / NUM_CHUNKS) * V


def test_bfloat16_is_blind_to_what_logits_share():
    """OpenAI's logits lie near -100, where bfloat16 steps by 0.5, far more than near 0: the mean row of the head is
    subtracted before the cast."""
    model = make_network(vocab_size=512, n_embd=64, tied_head=False)
    x, targets = torch.randn(4, 64, 64), torch.randint(512, (4, 64))
    errors = []
    for offset in (0, 100 / 64):
        with torch.no_grad():
            model.lm_head.weight.sub_(offset)
            model.transformer.ln_f.bias.fill_(1.0)
        exact = mean_loss(model, x, targets)
        with torch.autocast("cpu", torch.bfloat16):
            errors.append((mean_loss(model, x, targets) - exact).abs().item())
            assert cast_head(model.lm_head.weight).dtype == torch.bfloat16
    assert errors[1] < 1.5 * errors[0]
