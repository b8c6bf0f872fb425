"""The network is GPT-2; its cache and recompute change no result; every setting makes a network of its own."""

import dataclasses
import zlib
from typing import get_args

import pytest
import torch
from helpers import choices

from model import ACTIVATIONS, GPT, NORMS, POSITIONS, VOCAB_SIZE, Block, GPTConfig, Sampler, rope_table, stream

TINY = GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=2, n_embd=32)
OTHER_SIZES = {"block_size": 24, "vocab_size": 50257, "n_layer": 3, "n_head": 4, "n_embd": 48}
OPTIONS = {
    "gpt2": {},
    "record 8": {"positions": "rope", "norm": "rmsnorm", "activation": "relu2", "qk_norm": True, "tied_head": False},
    "simple trainer": {
        "positions": "half_rope",
        "norm": "rmsnorm_gain",
        "activation": "relu2",
        "qk_norm": True,
        "tied_head": False,
        "head_bias": True,
        "attention_scale": 0.12,
        "softcap": 15.0,
    },
}


def other_values(field: dataclasses.Field) -> list:
    """Values of a setting that TINY does not have: all other choices of a Literal, otherwise one."""
    if field.type is bool:
        return [not field.default]
    other_choices = [choice for choice in get_args(field.type) if choice != field.default]
    return other_choices or [OTHER_SIZES.get(field.name, field.type(1))]


# One changed setting each. A new field of GPTConfig is tested as soon as it is there.
CHANGES = [{field.name: value} for field in dataclasses.fields(GPTConfig) for value in other_values(field)]


def make(**options) -> GPT:
    """A tiny model whose weights are wide enough that every part of it matters, from a fixed seed."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, **options))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def make_idx(B: int = 2, T: int = 24) -> torch.Tensor:
    """Random ids (B, T), the same in every call."""
    return torch.randint(50257, (B, T), generator=torch.Generator().manual_seed(1))


# ------------------------------------------------------------------------- the network


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_are_those_of_transformers(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    # The same network in transformers, with the same weights; its linear layers keep them transposed.
    model = make(vocab_size=50257, tied_head=tied)
    sizes = {"n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32, "tie_word_embeddings": tied}
    reference = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    reference.load_state_dict({k: v.t() if k.endswith(transposed) else v for k, v in model.state_dict().items()})

    idx = make_idx()
    logits, _ = model(idx)
    _, loss = model(idx[:, :-1], idx[:, 1:])
    loss.backward()
    out = reference(idx, labels=idx)  # shifts the labels itself
    out.loss.backward()

    torch.testing.assert_close(logits, out.logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(loss, out.loss, atol=1e-5, rtol=0)
    for name, p in reference.named_parameters():
        grad = model.get_parameter(name).grad
        torch.testing.assert_close(grad.t() if name.endswith(transposed) else grad, p.grad, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("n_layer, n_head, n_embd, expected", [
    (12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168),
    (36, 20, 1280, 774_030_080), (48, 25, 1600, 1_557_611_200),
])  # fmt: skip
def test_sizes_have_their_published_number_of_parameters(n_layer, n_head, n_embd, expected):
    with torch.device("meta"):
        assert GPT(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)).num_params() == expected


def test_flops_per_token_are_those_of_the_formula():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50304))
    in_matmuls = 12 * 12 * 768**2 + 50304 * 768  # 12 C^2 in each of 12 layers, and the head
    assert model.flops_per_token(1024) == 6 * in_matmuls + 12 * 12 * 768 * 1024


def test_initial_weights_are_those_of_the_paper():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256))
    block = model.transformer.h[3]
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 * 8) = 4
    assert not block.attn.c_attn.bias.any()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", choices(GPTConfig, "norm"))
def test_the_loss_of_a_new_model_is_that_of_guessing(tied, norm):
    """Near log V, 10.83: the head's weights are small, even where they are the embedding's."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, n_embd=128, norm=norm, tied_head=tied))
    idx = make_idx()
    assert abs(model(idx[:, :-1], idx[:, 1:])[1].item() - 10.83) < 0.2


def test_half_rope_rotates_only_half_of_the_channel_pairs():
    cos, sin = rope_table(dataclasses.replace(TINY, positions="half_rope"))  # (block_size, 8)
    assert (cos[:, 4:] == 1).all() and (sin[:, 4:] == 0).all()
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 1024 ** (-1 / 3), 1024 ** (-2 / 3), 1 / 1024])
    torch.testing.assert_close(sin[:, :4], angles.sin())


