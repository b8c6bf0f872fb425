"""One GPU, where the machine has one; elsewhere all of it is skipped: the same results as the CPU's, and the same bits
again with --deterministic. DEVICE=cpu runs it without one, to try the tests themselves."""

import json
import os
import shutil
import subprocess
import sys
import time

import pytest
import torch
from helpers import ROOT, TINY_FLAGS, load_weights, make_hellaswag_rows, same_bits, write_jsonl, write_tiny_model

from training.checkpoint import model_path
from training.metrics import read_metrics

DEVICE = os.environ.get("DEVICE", "cuda")


def has_nvidia_gpu() -> bool:
    """Whether the driver lists a GPU. torch cannot tell: the tests hide the GPUs from this process (conftest.py)."""
    if shutil.which("nvidia-smi") is None:
        return False
    return b"GPU 0" in subprocess.run(["nvidia-smi", "-L"], capture_output=True).stdout


pytestmark = pytest.mark.skipif(DEVICE == "cuda" and not has_nvidia_gpu(), reason="no NVIDIA GPU here")


@pytest.fixture
def run_on_gpu(gpus):
    """run_on_gpu("infer.py", ...) -> what a script of this project, `-m MODULE` or `-c CODE` prints, in a process that
    sees the GPUs."""

    def run(*args, timeout=200):
        env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | gpus
        command = [sys.executable, *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout, cwd=ROOT)
        assert done.returncode == 0, f"{args}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run folder with a tiny model."""
    return write_tiny_model(tmp_path_factory.mktemp("cuda") / "run", block_size=64, n_embd=128)


def test_samples_in_float32_are_those_of_the_cpu(run_on_gpu, run_dir):
    """Past the context, too, where it slides."""
    flags = ["Hello", "--temperature", "0", "--max-new-tokens", "90", "--num-samples", "2"]
    command = ["infer.py", run_dir, *flags, "--dtype", "float32", "--json", "--device"]

    on_gpu, on_cpu = (run_on_gpu(*command, device).splitlines() for device in (DEVICE, "cpu"))

    assert len(json.loads(on_cpu[0])["tokens"]) == 90
    assert on_gpu == on_cpu


def test_samples_in_bfloat16_repeat(run_on_gpu, run_dir):
    flags = ["Hello", "--temperature", "0", "--max-new-tokens", "90", "--num-samples", "2"]
    command = ["infer.py", run_dir, *flags, "--dtype", "bfloat16", "--json", "--device", DEVICE]

    first, second = run_on_gpu(*command), run_on_gpu(*command)

    assert first == second


def test_hellaswag_scores_are_those_of_the_cpu(run_on_gpu, run_dir, tmp_path):
    rows, losses = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(12)), []

    for device in (DEVICE, "cpu"):
        scores = tmp_path / f"{device}.jsonl"
        flags = ["--data", rows, "--dtype", "float32", "--per-example", scores, "--device", device]
        run_on_gpu("hellaswag.py", "--model", run_dir, *flags)
        losses.append(torch.tensor([json.loads(line)["losses"] for line in scores.read_text().splitlines()]))

    torch.testing.assert_close(*losses, rtol=3e-3, atol=0)  # TF32 on the GPU


# Attention of whatever kernel torch chooses, and of the math kernel in float32: outputs and gradients.
COMPARE_ATTENTION = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
for head_size in (64, 128):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 4, 1024, head_size, device=sys.argv[1], dtype=torch.bfloat16).requires_grad_()
    y = F.scaled_dot_product_attention(*qkv, is_causal=True)
    (gradient,) = torch.autograd.grad(y, qkv, y.detach())

    exact_qkv = qkv.detach().float().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        exact_y = F.scaled_dot_product_attention(*exact_qkv, is_causal=True)
        (exact_gradient,) = torch.autograd.grad(exact_y, exact_qkv, exact_y.detach())

    torch.testing.assert_close(y.float(), exact_y, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient.float(), exact_gradient, rtol=5e-2, atol=5e-2)
