"""A whole run learns, and is the same compiled. test_plain.py and test_golden.py compare losses, norms and weights."""

from dataclasses import fields, replace
from functools import partial
from typing import get_type_hints

import torch
from helpers import (
    CPU,
    assert_curves_close,
    load_curve,
    load_weights,
    make_hellaswag_rows,
    same_bits,
    write_jsonl,
)

import train_gpt2
from lifecycle.build import build_trainer
from lifecycle.stop import StopRequest
from training.config import Recipe, TrainConfig

# A value off its default for every setting of the recipe, but for the network, the weights that it begins from and the
# length of the run.
OFF_DEFAULT = {
    "seed": 7, "shuffle": False, "overfit_single_batch": True, "total_batch_size": 512, "sequence_length": 16,
    "max_lr": 5e-3, "min_lr": 1e-3, "warmup_steps": 2, "schedule": "trapezoid", "cooldown": 0.4,
    "optimizer": "muon", "weight_decay": 0.3, "grad_clip": 0.05, "muon_lr": 0.01, "param_dtype": "bfloat16",
    "embed_lr_scale": 2.0,
}  # fmt: skip

# A run in which every setting of OFF_DEFAULT acts.
MOVING = """--optimizer muon --max-steps 3 --warmup-steps 1 --schedule trapezoid --cooldown 0.7 --grad-clip 0.1
--model.no-tied-head --val-every 0 --save-every 0"""


def train_three_steps(cfg, folder) -> dict[str, torch.Tensor]:
    train_gpt2.open_and_train(replace(cfg, out_dir=str(folder)), CPU, StopRequest())
    return load_weights(folder, 3)


def test_every_setting_of_the_recipe_moves_a_weight(tiny_config, tmp_path):
    """Alone, in a real run with Muon: a setting that the loop does not apply would be a flag that does nothing."""
    base = tiny_config(MOVING)
    weights, without_effect = train_three_steps(base, tmp_path / "base"), []
    for setting in {field.name for field in fields(Recipe)} - {"model"}:  # which test_model.py tests
        value = OFF_DEFAULT[setting]
        if value == getattr(base, setting):
            value = getattr(TrainConfig(), setting)
        if same_bits(weights, train_three_steps(replace(base, **{setting: value}), tmp_path / setting)):
            without_effect.append(setting)
    assert without_effect == []


def test_no_other_setting_moves_a_weight(tiny_config, tmp_path):
    """Nor does an evaluation. A resumed run may have other values of these: a setting by which weights differ belongs
    in Recipe."""
    base = tiny_config(MOVING, "--val-every 1")
    left_out = {"compile", "val_tokens", "stop_off_track", "epochs", "max_steps"}
    changed = {}
    for field in fields(TrainConfig):
        if field.name not in {*get_type_hints(Recipe), *left_out} and type(field.default) in (bool, int, float):
            changed[field.name] = type(field.default)(not field.default)
    weights = train_three_steps(base, tmp_path / "base")
    assert load_curve(tmp_path / "base")[1][1]  # the val loss of step 1
    assert len(changed) > 6 and same_bits(weights, train_three_steps(replace(base, **changed), tmp_path / "changed"))


def test_compiled_equals_eager_and_compiles_at_the_start(train, tmp_path, monkeypatch):
    """HellaSwag and samples have shapes that vary. Here Dynamo and autograd compile, without kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()  # another test of this process may have compiled
    frames = torch._dynamo.utils.counters["frames"]
    frames_before, compiled_by_trainer = frames["total"], []

    def make_trainer(*args):
        trainer = build_trainer(*args)
        compiled_by_trainer.append(frames["total"] - frames_before)
        return trainer

    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3))  # of several lengths
    flags = "--max-steps 2 --warmup-steps 1 --model.vocab-size 50304 --model.n-layer 3 --model.n-embd 8"
    eager = train("eager", flags)
    monkeypatch.setattr(train_gpt2, "build_trainer", make_trainer)
    evaluations = "--compile --sample-every 2 --hellaswag-every 2 --hellaswag-data"
    compiled = train("compiled", flags, evaluations, rows)

    assert_curves_close(compiled, eager)
    # The blocks share one graph, and the chunks of the head another; training and validation have their own.
    assert compiled_by_trainer == [4] and frames["total"] - frames_before == 4
