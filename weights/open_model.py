"""Open a model by a path or a name: the one function that infer.py, hellaswag.py, training and the benches call.

    model = open_model("log/gpt2-124m/model_19073.pt")   # a checkpoint file
    model = open_model("log/gpt2-124m")                  # a run folder: its newest complete step
    model = open_model("exports/gpt2-mine")              # a Hugging Face folder, e.g. from: python hub.py export
    model = open_model("gpt2")                           # a name on the Hub: gpt2, gpt2-medium, OWNER/NAME

It is separate from weights/checkpoint.py, so that reading and writing checkpoints imports no Hub code.
"""

from pathlib import Path

from model import GPT
from system.cli import require
from weights import checkpoint, convert


def open_model(name: str | Path) -> GPT:
    """Open the model that `name` stands for and return it as a GPT (float32, on the CPU, in eval mode).

    `name` is a .pt file, a run folder, a Hugging Face folder or a name on the Hub (see the module's example). Raises
    UserError if there is no such model, or if its file is damaged or of another kind.
    """
    path = Path(name)

    # A checkpoint of this project: a file, or a folder that holds no weights in Hugging Face's layout.
    is_run_folder = path.is_dir() and not convert.find_weight_files(path)
    if path.suffix == ".pt" or is_run_folder:
        model, _ = checkpoint.load(path)
        return model

    # A path that does not exist looks like OWNER/NAME of the Hub. If its parent is a folder here, it is a mistyped
    # path; so is any other file.
    looks_like_local_path = path.is_file() or (len(path.parts) > 1 and path.parent.is_dir())
    require(path.is_dir() or not looks_like_local_path, f"no model at {path}; look into {path.parent}")

    # A folder or a name on the Hub, in Hugging Face's layout.
    return convert.load_hf(name)
