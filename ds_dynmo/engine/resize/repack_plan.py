"""Plans of re-packings: the stages that stay, and the moves that lead to a placement on them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_dynmo.partitioners import hosts
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan


@dataclass(frozen=True)
class RepackPlan:
    """The moves of layers to some of the stages.

    Attributes:
        staying: the stages with layers afterwards, in ascending order.
        migration: of layers, between the present stages.
    """

    staying: tuple[int, ...]
    migration: MigrationPlan

    @property
    def placement(self) -> Placement:
        """The placement afterwards, on the stages that stay."""
        return self.migration.new.without_empty_stages()


def plan_repack(old: Placement, new: Placement, layer_bytes: Sequence[int] | None = None) -> RepackPlan:
    """Plan the re-packing from ``old`` to ``new``, on fewer stages.

    Args:
        layer_bytes: per layer, the bytes that move with it; None: the same for all.
    """
    staying = hosts(old, new, layer_bytes or [1] * old.num_layers)
    return RepackPlan(staying, MigrationPlan.between(old, new.among(staying, old.num_stages)))
