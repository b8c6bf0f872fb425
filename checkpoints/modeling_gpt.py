"""The class with which transformers runs a network that it has no class for. `python hub.py export` copies this file
into the export, with model.py, which computes the network. No module of the project imports this file.

    tokenizer = AutoTokenizer.from_pretrained("my-export", trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained("my-export", trust_remote_code=True)
    model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=20)

It is for scores and a first look, as by lm-eval: generating computes the whole text anew for each token. infer.py has
the key-value cache.
"""

from dataclasses import asdict

import torch
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .model import GPT, GPTConfig, rope_table, token_losses


class GPTHubConfig(PreTrainedConfig):
    """The contents of config.json. `network` has the fields of GPTConfig (model.py). transformers reads some of them by
    names of its own: the properties below."""

    model_type = "gpt-with-code"

    def __init__(self, network: dict | None = None, **kwargs):
        self.network = network or asdict(GPTConfig())
        super().__init__(**kwargs)

    # transformers' names of the sizes.
    vocab_size = property(lambda self: self.network["vocab_size"])
    num_hidden_layers = property(lambda self: self.network["n_layer"])
    max_position_embeddings = property(lambda self: self.network["block_size"])


class GPTForCausalLM(PreTrainedModel, GenerationMixin):
    """model.py's GPT behind transformers' interface: forward, loss, generation."""

    config_class = GPTHubConfig
    base_model_prefix = "network"
    accepts_loss_kwargs = False  # the loss is a mean, which transformers' Trainer must divide by its micro-steps
    _tied_weights_keys = {"network.lm_head.weight": "network.transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: GPTHubConfig):
        super().__init__(config)
        self.network = GPT(GPTConfig.from_dict(config.network))

        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Fill what is in no file: RoPE's table. GPT initializes its own weights."""
        if module is self.network and module.config.positions == "rope":
            module.cos_sin.copy_(rope_table(module.config))

    def prepare_inputs_for_generation(  # type: ignore[override]  # generate passes the others by name
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> dict:
        """The arguments of `forward` for the next token: the whole text so far, as there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutput:
        """input_ids (B, T) -> logits (B, T, V). labels (B, T): the ids themselves, or -100 where no loss is wanted. The
        loss is the mean cross-entropy of predicting each label from the ids before it.

        attention_mask (B, T) is 1 everywhere: raises ValueError if it has a 0. lm-eval's log-likelihoods need no mask,
        because they pad at the end, where the earlier positions do not see it.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError("this network computes no padded batches: pass texts of one length, or one at a time")
        logits, _ = self.network(input_ids)

        # Position t predicts the label at t + 1: (B, T - 1, V) -> (B * (T - 1), V), (B, T - 1) -> (B * (T - 1),)
        loss = None
        if labels is not None:
            targets = labels[:, 1:].flatten()
            loss = token_losses(logits[:, :-1].flatten(0, 1), targets).sum() / (targets >= 0).sum()
        return CausalLMOutput(loss=loss, logits=logits)
