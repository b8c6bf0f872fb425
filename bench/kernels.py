"""Where the time of a micro-step goes, by kind of kernel, as rows of the table that `make gpu-report` prints.

    python -m bench.kernels machine                 # the card and the versions
    python -m bench.kernels step [FLAGS]            # a step of two micro-steps, with flags of train_gpt2.py

The second profiles a warm step, once with chunks of 8,192 rows in the head (training/head.py), once with 32,768. The
row of each kind of kernel names the one that takes the most time.
"""

import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from operator import itemgetter

import torch
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from lifecycle.build import build_trainer
from lifecycle.command_line import parse
from lifecycle.microbatch import estimate_bytes
from model import GPT
from system import distributed, machine, process
from system.cards import total_peak_flops
from system.distributed import Runtime
from training.head import Loss, memory_bytes

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
    "Triton": "38 to 44: norms and pointwise 29 to 33, head softmax 9 to 11",
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
        card_bytes = memory_bytes(rt.device) if rt.device.type == "cuda" else 0

        def step(micro_steps: int) -> float:
            """The seconds of a step without its update."""
            rt.synchronize()
            start = time.perf_counter()
            trainer.compute_gradients(batch[:micro_steps])
            trainer.finish_step()
            rt.synchronize()
            return time.perf_counter() - start

        for rows in 8192, 32_768:
            Loss.chunk_rows = lambda self, device, rows=rows: rows  # type: ignore[assignment, misc]
            step(2)  # compiles
            graphs = counters["stats"]["unique_graphs"]
            step(2)
            seconds = {count: step(count) for count in (1, 2)}

            largest = {kind: ("none", 0) for kind in KINDS}  # the name of a kernel, and its microseconds
            total_us = dict.fromkeys(KINDS, 0)
            for name, us in profile(rt, lambda: step(2)).items():
                kind = next(kind for kind in KINDS if any(word in name.lower() for word in KINDS[kind]))
                total_us[kind] += us
                largest[kind] = max(largest[kind], (name, us), key=itemgetter(1))
            for kind in KINDS:
                measured = f"{total_us[kind] / 2e3:.1f} ms, most in {largest[kind][0]:.70}"
                print_row(f"{kind}, chunks of {rows}", measured, EXPECTED[kind])
            mfu = trainer.model.flops_per_token(T) * 2 * B * T / seconds[2] / (total_peak_flops(rt) or float("nan"))
            rates = [f"{count * B * T / seconds[count]:,.0f}" for count in seconds]
            measured = f"{500 * seconds[2]:.1f} ms for {B} x {T} tokens, MFU {mfu:.1%}"
            print_row(f"all, by the clock, chunks of {rows}", measured, EXPECTED["all"])
            print_row(f"tokens/s of one micro-step, and of two, chunks of {rows}", " and ".join(rates))
            recompiled = counters["stats"]["unique_graphs"] - graphs
            print_row(f"graphs, chunks of {rows}", f"{graphs}, and {recompiled} after the first step", "0 after it")
            memory = f"{machine.peak_memory(rt.device) / 2**30:.1f} GiB"
            estimate = f"{estimate_bytes(trainer, B, card_bytes) / 2**30:.1f} GiB, as the micro-batch was chosen"
            print_row(f"memory, chunks of {rows}", memory, estimate)

        # Without CUDA there are no statistics.
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)
        print_row("pinned host memory", f"{pinned / 2**20:.0f} MiB", "less than 100 MiB")


def main() -> None:
    if sys.argv[1] == "machine":
        describe_machine()
    else:
        profile_step(sys.argv[2:])


if __name__ == "__main__":
    process.run_cli(main)
