"""The endings of every script, as exit code, message, status file and torchrun's report; printing and durations."""

import errno
import json
import math
import os
import pty
import shlex
import subprocess
import sys

import pytest
import tyro
from helpers import ROOT
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from system import cli
from system.cli import UserError, format_duration, parse_duration, run_cli, write_status


@pytest.fixture
def end(tmp_path, monkeypatch, capsys):
    """end(main) -> the exit code of a script with this `main`, what it prints on stderr, its status, and what torchrun
    prints last."""
    status, error_file = tmp_path / "status", tmp_path / "error"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # run_cli would set it for good
    monkeypatch.setenv("TRAIN_STATUS_FILE", str(status))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(error_file))
    monkeypatch.setattr(cli, "exit_process", sys.exit)  # its own may end the process of the tests

    def run(main):
        with pytest.raises(SystemExit) as ended:
            run_cli(main)
        report = str(ChildFailedError("script", {0: ProcessFailure(0, 7, 1, str(error_file))}))
        found = json.loads(status.read_text()) if status.exists() else {}
        return ended.value.code, capsys.readouterr().err, found.get("status"), report

    return run


def raise_error(error):
    raise error


def test_a_user_error_is_one_message(end):
    code, printed, status, report = end(lambda: raise_error(UserError("--seed \x1b[2J is no number")))

    assert code == 1
    assert printed == "error: --seed \ufffd[2J is no number\n"
    assert status == "user_error"
    assert "error: --seed" in report


@pytest.mark.parametrize("name", ["EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ENOTDIR", "EISDIR", "ELOOP"])
def test_a_path_that_cannot_be_used_is_one_message(end, name):
    number = getattr(errno, name)
    code, printed, status, _ = end(lambda: raise_error(OSError(number, os.strerror(number), "log/mine")))
    assert printed.startswith("error: ") and "log/mine" in printed and printed.count("\n") == 1
    assert (code, status) == (1, "user_error")


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EIO", "ESTALE", "ENOENT"])
def test_anything_else_is_a_crash_with_its_traceback(end, name):
    """A restart may find room on the disk, or the network volume back in its place."""
    number = getattr(errno, name)
    code, printed, status, report = end(lambda: raise_error(OSError(number, os.strerror(number))))

    assert code == 1
    assert "Traceback" in printed and os.strerror(number) in printed
    assert status == "system_error"
    assert "Traceback" in report and os.strerror(number) in report


def test_a_crash_does_not_hide_another_ranks_error(end, tmp_path):
    write_status("user_error", "the reason")
    assert end(lambda: 1 / 0)[2] == "user_error"
    assert json.loads((tmp_path / "status").read_text())["reason"] == "the reason"

    (tmp_path / "status").unlink()
    assert end(lambda: 1 / 0)[2] == "system_error"
    assert end(lambda: raise_error(UserError("late")))[2] == "user_error"


def test_a_bad_flag_and_an_interrupt_have_exit_codes(end):
    def main(text: str = ""):
        """
        Args:
            text: a text.
        """

    code, printed, status, _ = end(lambda: tyro.cli(main, args=["--txt", "3"]))
    assert (code, status) == (2, "user_error")  # which nothing restarts
    assert printed == "error: no flag --txt; did you mean --text?\n"

    assert end(lambda: raise_error(KeyboardInterrupt))[0] == 130
    assert end(lambda: None)[0] == 0


def test_a_terminal_gets_the_same_suggestion():
    """There tyro colors what it prints."""
    terminal, end_of_program = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end_of_program)
    done = subprocess.run([sys.executable, "infer.py", "log/x", "--temperatur", "1"], cwd=ROOT, **streams)
    os.close(end_of_program)
    assert done.returncode == 2 and b"did you mean --temperature?" in os.read(terminal, 10_000)
    os.close(terminal)


@pytest.mark.parametrize("error, is_shown", [("KeyboardInterrupt", False), ("ZeroDivisionError", True)])
def test_ctrl_c_during_the_imports_of_a_script_is_no_error(error, is_shown):
    script = f"import system.cli; raise {error}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and ("Traceback" in done.stderr) == is_shown


def test_a_reader_that_has_exited_is_no_error():
    """As in `infer.py ... | head`."""
    script = "from system.cli import run_cli; run_cli(lambda: [print('x' * 100, flush=True) for _ in range(10**5)])"
    command = f"{shlex.join([sys.executable, '-c', script])} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.splitlines()[1:] == ["141"]
    assert done.stderr == ""


def run_in_shell(script, redirections="", **env):
    """A Python program as a main of run_cli, started by a shell that redirects its streams."""
    program = f"from system.cli import run_cli, print0; run_cli(lambda: exec({script!r}))"
    command = f"{shlex.join([sys.executable, '-c', program])} {redirections}"
    return subprocess.run(command, shell=True, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminal_cannot_show_is_replaced(encoding):
    script = r"import sys; print0('\u4e2d1'); print('\u4e2d2'); print('\u4e2d3', file=sys.stderr); print('\udcff4')"
    done = run_in_shell(script, PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stdout, done.stderr) == (0, "?1\n?2\n?4\n", "?3\n")


def test_what_is_next_is_left_to_make(monkeypatch, capsys):
    """make quickstart goes on by itself, and its last line says what comes after it."""
    cli.print_next("python plots.py")
    monkeypatch.setenv("MAKELEVEL", "1")
    cli.print_next("python infer.py")
    assert capsys.readouterr().out == "next: python plots.py\n"


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
    program = f"from system.cli import run_cli; run_cli(lambda: exec({script!r}, {{}}))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("redirections", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_ends_nothing(tmp_path, redirections):
    """Nor does a data file get its number, into which C libraries would then write their warnings."""
    path = tmp_path / "shard"
    script = f"""
import os, sys
with open({str(path)!r}, "w") as f:
    print("a", file=sys.stdout)
    print("b", file=sys.stderr)
    print(sys.stderr.isatty(), f.fileno() > 2, file=f)
"""
    assert run_in_shell(script, redirections).returncode == 0
    assert path.read_text() == "False True\n"


@pytest.mark.parametrize("variables, named", [
    ({"RANK": "x"}, "RANK=x"),
    ({"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2"),
    ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK=1.0"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "RANK, MASTER_PORT"),
    ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "here", "MASTER_PORT": "1"}, "RANK=2"),
    ({"RANK": "1"}, "RANK=1"),
])  # fmt: skip
def test_a_rank_that_cannot_be_is_named(monkeypatch, variables, named):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        cli.check_rank_variables()


