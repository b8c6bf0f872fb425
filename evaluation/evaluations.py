"""What a run measures beside its training loss: one list of evaluations, each with its period, its price and its facts.

    evaluations = open_list(cfg)
    due = [evaluation for evaluation in evaluations if evaluation.is_due(now)]
    row = measure(due, trainer, "step   250/19073")     # {"val_loss": 3.29, "samples": "...", ...}

To add an evaluation, write a class such as Validation and add it to make_list. Each number that it returns goes to
metrics.jsonl, the tracker and plots.py, which draws val_loss_* beside the loss.

No evaluation changes the weights, the gradients, the order of the data or the random numbers of training.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property
from pathlib import Path
from zlib import crc32

import numpy as np
import torch

from evaluation import multiple_choice
from evaluation.multiple_choice import Example
from model import has_gpt2_tokens
from system.distributed import Runtime
from system.facts import NOTED, Fact, Facts
from system.printing import print0
from tokens import tokenizer
from training.config import HELLASWAG_DATA, TrainConfig
from training.head import Loss
from training.loader import Loader, to_device
from training.schedule import Step
from training.step import Trainer

# The tokens of 10,042 questions of HellaSwag, with padding: 1.83 million. The forward pass is not compiled, so they are
# counted as 1 / 0.69 times as many.
HELLASWAG_TOKENS = 2_652_174

NUM_SAMPLES, SAMPLE_TOKENS = 4, 48
SAMPLE_TOKEN_S = 0.01  # seconds for one more token of all samples on a GPU; assumed, not measured
PROMPT_TOKENS = 8  # of --sample-prompt @val


# ------------------------------------------------------------------------- an evaluation, and the list


class Evaluation(ABC):
    """One thing that a run measures.

    name: what the log and the tracker call it. period: steps between two measurements; 0 means never. tokens: the cost
    of a measurement, in tokens of a compiled forward pass without gradients. seconds: its cost beside those tokens.
    """

    def __init__(self, name: str, period: int, tokens: int, seconds: float = 0.0):
        self.name, self.period, self.tokens, self.seconds = name, period, tokens, seconds

    @abstractmethod
    def facts(self) -> Facts:
        """Facts that must be equal on all ranks. Raises UserError if the data for the evaluation are missing."""

    @abstractmethod
    def measure(self, trainer: Trainer) -> tuple[dict[str, float], str]:
        """The numbers by their names in metrics.jsonl, and a text for the log, or "". Every rank must call this."""

    def is_due(self, now: Step) -> bool:
        """Whether a run measures this at a step. Step 0 measures the initial weights."""
        return now.is_due(self.period)

    def why_off(self) -> str:
        """Why this cannot be measured here, in a sentence; "" if it can."""
        return ""


def make_list(cfg: TrainConfig) -> list[Evaluation]:
    """The evaluations that these settings ask for. Opens no file."""
    validation = Validation(cfg)
    evaluations = [validation, HellaSwag(cfg), Samples(cfg, validation)]
    return [evaluation for evaluation in evaluations if evaluation.period]


def open_list(cfg: TrainConfig) -> list[Evaluation]:
    """The evaluations of make_list that are possible here. Prints why the others are not."""
    possible = []
    for evaluation in make_list(cfg):
        reason = evaluation.why_off()
        if reason:
            print0(reason)
        else:
            possible.append(evaluation)
    return possible


def list_facts(evaluations: list[Evaluation]) -> Facts:
    """The facts of all evaluations. Raises ValueError if two evaluations have different facts of one name."""
    facts: Facts = {}
    for evaluation in evaluations:
        for name, fact in evaluation.facts().items():
            if facts.setdefault(name, fact) != fact:
                raise ValueError(f"{evaluation.name} has another fact of the name {name!r}")
    return facts


def measure(evaluations: Sequence[Evaluation], trainer: Trainer, label: str) -> dict[str, float | str]:
    """Measure these, and print each result after the label. Returns {name in metrics.jsonl: number}; an evaluation that
    has only a text returns it under its own name. Raises ValueError if two evaluations return the same name, and
    Stopped if a signal comes meanwhile. Every rank must call this."""
    row: dict[str, float | str] = {}
    if not evaluations:
        return row
    with trainer.evaluating():
        for evaluation in evaluations:
            numbers, text = evaluation.measure(trainer)
            duplicates = ", ".join(row.keys() & numbers.keys())
            if duplicates:
                raise ValueError(f"{evaluation.name} returns {duplicates}, as an evaluation before it does")
            row |= numbers
            if text:
                print0(f"{label} | {text}")
            if not numbers:
                row[evaluation.name] = text
    return row


# ------------------------------------------------------------------------- validation loss


class Validation(Evaluation):
    """The mean loss on the first --val-tokens of the val split, or on all of a smaller split."""

    def __init__(self, cfg: TrainConfig):
        super().__init__("validation", cfg.val_every, tokens=cfg.val_tokens)
        self.cfg = cfg

    @cached_property
    def data(self) -> Loader:
        """The val split. Raises UserError if it is missing or damaged."""
        return Loader(self.cfg.data_dir, "val", self.cfg.sequence_length, self.cfg.model.vocab_size)

    def facts(self) -> Facts:
        return {"the checksum of the validation data": Fact(self.data.fingerprint(), NOTED)}

    def measure(self, trainer: Trainer) -> tuple[dict[str, float], str]:
        """val_loss in nats per token and, with GPT-2's vocabulary, val_bpb in bits per byte."""
        results = validate(trainer.loss, self.data, self.cfg.val_tokens, trainer.rt, trainer.B)
        bits = f" | bits per byte: {results['val_bpb']:.4f}" if "val_bpb" in results else ""
        return results, f"val loss: {results['val_loss']:.4f} | context: {self.data.T}{bits}"


