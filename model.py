"""GPT-2 in one module: token and position embeddings, pre-norm blocks of attention and MLP, a tied head.

    model = GPT(GPTConfig())                        # GPT-2 124M, random weights
    logits, _ = model(idx)                          # idx (B, T) int64 -> (B, T, vocab_size)
    _, loss = model(idx, targets)                   # mean cross-entropy in nats per token
    out = model.generate(idx, 64, temperature=0.8)  # (B, T + 64), through the key-value cache

Shapes: B batch, T time, C channels (n_embd), nh heads, hs head size (C = nh * hs), V vocabulary.

    idx (B, T)            token ids
      |  wte + wpe        the embeddings of the token and of its position (with RoPE, the attention rotates instead)
    x (B, T, C)           the residual stream
      |  n_layer blocks   x = x + attn(ln_1(x)): each position reads from itself and the earlier ones
      |                   x = x + mlp(ln_2(x)): each position by itself
    x (B, T, C)           what `hidden` returns
      |  ln_f, lm_head    the final norm, and one score for each token of the vocabulary
    logits (B, T, V)      at each position, for the token after it

Every script uses this network: train_gpt2.py trains it, infer.py and hellaswag.py run it, hub.py converts it.
Importing this module imports no other module of the project; `generate` imports training/sampling.py when it is called.
Training compiles the blocks and replaces the head with one that never holds all the logits (training/step.py,
training/head.py).
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

VOCAB_SIZE = 50257  # ids in GPT-2's encoding; higher ones only pad the vocabulary to a round size

# The attention kernels for lengths that change from call to call. They leave out cuDNN's kernel, which torch prefers on
# Hopper and Blackwell: it plans each new length, which takes 0.4 s (modelscope/FunASR#3704).
ANY_LENGTH_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the network. The defaults are GPT-2 124M; the fields from `positions` on were added by later recipes.

    The comment beside a field, or the docstring below it, is its help text (python train_gpt2.py --help).
    """

    block_size: int = 1024  # longest sequence, in tokens
    vocab_size: int = VOCAB_SIZE  # rows of the token embedding
    n_layer: int = 12  # blocks
    n_head: int = 12  # attention heads of a block
    n_embd: int = 768  # channels of the residual stream
    bias: bool = True  # in linear layers and LayerNorms
    tied_head: bool = True  # the head shares the token embedding's weight

    positions: Literal["learned", "rope", "half_rope"] = "learned"  # half_rope: only half of the channel pairs rotate
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_gain"] = "layernorm"  # rmsnorm_gain: with a learned gain
    activation: Literal["gelu", "gelu_erf", "relu2"] = "gelu"
    """gelu: tanh approximation, GPT-2's; gelu_erf: exact, nanoGPT's; relu2: squared ReLU, modded-nanogpt's"""
    qk_norm: bool = False  # RMSNorm on queries and keys
    attention_scale: float = 0.0  # 0: one over the square root of the head size
    zero_init_projections: bool = False
    """the blocks' output projections and an untied head start at zero, all other matrices with modded-nanogpt's
    standard deviation instead of 0.02"""
    head_bias: bool = False  # add a bias to the logits
    softcap: float = 0.0  # the logits z become z / sqrt(1 + (z / softcap)^2); 0: off

    @property
    def head_size(self) -> int:
        """Channels of each head (hs)."""
        return self.n_embd // self.n_head

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> "GPTConfig":
        """The config stored in a checkpoint. Raises ValueError or TypeError if this version cannot build that network.
        An unknown setting is refused, because it may change what a network with the same weights computes."""
        # Old checkpoints lack newer settings, whose defaults mean "off". Removed settings must have been off.
        known = {f.name for f in fields(GPTConfig)}
        removed = ("logit_softcap", "unet_skips", "value_tables")  # of versions up to November 2026
        for name in saved.keys() - known:
            if name not in removed or saved[name]:
                raise ValueError(f"unknown setting {name}={saved[name]!r:.99}: use the version that saved it")
        return GPTConfig(**{name: value for name, value in saved.items() if name in known})

    def __post_init__(self):
        """Raises ValueError, with the value and the rule, if no network can have this shape."""
        # A config may come from a file: without an upper limit it could ask for all memory.
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if not 1 <= getattr(self, name) <= 2**20:
                raise ValueError(f"{name} {getattr(self, name)} must lie between 1 and {2**20}")

        # Each head gets the same number of channels, and RoPE needs pairs of them.
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.head_size % 2 and has_rope(self):
            raise ValueError(f"rope rotates pairs of channels, but a head has {self.head_size}")

        # The two real numbers. This comparison also refuses NaN; math.isfinite would raise OverflowError for a huge
        # integer.
        for name in ("attention_scale", "softcap"):
            if not 0 <= getattr(self, name) <= 2**20:
                raise ValueError(f"{name} {getattr(self, name)!s:.99} must lie between 0 and {2**20}")


