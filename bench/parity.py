"""Does a preset train step for step as the program that it reproduces?

    python -m bench.parity build-nanogpt ~/build-nanogpt --data-dir data/stdlib
    python -m bench.parity record8 ~/modded-nanogpt --as-written        # at its commit 11e39fb
    python -m bench.parity record8-bfloat16 ~/modded-nanogpt --as-written      # with bfloat16 weights, the same commit
    python -m bench.parity build-nanogpt ~/build-nanogpt --plant rate   # a planted error: must exit with 1
    python -m bench.parity build-nanogpt ~/build-nanogpt --plot-dir log/parity      # a panel of log/parity/parity.png

Run by hand; tests/test_parity.py runs it on a stand-in. docs/recipes.md has a table of the results. A
"reference" is the training script of another project, taken from a checkout of it. Both sides make the same few small
steps on a CPU:

    reference's script --edits--> a small program --run--> its initial weights, curve A
                                        ^                            |
    tokens of --data-dir --> shards ----+                            |
                                        v                            v
    this project's preset and flags --> Loader, TrainStep, from the same weights --> curve B

A curve has the loss and the gradient norm of every step. If both start from the same weights, read the same tokens and
do the same arithmetic, A and B differ by float32 rounding alone. Any other difference grows from step to step: weights
that decay by mistake, a rate that is 1% off. The command prints the largest differences over all steps, and exits with
1 if one is above the limit.

The reference's script runs completely: its own model, data loader, loop, clipping, optimizers and schedule. It is made
small and quiet by edits, which are regular expressions applied to its source:

- `edits` set the size (layers, width, vocabulary, batch, steps), replace CUDA by the CPU, and turn off what is not
  training (validation, samples, logs). They leave the arithmetic as it is.
- `float32_edits` replace bfloat16 by float32, because in bfloat16 the rounding would hide an error. With --as-written
  they are left out, and three copies of this project's run, whose first weights differ by roundings to bfloat16, tell
  what rounding alone does. At each step the limit is a multiple of their distance so far. It grows from step to step,
  and in the end rounding decides the curve: only the steps before that are compared.
- `network_edits` change the network into the preset's. Only DDP-BASEMODEL-TRAIN has such edits; the parts that they
  change are not compared.

An edit that matches nothing is an error: then the script is not the version that the edits were written for.

A comparison proves something only if it can fail. --plant puts an error into this project's side, which must be found.
"""

import contextlib
import functools
import io
import itertools
import json
import os
import re
import sys
import tempfile
import warnings
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
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
from tokens.loader import Loader, to_device
from training import muon
from training.presets import parse
from training.step import TrainStep

# The size of both sides. Few layers and a narrow model keep a run under a minute. With a small vocabulary each token
# comes often; the first Adam update of a rare one is the sign of a gradient that may be rounding alone.
T = 128  # tokens of a sequence
SEQUENCES_PER_STEP = 8
MICRO_BATCH_SIZE = 4
TOKENS_PER_STEP = SEQUENCES_PER_STEP * T
N_LAYER = 3
N_EMBD = 256
VOCAB_SIZE = 512


class StepRecord(NamedTuple):
    """What is compared of a step."""

    loss: float  # mean over the step's tokens, in nats per token
    norm: float  # L2 norm of the gradients of all parameters, before clipping


Curve = list[StepRecord]

# With --as-written, the steps are compared as long as runs that differ by rounding alone are at most this far apart in
# loss, and there must be some such steps.
MAX_COMPARABLE_SPREAD = 1e-2
MIN_COMPARED_STEPS = 6

# Their limit is this multiple of how far apart these runs are: the copies round differently once, two programs in every
# operation. It was chosen after seeing what it must separate: record 8 and result 36 were up to 4.6 times as far from
# this project as the copies from each other, result 36 with the planted decay 19 times, with the planted rate 59 times.
ROUNDING_FACTOR = 8

# ------------------------------------------------------------------------- the references


@dataclass(frozen=True)
class Reference:
    """The training script of another project, and what makes it comparable."""

    script: str
    """Its path in the checkout."""
    edits: dict[str, str]
    """{regular expression: replacement} that shrink the script and move it to a CPU. {steps} becomes --steps."""
    flags: str
    """Preset and flags of train_gpt2.py that describe the same training. {cooldown} becomes the decay's share."""
    weight_names: dict[str, str]
    """{regular expression: replacement} that turn the names of its weights into this project's. An empty name drops a
    tensor. Several tensors that get one name are concatenated in their order."""
    float32_edits: dict[str, str]
    """More edits, which replace its bfloat16 by float32; left out with --as-written."""
    network_edits: dict[str, str] = field(default_factory=dict)
    """More edits, which change its network into the preset's. What they change is not compared."""
    modules: tuple[str, ...] = ()
    """Paths of modules of its own. Their source is put before the script's, and `edits` remove their imports."""
    argv: str = ""
    """Its command-line arguments, if it has any."""
    max_loss_difference: float = 1e-5
    """Limit of the difference in loss, in nats per token. That of the relative difference in norm is ten times it. With
    --as-written it is replaced by rounding_limits."""
    sums_loss: bool = False
    """Whether its loss is the sum over a step's tokens instead of their mean."""


