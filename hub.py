"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere (also: --data-dir hf://OWNER/NAME)
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
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
import time
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import convert
import shards
from cli import UserError, print0, run_cli
from files import locked
from hf import open_hub

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

STAGE = ".incoming"  # in the target folder: holds downloads until their hashes are verified
COMMIT_FILES = 10  # files per commit: the most that an interrupted upload has to process again
MODEL_FILE = re.compile(r"(model|optim)_\d+\.pt|[\w-]+\.(safetensors|json|jsonl|txt|png|md|jinja)")
CARD_FACTS = ("step", "tokens", "train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm")


def listing(api: HfApi, repo: str, kind: str, revision: str | None = None) -> dict[str, RepoFile]:
    tree = api.list_repo_tree(repo, repo_type=kind, recursive=True, revision=revision)
    return {f.path: f for f in tree if hasattr(f, "blob_id")}


def is_same(path: Path, remote: RepoFile | None, sha256: str | None = None) -> bool:
    """Whether a file has the size listed by the Hub and the given sha256 or, if none is given, the Hub's hash."""
    if remote is None or not path.is_file() or path.stat().st_size != remote.size:
        return False
    if sha256 is None and remote.lfs is None:  # small text files are listed with their git hash
        return hashlib.sha1(b"blob %d\0" % remote.size + path.read_bytes()).hexdigest() == remote.blob_id
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == (sha256 or remote.lfs.sha256)


def push(repo: str, kind: str, files: list[Path], card: str, public: bool) -> None:
    """Upload `files` in order, then `card`, if any (REPO becomes the name); return once the Hub lists all as sent."""
    with open_hub(repo, write=True) as (api, repo), tempfile.TemporaryDirectory() as temporary:
        from huggingface_hub import CommitOperationAdd

        api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        if not public and not api.repo_info(repo, repo_type=kind).private:
            raise UserError(f"{repo} exists and is public; add --public to push there, or choose another name")
        (readme := Path(temporary, "README.md")).write_text(card.replace("REPO", repo))
        files = files + [readme] * bool(card)
        # a run may still be appending to these: send a snapshot
        files = [Path(shutil.copy2(p, temporary)) if p.suffix == ".jsonl" else p for p in files]
        there = listing(api, repo, kind)
        todo = [p for p in files if not is_same(p, there.get(p.name))]
        for i in range(0, len(todo), COMMIT_FILES):
            parts = [CommitOperationAdd(p.name, str(p)) for p in todo[i : i + COMMIT_FILES]]
            api.create_commit(repo, parts, repo_type=kind, commit_message=f"Add {parts[0].path_in_repo} and others")
        for seconds in (0, 1, 2, 4, 8, 16, 32, 64):  # a listing may lag behind
            time.sleep(seconds)
            there = listing(api, repo, kind)
            if not (todo := [p for p in todo if not is_same(p, there.get(p.name))]):
                break
        else:
            raise UserError(f"{repo} does not list {todo[0].name} as sent; run the same command again")
    print0(f"{len(files)} files are on the Hub; to pull:\npython hub.py pull-{kind.removesuffix('set')} {repo} DIR")


@contextmanager
def pull(repo: str, kind: str, out: Path, revision: str | None) -> Iterator[tuple[dict[str, RepoFile], Callable]]:
    """Yield the listing of one revision of `repo`, and fetch({name: sha256 or None}, mine), which downloads to `out`.

    A file gets its final name only once its hash is verified; on a mismatch it is fetched once more, then reported in
    a UserError. Existing files with other contents are replaced only if they are in `mine`."""
    stage = out / STAGE
    with open_hub(repo) as (api, repo), ExitStack() as stack:
        sha = api.repo_info(repo, repo_type=kind, revision=revision, timeout=10).sha
        remote = listing(api, repo, kind, sha)
        stack.enter_context(locked(stage, wait=True))  # machines that share a folder take turns
        stage.mkdir(exist_ok=True)  # the previous one removed it

        def fetch(wanted: dict[str, str | None], mine: Container[str] = (), to: Path = out) -> None:
            wrong = [n for n, sha256 in wanted.items() if not is_same(to / n, remote[n], sha256)]
            if taken := [n for n in wrong if n not in mine and (out / n).exists() and to == out]:
                raise UserError(f"{out} has a different {taken[0]} than {repo}; pull into an empty folder")
            options = {"repo_type": kind, "revision": sha, "local_dir": stage}
            for again in (False, True):
                if wrong:
                    patterns = [glob.escape(n) for n in wrong]
                    api.snapshot_download(repo, **options, allow_patterns=patterns, force_download=again)
                for name in [n for n in wrong if is_same(stage / n, remote[n], wanted[n])]:
                    with open(stage / name, "rb") as f:
                        os.fsync(f.fileno())
                    os.replace(stage / name, to / name)
                    wrong.remove(name)
            if wrong:
                raise UserError(f"{', '.join(wrong)} from {repo} had a wrong hash twice; its owner must push again")

        yield remote, fetch
        shutil.rmtree(stage)


def push_data(data_dir: Path, repo: str, public: bool = False) -> None:
    """Upload a folder of token shards, checked against its manifest, as a dataset (private unless --public)."""
    if (manifest := shards.read_manifest(data_dir)) is None:
        raise UserError(f"{data_dir} has no {shards.MANIFEST}; make one with: python fineweb.py --out {data_dir}")
    if problems := list(shards.verify(data_dir)):
        raise UserError(f"{data_dir} was not pushed: {'; '.join(problems)}. See: python fineweb.py --verify {data_dir}")
    text = f"{sum(s.tokens for s in manifest.shards):,} GPT-2 tokens from {manifest.source['name']}, as uint16."
    files = [data_dir / s.file for s in manifest.shards] + [data_dir / shards.MANIFEST]  # last: it completes the set
    push(repo, "dataset", files, f"# REPO\n\n{text}\n\n    python hub.py pull-data REPO DIR\n", public)


