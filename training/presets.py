"""The presets: what each ancestor trained, and the command line that starts from one of them.

cfg = parse(["quickstart", "--max-steps", "50", "--model.n-layer", "2"])   # what train_gpt2.py does with sys.argv
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path

import tyro

from model import GPTConfig
from system.cli import UserError, require
from training.config import TrainConfig


def _gpt2(name: str, n_layer: int, n_head: int, n_embd: int, max_lr: float) -> TrainConfig:
    """A GPT-2 size with the learning rate GPT-3 (Brown et al. 2020, table 2.1) gives a model of that size."""
    model = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=50304)
    return TrainConfig(preset=name, model=model, max_lr=max_lr, min_lr=round(max_lr / 10, 9), steps_per_epoch=19_073)


_small = GPTConfig(block_size=256, vocab_size=50304, n_layer=4, n_head=4, n_embd=128)

# fmt: off
_record8 = TrainConfig(
    preset="record8-124m",
    model=GPTConfig(
        vocab_size=50304, n_head=6, bias=False, tied_head=False, positions="rope", norm="rmsnorm", activation="relu2",
        qk_norm=True, zero_init_projections=True,
    ),
    data_dir="data/fineweb", max_steps=4578, val_every=125, save_every=500,
    optimizer="muon", muon_lr=0.02, zero_stage=1,  # the record also splits Muon's work across ranks
    max_lr=0.002, embed_lr_scale=150.0,  # the head's rate, and the embedding's multiple of it
    schedule="trapezoid", warmup_steps=0, cooldown=1308 / 4578, min_lr=0.0,
    weight_decay=0.0, grad_clip=0.0, weights="bfloat16",
)

_speedrun = replace(  # modded-nanogpt's simple trainer (its track 3), result 36: docs/ancestors.md
    _record8,
    preset="speedrun-124m",
    model=replace(
        _record8.model, bias=True, head_bias=True, positions="half_rope", norm="rmsnorm_gain",
        attention_scale=0.12, softcap=15.0,
    ),
    max_steps=3250, cooldown=0.7, muon_lr=0.025, muon_weight_decay=0.05, newton_schulz="exact",
    max_lr=0.004, embed_lr_scale=175.0, vector_lr_scale=3.75, weight_decay=0.001, vector_weight_decay=0.001,
    beta1=0.8, adam_eps=1e-10 / 524_288,  # it adds up the gradients of a step's tokens, we take their mean
)

PRESETS: dict[str, TrainConfig] = {c.preset: c for c in [
    _gpt2("gpt2-124m", 12, 12, 768, 6e-4),
    _gpt2("gpt2-350m", 24, 16, 1024, 3e-4),
    _gpt2("gpt2-774m", 36, 20, 1280, 2.5e-4),
    _gpt2("gpt2-1558m", 48, 25, 1600, 2e-4),
    TrainConfig(
        preset="untied-124m",
        model=GPTConfig(vocab_size=50304, tied_head=False),
        total_batch_size=262_144, steps_per_epoch=38_146, warmup_steps=700,
        val_every=100, sample_every=1000, save_every=2000,
    ),
    TrainConfig(
        preset="llmc-124m",
        data_dir="data/fineweb",
        warmup_steps=700, min_lr=0.0,
        zero_stage=1,
        sample_every=20_000,
    ),
    _record8,
    _speedrun,
    replace(  # past it: what each part brought others at full size, and here, is in docs/ancestors.md
        _speedrun,
        preset="sprint-124m",
        model=replace(_speedrun.model, value_tables=3), optimizer="normuon", muon_momentum_warmup=300, max_steps=2900,
    ),
    TrainConfig(  # rate and batch from nanoGPT's finetune_shakespeare; --init-from sets the network
        preset="finetune",
        data_dir="data/my", init_from="gpt2",
        total_batch_size=32_768, epochs=2, warmup_steps=5, max_lr=3e-5, min_lr=3e-6,
        val_every=25, val_tokens=131_072, hellaswag_every=0, sample_every=50,
        save_every=25, keep=1,  # as often as val: the best checkpoint matters, and it is seldom the last
    ),
    TrainConfig(
        preset="overfit",
        model=_small, data_dir="data/stdlib", overfit_single_batch=True,
        sequence_length=128, total_batch_size=512, max_steps=200,
        warmup_steps=10, max_lr=3e-3, min_lr=3e-4, weight_decay=0.0,
        val_every=0, hellaswag_every=0, sample_every=0, save_every=0,
    ),
    TrainConfig(
        preset="quickstart",  # tuned to the lowest loss within two minutes on two slow cores: bench/RESULTS.md
        model=_small, data_dir="data/stdlib",
        sequence_length=256, total_batch_size=4096, max_steps=80,
        optimizer="muon", muon_lr=0.02, max_lr=0.01, min_lr=0.0, warmup_steps=5, schedule="trapezoid", cooldown=0.5,
        val_every=40, val_tokens=65_536, hellaswag_every=0, save_every=40, keep=2,
        sample_every=80, sample_prompt="def ",
    ),
]}
# fmt: on


SWITCHES = {f.name for config in (TrainConfig, GPTConfig) for f in fields(config) if f.type in (bool, "bool")}


def model_from_init(cfg: TrainConfig) -> bool:
    """Whether --init-from determines the network: it is given, and no --model flag asks for another one."""
    return cfg.init_from != "scratch" and cfg.preset in PRESETS and cfg.model == PRESETS[cfg.preset].model


# What nanoGPT, llm.c's train_gpt2.py and DDP-BASEMODEL-TRAIN call something that has another name here.
RENAMED = """
config/train_gpt2.py: gpt2-124m
config/train_shakespeare_char.py: quickstart --data-dir data/my, GPT-2 tokens of your text by fineweb.py
config/finetune_shakespeare.py: finetune --init-from gpt2-xl
config/eval_gpt2.py: --init-from gpt2 --eval-only
gpt2 gpt2-medium gpt2-large gpt2-xl: gpt2-124m, gpt2-350m, gpt2-774m, gpt2-1558m; for OpenAI's weights --init-from
init_from=resume: --resume auto
batch_size: --micro-batch-size
gradient_accumulation_steps: --total-batch-size, in tokens, over all ranks
block_size: --sequence-length
n_layer n_head n_embd bias: the same after --model., such as --model.n-layer
learning_rate: --max-lr
learning_rate_decay_frac: --min-lr, a rate, not a fraction
max_iters num_iterations: --max-steps
warmup_iters: --warmup-steps
eval_interval val_loss_every: --val-every
eval_iters val_max_steps: --val-tokens
save_every_niter: --save-every
always_save_checkpoint: --save-every and --keep
output_dir: --out-dir
dataset input_bin input_train_bin input_val_bin: --data-dir, a folder with train and val shards
wandb_log wandb_log_iters: --tracker wandb
wandb_project wandb_project_id wandb_run_name: WANDB_PROJECT and WANDB_NAME in the environment
dropout: none, GPT-2 reproductions train without
decay_lr lr_decay_iters: none, --schedule ends at --max-steps
log_interval: none, metrics.jsonl has every step
backend tensorcores flash: none, torch chooses
"""


def answer(argv: list[str]) -> None:
    """Raise UserError with our names for all that has another one in those trainers."""
    rows = [line.split(": ") for line in RENAMED.strip().splitlines()]
    ours = {old.replace("-", "_"): new for names, new in rows for old in names.split()}
    answers = []
    for word in [w for i, w in enumerate(argv) if i == 0 or w.startswith("--")]:  # a preset, or flags
        name = word.removeprefix("--").replace("-", "_")
        if new := ours.get(name) or ours.get(name.partition("=")[0]):
            answers.append(f"\n  {word}: {new}")
    require(not answers, "these have other names here (docs/coming-from.md):" + "".join(answers))


@dataclass(frozen=True)
class Typed:
    """Flags that choose the defaults of the others, so they are read first."""

    resume: str = "none"
    epochs: int | None = None
    max_steps: int | None = None


def switch(word: str) -> str:
    """--compile for --compile=1 or =True, --no-compile for =0 or =False, as other trainers write their switches."""
    found = re.fullmatch(r"--(model\.)?([\w-]+)=(?:(true|1)|false|0)", word, re.I)
    if not found or found[2].replace("-", "_") not in SWITCHES:
        return word
    return f"--{found[1] or ''}{'' if found[3] else 'no-'}{found[2]}"


def parse(argv: list[str], read_saved: Callable[[str], dict]) -> TrainConfig:
    """[PRESET] [--flag value ...] -> TrainConfig. `--resume PATH` without a preset starts from the config saved there
    (read_saved(PATH) returns it), so only the changes need flags."""
    answer(argv)
    name, rest = (argv[0], argv[1:]) if argv and not argv[0].startswith("-") else (None, argv)
    if name is not None and name not in PRESETS:
        close = difflib.get_close_matches(name, PRESETS, 1)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise UserError(f"no preset {name!r}{hint} Presets: {', '.join(PRESETS)}")
    typed, _ = tyro.cli(Typed, args=rest, return_unknown_args=True, add_help=False)
    if name is None and typed.resume not in ("none", "auto"):
        folder = typed.resume if Path(typed.resume).is_dir() else str(Path(typed.resume).parent)
        base = replace(TrainConfig.from_dict(read_saved(typed.resume)), out_dir=folder)
    else:
        base = PRESETS[name or "gpt2-124m"]
    if typed.epochs is not None and typed.max_steps is None:
        base = replace(base, max_steps=0)
    cfg = tyro.cli(
        TrainConfig,
        default=base,
        args=[switch(word) for word in rest],
        prog="train_gpt2.py [PRESET]",
        description=f"Train a GPT. Presets: {', '.join(PRESETS)} (default gpt2-124m), before any flag. "
        "Defaults shown are the preset's.",
    )
    if cfg.tracker == "wandb" and getattr(find_spec("wandb"), "origin", None) is None:  # a folder may have that name
        raise UserError("--tracker wandb needs its package: .venv/bin/pip install wandb")
    return cfg
