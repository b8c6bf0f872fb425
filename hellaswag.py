"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    python hellaswag.py                                        # download the 10,042 validation rows
    python hellaswag.py --model log/gpt2-124m                  # score a run, a .pt file, a Hugging Face folder, gpt2
    python hellaswag.py --model gpt2 --limit 1000 --per-example rows.jsonl

acc takes the ending with the lowest summed loss, acc_norm the one with the lowest loss per token, the completion
style of build-nanogpt and llm.c. `--style lm-eval` renders and normalizes as the LM Evaluation Harness does (cleaned
text, activity as title, loss per character); its scores are higher and comparable only with each other.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import tyro

from system.cli import UserError, print0, require, run_cli
from system.files import atomic_write
from tokens import tokenizer

if TYPE_CHECKING:
    import torch

    from model import GPT, GPTConfig
    from system.distributed import Runtime

DEFAULT_PATH = Path("data/hellaswag/hellaswag_val.jsonl")
URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
VAL_ROWS = 10_042
GRAIN = 8  # row lengths are multiples of this: few shapes, little padding
Style = Literal["completion", "lm-eval"]


@dataclass(frozen=True)
class Example:
    ctx: list[int]  # tokens of the context
    endings: list[list[int]]  # tokens of the four endings
    units: list[int]  # what acc_norm divides each ending's loss by
    label: int  # the correct ending, 0 to 3


def clean(text: str) -> str:
    """Text without the markup of WikiHow rows, removed as in the LM Evaluation Harness."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def render(row: dict, style: Style = "completion") -> Example:
    """Tokens of one row; each ending follows the context after a space."""
    encode, endings = tokenizer.encoding().encode_ordinary, row["endings"]
    if style == "completion":
        ctx, tails = encode(row["ctx"]), [encode(" " + e) for e in endings]
        return Example(ctx, tails, [len(t) for t in tails], int(row["label"]))
    text = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    endings = [clean(e) for e in endings]
    start = encode(text.rstrip())
    tails = [encode(f"{text} {e}")[len(start) :] for e in endings]
    return Example(start, tails, [len(e) for e in endings], int(row["label"]))


def check(row: object, style: Style, where: str) -> None:
    """Raise UserError, naming the field, unless `row` has what `render` needs."""
    require(isinstance(row, dict), f"{where}: the row is not a JSON object")
    endings, label = row.get("endings"), row.get("label")
    for field in ["ctx"] if style == "completion" else ["activity_label", "ctx_a", "ctx_b"]:
        text = row.get(field)
        there = isinstance(text, str) and (text.strip() or field == "ctx_b")  # WikiHow rows have an empty ctx_b
        require(there, f"{where}: field {field!r} is missing or not text")
    texts = isinstance(endings, list) and all(isinstance(e, str) and e.strip() for e in endings)
    require(texts and len(endings) == 4, f"{where}: field 'endings' is missing or not four texts")
    require(str(label) in ("0", "1", "2", "3"), f"{where}: field 'label' is missing or not 0, 1, 2 or 3")


def load_examples(path: str | Path = DEFAULT_PATH, limit: int = 0, style: Style = "completion") -> list[Example]:
    """The first `limit` (0: all) rows of a .jsonl file. Raises UserError naming the bad line and field."""
    path, examples = Path(path), []
    get = f"python hellaswag.py --data {shlex.quote(str(path))}"
    require(path.is_file(), f"no HellaSwag rows at {path}; download them with: {get}")
    with open(path, "rb") as f:
        lines = [(number, line) for number, line in enumerate(f, 1) if line.strip()]
    for number, line in lines[: limit or None]:
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:  # not JSON, or not UTF-8
            raise UserError(f"{where} is not JSON ({e}); fix it, or remove the file and run: {get}") from None
        check(row, style, where)
        examples.append(render(row, style))
    require(examples, f"{path} has no rows; remove it and run: {get}")
    return examples


def require_readable(examples: list[Example], config: GPTConfig) -> None:
    """Raise UserError unless such a model can read these examples."""
    require(config.vocab_size > tokenizer.EOT, f"the model has {config.vocab_size} tokens, fewer than GPT-2's")
    longest, T = max(len(ending) for e in examples for ending in e.endings), config.block_size
    require(longest <= T, f"an ending has {longest} tokens, but the model reads {T}")


def examples_at_hand(data: str, config: GPTConfig) -> list[Example]:
    """The rows in `data` or, by default, the downloaded ones. If there are none, or the model cannot read them, print
    why and return an empty list: the run trains all the same."""
    if not data and not DEFAULT_PATH.exists():
        print0(f"HellaSwag is off: no {DEFAULT_PATH}; download it with: python hellaswag.py")
        return []
    examples = load_examples(data or DEFAULT_PATH)
    try:
        require_readable(examples, config)
        return examples
    except UserError as e:
        print0(f"HellaSwag is off: {e}")
        return []


class Row(NamedTuple):
    """An example as the model reads it: a tree of the context and four branches that do not see each other."""

    length: int  # positions, rounded up to a multiple of GRAIN
    index: int  # which example
    ctx: list[int]  # its context, cut at the start to fit the model


def plan_batches(examples: list[Example], block_size: int, token_budget: int) -> list[list[Row]]:
    """All examples, sorted by length into batches of at most token_budget positions (or one example). A context too
    long for the model loses its beginning."""
    rows = []
    for i, e in enumerate(examples):
        longest = max(map(len, e.endings))
        ctx = e.ctx[-(block_size + 1 - longest) :]  # the last token of an ending is predicted, not read
        positions = len(ctx) + sum(len(ending) - 1 for ending in e.endings)
        rows.append(Row(math.ceil(positions / GRAIN) * GRAIN, i, ctx))
    rows.sort(reverse=True)  # longest first: if the first batch fits in memory, all do
    batches = []
    while rows:
        n = max(1, token_budget // rows[0].length)
        batches.append(rows[:n])
        rows = rows[n:]
    return batches


def make_batch(rows: list[Row], examples: list[Example]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One batch of N rows of up to T positions, whose endings have M tokens in all:
    tokens (3, N, T): id, position in the text, and part (0 context, 1 to 4 endings, 5 padding)
    scored (3, M): row and column of the position that predicts a token, and its ending among all 4N
    targets (M,): the tokens of the endings."""
    import torch

    tokens, scored, targets = [], [], []
    for r, row in enumerate(rows):
        tree = [(token, at, 0) for at, token in enumerate(row.ctx)]
        for c, ending in enumerate(examples[row.index].endings):
            before = [len(row.ctx) - 1, *range(len(tree), len(tree) + len(ending) - 1)]  # each predicts the next token
            scored += [(r, column, 4 * r + c) for column in before]
            targets += ending
            tree += [(token, len(row.ctx) + at, c + 1) for at, token in enumerate(ending[:-1])]
        tokens.append(tree + [(0, 0, 5)] * (rows[0].length - len(tree)))
    return torch.tensor(tokens).permute(2, 0, 1), torch.tensor(scored).T, torch.tensor(targets)


