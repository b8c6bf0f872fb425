"""The help of train_gpt2.py: -h prints the flags that most runs use on one screen, --help prints all of them.

    print(help_text(PRESETS["quickstart"], everything=False, presets=list(PRESETS)))

Called by training/presets.py. tyro parses the flags, but its own help is one long list; the groups are defined here.
The text of a flag is the docstring of its field in training/config.py, or the comment beside the field in model.py:

    optimizer:
      --max-lr 0.0006             Peak learning rate.
      --no-compile                torch.compile; off: starts at once, but trains slower.
    ^ a flag, its value           ^ COLUMN: the text
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
import textwrap
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from model import GPTConfig
from training.config import TrainConfig

OTHER_TRAINERS = "docs/coming-from.md translates the flags and presets of nanoGPT, llm.c and other trainers"

# Every flag of TrainConfig by group, the common ones before the `|`. Flags of the network begin with --model.
GROUPS = {
    "data and length": "data_dir epochs max_steps | steps_per_epoch seed shuffle",
    "batch": "total_batch_size micro_batch_size sequence_length | overfit_single_batch",
    "schedule and optimizer": """max_lr min_lr warmup_steps schedule optimizer weight_decay | cooldown
        vector_weight_decay grad_clip beta1 beta2 adam_eps muon_lr muon_weight_decay muon_momentum newton_schulz
        embed_lr_scale vector_lr_scale""",
    "evaluation": "val_every hellaswag_every sample_every sample_prompt eval_only tracker | val_tokens hellaswag_data",
    "saving and resuming": "out_dir save_every keep resume init_from time_limit | allow_drift skip_bad_steps",
    "hardware": "device dtype compile recompute zero_stage | weights deterministic",
    "time, memory and cost in advance": "dry_run card gpu_hour_usd |",
    "network": """model.n_layer model.n_head model.n_embd model.block_size | model.vocab_size model.bias model.tied_head
        model.positions model.norm model.activation model.qk_norm model.attention_scale model.zero_init_projections
        model.head_bias model.softcap""",
}
COLUMN = 30  # of the terminal, where the texts begin


def help_text(defaults: TrainConfig, everything: bool, presets: list[str]) -> str:
    """The help to print: all flags if `everything`, else the common ones, with their values in `defaults`. `presets`
    are the names that the help lists."""
    # What to type. The lines are as wide as the terminal, as long as they are comfortable to read.
    width = min(120, shutil.get_terminal_size((100, 24)).columns)
    lines = ["usage: python train_gpt2.py [PRESET] [--flag value ...]"]
    lines += textwrap.wrap(f"presets: {', '.join(presets)} (the first is the default)", width)
    lines += [f"flags, with their values in {defaults.preset}:"]

    # The texts of all flags, of the run and of the network.
    help_by_name = field_help(TrainConfig)
    help_by_name |= {f"model.{name}": text for name, text in field_help(GPTConfig).items()}

    # Each group has a heading and its flags. The short help has no empty lines, so that it fits on one screen.
    for title, names in GROUPS.items():
        common, _, others = names.partition("|")
        shown = common
        if everything:
            shown += others
            lines.append("")
        lines.append(f"{title}:")
        for name in shown.split():
            lines += describe_flag(name, defaults, help_by_name[name], everything, width)

    # Say where the other flags and the other programs are.
    lines.append("")
    if not everything:
        lines.append(f"all flags: python train_gpt2.py {defaults.preset} --help")
    lines.append(OTHER_TRAINERS)
    return "\n".join(lines)


def describe_flag(name: str, defaults: TrainConfig, text: str, everything: bool, width: int) -> list[str]:
    """The lines of a flag: its name and value, then `text`, wrapped to `width` characters.

    `name` is that of a field of TrainConfig, or "model." and that of a field of GPTConfig. `everything`: for --help.
    """
    # The value of this field in `defaults`, and its type.
    owner: TrainConfig | GPTConfig = defaults
    if name.startswith("model."):
        owner = defaults.model
    field = name.removeprefix("model.")
    value = getattr(owner, field)
    hint = get_type_hints(type(owner))[field]

    # A switch takes no value. --help shows both of its forms; -h shows the form that changes the default. Any other
    # flag is shown with its value, as one would type it; TEXT stands for a value that is empty or needs quotes.
    flag = flag_name(name)
    if hint is bool and everything:
        flag = f"{flag}, {flag_name(name, off=True)}"
        text += " (default: on)" if value else " (default: off)"
    elif hint is bool:
        flag = flag_name(name, off=bool(value))
    else:
        is_word = re.fullmatch(r"[^\s']+", str(value))
        flag = f"{flag} {value if is_word else 'TEXT'}"

    # A flag that takes one of a few words lists them.
    if get_origin(hint) is Literal:
        text += f" ({', '.join(map(str, get_args(hint)))})"

    # The text begins beside the flag, or below it if the flag is long.
    body = textwrap.wrap(text.strip(), max(20, width - COLUMN)) or [""]
    first = f"  {flag}"
    if len(first) >= COLUMN:
        return [first, *(" " * COLUMN + line for line in body if line)]
    return [f"{first:<{COLUMN}}{body[0]}".rstrip(), *(" " * COLUMN + line for line in body[1:])]


def flag_name(name: str, off: bool = False) -> str:
    """max_lr -> --max-lr; model.n_layer -> --model.n-layer. With `off`, the negative form of a switch: model.bias ->
    --model.no-bias."""
    owner, dot, field = name.rpartition(".")
    negation = "no-" if off else ""
    return f"--{owner}{dot}{negation}{field}".replace("_", "-")


@cache
def switches() -> dict[str, tuple[str, str]]:
    """{flag: (the form that turns it on, the form that turns it off)} for both forms of every switch."""
    # The names of the fields of type bool, of the run and of the network.
    names = [name for name, hint in get_type_hints(TrainConfig).items() if hint is bool]
    names += [f"model.{name}" for name, hint in get_type_hints(GPTConfig).items() if hint is bool]

    # Both forms of each, to look up either.
    forms = [(flag_name(name), flag_name(name, off=True)) for name in names]
    return {flag: form for form in forms for flag in form}


def field_help(config_class: type) -> dict[str, str]:
    """{field: its docstring, or else the comment in its lines, or an empty text} of a dataclass."""
    # At run time a field has neither its comment nor the string below it, so parse the source.
    source = inspect.getsource(config_class)
    source_lines = source.splitlines()
    (class_node,) = ast.parse(source).body
    names = {field.name for field in fields(config_class)}

    # Go through the statements of the class, each with the one after it, and pick the fields: `name: type = default`.
    texts: dict[str, Any] = {}
    for node, following in zip(class_node.body, [*class_node.body[1:], None], strict=True):
        if not (isinstance(node, ast.AnnAssign) and node.target.id in names):
            continue
        # A string literal right after a field is its docstring. Otherwise take the comments of its lines.
        match following:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                text = docstring
            case _:
                lines = source_lines[node.lineno - 1 : node.end_lineno]
                text = " ".join(line.partition("  # ")[2] for line in lines)
        texts[node.target.id] = " ".join(text.split())
    return texts
