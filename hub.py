"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere (also: --data-dir hf://OWNER/NAME)
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # could this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers' AutoModelForCausalLM
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

An interrupted transfer continues when the same command is run again; it is complete only once all hashes match.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from system.cli import UserError, print0, require, run_cli
from system.hub_client import hold_files, open_to_write, pull, push, staging_folder
from tokens.hub_data import pull_data, push_data
from training import convert, metrics_file

if TYPE_CHECKING:
    from model import GPT, GPTConfig
    from training.config import TrainConfig

# Files of a model repository that are pulled: checkpoints, exports, and what describes them. Code is never fetched.
CHECKPOINT_FILE = re.compile(r"(?P<kind>model|optim)_(?P<step>\d+)\.pt")
OTHER_FILE = re.compile(r"[\w-]+\.(safetensors|json|jsonl|txt|png|md|jinja)")

# The figures of a run that its model card shows, in this order.
CARD_FIGURES = ("step", "tokens", "train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm")


# What a free account may store in private repositories (huggingface.co/docs/hub/storage-limits, November 2026).
FREE_PRIVATE_BYTES = 100e9


def check(
    repo: str,
    public: bool = False,
    model_bytes: int | None = None,
    optimizer_bytes: int = 0,
    saves: int = 1,
    steps: Literal["newest", "best", "all"] = "newest",
    periodic: bool = False,
) -> None:
    """Make the model repository REPO (private unless --public) if it is missing, and check that this token may write
    to it: better now than when a run is over.

    Args:
        repo: OWNER/NAME.
        public: the repository is one that all can read.
        model_bytes: the size of a model_*.pt of the run to come: then say how much will be stored there.
        optimizer_bytes: the size of an optim_*.pt.
        saves: how many checkpoints the run keeps.
        steps: which of them are pushed at the end.
        periodic: checkpoints with their optimizer are pushed while it trains, each in the place of the one before.
    """
    with open_to_write(repo, "model", public) as (api, repo):
        print0(f"{repo} is there, and this token may push to it")
        if model_bytes is None:
            return

        # What the repository has already, which other runs may have left, and what comes.
        tree = api.list_repo_tree(repo, recursive=True)
        stored = sum(getattr(entry, "size", 0) for entry in tree)
        coming = pushed_bytes(model_bytes, optimizer_bytes, saves, steps, periodic)
        print0(f"pushes: at most {coming / 1e9:.1f} GB in {repo}, which holds {stored / 1e9:.1f} GB now")
        limit = f"a free account may store {FREE_PRIVATE_BYTES / 1e9:.0f} GB in all its private repositories"
        if not public and stored + coming > FREE_PRIVATE_BYTES:
            fix = "push fewer checkpoints (PUSH=newest), free space on the Hub, or make sure that your plan has more"
            print0(f"warning: {limit}, and its pushes are refused beyond that; {fix}")
        elif not public:
            print0(f"{limit}; what others of yours hold was not looked up")


