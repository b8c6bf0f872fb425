"""How fast is this project beside the programs that it reproduces?

    python -m bench.speed train -- --data-dir data/stdlib       # a step of training, beside nanoGPT and build-nanogpt
    python -m bench.speed tokens 'books-*.parquet'              # fineweb.py, beside build-nanogpt's

The contenders take turns, each in a process of its own, so that a slow minute of the machine affects all of them. The
table's ratio is how many times as fast the first contender is. Run it from the project's root on a quiet machine. A
machine with a GPU is measured by bench/gpu.sh (`make gpu-report`).
"""

import glob
import hashlib
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench import programs
from bench.programs import print_table, run_apart
from system.errors import require
from system.process import run_cli
from system.settings import ArgumentParser

# ------------------------------------------------------------------------- training

# All contenders train the same network on the same tokens, in the same order, with AdamW at the same rates.
NETWORK = "quickstart --model.n-layer 4 --model.n-embd 128 --total-batch-size 4096 --micro-batch-size 16".split()
AS_PEERS = "--optimizer adamw --no-shuffle --schedule cosine".split()
NO_PERIODS = "--val-every 0 --hellaswag-every 0 --sample-every 0 --save-every 0".split()
WARMUP_STEPS = 3  # the first compiles, the others warm up the caches
TIMED_STEPS = 6
# The peers, each with its file.
PEER_FILES = {"nanogpt-compiled": ("nanogpt", "model.py"), "build-nanogpt": ("build-nanogpt", "train_gpt2.py")}


def train_command(args: Namespace) -> list[str]:
    """The command line of train_gpt2.py, for all contenders."""
    return [*NETWORK, *AS_PEERS, *args.flags]


def measure_training(args: Namespace, name: str) -> dict:
    """Milliseconds of each timed step, from one update to the next. torch reports the updates of every contender."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    started = time.time()
    updates: list[float] = []
    register_optimizer_step_post_hook(lambda *_: updates.append(time.time()))
    runners = {"ours": run_ours, "plain": run_plain, "plain-compiled": run_plain}
    loss = runners.get(name, run_peer)(args, name, WARMUP_STEPS + TIMED_STEPS)

    step_ms = [1e3 * (b - a) for a, b in pairwise(updates)][WARMUP_STEPS - 1 :]
    facts = {"first step s": updates[0] - started, "peak GB": peak_gb(), "loss": loss}
    return {"ms": statistics.median(step_ms), **facts}


def run_ours(args: Namespace, _name: str, steps: int) -> float:
    """train_gpt2.py; returns the last loss."""
    import train_gpt2

    with tempfile.TemporaryDirectory() as out:
        sys.argv = ["train_gpt2.py", *train_command(args), *NO_PERIODS, "--max-steps", str(steps), "--out-dir", out]
        train_gpt2.main()
        return last_loss(Path(out))


def run_plain(args: Namespace, name: str, steps: int) -> float:
    """train_gpt2_plain.py with the settings that it shares with train_gpt2.py."""
    import train_gpt2_plain
    from lifecycle.command_line import parse

    cfg, _, _ = parse(train_command(args))
    shared = {field.name for field in fields(train_gpt2_plain.Config)} & vars(cfg).keys()
    settings = {setting: getattr(cfg, setting) for setting in shared}
    settings |= {"dtype": choose_dtype(args), "compile": name == "plain-compiled", "max_steps": steps, "val_every": 0}
    with tempfile.TemporaryDirectory() as out:
        train_gpt2_plain.train(train_gpt2_plain.Config(**settings | {"out_dir": out}))
        return last_loss(Path(out))


def run_peer(args: Namespace, name: str, steps: int) -> float:
    """A peer's model and optimizer, from its own code, at this run's shape and rate. The step is written as in the
    loops of both."""
    import torch

    from lifecycle.command_line import parse
    from system import distributed
    from training.loader import Loader, to_device
    from training.schedule import at

    # The module with its GPT and GPTConfig; of build-nanogpt's script, the part above its data and its loop.
    source = programs.read(args.peers, *PEER_FILES[name])
    source = source.partition("import tiktoken")[0].replace("from hellaswag import render_example", "# ")
    module: Any = type(sys)("peer")
    sys.modules["peer"] = module  # where @dataclass looks
    module.master_process = False
    exec(compile(source, name, "exec"), module.__dict__)

    cfg, _, _ = parse(train_command(args))
    with distributed.session(cfg.device) as rt:
        rt = distributed.choose_precision(rt, choose_dtype(args))
        torch.manual_seed(0)
        shape = {key: getattr(cfg.model, key) for key in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")}
        model = module.GPT(module.GPTConfig(**shape)).to(rt.device)
        betas = [] if name == "build-nanogpt" else [(0.9, 0.95)]
        optimizer = model.configure_optimizers(0.1, cfg.max_lr, *betas, rt.device.type)
        forward = torch.compile(model) if name.endswith("compiled") else model

        data = Loader(cfg.data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, shuffle=False)
        counts = (at(step, cfg, steps).sequences for step in range(steps))
        batches = data.batches(0, counts, int(cfg.micro_batch_size), rt)
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
            last = loss_sum.item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return last


def choose_dtype(args: Namespace) -> str:
    """The precision that train_gpt2.py would take here, for all contenders."""
    import torch

    from lifecycle.command_line import parse
    from system import distributed, machine
    from system.distributed import Runtime

    cfg, _, _ = parse(train_command(args))
    rt = distributed.choose_precision(Runtime(machine.choose_device(cfg.device), torch.float32), cfg.dtype)
    return machine.dtype_name(rt.dtype)


def last_loss(run: Path) -> float:
    """The training loss of the last step of a run."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["train_loss"] for row in rows if "train_loss" in row][-1]


