"""Models some of whose layers have to be on one stage; every function here runs on a rank."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import ds_dynmo
from ds_dynmo.engine.balancing.decentralized import decide_among_neighbours
from ds_dynmo.engine.balancing.policy import DecisionInput
from ds_dynmo.engine.comm.communicator import Communicator
from ds_dynmo.errors import ConfigError, PartitionError
from ds_dynmo.layer_groups import LayerGroups
from ds_dynmo.partitioners import MemoryModel, propose
from tests.distributed import checkpoint_workloads
from tests.distributed.workloads import VOCABULARY, WIDTH, Case, Embedding, batches, build, config, loss, seeded, state

BLOCKS = 5
LAYERS = BLOCKS + 3  # an embedding before the blocks, a norm and a head after them
HEAD_WIDTH = 400  # makes the head heavier than all other layers


class MaskedEmbedding(Embedding):
    """Hidden states, and which position attends to which."""

    def forward(self, tokens: torch.Tensor) -> Any:
        length = tokens.shape[1]
        mask = torch.ones(len(tokens), length, length, dtype=torch.bool).tril()
        return super().forward(tokens), mask


class MaskedBlock(nn.Module):
    """Mixes each position with those that it attends to, and hands the mask on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(seeded((WIDTH, WIDTH), 10 * index))

    def forward(self, inputs: Any) -> Any:
        hidden, mask = inputs
        assert mask.dtype == torch.bool
        weights = mask.to(hidden.dtype)
        mixed = (weights / weights.sum(-1, keepdim=True)) @ hidden
        return hidden + torch.tanh(mixed @ self.mix), mask


