"""The settings of a run: one frozen dataclass owns every default, and the command line is generated from it.

    cfg = TrainConfig(max_steps=100, model=GPTConfig(n_layer=4))
    cfg = replace(cfg, max_lr=1e-3)     # the rules of __post_init__ are checked again

Every module of a run takes its settings from it. training/presets.py has the presets and parses the command line.

A new field is a new flag, and the comment beside or above it is its help text. The field's type says what else there is
to know. A setting that says nothing shapes the result, and a number is not negative:

    type          shapes the result       may change on resume    may differ between ranks
    float         yes                     no                      no
    Noise[...]    as another seed does    no                      no
    Free[...]     no, or as announced     yes                     no
    Local[...]    no                      yes                     yes: paths, what rank 0 uses, what the ranks vote on
"""

import dataclasses
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

from tyro.conf import Suppress

from model import GPTConfig
from system.cli import explain_errors, parse_duration, require

HELLASWAG_DATA = "data/hellaswag/hellaswag_val.jsonl"  # where hellaswag.py puts the rows
GPT2_124M = GPTConfig(vocab_size=50304)  # padded from 50257 to a multiple of 128, for the matmul kernels


@dataclass(frozen=True)
class Rule:
    """What is known about a setting: its kind (see above) and, for a number, its range."""

    kind: str = "recipe"
    low: float = 0
    high: float = inf


