"""Predict the time and the memory of a training step on other GPUs. This needs no GPU and no data, and takes a second.

    prediction = predict(cfg, "8xH100")
    print(report(cfg, prediction, max_steps=19_073))

train_gpt2.py calls it for `--dry-run --card 8xH100`.

Time: training reaches a fraction of a GPU's peak FLOP/s, its model FLOPs utilization (MFU; PaLM, Chowdhery et al. 2022,
appendix B). The fraction depends mostly on the GPU's architecture and on whether the model is compiled, so:

    step time = tokens * FLOPs per token / (GPUs * peak FLOP/s * achieved MFU) + communication that is not hidden

Memory: the bytes of the weights, the gradients, the optimizer state, and the activations kept for the backward pass.

A model that counted the FLOPs and bytes of every kind of kernel predicted the published runs better (half within 10%,
all within 30%). It was given up because its counts were hard to read and to check.

docs/costs.md compares the predictions with published runs.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from model import GPT, GPTConfig
from system.cards import BEFORE_AMPERE, CARDS, TURING, Card, other_forms
from system.cli import UserError, format_cost, format_duration, require
from training import microbatch, optim
from training.config import TrainConfig
from training.head import num_chunks

# ------------------------------------------------------------------------- constants


@dataclass(frozen=True)
class AchievedMFU:
    """Fractions of the data sheet's peak FLOP/s that training steps reach on one GPU, the optimizer's update included.

    FLOPs are GPT.flops_per_token's, which count attention without its causal mask."""

    compiled: float
    eager: float  # --no-compile


@dataclass(frozen=True)
class Architecture:
    mfu: AchievedMFU
    cards: tuple[str, ...]  # keys of system.cards.CARDS


# Each fraction that is not assumed comes from one published run, in the table of docs/costs.md that names them.
HOPPER_MFU = AchievedMFU(
    compiled=0.42,  # modded-nanogpt, track 3, 20260517_ortho, on one H200
    eager=0.29,  # build-nanogpt on one H100
)
AMPERE_MFU = AchievedMFU(
    compiled=0.50,  # Karpathy's video "Let's reproduce GPT-2 (124M)", on one A100
    eager=0.34,  # assumed: as much below compiled as on Hopper
)

# No published run has set a constant for the other architectures: each is assumed to reach the MFU of the nearest one.
# fmt: off
ARCHITECTURES = {
    "Volta": Architecture(AMPERE_MFU, ("V100", "V100-PCIE")),
    "Turing": Architecture(AMPERE_MFU, TURING),
    "Ampere": Architecture(AMPERE_MFU, (
        "A100-40GB", "A100-80GB", "A800", "A40", "A30", "A10G", "A10", "A6000", "A5000", "A4000", "RTX 3060",
        "RTX 3060 Ti", "RTX 3070", "RTX 3070 Ti", "RTX 3080", "RTX 3080 Ti", "RTX 3090",
    )),
    "Ada": Architecture(AMPERE_MFU, (
        "L40S", "L40", "L4", "RTX 6000 Ada", "RTX 4060", "RTX 4060 Ti", "RTX 4070", "RTX 4070 SUPER", "RTX 4070 Ti",
        "RTX 4070 Ti SUPER", "RTX 4080", "RTX 4080 SUPER", "RTX 4090",
    )),
    "Hopper": Architecture(HOPPER_MFU, (
        "H200", "GH200", "H200 NVL", "H100", "H100 PCIe", "H100 NVL", "H800", "H800 PCIe",
    )),
    "Blackwell": Architecture(HOPPER_MFU, (
        "B300", "GB300", "B200", "GB200", "RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090",
    )),
}
# fmt: on

# The cards of the published runs; a prediction for any other one has not been checked.
PUBLISHED_CARDS = ("A100-40GB", "A100-80GB", "H100", "H200", "RTX 4090")
# Channels of the narrowest published network. A narrower one waits for the CPU to launch kernels, so its MFU is lower.
PUBLISHED_N_EMBD = 768

# Prediction errors of the published runs that set no constant: the median and the largest, rounded up.
USUAL_ERROR = 0.15
WORST_ERROR = 0.40

