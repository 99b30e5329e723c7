"""Fewer ranks and more in mid-run, bitwise as a restart from a checkpoint at the same steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import repack_workloads
from tests.distributed.case_workloads import CASES, CaseRun
from tests.distributed.harness import run
from tests.distributed.workloads import Case

PARK = {"interval": 0, "repack": {"release": "park"}}


def merged(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's state; shards put together."""
    whole: dict[str, Any] = {}
    shards: dict[str, list[tuple[int, bytes]]] = {}
    for result in results:
        own = dict(result["state"])
        for key, part in own.pop("shards", {}).items():
            shards.setdefault(key, []).append(part)
        whole.update(own)
    whole.update({key: b"".join(data for _, data in sorted(set(parts))) for key, parts in shards.items()})
    return whole


def losses(results: list[dict[str, Any]]) -> dict[int, float]:
    """By step; every rank that trained a step has to say the same."""
    found: dict[int, float] = {}
    for result in results:
        for step, loss in result["losses"].items():
            assert found.setdefault(step, loss) == loss
    return found


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("fp32", 1),
        ("bf16 zero1", 2),
        pytest.param("fp32", 2, marks=pytest.mark.fuzz),
        pytest.param("bf16 zero1", 1, marks=pytest.mark.fuzz),
    ],
)
def test_fewer_and_fewer_ranks_train_as_if_restarted_from_checkpoints(
    tmp_path: Path, precision: str, replicas: int
) -> None:
    sizes, steps = {2: 3, 4: 2, 6: 1}, 8
    case = Case(stages=4, replicas=replicas, precision=precision, tied=precision == "fp32", groups="two")
    repacked = run(case.ranks, repack_workloads.train, case, sizes, steps)
    first, expected = 0, {}
    for last, stages in [(2, 4), (4, 3), (6, 2), (8, 1)]:
        smaller = Case(**{**vars(case), "stages": stages})
        end = run(smaller.ranks, repack_workloads.train_through_checkpoint, smaller, str(tmp_path), first, last)
        expected.update(losses(end))
        first = last
    assert losses(repacked) == expected
    assert merged(repacked) == merged(end)


COME_AND_GO = {2: 1, 4: 2, 6: 4}


@pytest.mark.parametrize(
    ("precision", "replicas"),
    [
        ("fp32", 1),
        ("bf16 zero1", 2),
        pytest.param("fp32", 2, marks=pytest.mark.fuzz),
        pytest.param("bf16 zero1", 1, marks=pytest.mark.fuzz),
        pytest.param("bf16", 1, marks=pytest.mark.fuzz),
    ],
)
def test_parked_ranks_come_back(precision: str, replicas: int) -> None:
    """1 -> 2 -> 4 stages: bitwise as if nobody had been away, the learning rates, the data and the draws too."""
    clip = 0.0 if "zero1" in precision else 1.0  # ZeRO sums the norm over its shards, of which there are fewer
    case = Case(
        stages=4,
        replicas=replicas,
        precision=precision,
        tied=True,
        dynmo=PARK,
        groups="two",
        scheduler=True,
        dropout=True,
        clip=clip,
    )
    came_back = run(case.ranks, repack_workloads.train, case, COME_AND_GO, 8)
    stayed = run(case.ranks, repack_workloads.train_alone, case, 8)
    assert losses(came_back) == losses(stayed)
    assert merged(came_back) == merged(stayed)
    assert [r["evaluation"] for r in came_back] == [r["evaluation"] for r in stayed]
    middle = came_back[replicas]
    assert middle["released"] == [2] and len(middle["partition"]) == 5
    assert "was released after step 2" in middle["refused"]
    reports = came_back[0]["reports"]
    assert [(r.old_stages, r.new_stages) for r in reports] == [(4, 1), (1, 2), (2, 4)]
    last_stage = tuple(range(3 * replicas, 4 * replicas))
    assert reports[1].recalled_ranks == last_stage and reports[1].released_ranks == ()
    assert reports[0].released_ranks == tuple(range(replicas, 4 * replicas))


