"""Generation speed: ours against build-nanogpt's loop, which recomputes the context for every token, and transformers.

    python -m bench.generate                                   # GPT-2 124M, random weights, 4 samples of 128 tokens
    python -m bench.generate --samples 64 --device cuda --rounds 5 --only ours transformers "static cache"

The ways take turns in separate processes; medians over the rounds:

    ours              with a key-value cache, prepared as by infer.py: weights in the dtype
    transformers      generate() of transformers, whose cache grows; weights in the dtype
    static cache      the same with transformers' static cache, which it compiles; on a CPU only by --only
    recompute loop    build-nanogpt's, under autocast: the whole context goes through the model for every token
    memory            a lower bound: reads what each step must read, every weight and, on average, half of the cache
    first token       seconds from the command `python infer.py` to one token: imports, a checkpoint of 124M parameters
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
import tyro

from bench import turns
from infer import fastest_dtype, prepare
from model import GPT, GPTConfig
from system import cli, distributed
from training import checkpoint
from training.convert import save_hf

WAYS = ("ours", "transformers", "static cache", "recompute loop", "memory", "first token")


@dataclass(frozen=True)
class Args:
    samples: int = 4
    new_tokens: int = 128
    prompt_tokens: int = 8
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"
    only: tuple[str, ...] = ()
    """Some of ours, transformers, static cache, recompute loop, memory, first token. Default: all, and static cache on
    a GPU only."""
    child: str = ""
    """Set for the process that measures one way."""


def recompute_loop(model: GPT, idx: torch.Tensor, new_tokens: int, rt: distributed.Runtime) -> None:
    """Sample as build-nanogpt does: the whole context (B, T) goes through the model for each token, top-k 50."""
    for _ in range(new_tokens):
        # All logits of the context, although only those at its end are used.
        with torch.no_grad():
            with rt.autocast():
                logits, _ = model(idx)  # (B, T, V)
            # Sample one of the 50 most likely tokens, and append it.
            probs = F.softmax(logits[:, -1, :], dim=-1)  # (B, V)
            top_probs, top_ids = torch.topk(probs, 50, dim=-1)  # (B, 50)
            place = torch.multinomial(top_probs, 1)  # (B, 1)
            idx = torch.cat((idx, torch.gather(top_ids, -1, place)), dim=1)  # (B, T + 1)


def make_memory_reader(model: GPT, args: Args, rt: distributed.Runtime) -> Callable[[int], object]:
    """Return a function of n that reads, n times, the bytes that one step of generation must read."""
    # Every weight but the position embeddings, of which a step needs one row.
    config = model.config
    weights = model.num_params() - model.transformer.wpe.weight.numel()

    # The keys and values of all samples at the average length: the prompt, and half of the new tokens.
    average_length = args.prompt_tokens + args.new_tokens // 2
    keys_and_values = 2 * config.n_layer * config.n_embd * args.samples * average_length

    # Memory of the size that these numbers have in rt.dtype. It is summed as float32, which is quick in any dtype, so
    # reading is all that takes time; .item() waits for the sum.
    count = weights + keys_and_values
    all_bytes = torch.ones(count, device=rt.device).view(torch.uint8)
    memory = all_bytes[: count * rt.dtype.itemsize].view(torch.float32)
    return lambda n: [memory.sum().item() for _ in range(n)]


def make_generator(args: Args, rt: distributed.Runtime, folder: Path) -> Callable[[int], object]:
    """Return a function of n that generates n tokens for each sample in the way args.child. `folder` is for the files
    that it needs."""
    # GPT-2 124M with random weights, and one random prompt for all samples.
    torch.manual_seed(0)
    model = GPT(GPTConfig()).to(rt.device)
    idx = torch.randint(50257, (1, args.prompt_tokens), device=rt.device).repeat(args.samples, 1)  # (samples, T)
    match args.child:
        case "ours":
            prepared = prepare(model, rt.device, rt.dtype)
            return lambda n: prepared.generate(idx, n)
        case "recompute loop":
            return lambda n: recompute_loop(model, idx, n, rt)
        case "memory":
            return make_memory_reader(model, args, rt)
        case "first token":
            file = folder / "model_00001.pt"
            checkpoint.write(file, checkpoint.model_file(model, 1))
            command = [sys.executable, "infer.py", str(file), "Hello", "--max-new-tokens", "1"]
            command += ["--device", args.device, "--dtype", args.dtype]
            return lambda _: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        case "transformers" | "static cache":
            import transformers

            # The same weights, by way of an export.
            save_hf(model, folder / "hf")
            peer = transformers.AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=rt.dtype).to(rt.device)

            # Sample from the top 50, as the other ways do, and never stop early.
            options = {"do_sample": True, "top_k": 50, "eos_token_id": None, "pad_token_id": 0}
            options["attention_mask"] = torch.ones_like(idx)
            if args.child == "static cache":
                options["cache_implementation"] = "static"
            return lambda n: peer.generate(idx, max_new_tokens=n, **options)
        case _:
            raise ValueError(f"--only {args.child!r} must be one of {', '.join(WAYS)}")


def measure_one_way(args: Args) -> None:
    """In a process of its own: generate in the way args.child, and print the time."""
    with distributed.session(args.device, args.dtype) as rt, tempfile.TemporaryDirectory() as folder:
        # `auto` is what infer.py would take for this many samples.
        if args.dtype == "auto":
            rt = replace(rt, dtype=fastest_dtype(rt.device, args.samples))

        # Warm up. On a GPU with as many tokens as will be timed, so that the static cache is compiled for that length.
        generate = make_generator(args, rt, Path(folder))
        generate(args.new_tokens if rt.device.type == "cuda" else 4)
        seconds = turns.measure_seconds(lambda: generate(args.new_tokens), rt)
        print(json.dumps({"ms": 1e3 * seconds, "where": turns.describe_machine(rt)}))


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        measure_one_way(args)
        return

    # Without this, the recompute loop would pay for cuDNN's planning of each new length.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    ways = args.only or tuple(way for way in WAYS if way != "static cache" or torch.cuda.is_available())
    runs_by_way = turns.measure_in_turns("bench.generate", ways, args.rounds)

    # The table: one row a way. The times are compared with that of the first way.
    first_runs = next(iter(runs_by_way.values()))
    first_ms = median(run["ms"] for run in first_runs)
    print(
        f"GPT-2 124M on {first_runs[0]['where']}: {args.samples} samples of {args.new_tokens} tokens, "
        f"{args.prompt_tokens} before them"
    )
    print("| way | tokens/s | times the first's time | seconds, all rounds |\n|---|---|---|---|")
    for way, runs in runs_by_way.items():
        ms = median(run["ms"] for run in runs)
        all_seconds = ", ".join(f"{run['ms'] / 1e3:.2f}" for run in runs)
        if way == "first token":
            print(f"| {way} | | | {all_seconds} |")
        else:
            tokens_per_second = args.samples * args.new_tokens / ms * 1e3
            print(f"| {way} | {tokens_per_second:.1f} | {ms / first_ms:.2f} | {all_seconds} |")


if __name__ == "__main__":
    cli.run_cli(main, many_short_waits=True)  # as in infer.py
