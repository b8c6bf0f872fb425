"""Text to shards: every document as tiktoken encodes it, and the same bytes whatever happens on the way."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from corpora import PARSED, WRITERS, encode, read_bytes, read_tokens, run_fineweb, write_documents
from helpers import ROOT, make_documents, write_parquet

from system.cli import UserError
from system.files import lock_folder
from tokens import documents as readers
from tokens import shards, tokenizer
from tokens.documents import READERS


@pytest.fixture(scope="module")
def shared_encoder():
    return tokenizer.bulk_encoder()


@pytest.fixture
def quick(monkeypatch, shared_encoder):
    """Many runs in this process share one encoder, and do not wait for the disk."""
    monkeypatch.setattr(shards, "bulk_encoder", lambda: shared_encoder)
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100)
    return path


# ------------------------------------------------------------------------- the same tokens as tiktoken


@pytest.mark.parametrize("shard_format", ["npy", "bin"])
def test_the_shards_hold_the_documents(tmp_path, quick, shard_format):
    documents = [*make_documents(1), None, "last"]
    write_parquet(tmp_path / "a b.parquet", documents, row_group_size=7)
    out = tmp_path / "out"

    run_fineweb("--source", tmp_path / "a b.parquet", "--out", out, "--shard-size", 5000, "--format", shard_format)

    assert read_tokens(out) == encode(documents)
    names = [path.name for path in shards.shard_files(out)]
    assert names[:2] == [f"a-b_val_000000.{shard_format}", f"a-b_train_000001.{shard_format}"]


@pytest.mark.parametrize("chunk_bytes, shard_size", [(1, 3000), (2000, 2999), (1 << 23, 10**8)])
def test_the_sizes_do_not_change_the_tokens(tmp_path, quick, monkeypatch, chunk_bytes, shard_size):
    documents = make_documents(5)
    files = [write_documents(tmp_path / name, documents) for name in ("a.parquet", "b.jsonl")]
    monkeypatch.setattr(readers, "CHUNK_BYTES", chunk_bytes)

    run_fineweb("--source", *files, "--out", tmp_path / "out", "--shard-size", shard_size)

    assert read_tokens(tmp_path / "out") == encode(documents * 2)


@pytest.mark.parametrize("limit", [1, 99, 100, 101, 2000])
def test_limit_tokens_is_exact(tmp_path, quick, limit):
    documents = make_documents(6)
    path = write_parquet(tmp_path / "a.parquet", documents)

    run_fineweb("--source", path, "--out", tmp_path / "out", "--shard-size", 100, "--limit-tokens", limit)

    assert read_tokens(tmp_path / "out") == encode(documents)[:limit]


@pytest.mark.parametrize("repeats", [2, 30, 5000])
def test_default_shard_size_leaves_val_and_train(tmp_path, quick, repeats):
    (tmp_path / "a.txt").write_text("To be, or not to be. " * repeats)

    run_fineweb("--source", tmp_path / "a.txt", "--out", tmp_path / "out")

    sizes = [shard.tokens for shard in shards.read_manifest(tmp_path / "out").shards]
    assert len(sizes) >= 3
    assert len(str(sizes[0]).rstrip("0")) == 1, "the size is rounded to one digit"


def test_stdlib_as_a_command(tmp_path, run_script, run_in_fork):
    done = run_script("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path, timeout=60)

    tokens = read_tokens(tmp_path / "data")
    manifest = shards.read_manifest(tmp_path / "data")
    assert f"{len(tokens):,} tokens" in done.stdout and "--data-dir data" in done.stdout
    assert len(tokens) > 3e6 and len(manifest.shards) > 4

    # The files are the library's, without tests and packages, and shuffled.
    names = [file["path"] for file in manifest.source["files"]]
    assert not [name for name in names if "test" in name.split("/") or "site-packages" in name]
    assert names != sorted(names)
    document = encode([(Path(os.__file__).parent / names[0]).read_text(encoding="utf-8")])
    assert tokens[: len(document)] == document

    # The same command finds nothing to do, and the folder is intact.
    again = run_in_fork("fineweb.py", "--source", "stdlib", "--out", "data", cwd=tmp_path)
    assert "nothing left to do" in again.stdout
    assert "every shard is intact" in run_in_fork("fineweb.py", "--verify", "data", cwd=tmp_path).stdout


def test_a_million_tokens_of_real_books(tmp_path, shared_data):
    source = shared_data / "books-0*.parquet"
    run_fineweb("--source", source, "--out", tmp_path, "--limit-tokens", 1_000_000)

    first_rows = next(pq.ParquetFile(shared_data / "books-00.parquet").iter_batches(2000, columns=["text"]))
    ids = encode(first_rows.column(0).to_pylist())
    assert read_tokens(tmp_path) == ids[:1_000_000] and len(ids) > 1_000_000
    manifest = shards.read_manifest(tmp_path)
    assert len(manifest.source["files"]) == 4 and manifest.shard_tokens == 100_000


def test_help_lists_every_suffix_and_needs_no_torch(run_script):
    output = run_script("fineweb.py", "--help").stdout
    assert not [suffix for suffix in READERS if suffix not in output]

    heavy = "{'torch', 'datasets', 'pyarrow', 'huggingface_hub'}"
    code = f"import sys, fineweb; assert not {heavy} & sys.modules.keys(), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# ------------------------------------------------------------------------- killed and run again


class Killed(BaseException):
    """Ends a run in this process as a kill would: nothing catches it."""


@pytest.fixture
def mixed_source(tmp_path):
    """Arguments for a source of every kind, whose documents run over shards and whose shards run over files."""
    files = [write_documents(tmp_path / "src" / f"v{s}", make_documents(11 + i, 9)) for i, s in enumerate(WRITERS)]
    files.append(write_documents(tmp_path / "src" / "w.parquet", make_documents(1, 20)))
    return ["--source", *files, "--shard-size", 20_000]


def crash_at(write, after_rename=False):
    """An os.replace that crashes before or after its call number `write`."""
    real_replace = os.replace
    calls = 0

    def replace_or_crash(*args):
        nonlocal calls
        calls += 1
        if calls == write and not after_rename:
            raise Killed
        real_replace(*args)
        if calls == write:
            raise Killed

    return replace_or_crash


@pytest.mark.parametrize("suffix", PARSED)
def test_every_format_is_resumed_in_mid_file(tmp_path, quick, monkeypatch, suffix):
    # Arrange: the folder of a run without a crash, in chunks and shards that are much smaller than the file.
    path = write_documents(tmp_path / f"a{suffix}", make_documents(12, 10))
    monkeypatch.setattr(readers, "CHUNK_BYTES", 999)
    args = ("--source", path, "--shard-size", 2000)
    run_fineweb(*args, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")

    # Every run crashes before it renames its fourth file, the second new shard or its manifest, until little is left.
    crashes = 0
    finished = False
    while not finished:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash_at(4))
            try:
                run_fineweb(*args, "--out", tmp_path / "out")
                finished = True
            except Killed:
                crashes += 1
        assert crashes < len(expected), "a run adds no shard to those of the run before"

    assert crashes >= 3
    assert read_bytes(tmp_path / "out") == expected


def test_a_crash_at_every_write_changes_nothing(tmp_path, mixed_source, quick, monkeypatch):
    # A file is written by renaming it: one rename per shard and per manifest, the first and the last one included.
    run_fineweb(*mixed_source, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")
    writes = 2 * (len(shards.read_manifest(tmp_path / "expected").shards) + 1)
    assert writes > 8

    for write in range(1, writes + 1):
        for after_rename in (False, True):
            out = tmp_path / f"{write}{after_rename}"
            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", crash_at(write, after_rename))
                with pytest.raises(Killed):
                    run_fineweb(*mixed_source, "--out", out)
            run_fineweb(*mixed_source, "--out", out)
            assert read_bytes(out) == expected, (write, after_rename)
            shutil.rmtree(out)


def test_sigkill_and_sigint_then_again(tmp_path, start_script):
    args = ("--source", "stdlib", "--limit-tokens", 1_000_000, "--shard-size", 50_000)
    run_fineweb(*args, "--out", tmp_path / "expected")
    expected = read_bytes(tmp_path / "expected")
    out = tmp_path / "out"

    # Killed once early and once late, each time when a certain shard appears: while it works.
    for index, signal_number in ((2, signal.SIGKILL), (14, signal.SIGINT)):
        script = start_script("fineweb.py", *args, "--out", out)
        assert script.wait_until((out / f"stdlib_train_{index:06d}.npy").exists), script.output
        assert script.send(signal_number)
        assert "Traceback" not in script.wait().output, script.output
        assert read_bytes(out).keys() <= expected.keys()

    run_fineweb(*args, "--out", out)
    assert read_bytes(out) == expected


def test_a_missing_or_cut_shard_is_made_again(tmp_path, mixed_source, quick, monkeypatch, capsys):
    out = tmp_path / "out"
    run_fineweb(*mixed_source, "--out", out)
    expected = read_bytes(out)
    files = shards.shard_files(out)

    for damaged in (files[:1], [files[0], files[2]], files[-1:]):
        # One shard is gone or cut, and the first attempt to make it again crashes.
        damaged[0].write_bytes(damaged[0].read_bytes()[:-2])
        for path in damaged[1:]:
            path.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash_at(3))
            with pytest.raises(Killed):
                run_fineweb(*mixed_source, "--out", out)
        run_fineweb(*mixed_source, "--out", out)
        assert f"{damaged[0]} is missing or damaged" in capsys.readouterr().out
        assert read_bytes(out) == expected


@pytest.mark.slow
def test_the_notebook_cell_that_keeps_tokens_in_a_drive(tmp_path):
    """The cell of docs/data.md: cut off, its disk lost, and run again. The Drive is a folder."""
    # Arrange: the cell, with a source that needs no network and with short sleeps.
    page = (ROOT / "docs" / "data.md").read_text()
    lines = page.partition("    %%bash\n")[2].partition("\n\n")[0].replace("\n    ", "\n").strip()
    drive = tmp_path / "drive" / "fineweb-edu"
    python = f"{sys.executable} {ROOT}/fineweb.py"
    args = "--source stdlib --out data/fineweb-edu --shard-size 200000"
    cell = lines.replace("/content/drive/MyDrive", str(drive.parent)).replace("sleep 600", "sleep 0.1")
    cell = cell.replace("python fineweb.py", f"{python} {args}")

    # Act: the first notebook is lost when some shards are in the Drive; the second one ends.
    (tmp_path / "first").mkdir()
    notebook = subprocess.Popen(["bash", "-c", cell], cwd=tmp_path / "first", start_new_session=True)
    while len(list(drive.glob("*.npy"))) < 3 or not (drive / "manifest.json").exists():
        assert notebook.poll() is None
        time.sleep(0.01)
    os.killpg(notebook.pid, signal.SIGKILL)
    notebook.wait()
    assert not shards.read_manifest(drive).complete
    (tmp_path / "second").mkdir()
    subprocess.run(["bash", "-c", cell], cwd=tmp_path / "second", check=False)

    # Assert
    run_fineweb("--source", "stdlib", "--out", tmp_path / "expected", "--shard-size", "200000")
    for folder in (drive, tmp_path / "second" / "data" / "fineweb-edu"):
        assert read_bytes(folder) == read_bytes(tmp_path / "expected")


# ------------------------------------------------------------------------- the folder


def test_two_runs_on_one_folder(tmp_path, text_file):
    with lock_folder(tmp_path / "out"), pytest.raises(UserError, match=str(tmp_path / "out")):
        run_fineweb("--source", text_file, "--out", tmp_path / "out")
    assert read_bytes(tmp_path / "out") == {}


def test_other_parameters_are_refused_by_name(tmp_path, quick):
    (tmp_path / "a.txt").write_text("a text " * 100)
    (tmp_path / "b.txt").write_text("b text " * 100)

    def run(**changes):
        flags = {"source": tmp_path / "a.txt", "shard_size": 50, "limit_tokens": 150, "format": "npy", **changes}
        words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
        run_fineweb(*words, "--out", tmp_path / "out")

    # The same parameters twice are accepted.
    run()
    before = read_bytes(tmp_path / "out")
    run()

    for change, message in (
        ({"source": tmp_path / "b.txt"}, "name a, not b"),
        ({"shard_size": 60}, "shard_tokens 50, not 60"),
        ({"limit_tokens": 160}, "limit_tokens 150, not 160"),
        ({"format": "bin"}, "format npy, not bin"),
        ({"text_column": "body"}, "column text, not body"),
        ({"split_on": "x"}, "split_on None, not x"),
    ):
        with pytest.raises(UserError, match=message):
            run(**change)

    # A file of the same name and size with other content is another revision.
    (tmp_path / "a.txt").write_text("x text " * 100)
    with pytest.raises(UserError, match="was made with revision"):
        run()
    assert read_bytes(tmp_path / "out") == before


def test_a_failed_commands_folder_may_be_used(tmp_path, quick):
    (tmp_path / "a.jsonl").write_text('{"body": "some text of several tokens"}\n')
    with pytest.raises(UserError, match="--text-column"):
        run_fineweb("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out")

    flags = ("--text-column", "body", "--shard-size", 3)
    run_fineweb("--source", tmp_path / "a.jsonl", "--out", tmp_path / "out", *flags)

    assert read_tokens(tmp_path / "out") == encode(["some text of several tokens"])


def test_files_of_others_are_left_alone(tmp_path, quick, text_file):
    out = tmp_path / "out"
    out.mkdir()
    foreign = out / "a_train_000001.npy"
    foreign.write_bytes(b"foreign")

    # A shard that no manifest lists is not overwritten, also beside those of this command.
    with pytest.raises(UserError, match=f"{foreign} was not written by this command"):
        run_fineweb("--source", text_file, "--out", out)
    foreign.rename(out / "notes.txt")
    run_fineweb("--source", text_file, "--out", out)
    assert (out / "notes.txt").read_bytes() == b"foreign"
    (out / "notes.txt").rename(out / "b_train_000001.npy")
    with pytest.raises(UserError, match=r"b_train_000001\.npy was not written by this command"):
        run_fineweb("--source", text_file, "--out", out)


@pytest.mark.parametrize(
    "file_names, shard_name",
    [
        (("books-00.txt", "books-01.txt.gz"), "books"),
        (("alpha.txt", "apple.txt"), "texts"),
        (("one day.txt",), "one-day"),
        (("2024.txt",), "texts"),
    ],
)
def test_shards_are_named_after_the_files(tmp_path, file_names, shard_name):
    from tokens.sources import choose_source

    (tmp_path / "texts").mkdir()
    for name in file_names:
        (tmp_path / "texts" / name).touch()
    assert choose_source((str(tmp_path / "texts" / "*"),))[0] == shard_name


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_verify(tmp_path, quick, text_file, capsys, suffix):
    folder = tmp_path / "out"
    run_fineweb("--source", text_file, "--out", folder, "--format", suffix, "--shard-size", 100)
    before = read_bytes(folder)
    run_fineweb("--verify", folder)
    assert "every shard is intact" in capsys.readouterr().out

    # A bit flips: with the manifest the hash tells.
    path = folder / f"a_train_000001.{suffix}"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=r"000001.*has sha256.*remove it, and run the command"):
        run_fineweb("--verify", folder)

    # Shards of another program have none: sizes and ids are checked.
    (folder / "manifest.json").unlink()
    run_fineweb("--verify", folder)
    assert "no hashes" in capsys.readouterr().out
    shards.write_shard(path, np.array([7, 50257]))
    with pytest.raises(UserError, match=r"000001.*id 50257"):
        run_fineweb("--verify", folder)
    assert read_bytes(folder).keys() == before.keys() - {"manifest.json"}


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("args, message", [
    (["missing.txt"], r"missing\.txt.*stdlib"),
    (["no*.csv"], r"no\*\.csv"),
    (["dir"], "not a file"),
    (["stdlib", "good.txt"], "--source stdlib"),
    (["good.txt", "bad.xml"], r"bad\.xml: its suffix \.xml"),
    (["none.jsonl"], "holds no documents"),
    (["good.txt", "--shard-size", "0"], "--shard-size"),
    (["good.txt", "--limit-tokens", "-5"], "--limit-tokens"),
    (["good.txt", "--split", "test"], "--subset and --split"),
    (["none.jsonl", "--split-on", "x"], "--split-on"),
    (["good.txt", "--split-on", ""], "--split-on"),
    ([], "--source"),
])  # fmt: skip
def test_what_cannot_work_is_refused(tmp_path, monkeypatch, quick, args, message):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text("x")
    Path("bad.xml").write_text("<x/>")
    Path("none.jsonl").write_text("\n\n")
    Path("dir").mkdir()

    with pytest.raises(UserError, match=message):
        run_fineweb("--source", *args, "--out", "out")

    assert not list(Path().glob("out/*_*"))


def test_a_full_disk_is_reported_before_the_work(tmp_path, monkeypatch, text_file):
    monkeypatch.setattr("fineweb.free_bytes", lambda folder: 10**9)
    with pytest.raises(UserError, match=r"about 4\.0 GB .* 1\.0 GB free"):
        run_fineweb("--source", text_file, "--out", tmp_path / "out", "--limit-tokens", 2 * 10**9)


def test_commands_fail_with_one_message(tmp_path, expect_failure):
    expect_failure("fineweb.py", "--source", tmp_path / "none.txt", mentions=["none.txt", "stdlib"], cwd=tmp_path)
    expect_failure("fineweb.py", "--verify", tmp_path / "none", mentions=["none", "python fineweb.py"])
    expect_failure("fineweb.py", "--sauce", "x", mentions=["--sauce"])
    assert not list(tmp_path.glob("*/*"))
