"""The programs that the benches compare this project with, each at one commit.

    source = peers.read(args.peers, "nanoGPT", "model.py")      # the text of that file at the pinned commit

A peer is a git clone, of which nothing is checked out: files are read from the commit. A clone that is missing is
fetched from GitHub. On a machine without GitHub, --peers names a folder with clones made elsewhere.
"""

import subprocess
from pathlib import Path

from system.cli import require

DEFAULT_FOLDER = Path(".cache/peers")

# {name: (repository, commit)}; the clone of a peer is the folder with its repository's name.
PEERS = {
    "build-nanogpt": ("karpathy/build-nanogpt", "6104ab1b53920f6e2159749676073ff7d815c1fa"),
    "nanogpt": ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    "llm.c": ("karpathy/llm.c", "f1e2ace651495b74ae22d45d1723443fd00ecd3a"),
    "ddp-basemodel-train": ("Sachin-Bharadwaj/DDP-BASEMODEL-TRAIN", "0d0452c09cd35345ad2d125c1816f75101084dd0"),
    "record8": ("KellerJordan/modded-nanogpt", "11e39fb08037aa86d48bb3989a388f85d1615bc6"),
    "result36": ("KellerJordan/modded-nanogpt", "5abb30686e5195c3266e25569f754b9c0e71437e"),
}


def read(folder: Path, name: str, path: str) -> str:
    """The text of a peer's file. Raises UserError if its clone cannot be fetched, or lacks the commit."""
    repository, commit = PEERS[name]
    clone = folder / repository.split("/")[1]
    url = f"https://github.com/{repository}"
    fix = f"make the clone elsewhere (git clone {url}), and name the folder that it is in: --peers FOLDER"

    if not clone.exists():
        fetched = subprocess.run(["git", "clone", "--quiet", "--bare", url, str(clone)])
        require(fetched.returncode == 0, f"cannot fetch {url}: {fix}")
    command = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    require(done.returncode == 0, f"{clone} has no {path} at commit {commit:.7}: {done.stderr.strip()[:200]}; {fix}")
    return done.stdout
