"""The client of the Hugging Face Hub, with one kind of error for any failure of the Hub, the network or the library."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from system.cli import UserError, print0, require
from system.files import lock_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile


@contextmanager
def open_hub(repo: str, write: bool = False, hint: str = "") -> Iterator[tuple[HfApi, str]]:
    """Yield a client and the full name of `repo` (owner added, hf:// removed). Any failure inside the block becomes a
    UserError, which never shows the token and ends with `hint`. A write without a token raises UserError, too."""
    import httpx2
    from huggingface_hub import HfApi, constants, get_session, get_token

    where, name = constants.ENDPOINT, repo.removeprefix("hf://").removeprefix("datasets/").strip("/")
    if where.startswith("http://"):  # a mirror on the local network has no Xet storage
        constants.HF_HUB_DISABLE_XET = True
    # huggingface_hub has no timeout by default: a network that drops packets would make it hang instead of fail
    get_session().timeout = httpx2.Timeout(300, connect=10)
    mend = "run `hf auth login`, or set HF_TOKEN to one that can write"
    require(get_token() or not write, f"a push to {name} needs a token: {mend}")
    try:
        if write and "/" not in name:
            name = f"{HfApi().whoami()['name']}/{name}"
        yield HfApi(), name
    except UserError:
        raise
    except Exception as error:
        again = f"Run the same command again to continue where it stopped{hint}"
        raise UserError(f"{explain(error, name)}. {again}") from None


def explain(error: Exception, name: str) -> str:
    """What a failure of the library, or what caused it, means for someone who asked for `name`."""
    from huggingface_hub import constants, get_token

    where, chain = constants.ENDPOINT, [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    kinds = {kind.__name__ for e in chain for kind in type(e).__mro__}
    status = next((e.response.status_code for e in chain if hasattr(e, "response")), 0)
    if kinds & {"TransportError", "OfflineModeIsEnabled"}:
        return f"cannot reach {where} for {name} ({type(chain[-1]).__name__}); check the network and HF_HUB_OFFLINE"
    if "HFValidationError" in kinds:
        return f"{name!r} is not a valid repository name; use OWNER/NAME"
    if status:
        mend = "check the name; run `hf auth login`, or set HF_TOKEN to a token with access (write, to push)"
        return f"{where} answered {status} for {name}; {mend if status in (401, 403, 404) else 'wait a moment'}"
    if kinds & {"JSONDecodeError", "FileMetadataError"}:
        return f"{where} did not answer like a Hub for {name}; is there a log-in page or a proxy in between?"
    return str(error).replace(get_token() or "\0", "***")


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

        with lock_folder(out, wait=True):
            yield remote, fetch
