"""The last lines of a script name the likely next step, as commands that work when they are pasted."""

import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import CPU, parse_config, train_quickstart

import fineweb
import train_gpt2
from tokens.loader import Loader
from training import plan, resume
from training.presets import PRESETS
from training.run_state import RunState
from training.stop import StopRequest

TEXT = "It was the best of times, it was the worst of times. "
# The smallest network with GPT-2's vocabulary, for one step.
ONE_STEP = """--init-from scratch --model.n-layer 1 --model.n-head 1 --model.n-embd 8 --model.vocab-size 50304
--max-steps 1 --total-batch-size 32 --micro-batch-size 1 --sequence-length 32 --val-tokens 32 --warmup-steps 0
--sample-every 1 --no-compile --dtype float32 --optimizer adamw""".split()


def make_shards_of_text(monkeypatch, capsys, *args) -> list[str]:
    """The output lines of fineweb.py."""
    monkeypatch.setattr(sys, "argv", ["fineweb.py", *map(str, args)])
    capsys.readouterr()
    fineweb.main()
    return capsys.readouterr().out.splitlines()


def read_commands(lines) -> list[list[str]]:
    """The words of the commands for train_gpt2.py among some lines, as a shell would take them."""
    commands = [shlex.split(line.removeprefix("next: ")) for line in lines if "python train_gpt2.py" in line]
    assert all(words[:2] == ["python", "train_gpt2.py"] for words in commands)
    return [words[2:] for words in commands]


