"""Figures from two public gpt2-124m runs on FineWeb-Edu: what a healthy run looks like, step by step."""

import csv
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("reference_fineweb_edu_10b.csv")
TOKENS = 524_288  # per step
WINDOW = 500  # steps on either side within which the widest gap between the two runs counts
FLOOR = 0.025  # nats: twice the widest gap between the two runs once the steep part is over


@cache
def read_reference() -> dict[str, tuple[float, ...]]:
    """Columns of PATH (its `#` lines name the source): step; val_loss_a, val_loss_b (nats per token); hellaswag_a,
    hellaswag_b (acc_norm)."""
    rows = list(csv.DictReader(line for line in PATH.read_text().splitlines() if not line.startswith("#")))
    return {key: tuple(float(row[key]) for row in rows) for key in rows[0]}


def expected(step: int) -> tuple[float, float] | None:
    """Lowest and highest healthy val loss (nats per token) at `step`, or None where the reference has none: between
    step 0 and its first evaluation (the loss falls too steeply to interpolate) and after its end.

    Rule: the interval between the two runs, interpolated linearly between their evaluations and widened on both sides
    by twice the widest gap between the runs within WINDOW steps, but at least by FLOOR. The gap covers the timing noise
    of the steep first thousand steps; later, the two runs are closer together than a third with another data order or
    another sample of the validation shard would be, which FLOOR allows for.
    """
    ref = read_reference()
    steps, a, b = ref["step"], ref["val_loss_a"], ref["val_loss_b"]
    if step < 0 or step > steps[-1] or 0 < step < steps[1]:
        return None
    i = max(j for j, s in enumerate(steps[:-1]) if s <= step)
    share = (step - steps[i]) / (steps[i + 1] - steps[i])
    here = sorted(run[i] + share * (run[i + 1] - run[i]) for run in (a, b))
    gap = max(abs(x - y) for s, x, y in zip(steps, a, b, strict=True) if abs(s - step) <= WINDOW)
    margin = max(FLOOR, 2 * gap)
    return here[0] - margin, here[1] + margin


def on_track(step: int, val_loss: float) -> str | None:
    """One line on how a gpt2-124m run on FineWeb-Edu compares at `step` with `val_loss` (nats per token), or None where
    `expected` is None. Too low is off track, too: no honest run is that good, so something must leak."""
    if (interval := expected(step)) is None:
        return None
    low, high = interval
    verdict = "on track" if low <= val_loss <= high else "off track"  # NaN is in no interval
    if val_loss < low:
        verdict += f", {low - val_loss:.3f} too low: does attention see the future, or val overlap the training data?"
    elif verdict == "off track":
        verdict += f", {val_loss - high:.3f} too high: check --max-lr, --warmup-steps, --total-batch-size and the data"
    return f"step {step}: val {val_loss:.3f}, reference {low:.3f} to {high:.3f}: {verdict}"
