"""The placement of layers on stages: the value type :class:`Placement`. Pure.

Layers are numbered 0 .. num_layers - 1 for life. A *chunk* is a run of consecutive layers, chunk ``c`` is layers
``[boundaries[c], boundaries[c + 1])``. A *stage* is a position on the pipeline axis (DeepSpeed's ``stage_id``), and
owns one chunk or more:

=====  ======================  ==============  =====================================================
shape  chunks of each stage    boundaries      stage ``s`` of ``p`` owns
=====  ======================  ==============  =====================================================
chain  one                     ``p + 1``       chunk ``s``
V      two                     ``2 * p + 1``   chunks ``s`` and ``2 * p - 1 - s``
loop   two                     ``2 * p + 1``   chunks ``s`` and ``p + s``
=====  ======================  ==============  =====================================================

``engine.partition`` is the list of boundaries: DeepSpeed's ``PipelineModule.parts``, or ``DualPipeVModule.parts``. A V
brings hidden states back to the first stage, a loop takes them down all stages twice (Megatron's interleaving). With
one stage a V and a loop are the same, and count as a V.

Balancers are functions over costs and a chain's boundaries, and slice those (:mod:`ds_dynmo.partitioners`,
:mod:`ds_dynmo.layer_groups`). No other module calculates with boundaries; tests/engine/test_placement.py checks that.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Container, Sequence
from dataclasses import InitVar, dataclass
from functools import cached_property
from typing import Literal, get_args

from ds_dynmo.errors import PartitionError, counted

__all__ = ["Placement", "Shape", "check_partition", "owners_of", "stage_of"]

Shape = Literal["chain", "v", "loop"]
_NAMES: dict[Shape, str] = {"chain": "", "v": "a V of ", "loop": "a loop of "}


def check_partition(
    partition: Sequence[int], num_layers: int, num_stages: int, *, empty: Container[int] = ()
) -> tuple[int, ...]:
    """Check the boundaries of a chain, and return them as plain ints.

    Args:
        empty: stages that may own no layer: they are being released.

    Raises:
        PartitionError: not ``num_stages + 1`` ints, not strictly increasing (a stage would be empty),
            or not running from 0 to ``num_layers``.
    """
    return Placement.chain(partition, num_layers=num_layers, num_stages=num_stages, empty=empty).boundaries


def stage_of(layer: int, partition: Sequence[int]) -> int:
    """Return the stage of a chain that owns ``layer``."""
    return Placement.chain(partition).stage_of(layer)


def owners_of(shape: Shape, num_stages: int) -> tuple[int, ...]:
    """Return, per chunk, the stage that holds it.

    >>> owners_of("chain", 3), owners_of("v", 2), owners_of("loop", 2)
    ((0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1))
    """
    down = tuple(range(num_stages))
    return {"chain": down, "v": down + down[::-1], "loop": down + down}[shape]


@dataclass(frozen=True)
class Placement:
    """Every layer of the model, once, on a stage.

    Attributes:
        boundaries: of the chunks, in the order of the model.
        owners: per chunk, the stage that holds it.

    Args:
        may_be_empty: stages whose chunks may have no layer.

    Raises:
        PartitionError: boundaries that leave out a layer or make a chunk empty, or owners that are not those of a
            :attr:`shape`.

    >>> chain, v = Placement.chain([0, 3, 8]), Placement.v([0, 2, 4, 5, 8])
    >>> chain.shape, v.shape
    ('chain', 'v')
    >>> chain.stage_of(4), v.stage_of(4), v.stage_of(7)
    (1, 1, 0)
    >>> v.layers_of(0), v.layers_of(1)
    ((0, 1, 5, 6, 7), (2, 3, 4))
    """

    boundaries: tuple[int, ...]
    owners: tuple[int, ...]
    may_be_empty: InitVar[Container[int]] = ()

    def __post_init__(self, may_be_empty: Container[int]) -> None:
        boundaries = self.boundaries
        if len(boundaries) != len(self.owners) + 1:
            raise PartitionError(
                f"partition {list(boundaries)}: should be {len(self.owners) + 1} boundaries for its "
                f"{counted(len(self.owners), 'owner')}"
            )
        if not self.owners or self.owners not in (owners_of(shape, len({*self.owners})) for shape in get_args(Shape)):
            raise PartitionError(f"the owners {list(self.owners)} of chunks are those of no chain, V or loop of stages")
        if boundaries[0] != 0:
            raise PartitionError(f"partition {list(boundaries)}: should begin at 0, the first layer")
        for owner, start, stop in zip(self.owners, boundaries, boundaries[1:]):
            if stop < start or (stop == start and owner not in may_be_empty):
                raise PartitionError(
                    f"partition {list(boundaries)} is not strictly increasing: stage {owner} would own no layer "
                    f"({start} to {stop})"
                )

    @classmethod
    def of_shape(
        cls,
        shape: Shape,
        boundaries: Sequence[int],
        *,
        num_layers: int | None = None,
        num_stages: int | None = None,
        empty: Container[int] = (),
    ) -> Placement:
        """Build a placement of a shape.

        Args:
            num_layers, num_stages: the required numbers; None: any.
            empty: stages that may own no layer.

        Raises:
            PartitionError: other numbers than required, fewer layers than chunks, or invalid boundaries.

        >>> Placement.of_shape("loop", [0, 2, 4, 5, 8]).owners
        (0, 1, 0, 1)
        """
        boundaries, per_stage = _ints(boundaries), len(owners_of(shape, 1))
        stages = max((len(boundaries) - 1) // per_stage, 1) if num_stages is None else num_stages
        owners = owners_of(shape, stages)
        what = f"{_NAMES[shape]}{counted(stages, 'stage')}"
        if num_layers is not None and num_layers < len(owners) and not empty:
            needs = "need" if shape == "chain" else "needs"
            raise PartitionError(f"{what} {needs} at least {counted(len(owners), 'layer')}, the model has {num_layers}")
        if len(boundaries) != len(owners) + 1 or boundaries[0] != 0 or num_layers not in (None, boundaries[-1]):
            last = layers = ""
            if num_layers is not None:
                last, layers = f" to {num_layers}", f" and {counted(num_layers, 'layer')}"
            should_be = f"{len(owners) + 1} boundaries, from 0{last}, for {what}{layers}"
            raise PartitionError(f"partition {list(boundaries)}: should be {should_be}")
        return cls(boundaries, owners, empty)

    @classmethod
    def chain(
        cls,
        boundaries: Sequence[int],
        *,
        num_layers: int | None = None,
        num_stages: int | None = None,
        empty: Container[int] = (),
    ) -> Placement:
        """Build a chain: one chunk per stage, in the order of the stages. As :meth:`of_shape`.

        >>> Placement.chain([0, 3, 3, 8], empty=[1]).empty_stages
        (1,)
        """
        return cls.of_shape("chain", boundaries, num_layers=num_layers, num_stages=num_stages, empty=empty)

    @classmethod
    def v(cls, boundaries: Sequence[int], *, num_layers: int | None = None, num_stages: int | None = None) -> Placement:
        """Build a V: down the stages and back up. Stage 0 has the first layers and the last. As :meth:`of_shape`."""
        return cls.of_shape("v", boundaries, num_layers=num_layers, num_stages=num_stages)

    @classmethod
    def loop(
        cls, boundaries: Sequence[int], *, num_layers: int | None = None, num_stages: int | None = None
    ) -> Placement:
        """Build a loop: twice down the stages. As :meth:`of_shape`.

        >>> Placement.loop([0, 2, 4, 5, 8]).layers_of(0)
        (0, 1, 4)
        """
        return cls.of_shape("loop", boundaries, num_layers=num_layers, num_stages=num_stages)

    def shape_on(self, num_stages: int) -> Shape:
        """Return the shape for another number of stages: the same, on one stage a chain."""
        return self.shape if num_stages > 1 else "chain"

    def stages_for(self, boundaries: Sequence[int]) -> int:
        """Count the stages that ``boundaries``, which need not be valid, are for: in this shape, or else in a chain.

        >>> v = Placement.v([0, 1, 2, 3, 4, 5, 6])
        >>> v.stages_for([0, 1, 2, 4, 6]), v.stages_for([0, 2, 6]), v.stages_for([0, 6]), v.stages_for([])
        (2, 2, 1, 0)
        """
        stages, left = divmod(max(len(boundaries) - 1, 0), self.num_chunks // self.num_stages)
        return max(len(boundaries) - 1, 0) if left or stages < 2 else stages

    @classmethod
    def of(cls, boundaries: Sequence[int], owners: Sequence[int] | None = None) -> Placement:
        """Build a placement from saved :attr:`boundaries` and :attr:`owners`; without owners it is a chain."""
        return cls.chain(boundaries) if owners is None else cls(_ints(boundaries), _ints(owners))

    def at(self, boundaries: Sequence[int]) -> Placement:
        """Return a placement of the same layers and the same owners with other boundaries.

        Raises:
            PartitionError: boundaries of other layers, or of another number of chunks.
        """
        return Placement.of_shape(self.shape, boundaries, num_layers=self.num_layers, num_stages=self.num_stages)

    def __repr__(self) -> str:
        return f"{list(self.boundaries)}" + ("" if self.shape == "chain" else f" on stages {list(self.owners)}")

    def as_record(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return a dict for JSON: the boundaries under ``name``, and unless this is a chain the owners.

        >>> Placement.v([0, 1, 2]).as_record("old_partition")
        {'old_partition': (0, 1, 2), 'old_partition_owners': (0, 0)}
        """
        record = {name: self.boundaries}
        return record if self.shape == "chain" else {**record, f"{name}_owners": self.owners}

    def among(self, places: Sequence[int], num_stages: int) -> Placement:
        """Return this placement on the stages ``places``, ascending, of ``num_stages``; other stages own no layer.

        >>> Placement.chain([0, 3, 8]).among([0, 3], 4).boundaries, Placement.v([0, 2, 4, 5, 8]).among([0, 2], 3)
        ((0, 3, 3, 3, 8), [0, 2, 2, 4, 5, 5, 8] on stages [0, 1, 2, 2, 1, 0])
        """
        chunks = {place: iter(self.chunks_of(stage)) for stage, place in zip(self.stages, places, strict=True)}
        sizes = [len(next(chunks[owner])) if owner in chunks else 0 for owner in owners_of(self.shape, num_stages)]
        empty = {*range(num_stages)} - chunks.keys()
        return Placement.of_shape(self.shape, [0, *itertools.accumulate(sizes)], empty=empty)

    def without_empty_stages(self) -> Placement:
        """Return this placement without the stages that own no layer.

        >>> str(Placement.chain([0, 3, 3, 8], empty=[1]).without_empty_stages())
        '[0, 3, 8]'
        """
        ends = [stop for owner, stop in zip(self.owners, self.boundaries[1:]) if owner not in self.empty_stages]
        return Placement.of_shape(self.shape, [0, *ends])

    # -- the whole pipeline ---------------------------------------------------------------------------

    @property
    def num_layers(self) -> int:
        return self.boundaries[-1]

    @property
    def num_chunks(self) -> int:
        return len(self.owners)

    @property
    def num_stages(self) -> int:
        return max(self.owners) + 1

    @property
    def stages(self) -> range:
        return range(self.num_stages)

    @property
    def shape(self) -> Shape:
        """The rule by which stages own chunks."""
        return next(shape for shape in get_args(Shape) if self.owners == owners_of(shape, self.num_stages))

    @property
    def empty_stages(self) -> tuple[int, ...]:
        """Stages without a layer."""
        return tuple(stage for stage in self.stages if not self.layers_of(stage))

    # -- from a layer to its stage --------------------------------------------------------------------

    def chunk_of(self, layer: int) -> int:
        """Return the chunk that ``layer`` is in.

        Raises:
            PartitionError: there is no such layer.
        """
        if not 0 <= layer < self.num_layers:
            raise PartitionError(f"layer {layer} is in no stage of partition {list(self.boundaries)}")
        return bisect.bisect_right(self.boundaries, layer) - 1

    def stage_of(self, layer: int) -> int:
        """Return the stage that owns ``layer``."""
        return self.owners[self.chunk_of(layer)]

    # -- from a stage to its layers -------------------------------------------------------------------

    def chunk(self, number: int) -> range:
        """Return the layers of a chunk.

        >>> Placement.v([0, 2, 4, 5, 8]).chunk(3)
        range(5, 8)
        """
        return range(self.boundaries[number], self.boundaries[number + 1])

    def chunks_of(self, stage: int) -> tuple[range, ...]:
        """Return the layers of each chunk of ``stage``, in the order of the model.

        >>> Placement.v([0, 2, 4, 5, 8]).chunks_of(0)
        (range(0, 2), range(5, 8))
        """
        return tuple(self.chunk(number) for number, owner in enumerate(self.owners) if owner == stage)

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """Return the layers of ``stage``, in the order of the model."""
        return self._layers[stage]

    @cached_property
    def _layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(layer for run in self.chunks_of(stage) for layer in run) for stage in self.stages)


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise PartitionError(f"a partition is a list of ints, got {values!r}") from error