def test_what_was_set_by_hand_meanwhile_is_told_to_a_rank_that_comes_back() -> None:
    """Also to one that gets only a layer without parameters: parameters would have brought their groups' options."""
    case = Case(stages=3, dynmo=PARK, groups="two")
    came_back, stayed = (run(3, repack_workloads.train, case, sizes, 4, 2) for sizes in ({1: 1, 3: [0, 6, 7, 8]}, {}))
    assert [r["rates"] for r in came_back] == [r["rates"] for r in stayed]
    assert merged(came_back) == merged(stayed)


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.fuzz), "bf16 zero1"])
def test_everything_built_once_is_right_afterwards(precision: str) -> None:
    """All plain attributes of engine, module, grid and optimizer are those of an engine built at that size."""
    case = Case(stages=4, precision=precision, dynmo=PARK)
    for sizes, stages in [({1: [0, 4, 8]}, 2), ({1: 1}, 1), ({1: 2, 2: [0, 3, 6, 8]}, 3)]:
        repacked = run(4, repack_workloads.train, case, sizes, 3)
        built = run(stages, repack_workloads.train_alone, Case(stages=stages, precision=precision, dynmo=PARK), 3)
        remaining = [result["attributes"] for result in repacked if result["attributes"]]
        for found, expected in zip(remaining, [result["attributes"] for result in built], strict=True):
            assert {k: v for k, v in found.items() if k not in DIFFER} == {
                k: v for k, v in expected.items() if k not in DIFFER
            }


DIFFER = {"engine.local_rank", "module.local_rank"}  # devices stay
DIFFER |= {"engine._last_move_step", "engine._profile", "engine._tidies_up", "engine.loss", "module.curr_layer"}


def test_other_things_go_on_after_a_repacking() -> None:
    found = [result for result in run(4, repack_workloads.rebalance_after, Case(stages=4)) if result is not None]
    assert len(found) == 2
    assert all(stages == 2 and len(profiled) == 3 and size == 2 for stages, profiled, size in found)


def test_what_cannot_be_asked_for() -> None:
    for found in run(2, repack_workloads.refusals, Case(stages=2)):
        assert all("there are 1 to 2 to go on with" in text for text in found[:3])
        assert "not strictly increasing" in found[3] and "runs from 0 to 9" in found[4]
        assert all("there are 1 to 2 to go on with" in text for text in found[5:7])
        assert "every rank has to ask for the same partition" in found[7]
        assert found[8:] == ["True", "2"]


def test_switched_off() -> None:
    (found, *_) = run(2, repack_workloads.off, Case(stages=2, dynmo={"enabled": False}))
    assert "dynmo.enabled = false: engine.repack would move layers" in found[0]


def test_what_does_not_fit_says_what_would() -> None:
    for text in run(3, repack_workloads.with_little_memory, Case(stages=3), 0.8):
        assert text.startswith("repack onto 1 stages:") and text.endswith("; 2 stages would do")


def test_it_packs_and_spreads_by_itself(tmp_path: Path) -> None:
    """Layers that take a fifth need one stage of four; when they take twice what they took at first, all come back."""
    block = {
        "interval": 0,
        "repack": {"enabled": True, "release": "park", "max_slowdown": 0.1},
        "trace": {
            "path": str(tmp_path / "trace.json"),
            "steps": [1, 12],
        },
    }
    results = run(4, repack_workloads.repack_by_itself, block, [8.0] * 8, {3: 0.2, 8: 10.0}, 12)
    sizes, reports = results[0]
    assert (sizes[3], sizes[5], sizes[12]) == (4, 1, 4)
    assert [(reason, old, new) for _, reason, old, new, _ in reports] == [("pruned", 4, 1), ("pruned", 1, 4)]


def test_a_parked_rank_that_died_is_given_up_and_training_goes_on() -> None:
    case = Case(stages=3, dynmo={**PARK, "timeout_seconds": 4.0})
    at_work, died, parked = run(3, repack_workloads.killed, case, "parked")
    assert died == "parked" and parked == "dismissed"
    assert "ranks [1] (as numbered at the launch) are parked but do not answer" in at_work
    assert at_work.endswith("1 (2,)")


