"""Agreement of the ranks on trainable layers, and refusal of changes without ``engine.model_changed``.

The leading layers of the model without trainable parameters are its *frozen prefix*. A chunk inside it has no backward
work, and no gradient is sent to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ds_dynmo.engine.deepspeed.pipeline_module import StageLayers
from ds_dynmo.engine.measure import layer_sizes
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
        flags = stage.comm.max_over_world(layer_sizes.per_layer(layers, lambda module: float(trains(module))))
        trainable = flags.bool().tolist()
        check_ties(layers, trainable)
        prefix = frozen_prefix(trainable)
        stage.optimizer.match_layers(what)
        stage.forms.forget()
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
        check_unchanged(self._stage.layers, self._layers)


def trains(module: nn.Module) -> bool:
    """Return whether a layer has trainable parameters."""
    return any(parameter.requires_grad for parameter in module.parameters())


def check_ties(layers: StageLayers, trainable: Sequence[bool]) -> None:
    """Refuse a tie of which only some uses are frozen.

    Args:
        trainable: per layer of the model, whether it has trainable parameters; the same on every rank.

    Raises:
        ConfigError: on every rank.
    """
    for key in layers.tied_keys():
        uses = layers.uses(key)
        if len({trainable[use] for use in uses}) > 1:
            raise ConfigError(
                f"layers {uses} are tied by the key {key!r}, but only layers {[u for u in uses if trainable[u]]} have "
                "something to train: freeze all of them, or untie them"
            )


def check_unchanged(layers: StageLayers, trainable: Sequence[bool]) -> None:
    """Refuse to train after layers were frozen or unfrozen without ``engine.model_changed``.

    Args:
        trainable: per layer of the model, whether it was trainable at the last ``engine.model_changed``.
    """
    for index, module in layers.modules().items():
        if trains(module) != trainable[index]:
            change = "frozen" if trainable[index] else "unfrozen"
            raise ConfigError(
                f"layer {index} was {change}: call engine.model_changed(reason) on every rank after layers are "
                "frozen or unfrozen"
            )


def frozen_prefix(trainable: Sequence[bool]) -> int:
    """Count the leading layers without trainable parameters.

    >>> frozen_prefix([False, False, True, False])
    2
    """
    return next((index for index, trains in enumerate(trainable) if trains), len(trainable))
