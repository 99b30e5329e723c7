"""Runs that give ranks back and take them again; every function here runs on a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ds_dynmo import partitioners
from ds_dynmo.engine.migration import migrate
from ds_dynmo.errors import ConfigError, MigrationError, PartitionError, ReleasedError
from ds_dynmo.models import dynamic_cases
from tests.distributed import case_workloads
from tests.distributed.case_workloads import CaseRun
from tests.distributed.workloads import Case, batches, build, sleeping_engine, state

Sizes = Mapping[int, int | list[int]]  # after which step, to how many stages, or to which partition


def train(case: Case, sizes: Sizes, steps: int, halve_rates_at: int | None = None) -> dict[str, Any]:
    """Train ``steps`` batches, re-packing on the way; a rank that is released waits to be taken back.

    After ``halve_rates_at`` batches the ranks at work halve all learning rates by hand.
    """
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"home": dist.get_rank(), "losses": {}, "released": []}
    while engine.global_steps < steps:
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        if engine.global_steps == halve_rates_at:
            for group in engine.optimizer.param_groups:
                group["lr"] /= 2
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(partition=wanted) if isinstance(wanted, list) else engine.repack(wanted)
        if engine.released:
            found["released"].append(engine.global_steps)
            try:
                engine.train_batch(data)
            except ReleasedError as error:
                found["refused"] = str(error)
            if not engine.wait_for_recall():
                return {**found, "state": {}, "attributes": {}}
    found["state"] = state(engine)
    found["rates"] = engine.get_lr()
    found["evaluation"] = engine.eval_batch(batches(engine, seed=7)).item()
    found["attributes"] = attributes(engine)
    found["reports"] = engine.repacks
    found["partition"] = engine.partition
    engine.dismiss_parked()
    return found


def attributes(engine: Any) -> dict[str, Any]:
    """All plain attributes of the engine, its module, grid and optimizer: whatever was built once from the world."""
    optimizer = engine._wrapper._wrapper if engine._wrapper is not None else None
    holders = {"engine": engine, "module": engine.module, "grid": engine.grid, "optimizer": optimizer}
    return {
        f"{place}.{name}": value
        for place, holder in holders.items()
        if holder is not None
        for name, value in vars(holder).items()
        if isinstance(value, int | str | tuple | list | bool | None) and _plain(value)
    }


def _plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return isinstance(value, int | str | bool | None)


def train_alone(case: Case, steps: int) -> dict[str, Any]:
    """As :func:`train`, without re-packing, from the start."""
    return train(case, {}, steps)


def train_through_checkpoint(case: Case, folder: str, first: int, last: int) -> dict[str, Any]:
    """Train batches ``first + 1`` to ``last``, from the checkpoint at ``first`` (0: none), and save one at the end."""
    engine = build(case)
    data = batches(engine)
    if first:
        engine.load_checkpoint(folder)
        for _ in range(first * case.micro_batches):
            next(data)
    losses = {step + 1: engine.train_batch(data).item() for step in range(first, last)}
    engine.save_checkpoint(folder)
    return {"losses": losses, "state": state(engine), "attributes": attributes(engine), "partition": engine.partition}


def refusals(case: Case) -> list[str]:
    """What cannot be asked for; afterwards the engine trains as before."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    found = []
    for wanted in (0, 3, -1):
        try:
            engine.repack(wanted)
        except PartitionError as error:
            found.append(str(error))
    for partition in ([0, 0, 8], [0, 9], [0, 2, 4, 6, 8], []):
        try:
            engine.repack(partition=partition)
        except PartitionError as error:
            found.append(str(error))
    try:
        engine.repack(dist.get_rank() + 1)  # the ranks ask for different numbers
    except MigrationError as error:
        found.append(str(error))
    return [*found, str(engine.train_batch(data).item() > 0), str(engine.num_stages)]


def off(case: Case) -> list[str]:
    engine = build(case)
    try:
        engine.repack(1)
    except ConfigError as error:
        return [str(error)]
    return []


def with_little_memory(case: Case, factor: float) -> str:
    """Ask for one stage where a device has ``factor`` of what the whole model takes on one."""
    engine = build(case)
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    whole = sum(cost.static_bytes + 2 * cost.activation_bytes for cost in engine.profile.layers)
    engine.__dict__["dynmo"] = engine.dynmo.model_copy(update={"memory_limit": int(factor * whole)})
    try:
        engine.repack(1)
    except PartitionError as error:
        engine.train_batch(data)
        return str(error)
    return ""


