"""What evaluations measure, and the verdict on or off track."""

import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from corpora import encode
from helpers import CPU, load_curve, load_weights, parse_config, same_bits, write_model
from networks import make_network

from checkpoints.run_folder import complete_steps
from evaluation import verdict
from evaluation.evaluations import Evaluation, Samples, Validation, make_list, measure, validate
from lifecycle import plan
from lifecycle.build import build_trainer
from model import GPT, MLP, Sampler
from system.distributed import Runtime
from tokens import shards
from tokens.tokenizer import EOT, encoding
from training.head import Loss
from training.loader import Loader
from training.presets import PRESETS
from training.step import Trainer


def test_val_loss_is_the_mean_over_the_val_split(tiny_config, tiny_data, monkeypatch):
    """Whatever the ranks and the micro-batch: here neither divides 43 sequences, nor is the last one the split's."""
    cfg = tiny_config("--val-tokens", 43 * 32 + 31)
    model = GPT(cfg.model)
    data = Loader(tiny_data, "val", 32, 256)
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_val_000000.npy")[: 43 * 32 + 1].astype(int))
    with torch.no_grad():
        logits, _ = model(tokens[:-1].view(43, 32))
    expected = F.cross_entropy(logits.double().flatten(0, 1), tokens[1:])

    # The ranks run one after another here, so each keeps its part of the sum.
    monkeypatch.setattr(Runtime, "all_reduce", lambda rt, tensor: tensor)
    for world_size, B in ((1, 4), (3, 2), (2, 64)):
        ranks = [replace(CPU, rank=rank, world_size=world_size) for rank in range(world_size)]
        parts = [validate(Loss(model, compiles=False), data, cfg.val_tokens, rt, B) for rt in ranks]
        assert sum(part["val_loss"] for part in parts) == pytest.approx(expected.item(), rel=1e-5)
        assert "val_bpb" not in parts[0]  # these are no ids of text


def test_bits_per_byte_count_the_bytes_of_the_targets(tmp_path):
    """Of the very targets that are validated, in sequences of 8. A character may be split across tokens, and
    <|endoftext|> has no bytes."""
    tokens = encode(["naïve café: 日本語", "plain words, and more of them than fit"])
    shards.write_shard(tmp_path / "toy_val_000000.npy", np.array(tokens))
    data = Loader(tmp_path, "val", 8, 50257)
    found = validate(lambda x, y: (None, torch.tensor(3.0)), data, 1024, CPU, 2)

    count = len(tokens[:-1]) // 8 * 8
    read = encoding().decode_bytes([token for token in tokens[1 : count + 1] if token != EOT])
    assert found["val_bpb"] == pytest.approx(3 / math.log(2) * count / len(read))


def test_eval_only_reads_as_much_as_the_model_can(tiny_config, tmp_path, capsys):
    """Sequences of 24 tokens, of which no whole number makes a batch of 256."""
    weights = write_model(tmp_path, make_network(vocab_size=256, block_size=24))
    cfg = tiny_config("--hellaswag-every 0 --val-tokens 130 --init-from", weights)
    plan.evaluate_weights(cfg, CPU)
    output = capsys.readouterr().out
    assert "context: 24" in output and str(weights) in output


def test_two_evaluations_with_one_name_are_refused(tiny_config):
    """The second would replace the first in metrics.jsonl."""
    trainer = build_trainer(GPT(tiny_config().model), tiny_config(), CPU, 12)
    with pytest.raises(ValueError, match="val_loss"):
        measure([Validation(trainer.cfg), Validation(trainer.cfg)], trainer, "")


def test_an_evaluation_says_what_it_costs_and_what_it_reads():
    """Nothing is counted as free because somebody forgot it."""

    class Forgetful(Evaluation):
        def measure(self, trainer):
            return {}, ""

    with pytest.raises(TypeError, match="facts"):
        Forgetful("forgetful", 1, tokens=0)
    with pytest.raises(TypeError, match="tokens"):
        type("Free", (Forgetful,), {"facts": dict})("free", 1)


def test_a_period_of_0_leaves_an_evaluation_out(tiny_config):
    assert [e.name for e in make_list(tiny_config("--hellaswag-every 3"))] == ["validation", "HellaSwag"]
    assert make_list(tiny_config("--val-every 0")) == []


# ------------------------------------------------------------------------- on track or off track


EDU = "HuggingFaceFW/fineweb-edu"


