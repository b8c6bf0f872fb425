"""The record of a run: metrics.jsonl (one object per step, no step twice), the console line, and trackers."""

import atexit
import errno
import json
import math
import os
import secrets
import time
from pathlib import Path
from typing import Any

from cli import UserError, print0
from files import whole_file


def duration(seconds: float) -> str:
    """4d07h, 1h02m, 3m20s or 12s."""
    s = int(seconds)
    if s >= 86400:
        return f"{s // 86400}d{s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


class Outliers:
    """Running z-scores (exponential mean and variance over about 100 steps) that flag spikes in loss or norm."""

    def __init__(self):
        self._state = {key: (0, 0.0, 0.0) for key in ("train_loss", "grad_norm")}  # count, mean, variance

    def check(self, record: dict[str, Any]) -> list[str]:
        """Describe the outliers in this step's record, then update the statistics with it."""
        said = []
        for key, (n, mean, variance) in self._state.items():
            value = record[key]
            if not math.isfinite(value):
                continue
            z = (value - mean) / math.sqrt(variance) if variance > 0 else 0.0
            if n >= 50 and z > 6:
                said.append(f"step {record['step']}: {key} {value:.4f} is {z:.1f} standard deviations above {mean:.4f}")
            share = max(0.01, 1 / (n + 1))
            variance = (1 - share) * (variance + share * (value - mean) ** 2)
            self._state[key] = (n + 1, mean + share * (value - mean), variance)
        return said


class RunLog:
    """Writes OUT/metrics.jsonl and feeds the tracker; does nothing on ranks other than 0.

    A resumed run keeps the lines before `start_step` and writes the rest again, so no step appears twice.
    """

    def __init__(self, out_dir: Path, start_step: int, tracker: str, config: dict[str, Any], main: bool = True):
        self._file = self._tensorboard = self._wandb = None
        self._began, self._printed, self._outliers = time.monotonic(), 0.0, Outliers()
        if not main:
            return
        path = out_dir / "metrics.jsonl"
        before = read_lines(path)
        with whole_file(path) as f:
            f.write("".join(json.dumps(line) + "\n" for line in before if line["step"] < start_step).encode())
        self._file = open(path, "ab", buffering=0)  # one write per line, and nothing buffered that could fail on close
        # TensorBoard can purge points but not texts, wandb neither: what they have of repeated steps is kept
        self._untold = start_step  # the first step of which the tracker has no text or point yet
        traces = {"tensorboard": "tensorboard", "wandb": "wandb_id"}
        if start_step and tracker in traces and (out_dir / traces[tracker]).exists():
            self._untold = max([start_step, *(line["step"] + 1 for line in before)])
        if tracker == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter
            from torch.utils.tensorboard.summary import hparams

            self._tensorboard = SummaryWriter(str(out_dir / "tensorboard"), purge_step=start_step)
            atexit.register(self._tensorboard.close)  # the points before an error matter most
            flat = config | {f"model.{k}": v for k, v in config.get("model", {}).items()}
            flat = {k: v for k, v in flat.items() if isinstance(v, bool | int | float | str)}
            for summary in hparams(flat, {"train_loss": 0.0, "val_loss": 0.0}):  # add_hparams would start another run
                self._tensorboard.file_writer.add_summary(summary)
        elif tracker == "wandb":
            import wandb

            run_id = out_dir / "wandb_id"
            if not (start_step and run_id.exists()):
                run_id.write_text(f"{os.environ.get('WANDB_PROJECT', 'gpt2')}/{secrets.token_hex(4)}")
            project, _, known = run_id.read_text().rpartition("/")  # a restart without the variable is the same run
            who = {"project": project or "gpt2", "id": known, "name": os.environ.get("WANDB_NAME", out_dir.name)}
            self._wandb = wandb.init(**who, resume="allow", dir=str(out_dir), config=config)

    def write(self, record: dict[str, Any]) -> None:
        """One line: `step` and whatever was measured there."""
        if self._file is None:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = json.dumps(finite).encode() + b"\n"  # JSON has no NaN, which a refused update may contain
        try:
            if self._file.write(line) != len(line):  # the disk is full; readers skip a torn line
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            why = f"cannot write to {self._file.name}: {e.strerror}"
            raise UserError(f"{why}; fix that, then continue with --resume auto") from None
        values = {k: v for k, v in record.items() if k != "step" and v is not None}
        if self._tensorboard is not None:
            for key, value in values.items():
                self._tensorboard.add_scalar(key, value, record["step"])
        if self._wandb is not None and record["step"] >= self._untold:
            self._wandb.log(values, step=record["step"])

    def console(self, record: dict[str, Any], max_steps: int, eta_s: float, usd_per_hour: float) -> None:
        """build-nanogpt's line with MFU, ETA and the cost since this start; at most about once a second."""
        for line in self._outliers.check(record):
            print0(f"outlier: {line}")
        now = time.monotonic()
        soon = now - self._printed < 1 and record["step"] < max_steps - 1
        if self._file is None or (self._printed and soon):
            return
        self._printed = now
        line = (
            f"step {record['step']:5d}/{max_steps} | loss: {record['train_loss']:.6f} | lr {record['lr']:.4e} | norm: "
            f"{record['grad_norm']:.4f} | dt: {record['step_ms']:.2f}ms | tok/sec: {record['tokens_per_second']:,.0f}"
        )
        line += f" | mfu: {record['mfu']:.1%}" if record["mfu"] else " | mfu: unknown"
        line += f" | eta: {duration(eta_s) if math.isfinite(eta_s) else 'unknown'}"
        line += f" | cost: ${(now - self._began) / 3600 * usd_per_hour:.2f}" if usd_per_hour else ""
        print(line, flush=True)

    def text(self, step: int, text: str) -> None:
        """Send samples to the console and the tracker."""
        print0(text)
        if self._tensorboard is not None and step >= self._untold:
            self._tensorboard.add_text("samples", "```\n" + text + "\n```", step)
            self._tensorboard.flush()
        if self._wandb is not None and step >= self._untold:
            self._wandb.log({"samples": text}, step=step)

    def flush(self) -> None:
        """Flush everything to storage. Called before a checkpoint is written: a run resumed from it rewrites the steps
        after it, but not those before. TensorBoard holds points back for minutes, a bucket mounted as a folder holds a
        file back until it is closed."""
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = open(self._file.name, "ab", buffering=0)
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics.jsonl; a line torn by a kill is skipped. Empty if there is no file."""
    lines = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:  # integers with too many digits for an int64 become floats, as the plots need
            record = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int and record["step"] >= 0:
            lines.append(record)
    return lines


def tokens_per_step(out_dir: Path) -> int | None:
    """Tokens per step of a run, from its config.json; None if not recorded there."""
    try:
        size = json.loads((out_dir / "config.json").read_text())["total_batch_size"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return None
    return size if type(size) is int and 0 < size < 2**53 else None
