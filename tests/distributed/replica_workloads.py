"""Runs whose freed ranks become further replicas, and runs that were launched so; every function runs on a rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ds_dynmo.partitioners import uniform
from tests.distributed.repack_workloads import attributes
from tests.distributed.workloads import Case, batches, build, micro_batch, sleeping_engine, state


def train(
    case: Case,
    sizes: Mapping[int, int],
    steps: int,
    fresh_data: bool = False,
    evaluates: bool = True,
    saves: tuple[int, str] | None = None,
    evenly: bool = False,
) -> dict[str, Any]:
    """Train, going on with so many stages after the steps of ``sizes``.

    ``evenly``: with as many layers each, as launched: of four replicas the order of sums depends on the partition.
    ``fresh_data``: an iterator of its own for each batch, begun where the engine says; ``saves``: after which step a
    checkpoint, and where.
    """
    engine = build(case)
    replica, data = engine.grid.get_data_parallel_id(), batches(engine)
    found: dict[str, Any] = {"losses": {}, "shapes": [], "before": [], "after": []}
    while engine.global_steps < steps:
        if fresh_data:
            data = (micro_batch(number, replica) for number in itertools.count(engine.micro_batches_taken))
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        if engine.global_steps in sizes:
            if evaluates:
                found["before"].append(engine.eval_batch(_micro_batches(replica, seed=7)).item())
            stages = sizes[engine.global_steps]
            engine.repack(stages, partition=uniform(case.num_layers, stages) if evenly else None)
            if evaluates and not engine.released:
                found["after"].append(engine.eval_batch(_micro_batches(replica, seed=7)).item())
        if engine.released and not engine.wait_for_recall():
            return {**found, "state": {}, "attributes": {}}
        if saves is not None and engine.global_steps == saves[0]:
            engine.save_checkpoint(saves[1])
        found["shapes"].append((engine.num_stages, engine.grid.data_parallel_size, engine.micro_batches))
    found["state"], found["attributes"] = state(engine), attributes(engine)
    found["reports"] = engine.repacks
    engine.dismiss_parked()
    return found


def _micro_batches(replica: int, seed: int) -> Any:
    return (micro_batch(number, replica, seed) for number in itertools.count())


def train_as_launched(case: Case, folder: str | None, first: int, last: int, width: int) -> dict[str, Any]:
    """Batches ``first + 1`` to ``last`` from the checkpoint at ``first``; replicas share the data of ``width`` ones."""
    engine = build(case)
    if first:
        engine.load_checkpoint(folder)
    copy, replica = divmod(engine.grid.get_data_parallel_id(), width)
    own, whole = engine.micro_batches, engine.micro_batches * engine.grid.data_parallel_size // width
    losses = {}
    for step in range(first, last):
        numbers = range(step * whole + copy * own, step * whole + (copy + 1) * own)
        losses[step + 1] = engine.train_batch(iter([micro_batch(number, replica) for number in numbers])).item()
    if folder is not None:
        engine.save_checkpoint(folder)
    return {"losses": losses, "state": state(engine), "attributes": attributes(engine)}


def train_on_a_dataset(case: Case, sizes: Mapping[int, int], steps: int) -> dict[str, Any]:
    """With ``training_data``, which DeepSpeed gives the first and the last stage alone."""
    samples = [sample for number in range(40) for sample in zip(*micro_batch(number, 0))]
    engine = build(case, training_data=samples)
    losses = {}
    while engine.global_steps < steps:
        loss = engine.train_batch().item()
        losses[engine.global_steps] = loss
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released and not engine.wait_for_recall():
            break
    engine.dismiss_parked()
    return {"losses": losses}


def without_data_in_the_middle(case: Case) -> tuple[int, int]:
    """Stages that are given no data cannot read any."""
    engine = build(case)
    data = batches(engine) if engine.is_first_stage() or engine.is_last_stage() else None
    engine.train_batch(data)
    engine.repack(2)
    if engine.released:
        return 0, 0
    engine.train_batch(data)
    engine.dismiss_parked()
    return engine.num_stages, engine.grid.data_parallel_size


def fold_by_itself(block: dict[str, Any], steps: int) -> list[tuple[int, int]]:
    """Stages and replicas after each step; layers that sleep get quicker, and slow again."""
    stages = dist.get_world_size()
    engine, data = sleeping_engine(block, [0.012] * 8, stages)
    shapes = []
    while engine.global_steps < steps:
        share = {3: 0.3, 9: 1 / 0.3}.get(engine.global_steps)
        if share is not None:
            for module in engine._layers.modules().values():
                module.seconds *= share
            engine.model_changed("as it was told")
        engine.train_batch(data)
        if engine.released and not engine.wait_for_recall():
            break
        shapes.append((engine.num_stages, engine.grid.data_parallel_size))
    engine.dismiss_parked()
    return shapes
