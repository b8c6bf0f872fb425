"""How long a checkpoint stalls training, against a synchronous save, and how long resuming takes to load it.

    python -m bench.checkpoint gpt2-124m
    python -m bench.checkpoint gpt2-124m --sequence-length 1024 --micro-batch-size 16      # on a GPU
    torchrun --standalone --nproc_per_node=2 -m bench.checkpoint llmc-124m                 # ZeRO-1: gathering its state

Both ways of saving write the same content with fsync, into a folder under --dir. Training stalls until `save` returns,
when the copy is in host memory; a thread then writes it while training continues. The output also says how much longer
a step takes during the write: on a CPU, step and write share the cores. Medians over --rounds.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import tyro

from bench import turns
from model import GPT
from system import cli, distributed
from system.distributed import Runtime
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


def build_train_step(args: Args, rt: Runtime) -> TrainStep:
    """The preset's network and optimizers, uncompiled, with one micro-batch a step."""
    B, T = args.micro_batch_size, args.sequence_length
    # One micro-batch per rank and step.
    batch_settings = {"sequence_length": T, "micro_batch_size": B, "total_batch_size": B * T * rt.world_size}
    cfg = replace(PRESETS[args.preset], compile=False, **batch_settings)
    model = GPT(cfg.model)
    # As the preset trains: recomputing changes how long a step takes.
    model.recompute = cfg.recompute
    return TrainStep(cfg, rt, model.to(rt.device).train())


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    times: dict[str, list[float]] = {}

    def measure(name: str, work: Callable[[], object]) -> None:
        times.setdefault(name, []).append(turns.measure_seconds(work, rt))

    with distributed.session() as rt, tempfile.TemporaryDirectory(dir=args.dir) as out:
        # The step, a batch of random tokens, and the folder's writer and path.
        train_step = build_train_step(args, rt)
        cfg = train_step.cfg
        batch_shape = (1, args.micro_batch_size, args.sequence_length + 1)  # (micro_steps, B, T + 1)
        batch = torch.randint(cfg.model.vocab_size, batch_shape).to(torch.uint16)
        writer = checkpoint.CheckpointWriter(out, keep=1)
        path = checkpoint.model_path(out, 0)

        # What is measured.
        def run_step() -> None:
            train_step.compute_gradients(batch)
            train_step.update()

        def make_contents(step: int) -> tuple[dict, dict]:
            run = RunState(step, data_id="", step=step)
            train_state = {**run.state_dict(), **train_step.state_dict(), "config": cfg.to_dict()}
            return checkpoint.model_file(train_step.model, step), {"format": checkpoint.FORMAT, **train_state}

        def save_synchronously() -> None:
            weights, train_state = make_contents(0)
            checkpoint.write(path, weights)
            checkpoint.write(checkpoint.optim_path(out, 0), train_state)

        def load() -> None:
            open_model(path).to(rt.device)
            train_step.load_state_dict(checkpoint.read_train_state(path))

        # Warm up.
        run_step()  # the first step is slower

        # On several ranks: collecting the optimizer state of all of them, which they all wait for.
        if rt.world_size > 1:
            for _ in range(args.rounds):
                measure("gather", train_step.state_dict)
            rounds = " ".join(f"{t:.2f}" for t in times["gather"])
            return cli.print0(f"{args.preset} on {rt.world_size} ranks: gathering its state takes {rounds} s")

        # On one: a synchronous save against one with the writer, and what a step takes with and without it.
        for step in range(1, args.rounds + 1):
            measure("synchronous save", save_synchronously)
            measure("load and restore", load)
            measure("a step", run_step)
            measure("save, until it returns: the stall", lambda: writer.save(step, *make_contents(step)))  # noqa: B023
            measure("a step while it is written", run_step)
            measure("the rest of the writing", writer.wait)
        # One checkpoint is left: the writer keeps the newest.
        gb = sum(p.stat().st_size for p in Path(out).glob("*.pt")) / 1e9

    # A table of the medians.
    medians = {name: median(values) for name, values in times.items()}
    print(f"{args.preset} on {turns.describe_machine(rt)}: {gb:.2f} GB per checkpoint")
    print("| what | seconds | of a synchronous save | all rounds |\n|---|---|---|---|")
    for name, seconds in medians.items():
        share = seconds / medians["synchronous save"]
        print(f"| {name} | {seconds:.3f} | {share:.0%} | {' '.join(f'{t:.2f}' for t in times[name])} |")


if __name__ == "__main__":
    cli.run_cli(main)
