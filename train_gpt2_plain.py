"""Train a GPT-2, plainly: the whole trainer in one file over model.py. Read it after that file, from `train` on.

    python fineweb.py --source shakespeare --out data/shakespeare          # or --source stdlib: this Python's library
    python train_gpt2_plain.py --data-dir data/shakespeare --model.n-layer 4 --model.n-head 4 --model.n-embd 128 \\
        --sequence-length 256 --total-batch-size 4096 --micro-batch-size 8 --max-steps 80 --warmup-steps 10 \\
        --max-lr 3e-3 --min-lr 3e-4 --val-every 40 --val-tokens 65536 --sample-every 80 --dtype float32
    python infer.py log/plain "ROMEO:"                           # also hellaswag.py, plots.py and hub.py open log/plain

    torchrun --standalone --nproc_per_node=8 train_gpt2_plain.py --micro-batch-size 64 --compile     # GPT-2 124M

The defaults are build-nanogpt's recipe for GPT-2 124M, which is the preset gpt2-124m of train_gpt2.py. That program
computes the same, and adds what a long run needs (this one saves every --save-every steps, and goes on with the same
command and --resume auto) and what makes it faster. With --no-shuffle, its losses, gradient norms and weights are those
of this file, up to rounding (tests/test_plain.py).

A step reads micro_steps * B sequences of T tokens on each rank, of which B at a time fit in memory:

    for each micro-batch    tokens (B, T + 1) -> inputs x (B, T) and targets y (B, T)
                            loss = mean cross-entropy of model(x) and y, divided by micro_steps
                            backward: its gradients are added to those of the micro-batches before
    once a step             average the gradients over the ranks, clip their norm, set the rate, update with AdamW
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import GPT, GPTConfig
from system.errors import require
from system.printing import env_rank, print0
from system.process import run_cli
from system.settings import ArgumentParser, add_flags, change, check_settings, setting
from tokens import shards, tokenizer

# GPT-2 has 50,257 tokens. Rows that no token uses pad the vocabulary to a multiple of 128, for the matmul kernels.
GPT2_124M = GPTConfig(vocab_size=50304)


@dataclass(frozen=True)
class Config:
    """The settings, with the names that they have in train_gpt2.py. A period (--*-every) of 0 turns that thing off."""

    data_dir: str = setting("data/fineweb-edu", "folder of token shards, as fineweb.py writes them", heading="Folders")
    out_dir: str = setting("log/plain", "run folder, which must be new")
    resume: Literal["none", "auto"] = setting("none", "auto: go on from the last save in --out-dir, if there is one")

    max_steps: int = setting(19_073, "optimizer steps: one pass over 10 billion tokens", heading="The run")
    total_batch_size: int = setting(524_288, "tokens per step, over all ranks and micro-steps", low=1)
    micro_batch_size: int = setting(16, "sequences per forward pass of a rank (B): as many as fit in memory", low=1)
    sequence_length: int = setting(1024, "tokens per sequence (T)", low=1)
    seed: int = setting(1337, "of the random weights and of the samples")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "precision of the matrix products")
    compile: bool = setting(False, "torch.compile: a long first step, then faster ones")

    max_lr: float = setting(6e-4, "peak learning rate", low=1e-9, heading="The optimizer")
    min_lr: float = setting(6e-5, "learning rate at the end")
    warmup_steps: int = setting(715, "steps over which the rate rises linearly to its peak")
    weight_decay: float = setting(0.1, "of matrices and embeddings")
    grad_clip: float = setting(1.0, "largest global gradient norm; 0: no clipping")

    val_every: int = setting(250, "steps between measurements of the validation loss", heading="Evaluation and saving")
    val_tokens: int = setting(10_485_760, "tokens to validate on, from the start of the val split", low=1)
    sample_every: int = setting(250, "steps between samples")
    sample_prompt: str = setting("Hello, I'm a language model,", "text to continue")
    save_every: int = setting(250, "steps between saves, to resume from; the last one replaces those before")

    model: GPTConfig = field(default=GPT2_124M, metadata={"help": "The network"})

    def __post_init__(self):
        """Raises UserError for a number that is too small."""
        check_settings(self)


# ------------------------------------------------------------------------- data


def sequence_starts(num_tokens: int, T: int) -> range:
    """Where the sequences of a shard begin. Each has T inputs and T targets, which are the inputs shifted by one token:
    T + 1 tokens, of which the last is the first of the next sequence. For 11 tokens and T = 4:

        token          0    1    2    3    4    5    6    7    8    9    10
        sequence 0     |---- inputs ----|
                            |--- targets ----|
        sequence 1                         |---- inputs ----|
                                                |--- targets ----|   two tokens are too few for another sequence
    """
    return range(0, num_tokens - T, T)


def find_enough_shards(cfg: Config, split: str, needed: int) -> list[Path]:
    """The shards of a split ("train" or "val"), in order. Raises UserError if they hold fewer sequences than needed."""
    files = shards.find_shards(cfg.data_dir, split)  # .npy or .bin, by their names
    found = sum(len(sequence_starts(file.tokens, cfg.sequence_length)) for file in files)
    problem = f"the {split} shards in {cfg.data_dir} have {found} sequences, of {needed} that are needed"
    require(found >= needed, f"{problem}; use more text, or a smaller --sequence-length or --val-tokens")
    return [file.path for file in files]


def read_sequences(paths: list[Path], T: int) -> Iterator[np.ndarray]:
    """Yield the sequences (T + 1,) of the shards, one after another, epoch after epoch."""
    while True:
        for path in paths:
            tokens = shards.read_shard(path)  # (num_tokens,) uint16
            for start in sequence_starts(len(tokens), T):
                yield tokens[start : start + T + 1]


def read_batches(
    paths: list[Path], B: int, T: int, rank: int, world_size: int, device: torch.device, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches on its device, from sequence number `first` on: inputs and targets, (B, T) int64
    each."""
    # Blocks of B sequences, dealt out to the ranks in turn. So a step has the same tokens on any number of ranks.
    sequences = islice(read_sequences(paths, T), first, None)
    while True:
        for owner in range(world_size):
            block = list(islice(sequences, B))
            if owner == rank:
                tokens = torch.from_numpy(np.stack(block).astype(np.int64)).to(device)  # (B, T + 1)
                yield tokens[:, :-1], tokens[:, 1:]