@pytest.mark.parametrize("precision", ["fp32", "bf16 zero1"])
def test_a_rank_that_dies_while_layers_move_is_named(precision: str) -> None:
    case = Case(stages=3, precision=precision, dynmo={"interval": 0, "timeout_seconds": 4.0})
    *left, died = run(3, repack_workloads.killed, case, "sending")
    assert died == "gone"
    for text in left:
        assert "ranks [2] (as numbered at the launch) do not answer any more" in text and "last checkpoint" in text


def test_a_rank_that_fails_while_layers_move_is_not_taken_for_dead() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 3.0})
    *others, failed = run(3, repack_workloads.killed, case, "failing")
    assert "rank 2 failed rebuilding the stage" in failed and "no room" in failed
    assert not any("do not answer" in text for text in [*others, failed]), others


def test_a_rank_that_dies_between_two_worlds_is_named() -> None:
    case = Case(stages=3, dynmo={"interval": 0, "timeout_seconds": 4.0})
    left, _, died = run(3, repack_workloads.killed, case, "at work")
    assert died == "gone"
    assert "ranks [2] (as numbered at the launch) did not come to the new world within 4 s" in left


def test_a_job_that_stops_for_a_restart_says_how_to_go_on(tmp_path: Path) -> None:
    block = {"interval": 0, "repack": {"release": "checkpoint", "checkpoint": str(tmp_path)}}
    case = Case(stages=3, replicas=2, dynmo=block)
    stopped = run(6, repack_workloads.train, case, {2: [0, 3, 8]}, 4)
    assert all(result["released"] == [2] for result in stopped)
    launch = json.loads((tmp_path / "launch.json").read_text())
    assert launch == {
        "num_stages": 2,
        "ranks": 4,
        "tag": "global_step2",
        "partition": [0, 3, 8],
        "step": 2,
        "states": {},
    }
    smaller = Case(stages=2, replicas=2)
    resumed = run(4, repack_workloads.train_through_checkpoint, smaller, str(tmp_path), 2, 4)
    straight = run(6, repack_workloads.train_alone, Case(stages=3, replicas=2), 4)
    assert losses(resumed) == {step: loss for step, loss in losses(straight).items() if step > 2}


@pytest.mark.parametrize(
    "name",
    [
        "automatic freezing",
        "egeria and pruning",
        pytest.param("freezing and pruning", marks=pytest.mark.fuzz),
        pytest.param("egeria", marks=pytest.mark.fuzz),
        pytest.param("moe bias and freezing", marks=pytest.mark.fuzz),
        pytest.param("halves, automatic freezing, pruning and qk-sparse attention", marks=pytest.mark.fuzz),
    ],
)
def test_what_a_rank_kept_for_itself_is_not_lost(name: str) -> None:
    """Gradients that a rank has gathered, a verdict that it waits for, how much it knows to be frozen."""
    case_run = CaseRun(CASES[name], stages=3, dynmo=PARK, steps=6)
    came_back = run(3, repack_workloads.train_case, case_run, {1: 2, 2: 1, 4: 3})
    stayed = run(3, repack_workloads.train_case, case_run, {})
    assert losses(came_back) == losses(stayed)
    assert merged(came_back) == merged(stayed)
    assert came_back[0]["summaries"] == stayed[0]["summaries"]


def test_a_balancer_that_fails_on_one_rank_is_heard_of_on_all() -> None:
    for text, harmless, trained in run(2, repack_workloads.with_another_balancer, Case(stages=2)):
        assert "ranks [1] could not decide where layers go" in text
        assert (harmless, trained) == ("True", "True")


def test_a_partition_of_as_many_stages_is_a_move() -> None:
    for partition, reported, moved in run(2, repack_workloads.same_number, Case(stages=2)):
        assert partition == [0, 1, 8] and reported == (0, 1, 8) and moved == 3
