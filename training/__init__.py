"""What a step is, and nothing else: its settings, forward pass, optimizers, rates and micro-batches."""
