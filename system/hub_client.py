"""A client of the Hugging Face Hub: verified transfers, and one kind of error for all that can go wrong with them.

    with open_hub("OWNER/NAME") as (api, repo):              # any failure inside becomes a UserError
        folder = api.snapshot_download(repo)
    with staging_folder(run_dir) as folder:
        hold_files(files, folder)                            # what is uploaded can no longer be deleted or change
        push("OWNER/NAME", "dataset", folder, card, public=False)
    with pull("OWNER/NAME", "model", out_dir, revision=None) as (remote, fetch):
        fetch({"model_00500.pt": None})                      # its hash is checked before it gets its name

Called by hub.py, tokens/hub_data.py, tokens/sources.py and training/convert.py. huggingface_hub is imported only inside
functions, so that scripts which never use the Hub start quickly. The Hub's own variables apply: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from system.cli import UserError, print0, require
from system.files import lock_folder

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

HUB_ENDPOINT = "https://huggingface.co"
CONNECT_TIMEOUT = 10  # seconds
READ_TIMEOUT = 300  # seconds without a byte; the Hub may take minutes to accept a commit of large files

STAGING_FOLDER = ".incoming"  # inside the target folder: renaming works only within one file system
PUSH_FOLDER = ".pushing-"  # and random characters; beside what is pushed: hard links work only within one file system

# In a repository: which of its checkpoints a later push may remove, and the stored objects of those that were removed.
TEMPORARY_LIST = ".temporary-checkpoints.json"

# ------------------------------------------------------------------------- connecting


class HubUnavailable(UserError):
    """The Hub was not reached, or answered that it is overloaded or failing: a later try may succeed."""


@contextmanager
def open_hub(repo: str, write: bool = False, hint: str = "") -> Iterator[tuple[HfApi, str]]:
    """Yield a client and the full name of `repo`: hf:// removed and, for a write, the token's owner added.

    Any failure of the Hub, the network or the library inside the block becomes a UserError, which never shows the token
    and ends with `hint`: HubUnavailable if it may pass. Raises UserError, too, for a write without a token,
    and OSError if the disk that is downloaded to fails.
    """
    import httpx2
    from huggingface_hub import HfApi, constants, get_session, get_token

    # Accept what users copy from a web page or from --data-dir.
    name = repo.removeprefix("hf://").removeprefix("datasets/").strip("/")

    # For a file in Xet storage, a mirror returns the address of the Hub's storage host, which a user of the mirror may
    # not be able to reach. So Xet is used only with the Hub itself, unless the user has set HF_HUB_DISABLE_XET.
    if constants.ENDPOINT != HUB_ENDPOINT and "HF_HUB_DISABLE_XET" not in os.environ:
        constants.HF_HUB_DISABLE_XET = True

    # huggingface_hub has no timeout by default: a network that drops packets would make it hang instead of fail.
    get_session().timeout = httpx2.Timeout(READ_TIMEOUT, connect=CONNECT_TIMEOUT)

    # A write needs a token: say so before anything is read or hashed.
    if write and not get_token():
        fix = f"run `{log_in_command()}`, or set HF_TOKEN to one that can write"
        raise UserError(f"a push to {name} needs a token: {fix}")
    try:
        if write and "/" not in name:
            name = f"{HfApi().whoami()['name']}/{name}"
        yield HfApi(), name
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.EIO, errno.ESTALE):
            raise
        fix = f"Run the same command again: files that are complete are not transferred twice{hint}"
        raise classify_failure(error)(f"{explain_failure(error, name)}. {fix}") from None


def log_in_command() -> str:
    """The command, to paste, that saves a token on this machine. Without an activated .venv the shell does not find hf,
    which is installed beside this Python: then the command has its path, as in `.venv/bin/hf auth login`."""
    program = Path(sys.executable).with_name("hf")
    if shutil.which("hf") or not program.exists():
        return "hf auth login"
    if program.is_relative_to(Path.cwd()):
        program = program.relative_to(Path.cwd())
    return f"{shlex.quote(str(program))} auth login"


def list_causes(error: BaseException) -> list[BaseException]:
    """An exception and those that caused it: huggingface_hub wraps what the network library raises."""
    chain = [error]
    cause = error.__cause__ or error.__context__
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def classify_failure(error: Exception) -> type[UserError]:
    """The kind of error that an exception of huggingface_hub, or one that caused it, means for the user."""
    chain = list_causes(error)
    class_names = {cls.__name__ for e in chain for cls in type(e).__mro__}
    status = http_status(chain)

    # The Hub was not reached (OfflineModeIsEnabled counts), or is overloaded or failing: a later try may succeed.
    if class_names & {"TransportError", "OfflineModeIsEnabled"} or status == 429 or status >= 500:
        return HubUnavailable
    return UserError


def http_status(chain: list[BaseException]) -> int:
    """The status of the HTTP answer that caused these exceptions; 0 if there was none."""
    return next((e.response.status_code for e in chain if hasattr(e, "response")), 0)


def server_message(chain: list[BaseException]) -> str:
    """The Hub's own words about the failure that caused these exceptions; "" if there are none."""
    return next((e.server_message for e in chain if getattr(e, "server_message", None)), "")


