"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # may this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

After an interrupted transfer, run the same command again: complete files are not transferred twice. Public repositories
are pulled without a token. The client and its errors are in system/huggingface.py, the layouts in checkpoints/.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import system  # noqa: F401  # first

# isort: split
from checkpoints import checkpoint, convert, run_folder
from checkpoints.run_folder import CHECKPOINT_FILE, complete_steps, model_path, newest_model, optim_path
from model import GPT
from system.errors import require
from system.files import lock_folder
from system.huggingface import open_hub
from system.printing import print0
from system.process import run_cli
from system.settings import ArgumentParser
from tokens import shards

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# ------------------------------------------------------------------------- repositories


def check(repo: str, public: bool) -> None:
    """Check that this token may push a model to a repository, as train.sh does before a run."""
    with open_hub() as api:
        repo = open_for_push(api, repo, "model", public)
    print0(f"{repo} exists, and this token may push to it")


def open_for_push(api: HfApi, repo: str, repo_type: str, public: bool) -> str:
    """Create a repository if it is missing, check that this token may write there, and return its full name."""
    # token=True: without a token, fail before anything is sent.
    repo = api.create_repo(repo, repo_type=repo_type, private=not public, exist_ok=True, token=True).repo_id
    # If the repository exists, create_repo succeeds even with a token that can only read.
    api.auth_check(repo, repo_type=repo_type, write=True)

    # Never publish by accident.
    is_private = api.repo_info(repo, repo_type=repo_type).private
    require(public or is_private, f"{repo} exists and is public; to push there: --public (train.sh: PUSH_PUBLIC=1)")
    return repo


def pull_files(api: HfApi, repo: str, repo_type: str, names: Collection[str], folder: Path) -> None:
    """Download files of a repository into `folder`, and check their hashes. A file that is already there is never
    replaced: it must have the same content."""

    def find_differences() -> list[str]:
        found = api.verify_repo_checksums(repo, repo_type=repo_type, local_dir=folder)
        return [file["path"] for file in found.mismatches if file["path"] in names]

    folder.mkdir(parents=True, exist_ok=True)
    different = ", ".join(find_differences())
    require(not different, f"{folder} has a different {different} than {repo}; pull into an empty folder")

    patterns = [glob.escape(name) for name in names]
    api.snapshot_download(repo, repo_type=repo_type, local_dir=folder, allow_patterns=patterns)
    damaged = find_differences()
    for name in damaged:
        (folder / name).unlink()
    require(not damaged, f"{', '.join(damaged)} of {repo} arrived damaged; pull again")


# ------------------------------------------------------------------------- token shards


def push_data(data_dir: Path, repo: str, public: bool) -> None:
    """Upload a folder of token shards as a dataset, after every byte is checked."""
    # Every machine would pull a damaged shard.
    manifest = shards.read_manifest(data_dir)
    require(not manifest or manifest.complete, f"{data_dir} is not finished; run the same fineweb.py command again")
    files = shards.list_shards(data_dir)
    require(files, f"{data_dir} has no shard")
    for file in files:
        shards.check_ids(shards.read_shard(file.path, file.sha256), file.path)

    # The shards of other programs come without a manifest: then the pattern of its name matches no file.
    patterns = [glob.escape(file.path.name) for file in files] + [shards.MANIFEST]
    with open_hub() as api:
        repo = open_for_push(api, repo, "dataset", public)
        api.upload_folder(folder_path=data_dir, allow_patterns=patterns, repo_id=repo, repo_type="dataset")
    print0(f"{repo} is complete; to pull: python hub.py pull-data {repo} DIR")


def pull_data(repo: str, data_dir: Path, limit_shards: int | None) -> None:
    """Download token shards into a folder, and check the sha256 of each.

    They are those of the manifest or, without one, every file of the repository that is named like a shard.
    """
    with open_hub() as api:
        # The manifest is read from the Hub's cache: among the shards it would say that they are complete.
        cache = api.snapshot_download(repo, repo_type="dataset", allow_patterns=shards.MANIFEST)
        manifest = shards.read_manifest(cache)
        names = api.list_repo_files(repo, repo_type="dataset")
        if manifest:
            names = [shard.file for shard in manifest.shards]
        matches = [match for match in map(shards.SHARD_NAME.fullmatch, names) if match]
        train_names = sorted(match[0] for match in matches if match["split"] == "train")
        require(train_names, f"{repo} has no training shard (NAME_train_000001{shards.SUFFIXES}); is the name right?")

        # A limit leaves out the later shards for training, but none that is here already.
        too_late = train_names[limit_shards:] if limit_shards is not None else []
        wanted = {match[0] for match in matches if match[0] not in too_late or (data_dir / match[0]).exists()}
        pull_files(api, repo, "dataset", wanted, data_dir)

    # The manifest comes last, and lists what was pulled: it says that the folder is complete. Whoever has pushed may
    # have mixed two sets.
    if manifest:
        pulled = [shard for shard in manifest.shards if shard.file in wanted]
        for shard in pulled:
            shards.read_shard(data_dir / shard.file, shard.sha256)
        shards.write_manifest(data_dir, replace(manifest, shards=pulled))
    print0(f"{len(wanted)} shards in {data_dir}, all hashes verified")


