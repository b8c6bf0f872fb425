"""The head in chunks has the loss and the gradients of all logits at once, to rounding, whatever the head computes, and
never holds more than one chunk of logits."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, refused
from networks import NETWORKS, make_network
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lifecycle.build import build_trainer
from model import GPT
from system import distributed
from training import head
from training.head import Loss

B, T, V = 17, 128, 320  # positions for five chunks, the last one shorter
NUM_CHUNKS = 5

multiply_head = GPT.multiply_head


class PlainLoss(Loss):
    """All logits at once, and the formula in float64, by autograd."""

    def head_losses(self, x, targets):
        loss = F.cross_entropy(self.model.logits(x).double(), targets)
        return loss, loss.detach()


def make_batch(vocab_size=V, **options):
    """A small model with these options, ids and targets (B, T), all from a fixed seed."""
    model = make_network(block_size=T, vocab_size=vocab_size, n_layer=1, **options)
    return model, *torch.randint(vocab_size, (2, B, T))


def loss_and_gradients(loss, idx, targets, precision=torch.float32, scale=1.0):
    """The mean objective, the mean cross-entropy, and the gradients of `scale` times the objective by name, under
    autocast to `precision`."""
    loss.model.zero_grad()
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        objective, mean_loss = loss(idx, targets)
    (objective * scale).backward()
    gradients = {name: p.grad for name, p in loss.model.named_parameters()}
    return objective.item(), mean_loss.item(), gradients


def assert_chunks_are_exact(model, idx, targets):
    """Chunks give what all logits at once give, in training and without gradients."""
    expected, expected_loss, expected_gradients = loss_and_gradients(PlainLoss(model, False), idx, targets, scale=0.25)
    found, found_loss, gradients = loss_and_gradients(Loss(model, False), idx, targets, scale=0.25)
    with torch.no_grad():
        _, measured = Loss(model, False)(idx, targets)

    # The logarithm of a sum of V terms, each of which may be rounded by 2**-24 of the sum.
    near = partial(pytest.approx, rel=1e-6, abs=V * 2**-24)
    assert [found, found_loss, measured.item()] == [near(expected), near(expected_loss), near(expected_loss)]
    for name, gradient in expected_gradients.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None:
            tolerance = 1e-7 + 1e-5 * gradient.abs().max().item()
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_the_loss_and_gradients_of_all_logits(name):
    model, idx, targets = make_batch(config=NETWORKS[name])
    targets[B - 2 :] = -100  # as validation pads its last batch
    assert_chunks_are_exact(model, idx, targets)
    _, expected, _ = loss_and_gradients(PlainLoss(model, False), idx, targets)
    assert model(idx, targets)[1].item() == pytest.approx(expected, rel=1e-6, abs=V * 2**-24)


# What a fork may do to the logits, with the parameters that it adds to the model: a line in GPT.logits.
HEADS = {
    "bias": (lambda model, x: multiply_head(model, x) + model.extra, torch.randn(V)),
    "scale": (lambda model, x: multiply_head(model, x) * model.extra, torch.tensor(1.7)),
    "cap": (lambda model, x: 5 * torch.tanh(multiply_head(model, x) / 5), None),
    "projection": (lambda model, x: multiply_head(model, x @ model.extra), torch.randn(32, 32) / 5),
    "frozen scale": (lambda model, x: multiply_head(model, x) * model.extra.detach(), torch.tensor(1.7)),
    "second use": (
        lambda model, x: multiply_head(model, x) + F.linear(x, model.transformer.wte.weight) * model.extra,
        torch.tensor(0.3),
    ),
}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_whatever_the_head_computes_it_trains(monkeypatch, name, is_tied):
    changed, extra = HEADS[name]
    monkeypatch.setattr(GPT, "multiply_head", changed)
    model, idx, targets = make_batch(tied_head=is_tied)
    if extra is not None:
        model.extra = nn.Parameter(extra.clone())
    assert_chunks_are_exact(model, idx, targets)


def test_a_frozen_head_gets_no_gradient_and_the_blocks_do():
    model, idx, targets = make_batch(tied_head=False)
    model.lm_head.requires_grad_(False)
    assert_chunks_are_exact(model, idx, targets)


@pytest.mark.parametrize("precision, weights, scale, vocab_size", [
    (torch.bfloat16, torch.float32, 1.0, V), (torch.bfloat16, torch.bfloat16, 1.0, V),
    (torch.float16, torch.float32, 2.0**16, V), (torch.bfloat16, torch.float32, 1.0, 257),  # as odd as OpenAI's
])  # fmt: skip
def test_half_precision_is_as_near_as_with_all_logits(precision, weights, scale, vocab_size, monkeypatch):
    # Many chunks: the sum over them must be in float32.
    monkeypatch.setattr(Loss, "chunk_rows", lambda *args: B * T // 64)
    # The gradient of the tied embedding in float32.
    model, idx, targets = make_batch(vocab_size)
    *_, exact_gradients = loss_and_gradients(PlainLoss(model, False), idx, targets)
    exact = exact_gradients["transformer.wte.weight"]

    # Its relative error in half precision: with all logits, and in chunks. With all logits, the loss scale overflows
    # float16 nowhere, because a mean divides it.
    model.to(weights)
    errors = []
    for loss in (PlainLoss(model, False), Loss(model, False)):
        *_, gradients = loss_and_gradients(loss, idx, targets, precision, scale)
        found = gradients["transformer.wte.weight"]
        assert found.dtype == weights
        errors.append(((found.float() / scale - exact).norm() / exact.norm()).item())
    with_all_logits, in_chunks = errors
    assert in_chunks <= 1.2 * with_all_logits + 1e-4


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_compiled_chunks_are_those_of_the_eager_program(precision):
    """In training and in validation, which is another graph."""
    model, idx, targets = make_batch()
    _, expected, exact = loss_and_gradients(Loss(model, False), idx, targets, precision)
    compiled = Loss(model, False)
    compiled.compiles, compiled.compiled_blocks = True, [*model.transformer.h]
    compiled.compiled_sums = torch.compile(compiled.chunk_sums, backend="aot_eager", dynamic=False)
    _, found, gradients = loss_and_gradients(compiled, idx, targets, precision)
    tolerance = 1e-5 if precision == torch.float32 else 2**-7
    assert found == pytest.approx(expected, rel=tolerance)
    for name, gradient in exact.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-7, name


def compare_two_ranks():
    """The script of a rank: the gradients of two micro-batches, averaged over the ranks by DDP, are those of one rank
    with all logits at once. The head has a bias of its own."""
    rope = Loss(make_network(positions="rope"), False)
    GPT.multiply_head, extra = HEADS["bias"]
    model, idx, targets = make_batch()
    model.extra = nn.Parameter(extra.clone())
    idx, targets = idx[:16], targets[:16]
    *_, expected = loss_and_gradients(PlainLoss(model, False), idx, targets)
    expected = {name: gradient.clone() for name, gradient in expected.items()}
    model.zero_grad()

    from lifecycle.build import wrap_in_ddp

    with distributed.session("cpu") as rt:
        ddp_loss = wrap_in_ddp(Loss(model, False), rt)
        for i in range(2):
            ddp_loss.require_backward_grad_sync = i == 1
            own = slice(8 * i + 4 * rt.rank, 8 * i + 4 * rt.rank + 4)
            (ddp_loss(idx[own], targets[own])[0] / 2).backward()
        for name, p in model.named_parameters():
            assert (p.grad - expected[name]).norm() <= 1e-5 * expected[name].norm() + 1e-7, name
        # No step sends RoPE's table, which never changes.
        assert len(list(rope.buffers())) and not wrap_in_ddp(rope, rt).will_sync_module_buffers()


def test_two_ranks_average_the_gradients_of_the_head(run_ranks):
    run_ranks(2, compare_two_ranks)


# ------------------------------------------------------------------------- memory and precision


@pytest.mark.parametrize("gb, compiles, dtype, rows", [
    (85, True, torch.bfloat16, 32_768), (25, True, torch.bfloat16, 8192), (85, False, torch.bfloat16, 1024),
    (85, True, torch.float16, 1024),
])  # fmt: skip
def test_a_gpu_takes_larger_chunks(monkeypatch, gb, compiles, dtype, rows):
    """Of GPT-2's vocabulary."""
    monkeypatch.setattr(head, "memory_bytes", lambda device: gb * 1e9)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device_type: dtype)
    loss = Loss(make_network(vocab_size=50304), False)
    loss.compiles = compiles
    assert loss.chunk_rows(torch.device("cuda")) == rows


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


