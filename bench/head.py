"""How fast are the ways to compute the head and its loss, the widest part of a training step?

    python -m bench.head                           # 4,096 rows of 128 channels, as in quickstart
    python -m bench.head --rows 65536 --width 768  # one micro-batch of GPT-2 124M, on a GPU
    python -m bench.head --width 768 --columns 50257 --only "ours compiled" "ours padded compiled"

Each way computes the mean cross-entropy of the logits (rows, width) @ (width, columns), forward and backward, under
autocast. A row of the input is a position of a sequence, a column of the logits is a token of the vocabulary.

    plain              all logits at once, as model.GPT does
    ours               chunk by chunk, as the trainer does (training/head.py)
    ours padded        the same, with columns padded to a multiple of 64; on a GPU the trainer does that, too
    torch's            F.linear_cross_entropy, where torch has it (2.13); "chunked" is its own option for chunks
    products alone     the three matrix products without the loss: a lower bound in this precision

"compiled" ways go through torch.compile. The ways take turns in separate processes. The table has medians over all
calls, the largest peak memory, and the loss and gradient norm, which must be the same for all ways.
"""

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from bench import turns
from system import cli, distributed, machine
from training import head

WAYS = (
    "plain",
    "plain compiled",
    "ours",
    "ours compiled",
    "ours padded compiled",
    "torch's",
    "torch's chunked",
    "products alone",
)
WARMUP_CALLS = 3

# loss(x (rows, width), weight (columns, width), targets (rows,)) -> scalar
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    only: tuple[str, ...] = ()
    """Some of the ways above. Default: all."""
    child: str = ""
    """Set for the process that measures one way."""


def plain(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits at once: (rows, width) -> (rows, columns) -> scalar."""
    return F.cross_entropy(F.linear(x, weight).float(), targets)


def ours(x: Tensor, weight: Tensor, targets: Tensor, chunk_loss: Callable = head.chunk_loss) -> Tensor:
    """The trainer's head, without a bias or a softcap; see training/head.py."""
    backward = torch.is_grad_enabled()
    return head.ChunkedHeadLoss.apply(x, weight, None, targets, 0.0, backward, chunk_loss)


def make_loss_function(way: str, args: Args, dtype: torch.dtype) -> LossFunction:
    """The loss of one of WAYS. It may replace functions of training/head.py, as each way has a process of its own."""

    # torch's loss and the bare products cast their inputs themselves, whatever autocast does with these operations.
    def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, options: object) -> Tensor:
        return F.linear_cross_entropy(x.to(dtype), weight.to(dtype), targets, options=options)

    def products(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        x, weight = x.to(dtype), weight.to(dtype)
        logits = x @ weight.T  # (rows, columns)
        # The two products of the backward pass, with the logits in place of their gradient, which has the same shape.
        d_x = logits @ weight  # (rows, width)
        d_weight = logits.T @ x  # (columns, width)
        return d_x.sum() + d_weight.sum()

    # --chunk replaces the trainer's choice of how many rows a chunk has.
    if args.chunk:
        head.num_chunks = lambda rows, device_type: max(1, rows // args.chunk)
    match way:
        case "plain":
            return plain
        case "plain compiled":
            return torch.compile(plain)
        case "ours":
            return ours
        case "ours compiled":
            # As in the trainer: the loss of a chunk is compiled, the loop over the chunks is not.
            return partial(ours, chunk_loss=torch.compile(head.chunk_loss, dynamic=False))
        case "ours padded compiled":
            head.padded_columns = lambda columns, device_type: math.ceil(columns / 64) * 64
            return partial(ours, chunk_loss=torch.compile(head.chunk_loss, dynamic=False))
        case "torch's":
            return partial(linear_cross_entropy, options=None)
        case "torch's chunked":
            return partial(linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions())
        case "products alone":
            return products
        case _:
            raise ValueError(f"no way {way!r}: add a case here")


def measure_one_way(args: Args) -> None:
    """In a process of its own: measure the way args.child, and print the result as JSON."""
    with distributed.session(dtype=args.dtype) as rt:
        # The input, and a weight of GPT-2's initial scale.
        torch.manual_seed(0)
        x = torch.randn(args.rows, args.width, device=rt.device, requires_grad=True)
        weight = (0.02 * torch.randn(args.columns, args.width, device=rt.device)).requires_grad_()
        targets = torch.randint(args.columns, (args.rows,), device=rt.device)
        loss_function = make_loss_function(args.child, args, rt.dtype)
        memory_before = machine.peak_memory(rt.device)
        losses = []  # of each call

        def forward_and_backward() -> None:
            """One call: the loss and, unless the way has its products in the loss already, the gradients."""
            x.grad = weight.grad = None
            needs_gradients = args.child != "products alone"
            with rt.autocast(), torch.set_grad_enabled(needs_gradients):
                loss = loss_function(x, weight, targets)
            if needs_gradients:
                loss.backward()
            losses.append(loss.detach())

        # The first calls compile and warm up the caches.
        times_ms = [1e3 * turns.measure_seconds(forward_and_backward, rt) for _ in range(WARMUP_CALLS + args.repeats)]
        times_ms = times_ms[WARMUP_CALLS:]
        result = {
            "times": times_ms,
            "ms": statistics.median(times_ms),
            "loss": losses[-1].item(),
            "grad": 0.0 if x.grad is None else x.grad.norm().item(),
            "gb": (machine.peak_memory(rt.device) - memory_before) / 1e9,
            "where": turns.describe_machine(rt),
        }
        print(json.dumps(result))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return measure_one_way(args)

    # The ways to measure: all that this torch has, or those of --only, each once.
    has_linear_cross_entropy = hasattr(F, "linear_cross_entropy")
    known_ways = tuple(way for way in WAYS if has_linear_cross_entropy or not way.startswith("torch's"))
    ways = tuple(dict.fromkeys(args.only)) or known_ways
    for way in ways:
        cli.require(way in known_ways, f"--only {way!r} must be one of {', '.join(known_ways)}")
    results = turns.measure_in_turns("bench.head", ways, args.rounds)

    # The table: one row a way, with the times of all its rounds.
    first_run = next(iter(results.values()))[0]
    print(f"{first_run['where']}, {args.rows} rows, {args.width} channels, {args.columns} columns")
    print("| way | ms | GB above its input | loss | gradient of x |\n|---|---|---|---|---|")
    for way, runs in results.items():
        ms = statistics.median(time for run in runs for time in run["times"])
        gb = max(run["gb"] for run in runs)
        print(f"| {way} | {ms:,.1f} | {gb:.2f} | {runs[0]['loss']:.4f} | {runs[0]['grad']:.5f} |")


if __name__ == "__main__":
    cli.run_cli(main)
