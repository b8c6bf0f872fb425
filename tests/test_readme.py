"""README.md and docs/: the scripts understand every command in them, and their links lead to files."""

import functools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from helpers import ROOT

from lifecycle.command_line import parse
from training.config import TrainConfig

PAGES = {path.relative_to(ROOT): path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}

# A script and its arguments, up to a comment, a pipe, a file or the next command.
SCRIPT = r"(?:python |torchrun (?:[^#\n]* )?|(?=\./train\.sh))(\w+\.py|\./train\.sh)\b"
COMMAND = re.compile(SCRIPT + r"((?:(?! && |; | < )[^#|\n])*)")


def find_commands(text):
    """[script, argument, ...] of each command of a page, in a block or in inline code."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [*blocks, *re.findall(r"^    +(.*)", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
    for script, arguments in COMMAND.findall("\n".join(lines)):
        if (ROOT / script).is_file():  # and not a script of another project
            yield [script, *shlex.split(arguments.replace("...", "x"))]


def parse_only(cli):
    """Replaces a function of tyro: it parses the command line, but calls nothing and exits."""

    def call_nothing(function):
        return functools.wraps(function)(lambda *_, **__: None)

    def parse_and_exit(target, *args, **how):
        if isinstance(target, dict):  # commands by name
            target = {name: call_nothing(function) for name, function in target.items()}
        elif not isinstance(target, type):
            target = call_nothing(target)
        cli(target, *args, **how)
        sys.exit(0)

    return parse_and_exit


@pytest.mark.parametrize("command", sorted({shlex.join(c) for text in PAGES.values() for c in find_commands(text)}))
def test_the_script_understands_the_command(command, monkeypatch):
    script, *args = shlex.split(command.replace("PRESET", "gpt2-124m").replace("$rate", "1e-3"))
    if script == "./train.sh":
        if args and (args[0] in ("stop", "--help") or args[0].endswith(".pt")):
            return
        script = "train_gpt2.py"
    if script == "train_gpt2.py" and args not in (["-h"], ["--help"]):
        assert parse(args, lambda path: TrainConfig().to_dict())
        return
    monkeypatch.setattr(tyro, "cli", parse_only(tyro.cli))
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", parse_only(tyro.extras.subcommand_cli_from_dict))
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ending.value.code == 0


def test_the_worked_change_applies_and_passes(tmp_path):
    """docs/changing.md's grouped-query attention: the formula, and what is cached, in every test of networks."""
    (diff,) = re.findall(r"```diff\n(.*?)```", PAGES[Path("docs/changing.md")], re.DOTALL)
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), ROOT / "pyproject.toml"]:
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)

    tests = ["tests/test_model.py", "-k", "kv_head", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, "-m", "pytest", *tests], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_files_that_a_page_names_exist(page):
    text = PAGES[page]
    links = re.findall(r"\]\(([^)#\s]+)", text)
    paths = [(ROOT / page).parent / link for link in links if not link.startswith("http")]
    paths += [ROOT / name for name in re.findall(r"(?<![\w/.-])(?:bench|cloud|docs|tests)/[\w/]+\.\w+", text)]
    paths += [ROOT / "tests" / name for name in re.findall(r"`((?:faults/)?(?:test_\w+|conftest)\.py)", text)]
    assert [path for path in paths if not path.is_file()] == []


def test_every_path_that_is_named_exists():
    """In documents, comments and docstrings: training/forward.py, not what it was called before."""
    rooms = "|".join(path.parent.name for path in ROOT.glob("*/__init__.py"))
    paths = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("*.md"), *ROOT.glob("*/*.md")]
    named = {path: re.findall(rf"\b(?:{rooms})/\w+\.(?:py|csv)\b", path.read_text()) for path in paths}
    missing = {(path.name, name) for path, names in named.items() for name in names if not (ROOT / name).exists()}
    assert missing == set()
