"""The settings of a run: a frozen dataclass owns every default, and the command line is made from it.

    cfg = TrainConfig(max_steps=100, model=GPTConfig(n_layer=4))
    cfg = replace(cfg, max_lr=1e-3)     # the rules of __post_init__ are checked again

Every module of a run takes its settings from it; training/presets.py has the presets. There are two classes:

    Recipe                what the weights depend on: a resumed run must have the same values
        like_a_seed       another value changes the result as little as another seed: public runs still compare
    TrainConfig(Recipe)   how a run goes: a resumed run may have another value, but all ranks must have the same
        per_rank          ranks may have different values: paths, what rank 0 alone uses, time-limit
        per_start         holds for one start: a resumed run does not inherit it

Code that says `cfg: Recipe` depends on nothing else. A new field is a new flag (system/settings.py).
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model import GPTConfig, known_settings
from system.errors import explain_errors, require
from system.printing import parse_duration
from system.settings import check_settings, flag, setting, whole_number

HELLASWAG_DATA = "data/hellaswag/hellaswag_val.jsonl"  # where hellaswag.py puts the rows
GPT2_124M = GPTConfig(vocab_size=50304)  # padded from 50257 to a multiple of 128, for the matmul kernels


def number_or_auto(text: str) -> int | str:
    """A whole number, or the word auto."""
    return text if text == "auto" else whole_number(text)


@dataclass(frozen=True)
class Recipe:
    """What the weights of a run depend on."""

    seed: int = setting(
        1337,
        "of random weights and of the order of the data",
        heading="Random weights and the order of the data",
        high=2**63 - 1,
        like_a_seed=True,
    )
    # On resume, the fingerprint of the shards is compared.
    shuffle: bool = setting(
        True,
        "shuffle the shards, and the sequences within a shard or a group of small shards; off: read in order",
        like_a_seed=True,
    )
    overfit_single_batch: bool = setting(False, "train on the first batch only: its loss must collapse")

    total_batch_size: int = setting(
        524_288, "tokens per step, over all ranks and micro-steps", heading="The batch of a step", low=1
    )
    sequence_length: int = setting(1024, "tokens per sequence (T)", low=1)

    max_lr: float = setting(6e-4, "peak learning rate", heading="The learning rate")
    min_lr: float = setting(6e-5, "learning rate at the end; rates other than max-lr fall by the same factor")
    warmup_steps: float = setting(
        715, "steps over which the rate rises linearly to its peak; below 1: a share of all steps"
    )
    schedule: Literal["cosine", "trapezoid"] = setting(
        "cosine", "the decay to min-lr: half a cosine, or constant and then linear"
    )
    cooldown: float = setting(0.2, "fraction of max-steps over which a trapezoid decays", high=1)

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "with muon, AdamW updates all but the blocks' matrices", heading="The optimizer"
    )
    weight_decay: float = setting(0.1, "of the matrices and embeddings that AdamW updates")
    grad_clip: float = setting(1.0, "largest global gradient norm; 0: no clipping")
    muon_lr: float = setting(0.02, "peak rate of the blocks' matrices with --optimizer muon; max-lr is for the rest")
    embed_lr_scale: float = setting(
        1.0, "multiplies max-lr for the embeddings, of which a tied head is one; untied ones need more", has_flag=False
    )
    param_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "of the parameters and gradients; with bfloat16 the optimizer and checkpoints keep float32 weights",
        like_a_seed=True,
    )

    model: GPTConfig = dataclasses.field(default=GPT2_124M, metadata={"help": "The network itself"})


@dataclass(frozen=True)
class TrainConfig(Recipe):
    """Every setting of a run. A period (--*-every) of 0 disables that action; the end is always saved."""

    preset: str = setting("gpt2-124m", "the one that this config started from", has_flag=False)
    init_from: str = setting(
        "scratch",
        "scratch, gpt2 (-medium, -large, -xl), a run, .pt or HF folder",
        heading="Start and length of the run",
    )
    epochs: int = setting(1, "passes over the data; replaces the preset's max-steps, but none that you type", low=1)
    max_steps: int = setting(0, "total optimizer steps; 0: as many as --epochs takes")

    data_dir: str = setting("data/fineweb-edu", "folder of token shards", heading="Folders", per_rank=True)
    out_dir: str = setting("", "run folder; default log/PRESET", per_rank=True)

    val_every: int = setting(
        250,
        "steps between measurements of the validation loss",
        heading="Evaluation and saving; a period of 0 turns that thing off",
    )
    val_tokens: int = setting(10_485_760, "tokens to validate on, from the start of the val split")
    hellaswag_every: int = setting(250, "steps between HellaSwag scores")
    hellaswag_data: str = setting(HELLASWAG_DATA, "HellaSwag rows, a .jsonl file", per_rank=True)
    sample_every: int = setting(250, "steps between samples")
    sample_prompt: str = setting(
        "Hello, I'm a language model,", "text to continue; @val: the first words of the val split", per_rank=True
    )
    save_every: int = setting(250, "steps between checkpoints; 0: only at the end")
    keep: int = setting(2, "newest checkpoints to keep, besides the best by val loss; 0: all")

    device: str = setting(
        "auto",
        "auto, cuda, cuda:1, mps or cpu",
        heading="Hardware: none of this changes the result beyond rounding",
        per_start=True,
        per_rank=True,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "precision of the matrix products; auto: the fastest that all ranks have"
    )
    micro_batch_size: int | Literal["auto"] = setting(
        "auto", "sequences per forward pass of a rank; auto finds what fits in memory", low=1, parse=number_or_auto
    )
    compile: bool = setting(True, "torch.compile; off: starts at once, but trains slower", per_start=True)
    recompute: bool = setting(False, "recompute blocks in the backward pass: less memory, up to 1/3 slower")
    zero_stage: Literal[0, 1] = setting(0, "1 shards the optimizer state across ranks (ZeRO-1)")

    resume: str = setting(
        "none",
        "none, auto (the newest checkpoint of --out-dir), or a run or its model_*.pt",
        heading="This start",
        per_start=True,
        per_rank=True,
    )
    allow_drift: bool = setting(False, "resume even if settings that shape the result have changed", per_start=True)
    stop_off_track: bool = setting(
        False, "save and stop after two val losses in a row that no public run had", per_start=True
    )
    time_limit: str = setting(
        "", "save and stop after this long, e.g. 3h50m; default: no limit", per_start=True, per_rank=True
    )
    tracker: Literal["none", "tensorboard", "wandb"] = setting(
        "none", "where else the curves go; wandb needs: pip install wandb", per_rank=True
    )
    gpu_hour_usd: float = setting(0.0, "price of one GPU-hour, for the cost estimates", per_start=True, per_rank=True)

    def __post_init__(self):
        """Raises UserError for the first setting that breaks a rule."""
        check_settings(self)
        parse_duration(self.time_limit)

        # The rules between settings.
        T, tokens = self.sequence_length, self.total_batch_size
        context = self.model.block_size
        fix = f"use --sequence-length {context}"
        require(T <= context, f"--sequence-length {T} exceeds the network's context, {context} tokens; {fix}")
        fix = f"use --total-batch-size {max(1, round(tokens / T)) * T}"
        require(tokens % T == 0, f"--total-batch-size {tokens} is not a whole number of sequences of {T} tokens; {fix}")
        is_enough = self.val_tokens >= T or not self.val_every
        require(is_enough, f"--val-tokens {self.val_tokens} is less than one sequence of {T}")
        require(self.min_lr <= self.max_lr, f"--min-lr {self.min_lr} exceeds --max-lr {self.max_lr}")

    @property
    def run_dir(self) -> Path:
        """The folder of the run: checkpoints, metrics.jsonl, config.json, logs."""
        return Path(self.out_dir or f"log/{self.preset}")

    def to_dict(self) -> dict[str, Any]:
        """The settings as checkpoints and config.json store them: {field: value}, with the network as a dict of its
        own under "model"."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> "TrainConfig":
        """The config stored in a checkpoint; new settings get defaults. Raises UserError for what is not valid here,
        and for a setting that this version does not know, unless it is off."""
        problem = "the config saved in the checkpoint is not valid here"
        fix = "use the version that saved it, or start a new run with --init-from"
        with explain_errors(problem, fix, ValueError, KeyError, TypeError):  # of whatever was saved
            network = GPTConfig.from_dict(saved["model"])
            return TrainConfig(**known_settings(TrainConfig, saved | {"model": network}))


