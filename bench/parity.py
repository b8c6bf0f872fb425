"""The same curve as the ancestor's own program? A peer's script beside train_gpt2.py's step, from the same weights, on
the same tokens in the same order.

    python -m bench.parity build-nanogpt ~/build-nanogpt --data-dir data/stdlib
    python -m bench.parity record8 ~/modded-nanogpt --as-written     # its commit 11e39fb; in bfloat16, beside two seeds
    python -m bench.parity build-nanogpt ~/build-nanogpt --plant rate     # a planted error: must fail

The peer's script runs whole: its model, loader, loop, clipping, optimizers and schedule. Its `edits` shrink it (layers,
width, batch, steps), bring it to a CPU and silence what is not training; the `exact` ones, left out with --as-written,
turn its bfloat16 into float32. No other arithmetic is touched, and an edit that finds nothing is an error. Ours is the
preset as train_gpt2.py reads it, with Step and Loader. Prints the largest differences over all steps; exits with 1 if
one is above the limit.
"""

import contextlib
import itertools
import os
import re
import sys
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import training.step
from model import GPT
from system.cli import require, run_cli
from system.distributed import Runtime
from tokens import shards
from tokens.loader import Loader
from training import optim
from training.presets import parse
from training.step import TrainStep

T, BATCH, MICRO = 128, 8, 4  # of both sides: tokens in a sequence, sequences in a step and in a micro-step
LAYERS, WIDTH, VOCAB = 3, 256, 512  # few words: each comes often, and the head takes little time
Curve = list[tuple[float, float]]  # of each step: loss in nats per token, norm of all gradients before clipping


@dataclass(frozen=True)
class Peer:
    """A script, what turns it into `steps` small steps on a CPU, and the flags that make ours the same."""

    script: str
    edits: dict[str, str]  # regular expression -> replacement; {steps} is filled in
    flags: str  # of train_gpt2.py
    names: dict[str, str]  # regular expression in a name of the peer's weights -> ours
    exact: dict[str, str]
    argv: str = ""
    limit: float = 1e-5
    summed: bool = False  # the loss of a step is added up over its tokens


