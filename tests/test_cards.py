"""GPUs by their data sheets: found as people write them, and as the driver names them."""

import pytest
from helpers import CPU, refused

from system import cards
from system.distributed import Runtime

# Names as the driver spells them, and their peak in TFLOP/s; None: not known, though it looks like a known one.
PEAKS = {
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA H100 80GB HBM3": 989,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA GeForce RTX 2080 Ti": 56.9,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA B300 SXM6 AC": 2250,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 503.8,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA H800 PCIe": None,
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
}


@pytest.mark.parametrize("driver_name, tflops", PEAKS.items())
def test_the_peaks_of_all_ranks_add_up_unless_one_is_unknown(monkeypatch, driver_name, tflops):
    monkeypatch.setattr(Runtime, "gather", lambda rt, name: ["NVIDIA H100 PCIe", driver_name])
    assert cards.total_peak_flops(CPU) == (tflops and pytest.approx((756 + tflops) * 1e12))


@pytest.mark.parametrize("text, names", [
    ("2 x NVIDIA H100 80GB HBM3", ["H100", "H100"]), ("A100-40GB", ["A100-40GB"]), ("h100-pcie", ["H100 PCIe"]),
    ("rtx a6000", ["A6000"]), ("2080Ti+2x3090", ["RTX 2080 Ti", "RTX 3090", "RTX 3090"]),
    ("3090ti+4080 super", ["RTX 3090 Ti", "RTX 4080 SUPER"]),
])  # fmt: skip
def test_cards_are_found_as_people_write_them(text, names):
    assert [card.name for card in cards.find_cards(text)] == names


@pytest.mark.parametrize("text", ["MI250X", "0xH100", "8x", "3050 Ti", "A100-20GB", "3090+", ""])
def test_an_unknown_card_is_refused_with_the_known(text):
    with refused(r"H100 PCIe.*RTX 2080 Ti.*--dry-run"):
        cards.find_cards(text)
