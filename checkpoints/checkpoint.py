"""Checkpoints: complete or absent, written while training continues, loaded without running any pickled code.

    OUT/model_{step:05d}.pt   weights in float32 and the model's config: what you copy to a laptop
    OUT/optim_{step:05d}.pt   what else resuming needs: optimizers, step, the run's config

Training writes through CheckpointWriter; any model is read through checkpoints/open_model.py:

    writer = CheckpointWriter("log/gpt2-124m", keep=2)
    writer.save(500, model_file(model, 500), train_state)       # returns once the weights are copied to host memory
    writer.finish()                                             # once both are on the disk
    model, facts = load(Path("log/gpt2-124m/model_00500.pt"))
    state = read_train_state("log/gpt2-124m")                    # what --resume auto reads

A step is complete when both of its files are complete. The life of a checkpoint, and what a kill leaves:

    training thread           writer thread                            killed here, --resume auto uses
    ------------------------  ---------------------------------------  ----------------------------------
    step 499 is done
    save(500): wait for the
    write of the step before,
    copy all tensors to host
    step 500 runs ...         write .optim_00500.pt.part, fsync        the step before (the next save
      |                         |                                      deletes the .part file)
      |                       rename it to optim_00500.pt              the step before (no model_00500.pt)
      |                       write .model_00500.pt.part, fsync        the step before
      |                       rename it to model_00500.pt              step 500: both files are complete
      |                       delete model, then optim, of the steps   step 500 (an optim file left alone
      v                       beyond --keep, except the best           is not a complete step)
    step 501 runs ...

The optimizer comes first because a model file is what every reader looks for: where there is one, the step is complete.
"""

from __future__ import annotations

import shlex
import threading
import zipfile
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from checkpoints.run_folder import complete_steps, describe_runs, latest_step, model_path, optim_path
from model import GPT, GPTConfig
from system.errors import TransientError, UserError, explain_errors, require
from system.files import atomic_write
from system.machine import copy_to_host
from system.printing import print0

# Stored in every file. Optimizer files of another layout have another number, and are refused.
MODEL_FORMAT = 1
OPTIM_FORMAT = 3  # since it has the facts of the run

# ------------------------------------------------------------------------- reading


def load(path: Path) -> tuple[GPT, dict[str, Any]]:
    """Read the model in a .pt file: the GPT (float32, on the CPU, in eval mode) and the other entries of the file, such
    as config, step and preset. Raises UserError if there is no such file, or if it does not hold a model that this
    version can build."""
    # An optim_*.pt is a checkpoint file, too, but has no weights.
    content = read_file(path)
    require("model" in content, f"{path} contains no model; use the model_*.pt file")
    weights = content.pop("model")
    fix = "use an earlier checkpoint, or the model.py it was made with"
    problem = f"{path}: the weights are damaged, or do not fit the config stored with them"
    with explain_errors(problem, fix, ValueError, TypeError, KeyError):  # of whatever the file holds
        config = GPTConfig.from_dict(content["config"], content.get("defaults"))
    with explain_errors(problem, fix, ValueError, RuntimeError):
        return build_model(config, weights), content


def build_model(config: GPTConfig, weights: dict[str, Tensor]) -> GPT:
    """The GPT (in eval mode) of weights that come from a file. Raises ValueError or RuntimeError if they are not finite
    float32 numbers, or do not fit the config, which may ask for a million layers."""
    if config.n_layer > len(weights):
        raise ValueError(f"{len(weights)} tensors for a config with {config.n_layer} layers")
    for name, tensor in weights.items():
        if tensor.dtype != torch.float32 or not tensor.isfinite().all():
            raise ValueError(f"{name} has numbers that are not float32, or not finite")
    return GPT.from_state_dict(config, weights)


def read_train_state(path: str | Path) -> dict[str, Any]:
    """Read what resuming needs besides the weights.

    `path` is either file of a checkpoint, or a run folder, whose newest complete step is used. Returns the contents of
    optim_*.pt, and as `model_file` the path of the weights. Raises UserError if the run cannot resume from there.
    """
    path = Path(path)
    fix = "to start a new run from weights, use --init-from FILE"
    if path.is_dir():
        steps = complete_steps(path)
        require(steps, f"{path} holds no complete checkpoint to resume from (model_*.pt with optim_*.pt); {fix}")
        path = model_path(path, steps[-1])

    # The train state: the file itself, or the one beside a model file.
    optim = path.with_name(path.name.replace("model_", "optim_"))
    require(path.is_file(), f"no checkpoint {path}; {describe_runs(path.parent)}")
    require(optim.is_file(), f"{path} has no {optim.name} next to it to resume from; {fix}")
    state = read_file(optim)
    require("model" not in state, f"{optim} is not the train state of a run; {fix}")
    require(state["format"] == OPTIM_FORMAT, f"{optim} has the format {state['format']} of another version; {fix}")
    return state | {"model_file": optim.with_name(optim.name.replace("optim_", "model_"))}


def read_file(path: Path) -> dict[str, Any]:
    """Read a checkpoint file. Pickled code in it never runs. Raises UserError if the file is missing, damaged or not of
    this project."""
    require(path.is_file(), f"no checkpoint {path}; {describe_runs(path.parent)}")
    fix = "move the files of its step away, and --resume auto uses the one before"
    fix += f"; build-nanogpt's or nanoGPT's first: python hub.py import {shlex.quote(str(path))} OUT_DIR"
    errors = (zipfile.BadZipFile, RuntimeError, ValueError)
    with explain_errors(f"{path} is damaged, or no checkpoint of this project", fix, *errors):
        # The CRC-32 of every record, which torch.load does not compare: without this, which reads the whole file, a
        # flipped bit on a disk becomes a wrong weight.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        require(damaged is None, f"{damaged} has changed since it was written")

        # A bare state dict of another program has no format number.
        content = load_tensors(path)
        is_ours = isinstance(content, dict) and isinstance(content.get("format"), int)
        require(is_ours, "it has no format number")
    return content


