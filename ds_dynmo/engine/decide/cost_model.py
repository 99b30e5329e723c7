"""Remember what a run has learnt for its decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ds_dynmo import partitioners
from ds_dynmo.engine.decide.decision import Decision, moved_bytes
from ds_dynmo.engine.decide.decision_input import DecisionInput, MoveTradeoff
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import CostHistory, MoveCosts
from ds_dynmo.plan import MigrationPlan, Profile


@dataclass
class CostModel:
    """What a run has learnt about its layers, its stages and its moves. Checkpoints save it.

    Attributes:
        history: costs of layers, their noise and the speeds of stages.
        move_costs: seconds and bytes of the moves so far.
        first_seconds: of an iteration at the start of the run, simulated, with layers balanced; None: not profiled yet.
    """

    history: CostHistory = field(default_factory=CostHistory)
    move_costs: MoveCosts = field(default_factory=MoveCosts)
    first_seconds: float | None = None
    _moved_bytes: int | None = None  # of moves whose seconds come with the next profile
    _missed_seconds: float = 0.0

    def profiled(self, profile: Profile, move_seconds: float) -> None:
        """Learn from one more profile.

        Args:
            move_seconds: of the moves since the last profile, on the slowest rank.
        """
        self.history.observe(profile)
        if self._moved_bytes is not None and move_seconds > 0:
            self.move_costs.record(self._moved_bytes, move_seconds)
        self._moved_bytes = None

    def begin(self, given: DecisionInput) -> None:
        """Note what an iteration takes at the start of the run, under the better of two partitions.

        Args:
            given: what a decision from the first profile would be taken from, where no schedule of ours is in force.
        """
        profile = given.profile
        groups = given.groups or LayerGroups.single(len(profile.layers))
        balanced = partitioners.balanced_groups(profile.costs("time"), profile.placement.num_stages, groups)
        self.first_seconds = min(map(given.pipeline.iteration_seconds, (profile.partition, balanced)))

    def model_changed(self) -> None:
        """Discard the costs so far: layers cost something else from here on."""
        self.history.forget()
        self._missed_seconds = 0.0

    def stages_changed(self) -> None:
        """Discard the stage speeds: there are fewer or more stages than before."""
        self.history.forget_stages()
        self._moved_bytes, self._missed_seconds = None, 0.0

    def decided(self, decision: Decision) -> None:
        """Add what a decision missed to what those before it missed; a decision that missed nothing resets the sum."""
        self._missed_seconds = self._missed_seconds + decision.missed_seconds if decision.missed_seconds else 0.0

    def moved(self, profile: Profile, plan: MigrationPlan) -> None:
        """Note how many bytes a move took, by the sizes in ``profile``."""
        self._moved_bytes = (self._moved_bytes or 0) + moved_bytes(profile, plan)

    def tradeoff(self) -> MoveTradeoff:
        """Make what an automatic decision weighs a gain against."""
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
        self.first_seconds = state.get("first_seconds")
        self._moved_bytes = state["moved_bytes"]
        self._missed_seconds = state["missed_seconds"]
