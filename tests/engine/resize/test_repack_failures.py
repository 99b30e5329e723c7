"""Re-packings that are refused, and ranks that die during one."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ds_dynmo
from ds_dynmo import partitioners
from ds_dynmo.engine.comm import watch
from ds_dynmo.errors import MigrationError, PartitionError, RankLostError
from tests.faults.fault import TIMEOUT_SECONDS, Fault
from tests.support.configs import Case
from tests.support.elastic import losses, train_alone, train_and_repack
from tests.support.harness import run, run_to_the_end
from tests.support.namespaces import network
from tests.support.training import batches, build

pytestmark = pytest.mark.ranks


def fail_on_the_second() -> None:
    if dist.get_rank():
        raise ValueError("no room")


def refusals(case: Case) -> list[str]:
    """Ask for impossible re-packings, which change nothing; go to as many stages, which is a move."""
    engine = build(case)
    data = batches(engine)
    engine.train_batch(data)
    found = []

    for number in (0, 3, -1):
        with pytest.raises(PartitionError) as refused:
            pytest.fail(f"{number} stages: {engine.repack(number)}")
        found.append(str(refused.value))
    for partition in ([0, 0, 8], [0, 9], [0, 2, 4, 6, 8], []):
        with pytest.raises(PartitionError) as refused:
            pytest.fail(f"{partition}: {engine.repack(partition=partition)}")
        found.append(str(refused.value))
    with pytest.raises(MigrationError) as differ:
        engine.repack(dist.get_rank() + 1)  # the ranks ask for different numbers
    engine.before_release(fail_on_the_second)
    with pytest.raises(MigrationError) as failed:
        engine.repack(1)
    assert failed.value.harmless
    assert engine.train_batch(data).item() > 0 and engine.num_stages == 2
    report = engine.repack(partition=[0, 1, 8])
    engine.train_batch(data)
    assert engine.partition == [0, 1, 8] and report.new_partition == (0, 1, 8) and report.layers_moved == 3
    return [*found, str(differ.value), str(failed.value)]


def test_impossible_repackings_are_refused_and_one_to_as_many_stages_is_a_move() -> None:
    remedy = "there are 1 to 2 to go on with; a job that resumes the last checkpoint may have more"
    differ = (
        "ranks differ: repack(1, partition=None) on ranks [0], repack(2, partition=None) on ranks [1]. No layer has"
    )
    failed = "the callbacks of before_release failed on ranks [1], first with ValueError: no room. No layer has moved"
    says = [
        *(f"repack: {count} stages, {remedy}" for count in (0, 3, -1)),
        *(
            "not strictly increasing",
            "from 0 to 8, for 1 stage",
            *["there are 1 to 2 to go on with"] * 2,
            differ,
            failed,
        ),
    ]
    for found in run(2, refusals, Case()):
        for message, expected in zip(found, says, strict=True):
            assert expected in message
        assert found[-1] == failed


def off(case: Case) -> str:
    with pytest.raises(ds_dynmo.ConfigError) as error:
        build(case).repack(1)
    return str(error.value)


def test_switched_off_repacking_is_refused() -> None:
    (message,) = run(1, off, Case(stages=1, dynmo={"enabled": False}))
    assert "dynmo.enabled = false: engine.repack would move layers" in message


def with_little_memory(case: Case, factor: float) -> str:
    """Ask for one stage with ``factor`` of the memory that the whole model needs on one."""
    engine = build(case)
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    whole = sum(cost.static_bytes + 2 * cost.activation_bytes for cost in engine.profile.layers)
    engine.rebalancer.decider.memory.limit = int(factor * whole)
    try:
        engine.repack(1)
    except PartitionError as error:
        engine.train_batch(data)
        return str(error)
    return ""


def test_a_repacking_that_does_not_fit_names_one_that_would() -> None:
    for text in run(3, with_little_memory, Case(stages=3), 0.8):
        assert text.startswith("repack onto 1 stage:") and text.endswith("; 2 stages would do")


def failing(case: Case, place: str, kind: str, rank: int = 2) -> str:
    """Re-pack with a fault on a rank. Return the error."""
    engine = build(case)
    engine.train_batch(batches(engine))
    Fault(rank, 0, place, kind).inject(engine)
    try:
        engine.repack(2, partition=[0, 1, 8])
    except (MigrationError, RankLostError) as error:
        return str(error)
    return "went on"


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.nightly), "bf16 zero1"])
def test_a_rank_that_dies_while_layers_move_is_named(precision: str) -> None:
    case = Case(stages=3, precision=precision, dynmo={"interval": 0, "timeout_seconds": 4.0})
    *left, died = run_to_the_end(3, failing, case, "move: start", "SIGKILL", seconds=60.0)
    assert died.exit_code == -signal.SIGKILL
    for end in left:
        assert end.result.startswith("rank 2 (host ") and "has ended" in end.result


@pytest.mark.nightly
def test_a_rank_that_fails_while_layers_move_is_not_reported_as_dead() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 3.0})
    *others, failed = run(3, failing, case, "move: rebuild", "exception")
    assert "rank 2 failed rebuilding the stage" in failed and "the cable is gone" in failed
    assert not any("has ended" in text for text in [*others, failed]), others


def killed_as_a_world_forms(case: Case, log: str, rank: int) -> str:
    """Lose a rank while torch waits for it, with a time-out of its own, of minutes."""
    watch.logger.error = Path(log).write_text  # type: ignore[method-assign, assignment]
    return failing(case, "re-pack: form groups", "SIGKILL", rank)


@pytest.mark.parametrize(("rank", "name"), [(0, "rank 0"), (2, "rank 1, 2 at the launch (host ")])
def test_a_rank_that_dies_while_a_world_forms_is_named(tmp_path: Path, rank: int, name: str) -> None:
    """It may be noticed by an error of the main thread, whose operation began in the world before."""
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 4.0})
    log = str(tmp_path / "log")
    ends = run_to_the_end(3, killed_as_a_world_forms, case, log, rank, seconds=60.0)
    left, released, died = ends[2 - rank], ends[1], ends[rank]
    assert died.exit_code == -signal.SIGKILL and released.result == "went on"
    said = Path(log).read_text()
    assert said.startswith(name) and "has ended" in said
    assert left.result == said or left.exit_code == 1


@pytest.mark.nightly
def test_a_link_that_is_cut_for_a_while_between_two_worlds_costs_time_only() -> None:
    """A quarter of the time-out: TCP sends again later than that."""
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": TIMEOUT_SECONDS})
    with network(3) as hosts:
        ends = run_to_the_end(
            3, failing, case, "re-pack: begin a world", "link cut for a while", seconds=60.0, hosts=hosts
        )
    assert [(end.result, end.error) for end in ends] == [("went on", "")] * 3


@pytest.mark.nightly
def test_a_rank_that_dies_between_two_worlds_is_named() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 4.0})
    left, _, died = run_to_the_end(3, failing, case, "re-pack: begin a world", "SIGKILL", seconds=60.0)
    assert died.exit_code == -signal.SIGKILL
    assert "ranks [2] (as numbered at the launch) did not come to the new world within 4 s" in left.result


def go_on(case: Case, folder: str) -> dict[str, Any]:
    return train_and_repack(case, {}, 4, folder=folder, first=2)


def test_a_job_that_stops_for_a_restart_says_how_to_resume(tmp_path: Path) -> None:
    block = {"interval": 0, "repack": {"release": "checkpoint", "checkpoint": str(tmp_path)}}
    stopped = run(4, train_and_repack, Case(replicas=2, dynmo=block), {2: [0, 8]}, 4)
    assert all(result["released"] == 2 for result in stopped)
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert launch == {"num_stages": 1, "ranks": 2, "tag": "global_step2", "partition": [0, 8], "step": 2}
    smaller = Case(stages=1, replicas=2)
    resumed, straight = run(2, go_on, smaller, str(tmp_path)), run(2, train_alone, smaller, 4)
    assert losses(stopped) | losses(resumed) == losses(straight)
    two_chunks = {**block, "schedule": "v"}
    run(3, train_and_repack, Case(stages=3, dynmo=two_chunks), {1: [0, 1, 3, 7, 8]}, 2)
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert (launch["num_stages"], launch["ranks"], launch["tag"]) == (2, 2, "global_step1")
    assert (launch["partition"], launch["partition_owners"]) == ([0, 1, 3, 7, 8], [0, 1, 1, 0])


def with_another_balancer(case: Case) -> list[str]:
    """Use a balancer that accepts one number of stages only."""

    @partitioners.register("fails elsewhere")
    def balancer(costs: Sequence[float], num_stages: int, *, start: Sequence[int], memory: Any) -> Sequence[int]:
        if num_stages != case.stages:
            raise RuntimeError("no idea")
        return start

    engine = build(replace(case, dynmo={"interval": 0, "balancer": "fails elsewhere"}))
    data = batches(engine)
    while engine.profile is None:
        engine.train_batch(data)
    try:
        engine.repack(1)
    except MigrationError as error:
        return [str(error), str(error.harmless), str(engine.train_batch(data).item() > 0)]
    return []


def test_a_balancer_that_fails_in_a_repacking_is_an_error_on_all() -> None:
    for text, harmless, trained in run(2, with_another_balancer, Case(stages=2)):
        assert "deciding where layers go failed: RuntimeError: no idea. No layer has moved" in text
        assert (harmless, trained) == ("True", "True")
