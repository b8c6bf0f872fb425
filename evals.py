"""What a run evaluates periodically: validation loss, HellaSwag, samples."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

import hellaswag
import reference
import tokenizer
from cli import print0, printable
from config import TrainConfig
from loader import Loader, to_device
from model import GPT
from runtime import Runtime


def due(every: int, step: int, last: bool) -> bool:
    """Whether something with period `every` (0: never) is due at `step`; on the last step everything enabled is."""
    return every > 0 and (step % every == 0 or last)


class Evals:
    """A run's evaluations, each with its own period. HellaSwag and samples call the model itself, because their shapes
    vary; validation calls the compiled `forward`."""

    def __init__(
        self, cfg: TrainConfig, rt: Runtime, model: GPT, forward: nn.Module, data: Loader,
        val_data: Loader | None, B: int, max_steps: int,
    ):  # fmt: skip
        self.cfg, self.rt, self.model, self.forward = cfg, rt, model, forward
        self.val_data, self.B, self.max_steps = val_data, B, max_steps
        self.sample_every = cfg.sample_every
        self.comparable = cfg.preset == "gpt2-124m" and "edu" in data.paths[0].name  # with the runs of reference.py
        self.examples = hellaswag.examples_at_hand(cfg.hellaswag_data, cfg.model) if cfg.hellaswag_every else []
        if cfg.sample_every and cfg.model.vocab_size < tokenizer.VOCAB_SIZE:
            self.sample_every = 0
            print0(f"samples are off: the model has {cfg.model.vocab_size} tokens, fewer than GPT-2's")

    def measure(self, step: int, check: Callable[[], None]) -> dict[str, Any]:
        """Measure what is due at `step`: val_loss, hellaswag_acc, hellaswag_acc_norm. `check` may raise, to stop."""
        cfg, last = self.cfg, step == self.max_steps
        head = f"step {step:5d}/{self.max_steps}"
        found = {}
        if due(cfg.val_every, step, last):
            loss = validate(self.forward, self.val_data, cfg, self.rt, self.B, check)
            found["val_loss"] = loss
            print0(f"{head} | val loss: {loss:.4f}")
            if self.comparable and (line := reference.on_track(step, loss)):
                print0(line)
        if self.examples and due(cfg.hellaswag_every, step, last):
            score = hellaswag.evaluate(self.model, self.examples, self.rt.device, self.rt, check=check)
            found |= {"hellaswag_acc": score["acc"], "hellaswag_acc_norm": score["acc_norm"]}
            print0(f"{head} | {hellaswag.summary_line(score)}")
        return found


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
    return rt.all_reduce(total).item() / count


@torch.no_grad()
def samples(model: GPT, cfg: TrainConfig, rt: Runtime, asked_to_stop: Callable[[], bool]) -> str:
    """Four continuations of the sample prompt, labeled `sample i:`, cut short when this rank is asked to stop. Their
    own generator leaves training's random state alone."""
    enc = tokenizer.encoding()
    prompt = enc.encode_ordinary(cfg.sample_prompt)[-cfg.model.block_size :] or [tokenizer.EOT]
    idx = torch.tensor([prompt] * 4, device=rt.device)
    columns = list(idx.T)
    with rt.autocast():
        for new in model.stream(idx, 48, generator=torch.Generator(rt.device).manual_seed(cfg.seed)):
            if asked_to_stop():
                break
            columns.append(new)
    rows = torch.stack(columns, dim=1).tolist()
    return "\n".join(f"sample {i}: {printable(enc.decode(row))}" for i, row in enumerate(rows))
