"""Checkpoints: complete or absent, written behind the training, loaded without unpickling anything but tensors.

    OUT/model_{step:05d}.pt   weights in float32 and the model's config: what you copy to a laptop
    OUT/optim_{step:05d}.pt   optimizers, step, random states, the run's config: what else resuming needs

A step is complete when both files are whole. Each is written under a temporary name, synced to disk, then renamed.
"""

from __future__ import annotations

import re
import threading
import zipfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from model import GPT, GPTConfig
from system.cli import UserError, print0, require
from system.files import atomic_write

NAME = re.compile(r"(model|optim)_([0-9]{5}|[1-9][0-9]{5,17})\.pt")
FORMAT = 1


# ------------------------------------------------------------------------- which there are


def model_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / f"model_{step:05d}.pt"


def optim_path(run_dir: str | Path, step: int) -> Path:
    return Path(run_dir) / f"optim_{step:05d}.pt"


def is_complete(path: Path) -> bool:
    """Whether a .pt file ends in a zip directory, which torch.save writes last and is only valid with the rest."""
    try:
        with zipfile.ZipFile(path) as z:
            return bool(z.infolist())
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError):  # the last: a future zip version
        return False


def complete_steps(run_dir: str | Path, needed: Iterable[str] = ("model", "optim")) -> list[int]:
    """Steps of the run folder whose `needed` files are whole, sorted."""
    found: dict[int, set[str]] = {}
    for path in Path(run_dir).glob("*.pt"):
        if (m := NAME.fullmatch(path.name)) and is_complete(path):
            found.setdefault(int(m[2]), set()).add(m[1])
    return sorted(step for step, kinds in found.items() if kinds.issuperset(needed))


def latest_step(run_dir: str | Path) -> int | None:
    """Newest complete step of a run folder, or None."""
    return max(complete_steps(run_dir), default=None)


# ------------------------------------------------------------------------- reading


def load(path: str | Path) -> tuple[GPT, dict[str, Any]]:
    """The GPT (CPU, eval mode) in a .pt file or in the newest complete step of a run folder, and the file's other
    entries: config, step, val_loss, preset. Raises UserError."""
    path = Path(path)
    if path.is_dir():
        path = newest_model(path)
    found = read(path)
    require("model" in found, f"{path} contains no model; use the model_*.pt file")
    try:
        return GPT.from_state_dict(GPTConfig.from_dict(found["config"]), found.pop("model")).eval(), found
    except (RuntimeError, KeyError, TypeError, ValueError, AttributeError) as e:
        why = " ".join(str(e).split())[:300]
        mend = "use an earlier one, or the model.py it was made with"
        raise UserError(f"{path}: its weights do not fit its config here ({why}); {mend}") from None


def newest_model(run_dir: Path) -> Path:
    """The model_*.pt of a folder's newest complete step. Raises UserError if it has none."""
    # a folder pulled from a Hub may have no optimizer: a model alone will do for inference
    steps = complete_steps(run_dir) or complete_steps(run_dir, ["model"])
    if steps:
        return model_path(run_dir, steps[-1])
    runs = ", ".join(sorted({str(p.parent) for p in run_dir.glob("*/model_*.pt")}))
    mend = f"use one of {runs}" if runs else "train one: python train_gpt2.py --help"
    raise UserError(f"{run_dir} holds no complete checkpoint (model_*.pt); {mend}")


def read_train_state(path: str | Path) -> dict[str, Any]:
    """The contents of optim_*.pt and its `model_file`, given either file or a run folder (its newest complete step)."""
    path = Path(path)
    if path.is_dir():
        step = latest_step(path)
        why = f"{path} holds no complete checkpoint to resume from (model_*.pt with optim_*.pt)"
        mend = (
            "weights alone start a new run: --init-from FILE, for build-nanogpt's after python hub.py import FILE DIR"
        )
        require(step is not None, f"{why}; {mend}")
        path = model_path(path, step)
    require(path.is_file(), missing(path))
    named, mend = NAME.fullmatch(path.name), f"to start a new run from its weights, use --init-from {path}"
    require(named, f"cannot resume from {path}: checkpoints are named like model_00500.pt; {mend}")
    optim = path.with_name(f"optim_{named[2]}.pt")
    require(optim.is_file(), f"{path} has no {optim.name} next to it, so the run cannot resume exactly; {mend}")
    found = read(optim)
    kinds = {
        "step": int,
        "max_steps": int,
        "config": dict,
        "data": str,
        "record": dict,
        "rng": list,
        "optimizers": list,
    }
    whole = all(isinstance(found.get(key), kind) for key, kind in kinds.items())
    require(whole, f"{optim} is not the train state of a run; {mend}")
    return found | {"model_file": path.with_name(f"model_{named[2]}.pt")}


def missing(path: Path) -> str:
    """What to say of a missing checkpoint; it lists those that exist."""
    here = ", ".join(sorted(p.name for p in path.parent.glob("model_*.pt"))) or "none"
    return f"no checkpoint {path}; checkpoints in {path.parent}: {here} (train: python train_gpt2.py)"


