"""What a run reports: a line of metrics.jsonl per step, the line on the console, the throughput.

    metrics = MetricsLogger(train_step, run)
    metrics.log_step(run, result, lr, seconds)

Called by train_gpt2.py. metrics.jsonl holds one object a line, `step` always, and no step twice;
training/metrics_file.py reads it. Trackers (TensorBoard, wandb) get the same values. For the same step:

    metrics.jsonl   {"step": 250, "val_loss": 5.9, "train_loss": 5.8, "lr": 2.1e-4, "grad_norm": 0.7, "step_ms": ...}
    the console     step   250/19073 | loss: 5.800000 | lr 2.1000e-04 | norm: 0.7000 | dt: ... | eta: 12h30m
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from system import cards
from system.cli import UserError, cost_usd, format_duration, print0
from system.files import atomic_write
from training.metrics_file import read_metrics
from training.trackers import Tracker, make_tracker

if TYPE_CHECKING:
    from training.run_state import RunState
    from training.step import StepResult, TrainStep


class MetricsLogger:
    """Writes OUT/metrics.jsonl and the console line, and feeds the tracker. Only rank 0 writes.

    A resumed run keeps the lines before its first step and writes the later ones again, so no step appears twice.
    """

    def __init__(self, train_step: TrainStep, run: RunState):
        self.cfg = train_step.cfg
        self.world_size = train_step.rt.world_size
        self.is_main = train_step.rt.is_main
        self.throughput = Throughput(train_step)
        self.start_time = time.monotonic()
        self.last_print_time: float | None = None

        # The other ranks get a tracker that does nothing, and no file.
        self.tracker = Tracker()
        if not self.is_main:
            return

        # Drop the lines of steps that this run will repeat. The new file replaces the old one at once.
        path = self.cfg.run_dir / "metrics.jsonl"
        old_rows = read_metrics(path)
        kept = [json.dumps(row) + "\n" for row in old_rows if row["step"] < run.start_step]
        with atomic_write(path) as f:
            f.write("".join(kept).encode())

        # One write per line, without a buffer whose flush could fail later.
        self.file = open(path, "ab", buffering=0)
        last_logged_step = max([-1, *(row["step"] for row in old_rows)])
        self.tracker = make_tracker(self.cfg, run.start_step, last_logged_step)

    def log_step(self, run: RunState, result: StepResult, lr: float, seconds: float) -> None:
        """Log the step that has just been done in `seconds`: its line in metrics.jsonl and, at most about once a
        second, on the console. `lr` is the scheduled value of --max-lr. Raises what `write` raises."""
        # Add the measurements of the step to those made before it, such as the val loss.
        run.measured |= {"train_loss": result.loss, "lr": lr, "grad_norm": result.norm}
        run.measured |= self.throughput.update(seconds)
        self.write(run.measured)

        # The first step and the last are always shown.
        now = time.monotonic()
        is_due = self.last_print_time is None or now - self.last_print_time >= 1
        if self.is_main and (is_due or run.step >= run.max_steps - 1):
            self.last_print_time = now
            print(self._console_line(run), flush=True)

    def _console_line(self, run: RunState) -> str:
        """build-nanogpt's line, with MFU, the time to go and the cost since this start."""
        # Step, loss, rate, norm and speed are always known.
        row = run.measured
        parts = [
            f"step {run.step:5d}/{run.max_steps} | loss: {row['train_loss']:.6f} | lr {row['lr']:.4e}",
            f"norm: {row['grad_norm']:.4f} | dt: {row['step_ms']:.2f}ms | tok/sec: {row['tokens_per_second']:,.0f}",
        ]

        # The MFU is known for cards with a data sheet, the ETA after two steps, the cost if the price is given. The
        # step of this line is done, but not counted yet.
        if row["mfu"]:
            parts.append(f"mfu: {row['mfu']:.1%}")
        eta_s = self.throughput.eta_s(run.max_steps - run.step - 1)
        if math.isfinite(eta_s):
            parts.append(f"eta: {format_duration(eta_s)}")
        if self.cfg.gpu_hour_usd:
            seconds = time.monotonic() - self.start_time
            parts.append(f"cost: ${cost_usd(seconds, self.world_size, self.cfg.gpu_hour_usd):.2f}")
        return " | ".join(parts)

    def write(self, measured: dict[str, Any]) -> None:
        """Append one line: `step` and whatever was measured there. Raises UserError if it cannot be written, or OSError
        if the cause may be temporary."""
        if not self.is_main:
            return

        # JSON has no NaN and no infinity, which a refused update may contain: write null.
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in measured.items()}
        line = json.dumps(row).encode() + b"\n"

        # One write for the whole line. A full disk may take a part of it; readers skip a torn line.
        with self._explain_errors(len(line)):
            self.file.write(line)

        # The tracker gets every value that is known.
        values = {k: v for k, v in measured.items() if k != "step" and v is not None}
        self.tracker.log_scalars(measured["step"], values)

    def log_text(self, step: int, text: str) -> None:
        """Send samples to the console and the tracker."""
        print0(text)
        self.tracker.log_text(step, text)

    def flush(self) -> None:
        """Bring everything to storage. Called before a checkpoint is written: a run that resumes from the checkpoint
        writes the later lines again, but not the earlier ones. TensorBoard buffers its points for minutes.
        """
        # A network file system may report only now that the quota is full.
        with self._explain_errors():
            os.fsync(self.file.fileno())
        self.tracker.flush()

    @contextmanager
    def _explain_errors(self, needed: int | None = None) -> Iterator[None]:
        """Turn an error of the disk into a UserError, unless it may be temporary."""
        try:
            yield
        except OSError as e:
            problem = f"cannot write to {self.file.name}: {e.strerror or e}"
            raise UserError(f"{problem}; fix that, then continue with --resume auto") from None

    def close(self) -> None:
        """Close the file and the tracker. Every rank may call it."""
        if self.is_main:
            self.file.close()
            self.tracker.close()


class Throughput:
    """How fast a run is: step time, tokens per second, MFU (None if the peak of a card is unknown), time to go. Every
    rank must make one."""

    def __init__(self, train_step: TrainStep):
        # The work of a step.
        self.tokens_per_step = train_step.cfg.total_batch_size
        self.flops_per_token = train_step.model.flops_per_token(train_step.cfg.sequence_length)

        # MFU is the achieved share of the peak FLOP/s of all GPUs together (PaLM, Chowdhery et al. 2022), which may be
        # of several kinds. One without a data sheet, whose peak is 0 here, leaves it unknown.
        rt = train_step.rt
        peaks = rt.gather(cards.peak_flops(rt.device) or 0.0)
        self.peak_flops = sum(peaks) if all(peaks) else 0

        # The steps of this start, and the moving average of the time that one takes.
        self.steps_seen = 0
        self.average_s = 0.0

    def update(self, seconds: float) -> dict[str, Any]:
        """Count a step that took `seconds`; return step_ms, tokens_per_second and mfu."""
        # The first steps compile, so the average starts after them.
        if self.steps_seen < 3:
            self.average_s = seconds
        else:
            self.average_s = 0.9 * self.average_s + 0.1 * seconds
        self.steps_seen += 1

        tokens_per_second = self.tokens_per_step / seconds
        mfu = tokens_per_second * self.flops_per_token / self.peak_flops if self.peak_flops else None
        return {"step_ms": seconds * 1e3, "tokens_per_second": tokens_per_second, "mfu": mfu}

    def eta_s(self, steps: int) -> float:
        """Seconds that `steps` more will take; NaN after the first step, which is not representative."""
        return self.average_s * steps if self.steps_seen > 1 else math.nan
