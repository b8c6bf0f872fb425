"""Turn text into token shards: FineWeb, any dataset on the Hub, your own files, or Python's standard library.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens, into data/fineweb-edu
    python fineweb.py --source stdlib                       # Python's standard library: no download, a few seconds
    python fineweb.py --source 'books-*.parquet' --out data/books
    python fineweb.py --verify data/books                   # read every byte, and check it against the manifest
    python fineweb.py --verify edu_fineweb10B               # shards of build-nanogpt or llm.c: also write a manifest

After any interruption, the same command resumes at the shard in progress and ends with the same bytes.
"""

import os
import re
import shlex
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from system.cli import UserError, print0, require, run_cli
from system.files import free_bytes, lock_folder
from tokens import shards, sources
from tokens.documents import choose_reader, read_files, read_text
from tokens.prefetch import prefetch
from tokens.shard_writer import next_shard_path, write_shards
from tokens.shards import Manifest

# Settings of the presets that are suggested for the user's own text. They are repeated here because training/presets.py
# would import torch.
FINETUNE_SEQUENCE_LENGTH, FINETUNE_BATCH_TOKENS, FINETUNE_EPOCHS = 1024, 32_768, 2
FINETUNE_VAL_EVERY = 25
QUICKSTART_SEQUENCE_LENGTH, QUICKSTART_BATCH_TOKENS, QUICKSTART_STEPS = 256, 4096, 80

FINETUNE_EVALUATIONS = 5  # at least, in a suggested run


@dataclass(frozen=True)
class Args:
    source: tuple[str, ...] = ("fineweb-edu",)
    """fineweb-edu, fineweb, fineweb-edu-100bt, fineweb-100bt; stdlib; a Hub dataset OWNER/NAME; or files or
    globs: parquet, csv, jsonl (also named ndjson or json: an object per line, or one array), and plain text (.txt, .md,
    .py and the like, or no suffix), one document per file; all but parquet also as .gz, .bz2, .xz or .zst."""
    out: Path | None = None
    """Folder for the shards; default data/NAME."""
    shard_size: int | None = None
    """Tokens per shard; default 1/24 of the source's bytes or 1/10 of --limit-tokens, whichever is less, rounded to one
    digit, at most 100,000,000: even small sources get several shards, the first of which is val."""
    format: Literal["npy", "bin"] = "npy"
    """npy as in build-nanogpt, bin as in llm.c."""
    limit_tokens: int | None = None
    """Stop after this many tokens."""
    subset: str | None = None
    """Configuration of a Hub dataset; or the start of its files' paths, as in sample/10BT/."""
    split: str | None = None
    """Split of the configuration; default train."""
    text_column: str = "text"
    """Column (parquet, csv) or field (jsonl, ndjson, json) that holds the text."""
    split_on: str | None = None
    """Plain text files: a new document begins after each of these, as in --split-on '<|endoftext|>'."""
    keep_source: bool = False
    """Keep downloaded files in OUT/.source."""
    verify: Path | None = None
    """Only check this folder of shards. If it has no manifest, as with shards of another program, write one."""


# ------------------------------------------------------------------------- before the work


def plan_manifest(args: Args, source: dict) -> Manifest:
    """The manifest of a folder that is yet to be filled."""
    # The listing of a Hub dataset gives sizes, too, so nothing has to be downloaded for this.
    source_bytes = sum(file["bytes"] for file in source["files"])

    # The default size of a shard, rounded to one digit, such as "4e+07".
    shard_tokens = args.shard_size
    if shard_tokens is None:
        largest = min(shards.SHARD_TOKENS, source_bytes / 24, (args.limit_tokens or source_bytes) / 10)
        rounded = float(f"{largest:.0e}")
        shard_tokens = max(1, int(rounded))

    # Of the settings, the manifest has those that decide about the bytes of the shards.
    source = {**source, "column": args.text_column}
    if args.split_on:
        source["split_on"] = args.split_on
    return Manifest(source, args.format, shard_tokens, args.limit_tokens)


