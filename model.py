"""GPT-2 in one module: token and position embeddings, pre-norm blocks of attention and MLP, a tied head.

    model = GPT(GPTConfig())                        # GPT-2 124M, random weights
    logits, _ = model(idx)                          # idx (B, T) int64 -> (B, T, vocab_size)
    _, loss = model(idx, targets)                   # mean cross-entropy in nats per token
    out = model.generate(idx, 64, temperature=0.8)  # (B, T + at most 64), through the key-value cache

Shapes: B batch, T time, C channels (n_embd), nh heads, hs head size (C = nh * hs), V vocabulary.

    idx (B, T)            token ids
      |  wte + wpe        the embeddings of the token and of its position (with RoPE, the attention rotates instead)
    x (B, T, C)           the residual stream
      |  n_layer blocks   x = x + attn(ln_1(x)): each position reads from itself and the earlier ones
      |                   x = x + mlp(ln_2(x)): each position by itself
    x (B, T, C)           what `hidden` returns
      |  ln_f, lm_head    the final norm, and one score for each token of the vocabulary
    logits (B, T, V)      at each position, for the token after it

train_gpt2.py trains this network, infer.py and hellaswag.py run it, hub.py converts it. An export may contain a copy of
this file, so this file imports nothing of the project. Training compiles the blocks, and computes the logits of a chunk
of positions at a time, because all logits together need too much memory (training/head.py).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

VOCAB_SIZE = 50257  # ids in GPT-2's encoding; higher ids only pad the vocabulary to a round size
EOT = VOCAB_SIZE - 1  # <|endoftext|>, the last of them
# A network may have more rows than GPT-2 has tokens: they pad to a round number, of at most a multiple of 1,024
# (Megatron on 8 GPUs).
MAX_ROWS = 51_200

# The attention kernels for texts whose length changes from call to call, as in sampling. torch prefers cuDNN's kernel
# on Hopper and Blackwell. That kernel takes 0.4 s to plan each new length (modelscope/FunASR#3704), so this list leaves
# it out.
ANY_LENGTH_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def has_gpt2_tokens(vocab_size: int) -> bool:
    """Whether a network with so many rows in its embedding can have been trained on GPT-2's tokens."""
    return VOCAB_SIZE <= vocab_size <= MAX_ROWS


def with_help(default: Any, help_text: str) -> Any:
    """A field of GPTConfig with the help text of its flag (python train_gpt2.py -h)."""
    return field(default=default, metadata={"help": help_text})


