"""Saving a run: what goes into a checkpoint, on which ranks, and when the last one is on the disk.

    with Saver(run, trainer, metrics) as saver:
        saver.save(500)             # returns once everything is copied to host memory; a thread writes it
        saver.writer.check()        # raises what has made that write fail for good
        saver.finish(19073)         # waits for the disk, and raises the error of a write that failed

Called by train_gpt2.py. The files are weights/checkpoint.py's, and what resuming reads is lifecycle/start.py's.
"""

from lifecycle.metrics import MetricsLogger, best_step
from lifecycle.run import Run
from lifecycle.start import train_state
from system.distributed import check_weights_agree
from training import master_weights
from training.step import Trainer
from weights import checkpoint
from weights.run_folder import complete_steps


class Saver:
    """Saves a run. Use it as a context manager: leaving the block, also by an error, waits for the write in
    progress."""

    def __init__(self, run: Run, trainer: Trainer, metrics: MetricsLogger):
        self.run, self.rt = run, run.rt
        self.trainer, self.metrics = trainer, metrics
        self.writer = checkpoint.CheckpointWriter(run.cfg.run_dir, run.cfg.keep)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.writer.join()

    def save(self, step: int) -> None:
        """Save this step, unless the run folder has it. Every rank must call it."""
        # At most one snapshot is in host memory: wait until the one before is written. The other ranks wait for rank 0
        # in `gather`, for up to two hours.
        self.writer.join()
        if self.rt.gather(self.writer.saved_step)[0] == step:
            return

        model, preset = self.run.model, self.run.cfg.preset
        weights = master_weights.float32_state_dict(model)
        check_weights_agree(self.rt, weights.values(), step)
        state = train_state(self.run, step, self.trainer)
        if self.rt.is_main:
            # A resumed run needs every line of metrics.jsonl before the checkpoint's step.
            self.metrics.flush()
            run_dir = self.run.cfg.run_dir
            best = best_step(run_dir, complete_steps(run_dir))
            self.writer.save(step, checkpoint.model_file(model, step, weights, preset=preset), state, best)

    def finish(self, step: int, deletes_old: bool = True) -> None:
        """Save this step as the last one, and wait until it is on the disk. Raises what a failed write has raised.
        deletes_old: whether --keep counts; if not, every earlier checkpoint stays. Every rank must call it."""
        if not deletes_old:
            self.writer.keep = 0
        self.save(step)
        self.writer.finish()

        # All ranks end together, after rank 0's write.
        self.rt.barrier()
