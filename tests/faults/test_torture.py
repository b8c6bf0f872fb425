"""The quick part of torture.py: a fault or two of most classes. `make torture` injects hundreds, of all."""

import sys
import tempfile
from pathlib import Path

import pytest
from helpers import ROOT

from faults import torture

QUICK = dict.fromkeys("train-sh-kill disk-full log-full read-only shard-damage checkpoint-damage".split(), 0.01)
QUICK |= {"hub-faults": 0.01, "train-kill": 0.2}  # the share of its faults


def test_every_class_has_its_row():
    text = (ROOT / "docs" / "promises.md").read_text()
    assert [name for name in torture.CLASSES if f"| `{name}`" not in text] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its faults are Linux's: /proc, tmpfs, capabilities")
@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_silent_and_nothing_is_lost(name):
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        t = torture.Torture(Path(folder) / name, seed=1, scale=QUICK[name])
        torture.CLASSES[name](t)
    assert t.outcomes.total() > 0 and not t.failures, t.failures
