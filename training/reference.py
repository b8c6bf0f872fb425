"""Figures from public runs of the presets' recipes: what a healthy run looks like, step by step.

    reference = find_reference("gpt2-124m", 19_073, 524_288, "fineweb-edu_train_000001.npy")
    reference.judge(500, 5.31)        # "step 500: val 5.310, reference 5.236 to 5.387: on track"

training/evaluator.py prints that line after each validation; plots.py --reference draws the range behind the curves.
Nothing here needs torch.
"""

from __future__ import annotations

import csv
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from system.cli import UserError
from tokens import shards

# The figures: a row for each evaluation of each reference.
REFERENCE_CSV = Path(__file__).with_name("reference.csv")  # its `#` lines name the sources
TOKENS_PER_STEP = 524_288  # of every public run in the file
# The data of the public runs of each preset in the table.
DATASETS = {
    "gpt2-124m": "fineweb-edu",
    "llmc-124m": "fineweb",
    "record8-124m": "fineweb",
    "speedrun-124m": "fineweb",
}
MAX_STEPS_TOLERANCE = 0.02  # a schedule that ends this much earlier or later has nearly the same curve
GAP_WINDOW_STEPS = 500  # steps on either side within which the widest gap between the runs counts
MIN_MARGIN = 0.025  # nats: twice the widest gap between two gpt2-124m runs once the steep part is over
MIN_MARGIN_STEP_0 = 0.1  # nats: random weights differ


class Reference(NamedTuple):
    """Public runs of one preset. The tuples have an entry for each evaluation."""

    preset: str
    max_steps: int
    runs: int
    step: tuple[int, ...]
    low: tuple[float, ...]  # val loss of the lowest run, nats per token
    high: tuple[float, ...]  # val loss of the highest run
    hellaswag: tuple[tuple[float, float], ...]  # lowest and highest acc_norm; empty if not published

    def expected_range(self, step: int) -> tuple[float, float] | None:
        """Lowest and highest healthy val loss (nats per token) at `step`. None where the reference has no answer:
        between step 0 and its first evaluation, where the loss falls too steeply to interpolate, and after its end.

        The range of the runs is interpolated linearly between their evaluations and widened on both sides by a margin:

        - of several runs, twice the widest gap between them within GAP_WINDOW_STEPS steps;
        - of a single run, what the loss falls in a tenth of the steps so far;
        - but at least MIN_MARGIN, or MIN_MARGIN_STEP_0 at step 0.

        The margin covers the timing noise of the steep first thousand steps. Later, the public runs are closer together
        than a run with another data order, or another sample of the validation shard, would be to them. MIN_MARGIN
        allows for that.
        """
        # The first evaluation after step 0: step 250 of most references, 19,250 of a second epoch.
        first_evaluation = next(evaluated for evaluated in self.step if evaluated > 0)
        if step < self.step[0] or step > self.step[-1] or 0 < step < first_evaluation:
            return None

        # Both ends of the range at this step.
        low = self._interpolate(self.low, step)
        high = self._interpolate(self.high, step)

        # The margin that the runs themselves suggest.
        if self.runs > 1:
            evaluations = zip(self.step, self.low, self.high, strict=True)
            gaps = [highest - lowest for at, lowest, highest in evaluations if abs(at - step) <= GAP_WINDOW_STEPS]
            margin = 2 * max(gaps)
        else:
            # The slope is that around this step: between two neighboring evaluations it is mostly noise.
            start = max(0.95 * step, first_evaluation)
            end = min(1.05 * step, self.step[-1])
            fall = self._interpolate(self.low, start) - self._interpolate(self.low, end)
            margin = fall / (end - start) * step / 10 if step > 0 else 0

        # The least margin.
        margin = max(margin, MIN_MARGIN_STEP_0 if step == 0 else MIN_MARGIN)
        return low - margin, high + margin

    def _interpolate(self, losses: tuple[float, ...], step: float) -> float:
        """The loss at a step from the losses at the evaluations, linearly."""
        # The evaluations on either side of the step, which is not before the first one.
        before = max(index for index, evaluated in enumerate(self.step) if evaluated <= step)
        after = min(before + 1, len(self.step) - 1)
        steps_between = self.step[after] - self.step[before] or 1  # 1 at the last evaluation: nothing to interpolate
        return losses[before] + (losses[after] - losses[before]) * (step - self.step[before]) / steps_between

    def judge(self, step: int, val_loss: float) -> str | None:
        """One line on how a run compares at `step` with `val_loss` (nats per token), or None where expected_range is
        None. A loss that is too low is off track as well: no honest run is that good, so something must leak."""
        # There is no verdict where the public runs have no range.
        interval = self.expected_range(step)
        if interval is None:
            return None
        low, high = interval

        # NaN lies in no interval, so it is reported as too high.
        if low <= val_loss <= high:
            verdict = "on track"
        elif val_loss < low:
            verdict = f"off track, {low - val_loss:.3f} too low: "
            verdict += "does attention see the future, or val overlap the train data?"
        else:
            verdict = f"off track, {val_loss - high:.3f} too high: check --max-lr, --warmup-steps and the data"
        return f"step {step}: val {val_loss:.3f}, reference {low:.3f} to {high:.3f}: {verdict}"


