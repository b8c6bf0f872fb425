"""How fast a training step is, against build-nanogpt and nanoGPT, and how long the first one takes.

    python -m bench.train quickstart --data-dir data/stdlib --peers ~/peers
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --peers ~/peers --steps 20     # on a GPU
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --only ours ours-recompute     # memory against time
    python -m bench.train gpt2-124m --data-dir data/fineweb-edu --only ours --profile          # where the time goes

--peers names a folder with checkouts of build-nanogpt and nanoGPT. Each contender trains the same shape on the same
tokens (one rank, the preset's batch, AdamW, bfloat16 autocast where the device has it) in a separate process; they
take turns, and medians over all timed steps are printed (B is the micro-batch; gradients: forward, backward, clipping).
build-nanogpt runs as it is (eager); its classes are extracted from the file, because importing it starts training. MFU
is based on model.GPT.flops_per_token. First step: seconds from the command to its end, with the compile cache empty
and, in the last of several rounds, full.
"""

import ast
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
import tyro

import train_gpt2
from bench import turns
from system import cards, cli, distributed, machine
from tokens.loader import to_device
from training.microbatch import choose_micro_batch_size
from training.presets import parse
from training.step import TrainStep

CONTENDERS = ("ours", "ours-eager", "nanogpt", "nanogpt-compiled", "build-nanogpt", "ours-recompute")
OWN_FLAGS = {"ours": [], "ours-eager": ["--no-compile"], "ours-recompute": ["--recompute"]}


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "quickstart"
    flags: tyro.conf.Positional[tuple[str, ...]] = ()
    """More flags of train_gpt2.py, after --."""
    data_dir: str = "data/stdlib"
    peers: Path | None = None
    steps: int = 6
    """Timed steps per round."""
    rounds: int = 2
    only: tuple[str, ...] = ()
    """Some of ours, ours-eager, nanogpt, nanogpt-compiled, build-nanogpt, ours-recompute."""
    profile: bool = False
    """Also list what takes most device time in a step, and how long the device is busy."""
    child: str = ""
    """Set for the process that runs one contender."""


def build_nanogpt(folder: Path):
    """(GPT, GPTConfig) of build-nanogpt's train_gpt2.py, without what it does on import."""
    path = folder / "build-nanogpt" / "train_gpt2.py"
    body = []
    for node in ast.parse(path.read_text()).body:
        imports = isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "hellaswag"
        if imports or (isinstance(node, ast.ClassDef) and node.name != "DataLoaderLite"):
            body.append(node)
    space = {"__name__": "peer", "master_process": False}
    sys.modules["peer"] = type(sys)("peer")
    exec(compile(ast.Module(body, []), str(path), "exec"), space)
    return space["GPT"], space["GPTConfig"]


def nanogpt(folder: Path):
    """(GPT, GPTConfig) of nanoGPT's model.py, beside our module of the same name."""
    ours = sys.modules.pop("model")
    sys.path.insert(0, str(folder / "nanoGPT"))
    import model as theirs

    sys.path.pop(0)
    sys.modules["model"] = ours
    return theirs.GPT, theirs.GPTConfig


