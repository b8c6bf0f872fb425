"""Turn text into token shards: FineWeb, any dataset on the Hub, your own files, or Python's standard library.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens, into data/fineweb-edu
    python fineweb.py --source stdlib                       # Python's standard library: no download, a few seconds
    python fineweb.py --source 'books-*.parquet' --out data/books
    python fineweb.py --verify data/books
    python fineweb.py --adopt edu_fineweb10B                # shards of build-nanogpt or llm.c, as they are

After any interruption, the same command resumes at the shard in progress and ends with the same bytes.
"""

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from system.cli import UserError, print0, require, run_cli
from system.files import lock_folder
from tokens import shards, sources
from tokens.documents import Chunk, read
from tokens.prefetch import prefetch
from tokens.shards import Manifest, Shard
from tokens.tokenizer import EOT, bulk_encoder


@dataclass(frozen=True)
class Args:
    source: tuple[str, ...] = ("fineweb-edu",)
    """fineweb-edu, fineweb, fineweb-edu-100bt, fineweb-100bt; stdlib; a Hub dataset OWNER/NAME; or files or
    globs: parquet, jsonl, csv, arrow, and anything else as plain text, one document per file; text, jsonl and csv also
    as .gz, .bz2, .xz or .zst."""
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
    """Use only the files of a Hub dataset whose paths start with this."""
    text_column: str = "text"
    """Column (parquet, csv, arrow) or field (jsonl) that holds the text."""
    keep_source: bool = False
    """Keep downloaded files in OUT/.source."""
    verify: Path | None = None
    """Only check this folder of shards."""
    adopt: Path | None = None
    """Only make the manifest of this folder of shards, which another program made: then it can be verified and
    pushed."""


# ------------------------------------------------------------------------- tokens: chunks to shards


