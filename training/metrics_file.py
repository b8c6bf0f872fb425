"""Read what a run has written: metrics.jsonl and config.json of its folder. Nothing here needs torch.

    rows = read_metrics(Path("log/gpt2-124m/metrics.jsonl"))    # [{"step": 0, "val_loss": 10.9}, {"step": 1, ...}, ...]

Called by plots.py, by hub.py for the model card, and on resume. training/metrics.py writes the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl, each a dict with at least `step`. Lines that a kill has cut off, and other
    lines that are not rows of metrics, are skipped. Empty if there is no file. Raises OSError if it cannot be read."""
    # A run that has not logged yet has no file.
    if not path.exists():
        return []

    # One row per line.
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        # A run may be writing the last line right now, or have been killed while it did.
        try:
            row = json.loads(line, parse_int=parse_integer)
        except (ValueError, RecursionError):
            continue
        # The file may have been edited: keep only what looks like a row. type() and not isinstance(): True is an int.
        if isinstance(row, dict) and type(row.get("step")) is int and row["step"] >= 0:
            rows.append(row)
    return rows


def parse_integer(digits: str) -> int | float:
    """An integer of JSON; one with too many digits for numpy's int64 becomes a float, which the plots can draw."""
    return int(digits) if len(digits) < 19 else float(digits)


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's config.json; empty if there is none that can be read."""
    # Plots and model cards work without it, so a file that is missing or damaged is no error.
    try:
        config = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def tokens_per_step(run_dir: Path) -> int | None:
    """Tokens per step of a run, from its config.json; None if it is not recorded there."""
    # The file may have been edited; type() and not isinstance(): True is an int.
    tokens = read_config(run_dir).get("total_batch_size")
    return tokens if type(tokens) is int else None
