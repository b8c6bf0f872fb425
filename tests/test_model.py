"""The network is GPT-2; its key-value cache and recompute change no result; every option is a network of its own, and
one that is not handled raises."""

import dataclasses
import re
import zlib
from pathlib import Path

import pytest
import torch
from helpers import choices, with_unchecked

from model import GPT, VOCAB_SIZE, Block, GPTConfig, SkipInit, rope_table
from training.sampling import Sampler, stream

TINY = GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=2, n_embd=32)
OPTIONS = {
    "gpt2": {},
    "no-bias": {"bias": False},
    "rope": {"positions": "rope"},
    "modern": {"positions": "rope", "norm": "rmsnorm", "activation": "relu2", "qk_norm": True, "tied_head": False},
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


# A value of every field of GPTConfig that is not TINY's. A new field needs one here: then the tests below ask whether
# the network uses it, and whether it works with the cache.
ANOTHER_VALUE = {
    "block_size": 24,
    "vocab_size": 50257,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "bias": False,
    "tied_head": False,
    "positions": "rope",
    "norm": "rmsnorm",
    "activation": "relu2",
    "qk_norm": True,
    "attention_scale": 0.12,
    "zero_init_projections": True,
    "head_bias": True,
    "softcap": 15.0,
}


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


@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_gradients_are_those_of_transformers(tied):
    from transformers import GPT2Config, GPT2LMHeadModel

    # The same network in transformers, with the same weights; its linear layers keep them transposed.
    model = make(vocab_size=50257, tied_head=tied)
    config = GPT2Config(
        n_positions=32, n_layer=2, n_head=2, n_embd=32, tie_word_embeddings=tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    reference = GPT2LMHeadModel(config)
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    state = {k: v.t() if k.endswith(transposed) else v for k, v in model.state_dict().items()}
    reference.load_state_dict(state)

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
def test_every_size_has_its_published_number_of_parameters(n_layer, n_head, n_embd, expected):
    with torch.device("meta"), SkipInit():
        assert GPT(GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd)).num_params() == expected


def test_flops_per_token_are_those_of_the_formula():
    with torch.device("meta"), SkipInit():
        model = GPT(GPTConfig(vocab_size=50304))
    in_matmuls = 12 * 12 * 768**2 + 50304 * 768  # 12 C^2 in each of 12 layers, and the head
    assert model.flops_per_token(1024) == pytest.approx(6 * in_matmuls + 12 * 12 * 768 * 1024, rel=1e-3)
    assert model.flops_per_token(1024) == pytest.approx(855.4e6, rel=1e-4)


def test_initial_weights_are_those_of_the_paper():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=256))
    block = model.transformer.h[3]
    assert model.transformer.wte.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.c_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)  # sqrt(2 * 8) = 4
    assert not block.attn.c_attn.bias.any()


def test_zero_init_projections_start_the_blocks_as_the_identity():
    zero = GPT(dataclasses.replace(TINY, zero_init_projections=True))
    assert not zero.transformer.h[0].attn.c_proj.weight.any()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_position_sees_a_later_one(options):
    model, idx = make(**options), make_idx()
    before = model(idx)[0]
    idx[:, 15] = (idx[:, 15] + 1) % 50257
    after = model(idx)[0]
    assert torch.equal(before[:, :15], after[:, :15])
    assert (before[:, 15:] != after[:, 15:]).any(-1).all()


def test_every_field_of_the_config_has_another_value_to_be_tested_with():
    fields = {field.name for field in dataclasses.fields(GPTConfig)}
    assert ANOTHER_VALUE.keys() == fields, "add the new field to ANOTHER_VALUE in tests/test_model.py"


