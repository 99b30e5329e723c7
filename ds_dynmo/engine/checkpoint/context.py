"""What a checkpoint is written from, and loaded into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_dynmo.engine.balancing.balancer import Balancer
from ds_dynmo.engine.checkpoint.initial_model import InitialModelSpec
from ds_dynmo.engine.checkpoint.progress import Progress
from ds_dynmo.engine.migration.references import References
from ds_dynmo.engine.pipeline.trainable import TrainableLayers
from ds_dynmo.engine.stage import StageContext


@dataclass(frozen=True)
class CheckpointContext:
    """One rank's part of a run.

    Attributes:
        engine: what is DeepSpeed's.
        names: of what layers refer to and do not own.
        origin: the model as it was when the engine was constructed.
        progress: what the engine counts.
        generation: how many worlds there were before the present one.
    """

    engine: Any
    stage: StageContext
    names: References
    origin: InitialModelSpec
    balancer: Balancer
    trainable: TrainableLayers
    progress: Progress
    generation: int
