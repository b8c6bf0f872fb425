"""Turn text into token shards: FineWeb, any dataset on the Hub, your own files, or Python's standard library.

    python fineweb.py                                       # FineWeb-Edu, 10B tokens, into data/fineweb-edu
    python fineweb.py --source stdlib                       # Python's standard library: no download, a few seconds
    python fineweb.py --source 'books-*.parquet' --out data/books
    python fineweb.py --verify data/books

After any interruption, the same command resumes at the shard in progress and ends with the same bytes.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Literal

import numpy as np

import shards
from cli import UserError, print0, run_cli
from documents import Chunk, ahead, read
from files import locked
from hf import open_hub
from shards import Manifest, Shard
from tokenizer import EOT, bulk_encoder

HUB = {  # name: dataset, path prefix of its files
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample/10BT/"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample/10BT/"),
    "fineweb-edu-100bt": ("HuggingFaceFW/fineweb-edu", "sample/100BT/"),
    "fineweb-100bt": ("HuggingFaceFW/fineweb", "sample/100BT/"),
}
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Args:
    source: tuple[str, ...] = ("fineweb-edu",)
    """fineweb-edu, fineweb, fineweb-edu-100bt, fineweb-100bt; stdlib; a Hub dataset OWNER/NAME; or files or
    globs: parquet, jsonl, and anything else as plain text, one document per file."""
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
    """Use only the parquet files of a Hub dataset whose paths start with this."""
    text_column: str = "text"
    """Column (parquet) or field (jsonl) that holds the text."""
    keep_source: bool = False
    """Keep downloaded files in OUT/.source."""
    verify: Path | None = None
    """Only check this folder of shards."""


# ------------------------------------------------------------------------- sources: which files, in which order


def hub_source(repo: str, subset: str) -> dict:
    """The parquet files of a Hub dataset at its current revision. Raises UserError."""
    folder = subset.rpartition("/")[0] or None
    with open_hub(repo, hint="; without network: python fineweb.py --source stdlib") as (api, repo):
        revision = api.dataset_info(repo, expand=["sha"], timeout=10).sha
        tree = api.list_repo_tree(repo, folder, repo_type="dataset", revision=revision, recursive=True)
        sizes = {f.path: f.size for f in tree if hasattr(f, "size") and shards.INSIDE.fullmatch(f.path)}
    files = [{"path": p, "bytes": sizes[p]} for p in sorted(sizes) if p.startswith(subset) and p.endswith(".parquet")]
    if not files:
        raise UserError(f"{repo} has no parquet file whose path starts with {subset!r}; choose with --subset FOLDER/")
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


def given_files(patterns: tuple[str, ...]) -> dict[Path, str]:
    """Files of each pattern in turn, and their names in the manifest. Raises UserError."""
    found = []
    for pattern in patterns:
        paths = [pattern] if os.path.exists(pattern) else sorted(glob(pattern, recursive=True))
        if not paths or not all(os.path.isfile(p) and os.access(p, os.R_OK) for p in paths):
            raise UserError(f"--source {pattern}: not a readable file; or give stdlib, {', '.join(HUB)} or OWNER/NAME")
        found += map(Path, paths)
    return {p: re.sub(r"[\0-\x1f\x7f-\x9f\\]", "_", p.name) for p in found}


def common_name(paths: list[Path]) -> str:
    """Name for the shards of these files: the files' common name without a trailing number, or else their folder's."""
    names = {p.stem.rstrip("0123456789-_.") for p in paths}
    name = (names.pop() if len(names) == 1 else "") or paths[0].resolve().parent.name
    return re.sub(r"[^\w.-]", "-", name) or "text"


def library_files() -> dict[Path, str]:
    """This Python's library files without tests, shuffled by the hash of their names so that val resembles train."""
    root = Path(sysconfig.get_path("stdlib"))
    names = {p: p.relative_to(root).as_posix() for p in root.rglob("*.py")}
    names = {p: n for p, n in names.items() if not NOT_LIBRARY & set(n.split("/"))}
    if not names:
        raise UserError(f"this Python has no library sources in {root}; give --source FILE... instead of stdlib")
    return dict(sorted(names.items(), key=lambda item: hashlib.sha256(item[1].encode()).digest()))


def local_source(name: str, paths: dict[Path, str]) -> dict:
    """Local files as a source; its revision is a hash of their names, sizes and first bytes, cheap but telling."""
    files = [{"path": label, "bytes": path.stat().st_size} for path, label in paths.items()]
    digest = hashlib.sha256(json.dumps(files).encode())
    for path in paths:
        with open(path, "rb") as f:
            digest.update(f.read(1 << 16))
    return {"name": name, "subset": "", "revision": digest.hexdigest()[:16], "files": files}


# ------------------------------------------------------------------------- tokens: chunks to shards


