"""How far a run is: a plain record that checkpoints keep, so that a resumed run does nothing twice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """The progress of a run. `step` counts the optimizer steps done; training/resume.py finds it again."""

    max_steps: int
    data_id: str  # Loader.fingerprint: a resumed run must find the same data
    step: int = 0
    measured: dict[str, Any] = field(default_factory=lambda: {"step": 0})  # at this step: a line of metrics.jsonl
    evaluated: bool = False  # whether this step's evaluations are done
    best: dict[str, Any] | None = None  # step and val_loss of the best step that has a checkpoint
    last_saved_step: int | None = None  # of the newest checkpoint in this run's folder
    start_step: int = field(init=False)  # where this process began

    def __post_init__(self):
        self.start_step = self.step

    @property
    def is_last_step(self) -> bool:
        return self.step == self.max_steps

    @property
    def is_complete(self) -> bool:
        return self.step > self.max_steps or (self.is_last_step and self.evaluated)

    @property
    def best_step(self) -> int | None:
        return self.best["step"] if self.best else None

    def is_due(self, period: int) -> bool:
        """Whether something with this period (0: never) is due. On the last step everything enabled is."""
        return period > 0 and (self.step % period == 0 or self.is_last_step)

    def is_save_due(self, save_every: int) -> bool:
        """Whether this step is to be saved. A period of 0 leaves the last; the step a run started from is saved."""
        return self.step > self.start_step and (self.is_last_step or self.is_due(save_every))

    def update_best(self) -> None:
        """Make this step the best if it is both saved and evaluated, and its val loss is the lowest so far. A step
        without a checkpoint cannot be kept as the best."""
        val_loss = self.measured.get("val_loss")
        if val_loss is None or self.last_saved_step != self.step:
            return
        if self.best is None or val_loss < self.best["val_loss"]:
            self.best = {"step": self.step, "val_loss": val_loss}

    def advance(self) -> None:
        """Move to the next step, of which nothing is known yet."""
        self.step += 1
        self.measured = {"step": self.step}
        self.evaluated = False

    def state_dict(self) -> dict[str, Any]:
        """The entries of a checkpoint's train state that describe the run's progress."""
        return {
            "step": self.step,
            "record": self.measured,
            "best": self.best,
            "evaluated": self.evaluated,
            "max_steps": self.max_steps,
            "data": self.data_id,
        }
