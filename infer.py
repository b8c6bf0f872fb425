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
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

import tokenizer
from cli import UserError, printable, run_cli

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from model import GPT, KVCache


@dataclass(frozen=True)
class Args:
    model: tyro.conf.Positional[str]
    """Run folder, .pt file, Hugging Face folder or name on the Hub (gpt2, OWNER/NAME)."""
    prompt: tyro.conf.Positional[str] = ""
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
    """Precision of the weights and the cache; auto means bfloat16 where the hardware can multiply it."""

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
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be {rule}")


def read_prompt(args: Args) -> str:
    """The prompt from the command line, the file or standard input. Raises UserError."""
    if args.file and args.prompt:
        raise UserError(f"both a prompt {args.prompt!r} and --file {args.file} are given; give only one")
    try:
        if args.file:
            return args.file.read_bytes().decode()
        return sys.stdin.buffer.read().decode().removesuffix("\n") if args.prompt == "-" else args.prompt
    except OSError as e:
        raise UserError(f"cannot read the prompt from {args.file} ({e.strerror}); check the path") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{args.file or 'stdin'} is not UTF-8 text (byte {e.start}); convert it with iconv") from None


def encode(text: str, allow_special: bool) -> list[int]:
    """Tokens of a prompt; an empty prompt starts a document."""
    enc = tokenizer.encoding()
    return (enc.encode(text, allowed_special="all") if allow_special else enc.encode_ordinary(text)) or [tokenizer.EOT]


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
        row: list[int | None] = step.tolist()
        done |= {i for i, token in enumerate(row) if stop and token == tokenizer.EOT}
        if len(done) == len(row):
            return
        yield [None if i in done else token for i, token in enumerate(row)]


def packable(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this precision here. bfloat16 needs AVX-512; float32 was not tried on Arm."""
    import torch

    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 and platform.machine() == "x86_64"


def prepare(model: GPT, device: torch.device, dtype: torch.dtype) -> GPT:
    """Move `model` to its device and precision, for inference only. On a CPU, repack the weight matrices into the
    layout that oneDNN multiplies a few rows by fastest, which about doubles the tokens per second of 4 samples."""
    import torch

    model, onednn = model.to(device, dtype), torch.ops.mkldnn
    if device.type == "cpu" and torch.backends.mkldnn.is_available() and packable(dtype):
        reorder, multiply = onednn._reorder_linear_weight, onednn._linear_pointwise  # as in Inductor
        for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)]:
            packed = reorder(layer.weight.detach())
            layer.forward = lambda x, packed=packed, b=layer.bias: multiply(x, packed, b, "none", [], "")
            if layer is not model.lm_head:  # the head may share the embedding's weight
                layer.weight = None
    return model


class Decoder:
    """Reads one position for GPT.stream, with fixed shapes and addresses: on a GPU the hundreds of kernels of a step
    become one CUDA graph, launched at once without waiting for Python. Do not use under autocast."""

    def __init__(self, model: GPT):
        self.model, self.cache = model, None

    def __call__(self, cache: KVCache, new: Tensor) -> Tensor:
        """Logits (B, V) after ids `new` (B, 1), valid until the next call."""
        if cache is not self.cache:
            self.cache, self.new = cache, new.clone()
            self.slots, self.at = new.new_tensor(range(cache.k.size(3))), new.new_tensor([cache.length])
            self.replay = self._captured() if new.is_cuda else self._step
        self.new.copy_(new)
        self.at.fill_(cache.length)
        logits = self.replay()
        cache.length += 1
        return logits

    def _step(self) -> Tensor:
        cache, length = self.cache, self.cache.length
        ahead = self.slots > self.at
        mask = cache.k.new_zeros(1, len(ahead)).masked_fill(ahead, float("-inf"))
        cache.at = self.at
        x = self.model.hidden(self.new, cache, self.at, mask)
        cache.at, cache.length = None, length
        return self.model.logits(x[:, -1])

    def _captured(self) -> Callable[[], Tensor]:
        import torch

        side = torch.cuda.Stream()  # warm-up, as torch.cuda.graph requires: libraries allocate workspaces now
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


def main() -> None:
    args = tyro.cli(Args, description=__doc__, config=(tyro.conf.FlagCreatePairsOff,))
    args.check()
    prompt = read_prompt(args)
    tokens = encode(prompt, args.allow_special)
    import torch

    from convert import open_gpt2
    from runtime import pick_device, pick_dtype

    device = pick_device(args.device)
    model = prepare(open_gpt2(args.model), device, pick_dtype(args.dtype, device))
    if len(tokens) > (limit := model.config.block_size):
        raise UserError(f"the prompt has {len(tokens)} tokens, but the context of {args.model} is {limit}; shorten it")
    steps = model.stream(
        torch.tensor([tokens], device=device), args.max_new_tokens, args.temperature, args.top_k, args.top_p,
        torch.Generator(device).manual_seed(args.seed), args.num_samples,
        Decoder(model) if device.type == "cuda" else None,
    )  # fmt: skip
    ids = until_eot(steps, args.stop_at_eot)
    sys.stdout.reconfigure(errors="replace")  # a non-UTF-8 terminal shows ? instead of failing
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
