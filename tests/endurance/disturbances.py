"""What is done to an engine between two batches. Every rank does the same: all draw from the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tests.endurance.plan import random_partition

Disturbance = Callable[[Any], None]


def draw(chooser: random.Random, engine: Any, save: Disturbance, *, has_two_chunks: bool) -> tuple[str, Disturbance]:
    """Draw one for the engine as it is, and return what it is, and what does it.

    Args:
        save: writes a checkpoint.
        has_two_chunks: whether a rank may hold two chunks of layers.
    """
    background = chooser.random() < 0.5
    how = " in the background" if background else ""
    layers, stages = engine.partition[-1], engine.num_stages

    def partition(of_stages: int) -> list[int]:
        return random_partition(chooser, layers, of_stages, has_two_chunks=has_two_chunks)

    choices: list[tuple[int, str, Disturbance]] = [(5, "save", save), (1, "model_changed", _changed)]
    if stages > 1:
        to = partition(stages)
        choices.append((6, f"move{how} to {to}", lambda engine: engine.rebalance(to, background=background)))
        if engine.profile is not None:  # else batches would be trained until there is one
            choices.append((3, f"decision{how}", lambda engine: engine.rebalance(background=background)))
    if stages > 1 and engine.grid.slice_parallel_size == 1:  # slices would lose the groups that a user gave them
        fewer = chooser.randrange(1, stages)
        at = partition(fewer)
        choices.append((1, f"repack to {fewer}", lambda engine: engine.repack(fewer)))
        choices.append((1, f"repack to {fewer} at {at}", lambda engine: engine.repack(fewer, partition=at)))
    weights = [weight for weight, *_ in choices]
    ((_, name, disturbance),) = chooser.choices(choices, weights)
    return name, disturbance


def _changed(engine: Any) -> None:
    engine.model_changed("a test")
