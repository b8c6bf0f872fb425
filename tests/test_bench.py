"""The benches still run, and print their tables. At their smallest: the figures in them mean nothing."""

import os
import shlex
import subprocess
import sys

import pytest
from helpers import ROOT, make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

from bench import peers
from bench.__main__ import BENCHES
from system.cli import UserError

# A network and a step that take a fraction of a second.
SMALL = (
    "--optimizer=adamw --micro-batch-size=4 --sequence-length=32 --total-batch-size=256 --no-compile "
    "--model.n-layer=1 --model.n-head=2 --model.n-embd=32 --model.block-size=32"
)
# The arguments of each bench, without what needs a peer, and the rows of its table.
RUNS = {
    "train": (
        "quickstart --data-dir {tmp}/data --steps 1 --rounds 1 --only ours {root} -- " + SMALL,
        ["ours", str(ROOT)],
    ),
    "tokens": ("{tmp}/a.parquet --rounds 1 --only fineweb.py", ["fineweb.py"]),
    "generate": (
        "--device cpu --dtype float32 --rounds 1 --new-tokens 2 --samples 1 --data {tmp}/rows.jsonl --limit 2 "
        "--only samples samples-loop hellaswag-loop hellaswag-float32",
        ["samples", "samples-loop", "hellaswag-loop", "hellaswag-float32"],
    ),
}


def test_every_bench_is_run_here():
    assert {*RUNS, "parity"} == set(BENCHES)  # tests/test_parity.py


def run_bench(*words, timeout=60):
    command = [sys.executable, "-m", "bench", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_list_names_every_bench():
    output = run_bench()
    for _, commands in BENCHES.values():
        for command in commands:
            assert f"python -m bench {command}" in output


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_bench_runs(name, tmp_path):
    arguments, rows = RUNS[name]
    make_shards(tmp_path / "data", size=200_000)
    write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4))
    write_parquet(tmp_path / "a.parquet", make_documents(1))
    words = shlex.split(arguments.format(tmp=tmp_path, root=ROOT))

    output = run_bench(name, *words, timeout=600)

    header, _, table = output.partition("|---|")
    found = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[1:]]
    assert found == rows, output
    assert f"python -m bench {name}" in header and "commit" in header


def git(*words, cwd):
    env = os.environ | {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    return subprocess.run(["git", *words], cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_a_peer_is_read_at_its_commit_whatever_is_checked_out(tmp_path, monkeypatch):
    clone = tmp_path / "peer"
    clone.mkdir()
    git("init", "-q", cwd=clone)
    for text in ("old", "new"):
        (clone / "train.py").write_text(text)
        git("add", ".", cwd=clone)
        git("commit", "-qm", text, cwd=clone)
    monkeypatch.setitem(peers.PEERS, "peer", ("owner/peer", git("rev-parse", "HEAD~1", cwd=clone)))

    assert peers.read(tmp_path, "peer", "train.py") == "old"
    with pytest.raises(UserError, match=r"missing\.py"):
        peers.read(tmp_path, "peer", "missing.py")


def test_the_script_for_a_gpu_reports_a_part_that_fails_and_goes_on(tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "gpu.sh").write_bytes((ROOT / "bench" / "gpu.sh").read_bytes())
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "called with $*"; case "$*" in *dry-run*) exit 3;; esac\n')
    python.chmod(0o755)

    env = os.environ | {"PYTHON": str(python), "PRESETS": "gpt2-124m"}
    subprocess.run(["bash", tmp_path / "bench" / "gpu.sh"], env=env, check=True, capture_output=True)

    report = (tmp_path / "log" / "gpu-report.md").read_text()
    assert "FAILED with exit code 3" in report
    assert report.index("gpt2-124m --data-dir") < report.index("called with train_gpt2.py quickstart")
