"""What a run folder holds: its checkpoints, by their names, and its metrics. Importing this module imports no torch.

steps = complete_steps("log/gpt2-124m")                     # [250, 500]
rows = read_metrics(Path("log/gpt2-124m/metrics.jsonl"))    # [{"step": 0, "val_loss": 10.9}, ...]
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

from system.errors import require

# ------------------------------------------------------------------------- checkpoints

# The step has at least five digits, and no leading zero beyond them: each step has exactly one file name.
CHECKPOINT_FILE = re.compile(r"(?P<kind>model|optim)_(?P<step>[0-9]{5}|[1-9][0-9]{5,17})\.pt")


def model_path(run_dir: str | Path, step: int) -> Path:
    """Where the weights of a step are, or will be."""
    return Path(run_dir) / f"model_{step:05d}.pt"


def optim_path(run_dir: str | Path, step: int) -> Path:
    """Where the train state of a step is, or will be."""
    return Path(run_dir) / f"optim_{step:05d}.pt"


def complete_steps(run_dir: str | Path, needed: Iterable[str] = ("model", "optim")) -> list[int]:
    """The steps of a run folder whose `needed` files are all whole, in ascending order.

    A .pt file is a zip archive, whose directory is at its end: without one, the file was cut off. The content is not
    read; checkpoint.read_file checks it.
    """
    kinds_by_step: dict[int, set[str]] = {}
    for path in Path(run_dir).glob("*.pt"):
        match = CHECKPOINT_FILE.fullmatch(path.name)
        if match and zipfile.is_zipfile(path):
            kinds_by_step.setdefault(int(match["step"]), set()).add(match["kind"])

    # A step with one file is of no use for what needs both: the write was killed, or a file was moved away.
    return sorted(step for step, kinds in kinds_by_step.items() if kinds.issuperset(needed))


def latest_step(run_dir: str | Path) -> int | None:
    """The newest complete step of a run folder, which --resume auto uses; None if there is none."""
    return max(complete_steps(run_dir), default=None)


def newest_model(run_dir: Path) -> Path:
    """The model_*.pt of the newest complete step of a folder. Raises UserError if the folder has none."""
    # A folder pulled from the Hub may have no optimizer files: a model alone is enough for inference.
    steps = complete_steps(run_dir) or complete_steps(run_dir, ["model"])
    require(steps, f"{run_dir} holds no complete checkpoint (model_*.pt); {describe_runs(run_dir)}")
    return model_path(run_dir, steps[-1])


def describe_runs(folder: Path, files: str = "model_*.pt") -> str:
    """The steps or the runs in a folder, for a message about one that was not found."""
    steps = complete_steps(folder, ["model"])
    if steps:
        return f"{folder} has the steps {', '.join(map(str, steps))}"
    runs = sorted({str(path.parent) for path in folder.glob(f"*/{files}")})
    return f"{folder} has the runs {', '.join(runs)}" if runs else f"{folder} has no runs"


# ------------------------------------------------------------------------- metrics


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl, each with at least `step`. Skips a line that a kill has cut off, and whatever else
    is not a row. Empty if there is no file."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's config.json; empty if there is none."""
    path = run_dir / "config.json"
    return json.loads(path.read_text()) if path.exists() else {}


def read_step(run_dir: Path, step: int) -> dict[str, Any]:
    """What a run has measured at a step; empty if nothing is known of it."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    return next((row for row in rows if row["step"] == step), {})


def best_step(run_dir: Path, steps: list[int]) -> int | None:
    """Which of these steps of a run has the lowest val loss; None if none was measured."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row.get("val_loss") and row["step"] in steps]
    return min(rows, key=itemgetter("val_loss"))["step"] if rows else None


def best_saved_steps(run_dir: Path) -> list[int]:
    """The saved steps that may have the best weights: the one with the lowest val loss, and the newest, unless its val
    loss was measured and is higher. A run that was stopped or killed may have ended before that measurement."""
    saved = complete_steps(run_dir, ["model"])
    best = best_step(run_dir, saved)
    if best is None:
        return saved[-1:]
    is_measured = "val_loss" in read_step(run_dir, saved[-1])
    return [best] if is_measured else [best, saved[-1]]


def describe_best(path: Path) -> str:
    """For people who open a run folder, and so its newest weights: which of the others may be better, or ""."""
    newest = complete_steps(path, ["model"])[-1:]
    best = best_saved_steps(path)
    if best == newest:
        return ""
    lowest, loss = model_path(path, best[0]), read_step(path, best[0])["val_loss"]
    if best[1:] == newest:
        return f"; its val loss was not measured; {lowest} has {loss:.4f}"
    return f"; {lowest} has a lower val loss, {loss:.4f}"