"""


def test_attention_is_that_of_the_math_kernel(run_on_gpu):
    """At GPT-2's head size and at speedrun's; the script fails where they differ."""
    run_on_gpu("-c", COMPARE_ATTENTION, DEVICE)


# The loss and the gradients of the head in chunks, in bfloat16, at a vocabulary that is padded and at one that is not;
# and the precision of the residual stream that reaches it.
CHECK_HEAD = """
import sys, torch
from model import GPT, GPTConfig
from training.step import Forward
for vocab_size in (50257, 50304):
    torch.manual_seed(0)
    modern = dict(positions="rope", norm="rmsnorm", activation="relu2", qk_norm=True, tied_head=False, bias=False)
    model = GPT(GPTConfig(block_size=64, n_layer=2, n_head=2, n_embd=128, vocab_size=vocab_size, **modern))
    model = model.to(sys.argv[1], torch.bfloat16)
    idx, targets = torch.randint(50257, (2, 4, 64), device=sys.argv[1])

    found = []
    for forward in (model, Forward(model, compiles=False), Forward(model, compiles=True)):
        model.zero_grad()
        with torch.autocast(sys.argv[1], torch.bfloat16):
            x = model.hidden(idx)
            assert x.dtype == torch.bfloat16, x.dtype
            loss = forward(idx, targets)
        loss.backward()
        found.append((loss.detach(), model.lm_head.weight.grad.float()))
    (loss, gradient), *others = found
    for other_loss, other_gradient in others:
        torch.testing.assert_close(other_loss, loss, rtol=1e-2, atol=0)
        torch.testing.assert_close(other_gradient, gradient, rtol=5e-2, atol=2e-2 * gradient.abs().max().item())
"""


def test_the_head_in_chunks_is_that_of_all_logits(run_on_gpu):
    """The script fails where they differ."""
    run_on_gpu("-c", CHECK_HEAD, DEVICE)


@pytest.mark.parametrize("preset", ["gpt2-124m", "speedrun-124m"])
def test_training_is_that_of_the_cpu(run_on_gpu, preset, tiny_data, tmp_path):
    """Compiled, in float32: the curve of the CPU to rounding; the micro-batch is found by trying."""
    flags = [word for word in TINY_FLAGS if word != "--no-compile"]
    flags += ["--data-dir", tiny_data, "--micro-batch-size", "auto"]
    if preset == "speedrun-124m":
        flags += ["--model.n-head", "1"]  # one head of 32 channels

    losses = []
    for device in (DEVICE, "cpu"):
        out = tmp_path / f"run {len(losses)}"
        output = run_on_gpu("train_gpt2.py", preset, *flags, "--device", device, "--out-dir", out)
        assert "1 x 1 x 8 x 32" in output  # ranks x micro-steps x sequences x T: all 8 sequences at once
        losses.append([line["train_loss"] for line in read_metrics(out / "metrics.jsonl") if "train_loss" in line])

    assert len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_a_killed_run_ends_with_the_same_bits(run_on_gpu, gpus, dtype, tiny_data, tmp_path):
    """Compiled, with --deterministic; killed right after the checkpoint at half, wherever the next step is by then."""
    flags = [word for word in TINY_FLAGS if word != "--no-compile"]
    flags += ["--data-dir", tiny_data, "--dtype", dtype, "--max-steps", "60", "--save-every", "30", "--keep", "0"]
    command = ["train_gpt2.py", "quickstart", *map(str, flags), "--deterministic", "--device", DEVICE]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_on_gpu(*command, "--out-dir", whole, timeout=400)

    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | gpus
    process = subprocess.Popen([sys.executable, *command, "--out-dir", str(killed)], env=env, cwd=ROOT)
    while process.poll() is None:
        if model_path(killed, 30).exists():
            process.kill()
        time.sleep(0.002)
    assert process.returncode < 0, "it ended before it was killed"
    output = run_on_gpu(*command, "--out-dir", killed, "--resume", "auto", timeout=400)

    assert "steps 30 to 60" in output
    assert same_bits(load_weights(whole, 60), load_weights(killed, 60))


# Half of the card is taken by this process, as by another program; then --dry-run, which searches and does steps.
FILL_HALF_AND_TRY = """
import torch
import train_gpt2
half = torch.empty(torch.cuda.mem_get_info()[1] // 2, dtype=torch.uint8, device="cuda")
train_gpt2.main()
print("peak", torch.cuda.max_memory_allocated(), "total", torch.cuda.mem_get_info()[1])
"""


@pytest.mark.skipif(DEVICE != "cuda", reason="the memory of a GPU")
def test_auto_finds_a_micro_batch_that_trains_and_leaves_the_ballast(run_on_gpu, tmp_path, monkeypatch):
    """The steps that follow the search do not run out of memory, and at least the ballast is left."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # here CUDA starts before training sets it
    flags = ["gpt2-124m", "--dry-run", "--no-compile", "--data-dir", tmp_path / "none", "--out-dir", tmp_path / "run"]
    output = run_on_gpu("-c", FILL_HALF_AND_TRY, *flags)

    *_, peak, _, total = output.splitlines()[-1].split()
    assert "tokens/s" in output
    assert int(peak) <= int(total) - max(2**30, 0.04 * int(total)), output
