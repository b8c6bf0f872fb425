"""Saving a run: what goes into a checkpoint, on which ranks, and when the last one is on the disk.

    with Saver(run, trainer, metrics) as saver:
        saver.save()                # returns once everything is copied to host memory; a thread writes it
        saver.writer.check()        # raises what has made that write fail for good
        saver.finish()              # waits for the disk, and raises the error of a write that failed

The files are weights/checkpoint.py's, and what resuming reads is lifecycle/start.py's.
"""

from lifecycle.metrics import MetricsLogger, best_step
from lifecycle.start import Run
from system import machine
from system.distributed import check_tensors_agree
from training.state import to_state_dict
from training.step import Trainer
from weights import checkpoint
from weights.run_folder import complete_steps


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
        """Save the state of now, unless the run folder has this step. Every rank must call it."""
        # At most one snapshot is in host memory: wait until the one before is written. The other ranks wait for rank 0
        # in `gather`, for up to two hours.
        run, rt, state = self.run, self.run.rt, self.trainer.state
        self.writer.join()
        if rt.gather(self.writer.saved_step)[0] == state.step:
            return

        check_tensors_agree(rt, state.compared(), state.step)
        # There are no random states: the random numbers of a step follow from its number.
        train_state = state.copy() | {
            "max_steps": run.max_steps,
            "data": run.data.fingerprint(),
            "dtype": machine.dtype_name(rt.dtype),
            "config": run.cfg.to_dict(),
            "versions": machine.versions(),
        }
        if rt.is_main:
            # A resumed run needs every line of metrics.jsonl before the checkpoint's step.
            self.metrics.flush()
            best = best_step(run.cfg.run_dir, complete_steps(run.cfg.run_dir))
            weights = to_state_dict(run.model, state.weights)
            content = checkpoint.model_file(run.model, state.step, weights, preset=run.cfg.preset)
            self.writer.save(state.step, content, train_state, best)

    def finish(self) -> None:
        """Save the state of now as the last one, and wait until it is on the disk. Raises what a failed write has
        raised. Every rank must call it."""
        self.save()
        self.writer.finish()

        # All ranks end together, after rank 0's write.
        self.run.rt.barrier()
