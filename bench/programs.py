"""The programs that the benches compare this project with, each at one commit, and what makes their training
comparable: edits, names of weights, this project's flags.

    source = programs.read(args.peers, "nanogpt", "model.py")      # the text of that file at the pinned commit

A peer is a git clone, of which nothing is checked out. A clone that is missing is fetched from GitHub. On a machine
without GitHub, --peers names a folder with clones made elsewhere.

The edits of bench/parity.py are regular expressions. They set the size, replace CUDA by the CPU and bfloat16 by
float32, in which no rounding hides an error, and turn off what is not training: validation, samples, logs. They leave
the arithmetic as it is, but for the network of DDP-BASEMODEL-TRAIN.
"""

import multiprocessing
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from system.errors import require

DEFAULT_FOLDER = Path(".cache/peers")

# {name: (repository, commit)}; the clone of a peer is the folder with its repository's name.
PEERS = {
    "build-nanogpt": ("karpathy/build-nanogpt", "6104ab1b53920f6e2159749676073ff7d815c1fa"),
    "nanogpt": ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    "llm.c": ("karpathy/llm.c", "f1e2ace651495b74ae22d45d1723443fd00ecd3a"),
    "ddp-basemodel-train": ("Sachin-Bharadwaj/DDP-BASEMODEL-TRAIN", "0d0452c09cd35345ad2d125c1816f75101084dd0"),
    "record8": ("KellerJordan/modded-nanogpt", "11e39fb08037aa86d48bb3989a388f85d1615bc6"),
}


def read(folder: Path, name: str, path: str) -> str:
    """The text of a peer's file. Raises UserError if its clone cannot be fetched, or lacks the commit."""
    repository, commit = PEERS[name]
    clone = folder / repository.split("/")[1]
    url = f"https://github.com/{repository}"
    fix = f"make the clone elsewhere (git clone {url}), and name the folder that it is in: --peers FOLDER"

    if not clone.exists():
        fetched = subprocess.run(["git", "clone", "--quiet", "--bare", url, str(clone)])
        require(fetched.returncode == 0, f"cannot fetch {url}: {fix}")
    command = ["git", "-C", str(clone), "show", f"{commit}:{path}"]
    done = subprocess.run(command, capture_output=True, text=True)
    require(done.returncode == 0, f"{clone} has no {path} at commit {commit:.7}: {done.stderr.strip()[:200]}; {fix}")
    return done.stdout


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a new process, with its result, or its exception. What it prints goes to stderr."""
    # Not forked: torch's threads and a peer's changes to torch end with the process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=os.dup2, initargs=(2, 1)) as pool:
        return pool.submit(function, *args).result()


def print_table(rows: dict[str, dict[str, str]], note: str) -> None:
    """Print {row: {column: cell}} as a Markdown table below its machine, date, commit and command."""
    # torch was not imported here so far, because a child process begins with its parent's peak of memory.
    from system import machine

    versions = machine.versions()
    where = f"{machine.device_name(machine.choose_device())}, {os.cpu_count()} cores, torch {versions['torch']}"
    command = shlex.join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    print(f"\n{date.today()}, {where}, commit {versions.get('commit', 'none')[:7]}: `{command}`; {note}\n")
    columns = list(next(iter(rows.values())))
    print(f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells.values())} |", flush=True)


# ------------------------------------------------------------------------- what parity compares


class Size(NamedTuple):
    """Of both sides. With a small vocabulary each token comes often; the first Adam update of a rare one is the sign of
    a gradient that may be rounding alone."""

    T: int = 128  # tokens of a sequence
    sequences: int = 8  # of a step
    B: int = 4  # sequences of a micro-batch
    n_layer: int = 3
    n_embd: int = 256
    vocab_size: int = 512

    @property
    def tokens(self) -> int:  # of a step
        return self.sequences * self.T


SIZE = Size()
T, SEQUENCES, B, N_LAYER, N_EMBD, VOCAB = SIZE
TOKENS = SIZE.tokens


@dataclass(frozen=True)
class Reference:
    """The training script of another project, and what makes it comparable."""

    paths: tuple[str, ...]
    """Its modules, then the script. They run as one file: `edits` remove the imports of the modules."""
    edits: dict[str, str]
    """{regular expression: replacement}. {steps} becomes --steps."""
    flags: str
    """Preset and flags of train_gpt2.py that describe the same training. {cooldown} becomes the decay's share."""
    weight_names: dict[str, str]
    """{regular expression: replacement} that turn the names of its weights into this project's. An empty name drops a
    tensor. Several tensors that get one name are concatenated in their order."""
    argv: str = ""
    """Its command-line arguments, if it has any."""
    limit: float = 1e-5
    """How far the losses may be apart, in nats per token. The relative difference in norm may be ten times that."""
    needs_torchrun: bool = False
    """Whether it insists on a process group."""
    size: Size = SIZE


