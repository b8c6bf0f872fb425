"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere (also: --data-dir hf://OWNER/NAME)
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # could this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers; --gguf q8_0: for llama.cpp
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

After an interrupted transfer, run the same command again: complete files are not transferred twice, and a file that was
cut off is transferred from its beginning. A transfer is complete only once all hashes match.

The exit code is 77 if the Hub refuses the token, or if there is none (the others: system/cli.py).
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from safetensors import SafetensorError

from system.cli import UserError, print0, require, run_cli
from system.hub_client import hold_files, open_to_write, pull, push, staging_folder
from tokens.hub_data import pull_data, push_data
from training import convert, metrics, model_card
from training.gguf import GgufType, check_convertible, write_gguf

if TYPE_CHECKING:
    from model import GPT
    from training.config import TrainConfig
    from training.hf_layouts import Layout

# Files of a model repository that are pulled: checkpoints, exports, and what describes them. Code is never fetched.
CHECKPOINT_FILE = re.compile(r"(?P<kind>model|optim)_(?P<step>\d+)\.pt")
OTHER_FILE = re.compile(r"[\w-]+\.(safetensors|json|jsonl|txt|png|md|jinja)")

# In a repository that has an export, whose config.json is the network's, the config.json of a run has this name.
RUN_CONFIG = "train_config.json"

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
    """Check that your token may push a model to REPO, which is created if it does not exist. train.sh calls this before
    a run.

    Args:
        repo: OWNER/NAME; private unless --public.
        public: create a public repository, or allow one that is public.
        model_bytes: the size of the run's model_*.pt files; then the storage that its pushes need is printed.
        optimizer_bytes: the size of an optim_*.pt.
        saves: how many checkpoints the run keeps.
        steps: which checkpoints are pushed at the end.
        periodic: checkpoints are also pushed during training, with their optimizer state; each replaces the last.
    """
    # Opening the repository for a write makes it if it is missing, and tries the token.
    with open_to_write(repo, "model", public) as (api, repo):
        print0(f"{repo} exists, and this token may push to it")
        if model_bytes is None:
            return

        # What the repository holds already, perhaps from other runs, and what this run will add at the most.
        tree = api.list_repo_tree(repo, recursive=True)
        stored = sum(getattr(entry, "size", 0) for entry in tree)
        planned = pushed_bytes(model_bytes, optimizer_bytes, saves, steps, periodic)
        print0(f"pushes: at most {planned / 1e9:.1f} GB in {repo}, which holds {stored / 1e9:.1f} GB now")

        # Public storage has no such limit. What the account's other repositories hold cannot be seen from here.
        limit = f"a free account may store {FREE_PRIVATE_BYTES / 1e9:.0f} GB in all its private repositories"
        if not public and stored + planned > FREE_PRIVATE_BYTES:
            fix = "push fewer checkpoints (PUSH=newest), free space on the Hub, or make sure that your plan has more"
            print0(f"warning: {limit}, and its pushes are refused beyond that; {fix}")
        elif not public:
            print0(f"{limit}; the size of your other repositories was not checked")


