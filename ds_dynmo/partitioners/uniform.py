"""The partition that knows nothing of costs: as many layers everywhere."""

from __future__ import annotations

from ds_dynmo.partitioners.checks import check_num_stages

__all__ = ["uniform"]


def uniform(num_layers: int, num_stages: int) -> list[int]:
    """Boundaries of stages whose sizes differ by at most one layer, larger ones first.

    >>> uniform(8, 3)
    [0, 3, 6, 8]

    Raises:
        PartitionError: more stages than layers, or no stage at all.
    """
    check_num_stages(num_layers, num_stages)
    size, larger = divmod(num_layers, num_stages)
    return [stage * size + min(stage, larger) for stage in range(num_stages + 1)]
