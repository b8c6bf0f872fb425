"""GPUs by their data sheets: their peaks, for MFU, and their memory, for --card.

    find_cards("8xH100")        # ["H100", "H100", ...], eight names in CARDS
    peak_flops(device)          # 9.89e14 on an H100; None for a card that is not in the table

Importing it imports no torch. To add a card, add it to CARDS.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from system.errors import require

if TYPE_CHECKING:
    import torch

    from system.distributed import Runtime


class Card(NamedTuple):
    tflops: float  # dense bfloat16 (float16 before Ampere) with float32 accumulation, no sparsity
    gb: int  # memory
    mfu: float = 0.50  # the part of the peak that compiled training reaches, if no run is published: of similar cards


# A plain name is the SXM card. Where a vendor prints the peak with sparsity, half of it stands here.
CARDS = {
    # NVIDIA's data sheets. HGX B300 and B200: 36 PFLOP/s with sparsity of 8 cards; H100, also for NVL: 1,979, 1,671 and
    # 1,513 TFLOP/s with sparsity; H800 and the GPU of a GH200: as an H100.
    "B300": Card(2250, 288, mfu=0.24),
    "B200": Card(2250, 180, mfu=0.24),
    "GH200": Card(989, 96, mfu=0.42),
    "H200": Card(989, 141, mfu=0.42),
    "H100": Card(989, 80, mfu=0.42),
    "H100 NVL": Card(835, 94, mfu=0.42),
    "H100 PCIe": Card(756, 80, mfu=0.42),
    "H800": Card(989, 80, mfu=0.42),
    "A100": Card(312, 80),
    "A100-40GB": Card(312, 40),
    "A100 PCIe": Card(312, 80),
    # NVIDIA's data sheets of the cards without HBM, and of older ones.
    "L40S": Card(362, 48, mfu=0.30),
    "RTX PRO 6000": Card(503.8, 96, mfu=0.30),  # "NVIDIA RTX Blackwell PRO GPU Architecture", with FP32 accumulation
    "A6000": Card(154.8, 48),
    "A40": Card(149.7, 48),
    "A10": Card(125, 24),
    "A10G": Card(70, 24),
    "L4": Card(121, 24),
    "T4": Card(65, 16),
    "V100": Card(125, 16),
    # GeForce cards do 512 FLOP a clock and multiprocessor: NVIDIA prints the 56.9 TFLOP/s of a 2080 Ti ("NVIDIA Turing
    # Architecture In-Depth"), and 71.2, 165.2 and 209.5 of a 3090, 4090 and 5090 (table 3 of the RTX Blackwell
    # whitepaper, as others quote it); the others follow from their data sheets' boost clocks and multiprocessors.
    "RTX 5090": Card(209.5, 32, mfu=0.42),
    "RTX 5080": Card(112.6, 16, mfu=0.42),  # 84 multiprocessors at 2.617 GHz
    "RTX 5070 Ti": Card(87.9, 16, mfu=0.42),  # 70 at 2.452
    "RTX 4090": Card(165.2, 24),
    "RTX 4080": Card(97.5, 16),  # 76 at 2.505
    "RTX 4070": Card(58.3, 12),  # 46 at 2.475
    "RTX 3090": Card(71, 24),
    "RTX 3080": Card(59.5, 10),  # 68 at 1.710
    "RTX 3060": Card(25.5, 12),
    "RTX 2080 Ti": Card(56.9, 11),
    "RTX 2080": Card(42.4, 8),
}


def short_name(name: str) -> str:
    """What distinguishes a card: "NVIDIA A100-SXM4-80GB" -> "a10080gb", "GeForce RTX 2080 Ti" -> "2080ti"."""
    words = "nvidia|geforce|tesla|rtx|blackwell|workstation|server|edition"
    return re.sub(rf"{words}|sxm\d?( ac)?|hbm\d?e?|[\s_-]", "", name.lower())


def find_cards(text: str) -> list[str]:
    """The GPUs of "8xH100", "A100-80GB" or "2080Ti+3090", each by its name in CARDS. Raises UserError for a card that
    is not there."""
    names = {short_name(name): name for name in CARDS}
    names |= {f"{short_name(name)}{card.gb}gb": name for name, card in CARDS.items()}

    found = []
    for part in text.split("+"):
        count, asked = re.findall(r"(?:([1-9][0-9]*) *x)?(.*)", part.strip())[0]
        name = short_name(asked)
        known = f"known are {', '.join(CARDS)}; 8xH100 is eight of a kind"
        require(name in names, f"--card {text}: no card {asked!r}; {known}")
        found += int(count or 1) * [names[name]]
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