def test_logits_without_gradients_are_in_float32():
    """OpenAI's logits lie near -100, where bfloat16 steps by 0.5: under autocast, and with bfloat16 weights, too."""
    model = make_network(vocab_size=512, n_embd=64, tied_head=False)
    with torch.no_grad():
        model.lm_head.weight.sub_(100 / 64)
        model.transformer.ln_f.bias.fill_(1.0)
        x = torch.randn(4, 64, 64)
        exact = model.double().logits(x.double())
        with torch.autocast("cpu", torch.bfloat16):
            found = model.float().logits(x)
            rounded = model.bfloat16().logits(x.bfloat16())
    assert found.dtype == torch.float32 and (found - exact).abs().max() < 1e-4
    assert rounded.dtype == torch.float32 and not torch.equal(rounded, rounded.bfloat16().float())


# ------------------------------------------------------------------------- what is minimized


@pytest.mark.parametrize("precision, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_a_penalty_is_minimized_but_not_measured(monkeypatch, precision, tolerance):
    """A penalty on the logits after a soft-cap. Ignored targets have none."""
    model, idx, targets = make_batch(tied_head=False)
    monkeypatch.setattr(GPT, "multiply_head", HEADS["cap"][0])
    monkeypatch.setattr(head, "token_objectives", lambda logits, losses: losses + logits.logsumexp(-1) ** 2)
    targets[-2:] = -100
    logits = model.logits(model.hidden(idx)).flatten(0, 1)[targets.flatten() >= 0]
    losses = F.cross_entropy(logits.double(), targets[:-2].flatten(), reduction="none")
    plain = (losses + logits.logsumexp(-1) ** 2).mean()
    plain.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}

    found, found_loss, gradients = loss_and_gradients(Loss(model, compiles=False), idx, targets, precision)
    with torch.no_grad(), torch.autocast("cpu", precision, enabled=precision != torch.float32):
        _, validated = Loss(model, compiles=False)(idx, targets)

    assert found == pytest.approx(plain.item(), rel=tolerance)
    assert [found_loss, validated.item()] == pytest.approx([losses.mean().item()] * 2, rel=tolerance)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-6, name


def test_a_parameter_that_nothing_trains_is_named(tiny_config):
    cfg = tiny_config()
    batch = torch.zeros(1, 4, 33, dtype=torch.uint16)
    model = GPT(cfg.model)
    model.extra = nn.Parameter(torch.ones(1))
    trainer = build_trainer(model, cfg, CPU, 12)
    with refused("extra"):
        trainer.compute_gradients(batch)
    model.extra.requires_grad_(False)
    trainer.finish_step()
    trainer.compute_gradients(batch)
