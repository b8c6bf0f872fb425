"""Does a preset train step for step as the program that it reproduces?

    python -m bench.parity                                  # all five programs, on data/fineweb-edu
    python -m bench.parity record8 --peers ~/clones         # one, from clones made elsewhere
    python -m bench.parity --plant rate decay target --plot log/parity.png

A "reference" is the training script of another project (bench/programs.py has its commit). Both sides make the same few
small steps on a CPU:

    reference's script --edits--> a small program --run--> its initial weights, curve A
                                        ^                            |
    tokens of --data-dir --> shards ----+                            |
                                        v                            v
    this project's preset and flags --> Loader and Trainer, from the same weights --> curve B

A curve has the loss and the gradient norm of every step. The script runs completely: its own model, data loader, loop,
clipping, optimizers and schedule; bench/programs.py has the edits that make it small and quiet. If both sides start
from the same weights, read the same tokens and do the same arithmetic, A and B differ by float32 rounding alone. Any
other difference grows from step to step: weights that decay by mistake, a rate that is 1% off.

A comparison proves something only if it can fail: --plant puts errors into this project's side, which must be found.
The bench exits with 1 if a curve differs or a planted error does not.
"""

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook

import training.step
from bench import programs
from bench.programs import REFERENCES, Reference, Size, print_table, run_apart
from lifecycle.build import build_trainer
from lifecycle.command_line import parse
from model import GPT
from system.distributed import Runtime
from system.errors import require
from system.process import run_cli
from system.settings import ArgumentParser
from tokens import shards
from training import muon
from training.loader import Loader, to_device
from training.schedule import at


class StepRecord(NamedTuple):
    """What is compared of a step."""

    loss: float  # mean over the step's tokens, in nats per token
    norm: float  # L2 norm of the gradients of all parameters, before clipping


Curve = list[StepRecord]
PlantedError = Literal["rate", "decay", "target"]

# ------------------------------------------------------------------------- data for both sides


def tokens_per_shard(size: Size, steps: int) -> int:
    """Tokens of each of the two train shards: half of the steps, and two tokens more than their sequences need. Without
    these two, some references would leave out the last sequence of a shard."""
    return steps // 2 * size.tokens + 2


def write_shards(data_dir: Path, folder: Path, size: Size, steps: int) -> None:
    """Write the tokens of `steps` steps into `folder`, in the places and formats where each reference looks for them.

    They are the first tokens of data_dir, modulo the vocabulary. Raises UserError if it has too few.
    """
    # Two train shards, so that the step from one to the next is compared, too.
    n = tokens_per_shard(size, steps)
    tokens = np.concatenate([shards.read_shard(file.path) for file in shards.find_shards(data_dir, "train")])
    require(len(tokens) >= 2 * n, f"{data_dir} has only {len(tokens)} tokens; --steps {steps} takes {2 * n}")
    tokens = tokens[: 2 * n] % size.vocab_size
    for name in ("edu_fineweb10B", "data/fineweb10B", "data/openwebtext"):
        (folder / name).mkdir(parents=True)

    # build-nanogpt and this project read .npy, llm.c and modded-nanogpt .bin. The val shard only has to be there.
    for name, shard in {"val_000000": tokens[:n], "train_000001": tokens[:n], "train_000002": tokens[n:]}.items():
        shards.write_shard(folder / "edu_fineweb10B" / f"edufineweb_{name}.npy", shard)
        shards.write_shard(folder / "data" / "fineweb10B" / f"fineweb_{name}.bin", shard)

    # nanoGPT reads one file of bare token ids.
    tokens.tofile(folder / "data" / "openwebtext" / "train.bin")


# ------------------------------------------------------------------------- the reference's side


class AllStepsDone(Exception):
    """The reference has made its steps. Raised inside its loop, to leave it."""


