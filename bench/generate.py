"""How fast are samples and HellaSwag, beside transformers and build-nanogpt's loops?

    python -m bench generate                                   # GPT-2 124M with random weights
    python -m bench generate --samples 64 --device cuda --only samples transformers

The ways take turns in separate processes:

    samples            this project's, with a key-value cache, prepared as by infer.py
    transformers       generate() of transformers, with the same weights in the same dtype
    samples-loop       build-nanogpt's loop: the whole context goes through the model for every token
    hellaswag          this project's scoring, as in hellaswag.py
    hellaswag-loop     build-nanogpt's: the four rows of one example at a time, with logits at every position
    hellaswag-float32  this project's in float32: the table counts the predictions that rounding changes
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import tyro

import hellaswag
from bench import turns

WAYS = ("samples", "transformers", "samples-loop", "hellaswag", "hellaswag-loop", "hellaswag-float32")
TOP_K = 50


@dataclass(frozen=True)
class Args:
    samples: int = 4
    new_tokens: int = 128
    prompt_tokens: int = 8
    data: Path = hellaswag.DEFAULT_PATH
    """HellaSwag rows; `python hellaswag.py` downloads them."""
    limit: int = 48
    """Rows to score."""
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"
    only: tuple[str, ...] = (
        "samples",
        "transformers",
        "samples-loop",
        "hellaswag",
        "hellaswag-loop",
        "hellaswag-float32",
    )


# ------------------------------------------------------------------------- samples


def make_samples(args: Args, model: Any, idx: Any, rt: Any) -> Callable[[int], Any]:
    from infer import prepare

    prepared = prepare(model, rt.device, rt.dtype)
    return lambda n: prepared.generate(idx, n)


def make_transformers(args: Args, model: Any, idx: Any, rt: Any) -> Callable[[int], Any]:
    import torch
    import transformers

    from weights.convert import save_hf

    # The same weights, by way of an export.
    with tempfile.TemporaryDirectory() as folder:
        save_hf(model, f"{folder}/export")
        peer = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/export", dtype=rt.dtype).to(rt.device)
    options = {"do_sample": True, "top_k": TOP_K, "eos_token_id": None, "pad_token_id": 0}
    mask = torch.ones_like(idx)
    return lambda n: peer.generate(idx, max_new_tokens=n, attention_mask=mask, **options)


def make_samples_loop(args: Args, model: Any, idx: Any, rt: Any) -> Callable[[int], Any]:
    """The whole context (B, T) goes through the model for each token."""
    import torch

    def generate(n: int) -> None:
        context = idx
        for _ in range(n):
            with torch.no_grad(), rt.autocast():
                logits, _ = model(context)  # (B, T, V)
            probs = torch.softmax(logits[:, -1, :], dim=-1)  # (B, V)
            top_probs, top_ids = torch.topk(probs, TOP_K, dim=-1)  # (B, 50)
            place = torch.multinomial(top_probs, 1)  # (B, 1)
            context = torch.cat((context, torch.gather(top_ids, -1, place)), dim=1)  # (B, T + 1)

    return generate


SAMPLERS = {"samples": make_samples, "transformers": make_transformers, "samples-loop": make_samples_loop}

# ------------------------------------------------------------------------- HellaSwag


def score_in_batches(model: Any, examples: list, rt: Any) -> Any:
    return hellaswag.score(model, examples, rt)


def score_one_at_a_time(model: Any, examples: list, rt: Any) -> Any:
    """Summed losses of the endings, (n, 4): the four rows of one example, padded to the same length T.

    tokens    context ............... ending 0 ...
              context ............... ending 1 .......
    mask      0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 0 0
    """
    import torch
    import torch.nn.functional as F

    losses = []
    for example in examples:
        start = len(example.context)
        T = start + max(len(ending) for ending in example.endings)
        tokens = torch.zeros(4, T, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, ending in enumerate(example.endings):
            end = start + len(ending)
            tokens[i, :end] = torch.tensor(example.context + ending)
            mask[i, start:end] = 1
        tokens, mask = tokens.to(rt.device), mask.to(rt.device)
        with torch.no_grad(), rt.autocast():
            logits, _ = model(tokens)  # (4, T, V)

        # Position t predicts token t + 1: (4, T - 1, V) -> (4, V, T - 1) -> (4, T - 1)
        token_losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
        losses.append((token_losses * mask[:, 1:]).sum(1).tolist())
    return torch.tensor(losses)


SCORERS = {
    "hellaswag": score_in_batches,
    "hellaswag-loop": score_one_at_a_time,
    "hellaswag-float32": score_in_batches,
}

# ------------------------------------------------------------------------- measuring


def measure(args: Args, way: str) -> dict:
    """In a process of its own: warm up, then generate or score once."""
    import torch

    from model import GPT, GPTConfig
    from system import distributed
    from system.distributed import choose_precision
    from system.machine import supported_dtypes

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        """Milliseconds until the device has finished the work, and its result."""
        rt.synchronize()
        start = time.perf_counter()
        result = work()
        rt.synchronize()
        return 1e3 * (time.perf_counter() - start), result

    dtype = "float32" if way == "hellaswag-float32" else args.dtype
    with distributed.session(args.device) as rt:
        rt = choose_precision(rt, dtype)
        torch.manual_seed(0)
        model = GPT(GPTConfig()).to(rt.device)
        if way in SCORERS:
            examples = hellaswag.load_examples(args.data, args.limit)
            SCORERS[way](model, examples[:4], rt)
            ms, losses = timed(lambda: SCORERS[way](model, examples, rt))
            predictions = hellaswag.normalize(losses, examples).argmin(1)  # (n, 4) -> (n,)
            return {"ms": ms, "done": len(examples), "predictions": predictions.tolist()}

        # One random prompt for all samples. `auto` is what infer.py would take.
        if args.dtype == "auto":
            rt = replace(rt, dtype=supported_dtypes(rt.device)[0])
        idx = torch.randint(50257, (1, args.prompt_tokens), device=rt.device).repeat(args.samples, 1)  # (samples, T)
        generate = SAMPLERS[way](args, model, idx, rt)
        generate(4)
        ms, _ = timed(lambda: generate(args.new_tokens))
        return {"ms": ms, "done": args.samples * args.new_tokens, "predictions": []}


def main(argv: list[str]) -> None:
    args = tyro.cli(Args, args=argv, description=__doc__, prog="python -m bench generate")
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # else the loops would pay for planning each length
    results = turns.take_turns(partial(measure, args), args.only, args.rounds)
    exact = results.get("hellaswag-float32", [{"predictions": []}])[0]["predictions"]
    rows = {}
    for way, runs in results.items():
        is_scoring = way in SCORERS
        ms = statistics.median(run["ms"] for run in runs)
        first = "hellaswag" if is_scoring else "samples"
        ratio = f"{ms / turns.median_of(results[first]):.2f}x" if first in results else ""
        changed = sum(a != b for a, b in zip(runs[0]["predictions"], exact, strict=False))
        speed = f"{1e3 * runs[0]['done'] / ms:.2f} {'rows/s' if is_scoring else 'tokens/s'}"
        rows[way] = [speed, ratio, str(changed) if is_scoring and exact else ""]
    columns = "speed | ours is | other predictions than in float32"
    turns.print_table(columns, rows, f"GPT-2 124M, {args.samples} samples")
