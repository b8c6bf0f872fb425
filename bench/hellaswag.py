"""HellaSwag examples per second: ours against build-nanogpt's one example at a time, same rows, same dtype.

    python bench/hellaswag.py                               # GPT-2 124M, random weights (speed does not depend on them)
    python bench/hellaswag.py --model gpt2 --dtype float32 --limit 200 --device cuda

The two ways take turns; each figure is the median of the rounds. Their predictions are compared, and below float32 also
with our float32 predictions: the rate at which rounding changes an answer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not bench/, where this file would shadow the hellaswag it measures

import tyro  # noqa: E402

import cli  # noqa: E402
import hellaswag  # noqa: E402


@dataclass(frozen=True)
class Args:
    model: str = ""
    """Checkpoint, folder or name; default GPT-2 124M with random weights."""
    data: Path = hellaswag.DEFAULT_PATH
    limit: int = 48
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"


def one_at_a_time(model, rows, rt):
    """Losses (n, 4) as in build-nanogpt: one example's four rows, padded, logits everywhere, shifted loss."""
    import torch
    import torch.nn.functional as F

    import tokenizer

    enc, out = tokenizer.encoding(), []
    for row in rows:
        ctx = enc.encode_ordinary(row["ctx"])
        tails = [enc.encode_ordinary(" " + e) for e in row["endings"]]
        tokens = torch.zeros(4, len(ctx) + max(map(len, tails)), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for i, tail in enumerate(tails):
            tokens[i, : len(ctx) + len(tail)] = torch.tensor(ctx + tail)
            mask[i, len(ctx) : len(ctx) + len(tail)] = 1
        tokens, mask = tokens.to(rt.device), mask.to(rt.device)
        with torch.no_grad(), rt.autocast():
            logits = model(tokens)[0]
        flat = logits[:, :-1].contiguous().view(-1, logits.size(-1))
        losses = F.cross_entropy(flat, tokens[:, 1:].contiguous().view(-1), reduction="none").view(4, -1)
        out.append((losses * mask[:, 1:]).sum(1).tolist())  # tolist waits for the device, as .item() does there
    return torch.tensor(out)


def main() -> None:
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # so that no peer pays for planning each new length
    import torch

    import runtime
    from convert import open_model
    from model import GPT, GPTConfig

    args = tyro.cli(Args, description=__doc__)
    with runtime.session(args.device, args.dtype) as rt:
        torch.manual_seed(0)
        model = (open_model(args.model) if args.model else GPT(GPTConfig(vocab_size=50304))).to(rt.device)
        examples = hellaswag.load_examples(args.data, args.limit)
        with open(args.data) as f:
            rows = [json.loads(line) for line in f if line.strip()][: len(examples)]
        ways = {
            "one at a time": lambda n: one_at_a_time(model, rows[:n], rt),
            "hellaswag.py": lambda n: hellaswag.score(model, examples[:n], rt.device, rt),
        }
        seconds = {name: [] for name in ways}
        losses = {}
        for r in range(args.rounds + 1):
            for name, way in ways.items():
                start = time.perf_counter()
                losses[name] = way(len(rows) if r else 4)
                if r:  # the first round only warms up
                    seconds[name].append(time.perf_counter() - start)
        speed = {name: len(rows) / statistics.median(s) for name, s in seconds.items()}
        dtype = str(rt.dtype).removeprefix("torch.")
        print(f"{model.num_params():,} parameters, {dtype} on {rt.device}, {torch.get_num_threads()} threads")
        for name, s in seconds.items():
            print(f"{name:14} {speed[name]:8.2f} examples/s   rounds: {', '.join(f'{x:.2f} s' for x in s)}")
        print(f"ratio {speed['hellaswag.py'] / speed['one at a time']:.2f}")
        units = torch.tensor([e.units for e in examples])
        picks = {name: (x / units).argmin(1) for name, x in losses.items()}
        differ = (picks["hellaswag.py"] != picks["one at a time"]).sum()
        print(f"predictions that differ between the two ways: {differ} of {len(rows)}")
        if rt.dtype != torch.float32:
            exact = (hellaswag.score(model, examples, rt.device) / units).argmin(1)
            print(f"our predictions that differ from float32: {(picks['hellaswag.py'] != exact).sum()} of {len(rows)}")


if __name__ == "__main__":
    cli.run_cli(main)
