"""A whole run equals a plain loop, learns, and is the same compiled. test_golden.py has the losses of every preset."""

import math
import time
from functools import partial

import pytest
import torch
from helpers import (
    CPU,
    assert_curves_close,
    load_curve,
    load_weights,
    make_hellaswag_rows,
    parse_config,
    train_quickstart,
    write_jsonl,
)

import hellaswag
import train_gpt2
from lifecycle.evaluator import Evaluator
from lifecycle.stop import StopRequest
from model import GPT
from tokens import shards
from weights import checkpoint


def test_the_end_names_the_best_weights_that_are_there(tiny_args, tmp_path, monkeypatch, capsys):
    """Also if the last checkpoint takes longer to write than the last evaluation takes."""
    write = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (time.sleep(0.2), write(*args)))
    cfg = parse_config("quickstart", *tiny_args, "--save-every", "4", "--keep", "1", "--out-dir", tmp_path)

    train_gpt2.train(cfg, CPU, StopRequest())

    val_losses = {step: val_loss for step, (_, val_loss, _) in load_curve(tmp_path).items() if val_loss is not None}
    best = checkpoint.model_path(tmp_path, min(val_losses, key=val_losses.get))
    assert f"the lowest val loss: {best}" in capsys.readouterr().out and best.exists()


@pytest.mark.parametrize("clip", ["0.2", "0"])
def test_a_run_equals_a_plain_loop(tiny_args, tiny_data, tmp_path, clip):
    """Front to back, whole batches, torch's own AdamW: loss, norm, clipping, decay, betas and rates are all right."""
    flags = ["--no-shuffle", "--max-steps", "4", "--grad-clip", clip, "--weight-decay", "0.5"]
    run = train_quickstart(tiny_args, tmp_path / "run", *flags)
    cfg = parse_config("quickstart", *tiny_args, *flags)

    # The same weights, and AdamW as torch has it; weights decay, biases and gains do not.
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model)
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}
    matrices = {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.5}
    adamw = torch.optim.AdamW([vectors, matrices], betas=(0.9, 0.95), eps=1e-8)

    # The plain loop over the first shard, step for step as the run.
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_train_000001.npy").astype(int))
    curve = load_curve(run)
    rates = [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5]  # two steps up, then half a cosine from 3e-3 to 3e-4
    for step, rate in enumerate(rates):
        # A step is 8 sequences of 32 tokens, and one token more as the last target.
        part = tokens[256 * step :][:257]
        logits = model(part[:-1].view(8, 32))[0]  # (8, 32, vocabulary)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[1:])

        # Backward, clip, set the rate, update.
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float(clip) or math.inf)
        for group in adamw.param_groups:
            group["lr"] = 3e-3 * rate
        adamw.step()

        train_loss, _, grad_norm = curve[step]
        assert (train_loss, grad_norm) == pytest.approx((loss.item(), norm.item()), rel=1e-4), step

    # The weights at the end are the same, too.
    saved = load_weights(run, 4)
    for name, p in model.state_dict().items():
        torch.testing.assert_close(saved[name], p, atol=1e-5, rtol=1e-4)


def test_the_overfit_preset_learns_by_heart(tiny_args, tmp_path):
    flags = ["--max-steps", "150", "--val-every", "0", "--save-every", "0", "--out-dir", tmp_path / "run"]

    train_gpt2.train(parse_config("overfit", *tiny_args, *flags), CPU, StopRequest())

    assert load_curve(tmp_path / "run")[149][0] < 1


def test_compiled_equals_eager_and_compiles_once(tiny_args, tmp_path, monkeypatch):
    """HellaSwag and samples have shapes that vary. Here Dynamo and autograd compile; test_forward.py has kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    frames = torch._dynamo.utils.counters["frames"]
    traced = []

    def count_frames(owner, name):
        function = getattr(owner, name)

        def counted(*args, **kwargs):
            before = frames["total"]
            result = function(*args, **kwargs)
            traced.append(frames["total"] - before)
            return result

        monkeypatch.setattr(owner, name, counted)

    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3))  # of several lengths
    flags = [
        *tiny_args,
        *"--max-steps 2 --warmup-steps 1 --model.vocab-size 50304 --model.n-layer 1 --model.n-embd 8".split(),
    ]
    eager = load_curve(train_quickstart(flags, tmp_path / "eager"))
    count_frames(hellaswag, "score")
    count_frames(Evaluator, "sample_text")

    evaluations = ["--hellaswag-every", "2", "--hellaswag-data", rows, "--sample-every", "2"]
    compiled = load_curve(train_quickstart(flags, tmp_path / "compiled", *evaluations, "--compile"))

    assert_curves_close(compiled, eager)
    assert frames["total"] > 0 and traced == [0] * 5  # HellaSwag twice, samples at three steps
