"""Open a model by a path or a name.

model = open_model("log/gpt2-124m/model_19073.pt")   # a checkpoint file
model = open_model("log/gpt2-124m")                  # a run folder: its newest complete step
model = open_model("exports/gpt2-mine")              # a Hugging Face folder, e.g. from: python hub.py export
model = open_model("gpt2")                           # a name on the Hub: gpt2, gpt2-medium, OWNER/NAME
"""

from pathlib import Path

from checkpoints import checkpoint, convert, run_folder
from model import GPT
from system.errors import require


def open_model(name: str | Path) -> GPT:
    """Open the model that `name` stands for and return it as a GPT (float32, on the CPU, in eval mode).

    `name` is a .pt file, a run folder, a Hugging Face folder or a name on the Hub (see the module's example). Raises
    UserError if there is no such model, or if its file is damaged or of another kind.
    """
    model, _ = open_and_describe(name)
    return model


def open_and_describe(name: str | Path) -> tuple[GPT, str]:
    """What open_model returns, and in words what was opened: log/gpt2-124m/model_12000.pt, step 12,000."""
    path = Path(name)
    if convert.is_hf_folder(path):
        return convert.load_hf(path), str(path)
    if path.is_dir():
        path = run_folder.newest_model(path)
    if path.is_file() or path.suffix == ".pt":
        model, facts = checkpoint.load(path)
        return model, f"{path}, step {facts['step']:,}"

    # A path that does not exist looks like OWNER/NAME of the Hub. If its parent is a folder here, it is mistyped.
    is_mistyped = "/" in str(name) and path.parent.is_dir()
    require(not is_mistyped, f"no model at {path}; {run_folder.describe_runs(path.parent)}")
    require(not (Path("log") / path).is_dir(), f"no model at {path}; the run is log/{path}")
    return convert.load_hf(name), f"{name} of the Hub"
