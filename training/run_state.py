"""The progress of a run, which every checkpoint stores, so that a resumed run repeats nothing.

    run = RunState(max_steps=19_073, data_id=data.fingerprint())
    run.advance()

Created by training/resume.py; the training loop in train_gpt2.py moves it from step to step:

    step = 500      the weights have had 500 updates
    save            last_saved_step = 500
    evaluate        measured = {"step": 500, "val_loss": 3.9}, evaluated = True; it may be the best step so far
    train           measured gets train_loss, lr, ... of the next update, and becomes a line of metrics.jsonl
    advance()       step = 501, measured = {"step": 501}, evaluated = False
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunState:
    """The progress of a run. `step` counts the optimizer steps done; training/resume.py restores it."""

    # The length of the run, and the data that it must find again when it is resumed (Loader.fingerprint).
    max_steps: int
    data_id: str

    # Where the run is. `measured` is the line of metrics.jsonl for this step, as far as it is known; `evaluated` says
    # whether the evaluations of this step are done, so that a resumed run does not repeat them.
    step: int = 0
    measured: dict[str, Any] = field(default_factory=lambda: {"step": 0})
    evaluated: bool = False

    # The best step that has a checkpoint, as {"step": 500, "val_loss": 3.9}, and the newest step saved in this run's
    # folder.
    best: dict[str, Any] | None = None
    last_saved_step: int | None = None

    # The step at which this process started or resumed the run.
    start_step: int = field(init=False)

    def __post_init__(self):
        self.start_step = self.step

    @property
    def is_at_end(self) -> bool:
        """Whether all steps are done. The last one may still have to be saved and evaluated."""
        return self.step == self.max_steps

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to do, as when the command of a finished run is repeated. A run resumed with fewer
        steps than it has done is complete, too."""
        return self.step > self.max_steps or (self.is_at_end and self.evaluated)

    @property
    def best_step(self) -> int | None:
        """The step with the lowest val loss among those with a checkpoint; None before there is one."""
        return self.best["step"] if self.best else None

    def is_due(self, period: int) -> bool:
        """Whether something with this period (0: never) is due. On the last step everything enabled is."""
        return period > 0 and (self.step % period == 0 or self.is_at_end)

    def is_save_due(self, save_every: int) -> bool:
        """Whether this step is to be saved. With a period of 0 only the last step is. The first step of this process is
        not: it is new, or saved already."""
        return self.step > self.start_step and (self.is_at_end or self.is_due(save_every))

    def update_best(self) -> None:
        """Make this step, which is saved, the best if its val loss is the lowest so far."""
        val_loss = self.measured.get("val_loss")
        if val_loss is not None and (self.best is None or val_loss < self.best["val_loss"]):
            self.best = {"step": self.step, "val_loss": val_loss}

    def advance(self) -> None:
        """Move to the next step, of which nothing is known yet."""
        self.step += 1
        self.measured = {"step": self.step}
        self.evaluated = False

    def state_dict(self) -> dict[str, Any]:
        """The entries of a checkpoint's train state that describe the run's progress."""
        # These names are part of the checkpoint format, `record` and `data` included.
        return {
            "step": self.step,
            "record": self.measured,
            "best": self.best,
            "evaluated": self.evaluated,
            "max_steps": self.max_steps,
            "data": self.data_id,
        }

    @classmethod
    def from_state_dict(cls, saved: dict[str, Any], max_steps: int, data_id: str) -> RunState:
        """The progress that state_dict returned, in a run that may now have another length."""
        return cls(max_steps, data_id, saved["step"], saved["record"], saved["evaluated"], saved["best"])
