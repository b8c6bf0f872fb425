"""One GPU, where the machine has one; elsewhere all of it is skipped: the same results as the CPU's, and the same bits
again with --deterministic. DEVICE=cpu runs it without one, to try the tests themselves."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, TINY_FLAGS, make_hellaswag_rows, write_jsonl, write_tiny_model

from training import metrics

DEVICE = os.environ.get("DEVICE", "cuda")
there = shutil.which("nvidia-smi") and b"GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout
pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not there, reason="no NVIDIA GPU here")


@pytest.fixture
def call(gpus):
    """What a script of this project, `-m MODULE` or `-c CODE`, prints that sees the GPUs."""

    def run(*args):
        env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | gpus
        command = [sys.executable, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, cwd=ROOT)
        assert done.returncode == 0, f"{args}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("cuda") / "run", block_size=64, n_embd=128)


def test_samples_are_those_of_the_cpu(call, run_dir):
    """Past the context, too, where it slides."""
    flags = ["Hello", "--temperature", "0", "--max-new-tokens", "90", "--dtype", "float32", "--json"]
    flags += ["--num-samples", "2"]
    there, here = (call("infer.py", run_dir, *flags, "--device", device).splitlines() for device in (DEVICE, "cpu"))
    assert len(json.loads(here[0])["tokens"]) == 90 and there == here
    flags[flags.index("float32")] = "bfloat16"
    first, again = (call("infer.py", run_dir, *flags, "--device", DEVICE) for _ in range(2))
    assert first == again


def test_hellaswag_scores_are_those_of_the_cpu(call, run_dir, tmp_path):
    rows, found = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(12)), []
    for device in (DEVICE, "cpu"):
        out = tmp_path / f"{device}.jsonl"
        flags = ["--data", rows, "--dtype", "float32", "--per-example", out, "--device", device]
        call("hellaswag.py", "--model", run_dir, *flags)
        found.append(torch.tensor([json.loads(line)["losses"] for line in out.read_text().splitlines()]))
    torch.testing.assert_close(*found, rtol=3e-3, atol=0)  # TF32 on the GPU


def test_attention_is_that_of_the_math_kernel(call):
    """Whatever kernel torch chooses, at GPT-2's head size and speedrun's: outputs and gradients."""
    script = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
for hs in (64, 128):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 4, 1024, hs, device=sys.argv[1], dtype=torch.bfloat16).requires_grad_()
    y = F.scaled_dot_product_attention(*qkv, is_causal=True)
    (g,) = torch.autograd.grad(y, qkv, y.detach())
    exact = qkv.detach().float().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        z = F.scaled_dot_product_attention(*exact, is_causal=True)
        (h,) = torch.autograd.grad(z, exact, z.detach())
    torch.testing.assert_close(y.float(), z, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(g.float(), h, rtol=5e-2, atol=5e-2)
"""
    call("-c", script, DEVICE)


@pytest.mark.parametrize("preset", ["gpt2-124m", "speedrun-124m"])
def test_training_is_that_of_the_cpu(call, preset, tiny_data, tmp_path):
    """Compiled, in float32: the curve of the CPU to rounding; the micro-batch is found by trying."""
    flags = [w for w in TINY_FLAGS if w != "--no-compile"] + ["--data-dir", tiny_data]
    if preset == "speedrun-124m":
        flags[flags.index("--model.n-head") + 1] = "1"
    curves = []
    for out, device in {"there": DEVICE, "here": "cpu"}.items():
        more = ["--micro-batch-size", "auto", "--device", device, "--out-dir", tmp_path / out]
        said = call("train_gpt2.py", preset, *flags, *more)
        assert "1 x 1 x 8 x 32" in said
        lines = metrics.read_lines(tmp_path / out / "metrics.jsonl")
        curves.append([line["train_loss"] for line in lines if "train_loss" in line])
    assert len(curves[0]) == 12
    assert curves[0] == pytest.approx(curves[1], rel=5e-3)


def test_a_killed_run_ends_with_the_same_bits(call, tiny_data):
    flags = [w for w in TINY_FLAGS if w not in ("--no-compile", "--dtype", "float32")]
    for name in ("--max-steps", "--save-every", "--val-every", "--hellaswag-every", "--sample-every"):
        del flags[flags.index(name) : flags.index(name) + 2]
    ways = ["deterministic", "deterministic dtype=float16"]
    how = ["--data-dir", tiny_data, "--steps", "60", "--ways", *ways]
    said = call("-m", "bench.resume", "quickstart", *how, "--", *flags)
    assert said.count("| same bits | same bits |") == 2, said
