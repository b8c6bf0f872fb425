"""How long a checkpoint stalls training, against a synchronous save, and how long resuming takes to load it.

    python -m bench.checkpoint gpt2-124m
    python -m bench.checkpoint gpt2-124m --sequence-length 1024 --micro-batch-size 16      # on a GPU
    torchrun --standalone --nproc_per_node=2 -m bench.checkpoint llmc-124m                 # ZeRO-1: gathering its state

Both write the same content with fsync, into a folder under --dir. Training stalls until `save` returns, when the
snapshot is in host memory; a thread then writes it while training goes on. How much longer a step takes meanwhile is
printed, too: on a CPU they share the cores. Medians over --rounds.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro

import train_gpt2
from bench import turns
from system import cli, distributed
from training import checkpoint
from training.open_model import open_model
from training.presets import PRESETS
from training.run_state import RunState
from training.step import TrainStep


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "gpt2-124m"
    sequence_length: int = 256
    micro_batch_size: int = 2
    rounds: int = 5
    dir: Path = Path(".")


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(turns.seconds(work, rt))

    with distributed.session() as rt, tempfile.TemporaryDirectory(dir=args.dir) as out:
        B, T = args.micro_batch_size, args.sequence_length
        cfg = replace(
            PRESETS[args.preset], sequence_length=T, micro_batch_size=B, total_batch_size=B * T * rt.world_size,
            compile=False,
        )  # fmt: skip
        step = TrainStep(cfg, rt, train_gpt2.make_model(cfg, rt))
        batch = torch.randint(cfg.model.vocab_size, (1, B, T + 1)).to(torch.uint16)
        writer, path = checkpoint.CheckpointWriter(out, keep=1), checkpoint.model_path(out, 0)

        def one_step() -> None:
            step.compute_gradients(batch)
            step.update()

        def content(n: int) -> tuple[dict, dict]:
            state = {**RunState(n, data_id="", step=n).state(), **step.state(), "config": cfg.to_dict()}
            return checkpoint.model_file(step.model, n), {"format": checkpoint.FORMAT, **state}

        def synchronous() -> None:
            weights, state = content(0)
            checkpoint.write(path, weights)
            checkpoint.write(checkpoint.optim_path(out, 0), state)

        def load() -> None:
            open_model(path).to(rt.device)
            step.restore(checkpoint.read_train_state(path))

        one_step()  # creates the moments
        if rt.world_size > 1:
            for _ in range(args.rounds):
                timed("gather", step.state)
            each = " ".join(f"{t:.2f}" for t in times["gather"])
            return cli.print0(f"{args.preset} on {rt.world_size} ranks: gathering its state takes {each} s")
        for i in range(1, args.rounds + 1):
            timed("synchronous save", synchronous)
            timed("load and restore", load)
            timed("a step", one_step)
            timed("save, until it returns: the stall", lambda: writer.save(i, *content(i)))  # noqa: B023
            timed("a step while it is written", one_step)
            timed("the rest of the writing", writer.wait)
        gb = sum(p.stat().st_size for p in Path(out).glob("*.pt")) / 1e9
    usual = {name: median(values) for name, values in times.items()}
    print(f"{args.preset} on {turns.where(rt)}: {gb:.2f} GB per checkpoint")
    print("| what | seconds | of a synchronous save | all rounds |\n|---|---|---|---|")
    for name, seconds in usual.items():
        share = seconds / usual["synchronous save"]
        print(f"| {name} | {seconds:.3f} | {share:.0%} | {' '.join(f'{t:.2f}' for t in times[name])} |")


if __name__ == "__main__":
    cli.run_cli(main)
