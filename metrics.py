"""The record of a run: metrics.jsonl (one object a step, no step twice), the console line, and trackers beside them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from runtime import UserError, print0


def duration(seconds: float) -> str:
    """4d07h, 1h02m, 3m20s or 12s."""
    s = int(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


class Outliers:
    """Running z-scores (exponential mean and variance over about 100 steps) that notice a spike of loss or norm."""

    def __init__(self, keys: tuple[str, ...] = ("train_loss", "grad_norm"), threshold: float = 6.0):
        self.threshold = threshold
        self._state = {key: (0, 0.0, 0.0) for key in keys}  # count, mean, variance

    def check(self, record: dict[str, Any]) -> list[str]:
        """What is out of the ordinary in this step's record, in words; then learn from it."""
        said = []
        for key, (n, mean, variance) in self._state.items():
            value = record[key]
            if not math.isfinite(value):
                continue
            z = (value - mean) / math.sqrt(variance) if variance > 0 else 0.0
            if n >= 50 and z > self.threshold:
                said.append(f"step {record['step']}: {key} {value:.4f} is {z:.1f} standard deviations above {mean:.4f}")
            share = max(0.01, 1 / (n + 1))
            variance = (1 - share) * (variance + share * (value - mean) ** 2)
            self._state[key] = (n + 1, mean + share * (value - mean), variance)
        return said


class RunLog:
    """Writes OUT/metrics.jsonl and feeds the tracker; does nothing on ranks other than 0.

    A resumed run keeps the lines before `start_step` and writes the rest again, so that no step appears twice.
    """

    def __init__(self, out_dir: Path, start_step: int, tracker: str, config: dict[str, Any], main: bool = True):
        self._file = self._tensorboard = self._wandb = None
        self._began, self._printed, self._outliers = time.monotonic(), 0.0, Outliers()
        if not main:
            return
        path = out_dir / "metrics.jsonl"
        kept = [line for line in read_lines(path) if line["step"] < start_step]
        part = path.with_name(".metrics.jsonl.part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(part, path)
        self._file = open(path, "a", buffering=1)
        if tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(out_dir / "tensorboard"), purge_step=start_step)
            self._tensorboard.add_text("config", "```\n" + json.dumps(config, indent=2) + "\n```", start_step)
        elif tracker == "wandb":
            try:
                import wandb
            except ImportError:
                raise UserError(
                    "--tracker wandb needs the wandb package; install it: .venv/bin/pip install wandb"
                ) from None
            name = f"{out_dir.resolve().parent.name}-{out_dir.name}"
            self._wandb = wandb.init(
                project="gpt2", name=name, id=name, resume="allow", dir=str(out_dir), config=config
            )

    def write(self, record: dict[str, Any]) -> None:
        """One line: `step` and whatever was measured there."""
        if self._file is None:
            return
        self._file.write(json.dumps(record) + "\n")
        values = {k: v for k, v in record.items() if k != "step" and v is not None}
        if self._tensorboard is not None:
            for key, value in values.items():
                self._tensorboard.add_scalar(key, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(values, step=record["step"])

    def console(self, record: dict[str, Any], max_steps: int, eta_s: float, usd_per_hour: float) -> None:
        """build-nanogpt's line with ETA, MFU where known and the cost so far; about once a second at most."""
        for line in self._outliers.check(record):
            print0(f"outlier: {line}")
        now = time.monotonic()
        if self._file is None or (self._printed and now - self._printed < 1):
            return
        self._printed = now
        line = (
            f"step {record['step']:5d}/{max_steps} | loss: {record['train_loss']:.6f} | lr {record['lr']:.4e} | norm: "
            f"{record['grad_norm']:.4f} | dt: {record['step_ms']:.2f}ms | tok/sec: {record['tokens_per_second']:,.0f}"
        )
        line += f" | mfu: {record['mfu']:.1%}" if record["mfu"] else ""
        line += f" | eta: {duration(eta_s)}"
        line += f" | cost: ${(now - self._began) / 3600 * usd_per_hour:.2f}" if usd_per_hour else ""
        print(line, flush=True)

    def text(self, step: int, text: str) -> None:
        """Samples, on the console and in the tracker."""
        print0(text)
        if self._tensorboard is not None:
            self._tensorboard.add_text("samples", "```\n" + text + "\n```", step)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl; a line torn by a kill is left out. Empty where there is no file."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:  # a number of more digits than an int64 may have becomes a float, as the plots need it
            record = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and record["step"] >= 0:
            lines.append(record)
    return lines


def tokens_per_step(out_dir: Path) -> int | None:
    """What a step of a run is worth, by its config.json; None where that does not say."""
    try:
        size = json.loads((out_dir / "config.json").read_text())["total_batch_size"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return size if type(size) is int and 0 < size < 2**53 else None
