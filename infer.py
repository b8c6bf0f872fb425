"""Sample text from a checkpoint, a run folder, a Hugging Face GPT-2 folder or a name on the Hub.

    python infer.py log/quickstart "ROMEO:"                             # one sample, printed as it is generated
    python infer.py gpt2 "Hello, I'm a language model," --num-samples 4 --temperature 0.8 --seed 42
    echo "Once upon a time" | python infer.py log/gpt2-124m - --temperature 0 --json

An empty prompt starts a new document; - reads standard input. The prompt must fit the model's context, but the text may
outgrow it: the model then rereads the newer half of the context and drops the older half. <|endoftext|> in a prompt is
the token between documents. The text goes to stdout; a line on stderr says which model generates it, where and in
which precision. The sampling itself is in model.py.
"""

from __future__ import annotations

import codecs
import json
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from system.cli import (
    UserError,
    print0,
    printable,
    require,
    run_cli,
)  # before all packages: it says what this Python lacks

# isort: split
import tyro

from tokens import tokenizer

if TYPE_CHECKING:
    import torch

    from model import GPT

# The least and the greatest value of each number.
RANGES = {
    "max_new_tokens": (1, 10**9),
    "num_samples": (1, 10**9),
    "temperature": (0, 10**9),
    "top_k": (0, 10**9),
    "top_p": (1e-9, 1),
    "seed": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True)
class Args:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)."""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PROMPT]", help_behavior_hint="")] = ""
    """Text to continue; - reads standard input (without a final newline)."""
    max_new_tokens: int = 64
    """Generate so many tokens; a token is about 4 characters of English."""
    num_samples: int = 1
    """Generate so many texts at once."""
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_k: int = 50
    """Sample from this many most likely tokens; 0 means all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this."""
    seed: int = 42
    """The same seed and flags on the same machine give the same text."""
    json: bool = False
    """Write one JSON object per sample."""
    device: str = "auto"
    """cuda, mps or cpu; auto takes the first of these that is available."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the weights and the cache; auto: bfloat16 where the device has it."""


# ------------------------------------------------------------------------- text in and out


def read_prompt(text: str) -> str:
    """The prompt that the command line gives, or that of standard input without its final newline. Raises UserError if
    it is not UTF-8."""
    source = "standard input" if text == "-" else "the prompt"
    require(text != "-" or sys.stdin, "the prompt - reads standard input, which is closed; write the prompt instead")
    content = sys.stdin.buffer.read() if text == "-" else text.encode(errors="surrogateescape")
    fix = "convert it: iconv -f {} -t UTF-8 FILE | python infer.py MODEL -"
    require(b"\0" not in content, f"{source} has zero bytes, as text in UTF-16 has; {fix.format('UTF-16')}")
    try:
        prompt = content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        problem = f"{source} is not UTF-8 (byte {content[e.start]:#x} at {e.start})"
        raise UserError(f"{problem}; {fix.format('WINDOWS-1252')}, or whatever it is in") from None
    prompt = prompt.replace("\r\n", "\n")
    return prompt.removesuffix("\n") if text == "-" else prompt


def describe_prompt_file(text: str) -> str:
    """A line for who means a file by the prompt, which is its name; "" for any other prompt."""
    path = text.removeprefix("FILE:")  # nanoGPT's way
    if path == text and not os.path.isfile(path):
        return ""
    command = f"python infer.py MODEL - < {shlex.quote(path)}"
    return f"note: the prompt is the name {text!r} itself; for the text in the file: {command}"


def write_stream(prompt: str, ids: Iterable[int]) -> None:
    """Print a prompt, then its continuation as it is generated. A character of several bytes may be split across
    tokens: it appears when its last byte is there."""
    # An incremental decoder keeps the bytes of an incomplete character until the rest arrives.
    encoding = tokenizer.encoding()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    print(printable(prompt), end="", flush=True)
    for token in ids:
        text = utf8.decode(encoding.decode_single_token_bytes(token))
        print(printable(text), end="", flush=True)

    # The text may end inside a character; what there is of it becomes a replacement character.
    print(printable(utf8.decode(b"", final=True)), flush=True)