def score(
    model: GPT, examples: list[Example], device: torch.device, rt: Runtime | None = None, progress: bool = False,
    check: Callable[[], None] = lambda: None,
) -> torch.Tensor:  # fmt: skip
    """Summed negative log-likelihood of each ending in nats, (n, 4) float32 on the CPU, the same on all ranks.

    The context is read once for its four endings; the head is applied only where an ending is predicted. The ranks
    split the batches, and each must call this; with `rt`, the forward pass runs under its autocast. `check` is called
    the same number of times on every rank, and may raise. Raises UserError if the model cannot read the examples.
    """
    import torch
    import torch.nn.functional as F
    from tqdm import tqdm

    from system.distributed import Runtime

    require_readable(examples, model.config)
    rt = rt or Runtime(device, torch.float32)
    # positions per batch, rows of logits at a time; a CPU is fastest when they fit in its cache
    budget, head_rows = (65_536, 8_192) if device.type == "cuda" else (512, 128)
    batches = plan_batches(examples, model.config.block_size, budget)
    losses = torch.zeros(len(examples), 4)
    with torch.no_grad(), rt.autocast():
        for i in tqdm(range(0, len(batches), rt.world_size), "hellaswag", disable=not progress, leave=False):
            check()
            if i + rt.rank >= len(batches):
                continue
            rows = batches[i + rt.rank]
            tokens, (row, column, slot), targets = make_batch(rows, examples)
            idx, positions, part = tokens.to(device)
            seen, sees = part[:, None, None, :], part[:, None, :, None]  # of (N, 1, T, T)
            mask = ((seen == 0) | (seen == sees)).tril()
            x = model.hidden(idx, positions=positions, mask=mask)[row.to(device), column.to(device)]  # (M, C)
            parts = zip(x.split(head_rows), targets.to(device).split(head_rows), strict=True)
            nll = torch.cat([F.cross_entropy(model.logits(p).float(), t, reduction="none").cpu() for p, t in parts])
            summed = torch.zeros(4 * len(rows)).index_add_(0, slot, nll)  # on the CPU: fixed order
            losses[[r.index for r in rows]] = summed.view(-1, 4)
    check()
    return rt.all_reduce(losses.to(device)).cpu()  # an example's losses are zero on all ranks but one