def planned_sizes(cfg: TrainConfig) -> tuple[int, int, int] | None:
    """For a run that has not begun: the bytes of a model_*.pt and of an optim_*.pt, and how many checkpoints it keeps.
    None if --init-from decides on the network."""
    import torch

    from model import GPT
    from tokens import shards
    from training import predict, presets

    # On the meta device a model has shapes and no memory. What the optimizers keep follows from the shapes.
    if presets.is_network_from_init(cfg):
        return None
    with torch.device("meta"):
        model = GPT(cfg.model)
    model_bytes = predict.FLOAT32 * model.num_params()
    optimizer_bytes = predict.optimizer_bytes(replace(cfg, zero_stage=0), model, ranks=1)

    # The length of the run follows from the size of the shards, two bytes a token, if they are here.
    saves = 1
    if cfg.save_every and not cfg.data_dir.startswith("hf://"):
        tokens = sum(path.stat().st_size // 2 for path in shards.find_shards(cfg.data_dir, "train"))
        saves = math.ceil(cfg.total_steps(tokens // cfg.sequence_length) / cfg.save_every)
    if cfg.keep:
        saves = min(saves, cfg.keep + 1)  # and the best
    return model_bytes, optimizer_bytes, saves


def pushed_bytes(model_bytes: int, optimizer_bytes: int, saves: int, steps: str, periodic: bool) -> int:
    """The most bytes that the pushes of a run store at a time, before there are any files: list_pushed_files lists the
    files themselves. The last push counts with the optimizer, as a run that is stopped early is pushed."""
    match steps:
        case "newest":
            models = 1
        case "best":
            models = 2  # and the newest, to resume from
        case "all":
            models = saves
        case _:
            raise ValueError(f"--steps {steps!r} must be newest, best or all")
    # A checkpoint that was pushed before is removed only once the new one is there.
    replaced = model_bytes + optimizer_bytes if periodic else 0
    return models * model_bytes + optimizer_bytes + replaced


# ------------------------------------------------------------------------- pushing and pulling models


def push_model(
    path: Path,
    repo: str,
    public: bool = False,
    with_optimizer: bool = False,
    steps: Literal["newest", "best", "all"] = "newest",
    temporary: bool = False,
) -> None:
    """Upload a .pt file, checkpoints of a run, or an export.

    Args:
        path: the file, or the folder of the run or the export.
        repo: OWNER/NAME, made if missing; private unless --public.
        public: push where all can read.
        with_optimizer: also what --resume needs: a run's newest step with its optimizer.
        steps: which of a run's: the newest, the one with the lowest val loss, or all.
        temporary: a later push of a newer step of the run may remove these checkpoints from the repository.
    """
    # An export has its own card and is pushed as it is.
    if (path / "model.safetensors").is_file():
        files = [p for p in path.iterdir() if CHECKPOINT_FILE.fullmatch(p.name) or OTHER_FILE.fullmatch(p.name)]
        with staging_folder(path) as folder:
            hold_files(files, folder)
            push(repo, "model", folder, card="", public=public)
        return

    with staging_folder(path if path.is_dir() else path.parent) as folder:
        described = hold_checkpoints(path, folder, steps, with_optimizer)

        # Loading the model also checks it: a damaged checkpoint is not pushed.
        _, card = load_with_card(folder / described)
        card += "    python hub.py pull-model REPO DIR\n    python infer.py DIR 'Hello,'\n"

        # What was pushed as temporary is superseded by a newer step of the run.
        pushed = {p.name for p in folder.glob("*.pt")}
        newest = max(step_of(name) for name in pushed)

        def is_superseded(name: str) -> bool:
            return 0 <= step_of(name) < newest

        marks = pushed if temporary else set()
        push(repo, "model", folder, card, public, temporary=marks, is_superseded=is_superseded)


def step_of(name: str) -> int:
    """The step of a checkpoint by its file's name; -1 for any other file."""
    match = CHECKPOINT_FILE.fullmatch(name)
    return int(match["step"]) if match else -1


def hold_checkpoints(path: Path, folder: Path, steps: str, with_optimizer: bool) -> str:
    """Put what is pushed of `path`, a .pt file or a run folder, into the folder of the push. Returns the name of the
    model file that the card describes."""
    # A run that is training may delete a checkpoint (--keep) between the choice and the links: then choose again.
    for _ in range(10):
        described, files = list_pushed_files(path, steps, with_optimizer)
        try:
            hold_files(files, folder)
            return described.name
        except FileNotFoundError:
            for held in folder.iterdir():
                held.unlink()
    raise UserError(f"{path} deletes its checkpoints as fast as they can be listed; use a larger --keep")


def list_pushed_files(path: Path, steps: str, with_optimizer: bool) -> tuple[Path, list[Path]]:
    """What a push of `path`, a .pt file or a run folder, consists of: the model file that the card describes, and all
    files. pushed_bytes adds up the same before there are any."""
    from training import checkpoint

    # The models to push, and the one that the card describes. --steps is a choice among those of a run folder.
    newest = checkpoint.newest_model(path) if path.is_dir() else path
    described = newest
    models = {newest}
    if path.is_dir():
        match steps:
            case "newest":
                pass
            case "best":
                described = best_model(path) or newest
                models = {described}
            case "all":
                models |= {checkpoint.model_path(path, step) for step in checkpoint.complete_steps(path, ["model"])}
            case _:
                raise ValueError(f"--steps {steps!r} must be newest, best or all")

    # What belongs to them: the curves, the config and, if asked for, what --resume needs.
    others = [described.with_name(name) for name in ("metrics.jsonl", "curves.png", "config.json")]
    files = models | {p for p in others if p.is_file()}
    if with_optimizer:
        optim = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optim.is_file(), f"{optim} does not exist; push without --with-optimizer")
        files |= {newest, optim}
    return described, sorted(files)


def pull_model(repo: str, out_dir: Path, revision: str | None = None, every_step: bool = False) -> None:
    """Download a pushed model, its newest step or all of them, for infer.py and, if its optimizer was pushed too, for
    `train_gpt2.py --resume`."""
    with pull(repo, "model", out_dir, revision) as (remote, fetch):
        # Sort the files by what they are: checkpoints with their step, and others.
        matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in remote}
        checkpoints = {name: match for name, match in matches.items() if match}
        others = [name for name in remote if OTHER_FILE.fullmatch(name)]

        # Choose the steps. An optimizer file newer than every model is of no use.
        newest = max((int(match["step"]) for match in checkpoints.values() if match["kind"] == "model"), default=None)
        chosen = [name for name, match in checkpoints.items() if every_step or int(match["step"]) == newest]

        # A repository without weights is most likely another one than the user meant.
        wanted = chosen + others
        has_weights = any(name.endswith((".pt", ".safetensors")) for name in wanted)
        require(has_weights, f"{repo} has no model (model_00000.pt or model.safetensors); is the name right?")
        fetch(dict.fromkeys(wanted))
    print0(f"{repo} is in {out_dir}; try: python infer.py {out_dir} 'Hello,'")


def best_model(run_dir: Path) -> Path | None:
    """The model file of a run with the lowest validation loss; None if no step was both saved and evaluated."""
    from training import checkpoint

    # The validation loss of each saved step.
    saved = checkpoint.complete_steps(run_dir, ["model"])
    val_losses = {}
    for row in metrics_file.read_metrics(run_dir / "metrics.jsonl"):
        if row["step"] in saved and isinstance(row.get("val_loss"), float):
            val_losses[row["step"]] = row["val_loss"]

    if not val_losses:
        print0(f"no step saved in {run_dir} has a val loss: its newest is taken for the best")
        return None
    # The first of several steps with the same loss.
    best_step = min(val_losses, key=val_losses.get)
    return checkpoint.model_path(run_dir, best_step)


# ------------------------------------------------------------------------- the model card


def load_with_card(weights: Path) -> tuple[GPT, str]:
    """The model in a .pt file, and a model card with the run's figures at that step."""
    from training import checkpoint

    # The file's own facts, such as its step, come first.
    model, figures = checkpoint.load(weights)
    step = figures["step"]

    # The run's measurements up to this step: of each kind the last one counts.
    for row in metrics_file.read_metrics(weights.with_name("metrics.jsonl")):
        if row["step"] <= step:
            figures |= row
    figures["step"] = step

    # How many tokens the model has seen, where the run's config is there to tell.
    tokens_per_step = metrics_file.tokens_per_step(weights.parent)
    if tokens_per_step:
        figures["tokens"] = step * tokens_per_step
    return model, make_card(model.config, model.num_params(), figures)


def make_card(config: GPTConfig, num_params: int, figures: dict[str, Any]) -> str:
    """The text of a README.md for the Hub: the network's size and a table of CARD_FIGURES, as far as they are known."""
    shape = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context {config.block_size}."
    # Rows of metrics.jsonl have whatever was measured at their step.
    known = {name: figures[name] for name in CARD_FIGURES if isinstance(figures.get(name), int | float)}
    # The header between --- is read by the Hub; Markdown has no table without a head row.
    lines = ["---", "pipeline_tag: text-generation", "tags: [gpt2]", "---", "# GPT-2", ""]
    lines += [f"{num_params:,} parameters: {shape}", ""]
    lines += ["| | |", "|-|-|", *(f"| {name} | {value:,} |" for name, value in known.items()), "", ""]
    return "\n".join(lines)


# ------------------------------------------------------------------------- converting


def export(path: Path, out_dir: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer can load, with a model card."""
    from training import checkpoint

    # A run folder stands for its newest complete step.
    model, card = load_with_card(checkpoint.newest_model(path) if path.is_dir() else path)
    convert.save_hf(model, out_dir)
    # The card ends with the line of Python that loads the folder.
    (out_dir / "README.md").write_text(f'{card}    AutoModelForCausalLM.from_pretrained("{out_dir.name}")\n')
    print0(f"{out_dir} is ready; try: python infer.py {out_dir} 'Hello,'")


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a build-nanogpt or nanoGPT checkpoint to OUT_DIR/model_STEP.pt. No pickled code in it is run."""
    from training import checkpoint

    # Among the models of another run, the imported one could be taken for that run's newest step.
    existing = sorted(out_dir.glob("model_*.pt"))
    problem = f"{out_dir} already has a model, and an import never joins another run"
    require(not existing, f"{problem}; choose another folder")

    # Read the old file before the folder is made: a bad file leaves no empty folder.
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    # There is no train state to convert: such a model starts a new run with --init-from.
    target = checkpoint.model_path(out_dir, step)
    checkpoint.write(target, checkpoint.model_file(model, step))
    print0(f"{model.num_params():,} parameters are in {target}; try: python infer.py {out_dir} 'Hello,'")


# ------------------------------------------------------------------------- the command line


def main() -> None:
    import tyro

    # Each function is a command: its arguments become flags, its docstring the help.
    commands = {
        "push-data": push_data,
        "pull-data": pull_data,
        "push-model": push_model,
        "pull-model": pull_model,
        "check": check,
        "export": export,
        "import": import_old,
    }
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, config=(tyro.conf.PositionalRequiredArgs,))


if __name__ == "__main__":
    run_cli(main)