def load_or_start(out: Path, name: str, planned: Manifest, previous: Manifest | None) -> Manifest:
    """The manifest to continue from: the folder's own, or the planned one, which is then written. Raises UserError if
    the folder holds other files or was made in another way."""
    # Every shard in the folder must be in its manifest, or be the one that was in progress.
    own_names = []
    hint = f"; for shards of another program: python fineweb.py --verify {shlex.quote(str(out))}"
    if previous:
        own_names = [shard.file for shard in previous.shards] + [next_shard_path(out, name, previous).name]
        hint = ""
    for path in shards.shard_files(out):
        require(path.name in own_names, f"{path} was not written by this command; choose another --out{hint}")

    # From the moment the manifest exists, the shards in this folder are known to be this command's.
    if previous is None or not previous.shards:
        shards.write_manifest(out, planned)
        return planned

    # Shards that exist cannot be continued with other settings.
    before = {**previous.source, **vars(previous)}
    now = {**planned.source, **vars(planned)}
    for key in ("name", "subset", "split", "column", "split_on", "revision", "format", "shard_tokens", "limit_tokens"):
        difference = f"{out} was made with {key} {before.get(key)}, not {now.get(key)}"
        require(before.get(key) == now.get(key), f"{difference}; choose another --out, or remove this one")
    return previous


def check_disk_space(out: Path, manifest: Manifest, downloads: bool) -> None:
    """Raise UserError, before hours of work, if the disk is too small for the shards and two files of the source."""
    file_bytes = [file["bytes"] for file in manifest.source["files"]]

    # The tokens that are still to be written. FineWeb's samples state their number ("10BT"); other text has about one
    # token per four bytes, so one per two is a safe estimate.
    stated = re.search(r"(\d+)BT", manifest.source["subset"])
    expected_tokens = int(stated[1]) * 1e9 if stated else sum(file_bytes) / 2
    finished_tokens = sum(shard.tokens for shard in manifest.shards)
    tokens = (manifest.limit_tokens or expected_tokens) - finished_tokens

    # While one downloaded file is read, the next one arrives.
    download_bytes = sum(sorted(file_bytes)[-2:]) if downloads else 0
    needed = 2 * tokens + download_bytes

    free = free_bytes(out)
    room = f"{out} needs about {needed / 1e9:.1f} GB but its disk has only {free / 1e9:.1f} GB free"
    require(needed <= free, f"{room}; choose another --out or lower --limit-tokens")


# ------------------------------------------------------------------------- the work


def make_shards(out: Path, name: str, manifest: Manifest, paths: list[Path], keep_source: bool) -> Manifest:
    """Make the shards that the manifest does not list yet, of local files or else of the Hub's. Raises UserError."""
    from tqdm import tqdm

    # Check before the work, which may take hours.
    check_disk_space(out, manifest, downloads=not paths)
    source = manifest.source
    limit = manifest.limit_tokens
    download_folder = out / ".source"

    # Begin with the file in which the last finished shard ends. While a file from the Hub is read, the next one is
    # downloaded.
    first_index = manifest.shards[-1].end["file"] if manifest.shards else 0
    if paths:
        files = paths[first_index:]
    else:
        files = prefetch(sources.download_files(source, first_index, download_folder), 1)

    # Files from the Hub need more disk than the shards, so each one is deleted after it was read.
    def delete_downloaded(path: Path) -> None:
        if not paths and not keep_source:
            path.unlink()

    # The progress bar counts tokens if their number is known, otherwise bytes of the source.
    file_bytes = [file["bytes"] for file in source["files"]]
    if limit:
        total = limit
        initial = sum(shard.tokens for shard in manifest.shards)
    else:
        total = sum(file_bytes)
        initial = sum(file_bytes[:first_index])
    update_seconds = 0.2 if sys.stderr.isatty() else 20  # a log file needs few lines
    bar_format = "{desc} {percentage:.0f}%|{bar}| [{elapsed}<{remaining}]"

    def report(source_bytes: float, tokens: int) -> None:
        bar.set_description_str(f"{name}: {tokens / 1e6:,.1f}M tokens", refresh=False)
        bar.update(tokens - bar.n if limit else source_bytes)

    # A few chunks are read while others are tokenized.
    with tqdm(total=total, initial=initial, desc=name, mininterval=update_seconds, bar_format=bar_format) as bar:
        reader_args = (source["column"], delete_downloaded, source.get("reader"), source.get("split_on"))
        texts = read_files(files, first_index, *reader_args)
        chunks = prefetch(texts, 4)
        manifest = write_shards(chunks, out, name, manifest, report)

    # A source of blank lines alone has no tokens.
    require(manifest.shards, f"the source {source['name']} holds no documents; give another --source")

    # Set `complete` last: it says that no shard is missing.
    manifest = replace(manifest, complete=True)
    shards.write_manifest(out, manifest)

    if not keep_source:
        shutil.rmtree(download_folder, ignore_errors=True)
    return manifest