# nanoGPT's family stores each layer's causal mask beside the weights.
DROP_MASKS = {r".*\.attn\.bias$": ""}

# Both scripts of modded-nanogpt insist on CUDA and torchrun.
CUDA_TO_CPU = {
    r"@torch\.compile\n": "\n",
    r"dist\.(init|destroy)_process_group\(.*\)": "None",
    r"torch\.cuda\.(set_device|synchronize)\(.*?\)": "None",
    r"\.cuda\(\)": "",
    r"'cuda'|\"cuda\"": "'cpu'",
}
BFLOAT16_CASTS = {r"\.bfloat16\(\)": ".float()"}

# modded-nanogpt at commit 11e39fb.
RECORD8 = Reference(
    script="train_gpt2.py",
    edits={
        **CUDA_TO_CPU,
        r"assert torch\.cuda\.is_available\(\)": "",
        r"device_ids=\[ddp_local_rank\]": "",
        r"model = torch\.compile\(model\)": "",
        r"enable_(\w+)_sdp\((True|False)\)": "None",  # chooses among CUDA's attention kernels
        # size
        r"num_vocab = 50304": f"num_vocab = {VOCAB_SIZE}",
        r"n_layer=12, n_head=6, n_embd=768": f"n_layer={N_LAYER}, n_head=2, n_embd={N_EMBD}",
        r"= 8\*64 ": f"= {SEQUENCES_PER_STEP} ",
        r"device_batch_size : int = 64": f"device_batch_size : int = {MICRO_BATCH_SIZE}",
        r"sequence_length : int = 1024": f"sequence_length : int = {T}",
        r"num_iterations : int = 4578": "num_iterations : int = {steps}",
        r"warmdown_iters : int = 1308": "warmdown_iters : int = 20",
        r"val_tokens : int = 10485760": f"val_tokens : int = {TOKENS_PER_STEP}",
        # logs
        r"if master_process": "if False",
        r"print\(f\"peak memory.*": "None",
        # As written, it reads its first micro-batch twice: once before this reset, once after it.
        r"# begin training\ntrain_loader\.reset\(\)": "",
    },
    flags="record8-124m --model.n-head 2 --cooldown {cooldown}",
    weight_names={r"c_[qkv]\.": "c_attn."},
    float32_edits=BFLOAT16_CASTS | {r"torch\.bfloat16": "torch.float32"},
    max_loss_difference=1e-4,
)
# What its commit 6671ed1 changed: no autocast; every layer casts its own float32 weight; the embedding is bfloat16.
CASTS_OF_6671ED1 = {
    r"class CausalSelfAttention\(nn\.Module\):": (
        "class CastedLinear(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return F.linear(x, self.weight.to(x.dtype))\n\n"
        "class CausalSelfAttention(nn.Module):"
    ),
    r"(self\.\w+ +)= nn\.Linear\(": r"\1= CastedLinear(",
    r"ctx = torch\.amp\.autocast\(.*": "import contextlib\nctx = contextlib.nullcontext()",
    r"if hasattr\(config, \"coordinate_descent_tuning\"\):": (
        "model.bfloat16()\nfor m in model.modules():\n    if isinstance(m, CastedLinear):\n        m.float()\nif False:"
    ),
}