# Fraction of a link's bandwidth that a ring all-reduce reaches. Measured between two H100 over NVLink: 376 of 450 GB/s
# (NVIDIA/nccl, issue 1264); a little less is assumed for more GPUs, and the same for PCIe.
LINK_EFFICIENCY = 0.80
# Fraction of the data sheet's memory that the driver reports, and the part of it that tensors cannot use: CUDA's
# context, loaded kernels and NCCL's buffers. Both are assumed.
REPORTED_MEMORY = 0.98
CONTEXT_BYTES = 2**30
# Fraction of a micro-step that is its backward pass, which takes twice as long as the forward pass.
BACKWARD_FRACTION = 2 / 3

# Bytes of one number.
FLOAT32 = 4
BFLOAT16 = 2  # or float16, on GPUs before Ampere

# ------------------------------------------------------------------------- the prediction


class DoesNotFit(UserError):
    """Not even the smallest micro-batch fits in the memory of the cards."""


class CardGroup(NamedTuple):
    """GPUs of one kind, among those that a prediction is for."""

    count: int
    name: str  # in system.cards.CARDS
    card: Card
    hour_usd: float | None = None  # price of each, if --card names it


@dataclass(frozen=True)
class Prediction:
    """One optimizer step on `ranks` GPUs. Times are in seconds."""

    groups: tuple[CardGroup, ...]  # the GPUs, by kind
    ranks: int  # GPUs
    parameters: int
    micro_batch_size: int  # sequences in one forward pass of one GPU
    micro_steps: int  # forward and backward passes of one GPU in a step
    memory_bytes: int  # of one GPU
    memory_gb: int  # that the smallest GPU has
    compute_s: float  # all micro-steps and the optimizer's update
    all_reduce_s: float  # of the gradients, the part that the backward pass does not hide
    weight_broadcast_s: float  # ZeRO-1 only: each GPU sends the weights that it has updated to all others
    step_s: float  # the sum of the three above
    tokens_per_second: float  # of all GPUs
    mfu: float  # of the whole step; recomputed FLOPs do not count


def predict(cfg: TrainConfig, cards: str) -> Prediction:
    """Time and memory of one step on `cards`, such as "8xH100" or "2080Ti+3090".

    Raises UserError for cards that are not known and for float32, and DoesNotFit if not even one sequence fits.
    """
    groups = find_cards(cards)
    ranks = sum(group.count for group in groups)
    require(cfg.dtype != "float32", "--card predicts training in bfloat16 or float16; leave out --dtype float32")

    # On the meta device the model has shapes but no data.
    with torch.device("meta"):
        model = GPT(cfg.model)
    parameters = model.num_params()
    weight_size = bytes_per_weight(cfg, groups)

    # The memory follows from the micro-batch.
    def memory_of(micro_batch_size: int) -> int:
        return memory_bytes(cfg, model, ranks, weight_size, micro_batch_size)

    memory_gb = min(group.card.gb for group in groups)
    B = choose_micro_batch_size(cfg, ranks, memory_of, int(REPORTED_MEMORY * memory_gb * 2**30))
    if not B:
        asked = "one sequence" if cfg.micro_batch_size == "auto" else f"--micro-batch-size {cfg.micro_batch_size}"
        problem = f"{cards}: {asked} of {cfg.sequence_length} tokens would not fit in {memory_gb} GB"
        raise DoesNotFit(f"{problem}; use a smaller one, --recompute or a larger card")
    micro_steps = cfg.sequences_per_step // ranks // B

    # Compute: the GPUs share the step's tokens evenly, and all wait for the slowest one.
    flops_per_token = model.flops_per_token(cfg.sequence_length)
    peak_flops = sum(group.count * group.card.tflops * 1e12 for group in groups)
    flops = cfg.total_batch_size / ranks * (flops_per_token + recomputed_flops_per_token(cfg, model))
    compute_s = max(flops / (card.tflops * 1e12 * achieved_mfu(cfg, name)) for _, name, card, _ in groups)

    # Communication: none on one GPU. With several, all wait for the slowest link.
    link = min(link_bytes_per_second(group.card) for group in groups)
    all_reduce_s = weight_broadcast_s = 0.0
    if ranks > 1:
        gradient_bytes = weight_size * parameters
        embedding_bytes = weight_size * cfg.model.vocab_size * cfg.model.n_embd
        # The last backward pass hides the all-reduce, except that of the embedding's gradient, which comes last.
        backward_s = BACKWARD_FRACTION * compute_s / micro_steps
        all_reduce_s = max(
            ring_all_reduce_s(embedding_bytes, ranks, link),
            ring_all_reduce_s(gradient_bytes, ranks, link) - backward_s,
        )
        match cfg.zero_stage:
            case 0:
                weight_broadcast_s = 0.0
            case 1:
                weight_broadcast_s = FLOAT32 * parameters / link
            case _:
                raise ValueError(f"zero_stage {cfg.zero_stage}: what it sends is not counted")

    step_s = compute_s + all_reduce_s + weight_broadcast_s
    return Prediction(
        groups=groups,
        ranks=ranks,
        parameters=parameters,
        micro_batch_size=B,
        micro_steps=micro_steps,
        memory_bytes=memory_of(B),
        memory_gb=memory_gb,
        compute_s=compute_s,
        all_reduce_s=all_reduce_s,
        weight_broadcast_s=weight_broadcast_s,
        step_s=step_s,
        tokens_per_second=cfg.total_batch_size / step_s,
        mfu=cfg.total_batch_size * flops_per_token / (peak_flops * step_s),
    )


