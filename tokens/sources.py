"""Sources: the files that --source names, the order in which they are read, and what the manifest says of them.

fineweb.py resolves its --source here:

    name, paths = choose_source(("books-*.parquet",))       # "books", {Path("books-00.parquet"): "books-00.parquet"}
    source = describe_local(name, paths)                    # for the manifest

and, for a dataset on the Hugging Face Hub:

    name, paths = choose_source(("fineweb-edu",))           # "fineweb-edu", {}
    source = describe_hub("fineweb-edu", subset=None, previous=None)
    for path in download_files(source, first_index=0, folder=Path("data/fineweb-edu/.source")):
        ...
"""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from glob import glob
from pathlib import Path

from system.cli import require
from system.hub_client import open_hub
from tokens import shards
from tokens.documents import READERS, choose_reader, split_suffixes

HUB_DATASETS = {  # name: (dataset, prefix of the paths of its files)
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample/100BT/"),
    "fineweb-100bt": ("HuggingFaceFW/fineweb", "sample/100BT/"),
}
# Folders in the standard library's folder that hold tests or other people's packages.
NOT_LIBRARY_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
CONTROL_CHARACTERS = r"[\0-\x1f\x7f-\x9f\\]"
FIRST_BYTES = 1 << 16  # of each local file, hashed into the source's revision


# ------------------------------------------------------------------------- what --source names


def choose_source(names: tuple[str, ...]) -> tuple[str, dict[Path, str]]:
    """What the words after --source mean: the name of the shards, and the local files with their names in the manifest.
    There are no local files if the source is on the Hub. Raises UserError."""
    # The library of the Python that runs this.
    first = names[0]
    if names == ("stdlib",):
        return first, find_library_files()

    # OWNER/NAME is a dataset unless it names or looks like a file.
    is_repo_name = re.fullmatch(r"[\w-]+/[\w-][\w.-]*", first)
    looks_like_file = glob(first) or Path(first).suffix[1:].isalpha()
    is_on_hub = first in HUB_DATASETS or (is_repo_name and not looks_like_file)
    if len(names) == 1 and is_on_hub:
        return first.rpartition("/")[2], {}

    # Everything else is files.
    files = expand_patterns(names)
    return find_common_name(list(files)), files


def expand_patterns(patterns: tuple[str, ...]) -> dict[Path, str]:
    """The files of each pattern in turn, with their names in the manifest. Raises UserError for a pattern without files
    and for a file that no reader takes: better now than after hours of tokenizing the files before it."""
    paths = []
    for pattern in patterns:
        # A file whose name has glob characters in it is meant literally.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        readable = matches and all(os.path.isfile(p) and os.access(p, os.R_OK) for p in matches)
        known = f"stdlib, {', '.join(HUB_DATASETS)} or OWNER/NAME"
        require(readable, f"--source {pattern}: not a readable file; or give {known}")
        paths += [Path(p) for p in matches]

    for path in paths:
        choose_reader(path)  # raises UserError
    # The manifest's names are printed and compared, and so have no control characters.
    return {path: re.sub(CONTROL_CHARACTERS, "_", path.name) for path in paths}


def find_common_name(paths: list[Path]) -> str:
    """Name for the shards of these files: the files' common name without a trailing number, or else their folder's."""
    # books-00.txt.gz and books-01.txt.gz are both "books".
    names = set()
    for path in paths:
        stem = path.name.removesuffix("".join(split_suffixes(path.name)))
        names.add(stem.rstrip("0123456789-_."))

    # A number alone, or several names: the folder says better what they are.
    common = names.pop() if len(names) == 1 else ""
    name = common or paths[0].resolve().parent.name
    return re.sub(r"[^\w.-]", "-", name) or "text"


def find_library_files() -> dict[Path, str]:
    """This Python's library files without tests, shuffled by the hash of their names so that val resembles train."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not NOT_LIBRARY_FOLDERS & set(relative.parts):
            names[path] = relative.as_posix()

    # Sorted by hash: in the order of names, val would be the modules that begin with "a".
    require(names, f"this Python has no library sources in {root}; give --source FILE... instead of stdlib")
    return dict(sorted(names.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest()))


# ------------------------------------------------------------------------- what the manifest says of a source


def describe_local(name: str, paths: dict[Path, str]) -> dict:
    """Local files as the manifest's `source`. Their revision is a hash of their names, sizes and first bytes: cheap
    even for large files, and enough to notice that a file was replaced."""
    files = [{"path": label, "bytes": path.stat().st_size} for path, label in paths.items()]
    digest = hashlib.sha256(json.dumps(files).encode())
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read(FIRST_BYTES))
    return {"name": name, "subset": "", "revision": digest.hexdigest()[:16], "files": files}


def describe_hub(name: str, subset: str | None, previous: dict | None) -> dict:
    """The files of a Hub dataset as the manifest's `source`: parquet, or else the next format of READERS that it has.

    A folder that was begun earlier has a `previous` source. If it is the same dataset, it stays as it is, whatever the
    Hub has now. Raises UserError.
    """
    # Which dataset, and which part of it.
    repo, default_subset = HUB_DATASETS.get(name, (name, ""))
    subset = default_subset if subset is None else subset
    if previous and (previous["name"], previous["subset"]) == (repo, subset):
        return previous

    # List the files at one revision, so that an upload in the meantime changes nothing.
    folder = subset.rpartition("/")[0] or None
    with open_hub(repo, hint="; without network: python fineweb.py --source stdlib") as (api, repo):
        revision = api.dataset_info(repo, expand=["sha"], timeout=10).sha
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        # Folders have no size; a path that leads out of the download folder is left out.
        sizes = {f.path: f.size for f in tree if hasattr(f, "size") and shards.RELATIVE_PATH.fullmatch(f.path)}

    # One format only: datasets often hold the same documents in several.
    formats = {path: split_suffixes(path)[0].lower() for path in sorted(sizes) if path.startswith(subset)}
    available = [suffix for suffix in READERS if suffix in formats.values()]
    rule = f"whose path starts with {subset!r}; choose with --subset FOLDER/"
    require(available, f"{repo} has no file of {', '.join(READERS)} {rule}")
    files = [{"path": path, "bytes": sizes[path]} for path, suffix in formats.items() if suffix == available[0]]
    return {"name": repo, "subset": subset, "revision": revision, "files": files}


def download_files(source: dict, first_index: int, folder: Path) -> Iterator[Path]:
    """Download the files of a Hub source from `first_index` on into `folder`; a partial download is resumed."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # fineweb.py shows one for the tokens
    for file in source["files"][first_index:]:
        with open_hub(source["name"]) as (api, repo):
            path = api.hf_hub_download(
                repo, file["path"], repo_type="dataset", revision=source["revision"], local_dir=folder
            )
        yield Path(path)
