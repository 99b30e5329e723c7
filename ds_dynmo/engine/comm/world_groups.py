"""Process groups that one world needs beside DeepSpeed's. They end with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from ds_dynmo.engine.comm.bounded import call_within_seconds
from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.comm.neighbour_links import NeighbourLinks


class WorldGroups:
    """The groups of tied layers, of this rank alone, and of neighbouring stages. Each is made once, when it is needed.

    Args:
        here: this rank's coordinates.
        rank_of: returns the rank that holds a stage.
        device: the engine's device.
        timeout_seconds: that making a group waits for the other ranks, and as long again.
    """

    def __init__(
        self, here: RankCoordinates, rank_of: Callable[[int], int], device: torch.device, timeout_seconds: float
    ) -> None:
        self._here, self._timeout_seconds = here, timeout_seconds
        self._tied: dict[tuple[int, ...], Any] = {}
        self._alone: Any = None
        self._neighbours = NeighbourLinks(here.stage, here.num_stages, rank_of, device, timeout_seconds)

    def adopt_tied(self, groups: Mapping[tuple[int, ...], Any]) -> None:
        """Use groups that DeepSpeed has made in this world, by their ranks; None: this rank is outside."""
        self._tied.update(groups)

    def prepare_tied(self, present: Iterable[tuple[int, ...]], needed: Sequence[tuple[int, ...]]) -> None:
        """Make the groups of ``needed`` ranks, and destroy those that are neither needed nor present.

        Collective over the world, between two batches.
        """
        unneeded = sorted(self._tied.keys() - set(present) - set(needed))
        if unneeded:
            get_accelerator().synchronize()  # nothing may be under way in them
        for ranks in unneeded:
            group = self._tied.pop(ranks)
            if self._here.rank in ranks:
                dist.destroy_process_group(group)
        for ranks in needed:
            self.tied(ranks)

    def tied(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of ``ranks``. Collective over the world, ranks outside included."""
        if ranks not in self._tied:
            self._tied[ranks] = call_within_seconds(
                2 * self._timeout_seconds, lambda: dist.new_group(ranks=list(ranks))
            )
        return self._tied[ranks]

    def alone(self) -> Any:
        """Return the group of this rank alone. Not collective."""
        if self._alone is None:
            self._alone = dist.new_group(ranks=[self._here.rank], use_local_synchronization=True)
        return self._alone

    def neighbours(self, *, loop: bool) -> NeighbourLinks:
        """Return the links between neighbouring stages, also around a ``loop``. Collective."""
        self._neighbours.connect(loop=loop)
        return self._neighbours
