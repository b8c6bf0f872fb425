"""The structure of the code: who imports whom."""

import re

import pytest
from helpers import ROOT

# What each room may import, as docs/changing.md has it. Nothing but a script imports a script.
ALLOWED = {
    "model": "",
    "system": "system",
    "tokens": "system model tokens",
    "training": "system model tokens training",
    "weights": "system model tokens training weights",
    "evaluation": "system model tokens training weights evaluation",
    "lifecycle": "system model tokens training weights evaluation lifecycle",
}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_downwards(room):
    ours = {path.stem for path in ROOT.glob("*.py")} | ALLOWED.keys()
    source = "".join(path.read_text() for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/*.py")])
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert source and imported & ours <= {*ALLOWED[room].split()}
