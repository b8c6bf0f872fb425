"""The benches that stand behind README and bench/RESULTS.md.

    python -m bench                         # this list
    python -m bench train --help            # what one measures, and its flags
    python -m bench train quickstart --data-dir data/stdlib
    python -m bench all > measured.md       # every command below; the tables go to stdout

Each table names its machine, date, commit and command. Run it from the project's root on a quiet machine. A machine
with a GPU is measured by bench/gpu.sh (`make gpu-report`).
"""

import importlib
import shlex
import subprocess
import sys

from system.cli import require, run_cli

STDLIB = "data/stdlib"
# The same tokens in the same order and the same rates for all contenders, so that their losses agree.
AS_PEERS = "--optimizer adamw --micro-batch-size 16 --no-shuffle --schedule cosine"
# {bench: (its question, the commands behind RESULTS.md)}
BENCHES = {
    "parity": (
        "Do the presets train step for step as the programs that they reproduce?",
        ["parity --data-dir data/fineweb-edu --plant rate decay target --plot log/parity.png"],
    ),
    "train": (
        "How fast is a training step beside other programs?",
        [
            f"train quickstart --data-dir {STDLIB} -- {AS_PEERS}",
            f"train quickstart --data-dir {STDLIB} -- {AS_PEERS} --dtype float32",
        ],
    ),
    "tokens": (
        "How fast is tokenizing?",
        ["tokens 'books-*.parquet'"],
    ),
    "generate": (
        "How fast are samples and HellaSwag?",
        ["generate"],
    ),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("", "-h", "--help"):
        print(__doc__)
        for question, commands in BENCHES.values():
            print(question, *(f"    python -m bench {command}" for command in commands), "", sep="\n")
        return
    if name == "all":
        for _, commands in BENCHES.values():
            for command in commands:
                print(f"python -m bench {command}", file=sys.stderr, flush=True)
                subprocess.run([sys.executable, "-m", "bench", *shlex.split(command)])
        return
    require(name in BENCHES, f"no bench {name!r}: {', '.join(BENCHES)} or all")

    importlib.import_module(f"bench.{name}").main(sys.argv[2:])


if __name__ == "__main__":
    run_cli(main)
