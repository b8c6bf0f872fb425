"""What a run learns: its curve, its steps, its validation loss, in every preset, compiled, and from other weights."""

import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import (
    CPU,
    load_curve,
    load_metrics,
    load_weights,
    make_hellaswag_rows,
    parse_config,
    train_quickstart,
    write_jsonl,
)

import train_gpt2
from model import GPT, GPTConfig
from system.cli import UserError
from system.distributed import Runtime
from tokens import shards
from tokens.loader import Loader
from training import checkpoint, convert, evaluator
from training.open_model import open_model
from training.presets import PRESETS
from training.run_state import RunState
from training.step import TrainStep
from training.stop import StopRequest


def test_it_learns_and_records(tiny_args, tmp_path, capsys):
    more = ["--max-steps", "150", "--save-every", "50", "--keep", "1", "--max-lr", "0.01"]
    run = train_quickstart(tiny_args, tmp_path / "run", *more)
    found = load_curve(run)
    assert "warning: no manifest.json" in capsys.readouterr().out  # shards of others are taken, but not silently
    assert list(found) == list(range(151))
    assert found[0][0] > 5.4 and found[150][1] < 2.0  # the walk has three next tokens: log 3 = 1.10 nats is the floor
    assert json.loads((run / "config.json").read_text())["preset"] == "quickstart"
    assert checkpoint.latest_step(run) == 150 and len(checkpoint.complete_steps(run)) <= 2


@pytest.mark.parametrize("clip", ["0.2", "0"])
def test_its_steps_are_those_of_a_plain_loop(tiny_args, tiny_data, tmp_path, clip):
    """Front to back, whole batches, torch's own AdamW: loss, norm, clipping, decay, betas and rates are all right."""
    flags = ["--no-shuffle", "--max-steps", "4", "--grad-clip", clip, "--weight-decay", "0.5"]
    run, cfg = train_quickstart(tiny_args, tmp_path / "run", *flags), parse_config("quickstart", *tiny_args, *flags)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model)
    groups = [{"params": [p for p in model.parameters() if (p.dim() < 2) == flat]} for flat in (True, False)]
    groups = [g | {"weight_decay": decay} for g, decay in zip(groups, (0.0, 0.5), strict=True)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_train_000001.npy").astype(int))
    rates = [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5]  # two steps up, then half a cosine from 3e-3 to 3e-4
    for step, rate in enumerate(rates):
        part = tokens[256 * step :][:257]
        logits = model(part[:-1].view(8, 32))[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[1:])
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float(clip) or math.inf)
        for group in adamw.param_groups:
            group["lr"] = 3e-3 * rate
        adamw.step()
        assert load_curve(run)[step][::2] == pytest.approx((loss.item(), norm.item()), rel=1e-4), step
    for name, p in model.state_dict().items():
        torch.testing.assert_close(load_weights(run, 4)[name], p, atol=1e-5, rtol=1e-4)


def test_gradients_are_reduced_once_a_step(tiny_args):
    class Forward:
        def __call__(self, x, y):
            seen.append(self.require_backward_grad_sync)
            return None, torch.ones((), requires_grad=True) * len(seen)

    cfg, seen = parse_config("quickstart", *tiny_args), []
    step = TrainStep(cfg, CPU, GPT(cfg.model))
    step.ddp_forward = Forward()
    result = step.compute_gradients(torch.zeros(3, 2, 33, dtype=torch.uint16))
    assert seen == [False, False, True] and result.loss == pytest.approx(2)