def known_settings(config_class: type, saved: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The saved settings that are fields of this dataclass. Raises ValueError for any other saved setting that is on:
    the same weights would compute, or train, something else.

    `defaults` holds the default values of the version that wrote the file. A setting that equals its default is off.
    Older files store no defaults. In those files a false value is off.
    """
    known = {f.name for f in fields(config_class)}
    for name in saved.keys() - known:
        is_off = saved[name] == defaults[name] if name in defaults else not saved[name]
        if not is_off:
            raise ValueError(f"unknown setting {name}={saved[name]!r:.99}: use the version that saved it")
    return {name: saved[name] for name in saved.keys() & known}


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the network. The defaults are GPT-2 124M. Later recipes use the fields from `positions` on."""

    block_size: int = with_help(1024, "longest sequence, in tokens")
    vocab_size: int = with_help(VOCAB_SIZE, "rows of the token embedding")
    n_layer: int = with_help(12, "blocks")
    n_head: int = with_help(12, "attention heads of a block")
    n_embd: int = with_help(768, "channels of the residual stream")
    bias: bool = with_help(True, "in linear layers and LayerNorms")
    tied_head: bool = with_help(True, "the head shares the token embedding's weight")

    positions: Literal["learned", "rope"] = with_help(
        "learned", "learned: an embedding of each position; rope: rotations of queries and keys"
    )
    norm: Literal["layernorm", "rmsnorm"] = with_help("layernorm", "rmsnorm: without a gain")
    embedding_norm: bool = with_help(False, "the same norm on the token embedding, too, as in modded-nanogpt")
    activation: Literal["gelu", "gelu_erf", "relu2"] = with_help(
        "gelu", "gelu: tanh approximation, GPT-2's; gelu_erf: exact, nanoGPT's; relu2: squared ReLU, modded-nanogpt's"
    )
    qk_norm: bool = with_help(False, "RMSNorm on queries and keys")
    init_std: float = with_help(
        0.02, "standard deviation of the first weights; 0: 1 / sqrt(3 n_embd), torch's for a linear layer of this width"
    )
    zero_init_projections: bool = with_help(False, "the blocks' output projections and an untied head start at zero")

    @property
    def head_size(self) -> int:
        """Channels of each head (hs)."""
        return self.n_embd // self.n_head

    @staticmethod
    def from_dict(saved: dict[str, Any], defaults: dict[str, Any] | None = None) -> "GPTConfig":
        """The config stored in a file. defaults: the defaults of the version that saved the file, if the file has them.
        Raises ValueError or TypeError if this version cannot build the network."""
        # A setting that an old checkpoint lacks gets its default. n_head is required, because no tensor's shape reveals
        # it. Before embedding_norm existed, rmsnorm also normalized the embedding.
        if "n_head" not in saved:
            raise ValueError("the config has no n_head")
        embedding_norm = saved.get("norm") == "rmsnorm"
        known = known_settings(GPTConfig, {"embedding_norm": embedding_norm, **saved}, defaults or {})
        return GPTConfig(**known)

    def __post_init__(self):
        """Raises ValueError, with the value and the rule, if a network cannot have this shape."""
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} must be at least 1")
        for name, choices in (("positions", ("learned", "rope")), ("norm", NORMS), ("activation", ACTIVATIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} {getattr(self, name)!r:.99} must be one of {', '.join(choices)}")

        if not self.init_std >= 0:
            raise ValueError(f"init_std {self.init_std} must be at least 0")

        # Each head gets the same number of channels, and RoPE needs pairs of them.
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(f"rope rotates pairs of channels, but a head has {self.head_size}")


# ------------------------------------------------------------------------- positions


def rope_table(config: GPTConfig) -> Tensor:
    """Cosine and sine (2, block_size, hs / 2) of the rotation angle of each channel pair at each position. The pairs
    have wavelengths from 2 pi to nearly 10,000 * 2 pi positions (Su et al. 2021)."""
    # The table is on the CPU even if the model is built on the meta device: checkpoints do not store the table, so
    # nothing would fill it in later.
    hs = config.head_size
    frequencies = 10_000.0 ** (-torch.arange(0, hs, 2, device="cpu").float() / hs)  # radians per position (hs / 2,)
    positions = torch.arange(config.block_size, device="cpu").float()
    angles = torch.outer(positions, frequencies)  # (block_size, hs / 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): rotate the channel pairs of x (B, T, nh, hs) by minus the angles
    whose cosine and sine are in cos_sin (2, T, 1, hs / 2). Channel i is paired with channel i + hs / 2. Only
    differences of angles matter, so the sign of the angles is free. This sign is modded-nanogpt's.

    Queries and keys turn with their positions, so the score of a query and a key depends on the distance between them.
    """
    cos, sin = cos_sin.to(x.dtype)  # each (T, 1, hs / 2), the same for all heads
    a, b = x.chunk(2, dim=-1)  # (B, T, nh, hs) -> two of (B, T, nh, hs / 2)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


# ------------------------------------------------------------------------- norms and activations


def rms_norm(x: Tensor) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) without a gain, over the last dimension of x. The result has the precision of
    x; only the statistics are in float32."""
    # Since torch 2.12, autocast on a GPU makes rms_norm return float32. The residual stream of record 8 starts with a
    # norm, so the whole stream would be float32. modded-nanogpt used torch 2.5, where the precision of x stays.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, x.shape[-1:])


class RMSNorm(nn.Module):
    """`rms_norm` as a module without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return rms_norm(x)


# {GPTConfig.norm: a function that builds a norm over the channels}
NORMS: dict[str, Callable[[GPTConfig], nn.Module]] = {
    "layernorm": lambda config: nn.LayerNorm(config.n_embd, bias=config.bias),
    "rmsnorm": lambda config: RMSNorm(),
}


def relu_squared(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021, Primer)."""
    # A product keeps the precision of x. square() is a power, which autocast on a GPU computes and returns in float32.
    positive = F.relu(x)
    return positive * positive


# {GPTConfig.activation: the function between the two layers of the MLP}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),  # what OpenAI's GPT-2 was trained with
    "gelu_erf": F.gelu,  # exact (Hendrycks and Gimpel 2016)
    "relu2": relu_squared,
}


