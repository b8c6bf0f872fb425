"""How long a checkpoint stalls training, against a synchronous save, and how long resuming takes to load it.

    python -m bench.checkpoint gpt2-124m
    python -m bench.checkpoint gpt2-124m --sequence-length 1024 --micro-batch-size 16      # on a GPU
    torchrun --standalone --nproc_per_node=2 -m bench.checkpoint llmc-124m                 # ZeRO-1: gathering its state

A synchronous save writes both files of a checkpoint before training continues. CheckpointWriter.save copies their
content to host memory and returns; a thread then writes it while training continues:

    synchronous    step | write ............ | step
    the writer     step | copy | step | step | step
                               | write ............ |

Training stalls during "write" in the first case and during "copy" in the second. Both write the same content with
fsync, into a folder under --dir. The table also says how long a step takes during the write: on a CPU, step and write
share the cores. Medians over --rounds.
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
from training.metrics import RunState
from training.open_model import open_model
from training.presets import PRESETS
from training.step import TrainStep


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "gpt2-124m"
    sequence_length: int = 256
    micro_batch_size: int = 2
    rounds: int = 5
    dir: Path = Path(".")
    """Where to write the checkpoints: its disk is what is measured."""


def build_train_step(args: Args, rt: Runtime) -> TrainStep:
    """The preset's network and optimizers, uncompiled, with one micro-batch a step."""
    # The preset, with steps as small as possible: one micro-batch for each rank.
    B, T = args.micro_batch_size, args.sequence_length
    batch_settings = {"sequence_length": T, "micro_batch_size": B, "total_batch_size": B * T * rt.world_size}
    cfg = replace(PRESETS[args.preset], compile=False, **batch_settings)

    # The network as the preset trains it: recomputing activations changes how long a step takes.
    model = GPT(cfg.model)
    model.recompute = cfg.recompute
    return TrainStep(cfg, rt, model.to(rt.device).train())


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    times: dict[str, list[float]] = {}  # seconds in each round, by the name of what was measured

    def measure(name: str, work: Callable[[], object]) -> None:
        """Do `work` once, and note the seconds that it takes."""
        times.setdefault(name, []).append(turns.measure_seconds(work, rt))

    with distributed.session() as rt, tempfile.TemporaryDirectory(dir=args.dir) as out:
        # What there is to save: a model and its optimizers, which train on one batch of random tokens.
        train_step = build_train_step(args, rt)
        cfg = train_step.cfg
        batch_shape = (1, args.micro_batch_size, args.sequence_length + 1)  # (micro_steps, B, T + 1)
        batch = torch.randint(cfg.model.vocab_size, batch_shape).to(torch.uint16)

        # Where it is saved: the writer's files have the numbers of the rounds, those of the synchronous save have 0.
        writer = checkpoint.CheckpointWriter(out, keep=1)
        path = checkpoint.model_path(out, 0)

        # What is measured: a step, a synchronous save, and loading what that has saved.
        def run_step() -> None:
            train_step.compute_gradients(batch)
            train_step.update()

        def make_contents(step: int) -> tuple[dict, dict]:
            """The contents of both files of a checkpoint, model_*.pt and optim_*.pt, as train_gpt2.py saves them."""
            run = RunState(args.rounds, data_id="", step=step)
            train_state = {**run.state_dict(), **train_step.state_dict(), "config": cfg.to_dict()}
            return checkpoint.model_file(train_step.model, step), {"format": checkpoint.FORMAT, **train_state}

        def save_synchronously() -> None:
            weights, train_state = make_contents(0)
            checkpoint.write(path, weights)
            checkpoint.write(checkpoint.optim_path(out, 0), train_state)

        def load() -> None:
            open_model(path).to(rt.device)
            train_step.load_state_dict(checkpoint.read_train_state(path))

        # Warm up: the first step allocates memory and creates the state of the optimizers.
        run_step()

        # On several ranks, measure one thing only: how long all of them wait while rank 0 collects the optimizer state
        # that ZeRO-1 has spread over them.
        if rt.world_size > 1:
            for _ in range(args.rounds):
                measure("gather", train_step.state_dict)
            rounds = " ".join(f"{t:.2f}" for t in times["gather"])
            return cli.print0(f"{args.preset} on {rt.world_size} ranks: gathering its state takes {rounds} s")

        # On one rank: a synchronous save, a save by the writer, and a step with and without a write in the background.
        # (B023: the lambda below is called at once, before `step` changes.)
        for step in range(1, args.rounds + 1):
            measure("synchronous save", save_synchronously)
            measure("load and restore", load)
            measure("a step", run_step)
            measure("save, until it returns: the stall", lambda: writer.save(step, *make_contents(step)))  # noqa: B023
            measure("a step while it is written", run_step)
            measure("the rest of the writing", writer.wait)

        # The writer keeps only its newest checkpoint, so one is left in the folder.
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
