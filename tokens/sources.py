"""Sources: the files that --source names, in which order they are read, and what the manifest says of them."""

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
from tokens.documents import READERS, suffixes

HUB = {  # name: dataset, path prefix of its files
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample/100BT/"),
    "fineweb-100bt": ("HuggingFaceFW/fineweb", "sample/100BT/"),
}
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


def choose(sources: tuple[str, ...]) -> tuple[str, dict[Path, str]]:
    """The name of the shards of --source, and its local files with their names in the manifest (none: on the Hub)."""
    first = sources[0]
    dataset = re.fullmatch(r"[\w-]+/[\w-][\w.-]*", first) and not glob(first) and not Path(first).suffix[1:].isalpha()
    if sources == ("stdlib",):
        return first, library_files()
    if len(sources) == 1 and (first in HUB or dataset):
        return first.rpartition("/")[2], {}
    files = given_files(sources)
    return common_name(list(files)), files


def given_files(patterns: tuple[str, ...]) -> dict[Path, str]:
    """The files of each pattern in turn. Raises UserError."""
    found = []
    for pattern in patterns:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        readable = paths and all(os.path.isfile(p) and os.access(p, os.R_OK) for p in paths)
        require(readable, f"--source {pattern}: not a readable file; or give stdlib, {', '.join(HUB)} or OWNER/NAME")
        found += map(Path, paths)
    return {p: re.sub(r"[\0-\x1f\x7f-\x9f\\]", "_", p.name) for p in found}


def common_name(paths: list[Path]) -> str:
    """Name for the shards of these files: the files' common name without a trailing number, or else their folder's."""
    names = {p.name.removesuffix("".join(suffixes(p.name))).rstrip("0123456789-_.") for p in paths}
    name = (names.pop() if len(names) == 1 else "") or paths[0].resolve().parent.name
    return re.sub(r"[^\w.-]", "-", name) or "text"


def library_files() -> dict[Path, str]:
    """This Python's library files without tests, shuffled by the hash of their names so that val resembles train."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [p for p in root.rglob("*.py") if not NOT_LIBRARY & set(p.relative_to(root).parts)]
    names = {p: p.relative_to(root).as_posix() for p in found}
    require(names, f"this Python has no library sources in {root}; give --source FILE... instead of stdlib")
    return dict(sorted(names.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest()))


def local(name: str, paths: dict[Path, str]) -> dict:
    """Local files as a source; its revision is a hash of their names, sizes and first bytes, cheap but telling."""
    files = [{"path": label, "bytes": path.stat().st_size} for path, label in paths.items()]
    digest = hashlib.sha256(json.dumps(files).encode())
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read(1 << 16))
    return {"name": name, "subset": "", "revision": digest.hexdigest()[:16], "files": files}


def on_hub(name: str, subset: str | None, old: dict | None) -> dict:
    """The files of a Hub dataset: parquet, or else the next format of READERS that it has. The revision is that of the
    source `old` if it is the same dataset, whatever the Hub has now."""
    repo, prefix = HUB.get(name, (name, ""))
    subset = prefix if subset is None else subset
    if old and (old["name"], old["subset"]) == (repo, subset):
        return old
    folder = subset.rpartition("/")[0] or None
    with open_hub(repo, hint="; without network: python fineweb.py --source stdlib") as (api, repo):
        revision = api.dataset_info(repo, expand=["sha"], timeout=10).sha
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        sizes = {f.path: f.size for f in tree if hasattr(f, "size") and shards.INSIDE.fullmatch(f.path)}
    formats = {path: suffixes(path)[0] for path in sorted(sizes) if path.startswith(subset)}
    here = [form for form in READERS if form in formats.values()]
    rule = f"whose path starts with {subset!r}; choose with --subset FOLDER/"
    require(here, f"{repo} has no file of {', '.join(READERS)} {rule}")
    files = [{"path": path, "bytes": sizes[path]} for path, form in formats.items() if form == here[0]]
    return {"name": repo, "subset": subset, "revision": revision, "files": files}


def download(source: dict, first: int, folder: Path) -> Iterator[Path]:
    """Download the files of a Hub source from index `first` on into `folder`; a partial download is resumed."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    where = {"repo_type": "dataset", "revision": source["revision"], "local_dir": folder}
    for file in source["files"][first:]:
        with open_hub(source["name"]) as (api, repo):
            path = api.hf_hub_download(repo, file["path"], **where)
        yield Path(path)