def edit(reference: Reference, source: str, steps: int) -> str:
    """The reference's source after its edits. Raises UserError if one of them matches nothing."""
    for pattern, replacement in reference.edits.items():
        source, count = re.subn(pattern, replacement.replace("{steps}", str(steps)), source)
        require(count > 0, f"{reference.paths[-1]} has no {pattern!r}: is it another version?")
    return source


def run_reference(reference: Reference, program: str, folder: Path, steps: int) -> tuple[Curve, dict[str, np.ndarray]]:
    """In a process of its own: run the edited script in `folder`, which has its data. Returns its curve and the weights
    that it began with, under this project's names.

    Both are recorded from outside, through three functions that every script calls: F.cross_entropy for each
    micro-batch, clip_grad_norm_ once a step (if it clips), and Optimizer.step.
    """
    size = reference.size
    losses: list[float] = []  # the mean of each micro-batch
    norms: list[Tensor] = []
    curve: Curve = []
    initial: dict[str, Tensor] = {}
    optimizers: list[torch.optim.Optimizer] = []
    cross_entropy, clip = F.cross_entropy, nn.utils.clip_grad_norm_

    def record_loss(logits: Tensor, targets: Tensor, **settings: Any) -> Tensor:
        loss = cross_entropy(logits, targets, **settings)
        losses.append(loss.item())
        return loss

    def record_norm(*arguments: Any) -> Tensor:
        norms.append(clip(*arguments))
        return norms[-1]

    def record_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A script with several optimizers steps each of them; one record a step is enough.
        optimizers.append(optimizer)
        if optimizer is not optimizers[0]:
            return
        # Before the first update the weights are the initial ones.
        model = scope.get("raw_model") or scope["model"]
        if not initial:
            initial.update({name: w.detach().clone() for name, w in model.state_dict().items()})
        norm = norms[-1] if norms else nn.utils.get_total_norm([p.grad for p in model.parameters()])
        micro_steps = size.sequences // size.B
        curve.append(StepRecord(sum(losses[-micro_steps:]) / micro_steps, norm.item()))
        if len(curve) == steps:
            raise AllStepsDone

    F.cross_entropy, nn.utils.clip_grad_norm_ = record_loss, record_norm
    register_optimizer_step_pre_hook(record_step)

    # The surroundings that it expects: its folder, its file, which some copy into their log, and its arguments; a seed,
    # and a process group of one rank. Products stay in float32.
    os.chdir(folder)
    Path("program.py").write_text(program)
    sys.argv = ["program.py", *reference.argv.replace("{steps}", str(steps)).split()]
    torch.manual_seed(1337)
    torch.set_float32_matmul_precision = lambda precision: None
    if reference.needs_torchrun:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    # nanoGPT's edits take each sequence's place in the two shards from here.
    n = tokens_per_shard(size, steps)
    starts = [shard + start for shard in (0, n) for start in range(0, n - 2, size.T)]
    scope: dict[str, Any] = {"__name__": "__main__", "sequence_starts": cycle(starts)}
    with contextlib.redirect_stdout(None), warnings.catch_warnings(action="ignore"):
        with contextlib.suppress(AllStepsDone):
            exec(compile(program, "program.py", "exec"), scope)

    # Queries, keys and values that are three matrices there, (C, C) each, are one matrix (3C, C) here.
    parts: dict[str, list[Tensor]] = {}
    for name, tensor in initial.items():
        for pattern, replacement in reference.weight_names.items():
            name = re.sub(pattern, replacement, name)
        if name:
            parts.setdefault(name, []).append(tensor.float())
    return curve, {name: torch.cat(tensors).numpy() for name, tensors in parts.items()}


# ------------------------------------------------------------------------- this project's side


