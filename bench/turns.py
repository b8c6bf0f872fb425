"""Turns: contenders measured in processes of their own, which alternate so that a slow minute hits all of them."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch

from system import machine
from system.cli import require
from system.distributed import Runtime


def in_turns(module: str, names: tuple[str, ...], rounds: int, *more: str) -> dict[str, list[dict]]:
    """By name, the JSON objects that `python -m module --child NAME` printed last, one a round, with this process's own
    arguments and `more` after it. Each name has a compile cache of its own, empty in the first round. One that fails is
    reported, and the others are measured all the same. Raises UserError if none succeeds."""
    found: dict[str, list[dict]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(rounds):
            for i, name in enumerate(names):
                command = [sys.executable, "-m", module, "--child", name, *sys.argv[1:], *more]
                env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{cache}/{i}", "BENCH_BEGAN": str(time.time())}
                done = subprocess.run(command, capture_output=True, text=True, env=env)
                said = f"failed: {done.stderr[-1500:]}"
                if done.returncode == 0:
                    found[name].append(json.loads(done.stdout.splitlines()[-1]))
                    said = f"{found[name][-1]['ms']:,.1f} ms"
                print(f"round {turn + 1}, {name}: {said}", file=sys.stderr, flush=True)
    found = {name: runs for name, runs in found.items() if runs}
    require(found, "nothing was measured; what failed is above")
    return found


def since_command() -> float:
    """Seconds since the parent started this process."""
    return time.time() - float(os.environ["BENCH_BEGAN"])


def seconds(work: Callable[[], object], rt: Runtime) -> float:
    """How long `work` takes, until the device has done it."""
    rt.synchronize()
    began = time.perf_counter()
    work()
    rt.synchronize()
    return time.perf_counter() - began


def where(rt: Runtime) -> str:
    """The machine and the versions, for the first line of a table."""
    return f"{machine.device_name(rt.device)}, {str(rt.dtype).removeprefix('torch.')}, torch {torch.__version__}"
