"""What a run learns: its curve, its steps, its validation loss, in every preset, compiled, and from other weights."""

import dataclasses
import json
import math
from functools import partial

import pytest
import torch
from helpers import (
    CPU,
    choices,
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
from training.config import TrainConfig
from training.open_model import open_model
from training.presets import PRESETS
from training.step import Forward, TrainStep
from training.stop import StopRequest

# What a user may choose: a new name is trained below as soon as TrainConfig's Literal has it.
OPTIMIZERS = choices(TrainConfig, "optimizer")
SCHEDULES = choices(TrainConfig, "schedule")


def test_a_run_learns_and_records_its_curve(tiny_args, tmp_path):
    more = ["--max-steps", "150", "--val-every", "50", "--save-every", "50", "--keep", "1", "--max-lr", "0.01"]

    run = train_quickstart(tiny_args, tmp_path / "run", *more)

    # It learns: each token has three equally likely next ones, so the best possible loss is log 3 = 1.10.
    curve = load_curve(run)
    assert list(curve) == list(range(151))
    first_train_loss, last_val_loss = curve[0][0], curve[150][1]
    assert first_train_loss > 5.4 and last_val_loss < 2.0

    # It records its config and its last step.
    assert json.loads((run / "config.json").read_text())["preset"] == "quickstart"
    assert checkpoint.latest_step(run) == 150 and len(checkpoint.complete_steps(run)) <= 2


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


def test_gradients_are_reduced_once_a_step(tiny_args):
    """DDP reduces in the backward pass of the last of three micro-batches only. Their losses are averaged."""
    reduced = []

    class Forward:
        """In place of DDP's module, which reads require_backward_grad_sync."""

        def __call__(self, x, y):
            reduced.append(self.require_backward_grad_sync)
            return torch.ones((), requires_grad=True) * len(reduced)

    cfg = parse_config("quickstart", *tiny_args)
    step = TrainStep(cfg, CPU, GPT(cfg.model))
    step.ddp_forward = Forward()

    result = step.compute_gradients(torch.zeros(3, 2, 33, dtype=torch.uint16))  # (micro_steps, B, T + 1)

    assert reduced == [False, False, True] and result.loss == pytest.approx(2)


def test_the_overfit_preset_learns_by_heart(tiny_args, tmp_path):
    # All of tiny_args but --max-steps and its value: the preset's own number of steps is tested.
    at = tiny_args.index("--max-steps")
    without_max_steps = tiny_args[:at] + tiny_args[at + 2 :]
    out = tmp_path / "run"
    cfg = parse_config("overfit", *without_max_steps, "--val-every", "0", "--save-every", "0", "--out-dir", out)
    assert cfg.max_steps == 200 and cfg.overfit_single_batch

    train_gpt2.train(cfg, CPU, StopRequest())

    assert load_curve(out)[199][0] < 0.1


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_trains_resumes_and_samples(preset, tiny_data, tmp_path, capsys):
    """At a tiny size, with all else as the preset has it; a vocabulary that sampling's prompt fits."""
    size = "--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 64 --model.vocab-size 50304 "
    size += "--sequence-length 32 --total-batch-size 128 --micro-batch-size 2 --val-tokens 64 --no-compile "
    size += "--dtype float32 --save-every 3 --sample-every 5 --val-every 5 --hellaswag-every 0 --resume auto"
    args = [preset, *size.split(), "--data-dir", tiny_data, "--out-dir", tmp_path / "run"]
    if preset == "finetune":
        args += ["--init-from", "scratch"]  # not what the Hub has

    # A run of three steps, and one that resumes it.
    for steps in ("3", "5"):
        train_gpt2.train(parse_config(*args, "--max-steps", steps), CPU, StopRequest())

    assert "sample 3:" in capsys.readouterr().out
    curve = load_curve(tmp_path / "run")
    assert list(curve) == list(range(6)) and curve[5][1] < 11
    assert open_model(tmp_path / "run").generate(torch.tensor([[1]]), 4).shape == (1, 5)


def test_every_optimizer_learns_in_its_own_way(tiny_args, tmp_path):
    """An optimizer that shares a branch with another by mistake would have the other's curve."""
    last_losses = {}
    for optimizer in OPTIMIZERS:
        curve = load_curve(train_quickstart(tiny_args, tmp_path / optimizer, "--optimizer", optimizer))
        assert curve[12][1] < curve[0][1]
        last_losses[optimizer] = curve[12][1]
    assert len(set(last_losses.values())) == len(OPTIMIZERS), last_losses


def test_every_schedule_has_its_own_learning_rates(tiny_args, tmp_path):
    """A schedule that shares a branch with another by mistake would have the other's rates."""
    rates = {}
    for schedule in SCHEDULES:
        run = train_quickstart(tiny_args, tmp_path / schedule, "--schedule", schedule)
        rates[schedule] = tuple(line["lr"] for line in load_metrics(run) if "lr" in line)
        assert len(rates[schedule]) == 12 and max(rates[schedule]) == pytest.approx(3e-3)
    assert len(set(rates.values())) == len(SCHEDULES), rates


def test_hellaswag_and_samples_compile_nothing(tiny_args, tmp_path, monkeypatch):
    """Their shapes vary: a compiled run traces the same frames with them as without."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # Dynamo alone: no C++
    flags = [flag for flag in tiny_args if flag != "--no-compile"]
    flags += ["--max-steps", "2", "--warmup-steps", "1", "--model.vocab-size", "50304", "--model.n-layer", "1"]
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3))  # of several lengths
    evaluations = ["--hellaswag-every", "2", "--hellaswag-data", str(rows), "--sample-every", "2"]

    # Count the frames that Dynamo traces, from nothing each time.
    traced = []
    for name, more in {"without": [], "with": evaluations}.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        train_quickstart(flags, tmp_path / name, *more)
        traced.append(torch._dynamo.utils.counters["frames"]["total"])

    assert traced[0] == traced[1] > 0
    assert sum("hellaswag_acc" in line for line in load_metrics(tmp_path / "with")) == 2


# ------------------------------------------------------------------------- evaluations


def test_val_loss_is_the_mean_over_the_val_split(tiny_args, tiny_data):
    """Whatever the ranks and the micro-batch: here neither divides 43 sequences, nor is the last one the split's."""
    # The expected loss, from all logits of the 43 sequences at once.
    cfg = parse_config("quickstart", *tiny_args, "--val-tokens", 43 * 32 + 31)
    model = GPT(cfg.model)
    data = Loader(tiny_data, "val", 32, 256)
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_val_000000.npy")[: 43 * 32 + 1].astype(int))
    with torch.no_grad():
        logits = model(tokens[:-1].view(43, 32))[0]  # (43, 32, vocabulary)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()

    forward = Forward(model, compiles=False)
    for world_size, B in ((1, 4), (3, 2), (2, 64)):
        ranks = [dataclasses.replace(CPU, rank=rank, world_size=world_size) for rank in range(world_size)]
        checks = []  # the ranks that looked for a stop request, in order
        with pytest.MonkeyPatch.context() as patch:
            # The ranks run one after another here, so each keeps its part of the sum.
            patch.setattr(Runtime, "all_reduce", lambda rt, tensor, op="sum": tensor)
            parts = [evaluator.validate(forward, data, cfg, rt, B, partial(checks.append, rt.rank)) for rt in ranks]
        assert sum(parts) == pytest.approx(expected, rel=1e-5)

        # Every rank looks as often as the others, or one of them would wait for ever.
        counts = {checks.count(rank) for rank in range(world_size)}
        assert len(counts) == 1 and counts.pop() >= 1


def test_what_a_model_cannot_read_is_left_out(tiny_args, tmp_path, capsys):
    """Samples and HellaSwag are GPT-2's tokens, of which a model of another vocabulary or a short context has too few;
    a prompt that is longer than the context loses its beginning."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"ctx": "a", "endings": [" word" * 40, "b", "c", "d"], "label": 0}])
    flags = ["--sample-every", "2", "--hellaswag-every", "2", "--hellaswag-data", rows]
    flags += ["--max-steps", "2", "--sample-prompt", "long " * 50]

    train_quickstart(tiny_args, tmp_path / "few", *flags, "--warmup-steps", "2")
    output = capsys.readouterr().out
    assert "HellaSwag is off: the model has 256 tokens" in output
    assert "samples are off: the model has 256" in output
    assert "warning: --warmup-steps 2 of 2 steps" in output

    train_quickstart(tiny_args, tmp_path / "short", *flags, "--model.vocab-size", "50304", "--warmup-steps", "1")
    output = capsys.readouterr().out
    assert "HellaSwag is off: an ending has 41 tokens, but the model reads 32" in output
    assert "sample 3: " in output
    assert "warning: --warmup-steps" not in output


# ------------------------------------------------------------------------- from other weights


def test_fine_tuning_starts_from_a_hf_folder(tiny_args, tmp_path):
    convert.save_hf(GPT(GPTConfig(block_size=32, vocab_size=50257, n_layer=2, n_head=2, n_embd=32)), tmp_path / "hf")
    flags = ["--init-from", str(tmp_path / "hf"), "--model.vocab-size", "50304"]  # as the presets have it

    # The network is that of the folder, whatever the preset has, also after a resume.
    run = train_quickstart(tiny_args, tmp_path / "run", *flags, "--max-steps", "3")
    assert open_model(run).config.vocab_size == 50257
    train_quickstart(tiny_args, run, *flags, "--max-steps", "5", "--resume", "auto")
    assert list(load_curve(run)) == list(range(6))

    # A flag that contradicts it is refused.
    with pytest.raises(UserError, match="n_layer is 2, not 3; drop the --model flags"):
        train_quickstart(tiny_args, tmp_path / "other", *flags, "--model.n-layer", "3")


def test_fine_tuning_takes_the_network_as_it_is(tiny_data, tmp_path):
    """Without --model flags, whatever the preset's: here another shape, and options of the speedrun."""
    network = GPTConfig(block_size=32, vocab_size=320, n_layer=3, n_head=2, n_embd=32, positions="rope", norm="rmsnorm")
    checkpoint.write(tmp_path / "model_00007.pt", checkpoint.model_file(GPT(network), 7))
    begin = ["finetune", "--init-from", tmp_path, "--data-dir", tiny_data]
    short = ["--sequence-length", 32, "--no-compile"]

    def tune(*words, run="run", batch=256):
        more = ["--total-batch-size", batch, "--sample-every", 0, "--out-dir", tmp_path / run]
        train_gpt2.train(parse_config(*words, *more), CPU, StopRequest())

    # Start, resume by the same command, resume by the checkpoint alone.
    tune(*begin, *short, "--max-steps", 2)
    assert open_model(tmp_path / "run").config == network
    tune(*begin, *short, "--max-steps", 4, "--resume", "auto")
    tune("--max-steps", 5, "--resume", tmp_path / "run" / "model_00004.pt")
    assert list(load_curve(tmp_path / "run")) == list(range(6))

    # Missing data are reported before any weights are opened, or downloaded.
    with pytest.raises(UserError, match="nosuch"):
        tune("finetune", "--data-dir", tmp_path / "nosuch", "--init-from", tmp_path / "nothing", run="new", batch=1024)

    with pytest.raises(UserError, match=r"--sequence-length 128.* 32"):
        tune(*begin, "--sequence-length", 128, run="long")


def test_eval_only_prints_the_val_loss_of_a_run(tiny_args, tiny_data, tmp_path, run_in_fork):
    run = train_quickstart(tiny_args, tmp_path / "run")
    flags = ["--init-from", run, "--data-dir", tiny_data, "--device", "cpu", "--dtype", "float32"]
    output = run_in_fork("train_gpt2.py", "--eval-only", *flags, "--val-tokens", "1024").stdout
    assert f"on 1,024 tokens of {tiny_data}" in output and f"val loss: {load_curve(run)[12][1]:.4f}" in output


def test_the_command_line_trains_and_keeps_a_run(tiny_args, tmp_path, run_script, expect_failure):
    command = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run"]
    output = run_script(*command).stdout
    assert "val loss" in output and "eta" in output
    expect_failure(*command, mentions=["already holds a run"])
