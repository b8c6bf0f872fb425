"""The free space of a folder, where a quota may be smaller than what the file system reports.

    space = free_space(Path("log/gpt2-124m"))
    space.free                  # bytes
    space.note                  # "" or what the user should know about that figure

Called by training/plan.py before a run, and by fineweb.py before shards are made.

The reason is a rented network volume: its file system is that of a whole cluster and shows terabytes free, of which the
user has bought some tens of GB. A write beyond those fails. DISK_GB tells the size that was bought:

    DISK_GB=60   |### files of this volume ###|......... free .........|     of 60 GB
    statvfs      |...... free on the cluster ........................................ ... |
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from system.cli import require

# File systems that are shared by the users of a cluster or cloud: each may have a quota that statvfs does not show.
SHARED_TYPES = ("nfs", "fuse", "lustre", "ceph", "beegfs", "gpfs", "glusterfs", "virtiofs", "9p", "cifs", "smb", "weka")


@dataclass(frozen=True)
class Space:
    """Free bytes, and a remark about them."""

    free: int
    note: str


def free_space(folder: Path, mounts: str = "/proc/mounts") -> Space:
    """The free space of the file system that an existing `folder` is on: if the environment variable DISK_GB gives the
    size of the rented volume, at most that size minus its files. Raises UserError if DISK_GB is not a number.

    mounts: the file in which Linux lists what is mounted; tests give another one.
    """
    # What the file system reports, and which one it is.
    free = shutil.disk_usage(folder).free
    mount_point, kind = find_mount(folder, mounts)

    # The size of the volume that was bought, minus all files on it.
    bought_gb = os.environ.get("DISK_GB", "")
    if bought_gb:
        is_number = bought_gb.replace(".", "", 1).isdecimal()
        require(is_number, f"DISK_GB={bought_gb} must be a number, the size of the volume you bought, as in DISK_GB=60")
        used = used_bytes(mount_point)
        free = min(free, int(float(bought_gb) * 1e9) - used)
        return Space(free, f"disk: {mount_point} has {used / 1e9:.1f} GB of files; DISK_GB={bought_gb}")

    # On a shared file system without DISK_GB, say that the figure may be too large.
    if kind.startswith(SHARED_TYPES):
        shown = f"disk: {mount_point} ({kind}) shows {free / 1e9:,.0f} GB free; a quota cannot be seen"
        return Space(free, f"{shown}; if the volume you bought is smaller, give its size, as in DISK_GB=60")
    return Space(free, "")


def find_mount(folder: Path, mounts: str) -> tuple[Path, str]:
    """The mount point above `folder`, and the type of its file system ("" where that is not known)."""
    # Lines of: device, mount point, type, ... A space in a path is written as \040.
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:  # not Linux
        return folder.resolve(), ""

    # {mount point: type}. The nearest of them above the folder is the one that it is on.
    kinds = {Path(line.split()[1].replace("\\040", " ")): line.split()[2] for line in lines}
    resolved = folder.resolve()
    for parent in (resolved, *resolved.parents):
        if parent in kinds:
            return parent, kinds[parent]
    return resolved, ""


def used_bytes(top: Path) -> int:
    """Bytes that all files below `top` take up on its file system. Files that cannot be inspected are left out."""
    # A walk with a stack of folders: a folder without permission must not end it.
    used = 0
    seen_inodes = set()  # a file with several hard links counts once
    device = top.stat().st_dev
    folders = [top]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:  # no permission, or removed meanwhile
            continue
        for entry in entries:
            try:
                info = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            # Skip other volumes mounted below `top`, and files that were counted under another name.
            if info.st_dev != device or (info.st_nlink > 1 and info.st_ino in seen_inodes):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(Path(entry.path))
                continue

            # A file counts with its blocks on the disk, which POSIX counts in units of 512 bytes, not with its length.
            seen_inodes.add(info.st_ino)
            used += info.st_blocks * 512
    return used
