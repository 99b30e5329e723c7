"""Orders and draws that are calculated, not looked up: a training run can go on from any position at once.

They depend on their key alone. Generators of torch or numpy take no part, so another version of these draws the same.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["Numbers", "Shuffle", "draw"]

Numbers = NDArray[np.int64]
Key = int | str

ROUNDS = 8  # fewer favour some orders of few numbers


def draw(count: int, positions: Numbers, *key: Key) -> Numbers:
    """Draw a number below ``count`` for each position, with replacement."""
    (first,) = _round_keys(1, key)
    return (_mix(_mix(positions.astype(np.uint64)) ^ first) % np.uint64(count)).astype(np.int64)


class Shuffle:
    """A permutation of the numbers below ``count``.

    A Feistel network permutes the numbers below the next power of 4. Results that are too large go through it again.
    """

    def __init__(self, count: int, *key: Key) -> None:
        self.count = count
        self._half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
        self._mask = np.uint64(2 ** int(self._half) - 1)
        self._keys = _round_keys(ROUNDS, key)

    def at(self, positions: Numbers) -> Numbers:
        """Return the numbers at ``positions``, each below ``count``."""
        numbers = self._permute(positions.astype(np.uint64))
        while (outside := numbers >= np.uint64(self.count)).any():
            numbers[outside] = self._permute(numbers[outside])
        return numbers.astype(np.int64)

    def _permute(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = numbers >> self._half, numbers & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return left << self._half | right


def _round_keys(rounds: int, key: tuple[Key, ...]) -> NDArray[np.uint64]:
    digest = hashlib.sha512(repr(key).encode()).digest()
    return np.frombuffer(digest, dtype="<u8", count=rounds).astype(np.uint64)


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each number over all 64 bits, by the finalizer of SplitMix64."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ numbers >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ numbers >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return numbers ^ numbers >> np.uint64(31)