def find_cards(text: str) -> tuple[CardGroup, ...]:
    """The GPUs of one kind, "8xH100", or of several, "2080Ti+3090". Each kind may have its price, in dollars for an
    hour of one GPU: "2080Ti@0.08+2x3090@0.22". Raises UserError for an unknown card or a bad price."""
    groups = []
    for part in text.split("+"):
        # "2x3090@0.22" is a count and a name, then a price.
        name, at, price = part.partition("@")
        is_price = re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*", price)
        require(is_price or not at, f"--card {text!r}: {price!r} is not a price in dollars; write it as in 3090@0.22")
        groups.append(CardGroup(*find_card(name), float(price) if at else None))
    return tuple(groups)


def find_card(text: str) -> tuple[int, str, Card]:
    """(count, name, card) of "8xH100", "2x A100-80GB" or "4090". Raises UserError for a name that is not known, with
    the nearest names first, and for one that two cards share."""
    # Each card is known by its name, and by its name followed by its memory.
    known = {}
    for name, card in CARDS.items():
        if card.gb:
            known[normalize_name(name)] = name
            known[normalize_name(name) + f"{card.gb}gb"] = name

    # An optional count, then the name.
    count, asked = re.fullmatch(r"(?:([1-9][0-9]{0,3})\s*x\s*)?(.*)", " ".join(text.split())).groups()
    found = known.get(normalize_name(asked))
    if found:
        return int(count or 1), found, CARDS[found]

    # Some cards are sold with two sizes of memory, and which one it is decides what fits.
    for name, card in CARDS.items():
        if not card.gb and normalize_name(name) == normalize_name(asked):
            sizes = [other for other in CARDS if other.startswith(f"{name}-")]
            raise UserError(f"--card {text!r} has several sizes of memory; use {_as_typed(count, sizes)}")

    raise UserError(describe_unknown_card(text, count, asked))


def describe_unknown_card(text: str, count: str | None, asked: str) -> str:
    """The message about a card that is not in CARDS: the names nearest to `asked`, then all names by architecture."""
    # Names that begin like the unknown one come first: for a 3090 Ti the 3090, then the 3080 Ti.
    names = {normalize_name(name): name for name, card in CARDS.items() if card.gb}
    key = normalize_name(asked)
    similar = difflib.get_close_matches(key, names, n=10, cutoff=0.5)
    similar.sort(key=lambda other: shared_beginning(other, key), reverse=True)
    nearest = [names[other] for other in similar[:3]]
    guess = f"; did you mean {_as_typed(count, nearest)}?" if nearest else ""

    # The list is shorter without "RTX", which --card does not need.
    lines = [f"--card {text!r} is not known{guess}", "Write one of these names, as in 4090, 8xH100 or 2080Ti+3090:"]
    for name, architecture in reversed(ARCHITECTURES.items()):
        lines.append(f"  {name}: {', '.join(card.removeprefix('RTX ') for card in architecture.cards)}")
    return "\n".join(lines)


