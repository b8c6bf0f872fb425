"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    examples = load_examples("data/hellaswag/hellaswag_val.jsonl")
    print(evaluate(model, examples, "cuda"))    # {"acc": 0.2859, "acc_norm": 0.2955, "stderr": 0.0046, "n": 10042}

Chance is 0.25, and OpenAI's GPT-2 124M reaches an acc_norm of 0.2955. The scores are in completion style, as
build-nanogpt and llm.c report them: acc takes the ending with the lowest summed loss, acc_norm the ending with the
lowest loss per token.
"""

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from model import ANY_LENGTH_KERNELS, GPT, GPTConfig, has_gpt2_tokens, token_losses
from system.distributed import Runtime
from system.errors import UserError, explain_errors, require
from tokens import tokenizer
from training.config import HELLASWAG_DATA

NUM_ENDINGS = 4
LABELS = ("0", "1", "2", "3")

# Rows are padded to a multiple of this many positions. A larger number would mean fewer shapes, each of which a GPU's
# kernels plan anew; a smaller one less padding.
LENGTH_MULTIPLE = 8

Text = tuple[list[int], int]  # the tokens of a context and one ending, and where the ending begins


# ------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Example:
    """One row of HellaSwag as tokens."""

    context: list[int]
    endings: list[list[int]]  # the tokens of the four endings
    label: int  # the correct ending, 0 to 3


def render(row: dict) -> Example:
    """Tokenize one row of the data set. Each ending follows the context after a space. Raises UserError for
    anything else."""
    encode = tokenizer.encoding().encode_ordinary
    match row:
        case {"ctx": str(context), "endings": [str(), str(), str(), str()] as endings, "label": label}:
            # Without a context nothing would predict the first token of an ending. As labels the original has numbers,
            # the Hub's copy text. As text, true and 2.7 are none.
            if context and str(label) in LABELS:
                return Example(encode(context), [encode(" " + ending) for ending in endings], int(label))
    raise UserError("a row has 'ctx' (text), 'endings' (four texts) and 'label' (0 to 3)")


def load_examples(path: str | Path = HELLASWAG_DATA, limit: int = 0) -> list[Example]:
    """Read and tokenize the first `limit` rows of a .jsonl file; 0 means all. Raises UserError if the file is missing,
    has no rows, or has a bad row, whose line the error names."""
    path = Path(path)
    download_command = f"python hellaswag.py --data {shlex.quote(str(path))}"
    require(path.is_file(), f"no HellaSwag rows at {path}; download them with: {download_command}")
    lines = path.read_bytes().splitlines()
    require(lines, f"{path} has no rows; remove it and run: {download_command}")

    examples = []
    for number, line in enumerate(lines[: limit or None], 1):
        fix = f"fix it, or remove the file and run: {download_command}"
        with explain_errors(f"{path} line {number} is no row", fix, json.JSONDecodeError, UnicodeDecodeError):
            examples.append(render(json.loads(line)))
    return examples


def why_unreadable(examples: list[Example], config: GPTConfig) -> str:
    """Why a model of this shape cannot read the examples; "" if it can."""
    if not has_gpt2_tokens(config.vocab_size):
        return f"the model has a vocabulary of {config.vocab_size} tokens, not GPT-2's"
    # A long context can be cut, but the model must read an ending as a whole.
    longest = max(len(ending) for example in examples for ending in example.endings)
    is_readable = longest <= config.block_size
    return "" if is_readable else f"an ending has {longest} tokens, but the model reads {config.block_size}"


# ------------------------------------------------------------------------- the scores


def evaluate(model: GPT, examples: list[Example], device: str | torch.device) -> dict[str, float | int]:
    """The accuracies of a model on `device`, in its own precision, as `summarize` returns them. Raises UserError if the
    model cannot read the examples."""
    one_rank = Runtime(torch.device(device), torch.float32)
    return summarize(score(model, examples, one_rank), examples)


def summarize(losses: Tensor, examples: list[Example]) -> dict[str, float | int]:
    """{"acc", "acc_norm", "stderr" (of acc_norm), "n"} from the losses (n, 4) that `score` returns. The accuracies are
    NaN if a loss is not finite."""
    n = len(examples)
    labels = torch.tensor([example.label for example in examples])
    # The prediction is the ending with the lowest loss, summed for acc, per token for acc_norm. (n, 4) -> (n,)
    acc = (losses.argmin(1) == labels).sum().item() / n
    acc_norm = (normalize(losses, examples).argmin(1) == labels).sum().item() / n
    if not losses.isfinite().all():  # of four NaN the first is the lowest, and right for every label 0
        acc = acc_norm = math.nan
    stderr = math.sqrt(acc_norm * (1 - acc_norm) / max(n - 1, 1))  # of the mean of n answers, right or wrong
    return {"acc": acc, "acc_norm": acc_norm, "stderr": stderr, "n": n}


def describe_score(result: dict[str, float | int]) -> str:
    """The line of a score, as hellaswag.py and a run print it."""
    return f"hellaswag acc {result['acc']:.4f} acc_norm {result['acc_norm']:.4f} n {result['n']}"


def normalize(losses: Tensor, examples: list[Example]) -> Tensor:
    """Losses per token (n, 4), by which acc_norm chooses, from the losses (n, 4) that `score` returns."""
    token_counts = torch.tensor([[len(ending) for ending in example.endings] for example in examples])
    return losses / token_counts


@torch.no_grad()
def score(model: GPT, examples: list[Example], rt: Runtime) -> Tensor:
    """Summed negative log-likelihood of each ending in nats, (n, 4) float32 on the CPU, the same on all ranks.

    The ranks of `rt` split the batches, so each of them must call this; the forward pass runs under its autocast.
    Raises UserError if the model cannot read the examples.
    """
    problem = why_unreadable(examples, model.config)
    require(not problem, problem)
    texts = [text for example in examples for text in make_texts(example, model.config.block_size)]  # 4 n
    batches = plan_batches(texts, max_positions=8_192 if rt.device.type == "cuda" else 512)

    # Every rank plans the same batches, takes its own, and leaves the losses of the others at zero.
    losses = torch.zeros(len(texts), device=rt.device)
    with rt.autocast(), sdpa_kernel(ANY_LENGTH_KERNELS):
        for i in rt.each_batch(range(0, len(batches), rt.world_size), "hellaswag"):
            own = i + rt.rank
            if own < len(batches):
                batch = batches[own]
                ids, targets = make_batch([texts[i] for i in batch], model.config.block_size)
                losses[batch] = batch_losses(model, ids.to(rt.device), targets.to(rt.device))

    # A text's loss is zero on all ranks but one, so the sum is exact.
    return rt.all_reduce(losses).cpu().view(-1, NUM_ENDINGS)


def batch_losses(model: GPT, ids: Tensor, targets: Tensor) -> Tensor:
    """Summed negative log-likelihood (N,) of the targets of each row, float32. ids, targets (N, T): see make_batch."""
    # Logits are needed only where an ending is predicted. (N, T, C) -> (M, C) -> (M, V) -> (M,)
    in_ending = targets >= 0
    logits = model.logits(model.hidden(ids)[in_ending])

    # Back to their places, then add up each row. (M,) -> (N, T) -> (N,)
    losses = torch.zeros(ids.shape, device=ids.device)
    losses[in_ending] = token_losses(logits, targets[in_ending])
    return losses.sum(1)


# ------------------------------------------------------------------------- the batches


def make_texts(example: Example, block_size: int) -> list[Text]:
    """The four texts of an example. All four have as much of the end of the context as the model reads together with
    the longest ending, whose last token is not read."""
    longest = max(map(len, example.endings))
    context = example.context[-(block_size + 1 - longest) :]
    return [(context + ending, len(context)) for ending in example.endings]


def row_length(text: Text) -> int:
    """Positions of a text's row, rounded up: the last token is predicted, but not read."""
    return math.ceil((len(text[0]) - 1) / LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def plan_batches(texts: list[Text], max_positions: int) -> list[list[int]]:
    """The indices of all texts, in batches of one text or at most max_positions positions, padding included."""
    # Longest first: neighbours have about the same length, and if the first batch fits in memory, all do.
    order = sorted(range(len(texts)), key=lambda i: row_length(texts[i]), reverse=True)
    batches = []
    while order:
        # All rows of a batch are as long as its first, whose length decides how many fit.
        size = max(1, max_positions // row_length(texts[order[0]]))
        batches.append(order[:size])
        order = order[size:]
    return batches


def make_batch(texts: list[Text], block_size: int) -> tuple[Tensor, Tensor]:
    """ids, targets (N, T) of one batch, whose first text is the longest. -100 is no target. With T = 8:

    column       0    1    2    3      4    5    6    7        context: A man sits, ending: on a chair
    id           A    man  sits on     a    0    0    0        the padding comes last, where no other position
    target       -100 -100 on   a      chair -100 ...          sees it
    """
    T = min(row_length(texts[0]), block_size)
    ids = torch.zeros(len(texts), T, dtype=torch.int64)
    targets = torch.full((len(texts), T), -100)
    for row, (tokens, start) in enumerate(texts):
        text = torch.tensor(tokens)
        end = len(text) - 1
        ids[row, :end] = text[:-1]
        # The context's last token predicts the ending's first.
        targets[row, start - 1 : end] = text[start:]
    return ids, targets
