"""Sample text from a checkpoint, a run folder, a Hugging Face GPT-2 folder or a name on the Hub.

    python infer.py log/quickstart "def main():"                        # one sample, printed as it is generated
    python infer.py gpt2 "Hello, I'm a language model," --num-samples 4 --temperature 0.8 --seed 42
    echo "Once upon a time" | python infer.py log/gpt2-124m - --temperature 0 --json

An empty prompt starts a new document. The prompt must fit the model's context, but the text may outgrow it: the model
then rereads the newer half of the context and drops the older half. The text goes to stdout; a line on stderr says on
which device and in which precision it is generated. The sampling itself is in training/sampling.py.
"""

from __future__ import annotations

import codecs
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
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

# A token reads every weight from memory, so bfloat16, half as many bytes, may win even where training takes float32.
# On a CPU, bfloat16 is taken unless float32 is clearly faster: a choice at exactly 1 would fall differently from one
# run to the next, and the same command should take the same precision again.
MIN_BFLOAT16_SPEEDUP = 1 / 1.25
MAX_MEASURED_ROWS = 64  # keeps the measurement short when many samples are asked for


@dataclass(frozen=True)
class Args:
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)."""
    prompt: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PROMPT]")] = ""
    """Text to continue; - reads standard input (without a final newline)."""
    file: Path | None = None
    """Read the prompt from this file instead, unchanged."""
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
    stop_at_eot: bool = False
    """End a sample where the model ends the document."""
    json: bool = False
    """Write one JSON object per sample."""
    allow_special: bool = False
    """Encode <|endoftext|> in the prompt as the special token; otherwise it is plain text."""
    device: str = "auto"
    """cuda, mps or cpu; auto takes the first of these that is available."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the weights and the cache; auto takes a GPU's best, and measures on a CPU that has bfloat16."""


def check_args(args: Args) -> None:
    """Raise UserError, with the value and the rule, unless every number lies in its range."""
    require(args.max_new_tokens >= 1, f"--max-new-tokens {args.max_new_tokens}: must be 1 or more")
    require(args.num_samples >= 1, f"--num-samples {args.num_samples}: must be 1 or more")
    require(0 <= args.temperature < float("inf"), f"--temperature {args.temperature}: must be 0 (greedy) or more")
    require(args.top_k >= 0, f"--top-k {args.top_k}: must be 0 (all) or more")
    require(0 < args.top_p <= 1, f"--top-p {args.top_p}: must be above 0, at most 1")
    require(abs(args.seed) < 2**63, f"--seed {args.seed}: must be a 64-bit number")


# ------------------------------------------------------------------------- text in and out


def read_prompt(args: Args) -> str:
    """The prompt from the command line, the file or standard input. Raises UserError if it cannot be read."""
    # Exactly one source: the file, standard input or the command line.
    require(not (args.file and args.prompt), f"give either a prompt or --file {args.file}, not both")
    try:
        if args.file:
            return args.file.read_bytes().decode()
        if args.prompt == "-":
            return sys.stdin.buffer.read().decode().removesuffix("\n")
        return args.prompt
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"cannot read the prompt from {args.file or 'stdin'} as UTF-8 text: {e}") from None


def encode_prompt(text: str, allow_special: bool) -> list[int]:
    """Token ids of a prompt. An empty prompt becomes the token that starts a document."""
    # With disallowed_special empty, the text <|endoftext|> is encoded as plain text unless `special` has it.
    special = {"<|endoftext|>"} if allow_special else set()
    ids = tokenizer.encoding().encode(text, allowed_special=special, disallowed_special=())
    return ids or [tokenizer.EOT]


def stop_at_end_of_text(batches: Iterator[torch.Tensor], stop: bool) -> Iterator[list[int | None]]:
    """Yield the ids (num_samples,) of each time step as a list, with None for the samples that have ended, until all
    have ended. A sample ends with its first <|endoftext|>, which is not yielded; with stop=False none ends."""
    ended: set[int] = set()
    for batch in batches:
        ids = batch.tolist()

        # Note the samples that end here. Tokens that are still generated for a sample that has ended are ignored.
        for sample, token in enumerate(ids):
            if stop and token == tokenizer.EOT:
                ended.add(sample)
        if len(ended) == len(ids):
            return
        yield [None if sample in ended else token for sample, token in enumerate(ids)]


def write_stream(prompt: str, ids: Iterator[int]) -> None:
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


def write_samples(prompt: str, steps: Iterator[Sequence[int | None]], num_samples: int, as_json: bool) -> None:
    """Print all samples once they are complete. `steps` yields the ids of all samples for one time step after the
    other, None for a sample that has ended."""
    # Turn the ids of each time step into the ids of each sample.
    samples: list[list[int]] = [[] for _ in range(num_samples)]
    for step_ids in steps:
        for sample, token in zip(samples, step_ids, strict=True):
            if token is not None:
                sample.append(token)

    # JSON escapes control codes by itself; text for a terminal must be made printable.
    for number, sample in enumerate(samples, 1):
        text = tokenizer.encoding().decode(sample)
        if as_json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": sample}))
        else:
            print(f"--- sample {number}\n{printable(prompt + text)}")


# ------------------------------------------------------------------------- the model, made fast