# ------------------------------------------------------------------------- models

# Files of a run folder that are pushed beside the checkpoints, and their names in the repository, where an export has
# a config.json of its own.
RUN_FILES = {"metrics.jsonl": "metrics.jsonl", "curves.png": "curves.png", "config.json": "train_config.json"}


def push_model(path: Path, repo: str, public: bool, with_optimizer: bool, steps: str) -> None:
    """Upload checkpoints of a run, with an export that from_pretrained("OWNER/NAME") loads."""
    # The last model is the one that is exported. Loading also checks it: a damaged one is not pushed.
    models = choose_models(path, steps)
    model, facts = checkpoint.load(models[-1])
    run_dir = models[-1].parent

    # Resuming needs the newest step with its optimizer state, whichever models are pushed.
    checkpoints = set(models)
    newest = choose_models(path, "newest")[0]
    if with_optimizer:
        optimizer = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optimizer.is_file(), f"--with-optimizer: {newest} has no {optimizer.name} next to it; leave that out")
        checkpoints |= {newest, optimizer}

    with open_hub() as api, lock_folder(run_dir / ".push"):
        repo = open_for_push(api, repo, "model", public)

        # What is uploaded stands in a folder of a fixed name: the next push removes what a killed one has left. A run
        # that is training appends to its metrics, and may delete a checkpoint meanwhile; a hard link keeps its content.
        upload_dir = run_dir / ".push" / "files"
        shutil.rmtree(upload_dir, ignore_errors=True)
        try:
            write_export(model, facts, run_dir, upload_dir, repo)
            # Of a README.md that is there, only the table of scores is replaced: people add a license and a text.
            card = upload_dir / "README.md"
            if api.file_exists(repo, card.name):
                table = SCORES.findall(card.read_text())[0]
                pushed = Path(api.hf_hub_download(repo, card.name)).read_text()
                card.write_text(SCORES.sub(lambda _: table, pushed))
            for file in checkpoints:
                try:
                    os.link(file, upload_dir / file.name)
                except OSError:  # a mounted drive without hard links
                    shutil.copy(file, upload_dir)
            for name, pushed_name in RUN_FILES.items():
                if (run_dir / name).exists():
                    shutil.copy(run_dir / name, upload_dir / pushed_name)
            api.upload_folder(folder_path=upload_dir, repo_id=repo)
        finally:
            shutil.rmtree(upload_dir, ignore_errors=True)
    others = run_folder.describe_best(path) if models[-1] == newest else ""
    print0(f"{repo} has step {facts['step']:,}{others}")
    print0(f"{repo} is complete; to pull: python hub.py pull-model {repo} DIR")


def choose_models(path: Path, steps: str) -> list[Path]:
    """The model files to push of a run folder, or the .pt file itself; the last one is what the card describes."""
    if path.is_file():
        return [path]
    newest = newest_model(path)
    if steps == "newest":
        return [newest]
    chosen = complete_steps(path, ["model"]) if steps == "all" else run_folder.best_saved_steps(path)
    return [model_path(path, step) for step in chosen]


def pull_model(repo: str, out_dir: Path) -> None:
    """Download the newest step of a pushed model.

    That is enough for infer.py and, if its optimizer state was pushed too, for `train_gpt2.py --resume`.
    """
    with open_hub() as api:
        # The newest step, and what describes the run. The export has the same weights as the checkpoint.
        matches = map(CHECKPOINT_FILE.fullmatch, api.list_repo_files(repo))
        steps = [int(match["step"]) for match in matches if match]
        require(steps, f"{repo} has no checkpoint (model_00000.pt); is the name right?")
        checkpoints = {model_path("", max(steps)).name, optim_path("", max(steps)).name}
        pull_files(api, repo, "model", checkpoints | {*RUN_FILES.values()}, out_dir)

    # A run in `out_dir` may have been continued with other settings: its config stays.
    config, pulled_config = out_dir / "config.json", out_dir / RUN_FILES["config.json"]
    if pulled_config.exists() and not config.exists():
        shutil.copy(pulled_config, config)


