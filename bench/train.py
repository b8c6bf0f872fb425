"""How fast a training step is, against build-nanogpt and nanoGPT, interleaved in the same run.

    python bench/train.py quickstart --data-dir data/stdlib --peers ~/peers
    python bench/train.py gpt2-124m --data-dir data/fineweb-edu --peers ~/peers --steps 20     # on a GPU
    python bench/train.py gpt2-124m --data-dir data/fineweb-edu --only ours ours-recompute     # memory against time
    python bench/train.py gpt2-124m --data-dir data/fineweb-edu --only ours --profile          # where the time goes

--peers names a folder with checkouts of build-nanogpt and nanoGPT. Each contender trains the same shape on the same
tokens (one rank, the preset's batch, AdamW, bfloat16 autocast where the device has it) in a separate process; the
rounds are interleaved, and medians over all timed steps are printed (B is the micro-batch). build-nanogpt runs as it
is (eager); its classes are extracted from the file, because importing it starts training. MFU is based on
model.GPT.flops_per_token.
"""

import ast
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import cli  # noqa: E402

CONTENDERS = (
    "ours", "ours-eager", "nanogpt", "nanogpt-compiled", "build-nanogpt", "ours-recompute", "ours-whole", "ours-blocks",
)  # fmt: skip


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
    """Some of ours, ours-eager, nanogpt, nanogpt-compiled, build-nanogpt, ours-recompute; ours-whole and ours-blocks
    compile the model in one graph or block by block, whatever the trainer would do here."""
    profile: bool = False
    """Also list what takes most device time in a step of the first contender, and how long it is busy."""
    child: str = ""
    """Set for the process that runs one contender."""


