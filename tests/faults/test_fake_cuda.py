"""The scripts on fake CUDA tensors: a few cases and planted faults of fake_cuda.py, in a process of its own."""

import shutil
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch built for CUDA asks its driver all the same"),
    pytest.mark.skipif(not (sys.platform == "linux" and shutil.which("g++")), reason="wants Linux and g++"),
]
QUICK = ("gpt2-124m:plan", "speedrun-124m:float16", "fault:moments")


def summary(run_script, *words, timeout):
    done = run_script("tests/faults/fake_cuda.py", *words, check=False, env={"OMP_NUM_THREADS": "1"}, timeout=timeout)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_scripts_run_on_a_card_and_planted_faults_are_noticed(run_script):
    assert "3 cases, 0 failed" in summary(run_script, *QUICK, timeout=300)


@pytest.mark.slow
def test_every_preset_and_precision(run_script):
    assert "46 cases, 0 failed" in summary(run_script, timeout=1800)
