"""All that depends on the step: the learning rates, and how many sequences the steps before it have read.

    lr = set_learning_rates(optimizers, step, total_steps, cfg)     # before each update; returns the rate to log
    first = sequences_before(step, cfg)                             # the place of its batch in the order of the data

              cosine                                      trapezoid
    max_lr         .--.                                          .------------.
                 .'    '-.                                     .'              '.
               .'         '-.                                .'                  '.
    min_lr   .'              '----.                        .'                      '.
    0       '                     |                       '                          |
            |------|              |                       |------|             |-----|
          warmup_steps       total_steps                warmup_steps     cooldown * total_steps

The rate in a checkpoint is ignored: a resumed run's rate follows from its own flags and total_steps. To add a schedule,
add its name to Recipe.schedule, and a function such as cosine_decay to DECAYS.
"""

import bisect
import math

import torch

from system.errors import require
from training.config import TrainConfig

MIN_STEPS = 20  # that --epochs must have: with fewer the rate is hardly at its peak

# ------------------------------------------------------------------------- sequences


def sequences_before(step: int, cfg: TrainConfig) -> int:
    """How many sequences all ranks have read before a step. The order of the data, the log, prices and what a resumed
    run skips follow from it: steps of other sizes are a change of this function alone. It rises with every step."""
    return step * (cfg.total_batch_size // cfg.sequence_length)


def sequences_at(step: int, cfg: TrainConfig) -> int:
    """How many sequences a step reads, over all ranks and micro-steps."""
    return sequences_before(step + 1, cfg) - sequences_before(step, cfg)


def common_batch(max_steps: int, cfg: TrainConfig) -> int:
    """The largest number of sequences that divides every batch of a run: ranks and micro-batches must divide it."""
    return math.gcd(*{sequences_at(step, cfg) for step in range(max_steps)})


def count_steps(cfg: TrainConfig, sequences_per_epoch: int) -> int:
    """Optimizer steps of the whole run, for data with this many training sequences per epoch. Raises UserError if the
    epochs have too few to learn from."""
    if cfg.max_steps:
        return cfg.max_steps
    # As many whole steps as the epochs have.
    sequences = cfg.epochs * sequences_per_epoch
    steps = bisect.bisect_right(range(sequences + 1), sequences, key=lambda step: sequences_before(step, cfg)) - 1
    data = f"--epochs {cfg.epochs} of this data ({sequences_per_epoch} sequences of {cfg.sequence_length} tokens)"
    problem = f"{data} make {steps} steps of --total-batch-size {cfg.total_batch_size}, too few to learn from"
    fix = f"--max-steps {2 * MIN_STEPS}"
    if sequences >= MIN_STEPS:
        fix = f"--total-batch-size {max(1, sequences // (2 * MIN_STEPS)) * cfg.sequence_length}"
    require(steps >= MIN_STEPS, f"{problem}; use more text, or {fix}")
    return steps


# ------------------------------------------------------------------------- rates


def lr_factor(step: int, total_steps: int, cfg: TrainConfig) -> float:
    """Fraction of the peak learning rate at `step`: a linear warm-up to 1, then the schedule's decay down to
    min_lr / max_lr, where it stays from total_steps on."""
    # The fraction at which the decay ends.
    floor = cfg.min_lr / cfg.max_lr if cfg.max_lr else 0.0

    # Past the end, as after a resume with fewer steps, the rate stays at its floor, even if the warm-up is longer.
    if step >= total_steps:
        return floor

    # Warm-up. The first step already learns, as in build-nanogpt.
    warmup = count_warmup_steps(total_steps, cfg)
    if step < warmup:
        return (step + 1) / warmup

    # In between, what is left of the decay is the distance from the floor.
    return floor + (1 - floor) * DECAYS[cfg.schedule](step, total_steps, cfg)


def count_warmup_steps(total_steps: int, cfg: TrainConfig) -> float:
    """The steps of the warm-up, which may be given as a share of all."""
    return cfg.warmup_steps if cfg.warmup_steps >= 1 else round(cfg.warmup_steps * total_steps)


def cosine_decay(step: int, total_steps: int, cfg: TrainConfig) -> float:
    """Half a cosine from the end of the warm-up to the last step (Loshchilov and Hutter 2016, without restarts)."""
    warmup = count_warmup_steps(total_steps, cfg)
    progress = (step - warmup) / (total_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def trapezoid_decay(step: int, total_steps: int, cfg: TrainConfig) -> float:
    """Constant, then linear over the last `cooldown` part of the steps (Hägele et al. 2024)."""
    # Before the cooldown the quotient is above 1. A cooldown of less than a step counts as one.
    steps_left = total_steps - step
    return min(1.0, steps_left / max(1.0, cfg.cooldown * total_steps))


# How much of the decay is left at `step`, for warmup_steps <= step < total_steps: 1 at the end of the warm-up, or less
# if a trapezoid's cooldown has begun by then, and nearly 0 at the last step. lr_factor adds the floor.
DECAYS = {"cosine": cosine_decay, "trapezoid": trapezoid_decay}


def set_learning_rates(
    optimizers: dict[str, torch.optim.Optimizer], step: int, total_steps: int, cfg: TrainConfig
) -> float:
    """Set the learning rate of every parameter group for `step`: its own peak_lr times the schedule's factor. Return
    the rate for a peak of max_lr, which is the one that is logged."""
    factor = lr_factor(step, total_steps, cfg)

    # Embeddings, matrices and vectors may have peaks of their own (training/optim.py); their curves have one shape.
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
    return cfg.max_lr * factor