def pull_data(repo: str, data_dir: Path, revision: str | None = None, limit_shards: int | None = None) -> Path:
    """Download token shards, at most `limit_shards` of them for training, and check each one's sha256 (from the
    manifest, or from the Hub if there is none). Returns the folder; raises UserError."""
    out, manifest = Path(data_dir), None
    here = {s.file: s.sha256 for s in mine.shards} if (mine := shards.read_manifest(out)) else {}
    with pull(repo, "dataset", out, revision) as (remote, fetch):
        known = {n: None for n in remote if shards.SHARD_NAME.fullmatch(n)}
        if shards.MANIFEST in remote:
            fetch({shards.MANIFEST: None}, to=out / STAGE)
            manifest = shards.read_manifest(out / STAGE)
            known = {s.file: s.sha256 for s in manifest.shards}
        if odd := known.keys() - remote.keys() | {n for n, sha256 in here.items() if known.get(n) != sha256}:
            raise UserError(f"{min(odd)} differs between {repo}, its manifest and {out}; pull into an empty folder")
        if not (train := sorted(n for n in known if shards.SHARD_NAME.fullmatch(n)["split"] == "train")):
            raise UserError(f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")
        left_out = set(train[limit_shards:]) - here.keys() if limit_shards else set()
        fetch({n: sha256 for n, sha256 in known.items() if n not in left_out}, here)
        if manifest:
            shards.write_manifest(out, replace(manifest, shards=[s for s in manifest.shards if s.file not in left_out]))
    print0(f"{len(shards.shard_files(out))} shards in {out}, all hashes verified")
    return out


def load(path: Path) -> tuple:
    """The .pt file for a file or run folder, its model, and a model card with the run's figures at that step."""
    import checkpoint
    import metrics
    from model import is_a

    model, facts = checkpoint.load(path)
    c, step = model.config, facts["step"]
    weights = path if path.is_file() else checkpoint.model_path(path, step)
    for row in metrics.read_lines(weights.with_name("metrics.jsonl")):
        facts |= row if row["step"] <= step else {}
    if batch := metrics.tokens_per_step(weights.parent):
        facts["tokens"] = step * batch
    facts = {k: v for k, v in facts.items() if is_a(v, float)}
    card = f"---\npipeline_tag: text-generation\ntags: [gpt2]\n---\n# GPT-2\n\n{model.num_params():,} parameters: "
    card += f"{c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, context {c.block_size}.\n\n| | |\n|-|-|\n"
    return weights, model, card + "".join(f"| {k} | {facts[k]:,} |\n" for k in CARD_FACTS if k in facts) + "\n"


def push_model(path: Path, repo: str, public: bool = False, with_optimizer: bool = False) -> None:
    """Upload a .pt file, a run's newest checkpoint (with its optimizer, to resume from), or an export."""
    if (path / "model.safetensors").is_file():
        return push(repo, "model", [p for p in sorted(path.iterdir()) if MODEL_FILE.fullmatch(p.name)], "", public)
    weights, _, card = load(path)
    optim = weights.with_name(weights.name.replace("model_", "optim_"))
    if with_optimizer and not optim.is_file():
        raise UserError(f"{optim} does not exist; push without --with-optimizer")
    extra = [weights.with_name(n) for n in ("metrics.jsonl", "curves.png", "config.json")] + [optim] * with_optimizer
    card += "    python hub.py pull-model REPO DIR\n    python infer.py DIR 'Hello,'\n"
    push(repo, "model", [weights, *filter(Path.is_file, extra)], card, public)


def pull_model(repo: str, out_dir: Path, revision: str | None = None, every_step: bool = False) -> None:
    """Download a pushed model, its newest step or all of them, for infer.py and, if its optimizer was pushed too, for
    `train_gpt2.py --resume`."""
    with pull(repo, "model", out_dir, revision) as (remote, fetch):
        names = [n for n in remote if MODEL_FILE.fullmatch(n)]
        steps = {n: int(n[6:-3]) for n in names if n.endswith(".pt")}
        newest = max((step for n, step in steps.items() if n.startswith("model")), default=-1)
        names = [n for n in names if every_step or steps.get(n, newest) == newest]
        if not any(n.endswith((".pt", ".safetensors")) for n in names):
            raise UserError(f"{repo} has no model (model_00000.pt or model.safetensors); is the name right?")
        fetch(dict.fromkeys(names))
    print0(f"{repo} is in {out_dir}; try: python infer.py {out_dir} 'Hello,'")


def export(path: Path, out_dir: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer can load, with a model card."""
    _, model, card = load(path)
    convert.save_hf(model, out_dir)
    (out_dir / "README.md").write_text(f'{card}    AutoModelForCausalLM.from_pretrained("{out_dir.name}")\n')
    print0(f"{out_dir} is ready; try: python infer.py {out_dir} 'Hello,'")


def main() -> None:
    import tyro

    commands = {f.__name__.replace("_", "-"): f for f in (push_data, pull_data, push_model, pull_model, export)}
    commands |= {"import": convert.import_old}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, config=(tyro.conf.PositionalRequiredArgs,))


if __name__ == "__main__":
    run_cli(main)
