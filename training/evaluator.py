"""A run's evaluations: validation loss, HellaSwag and samples, each with its own period.

    evaluator = Evaluator(train_step, data, val_data)
    run.measured |= evaluator.evaluate(run, check_stop)
    text = evaluator.sample_text(stop.is_requested)

Called by train_gpt2.py between two steps; --eval-only calls `validate`. Nothing here changes the model, the gradients
or the order of the data.
"""

import math
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from model import VOCAB_SIZE
from system.cli import print0, printable
from system.distributed import Runtime
from tokens import tokenizer
from tokens.loader import Loader, to_device
from training import hellaswag_eval, sampling
from training.config import RULES, TrainConfig, config_drift, flag
from training.presets import PRESETS
from training.reference import DATASETS, Reference, difference_in_data, difference_in_start, find_reference
from training.run_state import RunState
from training.step import Forward, TrainStep

NUM_SAMPLES, SAMPLE_TOKENS = 4, 48
PROMPT_TOKENS = 8  # of --sample-prompt @val


class Evaluator:
    """Runs the evaluations that are due. HellaSwag and samples call the model itself, because their shapes vary;
    validation calls the compiled forward pass."""

    def __init__(self, train_step: TrainStep, data: Loader, val_data: Loader | None):
        cfg = train_step.cfg
        self.cfg = cfg
        self.rt = train_step.rt
        self.train_step = train_step
        self.data = data
        self.val_data = val_data

        # The public runs to compare with: chosen at the first validation, with the reason if there are none.
        self.reference: Reference | None = None
        self.reference_is_chosen = False

        # Without rows, or with a model that cannot read them, HellaSwag is off, and the reason is printed.
        self.examples = hellaswag_eval.available_examples(cfg.hellaswag_data, cfg.model) if cfg.hellaswag_every else []

        # The first line of the words that --sample-prompt @val stands for, known after the first samples.
        self.val_prompt = ""

        # Samples need GPT-2's vocabulary to be readable.
        self.sample_every = cfg.sample_every
        if cfg.sample_every and cfg.model.vocab_size < VOCAB_SIZE:
            self.sample_every = 0
            print0(f"samples are off: the model has {cfg.model.vocab_size} tokens, fewer than GPT-2's")

    def evaluate(self, run: RunState, check_stop: Callable[[], None]) -> dict[str, Any]:
        """Measure what is due at this step: any of val_loss, val_bpb, hellaswag_acc, hellaswag_acc_norm. Every rank
        must call it.

        `check_stop` (StopRequest.check) is called between batches, and raises Stopped.
        """
        results = {}
        if run.is_due(self.cfg.val_every):
            results |= self._validate(run, check_stop)
        if self.examples and run.is_due(self.cfg.hellaswag_every):
            results |= self._score_hellaswag(run, check_stop)
        return results

    def _validate(self, run: RunState, check_stop: Callable[[], None]) -> dict[str, Any]:
        """Measure and print the validation loss, and what it means beside the public runs of the preset."""
        cfg, train_step = self.cfg, self.train_step
        result = validate(train_step.forward, self.val_data, cfg, self.rt, train_step.micro_batch_size, check_stop)
        print0(f"step {run.step:5d}/{run.max_steps} | {result.summary_line()}")

        # Compare with public runs of the same recipe at this step. If there are none, print the reason once.
        if not self.reference_is_chosen:
            self.reference, reason = choose_reference(cfg, run.max_steps, self.data.paths[0].name)
            self.reference_is_chosen = True
            if reason:
                print0(f"no reference: {reason}")
        verdict = self.reference.judge(run.step, result.loss) if self.reference else None
        if verdict:
            print0(verdict)
        return result.metrics()

    def _score_hellaswag(self, run: RunState, check_stop: Callable[[], None]) -> dict[str, Any]:
        """Measure and print the accuracy in HellaSwag. Chance is 0.25; OpenAI's GPT-2 124M has acc_norm 0.2955."""
        model, rt = self.train_step.model, self.rt
        score = hellaswag_eval.evaluate(model, self.examples, rt.device, rt, check=check_stop)
        print0(f"step {run.step:5d}/{run.max_steps} | {hellaswag_eval.summary_line(score)}")
        return {"hellaswag_acc": score["acc"], "hellaswag_acc_norm": score["acc_norm"]}

    def sample_text(self, stop_requested: Callable[[], bool]) -> str:
        """Continuations of the sample prompt, one a line, cut short when this rank is asked to stop. Returns
        the reason if sampling fails: only rank 0 samples, and its error would end every rank."""
        try:
            return self._sample_text(stop_requested)
        except Exception as e:
            # Free the tensors that the failed pass held.
            traceback.clear_frames(e.__traceback__)
            return f"no samples: {type(e).__name__}: {printable(str(e)):.300}"

    @torch.no_grad()
    def _sample_text(self, stop_requested: Callable[[], bool]) -> str:
        """The continuations, one a line; an error is raised."""
        cfg, rt, model = self.cfg, self.rt, self.train_step.model
        encoding = tokenizer.encoding()

        # The prompt's last tokens, as many as the model reads; an empty prompt starts a document.
        if cfg.sample_prompt == "@val":
            prompt = self._first_words()
            self.val_prompt = printable(encoding.decode(prompt).strip("\ufffd\n ").partition("\n")[0])
        else:
            prompt = encoding.encode_ordinary(cfg.sample_prompt)
        prompt = prompt[-cfg.model.block_size :] or [tokenizer.EOT]

        # The same prompt for every sample.
        idx = torch.tensor([prompt] * NUM_SAMPLES, device=rt.device)  # (NUM_SAMPLES, T)

        # The samples have a generator of their own, seeded anew: every evaluation draws the same random numbers, and
        # leaves the global generator alone.
        sampler = sampling.Sampler(generator=torch.Generator(rt.device).manual_seed(cfg.seed))
        columns = list(idx.T)  # T tensors (NUM_SAMPLES,), to which each new token is appended
        with rt.autocast():
            for new_ids in sampling.stream(model, idx, SAMPLE_TOKENS, sampler):
                if stop_requested():
                    break
                columns.append(new_ids)
        rows = torch.stack(columns, dim=1).tolist()  # (NUM_SAMPLES, T + new tokens)
        return "\n".join(f"sample {i}: {printable(encoding.decode(row))}" for i, row in enumerate(rows))

    def _first_words(self) -> list[int]:
        """The first tokens of the val split's first document, or of the train split's in a run that does not
        validate."""
        # Sequence 0 of shard 0, without the <|endoftext|> that begins a document, and not beyond the next one.
        data = self.val_data or self.data
        tokens = data.read(np.array([[0, 0]]))[0].tolist()  # (T + 1,)
        if tokens[0] == tokenizer.EOT:
            tokens = tokens[1:]
        if tokenizer.EOT in tokens:
            tokens = tokens[: tokens.index(tokenizer.EOT)]
        return tokens[:PROMPT_TOKENS]


