"""Runs that re-pack; every function runs on a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ds_dynmo.errors import ReleasedError
from ds_dynmo.models import dynamic_cases
from tests.support import case_runs
from tests.support.case_runs import CaseRun
from tests.support.checkpoints import data_after
from tests.support.configs import Case
from tests.support.training import batches, build, drop_decision, state

Sizes = Mapping[int, int | list[int]]  # by step: the number of stages, or the partition, to re-pack to after it


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, int | str | bool | None)


def attributes(engine: Any) -> dict[str, Any]:
    """Return all plain attributes of the engine, its module, grid and optimizer: all that is built from the world."""
    optimizer = engine.stage.optimizer.adapter._wrapper if engine.stage.optimizer.adapter is not None else None
    holders = {"engine": engine, "module": engine.module, "grid": engine.grid, "optimizer": optimizer}
    return {
        f"{place}.{name}": value
        for place, holder in holders.items()
        if holder is not None
        for name, value in vars(holder).items()
        if isinstance(value, int | str | tuple | list | bool | None) and _plain(value)
    }


def train_and_repack(case: Case, sizes: Sizes, steps: int, *, folder: str = "", first: int = 0) -> dict[str, Any]:
    """Train ``steps`` batches, and re-pack between them.

    Args:
        folder: to save in after each batch; "": nowhere.
        first: of the checkpoint there to begin with; 0: none.
    """
    engine = build(case)
    if first:
        engine.load_checkpoint(folder, tag=f"global_step{first}")
    data = data_after(engine, first)
    found: dict[str, Any] = {"losses": {}, "state": {}, "attributes": {}}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        if folder and not first:
            engine.save_checkpoint(folder)
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(partition=wanted) if isinstance(wanted, list) else engine.repack(wanted)
        if engine.released:
            with pytest.raises(
                ReleasedError, match=r"engine\.train_batch: this rank was released after step"
            ) as refused:
                engine.train_batch(data)
            with pytest.raises(ReleasedError, match=r"engine\.layers: this rank was released"):
                engine.layers()
            return {**found, "released": engine.global_steps, "refused": str(refused.value)}
    engine.wait_for_save()
    found["state"] = state(engine)
    found["evaluation"] = engine.eval_batch(batches(engine, seed=7)).item()
    found["attributes"] = attributes(engine)
    found["reports"] = engine.repacks
    found["partition"] = engine.partition
    return found


def train_alone(case: Case, steps: int) -> dict[str, Any]:
    """Train as :func:`train_and_repack` does, without re-packing."""
    return train_and_repack(case, {}, steps)


def train_case(case_run: CaseRun, sizes: Sizes) -> dict[str, Any]:
    """Train a dynamic case, re-packed where an automatic decision would be: before the case sees the batch."""
    engine, model = case_runs.build(case_run)
    data = case_runs.batches(engine, model)
    cases = dynamic_cases(model, engine, total_steps=case_run.steps)
    found: dict[str, Any] = {"losses": {}, "state": {}}
    while engine.global_steps < case_run.steps:
        for case in cases:
            case.before_batch(engine.global_steps)
        drop_decision(engine)
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(wanted)
        if engine.released:
            return found
        for case in cases:
            case.after_batch(engine.global_steps)
    return {**found, "state": state(engine)}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' states to that of the whole model."""
    whole: dict[str, Any] = {}
    shards: dict[str, list[tuple[int, bytes]]] = {}
    for result in results:
        own = dict(result["state"])
        for key, part in own.pop("shards", {}).items():
            shards.setdefault(key, []).append(part)
        whole.update(own)
    whole.update({key: b"".join(data for _, data in sorted(set(parts))) for key, parts in shards.items()})
    return whole


def losses(results: list[dict[str, Any]]) -> dict[int, float]:
    """Return losses by step, which must be equal on all ranks that trained the step."""
    found: dict[int, float] = {}
    for result in results:
        for step, loss in result["losses"].items():
            assert found.setdefault(step, loss) == loss
    return found


DIFFER = {"engine.local_rank", "module.local_rank", "optimizer.device"}  # a rank keeps its device
DIFFER |= {"engine.loss", "module.curr_layer"}
