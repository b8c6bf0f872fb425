"""GPUs by their data sheets: their peaks, for MFU, and their memory, for --card.

    find_cards("8xH100")        # ["H100", "H100", ...], eight names in CARDS
    peak_flops(device)          # 9.89e14 on an H100; None for a card that is not in the table

Called by lifecycle/metrics.py and lifecycle/plan.py. Importing it imports no torch. To add a card, add it to CARDS.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from system.cli import require

if TYPE_CHECKING:
    import torch

    from system.distributed import Runtime


class Card(NamedTuple):
    tflops: float  # dense bfloat16 (float16 before Ampere) with float32 accumulation, no sparsity
    gb: int  # memory
    mfu: float = 0.50  # the part of the peak that compiled training reaches: tests/test_plan.py has published runs


# From the vendors' data sheets. GeForce cards do 512 FLOP a clock and multiprocessor: NVIDIA prints the 56.9 TFLOP/s of
# a 2080 Ti ("NVIDIA Turing Architecture In-Depth"), and 71.2, 165.2 and 209.5 of a 3090, 4090 and 5090 (table 3 of the
# RTX Blackwell whitepaper, as others quote it); the other two follow from their clocks. A plain name is the SXM card.
CARDS = {
    "B200": Card(2250, 180, mfu=0.42),
    "H200": Card(989, 141, mfu=0.42),
    "H100": Card(989, 80, mfu=0.42),
    "H100 PCIe": Card(756, 80, mfu=0.42),
    "A100": Card(312, 80),
    "A100-40GB": Card(312, 40),
    "A100 PCIe": Card(312, 80),
    "L40S": Card(362, 48),
    "A6000": Card(154.8, 48),
    "A10": Card(125, 24),
    "A10G": Card(70, 24),
    "L4": Card(121, 24),
    "T4": Card(65, 16),
    "V100": Card(125, 16),
    "RTX 5090": Card(209.5, 32, mfu=0.42),
    "RTX 4090": Card(165.2, 24),
    "RTX 3090": Card(71, 24),
    "RTX 3060": Card(25.5, 12),
    "RTX 2080 Ti": Card(56.9, 11),
    "RTX 2080": Card(42.4, 8),
}


def short_name(name: str) -> str:
    """What distinguishes a card: "NVIDIA A100-SXM4-80GB" -> "a10080gb", "GeForce RTX 2080 Ti" -> "2080ti"."""
    return re.sub(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d?e?|[\s_-]", "", name.lower())


def find_cards(text: str) -> list[str]:
    """The GPUs of "8xH100", "A100-80GB" or "2080Ti+3090", each by its name in CARDS. Raises UserError for a card that
    is not there."""
    names = {short_name(name): name for name in CARDS}
    names |= {f"{short_name(name)}{card.gb}gb": name for name, card in CARDS.items()}

    found = []
    for part in text.split("+"):
        count, asked = re.fullmatch(r"\s*(?:([1-9]\d{0,3})\s*x)?(.*)", part, re.DOTALL).groups()
        known = short_name(asked) in names
        require(known, f"--card {text!r}: {asked!r} is not known; write one of {', '.join(CARDS)}, as in 8xH100")
        found += int(count or 1) * [names[short_name(asked)]]
    return found


def peak_flops(device: torch.device) -> float | None:
    """Peak dense FLOP/s of a card at training precision; None if it is not in CARDS, and its MFU therefore unknown.

    The whole name must match, but for the size of the memory: a 3090 Ti, a laptop's 4090 and a MIG slice of an A100
    are other cards.
    """
    if device.type != "cuda":
        return None
    import torch

    peaks = {short_name(name): 1e12 * card.tflops for name, card in CARDS.items()}
    driver_name = torch.cuda.get_device_name(device)
    return peaks.get(short_name(re.sub(r"\b\d+GB", "", driver_name)))


def total_peak_flops(rt: Runtime) -> float | None:
    """Peak FLOP/s of all ranks' cards together, which may be of several kinds; None if one of them is unknown. Every
    rank must call it."""
    peaks = rt.gather(peak_flops(rt.device))
    return None if None in peaks else sum(peaks)
