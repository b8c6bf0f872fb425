"""What tyro says of a command line, in the words of this project: what is wrong with it, in one message in place of
tyro's box, and a flag's help.

    with explain_usage("see -h"):
        main()                      # calls tyro.cli; raises UsageError for a word that tyro does not accept
    out: Annotated[str | None, optional("FOLDER")] = None

Called by system/cli.py. It uses a part of tyro that may change with any version; requirements.txt pins one.
"""

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import tyro
from tyro import _errors

from system.cli import UsageError

# What a type of Python calls a text that it cannot read.
NO_NUMBER = {"invalid literal for int": "a whole number", "could not convert string to float": "a number"}


def optional(metavar: str) -> Any:
    """For a flag whose own words say what holds without it: its help does not add (default: None)."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


@contextmanager
def explain_usage(hint: str) -> Iterator[None]:
    """Turn a refusal of tyro in this block into a UsageError. hint: where to look, for a word that it does not know."""
    refusals: list[_errors.ParseErrorEvent] = []
    box = io.StringIO()
    stderr = sys.stderr

    def on_refusal(event: _errors.ParseErrorEvent) -> None:
        # tyro prints its box next, and exits. The box has the flags that are similar to one that does not exist.
        refusals.append(event)
        sys.stderr = box

    try:
        with _errors.on_parse_error(on_refusal):
            yield
    except SystemExit as e:
        if e.code == 2 and refusals:
            raise UsageError(describe(refusals[-1], box.getvalue(), hint)) from None
        raise
    finally:
        sys.stderr = stderr


def describe(refusal: Any, box: str, hint: str) -> str:
    """A refusal of tyro, whose box it would print, in one sentence."""
    kind = type(refusal)
    if kind is _errors.UnrecognizedArgs:
        return describe_unknown(refusal.tokens, box, hint)
    if kind is _errors.MissingArgs:
        if refusal.unrecognized_tokens:
            return describe_unknown(refusal.unrecognized_tokens, box, hint)
        return f"{' and '.join(name_of(argument.arg) for argument in refusal.missing_arguments)} missing; {hint}"
    if kind is _errors.MissingSubcommand:
        return f"give a command: {', '.join(refusal.subcommand_spec.parser_from_name)}"

    flag = name_of(refusal.argument) if getattr(refusal, "argument", None) else ""
    if kind is _errors.InvalidChoice:
        return f"{flag} {refusal.value}: choose {' or '.join(refusal.choices)}"
    if kind is _errors.BadValue and refusal.reason == "too_few_values":
        return f"{flag} is missing; {hint}" if refusal.argument.is_positional() else f"{flag} needs a value"
    if kind is _errors.InstantiationFailure:
        message = refusal.message.splitlines()[0]
        value = re.search(r"'(.*)'", message)
        for text, number in NO_NUMBER.items():
            if message.startswith(text) and value:
                return f"{flag} {value[1]}: it must be {number}"
        several = re.fullmatch(r"no type matching (.*) could be instantiated from \['(.*)'\]\.", message)
        if several:
            return f"{flag} {several[2]}: it must be one of {several[1]}"
        return f"{flag}: {message}" if flag else message
    # What a later version of tyro may refuse.
    return " ".join(re.sub("[\u2500-\u257f]", " ", box).split())


def name_of(argument: Any) -> str:
    """MODEL, or --max-steps"""
    return argument.lowered.metavar if argument.is_positional() else "/".join(argument.lowered.name_or_flags)


def describe_unknown(tokens: list[str], box: str, hint: str) -> str:
    """The words that no flag takes. Where one follows a flag that does not exist, it is its value."""
    flags = [token for token in tokens if token.startswith("-")]
    if not flags:
        return f"unexpected {' '.join(tokens[:3])}{' ...' if len(tokens) > 3 else ''}; {hint}"
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)  # on a terminal, tyro colors it
    _, _, suggestions = box.partition("Perhaps you meant:")
    known = re.findall(r"(?<![\w-])--[\w.-]+", suggestions.partition("For full helptext")[0])
    similar = get_close_matches(flags[0].replace("_", "-"), known, n=1)
    return f"no flag {', '.join(flags)}; " + (f"did you mean {similar[0]}?" if similar else hint)