def peak_gb() -> float:
    """The peak memory of this process: of the GPU, where there is one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9  # Linux counts kilobytes


def bench_training(args: Namespace) -> None:
    from lifecycle.command_line import parse

    cfg, _, _ = parse(train_command(args))
    results = take_turns(partial(measure_training, args), args.only, args.rounds)
    rows = {}
    for name, runs in results.items():
        ms = median_of(runs)
        rows[name] = {"tokens/s": f"{1e3 * cfg.total_batch_size / ms:,.0f}", "ms": f"{ms:,.1f}"}
        rows[name] |= {key: f"{runs[-1][key]:.4g}" for key in ("peak GB", "first step s", "loss")}
    print_results(results, rows, f"{cfg.total_batch_size:,} tokens a step")


# ------------------------------------------------------------------------- tokenizing

# build-nanogpt's script reads these files instead of the Hub's, has a process for each core instead of one for two, and
# gets its vocabulary from this project's package instead of a download.
EDITS = {
    r'load_dataset\("HuggingFaceFW/fineweb-edu", name=remote_name,': 'load_dataset("parquet", data_files={files},',
    r"os\.cpu_count\(\)//2": "os.cpu_count()",
    r'tiktoken\.get_encoding\("gpt2"\)': "tokenizer.encoding()",
    r"import tiktoken": "from tokens import tokenizer",
    r"int\(1e8\)": "10_000_000",
}


def measure_tokens(args: Namespace, name: str) -> dict:
    """Time and memory of a whole command, and the hash of the tokens that it writes."""
    import numpy as np

    files = [os.path.abspath(file) for pattern in args.files for file in sorted(glob.glob(pattern))]
    require(files, f"no file {' '.join(args.files)}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "edu_fineweb10B")  # build-nanogpt's name
        command = ["fineweb.py", "--out", str(out), "--shard-size", "10000000", "--source", *files]
        if name == "build-nanogpt":
            source = programs.read(args.peers, name, "fineweb.py")
            for pattern, replacement in EDITS.items():
                source, count = re.subn(pattern, replacement.replace("{files}", repr(files)), source)
                require(count, f"build-nanogpt's fineweb.py has no {pattern!r}: is it another version?")
            script = Path(folder, "fineweb.py")
            script.write_text(source)
            command = [str(script)]

        # wait4 returns what the process and its children used.
        env = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HOME": folder, "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        process = subprocess.Popen([sys.executable, *command], env=env)
        _, status, usage = os.wait4(process.pid, 0)
        ms = 1e3 * (time.perf_counter() - start)
        require(status == 0, f"{name} failed")

        digest, tokens = hashlib.sha256(), 0
        for path in sorted(out.glob("*.npy"), key=lambda path: path.stem.split("_")[-1]):
            ids = np.load(path)
            tokens += len(ids)
            digest.update(ids)
    return {"ms": ms, "gb": usage.ru_maxrss * 1024 / 1e9, "tokens": tokens, "sha256": digest.hexdigest()}


def bench_tokens(args: Namespace) -> None:
    results = take_turns(partial(measure_tokens, args), args.only, args.rounds)
    hashes = {runs[0]["sha256"] for runs in results.values()}
    require(len(hashes) == 1, f"the tokens differ: {', '.join(results)}")
    rows = {}
    for name, runs in results.items():
        rate = runs[0]["tokens"] / median_of(runs) / 1e3
        gb = max(run["gb"] for run in runs)
        rows[name] = {"seconds": f"{median_of(runs) / 1e3:.2f}", "M tokens/s": f"{rate:.1f}", "peak GB": f"{gb:.2f}"}
    print_results(results, rows, f"{next(iter(results.values()))[0]['tokens']:,} tokens, the same in all rows")


# ------------------------------------------------------------------------- turns, and the table


def take_turns(measure: Callable[[str], dict], names: list[str], rounds: int) -> dict[str, list[dict]]:
    """Measure every contender once a round: {name: one dict a round}. A contender has a compile cache of its own. One
    that fails is reported, and the others are measured. Raises UserError if none succeeds."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for number in range(1, rounds + 1):
            for name in names:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{name}"
                try:
                    results[name].append(run_apart(measure, name))
                    outcome = f"{results[name][-1]['ms']:,.1f} ms"
                except Exception as e:
                    outcome = f"failed: {type(e).__name__}: {e}"
                print(f"round {number}, {name}: {outcome}", file=sys.stderr, flush=True)
    results = {name: runs for name, runs in results.items() if runs}
    require(results, "nothing was measured: every contender failed, for the reasons printed above")
    return results


