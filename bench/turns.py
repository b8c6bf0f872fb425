"""Measuring several contenders fairly: each in a process of its own, taking turns, so that a slow minute of the machine
affects all of them.

    runs = turns.measure_in_turns("bench.head", ("plain", "ours"), rounds=2)
    # {"plain": [{"ms": 12.3, ...}, {...}], "ours": [{...}, {...}]}

The modules of bench/ call this. Each calls `measure_in_turns` with its own module name; the module is then started
again with --child NAME, once for each contender and round, and prints a JSON object as its last line:

    python -m bench.head ----> python -m bench.head --child plain    {"ms": 12.3, ...}    round 1
                         ----> python -m bench.head --child ours     {"ms": 10.1, ...}
                         ----> python -m bench.head --child plain    {"ms": 12.2, ...}    round 2
                         ----> ...

The other functions are for the child.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from system import machine
from system.cli import require
from system.distributed import Runtime
from system.machine import dtype_name


def measure_in_turns(module: str, names: tuple[str, ...], rounds: int, *more: str) -> dict[str, list[dict[str, Any]]]:
    """Measure every contender once a round. Returns by name what each child printed, one dict a round.

    Children get this process's own arguments and, after them, `more`. What they print must have "ms", which is shown as
    progress. Each contender has its own compile cache, which is empty in the first round. One that fails is reported,
    and the others are measured. Raises UserError if none succeeds.
    """
    # Round by round, every contender in turn. The folder has a compile cache for each of them.
    results: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for round_number in range(1, rounds + 1):
            for i, name in enumerate(names):
                # Run the child. BENCH_BEGAN tells it when it was started: imports are part of its first step's time.
                command = [sys.executable, "-m", module, "--child", name, *sys.argv[1:], *more]
                variables = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/{i}", "BENCH_BEGAN": str(time.time())}
                child = subprocess.run(command, capture_output=True, text=True, env=os.environ | variables)

                # Keep its result, and report it.
                if child.returncode == 0:
                    result = json.loads(child.stdout.splitlines()[-1])
                    results[name].append(result)
                    outcome = f"{result['ms']:,.1f} ms"
                else:
                    outcome = f"failed: {child.stderr[-1500:]}"

                # Progress goes to stderr: stdout is for the table.
                print(f"round {round_number}, {name}: {outcome}", file=sys.stderr, flush=True)

    # The contenders that were measured at least once.
    results = {name: runs for name, runs in results.items() if runs}
    require(results, "nothing was measured: every contender failed, for the reasons printed above")
    return results


def seconds_since_command() -> float:
    """Seconds since the parent started this process."""
    return time.time() - float(os.environ["BENCH_BEGAN"])


def measure_seconds(work: Callable[[], object], rt: Runtime) -> float:
    """Seconds that `work` takes until the device has finished it."""
    # The device must be idle at both readings of the clock: CUDA calls return before their work is done.
    rt.synchronize()
    start_time = time.perf_counter()
    work()
    rt.synchronize()
    return time.perf_counter() - start_time


def describe_machine(rt: Runtime) -> str:
    """The machine, the precision and torch's version, for the line above a table."""
    return f"{machine.device_name(rt.device)}, {dtype_name(rt.dtype)}, torch {torch.__version__}"
