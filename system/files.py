"""Files on disks that fail for a moment: reads and writes are retried after transient errors, a written file is
complete or absent, and a locked folder is written to by one process at a time.

    data = retry_io(path.read_bytes, path)                    # retried for about a minute after EIO, ESTALE, ...
    write_file(path, lambda f: f.write(data))                 # complete or absent; retried, too
    log = AppendFile(path); log.append(b"a line\\n"); log.sync()
    with lock_folder(out): ...

Called wherever the project reads or writes a file that must not be lost: checkpoints, shards, manifests, metrics.

A network volume may answer EIO, ESTALE or ETIMEDOUT for some seconds. Such an error is retried here; if it lasts, it
stays an OSError, which system/cli.py reports as a system error, and train.sh restarts the run. What only the user can
change (a full disk, a missing permission) is not retried.
"""

import errno
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from system.cli import UserError, printable, require

T = TypeVar("T")

# Errors of network volumes and failing disks that may go away.
TRANSIENT_ERRORS = (
    "EIO ESTALE ETIMEDOUT EREMOTEIO ENOTCONN ECONNRESET ECONNABORTED ECONNREFUSED ESHUTDOWN EHOSTDOWN EHOSTUNREACH "
    "ENETDOWN ENETUNREACH ENETRESET ENOLINK ECOMM EPROTO EBUSY"
).split()
TRANSIENT_ERRNOS = {getattr(errno, name) for name in TRANSIENT_ERRORS if hasattr(errno, name)}  # macOS lacks some
RETRY_PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between tries, a minute in all

# What flock answers on a file system that does not have it: Lustre mounted without -o flock, NFS without its lock
# daemon, some FUSE file systems.
NO_FLOCK_ERRNOS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
# What link answers on a file system without hard links: SMB, exFAT, some FUSE file systems.
NO_LINK_ERRNOS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
LOCK_WAIT_HOURS = 24  # as long as the ranks of a run wait for the one that downloads its data
MAX_LOCK_PAUSE = 15  # seconds between two attempts to get a lock


# ------------------------------------------------------------------------- errors of the file system


def may_pass(error: BaseException) -> bool:
    """Whether this is a transient error: one of a disk or network volume that may be gone in a moment."""
    return isinstance(error, OSError) and error.errno in TRANSIENT_ERRNOS


def retry_io(action: Callable[[], T], path: str | Path) -> T:
    """The result of `action`, which reads or writes `path` from the beginning each time it is called. It is called
    again, with growing pauses, after an error that may pass. An error that lasts through all pauses is raised as
    OSError with the path; any other error is raised at once."""
    # One try before each pause, and a last one, after which there is none.
    start_time = time.monotonic()
    for pause in (*RETRY_PAUSES, None):
        try:
            result = action()
        except OSError as e:
            if not may_pass(e):
                raise

            # The last try has failed, too.
            reason = e.strerror or str(e)
            waited = time.monotonic() - start_time
            if pause is None:
                message = f"{reason}, in {len(RETRY_PAUSES) + 1} tries over {waited:.0f} seconds"
                raise OSError(e.errno, message, str(path)) from None

            # Warn at the first error only. If stderr is on the same volume, the warning is dropped.
            if pause == RETRY_PAUSES[0]:
                print_to_stderr(f"warning: {path}: {reason}; trying again for {sum(RETRY_PAUSES)} seconds")
            time.sleep(pause)
            continue

        # It has worked. After a warning, say so.
        if pause != RETRY_PAUSES[0]:
            print_to_stderr(f"{path}: accessible again after {time.monotonic() - start_time:.0f} seconds")
        return result
    raise AssertionError("the last try returns or raises")


def print_to_stderr(message: str) -> None:
    """Print a message to stderr, if that is possible: a failure to print must not end the run."""
    with suppress(OSError):
        print(printable(message), file=sys.stderr, flush=True)


def explain_write_error(error: OSError, path: str | Path, needed: int | None = None) -> str:
    """Why a write to `path` has failed, for a message. If a disk or quota is full, that includes how many bytes are
    `needed`, if that is known, and how many are free."""
    reason = error.strerror or str(error)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return reason

    # How much is needed, and how much is free in the nearest folder that exists.
    sizes = [] if needed is None else [f"{format_bytes(needed)} needed"]
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    with suppress(OSError):
        free = format_bytes(shutil.disk_usage(folder).free)
        # A quota is not part of what the file system reports.
        quota = " on the file system, not counting the quota" if error.errno == errno.EDQUOT else ""
        sizes.append(f"{free} free{quota}")
    return f"{reason} ({', '.join(sizes)})" if sizes else reason


def format_bytes(count: float) -> str:
    """512 bytes, 3.2 MB or 1.5 GB."""
    if count < 1e5:
        return f"{count:,.0f} bytes"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"


