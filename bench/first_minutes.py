"""What a newcomer waits for: `make quickstart` in a fresh clone, with an empty HOME and cold caches. Minutes long.

    python -m bench.first_minutes                                          # this checkout's last commit
    python -m bench.first_minutes --repo URL --commit 347df96              # an older one, or another's
    python -m bench.first_minutes TRAIN_ARGS='--dtype bfloat16'            # words for make: here another precision
    python -m bench.first_minutes --install-only UV= TORCH_CPU_INDEX=      # the packages alone

Needs git, make and a Python of 3.11 or newer, none of our packages. It prints the commands' own output to stderr and
a row of a table to stdout. What is this machine's stays: the settings of pip in /etc and the environment, and caches of
the package index itself.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHES = ("PIP_CACHE_DIR", "UV_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME", "VIRTUAL_ENV")
LOSS = re.compile(r"^step +\d+/\d+ \| loss: ")


def newcomer(folder: Path) -> dict[str, str]:
    """The environment of somebody who was never here: no HOME, no caches, no venv that is active."""
    env = {k: v for k, v in os.environ.items() if k not in CACHES and not k.startswith(("XDG_", "MAKE", "MFLAGS"))}
    if "VIRTUAL_ENV" in os.environ:
        active = str(Path(os.environ["VIRTUAL_ENV"]) / "bin")
        env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep) if p != active)
    for name, variable in (("home", "HOME"), ("tmp", "TMPDIR")):  # torch's compiled code lies under TMPDIR
        (folder / name).mkdir()
        env[variable] = str(folder / name)
    return env


def make(target: str, words: list[str], clone: Path, env: dict[str, str]) -> tuple[float, float | None]:
    """Seconds a target took, and until the first line with a loss, if there was one."""
    start, first_loss = time.monotonic(), None
    command = ["make", target, *words]
    with subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.PIPE, text=True, errors="replace") as running:
        for line in running.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if first_loss is None and LOSS.match(line):
                first_loss = time.monotonic() - start
    if running.returncode != 0:
        sys.exit(f"error: {' '.join(command)} exited with code {running.returncode}")
    return time.monotonic() - start, first_loss


def val_loss(clone: Path) -> float | None:
    """The last validation loss of the run that quickstart left."""
    found = None
    for line in (clone / "log" / "quickstart" / "metrics.jsonl").read_text().splitlines():
        found = json.loads(line).get("val_loss", found)
    return found


def size_mb(folder: Path) -> float:
    """What a folder takes on the disk, in MB; a file with two names counts once."""
    files = {s.st_ino: s.st_blocks * 512 for s in (p.lstat() for p in folder.rglob("*"))}
    return sum(files.values()) / 1e6


def in_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    clone, env = folder / "clone", newcomer(folder)
    subprocess.run(["git", "clone", "--quiet", args.repo, clone], check=True)
    if args.commit:
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", args.commit], check=True)
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout
    install_s, _ = make("install", args.words, clone, env)
    row = {"commit": commit.strip(), "make's words": " ".join(args.words), "install": in_seconds(install_s)}
    loss_s = end_s = loss = None
    if not args.install_only:
        quickstart_s, quickstart_loss_s = make("quickstart", args.words, clone, env)
        end_s = install_s + quickstart_s
        loss_s = quickstart_loss_s and install_s + quickstart_loss_s
        loss = val_loss(clone)
    row |= {"first loss": in_seconds(loss_s), "end": in_seconds(end_s), ".venv": f"{size_mb(clone / '.venv'):,.0f} MB"}
    return row | {"val loss": "" if loss is None else f"{loss:.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="NAME=VALUE", help="for make, such as TRAIN_ARGS='--dtype float32'")
    parser.add_argument("--repo", default=str(ROOT), help="what to clone: a folder or URL (default: this checkout)")
    parser.add_argument("--commit", help="what to check out (default: the newest)")
    parser.add_argument("--install-only", action="store_true", help="stop after make install")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this new folder and leave it there")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="first-minutes-"))
    if args.keep:
        folder.mkdir(parents=True)
    try:
        row = measure(args, folder.resolve())
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    for cells in (row.keys(), ["---"] * len(row), row.values()):
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
