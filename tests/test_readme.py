"""What README.md tells people to type exists and parses; its floor table is the folder."""

import re
import shlex

import pytest
from conftest import ROOT

from config import PRESETS, parse

TEXT = (ROOT / "README.md").read_text()
FOUND = re.findall(r"`((?:python|torchrun|make|\./train\.sh) [^`]*)`", TEXT)
COMMANDS = sorted({c for c in FOUND if not re.search(r" (sample|train)\.py", c)})  # nanoGPT's, in the table of peers


def test_there_are_commands():
    assert len(COMMANDS) > 20


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists_and_parses(command):
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.M)
        return
    if words[0] == "./train.sh":
        words = ["train_gpt2.py", *([] if words[1].endswith(".pt") else words[1:])]
    at = next(i for i, w in enumerate(words) if w.endswith(".py"))
    script, args = words[at], words[at + 1 :]
    assert (ROOT / script).is_file()
    source = (ROOT / script).read_text()
    if script == "train_gpt2.py" and "--help" not in args:
        parse(args, lambda path: PRESETS["gpt2-124m"].to_dict())
    elif script == "hub.py":
        assert re.search(rf"\b{args[0].replace('-', '_')}\b|\"{args[0]}\"", source)
    else:
        for flag in (a for a in args if a.startswith("--")):
            name = flag[2:].replace("-", "_")
            assert name == "help" or re.search(rf"\b{name}\b", source), flag


def test_every_file_is_in_the_table():
    for path in ROOT.glob("*.py"):
        assert f"`{path.name}`" in TEXT, path.name
