"""The head in chunks has GPT's loss and gradients, to rounding, and never holds more than one chunk of logits."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import refused
from networks import GPT2, NETWORKS, SIZES, make_network
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import GPT, logsumexp_in_one_pass
from training import loss
from training.loss import Loss, check_gradients

to_logits, logits_of = GPT.to_logits, GPT.logits

B, T, V = 17, 128, 320  # rows for five chunks, the last one shorter
NUM_CHUNKS = 5


def make_batch(vocab_size=V, **options):
    """A small model with these options, ids and targets (B, T), all from a fixed seed."""
    model = make_network(block_size=T, vocab_size=vocab_size, n_layer=1, **options)
    return model, *torch.randint(vocab_size, (2, B, T))


def loss_and_gradients(model, forward, idx, targets, precision=torch.float32, scale=1.0):
    """The loss of `forward` and the gradients of `scale` times that loss by name, under autocast to `precision`."""
    model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        loss = forward(idx, targets)[1 if forward is model else 0]
    (loss * scale).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients_are_those_of_all_logits(name):
    model, idx, targets = make_batch(config=NETWORKS[name])
    targets[B - 2 :] = -100  # as validation pads its last batch
    in_chunks = Loss(model, compiles=False)

    expected_loss, expected = loss_and_gradients(model, model, idx, targets, scale=0.25)
    loss, gradients = loss_and_gradients(model, in_chunks, idx, targets, scale=0.25)
    with torch.no_grad():
        # The logarithm of a sum of V terms, each of which may be rounded by 2**-24 of the sum.
        assert [loss, in_chunks(idx, targets)[1].item()] == pytest.approx([expected_loss] * 2, rel=0, abs=V * 2**-24)
    for name, gradient in expected.items():
        tolerance = 1e-7 + 1e-5 * gradient.abs().max().item()
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("precision, weights, scale, vocab_size", [
    (torch.bfloat16, torch.float32, 1.0, V), (torch.bfloat16, torch.bfloat16, 1.0, V),
    (torch.float16, torch.float32, 2.0**16, V), (torch.bfloat16, torch.float32, 1.0, 257),  # as odd as OpenAI's
])  # fmt: skip
def test_half_precision_is_as_near_as_with_all_logits(precision, weights, scale, vocab_size, monkeypatch):
    # Many chunks: the sum over them must be in float32.
    monkeypatch.setattr(Loss, "chunk_rows", lambda *args: B * T // 64)
    # The gradient of the tied embedding in float32.
    model, idx, targets = make_batch(vocab_size)
    _, exact_gradients = loss_and_gradients(model, model, idx, targets)
    exact = exact_gradients["transformer.wte.weight"]

    # Its relative error in half precision: with all logits, and in chunks.
    model.to(weights)
    errors = []
    for forward in (model, Loss(model, compiles=False)):
        _, gradients = loss_and_gradients(model, forward, idx, targets, precision, scale)
        found = gradients["transformer.wte.weight"]
        assert found.dtype == weights
        errors.append(((found.float() / scale - exact).norm() / exact.norm()).item())
    with_all_logits, in_chunks = errors
    assert in_chunks <= 1.2 * with_all_logits + 1e-4


def test_the_logsumexp_of_gpus_is_torchs():
    x = 100 * torch.randn(7, 320)
    results = []
    for function in (torch.logsumexp, logsumexp_in_one_pass):
        leaf = x.clone().requires_grad_()
        value = function(leaf, -1)
        value.sum().backward()
        results.append((value.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gb, compiles, dtype, rows", [
    (80, True, torch.bfloat16, 32_768), (24, True, torch.bfloat16, 8192), (80, False, torch.bfloat16, 1024),
    (80, True, torch.float16, 1024),
])  # fmt: skip
def test_a_gpu_takes_larger_chunks(monkeypatch, gb, compiles, dtype, rows):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, gb * 1e9))
    on_gpu = SimpleNamespace(lm_head=SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda"))))
    assert Loss.chunk_rows(SimpleNamespace(model=on_gpu, compiles=compiles), dtype) == rows


def test_a_rounded_head_is_aligned_and_its_logits_are_not():
    model = make_network(vocab_size=257)
    idx = torch.arange(8)[None]
    with torch.no_grad():
        head, expected = model.round_head(torch.bfloat16), model(idx)[0]
        found = model.logits(model.hidden(idx), head)
    assert len(head.weight) == 320 and found.shape == expected.shape == (1, 8, 257)
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()


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
        Loss(model, compiles=False)(idx, targets)[0].backward()
    assert largest.numel == math.ceil(B * T / NUM_CHUNKS) * V


def test_large_logits_are_as_exact_as_small_ones():
    """OpenAI's logits lie near -100, where bfloat16 steps by 0.5, far more than near 0. What all share is a float32
    number, also under autocast."""
    model = make_network(vocab_size=512, n_embd=64, tied_head=False)
    x = torch.randn(4, 64, 64)
    errors = []
    for offset in (0, 100 / 64):
        with torch.no_grad():
            model.lm_head.weight.sub_(offset)
            model.transformer.ln_f.bias.fill_(1.0)
        exact = model.logits(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert model.round_head().weight.dtype == torch.bfloat16
            errors.append((model.logits(x) - exact).abs().max().item())
    assert errors[1] < 1.5 * errors[0]


# ------------------------------------------------------------------------- what is minimized


@pytest.mark.parametrize("precision, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_a_penalty_is_minimized_but_not_measured(monkeypatch, precision, tolerance):
    """Of the logits, after a soft-cap, for which a row's shift counts: in float32 and rounded. Ignored targets have
    none."""
    model, idx, targets = make_batch(tied_head=False)
    monkeypatch.setattr(GPT, "to_logits", lambda model, *args: 5 * torch.tanh(to_logits(model, *args) / 5))
    monkeypatch.setattr(loss, "token_objectives", lambda logits, losses: losses + logits.logsumexp(-1) ** 2)
    with torch.no_grad():
        model.lm_head.weight.sub_(0.1)
    targets[-2:] = -100
    logits = model.logits(model.hidden(idx)).flatten(0, 1)[targets.flatten() >= 0]
    losses = F.cross_entropy(logits, targets[:-2].flatten(), reduction="none")
    plain = (losses + logits.logsumexp(-1) ** 2).mean()
    plain.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    with torch.no_grad(), torch.autocast("cpu", precision, enabled=precision != torch.float32):
        nothing, validated = Loss(model, compiles=False)(idx, targets)
    objective, gradients = loss_and_gradients(model, Loss(model, compiles=False), idx, targets, precision)

    assert nothing is None and validated.item() == pytest.approx(losses.mean().item(), rel=tolerance)
    assert objective == pytest.approx(plain.item(), rel=tolerance)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("name, changed, has_parameter", [
    ("to_logits", lambda model, *args: to_logits(model, *args) + model.extra, True),
    ("to_logits", lambda model, *args: to_logits(model, *args) * model.extra, True),
    (
        "logits",  # a projection of what the head gets
        lambda model, x, head=None: to_logits(model, model.lm_head(model.transformer.ln_f(x) * model.extra), None),
        True,
    ),
    ("logits", lambda model, *args: 30 * torch.tanh(logits_of(model, *args) / 30), False),  # a cap
])  # fmt: skip
def test_a_head_that_the_chunks_do_not_know_is_refused(monkeypatch, name, changed, has_parameter):
    """Its new parameter would get no gradient, or that of another head. A cap does nothing to the small logits of the
    first weights, with which a run begins."""
    model = GPT(dataclasses.replace(GPT2, **SIZES))
    model.extra = torch.nn.Parameter(torch.full((1,), 2.0), has_parameter)
    monkeypatch.setattr(GPT, name, changed)
    with refused(r"gradient of (extra|transformer)|extra gets no gradient"):
        check_gradients(model)


def test_a_parameter_that_nothing_trains_is_named():
    model, *_ = make_batch()
    before = copy.deepcopy(model.state_dict())
    check_gradients(model)
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.extra = torch.nn.Parameter(torch.ones(1))
    with refused("extra"):
        check_gradients(model)
    model.extra.requires_grad_(False)
    check_gradients(model)


def test_a_loss_of_the_blocks_themselves_is_no_fault(monkeypatch):
    forward = Loss.forward

    def add_to(loss, *args):
        objective, mean = forward(loss, *args)
        return objective + loss.model.transformer.h[0].ln_1.weight.sum(), mean

    monkeypatch.setattr(Loss, "forward", add_to)
    check_gradients(make_batch()[0])
