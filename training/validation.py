"""The validation loss: on the first tokens of the val split, the same for any number of ranks and any micro-batch.

results = validate(trainer.loss, val_data, cfg, rt, trainer.B)      # {"val_loss": 3.29, "val_bpb": 0.99}
"""

import math
from functools import cache

import numpy as np
import torch

from system.distributed import Runtime
from system.printing import progress_bar
from tokens import tokenizer
from training.config import TrainConfig
from training.loader import Loader, to_device
from training.loss import Loss


@cache
def text_lengths() -> np.ndarray:
    """How many bytes of text each id of GPT-2's vocabulary stands for; <|endoftext|> has none."""
    lengths = np.zeros(2**16, np.int64)
    for i in range(tokenizer.EOT):
        lengths[i] = len(tokenizer.encoding().decode_single_token_bytes(i))
    return lengths


def count_sequences(data: Loader, cfg: TrainConfig) -> int:
    """How many sequences of the val split are measured: those of val_tokens, or all of a smaller split."""
    return min(cfg.val_tokens // data.T, data.order.sequences_per_epoch)


@torch.no_grad()
def validate(loss: Loss, data: Loader, cfg: TrainConfig, rt: Runtime, B: int) -> dict[str, float]:
    """Measure the first val_tokens of the val split, or all of a smaller one. It does not depend on the number of
    ranks, nor on B, the number of sequences in a forward pass. Returns

        val_loss   mean cross-entropy, in nats per token
        val_bpb    the same in bits per byte of text, which compares models of other vocabularies, whose tokens are
                   longer or shorter; only with GPT-2's

    All batches have one shape, so nothing is compiled twice: the last ones are padded with rows that the loss ignores.
    With B = 2, two ranks and 9 sequences:

        sequence    0 1 2 3 | 4 5 6 7 | 8
        rank 0      0   2   | 4   6   | 8 padding
        rank 1        1   3 |   5   7 | (skips this batch)

    data: the val split. Every rank must call this.
    """
    # The first sequences of the split, in order. A stride is what all ranks together take at a time.
    count = count_sequences(data, cfg)
    sequences = data.order.span(0, count)  # (count, 2) of (shard, sequence)
    stride = B * rt.world_size
    has_text = tokenizer.has_gpt2_tokens(data.vocab_size)

    # The mean loss of each batch, with its number of sequences, and the bytes of all targets. The losses are read at
    # the end: reading one waits for the device.
    losses = []
    text_bytes = 0
    for i in progress_bar(range(0, count, stride), "validation"):
        # Each rank takes every world_size-th sequence of the stride, so that the ranks share the last one evenly, too.
        own = data.read(sequences[i : i + stride][rt.rank :: rt.world_size])  # (n <= B, T + 1)
        if len(own) == 0:
            continue

        # Pad to B rows, whose targets the loss ignores.
        padded = np.zeros((B, data.T + 1), np.uint16)
        padded[: len(own)] = own
        x, y = to_device(torch.from_numpy(padded), rt.device)  # (B, T) each
        y[len(own) :] = -100  # ignored by the loss, as in F.cross_entropy

        # The mean over the rows that count.
        with rt.autocast():
            _, mean_loss = loss(x, y)
        losses.append((mean_loss, len(own)))
        if has_text:
            text_bytes += int(text_lengths()[own[:, 1:]].sum())

    # All sequences are equally long. In float64 the sum of thousands of batches is exact enough that the result does
    # not depend on the number of ranks.
    loss_sum = sum(float(mean_loss) * n for mean_loss, n in losses)
    loss_sum, text_bytes = rt.all_reduce(torch.tensor([loss_sum, text_bytes], dtype=torch.float64)).tolist()
    results = {"val_loss": loss_sum / count}
    if text_bytes:
        results["val_bpb"] = results["val_loss"] / math.log(2) / (text_bytes / (count * data.T))
    return results
