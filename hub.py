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

import glob
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from system.hub import open_hub
from system.script import locked, print0, require, run_cli
from tokens import shards
from training import convert

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

    from model import GPT

MODEL_FILE = re.compile(r"(model|optim)_\d+\.pt|[\w-]+\.(safetensors|json|jsonl|txt|png|md|jinja)")
CARD_FACTS = ("step", "tokens", "train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm")


@contextmanager
def open_to_write(repo: str, kind: str, public: bool) -> Iterator[tuple[HfApi, str]]:
    """As open_hub, for a repository that is there, made if missing, and that the token may write to. Raises UserError,
    also if it is public and that was not asked for."""
    with open_hub(repo, write=True) as (api, repo):
        api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)  # content with a token that only reads
        api.auth_check(repo, repo_type=kind, write=True)
        closed = public or api.repo_info(repo, repo_type=kind).private
        mend = "add --public (with train.sh: PUSH_PUBLIC=1), or choose another name"
        require(closed, f"{repo} exists and is public; to push there {mend}")
        yield api, repo


def check(repo: str, public: bool = False) -> None:
    """Make the model repository REPO (private unless --public) if it is missing, and check that this token may write
    to it: better now than when a run is over."""
    with open_to_write(repo, "model", public) as (_, repo):
        print0(f"{repo} is there, and this token may push to it")


def push(repo: str, kind: str, files: list[Path], card: str, public: bool, last: Path | None = None) -> None:
    """Upload `files` and the text `card`, if any (REPO becomes the name); then, on its own, `last`."""
    with open_to_write(repo, kind, public) as (api, repo), tempfile.TemporaryDirectory() as folder:
        for path in files:
            if path.suffix == ".jsonl":  # a run may still be appending: send a snapshot
                shutil.copy(path, folder)
            else:
                Path(folder, path.name).symlink_to(path.resolve())
        if card:
            Path(folder, "README.md").write_text(card.replace("REPO", repo))
        api.upload_folder(folder_path=folder, repo_id=repo, repo_type=kind, commit_message="Add files")
        if last:
            api.upload_file(path_or_fileobj=last, path_in_repo=last.name, repo_id=repo, repo_type=kind)
    print0(f"{repo} is complete; to pull: python hub.py pull-{kind.removesuffix('set')} {repo} DIR")


def is_same(path: Path, remote: RepoFile, sha256: str | None) -> bool:
    """Whether a file has the size listed by the Hub and the given sha256 or, if none is given, the Hub's hash."""
    if not path.is_file() or path.stat().st_size != remote.size:
        return False
    if sha256 is None and remote.lfs is None:  # small text files are listed with their git hash
        return hashlib.sha1(b"blob %d\0" % remote.size + path.read_bytes()).hexdigest() == remote.blob_id
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == (sha256 or remote.lfs.sha256)


@contextmanager
def pull(repo: str, kind: str, out: Path, revision: str | None) -> Iterator[tuple[dict[str, RepoFile], Callable]]:
    """Yield the files that a revision of `repo` has, by path, and fetch({path: sha256 or None}), which downloads some.

    A file gets its place only once its hash is verified: the given one or, if that is None, the Hub's. No file there
    is ever overwritten. A wrong file, there or from the Hub, raises UserError. Pulls into one folder take turns."""
    with open_hub(repo) as (api, repo):
        sha = api.repo_info(repo, repo_type=kind, revision=revision, timeout=10).sha
        tree = api.list_repo_tree(repo, repo_type=kind, recursive=True, revision=sha)
        remote = {f.path: f for f in tree if hasattr(f, "blob_id")}

        def fetch(wanted: dict[str, str | None], to: Path = out) -> None:
            stage = to / ".incoming"  # what is already here, an interrupted pull had fetched
            missing = sorted(name for name in wanted if not (to / name).exists())
            for name in wanted.keys() - missing:
                why = f"{to} has a different {name} than {repo}; pull into an empty folder, or move the file away"
                require(is_same(to / name, remote[name], wanted[name]), why)
            if missing:
                some = [glob.escape(name) for name in missing]
                api.snapshot_download(repo, repo_type=kind, revision=sha, local_dir=stage, allow_patterns=some)
            wrong = [name for name in missing if not is_same(stage / name, remote[name], wanted[name])]
            for name in missing:
                if name not in wrong:
                    os.replace(stage / name, to / name)
            shutil.rmtree(stage, ignore_errors=True)
            mend = "run the same command again or, if that does not help, push it again"
            require(not wrong, f"{', '.join(wrong)} came from {repo} with a wrong hash; {mend}")

        with locked(out, wait=True):
            yield remote, fetch


