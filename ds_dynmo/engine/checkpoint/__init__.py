"""Checkpoints that are written at one partition and load at any other: see ``writing`` and ``reading``."""
