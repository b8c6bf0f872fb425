"""The endings of every script, as exit code, message, status file and torchrun's report; flags, printing, durations."""

import errno
import os
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest
from helpers import ROOT, read_json, refused
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from system import printing
from system.errors import TransientError, UsageError, UserError, explain_errors
from system.printing import format_duration, parse_duration
from system.process import run_cli


@pytest.fixture
def end(tmp_path, monkeypatch, capsys):
    """end(error) -> the exit code of a script whose main raises it, what it prints on stderr, and its status."""
    path = tmp_path / "status"
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(path))

    def run(error):
        with pytest.raises(SystemExit) as ended:
            run_cli(Mock(side_effect=error))
        status = read_json(path)["status"] if path.exists() else ""
        return ended.value.code, capsys.readouterr().err, status

    return run


def os_error(name):
    return OSError(getattr(errno, name), os.strerror(getattr(errno, name)), "log/mine")


@pytest.mark.parametrize("error, code, status", [
    (UserError("--seed \x1b[2J log/mine is no number"), 1, "user_error"),
    (UsageError("no flag --sed log/mine"), 2, "user_error"),
    (TransientError("the Hub is gone, log/mine"), 1, "system_error"),
    *((os_error(name), 1, "system_error") for name in ("ENOSPC", "EDQUOT")),
    *((os_error(name), 1, "user_error") for name in "EACCES EPERM EROFS ENOTDIR EEXIST ENAMETOOLONG ELOOP".split()),
])  # fmt: skip
def test_what_the_user_can_fix_is_one_message(end, error, code, status):
    found_code, printed, found_status = end(error)
    assert printed.startswith("error: ") and "log/mine" in printed and printed.count("\n") == 1
    assert "\x1b" not in printed and (found_code, found_status) == (code, status)


@pytest.mark.parametrize("error", [*map(os_error, ("EIO", "ENOENT")), ZeroDivisionError("log/mine")])
def test_anything_else_is_a_crash_with_its_traceback(end, error):
    """A restart may find the network volume back in its place."""
    code, printed, status = end(error)
    assert (code, status) == (1, "system_error") and "Traceback" in printed and "log/mine" in printed


def test_a_crash_does_not_hide_another_ranks_error(end, tmp_path):
    assert [end(e)[2] for e in (ZeroDivisionError(), UserError("late"))] == ["system_error", "user_error"]
    assert end(ZeroDivisionError())[2] == "user_error"
    assert read_json(tmp_path / "status")["reason"] == "UserError: late"


def test_a_full_disk_costs_only_the_status(end, monkeypatch):
    monkeypatch.setattr("builtins.open", Mock(side_effect=os_error("ENOSPC")))
    assert end(UserError("no room")) == (1, "error: no room\n", "")


def test_torchruns_report_ends_with_the_message(end, tmp_path, monkeypatch):
    """Of a rank with an error of the user's; torch prints it from the rank's error file."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    end(UserError("--max-lr -1 must be at least 0"))
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json"))
    last_line = str(ChildFailedError("train_gpt2.py", {0: failure})).strip("=\n").splitlines()[-1]
    assert last_line.endswith(": error: --max-lr -1 must be at least 0")


def test_ctrl_c_is_no_error(end):
    assert end(KeyboardInterrupt())[0] == 130


def run_program(script, redirection="", **env):
    """A Python program as a main of run_cli, started by a shell."""
    program = f"from system.process import run_cli; run_cli(lambda: exec({script!r}, {{}}))"
    command = f"{shlex.join([sys.executable, '-c', program])} {redirection}"
    env = {**os.environ, "PYTHONUNBUFFERED": "", **env}  # buffered, as in a terminal
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)


def test_a_reader_that_has_exited_is_no_error():
    """As in `infer.py ... | head`."""
    done = run_program("for _ in range(10**5): print('x' * 100)", "| head -n 1; echo ${PIPESTATUS[0]}")
    assert done.stdout.splitlines()[1:] == ["141"]
    assert done.stderr == ""


def test_a_thread_in_the_middle_of_its_work_does_not_abort_the_exit():
    """As fineweb.py's, which still tokenizes after Ctrl-C or at --limit-tokens."""
    script = """
import threading, time
from tokens import tokenizer
encoder = tokenizer.bulk_encoder()
encode = lambda: encoder.encode_batch(["some words of text " * 50_000])
threading.Thread(target=lambda: [encode() for _ in range(10**6)], daemon=True).start()
time.sleep(0.3)
"""
    assert run_program(script).returncode == 0


