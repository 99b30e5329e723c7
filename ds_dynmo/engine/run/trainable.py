"""Agreement of the ranks on trainable layers, and refusal of changes without ``engine.model_changed``."""

from __future__ import annotations

from ds_dynmo.engine.measure import layer_sizes
from ds_dynmo.engine.run import frozen_prefix
from ds_dynmo.engine.stage import StageContext
from ds_dynmo.errors import ConfigError


class TrainableLayers:
    """The trainable layers on which the ranks have agreed.

    Attributes:
        prefix: number of leading layers of the model without trainable parameters.
    """

    def __init__(self, stage: StageContext) -> None:
        self._stage = stage
        self._layers: list[bool] = []
        self.prefix = 0

    def agree(self, what: str) -> None:
        """Agree on the trainable layers, and let the optimizer train exactly those. Collective.

        Args:
            what: the engine's method that the user called, for messages.

        Raises:
            ConfigError: on every rank; a tie is frozen in part.
        """
        stage, layers = self._stage, self._stage.layers
        stage.comm.enter(what)
        flags = stage.comm.max_over_world(
            layer_sizes.per_layer(layers, lambda module: float(frozen_prefix.trains(module)))
        )
        trainable = flags.bool().tolist()
        frozen_prefix.check_ties(layers, trainable)
        prefix = frozen_prefix.frozen_prefix(trainable)
        stage.optimizer.match_layers(what)
        stage.gradient_flags.forget_flags()
        self._layers, self.prefix = trainable, prefix

    def check(self) -> None:
        """Refuse a batch if parameters were frozen or unfrozen since :meth:`agree`.

        Raises:
            ConfigError: on this rank; nothing was trained.
        """
        if not self._stage.optimizer.is_current():
            raise ConfigError(
                "parameters were frozen or unfrozen: call engine.model_changed(reason) on every rank afterwards, so "
                "that the optimizer stops or starts to update them"
            )
        frozen_prefix.check_unchanged(self._stage.layers, self._layers)