def normalize_name(name: str) -> str:
    """A card's name without what does not distinguish cards (vendors, product lines, punctuation): "NVIDIA H100 80GB
    SXM" becomes "h10080gb"."""
    return re.sub(r"nvidia|geforce|tesla|rtx|sxm\d?|hbm\d?e?|[\s_-]", "", name.lower())


def shared_beginning(a: str, b: str) -> int:
    """With how many equal characters two texts begin."""
    return sum(a.startswith(b[:length]) for length in range(1, len(b) + 1))


def _as_typed(count: str | None, names: list[str]) -> str:
    """The names as --card takes them, without spaces that a shell would split at: "8xH100-PCIe or 8xH100-NVL"."""
    prefix = f"{count}x" if count else ""
    return " or ".join(f"{prefix}{name.replace(' ', '-')}" for name in names)


# ------------------------------------------------------------------------- time


def achieved_mfu(cfg: TrainConfig, card_name: str) -> float:
    """The fraction of its peak FLOP/s that this card reaches."""
    for architecture in ARCHITECTURES.values():
        if card_name in architecture.cards:
            return architecture.mfu.compiled if cfg.compile else architecture.mfu.eager
    raise ValueError(f"{card_name} is in no architecture: add it to ARCHITECTURES in training/predict.py")


def recomputed_flops_per_token(cfg: TrainConfig, model: GPT) -> float:
    """FLOPs per token that --recompute adds: one more forward pass of all blocks, a third of their three passes."""
    if not cfg.recompute:
        return 0.0
    # A forward pass: two FLOPs per weight, and the products of the attention, which has no weights.
    blocks = sum(p.numel() for p in model.transformer.h.parameters())
    attention = 4 * cfg.model.n_layer * cfg.model.n_embd * cfg.sequence_length  # scores, and their sums of values
    return 2 * blocks + attention


def link_bytes_per_second(card: Card) -> float:
    """Bytes per second from this card to the other GPUs of the machine, in each direction."""
    return LINK_EFFICIENCY * card.link_gb_s * 1e9


def ring_all_reduce_s(size: int, ranks: int, link: float) -> float:
    """Seconds to sum `size` bytes over all GPUs in a ring, at `link` bytes per second: each link carries the bytes
    twice, less each GPU's share."""
    return 2 * (ranks - 1) / ranks * size / link


# ------------------------------------------------------------------------- memory
# L: n_layer, C: n_embd, V: vocab_size.


def bytes_per_weight(cfg: TrainConfig, groups: tuple[CardGroup, ...]) -> int:
    """Bytes of one number of the model's weights, of their gradients, and of the residual stream. One GPU without
    bfloat16 is enough for float16, and float32 weights, on all."""
    match cfg.weights:
        case "float32":
            return FLOAT32
        case "bfloat16":
            return FLOAT32 if any(group.name in BEFORE_AMPERE for group in groups) else BFLOAT16
        case _:
            raise ValueError(f"weights {cfg.weights!r}: their bytes are not counted")


def memory_bytes(cfg: TrainConfig, model: GPT, ranks: int, weight_size: int, micro_batch_size: int) -> int:
    """Bytes on one GPU when micro-steps of that many sequences run."""
    tokens = micro_batch_size * cfg.sequence_length

    # Each parameter takes a weight and a gradient, which lives in DDP's bucket if there are several ranks, and a second
    # copy: autocast's bfloat16 copy of a float32 weight, or the float32 master weight of a bfloat16 weight.
    other_copy = BFLOAT16 if weight_size == FLOAT32 else FLOAT32
    state = (2 * weight_size + other_copy) * model.num_params() + optimizer_bytes(cfg, model, ranks)

    # The head processes its rows in chunks. For one chunk at a time it holds the logits (rows, V), which their gradient
    # overwrites; for all chunks it holds the float32 sum (V, C) of the gradients of its weight. Without torch.compile,
    # the softmax and its gradient take four more float32 tensors of the shape of the logits.
    V, C = cfg.model.vocab_size, cfg.model.n_embd
    logit = BFLOAT16 if cfg.compile else BFLOAT16 + 4 * FLOAT32
    rows = tokens // num_chunks(tokens, "cuda")
    head = rows * V * logit + FLOAT32 * V * C

    return state + tokens * activation_bytes_per_token(cfg, weight_size) + head


