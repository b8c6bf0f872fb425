"""Trackers, which show the curves and samples of a run: TensorBoard and Weights & Biases.

    tracker = make_tracker(cfg, start_step, last_logged_step)
    tracker.log_scalars(step, {"train_loss": 3.2})

Called by training/metrics.py on rank 0. To add a tracker, add a class here, its name to TrainConfig.tracker, and a
case to make_tracker.
"""

from __future__ import annotations

import atexit
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.config import TrainConfig


class Tracker:
    """The interface of all trackers. This one, --tracker none, does nothing.

    What was sent to a tracker cannot be withdrawn. A resumed run repeats the steps after its checkpoint, for which the
    tracker has points already, so samples (and all of wandb's points) are sent only from `first_unlogged_step` on.
    """

    def __init__(self, first_unlogged_step: int = 0):
        self.first_unlogged_step = first_unlogged_step

    def log_scalars(self, step: int, values: dict[str, float]) -> None:
        """Add a point at `step` to the curve of each of `values`: {key of metrics.jsonl: value}."""

    def log_text(self, step: int, text: str) -> None:
        """Show the samples of `step`."""

    def flush(self) -> None:
        """Write what is still buffered. Called before every save."""

    def close(self) -> None:
        """Write what is still buffered; nothing is logged afterwards."""


def tensorboard_tag(key: str) -> str:
    """Where TensorBoard shows the curve of a key of metrics.jsonl: GROUP/KEY. TensorBoard opens the first two groups,
    so there are only two."""
    group = "loss" if key.endswith(("_loss", "_bpb")) else "run"
    return f"{group}/{key}"


class TensorBoardTracker(Tracker):
    """Writes RUN_DIR/tensorboard."""

    def __init__(self, cfg: TrainConfig, start_step: int, first_unlogged_step: int):
        super().__init__(first_unlogged_step)
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        # purge_step hides the points of the steps that a resumed run repeats.
        self.writer = SummaryWriter(str(cfg.run_dir / "tensorboard"), purge_step=start_step)
        atexit.register(self.writer.close)  # after an error too, when the last points matter most

        # The settings in one flat dict. TensorBoard takes numbers and texts.
        settings = cfg.to_dict()
        settings |= {f"model.{name}": value for name, value in settings.pop("model").items()}
        values = {name: value if type(value) in (int, float) else str(value) for name, value in settings.items()}

        # Show them as hyperparameters. SummaryWriter.add_hparams would write three records to another run. The first of
        # them is a list of columns, after which TensorBoard no longer looks for the settings in which runs differ, so
        # write only the second one, which has the values.
        _, session_start_info, _ = hparams(values, {})
        self.writer.file_writer.add_summary(session_start_info)

    def log_scalars(self, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(tensorboard_tag(key), value, step)

    def log_text(self, step: int, text: str) -> None:
        if step >= self.first_unlogged_step:
            self.writer.add_text("samples", f"```\n{text}\n```", step)
            self.writer.flush()

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WandbTracker(Tracker):
    """Sends to Weights & Biases: project WANDB_PROJECT (default gpt2), name WANDB_NAME (default the run folder's)."""

    def __init__(self, cfg: TrainConfig, start_step: int, first_unlogged_step: int):
        super().__init__(first_unlogged_step)
        import wandb

        # The project and id are kept with the run as PROJECT/ID, so that a restart without the variable continues the
        # same run. A new run gets a random id.
        id_file = cfg.run_dir / "wandb_id"
        if start_step == 0 or not id_file.exists():
            id_file.write_text(f"{os.environ.get('WANDB_PROJECT', 'gpt2')}/{secrets.token_hex(4)}")
        project, _, run_id = id_file.read_text().rpartition("/")

        # Start this run at wandb, or continue it.
        self.run = wandb.init(
            project=project or "gpt2",  # WANDB_PROJECT may be set but empty
            id=run_id,
            name=os.environ.get("WANDB_NAME", cfg.run_dir.name),
            resume="allow",
            dir=str(cfg.run_dir),
            config=cfg.to_dict(),
        )

    def log_scalars(self, step: int, values: dict[str, float]) -> None:
        if step >= self.first_unlogged_step:
            self.run.log(values, step=step)

    def log_text(self, step: int, text: str) -> None:
        if step >= self.first_unlogged_step:
            self.run.log({"samples": text}, step=step)

    def close(self) -> None:
        self.run.finish()


def make_tracker(cfg: TrainConfig, start_step: int, last_logged_step: int) -> Tracker:
    """The tracker of a run that starts or resumes at `start_step`. `last_logged_step`: the newest in metrics.jsonl, -1
    if there is none; a tracker that has followed the run so far has been sent everything up to it."""
    # The class, and the file or folder that it makes in the run folder.
    match cfg.tracker:
        case "none":
            return Tracker()
        case "tensorboard":
            tracker_class = TensorBoardTracker
            file_name = "tensorboard"
        case "wandb":
            tracker_class = WandbTracker
            file_name = "wandb_id"
        case _:
            raise ValueError(f"no tracker {cfg.tracker!r}: add a case to make_tracker in training/trackers.py")

    # If that file exists, this tracker has followed the run so far, and has the steps that the run now repeats. A
    # tracker that is new to the run gets all steps of this start.
    first_unlogged_step = start_step
    if start_step > 0 and (cfg.run_dir / file_name).exists():
        first_unlogged_step = max(start_step, last_logged_step + 1)
    return tracker_class(cfg, start_step, first_unlogged_step)
