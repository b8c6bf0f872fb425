"""The structure of the code: who imports whom."""

import re
from modulefinder import ModuleFinder

import pytest
from helpers import ROOT

# What each room may import. Nothing but a script imports a script.
ALLOWED = {
    "model": "",
    "system": "system",
    "tokens": "system model tokens",
    "training": "system model tokens training",
    "checkpoints": "system model tokens checkpoints",
    "evaluation": "system model tokens training evaluation",
    "lifecycle": "system model tokens training checkpoints evaluation lifecycle",
}

# What whoever reads training/ need not read.
IGNORED = {"tokens.sources", "tokens.documents", "system.huggingface", "system.cards"}


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_go_downwards(room):
    ours = {path.stem for path in ROOT.glob("*.py")} | ALLOWED.keys()
    source = "".join(path.read_text() for path in [*ROOT.glob(f"{room}.py"), *ROOT.glob(f"{room}/*.py")])
    imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
    assert source and imported & ours <= {*ALLOWED[room].split()}


def test_the_reading_has_an_end():
    """What computes the result, with all that it imports."""
    finder = ModuleFinder([str(ROOT)])
    for path in [ROOT / "train_gpt2_plain.py", *ROOT.glob("training/*.py")]:
        finder.run_script(str(path))
    assert "tokens.shards" in finder.modules and not finder.modules.keys() & IGNORED
