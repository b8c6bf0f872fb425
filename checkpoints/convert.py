"""Weights in other layouts: folders of transformers, in and out, and checkpoints of older trainers.

    model = load_hf("gpt2")            # or gpt2-medium, gpt2-large, gpt2-xl, OWNER/NAME, or a folder
    save_hf(model, "out/my-gpt2")      # AutoModelForCausalLM and AutoTokenizer read this folder
    model, step = load_old("old.pt")   # from build-nanogpt or nanoGPT; no pickled code is run

transformers has a class for OpenAI's network, and writes that itself. Any other network is exported with its code:
model.py, wrapped by the class in checkpoints/modeling_gpt.py. The weights have the names of model.py, but:

    model.py                             GPT2LMHeadModel   with code: GPTForCausalLM
    -----------------------------------  ----------------  -------------------------
    transformer.wte.weight (V, C)        the same          network.transformer.wte.weight
    transformer.h.0.attn.c_attn (3C, C)  (C, 3C)           network.transformer.h.0.attn.c_attn (3C, C)
    transformer.h.0.attn.c_proj (C, C)   transposed        ...
    transformer.h.0.mlp.c_fc (4C, C)     (C, 4C)
    transformer.h.0.mlp.c_proj (C, 4C)   (4C, C)

A round trip preserves float32 weights bit for bit.
"""

import json
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from checkpoints.checkpoint import build_model, load_tensors
from model import EOT, GPT, VOCAB_SIZE, GPTConfig, has_gpt2_tokens
from system.errors import UserError, explain_errors, require
from system.huggingface import open_hub
from tokens import tokenizer

# Where transformers stores weights of up to 50 GB; and all files that are read of a repository.
WEIGHTS = "model.safetensors"
FILES = ["config.json", WEIGHTS, "tokenizer.json", "vocab.json"]

# Causal masks, which old files store among the weights; they are not parameters.
MASK_BUFFERS = (".attn.bias", ".attn.masked_bias")

# OpenAI's GPT-2 has Conv1D layers, which store their weight as (in, out). Those of model.py are nn.Linear: (out, in).
CONV1D_WEIGHTS = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")

# {activation of GPTConfig: its name in transformers' GPT-2}: OpenAI's tanh approximation, and nanoGPT's exact GELU.
GPT2_ACTIVATIONS = {"gelu": "gelu_new", "gelu_erf": "gelu"}

# {size in GPTConfig: its name in GPT2Config}.
GPT2_SIZES = {"block_size": "n_positions"} | {n: n for n in ("vocab_size", "n_layer", "n_head", "n_embd")}

# Entries of a GPT-2's config.json that model.py implements with one value only, which is transformers' default.
GPT2_FIXED = {
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "quantization_config": None,
}

# By how much the logits of an export may differ from the model's, in standard deviations of the logits. Measured: 2e-6
# by rounding, 1e-3 with the exact GELU in place of its tanh approximation.
LOGITS_TOLERANCE = 1e-4

# An export with code: its model_type, and the prefix of its weights.
CODE_TYPE = "gpt-with-code"
CODE_PREFIX = "network."

# What stands before the names of weights: of torch.compile, which may stand inside, of DDP and of an export with code.
PREFIXES = r"^((_orig_mod|module|network)\.)+|\b_orig_mod\."


# ------------------------------------------------------------------------- in


def is_hf_folder(folder: Path) -> bool:
    """Whether transformers saved a model in this folder."""
    return any((folder / name).is_file() for name in (WEIGHTS, "pytorch_model.bin"))


