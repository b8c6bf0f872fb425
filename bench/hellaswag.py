"""HellaSwag examples per second: ours against build-nanogpt's one example at a time, same rows, same dtype.

    python -m bench.hellaswag                               # GPT-2 124M, random weights (speed does not depend on them)
    python -m bench.hellaswag --model gpt2 --dtype float32 --limit 200 --device cuda

Both ways and, for comparison, hellaswag.py in float32 take turns in separate processes; medians over the rounds. The
table counts the examples for which a way predicts another ending (by acc_norm) than hellaswag.py in float32 does: that
is how often rounding changes an answer.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import tyro

from bench import turns
from model import GPT, GPTConfig
from system import cli, distributed
from tokens import tokenizer
from training import hellaswag_eval
from training.open_model import open_model

WAYS = ("hellaswag.py", "one at a time", "hellaswag.py in float32")


@dataclass(frozen=True)
class Args:
    model: str = ""
    """Checkpoint, folder or name; default GPT-2 124M with random weights."""
    data: Path = hellaswag_eval.DEFAULT_PATH
    limit: int = 48
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"
    child: str = ""
    """Set for the process that measures one way."""


def score_one_at_a_time(model: GPT, examples: list[hellaswag_eval.Example], rt: distributed.Runtime) -> torch.Tensor:
    """Summed losses of the endings, (n, 4), as build-nanogpt computes them: the four rows of one example at a time,
    padded to the same length T, with logits at every position.

        tokens    context ............... ending 0 ...
                  context ............... ending 1 .......
                  context ............... ending 2 . 0 0 0
                  context ............... ending 3 ... 0 0
        mask      0 0 0 0 0 0 0 0 0 0 0 0 1 1 1 1 1 1 0 0
    """
    losses = []
    for example in examples:
        # The rows (4, T) of context and ending, and the mask (4, T), which is 1 where a row has its ending.
        T = len(example.context) + max(len(ending) for ending in example.endings)
        tokens = torch.zeros(4, T, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, ending in enumerate(example.endings):
            start = len(example.context)
            end = start + len(ending)
            tokens[i, :end] = torch.tensor(example.context + ending)
            mask[i, start:end] = 1
        tokens = tokens.to(rt.device)
        mask = mask.to(rt.device)

        with torch.no_grad(), rt.autocast():
            logits, _ = model(tokens)  # (4, T, V)

        # The loss of every token but the first, as position t predicts token t + 1: (4, T - 1, V) -> (4 * (T - 1), V)
        # -> (4, T - 1). The sum over each ending is what the endings are compared by.
        flat_logits = logits[:, :-1].contiguous().view(-1, logits.size(-1))
        flat_targets = tokens[:, 1:].contiguous().view(-1)
        token_losses = F.cross_entropy(flat_logits, flat_targets, reduction="none").view(4, -1)
        ending_losses = (token_losses * mask[:, 1:]).sum(1)  # (4,)
        losses.append(ending_losses.tolist())  # tolist waits for the device, as .item() does in build-nanogpt
    return torch.tensor(losses)


def measure_one_way(args: Args) -> None:
    """In a process of its own: score all examples in the way args.child, and print the time and the predictions."""
    examples = hellaswag_eval.load_examples(args.data, args.limit)
    dtype = "float32" if args.child == "hellaswag.py in float32" else args.dtype
    with distributed.session(args.device, dtype) as rt:
        # The model: a given one, or GPT-2 124M with the same random weights in every process.
        torch.manual_seed(0)
        model = open_model(args.model) if args.model else GPT(GPTConfig(vocab_size=50304))
        model = model.to(rt.device)

        def score(some: list[hellaswag_eval.Example]) -> torch.Tensor:
            """The summed losses (n, 4) of some examples, in the way args.child."""
            match args.child:
                case "one at a time":
                    return score_one_at_a_time(model, some, rt)
                case "hellaswag.py" | "hellaswag.py in float32":
                    return hellaswag_eval.score(model, some, rt.device, rt)
                case _:
                    raise ValueError(f"--child {args.child!r} must be one of {', '.join(WAYS)}")

        # Warm up with a few examples, then time all of them.
        score(examples[:4])
        results = []
        seconds = turns.measure_seconds(lambda: results.append(score(examples)), rt)

        # The ending with the smallest loss per token, as for acc_norm: (n, 4) -> (n,)
        predictions = hellaswag_eval.normalize(results[0], examples).argmin(1)
        print(
            json.dumps({"ms": 1e3 * seconds, "predictions": predictions.tolist(), "where": turns.describe_machine(rt)})
        )


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        measure_one_way(args)
        return

    # Without this, the one-at-a-time way would pay for cuDNN's planning of each new length.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    tokenizer.encoding()  # if it is missing, one error here instead of one from every process
    runs_by_way = turns.measure_in_turns("bench.hellaswag", WAYS, args.rounds)

    # The table: one row a way, with the number of predictions that are not those of hellaswag.py in float32.
    first_run = next(iter(runs_by_way.values()))[0]
    exact = runs_by_way["hellaswag.py in float32"][0]["predictions"]
    print(f"{args.model or 'GPT-2 124M'} on {first_run['where']}, {len(exact)} examples")
    print("| way | examples/s | other predictions than in float32 | seconds, all rounds |\n|---|---|---|---|")
    for way, runs in runs_by_way.items():
        different = sum(a != b for a, b in zip(runs[0]["predictions"], exact, strict=True))
        examples_per_second = len(exact) / median(run["ms"] for run in runs) * 1e3
        all_seconds = ", ".join(f"{run['ms'] / 1e3:.2f}" for run in runs)
        print(f"| {way} | {examples_per_second:.2f} | {different} | {all_seconds} |")


if __name__ == "__main__":
    cli.run_cli(main)
