"""Models as files: checkpoints, other layouts, and open_model, through which every script opens a model."""
