"""train_gpt2.py computes what the plain trainer computes, and the comparison would find it if it did not.

The two share model.py; data, schedule, optimizer, accumulation, ranks, clipping and the loss are written twice.
"""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from helpers import (
    ROOT,
    drop_in_training_only,
    load_metrics,
    load_weights,
    refused,
    run_main,
    train_quickstart,
    write_random_walk_shards,
)

import train_gpt2_plain
from model import GPT, GPTConfig
from system.settings import change
from train_gpt2_plain import Config
from training.presets import PRESETS

# What both trainers are given: nine steps of 32 sequences. An epoch has 267 in three shards, each with a tail of a few
# tokens, so the last step begins the second epoch. Four micro-steps on one rank, two on two.
STEPS = 9
TOY = f"""--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--sequence-length 32 --total-batch-size 1024 --micro-batch-size 8 --max-steps {STEPS} --warmup-steps 3
--val-every 4 --val-tokens 1024 --sample-every 0 --no-compile --dtype float32""".split()
ENGINE_FLAGS = "--no-shuffle --hellaswag-every 0"

# A preset of train_gpt2.py, what it differs in from gpt2-124m, and flags for both. At the presets' rates a wrong decay
# or beta hardly shows, and this network's gradients are small: two runs have a high rate and a strong decay, and one
# of them clips the larger half of its gradients.
HIGH_RATE = "--max-lr 3e-3 --min-lr 3e-4 --weight-decay 0.5 --grad-clip 0.6".split()
RUNS = {
    "gpt2-124m": ("gpt2-124m", [], []),
    "untied-124m": ("untied-124m", ["--model.no-tied-head"], []),
    "llmc-124m": ("llmc-124m", ["--min-lr", "0"], []),
    "high rate": ("gpt2-124m", [], HIGH_RATE),
    "no clipping": ("gpt2-124m", [], [*HIGH_RATE, "--grad-clip", "0"]),
}


def largest_differences(a, b):
    """{name: how far two runs are apart}: losses, norms and rates relative to each value, weights absolutely."""
    rows = list(zip(load_metrics(a), load_metrics(b), strict=True))
    differences = {}
    for key in ("step", "train_loss", "val_loss", "grad_norm", "lr"):
        pairs = [(x.get(key, 0), y.get(key, 0)) for x, y in rows]
        differences[key] = max(abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in pairs)

    # A bias of the keys changes no attention weight, so its gradient is rounding, which Adam scales up to a full step.
    weights, others = load_weights(a, STEPS), load_weights(b, STEPS)
    assert weights.keys() == others.keys()
    names = [name for name in weights if not name.endswith("c_attn.bias")]
    differences["weights"] = max((weights[name] - others[name]).abs().max().item() for name in names)
    return differences


def is_rounding(differences):
    """Whether two runs compute the same. A loss of 5.5 has a float32 sum of 256 terms, which may be off by
    256 * 2**-24: 3e-6 of the loss. beta2 0.951 changes the norms by 3e-4."""
    return differences["step"] == 0 and differences["lr"] < 1e-12 and max(differences.values()) < 1e-5


@pytest.mark.parametrize("name, ranks", [*((name, 1) for name in RUNS), ("untied-124m", 2), ("high rate", 2)])
def test_the_engine_computes_what_the_plain_trainer_computes(tiny_data, tmp_path, run_ranks, name, ranks):
    preset, difference, both = RUNS[name]
    flags = [*TOY, *both, "--data-dir", tiny_data]

    run_ranks(ranks, "train_gpt2.py", preset, ENGINE_FLAGS, *flags, "--out-dir", tmp_path / "engine")
    run_ranks(ranks, "train_gpt2_plain.py", *difference, *flags, "--out-dir", tmp_path / "plain")

    differences = largest_differences(tmp_path / "engine", tmp_path / "plain")
    assert is_rounding(differences), differences


# Faults, each as a text of the plain trainer and what replaces it. The first replaces nothing.
FAULTS = {
    "none": ("0.95", "0.95"),
    "beta2": ("0.95)", "0.951)"),
    "decay": ('"weight_decay": cfg.weight_decay', '"weight_decay": 1.1 * cfg.weight_decay'),
    "decay of vectors": ('"weight_decay": 0.0', '"weight_decay": cfg.weight_decay'),
    "warm-up": ("(step + 1) / cfg.warmup_steps", "step / cfg.warmup_steps"),
    "end of the cosine": ("(cfg.max_steps - cfg.warmup_steps)", "(cfg.max_steps - 1 - cfg.warmup_steps)"),
    "division": ("loss = loss / micro_steps", "loss = loss / 1"),
    "order": ("return range(0, num_tokens - T, T)", "return range(0, num_tokens - 2 * T, T)"),
    "targets": ("tokens[:, 1:]", "tokens[:, :-1]"),
    "clipping": ("cfg.grad_clip or math.inf", "1.01 * cfg.grad_clip"),
    "gradients kept": ("optimizer.zero_grad()", "pass"),
}


@pytest.fixture(scope="module")
def right_config(tmp_path_factory):
    """The settings of a run of the plain trainer in this process, which has been made."""
    torch.set_num_threads(1)  # the tests run side by side
    folder = tmp_path_factory.mktemp("plain")
    data = write_random_walk_shards(folder / "data")
    typed = train_gpt2_plain.make_parser().parse_args([*TOY, *HIGH_RATE])
    cfg = replace(change(Config(), vars(typed)), data_dir=str(data), out_dir=str(folder / "run"))
    train_gpt2_plain.train(cfg)
    return cfg


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_planted_fault(right_config, tmp_path, fault):
    right, wrong = FAULTS[fault]
    source = (ROOT / "train_gpt2_plain.py").read_text()
    assert right in source
    faulty = {"__name__": "faulty"}
    exec(source.replace(right, wrong), faulty)

    faulty["train"](replace(right_config, out_dir=str(tmp_path)))

    differences = largest_differences(Path(right_config.out_dir), tmp_path)
    assert is_rounding(differences) == (fault == "none"), differences