REFERENCES = {
    "build-nanogpt": Reference(
        script="train_gpt2.py",
        edits={
            # what would be imported or downloaded, and is not used
            r"from hellaswag import .*": "",
            r"tiktoken\.get_encoding\(.*\)": "None",
            # size
            r"total_batch_size = 524288": f"total_batch_size = {TOKENS_PER_STEP}",
            r"B = 64 .*": f"B = {MICRO_BATCH_SIZE}",
            r"T = 1024 .*": f"T = {T}",
            r"GPTConfig\(vocab_size=50304\)": f"GPTConfig({T}, {VOCAB_SIZE}, {N_LAYER}, 4, {N_EMBD})",
            r"warmup_steps = 715": "warmup_steps = 10",
            r"max_steps = 19073": "max_steps = {steps}",
            # validation, HellaSwag, samples, logs
            r"\(?step % 250 == 0 or last_step\)?": "False",
            r"\(step > 0 and step % 250 == 0\) or last_step": "False",
            r"if master_process:": "if False:",
        },
        flags=f"gpt2-124m --model.n-head 4 --model.block-size {T} --warmup-steps 10",
        weight_names=DROP_MASKS,
        float32_edits={r"dtype=torch\.bfloat16": "dtype=torch.float32"},
    ),
    # Its warm-up is one step longer than its cosine assumes, so here the rate stays at its peak after the warm-up.
    "nanogpt": Reference(
        script="train.py",
        edits={
            r"from model import GPTConfig, GPT": "",
            r"exec\(open\('configurator\.py'\)\.read\(\)\).*": "",
            # size
            r"gradient_accumulation_steps = 5 \* 8": (
                f"gradient_accumulation_steps = {SEQUENCES_PER_STEP // MICRO_BATCH_SIZE}"
            ),
            r"batch_size = 12": f"batch_size = {MICRO_BATCH_SIZE}",
            r"n_layer = 12\nn_head = 12\nn_embd = 768": f"n_layer = {N_LAYER}\nn_head = 4\nn_embd = {N_EMBD}",
            r"warmup_iters = 2000": "warmup_iters = 9",
            r"max_iters = 600000": "max_iters = {steps}",
            r"min_lr = 6e-5": "min_lr = 6e-4",
            r"block_size = 1024": f"block_size = {T}",
            r"else 50304": f"else {VOCAB_SIZE}",
            # a CPU
            r"device = 'cuda' ": "device = 'cpu' ",
            r"compile = True": "compile = False",
            r"dtype = 'bfloat16' if .*": "dtype = 'bfloat16'",  # means nothing on a CPU, where it is float32
            # checkpoints and logs
            r"master_process = True": "master_process = False",
            # It draws sequences at random; here they come in order, from the iterator that run_reference provides.
            r"ix = torch\.randint\(.*": "ix = [next(sequence_starts) for _ in range(batch_size)]",
        },
        flags=f"gpt2-124m --model.n-head 4 --model.block-size {T} --model.no-bias --model.activation gelu_erf "
        "--warmup-steps 10 --min-lr 6e-4",
        weight_names=DROP_MASKS,
        float32_edits={},
        modules=("model.py",),
    ),
    "llm.c": Reference(
        script="train_gpt2.py",
        edits={
            r"tiktoken\.get_encoding\(.*\)": "None",
            r"50257, n_layer=12, n_head=12, n_embd=768": (
                f"{VOCAB_SIZE}, n_layer={N_LAYER}, n_head=4, n_embd={N_EMBD}"
            ),
        },
        flags="llmc-124m --model.n-head 4 --warmup-steps 10",
        weight_names=DROP_MASKS,
        float32_edits={},
        argv=f"--model d12 --input_bin data/fineweb10B/fineweb_train_*.bin --batch_size {MICRO_BATCH_SIZE} "
        f"--sequence_length {T} --total_batch_size {TOKENS_PER_STEP} --num_iterations {{steps}} --learning_rate 6e-4 "
        "--learning_rate_decay_frac 0 --warmup_iters 10 --weight_decay 0.1 --overfit_single_batch 0 --write_tensors 0 "
        "--flash 1 --device cpu",
    ),
    "ddp-basemodel-train": Reference(
        script="model/GPT2.py",
        modules=("config/cfg.py", "model/lib/modules.py"),
        edits={
            # its own modules, and packages that are not used here
            r"from (config\.cfg|model\.lib\.modules|data\.data_common) import .*": "",
            r"parent_dir = .*\nsys\.path\.append\(parent_dir\)": "",
            r"import (torchtune|wandb)\n|from einsum import einsum": "",
            r"tiktoken\.get_encoding\(.*\)": "None",
            # size
            r"vocab_size:int = field\(default=50257\)": f"vocab_size:int = field(default={VOCAB_SIZE})",
            r"emb_dim:int = field\(default=768\)": f"emb_dim:int = field(default={N_EMBD})",
            r"n_heads:int = field\(default=12\)": "n_heads:int = field(default=4)",
            r"n_layers:int = field\(default=12\)": f"n_layers:int = field(default={N_LAYER})",
            # a CPU, without torchrun
            r"(torch\.amp\.autocast\(.*\)) if device_type == .*": r"\1",
            r"int\(os\.environ\[\"RANK\"\]\)": "0",
            # checkpoints, samples and logs
            r"master_process = True": "master_process = False",
            # Its shards differ from llm.c's in this number alone.
            r"20250211": "20240520",
        },
        # Each gives it what GPT-2 has, from parts and settings of its own that it does not use.
        network_edits={
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
        float32_edits={r"\"bfloat16\": torch\.bfloat16": '"bfloat16": torch.float32'},
        argv=f"--input_train_bin data/fineweb10B/fineweb_train_*.bin --batch_size {MICRO_BATCH_SIZE} "
        f"--sequence_length {T} --total_batch_size {TOKENS_PER_STEP} --num_iterations {{steps}} --learning_rate 6e-4 "
        "--learning_rate_decay_frac 0.1 --warmup_iters 10 --weight_decay 0.1 --overfit_single_batch 0 --dtype bfloat16 "
        "--flash 1 --device cpu",
    ),
    "record8": RECORD8,
    # The same with the casts of its commit 6671ed1: only the embedding is bfloat16 without a float32 copy.
    "record8-bfloat16": replace(RECORD8, edits=RECORD8.edits | CASTS_OF_6671ED1),
    # modded-nanogpt's track 3; its result 36 is this script.
    "result36": Reference(
        script="records/track_3_optimization/train_gpt_simple.py",
        edits={
            **CUDA_TO_CPU,
            r"torch\.cuda\.get_device_name\(device\)": "'cpu'",
            r"pin_memory=True": "pin_memory=False",
            r"model\.compile\(.*\)": "",
            # size
            r"seq_len=1024": f"seq_len={T}",
            r"val_tokens = 20 \* 524288": f"val_tokens = {TOKENS_PER_STEP}",
            r"batch_size = 8 \* 64 \* 1024": f"batch_size = {TOKENS_PER_STEP}",
            r"mbs = 64": f"mbs = {MICRO_BATCH_SIZE}",
            r"50304, num_layers=12, model_dim=768": f"{VOCAB_SIZE}, num_layers={N_LAYER}, model_dim={N_EMBD}",
            r"train_steps = \d+": "train_steps = {steps}",
        },
        # Its gradients are sums over the step's tokens, so Adam's epsilon is divided by their number here.
        flags=f"speedrun-124m --model.n-head 2 --adam-eps {1e-10 / TOKENS_PER_STEP}",
        weight_names={
            r".*angular_freq": "",  # RoPE's table
            r"^embed\.": "transformer.wte.",
            r"^proj\.": "lm_head.",
            r"^norm1\.gains": "transformer.ln_0.weight",
            r"^norm2\.gains": "transformer.ln_f.weight",
            r"^blocks\.": "transformer.h.",
            r"norm([12])\.gains": r"ln_\1.weight",
            r"\.[qkv]\.": ".c_attn.",
            r"\.proj\.": ".c_proj.",
            r"\.fc\.": ".c_fc.",
        },
        float32_edits=BFLOAT16_CASTS,
        max_loss_difference=1e-4,
        sums_loss=True,
    ),
}

# ------------------------------------------------------------------------- data for both sides


def tokens_per_shard(steps: int) -> int:
    """Tokens of each of the two train shards: half of the steps, and two tokens more than their sequences need. Without
    these two, some references would leave out the last sequence of a shard."""
    return steps // 2 * TOKENS_PER_STEP + 2


def write_shards(data_dir: Path, folder: Path, steps: int) -> None:
    """Write the tokens of `steps` steps into `folder`, in the places and formats where each reference looks for them.

    They are the first tokens of data_dir, with ids modulo VOCAB_SIZE. Raises UserError if it has too few.
    """
    # Two train shards, so that the step from one to the next is compared, too.
    n = tokens_per_shard(steps)
    tokens = np.concatenate([shards.read_shard(path) for path in shards.find_shards(data_dir, "train")])
    require(len(tokens) >= 2 * n, f"{data_dir} has only {len(tokens)} tokens; --steps {steps} takes {2 * n}")
    tokens = tokens[: 2 * n] % VOCAB_SIZE
    first_half = tokens[:n]
    second_half = tokens[n:]
    for name in ("edu_fineweb10B", "data/fineweb10B", "data/openwebtext"):
        (folder / name).mkdir(parents=True)

    # build-nanogpt and this project read .npy, llm.c and modded-nanogpt .bin. The val shard only has to be there.
    contents = {"val_000000": first_half, "train_000001": first_half, "train_000002": second_half}
    for name, shard in contents.items():
        shards.write_shard(folder / "edu_fineweb10B" / f"edufineweb_{name}.npy", shard)
        shards.write_shard(folder / "data" / "fineweb10B" / f"fineweb_{name}.bin", shard)

    # nanoGPT reads one file of bare token ids.
    tokens.tofile(folder / "data" / "openwebtext" / "train.bin")


def sequence_starts(steps: int) -> list[int]:
    """Where each sequence starts in the two shards one after the other, in the order in which steps read them."""
    n = tokens_per_shard(steps)
    in_first_shard = list(range(0, n - 2, T))
    return in_first_shard + [n + start for start in in_first_shard]


# ------------------------------------------------------------------------- the reference's side


class AllStepsDone(Exception):
    """The reference has made its steps. Raised inside its loop, to leave it."""


def edit_script(reference: Reference, checkout: Path, steps: int, use_float32: bool) -> str:
    """The source of the reference's modules and script after its edits. Raises UserError if one of them matches
    nothing."""
    path = checkout / reference.script
    paths = [*(checkout / module for module in reference.modules), path]
    source = "\n".join(path.read_text() for path in paths)
    edits = reference.edits | reference.network_edits
    if use_float32:
        edits = edits | reference.float32_edits
    for pattern, replacement in edits.items():
        source, count = re.subn(pattern, replacement.replace("{steps}", str(steps)), source)
        require(count > 0, f"{path} has no {pattern!r}: is it another version?")
    return source


class Recorder:
    """Records the curve and the initial weights of a reference from outside, through three functions that every script
    calls: F.cross_entropy for each micro-batch, clip_grad_norm_ once a step (if it clips), and Optimizer.step.

    scope: the global variables of the running script, where its model is found.
    """

    def __init__(self, reference: Reference, scope: dict[str, Any], steps: int):
        self.reference = reference
        self.scope = scope
        self.steps = steps
        self.curve: Curve = []
        self.initial_weights: dict[str, Tensor] = {}

        # What was seen so far: the mean loss of each micro-batch, the latest norm, the first optimizer that stepped.
        self._losses: list[float] = []
        self._norm: Tensor | None = None
        self._first_optimizer: torch.optim.Optimizer | None = None

        # The functions that the methods below stand for.
        self._real_cross_entropy = F.cross_entropy
        self._real_clip = nn.utils.clip_grad_norm_

    def cross_entropy(self, logits: Tensor, targets: Tensor, **settings: Any) -> Tensor:
        loss = self._real_cross_entropy(logits, targets, **settings)
        mean = loss.item() / targets.numel() if self.reference.sums_loss else loss.item()
        self._losses.append(mean)
        return loss

    def clip_grad_norm_(self, *arguments: Any) -> Tensor:
        self._norm = self._real_clip(*arguments)
        return self._norm

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Append a record to the curve. Raises AllStepsDone after the last one."""
        # A script with several optimizers steps each of them; one record a step is enough.
        if self._first_optimizer is None:
            self._first_optimizer = optimizer
        if optimizer is not self._first_optimizer:
            return

        # Before the first update the weights are the initial ones.
        model = self.scope.get("raw_model") or self.scope["model"]
        if not self.initial_weights:
            self.initial_weights = {name: w.detach().clone() for name, w in model.state_dict().items()}

        # The gradients are complete here. A script that clips has measured their norm.
        norm = self._norm
        if norm is None:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        norm_scale = TOKENS_PER_STEP if self.reference.sums_loss else 1

        # The loss of a step is the mean over its micro-batches, which are the last ones that were seen.
        micro_steps = SEQUENCES_PER_STEP // MICRO_BATCH_SIZE
        loss = sum(self._losses[-micro_steps:]) * MICRO_BATCH_SIZE / SEQUENCES_PER_STEP
        self.curve.append(StepRecord(loss, norm.item() / norm_scale))
        if len(self.curve) == self.steps:
            raise AllStepsDone


def run_reference(
    reference: Reference, checkout: Path, steps: int, folder: Path, use_float32: bool
) -> tuple[Curve, dict[str, Tensor]]:
    """Run the reference's script in `folder`, which has its data. Returns its curve and the weights it began with,
    under its own names."""
    source = edit_script(reference, checkout, steps, use_float32)

    # The global variables that the script starts with. One of them is for nanoGPT's edits.
    scope: dict[str, Any] = {
        "__name__": "__main__",
        "sequence_starts": itertools.cycle(sequence_starts(steps)),
    }
    recorder = Recorder(reference, scope, steps)
    argv = [str(checkout / reference.script), *reference.argv.replace("{steps}", str(steps)).split()]
    torch.manual_seed(1337)  # for a script that sets no seed

    with contextlib.ExitStack() as stack:
        # The surroundings that it expects: its folder, its arguments.
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(mock.patch.object(sys, "argv", argv))

        # The recorder's hooks.
        stack.enter_context(mock.patch.object(F, "cross_entropy", recorder.cross_entropy))
        stack.enter_context(mock.patch.object(nn.utils, "clip_grad_norm_", recorder.clip_grad_norm_))
        stack.callback(register_optimizer_step_pre_hook(recorder.before_optimizer_step).remove)

        # It must not lower the precision of this process's matrix products.
        stack.enter_context(mock.patch.object(torch, "set_float32_matmul_precision"))

        # A script for torchrun gets a process group of one rank.
        if "dist.init_process_group" in (checkout / reference.script).read_text():
            ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            stack.enter_context(mock.patch.dict(os.environ, ranks))
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)

        # Run it, without its output, until the recorder has all steps.
        stack.enter_context(contextlib.redirect_stdout(None))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        stack.enter_context(contextlib.suppress(AllStepsDone))
        exec(compile(source, reference.script, "exec"), scope)
    return recorder.curve, recorder.initial_weights


def rename_weights(weight_names: dict[str, str], state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A reference's weights under this project's names, in float32. Queries, keys and values that are three matrices
    there, (C, C) each, become the one matrix (3C, C) that they are here."""
    parts_by_name: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        for pattern, replacement in weight_names.items():
            name = re.sub(pattern, replacement, name)
        if name:
            parts_by_name.setdefault(name, []).append(tensor)
    return {name: torch.cat(parts).float() for name, parts in parts_by_name.items()}


# ------------------------------------------------------------------------- this project's side

PlantedError = Literal["", "target", "decay", "rate"]


def run_this_project(
    flags: str, rt: Runtime, data_dir: Path, state: dict[str, Tensor], planted_error: PlantedError
) -> Curve:
    """The curve of train_gpt2.py with these flags, from the weights `state`, which stay as they are."""
    cfg = parse(flags.split(), lambda path: {})
    torch.manual_seed(cfg.seed)
    # from_state_dict trains the tensors that it is given: without copies, a later run would start from trained weights.
    model = GPT.from_state_dict(cfg.model, {name: w.clone() for name, w in state.items()})
    train_step = TrainStep(cfg, rt, model.train())
    plant_error_in_optimizers(train_step, planted_error)
    read_batch = to_device_with_shifted_targets if planted_error == "target" else to_device
    data = Loader(data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)
    batches = data.batches(0, cfg.sequences_per_step, train_step.micro_batch_size, rt)

    # The same loop as train_gpt2.py's, without saving and evaluating.
    curve: Curve = []
    with (
        mock.patch.object(training.step, "to_device", read_batch),
        # Muon's iterations in bfloat16, as everywhere, would not agree to float32 rounding.
        mock.patch.object(muon, "NEWTON_SCHULZ_DTYPE", rt.dtype),
    ):
        for step in range(cfg.max_steps):
            result = train_step.compute_gradients(next(batches))
            curve.append(StepRecord(result.loss, result.norm))
            train_step.set_learning_rates(step, cfg.max_steps)
            train_step.update()
    return curve


def plant_error_in_optimizers(train_step: TrainStep, planted_error: PlantedError) -> None:
    """Change the settings of the optimizers, if that is the error that was asked for."""
    groups = [group for optimizer in train_step.optimizers for group in optimizer.param_groups]
    match planted_error:
        case "" | "target":
            return
        case "rate":  # all learning rates 1% too high
            for group in groups:
                group["peak_lr"] *= 1.01
        case "decay":  # biases and gains decay like matrices
            for group in groups:
                group["weight_decay"] = 0.1
        case _:
            raise ValueError(f"no planted error {planted_error!r}: add a case here")


def to_device_with_shifted_targets(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """tokens.loader.to_device with an error: the target of a token is the token itself, not the next one."""
    x, y = to_device(tokens, device)  # (B, T) each
    return x, y.roll(1, dims=1)


# ------------------------------------------------------------------------- the comparison


class Difference(NamedTuple):
    """Between two curves. As a limit: how far they may be apart."""

    loss: float  # in nats per token
    norm: float  # relative

    def largest(self, other: "Difference") -> "Difference":
        return Difference(max(self.loss, other.loss), max(self.norm, other.norm))


# In bfloat16 no limit is lower than this. In the first step a head of zeros gives the same loss to any two runs.
MIN_BFLOAT16_LIMIT = Difference(1e-4, 1e-3)


def differences_so_far(curve: Curve, expected: Curve) -> list[Difference]:
    """For each step, the largest differences in loss and in norm up to it."""
    pairs = zip(curve, expected, strict=True)
    differences = [Difference(abs(a.loss - b.loss), abs(a.norm - b.norm) / b.norm) for a, b in pairs]
    return list(itertools.accumulate(differences, Difference.largest))


def change_by_rounding(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights, each changed by at most half the distance of two bfloat16 numbers, at random."""
    generator = torch.Generator().manual_seed(seed)
    return {name: w * (1 + 2**-9 * (2 * torch.rand(w.shape, generator=generator) - 1)) for name, w in state.items()}


def rounding_limits(copies: list[Curve]) -> list[Difference]:
    """The limits for bfloat16, one for each step that can be compared, from runs that differ by rounding alone.

    Raises UserError if these are too few steps.
    """
    # How far any two of the copies are apart, up to each step.
    pairs = [differences_so_far(a, b) for a, b in itertools.combinations(copies, 2)]
    spread = [functools.reduce(Difference.largest, at_step) for at_step in zip(*pairs, strict=True)]

    # Once they have lost each other, a step proves nothing any more.
    compared = [distance for distance in spread if distance.loss <= MAX_COMPARABLE_SPREAD]
    require(
        len(compared) >= MIN_COMPARED_STEPS,
        f"rounding alone takes the runs {MAX_COMPARABLE_SPREAD:g} apart in loss within {len(compared)} steps: "
        "compare in float32, without --as-written",
    )
    limits = [Difference(ROUNDING_FACTOR * d.loss, ROUNDING_FACTOR * d.norm) for d in compared]
    return [limit.largest(MIN_BFLOAT16_LIMIT) for limit in limits]


@dataclass(frozen=True)
class Args:
    reference: tyro.conf.Positional[Literal[tuple(REFERENCES)]]
    checkout: tyro.conf.Positional[Path]
    """Folder with a checkout of the reference."""
    data_dir: Path = Path("data/stdlib")
    steps: int = 60
    as_written: bool = False
    """Both in bfloat16, as they are; the limit is how far runs of this project come apart by rounding alone."""
    plant: PlantedError = ""
    """An error in this project's side, which must be found: shifted targets, biases and gains that decay, or learning
    rates 1% too high."""
    plot_dir: Path | None = None
    """Save both curves in this folder, and draw every comparison that is saved there as parity.png."""


@dataclass(frozen=True)
class Comparison:
    """Two curves from the same weights on the same tokens."""

    reference: str
    preset: str
    dtype: str
    plant: PlantedError
    expected: Curve
    """The reference's."""
    curve: Curve
    """This project's."""
    limits: list[Difference]
    """How far they may be apart, for each step that is compared: all, or the first ones."""


def compare(reference: Reference, args: Args) -> None:
    """Run both sides and print how far their curves are apart. Raises UserError if that is too far."""
    comparison = run_both(reference, args)
    if args.plot_dir is not None:
        save_comparison(comparison, args.plot_dir)
        draw_comparisons(args.plot_dir)
    report(comparison)


def run_both(reference: Reference, args: Args) -> Comparison:
    """Run the reference's script, then this project's step from its weights."""
    steps = args.steps
    require(steps >= 2 and steps % 2 == 0, f"--steps {steps} must be even: half of them are in each of two shards")
    use_float32 = not args.as_written
    rt = Runtime(torch.device("cpu"), torch.float32 if use_float32 else torch.bfloat16)

    # This project's flags: what the reference needs, then the size, then float32 weights.
    flags = (
        f"{reference.flags} --model.n-layer {N_LAYER} --model.n-embd {N_EMBD} --model.vocab-size {VOCAB_SIZE} "
        f"--sequence-length {T} --total-batch-size {TOKENS_PER_STEP} --micro-batch-size {MICRO_BATCH_SIZE} "
        f"--max-steps {steps} --no-shuffle --no-compile"
    ).replace("{cooldown}", str(20 / steps))
    if use_float32:
        flags += " --weights float32"

    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        data_dir = folder / "edu_fineweb10B"
        write_shards(args.data_dir, folder, steps)

        # The reference first: this project starts from its weights.
        expected, state = run_reference(reference, args.checkout.resolve(), steps, folder, use_float32)
        state = rename_weights(reference.weight_names, state)
        curve = run_this_project(flags, rt, data_dir, state, args.plant)

        # How far apart they may be, at each step that is compared.
        max_loss = reference.max_loss_difference
        limits = [Difference(max_loss, 10 * max_loss)] * steps
        if args.as_written:
            changed_states = [change_by_rounding(state, seed) for seed in (1, 2, 3)]
            limits = rounding_limits([run_this_project(flags, rt, data_dir, s, "") for s in changed_states])

    preset = flags.split()[0]
    return Comparison(args.reference, preset, str(rt.dtype).removeprefix("torch."), args.plant, expected, curve, limits)


def report(comparison: Comparison) -> None:
    """Print how far the curves are apart. Raises UserError if that is too far."""
    expected, curve, limits = comparison.expected, comparison.curve, comparison.limits
    steps = len(expected)

    # All steps' results.
    final_losses = f"{expected[-1].loss:.4f}, this project's to {curve[-1].loss:.4f}"
    print(f"{comparison.reference}: {steps} steps, its loss goes from {expected[0].loss:.4f} to {final_losses}")

    # The largest differences of the steps that are compared.
    n = len(limits)
    if n < steps:
        print(f"compared are steps 0 to {n - 1}; after that, rounding alone makes {MAX_COMPARABLE_SPREAD:g} and more")
    differences = differences_so_far(curve[:n], expected[:n])
    loss, norm = differences[-1]
    print(
        f"largest difference in loss {loss:.1e} (limit {limits[-1].loss:.1e}), in norm {norm:.1e} of it "
        f"({limits[-1].norm:.1e})"
    )

    # The first step that is beyond its limit.
    for step, (difference, limit) in enumerate(zip(differences, limits, strict=True)):
        require(
            difference.loss <= limit.loss and difference.norm <= limit.norm,
            f"not the same curve: up to step {step} a difference of {difference.loss:.1e} in loss (limit "
            f"{limit.loss:.1e}) and {difference.norm:.1e} in norm ({limit.norm:.1e})",
        )


# ------------------------------------------------------------------------- the picture

PALE_BLUE, DARK_BLUE, GREY = "#9ecae1", "#08306b", "#777777"
PLANTED_STYLES = {
    "target": {"color": "#7570b3", "label": "difference if targets are shifted"},
    "decay": {"color": "#1b9e77", "label": "difference if biases and gains decay"},
    "rate": {"color": "#d95f02", "label": "difference if rates are 1% too high"},
}
PANELS_IN_A_ROW = 3
COLORS_IN_FILE = 64  # of a palette: a third of the size of a picture without one
# Losses that are equal have no place on a log scale: they are drawn here.
SMALLEST_DRAWN = 1e-8


def save_comparison(comparison: Comparison, folder: Path) -> None:
    """Write the comparison to a file of its own in `folder`, over that of an earlier run."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [comparison.reference, comparison.dtype, comparison.plant]
    path = folder / ("-".join(word for word in words if word) + ".json")
    path.write_text(json.dumps(asdict(comparison)))


def load_comparisons(folder: Path) -> list[Comparison]:
    """The comparisons saved in `folder`, in the order of REFERENCES; those without a planted error come first."""
    comparisons = []
    for path in folder.glob("*.json"):
        saved = json.loads(path.read_text())
        for name in ("expected", "curve"):
            saved[name] = [StepRecord(*record) for record in saved[name]]
        saved["limits"] = [Difference(*limit) for limit in saved["limits"]]
        comparisons.append(Comparison(**saved))

    names = list(REFERENCES)
    return sorted(comparisons, key=lambda saved: (names.index(saved.reference), saved.dtype, saved.plant))


def draw_comparisons(folder: Path) -> None:
    """Draw the comparisons saved in `folder` as parity.png: a panel for each that has no planted error, in which those
    that have one are drawn, too."""
    from matplotlib.figure import Figure
    from PIL import Image

    comparisons = load_comparisons(folder)
    panels = [comparison for comparison in comparisons if not comparison.plant]
    if not panels:
        return

    # Each panel, with the planted errors of the same reference and precision.
    rows = -(-len(panels) // PANELS_IN_A_ROW)
    columns = min(len(panels), PANELS_IN_A_ROW)
    figure = Figure(figsize=(3.6 * columns, 3.4 * rows), dpi=130, layout="constrained")
    subfigures = figure.subfigures(rows, columns, squeeze=False).flat  # the last row may have more of them than panels
    for panel, subfigure in zip(panels, subfigures, strict=False):
        key = (panel.reference, panel.dtype)
        planted = [other for other in comparisons if other.plant and (other.reference, other.dtype) == key]
        draw_panel(subfigure, panel, planted)

    # One legend below all panels: each label once, whichever panels have it.
    lines_by_label = {line.get_label(): line for axes in figure.get_axes() for line in axes.get_lines()}
    handles = list(lines_by_label.values())
    figure.legend(handles=handles, fontsize=9, frameon=False, ncols=2 * columns, loc="outside lower center")

    # With a palette the file is small enough for a page.
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        Image.open(file).convert("RGB").quantize(COLORS_IN_FILE).save(folder / "parity.png", optimize=True)


def draw_panel(figure: Any, comparison: Comparison, planted: list[Comparison]) -> None:
    """Draw both curves, and below them the difference in loss of each step on a log scale, with the limit.

    planted: the same comparison with planted errors, of which only the difference is drawn.
    """
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = range(len(comparison.expected))
    precision = "" if comparison.dtype == "float32" else f", {comparison.dtype}"
    above.set_title(f"{comparison.reference} and {comparison.preset}{precision}", fontsize=9)

    # The losses: this project's line is thin, so that the reference's is seen behind it.
    losses = [record.loss for record in comparison.expected]
    above.plot(steps, losses, color=PALE_BLUE, lw=5, solid_capstyle="round", label="reference")
    above.plot(steps, [record.loss for record in comparison.curve], color=DARK_BLUE, lw=1, label="this project")
    above.set_ylabel("loss")

    # Their difference in each step, the limit as far as it goes, and what planted errors do.
    for other in [comparison, *planted]:
        pairs = zip(other.curve, other.expected, strict=True)
        differences = [max(abs(a.loss - b.loss), SMALLEST_DRAWN) for a, b in pairs]
        style = {"color": DARK_BLUE, "lw": 0, "marker": ".", "ms": 3.5, "label": "difference"}
        if other.plant:
            style = {"lw": 1, **PLANTED_STYLES[other.plant]}
        below.plot(range(len(differences)), differences, **style)
    limits = [limit.loss for limit in comparison.limits]
    below.plot(steps[: len(limits)], limits, color=GREY, lw=1, ls="--", label="limit")
    below.set(yscale="log", ylim=(SMALLEST_DRAWN / 2, None), xlabel="step", ylabel="difference")

    for axes in (above, below):
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    compare(REFERENCES[args.reference], args)


if __name__ == "__main__":
    run_cli(main)
