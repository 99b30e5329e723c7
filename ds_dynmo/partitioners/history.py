"""Estimates from all profiles and moves: smoothed layer costs with their errors, stage speeds, the cost of a move.

A cost that stays within the noise is averaged over the latest profiles. A cost that leaves this range, or a whole stage
that shifts, has changed: from then on only the new value counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ds_dynmo.partitioners.speeds import SpeedEvidence, relative_speeds
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile

__all__ = ["CostHistory", "MoveCosts"]

_WINDOW = 8  # profiles in an average of costs, and in the estimate of noise
_EVIDENCE = 32  # latest pieces of evidence for speeds
_NOISE_UNKNOWN = 0.05  # relative; used before two profiles can be compared, later one vote in the median
_NOISE_RANGE = (0.01, 0.1)  # the estimate stays within
_CHANGED = 4.0  # standard errors from a layer's average that are a change
_SHIFTED = 3.5  # likewise of a stage's layers together
_SIGNIFICANT_SHARE = 0.1  # of the largest layer's cost: smaller layers have other noise, and matter less
_SAME_LOAD = 0.02  # load signals that differ by less count as equal
_MOVES = 16  # latest ones, in the estimate of what a move costs


class CostHistory:
    """The history of layer costs. It observes every profile, in order."""

    def __init__(self) -> None:
        self._placement: Placement | None = None  # of the latest profile
        self._means: list[list[float]] = []  # per layer: forward and backward seconds on its stage, profiles in them
        self._loads: list[list[float | None]] = []  # per layer: trainable parameters, load signal
        self._noises: list[float] = []
        self._evidence: list[list[float]] = []

    @property
    def noise(self) -> float:
        """The relative standard deviation of one measurement of one layer."""
        least, most = _NOISE_RANGE
        return min(max(statistics.median([_NOISE_UNKNOWN, *self._noises]), least), most)

    @property
    def errors(self) -> tuple[float, ...]:
        """Per layer, the relative standard error of its smoothed cost."""
        noise = self.noise
        return tuple(noise / math.sqrt(count) for _, _, count in self._means)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """The relative speed of each stage; None without evidence that they differ."""
        if not self._evidence or self._placement is None:
            return None
        evidence = [SpeedEvidence(int(a), int(b), ratio, int(layers)) for a, b, ratio, layers in self._evidence]
        speeds = relative_speeds(evidence, self._placement.num_stages, self.noise)
        return speeds if max(speeds) > 1.05 * min(speeds) else None

    def forget(self) -> None:
        """Discard the costs, because the model says that its work changed. Noise and speeds are kept."""
        self._means = []

    def forget_stages(self) -> None:
        """Discard costs and speeds, because the stages are other ones. The noise is kept."""
        self._placement, self._means, self._evidence = None, [], []

    def observe(self, profile: Profile) -> None:
        """Add one profile."""
        old, new = self._placement, profile.placement
        if old is not None and old.num_stages == new.num_stages and len(self._means) == len(profile.layers):
            logs = self._logs(profile.layers)
            stayed = [layer for layer in logs if old.stage_of(layer) == new.stage_of(layer)]
            drift = statistics.median([logs[layer] for layer in stayed]) if len(stayed) > 2 else 0.0
            changed = self._shifted(logs, stayed, new)
            self._learn_noise([logs[layer] - drift for layer in stayed])
            self._learn_speeds({layer: logs[layer] - drift for layer in logs}, old, new)
            self._rescale(old, new)
            self._take(profile.layers, changed)
        else:
            self._means = [[cost.forward_seconds, cost.backward_seconds, 1] for cost in profile.layers]
        self._placement = new
        self._loads = [[cost.trainable_parameters, cost.load_signal] for cost in profile.layers]

    def smoothed(self, profile: Profile) -> Profile:
        """Return ``profile``, the one observed last, with smoothed costs."""
        layers = tuple(
            replace(cost, forward_seconds=forward, backward_seconds=backward)
            for cost, (forward, backward, _) in zip(profile.layers, self._means)
        )
        return replace(profile, layers=layers)

    def _logs(self, layers: Sequence[LayerCost]) -> dict[int, float]:
        """Compute log(new cost / known cost) of layers that are comparable: of the same load, and not tiny."""
        least = _SIGNIFICANT_SHARE * max(cost.seconds for cost in layers)
        logs = {}
        for layer, (cost, mean, (trainable, signal)) in enumerate(zip(layers, self._means, self._loads)):
            known = mean[0] + mean[1]
            same = trainable == cost.trainable_parameters and _close(signal, cost.load_signal)
            if same and known > 0 and cost.seconds > least:
                logs[layer] = math.log(cost.seconds / known)
        return logs

    def _shifted(self, logs: dict[int, float], stayed: Sequence[int], placement: Placement) -> set[int]:
        """Find all layers of stages that got faster or slower as a whole by more than noise."""
        if not self._noises:
            return set()
        shifted: set[int] = set()
        for stage in placement.stages:
            here = placement.layers_of(stage)
            own = [layer for layer in stayed if layer in here]
            if len(own) > 1:
                variance = sum(1 + 1 / self._means[layer][2] for layer in own) / len(own) ** 2
                if abs(statistics.fmean(logs[layer] for layer in own)) > _SHIFTED * self.noise * math.sqrt(variance):
                    shifted.update(here)
        return shifted

    def _learn_noise(self, residuals: Sequence[float]) -> None:
        if len(residuals) > 2:
            counts = [mean[2] for mean in self._means]
            one = 1.4826 * statistics.median(map(abs, residuals)) / math.sqrt(1 + 1 / statistics.median(counts))
            self._noises = [*self._noises, one][-_WINDOW:]

    def _learn_speeds(self, logs: dict[int, float], old: Placement, new: Placement) -> None:
        ways: dict[tuple[int, int], list[float]] = {}
        for layer, log in logs.items():
            source, destination = old.stage_of(layer), new.stage_of(layer)
            if source != destination:
                ways.setdefault((source, destination), []).append(log)
        for (source, destination), ratios in sorted(ways.items()):
            self._evidence.append([source, destination, statistics.median(ratios), len(ratios)])
        self._evidence = self._evidence[-_EVIDENCE:]

    def _rescale(self, old: Placement, new: Placement) -> None:
        """Convert the averages of layers that moved to the speed of their new stage."""
        speeds = self.speeds
        if speeds is not None:
            for layer, mean in enumerate(self._means):
                ratio = speeds[old.stage_of(layer)] / speeds[new.stage_of(layer)]
                mean[:2] = mean[0] * ratio, mean[1] * ratio

    def _take(self, layers: Sequence[LayerCost], changed: set[int]) -> None:
        noise = self.noise
        for layer, (cost, mean) in enumerate(zip(layers, self._means)):
            known, count = mean[0] + mean[1], mean[2]
            tolerance = _CHANGED * noise * math.sqrt(1 + 1 / count)
            same = known > 0 and cost.seconds > 0 and abs(math.log(cost.seconds / known)) <= tolerance
            if not same or layer in changed:
                mean[:] = cost.forward_seconds, cost.backward_seconds, 1
                continue
            count = min(count + 1, _WINDOW)
            mean[0] += (cost.forward_seconds - mean[0]) / count
            mean[1] += (cost.backward_seconds - mean[1]) / count
            mean[2] = count

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        values, placement = dict(vars(self)), self._placement
        del values["_placement"]
        values["_partition"] = [] if placement is None else list(placement.boundaries)
        if placement is not None and not placement.is_chain:
            values["_owners"] = list(placement.owners)
        return values

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        values = dict(state)
        boundaries, owners = values.pop("_partition"), values.pop("_owners", None)
        self._placement = Placement.of(boundaries, owners) if boundaries else None
        vars(self).update(values)


def _close(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) <= _SAME_LOAD)


class MoveCosts:
    """Learn the cost of moving layers: fixed seconds, and seconds per byte. It depends on the recorded moves alone."""

    def __init__(self, moves: Sequence[tuple[int, float]] = ()) -> None:
        self._moves = [(int(moved_bytes), float(seconds)) for moved_bytes, seconds in moves][-_MOVES:]

    def record(self, moved_bytes: int, seconds: float) -> None:
        """Add a move of ``moved_bytes`` that took ``seconds`` on the slowest rank."""
        self._moves = [*self._moves, (moved_bytes, seconds)][-_MOVES:]

    def seconds(self, moved_bytes: int) -> float:
        """Predict the seconds of a move; 0 before the first move.

        The prediction is a least-squares line without negative terms. After moves of one size only, a smaller move is
        expected to take as long, and a larger one in proportion.

        >>> costs = MoveCosts([(100, 3.0), (300, 5.0)])
        >>> costs.seconds(200), MoveCosts([(100, 3.0)]).seconds(50), MoveCosts([(100, 3.0)]).seconds(200)
        (4.0, 3.0, 6.0)
        """
        if not self._moves:
            return 0.0
        mean_bytes = sum(size for size, _ in self._moves) / len(self._moves)
        mean_seconds = sum(seconds for _, seconds in self._moves) / len(self._moves)
        spread = sum((size - mean_bytes) ** 2 for size, _ in self._moves)
        if spread == 0:
            return mean_seconds * max(1.0, moved_bytes / mean_bytes if mean_bytes else 1.0)
        per_byte = sum((size - mean_bytes) * (seconds - mean_seconds) for size, seconds in self._moves) / spread
        per_byte = min(max(per_byte, 0.0), mean_seconds / mean_bytes)
        return mean_seconds + per_byte * (moved_bytes - mean_bytes)

    def state(self) -> list[Any]:
        """Return the state as plain values, the argument of the constructor."""
        return [list(move) for move in self._moves]
