"""How fast is a training step beside build-nanogpt's and nanoGPT's, and how long does the first one take?

    python -m bench.train quickstart --data-dir data/stdlib --peers ~/peers
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --peers ~/peers --steps 20     # on a GPU
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --only ours ours-recompute     # memory against time
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --only ours --profile          # where the time goes

--peers names a folder with checkouts of build-nanogpt and nanoGPT. "ours" is this project's step, as train_gpt2.py
makes it. All contenders train the same network on the same tokens: one rank, the preset's batch and dtype. Peers have
AdamW; a preset with another optimizer needs -- --optimizer=adamw for a fair comparison. build-nanogpt runs without
torch.compile, as it comes. The contenders take turns in separate processes. The table's columns:

    tokens/s, step ms            medians over all timed steps
    data, gradients, update      the parts of a step in ms; gradients are forward, backward and clipping
    MFU                          of the FLOPs that model.GPT.flops_per_token counts
    B                            sequences in a micro-batch
    first step s                 from the command to the end of the first step, with the compile cache empty in the
                                 first round and, if there are several, full in the last
"""

import ast
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import tyro
from torch import Tensor

import train_gpt2
from bench import turns
from model import GPT
from system import cli, distributed, machine
from system.distributed import Runtime
from tokens.loader import to_device
from training import cards
from training.config import TrainConfig
from training.microbatch import choose_micro_batch_size
from training.presets import parse
from training.step import TrainStep

# What each contender of this project adds to the command line of train_gpt2.py.
OUR_FLAGS = {"ours": [], "ours-eager": ["--no-compile"], "ours-recompute": ["--recompute"]}
PEERS = ("nanogpt", "nanogpt-compiled", "build-nanogpt")
WARMUP_STEPS = 2  # after the first step, which compiles


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "quickstart"
    flags: tyro.conf.Positional[tuple[str, ...]] = ()
    """More flags of train_gpt2.py, after --."""
    data_dir: str = "data/stdlib"
    peers: Path | None = None
    """Folder with checkouts of build-nanogpt and nanoGPT; without it, only this project is measured."""
    steps: int = 6
    """Timed steps per round."""
    rounds: int = 2
    only: tuple[str, ...] = ()
    """Some of ours, ours-eager, nanogpt, nanogpt-compiled, build-nanogpt, ours-recompute."""
    profile: bool = False
    """Also list what takes most device time in a step, and how long the device is busy."""
    child: str = ""
    """Set for the process that runs one contender."""


# ------------------------------------------------------------------------- the peers


def import_build_nanogpt(folder: Path) -> tuple[type, type]:
    """GPT and GPTConfig of build-nanogpt's train_gpt2.py.

    Importing that file would start a training run, so only its imports and its classes are executed.
    """
    # Its imports, without that of its own hellaswag.py, and its classes, without the loader, which opens shards.
    path = folder / "build-nanogpt" / "train_gpt2.py"
    nodes = []
    for node in ast.parse(path.read_text()).body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "hellaswag"
        is_class = isinstance(node, ast.ClassDef) and node.name != "DataLoaderLite"
        if is_import or is_class:
            nodes.append(node)

    # Execute them as a module "peer". It must be in sys.modules, where @dataclass looks up the module of its class.
    scope = {"__name__": "peer", "master_process": False}
    sys.modules["peer"] = type(sys)("peer")
    exec(compile(ast.Module(nodes, []), str(path), "exec"), scope)
    return scope["GPT"], scope["GPTConfig"]


def import_nanogpt(folder: Path) -> tuple[type, type]:
    """GPT and GPTConfig of nanoGPT's model.py."""
    # Both projects have a module `model`: put this project's aside while nanoGPT's is imported.
    own_module = sys.modules.pop("model")
    sys.path.insert(0, str(folder / "nanoGPT"))
    import model as nanogpt_module

    sys.path.pop(0)
    sys.modules["model"] = own_module
    return nanogpt_module.GPT, nanogpt_module.GPTConfig


