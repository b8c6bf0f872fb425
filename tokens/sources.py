"""Sources: the files that --source names, the order in which they are read, and what the manifest records about them.

fineweb.py resolves its --source here:

    name, paths = choose_source(("books-*.parquet",))       # "books", {Path("books-00.parquet"): "books-00.parquet"}
    source = describe_local(name, paths)                    # for the manifest

and, for a dataset on the Hugging Face Hub:

    name, paths = choose_source(("fineweb-edu",))           # "fineweb-edu", {}
    source = describe_hub("fineweb-edu", subset=None, split=None, previous=None)
    for path in download_files(source, first_index=0, folder=Path("data/fineweb-edu/.source")):
        ...

The page of a dataset defines configurations and splits, in its card or by the names of its files. `datasets` knows
these rules, so it chooses the files of a configuration and split; it downloads no data here and runs no code of the
dataset. A path after --subset, such as FineWeb's sample/10BT/, chooses files without `datasets`:

    --subset sample/10BT/      the files below this path, of one format                 select_by_path
    --subset english           the files of this configuration's train split            select_by_config
    no --subset                the same for the configuration that is the default       choose_config
"""

import dataclasses
import hashlib
import json
import os
import re
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from system.cli import UserError, require
from system.hub_client import open_hub
from tokens import shards
from tokens.documents import DATASETS_BUILDERS, READERS, choose_reader, format_names, import_datasets, split_suffixes

if TYPE_CHECKING:
    from datasets import BuilderConfig

HUB_DATASETS = {  # name: (dataset, prefix of the paths of its files)
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample/100BT/"),
    "fineweb-100bt": ("HuggingFaceFW/fineweb", "sample/100BT/"),
}
# Folders in the standard library's folder that hold tests or other people's packages.
NOT_LIBRARY_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
DEFAULT_SPLIT = "train"
# Builders of `datasets` whose files have a reader in tokens/documents.py.
OWN_FORMATS = ("parquet", "json", "csv", "text")
# Settings of these builders that do not change the texts that are read.
NOT_READER_SETTINGS = set(
    "name version data_dir data_files description features columns batch_size chunksize block_size use_threads "
    "keep_linebreaks".split()
)
MAX_ERROR_CHARACTERS = 300  # of a message of `datasets`, which may print a whole card
CONTROL_CHARACTERS = r"[\0-\x1f\x7f-\x9f\\]"
FIRST_BYTES = 1 << 16  # of each local file, hashed into the source's revision


# ------------------------------------------------------------------------- what --source names


def choose_source(names: tuple[str, ...]) -> tuple[str, dict[Path, str]]:
    """What the words after --source mean: the name of the shards, and the local files with their names in the manifest.
    There are no local files if the source is on the Hub. Raises UserError."""
    # stdlib: the library of the Python that runs this.
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
    # Every pattern must name files, all of them readable.
    paths = []
    for pattern in patterns:
        # A file whose name has glob characters in it is meant literally.
        matches = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        readable = matches and all(os.path.isfile(p) and os.access(p, os.R_OK) for p in matches)
        known = f"stdlib, {', '.join(HUB_DATASETS)} or OWNER/NAME"
        require(readable, f"--source {pattern}: not a readable file; give files or globs, or {known}")
        paths += [Path(p) for p in matches]

    # Every file must have a reader.
    for path in paths:
        choose_reader(path)  # raises UserError

    # The manifest's names are printed, so they must not have control characters.
    return {path: re.sub(CONTROL_CHARACTERS, "_", path.name) for path in paths}


def find_common_name(paths: list[Path]) -> str:
    """Name for the shards of these files: the files' common name without a trailing number, or else their folder's."""
    # books-00.txt.gz and books-01.txt.gz are both "books".
    names = set()
    for path in paths:
        stem = path.name.removesuffix("".join(split_suffixes(path.name)))
        names.add(stem.rstrip("0123456789-_."))

    # If the names differ or are only numbers, the folder's name says more.
    common = names.pop() if len(names) == 1 else ""
    name = common or paths[0].resolve().parent.name
    return re.sub(r"[^\w.-]", "-", name) or "text"


