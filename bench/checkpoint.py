"""How long a checkpoint stalls training, compared to a synchronous save, and how long resuming takes to load it.

    python bench/checkpoint.py gpt2-124m
    python bench/checkpoint.py gpt2-124m --sequence-length 1024 --micro-batch-size 16      # on a GPU
    torchrun --standalone --nproc_per_node=2 bench/checkpoint.py llmc-124m                 # ZeRO-1: gathering its state

Both write the same content with fsync, into a folder under --dir. "Copy alone" is Writer.save until its input may
change, with nothing running alongside. In training, copying and writing overlap the next forward and backward; training
stalls while `save` starts them and, before the weights may change, for the rest of the copy. How much longer forward
and backward then take is printed, too: on a CPU they share the cores. Medians over --rounds.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import cli  # noqa: E402


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "gpt2-124m"
    sequence_length: int = 256
    micro_batch_size: int = 2
    rounds: int = 5
    dir: Path = Path(".")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    import torch

    import checkpoint
    import optim
    import resume
    import runtime
    from config import PRESETS
    from model import GPT

    cfg = PRESETS[args.preset]
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        rt.synchronize()
        began = time.perf_counter()
        work()
        rt.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - began)

    with runtime.session() as rt, tempfile.TemporaryDirectory(dir=args.dir) as out:
        model, scaler = GPT(cfg.model).to(rt.device), torch.amp.GradScaler(rt.device.type, enabled=False)
        optimizers = optim.build(optim.Weights(model, cfg), cfg, rt)
        writer, path = checkpoint.Writer(out, keep=1), checkpoint.model_path(out, 0)
        idx = torch.randint(cfg.model.vocab_size, (args.micro_batch_size, args.sequence_length), device=rt.device)

        def step() -> None:
            with rt.autocast():
                model(idx, idx)[1].backward()

        def content(n: int) -> tuple[dict, dict]:
            state = resume.train_state(cfg, rt, resume.RunState(n), optimizers, scaler, "", 0)
            return checkpoint.model_file(model, n), {"format": checkpoint.FORMAT, **state}

        def synchronous() -> None:
            weights, state = content(0)
            checkpoint.write(path, weights)
            checkpoint.write(path.with_name("optim_00000.pt"), state)

        def load() -> None:
            checkpoint.load_model(path, rt.device)
            resume.restore(checkpoint.read_train_state(path), optimizers, scaler, rt)

        step()
        for optimizer in optimizers:
            optimizer.step()  # creates the moments
        if rt.world_size > 1:
            for _ in range(args.rounds):
                timed("gather", lambda: optim.full_state(optimizers, rt))
            each = " ".join(f"{t:.2f}" for t in times["gather"])
            return cli.print0(f"{args.preset} on {rt.world_size} ranks: gathering its state takes {each} s")
        for i in range(1, args.rounds + 1):
            timed("synchronous save", synchronous)
            timed("load and restore", load)
            timed("copy alone", lambda: (writer.save(2 * i, *content(2 * i)), writer.copied()))  # noqa: B023
            timed("its writing, behind", writer.wait)
            timed("forward and backward", step)
            timed("in training: save", lambda: writer.save(2 * i + 1, *content(2 * i + 1)))  # noqa: B023
            timed("in training: forward and backward", step)
            timed("in training: wait for the copy", writer.copied)
            writer.wait()
        gb = sum(p.stat().st_size for p in Path(out).glob("*.pt")) / 1e9
    median = {name: statistics.median(values) for name, values in times.items()}
    print(f"{args.preset} on {runtime.device_name(rt.device)}, torch {torch.__version__}: {gb:.2f} GB per checkpoint")
    print("| what | seconds | of a synchronous save | all rounds |\n|---|---|---|---|")
    for name, seconds in median.items():
        share = seconds / median["synchronous save"]
        print(f"| {name} | {seconds:.3f} | {share:.0%} | {' '.join(f'{t:.2f}' for t in times[name])} |")
    stall = median["in training: save"] + median["in training: wait for the copy"]
    slower = median["in training: forward and backward"] - median["forward and backward"]
    print(f"training stalls for {stall:.3f} s, {stall / median['synchronous save']:.1%} of a synchronous save; "
          f"forward and backward meanwhile take {slower:.3f} s longer")  # fmt: skip


if __name__ == "__main__":
    cli.run_cli(main)
