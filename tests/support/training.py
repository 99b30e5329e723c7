"""Build an engine, train it, and read its state; every function runs on a rank."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.decide.cycle import Settled
from ds_dynmo.engine.measure.profiler import CpuClock, EventClock
from ds_dynmo.engine.move.tensors import dense_parts
from ds_dynmo.models import local_layers
from ds_dynmo.plan import MigrationPlan, RebalanceReport
from tests.support.configs import Case, client_optimizer, config, parameter_groups
from tests.support.models import SEQUENCE, VOCABULARY, SleepingLayer, layers, loss, module_of


class Warnings(logging.Handler):
    """Keeps the warnings of this rank, in our log or another."""

    def __init__(self, log: logging.Logger | None = None) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []
        (log or logging.getLogger("DynMo")).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def without_optimizer(case: Case, initialize: Callable[..., Any] = ds_dynmo.initialize) -> Any:
    """Build an engine that has no optimizer yet."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform", topology=case.topology
    )
    return initialize(model=module, config=config(replace(case, optimizer="none")))[0]


def give_optimizer(engine: Any, parameters: list[Any] | None = None, lr: float = 0.03) -> None:
    """Give an engine its optimizer as diffusion-pipe does: this stage's parameter groups, and a function."""
    parameters = list(engine.module.parameters()) if parameters is None else parameters
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    engine._configure_optimizer(lambda given: torch.optim.AdamW(given, lr=lr), [g for g in groups if g["params"]])


def whole(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all stages. Replicas must agree, except on what each holds for itself."""
    replicas: dict[int, dict[str, Any]] = {}
    shards: dict[str, list[tuple[int, bytes]]] = {}
    for result in results:
        state = dict(result["state"])
        for key, shard in state.pop("shards").items():
            shards.setdefault(key, []).append(shard)
        replicas.setdefault(result["replica"], {}).update(state)
    own = {key: value for state in replicas.values() for key, value in state.items() if key.startswith("replica ")}
    shared = [{key: state[key] for key in state.keys() - own.keys()} for state in replicas.values()]
    assert all(state == shared[0] for state in shared)
    return {**shared[0], **own, **{key: b"".join(part for _, part in sorted(parts)) for key, parts in shards.items()}}


def build(
    case: Case,
    make_layers: Callable[[Case], list[Any]] = layers,
    training_data: Any = None,
    more: dict[str, Any] | None = None,
    partition_method: str = "uniform",
) -> Any:
    """Build an engine for ``case`` that begins at ``case.start`` (default: DeepSpeed's ``partition_method``).

    Args:
        more: blocks of DeepSpeed's configuration.
    """
    module = module_of(case, make_layers, partition_method=partition_method)
    dynmo = case.dynmo
    if dynmo is not None and case.start is not None:
        dynmo = {**dynmo, "initial_partition": list(case.start)}
    parameters = parameter_groups(module, case.groups)
    return ds_dynmo.initialize(
        model=module,
        model_parameters=parameters,
        optimizer=client_optimizer(case, parameters),
        training_data=training_data,
        config={**config(replace(case, dynmo=dynmo)), **(more or {})},
    )[0]


def micro_batch(number: int, replica: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10_000 * seed + 100 * number + replica)
    tokens = torch.randint(0, VOCABULARY, (2, SEQUENCE + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def batches(engine: Any, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield micro-batches that depend only on their number and the present replica."""
    replica = engine.grid.get_data_parallel_id()
    return (micro_batch(number, replica, seed) for number in itertools.count())


def layers_of(engine: Any) -> dict[int, nn.Module]:
    """Return the modules of this stage's layers by number; a module that several layers share appears once."""
    found: dict[int, nn.Module] = {}
    for number, layer in local_layers(engine.module):
        if all(layer is not other for other in found.values()):
            found[number] = layer
    return found


def drop_decision(engine: Any) -> None:
    """Drop a pending decision: only the test moves layers."""
    engine.rebalancer.go(Settled(moved=False))


def reports_of(engine: Any) -> list[RebalanceReport]:
    """Return the reports, which rank 0 has, on every rank. Collective."""
    of_first: list[RebalanceReport] = gather(engine.reports)[0]
    return of_first


def gather(value: Any) -> list[Any]:
    """Gather the value of every rank, in rank order."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


def partitions(case: Case, seed: int, count: int) -> list[list[int]]:
    """Return a random sequence of partitions: of chains, and under a schedule of two chunks per stage of these too."""
    chooser = random.Random(seed)
    inner, stages = range(1, case.num_layers), case.stages
    has_pairs = (case.dynmo or {}).get("schedule") in ("v", "loop", "auto") and case.num_layers >= 2 * stages
    chunks = [chooser.choice((stages, 2 * stages, 2 * stages)) if has_pairs else stages for _ in range(count)]
    return [[0, *sorted(chooser.sample(inner, number - 1)), case.num_layers] for number in chunks]


def under_a_random_schedule(case: Case, chooser: random.Random) -> Case:
    """Return ``case`` under one of the schedules that its layers are enough for."""
    kinds = ["1f1b", "zero_bubble", "v", "v", "loop", "loop", "auto"]
    kind = chooser.choice(kinds if case.num_layers >= 2 * case.stages else kinds[:2])
    return replace(case, dynmo={"interval": 0, "schedule": kind})


def raw(tensor: torch.Tensor) -> bytes:
    parts = [part.cpu().contiguous().view(-1).view(torch.uint8) for part in dense_parts(tensor)]
    return b"".join(part.numpy().tobytes() for part in parts)


def state(engine: Any) -> dict[str, Any]:
    """Return weights and optimizer state of this rank's layers by name; shards as (first element, bytes)."""
    found: dict[str, Any] = {"shards": {}}
    place = f"slice {engine.grid.get_slice_parallel_rank()}: " if engine.grid.slice_parallel_size > 1 else ""
    optimizer = engine.basic_optimizer
    if engine.stage.optimizer.adapter is None:
        engine.stage.state.match_layers()
    members = (
        [group.values() for group in engine.stage.state.shards.planned(detached=False)]
        if engine.stage.optimizer.adapter
        else [group["params"] for group in optimizer.param_groups]
    )
    numbers = {parameter: number for number, group in enumerate(members) for parameter in group}
    for index, module in engine.stage.layers.counted_modules().items():
        for name, parameter in module.named_parameters():
            own = getattr(parameter, "replica_own", False)
            key = f"replica {engine.grid.get_data_parallel_id()}: " * own + f"{place}{index}.{name}"
            found[key] = raw(parameter)
            for what, value in engine.stage.state.state_of(parameter).items():
                if isinstance(value, tuple):
                    found["shards"][f"{key}/{what}"] = (value[0], raw(value[1]))
                else:
                    found[f"{key}/{what}"] = raw(value) if isinstance(value, torch.Tensor) else value
            if parameter in numbers:
                group = optimizer.param_groups[numbers[parameter]]
                found[f"{key}/group"] = (numbers[parameter], group["lr"], group["weight_decay"])
    return found


def train(
    case: Case, moves: Sequence[Sequence[int]], steps: int, every: int, background: bool = False
) -> dict[str, Any]:
    """Train ``steps`` batches, and go to the next of ``moves`` after every ``every`` of them."""
    engine = build(case)
    data = batches(engine)
    losses, evaluations = [], []
    waiting = list(moves)
    for step in range(steps):
        losses.append(engine.train_batch(data).item())
        if step % every == every - 1 and waiting:
            engine.rebalance(waiting.pop(0), background=background)
        if step == steps // 2:
            evaluations.append(engine.eval_batch(batches(engine, seed=7)).item())
    return {**outcome_of(engine, losses), "evaluations": evaluations}


def train_and_move(
    engine: Any,
    data: Iterator[Any],
    moves: Sequence[Sequence[int]],
    steps: int,
    after: Callable[[int], None] = lambda step: None,
    background: bool = False,
) -> list[float]:
    """Train ``steps`` batches, go to the next of ``moves`` after each, and return the losses.

    Args:
        after: called with the number of the batch after each batch and its move.
        background: whether layers move while the next batch trains.
    """
    losses, waiting = [], list(moves)
    for step in range(steps):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0), background=background)
        after(step)
    return losses


