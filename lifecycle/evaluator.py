"""A run's evaluations: validation loss, HellaSwag and samples, each with its own period.

    evaluator = Evaluator(run, trainer)
    row |= evaluator.measure(step, trainer.weights, stop)           # {"val_loss": ..., "hellaswag_acc": ...}
    row |= evaluator.measure(step, average, stop, of="_ema")        # {"val_loss_ema": ..., ...}
    text = evaluator.sample_text(step, trainer.weights)

Each is of the weights that it is given. Nothing here changes the weights, the gradients or the order of the data.
"""

from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from evaluation import multiple_choice, reference
from lifecycle.start import Run
from lifecycle.stop import StopRequest
from system import distributed, machine
from system.distributed import Runtime
from system.errors import require
from system.printing import print0
from tokens import sources, tokenizer
from training.config import TrainConfig, changed_settings, flag, has_mark, shapes_result
from training.loader import Loader
from training.loss import Loss
from training.presets import PRESETS
from training.step import Trainer
from training.validation import count_sequences, validate
from weights.open_model import open_model

NUM_SAMPLES, SAMPLE_TOKENS = 4, 48
PROMPT_TOKENS = 8  # of --sample-prompt @val


def is_due(step: int, period: int, max_steps: int) -> bool:
    """Whether something with this period (0: never) is due at a step. At the last one everything enabled is."""
    return period > 0 and (step % period == 0 or step == max_steps)


class Evaluator:
    """Runs the evaluations that are due. HellaSwag and samples call the model itself, because their shapes vary;
    validation calls the compiled forward pass."""

    def __init__(self, run: Run, trainer: Trainer):
        cfg = run.cfg
        self.run, self.trainer = run, trainer
        self.score_hellaswag = multiple_choice.make_scorer(cfg, cfg.model)
        self.reference = choose_reference(cfg, run.max_steps) if run.val_data else None
        self.off_track = 0  # how many evaluations in a row
        can_stop = self.reference or not cfg.stop_off_track
        require(can_stop, "--stop-off-track: there are no public runs to compare this one with; leave it out")

        # The ids that samples continue. Without GPT-2's vocabulary nobody could read them.
        has_text = tokenizer.has_gpt2_tokens(cfg.model.vocab_size)
        self.prompt = choose_prompt(cfg, run.val_data or run.data) if has_text else []

    def measure(self, step: int, weights: dict[str, Tensor], stop: StopRequest, of: str = "") -> dict[str, Any]:
        """Measure and print what is due at this step, of these weights: any of val_loss (with val_bpb, in bits per
        byte), hellaswag_acc and hellaswag_acc_norm. of: what these names end in, for other weights than the trainer's,
        which alone are compared with public runs. Every rank must call it."""
        assert bool(of) == (weights is not self.trainer.weights), "other weights have other names"
        cfg, rt, val_data, max_steps = self.run.cfg, self.run.rt, self.run.val_data, self.run.max_steps
        label = f"step {step:5d}/{max_steps}{of}"
        results: dict[str, Any] = {}

        with self.trainer.using(weights):
            if val_data and is_due(step, cfg.val_every, max_steps):
                results = validate(self.trainer.loss, val_data, cfg, rt, self.trainer.B)
                print0(f"{label} | {describe_loss(results, val_data.T)}")

                verdict = self.reference.judge(step, results["val_loss"]) if self.reference and not of else None
                if verdict:
                    is_on_track, sentence = verdict
                    print0(sentence)
                    self.off_track = 0 if is_on_track else self.off_track + 1
                if cfg.stop_off_track and self.off_track == 2:
                    stop.request("--stop-off-track")

            # Chance is 0.25; OpenAI's GPT-2 124M has an acc_norm of 0.2955.
            if self.score_hellaswag and is_due(step, cfg.hellaswag_every, max_steps):
                score = self.score_hellaswag(self.run.model, rt)
                print0(f"{label} | {multiple_choice.describe_score(score)}")
                results |= {"hellaswag_acc": score["acc"], "hellaswag_acc_norm": score["acc_norm"]}
        return {name + of: value for name, value in results.items()}

    def sample_text(self, step: int, weights: dict[str, Tensor]) -> str:
        """If samples are due, continuations of the prompt by these weights; "" otherwise and on all ranks but 0."""
        cfg, rt = self.run.cfg, self.run.rt
        is_now = step > 0 and is_due(step, cfg.sample_every, self.run.max_steps)
        if not (rt.is_main and self.prompt and is_now):
            return ""

        # The samples have a generator of their own, seeded anew: every evaluation draws the same random numbers, and
        # leaves the global generator alone.
        generator = torch.Generator(rt.device).manual_seed(cfg.seed)
        idx = torch.tensor(NUM_SAMPLES * [self.prompt], device=rt.device)  # (NUM_SAMPLES, T)
        with self.trainer.using(weights):
            rows = self.run.model.generate(idx, SAMPLE_TOKENS, generator=generator).tolist()
        texts = tokenizer.encoding().decode_batch(rows)
        return "\n".join(f"--- step {step}, sample {i} of {NUM_SAMPLES}\n{text}" for i, text in enumerate(texts, 1))