def load_hf(name_or_dir: str | Path) -> GPT:
    """Load a GPT (float32, on the CPU, in eval mode) from a folder saved by transformers or by save_hf, or by its name
    on the Hub. No code in the folder is run, and nothing in it reaches transformers, whose loader follows a config.json
    to other repositories.

    Raises UserError if the model is missing or damaged, is not a network of model.py, or does not use GPT-2's tokens.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(name_or_dir)
    if not folder.is_dir():
        with open_hub() as api:
            folder = Path(api.snapshot_download(str(name_or_dir), allow_patterns=FILES))
    # RuntimeError: of torch, for weights that do not fit the network.
    kinds = (SafetensorError, ValueError, RuntimeError)
    with explain_errors(f"cannot open {name_or_dir}", "download or export it again", *kinds):
        config, has_gpt2_layout = read_config(folder)
        check_tokenizer(folder)

        require((folder / WEIGHTS).is_file(), f"it has no {WEIGHTS}; load it with transformers, and save_pretrained")
        weights = clean_weights(load_file(folder / WEIGHTS))
        if has_gpt2_layout:
            weights = transpose_conv1d(weights)
        return build(config, weights)


def read_config(folder: Path) -> tuple[GPTConfig, bool]:
    """The network that a folder's config.json describes, and whether its weights are laid out as GPT2LMHeadModel's.
    Raises ValueError or UserError, which name what it is, if it is not a network of model.py."""
    hf_config = json.loads((folder / "config.json").read_text())
    model_type = hf_config.get("model_type")
    network = hf_config.get("network")
    if model_type != CODE_TYPE:
        # Others may have tensors of the same names: GPT-Neo computes something else with them.
        require(model_type == "gpt2", f"its model_type is {model_type!r:.99}; only 'gpt2' is supported")
        for name, supported in GPT2_FIXED.items():
            value = hf_config.get(name, supported)
            require(value == supported, f"its {name} is {value!r:.99}; only {supported!r} is supported")
        network = {field: hf_config.get(name) for field, name in GPT2_SIZES.items()}
        network["tied_head"] = hf_config.get("tie_word_embeddings", True)
        activations = {hf_name: name for name, hf_name in GPT2_ACTIVATIONS.items()}
        activation = str(hf_config.get("activation_function", "gelu_new"))
        network["activation"] = activations.get(activation, activation)

    for name, default in asdict(GPTConfig()).items():
        value = network.get(name, default)
        require(type(value) is type(default), f"its {name} is {value!r:.99}, no {type(default).__name__}")
    return GPTConfig.from_dict(network), model_type != CODE_TYPE


def check_tokenizer(folder: Path) -> None:
    """Raise UserError if a model comes with another tokenizer than GPT-2's, whose tokens would be nonsense here. One
    late token tells: its id is the number of merges before it."""
    for name in ("tokenizer.json", "vocab.json"):
        if (folder / name).is_file():
            match json.loads((folder / name).read_text()):
                case {"model": {"vocab": {"Ġgazed": 50255}}} | {"Ġgazed": 50255}:
                    return
            raise UserError(f"its {name} is not GPT-2's; use transformers")


def clean_weights(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32 under the names of model.py, without causal masks."""
    cleaned = {}
    for name, weight in weights.items():
        name = re.sub(PREFIXES, "", name)
        # OpenAI's files on the Hub leave it out.
        if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
            name = f"transformer.{name}"
        if not name.endswith(MASK_BUFFERS):
            cleaned[name] = weight.float()
    return cleaned


