r"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    python hellaswag.py                                        # download the 10,042 validation rows
    python hellaswag.py --model log/gpt2-124m                  # score a run, a .pt file, a Hugging Face folder, gpt2
    python hellaswag.py --model gpt2 --limit 1000 --per-example rows.jsonl

    examples = load_examples("data/hellaswag/hellaswag_val.jsonl")
    print(evaluate(model, examples, "cuda"))    # {"acc": 0.2859, "acc_norm": 0.2955, "stderr": 0.0046, "n": 10042}

train_gpt2.py scores its model with it between steps (make_scorer). Chance is 0.25, and OpenAI's GPT-2 124M reaches an
acc_norm of 0.2955.

The scores are in completion style, as build-nanogpt and llm.c report them: acc takes the ending with the lowest summed
loss, acc_norm the ending with the lowest loss per token. Below, in this order: the rows, the scores, the batches that
the scores are computed in, and the command line.
"""

from __future__ import annotations

import json
import math
import shlex
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from system import cli
from system.cli import UserError, explain_errors, print0, progress_bar, require
from system.files import atomic_write
from system.usage import optional

cli.set_omp_wait_policy()  # before torch is imported
import torch
import torch.nn.functional as F
import tyro

from lifecycle.evaluator import describe_score
from model import GPT, GPTConfig, softcap
from system import distributed, machine
from system.distributed import Runtime
from tokens import tokenizer
from training.config import HELLASWAG_DATA
from training.forward import cast_head
from weights.open_model import open_model

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
VAL_ROWS = 10_042
DEFAULT_PATH = Path(HELLASWAG_DATA)
NUM_ENDINGS = 4
LABELS = ("0", "1", "2", "3")

# Row lengths are rounded up to a multiple of this number. A larger number would mean fewer shapes, which saves planning
# time on a GPU; a smaller number would mean less padding.
LENGTH_MULTIPLE = 8

# The parts of a row; the endings are 1 to NUM_ENDINGS.
CONTEXT = 0
PADDING = NUM_ENDINGS + 1


# ------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Example:
    """One row of HellaSwag as tokens."""

    context: list[int]
    endings: list[list[int]]  # the tokens of the four endings
    label: int  # the correct ending, 0 to 3


def render(row: dict) -> Example:
    """Tokenize one row of the data set. Each ending follows the context after a space. Raises KeyError, TypeError or
    ValueError for anything else."""
    encode = tokenizer.encoding().encode_ordinary
    context = encode(row["ctx"])
    endings = [encode(" " + ending) for ending in row["endings"]]
    # Without a context nothing would predict the first token of an ending.
    if not context or not isinstance(row["endings"], list) or len(endings) != NUM_ENDINGS:
        raise ValueError("it has no context, or not four endings")
    # The original has numbers, the Hub's copy text. As text, true and 2.7 are no labels.
    label = LABELS.index(str(row["label"]))
    return Example(context, endings, label)


def load_examples(path: str | Path = DEFAULT_PATH, limit: int = 0) -> list[Example]:
    """Read and tokenize the first `limit` rows of a .jsonl file; 0 means all. Raises UserError if the file is missing,
    has no rows, or has a bad row, whose line the error names."""
    path = Path(path)
    download_command = f"python hellaswag.py --data {shlex.quote(str(path))}"
    require(path.is_file(), f"no HellaSwag rows at {path}; download them with: {download_command}")
    lines = path.read_bytes().splitlines()
    require(lines, f"{path} has no rows; remove it and run: {download_command}")

    examples = []
    for number, line in enumerate(lines[: limit or None], 1):
        rule = "is not JSON with 'ctx' (text), 'endings' (four texts) and 'label' (0 to 3)"
        with explain_errors(f"{path} line {number} {rule}", f"fix it, or remove the file and run: {download_command}"):
            examples.append(render(json.loads(line)))
    return examples


def download(path: Path, url: str) -> None:
    """Fetch the validation rows from `url` to `path`. Raises UserError if they cannot be fetched or some are missing;
    then nothing is written."""
    fix = f"check the network, or save the file as {path}"
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            content = response.read()
    except (OSError, ValueError, HTTPException) as e:
        raise UserError(f"cannot download {url} ({e}); {fix}") from None

    # An error page or a file that was cut short must not pass for the data set.
    row_count = content.count(b"\n")
    require(row_count == VAL_ROWS, f"{url} returned {row_count} rows, not HellaSwag's {VAL_ROWS}; {fix}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as f:
        f.write(content)


def require_readable(examples: list[Example], config: GPTConfig) -> None:
    """Raise UserError unless a model of this shape can read the examples."""
    require(config.vocab_size > tokenizer.EOT, f"the model has {config.vocab_size} tokens, fewer than GPT-2's")

    # A long context can be cut, but an ending must be read as a whole.
    longest = max(len(ending) for example in examples for ending in example.endings)
    require(longest <= config.block_size, f"an ending has {longest} tokens, but the model reads {config.block_size}")


# ------------------------------------------------------------------------- the scores


def evaluate(model: GPT, examples: list[Example], device: str | torch.device) -> dict[str, float | int]:
    """The accuracies of a model on `device`, in its own precision, as `summarize` returns them. Raises UserError if the
    model cannot read the examples, or if its losses are not finite."""
    one_rank = Runtime(torch.device(device), torch.float32)
    losses = score(model, examples, one_rank)
    require_finite(losses, model.lm_head.weight.dtype)
    return summarize(losses, examples)


def summarize(losses: torch.Tensor, examples: list[Example]) -> dict[str, float | int]:
    """{"acc", "acc_norm", "stderr" (of acc_norm), "n"} from the losses (n, 4) that `score` returns."""
    labels = torch.tensor([example.label for example in examples])

    # The prediction is the ending with the lowest loss, summed for acc, per token for acc_norm. (n, 4) -> (n,)
    n = len(examples)
    acc = (losses.argmin(1) == labels).sum().item() / n
    acc_norm = (normalize(losses, examples).argmin(1) == labels).sum().item() / n
    stderr = math.sqrt(acc_norm * (1 - acc_norm) / max(n - 1, 1))  # of the mean of n answers, right or wrong
    return {"acc": acc, "acc_norm": acc_norm, "stderr": stderr, "n": n}


def normalize(losses: torch.Tensor, examples: list[Example]) -> torch.Tensor:
    """Losses per token (n, 4), by which acc_norm chooses, from the losses (n, 4) that `score` returns."""
    token_counts = torch.tensor([[len(ending) for ending in example.endings] for example in examples])
    return losses / token_counts


def require_finite(losses: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise UserError unless all losses are numbers: a model of NaNs would score the share of the rows with label 0."""
    problem = f"the model's losses are not finite, although its weights are: {machine.dtype_name(dtype)} overflows"
    require(losses.isfinite().all(), f"{problem}; --dtype float32 has the widest range")


