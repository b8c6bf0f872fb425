"""A client of the Hugging Face Hub: verified transfers, and one kind of error for all that can go wrong with them.

    with open_hub("OWNER/NAME") as (api, repo):              # any failure inside becomes a UserError
        folder = api.snapshot_download(repo)
    push("OWNER/NAME", "dataset", files, card, public=False)
    with pull("OWNER/NAME", "model", out_dir, revision=None) as (remote, fetch):
        fetch({"model_00500.pt": None})                      # its hash is checked before it gets its name

Called by hub.py, tokens/hub_data.py, tokens/sources.py and training/convert.py. huggingface_hub is imported only inside
functions, so that scripts which never use the Hub start quickly. The Hub's own variables apply: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE.
"""

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

CONNECT_TIMEOUT = 10  # seconds
READ_TIMEOUT = 300  # seconds without a byte; the Hub may take minutes to accept a commit of large files

STAGING_FOLDER = ".incoming"  # inside the target folder: renaming works only within one file system

# ------------------------------------------------------------------------- connecting


@contextmanager
def open_hub(repo: str, write: bool = False, hint: str = "") -> Iterator[tuple[HfApi, str]]:
    """Yield a client and the full name of `repo`: hf:// removed and, for a write, the token's owner added.

    Any failure of the Hub, the network or the library inside the block becomes a UserError, which never shows the token
    and ends with `hint`. Raises UserError, too, for a write without a token.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, get_session, get_token

    # Accept what users copy from a web page or from --data-dir.
    name = repo.removeprefix("hf://").removeprefix("datasets/").strip("/")

    # A plain http:// endpoint is a mirror on the local network, which has no Xet storage.
    if constants.ENDPOINT.startswith("http://"):
        constants.HF_HUB_DISABLE_XET = True

    # huggingface_hub has no timeout by default: a network that drops packets would make it hang instead of fail.
    get_session().timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)

    # A write needs a token: say so before anything is read or hashed.
    fix = "run `hf auth login`, or set HF_TOKEN to one that can write"
    require(get_token() or not write, f"a push to {name} needs a token: {fix}")
    try:
        if write and "/" not in name:
            name = f"{HfApi().whoami()['name']}/{name}"
        yield HfApi(), name
    except UserError:
        raise
    except Exception as error:
        fix = f"Run the same command again to continue where it stopped{hint}"
        raise UserError(f"{explain_failure(error, name)}. {fix}") from None


def explain_failure(error: Exception, name: str) -> str:
    """What an exception of huggingface_hub, or one that caused it, means for a user who asked for the repo `name`."""
    from huggingface_hub import constants, get_token

    # The exception and those that caused it. huggingface_hub wraps what the network library raises.
    chain = [error]
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__

    # Compare names of classes, because their modules move between versions of the libraries.
    class_names = {cls.__name__ for e in chain for cls in type(e).__mro__}
    status = next((e.response.status_code for e in chain if hasattr(e, "response")), 0)
    endpoint = constants.ENDPOINT

    # The Hub was not reached.
    if class_names & {"TransportError", "OfflineModeIsEnabled"}:
        return f"cannot reach {endpoint} for {name} ({type(chain[-1]).__name__}); check the network and HF_HUB_OFFLINE"

    # The name was refused before anything was sent.
    if "HFValidationError" in class_names:
        return f"{name!r} is not a valid repository name; use OWNER/NAME"

    # The Hub answered with an HTTP error.
    if status in (401, 403, 404):
        fix = "check the name; run `hf auth login`, or set HF_TOKEN to a token with access (write, to push)"
        return f"{endpoint} answered {status} for {name}; {fix}"
    if status:
        return f"{endpoint} answered {status} for {name}; wait a moment"

    # Something answered, but not in the Hub's format.
    if class_names & {"JSONDecodeError", "FileMetadataError"}:
        return f"{endpoint} did not answer like a Hub for {name}; is there a log-in page or a proxy in between?"

    # Anything else keeps its own message, in which the token must not appear.
    message = str(error)
    token = get_token()
    if token:
        message = message.replace(token, "***")
    return message


# ------------------------------------------------------------------------- push


@contextmanager
def open_to_write(repo: str, kind: str, public: bool) -> Iterator[tuple[HfApi, str]]:
    """As open_hub, for a `kind` ("model" or "dataset") of repository that is made if missing, private unless `public`.

    Raises UserError if the token may not write there, or if the repository is public although that was not asked for.
    """
    with open_hub(repo, write=True) as (api, repo):
        # For a repository that exists, create_repo succeeds with a token that can only read. auth_check tells.
        api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        api.auth_check(repo, repo_type=kind, write=True)

        # Never publish by accident.
        may_push = public or api.repo_info(repo, repo_type=kind).private
        fix = "add --public (with train.sh: PUSH_PUBLIC=1), or choose another name"
        require(may_push, f"{repo} exists and is public; to push there {fix}")
        yield api, repo


def push(repo: str, kind: str, files: list[Path], card: str, public: bool, last: Path | None = None) -> None:
    """Upload `files` to a repository of `kind` ("model" or "dataset"), made if missing, then `last` on its own.

    `card`, if not empty, becomes README.md; REPO in it stands for the repository's name. `last` is the file whose
    presence says that the set is complete. Raises UserError.
    """
    with open_to_write(repo, kind, public) as (api, repo), tempfile.TemporaryDirectory() as folder:
        # upload_folder takes one folder: gather the files in it as links.
        for path in files:
            if path.suffix == ".jsonl":
                # A run may still be appending to its metrics, and the Hub refuses a file that changes: take a snapshot.
                shutil.copy(path, folder)
            else:
                Path(folder, path.name).symlink_to(path.resolve())
        if card:
            Path(folder, "README.md").write_text(card.replace("REPO", repo))

        # One commit for the files, and a second one for the file that completes them.
        api.upload_folder(folder_path=folder, repo_id=repo, repo_type=kind, commit_message="Add files")
        if last:
            api.upload_file(path_or_fileobj=last, path_in_repo=last.name, repo_id=repo, repo_type=kind)
    print0(f"{repo} is complete; to pull: python hub.py pull-{kind.removesuffix('set')} {repo} DIR")


# ------------------------------------------------------------------------- pull


@contextmanager
def pull(repo: str, kind: str, out: Path, revision: str | None) -> Iterator[tuple[dict[str, RepoFile], Callable]]:
    """Lock the folder `out` and yield two things: the files of `repo` at `revision` (None: the newest) by their path,
    and fetch({path: sha256 or None}, folder=out), which downloads some of them; see fetch_files.

    Raises UserError. A second pull into the same folder waits for the first.
    """
    with open_hub(repo) as (api, repo):
        # Pin the commit: a push during the pull must not mix two versions.
        commit = api.repo_info(repo, repo_type=kind, revision=revision, timeout=CONNECT_TIMEOUT).sha
        tree = api.list_repo_tree(repo, repo_type=kind, recursive=True, revision=commit)
        remote = {entry.path: entry for entry in tree if hasattr(entry, "blob_id")}  # files only: folders have no blob

        def download(names: list[str], folder: Path) -> None:
            patterns = [glob.escape(name) for name in names]
            api.snapshot_download(repo, repo_type=kind, revision=commit, local_dir=folder, allow_patterns=patterns)

        def fetch(wanted: dict[str, str | None], folder: Path = out) -> None:
            fetch_files(repo, remote, wanted, folder, download)

        # Two processes that pull into one folder would use the same staging folder.
        with lock_folder(out, wait=True):
            yield remote, fetch


def fetch_files(
    repo: str,
    remote: dict[str, RepoFile],
    wanted: dict[str, str | None],
    folder: Path,
    download: Callable[[list[str], Path], None],
) -> None:
    """Bring the `wanted` files of `repo` into `folder`, which is {path: sha256}, None standing for the Hub's own hash.

    A file gets its name in the folder only once its hash is verified, and no file that is there is ever overwritten.
    `download(names, folder)` fetches unverified files. Raises UserError if a file that is there, or one from the Hub,
    does not have its hash.
    """
    # Files that are already here must be the same: they are of an earlier pull, or the user's own.
    missing = sorted(name for name in wanted if not (folder / name).exists())
    for name in wanted.keys() - missing:
        fix = "pull into an empty folder, or move the file away"
        is_same = has_hash(folder / name, remote[name], wanted[name])
        require(is_same, f"{folder} has a different {name} than {repo}; {fix}")

    # Download the others beside the folder's files. What an interrupted pull left there is not fetched again.
    staging = folder / STAGING_FOLDER
    if missing:
        download(missing, staging)

    # Verify each, and give the good ones their names.
    wrong = [name for name in missing if not has_hash(staging / name, remote[name], wanted[name])]
    for name in missing:
        if name not in wrong:
            os.replace(staging / name, folder / name)
    shutil.rmtree(staging, ignore_errors=True)
    # A wrong hash is a broken transfer, which another try repairs, or a broken push.
    fix = "run the same command again or, if that does not help, push it again"
    require(not wrong, f"{', '.join(wrong)} came from {repo} with a wrong hash; {fix}")


def has_hash(path: Path, remote: RepoFile, sha256: str | None) -> bool:
    """Whether a file has the size that the Hub lists, and the given sha256 or, if that is None, the Hub's hash."""
    # The size first: it costs nothing, and hashing a large file takes seconds.
    if not path.is_file() or path.stat().st_size != remote.size:
        return False

    # Small text files are listed with git's hash of a blob, which is over a header and the content.
    if sha256 is None and remote.lfs is None:
        git_hash = hashlib.sha1(b"blob %d\0" % remote.size + path.read_bytes()).hexdigest()
        return git_hash == remote.blob_id

    # Large files, in Git LFS or Xet, are listed with their sha256.
    expected = sha256 or remote.lfs.sha256
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() == expected