def can_pack_weights(dtype: torch.dtype) -> bool:
    """Whether oneDNN, torch's library for CPUs, packs weights of this precision on this machine."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return False

    # bfloat16 needs AVX-512 on x86.
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()

    # float32 was not tried on Arm.
    return dtype == torch.float32 and platform.machine() == "x86_64"


def pack_linear_weight(weight: torch.Tensor) -> Callable[..., torch.Tensor]:
    """Return a function (x, bias=None) -> x @ weight.T + bias, for a weight (out, in) on a CPU: F.linear, made faster
    for a few rows of x.

    What is packed: a copy of the weight in the order in which oneDNN's kernel reads it. The kernel computes a block of
    outputs at a time, so it wants each tile of the matrix in one piece; oneDNN picks the size of the tiles for the CPU
    and the precision. Drawn with tiles of 2 x 2, the numbers are addresses in memory:

        as nn.Linear has it        packed
         0  1  2  3                 0  1 |  4  5
         4  5  6  7                 2  3 |  6  7
         8  9 10 11                ------+------
        12 13 14 15                 8  9 | 12 13
                                   10 11 | 14 15

    Why: without it, every product first rearranges its weight, or reads it in jumps. While one token is generated,
    there are only as many rows as samples to spread that over. Packing once about doubles the tokens per second of 4
    samples. Where oneDNN packs nothing, the function is plain F.linear.
    """
    import torch

    if not can_pack_weights(weight.dtype):
        return partial(torch.nn.functional.linear, weight=weight)

    # These two operators are what torch's Inductor calls for a Linear with constant weights on a CPU. The last three
    # arguments are for an activation after the product: there is none.
    packed_weight = torch.ops.mkldnn._reorder_linear_weight(weight)
    linear = torch.ops.mkldnn._linear_pointwise
    return lambda x, bias=None: linear(x, packed_weight, bias, "none", [], "")


def fastest_dtype(device: torch.device, num_samples: int) -> torch.dtype:
    """The precision that generates this many samples fastest: known for a GPU, measured on a CPU that has bfloat16."""
    import torch

    from system.distributed import Runtime
    from system.machine import Product, choose_dtype

    # The matrix (8192, 1024) is too large for most caches, as the weights of a model are: a token reads all of them
    # from memory.
    product = Product(
        rows=min(num_samples, MAX_MEASURED_ROWS),
        width=1024,
        columns=8192,
        min_speedup=MIN_BFLOAT16_SPEEDUP,
        make_linear=pack_linear_weight,
    )
    dtype, _ = choose_dtype(Runtime(device, torch.float32), product=product)
    return dtype


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only; on a CPU, pack its weight matrices. Changes the
    model and returns it."""
    import torch

    model = model.to(device, dtype)

    # A GPU needs no packing.
    if device.type == "cpu":
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
            # From now on the layer multiplies by the packed copy.
            layer.forward = partial(pack_linear_weight(layer.weight.detach()), bias=layer.bias)
            # Free the unpacked weight. The head keeps it: it may be the embedding's, and tells new_cache the precision.
            if layer is not model.lm_head:
                layer.weight = None
    return model


def main() -> None:
    # What was asked for. Mistakes are reported before anything heavy is imported.
    args = tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    check_args(args)
    prompt = read_prompt(args)
    prompt_ids = encode_prompt(prompt, args.allow_special)

    # Imported here, because torch takes seconds to import, and --help and the checks above do not need it.
    import torch

    from model import Sampler, stream
    from system.machine import choose_device, device_name, dtype_name
    from training.open_model import open_model

    # Open the model, and check that it knows GPT-2's tokens and that the prompt fits it.
    device = choose_device(args.device)
    model = open_model(args.model)
    vocab_size = model.config.vocab_size
    block_size = model.config.block_size
    require(
        vocab_size > tokenizer.EOT,
        f"{args.model} has a vocabulary of {vocab_size} tokens, fewer than GPT-2's; choose a GPT-2",
    )
    require(
        len(prompt_ids) <= block_size,
        f"the prompt has {len(prompt_ids)} tokens, but the context of {args.model} is {block_size}; shorten it",
    )

    # Make it ready in the precision that was asked for or is the fastest here.
    if args.dtype == "auto":
        dtype = fastest_dtype(device, args.num_samples)
    else:
        dtype = getattr(torch, args.dtype)
    print(f"infer.py: {device_name(device)}, {dtype_name(dtype)}", file=sys.stderr, flush=True)
    model = prepare(model, device, dtype)

    # The same seed gives the same samples: nothing else draws from this generator.
    generator = torch.Generator(device).manual_seed(args.seed)
    sampler = Sampler(args.temperature, args.top_k, args.top_p, generator)

    # Generate lazily: `steps` yields the ids of all samples for one time step after the other.
    idx = torch.tensor([prompt_ids], device=device)  # (1, T)
    batches = stream(model, idx, args.max_new_tokens, sampler, args.num_samples)
    steps = stop_at_end_of_text(batches, args.stop_at_eot)

    # Write. A terminal that is not UTF-8, or a prompt of broken Unicode, shows ? instead of failing.
    sys.stdout.reconfigure(errors="replace")
    prompt = prompt.encode(errors="replace").decode()

    # One sample appears as it is generated; several would be interleaved, so they are printed at the end.
    if args.num_samples == 1 and not args.json:
        write_stream(prompt, (ids[0] for ids in steps))
    else:
        write_samples(prompt, steps, args.num_samples, args.json)


if __name__ == "__main__":
    run_cli(main, many_short_waits=True)
