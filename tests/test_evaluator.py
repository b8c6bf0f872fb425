"""What evaluations measure: bits per byte, and the verdict on or off track. And evaluations that fail: each is reported
with its rank, its reason and a way to turn it off, and training continues on all ranks as if nothing had happened."""

import math
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import (
    CPU,
    load_curve,
    load_metrics,
    load_weights,
    make_shards,
    parse_config,
    same_bits,
    train_quickstart,
)

from model import GPT
from system.cli import UserError
from system.distributed import Runtime
from tokens import shards
from tokens.loader import Loader
from tokens.tokenizer import EOT, encoding, token_bytes
from training import checkpoint, evaluator, hellaswag_eval
from training.run_state import RunState
from training.step import Forward
from training.stop import StopRequest

# ------------------------------------------------------------------------- bits per byte

SMALL_GPT2 = "--model.vocab-size 50304 --model.n-embd 8".split()


def write_val_text(folder, documents) -> np.ndarray:
    """A folder whose val shard has these documents, each behind <|endoftext|>; returns the tokens."""
    tokens = [token for text in documents for token in (EOT, *encoding().encode_ordinary(text))]
    folder.mkdir()
    shards.write_shard(folder / "text_val_000000.npy", np.array(tokens, np.uint16))
    return np.array(tokens)


def validate_on_ranks(model, data, cfg, world_size, B) -> list[evaluator.Validation]:
    """The result on each of these ranks, which run one after another in this process. So every rank validates twice:
    first to record what it adds to each sum over the ranks, then with all that was recorded, as the sums."""
    ranks = [replace(CPU, rank=rank, world_size=world_size) for rank in range(world_size)]
    forward = Forward(model, compiles=False)
    recorded = {rank: [] for rank in range(world_size)}  # the tensors of each rank's all_reduce calls, in order
    calls = dict.fromkeys(recorded, 0)  # all_reduce calls of each rank in the second pass

    def record(rt, tensor, op="sum"):
        recorded[rt.rank].append(tensor.clone())
        return tensor

    def add_recorded(rt, tensor, op="sum"):
        call = calls[rt.rank]
        calls[rt.rank] += 1
        return sum(recorded[rank][call] for rank in recorded)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "all_reduce", record)
        for rt in ranks:
            evaluator.validate(forward, data, cfg, rt, B)
        patch.setattr(Runtime, "all_reduce", add_recorded)
        return [evaluator.validate(forward, data, cfg, rt, B) for rt in ranks]


def test_bits_per_byte_are_those_of_the_text_whatever_the_ranks(tiny_args, tmp_path):
    """As nanochat counts them: <|endoftext|> has no bytes, and its loss does not count. Characters are cut into tokens
    here, of which decoding one alone would give other bytes."""
    text = "naïve café — “quotes” 日本語の文章 👩‍👩‍👧‍👦 and plain words. "
    tokens = write_val_text(tmp_path / "text", [text * n for n in (1, 3, 2, 1, 1, 8)])
    cfg = parse_config("quickstart", *tiny_args, *SMALL_GPT2, "--val-tokens", 13 * 32)
    torch.manual_seed(0)
    model = GPT(cfg.model)
    data = Loader(tmp_path / "text", "val", 32, cfg.model.vocab_size)

    # The expected figure, from all logits: the sum of the losses of those targets that are text, in bits, divided by
    # the number of bytes of these targets.
    count = 13 * 32
    targets = torch.from_numpy(tokens[1 : count + 1])
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens[:count]).view(13, 32))[0].flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none").double()
    is_text = targets != EOT
    assert 2 < (~is_text).sum() < 10
    num_bytes = len(encoding().decode_bytes(targets[is_text].tolist()))
    expected = losses[is_text].sum().item() / (math.log(2) * num_bytes)

    # One rank has it, and several ranks agree on it.
    alone = evaluator.validate(Forward(model, compiles=False), data, cfg, CPU, 4)
    assert alone.bits_per_byte == pytest.approx(expected, rel=1e-6)
    for world_size, B in ((3, 2), (2, 16)):
        results = validate_on_ranks(model, data, cfg, world_size, B)
        assert len(set(results)) == 1  # on every rank the same bits
        assert tuple(results[0]) == pytest.approx(tuple(alone), rel=1e-6)  # to the rounding of a batch's float32 mean


def test_tokens_that_are_not_gpt2s_have_no_bits_per_byte(tiny_args, tiny_data):
    cfg = parse_config("quickstart", *tiny_args)
    data = Loader(tiny_data, "val", 32, 256)

    result = evaluator.validate(Forward(GPT(cfg.model), compiles=False), data, cfg, CPU, 4)

    assert result.metrics() == {"val_loss": result.loss}
    assert result.summary_line() == f"val loss: {result.loss:.4f}"


