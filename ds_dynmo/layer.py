"""The optional protocol of a model's layers. A layer without any of these names trains and moves too."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

__all__ = ["Layer", "LayerParameter"]


class Layer(Protocol):
    """Names that ds_dynmo looks for in a layer, an ``nn.Module``; each may be missing.

    ``rank_attributes`` and ``use_replicas`` are looked for in the submodules of a layer too.

    Attributes:
        draws_as_layer: number of the layer whose random numbers this layer draws, instead of its number: for a half of
            a transformer block, that of the whole block.
        compiled_parts: paths of the submodules that ``"compile"`` compiles, instead of the whole layer.
        rank_attributes: of the class; attributes that belong to the rank. They do not travel: an arriving layer has the
            values that it gets when it is built on that rank.
        is_block: of the class; whether the layer is a transformer block, or half of one: freezing counts these layers.
    """

    draws_as_layer: int
    compiled_parts: tuple[str, ...]
    rank_attributes: ClassVar[tuple[str, ...]]
    is_block: ClassVar[bool]

    def load_signal(self) -> float:
        """Return the share of its dense work that the layer does now.

        It is reported. Decisions use it only to tell that a layer's work changed: they rest on measured costs, and
        compare those of two profiles, for noise and stage speeds, only where the share is the same.
        """

    def workspace_bytes(self) -> int:
        """Return the bytes that the layer allocates while it runs and does not save for a backward pass."""

    def use_replicas(self, group: Any) -> None:
        """Set the process group of the stage's data-parallel replicas, at the start and on arrival.

        The group must not be pickled or copied with the layer.
        """


class LayerParameter(Protocol):
    """Names that the engine looks for in a parameter; each may be missing.

    Attributes:
        replica_own: whether values differ between data-parallel replicas: they are neither broadcast nor averaged.
        stays_frozen: whether it will never train, so that no optimizer keeps state for it.
        tensor_model_parallel: whether each tensor-parallel slice has a part of it (Megatron's name).
    """

    replica_own: bool
    stays_frozen: bool
    tensor_model_parallel: bool