# ------------------------------------------------------------------------- what is known about a setting

MARKS = {field.name: field.metadata for field in dataclasses.fields(TrainConfig)}
RECIPE = {field.name for field in dataclasses.fields(Recipe)}


def has_mark(name: str, mark: str) -> bool:
    """Whether a setting is marked so: like_a_seed, per_rank or per_start. Settings of the network
    ("model.n_layer") have no marks."""
    return mark in MARKS.get(name, {})


def shapes_result(name: str) -> bool:
    """Whether a resumed run must have the value that the setting had before."""
    return name in RECIPE or name.startswith("model.")


def flatten(cfg: TrainConfig) -> dict[str, Any]:
    """{name: value} of every setting; those of the network are called "model.n_layer"."""
    values = cfg.to_dict()
    network = values.pop("model")
    return {f"model.{name}": value for name, value in network.items()} | values


def changed_settings(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """{name: (old value, new value)} of the settings that differ."""
    after = flatten(new)
    return {name: (value, after[name]) for name, value in flatten(old).items() if value != after[name]}


def settings_by_flag(cfg: TrainConfig) -> dict[str, str]:
    """The settings that all ranks must have been started with, by flag."""
    return {flag(name): str(value) for name, value in flatten(cfg).items() if not has_mark(name, "per_rank")}