# ------------------------------------------------------------------------- parts that depend on the config


def has_rope(config: GPTConfig) -> bool:
    """Whether positions are rotations of queries and keys; otherwise they are learned embeddings."""
    match config.positions:
        case "learned":
            return False
        case "rope" | "half_rope":
            return True
        case _:
            raise ValueError(f"no positions {config.positions!r}: add a case to has_rope in model.py")


def rope_table(config: GPTConfig) -> Tensor:
    """Cosine and sine (2, block_size, hs / 2) of the rotation angle of each channel pair at each position."""
    # The frequency of each channel pair, in radians per position: (hs / 2,).
    hs = config.head_size
    match config.positions:
        # Wavelengths from 2 pi to 10,000 * 2 pi positions (Su et al. 2021).
        case "rope":
            frequencies = 10_000.0 ** (-torch.arange(0, hs, 2, device="cpu").float() / hs)
        # modded-nanogpt's since 2025: only half of the channel pairs rotate, at up to 1 radian per position; the others
        # have frequency 0.
        case "half_rope":
            frequencies = (1 / 1024) ** torch.linspace(0, 1, hs // 4, device="cpu")
            frequencies = F.pad(frequencies, (0, hs // 2 - hs // 4))
        case _:
            raise ValueError(f"no rotation for positions {config.positions!r}: add a case to rope_table in model.py")

    # The angle is position times frequency. The table is on the CPU even when the model is built on the meta device,
    # because it is not in the state dict, so no checkpoint would fill it in.
    positions = torch.arange(config.block_size, device="cpu").float()
    angles = torch.outer(positions, frequencies)  # (block_size, hs / 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): rotate the channel pairs of x (B, T, nh, hs) by the angles whose
    cosine and sine are in cos_sin (2, ..., T, 1, hs / 2). Channel i is paired with channel i + hs / 2.

    Queries and keys turn with their positions, so the score of a query and a key depends on the distance between them.
    """
    # Each pair (a, b) is a vector in the plane: turn it clockwise.
    cos, sin = cos_sin.to(x.dtype)  # each (..., T, 1, hs / 2), the same for all heads
    a, b = x.chunk(2, dim=-1)  # (B, T, nh, hs) -> two of (B, T, nh, hs / 2)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


def rms_norm(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019) over the last dimension of x, in the precision of x: only the statistics are in
    float32."""
    # Since torch 2.12, autocast on a GPU makes rms_norm return float32. The residual stream starts with a norm, so all
    # of it would be float32. The output has the precision of x on a CPU, in torch 2.5 (modded-nanogpt's record 8) and
    # without autocast (modded-nanogpt's simple trainer); here it has the precision of x everywhere.
    device_type = x.device.type
    if not torch.is_autocast_enabled(device_type):
        return F.rms_norm(x, x.shape[-1:], weight)
    with torch.autocast(device_type, enabled=False):
        return F.rms_norm(x, x.shape[-1:], weight)


class RMSNorm(nn.RMSNorm):
    """`rms_norm` as a module, with a gain if elementwise_affine is set."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., C)"""
        return rms_norm(x, self.weight)


def make_norm(config: GPTConfig) -> nn.Module:
    """A new norm over the channels, of the kind that the config names."""
    match config.norm:
        case "layernorm":
            return nn.LayerNorm(config.n_embd, bias=config.bias)
        case "rmsnorm":
            return RMSNorm(config.n_embd, elementwise_affine=False)
        case "rmsnorm_gain":
            return RMSNorm(config.n_embd, elementwise_affine=True)
        case _:
            raise ValueError(f"no norm {config.norm!r}: add a case to make_norm in model.py")


def normalizes_embedding(config: GPTConfig) -> bool:
    """Whether the embedding is normalized before the first block, as in modded-nanogpt's RMSNorm networks."""
    match config.norm:
        case "layernorm":
            return False
        case "rmsnorm" | "rmsnorm_gain":
            return True
        case _:
            raise ValueError(f"no norm {config.norm!r}: add a case to normalizes_embedding in model.py")


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016) by its tanh approximation, which OpenAI's GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh")


def relu_squared(x: Tensor) -> Tensor:
    """The square of ReLU (So et al. 2021, Primer)."""
    # A product keeps the precision of x. square() is a power, which autocast on a GPU computes and returns in float32.
    positive = F.relu(x)
    return positive * positive


def choose_activation(config: GPTConfig) -> Callable[[Tensor], Tensor]:
    """The function between the two layers of the MLP."""
    match config.activation:
        case "gelu":
            return gelu_tanh
        case "gelu_erf":
            return F.gelu
        case "relu2":
            return relu_squared
        case _:
            raise ValueError(f"no activation {config.activation!r}: add a case to choose_activation in model.py")


def softcap(logits: Tensor, cap: float) -> Tensor:
    """The logits z, limited to the range from -cap to cap by z / sqrt(1 + (z / cap)^2), as in modded-nanogpt; with a
    cap of 0 unchanged."""
    if not cap:
        return logits
    # The formula multiplied by cap / cap, in float32.
    z = logits.float()
    return cap * z * (z.square() + cap**2).rsqrt()


# ------------------------------------------------------------------------- the network


class KVCache:
    """Keys and values of the positions already seen, for up to `max_len` positions of `batch` sequences.

    With it, generating a token computes one position instead of the whole text: the earlier ones cannot change, because
    no position attends to a later one.
    """

    def __init__(self, config: GPTConfig, batch: int, max_len: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layer, batch, config.n_head, max_len, config.head_size)  # (n_layer, B, nh, max_len, hs)
        # Two tensors, because autograd refuses to write into the halves of one.
        self.k = torch.zeros(shape, device=device, dtype=dtype)
        self.v = torch.zeros(shape, device=device, dtype=dtype)
        self.length = 0  # positions filled; GPT.hidden advances it after the last layer's append

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, nh, T, hs) of one layer; return all of them so far (B, nh, length + T, hs)."""
        # Write them after those that are there, and return views of all. The length is the same for all layers until
        # the last one has appended.
        start, end = self.length, self.length + k.size(2)
        self.k[layer, :, :, start:end] = k
        self.v[layer, :, :, start:end] = v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


class Attention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017). One matrix product gives queries, keys and values of all heads."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.config = config
        # Queries, keys and values of all heads together; training/muon.py recognizes this weight by its name.
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor, cos_sin: Tensor | None, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """x (B, T, C) -> (B, T, C). cos_sin: RoPE's angles, if used. cache: keys and values of earlier positions. mask:
        bool, broadcastable to (B, nh, T, S), true where a position attends to another; None: causal."""
        B, T, C = x.shape
        nh, hs = self.config.n_head, self.config.head_size

        # The query, key and value of each head at each position.
        # (B, T, C) -> (B, T, 3C) -> (B, T, 3, nh, hs) -> three of (B, T, nh, hs)
        q, k, v = self.c_attn(x).view(B, T, 3, nh, hs).unbind(2)

        # Normalized queries and keys keep the attention scores in bounds (QK-norm, Henry et al. 2020).
        if self.config.qk_norm:
            q, k = rms_norm(q), rms_norm(k)

        # RoPE. Without it, the positions are in x already.
        if cos_sin is not None:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)

        # Each head is computed alone, like another sequence of the batch: (B, T, nh, hs) -> (B, nh, T, hs)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))

        # With a cache, the new positions attend to the S = length + T seen so far. Its precision may differ.
        if cache is not None:
            k, v = cache.append(self.layer, k.to(cache.k.dtype), v.to(cache.v.dtype))  # (B, nh, S, hs)
            q = q.to(k.dtype)

        # softmax(q @ k^T * scale) @ v. A fused kernel (FlashAttention, Dao et al. 2022) never holds all (T, S) scores.
        # A single new position attends to everything. Several use the given mask or, without one, the causal mask.
        is_causal = T > 1 and mask is None
        scale = self.config.attention_scale or None  # None: one over the square root of the head size
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)

        # Put the outputs of the heads side by side: (B, nh, T, hs) -> (B, T, nh, hs) -> (B, T, C)
        y = y.transpose(1, 2).reshape(B, T, C)
        if cache is not None:
            y = y.to(x.dtype)
        return self.c_proj(y)


class MLP(nn.Module):
    """Two linear layers with the activation function between them, applied to each position alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        # Four times as wide inside, as in the original transformer.
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = choose_activation(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, 4C) -> (B, T, C)"""
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nn.Module):
    """One layer of the transformer: attention, then the MLP."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos_sin: Tensor | None, cache: KVCache | None, mask: Tensor | None) -> Tensor:
        """x (B, T, C) -> (B, T, C); the other arguments are Attention's."""
        # Pre-norm: each part reads a normalized copy of the residual stream and adds to the stream itself.
        x = x + self.attn(self.ln_1(x), cos_sin, cache, mask)
        return x + self.mlp(self.ln_2(x))


class SkipInit(TorchFunctionMode):
    """A context in which torch.nn.init does nothing. Tensors on the meta device have no data to initialize, and the
    attempt would import torch's compiler, which takes a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", "") == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019). Parameter names match the public checkpoints."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # trade time for memory: keep only each block's input and rerun the block in backward

        # Embeddings, blocks, final norm, under the names of the public checkpoints. ln_0 is modded-nanogpt's.
        layers: dict[str, nn.Module] = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}
        if not has_rope(config):
            layers["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        layers["ln_0"] = make_norm(config) if normalizes_embedding(config) else nn.Identity()
        layers["h"] = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        layers["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(layers)

        # The head, which GPT-2 ties to the token embedding (Press and Wolf 2017): both map between tokens and channels.
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight

        # RoPE's angles follow from the config, so checkpoints do not store them.
        if has_rope(config):
            self.register_buffer("cos_sin", rope_table(config), persistent=False)  # (2, block_size, hs / 2)
        self._init_weights()

    def _init_weights(self) -> None:
        """Random weights as in GPT-2, or as in modded-nanogpt with zero_init_projections. A seed gives the same weights
        only as long as the order of the random draws stays the same."""
        config = self.config

        # All matrices and embeddings, then zero biases. modded-nanogpt's standard deviation is that of torch's default
        # for a linear layer of this width.
        std = (3 * config.n_embd) ** -0.5 if config.zero_init_projections else 0.02
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

        # Each layer adds the outputs of two projections to the residual stream. Smaller weights in deeper networks keep
        # the variance of the stream independent of the depth. modded-nanogpt starts them, and the head, at zero.
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            if config.zero_init_projections and name.endswith(("c_proj.weight", "lm_head.weight")):
                nn.init.zeros_(p)

        # An embedding whose output is normalized may have any scale, unless the head shares its weight: the scale only
        # sets its effective learning rate.
        if normalizes_embedding(config) and not config.tied_head:
            nn.init.normal_(self.transformer.wte.weight)

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """A model that uses the float32 tensors of `state` directly: no random init, no copy. Raises ValueError or
        RuntimeError if they do not match `config`."""
        # Check before building the layers: a config from a file may ask for a million of them.
        layers = {name.split(".")[2] for name in state if name.startswith("transformer.h.")}
        if len(layers) != config.n_layer:
            raise ValueError(f"{len(layers)} layers of weights for a config with {config.n_layer}")
        for name, tensor in state.items():
            if not isinstance(tensor, Tensor) or tensor.dtype != torch.float32:
                raise ValueError(f"{name} is not a float32 tensor")

        # Build the modules without memory, then assign the tensors. assign=True unties the head, so tie it again.
        with torch.device("meta"), SkipInit():
            model = cls(config)
        model.load_state_dict(state, assign=True)
        if config.tied_head:
            model.lm_head.weight = model.transformer.wte.weight
        return model

    def num_params(self) -> int:
        """Total number of parameters, a tied head counted once (124,439,808 for GPT-2 124M)."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self, T: int) -> float:
        """Training FLOPs per token: 6 per parameter used in a matmul (the head counts, embedding lookups do not) plus
        12 * n_layer * n_embd * T for attention (PaLM, Chowdhery et al. 2022, appendix B)."""
        # A tied head uses the embedding's weight in a matmul, so that weight counts.
        embeddings = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding))
        tied_head = self.lm_head.weight.numel() if self.config.tied_head else 0
        in_matmuls = self.num_params() - embeddings + tied_head
        return 6 * in_matmuls + 12 * self.config.n_layer * self.config.n_embd * T

    def hidden(
        self,
        idx: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | slice | None = None,
        mask: Tensor | None = None,
        blocks: Sequence[Callable] = (),
    ) -> Tensor:
        """Hidden states (B, T, C) for idx (B, T) int64, before the final norm; pass them to `logits`.

        Training passes idx alone; then the positions are 0 .. T - 1 and the mask is causal. cache: idx continues the
        text that the cache holds. positions (B, T) and mask (B, 1, T, S), where S is T plus the cache's length, are
        given together: for rows that hold several texts with a common prefix (HellaSwag's endings after their context),
        or for padded rows. The mask is true where query i attends to key j. blocks: the compiled versions of the
        model's blocks.
        """
        # The T new positions come after the `start` cached ones.
        T = idx.size(1)
        start = cache.length if cache is not None else 0

        # Attention itself knows the causal mask (T, T), and that one new position attends to everything. Several new
        # positions after cached ones need a mask (T, start + T): new position i attends to all cached ones, and to the
        # new ones up to i. For start = 3 and T = 2:
        #     1 1 1 1 0
        #     1 1 1 1 1
        if mask is None and start > 0 and T > 1:
            mask = torch.ones(T, start + T, dtype=torch.bool, device=idx.device).tril(start)

        # Where the new positions are in the text.
        if positions is None:
            assert start + T <= self.config.block_size, f"{start + T} positions, block_size {self.config.block_size}"
            positions = slice(start, start + T)

        # Embeddings. Learned positions are added here; RoPE is applied in the attention.
        x = self.transformer.ln_0(self.transformer.wte(idx))  # (B, T) -> (B, T, C)
        cos_sin = None
        if has_rope(self.config):
            cos_sin = self.cos_sin[:, positions, None]  # (2, T, 1, hs / 2), or (2, B, T, 1, hs / 2)
        else:
            x = x + self.transformer.wpe.weight[positions]  # (T, C), or (B, T, C)

        # The blocks. With a cache or a mask, lengths vary from call to call, so leave out a kernel that plans each.
        lengths_vary = cache is not None or mask is not None
        with sdpa_kernel(ANY_LENGTH_KERNELS) if lengths_vary else nullcontext():
            for block in blocks or self.transformer.h:
                # To recompute, keep only the block's input. With a cache nothing is recomputed: a block that runs twice
                # would append to the cache twice.
                if self.recompute and cache is None and torch.is_grad_enabled():
                    x = checkpoint(block, x, cos_sin, cache, mask, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = block(x, cos_sin, cache, mask)

        # All layers have appended their keys and values, so the new positions are now cached ones.
        if cache is not None:
            cache.length += T
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C)."""
        return softcap(self.lm_head(self.transformer.ln_f(x)), self.config.softcap)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> (logits (B, T, V), None), or (None, mean cross-entropy) with targets.

        The loss is in nats per token. An untrained network gives all tokens about the same probability, so its loss is
        about ln(V). Targets of -100 are left out.
        """
        logits = self.logits(self.hidden(idx))
        if targets is None:
            return logits, None
        # (B, T, V) -> (B * T, V), (B, T) -> (B * T,)
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache. Its precision is autocast's. Without autocast it is float32 on a CPU, which is faster there,
        and the precision of the weights on other devices."""
        # The head's weight has the device and the precision of the model.
        weight = self.lm_head.weight
        device_type = weight.device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        elif device_type == "cpu":
            dtype = torch.float32
        else:
            dtype = weight.dtype
        return KVCache(self.config, batch, max_len, weight.device, dtype)

    def generate(
        self,
        idx: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = 50,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """idx (B, T) continued to (B, T + max_new_tokens), drawn as training/sampling.py describes."""
        # Imported here, so that importing model.py imports no other module. An export (hub.py export) has this file
        # without the rest of the project. transformers, which has its own generate, refuses a file with an import that
        # it cannot resolve, unless the import is inside try.
        try:
            from training.sampling import generate
        except ImportError as e:
            raise ImportError("GPT.generate needs training/sampling.py of the project that made this file") from e

        return generate(self, idx, max_new_tokens, temperature, top_k, top_p, generator)
