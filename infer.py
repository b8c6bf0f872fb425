"""Sample text from a checkpoint, a run folder, a Hugging Face GPT-2 folder or a name on the Hub.

    python infer.py log/quickstart "ROMEO:"                             # one sample, printed as it is generated
    python infer.py gpt2 "Hello, I'm a language model," --num-samples 4 --temperature 0.8 --seed 42
    echo "Once upon a time" | python infer.py log/gpt2-124m - --temperature 0 --json
    python infer.py gpt2 -- "-5 degrees"                                # a prompt that begins with a hyphen

An empty prompt starts a new document; - reads standard input. The prompt must fit the model's context, but the text may
outgrow it: the model then rereads the newer half of the context and drops the older half. <|endoftext|> in a prompt is
the token between documents, and a sample ends where the model draws it. The text goes to stdout; a line on stderr says
which model generates it, where and in which precision. The sampling itself is in model.py.
"""

from __future__ import annotations

import argparse
import codecs
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints.run_folder import describe_best
from system import process, settings
from system.errors import UserError, require
from system.printing import print0, printable
from tokens import tokenizer

if TYPE_CHECKING:
    import torch

    from model import GPT


def read_prompt(text: str) -> str:
    """The prompt that the command line gives, or that of standard input: UTF-8, without a final newline."""
    if text != "-":
        return text
    sys.stdin.reconfigure(encoding="utf-8-sig")  # type: ignore[union-attr]  # Windows writes a mark of UTF-8 first
    return sys.stdin.read().removesuffix("\n")


# ------------------------------------------------------------------------- text out


def write_stream(prompt: str, ids: Iterable[int]) -> None:
    """Print a prompt, then its continuation as it is generated. A character of several bytes may be split across
    tokens: it appears when its last byte is there."""
    # An incremental decoder keeps the bytes of an incomplete character until the rest arrives.
    encoding = tokenizer.encoding()
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    print(printable(prompt), end="", flush=True)
    for token in tokenizer.until_eot(ids):
        text = utf8.decode(encoding.decode_single_token_bytes(token))
        print(printable(text), end="", flush=True)

    # The text may end inside a character; what there is of it becomes a replacement character.
    print(printable(utf8.decode(b"", final=True)), flush=True)


def write_samples(prompt: str, steps: Iterable[list[int]], as_json: bool) -> None:
    """Print all samples once they are complete or, after Ctrl-C, as far as they are. steps: at each, the next id of all
    samples. JSON escapes control codes by itself; text for a terminal is made printable."""
    columns: list[list[int]] = []
    try:
        for new_ids in steps:
            columns.append(new_ids)
    finally:
        for number, sample in enumerate(zip(*columns, strict=True), 1):
            ids = [*tokenizer.until_eot(sample)]
            text = tokenizer.encoding().decode(ids)
            if as_json:
                print(json.dumps({"prompt": prompt, "text": text, "tokens": ids}))
            else:
                print(f"--- sample {number}\n{printable(prompt + text)}")


# ------------------------------------------------------------------------- the model


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only. Changes the model and returns it."""
    import torch

    return (model if dtype == torch.float32 else model.round_to(dtype)).to(device)


def generate(args: argparse.Namespace) -> None:
    """Open the model that the command line names, and print its samples."""
    import torch

    from checkpoints.open_model import open_and_describe
    from model import Sampler, has_gpt2_tokens, stream
    from system.machine import choose_device, device_name, dtype_name, supported_dtypes

    # The same seed gives the same samples: nothing else draws from this generator.
    device = choose_device(args.device)
    generator = torch.Generator(device).manual_seed(args.seed)
    try:
        sampler = Sampler(args.temperature, args.top_k, args.top_p, generator)
    except ValueError as e:
        raise UserError(f"--{e}".replace("_", "-")) from None

    # The model must know GPT-2's tokens, and the prompt must fit it.
    prompt = read_prompt(args.prompt)
    prompt_ids = tokenizer.encode_prompt(prompt)
    model, description = open_and_describe(args.model)
    config = model.config
    is_gpt2s = has_gpt2_tokens(config.vocab_size)
    require(is_gpt2s, f"{args.model} has a vocabulary of {config.vocab_size} tokens, not GPT-2's; choose a GPT-2")
    context = f"the context of {args.model} is {config.block_size}"
    require(len(prompt_ids) <= config.block_size, f"the prompt has {len(prompt_ids)} tokens, but {context}; shorten it")

    # A token reads every weight from memory: what takes fewer bytes is fastest, even on a CPU that trains in float32.
    dtype = supported_dtypes(device)[0] if args.dtype == "auto" else getattr(torch, args.dtype)
    line = f"infer.py: {description}; {device_name(device)}, {dtype_name(dtype)}{describe_best(Path(args.model))}"
    print0(line, file=sys.stderr)
    model = prepare(model, device, dtype)
    idx = torch.tensor(args.num_samples * [prompt_ids], device=device)  # (num_samples, T)
    steps = stream(model, idx, args.max_new_tokens, sampler)  # yields (num_samples,)

    # One sample appears as it is generated; several would be interleaved, so they are printed at the end.
    try:
        if args.num_samples == 1 and not args.json:
            write_stream(prompt, (int(ids) for ids in steps))
        else:
            write_samples(prompt, (ids.tolist() for ids in steps), args.json)
    except FloatingPointError as e:
        raise UserError(f"{args.model} in {dtype_name(dtype)}: {e}; --dtype float32 has the widest range") from None


def main() -> None:
    parser = settings.ArgumentParser(__doc__)
    parser.add_argument("model", help="run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)")
    parser.add_argument(
        "prompt",
        nargs="?",
        default="",
        help="text to continue, without a space at its end: words begin with theirs; with a line break: "
        r"$'...\n...'; - reads standard input",
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="a token is about 4 characters of English")
    parser.add_argument("--num-samples", type=int, default=1, help="texts to generate at once")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 always takes the most likely token")
    parser.add_argument("--top-k", type=int, default=50, help="sample from so many most likely tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from the likeliest whose probabilities add up to this"
    )
    parser.add_argument("--seed", type=int, default=42, help="the same seed on the same machine gives the same text")
    parser.add_argument("--json", action="store_true", help="write one JSON object per sample")
    parser.add_argument("--device", default="auto", help="cuda, mps or cpu; auto: the GPU where there is one")
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float16", "float32"),
        default="auto",
        help="precision of the weights and the cache; auto: bfloat16 where the device has it",
    )
    args = parser.parse_intermixed_args()  # the prompt may come after flags

    # torch takes seconds to import, and -h needs none of it.
    from system.machine import explain_out_of_memory

    with explain_out_of_memory("lower --num-samples or --max-new-tokens, or use --device cpu"):
        generate(args)


if __name__ == "__main__":
    process.run_cli(main)