@cache
def read_references() -> list[Reference]:
    """All references of REFERENCE_CSV. Of a preset with several, the first has the preset's own number of steps."""
    # Lines that begin with # are comments.
    text = REFERENCE_CSV.read_text()
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))

    # Consecutive rows with the same preset, length and number of runs are the evaluations of one reference.
    references = []
    for key, group in groupby(rows, lambda row: (row["preset"], row["max_steps"], row["runs"])):
        preset, max_steps, runs = key
        evaluations = list(group)
        references.append(
            Reference(
                preset=preset,
                max_steps=int(max_steps),
                runs=int(runs),
                step=tuple(int(row["step"]) for row in evaluations),
                low=tuple(float(row["val_loss_low"]) for row in evaluations),
                high=tuple(float(row["val_loss_high"]) for row in evaluations),
                hellaswag=tuple(
                    (float(row["hellaswag_low"]), float(row["hellaswag_high"]))
                    for row in evaluations
                    if row["hellaswag_low"]
                ),
            )
        )
    return references


def recognize_dataset(shard_name: str) -> str:
    """fineweb-edu, fineweb, or an empty string for other data. Shards are named as by build-nanogpt (edufineweb), llm.c
    (fineweb) or fineweb.py."""
    if "fineweb" not in shard_name:
        return ""
    return "fineweb-edu" if "edu" in shard_name else "fineweb"


def find_shard_name(data_dir: object) -> str:
    """The name of a shard that a run trained on, from the data_dir of its config.json; "" if there is no such folder on
    this machine."""
    try:
        return shards.find_shards(str(data_dir), "train")[0].name
    except (UserError, OSError, ValueError):  # the file may have been edited
        return ""


def difference_in_start(init_from: object) -> str:
    """Why a run that began with the weights of --init-from compares to no public run; "" if it began from scratch, as
    all of them did. A run from trained weights has a much lower loss."""
    return "" if init_from == "scratch" else f"--init-from {init_from} does not begin from scratch"


def difference_in_data(preset: str, shard_name: str) -> str:
    """Why a run on this shard does not compare to the public runs of `preset`; "" if it does, or if the name is empty:
    then the data are assumed to be theirs. Another data set has another loss."""
    if not shard_name or recognize_dataset(shard_name) == DATASETS[preset]:
        return ""
    return f"the public runs of {preset} are on {DATASETS[preset]}, not on {shard_name}"


def find_reference(
    preset: object, max_steps: object, tokens_per_step: object, shard_name: str = ""
) -> Reference | None:
    """The public runs to which a run compares, or None.

    Args:
        preset: the run's preset.
        max_steps: its number of steps; within MAX_STEPS_TOLERANCE of the public runs'.
        tokens_per_step: its tokens per step, which must be the public runs'.
        shard_name: a file of its data, by whose name the data are recognized. Without a name, the data are assumed to
            be the same.

    The first three may be anything that a config.json holds, or None.
    """
    # A step of another size is another step. type() and not isinstance(): True is an int.
    if tokens_per_step != TOKENS_PER_STEP or type(max_steps) is not int:
        return None

    # Another data set has another loss.
    if shard_name and preset in DATASETS and difference_in_data(preset, shard_name):
        return None

    # The same preset for about the same number of steps.
    for reference in read_references():
        tolerance = MAX_STEPS_TOLERANCE * reference.max_steps
        if reference.preset == preset and abs(max_steps - reference.max_steps) <= tolerance:
            return reference
    return None
