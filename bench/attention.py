"""How fast is each of torch's attention kernels, forward and backward, and does torch choose the fastest?

    python -m bench.attention                      # B=16, T=1024, 768 channels in heads of 64 and of 128
    python -m bench.attention --batch 64 --rounds 20
    python -m bench.attention --flash-3            # FlashAttention 3 in place of torch's flash kernel

torch chooses by card and shape: usually flash; from torch 2.11 on, cuDNN's on Hopper and Blackwell. The trainer leaves
the choice to torch, and this table shows whether that is right. The error is the largest difference from the output of
the math kernel, which computes attention as it is defined, with the whole (T, T) matrix of scores.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import turns
from system import cli, distributed

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HEAD_SIZES = (64, 128)  # GPT-2's, and that of the presets of modded-nanogpt
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class Args:
    batch: int = 16
    sequence_length: int = 1024
    width: int = 768
    rounds: int = 5
    repeats: int = 10
    """Calls per round, with one synchronization."""
    flash_3: bool = False
    """Use FlashAttention 3 (its own package, flash_attn_interface) in place of torch's flash kernel."""
    device: str = "auto"
    dtype: str = "auto"


def make_attention(args: Args, hs: int, rt: distributed.Runtime) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """Two functions for heads of size `hs`, on the same random input: one returns attention's output, (B, nh, T, hs);
    the other runs forward and backward args.repeats times."""
    # Queries, keys and values are views into one tensor, as in model.py: (B, T, 3, nh, hs) -> three of (B, nh, T, hs)
    B, T, C = args.batch, args.sequence_length, args.width
    torch.manual_seed(0)
    qkv = torch.randn((B, T, 3, C // hs, hs), device=rt.device, dtype=rt.dtype, requires_grad=True)
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward_and_backward() -> None:
        for _ in range(args.repeats):
            y = forward()  # (B, nh, T, hs)
            # Any gradient of that shape does: here the output itself. The graph is kept for unbind and transpose, which
            # all calls share.
            torch.autograd.grad(y, qkv, y.detach(), retain_graph=True)

    return forward, forward_and_backward


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.flash_3:
        torch.nn.attention.activate_flash_attention_impl("FA3")

    # The rows of the table and the kernels that torch may use for each: first all of them, then each one alone.
    choices = {"torch's choice": list(KERNELS.values())}
    choices |= {name: [kernel] for name, kernel in KERNELS.items()}
    with distributed.session(args.device, args.dtype) as rt:
        print(f"{turns.describe_machine(rt)}, B={args.batch}, T={args.sequence_length}, {args.width} channels")
        print("| head size | kernel | forward and backward ms | largest error |\n|---|---|---|---|")
        for hs in HEAD_SIZES:
            # The output that every kernel is compared with.
            forward, forward_and_backward = make_attention(args, hs, rt)
            with sdpa_kernel(SDPBackend.MATH):
                exact = forward().detach()

            for name, allowed in choices.items():
                # The kernel's largest error, and its time in each round.
                try:
                    with sdpa_kernel(allowed):
                        error = (forward() - exact).abs().max().item()
                        times = [
                            turns.measure_seconds(forward_and_backward, rt) for _ in range(WARMUP_ROUNDS + args.rounds)
                        ]
                except RuntimeError:  # torch has no such kernel for this device
                    print(f"| {hs} | {name} | unavailable | |")
                    continue

                # The first rounds only warm up: kernels are chosen and compiled, and memory is allocated.
                ms_per_call = median(times[WARMUP_ROUNDS:]) / args.repeats * 1e3
                print(f"| {hs} | {name} | {ms_per_call:.2f} | {error:.4f} |", flush=True)


if __name__ == "__main__":
    cli.run_cli(main)
