"""Checkpoints: complete or absent, written while training continues, loaded without running any pickled code.

    OUT/model_{step:05d}.pt   weights in float32 and the model's config: what you copy to a laptop
    OUT/optim_{step:05d}.pt   optimizers, step, the run's config: what else resuming needs

Training writes through CheckpointWriter (lifecycle/save.py); any model is read through weights/open_model.py:

    writer = CheckpointWriter("log/gpt2-124m", keep=2)
    writer.save(500, model_file(model, 500), train_state)       # returns once both are copied to host memory
    writer.finish()                                             # once both are on the disk
    model, facts = load("log/gpt2-124m")                         # the newest complete step
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

import functools
import shlex
import threading
import zipfile
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig, has_rope
from system.cli import TransientError, UserError, explain_errors, print0, raise_if_transient, require
from system.files import atomic_write, refuse_placeholder
from system.machine import copy_to_host
from weights.names import (
    CHECKPOINT_FILE,
    complete_steps,
    describe_nearby,
    latest_step,
    model_path,
    newest_model,
    optim_path,
)

# Stored in every file. Files of another layout would have another number, and are refused.
FORMAT = 1

# What every optim_*.pt has, and of which type.
TRAIN_STATE_TYPES = {
    "step": int,
    "max_steps": int,
    "config": dict,
    "data": str,
    "optimizers": list,
}
# The first number of llm.c's files of weights, such as gpt2_124M.bin.
LLMC_WEIGHTS = 20240326

MAX_STEP = 2**53  # the schedules compute with steps as floats, which hold no larger integers


# ------------------------------------------------------------------------- reading


def load(path: str | Path) -> tuple[GPT, dict[str, Any]]:
    """Read the model in a .pt file, or in the newest complete step of a run folder.

    Returns the GPT (float32, on the CPU, in eval mode) and the other entries of the file: config, step, preset. Raises
    UserError if there is no such file, or if it does not hold a model that this version can build.
    """
    path = Path(path)
    if path.is_dir():
        path = newest_model(path)

    # An optim_*.pt is a checkpoint file, too, but has no weights.
    content = read_file(path)
    require("model" in content, f"{path} contains no model; use the model_*.pt file")
    weights = content.pop("model")
    fix = "use an earlier checkpoint, or the model.py it was made with"
    with explain_errors(f"{path}: the weights are damaged, or do not fit the config stored with them", fix):
        config = read_network(content["config"])
        return GPT.from_state_dict(config, weights).eval(), content


def read_network(saved: dict[str, Any]) -> GPTConfig:
    """The network that a file describes, which may come from anywhere: what is no number of its type, or asks for all
    memory, raises ValueError or TypeError."""
    config = GPTConfig.from_dict(saved)
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) is not type(field.default) or (type(value) is int and value > 2**20):
            raise ValueError(f"{field.name} {value!r:.99} is no {type(field.default).__name__}, or above {2**20}")
    if has_rope(config) and config.block_size * config.head_size > 2**26:
        raise ValueError(f"rope's table for block_size {config.block_size} would have more than 2**26 numbers")
    return config


def read_train_state(path: str | Path) -> dict[str, Any]:
    """Read what resuming needs besides the weights.

    `path` is either file of a checkpoint, or a run folder, whose newest complete step is used. Returns the contents of
    optim_*.pt, and as `model_file` the path of the weights. Raises UserError if the run cannot resume from there.
    """
    path = Path(path)
    if path.is_dir():
        step = latest_step(path)
        problem = f"{path} holds no complete checkpoint to resume from (model_*.pt with optim_*.pt)"
        fix = "to start a new run from weights, use --init-from FILE (convert build-nanogpt's with hub.py import)"
        if step is None:
            if (path / "ckpt.pt").is_file():
                newest_model(path)  # raises the error that says what to do with nanoGPT's file
            raise UserError(f"{problem}; {fix}")
        path = model_path(path, step)

    # Find the train state: the file itself, or the one beside a model file.
    require(path.is_file(), f"no checkpoint {path}; {describe_nearby(path)}")
    match = CHECKPOINT_FILE.fullmatch(path.name)
    fix = f"to start a new run from its weights, use --init-from {shlex.quote(str(path))}"
    if match is None:
        others = f"a file of nanoGPT or build-nanogpt first: python hub.py import {shlex.quote(str(path))} OUT_DIR"
        raise UserError(f"cannot resume from {path}: checkpoints are named like model_00500.pt; {fix}, {others}")
    optim = path.with_name(f"optim_{match['step']}.pt")
    require(optim.is_file(), f"{path} has no {optim.name} next to it, so the run cannot resume exactly; {fix}")

    # Check that the file is what a run has saved, before anything uses it.
    state = read_file(optim)
    is_train_state = all(isinstance(state.get(key), kind) for key, kind in TRAIN_STATE_TYPES.items())
    is_train_state = is_train_state and 0 <= state["step"] <= MAX_STEP and 0 < state["max_steps"] <= MAX_STEP
    require(is_train_state, f"{optim} is not the train state of a run; {fix}")
    return state | {"model_file": path.with_name(f"model_{match['step']}.pt")}


def read_file(path: Path) -> dict[str, Any]:
    """Read a file that torch.save wrote: tensors (on the CPU, memory-mapped) and plain containers.

    Pickled code in the file never runs. Raises UserError if the file is missing, damaged or not of this project.
    """
    require(path.is_file(), f"no checkpoint {path}; {describe_nearby(path)}")
    refuse_other_formats(path)
    import_command = f"convert build-nanogpt and nanoGPT files: python hub.py import {shlex.quote(str(path))} OUT_DIR"
    match = CHECKPOINT_FILE.fullmatch(path.name)
    with open(path, "rb") as f:
        start = f.read(2)
    problem = f"{path} is not a checkpoint of this project, nor any of torch since 1.6"
    fix = import_command if start[:1] == b"\x80" else "a model is a model_*.pt"  # torch before 1.6 wrote a pickle
    require(match or start == b"PK", f"{problem}; {fix}")

    status = path.stat()
    damage = find_damage(path, status.st_size, status.st_mtime_ns)
    if damage:
        fix = f"; move *_{match['step']}.pt away, and --resume auto uses the previous one" if match else ""
        raise UserError(f"checkpoint {path} ({path.stat().st_size:,} bytes) is damaged or truncated: {damage}{fix}")

    # weights_only: torch's restricted unpickler, which refuses everything but tensors and plain containers.
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:
        raise UserError(f"{path} holds pickled objects, which are never run; {import_command}") from None
    except Exception as e:  # torch raises many exception types for a file that is not what it seems
        raise_if_transient(e)
        raise UserError(f"cannot read checkpoint {path} ({type(e).__name__}); use an earlier one") from None

    # torch.load reads any torch file: a bare state dict of another program has no format number.
    is_ours = isinstance(content, dict) and content.get("format") == FORMAT
    require(is_ours, f"{path} is not a checkpoint of this project; {import_command}")
    return content


def refuse_other_formats(path: Path) -> None:
    """Raise UserError, which says what a file is and what opens it, for weights in a format that is read elsewhere or
    not at all. Called for every file of weights that is no part of a Hugging Face folder."""
    refuse_placeholder(path)
    with open(path, "rb") as f:
        start = f.read(9)

    # The length of a header in JSON, then the header.
    is_safetensors = start[8:] == b"{"
    folder = shlex.quote(str(path.parent))
    require(not is_safetensors, f"{path} has weights (safetensors) without their config; open its folder: {folder}")

    is_llmc = start[:4] == LLMC_WEIGHTS.to_bytes(4, "little")
    fix = "its dev/eval/export_hf.py writes a folder that opens here, and OpenAI's weights are gpt2"
    require(not is_llmc, f"{path} has weights of llm.c; {fix}")


@functools.cache
def find_damage(path: Path, size: int, time_ns: int) -> str | None:
    """The part of a .pt file that is damaged, or None. It reads the whole file, once for each size and time of change,
    and compares the CRC-32 of every record, which torch.load does not do: without this, a flipped bit on a disk becomes
    a wrong weight."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip()
    except Exception as e:  # zipfile raises many exception types for damaged archives
        raise_if_transient(e)
        return f"its directory ({type(e).__name__})"