# nanoGPT's family stores each layer's causal mask beside the weights.
DROP_MASKS = {r".*\.attn\.bias$": ""}

# modded-nanogpt's script insists on CUDA and torchrun.
CUDA_TO_CPU = {
    r"@torch\.compile\n": "\n",
    r"dist\.(init|destroy)_process_group\(.*\)": "None",
    r"torch\.cuda\.(set_device|synchronize)\(.*?\)": "None",
    r"\.cuda\(\)": "",
    r"'cuda'|\"cuda\"": "'cpu'",
    r"\.bfloat16\(\)": ".float()",
}

BUILD_NANOGPT = Reference(
    paths=("train_gpt2.py",),
    edits={
        # what would be imported or downloaded, and is not used
        r"from hellaswag import .*": "",
        r"tiktoken\.get_encoding\(.*\)": "None",
        # size and precision
        r"total_batch_size = 524288": f"total_batch_size = {TOKENS}",
        r"B = 64 .*": f"B = {B}",
        r"T = 1024 .*": f"T = {T}",
        r"GPTConfig\(vocab_size=50304\)": f"GPTConfig({T}, {VOCAB}, {N_LAYER}, 4, {N_EMBD})",
        r"warmup_steps = 715": "warmup_steps = 10",
        r"max_steps = 19073": "max_steps = {steps}",
        r"dtype=torch\.bfloat16": "dtype=torch.float32",
        # validation, HellaSwag, samples, logs
        r"\(?step % 250 == 0 or last_step\)?": "False",
        r"\(step > 0 and step % 250 == 0\) or last_step": "False",
        r"if master_process:": "if False:",
    },
    flags=f"gpt2-124m --model.n-head 4 --model.block-size {T} --warmup-steps 10",
    weight_names=DROP_MASKS,
)

# Its warm-up is one step longer than its cosine assumes, so here the rate stays at its peak after the warm-up.
NANOGPT = Reference(
    paths=("model.py", "train.py"),
    edits={
        r"from model import GPTConfig, GPT": "",
        r"exec\(open\('configurator\.py'\)\.read\(\)\).*": "",
        # size
        r"gradient_accumulation_steps = 5 \* 8": f"gradient_accumulation_steps = {SEQUENCES // B}",
        r"batch_size = 12": f"batch_size = {B}",
        r"n_layer = 12\nn_head = 12\nn_embd = 768": f"n_layer = {N_LAYER}\nn_head = 4\nn_embd = {N_EMBD}",
        r"warmup_iters = 2000": "warmup_iters = 9",
        r"max_iters = 600000": "max_iters = {steps}",
        r"min_lr = 6e-5": "min_lr = 6e-4",
        r"block_size = 1024": f"block_size = {T}",
        r"else 50304": f"else {VOCAB}",
        # a CPU, where its dtype means nothing: it is float32
        r"device = 'cuda' ": "device = 'cpu' ",
        r"compile = True": "compile = False",
        r"dtype = 'bfloat16' if .*": "dtype = 'bfloat16'",
        # checkpoints and logs
        r"master_process = True": "master_process = False",
        # It draws sequences at random; here they come in order, from the iterator that run_reference provides.
        r"ix = torch\.randint\(.*": "ix = [next(sequence_starts) for _ in range(batch_size)]",
    },
    flags=f"gpt2-124m --model.n-head 4 --model.block-size {T} --model.no-bias --model.activation gelu_erf "
    "--warmup-steps 10 --min-lr 6e-4",
    weight_names=DROP_MASKS,
)

# What llm.c and the program that follows it are called with.
LLMC_ARGV = (
    f"data/fineweb10B/fineweb_train_*.bin --batch_size {B} --sequence_length {T} --total_batch_size {TOKENS} "
    "--num_iterations {steps} --learning_rate 6e-4 --warmup_iters 10 --weight_decay 0.1 --overfit_single_batch 0 "
    "--flash 1 --device cpu"
)

LLMC = Reference(
    paths=("train_gpt2.py",),
    edits={
        r"tiktoken\.get_encoding\(.*\)": "None",
        r"50257, n_layer=12, n_head=12, n_embd=768": f"{VOCAB}, n_layer={N_LAYER}, n_head=4, n_embd={N_EMBD}",
    },
    flags="llmc-124m --model.n-head 4 --warmup-steps 10",
    weight_names=DROP_MASKS,
    argv=f"--model d12 --learning_rate_decay_frac 0 --write_tensors 0 --input_bin {LLMC_ARGV}",
)

