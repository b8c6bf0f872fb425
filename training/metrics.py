"""The record of a run: metrics.jsonl (one object per step, no step twice), the console line, the pace, trackers."""

from __future__ import annotations

import atexit
import errno
import json
import math
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from system import cards
from system.cli import UserError, print0
from system.files import atomic_write
from system.units import format_duration

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.resume import Run
    from training.step import Result, Step


class Record:
    """Writes OUT/metrics.jsonl and the console line, and feeds the tracker; only rank 0 writes.

    A resumed run keeps the lines before its first step and writes the rest again, so no step appears twice.
    """

    def __init__(self, step: Step, run: Run):
        self.cfg, self.is_main = step.cfg, step.rt.is_main
        self.pace = Pace(step)
        self.usd_per_hour = step.cfg.gpu_hour_usd * step.rt.world_size
        self.began, self.printed = time.monotonic(), 0.0
        self.tracker: Tracker = Tracker()
        if self.is_main:
            path = self.cfg.run_dir / "metrics.jsonl"
            before = read_lines(path)
            with atomic_write(path) as f:
                kept = [json.dumps(line) + "\n" for line in before if line["step"] < run.start]
                f.write("".join(kept).encode())
            self.file = open(path, "ab", buffering=0)  # one write per line, and nothing buffered that could fail later
            self.tracker = make_tracker(self.cfg, run.start, max([-1, *(line["step"] for line in before)]))

    def step(self, run: Run, result: Result, lr: float, seconds: float) -> None:
        """A step is done: write its line and, at most about once a second, print build-nanogpt's line with MFU, ETA
        and the cost since this start."""
        pace = self.pace.step(seconds)
        run.measured |= {"train_loss": result.loss, "lr": lr, "grad_norm": result.norm} | pace
        self.write(run.measured)
        now, next_to_last = time.monotonic(), run.step >= run.max_steps - 1
        if self.is_main and (not self.printed or next_to_last or now - self.printed >= 1):
            self.printed = now
            print(self._line(run), flush=True)

    def _line(self, run: Run) -> str:
        m, eta = run.measured, self.pace.eta_s(run.max_steps - run.step - 1)
        parts = [
            f"step {run.step:5d}/{run.max_steps} | loss: {m['train_loss']:.6f} | lr {m['lr']:.4e}",
            f"norm: {m['grad_norm']:.4f} | dt: {m['step_ms']:.2f}ms | tok/sec: {m['tokens_per_second']:,.0f}",
        ]
        if m["mfu"]:
            parts.append(f"mfu: {m['mfu']:.1%}")
        if math.isfinite(eta):
            parts.append(f"eta: {format_duration(eta)}")
        if self.usd_per_hour:
            parts.append(f"cost: ${(time.monotonic() - self.began) / 3600 * self.usd_per_hour:.2f}")
        return " | ".join(parts)

    def write(self, measured: dict[str, Any]) -> None:
        """One line: `step` and whatever was measured there."""
        if not self.is_main:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in measured.items()}
        line = json.dumps(finite).encode() + b"\n"  # JSON has no NaN, which a refused update may contain
        try:
            if self.file.write(line) != len(line):  # the disk is full; readers skip a torn line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            why = f"cannot write to {self.file.name}: {e.strerror}"
            raise UserError(f"{why}; fix that, then continue with --resume auto") from None
        values = {k: v for k, v in measured.items() if k != "step" and v is not None}
        self.tracker.scalars(measured["step"], values)

    def text(self, step: int, text: str) -> None:
        """Send samples to the console and the tracker."""
        print0(text)
        self.tracker.text(step, text)

    def flush(self) -> None:
        """Flush everything to storage. Called before a checkpoint is written: a run resumed from it rewrites the steps
        after it, but not those before. TensorBoard holds points back for minutes, a bucket mounted as a folder holds a
        file back until it is closed."""
        os.fsync(self.file.fileno())
        self.file.close()
        self.file = open(self.file.name, "ab", buffering=0)
        self.tracker.flush()

    def close(self) -> None:
        if self.is_main:
            self.file.close()
            self.tracker.close()


