"""GPU data sheets: for MFU, and for predictions about GPUs that this machine does not have (training/predict.py)."""

import re
from typing import NamedTuple

import torch


class Card(NamedTuple):
    """A card's data sheet. Real programs reach only a fraction of each figure."""

    tflops: float  # dense bfloat16 (float16 before Ampere), no sparsity
    gb: int = 0  # memory
    tb_s: float = 0.0  # bandwidth of the memory
    link_gb_s: int = 0  # to the other cards, per direction: NVLink, or PCIe where NVLink is absent or optional


def geforce(sms: int, boost_ghz: float, gb: int, gb_s: int, link_gb_s: int) -> Card:
    """A GeForce card, from its number of streaming multiprocessors and its boost clock. From Turing to Blackwell each
    does 512 FLOP a clock in 16 bit with float32 accumulation. That gives the rates that NVIDIA prints for the four
    cards that were looked up: 56.9 TFLOP/s of a 2080 Ti ("NVIDIA Turing Architecture In-Depth", developer.nvidia.com),
    71.2, 165.2 and 209.5 of a 3090, 4090 and 5090 (table 3 of the RTX Blackwell whitepaper, as others quote it)."""
    return Card(round(sms * boost_ghz * 512 / 1000, 1), gb, gb_s / 1000, link_gb_s)


# From the vendors' data sheets, by the driver's names; peak_flops takes the longest name that matches. A card sold with
# two sizes of memory has one entry for each size, for --card, and one under the driver's name, which omits the size.
CARDS = {
    "B300": Card(2250, 288, 8.0, 900), "GB300": Card(2500, 288, 8.0, 900), "B200": Card(2250, 180, 8.0, 900),
    "GB200": Card(2500, 186, 8.0, 900), "H200": Card(989, 141, 4.8, 450), "GH200": Card(989, 96, 4.0, 450),
    "H200 NVL": Card(835, 141, 4.8, 450), "H100": Card(989, 80, 3.35, 450), "H100 PCIe": Card(756, 80, 2.0, 64),
    "H100 NVL": Card(835, 94, 3.9, 300), "H800": Card(989, 80, 3.35, 200), "H800 PCIe": Card(756, 80, 2.0, 64),
    "A100": Card(312), "A100-40GB": Card(312, 40, 1.555, 300), "A100-80GB": Card(312, 80, 2.039, 300),
    "A800": Card(312, 80, 2.039, 200), "A40": Card(149.7, 48, 0.696, 32), "A30": Card(165, 24, 0.933, 32),
    "A10G": Card(70, 24, 0.6, 32), "A10": Card(125, 24, 0.6, 32), "L40S": Card(362, 48, 0.864, 32),
    "L40": Card(181, 48, 0.864, 32), "L4": Card(121, 24, 0.3, 32), "T4": Card(65, 16, 0.32, 16),
    "V100": Card(125, 16, 0.9, 150), "V100-PCIE": Card(112, 16, 0.9, 16), "A6000": Card(154.8, 48, 0.768, 32),
    "RTX 6000 Ada": Card(364, 48, 0.96, 32), "RTX 3090": Card(71, 24, 0.936, 32),
    "RTX 4090": Card(165.2, 24, 1.008, 32), "RTX 5090": Card(209.5, 32, 1.792, 64),
    "A4000": Card(76.7, 16, 0.448, 32), "A5000": Card(111.1, 24, 0.768, 32),
    # Multiprocessors, boost clock, memory, its bandwidth and PCIe as in Wikipedia's "List of Nvidia graphics processing
    # units" of June 2025, which also has the figures of the A4000 and A5000 above. NVIDIA's own pages were read for the
    # 2080 Ti alone. The 2070, 2080 and 2080 Ti have the higher clocks of the Founders Editions; of the 2070 and 2080
    # these are from lists made by users.
    "RTX 2060": geforce(30, 1.68, 6, 336, 16), "RTX 2070": geforce(36, 1.71, 8, 448, 16),
    "RTX 2070 SUPER": geforce(40, 1.77, 8, 448, 16), "RTX 2080": geforce(46, 1.80, 8, 448, 16),
    "RTX 2080 SUPER": geforce(48, 1.815, 8, 496, 16), "RTX 2080 Ti": geforce(68, 1.635, 11, 616, 16),
    "RTX 3060": geforce(28, 1.777, 12, 360, 32), "RTX 3060 Ti": geforce(38, 1.665, 8, 448, 32),
    "RTX 3070": geforce(46, 1.725, 8, 448, 32), "RTX 3070 Ti": geforce(48, 1.77, 8, 608, 32),
    "RTX 3080": geforce(68, 1.71, 10, 760, 32), "RTX 3080 Ti": geforce(80, 1.665, 12, 912, 32),
    "RTX 4060": geforce(24, 2.46, 8, 272, 16), "RTX 4060 Ti": geforce(34, 2.54, 8, 288, 16),
    "RTX 4070": geforce(46, 2.475, 12, 504, 32), "RTX 4070 SUPER": geforce(56, 2.475, 12, 504, 32),
    "RTX 4070 Ti": geforce(60, 2.61, 12, 504, 32), "RTX 4070 Ti SUPER": geforce(66, 2.61, 16, 672, 32),
    "RTX 4080": geforce(76, 2.505, 16, 717, 32), "RTX 4080 SUPER": geforce(80, 2.55, 16, 736, 32),
    "RTX 5070": geforce(48, 2.512, 12, 672, 64), "RTX 5070 Ti": geforce(70, 2.452, 16, 896, 64),
    "RTX 5080": geforce(84, 2.617, 16, 960, 64),
}  # fmt: skip
# Cards without bfloat16, which train in float16.
TURING = ("T4", "RTX 2060", "RTX 2070", "RTX 2070 SUPER", "RTX 2080", "RTX 2080 SUPER", "RTX 2080 Ti")
BEFORE_AMPERE = ("V100", "V100-PCIE", *TURING)


def other_forms(name: str) -> list[str]:
    """The cards that are sold under the same name as an SXM module, with less power: "H100 PCIe" and "H100 NVL" of
    H100."""
    return [other for other in CARDS if re.fullmatch(rf"{re.escape(name)}[ -](PCIe|NVL)", other, re.IGNORECASE)]


def peak_flops(device: torch.device) -> float | None:
    """Peak dense FLOP/s of the card at training precision, or None if it is not in CARDS: MFU is then "unknown".

    A 3090 Ti, a laptop 4090 or a MIG slice of an A100 must not match the plain card, whose name is part of its own.
    """
    if device.type != "cuda":
        return None

    # "NVIDIA H100 80GB HBM3" contains "H100", "NVIDIA H100 PCIe" also "H100 PCIe", which is longer and right.
    driver_name = torch.cuda.get_device_name(device)
    not_a_variant = r"(?! (Ti|D|SUPER|Laptop|Max-Q)\b)(?!.*\bMIG\b)"
    matches = [name for name in CARDS if re.search(rf"\b{re.escape(name)}\b{not_a_variant}", driver_name)]
    if not matches:
        return None
    return CARDS[max(matches, key=len)].tflops * 1e12