@pytest.mark.parametrize("repeats", [6, 30, 2000])
def test_fineweb_suggests_finetune_and_quickstart_for_a_text_of_ones_own(tmp_path, monkeypatch, capsys, repeats):
    """Whatever its length: 80 tokens, 400 or 26,000; and with blanks in its name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text(TEXT * repeats)
    out = tmp_path / "my shards"

    lines = make_shards_of_text(monkeypatch, capsys, "--source", "my text.txt", "--out", "my shards")

    finetune, quickstart = read_commands(lines)
    assert (finetune[0], quickstart[0]) == ("finetune", "quickstart")
    configs = [parse_config(*words) for words in (finetune, quickstart)]
    steps = []
    for cfg in configs:
        assert cfg.data_dir == "my shards"
        train_data = Loader(out, "train", cfg.sequence_length, 50257)
        Loader(out, "val", cfg.sequence_length, 50257)
        steps.append(cfg.total_steps(train_data.order.sequences_per_epoch))
    assert configs[0].run_dir != configs[1].run_dir
    assert configs[1].sample_prompt == "@val"

    # What the lines say of tokens, epochs and steps is what the runs will do.
    train_tokens = sum(train_data.tokens)
    assert f": 2 epochs of {train_tokens:,} train tokens, {steps[0]:,} steps" in lines[-4]
    assert steps[0] >= 8

    # A short fine-tuning run is evaluated often enough for a curve, and each evaluated step is saved.
    assert 4 <= steps[0] // configs[0].val_every <= 10
    assert configs[0].save_every == configs[0].val_every
    epochs = steps[1] * configs[1].total_batch_size / train_tokens
    assert f": {epochs:,.1f} epochs, {steps[1]} steps" in lines[-2]


def test_the_suggested_commands_train(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text.txt").write_text(TEXT * 60)
    lines = make_shards_of_text(monkeypatch, capsys, "--source", "my text.txt", "--out", "my shards")
    for words in read_commands(lines):
        cfg = parse_config(*words, *ONE_STEP)
        train_gpt2.train(cfg, CPU, StopRequest())

        # Its own last line draws the run, and samples from its weights.
        line = capsys.readouterr().out.splitlines()[-1]
        draw, sample = [shlex.split(command) for command in line.removeprefix("next: ").split("; ")]
        assert draw == ["python", "plots.py", str(cfg.run_dir)]
        assert sample == ["python", "infer.py", str(cfg.run_dir / "model_00001.pt"), "It was the best of times, it"]
        assert Path(sample[2]).is_file()


def test_a_finished_run_names_its_best_weights_and_the_prompt_of_its_samples(tmp_path):
    cfg = parse_config("gpt2-124m", "--out-dir", tmp_path / "my run")
    run = RunState(9, "", step=9, best={"step": 6, "val_loss": 3.0})
    line = train_gpt2.describe_result(cfg, run, StopRequest()).splitlines()[-1]
    words = shlex.split(line)
    assert words[-2:] == [str(tmp_path / "my run" / "model_00006.pt"), "Hello, I'm a language model,"]
    assert words[1:4] == ["python", "plots.py", str(tmp_path / "my run") + ";"]

    # infer.py refuses a model that lacks GPT-2's tokens.
    small = parse_config("gpt2-124m", "--out-dir", tmp_path / "run", "--model.vocab-size", "256")
    assert "infer.py" not in train_gpt2.describe_result(small, run, StopRequest())


def test_a_dry_run_ends_with_the_command_that_trains(tiny_args, monkeypatch, capsys):
    """For a run of minutes: the same command. For one of hours: train.sh, which survives the end of the session."""
    dry = ["quickstart", *tiny_args, "--out-dir", "my run", "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *dry])
    monkeypatch.setattr(train_gpt2.distributed, "session", lambda *_, **more: nullcontext(CPU))
    monkeypatch.setattr(train_gpt2, "dry_run", lambda cfg, rt: 60.0)
    train_gpt2.main()
    line = capsys.readouterr().out.splitlines()[-1]
    words = shlex.split(line.removeprefix("next: "))
    assert words == ["python", "train_gpt2.py", *dry[:-1]]

    # On two ranks, for hours, on a GPU.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    two = replace(CPU, world_size=2)
    gpu = replace(two, device=torch.device("cuda"))
    start = "next: torchrun --standalone --nproc_per_node=2 train_gpt2.py"
    assert plan.next_command(["--dry_run", "--out-dir", "a b"], two, 60) == f"{start} --out-dir 'a b'"
    assert plan.next_command(["--dry-run"], two, 9999) == "next, on a machine with GPUs: ./train.sh"
    assert plan.next_command(["finetune", "--dry-run"], gpu, 9999) == "next, in the background: ./train.sh finetune"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert plan.next_command(["--dry-run"], two, 60) == "next: the same command on every machine, without --dry-run"


def test_a_stopped_run_names_the_command_that_resumes_it(monkeypatch):
    """As it was typed; under train.sh and on several machines, in words."""
    monkeypatch.delenv("TRAIN_STATUS_FILE", raising=False)
    words = "run the same command with --resume auto"
    typed = ["quickstart", "--out-dir", "my run"]
    cfg = parse_config(*typed)
    full = f"{words}: python train_gpt2.py quickstart --out-dir 'my run' --resume auto"
    assert plan.how_to_resume(["train_gpt2.py", *typed], cfg, CPU) == full
    assert plan.how_to_resume(["a/train_gpt2.py", *typed, "--resume", "auto"], cfg, CPU) == full

    # Two ranks, on one machine and on two.
    two = replace(CPU, world_size=2)
    assert plan.how_to_resume(["train_gpt2.py", *typed], cfg, two) == words
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    command = "torchrun --standalone --nproc_per_node=2 train_gpt2.py quickstart --resume auto"
    assert plan.how_to_resume(["train_gpt2.py", "quickstart"], cfg, two) == f"{words}: {command}"

    monkeypatch.setenv("TRAIN_STATUS_FILE", "status.json")
    assert plan.how_to_resume(["train_gpt2.py", *typed], cfg, two) == words


@pytest.mark.parametrize(
    "typed, suggested",
    [
        (["--resume", "{a}/model_00004.pt", "--seed", "7"], ["--seed", "7", "--resume", "{a}"]),
        (["--resume={a}", "--out-dir", "{b}"], ["--out-dir", "{b}", "--resume", "{b}"]),
        (["quickstart", "--resume", "{a}", "--out-dir", "{b}"], ["quickstart", "--out-dir", "{b}", "--resume", "auto"]),
    ],
)
def test_a_run_resumed_from_a_path_names_a_command_that_resumes_its_newest_step(
    typed, suggested, tiny_args, tmp_path, monkeypatch, capsys
):
    """Without a preset, --resume auto would look for a run of the default preset."""
    monkeypatch.delenv("TRAIN_STATUS_FILE", raising=False)
    folders = {"a": tmp_path / "old run", "b": tmp_path / "new run"}
    train_quickstart(tiny_args, folders["a"], "--max-steps", "4")
    typed, suggested = ([word.format(**folders) for word in words] for words in (typed, suggested))

    # The run is resumed as typed and stopped at once; its last line has the command.
    tiny = tiny_args if "quickstart" in typed else []
    cfg = parse_config(*typed, *tiny, "--max-steps", "9", "--allow-drift")
    stop = StopRequest()
    stop.signal = "SIGTERM"
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", *typed])
    train_gpt2.train(cfg, CPU, stop)
    last_line = capsys.readouterr().out.splitlines()[-1]
    command = shlex.split(last_line.partition(": ")[2])
    assert command == ["python", "train_gpt2.py", *suggested]

    # The command is of the same run, and finds what was saved there.
    again = parse_config(*command[2:])
    assert again.run_dir == cfg.run_dir
    assert resume.find_checkpoint(again)["step"] == 4


@pytest.mark.parametrize("card", [["--card", "8xH100"], ["--card=8xH100"]])
def test_a_prediction_ends_with_the_command_that_trains(monkeypatch, capsys, card):
    monkeypatch.setattr(sys, "argv", ["train_gpt2.py", "gpt2-124m", "--dry-run", *card, "--out-dir", "my run"])
    train_gpt2.main()
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == "next, on that machine: ./train.sh gpt2-124m --out-dir 'my run'"


def test_fineweb_suggests_the_reproduction_for_enough_tokens():
    """100M tokens are more than a test can make, so the folder is described."""

    def suggest(name, folder):
        shard = fineweb.shards.Shard("x_train_000001.npy", 100_000_000, 1, "0" * 64, end={})
        manifest = fineweb.Manifest({"name": name}, "npy", 100_000_000, shards=[shard, shard])
        return fineweb.suggest_training(Path("data") / folder, manifest)

    assert suggest("fineweb-edu", "fineweb-edu")[-1].endswith(": ./train.sh gpt2-124m --data-dir data/fineweb-edu")
    assert suggest("fineweb", "fineweb")[-1].endswith(": ./train.sh llmc-124m --data-dir data/fineweb")
    assert suggest("a/b", "a b")[-1].endswith(": ./train.sh gpt2-124m --data-dir 'data/a b'")


def test_the_numbers_in_fineweb_are_those_of_the_presets():
    finetune, quickstart = PRESETS["finetune"], PRESETS["quickstart"]
    assert fineweb.FINETUNE_SEQUENCE_LENGTH == finetune.sequence_length
    assert fineweb.FINETUNE_BATCH_TOKENS == finetune.total_batch_size
    assert fineweb.FINETUNE_EPOCHS == finetune.epochs
    assert fineweb.FINETUNE_VAL_EVERY == finetune.val_every == finetune.save_every
    assert fineweb.QUICKSTART_SEQUENCE_LENGTH == quickstart.sequence_length
    assert fineweb.QUICKSTART_BATCH_TOKENS == quickstart.total_batch_size
    assert fineweb.QUICKSTART_STEPS == quickstart.max_steps
