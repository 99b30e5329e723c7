"""Runs whose freed ranks become further replicas, and runs that were launched so; every function runs on a rank."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from deepspeed.runtime.dataloader import RepeatingLoader

from tests.distributed.repack_workloads import attributes
from tests.distributed.workloads import Case, batches, build, micro_batch, state


def train(case: Case, sizes: Mapping[int, int], steps: int, fresh_data: bool = False) -> dict[str, Any]:
    """Train, going on with so many stages after the steps of ``sizes``.

    ``fresh_data``: an iterator of its own for each batch, begun where the engine says.
    """
    engine = build(case)
    replica, data = engine.grid.get_data_parallel_id(), batches(engine)
    found: dict[str, Any] = {"losses": {}, "shapes": [], "evaluations": []}
    while engine.global_steps < steps:
        if fresh_data:
            data = (micro_batch(number, replica) for number in itertools.count(engine.micro_batches_taken))
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released and not engine.wait_for_recall():
            return {**found, "state": {}, "attributes": {}}
        found["shapes"].append((engine.num_stages, engine.grid.data_parallel_size, engine.micro_batches))
        found["evaluations"].append(engine.eval_batch(_micro_batches(replica, seed=7)).item())
    found["state"], found["attributes"] = state(engine), attributes(engine)
    found["reports"] = engine.repacks
    engine.dismiss_parked()
    return found


def _micro_batches(replica: int, seed: int) -> Any:
    return (micro_batch(number, replica, seed) for number in itertools.count())


def train_as_launched(case: Case, folder: str, first: int, last: int, width: int) -> dict[str, Any]:
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
    engine.save_checkpoint(folder)
    return {"losses": losses, "state": state(engine), "attributes": attributes(engine)}


def train_on_a_dataset(case: Case, sizes: Mapping[int, int], steps: int) -> dict[int, float]:
    """With ``training_data``, which DeepSpeed gives the first and the last stage alone."""
    engine = build(case)
    engine.training_data = [micro_batch(number, 0) for number in range(40)]
    engine.collate_fn = _one
    if engine.is_first_stage() or engine.is_last_stage():
        engine.set_dataloader(RepeatingLoader(engine.training_data))
    losses = {}
    while engine.global_steps < steps:
        loss = engine.train_batch().item()
        losses[engine.global_steps] = loss
        if engine.global_steps in sizes:
            engine.repack(sizes[engine.global_steps])
        if engine.released and not engine.wait_for_recall():
            break
    return losses


def _one(samples: list[Any]) -> Any:
    """A micro-batch of one sample, which is one already."""
    return samples[0]