def choose_reference(cfg: TrainConfig, max_steps: int) -> reference.Reference | None:
    """The public runs to compare a run of `max_steps` with, and print which; None for a run from trained weights, whose
    loss is much lower, for a preset without public runs, for another recipe than the preset's, and unless the manifest
    or the first words say that the data are theirs."""
    found = reference.find_reference(cfg.preset, max_steps, cfg.total_batch_size)
    if found is None or cfg.init_from != "scratch":
        return None

    # The margin allows for another seed or order of the data, and the rows that pad the vocabulary are not used.
    changes = changed_settings(PRESETS[cfg.preset], cfg).keys() - {"model.vocab_size"}
    different = sorted(flag(name) for name in changes if shapes_result(name) and not has_mark(name, "like_a_seed"))
    dataset = reference.DATASETS[cfg.preset]
    if sources.identify(cfg.data_dir) != dataset:
        different.append(f"the data of {cfg.data_dir}")
    if different:
        print0(f"no reference: the public runs of {cfg.preset}, on {dataset}, differ in {', '.join(different)}")
        return None
    print0(f"reference: {found.runs} public runs of {cfg.preset}, on {dataset}")
    return found


def choose_prompt(cfg: TrainConfig, data: Loader) -> list[int]:
    """The ids that samples continue: --sample-prompt or, if that is @val, the first words of the data."""
    if cfg.sample_prompt != "@val":
        prompt = tokenizer.encoding().encode(cfg.sample_prompt, allowed_special="all")
        return prompt[-cfg.model.block_size :] or [tokenizer.EOT]  # an empty prompt starts a document

    # The first sequence, without the <|endoftext|> that begins a document, and not beyond the next one.
    tokens = data.read(data.order.span(0, 1))[0].tolist()  # (T + 1,)
    document = list(takewhile(lambda token: token != tokenizer.EOT, tokens[1:]))
    return document[:PROMPT_TOKENS] or [tokenizer.EOT]


def describe_loss(results: dict[str, float], T: int) -> str:
    """What `validate` has returned, in sequences of T tokens."""
    bits = f" | bits per byte: {results['val_bpb']:.4f}" if "val_bpb" in results else ""
    return f"val loss: {results['val_loss']:.4f} | context: {T}{bits}"


def evaluate_weights(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: print val loss and HellaSwag of the weights named by --resume or --init-from, as a run reports them.
    Every rank must call it.

    For OpenAI's 124M (--init-from gpt2) expect a val loss of about 3.29 on FineWeb-Edu, and 0.2955 in HellaSwag
    (acc_norm). Raises UserError without weights or data."""
    weights = {"none": cfg.init_from, "auto": str(cfg.run_dir)}.get(cfg.resume, cfg.resume)
    fix = "add --resume log/RUN, for its own data, or --init-from gpt2 or another model"
    require(weights != "scratch", f"--eval-only needs trained weights: {fix}")
    model = open_model(weights).to(rt.device)
    rt = distributed.choose_precision(rt, cfg.dtype)

    # The val split, in sequences no longer than the model's context. All ranks must have found the same files.
    T = min(cfg.sequence_length, model.config.block_size)
    val_data = Loader(cfg.data_dir, "val", T, model.config.vocab_size)
    facts = {"the data": val_data.fingerprint(), "the HellaSwag file": multiple_choice.checksum(cfg)}
    rt.check_equal(facts, "give every machine the same files")

    # Validation loss. Not compiled: compiling would take longer than it saves.
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
    results = validate(Loss(model, compiles=False), val_data, cfg, rt, B)
    what = f"{weights} on {count_sequences(val_data, cfg) * T:,} tokens of {cfg.data_dir}"
    print0(f"{what}, in {machine.dtype_name(rt.dtype)} | {describe_loss(results, T)}")
    score_hellaswag = multiple_choice.make_scorer(cfg, model.config)
    if score_hellaswag:
        print0(multiple_choice.describe_score(score_hellaswag(model, rt)))