@pytest.mark.parametrize("flags, source, said", [
    ("", EDU, "reference: 2 public runs"),
    ("--seed 7 --no-shuffle --model.vocab-size 50257 --val-tokens 1048576", EDU, "reference: 2 public runs"),
    # Another recipe.
    ("--max-lr 1e-3 --warmup-steps 256", EDU, "--max-lr, --warmup-steps"),
    ("--init-from gpt2", EDU, ""),
    ("", "my", "the data"),  # a text of one's own
])  # fmt: skip
def test_a_run_is_judged_by_public_runs_of_its_recipe_and_data(tmp_path, capsys, flags, source, said):
    shards.write_manifest(tmp_path, shards.Manifest(shards.Source(source), "npy", 400))
    cfg = parse_config("gpt2-124m", *flags.split(), "--data-dir", tmp_path)
    found = verdict.choose_reference(cfg, 19_073)
    assert said in capsys.readouterr().out and bool(found) == ("public runs" in said)


def test_a_run_that_is_off_track_can_stop_there(train, monkeypatch, capsys):
    """After the step of the second loss in a row, which is in metrics.jsonl."""
    runs = SimpleNamespace(expected_range=lambda step: (9, 10) if step in (2, 6, 8) else (0, 10))
    monkeypatch.setattr(verdict, "choose_reference", lambda cfg, max_steps: runs)
    run = train("run", "--val-every 2 --stop-off-track")
    output = capsys.readouterr().out
    assert "stopped by --stop-off-track at step 9 of 12" in output
    curve = load_curve(run)
    assert sorted(curve) == list(range(10)) and f"step 8: val {curve[8][1]:.3f}, reference 9.000" in output
    assert curve[9][1] is not None  # the weights that it leaves are measured, too
    assert complete_steps(run)[-1] == 9

    train(run, "--val-every 2 --resume auto")
    assert complete_steps(run)[-1] == 12


# ------------------------------------------------------------------------- samples


@pytest.mark.parametrize("document, prompt", [
    ("Call me Ishmael. Some years ago, never mind how long precisely", "Call me Ishmael. Some years"),
    ("Short.", "Short."),  # the document behind it is another text
])  # fmt: skip
def test_samples_continue_the_users_own_text(tmp_path, document, prompt):
    shards.write_shard(tmp_path / "text_val_000000.npy", np.array([EOT]))  # too short for a sequence
    shards.write_shard(tmp_path / "text_val_000001.npy", np.array(encode([document, "another text " * 20])))

    cfg = replace(PRESETS["finetune"], data_dir=str(tmp_path), sequence_length=32)
    samples = Samples(cfg, Validation(cfg))

    assert encoding().decode(samples.prompt) == prompt


def test_a_long_prompt_loses_its_beginning(tiny_config, capsys):
    """And a backslash with an n is no line break, which is said."""
    cfg = tiny_config("--sample-prompt", r"begin\n " + "long " * 50)
    samples = Samples(cfg, Validation(cfg))
    assert encoding().decode(samples.prompt) == " long" * 31 + " "
    assert r"$'...\n...'" in capsys.readouterr().err


def test_a_sample_ends_at_its_own_end_of_text(tiny_config, monkeypatch):
    drawn = iter([[995, EOT, 0, 0], [EOT, 11, 0, 0], [11, 11, EOT, EOT]])
    monkeypatch.setattr(Sampler, "draw", lambda *_: torch.tensor(next(drawn)))
    cfg = tiny_config("--sample-prompt Hello")
    _, text = Samples(cfg, Validation(cfg)).measure(SimpleNamespace(rt=CPU, model=make_network(n_layer=1)))
    assert text.splitlines()[1::2] == ["Hello world", "Hello", "Hello!!", "Hello!!"]


def test_what_acts_in_training_only_does_not_act_in_an_evaluation(train, one_run, monkeypatch):
    """Dropout of half of each MLP's output changes the train loss of step 0, and not its val loss."""
    forward = MLP.forward
    monkeypatch.setattr(MLP, "forward", lambda mlp, x: F.dropout(forward(mlp, x), 0.5, mlp.training))
    loss, val_loss, _ = load_curve(train("run", "--max-steps 1"))[0]
    loss_without, val_loss_without, _ = load_curve(one_run)[0]
    assert val_loss == val_loss_without and loss != loss_without


def test_a_checkpoint_has_the_weights_that_evaluations_measure(train, one_run, monkeypatch):
    """As a schedule-free optimizer needs it, which evaluates other weights than it trains."""

    @contextmanager
    def evaluating(trainer):
        trainer.state.weights["transformer.wpe.weight"].data.neg_()
        yield
        trainer.state.weights["transformer.wpe.weight"].data.neg_()

    monkeypatch.setattr(Trainer, "evaluating", evaluating)
    found, expected = load_weights(train("run")), load_weights(one_run)
    assert torch.equal(found.pop("transformer.wpe.weight"), -expected.pop("transformer.wpe.weight"))
    assert same_bits(found, expected)
