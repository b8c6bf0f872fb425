"""The settings of a run: one frozen dataclass owns every default, and the command line is generated from it.

    cfg = TrainConfig(max_steps=100, model=GPTConfig(n_layer=4))
    cfg = replace(cfg, max_lr=1e-3)     # the rules of __post_init__ are checked again

Every module of a run takes its settings from it. training/presets.py holds the presets and parses the command line. A
field's docstring is its help text. Adding a field adds a flag: give it a place in training/help.py, and decide below
whether it may change on resume.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from model import GPTConfig
from system.cli import UserError, parse_duration, require

# Settings that may change on resume: training continues as before, or reports how its schedule changes. All others
# shape the result and need --allow-drift.
MAY_CHANGE = frozenset("""
preset data_dir out_dir epochs steps_per_epoch max_steps micro_batch_size val_every val_tokens hellaswag_every
hellaswag_data sample_every sample_prompt save_every keep resume allow_drift init_from device dtype
deterministic compile recompute zero_stage tracker time_limit skip_bad_steps gpu_hour_usd dry_run card eval_only
""".split())  # fmt: skip

# Settings that may differ between the machines of one run: paths, settings that only rank 0 uses, and settings that the
# ranks vote on. All others must be equal on all ranks. training/resume.py compares the files that the paths name.
MAY_DIFFER = frozenset("""
data_dir out_dir hellaswag_data init_from resume device sample_prompt tracker time_limit gpu_hour_usd
""".split())  # fmt: skip

# Settings of earlier versions that shaped the result and no longer exist, with the value that means "off". A checkpoint
# with another value is refused. Other unknown settings are ignored.
REMOVED = {"muon_momentum_warmup": 0}

GPT2_124M = GPTConfig(vocab_size=50304)  # padded from 50257 to a multiple of 128, for the matmul kernels


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on. A period (--*-every) of 0 disables that action; the end is always saved."""

    # The recipe it started from, and the network.

    preset: Annotated[str, tyro.conf.Suppress] = "gpt2-124m"
    model: GPTConfig = GPT2_124M

    # Data and length of the run.

    data_dir: str = "data/fineweb-edu"  # may change on resume, which compares the shards' fingerprint
    """Folder of token shards, or hf://OWNER/NAME to pull them first."""
    out_dir: str = ""
    """Run folder; default log/PRESET."""
    seed: int = 1337
    """Seeds the weights and the order of the data."""
    shuffle: bool = True
    """Shuffle the shards, and the sequences within a shard or a group of small shards; off: read in order."""
    epochs: int = 1
    """Passes over the data; overrides the preset's max-steps."""
    steps_per_epoch: int = 0
    """Optimizer steps counted as one epoch; 0 derives them from the data."""
    max_steps: int = 0
    """Total optimizer steps; 0: epochs * steps-per-epoch."""

    # The batch of a step, and how it is split. micro_batch_size does not change the result beyond rounding.

    total_batch_size: int = 524_288
    """Tokens per step, over all ranks and micro-steps."""
    micro_batch_size: int | Literal["auto"] = "auto"
    """Sequences per forward pass of a rank; auto finds what fits in memory."""
    sequence_length: int = 1024
    """Tokens per sequence (T)."""

    # Schedule and optimizer.

    max_lr: float = 6e-4
    """Peak learning rate."""
    min_lr: float = 6e-5
    """Learning rate at the end of the schedule."""
    warmup_steps: int = 715
    """Steps over which the rate rises linearly to its peak."""
    schedule: Literal["cosine", "trapezoid"] = "cosine"
    """The decay to min-lr: half a cosine, or constant and then linear."""
    cooldown: float = 0.2
    """Fraction of max-steps over which the trapezoid decays; others do not use it."""
    weight_decay: float = 0.1
    """Weight decay of the matrices and embeddings that AdamW updates."""
    vector_weight_decay: float = 0.0
    """Weight decay of biases and gains."""
    grad_clip: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """With muon, AdamW updates all but the blocks' matrices."""
    beta1: float = 0.9
    """AdamW's decay rate for the average of the gradients."""
    beta2: float = 0.95
    """AdamW's decay rate for the average of the squared gradients."""
    adam_eps: float = 1e-8
    """Added to the denominator of AdamW's update."""
    muon_lr: float = 0.02
    """Peak rate of the blocks' matrices with --optimizer muon; max-lr is for the rest."""
    muon_weight_decay: float = 0.0
    """Weight decay of the blocks' matrices with --optimizer muon."""
    muon_momentum: float = 0.95
    """Muon's decay rate for the average of the gradients."""
    newton_schulz: Literal["fast", "exact"] = "fast"
    """Muon's iterations. fast: 5, approximate; exact: 12, converged."""
    embed_lr_scale: float = 1.0
    """Multiplies max-lr for the embeddings; untied ones need high rates."""
    vector_lr_scale: float = 1.0
    """Multiplies max-lr for biases and gains."""

    # Evaluation and saving; a period is in steps.

    val_every: int = 250
    """Steps between measurements of the validation loss."""
    val_tokens: int = 10_485_760
    """Tokens to validate on, from the start of the val split."""
    hellaswag_every: int = 250
    """Steps between HellaSwag scores."""
    hellaswag_data: str = ""
    """HellaSwag rows (.jsonl); default is where `python hellaswag.py` puts them."""
    sample_every: int = 250
    """Steps between samples."""
    sample_prompt: str = "Hello, I'm a language model,"
    """Text to continue; @val: the first words of the val split."""
    save_every: int = 5000
    """Steps between checkpoints; 0: only at the end."""
    keep: int = 0
    """Newest checkpoints to keep, besides the best by val loss; 0: all."""

    # What the run starts from.

    resume: str = "none"
    """none, auto (the run folder's newest checkpoint) or a model_*.pt."""
    allow_drift: bool = False
    """Resume even if settings that shape the result have changed."""
    init_from: str = "scratch"
    """scratch, gpt2 (-medium, -large, -xl), a run, .pt or HF folder."""

    # Hardware. None of this changes the result beyond rounding, except `weights`.

    device: str = "auto"
    """auto, cuda, cuda:1, mps or cpu."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the matrix products; auto: the fastest that all ranks have."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Of the model and its gradients. With bfloat16, the optimizer keeps float32 master weights, and checkpoints store
    these."""
    deterministic: bool = False
    """Make GPU runs bit-identical too, at some cost in speed; CPU runs always are."""
    compile: bool = True
    """torch.compile; off: starts at once, but trains slower."""
    recompute: bool = False
    """Recompute blocks in the backward pass: less memory, up to 1/3 slower."""
    zero_stage: Literal[0, 1] = 0
    """1 shards the optimizer state across ranks (ZeRO-1)."""

    # Everything else.

    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Where else the curves go; wandb needs: pip install wandb."""
    time_limit: str = ""
    """Save and stop after this long, e.g. 3h50m; 0: no limit."""
    skip_bad_steps: int = 0
    """Non-finite steps to skip before stopping, counted from each start."""
    gpu_hour_usd: float = 0.0
    """Price of one GPU-hour, for the cost estimates."""
    dry_run: bool = False
    """Print the plan with measured speed, memory, time and cost; then exit."""
    card: str = ""
    """With --dry-run: predict the run on other cards, e.g. 8xH100, A100-40GB or 2080Ti+3090."""
    eval_only: bool = False
    """Print val loss and HellaSwag of the weights of --init-from, then exit."""
    overfit_single_batch: bool = False
    """Train on the first batch only: its loss must collapse."""

    def __post_init__(self):
        """Raises UserError for the first setting that breaks a rule, or ValueError for a value outside its Literal."""
        # The other rules divide by this one.
        T, tokens, B = self.sequence_length, self.total_batch_size, self.micro_batch_size
        require(T >= 1, f"--sequence-length {T} must be at least 1")
        nearest_batch = max(1, round(tokens / T)) * T  # what the message suggests

        # (field, whether its rule holds, the rule). The order counts: the first rule that is broken is reported.
        rules = [
            ("sequence_length", T <= self.model.block_size, f"exceeds the model's context: add --model.block-size {T}"),
            ("total_batch_size", tokens >= T and tokens % T == 0,
             f"is not a whole number of sequences of {T} tokens; use --total-batch-size {nearest_batch}"),
            ("micro_batch_size", B == "auto" or B >= 1, "must be at least 1, or auto"),
            ("cooldown", 0 <= self.cooldown <= 1, "must be a fraction of the steps, between 0 and 1"),
            ("min_lr", self.max_lr >= self.min_lr >= 0, f"must lie between 0 and --max-lr {self.max_lr}"),
            ("epochs", self.epochs >= 1, "must be at least 1"),
            ("card", self.dry_run or not self.card, "only predicts a run, it does not train: add --dry-run"),
            ("val_tokens", self.val_tokens >= T, f"is less than one sequence of {T}"),
        ]  # fmt: skip

        # Rules that many fields share.
        not_negative = """
            max_steps steps_per_epoch warmup_steps val_every hellaswag_every sample_every save_every keep grad_clip
            skip_bad_steps weight_decay vector_weight_decay muon_lr muon_weight_decay adam_eps embed_lr_scale
            vector_lr_scale gpu_hour_usd
        """.split()
        rules += [(name, getattr(self, name) >= 0, "must not be negative") for name in not_negative]
        for name in ("beta1", "beta2", "muon_momentum"):
            rules.append((name, 0 <= getattr(self, name) < 1, "must be at least 0 and below 1"))

        # "--cooldown 2.0 must be a fraction of the steps, between 0 and 1"
        for name, holds, rule in rules:
            require(holds, f"--{name.replace('_', '-')} {getattr(self, name)} {rule}")

        # A config saved by another version may name a choice that does not exist here.
        check_choices(self)
        check_choices(self.model)
        parse_duration(self.time_limit)

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
        # max_steps wins, then steps_per_epoch, then the size of the data.
        if self.max_steps:
            return self.max_steps
        if self.steps_per_epoch:
            return self.epochs * self.steps_per_epoch
        steps = self.epochs * sequences_per_epoch // self.sequences_per_step
        if steps > 0:
            return steps

        # Too little data for a single step.
        data = f"--epochs {self.epochs} of this data ({sequences_per_epoch} sequences of {self.sequence_length} tokens)"
        batch = f"one step of --total-batch-size {self.total_batch_size}"
        raise UserError(f"{data} is less than {batch}; lower it, or set --max-steps")

    def to_dict(self) -> dict[str, Any]:
        """The settings as checkpoints and config.json store them: {field: value}, with the network as a dict of its
        own under "model"."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> TrainConfig:
        """The config stored in a checkpoint. Fields unknown to this version are dropped, new ones get defaults. Raises
        UserError for values that are not valid here."""
        # Old checkpoints lack new fields, and have some that were removed.
        known = {f.name for f in dataclasses.fields(TrainConfig)}
        values = {k: v for k, v in saved.items() if k in known}

        # `saved` comes from a file, so its values may be anything.
        try:
            for name, off in REMOVED.items():
                require(saved.get(name, off) == off, f"{name} no longer exists: use the version that saved it")
            return TrainConfig(**{**values, "model": GPTConfig.from_dict(saved.get("model", {}))})
        except (UserError, ValueError, TypeError, AttributeError) as e:
            raise UserError(f"the config saved in the checkpoint is not valid here: {e!s:.300}") from None


def check_choices(config: object) -> None:
    """Raise ValueError if a field of a dataclass has a value that is not in its Literal. The type says what is allowed,
    but nothing checks it for values that come from a file."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            choices = ", ".join(map(str, get_args(hint)))
            raise ValueError(f"{name} {getattr(config, name)!r} must be one of {choices}")


def config_drift(old: TrainConfig, new: TrainConfig) -> tuple[list[str], list[str]]:
    """Differences between a checkpoint's config and this run's, each "field: old -> new": those that may change, and
    those that shape the result."""
    harmless: list[str] = []
    refused: list[str] = []

    # The network, field by field, so that the message names what differs.
    for field in dataclasses.fields(GPTConfig):
        old_value, new_value = getattr(old.model, field.name), getattr(new.model, field.name)
        if old_value != new_value:
            refused.append(f"model.{field.name}: {old_value} -> {new_value}")

    # All other settings.
    for field in dataclasses.fields(TrainConfig):
        old_value, new_value = getattr(old, field.name), getattr(new, field.name)
        if field.name != "model" and old_value != new_value:
            changes = harmless if field.name in MAY_CHANGE else refused
            changes.append(f"{field.name}: {old_value} -> {new_value}")
    return harmless, refused
