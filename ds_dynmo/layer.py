"""What a layer of the model may tell the engine. A layer that says nothing trains and moves all the same."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

__all__ = ["Layer", "LayerParameter"]


class Layer(Protocol):
    """Names that the engine looks for in a layer, an ``nn.Module``; each may be missing.

    ``rank_attributes``, ``shares_out`` and ``use_replicas`` are looked for in the submodules of a layer too.

    Attributes:
        draws_as_layer: the layer draws random numbers as the layer of this number would, in place of its own number: a
            half of a block, as the whole block.
        compiled_parts: of the class; paths of the submodules that ``"compile"`` compiles, in place of the whole layer.
        rank_attributes: of the class; attributes that belong to the rank. They do not travel: a layer that arrives has
            the values that it gets when it is built there.
        shares_out: with several data-parallel replicas, each would have parameters of its own.
    """

    draws_as_layer: int
    compiled_parts: ClassVar[tuple[str, ...]]
    rank_attributes: ClassVar[tuple[str, ...]]
    shares_out: bool

    def load_signal(self) -> float:
        """Return the share of its dense work that the layer does now. It is reported, and decides nothing."""

    def workspace_bytes(self) -> int:
        """Return the bytes that the layer allocates while it runs and saves for no backward pass."""

    def use_replicas(self, group: Any) -> None:
        """Set the process group of the stage's data-parallel replicas: at the start, and where the layer arrives.

        The group must not be pickled or copied with the layer.
        """


class LayerParameter(Protocol):
    """Names that the engine looks for in a parameter; each may be missing.

    Attributes:
        replica_own: each data-parallel replica has other values: they are neither broadcast nor averaged.
        stays_frozen: it will never train, so that no optimizer keeps state for it.
        tensor_model_parallel: tensor-parallel slices have a part each (Megatron's name).
    """

    replica_own: bool
    stays_frozen: bool
    tensor_model_parallel: bool