def push_data(data_dir: Path, repo: str, public: bool = False) -> None:
    """Upload a folder of token shards, checked against its manifest, as a dataset (private unless --public)."""
    manifest = shards.read_manifest(data_dir)
    require(manifest, f"{data_dir} has no {shards.MANIFEST}; {shards.adoption(data_dir)}")
    problems = "; ".join(shards.verify(data_dir))
    require(not problems, f"{data_dir} was not pushed: {problems}. See: python fineweb.py --verify {data_dir}")
    text = f"{sum(s.tokens for s in manifest.shards):,} GPT-2 tokens from {manifest.source['name']}, as uint16."
    card = f"# REPO\n\n{text}\n\n    python hub.py pull-data REPO DIR\n"
    files = [data_dir / s.file for s in manifest.shards]
    push(repo, "dataset", files, card, public, last=data_dir / shards.MANIFEST)  # it completes the set


def pull_data(repo: str, data_dir: Path, revision: str | None = None, limit_shards: int | None = None) -> Path:
    """Download token shards, at most `limit_shards` of them for training, and check each one's sha256 (from the
    manifest, or from the Hub if there is none). Returns the folder; raises UserError."""
    out = Path(data_dir)
    with pull(repo, "dataset", out, revision) as (remote, fetch), tempfile.TemporaryDirectory() as temporary:
        manifest, wanted = None, {name: None for name in remote if shards.SHARD_NAME.fullmatch(name)}
        if shards.MANIFEST in remote:
            fetch({shards.MANIFEST: None}, Path(temporary))
            manifest = shards.read_manifest(temporary)
            wanted = {s.file: s.sha256 for s in manifest.shards}
        mine = shards.read_manifest(out)
        here = {s.file: s.sha256 for s in mine.shards} if mine else {}
        odd = [name for name in wanted if name not in remote] + [n for n in here if here[n] != wanted.get(n)]
        why = f"{', '.join(odd[:1])} differs between {repo}, its {shards.MANIFEST} and {out}"
        require(not odd, f"{why}; pull into an empty folder")
        train = sorted(name for name in wanted if shards.SHARD_NAME.fullmatch(name)["split"] == "train")
        require(train, f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")
        skipped = {name for name in train[limit_shards:] if not (out / name).exists()} if limit_shards else set()
        wanted = {name: sha256 for name, sha256 in wanted.items() if name not in skipped}
        fetch(wanted)
        if manifest:  # last: it completes the set
            got = [s for s in manifest.shards if s.file in wanted]
            shards.write_manifest(out, replace(manifest, shards=got))
    print0(f"{len(shards.shard_files(out))} shards in {out}, all hashes verified")
    return out


def load(weights: Path) -> tuple[GPT, str]:
    """The model in a .pt file, and a model card with the run's figures at that step."""
    from training import checkpoint, record

    model, facts = checkpoint.load(weights)
    c, step = model.config, facts["step"]
    for row in record.read_lines(weights.with_name("metrics.jsonl")):
        if row["step"] <= step:
            facts |= row
    facts["step"] = step
    if batch := record.tokens_per_step(weights.parent):
        facts["tokens"] = step * batch
    figures = [f"| {k} | {facts[k]:,} |" for k in CARD_FACTS if isinstance(facts.get(k), int | float)]
    shape = f"{c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, context {c.block_size}."
    card = ["---", "pipeline_tag: text-generation", "tags: [gpt2]", "---", "# GPT-2", ""]
    card += [f"{model.num_params():,} parameters: {shape}", "", "| | |", "|-|-|", *figures, "", ""]
    return model, "\n".join(card)


def best_model(run_dir: Path) -> Path | None:
    """The saved step of a run with the lowest val loss; None if none was both saved and evaluated."""
    from training import checkpoint, record

    saved, losses = checkpoint.complete_steps(run_dir, ["model"]), {}
    for row in record.read_lines(run_dir / "metrics.jsonl"):
        if row["step"] in saved and isinstance(row.get("val_loss"), float):
            losses[row["step"]] = row["val_loss"]
    if losses:
        return checkpoint.model_path(run_dir, min(losses, key=losses.get))
    print0(f"no step saved in {run_dir} has a val loss: its newest is taken for the best")
    return None


def push_model(
    path: Path,
    repo: str,
    public: bool = False,
    with_optimizer: bool = False,
    steps: Literal["newest", "best", "all"] = "newest",
) -> None:
    """Upload a .pt file, checkpoints of a run, or an export.

    Args:
        path: the file, or the folder of the run or the export.
        repo: OWNER/NAME, made if missing; private unless --public.
        public: push where all can read.
        with_optimizer: also what --resume needs: a run's newest step with its optimizer.
        steps: which of a run's: the newest, the one with the lowest val loss, or all.
    """
    from training import checkpoint

    if (path / "model.safetensors").is_file():
        return push(repo, "model", [p for p in path.iterdir() if MODEL_FILE.fullmatch(p.name)], "", public)
    newest = checkpoint.newest_model(path) if path.is_dir() else path
    shown = newest
    if steps == "best" and path.is_dir():
        shown = best_model(path) or newest
    _, card = load(shown)
    files = {shown, *(shown.with_name(n) for n in ("metrics.jsonl", "curves.png", "config.json"))}
    if steps == "all" and path.is_dir():
        files |= {checkpoint.model_path(path, step) for step in checkpoint.complete_steps(path, ["model"])}
    if with_optimizer:
        optim = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optim.is_file(), f"{optim} does not exist; push without --with-optimizer")
        files |= {newest, optim}
    card += "    python hub.py pull-model REPO DIR\n    python infer.py DIR 'Hello,'\n"
    push(repo, "model", sorted(p for p in files if p.is_file()), card, public)