def train_after(engine: Any, before: Callable[[int], None], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, call ``before`` with the number of each before it, and return :func:`outcome_of` it."""
    data, losses = batches(engine), []
    for step in range(steps):
        before(step)
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


def move_in_phases(engine: Any, partition: Sequence[int], *, overlapped: bool, check: Any = None) -> None:
    """Move to ``partition`` phase by phase.

    Args:
        overlapped: as while a batch trains.
        check: of the plan; see ``Migrator.prepare``.
    """
    plan = MigrationPlan.between(engine.partition, partition)
    if engine.migrator.prepare(plan, check, overlapped=overlapped):
        engine.migrator.start()
        while overlapped and not engine.migrator.poll():
            time.sleep(1e-3)
        engine.migrator.commit()
        engine.stage.publish_move()


def train_in_phases(case: Case, moves: Sequence[Sequence[int] | None], overlapped: bool) -> dict[str, Any]:
    """Train a batch, another one after each of ``moves``, in phases, and a last one."""
    engine = build(case)
    data, losses = batches(engine), []
    for partition in [None, *moves, None]:
        if partition is not None:
            move_in_phases(engine, partition, overlapped=overlapped)
            assert engine.partition == list(partition)
        losses.append(engine.train_batch(data).item())
    return outcome_of(engine, losses)


PROFILED = {"interval": 0, "profile": {"batches": 1, "warmup_batches": 0}}  # the first batch


def train_layers(
    case: Case,
    make_layers: Callable[[Case], list[Any]],
    moves: Sequence[Sequence[int]],
    steps: int = 5,
    has_bool_tensors: bool = False,
) -> dict[str, Any]:
    """Train ``steps`` batches of other layers, and go to the next of ``moves`` after each."""
    engine = build(case, make_layers)
    engine.has_bool_tensors = has_bool_tensors
    losses = train_and_move(engine, batches(engine), moves, steps)
    return {**outcome_of(engine, losses), "norm": float(engine.get_global_grad_norm() or 0.0)}


def changing_lengths(engine: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for number in itertools.count():
        generator = torch.Generator().manual_seed(number)
        length = (3, 6, 4)[(number // engine.micro_batches) % 3]
        tokens = torch.randint(0, VOCABULARY, (2, length + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def train_feature(
    settings: dict[str, Any], module_options: dict[str, Any], moves: Sequence[Sequence[int]], lengths: bool = False
) -> dict[str, Any]:
    """Train with a feature of DeepSpeed's.

    Args:
        settings: blocks of DeepSpeed's configuration.
        module_options: of ``PipelineModule``.
        lengths: whether sequences of each batch have another length.
    """
    case = Case(dynmo=PROFILED)
    module = module_of(case, **module_options)
    engine = ds_dynmo.initialize(
        model=module, model_parameters=list(module.parameters()), config={**config(case), **settings}
    )[0]
    data = changing_lengths(engine) if lengths else batches(engine)
    return outcome_of(engine, train_and_move(engine, data, moves, 5))


def outcome_of(engine: Any, losses: list[float]) -> dict[str, Any]:
    """Return what :func:`check_moves_changed_nothing` compares."""
    return {
        "losses": losses,
        "state": state(engine),
        "partition": engine.partition,
        "moved": sum(report.layers_moved for report in reports_of(engine)),
        "blocking": sum(report.moved and report.background_seconds is None for report in reports_of(engine)),
        "replica": engine.grid.get_data_parallel_id(),
    }


def check_moves_changed_nothing(still: list[dict[str, Any]], moved: list[dict[str, Any]]) -> None:
    """Check that two runs, the second with moves, are equal to the bit."""
    assert moved[0]["moved"] > 0 and still[0]["moved"] == 0
    assert [result["losses"] for result in moved] == [result["losses"] for result in still]
    assert whole(moved) == whole(still)


def partition_of(case: Case) -> tuple[list[int], list[int]]:
    """Return the partition of the engine as built, and after a batch."""
    engine = build(case, partition_method="type:Embedding|Head")
    built = [report.old_partition for report in reports_of(engine)]
    engine.train_batch(batches(engine))
    return [list(partition) for partition in built], engine.partition


def sleeping_engine(block: dict[str, Any], seconds: Sequence[float], stages: int) -> tuple[Any, Iterator[Any]]:
    module = PipelineModule(
        layers=[LayerSpec(SleepingLayer, s) for s in seconds],
        num_stages=stages,
        loss_fn=lambda output, label: (output - label).square().mean(),
        partition_method="uniform",
    )
    settings = {**config(Case(micro_batches=4)), "dynmo": block}
    engine = ds_dynmo.initialize(model=module, model_parameters=list(module.parameters()), config=settings)[0]

    def data() -> Iterator[Any]:
        while True:
            yield torch.ones(2, 4), torch.zeros(2, 4)

    return engine, data()


def use_virtual_clock() -> None:
    """On this rank, measure layers with a clock that only their sleep advances."""
    elapsed = [0.0]

    def sleep(seconds: float) -> None:
        elapsed[0] += seconds

    time.sleep = sleep
    for clock in (CpuClock, EventClock):
        clock.now = lambda _: elapsed[0]  # type: ignore[attr-defined]
        clock.seconds_between = CpuClock.seconds_between  # type: ignore[attr-defined]


def freeze(engine: Any, prefix: int) -> None:
    """Freeze the leading layers, and thaw the others."""
    for index, module in layers_of(engine).items():
        for parameter in module.parameters():
            parameter.requires_grad_(index >= prefix)
            if index < prefix:
                parameter.grad = None


def raw_layer(module: nn.Module) -> list[bytes]:
    return [raw(parameter) for parameter in module.parameters()]


def train_frozen(case: Case, frozen: dict[int, int], moves: dict[int, list[int]], steps: int = 7) -> dict[str, Any]:
    """Train, and freeze so many leading layers before the batches ``frozen``, and move before those of ``moves``."""
    engine = build(case)
    data, losses, prefix = batches(engine), [], 0
    thawed = []
    for step in range(steps):
        if step in frozen:
            prefix = frozen[step]
            freeze(engine, prefix)
            engine.model_changed(f"{prefix} layers are frozen")
        if step in moves:
            engine.rebalance(moves[step])
        drop_decision(engine)
        before = {index: raw_layer(module) for index, module in layers_of(engine).items()}
        losses.append(engine.train_batch(data).item())
        thawed += [
            (step, index)
            for index, module in layers_of(engine).items()
            if index < prefix and raw_layer(module) != before[index]
        ]
    return {"losses": losses, "state": state(engine), "replica": engine.grid.get_data_parallel_id(), "thawed": thawed}