# ------------------------------------------------------------------------- other layouts

CARD = """---
pipeline_tag: text-generation
tags: [gpt2]
---
# {name}

A GPT of {parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context
{config.block_size}.

| preset | step | validation loss | bits per byte | HellaSwag (acc_norm) |
|---|---|---|---|---|
| {preset} | {step:,} | {val_loss} | {val_bpb} | {hellaswag_acc_norm} |

    python infer.py {name} "Hello, I'm a language model,"

In transformers:

    from transformers import pipeline

    pipe = pipeline("text-generation", model="{name}"{trust})
    print(pipe("Hello, I'm a language model,", max_new_tokens=50)[0]["generated_text"])
"""

SCORES = re.compile(r"\| preset \| step \|.*\n.*\n.*\n")


def export(path: Path, out_dir: Path) -> None:
    """Write a new folder that transformers' AutoModelForCausalLM and AutoTokenizer load, with a model card."""
    file = choose_models(path, "newest")[0]
    model, facts = checkpoint.load(file)
    write_export(model, facts, file.parent, out_dir, str(out_dir))
    print0(f"{out_dir} has step {facts['step']:,}{run_folder.describe_best(path)}")


def write_export(model: GPT, facts: dict[str, Any], run_dir: Path, out_dir: Path, name: str) -> None:
    """Write an export with its card. facts: what the checkpoint has beside the weights. run_dir: where its metrics are.
    name: what a user types to load the model, a folder or OWNER/NAME."""
    needs_code = convert.save_hf(model, out_dir)
    # A checkpoint is written before its step is evaluated, so the scores come from the metrics.
    row = run_folder.read_step(run_dir, facts["step"])
    scores = {key: f"{row[key]:.4f}" if row.get(key) else "-" for key in ("val_loss", "val_bpb", "hellaswag_acc_norm")}
    card = CARD.format(
        name=name,
        config=model.config,
        parameters=model.num_params(),
        preset=facts.get("preset", "-"),
        step=facts["step"],
        **scores,
        trust=", trust_remote_code=True" if needs_code else "",
    )
    (out_dir / "README.md").write_text(card)


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a checkpoint of build-nanogpt or nanoGPT, whose pickled code never runs, to OUT_DIR/model_STEP.pt."""
    # Among the models of another run, the imported one could be taken for that run's newest step.
    has_model = any(out_dir.glob("model_*.pt"))
    require(not has_model, f"{out_dir} already has a model, and an import never joins another run; choose another one")

    # Read the old file before the folder is made: a bad file leaves no empty folder.
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(model_path(out_dir, step), checkpoint.model_file(model, step))


# ------------------------------------------------------------------------- the command line


# The arguments of all commands. Each reaches its function as the parameter of that name.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "data_dir": {"type": Path, "help": "the folder of token shards"},
    "repo": {"help": "OWNER/NAME; a push also takes NAME of your own, and creates it if it does not exist"},
    "path": {"type": Path, "help": "a run folder or a .pt file"},
    "old": {"type": Path, "help": "the .pt file"},
    "out_dir": {"type": Path, "help": "the folder to write"},
    "--public": {"action": "store_true", "help": "create a public repository, or push to one that is public"},
    "--limit-shards": {"type": int, "metavar": "N", "help": "the first N for training, and those for val"},
    "--steps": {"choices": ("newest", "best", "all"), "default": "newest", "help": "best: by val loss"},
    "--with-optimizer": {"action": "store_true", "help": "also what --resume needs of the newest step"},
}

# {command: (the function, whose docstring begins with the command's help; its arguments)}
COMMANDS = {
    "push-data": (push_data, ["data_dir", "repo", "--public"]),
    "pull-data": (pull_data, ["repo", "data_dir", "--limit-shards"]),
    "push-model": (push_model, ["path", "repo", "--public", "--steps", "--with-optimizer"]),
    "pull-model": (pull_model, ["repo", "out_dir"]),
    "check": (check, ["repo", "--public"]),
    "export": (export, ["path", "out_dir"]),
    "import": (import_old, ["old", "out_dir"]),
}


def main() -> None:
    """Run one command."""
    parser = ArgumentParser(__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (run, arguments) in COMMANDS.items():
        description = str(run.__doc__).splitlines()[0]
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(run=run)
        for argument in arguments:
            command.add_argument(argument, **ARGUMENTS[argument])

    values = vars(parser.parse_args())
    values.pop("run")(**values)


if __name__ == "__main__":
    run_cli(main)
