"""Move layers between two batches, or find out whether they could be."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_dynmo.engine.migration.context import MigrationContext
from ds_dynmo.engine.migration.migrator import Migrator
from ds_dynmo.engine.migration.packing import PackedLayer
from ds_dynmo.plan import MigrationPlan

__all__ = ["MigrationContext", "migrate", "packed_layer", "rehearse"]


def migrate(
    plan: MigrationPlan, context: MigrationContext, check: Callable[[MigrationPlan], None] | None = None
) -> int:
    """Carry out ``plan``: see :meth:`Migrator.migrate`."""
    return Migrator(lambda: context).migrate(plan, check)


def rehearse(plan: MigrationPlan, context: MigrationContext, *, copies: bool = False) -> None:
    """Find out whether ``plan`` could be carried out: see :meth:`Migrator.rehearse`."""
    Migrator(lambda: context).rehearse(plan, copies=copies)


def packed_layer(context: MigrationContext, index: int, module: nn.Module) -> PackedLayer:
    """Pack a layer: see :meth:`MigrationContext.pack`."""
    return context.pack(index, module)
