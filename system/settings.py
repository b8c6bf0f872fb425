"""A setting is a field of a dataclass, and what is known of it stands there as data. The command line follows from it.

    @dataclass(frozen=True)
    class Config:
        max_lr: float = setting(6e-4, "peak learning rate", heading="The learning rate")
        shuffle: bool = setting(True, "shuffle the data")

    parser = ArgumentParser(__doc__, argument_default=argparse.SUPPRESS)
    add_flags(parser, Config())                                 # --max-lr MAX_LR, --shuffle, --no-shuffle
    typed = vars(parser.parse_args(["--no-shuffle"]))           # {"shuffle": False}: what was typed, and no more
    cfg = change(Config(), typed)

The settings of a field that is a dataclass itself are called "model.n_layer", and their flags --model.n-layer and
--model.no-bias. Such a dataclass needs nothing of this file: a dataclasses.field with the metadata "help" is enough.
"""

import argparse
import dataclasses
import re
import sys
from difflib import get_close_matches
from fractions import Fraction
from math import inf
from typing import Any, Literal, NoReturn, get_args, get_origin

from system.errors import UsageError, require


def setting(default: Any, help: str, **about: Any) -> Any:
    """A field of a dataclass of settings. What else may be said about it, here and in training/config.py:

    heading     of the group in the help that begins with this setting
    low, high   the least and the greatest value of a number; at least 0 without them
    parse       text -> value, where the type of the field cannot do it
    has_flag    False: only presets set it
    """
    return dataclasses.field(default=default, metadata={"help": help, **about})


def flag(name: str) -> str:
    """max_lr -> --max-lr"""
    return f"--{name.replace('_', '-')}"


def choices(field: dataclasses.Field) -> tuple | None:
    """The values that a setting may have, if its type lists them."""
    return get_args(field.type) if get_origin(field.type) is Literal else None


def check_settings(config: Any) -> None:
    """Raise UserError for the first setting that is out of its range, or none of its choices."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        allowed = choices(field)
        if allowed:
            require(value in allowed, f"{flag(field.name)} {value!s:.99} must be {' or '.join(map(str, allowed))}")
        elif isinstance(value, int | float):
            low, high = field.metadata.get("low", 0), field.metadata.get("high", inf)
            rule = f"must be at least {low}" if high == inf else f"must lie between {low} and {high}"
            require(low <= value <= high, f"{flag(field.name)} {value} {rule}")  # NaN is in no range


# ------------------------------------------------------------------------- the command line


def whole_number(text: str) -> int:
    """1000, or 1e3. A float would round a large seed."""
    number = Fraction(text)
    if number.denominator != 1:
        raise ValueError
    return number.numerator


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The description as it stands, and a default beside each flag."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, with three differences: a word that it does not accept is one line (UsageError, exit code 2), a flag
    may be spelled with underscores, and is never abbreviated."""

    def __init__(self, description: str | None = None, **options: Any):
        super().__init__(description=description, formatter_class=HelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, but has")
        raise UsageError(f"{message}; see -h, or docs/coming-from.md for the flags of other programs")

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        # --max_lr=a_b -> --max-lr=a_b
        words = [re.sub(r"^--[\w.-]+", lambda match: match[0].replace("_", "-"), word) for word in words]
        namespace, unknown = super().parse_known_args(words, namespace)
        for word in unknown:
            near = get_close_matches(word.partition("=")[0], re.findall(r"--[\w.-]+", self.format_help()), 1, 0.85)
            if near:
                raise UsageError(f"no flag {word}; did you mean {near[0]}?")
        return namespace, unknown


class Switch(argparse.Action):
    """Of two flags, the first one means True: --shuffle and --no-shuffle."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, option_string == self.option_strings[0])


def add_flags(parser: argparse.ArgumentParser, config: Any, section: str = "", heading: str = "") -> None:
    """Give the parser a flag for each setting of a dataclass, in groups with headings. The help has the values of this
    `config`."""
    group = parser.add_argument_group(heading)
    for field in dataclasses.fields(config):
        name = section + field.name
        value = getattr(config, field.name)
        about = field.metadata
        if dataclasses.is_dataclass(value):
            add_flags(parser, value, f"{field.name}.", about["help"])
            continue
        if about.get("heading"):
            group = parser.add_argument_group(about["heading"])
        if not about.get("has_flag", True):
            continue

        allowed = choices(field)
        kind = type(allowed[0]) if allowed else field.type
        parse = whole_number if kind is int else about.get("parse", kind)
        help = f"{about['help']} ({value})".replace("%", "%%")
        if isinstance(value, bool):
            help = f"{about['help']} ({'on' if value else 'off'})"
            off = flag(f"{section}no_{field.name}")  # --no-shuffle, --model.no-bias
            group.add_argument(flag(name), off, dest=name, action=Switch, nargs=0, help=help)
        else:
            group.add_argument(flag(name), dest=name, choices=allowed, type=parse, help=help)


def change(config: Any, typed: dict[str, Any]) -> Any:
    """The config with other values of the settings {"max_lr": 1e-3, "model.n_layer": 4}. Raises UserError for values
    that are not valid."""
    values = {name: value for name, value in typed.items() if "." not in name}
    network = {name.removeprefix("model."): value for name, value in typed.items() if "." in name}
    if network:
        try:
            values["model"] = dataclasses.replace(config.model, **network)
        except ValueError as e:
            raise UsageError(f"no network can be like this: {e}") from None
    return dataclasses.replace(config, **values)