def test_bits_per_byte_leave_the_loss_as_it_is(tiny_args):
    """The loss of a batch is that of training's forward pass, to the bit, whatever else is asked for."""
    cfg = parse_config("quickstart", *tiny_args)
    torch.manual_seed(0)
    forward = Forward(GPT(cfg.model), compiles=False)
    x, y = torch.randint(0, 256, (2, 4, 32))
    y[3] = -100  # a row of padding

    with torch.no_grad():
        loss, chosen_loss = forward.validation_losses(x, y, torch.tensor([3, 64]))
        logits = forward.model(x)[0].flatten(0, 1)[[3, 64]]

    assert torch.equal(loss, forward(x, y)[1])
    expected = torch.nn.functional.cross_entropy(logits, y.flatten()[[3, 64]], reduction="sum")
    assert chosen_loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_token_has_the_bytes_of_its_text():
    sizes = token_bytes()
    assert sizes.shape == (1 << 16,)
    assert sizes[:EOT].tolist() == [len(encoding().decode_single_token_bytes(i)) for i in range(EOT)]
    assert sizes[EOT:].sum() == 0


def test_bits_per_byte_are_logged_beside_the_loss(tiny_args, tmp_path, capsys):
    data = make_shards(tmp_path / "data", size=2000)
    flags = [*tiny_args, *SMALL_GPT2, "--data-dir", data, "--max-steps", "1", "--val-tokens", "64"]
    flags += ["--total-batch-size", "64", "--micro-batch-size", "2"]

    run = train_quickstart(flags, tmp_path / "run")

    output = capsys.readouterr().out
    last = load_metrics(run)[-1]
    assert f"step     1/1 | val loss: {last['val_loss']:.4f} | bits per byte: {last['val_bpb']:.4f}\n" in output


# ------------------------------------------------------------------------- on track or off track


def validate_once(cfg, monkeypatch, capsys, max_steps=19_073, step=500, shard="fineweb-edu_train_000001.npy") -> str:
    """What two validations of a run with these settings print about a loss of 9 nats, which is off every track."""
    monkeypatch.setattr(evaluator, "validate", lambda *args: evaluator.Validation(9.0, None))
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=None, forward=None, micro_batch_size=4)
    found = evaluator.Evaluator(train_step, SimpleNamespace(paths=[Path(shard)]), None)
    capsys.readouterr()
    for _ in range(2):
        assert found.evaluate(RunState(max_steps, "", step=step), lambda: None) == {"val_loss": 9.0}
    return capsys.readouterr().out


def evaluated_config(*words):
    """A config whose evaluations need nothing but `validate`."""
    return parse_config(*words, "--hellaswag-every", "0", "--sample-every", "0")


@pytest.mark.parametrize("flags", ["", "--seed 7", "--no-shuffle", "--model.vocab-size 50257", "--val-tokens 1048576"])
def test_a_run_of_a_preset_is_judged_by_its_public_runs(monkeypatch, capsys, flags):
    output = validate_once(evaluated_config("gpt2-124m", *flags.split()), monkeypatch, capsys)
    assert output.count("off track") == 2
    assert "no reference" not in output


@pytest.mark.parametrize("flags, reason", [
    ("--init-from gpt2", "--init-from gpt2 does not begin from scratch"),
    ("--init-from log/old", "--init-from log/old does not begin from scratch"),
    ("--schedule trapezoid", "--schedule differs from preset gpt2-124m"),
    ("--optimizer muon", "--optimizer differs from preset gpt2-124m"),
    ("--max-lr 1e-3 --warmup-steps 256", "--max-lr, --warmup-steps differ from preset gpt2-124m"),
    ("--model.n-layer 6", "--model.n-layer differs from preset gpt2-124m"),
    ("--total-batch-size 262144", "--total-batch-size differs from preset gpt2-124m"),
    ("--overfit-single-batch", "--overfit-single-batch differs from preset gpt2-124m"),
])  # fmt: skip
def test_a_run_of_other_settings_has_no_verdict_and_says_so_once(monkeypatch, capsys, flags, reason):
    output = validate_once(evaluated_config("gpt2-124m", *flags.split()), monkeypatch, capsys)
    assert output.count(f"no reference: {reason}\n") == output.count("no reference") == 1
    assert "track" not in output


def test_a_run_on_other_data_or_of_other_length_has_no_verdict(monkeypatch, capsys):
    cfg = evaluated_config("gpt2-124m")
    output = validate_once(cfg, monkeypatch, capsys, shard="books_train_000001.npy")
    assert output.count("no reference: the public runs of gpt2-124m are on fineweb-edu, not on books_train_0000") == 1
    output = validate_once(cfg, monkeypatch, capsys, max_steps=9000)
    assert output.count("no reference: no public run of gpt2-124m has 9,000 steps\n") == 1
    assert "track" not in output