@torch.no_grad()
@pytest.mark.parametrize("name", ANOTHER_VALUE)
def test_every_field_of_the_config_makes_another_network(name):
    """Other shapes, other initial weights, or other logits from the same weights: a field that the network ignores
    makes none of them."""
    config = dataclasses.replace(TINY, **{name: ANOTHER_VALUE[name]})
    models = []
    for each in (TINY, config):
        torch.manual_seed(0)
        models.append(GPT(each))
    one, other = models
    if one.state_dict().keys() == other.state_dict().keys():
        pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
        if all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs):
            assert not torch.equal(one(make_idx(T=8))[0], other(make_idx(T=8))[0]), f"the network ignores {name}"


@torch.no_grad()
@pytest.mark.parametrize("options", [*OPTIONS.values(), *({k: v} for k, v in ANOTHER_VALUE.items())], ids=str)
def test_the_cache_gives_the_logits_of_a_full_forward_pass(options):
    model, idx = make(**options), make_idx()
    full = model(idx)[0]
    cache = model.new_cache(2, 24)
    parts = []
    start = 0
    for n in (7, 1, 1, 10, 5):  # a prompt, single tokens, pieces that continue
        parts.append(model.logits(model.hidden(idx[:, start : start + n], cache)))
        start += n
    torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_gives_the_text_of_full_forward_passes(options):
    model, idx = make(**options), make_idx()
    greedy = idx[:, :5]
    for _ in range(20):
        greedy = torch.cat((greedy, model(greedy)[0][:, -1:, :50257].argmax(-1)), 1)
    assert torch.equal(model.generate(idx[:, :5], 20, temperature=0), greedy)