def pull_model(repo: str, out_dir: Path, revision: str | None = None, every_step: bool = False) -> None:
    """Download a pushed model, its newest step or all of them, for infer.py and, if its optimizer was pushed too, for
    `train_gpt2.py --resume`."""
    with pull(repo, "model", out_dir, revision) as (remote, fetch):
        names = [name for name in remote if MODEL_FILE.fullmatch(name)]
        steps = {name: int(name[6:-3]) for name in names if name.endswith(".pt")}
        newest = max((step for name, step in steps.items() if name.startswith("model")), default=-1)
        if not every_step:
            names = [name for name in names if steps.get(name, newest) == newest]
        found = any(name.endswith((".pt", ".safetensors")) for name in names)
        require(found, f"{repo} has no model (model_00000.pt or model.safetensors); is the name right?")
        fetch(dict.fromkeys(names))
    print0(f"{repo} is in {out_dir}; try: python infer.py {out_dir} 'Hello,'")


def export(path: Path, out_dir: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer can load, with a model card."""
    from training import checkpoint

    model, card = load(checkpoint.newest_model(path) if path.is_dir() else path)
    convert.save_hf(model, out_dir)
    (out_dir / "README.md").write_text(f'{card}    AutoModelForCausalLM.from_pretrained("{out_dir.name}")\n')
    print0(f"{out_dir} is ready; try: python infer.py {out_dir} 'Hello,'")


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a build-nanogpt or nanoGPT checkpoint to OUT_DIR/model_STEP.pt. No pickled code in it is run."""
    from training import checkpoint

    there = sorted(out_dir.glob("model_*.pt"))
    require(not there, f"{out_dir} already has a model, and an import never joins another run; choose another folder")
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(target := checkpoint.model_path(out_dir, step), checkpoint.model_file(model, step))
    print0(f"{model.num_params():,} parameters are in {target}; try: python infer.py {out_dir} 'Hello,'")


def main() -> None:
    import tyro

    commands = {f.__name__.replace("_", "-"): f for f in (push_data, pull_data, push_model, pull_model, check, export)}
    commands["import"] = import_old
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, config=(tyro.conf.PositionalRequiredArgs,))


if __name__ == "__main__":
    run_cli(main)
