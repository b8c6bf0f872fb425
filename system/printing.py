"""What a script prints: on rank 0 alone, and without control codes; and its units, durations and prices.

Importing it is cheap: nothing here needs torch.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TextIO

from system.errors import UserError

# ------------------------------------------------------------------------- which process this is


def env_number(name: str, default: int) -> int:
    """RANK, LOCAL_RANK or WORLD_SIZE, which torchrun sets for each process of a run, or what holds without torchrun."""
    return int(os.environ.get(name, default))


def env_rank() -> int:
    """This process's rank as set by torchrun; 0 without torchrun."""
    return env_number("RANK", 0)


# ------------------------------------------------------------------------- printing


def printable(text: str) -> str:
    """External text with its terminal control codes (all but newline and tab) replaced, so that no file name, prompt or
    server can drive the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


def print0(text: str, file: TextIO | None = None) -> None:
    """Print on rank 0 only, without control codes, flushed at once. What cannot be written is lost: neither a log on a
    full disk nor a reader that is gone nor a character that a terminal lacks ends a run."""
    if env_rank() == 0:
        with suppress(OSError, UnicodeError):
            print(printable(text), file=file, flush=True)


def progress_bar(items: Iterable, name: str) -> Iterable:
    """The items, with a bar of progress on rank 0's terminal."""
    from tqdm import tqdm

    # None: not where stderr is a file
    return tqdm(items, name, disable=True if env_rank() else None, delay=0.2, leave=False)


# ------------------------------------------------------------------------- units


def format_duration(seconds: float) -> str:
    """103h02m, or 3m20s in the first hour: two units are enough to plan by."""
    minutes = round(seconds / 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{int(seconds) // 60}m{int(seconds) % 60:02d}s"


def parse_duration(text: str) -> float:
    """Seconds of "3h50m", "90m", "45s" or a plain number of seconds; 0 for "". Raises UserError."""
    # Each unit is optional, but the order is fixed.
    pattern = r"(?:(?P<days>\d+)d)?(?:(?P<hours>\d+)h)?(?:(?P<minutes>\d+)m)?(?:(?P<seconds>\d+)s?)?"
    match = re.fullmatch(pattern, text)
    if match is None:
        raise UserError(f"--time-limit {text!r} is not a duration; write it like 3h50m, 90m or 45s")
    return timedelta(**{unit: int(count) for unit, count in match.groupdict("0").items()}).total_seconds()


def format_cost(seconds: float, gpus: int, gpu_hour_usd: float) -> str:
    """$12.34: the price of `gpus` GPUs during `seconds`, where one costs `gpu_hour_usd` for an hour."""
    return f"${seconds / 3600 * gpus * gpu_hour_usd:.2f}"
