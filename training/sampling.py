"""Sampling: continue token sequences with a trained model, one token at a time, through the key-value cache.

    sampler = Sampler(temperature=0.8, top_k=50, generator=torch.Generator().manual_seed(42))
    for new_ids in stream(model, idx, 64, sampler, num_samples=4):   # idx (1, T) -> new_ids (4,), 64 times
        print(new_ids.tolist())

infer.py and the trainer's evaluations use `stream`; GPT.generate (model.py) calls `generate`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from model import GPT, VOCAB_SIZE


@dataclass(frozen=True)
class Sampler:
    """How the next token is drawn.

    temperature: divides the logits; 0 always takes the most likely token. top_k: draw from this many most likely
    tokens; None or 0 means all. top_p: draw from the fewest most likely tokens whose total probability reaches this
    (nucleus sampling, Holtzman et al. 2019); None means all. generator: where the randomness comes from, on the device
    of the logits; None means torch's global generator.
    """

    temperature: float = 1.0
    top_k: int | None = 50
    top_p: float | None = None
    generator: torch.Generator | None = None

    def draw(self, logits: Tensor) -> Tensor:
        """Ids (B,) drawn from logits (B, V)."""
        # Ids that only pad the vocabulary to a round size are never drawn. (B, V) -> (B, VOCAB_SIZE)
        logits = logits[:, :VOCAB_SIZE].float()

        # Temperature 0: greedy.
        if self.temperature == 0:
            return logits.argmax(dim=-1)

        # Keep the k most likely ids, sorted from the most to the least likely. (B, VOCAB_SIZE) -> (B, k)
        vocabulary = logits.size(-1)
        k = min(self.top_k, vocabulary) if self.top_k else vocabulary
        logits, ids = logits.topk(k)

        # Low temperatures sharpen the distribution, high ones flatten it. (B, k)
        probs = F.softmax(logits / self.temperature, dim=-1)

        # Keep an id while the ids before it total less than top_p, so that at least one id is always kept.
        if self.top_p is not None:
            total_before = probs.cumsum(dim=-1) - probs
            probs = probs.masked_fill(total_before >= self.top_p, 0.0)

        # Draw a place among the k (multinomial normalizes), then look up the id at that place. (B, k) -> (B, 1) -> (B,)
        place = torch.multinomial(probs, 1, generator=self.generator)
        return ids.gather(-1, place).squeeze(-1)


@torch.no_grad()
def stream(model: GPT, idx: Tensor, max_new_tokens: int, sampler: Sampler, num_samples: int = 1) -> Iterator[Tensor]:
    """Yield the next ids (B * num_samples,) after idx (B, T) int64, max_new_tokens times.

    T lies between 1 and the model's block_size. The prompt is read once for all of its samples. When the context is
    full, the newer half of the text is read again from position 0, so the text may outgrow block_size.
    """
    B, T = idx.shape
    block_size = model.config.block_size

    # A cache for the whole text, or for as much of it as the model reads at once. Its length is rounded up: otherwise
    # an attention kernel pads the mask again in every layer.
    max_len = math.ceil((T + max_new_tokens) / 16) * 16
    cache = model.new_cache(B, min(max_len, block_size))

    # The ids that the cache does not hold yet: first the prompt, then each new id. (B, n)
    unread = idx
    for step in range(max_new_tokens):
        # The context is full: empty the cache and read the newer half of the text again.
        if cache.length == block_size:
            cache.length = 0
            newer_half = max(1, block_size // 2)
            unread = idx[:, -newer_half:]

        # Only the last position predicts the next token. (B, n) -> (B, n, C) -> (B, C) -> (B, V)
        last_hidden = model.hidden(unread, cache)[:, -1]
        logits = model.logits(last_hidden)

        # The prompt has been read; from here on each sample has a row of its own, and a copy of the prompt's keys and
        # values. B -> B * num_samples
        if step == 0 and num_samples > 1:
            logits = logits.repeat_interleave(num_samples, dim=0)
            idx = idx.repeat_interleave(num_samples, dim=0)
            cache.k = cache.k.repeat_interleave(num_samples, dim=1)  # (n_layer, B, nh, max_len, hs)
            cache.v = cache.v.repeat_interleave(num_samples, dim=1)

        # Append the new ids to the text, and read them next. (B * num_samples,) -> (B * num_samples, 1)
        new_ids = sampler.draw(logits)
        unread = new_ids[:, None]
        idx = torch.cat((idx, unread), dim=1)
        yield new_ids


def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = 50,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """idx (B, T) int64 continued to (B, T + max_new_tokens). The last four arguments are those of Sampler."""
    sampler = Sampler(temperature, top_k, top_p, generator)
    columns = [new_ids[:, None] for new_ids in stream(model, idx, max_new_tokens, sampler)]  # each (B, 1)
    return torch.cat((idx, *columns), dim=1)
