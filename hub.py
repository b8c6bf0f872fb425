"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # may this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

After an interrupted transfer, run the same command again: complete files are not transferred twice. Public repositories
are pulled without a token.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from lifecycle import metrics
from model import GPT
from system.cli import UserError, print0, require, run_cli
from system.files import lock_folder
from system.huggingface import open_hub
from tokens import shards
from weights import checkpoint, convert

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

# What a push takes of a run folder beside the checkpoints, and its name in the repository, where an export has a
# config.json of its own.
RUN_FILES = {"metrics.jsonl": "metrics.jsonl", "curves.png": "curves.png", "config.json": "train_config.json"}

# The branch of a repository where a run that is still training keeps its newest checkpoint.
UNFINISHED = "unfinished"

# The README.md of a model.
CARD = """---
license: mit
pipeline_tag: text-generation
tags: [gpt2]
---
# {name}

A GPT of {parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context
{config.block_size}.

| preset | step | validation loss |
|---|---|---|
| {preset} | {step:,} | {val_loss} |

    python infer.py {name} "Hello, I'm a language model,"

In transformers:

    from transformers import pipeline

    pipe = pipeline("text-generation", model="{name}"{trust})
    print(pipe("Hello, I'm a language model,", max_new_tokens=50)[0]["generated_text"])
"""


def check(repo: str, public: bool = False) -> None:
    """Check that your token may push a model to REPO, which is created if it does not exist. train.sh calls this before
    a run.

    Args:
        repo: OWNER/NAME; private unless --public.
        public: create a public repository, or allow one that is public.
    """
    with open_hub() as api:
        repo = open_to_write(api, repo, "model", public)
        _, files = list_files(api, repo, "model")
    print0(f"{repo} exists, and this token may push to it")
    found = [name for name in files if checkpoint.FILE_NAME.fullmatch(name)]
    if found:
        print0(f"note: it has {max(found)}; if that is another run's, choose another name: pull takes the newest")


def open_to_write(api: HfApi, repo: str, kind: str, public: bool) -> str:
    """Make a repository if it is missing, check that this token may write there, and return its full name."""
    # token=True: without a token, fail before anything is sent.
    repo = api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True, token=True).repo_id
    # If the repository exists, create_repo succeeds even with a token that can only read.
    api.auth_check(repo, repo_type=kind, write=True)

    # Never publish by accident.
    may_push = public or api.repo_info(repo, repo_type=kind).private
    fix = "add --public (with train.sh: PUSH_PUBLIC=1), or choose another name"
    require(may_push, f"{repo} exists and is public; to push there {fix}")
    return repo


def list_files(api: HfApi, repo: str, kind: str, revision: str = "main") -> tuple[str, dict[str, RepoFile]]:
    """The newest commit of a branch, and its files by name."""
    info = api.repo_info(repo, repo_type=kind, revision=revision, files_metadata=True)
    return info.sha, {file.rfilename: file for file in info.siblings}


def fetch(api: HfApi, repo: str, kind: str, commit: str, wanted: dict[str, RepoFile], out: Path) -> None:
    """Download files of one commit into the folder `out`, and check them. A file that is there already is never
    replaced: it must be the same."""
    missing = [name for name in wanted if not (out / name).exists()]
    for name in wanted.keys() - missing:
        fix = "pull into an empty folder, or move the file away"
        require(is_same(out / name, wanted[name]), f"{out} has a different {name} than {repo}; {fix}")

    names = [glob.escape(name) for name in missing]
    api.snapshot_download(repo, repo_type=kind, revision=commit, local_dir=out, allow_patterns=names)
    for name in missing:
        if not is_same(out / name, wanted[name]):
            (out / name).unlink()
            raise UserError(f"{name} of {repo} arrived damaged; pull again")


def is_same(path: Path, file: RepoFile) -> bool:
    """Whether a file is the one on the Hub, which knows the sha256 of large files and the size of the others."""
    if not file.lfs:
        return path.stat().st_size == file.size
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == file.lfs.sha256


# ------------------------------------------------------------------------- token shards


def push_data(data_dir: Path, repo: str, public: bool = False) -> None:
    """Upload a folder of token shards as a dataset, after every byte is checked.

    Args:
        data_dir: the folder of shards.
        repo: OWNER/NAME; created if it does not exist, private unless --public.
        public: create a public repository, or push to one that is public.
    """
    # Every machine would pull a damaged shard.
    problems = "; ".join(shards.verify(data_dir))
    require(not problems, f"{data_dir} was not pushed: {problems}")

    # The shards of other programs have no manifest.
    names = [path.name for path in shards.shard_files(data_dir)] + [shards.MANIFEST]
    names = [glob.escape(name) for name in names]
    with open_hub() as api:
        repo = open_to_write(api, repo, "dataset", public)
        api.upload_folder(folder_path=data_dir, allow_patterns=names, repo_id=repo, repo_type="dataset")
    print0(f"{repo} is complete; to pull: python hub.py pull-data {repo} DIR")


