"""What identifies a run, as facts by name. The settings, the data, the evaluations and the machine supply facts. All
ranks must have equal facts. A resumed run must have the RESULT facts of its checkpoint, unless --allow-drift accepts
the change:

    facts = settings_facts(cfg) | {"the checksum of the data": Fact(data.fingerprint(), RESULT)}
    check_ranks(rt, facts, "give every machine the same files")     # system/distributed.py
    changes = compare(saved_facts, facts)                           # {"--max-lr": ("0.001", "0.002")}
"""

from typing import NamedTuple

# Scopes. Ranks must always agree. The scope says which value a resumed run may have:
RESULT = "result"  # the same value, because another one changes the weights
NOTED = "noted"  # any value; a change is printed
START = "start"  # any value: the fact is about one start of the program


class Fact(NamedTuple):
    value: str
    scope: str  # RESULT, NOTED or START


Facts = dict[str, Fact]


def compare(before: Facts, after: Facts) -> dict[str, tuple[str, str]]:
    """{name: (value before, value after)} of the facts that differ. A fact that one side lacks has the value "none"
    there."""
    missing = Fact("none", NOTED)
    pairs = {name: (before.get(name, missing).value, after.get(name, missing).value) for name in before | after}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}