def optimizer_bytes(cfg: TrainConfig, model: GPT, ranks: int) -> int:
    """Bytes of optimizer state on the GPU that has the most, from OPTIMIZER_STATE in training/optim.py, the table by
    which training creates the state. With ZeRO-1 each rank has only the state of its own share of the parameters."""
    # Over how many ranks the state is split.
    match cfg.zero_stage:
        case 0:
            shards = 1
        case 1:
            shards = ranks
        case _:
            raise ValueError(f"zero_stage {cfg.zero_stage}: what it keeps is not counted")

    # ZeroRedundancyOptimizer assigns the parameters of a group in descending order of size, each to the rank with the
    # fewest numbers so far. It splits no parameter: if the embedding is larger than a rank's share, the rank that has
    # it holds more than the others.
    state_numbers = [0] * shards  # on each rank
    for name, groups in optim.parameter_groups(dict(model.named_parameters()), cfg).items():
        parameter_numbers = [0] * shards  # of this optimizer, on each rank
        for group in groups:
            for p in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
                rank = parameter_numbers.index(min(parameter_numbers))
                parameter_numbers[rank] += p.numel()
                state_numbers[rank] += optim.state_numel(optim.optimizer_class(name), [p])
    return FLOAT32 * max(state_numbers)


def activation_bytes_per_token(cfg: TrainConfig, residual_size: int) -> int:
    """Bytes per token that the forward pass keeps for the backward pass; residual_size: bytes of a number of
    the residual stream, which autocast leaves in the embedding's precision.

    | in one block              | numbers per token | bytes of each |
    |---------------------------|-------------------|---------------|
    | inputs of the two norms   | 2 C               | residual_size |
    | outputs of the two norms  | 2 C               | 2             |
    | queries, keys, values     | 3 C               | 2             |
    | output of the attention   | C                 | 2             |
    | rotated queries and keys  | 2 C, rotary only  | 2             |
    | input of the activation   | 4 C               | 2             |
    | output of the activation  | 4 C               | 2             |
    """
    # The sum of the table's rows.
    L, C = cfg.model.n_layer, cfg.model.n_embd
    bfloat16_numbers = (2 + 3 + 1) * C + rotated_numbers(cfg.model) + mlp_numbers(cfg.model)
    block = 2 * C * residual_size + bfloat16_numbers * BFLOAT16

    # The head keeps its input and its input's gradient in float32.
    head = 2 * C * FLOAT32

    # With --recompute every block keeps only its input, and the block whose backward pass runs keeps everything.
    blocks = L * C * residual_size + block if cfg.recompute else L * block
    return blocks + head


def rotated_numbers(config: GPTConfig) -> int:
    """Numbers per token kept of the rotated queries and keys."""
    match config.positions:
        case "learned":
            return 0
        case "rope" | "half_rope":
            return 2 * config.n_embd
        case _:
            raise ValueError(f"positions {config.positions!r}: what they keep for the backward pass is not counted")


def mlp_numbers(config: GPTConfig) -> int:
    """Numbers per token kept of the activation function: its input and its output, each four times as wide as C."""
    match config.activation:
        case "gelu" | "gelu_erf" | "relu2":
            return (4 + 4) * config.n_embd
        case _:
            raise ValueError(f"activation {config.activation!r}: what it keeps for the backward pass is not counted")


def choose_micro_batch_size(cfg: TrainConfig, ranks: int, memory_of: Callable[[int], int], card_bytes: int) -> int:
    """Sequences in a forward pass: --micro-batch-size, or what its `auto` would find on cards with this much memory; 0
    if not even that fits. Raises UserError if the step's sequences do not split evenly over the ranks and the
    micro-batches."""
    # `auto` leaves memory free and tries several sizes; a number that was asked for may fill the card.
    usable_bytes = card_bytes - CONTEXT_BYTES
    if cfg.micro_batch_size == "auto":
        usable_bytes -= microbatch.ballast_bytes(card_bytes)
        candidates = microbatch.halving_candidates(microbatch.sequences_per_rank(cfg, ranks))
    else:
        candidates = [microbatch.check_micro_batch_size(cfg, ranks, cfg.micro_batch_size)]
    return next((B for B in candidates if memory_of(B) <= usable_bytes), 0)


