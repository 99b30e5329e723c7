"""A change of a stage's flat buffers, from when it is planned until it is carried out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from ds_dynmo.engine.deepspeed.flat_adapter import HeldGradients
from ds_dynmo.engine.state.keys import ParamKey
from ds_dynmo.engine.state.resharding import Resharding
from ds_dynmo.errors import MigrationError

Held = Sequence[tuple[ParamKey, nn.Parameter]]  # a stage's parameters in the order of its layers


@dataclass
class PlannedMove:
    """A change of the buffers that is planned: layers travel, or parameters were frozen or changed.

    Attributes:
        held: the parameters of the stage's layers when it was planned.
        overlapped: whether a batch trains meanwhile; else the buffers of gradients are freed.
        copied: weights in the next buffers, with the state of their memory then, by id of the parameter.
        gradients: of the batch that trained meanwhile; None: none did.
    """

    resharding: Resharding
    held: Held
    overlapped: bool
    copied: dict[int, tuple[int, int]] = field(default_factory=dict)
    gradients: HeldGradients | None = None

    def check_still_held(self, now: Held) -> None:
        """Refuse parameters that were changed since: their state would arrive as that of others.

        Raises:
            MigrationError: harmless, naming the first layer.
        """
        before, after = ([(key, id(parameter)) for key, parameter in held] for held in (self.held, now))
        if before == after:
            return
        differing = sorted({key for key, _ in {*before} ^ {*after}}) or [key for key, _ in before]
        layer = differing[0].layer
        names = ", ".join(key.name for key in differing if key.layer == layer)
        raise MigrationError(
            f"parameters of layer {layer} were renamed, reordered, removed or replaced while layers were on their way: "
            f"{names}. The next move takes them as they are now; change them between two batches to have this one",
            harmless=True,
        )