def planned_sizes(cfg: TrainConfig) -> tuple[int, int, int] | None:
    """For a run that has not begun: the bytes of a model_*.pt and of an optim_*.pt, and how many checkpoints it keeps.
    None if --init-from decides on the network."""
    import torch

    from model import GPT
    from tokens import shards
    from training import plan, presets

    # On the meta device a model has shapes and no memory. What the optimizers keep follows from the shapes.
    if presets.is_network_from_init(cfg):
        return None
    with torch.device("meta"):
        model = GPT(cfg.model)
    model_bytes = 4 * model.num_params()
    optimizer_bytes = plan.OPTIMIZER_BYTES * model.num_params()

    # The length of the run follows from the size of the shards, two bytes a token, if they are here.
    saves = 1
    if cfg.save_every and not cfg.data_dir.startswith("hf://"):
        tokens = sum(path.stat().st_size // 2 for path in shards.find_shards(cfg.data_dir, "train"))
        saves = math.ceil(cfg.total_steps(tokens // cfg.sequence_length) / cfg.save_every)
    # --keep deletes the others.
    if cfg.keep:
        saves = min(saves, cfg.keep + 1)  # and the best
    return model_bytes, optimizer_bytes, saves


def pushed_bytes(model_bytes: int, optimizer_bytes: int, saves: int, steps: str, periodic: bool) -> int:
    """The most bytes that the pushes of a run store at a time, computed before there are any files (list_pushed_files
    lists the files themselves). The last push is counted with the optimizer, because a run that stops early is pushed
    with it, and with the export, which is as large as one more model."""
    # How many model files the last push has.
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
    return (models + 1) * model_bytes + optimizer_bytes + replaced


# ------------------------------------------------------------------------- pushing and pulling models


def push_model(
    path: Path,
    repo: str,
    public: bool = False,
    with_optimizer: bool = False,
    steps: Literal["newest", "best", "all"] = "newest",
    temporary: bool = False,
    export: bool = True,
    gguf: GgufType | None = None,
    license: str = "mit",
) -> None:
    """Upload checkpoints of a run, or one .pt file, with an export that from_pretrained("OWNER/NAME") loads. Or upload
    an export alone.

    Args:
        path: a run folder, a .pt file, or the folder of an export.
        repo: OWNER/NAME; created if it does not exist, private unless --public.
        public: create a public repository, or push to one that is public.
        with_optimizer: also push the newest step with its optimizer state, which --resume needs.
        steps: which checkpoints of the run: the newest, the one with the lowest val loss, or all.
        temporary: a push of a newer step of this run may remove these checkpoints again; implies --no-export.
        export: also push what transformers loads, with code if it has no class for the network. The next push replaces
            it; the old model.safetensors stays in the repository's history and counts in your storage until you delete
            it there (settings, "List LFS files").
        gguf: also push a GGUF file of this type for llama.cpp and ollama; needs llama.cpp's converter.
        license: the license of the weights, for the page of the model.
    """
    # An export has its own card and is pushed as it is.
    if (path / "model.safetensors").is_file() and not any(path.glob("model_*.pt")):
        require(gguf is None, f"{path} is an export: make it with its GGUF (hub.py export --gguf {gguf}), then push it")
        files = [p for p in path.iterdir() if is_pushed(p)]
        with staging_folder(path) as folder:
            hold_files(files, folder)
            push(repo, "model", folder, card="", public=public)
        return

    # A temporary push is for resuming alone, so it needs no export.
    with_export = export and not temporary
    require(with_export or gguf is None, f"--gguf {gguf} is made from the export, which this push leaves out")
    with staging_folder(path if path.is_dir() else path.parent) as folder:
        described = hold_checkpoints(path, folder, steps, with_optimizer)

        # Loading the model also checks it: a damaged checkpoint is not pushed. push() replaces REPO in the card.
        run = model_card.read_run(folder / described)

        # The export has a config.json of its own.
        if (folder / "config.json").is_file():
            (folder / "config.json").rename(folder / RUN_CONFIG)
        layout = None
        if with_export:
            # Without room for the export, push the checkpoint alone: a rented machine may be waiting for this push.
            try:
                layout = add_export(run.model, folder, repo.strip("/").split("/")[-1], gguf)
            except (OSError, SafetensorError) as error:
                shutil.rmtree(folder.parent / "export", ignore_errors=True)
                print0(f"warning: the export could not be written ({error}); the checkpoint is pushed without it")

        # The page of the model.
        has_curves = (folder / "curves.png").is_file()
        card = model_card.make_card(run, "REPO", layout, license, has_checkpoint=True, has_curves=has_curves)

        # A temporary checkpoint in the repository is superseded by a newer step of the run.
        pushed = {p.name for p in folder.glob("*.pt")}
        newest = max(step_of(name) for name in pushed)

        def is_superseded(name: str) -> bool:
            return 0 <= step_of(name) < newest

        # Upload everything, and mark what a later push may remove.
        marks = pushed if temporary else set()
        push(repo, "model", folder, card, public, temporary=marks, is_superseded=is_superseded)

    # Without the optimizer state the Hub has nothing to resume from, which another machine may need.
    run_dir = path if path.is_dir() else path.parent
    if not with_optimizer and any(run_dir.glob("optim_*.pt")):
        command = shlex.join(["python", "hub.py", "push-model", str(run_dir), repo, "--with-optimizer"])
        print0(
            f"note: the optimizer state was not pushed, so that {repo} can neither be resumed nor trained for another "
            f"epoch on another machine; to push it: {command}"
        )


def is_pushed(path: Path) -> bool:
    """Whether a file of an export belongs in its repository."""
    has_name = CHECKPOINT_FILE.fullmatch(path.name) or OTHER_FILE.fullmatch(path.name)
    return bool(has_name) or path.name in convert.CODE_FILES or path.suffix == ".gguf"


def add_export(model: GPT, folder: Path, name: str, gguf: GgufType | None) -> Layout:
    """Put an export of `model` into the folder of a push. Raises UserError if one of its names is taken there."""
    # save_hf needs a new folder: write the export there, then move its files.
    export_dir = folder.parent / "export"
    layout = convert.save_hf(model, export_dir)
    if gguf:
        write_gguf(model, export_dir, export_dir / f"{name}-{gguf}.gguf", gguf)
    for path in export_dir.iterdir():
        require(not (folder / path.name).exists(), f"the run has a file called {path.name}; push with --no-export")
        path.rename(folder / path.name)
    return layout


def step_of(name: str) -> int:
    """The step of a checkpoint by its file's name; -1 for any other file."""
    match = CHECKPOINT_FILE.fullmatch(name)
    return int(match["step"]) if match else -1


def hold_checkpoints(path: Path, folder: Path, steps: str, with_optimizer: bool) -> str:
    """Put what is pushed of `path`, a .pt file or a run folder, into the folder of the push. Returns the name of the
    model file that the card describes."""
    # A run that is training may delete a checkpoint (--keep) between the choice and the links: then choose again.
    for _ in range(10):
        try:
            described, files = list_pushed_files(path, steps, with_optimizer)
            hold_files(files, folder)
            return described.name
        except FileNotFoundError:
            # Begin anew with an empty folder.
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

    # What belongs to them: the metrics, the curves and the config.
    others = [described.with_name(name) for name in ("metrics.jsonl", "curves.png", "config.json")]
    files = models | {p for p in others if p.is_file()}

    # Resuming needs the newest step with its optimizer state, whichever models are pushed.
    if with_optimizer:
        optim = newest.with_name(newest.name.replace("model_", "optim_"))
        # A run that is training may have deleted both meanwhile: the caller then chooses again.
        if not optim.is_file() and not newest.is_file():
            raise FileNotFoundError(newest)
        require(optim.is_file(), f"{optim} does not exist; push without --with-optimizer")
        files |= {newest, optim}
    return described, sorted(files)


def pull_model(repo: str, out_dir: Path, revision: str | None = None, every_step: bool = False) -> None:
    """Download a pushed model for infer.py and, if its optimizer state was pushed too, for `train_gpt2.py --resume`.

    Args:
        repo: OWNER/NAME.
        out_dir: a new folder, or the one of an earlier pull.
        revision: a commit or tag instead of the newest version.
        every_step: all checkpoints instead of the newest.
    """
    with pull(repo, "model", out_dir, revision) as (remote, fetch):
        # Sort the files by what they are: checkpoints with their step, and others.
        matches = {name: CHECKPOINT_FILE.fullmatch(name) for name in remote}
        checkpoints = {name: match for name, match in matches.items() if match}
        others = [name for name in remote if OTHER_FILE.fullmatch(name)]

        # Choose the steps. An optimizer file newer than every model is of no use.
        newest = max((int(match["step"]) for match in checkpoints.values() if match["kind"] == "model"), default=None)
        chosen = [name for name, match in checkpoints.items() if every_step or int(match["step"]) == newest]

        # If there are checkpoints, leave out the export, which has the same weights.
        if newest is not None and "model.safetensors" in remote:
            others = [name for name in others if name not in convert.EXPORT_FILES]

        # The repository has the run's config.json under another name. Keep a config.json that is in `out_dir` already:
        # its run may have been continued since the push.
        if (out_dir / "config.json").exists():
            others = [name for name in others if name != RUN_CONFIG]

        # A repository without weights is probably not the one that the user meant.
        wanted = chosen + others
        has_weights = any(name.endswith((".pt", ".safetensors")) for name in wanted)
        require(has_weights, f"{repo} has no model (model_00000.pt or model.safetensors); is the name right?")

        # Download, with the Hub's hashes. The run's config gets the name that it has in a run folder.
        fetch(dict.fromkeys(wanted))
        if RUN_CONFIG in wanted:
            (out_dir / RUN_CONFIG).rename(out_dir / "config.json")
    print0(f"{repo} is in {out_dir}; try: {sampling_command(out_dir)}")


def best_model(run_dir: Path) -> Path | None:
    """The model file of a run with the lowest validation loss; None if no step was both saved and evaluated."""
    from training import checkpoint

    # The validation loss of each saved step.
    saved = checkpoint.complete_steps(run_dir, ["model"])
    val_losses = {}
    for row in metrics.read_metrics(run_dir / "metrics.jsonl"):
        if row["step"] in saved and isinstance(row.get("val_loss"), float):
            val_losses[row["step"]] = row["val_loss"]

    # A run that never evaluated a step that it saved.
    if not val_losses:
        print0(f"no step saved in {run_dir} has a val loss: its newest step is used as the best")
        return None
    # The first of several steps with the same loss.
    best_step = min(val_losses, key=val_losses.get)
    return checkpoint.model_path(run_dir, best_step)


def sampling_command(out_dir: Path) -> str:
    """The command, to paste, that samples from a folder with a model."""
    return shlex.join(["python", "infer.py", str(out_dir), "Hello,"])


# ------------------------------------------------------------------------- converting


def export(path: Path, out_dir: Path, gguf: GgufType | None = None, license: str = "mit") -> None:
    """Write a model as a folder that transformers' AutoModelForCausalLM and AutoTokenizer load, with a model card.

    Args:
        path: a run folder, whose newest checkpoint is taken, or a .pt file.
        out_dir: a new or empty folder. Its README.md shows how to load the model.
        gguf: also write a GGUF file of this type for llama.cpp and ollama; needs llama.cpp's converter.
        license: the license of the weights, for README.md.
    """
    from training import checkpoint

    # Refuse what cannot be converted before anything is written.
    run = model_card.read_run(checkpoint.newest_model(path) if path.is_dir() else path)
    if gguf:
        check_convertible(run.model.config)

    # The model, its card, and the GGUF.
    layout = convert.save_hf(run.model, out_dir)
    name = out_dir.resolve().name
    card = model_card.make_card(run, name, layout, license, has_checkpoint=False, has_curves=False)
    (out_dir / "README.md").write_text(card)
    if gguf:
        write_gguf(run.model, out_dir, out_dir / f"{name}-{gguf}.gguf", gguf)

    # How to use it.
    print0(f"{out_dir} is ready; try: {sampling_command(out_dir)}")
    if layout.needs_code:
        print0("transformers has no class for this network: load it with trust_remote_code=True (see its README.md)")


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a checkpoint of build-nanogpt or nanoGPT to OUT-DIR/model_STEP.pt. Pickled code in it is never run.

    Args:
        old: the .pt file.
        out_dir: a folder without a model.
    """
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
    print0(f"{model.num_params():,} parameters are in {target}; try: {sampling_command(out_dir)}")


# ------------------------------------------------------------------------- the command line


def main() -> None:
    import tyro

    # Each function is a command: its arguments become flags, its docstring the help. An argument without a default is
    # positional, and the help calls it by its name.
    commands = {
        "push-data": push_data,
        "pull-data": pull_data,
        "push-model": push_model,
        "pull-model": pull_model,
        "check": check,
        "export": export,
        "import": import_old,
    }
    config = (tyro.conf.PositionalRequiredArgs, tyro.conf.PositionalMetavarFromFieldName)
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, config=config)


if __name__ == "__main__":
    run_cli(main)
