"""Checkpoints that are written at one partition and load at any other: see ``writing`` and ``reading``."""

from ds_dynmo.engine.checkpoint.applying import LoadOptions
from ds_dynmo.engine.checkpoint.initial_model import InitialModelSpec
from ds_dynmo.engine.checkpoint.reading import load
from ds_dynmo.engine.checkpoint.writing import save

__all__ = ["InitialModelSpec", "LoadOptions", "load", "save"]
