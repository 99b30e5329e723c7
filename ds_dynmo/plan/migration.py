"""Which layers move, from where to where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_dynmo.errors import PartitionError
from ds_dynmo.placement import Placement

__all__ = ["LayerMove", "MigrationPlan"]


@dataclass(frozen=True)
class LayerMove:
    """A layer that changes stage, with the stage that owns it before and after."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True)
class MigrationPlan:
    """Every layer that changes stage between two placements.

    Raises:
        PartitionError: the placements differ in their number of layers or stages, or ``moves`` does not lead from one
            to the other.
    """

    old: Placement
    new: Placement
    moves: tuple[LayerMove, ...]

    @classmethod
    def between(cls, old: Placement | Sequence[int], new: Placement | Sequence[int]) -> MigrationPlan:
        """Plan the moves from ``old`` to ``new``.

        Args:
            old: a placement, or the boundaries of a chain.
            new: a placement, or boundaries for the owners of ``old``.
        """
        source = old if isinstance(old, Placement) else Placement.chain(old)
        target = new if isinstance(new, Placement) else source.at(new)
        return cls(source, target, tuple(_moves(source, target)))

    def __post_init__(self) -> None:
        old, new = self.old, self.new
        if (old.num_layers, old.num_stages) != (new.num_layers, new.num_stages):
            raise PartitionError(
                f"a plan from {old.num_layers} layers on {old.num_stages} stages cannot lead to {new.num_layers} on "
                f"{new.num_stages}"
            )
        if list(self.moves) != list(_moves(old, new)):
            raise PartitionError(f"moves {self.moves} do not lead from {old} to {new}")

    @property
    def leaving(self) -> tuple[int, ...]:
        """Stages that will have no layer."""
        return self.new.empty_stages


def _moves(old: Placement, new: Placement) -> Iterator[LayerMove]:
    for layer in range(old.num_layers):
        source, destination = old.stage_of(layer), new.stage_of(layer)
        if source != destination:
            yield LayerMove(layer, source, destination)
