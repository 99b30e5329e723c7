"""What moving layers costs, learnt from the moves so far: fixed seconds, and seconds per byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["MoveCosts"]

_KEPT = 16  # latest moves


class MoveCosts:
    """A running estimate, the same on every rank that is told the same."""

    def __init__(self, moves: Sequence[tuple[int, float]] = ()) -> None:
        self._moves = [(int(moved_bytes), float(seconds)) for moved_bytes, seconds in moves][-_KEPT:]

    def record(self, moved_bytes: int, seconds: float) -> None:
        """A move of so many bytes took so long, on the slowest rank."""
        self._moves = [*self._moves, (moved_bytes, seconds)][-_KEPT:]

    def seconds(self, moved_bytes: int) -> float:
        """What a move is expected to take; 0 before the first.

        A least-squares line, neither of whose terms is negative. From moves of one size alone a smaller one is
        expected to take as long, a larger one in proportion.

        >>> costs = MoveCosts([(100, 3.0), (300, 5.0)])
        >>> costs.seconds(200), MoveCosts([(100, 3.0)]).seconds(50), MoveCosts([(100, 3.0)]).seconds(200)
        (4.0, 3.0, 6.0)
        """
        if not self._moves:
            return 0.0
        mean_bytes = sum(size for size, _ in self._moves) / len(self._moves)
        mean_seconds = sum(seconds for _, seconds in self._moves) / len(self._moves)
        spread = sum((size - mean_bytes) ** 2 for size, _ in self._moves)
        if spread == 0:
            return mean_seconds * max(1.0, moved_bytes / mean_bytes if mean_bytes else 1.0)
        per_byte = sum((size - mean_bytes) * (seconds - mean_seconds) for size, seconds in self._moves) / spread
        per_byte = min(max(per_byte, 0.0), mean_seconds / mean_bytes)
        return mean_seconds + per_byte * (moved_bytes - mean_bytes)

    def state(self) -> list[Any]:
        """Plain values from which to build another."""
        return [list(move) for move in self._moves]
