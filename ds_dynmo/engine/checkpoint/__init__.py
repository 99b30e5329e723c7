"""Checkpoints that are written at one partition and load at any other: see ``writing`` and ``reading``."""

from ds_dynmo.engine.checkpoint.applying import What
from ds_dynmo.engine.checkpoint.origin import Origin
from ds_dynmo.engine.checkpoint.reading import load
from ds_dynmo.engine.checkpoint.writing import save

__all__ = ["Origin", "What", "load", "save"]
