"""A request of a rank to a checkpoint's optimizer files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ds_dynmo.engine.save.saved_files import SavedCheckpoint
from ds_dynmo.engine.state.keys import ParamKey

__all__ = ["Wanted"]


@dataclass(frozen=True)
class Wanted:
    """A request of a rank to a checkpoint's optimizer files.

    Attributes:
        parameters: those that the rank will have, with their shapes when they were saved.
        stage: the saved stage whose files have the options of parameter groups.
        num_groups: of parameter groups here.
        per_replica_groups: groups of parameters that differ between replicas.
        replica: this rank's, of ``replicas`` here, which want the same.
    """

    parameters: Mapping[ParamKey, Sequence[int]]
    stage: int
    num_groups: int
    per_replica_groups: frozenset[int]
    replica: int
    replicas: int

    def stages_of(self, saved: SavedCheckpoint) -> list[int]:
        """List the stages of a checkpoint that had parameters in the optimizer, after :attr:`stage`."""
        others = (number for number, of_stage in enumerate(saved.slice.stages) if of_stage.trained_groups)
        return [self.stage, *(number for number in others if number != self.stage)]