def peer_model(name: str, folder: Path, shape, lr: float):
    """(model, function that makes its optimizer) of a peer at our shape and learning rate, from its own code."""
    import torch

    sizes = {k: getattr(shape, k) for k in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
    if name == "build-nanogpt":
        path = folder / "build-nanogpt" / "train_gpt2.py"
        keep = (ast.ClassDef, ast.Import, ast.ImportFrom)
        body = [n for n in ast.parse(path.read_text()).body if isinstance(n, keep)]
        body = [
            n for n in body if getattr(n, "module", None) != "hellaswag" and getattr(n, "name", "") != "DataLoaderLite"
        ]
        space = {"__name__": "peer", "master_process": False}
        sys.modules["peer"] = type(sys)("peer")
        exec(compile(ast.Module(body, []), str(path), "exec"), space)
        model = space["GPT"](space["GPTConfig"](**sizes))
        return model, lambda device: model.configure_optimizers(0.1, lr, device.type)
    sys.path.insert(0, str(folder / "nanoGPT"))
    ours = sys.modules.pop("model", None)
    import model as nanogpt

    sys.modules["nanogpt_model"] = sys.modules.pop("model")
    if ours is not None:
        sys.modules["model"] = ours
    model = nanogpt.GPT(nanogpt.GPTConfig(**sizes, dropout=0.0, bias=True))
    return torch.compile(model) if name.endswith("compiled") else model, lambda device: model.configure_optimizers(
        0.1, lr, (0.9, 0.95), device.type
    )


def child(args: Args) -> None:
    """Run one contender for one round and print a JSON line."""
    cli.thread_waits()
    import torch

    import optim
    import runtime
    import train_gpt2
    from config import parse
    from loader import to_device

    more = {"ours-eager": ["--no-compile"], "ours-recompute": ["--recompute"]}.get(args.child, [])
    flags = [args.preset, *args.flags, "--data-dir", args.data_dir, *more]
    cfg = parse(flags, lambda path: {})
    with runtime.session(cfg.device, cfg.dtype) as rt:
        torch.manual_seed(0)
        began = time.perf_counter()
        data = train_gpt2.train_loader(cfg, cfg.data_dir)
        model, weights = train_gpt2.make_model(cfg, rt, None), None
        if args.child.startswith("ours"):
            weights = optim.Weights(model, cfg)
            forward, optimizers = train_gpt2.compiled(model, cfg, rt), optim.build(weights, cfg, rt)
            if args.child == "ours-whole":
                forward = torch.compile(model, dynamic=False)
            elif args.child == "ours-blocks":
                forward = train_gpt2.Compiled(model)
        else:
            forward, make = peer_model(args.child, args.peers, cfg.model, cfg.max_lr)
            forward = forward.to(rt.device)
            optimizers = [make(rt.device)]
        B = train_gpt2.plan.micro_batch_size(cfg, rt, model, forward)
        for p in forward.parameters():
            p.grad = None  # left in a peer's by trying out B
        scaler = torch.amp.GradScaler(rt.device.type, enabled=False)
        batches = data.batches(0, cfg.sequences_per_step, B, rt)
        parameters = [p for o in optimizers for g in o.param_groups for p in g["params"]]
        times, profiler = [], None
        for step in range(args.steps + 3 + args.profile):
            if step == args.steps + 3:  # after the timed steps
                profiler = torch.profiler.profile()
                profiler.start()
            t0 = time.perf_counter()
            batch = next(batches)
            t1 = time.perf_counter()
            if args.child.startswith("ours"):
                loss = train_gpt2.accumulate(forward, batch, rt, scaler)
            else:
                loss = torch.zeros((), device=rt.device)
                for tokens in batch:
                    x, y = to_device(tokens, rt.device)
                    with rt.autocast():
                        _, micro = forward(x, y)
                    (micro / len(batch)).backward()
                    loss += micro.detach() / len(batch)
            rt.synchronize()
            t2 = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(weights.take_gradients() if weights else parameters, 1.0)
            for o in optimizers:
                o.step()
                o.zero_grad(set_to_none=True)
            if weights:
                weights.copy_to_model()
            rt.synchronize()
            t3 = time.perf_counter()
            if step == 0:
                start_s, first_s = t3 - began, t3 - t0
            if profiler:
                profiler.stop()
                table(profiler, t3 - t0, rt.device.type)
            elif step >= 3:
                times.append((t3 - t0, t1 - t0, t2 - t1, t3 - t2))
        peak = runtime.peak_flops(rt.device)
        per_token = model.flops_per_token(cfg.sequence_length)
        print(json.dumps({"times": times, "loss": loss.item(), "peak_gb": rt.peak_memory() / 1e9, "start_s": start_s,
                          "first_s": first_s, "B": B, "tokens": cfg.total_batch_size,
                          "peak_flops": peak, "flops_per_token": per_token,
                          "device": runtime.device_name(rt.device), "torch": torch.__version__}))  # fmt: skip


def table(profiler, seconds: float, kind: str) -> None:
    """Print device time per kernel (on a CPU: per operation) to stderr."""
    rows = []
    for row in profiler.key_averages():
        own = row.self_cpu_time_total if kind == "cpu" else row.self_device_time_total
        # compiled graphs and optimizer steps have rows of their own, on top of those of the kernels they enclose
        if own and (kind == "cpu" or (str(row.device_type).endswith("CUDA") and not row.is_user_annotation)):
            rows.append((own / 1e6, row.count, row.key))
    rows.sort(reverse=True)
    busy = sum(own for own, _, _ in rows)
    print(f"one profiled step: {seconds * 1e3:,.1f} ms, device busy {busy * 1e3:,.1f} ms", file=sys.stderr)
    print("| share | ms | calls | kernel |\n|---|---|---|---|", file=sys.stderr)
    for own, count, name in rows[:20]:
        print(f"| {own / busy:.1%} | {own * 1e3:,.2f} | {count} | {name[:90]} |", file=sys.stderr)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        return child(args)
    names = args.only or CONTENDERS[: 5 if args.peers else 2]
    results: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in list(results):
            command = [sys.executable, __file__, args.preset, "--child", name, "--data-dir", args.data_dir]
            command += ["--steps", str(args.steps)] + (["--peers", str(args.peers)] if args.peers else [])
            command += ["--profile"] if args.profile and name == names[0] and not results[name] else []
            command += ["--", *args.flags] if args.flags else []
            done = subprocess.run(command, capture_output=True, text=True, cwd=Path.cwd())
            if done.returncode:
                print(f"{name} failed: {done.stderr[-1500:]}", file=sys.stderr, flush=True)
                if not results[name]:
                    del results[name]  # the others are measured all the same
                continue
            if "--profile" in command:
                print(done.stderr[done.stderr.index("one profiled step") :])
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            ms = ", ".join(f"{1e3 * t[0]:,.0f}" for t in results[name][-1]["times"])
            print(f"{name}: {ms} ms", file=sys.stderr, flush=True)
    if not results:
        raise cli.UserError("nothing was measured; what failed is above")
    one = next(iter(results.values()))[0]
    title = f"{args.preset} {' '.join(args.flags)} on {one['device']}, torch {one['torch']}"
    print(f"\n{title}, {one['tokens']:,} tokens per step")
    print("| contender | tokens/s | ours is | step ms | data | fwd+bwd | optimizer | MFU | peak GB | B | start s | of "
          "which first step | loss |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    ours = None
    for name, runs in results.items():
        times = [t for r in runs for t in r["times"]]
        step, data, model, optimizer = (1e3 * statistics.median(t[i] for t in times) for i in range(4))
        rate = one["tokens"] / step * 1e3
        ours = ours or rate
        mfu = f"{rate * one['flops_per_token'] / one['peak_flops']:.1%}" if one["peak_flops"] else "unknown"
        peak, run = max(r["peak_gb"] for r in runs), runs[0]
        print(
            f"| {name} | {rate:,.0f} | {ours / rate:.2f}x | {step:,.1f} | {data:.1f} | {model:,.1f} | {optimizer:.1f} "
            f"| {mfu} | {peak:.2f} | {run['B']} | {run['start_s']:.1f} | {run['first_s']:.1f} | {run['loss']:.4f} |"
        )


if __name__ == "__main__":
    cli.run_cli(main)
