"""The presets. Most of them are recipes of other projects.

    cfg = replace(PRESETS["quickstart"], max_steps=50)

train_gpt2.py starts from one of them. To add a preset, add an entry below and follow docs/changing.md.
"""

from dataclasses import replace

from model import GPTConfig
from training.config import TrainConfig


def _gpt2(name: str, n_layer: int, n_head: int, n_embd: int, max_lr: float) -> TrainConfig:
    """A GPT-2 size (Radford et al. 2019) with the learning rate that GPT-3 (Brown et al. 2020, table 2.1) gives a model
    of that size."""
    model = GPTConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=50304)
    return TrainConfig(preset=name, model=model, max_lr=max_lr, min_lr=round(max_lr / 10, 9), max_steps=19_073)


# A network for a laptop. The vocabulary is GPT-2's, so the embedding has most of the parameters.
_small = GPTConfig(block_size=256, vocab_size=50304, n_layer=4, n_head=4, n_embd=128)

# The presets. The text before each preset is its line in the help.
# fmt: off
_DESCRIBED: list[tuple[str, TrainConfig]] = [
    ("build-nanogpt's GPT-2 124M on FineWeb-Edu 10B, the recipe of the lecture", _gpt2("gpt2-124m", 12, 12, 768, 6e-4)),
    ("GPT-2 medium, with GPT-3's rate", _gpt2("gpt2-350m", 24, 16, 1024, 3e-4)),
    ("GPT-2 large, with GPT-3's rate", _gpt2("gpt2-774m", 36, 20, 1280, 2.5e-4)),
    ("GPT-2 XL, with GPT-3's rate", _gpt2("gpt2-1558m", 48, 25, 1600, 2e-4)),
    # The network of DDP-BASEMODEL-TRAIN differs from GPT-2 in more ways: docs/recipes.md
    ("DDP-BASEMODEL-TRAIN's recipe: an untied head, half as many tokens a step", TrainConfig(
        preset="untied-124m",
        model=GPTConfig(vocab_size=50304, tied_head=False),
        total_batch_size=262_144, max_steps=38_146, warmup_steps=700,
        val_every=100, sample_every=1000, save_every=2000,
    )),
    # llm.c's discussion 481.
    ("llm.c's GPT-2 124M on FineWeb", TrainConfig(
        preset="llmc-124m",
        data_dir="data/fineweb", max_steps=19_560,
        warmup_steps=700, min_lr=0.0,
        zero_stage=1,
        sample_every=20_000,
    )),
    # Record 8, November 2024. Unlike this preset, the original keeps float32 weights.
    ("modded-nanogpt's record 8: RoPE, ReLU^2, Muon, bfloat16 weights", TrainConfig(
        preset="record8-124m",
        model=GPTConfig(
            vocab_size=50304, n_head=6, bias=False, tied_head=False, positions="rope", norm="rmsnorm",
            embedding_norm=True, activation="relu2", qk_norm=True, init_std=0.0, zero_init_projections=True,
        ),
        data_dir="data/fineweb", max_steps=4578, val_every=125,
        optimizer="muon", muon_lr=0.02, zero_stage=1,  # like the record, split Muon's work across ranks
        max_lr=0.002, embed_lr_scale=150.0,  # the head's rate, and the embedding's multiple of it
        schedule="trapezoid", warmup_steps=0, cooldown=1308 / 4578, min_lr=0.0,
        weight_decay=0.0, grad_clip=0.0, param_dtype="bfloat16",
    )),
    # The rate is nanoGPT's (finetune_shakespeare). nanoGPT's batch has 32,768 tokens, and a small text has few such
    # batches, so this batch is smaller. The best checkpoint matters here, and it is seldom the last one, so every
    # evaluated step is saved.
    ("OpenAI's GPT-2 on your own text", TrainConfig(
        preset="finetune",
        data_dir="data/my", init_from="gpt2",
        total_batch_size=4096, epochs=4, warmup_steps=0.1, max_lr=3e-5, min_lr=3e-6,
        val_every=20, val_tokens=65_536, hellaswag_every=0, sample_every=100, sample_prompt="@val",
        save_every=20, keep=1,
    )),
    # The loss on one batch, repeated, must collapse.
    ("one batch by heart, to see that a network learns at all", TrainConfig(
        preset="overfit",
        model=_small, data_dir="data/shakespeare", overfit_single_batch=True,
        sequence_length=128, total_batch_size=512, max_steps=200,
        warmup_steps=10, max_lr=3e-3, min_lr=3e-4, weight_decay=0.0,
        val_every=0, hellaswag_every=0, sample_every=0, save_every=0,
    )),
    # Tuned for the lowest loss after 100 seconds on one slow core (bench/RESULTS.md). The head takes nearly all of a
    # step there, so the network is narrow and the batch small.
    ("a tiny GPT-2 in minutes, on a CPU", TrainConfig(
        preset="quickstart",
        model=replace(_small, n_layer=2, n_embd=96), data_dir="data/shakespeare",
        sequence_length=256, total_batch_size=1024, max_steps=160,
        optimizer="muon", muon_lr=0.02, max_lr=0.01, min_lr=0.0, warmup_steps=5, schedule="trapezoid", cooldown=0.5,
        val_every=40, val_tokens=20_480, hellaswag_every=0, save_every=40,
        sample_every=160, sample_prompt="ROMEO:",
    )),
]
# fmt: on

PRESETS = {cfg.preset: cfg for _, cfg in _DESCRIBED}
DESCRIPTIONS = {cfg.preset: description for description, cfg in _DESCRIBED}


def is_network_from_init(cfg: TrainConfig) -> bool:
    """Whether --init-from determines the network: it is given, and no --model flag asks for another one."""
    return cfg.init_from != "scratch" and cfg.preset in PRESETS and cfg.model == PRESETS[cfg.preset].model
