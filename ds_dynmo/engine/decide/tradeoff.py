"""What stands against a move: doubt about the costs that it is decided from, and its price. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ds_dynmo.partitioners import MoveCosts, PipelineModel
from ds_dynmo.placement import Placement

_STANDARD_ERRORS = 3.0  # of the measurement; a saving has to exceed them


class Objection(NamedTuple):
    """Why a saving is no reason to move.

    Attributes:
        missed_seconds: of the saving until the next decision, if it is certain but less than the price.
    """

    reason: str
    missed_seconds: float = 0.0


@dataclass(frozen=True)
class MoveTradeoff:
    """The costs that the gain of an automatic decision has to exceed.

    Attributes:
        move_costs: seconds and bytes of the moves so far.
        errors: per layer, the relative standard error of its cost, without the part that its stage's layers share.
        stage_errors: per layer, the part of the error that it shares with its stage.
        missed_seconds: sum of the gains that the latest decisions in a row rejected because of the move's cost.
    """

    move_costs: MoveCosts
    errors: tuple[float, ...]
    stage_errors: tuple[float, ...]
    missed_seconds: float = 0.0

    def objection(
        self, saved: float, batches: int, pipeline: PipelineModel, here: Placement, proposed: Placement
    ) -> Objection | None:
        """Return why a move from ``here`` to ``proposed`` is not worth it; None: it is.

        It is if it saves more than noise explains, and its savings until the next decision, plus the missed ones of
        earlier decisions, exceed its price. So a small gain that lasts is taken in the end, at no more than twice the
        least possible cost, however short the interval.

        Args:
            saved: predicted seconds of an iteration.
            batches: until the next decision.
            pipeline: the costs that this was predicted from, measured at ``here``, with the bytes of layers.
        """
        if not self._exceeds_noise(saved, pipeline, here, proposed):
            return Objection(f"would save {saved:.3g} s a batch, no more than noise may")
        moved = (layer for layer in range(here.num_layers) if here.stage_of(layer) != proposed.stage_of(layer))
        price = self.move_costs.seconds(sum(pipeline.layer_bytes[layer] for layer in moved))
        if saved * batches + self.missed_seconds <= price:
            reason = f"would save {saved:.3g} s in each of {batches} batches and cost {price:.3g} s"
            return Objection(reason, missed_seconds=saved * batches)
        return None

    def _exceeds_noise(self, saved: float, pipeline: PipelineModel, here: Placement, proposed: Placement) -> bool:
        """Return whether an iteration saves more than noise explains, whichever stage is then the slowest.

        Compares the slowest present stage with each new stage. The standard error of their difference has two parts:
        that of layers in only one of the two, and that of the stages on which these were measured.
        """
        seconds = pipeline.micro_batches * np.array(pipeline.layer_seconds)
        measured_on = np.array([here.stage_of(layer) for layer in range(len(seconds))])
        slowest = int(np.argmax(pipeline.stage_loads(here)))
        share = np.zeros(len(seconds))
        share[list(here.layers_of(slowest))] = 1.0 / pipeline.speeds[slowest]
        loads = pipeline.stage_loads(proposed)
        for stage, load in enumerate(loads):
            only_one = share.copy()
            only_one[list(proposed.layers_of(stage))] -= 1.0 / pipeline.speeds[stage]
            of_layers = only_one * seconds * self.errors
            of_stages = np.bincount(measured_on, only_one * seconds * self.stage_errors)
            gain = saved + pipeline.micro_batches * (max(loads) - load)
            if gain <= _STANDARD_ERRORS * math.hypot(*of_layers, *of_stages):
                return False
        return True