def score(
    model: GPT,
    examples: list[Example],
    rt: Runtime,
    check_stop: Callable[[], None] = lambda: None,
) -> torch.Tensor:
    """Summed negative log-likelihood of each ending in nats, (n, 4) float32 on the CPU, the same on all ranks.

    The ranks of `rt` split the batches, so each of them must call this; the forward pass runs under its autocast.
    check_stop: called equally often on every rank; it may raise Stopped. Raises UserError if the model cannot read the
    examples.
    """
    require_readable(examples, model.config)

    # A GPU needs large batches. A CPU is fastest when a batch and its logits fit in its cache.
    is_gpu = rt.device.type == "cuda"
    max_positions = 16_384 if is_gpu else 512
    logits_at_once = 2_048 if is_gpu else 128

    # Every rank plans the same batches, takes its own, and leaves the losses of the others at zero.
    examples = [cut_context(example, model.config.block_size) for example in examples]
    batches = plan_batches(examples, max_positions)
    losses = torch.zeros(len(examples), NUM_ENDINGS)
    with torch.no_grad(), rt.autocast():
        head = cast_head(model.lm_head.weight, model.lm_head.bias, model.config.softcap, model.config.vocab_size)
        # In each round the ranks take one batch each; in the last round some may get none, but still call check_stop.
        for first in progress_bar(range(0, len(batches), rt.world_size), "hellaswag", is_shown=rt.is_main):
            check_stop()
            number = first + rt.rank
            if number < len(batches):
                indices = batches[number]
                batch = make_batch([examples[i] for i in indices])
                losses[indices] = batch_losses(model, head, batch, rt.device, logits_at_once)

    # An example's losses are zero on all ranks but one, so the sum is exact.
    return rt.all_reduce(losses.to(rt.device)).cpu()