def num_val_sequences(data: Loader, cfg: TrainConfig) -> int:
    """How many sequences to validate on: as many as --val-tokens asks for, or all of a smaller val split."""
    return min(cfg.val_tokens // data.T, data.order.sequences_per_epoch)


def choose_reference(cfg: TrainConfig, max_steps: int, shard_name: str) -> tuple[Reference | None, str]:
    """Choose the public runs to compare a run of `max_steps` with. Returns (reference, "") or (None, reason), where the
    reason is empty for a preset without public runs. `shard_name` is a file of the run's data.

    The public runs apply to a run from scratch with the settings of its preset, on the same data, for the same number
    of steps.
    """
    # The preset has no public runs.
    if cfg.preset not in DATASETS or cfg.preset not in PRESETS:
        return None, ""

    # The weights that the run began with.
    reason = difference_in_start(cfg.init_from)
    if reason:
        return None, reason

    # Settings that shape the result; config_drift gives them as "max_lr: 0.0006 -> 0.001".
    _, changes = config_drift(PRESETS[cfg.preset], cfg)
    changed = [change.split(":")[0] for change in changes]
    comparable = [name for name, rule in RULES.items() if rule.kind == "noise"]
    comparable.append("model.vocab_size")  # the rows that pad it are not used
    flags = [flag(name) for name in changed if name not in comparable]
    if flags:
        return None, f"{', '.join(flags)} {'differs' if len(flags) == 1 else 'differ'} from preset {cfg.preset}"

    # The data, recognized by the names of the files.
    reason = difference_in_data(cfg.preset, shard_name)
    if reason:
        return None, reason

    # The length of the run, which sets the learning rate at each step.
    reference = find_reference(cfg.preset, max_steps, cfg.total_batch_size, shard_name)
    if reference is None:
        return None, f"no public run of {cfg.preset} has {max_steps:,} steps"
    return reference, ""


class Validation(NamedTuple):
    """What a validation measured."""

    loss: float  # mean cross-entropy, nats per token
    bits_per_byte: float | None  # of the text; None if the tokens are not GPT-2's

    def summary_line(self) -> str:
        """As training and --eval-only print it."""
        line = f"val loss: {self.loss:.4f}"
        return line if self.bits_per_byte is None else f"{line} | bits per byte: {self.bits_per_byte:.4f}"

    def metrics(self) -> dict[str, float]:
        """The keys of metrics.jsonl."""
        measured = {"val_loss": self.loss}
        return measured if self.bits_per_byte is None else measured | {"val_bpb": self.bits_per_byte}


@torch.no_grad()
def validate(
    forward: Forward, data: Loader, cfg: TrainConfig, rt: Runtime, B: int, check: Callable[[], None] = lambda: None
) -> Validation:
    """The loss over the first val_tokens of the val split. It does not depend on the number of ranks, nor on B, the
    number of sequences in a forward pass.

    Bits per byte compare models with different tokenizers: the summed loss of all targets that are text, in bits,
    divided by the number of bytes of these targets. As in nanochat (evaluate_bpb in its nanochat/loss_eval.py),
    <|endoftext|> is not text: neither its loss nor its bytes count. The bytes are those of the tokens, not of the
    decoded text, in which a part of a character would become another character.

    All batches have one shape, so nothing is compiled twice: the last ones are padded with rows that the loss ignores.
    With B = 2, two ranks and 9 sequences:

        sequence    0 1 2 3 | 4 5 6 7 | 8
        rank 0      0   2   | 4   6   | 8 padding
        rank 1        1   3 |   5   7 | (skips this batch)

    data: the val split. `check` is called before each batch, equally often on all ranks. Every rank must call this.
    """
    # The number of bytes of each id that uint16 can hold. A vocabulary smaller than GPT-2's is another tokenizer's,
    # whose bytes are unknown: no token counts as text.
    token_bytes = np.zeros(1 << 16, np.int64)
    has_text = data.vocab_size >= VOCAB_SIZE
    if has_text:
        token_bytes = tokenizer.token_bytes()

    # The first sequences of the split, in order. A stride is what all ranks together take at a time.
    count = num_val_sequences(data, cfg)
    sequences = data.order.span(0, count)  # (count, 2) of (shard, sequence)
    stride = B * rt.world_size

    # Float64 sums, where the device has them, keep thousands of batches exact enough that the result does not depend on
    # the number of ranks.
    total = torch.zeros((), device=rt.device, dtype=torch.float32 if rt.device.type == "mps" else torch.float64)
    no_text_total = torch.zeros_like(total)  # of the targets that are not text
    text_bytes = 0

    for i in range(0, count, stride):
        check()

        # Each rank takes every world_size-th sequence of the stride, so that the ranks share the last one evenly, too.
        own = data.read(sequences[i : i + stride][rt.rank :: rt.world_size])  # (n <= B, T + 1)
        if len(own) == 0:
            continue

        # The bytes of the targets, and which of the n * T targets have none.
        target_bytes = token_bytes[own[:, 1:]].ravel()  # (n * T,)
        text_bytes += int(target_bytes.sum())
        no_text = np.flatnonzero(target_bytes == 0) if has_text else np.empty(0, np.int64)

        # Pad to B rows, whose targets the loss ignores.
        padded = np.zeros((B, data.T + 1), np.uint16)
        padded[: len(own)] = own
        x, y = to_device(torch.from_numpy(padded), rt.device)  # (B, T) each
        y[len(own) :] = -100  # ignored by the loss, as in F.cross_entropy

        # The mean over the rows that count, and the sum over the targets that are not text.
        with rt.autocast():
            loss, no_text_loss = forward.validation_losses(x, y, torch.from_numpy(no_text).to(rt.device))
        total += loss.to(total.dtype) * len(own)
        no_text_total += no_text_loss.to(total.dtype)
    check()

    # Add up all ranks. `total` is the sum of the mean losses of all sequences, which are equally long: divided by their
    # number, it is the mean over all targets.
    loss = rt.all_reduce(total).item() / count
    no_text_nats = rt.all_reduce(no_text_total).item()
    text_bytes = rt.all_reduce(torch.tensor(text_bytes, device=rt.device)).item()

    # Tokens of another tokenizer have no known bytes, and a split of nothing but <|endoftext|> has no bytes of text.
    if text_bytes == 0:
        return Validation(loss, None)

    # The loss of all targets, less that of the targets that are not text, in bits per byte of text.
    text_nats = loss * count * data.T - no_text_nats
    return Validation(loss, text_nats / (math.log(2) * text_bytes))