def summarize(losses: torch.Tensor, examples: list[Example]) -> dict[str, float | int]:
    """{"acc", "acc_norm", "stderr" (of acc_norm), "n"} from the losses (n, 4) that `score` returns."""
    import torch

    n, label = len(examples), torch.tensor([e.label for e in examples])
    acc = (losses.argmin(1) == label).sum().item() / n
    acc_norm = ((losses / torch.tensor([e.units for e in examples])).argmin(1) == label).sum().item() / n
    return {"acc": acc, "acc_norm": acc_norm, "stderr": math.sqrt(acc_norm * (1 - acc_norm) / max(n - 1, 1)), "n": n}


def evaluate(model: GPT, examples: list[Example], device: torch.device, *args, **kwargs) -> dict[str, float | int]:
    """What `summarize` makes of the losses of `examples`. Takes the same arguments as `score`."""
    return summarize(score(model, examples, device, *args, **kwargs), examples)


def summary_line(found: dict[str, float]) -> str:
    return "hellaswag acc {acc:.4f} acc_norm {acc_norm:.4f} n {n}".format(**found)


def download(path: Path, url: str) -> None:
    """Fetch the validation rows to `path`. Raises UserError."""
    import urllib.request
    from http.client import HTTPException

    again = f"check the network and run the same command again, or save it as {path}"
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            content = answer.read()
    except (OSError, ValueError, HTTPException) as e:
        raise UserError(f"cannot download {url} ({e}); {again}") from None
    rows = content.count(b"\n")
    require(rows == VAL_ROWS, f"{url} returned {rows} rows, not HellaSwag's {VAL_ROWS}; {again}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as f:
        f.write(content)


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = ""
    """Run folder, .pt file, Hugging Face folder or name (gpt2, OWNER/NAME); without it, download the rows."""
    data: Path = DEFAULT_PATH
    limit: int = 0
    """Score only this many rows from the start; 0 means all."""
    per_example: Path | None = None
    """Write the index, label, predictions and losses of each row to this .jsonl file."""
    style: Style = "completion"
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    url: str = URL


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    require(args.limit >= 0, f"--limit {args.limit} is negative; 0 scores all rows")
    if not args.model:
        if not args.data.exists():
            download(args.data, args.url)
        n = len(load_examples(args.data))
        return print0(f"{n} rows in {args.data}; score a model with: python hellaswag.py --model gpt2")
    from system import distributed
    from training.open_model import open_model

    examples = load_examples(args.data, args.limit, args.style)
    with distributed.session(args.device, args.dtype) as rt:
        model = open_model(args.model).to(rt.device)
        start = time.perf_counter()
        losses = score(model, examples, rt.device, rt, progress=rt.is_main and sys.stderr.isatty())
        seconds = time.perf_counter() - start
    if args.per_example and rt.is_main:
        with atomic_write(args.per_example) as f:
            for i, (e, row) in enumerate(zip(examples, losses.tolist(), strict=True)):
                norm = [x / u for x, u in zip(row, e.units, strict=True)]
                line = {"index": i, "label": e.label, "pred": row.index(min(row)), "pred_norm": norm.index(min(norm))}
                f.write(json.dumps({**line, "losses": row, "losses_norm": norm}).encode() + b"\n")
    result = summarize(losses, examples)
    speed = f"{result['n'] / seconds:.1f} examples/s in {rt.dtype} on {rt.device}"
    print0(f"{args.style} style, standard error of acc_norm {result['stderr']:.4f}, {speed}")
    print0(summary_line(result))


if __name__ == "__main__":
    run_cli(main)
