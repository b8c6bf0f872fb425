"""GPUs by their data sheets: their peaks, for MFU, and their memory, for --card.

    find_cards("8xH100")        # [Card("H100", ...), Card("H100", ...), ...], eight of them
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
    name: str
    tflops: float  # dense bfloat16 (float16 before Ampere) with float32 accumulation, no sparsity
    gb: int  # memory
    mfu: float  # the part of the peak that compiled training reaches


@cache
def read_cards() -> list[Card]:
    """The cards of cards.csv, which has the sources."""
    rows = read_table(Path(__file__).with_name("cards.csv"))
    return [Card(row["card"], float(row["tflops"]), int(row["gb"]), float(row["mfu"])) for row in rows]


def short_name(name: str) -> str:
    """What distinguishes a card: "NVIDIA A100-SXM4-80GB" -> "a10080gb", "GeForce RTX 2080 Ti" -> "2080ti"."""
    words = "nvidia|geforce|tesla|rtx|blackwell|workstation|server|edition"
    return re.sub(rf"{words}|sxm\d?( ac)?|hbm\d?e?|[\s_-]", "", name.lower())


def find_cards(text: str) -> list[Card]:
    """The GPUs of "8xH100", "A100-80GB" or "2080Ti+3090". Raises UserError for a card that is not in cards.csv."""
    cards = {short_name(card.name): card for card in read_cards()}
    known = f"known are {', '.join(card.name for card in cards.values())}"
    cards |= {f"{name}{card.gb}gb": card for name, card in cards.items()}
    found = []
    for part in text.split("+"):
        count, asked = re.findall(r"(?:([1-9][0-9]*) *x)?(.*)", part.strip())[0]
        name = short_name(asked)
        fix = "8xH100 is eight of a kind; on any other, --dry-run measures there"
        require(name in cards, f"--card {text}: no card {asked!r}; {known}; {fix}")
        found += int(count or 1) * [cards[name]]
    return found


def total_peak_flops(rt: Runtime) -> float | None:
    """Peak dense FLOP/s of all ranks' cards together, at training precision; None if one of them is not in cards.csv,
    and the MFU therefore unknown. Every rank must call it.

    The whole name must match, but for the size of the memory: a 3080 of a laptop and a MIG slice of an A100 are other
    cards.
    """
    tflops = {short_name(card.name): card.tflops for card in read_cards()}
    found = [short_name(re.sub(r"\b\d+GB", "", name)) for name in rt.gather(device_name(rt.device))]
    return 1e12 * sum(tflops[name] for name in found) if tflops.keys() >= set(found) else None