def test_a_preset_without_public_runs_says_nothing_of_them(monkeypatch, capsys):
    output = validate_once(evaluated_config("quickstart", "--max-lr", "1"), monkeypatch, capsys, step=80)
    assert "track" not in output and "reference" not in output


def test_a_second_epoch_is_judged_by_the_public_second_epoch(monkeypatch, capsys):
    """./train.sh log/gpt2-124m/model_19073.pt 2"""
    cfg = evaluated_config("gpt2-124m", "--epochs", "2")
    assert cfg.total_steps(0) == 38_146

    output = validate_once(cfg, monkeypatch, capsys, max_steps=38_146, step=25_000)

    assert output.count("step 25000: val 9.000, reference 3.0") == 2
    assert "track" not in validate_once(cfg, monkeypatch, capsys, max_steps=38_146, step=5000)


# ------------------------------------------------------------------------- samples


@pytest.mark.parametrize("document, prompt", [
    ("Call me Ishmael. Some years ago, never mind how long precisely", "Call me Ishmael. Some years"),
    ("Short.", "Short."),  # the document behind it is another text
])  # fmt: skip
def test_samples_of_a_fine_tuned_model_continue_the_users_own_text(tiny_args, tmp_path, document, prompt):
    write_val_text(tmp_path / "text", [document, "another text " * 20])
    cfg = parse_config("finetune", *tiny_args, *SMALL_GPT2, "--init-from", "scratch", "--sample-every", "1")
    assert cfg.sample_prompt == "@val"
    torch.manual_seed(0)
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=GPT(cfg.model), forward=None, micro_batch_size=4)
    val_data = Loader(tmp_path / "text", "val", 32, cfg.model.vocab_size)

    # Also in a run that does not validate: from its train data.
    for data in ((None, val_data), (val_data, None)):
        samples = evaluator.Evaluator(train_step, *data).sample_text(lambda: False)
        assert samples.count("sample 0: " + prompt) == 1


# ------------------------------------------------------------------------- evaluations that fail


def without_validation_of(curve, *steps) -> dict:
    """A curve, as of load_curve, as it is if the validation of these steps has failed."""
    return {step: (loss, None if step in steps else val, norm) for step, (loss, val, norm) in curve.items()}


def fail_in_batch_3_of_step_4(monkeypatch, error, do_first=lambda tensors: None) -> None:
    """Let a run's second validation, which is that of step 4, raise `error` in its third of eight batches. `do_first`
    is called before that, with the batch."""
    to_device, batches = evaluator.to_device, []

    def failing(*args):
        batches.append(args)
        tensors = to_device(*args)
        if len(batches) == 8 + 3:
            do_first(tensors)
            raise error
        return tensors

    monkeypatch.setattr(evaluator, "to_device", failing)


@pytest.mark.parametrize(
    "error, reason",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "OutOfMemoryError: CUDA out of memory"),
        (UserError("token 3 is id 300"), "UserError: token 3 is id 300"),
    ],
)
def test_training_continues_after_a_failed_validation(tiny_args, tmp_path, monkeypatch, capsys, error, reason):
    undisturbed = train_quickstart(tiny_args, tmp_path / "undisturbed")
    fail_in_batch_3_of_step_4(monkeypatch, error)
    capsys.readouterr()

    run = train_quickstart(tiny_args, tmp_path / "run")

    output = capsys.readouterr().out
    warning = f"warning: validation failed at step 4 on rank 0 ({reason}). Training continues; to turn validation off"
    assert output.count(" failed at step ") == output.count(warning) == 1
    assert "resume with --val-every 0" in output
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 4)
    assert same_bits(load_weights(run), load_weights(undisturbed))


def test_training_continues_after_a_failed_hellaswag(tiny_args, tmp_path, monkeypatch, capsys):
    """It fails at a step whose checkpoint is due, after a validation that does not fail: both are kept."""
    undisturbed = train_quickstart(tiny_args, tmp_path / "undisturbed", "--val-every", "6")
    capsys.readouterr()
    # Any rows will do: scoring them is not tried here. The second of three times it fails.
    rows = [hellaswag_eval.Example([1], [[2], [3], [4], [5]], 0)]
    scores = iter([{"acc": 0.25, "acc_norm": 0.5}, torch.OutOfMemoryError("CUDA out of memory"), {"acc": 1.0}])

    def evaluate(*args, **kwargs):
        score = next(scores)
        if isinstance(score, Exception):
            raise score
        return {"acc_norm": 0.5, **score}

    monkeypatch.setattr(hellaswag_eval, "available_examples", lambda *args: rows)
    monkeypatch.setattr(hellaswag_eval, "evaluate", evaluate)
    monkeypatch.setattr(hellaswag_eval, "summary_line", lambda score: f"hellaswag {score}")

    run = train_quickstart(tiny_args, tmp_path / "run", "--val-every", "6", "--hellaswag-every", "6")

    warning = "warning: HellaSwag failed at step 6 on rank 0 (OutOfMemoryError: CUDA out of memory). Training continues"
    output = capsys.readouterr().out
    assert output.count(warning) == 1
    assert "resume with --hellaswag-every 0" in output
    lines = load_metrics(run)
    assert {line["step"]: line["hellaswag_acc"] for line in lines if "hellaswag_acc" in line} == {0: 0.25, 12: 1.0}
    assert 6 in checkpoint.complete_steps(run)
    assert load_curve(run) == load_curve(undisturbed)