def median_of(runs: list[dict]) -> float:
    return statistics.median(run["ms"] for run in runs)


def print_results(results: dict[str, list[dict]], rows: dict[str, dict[str, str]], note: str) -> None:
    """The table, with the ratio to the first contender."""
    first = median_of(next(iter(results.values())))
    for name, row in rows.items():
        row["ours is"] = f"{median_of(results[name]) / first:.2f}x"
    print_table(rows, note)


def main() -> None:
    parser = ArgumentParser(__doc__)
    benches = parser.add_subparsers(dest="what", required=True)

    def add(name: str, contenders: str, rounds: int, bench: Callable) -> ArgumentParser:
        one = benches.add_parser(name)
        one.add_argument("--only", nargs="+", default=contenders.split(), help="some of the contenders")
        one.add_argument("--rounds", type=int, default=rounds, help="turns of each")
        one.add_argument("--peers", type=Path, default=programs.DEFAULT_FOLDER, help="folder with clones of the peers")
        one.set_defaults(bench=bench)
        return one

    train = add("train", "ours plain-compiled plain nanogpt-compiled build-nanogpt", 2, bench_training)
    train.add_argument("flags", nargs="*", help="after --: flags of train_gpt2.py, for all contenders")

    tokens = add("tokens", "ours build-nanogpt", 3, bench_tokens)
    tokens.add_argument("files", nargs="+", help="parquet files with a column `text`, or patterns")

    args = parser.parse_args()
    args.bench(args)


if __name__ == "__main__":
    run_cli(main)
