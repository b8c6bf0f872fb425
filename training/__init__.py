"""What a step is, and nothing else: settings, what depends on the step, data, loss, optimizers, gradients, update."""
