"""Agreement of the ranks on trainable layers, and refusal of changes without ``engine.model_changed``."""

from __future__ import annotations

from ds_dynmo.engine.deepspeed.instruction_map import present_instructions
from ds_dynmo.engine.deepspeed.pipeline_engine import DeepSpeedPipeline
from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.engine.run import frozen_prefix, instructions
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError


class TrainableLayers:
    """The trainable layers on which the ranks have agreed.

    Args:
        engine: DeepSpeed's engine, whose instructions are checked.

    Attributes:
        prefix: number of leading layers of the model without trainable parameters.
    """

    def __init__(self, engine: DeepSpeedPipeline, stage: StageContext) -> None:
        self._engine, self._stage = engine, stage
        self._layers: list[bool] = []
        self._tied_weights: list[list[float]] = []
        self.prefix = 0

    def agree(self, what: str) -> None:
        """Agree on the trainable layers, and let the optimizer train exactly those. Collective.

        Args:
            what: the engine's method that the user called, for messages.

        Raises:
            ConfigError: on every rank; a tie is frozen in part, or a user's instruction is refused.
        """
        stage, layers = self._stage, self._stage.layers
        stage.comm.enter(what)
        flags = stage.comm.max_over_world(
            layer_sizes.per_layer(layers, lambda module: float(frozen_prefix.trains(module)))
        )
        trainable = flags.bool().tolist()
        frozen_prefix.check_ties(layers, trainable)
        tied = frozen_prefix.tied_weights_that_train(layers)
        if tied.numel():
            stage.comm.max_over_world(tied)
            frozen_prefix.check_tied_weights(layers, tied.tolist())
        prefix = frozen_prefix.frozen_prefix(trainable)
        self._check_instructions(prefix)
        stage.optimizer.match_layers(what)
        stage.gradient_flags.forget_flags()
        self._layers, self._tied_weights, self.prefix = trainable, tied.tolist(), prefix

    def check(self) -> None:
        """Refuse a batch if parameters were frozen or unfrozen since :meth:`agree`, or an instruction is refused.

        Raises:
            ConfigError: on this rank; nothing was trained.
        """
        if not self._stage.optimizer.is_current():
            raise ConfigError(
                "parameters were frozen or unfrozen: call engine.model_changed(reason) on every rank afterwards, so "
                "that the optimizer stops or starts to update them"
            )
        frozen_prefix.check_unchanged(self._stage.layers, self._layers, self._tied_weights)
        self._check_instructions(self.prefix)

    def _check_instructions(self, prefix: int) -> None:
        engine = self._engine
        ours = self._stage.schedule.may_choose_schedule and engine.num_stages > 1
        instructions.check(present_instructions(engine), prefix, partitioned=engine.is_pipe_partitioned, ours=ours)
