"""The class with which transformers runs a network that it has no class for. `python hub.py export` copies this file
into the export, with model.py, which computes the network. No module of the project imports this file.

    tokenizer = AutoTokenizer.from_pretrained("my-export", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("my-export", trust_remote_code=True)
    model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=20)
"""

from dataclasses import fields

import torch
import torch.nn.functional as F
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig, has_rope, rope_table


class GPTHubConfig(PreTrainedConfig):
    """The contents of config.json. `network` has the fields of GPTConfig (model.py). transformers reads some of them by
    names of its own: the properties below."""

    model_type = "gpt-with-code"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(self, network: dict | None = None, **kwargs):
        self.network = network or {field.name: field.default for field in fields(GPTConfig)}
        super().__init__(**kwargs)

    # transformers' names of the sizes.
    vocab_size = property(lambda self: self.network["vocab_size"])
    hidden_size = property(lambda self: self.network["n_embd"])
    num_hidden_layers = property(lambda self: self.network["n_layer"])
    num_attention_heads = property(lambda self: self.network["n_head"])
    max_position_embeddings = property(lambda self: self.network["block_size"])


class CacheAdapter:
    """A cache of transformers behind the interface of KVCache (model.py). `weight`: any weight of the model."""

    def __init__(self, cache, weight: torch.Tensor):
        self.cache = cache
        # Positions of the earlier calls. The cache counts them itself; GPT.hidden also adds to this number, at the end.
        self.length = cache.get_seq_length()
        # Only for their precision, to which Attention converts keys and values.
        self.k = self.v = weight

    def append(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append k, v (B, nh, T, hs) of one layer; return all of them so far (B, nh, length + T, hs)."""
        return self.cache.update(k, v, layer)


class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    """model.py's GPT behind transformers' interface: forward, loss, generation with a cache, padded batches."""

    config_class = GPTHubConfig
    base_model_prefix = "network"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _tied_weights_keys = {"network.lm_head.weight": "network.transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: GPTHubConfig):
        super().__init__(config)
        self.network = GPT(GPTConfig.from_dict(config.network))

        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Fill what is in no file: RoPE's table. GPT initializes its own weights."""
        if module is self.network and has_rope(module.config):
            module.cos_sin.copy_(rope_table(module.config))

    def get_input_embeddings(self) -> torch.nn.Module:
        """Where transformers finds the token embedding, to tie or to resize it."""
        return self.network.transformer.wte

    def get_output_embeddings(self) -> torch.nn.Module:
        """Where transformers finds the head."""
        return self.network.lm_head

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values=None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """input_ids (B, T) -> logits (B, T, V), or (B, logits_to_keep, V) of the last positions.

        attention_mask (B, S), where S is T plus the positions in the cache: 0 at padding, otherwise 1. labels (B, T):
        the ids themselves, or -100 where no loss is wanted. The loss is the mean cross-entropy of predicting each label
        from the ids before it.
        """
        T = input_ids.shape[1]

        # The keys and values of earlier calls, to which generation adds those of each call.
        cache = None
        if past_key_values is not None:
            cache = CacheAdapter(past_key_values, self.network.transformer.wte.weight)

        # A padded batch: each row counts its positions from its first token, and attends to no padding. For a row with
        # attention_mask 0 0 1 1 1 and no cache:
        #     positions   0 0 0 1 2
        #     mask        1 0 0 0 0
        #                 0 1 0 0 0
        #                 0 0 1 0 0
        #                 0 0 1 1 0
        #                 0 0 1 1 1
        positions = mask = None
        if attention_mask is not None and not attention_mask.all():
            start = cache.length if cache else 0
            S = start + T
            is_text = attention_mask[:, :S].bool()  # (B, S)
            positions = (is_text.cumsum(-1) - 1).clamp(min=0)[:, start:]  # (B, S) -> (B, T)

            # Query i, at position start + i, attends to the text up to itself. Padding attends to itself, so that every
            # query has a key.
            causal = torch.ones(T, S, dtype=torch.bool, device=input_ids.device).tril(start)  # (T, S)
            itself = torch.eye(S, dtype=torch.bool, device=input_ids.device)[start:]  # (T, S)
            mask = (causal & is_text[:, None, :] | itself)[:, None]  # (B, 1, T, S)

        # (B, T) -> (B, T, C) -> (B, T or logits_to_keep, V)
        hidden = self.network.hidden(input_ids, cache, positions, mask)
        logits = self.network.logits(hidden[:, -logits_to_keep:])

        # Position t predicts the label at t + 1: (B, T - 1, V) -> (B * (T - 1), V), (B, T - 1) -> (B * (T - 1),)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
