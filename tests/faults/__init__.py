"""Faults on purpose: kills, full disks, hostile files, a stand-in Hub that fails, a card without values."""
