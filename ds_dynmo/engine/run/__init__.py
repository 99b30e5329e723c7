"""Run a batch: instructions, the frozen prefix, a random stream for each layer, compiled layers."""