MASK = {r".*\.attn\.bias$": ""}  # is kept with the weights
TO_CPU = {  # of the two records of modded-nanogpt, which know only CUDA and torchrun
    r"@torch\.compile\n": "\n",
    r"dist\.(init|destroy)_process_group\(.*\)": "None",
    r"torch\.cuda\.(set_device|synchronize)\(.*?\)": "None",
    r"\.cuda\(\)": "",
    r"'cuda'|\"cuda\"": "'cpu'",
}
FLOAT32 = {r"\.bfloat16\(\)": ".float()"}
RESULT36 = Peer(
    "records/track_3_optimization/train_gpt_simple.py",
    {
        **TO_CPU,
        r"torch\.cuda\.get_device_name\(device\)": "'cpu'",
        r"pin_memory=True": "pin_memory=False",
        r"model\.compile\(.*\)": "",
        r"seq_len=1024": f"seq_len={T}",
        r"val_tokens = 20 \* 524288": f"val_tokens = {BATCH * T}",
        r"batch_size = 8 \* 64 \* 1024": f"batch_size = {BATCH * T}",
        r"mbs = 64": f"mbs = {MICRO}",
        r"50304, num_layers=12, model_dim=768": f"{VOCAB}, num_layers={LAYERS}, model_dim={WIDTH}",
        r"train_steps = \d+": "train_steps = {steps}",
    },
    f"speedrun-124m --model.n-head 2 --adam-eps {1e-10 / (BATCH * T)}",
    {
        r".*angular_freq": "", r"^embed\.": "transformer.wte.", r"^proj\.": "lm_head.",
        r"^norm1\.gains": "transformer.ln_0.weight", r"^norm2\.gains": "transformer.ln_f.weight",
        r"^blocks\.": "transformer.h.", r"norm([12])\.gains": r"ln_\1.weight",
        r"\.[qkv]\.": ".c_attn.", r"\.proj\.": ".c_proj.", r"\.fc\.": ".c_fc.",
    },
    FLOAT32,
    limit=1e-4,
    summed=True,
)  # fmt: skip
RESULT10 = replace(  # NorMuon; only its logs are public, which begin with the program
    RESULT36,
    script="records/track_3_optimization/results/20260503_normuon/e0d0185f-ccb8-426d-8265-a4e762ec69f6.txt",
    edits=RESULT36.edits | {r"\n={100}\n[\s\S]*": ""},
    flags=RESULT36.flags + " --optimizer normuon --muon-lr 0.035 --muon-weight-decay 0.025 --max-lr 0.003125 "
    "--embed-lr-scale 96 --vector-lr-scale 3.2 --weight-decay 0 --vector-weight-decay 0",
)
PEERS = {
    "build-nanogpt": Peer(
        "train_gpt2.py",
        {
            r"from hellaswag import .*": "",
            r"tiktoken\.get_encoding\(.*\)": "None",  # it would be downloaded
            r"total_batch_size = 524288": f"total_batch_size = {BATCH * T}",
            r"B = 64 .*": f"B = {MICRO}",
            r"T = 1024 .*": f"T = {T}",
            r"GPTConfig\(vocab_size=50304\)": f"GPTConfig({T}, {VOCAB}, {LAYERS}, 4, {WIDTH})",
            r"warmup_steps = 715": "warmup_steps = 10",
            r"max_steps = 19073": "max_steps = {steps}",
            r"\(?step % 250 == 0 or last_step\)?": "False",
            r"\(step > 0 and step % 250 == 0\) or last_step": "False",
            r"if master_process:": "if False:",
        },
        f"gpt2-124m --model.n-head 4 --model.block-size {T} --warmup-steps 10",
        MASK,
        {r"dtype=torch\.bfloat16": "dtype=torch.float32"},
    ),
    "nanogpt": Peer(  # its warm-up is a step longer than its cosine knows, so here the rate stays at its peak
        "train.py",
        {
            r"from model import GPTConfig, GPT": "exec(open(folder + '/model.py').read())",
            r"exec\(open\('configurator\.py'\)\.read\(\)\).*": "",
            r"gradient_accumulation_steps = 5 \* 8": f"gradient_accumulation_steps = {BATCH // MICRO}",
            r"batch_size = 12": f"batch_size = {MICRO}",
            r"n_layer = 12\nn_head = 12\nn_embd = 768": f"n_layer = {LAYERS}\nn_head = 4\nn_embd = {WIDTH}",
            r"warmup_iters = 2000": "warmup_iters = 9",
            r"max_iters = 600000": "max_iters = {steps}",
            r"min_lr = 6e-5": "min_lr = 6e-4",
            r"device = 'cuda' ": "device = 'cpu' ",
            r"compile = True": "compile = False",
            r"master_process = True": "master_process = False",
            r"block_size = 1024": f"block_size = {T}",
            r"else 50304": f"else {VOCAB}",
            r"ix = torch\.randint\(.*": "ix = [next(in_order) for _ in range(batch_size)]",  # it draws them at random
            r"dtype = 'bfloat16' if .*": "dtype = 'bfloat16'",
        },
        f"gpt2-124m --model.n-head 4 --model.block-size {T} --model.no-bias --model.activation gelu_erf "
        "--warmup-steps 10 --min-lr 6e-4",
        MASK,
        {},
    ),
    "llm.c": Peer(
        "train_gpt2.py",
        {
            r"tiktoken\.get_encoding\(.*\)": "None",
            r"50257, n_layer=12, n_head=12, n_embd=768": f"{VOCAB}, n_layer={LAYERS}, n_head=4, n_embd={WIDTH}",
        },
        "llmc-124m --model.n-head 4 --warmup-steps 10",
        MASK,
        {},
        argv=f"--model d12 --input_bin data/fineweb10B/fineweb_train_*.bin --batch_size {MICRO} --sequence_length {T} "
        f"--total_batch_size {BATCH * T} --num_iterations {{steps}} --learning_rate 6e-4 --learning_rate_decay_frac 0 "
        "--warmup_iters 10 --weight_decay 0.1 --overfit_single_batch 0 --write_tensors 0 --flash 1 --device cpu",
    ),
    "record8": Peer(
        "train_gpt2.py",
        {
            **TO_CPU,
            r"assert torch\.cuda\.is_available\(\)": "",
            r"device_ids=\[ddp_local_rank\]": "",
            r"model = torch\.compile\(model\)": "",
            r"enable_(\w+)_sdp\((True|False)\)": "None",  # which of CUDA's attention kernels
            r"num_vocab = 50304": f"num_vocab = {VOCAB}",
            r"n_layer=12, n_head=6, n_embd=768": f"n_layer={LAYERS}, n_head=2, n_embd={WIDTH}",
            r"= 8\*64 ": f"= {BATCH} ",
            r"device_batch_size : int = 64": f"device_batch_size : int = {MICRO}",
            r"sequence_length : int = 1024": f"sequence_length : int = {T}",
            r"num_iterations : int = 4578": "num_iterations : int = {steps}",
            r"warmdown_iters : int = 1308": "warmdown_iters : int = 20",
            r"val_tokens : int = 10485760": f"val_tokens : int = {BATCH * T}",
            r"if master_process": "if False",
            r"print\(f\"peak memory.*": "None",
            r"# begin training\ntrain_loader\.reset\(\)": "",  # or its first micro-batch would be read twice
        },
        "record8-124m --model.n-head 2 --cooldown {cooldown}",
        {r"c_[qkv]\.": "c_attn."},
        FLOAT32 | {r"torch\.bfloat16": "torch.float32"},
        limit=1e-4,
    ),
    "result36": RESULT36,
    "result10": RESULT10,
}  # fmt: skip


