"""train_gpt2.py computes what the plain trainer computes, and the comparison finds a fault in either.

The two share model.py. Data, schedule, optimizer, accumulation, ranks, clipping and the loss are written twice.
"""

import math
from dataclasses import fields
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    load_metrics,
    load_weights,
    run_main,
    train_quickstart,
    write_random_walk_shards,
)

import train_gpt2_plain
from model import GPT, MLP
from system.printing import env_rank
from tokens import shards
from training.presets import PRESETS

PLAIN = "train_gpt2_plain.py"

# Flags for both trainers: nine steps of 32 sequences. An epoch has 267 sequences in three shards, so the last step
# begins the second epoch. There are four micro-steps on one rank, two on two.
STEPS, TOKENS = 9, 1024
TOY = f"""--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 32 --model.vocab-size 256
--sequence-length 32 --total-batch-size {TOKENS} --micro-batch-size 8 --max-steps {STEPS} --warmup-steps 3
--val-every 4 --val-tokens 1024 --no-compile --dtype float32""".split()
ENGINE_FLAGS = "--no-shuffle --hellaswag-every 0 --sample-every 0"

# A preset of train_gpt2.py, the flags in which it differs from gpt2-124m, and flags for both trainers. At the presets'
# rates a wrong decay or beta hardly shows, and no gradient is clipped: HIGH_RATE shows them.
HIGH_RATE = "--max-lr 3e-3 --min-lr 3e-4 --weight-decay 0.5 --grad-clip 0.6"
RUNS = {
    "gpt2-124m": ("gpt2-124m", "", ""),
    "untied-124m": ("untied-124m", "--model.no-tied-head", ""),
    "llmc-124m": ("llmc-124m", "--min-lr 0", ""),
    "high rate": ("gpt2-124m", "", HIGH_RATE),
    "no clipping": ("gpt2-124m", "", f"{HIGH_RATE} --grad-clip 0"),
    "dropout": ("gpt2-124m", "", HIGH_RATE),
}

# A loss and a gradient are sums over the tokens of a step. Two orders of n summands, which no two CPUs need to share,
# give float32 sums that differ by up to n roundings of 2**-24.
ROUNDING = TOKENS * 2**-24


def largest_differences(a, b):
    """{name: how far two runs are apart}: losses, norms and rates relative to their size. Weights are below 2, and
    their differences are absolute. numpy's max is NaN if a number is."""
    rows = list(zip(load_metrics(a), load_metrics(b), strict=True))
    assert len(rows) == STEPS + 1
    differences = {}
    for key in ("step", "tokens", "train_loss", "val_loss", "grad_norm", "lr"):
        pairs = [(x.get(key, 0), y.get(key, 0)) for x, y in rows]
        differences[key] = np.max([abs(x - y) / max(abs(x), abs(y), 1e-30) for x, y in pairs])

    # A bias of the keys changes no attention weight. Its gradient is rounding, which Adam scales up to a full step.
    weights, others = load_weights(a, STEPS), load_weights(b, STEPS)
    assert weights.keys() == others.keys()
    names = [name for name in weights if not name.endswith("c_attn.bias")]
    differences["weights"] = np.max([(weights[name] - others[name]).abs().max() for name in names])
    return differences


def is_rounding(differences):
    """Whether two runs compute the same. The rates are Python's own numbers."""
    return differences["lr"] < 1e-12 and np.max(list(differences.values())) < ROUNDING


def drop_half():
    """Let each MLP drop half of its output in training. Called in the process of a rank."""
    forward = MLP.forward
    mock.patch.object(MLP, "forward", lambda mlp, x: F.dropout(forward(mlp, x), 0.5, mlp.training)).start()


@pytest.mark.parametrize("name, ranks", [*((name, 1) for name in RUNS), ("untied-124m", 2), ("dropout", 2)])
def test_the_engine_computes_what_the_plain_trainer_computes(tiny_data, tmp_path, run_ranks, name, ranks):
    preset, difference, both = RUNS[name]
    flags = [*TOY, *both.split(), "--data-dir", tiny_data]
    prepare = drop_half if name == "dropout" else None

    engine, plain = tmp_path / "engine", tmp_path / "plain"
    run_ranks(ranks, "train_gpt2.py", preset, ENGINE_FLAGS, *flags, "--out-dir", engine, prepare=prepare)
    run_ranks(ranks, PLAIN, *flags, *difference.split(), "--out-dir", plain, prepare=prepare)

    differences = largest_differences(engine, plain)
    assert is_rounding(differences), differences


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """(run folder, flags) of a run of the plain trainer in this process. The flags lack the run folder."""
    torch.set_num_threads(1)  # the tests run side by side
    folder = tmp_path_factory.mktemp("plain")
    flags = [*TOY, HIGH_RATE, "--data-dir", write_random_walk_shards(folder / "data")]
    assert run_main(PLAIN, *flags, "--out-dir", folder / "run") == 0
    return folder / "run", flags


# Faults, each as a text of the plain trainer and its replacement.
FAULTS = {
    "beta2": ("0.95)", "0.999)"),
    "decay": ('"weight_decay": cfg.weight_decay', '"weight_decay": 1.5 * cfg.weight_decay'),
    "decay of vectors": ('"weight_decay": 0.0', '"weight_decay": cfg.weight_decay'),
    "warm-up": ("(step + 1) / cfg.warmup_steps", "step / cfg.warmup_steps"),
    "end of the cosine": ("(cfg.max_steps - cfg.warmup_steps)", "(cfg.max_steps - 1 - cfg.warmup_steps)"),
    "division": ("loss = loss / micro_steps", "loss = loss / 1"),
    "order": ("range(0, file.tokens - T, T)", "range(0, file.tokens - 2 * T, T)"),
    "targets": ("x_and_y[:, 1:]", "x_and_y[:, :-1]"),
    "clipping": ("cfg.grad_clip or math.inf", "1.01 * cfg.grad_clip"),
    "gradients kept": ("optimizer.zero_grad()", "pass"),
    "reported loss": ("loss_sum += loss", "loss_sum = loss"),
    "ranks: no fault": ("0.95", "0.95"),
    "ranks: the same sequences": ("rank * B : (rank + 1) * B", ":B"),
    "ranks: own gradients": ("micro_step == micro_steps - 1", "False"),
    "ranks: sum of losses": ("x = x / dist.get_world_size()", "pass"),
}


