"""Figures from public runs of the presets' recipes: what a healthy run looks like, step by step."""

from __future__ import annotations

import csv
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).with_name("reference.csv")  # its `#` lines name the sources
TOKENS = 524_288  # per step
HORIZON = 0.02  # a schedule that ends this much earlier or later has nearly the same curve
WINDOW = 500  # steps on either side within which the widest gap between the runs counts
FLOOR = 0.025  # nats: twice the widest gap between two gpt2-124m runs once the steep part is over
LOOSE = 0.1  # nats: at step 0, where random weights differ, and where one figure is all there is


class Reference(NamedTuple):
    """Public runs of one preset. The tuples have an entry for each evaluation."""

    preset: str
    max_steps: int
    runs: int
    step: tuple[int, ...]
    low: tuple[float, ...]  # val loss of the lowest run, nats per token
    high: tuple[float, ...]  # and of the highest
    hellaswag: tuple[tuple[float, float], ...]  # lowest and highest acc_norm; empty if not published

    def expected(self, step: int) -> tuple[float, float] | None:
        """Lowest and highest healthy val loss (nats per token) at `step`, or None where the reference has none: between
        step 0 and its first evaluation (the loss falls too steeply to interpolate) and after its end.

        Rule: the interval of the runs, interpolated linearly between their evaluations and widened on both sides by
        twice the widest gap between the runs within WINDOW steps or, of a single run, by what the loss falls in a tenth
        of the steps so far; but at least by FLOOR (LOOSE at
        step 0 and where one figure is all there is). That covers the timing noise of the steep first thousand steps;
        later, the runs are closer together than another with another data order or another sample of the validation
        shard would be, which FLOOR allows for.
        """
        if step < self.step[0] or step > self.step[-1] or 0 < step < self.step[:2][-1]:
            return None
        i = max(j for j, s in enumerate(self.step) if s <= step)
        j = min(i + 1, len(self.step) - 1)
        span = self.step[j] - self.step[i] or 1
        low, high = (v[i] + (v[j] - v[i]) * (step - self.step[i]) / span for v in (self.low, self.high))
        if self.runs > 1:
            gaps = zip(self.step, self.low, self.high, strict=True)
            margin = 2 * max(b - a for s, a, b in gaps if abs(s - step) <= WINDOW)
        else:
            margin = (self.low[i] - self.low[j]) / span * step / 10
        margin = max(margin, FLOOR if step and len(self.step) > 1 else LOOSE)
        return low - margin, high + margin

    def on_track(self, step: int, val_loss: float) -> str | None:
        """One line on how a run compares at `step` with `val_loss` (nats per token), or None where `expected` is None.
        Too low is off track, too: no honest run is that good, so something must leak."""
        if (interval := self.expected(step)) is None:
            return None
        low, high = interval
        verdict = "on track" if low <= val_loss <= high else "off track"  # NaN is in no interval
        if val_loss < low:
            verdict += f", {low - val_loss:.3f} too low: does attention see the future, or val overlap the train data?"
        elif verdict == "off track":
            verdict += f", {val_loss - high:.3f} too high: check --max-lr, --warmup-steps and the data"
        return f"step {step}: val {val_loss:.3f}, reference {low:.3f} to {high:.3f}: {verdict}"


@cache
def read_references() -> list[Reference]:
    """All references in PATH, a preset's first the one of its own number of steps."""
    rows = csv.DictReader(line for line in PATH.read_text().splitlines() if not line.startswith("#"))
    found = []
    for (preset, max_steps, runs), group in groupby(rows, lambda row: (row["preset"], row["max_steps"], row["runs"])):
        lines = list(group)
        low, high = (tuple(float(row[f"val_loss_{end}"]) for row in lines) for end in ("low", "high"))
        hellaswag = tuple((float(r["hellaswag_low"]), float(r["hellaswag_high"])) for r in lines if r["hellaswag_low"])
        steps = tuple(int(row["step"]) for row in lines)
        found.append(Reference(preset, int(max_steps), int(runs), steps, low, high, hellaswag))
    return found


def find_reference(preset: object, max_steps: object, tokens: object, shard: str = "") -> Reference | None:
    """The public runs to which a run of `max_steps` steps of `tokens` tokens compares. `shard`, the name of a file of
    its data (FineWeb-Edu of gpt2-124m's, FineWeb of the others'); without a name that is not asked."""
    other_data = shard and not ("fineweb" in shard and ("edu" in shard) == (preset == "gpt2-124m"))
    if tokens != TOKENS or type(max_steps) is not int or other_data:
        return None
    for ref in read_references():
        if ref.preset == preset and abs(max_steps - ref.max_steps) <= HORIZON * ref.max_steps:
            return ref
    return None
