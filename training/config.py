"""The settings of a run: a frozen dataclass owns every default, and the command line is generated from it.

    cfg = TrainConfig(max_steps=100, model=GPTConfig(n_layer=4))
    cfg = replace(cfg, max_lr=1e-3)     # the rules of __post_init__ are checked again

Every module of a run takes its settings from it; training/presets.py has the presets. There are two classes:

    Recipe                what the weights depend on: a resumed run must have the same values
        MayChange[...]    a resumed run may have another value
        LikeASeed[...]    another value changes the result as little as another seed: public runs still compare
    TrainConfig(Recipe)   how a run goes: a resumed run may have another value, but all ranks must have the same
        PerRank[...]      ranks may have different values: paths, what rank 0 alone uses, time-limit
        PerStart[...]     holds for one start: a resumed run does not inherit it

Code that says `cfg: Recipe` depends on nothing else. A new field is a new flag. The comment beside or above it is its
help, in which a comment that stands alone heads a group. A field marked Suppress is set by presets alone, and has no
flag.
"""

import dataclasses
import shlex
from dataclasses import dataclass
from enum import Enum
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from tyro.conf import Suppress

from model import GPTConfig
from system.cli import explain_errors, parse_duration, require

HELLASWAG_DATA = "data/hellaswag/hellaswag_val.jsonl"  # where hellaswag.py puts the rows
GPT2_124M = GPTConfig(vocab_size=50304)  # padded from 50257 to a multiple of 128, for the matmul kernels


class Mark(Enum):
    """What the type of a setting says about it, besides its range; see the table above."""

    LIKE_A_SEED = 1
    MAY_CHANGE = 2
    PER_RANK = 3
    PER_START = 4


class Range(NamedTuple):
    """The least and the greatest value of a number."""

    low: float
    high: float = inf


# Marks and ranges may be combined, as in MayChange[Positive[int]]. A number without a range is not negative.
Value = TypeVar("Value")
LikeASeed = Annotated[Value, Mark.LIKE_A_SEED]
MayChange = Annotated[Value, Mark.MAY_CHANGE]
PerRank = Annotated[Value, Mark.PER_RANK]
PerStart = Annotated[Value, Mark.PER_START]
Positive = Annotated[Value, Range(1)]
Fraction = Annotated[Value, Range(0, 1)]


@dataclass(frozen=True)
class Recipe:
    """What the weights of a run depend on."""

    # The network, and where its first weights come from.

    model: GPTConfig = GPT2_124M
    init_from: MayChange[str] = "scratch"  # scratch, gpt2 (-medium, -large, -xl), a run, .pt or HF folder
    seed: LikeASeed[Annotated[int, Range(0, 2**63 - 1)]] = 1337  # of the weights and the order of the data

    # Data and length of the run. On resume, the fingerprint of the shards is compared.

    # shuffle the shards, and the sequences within a shard or a group of small shards; off: read in order
    shuffle: LikeASeed[bool] = True
    # passes over the data; replaces the preset's max-steps, but none that you type
    epochs: MayChange[Positive[int]] = 1
    steps_per_epoch: Suppress[MayChange[int]] = 0  # optimizer steps counted as one epoch; 0 derives them from the data
    max_steps: MayChange[int] = 0  # total optimizer steps; 0: as many as --epochs takes
    overfit_single_batch: bool = False  # train on the first batch only: its loss must collapse

    # The batch of a step.

    total_batch_size: Positive[int] = 524_288  # tokens per step, over all ranks and micro-steps
    sequence_length: Positive[int] = 1024  # tokens per sequence (T)

    # The learning rate.

    max_lr: float = 6e-4  # peak learning rate
    min_lr: float = 6e-5  # learning rate at the end; rates other than max-lr fall by the same factor
    warmup_steps: int = 715  # steps over which the rate rises linearly to its peak
    # the decay to min-lr: half a cosine, or constant and then linear
    schedule: Literal["cosine", "trapezoid"] = "cosine"
    cooldown: Fraction[float] = 0.2  # fraction of max-steps over which a trapezoid decays

    # The optimizer.

    optimizer: Literal["adamw", "muon"] = "adamw"  # with muon, AdamW updates all but the blocks' matrices
    weight_decay: float = 0.1  # of the matrices and embeddings that AdamW updates
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    muon_lr: float = 0.02  # peak rate of the blocks' matrices with --optimizer muon; max-lr is for the rest
    # precision of the model and its gradients; with bfloat16 the optimizer and checkpoints keep float32 master weights
    weights: LikeASeed[Literal["float32", "bfloat16"]] = "float32"

    # Set by presets alone; all but embed_lr_scale deviate for speedrun-124m only.

    beta1: Suppress[Fraction[float]] = 0.9  # AdamW's decay rate for the average of the gradients
    adam_eps: Suppress[float] = 1e-8  # added to the denominator of AdamW's update
    muon_weight_decay: Suppress[float] = 0.0  # of the blocks' matrices with --optimizer muon
    # Muon's iterations: 5, approximate, or 12, converged
    newton_schulz: Suppress[Literal["fast", "exact"]] = "fast"
    embed_lr_scale: Suppress[float] = 1.0  # multiplies max-lr for the embeddings; untied ones need high rates
    vector_lr_scale: Suppress[float] = 1.0  # multiplies max-lr for biases and gains
    vector_weight_decay: Suppress[float] = 0.0  # of biases and gains


