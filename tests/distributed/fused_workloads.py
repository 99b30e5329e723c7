"""Runs for test_fused.py; every function here runs on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule

import ds_dynmo
from tests.distributed.workloads import Case, batches, config, layers, loss, parameter_groups, state
from tests.stand_in import Accelerated


def build(case: Case, **optimizer: Any) -> Any:
    """With torch's AdamW and these options of it."""
    torch.manual_seed(0)
    module = PipelineModule(layers=layers(case), num_stages=case.stages, loss_fn=loss, partition_method="uniform")
    settings = config(case)
    settings["optimizer"]["params"].update(optimizer)
    parameters = parameter_groups(module, case.groups)
    return ds_dynmo.initialize(model=module, model_parameters=parameters, config=settings)[0]


def train_fused(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(case, fused=True)
    assert all(group["fused"] for group in engine.basic_optimizer.param_groups)
    data, losses = batches(engine), []
    for new in [None, *moves, None]:
        if new is not None:
            engine.rebalance(new)
        losses.append(engine.train_batch(data).item())
    return {"losses": losses, "state": state(engine)}


def send_accelerated() -> dict[str, Any]:
    """What ranks learn of state on an accelerator, and of state that has no data."""
    engine = build(Case(precision="bf16"))
    engine.train_batch(batches(engine))
    comm, rank = engine._comm, engine.global_rank
    for held in engine.basic_optimizer.state.values():
        held["step"] = Accelerated(held["step"])
    every = comm.gather_or_fail("listing what the optimizer holds", engine._state._holdings)
    value = Accelerated(torch.tensor(float(rank)))
    message = ""
    try:
        comm.gather_objects(torch.empty(2, device="meta") if rank == 1 else None)
    except ds_dynmo.MigrationError as error:
        message = str(error) if error.harmless else "fatal"
    return {
        "steps": [(type(held.scalars[0]["step"]), held.scalars[0]["step"].item()) for held in every],
        "gathered": [tensor.item() for tensor in comm.gather_objects(value)],
        "broadcast": comm.broadcast_object(value).item(),
        "message": message,
    }
