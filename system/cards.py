"""GPUs by their data sheets: their peaks, for MFU, and their memory, for --card.

    find_cards("8xH100")        # ["H100", "H100", ...], eight names in read_cards()
    total_peak_flops(rt)        # 9.89e14 on an H100; None for a card that is not in the table

To add a card, add a line to cards.csv.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from system.distributed import Runtime
from system.errors import require
from system.files import read_table
from system.machine import device_name

MIN_WIDTH = 512  # of networks that are made for GPUs: smaller ones come nowhere near a card's peak


class Card(NamedTuple):
    tflops: float  # dense bfloat16 (float16 before Ampere) with float32 accumulation, no sparsity
    gb: int  # memory
    mfu: float  # the part of the peak that compiled training reaches


@cache
def read_cards() -> dict[str, Card]:
    """{name: card} of cards.csv, which has the sources."""
    rows = read_table(Path(__file__).with_name("cards.csv"))
    return {row["card"]: Card(float(row["tflops"]), int(row["gb"]), float(row["mfu"])) for row in rows}


def short_name(name: str) -> str:
    """What distinguishes a card: "NVIDIA A100-SXM4-80GB" -> "a10080gb", "GeForce RTX 2080 Ti" -> "2080ti"."""
    words = "nvidia|geforce|tesla|rtx|blackwell|workstation|server|edition"
    return re.sub(rf"{words}|sxm\d?( ac)?|hbm\d?e?|[\s_-]", "", name.lower())


def find_cards(text: str) -> list[str]:
    """The GPUs of "8xH100", "A100-80GB" or "2080Ti+3090", each by its name in cards.csv. Raises UserError for a card
    that is not there."""
    cards = read_cards()
    names = {short_name(name): name for name in cards}
    names |= {f"{short}{cards[name].gb}gb": name for short, name in names.items()}
    found = []
    for part in text.split("+"):
        count, asked = re.findall(r"(?:([1-9][0-9]*) *x)?(.*)", part.strip())[0]
        name = short_name(asked)
        known = f"known are {', '.join(cards)}; 8xH100 is eight of a kind; on any other, --dry-run measures there"
        require(name in names, f"--card {text}: no card {asked!r}; {known}")
        found += int(count or 1) * [names[name]]
    return found


def total_peak_flops(rt: Runtime) -> float | None:
    """Peak dense FLOP/s of all ranks' cards together, at training precision; None if one of them is not in cards.csv,
    and the MFU therefore unknown. Every rank must call it.

    The whole name must match, but for the size of the memory: a 3080 of a laptop and a MIG slice of an A100 are other
    cards.
    """
    tflops = {short_name(name): card.tflops for name, card in read_cards().items()}
    found = [short_name(re.sub(r"\b\d+GB", "", name)) for name in rt.gather(device_name(rt.device))]
    return 1e12 * sum(tflops[name] for name in found) if tflops.keys() >= set(found) else None
