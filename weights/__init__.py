"""Weights as files: checkpoints, other layouts, and the one door through which every model is opened."""
