"""What a run reports: a line of metrics.jsonl and of the console for each step, and the curves of a tracker.

    metrics = MetricsLogger(run)
    metrics.log_step(now, {"step": 250, "train_loss": 5.8, "lr": 2.1e-4, "grad_norm": 0.7}, seconds, waited_s)

metrics.jsonl holds one object a line, `step` always, and no step twice. For the same step:

    metrics.jsonl   {"step": 250, "val_loss": 5.9, "train_loss": 5.8, "lr": 2.1e-4, "grad_norm": 0.7, "step_ms": ...}
    the console     step   250/19073 | loss: 5.800000 | lr 2.1000e-04 | norm: 0.7000 | dt: ... | eta: 12h30m
"""

import json
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
from zlib import crc32

from checkpoints.run_folder import read_metrics, read_step
from lifecycle.open_run import Run
from system.cards import total_peak_flops
from system.files import atomic_write
from system.printing import format_cost, format_duration, print0
from training.config import TrainConfig
from training.schedule import Step, at


@contextmanager
def warn_on_error() -> Iterator[None]:
    """Print an error of this block as a warning, because a full disk or a tracker that fails must not end the run."""
    try:
        yield
    except Exception as e:
        print0(f"warning: metrics could not be written ({type(e).__name__}: {e})")


class MetricsLogger:
    """Writes OUT/metrics.jsonl and the console line, and feeds the tracker. Only rank 0 writes.

    A resumed run keeps the lines before its first step and writes the later lines again, so no step appears twice. A
    resumed run also keeps the measurements of its first step: a shorter run may have ended there, and measured what is
    not due at that step in the longer run.
    """

    def __init__(self, run: Run):
        """Every rank must make one, because total_peak_flops is a collective."""
        self.run = run
        self.peak_flops = total_peak_flops(run.rt)
        self.start_time = time.monotonic()
        self.first_step_time = 0.0  # when the first step was done, which is slower than the others
        if run.rt.is_main:
            self.path = run.cfg.run_dir / "metrics.jsonl"
            self.measured_at_start = read_step(run.cfg.run_dir, run.first_step)
            self.file: BinaryIO | None = None  # opened when the first line is written
            self.unwritten = b""  # what a full disk has not taken yet
            self.log_to_tracker = TRACKERS[run.cfg.tracker](run.cfg, run.first_step)

    def log_step(self, now: Step, row: dict[str, Any], seconds: float, waited_s: float) -> None:
        """Log a step that took `seconds`, after a wait of waited_s seconds for its batch: a line in metrics.jsonl, and
        one on the console. The console line is build-nanogpt's, with MFU, the time to go and the cost since this start.

        row: step, train_loss, lr, grad_norm and what was measured before the step, such as val_loss."""
        # MFU is the achieved share of the peak of all GPUs together (PaLM, Chowdhery et al. 2022).
        run, cfg, T = self.run, self.run.cfg, self.run.cfg.sequence_length
        tokens_per_second = now.sequences * T / seconds
        flops_per_second = tokens_per_second * run.model.flops_per_token(T)
        mfu = flops_per_second / self.peak_flops if self.peak_flops else None
        times = {"step_ms": seconds * 1e3, "wait_ms": waited_s * 1e3}
        self.write(row | times | {"tokens_per_second": tokens_per_second, "mfu": mfu})

        clock = time.monotonic()
        line = f"step {now.number:5d}/{run.max_steps} | loss: {row['train_loss']:.6f} | lr {row['lr']:.4e}"
        line += f" | norm: {row['grad_norm']:.4f} | dt: {seconds * 1e3:.2f}ms | tok/sec: {tokens_per_second:,.0f}"
        if mfu:
            line += f" | mfu: {mfu:.1%}"
        # Report a long wait: the disk is slower than training. The first batch always takes a moment.
        if waited_s > max(0.01, 0.05 * seconds) and now.number > run.first_step:
            line += f" | waited for data: {waited_s * 1e3:.0f}ms"
        # The time to go follows from the mean speed since the first step, with evaluations and saves.
        if now.number == run.first_step:
            self.first_step_time = clock
        else:
            read = now.sequences_before + now.sequences
            timed = read - at(run.first_step + 1, cfg, run.max_steps).sequences_before
            to_do = at(run.max_steps, cfg, run.max_steps).sequences_before - read
            line += f" | eta: {format_duration((clock - self.first_step_time) * to_do / timed)}"
        if cfg.gpu_hour_usd:
            line += f" | cost: {format_cost(clock - self.start_time, run.rt.world_size, cfg.gpu_hour_usd)}"
        print0(line)

    def write(self, row: dict[str, Any]) -> None:
        """Append one line: `step` and whatever was measured there. Texts, such as samples, go to the tracker alone."""
        if not self.run.rt.is_main:
            return
        if row["step"] == self.run.first_step:
            row = self.measured_at_start | row
        # JSON has no NaN and no infinity, which a skipped step of float16 may have: write null.
        numbers = {k: v for k, v in row.items() if not isinstance(v, str)}
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
        self.unwritten += json.dumps(finite).encode() + b"\n"
        with warn_on_error():
            if self.file is None:
                # Drop the lines of steps that this run repeats.
                kept = [json.dumps(old) + "\n" for old in read_metrics(self.path) if old["step"] < self.run.first_step]
                with atomic_write(self.path) as f:
                    f.write("".join(kept).encode())
                self.file = open(self.path, "ab", buffering=0)
            self.write_lines()
        with warn_on_error():
            values = {k: v for k, v in row.items() if k != "step" and v is not None}
            self.log_to_tracker(row["step"], values)

    def flush(self) -> None:
        """Bring all lines to storage. Called on rank 0 before a checkpoint is written: a run that resumes from the
        checkpoint writes the later lines again, but not the earlier ones."""
        with warn_on_error():
            if self.file:
                self.write_lines()
                os.fsync(self.file.fileno())

    def write_lines(self) -> None:
        """Write at once, so that a kill loses no line. A full disk takes a part or nothing; the rest follows later."""
        assert self.file
        written = self.file.write(self.unwritten)
        self.unwritten = self.unwritten[written:]


# ------------------------------------------------------------------------- trackers

# A tracker is a function of a step and of {key of metrics.jsonl: value}. It adds a point to the curve of each number,
# and shows texts. A resumed run repeats the steps after its checkpoint, so the tracker gets those steps twice.
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
                is_loss = "_loss" in key  # also val_loss_books, of an evaluation that somebody adds
                writer.add_scalar(f"{'loss' if is_loss else 'run'}/{key}", value, step)
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
