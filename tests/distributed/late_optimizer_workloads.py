"""Programs that give the engine its optimizer, or change it, after ``initialize``; every function runs on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

import ds_dynmo
from ds_dynmo.errors import ConfigError, MigrationError
from tests.distributed.workloads import Case, batches, config, layers, loss, state

STEPS = 6
MOVES = [[0, 1, 6], [0, 4, 6], [0, 2, 6], [0, 5, 6], [0, 3, 6]]


def without_optimizer(case: Case, initialize: Callable[..., Any] = ds_dynmo.initialize) -> Any:
    """An engine that knows of no optimizer yet."""
    torch.manual_seed(0)
    module = PipelineModule(
        layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform", topology=case.topology
    )
    return initialize(model=module, config=config(replace(case, optimizer="none")))[0]


def give_optimizer(engine: Any, parameters: list[Any] | None = None, lr: float = 0.03) -> None:
    """As diffusion-pipe does: parameter groups of this stage's own, and a function that makes the optimizer."""
    parameters = list(engine.module.parameters()) if parameters is None else parameters
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    engine._configure_optimizer(lambda given: torch.optim.AdamW(given, lr=lr), [g for g in groups if g["params"]])


def train(case: Case, moves: list[list[int]], again: bool = False) -> dict[str, Any]:
    """Train with a late optimizer, moving after every batch; ``again``: another optimizer takes over in the middle."""
    engine = without_optimizer(case)
    give_optimizer(engine)
    losses = []
    data = batches(engine)
    waiting = list(moves)
    for step in range(STEPS):
        losses.append(engine.train_batch(data).item())
        if waiting:
            engine.rebalance(waiting.pop(0))
        if again and step == 2:
            give_optimizer(engine, lr=0.01)
    return {
        "losses": losses,
        "evaluations": [],
        "state": state(engine),
        "moved": sum(report.layers_moved for report in engine.reports),
        "replica": engine.grid.get_data_parallel_id(),
    }


def train_stock(case: Case) -> list[float]:
    """The same in DeepSpeed's own engine."""
    import deepspeed

    engine = without_optimizer(case, deepspeed.initialize)
    give_optimizer(engine)
    data = batches(engine)
    return [engine.train_batch(data).item() for _ in range(STEPS)]


def moved_before_it_came(case: Case) -> str:
    """The parameters were collected before layers moved: some belong to no layer any more."""
    engine = without_optimizer(case)
    parameters = list(engine.module.parameters())
    engine.rebalance([0, 1, 6])
    try:
        give_optimizer(engine, parameters)
    except ConfigError as error:
        return str(error)
    return "taken"


def refused(case: Case, how: str) -> dict[str, Any]:
    """An optimizer that does not train what is trainable on the last stage, in one way or another."""
    engine = without_optimizer(case)
    give_optimizer(engine)
    data = batches(engine)
    losses = [engine.train_batch(data).item()]
    optimizer = engine.basic_optimizer
    if engine.stage_id == 1:
        if how == "left out":
            optimizer.param_groups[0]["params"].pop()
        elif how == "foreign":
            optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.zeros(3)))
        else:
            engine.optimizer = torch.optim.SGD(list(engine.module.parameters()), lr=0.1)
    try:
        engine.rebalance([0, 1, 6])
    except MigrationError as error:
        message, harmless = str(error), error.harmless
    else:
        message, harmless = "moved", False
    losses += [engine.train_batch(data).item() for _ in range(2)]
    return {"message": message, "harmless": harmless, "partition": engine.partition, "losses": losses}


def save_and_load(stages: int, folder: str) -> list[float]:
    """Save at two stages in mid-run and go on; or load that at so many stages."""
    case = Case(stages=stages, blocks=3, dynmo={"interval": 0})
    engine = without_optimizer(case)
    give_optimizer(engine)
    data = batches(engine)
    if stages == 2:
        for move in ([0, 1, 6], [0, 4, 6]):
            engine.train_batch(data)
            engine.rebalance(move)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        for _ in range(2 * case.micro_batches):
            next(data)
    return [engine.train_batch(data).item() for _ in range(3)]