def is_about_storage(reason: str) -> bool:
    """Whether the Hub says that the account's storage is full."""
    return "storage" in reason.lower()


def explain_failure(error: Exception, name: str) -> str:
    """What an exception of huggingface_hub, or one that caused it, means for a user who asked for the repo `name`."""
    from huggingface_hub import constants

    # Compare names of classes, because their modules move between versions of the libraries.
    chain = list_causes(error)
    class_names = {cls.__name__ for e in chain for cls in type(e).__mro__}
    status = http_status(chain)
    endpoint = constants.ENDPOINT

    # The Hub was not reached.
    if "OfflineModeIsEnabled" in class_names:
        return f"{endpoint} was not asked for {name}: offline mode is on; unset HF_HUB_OFFLINE"
    if "TransportError" in class_names:
        host = endpoint.partition("://")[2]
        reason = f"no connection ({type(chain[-1]).__name__})"
        if "gaierror" in class_names:
            reason = f"the name {host} could not be resolved"
        fix = "check the network, or set HF_ENDPOINT=https://MIRROR to use a mirror"
        return f"cannot reach {endpoint} for {name}: {reason}; {fix}"

    # The name was refused before anything was sent.
    if "HFValidationError" in class_names:
        return f"{name!r} is not a valid repository name; use OWNER/NAME"

    # The Hub answered with an HTTP error. Its own words are the diagnosis ("Private repository storage limit reached"),
    # and our advice is only a guess.
    reason = server_message(chain)
    answer = f"{endpoint} answered {status} for {name}"
    if reason:
        answer += f": {hide_token(' '.join(reason.split()))}"
    if status in (401, 403, 404):
        fix = f"check the name; run `{log_in_command()}`, or set HF_TOKEN to a token with access (write, to push)"
        # If the account's storage is full, another token does not help.
        if is_about_storage(reason):
            fix = "delete what is no longer needed on the Hub (a repository's history counts, too), or upgrade its plan"
        return f"{answer}; {fix}"
    if status:
        return f"{answer}; wait a moment"

    # Something answered, but not in the Hub's format.
    if class_names & {"JSONDecodeError", "FileMetadataError"}:
        return f"{endpoint} did not answer like a Hub for {name}; is there a log-in page or a proxy in between?"

    # Anything else keeps its own message.
    return hide_token(str(error))


def hide_token(message: str) -> str:
    """The message without the user's token."""
    from huggingface_hub import get_token

    token = get_token()
    return message.replace(token, "***") if token else message


# ------------------------------------------------------------------------- push


@contextmanager
def open_to_write(repo: str, kind: str, public: bool) -> Iterator[tuple[HfApi, str]]:
    """Like open_hub, for a repository of `kind` ("model" or "dataset"). It is made if missing, private unless `public`.

    Raises UserError if the token may not write there, or if the repository is public although that
    was not asked for.
    """
    with open_hub(repo, write=True) as (api, repo):
        # For a repository that exists, create_repo succeeds even with a token that can only read; auth_check fails.
        api.create_repo(repo, repo_type=kind, private=not public, exist_ok=True)
        api.auth_check(repo, repo_type=kind, write=True)

        # Never publish by accident.
        may_push = public or api.repo_info(repo, repo_type=kind).private
        fix = "add --public (with train.sh: PUSH_PUBLIC=1), or choose another name"
        require(may_push, f"{repo} exists and is public; to push there {fix}")
        yield api, repo