def load_tensors(path: Path) -> Any:
    """What torch.save has written: tensors (on the CPU, memory-mapped) and plain containers; UserError for all else."""
    # weights_only: torch's restricted unpickler, whose own words for what it refuses tell how to run the code.
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise UserError("it holds pickled objects, which are never run") from None


# ------------------------------------------------------------------------- writing


def model_file(model: GPT, step: int, weights: dict[str, Tensor] | None = None, **more: Any) -> dict[str, Any]:
    """The contents of model_*.pt: the weights under their own names, the model's config, the step, and `more` facts.
    weights: a state dict in float32, if other weights are meant than the model's."""
    weights = weights or model.state_dict()
    # The defaults of this version tell another version which of the settings that it does not know are off.
    configs = {"config": asdict(model.config), "defaults": asdict(GPTConfig())}
    return {"format": MODEL_FORMAT, "model": dict(weights), **configs, "step": step, **more}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write `content` with torch.save, completely or not at all. Raises OSError if, for example, the disk is full."""
    try:
        with atomic_write(path) as f:
            torch.save(content, f)
    except RuntimeError as e:
        # If a write fails, torch's zip writer reports an unexpected file position. Raise the cause instead.
        if isinstance(e.__context__, OSError):
            raise e.__context__ from None
        raise


class CheckpointWriter:
    """Writes checkpoints in a thread while training continues; keeps the newest `keep` (0: all) and the best.

    After an error that passes, such as a full disk, training continues: the next save tries again. `check` raises any
    other, and `finish` the one of the last write. Earlier checkpoints stay. One write is in progress at a time; see the
    table in the module's docstring.
    """

    def __init__(self, run_dir: str | Path, keep: int = 0):
        self.run_dir = Path(run_dir)
        self.keep = keep
        self.thread: threading.Thread | None = None
        self.saved_step = latest_step(run_dir)  # the last one that is complete
        self.error: Exception | None = None  # of the last write; set by the thread

    def save(self, step: int, model: dict[str, Any], train: dict[str, Any], best: int | None = None) -> None:
        """Write both files in a thread. `model` is what model_file returns; it is copied to host memory, and may change
        once this has returned. `train` is the train state, whose tensors are copies already. best: the best step so
        far, which is not deleted."""
        # Training waits for the write before and for this copy. The thread shares no tensor with training.
        self.join()
        contents = (copy_to_host(model), {"format": OPTIM_FORMAT, **train})
        self.thread = threading.Thread(target=self._write, args=(step, *contents, best))
        self.thread.start()

    def join(self) -> None:
        """Wait for the write in progress, if any."""
        if self.thread is not None:
            self.thread.join()

    def check(self) -> None:
        """Raise what a write has raised, unless it passes: TransientError for weights that are not finite, UserError
        for what the next write would meet, too."""
        if self.error and not isinstance(self.error, OSError):
            raise self.error

    def finish(self) -> None:
        """Wait for the write in progress, if any. Raises the error of the last write: one of `check`, or OSError for a
        disk that is full or gone, after which the same command may succeed."""
        self.join()
        if self.error:
            raise self.error

    def _write(self, step: int, model: dict, train: dict, best: int | None) -> None:
        """The body of the thread: check, write both files, delete old checkpoints."""
        try:
            # Weights that are not finite would replace good checkpoints with useless ones.
            bad_names = [name for name, weight in model["model"].items() if not weight.isfinite().all()]
            if bad_names:  # an error of the hardware, perhaps, which does not come again
                raise TransientError(f"the weights are not finite ({bad_names[0]}); lower --max-lr")

            # Somebody may have moved the folder away. The model last: once it is there, the step is complete.
            with explain_errors(f"cannot write the checkpoint of step {step}", "the earlier ones stay", RuntimeError):
                self.run_dir.mkdir(parents=True, exist_ok=True)
                for part in self.run_dir.glob(".*.pt.part"):
                    part.unlink()  # left by a write that was killed
                write(optim_path(self.run_dir, step), train)
                write(model_path(self.run_dir, step), model)
                self.saved_step = step
                print0(f"saved {model_path(self.run_dir, step)}")
                self._delete_old(step, best)
            self.error = None
        except Exception as e:
            # An exception in a thread does not end the program: `check` and `finish` raise it.
            self.error = e
            if isinstance(e, OSError):  # one of TRANSIENT_ERRORS: explain_errors leaves no other as it is
                print0(f"warning: could not write the checkpoint of step {step} ({e}); the next save tries again")

    def _delete_old(self, step: int, best: int | None) -> None:
        """Delete the complete checkpoints up to `step` beyond the newest `keep`, but not the best, nor the last model
        of a run that had finished before it was given more steps.

        Steps after `step` stay: they are there because the run was resumed from an earlier checkpoint. Steps with only
        one of the two files stay, too: whoever removed the other file may want to keep this one.
        """
        if not self.keep:
            return
        steps = [s for s in complete_steps(self.run_dir) if s <= step]
        # The model first: without it, the step no longer counts as complete, whenever a kill comes.
        for old_step in set(steps[: -self.keep]) - {best}:
            if load_tensors(optim_path(self.run_dir, old_step))["max_steps"] != old_step:
                model_path(self.run_dir, old_step).unlink()
            optim_path(self.run_dir, old_step).unlink()
