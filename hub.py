"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # may this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

After an interrupted transfer, run the same command again: complete files are not transferred twice. Public repositories
are pulled without a token. The client and its errors are in system/huggingface.py, the layouts in weights/.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lifecycle import metrics
from model import GPT
from system.cli import ArgumentParser, UserError, print0, print_next, require, run_cli
from system.files import lock_folder
from system.huggingface import open_hub
from tokens import shards
from weights import checkpoint, convert
from weights.names import CHECKPOINT_FILE, complete_steps, model_path, newest_model

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

# ------------------------------------------------------------------------- repositories


def check(repo: str, public: bool) -> None:
    """Check that this token may push a model to `repo`. train.sh calls this before a run."""
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
    if not public:
        is_private = api.repo_info(repo, repo_type=repo_type).private
        require(is_private, f"{repo} exists and is public; to push there add --public, or choose another name")
    return repo


def list_files(api: HfApi, repo: str, repo_type: str, branch: str = "main") -> tuple[str, dict[str, RepoSibling]]:
    """The newest commit of a branch, and its files by name."""
    info: Any = api.repo_info(repo, repo_type=repo_type, revision=branch, files_metadata=True)
    return info.sha, {file.rfilename: file for file in info.siblings}


def download(api: HfApi, repo: str, repo_type: str, commit: str, files: dict[str, RepoSibling], folder: Path) -> None:
    """Download `files` of one commit into `folder`, and check them. A file that is already there is never replaced:
    it must have the same content."""
    missing = [name for name in files if not (folder / name).exists()]
    for name in files.keys() - set(missing):
        fix = "pull into an empty folder, or move the file away"
        require(has_content_of(files[name], folder / name), f"{folder} has a different {name} than {repo}; {fix}")

    patterns = [glob.escape(name) for name in missing]
    api.snapshot_download(repo, repo_type=repo_type, revision=commit, local_dir=folder, allow_patterns=patterns)
    for name in missing:
        if not has_content_of(files[name], folder / name):
            (folder / name).unlink()
            raise UserError(f"{name} of {repo} arrived damaged; pull again")


def has_content_of(file: RepoSibling, path: Path) -> bool:
    """Whether the local file `path` has the content of a file of the Hub, which knows the sha256 of a large file, and
    git's hash of a small one."""
    if not file.lfs:
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() == file.blob_id
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == file.lfs.sha256


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
    names = [file.path.name for file in files] + [shards.MANIFEST]
    patterns = [glob.escape(name) for name in names]
    with open_hub() as api:
        repo = open_for_push(api, repo, "dataset", public)
        api.upload_folder(folder_path=data_dir, allow_patterns=patterns, repo_id=repo, repo_type="dataset")
    print0(f"{repo} is complete; to pull: python hub.py pull-data {repo} DIR")


