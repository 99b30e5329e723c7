"""Readers of optimizer state, and of checkpoints that others wrote."""
