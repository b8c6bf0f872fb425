"""Token shards on the Hugging Face Hub: pushed once, pulled by every machine."""

import tempfile
from dataclasses import replace
from pathlib import Path

from system.cli import print0, require
from system.hub_client import pull, push
from tokens import shards


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