def remake_missing(out: Path, name: str, manifest: Manifest, paths: list[Path]) -> None:
    """Make missing shards of the manifest again (removed because damaged), with the same bytes, or raise UserError."""
    remake_folder = out / ".remake"
    for i, shard in enumerate(manifest.shards):
        # If the shard exists, check only its size: its hash is checked whenever it is read.
        path = out / shard.file
        if path.exists():
            shards.count_tokens(path)  # raises UserError if it was cut
            continue
        print0(f"{path} is missing: making it again")

        # Make this one shard in a folder of its own, from a manifest that lists the shards before it and ends here.
        remake_folder.mkdir(exist_ok=True)
        end = sum(s.tokens for s in manifest.shards[: i + 1])
        up_to_here = replace(manifest, shards=manifest.shards[:i], limit_tokens=end)
        remade = make_shards(remake_folder, name, up_to_here, paths, keep_source=False).shards[-1]

        # Keep it only if it has the hash that the manifest lists.
        difference = f"{path} was made again but differs from its entry in {shards.MANIFEST}: the source has changed"
        require(remade.sha256 == shard.sha256, f"{difference}; choose another --out")
        os.replace(remake_folder / shard.file, path)
        shutil.rmtree(remake_folder)


def fill_folder(args: Args, out: Path, name: str, paths: dict[Path, str]) -> Manifest:
    """Make all shards of --source that are not in the folder yet. Raises UserError."""
    # What the source is now; a folder that was begun earlier keeps its revision of a Hub dataset.
    previous = shards.read_manifest(out)
    if paths:
        source = sources.describe_local(name, paths)
    else:
        previous_source = previous.source if previous else None
        source = sources.describe_hub(args.source[0], args.subset, args.split, previous_source)

    # Continue or start, repair, then make what is left.
    manifest = load_or_start(out, name, plan_manifest(args, source), previous)
    remake_missing(out, name, manifest, list(paths))
    if manifest.complete:
        print0("nothing left to do")
        return manifest
    return make_shards(out, name, manifest, list(paths), args.keep_source)


# ------------------------------------------------------------------------- the command line


def print_summary(out: Path, manifest: Manifest, seconds: float) -> None:
    """Print what the folder holds now, and the command that trains on it."""
    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    print0(f"{tokens:,} tokens, {documents:,} documents, {len(manifest.shards)} shards in {out} ({seconds:.1f} s)")

    # The first shard is for validation, so one shard is not enough to train.
    if len(manifest.shards) == 1:
        print0("warning: that is only the val shard; to get train shards, too, give a smaller --shard-size")
        return

    print0("\n".join(suggest_training(out, manifest)))