def find_library_files() -> dict[Path, str]:
    """This Python's library files without tests, shuffled by the hash of their names so that val resembles train."""
    # {path: name in the manifest} of every module that is neither a test nor an installed package.
    root = Path(sysconfig.get_path("stdlib"))
    names = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not NOT_LIBRARY_FOLDERS & set(relative.parts):
            names[path] = relative.as_posix()

    # Sort by hash: in the order of names, val would be the modules that begin with "a".
    require(names, f"this Python has no library sources in {root}; give --source FILE... instead of stdlib")
    return dict(sorted(names.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest()))


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


def describe_hub(name: str, subset: str | None, split: str | None, previous: dict | None) -> dict:
    """The files of a Hub dataset as the manifest's `source`.

    name: of HUB_DATASETS, or OWNER/NAME.
    subset: a configuration of the dataset or, if there is none of this name, the first characters of its files' paths.
    split: of the configuration; None means train.
    previous: the source of a folder that was begun earlier. If it is the same choice of the same dataset, it stays as
    it is, whatever the Hub has now.
    Raises UserError.
    """
    from huggingface_hub.errors import EntryNotFoundError

    # Which dataset, and which part of it. What an earlier run has chosen stays.
    repo, default_subset = HUB_DATASETS.get(name, (name, ""))
    subset = default_subset if subset is None else subset
    if previous and (previous["name"], previous["subset"]) == (repo, subset):
        # Files that were chosen by their paths have no split.
        same_split = split is None if "split" not in previous else previous["split"] == (split or DEFAULT_SPLIT)
        if same_split:
            return previous

    # List the files at one revision, so that an upload in the meantime changes nothing.
    folder = subset.rpartition("/")[0] or None
    with open_hub() as api:
        revision = api.dataset_info(repo, expand=["sha"], timeout=10).sha
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        try:
            # Folders have no size; a path that leads out of the download folder is left out.
            sizes = {f.path: f.size for f in tree if hasattr(f, "size") and shards.RELATIVE_PATH.fullmatch(f.path)}
        except EntryNotFoundError:  # no such folder
            sizes = {}

        # A subset with a slash is a path, as names of configurations have none; other names may be either.
        configs = [] if "/" in subset else list_configs(repo, revision)
        is_path = "/" in subset or (subset not in ("", *configs) and any(path.startswith(subset) for path in sizes))
        if is_path:
            rule = f"--split {split} is for a configuration, but --subset {subset} is a path in {repo}"
            require(split is None, f"{rule}; leave out one of the two")
            paths = select_by_path(repo, subset, list(sizes))
            selection = {}
        else:
            config = choose_config(repo, revision, subset, configs)
            paths, selection = select_by_config(repo, revision, config, split or DEFAULT_SPLIT, sizes)

    # The manifest's entry: a path has no configuration and no split.
    files = [{"path": path, "bytes": sizes[path]} for path in paths]
    return {"name": repo, "subset": subset, **selection, "revision": revision, "files": files}


def select_by_path(repo: str, prefix: str, paths: list[str]) -> list[str]:
    """The files whose path starts with `prefix`: parquet, or else the next format of READERS that there is."""
    # {path: suffix} below the prefix. One format only, as datasets often hold the same documents in several.
    formats = {path: split_suffixes(path)[0].lower() for path in sorted(paths) if path.startswith(prefix)}
    available = [suffix for suffix in READERS if suffix in formats.values()]
    rule = f"whose path starts with {prefix!r}; choose with --subset FOLDER/"
    require(available, f"{repo} has no file of {', '.join(READERS)} {rule}")
    return [path for path, suffix in formats.items() if suffix == available[0]]


