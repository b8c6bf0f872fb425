"""Figures from public runs of the presets' recipes: what a healthy run looks like, step by step.

    reference = find_reference("gpt2-124m", max_steps=19_073, tokens_per_step=524_288)
    reference.expected_range(500)   # 5.181 to 5.413 nats per token

Nothing here needs torch.
"""

from dataclasses import dataclass
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np

from system.files import read_table

# A row for each evaluation of each reference; its `#` lines name the sources.
REFERENCE_CSV = Path(__file__).with_name("reference.csv")
TOKENS_PER_STEP = 524_288  # of every public run in the file
# The data of the public runs of each preset in the file.
DATASETS = {
    "gpt2-124m": "fineweb-edu",
    "llmc-124m": "fineweb",
    "record8-124m": "fineweb",
}
MAX_STEPS_TOLERANCE = 0.02  # a schedule that ends this much earlier or later has nearly the same curve
MIN_MARGIN = 0.025  # nats: twice the widest gap between two gpt2-124m runs once the steep part is over
MIN_MARGIN_STEP_0 = 0.1  # nats: random weights differ
TIMING_NOISE = 0.08  # a healthy run may be this share of its steps early or late


@dataclass(frozen=True, eq=False)
class Reference:
    """Public runs of one preset. The arrays (N,) have an entry for each evaluation."""

    preset: str
    max_steps: int
    runs: int
    step: np.ndarray
    low: np.ndarray  # val loss of the lowest run, nats per token
    high: np.ndarray  # val loss of the highest run
    hellaswag_low: np.ndarray  # acc_norm; NaN if not published
    hellaswag_high: np.ndarray

    def expected_range(self, step: int) -> tuple[float, float] | None:
        """Lowest and highest healthy val loss (nats per token) at `step`. None where the reference has no answer:
        between step 0 and its first evaluation, where the loss falls too steeply to interpolate, and after its end.

        The range of the runs is interpolated between their evaluations. The margin around it is what the loss falls in
        the next TIMING_NOISE of the steps so far, but at least MIN_MARGIN: late in training the public runs are closer
        together than a run with another data order would be to them.
        """
        first_evaluation = self.step[self.step > 0][0]  # 250 of most references, 19,250 of a second epoch
        if step < self.step[0] or step > self.step[-1] or 0 < step < first_evaluation:
            return None
        low, later = np.interp([step, step * (1 + TIMING_NOISE)], self.step, self.low)
        high = np.interp(step, self.step, self.high)
        margin = max(low - later, MIN_MARGIN if step else MIN_MARGIN_STEP_0)
        return float(low - margin), float(high + margin)


@cache
def read_references() -> list[Reference]:
    """All references of REFERENCE_CSV. Of a preset with several, the first has the preset's own number of steps."""
    names = ("step", "val_loss_low", "val_loss_high", "hellaswag_low", "hellaswag_high")

    # Consecutive rows with the same preset, length and number of runs are the evaluations of one reference.
    references = []
    for key, group in groupby(read_table(REFERENCE_CSV), itemgetter("preset", "max_steps", "runs")):
        preset, max_steps, runs = key
        evaluations = np.array([[float(row[name] or "nan") for name in names] for row in group])  # (N, 5)
        references.append(Reference(preset, int(max_steps), int(runs), *evaluations.T))
    return references


def find_reference(preset: str, max_steps: int, tokens_per_step: int) -> Reference | None:
    """The public runs with this preset, about this number of steps and this many tokens per step, or None."""
    for reference in read_references():
        is_as_long = abs(max_steps - reference.max_steps) <= MAX_STEPS_TOLERANCE * reference.max_steps
        if reference.preset == preset and is_as_long and tokens_per_step == TOKENS_PER_STEP:
            return reference
    return None
