"""A run: its settings, its steps, its evaluations, its record, its checkpoints."""