def test_an_empty_variable_counts_as_missing(monkeypatch):
    for name in cli.RANK_VARIABLES:
        monkeypatch.setenv(name, "")
    cli.check_rank_variables()
    assert [cli.env_number(name) for name in cli.RANK_VARIABLES] == [0, 0, 1, 1]


# ------------------------------------------------------------------------- the words of the command line


@pytest.mark.parametrize("words, read", [
    (["--out-dir=~/runs/t"], ["--out-dir=/home/me/runs/t"]),
    (["--out-dir", "~/t", "--data-dir=/scratch/$ME/d"], ["--out-dir", "/home/me/t", "--data-dir=/scratch/you/d"]),
    (["--resume", "${ME}/t", "--seed", "1"], ["--resume", "you/t", "--seed", "1"]),
    (["--data-dir", "$NONE/x", "--out-dir=a~b"], ["--data-dir", "$NONE/x", "--out-dir=a~b"]),  # not defined; no home
    (["--sample-prompt", "~/$ME", "--sample-prompt=~/$ME"], None),
    (["run", "~/$ME", "$5", "~"], None),  # infer.py's prompts
    (["--json", "$ME", "--seed=1", "~/$ME"], None),
    (["--split-on", "$ME"], None),
])  # fmt: skip
def test_a_path_is_expanded_and_a_text_is_not(monkeypatch, words, read):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("ME", "you")
    assert cli.read_words(words) == (read or words)


def test_a_name_that_is_not_utf8_is_refused():
    with pytest.raises(UserError, match="udce9"):
        cli.read_words(["--out-dir", os.fsdecode(b"caf\xe9")])


@pytest.mark.parametrize("words, named", [
    (["a/b", "\u2013-public"], "U+2013"),
    (["a/b", "--public\u00a0"], "NO-BREAK SPACE"),
    (["\u201ca", "b\u201d"], "U+201C"),
])  # fmt: skip
def test_a_character_of_a_document_is_named_once_it_is_refused(run_in_fork, words, named):
    done = run_in_fork("hub.py", "check", *words, check=False)
    assert done.returncode == 2 and named in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", [path.name for path in ROOT.glob("*.py") if "run_cli(" in path.read_text()])
def test_a_python_without_the_packages_says_how_to_get_them(script):
    done = subprocess.run([sys.executable, "-S", ROOT / script, "-h"], capture_output=True, text=True)
    assert done.returncode == 1 and "make install" in done.stderr and done.stderr.count("\n") == 1


# ------------------------------------------------------------------------- ranks


def test_a_rank_ends_although_a_thread_does_not():
    """As a lost rank in gloo, or a compiler's pool, whose threads would keep the process alive."""
    hang = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('done')"
    script = f"from system.cli import run_cli; run_cli(lambda: exec({hang!r}))"
    env = {**os.environ, "WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)

    assert (done.returncode, done.stdout) == (0, "done\n")


def test_a_full_disk_costs_only_the_status(end, tmp_path, monkeypatch):
    monkeypatch.setattr(cli.os, "replace", lambda *_: raise_error(OSError(28, "No space left on device")))
    code, printed, status, _ = end(lambda: raise_error(UserError("no room")))
    assert (code, printed, status) == (1, "error: no room\n", None)


def test_rank_0_prints_without_control_codes(monkeypatch, capsys):
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        cli.print0("a\tb\nc\x1b]0;title\x07\x9b", 1)
    assert capsys.readouterr().out == "a\tb\nc\ufffd]0;title\ufffd\ufffd 1\n"


def test_a_cost_is_that_of_all_gpus():
    assert cli.format_cost(5400, gpus=8, gpu_hour_usd=2.5) == "$30.00"


@pytest.mark.parametrize("seconds, text", [
    (59.9, "59s"), (60, "1m00s"), (200, "3m20s"), (3600, "1h00m"), (3720, "1h02m"), (86400, "1d00h"),
    (93784, "1d02h"), (20575, "5h43m"), (103468, "1d05h"), (3599, "1h00m"), (86399, "1d00h"),
])  # fmt: skip
def test_a_duration_shows_its_two_largest_units(seconds, text):
    assert format_duration(seconds) == text


@pytest.mark.parametrize("text, seconds", [("3h50m", 13800), ("1d2s", 86402), ("4.5", 4.5), ("", math.inf)])
def test_a_duration_is_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["5 minutes", "3m2h", "-1", "٣h"])
def test_a_duration_that_is_none_is_refused(text):
    with pytest.raises(UserError, match=text):
        parse_duration(text)
