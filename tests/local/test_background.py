"""Decisions in a process beside training."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from ds_dynmo.config import DynMoConfig, parse_block
from ds_dynmo.config.dynmo import ScheduleConfig
from ds_dynmo.engine.balancing import background
from ds_dynmo.engine.balancing.background import DecisionProcess, searches_long
from ds_dynmo.engine.balancing.ordering import ScheduleChoice
from ds_dynmo.engine.balancing.policy import DecisionInput, decide
from ds_dynmo.errors import PartitionError
from ds_dynmo.partitioners import MemoryModel, registry
from ds_dynmo.placement import Placement
from ds_dynmo.plan import LayerCost, Profile
from ds_dynmo.schedules import schedule_for_equal_costs


@pytest.fixture
def process() -> Iterator[DecisionProcess]:
    made = DecisionProcess()
    yield made
    made.close()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(background.logger, "warning", said.append)
    return said


def call(**memory: Any) -> partial[Any]:
    """A decision about 4 stages, with orders to be found."""
    rng = random.Random(3)
    layers = tuple(
        LayerCost(1, back, 5, 5, 10, 1, 1, input_gradient_seconds=0.6 * back, weight_gradient_seconds=0.45 * back)
        for back in (rng.uniform(1, 3) for _ in range(9))
    )
    profile = Profile(7, Placement.chain((0, 2, 4, 6, 9)), layers, micro_batches=6, batch_seconds=1.0)
    schedules = ScheduleChoice(ScheduleConfig(kind="zero_bubble"), 0, None, schedule_for_equal_costs(4, 6))
    limits = MemoryModel(**memory) if memory else None
    config = parse_block(DynMoConfig, {"min_improvement": 0.0}, "dynmo")
    return partial(decide, DecisionInput(profile.placement, profile, None, schedules), config, limits)


def test_a_process_decides_the_same(process: DecisionProcess) -> None:
    for _ in range(2):
        process.begin(call())
        decision, seconds = process.finish(call())
        assert decision == call()() and decision.schedule is not None
        assert seconds is not None and seconds > 0


def test_it_loads_neither_torch_nor_deepspeed(process: DecisionProcess) -> None:
    process.begin(call())
    process.finish(call())
    loaded = partial(eval, "sorted(__import__('sys').modules)")
    process.begin(loaded)
    names = process.finish(loaded)[0]
    assert "ds_dynmo.partitioners" in names and not {"torch", "deepspeed"} & {*names}


def test_what_a_decision_prints_is_no_answer(process: DecisionProcess) -> None:
    process.begin(partial(print, "a line"))
    assert process.finish(partial(print, "not here"))[0] is None


def test_that_no_partition_fits_is_an_answer(process: DecisionProcess, warnings: list[str]) -> None:
    nothing_fits = call(
        static_bytes=(10,) * 9, activation_bytes=(1,) * 9, input_bytes=(1,) * 9, micro_batches=6, limits=(5,) * 4
    )
    process.begin(nothing_fits)
    with pytest.raises(PartitionError):
        process.finish(nothing_fits)
    process.begin(call())
    assert process.finish(call())[1] is not None and not warnings


@pytest.mark.parametrize("breaks", [partial(os._exit, 1), partial(eval, "1 / 0"), lambda: None])
def test_a_process_that_fails_is_replaced_by_this_one_with_one_warning(
    breaks: Any, process: DecisionProcess, warnings: list[str]
) -> None:
    """It ends; it raises an error; what to calculate cannot be sent."""
    process.begin(breaks)
    for _ in range(2):
        assert process.finish(call()) == (call()(), None)
        process.begin(call())
    assert len(warnings) == 1


def test_a_calculation_that_is_of_no_use_is_ended(process: DecisionProcess) -> None:
    process.begin(partial(eval, "__import__('time').sleep(3600)"))
    before = process._process
    process.close()
    assert before is not None and before.returncode == -signal.SIGKILL
    process.begin(call())
    assert process.finish(call())[1] is not None


RANK = """
import sys, time
from functools import partial
from ds_dynmo.engine.balancing.background import DecisionProcess
process = DecisionProcess()
process.begin(partial(eval, "print('begun', flush=True) or __import__('time').sleep(3600)"))
sys.stdin.read()
"""


def test_it_ends_with_a_rank_that_is_killed_also_in_the_middle_of_a_calculation() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", RANK], **pipes) as rank:  # type: ignore[call-overload]
        assert any("begun" in line for line in rank.stdout)
        rank.kill()
        assert "Error" not in rank.stdout.read()  # its end: nobody has it open for writing any more


def test_what_takes_long_depends_on_passes_and_on_whose_the_balancer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not searches_long("makespan", 4, 8) and searches_long("makespan", 8, 16)
    assert not searches_long("partition", 8, 16) and searches_long("partition", 24, 48)
    assert searches_long("partition", 8, 16, back_to_back=True)

    monkeypatch.setattr(registry, "_BALANCERS", dict(registry._BALANCERS))

    @registry.register("of the user's own")
    def stay(costs: Any, num_stages: int, *, start: Any, memory: Any) -> Any:
        return start

    assert not searches_long("of the user's own", 24, 48)
