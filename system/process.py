"""How every script starts and ends. A script ends with

    if __name__ == "__main__":
        process.run_cli(main)

Importing this module is cheap: nothing here needs torch. The exit codes, which train.sh and other programs may rely on:

    0       done; a training run that was stopped has been saved
    1       an error, described in one message, or a crash
    2       a flag that the script does not accept
    130     Ctrl-C
    141     the reader of the output has exited, as in `infer.py ... | head`

torchrun exits with 1 whatever the code of its ranks, so a training run also writes its status to a file: write_status.
"""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from system.errors import DISK_FULL, PATH_ERRORS, TransientError, UsageError, UserError
from system.printing import env_number, printable


def run_cli(main: Callable[[], object]) -> None:
    """Run a script's `main` and exit. What the user can fix, a UserError or a path that may not be used, becomes one
    message, never a traceback."""
    is_alone = threading.active_count() == 1  # the kernel of a notebook has other threads, and goes on after this
    code = run(main)
    # What a full disk or a closed pipe has not taken stays in a buffer, which Python would flush at exit, and exit with
    # 120.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

    # With ranks, or threads that this script has left, skip the interpreter's shutdown: there a thread that tokenizes
    # or reads aborts the process, and gloo has been seen to abort, or to wait forever for a dead rank.
    has_left_threads = is_alone and threading.active_count() > 1
    if has_left_threads or env_number("WORLD_SIZE", 1) > 1:
        atexit._run_exitfuncs()
        os._exit(code)
    sys.exit(code)


def run(main: Callable[[], object]) -> int:
    """Run `main`, report an error, and return the exit code."""
    try:
        main()
        return 0
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as a shell reports it
    except BrokenPipeError:
        return 141  # 128 + SIGPIPE
    except Exception as e:
        message, status = traceback.format_exc(), "system_error"
        if isinstance(e, OSError) and e.errno in PATH_ERRORS:
            e = UserError(f"{e}; choose another path (for what is written: --out-dir or --out)")
        if isinstance(e, OSError) and e.errno in DISK_FULL:
            e = TransientError(f"{e}: the disk or a quota is full; make room, then run the same command again")
        if isinstance(e, UserError):
            message = f"error: {e}"
            if not isinstance(e, TransientError):
                status = "user_error"

        # The files first: torchrun ends this rank as soon as another one has failed. torchrun's own report, which comes
        # last, repeats what its error file says.
        write_status(status, f"{type(e).__name__}: {e}")
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            about = {"py_callstack": message, "timestamp": str(int(time.time()))}
            with suppress(OSError), open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as f:
                json.dump({"message": {"message": message, "extraInfo": about}}, f)
        with suppress(OSError):  # stderr may be a log on a full disk
            print(printable(message), file=sys.stderr, flush=True)
        return 2 if isinstance(e, UsageError) else 1


def write_status(status: str, reason: str = "") -> None:
    """Record how a run ended in the JSON file named by the environment variable TRAIN_STATUS_FILE, if it is set.

    `status` is finished, stopped (saved, to be resumed), user_error (the same command would fail again) or
    system_error, or there is no file: then a restart may succeed. Programs that start a run read this file.
    """
    path = os.environ.get("TRAIN_STATUS_FILE")
    # The error of one rank makes others fail: the crash of these must not hide it.
    if not path or (status == "system_error" and os.path.exists(path)):
        return
    # A disk that is full or gone is often the error being reported: then there is no status.
    with suppress(OSError), open(path, "w") as f:
        json.dump({"status": status, "reason": reason}, f)