class Pace:
    """How fast a run is: step time, tokens per second, MFU (None if the card's peak is unknown), time to go."""

    def __init__(self, step: Step):
        self.tokens, self.flops = step.cfg.total_batch_size, step.model.flops_per_token(step.cfg.sequence_length)
        self.peak = (cards.peak_flops(step.rt.device) or 0) * step.rt.world_size
        self.steps, self.smooth_s = 0, 0.0

    def step(self, seconds: float) -> dict[str, Any]:
        self.smooth_s = seconds if self.steps < 3 else 0.9 * self.smooth_s + 0.1 * seconds  # the first ones compile
        self.steps += 1
        rate = self.tokens / seconds
        mfu = rate * self.flops / self.peak if self.peak else None
        return {"step_ms": seconds * 1e3, "tokens_per_second": rate, "mfu": mfu}

    def eta_s(self, steps: int) -> float:
        """Seconds that `steps` more will take; NaN after the first step, which is not representative."""
        return self.smooth_s * steps if self.steps > 1 else math.nan


# ------------------------------------------------------------------------- trackers


class Tracker:
    """Where curves and samples also go; this one, --tracker none, does nothing.

    A tracker cannot take back all it was told, so what it has of steps that a resumed run repeats is kept: `untold` is
    the first step of which it has no text yet (or, of wandb, no point)."""

    untold = 0

    def scalars(self, step: int, values: dict[str, float]) -> None: ...
    def text(self, step: int, text: str) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def tensorboard_tag(key: str) -> str:
    """Where TensorBoard shows a curve: of the groups it opens the first two, which are these."""
    return f"{'loss' if key.endswith('_loss') else 'run'}/{key}"


class TensorBoard(Tracker):
    def __init__(self, cfg: TrainConfig, start: int):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self.writer = SummaryWriter(str(cfg.run_dir / "tensorboard"), purge_step=start)
        atexit.register(self.writer.close)  # the points before an error matter most
        settings = cfg.to_dict()
        settings |= {f"model.{k}": v for k, v in settings.pop("model").items()}
        shown = {k: v if type(v) in (int, float) else str(v) for k, v in settings.items()}
        # add_hparams would start another run; with the experiment that comes first here, which lists the columns,
        # TensorBoard would not look for what differs between runs, and show that first
        _, start_info, _ = hparams(shown, {})
        self.writer.file_writer.add_summary(start_info)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(tensorboard_tag(key), value, step)

    def text(self, step: int, text: str) -> None:
        if step >= self.untold:
            self.writer.add_text("samples", "```\n" + text + "\n```", step)
            self.writer.flush()

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    def __init__(self, cfg: TrainConfig, start: int):
        import wandb

        run_id = cfg.run_dir / "wandb_id"
        if not (start and run_id.exists()):
            run_id.write_text(f"{os.environ.get('WANDB_PROJECT', 'gpt2')}/{secrets.token_hex(4)}")
        project, _, known = run_id.read_text().rpartition("/")  # a restart without the variable is the same run
        who = {"project": project or "gpt2", "id": known, "name": os.environ.get("WANDB_NAME", cfg.run_dir.name)}
        self.run = wandb.init(**who, resume="allow", dir=str(cfg.run_dir), config=cfg.to_dict())

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if step >= self.untold:
            self.run.log(values, step=step)

    def text(self, step: int, text: str) -> None:
        if step >= self.untold:
            self.run.log({"samples": text}, step=step)

    def close(self) -> None:
        self.run.finish()


def make_tracker(cfg: TrainConfig, start: int, told: int) -> Tracker:
    """The tracker of a run that starts or resumes at step `start`; `told`: the newest step that metrics.jsonl has."""
    if cfg.tracker == "none":
        return Tracker()
    kind, trace = {"tensorboard": (TensorBoard, "tensorboard"), "wandb": (WandB, "wandb_id")}[cfg.tracker]
    resumed = start > 0 and (cfg.run_dir / trace).exists()
    tracker = kind(cfg, start)
    tracker.untold = max(start, told + 1) if resumed else start
    return tracker


# ------------------------------------------------------------------------- reading it


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl; a line torn by a kill is skipped. Empty if there is no file."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:  # an integer with too many digits becomes a float, as the plots need
            found = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and type(found.get("step")) is int and found["step"] >= 0:
            lines.append(found)
    return lines


def read_config(run_dir: Path) -> dict[str, Any]:
    """A run's config.json; empty if there is none that can be read."""
    try:
        found = json.loads((run_dir / "config.json").read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def tokens_per_step(run_dir: Path) -> int | None:
    """Tokens per step of a run, from its config.json; None if not recorded there."""
    found = read_config(run_dir).get("total_batch_size")
    return found if type(found) is int else None
