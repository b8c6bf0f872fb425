"""A run's evaluations: validation loss, HellaSwag, samples, each with its own period."""

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hellaswag
from model import VOCAB_SIZE
from system.cli import UserError, print0, printable
from system.distributed import Runtime, is_lost_rank_error
from tokens import tokenizer
from tokens.loader import Loader, to_device
from training.config import TrainConfig
from training.reference import find_reference
from training.resume import Run
from training.sampling import Sampler, stream
from training.step import Step
from training.stop import FailedElsewhere, Stopped, failed


class EvaluationFailed(Exception):
    """An evaluation ended with an error, such as a lack of memory, on this rank or another; its cause says which. All
    ranks raise it at the same place."""


class Evals:
    """HellaSwag and samples call the model itself, because their shapes vary; validation calls the compiled forward."""

    def __init__(self, step: Step, data: Loader, val_data: Loader | None):
        cfg = step.cfg
        self.step, self.data, self.val_data = step, data, val_data
        self.examples = hellaswag.examples_at_hand(cfg.hellaswag_data, cfg.model) if cfg.hellaswag_every else []
        self.sample_every = cfg.sample_every
        if cfg.sample_every and cfg.model.vocab_size < VOCAB_SIZE:
            self.sample_every = 0
            print0(f"samples are off: the model has {cfg.model.vocab_size} tokens, fewer than GPT-2's")

    def measure(self, run: Run, check: Callable[[], None]) -> dict[str, Any]:
        """Measure what is due: val_loss, hellaswag_acc, hellaswag_acc_norm. `check` is Stop.check. Raises
        EvaluationFailed, but not twice at the same step: a run that resumes there goes on without."""
        note = self.step.cfg.run_dir / "failed_evaluation"
        failed_here = note.exists() and note.read_text().split(":")[0] == f"step {run.step}"
        if self.step.rt.any_rank(failed_here):
            print0(f"{note} says that the evaluation of this step failed: going on without it")
            return {}
        try:
            return self._measure(run, check)
        except (Stopped, OSError):  # the latter: nothing can be printed
            raise
        except Exception as e:
            if is_lost_rank_error(e):
                raise
            if not isinstance(e, FailedElsewhere):
                traceback.clear_frames(e.__traceback__)  # the memory that the failed pass held
                failed(self.step.rt)
                if not isinstance(e, UserError):
                    note.write_text(f"step {run.step}: {type(e).__name__}: {e}\n")
            raise EvaluationFailed from e

    def _measure(self, run: Run, check: Callable[[], None]) -> dict[str, Any]:
        cfg, rt = self.step.cfg, self.step.rt
        head = f"step {run.step:5d}/{run.max_steps}"
        found = {}
        if run.due(cfg.val_every):
            loss = validate(self.step.forward, self.val_data, cfg, rt, self.step.B, check)
            found["val_loss"] = loss
            print0(f"{head} | val loss: {loss:.4f}")
            known = find_reference(cfg.preset, run.max_steps, cfg.total_batch_size, self.data.paths[0].name)
            if known and (line := known.on_track(run.step, loss)):
                print0(line)
        if self.examples and run.due(cfg.hellaswag_every):
            score = hellaswag.evaluate(self.step.model, self.examples, rt.device, rt, check=check)
            found |= {"hellaswag_acc": score["acc"], "hellaswag_acc_norm": score["acc_norm"]}
            print0(f"{head} | {hellaswag.summary_line(score)}")
        return found

    def samples(self, asked_to_stop: Callable[[], bool]) -> str:
        """Four continuations of the sample prompt, labeled `sample i:`, cut short when this rank is asked to stop; or
        why there are none: only this rank samples, and its error would end the run on all."""
        try:
            return self._samples(asked_to_stop)
        except Exception as e:
            traceback.clear_frames(e.__traceback__)  # the memory that the failed pass held
            return f"no samples: {type(e).__name__}: {printable(str(e)):.300}"

    @torch.no_grad()
    def _samples(self, asked_to_stop: Callable[[], bool]) -> str:
        """Their own generator leaves training's random state alone."""
        cfg, rt, enc = self.step.cfg, self.step.rt, tokenizer.encoding()
        prompt = enc.encode_ordinary(cfg.sample_prompt)[-cfg.model.block_size :] or [tokenizer.EOT]
        idx = torch.tensor([prompt] * 4, device=rt.device)
        sampler = Sampler(generator=torch.Generator(rt.device).manual_seed(cfg.seed))
        columns = list(idx.T)
        with rt.autocast():
            for new in stream(self.step.model, idx, 48, sampler):
                if asked_to_stop():
                    break
                columns.append(new)
        rows = torch.stack(columns, dim=1).tolist()
        return "\n".join(f"sample {i}: {printable(enc.decode(row))}" for i, row in enumerate(rows))


def val_windows(data: Loader, cfg: TrainConfig) -> int:
    """Number of val sequences to evaluate."""
    return min(cfg.val_tokens // data.T, data.order.per_epoch)


@torch.no_grad()
def validate(
    forward: nn.Module, data: Loader, cfg: TrainConfig, rt: Runtime, B: int, check: Callable[[], None] = lambda: None
) -> float:
    """Mean cross-entropy (nats per token) over the first val_tokens of the val split, for any ranks and B. All batches
    have one shape, so nothing is compiled twice: rows past the end are padding that the loss ignores. `check` is
    called before each batch, equally often on all ranks."""
    count = val_windows(data, cfg)
    stride = B * rt.world_size
    windows = data.order.span(0, count)
    total = torch.zeros((), device=rt.device, dtype=torch.float32 if rt.device.type == "mps" else torch.float64)
    for i in range(0, count, stride):
        check()
        rows = data.read(windows[i : i + stride][rt.rank :: rt.world_size])
        if not len(rows):
            continue
        tokens = np.zeros((B, data.T + 1), np.uint16)
        tokens[: len(rows)] = rows
        x, y = to_device(torch.from_numpy(tokens), rt.device)
        y[len(rows) :] = -100  # cross_entropy's ignore_index
        with rt.autocast():
            _, loss = forward(x, y)
        total += loss.to(total.dtype) * len(rows)
    check()
    return rt.all_reduce(total).item() / count