def test_a_rank_ends_although_a_thread_does_not():
    """As a lost rank in gloo, or a compiler's pool, whose threads would keep the process alive."""
    hang = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('done')"
    done = run_program(hang, WORLD_SIZE="2")
    assert (done.returncode, done.stdout) == (0, "done\n")


NOTEBOOK = """
import runpy, sys, threading, time

class Stream:  # what a kernel has in the place of a file
    write, flush = sys.stdout.write, sys.stdout.flush
    isatty = lambda self: False

sys.stdout = Stream()
threading.Thread(target=time.sleep, args=(20,)).start()
sys.argv = ["plots.py", "no/run"]
try:
    runpy.run_path("plots.py", run_name="__main__")
except SystemExit as e:
    print("goes on after", e.code)
"""


def test_a_notebook_goes_on_after_a_script():
    """As %run plots.py log/a: there are other threads, and the process is not the script's own."""
    done = run_program(NOTEBOOK)
    assert done.stdout.splitlines()[-1] == "goes on after 1" and "AttributeError" not in done.stderr


# ------------------------------------------------------------------------- errors and flags


def test_an_error_in_a_file_is_explained_with_its_fix():
    for error in (ValueError("no number"), UserError("no number"), OSError("no number")):
        with refused(r"shard 3.*no number.*make it again") as caught:
            with explain_errors("shard 3 is damaged", "make it again", ValueError):
                raise error
        assert caught.value.__cause__ is error
    for error in (os_error("EIO"), MemoryError(), TypeError()):  # not the file's fault
        with pytest.raises(type(error)):
            with explain_errors("shard 3 is damaged", "make it again", ValueError):
                raise error


# ------------------------------------------------------------------------- printing


def test_rank_0_prints_without_control_codes(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        printing.print0("a\tb\nc\x1b]0;title\x07\x9b")
    assert capsys.readouterr().out == "a\tb\nc\ufffd]0;title\ufffd\ufffd\n"


def test_what_the_log_cannot_take_ends_nothing():
    """A full disk, or a character that a terminal's encoding lacks."""
    script = """
import sys
from system.printing import print0, progress_bar
for text in progress_bar(["a", chr(0x4e2d), "b"], "texts"):
    print0(text)
    print0(text, file=sys.stderr)
"""
    assert run_program(script, ">/dev/full").returncode == 0
    assert run_program(script, "2>/dev/full").returncode == 0
    assert run_program("1 / 0", "2>/dev/full").returncode == 1
    done = run_program(script, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout) == (0, "a\nb\n")


def test_a_duration_shows_its_two_largest_units():
    shown = [format_duration(seconds) for seconds in (9, 3569, 3599, 3755, 103468)]
    assert shown == "0m09s 59m29s 1h00m 1h03m 28h44m".split()


def test_a_duration_is_read_or_refused():
    assert [parse_duration(text) for text in ("3h50m", "1d2s", "45", "")] == [13800, 86402, 45, 0]
    for text in ("5 minutes", "3m2h", "-1"):
        with refused(text):
            parse_duration(text)


@pytest.mark.parametrize("script", sorted(path.name for path in ROOT.glob("*.py") if path.name != "model.py"))
def test_a_python_without_the_packages_is_one_line(script):
    """As that of a terminal in which .venv is not active."""
    done = subprocess.run([sys.executable, "-S", script, "-h"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and ". .venv/bin/activate" in done.stderr