def test_the_softcap_keeps_logits_below_the_cap():
    uncapped, capped, idx = make(tied_head=False), make(tied_head=False, softcap=2.0), make_idx()
    x, y = uncapped(idx)[0], capped(idx)[0]
    torch.testing.assert_close(y, x / (1 + (x / 2) ** 2).sqrt())
    assert x.abs().max() > 2 > y.abs().max()


def test_recompute_changes_no_gradient():
    plain, model, idx = make(), make(), make_idx()
    model.recompute = True
    for network in (plain, model):
        network(idx[:, :-1], idx[:, 1:])[1].backward()
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, model.get_parameter(name).grad), name


def test_recompute_does_not_append_to_a_cache_twice():
    model, idx = make(), make_idx()
    full = model(idx)[0]
    model.recompute = True
    cache = model.new_cache(2, 24)
    parts = [model.hidden(idx[:, :10], cache), model.hidden(idx[:, 10:], cache)]
    torch.testing.assert_close(model.logits(torch.cat(parts, 1)), full, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------------- settings


@pytest.mark.parametrize("field, table", {"positions": POSITIONS, "norm": NORMS, "activation": ACTIVATIONS}.items())
def test_every_choice_has_its_entry(field, table):
    assert tuple(table) == choices(GPTConfig, field)


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_every_setting_makes_another_network(change):
    """Other shapes, other initial weights, or other logits from the same weights."""
    models = []
    for config in (TINY, dataclasses.replace(TINY, **change)):
        torch.manual_seed(0)
        models.append(GPT(config))
    one, other = (model.state_dict() for model in models)
    has_same_shapes = one.keys() == other.keys() and all(one[k].shape == other[k].shape for k in one)
    if has_same_shapes and all(torch.equal(one[k], other[k]) for k in one):
        logits = [model(make_idx(T=8))[0] for model in models]
        assert not torch.equal(*logits), f"the network ignores {change}"


@torch.no_grad()
@pytest.mark.parametrize("field", ["positions", "norm", "activation"])
def test_no_two_choices_compute_the_same(field):
    logits = []
    for name in choices(GPTConfig, field):
        # The weights depend on their names alone, not on the order in which they were drawn.
        model = GPT(dataclasses.replace(TINY, **{field: name}))
        for parameter, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(zlib.crc32(parameter.encode()))) * 0.1)
        logits.append(model(make_idx())[0])
    for i, one in enumerate(logits):
        assert not any(torch.equal(one, other) for other in logits[:i])


@pytest.mark.parametrize("change", [
    {"norm": "new"}, {"activation": ["relu2"]}, {"n_layer": 0}, {"n_embd": 2**21}, {"n_head": 3},
    {"softcap": float("nan")}, {"attention_scale": -1.0},
])  # fmt: skip
def test_a_network_that_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        dataclasses.replace(TINY, **change)


def test_unknown_settings_may_only_be_off():
    saved = dataclasses.asdict(TINY)
    assert GPTConfig.from_dict(saved | {"value_tables": 0}) == TINY
    with pytest.raises(ValueError, match="value_tables=3"):
        GPTConfig.from_dict(saved | {"value_tables": 3})


def test_weights_that_do_not_fit_are_refused():
    state = make().state_dict()
    with pytest.raises(ValueError, match="1000000 layers"):
        GPT.from_state_dict(dataclasses.replace(TINY, n_layer=10**6), state)
    with pytest.raises(RuntimeError):
        GPT.from_state_dict(dataclasses.replace(TINY, n_layer=3), state)
    with pytest.raises(ValueError, match="wte"):
        GPT.from_state_dict(TINY, {**state, "transformer.wte.weight": state["transformer.wte.weight"].half()})


# ------------------------------------------------------------------------- the cache and sampling