# ------------------------------------------------------------------------- writing


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a binary file that becomes `path` once all of it is on disk. An error leaves nothing behind.

    The order is the protocol. A kill or a power cut at any moment leaves either the old file, or none, or the complete
    new one:

                 write .path.part | sync its content | rename to path | sync the folder
        path     the old file, or none ..............| the new file ...................
    """
    # A hidden name in the same folder: renaming across file systems would not be atomic.
    part = path.with_name(f".{path.name}.part")
    try:
        with open(part, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        # A partial file is of no use, and it may be what filled the disk. The first error is the one to report.
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    # The new name, too, must survive a power cut.
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to storage."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        # Some network file systems cannot sync a folder; they send names to their server at once.
        if e.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file with atomic_write, by calling `write(f)`. After a transient error the file is written again from its
    first byte, because what was written before a failed sync may be lost."""

    def write_once() -> None:
        with atomic_write(path) as f:
            write(f)

    retry_io(write_once, path)


class AppendFile:
    """An append-only file that has every byte exactly once, even if its volume fails for a moment.

    Each append is one unbuffered write. After a transient error, the file is reopened and truncated to its length at
    the last sync, and everything that was appended since then is written again:

        file    |------- synced_bytes -------|-- since_sync --|
                 known to be on the disk      kept in memory until the next sync
    """

    def __init__(self, path: Path):
        self.path = path
        self.file = retry_io(lambda: open(path, "ab", buffering=0), path)
        self.synced_bytes = os.fstat(self.file.fileno()).st_size
        self.since_sync: list[bytes] = []

    def append(self, data: bytes) -> None:
        """Write `data` at the end. Raises OSError unless all of it can be written."""
        self.since_sync.append(data)
        self._retry(lambda: self._write(data))

    def sync(self) -> None:
        """Flush everything to storage. The file is closed and reopened, because a bucket mounted as a folder uploads a
        file only when it is closed."""

        def sync_once() -> None:
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = open(self.path, "ab", buffering=0)

        self._retry(sync_once)

        # What was appended is on the disk: it need not be kept for another try.
        self.synced_bytes += sum(map(len, self.since_sync))
        self.since_sync.clear()

    def close(self) -> None:
        self.file.close()

    def _write(self, data: bytes) -> None:
        # A disk that is nearly full accepts only a part of the data.
        if self.file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def _retry(self, action: Callable[[], None]) -> None:
        """Do `action`. After a transient error, instead write again and sync everything since the last sync."""
        is_first_try = True

        def try_once() -> None:
            nonlocal is_first_try
            if is_first_try:
                is_first_try = False
                return action()

            # Reopen the file, and cut off what is after the last sync: it may be there, in part or not at all.
            with suppress(OSError):  # close may report the error of an earlier write once more
                self.file.close()
            self.file = open(self.path, "ab", buffering=0)
            if os.fstat(self.file.fileno()).st_size > self.synced_bytes:
                os.ftruncate(self.file.fileno(), self.synced_bytes)

            # Write it again, from memory.
            for data in self.since_sync:
                self._write(data)
            os.fsync(self.file.fileno())

        retry_io(try_once, self.path)


# ------------------------------------------------------------------------- one process per folder


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a lock, as it is written into the lock file for others to read, as JSON."""

    host: str
    boot: str  # boot_id(): which boot of the host and which container, in both of which a pid means one process
    pid: int
    started: str  # when the process started, in ticks since the boot, because pids are reused
    since: str
    job: str = ""  # id of the Slurm job
    job_restarts: int = 0

    @classmethod
    def of_this_process(cls) -> "LockHolder":
        """What this process writes into the lock files that it holds."""
        return cls(
            host=socket.gethostname(),
            boot=boot_id(),
            pid=os.getpid(),
            started=process_start(os.getpid()),
            since=time.strftime("%F %T %z"),
            job=os.environ.get("SLURM_JOB_ID", ""),
            job_restarts=int(os.environ.get("SLURM_RESTART_COUNT") or 0),
        )

    def __str__(self) -> str:
        job = f" of Slurm job {self.job}" if self.job else ""
        return f"process {self.pid}{job} on {self.host}, since {self.since}"

    def is_alive(self) -> bool | None:
        """Whether the process still runs; None if that cannot be found out from here."""
        me = self.of_this_process()

        # The same host and boot: look at the process itself. The same host after a reboot: it is gone. (The first word
        # of `boot` is the boot, the second the container; the processes of another container cannot be seen.)
        if self.host == me.host and self.boot and me.boot:
            if self.boot == me.boot:
                return bool(self.started) and process_start(self.pid) == self.started
            if self.boot.split()[0] != me.boot.split()[0]:
                return False

        # An earlier start of this job: Slurm ends all processes of one start before the next one.
        if self.job and self.job == me.job and self.job_restarts < me.job_restarts:
            return False

        # Another job: ask Slurm.
        if self.job and self.job != me.job:
            return is_slurm_job_running(self.job)
        return None


def boot_id() -> str:
    """An id of this machine's current boot and of the PID namespace (a container has its own); "" if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    return ""


