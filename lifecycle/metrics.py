"""What a run reports: a line of metrics.jsonl and of the console for each step, and the curves of a tracker.

    metrics = MetricsLogger(run)
    metrics.log_step({"step": 250, "train_loss": 5.8, "lr": 2.1e-4, "grad_norm": 0.7}, seconds, waited_s)
    rows = read_metrics(Path("log/gpt2-124m/metrics.jsonl"))    # [{"step": 0, "val_loss": 10.9}, ...]

Importing this module imports no torch. metrics.jsonl holds one object a line, `step` always, and no step twice. For the
same step:

    metrics.jsonl   {"step": 250, "val_loss": 5.9, "train_loss": 5.8, "lr": 2.1e-4, "grad_norm": 0.7, "step_ms": ...}
    the console     step   250/19073 | loss: 5.800000 | lr 2.1000e-04 | norm: 0.7000 | dt: ... | eta: 12h30m
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from zlib import crc32

from system.cards import total_peak_flops
from system.files import atomic_write
from system.printing import format_cost, format_duration, print0
from weights.run_folder import complete_steps, model_path

if TYPE_CHECKING:
    from lifecycle.start import Run
    from training.config import TrainConfig

# ------------------------------------------------------------------------- reading what a run has written


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


def best_step(run_dir: Path, steps: list[int] | None = None) -> int | None:
    """The step of a run with the lowest val loss, of all steps or of these; None if none was measured."""
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if row.get("val_loss")]
    rows = [row for row in rows if steps is None or row["step"] in steps]
    return min(rows, key=itemgetter("val_loss"))["step"] if rows else None


def describe_best(path: Path) -> str:
    """For people who open a run folder, and so its newest weights: which of the others have a lower val loss, or ""."""
    saved = complete_steps(path, ["model"])
    best = best_step(path, saved)
    if best is None or best == saved[-1]:
        return ""
    return f"; {model_path(path, best)} has a lower val loss"


# ------------------------------------------------------------------------- writing


@contextmanager
def warn_on_error() -> Iterator[None]:
    """Print what is raised in this block as a warning: a full disk, or a tracker that fails, must not end the run."""
    try:
        yield
    except Exception as e:
        print0(f"warning: metrics could not be written ({type(e).__name__}: {e})")


class MetricsLogger:
    """Writes OUT/metrics.jsonl and the console line, and feeds the tracker. Only rank 0 writes.

    A resumed run keeps the lines before its first step and writes the later ones again, so no step appears twice. It
    also keeps the measurements of its first step: a shorter run may have ended there, and have evaluated a step that is
    not due in the longer one.
    """

    def __init__(self, run: Run):
        """Every rank must make one."""
        cfg, rt, start = run.cfg, run.rt, run.start
        self.run = run
        self.cfg, self.rt, self.start, self.max_steps = cfg, rt, start, run.max_steps
        self.flops_per_token = run.model.flops_per_token(cfg.sequence_length)
        self.peak_flops = total_peak_flops(rt)
        self.start_time = time.monotonic()
        self.first_step_time = 0.0  # when the first step was done, which compiles
        if rt.is_main:
            self.path = cfg.run_dir / "metrics.jsonl"
            self.measured_at_start = read_step(cfg.run_dir, start)
            self.file: BinaryIO | None = None  # opened by the first line, until which the file stays as it is
            self.log_to_tracker = TRACKERS[cfg.tracker](cfg, start)

    def log_step(self, row: dict[str, Any], seconds: float, waited_s: float) -> None:
        """Log a step that has just been done in `seconds`, after a wait for its batch: its line in metrics.jsonl and on
        the console, which is build-nanogpt's, with MFU, the time to go and the cost since this start.

        row: step, train_loss, lr, grad_norm and what was measured before the step, such as val_loss."""
        # MFU is the achieved share of the peak of all GPUs together (PaLM, Chowdhery et al. 2022).
        step, before = row["step"], self.run.sequences_before
        tokens_per_second = (before(step + 1) - before(step)) * self.cfg.sequence_length / seconds
        mfu = tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None
        row = row | {"step_ms": seconds * 1e3, "wait_ms": waited_s * 1e3}
        row |= {"tokens_per_second": tokens_per_second, "mfu": mfu}
        self.write(row)

        now = time.monotonic()
        line = f"step {step:5d}/{self.max_steps} | loss: {row['train_loss']:.6f} | lr {row['lr']:.4e}"
        line += f" | norm: {row['grad_norm']:.4f} | dt: {seconds * 1e3:.2f}ms | tok/sec: {tokens_per_second:,.0f}"
        if mfu:
            line += f" | mfu: {mfu:.1%}"
        # A disk that is slower than training; the first batch always takes a moment.
        if waited_s > max(0.01, 0.05 * seconds) and step > self.start:
            line += f" | waited for data: {waited_s * 1e3:.0f}ms"
        # At the mean speed of all steps but the first, with the evaluations and saves between them.
        if step == self.start:
            self.first_step_time = now
        else:
            done, to_do = before(step + 1) - before(self.start + 1), before(self.max_steps) - before(step + 1)
            line += f" | eta: {format_duration((now - self.first_step_time) * to_do / done)}"
        if self.cfg.gpu_hour_usd:
            line += f" | cost: {format_cost(now - self.start_time, self.rt.world_size, self.cfg.gpu_hour_usd)}"
        print0(line)

    def write(self, row: dict[str, Any]) -> None:
        """Append one line: `step` and whatever was measured there."""
        if not self.rt.is_main:
            return
        if row["step"] == self.start:
            row = self.measured_at_start | row
        # JSON has no NaN and no infinity, which a refused update may contain: write null.
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        with warn_on_error():
            if self.file is None:
                # Drop the lines of steps that this run repeats.
                kept = [json.dumps(old) + "\n" for old in read_metrics(self.path) if old["step"] < self.start]
                with atomic_write(self.path) as f:
                    f.write("".join(kept).encode())
                self.file = open(self.path, "ab")
            # Flushed at once, so that a kill takes no line back. What a full disk has no room for stays in the buffer.
            self.file.write(json.dumps(finite).encode() + b"\n")
            self.file.flush()
        with warn_on_error():
            values = {k: v for k, v in row.items() if k != "step" and v is not None}
            self.log_to_tracker(row["step"], values)

    def log_text(self, step: int, text: str) -> None:
        """Send samples, if there are any, to the console and the tracker."""
        if text:
            print0(text)
            with warn_on_error():
                self.log_to_tracker(step, {"samples": text})

    def flush(self) -> None:
        """Bring all lines to storage. Called on rank 0 before a checkpoint is written: a run that resumes from the
        checkpoint writes the later lines again, but not the earlier ones."""
        with warn_on_error():
            if self.file:
                os.fsync(self.file.fileno())


# ------------------------------------------------------------------------- trackers

# A tracker adds a point at a step to the curve of each number {key of metrics.jsonl: value}, and shows texts. A resumed
# run repeats the steps after its checkpoint, which the tracker has been sent already.
Track = Callable[[int, dict[str, float | str]], None]


def open_none(cfg: TrainConfig, start_step: int) -> Track:
    """--tracker none"""
    return lambda step, values: None


def open_tensorboard(cfg: TrainConfig, start_step: int) -> Track:
    """Writes RUN_DIR/tensorboard, in two groups, because TensorBoard opens no more."""
    from torch.utils.tensorboard import SummaryWriter

    # purge_step hides the points of the steps that a resumed run repeats.
    writer = SummaryWriter(str(cfg.run_dir / "tensorboard"), purge_step=start_step)

    def track(step: int, values: dict[str, float | str]) -> None:
        for key, value in values.items():
            if isinstance(value, str):
                writer.add_text(key, f"```\n{value}\n```", step)
            else:
                writer.add_scalar(f"{'loss' if key.endswith('_loss') else 'run'}/{key}", value, step)
        writer.flush()

    return track


def open_wandb(cfg: TrainConfig, start_step: int) -> Track:
    """Sends to Weights & Biases: project WANDB_PROJECT (default gpt2), name WANDB_NAME (default the run folder's)."""
    import wandb

    # The id by which a resumed run continues its curves at wandb, which cannot withdraw points. The folder is part of
    # it: a copy of the folder is another run.
    id_file = cfg.run_dir / "wandb_id"
    if start_step == 0 or not id_file.exists():
        id_file.write_text(secrets.token_hex(4))
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or "gpt2",
        id=f"{id_file.read_text()}-{crc32(bytes(cfg.run_dir.resolve())):08x}",
        name=os.environ.get("WANDB_NAME", cfg.run_dir.name),
        resume="allow",
        dir=str(cfg.run_dir),
        config=cfg.to_dict(),
    )
    return lambda step, values: run.log(values, step=step)  # wandb leaves out steps that it has been sent already


TRACKERS = {"none": open_none, "tensorboard": open_tensorboard, "wandb": open_wandb}
