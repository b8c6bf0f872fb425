"""What a run stands on: how a script starts and ends, the machine, the ranks, the Hub.

Every script imports this package before any other: it names the command for what is missing, and prepares the
environment that torch reads.
"""

import os
from importlib.util import find_spec

try:
    import fcntl  # noqa: F401  # locks, which system/files.py needs
except ModuleNotFoundError:
    raise SystemExit("error: this program runs on Linux and Macs; on Windows, use it in WSL: wsl --install") from None

if not find_spec("torch"):
    raise SystemExit("error: this Python has no torch; run: . .venv/bin/activate (once, before that: make install)")

# Torch's CPU threads sleep while they wait for each other. Threads that spin instead are at best 1.7 times as fast for
# the short waits of sampling with GPT-2 124M on 2 idle cores, and no faster in training. As soon as another process
# wants a core, such as a browser or a second rank, they are several times slower in both. OpenMP reads this once, when
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
