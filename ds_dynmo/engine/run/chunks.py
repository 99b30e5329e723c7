"""The chunks of layers of one stage, and what a pass keeps from its forward to its backward part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from ds_dynmo.engine.comm.message_forms import Content
from ds_dynmo.engine.deepspeed.module import LayerWrapper, runs_shown
from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.run.messages import Entrance


@dataclass
class HeldPass:
    """One micro-batch in one chunk, from its forward pass to its backward pass.

    Attributes:
        entrance: of the inputs; it keeps the gradients that are sent back.
        outputs: those for which gradients come back; None: it has lost its graph, and the gradient is dropped.
        gradients: shapes and dtypes of those gradients.
        loss: of the last chunk.
    """

    entrance: Entrance = field(default_factory=Entrance)
    outputs: list[GradientEdge | None] = field(default_factory=list)
    gradients: Content = ()
    loss: torch.Tensor | None = None


@dataclass(frozen=True)
class Chunk:
    """Consecutive layers of this stage.

    Attributes:
        number: in the model.
        layers: their numbers.
        is_first, is_last: of the model's chunks.
    """

    number: int
    layers: range
    is_first: bool
    is_last: bool


class StageChunks:
    """The chunks of this stage. DeepSpeed's module shows one at a time.

    Attributes:
        active: the chunk whose pass runs; None: no batch does.
        loss_stage: of the latest batch: layers may have moved since. Before one in this world that of the next; None:
            the engine is being built.
    """

    def __init__(self, module: Any, layers: StageLayers) -> None:
        self._module, self._layers = module, layers
        self._show: Callable[[int], None] = lambda place: None
        self._places: dict[int, int] = {}
        self.active: Chunk | None = None
        self.loss_stage: int | None = None

    @contextmanager
    def running(self, wrappers: Sequence[LayerWrapper]) -> Iterator[dict[int, Chunk]]:
        """Run a batch inside, whose layers run through ``wrappers``; get the chunks by their numbers.

        Args:
            wrappers: the innermost first.
        """
        placement, stage = self._layers.placement, self._layers.stage
        self.loss_stage = placement.owners[-1]
        numbers = [number for number, owner in enumerate(placement.owners) if owner == stage]
        chunks = {n: Chunk(n, placement.chunk(n), n == 0, n == placement.num_chunks - 1) for n in numbers}
        self._places = {number: place for place, number in enumerate(numbers)}
        with runs_shown(self._module, [chunk.layers for chunk in chunks.values()], wrappers) as self._show:
            try:
                yield chunks
            finally:
                self.active = None

    @property
    def holds_last(self) -> bool:
        """Whether this stage holds the last chunk of the model, where the loss is."""
        return self._layers.placement.owners[-1] == self._layers.stage

    def activate(self, chunk: Chunk) -> None:
        """Let DeepSpeed's module run ``chunk``: what checkpointed segments recompute is looked up there too."""
        if chunk is not self.active:
            self.active = chunk
            self._show(self._places[chunk.number])