def test_samples_share_one_reading_of_the_prompt():
    model, idx = make(), make_idx(B=2, T=6)
    one_by_one = model.generate(idx.repeat_interleave(3, 0), 10, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(generator=torch.Generator().manual_seed(3))
    from_one_reading = torch.stack(list(stream(model, idx, 10, sampler, num_samples=3)), dim=1)  # (2 * 3, 10)
    assert torch.equal(from_one_reading, one_by_one[:, 6:])


def test_no_new_tokens_are_the_prompt_alone():
    model, idx = make(), make_idx(B=2, T=6)
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


def test_a_text_longer_than_the_context_is_refused():
    model = make()
    with pytest.raises(AssertionError, match="block_size 32"):
        model(make_idx(1, 33))


def test_recompute_gives_the_same_bits():
    idx = make_idx()
    gradients = {}
    for recompute in (False, True):
        model = make()
        model.recompute = recompute
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        gradients[recompute] = {name: p.grad for name, p in model.named_parameters()}
    assert all(torch.equal(gradient, gradients[True][name]) for name, gradient in gradients[False].items())


def test_recompute_does_not_ignore_a_cache():
    """With gradients, too, where a model that recomputes would run its blocks twice."""
    model, idx = make(), make_idx()
    full = model(idx)[0]
    model.recompute = True
    cache = model.new_cache(2, 24)

    first = model.hidden(idx[:, :10], cache)
    second = model.hidden(idx[:, 10:], cache)

    assert torch.is_grad_enabled() and cache.length == 24
    torch.testing.assert_close(model.logits(torch.cat((first, second), 1)), full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("norm", choices(GPTConfig, "norm"))
def test_the_loss_of_a_new_model_is_that_of_guessing(tied, norm):
    """Near log V, 10.83, whatever the options: the head's weights are small, even where they are the embedding's."""
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


def logits_from_weights_by_name(config: GPTConfig) -> torch.Tensor:
    """The logits of a model each of whose parameters depends on its name and shape alone, so that two networks differ
    by what they compute and not by the order in which their weights were drawn."""
    model = GPT(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model(make_idx())[0]


@pytest.mark.parametrize("field", ["positions", "norm", "activation"])
def test_every_choice_is_a_network_of_its_own(field):
    """Of two choices that compute the same, one was forgotten where the network is built."""
    names = choices(GPTConfig, field)
    logits = [logits_from_weights_by_name(dataclasses.replace(TINY, **{field: name})) for name in names]
    for i, name in enumerate(names):
        for j in range(i):
            assert not torch.equal(logits[i], logits[j]), f"{field} {name!r} and {names[j]!r} give the same logits"


@pytest.mark.parametrize("field", ["positions", "norm", "activation"])
def test_a_choice_that_is_named_but_not_handled_raises_when_the_network_is_built(field):
    config = with_unchecked(TINY, **{field: "new"})
    with pytest.raises(ValueError, match=f"no {field} 'new': add a case to \\w+ in model.py"):
        GPT(config)


def test_settings_of_older_versions_may_only_be_off():
    saved = dataclasses.asdict(TINY)
    off = {"unet_skips": False, "logit_softcap": 0.0, "value_tables": 0}
    assert GPTConfig.from_dict(saved | off) == TINY
    for name, value in {"unet_skips": True, "logit_softcap": 15.0, "value_tables": 3, "softness": True}.items():
        with pytest.raises(ValueError, match=f"unknown setting {name}={value}: use the version that saved it"):
            GPTConfig.from_dict(saved | {name: value})


# torch's list of the functions that autocast computes in float32 on a GPU; on a CPU the list is another one.
AUTOCAST_LISTS = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"


def float32_functions_of_cuda_autocast() -> list[str]:
    """The names of aten's functions on that list, with their overloads: "rms_norm", "pow.Tensor_Scalar", ..."""
    macro = re.search(r"#define AT_FORALL_FP32\(_\)(.*?)\n\n", AUTOCAST_LISTS.read_text(), re.DOTALL)[1]
    return [".".join(filter(None, pair)) for pair in re.findall(r"_\((\w+)(?:, (\w+))?\)", macro)]


@pytest.fixture
def autocast_as_on_a_gpu():
    """Autocast on the CPU also runs in float32 every operation that CUDA's autocast runs in float32."""

    def in_float32(function):
        def call(*args, **kwargs):
            args = [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

        return call

    library = torch.library.Library("aten", "IMPL", "AutocastCPU")
    for name in float32_functions_of_cuda_autocast():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            packet, _, overload = name.partition(".")
            library.impl(name, in_float32(getattr(getattr(torch.ops.aten, packet), overload or "default")))
    yield
    library._destroy()


def test_the_rules_of_a_gpu_are_in_force(autocast_as_on_a_gpu):
    """What the next test relies on: layer_norm and square() return float32, as on a GPU."""
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.layer_norm(x, (8,)).dtype == torch.float32
        assert x.square().dtype == torch.float32


def train_once(options: dict, weights: torch.dtype) -> tuple[torch.Tensor, dict, dict]:
    """Under autocast to bfloat16: the loss, the precisions of the residual stream before and after each block and of
    what each projection reads, and the gradients."""
    dtypes = {}

    def note_dtypes(module, inputs, output):
        dtypes[names[module]] = (inputs[0].dtype, output.dtype)

    model = make(**options).to(weights)
    names = {module: name for name, module in model.named_modules()}
    for module in names:
        if isinstance(module, Block) or names[module].endswith("c_proj"):
            module.register_forward_hook(note_dtypes)
    idx = make_idx()
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(idx, idx)
    loss.backward()
    return loss, dtypes, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_gpu_keeps_the_precisions_and_bits_of_a_cpu(options, weights, request):
    loss, dtypes, gradients = train_once(options, weights)
    request.getfixturevalue("autocast_as_on_a_gpu")
    gpu_loss, gpu_dtypes, gpu_gradients = train_once(options, weights)

    # The residual stream has the precision of the weights.
    assert dtypes["transformer.h.1"] == (weights, weights)
    assert gpu_dtypes == dtypes
    assert gpu_loss == loss

    # The gradients have the same bits, except that a GPU returns LayerNorm of bfloat16 in float32: one rounding less.
    has_layernorm = "norm" not in options
    rtol = 0.02 if has_layernorm and weights == torch.bfloat16 else 0
    for name, gradient in gradients.items():
        torch.testing.assert_close(gpu_gradients[name], gradient, rtol=rtol, atol=rtol * gradient.abs().max().item())
