"""Sample text from a checkpoint, a run folder, a Hugging Face GPT-2 folder or a name on the Hub.

    python infer.py log/quickstart "def main():"                        # one sample, printed as it is generated
    python infer.py gpt2 "Hello, I'm a language model," --num-samples 4 --temperature 0.8 --seed 42
    echo "Once upon a time" | python infer.py log/gpt2-124m - --temperature 0 --json

An empty prompt starts a new document. The prompt must fit the model's context, but the text may outgrow it: the model
then rereads the newer half of the context and drops the older half.
"""

from __future__ import annotations

import codecs
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from system.cli import UserError, printable, require, run_cli
from tokens import tokenizer

if TYPE_CHECKING:
    import torch

    from model import GPT


@dataclass(frozen=True)
class Args:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)."""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PROMPT]")] = ""
    """Text to continue; - reads standard input (without a final newline)."""
    file: Path | None = None
    """Read the prompt from this file instead, unchanged."""
    max_new_tokens: int = 64
    num_samples: int = 1
    temperature: float = 1.0
    """0 always takes the most likely token."""
    top_k: int = 50
    """Sample from this many most likely tokens; 0 means all."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this."""
    seed: int = 42
    """The same seed and flags on the same machine give the same text."""
    stop_at_eot: bool = False
    """End a sample where the model ends the document."""
    json: bool = False
    """Write one JSON object per sample."""
    allow_special: bool = False
    """Encode <|endoftext|> in the prompt as the special token; otherwise it is plain text."""
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the weights and the cache; auto takes a GPU's best, and measures on a CPU that has bfloat16."""


def read_prompt(args: Args) -> str:
    """The prompt from the command line, the file or standard input. Raises UserError."""
    require(not (args.file and args.prompt), f"give either a prompt or --file {args.file}, not both")
    try:
        if args.file:
            return args.file.read_bytes().decode()
        if args.prompt == "-":
            return sys.stdin.buffer.read().decode().removesuffix("\n")
        return args.prompt
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read the prompt from {args.file or 'stdin'} as UTF-8 text: {e}") from None


def encode(text: str, allow_special: bool) -> list[int]:
    """Tokens of a prompt; an empty prompt starts a document."""
    special = {"<|endoftext|>"} if allow_special else set()
    return tokenizer.encoding().encode(text, allowed_special=special, disallowed_special=()) or [tokenizer.EOT]


def write_stream(prompt: str, ids: Iterator[int]) -> None:
    """Print a prompt, then its continuation as it is generated; a character split across tokens appears when whole."""
    enc, utf8 = tokenizer.encoding(), codecs.getincrementaldecoder("utf-8")("replace")
    print(printable(prompt), end="", flush=True)
    for i in ids:
        print(printable(utf8.decode(enc.decode_single_token_bytes(i))), end="", flush=True)
    print(printable(utf8.decode(b"", final=True)), flush=True)


def until_eot(steps: Iterator[torch.Tensor], stop: bool) -> Iterator[list[int | None]]:
    """Yield the ids of every step, with None for samples that have ended, until all have."""
    done: set[int] = set()
    for step in steps:
        row = step.tolist()
        done |= {i for i, token in enumerate(row) if stop and token == tokenizer.EOT}
        if len(done) == len(row):
            return
        yield [None if i in done else token for i, token in enumerate(row)]


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this precision here. bfloat16 needs AVX-512; float32 was not tried on Arm."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and platform.machine() == "x86_64"


def packed(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """What multiplies rows by a weight matrix on a CPU, and adds a bias: where it can, from a copy in the layout that
    oneDNN multiplies a few rows by fastest, which about doubles the tokens per second of 4 samples."""
    import torch

    if not packable(weight.dtype):
        return partial(torch.nn.functional.linear, weight=weight)
    layout, multiply = torch.ops.mkldnn._reorder_linear_weight(weight), torch.ops.mkldnn._linear_pointwise
    return lambda x, bias=None: multiply(x, layout, bias, "none", [], "")  # as in Inductor


def fastest_dtype(device: torch.device, rows: int) -> torch.dtype:
    """The precision that generates this many samples fastest. A token reads every weight from memory, so bfloat16,
    half as many bytes, may win where training takes float32. On a CPU that has both, timed on a matrix too large for
    most caches; float32 has to win clearly, so that the same command takes the same precision again."""

    from system.precision import Workload, choose_dtype

    workload = Workload(min(rows, 64), 1024, 8192, min_speedup=1 / 1.25, make_multiply=packed)
    return choose_dtype(device, workload)[0]


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only; on a CPU with its weight matrices packed."""
    import torch

    model = model.to(device, dtype)
    if device.type == "cpu":
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
            layer.forward = partial(packed(layer.weight.detach()), bias=layer.bias)
            if layer is not model.lm_head:  # the head may share the embedding's weight
                layer.weight = None
    return model


def main() -> None:
    args = tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    require(args.max_new_tokens >= 1, f"--max-new-tokens {args.max_new_tokens}: must be 1 or more")
    require(args.num_samples >= 1, f"--num-samples {args.num_samples}: must be 1 or more")
    require(0 <= args.temperature < float("inf"), f"--temperature {args.temperature}: must be 0 (greedy) or more")
    require(args.top_k >= 0, f"--top-k {args.top_k}: must be 0 (all) or more")
    require(0 < args.top_p <= 1, f"--top-p {args.top_p}: must be above 0, at most 1")
    require(abs(args.seed) < 2**63, f"--seed {args.seed}: must be a 64-bit number")
    prompt = read_prompt(args)
    tokens = encode(prompt, args.allow_special)
    import torch

    from system.machine import choose_device
    from training.open_model import open_model
    from training.sampling import Sampler, stream

    device, model = choose_device(args.device), open_model(args.model)
    dtype = fastest_dtype(device, args.num_samples) if args.dtype == "auto" else getattr(torch, args.dtype)
    n, V, T = len(tokens), model.config.vocab_size, model.config.block_size
    require(V > tokenizer.EOT, f"{args.model} has a vocabulary of {V} tokens, fewer than GPT-2's; choose a GPT-2")
    require(n <= T, f"the prompt has {n} tokens, but the context of {args.model} is {T}; shorten it")
    model = prepare(model, device, dtype)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, torch.Generator(device).manual_seed(args.seed))
    prompt_ids = torch.tensor([tokens], device=device)  # (1, n)
    steps = stream(model, prompt_ids, args.max_new_tokens, sampler, args.num_samples)
    ids = until_eot(steps, args.stop_at_eot)
    sys.stdout.reconfigure(errors="replace")  # a non-UTF-8 terminal shows ? instead of failing
    prompt = prompt.encode(errors="replace").decode()
    if args.num_samples == 1 and not args.json:
        return write_stream(prompt, (row[0] for row in ids))
    samples: list[list[int]] = [[] for _ in range(args.num_samples)]
    for row in ids:
        for sample, token in zip(samples, row, strict=True):
            if token is not None:
                sample.append(token)
    for number, sample in enumerate(samples, 1):
        text = tokenizer.encoding().decode(sample)
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": sample}))
        else:
            print(f"--- sample {number}\n{printable(prompt + text)}")


if __name__ == "__main__":
    run_cli(main, many_short_waits=True)