# ------------------------------------------------------------------------- optimization


def make_optimizer(model: GPT, cfg: Config) -> torch.optim.Optimizer:
    """AdamW with GPT-3's betas. Matrices and embeddings decay; vectors do not. Each group has its own peak_lr."""
    # Decay pulls a weight toward zero unless the loss holds it, which keeps the many weights of a matrix small. Vectors
    # are biases and the gains of LayerNorm: few, and a gain belongs near 1.
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "peak_lr": cfg.max_lr, "weight_decay": cfg.weight_decay},
        {"params": vectors, "peak_lr": cfg.max_lr, "weight_decay": 0.0},
    ]

    # fused: one kernel updates many parameters. `train` sets the rate at each step.
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of a step: a linear warm-up to max_lr, then half a cosine down to min_lr."""
    # Adam divides by an average that the first gradients alone decide, so begin with small updates. step + 1: the first
    # step learns, too.
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps

    # progress rises from 0 at the end of the warm-up to 1 at the end of the run; the cosine's share falls from 1 to 0.
    progress = (step - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr + share * (cfg.max_lr - cfg.min_lr)


# ------------------------------------------------------------------------- evaluation


def mean_over_ranks(x: Tensor) -> float:
    """The mean of a number over all ranks. Every rank must call it."""
    if dist.is_initialized():
        dist.all_reduce(x)  # the sum: gloo, which ranks on CPUs use, has no mean
        x = x / dist.get_world_size()
    return x.item()


@torch.no_grad()
def validate(forward: Callable, batches: Iterator[tuple[Tensor, Tensor]], autocast: torch.autocast) -> float:
    """The mean loss over these batches, and those of all ranks."""
    losses = []
    for x, y in batches:
        with autocast:
            _, loss = forward(x, y)
        losses.append(loss)
    return mean_over_ranks(torch.stack(losses).mean())


def sample_text(model: GPT, cfg: Config, device: torch.device) -> str:
    """Four continuations of the prompt, one a line."""
    encoding = tokenizer.encoding()
    prompt = torch.tensor([encoding.encode_ordinary(cfg.sample_prompt)] * 4, device=device)  # (4, length)
    generator = torch.Generator(device).manual_seed(cfg.seed)
    rows = model.generate(prompt, 32, generator=generator).tolist()  # (4, length + 32)
    return "\n".join(f"sample {i}: {encoding.decode(row)}" for i, row in enumerate(rows))


# ------------------------------------------------------------------------- the run


def check_start(cfg: Config, tokens_per_pass: int) -> None:
    """Raise UserError if a step or a validation is no whole number of forward passes of all ranks, if the sequences do
    not fit the network, or if the run would be written over another one."""
    rule = f"a multiple of --micro-batch-size x --sequence-length x ranks = {tokens_per_pass} tokens"
    require(cfg.total_batch_size % tokens_per_pass == 0, f"--total-batch-size {cfg.total_batch_size} must be {rule}")
    is_whole = cfg.val_tokens % tokens_per_pass == 0 or not cfg.val_every
    require(is_whole, f"--val-tokens {cfg.val_tokens} must be {rule}")

    T, context = cfg.sequence_length, cfg.model.block_size
    require(T <= context, f"--sequence-length {T} exceeds the network's {context}; use --model.block-size {T}")

    is_new = not any(Path(cfg.out_dir).glob("*"))
    problem = f"--out-dir {cfg.out_dir} is not empty, and a run is never written over another"
    require(is_new or cfg.resume == "auto", f"{problem}: use --resume auto, or --out-dir {cfg.out_dir}-2")


def train(cfg: Config) -> None:
    """The whole run. Raises UserError if it cannot start as asked. Every rank must call it."""
    # torchrun starts this file once for each GPU. Each of these processes, a rank, learns its number from its
    # environment. Without torchrun there is one, rank 0.
    rank = env_rank()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))

    # Half a million tokens do not fit in memory. What the ranks take in one forward pass does, and a step has several.
    B, T = cfg.micro_batch_size, cfg.sequence_length
    tokens_per_pass = B * T * world_size
    check_start(cfg, tokens_per_pass)
    micro_steps = cfg.total_batch_size // tokens_per_pass
    val_steps = cfg.val_tokens // tokens_per_pass

    train_shards = find_enough_shards(cfg, "train", needed=1)
    val_shards = find_enough_shards(cfg, "val", cfg.val_tokens // T) if cfg.val_every else []

    # A GPU if there is one. Autocast computes matrix products in bfloat16, which has half the bits of float32 and the
    # same range. Weights, gradients and the loss stay in float32.
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # TF32, for the products that are left in float32
    elif torch.backends.mps.is_available() and torch.__version__ >= "2.14" and world_size == 1:
        device = torch.device("mps")  # a Mac's; before torch 2.14 some get the head's gradient wrong
    is_bfloat16 = cfg.dtype == "bfloat16" and device.type != "mps"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16)

    # The network. Its weights are drawn on the CPU and then moved, so a seed means the same weights on any device.
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model).to(device)
    optimizer = make_optimizer(model, cfg)

    # Go on from the last save, if there is one. The shards must be those of the start, so they are looked at only here.
    out_dir = Path(cfg.out_dir)
    save_path = out_dir / "save.pt"
    recipe = asdict(cfg) | {"resume": "", "out_dir": "", "data_dir": shards.fingerprint(cfg.data_dir)}
    start_step = load_save(save_path, recipe, model, optimizer)
    network = f"{model.num_params():,} parameters on {device}"
    print0(f"{network}; a step: {micro_steps} micro-batches of {B} x {T} tokens on each of {world_size} ranks")

    # `forward` is the same network as training calls it. DDP gives every rank rank 0's weights, and averages the
    # gradients over the ranks during a backward pass. So all make the same update, and their weights stay equal.
    forward: Any = torch.compile(model) if cfg.compile else model
    if world_size > 1:
        dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
        forward = nn.parallel.DistributedDataParallel(forward)

    # What plots.py and people read about the run. The steps after the save are done again, and so are their lines, of
    # which a kill may have cut the last one off. There is a line for each step.
    if rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        (out_dir / "config.json").write_text(json.dumps(asdict(cfg), indent=2) + "\n")
        metrics = out_dir / "metrics.jsonl"
        metrics.touch()
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:start_step]))

    batches = read_batches(train_shards, B, T, rank, world_size, device, start_step * cfg.total_batch_size // T)
    for step in range(start_step, cfg.max_steps + 1):
        if rank == 0 and cfg.save_every and step % cfg.save_every == 0 and step > start_step:
            save(save_path, recipe, model, optimizer, step)

        # The evaluations come before the update of a step, and once after the last update. eval: without what acts in
        # training only, such as dropout, which GPT-2 124M does without.
        forward.eval()
        is_last = step == cfg.max_steps
        row: dict[str, float] = {"step": step}

        # The loss on text that is never trained on, in nats per token. A network that knows nothing gives all tokens
        # the same probability: ln(50304) = 10.83. Random weights begin a little above: 10.84 at width 128, 10.95 at
        # 768. If a run begins far above, its weights are too large. If it begins below, the network sees its targets,
        # or the text repeats itself, as indented code does.
        if cfg.val_every and (step % cfg.val_every == 0 or is_last):
            val_batches = read_batches(val_shards, B, T, rank, world_size, device)
            row["val_loss"] = validate(forward, islice(val_batches, val_steps), autocast)
            print0(f"step {step:5d}/{cfg.max_steps} | val loss: {row['val_loss']:.4f}")
        if rank == 0 and step > 0 and cfg.sample_every and (step % cfg.sample_every == 0 or is_last):
            print0(sample_text(model, cfg, device))
        if is_last:
            break
        forward.train()

        # Forward and backward. backward() adds to the gradients that are there, so after all micro-batches they are
        # those of the sum of the losses. We want those of the mean over the whole batch. Each loss is the mean of its
        # micro-batch, and all micro-batches have one size: divided by their number, the losses sum to that mean.
        start = time.perf_counter()
        torch.manual_seed(cfg.seed + step * world_size + rank)  # of dropout, the same numbers in a resumed run
        loss_sum = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            # The ranks average the sum, in the last backward pass. Averaging in each pass would give the same, and send
            # every gradient micro_steps times. DDP wants to know before the forward pass.
            if world_size > 1:
                forward.require_backward_grad_sync = micro_step == micro_steps - 1

            # x (B, T) -> logits (B, T, vocabulary) -> with y (B, T) the mean of B * T cross-entropies, a number.
            x, y = next(batches)
            with autocast:
                _, loss = forward(x, y)
            loss = loss / micro_steps
            loss.backward()
            loss_sum += loss.detach()
        loss = mean_over_ranks(loss_sum)

        # The norm of all gradients together. A rare batch has very large ones, which would undo much of what has been
        # learned: scale them down to the norm grad_clip. Their direction stays.
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf).item()

        # The update, at this step's rate: the curve of a group with another peak has the same shape. Then drop the
        # gradients: the next backward() would add to them.
        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr * (group["peak_lr"] / cfg.max_lr)
        optimizer.step()
        optimizer.zero_grad()

        # .item() has waited for the device, where only the update still runs: its time counts toward the next step.
        seconds = time.perf_counter() - start
        speed = cfg.total_batch_size / seconds
        row |= {"train_loss": loss, "lr": lr, "grad_norm": norm, "step_ms": 1e3 * seconds, "tokens_per_second": speed}
        write_row(out_dir, row)
        losses = f"loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f}"
        print0(f"step {step:5d}/{cfg.max_steps} | {losses} | dt: {1e3 * seconds:.2f}ms | tok/sec: {speed:,.0f}")

    # The weights, as infer.py, hellaswag.py, hub.py and --init-from of train_gpt2.py open them (weights/checkpoint.py).
    write_row(out_dir, row)
    if rank == 0:
        path = out_dir / f"model_{cfg.max_steps:05d}.pt"
        content = {"format": 1, "model": dict(model.state_dict()), "config": asdict(cfg.model), "step": cfg.max_steps}
        torch.save(content, path)
        print0(f'done: {path}; next: python plots.py {out_dir}; python infer.py {path} "Once upon a time"')


def save(path: Path, recipe: dict[str, Any], model: GPT, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write all that the run needs to go on at this step. A kill meanwhile leaves the save before."""
    content = {"step": step, "recipe": recipe, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, f"{path}.part")
    os.replace(f"{path}.part", path)


def load_save(path: Path, recipe: dict[str, Any], model: GPT, optimizer: torch.optim.Optimizer) -> int:
    """Go on from the last save, if there is one: returns its step, or 0. Raises UserError if the run began with other
    settings or shards."""
    if not path.exists():
        return 0
    saved = torch.load(path, map_location="cpu")
    changed = [name for name, value in recipe.items() if saved["recipe"].get(name) != value]
    fix = "give the same flags and shards, or another --out-dir"
    require(not changed, f"--resume auto: {', '.join(changed)} not as in {path}; {fix}")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def write_row(out_dir: Path, row: dict[str, float]) -> None:
    """Append a line to metrics.jsonl, which plots.py draws. Only rank 0 writes."""
    if env_rank() == 0:
        with open(out_dir / "metrics.jsonl", "a") as f:
            f.write(json.dumps(row) + "\n")


def make_parser() -> ArgumentParser:
    """The flags, which return what was typed and nothing else."""
    parser = ArgumentParser(__doc__, argument_default=argparse.SUPPRESS)
    add_flags(parser, Config())
    return parser


def main() -> None:
    train(change(Config(), vars(make_parser().parse_args())))

    # Leave the other ranks only now: DDP, which `train` has let go of, may hang if its group ends first.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
