"""Open a model by a path or a name: for infer.py, hellaswag.py, training and the benches.

    model = open_model("log/gpt2-124m/model_19073.pt")   # a checkpoint file
    model = open_model("log/gpt2-124m")                  # a run folder: its newest complete step
    model = open_model("exports/gpt2-mine")              # a Hugging Face folder, e.g. from: python hub.py export
    model = open_model("gpt2")                           # a name on the Hub: gpt2, gpt2-medium, OWNER/NAME

It is separate from weights/checkpoint.py, so that reading and writing checkpoints imports no Hub code.
"""

import json
import re
from pathlib import Path
from typing import Any

from model import GPT
from system.cli import UserError, require
from weights import checkpoint, convert, names


def open_model(name: str | Path) -> GPT:
    """Open the model that `name` stands for and return it as a GPT (float32, on the CPU, in eval mode).

    `name` is a .pt file, a run folder, a Hugging Face folder or a name on the Hub (see the module's example). Raises
    UserError if there is no such model, or if its file is damaged or of another kind.
    """
    model, _ = open_and_describe(name)
    return model


def open_and_describe(name: str | Path) -> tuple[GPT, str]:
    """What open_model returns, and in words what was opened: log/gpt2-124m/model_12000.pt, step 12,000 of 19,073."""
    path = Path(name)
    damaged: list[Path] = []  # beside the checkpoint that is taken

    # A folder.
    if path.is_dir() and not convert.is_on_hub(name):
        if convert.is_hf_folder(path):
            return convert.load_hf(path), str(path)
        is_data = (path / "manifest.json").is_file()
        require(not is_data, f"{path} has shards of tokens; a model is in the folder of a run, such as log/quickstart")
        path = names.newest_model(path)
        damaged = names.damaged_models(path.parent)

    # A file, whatever its suffix: reading it tells what it is.
    if path.is_file() or path.suffix == ".pt":
        model, facts = checkpoint.load(path)
        return model, describe_step(path, facts) + "".join(f"; {other.name} is damaged" for other in damaged)

    # A path that does not exist looks like OWNER/NAME of the Hub. If its parent is a folder here, it is mistyped.
    is_mistyped = "/" in str(name) and path.parent.is_dir()
    require(not is_mistyped, f"no model at {path}; {names.describe_nearby(path)}")
    require(not (Path("log") / path).is_dir(), f"no model at {path}; the run is log/{path}")
    is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name))
    fix = "a model is a run folder, a .pt file, a Hugging Face folder or its name; infer.py takes it before the prompt"
    require(is_name, f"no model {str(name)!r}: {fix}")
    try:
        return convert.load_hf(name), f"{name} of the Hub"
    except UserError as e:
        if "/" in str(name):  # a path as much as a name of the Hub
            root = Path(__file__).parent.parent
            there = f" ({root} has: cd {root})" if (root / path).exists() else ""
            raise UserError(f"{Path.cwd()} has no {name}{there}; and of the Hub: {e}") from None
        raise


def describe_step(path: Path, facts: dict[str, Any]) -> str:
    """The path of a checkpoint and its step, of how many where the run's config is beside it."""
    step = facts.get("step")
    if not isinstance(step, int):
        return str(path)
    try:
        max_steps = json.loads((path.parent / "config.json").read_text())["resolved_max_steps"]
        return f"{path}, step {step:,} of {max_steps:,}"
    except (OSError, ValueError, TypeError, KeyError):  # a file that was copied alone
        return f"{path}, step {step:,}"