def test_a_failed_evaluation_releases_its_memory_at_once(tiny_args, tmp_path, monkeypatch):
    """Training needs the memory that the failed pass held, and an exception keeps what its frames refer to."""
    tensors_of_the_pass, alive_when_reported = [], []

    def remember(tensors):
        tensors_of_the_pass.extend(weakref.ref(tensor) for tensor in tensors)

    def report(rt):
        alive_when_reported.extend(reference() is not None for reference in tensors_of_the_pass)

    fail_in_batch_3_of_step_4(monkeypatch, torch.OutOfMemoryError("CUDA out of memory"), remember)
    monkeypatch.setattr(evaluator, "report_failed_evaluation", report)

    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "5")

    assert alive_when_reported == [False, False]


def test_a_signal_during_a_failing_evaluation_still_stops_the_run(tiny_args, tmp_path, monkeypatch):
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    stop = StopRequest()

    with monkeypatch.context() as patch:
        error = torch.OutOfMemoryError("CUDA out of memory")
        fail_in_batch_3_of_step_4(patch, error, lambda tensors: setattr(stop, "signal", "SIGTERM"))
        train_quickstart(tiny_args, run, stop=stop)
    assert checkpoint.latest_step(run) == 5  # the next step asks, and is completed

    train_quickstart(tiny_args, run, "--resume", "auto")
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 4)
    assert same_bits(load_weights(run), load_weights(undisturbed))


# Which rank of two fails in which of its four batches, for each validation of a run: {(validation, rank): batch}.
FAILURES = {
    (1, 0): 2, (1, 1): 2,  # both at once
    (2, 1): 3,  # one, while the other continues to its next check
    (3, 0): 2,  # one, while the other is asked to stop: STOP_AT
}  # fmt: skip

# In which validation which rank is asked to stop, and before which batch: where the other rank's failure is found.
STOP_AT = {(3, 1): 3}


def plant_failures() -> None:
    """A `prepare` for ranks whose validations fail and stop as FAILURES and STOP_AT say."""
    rank = int(os.environ["RANK"])
    validate, to_device, check = evaluator.validate, evaluator.to_device, StopRequest.check
    validation = batch = checks = 0

    def counted_validate(*args):
        nonlocal validation, batch, checks
        validation, batch, checks = validation + 1, 0, 0
        return validate(*args)

    def failing_to_device(*args):
        nonlocal batch
        batch += 1
        if FAILURES.get((validation, rank)) == batch:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to_device(*args)

    def interrupted_check(stop, *args, **kwargs):
        nonlocal checks
        checks += 1
        if STOP_AT.get((validation, rank)) == checks:
            stop.signal = "SIGTERM"
        return check(stop, *args, **kwargs)

    evaluator.validate, evaluator.to_device = counted_validate, failing_to_device
    StopRequest.check = interrupted_check


def test_both_ranks_continue_after_an_evaluation_that_failed_on_one_or_all(tiny_args, tmp_path, run_ranks):
    flags = ["train_gpt2.py", "quickstart", *tiny_args, "--zero-stage", "1", "--out-dir"]
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    run_ranks(2, *flags, undisturbed)

    output = run_ranks(2, *flags, run, prepare=plant_failures)

    # Each rank that fails reports it: nobody else knows the reason.
    failed = "validation failed at step {} on rank {} (OutOfMemoryError: CUDA out of memory)"
    for step, rank, count in ((0, 0, 1), (0, 1, 1), (4, 0, 0), (4, 1, 1), (8, 0, 1), (8, 1, 0)):
        assert output.count(failed.format(step, rank)) == count, output

    # The signal of rank 1 is met in the step after the failure.
    assert "stopped by the time limit or another rank's signal at step 9; checkpoint saved" in output
    assert checkpoint.latest_step(run) == 9

    # Neither the failures nor the stop have changed a bit.
    run_ranks(2, *flags, run, "--resume", "auto")
    assert load_curve(run) == without_validation_of(load_curve(undisturbed), 0, 4, 8)
    assert same_bits(load_weights(run), load_weights(undisturbed))