def pull_data(repo: str, data_dir: Path, limit_shards: int | None = None) -> None:
    """Download token shards into a folder, and check the sha256 of each.

    Args:
        repo: OWNER/NAME; without a manifest, every file there that is named like a shard.
        data_dir: a new folder, or the one of an earlier pull.
        limit_shards: only the first so many shards for training, and those for validation.
    """
    require(limit_shards is None or limit_shards > 0, f"--limit-shards {limit_shards} must be at least 1")
    with open_hub() as api:
        commit, files = list_files(api, repo, "dataset")
        sha256 = {name: file.lfs and file.lfs.sha256 for name, file in files.items()}

        # The shards there must be those of both manifests, there and here.
        manifest = read_remote_manifest(api, repo, commit) if shards.MANIFEST in files else None
        listed = [shard for found in (manifest, shards.read_manifest(data_dir)) if found for shard in found.shards]
        is_same_set = all(sha256.get(shard.file) == shard.sha256 for shard in listed)
        fix = "push it again, or pull into an empty folder"
        require(is_same_set, f"{repo} has other shards than its {shards.MANIFEST} or that of {data_dir}; {fix}")

        # With a limit, leave out the later shards for training, unless they are here already.
        names = [name for name in files if shards.SHARD_NAME.fullmatch(name)]
        if manifest:
            names = [shard.file for shard in manifest.shards]
        train = sorted(name for name in names if shards.SHARD_NAME.fullmatch(name)["split"] == "train")
        require(train, f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")
        if limit_shards:
            names = [name for name in names if name not in train[limit_shards:] or (data_dir / name).exists()]

        # The manifest comes last, with the shards that are here: it says that the folder is complete.
        fetch(api, repo, "dataset", commit, {name: files[name] for name in names}, data_dir)
        if manifest:
            pulled = [shard for shard in manifest.shards if shard.file in names]
            shards.write_manifest(data_dir, replace(manifest, shards=pulled))
    print0(f"{len(names)} shards in {data_dir}, all hashes verified")


def read_remote_manifest(api: HfApi, repo: str, commit: str) -> shards.Manifest | None:
    """The manifest of a repository. It is read from a folder of its own: among the shards it would say that they are
    complete."""
    with tempfile.TemporaryDirectory() as folder:
        api.hf_hub_download(repo, shards.MANIFEST, repo_type="dataset", revision=commit, local_dir=folder)
        return shards.read_manifest(folder)


# ------------------------------------------------------------------------- models


def push_model(
    path: Path,
    repo: str,
    public: bool = False,
    with_optimizer: bool = False,
    steps: Literal["newest", "best", "all"] = "newest",
    temporary: bool = False,
) -> None:
    """Upload checkpoints of a run, or one .pt file, with an export that from_pretrained("OWNER/NAME") loads.

    Args:
        path: a run folder or a .pt file.
        repo: OWNER/NAME; created if it does not exist, private unless --public.
        public: create a public repository, or push to one that is public.
        with_optimizer: also push the newest step with its optimizer state, which --resume needs.
        steps: which checkpoints of the run: the newest, the one with the lowest val loss, or all.
        temporary: to the branch `unfinished` of the repository, which the run's next push replaces; without export.
    """
    # Loading a model also checks it: a damaged one is not pushed.
    models = choose_models(path, steps)
    model, facts = checkpoint.load(models[-1])
    run_dir = models[-1].parent

    # Resuming needs the newest step with its optimizer state, whichever models are pushed.
    files = set(models)
    if with_optimizer:
        newest = choose_models(path, "newest")[0]
        optimizer = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optimizer.is_file(), f"--with-optimizer: {newest} has no {optimizer.name} next to it; leave that out")
        files |= {newest, optimizer}

    with open_hub() as api, lock_folder(run_dir / ".push"):
        repo = open_to_write(api, repo, "model", public)

        # A folder of fixed name: the next push removes what a killed one has left.
        held = run_dir / ".push" / "files"
        shutil.rmtree(held, ignore_errors=True)
        try:
            if temporary:
                held.mkdir()
            else:
                write_export(model, facts, run_dir, held, repo)
            hold_files(run_dir, files, held)
            if temporary:
                # Squashing the branch's history frees the storage of the pushes before this one (within 36 hours, says
                # huggingface.co/docs/hub/storage-limits): all of a long run's would fill the account's quota.
                api.create_branch(repo, branch=UNFINISHED, exist_ok=True)
                api.upload_folder(folder_path=held, repo_id=repo, revision=UNFINISHED, delete_patterns="*")
                api.super_squash_history(repo, branch=UNFINISHED)
            else:
                api.upload_folder(folder_path=held, repo_id=repo)
                if path.is_dir() and api.revision_exists(repo, UNFINISHED):
                    api.delete_branch(repo, branch=UNFINISHED)
        finally:
            shutil.rmtree(held, ignore_errors=True)
    print0(f"{repo} is complete; to pull: python hub.py pull-model {repo} DIR")
    if not with_optimizer:
        print0("note: without --with-optimizer, the run cannot be resumed from there")


