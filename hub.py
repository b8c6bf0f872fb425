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
import re
import shlex
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from system.cli import UserError, print0, require, run_cli
from system.hub_client import open_hub
from tokens import shards
from training import convert, metrics
from training.model_card import make_card

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

    from model import GPT

CHECKPOINT_FILE = re.compile(r"(model|optim)_(?P<step>[0-9]{5,18})\.pt")
# In a repository, the run's config.json has another name: an export has a config.json, too.
RUN_CONFIG = "train_config.json"
# The folder of a repository where a run that is still training keeps its newest checkpoint.
UNFINISHED = "unfinished/"


def check(repo: str, public: bool = False) -> None:
    """Check that your token may push a model to REPO, which is created if it does not exist. train.sh calls this before
    a run.

    Args:
        repo: OWNER/NAME; private unless --public.
        public: create a public repository, or allow one that is public.
    """
    with open_hub() as api:
        repo = open_to_write(api, repo, "model", public)
    print0(f"{repo} exists, and this token may push to it")


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


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit, so that a push during a pull mixes no versions."""

    api: HfApi
    repo: str
    kind: str  # model or dataset
    commit: str
    files: dict[str, RepoFile]  # by path


def find_snapshot(api: HfApi, repo: str, kind: str) -> Snapshot:
    """A repository as it is now."""
    commit = api.repo_info(repo, repo_type=kind).sha
    tree = api.list_repo_tree(repo, repo_type=kind, revision=commit, recursive=True)
    files = {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}  # folders have no blob
    return Snapshot(api, repo, kind, commit, files)


def fetch(source: Snapshot, wanted: dict[str, RepoFile], out: Path, sha256: dict[str, str | None]) -> None:
    """Download files, by the names that they get in the folder `out`. A file gets its name once its hash is right: that
    in `sha256`, else the Hub's. A file that is there already is never replaced: it must be the same."""
    missing = [name for name in wanted if not (out / name).exists()]
    for name in wanted.keys() - missing:
        is_same = has_hash(out / name, wanted[name], sha256.get(name))
        fix = "pull into an empty folder, or move the file away"
        require(is_same, f"{out} has a different {name} than {source.repo}; {fix}")

    # Inside the folder, as renaming works within one file system. What a killed pull completed is not fetched again.
    staging = out / ".incoming"
    if missing:
        paths = [glob.escape(wanted[name].path) for name in missing]
        where = {"repo_type": source.kind, "revision": source.commit, "local_dir": staging}
        source.api.snapshot_download(source.repo, allow_patterns=paths, **where)
    for name in missing:
        path = staging / wanted[name].path
        if not has_hash(path, wanted[name], sha256.get(name)):
            path.unlink()
            raise UserError(f"{name} came from {source.repo} with a wrong hash; pull again, or push it again")
        os.replace(path, out / name)
    shutil.rmtree(staging, ignore_errors=True)


def has_hash(path: Path, file: RepoFile, sha256: str | None) -> bool:
    """Whether a file has this sha256 or, if that is None, the one that the Hub lists. The Hub lists none of small text
    files: then compare the sizes."""
    if file.lfs:
        sha256 = sha256 or file.lfs.sha256
    if sha256 is None:
        return path.stat().st_size == file.size
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == sha256


# ------------------------------------------------------------------------- token shards


def push_data(data_dir: Path, repo: str, public: bool = False) -> None:
    """Upload a folder of token shards as a dataset, after every byte is checked against its manifest.

    Args:
        data_dir: the folder of shards.
        repo: OWNER/NAME; created if it does not exist, private unless --public.
        public: create a public repository, or push to one that is public.
    """
    # Every machine would pull a damaged shard. The shards of other programs have no manifest.
    names = [path.name for path in shards.shard_files(data_dir)]
    manifest = shards.read_manifest(data_dir)
    if manifest:
        problems = "; ".join(shards.verify(data_dir))
        require(not problems, f"{data_dir} was not pushed: {problems}")
        names = [shard.file for shard in manifest.shards]
    require(names, f"{data_dir} has no shard (NAME_train_000001.npy or .bin)")

    with open_hub() as api:
        repo = open_to_write(api, repo, "dataset", public)
        api.upload_folder(folder_path=data_dir, allow_patterns=names, repo_id=repo, repo_type="dataset")
        # The manifest last: where there is one, the set is complete.
        if manifest:
            path = data_dir / shards.MANIFEST
            api.upload_file(path_or_fileobj=path, path_in_repo=path.name, repo_id=repo, repo_type="dataset")
    print0(f"{repo} is complete; to pull: python hub.py pull-data {repo} DIR")


