"""Download HellaSwag and score a model on it. The scorer is training/hellaswag_eval.py.

    python hellaswag.py                                        # download the 10,042 validation rows
    python hellaswag.py --model log/gpt2-124m                  # score a run, a .pt file, a Hugging Face folder, gpt2
    python hellaswag.py --model gpt2 --limit 1000 --per-example rows.jsonl

acc takes the ending with the lowest summed loss, acc_norm the one with the lowest loss per token, the completion
style of build-nanogpt and llm.c.
"""

import json
import sys
import time
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Literal

import tyro

from system import cli
from system.cli import UserError, print0, require
from system.files import atomic_write

cli.set_omp_wait_policy()  # before torch is imported
import torch

from system import distributed, machine
from training.hellaswag_eval import DEFAULT_PATH, Example, load_examples, normalize, score, summarize, summary_line
from training.open_model import open_model

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
VAL_ROWS = 10_042


@dataclass(frozen=True)
class Args:
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = ""
    """Run folder, .pt file, Hugging Face folder or name (gpt2, OWNER/NAME); without it, download the rows."""
    data: Path = DEFAULT_PATH
    """The file of rows to download to or to score: a JSON object a line, with "ctx" (text), "endings" (four texts) and
    "label" (the index of the right one)."""
    limit: int = 0
    """Score only this many rows from the start; 0 means all."""
    per_example: Path | None = None
    """Write the index, label, predictions and losses of each row to this .jsonl file."""
    device: Annotated[str, tyro.conf.arg(aliases=["-d"])] = "auto"
    """cuda, mps or cpu; auto takes the first of these that is available."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Precision of the matrix products; auto takes a GPU's best, and measures on a CPU that has bfloat16."""
    url: str = URL
    """Where the rows are downloaded from."""


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
    args = tyro.cli(Args, description=__doc__)
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
        rt = machine.choose_precision(rt, args.dtype)
        model = open_model(args.model).to(rt.device)

        # The time is that of scoring alone, without imports, loading and tokenizing.
        show_progress = rt.is_main and sys.stderr.isatty()
        start = time.perf_counter()
        losses = score(model, examples, rt, progress=show_progress)
        seconds = time.perf_counter() - start

    # The last line is for programs.
    if args.per_example and rt.is_main:
        write_per_example(args.per_example, examples, losses)
    result = summarize(losses, examples)
    speed = f"{result['n'] / seconds:.1f} examples/s on {rt.device}"
    print0(f"completion style, standard error of acc_norm {result['stderr']:.4f}, {speed}")
    print0(summary_line(result))


if __name__ == "__main__":
    cli.run_cli(main)