DDP_BASEMODEL_TRAIN = Reference(
    paths=("config/cfg.py", "model/lib/modules.py", "model/GPT2.py"),
    edits={
        # its own modules, and packages that are not used here
        r"from (config\.cfg|model\.lib\.modules|data\.data_common) import .*": "",
        r"parent_dir = .*\nsys\.path\.append\(parent_dir\)": "",
        r"import (torchtune|wandb)\n|from einsum import einsum": "",
        r"tiktoken\.get_encoding\(.*\)": "None",
        # size and precision
        r"vocab_size:int = field\(default=50257\)": f"vocab_size:int = field(default={VOCAB})",
        r"emb_dim:int = field\(default=768\)": f"emb_dim:int = field(default={N_EMBD})",
        r"n_heads:int = field\(default=12\)": "n_heads:int = field(default=4)",
        r"n_layers:int = field\(default=12\)": f"n_layers:int = field(default={N_LAYER})",
        r"\"bfloat16\": torch\.bfloat16": '"bfloat16": torch.float32',
        # a CPU, without torchrun
        r"(torch\.amp\.autocast\(.*\)) if device_type == .*": r"\1",
        r"int\(os\.environ\[\"RANK\"\]\)": "0",
        # checkpoints, samples and logs
        r"master_process = True": "master_process = False",
        # Its shards differ from llm.c's in this number alone.
        r"20250211": "20240520",
        # The network becomes GPT-2's, from parts and settings of its own that it does not use: not compared.
        r"(self\.(norm1|norm2|final_norm)) = RMSNorm\(": r"\1 = LayerNorm(",
        r"return context_vec, attn_weights": "return self.Wo(context_vec), attn_weights",
        r"qkv_bias:bool = field\(default=False\)": "qkv_bias:bool = field(default=True)",
        r"drop_rate:float = field\(default=0\.1\)": "drop_rate:float = field(default=0.0)",
    },
    flags=f"untied-124m --model.n-head 4 --model.block-size {T} --warmup-steps 10",
    weight_names={
        r"^tok_emb\.": "transformer.wte.",
        r"^pos_emb\.": "transformer.wpe.",
        r"^out_head\.": "lm_head.",
        r"^final_norm\.": "transformer.ln_f.",
        r"^trf_blocks\.": "transformer.h.",
        r"\.norm([12])\.": r".ln_\1.",
        r"\.scale$": ".weight",
        r"\.W[qkv]\.": ".c_attn.",
        r"\.Wo\.": ".c_proj.",
        r"\.ff\.layers\.0\.": ".mlp.c_fc.",
        r"\.ff\.layers\.2\.": ".mlp.c_proj.",
    },
    argv=f"--learning_rate_decay_frac 0.1 --dtype bfloat16 --input_train_bin {LLMC_ARGV}",
)

RECORD8 = Reference(
    paths=("train_gpt2.py",),
    edits={
        **CUDA_TO_CPU,
        r"assert torch\.cuda\.is_available\(\)": "",
        r"device_ids=\[ddp_local_rank\]": "",
        r"model = torch\.compile\(model\)": "",
        r"enable_(\w+)_sdp\((True|False)\)": "None",  # chooses among CUDA's attention kernels
        r"torch\.bfloat16": "torch.float32",
        # size
        r"num_vocab = 50304": f"num_vocab = {VOCAB}",
        r"n_layer=12, n_head=6, n_embd=768": f"n_layer={N_LAYER}, n_head=2, n_embd={N_EMBD}",
        r"= 8\*64 ": f"= {SEQUENCES} ",
        r"device_batch_size : int = 64": f"device_batch_size : int = {B}",
        r"sequence_length : int = 1024": f"sequence_length : int = {T}",
        r"num_iterations : int = 4578": "num_iterations : int = {steps}",
        r"warmdown_iters : int = 1308": "warmdown_iters : int = 20",
        r"val_tokens : int = 10485760": f"val_tokens : int = {TOKENS}",
        # logs
        r"if master_process": "if False",
        r"print\(f\"peak memory.*": "None",
        # As written, it reads its first micro-batch twice: once before this reset, once after it.
        r"# begin training\ntrain_loader\.reset\(\)": "",
    },
    flags="record8-124m --model.n-head 2 --cooldown {cooldown}",
    weight_names={r"c_[qkv]\.": "c_attn."},
    limit=1e-4,
    needs_torchrun=True,
)

REFERENCES = {
    "build-nanogpt": BUILD_NANOGPT,
    "nanogpt": NANOGPT,
    "llm.c": LLMC,
    "ddp-basemodel-train": DDP_BASEMODEL_TRAIN,
    "record8": RECORD8,
}
