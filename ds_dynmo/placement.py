"""The placement of layers on stages: the value type :class:`Placement`. Pure.

Layers are numbered 0 .. num_layers - 1 for life. A *chunk* is a run of consecutive layers, chunk ``c`` is layers
``[boundaries[c], boundaries[c + 1])``. A *stage* is a position on the pipeline axis (DeepSpeed's ``stage_id``), and
owns one chunk or more:

=====  ======================  ==============  =====================================================
shape  chunks of each stage    boundaries      stage ``s`` of ``p`` owns
=====  ======================  ==============  =====================================================
chain  one                     ``p + 1``       chunk ``s``
V      two                     ``2 * p + 1``   chunks ``s`` and ``2 * p - 1 - s``
=====  ======================  ==============  =====================================================

``engine.partition`` is the list of boundaries: DeepSpeed's ``PipelineModule.parts``, or ``DualPipeVModule.parts``.

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

from ds_dynmo.errors import PartitionError, counted

__all__ = ["Placement", "check_partition", "stage_of"]


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


@dataclass(frozen=True)
class Placement:
    """Every layer of the model, once, on a stage.

    Attributes:
        boundaries: of the chunks, in the order of the model.
        owners: per chunk, the stage that holds it.

    Args:
        may_be_empty: stages whose chunks may have no layer.

    Raises:
        PartitionError: boundaries that leave out a layer or make a chunk empty, or owners that are not the stages
            0 .. num_stages - 1.

    >>> chain, v = Placement.chain([0, 3, 8]), Placement.v([0, 2, 4, 5, 8])
    >>> chain.owners, v.owners
    ((0, 1), (0, 1, 1, 0))
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
        if not self.owners or {*self.owners} != {*range(self.num_stages)}:
            raise PartitionError(f"owners {list(self.owners)} of chunks: should be all of the stages 0, 1, ...")
        if boundaries[0] != 0:
            raise PartitionError(f"partition {list(boundaries)}: should begin at 0, the first layer")
        for owner, start, stop in zip(self.owners, boundaries, boundaries[1:]):
            if stop < start or (stop == start and owner not in may_be_empty):
                raise PartitionError(
                    f"partition {list(boundaries)} is not strictly increasing: stage {owner} would own no layer "
                    f"({start} to {stop})"
                )

    @classmethod
    def chain(
        cls,
        boundaries: Sequence[int],
        *,
        num_layers: int | None = None,
        num_stages: int | None = None,
        empty: Container[int] = (),
    ) -> Placement:
        """Build a chain: one chunk per stage, in the order of the stages.

        Args:
            num_layers, num_stages: the required numbers; None: any.
            empty: stages that may own no layer.

        Raises:
            PartitionError: other numbers than required, or invalid boundaries.

        >>> Placement.chain([0, 3, 3, 8], empty=[1]).empty_stages
        (1,)
        """
        boundaries = _ints(boundaries)
        stages = max(len(boundaries) - 1, 1) if num_stages is None else num_stages
        _check_extent(boundaries, num_layers, counted(stages, "stage"), stages)
        return cls(boundaries, tuple(range(stages)), empty)

    @staticmethod
    def stages_of_chain(boundaries: Sequence[int]) -> int:
        """Count the stages of a chain with ``boundaries``, which need not be valid.

        >>> Placement.stages_of_chain([0, 3, 8]), Placement.stages_of_chain([])
        (2, 0)
        """
        return max(len(boundaries) - 1, 0)

    @classmethod
    def v(cls, boundaries: Sequence[int], *, num_layers: int | None = None, num_stages: int | None = None) -> Placement:
        """Build a V: two chunks per stage, down the stages and back up. Stage 0 has the first layers and the last ones.

        Raises:
            PartitionError: as for :meth:`chain`, or an odd number of chunks.
        """
        boundaries = _ints(boundaries)
        stages = max((len(boundaries) - 1) // 2, 1) if num_stages is None else num_stages
        _check_extent(boundaries, num_layers, f"a V of {counted(stages, 'stage')}", 2 * stages)
        return cls(boundaries, (*range(stages), *reversed(range(stages))))

    @classmethod
    def of(cls, boundaries: Sequence[int], owners: Sequence[int] | None = None) -> Placement:
        """Build a placement from saved :attr:`boundaries` and :attr:`owners`; without owners it is a chain."""
        return cls.chain(boundaries) if owners is None else cls(_ints(boundaries), _ints(owners))

    def at(self, boundaries: Sequence[int]) -> Placement:
        """Return a placement of the same layers and the same owners with other boundaries.

        Raises:
            PartitionError: boundaries of other layers, or of another number of chunks.
        """
        boundaries = _ints(boundaries)
        _check_extent(boundaries, self.num_layers, counted(self.num_stages, "stage"), self.num_chunks)
        return Placement(boundaries, self.owners)

    def __repr__(self) -> str:
        return f"{list(self.boundaries)}" + ("" if self.is_chain else f" on stages {list(self.owners)}")

    def as_record(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return a dict for JSON: the boundaries under ``name``, and unless this is a chain the owners.

        >>> Placement.v([0, 1, 2]).as_record("old_partition")
        {'old_partition': (0, 1, 2), 'old_partition_owners': (0, 0)}
        """
        record = {name: self.boundaries}
        return record if self.is_chain else {**record, f"{name}_owners": self.owners}

    def among(self, places: Sequence[int], num_stages: int) -> Placement:
        """Return this chain on the stages ``places`` of ``num_stages``; other stages own no layer.

        >>> str(Placement.chain([0, 3, 8]).among([0, 3], 4))
        '[0, 3, 3, 3, 8]'
        """
        sizes = dict(zip(places, (len(self.run_of(stage)) for stage in self.stages), strict=True))
        counts = [sizes.get(stage, 0) for stage in range(num_stages)]
        return Placement.chain([0, *itertools.accumulate(counts)], empty={*range(num_stages)} - {*places})

    def without_empty_stages(self) -> Placement:
        """Return this chain without the stages that own no layer.

        >>> str(Placement.chain([0, 3, 3, 8], empty=[1]).without_empty_stages())
        '[0, 3, 8]'
        """
        assert self.is_chain
        return Placement.chain(sorted({*self.boundaries}))

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
    def is_chain(self) -> bool:
        """Whether every stage owns one chunk, in the order of the stages."""
        return self.owners == tuple(range(len(self.owners)))

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

    def run_of(self, stage: int) -> range:
        """Return the layers of ``stage``, which has to own one chunk.

        Raises:
            PartitionError: it owns several: the caller supports chains only.

        >>> Placement.chain([0, 3, 8]).run_of(1)
        range(3, 8)
        """
        chunks = self.chunks_of(stage)
        if len(chunks) != 1:
            raise PartitionError(f"stage {stage} has {len(chunks)} chunks of layers, where one is supported")
        return chunks[0]

    @cached_property
    def _layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(layer for run in self.chunks_of(stage) for layer in run) for stage in self.stages)


def _ints(values: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(value) for value in values)
    except TypeError as error:
        raise PartitionError(f"partition {values!r}: should be a list of ints, such as [0, 3, 8]") from error


def _check_extent(boundaries: tuple[int, ...], num_layers: int | None, what: str, num_chunks: int) -> None:
    if len(boundaries) != num_chunks + 1 or boundaries[0] != 0 or num_layers not in (None, boundaries[-1]):
        last, layers = ("", "") if num_layers is None else (f" to {num_layers}", f" and {counted(num_layers, 'layer')}")
        raise PartitionError(
            f"partition {list(boundaries)}: should be {num_chunks + 1} boundaries, from 0{last}, for {what}{layers}"
        )