@contextmanager
def explain_datasets_errors(repo: str) -> Iterator[None]:
    """Turn an error of `datasets` about the dataset, such as a card that it cannot read, into a UserError. An error of
    the network or the Hub stays what it is: open_hub explains it."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        yield
    except (UserError, HfHubHTTPError, LocalEntryNotFoundError, httpx2.TransportError, ConnectionError):
        raise
    except Exception as e:  # of many kinds, because anyone may have written the card and named the files
        message = " ".join(str(e).split())[:MAX_ERROR_CHARACTERS]
        fix = "to choose files by their paths instead, give --subset FOLDER/"
        raise UserError(f"`datasets` finds no data in {repo} ({type(e).__name__}: {message}); {fix}") from None


def list_configs(repo: str, revision: str) -> list[str]:
    """The configurations of a Hub dataset; one that its page does not define is called "default"."""
    datasets = import_datasets()
    with explain_datasets_errors(repo):
        return datasets.get_dataset_config_names(repo, revision=revision)


def choose_config(repo: str, revision: str, subset: str, configs: list[str]) -> str:
    """The configuration that --subset names or, without it, the only one or the one that the page calls the default.
    Raises UserError."""
    datasets = import_datasets()
    listed = format_names(configs)

    # The one that was asked for.
    if subset:
        unknown = f"{repo} has no configuration and no path {subset!r}"
        require(subset in configs, f"{unknown}; choose with --subset: {listed}")
        return subset

    # The only one, or the default.
    with explain_datasets_errors(repo):
        default = datasets.get_dataset_default_config_name(repo, revision=revision)
    require(default, f"{repo} has several configurations; choose one with --subset: {listed}")
    return default


def select_by_config(
    repo: str, revision: str, config_name: str, split: str, sizes: dict[str, int]
) -> tuple[list[str], dict]:
    """The files of a configuration's split, and what the manifest says of the choice. Raises UserError.

    sizes: {path: bytes} of all files of the dataset at this revision.
    """
    # `datasets` resolves the card's patterns to the URLs of files: {split: [url, ...]}. Give it an empty cache, because
    # a used one may have an earlier listing.
    datasets = import_datasets()
    with explain_datasets_errors(repo), tempfile.TemporaryDirectory() as cache:
        builder = datasets.load_dataset_builder(repo, config_name, revision=revision, cache_dir=cache)
    data_files = {str(split_name): urls for split_name, urls in builder.config.data_files.items()}
    fix = f"choose with --split: {format_names(data_files)}"
    require(split in data_files, f"{repo} has no split {split!r} in its configuration {config_name}; {fix}")

    # URLs become paths in the repository. Patterns may overlap, so remove repeated files.
    base = f"hf://datasets/{repo}@{revision}/"
    paths = list(dict.fromkeys(url.removeprefix(base) for url in data_files[split]))
    for path in paths:
        require(path in sizes, f"{path!r}, which the card of {repo} names, is not among its files")

    # Use this project's readers if they read the files as the dataset's page says; otherwise `datasets` streams them.
    selection = {"config": config_name, "split": split}
    settings = changed_settings(builder.config)
    suffixes = {split_suffixes(path)[0].lower() for path in paths}
    has_own_reader = builder.name in OWN_FORMATS and suffixes <= {*READERS, ".txt"} and not settings
    if not has_own_reader:
        known = f"text is read from {', '.join(READERS)}, .txt and what `datasets` calls {', '.join(DATASETS_BUILDERS)}"
        require(builder.name in DATASETS_BUILDERS, f"the format of {repo} is {builder.name}; {known}")
        selection["reader"] = {"builder": builder.name, "settings": settings}
    return paths, selection


def changed_settings(config: "BuilderConfig") -> dict:
    """The reader settings that the card of a dataset changes, such as the separator of a csv file, as JSON values."""
    # The settings are the fields of a dataclass, most of which say how the file is read.
    settings = {}
    for field in dataclasses.fields(config):
        is_default = getattr(config, field.name) == field.default
        if field.name not in NOT_READER_SETTINGS and not is_default:
            settings[field.name] = getattr(config, field.name)

    # As the manifest would hold them: what JSON has no form for becomes a string.
    return json.loads(json.dumps(settings, default=str))


def download_files(source: dict, first_index: int, folder: Path) -> Iterator[Path]:
    """Download the files of a Hub source from `first_index` on into `folder`, whose lock the caller holds, and yield
    the path of each. A file whose download was cut off is downloaded anew; one that is complete is not. Raises
    UserError.

    source: as of describe_hub.
    """
    from huggingface_hub.utils import disable_progress_bars

    # fineweb.py shows a progress bar for the tokens.
    disable_progress_bars()
    for file in source["files"][first_index:]:
        with open_hub() as api:
            path = api.hf_hub_download(
                source["name"], file["path"], repo_type="dataset", revision=source["revision"], local_dir=folder
            )
        yield Path(path)