class Peer:
    """A peer's model and optimizer, from its own code, at our shape and learning rate; its step is as it writes it."""

    def __init__(self, name: str, folder: Path, cfg, rt):
        sizes = {k: getattr(cfg.model, k) for k in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
        self.rt = rt
        if name == "build-nanogpt":
            GPT, GPTConfig = build_nanogpt(folder)
            self.model = GPT(GPTConfig(**sizes)).to(rt.device)
            self.optimizer = self.model.configure_optimizers(0.1, cfg.max_lr, rt.device.type)
        else:
            GPT, GPTConfig = nanogpt(folder)
            self.model = GPT(GPTConfig(**sizes, dropout=0.0, bias=True)).to(rt.device)
            self.optimizer = self.model.configure_optimizers(0.1, cfg.max_lr, (0.9, 0.95), rt.device.type)
        self.forward = torch.compile(self.model) if name.endswith("compiled") else self.model
        self.model.num_params = lambda: sum(p.numel() for p in self.model.parameters())
        self.B = choose_micro_batch_size(cfg, rt, self.model, self.forward)

    def gradients(self, batch):
        loss = torch.zeros((), device=self.rt.device)
        for tokens in batch:
            x, y = to_device(tokens, self.rt.device)
            with self.rt.autocast():
                _, micro = self.forward(x, y)
            (micro / len(batch)).backward()
            loss += micro.detach() / len(batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return SimpleNamespace(loss=loss.item())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def child(args: Args) -> None:
    """Run one contender for one round and print a JSON line."""
    flags = [args.preset, *args.flags, "--data-dir", args.data_dir, *OWN_FLAGS.get(args.child, [])]
    cfg = parse(flags, None)
    with distributed.session(cfg.device, cfg.dtype) as rt:
        torch.manual_seed(0)
        data, _ = train_gpt2.open_data(cfg, rt)
        if args.child in OWN_FLAGS:
            contender = TrainStep(cfg, rt, train_gpt2.make_model(cfg, rt))
            contender.set_learning_rates(cfg.warmup_steps, cfg.total_steps(data.order.sequences_per_epoch))
        else:
            contender = Peer(args.child, args.peers, cfg, rt)
        batches = data.batches(0, cfg.sequences_per_step, contender.B, rt)
        times = []

        def one_step() -> float:
            marks = [time.perf_counter()]
            batch = next(batches)
            marks.append(time.perf_counter())
            result = contender.gradients(batch)
            rt.synchronize()
            marks.append(time.perf_counter())
            contender.update()
            rt.synchronize()
            marks.append(time.perf_counter())
            times.append([1e3 * (b - a) for a, b in pairwise(marks)])
            return result.loss

        one_step()
        first_s = turns.since_command()
        for _ in range(args.steps + 2):
            loss = one_step()
        found = {
            "times": times[3:], "ms": statistics.median(map(sum, times[3:])), "loss": loss, "first_s": first_s,
            "B": contender.B, "peak_gb": machine.peak_memory(rt.device) / 1e9, "where": turns.where(rt),
            "tokens": cfg.total_batch_size, "peak_flops": cards.peak_flops(rt.device),
            "flops_per_token": contender.model.flops_per_token(cfg.sequence_length) if args.child in OWN_FLAGS else 0,
        }  # fmt: skip
        if args.profile:
            with torch.profiler.profile() as profiler:
                one_step()
            found["profile"] = table(profiler, sum(times[-1]), rt.device.type)
        print(json.dumps(found))


def table(profiler, ms: float, kind: str) -> str:
    """Device time of a step by kernel (on a CPU: by operation)."""
    rows = []
    for row in profiler.key_averages():
        own = row.self_cpu_time_total if kind == "cpu" else row.self_device_time_total
        # compiled graphs and optimizer steps have rows of their own, on top of those of the kernels they enclose
        if own and (kind == "cpu" or (str(row.device_type).endswith("CUDA") and not row.is_user_annotation)):
            rows.append((own / 1e3, row.count, row.key))
    rows.sort(reverse=True)
    busy = sum(own for own, _, _ in rows)
    lines = [f"one profiled step: {ms:,.1f} ms, device busy {busy:,.1f} ms"]
    lines += ["| share | ms | calls | kernel |", "|---|---|---|---|"]
    lines += [f"| {own / busy:.1%} | {own:,.2f} | {count} | {name[:90]} |" for own, count, name in rows[:20]]
    return "\n".join(lines)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    results = turns.in_turns("bench.train", args.only or CONTENDERS[: 5 if args.peers else 2], args.rounds)
    for name, runs in results.items():
        if args.profile:
            print(f"{name}, {runs[0]['profile']}\n")
    one = next(iter(results.values()))[0]
    print(f"{args.preset} {' '.join(args.flags)} on {one['where']}, {one['tokens']:,} tokens per step")
    columns = "contender | tokens/s | ours is | step ms | data | gradients | update | MFU | peak GB | B"
    print(f"| {columns} | first step s, cache empty | full | loss |\n{'|---' * 13}|")
    ours = None
    for name, runs in results.items():
        steps = [ms for r in runs for ms in r["times"]]
        data, gradients, update = (statistics.median(ms[i] for ms in steps) for i in range(3))
        rate = one["tokens"] / statistics.median(map(sum, steps)) * 1e3
        ours = ours or rate
        mfu = f"{rate * one['flops_per_token'] / one['peak_flops']:.1%}" if one["peak_flops"] else "unknown"
        full = f"{runs[-1]['first_s']:.1f}" if len(runs) > 1 else ""
        print(f"| {name} | {rate:,.0f} | {ours / rate:.2f}x | {one['tokens'] / rate * 1e3:,.1f} | {data:.1f} | "
              f"{gradients:,.1f} | {update:.1f} | {mfu} | {max(r['peak_gb'] for r in runs):.2f} | {runs[0]['B']} | "
              f"{runs[0]['first_s']:.1f} | {full} | {runs[0]['loss']:.4f} |")  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
