"""A run: its settings, steps, evaluations, metrics and checkpoints."""
