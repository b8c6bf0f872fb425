"""Generation speed: ours against build-nanogpt's loop, which recomputes the context for every token, and transformers.

    python -m bench.generate                                   # GPT-2 124M, random weights, 4 samples of 128 tokens
    python -m bench.generate --samples 64 --device cuda --rounds 5 --only ours transformers "static cache"

The ways take turns in separate processes; medians over the rounds. The loop runs under autocast, as in build-nanogpt;
ours (as infer.py prepares it) and transformers store their weights in the dtype. "static cache" is transformers' own,
compiled; on a CPU only by --only. "memory" reads what each step has to: every weight and, on average, half the cache.
"first token" is the time from typing `python infer.py` to it, with the imports and a checkpoint of 124M to load.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import tyro

from bench import turns
from infer import prepare
from model import GPT, GPTConfig
from system import cli, distributed
from training import checkpoint
from training.convert import save_hf


@dataclass(frozen=True)
class Args:
    samples: int = 4
    new_tokens: int = 128
    prompt_tokens: int = 8
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"
    only: tuple[str, ...] = ()
    """Some of ours, transformers, static cache, recompute loop, memory, first token."""
    child: str = ""
    """Set for the process that measures one way."""


def recompute_loop(model: GPT, idx: torch.Tensor, new_tokens: int, rt: distributed.Runtime) -> None:
    """Sample as build-nanogpt does: the whole context goes through the model for each token, top-k 50."""
    for _ in range(new_tokens):
        with torch.no_grad():
            with rt.autocast():
                logits = model(idx)[0]
            probs = F.softmax(logits[:, -1, :], dim=-1)
            top, ids = torch.topk(probs, 50, dim=-1)
            idx = torch.cat((idx, torch.gather(ids, -1, torch.multinomial(top, 1))), dim=1)


def make(args: Args, rt: distributed.Runtime, folder: Path) -> Callable[[int], object]:
    """What samples so many tokens in one way."""
    torch.manual_seed(0)
    plain = GPT(GPTConfig()).to(rt.device)
    idx = torch.randint(50257, (1, args.prompt_tokens), device=rt.device).repeat(args.samples, 1)
    if args.child == "recompute loop":
        return lambda n: recompute_loop(plain, idx, n, rt)
    if args.child == "memory":
        c = plain.config
        keys = 2 * c.n_layer * c.n_embd * args.samples * (args.prompt_tokens + args.new_tokens // 2)
        read = torch.ones(plain.num_params() - plain.transformer.wpe.weight.numel() + keys, device=rt.device)
        read = read.view(torch.uint8)[: len(read) * rt.dtype.itemsize].view(torch.float32)  # as many bytes as in dtype
        return lambda n: [read.sum().item() for _ in range(n)]
    if args.child == "first token":
        file = folder / "model_00001.pt"
        checkpoint.write(file, checkpoint.model_file(plain, 1))
        command = [sys.executable, "infer.py", str(file), "Hello", "--max-new-tokens", "1"]
        command += ["--device", args.device, "--dtype", args.dtype]
        return lambda _: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    if args.child == "ours":
        ours = prepare(plain, rt.device, rt.dtype)
        return lambda n: ours.generate(idx, n)
    import transformers

    save_hf(plain, folder / "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=rt.dtype).to(rt.device)
    how = {"do_sample": True, "top_k": 50, "eos_token_id": None, "pad_token_id": 0}
    how["attention_mask"] = torch.ones_like(idx)
    if args.child == "static cache":
        how["cache_implementation"] = "static"
    return lambda n: theirs.generate(idx, max_new_tokens=n, **how)


def child(args: Args) -> None:
    with distributed.session(args.device, args.dtype) as rt, tempfile.TemporaryDirectory() as folder:
        way = make(args, rt, Path(folder))
        way(args.new_tokens if rt.device.type == "cuda" else 4)  # warms up; the static cache is compiled
        took = turns.seconds(lambda: way(args.new_tokens), rt)
        print(json.dumps({"ms": 1e3 * took, "where": turns.where(rt)}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # so that no peer pays for planning each new length
    static = ("static cache",) if torch.cuda.is_available() else ()
    names = args.only or ("ours", "transformers", *static, "recompute loop", "memory", "first token")
    found = turns.in_turns("bench.generate", names, args.rounds)
    first = next(iter(found.values()))
    print(f"GPT-2 124M on {first[0]['where']}: {args.samples} samples of {args.new_tokens} tokens, "
          f"{args.prompt_tokens} before them")  # fmt: skip
    print("| way | tokens/s | times the first's time | seconds, all rounds |\n|---|---|---|---|")
    ours = median(run["ms"] for run in first)
    for name, runs in found.items():
        ms = median(run["ms"] for run in runs)
        each = ", ".join(f"{run['ms'] / 1e3:.2f}" for run in runs)
        if name == "first token":
            print(f"| {name} | | | {each} |")
        else:
            print(f"| {name} | {args.samples * args.new_tokens / ms * 1e3:.1f} | {ms / ours:.2f} | {each} |")


if __name__ == "__main__":
    cli.run_cli(main, many_short_waits=True)  # as in infer.py