T = TypeVar("T")
Noise = Annotated[T, Rule("noise")]
Free = Annotated[T, Rule("free")]
Local = Annotated[T, Rule("local")]
Positive = Annotated[T, Rule(low=1)]
Fraction = Annotated[T, Rule(high=1)]


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on. A period (--*-every) of 0 disables that action; the end is always saved."""

    # The recipe it started from, and the network.

    preset: Suppress[Free[str]] = "gpt2-124m"
    model: GPTConfig = GPT2_124M

    # Data and length of the run. On resume, the fingerprint of the shards is compared instead of their folder.

    data_dir: Local[str] = "data/fineweb-edu"  # folder of token shards
    out_dir: Local[str] = ""  # run folder; default log/PRESET
    seed: Annotated[int, Rule("noise", high=2**63 - 1)] = 1337  # of the weights and the order of the data
    # shuffle the shards, and the sequences within a shard or a group of small shards; off: read in order
    shuffle: Noise[bool] = True
    epochs: Annotated[int, Rule("free", low=1)] = 1  # passes over the data; overrides the preset's max-steps
    steps_per_epoch: Free[int] = 0  # optimizer steps counted as one epoch; 0 derives them from the data
    max_steps: Free[int] = 0  # total optimizer steps; 0: epochs * steps-per-epoch

    # The batch of a step, and how it is split. micro_batch_size does not change the result beyond rounding.

    total_batch_size: Positive[int] = 524_288  # tokens per step, over all ranks and micro-steps
    # sequences per forward pass of a rank; auto finds what fits in memory
    micro_batch_size: Annotated[int | Literal["auto"], Rule("free", low=1)] = "auto"
    sequence_length: Positive[int] = 1024  # tokens per sequence (T)

    # Schedule and optimizer.

    max_lr: float = 6e-4  # peak learning rate
    min_lr: float = 6e-5  # learning rate at the end of the schedule
    warmup_steps: int = 715  # steps over which the rate rises linearly to its peak
    # the decay to min-lr: half a cosine, or constant and then linear
    schedule: Literal["cosine", "trapezoid"] = "cosine"
    cooldown: Fraction[float] = 0.2  # fraction of max-steps over which a trapezoid decays
    weight_decay: float = 0.1  # of the matrices and embeddings that AdamW updates
    vector_weight_decay: float = 0.0  # of biases and gains
    grad_clip: float = 1.0  # largest global gradient norm; 0: no clipping
    optimizer: Literal["adamw", "muon"] = "adamw"  # with muon, AdamW updates all but the blocks' matrices
    beta1: Fraction[float] = 0.9  # AdamW's decay rate for the average of the gradients
    beta2: Fraction[float] = 0.95  # AdamW's decay rate for the average of the squared gradients
    adam_eps: float = 1e-8  # added to the denominator of AdamW's update
    muon_lr: float = 0.02  # peak rate of the blocks' matrices with --optimizer muon; max-lr is for the rest
    muon_weight_decay: float = 0.0  # of the blocks' matrices with --optimizer muon
    muon_momentum: Fraction[float] = 0.95  # Muon's decay rate for the average of the gradients
    newton_schulz: Literal["fast", "exact"] = "fast"  # Muon's iterations: 5, approximate, or 12, converged
    embed_lr_scale: float = 1.0  # multiplies max-lr for the embeddings; untied ones need high rates
    vector_lr_scale: float = 1.0  # multiplies max-lr for biases and gains

    # Evaluation and saving; a period is in steps.

    val_every: Free[int] = 250  # steps between measurements of the validation loss
    val_tokens: Free[int] = 10_485_760  # tokens to validate on, from the start of the val split
    hellaswag_every: Free[int] = 250  # steps between HellaSwag scores
    hellaswag_data: Local[str] = HELLASWAG_DATA  # HellaSwag rows, a .jsonl file
    sample_every: Free[int] = 250  # steps between samples
    # text to continue; @val: the first words of the val split
    sample_prompt: Local[str] = "Hello, I'm a language model,"
    save_every: Free[int] = 5000  # steps between checkpoints; 0: only at the end
    keep: Free[int] = 0  # newest checkpoints to keep, besides the best by val loss; 0: all

    # What the run starts from.

    resume: Local[str] = "none"  # none, auto (the run folder's newest checkpoint) or a model_*.pt
    allow_drift: Free[bool] = False  # resume even if settings that shape the result have changed
    init_from: Free[str] = "scratch"  # scratch, gpt2 (-medium, -large, -xl), a run, .pt or HF folder

    # Hardware. None of this changes the result beyond rounding, except `weights`.

    device: Local[str] = "auto"  # auto, cuda, cuda:1, mps or cpu
    # precision of the matrix products; auto: the fastest that all ranks have
    dtype: Free[Literal["auto", "bfloat16", "float16", "float32"]] = "auto"
    # of the model and its gradients; with bfloat16 the optimizer and the checkpoints keep float32 master weights
    weights: Noise[Literal["float32", "bfloat16"]] = "float32"
    deterministic: Free[bool] = False  # make GPU runs bit-identical too, slower; CPU runs always are
    compile: Free[bool] = True  # torch.compile; off: starts at once, but trains slower
    recompute: Free[bool] = False  # recompute blocks in the backward pass: less memory, up to 1/3 slower
    zero_stage: Free[Literal[0, 1]] = 0  # 1 shards the optimizer state across ranks (ZeRO-1)

    # Everything else.

    # where else the curves go; wandb needs: pip install wandb
    tracker: Local[Literal["none", "tensorboard", "wandb"]] = "none"
    time_limit: Local[str] = ""  # save and stop after this long, e.g. 3h50m; default: no limit
    skip_bad_steps: Free[int] = 0  # non-finite steps to skip before stopping, counted from each start
    gpu_hour_usd: Local[float] = 0.0  # price of one GPU-hour, for the cost estimates
    dry_run: Free[bool] = False  # print the plan with measured speed, memory, time and cost; then exit
    card: Free[str] = ""  # predict the run on these cards, then exit, e.g. 8xH100 or 2080Ti+3090
    eval_only: Free[bool] = False  # print val loss and HellaSwag of the weights of --init-from, then exit
    overfit_single_batch: bool = False  # train on the first batch only: its loss must collapse

    def __post_init__(self):
        """Raises UserError for the first setting that breaks a rule."""
        check_types(self)
        for name, rule in RULES.items():
            value = getattr(self, name)
            if isinstance(value, int | float):
                is_in_range = rule.low <= value <= rule.high  # NaN is in none
                require(is_in_range, f"{flag(name)} {value} must lie between {rule.low} and {rule.high}")
        parse_duration(self.time_limit)

        # The rules between settings.
        T, tokens = self.sequence_length, self.total_batch_size
        context = self.model.block_size
        fix = f"use --sequence-length {context}"
        require(T <= context, f"--sequence-length {T} exceeds the network's context, {context} tokens; {fix}")
        fix = f"use --total-batch-size {max(1, round(tokens / T)) * T}"
        require(tokens % T == 0, f"--total-batch-size {tokens} is not a whole number of sequences of {T} tokens; {fix}")
        require(self.val_tokens >= T, f"--val-tokens {self.val_tokens} is less than one sequence of {T}")
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
            values = {name: saved[name] for name in RULES if name in saved}
            values["model"] = GPTConfig.from_dict(saved.get("model", {}))
            return TrainConfig(**values)


# {field: its Rule}
RULES = {
    name: getattr(hint, "__metadata__", [Rule()])[0]
    for name, hint in get_type_hints(TrainConfig, include_extras=True).items()
}


def flag(name: str) -> str:
    """max_lr -> --max-lr"""
    return f"--{name.replace('_', '-')}"


def check_types(config: Any) -> None:
    """Raise UserError if a field of a dataclass has a value that its type does not allow. Python does not check that,
    and the value may come from a file."""
    for name, hint in get_type_hints(type(config)).items():
        # int: [int]; Literal["a", "b"]: ["a", "b"]; int | Literal["auto"]: [int, "auto"]
        allowed = [leaf for option in get_args(hint) or [hint] for leaf in get_args(option) or [option]]
        if float in allowed:
            allowed.append(int)
        value = getattr(config, name)
        require(value in allowed or type(value) in allowed, f"{name} {value!r:.99} must be one of {allowed}")


def flatten(cfg: TrainConfig) -> dict[str, Any]:
    """{name: value} of every setting; those of the network are called "model.n_layer"."""
    values = cfg.to_dict()
    network = values.pop("model")
    return {f"model.{name}": value for name, value in network.items()} | values


def kind_of(name: str) -> str:
    """The kind of a setting of `flatten`: recipe, noise, free or local."""
    return RULES.get(name, Rule()).kind


def config_drift(old: TrainConfig, new: TrainConfig) -> tuple[list[str], list[str]]:
    """Differences between a checkpoint's config and this run's, each "field: old -> new": those that may change, and
    those that shape the result."""
    harmless: list[str] = []
    refused: list[str] = []
    after = flatten(new)
    for name, value in flatten(old).items():
        if value != after[name]:
            changes = harmless if kind_of(name) in ("free", "local") else refused
            changes.append(f"{name}: {value} -> {after[name]}")
    return harmless, refused


def settings_by_flag(cfg: TrainConfig) -> dict[str, str]:
    """The settings that all ranks must have been started with, by flag."""
    return {flag(name): str(value) for name, value in flatten(cfg).items() if kind_of(name) != "local"}
