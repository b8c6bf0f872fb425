"""HellaSwag examples per second: ours against build-nanogpt's one example at a time, same rows, same dtype.

    python -m bench.hellaswag                               # GPT-2 124M, random weights (speed does not depend on them)
    python -m bench.hellaswag --model gpt2 --dtype float32 --limit 200 --device cuda

The ways take turns in separate processes; medians over the rounds. The predictions (acc_norm) of each are compared with
those of hellaswag.py in float32: the rate at which rounding changes an answer.
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


def one_at_a_time(model: GPT, examples: list[hellaswag_eval.Example], rt: distributed.Runtime) -> torch.Tensor:
    """Losses (n, 4) as in build-nanogpt: one example's four rows, padded, logits everywhere, shifted loss."""
    out = []
    for e in examples:
        tokens = torch.zeros(4, len(e.context) + max(map(len, e.endings)), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, tail in enumerate(e.endings):
            tokens[i, : len(e.context) + len(tail)] = torch.tensor(e.context + tail)
            mask[i, len(e.context) : len(e.context) + len(tail)] = 1
        tokens, mask = tokens.to(rt.device), mask.to(rt.device)
        with torch.no_grad(), rt.autocast():
            logits = model(tokens)[0]
        flat = logits[:, :-1].contiguous().view(-1, logits.size(-1))
        losses = F.cross_entropy(flat, tokens[:, 1:].contiguous().view(-1), reduction="none").view(4, -1)
        out.append((losses * mask[:, 1:]).sum(1).tolist())  # tolist waits for the device, as .item() does there
    return torch.tensor(out)


def child(args: Args) -> None:
    examples = hellaswag_eval.load_examples(args.data, args.limit)
    with distributed.session(args.device, "float32" if args.child.endswith("float32") else args.dtype) as rt:
        torch.manual_seed(0)
        model = (open_model(args.model) if args.model else GPT(GPTConfig(vocab_size=50304))).to(rt.device)

        def way(some: list[hellaswag_eval.Example]) -> torch.Tensor:
            if args.child == "one at a time":
                return one_at_a_time(model, some, rt)
            return hellaswag_eval.score(model, some, rt.device, rt)

        way(examples[:4])  # warms up
        found = []
        took = turns.seconds(lambda: found.append(way(examples)), rt)
        picks = hellaswag_eval.normalize(found[0], examples).argmin(1)
        print(json.dumps({"ms": 1e3 * took, "picks": picks.tolist(), "where": turns.where(rt)}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # so that no peer pays for planning each new length
    tokenizer.encoding()  # says what is missing once, not in every process
    found = turns.in_turns("bench.hellaswag", WAYS, args.rounds)
    first, exact = next(iter(found.values()))[0], found[WAYS[-1]][0]["picks"]
    print(f"{args.model or 'GPT-2 124M'} on {first['where']}, {len(exact)} examples")
    print("| way | examples/s | other predictions than in float32 | seconds, all rounds |\n|---|---|---|---|")
    for name, runs in found.items():
        differ = sum(a != b for a, b in zip(runs[0]["picks"], exact, strict=True))
        each = ", ".join(f"{run['ms'] / 1e3:.2f}" for run in runs)
        print(f"| {name} | {len(exact) / median(run['ms'] for run in runs) * 1e3:.2f} | {differ} | {each} |")


if __name__ == "__main__":
    cli.run_cli(main)
