"""The engine's part that carries out plans: :mod:`ds_dynmo.engine.migration.migrate` on this rank's stage."""

from __future__ import annotations

from collections.abc import Callable

from ds_dynmo.engine.migration.migrate import MigrationContext, migrate
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.plan import MigrationPlan


class StageMigrator:
    """Moves layers between the stages of one world.

    Args:
        names: of what layers refer to and do not own.
    """

    def __init__(self, stage: StageContext, names: References) -> None:
        self._stage, self._names = stage, names

    def context(self) -> MigrationContext:
        """Describe this rank's stage as it is now."""
        stage = self._stage
        return MigrationContext(
            stage.engine.stage_id,
            stage.layers,
            self._names,
            stage.state,
            stage.engine.grid,
            stage.engine.device,
            stage.comm,
            check=stage.optimizer.check,
            rebuilt=stage.optimizer.name_parameters,
        )

    def migrate(self, plan: MigrationPlan, check: Callable[[MigrationPlan], None] | None = None) -> int:
        """Carry out ``plan``; the bytes that moved. Collective. See :func:`migrate`."""
        return migrate(plan, self.context(), check)
