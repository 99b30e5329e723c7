"""Let transformers initialize modules: what it draws, and whether it gave each tensor a value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ds_dynmo.errors import ConfigError
from ds_dynmo.models.seeding import generator_for

__all__ = ["check_set", "drawing_from", "unset"]


@contextmanager
def drawing_from(*key: int | str) -> Iterator[None]:
    """Draw from the generator of ``key`` meanwhile: transformers draws from torch's, whose state is put back."""
    state = torch.get_rng_state()
    torch.set_rng_state(generator_for(*key).get_state())
    try:
        yield
    finally:
        torch.set_rng_state(state)


def unset(tensors: Iterable[torch.Tensor]) -> None:
    """Mark what nobody has given a value: memory may hold numbers that look right."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.detach().fill_(math.nan)


def check_set(path: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that still have no value.

    Raises:
        ConfigError: naming the first one.
    """
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.isnan().any():
            raise ConfigError(f"{path}.{name}: transformers gives no value to it: only a file of weights could")
