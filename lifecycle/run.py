"""What a run starts from: the settings, the network and the data, decided once, for all that stands around the loop.

    run, saved = open_run(cfg, rt)                      # lifecycle/start.py
    metrics = MetricsLogger(run)
    evaluator = Evaluator(run, trainer)
    saver = Saver(run, trainer, metrics)

Nothing in it changes while the run trains, but for the weights of the model.
"""

from dataclasses import dataclass

from model import GPT
from system.distributed import Runtime
from training.config import TrainConfig
from training.loader import Loader
from training.schedule import sequences_before


@dataclass(frozen=True)
class Run:
    """What lifecycle/start.py has decided from the flags, the run folder and the data."""

    cfg: TrainConfig  # with the network that is really trained
    rt: Runtime  # with the precision that all ranks use
    model: GPT  # that network, with its first weights: those of the checkpoint or of --init-from, or random ones
    data: Loader
    val_data: Loader | None  # None if the run does not validate
    start: int  # the step that it starts or resumes at
    sequences: int  # that have been read by then
    max_steps: int

    def sequences_before(self, step: int) -> int:
        """How many sequences of the data come before a step, from `start` on: after those that have been read, whatever
        batch they were read in."""
        return self.sequences + sequences_before(step, self.cfg) - sequences_before(self.start, self.cfg)
