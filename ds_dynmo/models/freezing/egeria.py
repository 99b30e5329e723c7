"""Layer freezing by Egeria's criterion: a block whose plasticity has stopped changing is frozen (paper, section 4).

Wang et al., "Egeria: Efficient DNN Training with Knowledge-Guided Layer Freezing" (EuroSys 2023). Plasticities are
computed on a thread of every rank while training goes on; their verdict takes effect at a fixed step, and only there
does training wait for it, so that runs repeat.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from ds_dynmo.models.case import DynamicCase
from ds_dynmo.models.freezing.plasticity import Watched, capture_first, watch
from ds_dynmo.models.freezing.prefix import EgeriaConfig, freeze_prefix
from ds_dynmo.models.local_layers import local_layers

__all__ = ["Egeria", "EgeriaController", "moving_averages", "slope"]

Plasticities = list[float | None]  # per block; None: nothing to compare


def moving_averages(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ``window - 1`` before it, as far as there are any.

    >>> moving_averages([1.0, 3.0, 5.0, 7.0], 2)
    [1.0, 2.0, 4.0, 6.0]
    """
    return [statistics.fmean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def slope(values: Sequence[float]) -> float:
    """Of the least-squares line through two or more values one apart.

    >>> slope([1.0, 3.0, 5.0])
    2.0
    """
    return statistics.linear_regression(range(len(values)), values).slope


class EgeriaController:
    """Decides how many blocks at the model's front are frozen.

    Every rank runs it on the same numbers. The frontmost active block is frozen once the moving average of its
    plasticity is flat: over a window the slope per evaluation is less than ``threshold`` of the largest average it
    ever had. The last block is never frozen. All are active again when the learning rate has fallen by
    ``learning_rate_factor`` since the first of them was frozen; from then on the window is half as long.

    Attributes:
        frozen_blocks: from now on.
    """

    def __init__(self, config: EgeriaConfig, *, num_blocks: int) -> None:
        self._config = config
        self._window = config.window
        self._history: list[list[float]] = [[] for _ in range(num_blocks)]
        self._frozen_at_rate: float | None = None
        self.frozen_blocks = 0

    def record(self, plasticities: Plasticities, learning_rate: float) -> None:
        """Takes the plasticity of each block and freezes a block if it is time."""
        for history, plasticity in zip(self._history, plasticities, strict=True):
            if plasticity is not None and math.isfinite(plasticity):
                history.append(plasticity)
        if self.frozen_blocks == len(self._history) - 1 or not self._is_flat(self._history[self.frozen_blocks]):
            return
        self.frozen_blocks += 1
        if self._frozen_at_rate is None:
            self._frozen_at_rate = learning_rate

    def _is_flat(self, history: Sequence[float]) -> bool:
        averages = moving_averages(history, self._window)
        if len(averages) < self._window:
            return False
        return abs(slope(averages[-self._window :])) < self._config.threshold * max(averages)

    def unfreezes(self, learning_rate: float) -> bool:
        """Has the learning rate fallen far enough? Then all blocks are active again."""
        if self._frozen_at_rate is None or learning_rate > self._frozen_at_rate / self._config.learning_rate_factor:
            return False
        self.frozen_blocks, self._frozen_at_rate = 0, None
        self._window = max(2, self._window // 2)
        self._history = [[] for _ in self._history]
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "frozen_blocks": self.frozen_blocks,
            "window": self._window,
            "frozen_at_rate": self._frozen_at_rate,
            "history": [list(values) for values in self._history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave."""
        self.frozen_blocks, self._window = state["frozen_blocks"], state["window"]
        self._frozen_at_rate = state["frozen_at_rate"]
        self._history = [list(values) for values in state["history"]]


@dataclass
class _Verdict:
    """Under way to step ``due``: this rank's share, and what all ranks together found once they have asked."""

    due: int
    mine: Future[dict[int, float]] | None = None
    agreed: Plasticities | None = None


class Egeria(DynamicCase):
    """Connects an :class:`EgeriaController` to the engine, and measures for it.

    Blocks are watched in one batch of every interval. Before its step each is compared with the reference that it has
    carried since the last interval, and gets a new one.
    """

    name = "freezing"

    def __init__(self, config: EgeriaConfig, engine: Any, *, blocks: range, total_steps: int) -> None:
        super().__init__(engine)
        self._numbers = blocks  # in the layer list
        self._interval = max(1, round(config.interval * total_steps))
        self._delay = min(self._interval, max(1, round(config.delay * total_steps)))
        self._start = round(config.start * total_steps)
        self._controller = EgeriaController(config, num_blocks=len(blocks))
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="egeria")
        self._verdict: _Verdict | None = None
        self._frozen: int | None = None  # layers that were loaded may be frozen or not
        self._watching: int | None = None  # the step in which blocks are watched
        for _, block in self._blocks():
            block.register_forward_hook(capture_first)
        engine.before_step(self._measure)

    def _blocks(self) -> list[tuple[int, Any]]:
        """The blocks of this stage by their numbers from 0."""
        layers = local_layers(self.engine.module)
        return [(layer - self._numbers.start, module) for layer, module in layers if layer in self._numbers]

    def before_batch(self, step: int) -> None:
        """Lets a verdict that is due take effect, and has blocks watched if it is time."""
        learning_rate = self.engine.get_lr()[0]
        if self._controller.unfreezes(learning_rate):
            self._verdict = None
            for _, block in self._blocks():
                watch(block, False)
        if self._verdict is not None and step >= self._verdict.due:
            self._controller.record(self._agree(self._verdict), learning_rate)
            self._verdict = None
        blocks = self._controller.frozen_blocks
        frozen = self._numbers.start + blocks if blocks else 0
        if frozen != self._frozen:
            freeze_prefix(self.engine, frozen)
            self._frozen = frozen
        if step >= self._start and (step - self._start) % self._interval == 0:
            self._watching = step
            for block, module in self._blocks():
                watch(module, block >= blocks)

    def _measure(self) -> None:
        """Before the step of a batch: takes what was captured, and has it compared on the thread."""
        if self._watching is None:
            return
        frozen = self._controller.frozen_blocks
        mine: Future[dict[int, float]] = Future()
        try:
            watched = {block: Watched(module) for block, module in self._blocks() if block >= frozen}
            comparable = {block: each for block, each in watched.items() if each.comparable}
            mine = self._thread.submit(_plasticities, comparable)
        except Exception as error:  # the others hear of it when they ask for the verdict
            mine.set_exception(error)
        self._verdict = _Verdict(self._watching + self._delay, mine)
        self._watching = None

    def _agree(self, verdict: _Verdict) -> Plasticities:
        """What all ranks found, waiting for it. Collective.

        Raises:
            RuntimeError: on every rank, if the comparison failed on one.
        """
        if verdict.agreed is None:
            assert verdict.mine is not None
            numbers = torch.zeros(2, len(self._numbers) + 1, dtype=torch.float64)
            failure = verdict.mine.exception()
            if failure is None:
                for block, plasticity in verdict.mine.result().items():
                    numbers[:, block] = torch.tensor([plasticity, 1.0])
            else:
                numbers[0, -1] = 1.0
            values, counts = self.engine.sum_over_world(numbers).tolist()
            if values[-1]:
                raise RuntimeError("freezing: the plasticity of a block could not be computed") from failure
            verdict.agreed = [value / count if count else None for value, count in zip(values, counts[:-1])]
        return verdict.agreed

    def state_dict(self) -> dict[str, Any]:
        """The controller's, and what is under way."""
        verdict = self._verdict
        under_way = None if verdict is None else {"due": verdict.due, "plasticities": self._agree(verdict)}
        return {**self._controller.state_dict(), "under_way": under_way}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` gave; the references are on the blocks."""
        self._controller.load_state_dict(state)
        under_way = state["under_way"]
        if under_way is not None:
            self._verdict = _Verdict(under_way["due"], agreed=under_way["plasticities"])


def _plasticities(watched: Mapping[int, Watched]) -> dict[int, float]:
    # As fp32 numbers, so that their fp64 sums over replicas are exact and the order of ranks does not matter.
    return {block: float(torch.tensor(each.plasticity())) for block, each in watched.items()}
