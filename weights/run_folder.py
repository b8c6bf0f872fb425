"""Which checkpoints a run folder has: the one place that knows their names, and tells whole files from others.

Importing it needs no torch.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path

from system.errors import require

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
    """The runs in a folder, for a message about one that was not found."""
    runs = sorted({str(path.parent) for path in folder.glob(f"*/{files}")})
    return f"{folder} has the runs {', '.join(runs)}" if runs else f"{folder} has no runs"
