"""Token shards on the Hugging Face Hub: pushed once, pulled by every machine, with every hash checked.

    push_data(Path("data/fineweb-edu"), "OWNER/NAME")
    folder = pull_data("OWNER/NAME", Path("data/fineweb-edu"), limit_shards=9)

Called by hub.py as push-data and pull-data, and by train_gpt2.py for --data-dir hf://OWNER/NAME. On both sides the
manifest comes last, so a folder or repository that has one is complete:

    push    verify every byte -> upload the shards -> upload manifest.json
    pull    read manifest.json -> download each shard, check its sha256 -> write manifest.json
"""

import shlex
import tempfile
from dataclasses import replace
from pathlib import Path

from system.cli import print0, require
from system.hub_client import HubUnavailable, hold_files, pull, push, staging_folder
from tokens import shards
from tokens.shards import Manifest


def push_data(data_dir: Path, repo: str, public: bool = False) -> None:
    """Upload a folder of token shards as a dataset, after every byte is checked against its manifest.

    Args:
        data_dir: the folder of shards.
        repo: OWNER/NAME; created if it does not exist, private unless --public.
        public: create a public repository, or push to one that is public.

    Raises UserError if a shard is damaged, or if the Hub refuses.
    """
    # Check before anything is uploaded.
    manifest = read_or_create_manifest(data_dir)

    # The dataset's card: what it is and how to get it.
    tokens = sum(shard.tokens for shard in manifest.shards)
    text = f"{tokens:,} GPT-2 tokens from {manifest.source['name']}, as uint16."
    card = f"# REPO\n\n{text}\n\n    python hub.py pull-data REPO DIR\n"

    # Upload the manifest last, on its own: after an interrupted push there is none, so no pull can seem complete.
    files = [data_dir / shard.file for shard in manifest.shards]
    with staging_folder(data_dir) as folder:
        hold_files(files, folder)
        push(repo, "dataset", folder, card, public, last=data_dir / shards.MANIFEST)


def read_or_create_manifest(data_dir: Path) -> Manifest:
    """The manifest of a folder, after every byte of its shards was verified. Shards of another program have no
    manifest, so one is created. Raises UserError if a shard is damaged, missing or not listed."""
    # Shards of build-nanogpt or llm.c: creating the manifest reads and checks every byte, too.
    manifest = shards.read_manifest(data_dir)
    if manifest is None:
        manifest = shards.create_manifest(data_dir)
        print0(f"{data_dir} had no {shards.MANIFEST}: made one from the {len(manifest.shards)} shards in the folder")
        return manifest

    # A damaged shard would be pulled by every machine: read every byte once more.
    problems = "; ".join(shards.verify(data_dir))
    command = f"python fineweb.py --verify {shlex.quote(str(data_dir))}"
    require(not problems, f"{data_dir} was not pushed: {problems}. See: {command}")
    return manifest


def pull_for_training(repo: str, data_dir: Path) -> Path:
    """pull_data for a run that starts or restarts: if the Hub is not available, use the shards of an earlier pull, so
    that an outage does not end the run. Returns the folder; raises UserError."""
    try:
        return pull_data(repo, data_dir)
    except HubUnavailable as e:
        # A folder with a manifest, which is written last, is complete. Each shard's hash is checked when it is read.
        if shards.read_manifest(data_dir) is None:
            raise
        print0(f"warning: {e}. Training continues with the shards that were pulled into {data_dir} before")
        return data_dir


def pull_data(repo: str, data_dir: Path, revision: str | None = None, limit_shards: int | None = None) -> Path:
    """Download token shards into a folder, and check the sha256 of each.

    Args:
        repo: OWNER/NAME.
        data_dir: a new folder, or the one of an earlier pull.
        revision: a commit or tag instead of the newest version.
        limit_shards: only the first so many shards for training, and those for validation.

    Returns the folder. Raises UserError if the Hub's set of shards differs from the folder's, or is not complete.
    """
    out = Path(data_dir)
    with pull(repo, "dataset", out, revision) as (remote, fetch):
        # {file: sha256} of what the repository has: the shards of its manifest or, without one, every file that is
        # named like a shard, with None for its hash.
        manifest = None
        wanted = {name: None for name in remote if shards.SHARD_NAME.fullmatch(name)}
        if shards.MANIFEST in remote:
            # Fetch the manifest into another folder first: in the target it would say that the set is complete.
            with tempfile.TemporaryDirectory() as temporary:
                fetch({shards.MANIFEST: None}, Path(temporary))
                manifest = shards.read_manifest(temporary)
            wanted = {shard.file: shard.sha256 for shard in manifest.shards}

        # The listing, the manifest and the folder, which may have another set of shards, must agree.
        local_manifest = shards.read_manifest(out)
        local = {shard.file: shard.sha256 for shard in local_manifest.shards} if local_manifest else {}
        not_on_the_hub = [name for name in wanted if name not in remote]
        different_here = [name for name in local if local[name] != wanted.get(name)]
        conflicts = not_on_the_hub + different_here
        problem = f"{', '.join(conflicts[:1])} differs between {repo}, its {shards.MANIFEST} and {out}"
        require(not conflicts, f"{problem}; pull into an empty folder")

        # With a limit, leave out the later shards for training, unless they are here already. Validation shards stay.
        train = sorted(name for name in wanted if shards.SHARD_NAME.fullmatch(name)["split"] == "train")
        require(train, f"{repo} has no training shard (NAME_train_000001.npy or .bin); is the name right?")
        skipped = set()
        if limit_shards:
            skipped = {name for name in train[limit_shards:] if not (out / name).exists()}
        wanted = {name: sha256 for name, sha256 in wanted.items() if name not in skipped}

        # Download what is missing; a shard gets its name once its hash is right.
        fetch(wanted)

        # Write the manifest last, with the shards that are here: it says that the folder is complete.
        if manifest:
            pulled = [shard for shard in manifest.shards if shard.file in wanted]
            shards.write_manifest(out, replace(manifest, shards=pulled))
    print0(f"{len(shards.shard_files(out))} shards in {out}, all hashes verified")
    return out
