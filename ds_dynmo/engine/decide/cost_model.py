"""Estimates from earlier profiles and moves, for decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision import Decision, moved_bytes
from ds_dynmo.engine.decide.decision_input import DecisionInput
from ds_dynmo.engine.decide.tradeoff import MoveTradeoff
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import CostHistory, MoveCosts
from ds_dynmo.plan import MigrationPlan, Profile


@dataclass
class CostModel:
    """Estimates of the costs of layers, stages and moves. Checkpoints save them.

    Attributes:
        history: costs of layers, their noise and the speeds of stages.
        move_costs: seconds and bytes of the moves so far.
        first_seconds: of a simulated, balanced iteration at the start of the run; None: not profiled yet.
    """

    history: CostHistory = field(default_factory=CostHistory)
    move_costs: MoveCosts = field(default_factory=MoveCosts)
    first_seconds: float | None = None
    _moved_bytes: int | None = None  # of moves whose seconds arrive with the next profile
    _missed_seconds: float = 0.0

    def profiled(self, profile: Profile, move_seconds: float) -> None:
        """Update the estimates with a profile.

        Args:
            move_seconds: of the moves since the last profile, on the slowest rank.
        """
        self.history.observe(profile)
        if self._moved_bytes is not None and move_seconds > 0:
            self.move_costs.record(self._moved_bytes, move_seconds)
        self._moved_bytes = None

    def begin(self, given: DecisionInput) -> None:
        """Record the seconds of an iteration at the start of the run, under the better of two partitions.

        Args:
            given: the input of a decision from the first profile, without a schedule of ds_dynmo in force.
        """
        profile = given.profile
        groups = given.groups or LayerGroups.single(len(profile.layers))
        here = profile.placement
        balanced = partitioners.balanced_groups(profile.costs("time"), here.num_stages, groups, owners=here.owners)
        self.first_seconds = min(map(given.pipeline.expected_seconds, (here, here.at(balanced))))

    def model_changed(self) -> None:
        """Discard the costs so far: those of layers have changed."""
        self.history.forget()
        self._missed_seconds = 0.0

    def stages_changed(self) -> None:
        """Discard the stage speeds: the number of stages has changed."""
        self.history.forget_stages()
        self._moved_bytes, self._missed_seconds = None, 0.0

    def decided(self, decision: Decision) -> None:
        """Add the gain that a decision missed to the sum of missed gains, or reset the sum if it missed none."""
        self._missed_seconds = self._missed_seconds + decision.missed_seconds if decision.missed_seconds else 0.0

    def moved(self, profile: Profile, plan: MigrationPlan) -> None:
        """Record the bytes of a move, by the sizes in ``profile``."""
        self._moved_bytes = (self._moved_bytes or 0) + moved_bytes(profile, plan)

    def tradeoff(self) -> MoveTradeoff:
        """Return the costs that the gain of an automatic decision has to exceed."""
        return MoveTradeoff(self.move_costs, self.history.errors, self.history.stage_errors, self._missed_seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "history": self.history.state(),
            "moves": self.move_costs.state(),
            "first_seconds": self.first_seconds,
            "moved_bytes": self._moved_bytes,
            "missed_seconds": self._missed_seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.history.load(state["history"])
        self.move_costs = MoveCosts(state["moves"])
        self.first_seconds = state["first_seconds"]
        self._moved_bytes = state["moved_bytes"]
        self._missed_seconds = state["missed_seconds"]
