"""The part of the engine that writes and reads checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.save.applying import LoadOptions
from ds_dynmo.engine.save.context import CheckpointContext
from ds_dynmo.engine.save.initial_model import InitialModelSpec
from ds_dynmo.engine.save.progress import EngineProgress
from ds_dynmo.engine.save.reading import load
from ds_dynmo.engine.save.writing import save
from ds_dynmo.engine.stage import StageContext


class Checkpointer:
    """Writes checkpoints, and loads them at any partition. Construction is collective.

    Args:
        engine: DeepSpeed's, which writes its files beside ds_dynmo's.
        references: to objects that layers refer to and do not own.
        generation: gives the number of worlds before the present one.
    """

    def __init__(
        self,
        engine: Any,
        stage: StageContext,
        references: References,
        rebalancer: Rebalancer,
        trainable: TrainableLayers,
        progress: EngineProgress,
        generation: Callable[[], int],
    ) -> None:
        self._engine, self._stage, self._references, self._rebalancer = engine, stage, references, rebalancer
        self._trainable, self._progress, self._generation = trainable, progress, generation
        self._origin = InitialModelSpec.of(stage, engine.get_data_types()[0], references.is_shared)
        stage.optimizer.changed.subscribe("a checkpoint describes its files", self._describe_optimizer)

    def save(
        self,
        save_dir: str,
        tag: str | None,
        client_state: dict[str, Any],
        save_latest: bool,
        exclude_frozen_parameters: bool,
    ) -> bool:
        """Write a checkpoint: :func:`ds_dynmo.engine.save.writing.save`. Collective."""
        return save(
            self._context("saving a checkpoint"), save_dir, tag, client_state, save_latest, exclude_frozen_parameters
        )

    def load(self, load_dir: str, tag: str | None, options: LoadOptions) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint: :func:`ds_dynmo.engine.save.reading.load`. Collective."""
        return load(self._context("loading a checkpoint"), load_dir, tag, options)

    def _context(self, operation: str) -> CheckpointContext:
        return CheckpointContext(
            engine=self._engine,
            stage=self._stage,
            references=self._references,
            origin=self._origin,
            rebalancer=self._rebalancer,
            trainable=self._trainable,
            progress=self._progress,
            generation=self._generation(),
            operation=operation,
        )

    def _describe_optimizer(self, _: None) -> None:
        self._origin = self._origin.with_optimizer(self._stage)
