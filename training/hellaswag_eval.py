r"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    examples = load_examples("data/hellaswag/hellaswag_val.jsonl")
    print(summary_line(evaluate(model, examples, device)))   # hellaswag acc 0.2859 acc_norm 0.2955 n 10042

hellaswag.py is the command line over this module; the trainer calls it between steps (training/evaluator.py).

The scores are in completion style, as build-nanogpt and llm.c report them: acc takes the ending with the lowest summed
loss, acc_norm the ending with the lowest loss per token. The same four sums are computed with a fraction of the work,
because the context, which the endings share, is read once:

    context: A man sits        endings: 1 down now, 2 on a chair, 3 up, 4 to sing

    One row of the batch is a prefix tree. The last token of an ending is predicted but never read, so ending 3, which
    has one token, takes no column.

    column       0     1    2    3     4    5    6    7
    id           A    man  sits  down  on   a    to  <pad>
    position     0     1    2    3     3    4    3    0        the place in the text, not in the row
    part         0     0    0    1     2    2    4    5        0 context, 1 to 4 endings, 5 padding

    The attention mask has an x where the query (a line) sees the key (a column): each token sees itself and, of the
    tokens before it, those of the context and of its own ending. Endings do not see each other.

    query \ key  A    man  sits  down  on   a    to  <pad>       it predicts
      A          x
      man        x     x
      sits       x     x    x                                   down, on, up, to: the endings' first tokens
      down       x     x    x    x                              now
      on         x     x    x          x                        a
      a          x     x    x          x    x                   chair
      to         x     x    x                    x              sing
      <pad>      x     x    x                         x
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from system.cli import UserError, print0, require
from tokens import tokenizer

# torch takes seconds to import, so only the functions that need it import it: hellaswag.py downloads the rows and
# prints its help without torch.
if TYPE_CHECKING:
    import torch

    from model import GPT, GPTConfig
    from system.distributed import Runtime

DEFAULT_PATH = Path("data/hellaswag/hellaswag_val.jsonl")
NUM_ENDINGS = 4

# Row lengths are rounded up to a multiple of this number. A larger number would mean fewer shapes, which saves planning
# time on a GPU; a smaller number would mean less padding.
LENGTH_MULTIPLE = 8

# The parts of a row; the endings are 1 to NUM_ENDINGS.
CONTEXT = 0
PADDING = NUM_ENDINGS + 1


# ------------------------------------------------------------------------- examples


@dataclass(frozen=True)
class Example:
    """One row of HellaSwag as tokens."""

    context: list[int]
    endings: list[list[int]]  # the tokens of the four endings
    label: int  # the correct ending, 0 to 3


def render(row: dict) -> Example:
    """Tokenize one row of the data set. Each ending follows the context after a space."""
    encode = tokenizer.encoding().encode_ordinary
    endings = [encode(" " + ending) for ending in row["endings"]]
    return Example(encode(row["ctx"]), endings, int(row["label"]))


def check_row(row: object, where: str) -> None:
    """Raise UserError, which names the place `where` and the field, unless `row` has what `render` needs."""
    require(isinstance(row, dict), f"{where}: the row is not a JSON object")

    # An empty context has no last token, which is what predicts the first token of each ending.
    context = row.get("ctx")
    has_context = isinstance(context, str) and context.strip()
    require(has_context, f"{where}: field 'ctx' is missing or not text")

    # An empty ending has no loss per token.
    endings = row.get("endings")
    are_texts = isinstance(endings, list) and all(isinstance(e, str) and e.strip() for e in endings)
    require(are_texts and len(endings) == NUM_ENDINGS, f"{where}: field 'endings' is missing or not four texts")

    # The original file has the label as a number, the copy on the Hub as text.
    require(str(row.get("label")) in ("0", "1", "2", "3"), f"{where}: field 'label' is missing or not 0, 1, 2 or 3")


