"""What a checkpoint is written from and loaded into, and helpers of both."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ds_dynmo.engine.comm.coordinates import RankCoordinates
from ds_dynmo.engine.decide.rebalancer import Rebalancer
from ds_dynmo.engine.deepspeed.files import slice_number, universal_information, writes_optimizer_shards
from ds_dynmo.engine.move.references import References
from ds_dynmo.engine.run.trainable import TrainableLayers
from ds_dynmo.engine.save.initial_model import InitialModelSpec
from ds_dynmo.engine.save.manifest import SliceManifest
from ds_dynmo.engine.save.progress import EngineProgress
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.engine.state.pieces import StageSlots
from ds_dynmo.errors import CheckpointError
from ds_dynmo.files.checkpoints import layer_file

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointContext:
    """One rank's part of a run, for its checkpoints.

    Attributes:
        engine: DeepSpeed's.
        references: to objects that layers refer to and do not own.
        origin: the model as it was when the engine was constructed.
        progress: what the engine has counted and learnt.
        operation: for messages: "saving a checkpoint" or "loading a checkpoint".
    """

    engine: Any
    stage: StageContext
    references: References
    origin: InitialModelSpec
    rebalancer: Rebalancer
    trainable: TrainableLayers
    progress: EngineProgress
    operation: str

    @property
    def here(self) -> RankCoordinates:
        """This rank's place in the present world."""
        return self.stage.comm.here

    def everywhere(self, function: Callable[[], T], *, same: Callable[[T], object] | None = None) -> T:
        """Return ``function()`` once it has returned on every rank. Collective.

        Ranks write and read for different times, so they wait for each other as long as a batch does.

        Args:
            same: as in :meth:`Communicator.everywhere`.

        Raises:
            CheckpointError: on every rank, if any rank's ``function`` raised, or results differ.
        """

        def refusing() -> T:
            try:
                return function()
            except CheckpointError:
                raise
            except Exception as error:  # of a disk, or of a user's object
                raise CheckpointError(f"{type(error).__name__}: {error}") from error

        self.stage.comm.enter(self.operation)
        return self.stage.comm.everywhere(self.operation, refusing, same=same, error=CheckpointError)

    def gather_layers(self, describe: Callable[[int, nn.Module], T]) -> dict[int, T]:
        """Describe every layer of this rank's slice, each on one of the replicas that hold it. Collective."""
        here, counted = self.here, self.stage.layers.counted_modules()
        mine = list(counted.items())[here.replica :: here.replicas]
        described = self.everywhere(lambda: {index: describe(index, module) for index, module in mine})
        every = self.stage.comm.gather_objects((here.tp_rank, described))
        return {index: about for tp_rank, found in every if tp_rank == here.tp_rank for index, about in found.items()}


def local_slice(context: CheckpointContext, stage: StageSlots) -> SliceManifest:
    """Make the manifest of only this rank's stage and layers; ``stage``: the slots of its optimizer files."""
    layers, slice_index = context.stage.layers, context.here.tp_rank
    counted = layers.counted_modules()
    stored = {index: layers.stored_use(index) for index in counted}
    return SliceManifest(
        stages=(stage,),
        numbers=(slice_number(context.engine),),
        shapes={index: context.origin.layers[index].shapes for index in counted},
        weights={
            index: layer_file(index, 0, slice_index) if use is None else layers.file_name(use)
            for index, use in stored.items()
        },
    )


def universal_info(engine: Any, stage: StageContext, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the client state that tells DeepSpeed's universal conversion which weights may be on several stages.

    It takes these from the first stage, so a weight that the first stage lacks is not named.
    """
    if not writes_optimizer_shards(engine) or stage.replicas_differ:  # it refuses a checkpoint that does not tell
        return {}
    layers, first = stage.layers, stage.placement.layers_of(0)
    tied = [rf"tied_modules\.{re.escape(key)}\..*" for key in layers.tied_keys() if layers.uses(key)[0] in first]
    return universal_information(engine, client_state, tied)
