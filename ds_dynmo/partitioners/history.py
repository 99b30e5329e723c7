"""Estimates from earlier profiles: smoothed costs and their errors, stage speeds.

A cost that stays within the noise is averaged over the latest profiles. If a cost leaves this range in two profiles in
a row, or a whole stage shifts, it has changed: the average starts again from the new value. One profile alone may be a
stall of the machine, unless the layer says that its load is another.

Noise has two parts. Each layer varies from one profile to the next. So does each stage as a whole, because its
processor shares a machine with other work. The second part averages out over profiles, but not over layers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ds_dynmo.partitioners.portable import exp, log
from ds_dynmo.partitioners.speeds import SpeedEvidence, evidence_of, relative_speeds
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile

__all__ = ["CostHistory"]

_WINDOW = 8  # profiles in an average of costs, and in the estimate of noise
_STAGE_WINDOW = 32  # profiles in the estimate of the noise of stages: rare bursts count too
_EVIDENCE = 32  # latest pieces of evidence for speeds
_NOISE_UNKNOWN = 0.05  # relative; the estimate before two profiles can be compared, later one value in the median
_NOISE_RANGE = (0.01, 0.1)  # limits of the estimate
_CHANGED = 4.0  # a layer has changed if it is so many standard errors from its average
_SHIFTED = 3.5  # likewise for all layers of a stage together
_NEAR = 8  # steps between profiles; after more, a shift of a stage counts at once
_LASTING = 3  # profiles in a row after which a shift of a stage counts
_LARGE = 1.0  # in logs: a larger shift counts at once
_SECONDS = ("forward_seconds", "backward_seconds", "input_gradient_seconds", "weight_gradient_seconds")
_SIGNIFICANT_SHARE = 0.1  # of the largest layer's cost: smaller layers have other noise, and matter less
_SAME_LOAD = 0.02  # largest difference of load signals that count as equal


class _Shift(NamedTuple):
    """The difference of a stage's layers, together, from their averages.

    Attributes:
        log: the mean of log(seconds now / average seconds).
        stage_part, layer_part: factors of the stage noise's and the layer noise's variance in that of ``log``.
    """

    log: float
    stage_part: float
    layer_part: float


class CostHistory:
    """The history of layer costs. It observes every profile, in order."""

    def __init__(self) -> None:
        self._placement: Placement | None = None  # of the latest profile
        self._step = 0  # of the latest profile
        self._means: list[list[float]] = []  # per layer: mean _seconds on its stage, and the number of profiles
        self._suspects: list[int] = []  # layers that left the range of noise in the latest profile
        self._loads: list[list[float | None]] = []  # per layer: trainable parameters, load signal
        self._noises: list[float] = []
        self._stage_variances: list[float] = []  # per profile, the mean over stages
        self._doubts: dict[int, list[float]] = {}  # per stage that may have changed: its variances, if it was noise
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
        return tuple(noise / math.sqrt(mean[-1]) for mean in self._means)

    @property
    def stage_noise(self) -> float:
        """The relative standard deviation of one measurement of a whole stage, without the noise of its layers.

        0 until two profiles of several stages can be compared.
        """
        return math.sqrt(max(0.0, statistics.fmean(self._stage_variances))) if self._stage_variances else 0.0

    @property
    def stage_errors(self) -> tuple[float, ...]:
        """Per layer, the part of the relative error of its smoothed cost that it shares with its stage."""
        noise = self.stage_noise
        return tuple(noise / math.sqrt(mean[-1]) for mean in self._means)

    @property
    def speeds(self) -> tuple[float, ...] | None:
        """The relative speed of each stage; None without evidence that they differ."""
        if not self._evidence or self._placement is None:
            return None
        evidence = [SpeedEvidence(int(a), int(b), ratio, int(layers)) for a, b, ratio, layers in self._evidence]
        speeds = relative_speeds(evidence, self._placement.num_stages, self.noise)
        return speeds if max(speeds) > 1.05 * min(speeds) else None

    def forget(self) -> None:
        """Discard the costs, because the model reports that its work changed. Keep noise and speeds."""
        self._means = []

    def forget_stages(self) -> None:
        """Discard costs and speeds, because the stages have changed. Keep the noise."""
        self._placement, self._means, self._evidence = None, [], []

    def observe(self, profile: Profile) -> None:
        """Add one profile."""
        old, new = self._placement, profile.placement
        if old is not None and old.num_stages == new.num_stages and len(self._means) == len(profile.layers):
            logs = self._logs(profile.layers)
            stayed = [layer for layer in logs if old.stage_of(layer) == new.stage_of(layer)]
            drift = statistics.median([logs[layer] for layer in stayed]) if len(stayed) > 2 else 0.0
            shifts = self._shifts(logs, stayed, new)
            level = statistics.fmean([shift.log for shift in shifts.values()]) if shifts else 0.0
            changed, doubtful = self._judge(shifts, level, profile.step - self._step)
            self._learn_noise([logs[layer] - drift for layer in stayed])
            self._learn_speeds({layer: logs[layer] - drift for layer in logs}, old, new)
            self._rescale(old, new, exp(level))
            self._take(
                profile.layers,
                changed={layer for stage in changed for layer in new.layers_of(stage)},
                doubtful={layer for layer in stayed if new.stage_of(layer) in doubtful},
            )
        else:
            self._means = [[*_seconds(cost), 1] for cost in profile.layers]
            self._doubts, self._suspects = {}, []
        self._placement, self._step = new, profile.step
        self._loads = [[cost.trainable_parameters, cost.load_signal] for cost in profile.layers]

    def smoothed(self, profile: Profile) -> Profile:
        """Return the latest profile with smoothed costs."""
        smoothed: list[dict[str, Any]] = [dict(zip(_SECONDS, mean)) for mean in self._means]
        layers = tuple(replace(cost, **seconds) for cost, seconds in zip(profile.layers, smoothed))
        return replace(profile, layers=layers)

    def _logs(self, layers: Sequence[LayerCost]) -> dict[int, float]:
        """Compute log(new cost / average cost) of comparable layers: those of the same load that are not tiny."""
        least = _SIGNIFICANT_SHARE * max(cost.seconds for cost in layers)
        logs = {}
        for layer, (cost, mean) in enumerate(zip(layers, self._means)):
            known = mean[0] + mean[1]
            if self._has_load_of(layer, cost) and known > 0 and cost.seconds > least:
                logs[layer] = log(cost.seconds / known)
        return logs

    def _has_load_of(self, layer: int, cost: LayerCost) -> bool:
        """Return whether the layer says that it had the load of ``cost`` in the profile before."""
        trainable, signal = self._loads[layer]
        return trainable == cost.trainable_parameters and _close(signal, cost.load_signal)

    def _shifts(self, logs: dict[int, float], stayed: Sequence[int], placement: Placement) -> dict[int, _Shift]:
        """Compare whole stages with their averages, if they have at least two comparable layers."""
        shifts = {}
        for stage in placement.stages:
            here = placement.layers_of(stage)
            layers = [layer for layer in stayed if layer in here]
            if len(layers) > 1:
                variances = [1 + 1 / self._means[layer][-1] for layer in layers]
                middle, most = statistics.median(logs[layer] for layer in layers), _CHANGED * self.noise
                # One layer alone is no shift of its stage.
                near = [min(max(logs[layer], middle - most), middle + most) for layer in layers]
                shift = statistics.fmean(near)
                shifts[stage] = _Shift(shift, statistics.fmean(variances), statistics.fmean(variances) / len(layers))
        return shifts

    def _judge(self, shifts: dict[int, _Shift], level: float, steps: int) -> tuple[set[int], set[int]]:
        """Find the stages that have changed as a whole, relative to the others, and those that may have.

        Between successive batches loads rarely change, but a machine is often busy with other work. So a shift counts
        if it is large or lasts for several profiles. Else it was noise.

        Args:
            level: mean shift of all stages, in logs.
            steps: training steps since the last profile.
        """
        if len(shifts) < 2:
            return set(), set()  # no stage to compare with
        changed, doubtful, noise = set(), set(), []
        others = 1 - 1 / len(shifts)  # share of the variance, as the level is a mean over these stages
        lasts = steps > _NEAR or any(abs(shift.log - level) > _LARGE * others for shift in shifts.values())
        for stage, (log_shift, stage_part, layer_part) in shifts.items():
            of_layers = self.noise * self.noise * layer_part
            shifted = (log_shift - level) * (log_shift - level) / others
            variance = (shifted - of_layers) / stage_part
            doubts = self._doubts.pop(stage, [])
            of_stage = self.stage_noise * self.stage_noise * stage_part
            if not self._noises or shifted <= _SHIFTED * _SHIFTED * (of_layers + of_stage):
                noise += [variance, *doubts]
            elif lasts or len(doubts) + 1 >= _LASTING:
                changed.add(stage)
            else:
                doubtful.add(stage)
                self._doubts[stage] = [*doubts, variance]
        if noise:
            self._stage_variances = [*self._stage_variances, sum(noise) / len(shifts)][-_STAGE_WINDOW:]
        return changed, doubtful

    def _learn_noise(self, residuals: Sequence[float]) -> None:
        if len(residuals) > 2:
            counts = [mean[-1] for mean in self._means]
            noise = 1.4826 * statistics.median(map(abs, residuals)) / math.sqrt(1 + 1 / statistics.median(counts))
            self._noises = [*self._noises, noise][-_WINDOW:]

    def _learn_speeds(self, logs: dict[int, float], old: Placement, new: Placement) -> None:
        self._evidence = [*self._evidence, *([*piece] for piece in evidence_of(logs, old, new))][-_EVIDENCE:]

    def _rescale(self, old: Placement, new: Placement, level: float) -> None:
        """Convert averages to the present level, and those of moved layers to the speed of their new stage."""
        speeds = self.speeds or (1.0,) * new.num_stages
        for layer, mean in enumerate(self._means):
            ratio = level * speeds[old.stage_of(layer)] / speeds[new.stage_of(layer)]
            mean[:-1] = [seconds * ratio for seconds in mean[:-1]]

    def _take(self, layers: Sequence[LayerCost], *, changed: set[int], doubtful: set[int]) -> None:
        noise = math.hypot(self.noise, self.stage_noise)
        suspects, self._suspects = self._suspects, []
        for layer, (cost, mean) in enumerate(zip(layers, self._means)):
            if layer in doubtful:
                continue
            known, count = mean[0] + mean[1], mean[-1]
            tolerance = _CHANGED * noise * math.sqrt(1 + 1 / count)
            same = known > 0 and cost.seconds > 0 and abs(log(cost.seconds / known)) <= tolerance
            if layer in changed or (not same and (layer in suspects or not self._has_load_of(layer, cost))):
                mean[:] = [*_seconds(cost), 1]
            elif not same:
                self._suspects.append(layer)
            else:
                count = min(count + 1, _WINDOW)
                mean[:] = [*(_averaged(old, new, count) for old, new in zip(mean, _seconds(cost))), count]

    def state(self) -> dict[str, Any]:
        """Return the state as plain values, for a checkpoint."""
        values, placement = dict(vars(self)), self._placement
        del values["_placement"]
        return {**values, **({"_partition": []} if placement is None else placement.as_record("_partition"))}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        values = dict(state)
        boundaries, owners = values.pop("_partition"), values.pop("_partition_owners", None)
        self._placement = Placement.of(boundaries, owners) if boundaries else None
        vars(self).update(values)
        self._doubts = {int(stage): variances for stage, variances in self._doubts.items()}  # JSON keys are strings


def _seconds(cost: LayerCost) -> list[float]:
    return [getattr(cost, name) for name in _SECONDS]


def _averaged(mean: float, seconds: float, count: float) -> float:
    """Return the mean of ``count`` values, the last of which is ``seconds``; 0: no pass was of this kind."""
    return mean + (seconds - mean) / count if mean and seconds else mean or seconds


def _close(a: float | None, b: float | None) -> bool:
    return a == b or (a is not None and b is not None and abs(a - b) <= _SAME_LOAD)