def choose_models(path: Path, steps: str) -> list[Path]:
    """The model files of a push of a .pt file or a run folder; the last one is what the card describes."""
    if path.is_file():
        require(checkpoint.FILE_NAME.fullmatch(path.name), f"{path} must be named like model_00010.pt, by its step")
        return [path]
    newest = checkpoint.newest_model(path)
    saved = checkpoint.complete_steps(path, ["model"])
    if steps == "all":
        return [checkpoint.model_path(path, step) for step in saved]
    if steps == "best":
        best = metrics.best_step(path, saved)
        return [newest if best is None else checkpoint.model_path(path, best)]
    return [newest]


def hold_files(run_dir: Path, checkpoints: set[Path], folder: Path) -> None:
    """Keep files as they are now. A run that is training appends to its metrics, and may delete a checkpoint during
    the upload; a hard link keeps its content."""
    for path in checkpoints:
        try:
            os.link(path, folder / path.name)
        except OSError:  # a mounted drive without hard links
            shutil.copy(path, folder)
    for name, pushed_name in RUN_FILES.items():
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, folder / pushed_name)


def pull_model(repo: str, out_dir: Path, every_step: bool = False) -> None:
    """Download a pushed model for infer.py and, if its optimizer state was pushed too, for `train_gpt2.py --resume`.

    Args:
        repo: OWNER/NAME.
        out_dir: a new folder, or the one of a pull that was interrupted.
        every_step: all checkpoints instead of the newest, but none of a run that is still training.
    """
    with open_hub() as api:
        is_unfinished = not every_step and api.revision_exists(repo, UNFINISHED)
        commit, files = list_files(api, repo, "model", UNFINISHED if is_unfinished else "main")

        # The newest step, and what describes its run. The export has the same weights as the checkpoint.
        matches = [checkpoint.FILE_NAME.fullmatch(name) for name in files]
        steps = {match[0]: int(match["step"]) for match in matches if match}
        require(steps, f"{repo} has no checkpoint (model_00000.pt); is the name right?")
        newest = max(steps.values())
        names = [name for name, step in steps.items() if every_step or step == newest]
        names += [name for name in RUN_FILES.values() if name in files]
        fetch(api, repo, "model", commit, {name: files[name] for name in names}, out_dir)

    # The run in `out_dir` may have been continued with other settings.
    config, pulled_config = out_dir / "config.json", out_dir / RUN_FILES["config.json"]
    if pulled_config.exists() and not config.exists():
        shutil.copy(pulled_config, config)
    print0(f"{repo} is in {out_dir}; try: python infer.py {shlex.quote(str(out_dir))} Hello,")


def export(path: Path, out_dir: Path) -> None:
    """Write a model as a folder that transformers' AutoModelForCausalLM and AutoTokenizer load, with a model card.

    Args:
        path: a run folder, whose newest checkpoint is taken, or a .pt file.
        out_dir: a new folder. Its README.md shows how to load the model.
    """
    model, facts = checkpoint.load(path)
    run_dir = path if path.is_dir() else path.parent
    write_export(model, facts, run_dir, out_dir, str(out_dir))
    print0(f"{out_dir} is ready; try: python infer.py {shlex.quote(str(out_dir))} Hello,")


def write_export(model: GPT, facts: dict[str, Any], run_dir: Path, out_dir: Path, name: str) -> None:
    """Write an export with a card. facts: what the checkpoint has beside the weights. run_dir: where its metrics are.
    name: what a user types to load the model, a folder or OWNER/NAME."""
    needs_code = convert.save_hf(model, out_dir)
    # A checkpoint is written before its step is evaluated.
    val_loss = metrics.read_val_losses(run_dir).get(facts["step"])
    card = CARD.format(
        name=name,
        config=model.config,
        parameters=model.num_params(),
        preset=facts.get("preset", "-"),
        step=facts["step"],
        val_loss=f"{val_loss:.4f}" if val_loss is not None else "-",
        trust=", trust_remote_code=True" if needs_code else "",
    )
    (out_dir / "README.md").write_text(card)


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a checkpoint of build-nanogpt or nanoGPT to OUT-DIR/model_STEP.pt. Pickled code in it is never run.

    Args:
        old: the .pt file.
        out_dir: a folder without a model.
    """
    # Among the models of another run, the imported one could be taken for that run's newest step.
    is_new = not any(out_dir.glob("model_*.pt"))
    require(is_new, f"{out_dir} already has a model, and an import never joins another run; choose another folder")

    # Read the old file before the folder is made: a bad file leaves no empty folder.
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(checkpoint.model_path(out_dir, step), checkpoint.model_file(model, step))
    print0(f"the model is in {out_dir}; try: python infer.py {shlex.quote(str(out_dir))} Hello,")


def main() -> None:
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
