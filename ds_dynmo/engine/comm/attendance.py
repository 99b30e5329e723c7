"""Which ranks have come, counted in the store: a bit of a counter for each rank, not a key."""

from __future__ import annotations

import json
from datetime import timedelta

import torch.distributed as dist

from ds_dynmo.engine.comm.bounded import BoundedStore, NoAnswer

_RANKS_PER_COUNTER = 60  # a counter has 63 bits


class Attendance:
    """The ranks that have come to one point.

    A rank that comes adds its bit to a counter, and needs one more operation if it completes the counter. Who asks for
    missing ranks reads one counter for 60 ranks.

    Args:
        name: of the point; keys begin with it.
        num_ranks: that are to come, each once.
    """

    def __init__(self, store: BoundedStore, name: str, num_ranks: int) -> None:
        self._store, self._name, self._num_ranks = store, name, num_ranks
        self._num_blocks = -(-num_ranks // _RANKS_PER_COUNTER)

    def come(self, rank: int) -> bool:
        """Note that a rank has come; return whether it is the last of all."""
        block, place = divmod(rank, _RANKS_PER_COUNTER)
        ranks_here = min(_RANKS_PER_COUNTER, self._num_ranks - block * _RANKS_PER_COUNTER)
        if self._store.add(self._block(block), 1 << place) != (1 << ranks_here) - 1:
            return False
        return self._store.add(self._complete, 1) == self._num_blocks

    def missing(self) -> list[int]:
        """List the ranks that have not come."""
        come = [self._store.add(self._block(block), 0) for block in range(self._num_blocks)]
        places = (divmod(rank, _RANKS_PER_COUNTER) for rank in range(self._num_ranks))
        return [block * _RANKS_PER_COUNTER + place for block, place in places if not come[block] >> place & 1]

    def forget(self) -> None:
        """Delete the keys, once the last rank has come."""
        self._store.delete([self._complete, *map(self._block, range(self._num_blocks))])

    @property
    def _complete(self) -> str:
        return f"{self._name}/complete"

    def _block(self, number: int) -> str:
        return f"{self._name}/{number}"


def absent(store: BoundedStore, num_ranks: int, rank: int, timeout: timedelta) -> list[int]:
    """Wait until all ranks have called this. Return those that have not in time, the same on every rank. Collective.

    The last rank to come, or the first that gives up, writes who is absent, and all others go by that.

    Args:
        store: whose keys belong to this call.

    Raises:
        RuntimeError: the store does not answer.
    """
    attendance = Attendance(store, "ranks", num_ranks)
    if attendance.come(rank):
        store.set_first("absent", json.dumps([]))
    try:
        store.wait(["absent"], timeout)
    except (dist.DistNetworkError, NoAnswer):
        raise
    except RuntimeError:  # not in time
        store.set_first("absent", json.dumps(attendance.missing()))
    ranks: list[int] = json.loads(store.get("absent"))
    return ranks
