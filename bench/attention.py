"""Time each of torch's attention kernels at the shape of GPT-2 124M, forward and backward, and torch's own choice.

    python -m bench.attention                      # B=16, T=1024, head sizes 64 and 128
    python -m bench.attention --batch 64 --rounds 20
    python -m bench.attention --flash-3            # FlashAttention 3, where its package is installed, for torch's

torch chooses by card and shape (usually flash, cuDNN's on Hopper and Blackwell from torch 2.11 on), so the trainer
leaves the choice to it; this table shows whether it is right. The error is the largest difference from the math kernel.
"""

from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
import tyro
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import turns
from system import cli, distributed

KINDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")


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
    args = tyro.cli(Args, description=__doc__)
    if args.flash_3:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    ways = {"torch's choice": [getattr(SDPBackend, kind) for kind in KINDS]}
    ways |= {kind.lower().removesuffix("_attention"): [getattr(SDPBackend, kind)] for kind in KINDS}
    with distributed.session(args.device, args.dtype) as rt:
        print(f"{turns.where(rt)}, B={args.batch}, T={args.sequence_length}, {args.width} channels")
        print("| head size | kernel | forward and backward ms | largest error |\n|---|---|---|---|")
        for hs in (64, 128):
            shape = (args.batch, args.sequence_length, 3, args.width // hs, hs)
            torch.manual_seed(0)
            packed = torch.randn(shape, device=rt.device, dtype=rt.dtype, requires_grad=True)
            q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))  # as in model.py

            def forward() -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023

            def repeatedly() -> None:
                for _ in range(args.repeats):
                    y = forward()
                    torch.autograd.grad(y, packed, y.detach(), retain_graph=True)  # noqa: B023

            with sdpa_kernel(SDPBackend.MATH):
                exact = forward().detach()
            for name, allowed in ways.items():
                try:
                    with sdpa_kernel(allowed):
                        error = (forward() - exact).abs().max().item()
                        times = [turns.seconds(repeatedly, rt) / args.repeats for _ in range(args.rounds + 2)]
                except RuntimeError:  # torch has no such kernel for this device
                    print(f"| {hs} | {name} | unavailable | |")
                    continue
                print(f"| {hs} | {name} | {median(times[2:]) * 1e3:.2f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    cli.run_cli(main)
