"""What re-packing needs of the engine's other parts."""

from __future__ import annotations

from typing import Any, Protocol

from ds_dynmo.engine.balancing.policy import CostModel
from ds_dynmo.engine.migration.migrate import MigrationContext
from ds_dynmo.placement import Placement
from ds_dynmo.plan import MigrationPlan, Profile, RebalanceReport


class Stateful(Protocol):
    """What a rank that comes back, or joins, has to load from the others."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any) -> Any: ...


class Balancer(Protocol):
    """Costs of layers, and where a decision about them left off.

    Attributes:
        cost_model: what was learnt of layers and stages.
    """

    cost_model: CostModel

    @property
    def profile(self) -> Profile | None:
        """Give the latest profile; None before the first and on a released rank."""
        ...

    def forget_profile(self) -> None:
        """Drop the profile: this rank has no layers any more."""
        ...

    def memory_limit_bytes(self) -> int | None:
        """Agree on the least limit of all ranks. Collective."""
        ...

    def train_until_profiled(self) -> float:
        """Train until there is a profile. Collective."""
        ...

    def check_room(self, plan: MigrationPlan) -> None:
        """Refuse a plan that takes a rank above the memory limit. Collective; MigrationError, harmless."""
        ...

    def move_to(self, partition: tuple[int, ...]) -> RebalanceReport:
        """Move layers to a partition of the present stages. Collective."""
        ...

    def stages_changed(self, placement: Placement) -> None:
        """Discard what was learnt of stages, and keep what was learnt of layers, which are at ``placement`` now."""
        ...


class Migrator(Protocol):
    """Moves layers between the stages of one world."""

    def context(self) -> MigrationContext:
        """Describe this rank's stage as it is now."""
        ...
