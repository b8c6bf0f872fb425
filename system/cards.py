"""GPUs by their data sheets: their peaks, for MFU, and their memory, for --card.

    find_cards("8xH100")        # ["H100", "H100", ...], eight names in CARDS
    total_peak_flops(rt)        # 9.89e14 on an H100; None for a card that is not in the table

Importing it imports no torch. To add a card, add it to CARDS.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from system.errors import require

if TYPE_CHECKING:
    from system.distributed import Runtime


class Card(NamedTuple):
    tflops: float  # dense bfloat16 (float16 before Ampere) with float32 accumulation, no sparsity
    gb: int  # memory
    mfu: float = 0.50  # the part of the peak that compiled training reaches, if no run is published: of similar cards


# A plain name is the SXM card. Where a vendor prints the peak with sparsity, half of it stands here.
CARDS = {
    # NVIDIA's data sheets. HGX B300 and B200: 36 PFLOP/s with sparsity of 8 cards; H100, also for NVL: 1,979, 1,671 and
    # 1,513 TFLOP/s with sparsity; H800 and the GPU of a GH200: as an H100.
    "B300": Card(2250, 288, 0.24),
    "B200": Card(2250, 180, 0.24),
    "GH200": Card(989, 96, 0.42),
    "H200": Card(989, 141, 0.42),
    "H100": Card(989, 80, 0.42),
    "H100 NVL": Card(835, 94, 0.42),
    "H100 PCIe": Card(756, 80, 0.42),
    "H800": Card(989, 80, 0.42),
    "A100": Card(312, 80),
    "A100-40GB": Card(312, 40),
    "A100 PCIe": Card(312, 80),
    # NVIDIA's data sheets of the cards without HBM, and of older ones.
    "L40S": Card(362, 48, 0.30),
    "RTX PRO 6000": Card(503.8, 96, 0.30),  # "NVIDIA RTX Blackwell PRO GPU Architecture", with FP32 accumulation
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
    "RTX 5090": Card(209.5, 32, 0.42),
    "RTX 5080": Card(112.6, 16, 0.42),  # 84 multiprocessors at 2.617 GHz
    "RTX 5070 Ti": Card(87.9, 16, 0.42),  # 70 at 2.452
    "RTX 5070": Card(61.7, 12, 0.42),  # 48 at 2.512
    "RTX 5060 Ti": Card(47.4, 16, 0.42),  # 36 at 2.572
    "RTX 4090": Card(165.2, 24),
    "RTX 4080": Card(97.5, 16),  # 76 at 2.505
    "RTX 4080 SUPER": Card(104.4, 16),  # 80 at 2.550
    "RTX 4070 Ti SUPER": Card(88.2, 16),  # 66 at 2.610
    "RTX 4070 Ti": Card(80.2, 12),  # 60 at 2.610
    "RTX 4070 SUPER": Card(71.0, 12),  # 56 at 2.475
    "RTX 4070": Card(58.3, 12),  # 46 at 2.475
    "RTX 4060 Ti": Card(44.1, 8),  # 34 at 2.535
    "RTX 3090 Ti": Card(80.0, 24),  # 84 at 1.860
    "RTX 3090": Card(71, 24),
    "RTX 3080 Ti": Card(68.2, 12),  # 80 at 1.665
    "RTX 3080": Card(59.5, 10),  # 68 at 1.710
    "RTX 3070": Card(40.6, 8),  # 46 at 1.725
    "RTX 3060": Card(25.5, 12),
    "RTX 2080 Ti": Card(56.9, 11),
    "RTX 2080": Card(42.4, 8),
}


def short_name(name: str) -> str:
    """What distinguishes a card: "NVIDIA A100-SXM4-80GB" -> "a10080gb", "GeForce RTX 2080 Ti" -> "2080ti"."""
    words = "nvidia|geforce|tesla|rtx|blackwell|workstation|server|edition"
    return re.sub(rf"{words}|sxm\d?( ac)?|hbm\d?e?|[\s_-]", "", name.lower())


SHORT_NAMES = {short_name(name): name for name in CARDS}


def find_cards(text: str) -> list[str]:
    """The GPUs of "8xH100", "A100-80GB" or "2080Ti+3090", each by its name in CARDS. Raises UserError for a card that
    is not there."""
    names = SHORT_NAMES | {f"{short}{CARDS[name].gb}gb": name for short, name in SHORT_NAMES.items()}
    found = []
    for part in text.split("+"):
        count, asked = re.findall(r"(?:([1-9][0-9]*) *x)?(.*)", part.strip())[0]
        name = short_name(asked)
        known = f"known are {', '.join(CARDS)}; 8xH100 is eight of a kind; on any other, --dry-run measures there"
        require(name in names, f"--card {text}: no card {asked!r}; {known}")
        found += int(count or 1) * [names[name]]
    return found


def total_peak_flops(rt: Runtime) -> float | None:
    """Peak dense FLOP/s of all ranks' cards together, at training precision; None if one of them is not in CARDS, and
    the MFU therefore unknown. Every rank must call it.

    The whole name must match, but for the size of the memory: a 3080 of a laptop and a MIG slice of an A100 are other
    cards.
    """
    from system.machine import device_name

    total = 0.0
    for driver_name in rt.gather(device_name(rt.device)):
        name = SHORT_NAMES.get(short_name(re.sub(r"\b\d+GB", "", driver_name)))
        if name is None:
            return None
        total += 1e12 * CARDS[name].tflops
    return total
