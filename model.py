"""GPT-2 in one module: token and position embeddings, pre-norm blocks of attention and MLP, a tied head.

    model = GPT(GPTConfig())                        # GPT-2 124M, random weights
    logits, _ = model(idx)                          # idx (B, T) int64 -> (B, T, vocab_size)
    _, loss = model(idx, targets)                   # mean cross-entropy in nats per token
    out = model.generate(idx, 64, temperature=0.8)  # (B, T + 64), through the key-value cache

Shapes: B batch, T time, C channels (n_embd), nh heads, hs head size, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

VOCAB_SIZE = 50257  # ids in GPT-2's encoding; higher ones only pad the vocabulary to a round size
# For changing lengths: cuDNN's, torch's choice on Hopper and Blackwell, plans each one: 0.4 s (modelscope/FunASR#3704).
ANY_SHAPE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def check_choices(config: object) -> None:
    """Raise ValueError for a value that is none of its field's Literal: a file of a newer version may have one."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal and getattr(config, name) not in get_args(hint):
            raise ValueError(f"{name} {getattr(config, name)!r} must be one of {', '.join(map(str, get_args(hint)))}")


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the network. The defaults are GPT-2 124M; later recipes change the fields from `positions` on.

    half_rope: half of the channel pairs stand still. attention_scale 0: one over the square root of the head size.
    softcap: the logits x become x / sqrt(1 + (x / softcap)^2). value_tables: that many first layers mix embeddings of
    the tokens, each its own, into their values, and as many last layers the same ones (modded-nanogpt, record 17)."""

    block_size: int = 1024
    vocab_size: int = VOCAB_SIZE
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True
    tied_head: bool = True

    positions: Literal["learned", "rope", "half_rope"] = "learned"
    norm: Literal["layernorm", "rmsnorm", "rmsnorm_gain"] = "layernorm"
    activation: Literal["gelu", "gelu_erf", "relu2"] = "gelu"  # GPT-2's tanh; nanoGPT's, exact; modded-nanogpt's
    qk_norm: bool = False
    attention_scale: float = 0.0
    zero_init_projections: bool = False
    head_bias: bool = False
    softcap: float = 0.0
    value_tables: int = 0

    @property
    def head_size(self) -> int:
        return self.n_embd // self.n_head

    @staticmethod
    def from_dict(saved: dict) -> "GPTConfig":
        """The config stored in a checkpoint. Raises ValueError or TypeError if no network can have it, or none of this
        version: a setting unknown here may mean another network with the same weights, unless it is off."""
        known = {f.name for f in fields(GPTConfig)}
        for name in saved.keys() - known:
            if name not in ("logit_softcap", "unet_skips") or saved[name]:  # of versions up to November 2026
                raise ValueError(f"unknown setting {name}={saved[name]!r:.99}: use the version that saved it")
        return GPTConfig(**{name: value for name, value in saved.items() if name in known})

    def __post_init__(self):
        """Raises ValueError, with the value and the rule, if no network can have this shape."""
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if not 1 <= getattr(self, name) <= 2**20:  # a config may come from a file
                raise ValueError(f"{name} {getattr(self, name)} must lie between 1 and {2**20}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_head {self.n_head} does not divide n_embd {self.n_embd}")
        if self.positions != "learned" and self.head_size % 2:
            raise ValueError(f"rope rotates pairs of channels, but a head has {self.head_size}")
        for name in ("attention_scale", "softcap", "value_tables"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} must not be negative")
        if 2 * self.value_tables > self.n_layer:
            raise ValueError(f"value_tables {self.value_tables} must be at most {self.n_layer // 2}, half of n_layer")
        check_choices(self)


class KVCache:
    """Keys and values of the positions already seen, for up to `max_len` positions of `batch` sequences."""

    def __init__(self, config: GPTConfig, batch: int, max_len: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layer, batch, config.n_head, max_len, config.head_size)  # (n_layer, B, nh, max_len, hs)
        self.k, self.v = torch.zeros((2, *shape), device=device, dtype=dtype)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (B, nh, T, hs); return all so far (B, nh, length + T, hs)."""
        start, end = self.length, self.length + k.size(2)
        self.k[layer, :, :, start:end], self.v[layer, :, :, start:end] = k, v
        return self.k[layer, :, :, :end], self.v[layer, :, :, :end]


