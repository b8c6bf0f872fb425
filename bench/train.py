"""How fast is a training step beside nanoGPT's and build-nanogpt's, and how long does the first one take?

    python -m bench train quickstart -- --optimizer adamw --micro-batch-size 16
    python -m bench train gpt2-124m --only ours ours-recompute      # memory against time
    python -m bench train quickstart --only ours ../another-worktree            # two versions of this project

"ours" is train_gpt2.py, from its command to its end, without evaluations; a folder in its place is another checkout of
this project. "plain" is train_gpt2_plain.py, eager as it comes; "plain-compiled" adds --compile. All contenders train
the same network on as many tokens of the same data: one process, the preset's batch and dtype. Peers and the plain
trainer have AdamW, so a comparison with them needs --optimizer adamw and a --micro-batch-size for all, as above.
build-nanogpt runs without torch.compile, as it comes. The contenders take turns in separate processes. The table's
columns:

    tokens/s, step ms    medians over all timed steps, from one update to the next
    ours is              how many times as fast the first contender is
    first step s         from the start of the process to the first update, with the compile cache empty in the first
                         round and, if there are several, full in the last
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from bench import peers, turns
from system.cli import require

if TYPE_CHECKING:
    from training.config import TrainConfig

# What each contender of this project adds to the command line of train_gpt2.py.
OUR_FLAGS = {"ours": [], "ours-eager": ["--no-compile"], "ours-recompute": ["--recompute"]}
# train_gpt2_plain.py, and whether it is compiled.
PLAIN = {"plain": False, "plain-compiled": True}
# The peers, each with its file and whether it is compiled.
PEERS = {
    "nanogpt": ("nanogpt", "model.py", False),
    "nanogpt-compiled": ("nanogpt", "model.py", True),
    "build-nanogpt": ("build-nanogpt", "train_gpt2.py", False),
}
WARMUP_STEPS = 3  # the first compiles, the others warm up the caches


@dataclass(frozen=True)
class Args:
    preset: tyro.conf.Positional[str] = "quickstart"
    flags: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Of train_gpt2.py: those after --, for all contenders."""
    data_dir: Path = Path("data/stdlib")
    peers: Path = peers.DEFAULT_FOLDER
    """Folder with clones of the peers; those that are missing are fetched."""
    steps: int = 6
    """Timed steps per round."""
    rounds: int = 2
    only: tuple[str, ...] = ("ours", "plain-compiled", "plain", "nanogpt-compiled", "build-nanogpt")
    """Some of ours, ours-eager, ours-recompute, plain, plain-compiled, nanogpt, nanogpt-compiled, build-nanogpt, and
    folders."""


def words(args: Args) -> list[str]:
    """The command line of train_gpt2.py, for all contenders."""
    return [args.preset, "--data-dir", str(args.data_dir), *args.flags]


def parse_for_adamw(args: Args) -> "TrainConfig":
    """The settings of the run, for contenders with AdamW alone and without a search for the micro-batch."""
    from lifecycle.command_line import parse

    cfg = parse(words(args))[0]
    require(cfg.micro_batch_size != "auto", "plain and peers need a fixed micro-batch: -- --micro-batch-size 16")
    require(cfg.optimizer == "adamw", "plain and peers have AdamW: -- --optimizer adamw")
    return cfg


# ------------------------------------------------------------------------- one contender


def measure(args: Args, sources: dict[str, str], name: str) -> dict:
    """In a process of its own: run a contender for one round.

    Every contender is timed in one way: torch reports each step of its first optimizer.
    """
    started = time.time()
    from torch.optim.optimizer import register_optimizer_step_post_hook

    updates: list[tuple[int, float]] = []  # (which optimizer, when)
    register_optimizer_step_post_hook(lambda optimizer, *_: updates.append((id(optimizer), time.time())))

    steps = WARMUP_STEPS + args.steps
    if name in PEERS:
        facts = run_peer(args, name, sources[name], steps)
    elif name in PLAIN:
        facts = run_plain(args, name, steps)
    else:
        facts = run_ours(args, name, steps)

    times = [when for optimizer, when in updates if optimizer == updates[0][0]]
    step_ms = [1e3 * (b - a) for a, b in pairwise(times)][WARMUP_STEPS - 1 :]
    return {"ms": statistics.median(step_ms), "step_ms": step_ms, "first_s": times[0] - started, **facts}


def run_ours(args: Args, name: str, steps: int) -> dict:
    """train_gpt2.py with `steps` steps; `name` may be the folder of another checkout."""
    if name not in OUR_FLAGS:
        # Every module of this checkout but the bench itself, so that the other checkout's are imported.
        here = str(Path.cwd())
        for module, loaded in list(sys.modules.items()):
            is_ours = (getattr(loaded, "__file__", None) or "").startswith(here) and ".venv" not in loaded.__file__
            if is_ours and module.split(".")[0] not in ("bench", "__main__"):
                del sys.modules[module]
        os.chdir(name)
        sys.path.insert(0, str(Path.cwd()))
    import train_gpt2

    with tempfile.TemporaryDirectory() as out_dir:
        no_periods = "--val-every 0 --hellaswag-every 0 --sample-every 0 --save-every 0".split()
        flags = [*no_periods, *OUR_FLAGS.get(name, []), "--max-steps", str(steps), "--out-dir", out_dir]
        sys.argv = ["train_gpt2.py", *words(args), *flags]
        train_gpt2.main()
        return {"loss": last_loss(Path(out_dir)), "peak_gb": peak_gb()}


