"""Layer freezing by Egeria's criterion: a block whose plasticity has stopped changing is frozen (paper, section 4).

Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing" (EuroSys 2023). Plasticity is
computed on a thread of the rank that holds the block while training goes on. Its result takes effect at a fixed step,
and only there does training wait for it, so that runs repeat.

Only the frontmost active block is watched, and its reference is made when all layers before it are frozen. Egeria runs
a whole reference model, whose earlier layers would here be on other stages. They are frozen, the same in the reference
as in training, so the block's reference gets the input that the block gets in training (Egeria also rounds the earlier
layers' weights; here the block's alone are rounded). The first block is the exception: the embedding before it learns
until they freeze together, and the block is judged by its own change, on what the embedding gives now.

Egeria bounds the slope itself. Plasticity has another scale in every model and block, so here the bound is a share of
the largest average that the block had since it was first watched.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.models.case import RunSizes
from ds_dynmo.models.freezing.config import EgeriaConfig
from ds_dynmo.models.freezing.frozen_prefix import FreezingCase
from ds_dynmo.models.freezing.plasticity import WatchedBlock, capture_first, watch
from ds_dynmo.models.layer_numbers import local_layers

__all__ = ["Egeria", "EgeriaController", "moving_averages", "slope"]


def moving_averages(values: Sequence[float], window: int) -> list[float]:
    """Average each value with the ``window - 1`` before it, as far as there are any.

    >>> moving_averages([1.0, 3.0, 5.0, 7.0], 2)
    [1.0, 2.0, 4.0, 6.0]
    """
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through two or more values, one apart.

    >>> slope([1.0, 3.0, 5.0])
    2.0
    """
    return statistics.linear_regression(range(len(values)), values).slope


