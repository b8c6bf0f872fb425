"""Contenders that take turns, each in a process of its own, so that a slow minute of the machine affects all of them.

    runs = take_turns(partial(measure, args), ("ours", "nanogpt"), rounds=2)
    # {"ours": [{"ms": 12.3, ...}, {...}], "nanogpt": [{...}, {...}]}
    print_table("tokens/s", {"ours": [...]})

`measure(name)` is a function of a module. It runs in a new interpreter and returns a dict with "ms".
"""

import multiprocessing
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from typing import Any

from system.cli import require


def run_apart(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args) in a new process, with its result, or its exception."""
    # Not forked: torch's threads and a peer's changes to torch end with the process.
    # What it prints goes to stderr: stdout is for the table.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=os.dup2, initargs=(2, 1)) as pool:
        return pool.submit(function, *args).result()


def take_turns(measure: Callable[[str], dict], names: tuple[str, ...], rounds: int) -> dict[str, list[dict]]:
    """Measure every contender once a round: {name: one dict a round}. A contender has a compile cache of its own, which
    is empty in the first round. One that fails is reported, and the others are measured. Raises UserError if none
    succeeds."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for round_number in range(1, rounds + 1):
            for i, name in enumerate(names):
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache}/{i}"
                try:
                    result = run_apart(measure, name)
                    results[name].append(result)
                    outcome = f"{result['ms']:,.1f} ms"
                except Exception as e:
                    outcome = f"failed: {type(e).__name__}: {e}"
                # stdout is for the table.
                print(f"round {round_number}, {name}: {outcome}", file=sys.stderr, flush=True)
    results = {name: runs for name, runs in results.items() if runs}
    require(results, "nothing was measured: every contender failed, for the reasons printed above")
    return results


def median_of(runs: list[dict], key: str = "ms") -> float:
    """The median over the rounds of a contender."""
    return statistics.median(run[key] for run in runs)


def print_table(columns: str, rows: dict[str, list[str]], note: str = "") -> None:
    """Print a Markdown table below its machine, date, commit and command, as bench/RESULTS.md has them.

    columns: their names, with " | " between them, without the first one's. rows: {name: cells}.
    """
    # torch was not imported here so far, because a child process begins with its parent's peak of memory.
    from system import machine

    versions = machine.versions()
    where = f"{machine.device_name(machine.choose_device())}, {os.cpu_count()} cores, torch {versions['torch']}"
    commit = versions.get("commit", "no commit")[:7]
    command = shlex.join(["python", "-m", "bench", *sys.argv[1:]])
    print(f"\n{date.today()}, {where}, commit {commit}: `{command}`{note and '; '}{note}\n")
    print(f"| | {columns} |\n|{'---|' * (columns.count('|') + 2)}")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