def load_examples(path: str | Path = DEFAULT_PATH, limit: int = 0) -> list[Example]:
    """Read and tokenize the first `limit` rows of a .jsonl file; 0 means all. Raises UserError if the file is missing,
    has no rows, or has a bad row, whose line and field the error names."""
    path = Path(path)
    download_command = f"python hellaswag.py --data {shlex.quote(str(path))}"
    require(path.is_file(), f"no HellaSwag rows at {path}; download them with: {download_command}")

    # Blank lines are skipped, but count in the line numbers that an error names.
    content = path.read_bytes()
    numbered_lines = [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if limit:
        numbered_lines = numbered_lines[:limit]

    # Check and tokenize each row.
    examples = []
    for number, line in numbered_lines:
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        # Broken JSON and bytes that are not UTF-8 are ValueErrors; very deep nesting is a RecursionError.
        except (ValueError, RecursionError) as e:
            fix = f"fix it, or remove the file and run: {download_command}"
            raise UserError(f"{where} is not JSON ({e}); {fix}") from None
        check_row(row, where)
        examples.append(render(row))
    require(examples, f"{path} has no rows; remove it and run: {download_command}")
    return examples


def require_readable(examples: list[Example], config: GPTConfig) -> None:
    """Raise UserError unless a model of this shape can read the examples."""
    # The examples are in GPT-2's tokens, of which the end of text is the last.
    require(config.vocab_size > tokenizer.EOT, f"the model has {config.vocab_size} tokens, fewer than GPT-2's")

    # A long context can be cut, but an ending must be read as a whole.
    longest = max(len(ending) for example in examples for ending in example.endings)
    require(longest <= config.block_size, f"an ending has {longest} tokens, but the model reads {config.block_size}")


def available_examples(data: str, config: GPTConfig) -> list[Example]:
    """The examples for a training run, from the file `data` or, if that is "", from the default place. If nothing is
    there, or a model of this shape cannot read them, print the reason and return []: the run trains without HellaSwag.
    Raises UserError if `data` is given but cannot be loaded."""
    # Nobody asked for a file, and nobody has downloaded the rows.
    if not data and not DEFAULT_PATH.exists():
        print0(f"HellaSwag is off: no {DEFAULT_PATH}; download it with: python hellaswag.py")
        return []

    # A model of bytes, or with a very short context, cannot read these rows, but it can train without them.
    examples = load_examples(data or DEFAULT_PATH)
    try:
        require_readable(examples, config)
    except UserError as e:
        print0(f"HellaSwag is off: {e}")
        return []
    return examples


# ------------------------------------------------------------------------- batches


class PrefixTree(NamedTuple):
    """An example as one row of a batch; see the picture at the top of this module."""

    length: int  # positions, rounded up to a multiple of LENGTH_MULTIPLE
    index: int  # which example
    context: list[int]  # the tokens of its context, cut at the start to fit the model


class Batch(NamedTuple):
    """N prefix trees of up to T positions, whose endings have M tokens in all. Tensors of int64 on the CPU."""

    ids: torch.Tensor  # (N, T)
    positions: torch.Tensor  # (N, T): the place of each token in its text
    parts: torch.Tensor  # (N, T): 0 context, 1 to 4 endings, 5 padding
    rows: torch.Tensor  # (M,): the row of the position that predicts each target
    columns: torch.Tensor  # (M,): its column
    targets: torch.Tensor  # (M,): the tokens of all endings
    ending_numbers: torch.Tensor  # (M,): which of the batch's 4 * N endings the target belongs to


def plan_batches(examples: list[Example], block_size: int, max_positions: int) -> list[list[PrefixTree]]:
    """Sort all examples by length and cut them into batches of at most max_positions positions, padding included, or
    of one example. A context too long for the model loses its beginning."""
    trees = []
    for index, example in enumerate(examples):
        # The context and the longest ending must fit the model together. The ending's last token is not read.
        longest = max(len(ending) for ending in example.endings)
        context = example.context[-(block_size + 1 - longest) :]

        # The context is stored once, each ending without its last token.
        positions = len(context) + sum(len(ending) - 1 for ending in example.endings)
        length = math.ceil(positions / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        trees.append(PrefixTree(length, index, context))

    # Longest first: neighbours have about the same length, and if the first batch fits in memory, all do.
    trees.sort(key=lambda tree: (tree.length, tree.index), reverse=True)
    batches = []

    # All rows of a batch are as long as its first, whose length decides how many fit.
    start = 0
    while start < len(trees):
        size = max(1, max_positions // trees[start].length)
        batches.append(trees[start : start + size])
        start += size
    return batches


def make_batch(trees: list[PrefixTree], examples: list[Example]) -> Batch:
    """The tensors of one batch of plan_batches."""
    import torch

    T = trees[0].length  # the first tree is the longest
    batch_ids, batch_positions, batch_parts = [], [], []
    rows, columns, targets, ending_numbers = [], [], [], []
    for row, tree in enumerate(trees):
        # The row starts with the context.
        n = len(tree.context)
        ids = list(tree.context)
        positions = list(range(n))
        parts = [CONTEXT] * n

        for number, ending in enumerate(examples[tree.index].endings):
            # What is read of an ending is all but its last token. Its positions continue those of the context.
            read = ending[:-1]
            start = len(ids)
            ids += read
            positions += range(n, n + len(read))
            parts += [number + 1] * len(read)

            # The context's last token predicts the ending's first token; each token read predicts the one after it.
            rows += [row] * len(ending)
            columns += [n - 1, *range(start, start + len(read))]
            targets += ending
            ending_numbers += [NUM_ENDINGS * row + number] * len(ending)

        # Pad the row to the length of the batch.
        padding = T - len(ids)
        batch_ids.append(ids + [0] * padding)
        batch_positions.append(positions + [0] * padding)
        batch_parts.append(parts + [PADDING] * padding)

    return Batch(
        ids=torch.tensor(batch_ids),
        positions=torch.tensor(batch_positions),
        parts=torch.tensor(batch_parts),
        rows=torch.tensor(rows),
        columns=torch.tensor(columns),
        targets=torch.tensor(targets),
        ending_numbers=torch.tensor(ending_numbers),
    )


def tree_mask(parts: torch.Tensor) -> torch.Tensor:
    """The attention mask (N, 1, T, T) of prefix trees, true where query i sees key j, from their parts (N, T)."""
    query_part = parts[:, None, :, None]  # (N, 1, T, 1)
    key_part = parts[:, None, None, :]  # (N, 1, 1, T)

    # Every token sees the context and its own ending. Padding sees itself, so that every query has a key.
    is_context = key_part == CONTEXT  # (N, 1, 1, T)
    is_own_part = key_part == query_part  # (N, 1, T, T)

    # Causal: of these keys, only those at or before the query.
    return (is_context | is_own_part).tril()


# ------------------------------------------------------------------------- scores


def score(
    model: GPT,
    examples: list[Example],
    device: torch.device,
    rt: Runtime | None = None,
    progress: bool = False,
    check: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Summed negative log-likelihood of each ending in nats, (n, 4) float32 on the CPU, the same on all ranks.

    The ranks of `rt` split the batches, so each of them must call this; the forward pass runs under its autocast.
    Without `rt` there is one process, in float32. progress: show a progress bar. check: called equally often on every
    rank; it may raise. Raises UserError if the model cannot read the examples.
    """
    import torch
    from tqdm import tqdm

    from system.distributed import Runtime

    # Fail before the first batch, not at the example that does not fit.
    require_readable(examples, model.config)
    if rt is None:
        rt = Runtime(device, torch.float32)

    # A GPU needs large batches. A CPU is fastest when a batch and its logits fit in its cache.
    if device.type == "cuda":
        max_positions = 65_536
        logits_at_once = 8_192
    else:
        max_positions = 512
        logits_at_once = 128

    # Every rank plans the same batches, takes its own, and leaves the losses of the others at zero.
    batches = plan_batches(examples, model.config.block_size, max_positions)
    losses = torch.zeros(len(examples), NUM_ENDINGS)
    with torch.no_grad(), rt.autocast():
        # In each round the ranks take one batch each; in the last round some may get none, but still call `check`.
        for first in tqdm(range(0, len(batches), rt.world_size), "hellaswag", disable=not progress, leave=False):
            check()
            number = first + rt.rank
            if number < len(batches):
                trees = batches[number]
                indices = [tree.index for tree in trees]
                losses[indices] = batch_losses(model, make_batch(trees, examples), device, logits_at_once)

    # A last chance to stop, or to report a failure, before the ranks wait for each other. Nothing may fail after it.
    losses = losses.to(device)
    check()

    # An example's losses are zero on all ranks but one, so the sum is exact.
    return rt.all_reduce(losses).cpu()


def batch_losses(model: GPT, batch: Batch, device: torch.device, logits_at_once: int) -> torch.Tensor:
    """Summed negative log-likelihood of each ending of a batch of N prefix trees, (N, 4) float32 on the CPU."""
    import torch
    import torch.nn.functional as F

    # Read all trees at once.
    mask = tree_mask(batch.parts.to(device))  # (N, 1, T, T)
    hidden = model.hidden(batch.ids.to(device), positions=batch.positions.to(device), mask=mask)  # (N, T, C)

    # Logits are needed only where an ending is predicted. (N, T, C) -> (M, C)
    hidden = hidden[batch.rows.to(device), batch.columns.to(device)]

    # The logits are 50,000 wide, so compute them for a part of the M targets at a time. (m, C) -> (m, V) -> (m,)
    token_losses = []
    target_chunks = batch.targets.to(device).split(logits_at_once)
    for hidden_chunk, target_chunk in zip(hidden.split(logits_at_once), target_chunks, strict=True):
        logits = model.logits(hidden_chunk).float()
        token_losses.append(F.cross_entropy(logits, target_chunk, reduction="none").cpu())

    # Add up each ending's tokens, on the CPU, where the order of the sum is fixed. (M,) -> (4 * N,) -> (N, 4)
    ending_losses = torch.zeros(NUM_ENDINGS * len(batch.ids))
    ending_losses.index_add_(0, batch.ending_numbers, torch.cat(token_losses))
    return ending_losses.view(-1, NUM_ENDINGS)


def normalize(losses: torch.Tensor, examples: list[Example]) -> torch.Tensor:
    """Losses per token (n, 4), by which acc_norm chooses, from the losses (n, 4) that `score` returns."""
    import torch

    token_counts = torch.tensor([[len(ending) for ending in example.endings] for example in examples])
    return losses / token_counts


def summarize(losses: torch.Tensor, examples: list[Example]) -> dict[str, float | int]:
    """{"acc", "acc_norm", "stderr" (of acc_norm), "n"} from the losses (n, 4) that `score` returns."""
    import torch

    n = len(examples)
    labels = torch.tensor([example.label for example in examples])

    # The prediction is the ending with the lowest loss, summed for acc, per token for acc_norm. (n, 4) -> (n,)
    acc = (losses.argmin(1) == labels).sum().item() / n
    acc_norm = (normalize(losses, examples).argmin(1) == labels).sum().item() / n

    # The standard error of the mean of n answers, each of which is right or wrong.
    stderr = math.sqrt(acc_norm * (1 - acc_norm) / max(n - 1, 1))
    return {"acc": acc, "acc_norm": acc_norm, "stderr": stderr, "n": n}


def evaluate(
    model: GPT,
    examples: list[Example],
    device: torch.device,
    rt: Runtime | None = None,
    progress: bool = False,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float | int]:
    """{"acc", "acc_norm", "stderr" (of acc_norm), "n"} of a model. The arguments and errors are those of `score`."""
    return summarize(score(model, examples, device, rt, progress, check), examples)


def summary_line(result: dict[str, float | int]) -> str:
    """The line that reports the result of `evaluate`, such as `hellaswag acc 0.2859 acc_norm 0.2955 n 10042`."""
    return f"hellaswag acc {result['acc']:.4f} acc_norm {result['acc_norm']:.4f} n {result['n']}"
