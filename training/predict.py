"""What a run costs on cards that are not here, by arithmetic alone: no GPU, no data, about a second.

print(report(cfg, predict(cfg, "8xH100"), cfg.max_steps))

Time is counted twice over and added up (a roofline without overlap): FLOPs at a part of the card's peak, bytes to and
from memory at a part of its bandwidth. docs/costs.md holds the predictions against published runs.
"""

import math
import re
from dataclasses import dataclass, replace

import torch

from model import GPT, NoInit
from system.cards import BEFORE_AMPERE, CARDS, Card
from system.cli import require
from system.distributed import Runtime
from system.units import format_duration
from training.config import TrainConfig
from training.head import chunks
from training.microbatch import micro_batch_size
from training.optim import NEWTON_SCHULZ, matrices, parameter_groups

# Parts of the data sheet's figures that programs reach.
MATMUL, MATMUL_HOPPER = 0.87, 0.80  # A100 and H100, of the peak: stas00/ml-engineering, compute/accelerator, table MAMF
ATTENTION = 0.30  # of the same peak, causal flash attention, both passes at T=1024: set by the three runs below
BANDWIDTH = 0.85  # set by the same three: one H200, one A100-80GB, build-nanogpt uncompiled on H100 (docs/costs.md)
LINK = 0.80  # NVLink, one direction: 376 of 450 GB/s between two H100 (NVIDIA/nccl, issue 1264), less for a ring
MEMORY = 0.92  # assumed: what CUDA's context and fragmentation leave to tensors
LAUNCH = 6e-6  # assumed: seconds from one kernel's start to the next, from Python; small models wait for these
USUAL_ERROR, WORST_ERROR = 0.10, 0.30  # of the runs that set no constant: median, largest, rounded up


@dataclass(frozen=True)
class Prediction:
    card: str
    ranks: int
    parameters: int
    B: int
    micro_steps: int
    memory: float  # bytes per card, of its card.gb
    matmul_s: float
    attention_s: float
    memory_s: float
    launch_s: float  # waiting for the CPU to start kernels
    update_s: float
    all_reduce_s: float  # what the backward pass does not hide
    step_s: float
    tokens_per_second: float
    mfu: float


