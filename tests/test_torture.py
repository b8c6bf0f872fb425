"""The quick part of torture.py: a fault or two of most classes. `make torture` injects hundreds, of all."""

import sys
import tempfile
from pathlib import Path

import pytest
import torture
from conftest import ROOT

QUICK = (
    "train-sh-kill",
    "disk-full",
    "log-full",
    "read-only",
    "shard-damage",
    "checkpoint-damage",
    "hub-faults",
)


def test_every_class_has_its_row():
    text = (ROOT / "RELIABILITY.md").read_text()
    assert [name for name in torture.CLASSES if f"| `{name}`" not in text] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="its faults are Linux's: /proc, tmpfs, capabilities")
@pytest.mark.parametrize("name", QUICK)
def test_nothing_is_silent_and_nothing_is_lost(name):
    with tempfile.TemporaryDirectory(prefix="torture-") as folder:
        t = torture.Torture(Path(folder) / name, seed=1, scale=0.01)
        torture.CLASSES[name](t)
    assert t.outcomes.total() > 0 and not t.failures, t.failures
