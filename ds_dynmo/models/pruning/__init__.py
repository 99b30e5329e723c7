"""Gradual global magnitude pruning: when and what is pruned, and linear layers that compute the rest only."""

from ds_dynmo.models.pruning.exporting import export

__all__ = ["export"]