class EgeriaController:
    """Decides how many leading blocks of the model are frozen.

    Every rank runs it on the same numbers. The frontmost active block is frozen once the moving average of its
    plasticity is flat: over a window the slope per evaluation is less than ``threshold`` of the largest average that
    it had. The last block is never frozen. All are active again when the learning rate has fallen by
    ``learning_rate_factor`` since the first of them was frozen; from then on the window is half as long.

    Attributes:
        frozen_blocks: from now on.
    """

    def __init__(self, config: EgeriaConfig, *, num_blocks: int) -> None:
        self._config = config
        self._num_blocks = num_blocks
        self._window = config.window
        self._history: list[float] = []  # of the frontmost active block
        self._frozen_at_rate: float | None = None
        self.frozen_blocks = 0

    def record(self, plasticity: float | None, learning_rate: float) -> None:
        """Record the frontmost active block's plasticity (None: nothing to compare), and freeze it if it is flat."""
        if plasticity is not None and math.isfinite(plasticity):
            self._history.append(plasticity)
        if self.frozen_blocks == self._num_blocks - 1 or not self._is_flat():
            return
        self.frozen_blocks, self._history = self.frozen_blocks + 1, []
        if self._frozen_at_rate is None:
            self._frozen_at_rate = learning_rate

    def _is_flat(self) -> bool:
        averages = moving_averages(self._history, self._window)
        if len(averages) < self._window:
            return False
        return abs(slope(averages[-self._window :])) < self._config.threshold * max(averages)

    def unfreezes(self, learning_rate: float) -> bool:
        """Make all blocks active again if the learning rate has fallen far enough; True if it has."""
        if self._frozen_at_rate is None or learning_rate > self._frozen_at_rate / self._config.learning_rate_factor:
            return False
        self.frozen_blocks, self._frozen_at_rate = 0, None
        self._window = max(2, self._window // 2)
        self._history = []
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "frozen_blocks": self.frozen_blocks,
            "window": self._window,
            "frozen_at_rate": self._frozen_at_rate,
            "history": list(self._history),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self.frozen_blocks, self._window = state["frozen_blocks"], state["window"]
        self._frozen_at_rate = state["frozen_at_rate"]
        self._history = list(state["history"])


@dataclass
class _Evaluation:
    """A plasticity that is recorded before step ``due``.

    Attributes:
        local: computed on this rank, None there if the block is elsewhere.
        mean: of all ranks, once it is known, in a tuple; None in it: no rank had anything to compare.
    """

    due: int
    local: Future[float | None] | None = None
    mean: tuple[float | None] | None = None


class Egeria(FreezingCase):
    """Connects an :class:`EgeriaController` to the engine, and measures for it.

    The frontmost active block is watched in one batch of every interval. Before its step it is compared with the
    reference that it has carried since the last interval, and gets a new one.
    """

    def __init__(self, config: EgeriaConfig, engine: Any, sizes: RunSizes) -> None:
        super().__init__(engine, sizes)
        self._interval = max(1, round(config.interval * sizes.total_steps))
        self._delay = min(self._interval, max(1, round(config.delay * sizes.total_steps)))
        self._start = round(config.start * sizes.total_steps)
        self._controller = EgeriaController(config, num_blocks=len(sizes.blocks))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="egeria")
        self._evaluation: _Evaluation | None = None
        self._watching: int | None = None  # the step in which a block is watched
        for _, block in self._blocks():
            block.register_forward_hook(capture_first)
        engine.before_step(self._measure)
        engine.before_release(self.state_dict)  # every rank knows the mean that is due later

    def _blocks(self) -> list[tuple[int, Any]]:
        """List this stage's blocks with their numbers, counted from 0."""
        layers = local_layers(self.engine.module)
        return [(layer - self._block_numbers.start, module) for layer, module in layers if layer in self._block_numbers]

    def before_batch(self, step: int) -> None:
        """Record an evaluation that is due, and watch the frontmost active block if it is time."""
        learning_rate = self.engine.get_lr()[0]
        if self._controller.unfreezes(learning_rate):
            self._evaluation = None
            for _, block in self._blocks():
                watch(block, False)
        if self._evaluation is not None and step >= self._evaluation.due:
            self._controller.record(self._mean_of(self._evaluation), learning_rate)
            self._evaluation = None
        blocks = self._controller.frozen_blocks
        self._freeze(self._block_numbers.start + blocks if blocks else 0)
        if step >= self._start and (step - self._start) % self._interval == 0:
            self._watching = step
            for block, module in self._blocks():
                watch(module, block == blocks)

    def _measure(self) -> None:
        """Start to compare the captured activations, on the thread; called before the optimizer's step."""
        if self._watching is None:
            return
        local: Future[float | None] = Future()
        try:
            frontmost = dict(self._blocks()).get(self._controller.frozen_blocks)
            watched = None if frontmost is None else WatchedBlock(frontmost)
            local = self._thread.submit(_plasticity, watched)
        except Exception as error:  # the other ranks learn of it when they ask for the mean
            local.set_exception(error)
        self._evaluation = _Evaluation(self._watching + self._delay, local)
        self._watching = None

    def _mean_of(self, evaluation: _Evaluation) -> float | None:
        """Wait for the plasticity on the block's replicas, and average it. Collective.

        Raises:
            RuntimeError: on every rank, if the comparison failed on one.
        """
        if evaluation.mean is None:
            assert evaluation.local is not None
            failure = evaluation.local.exception()
            found = None if failure is not None else evaluation.local.result()
            numbers = [0.0, 0.0, float(failure is not None)] if found is None else [found, 1.0, 0.0]
            total, count, failed = self.engine.sum_over_world(torch.tensor(numbers, dtype=torch.float64)).tolist()
            if failed:
                raise RuntimeError("freezing: the plasticity of a block could not be computed") from failure
            evaluation.mean = (total / count if count else None,)
        return evaluation.mean[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's state, and the evaluation that is due later."""
        evaluation = self._evaluation
        under_way = None if evaluation is None else {"due": evaluation.due, "plasticity": self._mean_of(evaluation)}
        return {**self._controller.state_dict(), "under_way": under_way}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned; a block holds its own reference."""
        self._loaded()
        self._controller.load_state_dict(state)
        under_way = state["under_way"]
        self._evaluation, self._watching = None, None
        if under_way is not None:
            self._evaluation = _Evaluation(under_way["due"], mean=(under_way["plasticity"],))


def _plasticity(watched: WatchedBlock | None) -> float | None:
    # As fp32 numbers, so that their fp64 sums over replicas are exact and the order of ranks does not matter.
    return float(torch.tensor(watched.plasticity())) if watched is not None and watched.comparable else None