@torch.no_grad()
def validate(loss: Loss, data: Loader, val_tokens: int, rt: Runtime, B: int) -> dict[str, float]:
    """Measure the first val_tokens of the val split, or all of a smaller split. Except for rounding, the result does
    not depend on the number of ranks, nor on B, the number of sequences in a forward pass. Returns

        val_loss   mean cross-entropy, in nats per token
        val_bpb    the same in bits per byte of text, which is comparable between tokenizers; computed only for
                   GPT-2's

    All batches have one shape, so nothing is compiled twice: the last batches are padded with rows that the loss
    ignores. With B = 2, two ranks and 9 sequences:

        sequence    0 1 2 3 | 4 5 6 7 | 8
        rank 0      0   2   | 4   6   | 8 padding
        rank 1        1   3 |   5   7 | (skips this batch)

    data: the val split. Every rank must call this.
    """
    # The first sequences of the split, in order. A stride is what all ranks together take at a time.
    count = min(val_tokens // data.T, data.order.sequences_per_epoch)
    sequences = data.order.span(0, count)  # (count, 2) of (shard, sequence)
    stride = B * rt.world_size
    has_text = has_gpt2_tokens(data.vocab_size)

    # The mean loss and the number of sequences of each batch, and the bytes of all targets. The losses are read at the
    # end, because reading a loss waits for the device.
    losses = []
    text_bytes = 0
    for i in rt.each_batch(range(0, count, stride), "validation"):
        # Each rank takes every world_size-th sequence of the stride, so that the ranks share the last stride evenly.
        own = data.read(sequences[i : i + stride][rt.rank :: rt.world_size])  # (n <= B, T + 1)
        if len(own) == 0:
            continue

        # Pad to B rows, whose targets the loss ignores.
        padded = np.zeros((B, data.T + 1), np.uint16)
        padded[: len(own)] = own
        x, y = to_device(torch.from_numpy(padded), rt.device)  # (B, T) each
        y[len(own) :] = -100  # ignored by the loss, as in F.cross_entropy

        with rt.autocast():
            _, mean_loss = loss(x, y)
        losses.append((mean_loss, len(own)))
        if has_text:
            text_bytes += int(text_lengths()[own[:, 1:]].sum())

    # All sequences are equally long. The sum over thousands of batches is in float64, so that the number of ranks
    # changes hardly a bit of it.
    loss_sum = sum(float(mean_loss) * n for mean_loss, n in losses)
    loss_sum, text_bytes = rt.all_reduce(torch.tensor([loss_sum, text_bytes], dtype=torch.float64)).tolist()
    results = {"val_loss": loss_sum / count}
    if text_bytes:
        results["val_bpb"] = results["val_loss"] / math.log(2) / (text_bytes / (count * data.T))
    return results


@cache
def text_lengths() -> np.ndarray:
    """How many bytes of text each id of GPT-2's vocabulary stands for. <|endoftext|> has none."""
    lengths = np.zeros(2**16, np.int64)
    for token, i in tokenizer.load_ranks().items():
        lengths[i] = len(token)
    return lengths


# ------------------------------------------------------------------------- HellaSwag


class HellaSwag(Evaluation):
    """The accuracy in HellaSwag. Chance is 0.25, and OpenAI's GPT-2 124M has an acc_norm of 0.2955."""

    def __init__(self, cfg: TrainConfig):
        super().__init__("HellaSwag", cfg.hellaswag_every, tokens=HELLASWAG_TOKENS)
        self.cfg, self.path = cfg, Path(cfg.hellaswag_data)

    @cached_property
    def examples(self) -> list[Example]:
        """The rows. Raises UserError if they are missing or damaged."""
        return multiple_choice.load_examples(self.path)

    def why_off(self) -> str:
        # A run trains without the default file. A file that somebody asked for must be there.
        if self.cfg.hellaswag_data == HELLASWAG_DATA and not self.path.exists():
            return f"HellaSwag is off: no {self.path}; download it with: python hellaswag.py"
        problem = multiple_choice.why_unreadable(self.examples, self.cfg.model)
        return f"HellaSwag is off: {problem}" if problem else ""

    def facts(self) -> Facts:
        return {"the checksum of the HellaSwag file": Fact(f"{crc32(self.path.read_bytes()):08x}", NOTED)}

    def measure(self, trainer: Trainer) -> tuple[dict[str, float], str]:
        """hellaswag_acc and hellaswag_acc_norm."""
        losses = multiple_choice.score(trainer.model, self.examples, trainer.rt)
        result = multiple_choice.summarize(losses, self.examples)
        numbers = {"hellaswag_acc": result["acc"], "hellaswag_acc_norm": result["acc_norm"]}
        return numbers, multiple_choice.describe_score(result)


# ------------------------------------------------------------------------- samples


class Samples(Evaluation):
    """Continuations of --sample-prompt, to be read by people."""

    def __init__(self, cfg: TrainConfig, validation: Validation):
        super().__init__("samples", cfg.sample_every, tokens=0, seconds=SAMPLE_TOKENS * SAMPLE_TOKEN_S)
        self.cfg, self.validation = cfg, validation

    @cached_property
    def prompt(self) -> list[int]:
        """The ids that samples continue: --sample-prompt or, if that is @val, the first words of the val split."""
        if self.cfg.sample_prompt != "@val":
            return tokenizer.encode_prompt(self.cfg.sample_prompt)[-self.cfg.model.block_size :]

        # The first document: without the <|endoftext|> at its beginning, and up to the next one.
        data = self.validation.data
        tokens = data.read(data.order.span(0, 1))[0].tolist()  # (T + 1,)
        document = list(tokenizer.until_eot(tokens[1:]))
        return document[:PROMPT_TOKENS] or [tokenizer.EOT]

    def is_due(self, now: Step) -> bool:
        """Not at step 0, where the weights are usually random."""
        return now.number > 0 and super().is_due(now)

    def why_off(self) -> str:
        vocab_size = self.cfg.model.vocab_size
        is_gpt2s = has_gpt2_tokens(vocab_size)
        return "" if is_gpt2s else f"samples are off: the vocabulary has {vocab_size} tokens, and is not GPT-2's"

    def facts(self) -> Facts:
        return {"the prompt of the samples": Fact(str(self.prompt), NOTED)}

    def measure(self, trainer: Trainer) -> tuple[dict[str, float], str]:
        """No numbers; rank 0 has the texts."""
        if not trainer.rt.is_main:
            return {}, ""
        # The samples have a generator of their own, seeded anew: every evaluation draws the same random numbers, and
        # leaves the global generator alone.
        device = trainer.rt.device
        generator = torch.Generator(device).manual_seed(self.cfg.seed)
        idx = torch.tensor(NUM_SAMPLES * [self.prompt], device=device)  # (NUM_SAMPLES, T)
        rows = trainer.model.generate(idx, SAMPLE_TOKENS, generator=generator).tolist()
        texts = []
        for row in rows:
            new_ids = tokenizer.until_eot(row[len(self.prompt) :])
            texts.append(tokenizer.encoding().decode([*self.prompt, *new_ids]))
        return {}, "".join(f"sample {i} of {NUM_SAMPLES}\n{text}\n" for i, text in enumerate(texts, 1))