def process_start(pid: int) -> str:
    """When a process started, in ticks since the boot; "" if it does not run, or on a machine without /proc."""
    with suppress(OSError, IndexError):
        # proc(5): "PID (NAME) STATE ...". The name may have spaces and parentheses, so count the fields after its end:
        # the first is the state, Z for a process that has ended and was not waited for; the 20th is the start.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def is_slurm_job_running(job: str) -> bool | None:
    """Whether a Slurm job has processes, as squeue says; None if squeue is not here or does not know."""
    # Its state in one word, as RUNNING.
    try:
        command = ["squeue", "--noheader", "--jobs", job, "--format", "%T"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None

    # squeue forgets a job some minutes after its end.
    if "Invalid job id" in done.stderr:
        return False
    if done.returncode != 0:
        return None

    # squeue lists jobs that are waiting, running or ending. A waiting job, such as a requeued one, has no processes.
    return done.stdout.strip() not in ("", "PENDING")


def read_holder(path: Path) -> LockHolder | None:
    """The holder that a lock file names; None if it names none."""
    try:
        return LockHolder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_holder(descriptor: int) -> None:
    """Name this process as the holder in a lock file."""
    content = json.dumps(asdict(LockHolder.of_this_process())).encode() + b"\n"
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


class FolderLock:
    """A lock on a folder, taken with flock on the file `.lock` in it. Where the file system has no flock, the lock is
    the existence of a second file, the marker `.lock.held`. A killed process leaves its marker behind; the next process
    removes it once the process that it names is known to have ended.

                    the lock is              it ends with            it names its holder in
        flock       a lock on .lock          the process             .lock
        no flock    .lock.held exists        release(), or removal   .lock.held
    """

    def __init__(self, folder: Path):
        self.path = folder / ".lock"
        self.marker = folder / ".lock.held"
        self.file: BinaryIO | None = None  # open while the lock is held with flock
        self.has_marker = False  # whether this process holds the lock with its marker

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free; returns whether this process holds it now. Raises OSError if the folder
        cannot be written to."""
        # With flock or, where the file system has none, with the marker.
        file = open(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
        try:
            is_locked = self._lock_file(file)
        except OSError as e:
            file.close()
            if e.errno in NO_FLOCK_ERRNOS:
                return self._create_marker()
            raise
        if not is_locked:
            file.close()
            return False

        # Keep the file open: closing it would give up the lock. Name this process in it; on a full disk that fails, but
        # the lock holds all the same.
        self.file = file
        with suppress(OSError):
            write_holder(file.fileno())
        return True

    def _lock_file(self, file: BinaryIO) -> bool:
        """Lock the open file with flock; returns whether that was possible, and keeps all others out."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise

        # If the folder was removed meanwhile, the open file has no name any more, and its lock keeps nobody out.
        if os.fstat(file.fileno()).st_nlink == 0:
            return False

        # Where flock is local to each node (Lustre with -o localflock), two nodes can get it. Then ask Slurm whether
        # the holder that the file names still runs.
        holder = read_holder(self.path)
        is_elsewhere = holder is not None and holder.host != socket.gethostname()
        return not (is_elsewhere and holder.is_alive())

    def describe_holder(self) -> str:
        """Who holds the lock and since when; without flock, also what to do if that process no longer runs."""
        holder = read_holder(self.marker) or read_holder(self.path)
        text = f" ({holder})" if holder else ""
        if self.marker.exists():
            text += f". This file system has no flock: if that process no longer runs, remove {self.marker}"
        return text

    def release(self) -> None:
        """Give the lock back."""
        # A lock file that cannot be emptied still names this process, which does no harm once the process has ended.
        with suppress(OSError):
            if self.has_marker:
                self.marker.unlink(missing_ok=True)
            if self.file is not None:
                os.ftruncate(self.file.fileno(), 0)
        with suppress(OSError):
            if self.file is not None:
                self.file.close()
        self.file = None
        self.has_marker = False

    def _create_marker(self) -> bool:
        """Create the marker if there is none, or only that of a process that has ended; returns whether this process
        has created it."""
        # Is there one, and has the process that it names ended?
        content = None
        with suppress(FileNotFoundError):
            content = self.marker.read_bytes()
        if content is not None:
            holder = read_holder(self.marker)
            if holder is None or holder.is_alive() is not False:
                return False

            # Put it aside under a name of this process's own. If another process has replaced the marker since it was
            # read here, the renamed file belongs to that process: give it its name back.
            aside = self.marker.with_name(f".lock.stale.{socket.gethostname()}.{os.getpid()}")
            try:
                os.rename(self.marker, aside)
            except FileNotFoundError:
                return False
            if aside.read_bytes() != content:
                os.rename(aside, self.marker)
                return False

            # It is the old one.
            aside.unlink()
            print_to_stderr(f"{self.path.parent} was locked by {holder}, which no longer runs: taking over its lock")

        # Write the marker under a name of this process's own, then link it to its name: nobody could ever take over a
        # marker that does not name its process, which a kill between creating and writing it would leave behind. Only
        # one process can create the link, on NFS and Lustre as well.
        own = self.marker.with_name(f".lock.new.{socket.gethostname()}.{os.getpid()}")
        try:
            descriptor = os.open(own, os.O_WRONLY | os.O_CREAT, 0o644)
            try:
                write_holder(descriptor)
            finally:
                os.close(descriptor)
            self.has_marker = link_new(own, self.marker)
        finally:
            own.unlink(missing_ok=True)
        return self.has_marker


def link_new(source: Path, path: Path) -> bool:
    """Give the file `source` the second name `path`, unless that exists; returns whether it was given. Where the file
    system has no hard links, `path` becomes a copy."""
    try:
        os.link(source, path)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost; then the link that exists is this one.
        return source.stat().st_nlink == 2
    except OSError as e:
        if e.errno not in NO_LINK_ERRNOS:
            raise
        return copy_new(source, path)
    return True


def copy_new(source: Path, path: Path) -> bool:
    """Copy the small file `source` to `path`, unless that exists; returns whether it was copied."""
    try:
        f = open(path, "xb", buffering=0)
    except FileExistsError:
        return False
    try:
        f.write(source.read_bytes())
    except OSError:
        path.unlink(missing_ok=True)  # on a full disk
        raise
    finally:
        f.close()
    return True


@contextmanager
def lock_folder(folder: Path, wait: bool = False) -> Iterator[None]:
    """Lock `folder`, which is created if missing, for this process. If another process holds the lock, wait for it
    (`wait`, at most LOCK_WAIT_HOURS) or raise UserError. The lock ends with the process, however the process ends;
    where the file system has no flock, see FolderLock. A folder that was created here is removed again if an error
    leaves it empty."""
    is_new = not folder.exists()
    lock = FolderLock(folder)

    def try_acquire() -> bool:
        folder.mkdir(parents=True, exist_ok=True)
        return lock.try_acquire()

    # Acquire the lock at once if it is free.
    try:
        is_locked = retry_io(try_acquire, folder)
        if not is_locked:
            in_use = f"{folder} is in use by another process{lock.describe_holder()}"
            # A download can wait for another one into the same folder; a second run in one folder is a mistake.
            require(wait, f"{in_use}; wait for it or choose another folder")
            print(f"{in_use}: waiting for it, at most {LOCK_WAIT_HOURS} hours", flush=True)
            wait_for_lock(try_acquire, folder, lock)
    # A folder that cannot be written to is for the user to fix; a volume that keeps failing is not.
    except OSError as e:
        if may_pass(e):
            raise
        reason = explain_write_error(e, folder)
        raise UserError(f"cannot write to {folder}: {reason}; fix that, or choose another folder") from None

    # The work for which the folder is locked.
    try:
        yield
    except BaseException:
        # A mistyped --out-dir should not leave an empty folder. With `wait`, another process may be waiting for this
        # folder's lock file, so the file stays.
        with suppress(OSError):
            own_files = {".lock", ".lock.held"}
            if is_new and not wait and {p.name for p in folder.iterdir()} <= own_files:
                for name in own_files:
                    (folder / name).unlink(missing_ok=True)
                folder.rmdir()
        raise
    finally:
        lock.release()


def wait_for_lock(try_acquire: Callable[[], bool], folder: Path, lock: FolderLock) -> None:
    """Wait until try_acquire() succeeds. Raises UserError after LOCK_WAIT_HOURS."""
    # Try again and again, less and less often.
    end_time = time.monotonic() + LOCK_WAIT_HOURS * 3600
    pause = 0.1
    while not retry_io(try_acquire, folder):
        problem = f"{folder} is still in use by another process{lock.describe_holder()}"
        fix = f"{LOCK_WAIT_HOURS} hours are over: end that process, or choose another folder"
        require(time.monotonic() < end_time, f"{problem}; {fix}")
        time.sleep(pause)
        pause = min(2 * pause, MAX_LOCK_PAUSE)
