r"""HellaSwag (Zellers et al. 2019): which of four endings does the model find most likely?

    python hellaswag.py                                        # download the 10,042 validation rows
    python hellaswag.py --model log/gpt2-124m                  # score a run, a .pt file, a Hugging Face folder, gpt2
    python hellaswag.py --model gpt2 --limit 1000 --per-example rows.jsonl

Chance is 0.25, and OpenAI's GPT-2 124M reaches an acc_norm of 0.2955. The last line is for programs. The rows and their
scores are in evaluation/multiple_choice.py.
"""

import json
import math
import urllib.request
from pathlib import Path

import system  # noqa: F401  # first

# isort: split
import torch

from checkpoints.open_model import open_model
from evaluation.multiple_choice import (
    Example,
    describe_score,
    evaluate,
    load_examples,
    normalize,
    render,
    score,
    summarize,
)
from system import distributed, machine, process, settings
from system.errors import explain_errors, require
from system.files import atomic_write
from system.printing import print0
from training.config import HELLASWAG_DATA

__all__ = ["evaluate", "load_examples", "render"]

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
VAL_ROWS = 10_042


def download_rows(path: Path, url: str) -> None:
    """Fetch the validation rows from `url` to `path`. Raises UserError if they cannot be fetched or some are missing;
    then nothing is written."""
    fix = f"check the network, or save the file as {path}"
    with explain_errors(f"cannot download {url}", fix), urllib.request.urlopen(url, timeout=20) as response:
        content = response.read()

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
    per_token = normalize(losses, examples)
    with atomic_write(path) as f:
        for index, example in enumerate(examples):
            line = {
                "index": index,
                "label": example.label,
                "pred": losses[index].argmin().item(),
                "pred_norm": per_token[index].argmin().item(),
                "losses": losses[index].tolist(),
                "losses_norm": per_token[index].tolist(),
            }
            f.write(json.dumps(line).encode() + b"\n")


def main() -> None:
    parser = settings.ArgumentParser(__doc__)
    parser.add_argument("-m", "--model", help="run folder, .pt file, Hugging Face folder or name; none: download")
    parser.add_argument("--data", type=Path, default=Path(HELLASWAG_DATA), help="rows to download to, or to score")
    parser.add_argument("--limit", type=int, default=0, help="score only this many rows from the start; 0: all")
    parser.add_argument("--per-example", type=Path, metavar="FILE", help="write each row's losses to this .jsonl file")
    parser.add_argument("-d", "--device", default="auto", help="cuda, mps or cpu; auto: the GPU where there is one")
    dtypes = ("auto", "bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="precision of the matrix products")
    parser.add_argument("--url", default=URL, help="where the rows are downloaded from")
    args = parser.parse_args()
    require(args.limit >= 0, f"--limit {args.limit} is negative; 0 scores all rows")

    # Without a model, make sure that the rows are there and can be read.
    if not args.model:
        if not args.data.exists():
            download_rows(args.data, args.url)
        row_count = len(load_examples(args.data))
        print0(f"{row_count} rows in {args.data}; score a model with: python hellaswag.py --model gpt2")
        return

    # Score; under torchrun the ranks share the rows.
    examples = load_examples(args.data, args.limit)
    fix = "end what else uses the memory, or use --device cpu"
    with machine.explain_out_of_memory(fix), distributed.session(args.device) as rt:
        rt = distributed.choose_precision(rt, args.dtype)
        model = open_model(args.model).to(rt.device)
        losses = score(model, examples, rt)

    result = summarize(losses, examples)
    overflow = f"the losses are not finite, although the weights are: {machine.dtype_name(rt.dtype)} overflows"
    require(math.isfinite(result["acc"]), f"{overflow}; --dtype float32 has the widest range")
    if args.per_example and rt.is_main:
        write_per_example(args.per_example, examples, losses)
    how = f"on {rt.device} in {machine.dtype_name(rt.dtype)}"
    print0(f"completion style, standard error of acc_norm {result['stderr']:.4f}, {how}")
    print0(describe_score(result))


if __name__ == "__main__":
    process.run_cli(main)
