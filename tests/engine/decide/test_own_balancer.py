"""A balancer of the user's runs on rank 0 alone. If it fails, every rank hears of it and trains on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import logger

from ds_dynmo import ConfigError, MigrationError, PartitionError, ScheduleError, partitioners
from tests.support.configs import Case
from tests.support.harness import run, run_each
from tests.support.training import Warnings, batches, build

pytestmark = pytest.mark.ranks

FAILURES = {
    "PartitionError": PartitionError("no room"),
    "ScheduleError": ScheduleError("no order"),
    "ValueError": ValueError("no idea"),
}
SAID = {
    **{how: str(error) for how, error in FAILURES.items()},
    "nonsense": "[0, 8, 1]",
    "never": "takes longer than dynmo.timeout_seconds (0.5 s)",
}


def trained(how: str, migration: str) -> dict[str, Any]:
    """Train with a balancer that raises an error, returns no partition, or never returns."""
    calls = []

    @partitioners.register(how)
    def balancer(costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: Any) -> Sequence[int]:
        calls.append(dist.get_rank())
        if how in FAILURES:
            raise FAILURES[how]
        if how == "never":
            threading.Event().wait()
        return [0, 8, 1] if how == "nonsense" else start

    block = {"interval": 2, "stop_step": 2, "balancer": how, "balance_by": "parameters", "migration": migration}
    engine = build(Case(start=(0, 1, 8), dynmo=block))
    if how == "never":
        section = engine.dynmo.model_copy(update={"timeout_seconds": 0.5})
        engine.rebalancer.decider._config = section
    logged, warned, data = Warnings(logger), Warnings(), batches(engine)
    result: dict[str, Any] = {"losses": [engine.train_batch(data).item() for _ in range(4)]}
    result.update(partition=engine.partition, warned=list(warned.messages), failure=engine.rebalancer.failure)
    try:
        engine.rebalance()
    except (PartitionError, MigrationError) as error:
        result["by hand"] = type(error), getattr(error, "harmless", True)
    result["losses"].append(engine.train_batch(data).item())
    return {**result, "calls": calls, "logged": [text for text in logged.messages if "Traceback" in text]}


@pytest.mark.parametrize("migration", ["blocking", "background"])
def test_a_balancer_that_fails_changes_nothing_and_its_cause_is_said(migration: str) -> None:
    still, *failing = run_each(2, trained, *((how, migration) for how in ("nothing", *SAID)))
    for how, results in zip(SAID, failing):
        for rank, result in enumerate(results):
            assert result["calls"] == ([0, 0] if rank == 0 else [])  # at the interval and by hand
            assert result["losses"] == still[rank]["losses"] and result["partition"] == [0, 1, 8]
            assert SAID[how] in str(result["failure"]), result["failure"]
            assert len(result["warned"]) == (rank == 0), result["warned"]
            kind = PartitionError if how in ("PartitionError", "nonsense") else MigrationError
            assert isinstance(result["failure"], kind) and result["by hand"] == (kind, True)
            unexpected = how in ("ScheduleError", "ValueError")
            assert len(result["logged"]) == (2 if unexpected and rank == 0 else 0)  # by hand too
            assert all(SAID[how] in text and "in balancer" in text for text in result["logged"])


def refused() -> str:
    partitioners.register("no memory")(lambda costs, num_stages, start: start)
    with pytest.raises(ConfigError) as error:
        build(Case(dynmo={"balancer": "no memory"}))
    torch.distributed.barrier()  # a rank that ends would leave the others while they still connect their groups
    return str(error.value)


def test_a_balancer_that_cannot_be_called_is_refused_by_initialize() -> None:
    assert all("its signature is (costs, num_stages, start)" in text for text in run(2, refused))
