"""Train a GPT-2, plainly: the whole trainer in one file, on top of model.py. Start reading at `train`.

    python fineweb.py --source shakespeare --out data/shakespeare      # or --source stdlib: Python's own library
    python train_gpt2_plain.py --data-dir data/shakespeare --model.n-layer 4 --model.n-head 4 --model.n-embd 128 \\
        --sequence-length 256 --total-batch-size 4096 --micro-batch-size 8 --max-steps 80 --warmup-steps 10 \\
        --max-lr 3e-3 --min-lr 3e-4 --val-every 40 --val-tokens 65536 --dtype float32
    python infer.py log/plain "ROMEO:"                       # hellaswag.py, plots.py and hub.py open log/plain, too

    torchrun --standalone --nproc_per_node=8 train_gpt2_plain.py --micro-batch-size 64 --compile     # GPT-2 124M

The defaults are build-nanogpt's recipe for GPT-2 124M, which is the preset gpt2-124m of train_gpt2.py. That program
adds checkpoints, samples and speed. With --no-shuffle, its losses, gradient norms and weights equal the ones of this
file up to rounding (tests/test_plain.py). On each rank, a step reads micro_steps * B sequences of T tokens:

    for each micro-batch    tokens (B, T + 1) -> inputs x (B, T) and targets y (B, T)
                            loss = mean cross-entropy of model(x) against y, divided by micro_steps
                            backward: add the gradients of this loss to those of the previous micro-batches
    once a step             average the gradients over the ranks, clip their norm, set the rate, update with AdamW
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Literal

import system  # noqa: F401  # first

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import GPT, GPTConfig
from system.errors import require
from system.machine import choose_device
from system.printing import env_number, print0
from system.process import run_cli
from system.settings import ArgumentParser, add_flags, change, check_settings, setting
from tokens import shards


@dataclass(frozen=True)
class Config:
    """The settings. Each has the same name in train_gpt2.py."""

    data_dir: str = setting("data/fineweb-edu", "folder of token shards, as fineweb.py writes them")
    out_dir: str = setting("log/plain", "run folder, which must be new or empty")
    max_steps: int = setting(19_073, "optimizer steps: one pass over 10 billion tokens")
    total_batch_size: int = setting(524_288, "tokens per step, over all ranks and micro-steps", low=1)
    micro_batch_size: int = setting(16, "sequences per forward pass of a rank (B): as many as fit in memory", low=1)
    sequence_length: int = setting(1024, "tokens per sequence (T)", low=1)
    seed: int = setting(1337, "seed of the random weights")
    dtype: Literal["bfloat16", "float32"] = setting("bfloat16", "precision of the matrix products")
    compile: bool = setting(False, "torch.compile: a long first step, then faster ones")
    max_lr: float = setting(6e-4, "peak learning rate", low=1e-9)
    min_lr: float = setting(6e-5, "learning rate at the end")
    warmup_steps: int = setting(715, "steps over which the rate rises linearly to its peak")
    weight_decay: float = setting(0.1, "weight decay of matrices and embeddings")
    grad_clip: float = setting(1.0, "largest global gradient norm; 0: no clipping")
    val_every: int = setting(250, "steps between validations; 0: none")
    val_tokens: int = setting(10_485_760, "tokens to validate on, from the start of the val split", low=1)
    # GPT-2 has 50,257 tokens. Unused rows pad the vocabulary to a multiple of 128, which suits the matmul kernels.
    model: GPTConfig = field(default=GPTConfig(vocab_size=50304), metadata={"help": "The network"})


def find_sequences(cfg: Config, split: str, needed: int) -> list[tuple[Path, range]]:
    """Each shard of a split ("train" or "val") that has a sequence, and the tokens at which its sequences begin. Raises
    UserError if the split has fewer sequences than needed.

    A sequence has T inputs and T targets. The targets are the inputs shifted by one token, so a sequence spans T + 1
    tokens, and its last token is the first token of the next sequence. For a shard of 11 tokens and T = 4:

        token          0    1    2    3    4    5    6    7    8    9    10
        sequence 0     |---- inputs ----|
                            |--- targets ----|
        sequence 1                         |---- inputs ----|
                                                |--- targets ----|   two tokens are too few for another sequence
    """
    T = cfg.sequence_length
    files = shards.find_shards(cfg.data_dir, split)
    found = [(file.path, range(0, file.tokens - T, T)) for file in files if file.tokens > T]
    count = sum(len(starts) for _, starts in found)
    problem = f"the {split} shards in {cfg.data_dir} have {count} sequences, but the run needs {needed}"
    require(count >= needed, f"{problem}; use more text, or a smaller --sequence-length or --val-tokens")
    return found


def read_batches(
    found: list[tuple[Path, range]], cfg: Config, rank: int, world_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's micro-batches on its device, epoch after epoch: inputs and targets, (B, T) int64 each."""
    # Collect B sequences for every rank, and keep this rank's B. So a step has the same tokens on any number of ranks.
    B, T = cfg.micro_batch_size, cfg.sequence_length
    block: list[np.ndarray] = []
    for path, starts in cycle(found):
        tokens = shards.read_shard(path)  # (num_tokens,) uint16
        shards.check_ids(tokens, path, cfg.model.vocab_size)
        for start in starts:
            block.append(tokens[start : start + T + 1])
            if len(block) == world_size * B:
                own = np.stack(block[rank * B : (rank + 1) * B]).astype(np.int64)  # (B, T + 1)
                block = []
                x_and_y = torch.from_numpy(own).to(device)
                yield x_and_y[:, :-1], x_and_y[:, 1:]