@contextmanager
def staging_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder inside `parent` for the files of a push (see hold_files), and remove it afterwards. Folders
    left by pushes that were killed are removed, too, because the hard links in them hold disk space."""
    for leftover in parent.glob(f"{PUSH_FOLDER}*"):
        if is_abandoned(leftover):
            shutil.rmtree(leftover, ignore_errors=True)

    # If `parent` is read-only, such as a folder of shared shards, use the folder for temporary files.
    try:
        root = Path(tempfile.mkdtemp(prefix=PUSH_FOLDER, dir=parent))
    except OSError:
        root = Path(tempfile.mkdtemp(prefix=PUSH_FOLDER))
    folder = root / "files"
    try:
        # The lock ends with this process, however the process ends.
        with open(root / "lock", "w") as lock:
            with suppress(OSError):  # on a file system without locks, is_abandoned judges by the folder's age
                fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir()
            yield folder
    finally:
        shutil.rmtree(root, ignore_errors=True)


def hold_files(files: list[Path], folder: Path) -> None:
    """Put `files`, as they are now, into the folder of a push.

    Checkpoints and shards are hard-linked: a run with --keep may delete a checkpoint while it is uploaded, and a hard
    link keeps its content. Where hard links fail, a checkpoint is copied; a shard, a file of another disk or a
    checkpoint that does not fit becomes a symbolic link, which keeps nothing. Other files, such as metrics.jsonl, are
    small and may change in place: they are copied. Raises FileNotFoundError if a file is deleted before it is linked.
    """
    for path in files:
        target = folder / path.name
        if path.suffix not in (".pt", ".npy", ".bin", ".safetensors"):
            shutil.copy(path, target)
            continue
        # `path` may itself be a symbolic link, to another volume.
        source = path.resolve(strict=True)
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            is_same_disk = source.stat().st_dev == folder.stat().st_dev
            may_vanish = source.suffix == ".pt" and is_same_disk
            if not (may_vanish and copy_if_there_is_room(source, target)):
                target.symlink_to(source)


def copy_if_there_is_room(source: Path, target: Path) -> bool:
    """Copy a file. False, with nothing left behind, if the disk has no room."""
    try:
        shutil.copy(source, target)
        return True
    except FileNotFoundError:
        raise
    except OSError:
        target.unlink(missing_ok=True)
        return False


def is_abandoned(root: Path) -> bool:
    """Whether the process that made this folder of a push has ended."""
    try:
        with open(root / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    # No lock file yet, or no locks on this file system: judge by the age, as no push takes days.
    except OSError:
        with suppress(OSError):
            return time.time() - root.stat().st_mtime > 3 * 24 * 3600
        return False


def push(
    repo: str,
    kind: str,
    folder: Path,
    card: str,
    public: bool,
    last: Path | None = None,
    temporary: set[str] | None = None,
    is_superseded: Callable[[str], bool] | None = None,
) -> None:
    """Upload the files in `folder`, a staging_folder, to a repository of `kind` ("model" or "dataset"), made if
    missing, then `last` on its own.

    `card`, if not empty, becomes README.md; REPO in it stands for the repository's name. `last` is the file whose
    presence says that the set is complete. With `is_superseded`, superseded files that an earlier push marked as
    `temporary` are removed in the same commit, and their stored objects after it. Raises UserError.
    """
    with open_to_write(repo, kind, public) as (api, repo):
        if card:
            (folder / "README.md").write_text(card.replace("REPO", repo))

        superseded, objects = set(), set()
        if is_superseded:
            superseded, objects = choose_superseded(api, repo, folder, temporary or set(), is_superseded)

        # One commit for the files, and a second one for the file that completes them.
        api.upload_folder(
            folder_path=folder,
            repo_id=repo,
            repo_type=kind,
            commit_message="Add files",
            delete_patterns=sorted(superseded) or None,
        )
        if last:
            api.upload_file(path_or_fileobj=last, path_in_repo=last.name, repo_id=repo, repo_type=kind)

        # Old objects count towards the account's quota as long as the history refers to them. If deleting them fails,
        # the push has still succeeded: they stay in the list, and the next push tries again.
        if objects:
            try:
                free_objects(api, repo, objects)
            except Exception as error:
                print0(f"warning: old checkpoints still count in {repo}'s storage: {explain_failure(error, repo)}")
    print0(f"{repo} is complete; to pull: python hub.py pull-{kind.removesuffix('set')} {repo} DIR")


def choose_superseded(
    api: HfApi, repo: str, folder: Path, temporary: set[str], is_superseded: Callable[[str], bool]
) -> tuple[set[str], set[str]]:
    """Which files of a model repository the push of `folder` removes, and the sha256 of stored objects to delete after
    it. Writes the new list of temporary files into `folder`: committed together, list and files always agree."""
    # The temporary files of earlier pushes which this one supersedes. What is pushed now is not removed.
    marked, removed_objects = read_temporary_list(api, repo)
    pushed = {path.name for path in folder.iterdir()}
    superseded = {name for name in marked - pushed if is_superseded(name)}

    # The stored objects of these files, and those that an earlier push could not delete.
    infos = api.get_paths_info(repo, sorted(superseded)) if superseded else []
    objects = {info.lfs.sha256 for info in infos if info.lfs}
    if removed_objects:
        objects |= removed_objects & {stored.file_oid for stored in api.list_lfs_files(repo)}

    still_marked = (marked - pushed - superseded) | temporary
    if marked or removed_objects or still_marked:
        content = {"temporary": sorted(still_marked), "removed_objects": sorted(objects)}
        (folder / TEMPORARY_LIST).write_text(json.dumps(content) + "\n")
    return superseded, objects


def read_temporary_list(api: HfApi, repo: str) -> tuple[set[str], set[str]]:
    """Which files of a model repository may be removed by a later push, and the sha256 of stored objects whose files
    were removed. Both are empty for a repository without such a list."""
    from huggingface_hub.errors import EntryNotFoundError

    with tempfile.TemporaryDirectory() as folder:
        try:
            path = api.hf_hub_download(repo, TEMPORARY_LIST, local_dir=folder)
            content = json.loads(Path(path).read_text())
            return set(map(str, content["temporary"])), set(map(str, content["removed_objects"]))
        except EntryNotFoundError:
            return set(), set()
        except (ValueError, KeyError, TypeError):
            print0(f"warning: {TEMPORARY_LIST} in {repo} cannot be read: no older checkpoint is removed there")
            return set(), set()


def free_objects(api: HfApi, repo: str, objects: set[str]) -> None:
    """Delete stored objects, given by sha256, that no file of the model repository refers to any more, and the entries
    in its history that do."""
    tree = api.list_repo_tree(repo, recursive=True)
    in_use = {entry.lfs.sha256 for entry in tree if getattr(entry, "lfs", None)}
    stored = [stored for stored in api.list_lfs_files(repo) if stored.file_oid in objects - in_use]
    if stored:
        api.permanently_delete_lfs_files(repo, stored)
        print0(f"{sum(file.size for file in stored) / 1e9:.2f} GB of superseded checkpoints removed from {repo}")


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
            remove_partial_downloads(folder)
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
    """Bring files of `repo` into `folder`. `wanted` is {path: sha256}; None stands for the hash that the Hub lists.

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

    # Download the others beside the folder's files. Files that an interrupted pull completed are not fetched again.
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


def remove_partial_downloads(folder: Path) -> None:
    """Remove what killed downloads into `folder` have left there. The caller holds the lock on the folder.

    huggingface_hub 2.4 resumes a download only within one call: its partial files have random names, and it begins
    anew beside them. Where the file system has no flock, its locks are files that nobody else removes.
    """
    bookkeeping = folder / ".cache" / "huggingface" / "download"
    for pattern in ("*.incomplete", "*.lock"):
        for path in bookkeeping.rglob(pattern):
            path.unlink(missing_ok=True)


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
