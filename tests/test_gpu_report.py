"""`make gpu-report QUICK=1`, without a GPU: the script itself."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

# What it can do without.
PACKAGES = "gigatoken datasets httpx2 huggingface_hub transformers safetensors matplotlib tensorboard".split()

FLAGS = """--device cpu --no-compile --model.n-layer 1 --model.n-head 1 --model.n-embd 32 --model.block-size 32
--sequence-length 32 --total-batch-size 256 --max-steps 100000 --warmup-steps 10 --val-tokens 1024 --sample-every 0"""

PARTS = {
    "machine": "versions",
    "random tokens": "",
    "gpt2-124m --dry-run": "tokens/s",
    "kernels": "pinned host memory",
    "record8-124m --dry-run": "tokens/s",
    "SIGTERM while it compiles": '"stopped"',
    "tests": "1 of 1 passed",
}


@pytest.mark.slow
def test_the_short_report_has_a_result_of_each_part(tmp_path):
    shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(".*", "data", "log"))
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({PACKAGES}))\n")
    env = {
        **os.environ,
        "QUICK": "1",
        "PYTHON": sys.executable,
        "PYTHONPATH": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "DEVICE": "cpu",
        "TESTS": "samples",
        "FLAGS": " ".join(FLAGS.split()),
    }
    done = subprocess.run([tmp_path / "copy/bench/gpu.sh"], env=env, capture_output=True)
    parts = done.stdout.decode().partition("## To paste")[2].split("| **")[1:]
    for part, (name, result) in zip(parts, PARTS.items(), strict=True):
        assert part.startswith(f"{name}** | exit code 0,") and result in part, done.stdout.decode()


# In place of Python: one test passes, the next one hangs. The one that fills the card must come last.
PYTEST = """#!/bin/sh
case "$*" in
*--collect-only*) printf 'file::ballast\nfile::passes\nfile::hangs\n' ;;
*hangs) sleep 60 ;;
*passes) echo '1 passed' ;;
*) echo 'too early' ;;
esac
"""


def test_the_report_counts_what_has_passed_when_the_tests_time_out(tmp_path):
    (tmp_path / "log/gpu-report").mkdir(parents=True)
    script, python = tmp_path / "bench/gpu.sh", tmp_path / "python"
    script.parent.mkdir()
    shutil.copy(ROOT / "bench/gpu.sh", script)
    python.write_text(PYTEST)
    python.chmod(0o700)
    done = subprocess.run(
        [script, "part", "tests", "1", script, "run_tests"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )
    assert "1 of 3 passed" in done.stdout and "too early" not in done.stdout
    assert "exit code 124" in (tmp_path / "log/gpu-report/table.md").read_text()
