"""Move layers between two batches, or find out whether they could be."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_dynmo.engine.migration.migrator import MigrationContext, Migrator
from ds_dynmo.engine.migration.packing import PackedLayer
from ds_dynmo.plan import MigrationPlan

__all__ = ["MigrationContext", "migrate", "packed_layer", "rehearse"]


def migrate(
    plan: MigrationPlan, context: MigrationContext, check: Callable[[MigrationPlan], None] | None = None
) -> int:
    """See :meth:`Migrator.migrate`."""
    return Migrator(context).migrate(plan, check)


def rehearse(plan: MigrationPlan, context: MigrationContext, *, copies: bool = False) -> None:
    """See :meth:`Migrator.rehearse`."""
    Migrator(context).rehearse(plan, copies=copies)


def packed_layer(context: MigrationContext, index: int, module: nn.Module) -> PackedLayer:
    """See :meth:`Migrator.pack`."""
    return Migrator(context).pack(index, module)