def batch_losses(model: GPT, head: tuple, batch: Batch, device: torch.device, logits_at_once: int) -> torch.Tensor:
    """Summed negative log-likelihood of each ending of a batch of N prefix trees, (N, 4) float32 on the CPU. head: its
    weight (V, C) and bias, cast once for all batches."""
    mask = tree_mask(batch.parts.to(device))  # (N, 1, T, T)
    hidden = model.hidden(batch.ids.to(device), positions=batch.positions.to(device), mask=mask)  # (N, T, C)

    # Logits are needed only where an ending is predicted. (N, T, C) -> (M, C)
    hidden = hidden[batch.rows.to(device), batch.columns.to(device)]

    # The logits are 50,000 wide, so compute them for a part of the M targets at a time. (m, C) -> (m, V) -> (m,)
    token_losses = []
    target_chunks = batch.targets.to(device).split(logits_at_once)
    for hidden_chunk, target_chunk in zip(hidden.split(logits_at_once), target_chunks, strict=True):
        logits = softcap(F.linear(model.transformer.ln_f(hidden_chunk), *head), model.config.softcap).float()
        token_losses.append(F.cross_entropy(logits, target_chunk, reduction="none").cpu())

    # Add up each ending's tokens, on the CPU, where the order of the sum is fixed. (M,) -> (4 * N,) -> (N, 4)
    ending_losses = torch.zeros(NUM_ENDINGS * len(batch.ids))
    ending_losses.index_add_(0, batch.ending_numbers, torch.cat(token_losses))
    return ending_losses.view(-1, NUM_ENDINGS)


def make_scorer(data: str, config: GPTConfig) -> Callable[[GPT, Runtime, Callable[[], None]], dict] | None:
    """The function (model, rt, check_stop) -> accuracies that scores a training run on the rows in the file `data`.

    If the default file is not there, or a model of this shape cannot read the rows, print the reason and return None:
    the run trains without HellaSwag. Raises UserError if another file cannot be loaded.
    """
    if data == HELLASWAG_DATA and not DEFAULT_PATH.exists():
        print0(f"HellaSwag is off: no {DEFAULT_PATH}; download it with: python hellaswag.py")
        return None

    examples = load_examples(data)
    try:
        require_readable(examples, config)
    except UserError as e:
        print0(f"HellaSwag is off: {e}")
        return None

    def score_run(model: GPT, rt: Runtime, check_stop: Callable[[], None]) -> dict[str, float | int]:
        losses = score(model, examples, rt, check_stop)
        # Losses that are not numbers would score the share of the rows with label 0.
        result = summarize(losses, examples)
        return result if losses.isfinite().all() else result | {"acc": math.nan, "acc_norm": math.nan}

    return score_run


# ------------------------------------------------------------------------- the batches


