"""How transformers names the networks of model.py: the entries of config.json, and the weights.

    layout = layout_of(model.config)                    # GPT2, NanoChat or CustomCode
    hf_config = layout.to_hf_config(config)             # what config.json says about the network
    weights = layout.to_hf_weights(state_dict)          # what model.safetensors holds

Called by training/convert.py, which reads and writes the files. A network that transformers has a class for is exported
for that class. Any other network is exported with its code: model.py, wrapped by the class in training/modeling_gpt.py.
Every layout converts in both directions, and a round trip preserves every bit. The names and shapes of the weights:

    model.py                             GPT2LMHeadModel   NanoChatForCausalLM
    -----------------------------------  ----------------  ---------------------------------------------------
    transformer.wte.weight (V, C)        the same          model.embed_tokens.weight
    transformer.wpe.weight               the same          (RoPE has no weight)
    transformer.h.0.attn.c_attn (3C, C)  (C, 3C)           model.layers.0.self_attn.{q,k,v}_proj: three of (C, C)
    transformer.h.0.attn.c_proj (C, C)   transposed        model.layers.0.self_attn.o_proj
    transformer.h.0.mlp.c_fc (4C, C)     (C, 4C)           model.layers.0.mlp.fc1
    transformer.h.0.mlp.c_proj (C, 4C)   (4C, C)           model.layers.0.mlp.fc2
    ln_1, ln_2, ln_f                     the same          (its RMSNorm has no weight)
    lm_head.weight (V, C)                the same          the same

An export with code has the names of model.py, with a prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from system.cli import UserError, require
from tokens import tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model import GPTConfig

# The epsilon of RMSNorm in model.py: torch's default, the machine epsilon of float32.
RMSNORM_EPS = 2.0**-23

# {activation of GPTConfig: its name in transformers' GPT-2}: OpenAI's tanh approximation, and nanoGPT's exact GELU.
GPT2_ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu"}

# OpenAI's GPT-2 has Conv1D layers, which store their weight as (in, out). Those of model.py are nn.Linear: (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Fields of GPTConfig that set sizes, or that only affect the initial weights: any value can be exported. Every other
# field changes what the network computes, so a layout must list the values that it accepts.
SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "zero_init_projections")


@dataclass(frozen=True)
class Layout:
    """One way to store a network for transformers."""

    model_type: str  # the entry of config.json by which transformers finds the class
    class_name: str
    needs_code: bool  # whether the folder brings its own code, which transformers runs with trust_remote_code=True
    accepts: Callable[[GPTConfig], bool]  # whether it can express a network

    # The entries of config.json that describe the network, and the state dict, each in both directions.
    to_hf_config: Callable[[GPTConfig], dict[str, Any]]
    from_hf_config: Callable[[dict[str, Any]], GPTConfig]
    to_hf_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    from_hf_weights: Callable[[dict[str, Tensor]], dict[str, Tensor]]


def layout_of(config: GPTConfig) -> Layout:
    """The layout for a network: the first that can express it."""
    return next(layout for layout in LAYOUTS if layout.accepts(config))


def layout_named(model_type: object) -> Layout:
    """The layout of a config.json with this model_type. Raises UserError if there is none."""
    for layout in LAYOUTS:
        if layout.model_type == model_type:
            return layout
    names = ", ".join(repr(layout.model_type) for layout in LAYOUTS)
    raise UserError(f"model_type is {model_type!r:.99}; only {names} are supported")


def has_defaults_except(config: GPTConfig, **accepted: tuple) -> bool:
    """Whether every field of `config` has its default, except SIZES and the fields in `accepted`, which may have any of
    the values listed there. So a field that is added to GPTConfig later must have its default, too."""
    for field in fields(config):
        values = accepted.get(field.name, (field.default,))
        if field.name not in SIZES and getattr(config, field.name) not in values:
            return False
    return True


def require_fixed(hf_config: dict[str, Any], fixed: dict[str, Any]) -> None:
    """Raise UserError if an entry of a config.json differs from `fixed`, which has the only value that model.py
    implements for each of these entries. An entry may be absent."""
    for name, supported in fixed.items():
        value = hf_config.get(name, supported)
        require(value == supported, f"{name} is {value!r:.99}; only {supported!r} is supported")


def read_sizes(hf_config: dict[str, Any], names: dict[str, str]) -> dict[str, int]:
    """{field of GPTConfig: size} from a config.json. `names` maps each field to its name there. Raises UserError if one
    is missing or not an integer."""
    # `type() is int`, because isinstance would accept True.
    sizes = {field: hf_config.get(name) for field, name in names.items()}
    not_numbers = [names[field] for field, size in sizes.items() if type(size) is not int]
    require(not not_numbers, f"{', '.join(not_numbers)} must be numbers")
    return sizes


def special_tokens(config: GPTConfig) -> dict[str, int | None]:
    """The ids of the tokens that begin and end a text, if the vocabulary is GPT-2's."""
    eot = tokenizer.EOT if config.vocab_size > tokenizer.EOT else None
    return {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": None}


# ------------------------------------------------------------------------- GPT-2

# {size in GPTConfig: its name in GPT2Config}.
GPT2_SIZES = {
    "block_size": "n_positions",
    "vocab_size": "vocab_size",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "n_embd": "n_embd",
}

# Entries of a config.json that model.py implements with one value only. Any other value means a different network.
GPT2_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def is_gpt2(config: GPTConfig) -> bool:
    """Whether transformers' GPT-2 computes this network."""
    any_bool = (False, True)
    return has_defaults_except(config, bias=any_bool, tied_head=any_bool, activation=tuple(GPT2_ACTIVATIONS))


def to_gpt2_config(config: GPTConfig) -> dict[str, Any]:
    """The entries of config.json for GPT2Config."""
    return {
        **{name: getattr(config, field) for field, name in GPT2_SIZES.items()},
        # llama.cpp's converter reads the context length by its oldest name, and does not know transformers' defaults.
        "n_ctx": config.block_size,
        "n_inner": None,
        "activation_function": GPT2_ACTIVATIONS[config.activation],
        "layer_norm_epsilon": GPT2_FIXED["layer_norm_epsilon"],
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tied_head,
        # model.py has no dropout.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def from_gpt2_config(hf_config: dict[str, Any]) -> GPTConfig:
    """The GPTConfig of a GPT-2's config.json. Raises UserError if model.py cannot compute that network."""
    from model import GPTConfig

    sizes = read_sizes(hf_config, GPT2_SIZES)

    # The activation. If the config names none, transformers' default applies.
    hf_name = hf_config.get("activation_function", "gelu_new")
    activations = [name for name, supported in GPT2_ACTIVATIONS.items() if supported == hf_name]
    rule = f"only {' and '.join(repr(supported) for supported in GPT2_ACTIVATIONS.values())} are supported"
    require(activations, f"activation_function is {hf_name!r:.99}; {rule}")

    # GPT-2 ties its head unless the config says otherwise. All else must be as in model.py.
    tied_head = hf_config.get("tie_word_embeddings") is not False
    config = GPTConfig(**sizes, tied_head=tied_head, activation=activations[0])
    require_fixed(hf_config, GPT2_FIXED)

    # The width of the MLP: absent, null, or GPT-2's four times the model's width, spelled out.
    n_inner = hf_config.get("n_inner")
    require(n_inner in (None, 4 * config.n_embd), f"n_inner is {n_inner!r:.99}; only None is supported")
    return config


def transpose_conv1d(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of one layout as the other layout stores them. Works in both directions."""
    # (in, out) <-> (out, in); for c_attn: (C, 3C) <-> (3C, C)
    return {name: w.t() if name.endswith(CONV1D_WEIGHTS) else w for name, w in weights.items()}


def to_gpt2_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a GPT (model.py) as GPT2LMHeadModel names and stores it."""
    import torch

    # transformers' GPT-2 always has biases, so a network without biases gets zeros. The head has no bias in either.
    complete = {}
    for name, weight in weights.items():
        complete[name] = weight
        bias = name.removesuffix("weight") + "bias"
        is_embedding = name.endswith(("wte.weight", "wpe.weight", "lm_head.weight"))
        if name.endswith(".weight") and not is_embedding and bias not in weights:
            complete[bias] = torch.zeros(len(weight))  # weight is (out, in)
    return transpose_conv1d(complete)


def from_gpt2_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel as the state dict of a GPT (model.py)."""
    # OpenAI's first files on the Hub have neither a head nor the prefix "transformer.".
    if not any(name.startswith("transformer.") for name in weights):
        weights = {name if name == "lm_head.weight" else f"transformer.{name}": w for name, w in weights.items()}
    return transpose_conv1d(weights)


# ------------------------------------------------------------------------- NanoChat: the network of record8-124m

# {size in GPTConfig: its name in NanoChatConfig}.
NANOCHAT_SIZES = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
}

# Entries that model.py implements with one value only. transformers applies RoPE before it normalizes queries and keys,
# model.py afterwards; the result is the same, because a rotation preserves the norm. transformers' soft-cap is a tanh,
# that of model.py is not, so it must be off.
NANOCHAT_FIXED = {
    "hidden_act": "relu2",
    "rms_norm_eps": RMSNORM_EPS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "final_logit_softcapping": None,
    "attention_bias": False,
}

# {weight of a block in model.py: its name in transformers}, without c_attn, which becomes the three of NANOCHAT_QKV.
NANOCHAT_BLOCK = {
    "attn.c_proj.weight": "self_attn.o_proj.weight",
    "mlp.c_fc.weight": "mlp.fc1.weight",
    "mlp.c_proj.weight": "mlp.fc2.weight",
}
NANOCHAT_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")


def is_nanochat(config: GPTConfig) -> bool:
    """Whether transformers' NanoChat computes this network."""
    # These fields must have these values, and all others their defaults. The sizes and the head are free.
    recipe = {"positions": "rope", "norm": "rmsnorm", "activation": "relu2", "qk_norm": True, "bias": False}
    has_recipe = all(getattr(config, name) == value for name, value in recipe.items())
    accepted = {name: (value,) for name, value in recipe.items()}
    return has_recipe and has_defaults_except(config, tied_head=(False, True), **accepted)


def to_nanochat_config(config: GPTConfig) -> dict[str, Any]:
    """The entries of config.json for NanoChatConfig."""
    return {
        **{name: getattr(config, field) for field, name in NANOCHAT_SIZES.items()},
        "num_key_value_heads": config.n_head,
        "intermediate_size": 4 * config.n_embd,
        "tie_word_embeddings": config.tied_head,
        **NANOCHAT_FIXED,
    }


def from_nanochat_config(hf_config: dict[str, Any]) -> GPTConfig:
    """The GPTConfig of a NanoChat's config.json. Raises UserError if model.py cannot compute that network."""
    from model import GPTConfig

    # The sizes and the head come from the file, which ties the head only if it says so.
    config = GPTConfig(
        **read_sizes(hf_config, NANOCHAT_SIZES),
        tied_head=hf_config.get("tie_word_embeddings") is True,
        bias=False,
        positions="rope",
        norm="rmsnorm",
        activation="relu2",
        qk_norm=True,
    )

    # No entry may be absent: transformers' defaults describe another network.
    missing = [name for name in NANOCHAT_FIXED if name not in hf_config]
    require(not missing, f"{', '.join(missing)} is missing")
    sizes = {"num_key_value_heads": config.n_head, "intermediate_size": 4 * config.n_embd}
    require_fixed(hf_config, {**NANOCHAT_FIXED, **sizes})
    return config


def to_nanochat_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a GPT (model.py) as NanoChatForCausalLM names and stores it."""
    renamed = {}
    for name, weight in weights.items():
        # The head and the embedding.
        if name == "lm_head.weight":
            renamed[name] = weight
        elif name == "transformer.wte.weight":
            renamed["model.embed_tokens.weight"] = weight
        # A weight of a block.
        else:
            _, _, layer, part = name.split(".", 3)  # transformer.h.LAYER.PART
            if part == "attn.c_attn.weight":
                # (3C, C) -> three of (C, C)
                for hf_part, w in zip(NANOCHAT_QKV, weight.chunk(3), strict=True):
                    renamed[f"model.layers.{layer}.{hf_part}"] = w
            else:
                renamed[f"model.layers.{layer}.{NANOCHAT_BLOCK[part]}"] = weight
    return renamed


def from_nanochat_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a NanoChatForCausalLM as the state dict of a GPT (model.py). Unknown names stay as they are, and
    load_hf refuses them."""
    import torch

    # Take each known weight out of a copy; what remains is unknown.
    weights = dict(weights)
    renamed = {}

    # The blocks. A file that was damaged may lack some of their weights, which load_hf reports.
    layers = {name.split(".")[2] for name in weights if name.startswith("model.layers.")}
    for layer in layers:
        hf_prefix = f"model.layers.{layer}."
        gpt_prefix = f"transformer.h.{layer}."

        # Queries, keys and values: three of (C, C) -> (3C, C)
        qkv = [hf_prefix + part for part in NANOCHAT_QKV]
        if all(name in weights for name in qkv):
            renamed[f"{gpt_prefix}attn.c_attn.weight"] = torch.cat([weights.pop(name) for name in qkv])

        # The other weights only change their names.
        for gpt_part, hf_part in NANOCHAT_BLOCK.items():
            if hf_prefix + hf_part in weights:
                renamed[gpt_prefix + gpt_part] = weights.pop(hf_prefix + hf_part)

    # The embedding. The head has the same name in both.
    if "model.embed_tokens.weight" in weights:
        renamed["transformer.wte.weight"] = weights.pop("model.embed_tokens.weight")
    return renamed | weights


# ------------------------------------------------------------------------- any other network, exported with its code

# The attribute of GPTForCausalLM (training/modeling_gpt.py) that holds the network.
CODE_PREFIX = "network."


def to_code_config(config: GPTConfig) -> dict[str, Any]:
    """The entries of config.json for GPTHubConfig (training/modeling_gpt.py)."""
    # auto_map tells transformers which classes of which file in the folder to use.
    return {
        "auto_map": {
            "AutoConfig": "modeling_gpt.GPTHubConfig",
            "AutoModelForCausalLM": "modeling_gpt.GPTForCausalLM",
        },
        "network": asdict(config),
        "tie_word_embeddings": config.tied_head,
    }


def from_code_config(hf_config: dict[str, Any]) -> GPTConfig:
    """The GPTConfig in the config.json of an export with code. Raises UserError if it is incomplete or not valid."""
    from model import GPTConfig
    from training.config import check_types

    # `network` must have every field of GPTConfig. The code in the folder is neither read nor run.
    network = hf_config.get("network")
    names = {field.name for field in fields(GPTConfig)}
    require(isinstance(network, dict) and names <= network.keys(), "the entry network lacks settings of a GPTConfig")

    # The sizes are numbers, as in read_sizes; GPTConfig and check_types check the other values.
    sizes = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
    not_numbers = [name for name in sizes if type(network[name]) is not int]
    require(not not_numbers, f"{', '.join(not_numbers)} must be numbers")
    config = GPTConfig.from_dict(network)
    check_types(config)
    return config


def to_code_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of a GPT (model.py) as that of the GPTForCausalLM that holds it."""
    return {CODE_PREFIX + name: weight for name, weight in weights.items()}


def from_code_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The opposite of to_code_weights."""
    return {name.removeprefix(CODE_PREFIX): weight for name, weight in weights.items()}


# ------------------------------------------------------------------------- all layouts

LAYOUTS = (
    Layout(
        "gpt2", "GPT2LMHeadModel", False,
        is_gpt2, to_gpt2_config, from_gpt2_config, to_gpt2_weights, from_gpt2_weights,
    ),
    Layout(
        "nanochat", "NanoChatForCausalLM", False,
        is_nanochat, to_nanochat_config, from_nanochat_config, to_nanochat_weights, from_nanochat_weights,
    ),
    # This layout accepts every network, so it comes last.
    Layout(
        "gpt-with-code", "GPTForCausalLM", True,
        lambda config: True, to_code_config, from_code_config, to_code_weights, from_code_weights,
    ),
)  # fmt: skip


def without_padding(config: GPTConfig, weights: dict[str, Tensor]) -> tuple[GPTConfig, dict[str, Tensor]]:
    """The config and the state dict of a network without the rows that only pad its vocabulary to a round size. They
    belong to no token, so the network computes the same."""
    from model import VOCAB_SIZE

    # (padded V, C) -> (V, C), and the head's bias, if it has one: (padded V,) -> (V,)
    padded = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")
    weights = {name: w[:VOCAB_SIZE] if name in padded else w for name, w in weights.items()}
    return replace(config, vocab_size=min(config.vocab_size, VOCAB_SIZE)), weights
