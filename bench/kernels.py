"""Where the time of a micro-step goes, by kind of kernel, as rows of the table that `make gpu-report` prints.

    python -m bench.kernels machine                 # the card, the versions, which kernel computes attention
    python -m bench.kernels step [FLAGS]            # a step of two micro-steps, with flags of train_gpt2.py

The second profiles a warm step, once with chunks of 8,192 rows in the head (training/head.py), once with 32,768.
"""

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity

from lifecycle.build import build_trainer
from lifecycle.command_line import parse
from model import GPT
from system import distributed, machine, process
from system.cards import total_peak_flops
from system.distributed import Runtime
from training.head import Loss

# By words in the names of kernels, on GPUs and CPUs; the first that fits. Those of the compiler have words of any kind.
KINDS = {
    "Triton": ["triton"],
    "attention": ["flash", "fmha", "attention", "sdpa"],
    "matmul": ["gemm", "nvjet", "cutlass", "cublas", "xmma", "::mm", "::bmm", "addmm"],
    "copies": ["memcpy", "memset", "copy"],
    "rest": [""],
}

# What a review expects of an H100, in ms a micro-step of 64 x 1,024 tokens of gpt2-124m.
EXPECTED = {
    "Triton": "36 to 42: norms and pointwise 29 to 33, head softmax 7 to 9",
    "attention": "15 to 18",
    "matmul": "76 to 85: blocks 52 to 58, head 24 to 27",
    "copies": "4 to 5, with the rest",
    "rest": "",
    "all": "132 to 151, MFU 37 to 43%",
}


def print_row(name: str, measured: str, expected: str = "") -> None:
    print(f"| {name} | {measured} | {expected} |", flush=True)


def profile(rt: Runtime, work: Callable[[], object]) -> Counter[str]:
    """{name of a kernel: microseconds} of what a GPU computes in `work` or, on a CPU, of torch's operators."""
    is_gpu = rt.device.type == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU]) as profiler:
        work()
        rt.synchronize()
    times: Counter[str] = Counter()
    for event in profiler.key_averages():
        # The call that launches a kernel has the kernel's time, too.
        is_on_gpu = event.device_type == DeviceType.CUDA
        if is_on_gpu == is_gpu and not event.is_user_annotation:
            times[event.key] += round(event.self_device_time_total if is_gpu else event.self_cpu_time_total)
    return times


def describe_machine() -> None:
    with distributed.session() as rt:
        print_row("device", machine.device_name(rt.device))
        cuda = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
        print_row("versions", f"Python {platform.python_version()}, torch {torch.__version__}, {cuda}")

        dtype = machine.supported_dtypes(rt.device)[0]
        q, k, v = torch.ones(3, 8, 12, 1024, 64, device=rt.device, dtype=dtype)
        times = profile(rt, partial(scaled_dot_product_attention, q, k, v, is_causal=True))
        print_row("attention", f"{max(times, key=lambda name: times[name]):.90}")
        if rt.device.type == "cuda":
            print_row("allocator", str(torch.cuda.memory._snapshot()["allocator_settings"]))


def profile_step(flags: list[str]) -> None:
    """Each row is printed as soon as it is known: the next may hang."""
    cfg, _, _ = parse(flags)
    with distributed.session(cfg.device) as rt:
        rt = distributed.choose_precision(rt, cfg.dtype)
        trainer = build_trainer(GPT(cfg.model), cfg, rt, max_steps=1)
        B, T = trainer.B, cfg.sequence_length
        batch = torch.randint(cfg.model.vocab_size, (2, B, T + 1)).to(torch.uint16)

        def step() -> None:
            trainer.compute_gradients(batch)
            trainer.finish_step()

        for rows in 8192, 32_768:
            Loss.chunk_rows = lambda self, device, rows=rows: rows  # type: ignore[assignment, misc]
            step()  # compiles
            step()
            rt.synchronize()
            start = time.perf_counter()
            step()
            rt.synchronize()
            seconds = (time.perf_counter() - start) / len(batch)

            ms = dict.fromkeys(KINDS, 0.0)
            for name, us in profile(rt, step).items():
                kind = next(kind for kind in KINDS if any(word in name.lower() for word in KINDS[kind]))
                ms[kind] += us / 1e3 / len(batch)
            for kind in KINDS:
                print_row(f"{kind}, chunks of {rows}", f"{ms[kind]:.1f} ms", EXPECTED[kind])
            flops = trainer.model.flops_per_token(T) * B * T
            mfu = flops / seconds / (total_peak_flops(rt) or float("nan"))
            memory = f"peak {machine.peak_memory(rt.device) / 2**30:.1f} GiB"
            measured = f"{1e3 * seconds:.1f} ms for {B} x {T} tokens, MFU {mfu:.1%}, {memory}"
            print_row(f"all, by the clock, chunks of {rows}", measured, EXPECTED["all"])


def main() -> None:
    if sys.argv[1] == "machine":
        describe_machine()
    else:
        profile_step(sys.argv[2:])


if __name__ == "__main__":
    process.run_cli(main)