# ------------------------------------------------------------------------- the network


class Embedding(nn.Embedding):
    """nn.Embedding that draws no random weights on the meta device, because torch would import its compiler for them,
    which takes seconds."""

    def reset_parameters(self) -> None:
        """Draw random weights, which GPT replaces, but none on the meta device."""
        if not self.weight.is_meta:
            super().reset_parameters()


class StackedLinear(nn.Linear):
    """Several linear layers of the same input in one matrix product. The weight stacks their matrices; matrix_rows has
    the number of rows of each."""

    def __init__(self, in_features: int, matrix_rows: tuple[int, ...], bias: bool):
        super().__init__(in_features, sum(matrix_rows), bias)
        self.matrix_rows = matrix_rows

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """(..., in_features) -> one (..., rows) for each matrix"""
        return super().forward(x).split(self.matrix_rows, dim=-1)


class Projection(nn.Linear):
    """A linear layer whose output is added to the residual stream: GPT draws its first weights smaller."""


class KVCache:
    """Keys and values of the positions already seen, for up to `max_len` positions.

    With the cache, generating a token computes one position instead of the whole text. The earlier positions cannot
    change, because no position attends to a later one.
    """

    def __init__(self, n_layer: int, max_len: int):
        self.n_layer, self.max_len = n_layer, max_len
        # (n_layer, B, nh, max_len, hs) each, and empty before the first append. Keys and values are separate tensors,
        # because autograd rejects in-place writes to two views of one tensor.
        self.k = self.v = torch.empty(0)
        self.length = 0  # positions filled; GPT.hidden advances it after the last layer's append

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, nh, T, hs) of one layer. Returns views of all keys and values so far (B, nh, length + T, hs)
        in the precision of the cache, which on a CPU is float32: attention to long texts is faster in float32 there."""
        if self.k.numel() == 0:
            B, nh, _, hs = k.shape
            dtype = torch.float32 if k.device.type == "cpu" else k.dtype
            self.k = k.new_zeros(self.n_layer, B, nh, self.max_len, hs, dtype=dtype)
            self.v = torch.zeros_like(self.k)
        start = self.length
        end = start + k.size(2)
        self.k[layer, :, :, start:end] = k
        self.v[layer, :, :, start:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017). One matrix product gives queries, keys and values of all heads."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.config = config

        C = config.n_embd
        self.c_attn = StackedLinear(C, (C, C, C), bias=config.bias)  # queries, keys, values
        self.c_proj = Projection(C, C, bias=config.bias)

    def forward(self, x: Tensor, cos_sin: Tensor | None, cache: KVCache | None) -> Tensor:
        """x (B, T, C) -> (B, T, C). cos_sin: RoPE's angles (2, T, 1, hs / 2), if used. cache: keys and values of
        earlier positions."""
        B, T, C = x.shape

        # The query, key and value of each head at each position.
        # (B, T, C) -> three of (B, T, C) -> three of (B, T, nh, hs)
        q, k, v = self.c_attn(x)
        q, k, v = (t.view(B, T, -1, self.config.head_size) for t in (q, k, v))

        # Normalized queries and keys keep the attention scores in bounds (QK-norm, Henry et al. 2020).
        if self.config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)

        # RoPE. Without it, the positions are in x already.
        if cos_sin is not None:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)

        # Each head is computed alone, like another sequence of the batch: (B, T, nh, hs) -> (B, nh, T, hs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))

        # With a cache, the new positions attend to the S = length + T positions seen so far. The cache may have another
        # precision.
        if cache is not None:
            k, v = cache.append(self.layer, k, v)  # (B, nh, S, hs)
            q = q.to(k.dtype)

        # softmax(q @ k^T / sqrt(hs)) @ v. A fused kernel (FlashAttention, Dao et al. 2022) never holds all (T, S)
        # scores. The mask is causal; a single new position attends to everything.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=T > 1)

        # Put the outputs of the heads side by side: (B, nh, T, hs) -> (B, T, nh, hs) -> (B, T, C)
        y = y.transpose(1, 2).reshape(B, T, C)
        if cache is not None:
            y = y.to(x.dtype)
        return self.c_proj(y)


class MLP(nn.Module):
    """Two linear layers with the activation function between them, applied to each position alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        # The inside is four times as wide, as in the original transformer.
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = Projection(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 4C) -> (B, T, C)"""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """One layer of the transformer: attention, then the MLP."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        build_norm = NORMS[config.norm]
        self.ln_1 = build_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = build_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor | None, cache: KVCache | None) -> Tensor:
        """x (B, T, C) -> (B, T, C). cos_sin and cache go to Attention."""
        # Pre-norm: each part reads a normalized copy of the residual stream and adds to the stream itself.
        x = x + self.attn(self.ln_1(x), cos_sin, cache)
        return x + self.mlp(self.ln_2(x))


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each target, in nats: logits (N, V), targets (N,) int64 -> (N,); 0 for a target of -100."""
    # cross-entropy = logsumexp(logits) - logit of the target. The compiled gradient of this form needs no sum over V.
    # F.cross_entropy's gradient needs one, which is one more pass over the logits.
    return logits.logsumexp(-1) * (targets >= 0) + F.nll_loss(logits, targets, reduction="none")


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019). Parameter names match the public checkpoints."""

    transformer: Any  # an nn.ModuleDict; its modules are read as attributes: transformer.wte
    cos_sin: Tensor  # RoPE's angles (2, block_size, hs / 2), if used
    head_mean: Tensor | None

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # True: keep only each block's input, and run the block again in the backward pass

        # Embeddings, blocks and final norm have the names of the public checkpoints. ln_0 is modded-nanogpt's:
        # GPT-2 has no norm of the embedding.
        build_norm = NORMS[config.norm]
        self.transformer = nn.ModuleDict()
        self.transformer.wte = Embedding(config.vocab_size, config.n_embd)
        if config.positions == "learned":
            self.transformer.wpe = Embedding(config.block_size, config.n_embd)
        self.transformer.ln_0 = build_norm(config) if config.embedding_norm else nn.Identity()
        self.transformer.h = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.transformer.ln_f = build_norm(config)

        # The head, which GPT-2 ties to the token embedding (Press and Wolf 2017): both map between tokens and channels.
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        # None until round_to is called. After that, the mean row of the head's weight, (C,) float32.
        self.register_buffer("head_mean", None, persistent=False)

        # RoPE's angles follow from the config, so checkpoints do not store them.
        if config.positions == "rope":
            self.register_buffer("cos_sin", rope_table(config), persistent=False)  # (2, block_size, hs / 2)
        if not self.lm_head.weight.is_meta:
            self._init_weights()

    def _init_weights(self) -> None:
        """Draw random weights as in GPT-2, unless the settings say otherwise. A seed gives the same weights only as
        long as the order of the random draws stays the same."""
        config = self.config

        # All matrices and embeddings, then zero biases.
        std = config.init_std or (3 * config.n_embd) ** -0.5
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        # Each layer adds the outputs of two projections to the residual stream. Smaller weights in deeper networks keep
        # the variance of the stream independent of the depth. modded-nanogpt starts the projections and the head at
        # zero.
        for module in self.modules():
            if isinstance(module, Projection):
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * config.n_layer))
                if config.zero_init_projections:
                    nn.init.zeros_(module.weight)
        if config.zero_init_projections and not config.tied_head:
            nn.init.zeros_(self.lm_head.weight)

        # A norm on the embedding undoes the scale of the embedding, which then only sets how fast the embedding learns.
        # modded-nanogpt's standard deviation is 1. A tied head uses the embedding for the logits, so a tied embedding
        # keeps init_std.
        if config.embedding_norm and not config.tied_head:
            nn.init.normal_(self.transformer.wte.weight)

    @classmethod
    def without_memory(cls, config: GPTConfig) -> "GPT":
        """A model on the meta device, whose parameters have shapes but no values."""
        with torch.device("meta"):
            return cls(config)

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """A model, in eval mode, that uses the float32 tensors of `state` directly: no random init, no copy. Raises
        RuntimeError if they do not match `config`."""
        model = cls.without_memory(config)
        model.load_state_dict(state, assign=True)
        if config.tied_head:
            model.lm_head.weight = model.transformer.wte.weight  # assign=True has replaced both
        return model.eval()

    def num_params(self) -> int:
        """Total number of parameters, a tied head counted once (124,439,808 for GPT-2 124M)."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int) -> float:
        """Training FLOPs per token: 6 per weight of a matmul (the head counts, embedding lookups do not) plus
        12 * n_layer * n_embd * T for attention (PaLM, Chowdhery et al. 2022, appendix B)."""
        in_matmuls = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * in_matmuls + 12 * self.config.n_layer * self.config.n_embd * T

    def hidden(self, idx: Tensor, cache: KVCache | None = None, blocks: Sequence[Callable] = ()) -> Tensor:
        """Hidden states (B, T, C) for idx (B, T) int64, before the final norm; pass them to `logits`. cache: in
        sampling, the keys and values of the text before idx. blocks: in training, the compiled versions of the model's
        blocks."""
        # The T new positions come after the `start` cached ones. Attention has a causal mask for a whole text, and none
        # for a single position.
        T = idx.size(1)
        start = cache.length if cache is not None else 0
        end = start + T
        assert end <= self.config.block_size, f"{end} positions, block_size {self.config.block_size}"
        assert start == 0 or T == 1, "after cached positions only one more at a time"

        # Learned positions are added here; RoPE is applied in the attention.
        x = self.transformer.ln_0(self.transformer.wte(idx))  # (B, T) -> (B, T, C)
        cos_sin = None
        if self.config.positions == "rope":
            cos_sin = self.cos_sin[:, start:end, None]  # (2, T, 1, hs / 2)
        else:
            x = x + self.transformer.wpe.weight[start:end]  # (T, C)

        for block in blocks or self.transformer.h:
            # To recompute, keep only the block's input. With a cache no block is recomputed, because a block that runs
            # twice would append to the cache twice.
            if self.recompute and cache is None and torch.is_grad_enabled():
                x = checkpoint(block, x, cos_sin, cache, use_reentrant=False)
            else:
                x = block(x, cos_sin, cache)

        # All layers have appended their keys and values.
        if cache is not None:
            cache.length = end
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) in float32 of hidden states (..., C). Everything that needs logits calls this function. To
        change the logits, as with a soft-cap, a bias or a scale, add a line here. A parameter that the line uses trains
        like any other."""
        return self.multiply_head(self.transformer.ln_f(x))

    def multiply_head(self, x: Tensor) -> Tensor:
        """x (..., C) times the head's weight: (..., V) in float32. In training, the product has autocast's precision.
        Without gradients it has float32, unless round_to has rounded the weights, because OpenAI's weights give logits
        near -100, where bfloat16 has steps of 0.5: a loss in bfloat16 is 0.01 too high."""
        weight, bias = self.lm_head.weight, self.lm_head.bias
        if torch.is_grad_enabled() and self.head_mean is None:
            return self.lm_head(x).float()
        with torch.autocast(x.device.type, enabled=False):
            if self.head_mean is None:
                return F.linear(x.float(), weight.float(), bias)
            # round_to has taken the mean off all rows of the weight. The mean adds one number to all logits of a
            # position.
            return self.lm_head(x.to(weight.dtype)).float() + (x.float() @ self.head_mean)[..., None]

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> (logits (B, T, V), None), or (None, mean cross-entropy) with targets.

        The loss is in nats per token. An untrained network gives all tokens about the same probability, so its loss is
        about ln(V). Targets of -100 are left out.
        """
        logits = self.logits(self.hidden(idx))
        if targets is None:
            return logits, None
        # (B, T, V) -> (B * T, V), (B, T) -> (B * T,)
        losses = token_losses(logits.flatten(0, 1), targets.flatten())
        return None, losses.sum() / (targets >= 0).sum()

    def round_to(self, dtype: torch.dtype) -> "GPT":
        """Round all weights to `dtype`, for inference only: a tied head becomes a copy. Returns the model."""
        # The rows of the head have a large mean in OpenAI's weights. Without the mean, the rows are smaller numbers,
        # and rounding changes them less.
        with torch.no_grad():
            weight = self.lm_head.weight.float()
            mean = weight.mean(0)  # (V, C) -> (C,)
            rounded = (weight - mean).to(dtype)
        self.to(dtype)
        self.lm_head.weight = nn.Parameter(rounded)
        self.head_mean = mean
        return self

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue idx (B, T) int64 to (B, T + n). The last four arguments go to Sampler.

        n is max_new_tokens, or less if every row has drawn <|endoftext|>. A row that draws <|endoftext|> before the
        others is filled with it: the new text of each row is what comes before its first EOT.
        """
        sampler = Sampler(temperature, top_k, top_p, generator)
        columns = [new_ids[:, None] for new_ids in stream(self, idx, max_new_tokens, sampler)]  # each (B, 1)
        return torch.cat((idx, *columns), dim=1)