class Batch(NamedTuple):
    r"""N prefix trees of up to T positions, whose endings have M tokens in all. Tensors of int64 on the CPU.

    A row of the batch is one example as a prefix tree, in which the context, which the endings share, is read once. So
    the same four sums are computed with a fraction of the work.

        context: A man sits        endings: 1 down now, 2 on a chair, 3 up, 4 to sing

    The last token of an ending is predicted but never read, so ending 3, which has one token, takes no column.

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

    ids: torch.Tensor  # (N, T)
    positions: torch.Tensor  # (N, T): the place of each token in its text
    parts: torch.Tensor  # (N, T): 0 context, 1 to 4 endings, 5 padding
    rows: torch.Tensor  # (M,): the row of the position that predicts each target
    columns: torch.Tensor  # (M,): its column
    targets: torch.Tensor  # (M,): the tokens of all endings
    ending_numbers: torch.Tensor  # (M,): which of the batch's 4 * N endings the target belongs to


def cut_context(example: Example, block_size: int) -> Example:
    """The example with as much of the end of its context as the model can read together with the longest ending, whose
    last token is not read."""
    longest = max(map(len, example.endings))
    return replace(example, context=example.context[-(block_size + 1 - longest) :])


def row_length(example: Example) -> int:
    """Positions of an example's row, rounded up: the context once, each ending without its last token."""
    positions = len(example.context) + sum(len(ending) - 1 for ending in example.endings)
    return math.ceil(positions / LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def plan_batches(examples: list[Example], max_positions: int) -> list[list[int]]:
    """The indices of all examples, in batches of one example or at most max_positions positions, padding included."""
    # Longest first: neighbours have about the same length, and if the first batch fits in memory, all do.
    order = sorted(range(len(examples)), key=lambda i: row_length(examples[i]), reverse=True)
    batches = []
    while order:
        # All rows of a batch are as long as its first, whose length decides how many fit.
        size = max(1, max_positions // row_length(examples[order[0]]))
        batches.append(order[:size])
        order = order[size:]
    return batches


def make_batch(examples: list[Example]) -> Batch:
    """The tensors of one batch, whose first example is the longest."""
    T = row_length(examples[0])
    all_ids, all_positions, all_parts = [], [], []  # a list for each row
    rows, columns, targets, ending_numbers = [], [], [], []  # a number for each target
    for row, example in enumerate(examples):
        n = len(example.context)
        ids = list(example.context)
        positions = list(range(n))
        parts = [CONTEXT] * n
        for number, ending in enumerate(example.endings):
            # What is read of an ending is all but its last token. Its positions continue those of the context.
            start = len(ids)
            ids += ending[:-1]
            end = len(ids)
            positions += range(n, n + end - start)
            parts += [number + 1] * (end - start)

            # The context's last token predicts the ending's first token; each token read predicts the one after it.
            rows += [row] * len(ending)
            columns += [n - 1, *range(start, end)]
            targets += ending
            ending_numbers += [NUM_ENDINGS * row + number] * len(ending)

        padding = T - len(ids)
        all_ids.append(ids + [0] * padding)
        all_positions.append(positions + [0] * padding)
        all_parts.append(parts + [PADDING] * padding)
    tree = map(torch.tensor, (all_ids, all_positions, all_parts))
    return Batch(*tree, *map(torch.tensor, (rows, columns, targets, ending_numbers)))


def tree_mask(parts: torch.Tensor) -> torch.Tensor:
    """The attention mask (N, 1, T, T) of prefix trees, true where query i sees key j, from their parts (N, T)."""
    query_part = parts[:, None, :, None]  # (N, 1, T, 1)
    key_part = parts[:, None, None, :]  # (N, 1, 1, T)

    # Every token sees the context and its own ending, as far as they lie before it. Padding sees itself, so that every
    # query has a key.
    return ((key_part == CONTEXT) | (key_part == query_part)).tril()


# ------------------------------------------------------------------------- the command line


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.arg(aliases=["-m"], metavar="MODEL", help_behavior_hint="")] = ""
    """Run folder, .pt file, Hugging Face folder or name (gpt2, OWNER/NAME); without it, download the rows."""
    data: Path = DEFAULT_PATH
    """The file of rows to download to or to score: a JSON object a line, with "ctx" (text), "endings" (four texts) and
    "label" (the index of the right one)."""
    limit: int = 0
    """Score only this many rows from the start; 0 means all."""
    per_example: Annotated[Path | None, optional("FILE")] = None
    """Write the index, label, predictions and losses of each row to this .jsonl file."""
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"
    """cuda, mps or cpu; auto takes the first of these that is available."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the matrix products; auto takes a GPU's best, and measures on a CPU that has bfloat16."""
    url: str = URL
    """Where the rows are downloaded from."""


def write_per_example(path: Path, examples: list[Example], losses: torch.Tensor) -> None:
    """Write one JSON line for each example: its label, the predictions of acc and acc_norm, and the losses (n, 4)
    behind them, summed and per token, in nats."""
    path.parent.mkdir(parents=True, exist_ok=True)
    losses = losses.double()
    rows = zip(examples, losses.tolist(), normalize(losses, examples).tolist(), strict=True)
    with atomic_write(path) as f:
        for index, (example, summed, per_token) in enumerate(rows):
            line = {
                "index": index,
                "label": example.label,
                "pred": summed.index(min(summed)),
                "pred_norm": per_token.index(min(per_token)),
                "losses": summed,
                "losses_norm": per_token,
            }
            f.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    usage = __doc__.partition("\n\n    examples =")[0]
    args = tyro.cli(Args, description=usage)
    require(args.limit >= 0, f"--limit {args.limit} is negative; 0 scores all rows")

    # Without a model, make sure that the rows are there and can be read.
    if not args.model:
        if not args.data.exists():
            download(args.data, args.url)
        row_count = len(load_examples(args.data))
        print0(f"{row_count} rows in {args.data}; score a model with: python hellaswag.py --model gpt2")
        return

    # Score; under torchrun the ranks share the rows.
    examples = load_examples(args.data, args.limit)
    with distributed.session(args.device) as rt:
        rt = distributed.choose_precision(rt, args.dtype)
        model = open_model(args.model).to(rt.device)

        # The time is that of scoring alone, without imports, loading and tokenizing.
        start = time.perf_counter()
        losses = score(model, examples, rt)
        seconds = time.perf_counter() - start
    require_finite(losses, rt.dtype)

    # The last line is for programs.
    if args.per_example and rt.is_main:
        write_per_example(args.per_example, examples, losses)
    result = summarize(losses, examples)
    speed = f"{result['n'] / seconds:.1f} examples/s on {rt.device} in {machine.dtype_name(rt.dtype)}"
    print0(f"completion style, standard error of acc_norm {result['stderr']:.4f}, {speed}")
    print0(describe_score(result))


if __name__ == "__main__":
    cli.run_cli(main)
