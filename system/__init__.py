"""What a run stands on: how a script starts and ends, the machine, the ranks, the Hub."""
