"""The six load models (paper, section 2), with the settings of section 4.

"Published" is what the paper says. Other parameters are chosen to give the published imbalance of a *static* pipeline;
a docstring names these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist, fmean
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from simulation.phases import ITERATIONS, Phase

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LoadModel:
    """One dynamic model, by default in the setting of the paper's largest runs.

    Attributes:
        name: as in ``ds_configs``.
        interval: iterations between rebalances: 1 for MoE, MoD and sparse attention, 100s to 1000s else (section 4).
        layers, stages, replicas: of the paper's largest run.
        random: whether the loads depend on the seed.
    """

    name: str
    interval: int = 1
    layers: int = 48
    stages: int = 24
    replicas: int = 30
    random: ClassVar[bool] = True

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        """Return about ``count`` phases: consecutive iterations, or a run of 10,000 that changes that often."""
        raise NotImplementedError

    def turns(self, num_layers: int, count: int, size: int, *, seed: int = 0) -> list[list[Phase]]:
        """Return ``count`` turns of a benchmark whose loads change in each iteration: one before, and ``size``."""
        phases = self.phases(num_layers, 1 + count * size, seed=seed)
        return [phases[turn * size : (turn + 1) * size + 1] for turn in range(count)]

    def whole_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return where layers of the undivided model begin, and where the last one ends."""
        return tuple(range(num_layers + 1))

    def dense(self, num_layers: int) -> Phase:
        """Return the loads of the model that does all its work."""
        return Phase.of([1.0] * num_layers)


@dataclass(frozen=True)
class Fluctuating(LoadModel):
    """A load model that changes in every iteration about a level.

    Attributes:
        own_level: share of the variance that is between places, the same in all iterations and replicas.
        correlation: of the rest from one iteration to the next: an AR(1) process, of each replica by itself.
    """

    own_level: float = 0.5
    correlation: float = 0.5

    def fluctuations(self, shape: tuple[int, ...], count: int, *, seed: int, replica: int) -> Floats:
        """Draw standard normal numbers, ``[count, *shape]``."""
        level = np.random.default_rng((seed, 0)).standard_normal(shape)
        rng = np.random.default_rng((seed, 1, replica))
        deviation = rng.standard_normal(shape)
        series = []
        for _ in range(count):
            series.append(np.sqrt(self.own_level) * level + np.sqrt(1 - self.own_level) * deviation)
            change = np.sqrt(1 - self.correlation**2) * rng.standard_normal(shape)
            deviation = self.correlation * deviation + change
        return np.array(series)


@dataclass(frozen=True)
class MixtureOfExpertsLoad(Fluctuating):
    """L_j = sum over its experts of their tokens' work; with experts spread over replicas, the busiest expert counts.

    Published: Mixtral 8x7b, 32 layers, 8 experts, top 2; 16 stages x 8 replicas, so one expert per replica; a bubble
    ratio of 25% before and 8% after. ``popularity``, the spread of the routers' logits, gives the 25%.
    A share of 1 is a layer whose experts are equally busy.
    """

    name: str = "moe"
    layers: int = 32
    stages: int = 16
    replicas: int = 8
    experts: int = 8
    top_k: int = 2
    popularity: float = 0.24
    spread_of_layers: float = 0.5
    own_level: float = 0.8
    correlation: float = 0.9

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        # All replicas of a stage wait for the busiest one: the same loads for all.
        layer_levels = np.random.default_rng((seed, 2)).standard_normal((num_layers, 1))
        logit_std = self.popularity * np.exp(self.spread_of_layers * layer_levels)
        odds = np.exp(logit_std * self.fluctuations((num_layers, self.experts), count, seed=seed, replica=0))
        busiest_shares = (odds / odds.sum(axis=-1, keepdims=True)).max(axis=-1)
        # A token goes to an expert once: of all choices an expert gets 1 / top_k at most.
        return [Phase.of(self.experts * np.minimum(shares, 1 / self.top_k)) for shares in busiest_shares]