def read(path: Path) -> dict[str, Any]:
    """What torch.save wrote: tensors (on the CPU, memory-mapped) and plain containers. No pickled code runs. Raises
    UserError for a file that is missing, damaged or not ours."""
    require(path.is_file(), missing(path))
    try:
        with zipfile.ZipFile(path) as z:
            bad = z.testzip()  # the CRC-32 of every record, which torch.load does not check
    except Exception as e:  # zipfile raises many exception types, too
        bad = f"its directory ({type(e).__name__})"
    if bad:
        named = NAME.fullmatch(path.name)
        earlier = f"; move *_{named[2]}.pt away, and --resume auto uses the previous one" if named else ""
        raise UserError(f"checkpoint {path} ({path.stat().st_size:,} bytes) is damaged or truncated: {bad}{earlier}")
    mend = f"convert build-nanogpt and nanoGPT files with: python hub.py import {path} OUT_DIR"
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise UserError(f"{path} holds pickled objects, which are never run; {mend}") from None
    except Exception as e:  # torch raises many exception types for a file that is not what it seems
        raise UserError(f"cannot read checkpoint {path} ({type(e).__name__}); use an earlier one") from None
    require(
        isinstance(found, dict) and found.get("format") == FORMAT, f"{path} is not a checkpoint of this project; {mend}"
    )
    return found


# ------------------------------------------------------------------------- writing


def model_file(model: GPT, step: int, **more: Any) -> dict[str, Any]:
    """The contents of model_*.pt: the weights under their own names, the model's config, the step."""
    return {"format": FORMAT, "model": dict(model.state_dict()), "config": asdict(model.config), "step": step, **more}


def write(path: Path, content: dict[str, Any]) -> None:
    """torch.save, whole or not at all. Raises OSError if the disk is full."""
    try:
        with atomic_write(path) as f:
            torch.save(content, f)
    except RuntimeError as e:  # torch's zip writer hides the file's error behind one about an unexpected position
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        raise


def to_host(tree: Any, memo: dict) -> Any:
    """A copy of nested containers with every tensor in host memory; tensors that share storage are copied once."""
    if isinstance(tree, torch.Tensor):
        key = (tree.data_ptr(), tree.shape, tree.dtype, str(tree.device))
        if key not in memo:
            memo[key] = tree.detach().to("cpu", copy=True)
        return memo[key]
    if isinstance(tree, dict):
        return {k: to_host(v, memo) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [to_host(v, memo) for v in tree]
    return tree


class CheckpointWriter:
    """Writes checkpoints in a thread while training goes on; keeps the newest `keep` (0: all) and the best.

    A failed write is reported at once, and training continues: the next save tries again. If the last one failed,
    `wait` raises UserError. Earlier checkpoints stay. As a context it waits for the thread on every way out.
    """

    def __init__(self, run_dir: str | Path, keep: int = 0):
        self.run_dir, self.keep = Path(run_dir), keep
        self.thread: threading.Thread | None = None
        self.step: int | None = None  # of the newest save
        self.error: Exception | None = None  # set by the thread

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.thread is not None:
            self.thread.join()

    def save(self, step: int, model: dict[str, Any], train: dict[str, Any], best_step: int | None = None) -> None:
        """Copy both to host memory, then write the copies in a thread. Both may change once this has returned."""
        if self.thread is not None:
            self.thread.join()
        model, train = to_host([model, {"format": FORMAT, **train}], {})
        self.step = step
        self.thread = threading.Thread(target=self._write, args=(step, model, train, best_step))
        self.thread.start()

    def wait(self, best_step: int | None = None) -> None:
        """Wait for the write in progress, if any; raise UserError if it failed. `best_step`: if it is known only now
        which step is the best, that no other stays for it."""
        if self.thread is not None:
            self.thread.join()
        mend = "free space or choose another --out-dir. Newest complete step there"
        require(
            self.error is None,
            f"could not write the checkpoint in {self.run_dir}: {self.error}; {mend}: {latest_step(self.run_dir)}",
        )
        if self.step is not None and best_step is not None:
            self._retain(self.step, best_step)

    def _write(self, step: int, model: dict, train: dict, best_step: int | None) -> None:
        try:
            bad = [name for name, weight in model["model"].items() if not weight.isfinite().all()]
            require(not bad, f"the weights are not finite ({', '.join(bad[:1])}); lower --max-lr")
            for left in self.run_dir.glob(".*.pt.part"):  # left by a run killed while writing
                left.unlink()
            write(optim_path(self.run_dir, step), train)
            write(model_path(self.run_dir, step), model)  # last: infer.py and --resume auto look for it
            self._retain(step, best_step)
            self.error = None
        except Exception as e:
            self.error = e
            print0(f"warning: could not write the checkpoint of step {step} ({e}); the next save tries again")

    def _retain(self, step: int, best_step: int | None) -> None:
        """Delete this run's older checkpoints beyond `keep`, but never the best or an incomplete one."""
        if self.keep:
            steps = [s for s in complete_steps(self.run_dir) if s <= step]
            for old in set(steps[: -self.keep]) - {best_step}:
                model_path(self.run_dir, old).unlink()
                optim_path(self.run_dir, old).unlink()
