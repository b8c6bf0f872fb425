"""The structure of the code: who imports whom."""

import re

import pytest
from helpers import ROOT

# What each room may import. Nothing but a script imports a script.
ALLOWED = {
    "model": "",
    "system": "system",
    "tokens": "system model tokens",
    "training": "system model tokens training",
    "weights": "system model tokens training weights",
    "evaluation": "system model tokens training weights evaluation",
    "lifecycle": "system model tokens training weights evaluation lifecycle",
}

# What whoever reads training/ need not read.
IGNORED = {"tokens.sources", "tokens.documents", "system.huggingface", "system.cards"}


def read_sources(*patterns) -> str:
    return "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_downwards(room):
    ours = {path.stem for path in ROOT.glob("*.py")} | ALLOWED.keys()
    source = read_sources(f"{room}.py", f"{room}/*.py")
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert source and imported & ours <= {*ALLOWED[room].split()}


def test_the_reading_has_an_end():
    """What computes the result, with all that it imports."""
    found, to_read = set(), {"train_gpt2_plain", *(f"training.{path.stem}" for path in ROOT.glob("training/*.py"))}
    while to_read:
        module = to_read.pop()
        found.add(module)
        source = read_sources(f"{module.replace('.', '/')}.py")
        for package, names in re.findall(r"^ *from (\w+) import (.+)$", source, re.MULTILINE):
            to_read |= {f"{package}.{name}" for name in re.findall(r"\w+", names)} - found
        to_read |= set(re.findall(r"^ *from ([\w.]+) import", source, re.MULTILINE)) - found
    assert "tokens.shards" in found and not found & IGNORED