# ------------------------------------------------------------------------- the report


def price_per_gpu(p: Prediction, gpu_hour_usd: float) -> float:
    """Dollars for an hour of one GPU, on average: the price that --card names for its kind, or else --gpu-hour-usd."""
    # The price of each kind of GPU.
    prices = [gpu_hour_usd if group.hour_usd is None else group.hour_usd for group in p.groups]

    # Without the price of one kind there is no price: the sum of the others would look complete.
    if not all(prices):
        return 0.0
    return sum(group.count * price for group, price in zip(p.groups, prices, strict=True)) / p.ranks


def report(cfg: TrainConfig, p: Prediction, max_steps: int) -> str:
    """What --dry-run --card prints about a run of max_steps."""
    # Time and price of the whole run, without evaluation.
    seconds = max_steps * p.step_s
    gpu_hours = seconds / 3600 * p.ranks
    cost = format_cost(seconds, p.ranks, price_per_gpu(p, cfg.gpu_hour_usd))

    # What is predicted, on what: memory, time and price.
    cards = " + ".join(f"{group.count} x {group.name}" for group in p.groups)
    split = f"{p.ranks} x {p.micro_steps} x {p.micro_batch_size} x {cfg.sequence_length}"
    lines = [
        f"{cfg.preset}: {p.parameters:,} parameters on {cards}; this is a prediction, nothing was run",
        f"predicted memory per card {p.memory_bytes / 2**30:.1f} of {p.memory_gb} GB with a micro-batch of "
        f"{p.micro_batch_size} (ranks x micro-steps x sequences x T: {split})",
        f"predicted step {p.step_s * 1e3:,.0f} ms (compute {p.compute_s * 1e3:,.0f}, waiting for gradients "
        f"{p.all_reduce_s * 1e3:,.0f}, sending weights {p.weight_broadcast_s * 1e3:,.0f}): "
        f"{p.tokens_per_second:,.0f} tokens/s, MFU {p.mfu:.0%}; excluding evaluation",
        f"predicted for {max_steps} steps: {format_duration(seconds)}, {gpu_hours:,.1f} GPU-hours; {cost}",
        f"of the published runs, half are within {USUAL_ERROR:.0%} of their prediction, all within {WORST_ERROR:.0%} "
        "(docs/costs.md); to measure, use --dry-run on the card itself",
    ]

    # A plain name may be meant for a slower card: say which one was taken.
    for group in p.groups:
        forms = other_forms(group.name)
        if forms:
            others = _as_typed(str(group.count) if group.count > 1 else None, forms)
            lines.append(f"{group.name} is taken as the SXM card; another form is slower: --card {others}")

    # Say what makes this prediction less certain than those of the published runs.
    for group in p.groups:
        if group.name not in PUBLISHED_CARDS:
            lines.append(f"no published run used this card ({group.name}): its MFU is assumed (docs/costs.md)")
    if len(p.groups) > 1:
        slowest = max(p.groups, key=lambda group: 1 / (group.card.tflops * achieved_mfu(cfg, group.name))).name
        smallest = min(p.groups, key=lambda group: group.card.gb).name
        lines.append(f"all cards wait for the slowest ({slowest}) and use the micro-batch of the smallest ({smallest})")
    if cfg.model.n_embd < PUBLISHED_N_EMBD:
        lines.append(f"a network of fewer than {PUBLISHED_N_EMBD} channels reaches a lower MFU than is predicted")
    if cfg.init_from not in ("scratch", "gpt2"):
        lines.append(f"the predicted network is that of the --model flags, not that of --init-from {cfg.init_from}")
    if p.ranks > 8:
        lines.append(f"all {p.ranks} cards are assumed to be in one machine; a network between machines is slower")
    return "\n".join(lines)