def suggest_training(out: Path, manifest: Manifest) -> list[str]:
    """The lines that say how to train on a folder, with commands to paste."""
    val_tokens, *train_sizes = [shard.tokens for shard in manifest.shards]
    train_tokens = sum(train_sizes)
    data_flag = f"--data-dir {shlex.quote(str(out))}"

    # quickstart's own text needs no flags; a data set of this size is enough to train 124M parameters.
    if out == Path("data/stdlib"):
        return ["next: python train_gpt2.py quickstart"]
    if train_tokens >= 100_000_000:
        preset = "llmc-124m" if manifest.source["name"] == "fineweb" else "gpt2-124m"
        return [f"next, on a machine with GPUs: ./train.sh {preset} {data_flag}"]

    # The user's own text. A sequence lies within one shard, so a short text needs shorter sequences. Returns the
    # sequence length, T at the most, and the flag that sets it if it is not T.
    def length_flag(T: int) -> tuple[int, str]:
        longest = min(val_tokens, max(train_sizes)) - 1
        if longest >= T:
            return T, ""
        T = 1 << max(0, longest.bit_length() - 1)  # a power of two divides every batch
        return T, f" --sequence-length {T}"

    # finetune runs for a number of epochs. A very short text needs smaller batches to have at least a few steps.
    T, flags = length_flag(FINETUNE_SEQUENCE_LENGTH)
    sequences = sum((size - 1) // T for size in train_sizes)
    batch = FINETUNE_BATCH_TOKENS
    if FINETUNE_EPOCHS * sequences * T < 8 * batch:
        batch = T * max(1, FINETUNE_EPOCHS * sequences // 8)
        flags += f" --total-batch-size {batch}"
    steps = FINETUNE_EPOCHS * sequences * T // batch
    # The preset evaluates too seldom to draw the curve of a short run.
    if steps < FINETUNE_EVALUATIONS * FINETUNE_VAL_EVERY:
        period = max(1, steps // FINETUNE_EVALUATIONS)
        flags += f" --val-every {period} --save-every {period}"
    finetune = f"python train_gpt2.py finetune {data_flag} --out-dir {shlex.quote(f'log/{out.name}-finetune')}{flags}"

    # quickstart runs for a number of steps.
    _, flags = length_flag(QUICKSTART_SEQUENCE_LENGTH)
    epochs = QUICKSTART_STEPS * QUICKSTART_BATCH_TOKENS / train_tokens
    quickstart = f"python train_gpt2.py quickstart {data_flag} --out-dir {shlex.quote(f'log/{out.name}')}{flags}"
    return [
        f"next, fine-tune OpenAI's GPT-2: {FINETUNE_EPOCHS} epochs of {train_tokens:,} train tokens, {steps:,} steps",
        f"  {finetune}",
        f"or train a small GPT from scratch: {epochs:,.1f} epochs, {QUICKSTART_STEPS} steps (another number: --epochs)",
        f"  {quickstart} --sample-prompt @val",
    ]


def verify_folder(folder: Path) -> None:
    """Check every byte of a folder of shards, and write the manifest if it has none. Raises UserError for any problem.

    Without a manifest there are no hashes to compare with: headers, sizes and ids are checked.
    """
    # With a manifest: every shard must match it.
    manifest = shards.read_manifest(folder)
    if manifest is not None:
        problems = shards.find_problems(folder)
        if problems:
            lines = [f"{file}: {problem}" for file, problem in problems]
            fix = how_to_repair(folder, manifest, [file for file, _ in problems])
            raise UserError("\n".join([*lines, f"{folder} has {len(problems)} problem(s). {fix}"]))
        print0(f"{folder}: every shard is intact")
        return

    # Without a manifest: create it, so that later checks notice every change.
    try:
        manifest = shards.create_manifest(folder)
    except OSError as e:
        problem = f"{folder} has no {shards.MANIFEST}, and it cannot be written: {e.strerror}"
        raise UserError(f"{problem}; copy the folder to a disk that you can write to") from None

    # Say that the folder has a new file.
    tokens = sum(shard.tokens for shard in manifest.shards)
    documents = sum(shard.documents for shard in manifest.shards)
    found = f"{tokens:,} tokens, {documents:,} documents, {len(manifest.shards)} shards in {folder}"
    print0(f"wrote {shards.MANIFEST}: {found}; headers, sizes and ids are good, and from now on hashes are checked")


def how_to_repair(folder: Path, manifest: Manifest, files: list[str]) -> str:
    """How to repair a folder with a problem in each of these files: a command to paste, as far as it is known."""

    def quote(names: list[str]) -> str:
        return shlex.join(str(folder / name) for name in names)

    # Shards that the manifest does not list are in the way of fineweb.py. They may be somebody's: move them.
    commands = []
    listed = [shard.file for shard in manifest.shards]
    unlisted = [name for name in dict.fromkeys(files) if name not in listed and name != shards.MANIFEST]
    if unlisted:
        other_folder = quote([f"not-in-{shards.MANIFEST}"])
        commands += [f"mkdir -p {other_folder}", f"mv {quote(unlisted)} {other_folder}"]

    # Damaged shards are removed, because only what is missing is made again.
    damaged = [name for name in listed if name in files and (folder / name).exists()]
    if damaged:
        commands.append(f"rm {quote(damaged)}")

    # Make the shards again by the command that made the folder. Of the user's own files only the names are known.
    note = ""
    if set(files) != set(unlisted):
        make = make_command(folder, manifest)
        if make:
            commands.append(make)
            note = f"\nIf the folder was pulled, end with: python hub.py pull-data OWNER/NAME {quote([''])}"
        else:
            note = "\nRun the command that made the folder (fineweb.py) or pulled it (hub.py pull-data) again."
    command = f"To repair it:\n  {' && '.join(commands)}" if commands else "To repair it:"
    return command + note


def make_command(folder: Path, manifest: Manifest) -> str | None:
    """The command that made a folder, to paste, or None for files of the user's own, of which the manifest does not
    know where they are."""
    # The source: one of HUB_DATASETS, whose name is in the names of its shards, another dataset, or the library.
    source = manifest.source
    shard_names = {shards.SHARD_NAME.fullmatch(shard.file)["name"] for shard in manifest.shards}
    shard_name = min(shard_names, default="")
    is_on_hub = "/" in source["name"]
    if is_on_hub and sources.HUB_DATASETS.get(shard_name) == (source["name"], source["subset"]):
        flags = {"--source": shard_name}
    elif is_on_hub:
        flags = {"--source": source["name"], "--subset": source["subset"], "--split": source.get("split")}
    elif source["name"] == "stdlib":
        flags = {"--source": "stdlib"}
    else:
        return None

    # The settings; those that are None or at their defaults are left out.
    flags |= {"--out": folder, "--shard-size": manifest.shard_tokens, "--limit-tokens": manifest.limit_tokens}
    flags |= {"--split-on": source.get("split_on")}
    if manifest.format != Args.format:
        flags["--format"] = manifest.format
    if source["column"] != Args.text_column:
        flags["--text-column"] = source["column"]
    words = [str(word) for flag, value in flags.items() if value for word in (flag, value)]
    return shlex.join(["python", "fineweb.py", *words])


def main() -> None:
    import tyro

    # --verify only checks a folder.
    start_time = time.monotonic()
    args = tyro.cli(Args, description=__doc__)
    if args.verify:
        verify_folder(args.verify)
        return

    # Flags that cannot work are refused before anything is made.
    require(args.source, "--source needs a name or files")
    counts = [n for n in (args.shard_size, args.limit_tokens) if n is not None]
    require(all(n > 0 for n in counts), "--shard-size and --limit-tokens must be above 0")

    # So are flags that do not go with the source.
    name, paths = sources.choose_source(args.source)
    is_local = bool(paths)
    hub_flags = "--subset and --split are for a dataset on the Hub, OWNER/NAME"
    require(not (is_local and (args.subset or args.split)), f"{hub_flags}; leave them out for {name}")
    has_text = any(choose_reader(path) is read_text for path in paths)
    require(has_text or args.split_on is None, f"--split-on is for plain text files, and {name} has none; leave it out")
    require(args.split_on != "", "--split-on '' would split everywhere; give the text between documents")

    # One process at a time fills a folder.
    out = args.out or Path("data") / name
    with lock_folder(out):
        manifest = fill_folder(args, out, name, paths)
    print_summary(out, manifest, time.monotonic() - start_time)


if __name__ == "__main__":
    run_cli(main)