# ------------------------------------------------------------------------- writing


def model_file(model: GPT, step: int, weights: dict[str, Tensor] | None = None, **more: Any) -> dict[str, Any]:
    """The contents of model_*.pt: the weights under their own names, the model's config, the step, and `more` facts.
    weights: a state dict in float32, for a model whose own are not."""
    weights = weights or model.state_dict()
    return {"format": FORMAT, "model": dict(weights), "config": asdict(model.config), "step": step, **more}


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

    A failed write prints a warning, and training continues: the next save tries again, and earlier checkpoints stay.
    `finish` raises the error of the last write. One write is in progress at a time; see the table in the module's
    docstring.
    """

    def __init__(self, run_dir: str | Path, keep: int = 0, best: Callable[[list[int]], set[int]] = lambda steps: set()):
        """best: which of these steps may be the best, and are not deleted."""
        self.run_dir = Path(run_dir)
        self.keep = keep
        self.best = best
        self.thread: threading.Thread | None = None
        self.saved_step = latest_step(run_dir)  # the last one that is complete
        self.error: Exception | None = None  # of the last write; set by the thread

    def save(self, step: int, model: dict[str, Any], train: dict[str, Any]) -> None:
        """Write both files in a thread. `model` is what model_file returns; it is copied to host memory, and may change
        once this has returned. `train` is the train state, whose tensors are copies already."""
        # Training waits for the write before and for this copy. The thread shares no tensor with training.
        self.join()
        contents = (copy_to_host(model), {"format": FORMAT, **train})
        self.thread = threading.Thread(target=self._write, args=(step, *contents))
        self.thread.start()

    def join(self) -> None:
        """Wait for the write in progress, if any."""
        if self.thread is not None:
            self.thread.join()

    def finish(self) -> None:
        """Wait for the write in progress, if any. Raises the error of the last write: TransientError for weights that
        are not finite, OSError for a disk that is full or gone, after which the same command may succeed."""
        self.join()
        if self.error:
            self.error.add_note(f"{self.run_dir} has the newest complete step: {latest_step(self.run_dir)}")
            raise self.error

    def _write(self, step: int, model: dict, train: dict) -> None:
        """The body of the thread: check, write both files, delete old checkpoints."""
        try:
            # Weights that are not finite would replace good checkpoints with useless ones.
            bad_names = [name for name, weight in model["model"].items() if not weight.isfinite().all()]
            if bad_names:  # an error of the hardware, perhaps, which does not come again
                raise TransientError(f"the weights are not finite ({', '.join(bad_names[:1])}); lower --max-lr")

            # Somebody may have moved the folder away. The model last: once it is there, the step is complete.
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._delete_leftovers()
            write(optim_path(self.run_dir, step), train)
            write(model_path(self.run_dir, step), model)
            self.saved_step = step
            print0(f"saved {model_path(self.run_dir, step)}")
            self._delete_old(step)
            self.error = None
        except Exception as e:
            # An exception in a thread does not end the program: print it now, and let `finish` raise it.
            self.error = e
            print0(f"warning: could not write the checkpoint of step {step} ({e}); the next save tries again")

    def _delete_leftovers(self) -> None:
        """Delete what was left by a write that failed or was killed: unfinished files, and optimizer files without a
        model file that are newer than every complete step."""
        for path in self.run_dir.glob(".*.pt.part"):
            path.unlink()
        newest = latest_step(self.run_dir) or 0
        for path in self.run_dir.glob("optim_*.pt"):
            match = CHECKPOINT_FILE.fullmatch(path.name)
            if match and int(match["step"]) > newest and not model_path(self.run_dir, int(match["step"])).exists():
                path.unlink()

    def _delete_old(self, step: int) -> None:
        """Delete the complete checkpoints up to `step` beyond the newest `keep`, but not the best by val loss.

        Steps after `step` stay: they are there because the run was resumed from an earlier checkpoint. Steps with only
        one of the two files stay, too: whoever removed the other file may want to keep this one.
        """
        if not self.keep:
            return
        steps = [s for s in complete_steps(self.run_dir) if s <= step]
        too_old = set(steps[: -self.keep])

        # The model first: without it, the step no longer counts as complete, whenever a kill comes.
        for old_step in too_old - self.best(steps):
            model_path(self.run_dir, old_step).unlink()
            optim_path(self.run_dir, old_step).unlink()