def pull_data(repo: str, data_dir: Path, limit_shards: int | None) -> None:
    """Download token shards into a folder, and check the sha256 of each. Without a manifest: every file of the
    repository that is named like a shard."""
    with open_hub() as api:
        commit, files = list_files(api, repo, "dataset")
        # The manifest is read from a folder of its own: among the shards it would say that they are complete.
        manifest = None
        if shards.MANIFEST in files:
            with tempfile.TemporaryDirectory() as folder:
                api.hf_hub_download(repo, shards.MANIFEST, repo_type="dataset", revision=commit, local_dir=folder)
                manifest = shards.read_manifest(folder)

        # Two sets of shards are never mixed: the repository must have every shard that its own manifest lists, and
        # every one that an earlier pull has left in the folder's.
        for listing in (manifest, shards.read_manifest(data_dir)):
            for shard in listing.shards if listing else []:
                file = files.get(shard.file)
                is_listed = file is not None and file.lfs is not None and file.lfs.sha256 == shard.sha256
                problem = f"{repo} has other shards than its {shards.MANIFEST} or that of {data_dir}"
                require(is_listed, f"{problem} ({shard.file}); push it again, or pull into an empty folder")

        names = [name for name in files if shards.SHARD_NAME.fullmatch(name)]
        if manifest:
            names = [shard.file for shard in manifest.shards]
        matches = [shards.SHARD_NAME.fullmatch(name) for name in names]
        train_names = sorted(match[0] for match in matches if match and match["split"] == "train")
        require(train_names, f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")

        # A limit leaves out the later shards for training, but none that is here already.
        if limit_shards is not None:
            too_late = {name for name in train_names[limit_shards:] if not (data_dir / name).exists()}
            names = [name for name in names if name not in too_late]
        download(api, repo, "dataset", commit, {name: files[name] for name in names}, data_dir)

        # The manifest comes last, and lists what was pulled: it says that the folder is complete.
        if manifest:
            pulled = [shard for shard in manifest.shards if shard.file in names]
            shards.write_manifest(data_dir, replace(manifest, shards=pulled))
    print0(f"{len(names)} shards in {data_dir}, all hashes verified")


# ------------------------------------------------------------------------- models

# Files of a run folder that are pushed beside the checkpoints, and their names in the repository, where an export has
# a config.json of its own.
RUN_FILES = {"metrics.jsonl": "metrics.jsonl", "curves.png": "curves.png", "config.json": "train_config.json"}

# The branch of a repository where a run that is still training keeps its newest checkpoint.
UNFINISHED = "unfinished"


def push_model(path: Path, repo: str, public: bool, with_optimizer: bool, steps: str, temporary: bool) -> None:
    """Upload checkpoints of a run, or one .pt file, with an export that from_pretrained("OWNER/NAME") loads."""
    # The last model is the one that is exported. Loading also checks it: a damaged one is not pushed.
    models = choose_models(path, steps)
    model, facts = checkpoint.load(models[-1])
    run_dir = models[-1].parent

    # Resuming needs the newest step with its optimizer state, whichever models are pushed.
    checkpoints = set(models)
    if with_optimizer:
        newest = choose_models(path, "newest")[0]
        optimizer = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optimizer.is_file(), f"--with-optimizer: {newest} has no {optimizer.name} next to it; leave that out")
        checkpoints |= {newest, optimizer}

    with open_hub() as api, lock_folder(run_dir / ".push"):
        repo = open_for_push(api, repo, "model", public)

        # What is uploaded stands in a folder of a fixed name: the next push removes what a killed one has left.
        upload_dir = run_dir / ".push" / "files"
        shutil.rmtree(upload_dir, ignore_errors=True)
        try:
            if temporary:
                upload_dir.mkdir()
                add_run_files(upload_dir, run_dir, checkpoints)
                # Squashing the branch's history frees the storage of the pushes before this one (within 36 hours, says
                # huggingface.co/docs/hub/storage-limits): all of a long run's would fill the account's quota.
                api.create_branch(repo, branch=UNFINISHED, exist_ok=True)
                api.upload_folder(folder_path=upload_dir, repo_id=repo, revision=UNFINISHED, delete_patterns="*")
                api.super_squash_history(repo, branch=UNFINISHED)
            else:
                write_export(model, facts, run_dir, upload_dir, repo)
                add_run_files(upload_dir, run_dir, checkpoints)
                api.upload_folder(folder_path=upload_dir, repo_id=repo)
                # The run's last push takes the place of the temporary ones; one file may be pushed while it trains.
                if path.is_dir() and api.revision_exists(repo, UNFINISHED):
                    api.delete_branch(repo, branch=UNFINISHED)
        finally:
            shutil.rmtree(upload_dir, ignore_errors=True)
    print0(f"{repo} is complete; to pull: python hub.py pull-model {repo} DIR")


def choose_models(path: Path, steps: str) -> list[Path]:
    """The model files to push of a run folder, or of a .pt file; the last one is what the card describes."""
    if path.is_file():
        require(CHECKPOINT_FILE.fullmatch(path.name), f"{path} must be named like model_00010.pt, by its step")
        return [path]
    newest = newest_model(path)
    saved_steps = complete_steps(path, ["model"])
    if steps == "all":
        return [model_path(path, step) for step in saved_steps]
    if steps == "best":
        best = metrics.best_step(path, saved_steps)
        return [newest if best is None else model_path(path, best)]
    return [newest]


def add_run_files(upload_dir: Path, run_dir: Path, checkpoints: set[Path]) -> None:
    """Add checkpoints and RUN_FILES to `upload_dir`, as they are now: a run that is training appends to its metrics,
    and may delete a checkpoint during the upload. A hard link keeps the checkpoint's content, and costs nothing."""
    for path in checkpoints:
        try:
            os.link(path, upload_dir / path.name)
        except OSError:  # a mounted drive without hard links
            shutil.copy(path, upload_dir)
    for name, pushed_name in RUN_FILES.items():
        if (run_dir / name).exists():
            shutil.copy(run_dir / name, upload_dir / pushed_name)


def pull_model(repo: str, out_dir: Path) -> None:
    """Download the newest step that was pushed, for infer.py and, if its optimizer state was pushed too, for
    `train_gpt2.py --resume`."""
    with open_hub() as api:
        # The branch with the newest step: `unfinished` may be left behind. At a tie it comes first, because it has the
        # optimizer state.
        branches = [UNFINISHED, "main"] if api.revision_exists(repo, UNFINISHED) else ["main"]
        listings = [list_files(api, repo, "model", branch) for branch in branches]
        commit, files = max(listings, key=lambda listing: max(find_checkpoints(listing[1]).values(), default=-1))

        # The newest step, and what describes the run. The export has the same weights as the checkpoint.
        step_by_name = find_checkpoints(files)
        require(step_by_name, f"{repo} has no checkpoint (model_00000.pt); is the name right?")
        newest_step = max(step_by_name.values())
        names = [name for name, step in step_by_name.items() if step == newest_step]
        names += [name for name in RUN_FILES.values() if name in files]
        download(api, repo, "model", commit, {name: files[name] for name in names}, out_dir)

    # A run in `out_dir` may have been continued with other settings: its config stays.
    config, pulled_config = out_dir / "config.json", out_dir / RUN_FILES["config.json"]
    if pulled_config.exists() and not config.exists():
        shutil.copy(pulled_config, config)
    print_next(f"python infer.py {shlex.quote(str(out_dir))} Hello,")


