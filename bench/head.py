"""The head and its loss, the widest part of a step: ways to multiply by 50,304 columns and compute the cross-entropy.

    python -m bench.head                           # 4,096 rows of 128 channels, as in quickstart
    python -m bench.head --rows 65536 --width 768  # one micro-batch of GPT-2 124M, on a GPU

Forward and backward of the mean cross-entropy of (rows, width) @ (columns, width).T under autocast. "plain" holds all
logits, "ours" is what the trainer does (training/head.py), "torch's" is F.linear_cross_entropy where torch has it
(2.13), and "products alone" is the three matrix products, a lower bound at this precision. The ways take turns in
separate processes; medians over all calls, largest peak memory.
"""

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import tyro

from bench import turns
from system import cli, distributed, machine
from training import head

WAYS = ("plain", "plain compiled", "ours", "ours compiled", "torch's", "torch's chunked", "products alone")


@dataclass(frozen=True)
class Args:
    rows: int = 4096
    width: int = 128
    columns: int = 50_304
    dtype: str = "auto"
    chunk: int = 0
    """Rows of a chunk; 0: as many as the trainer takes."""
    repeats: int = 5
    rounds: int = 3
    child: str = ""
    """Set for the process that measures one way."""


def make(way: str, args: Args, dtype: torch.dtype) -> Callable:
    """loss(x, w, y) of one way."""

    def plain(x, w, y):
        return F.cross_entropy(F.linear(x, w).float(), y)

    def ours(x, w, y, chunk_loss=head.chunk_loss):
        return head.Loss.apply(x, w, None, y, 0.0, torch.is_grad_enabled(), chunk_loss)

    def products(x, w, y):
        x, w = (t.to(dtype) for t in (x, w))
        logits = x @ w.T
        return (logits @ w).sum() + (logits.T @ x).sum()

    if args.chunk:
        head.num_chunks = lambda rows, kind: max(1, rows // args.chunk)
    if way == "ours compiled":  # as the trainer has it: the loop is not part of the graph
        return partial(ours, chunk_loss=torch.compile(head.chunk_loss, dynamic=False))
    base = {"plain": plain, "ours": ours, "products alone": products}
    if way.startswith("torch's"):
        options = torch.nn.LinearCrossEntropyOptions() if way.endswith("chunked") else None
        return lambda x, w, y: F.linear_cross_entropy(x.to(dtype), w.to(dtype), y, options=options)
    return torch.compile(base[way.removesuffix(" compiled")]) if way.endswith("compiled") else base[way]


def child(args: Args) -> None:
    with distributed.session(dtype=args.dtype) as rt:
        torch.manual_seed(0)
        x = torch.randn(args.rows, args.width, device=rt.device, requires_grad=True)
        w = (0.02 * torch.randn(args.columns, args.width, device=rt.device)).requires_grad_()
        y = torch.randint(args.columns, (args.rows,), device=rt.device)
        loss, before, facts = make(args.child, args, rt.dtype), machine.peak_memory(rt.device), {}

        def once() -> None:
            x.grad = w.grad = None
            with rt.autocast(), torch.set_grad_enabled(args.child != "products alone"):
                found = loss(x, w, y)
            if found.requires_grad:
                found.backward()
            facts["loss"] = found.detach()

        times = [1e3 * turns.seconds(once, rt) for _ in range(args.repeats + 3)][3:]
        facts = {"loss": facts["loss"].item(), "grad": 0.0 if x.grad is None else x.grad.norm().item()}
        facts |= {"gb": (machine.peak_memory(rt.device) - before) / 1e9, "where": turns.where(rt)}
        print(json.dumps({"times": times, "ms": statistics.median(times), **facts}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    ways = [w for w in WAYS if not w.startswith("torch's") or hasattr(F, "linear_cross_entropy")]
    found = turns.in_turns("bench.head", ways, args.rounds)
    where = next(iter(found.values()))[0]["where"]
    print(f"{where}, {args.rows} rows, {args.width} channels, {args.columns} columns")
    print("| way | ms | GB above its input | loss | gradient of x |\n|---|---|---|---|---|")
    for way, runs in found.items():
        ms, gb = statistics.median(t for r in runs for t in r["times"]), max(r["gb"] for r in runs)
        print(f"| {way} | {ms:,.1f} | {gb:.2f} | {runs[0]['loss']:.4f} | {runs[0]['grad']:.5f} |")


if __name__ == "__main__":
    cli.run_cli(main)
