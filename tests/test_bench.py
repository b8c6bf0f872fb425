"""The benches still run, and print their tables. At their smallest: the figures in them mean nothing."""

import os
import shlex
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT, make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

from bench import programs
from system.cli import UserError

# The arguments of each bench, without what needs a peer, and the rows of its table.
SMALL = "--micro-batch-size 4 --sequence-length 32 --total-batch-size 256 --no-compile"
SMALL += " --model.n-layer 1 --model.n-head 2 --model.n-embd 32 --model.block-size 32"
RUNS = {
    "train": (f"--rounds 1 --only ours plain -- {SMALL} --data-dir {{tmp}}/data", "ours plain"),
    "tokens": ("{tmp}/a.parquet --rounds 1 --only ours", "ours"),
    "samples": ("--rounds 1", "ours transformers loop"),
    "hellaswag": ("--rounds 1 --data {tmp}/rows.jsonl --limit 2", "ours loop"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_bench_runs(name, tmp_path):
    make_shards(tmp_path / "data", size=200_000)
    write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4))
    write_parquet(tmp_path / "a.parquet", make_documents(1))
    arguments, rows = RUNS[name]

    words = shlex.split(arguments.format(tmp=tmp_path))
    command = [sys.executable, "-m", "bench.speed", name, *words]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=600)

    _, _, table = output.partition("|---|")
    assert [line.split(" | ")[0] for line in table.splitlines()[1:]] == [f"| {row}" for row in rows.split()], output


def git(*words, cwd):
    env = os.environ | {f"GIT_{role}_{key}": "a@b" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    return subprocess.run(["git", *words], cwd=cwd, env=env, check=True, capture_output=True, text=True).stdout.strip()


def test_a_peer_is_read_at_its_commit(tmp_path, monkeypatch):
    clone = tmp_path / "peer"
    clone.mkdir()
    git("init", "-q", cwd=clone)
    for text in ("old", "new"):
        (clone / "train.py").write_text(text)
        git("add", ".", cwd=clone)
        git("commit", "-qm", text, cwd=clone)
    monkeypatch.setitem(programs.PEERS, "peer", ("owner/peer", git("rev-parse", "HEAD~1", cwd=clone)))

    assert programs.read(tmp_path, "peer", "train.py") == "old"
    with pytest.raises(UserError, match=r"missing\.py"):
        programs.read(tmp_path, "peer", "missing.py")


# torchrun ends well only if it is told to stop; the dry runs fail; the rest says that it was called.
GPU_STAND_IN = """#!/bin/sh
echo "called with $*"
case "$*" in
*torch.distributed.run*)
    trap 'echo "{\\"status\\": \\"$STATUS\\"}" > "$TRAIN_STATUS_FILE"; exit 1' TERM
    mkdir "${TRAIN_STATUS_FILE%.status.json}"
    while :; do :; done ;;
*dry-run*) exit 3 ;;
esac
"""


@pytest.mark.parametrize("status, failures", [("stopped", 1), ("user_error", 2)])
def test_the_report_of_a_gpu_goes_on_after_a_failure(tmp_path, status, failures):
    (tmp_path / "bench").mkdir()
    shutil.copy(ROOT / "bench/gpu.sh", tmp_path / "bench")
    for name, script in {"python": GPU_STAND_IN, "sleep": "", "nvidia-smi": "", "git": ""}.items():
        (tmp_path / name).write_text(script or "#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)

    env = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "PYTHON": str(tmp_path / "python"),
        "PRESETS": "gpt2-124m",
        "STATUS": status,
    }
    subprocess.run(["bash", tmp_path / "bench/gpu.sh"], env=env, check=True, capture_output=True, timeout=30)

    report = (tmp_path / "log/gpu-report.md").read_text()
    assert report.index("exit code 3") < report.index("called with train_gpt2.py quickstart")
    assert report.count("FAILED") == failures and "--dtype float16" in report
