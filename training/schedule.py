"""What depends on the step: its number, its place in the run, its batch and its learning rate, as one Step object.

    now = at(250, cfg, max_steps)       # Step(number=250, is_last=False, sequences_before=128000, ...)
    trainer.set_step(now)               # the learning rates of this step (training/step.py)
    if now.is_due(cfg.save_every): ...

Only `at` makes a Step. To make something else depend on the step, add a field to Step, compute the field in `at`, and
use it in Trainer.set_step.

              cosine                                      trapezoid
    max_lr         .--.                                          .------------.
                 .'    '-.                                     .'              '.
               .'         '-.                                .'                  '.
    min_lr   .'              '----.                        .'                      '.
    0       '                     |                       '                          |
            |------|              |                       |------|             |-----|
          warmup_steps        max_steps                 warmup_steps     cooldown * max_steps

To add a schedule, add its name to Recipe.schedule, and a function such as cosine_decay to DECAYS.
"""

import bisect
import math
from dataclasses import dataclass

from system.errors import require
from training.config import TrainConfig

MIN_STEPS = 20  # --epochs must give at least this many steps: fewer are too few to learn from


@dataclass(frozen=True)
class Step:
    """One step of a run, computed from its number, the settings and max_steps. A checkpoint stores the number, and the
    sequences read so far."""

    number: int  # how many steps come before this one
    is_last: bool  # the last iteration of the loop: it saves and evaluates, and does not train
    sequences_before: int  # sequences that the earlier steps read, over all ranks
    sequences: int  # sequences that this step reads, over all ranks and micro-steps
    lr_factor: float  # the learning rate of every parameter group, as a fraction of the group's peak

    def is_due(self, period: int) -> bool:
        """Whether something with this period happens at this step. A period of 0 means never. At the last step,
        everything with a period above 0 is due."""
        return period > 0 and (self.number % period == 0 or self.is_last)


def at(number: int, cfg: TrainConfig, max_steps: int) -> Step:
    """The step with this number in a run of max_steps."""
    sequences_before = count_sequences(number, cfg)
    return Step(
        number=number,
        is_last=number >= max_steps,
        sequences_before=sequences_before,
        sequences=count_sequences(number + 1, cfg) - sequences_before,
        lr_factor=lr_factor(number, max_steps, cfg),
    )


# ------------------------------------------------------------------------- batches


def count_sequences(steps: int, cfg: TrainConfig) -> int:
    """How many sequences the first `steps` steps read, over all ranks. For steps of unequal size, change this function
    alone. The number must rise with every step."""
    return steps * (cfg.total_batch_size // cfg.sequence_length)


def common_batch(cfg: TrainConfig, max_steps: int) -> int:
    """The largest number of sequences that divides the batch of every step. Ranks and micro-batches must divide it."""
    return math.gcd(*{at(step, cfg, max_steps).sequences for step in range(max_steps)})


def count_steps(cfg: TrainConfig, sequences_per_epoch: int) -> int:
    """Optimizer steps of the whole run, for data with this many training sequences per epoch. Raises UserError if the
    epochs have too few steps to learn from."""
    if cfg.max_steps:
        return cfg.max_steps
    # As many whole steps as the epochs have sequences for.
    sequences = cfg.epochs * sequences_per_epoch
    steps = bisect.bisect_right(range(sequences + 1), sequences, key=lambda step: count_sequences(step, cfg)) - 1
    data = f"--epochs {cfg.epochs} of this data ({sequences_per_epoch} sequences of {cfg.sequence_length} tokens)"
    problem = f"{data} make {steps} steps of --total-batch-size {cfg.total_batch_size}, too few to learn from"
    fix = f"--max-steps {2 * MIN_STEPS}"
    if sequences >= MIN_STEPS:
        fix = f"--total-batch-size {max(1, sequences // (2 * MIN_STEPS)) * cfg.sequence_length}"
    require(steps >= MIN_STEPS, f"{problem}; use more text, or {fix}")
    return steps


# ------------------------------------------------------------------------- learning rates


def lr_factor(step: int, max_steps: int, cfg: TrainConfig) -> float:
    """The learning rate of a step as a fraction of its peak: a linear warm-up to 1, then the decay of the schedule down
    to min_lr / max_lr, where the rate stays from max_steps on."""
    floor = cfg.min_lr / cfg.max_lr if cfg.max_lr else 0.0

    # After the end of the run, the rate stays at its floor, even if the warm-up is longer than the run.
    if step >= max_steps:
        return floor

    # The first step already learns, as in build-nanogpt.
    warmup = count_warmup_steps(max_steps, cfg)
    if step < warmup:
        return (step + 1) / warmup

    # Rescale the decay from [0, 1] to [floor, 1].
    return floor + (1 - floor) * DECAYS[cfg.schedule](step, max_steps, cfg)


def count_warmup_steps(max_steps: int, cfg: TrainConfig) -> float:
    """The steps of the warm-up. A setting below 1 is a fraction of max_steps."""
    return cfg.warmup_steps if cfg.warmup_steps >= 1 else round(cfg.warmup_steps * max_steps)


def cosine_decay(step: int, max_steps: int, cfg: TrainConfig) -> float:
    """Half a cosine from the end of the warm-up to the last step (Loshchilov and Hutter 2016, without restarts)."""
    warmup = count_warmup_steps(max_steps, cfg)
    progress = (step - warmup) / (max_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def trapezoid_decay(step: int, max_steps: int, cfg: TrainConfig) -> float:
    """Constant, then linear over the last `cooldown` part of the steps (Hägele et al. 2024)."""
    # Before the cooldown begins, the quotient is above 1. A cooldown shorter than a step counts as one step.
    steps_left = max_steps - step
    return min(1.0, steps_left / max(1.0, cfg.cooldown * max_steps))


# {schedule: the function that returns the decay at a step}, from 1 after the warm-up to nearly 0 at the last step. A
# trapezoid whose cooldown begins during the warm-up starts below 1. Each function is called for steps from the
# end of the warm-up to max_steps - 1.
DECAYS = {"cosine": cosine_decay, "trapezoid": trapezoid_decay}