def pull_data(repo: str, data_dir: Path, limit_shards: int | None = None) -> None:
    """Download token shards into a folder, and check the sha256 of each.

    Args:
        repo: OWNER/NAME; without a manifest, every file there that is named like a shard.
        data_dir: a new folder, or the one of an earlier pull.
        limit_shards: only the first so many shards for training, and those for validation.
    """
    with open_hub() as api:
        source = find_snapshot(api, repo, "dataset")
        manifest = read_remote_manifest(source)
        sha256 = {name: None for name in source.files if shards.SHARD_NAME.fullmatch(name)}
        if manifest:
            sha256 = {shard.file: shard.sha256 for shard in manifest.shards}

        # What is here must be of the same set.
        local = shards.read_manifest(data_dir)
        is_same = local is None or all(sha256.get(shard.file) == shard.sha256 for shard in local.shards)
        require(is_same, f"{data_dir} has other shards than {repo}; pull into an empty folder")

        # With a limit, leave out the later shards for training, unless they are here already.
        train = sorted(name for name in sha256 if shards.SHARD_NAME.fullmatch(name)["split"] == "train")
        require(train, f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")
        names = sha256.keys()
        if limit_shards:
            names = names - {name for name in train[limit_shards:] if not (data_dir / name).exists()}
        require(names <= source.files.keys(), f"{repo} lacks shards that its {shards.MANIFEST} lists; push it again")

        # The manifest comes last, with the shards that are here: it says that the folder is complete.
        fetch(source, {name: source.files[name] for name in sorted(names)}, data_dir, sha256)
        if manifest:
            pulled = [shard for shard in manifest.shards if shard.file in names]
            shards.write_manifest(data_dir, replace(manifest, shards=pulled))
    print0(f"{len(names)} shards in {data_dir}, all hashes verified")


def read_remote_manifest(source: Snapshot) -> shards.Manifest | None:
    """The manifest of a repository, if it has one. It is read from a folder of its own: among the shards it would say
    that they are complete."""
    if shards.MANIFEST not in source.files:
        return None
    with tempfile.TemporaryDirectory() as folder:
        fetch(source, {shards.MANIFEST: source.files[shards.MANIFEST]}, Path(folder), {})
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
        temporary: into the folder `unfinished` of the repository, which the run's next push replaces; without export.
    """
    from training import checkpoint

    # Loading a model also checks it: a damaged one is not pushed.
    described, files = choose_files(path, steps, with_optimizer)
    model, facts = checkpoint.load(described)
    with open_hub() as api:
        repo = open_to_write(api, repo, "model", public)

        # A folder of fixed name: the next push removes what a killed one has left.
        held = described.with_name(".push")
        shutil.rmtree(held, ignore_errors=True)
        held.mkdir()
        try:
            hold_files(files, held)
            if not temporary:
                needs_code = add_export(model, held)
                (held / "README.md").write_text(make_card(model, facts, repo, needs_code))

            # What the run's last temporary push has left is removed in the commit that brings newer checkpoints.
            where = {}
            if temporary:
                where = {"path_in_repo": UNFINISHED, "delete_patterns": "*"}
            elif path.is_dir():
                where = {"delete_patterns": f"{UNFINISHED}*"}
            api.upload_folder(folder_path=held, repo_id=repo, **where)
        finally:
            shutil.rmtree(held)
        if temporary:
            free_storage(api, repo)
    print0(f"{repo} is complete; to pull: python hub.py pull-model {repo} DIR")
    if not with_optimizer:
        print0("note: without --with-optimizer, the run cannot be resumed from there")


def step_of(name: str) -> int:
    """The step of a checkpoint by its file's name; -1 for any other file."""
    match = CHECKPOINT_FILE.fullmatch(name)
    return int(match["step"]) if match else -1


def choose_files(path: Path, steps: str, with_optimizer: bool) -> tuple[Path, list[Path]]:
    """What a push of a .pt file or a run folder consists of: the model that the card describes, and all files."""
    from training import checkpoint

    newest = checkpoint.newest_model(path) if path.is_dir() else path
    run_dir = newest.parent
    described = newest
    if path.is_dir() and steps == "best":
        described = best_model(run_dir) or newest
    files = {described}
    if path.is_dir() and steps == "all":
        files |= {checkpoint.model_path(run_dir, step) for step in checkpoint.complete_steps(run_dir, ["model"])}

    # Resuming needs the newest step with its optimizer state, whichever models are pushed.
    if with_optimizer:
        files |= {newest, newest.with_name(newest.name.replace("model_", "optim_"))}
    others = [run_dir / name for name in ("metrics.jsonl", "curves.png", "config.json")]
    return described, [*files, *filter(Path.is_file, others)]


def best_model(run_dir: Path) -> Path | None:
    """The model file of a run with the lowest validation loss; None if no step was both saved and evaluated."""
    from training import checkpoint

    saved = checkpoint.complete_steps(run_dir, ["model"])
    rows = metrics.read_metrics(run_dir / "metrics.jsonl")
    evaluated = [row for row in rows if row["step"] in saved and isinstance(row.get("val_loss"), float)]
    best = min(evaluated, key=lambda row: row["val_loss"], default=None)
    return best and checkpoint.model_path(run_dir, best["step"])


def hold_files(files: list[Path], folder: Path) -> None:
    """Keep files as they are now. A run that is training appends to its metrics, and may delete a checkpoint during
    the upload; a hard link keeps its content."""
    for path in files:
        source = path.resolve(strict=True)
        if path.suffix != ".pt":
            shutil.copy(source, folder / (RUN_CONFIG if path.name == "config.json" else path.name))
            continue
        try:
            os.link(source, folder / path.name)
        except OSError:  # a mounted drive without hard links
            (folder / path.name).symlink_to(source)


def add_export(model: GPT, folder: Path) -> bool | None:
    """Put an export into the folder of a push. Returns whether it needs its code to be run; None: there is no room."""
    exported = folder / "export"
    try:
        needs_code = convert.save_hf(model, exported)
    except OSError as error:
        # A rented machine may be waiting for this push.
        print0(f"warning: the checkpoint is pushed without its export, which could not be written ({error})")
        return None
    for path in exported.iterdir():
        path.rename(folder / path.name)
    exported.rmdir()
    return needs_code


def free_storage(api: HfApi, repo: str) -> None:
    """Delete what temporary pushes before this one have stored: it counts in the account's quota for as long as the
    history refers to it, and an hourly push would fill that in a day."""
    in_use = {file.lfs.sha256 for file in find_snapshot(api, repo, "model").files.values() if file.lfs}
    stored = [file for file in api.list_lfs_files(repo) if file.filename.startswith(UNFINISHED)]
    api.permanently_delete_lfs_files(repo, [file for file in stored if file.file_oid not in in_use])


def pull_model(repo: str, out_dir: Path, every_step: bool = False) -> None:
    """Download a pushed model for infer.py and, if its optimizer state was pushed too, for `train_gpt2.py --resume`.

    Args:
        repo: OWNER/NAME.
        out_dir: a new folder, or the one of an earlier pull.
        every_step: all checkpoints instead of the newest.
    """
    with open_hub() as api:
        source = find_snapshot(api, repo, "model")
        prefix = UNFINISHED
        unfinished = {path.removeprefix(prefix): file for path, file in source.files.items() if path.startswith(prefix)}

        # The newest step, and what describes its run. The export has the same weights as the checkpoint.
        latest = unfinished or source.files
        steps = {max(map(step_of, latest))}
        if every_step:
            steps = set(map(step_of, source.files | latest))
        wanted = {name: file for name, file in (source.files | latest).items() if step_of(name) in steps - {-1}}
        require(wanted, f"{repo} has no checkpoint (model_00000.pt); is the name right?")
        wanted |= {name: latest[name] for name in ("metrics.jsonl", "curves.png") if name in latest}
        # The run in `out_dir` may have been continued with other settings.
        if RUN_CONFIG in latest and not (out_dir / "config.json").exists():
            wanted["config.json"] = latest[RUN_CONFIG]
        fetch(source, wanted, out_dir, {})
    print0(f"{repo} is in {out_dir}; try: python infer.py {shlex.quote(str(out_dir))} Hello,")


def export(path: Path, out_dir: Path) -> None:
    """Write a model as a folder that transformers' AutoModelForCausalLM and AutoTokenizer load, with a model card.

    Args:
        path: a run folder, whose newest checkpoint is taken, or a .pt file.
        out_dir: a new or empty folder. Its README.md shows how to load the model.
    """
    from training import checkpoint

    model, facts = checkpoint.load(path)
    needs_code = convert.save_hf(model, out_dir)
    (out_dir / "README.md").write_text(make_card(model, facts, str(out_dir), needs_code))
    print0(f"{out_dir} is ready; try: python infer.py {shlex.quote(str(out_dir))} Hello,")
    if needs_code:
        print0("transformers has no class for this network: load it with trust_remote_code=True")


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a checkpoint of build-nanogpt or nanoGPT to OUT-DIR/model_STEP.pt. Pickled code in it is never run.

    Args:
        old: the .pt file.
        out_dir: a folder without a model.
    """
    from training import checkpoint

    # Among the models of another run, the imported one could be taken for that run's newest step.
    existing = any(out_dir.glob("model_*.pt"))
    require(
        not existing, f"{out_dir} already has a model, and an import never joins another run; choose another folder"
    )

    # Read the old file before the folder is made: a bad file leaves no empty folder.
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(checkpoint.model_path(out_dir, step), checkpoint.model_file(model, step))
    print0(
        f"{model.num_params():,} parameters are in {out_dir}; try: python infer.py {shlex.quote(str(out_dir))} Hello,"
    )


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
