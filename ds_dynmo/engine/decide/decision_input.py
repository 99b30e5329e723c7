"""The input of a decision as one value. Equal inputs give equal decisions on every rank. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from ds_dynmo.config import DynMoConfig
from ds_dynmo.engine.decide.tradeoff import MoveTradeoff
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import LayerPasses, MemoryModel, PassModel, PipelineModel
from ds_dynmo.placement import Placement, Shape
from ds_dynmo.plan import LayerCost, Profile, limit_minus_workspace
from ds_dynmo.schedules import Schedule

_SEARCH_SHARE = 0.01  # of the seconds until the next decision that searches for orders may take
_SECONDS_PER_ACTION = 3e-6  # of a search, about; a constant, so that all ranks count alike


@dataclass(frozen=True)
class DecisionInput:
    """The input of a decision.

    Attributes:
        profile: costs, and the placement under which they were measured.
        placement: the present placement.
        config: the "dynmo" section.
        speeds: per stage; None: equal.
        groups: layers that are kept together; None: none are.
        limit_bytes: of a rank, its layers included; None: no limit.
        checkpoint_interval: layers per checkpointed segment; 0: no checkpointing.
        batches: until the next decision; None: unknown, and searches are not limited.
        tradeoff: costs that a gain has to exceed; None: the move's cost and the noise do not count.
        shapes: of placements that may be proposed; (): the present one's.
        weighs_shapes: whether other shapes are proposed; else only if no partition of the present one fits in memory.
        searches: whether schedules of ds_dynmo may be chosen.
        running_schedule: the schedule of ds_dynmo that runs now; None: DeepSpeed's 1F1B runs.
        running_over_bound: its iteration over the bound when it was searched; 0.0 if costs were not measured.
        back_to_back: whether the first stages start a batch before the last ones end the one before.
    """

    profile: Profile
    placement: Placement
    config: DynMoConfig = field(default_factory=DynMoConfig)
    speeds: tuple[float, ...] | None = None
    groups: LayerGroups | None = None
    limit_bytes: int | None = None
    checkpoint_interval: int = 0
    batches: int | None = None
    tradeoff: MoveTradeoff | None = None
    shapes: tuple[Shape, ...] = ()
    weighs_shapes: bool = True
    searches: bool = False
    running_schedule: Schedule | None = None
    running_over_bound: float = 0.0
    back_to_back: bool = False

    @classmethod
    def of(cls, profile: Profile, **values: Any) -> DecisionInput:
        """Build the input with the profile's placement as the present one."""
        return cls(profile, profile.placement, **values)

    @property
    def partition(self) -> tuple[int, ...]:
        """The boundaries of :attr:`placement`."""
        return self.placement.boundaries

    @cached_property
    def memory(self) -> MemoryModel | None:
        """The memory model; None without a limit."""
        return memory_model(self.profile, self.limit_bytes, self.checkpoint_interval)

    @cached_property
    def pipeline(self) -> PipelineModel:
        """The model of an iteration at the present placement, with the layers' seconds on a stage of speed 1."""
        return self._pipeline(has_pairs=self.placement.shape != "chain")

    def pipeline_at(self, placement: Placement) -> PipelineModel:
        """Return :attr:`pipeline`, or that of the other orders of passes where ``placement`` is of another shape."""
        has_pairs = placement.shape != "chain"
        return self.pipeline if has_pairs == (self.placement.shape != "chain") else self._pipeline(has_pairs=has_pairs)

    def _pipeline(self, *, has_pairs: bool) -> PipelineModel:
        """Build the model; only if stages have pairs of chunks, which 1F1B cannot run, are orders always searched."""
        layers = self.profile.layers
        under_1f1b = PipelineModel(
            self._scaled(cost.forward_seconds for cost in layers),
            self._scaled(cost.backward_seconds for cost in layers),
            self.profile.micro_batches,
            self.speeds or (1.0,) * self.placement.num_stages,
            tuple(cost.static_bytes for cost in layers),
            self.profile.link_seconds,
        )
        return replace(under_1f1b, passes=self._passes(under_1f1b)) if self.searches or has_pairs else under_1f1b

    def costs(self, balance_by: Literal["time", "parameters"]) -> list[float]:
        """Return costs per layer for a balancer without stage speeds: seconds are those on the present stage."""
        if balance_by != "time":
            return self.profile.costs(balance_by)
        speeds, here = self.pipeline.speeds, self.placement
        return [seconds / speeds[here.stage_of(layer)] for layer, seconds in enumerate(self.pipeline.layer_seconds)]

    def _scaled(self, seconds: Iterable[float]) -> tuple[float, ...]:
        """Convert the seconds of each layer to a stage of speed 1."""
        if self.speeds is None:
            return tuple(seconds)
        measured_at = self.profile.placement
        return tuple(value * self.speeds[measured_at.stage_of(layer)] for layer, value in enumerate(seconds))

    def _passes(self, under_1f1b: PipelineModel) -> PassModel:
        layers, schedule = self.profile.layers, self.config.schedule
        limit = None if self.limit_bytes is None else limit_minus_workspace(self.limit_bytes, layers)
        passes = LayerPasses(
            under_1f1b.forward_seconds,
            self._scaled(_first_part(cost) for cost in layers),
            self._scaled(cost.weight_gradient_seconds for cost in layers),
            under_1f1b.backward_seconds,
            tuple(cost.static_bytes for cost in layers),
            tuple(cost.activation_bytes for cost in layers),
            tuple(cost.input_bytes for cost in layers),
            tuple(cost.deferred_bytes for cost in layers),
            frozen_layers=next((index for index, cost in enumerate(layers) if cost.trainable_parameters), 0),
            checkpoint_interval=self.checkpoint_interval,
        )
        return PassModel(
            passes,
            self.profile.micro_batches,
            under_1f1b.speeds,
            self.profile.link_seconds,
            memory=schedule.memory,
            limit_bytes=limit,
            may_stay=schedule.kind == "auto",
            in_force=self.running_schedule,
            in_force_over_bound=self.running_over_bound,
            back_to_back=self.back_to_back,
            search_actions=self._search_actions(under_1f1b.work_seconds),
            min_gain=self.config.min_improvement if self.config.balance_by == "time" else 0.0,
        )

    def _search_actions(self, work_seconds: float) -> float:
        """Return the limit of actions that searches may simulate."""
        if self.batches is None:
            return math.inf
        return _SEARCH_SHARE * self.batches * work_seconds / _SECONDS_PER_ACTION


def memory_model(profile: Profile, limit_bytes: int | None, checkpoint_interval: int) -> MemoryModel | None:
    """Build the memory model of a profile's layers under a limit per rank; None without a limit.

    The largest workspace of any layer is reserved on every stage.
    """
    if limit_bytes is None:
        return None
    return MemoryModel(
        static_bytes=tuple(layer.static_bytes for layer in profile.layers),
        activation_bytes=tuple(layer.activation_bytes for layer in profile.layers),
        input_bytes=tuple(layer.input_bytes for layer in profile.layers),
        limits=(limit_minus_workspace(limit_bytes, profile.layers),) * profile.placement.num_stages,
        micro_batches=profile.micro_batches,
        checkpoint_interval=checkpoint_interval,
    )


def _first_part(cost: LayerCost) -> float:
    """Return the seconds of the first part; all of them if no backward pass of the layer was split."""
    measured = cost.input_gradient_seconds + cost.weight_gradient_seconds
    return cost.input_gradient_seconds if measured else cost.backward_seconds