def build(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    """The GPT of a config and clean weights. A tied head may be missing, and one that differs from the embedding is
    kept, whatever the config says, as transformers keeps it."""
    wte = weights.get("transformer.wte.weight")
    if config.tied_head and wte is not None:
        head = weights.setdefault("lm_head.weight", wte)
        config = replace(config, tied_head=torch.equal(head, wte))
    return build_model(config, weights)


def transpose_conv1d(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """(in, out) <-> (out, in) of the layers that are Conv1D in GPT2LMHeadModel; for c_attn (C, 3C) <-> (3C, C)."""
    return {name: w.t().contiguous() if name.endswith(CONV1D_WEIGHTS) else w for name, w in weights.items()}


# ------------------------------------------------------------------------- out


def save_hf(model: GPT, out_dir: str | Path) -> bool:
    """Write config, float32 weights and tokenizer to the new folder `out_dir`, all or nothing. Returns whether the
    folder has code that transformers must be allowed to run.

    Rows that only pad GPT-2's vocabulary are dropped; absent biases become zeros where transformers' class always has
    them. Of another vocabulary all rows stay, and there is no tokenizer. Raises UserError if `out_dir` exists, or if
    what was written does not compute what the model computes.
    """
    from safetensors import SafetensorError

    out_dir = Path(out_dir)
    require(not out_dir.exists(), f"{out_dir} exists, and nothing is overwritten; choose a new folder")

    # Whatever has a row for each token of the vocabulary, (padded V, ...) -> (V, ...).
    weights = {name: weight.cpu().float() for name, weight in model.state_dict().items()}
    rows = model.config.vocab_size
    V = VOCAB_SIZE if has_gpt2_tokens(rows) else rows
    trimmed = {name: w[:V] if w.shape[:1] == (rows,) else w for name, w in weights.items()}
    config = replace(model.config, vocab_size=V)

    # transformers' GPT-2 computes this network, if it is GPT-2 but for its sizes, biases, head and GELU.
    free = {*GPT2_SIZES, "bias", "tied_head", "activation", "init_std", "zero_init_projections"}
    gpt2 = GPTConfig(**{name: getattr(config, name) for name in free})
    needs_code = config != gpt2 or config.activation not in GPT2_ACTIVATIONS

    out_dir.mkdir(parents=True)
    fix = "give your change of model.py a field in GPTConfig, whose default means off"
    try:
        # SafetensorError: for a full disk, as its writer has no error number. RuntimeError: of torch, for weights that
        # transformers' network lacks.
        with (
            explain_errors(f"{out_dir} cannot be written", "make room, or choose another disk", SafetensorError),
            explain_errors("the export would be another network", fix, RuntimeError),
        ):
            exported = (save_with_code if needs_code else save_gpt2)(config, trimmed, out_dir)
            check_logits(GPT.from_state_dict(model.config, weights), exported, V)
        if V == VOCAB_SIZE:
            save_hf_tokenizer(out_dir, config.block_size)
        # safetensors writes files that only their owner may read.
        for file in out_dir.iterdir():
            shutil.copymode(out_dir / "config.json", file)
    except BaseException:
        shutil.rmtree(out_dir)
        raise
    return needs_code


@torch.no_grad()
def check_logits(model: GPT, exported: nn.Module, V: int) -> None:
    """Raise UserError unless an export of V tokens gives the model's logits in a full context. So a change of model.py
    that has no field in GPTConfig is not exported as the network that the config describes."""
    idx = (torch.arange(model.config.block_size) % V)[None]  # (1, T)
    expected = model(idx)[0][..., :V]  # (1, T, V)
    difference = (exported(idx)[0] - expected).abs().max() / expected.std()
    require(difference < LOGITS_TOLERANCE, f"its logits are {difference:.1g} of their standard deviation off")


def find_eot(config: GPTConfig) -> int | None:
    """The id of <|endoftext|>, which another vocabulary than GPT-2's lacks."""
    return EOT if has_gpt2_tokens(config.vocab_size) else None


def save_gpt2(config: GPTConfig, weights: dict[str, Tensor], folder: Path) -> nn.Module:
    """Let transformers save a GPT2LMHeadModel. Returns it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    eot = find_eot(config)
    hf_config = GPT2Config(
        **{name: getattr(config, field) for field, name in GPT2_SIZES.items()},
        # llama.cpp's converter reads the context length by its oldest name, which transformers' stubs lack.
        n_ctx=config.block_size,  # type: ignore[call-arg]
        activation_function=GPT2_ACTIVATIONS[config.activation],
        tie_word_embeddings=config.tied_head,
        bos_token_id=eot,
        eos_token_id=eot,
    )
    with torch.device("meta"):
        hf_model = GPT2LMHeadModel(hf_config)
    # transformers' GPT-2 always has biases.
    biases = {name: torch.zeros(p.shape) for name, p in hf_model.named_parameters() if name.endswith(".bias")}
    hf_model.load_state_dict(biases | transpose_conv1d(weights), assign=True)
    hf_model.tie_weights()
    hf_model.save_pretrained(folder)
    return hf_model.eval()


def save_with_code(config: GPTConfig, weights: dict[str, Tensor], folder: Path) -> nn.Module:
    """Save a network that transformers has no class for, with model.py and a thin class around it. Returns the network
    that is read from there."""
    from safetensors.torch import save_file

    import model

    if config.tied_head:
        del weights["lm_head.weight"]
    weights = {CODE_PREFIX + name: weight.contiguous() for name, weight in weights.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
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
        "eos_token_id": find_eot(config),
    }
    (folder / "config.json").write_text(json.dumps(hf_config, indent=2))
    shutil.copy(model.__file__, folder)
    shutil.copy(Path(__file__).with_name("modeling_gpt.py"), folder)
    return load_hf(folder)


def save_hf_tokenizer(folder: Path, max_length: int) -> None:
    """Write GPT-2's tokenizer for transformers. max_length: the model's context, in tokens."""
    from transformers import GPT2Tokenizer

    merges, vocab = tokenizer.find_vocabulary()
    GPT2Tokenizer(vocab=vocab, merges=merges, model_max_length=max_length).save_pretrained(folder)
    # For the tokenizer of transformers 4; transformers 5 writes tokenizer.json alone.
    shutil.copyfile(vocab, folder / "vocab.json")
    shutil.copyfile(merges, folder / "merges.txt")


# ------------------------------------------------------------------------- checkpoints of older trainers


class PickledObject:
    """Stands in for whatever class or function an old file has pickled: it takes the attributes, and has no code to
    run. A config keeps its numbers; a numpy scalar loses its own, which nothing here reads."""

    n_head: Any  # of a config

    def __init__(self, *args: Any):
        """Whatever the original was called with."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)


def load_old(path: str | Path) -> tuple[GPT, int]:
    """Load a checkpoint of build-nanogpt, nanoGPT or their relatives: the GPT (float32, on the CPU, in eval mode) and
    its step.

    No pickled code is run. The tensors give the weights and the shape of the network; only the number of heads comes
    from the config in the file. Raises UserError if the file is anything else.
    """
    problem, fix = f"{path} is not a build-nanogpt or nanoGPT checkpoint", "nothing in it was run"
    with explain_errors(problem, fix, ValueError, RuntimeError, UnpicklingError, EOFError, LookupError):
        # torch names what it would call in the file.
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        with torch.serialization.safe_globals([(PickledObject, name) for name in names]):
            saved = load_tensors(Path(path))
    # RuntimeError: of torch, for weights that do not fit the network.
    with explain_errors(problem, fix, ValueError, RuntimeError):
        return build_old(saved)


def build_old(saved: Any) -> tuple[GPT, int]:
    """The GPT and the step in the contents of an old checkpoint, which may be anything. Raises UserError, ValueError or
    RuntimeError if they do not fit."""
    # No tensor tells how many heads there are, and another number would compute something else.
    match saved:
        case {"format": _}:
            raise UserError("it is a checkpoint of this project already; it needs no import")
        case {"model": dict(tensors), "model_args": {"n_head": int(n_head)}}:
            is_nanogpt = True
        case {"model": dict(tensors), "config": {"n_head": int(n_head)} | PickledObject(n_head=int(n_head))}:
            is_nanogpt = False
        case _:
            raise UserError("it has no 'model', or no number 'n_head' in its 'model_args' or 'config'")

    weights = clean_weights(tensors)
    names = {"transformer.wpe.weight", "transformer.wte.weight"}
    require(names <= weights.keys(), f"it lacks {names - weights.keys()}")
    block_size, n_embd = weights["transformer.wpe.weight"].shape

    config = GPTConfig(
        block_size=block_size,
        vocab_size=weights["transformer.wte.weight"].shape[0],
        n_layer=len({name.split(".")[2] for name in weights if name.startswith("transformer.h.")}),
        n_head=n_head,
        n_embd=n_embd,
        bias="transformer.ln_f.bias" in weights,
        activation="gelu_erf" if is_nanogpt else "gelu",  # nanoGPT's is the exact one since May 2023
    )

    # A step is only a name for the new file: without one it is 0.
    step = saved.get("step", saved.get("iter_num", 0))  # build-nanogpt's name, nanoGPT's name
    return build(config, weights), step