def encode(encoder, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Ids (n,) uint16 of a chunk with EOT before each document, and the positions of these EOTs."""
    tokens = encoder.encode_batch(chunk.texts).layout
    starts = np.asarray(tokens.offsets.data[: chunk.documents])
    return np.insert(np.asarray(tokens.content.data, np.uint16), starts, EOT), starts + np.arange(len(starts))


def next_shard(out: Path, name: str, manifest: Manifest) -> Path:
    index = len(manifest.shards)
    return out / f"{name}_{'train' if index else 'val'}_{index:06d}.{manifest.format}"


def add_shard(out: Path, name: str, manifest: Manifest, tokens: np.ndarray, documents: int, end: dict) -> Manifest:
    """Write a shard, then the manifest that lists it; a shard that no manifest lists yet is written again."""
    path = next_shard(out, name, manifest)
    shard = Shard(path.name, len(tokens), documents, shards.write_shard(path, tokens), end)
    manifest = replace(manifest, shards=[*manifest.shards, shard])
    shards.write_manifest(out, manifest)
    return manifest


def write_shards(chunks: Iterable[Chunk], out: Path, name: str, manifest: Manifest, report: Callable) -> Manifest:
    """Tokenize chunks, starting with the file in which `manifest` ends, into shards; returns the extended manifest.
    A shard is written in the background while the next one fills."""
    encoder, size, limit = bulk_encoder(), manifest.shard_tokens, manifest.limit_tokens or sys.maxsize
    done = sum(s.tokens for s in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # tokens of the first file already in shards
    filling, other = (np.empty(min(size, limit), np.uint16) for _ in range(2))
    filled = documents = file = used = 0  # used: tokens of the current file in earlier chunks
    with ThreadPoolExecutor(1) as writer:
        latest = writer.submit(lambda: manifest)
        for chunk in chunks:
            if done >= limit:
                break
            ids, starts = encode(encoder, chunk)
            if chunk.file != file:
                file, used = chunk.file, 0
            pos = min(skip, len(ids))
            skip -= pos
            while pos < len(ids) and done < limit:
                take = min(len(ids) - pos, size - filled, limit - done)
                filling[filled : filled + take] = ids[pos : pos + take]
                first, last = np.searchsorted(starts, (pos, pos + take))
                documents += int(last - first)
                filled, pos, done = filled + take, pos + take, done + take
                end = {"file": file, "token": used + pos}
                if filled == size:
                    latest = writer.submit(add_shard, out, name, latest.result(), filling, documents, end)
                    filling, other, filled, documents = other, filling, 0, 0
            used += len(ids)
            report(chunk.size, done)
        manifest = latest.result()
    return add_shard(out, name, manifest, filling[:filled], documents, end) if filled else manifest


# ------------------------------------------------------------------------- the run


def plan(args: Args, source: dict) -> Manifest:
    """The manifest of a folder that is yet to be filled."""
    total = sum(f["bytes"] for f in source["files"])
    size = min(shards.SHARD_TOKENS, total / 24, (args.limit_tokens or total) / 10)
    size = args.shard_size or max(1, int(float(f"{size:.0e}")))
    return Manifest({**source, "column": args.text_column}, args.format, size, args.limit_tokens)


def check_resumable(out: Path, name: str, planned: Manifest, old: Manifest | None) -> Manifest:
    """The manifest to go on from. Raises UserError if the folder holds files of others or was made in another way."""
    ours = [*(s.file for s in old.shards), next_shard(out, name, old).name] if old else []
    for path in shards.shard_files(out):
        hint = "" if old else f"; {shards.adoption(out)}"
        require(path.name in ours, f"{path} was not written by this command; choose another --out{hint}")
    if not (old and old.shards):
        shards.write_manifest(out, planned)  # from here on, the shards in this folder are ours
        return planned
    was, now = ({**m.source, **vars(m)} for m in (old, planned))
    for what in ("name", "subset", "column", "revision", "format", "shard_tokens", "limit_tokens"):
        why = f"{out} was made with {what} {was[what]}, not {now[what]}; choose another --out, or remove this one"
        require(was[what] == now[what], why)
    return old


def check_room(out: Path, manifest: Manifest, downloads: bool) -> None:
    """Raise UserError, before hours of work, if the disk is too small for the shards and two files of the source."""
    sizes, stated = [f["bytes"] for f in manifest.source["files"]], re.search(r"(\d+)BT", manifest.source["subset"])
    expected = int(stated[1]) * 1e9 if stated else sum(sizes) / 2  # FineWeb's samples are named by their size
    tokens = (manifest.limit_tokens or expected) - sum(s.tokens for s in manifest.shards)
    need, free = 2 * tokens + (sum(sorted(sizes)[-2:]) if downloads else 0), shutil.disk_usage(out).free
    room = f"{out} needs about {need / 1e9:.1f} GB but its disk has only {free / 1e9:.1f} GB free"
    require(need <= free, f"{room}; choose another --out or lower --limit-tokens")


def make_shards(out: Path, name: str, manifest: Manifest, paths: list[Path], keep_source: bool) -> Manifest:
    """Make the shards that the manifest does not list yet, of local files or else of the Hub's. Raises UserError."""
    from tqdm import tqdm

    check_room(out, manifest, downloads=not paths)
    source, limit, done = manifest.source, manifest.limit_tokens, sum(s.tokens for s in manifest.shards)
    first = manifest.shards[-1].end["file"] if manifest.shards else 0
    files = paths[first:] if paths else prefetch(sources.download(source, first, out / ".source"), 1)

    def used(path: Path) -> None:
        if not paths and not keep_source:
            path.unlink()

    def report(size: float, tokens: int) -> None:
        bar.set_description_str(f"{name}: {tokens / 1e6:,.1f}M tokens", refresh=False)
        bar.update(tokens - bar.n if limit else size)

    sizes = [f["bytes"] for f in source["files"]]
    total, start = (limit, done) if limit else (sum(sizes), sum(sizes[:first]))
    pace = 0.2 if sys.stderr.isatty() else 20  # seconds between updates; a log file needs few lines
    form = "{desc} {percentage:.0f}%|{bar}| [{elapsed}<{remaining}]"
    with tqdm(total=total, initial=start, desc=name, mininterval=pace, bar_format=form) as bar:
        chunks = prefetch(read(files, first, source["column"], used), 4)
        manifest = replace(write_shards(chunks, out, name, manifest, report), complete=True)
    require(manifest.shards, f"the source {source['name']} holds no documents; give another --source")
    shards.write_manifest(out, manifest)
    if not keep_source:
        shutil.rmtree(out / ".source", ignore_errors=True)
    return manifest


def remake_missing(out: Path, name: str, manifest: Manifest, paths: list[Path]) -> None:
    """Make missing shards of the manifest again (removed because damaged), with the same bytes, or raise UserError."""
    part = out / ".mend"
    for i, shard in enumerate(manifest.shards):
        path = out / shard.file
        if path.exists():
            shards.count_tokens(path)  # raises if it was cut
            continue
        print0(f"{path} is missing: making it again")
        part.mkdir(exist_ok=True)
        limit = sum(s.tokens for s in manifest.shards[: i + 1])
        before = replace(manifest, shards=manifest.shards[:i], limit_tokens=limit)
        made = make_shards(part, name, before, paths, keep_source=False).shards[-1]
        why = f"{path} is now another than {shards.MANIFEST} says: the source has changed; choose another --out"
        require(made.sha256 == shard.sha256, why)
        os.replace(part / shard.file, path)
        shutil.rmtree(part)


def fill(args: Args, out: Path, name: str, paths: dict[Path, str]) -> Manifest:
    """Make all shards of --source that are not in the folder yet."""
    old = shards.read_manifest(out)
    was = old.source if old else None
    source = sources.local(name, paths) if paths else sources.on_hub(args.source[0], args.subset, was)
    manifest = check_resumable(out, name, plan(args, source), old)
    remake_missing(out, name, manifest, list(paths))
    if manifest.complete:
        print0("nothing left to do")
        return manifest
    return make_shards(out, name, manifest, list(paths), args.keep_source)


def tell(out: Path, manifest: Manifest, seconds: float) -> None:
    """Print what there is now, and what to do with it."""
    tokens, documents = (sum(getattr(s, what) for s in manifest.shards) for what in ("tokens", "documents"))
    print0(f"{tokens:,} tokens, {documents:,} documents, {len(manifest.shards)} shards in {out} ({seconds:.1f} s)")
    if len(manifest.shards) == 1:
        return print0("warning: that is only the val shard; to get train shards, too, give a smaller --shard-size")
    data = f"--data-dir {shlex.quote(str(out))}"
    if tokens < 100_000_000:  # too little for gpt2-124m, which takes half a million tokens per step
        own = f"{data} --out-dir {shlex.quote(f'log/{out.name}')} --sample-prompt ''"  # the preset's is Python's "def "
        return print0(f"next: python train_gpt2.py quickstart {own if out != Path('data/stdlib') else ''}".strip())
    return print0(f"next: python train_gpt2.py {data}")


def main() -> None:
    import tyro

    args, began = tyro.cli(Args, description=__doc__), time.monotonic()
    if args.verify:
        wrong = shards.verify(args.verify)
        mend = f"{args.verify} has {len(wrong)} problem(s); remove those files and make or pull them again"
        require(not wrong, "\n".join([*wrong, mend]))
        return print0(f"{args.verify}: every shard is intact")
    if args.adopt:
        return tell(args.adopt, shards.adopt(args.adopt), time.monotonic() - began)
    require(args.source, "--source needs a name or files")
    sizes = [n for n in (args.shard_size, args.limit_tokens) if n is not None]
    require(all(n > 0 for n in sizes), "--shard-size and --limit-tokens must be above 0")
    name, paths = sources.choose(args.source)
    out = args.out or Path("data") / name
    try:
        with lock_folder(out):
            manifest = fill(args, out, name, paths)
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e}; fix that, then run the same command again") from None
    return tell(out, manifest, time.monotonic() - began)


if __name__ == "__main__":
    run_cli(main)