def make_optimizer(model: GPT, cfg: Config) -> torch.optim.Optimizer:
    """AdamW with GPT-3's betas. Matrices and embeddings decay; vectors do not."""
    # Weight decay pulls a weight toward zero unless the loss holds the weight in place. Decay keeps the many weights of
    # matrices small. Vectors are biases and the gains of LayerNorm: they are few, and a gain belongs near 1.
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=True)  # `train` sets the rate at each step


def learning_rate(step: int, cfg: Config) -> float:
    """The rate of a step: a linear warm-up to max_lr, then half a cosine down to min_lr."""
    # Adam divides each gradient by a running average of its size. An average of few gradients is unreliable, so the
    # first updates are small. step + 1: the first step also learns.
    if step < cfg.warmup_steps:
        return cfg.max_lr * (step + 1) / cfg.warmup_steps

    # progress rises from 0 at the end of the warm-up to 1 at the end of the run, and share falls from 1 to 0.
    progress = (step - cfg.warmup_steps) / (cfg.max_steps - cfg.warmup_steps)
    share = 0.5 * (1 + math.cos(math.pi * progress))
    return cfg.min_lr + share * (cfg.max_lr - cfg.min_lr)


def mean_over_ranks(x: Tensor) -> float:
    """The mean of a number over all ranks. Every rank must call this function."""
    if dist.is_initialized():
        dist.all_reduce(x)  # the sum, because gloo, which connects CPUs, cannot average
        x = x / dist.get_world_size()
    return x.item()


@torch.no_grad()
def validate(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], autocast: torch.autocast) -> float:
    """The mean loss over the batches of all ranks."""
    with autocast:
        losses = [model(x, y)[1] for x, y in batches]
    return mean_over_ranks(torch.stack(losses).mean())


