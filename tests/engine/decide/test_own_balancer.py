"""A balancer of the user's that fails, or finds something else, on one rank: every rank hears of it and trains on."""

from __future__ import annotations

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
HOWS = ("nothing", "another partition", *FAILURES)


def trained(how: str) -> dict[str, Any]:
    """Train with a balancer that raises an error, or returns another partition, on rank 1 only."""

    @partitioners.register(how)
    def balancer(costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: Any) -> Sequence[int]:
        if how == "nothing" or dist.get_rank() == 0:
            return start
        if how in FAILURES:
            raise FAILURES[how]
        return partitioners.balanced(costs, num_stages)

    block = {"interval": 2, "stop_step": 2, "balancer": how, "balance_by": "parameters"}  # no noise, as of times
    engine = build(Case(start=(0, 1, 8), dynmo=block))
    logged, warned, data = Warnings(logger), Warnings(), batches(engine)
    result: dict[str, Any] = {"losses": [engine.train_batch(data).item() for _ in range(3)]}
    result.update(partition=engine.partition, warned=list(warned.messages), failure=engine.rebalancer.failure)
    try:
        engine.rebalance()
    except (PartitionError, MigrationError) as error:
        result["by hand"] = type(error), getattr(error, "harmless", True)
    result["losses"].append(engine.train_batch(data).item())
    return {**result, "logged": [text for text in logged.messages if "Traceback" in text]}


def test_a_balancer_that_differs_on_one_rank_changes_nothing_and_its_cause_is_said() -> None:
    still, *differing = run_each(2, trained, *((how,) for how in HOWS))
    for how, results in zip(HOWS[1:], differing):
        expected = (
            "[1], first with "
            if how in FAILURES
            else "ranks differ: [0, 1, 8] -> [0, 1, 8] on ranks [0], [0, 1, 8] -> [0, "
        )
        for rank, result in enumerate(results):
            assert result["losses"] == still[rank]["losses"] and result["partition"] == [0, 1, 8]
            assert expected in str(result["failure"]) and "No layer has moved" in str(result["failure"])
            assert len(result["warned"]) == (rank == 0), result["warned"]  # after batch 2
            kind = PartitionError if how == "PartitionError" else MigrationError
            assert isinstance(result["failure"], kind) and result["by hand"] == (kind, True)
            assert len(result["logged"]) == (2 if how in FAILURES and rank == 1 else 0)  # by hand too
            assert all(str(FAILURES[how]) in text and "in balancer" in text for text in result["logged"])


def refused() -> str:
    partitioners.register("no memory")(lambda costs, num_stages, start: start)
    with pytest.raises(ConfigError) as error:
        build(Case(dynmo={"balancer": "no memory"}))
    torch.distributed.barrier()  # a rank that ends would leave the others while they still connect their groups
    return str(error.value)


def test_a_balancer_that_cannot_be_called_is_refused_by_initialize() -> None:
    assert all("its signature is (costs, num_stages, start)" in text for text in run(2, refused))