def run_ours(flags: str, folder: Path, state: dict[str, np.ndarray], plant: PlantedError | None) -> Curve:
    """In a process of its own: the curve of train_gpt2.py with these flags, from the weights `state`."""
    rt = Runtime(torch.device("cpu"), torch.float32)
    muon.NEWTON_SCHULZ_DTYPE = torch.float32  # bfloat16, as everywhere else, would not agree to rounding
    cfg = parse(flags.split())[0]
    torch.manual_seed(cfg.seed)
    model = GPT.from_state_dict(cfg.model, {name: torch.from_numpy(w.copy()) for name, w in state.items()})
    trainer = build_trainer(model, cfg, rt, cfg.max_steps)

    # The planted error.
    for group in [group for optimizer in trainer.optimizers for group in optimizer.param_groups]:
        if plant == "rate":
            group["peak_lr"] *= 1.01
        if plant == "decay":
            group["weight_decay"] = 0.1
    if plant == "target":
        training.step.to_device = copy_inputs

    # The same loop as train_gpt2.py's, without saving and evaluating.
    data = Loader(folder / "edu_fineweb10B", "train", cfg.sequence_length, cfg.model.vocab_size, shuffle=False)
    steps = [at(step, cfg, cfg.max_steps) for step in range(cfg.max_steps)]
    batches = data.batches(0, (now.sequences for now in steps), trainer.B, rt)
    curve: Curve = []
    for now in steps:
        trainer.set_step(now)
        loss, norm = trainer.compute_gradients(next(batches))
        curve.append(StepRecord(loss, norm))
        trainer.update()
        trainer.finish_step()
    return curve


