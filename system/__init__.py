"""What a run stands on: how a script starts and ends, the machine, the ranks, the Hub."""

try:
    import fcntl  # noqa: F401  # locks, which system/files.py needs
except ModuleNotFoundError:
    raise SystemExit("error: this program runs on Linux and Macs; on Windows, use it in WSL: wsl --install") from None
