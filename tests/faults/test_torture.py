"""The quick part of torture.py: a fault or two of most classes. `make torture` injects hundreds, of all."""

import sys
import tempfile
from pathlib import Path

import pytest

from faults import torture

# The share of the faults of a class that are injected here: one or two of most. `make torture` injects all of them.
QUICK_SCALES = {
    "train-sh-kill": 0.01,
    "disk-full": 0.01,
    "shard-damage": 0.01,
    "checkpoint-damage": 0.01,
    "hub-faults": 0.01,
    "train-kill": 0.05,
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its faults are Linux's: /proc, tmpfs, capabilities")
@pytest.mark.parametrize("name", QUICK_SCALES)
def test_no_fault_is_silent_and_nothing_is_lost(name):
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        t = torture.Torture(Path(folder) / name, seed=1, scale=QUICK_SCALES[name])
        torture.CLASSES[name](t)

    assert t.outcomes.total() > 0 and not t.failures, t.failures
