"""One GPU, where the machine has one; elsewhere all of it is skipped: the same results as the CPU's, and the same bits
again to rounding after a resume. DEVICE=cpu runs it without one, to try the tests themselves."""

import json
import os
import shutil
import subprocess

import pytest
import torch
from helpers import (
    TINY_FLAGS,
    assert_curves_close,
    delete_checkpoints_after,
    load_curve,
    write_tiny_model,
)
from networks import NETWORKS, make_network
from processes import start

import train_gpt2
from training.head import Loss

DEVICE = os.environ.get("DEVICE", "cuda")
COMPILED = [word for word in TINY_FLAGS if word != "--no-compile"]


def compute_capability():
    """Of the first GPU that the driver lists, 0 without one. torch cannot tell: the tests hide the GPUs from this
    process (conftest.py)."""
    if shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return 0 if done.returncode else float(done.stdout.split()[0])


CAPABILITY = compute_capability() if DEVICE == "cuda" else 9.0
pytestmark = pytest.mark.skipif(CAPABILITY == 0, reason="no NVIDIA GPU here")
needs_bfloat16 = pytest.mark.skipif(CAPABILITY < 8.0, reason="a GPU without bfloat16")
RECORD8 = ["record8-124m", "--model.n-head", "1"]  # one head of 32 channels; parameters in bfloat16


@pytest.fixture
def run_on_gpu(gpus, tmp_path_factory):
    """run_on_gpu("infer.py", ...) -> what a script or a function of this file prints, in a process that sees a GPU."""

    def run(script, *args):
        log = tmp_path_factory.mktemp("output") / "log"
        ended = start(script, *args, log=log, env={"CUDA_VISIBLE_DEVICES": gpus}).wait(200)
        assert ended.exit_code == 0, ended.output
        return ended.log.read_text()

    return run


@pytest.fixture
def model(tmp_path):
    """A run folder with a tiny model."""
    return write_tiny_model(tmp_path / "model", block_size=64, n_embd=128)


def test_samples_are_those_of_the_cpu(run_on_gpu, model):
    """Past the context, too, where it slides."""
    flags = "--temperature 0 --max-new-tokens 90 --num-samples 2 --dtype float32 --json"
    on_gpu, on_cpu = (run_on_gpu("infer.py", model, "Hello", flags, "--device", d) for d in (DEVICE, "cpu"))
    assert on_gpu == on_cpu and len(json.loads(on_cpu.splitlines()[0])["tokens"]) == 90


def compare_head():
    """The loss and the gradients of the head in chunks with those of all logits, in bfloat16, at a vocabulary that is
    padded and at one that is not."""
    for vocab_size in (50257, 50304):
        model = make_network(NETWORKS["record8"], block_size=64, n_embd=128, vocab_size=vocab_size)
        model.to(DEVICE, torch.bfloat16)
        batch = torch.randint(50257, (2, 4, 64), device=DEVICE)
        found = []
        for forward in (model, Loss(model, compiles=False), Loss(model, compiles=True)):
            model.zero_grad()
            with torch.autocast(DEVICE, torch.bfloat16):
                assert model.hidden(batch[0]).dtype == torch.bfloat16
                loss = forward(*batch)[1 if forward is model else 0]
            loss.backward()
            gradient = model.lm_head.weight.grad.float()
            found.append((loss.detach(), gradient))
            torch.testing.assert_close(loss.detach(), found[0][0], rtol=1e-2, atol=0)
            atol = 2e-2 * gradient.abs().max().item()
            torch.testing.assert_close(gradient, found[0][1], rtol=5e-2, atol=atol)


@needs_bfloat16
def test_the_head_in_chunks_is_that_of_all_logits(run_on_gpu):
    run_on_gpu(compare_head)


@pytest.mark.parametrize("flags", [["gpt2-124m"], pytest.param(RECORD8, marks=needs_bfloat16)])
def test_training_is_that_of_the_cpu(run_on_gpu, flags, tiny_data, tmp_path):
    """Compiled, in float32: the curve of the CPU to rounding; the micro-batch is found by trying."""
    flags = [flags[0], *COMPILED, *flags[1:], "--micro-batch-size auto --data-dir", tiny_data]
    losses = []
    for device in (DEVICE, "cpu"):
        out = tmp_path / f"on {device} {len(losses)}"
        output = run_on_gpu("train_gpt2.py", *flags, "--device", device, "--out-dir", out)
        assert "micro-steps: 1, sequences: 8, each of 32 " in output  # all 8 sequences at once
        losses.append([loss for loss, _, _ in load_curve(out).values()][:12])
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=needs_bfloat16), "float16"])
def test_a_resumed_run_continues_to_rounding(run_on_gpu, tiny_data, tmp_path, dtype):
    """Compiled."""
    flags = [*COMPILED, "--data-dir", tiny_data, "--device", DEVICE, "--dtype", dtype]
    command = ["train_gpt2.py", "quickstart", *flags, "--resume auto --out-dir"]
    run_on_gpu(*command, tmp_path / "run")
    resumed = shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    delete_checkpoints_after(resumed, 6)
    run_on_gpu(*command, resumed)

    assert_curves_close(resumed, tmp_path / "run", rel=1e-2)


def try_on_half_a_card():
    """--dry-run, which searches and does steps, while half of the card is taken as by another program."""
    half = torch.empty(torch.cuda.mem_get_info()[1] // 2, dtype=torch.uint8, device="cuda")
    train_gpt2.main()
    print(torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1], half.shape)


@pytest.mark.skipif(DEVICE != "cuda", reason="the memory of a GPU")
def test_auto_leaves_the_ballast(run_on_gpu, tmp_path, monkeypatch):
    """The steps that follow the search do not run out of memory, and at least the ballast is left."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # here CUDA starts before training sets it
    output = run_on_gpu(try_on_half_a_card, "gpt2-124m", "--dry-run --no-compile --data-dir", tmp_path / "none")
    peak, total, _ = output.splitlines()[-1].split(maxsplit=2)
    assert int(peak) <= int(total) - max(2**30, 0.04 * int(total)), output