class PeerStep:
    """A peer's model and optimizer, from its own code, at this run's shape and learning rate. Its step is written as in
    the peer's loop, and called as a TrainStep."""

    def __init__(self, name: str, folder: Path, cfg: TrainConfig, rt: Runtime):
        self.rt = rt

        # The model and the optimizer, each as the peer's own functions make them, with the weight decay and the betas
        # of both peers' training scripts.
        shape_fields = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
        shape = {field: getattr(cfg.model, field) for field in shape_fields}
        match name:
            case "build-nanogpt":
                PeerGPT, PeerConfig = import_build_nanogpt(folder)
                self.model = PeerGPT(PeerConfig(**shape)).to(rt.device)
                self.optimizer = self.model.configure_optimizers(0.1, cfg.max_lr, rt.device.type)
            case "nanogpt" | "nanogpt-compiled":
                PeerGPT, PeerConfig = import_nanogpt(folder)
                self.model = PeerGPT(PeerConfig(**shape, dropout=0.0, bias=True)).to(rt.device)
                self.optimizer = self.model.configure_optimizers(0.1, cfg.max_lr, (0.9, 0.95), rt.device.type)
            case _:
                raise ValueError(f"no peer {name!r}: add a case here")

        # How it runs: the compiled model or the model itself, in micro-batches as large as the command says or as fit.
        self.forward = torch.compile(self.model) if name.endswith("compiled") else self.model
        self.sequence_length = cfg.sequence_length
        self.micro_batch_size = choose_micro_batch_size(cfg, rt, self.rehearse)

    def compute_gradients(self, batch: Tensor) -> SimpleNamespace:
        """Forward, backward and clipping. batch (micro_steps, B, T + 1) uint16 -> .loss, the mean over the step."""
        loss_sum = torch.zeros((), device=self.rt.device)
        for tokens in batch:  # (B, T + 1)
            x, y = to_device(tokens, self.rt.device)  # (B, T) each
            with self.rt.autocast():
                _, loss = self.forward(x, y)
            (loss / len(batch)).backward()
            loss_sum += loss.detach() / len(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return SimpleNamespace(loss=loss_sum.item())

    def rehearse(self, B: int, with_other_ranks: bool) -> None:
        """Forward and backward of two micro-batches of B sequences, for --micro-batch-size auto."""
        try:
            self.compute_gradients(torch.zeros(2, B, self.sequence_length + 1, dtype=torch.uint16))
        finally:
            self.optimizer.zero_grad(set_to_none=True)

    def update(self) -> None:
        """Step the optimizer with the gradients of compute_gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------- one contender


def make_contender(args: Args, cfg: TrainConfig, rt: Runtime, total_steps: int) -> TrainStep | PeerStep:
    """The step of the contender args.child: a peer's, or this project's as train_gpt2.py builds it. Both have
    compute_gradients(batch), update() and micro_batch_size."""
    if args.child not in OUR_FLAGS:
        return PeerStep(args.child, args.peers, cfg, rt)
    model = GPT(cfg.model)
    model.recompute = cfg.recompute
    train_step = TrainStep(cfg, rt, model.to(rt.device).train())
    train_step.set_learning_rates(cfg.warmup_steps, total_steps)  # the peak rate, which peers have, too
    return train_step


def measure_contender(args: Args) -> None:
    """In a process of its own: run the contender args.child for one round, and print the result as JSON."""
    # The config of the preset, for all contenders.
    cfg = parse([args.preset, *args.flags, "--data-dir", args.data_dir, *OUR_FLAGS.get(args.child, [])], None)
    with distributed.session(cfg.device, cfg.dtype) as rt:
        # The contender, and the batches that train_gpt2.py would train on.
        torch.manual_seed(0)
        data, _ = train_gpt2.open_data(cfg, rt)
        contender = make_contender(args, cfg, rt, cfg.total_steps(data.order.sequences_per_epoch))
        batches = data.batches(0, cfg.sequences_per_step, contender.micro_batch_size, rt)
        parts_ms: list[list[float]] = []  # of each step: data, gradients, update

        def run_step() -> float:
            """Make a step, append the times of its parts and return its loss."""
            parts: list[float] = []

            def timed(work: Callable[[], Any]) -> Any:
                """Do one part of the step, and append the milliseconds until the device has finished it."""
                start_time = time.perf_counter()
                result = work()
                rt.synchronize()
                parts.append(1e3 * (time.perf_counter() - start_time))
                return result

            batch = timed(lambda: next(batches))
            result = timed(lambda: contender.compute_gradients(batch))
            timed(contender.update)
            parts_ms.append(parts)
            return result.loss

        # The first step compiles, a few more warm up the caches, and the others are timed.
        run_step()
        first_s = turns.seconds_since_command()
        for _ in range(WARMUP_STEPS + args.steps):
            loss = run_step()
        timed_parts = parts_ms[1 + WARMUP_STEPS :]

        # Only this project's model counts its FLOPs. The table uses the count for the peers, too: their network is the
        # same.
        flops_per_token = 0
        if args.child in OUR_FLAGS:
            flops_per_token = contender.model.flops_per_token(cfg.sequence_length)

        result = {
            "times": timed_parts,
            "ms": statistics.median(map(sum, timed_parts)),
            "loss": loss,
            "first_s": first_s,
            "B": contender.micro_batch_size,
            "peak_gb": machine.peak_memory(rt.device) / 1e9,
            "where": turns.describe_machine(rt),
            "tokens": cfg.total_batch_size,
            "peak_flops": cards.peak_flops(rt.device),
            "flops_per_token": flops_per_token,
        }

        # With --profile, one more step, which is not among the timed ones: the profiler slows it down.
        if args.profile:
            with torch.profiler.profile() as profiler:
                run_step()
            result["profile"] = profile_table(profiler, sum(parts_ms[-1]), rt.device.type)
        print(json.dumps(result))


def profile_table(profiler: torch.profiler.profile, step_ms: float, device_type: str) -> str:
    """The 20 kernels (on a CPU: operations) that take most device time in a step, as a table."""
    # (milliseconds, calls, name) of every kernel, without what its callees took.
    rows = []
    for event in profiler.key_averages():
        if device_type == "cpu":
            microseconds = event.self_cpu_time_total
            is_kernel = True
        else:
            microseconds = event.self_device_time_total
            # Compiled graphs and optimizer steps have events of their own, which enclose those of their kernels.
            is_kernel = str(event.device_type).endswith("CUDA") and not event.is_user_annotation
        if microseconds and is_kernel:
            rows.append((microseconds / 1e3, event.count, event.key))

    # The kernels that take most time come first. The device is idle in what is left of the step.
    rows.sort(reverse=True)
    busy_ms = sum(ms for ms, _, _ in rows)
    lines = [
        f"one profiled step: {step_ms:,.1f} ms, device busy {busy_ms:,.1f} ms",
        "| share | ms | calls | kernel |",
        "|---|---|---|---|",
    ]
    lines += [f"| {ms / busy_ms:.1%} | {ms:,.2f} | {count} | {name[:90]} |" for ms, count, name in rows[:20]]
    return "\n".join(lines)


# ------------------------------------------------------------------------- all contenders


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return measure_contender(args)
    contenders = args.only or ("ours", "ours-eager", *(PEERS if args.peers else ()))
    results = turns.measure_in_turns("bench.train", contenders, args.rounds)

    if args.profile:
        for name, runs in results.items():
            print(f"{name}, {runs[0]['profile']}\n")

    # The table: one row a contender. Speeds are compared with that of the first one.
    first = next(iter(results.values()))[0]
    print(f"{args.preset} {' '.join(args.flags)} on {first['where']}, {first['tokens']:,} tokens per step")
    columns = "contender | tokens/s | ours is | step ms | data | gradients | update | MFU | peak GB | B"
    print(f"| {columns} | first step s, cache empty | full | loss |\n{'|---' * 13}|")
    first_rate = None
    for name, runs in results.items():
        # The timed steps of all rounds, (steps, 3): the milliseconds of data, gradients and update.
        steps = [parts for run in runs for parts in run["times"]]
        step_ms = statistics.median(map(sum, steps))
        data_ms, gradients_ms, update_ms = (statistics.median(parts) for parts in zip(*steps, strict=True))

        # Tokens per second, in all and as a part of what the device could compute.
        rate = first["tokens"] / step_ms * 1e3
        if first_rate is None:
            first_rate = rate
        mfu = f"{rate * first['flops_per_token'] / first['peak_flops']:.1%}" if first["peak_flops"] else "unknown"

        peak_gb = max(run["peak_gb"] for run in runs)
        first_s_full_cache = f"{runs[-1]['first_s']:.1f}" if len(runs) > 1 else ""
        cells = [
            name,
            f"{rate:,.0f}",
            f"{first_rate / rate:.2f}x",
            f"{step_ms:,.1f}",
            f"{data_ms:.1f}",
            f"{gradients_ms:,.1f}",
            f"{update_ms:.1f}",
            mfu,
            f"{peak_gb:.2f}",
            str(runs[0]["B"]),
            f"{runs[0]['first_s']:.1f}",
            first_s_full_cache,
            f"{runs[0]['loss']:.4f}",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    cli.run_cli(main)
