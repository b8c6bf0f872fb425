"""Data sheets of GPUs: for MFU, and for predictions about cards that are not here (training/predict.py)."""

import re
from typing import NamedTuple

import torch


class Card(NamedTuple):
    """A card's data sheet. Real programs reach a part of each figure."""

    tflops: float  # dense bfloat16 (float16 before Ampere), no sparsity
    gb: int = 0  # memory
    tb_s: float = 0.0  # bandwidth of the memory
    link_gb_s: int = 0  # to the other cards, per direction: NVLink, or PCIe where the card has or needs no NVLink


# Vendor data sheets. Names as the driver spells them; peak_flops takes the longest that matches. Cards sold with two
# sizes of memory have one name for each, which --card takes, besides the driver's name, which has no size.
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
    "RTX 2080 Ti": Card(56.9, 11, 0.616, 16),
}  # fmt: skip
# Cards without bfloat16, which train in float16.
BEFORE_AMPERE = ("T4", "V100", "V100-PCIE", "RTX 2080 Ti")


def peak_flops(device: torch.device) -> float | None:
    """Peak dense FLOP/s of the card at training precision, or None if it is not in CARDS: MFU is then "unknown".

    A 3090 Ti, a laptop 4090 and a MIG slice of an A100 must not match the card whose name theirs contains.
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
