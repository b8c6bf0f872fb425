"""The settings of a run: a frozen dataclass, from which the command line is made.

    cfg = TrainConfig(max_steps=100, model=GPTConfig(n_layer=4))
    cfg = replace(cfg, max_lr=1e-3)     # __post_init__ checks its rules again

training/presets.py has the presets. There are two classes of settings:

    Recipe                settings that a resumed run must not change, because they change the weights
    TrainConfig(Recipe)   settings that it may change; other data or a smaller --max-steps are refused
        per_start=True    a setting for one start of the program: a resumed run does not inherit it

All ranks of a run get the same command, so all settings must be equal on all ranks. A function that takes `cfg: Recipe`
reads no other settings. A new field is a new flag (system/settings.py)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from model import GPTConfig, known_settings
from system.errors import explain_errors, require
from system.facts import NOTED, RESULT, START, Fact, Facts
from system.printing import parse_duration
from system.settings import check_settings, flag, setting, whole_number

HELLASWAG_DATA = "data/hellaswag/hellaswag_val.jsonl"  # where hellaswag.py puts the rows
GPT2_124M = GPTConfig(vocab_size=50304)  # padded from 50257 to a multiple of 128, for the matmul kernels


def number_or_auto(text: str) -> int | str:
    """A whole number, or the word auto."""
    return text if text == "auto" else whole_number(text)


@dataclass(frozen=True)
class Recipe:
    """Settings that change the weights of a run."""

    seed: int = setting(
        1337,
        "of random weights and of the order of the data",
        heading="Random weights and the order of the data",
        high=2**63 - 1,
    )
    # data_dir is not in Recipe: on resume, the fingerprint of the shards is compared instead.
    shuffle: bool = setting(
        True,
        "shuffle the shards, and the sequences within a shard or a group of small shards; off: read in order",
    )
    overfit_single_batch: bool = setting(False, "train on the first batch only: its loss must collapse")

    total_batch_size: int = setting(
        524_288, "tokens per step, over all ranks and micro-steps", heading="The batch of a step", low=1
    )
    sequence_length: int = setting(1024, "tokens per sequence (T)", low=1)

    max_lr: float = setting(6e-4, "peak learning rate", heading="The learning rate")
    min_lr: float = setting(6e-5, "learning rate at the end; the other rates fall by the same factor")
    warmup_steps: float = setting(
        715, "steps over which the rate rises linearly to its peak; below 1: a share of all steps"
    )
    schedule: Literal["cosine", "trapezoid"] = setting(
        "cosine", "the decay to min-lr: half a cosine, or constant and then linear"
    )
    cooldown: float = setting(0.2, "fraction of max-steps over which a trapezoid decays", high=1)

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon: Muon updates the blocks' matrices, and AdamW the rest", heading="The optimizer"
    )
    weight_decay: float = setting(0.1, "of the matrices and embeddings that AdamW updates")
    grad_clip: float = setting(1.0, "largest global gradient norm; 0: no clipping")
    muon_lr: float = setting(0.02, "peak rate of the blocks' matrices with --optimizer muon; max-lr is for the rest")
    embed_lr_scale: float = setting(
        1.0, "multiplies max-lr for the embeddings, including a tied head; an untied embedding needs more than 1"
    )
    param_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "of the parameters and gradients; with bfloat16 the optimizer and checkpoints keep float32 weights",
    )

    model: GPTConfig = dataclasses.field(default=GPT2_124M, metadata={"help": "The network itself"})


@dataclass(frozen=True)
class TrainConfig(Recipe):
    """Every setting of a run. A period (--*-every) of 0 disables that action; the end is always saved."""

    preset: str = setting("gpt2-124m", "the preset that this config is based on", has_flag=False)
    init_from: str = setting(
        "scratch",
        "scratch, gpt2 (-medium, -large, -xl), a run, .pt or HF folder",
        heading="Start and length of the run",
    )
    epochs: int = setting(
        1, "passes over the data; replaces the preset's max-steps, but a --max-steps on the command line wins", low=1
    )
    max_steps: int = setting(0, "total optimizer steps; 0: as many as --epochs takes")

    data_dir: str = setting("data/fineweb-edu", "folder of token shards", heading="Folders")
    out_dir: str = setting("", "run folder; default log/PRESET", per_start=True)

    val_every: int = setting(
        250,
        "steps between measurements of the validation loss",
        heading="Evaluation and saving; a period of 0 turns that thing off, but the end is always saved",
    )
    val_tokens: int = setting(10_485_760, "tokens to validate on, from the start of the val split")
    hellaswag_every: int = setting(250, "steps between HellaSwag scores")
    hellaswag_data: str = setting(HELLASWAG_DATA, "HellaSwag rows, a .jsonl file")
    sample_every: int = setting(250, "steps between samples")
    sample_prompt: str = setting(
        "Hello, I'm a language model,",
        r"text to continue, with a line break: $'...\n...'; @val: the first words of the val split",
    )
    save_every: int = setting(250, "steps between checkpoints; 0: only at the end")
    keep: int = setting(2, "newest checkpoints to keep, besides the best by val loss; 0: all")

    device: str = setting(
        "auto",
        "auto, cuda, cuda:1, mps or cpu",
        heading="Hardware: none of this changes the result beyond rounding",
        per_start=True,
    )
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "precision of the matrix products; auto: the checkpoint's, or else the fastest that all ranks have"
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
    )
    allow_drift: bool = setting(False, "resume even if settings that shape the result have changed", per_start=True)
    stop_off_track: bool = setting(
        False, "save and stop after two val losses in a row outside the range of the public runs", per_start=True
    )
    time_limit: str = setting("", "save and stop after this long, e.g. 3h50m; default: no limit", per_start=True)
    tracker: Literal["none", "tensorboard", "wandb"] = setting(
        "none", "where else the curves go; wandb needs: pip install wandb"
    )
    gpu_hour_usd: float = setting(0.0, "price of one GPU-hour, for the cost estimates", per_start=True)

    def __post_init__(self):
        """Raises UserError for the first setting that breaks a rule."""
        check_settings(self)
        parse_duration(self.time_limit)

        T, tokens = self.sequence_length, self.total_batch_size
        context = self.model.block_size
        require(T <= context, f"--sequence-length {T} exceeds the network's context; use --sequence-length {context}")
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
    def from_dict(saved: dict[str, Any], defaults: dict[str, Any]) -> "TrainConfig":
        """The config stored in a checkpoint, which also stores the defaults of the version that saved it. New settings
        get their defaults. Raises UserError for values that are not valid, and for a setting that this version does not
        know, unless the setting is off."""
        # The saved dict may hold anything.
        fix = "use the version that saved it, or start a new run with --init-from"
        with explain_errors("the saved config is not valid here", fix, ValueError, KeyError, TypeError):
            network = GPTConfig.from_dict(saved["model"], defaults["model"])
            return TrainConfig(**known_settings(TrainConfig, saved | {"model": network}, defaults))


def settings_facts(cfg: TrainConfig) -> Facts:
    """{flag: fact} of every setting, also of the network's: --model.n-layer."""
    facts = {flag(f"model.{name}"): Fact(str(value), RESULT) for name, value in dataclasses.asdict(cfg.model).items()}
    recipe = {field.name for field in dataclasses.fields(Recipe)}
    for field in dataclasses.fields(cfg):
        if field.name == "model":
            continue
        scope = NOTED
        if field.name in recipe:
            scope = RESULT
        elif field.metadata.get("per_start"):
            scope = START
        facts[flag(field.name)] = Fact(str(getattr(cfg, field.name)), scope)
    return facts
