"""A balancer of the user's runs on rank 0 alone. If it fails, every rank hears of it and trains on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
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


def trained(name: str, hows: Sequence[str], migration: str) -> list[dict[str, Any]]:
    """Train two batches with each of ``hows``: a balancer that raises an error, returns no partition, never returns."""
    calls: list[str] = []

    @partitioners.register(name)
    def balancer(costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: Any) -> Sequence[int]:
        how = hows[len(calls) // 2]  # at the interval, and by hand
        calls.append(how)
        if how in FAILURES:
            raise FAILURES[how]
        if how == "never":
            threading.Event().wait()
        return [0, 8, 1] if how == "nonsense" else start

    block = {"interval": 2, "balancer": name, "balance_by": "parameters", "migration": migration}
    engine = build(Case(start=(0, 1, 8), dynmo=block))
    logged, warned, data, results = Warnings(logger), Warnings(), batches(engine), []
    losses = [engine.train_batch(data).item()]
    for how in hows:
        if how == "never":
            engine.rebalancer.decider._config = engine.dynmo.model_copy(update={"timeout_seconds": 0.5})
        losses += [engine.train_batch(data).item() for _ in range(2)]
        result = {"partition": engine.partition, "warned": [*warned.messages], "failure": engine.rebalancer.failure}
        try:
            engine.rebalance()
        except (PartitionError, MigrationError) as error:
            result["by hand"] = type(error), getattr(error, "harmless", True)
        result["logged"] = [text for text in logged.messages if "Traceback" in text]
        results.append({**result, "losses": losses, "calls": calls})
        warned.messages.clear(), logged.messages.clear()
    losses.append(engine.eval_batch(data).item())  # the next batch would decide
    return results


def test_a_balancer_that_fails_changes_nothing_and_its_cause_is_said() -> None:
    moves, hows = ("blocking", "background"), [*SAID]
    still, *failing = run_each(
        2, trained, ("still", ["nothing"] * len(hows), moves[0]), *((how, hows, how) for how in moves)
    )
    for kind_of_move, ranks in zip(moves, failing):
        for rank, results in enumerate(ranks):
            assert results[-1]["calls"] == ([how for how in hows for _ in range(2)] if rank == 0 else [])
            assert results[-1]["losses"] == still[rank][-1]["losses"]
            for how, result in zip(hows, results):
                said = rank, how, kind_of_move, result
                assert result["partition"] == [0, 1, 8] and SAID[how] in str(result["failure"]), said
                assert len(result["warned"]) == (rank == 0), said
                kind = PartitionError if how in ("PartitionError", "nonsense") else MigrationError
                assert isinstance(result["failure"], kind) and result["by hand"] == (kind, True), said
                unexpected = how in ("ScheduleError", "ValueError")
                assert len(result["logged"]) == (2 if unexpected and rank == 0 else 0), said  # by hand too
                assert all(SAID[how] in text and "in balancer" in text for text in result["logged"]), said


def refused() -> str:
    partitioners.register("no memory")(lambda costs, num_stages, start: start)
    with pytest.raises(ConfigError) as error:
        build(Case(dynmo={"balancer": "no memory"}))
    torch.distributed.barrier()  # a rank that ends would leave the others while they still connect their groups
    return str(error.value)


def test_a_balancer_that_cannot_be_called_is_refused_by_initialize() -> None:
    assert all("its signature is (costs, num_stages, start)" in text for text in run(2, refused))
