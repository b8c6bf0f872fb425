"""README.md and docs/: their commands are understood, and the worked change works."""

import argparse
import re
import runpy
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

from lifecycle import command_line
from system import cli
from training.presets import PRESETS

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]}


def find_code(name: str) -> list[str]:
    """The blocks and inline code of a page, but for diffs."""
    text = PAGES[name].replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [*blocks, *re.findall(r"^    +(.*)", text, re.MULTILINE), *spans]


def find_commands(name: str) -> list[list[str]]:
    """[script, argument, ...] of each command of a page that runs a script of the project."""
    script = r"(?:python |torchrun (?:[^#\n]* )?|(?=\./train\.sh))(\w+\.py|\./train\.sh)\b"
    command = script + r"((?:(?! && |; | < )[^#|\n])*)"
    found = re.findall(command, "\n".join(find_code(name)))
    return [[name, *shlex.split(arguments)] for name, arguments in found if (ROOT / name).is_file()]


COMMANDS = sorted({shlex.join(command) for name in PAGES for command in find_commands(name)})


class Parsed(Exception):
    """The command line was understood."""


@pytest.fixture
def parse_only(monkeypatch):
    """Scripts parse their command line, and do nothing else."""
    for name in ("parse_args", "parse_intermixed_args"):
        original = getattr(argparse.ArgumentParser, name)

        def parse(parser, original=original):
            original(parser)
            raise Parsed

        monkeypatch.setattr(argparse.ArgumentParser, name, parse)
    monkeypatch.setattr(cli, "run_cli", lambda main: main())  # which ends with an exit code


@pytest.mark.parametrize("command", COMMANDS)
def test_the_script_understands_the_command(command, request, monkeypatch):
    script, *args = shlex.split(command.replace("PRESET", "gpt2-124m").replace("$rate", "1e-3"))
    if script == "./train.sh":
        if args and (args[0] in ("stop", "[gpt2-124m]", "--help") or args[0].endswith(".pt")):
            return
        script = "train_gpt2.py"
    if script == "train_gpt2.py" and args != ["-h"]:
        saved = {"config": PRESETS["quickstart"].to_dict()}
        monkeypatch.setattr(command_line, "read_train_state", lambda path: saved)
        command_line.parse(args)
        return
    if args == ["-h"]:
        return
    request.getfixturevalue("parse_only")
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / script), run_name="__main__")


def test_the_worked_change_applies_and_passes(tmp_path):
    """docs/changing.md's grouped-query attention: the formula, and what is cached, in every test of networks."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGES["docs/changing.md"], re.DOTALL)
    shutil.copytree(ROOT, tmp_path, ignore=shutil.ignore_patterns(".*", "data", "log"), dirs_exist_ok=True)
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)

    tests = ["tests/test_model.py", "-k", "kv_head", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
