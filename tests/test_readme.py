"""README.md and docs/: their links lead somewhere, and their commands are understood by the scripts that they name."""

import functools
import re
import runpy
import shlex
import sys

import pytest
import tyro
from helpers import ROOT

from training.config import TrainConfig
from training.presets import parse

PAGES = {path.relative_to(ROOT): path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}

# A script and its arguments, up to a comment, a pipe, a file or the next command.
SCRIPT = r"(?:python |torchrun (?:[^#\n]* )?|(?=\./train\.sh))(\w+\.py|\./train\.sh)\b"
COMMAND = re.compile(SCRIPT + r"((?:(?! && |; | < )[^#|\n])*)")


def find_commands(text):
    """[script, argument, ...] of each command of a page, in an indented block or in inline code."""
    text = text.replace("\\\n", " ")
    lines = re.findall(r"^    +(.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    for script, arguments in COMMAND.findall("\n".join(lines)):
        if (ROOT / script).is_file():  # and not a script of another project
            yield [script, *shlex.split(arguments.replace("...", "x"))]


COMMANDS = sorted({shlex.join(words) for text in PAGES.values() for words in find_commands(text)})


class Understood(BaseException):
    """A script's own parser has taken the arguments. No Exception: run_cli would report it."""


def parse_only(cli):
    """Replaces a function of tyro: parses as it does, but calls nothing."""

    def call_nothing(function):
        return functools.wraps(function)(lambda *_, **__: None)

    def parse_and_stop(target, *args, **kwargs):
        if isinstance(target, dict):  # commands by name
            target = {name: call_nothing(function) for name, function in target.items()}
        elif not isinstance(target, type):
            target = call_nothing(target)
        cli(target, *args, **kwargs)
        raise Understood

    return parse_and_stop


def test_commands_are_found():
    scripts = {command.split()[0] for command in COMMANDS}
    assert {"train_gpt2.py", "./train.sh", "fineweb.py", "hellaswag.py", "hub.py", "infer.py", "plots.py"} <= scripts


@pytest.mark.parametrize("command", COMMANDS)
def test_the_script_understands_the_command(command, monkeypatch):
    script, *args = shlex.split(command.replace("PRESET", "gpt2-124m"))
    if script == "./train.sh":
        if args and (args[0] == "stop" or args[0].endswith(".pt")):
            return
        script = "train_gpt2.py"
    if script == "train_gpt2.py" and args not in (["-h"], ["--help"]):
        assert parse(args, lambda path: TrainConfig().to_dict())
        return
    monkeypatch.setattr(tyro, "cli", parse_only(tyro.cli))
    monkeypatch.setattr(tyro.extras, "subcommand_cli_from_dict", parse_only(tyro.extras.subcommand_cli_from_dict))
    monkeypatch.setattr(sys, "argv", [script, *args])
    with pytest.raises((Understood, SystemExit)) as ending:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ending.type is Understood or ending.value.code == 0


def anchors(text):
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", PAGES[page]):
        if not target.startswith("http"):
            path = (ROOT / page).parent / target if target else ROOT / page
            assert path.is_file(), target
            assert not anchor or anchor in anchors(path.read_text()), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_projects_files_that_a_page_names_exist(page):
    names = re.findall(r"(?<![\w/.-])(?:bench|cloud|docs|system|tests|tokens|training)/[\w/]+\.\w+", PAGES[page])
    names += [f"tests/{name}" for name in re.findall(r"`((?:faults/)?(?:test_\w+|conftest)\.py)", PAGES[page])]
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_every_page_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\((docs/[\w-]+\.md)", PAGES[min(PAGES)]))
    assert linked == {str(page) for page in PAGES if page.parent.name == "docs"}