@dataclass(frozen=True)
class TrainConfig(Recipe):
    """Every setting of a run. A period (--*-every) of 0 disables that action; the end is always saved."""

    preset: Suppress[str] = "gpt2-124m"  # the one that this config started from

    # Folders.

    data_dir: PerRank[str] = "data/fineweb-edu"  # folder of token shards
    out_dir: PerRank[str] = ""  # run folder; default log/PRESET

    # Evaluation and saving; a period is in steps.

    val_every: int = 250  # steps between measurements of the validation loss
    val_tokens: int = 10_485_760  # tokens to validate on, from the start of the val split
    hellaswag_every: int = 250  # steps between HellaSwag scores
    hellaswag_data: PerRank[str] = HELLASWAG_DATA  # HellaSwag rows, a .jsonl file
    sample_every: int = 250  # steps between samples
    # text to continue; @val: the first words of the val split
    sample_prompt: PerRank[str] = "Hello, I'm a language model,"
    save_every: int = 250  # steps between checkpoints; 0: only at the end
    keep: int = 2  # newest checkpoints to keep, besides the best by val loss; 0: all

    # Hardware. None of this changes the result beyond rounding.

    device: PerStart[PerRank[str]] = "auto"  # auto, cuda, cuda:1, mps or cpu
    # precision of the matrix products; auto: the fastest that all ranks have
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    # sequences per forward pass of a rank; auto finds what fits in memory
    micro_batch_size: Positive[int | Literal["auto"]] = "auto"
    compile: PerStart[bool] = True  # torch.compile; off: starts at once, but trains slower
    recompute: bool = False  # recompute blocks in the backward pass: less memory, up to 1/3 slower
    zero_stage: Literal[0, 1] = 0  # 1 shards the optimizer state across ranks (ZeRO-1)

    # This start.

    # none, auto (the newest checkpoint of --out-dir), or a run or its model_*.pt
    resume: PerStart[PerRank[str]] = "none"
    allow_drift: PerStart[bool] = False  # resume even if settings that shape the result have changed
    skip_bad_steps: PerStart[int] = 0  # non-finite steps to skip before stopping, counted from each start
    stop_off_track: PerStart[bool] = False  # save and stop after two val losses in a row that no public run had
    time_limit: PerStart[PerRank[str]] = ""  # save and stop after this long, e.g. 3h50m; default: no limit
    # where else the curves go; wandb needs: pip install wandb
    tracker: PerRank[Literal["none", "tensorboard", "wandb"]] = "none"
    gpu_hour_usd: PerStart[PerRank[float]] = 0.0  # price of one GPU-hour, for the cost estimates
    dry_run: PerStart[bool] = False  # print the plan with measured speed, memory, time and cost; then exit
    card: PerStart[str] = ""  # predict the run on these cards, then exit, e.g. 8xH100 or 2080Ti+3090
    eval_only: PerStart[bool] = False  # print val loss and HellaSwag of --resume's or --init-from's weights, then exit

    def __post_init__(self):
        """Raises UserError for the first setting that breaks a rule."""
        check_types(self)
        for name in SETTINGS:
            value = getattr(self, name)
            if isinstance(value, int | float):
                check_range(name, value)
        parse_duration(self.time_limit)
        require(self.init_from != "resume", "--init-from resume, as nanoGPT has it, is --resume auto here")

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

    @property
    def sequences_per_step(self) -> int:
        """How many sequences a step trains on, over all ranks and micro-steps."""
        return self.total_batch_size // self.sequence_length

    def total_steps(self, sequences_per_epoch: int) -> int:
        """Optimizer steps of the whole run, for data with this many training sequences per epoch. Raises UserError if
        the data are less than one step."""
        if self.max_steps:
            return self.max_steps
        if self.steps_per_epoch:
            return self.epochs * self.steps_per_epoch
        steps = self.epochs * sequences_per_epoch // self.sequences_per_step
        data = f"--epochs {self.epochs} of this data ({sequences_per_epoch} sequences)"
        batch = f"--total-batch-size {self.total_batch_size}"
        require(steps, f"{data} is less than one step of {batch}; lower it, or set --max-steps")
        return steps

    def to_dict(self) -> dict[str, Any]:
        """The settings as checkpoints and config.json store them: {field: value}, with the network as a dict of its
        own under "model"."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> "TrainConfig":
        """The config stored in a checkpoint. Fields unknown to this version are dropped, new ones get defaults. Raises
        UserError for values that are not valid here."""
        # `saved` comes from a file, so it may be anything.
        with explain_errors("the config saved in the checkpoint is not valid here", "start a new run with --init-from"):
            values = {name: saved[name] for name in SETTINGS if name in saved}
            values["model"] = GPTConfig.from_dict(saved.get("model", {}))
            return TrainConfig(**values)


# ------------------------------------------------------------------------- what is known about a setting

# {field: its type, with the marks and the range}
SETTINGS = get_type_hints(TrainConfig, include_extras=True)
RECIPE = get_type_hints(Recipe).keys()


def has_mark(name: str, mark: Mark) -> bool:
    """Whether the type of a setting says so. Settings of the network ("model.n_layer") have no marks."""
    return mark in getattr(SETTINGS.get(name), "__metadata__", ())


def shapes_result(name: str) -> bool:
    """Whether a resumed run must have the value that the setting had before."""
    is_recipe = name in RECIPE or name.startswith("model.")
    return is_recipe and not has_mark(name, Mark.MAY_CHANGE)


def flag(name: str) -> str:
    """max_lr -> --max-lr"""
    return f"--{name.replace('_', '-')}"


def as_flag(name: str, value: Any) -> str:
    """The flag that sets a setting to a value: --max-lr 0.001, --no-shuffle, --model.no-bias."""
    if not isinstance(value, bool):
        return f"{flag(name)} {shlex.quote(str(value))}"
    section, dot, last = flag(name).rpartition(".")
    if value:
        return flag(name)
    return f"{section}.no-{last}" if dot else f"--no-{last.removeprefix('--')}"


def check_range(name: str, value: float) -> None:
    """Raise UserError unless a number is in the range of its setting."""
    marks = getattr(SETTINGS[name], "__metadata__", ())
    low, high = next((mark for mark in marks if isinstance(mark, Range)), Range(0))
    rule = f"must be at least {low}" if high == inf else f"must lie between {low} and {high}"
    require(low <= value <= high, f"{flag(name)} {value} {rule}")  # NaN is in no range


def check_types(config: Any) -> None:
    """Raise UserError if a field of a dataclass has a value that its type does not allow. Python does not check that,
    and the value may come from a file."""
    for name, hint in get_type_hints(type(config)).items():
        # The values and the types that are allowed. int: int; Literal["a", "b"]: "a", "b"; int | Literal["auto"]: both
        allowed: list[Any] = []
        for option in get_args(hint) or [hint]:
            allowed += get_args(option) or [option]
        if float in allowed:
            allowed.append(int)

        value = getattr(config, name)
        names = [option.__name__ if isinstance(option, type) else repr(option) for option in allowed]
        is_allowed = value in allowed or type(value) in allowed
        require(is_allowed, f"{name} {value!r:.99} must be {' or '.join(names)}")


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
    return {flag(name): str(value) for name, value in flatten(cfg).items() if not has_mark(name, Mark.PER_RANK)}
