"""Run a batch: instructions, the frozen prefix, each layer's own random streams, compiled layers."""