class Done(Exception):
    """The peer has made its steps."""


def run_peer(peer: Peer, folder: Path, steps: int, work: Path, exact: bool) -> tuple[Curve, dict[str, Tensor]]:
    """The curve of a peer's program, run in the folder `work` with our shards, and the weights it began with."""
    source = (folder / peer.script).read_text()
    for pattern, by in (peer.edits | (peer.exact if exact else {})).items():
        source, found = re.subn(pattern, by.replace("{steps}", str(steps)), source)
        require(found, f"{folder / peer.script} has no {pattern!r}: another version of it?")
    windows = range(0, steps // 2 * BATCH * T, T)  # of each of the two shards
    starts = [*windows, *(windows.stop + 2 + i for i in windows)]
    scope: dict[str, Any] = {"__name__": "__main__", "folder": str(folder), "in_order": itertools.cycle(starts)}
    torch.manual_seed(1337)  # of a peer that sets none
    curve, losses, norms, begin = [], [], [], {}
    entropy, clip, first = F.cross_entropy, nn.utils.clip_grad_norm_, []

    def note_loss(logits: Tensor, targets: Tensor, **settings: Any) -> Tensor:
        loss = entropy(logits, targets, **settings)
        losses.append(loss.item() / (targets.numel() if peer.summed else 1))
        return loss

    def note_norm(*arguments: Any) -> Tensor:
        norms.append(clip(*arguments))
        return norms[-1]

    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        first.append(optimizer)
        if optimizer is not first[0]:  # one of several
            return
        model = scope.get("raw_model") or scope["model"]
        if not begin:
            begin.update({k: v.detach().clone() for k, v in model.state_dict().items()})
        norm = norms[-1] if norms else nn.utils.get_total_norm([p.grad for p in model.parameters()])
        size = BATCH * T if peer.summed else 1
        curve.append((sum(losses[-(BATCH // MICRO) :]) * MICRO / BATCH, norm.item() / size))
        if len(curve) == steps:
            raise Done

    argv = [str(folder / peer.script), *peer.argv.replace("{steps}", str(steps)).split()]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(work))
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(F, "cross_entropy", note_loss))
        stack.enter_context(mock.patch.object(nn.utils, "clip_grad_norm_", note_norm))
        stack.enter_context(mock.patch.object(torch, "set_float32_matmul_precision"))
        stack.callback(register_optimizer_step_pre_hook(note_step).remove)
        if "dist.init_process_group" in (folder / peer.script).read_text():
            ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            stack.enter_context(mock.patch.dict(os.environ, ranks))
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(contextlib.redirect_stdout(None))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(contextlib.suppress(Done))
        exec(compile(source, peer.script, "exec"), scope)
    return curve, begin


def write_shards(data_dir: Path, folder: Path, steps: int) -> None:
    """Two train shards, where each peer looks for them, that hold the steps of both sides: with two tokens more than
    their windows none of the peers leaves out the last. And a val shard, which only has to be there."""
    n = steps // 2 * BATCH * T + 2
    parts = map(shards.read_shard, shards.find_shards(data_dir, "train"))
    tokens = np.concatenate(list(parts))[: 2 * n] % VOCAB
    require(len(tokens) == 2 * n, f"{data_dir} has only {len(tokens)} tokens; --steps {steps} takes {2 * n}")
    for name in ("edu_fineweb10B", "data/fineweb10B", "data/openwebtext"):
        (folder / name).mkdir(parents=True)
    for i, shard in enumerate([tokens[:n], tokens[:n], tokens[n:]]):
        name = f"{'train' if i else 'val'}_{i:06d}"
        shards.write_shard(folder / "edu_fineweb10B" / f"edufineweb_{name}.npy", shard)
        shards.write_shard(folder / "data" / "fineweb10B" / f"fineweb_{name}.bin", shard)
    tokens.tofile(folder / "data" / "openwebtext" / "train.bin")


def renamed(names: dict[str, str], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A peer's weights under our names; what it keeps as queries, keys and values is one matrix here."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        for pattern, by in names.items():
            name = re.sub(pattern, by, name)
        if name:
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts).float() for name, parts in found.items()}


def run_ours(flags: str, rt: Runtime, data_dir: Path, state: dict[str, Tensor] | None, plant: str) -> Curve:
    """The curve of train_gpt2.py with these flags, from `state` or, if None, from random weights of the flags' seed."""
    cfg = parse(flags.split(), lambda path: {})
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model) if state is None else GPT.from_state_dict(cfg.model, state)
    step = TrainStep(cfg, rt, model.train())
    for group in [g for optimizer in step.optimizers for g in optimizer.param_groups]:
        if plant == "rate":
            group["peak_lr"] *= 1.01
        if plant == "decay":
            group["weight_decay"] = 0.1  # of vectors, too
    data = Loader(data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)
    to_device, curve = training.step.to_device, []

    def shifted(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        x, y = to_device(tokens, device)
        return x, y.roll(1, dims=1)

    with (
        mock.patch.object(training.step, "to_device", shifted if plant == "target" else to_device),
        mock.patch.object(optim, "NEWTON_SCHULZ_DTYPE", rt.dtype),
    ):
        for at, batch in enumerate(data.batches(0, cfg.sequences_per_step, step.B, rt)):
            result = step.compute_gradients(batch)
            curve.append((result.loss, result.norm))
            if len(curve) == cfg.max_steps:
                return curve
            step.set_learning_rates(at, cfg.max_steps)
            step.update()


def largest(a: Curve, b: Curve) -> tuple[float, float]:
    """The largest difference of two curves in loss (nats) and in the gradients' norm (relative)."""
    assert len(a) == len(b), (len(a), len(b))
    return tuple(max(abs(x[i] - y[i]) / (y[i] if i else 1) for x, y in zip(a, b, strict=True)) for i in (0, 1))


@dataclass(frozen=True)
class Args:
    peer: tyro.conf.Positional[Literal[tuple(PEERS)]]
    folder: tyro.conf.Positional[Path]
    """Its checkout."""
    data_dir: Path = Path("data/stdlib")
    steps: int = 60
    as_written: bool = False
    """Both in bfloat16 as they come; the limit is the difference of two seeds of ours."""
    plant: Literal["", "target", "decay", "rate"] = ""
    """An error in ours, which must be found: shifted targets, vectors that decay, rates 1% too high."""


def compare(peer: Peer, args: Args) -> None:
    """Print how far the two curves are apart. Raises UserError if that is too far."""
    steps = args.steps
    require(steps >= 2 and steps % 2 == 0, f"--steps {steps} must be even: half of them are in each of two shards")
    rt = Runtime(torch.device("cpu"), torch.bfloat16 if args.as_written else torch.float32)
    exact = "" if args.as_written else " --weights float32"
    with tempfile.TemporaryDirectory() as work:
        write_shards(args.data_dir, Path(work), steps)
        flags = (
            f"{peer.flags.replace('{cooldown}', str(20 / steps))} --model.n-layer {LAYERS} --model.n-embd {WIDTH} "
            f"--model.vocab-size {VOCAB} --sequence-length {T} --total-batch-size {BATCH * T} "
            f"--micro-batch-size {MICRO} --max-steps {steps} --no-shuffle --no-compile{exact}"
        )
        data_dir = Path(work) / "edu_fineweb10B"
        theirs, state = run_peer(peer, args.folder.resolve(), steps, Path(work), not args.as_written)
        ours = run_ours(flags, rt, data_dir, renamed(peer.names, state), args.plant)
        limit = (peer.limit, 10 * peer.limit)
        if args.as_written:
            a, b = (run_ours(f"{flags} --seed {seed}", rt, data_dir, None, "") for seed in (1, 2))
            limit = largest(a, b)
    loss, norm = largest(ours, theirs)
    print(f"{args.peer}: {steps} steps, loss {theirs[0][0]:.4f} to {theirs[-1][0]:.4f}, ours to {ours[-1][0]:.4f}")
    print(f"largest difference: loss {loss:.1e}, norm {norm:.1e} of it; limits {limit[0]:.1e} and {limit[1]:.1e}")
    require(loss <= limit[0] and norm <= limit[1], "not the same curve")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    compare(PEERS[args.peer], args)


if __name__ == "__main__":
    run_cli(main)
