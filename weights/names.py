"""Which checkpoints a run folder has: the one place that knows their names, and tells whole files from others.

Importing it needs no torch, so the supervisor of a run starts at once.
"""

from __future__ import annotations

import re
import shlex
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from system.cli import UserError, require, suggest

# The step has at least five digits, and no leading zero beyond them: each step has exactly one file name.
CHECKPOINT_FILE = re.compile(r"(?P<kind>model|optim)_(?P<step>[0-9]{5}|[1-9][0-9]{5,17})\.pt")


def model_path(run_dir: str | Path, step: int) -> Path:
    """Where the weights of a step are, or will be."""
    return Path(run_dir) / f"model_{step:05d}.pt"


def optim_path(run_dir: str | Path, step: int) -> Path:
    """Where the train state of a step is, or will be."""
    return Path(run_dir) / f"optim_{step:05d}.pt"


def is_complete(path: Path) -> bool:
    """Whether a .pt file was written to its end: it is a zip archive, and torch.save writes the archive's directory
    last. The content is not read; read_file checks it."""
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.infolist())
    # FileNotFoundError: --keep has just deleted it. NotImplementedError: a newer zip version.
    except (zipfile.BadZipFile, ValueError, FileNotFoundError, IsADirectoryError, NotImplementedError):
        return False


def complete_steps(run_dir: str | Path, needed: Iterable[str] = ("model", "optim")) -> list[int]:
    """The steps of a run folder whose `needed` files are all complete, in ascending order."""
    kinds_by_step: dict[int, set[str]] = {}
    for path in Path(run_dir).glob("*.pt"):
        match = CHECKPOINT_FILE.fullmatch(path.name)
        if match and is_complete(path):
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
    if steps:
        return model_path(run_dir, steps[-1])

    problem = f"{run_dir} holds no complete checkpoint (model_*.pt)"
    others = run_dir / "ckpt.pt"
    fix = f"nanoGPT's {others} first: python hub.py import {shlex.quote(str(others))} OUT_DIR"
    require(not others.is_file(), f"{problem}; {fix}")
    when = "train_gpt2.py saves when it is stopped, and at its end; train_gpt2_plain.py at its end alone"
    raise UserError(f"{problem}; {describe_runs(run_dir) or when}")


def find_runs(folder: Path, files: str = "model_*.pt") -> list[str]:
    """The runs in a folder, which are its folders with such files."""
    return list(dict.fromkeys(str(path.parent) for path in sorted(folder.glob(f"*/{files}"))))


def describe_nearby(path: Path, files: str = "model_*.pt") -> str:
    """What a message about a missing file or folder can add: the runs beside it, or where to look for them."""
    meant = suggest(str(path), find_runs(path.parent, files))
    return meant + (describe_runs(path.parent, files) or f"look into {path.parent}")


def describe_runs(folder: Path, files: str = "model_*.pt") -> str:
    """The runs in a folder, for a message about one that was not found; "" if there are none."""
    runs = find_runs(folder, files)
    return f"{folder} has the runs {', '.join(runs)}" if runs else ""


def step_of(path: Path) -> int:
    """The step of a file that is named like a checkpoint's."""
    match = CHECKPOINT_FILE.fullmatch(path.name)
    assert match
    return int(match["step"])


def damaged_models(run_dir: str | Path) -> list[Path]:
    """The files named like a step's weights that were not written to their end. Nothing here leaves one: a model file
    gets its name when it is complete."""
    paths = sorted(Path(run_dir).glob("model_*.pt"))
    return [path for path in paths if CHECKPOINT_FILE.fullmatch(path.name) and not is_complete(path)]


def fingerprint(model_file: Path) -> str:
    """A text that differs if either file of a checkpoint does: the CRC-32 of what the archives say about their
    records, which is read quickly."""
    crc = 0
    for path in (model_file, model_file.with_name(model_file.name.replace("model_", "optim_"))):
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                crc = zlib.crc32(f"{record.filename} {record.CRC}".encode(), crc)
    return f"{crc:08x}"