def rope_table(config: GPTConfig) -> Tensor:
    """Cosine and sine (2, block_size, hs/2) of the rotation angle of each channel pair at each position."""
    hs = config.head_size
    frequencies = 10_000.0 ** (-torch.arange(0, hs, 2, device="cpu").float() / hs)
    if config.positions == "half_rope":  # modded-nanogpt's since 2025
        frequencies = F.pad((1 / 1024) ** torch.linspace(0, 1, hs // 4, device="cpu"), (0, hs // 2 - hs // 4))
    angles = torch.outer(torch.arange(config.block_size, device="cpu").float(), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021): rotate channel pairs of x (B, T, nh, hs) by (2, ..., T, 1, hs/2)."""
    cos, sin = cos_sin.to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.config = layer, config
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # queries, keys, values together
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        if not config.value_tables <= layer < config.n_layer - config.value_tables:
            self.value_mix = nn.Parameter(torch.full((2,), 0.5))  # parts of the values and of the table's

    def forward(
        self, x: Tensor, cos_sin: Tensor | None, values: Tensor | None, cache: KVCache | None, mask: Tensor | None
    ) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.config.n_head, self.config.head_size).unbind(2)  # (B, T, nh, hs)
        if values is not None:
            v = self.value_mix[0] * v + self.value_mix[1] * values.view_as(v).to(v.dtype)
        if self.config.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if cos_sin is not None:
            q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.append(self.layer, k.to(cache.k.dtype), v.to(cache.v.dtype))
            q = q.to(k.dtype)
        causal, scale = T > 1 and mask is None, self.config.attention_scale or None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        y = y.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(y if cache is None else y.to(x.dtype))  # the cache's precision may differ


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.activation == "relu2":
            return self.c_proj(F.relu(x).square())
        return self.c_proj(F.gelu(x, approximate="tanh" if self.activation == "gelu" else "none"))


def make_norm(config: GPTConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, elementwise_affine=config.norm == "rmsnorm_gain")


class Block(nn.Module):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *context) -> Tensor:
        """x (B, T, C); the context is that of Attention."""
        x = x + self.attn(self.ln_1(x), *context)
        return x + self.mlp(self.ln_2(x))


def softcap(logits: Tensor, cap: float) -> Tensor:
    """The logits z or, with a cap, z / sqrt(1 + (z / cap)^2): modded-nanogpt's."""
    return cap * logits.float() * (logits.float().square() + cap**2).rsqrt() if cap else logits


class NoInit(TorchFunctionMode):  # random init on the meta device only loads torch's compiler, which takes a second
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return None if getattr(func, "__module__", "") == "torch.nn.init" else func(*args, **(kwargs or {}))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019); parameter names match the public checkpoints."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # trade time for memory: keep only each block's input and rerun the block in backward
        layers = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}
        if config.positions == "learned":
            layers["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        tables = [nn.Embedding(config.vocab_size, config.n_embd) for _ in range(config.value_tables)]
        layers["vte"] = nn.ModuleList(tables)
        layers["ln_0"] = nn.Identity() if config.norm == "layernorm" else make_norm(config)
        layers["h"] = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        layers["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(layers)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=config.head_bias)
        if config.tied_head:
            self.lm_head.weight = self.transformer.wte.weight
        if config.positions != "learned":
            self.register_buffer("cos_sin", rope_table(config), persistent=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                std = (3 * config.n_embd) ** -0.5 if config.zero_init_projections else 0.02  # modded-nanogpt's
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for name, p in self.named_parameters():  # residual projections: variance must not grow with depth
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            if config.zero_init_projections and name.endswith(("c_proj.weight", "lm_head.weight")):
                nn.init.zeros_(p)
        # normalized next, so an embedding's scale only sets its effective learning rate; but a head's matters
        if config.norm != "layernorm" and not config.tied_head:
            nn.init.normal_(self.transformer.wte.weight)
        for table in self.transformer.vte:
            nn.init.normal_(table.weight)

    @classmethod
    def from_state_dict(cls, config: GPTConfig, state: dict[str, Tensor]) -> "GPT":
        """A model that uses the float32 tensors of `state` directly: no random init, no copy. Raises ValueError or
        RuntimeError if they do not match `config`."""
        layers = {name.split(".")[2] for name in state if name.startswith("transformer.h.")}
        if len(layers) != config.n_layer:  # checked before building as many as the config asks for
            raise ValueError(f"{len(layers)} layers of weights for a config with {config.n_layer}")
        if odd := [name for name, t in state.items() if not (isinstance(t, Tensor) and t.dtype == torch.float32)]:
            raise ValueError(f"{odd[0]} is not a float32 tensor")
        with torch.device("meta"), NoInit():
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
        looked_up = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Embedding))
        head = self.lm_head.weight.numel() if self.config.tied_head else 0
        return 6 * (self.num_params() - looked_up + head) + 12 * self.config.n_layer * self.config.n_embd * T

    def hidden(
        self, idx: Tensor, cache: KVCache | None = None, positions: Tensor | slice | None = None,
        mask: Tensor | None = None, blocks: Sequence[Callable] = (),
    ) -> Tensor:  # fmt: skip
        """Hidden states (B, T, C) of idx (B, T), the input of `logits`. With a cache, idx continues the text it holds.
        A row may be a tree of texts instead of one text: then pass positions (B, T) and a bool mask (B, 1, T, T), true
        where i attends to j. `blocks` replace the model's own: the same blocks, compiled."""
        T, config = idx.size(1), self.config
        start = cache.length if cache is not None else 0
        if start and T > 1:  # new position i attends to all old ones and to new ones up to i
            mask = torch.ones(T, start + T, dtype=torch.bool, device=idx.device).tril(start)
        if positions is None:
            assert start + T <= config.block_size, f"{start + T} positions, block_size {config.block_size}"
            positions = slice(start, start + T)
        x = self.transformer.ln_0(self.transformer.wte(idx))
        cos_sin = None
        if config.positions == "learned":
            x = x + self.transformer.wpe.weight[positions]
        else:
            cos_sin = self.cos_sin[:, positions, None]
        tables = [table(idx) for table in self.transformer.vte]
        tables += [None] * (config.n_layer - 2 * len(tables)) + tables  # one for each layer
        with sdpa_kernel(ANY_SHAPE) if cache is not None or mask is not None else nullcontext():
            for block, values in zip(blocks or self.transformer.h, tables, strict=True):
                if self.recompute and torch.is_grad_enabled():
                    x = checkpoint(block, x, cos_sin, values, None, mask, use_reentrant=False, preserve_rng_state=False)
                else:
                    x = block(x, cos_sin, values, cache, mask)
        if cache is not None:
            cache.length += T
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., C)."""
        return softcap(self.lm_head(self.transformer.ln_f(x)), self.config.softcap)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets (B, T) int64 -> (logits (B, T, V), None), or (None, mean cross-entropy) with targets."""
        logits = self.logits(self.hidden(idx))
        if targets is None:
            return logits, None
        return None, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def new_cache(self, batch: int, max_len: int) -> KVCache:
        """An empty cache in autocast's precision or, without autocast, the weights'; float32 on a CPU: faster there."""
        weight = self.lm_head.weight
        kind = weight.device.type
        dtype = torch.float32 if kind == "cpu" else weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return KVCache(self.config, batch, max_len, weight.device, dtype)

    def generate(
        self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = 50,
        top_p: float | None = None, generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """idx (B, T) continued to (B, T + max_new_tokens). For the other arguments see Sampler in
        training/sampling.py."""
        from training import sampling  # imported late: importing model.py loads nothing else of the project

        return sampling.generate(self, idx, max_new_tokens, temperature, top_k, top_p, generator)