class LastNorm(nn.LayerNorm):
    """Hands on one tensor, and no mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, inputs: Any) -> torch.Tensor:
        return super().forward(inputs[0])


class WideHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(seeded((WIDTH, HEAD_WIDTH), 1))
        self.down = nn.Parameter(seeded((HEAD_WIDTH, VOCABULARY), 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(hidden @ self.up) @ self.down


class GPT2ModelPipe(PipelineModule):
    """Named as in transpeeder: by this name DeepSpeed 0.19.8 takes the last tensor of a message for a mask."""


def masked_layers() -> list[Any]:
    blocks = [LayerSpec(MaskedBlock, index) for index in range(BLOCKS)]
    return [LayerSpec(MaskedEmbedding, 1), *blocks, LayerSpec(LastNorm), LayerSpec(WideHead)]


def masked_engine(case: Case) -> Any:
    torch.manual_seed(0)
    module = GPT2ModelPipe(
        layers=masked_layers(), num_stages=case.stages, loss_fn=loss, partition_method="type:maskedblock"
    )
    return ds_dynmo.initialize(
        model=module,
        model_parameters=list(module.parameters()),
        config=config(case),
    )[0]


def train_masked(case: Case, moves: Sequence[Sequence[int]], steps: int) -> dict[str, Any]:
    """Train ``steps`` batches, going to the next of ``moves`` after each."""
    engine = masked_engine(case)
    data, losses, waiting = batches(engine), [], list(moves)
    for _ in range(steps):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
    return {
        "losses": losses,
        "evaluation": engine.eval_batch(batches(engine, seed=7)).item(),
        "state": state(engine),
        "partition": engine.partition,
        "partitions": [list(report.new_partition) for report in engine.reports],
        "replica": engine.grid.get_data_parallel_id(),
    }


def save_masked(case: Case, folder: str, move: Sequence[int], steps: int) -> dict[str, Any]:
    """Train, move, save, and train as much again."""
    engine = masked_engine(case)
    data = batches(engine)
    for _ in range(steps):
        engine.train_batch(data)
    engine.rebalance(move)
    engine.save_checkpoint(folder)
    return _go_on(engine, data, steps)


def load_masked(case: Case, folder: str, steps: int) -> dict[str, Any]:
    engine = masked_engine(case)
    engine.load_checkpoint(folder)
    return _go_on(engine, islice(batches(engine), steps * engine.micro_batches, None), steps)


def _go_on(engine: Any, data: Iterator[Any], steps: int) -> dict[str, Any]:
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    replica = engine.grid.get_data_parallel_id()
    return {"losses": losses, "state": state(engine), "partition": engine.partition, "replica": replica}


# -- layers that could be anywhere --------------------------------------------------------------------


def begins_at(case: Case) -> dict[str, Any]:
    """Where an engine begins, and where it is after a batch."""
    engine = build(case)
    first = engine.partition
    engine.train_batch(batches(engine))
    return {"first": first, "then": engine.partition, "reasons": [report.reason for report in engine.reports]}


def start_of_the_run(case: Case) -> tuple[float, float]:
    """What an iteration counts as having taken at the start, and what it is predicted to take as layers are."""
    engine = build(case)
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    return engine._cost_model.first_seconds, DecisionInput.of(engine.profile).pipeline.iteration_seconds(
        engine.partition
    )


def refused_at_the_start(case: Case) -> tuple[str, str]:
    try:
        build(case)
    except (ConfigError, PartitionError) as error:
        return type(error).__name__, str(error)
    return "built", ""


def refused_moves(case: Case, partition: Sequence[int]) -> dict[str, Any]:
    """Go where it may not, by a rebalance and by a re-packing; train on."""
    engine = build(case)
    data, errors = batches(engine), []
    losses = [engine.train_batch(data).item()]
    before = engine.partition
    for move in (engine.rebalance, lambda to: engine.repack(partition=to), lambda to: engine.repack(engine.num_stages)):
        try:
            move(partition)
        except PartitionError as error:
            errors.append(str(error))
    assert engine.partition == before
    losses.append(engine.train_batch(data).item())
    return {"losses": losses, "errors": errors}


def repack_by_hand(case: Case, sizes: Sequence[Any]) -> dict[str, Any]:
    """After each batch go on with the next of ``sizes``, numbers of stages or partitions; and train one more."""
    engine = build(case)
    data = batches(engine)
    found: dict[str, Any] = {"losses": [], "partitions": [], "errors": [], "most": []}
    while engine.global_steps <= len(sizes):
        found["losses"].append(engine.train_batch(data).item())
        if engine.global_steps > len(sizes):
            break
        size = sizes[engine.global_steps - 1]
        found["most"].append(engine.most_stages())
        try:
            engine.repack(partition=size) if isinstance(size, list) else engine.repack(size)
        except PartitionError as error:
            found["errors"].append(str(error))
        if engine.released and not engine.wait_for_recall():
            return found
        found["partitions"].append(engine.partition)
    engine.dismiss_parked()
    return found


def stock_checkpoint(case: Case, folder: str, write: bool) -> dict[str, Any]:
    """Written without a "dynmo" block, or loaded with one; what three more batches come to."""
    if write:
        engine = build(replace(case, dynmo=None, start=None))
        data = batches(engine)
        for _ in range(checkpoint_workloads.STEPS):
            engine.train_batch(data)
        engine.save_checkpoint(folder)
        return {"losses": [engine.train_batch(data).item() for _ in range(checkpoint_workloads.STEPS)]}
    engine = build(case)
    engine.load_checkpoint(folder)
    found = {"partition": engine.partition}
    return {**found, "losses": checkpoint_workloads.train_on(engine, checkpoint_workloads.STEPS)}


def neighbours_and_all_at_once(stages: int, seed: int) -> tuple[list[Any], list[Any]]:
    """Where diffusion lands between ranks, and in memory; None: where nothing fits."""
    chooser = random.Random(seed)
    module = PipelineModule(layers=masked_layers(), num_stages=stages, loss_fn=loss, partition_method="uniform")
    comm, stage = Communicator(module.mpu(), torch.device("cpu"), 30.0), module.stage_id
    among_neighbours, at_once = [], []
    for _ in range(12):
        groups = LayerGroups((0, *sorted(chooser.sample(range(1, 13), 7)), 13))
        start = groups.nearest([0, *sorted(chooser.sample(range(1, 13), stages - 1)), 13])
        costs = [chooser.choice([0.0, 1.0, chooser.random()]) for _ in range(13)]
        static, activation, inputs = (tuple(chooser.randrange(most) for _ in range(13)) for most in (9, 9, 4))
        memory = MemoryModel(static, activation, inputs, (70,) * stages, 4, chooser.choice([0, 2, 3]))
        own = costs[start[stage] : start[stage + 1]]
        among_neighbours.append(
            _landed(decide_among_neighbours, own, start, memory, stage, comm, groups=groups),
        )
        given: dict[str, Any] = {"memory": memory, "pipeline": None, "speeds": None, "groups": groups}
        at_once.append(_landed(propose, "diffusion", costs, stages, start=start, **given))
    return among_neighbours, at_once


def _landed(decide: Callable[..., Any], *args: Any, **options: Any) -> list[int] | None:
    try:
        return list(decide(*args, **options))
    except PartitionError:
        return None
