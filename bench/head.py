"""The head and its loss, the widest part of a step: ways to multiply by 50,304 columns and compute the cross-entropy.

    python bench/head.py                           # 4,096 rows of 128 channels, as in quickstart
    python bench/head.py --rows 65536 --width 768  # one micro-batch of GPT-2 124M, on a GPU

Forward and backward of the mean cross-entropy of (rows, width) @ (columns, width).T under autocast. "plain" is what
model.py does, "chunked" keeps logits for --chunk rows at a time and computes the gradient in the forward pass,
"torch's" is F.linear_cross_entropy where torch has it (2.13), and "products alone" is the three matrix products, a
lower bound at this precision. The ways take turns in separate processes; medians of the rounds, largest peak memory.
"""

import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import cli  # noqa: E402

WAYS = ("plain", "plain compiled", "chunked", "chunked compiled", "torch's", "torch's chunked", "products alone")


@dataclass(frozen=True)
class Args:
    rows: int = 4096
    width: int = 128
    columns: int = 50_304
    chunk: int = 1024
    repeats: int = 5
    rounds: int = 3
    way: str = ""
    """Set for the process that measures one way."""


def make(way: str, args: Args, dtype):
    """loss(x, w, y) of one way."""
    import torch
    import torch.nn.functional as F

    def plain(x, w, y):
        return F.cross_entropy(F.linear(x, w).float(), y)

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, y):
            total, dx, dw = 0.0, torch.empty_like(x), torch.zeros_like(w, dtype=torch.float32)
            for i in range(0, len(x), args.chunk):
                part, rows = slice(i, i + args.chunk), torch.arange(len(y[i : i + args.chunk]), device=x.device)
                logits = (x[part] @ w.T).float()
                top = logits.logsumexp(-1, keepdim=True)
                total += (top[:, 0] - logits[rows, y[part]]).sum() / len(x)
                grad = (logits - top).exp()
                grad[rows, y[part]] -= 1
                grad = (grad / len(x)).to(x.dtype)
                dx[part], dw = grad @ w, dw + (grad.T @ x[part])
            ctx.save_for_backward(dx, dw)
            return total

        @staticmethod
        def backward(ctx, g):
            dx, dw = ctx.saved_tensors
            return g * dx, g * dw, None

    def chunked(x, w, y):
        x, w = (t.to(dtype) for t in (x, w))
        with torch.autocast(x.device.type, enabled=False):
            return Chunked.apply(x, w, y)

    def products(x, w, y):
        x, w = (t.to(dtype) for t in (x, w))
        logits = x @ w.T
        return (logits @ w).sum() + (logits.T @ x).sum()

    base = {"plain": plain, "chunked": chunked, "products alone": products}
    if way.startswith("torch's"):
        options = torch.nn.LinearCrossEntropyOptions() if way.endswith("chunked") else None
        return lambda x, w, y: F.linear_cross_entropy(x.to(dtype), w.to(dtype), y, options=options)
    return torch.compile(base[way.removesuffix(" compiled")]) if way.endswith("compiled") else base[way]


def child(args: Args) -> None:
    import torch

    import runtime

    with runtime.session() as rt:
        torch.manual_seed(0)
        x = torch.randn(args.rows, args.width, device=rt.device, requires_grad=True)
        w = (0.02 * torch.randn(args.columns, args.width, device=rt.device)).requires_grad_()
        y, loss, times = torch.randint(args.columns, (args.rows,), device=rt.device), make(args.way, args, rt.dtype), []
        before = rt.peak_memory()
        for _ in range(args.repeats + 3):
            rt.synchronize()
            start = time.perf_counter()
            with rt.autocast(), torch.set_grad_enabled(args.way != "products alone"):
                found = loss(x, w, y)
            if found.requires_grad:
                found.backward()
            rt.synchronize()
            times.append(time.perf_counter() - start)
            grad, x.grad, w.grad = (0.0 if x.grad is None else x.grad.norm().item()), None, None
        facts = {"device": runtime.device_name(rt.device), "torch": torch.__version__, "dtype": str(rt.dtype)}
        used = rt.peak_memory() - before
        print(json.dumps({"times": times[3:], "used": used, "loss": found.item(), "grad": grad, **facts}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.way:
        return child(args)
    import torch

    ways = [w for w in WAYS if not w.startswith("torch's") or hasattr(torch.nn.functional, "linear_cross_entropy")]
    found: dict[str, list[dict]] = {}
    for _ in range(args.rounds):
        for way in ways:
            sizes = [
                w for k in ("rows", "width", "columns", "chunk", "repeats") for w in (f"--{k}", f"{getattr(args, k)}")
            ]
            done = subprocess.run([sys.executable, __file__, "--way", way, *sizes], capture_output=True, text=True)
            if done.returncode:
                print(f"{way}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
                continue
            found.setdefault(way, []).append(json.loads(done.stdout.splitlines()[-1]))
    one = next(iter(found.values()))[0]
    print(f"{one['device']}, {one['dtype']}, torch {one['torch']}, {args.rows} rows, {args.width} channels, "
          f"{args.columns} columns")  # fmt: skip
    print("| way | ms | GB above its input | loss | gradient of x |\n|---|---|---|---|---|")
    for way, runs in found.items():
        ms = statistics.median(t for r in runs for t in r["times"]) * 1e3
        print(f"| {way} | {ms:,.1f} | {max(r['used'] for r in runs) / 1e9:.2f} | {runs[0]['loss']:.4f} | "
              f"{runs[0]['grad']:.5f} |")  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