def plant(fault):
    """Let `main` of the plain trainer have a fault. Called in the process of a rank."""
    right, wrong = FAULTS[fault]
    source = (ROOT / PLAIN).read_text()
    assert right in source
    faulty = {"__name__": "faulty"}
    exec(source.replace(right, wrong), faulty)
    mock.patch.object(train_gpt2_plain, "main", faulty["main"]).start()


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_planted_fault(plain_run, run_ranks, tmp_path, fault):
    """Two ranks compute what one computes."""
    run, flags = plain_run
    ranks = 2 if fault.startswith("ranks") else 1

    run_ranks(ranks, PLAIN, *flags, "--out-dir", tmp_path / "run", prepare=partial(plant, fault))

    differences = largest_differences(run, tmp_path / "run")
    assert is_rounding(differences) == (fault == "ranks: no fault"), differences


def test_the_defaults_are_the_preset_gpt2_124m():
    preset = PRESETS["gpt2-124m"]
    defaults = fields(train_gpt2_plain.Config)
    different = {field.name for field in defaults if field.default != getattr(preset, field.name)}
    # train_gpt2.py searches for some of these, and compiles if there is a compiler.
    assert different == {"out_dir", "micro_batch_size", "dtype", "compile"}


def test_other_scripts_open_its_weights(plain_run, tmp_path):
    """The engine goes on from them, at the loss that they had."""
    run, flags = plain_run
    more = train_quickstart([ENGINE_FLAGS, *flags, "--max-steps 1"], tmp_path / "more", "--init-from", run)

    rows = load_metrics(run)
    assert rows[-1]["val_loss"] == pytest.approx(load_metrics(more)[0]["val_loss"], rel=ROUNDING)
    assert rows[1]["tokens_per_second"] * rows[1]["step_ms"] == pytest.approx(1000 * TOKENS)


# ------------------------------------------------------------------------- refusals


def test_it_refuses_in_one_line(plain_run, tmp_path, capsys):
    """What a beginner types wrong, and data that are missing or too few. Nothing is written, and an older run stays."""
    run, flags = plain_run
    before = (run / "metrics.jsonl").read_bytes()
    (tmp_path / "short").mkdir()
    for name in ("a_val_000000.npy", "a_train_000001.npy", "a_train_000002.npy"):
        shards.write_shard(tmp_path / "short" / name, np.arange(32, dtype=np.uint16))  # a sequence has 33 tokens

    for wrong, named in {
        f"--out-dir {run}": f"{run} is not empty",
        "--total-batch-size 1000": "256 tokens",
        f"--data-dir {tmp_path}": f"{tmp_path} has no train shard",
        f"--data-dir {tmp_path}/short": "0 sequences, but the run needs 1",
        "--val-tokens 2560": "65 sequences, but the run needs 80",
        "--sequence-length 64": "--model.block-size 64",
        "--grad-clip -1": "--grad-clip -1",
        "--micro-batch-size 0": "--micro-batch-size 0",
        "--model.n-head 3": "n_head 3",
        "--resume auto": "--resume",
    }.items():
        assert run_main(PLAIN, *flags, "--out-dir", tmp_path / "new", wrong) > 0
        error = capsys.readouterr().err
        assert named in error and error.count("\n") == 1
    assert (run / "metrics.jsonl").read_bytes() == before and not (tmp_path / "new").exists()


def test_every_rank_refuses_a_folder_that_is_not_empty(plain_run, run_ranks):
    run, flags = plain_run
    assert run_ranks(2, PLAIN, *flags, "--out-dir", run, fails=True).count("is not empty") == 2


def test_ids_beyond_the_vocabulary_are_refused(plain_run, tmp_path, capsys):
    assert run_main(PLAIN, *plain_run[1], "--model.vocab-size 200 --out-dir", tmp_path / "run") == 1
    assert "--model.vocab-size" in capsys.readouterr().err


BAD = {
    "the loss is nan": lambda loss: loss * math.nan,
    "gradient norm nan": lambda loss: loss + (0 * loss).sqrt(),  # sqrt has an infinite slope at 0
}


def spoil(what, bad_rank=0):
    """Let the loss of one rank, or its gradients, be no number in training. Called in the process of a rank."""
    forward = GPT.forward

    def forward_badly(model, x, y):
        logits, loss = forward(model, x, y)
        return logits, BAD[what](loss) if model.training and env_rank() == bad_rank else loss

    mock.patch.object(GPT, "forward", forward_badly).start()
    mock.patch.object(torch.optim.AdamW, "step", mock.Mock(side_effect=AssertionError("an update"))).start()


@pytest.mark.parametrize("what", BAD)
def test_a_number_that_is_not_finite_ends_all_ranks_before_the_update(plain_run, run_ranks, tmp_path, what):
    output = run_ranks(
        2, PLAIN, *plain_run[1], "--out-dir", tmp_path / "run", prepare=partial(spoil, what, bad_rank=1), fails=True
    )
    assert output.count("error: step 0") == 2 and output.count(what) == 2 and "an update" not in output
    assert not [*(tmp_path / "run").glob("*.pt")]