def test_overfit_preset_collapses(tiny_args, tmp_path):
    at = tiny_args.index("--max-steps")
    tiny = tiny_args[:at] + tiny_args[at + 2 :]
    cfg = parse_config("overfit", *tiny, "--val-every", "0", "--save-every", "0", "--out-dir", tmp_path / "run")
    assert cfg.max_steps == 200 and cfg.overfit_single_batch
    train_gpt2.train(cfg, CPU, StopRequest())
    assert load_curve(tmp_path / "run")[199][0] < 0.1


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_trains_saves_resumes_and_samples(preset, tiny_data, tmp_path, capsys):
    """At a tiny size, with all else as the preset has it; a vocabulary that sampling's prompt fits."""
    size = "--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 64 --model.vocab-size 50304 "
    size += "--sequence-length 32 --total-batch-size 128 --micro-batch-size 2 --val-tokens 64 --no-compile "
    size += "--dtype float32 --save-every 3 --sample-every 5 --val-every 5 --hellaswag-every 0 --resume auto"
    args = [preset, *size.split(), "--data-dir", tiny_data, "--out-dir", tmp_path / "run"]
    if preset == "finetune":
        args += ["--init-from", "scratch"]  # not what the Hub has
    if preset == "sprint-124m":
        args += ["--model.value-tables", "1"]  # its three need six layers
    for steps in ("3", "5"):
        train_gpt2.train(parse_config(*args, "--max-steps", steps), CPU, StopRequest())
    assert "sample 3:" in capsys.readouterr().out
    found = load_curve(tmp_path / "run")
    assert list(found) == list(range(6)) and found[5][1] < 11
    assert open_model(tmp_path / "run").generate(torch.tensor([[1]]), 4).shape == (1, 5)


