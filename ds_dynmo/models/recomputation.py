"""Tell a forward pass from its recomputation in the backward pass."""

from __future__ import annotations

from ds_dynmo.torch_private import backward_pass_number

__all__ = ["is_recomputing"]


def is_recomputing() -> bool:
    """Is this code run by a backward pass, as activation checkpointing does? Calls in one are not counted.

    Private in torch; it is what ``torch.utils.checkpoint`` itself asks (read in 2.13.0).
    """
    return backward_pass_number() != -1
