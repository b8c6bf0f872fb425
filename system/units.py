"""Durations, prices and precisions, read and written the same way everywhere. Nothing here needs torch.

    format_duration(3720)               # "1h02m"
    parse_duration("3h50m")             # 13800.0
    format_cost(3600, 8, 2.5)           # "$20.00": an hour of 8 GPUs at 2.50 dollars each
    dtype_name(torch.bfloat16)          # "bfloat16"

Called by training, for its console line, its plan and --time-limit, and by the benchmarks.
"""

import math
import re

from system.cli import UserError


def format_duration(seconds: float) -> str:
    """4d07h, 1h02m, 3m20s or 12s."""
    # The two largest units are enough to plan by.
    s = int(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    if s >= 60:
        return f"{s // 60}m{s % 60:02d}s"
    return f"{s}s"


def parse_duration(text: str) -> float:
    """Seconds of "3h50m", "90m", "45s" or a plain number of seconds; infinity for "". Raises UserError."""
    # No limit.
    if not text:
        return math.inf

    # A plain number.
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{0,9})?", text):
        return float(text)

    # Each unit is optional, but the order is fixed: days, hours, minutes, seconds. A group is None for a missing unit.
    match = re.fullmatch("".join(rf"(?:([0-9]{{1,9}}){unit})?" for unit in "dhms"), text)
    if not match:
        raise UserError(f"--time-limit {text!r} is not a duration; write it like 3h50m, 90m or 45s")
    seconds_per_unit = (86400, 3600, 60, 1)
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), seconds_per_unit, strict=True))


def cost_usd(seconds: float, gpus: int, gpu_hour_usd: float) -> float:
    """Dollars for `gpus` GPUs during `seconds`, at a price of `gpu_hour_usd` for one GPU and one hour."""
    return seconds / 3600 * gpus * gpu_hour_usd


def format_cost(seconds: float, gpus: int, gpu_hour_usd: float) -> str:
    """$12.34, or the flag that sets the price if `gpu_hour_usd` is 0. Arguments as for cost_usd."""
    if not gpu_hour_usd:
        return "price: --gpu-hour-usd"
    return f"${cost_usd(seconds, gpus, gpu_hour_usd):.2f}"


def dtype_name(dtype: object) -> str:
    """bfloat16 for torch.bfloat16, as flags and checkpoints spell it."""
    return str(dtype).removeprefix("torch.")
