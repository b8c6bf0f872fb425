"""How long does a newcomer wait for `make quickstart`? In a fresh clone, with an empty HOME and without caches.

    python -m bench.first_minutes                                          # the last commit of this checkout
    python -m bench.first_minutes --repo URL --commit 347df96              # an older commit, or another repository
    python -m bench.first_minutes TRAIN_ARGS='--dtype bfloat16'            # variables for make: here another precision
    python -m bench.first_minutes --install-only UV= TORCH_CPU_INDEX=      # the packages alone

It takes minutes, and downloads what the packages need. It needs git, make and Python 3.11 or newer, and none of this
project's packages. The output of the commands goes to stderr, one table row to stdout. Two things differ from a
newcomer's: this machine's settings of pip, in /etc and in the environment, and the caches of the package index.
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
# Variables that name a cache or an active venv.
CACHE_VARIABLES = (
    "PIP_CACHE_DIR",
    "UV_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "HF_HOME",
    "VIRTUAL_ENV",
)
LOSS_LINE = re.compile(r"^step +\d+/\d+ \| loss: ")


def newcomer_environment(folder: Path) -> dict[str, str]:
    """The environment of a new user on this machine: an empty HOME, no caches, no active venv."""
    # Drop what would lead to a cache, or to the make that runs this.
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in CACHE_VARIABLES and not name.startswith(("XDG_", "MAKE", "MFLAGS"))
    }

    # Leave an active venv.
    if "VIRTUAL_ENV" in os.environ:
        active = str(Path(os.environ["VIRTUAL_ENV"]) / "bin")
        env["PATH"] = os.pathsep.join(p for p in env["PATH"].split(os.pathsep) if p != active)

    # An empty HOME and an empty TMPDIR, under which torch keeps its compiled code.
    for name, variable in (("home", "HOME"), ("tmp", "TMPDIR")):
        (folder / name).mkdir()
        env[variable] = str(folder / name)
    return env


def run_make(target: str, variables: list[str], clone: Path, env: dict[str, str]) -> tuple[float, float | None]:
    """Run `make target`, with its output on stderr. Returns the seconds it took, and the seconds until the first line
    with a loss, if there was one. Exits if make fails."""
    # Pass each line on as it comes, and note when the first loss is among them.
    start_time = time.monotonic()
    first_loss_s = None
    command = ["make", target, *variables]
    with subprocess.Popen(command, cwd=clone, env=env, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            if first_loss_s is None and LOSS_LINE.match(line):
                first_loss_s = time.monotonic() - start_time

    # Leaving the block above has waited for make to end.
    if process.returncode != 0:
        sys.exit(f"error: {' '.join(command)} exited with code {process.returncode}")
    return time.monotonic() - start_time, first_loss_s


def last_val_loss(clone: Path) -> float | None:
    """The last validation loss of the run that quickstart left."""
    # Read here and not by training/metrics.py: the clone may be an older version.
    val_loss = None
    for line in (clone / "log" / "quickstart" / "metrics.jsonl").read_text().splitlines():
        val_loss = json.loads(line).get("val_loss", val_loss)
    return val_loss


def disk_usage_mb(folder: Path) -> float:
    """What a folder takes on the disk, in MB."""
    # A file with two names has one inode, and counts once; a block of st_blocks has 512 bytes.
    bytes_by_inode = {}
    for path in folder.rglob("*"):
        stat = path.lstat()
        bytes_by_inode[stat.st_ino] = stat.st_blocks * 512
    return sum(bytes_by_inode.values()) / 1e6


def format_seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f} s"


def measure(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Clone, install and run quickstart in `folder`. Returns the columns of the table and their values."""
    clone = folder / "clone"
    env = newcomer_environment(folder)

    # Clone, and check out the commit that was asked for.
    subprocess.run(["git", "clone", "--quiet", args.repo, clone], check=True)
    if args.commit:
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", args.commit], check=True)
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout

    # Install the packages.
    install_s, _ = run_make("install", args.variables, clone, env)

    # Train. A newcomer's seconds count from the start of the install.
    first_loss_s = end_s = val_loss = None
    if not args.install_only:
        quickstart_s, loss_line_s = run_make("quickstart", args.variables, clone, env)
        end_s = install_s + quickstart_s
        if loss_line_s is not None:
            first_loss_s = install_s + loss_line_s
        val_loss = last_val_loss(clone)

    return {
        "commit": commit.strip(),
        "make's words": " ".join(args.variables),
        "install": format_seconds(install_s),
        "first loss": format_seconds(first_loss_s),
        "end": format_seconds(end_s),
        ".venv": f"{disk_usage_mb(clone / '.venv'):,.0f} MB",
        "val loss": "" if val_loss is None else f"{val_loss:.3f}",
    }


def main() -> None:
    # argparse, as this runs before the project's packages are installed.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variables", nargs="*", metavar="NAME=VALUE", help="for make, such as TRAIN_ARGS='--dtype float32'"
    )
    parser.add_argument("--repo", default=str(ROOT), help="what to clone: a folder or URL (default: this checkout)")
    parser.add_argument("--commit", help="what to check out (default: the newest)")
    parser.add_argument("--install-only", action="store_true", help="stop after make install")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this new folder and leave it there")
    args = parser.parse_args()

    # Measure, and remove everything unless it is to be kept.
    folder = args.keep or Path(tempfile.mkdtemp(prefix="first-minutes-"))
    if args.keep:
        folder.mkdir(parents=True)
    try:
        row = measure(args, folder.resolve())
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)

    # A table of one row, to be pasted below the rows of other machines.
    for cells in (row.keys(), ["---"] * len(row), row.values()):
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