# ------------------------------------------------------------------------- sampling


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn.

    temperature: divides the logits; 0 always takes the most likely token. top_k: draw from this many most likely
    tokens; None or 0 means all. top_p: draw from the smallest set of most likely tokens whose total probability reaches
    top_p (nucleus sampling, Holtzman et al. 2019); None means all. generator: the random generator, on the device of
    the logits; None means torch's global generator.
    """

    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self):
        """Raises ValueError for a number out of its range."""
        if not self.temperature >= 0:
            raise ValueError(f"temperature {self.temperature} must be at least 0")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must be at least 0")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must lie above 0 and up to 1")

    def draw(self, logits: Tensor) -> Tensor:
        """Ids (B,) drawn from logits (B, V)."""
        # Ids that only pad the vocabulary to a round size are never drawn. (B, V) -> (B, VOCAB_SIZE)
        logits = logits[:, :VOCAB_SIZE].float()
        if not logits.isfinite().all():
            raise FloatingPointError("the logits are not finite: the network's numbers overflow")

        # Temperature 0 is greedy. Below 1e-6 the probabilities are greedy, too, but the division would overflow
        # float32.
        if self.temperature < 1e-6:
            return logits.argmax(dim=-1)

        # Keep the k most likely ids, sorted from the most to the least likely. (B, VOCAB_SIZE) -> (B, k)
        logits, ids = logits.topk(min(self.top_k or VOCAB_SIZE, logits.size(-1)))

        # Low temperatures sharpen the distribution, high ones flatten it. (B, k)
        probs = F.softmax(logits / self.temperature, dim=-1)

        # Keep an id while the ids before it total less than top_p. So at least one id is always kept.
        if self.top_p is not None:
            total_before = probs.cumsum(dim=-1) - probs
            probs = probs.masked_fill(total_before >= self.top_p, 0.0)

        # Draw a place among the k (multinomial normalizes), then look up the id at that place. (B, k) -> (B, 1) -> (B,)
        place = torch.multinomial(probs, 1, generator=self.generator)
        return ids.gather(-1, place).squeeze(-1)


@torch.no_grad()
def stream(model: GPT, idx: Tensor, max_new_tokens: int, sampler: Sampler) -> Iterator[Tensor]:
    """Yield the next ids (B,) after idx (B, T) int64, up to max_new_tokens times.

    With GPT-2's vocabulary, a row that has drawn EOT yields EOT from there on, and the stream ends once every row has
    drawn it.

    T lies between 1 and the model's block_size. When the context is full, the newer half of the text is read again from
    position 0, so the text may outgrow block_size.
    """
    block_size = model.config.block_size
    can_end = has_gpt2_tokens(model.config.vocab_size)
    has_ended = torch.zeros(idx.size(0), dtype=torch.bool, device=idx.device)  # (B,)

    # A cache for the whole text, or for as much of it as the model reads at once.
    cache = KVCache(model.config.n_layer, min(idx.size(1) + max_new_tokens, block_size))

    # The ids that the cache does not hold yet: first the prompt, then each new id. (B, n)
    unread = idx
    for _ in range(max_new_tokens):
        # The context is full: empty the cache and read the newer half of the text again.
        if cache.length == block_size:
            cache.length = 0
            newer_half = max(1, block_size // 2)
            unread = idx[:, -newer_half:]

        # Only the last position predicts the next token. (B, n) -> (B, n, C) -> (B, C) -> (B, V)
        with sdpa_kernel(ANY_LENGTH_KERNELS):
            last_hidden = model.hidden(unread, cache)[:, -1]

        new_ids = sampler.draw(model.logits(last_hidden))
        if can_end:
            new_ids[has_ended] = EOT
            has_ended = new_ids == EOT

        # Append the new ids to the text, and read them next. (B,) -> (B, 1)
        unread = new_ids[:, None]
        idx = torch.cat((idx, unread), dim=1)
        yield new_ids
        if has_ended.all():
            return
