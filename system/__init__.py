"""What a run stands on: how a script starts and ends, the machine, the ranks, the Hub.

Every script imports this package before any other: it names the command for what is missing.
"""

from importlib.util import find_spec

try:
    import fcntl  # noqa: F401  # locks, which system/files.py needs
except ModuleNotFoundError:
    raise SystemExit("error: this program runs on Linux and Macs; on Windows, use it in WSL: wsl --install") from None

if not find_spec("torch"):
    raise SystemExit("error: this Python has no torch; run: . .venv/bin/activate (once, before that: make install)")
