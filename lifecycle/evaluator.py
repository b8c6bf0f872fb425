"""A run's evaluations: validation loss, HellaSwag and samples, each with its own period.

    evaluator = Evaluator(train_step, data, val_data, run.max_steps)
    run.measured |= evaluator.evaluate(run, check_stop)
    text = evaluator.sample_text(run, stop.is_requested)

Called by train_gpt2.py between two steps; --eval-only calls `validate`. Nothing here changes the model, the gradients
or the order of the data.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import numpy as np
import torch

from lifecycle import reference
from lifecycle.metrics import RunState
from model import VOCAB_SIZE, Sampler, stream
from system.cli import print0, printable
from system.distributed import Runtime
from tokens import tokenizer
from tokens.loader import Loader, to_device
from training.config import RULES, TrainConfig, config_drift, flag
from training.presets import PRESETS
from training.step import Forward, TrainStep

NUM_SAMPLES, SAMPLE_TOKENS = 4, 48
PROMPT_TOKENS = 8  # of --sample-prompt @val


class Evaluator:
    """Runs the evaluations that are due. HellaSwag and samples call the model itself, because their shapes vary;
    validation calls the compiled forward pass."""

    def __init__(
        self,
        train_step: TrainStep,
        data: Loader,
        val_data: Loader | None,
        score_hellaswag: Callable | None,
        max_steps: int,
    ):
        cfg = train_step.cfg
        self.cfg, self.rt, self.train_step = cfg, train_step.rt, train_step
        self.val_data = val_data

        self.score_hellaswag = score_hellaswag

        self.reference = choose_reference(cfg, max_steps) if val_data else None

        # Samples need GPT-2's vocabulary to be readable.
        self.prompt: list[int] = []  # the ids to continue; without a prompt there are no samples
        if cfg.model.vocab_size >= VOCAB_SIZE:
            self.prompt = choose_prompt(cfg, val_data or data)
        elif cfg.sample_every:
            print0(f"samples are off: the model has {cfg.model.vocab_size} tokens, fewer than GPT-2's")

    def evaluate(self, run: RunState, check_stop: Callable[[], None]) -> dict[str, float]:
        """Measure and print what is due at this step: any of val_loss, hellaswag_acc, hellaswag_acc_norm. check_stop
        (StopRequest.check) is called between batches and may raise Stopped. Every rank must call it."""
        cfg, rt, train_step = self.cfg, self.rt, self.train_step
        step = f"step {run.step:5d}/{run.max_steps}"
        results = {}

        if run.is_due(cfg.val_every):
            loss = validate(train_step.forward, self.val_data, cfg, rt, train_step.micro_batch_size, check_stop)
            print0(f"{step} | val loss: {loss:.4f}")
            verdict = self.reference.judge(run.step, loss) if self.reference else None
            if verdict:
                print0(verdict)
            results["val_loss"] = loss

        # Chance is 0.25; OpenAI's GPT-2 124M has an acc_norm of 0.2955.
        if self.score_hellaswag and run.is_due(cfg.hellaswag_every):
            score = self.score_hellaswag(train_step.model, rt, check_stop)
            print0(f"{step} | hellaswag acc {score['acc']:.4f} acc_norm {score['acc_norm']:.4f} n {score['n']}")
            results |= {"hellaswag_acc": score["acc"], "hellaswag_acc_norm": score["acc_norm"]}
        return results

    @torch.no_grad()
    def sample_text(self, run: RunState, stop_requested: Callable[[], bool]) -> str:
        """If samples are due, continuations of the prompt, one a line, cut short when this rank is asked to stop; ""
        otherwise and on all ranks but 0."""
        cfg, rt = self.cfg, self.rt
        if not (rt.is_main and self.prompt and run.step > 0 and run.is_due(cfg.sample_every)):
            return ""

        # The samples have a generator of their own, seeded anew: every evaluation draws the same random numbers, and
        # leaves the global generator alone.
        sampler = Sampler(generator=torch.Generator(rt.device).manual_seed(cfg.seed))
        idx = torch.tensor([self.prompt], device=rt.device)  # (1, T)
        columns = []  # the new ids, NUM_SAMPLES at a time
        # Without autocast: OpenAI's weights give logits near -100, where bfloat16 steps by 0.5.
        for new_ids in stream(self.train_step.model, idx, SAMPLE_TOKENS, sampler, NUM_SAMPLES):
            if stop_requested():
                break
            columns.append(new_ids.tolist())
        decode = tokenizer.encoding().decode
        texts = [printable(decode([*self.prompt, *row])) for row in zip(*columns, strict=True)]
        return "\n".join(f"sample {i}: {text}" for i, text in enumerate(texts))


def choose_prompt(cfg: TrainConfig, data: Loader) -> list[int]:
    """The ids that samples continue: --sample-prompt or, if that is @val, the first words of the data."""
    if cfg.sample_prompt != "@val":
        prompt = tokenizer.encoding().encode_ordinary(cfg.sample_prompt)
        return prompt[-cfg.model.block_size :] or [tokenizer.EOT]  # an empty prompt starts a document

    # The first sequence, without the <|endoftext|> that begins a document, and not beyond the next one.
    tokens = data.read(data.order.span(0, 1))[0].tolist()  # (T + 1,)
    document = list(takewhile(lambda token: token != tokenizer.EOT, tokens[1:]))
    return document[:PROMPT_TOKENS] or [tokenizer.EOT]


def choose_reference(cfg: TrainConfig, max_steps: int) -> reference.Reference | None:
    """The public runs to compare a run of `max_steps` with, and print which, or what is different from them; None for a
    run from trained weights, whose loss is much lower, and for a preset without public runs."""
    found = reference.find_reference(cfg.preset, max_steps, cfg.total_batch_size)
    if found is None or cfg.init_from != "scratch":
        return None

    # Settings that shape the result; config_drift gives them as "max_lr: 0.0006 -> 0.001". The margin allows for
    # another seed or order of the data, and the rows that pad the vocabulary are not used.
    _, changes = config_drift(PRESETS[cfg.preset], cfg)
    comparable = ["model.vocab_size", *(name for name, rule in RULES.items() if rule.kind == "noise")]
    changed = [change.split(":")[0] for change in changes]
    flags = [flag(name) for name in changed if name not in comparable]
    if flags:
        print0(f"no reference: {', '.join(flags)} not as in preset {cfg.preset}")
        return None
    print0(f"reference: {found.runs} public runs of {cfg.preset}, on {reference.DATASETS[cfg.preset]}")
    return found


def num_val_sequences(data: Loader, cfg: TrainConfig) -> int:
    """How many sequences to validate on: as many as --val-tokens asks for, or all of a smaller val split."""
    return min(cfg.val_tokens // data.T, data.order.sequences_per_epoch)


@torch.no_grad()
def validate(
    forward: Forward, data: Loader, cfg: TrainConfig, rt: Runtime, B: int, check: Callable[[], None] = lambda: None
) -> float:
    """The mean cross-entropy, in nats per token, over the first val_tokens of the val split. It does not depend on the
    number of ranks, nor on B, the number of sequences in a forward pass.

    All batches have one shape, so nothing is compiled twice: the last ones are padded with rows that the loss ignores.
    With B = 2, two ranks and 9 sequences:

        sequence    0 1 2 3 | 4 5 6 7 | 8
        rank 0      0   2   | 4   6   | 8 padding
        rank 1        1   3 |   5   7 | (skips this batch)

    data: the val split. `check` is called before each batch, equally often on all ranks. Every rank must call this.
    """
    # The first sequences of the split, in order. A stride is what all ranks together take at a time.
    count = num_val_sequences(data, cfg)
    sequences = data.order.span(0, count)  # (count, 2) of (shard, sequence)
    stride = B * rt.world_size

    # Float64 sums, where the device has them, keep thousands of batches exact enough that the result does not depend on
    # the number of ranks.
    total = torch.zeros((), device=rt.device, dtype=torch.float32 if rt.device.type == "mps" else torch.float64)
    for i in range(0, count, stride):
        check()

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
            loss = forward(x, y)
        total += loss.to(total.dtype) * len(own)
    check()

    # `total` is the sum of the mean losses of all sequences, which are equally long.
    return rt.all_reduce(total).item() / count
