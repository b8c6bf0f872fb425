"""Time from the command to the end of the first step, by phase, with an empty and with a full compile cache.

python bench/startup.py quickstart --data-dir data/stdlib
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import cli  # noqa: E402


def child(flags: list[str]) -> None:
    """One start: prints the seconds of each phase as a JSON line."""
    marks = {"python": float(os.environ["BENCH_BEGAN"]), "imports": time.time()}
    import runtime
    import train_gpt2

    marks["data"] = time.time()
    cfg = train_gpt2.parse(flags, lambda path: {})
    with runtime.session(cfg.device, cfg.dtype) as rt:
        import torch

        data = train_gpt2.train_loader(cfg, cfg.data_dir)
        marks["model and optimizer"] = time.time()
        model = train_gpt2.make_model(cfg, rt, None)
        weights = train_gpt2.optim.Weights(model, cfg)
        optimizers = train_gpt2.optim.build(weights, cfg, rt)
        forward = train_gpt2.compiled(model, cfg, rt)
        B = train_gpt2.plan.micro_batch_size(cfg, rt, model, forward)
        batches = data.batches(0, cfg.sequences_per_step, B, rt)
        scaler = torch.amp.GradScaler(rt.device.type, enabled=False)
        for name in ("first step (compiles)", "second step", "end"):
            marks[name] = time.time()
            if name != "end":
                train_gpt2.accumulate(forward, next(batches), rt, scaler)
                weights.take_gradients()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                rt.synchronize()
    print(
        json.dumps(
            {name: end - start for (name, start), end in zip(marks.items(), [*marks.values()][1:], strict=False)}
        )
    )


def main() -> None:
    flags = sys.argv[1:]
    if "BENCH_BEGAN" in os.environ:
        return child(flags)
    if "-h" in flags or "--help" in flags:
        return print(__doc__)
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in ("empty", "full"):
            env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "BENCH_BEGAN": str(time.time())}
            done = subprocess.run([sys.executable, __file__, *flags], env=env, capture_output=True, text=True)
            if done.returncode:
                raise cli.UserError(done.stderr[-1500:])
            rows.append(json.loads(done.stdout.splitlines()[-1]))
    print("| seconds | compile cache empty | full |\n|---|---|---|")
    for name in rows[0]:
        print(f"| {name} | {rows[0][name]:.2f} | {rows[1][name]:.2f} |")
    print(f"| all but the second step | {sum(rows[0].values()) - rows[0]['second step']:.2f} | "
          f"{sum(rows[1].values()) - rows[1]['second step']:.2f} |")  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