@dataclass(frozen=True)
class PruningLoad(LoadModel):
    """L_j = sum of p_i c_i, p_i the share of layer i's weights that global magnitude pruning leaves.

    Published: Zhu and Gupta's schedule from 3000 to 7000, every 1000 iterations, to 52, 79 and 90% (the formula says
    52.0, 78.8, 88.6 and 90.0); 24 stages x 30 replicas; almost five times the idleness of the dense model at 90%.
    Weights of a layer are normal; the layers' deviations differ by ``trend`` from first to last, in logarithms, and
    by ``scatter`` at random: chosen for a static bubble ratio near 70% at 90%. Balancing by parameters sees what is
    left of them, as in the paper.
    """

    name: str = "pruning"
    interval: int = 1000
    initial: float = 0.0
    final: float = 0.9
    start: int = 3000
    every: int = 1000
    times: int = 4
    trend: float = 0.8
    scatter: float = 0.2

    def sparsity(self, iteration: int) -> float:
        """Return S_t = S_f + (S_i - S_f) (1 - (t - t_0) / (n dt))^3, constant from one pruning to the next."""
        if iteration < self.start:
            return 0.0
        prunings = min((iteration - self.start) // self.every, self.times)
        return self.final + (self.initial - self.final) * (1 - prunings / self.times) ** 3

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        """Return five phases, whatever ``count`` is: at 0, 52.0, 78.8, 88.6 and 90.0%."""
        first, last = self.start + self.every, self.start + self.times * self.every
        steps = [0, *range(first, last + 1, self.every), ITERATIONS]
        return [self._phase(num_layers, begin, end - begin, seed) for begin, end in zip(steps, steps[1:])]

    def _phase(self, num_layers: int, iteration: int, iterations: int, seed: int) -> Phase:
        kept = retained(tuple(self.deviations(num_layers, seed).tolist()), 1 - self.sparsity(iteration))
        return replace(Phase.of(kept, iterations, trainable=kept), announced=True)

    def deviations(self, num_layers: int, seed: int) -> Floats:
        depth = (np.arange(num_layers) + 0.5) / num_layers
        scattered = np.random.default_rng((seed, 0)).standard_normal(num_layers)
        deviations: Floats = np.exp(self.trend * (depth - 0.5) + self.scatter * scattered)
        return deviations


@lru_cache(maxsize=256)  # all replicas ask the same
def retained(deviations: tuple[float, ...], kept: float) -> tuple[float, ...]:
    """Return each layer's share of weights that is left when global magnitude pruning keeps ``kept`` of all."""
    if kept >= 1:
        return (1.0,) * len(deviations)
    normal = NormalDist()

    def above(magnitude: float) -> list[float]:
        return [2 * (1 - normal.cdf(magnitude / deviation)) for deviation in deviations]

    low, high = 0.0, 10.0 * max(deviations)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if fmean(above(middle)) > kept else (low, middle)
    return tuple(above((low + high) / 2))


@dataclass(frozen=True)
class FreezingLoad(LoadModel):
    """L_j = sum of (1 - f_i) c_i: a frozen layer costs nothing (Egeria caches the outputs of the frozen prefix).

    Published: leading layers freeze first, as often as every 50 iterations; 24 stages x 30 replicas; a bubble ratio of
    about 40% for 40 layers. So ``frozen`` of the layers freeze, evenly between the iterations ``start`` and ``end``.
    ``forward_kept``: share of the forward pass that a frozen layer still does; 1 in an engine without such a cache.
    """

    random: ClassVar[bool] = False

    name: str = "freezing"
    interval: int = 50
    layers: int = 40
    start: int = 1000
    end: int = 6000
    frozen: float = 0.43
    forward_kept: float = 0.0

    def frozen_layers(self, num_layers: int, iteration: float) -> int:
        progress = (iteration - self.start) / (self.end - self.start)
        return round(num_layers * self.frozen * min(max(progress, 0.0), 1.0))

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        size = ITERATIONS // count
        counts = [self.frozen_layers(num_layers, size * (number + 0.5)) for number in range(count)]
        return [self._phase(num_layers, frozen, size) for frozen in counts]

    def _phase(self, num_layers: int, frozen: int, iterations: int) -> Phase:
        active = (0.0,) * frozen + (1.0,) * (num_layers - frozen)
        return Phase(
            iterations, tuple(max(share, self.forward_kept) for share in active), active, active, announced=True
        )


@dataclass(frozen=True)
class SparseAttentionLoad(Fluctuating):
    """L_j = sum of s_i c_i, s_i the density of layer i's attention.

    Published: hash-sparse flash attention, 24 stages x 30 replicas; four times the bubble ratio of dense attention;
    2.71 to 4.02 times the dense throughput, which takes a mean density of about 0.2. ``spread``, of its logarithm,
    gives a static bubble ratio of about 45%. Buckets are drawn anew in every pass: a low ``correlation``.
    ``attention``: its share of a layer's work; 1 is the paper's formula, its sizes (hidden 1024, 2048 tokens) make it
    4 s h / (24 h^2 + 4 s h) = 0.25.
    """

    name: str = "sparse_attention"
    density: float = 0.2
    least: float = 1 / 32
    spread: float = 0.3
    own_level: float = 0.7
    correlation: float = 0.5
    attention: float = 1.0

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        levels = self.fluctuations((num_layers,), count, seed=seed, replica=replica)
        density = np.clip(self.density * np.exp(self.spread * levels - self.spread**2 / 2), self.least, 1)
        return [Phase.of(1 - self.attention + self.attention * shares) for shares in density]


@dataclass(frozen=True)
class EarlyExitLoad(LoadModel):
    """C = sum of t_i / t c_i, t_i the tokens that have not left before layer i.

    Published: no token leaves before some layer, then the share falls with depth; 24 stages x 30 replicas; up to five
    times the bubble ratio; over 4, up to 4.52 times the throughput without exits, which takes a mean share of 0.22.
    So from ``first`` of the depth on the share falls as exp(-depth / decay), the decay shrinking through the run.
    """

    random: ClassVar[bool] = False

    name: str = "early_exit"
    interval: int = 100
    first: float = 0.125
    decay: tuple[float, float] = (0.16, 0.03)

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        depth = np.maximum(0.0, np.arange(num_layers) / num_layers - self.first)
        begin, end = self.decay
        decays = [begin + (end - begin) * (number + 0.5) / count for number in range(count)]
        return [Phase.of(np.exp(-depth / decay), ITERATIONS // count) for decay in decays]


@dataclass(frozen=True)
class MixtureOfDepthsLoad(Fluctuating):
    """C = r_i t_i c_i: every other block works on the tokens that its router chose.

    Published: capacity 12.5%, every other block (Raposo et al.); 16 stages x 8 replicas; a bubble ratio of 18% before
    and 4% after, from misestimation of who is among the top k. ``misestimation``, the spread of the logarithm of the
    tokens taken, gives the 18%.
    """

    name: str = "mod"
    layers: int = 32
    stages: int = 16
    replicas: int = 8
    capacity: float = 0.125
    every: int = 2
    misestimation: float = 0.45

    def phases(self, num_layers: int, count: int, *, seed: int = 0, replica: int = 0) -> list[Phase]:
        levels = self.fluctuations((num_layers,), count, seed=seed, replica=replica)
        taken = np.minimum(1.0, self.capacity * np.exp(self.misestimation * levels))
        routed = np.arange(num_layers) % self.every == self.every - 1
        return [Phase.of(np.where(routed, shares, 1.0)) for shares in taken]


LOAD_MODELS: Mapping[str, LoadModel] = {  # by case
    load_model.name: load_model
    for load_model in (
        MixtureOfExpertsLoad(),
        PruningLoad(),
        FreezingLoad(),
        SparseAttentionLoad(),
        EarlyExitLoad(),
        MixtureOfDepthsLoad(),
    )
}