def copy_inputs(tokens: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """training.loader.to_device with an error: the target of a token is the token itself, not the next one."""
    x, _ = to_device(tokens, device)  # (B, T)
    return x, x


# ------------------------------------------------------------------------- the comparison


class Comparison(NamedTuple):
    """Curves from the same weights on the same tokens."""

    expected: Curve  # the reference's
    curve: Curve  # this project's
    planted: dict[PlantedError, Curve]  # the same, with an error


def compare(
    reference: Reference, source: str, data_dir: Path, steps: int, plants: Sequence[PlantedError]
) -> Comparison:
    """Run both sides. Raises UserError if the reference is another version than the one that the edits are for."""
    size = reference.size
    require(steps >= 2 and steps % 2 == 0, f"--steps {steps} must be even: half of them are in each of two shards")
    program = edit(reference, source, steps)
    flags = (
        f"{reference.flags} --model.n-layer {size.n_layer} --model.n-embd {size.n_embd} --sequence-length {size.T} "
        f"--model.vocab-size {size.vocab_size} --total-batch-size {size.tokens} --micro-batch-size {size.B} "
        f"--max-steps {steps} --no-shuffle --no-compile --param-dtype float32"
    ).replace("{cooldown}", str(20 / steps))
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        write_shards(data_dir, folder, size, steps)
        expected, state = run_apart(run_reference, reference, program, folder, steps)
        curves = {plant: run_apart(run_ours, flags, folder, state, plant) for plant in (None, *plants)}
    return Comparison(expected, curves.pop(None), curves)


def differences(curve: Curve, expected: Curve) -> StepRecord:
    """The largest differences over all steps: in loss, and in norm relative to it."""
    ours, theirs = np.array(curve), np.array(expected)  # (steps, 2)
    apart = np.abs(ours - theirs)
    # numpy's max is NaN if a number is.
    return StepRecord(apart[:, 0].max(), (apart[:, 1] / theirs[:, 1]).max())


def is_same(curve: Curve, expected: Curve, limit: float) -> bool:
    """Whether the curves are the same up to rounding; not if one has a number that is not finite."""
    loss, norm = differences(curve, expected)
    return loss <= limit and norm <= 10 * limit


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("references", nargs="*", default=list(REFERENCES), help=f"some of {', '.join(REFERENCES)}")
    parser.add_argument("--data-dir", type=Path, default=Path("data/fineweb-edu"), help="shards of prose")
    parser.add_argument("--peers", type=Path, default=programs.DEFAULT_FOLDER, help="folder with clones of the peers")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--plant", nargs="+", choices=get_args(PlantedError), default=["rate"], help="must be found")
    parser.add_argument("--plot", type=Path, help="draw the largest differences in this file")
    args = parser.parse_args()

    comparisons: dict[str, Comparison] = {}
    rows: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for name in args.references:
        reference = REFERENCES[name]
        source = "\n".join(programs.read(args.peers, name, path) for path in reference.paths)
        comparisons[name] = found = compare(reference, source, args.data_dir, args.steps, args.plant)

        # Its row, and what is wrong with it.
        loss, norm = differences(found.curve, found.expected)
        planted = [f"{plant} {differences(curve, found.expected).loss:.1e}" for plant, curve in found.planted.items()]
        ends = f"{found.expected[0].loss:.3f} to {found.expected[-1].loss:.3f}"
        rows[name] = {
            "preset": reference.flags.split()[0],
            "loss": ends,
            "largest difference in loss": f"{loss:.1e}",
            "in norm, relative": f"{norm:.1e}",
            "limit of loss": f"{reference.limit:g}",
            "with a planted error": ", ".join(planted),
        }
        if not is_same(found.curve, found.expected, reference.limit):
            problems.append(f"{name} does not have the same curve")
        for plant, curve in found.planted.items():
            if is_same(curve, found.expected, reference.limit):
                problems.append(f"{name}: the planted error {plant} is not found")
        print(f"{name}: largest difference in loss {loss:.1e}", file=sys.stderr, flush=True)

    print_table(rows, f"{args.steps} steps")
    if args.plot:
        draw(comparisons, args.plot)
    require(not problems, "; ".join(problems))


# What the picture calls the programs, with what was adapted on both sides.
TITLES = {
    "nanogpt": "nanoGPT\n(no bias, exact GELU)",
    "llm.c": "llm.c's PyTorch script",
    "ddp-basemodel-train": "DDP-BASEMODEL-TRAIN\n(with GPT-2's network)",
    "record8": "modded-nanogpt's record 8\n(record8-124m, in float32)",
}
# How its legend calls the planted errors, and how it marks them.
PLANTED_LABELS: dict[PlantedError, tuple[str, str, str]] = {
    "rate": ("this project with a bug: a learning rate 1% too high", "s", "#c0392b"),
    "decay": ("this project with a bug: weight decay on every weight", "^", "#d68910"),
    "target": ("this project with a bug: each token as its own target", "D", "#7d3c98"),
}


def draw(comparisons: dict[str, Comparison], path: Path) -> None:
    """Draw a row a reference: the largest difference in loss of this project, and with each planted error."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 1.6 + 0.42 * len(comparisons)), layout="constrained")
    axes = figure.subplots()
    rows = range(len(comparisons))
    found = list(comparisons.values())
    steps = len(found[0].curve)

    # Losses that are equal have no place on a log scale.
    ours = [max(differences(f.curve, f.expected).loss, 1e-8) for f in found]
    axes.plot(ours, rows, "o", color="#08306b", ms=9, label="this project, unchanged")
    for plant in found[0].planted:
        label, marker, color = PLANTED_LABELS[plant]
        planted = [differences(f.planted[plant], f.expected).loss for f in found]
        axes.plot(planted, rows, marker, color=color, mfc="white", ms=7, label=label)

    axes.set_yticks(rows, [TITLES.get(name, name) for name in comparisons], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.9)  # the first on top
    axes.set_xscale("log")
    axes.set_xlim(1e-7, 20)
    axes.set_xlabel(f"largest difference from this project's loss in {steps} steps, small network (nats per token)")
    axes.set_title("Same weights, same text: equal losses, up to rounding; a bug would show", fontsize=11)
    axes.axvspan(1e-7, min(REFERENCES[name].limit for name in comparisons), color="#08306b", alpha=0.08, lw=0)
    axes.text(1.2e-7, -0.55, "rounding of float32", fontsize=9, color="#08306b")
    axes.grid(axis="x", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(fontsize=9, frameon=False, ncols=2, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)


if __name__ == "__main__":
    run_cli(main)
