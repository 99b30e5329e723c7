"""Runs for test_move_memory.py; every function here runs on a rank."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ds_dynmo
from ds_dynmo.engine.profiling import layer_sizes
from ds_dynmo.partitioners import migration_peaks
from ds_dynmo.plan import HeldBytes, MigrationPlan
from tests.distributed.workloads import WIDTH, Case, Embedding, Head, batches, build, project, state


class TensorBytes(TorchDispatchMode):
    """The most bytes that all tensors of this process held at once while it was on, whoever held them.

    Attributes:
        began: bytes of all tensors at the start.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        gc.collect()
        for value in gc.get_objects():
            if isinstance(value, torch.Tensor):
                self._add(value)
        self.began = self.peak = self._held()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, torch.Tensor):
                self._add(value)
        self.peak = max(self.peak, self._held())
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided and tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def _held(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        return sum(size for _, size in self._storages.values())


class Wide(nn.Module):
    """Large next to anything that is no layer's; sizes differ."""

    def __init__(self, index: int) -> None:
        super().__init__()
        inner = 4096 * (2 + index % 3)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(inner))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))) * self.mask.to(hidden.dtype))


def wide_layers(case: Case) -> list[Any]:
    ends: list[Any] = [LayerSpec(Embedding, 1), LayerSpec(Head, 2)]
    if case.tied:
        ends = [TiedLayerSpec("tied", Embedding, 1), TiedLayerSpec("tied", Embedding, 1, forward_fn=project)]
    return [ends[0], *[LayerSpec(Wide, index) for index in range(case.blocks)], nn.Identity(), ends[1]]


def held_now(engine: Any) -> tuple[HeldBytes, ...]:
    return layer_sizes.held_from(engine._comm.max_over_world(layer_sizes.held_table(engine._layers, engine._state)))[0]


def peaks(case: Case, moves: Sequence[Sequence[int]]) -> list[tuple[int, int, int, int]]:
    """Of each move: bytes that this rank held before, most bytes while it went on, and what is said of both."""
    engine = build(case, wide_layers)
    data, found = batches(engine), []
    for new in moves:
        engine.train_batch(data), engine.train_batch(data)
        held, uses = held_now(engine), engine._layers.first_uses()
        plan = MigrationPlan.between(engine.partition, new)
        said = migration_peaks(plan, held, uses)[engine.stage_id]
        with TensorBytes() as tensors:
            engine.rebalance(new)
        resting = sum((held[layer] for layer in range(*plan.old[engine.stage_id :][:2])), start=HeldBytes()).total
        found.append((tensors.began, tensors.peak, resting, said))
    return found


def with_limit(engine: Any, limit: int | None) -> None:
    engine.__dict__["dynmo"] = engine.dynmo.model_copy(update={"memory_limit": limit})


def refused(case: Case, how: str, folder: str) -> dict[str, Any]:
    """Ask for what takes a byte more than there is, train on, and ask again with that byte."""
    engine = build(case, wide_layers)
    data, new = batches(engine), [0, 3, case.num_layers]
    losses = [engine.train_batch(data).item() for _ in range(2)]
    if how == "load":
        engine.rebalance(new)
        engine.save_checkpoint(folder, "there")
        engine.rebalance([0, case.num_layers // 2, case.num_layers])
    if how == "shrink":
        plan = MigrationPlan.between(engine.partition, [0, case.num_layers, case.num_layers], leaving=[1])
    else:
        plan = MigrationPlan.between(engine.partition, new)
    needed = max(migration_peaks(plan, held_now(engine), engine._layers.first_uses()))
    ask = {
        "rebalance": lambda: engine.rebalance(new),
        "shrink": lambda: engine.repack(partition=[0, case.num_layers]),
        "load": lambda: engine.load_checkpoint(folder, "there"),
    }[how]
    before, message, harmless = state(engine), "", False
    with_limit(engine, needed - 1)
    try:
        ask()
    except ds_dynmo.MigrationError as error:
        message, harmless = str(error), error.harmless
    same = state(engine) == before
    losses += [engine.train_batch(data).item() for _ in range(2)]
    with_limit(engine, needed)
    ask()
    if not engine.released:
        losses += [engine.train_batch(data).item() for _ in range(2)]
    where = None if engine.released else engine.partition
    return {
        "message": message,
        "harmless": harmless,
        "numbers": (needed, needed - 1),
        "same": same,
        "losses": losses,
        "partition": where,
    }


def come_back(case: Case) -> list[Any]:
    """Give a stage back, and call it while there is no memory for what that takes."""
    engine = build(case, wide_layers)
    data = batches(engine)
    engine.train_batch(data), engine.train_batch(data)
    engine.repack(1)
    if engine.released:
        return [engine.wait_for_recall(), engine.partition]
    engine.train_batch(data)
    with_limit(engine, sum(layer.total for layer in held_now(engine)) // 2)
    message = ""
    try:
        engine.repack(2, partition=[0, 1, case.num_layers])
    except ds_dynmo.MigrationError as error:
        message = str(error) if error.harmless else "fatal"
    engine.train_batch(data)
    stayed = engine.num_stages
    with_limit(engine, None)
    engine.repack(2, partition=[0, 5, case.num_layers])
    return [message, stayed, engine.partition]


def disagree(limit: int) -> str:
    """One rank asks for the partition that there is, the other for another."""
    engine = build(Case(dynmo={"interval": 0, "memory_limit": limit}))
    engine.train_batch(batches(engine))
    try:
        engine.rebalance([0, 4 + engine.stage_id, 8])
    except ds_dynmo.MigrationError as error:
        return str(error)
    return ""