def find_checkpoints(files: Iterable[str]) -> dict[str, int]:
    """The names of checkpoints among the files of a repository, with their steps."""
    matches = [CHECKPOINT_FILE.fullmatch(name) for name in files]
    return {match[0]: int(match["step"]) for match in matches if match}


# ------------------------------------------------------------------------- other layouts

# The README.md of an export.
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


def export(path: Path, out_dir: Path) -> None:
    """Write a model as a folder that transformers' AutoModelForCausalLM and AutoTokenizer load, with a model card. Its
    README.md shows how to load it."""
    model, facts = checkpoint.load(path)
    run_dir = path if path.is_dir() else path.parent
    write_export(model, facts, run_dir, out_dir, str(out_dir))
    print_next(f"python infer.py {shlex.quote(str(out_dir))} Hello,")


def write_export(model: GPT, facts: dict[str, Any], run_dir: Path, out_dir: Path, name: str) -> None:
    """Write an export with its card. facts: what the checkpoint has beside the weights. run_dir: where its metrics are.
    name: what a user types to load the model, a folder or OWNER/NAME."""
    needs_code = convert.save_hf(model, out_dir)
    # A checkpoint is written before its step is evaluated, so the scores come from the metrics.
    row = metrics.read_step(run_dir, facts["step"])
    scores = {key: row.get(key) for key in ("val_loss", "val_bpb", "hellaswag_acc_norm")}
    card = CARD.format(
        name=name,
        config=model.config,
        parameters=model.num_params(),
        preset=facts.get("preset", "-"),
        step=facts["step"],
        **{key: f"{score:.4f}" if isinstance(score, float) else "-" for key, score in scores.items()},
        trust=", trust_remote_code=True" if needs_code else "",
    )
    (out_dir / "README.md").write_text(card)


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a checkpoint of build-nanogpt or nanoGPT to OUT-DIR/model_STEP.pt. Pickled code in it is never run."""
    # Among the models of another run, the imported one could be taken for that run's newest step.
    has_model = any(out_dir.glob("model_*.pt"))
    require(not has_model, f"{out_dir} already has a model, and an import never joins another run; choose another one")

    # Read the old file before the folder is made: a bad file leaves no empty folder.
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(model_path(out_dir, step), checkpoint.model_file(model, step))
    print_next(f"python infer.py {shlex.quote(str(out_dir))} Hello,")


# ------------------------------------------------------------------------- the command line


def main() -> None:
    """Run one command."""
    parser = ArgumentParser(__doc__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    owner_name = "OWNER/NAME, or NAME of your own; created if it does not exist"
    public = "create a public repository, or push to one that is public"

    def add(name: str, run: Callable[..., None], description: str) -> ArgumentParser:
        command = commands.add_parser(name, help=description, description=description)
        command.set_defaults(run=run)
        return command

    command = add("push-data", push_data, "upload a folder of token shards as a dataset, after every byte is checked")
    command.add_argument("data_dir", type=Path, help="the folder of shards")
    command.add_argument("repo", help=owner_name)
    command.add_argument("--public", action="store_true", help=public)

    command = add("pull-data", pull_data, "download token shards into a folder, and check the sha256 of each")
    command.add_argument("repo", help="OWNER/NAME; without a manifest, all that is named like a shard")
    command.add_argument("data_dir", type=Path, help="a new folder, or the one of an earlier pull")
    command.add_argument("--limit-shards", type=int, metavar="N", help="the first N for training, and those for val")

    command = add("push-model", push_model, "upload checkpoints of a run, with an export that from_pretrained loads")
    command.add_argument("path", type=Path, help="a run folder or a .pt file")
    command.add_argument("repo", help=owner_name)
    command.add_argument("--public", action="store_true", help=public)
    command.add_argument("--steps", choices=("newest", "best", "all"), default="newest", help="best: by val loss")
    command.add_argument("--with-optimizer", action="store_true", help="also what --resume needs of the newest step")
    command.add_argument("--temporary", action="store_true", help="until the run's next push, without an export")

    command = add("pull-model", pull_model, "download the newest step of a pushed model")
    command.add_argument("repo", help="OWNER/NAME")
    command.add_argument("out_dir", type=Path, help="a new folder, or the one of a pull that was interrupted")

    command = add("check", check, "check that this token may push a model to a repository")
    command.add_argument("repo", help=owner_name)
    command.add_argument("--public", action="store_true", help=public)

    command = add("export", export, "write a folder that transformers' AutoModelForCausalLM and AutoTokenizer load")
    command.add_argument("path", type=Path, help="a run folder, whose newest checkpoint is taken, or a .pt file")
    command.add_argument("out_dir", type=Path, help="a new folder")

    command = add("import", import_old, "convert a checkpoint of build-nanogpt or nanoGPT, whose code never runs")
    command.add_argument("old", type=Path, help="the .pt file")
    command.add_argument("out_dir", type=Path, help="a folder without a model")

    arguments = vars(parser.parse_args())
    arguments.pop("run")(**arguments)


if __name__ == "__main__":
    run_cli(main)