def write_samples(prompt: str, steps: Iterable[list[int]], as_json: bool) -> None:
    """Print all samples once they are complete or, after Ctrl-C, as far as they are. steps: at each, the next id of all
    samples. JSON escapes control codes by itself; text for a terminal is made printable."""
    columns = []
    try:
        for new_ids in steps:
            columns.append(new_ids)
    finally:
        for number, ids in enumerate(zip(*columns, strict=True), 1):
            text = tokenizer.encoding().decode(ids)
            if as_json:
                print(json.dumps({"prompt": prompt, "text": text, "tokens": ids}))
            else:
                print(f"--- sample {number}\n{printable(prompt + text)}")


# ------------------------------------------------------------------------- the model


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only. Changes the model and returns it."""
    import torch

    # OpenAI's weights give logits near -100, where bfloat16 steps by 0.5. Take off what all logits share, as in
    # training/forward.py: it changes no probability.
    head = model.lm_head
    if dtype != torch.float32:
        head.weight = torch.nn.Parameter(head.weight.detach() - head.weight.detach().mean(0))
    return model.to(device, dtype)


def main() -> None:
    # Mistakes are reported before anything heavy is imported.
    args = tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    for name, (least, most) in RANGES.items():
        value = getattr(args, name)
        flag = name.replace("_", "-")
        require(least <= value <= most, f"--{flag} {value}: must lie between {least} and {most}")
    prompt = read_prompt(args.prompt)
    prompt_ids = tokenizer.encoding().encode(prompt, allowed_special="all") or [tokenizer.EOT]
    note = describe_prompt_file(args.prompt)
    if note:
        print0(note, file=sys.stderr)

    # torch takes seconds to import, and --help and the checks above do not need it.
    import torch

    from model import Sampler, stream
    from system.machine import choose_device, device_name, dtype_name, is_out_of_memory, supported_dtypes
    from weights.open_model import open_and_describe

    # The model must know GPT-2's tokens, and the prompt must fit it.
    device = choose_device(args.device)
    model, description = open_and_describe(args.model)
    config = model.config
    tokens = f"{config.vocab_size} tokens, fewer than GPT-2's"
    require(config.vocab_size > tokenizer.EOT, f"{args.model} has a vocabulary of {tokens}; choose a GPT-2")
    context = f"the context of {args.model} is {config.block_size}"
    require(len(prompt_ids) <= config.block_size, f"the prompt has {len(prompt_ids)} tokens, but {context}; shorten it")

    # A token reads every weight from memory: what takes fewer bytes is fastest, even on a CPU that trains in float32.
    dtype = supported_dtypes(device)[0] if args.dtype == "auto" else getattr(torch, args.dtype)
    line = f"infer.py: {description}; {device_name(device)}, {dtype_name(dtype)}"
    print0(line, file=sys.stderr)
    model = prepare(model, device, dtype)

    # The same seed gives the same samples: nothing else draws from this generator.
    generator = torch.Generator(device).manual_seed(args.seed)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, generator)
    idx = torch.tensor([prompt_ids], device=device)  # (1, T)
    steps = stream(model, idx, args.max_new_tokens, sampler, args.num_samples)  # yields (num_samples,)

    # One sample appears as it is generated; several would be interleaved, so they are printed at the end.
    try:
        if args.num_samples == 1 and not args.json:
            write_stream(prompt, (int(ids) for ids in steps))
        else:
            write_samples(prompt, (ids.tolist() for ids in steps), args.json)
    except FloatingPointError as e:
        raise UserError(f"{args.model} in {dtype_name(dtype)}: {e}; --dtype float32 has the widest range") from None
    except RuntimeError as e:
        if not is_out_of_memory(e):
            raise
        raise UserError(f"--num-samples {args.num_samples} does not fit in the memory of {device}; lower it") from None


if __name__ == "__main__":
    # nanoGPT's sample.py names both by flags.
    run_cli(main)