def repack_by_itself(
    block: dict[str, Any], milliseconds: Sequence[float], later: Mapping[int, float], steps: int
) -> Any:
    """Sleeping layers that take another share of their time after the steps of ``later``."""
    stages = dist.get_world_size()
    engine, data = sleeping_engine(block, [ms / 1000 for ms in milliseconds], stages)
    sizes = {}
    while engine.global_steps < steps:
        if engine.global_steps in later:
            share = later[engine.global_steps]
            for module in engine._layers.modules().values():
                module.seconds *= share
            engine.model_changed("pruned")
        engine.train_batch(data)
        if engine.released and not engine.wait_for_recall():
            return None
        sizes[engine.global_steps] = engine.num_stages
    engine.dismiss_parked()
    return sizes, [(r.step, r.reason, r.old_stages, r.new_stages, r.verdict) for r in engine.repacks]


def rebalance_after(case: Case) -> Any:
    """Everything else goes on after a re-packing: profiles, decisions, explicit moves, checkpoints."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    engine.repack(2)
    if engine.released:
        return None
    for partition in ([0, 1, 8], [0, 7, 8]):
        engine.rebalance(partition)
        engine.train_batch(data)
    report = engine.rebalance()
    return len(report.new_partition) - 1, engine.profile.partition, engine.grid.pipe_parallel_size


def _leave(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def _fail(*_: Any, **__: Any) -> None:
    raise ValueError("no room")


def killed(case: Case, who: str) -> str:
    """A rank dies: a parked one before it is called, or one at work while it sends layers or between two worlds.

    Or it fails ("failing"), and lives.
    """
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    home = dist.get_rank()
    if who == "parked":
        engine.repack(1)
        if engine.released:
            return "parked" if home == 1 else (engine.wait_for_recall() and "came back") or "dismissed"
        try:
            engine.repack(3)
        except MigrationError as error:
            losses, parked = [engine.train_batch(data).item()], engine._repacker.parked
            engine.dismiss_parked()
            return f"{error} {len(losses)} {parked}"
        return "went on"
    if home == 2 and who == "sending":
        migrate._exchange = _leave
    elif home == 2 and who == "failing":
        migrate._rebuild = _fail
    elif home == 2:
        engine._repacker.world.begin = _leave
    try:
        engine.repack(2, partition=[0, 1, 8])
    except MigrationError as error:
        return str(error)
    except KeyboardInterrupt:
        return "gone"
    return "went on"


def train_case(case_run: CaseRun, sizes: Sizes) -> dict[str, Any]:
    """A dynamic case, re-packed as an automatic decision does it: before the case looks at what the batch did."""
    engine, model = case_workloads.build(case_run)
    data = case_workloads.batches(engine, model)
    cases = dynamic_cases(model, engine, total_steps=case_run.steps)
    for case in cases:
        engine.share_state(case.name, case)
    found: dict[str, Any] = {"losses": {}}
    while engine.global_steps < case_run.steps:
        for case in cases:
            case.before_batch(engine.global_steps)
        engine._controller.decided(moved=False)  # moves are the test's own
        loss = engine.train_batch(data).item()
        found["losses"][engine.global_steps] = loss
        wanted = sizes.get(engine.global_steps)
        if wanted is not None:
            engine.repack(wanted)
        if engine.released and not engine.wait_for_recall():
            return {**found, "state": {}}
        for case in cases:
            case.after_batch(engine.global_steps)
    found["state"] = state(engine)
    found["summaries"] = {case.name: case.summary() for case in cases}
    engine.dismiss_parked()
    return found


def with_another_balancer(case: Case) -> list[str]:
    """A balancer that knows of one number of stages only, and fails on one rank alone."""

    @partitioners.register("fails elsewhere")
    def balancer(costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: Any) -> Sequence[int]:
        if num_stages != case.stages and dist.get_rank() == 1:
            raise RuntimeError("no idea")
        return start

    engine = build(replace(case, dynmo={"interval": 0, "balancer": "fails elsewhere"}))
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    try:
        engine.repack(1)
    except MigrationError as error:
        return [str(error), str(error.harmless), str(engine.train_batch(data).item() > 0)]
    return []


def same_number(case: Case) -> Any:
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    report = engine.repack(partition=[0, 1, 8])
    engine.train_batch(data)
    return engine.partition, report.new_partition, report.layers_moved
