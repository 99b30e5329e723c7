"""The seconds that the next move is expected to take, from those before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["MoveCosts"]

_MOVES = 16  # latest moves in the estimate


class MoveCosts:
    """An estimate of the cost of a move: fixed seconds, and seconds per byte. It depends only on the recorded moves."""

    def __init__(self, moves: Sequence[tuple[int, float]] = ()) -> None:
        self._moves = [(int(moved_bytes), float(seconds)) for moved_bytes, seconds in moves][-_MOVES:]

    def record(self, moved_bytes: int, seconds: float) -> None:
        """Add a move of ``moved_bytes`` that took ``seconds`` on the slowest rank."""
        self._moves = [*self._moves, (moved_bytes, seconds)][-_MOVES:]

    def seconds(self, moved_bytes: int) -> float:
        """Predict the seconds of a move; 0 before the first move.

        The prediction is a least-squares line without negative terms. If all moves had one size, a smaller move is
        predicted to take as long, and a larger one in proportion.

        >>> costs = MoveCosts([(100, 3.0), (300, 5.0)])
        >>> costs.seconds(200), MoveCosts([(100, 3.0)]).seconds(50), MoveCosts([(100, 3.0)]).seconds(200)
        (4.0, 3.0, 6.0)
        """
        if not self._moves:
            return 0.0
        mean_bytes = sum(size for size, _ in self._moves) / len(self._moves)
        mean_seconds = sum(seconds for _, seconds in self._moves) / len(self._moves)
        spread = sum((size - mean_bytes) * (size - mean_bytes) for size, _ in self._moves)
        if spread == 0:
            return mean_seconds * max(1.0, moved_bytes / mean_bytes if mean_bytes else 1.0)
        per_byte = sum((size - mean_bytes) * (seconds - mean_seconds) for size, seconds in self._moves) / spread
        per_byte = min(max(per_byte, 0.0), mean_seconds / mean_bytes)
        return mean_seconds + per_byte * (moved_bytes - mean_bytes)

    def state(self) -> list[Any]:
        """Return the state as plain values, the argument of the constructor."""
        return [list(move) for move in self._moves]