@torch.no_grad()
@pytest.mark.parametrize("options", [*OPTIONS.values(), *CHANGES], ids=str)
def test_the_cache_gives_the_logits_of_a_full_forward_pass(options):
    model, idx = make(**options), make_idx()
    cache = model.new_cache(2, 24)
    parts = []
    start = 0
    for n in (7, 1, 1, 10, 5):  # a prompt, single tokens, pieces that continue
        parts.append(model.logits(model.hidden(idx[:, start : start + n], cache)))
        start += n
    torch.testing.assert_close(torch.cat(parts, 1), model(idx)[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_generate_gives_the_text_of_full_forward_passes():
    model, idx = make(), make_idx(T=5)
    greedy = idx
    for _ in range(20):
        greedy = torch.cat((greedy, model(greedy)[0][:, -1:, :50257].argmax(-1)), 1)
    assert torch.equal(model.generate(idx, 20, temperature=0), greedy)


def test_samples_share_one_reading_of_the_prompt():
    model, idx = make(), make_idx(B=2, T=6)
    one_by_one = model.generate(idx.repeat_interleave(3, 0), 10, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(generator=torch.Generator().manual_seed(3))
    from_one_reading = torch.stack(list(stream(model, idx, 10, sampler, num_samples=3)), dim=1)  # (2 * 3, 10)
    assert torch.equal(from_one_reading, one_by_one[:, 6:])
    assert torch.equal(model.generate(idx, 0), idx)


def test_padded_ids_are_never_drawn():
    model = make()
    with torch.no_grad():
        model.transformer.wte.weight[VOCAB_SIZE:] *= 1000  # the ids that only pad are by far the likeliest
    for temperature, top_k in ((0, 50), (1.0, 50), (5.0, None)):
        assert model.generate(make_idx(4, 4), 20, temperature, top_k).max() < VOCAB_SIZE


def test_sampling_follows_temperature_top_k_and_top_p():
    probs = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probs.log().repeat(20_000, 1)
    two_likeliest = torch.tensor([2 / 3, 1 / 3, 0, 0])

    def frequencies(temperature, top_k, top_p):
        sampler = Sampler(temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return torch.bincount(sampler.draw(logits), minlength=4) / 20_000

    torch.testing.assert_close(frequencies(1.0, None, None), probs, atol=0.015, rtol=0)
    torch.testing.assert_close(frequencies(0.5, 0, None), probs**2 / (probs**2).sum(), atol=0.015, rtol=0)
    torch.testing.assert_close(frequencies(1.0, 2, None), two_likeliest, atol=0.015, rtol=0)
    torch.testing.assert_close(frequencies(1.0, None, 0.7), two_likeliest, atol=0.015, rtol=0)
    assert frequencies(1.0, None, 1e-9)[0] == 1  # at least one id is always kept
    assert frequencies(0, 50, None)[0] == 1


def test_text_may_outgrow_the_context():
    model, idx = make(), make_idx(2, 30)
    out = model.generate(idx, 40, temperature=0)
    assert out.shape == (2, 70)
    # When the context of 32 was full, its newer half was read again: 16 ids, after which comes the 34th.
    newer_half = out[:, 32 - 15 : 33]
    assert torch.equal(model(newer_half)[0][:, -1, :50257].argmax(-1), out[:, 33])
    with pytest.raises(AssertionError, match="block_size 32"):
        model(make_idx(1, 33))


# ------------------------------------------------------------------------- the precisions of a GPU


@pytest.fixture
def autocast_as_on_a_gpu():
    """Autocast on the CPU also runs in float32 what CUDA's runs in float32, of the operations that a network has."""

    def in_float32(function):
        def call(*args, **kwargs):
            args = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

        return call

    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    aten = torch.ops.aten
    for function in (aten.rms_norm.default, aten.layer_norm.default, aten.pow.Tensor_Scalar, aten.rsqrt.default):
        library.impl(function.name().removeprefix("aten::"), in_float32(function))
    yield
    library._destroy()


def run_once(options: dict, weights: torch.dtype) -> tuple[torch.Tensor, dict]:
    """Under autocast to bfloat16: the loss, and the precisions of the residual stream before and after each block and
    of what each projection reads."""
    dtypes = {}
    model, idx = make(**options).to(weights), make_idx()
    for name, module in model.named_modules():
        if isinstance(module, Block) or name.endswith("c_proj"):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: dtypes.update({name: (inputs[0].dtype, output.dtype)})
            )
    with torch.autocast("cpu", torch.bfloat16):
        return model(idx, idx)[1], dtypes


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gpu_keeps_the_precisions_and_bits_of_a_cpu(options, weights, request):
    loss, dtypes = run_once(options, weights)
    request.getfixturevalue("autocast_as_on_a_gpu")
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert x.square().dtype == torch.nn.functional.rms_norm(x, (8,)).dtype == torch.float32  # as on a GPU

    assert dtypes["transformer.h.1"] == (weights, weights)  # the residual stream has the precision of the weights
    assert run_once(options, weights) == (loss, dtypes)
