"""Saving a run: what goes into a checkpoint, on which ranks, and when the last one is on the disk.

with Saver(run, trainer, metrics) as saver:
    saver.save()                # returns once everything is copied to host memory; a thread writes it
    saver.writer.check()        # raises the error of that write, if the next write would fail, too
    saver.finish()              # waits for the disk, and raises the error of a write that failed
"""

from checkpoints import checkpoint
from checkpoints.run_folder import best_step, complete_steps
from lifecycle.metrics import MetricsLogger
from lifecycle.open_run import Run
from system.distributed import check_tensors_agree
from training.config import TrainConfig
from training.step import Trainer


class Saver:
    """Saves a run. Use it as a context manager: leaving the block, also by an error, waits for the write in
    progress."""

    def __init__(self, run: Run, trainer: Trainer, metrics: MetricsLogger):
        self.run, self.trainer, self.metrics = run, trainer, metrics
        self.writer = checkpoint.CheckpointWriter(run.cfg.run_dir, run.cfg.keep)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.join()

    def save(self) -> None:
        """Save the present state, unless the run folder has this step already. Every rank must call this."""
        # Host memory holds at most one snapshot, so wait until the previous one is written. The other ranks wait for
        # rank 0 in `gather`, for up to two hours.
        run, rt, state = self.run, self.run.rt, self.trainer.state
        self.writer.join()
        if rt.gather(self.writer.saved_step)[0] == state.step:
            return

        # In evaluation mode, so that a checkpoint has the weights that evaluations measure.
        with self.trainer.evaluating():
            check_tensors_agree(rt, state.tensors_to_compare(), state.step)
            # There is no random state, because each step seeds the generator from its number.
            train_state = state.copy() | {
                "max_steps": run.max_steps,
                "facts": {name: tuple(fact) for name, fact in run.facts.items()},
                "config": run.cfg.to_dict(),
                "defaults": TrainConfig().to_dict(),
            }
            if rt.is_main:
                # A resumed run needs every line of metrics.jsonl before the checkpoint's step.
                self.metrics.flush()
                best = best_step(run.cfg.run_dir, complete_steps(run.cfg.run_dir))
                content = checkpoint.model_file(run.model, state.step, self.trainer.state_dict(), preset=run.cfg.preset)
                self.writer.save(state.step, content, train_state, best)

    def finish(self) -> None:
        """Save the present state, and wait until it is on the disk. Raises the error of a write that failed. Every rank
        must call this."""
        self.save()
        self.writer.finish()

        # All ranks end together, after rank 0's write.
        self.run.rt.barrier()