def find_card(text: str) -> tuple[int, str, Card]:
    """(count, name, card) of "8xH100", "2x A100-80GB" or "4090". Raises UserError with the known cards."""

    def plain(name: str) -> str:
        return re.sub(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d?e?|[\s_-]", "", name.lower())

    named = [name for name, card in CARDS.items() if card.gb]
    known = {plain(name): name for name in named} | {plain(name) + f"{CARDS[name].gb}gb": name for name in named}
    known["a100"] = "A100-40GB"  # the one that promises less
    count, name = re.fullmatch(r"(?:([1-9][0-9]{0,3})\s*x\s*)?(.*)", " ".join(text.split())).groups()
    found = known.get(plain(name))
    require(found, f"--card {text!r} is not known; use one of {', '.join(named)}, or 8xH100 for eight")
    return int(count or 1), found, CARDS[found]


class Work:
    """FLOPs and bytes of one micro-step, counted from the network's shape."""

    def __init__(self, cfg: TrainConfig, card: str):
        with torch.device("meta"), NoInit():
            self.model = GPT(cfg.model)
        m, T = cfg.model, cfg.sequence_length
        L, C, V = m.n_layer, m.n_embd, m.vocab_size
        self.parameters = self.model.num_params()
        self.half_weights = cfg.weights == "bfloat16" and card not in BEFORE_AMPERE
        residual = 2 if self.half_weights else 4  # bytes of an element: autocast leaves it as the embedding has it
        blocks = sum(p.numel() for p in self.model.transformer.h.parameters())
        self.attention = 7 * L * C * T  # FLOPs per token, half of it masked: 2 in the forward, 5 in the backward pass
        self.matmul = self.model.flops_per_token(T) - 12 * L * C * T
        # bytes per token and channel of a block: operands of the four matmuls, attention, activation, norms, residuals
        rope = 0 if m.positions == "learned" else 8
        forward = 32 + 8 + 16 + rope + 2 * (2 * residual + 4)
        backward = 64 + 24 + 24 + rope + 2 * (3 * residual + 2)
        head = 14 * V  # bf16 logits: written, read by the softmax; their gradient written, read by two matmuls
        kept = 28 + rope // 2 + 2 * residual  # for the backward pass
        self.kernels = 45 * L
        if not cfg.compile:  # each operation reads and writes memory; autocast's casts, and the logits in float32
            forward, backward, head = forward + 28 + 3 * rope, backward + 60 + 3 * rope, 46 * V
            self.kernels = 120 * L
        self.traffic = L * C * (forward + backward) + head + 6 * residual * C  # and the embedding
        self.kept = L * C * kept + 8 * C  # and the head's input with its gradient
        self.chunk_row = V * (2 if cfg.compile else 18)  # the head's logits, of one chunk at a time, as its gradient
        self.head_weight = V * C
        if cfg.recompute:
            self.matmul += 2 * blocks
            self.attention += 2 * L * C * T
            self.traffic += L * C * forward
            self.kept += L * C * residual - (L - 1) * C * kept

    def memory(self, tokens: int) -> float:
        """Bytes on a card with that many tokens in a micro-step: weights, gradients and two moments as the search for
        a micro-batch wants them, the bf16 copies of the weights, what the backward pass needs, and the head's chunk
        with the float32 sum of its weight's gradient."""
        head = tokens // chunks(tokens, "cuda") * self.chunk_row + 4 * self.head_weight
        return (16 if self.half_weights else 18) * self.parameters + tokens * self.kept + head


def predict(cfg: TrainConfig, cards: str) -> Prediction:
    """Time and memory of one step. Raises UserError for unknown cards, or if not one sequence fits."""
    ranks, name, card = find_card(cards)
    work, T = Work(cfg, name), cfg.sequence_length
    P, peak, bandwidth = work.parameters, card.tflops * 1e12, BANDWIDTH * card.tb_s * 1e12
    products = peak * (MATMUL_HOPPER if name[0] in "HGB" else MATMUL)  # Hopper and Blackwell, cut by their power limit
    require(cfg.dtype != "float32", "--card predicts training in bfloat16 or float16; leave out --dtype float32")
    B = batch(cfg, ranks, work, MEMORY * card.gb * 2**30)
    asked = "one sequence" if cfg.micro_batch_size == "auto" else f"--micro-batch-size {cfg.micro_batch_size}"
    mend = "use a smaller one, --recompute or a larger card"
    require(B, f"{cards}: {asked} of {T} tokens would not fit in {card.gb} GB; {mend}")
    micro_steps = cfg.sequences_per_step // ranks // B
    tokens = micro_steps * B * T  # of one rank
    matmul_s = tokens * work.matmul / products
    attention_s = tokens * work.attention / (ATTENTION * peak)
    sums = chunks(B * T, "cuda") * 12 * work.head_weight  # the head's chunks of a gradient, read and added up
    memory_s = (tokens * work.traffic + micro_steps * (16 * P + sums)) / bandwidth  # weights cast, gradients added up
    busy_s = matmul_s + attention_s + memory_s
    passes_s = max(busy_s, micro_steps * work.kernels * LAUNCH)
    update_s = update(cfg, work, products, bandwidth)
    link = LINK * card.link_gb_s * 1e9
    if cfg.zero_stage == 1 and ranks > 1:
        update_s = update_s / ranks + 4 * P / link  # each rank updates a share and sends it to all
    gradient = (2 if work.half_weights else 4) * P * 2 * (ranks - 1) / ranks / link  # a ring
    last = gradient * cfg.model.vocab_size * cfg.model.n_embd / P  # the embedding's comes last: nothing hides it
    all_reduce_s = max(last, gradient - passes_s / micro_steps * 2 / 3)
    step_s = passes_s + update_s + all_reduce_s
    speed = cfg.total_batch_size / step_s
    mfu = speed * work.model.flops_per_token(T) / (ranks * peak)
    return Prediction(name, ranks, P, B, micro_steps, work.memory(B * T), matmul_s, attention_s, memory_s,
                      passes_s - busy_s, update_s, all_reduce_s, step_s, speed, mfu)  # fmt: skip


def batch(cfg: TrainConfig, ranks: int, work: Work, room: float) -> int:
    """The micro-batch: the one asked for, or the one that --micro-batch-size auto would come to; 0 if none fits."""
    auto = cfg.micro_batch_size == "auto"
    asked = replace(cfg, micro_batch_size=1) if auto else cfg
    rt = Runtime(torch.device("cpu"), torch.bfloat16, world_size=ranks)
    choices = [micro_batch_size(asked, rt, work.model, work.model)]  # raises UserError if it does not divide the batch
    if auto:
        share = cfg.sequences_per_step // ranks
        choices = [b for b in range(min(64, share), 0, -1) if share % b == 0]
    tried = math.inf
    for b in choices:
        if 2 * b <= tried:  # as microbatch.probe halves
            tried = b
            if work.memory(b * cfg.sequence_length) <= room:
                return b
    return 0


def update(cfg: TrainConfig, work: Work, products: float, bandwidth: float) -> float:
    """Seconds to clip the gradients and update all parameters on one card."""
    named = dict(work.model.named_parameters())
    muon = [p for group in parameter_groups(named, cfg).get("muon", []) for p in group["params"]]
    flops = 0
    for p in muon:  # each iteration of Newton-Schulz: X @ X.T, its square, and that times X (Jordan 2024)
        n = matrices(p)
        short, long = sorted((p.size(0) // n, p.size(1)))
        flops += n * len(NEWTON_SCHULZ[cfg.newton_schulz]) * (4 * short**2 * long + 2 * short**3)
    # gradients read for the norm, scaled; AdamW reads weight, gradient, two moments, and writes all but the gradient
    moved = work.parameters * (40 + (16 if work.half_weights else 0))  # and to and from float32
    return flops / products + moved / bandwidth


def report(cfg: TrainConfig, p: Prediction, max_steps: int) -> str:
    """What --dry-run --card prints."""
    hours = max_steps * p.step_s / 3600
    usd = f"${hours * p.ranks * cfg.gpu_hour_usd:.2f}" if cfg.gpu_hour_usd else "price: --gpu-hour-usd"
    split = f"{p.ranks} x {p.micro_steps} x {p.B} x {cfg.sequence_length}"
    parts = {"matmuls": p.matmul_s, "attention": p.attention_s, "memory": p.memory_s, "launches": p.launch_s,
             "update": p.update_s, "waiting for gradients": p.all_reduce_s}  # fmt: skip
    lines = [
        f"{cfg.preset}: {p.parameters:,} parameters on {p.ranks} x {p.card}, predicted, nothing was run",
        f"predicted memory per card {p.memory / 2**30:.1f} of {CARDS[p.card].gb} GB with the largest micro-batch that "
        f"fits, {p.B} (ranks x micro-steps x sequences x T: {split})",
        f"predicted step {p.step_s * 1e3:,.0f} ms ({', '.join(f'{k} {v * 1e3:,.0f}' for k, v in parts.items())}): "
        f"{p.tokens_per_second:,.0f} tokens/s, MFU {p.mfu:.0%}; excluding evaluation",
        f"predicted for {max_steps} steps: {format_duration(hours * 3600)}, {hours * p.ranks:,.1f} GPU-hours; {usd}",
        f"published runs: half are within {USUAL_ERROR:.0%} of what is predicted, all within {WORST_ERROR:.0%} "
        "(docs/costs.md); --dry-run on the card itself measures",
    ]
    if cfg.init_from not in ("scratch", "gpt2"):
        lines.append(f"the network is the one of the --model flags, whatever --init-from {cfg.init_from} holds")
    if p.ranks > 8:
        lines.append(f"{p.ranks} cards are taken to be in one machine: a network between machines is slower")
    return "\n".join(lines)
