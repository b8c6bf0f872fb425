"""What evaluations measure, and the verdict on or off track."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import CPU, load_curve, load_weights, parse_config, same_bits, train_quickstart

from model import GPT
from tokens import shards
from tokens.loader import Loader
from tokens.tokenizer import EOT, encoding
from training import checkpoint, evaluator
from training.metrics import RunState

SMALL_GPT2 = "--model.vocab-size 50304 --model.n-embd 8".split()


def write_val_text(folder, documents) -> np.ndarray:
    """A folder whose val shard has these documents, each behind <|endoftext|>; returns the tokens."""
    tokens = [token for text in documents for token in (EOT, *encoding().encode_ordinary(text))]
    folder.mkdir()
    shards.write_shard(folder / "text_val_000000.npy", np.array(tokens, np.uint16))
    return np.array(tokens)


def test_evaluations_do_not_move_training(tiny_args, tmp_path):
    often = train_quickstart(tiny_args, tmp_path / "often", "--val-every", "1")
    never = train_quickstart(tiny_args, tmp_path / "never", "--val-every", "0")
    assert same_bits(load_weights(often), load_weights(never))
    assert len([val for _, val, _ in load_curve(often).values() if val is not None]) == 13


def test_a_failed_evaluation_follows_the_save(tiny_args, tmp_path, monkeypatch):
    """It ends the run, which resumes from the step whose evaluation failed."""
    undisturbed, run = train_quickstart(tiny_args, tmp_path / "undisturbed"), tmp_path / "run"
    validate, losses = evaluator.validate, []

    def fail_at_step_8(*args):
        losses.append(validate(*args))
        if len(losses) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses[-1]

    monkeypatch.setattr(evaluator, "validate", fail_at_step_8)
    with pytest.raises(torch.OutOfMemoryError):
        train_quickstart(tiny_args, run, "--save-every", "4")
    assert checkpoint.latest_step(run) == 8

    train_quickstart(tiny_args, run, "--save-every", "4", "--resume", "auto")
    assert load_curve(run) == load_curve(undisturbed)


# ------------------------------------------------------------------------- on track or off track


def validate_once(cfg, monkeypatch, capsys, max_steps=19_073, step=500) -> str:
    """What a run with these settings prints about a loss of 9 nats, which is off every track."""
    monkeypatch.setattr(evaluator, "validate", lambda *args: 9.0)
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=None, forward=None, micro_batch_size=4)
    capsys.readouterr()
    found = evaluator.Evaluator(train_step, object(), object(), max_steps)
    assert found.evaluate(RunState(max_steps, "", step=step), lambda: None) == {"val_loss": 9.0}
    return capsys.readouterr().out


def evaluated_config(*words):
    """A config whose evaluations need nothing but `validate`."""
    return parse_config(*words, "--hellaswag-every", "0", "--sample-every", "0")


@pytest.mark.parametrize("flags", ["", "--seed 7", "--no-shuffle", "--model.vocab-size 50257", "--val-tokens 1048576"])
def test_a_run_is_judged_by_its_public_runs(monkeypatch, capsys, flags):
    output = validate_once(evaluated_config("gpt2-124m", *flags.split()), monkeypatch, capsys)
    assert "off track" in output and "on fineweb-edu" in output


@pytest.mark.parametrize("flags, named", [
    ("--schedule trapezoid", "--schedule"),
    ("--max-lr 1e-3 --warmup-steps 256", "--max-lr, --warmup-steps"),
    ("--model.n-layer 6", "--model.n-layer"),
])  # fmt: skip
def test_a_run_of_other_settings_has_no_verdict(monkeypatch, capsys, flags, named):
    output = validate_once(evaluated_config("gpt2-124m", *flags.split()), monkeypatch, capsys)
    assert output.count("no reference") == 1 and named in output
    assert "track" not in output


@pytest.mark.parametrize("words", [
    "gpt2-124m --init-from gpt2", "gpt2-124m --total-batch-size 262144", "untied-124m --max-lr 1",
])  # fmt: skip
def test_other_weights_or_steps_have_no_verdict(monkeypatch, capsys, words):
    assert "track" not in validate_once(evaluated_config(*words.split()), monkeypatch, capsys)
    assert "track" not in validate_once(evaluated_config("gpt2-124m"), monkeypatch, capsys, max_steps=9000)


def test_a_second_epoch_has_a_reference(monkeypatch, capsys):
    """./train.sh log/gpt2-124m/model_19073.pt 2"""
    cfg = evaluated_config("gpt2-124m", "--epochs", "2")
    assert cfg.total_steps(0) == 38_146

    output = validate_once(cfg, monkeypatch, capsys, max_steps=38_146, step=25_000)

    assert "reference 3.0" in output
    assert "track" not in validate_once(cfg, monkeypatch, capsys, max_steps=38_146, step=5000)


# ------------------------------------------------------------------------- samples


@pytest.mark.parametrize("document, prompt", [
    ("Call me Ishmael. Some years ago, never mind how long precisely", "Call me Ishmael. Some years"),
    ("Short.", "Short."),  # the document behind it is another text
])  # fmt: skip
def test_samples_continue_the_users_own_text(tiny_args, tmp_path, document, prompt):
    write_val_text(tmp_path / "text", [document, "another text " * 20])
    cfg = parse_config("finetune", *tiny_args, *SMALL_GPT2, "--init-from", "scratch", "--sample-every", "1")
    assert cfg.sample_prompt == "@val"
    torch.manual_seed(0)
    train_step = SimpleNamespace(cfg=cfg, rt=CPU, model=GPT(cfg.model), forward=None, micro_batch_size=4)
    data = Loader(tmp_path / "text", "val", 32, cfg.model.vocab_size)

    found = evaluator.Evaluator(train_step, data, None, 9)

    assert found.sample_text(RunState(9, "", step=1), lambda: False).count("sample 0: " + prompt) == 1
    assert found.sample_text(RunState(9, "", step=0), lambda: False) == ""
