"""Sample text from a checkpoint, a run folder, a Hugging Face GPT-2 folder or a name on the Hub.

    python infer.py log/quickstart "def main():"                        # one sample, written as it is made
    python infer.py gpt2 "Hello, I'm a language model," --num-samples 4 --temperature 0.8 --seed 42
    echo "Once upon a time" | python infer.py log/gpt2-124m - --temperature 0 --json

An empty prompt starts a new document. The prompt must fit the model's context; the text may outgrow it: the context
then slides, its newer half is read again and the older one forgotten.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

import tokenizer
from cli import UserError, printable, run_cli
from runtime import pick_device, pick_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from model import GPT, KVCache


@dataclass(frozen=True)
class Args:
    model: tyro.conf.Positional[str]
    """Run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)."""
    prompt: tyro.conf.Positional[str] = ""
    """Text to continue; - reads standard input (a newline at its end is left out)."""
    file: Path | None = None
    """Read the prompt from this file instead, as it stands."""
    max_new_tokens: int = 64
    num_samples: int = 1
    temperature: float = 1.0
    """0 takes the likeliest token every time."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens whose probabilities reach this."""
    seed: int = 42
    """Same seed and flags, same machine: same text."""
    stop_at_eot: bool = False
    """End a sample where the model ends the document."""
    json: bool = False
    """Write one JSON object a sample."""
    allow_special: bool = False
    """Read <|endoftext|> in the prompt as that token; it is plain text otherwise."""
    device: str = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the weights and of the cache; auto is bfloat16 where the hardware multiplies it."""

    def check(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "1 or more"),
            "num_samples": (self.num_samples >= 1, "1 or more"),
            "temperature": (0 <= self.temperature < float("inf"), "0 (greedy) or more"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0, at most 1"),
            "seed": (abs(self.seed) < 2**63, "a 64-bit number"),
        }
        for name, (good, rule) in rules.items():
            if not good:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be {rule}")


def read_prompt(args: Args) -> str:
    """The prompt from the command line, the file or standard input. Raises UserError."""
    if args.file and args.prompt:
        raise UserError(f"a prompt {args.prompt!r} and --file {args.file} are given; give one of them")
    try:
        if args.file:
            return args.file.read_bytes().decode()
        return sys.stdin.buffer.read().decode().removesuffix("\n") if args.prompt == "-" else args.prompt
    except OSError as e:
        raise UserError(f"cannot read the prompt from {args.file} ({e.strerror}); check the path") from None
    except UnicodeDecodeError as e:
        raise UserError(f"the text of {args.file or 'stdin'} is not UTF-8 (byte {e.start}); use iconv") from None


def encode(text: str, allow_special: bool) -> list[int]:
    """Tokens of a prompt; an empty one is the start of a document."""
    enc = tokenizer.encoding()
    return (enc.encode(text, allowed_special="all") if allow_special else enc.encode_ordinary(text)) or [tokenizer.EOT]


def write_stream(prompt: str, ids: Iterator[int]) -> None:
    """Print a prompt and its continuation as it comes; a character whose bytes span tokens appears when whole."""
    enc, utf8 = tokenizer.encoding(), codecs.getincrementaldecoder("utf-8")("replace")
    print(printable(prompt), end="", flush=True)
    for i in ids:
        print(printable(utf8.decode(enc.decode_single_token_bytes(i))), end="", flush=True)
    print(printable(utf8.decode(b"", final=True)), flush=True)


def until_eot(steps: Iterator[torch.Tensor], stop: bool) -> Iterator[list[int | None]]:
    """The ids of every step, None for samples that have ended; the last step is the one in which all have."""
    done: set[int] = set()
    for step in steps:
        row: list[int | None] = step.tolist()
        done |= {i for i, token in enumerate(row) if stop and token == tokenizer.EOT}
        if len(done) == len(row):
            return
        yield [None if i in done else token for i, token in enumerate(row)]


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only: on a CPU with bfloat16 the weight matrices are put
    in the layout that oneDNN multiplies a few rows by fastest, which nearly doubles the tokens a second."""
    import torch

    model = model.to(device, dtype)
    if device.type == "cpu" and dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        reorder, multiply = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise  # as Inductor
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
            packed = reorder(layer.weight.detach())
            layer.forward = lambda x, packed=packed, b=layer.bias: multiply(x, packed, b, "none", [], "")
            if layer is not model.lm_head:  # whose weight may be the embedding's too
                layer.weight = None
    return model


class Decoder:
    """What reads one position for GPT.stream, in shapes and addresses that stay the same: on a GPU the hundreds of
    kernels of a step are then one CUDA graph, launched at once, and no longer wait for Python. Not under autocast."""

    def __init__(self, model: GPT):
        self.model, self.cache = model, None

    def __call__(self, cache: KVCache, new: Tensor) -> Tensor:
        """Logits (B, V) after ids `new` (B, 1); they hold until the next call."""
        if cache is not self.cache:
            self.cache, self.new, self.at = cache, new.clone(), new.new_tensor([cache.length])
            self.replay = self._captured() if new.is_cuda else self._step
        self.new.copy_(new)
        self.at.fill_(cache.length)
        logits = self.replay()
        cache.length += 1
        return logits

    def _step(self) -> Tensor:
        cache, length = self.cache, self.cache.length
        cache.at = self.at
        logits = self.model.logits(self.model.hidden(self.new, cache)[:, -1])
        cache.at, cache.length = None, length
        return logits

    def _captured(self) -> Callable[[], Tensor]:
        import torch

        side = torch.cuda.Stream()  # warm-up, as torch.cuda.graph asks for: libraries take their workspaces now
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def load(args: Args) -> GPT:
    """The model that the command line names, ready for inference. Raises UserError."""
    from convert import open_gpt2

    device = pick_device(args.device)
    return prepare(open_gpt2(args.model), device, pick_dtype(args.dtype, device))


def main() -> None:
    args = tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    args.check()
    prompt = read_prompt(args)
    tokens = encode(prompt, args.allow_special)
    model = load(args)
    if len(tokens) > (limit := model.config.block_size):
        raise UserError(f"the prompt has {len(tokens)} tokens, the context of {args.model} {limit}; shorten the prompt")
    import torch

    steps = model.stream(
        torch.tensor([tokens], device=model.device), args.max_new_tokens, args.temperature, args.top_k, args.top_p,
        torch.Generator(model.device).manual_seed(args.seed), args.num_samples,
        Decoder(model) if model.device.type == "cuda" else None,
    )  # fmt: skip
    ids = until_eot(steps, args.stop_at_eot)
    sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? instead of failing
    prompt = prompt.encode(errors="replace").decode()
    if args.num_samples == 1 and not args.json:
        return write_stream(prompt, (row[0] for row in ids))
    samples = [[i for i in column if i is not None] for column in zip(*ids, strict=True)] or [[]] * args.num_samples
    for number, sample in enumerate(samples, 1):
        text = tokenizer.encoding().decode(sample)
        if args.json:
            print(json.dumps({"prompt": prompt, "text": text, "tokens": sample}))
        else:
            print(f"--- sample {number}\n{printable(prompt + text)}")


if __name__ == "__main__":
    run_cli(main, brief_waits=True)
