"""The errors of a user, and what turns the error of a file into one.

    require(T > 0, f"--sequence-length {T} must be at least 1; use 1024")
    with explain_errors("cannot read a.npy", "make it again", ValueError):
        np.load("a.npy")

A program ends in one of two ways beside success: an error that the user can fix is one message (UserError), anything
else is a crash with its traceback. A crash that needs no traceback is one message, too (TransientError).
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(Exception):
    """Something that the user can fix. The message gives the value, the rule and the command that fixes it."""


class UsageError(UserError):
    """A word of the command line that is not accepted."""


class TransientError(UserError):
    """Something that may not come again: one message, too, but a program that restarts crashes restarts this."""


def require(condition: object, message: str) -> None:
    """Raise UserError(message) unless `condition` is true. Every setting, row and file of a user is checked with it."""
    if not condition:
        raise UserError(message)


# A path that the user has chosen cannot be used: it is read-only, as Kaggle's input folders are, or somebody else's, or
# leads through a file or in a circle. The same command would fail again.
PATH_ERRORS = {
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP,
}  # fmt: skip
# What a disk, a network volume or the machine may have for a while: the same command may succeed later.
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, *DISK_FULL}


@contextmanager
def explain_errors(problem: str, fix: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn an error about a file into a UserError with its words: a UserError, an OSError unless it may pass, and
    `kinds`, those that the library in this block raises for a damaged file. All else is an error of programming, or of
    the machine, and stays a crash. So no kind is NameError, AttributeError, TypeError or one of their bases, unless the
    block is no more than the construction of an object from what a file says."""
    try:
        yield
    except (UserError, OSError, *kinds) as e:  # type: ignore[misc]
        is_of_system = isinstance(e, OSError) and e.errno in TRANSIENT_ERRORS
        if is_of_system or isinstance(e, MemoryError) or "CUDA error" in str(e):
            raise  # the run ends as a crash, and is restarted
        reason = str(e)
        if not isinstance(e, UserError):
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        raise UserError(f"{problem} ({reason}); {fix}") from e
