"""Hash a tensor's content into 64 bits, on the tensor's device."""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["fingerprint"]

CHUNK = 2**18  # elements at a time: their products take 2 MiB
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIXERS = (-7046029254386353131, -4417276706812531889, -49064778989728563)  # odd, without a pattern


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the elements' bits, each times a weight of its place, modulo 2**64: int64 ``[]``.

    Equal contents share a fingerprint. Different ones do so about once in 2**64 times unless they were made to collide;
    where they differ in high bits alone, by multiples of a power of two, that power more often.
    """
    bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    weights = _weights(tensor.device)
    for chunk in bits.split(CHUNK):
        total = total * _MIXERS[2] + (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
    return total


@lru_cache(maxsize=2)
def _weights(device: torch.device) -> torch.Tensor:
    """Give an odd number for each place of a chunk."""
    weights = torch.arange(1, CHUNK + 1, dtype=torch.int64, device=device) * _MIXERS[0]
    weights = (weights ^ (weights >> 31)) * _MIXERS[1]
    return (weights ^ (weights >> 27)) | 1
