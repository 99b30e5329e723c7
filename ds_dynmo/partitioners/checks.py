"""Checks of all balancers: invalid costs or speeds, and more stages than layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ds_dynmo.errors import PartitionError, counted

__all__ = ["check_costs", "check_num_chunks", "check_num_stages", "check_speeds"]


def check_costs(costs: Sequence[float]) -> list[float]:
    """Check costs and return them as plain numbers: ints stay ints, so that their sums are exact; others become floats.

    Raises:
        PartitionError: a cost that is not a finite number >= 0 (names its layer), or costs whose sum exceeds the
            range of a float.
    """
    checked = [_check_cost(layer, cost) for layer, cost in enumerate(costs)]
    try:
        math.fsum(checked)
    except OverflowError as error:
        raise PartitionError(f"the costs of the {len(checked)} layers add up to more than a float can hold") from error
    return checked


def _check_cost(layer: int, cost: float) -> float:
    try:
        number = _plain(cost)
        usable = math.isfinite(number) and number >= 0
    except (TypeError, ValueError, OverflowError) as error:
        raise PartitionError(f"layer {layer} costs {cost!r}: a cost is a finite number >= 0") from error
    if not usable:
        raise PartitionError(f"layer {layer} costs {cost!r}: a cost is a finite number >= 0")
    return number


def _plain(cost: float) -> float:
    if type(cost) is float:
        return cost
    if cost is None or isinstance(cost, str | bytes):
        raise TypeError(f"{cost!r} is not a number")
    try:
        return operator.index(cost)  # type: ignore[arg-type]  # refuses floats: the other way
    except TypeError:
        return float(cost)


def check_num_stages(num_layers: int, num_stages: int) -> None:
    """Refuse more stages than layers, and fewer than one.

    Raises:
        PartitionError: with both numbers.
    """
    if num_stages < 1:
        raise PartitionError(f"{num_layers} layers need at least 1 stage, got {num_stages}")
    if num_stages > num_layers:
        raise PartitionError(
            f"{counted(num_layers, 'layer')} cannot fill {counted(num_stages, 'stage')}: every stage owns at least one "
            "layer"
        )


def check_num_chunks(num_layers: int, num_chunks: int) -> None:
    """Refuse more chunks than layers, where stages own two chunks each.

    Raises:
        PartitionError: with both numbers.
    """
    if num_chunks > num_layers:
        raise PartitionError(
            f"{counted(num_layers, 'layer')} cannot fill {counted(num_chunks, 'chunk')}, two of each stage: every "
            "chunk has at least one layer"
        )


def check_speeds(speeds: Sequence[float], num_stages: int) -> tuple[float, ...]:
    """Check speeds and return them as floats.

    Raises:
        PartitionError: not one finite number > 0 per stage.
    """
    if len(speeds) != num_stages:
        raise PartitionError(f"{num_stages} stages need {num_stages} speeds, got {len(speeds)}")
    for stage, speed in enumerate(speeds):
        if not 0 < speed < float("inf"):
            raise PartitionError(f"stage {stage} has speed {speed!r}: a speed is a finite number > 0")
    return tuple(map(float, speeds))
