"""For the scripts whose flags tyro still makes."""

from typing import Any

import tyro


def optional(metavar: str) -> Any:
    """For a flag whose own words say what holds without it: its help does not add (default: None)."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")
