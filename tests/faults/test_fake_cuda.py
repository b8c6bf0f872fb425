"""The scripts on fake CUDA tensors: cases and planted faults of fake_cuda.py, in a process of its own."""

import shutil
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a torch built for CUDA asks its driver all the same"),
    pytest.mark.skipif(not (sys.platform == "linux" and shutil.which("g++")), reason="wants Linux and g++"),
]

# A plan, and a fault that is noticed only after training has evaluated, sampled and saved, when the run is resumed. The
# slow test below has every preset's whole life, with hellaswag.py and infer.py.
QUICK_CASES = ("gpt2-124m:plan", "fault:moments")


def run_cases(run_script, *words, timeout) -> str:
    """The last line that fake_cuda.py prints, having run the cases with one of these words in their name, or all."""
    command = ["tests/faults/fake_cuda.py", *words]
    done = run_script(*command, check=False, env={"OMP_NUM_THREADS": "1"}, timeout=timeout)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def test_the_scripts_run_on_a_fake_card_and_a_planted_fault_is_noticed(run_script):
    assert "2 cases, 0 failed" in run_cases(run_script, *QUICK_CASES, timeout=300)


@pytest.mark.slow
def test_every_preset_and_precision_runs_and_every_fault_is_noticed(run_script):
    assert "40 cases, 0 failed" in run_cases(run_script, timeout=1800)
