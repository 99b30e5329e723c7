"""Optimizers whose step counts are on the accelerator: they follow layers, and are never pickled there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import ds_dynmo
from tests.support.configs import Case, config, parameter_groups
from tests.support.harness import run, run_each
from tests.support.models import module_of
from tests.support.stand_in import Accelerated
from tests.support.training import batches, check_moves_changed_nothing, outcome_of, train_and_move

pytestmark = pytest.mark.ranks


def build(case: Case, **optimizer: Any) -> Any:
    """Build an engine with torch's AdamW and these options."""
    module = module_of(case)
    settings = config(case)
    settings["optimizer"]["params"].update(optimizer)
    parameters = parameter_groups(module, case.groups)
    return ds_dynmo.initialize(model=module, model_parameters=parameters, config=settings)[0]


def train_fused(case: Case, moves: Sequence[Sequence[int]]) -> dict[str, Any]:
    engine = build(case, fused=True)
    assert all(group["fused"] for group in engine.basic_optimizer.param_groups)
    found = outcome_of(engine, train_and_move(engine, batches(engine), moves, 4))
    found["state"]["shards"].clear()  # on a CPU torch's fused kernel rounds the last elements of a buffer differently
    return found


@pytest.mark.parametrize(
    "precision", ["bf16 zero1", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fp32", "bf16"))]
)
def test_moves_change_nothing_under_a_fused_optimizer(precision: str) -> None:
    """Not in fp32 with ZeRO-1, whose weights are the buffers that the kernel rounds differently."""
    case = Case(precision=precision, groups="sparse", clip=0.0 if "zero1" in precision else 1.0)
    still, moved = run_each(2, train_fused, (case, []), (case, [[0, 2, 8], [0, 7, 8], [0, 4, 8]]))
    check_moves_changed_nothing(still, moved)


def send_accelerated() -> dict[str, Any]:
    """Gather state that is on an accelerator, and state without data."""
    engine = build(Case(precision="bf16"))
    engine.train_batch(batches(engine))
    comm, rank = engine.stage.comm, engine.global_rank
    for held in engine.basic_optimizer.state.values():
        held["step"] = Accelerated(held["step"])
    every = comm.gather_objects(engine.stage.state.take_inventory())
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


def test_state_on_an_accelerator_is_pickled_on_the_cpu() -> None:
    for result in run(2, send_accelerated):
        assert result["steps"] == [(torch.Tensor, 1.0)] * 2
        assert result["gathered"] == [0.0, 1.0] and result["broadcast"] == 0.0
        assert "ranks [1]" in result["message"] and "device meta: it has no data" in result["message"]
