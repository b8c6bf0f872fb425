"""`make gpu-report QUICK=1` on a CPU, with a tiny network: the script itself."""

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
    "machine": "attention",
    "random tokens": "",
    "gpt2-124m --dry-run": "tokens/s",
    "kernels": "attention, chunks of 32768",
    "record8-124m --dry-run": "tokens/s",
    "tests": "1 of 1 passed",
    "SIGTERM while it compiles": '"stopped"',
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
