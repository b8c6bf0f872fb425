"""A run's progress: how far it is, how that is found again, and what may differ when it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from system.cli import UserError, print0, require
from system.distributed import Runtime
from tokens.loader import Loader
from training import checkpoint, optim
from training.config import TrainConfig, drift
from training.metrics_file import read_metrics
from training.presets import model_from_init

EVALUATIONS = ("val_loss", "hellaswag_acc", "hellaswag_acc_norm")


@dataclass
class Run:
    """How far a run is. Checkpoints include it, so a resumed run does nothing twice."""

    max_steps: int
    data_id: str  # Loader.fingerprint: a resumed run must find the same data
    step: int = 0
    measured: dict[str, Any] = field(default_factory=lambda: {"step": 0})  # at this step: a line of metrics.jsonl
    evaluated: bool = False  # whether this step's evaluations are done
    best: dict[str, Any] | None = None  # step and val loss of the best saved step: no other can be kept as the best
    stored: int | None = None  # the step of the newest checkpoint in this run's folder
    saved: dict[str, Any] | None = None  # the train state it resumes from

    def __post_init__(self):
        self.start = self.step

    @property
    def last(self) -> bool:
        return self.step == self.max_steps

    @property
    def complete(self) -> bool:
        return self.step > self.max_steps or (self.last and self.evaluated)

    def due(self, every: int) -> bool:
        """Whether something with period `every` (0: never) is due; on the last step everything enabled is."""
        return every > 0 and (self.step % every == 0 or self.last)

    def save_due(self, every: int) -> bool:
        """Whether this step is to be saved; a period of 0 leaves the last."""
        return self.step > self.start and (self.last or self.due(every))

    def note_best(self) -> None:
        """Once this step is both saved and evaluated: is it the best?"""
        val_loss = self.measured.get("val_loss")
        if val_loss is not None and self.stored == self.step:
            if self.best is None or val_loss < self.best["val_loss"]:
                self.best = {"step": self.step, "val_loss": val_loss}

    @property
    def best_step(self) -> int | None:
        return self.best["step"] if self.best else None

    def advance(self) -> None:
        """On to the next step, of which nothing is known yet."""
        self.step += 1
        self.measured, self.evaluated = {"step": self.step}, False

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {
            "step": self.step, "record": self.measured, "best": self.best, "evaluated": self.evaluated,
            "max_steps": self.max_steps, "data": self.data_id,
        }  # fmt: skip


def find(cfg: TrainConfig, rt: Runtime, data: Loader) -> Run:
    """The run as far as it is: new, or resumed from a checkpoint that fits this run's config, data and folder. Raises
    UserError rather than overwrite another run or later steps of this one."""
    run = Run(cfg.horizon(data.order.per_epoch), data.fingerprint())
    saved = find_saved(cfg)
    check_ranks(rt, saved, run)
    if saved is None:
        return run
    check_drift(cfg, saved, run)
    step, best, measured = saved["step"], saved["best"], saved["record"]
    if best and not checkpoint.model_path(cfg.run_dir, best["step"]).exists():
        best = None  # it is in the folder of another run, from which this one starts
    here = saved["model_file"].parent.resolve() == cfg.run_dir.resolve()
    evaluated = saved["evaluated"]
    if here and not evaluated:  # it was saved before it was evaluated; metrics.jsonl knows what came of that
        for line in read_metrics(cfg.run_dir / "metrics.jsonl"):
            if line["step"] == step:
                evaluated = True
                measured = measured | {key: line[key] for key in EVALUATIONS if key in line}
    stored = step if here else None
    return Run(run.max_steps, run.data_id, step, measured, evaluated, best, stored, saved)


def find_saved(cfg: TrainConfig) -> dict[str, Any] | None:
    """The train state that --resume names, or None for a new run. Raises UserError if the run folder already holds a
    run that this one would overwrite."""
    out, newest = cfg.run_dir, checkpoint.latest_step(cfg.run_dir)
    saved = None
    if cfg.resume == "auto" and newest is not None:
        saved = checkpoint.read_train_state(out)
    elif cfg.resume not in ("auto", "none"):
        saved = checkpoint.read_train_state(cfg.resume)
    if newest is not None and (saved is None or saved["step"] < newest):
        how = "auto" if cfg.resume == "none" else checkpoint.model_path(out, newest)  # auto needs the preset, too
        mend = f"continue it with --resume {how}, or write to another folder with --out-dir"
        raise UserError(f"{out} already holds a run at step {newest}, which is never overwritten; {mend}")
    if newest is None and (weights := checkpoint.complete_steps(out, ["model"])):  # as pulled without the optimizer
        path = checkpoint.model_path(out, weights[-1])
        why = f"{path} has no whole optim_*.pt next to it, so the run cannot resume, and no weights are overwritten"
        raise UserError(f"{why}; to train on from them, use --init-from {path} and another --out-dir")
    return saved


def check_drift(cfg: TrainConfig, saved: dict[str, Any], run: Run) -> None:
    """Print what has changed since the checkpoint was made. Raises UserError if that shapes the result, unless
    --allow-drift accepts it; the network cannot change at all."""
    old = TrainConfig.from_dict(saved["config"])
    if cfg.init_from != "scratch":  # which set the network when the run began, or at least the vocabulary
        model = old.model if model_from_init(cfg) else replace(cfg.model, vocab_size=old.model.vocab_size)
        cfg = replace(cfg, model=model)
    harmless, refused = drift(old, cfg)
    for change in harmless:
        if change.split(":")[0] not in ("resume", "out_dir"):
            print0(f"resume: {change}")
    if saved["data"] != run.data_id:
        same = saved["data"].partition("-")[0] == run.data_id.partition("-")[0]  # older versions mixed none
        why = "would now be mixed in another way" if same else "are not those the run was trained on"
        refused.append(f"data: the shards in {cfg.data_dir} {why}")
    network = [c for c in refused if c.startswith("model.") and not c.startswith("model.vocab_size")]
    why = f"the checkpoint of step {saved['step']} was made with other settings: {'; '.join(refused)}"
    mend = "its network cannot change" if network else "or continue anyway with --allow-drift"
    require(not refused or (cfg.allow_drift and not network), f"{why}. Restore them; {mend}")
    for change in refused:
        print0(f"resume, by --allow-drift: {change}")
    tell_rate(cfg, old, saved, run)


def tell_rate(cfg: TrainConfig, old: TrainConfig, saved: dict[str, Any], run: Run) -> None:
    """Say what another number of steps makes of the learning rate, which optim.lr_factor decides."""
    if saved["max_steps"] != run.max_steps:
        before = optim.lr_factor(saved["step"], saved["max_steps"], old) * old.max_lr
        after = optim.lr_factor(saved["step"], run.max_steps, cfg) * cfg.max_lr
        moves = f"stays {after:.3e}" if before == after else f"moves from {before:.3e} to {after:.3e}"
        spans = f"{saved['max_steps']} steps become {run.max_steps}; the {cfg.schedule} schedule now spans them"
        print0(f"resume: {spans}, and the learning rate at step {saved['step']} {moves}")


def check_ranks(rt: Runtime, saved: dict[str, Any] | None, run: Run) -> None:
    """Raise UserError unless all ranks found the same checkpoint, data and number of steps. On several machines they
    may not: DDP would train them side by side, from different weights, without a word."""
    step = saved["step"] if saved else -1
    found = torch.tensor([step, run.max_steps, int(run.data_id[:15], 16)], device=rt.device)
    first, *others = torch.stack(rt.all_gather(found)).tolist()
    names = ("checkpoint (step, -1: none)", "max-steps", "data (hash)")
    for rank, other in enumerate(others, 1):
        for what, theirs, ours in zip(names, other, first, strict=True):
            mend = "every machine must see the same --out-dir and --data-dir and get the same flags"
            require(theirs == ours, f"rank {rank} and rank 0 differ in {what}: {theirs} and {ours}; {mend}")
