"""Generation speed: ours against build-nanogpt's loop, which recomputes the context for every token, and transformers.

    python bench/generate.py                                   # GPT-2 124M, random weights, 4 samples of 128 tokens
    python bench/generate.py --samples 64 --device cuda --rounds 5 --no-loop

The ways take turns; each figure is the median of the rounds. The loop runs under autocast, as in build-nanogpt; ours
(as infer.py prepares it) and transformers store their weights in the dtype. On a GPU, transformers also runs with its
static cache, compiled. Memory bounds them all: each step reads every weight and, on average, half the cache. Last, the
time from typing `python infer.py` to the first token, with the imports and a checkpoint of 124M to load.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

import tyro  # noqa: E402

import cli  # noqa: E402


@dataclass(frozen=True)
class Args:
    samples: int = 4
    new_tokens: int = 128
    prompt_tokens: int = 8
    rounds: int = 3
    device: str = "auto"
    dtype: str = "auto"
    loop: bool = True
    """Also run the recompute loop, by far the slowest."""


def recompute_loop(model, idx, new_tokens, rt):
    """Sample as build-nanogpt does: the whole context goes through the model for each token, top-k 50."""
    import torch
    import torch.nn.functional as F

    for _ in range(new_tokens):
        with torch.no_grad():
            with rt.autocast():
                logits = model(idx)[0]
            probs = F.softmax(logits[:, -1, :], dim=-1)
            top, ids = torch.topk(probs, 50, dim=-1)
            idx = torch.cat((idx, torch.gather(ids, -1, torch.multinomial(top, 1))), dim=1)
    return idx


def bandwidth(device) -> float:
    """Bytes per second that the device reads: the best of several sums over a gigabyte."""
    import torch

    x, best = torch.ones(1 << 28, device=device), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        x.sum().item()
        best = min(best, time.perf_counter() - start)
    return x.numel() * x.element_size() / best


def main() -> None:
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")  # so that no peer pays for planning each new length
    import torch
    import transformers

    import checkpoint
    import runtime
    from convert import save_hf
    from infer import Decoder, prepare
    from model import GPT, GPTConfig

    args = tyro.cli(Args, description=__doc__)
    with runtime.session(args.device, args.dtype) as rt, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        plain = GPT(GPTConfig()).to(rt.device)
        save_hf(plain, Path(folder, "hf"))
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(Path(folder, "hf"), dtype=rt.dtype).to(rt.device)
        ours = prepare(copy.deepcopy(plain), rt.device, rt.dtype)
        idx = torch.randint(50257, (1, args.prompt_tokens), device=rt.device).repeat(args.samples, 1)
        how = {"do_sample": True, "top_k": 50, "eos_token_id": None, "pad_token_id": 0}
        how["attention_mask"] = torch.ones_like(idx)
        ways = {
            "recompute loop": lambda n: recompute_loop(plain, idx, n, rt),
            "transformers": lambda n: theirs.generate(idx, max_new_tokens=n, **how),
            "ours": lambda n: ours.generate(idx, n, decoder=decoder),
        }
        decoder = Decoder(ours) if rt.device.type == "cuda" else None
        if decoder:
            ways["static cache"] = lambda n: theirs.generate(
                idx, max_new_tokens=n, cache_implementation="static", **how
            )
        if not args.loop:
            del ways["recompute loop"]
        seconds = {name: [] for name in ways}
        for r in range(args.rounds + 1):
            for name, way in list(ways.items()):
                start = time.perf_counter()
                try:
                    out = way(args.new_tokens if r or decoder else 4)
                    rt.synchronize()
                except Exception as e:
                    if name == "ours":
                        raise
                    print(f"{name} failed: {type(e).__name__}: {e!s:.300}", flush=True)
                    del ways[name], seconds[name]
                    continue
                if r:  # the first round only warms up, and compiles the static cache
                    seconds[name].append(time.perf_counter() - start)
                    assert out.shape == (args.samples, args.prompt_tokens + args.new_tokens), out.shape
        dtype = str(rt.dtype).removeprefix("torch.")
        print(f"GPT-2 124M, {dtype} on {rt.device}, {torch.get_num_threads()} threads, {args.samples} samples of "
              f"{args.new_tokens} tokens after {args.prompt_tokens}")  # fmt: skip
        middle = {name: statistics.median(s) for name, s in seconds.items()}
        for name, s in seconds.items():
            speed, ratio = args.samples * args.new_tokens / middle[name], middle[name] / middle["ours"]
            rounds = ", ".join(f"{x:.2f} s" for x in s)
            print(f"{name:14} {speed:8.1f} tokens/s   {ratio:6.2f} times our time   rounds: {rounds}")
        c, width = plain.config, rt.dtype.itemsize
        keys = 2 * c.n_layer * c.n_embd * args.samples * (args.prompt_tokens + args.new_tokens / 2)
        read = width * (plain.num_params() - plain.transformer.wpe.weight.numel() + keys)
        rate = bandwidth(rt.device)
        print(f"{'memory':14} {args.samples * rate / read:8.1f} tokens/s   {read / 1e6:.0f} MB per step at "
              f"{rate / 1e9:.0f} GB/s")  # fmt: skip
        checkpoint.write(file := Path(folder, "model_00001.pt"), checkpoint.model_file(plain, 1))
        command = [sys.executable, str(ROOT / "infer.py"), str(file), "Hello", "--max-new-tokens", "1"]
        command += ["--device", args.device, "--dtype", args.dtype]
        times = []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times.append(time.perf_counter() - start)
        print(f"{'first token':14} {statistics.median(times[1:]):8.2f} s after the command; rounds: "
              f"{', '.join(f'{t:.2f} s' for t in times[1:])}")  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main, brief_waits=True)  # as in infer.py
