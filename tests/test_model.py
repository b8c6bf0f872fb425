"""The network is GPT-2 and those after it; loading, recompute and the cache change no result."""

import dataclasses
import json
import math

import pytest
import torch
from helpers import read_table
from networks import NETWORKS, make_network

from model import EOT, GPT, GPTConfig, KVCache, Sampler


def make_idx(B=2, T=24):
    """Random ids (B, T), the same in every call."""
    return torch.randint(50257, (B, T), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------- the network


def plain_logits(model, idx):
    """The logits (B, T, V) of every network by its formulas, in float64: one head at a time, and rotations as products
    of complex numbers."""
    config, T, hs = model.config, idx.size(1), model.config.head_size
    named = model.state_dict(keep_vars=True).items()
    weights = {name.removeprefix("transformer."): weight.double() for name, weight in named}
    activation = {
        "gelu": lambda x: x / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_erf": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
        "relu2": lambda x: x.relu() ** 2,
    }[config.activation]

    def norm(x, name=""):
        gain, bias = weights.get(f"{name}.weight", 1.0), weights.get(f"{name}.bias", 0.0)
        if config.norm == "layernorm" and name:
            x = x - x.mean(-1, keepdim=True)
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain + bias
        return x / x.square().mean(-1, keepdim=True).sqrt() * gain

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)

    # Channel i is the real part of a pair, and channel i + hs / 2 its imaginary part.
    frequencies = [10_000 ** (-2 * i / hs) for i in range(hs // 2)]
    turns = torch.exp(-1j * torch.outer(torch.arange(T), torch.tensor(frequencies).double()))  # (T, hs / 2)

    def rotate(x):
        if config.positions == "learned":
            return x
        z = torch.complex(*x.chunk(2, -1)) * turns
        return torch.cat((z.real, z.imag), -1)

    def scaled(x):
        return rotate(norm(x) if config.qk_norm else x)

    x = weights["wte.weight"][idx]
    if config.embedding_norm:
        x = norm(x, "ln_0")
    if config.positions == "learned":
        x = x + weights["wpe.weight"][:T]
    for i in range(config.n_layer):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").chunk(3, -1)
        heads = []
        for q_head, k_head, v_head in zip(q.split(hs, -1), k.split(hs, -1), v.split(hs, -1), strict=True):
            scores = scaled(q_head) @ scaled(k_head).mT * hs**-0.5
            heads.append((scores + torch.full((T, T), -math.inf).triu(1)).softmax(-1) @ v_head)
        x = x + linear(torch.cat(heads, -1), f"h.{i}.attn.c_proj")
        x = x + linear(activation(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return linear(norm(x, "ln_f"), "lm_head")


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients_are_those_of_the_formulas(name):
    """Loaded, and recomputed in the backward pass. And every setting makes another network: fails for a field of
    GPTConfig that nothing reads. test_convert.py compares the logits with those of transformers."""
    model, idx = make_network(NETWORKS[name]), make_idx()
    model = GPT.from_state_dict(model.config, model.state_dict())
    model.recompute = True
    logits = plain_logits(model, idx)
    torch.testing.assert_close(model(idx)[0], logits.float(), atol=1e-4, rtol=1e-4)
    assert torch.equal(model(idx)[0], make_network()(idx)[0]) == (name == "gpt2")

    _, loss = model(idx[:, :-1], idx[:, 1:])
    expected = -logits[:, :-1].log_softmax(-1).gather(-1, idx[:, 1:, None]).mean()
    torch.testing.assert_close(loss, expected.float(), atol=1e-5, rtol=0)
    found, gradients = (torch.autograd.grad(value, [*model.parameters()]) for value in (loss, expected))
    for a, b in zip(found, gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_parameters_and_flops_are_the_published_ones():
    with torch.device("meta"):
        model, largest = GPT(GPTConfig()), GPT(GPTConfig(n_layer=48, n_head=25, n_embd=1600))
    assert (model.num_params(), largest.num_params()) == (124_439_808, 1_557_611_200)
    in_matmuls = 12 * 12 * 768**2 + 50257 * 768  # 12 C^2 in each of 12 layers, and the head
    assert model.flops_per_token(1024) == 6 * in_matmuls + 12 * 12 * 768 * 1024


# Settings | the standard deviations of wte and head; of c_attn and c_fc; of both c_proj, which are divided by
# sqrt(2 * 8) = 4. 0.0361 is 1 / sqrt(3 * 256).
INITIAL = """
{"embedding_norm": true}                                                    | 0.02 0.02 0.02 0.02 0.005 0.005
{"embedding_norm": true, "tied_head": false, "zero_init_projections": true} | 1.0 0.0 0.02 0.02 0.0 0.0
{"zero_init_projections": true}                                             | 0.02 0.02 0.02 0.02 0.0 0.0
{"init_std": 0.0}                                                           | 0.0361 0.0361 0.0361 0.0361 0.009 0.009
"""


@pytest.mark.parametrize("settings, expected", read_table(INITIAL))
def test_initial_weights_are_those_of_the_recipes(settings, expected):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=1000, n_layer=8, n_head=4, n_embd=256, **json.loads(settings)))
    attn, mlp = model.transformer.h[3].attn, model.transformer.h[3].mlp
    modules = (model.transformer.wte, model.lm_head, attn.c_attn, mlp.c_fc, attn.c_proj, mlp.c_proj)
    found = [module.weight.std().item() for module in modules]
    assert found == pytest.approx([float(number) for number in expected.split()], rel=0.02)
    assert not attn.c_attn.bias.any()


def test_norms_keep_the_precision_of_their_input(monkeypatch):
    """Autocast on a GPU would make the output float32, and with it the whole residual stream: there it must be off."""
    rms_norm, autocast = torch.nn.functional.rms_norm, []

    def observed(*args):
        autocast.append(torch.is_autocast_enabled("cpu"))
        return rms_norm(*args)

    monkeypatch.setattr(torch.nn.functional, "rms_norm", observed)
    model = make_network(NETWORKS["record8"]).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert model.hidden(make_idx()).dtype == torch.bfloat16
    assert autocast and not any(autocast)


# ------------------------------------------------------------------------- settings


@pytest.mark.parametrize("change, named", [
    ({"norm": "new"}, "norm 'new'"), ({"activation": "new"}, "activation 'new'"), ({"positions": "new"}, "positions"),
    ({"n_layer": 0}, "n_layer 0"), ({"n_head": 3}, "n_head 3"), ({"positions": "rope", "n_embd": 36}, "9"),
    ({"init_std": -1.0}, "init_std -1"),
])  # fmt: skip
def test_a_network_that_cannot_be_is_refused(change, named):
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(make_network().config, **change)


# ------------------------------------------------------------------------- the cache and sampling


@pytest.mark.parametrize("name", NETWORKS)
def test_the_cache_gives_the_logits_of_a_full_pass(name):
    model, idx = make_network(NETWORKS[name]), make_idx()
    model.recompute = True  # a block that ran twice would append to the cache twice
    cache = KVCache(n_layer=3, max_len=24)
    # A prompt, then token by token.
    parts = [model.logits(model.hidden(part, cache)) for part in idx.split((7, *[1] * 17), dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], atol=1e-4, rtol=1e-4)


def test_eot_is_drawn_and_padded_ids_never():
    model = make_network()
    with torch.no_grad():
        model.transformer.wte.weight[EOT:] *= 1000  # EOT and the ids that only pad are by far the likeliest
    for temperature, top_k in ((0, 50), (1.0, 50), (5.0, None)):
        assert model.generate(make_idx(4, 4), 20, temperature, top_k).max() == EOT


@pytest.mark.parametrize("vocab_size, first, second", [
    (50304, [5, 6, EOT], [EOT, EOT, EOT]),
    (100_352, [5, 6, EOT, 9], [EOT, 7, 8, 9]),  # another vocabulary, in which 50256 is a word
])  # fmt: skip
def test_text_ends_once_every_row_has_drawn_eot(monkeypatch, vocab_size, first, second):
    drawn = iter([[5, EOT], [6, 7], [EOT, 8], [9, 9]])
    monkeypatch.setattr(Sampler, "draw", lambda *_: torch.tensor(next(drawn)))
    out = make_network(vocab_size=vocab_size, n_layer=1).generate(torch.tensor([[1], [EOT]]), 4)
    assert out.tolist() == [[1, *first], [EOT, *second]]


# Temperature, top_k and top_p | how often each of four ids is drawn | why.
SAMPLING = """
1.0, null, null  | 0.5, 0.25, 0.15, 0.1       | as their probabilities say
0.5, 0, null     | 0.725, 0.181, 0.065, 0.029 | as their squares
1.0, 2, null     | 0.667, 0.333, 0.0, 0.0     | the two likeliest
1.0, null, 0.7   | 0.667, 0.333, 0.0, 0.0     | fewer would total 0.5
1.0, null, 0.51  | 0.667, 0.333, 0.0, 0.0     | fewer would total 0.5
1.0, null, 0.74  | 0.667, 0.333, 0.0, 0.0     | they total 0.75
1.0, null, 0.49  | 1.0, 0.0, 0.0, 0.0         | the likeliest alone totals 0.5
1.0, null, 1e-9  | 1.0, 0.0, 0.0, 0.0         | at least one id is always kept
0, 50, null      | 1.0, 0.0, 0.0, 0.0         | greedy
5e-324, 50, null | 1.0, 0.0, 0.0, 0.0         | a division overflows
"""


@pytest.mark.parametrize("settings, expected, why", read_table(SAMPLING))
def test_sampling_follows_temperature_top_k_and_top_p(settings, expected, why):
    sampler = Sampler(*json.loads(f"[{settings}]"), torch.Generator().manual_seed(0))
    drawn = sampler.draw(torch.tensor([0.5, 0.25, 0.15, 0.1]).log().repeat(20_000, 1))
    frequencies = torch.bincount(drawn, minlength=4) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor(json.loads(f"[{expected}]")), atol=0.015, rtol=0)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0, 1.0])
def test_nothing_is_drawn_from_logits_of_which_one_is_not_finite(number, temperature):
    logits = torch.zeros(2, 300)
    logits[1, 7] = number
    with pytest.raises(FloatingPointError):
        Sampler(temperature).draw(logits)


def test_text_may_outgrow_the_context():
    model, idx = make_network(), make_idx(2, 30)
    out = model.generate(idx, 40, temperature=0)
    assert out.shape == (2, 70)
    # When the context of 32 was full, its newer half was read again: 16 ids, after which comes the 34th.
    newer_half = out[:, 32 - 15 : 33]
    assert torch.equal(model(newer_half)[0][:, -1, :50257].argmax(-1), out[:, 33])
    with pytest.raises(AssertionError):
        model(make_idx(1, 33))