def check_start(cfg: Config, tokens_per_pass: int) -> None:
    """Raise UserError for settings that are out of range or do not fit together, and for a run folder with content."""
    check_settings(cfg)
    rule = f"a multiple of --micro-batch-size x --sequence-length x ranks = {tokens_per_pass} tokens"
    require(cfg.total_batch_size % tokens_per_pass == 0, f"--total-batch-size {cfg.total_batch_size} must be {rule}")
    is_whole = cfg.val_tokens % tokens_per_pass == 0 or not cfg.val_every
    require(is_whole, f"--val-tokens {cfg.val_tokens} must be {rule}")
    T, context = cfg.sequence_length, cfg.model.block_size
    require(T <= context, f"--sequence-length {T} exceeds the network's {context}; use --model.block-size {T}")
    is_empty = not any(Path(cfg.out_dir).glob("*"))
    require(is_empty, f"--out-dir {cfg.out_dir} is not empty; use another folder, as --out-dir {cfg.out_dir}-2")


def train(cfg: Config) -> None:
    """The whole run. Raises UserError if the run cannot start as asked, or if a loss or a gradient norm is not finite.
    Every rank must call this function."""
    # torchrun starts this file once for each GPU. Each of these processes is a rank, and reads its number from its
    # environment. Without torchrun there is one process, which is rank 0.
    rank, world_size = env_number("RANK", 0), env_number("WORLD_SIZE", 1)

    # Half a million tokens do not fit in memory. So a step has several forward passes, its micro-steps, and each rank
    # takes B sequences in each micro-step.
    B, T = cfg.micro_batch_size, cfg.sequence_length
    tokens_per_pass = B * T * world_size
    check_start(cfg, tokens_per_pass)
    micro_steps = cfg.total_batch_size // tokens_per_pass
    train_data = find_sequences(cfg, "train", needed=1)
    val_data = find_sequences(cfg, "val", cfg.val_tokens // T) if cfg.val_every else []

    # Autocast computes matrix products in bfloat16, which has half the bits of float32 and the same range. Weights,
    # gradients and the loss stay in float32.
    device = choose_device("auto")  # a GPU of this machine, if there is one
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, for the matrix products that stay in float32
    is_bfloat16 = cfg.dtype == "bfloat16" and device.type != "mps"
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=is_bfloat16)

    # The weights are drawn on the CPU and then moved, so a seed gives the same weights on every device.
    torch.manual_seed(cfg.seed)
    raw_model = GPT(cfg.model).to(device)
    optimizer = make_optimizer(raw_model, cfg)
    if cfg.compile:
        raw_model.compile()

    # DDP gives every rank rank 0's weights. During a backward pass, it averages the gradients over the ranks. So all
    # ranks make the same update, and their weights stay equal.
    model: Any = raw_model
    if world_size > 1:
        dist.init_process_group()  # NCCL between GPUs, gloo between CPUs
        model = nn.parallel.DistributedDataParallel(raw_model)

    # DDP has waited for all ranks, so each of them has seen an empty folder before rank 0 writes into it.
    out_dir = Path(cfg.out_dir)
    if rank == 0:
        out_dir.mkdir(parents=True, exist_ok=True)
        metrics = open(out_dir / "metrics.jsonl", "x", buffering=1)  # a line for each step, which plots.py draws
        (out_dir / "config.json").write_text(json.dumps(asdict(cfg), indent=2) + "\n")
    parameters = f"{raw_model.num_params():,} parameters on {device}"
    print0(f"{parameters}; a step: {micro_steps} micro-batches of {B} x {T} tokens on each of {world_size} ranks")

    batches = read_batches(train_data, cfg, rank, world_size, device)
    for step in range(cfg.max_steps + 1):
        row: dict[str, float] = {"step": step, "tokens": step * cfg.total_batch_size}
        is_last = step == cfg.max_steps  # this iteration only validates

        # Measure the loss on text that the network never trains on, in nats per token. A network that knows nothing
        # gives all tokens the same probability, and its loss is ln(50304) = 10.83. Random weights begin a little above:
        # at 10.84 with 128 channels, at 10.95 with 768. If a run begins far above, its weights are too large. If a run
        # begins below, the network sees its targets, or the text repeats itself, as indented code does.
        if cfg.val_every and (step % cfg.val_every == 0 or is_last):
            model.eval()  # switch off what acts in training only, such as dropout, which GPT-2 124M does not use
            val_batches = read_batches(val_data, cfg, rank, world_size, device)
            row["val_loss"] = validate(model, islice(val_batches, cfg.val_tokens // tokens_per_pass), autocast)
            model.train()
            print0(f"step {step:5d}/{cfg.max_steps} | val loss: {row['val_loss']:.4f}")
        if is_last:
            break

        # backward() adds to the gradients that exist already, so after all micro-batches they are the gradients of the
        # sum of the losses. The update needs the gradients of the mean over the whole batch. Each loss is the mean over
        # its micro-batch, and all micro-batches have the same size, so divide each loss by the number of micro-batches.
        start = time.perf_counter()
        # If you add dropout, it draws the same random numbers as in train_gpt2.py.
        torch.manual_seed(cfg.seed + step * world_size + rank)
        loss_sum = torch.zeros((), device=device)
        for micro_step in range(micro_steps):
            # DDP averages the summed gradients in the last backward pass. Averaging in every pass would give the same
            # result and send every gradient micro_steps times. DDP reads this attribute in the forward pass.
            model.require_backward_grad_sync = micro_step == micro_steps - 1

            # x (B, T) -> logits (B, T, vocabulary) -> with y (B, T) the mean of B * T cross-entropies, one number
            x, y = next(batches)
            with autocast:
                _, loss = model(x, y)
            loss = loss / micro_steps
            loss.backward()
            loss_sum += loss.detach()
        loss = mean_over_ranks(loss_sum)

        # The norm of all gradients together. A rare batch has very large gradients, and its update would undo much of
        # what the network has learned. Clipping scales them down to the norm grad_clip and keeps their direction.
        norm = nn.utils.clip_grad_norm_(raw_model.parameters(), cfg.grad_clip or math.inf).item()

        # Check before the update, because a NaN in one weight spreads to all weights and never leaves them. All ranks
        # have the same loss and the same norm, so they all end here.
        problem = f"step {step}: the loss is {loss} and the gradient norm {norm}"
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        require(is_finite, f"{problem}; use a lower --max-lr, or --dtype float32, and another --out-dir")

        # Update the weights. Then drop the gradients, because the next backward() would add to them.
        lr = learning_rate(step, cfg)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        # .item() above has waited for the GPU. Only the update may still run there; its time falls into the next step.
        seconds = time.perf_counter() - start
        speed = cfg.total_batch_size / seconds
        row |= {"train_loss": loss, "lr": lr, "grad_norm": norm, "step_ms": 1e3 * seconds, "tokens_per_second": speed}
        if rank == 0:
            metrics.write(json.dumps(row) + "\n")
        losses = f"loss: {loss:.6f} | lr {lr:.4e} | norm: {norm:.4f}"
        print0(f"step {step:5d}/{cfg.max_steps} | {losses} | dt: {1e3 * seconds:.2f}ms | tok/sec: {speed:,.0f}")

    # infer.py, hellaswag.py, hub.py and --init-from of train_gpt2.py open this file.
    if rank == 0:
        metrics.write(json.dumps(row) + "\n")
        path = out_dir / f"model_{cfg.max_steps:05d}.pt"
        weights = dict(raw_model.state_dict())
        torch.save({"format": 1, "model": weights, "config": asdict(cfg.model), "step": cfg.max_steps}, path)
        print0(f'done: {path}; next: python plots.py {out_dir}; python infer.py {path} "Once upon a time"')


def main() -> None:
    parser = ArgumentParser(__doc__, argument_default=argparse.SUPPRESS)
    add_flags(parser, Config())
    train(change(Config(), vars(parser.parse_args())))

    # DDP may hang if its process group ends before it does. `train` has returned, so DDP is gone.
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