def last_loss(run: Path) -> float:
    """The training loss of the last step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train_loss"] for row in rows if "train_loss" in row][-1]


def run_plain(args: Args, name: str, steps: int) -> dict:
    """train_gpt2_plain.py with `steps` steps, and the settings that it shares with train_gpt2.py."""
    import torch

    import train_gpt2_plain
    from system import distributed, machine
    from system.distributed import Runtime

    cfg = parse_for_adamw(args)
    rt = distributed.choose_precision(Runtime(machine.choose_device(cfg.device), torch.float32), cfg.dtype)
    settings = {field.name: getattr(cfg, field.name) for field in fields(train_gpt2_plain.Config)}
    settings |= {"dtype": machine.dtype_name(rt.dtype), "compile": PLAIN[name]}
    settings |= {"max_steps": steps, "val_every": 0, "sample_every": 0}
    with tempfile.TemporaryDirectory() as out_dir:
        train_gpt2_plain.train(train_gpt2_plain.Config(**settings | {"out_dir": out_dir}))
        return {"loss": last_loss(Path(out_dir)), "peak_gb": peak_gb()}


def run_peer(args: Args, name: str, source: str, steps: int) -> dict:
    """A peer's model and optimizer, from its own code, at this run's shape and learning rate. The step is written as in
    the loops of both."""
    import torch

    from lifecycle import resume
    from system import distributed
    from tokens.loader import to_device

    cfg = parse_for_adamw(args)

    # The module with its GPT and GPTConfig, which @dataclass looks up; of build-nanogpt's script, the part above its
    # data and its loop.
    module = sys.modules["peer"] = type(sys)("peer")
    module.master_process = False
    source = source.partition("import tiktoken")[0].replace("from hellaswag import render_example", "# ")
    exec(compile(source, name, "exec"), module.__dict__)

    with distributed.session(cfg.device) as rt:
        rt = distributed.choose_precision(rt, cfg.dtype)
        torch.manual_seed(0)
        shape = {key: getattr(cfg.model, key) for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
        model = module.GPT(module.GPTConfig(**shape)).to(rt.device)
        betas = [(0.9, 0.95)] if name != "build-nanogpt" else []
        optimizer = model.configure_optimizers(0.1, cfg.max_lr, *betas, rt.device.type)
        forward = torch.compile(model) if PEERS[name][2] else model

        data, _ = resume.open_data(cfg)
        batches = data.batches(0, cfg.sequences_per_step, cfg.micro_batch_size, rt)
        for _ in range(steps):
            batch = next(batches)  # (micro_steps, B, T + 1)
            loss_sum = torch.zeros((), device=rt.device)
            for tokens in batch:
                x, y = to_device(tokens, rt.device)  # (B, T) each
                with rt.autocast():
                    _, loss = forward(x, y)
                (loss / len(batch)).backward()
                loss_sum += loss.detach() / len(batch)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            loss = loss_sum.item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {"loss": loss, "peak_gb": peak_gb()}


def peak_gb() -> float:
    """The peak memory of this process: of the GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # of getrusage: bytes on macOS, kilobytes elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


# ------------------------------------------------------------------------- all contenders


def main(argv: list[str]) -> None:
    end = argv.index("--") if "--" in argv else len(argv)
    args = tyro.cli(Args, args=argv[:end], description=__doc__, prog="python -m bench train")
    # Contenders may run in other folders.
    args = replace(args, flags=tuple(argv[end + 1 :]), data_dir=args.data_dir.resolve())
    for name in args.only:
        known = [*OUR_FLAGS, *PLAIN, *PEERS]
        is_known = name in known or Path(name, "train_gpt2.py").exists()
        require(is_known, f"{name} is none of {', '.join(known)}")
    sources = {name: peers.read(args.peers, *PEERS[name][:2]) for name in args.only if name in PEERS}
    run: Callable[[str], dict] = partial(measure, args, sources)
    results = turns.take_turns(run, args.only, args.rounds)

    from lifecycle.command_line import parse

    tokens = parse(words(args))[0].total_batch_size
    medians = {name: statistics.median(ms for run in runs for ms in run["step_ms"]) for name, runs in results.items()}
    first_ms = next(iter(medians.values()))
    rows = {}
    for name, runs in results.items():
        ms = medians[name]
        rows[name] = [
            f"{1e3 * tokens / ms:,.0f}",
            f"{ms / first_ms:.2f}x",
            f"{ms:,.1f}",
            f"{max(run['peak_gb'] for run in runs):.2f}",
            f"{runs[0]['first_s']:.1f}",
            f"{runs[-1]['first_s']:.1f}" if len(runs) > 1 else "",
            f"{runs[0]['loss']:.4f}",
        ]
    columns = "tokens/s | ours is | step ms | peak GB | first step s, cache empty | full | loss"
    turns.print_table(columns, rows, f"{tokens:,} tokens a step")