def encode(encoder, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """Ids (n,) uint16 of a chunk with EOT before each document, and the positions of these EOTs."""
    tokens = encoder.encode_batch(chunk.texts).layout
    starts = np.asarray(tokens.offsets.data[: chunk.documents])
    return np.insert(np.asarray(tokens.content.data, np.uint16), starts, EOT), starts + np.arange(len(starts))


def next_shard(out: Path, name: str, manifest: Manifest) -> Path:
    index = len(manifest.shards)
    return out / f"{name}_{'train' if index else 'val'}_{index:06d}.{manifest.format}"


def write_shards(chunks: Iterable[Chunk], out: Path, name: str, manifest: Manifest, report: Callable) -> Manifest:
    """Tokenize chunks, starting with the file in which `manifest` ends, into shards; returns the extended manifest.

    Each shard, then the manifest that lists it, is written in the background while the next shard fills.
    """
    encoder, size, limit = bulk_encoder(), manifest.shard_tokens, manifest.limit_tokens or sys.maxsize
    done = sum(s.tokens for s in manifest.shards)
    skip = manifest.shards[-1].end["token"] if manifest.shards else 0  # tokens of the first file already in shards
    filling, other = (np.empty(min(size, limit), np.uint16) for _ in range(2))
    filled = documents = file = used = 0  # used: tokens of the current file in earlier chunks

    def finish(manifest: Manifest, tokens: np.ndarray, documents: int, end: dict) -> Manifest:
        path = next_shard(out, name, manifest)
        shard = Shard(path.name, len(tokens), documents, shards.write_shard(path, tokens), end)
        manifest = replace(manifest, shards=[*manifest.shards, shard])
        shards.write_manifest(out, manifest)
        return manifest

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
                documents += int(np.diff(np.searchsorted(starts, (pos, pos + take)))[0])
                filled, pos, done = filled + take, pos + take, done + take
                end = {"file": file, "token": used + pos}
                if filled == size:
                    latest = writer.submit(finish, latest.result(), filling, documents, end)
                    filling, other, filled, documents = other, filling, 0, 0
            used += len(ids)
            report(chunk.size, done)
        manifest = latest.result()
        return finish(manifest, filling[:filled], documents, end) if filled else manifest


# ------------------------------------------------------------------------- the run


@contextmanager
def locked_output(out: Path):
    """Lock the folder for this run; turn errors in writing to it into a UserError."""
    try:
        with locked(out):
            yield
    except KeyboardInterrupt:
        print0("\nstopped; run the same command again to resume")
        raise
    except OSError as e:
        raise UserError(f"cannot write to {out}: {e}; fix that, then run the same command again") from None


def check_resumable(out: Path, name: str, planned: Manifest, old: Manifest | None) -> Manifest:
    """The manifest to resume from. Raises UserError for other parameters, foreign files or damage."""
    ours = {s.file: s.tokens for s in old.shards} if old else {}
    was, now = ({**m.source, **vars(m)} for m in (old or planned, planned))
    for what in [k for k in now if ours and k not in ("source", "shards", "complete") and now[k] != was[k]]:
        if what == "revision":
            raise UserError(f"{out} was started from another version of the source; remove it, or choose another --out")
        raise UserError(f"{out} was made with {what} {was[what]}, not {now[what]}"[:400] + "; choose another --out")
    for path in shards.shard_files(out):
        if path.name not in ours and not (old and path == next_shard(out, name, old)):
            raise UserError(f"{path} was not written by this command; choose another --out")
    for file, tokens in ours.items():
        if (out / file).exists() and shards.count_tokens(out / file) != tokens:
            raise UserError(f"{out / file} is damaged; remove it and run the same command again")
    if ours:
        return old
    shards.write_manifest(out, planned)  # from here on, the shards in this folder are ours
    return planned


def make_shards(out: Path, name: str, manifest: Manifest, paths: list[Path], keep_source: bool) -> Manifest:
    """Make the missing shards, from local paths or else from the Hub. Raises UserError."""
    from tqdm import tqdm

    source, limit, done = manifest.source, manifest.limit_tokens, sum(s.tokens for s in manifest.shards)
    sizes, stated = [f["bytes"] for f in source["files"]], re.search(r"(\d+)BT", source["subset"])
    expected = limit or (int(stated[1]) * 1e9 if stated else sum(sizes) / 2)  # FineWeb's samples are named by size
    need = 2 * (expected - done) + (0 if paths else sum(sorted(sizes)[-2:]))
    if need > (free := shutil.disk_usage(out).free):
        room = f"{out} needs about {need / 1e9:.1f} GB but its disk has only {free / 1e9:.1f} GB free"
        raise UserError(f"{room}; free some space, choose another --out, or lower --limit-tokens")
    first = manifest.shards[-1].end["file"] if manifest.shards else 0
    files = paths[first:] if paths else ahead(download(source, first, out / ".source"), 1)
    drop = (lambda path: None) if paths or keep_source else Path.unlink
    began, seen = time.monotonic(), 0
    total, start = (limit, done) if limit else (sum(sizes), sum(sizes[:first]))
    form = "{desc} {percentage:.0f}%|{bar}| [{elapsed}<{remaining}]"
    pace = 0.2 if sys.stderr.isatty() else 20  # seconds between updates; a log file needs few lines
    bar = tqdm(total=total, initial=start, desc=name, mininterval=pace, bar_format=form)

    def report(size: float, done: int) -> None:
        nonlocal seen
        seen += size
        rate = seen / 1e6 / (time.monotonic() - began)
        bar.set_description_str(f"{name}: {done / 1e6:,.1f}M tokens, {rate:.0f} MB/s", refresh=False)
        bar.update(min(done - bar.n if limit else size, total - bar.n))

    with bar:
        chunks = ahead(read(files, first, source["column"], drop), 4)
        manifest = replace(write_shards(chunks, out, name, manifest, report), complete=True)
    if not manifest.shards:
        raise UserError(f"the source {source['name']} holds no documents; give another --source")
    shards.write_manifest(out, manifest)
    if not keep_source:
        shutil.rmtree(out / ".source", ignore_errors=True)
    return manifest


def remake_missing(out: Path, name: str, manifest: Manifest, paths: list[Path]) -> None:
    """Make missing shards of the manifest again (removed because damaged), with the same bytes, or raise UserError."""
    for i, shard in enumerate(manifest.shards):
        if (out / shard.file).exists():
            continue
        print0(f"{out / shard.file} is missing: making it again")
        (part := out / ".mend").mkdir(exist_ok=True)
        until = sum(s.tokens for s in manifest.shards[: i + 1])
        before = replace(manifest, shards=manifest.shards[:i], limit_tokens=until)
        made = make_shards(part, name, before, paths, False).shards[-1]
        if made.sha256 != shard.sha256:
            why = f"now has sha256 {made.sha256}, but {shards.MANIFEST} says {shard.sha256}: the source has changed"
            raise UserError(f"{out / shard.file} {why}; choose another --out")
        os.replace(part / shard.file, out / shard.file)
        shutil.rmtree(part)


def main() -> None:
    import tyro

    args, began = tyro.cli(Args, description=__doc__), time.monotonic()
    if args.verify:
        if wrong := shards.verify(args.verify):
            wrong.append(f"{args.verify} has {len(wrong)} problem(s); remove those files and make or pull them again")
            raise UserError("\n".join(wrong))
        return print0(f"{args.verify}: every shard is intact")
    if not args.source or any(n is not None and n < 1 for n in (args.shard_size, args.limit_tokens)):
        raise UserError("--source needs a name or files; --shard-size and --limit-tokens must be above 0")
    first, alone = args.source[0], len(args.source) == 1
    dataset = re.fullmatch(r"[\w-]+/[\w-][\w.-]*", first) and not glob(first) and not Path(first).suffix[1:].isalpha()
    on_hub, library = alone and (first in HUB or dataset), alone and first == "stdlib"
    paths = {} if on_hub else library_files() if library else given_files(args.source)
    name = first.rpartition("/")[2] if on_hub or library else common_name(list(paths))
    out = args.out or Path("data") / name
    with locked_output(out):
        old = shards.read_manifest(out)
        repo, subset = HUB.get(first, (first, ""))
        subset = subset if args.subset is None else args.subset
        if not on_hub:
            source = local_source(name, paths)
        elif old and (old.source["name"], old.source["subset"]) == (repo, subset):
            source = old.source  # at the revision it started with, whatever the Hub has now
        else:
            source = hub_source(repo, subset)
        total = sum(f["bytes"] for f in source["files"])
        size = min(shards.SHARD_TOKENS, total / 24, (args.limit_tokens or total) / 10)
        size = args.shard_size or max(1, int(float(f"{size:.0e}")))
        planned = Manifest({**source, "column": args.text_column}, args.format, size, args.limit_tokens)
        manifest = check_resumable(out, name, planned, old)
        remake_missing(out, name, manifest, list(paths))
        if not (was_complete := manifest.complete):
            manifest = make_shards(out, name, manifest, list(paths), args.keep_source)
    tokens, documents = (sum(getattr(s, key) for s in manifest.shards) for key in ("tokens", "documents"))
    time_ = "nothing left to do" if was_complete else f"{time.monotonic() - began:.1f} s"
    print0(f"{tokens:,} tokens, {documents:,} documents, {len(manifest.shards)} shards in {out} ({time_})")
    if len(manifest.shards) == 1:
        return print0("warning: that is only the val shard; to get train shards, too, give a smaller --shard-size")
    # too little for gpt2-124m, which takes half a million tokens per step
    small = tokens < 100_000_000
    more = f" --out-dir {shlex.quote(f'log/{out.name}')} --sample-prompt ''" if small and not library else ""
    print0(f"next: python train_gpt2.py {'quickstart ' * small}--data-dir {shlex.quote(str(out))}{more}")


if __name__ == "__main__":
    run_cli(main)