def test_hellaswag_and_samples_compile_nothing(tiny_args, tmp_path, monkeypatch):
    """Their shapes vary: a compiled run traces the same frames with them as without."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # Dynamo alone: no C++
    flags = [a for a in tiny_args if a != "--no-compile"] + ["--max-steps", "4", "--model.vocab-size", "50304"]
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    evaluations = ["--hellaswag-every", "2", "--hellaswag-data", str(rows), "--sample-every", "2"]
    traced = []
    for name, more in {"without": [], "with": evaluations}.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        train_quickstart(flags, tmp_path / name, *more)
        traced.append(torch._dynamo.utils.counters["frames"]["total"])
    assert traced[0] == traced[1] > 0
    assert sum("hellaswag_acc" in line for line in load_metrics(tmp_path / "with")) == 3


# ------------------------------------------------------------------------- evaluations


def test_val_loss_is_the_mean_over_the_first_tokens_of_the_val_split(tiny_args, tiny_data):
    """Whatever the ranks and the micro-batch: here neither divides 43 windows, nor is the last one of the split."""
    cfg = parse_config("quickstart", *tiny_args, "--val-tokens", 43 * 32 + 31)
    model, data, checks = GPT(cfg.model), Loader(tiny_data, "val", 32, 256), []
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_val_000000.npy")[: 43 * 32 + 1].astype(int))
    with torch.no_grad():
        logits = model(tokens[:-1].view(43, 32))[0]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    for n, B in ((1, 4), (3, 2), (2, 64)):
        worlds = [dataclasses.replace(CPU, rank=r, world_size=n) for r in range(n)]
        with pytest.MonkeyPatch.context() as m:
            m.setattr(Runtime, "all_reduce", lambda rt, tensor, op="sum": tensor)
            parts = [evaluator.validate(model, data, cfg, rt, B, partial(checks.append, rt.rank)) for rt in worlds]
        assert sum(parts) == pytest.approx(wanted, rel=1e-5)
        assert len({checks.count(r) for r in range(n)}) == 1 <= checks.count(0)  # as often on every rank
        checks.clear()


def test_a_run_like_the_public_ones_says_whether_it_is_on_track(tiny_args, monkeypatch, capsys):
    monkeypatch.setattr(evaluator, "validate", lambda *args: 9.0)
    cfg = parse_config("quickstart", *tiny_args, "--total-batch-size", 524_288)
    edu = "fineweb-edu_train_000001.npy"
    for preset, name in (("gpt2-124m", "tiny_train_000001.npy"), ("quickstart", edu), ("gpt2-124m", edu)):
        step = SimpleNamespace(cfg=dataclasses.replace(cfg, preset=preset), rt=CPU, model=None, forward=None, B=4)
        e = evaluator.Evaluator(step, SimpleNamespace(paths=[Path(name)]), None)
        assert e.measure(RunState(19_073, "", step=500), lambda: None) == {"val_loss": 9.0}
        assert ("off track" in capsys.readouterr().out) == ((preset, name) == ("gpt2-124m", edu))


def test_what_a_model_cannot_read_does_not_end_its_run(tiny_args, tmp_path, capsys):
    """Samples and HellaSwag are GPT-2's tokens, of which a model of another vocabulary or a short context has too few;
    a prompt that is longer than the context loses its beginning."""
    row = {"ctx": "a", "endings": [" word" * 40, "b", "c", "d"], "label": 0}
    rows = write_jsonl(tmp_path / "rows.jsonl", [row])
    text = ["--sample-every", "2", "--hellaswag-every", "2", "--hellaswag-data", rows]
    text += ["--max-steps", "2", "--warmup-steps", "2", "--sample-prompt", "long " * 50]
    train_quickstart(tiny_args, tmp_path / "few", *text)
    said = capsys.readouterr().out
    assert "HellaSwag is off: the model has 256 tokens" in said and "samples are off: the model has 256" in said
    assert "warning: --warmup-steps 2 of 2 steps" in said
    train_quickstart(tiny_args, tmp_path / "short", *text, "--model.vocab-size", "50304", "--warmup-steps", "1")
    said = capsys.readouterr().out
    assert "HellaSwag is off: an ending has 41 tokens, but the model reads 32" in said and "sample 3: " in said
    assert "warm" not in said


# ------------------------------------------------------------------------- from other weights


def test_fine_tuning_starts_from_a_hugging_face_folder_and_resumes(tiny_args, tmp_path):
    convert.save_hf(GPT(GPTConfig(block_size=32, vocab_size=50257, n_layer=2, n_head=2, n_embd=32)), tmp_path / "hf")
    flags = ["--init-from", str(tmp_path / "hf"), "--model.vocab-size", "50304"]  # as the presets have it
    run = train_quickstart(tiny_args, tmp_path / "run", *flags, "--max-steps", "3")
    assert open_model(run).config.vocab_size == 50257
    train_quickstart(tiny_args, run, *flags, "--max-steps", "5", "--resume", "auto")
    assert list(load_curve(run)) == list(range(6))
    with pytest.raises(UserError, match="n_layer is 2, not 3; drop the --model flags"):
        train_quickstart(tiny_args, tmp_path / "other", *flags, "--model.n-layer", "3")


def test_fine_tuning_takes_the_network_as_it_is(tiny_data, tmp_path):
    """Without --model flags, whatever the preset's: here another shape, and options of the speedrun."""
    model = GPTConfig(block_size=32, vocab_size=320, n_layer=3, n_head=2, n_embd=32, positions="rope", norm="rmsnorm")
    checkpoint.write(tmp_path / "model_00007.pt", checkpoint.model_file(GPT(model), 7))
    begin = ["finetune", "--init-from", tmp_path, "--data-dir", tiny_data]
    short = ["--sequence-length", 32, "--no-compile"]

    def tune(*words, run="run"):
        more = ["--total-batch-size", 256, "--sample-every", 0, "--out-dir", tmp_path / run]
        train_gpt2.train(parse_config(*words, *more), CPU, StopRequest())

    tune(*begin, *short, "--max-steps", 2)
    assert open_model(tmp_path / "run").config == model
    tune(*begin, *short, "--max-steps", 4, "--resume", "auto")
    tune("--max-steps", 5, "--resume", tmp_path / "run" / "model_00004.pt")
    assert list(load_curve(tmp_path / "run")) == list(range(6))
    with pytest.raises(UserError, match=r"sequence-length 128 is too long for .*use --sequence-length 32"):
        tune(*begin, "--sequence-length", 128, run="long")


def test_a_run_smaller_than_its_preset_is_evaluated_as_it_is(tiny_args, tmp_path, run_in_fork):
    run, data = train_quickstart(tiny_args, tmp_path / "run"), tiny_args[tiny_args.index("--data-dir") + 1]
    flags = ["--init-from", run, "--data-dir", data, "--device", "cpu", "--dtype", "float32", "--val-tokens", "1024"]
    said = run_in_fork("train_gpt2.py", "--eval-only", *flags).stdout
    assert f"on 1,024 tokens of {data}" in said and f"val loss: {load_curve(run)[12][1]:.4f}" in said


def test_command_line_end_to_end(tiny_args, tmp_path, run_script, expect_failure):
    done = run_script("train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run")
    assert "val loss" in done.stdout and "eta" in done.stdout
    expect_failure(
        "train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run", mentions=["already holds a run"]
    )