def test_a_killed_run_goes_on_to_the_same_bits(right_config, tmp_path, monkeypatch, capsys):
    """From its last save, which may be several steps before the kill. Not with other settings, nor with one more shard,
    which came while it ran: the order of the data would be another."""
    data, run = write_random_walk_shards(tmp_path / "data"), tmp_path / "run"
    cfg = replace(right_config, data_dir=str(data), out_dir=str(run), save_every=3, resume="auto", sample_every=4)
    new_shard = data / "tiny_train_000004.npy"
    monkeypatch.setattr(train_gpt2_plain, "sample_text", lambda *_: "a sample")
    write_row = train_gpt2_plain.write_row

    def die(out_dir, row):
        write_row(out_dir, row)
        if row["step"] == 2:
            shutil.copy(data / "tiny_train_000003.npy", new_shard)
        if row["step"] == 5:
            (out_dir / "metrics.jsonl").open("a").write('{"step": 6, "tr')  # a kill may cut a line off
            raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(train_gpt2_plain, "write_row", die)
        with pytest.raises(InterruptedError):
            train_gpt2_plain.train(cfg)
        with refused("data_dir"):
            train_gpt2_plain.train(cfg)
        new_shard.unlink()
        with pytest.raises(InterruptedError):
            train_gpt2_plain.train(cfg)
    for other, named in (replace(cfg, max_lr=1.0), "max_lr"), (replace(cfg, resume="none"), "not empty"):
        with refused(named):
            train_gpt2_plain.train(other)
    train_gpt2_plain.train(cfg)

    differences = largest_differences(Path(right_config.out_dir), run)
    assert set(differences.values()) == {0}
    assert capsys.readouterr().out.count("a sample") == 5  # at step 4 of each start, at 8 and at the end


def test_each_group_has_a_rate_of_its_own(right_config, tmp_path, monkeypatch):
    """Its peak times the schedule. The one of max_lr is logged, and is what it was with one peak for all."""
    make_optimizer, rates = train_gpt2_plain.make_optimizer, []

    def make_with_two_peaks(model, cfg):
        optimizer = make_optimizer(model, cfg)
        optimizer.param_groups[1]["peak_lr"] /= 4
        optimizer.register_step_pre_hook(lambda *_: rates.append([group["lr"] for group in optimizer.param_groups]))
        return optimizer

    monkeypatch.setattr(train_gpt2_plain, "make_optimizer", make_with_two_peaks)
    train_gpt2_plain.train(replace(right_config, out_dir=str(tmp_path)))

    assert rates == [[row["lr"], row["lr"] / 4] for row in load_metrics(right_config.out_dir)[:STEPS]]


def test_the_defaults_are_the_preset_gpt2_124m():
    preset = PRESETS["gpt2-124m"]
    different = {field.name for field in fields(Config) if field.default != getattr(preset, field.name)}
    # What is searched for there, or needs a compiler.
    assert different == {"out_dir", "micro_batch_size", "dtype", "compile"}


def test_other_scripts_open_its_weights(right_config, tmp_path):
    """And the engine goes on from them, at the loss that they had."""
    run = Path(right_config.out_dir)
    flags = [ENGINE_FLAGS, *TOY, "--max-steps 1 --data-dir", right_config.data_dir]
    more = train_quickstart(flags, tmp_path / "more", "--init-from", run)
    rows = load_metrics(run)
    assert rows[-1]["val_loss"] == pytest.approx(load_metrics(more)[0]["val_loss"], rel=1e-6)
    assert rows[1]["tokens_per_second"] * rows[1]["step_ms"] == pytest.approx(1000 * right_config.total_batch_size)

    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8))
    samples = train_gpt2_plain.sample_text(model, right_config, torch.device("cpu"))
    assert samples.count("sample ") == 4 == samples.count(right_config.sample_prompt)


def test_it_refuses_in_one_line(tiny_data, tmp_path, capsys):
    """Another run's folder, a batch that cannot be divided, missing data, and more to validate on than there is."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text("{}\n")
    command = ["train_gpt2_plain.py", *TOY, "--data-dir", tiny_data, "--out-dir", tmp_path / "new"]

    for flags, named in {
        f"--out-dir {tmp_path}/other": f"{tmp_path}/other is not empty",
        "--total-batch-size 1000": "256 tokens",
        f"--data-dir {tmp_path}": f"{tmp_path} has no train shard",
        "--val-tokens 2560": "65 sequences, of 80",
        "--sequence-length 64": "--model.block-size 64",
        "--grad-clip -1": "--grad-clip -1",
        "--max-lr 0": "--max-lr 0",
        "--model.n-head 3": "n_head 3",
        "--val-every 1 --val-tokens 0": "--val-tokens 0",
    }.items():
        assert run_main(*command, flags) and named in capsys.readouterr().err
    assert (tmp_path / "other" / "metrics.jsonl").read_text() == "{}\n" and not (tmp_path / "new").exists()


def test_what_acts_in_training_only_does_not_act_in_an_evaluation(right_config, tmp_path):
    with drop_in_training_only(tmp_path, without=right_config.out_dir):
        train_gpt2_plain.train(replace(right_config, out_dir=str(tmp_path), max_steps=1, warmup_steps=0))
