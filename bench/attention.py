"""Time each of torch's attention kernels at the shape of GPT-2 124M, forward and backward, and torch's own choice.

    python bench/attention.py                      # B=16, T=1024, head sizes 64 and 128
    python bench/attention.py --batch 64 --rounds 20
    python bench/attention.py --flash-3            # FlashAttention 3, where its package is installed, for torch's

torch chooses by card and shape (usually flash, cuDNN's on Hopper and Blackwell from torch 2.11 on), so the trainer
leaves the choice to it; this table shows whether it is right. The error is the largest difference from the math kernel.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import tyro  # noqa: E402

import cli  # noqa: E402


@dataclass(frozen=True)
class Args:
    batch: int = 16
    sequence_length: int = 1024
    width: int = 768
    rounds: int = 5
    repeats: int = 10
    """Calls per round, with one synchronization."""
    flash_3: bool = False
    """Let FlashAttention 3 (its own package, flash_attn_interface) stand for torch's flash kernel."""
    device: str = "auto"
    dtype: str = "auto"


def main() -> None:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    import runtime

    args = tyro.cli(Args, description=__doc__)
    if args.flash_3:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except ImportError as e:
            raise cli.UserError(f"FlashAttention 3 is not installed ({e}); see its project's README, hopper/") from None
    kinds = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    with runtime.session(args.device, args.dtype) as rt:
        print(f"{runtime.device_name(rt.device)}, {rt.dtype}, torch {torch.__version__}, B={args.batch}, "
              f"T={args.sequence_length}, {args.width} channels")  # fmt: skip
        print("| head size | kernel | forward and backward ms | largest error |\n|---|---|---|---|")
        for hs in (64, 128):
            shape = (args.batch, args.sequence_length, 3, args.width // hs, hs)
            torch.manual_seed(0)
            packed = torch.randn(shape, device=rt.device, dtype=rt.dtype, requires_grad=True)
            q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))  # as in model.py
            ways = {"torch's choice": [getattr(SDPBackend, kind) for kind in kinds]}
            ways |= {kind.lower().removesuffix("_attention"): [getattr(SDPBackend, kind)] for kind in kinds}
            with sdpa_kernel(SDPBackend.MATH):
                exact = F.scaled_dot_product_attention(q, k, v, is_causal=True).detach()
            for name, allowed in ways.items():
                times = []
                try:
                    with sdpa_kernel(allowed):
                        for _ in range(args.rounds + 2):
                            rt.synchronize()
                            t0 = time.perf_counter()
                            for _ in range(args.repeats):
                                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                                torch.autograd.grad(y, packed, y.detach(), retain_graph=True)
                            rt.synchronize()
                            times.append((time.perf_counter() - t0) / args.repeats)
                except RuntimeError:  # torch has no such kernel for this device
                    print(f"| {hs} | {name} | unavailable | |")
                    continue
                error = (y - exact).abs().max().item()
                print(f"| {hs} | {name} | {statistics.median(times[2:]) * 1e3:.2f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    cli.run_cli(main)
