"""Run a batch: instructions, the frozen prefix, and each layer's own random streams."""
